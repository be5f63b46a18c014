//! Places for connections.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};
use tokio::sync::Notify;

/// How many connections may be open at once. The number may change while they are.
#[derive(Debug)]
pub(super) struct Slots {
    limit: AtomicUsize,
    open: AtomicUsize,
    changed: Notify,
}

/// One connection's place; given back when dropped.
#[derive(Debug)]
pub(super) struct Slot(Arc<Slots>);

impl Slots {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit: limit.into(), open: AtomicUsize::new(0), changed: Notify::new() }
    }

    /// Connections beyond a lower limit stay until they end.
    pub(super) fn set_limit(&self, limit: usize) {
        self.limit.store(limit, Ordering::SeqCst);
        self.changed.notify_one();
    }

    /// Waits for a place. Only one may wait: the loop that accepts.
    pub(super) async fn take(self: &Arc<Self>) -> Slot {
        while self.open.load(Ordering::SeqCst) >= self.limit.load(Ordering::SeqCst) {
            // A notice that came since then is kept.
            self.changed.notified().await;
        }
        self.open.fetch_add(1, Ordering::SeqCst);
        Slot(Arc::clone(self))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::SeqCst);
        self.0.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_place_is_free_when_another_is_given_back_or_the_limit_rises() {
        let slots = Arc::new(Slots::new(1));
        let first = slots.take().await;
        let mut waiting = take(&slots);
        assert!(!waiting.is_finished());
        drop(first);
        let second = waiting.await.expect("no panic");
        waiting = take(&slots);
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished(), "one is open");
        slots.set_limit(2);
        let third = waiting.await.expect("no panic");
        slots.set_limit(1);
        drop(second);
        waiting = take(&slots);
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished(), "one is open still");
        drop(third);
        drop(waiting.await.expect("no panic"));
    }

    fn take(slots: &Arc<Slots>) -> tokio::task::JoinHandle<Slot> {
        let slots = Arc::clone(slots);
        tokio::spawn(async move { slots.take().await })
    }
}
