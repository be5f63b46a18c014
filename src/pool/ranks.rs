//! Which ranks the pool has: replicas come and go while requests are decided.

use super::{EngineView, FeedFault, Pool, RankState, doubts::Watched, live::Layout};
use crate::{
    config,
    events::Endpoint,
    metrics::{FeedLabels, RankMetrics, ServerMetrics},
    replica::{ServerState, TokenChannel},
    units::{RankId, Revision},
};
use arc_swap::ArcSwapOption;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::{
    sync::{Arc, atomic::AtomicBool},
    time::Instant,
};

/// The ranks of a pool at one moment. Each change makes a new one; who holds an older one still finds its ranks in it.
#[derive(Debug, Default)]
pub struct Ranks {
    by_id: Vec<Option<Arc<Rank>>>,
    servers: Vec<Arc<ServerRanks>>,
    ranked: bool,
    revisions: SmallVec<[Revision; 1]>,
}

/// One rank as HAProxy and the engine know it.
#[derive(Debug)]
pub struct Rank {
    /// The HAProxy server's name.
    pub server: Arc<str>,
    /// The data-parallel rank within the replica.
    pub rank: u16,
    /// The replica that it is a rank of, as configured or discovered.
    pub replica: Arc<config::Replica>,
    /// What makes its prompts.
    pub revision: Revision,
    /// Where the rank's events come from.
    pub feed: config::Rank,
    /// Takes prompts' tokens, where the replica is one of Ray Serve.
    pub tokens: Option<TokenChannel>,
    /// Its metrics.
    pub metrics: RankMetrics,
    /// What its engine last reported.
    pub(super) engine: ArcSwapOption<EngineView>,
    pub(super) layout: Layout,
    /// What speaks against its events.
    pub(super) watched: Mutex<Watched>,
    /// Whether it is never named, as an operator has told.
    pub(super) ignored: AtomicBool,
}

/// One server and its ranks.
#[derive(Debug)]
pub struct ServerRanks {
    /// The HAProxy server's name.
    pub name: Arc<str>,
    /// Its ranks, in their order; at least one.
    pub ids: Vec<RankId>,
    /// Its metrics.
    pub metrics: ServerMetrics,
    /// Whether the replica serves another model than the pool's.
    pub(super) other_model: AtomicBool,
    /// The only names that requests may ask for; `None` until it has told, or where it takes others too.
    pub(super) names: ArcSwapOption<Vec<String>>,
}

/// There is no place for a replica's ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the pool has {} ranks, which is the most there can be", config::MAX_RANKS)]
pub struct PoolFull;

/// The ids of ranks: an id is used again once the last event of its former rank is through.
#[derive(Debug, Default)]
pub(super) struct Ids {
    free: Vec<RankId>,
    next: u16,
}

impl Ids {
    fn take(&mut self) -> Option<RankId> {
        self.free.pop().or_else(|| {
            let id = RankId(self.next);
            (id.index() < config::MAX_RANKS).then(|| {
                self.next += 1;
                id
            })
        })
    }
}

impl Ranks {
    /// A rank, if it is there.
    #[must_use]
    pub fn get(&self, id: RankId) -> Option<&Rank> {
        self.by_id.get(id.index())?.as_deref()
    }

    /// All ranks.
    pub fn iter(&self) -> impl Iterator<Item = (RankId, &Rank)> {
        let ids = (0..).map(RankId);
        ids.zip(&self.by_id).filter_map(|(id, rank)| Some((id, rank.as_deref()?)))
    }

    /// The ids of all ranks.
    pub fn ids(&self) -> impl Iterator<Item = RankId> {
        self.iter().map(|(id, _)| id)
    }

    /// The servers, in the order in which they joined.
    pub fn servers(&self) -> impl Iterator<Item = &ServerRanks> {
        self.servers.iter().map(Arc::as_ref)
    }

    /// The ranks of one server; none if it is not there.
    #[must_use]
    pub fn of_server(&self, name: &str) -> &[RankId] {
        self.servers().find(|server| *server.name == *name).map_or(&[], |server| &server.ids)
    }

    /// Whether requests name the rank: where every replica of the pool has as many, more than one. Elsewhere a request
    /// that HAProxy sends to another replica after all could name a rank that is not there.
    #[must_use]
    pub const fn ranked(&self) -> bool {
        self.ranked
    }

    /// What makes the prompts of the ranks: once for each of these a request is rendered. The pool's own where there are no
    /// ranks.
    #[must_use]
    pub fn revisions(&self) -> &[Revision] {
        if self.revisions.is_empty() { &[Revision(0)] } else { &self.revisions }
    }

    /// The length of a table with a place for every id.
    #[must_use]
    pub fn table_len(&self) -> usize {
        self.by_id.len()
    }

    fn with(&self, change: impl FnOnce(&mut Vec<Option<Arc<Rank>>>, &mut Vec<Arc<ServerRanks>>)) -> Self {
        let (mut by_id, mut servers) = (self.by_id.clone(), self.servers.clone());
        change(&mut by_id, &mut servers);
        let count = servers.first().map_or(1, |server| server.ids.len());
        let ranked = count > 1 && servers.iter().all(|server| server.ids.len() == count);
        let mut revisions: SmallVec<_> = by_id.iter().flatten().map(|rank| rank.revision).collect();
        revisions.sort_unstable();
        revisions.dedup();
        Self { by_id, servers, ranked, revisions }
    }
}

impl Pool {
    /// The ranks as they are now.
    #[must_use]
    pub fn ranks(&self) -> Arc<Ranks> {
        self.ranks.load_full()
    }

    /// A replica joins: its ranks are candidates from now on, with empty caches.
    ///
    /// # Errors
    /// [`PoolFull`]; nothing has changed then.
    pub fn join(&self, replica: &config::Replica, now: Instant) -> Result<Vec<RankId>, PoolFull> {
        let mut ids = self.ids.lock();
        let mut taken = Vec::new();
        for _ in &replica.ranks {
            match ids.take() {
                Some(id) => taken.push(id),
                None => {
                    ids.free.append(&mut taken);
                    return Err(PoolFull);
                }
            }
        }
        {
            let mut caches = self.caches.write();
            for (id, feed) in taken.iter().zip(&replica.ranks) {
                caches.add(*id, feed.events.is_some(), now);
            }
        }
        let name: Arc<str> = replica.server.as_str().into();
        let shared = Arc::new(replica.clone());
        let revision = self.revision(replica.revision.as_deref());
        // Held to the end: else what is told meanwhile would pass the new ranks by.
        let ignored = self.ignored.lock();
        let is_ignored = ignored.contains(&name);
        let rank = |feed: &config::Rank, rank| {
            let labels = FeedLabels { pool: self.backend.clone(), server: replica.server.clone(), rank };
            let faults = FeedFault::ALL.map(FeedFault::as_str);
            Rank {
                server: Arc::clone(&name),
                rank,
                replica: Arc::clone(&shared),
                revision,
                feed: feed.clone(),
                tokens: feed.tokens.as_ref().and_then(|endpoint| self.token_channel(endpoint)),
                metrics: RankMetrics::register(&labels, &RankState::NAMES, &faults),
                engine: ArcSwapOption::empty(),
                layout: Layout::default(),
                watched: Mutex::default(),
                ignored: AtomicBool::new(is_ignored),
            }
        };
        let states = ServerState::ALL.map(ServerState::as_str);
        let metrics = ServerMetrics::register(&self.backend, &replica.server, &states);
        let server = ServerRanks {
            name: Arc::clone(&name),
            ids: taken.clone(),
            metrics,
            other_model: AtomicBool::new(false),
            names: ArcSwapOption::empty(),
        };
        let ranks = self.ranks.load().with(|by_id, servers| {
            by_id.resize(usize::from(ids.next).max(by_id.len()), None);
            for ((id, feed), number) in taken.iter().zip(&replica.ranks).zip(0u16..) {
                if let Some(place) = by_id.get_mut(id.index()) {
                    *place = Some(Arc::new(rank(feed, number)));
                }
            }
            servers.push(Arc::new(server));
        });
        {
            let mut scheduler = self.scheduler.lock();
            taken.iter().for_each(|id| scheduler.add_rank(*id, now));
        }
        self.live.forget(&taken);
        self.ranks.store(Arc::new(ranks));
        self.gather_names();
        Ok(taken)
    }

    /// The line to a rank's token store. Without it the replica tokenizes, as it would without us.
    fn token_channel(&self, endpoint: &Endpoint) -> Option<TokenChannel> {
        let channel = self.token_channels.connect(endpoint.clone());
        channel
            .inspect_err(|error| tracing::warn!(pool = self.backend, %endpoint, %error, "no socket for prompts' tokens"))
            .ok()
    }

    /// A replica leaves: what its caches held no longer counts, and its bookings end. Returns its ranks, each of which
    /// [`Self::release`] is to be called for when no more events of it can come.
    pub fn leave(&self, server: &str) -> Vec<RankId> {
        let _ids = self.ids.lock();
        let before = self.ranks.load();
        let Some(leaving) = before.servers.iter().find(|leaving| *leaving.name == *server).cloned() else {
            return Vec::new();
        };
        let ranks = before.with(|by_id, servers| {
            for id in &leaving.ids {
                if let Some(place) = by_id.get_mut(id.index()) {
                    *place = None;
                }
            }
            servers.retain(|other| !Arc::ptr_eq(other, &leaving));
        });
        self.ranks.store(Arc::new(ranks));
        self.gather_names();
        {
            let mut scheduler = self.scheduler.lock();
            for id in &leaving.ids {
                scheduler.remove_rank(*id);
            }
        }
        self.forget_sightings(&leaving.ids);
        self.forget_doubts(&leaving.ids);
        leaving.metrics.clear();
        leaving.ids.iter().filter_map(|id| before.get(*id)).for_each(|rank| rank.metrics.clear());
        leaving.ids.clone()
    }

    /// No more events come of a rank that has left: its id may be used again.
    pub fn release(&self, rank: RankId) {
        let mut ids = self.ids.lock();
        self.caches.write().remove(rank);
        ids.free.push(rank);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        events::{KvEvent, Stored},
        pool::testing::{self, server},
        replica::EngineReport,
        units::{EngineHash, Tier, TokenId},
    };

    fn replica(server: &str, ranks: usize) -> config::Replica {
        let ranks = vec![config::Rank::default(); ranks];
        config::Replica { server: server.to_owned(), ranks, ..config::Replica::default() }
    }

    #[test]
    fn what_a_replica_held_and_said_ends_with_it_also_for_the_next_of_its_ids() {
        let (pool, now) = (testing::pool(1, 1), Instant::now());
        let first = pool.join(&replica("SRV_3", 2), now).expect("room");
        let stored = KvEvent::Stored(Stored {
            tier: Tier::Gpu,
            parent: None,
            root: pool.key.plain_root(),
            engine_hashes: &[EngineHash(7)],
            block_hashes: &[pool.key.block(&[TokenId(1); 16])],
        });
        pool.caches.write().index.apply(first[1], &stored);
        assert_eq!(pool.gpu_blocks(first[1]), 1);
        pool.take_servers(&[server("s1"), server("SRV_3")], &[0; 3], now);
        pool.take_engines("SRV_3", &[EngineReport::default(), EngineReport::default()], &[0; 3], now);
        let held_by_a_decision = pool.ranks();

        assert_eq!(pool.leave("SRV_3"), first);
        assert_eq!(pool.ranks().of_server("SRV_3"), []);
        assert!(held_by_a_decision.get(first[1]).is_some(), "a decision finds what it was made with");
        let second = pool.join(&replica("SRV_4", 1), now).expect("room");
        assert!(!first.contains(&second[0]), "events of the one before may still come");
        first.iter().for_each(|id| pool.release(*id));
        let third = pool.join(&replica("SRV_5", 2), now).expect("room");
        assert_eq!(third.iter().max(), first.iter().max(), "its ids are used again");
        assert!(third.iter().all(|id| pool.gpu_blocks(*id) == 0 && pool.servers(now).get(*id).is_none()));
        let ranks = pool.ranks();
        assert!(third.iter().all(|id| pool.engine(ranks.get(*id).expect("a rank"), now).is_none()));
        assert_eq!(pool.leave("SRV_3"), [], "it has left already");
    }

    #[test]
    fn a_replica_that_has_no_place_leaves_none_taken() {
        let (pool, now) = (testing::pool(1, 1), Instant::now());
        pool.join(&replica("large", config::MAX_RANKS - 2), now).expect("room");
        assert_eq!(pool.join(&replica("s2", 2), now), Err(PoolFull));
        assert_eq!(pool.ranks().of_server("s2"), []);
        pool.join(&replica("s3", 1), now).expect("room for one");
    }
}
