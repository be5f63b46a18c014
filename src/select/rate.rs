//! How fast the pool's ranks prefill, learned from what their KV events confirm.

use std::time::{Duration, Instant};

/// Time is counted only while at least so many booked tokens are to be prefilled, about half a step of an engine: below
/// it the way to the engine, its step and the way of the events take longer than the work.
const LEAST_QUEUE_TOKENS: u64 = 1024;

/// So long without a confirmed token is a stall, of the engine or of its events, and says nothing of its speed.
const STALL: Duration = Duration::from_secs(10);

/// A second of work fades to 37 % of its weight while a rank works for so many others.
const MEMORY_SECONDS: f64 = 600.0;

/// The first guess counts as so many seconds of work.
const GUESS_SECONDS: f64 = 10.0;

/// What the rate can be, tokens per second: from a small model on a CPU to one that no accelerator reaches. Beyond lies
/// an error, of a clock or of the events.
const BOUNDS: (f64, f64) = (50.0, 1_000_000.0);

/// Prompt tokens that one busy rank computes a second: a slow mean over all ranks of a pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct PrefillRate {
    tokens: f64,
    seconds: f64,
}

impl PrefillRate {
    pub(super) const fn new(first_guess: f64) -> Self {
        Self { tokens: first_guess * GUESS_SECONDS, seconds: GUESS_SECONDS }
    }

    /// Above 0.
    pub(super) fn tokens_per_second(&self) -> f64 {
        (self.tokens / self.seconds).clamp(BOUNDS.0, BOUNDS.1)
    }

    fn see(&mut self, tokens: u64, busy: Duration) {
        let fade = (-busy.as_secs_f64() / MEMORY_SECONDS).exp();
        self.tokens = self.tokens * fade + tokens as f64;
        self.seconds = self.seconds * fade + busy.as_secs_f64();
    }
}

/// Since when a rank has been busy without news of its prefills.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stopwatch(Option<Instant>);

impl Stopwatch {
    /// The rank's queue has become longer.
    pub(super) fn see_queue(&mut self, queue_tokens: u64, now: Instant) {
        self.0 = (queue_tokens >= LEAST_QUEUE_TOKENS).then(|| self.0.unwrap_or(now));
    }

    /// The rank's queue has become shorter, but not by what was confirmed.
    pub(super) fn ease(&mut self, queue_tokens: u64) {
        self.0 = self.0.filter(|_| queue_tokens >= LEAST_QUEUE_TOKENS);
    }

    /// Events have confirmed prompt tokens; `queue_tokens` are left.
    pub(super) fn confirm(&mut self, tokens: u64, queue_tokens: u64, now: Instant, rate: &mut PrefillRate) {
        if tokens > 0 {
            let busy = self.0.take().map(|since| now.saturating_duration_since(since));
            if let Some(busy) = busy.filter(|busy| *busy < STALL) {
                rate.see(tokens, busy);
            }
        }
        self.see_queue(queue_tokens, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_millis(100);

    /// The rate after so many steps of a rank that always has `queue` tokens left.
    fn after(steps: u32, tokens: u64, queue: u64, step: Duration) -> f64 {
        let start = Instant::now();
        let (mut rate, mut watch) = (PrefillRate::new(12_000.0), Stopwatch::default());
        watch.see_queue(queue, start);
        for at in 1..=steps {
            watch.confirm(tokens, queue, start + step * at, &mut rate);
        }
        rate.tokens_per_second()
    }

    #[test]
    fn it_is_the_guess_at_first_and_what_is_confirmed_later() {
        assert_eq!(after(0, 0, 5_000, STEP), 12_000.0);
        let early = after(10, 300, 5_000, STEP);
        assert!((10_000.0..12_000.0).contains(&early), "a second of work moves it a little: {early}");
        let late = after(60_000, 300, 5_000, STEP);
        assert!((2_900.0..3_100.0).contains(&late), "{late}");
    }

    #[test]
    fn short_queues_and_stalls_say_nothing() {
        assert_eq!(after(1_000, 300, LEAST_QUEUE_TOKENS - 1, STEP), 12_000.0);
        assert_eq!(after(1_000, 1, 5_000, STALL), 12_000.0);
    }

    #[test]
    fn nonsense_is_bounded() {
        assert_eq!(after(100_000, u64::MAX / 2, 5_000, Duration::ZERO), BOUNDS.1);
        assert_eq!(after(1_000, 1, 5_000, Duration::from_secs(9)), BOUNDS.0);
    }

    #[test]
    fn time_without_a_queue_does_not_count() {
        let start = Instant::now();
        let (mut rate, mut watch) = (PrefillRate::new(12_000.0), Stopwatch::default());
        watch.see_queue(5_000, start);
        watch.ease(0);
        watch.see_queue(5_000, start + 50 * STEP);
        watch.see_queue(9_000, start + 51 * STEP);
        watch.confirm(2_400, 0, start + 52 * STEP, &mut rate);
        let learned = rate.tokens_per_second();
        assert!((learned - 12_000.0).abs() < 1e-6, "2,400 tokens in two steps: {learned}");
    }
}
