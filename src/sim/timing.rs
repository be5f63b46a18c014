//! How long a step takes: a linear model of a GPU that prefills and decodes in one batch.

use std::time::Duration;

/// What one step computes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StepLoad {
    /// Prompt tokens computed.
    pub prefill_tokens: u64,
    /// Sum over those tokens of the tokens before them, which their attention reads.
    pub prefill_context_tokens: u64,
    /// Requests that get one more token.
    pub decodes: u64,
    /// Sum of the lengths of those requests, in tokens.
    pub decode_context_tokens: u64,
}

/// The constants of the model. The defaults are those of a 14B dense model on one H100: plausible, not fitted.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Timing {
    /// What every step takes, whatever it computes.
    pub step: Duration,
    /// Prompt tokens computed a second, short contexts assumed.
    pub prefill_tokens_per_second: f64,
    /// Seconds for a prompt token and a token before it.
    pub prefill_context_seconds: f64,
    /// Seconds for a request that gets one more token.
    pub decode_seconds: f64,
    /// Seconds for each token of such a request's context.
    pub decode_context_seconds: f64,
    /// Seconds that a load from the CPU tier takes at least.
    pub load_seconds: f64,
    /// Tokens a second that a load from the CPU tier brings.
    pub load_tokens_per_second: f64,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            step: Duration::from_millis(10),
            prefill_tokens_per_second: 16_000.0,
            prefill_context_seconds: 1.6e-9,
            decode_seconds: 50e-6,
            decode_context_seconds: 27e-9,
            load_seconds: 5e-3,
            load_tokens_per_second: 100_000.0,
        }
    }
}

impl Timing {
    /// An engine that takes no time at all, for tests of order.
    pub const INSTANT: Self = Self {
        step: Duration::ZERO,
        prefill_tokens_per_second: f64::INFINITY,
        prefill_context_seconds: 0.0,
        decode_seconds: 0.0,
        decode_context_seconds: 0.0,
        load_seconds: 0.0,
        load_tokens_per_second: f64::INFINITY,
    };

    /// The duration of a step; zero for one that computes nothing.
    #[must_use]
    pub fn step(&self, load: StepLoad) -> Duration {
        if load == StepLoad::default() {
            return Duration::ZERO;
        }
        let seconds = load.prefill_tokens as f64 / self.prefill_tokens_per_second
            + load.prefill_context_tokens as f64 * self.prefill_context_seconds
            + load.decodes as f64 * self.decode_seconds
            + load.decode_context_tokens as f64 * self.decode_context_seconds;
        self.step + duration(seconds)
    }

    /// The duration of a load from the CPU tier.
    #[must_use]
    pub fn load(&self, tokens: usize) -> Duration {
        duration(self.load_seconds + tokens as f64 / self.load_tokens_per_second)
    }
}

/// Nonsense (a rate of zero) ends as an hour, not as a panic.
fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.min(3600.0)).unwrap_or(Duration::from_secs(3600))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_costs_its_base_its_prefill_and_its_decodes() {
        let timing = Timing::default();
        assert_eq!(timing.step(StepLoad::default()), Duration::ZERO);
        let prefill = StepLoad { prefill_tokens: 1600, ..StepLoad::default() };
        assert_eq!(timing.step(prefill), Duration::from_millis(110));
        let decode = StepLoad { decodes: 100, decode_context_tokens: 100_000, ..StepLoad::default() };
        assert_eq!(timing.step(decode), Duration::from_micros(10_000 + 5_000 + 2_700));
    }

    #[test]
    fn a_rate_of_zero_is_slow_and_no_panic() {
        let timing = Timing { prefill_tokens_per_second: 0.0, ..Timing::default() };
        assert!(
            timing.step(StepLoad { prefill_tokens: 1, ..StepLoad::default() }) >= Duration::from_secs(3600)
        );
    }
}
