//! What the KV events do to a pool: the index follows them, and bookings see their prefill advance.

use super::Pool;
use crate::{
    events::{Batch, FeedState, ResetReason, Sink},
    units::RankId,
};
use std::{sync::Arc, time::Instant};

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
        {
            let mut caches = pool.caches.write();
            let caches = &mut *caches;
            for event in batch.events() {
                caches.index.apply(key.rank, &event);
            }
            if let Some(feed) = caches.feeds.get_mut(key.rank.index()) {
                feed.applied_seq = Some(seq);
                feed.block_tokens = batch.block_tokens().or(feed.block_tokens);
            }
        }
        let mut scheduler = pool.scheduler.lock();
        scheduler.progress(
            key.rank,
            |hashes| pool.caches.read().index.depth(key.rank, hashes),
            Instant::now(),
        );
    }

    fn reset(&mut self, key: FeedKey, _: ResetReason) {
        let Some(pool) = self.pool(key) else { return };
        pool.caches.write().index.clear_rank(key.rank);
    }

    fn state(&mut self, key: FeedKey, state: FeedState, applied_seq: Option<u64>) {
        let Some(pool) = self.pool(key) else { return };
        let mut caches = pool.caches.write();
        let Some(feed) = caches.feeds.get_mut(key.rank.index()) else { return };
        feed.state = state;
        feed.applied_seq = applied_seq;
    }

    fn removed(&mut self, _: FeedKey) {
        // Ranks do not leave yet: the configuration is static.
    }
}
