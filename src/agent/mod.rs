//! The agent as a whole: everything is bound, then everything runs, then everything is shut down in order.

mod error;
mod files;
mod models;
mod polls;
mod settle;

pub use error::AgentError;

use crate::{
    admin::Admin,
    config::{Config, PolicyName},
    events::{Feed, Subscriber, SubscriberConfig},
    hash::HashKey,
    lifecycle::LogReceiver,
    metrics::{self, LogMetrics, SocketMetrics, SpopMetrics},
    pool::{EventSink, FeedKey, Pool, Watch},
    replica::RuntimeSocket,
    route::{RouteHandler, Router, Workers},
    select::{CostConfig, DynamoConfig, Policy, Scheduler, SchedulerConfig},
    spop::{ListenAddr, Server, ServerConfig},
};
use metrics_exporter_prometheus::PrometheusHandle;
use models::ModelLists;
use polls::{EnginePolls, ServerPolls};
use settle::Settle;
use std::{
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::Notify,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// How often the scheduler looks at what only the clock can tell.
const TICK: Duration = Duration::from_secs(1);

/// An agent whose sockets are bound and whose models are loaded.
#[derive(Debug)]
pub struct Agent {
    router: Arc<Router>,
    pools: Vec<Arc<Pool>>,
    spop: Server,
    admin: Admin,
    log: LogReceiver,
    /// Told when HAProxy's log tells of a server.
    changed: Arc<Notify>,
    servers: Option<ServerPolls>,
    engines: Vec<EnginePolls>,
    subscriber: Subscriber<FeedKey>,
    model_lists: ModelLists,
    recorder: PrometheusHandle,
}

impl Agent {
    /// Loads the models, binds every socket and subscribes to the KV events. HAProxy can connect from here on and is
    /// answered once [`Agent::serve`] runs.
    ///
    /// # Errors
    /// [`AgentError`]: nothing is left running.
    pub async fn start(config: &Config) -> Result<Self, AgentError> {
        let recorder = metrics::install()?;
        let key = HashKey::random();
        let pools = load_pools(config, &key)?;
        let spop_config = ServerConfig {
            max_frame_size: config.spop.max_frame_bytes,
            max_payload_bytes: 2 * config.spop.max_frame_bytes as usize,
            max_in_flight: config.spop.max_in_flight,
            max_in_flight_bytes: config.spop.max_bytes_in_flight,
            max_connections: files::max_connections(
                config.spop.max_connections,
                pools.iter().map(|pool| pool.ranks.len()).sum(),
            ),
            deadline: config.spop.deadline,
            ..ServerConfig::default()
        };
        let spop = Server::bind(&config.spop.listen, spop_config, SpopMetrics::register())?;
        let log = LogReceiver::bind(&config.log_listen, LogMetrics::register())?;
        let admin = Admin::bind(&config.admin_listen)
            .await
            .map_err(|source| AgentError::Admin { addr: config.admin_listen.clone(), source })?;
        let subscriber = subscribe(&pools, key)?;
        let workers = Workers::new(config.prompt.threads, config.prompt.queue);
        let router = Arc::new(Router::new(&pools, workers, config.prompt.inline_bytes, config.spop.deadline));
        let model_lists = ModelLists::new(config, &pools);
        let changed = Arc::new(Notify::new());
        let servers = config.haproxy.socket.clone().map(|socket| ServerPolls {
            socket: RuntimeSocket::new(socket),
            period: config.haproxy.poll,
            pools: pools.clone(),
            changed: Arc::clone(&changed),
            metrics: SocketMetrics::register(),
        });
        let replicas = pools.iter().zip(&config.pools);
        let engines = replicas
            .flat_map(|(pool, of)| EnginePolls::of_pool(pool, &of.replicas, config.engine_poll))
            .collect();
        Ok(Self {
            router,
            pools,
            spop,
            admin,
            log,
            changed,
            servers,
            engines,
            subscriber,
            model_lists,
            recorder,
        })
    }

    /// Where HAProxy connects.
    #[must_use]
    pub const fn spop_addr(&self) -> &ListenAddr {
        self.spop.local_addr()
    }

    /// Where metrics, health and explanations are.
    ///
    /// # Errors
    /// The operating system's.
    pub fn admin_addr(&self) -> io::Result<SocketAddr> {
        self.admin.local_addr()
    }

    /// Serves until `stop`, then shuts down: HAProxy is told first, what is being decided is finished, and the events
    /// thread is joined.
    ///
    /// # Errors
    /// A socket could not be registered with the runtime.
    pub async fn serve(self, stop: CancellationToken) -> io::Result<()> {
        let tasks = TaskTracker::new();
        let settle = Settle::new(&self.pools, self.changed);
        // The log must be read until the last answer is out: its bookings end there.
        let late = CancellationToken::new();
        tasks.spawn(late.clone().run_until_cancelled_owned(async move {
            let Err(error) = self.log.run(move |line| settle.line(line)).await;
            tracing::error!(%error, "log lines are no longer received: bookings end by their lease alone");
        }));
        tasks.spawn(late.clone().run_until_cancelled_owned(tick(self.pools.clone())));
        tasks.spawn(late.clone().run_until_cancelled_owned(self.model_lists.follow()));
        if let Some(servers) = self.servers {
            tasks.spawn(late.clone().run_until_cancelled_owned(servers.run()));
        }
        for engine in self.engines {
            tasks.spawn(late.clone().run_until_cancelled_owned(engine.run()));
        }
        tasks.spawn(self.admin.serve(Arc::clone(&self.router), self.recorder, stop.clone()));
        let served = self.spop.serve(RouteHandler(Arc::clone(&self.router)), stop).await;
        late.cancel();
        tasks.close();
        tasks.wait().await;
        self.subscriber.stop();
        served
    }
}

/// Runs the agent until SIGTERM or SIGINT.
///
/// # Errors
/// It did not start, or a socket failed.
pub fn run(config: &Config) -> Result<(), AgentError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .worker_threads(network_threads())
        .max_blocking_threads(config.prompt.threads + SPARE_BLOCKING_THREADS)
        .build()
        .map_err(AgentError::Runtime)?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).map_err(AgentError::Runtime)?;
        let agent = Agent::start(config).await?;
        tracing::info!(
            spop = %agent.spop_addr(),
            admin = %config.admin_listen,
            log = %config.log_listen,
            pools = config.pools.len(),
            version = env!("CARGO_PKG_VERSION"),
            "kvspoa is ready for HAProxy"
        );
        let stop = CancellationToken::new();
        let stopper = stop.clone();
        tokio::spawn(async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = tokio::signal::ctrl_c() => {}
            }
            tracing::info!("stopping");
            stopper.cancel();
        });
        agent.serve(stop).await.map_err(AgentError::Runtime)
    })
}

/// At least two, on a single core too: a short prompt is tokenized on the thread that reads its connection, and sockets
/// must be served meanwhile.
#[must_use]
pub fn network_threads() -> usize {
    std::thread::available_parallelism().map_or(2, |cores| cores.get().max(2))
}

/// tokio resolves host names on blocking threads too.
const SPARE_BLOCKING_THREADS: usize = 4;

/// Checks what a configuration names without binding anything: the model directories.
///
/// # Errors
/// [`AgentError::Model`].
pub fn check(config: &Config) -> Result<(), AgentError> {
    load_pools(config, &HashKey::random()).map(|_| ())
}

fn load_pools(config: &Config, key: &HashKey) -> Result<Vec<Arc<Pool>>, AgentError> {
    let mut seeds = config.select.seed.map_or_else(fastrand::Rng::new, fastrand::Rng::with_seed);
    config
        .pools
        .iter()
        .map(|pool| {
            let scheduler =
                Scheduler::new(policy(config.select.policy), scheduler_config(config), seeds.u64(..));
            Pool::new(pool, key, config.index_max_bytes, scheduler, config.haproxy.poll, config.engine_poll)
                .map(Arc::new)
                .map_err(|source| AgentError::Model { place: pool.place.clone(), source })
        })
        .collect()
}

fn policy(name: PolicyName) -> Policy {
    match name {
        PolicyName::Cost => Policy::Cost(CostConfig::default()),
        PolicyName::Dynamo => Policy::Dynamo(DynamoConfig::default()),
        PolicyName::LeastLoaded => Policy::LeastLoaded,
        PolicyName::RoundRobin => Policy::RoundRobin,
    }
}

fn scheduler_config(config: &Config) -> SchedulerConfig {
    SchedulerConfig {
        lease: config.select.lease,
        follow_answers: config.select.decode_progress,
        ..SchedulerConfig::default()
    }
}

/// Subscribes to the KV events of every rank that publishes any.
fn subscribe(pools: &[Arc<Pool>], key: HashKey) -> Result<Subscriber<FeedKey>, AgentError> {
    let subscriber = Subscriber::spawn(SubscriberConfig::new(key), EventSink::new(pools.to_vec()))
        .map_err(AgentError::Runtime)?;
    for (pool, place) in pools.iter().zip(0u16..) {
        for ((id, rank), labels) in pool.rank_ids().zip(&pool.ranks).zip(pool.labels()) {
            let Some(events) = &rank.feed.events else { continue };
            let feed = Feed {
                key: FeedKey { pool: place, rank: id },
                labels,
                events: events.to_string(),
                replay: rank.feed.replay.as_ref().map(ToString::to_string),
            };
            subscriber.add(feed).map_err(|source| AgentError::Events {
                pool: pool.backend.clone(),
                server: rank.server.to_string(),
                source,
            })?;
        }
    }
    Ok(subscriber)
}

async fn tick(pools: Vec<Arc<Pool>>) {
    let mut ticks = tokio::time::interval(TICK);
    let mut watches: Vec<Watch> = pools.iter().map(|_| Watch::default()).collect();
    loop {
        ticks.tick().await;
        for (pool, watch) in pools.iter().zip(&mut watches) {
            let now = Instant::now();
            watch.look(pool, now);
            // What HAProxy said may have gone out of date.
            pool.sync_open(now);
            pool.move_strays(now);
            let expired = pool.scheduler.lock().tick(now);
            if expired > 0 {
                tracing::warn!(
                    pool = pool.backend,
                    expired,
                    "bookings outlived their lease: do HAProxy's log lines arrive?"
                );
            }
        }
    }
}
