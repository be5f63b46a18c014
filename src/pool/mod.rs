//! A pool at work: its model, its ranks, what their caches hold and what is booked on them.
//!
//! Two locks, never nested the other way round: `scheduler` may be held while `caches` is read. Neither is held
//! across an await, and a writer of `caches` holds it for some events at a time. What polls tell of servers and
//! engines is swapped in whole and read without a lock.

mod adapters;
mod configure;
mod doubts;
mod live;
mod loads;
mod lookup;
mod lost;
mod operator;
mod orphans;
mod parity;
mod peers;
mod placed;
mod ranks;
mod renderers;
mod served;
mod silence;
mod sink;
mod table;
#[cfg(test)]
mod testing;
mod turnover;
mod view;
mod watch;

pub use adapters::Adapters;
pub use configure::PoolSettings;
pub use live::{EngineView, ServerView, Servers};
pub use lookup::{Lookup, Rendered, Stream};
pub use operator::{Decisions, LiveMode, NotDone, Tally};
pub use orphans::{Orphan, orphans, places};
pub use ranks::{PoolFull, Rank, Ranks, ServerRanks};
pub use renderers::{Renderers, Replaced};
pub use sink::{EventSink, FeedKey};
pub use table::{PoolId, PoolTable, Pools};
pub use view::{CacheView, Feed, FeedFault, RankState};
pub use watch::{Matching, Watch};

use crate::{
    config::{self, Handling, Mode},
    hash::HashKey,
    index::{Index, IndexConfig},
    metrics::PoolMetrics,
    peers::Outbox,
    prompt::ModelError,
    replica::TokenChannels,
    select::Scheduler,
    units::{RankId, SequenceHash, Tier},
};
use arc_swap::ArcSwap;
use doubts::Doubts;
use live::Live;
use lost::Polls;
use operator::Ignored;
use parking_lot::{Mutex, RwLock};
use ranks::Ids;
use renderers::Revisions;
use served::ServedNames;
use std::{
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    time::Duration,
};

/// The longest prompt of engines of which nothing is known: what most models were trained for at most. A length that is
/// only claimed (a `Content-Length` whose body was cut) counts no further.
const USUAL_CONTEXT_TOKENS: u32 = 131_072;

/// One pool: an HAProxy backend that serves one base model.
#[derive(Debug)]
pub struct Pool {
    /// Its own among all pools that ever were.
    pub id: PoolId,
    /// The HAProxy backend's name.
    pub backend: String,
    /// The key of the process's block hashes.
    pub key: HashKey,
    /// The LoRA adapters that are asked for by name, as a model.
    pub adapters: Adapters,
    /// How often prompts matched.
    pub matching: Matching,
    /// Its metrics.
    pub metrics: PoolMetrics,
    /// Whether requests go where kvspoa says.
    pub mode: LiveMode,
    /// What was decided.
    pub tally: Tally,
    /// What the replicas must serve, once that is known.
    served: Mutex<Option<String>>,
    names: ServedNames,
    /// Whether the scheduler follows the answers of booked requests.
    follows_answers: AtomicBool,
    /// The longest prompt that the engines take, in tokens: as configured, and as they tell; 0 is not known.
    configured_context: AtomicU32,
    told_context: AtomicU32,
    /// What the ranks' caches hold, as far as their events tell.
    pub caches: RwLock<CacheView>,
    /// Loads and bookings.
    pub scheduler: Mutex<Scheduler>,
    /// Whether the replicas are known, so that no more are about to join.
    pub is_settled: AtomicBool,
    ranks: ArcSwap<Ranks>,
    revisions: Revisions,
    renderers: ArcSwap<Renderers>,
    /// Opens the ranks' token channels.
    token_channels: TokenChannels,
    /// Taken before all other locks, by those who change `ranks`.
    ids: Mutex<Ids>,
    live: Live,
    /// Taken before `scheduler`.
    polls: Mutex<Polls>,
    doubts: Doubts,
    /// Taken before `scheduler`.
    ignored: Ignored,
    outbox: Outbox,
}

impl Pool {
    /// Loads the model. The pool has no replicas yet. The last two are how often HAProxy and the engines are asked.
    ///
    /// # Errors
    /// The model directory can't be used.
    pub fn new(
        pool: &config::Pool,
        key: &HashKey,
        index_max_bytes: usize,
        scheduler: Scheduler,
        haproxy_poll: Duration,
        engine_poll: Duration,
    ) -> Result<Self, ModelError> {
        let revisions = Revisions::default();
        let renderers = Renderers::first(pool, &revisions)?;
        let index =
            Index::new(key.clone(), IndexConfig { max_bytes: index_max_bytes, ..IndexConfig::default() });
        Ok(Self {
            id: PoolId::new(),
            metrics: PoolMetrics::register(&pool.backend, &Mode::NAMES, &Handling::ALL.map(Handling::as_str)),
            backend: pool.backend.clone(),
            revisions,
            renderers: ArcSwap::from_pointee(renderers),
            adapters: Adapters::new(&pool.adapters),
            matching: Matching::default(),
            mode: LiveMode::new(pool.mode),
            tally: Tally::default(),
            served: Mutex::new(pool.model.clone()),
            names: ServedNames::default(),
            key: key.clone(),
            follows_answers: scheduler.follows_answers().into(),
            configured_context: pool.max_model_len.unwrap_or_default().into(),
            told_context: AtomicU32::default(),
            is_settled: AtomicBool::new(false),
            token_channels: TokenChannels::default(),
            ranks: ArcSwap::default(),
            ids: Mutex::default(),
            live: Live::new(haproxy_poll, engine_poll),
            polls: Mutex::default(),
            doubts: Doubts::default(),
            ignored: Ignored::default(),
            outbox: Outbox::new(),
            caches: RwLock::new(CacheView::new(index)),
            scheduler: Mutex::new(scheduler),
        })
    }

    /// The same, which leaves there what peers are to be told.
    #[must_use]
    pub fn telling(self, outbox: Outbox) -> Self {
        Self { outbox, ..self }
    }

    /// The longest prompt that an engine takes, in tokens.
    #[must_use]
    pub fn context_tokens(&self) -> u32 {
        self.known_context().unwrap_or(USUAL_CONTEXT_TOKENS)
    }

    /// The same; `None` where nobody told.
    #[must_use]
    pub fn known_context(&self) -> Option<u32> {
        let known = |tokens: &AtomicU32| Some(tokens.load(Ordering::Relaxed)).filter(|tokens| *tokens > 0);
        known(&self.configured_context).or_else(|| known(&self.told_context))
    }

    /// An engine told of its longest prompt (vLLM `max_model_len`). Of several the longest counts.
    pub fn learn_context(&self, tokens: u32) {
        self.told_context.fetch_max(tokens, Ordering::Relaxed);
    }

    /// Where the chain of a prompt starts: the caches of each LoRA adapter and of each salt are apart.
    #[must_use]
    pub fn root(&self, model: Option<&str>, cache_salt: Option<&str>) -> SequenceHash {
        let adapter = model.filter(|model| self.adapters.contains(model));
        self.key.root(adapter, cache_salt)
    }

    /// Blocks that the rank is known to hold in its GPU cache.
    #[must_use]
    pub fn gpu_blocks(&self, rank: RankId) -> u64 {
        self.caches.read().index.rank_stats(rank).unwrap_or_default().blocks_in(Tier::Gpu)
    }

    /// The first rank of the server of this name.
    #[must_use]
    pub fn rank_of_server(&self, server: &str) -> Option<RankId> {
        self.ranks.load().of_server(server).first().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::{Config, Overrides},
        select::{Policy, SchedulerConfig},
    };
    use std::{path::Path, time::Instant};

    #[test]
    fn a_rank_is_named_only_where_every_replica_has_it() {
        for (counts, ranked) in [([2, 2], true), ([2, 1], false), ([1, 1], false)] {
            let replica = |(n, ranks)| format!("[[pool.replica]]\nserver = \"s{n}\"\nranks = {ranks}\n");
            let replicas: String = counts.iter().enumerate().map(replica).collect();
            let text = format!("[[pool]]\nbackend = \"be\"\n{replicas}");
            let config = Config::parse(&text, Path::new("k.toml"), &Overrides::default()).expect("valid");
            let scheduler = Scheduler::new(Policy::LeastLoaded, SchedulerConfig::default(), 1);
            let poll = Duration::from_secs(1);
            let pool = Pool::new(&config.pools[0], &HashKey::from_seed(1), 64 << 20, scheduler, poll, poll)
                .expect("a pool");
            for replica in &config.pools[0].replicas {
                pool.join(replica, Instant::now()).expect("room");
            }
            assert_eq!(pool.ranks().ranked(), ranked, "{counts:?}");
        }
    }

    #[test]
    fn the_longest_prompt_is_the_configured_one_or_the_longest_told() {
        let pool = testing::pool(1, 1);
        assert_eq!(pool.context_tokens(), USUAL_CONTEXT_TOKENS);
        pool.learn_context(32_768);
        pool.learn_context(4_096);
        assert_eq!(pool.context_tokens(), 32_768);
        pool.configured_context.store(8_192, Ordering::Relaxed);
        pool.learn_context(1_000_000);
        assert_eq!(pool.context_tokens(), 8_192);
    }
}
