//! Whether an engine fills blocks of which its KV events say nothing.
//!
//! The engine's counters tell how many tokens it computed. A request leaves less than one block that is not full, and
//! every full one is published. So where more tokens were computed than the requests that took part could leave
//! behind, a batch must have come. That is never so while all of them decode within a block, or find their prompts
//! cached.

use crate::replica::EngineReport;

/// Blocks that each request may leave unpublished: one that is not full, and one whose tokens the engine's front end
/// counted later than they were computed.
const UNPUBLISHED_BLOCKS: u64 = 2;

/// How far a stream had come, in batches applied. Another number than before: it spoke.
pub(super) type Heard = u64;

/// One rank's stream against its engine's counters.
#[derive(Debug, Default)]
pub(super) struct Silence {
    heard: Option<Heard>,
    /// What the engine had counted at the first poll of this silence.
    since: Option<Since>,
    told: bool,
}

#[derive(Clone, Copy, Debug)]
struct Since {
    report: EngineReport,
    /// Prompt tokens computed when every request of then had its first token. Of the prompts before, parts may have been
    /// published before the silence.
    computed: Option<u64>,
}

impl Silence {
    /// Takes in a poll of the engine: how far the stream was when it was asked and when it had answered, what it
    /// answered, and the tokens of a block. Returns whether the engine must have published since the stream last spoke;
    /// once for each silence.
    pub(super) fn see(&mut self, heard: [Heard; 2], report: &EngineReport, block_tokens: u32) -> bool {
        let [asked, answered] = heard;
        if self.heard != Some(answered) {
            *self = Self { heard: Some(answered), ..Self::default() };
        }
        if asked != answered {
            // What it counted may be older than the batch that came meanwhile.
            return false;
        }
        let (Some(begun), Some(generated)) = (report.first_tokens, report.generated_tokens) else {
            return false;
        };
        let Some(since) = &mut self.since else {
            self.since = Some(Since { report: *report, computed: None });
            return false;
        };
        let before = since.report;
        let begun_before = before.first_tokens.unwrap_or_default();
        let Some(begun) = begun.checked_sub(begun_before) else {
            // Counters that go back are another process's.
            self.since = None;
            return false;
        };
        if begun >= u64::from(before.requests()) {
            since.computed.get_or_insert(report.computed_tokens);
        }
        let prompts = report.computed_tokens.saturating_sub(since.computed.unwrap_or(report.computed_tokens));
        let answers = generated.saturating_sub(before.generated_tokens.unwrap_or_default());
        let requests = begun + u64::from(before.requests());
        let at_most = requests.saturating_mul(UNPUBLISHED_BLOCKS * u64::from(block_tokens.max(1)));
        let proven = prompts + answers > at_most;
        proven && !std::mem::replace(&mut self.told, true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u32 = 16;

    /// Polls in a row while nothing is heard: running requests, first tokens, tokens generated, prompt tokens computed.
    fn see(silence: &mut Silence, polls: &[(u32, u64, u64, u64)]) -> Vec<bool> {
        let report = |(running, first_tokens, generated, computed_tokens)| EngineReport {
            running,
            first_tokens: Some(first_tokens),
            generated_tokens: Some(generated),
            computed_tokens,
            ..EngineReport::default()
        };
        polls.iter().map(|poll| silence.see([7, 7], &report(*poll), BLOCK)).collect()
    }

    #[test]
    fn more_tokens_than_the_requests_can_leave_in_their_last_blocks_prove_a_block() {
        let mut silence = Silence::default();
        let polls = [(2, 5, 100, 0), (2, 5, 164, 0), (2, 5, 165, 0), (2, 5, 999, 0)];
        assert_eq!(see(&mut silence, &polls), [false, false, true, false], "told once");
    }

    #[test]
    fn many_requests_that_decode_within_a_block_prove_nothing() {
        let mut silence = Silence::default();
        let polls: Vec<_> = (0..100).map(|at| (8, 8 * at, 8 * 30 * at, 0)).collect();
        assert!(!see(&mut silence, &polls).contains(&true));
    }

    #[test]
    fn prompts_count_once_those_under_way_before_have_their_first_token() {
        let mut silence = Silence::default();
        // Of the first two prompts, all may have been published before the silence.
        let polls = [(2, 0, 0, 0), (1, 2, 2, 8000), (1, 3, 3, 8090), (1, 4, 4, 8400)];
        assert_eq!(see(&mut silence, &polls), [false, false, false, true]);
    }

    #[test]
    fn cached_prompts_prove_nothing() {
        let mut silence = Silence::default();
        let polls: Vec<_> = (0..100).map(|at| (1, at, at, 16 * at)).collect();
        assert!(!see(&mut silence, &polls).contains(&true));
    }

    #[test]
    fn a_batch_a_restart_or_missing_counters_begin_anew() {
        let busy = |generated| EngineReport {
            running: 1,
            first_tokens: Some(1),
            generated_tokens: Some(generated),
            ..EngineReport::default()
        };
        let mut silence = Silence::default();
        assert!(!silence.see([7, 7], &busy(0), BLOCK));
        assert!(!silence.see([7, 8], &busy(500), BLOCK), "a batch came while the engine was asked");
        assert!(!silence.see([8, 8], &busy(700), BLOCK));
        assert!(silence.see([8, 8], &busy(800), BLOCK));
        assert!(!silence.see([9, 9], &busy(900), BLOCK));
        assert!(!silence.see([9, 9], &EngineReport { first_tokens: None, ..busy(2000) }, BLOCK));
        assert!(!silence.see([9, 9], &busy(920), BLOCK));
        assert!(!silence.see([9, 9], &EngineReport { first_tokens: Some(0), ..busy(1000) }, BLOCK));
        assert!(!silence.see([9, 9], &busy(9000), BLOCK), "of a new process");
        assert!(silence.see([9, 9], &busy(10_000), BLOCK));
    }
}
