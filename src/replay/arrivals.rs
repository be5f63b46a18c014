//! When the requests come: which part of a workload is played, how fast, and how its time stamps are read.

use super::workload::Workload;
use std::time::Duration;

/// How the time stamps are read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
pub(super) enum Spacing {
    /// Requests with one time stamp are spread over the time to the next one: traces round their times.
    #[default]
    Spread,
    /// As they are.
    Raw,
    /// Spread, and then every 20 s squeezed into their first 4 s.
    Bursts,
}

/// Which part is played.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
pub(super) enum Half {
    /// All requests.
    #[default]
    Whole,
    /// The first half of them, on which weights may be chosen.
    First,
    /// The second half, which then tells what they are worth.
    Second,
}

/// The most that [`Spacing::Spread`] moves a request: a longer silence is one.
const LONGEST_SPREAD: Duration = Duration::from_secs(3);

const BURST_EVERY: Duration = Duration::from_secs(20);
const BURST_SQUEEZE: u32 = 5;

impl Workload {
    /// Lays arrival times over the requests, in order. What has no partner is left out.
    #[must_use]
    pub(super) fn with_arrivals(mut self, arrivals: &[Duration]) -> Self {
        self.requests.truncate(arrivals.len());
        for (request, at) in self.requests.iter_mut().zip(arrivals) {
            request.at = *at;
        }
        self
    }

    /// The part to be played, from its first arrival on.
    #[must_use]
    pub(super) fn part(mut self, half: Half) -> Self {
        let middle = self.requests.len() / 2;
        match half {
            Half::Whole => {}
            Half::First => self.requests.truncate(middle),
            Half::Second => drop(self.requests.drain(..middle)),
        }
        let first = self.requests.first().map_or(Duration::ZERO, |request| request.at);
        self.requests.iter_mut().for_each(|request| request.at -= first);
        self
    }

    /// The requests at `speed` times the pace; `seed` draws what the time stamps leave open.
    #[must_use]
    pub(super) fn arrivals(&self, spacing: Spacing, speed: f64, seed: u64) -> Vec<Duration> {
        let mut rng = fastrand::Rng::with_seed(seed);
        let stamps: Vec<Duration> = self.requests.iter().map(|request| request.at).collect();
        let mut arrivals = Vec::with_capacity(stamps.len());
        for together in stamps.chunk_by(|a, b| a == b) {
            let next = stamps.get(arrivals.len() + together.len());
            let gap = next.map_or(Duration::ZERO, |next| *next - together[0]).min(LONGEST_SPREAD);
            for (place, at) in together.iter().enumerate() {
                let share = match spacing {
                    Spacing::Raw => 0.0,
                    _ => (place as f64 + rng.f64()) / together.len() as f64,
                };
                let at = *at + gap.mul_f64(share);
                let at = if spacing == Spacing::Bursts { squeezed(at) } else { at };
                arrivals.push(at.div_f64(speed));
            }
        }
        arrivals
    }
}

fn squeezed(at: Duration) -> Duration {
    let into = Duration::from_nanos((at.as_nanos() % BURST_EVERY.as_nanos()) as u64);
    at - into + into / BURST_SQUEEZE
}

#[cfg(test)]
mod tests {
    use super::super::workload::Request;
    use super::*;

    fn workload(seconds: &[u64]) -> Workload {
        let request = |at: &u64| Request {
            at: Duration::from_secs(*at),
            prompt_tokens: 1,
            answer_tokens: 1,
            pieces: vec![1],
        };
        Workload::with_answers(1, seconds.iter().map(request).collect())
    }

    fn millis(arrivals: &[Duration]) -> Vec<u128> {
        arrivals.iter().map(Duration::as_millis).collect()
    }

    #[test]
    fn what_has_one_stamp_is_spread_in_order_over_the_time_to_the_next() {
        let stamps = workload(&[0, 0, 0, 3, 60]);
        let at = millis(&stamps.arrivals(Spacing::Spread, 1.0, 1));
        assert!(at[0] < 1000 && (1000..2000).contains(&at[1]) && (2000..3000).contains(&at[2]), "{at:?}");
        assert!((3000..6000).contains(&at[3]), "no further than 3 s: {at:?}");
        assert_ne!(at, millis(&stamps.arrivals(Spacing::Spread, 1.0, 2)), "by chance");
        assert_eq!(millis(&stamps.arrivals(Spacing::Raw, 2.0, 1)), [0, 0, 0, 1500, 30_000]);
    }

    #[test]
    fn bursts_leave_sixteen_of_twenty_seconds_idle() {
        let stamps: Vec<u64> = (0..60).collect();
        let arrivals = workload(&stamps).arrivals(Spacing::Bursts, 1.0, 1);
        assert!(arrivals.is_sorted());
        assert!(arrivals.iter().all(|at| at.as_millis() % 20_000 < 4000));
    }

    #[test]
    fn halves_start_at_nought_and_share_nothing() {
        let whole = workload(&[0, 1, 2, 5, 9]);
        let stamps = |half| -> Vec<u64> {
            whole.clone().part(half).requests.iter().map(|request| request.at.as_secs()).collect()
        };
        assert_eq!((stamps(Half::First), stamps(Half::Second)), (vec![0, 1], vec![0, 3, 7]));
        assert_eq!(stamps(Half::Whole).len(), 5);
    }

    #[test]
    fn arrivals_of_another_trace_replace_the_stamps_in_order() {
        let laid = workload(&[0, 1, 2]).with_arrivals(&[Duration::from_secs(7), Duration::from_secs(8)]);
        assert_eq!(laid.requests.iter().map(|request| request.at.as_secs()).collect::<Vec<_>>(), [7, 8]);
    }
}
