//! One agent of the replay: the product's index and scheduler, used as `pool` uses them, or a rival in the latter's
//! place.

use super::rival::Rival;
use crate::{
    events::{KvEvent, Stored},
    hash::HashKey,
    index::{Index, IndexConfig, Overlaps},
    pool::{orphans, places},
    select::{Ask, Candidate, EngineLoad, Scheduler},
    sim,
    units::{BlockHash, EngineHash, RankId, RequestId, SequenceHash, Tier},
};
use std::time::{Duration, Instant};

/// Who decides.
#[derive(Debug)]
pub(super) enum Router {
    /// The product.
    Product(Box<Scheduler>),
    /// Another router's policy.
    Rival(Box<Rival>),
}

/// What an agent knows, and who decides by it.
#[derive(Debug)]
pub(super) struct Agent {
    key: HashKey,
    index: Index,
    overlaps: Overlaps,
    /// The ranks as they stand, but for the overlaps of a prompt.
    candidates: Vec<Candidate>,
    router: Router,
    /// Blocks of each replica's cache over all tiers.
    cache_blocks: u32,
}

impl Agent {
    pub(super) fn new(
        key: &HashKey,
        replicas: u16,
        block_tokens: u32,
        cache_blocks: u32,
        mut router: Router,
        now: Instant,
    ) -> Self {
        let mut index = Index::new(key.clone(), IndexConfig { max_bytes: 8 << 30, ..IndexConfig::default() });
        let ranks: Vec<RankId> = (0..replicas).map(RankId).collect();
        for rank in &ranks {
            index.add_rank(*rank);
        }
        if let Router::Product(scheduler) = &mut router {
            scheduler.set_ranks(&ranks, now);
        }
        let candidates = ranks.iter().map(|rank| Candidate::idle(*rank, block_tokens)).collect();
        Self { key: key.clone(), index, overlaps: Overlaps::default(), candidates, router, cache_blocks }
    }

    /// Chooses a rank and books it.
    pub(super) fn choose(&mut self, ask: &Ask, now: Instant) -> Option<RankId> {
        self.look_up(ask);
        match &mut self.router {
            Router::Product(scheduler) => scheduler.book(ask, &self.candidates, now).rank,
            Router::Rival(rival) => rival.choose(ask, &self.candidates),
        }
    }

    /// Books what another agent has chosen.
    pub(super) fn mirror(&mut self, ask: &Ask, rank: RankId, now: Instant) {
        self.look_up(ask);
        let Some(chosen) = self.candidates.get(rank.index()) else { return };
        match &mut self.router {
            Router::Product(scheduler) => {
                scheduler.mirror(ask, chosen, now);
            }
            Router::Rival(rival) => rival.book(ask, chosen),
        }
    }

    /// Another agent still has these.
    pub(super) fn renew(&mut self, ids: &[RequestId], now: Instant) {
        if let Router::Product(scheduler) = &mut self.router {
            ids.iter().for_each(|id| scheduler.renew(*id, now));
        }
    }

    /// What was booked here.
    pub(super) fn own_bookings(&self) -> Vec<RequestId> {
        match &self.router {
            Router::Product(scheduler) => scheduler.own_bookings().collect(),
            Router::Rival(_) => Vec::new(),
        }
    }

    fn look_up(&mut self, ask: &Ask) {
        let Some(key) = self.candidates.first().map(Candidate::key) else { return };
        self.index.find(ask.prompt.sequence(key), &mut self.overlaps);
        for candidate in &mut self.candidates {
            let overlap = self.overlaps.get(candidate.rank);
            candidate.gpu_blocks = overlap.gpu_blocks;
            candidate.cpu_blocks = overlap.cpu_blocks;
            candidate.disk_blocks = overlap.disk_blocks;
        }
    }

    /// Takes in a batch of events of a rank. `gap`: others were lost before it, so that from now on the rank's cache is
    /// not wholly known.
    pub(super) fn apply(&mut self, rank: RankId, batch: &Batch, gap: bool, now: Instant) {
        if let Some(candidate) = self.candidates.get_mut(rank.index()).filter(|_| gap) {
            candidate.history_blocks = self.cache_blocks;
        }
        for event in batch.events() {
            self.index.apply(rank, &event);
        }
        self.index.end_batch(rank);
        self.adopt(rank, batch);
        if let Router::Product(scheduler) = &mut self.router {
            let held = self.index.rank_stats(rank).unwrap_or_default().blocks_in(Tier::Gpu);
            scheduler.late(rank, batch.lag);
            scheduler.evicted(rank, batch.evicted(), held, now);
            scheduler.progress(rank, |sequence| self.index.depth(rank, sequence), now);
        }
    }

    /// Finds the place of what stands behind a batch that was lost.
    fn adopt(&mut self, rank: RankId, batch: &Batch) {
        let Router::Product(scheduler) = &self.router else { return };
        if self.candidates.get(rank.index()).is_none_or(|candidate| candidate.history_blocks == 0) {
            return;
        }
        let orphans = orphans(&self.index, rank, batch.events());
        if !orphans.is_empty() {
            for (block, chain) in places(&self.key, &orphans, &scheduler.prompts(rank)) {
                self.index.adopt(rank, block, chain);
            }
        }
    }

    /// The first token of a request has passed.
    pub(super) fn first_token(&mut self, id: RequestId) {
        if let Router::Rival(rival) = &mut self.router {
            rival.first_token(id);
        }
    }

    /// A request is over.
    pub(super) fn end(&mut self, id: RequestId, used: RankId, now: Instant) {
        match &mut self.router {
            Router::Product(scheduler) => drop(scheduler.end(id, Some(used), now)),
            Router::Rival(rival) => rival.end(id),
        }
    }

    /// A replica was started anew: its cache and its requests are gone.
    pub(super) fn restarted(&mut self, rank: RankId, now: Instant) {
        self.index.clear_rank(rank);
        self.index.sweep(usize::MAX);
        if let Some(candidate) = self.candidates.get_mut(rank.index()) {
            candidate.history_blocks = 0;
        }
        match &mut self.router {
            Router::Product(scheduler) => {
                scheduler.remove_rank(rank);
                let ranks: Vec<RankId> = self.candidates.iter().map(|candidate| candidate.rank).collect();
                scheduler.set_ranks(&ranks, now);
            }
            Router::Rival(rival) => rival.restarted(rank),
        }
    }

    /// What the engines report of themselves.
    pub(super) fn polled(&mut self, rank: RankId, stats: &sim::EngineStats) {
        let booked = match &self.router {
            Router::Product(scheduler) => {
                scheduler.loads().find(|(other, _)| *other == rank).map_or(0, |(_, load)| load.requests)
            }
            Router::Rival(_) => 0,
        };
        let Some(candidate) = self.candidates.get_mut(rank.index()) else { return };
        let count = |requests: usize| u32::try_from(requests).unwrap_or(u32::MAX);
        candidate.reported =
            Some(EngineLoad { running: count(stats.running), waiting: count(stats.waiting), booked });
        if let Router::Rival(rival) = &mut self.router {
            rival.polled(rank, stats.usage);
        }
    }

    /// A second has passed.
    pub(super) fn tick(&mut self, now: Instant) {
        if let Router::Product(scheduler) = &mut self.router {
            scheduler.tick(now);
        }
    }
}

/// A batch of events as the subscriber hands it over.
#[derive(Debug)]
pub(super) struct Batch {
    root: SequenceHash,
    /// How late it is seen.
    lag: Duration,
    events: Vec<Owned>,
}

#[derive(Debug)]
enum Owned {
    Stored { tier: Tier, parent: Option<EngineHash>, names: Vec<EngineHash>, blocks: Vec<BlockHash> },
    Removed { tier: Tier, names: Vec<EngineHash> },
    Cleared,
}

const fn tier(medium: sim::Medium) -> Tier {
    match medium {
        sim::Medium::Gpu => Tier::Gpu,
        sim::Medium::Cpu => Tier::Cpu,
    }
}

impl Batch {
    pub(super) fn new(key: &HashKey, lag: Duration, events: Vec<sim::Event>) -> Self {
        let owned = |event| match event {
            sim::Event::Stored(stored) => {
                let block_tokens = (stored.block_tokens as usize).max(1);
                let blocks = stored.tokens.chunks_exact(block_tokens).map(|block| key.block(block)).collect();
                let tier = tier(stored.medium);
                Owned::Stored { tier, parent: stored.parent, names: stored.block_hashes, blocks }
            }
            sim::Event::Removed { block_hashes, medium } => {
                Owned::Removed { tier: tier(medium), names: block_hashes }
            }
            sim::Event::Cleared => Owned::Cleared,
        };
        Self { root: key.plain_root(), lag, events: events.into_iter().map(owned).collect() }
    }

    /// How many blocks have left the GPU tier.
    fn evicted(&self) -> u32 {
        let left = self.events.iter().map(|event| match event {
            Owned::Removed { tier: Tier::Gpu, names } => names.len() as u32,
            _ => 0,
        });
        left.sum()
    }

    fn events(&self) -> impl Iterator<Item = KvEvent<'_>> {
        self.events.iter().map(|event| match event {
            Owned::Stored { tier, parent, names, blocks } => KvEvent::Stored(Stored {
                tier: *tier,
                parent: *parent,
                root: self.root,
                engine_hashes: names,
                block_hashes: blocks,
            }),
            Owned::Removed { tier, names } => KvEvent::Removed { tier: *tier, engine_hashes: names },
            Owned::Cleared => KvEvent::Cleared,
        })
    }
}
