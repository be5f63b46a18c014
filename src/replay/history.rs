//! What a router without KV events believes a replica to hold: the prompts that it sent there.

use crate::units::SequenceHash;
use hashbrown::HashMap;
use std::collections::BTreeMap;

/// The blocks of the prompts sent to one replica, the longest unused forgotten where there is a bound.
#[derive(Debug)]
pub(super) struct History {
    used: HashMap<SequenceHash, u64>,
    by_use: BTreeMap<u64, SequenceHash>,
    uses: u64,
    bound: Option<usize>,
}

impl History {
    /// An empty history of at most `bound` blocks.
    pub(super) fn new(bound: Option<usize>) -> Self {
        Self { used: HashMap::new(), by_use: BTreeMap::new(), uses: 0, bound }
    }

    /// How many leading blocks of the prompt are in it.
    pub(super) fn depth(&self, sequence: &[SequenceHash]) -> u32 {
        sequence.iter().take_while(|hash| self.used.contains_key(*hash)).count() as u32
    }

    /// Blocks in it.
    pub(super) fn blocks(&self) -> usize {
        self.used.len()
    }

    /// A prompt was sent there. Its tail is forgotten before its head.
    pub(super) fn add(&mut self, sequence: &[SequenceHash]) {
        for hash in sequence.iter().rev() {
            self.uses += 1;
            let before = self.used.insert(*hash, self.uses);
            if self.bound.is_some() {
                before.map(|before| self.by_use.remove(&before));
                self.by_use.insert(self.uses, *hash);
            }
        }
        while self.bound.is_some_and(|bound| self.used.len() > bound) {
            let Some((_, oldest)) = self.by_use.pop_first() else { break };
            self.used.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(hashes: std::ops::Range<u64>) -> Vec<SequenceHash> {
        hashes.map(SequenceHash).collect()
    }

    #[test]
    fn within_a_bound_the_longest_unused_goes_first_and_tails_before_heads() {
        let mut history = History::new(Some(6));
        history.add(&chain(0..4));
        history.add(&chain(10..14));
        assert_eq!(history.blocks(), 6);
        assert_eq!((history.depth(&chain(0..4)), history.depth(&chain(10..14))), (2, 4));
        history.add(&chain(0..4));
        assert_eq!((history.depth(&chain(0..4)), history.depth(&chain(10..14))), (4, 2));
    }

    #[test]
    fn without_a_bound_nothing_is_forgotten() {
        let mut history = History::new(None);
        (0..100).for_each(|at| history.add(&chain(at * 10..at * 10 + 10)));
        assert_eq!(history.blocks(), 1000);
    }
}
