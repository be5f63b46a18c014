//! A sum that slowly fades: the work a rank was given of late, also when nothing is in flight.

use std::time::{Duration, Instant};

/// A sum of tokens that halves every half-life.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fading {
    tokens: f64,
    at: Instant,
}

impl Fading {
    pub(super) const fn empty(now: Instant) -> Self {
        Self { tokens: 0.0, at: now }
    }

    /// What is left of the sum at `now`.
    pub(super) fn at(&self, now: Instant, half_life: Duration) -> f64 {
        let age = now.saturating_duration_since(self.at).as_secs_f64();
        self.tokens * (-age / half_life.as_secs_f64().max(f64::MIN_POSITIVE)).exp2()
    }

    /// Adds tokens, or takes them back; never below nothing.
    pub(super) fn add(&mut self, tokens: f64, now: Instant, half_life: Duration) {
        *self = Self { tokens: (self.at(now, half_life) + tokens).max(0.0), at: now.max(self.at) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_halves_every_half_life_and_never_goes_below_nothing() {
        let (start, life) = (Instant::now(), Duration::from_secs(60));
        let mut sum = Fading::empty(start);
        sum.add(800.0, start, life);
        assert!((sum.at(start + life, life) - 400.0).abs() < 1e-9);
        sum.add(100.0, start + life, life);
        assert!((sum.at(start + 2 * life, life) - 250.0).abs() < 1e-9);
        sum.add(-1000.0, start + 2 * life, life);
        assert_eq!(sum.at(start + 2 * life, life), 0.0);
        assert!((sum.at(start, life)).abs() < 1e-9, "a clock that goes back changes nothing");
    }
}
