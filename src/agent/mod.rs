//! The agent as a whole: everything is bound, then everything runs, then everything is shut down in order.

mod engine;
mod error;
mod files;
mod fleet;
mod listing;
mod members;
mod memory;
pub mod parity;
mod peers;
mod polls;
mod reload;
mod rendering;
mod service;
mod settle;
mod watched;

pub use error::AgentError;
pub use memory::memory_bounds;

use crate::{
    admin::Admin,
    config::{Config, ConfigFile, Loaded},
    events::{Subscriber, SubscriberConfig},
    lifecycle::LogReceiver,
    metrics::{self, LogMetrics, SpopMetrics},
    pool::{EventSink, FeedKey, PoolId, Pools, Watch},
    pulse::{self, Pulse},
    record::Recording,
    route::{RouteHandler, Router},
    spop::{ListenAddr, Server},
};
use files::Room;
use fleet::{Fleet, Maker};
use members::Common;
use metrics_exporter_prometheus::PrometheusHandle;
use peers::Peers;
use reload::Reloads;
use service::Pulses;
use settle::Settle;
use std::{collections::HashMap, io, net::SocketAddr, sync::Arc, time::Instant};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

/// An agent whose sockets are bound and whose models are loaded.
#[derive(Debug)]
pub struct Agent {
    router: Arc<Router>,
    pools: Arc<Pools>,
    fleet: Fleet,
    spop: Server,
    admin: Admin,
    log: LogReceiver,
    peers: Option<Peers>,
    subscriber: Arc<Subscriber<FeedKey>>,
    pulses: Pulses,
    tasks: TaskTracker,
    /// Ends the tasks: at the latest with the agent.
    late: DropGuard,
    recorder: PrometheusHandle,
    session_header: String,
    recording: Option<Recording>,
}

/// The configuration file that an agent follows while it serves.
#[derive(Debug)]
struct Followed {
    file: ConfigFile,
    /// What was read of it at the start.
    text: String,
    /// Tells to read it again.
    hangup: Signal,
}

impl Agent {
    /// Loads the models, binds every socket and subscribes to the KV events. HAProxy can connect from here on and is
    /// answered once [`Agent::serve`] runs.
    ///
    /// # Errors
    /// [`AgentError`]: nothing is left running.
    pub async fn start(config: &Config) -> Result<Self, AgentError> {
        let recorder = metrics::install()?;
        let mut maker = Maker::new(config)?;
        let pools = Arc::new(Pools::default());
        let plan = maker.prepare(config, &pools)?;
        let budget = fleet::budget(config);
        budget.tell(config.spop.max_connections);
        let spop_config = fleet::spop_config(config, budget);
        let spop = Server::bind(&config.spop.listen, spop_config, SpopMetrics::register())?;
        let log = LogReceiver::bind(&config.log_listen, LogMetrics::register())?;
        let admin = Admin::bind(&config.admin_listen)
            .await
            .map_err(|source| AgentError::Admin { addr: config.admin_listen.clone(), source })?;
        let peers = Peers::start(&config.peers, maker.outbox().clone()).await?;
        let sink = EventSink::new(Arc::clone(&pools));
        let pulses =
            Pulses { spop: spop.pulse(), events: sink.pulse(), pools: Arc::new(Pulse::new(Instant::now())) };
        let subscriber = Subscriber::spawn(SubscriberConfig::new(maker.key().clone()), sink)
            .map_err(AgentError::Runtime)?;
        let subscriber = Arc::new(subscriber);
        let (late, tasks) = (CancellationToken::new(), TaskTracker::new());
        let common = Common {
            subscriber: Arc::clone(&subscriber),
            room: Arc::new(Room::new(budget.ranks)),
            tasks: tasks.clone(),
            stop: late.clone(),
        };
        let late = late.drop_guard();
        let recording = Recording::start(&config.record).map_err(|source| AgentError::Record {
            path: config.record.file.clone().unwrap_or_default(),
            source,
        })?;
        let recorder_of_decisions = recording.as_ref().map(|recording| recording.recorder().clone());
        let router = Router::new(Arc::clone(&pools), fleet::route_limits(config));
        let router = Arc::new(router.recorded_by(recorder_of_decisions));
        let fleet =
            Fleet::start(plan, maker, Arc::clone(&pools), common, Arc::clone(&router), spop.limits())?;
        Ok(Self {
            router,
            pools,
            fleet,
            spop,
            admin,
            log,
            peers,
            subscriber,
            pulses,
            tasks,
            late,
            recorder,
            session_header: config.haproxy.session_header.clone(),
            recording,
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
        self.serve_following(None, stop).await
    }

    async fn serve_following(
        mut self,
        followed: Option<Followed>,
        stop: CancellationToken,
    ) -> io::Result<()> {
        let tasks = self.tasks;
        let recorder = self.router.recorder().cloned();
        let settle = Settle::new(Arc::clone(&self.pools), self.fleet.changed(), recorder);
        // The log must be read until the last answer is out: its bookings end there.
        let late = self.late.disarm();
        let until_late = |task| tasks.spawn(late.clone().run_until_cancelled_owned(task));
        tasks.spawn(late.clone().run_until_cancelled_owned(async move {
            let Err(error) = self.log.run(move |line| settle.line(line)).await;
            tracing::error!(%error, "log lines are no longer received: bookings end by their lease alone");
        }));
        if let Some(peers) = self.peers {
            peers.run(&self.pools, &tasks, &late);
        }
        until_late(tick(self.pools, Arc::clone(&self.pulses.pools)));
        tasks.spawn(late.clone().run_until_cancelled_owned(service::feed_watchdog(self.pulses)));
        self.fleet.poll_haproxy();
        let router = Arc::clone(&self.router);
        let fleet = match followed {
            None => Some(self.fleet),
            Some(Followed { file, text, hangup }) => {
                let reloads = Reloads::new(file, text, hangup, self.fleet, router);
                // No more is reloaded once the shutdown has begun.
                tasks.spawn(stop.clone().run_until_cancelled_owned(reloads.run()));
                None
            }
        };
        let session_header = self.session_header;
        tasks.spawn(self.admin.serve(Arc::clone(&self.router), self.recorder, session_header, stop.clone()));
        let served = self.spop.serve(RouteHandler(self.router), stop).await;
        late.cancel();
        drop(fleet);
        tasks.close();
        tasks.wait().await;
        // The tasks had the others.
        if let Some(subscriber) = Arc::into_inner(self.subscriber) {
            subscriber.stop();
        }
        if let Some(recording) = self.recording {
            recording.stop();
        }
        served
    }
}

/// Runs the agent by a configuration file, which is followed, until SIGTERM or SIGINT.
///
/// # Errors
/// It did not start, or a socket failed.
pub fn run(file: ConfigFile) -> Result<(), AgentError> {
    let text = file.read()?;
    let config = taken(file.parse(&text)?);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .worker_threads(network_threads())
        .max_blocking_threads(config.prompt.threads + SPARE_BLOCKING_THREADS)
        .build()
        .map_err(AgentError::Runtime)?;
    let served = runtime.block_on(async {
        // Before anything that takes time: a signal's default is to end the process.
        let on = |kind| signal(kind).map_err(AgentError::Runtime);
        let ends = [on(SignalKind::terminate())?, on(SignalKind::interrupt())?];
        let hangup = on(SignalKind::hangup())?;
        let agent = Agent::start(&config).await?;
        tracing::info!(
            spop = %agent.spop_addr(),
            admin = %config.admin_listen,
            log = %config.log_listen,
            pools = config.pools.len(),
            version = env!("CARGO_PKG_VERSION"),
            "kvspoa is ready for HAProxy"
        );
        service::ready(&reload::status(config.pools.len()));
        let stop = CancellationToken::new();
        tokio::spawn(stop_at_signal(ends, stop.clone()));
        let followed = Followed { file, text, hangup };
        agent.serve_following(Some(followed), stop).await.map_err(AgentError::Runtime)
    });
    // A file system or a name server that hangs must not hold up the end.
    runtime.shutdown_background();
    served
}

/// The first signal begins the shutdown, a second one ends the process at once.
async fn stop_at_signal([mut terminate, mut interrupt]: [Signal; 2], stop: CancellationToken) {
    let mut next = async || {
        tokio::select! {
            _ = terminate.recv() => SignalKind::terminate(),
            _ = interrupt.recv() => SignalKind::interrupt(),
        }
    };
    next().await;
    tracing::info!("stopping: requests in flight are finished; a second signal ends at once");
    service::stopping();
    stop.cancel();
    let signal = next().await.as_raw_value();
    tracing::warn!("ended by a second signal");
    // As a shell tells of a process that a signal has ended.
    std::process::exit(128 + signal);
}

/// Tells of what may be a mistake.
fn taken(Loaded { config, warnings, .. }: Loaded) -> Config {
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    config
}

/// At least two, on a single core too: a short prompt is tokenized on the thread that reads its connection, and sockets
/// must be served meanwhile.
#[must_use]
pub fn network_threads() -> usize {
    std::thread::available_parallelism().map_or(2, |cores| cores.get().max(2))
}

/// tokio resolves host names and looks at files on blocking threads too; a reload loads models on one.
const SPARE_BLOCKING_THREADS: usize = 4;

/// Checks what a configuration names without binding anything: model directories, certificates, keys.
///
/// # Errors
/// [`AgentError::Model`], [`AgentError::Access`].
pub fn check(config: &Config) -> Result<(), AgentError> {
    Maker::new(config)?.prepare(config, &Pools::default()).map(drop)
}

/// Looks every second at what only the clock can tell.
async fn tick(pools: Arc<Pools>, pulse: Arc<Pulse>) {
    let mut ticks = tokio::time::interval(pulse::PERIOD);
    let mut watches: HashMap<PoolId, Watch> = HashMap::new();
    loop {
        ticks.tick().await;
        let table = pools.table();
        watches.retain(|id, _| table.iter().any(|pool| pool.id == *id));
        for pool in table.iter() {
            let now = Instant::now();
            watches.entry(pool.id).or_default().look(pool, now);
            // What HAProxy said may have gone out of date.
            pool.sync_open(now);
            pool.move_strays(now);
            pool.place_found(now);
            let expired = pool.scheduler.lock().tick(now);
            if expired > 0 {
                tracing::warn!(
                    pool = pool.backend,
                    expired,
                    "bookings outlived their lease: do HAProxy's log lines arrive?"
                );
            }
        }
        pulse.beat(Instant::now());
    }
}
