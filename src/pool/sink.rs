//! What the KV events do to a pool: the index follows them, and bookings see their prefill advance.

use super::{CacheView, Pool, PoolId, Pools, orphans, places};
use crate::{
    events::{Batch, Doubt, FeedState, KvEvent, ResetReason, Sink, Stored},
    hash::HashKey,
    index::Index,
    pulse::Pulse,
    units::{RankId, SequenceHash, Tier},
};
use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// Names one rank's stream.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FeedKey {
    /// The pool.
    pub pool: PoolId,
    /// The rank in it.
    pub rank: RankId,
}

/// Hands events to the pools; lives on the events thread.
#[derive(Debug)]
pub struct EventSink {
    pools: Arc<Pools>,
    pulse: Arc<Pulse>,
    /// Memory for what a batch has stored behind what, used again by each.
    stored: Vec<(SequenceHash, SequenceHash)>,
}

impl EventSink {
    /// A sink for these pools.
    #[must_use]
    pub fn new(pools: Arc<Pools>) -> Self {
        Self { pools, pulse: Arc::new(Pulse::new(Instant::now())), stored: Vec::new() }
    }

    /// The sign that the thread which calls goes on.
    #[must_use]
    pub fn pulse(&self) -> Arc<Pulse> {
        Arc::clone(&self.pulse)
    }

    /// `None` of a pool that was taken away: its last events come to nothing.
    fn pool(&self, key: FeedKey) -> Option<Arc<Pool>> {
        self.pools.of_id(key.pool)
    }
}

impl Sink for EventSink {
    type Key = FeedKey;

    fn apply(&mut self, key: FeedKey, seq: u64, batch: &Batch) -> Option<u64> {
        let pool = self.pool(key)?;
        let stored = &mut self.stored;
        // A clock before the epoch is no clock: the lag is then 0.
        let now_seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let told_since = pool.apply(key.rank, seq, batch, now_seconds);
        pool.adopt_orphans(key.rank, batch);
        stored.clear();
        if pool.follows_answers.load(Ordering::Relaxed) {
            links(&pool.caches.read().index, &pool.key, key.rank, batch, stored);
        }
        let lag = Duration::try_from_secs_f64(now_seconds - batch.timestamp_seconds()).unwrap_or_default();
        let mut scheduler = pool.scheduler.lock();
        scheduler.late(key.rank, lag);
        scheduler.evicted(key.rank, evicted(batch), pool.gpu_blocks(key.rank), Instant::now());
        for (before, block) in &*stored {
            scheduler.grow(key.rank, *before, *block);
        }
        scheduler.progress(
            key.rank,
            |hashes| pool.caches.read().index.depth(key.rank, hashes),
            Instant::now(),
        );
        told_since
    }

    fn reset(&mut self, key: FeedKey, _: ResetReason) {
        let Some(pool) = self.pool(key) else { return };
        let mut caches = pool.caches.write();
        caches.index.clear_rank(key.rank);
        if let Some(feed) = caches.feeds.get_mut(key.rank.index()) {
            feed.reset();
        }
        drop(caches);
        pool.scheduler.lock().forget_history(key.rank);
    }

    fn state(&mut self, key: FeedKey, state: FeedState, applied_seq: Option<u64>) {
        let Some(pool) = self.pool(key) else { return };
        CacheView::set_state(&pool.caches, key.rank, state, applied_seq, Instant::now());
    }

    fn doubts(&mut self) -> Vec<(FeedKey, Doubt)> {
        self.pulse.beat(Instant::now());
        self.pools.table().iter().for_each(|pool| CacheView::sweep(&pool.caches));
        let of_pool = |pool: &Arc<Pool>| {
            let id = pool.id;
            pool.take_doubts().into_iter().map(move |(rank, doubt)| (FeedKey { pool: id, rank }, doubt))
        };
        self.pools.table().iter().flat_map(of_pool).collect()
    }

    fn removed(&mut self, key: FeedKey) {
        if let Some(pool) = self.pool(key) {
            pool.release(key.rank);
        }
    }
}

/// How many blocks have left the GPU tier.
fn evicted(batch: &Batch) -> u32 {
    let left = batch.events().map(|event| match event {
        KvEvent::Removed { tier: Tier::Gpu, engine_hashes } => engine_hashes.len(),
        _ => 0,
    });
    u32::try_from(left.sum::<usize>()).unwrap_or(u32::MAX)
}

/// Every block that the batch has stored in the GPU tier, with the one before it, where its place is known.
fn links(
    index: &Index,
    key: &HashKey,
    rank: RankId,
    batch: &Batch,
    out: &mut Vec<(SequenceHash, SequenceHash)>,
) {
    for event in batch.events() {
        let KvEvent::Stored(Stored { tier: Tier::Gpu, parent, root, block_hashes, .. }) = event else {
            continue;
        };
        let before = parent.map_or(Some(root), |parent| index.sequence(rank, parent));
        let Some(mut before) = before else { continue };
        for block in block_hashes {
            let next = key.chain(before, *block);
            out.push((before, next));
            before = next;
        }
    }
}

impl Pool {
    /// Applies a batch of a rank, as [`Sink::apply`].
    fn apply(&self, rank: RankId, seq: u64, batch: &Batch, now_seconds: f64) -> Option<u64> {
        for name in batch.adapters() {
            self.adapters.learn(name);
        }
        CacheView::apply(&self.caches, rank, seq, batch, now_seconds)
    }

    /// Finds the place of what stands behind batches that were missed, in what is booked on the rank.
    fn adopt_orphans(&self, rank: RankId, batch: &Batch) {
        let orphans = {
            let caches = self.caches.read();
            match caches.feeds.get(rank.index()).map(|feed| feed.state) {
                Some(FeedState::Degraded(_)) => orphans(&caches.index, rank, batch.events()),
                // Nothing was missed: what a store stands behind is still to come.
                _ => return,
            }
        };
        if orphans.is_empty() {
            return;
        }
        let prompts = self.scheduler.lock().prompts(rank);
        for (block, chain) in places(&self.key, &orphans, &prompts) {
            self.caches.write().index.adopt(rank, block, chain);
        }
    }
}

#[cfg(test)]
mod tests;
