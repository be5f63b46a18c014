//! The replays of all feeds: a few run, the others wait their turn.

use super::socket::ReplaySocket;
use std::collections::VecDeque;

/// Replays by feed. A feed has one at most, running or waiting.
pub(super) struct Replays<K> {
    pub(super) running: Vec<(K, ReplaySocket)>,
    waiting: VecDeque<(K, u64)>,
    limit: usize,
}

impl<K: Copy + Eq> Replays<K> {
    pub(super) fn new(limit: usize) -> Self {
        Self { running: Vec::new(), waiting: VecDeque::new(), limit: limit.max(1) }
    }

    /// Puts a request in the queue, in place of any earlier one of the feed.
    pub(super) fn enqueue(&mut self, key: K, from: u64) {
        self.cancel(key);
        self.waiting.push_back((key, from));
    }

    pub(super) fn cancel(&mut self, key: K) {
        self.running.retain(|(running, _)| *running != key);
        self.waiting.retain(|(waiting, _)| *waiting != key);
    }

    /// The next request that may be sent now.
    pub(super) fn next(&mut self) -> Option<(K, u64)> {
        if self.running.len() < self.limit { self.waiting.pop_front() } else { None }
    }

    pub(super) fn started(&mut self, key: K, socket: ReplaySocket) {
        self.running.push((key, socket));
    }
}
