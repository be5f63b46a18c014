//! Counters of what somebody else counts.

use metrics::Counter;
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// A counter that follows a count kept elsewhere. That count may begin anew, with a pool or a replica that comes back;
/// the counter goes on from where it was.
#[derive(Clone, Debug)]
pub struct Total {
    counter: Counter,
    told: Arc<AtomicU64>,
}

impl Total {
    pub(super) fn new(counter: Counter) -> Self {
        Self { counter, told: Arc::default() }
    }

    /// The count is so high now; if that is less than before, it began anew. To be told by one thread at a time.
    pub fn absolute(&self, count: u64) {
        let before = self.told.swap(count, Ordering::Relaxed);
        self.counter.increment(count.checked_sub(before).unwrap_or(count));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use metrics::CounterFn;

    #[derive(Default)]
    struct Sum(AtomicU64);

    impl CounterFn for Sum {
        fn increment(&self, value: u64) {
            self.0.fetch_add(value, Ordering::Relaxed);
        }

        fn absolute(&self, _: u64) {
            unreachable!("it would stand still after a new beginning");
        }
    }

    #[test]
    fn a_count_that_begins_anew_adds_to_what_was_counted() {
        let sum = Arc::new(Sum::default());
        let total = Total::new(Counter::from_arc(Arc::clone(&sum)));
        for (count, all) in [(3, 3), (3, 3), (10, 10), (0, 10), (2, 12), (5, 15), (1, 16)] {
            total.absolute(count);
            assert_eq!(sum.0.load(Ordering::Relaxed), all, "at {count}");
        }
    }
}
