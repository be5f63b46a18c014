//! Whether an engine loads blocks from its CPU tier after a reset that did not tell what became of them.

use super::silence::Heard;

/// One rank's loads since its last reset.
#[derive(Debug, Default)]
pub(super) struct Loads {
    since: Option<Since>,
}

#[derive(Clone, Copy, Debug)]
struct Since {
    reset: Heard,
    loaded_tokens: u64,
    grown: bool,
}

impl Loads {
    /// Takes in a poll of the engine: how far the stream was when it was asked, and at the reset; the tokens it has ever
    /// loaded from its CPU tier. Returns whether it has loaded any since the reset, and all events of that have come: it
    /// counts a load when it begins, and tells of the blocks when it ends, well before the next poll.
    pub(super) fn see(&mut self, asked: Heard, reset: Heard, loaded_tokens: u64) -> bool {
        if asked < reset {
            // Counted before the reset, perhaps.
            return false;
        }
        match &mut self.since {
            Some(since) if since.reset == reset && loaded_tokens >= since.loaded_tokens => {
                std::mem::replace(&mut since.grown, loaded_tokens > since.loaded_tokens)
            }
            since => {
                *since = Some(Since { reset, loaded_tokens, grown: false });
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_after_a_reset_counts_with_the_poll_after_the_one_that_shows_it() {
        let mut loads = Loads::default();
        assert!(!loads.see(6, 7, 100), "asked before the reset");
        assert!(!loads.see(7, 7, 500), "loaded before the reset, for all that is known");
        assert!(!loads.see(7, 7, 500));
        assert!(!loads.see(8, 7, 516));
        assert!(loads.see(8, 7, 516));
        assert!(!loads.see(10, 10, 600), "another reset");
        assert!(!loads.see(10, 10, 20), "another process");
        assert!(!loads.see(10, 10, 30));
        assert!(loads.see(10, 10, 30));
    }
}
