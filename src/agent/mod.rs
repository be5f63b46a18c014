//! The agent as a whole: everything is bound, then everything runs, then everything is shut down in order.

mod engine;
mod error;
mod files;
mod listing;
mod members;
pub mod parity;
mod polls;
mod settle;

pub use error::AgentError;

use crate::{
    admin::Admin,
    client::Access,
    config::{self, Config, PolicyName, ReplicaSource},
    events::{Subscriber, SubscriberConfig},
    hash::HashKey,
    hub::Manifest,
    lifecycle::LogReceiver,
    metrics::{self, LogMetrics, SocketMetrics, SpopMetrics},
    pool::{EventSink, FeedKey, Pool, Watch},
    replica::RuntimeSocket,
    route::{RouteHandler, Router, Workers},
    select::{CostConfig, DynamoConfig, Policy, Scheduler, SchedulerConfig},
    spop::{ListenAddr, Server, ServerConfig},
};
use files::Budget;
use members::{Common, Members};
use metrics_exporter_prometheus::PrometheusHandle;
use polls::ServerPolls;
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
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

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
    subscriber: Arc<Subscriber<FeedKey>>,
    tasks: TaskTracker,
    /// Ends the tasks: at the latest with the agent.
    late: DropGuard,
    recorder: PrometheusHandle,
    session_header: String,
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
        let budget = Budget::new(config.spop.max_connections, listed_ranks(config));
        let spop_config = ServerConfig {
            max_frame_size: config.spop.max_frame_bytes,
            max_payload_bytes: 2 * config.spop.max_frame_bytes as usize,
            max_in_flight: config.spop.max_in_flight,
            max_in_flight_bytes: config.spop.max_bytes_in_flight,
            max_connections: budget.connections,
            deadline: config.spop.deadline,
            ..ServerConfig::default()
        };
        let spop = Server::bind(&config.spop.listen, spop_config, SpopMetrics::register())?;
        let log = LogReceiver::bind(&config.log_listen, LogMetrics::register())?;
        let admin = Admin::bind(&config.admin_listen)
            .await
            .map_err(|source| AgentError::Admin { addr: config.admin_listen.clone(), source })?;
        let sink = EventSink::new(pools.clone());
        let subscriber = Subscriber::spawn(SubscriberConfig::new(key), sink).map_err(AgentError::Runtime)?;
        let subscriber = Arc::new(subscriber);
        let (late, tasks) = (CancellationToken::new(), TaskTracker::new());
        let common = Common {
            subscriber: Arc::clone(&subscriber),
            engine_poll: config.engine_poll,
            room: Arc::new(budget.ranks.into()),
            tasks: tasks.clone(),
            stop: late.clone(),
        };
        let late = late.drop_guard();
        let members = (0u16..)
            .zip(pools.iter().zip(&config.pools))
            .map(|(place, (pool, of_pool))| Members::start(Arc::clone(pool), place, of_pool, common.clone()));
        let members: Vec<Arc<Members>> = members.collect::<Result<_, _>>()?;
        for (members, of_pool) in members.iter().zip(&config.pools) {
            if let ReplicaSource::File(path) = &of_pool.source {
                let following = listing::follow(Arc::clone(members), path.clone());
                tasks.spawn(common.stop.clone().run_until_cancelled_owned(following));
            }
        }
        let workers = Workers::new(config.prompt.threads, config.prompt.queue);
        let router = Arc::new(Router::new(&pools, workers, config.prompt.inline_bytes, config.spop.deadline));
        let changed = Arc::new(Notify::new());
        let servers = config.haproxy.socket.clone().map(|socket| ServerPolls {
            socket: RuntimeSocket::new(socket),
            period: config.haproxy.poll,
            pools: members,
            changed: Arc::clone(&changed),
            metrics: SocketMetrics::register(),
        });
        Ok(Self {
            router,
            pools,
            spop,
            admin,
            log,
            changed,
            servers,
            subscriber,
            tasks,
            late,
            recorder,
            session_header: config.haproxy.session_header.clone(),
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
        let tasks = self.tasks;
        let settle = Settle::new(&self.pools, self.changed);
        // The log must be read until the last answer is out: its bookings end there.
        let late = self.late.disarm();
        tasks.spawn(late.clone().run_until_cancelled_owned(async move {
            let Err(error) = self.log.run(move |line| settle.line(line)).await;
            tracing::error!(%error, "log lines are no longer received: bookings end by their lease alone");
        }));
        tasks.spawn(late.clone().run_until_cancelled_owned(tick(self.pools.clone())));
        if let Some(servers) = self.servers {
            tasks.spawn(late.clone().run_until_cancelled_owned(servers.run()));
        }
        let session_header = self.session_header;
        tasks.spawn(self.admin.serve(Arc::clone(&self.router), self.recorder, session_header, stop.clone()));
        let served = self.spop.serve(RouteHandler(Arc::clone(&self.router)), stop).await;
        late.cancel();
        tasks.close();
        tasks.wait().await;
        // The tasks had the others.
        if let Some(subscriber) = Arc::into_inner(self.subscriber) {
            subscriber.stop();
        }
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

/// Checks what a configuration names without binding anything: model directories, certificates, keys.
///
/// # Errors
/// [`AgentError::Model`], [`AgentError::Access`].
pub fn check(config: &Config) -> Result<(), AgentError> {
    for pool in &config.pools {
        Access::load(&pool.http)
            .map_err(|source| AgentError::Access { pool: pool.backend.clone(), source })?;
    }
    load_pools(config, &HashKey::random()).map(|_| ())
}

fn load_pools(config: &Config, key: &HashKey) -> Result<Vec<Arc<Pool>>, AgentError> {
    let mut seeds = config.select.seed.map_or_else(fastrand::Rng::new, fastrand::Rng::with_seed);
    config
        .pools
        .iter()
        .map(|pool| {
            let model = pool.model.clone().or_else(|| fetched_model(pool));
            let pool = &config::Pool { model, ..pool.clone() };
            let scheduler =
                Scheduler::new(policy(config.select.policy), scheduler_config(config), seeds.u64(..));
            Pool::new(pool, key, config.index_max_bytes, scheduler, config.haproxy.poll, config.engine_poll)
                .map(Arc::new)
                .map_err(|source| AgentError::Model { place: pool.place.clone(), source })
        })
        .collect()
}

/// The name by which `kvspoa model fetch` brought the pool's model.
fn fetched_model(pool: &config::Pool) -> Option<String> {
    Manifest::load(pool.model_dir.as_deref()?).ok().map(|manifest| manifest.model)
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

/// How many ranks there can be; `None` where replicas come and go.
fn listed_ranks(config: &Config) -> Option<usize> {
    let of_pool = |pool: &config::Pool| {
        let told = pool.replicas.iter().all(|replica| !replica.ranks.is_empty() || replica.http.is_none());
        let ranks = pool.replicas.iter().map(|replica| replica.ranks.len().max(1));
        (pool.source == ReplicaSource::Listed && told).then(|| ranks.sum::<usize>())
    };
    config.pools.iter().map(of_pool).sum()
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
