//! All pools with their members, as the configuration has them; and how they become what another one says, at work.
//!
//! What takes long or may fail is prepared apart from the pools; then everything changes in one step that cannot fail.
//! Whoever has a pool in hand at that moment keeps it until he is done.

use super::{
    AgentError,
    files::Budget,
    members::{Common, Members},
    peers,
    polls::ServerPolls,
};
use crate::{
    client::Access,
    config::{self, Config, PolicyName, ReplicaSource},
    hash::HashKey,
    hub::Manifest,
    metrics::SocketMetrics,
    peers::Outbox,
    pool::{Pool, PoolSettings, Pools, Renderers, Replaced},
    prompt::ModelError,
    replica::RuntimeSocket,
    route::{RouteLimits, Router, Workers},
    select::{CostConfig, Policy, Scheduler, SchedulerConfig},
    spop::{ServerConfig, ServerLimits},
};
use arc_swap::ArcSwap;
use std::{io, sync::Arc, time::Duration};
use tokio::sync::{Notify, oneshot};
use tokio_util::sync::CancellationToken;

/// How often it is looked whether a pool that was taken away is still in use.
const IN_USE: Duration = Duration::from_millis(50);

/// The pools and what follows them.
#[derive(Debug)]
pub(super) struct Fleet {
    /// The configuration in force.
    config: Config,
    pools: Arc<Pools>,
    members: Arc<ArcSwap<Vec<Arc<Members>>>>,
    maker: Maker,
    common: Common,
    router: Arc<Router>,
    spop: ServerLimits,
    /// Told when HAProxy's log tells of a server.
    changed: Arc<Notify>,
    /// Ends the polls of HAProxy.
    polls: Option<CancellationToken>,
}

/// Makes pools.
#[derive(Clone, Debug)]
pub(super) struct Maker {
    key: HashKey,
    /// Where the pools leave what peers are to be told.
    outbox: Outbox,
    seeds: fastrand::Rng,
}

/// One pool, ready to work.
#[derive(Debug)]
struct Prepared {
    config: config::Pool,
    access: Access,
    made: Made,
}

impl Prepared {
    fn pool(&self) -> Arc<Pool> {
        let (Made::New(pool) | Made::Kept(pool, _)) = &self.made;
        Arc::clone(pool)
    }
}

#[derive(Debug)]
enum Made {
    New(Arc<Pool>),
    /// One that works already, and what it is to render with.
    Kept(Arc<Pool>, Renderers),
}

/// All that another configuration needs.
#[derive(Debug)]
pub(super) struct Plan {
    config: Config,
    pools: Vec<Prepared>,
}

/// What became of it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Applied {
    pub(super) added: Vec<String>,
    pub(super) removed: Vec<String>,
    /// Those of which the configuration says something else than before.
    pub(super) changed: Vec<String>,
    /// Those whose prompts are made by other models or templates than before, or other files of the same name.
    pub(super) rendered: Vec<String>,
    /// Whether there are replicas that could not join; each was warned of.
    pub(super) could_not_join: bool,
}

impl Maker {
    /// The key of all hashes is new, or the peers'; chance comes by the configuration's seed.
    ///
    /// # Errors
    /// [`AgentError::Secret`].
    pub(super) fn new(config: &Config) -> Result<Self, AgentError> {
        let seeds = config.select.seed.map_or_else(fastrand::Rng::new, fastrand::Rng::with_seed);
        let key = peers::secret(&config.peers)?.map_or_else(HashKey::random, |secret| secret.hash_key());
        Ok(Self { key, outbox: Outbox::new(), seeds })
    }

    pub(super) const fn outbox(&self) -> &Outbox {
        &self.outbox
    }

    pub(super) const fn key(&self) -> &HashKey {
        &self.key
    }

    /// Loads what the configuration names: models, certificates, keys. Nothing is bound. Pools that work already are not
    /// made again, and keep their models where nothing of these has changed.
    ///
    /// # Errors
    /// [`AgentError::Model`], [`AgentError::Access`].
    pub(super) fn prepare(&mut self, config: &Config, running: &Pools) -> Result<Plan, AgentError> {
        let mut config = config.clone();
        for pool in &mut config.pools {
            pool.model = pool.model.take().or_else(|| fetched_model(pool));
        }
        let settings = settings(&config);
        let prepare = |pool: &config::Pool| {
            let access = Access::load(&pool.http)
                .map_err(|source| AgentError::Access { pool: pool.backend.clone(), source })?;
            let made = match running.of_backend(&pool.backend) {
                Some(running) => running.load_renderers(pool).map(|renderers| Made::Kept(running, renderers)),
                None => self.make(pool, &settings).map(|pool| Made::New(Arc::new(pool))),
            };
            let made = made.map_err(|source| AgentError::Model { place: pool.place.clone(), source })?;
            Ok(Prepared { config: pool.clone(), access, made })
        };
        let pools = config.pools.iter().map(prepare).collect::<Result<_, AgentError>>()?;
        Ok(Plan { config, pools })
    }

    fn make(&mut self, pool: &config::Pool, settings: &PoolSettings) -> Result<Pool, ModelError> {
        let scheduler = Scheduler::new(settings.policy, settings.scheduler, self.seeds.u64(..));
        let PoolSettings { index_max_bytes, haproxy_poll, engine_poll, .. } = *settings;
        let outbox = self.outbox.of_pool(&pool.backend);
        let made = Pool::new(pool, &self.key, index_max_bytes, scheduler, haproxy_poll, engine_poll)?;
        Ok(made.telling(outbox))
    }
}

impl Plan {
    /// What is in force once it is applied.
    pub(super) const fn config(&self) -> &Config {
        &self.config
    }
}

impl Fleet {
    /// Starts with a first plan.
    ///
    /// # Errors
    /// [`AgentError::Events`], [`AgentError::Full`]: a replica that the configuration lists can't join.
    pub(super) fn start(
        plan: Plan,
        maker: Maker,
        pools: Arc<Pools>,
        common: Common,
        router: Arc<Router>,
        spop: ServerLimits,
    ) -> Result<Self, AgentError> {
        // Before anything is subscribed to: the events' thread finds pools by this table, and drops what is of no pool.
        pools.set(plan.pools.iter().map(Prepared::pool).collect());
        let mut members = Vec::new();
        for Prepared { config, access, made } in plan.pools {
            let (Made::New(pool) | Made::Kept(pool, _)) = made;
            let engine = plan.config.engine;
            let (of_pool, failed) = Members::start(pool, &config, access, engine, common.clone());
            if let Some(error) = failed {
                return Err(error);
            }
            members.push(of_pool);
        }
        Ok(Self {
            config: plan.config,
            pools,
            members: Arc::new(ArcSwap::from_pointee(members)),
            maker,
            common,
            router,
            spop,
            changed: Arc::default(),
            polls: None,
        })
    }

    /// Told when HAProxy's log tells of a server: wakes who asks for the servers' states.
    pub(super) fn changed(&self) -> Arc<Notify> {
        Arc::clone(&self.changed)
    }

    /// The configuration in force.
    pub(super) const fn config(&self) -> &Config {
        &self.config
    }

    /// Prepares another configuration on a thread of its own.
    ///
    /// # Errors
    /// As [`Maker::prepare`]; everything stays as it is.
    pub(super) async fn prepare(&mut self, config: Config) -> Result<Plan, AgentError> {
        let mut maker = Maker { seeds: self.maker.seeds.fork(), ..self.maker.clone() };
        let running = Arc::clone(&self.pools);
        let (done, prepared) = oneshot::channel();
        // None of the threads that prompts wait for; and each in turn has the allocator's arena of the one before, while
        // models that are loaded on ever other threads would leave a part of each in the arenas of them all.
        std::thread::Builder::new()
            .name("reload".to_owned())
            .spawn(move || {
                // Where the agent ends meanwhile, nobody waits for it.
                let _ = done.send(maker.prepare(&config, &running));
            })
            .map_err(AgentError::Runtime)?;
        prepared.await.map_err(|_| AgentError::Runtime(io::Error::other("loading panicked")))?
    }

    /// Changes everything to what the plan says.
    pub(super) async fn apply(&mut self, plan: Plan) -> Applied {
        let Plan { config, pools } = plan;
        let mut applied = Applied::default();
        self.set_limits(&config);
        let settings = settings(&config);
        let before = self.members.load_full();
        let stays = |members: &&Arc<Members>| pool_of(&config, &members.pool().backend).is_some();
        let gone: Vec<Arc<Members>> = before.iter().filter(|members| !stays(members)).cloned().collect();
        // First, so that what comes finds their places and ports free.
        gone.iter().for_each(|members| members.end());
        // Before what is new is subscribed to: see `start`.
        self.pools.set(pools.iter().map(Prepared::pool).collect());
        let mut members = Vec::with_capacity(pools.len());
        let mut replaced = Vec::new();
        for Prepared { config: of_pool, access, made } in pools {
            let running = before.iter().find(|members| members.pool().backend == of_pool.backend);
            let failed = match (made, running, pool_of(&self.config, &of_pool.backend)) {
                (Made::Kept(pool, renderers), Some(running), Some(said)) => {
                    if !is_same(said, &of_pool) {
                        applied.changed.push(of_pool.backend.clone());
                    }
                    pool.set(&settings);
                    pool.configure(said, &of_pool);
                    if !renderers.is_same_as(&pool.renderers()) {
                        applied.rendered.push(of_pool.backend.clone());
                    }
                    // Before its replicas, which may name revisions that are new.
                    replaced.push(pool.use_renderers(renderers));
                    members.push(Arc::clone(running));
                    running.configure(&of_pool, access, config.engine)
                }
                (Made::New(pool) | Made::Kept(pool, _), ..) => {
                    applied.added.push(of_pool.backend.clone());
                    let common = self.common.clone();
                    let (started, failed) = Members::start(pool, &of_pool, access, config.engine, common);
                    members.push(started);
                    failed
                }
            };
            applied.could_not_join |= failed.is_some();
        }
        self.members.store(Arc::new(members));
        before.iter().for_each(|members| members.stop_listening());
        for members in gone {
            applied.removed.push(members.pool().backend.clone());
            let retiring = retire(Arc::clone(members.pool()));
            self.common.tasks.spawn(self.common.stop.clone().run_until_cancelled_owned(retiring));
        }
        let is_same_haproxy = self.config.haproxy == config.haproxy;
        self.config = config;
        if !is_same_haproxy && self.polls.is_some() {
            self.poll_haproxy();
        }
        if !applied.added.is_empty() {
            // HAProxy tells of their servers at once.
            self.changed.notify_one();
        }
        // Each waits until no decision has the old ones. A panic in there is told by the runtime.
        let freed = tokio::task::spawn_blocking(|| replaced.into_iter().for_each(Replaced::free));
        let _ = freed.await;
        applied
    }

    fn set_limits(&self, config: &Config) {
        let budget = budget(config);
        if budget != self::budget(&self.config) {
            budget.tell(config.spop.max_connections);
        }
        self.common.room.set_limit(budget.ranks);
        self.spop.set(spop_config(config, budget));
        let workers = self.router.limits().workers.clone();
        let is_same_queue = self.config.prompt.queue == config.prompt.queue;
        let workers = if is_same_queue { workers } else { workers.with_queue(config.prompt.queue) };
        self.router.set_limits(RouteLimits { workers, ..route_limits(config) });
    }

    /// Asks HAProxy for its servers, from now on and as the configuration says; with no socket it is not asked.
    pub(super) fn poll_haproxy(&mut self) {
        let stop = self.common.stop.child_token();
        if let Some(before) = self.polls.replace(stop.clone()) {
            before.cancel();
        }
        let metrics = SocketMetrics::register();
        let Some(socket) = self.config.haproxy.socket.clone() else {
            metrics.up.set(0.0);
            return;
        };
        let polls = ServerPolls {
            socket: RuntimeSocket::new(socket),
            period: self.config.haproxy.poll,
            pools: Arc::clone(&self.members),
            changed: Arc::clone(&self.changed),
            metrics,
        };
        self.common.tasks.spawn(stop.run_until_cancelled_owned(polls.run()));
    }
}

/// Lets go of a pool that was taken away when nobody has it in hand any more. To free a large index takes a while: it is
/// done where that holds up nothing.
async fn retire(pool: Arc<Pool>) {
    while Arc::strong_count(&pool) > 1 {
        tokio::time::sleep(IN_USE).await;
    }
    let freed = tokio::task::spawn_blocking(move || {
        pool.metrics.clear();
        drop(pool);
    });
    // It does not panic; if it did, there would be nothing to do about it.
    let _ = freed.await;
}

fn pool_of<'a>(config: &'a Config, backend: &str) -> Option<&'a config::Pool> {
    config.pools.iter().find(|pool| pool.backend == backend)
}

/// Wherever in the file it stands.
fn is_same(one: &config::Pool, other: &config::Pool) -> bool {
    config::Pool { place: other.place.clone(), ..one.clone() } == *other
}

/// The name by which `kvspoa model fetch` brought the pool's model.
fn fetched_model(pool: &config::Pool) -> Option<String> {
    Manifest::load(pool.model_dir.as_deref()?).ok().map(|manifest| manifest.model)
}

fn settings(config: &Config) -> PoolSettings {
    PoolSettings {
        policy: policy(&config.select),
        scheduler: SchedulerConfig {
            lease: config.select.lease,
            follow_answers: config.select.decode_progress,
            ..SchedulerConfig::default()
        },
        index_max_bytes: config.index_max_bytes,
        haproxy_poll: config.haproxy.poll,
        engine_poll: config.engine.poll,
    }
}

fn policy(select: &config::Select) -> Policy {
    match select.policy {
        PolicyName::Cost => Policy::Cost(CostConfig::default()),
        PolicyName::Dynamo => Policy::Dynamo(select.dynamo),
        PolicyName::LeastLoaded => Policy::LeastLoaded,
        PolicyName::RoundRobin => Policy::RoundRobin,
    }
}

pub(super) fn route_limits(config: &Config) -> RouteLimits {
    RouteLimits {
        workers: Workers::new(config.prompt.threads, config.prompt.queue),
        inline_bytes: config.prompt.inline_bytes,
        deadline: config.spop.deadline,
    }
}

pub(super) fn spop_config(config: &Config, budget: Budget) -> ServerConfig {
    ServerConfig {
        max_frame_size: config.spop.max_frame_bytes,
        max_payload_bytes: 2 * config.spop.max_frame_bytes as usize,
        max_in_flight: config.spop.max_in_flight,
        max_in_flight_bytes: config.spop.max_bytes_in_flight,
        max_connections: budget.connections,
        deadline: config.spop.deadline,
        ..ServerConfig::default()
    }
}

/// What the process may have open.
pub(super) fn budget(config: &Config) -> Budget {
    Budget::new(config.spop.max_connections, listed_ranks(config))
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
