//! When a cache of which events were missed is known again: once its blocks have turned over.
//!
//! Missed removals leave blocks in the index that the engine no longer has, and nothing will ever take them out. But an
//! engine evicts what it has not used for longest. Once it has evicted as many blocks as were known at the loss, those
//! among them that no event has named since are gone, or are in use all the time. The latter cannot be told apart:
//! both are forgotten, which errs on the side of too little credit.

use crate::{
    events::{KvEvent, Stored},
    units::{EngineHash, Tier},
};
use std::collections::HashSet;

/// The blocks that were known when events were missed.
#[derive(Debug)]
pub(super) struct Turnover {
    /// The batch applied last at that time.
    since: u64,
    /// Those that no event has named since.
    unseen: HashSet<EngineHash>,
    /// Evictions until all of them have had their turn.
    evictions_left: usize,
}

impl Turnover {
    /// Events were missed before or in batch `since`; these blocks are known of the GPU tier.
    pub(super) fn new(since: u64, known: impl Iterator<Item = EngineHash>) -> Self {
        let unseen: HashSet<EngineHash> = known.collect();
        Self { since, evictions_left: unseen.len(), unseen }
    }

    /// An event of the rank.
    pub(super) fn see(&mut self, event: &KvEvent<'_>) {
        match event {
            KvEvent::Stored(Stored { tier: Tier::Gpu, parent, engine_hashes, .. }) => {
                // What a new block stands behind was just used.
                for hash in engine_hashes.iter().chain(parent) {
                    self.unseen.remove(hash);
                }
            }
            KvEvent::Removed { tier: Tier::Gpu, engine_hashes } => {
                self.evictions_left = self.evictions_left.saturating_sub(engine_hashes.len());
                for hash in *engine_hashes {
                    self.unseen.remove(hash);
                }
            }
            KvEvent::Stored(_) | KvEvent::Removed { .. } => {}
            KvEvent::Cleared => {
                self.unseen.clear();
                self.evictions_left = 0;
            }
        }
    }

    /// Whether all that was known has had its turn.
    pub(super) fn is_over(&self) -> bool {
        self.evictions_left == 0 || self.unseen.is_empty()
    }

    /// The batch since which all that is known was told, and the blocks to be forgotten for that.
    pub(super) fn end(self) -> (u64, HashSet<EngineHash>) {
        (self.since, self.unseen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn removed(hashes: &[EngineHash]) -> KvEvent<'_> {
        KvEvent::Removed { tier: Tier::Gpu, engine_hashes: hashes }
    }

    #[test]
    fn as_many_evictions_as_blocks_were_known_end_it_and_leave_the_unnamed_ones() {
        let known = [1, 2, 3].map(EngineHash);
        let mut turnover = Turnover::new(7, known.into_iter());
        turnover.see(&removed(&[1, 8].map(EngineHash)));
        assert!(!turnover.is_over());
        turnover.see(&KvEvent::Removed { tier: Tier::Cpu, engine_hashes: &[EngineHash(3)] });
        assert!(!turnover.is_over(), "another tier");
        turnover.see(&removed(&[EngineHash(9)]));
        assert!(turnover.is_over());
        assert_eq!(turnover.end(), (7, HashSet::from([2, 3].map(EngineHash))));
    }

    #[test]
    fn it_ends_when_every_block_was_named() {
        let mut turnover = Turnover::new(7, [1, 2].map(EngineHash).into_iter());
        turnover.see(&KvEvent::Stored(Stored {
            tier: Tier::Gpu,
            parent: Some(EngineHash(1)),
            root: crate::units::SequenceHash(0),
            engine_hashes: &[EngineHash(2)],
            block_hashes: &[],
        }));
        assert!(turnover.is_over());
        assert_eq!(turnover.end(), (7, HashSet::new()));
    }
}
