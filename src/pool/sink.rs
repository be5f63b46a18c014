//! What the KV events do to a pool: the index follows them, and bookings see their prefill advance.

use super::Pool;
use crate::{
    events::{Batch, FeedState, ResetReason, Sink},
    units::RankId,
};
use std::{
    sync::Arc,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

/// Names one rank's stream: the pool's place in the configuration and the rank in it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FeedKey {
    /// The pool's place in the configuration.
    pub pool: u16,
    /// The rank in it.
    pub rank: RankId,
}

/// Hands events to the pools; lives on the events thread.
#[derive(Debug)]
pub struct EventSink {
    pools: Vec<Arc<Pool>>,
}

impl EventSink {
    /// A sink for these pools, whose places are the `pool` of the [`FeedKey`]s.
    #[must_use]
    pub const fn new(pools: Vec<Arc<Pool>>) -> Self {
        Self { pools }
    }

    fn pool(&self, key: FeedKey) -> Option<&Pool> {
        self.pools.get(usize::from(key.pool)).map(Arc::as_ref)
    }
}

impl Sink for EventSink {
    type Key = FeedKey;

    fn apply(&mut self, key: FeedKey, seq: u64, batch: &Batch) {
        let Some(pool) = self.pool(key) else { return };
        // A clock before the epoch is no clock: the lag is then 0.
        let now_seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        pool.apply(key.rank, seq, batch, now_seconds);
        let mut scheduler = pool.scheduler.lock();
        scheduler.progress(
            key.rank,
            |hashes| pool.caches.read().index.depth(key.rank, hashes),
            Instant::now(),
        );
    }

    fn reset(&mut self, key: FeedKey, _: ResetReason) {
        let Some(pool) = self.pool(key) else { return };
        let mut caches = pool.caches.write();
        caches.index.clear_rank(key.rank);
        if let Some(feed) = caches.feeds.get_mut(key.rank.index()) {
            feed.reset();
        }
    }

    fn state(&mut self, key: FeedKey, state: FeedState, applied_seq: Option<u64>) {
        let Some(pool) = self.pool(key) else { return };
        if let Some(feed) = pool.caches.write().feeds.get_mut(key.rank.index()) {
            feed.set_state(state, applied_seq, Instant::now());
        }
    }

    fn removed(&mut self, _: FeedKey) {
        // Ranks do not leave yet: the configuration is static.
    }
}

impl Pool {
    /// Applies a batch of a rank to the index.
    fn apply(&self, rank: RankId, seq: u64, batch: &Batch, now_seconds: f64) {
        for name in batch.adapters() {
            self.adapters.learn(name);
        }
        let mut caches = self.caches.write();
        let caches = &mut *caches;
        if caches.feeds.get_mut(rank.index()).is_some_and(|feed| feed.see(seq, batch, now_seconds)) {
            caches.index.clear_rank(rank);
        }
        for event in batch.events() {
            caches.index.apply(rank, &event);
        }
        caches.index.end_batch(rank);
    }
}

#[cfg(test)]
mod tests;
