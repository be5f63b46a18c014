//! Dead reckoning: the queue of a rank now, from KV events that tell of it as it was a moment ago.

use smallvec::SmallVec;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Beyond this, late events say too little of what came after them.
const LONGEST_LAG: Duration = Duration::from_secs(10);

/// Delays that are remembered.
const DELAYS: usize = 64;

/// Of these one in so many may be shorter than the lag: the event of another request told of the same blocks before its time.
/// Most are longer, as a rank is in the middle of a step, or has requests of which nothing is known here.
const SHORTER: usize = 40;

/// How late the events of a pool tell of its prefills.
///
/// It is measured by our own clock: the time from a booking on a rank that had nothing to prefill to the event that tells of its
/// end, but for the time of the prefill itself. It includes what lies on the way to the engine, and needs no clock of the
/// engine's.
#[derive(Debug, Default)]
pub(super) struct Lag {
    /// The last delays, the oldest first.
    delays: VecDeque<Duration>,
    lag: Duration,
}

impl Lag {
    /// How late the events are; nothing while that is not known.
    pub(super) const fn get(&self) -> Duration {
        self.lag
    }

    /// An event has told of the end of a prefill that nothing stood before, so much later than it should have ended.
    pub(super) fn see_delay(&mut self, delay: Duration) {
        if self.delays.len() == DELAYS {
            self.delays.pop_front();
        }
        self.delays.push_back(delay);
        let mut sorted: SmallVec<[Duration; DELAYS]> = self.delays.iter().copied().collect();
        sorted.sort_unstable();
        let least = sorted.get(sorted.len() / SHORTER).copied();
        self.lag = least.unwrap_or_default().min(LONGEST_LAG);
    }
}

/// What was booked on one rank of late.
#[derive(Clone, Debug, Default)]
pub(super) struct Reckoning {
    /// Bookings of the last seconds, the oldest first: when, and how many uncached tokens.
    recent: VecDeque<(Instant, u32)>,
}

impl Reckoning {
    /// So many uncached tokens were booked.
    pub(super) fn booked(&mut self, tokens: u32, now: Instant) {
        while self.recent.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) > LONGEST_LAG) {
            self.recent.pop_front();
        }
        self.recent.push_back((now, tokens));
    }

    /// The queue as it most likely is now, of which `seen_tokens` are not yet seen computed: what is older than the lag was
    /// the queue then; since then the rank has worked at `rate`, as far as it had something to do.
    pub(super) fn queue_tokens(&self, seen_tokens: u64, rate: f64, lag: Duration, now: Instant) -> f64 {
        let age = |at: Instant| now.saturating_duration_since(at);
        let from = self.recent.partition_point(|(at, _)| age(*at) > lag);
        let later = || self.recent.range(from..);
        let booked_later: u64 = later().map(|(_, tokens)| u64::from(*tokens)).sum();
        let mut left = seen_tokens.saturating_sub(booked_later) as f64;
        let mut before = lag;
        for (at, tokens) in later() {
            let worked = before.saturating_sub(age(*at));
            left = (left - rate * worked.as_secs_f64()).max(0.0) + f64::from(*tokens);
            before = age(*at);
        }
        let left = left - rate * before.as_secs_f64();
        left.clamp(0.0, seen_tokens as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: f64 = 10_000.0;
    const SECOND: Duration = Duration::from_secs(1);

    fn late() -> (Reckoning, Instant) {
        (Reckoning::default(), Instant::now() + 100 * SECOND)
    }

    #[test]
    fn without_a_lag_the_queue_is_what_is_seen() {
        let mut reckoning = Reckoning::default();
        let now = Instant::now();
        reckoning.booked(500, now);
        assert_eq!(reckoning.queue_tokens(3_000, RATE, Duration::ZERO, now), 3_000.0);
    }

    #[test]
    fn what_was_queued_before_the_lag_has_been_worked_at_since() {
        let (reckoning, now) = late();
        assert_eq!(reckoning.queue_tokens(25_000, RATE, SECOND, now), 15_000.0);
        assert_eq!(reckoning.queue_tokens(8_000, RATE, SECOND, now), 0.0);
    }

    #[test]
    fn what_was_booked_since_then_has_been_worked_at_from_its_booking_on() {
        let (mut reckoning, now) = late();
        reckoning.booked(6_000, now - 7 * SECOND / 10);
        reckoning.booked(6_000, now - SECOND / 10);
        // 2,000 of before are done in 0.2 s; the first 6,000 exactly when the second ones come.
        assert_eq!(reckoning.queue_tokens(14_000, RATE, SECOND, now).round(), 5_000.0);
        // 5,000 of before take half a second, and 2,000 of the first 6,000 are left then.
        assert_eq!(reckoning.queue_tokens(17_000, RATE, SECOND, now).round(), 7_000.0);
        assert_eq!(reckoning.queue_tokens(3_000, RATE, SECOND, now), 3_000.0, "never more than is seen");
    }

    #[test]
    fn the_lag_is_about_the_least_delay_of_late() {
        let mut lag = Lag::default();
        assert_eq!(lag.get(), Duration::ZERO);
        for delay in [19, 10, 13].into_iter().cycle().take(DELAYS) {
            lag.see_delay(SECOND * delay / 10);
        }
        assert_eq!(lag.get(), SECOND, "requests of others delay some");
        lag.see_delay(Duration::from_millis(400));
        assert_eq!(lag.get(), SECOND, "a single one says little");
        for _ in 0..DELAYS {
            lag.see_delay(60 * SECOND);
        }
        assert_eq!(lag.get(), LONGEST_LAG);
    }
}
