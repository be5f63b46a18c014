//! What the last polls prove about requests whose end nobody told.
//!
//! A request that lives is counted at every poll by whoever has it. So of the requests that were booked before a run of
//! polls began, no more can live than the largest count of the run.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// Polls without a break that prove something. A single one may fall between the choice and the request's arrival.
const MIN_POLLS: usize = 5;

/// The least time from the first of them to the last: HAProxy counts a request nowhere in the second that it waits
/// before it tries again (`timeout connect`, at most 1 s).
const MIN_SPAN: Duration = Duration::from_secs(3);

/// The counts of one side, HAProxy or an engine, without a break.
#[derive(Clone, Debug, Default)]
pub struct Sightings {
    polls: VecDeque<(Instant, u32)>,
}

/// What a run of polls proves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Verdict {
    /// When the run began.
    pub since: Instant,
    /// How many requests older than that can live at most.
    pub at_most: u32,
}

impl Sightings {
    /// Takes in the count of one poll, made at `now`.
    pub fn see(&mut self, now: Instant, count: u32) {
        self.polls.push_back((now, count));
        let proves = |polls: &VecDeque<(Instant, u32)>, from: usize| {
            let since = polls.get(from).map_or(now, |(at, _)| *at);
            polls.len() - from >= MIN_POLLS && now.saturating_duration_since(since) >= MIN_SPAN
        };
        while proves(&self.polls, 1) {
            self.polls.pop_front();
        }
    }

    /// A poll failed, or who counts is another one now: the run is broken.
    pub fn interrupt(&mut self) {
        self.polls.clear();
    }

    /// What the run up to `now` proves; nothing if it is too short, or its last poll too long ago.
    #[must_use]
    pub fn verdict(&self, now: Instant) -> Option<Verdict> {
        let (since, last) = (self.polls.front()?.0, self.polls.back()?.0);
        let long = self.polls.len() >= MIN_POLLS && last.saturating_duration_since(since) >= MIN_SPAN;
        // As long ago as the run is long: then a poll is overdue.
        let fresh = now.saturating_duration_since(last) <= last.saturating_duration_since(since);
        let at_most = self.polls.iter().map(|(_, count)| *count).max()?;
        (long && fresh).then_some(Verdict { since, at_most })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn seen(start: Instant, period: Duration, counts: &[u32]) -> Sightings {
        let mut sightings = Sightings::default();
        for (at, count) in (0u32..).zip(counts) {
            sightings.see(start + period * at, *count);
        }
        sightings
    }

    #[test]
    fn a_run_bounds_what_lived_before_it_by_its_largest_count() {
        let start = Instant::now();
        let run = seen(start, SECOND, &[1, 0, 2, 0, 0]);
        assert_eq!(run.verdict(start + 4 * SECOND), Some(Verdict { since: start, at_most: 2 }));
        let longer = seen(start, SECOND, &[9, 1, 0, 0, 0, 1]);
        assert_eq!(longer.verdict(start + 5 * SECOND), Some(Verdict { since: start + SECOND, at_most: 1 }));
    }

    #[test]
    fn few_polls_or_a_short_time_prove_nothing() {
        let start = Instant::now();
        assert_eq!(seen(start, SECOND, &[0; 4]).verdict(start + 3 * SECOND), None);
        assert_eq!(seen(start, SECOND / 10, &[0; 20]).verdict(start + 2 * SECOND), None);
        assert!(seen(start, SECOND / 10, &[0; 40]).verdict(start + 4 * SECOND).is_some());
    }

    #[test]
    fn an_interrupted_or_overdue_run_proves_nothing() {
        let start = Instant::now();
        let mut run = seen(start, SECOND, &[0; 5]);
        assert_eq!(run.verdict(start + 9 * SECOND), None);
        run.interrupt();
        assert_eq!(run.verdict(start + 4 * SECOND), None);
    }
}
