//! The replays of all feeds: a few run, the others wait their turn.

use std::collections::VecDeque;

/// Replays by feed, with their sockets. A feed has one at most, running or waiting.
pub(super) struct Replays<K, S> {
    pub(super) running: Vec<(K, S)>,
    waiting: VecDeque<(K, u64)>,
    limit: usize,
}

impl<K: Copy + Eq, S> Replays<K, S> {
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

    pub(super) fn started(&mut self, key: K, socket: S) {
        self.running.push((key, socket));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_than_the_limit_run_at_once_whoever_asks() {
        let mut replays = Replays::new(2);
        (0..5).for_each(|key| replays.enqueue(key, 10 * key));
        let start = |replays: &mut Replays<u64, ()>| {
            let mut started = Vec::new();
            while let Some((key, from)) = replays.next() {
                replays.started(key, ());
                started.push((key, from));
            }
            started
        };
        assert_eq!(start(&mut replays), [(0, 0), (1, 10)]);
        // One that asks again gives its place up and waits behind the others.
        replays.enqueue(1, 17);
        assert_eq!(start(&mut replays), [(2, 20)]);
        // One that has no more need of it.
        replays.cancel(3);
        replays.cancel(0);
        assert_eq!(start(&mut replays), [(4, 40)]);
        replays.cancel(2);
        replays.cancel(4);
        assert_eq!(start(&mut replays), [(1, 17)]);
    }
}
