//! Dead reckoning: the queue of a rank now, from KV events that tell of it as it was a moment ago, or not at all.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Beyond this, late events say too little of what came after them.
const LONGEST_LAG: Duration = Duration::from_secs(10);

/// Prefills in each half of the window over which the least delay is taken: enough that one of them met no long step.
const HALF_WINDOW: u32 = 16;

/// How late one rank's events tell of its prefills, and what was booked on it meanwhile.
///
/// The lag is measured by our own clock: the least time from a booking on a rank that had nothing to prefill to the event
/// that tells of its end, but for the time of the prefill itself. It includes what lies on the way to the engine, and
/// needs no clock of the engine's.
#[derive(Clone, Debug, Default)]
pub(super) struct Reckoning {
    /// The least delays of this half of the window and of the one before it.
    least: [Option<Duration>; 2],
    seen: u32,
    /// When an event last told of a prefill.
    news_at: Option<Instant>,
    /// Bookings of the last seconds, the oldest first: when, and how many uncached tokens.
    recent: VecDeque<(Instant, u32)>,
}

impl Reckoning {
    /// How late the events are; nothing while that is not known.
    pub(super) fn lag(&self) -> Duration {
        let least = self.least.iter().flatten().min();
        least.copied().unwrap_or_default().min(LONGEST_LAG)
    }

    /// An event has told of the end of a prefill that nothing stood before, so much later than it should have ended.
    pub(super) fn see_delay(&mut self, delay: Duration) {
        let [current, before] = &mut self.least;
        *current = Some(current.map_or(delay, |least| least.min(delay)));
        self.seen += 1;
        if self.seen >= HALF_WINDOW {
            *before = current.take();
            self.seen = 0;
        }
    }

    /// An event has told of a prefill.
    pub(super) fn see_news(&mut self, now: Instant) {
        self.news_at = Some(now);
    }

    /// So many uncached tokens were booked.
    pub(super) fn booked(&mut self, tokens: u32, now: Instant) {
        while self.recent.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) > LONGEST_LAG) {
            self.recent.pop_front();
        }
        self.recent.push_back((now, tokens));
    }

    /// The queue as it most likely is now, of which `seen_tokens` are not yet seen computed: what is older than the lag was
    /// the queue then; since then the rank has worked at `rate`, as far as it had something to do. Where events get lost
    /// (`is_lossy`), silence means that these were among them, and the rank works; elsewhere, that it does not.
    pub(super) fn queue_tokens(&self, seen_tokens: u64, rate: f64, is_lossy: bool, now: Instant) -> f64 {
        let unheard = match self.news_at {
            Some(at) if is_lossy => now.saturating_duration_since(at).min(LONGEST_LAG),
            _ => Duration::ZERO,
        };
        let lag = self.lag().max(unheard);
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
        let mut reckoning = Reckoning::default();
        for delay in [1300, 1000, 1900] {
            reckoning.see_delay(Duration::from_millis(delay));
        }
        (reckoning, Instant::now() + 100 * SECOND)
    }

    #[test]
    fn without_a_lag_the_queue_is_what_is_seen() {
        let mut reckoning = Reckoning::default();
        let now = Instant::now();
        reckoning.booked(500, now);
        assert_eq!(reckoning.queue_tokens(3_000, RATE, false, now), 3_000.0);
    }

    #[test]
    fn what_was_queued_before_the_lag_has_been_worked_at_since() {
        let (reckoning, now) = late();
        assert_eq!(reckoning.lag(), SECOND);
        assert_eq!(reckoning.queue_tokens(25_000, RATE, false, now), 15_000.0);
        assert_eq!(reckoning.queue_tokens(8_000, RATE, false, now), 0.0);
    }

    #[test]
    fn what_was_booked_since_then_has_been_worked_at_from_its_booking_on() {
        let (mut reckoning, now) = late();
        reckoning.booked(6_000, now - 7 * SECOND / 10);
        reckoning.booked(6_000, now - SECOND / 10);
        // 2,000 of before are done in 0.2 s; the first 6,000 exactly when the second ones come.
        assert_eq!(reckoning.queue_tokens(14_000, RATE, false, now).round(), 5_000.0);
        // 5,000 of before take half a second, and 2,000 of the first 6,000 are left then.
        assert_eq!(reckoning.queue_tokens(17_000, RATE, false, now).round(), 7_000.0);
        assert_eq!(reckoning.queue_tokens(3_000, RATE, false, now), 3_000.0, "never more than is seen");
    }

    #[test]
    fn where_events_get_lost_a_silent_rank_is_taken_to_work() {
        let mut reckoning = Reckoning::default();
        let now = Instant::now() + 100 * SECOND;
        reckoning.see_news(now - 2 * SECOND);
        reckoning.booked(6_000, now - SECOND);
        assert_eq!(reckoning.queue_tokens(20_000, RATE, false, now), 20_000.0);
        // 14,000 of before, of which 10,000 are done in the first second.
        assert_eq!(reckoning.queue_tokens(20_000, RATE, true, now), 0.0);
        assert_eq!(reckoning.queue_tokens(40_000, RATE, true, now), 20_000.0);
    }

    #[test]
    fn the_lag_is_the_least_delay_of_late() {
        let (mut reckoning, _) = late();
        for _ in 0..HALF_WINDOW {
            reckoning.see_delay(3 * SECOND);
        }
        assert_eq!(reckoning.lag(), SECOND);
        for _ in 0..2 * HALF_WINDOW {
            reckoning.see_delay(3 * SECOND);
        }
        assert_eq!(reckoning.lag(), 3 * SECOND);
        for _ in 0..2 * HALF_WINDOW {
            reckoning.see_delay(60 * SECOND);
        }
        assert_eq!(reckoning.lag(), LONGEST_LAG);
    }
}
