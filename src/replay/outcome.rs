//! What a run is worth: figures over its requests.

use crate::sim::Cached;
use serde::Serialize;
use std::time::Duration;

/// What happened to one request.
#[derive(Clone, Debug)]
pub(super) struct Record {
    arrived: Duration,
    first: Option<Duration>,
    last: Duration,
    tokens: u32,
    pub(super) cached: Cached,
    pub(super) replica: u16,
}

impl Record {
    pub(super) const fn new(arrived: Duration) -> Self {
        let cached = Cached { device_tokens: 0, host_tokens: 0, created_tokens: 0 };
        Self { arrived, first: None, last: arrived, tokens: 0, cached, replica: 0 }
    }

    /// Takes in a token; true for the first one.
    pub(super) fn token(&mut self, now: Duration, cached: Cached) -> bool {
        self.last = now;
        self.tokens += 1;
        let is_first = self.first.is_none();
        if is_first {
            self.first = Some(now);
            self.cached = cached;
        }
        is_first
    }

    pub(super) fn ttft_seconds(&self) -> f64 {
        (self.first.unwrap_or(self.last) - self.arrived).as_secs_f64()
    }

    pub(super) fn seconds(&self) -> f64 {
        (self.last - self.arrived).as_secs_f64()
    }

    /// The time for each token behind the first; `None` where there is none.
    fn tpot_seconds(&self) -> Option<f64> {
        let decoded = (self.last - self.first?).as_secs_f64();
        (self.tokens > 1).then(|| decoded / f64::from(self.tokens - 1))
    }
}

/// What a service promises.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slo {
    pub(super) ttft: Duration,
    pub(super) tpot: Duration,
}

/// The figures of one run, or the mean of several.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub(super) struct Outcome {
    /// Requests counted: those behind the warm-up.
    pub(super) requests: f64,
    /// Share of the prompt tokens that the GPU tier served.
    pub(super) gpu_hit: f64,
    /// Share that the CPU tier served.
    pub(super) cpu_hit: f64,
    /// Time to first token.
    pub(super) ttft_mean_seconds: f64,
    pub(super) ttft_p50_seconds: f64,
    pub(super) ttft_p90_seconds: f64,
    pub(super) ttft_p99_seconds: f64,
    /// Mean time per output token behind the first.
    pub(super) tpot_mean_seconds: f64,
    /// Mean time from arrival to the last token.
    pub(super) e2e_mean_seconds: f64,
    /// Share of the requests with both TTFT and TPOT as promised.
    pub(super) slo_share: f64,
    /// The same by TTFT alone.
    pub(super) slo_ttft_share: f64,
    /// The busiest replica's computing time over the mean.
    pub(super) busy_balance: f64,
    /// The same by requests. It tells little: long and short requests may be apart.
    pub(super) request_balance: f64,
}

impl Outcome {
    /// The figures over the requests behind the first `warm_up`. `prompt_tokens` are the requests' lengths, `busy` the
    /// replicas' computing times.
    pub(super) fn of(
        records: &[Record],
        prompt_tokens: &[u32],
        busy: &[Duration],
        warm_up: usize,
        slo: Slo,
    ) -> Self {
        let from = warm_up.min(records.len());
        let (records, prompt_tokens) = (&records[from..], &prompt_tokens[from..]);
        let mut ttft: Vec<f64> = records.iter().map(Record::ttft_seconds).collect();
        ttft.sort_unstable_by(f64::total_cmp);
        let tpot: Vec<f64> = records.iter().filter_map(Record::tpot_seconds).collect();
        let prompts: f64 = prompt_tokens.iter().map(|tokens| f64::from(*tokens)).sum();
        let share = |tokens: fn(&Cached) -> usize| {
            records.iter().map(|record| tokens(&record.cached) as f64).sum::<f64>() / prompts.max(1.0)
        };
        let is_quick = |record: &Record| record.ttft_seconds() < slo.ttft.as_secs_f64();
        let is_smooth =
            |record: &Record| record.tpot_seconds().is_none_or(|tpot| tpot < slo.tpot.as_secs_f64());
        let of_all = |count: usize| count as f64 / records.len().max(1) as f64;
        let mut requests = vec![0.0; busy.len()];
        for record in records {
            if let Some(count) = requests.get_mut(usize::from(record.replica)) {
                *count += 1.0;
            }
        }
        Self {
            requests: records.len() as f64,
            gpu_hit: share(|cached| cached.device_tokens),
            cpu_hit: share(|cached| cached.host_tokens),
            ttft_mean_seconds: mean(&ttft),
            ttft_p50_seconds: percentile(&ttft, 0.5),
            ttft_p90_seconds: percentile(&ttft, 0.9),
            ttft_p99_seconds: percentile(&ttft, 0.99),
            tpot_mean_seconds: mean(&tpot),
            e2e_mean_seconds: mean(&records.iter().map(Record::seconds).collect::<Vec<_>>()),
            slo_share: of_all(records.iter().filter(|record| is_quick(record) && is_smooth(record)).count()),
            slo_ttft_share: of_all(records.iter().filter(|record| is_quick(record)).count()),
            busy_balance: balance(&busy.iter().map(Duration::as_secs_f64).collect::<Vec<_>>()),
            request_balance: balance(&requests),
        }
    }

    /// The mean of several runs, figure by figure.
    pub(super) fn mean(outcomes: &[Self]) -> Self {
        let of = |figure: fn(&Self) -> f64| mean(&outcomes.iter().map(figure).collect::<Vec<_>>());
        Self {
            requests: of(|o| o.requests),
            gpu_hit: of(|o| o.gpu_hit),
            cpu_hit: of(|o| o.cpu_hit),
            ttft_mean_seconds: of(|o| o.ttft_mean_seconds),
            ttft_p50_seconds: of(|o| o.ttft_p50_seconds),
            ttft_p90_seconds: of(|o| o.ttft_p90_seconds),
            ttft_p99_seconds: of(|o| o.ttft_p99_seconds),
            tpot_mean_seconds: of(|o| o.tpot_mean_seconds),
            e2e_mean_seconds: of(|o| o.e2e_mean_seconds),
            slo_share: of(|o| o.slo_share),
            slo_ttft_share: of(|o| o.slo_ttft_share),
            busy_balance: of(|o| o.busy_balance),
            request_balance: of(|o| o.request_balance),
        }
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// Of sorted values, the least that so large a share is not above.
fn percentile(sorted: &[f64], share: f64) -> f64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

/// The greatest over the mean; 1 where there is nothing.
fn balance(values: &[f64]) -> f64 {
    let mean = mean(values);
    if mean > 0.0 { values.iter().copied().fold(0.0, f64::max) / mean } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(arrived_ms: u64, tokens_ms: &[u64], device_tokens: usize, replica: u16) -> Record {
        let millis = Duration::from_millis;
        let mut record = Record::new(millis(arrived_ms));
        let cached = Cached { device_tokens, host_tokens: 10, created_tokens: 0 };
        for (at, token) in tokens_ms.iter().enumerate() {
            assert_eq!(record.token(millis(*token), cached), at == 0);
        }
        record.replica = replica;
        record
    }

    #[test]
    fn the_figures_are_those_of_the_requests_behind_the_warm_up() {
        let records = [
            record(0, &[9_000], 0, 0),
            record(1000, &[1500, 1540, 1580], 60, 0),
            record(2000, &[3500], 30, 0),
            record(3000, &[3100, 3200], 0, 1),
        ];
        let slo = Slo { ttft: Duration::from_secs(1), tpot: Duration::from_millis(50) };
        let busy = [Duration::from_secs(3), Duration::from_secs(1)];
        let outcome = Outcome::of(&records, &[500, 100, 100, 100], &busy, 1, slo);
        assert_eq!(outcome.requests, 3.0);
        assert!((outcome.gpu_hit - 0.3).abs() < 1e-9 && (outcome.cpu_hit - 0.1).abs() < 1e-9);
        assert!((outcome.ttft_mean_seconds - 0.7).abs() < 1e-9);
        assert_eq!((outcome.ttft_p50_seconds, outcome.ttft_p99_seconds), (0.5, 1.5));
        assert!((outcome.tpot_mean_seconds - 0.07).abs() < 1e-9, "one token has no time between tokens");
        assert!((outcome.e2e_mean_seconds - (0.58 + 1.5 + 0.2) / 3.0).abs() < 1e-9);
        assert!((outcome.slo_share - 1.0 / 3.0).abs() < 1e-9, "the second is late, the third stutters");
        assert_eq!((outcome.busy_balance, outcome.request_balance), (1.5, 4.0 / 3.0));
    }

    #[test]
    fn no_requests_are_no_figures_and_no_fault() {
        let slo = Slo { ttft: Duration::ZERO, tpot: Duration::ZERO };
        let outcome = Outcome::of(&[], &[], &[], 500, slo);
        assert_eq!((outcome.ttft_mean_seconds, outcome.busy_balance), (0.0, 1.0));
    }
}
