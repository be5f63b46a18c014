//! Bounded log volume: a flood of broken connections must not become a flood of lines.

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// Lines allowed in each period.
const LINES: u32 = 5;
/// The period.
const PERIOD: Duration = Duration::from_secs(1);

/// Lets a few lines through in each second and counts the others.
#[derive(Debug, Default)]
pub(super) struct LogLimit {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    began: Option<Instant>,
    lines: u32,
    suppressed: u64,
}

impl LogLimit {
    /// Whether a line may be written now, and how many were not since the last one.
    pub(super) fn allow(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock();
        if state.began.is_none_or(|began| now.duration_since(began) >= PERIOD) {
            state.began = Some(now);
            state.lines = 0;
        }
        if state.lines == LINES {
            state.suppressed += 1;
            return None;
        }
        state.lines += 1;
        Some(std::mem::take(&mut state.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_cut_and_its_rest_counted() {
        let limit = LogLimit::default();
        let start = Instant::now();
        for _ in 0..LINES {
            assert_eq!(limit.allow(start), Some(0));
        }
        for _ in 0..100 {
            assert_eq!(limit.allow(start), None);
        }
        assert_eq!(limit.allow(start + PERIOD), Some(100));
        assert_eq!(limit.allow(start + PERIOD), Some(0));
    }
}
