//! How soon a rank's cache gives up what it holds, seen from its events.

use std::time::{Duration, Instant};

/// Blocks that left one rank's GPU tier of late.
///
/// By Little's law blocks stay for as long as the number held divided by the rate at which they leave. That is the mean
/// over all blocks; one that is idle leaves sooner, one that is used later. Only orders of magnitude matter here.
#[derive(Clone, Copy, Debug)]
pub(super) struct Evictions {
    /// Fading sums of the blocks that left, and of the time in which they did.
    removed: f64,
    seconds: f64,
    held: u64,
    at: Instant,
}

/// How fast the sums fade, in seconds: long enough to see some evictions of a large and quiet cache.
const MEMORY_SECONDS: f64 = 120.0;

impl Evictions {
    pub(super) const fn none(now: Instant) -> Self {
        Self { removed: 0.0, seconds: 0.0, held: 0, at: now }
    }

    /// So many blocks have left, and so many are held now.
    pub(super) fn see(&mut self, removed: u32, held: u64, now: Instant) {
        let (sum, seconds) = self.sums(now);
        let at = now.max(self.at);
        *self = Self { removed: sum + f64::from(removed), seconds, held, at };
    }

    /// How long a block stays; `None` while too few have left to tell.
    pub(super) fn age(&self, now: Instant) -> Option<Duration> {
        let (removed, seconds) = self.sums(now);
        let age = self.held as f64 * seconds / removed;
        // After long quiet next to nothing is left of the sum: then nothing is known.
        (removed >= 1.0).then(|| Duration::try_from_secs_f64(age).ok()).flatten()
    }

    fn sums(&self, now: Instant) -> (f64, f64) {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        let fade = (-passed / MEMORY_SECONDS).exp();
        (self.removed * fade, self.seconds * fade + MEMORY_SECONDS * (1.0 - fade))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The age after evicting 10 of 1,000 blocks each second for so long.
    fn after(seconds: u32) -> (Evictions, Instant) {
        let start = Instant::now();
        let mut evictions = Evictions::none(start);
        let at = |second| start + Duration::from_secs(second);
        (1..=u64::from(seconds)).for_each(|second| evictions.see(10, 1000, at(second)));
        (evictions, at(seconds.into()))
    }

    #[test]
    fn a_block_stays_for_the_held_ones_over_the_rate() {
        for seconds in [10, 100, 1000] {
            let (evictions, now) = after(seconds);
            let age = evictions.age(now).expect("known").as_secs_f64();
            assert!((95.0..105.0).contains(&age), "after {seconds} s: {age}");
        }
    }

    #[test]
    fn nothing_is_known_before_the_first_eviction_and_after_long_quiet() {
        let now = Instant::now();
        assert_eq!(Evictions::none(now).age(now + Duration::from_secs(60)), None);
        let (evictions, now) = after(100);
        let later = evictions.age(now + Duration::from_secs(120)).expect("known");
        assert!(later > Duration::from_secs(200), "the quiet counts: {later:?}");
        assert_eq!(evictions.age(now + Duration::from_secs(3600)), None);
    }
}
