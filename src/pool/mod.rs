//! A pool at work: its model, its ranks, what their caches hold and what is booked on them.
//!
//! Two locks, never nested the other way round: `scheduler` may be held while `caches` is read. Neither is held
//! across an await, and a writer of `caches` holds it for some events at a time. What polls tell of servers and
//! engines is swapped in whole and read without a lock.

mod adapters;
mod doubts;
mod live;
mod loads;
mod lookup;
mod lost;
mod silence;
mod sink;
#[cfg(test)]
mod testing;
mod turnover;
mod view;
mod watch;

pub use adapters::Adapters;
pub use live::{EngineView, ServerView, Servers};
pub use lookup::{Lookup, Stream};
pub use sink::{EventSink, FeedKey};
pub use view::{CacheView, Feed, FeedFault, RankState};
pub use watch::{Matching, Watch};

use crate::{
    config,
    hash::HashKey,
    index::{Index, IndexConfig},
    metrics::FeedLabels,
    prompt::{Model, ModelError},
    select::Scheduler,
    units::{RankId, SequenceHash, Tier},
};
use doubts::Doubts;
use live::Live;
use lost::Polls;
use parking_lot::{Mutex, RwLock};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

/// The longest prompt of engines of which nothing is known: what most models were trained for at most. A length that is
/// only claimed (a `Content-Length` whose body was cut) counts no further.
const USUAL_CONTEXT_TOKENS: u32 = 131_072;

/// One pool: an HAProxy backend that serves one base model.
#[derive(Debug)]
pub struct Pool {
    /// The HAProxy backend's name.
    pub backend: String,
    /// Renders and tokenizes as the pool's engines do.
    pub model: Model,
    /// The key of the process's block hashes.
    pub key: HashKey,
    /// The LoRA adapters that are asked for by name, as a model.
    pub adapters: Adapters,
    /// How often prompts matched.
    pub matching: Matching,
    /// Whether the scheduler follows the answers of booked requests.
    follows_answers: bool,
    /// The longest prompt that the engines take, in tokens: as configured, and as they tell; 0 is not known.
    configured_context: Option<u32>,
    told_context: AtomicU32,
    /// The ranks, by [`RankId`].
    pub ranks: Vec<Rank>,
    /// What the ranks' caches hold, as far as their events tell.
    pub caches: RwLock<CacheView>,
    /// Loads and bookings.
    pub scheduler: Mutex<Scheduler>,
    live: Live,
    /// Taken before `scheduler`.
    polls: Mutex<Polls>,
    doubts: Doubts,
}

/// One rank as HAProxy and the engine know it.
#[derive(Clone, Debug)]
pub struct Rank {
    /// The HAProxy server's name.
    pub server: Arc<str>,
    /// The data-parallel rank within the replica.
    pub rank: u16,
    /// Whether the request names the rank: where every replica of the pool has as many, more than one. Elsewhere a
    /// request that HAProxy sends to another replica after all could name a rank that is not there.
    pub ranked: bool,
    /// Where the rank's events come from.
    pub feed: config::Rank,
}

impl Pool {
    /// Loads the model and prepares an empty index for every rank. The last two are how often HAProxy and the engines
    /// are asked.
    ///
    /// # Errors
    /// The model directory can't be used.
    pub fn new(
        pool: &config::Pool,
        key: &HashKey,
        index_max_bytes: usize,
        mut scheduler: Scheduler,
        haproxy_poll: Duration,
        engine_poll: Duration,
    ) -> Result<Self, ModelError> {
        let model = match &pool.model_dir {
            Some(dir) => Model::load(dir)?,
            None => Model::embedded()?,
        };
        let count = pool.replicas.first().map_or(1, |replica| replica.ranks.len());
        let ranked = count > 1 && pool.replicas.iter().all(|replica| replica.ranks.len() == count);
        if let Some(renderer) = model.native_renderer() {
            tracing::warn!(
                pool = pool.backend,
                renderer,
                "vLLM makes this model's prompts by code of its own, which is not done here: chats are routed by load alone"
            );
        }
        let ranks: Vec<Rank> = pool
            .replicas
            .iter()
            .flat_map(|replica| {
                let server: Arc<str> = replica.server.as_str().into();
                replica.ranks.iter().zip(0u16..).map(move |(feed, rank)| Rank {
                    server: Arc::clone(&server),
                    rank,
                    ranked,
                    feed: feed.clone(),
                })
            })
            .collect();
        let mut index =
            Index::new(key.clone(), IndexConfig { max_bytes: index_max_bytes, ..IndexConfig::default() });
        let rank_ids: Vec<RankId> = ids(&ranks).collect();
        for id in &rank_ids {
            index.add_rank(*id);
        }
        scheduler.set_ranks(&rank_ids, Instant::now());
        let caches = RwLock::new(CacheView::new(index, &ranks, Instant::now()));
        Ok(Self {
            backend: pool.backend.clone(),
            model,
            adapters: Adapters::new(&pool.adapters),
            matching: Matching::default(),
            key: key.clone(),
            follows_answers: scheduler.follows_answers(),
            configured_context: pool.max_model_len,
            told_context: AtomicU32::default(),
            live: Live::new(&ranks, haproxy_poll, engine_poll),
            polls: Mutex::new(Polls::new(ranks.len())),
            doubts: Doubts::new(ranks.len()),
            ranks,
            caches,
            scheduler: Mutex::new(scheduler),
        })
    }

    /// All rank ids.
    pub fn rank_ids(&self) -> impl Iterator<Item = RankId> {
        ids(&self.ranks)
    }

    /// The longest prompt that an engine takes, in tokens.
    #[must_use]
    pub fn context_tokens(&self) -> u32 {
        let told = || Some(self.told_context.load(Ordering::Relaxed)).filter(|tokens| *tokens > 0);
        self.configured_context.or_else(told).unwrap_or(USUAL_CONTEXT_TOKENS)
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

    /// The ranks as metrics name them.
    #[must_use]
    pub fn labels(&self) -> Vec<FeedLabels> {
        let label = |rank: &Rank| FeedLabels {
            pool: self.backend.clone(),
            server: rank.server.to_string(),
            rank: rank.rank,
        };
        self.ranks.iter().map(label).collect()
    }

    /// Blocks that the rank is known to hold in its GPU cache.
    #[must_use]
    pub fn gpu_blocks(&self, rank: RankId) -> u64 {
        self.caches.read().index.rank_stats(rank).unwrap_or_default().blocks_in(Tier::Gpu)
    }

    /// The first rank of the server of this name.
    #[must_use]
    pub fn rank_of_server(&self, server: &str) -> Option<RankId> {
        self.rank_ids().find(|id| &*self.ranks[id.index()].server == server)
    }
}

fn ids(ranks: &[Rank]) -> impl Iterator<Item = RankId> + use<> {
    (0..ranks.len()).map(|at| RankId(at as u16))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::{Config, Overrides},
        select::{Policy, SchedulerConfig},
    };
    use std::path::Path;

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
            assert!(pool.ranks.iter().all(|rank| rank.ranked == ranked), "{counts:?}");
        }
    }

    #[test]
    fn the_longest_prompt_is_the_configured_one_or_the_longest_told() {
        let mut pool = testing::pool(1, 1);
        assert_eq!(pool.context_tokens(), USUAL_CONTEXT_TOKENS);
        pool.learn_context(32_768);
        pool.learn_context(4_096);
        assert_eq!(pool.context_tokens(), 32_768);
        pool.configured_context = Some(8_192);
        pool.learn_context(1_000_000);
        assert_eq!(pool.context_tokens(), 8_192);
    }
}
