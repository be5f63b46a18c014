//! Signs of life of the loops that must never stop.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// How often a loop gives one, at least.
pub const PERIOD: Duration = Duration::from_secs(1);

/// When a loop last gave a sign of life.
#[derive(Debug)]
pub struct Pulse {
    born: Instant,
    /// Milliseconds from then to the last beat.
    beat_ms: AtomicU64,
}

impl Pulse {
    /// One that beats `now`.
    #[must_use]
    pub const fn new(now: Instant) -> Self {
        Self { born: now, beat_ms: AtomicU64::new(0) }
    }

    /// The loop has come round.
    pub fn beat(&self, now: Instant) {
        let since = now.saturating_duration_since(self.born).as_millis();
        self.beat_ms.store(u64::try_from(since).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// For how long it has not.
    #[must_use]
    pub fn age(&self, now: Instant) -> Duration {
        let beat = Duration::from_millis(self.beat_ms.load(Ordering::Relaxed));
        now.saturating_duration_since(self.born).saturating_sub(beat)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_age_is_that_of_the_last_beat() {
        let (born, second) = (Instant::now(), Duration::from_secs(1));
        let pulse = Pulse::new(born);
        assert_eq!(pulse.age(born + 5 * second), 5 * second);
        pulse.beat(born + 5 * second);
        assert_eq!(pulse.age(born + 7 * second), 2 * second);
        assert_eq!(pulse.age(born), Duration::ZERO, "a clock that was read before");
    }
}
