//! The prefixes that are booked on one rank: present there soon, whatever the index says yet.

use crate::units::SequenceHash;
use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

/// Counted prefixes of the prompts booked on one rank.
///
/// A radix tree without pointers: a sequence hash names a whole prefix, so each edge is found by the first hash of its
/// run, and within a run the matching hashes stand before the others. Edges are split, never joined; an edge goes with
/// its last booking. Work is by edges, not by blocks.
#[derive(Debug, Default)]
pub(super) struct BookedPrefixes {
    edges: HashMap<SequenceHash, Edge>,
    blocks: usize,
}

#[derive(Debug)]
struct Edge {
    /// Consecutive sequence hashes, at least one.
    run: Box<[SequenceHash]>,
    /// Bookings whose prompt passes over the whole run.
    bookings: u32,
}

impl BookedPrefixes {
    /// How many leading blocks of the prompt are booked.
    pub(super) fn depth(&self, sequence: &[SequenceHash]) -> usize {
        let mut depth = 0;
        while let Some(edge) = sequence.get(depth).and_then(|next| self.edges.get(next)) {
            let common = common_blocks(&edge.run, &sequence[depth..]);
            depth += common;
            if common < edge.run.len() {
                break;
            }
        }
        depth
    }

    /// Whether the block stands where the prompts part, or one of them begins or goes on behind another's end.
    pub(super) fn begins(&self, block: SequenceHash) -> bool {
        self.edges.contains_key(&block)
    }

    /// Distinct blocks over all bookings.
    pub(super) const fn blocks(&self) -> usize {
        self.blocks
    }

    /// Counts a booked prompt.
    pub(super) fn add(&mut self, sequence: &[SequenceHash]) {
        let mut rest = sequence;
        while let Some(first) = rest.first() {
            match self.edges.entry(*first) {
                Entry::Vacant(slot) => {
                    self.blocks += rest.len();
                    slot.insert(Edge { run: rest.into(), bookings: 1 });
                    return;
                }
                Entry::Occupied(mut slot) => {
                    let edge = slot.get_mut();
                    let common = common_blocks(&edge.run, rest);
                    let tail = edge.split(common);
                    edge.bookings += 1;
                    if let Some(tail) = tail {
                        self.edges.insert(tail.run[0], tail);
                    }
                    rest = &rest[common..];
                }
            }
        }
    }

    /// Takes a prompt out that was added before.
    pub(super) fn remove(&mut self, sequence: &[SequenceHash]) {
        let mut rest = sequence;
        while let Some(first) = rest.first() {
            let Entry::Occupied(mut slot) = self.edges.entry(*first) else {
                debug_assert!(false, "a prompt was taken out that is not booked");
                return;
            };
            let blocks = slot.get().run.len();
            slot.get_mut().bookings -= 1;
            if slot.get().bookings == 0 {
                slot.remove();
                self.blocks -= blocks;
            }
            rest = rest.get(blocks..).unwrap_or_default();
        }
    }
}

impl Edge {
    /// Keeps the first `at` blocks and returns the others, if any.
    fn split(&mut self, at: usize) -> Option<Self> {
        let (head, tail) = self.run.split_at_checked(at).filter(|(_, tail)| !tail.is_empty())?;
        let tail = Self { run: tail.into(), bookings: self.bookings };
        self.run = head.into();
        Some(tail)
    }
}

/// The length of the common prefix. Equal hashes mean equal prefixes, so it can be bisected.
fn common_blocks(run: &[SequenceHash], sequence: &[SequenceHash]) -> usize {
    let most = run.len().min(sequence.len());
    if run[..most].last() == sequence[..most].last() {
        return most;
    }
    // The first block is the key by which the run was found, so it is equal; the last one differs.
    let (mut equal, mut differs) = (0, most - 1);
    while equal + 1 < differs {
        let middle = usize::midpoint(equal, differs);
        if run[middle] == sequence[middle] { equal = middle } else { differs = middle }
    }
    differs.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap as Model;

    /// Sequence hashes of a path of symbols: equal exactly where the prefixes are.
    fn chain(symbols: &[u8]) -> Vec<SequenceHash> {
        let mut at = 7u64;
        symbols
            .iter()
            .map(|symbol| {
                at = at.wrapping_mul(0x0100_0000_01b3) ^ (u64::from(*symbol) + 1);
                SequenceHash(at)
            })
            .collect()
    }

    #[test]
    fn a_prompt_counts_until_its_last_booking_ends() {
        let mut booked = BookedPrefixes::default();
        let prompt = chain(&[1, 2, 3, 4]);
        booked.add(&prompt);
        booked.add(&prompt);
        booked.remove(&prompt);
        assert_eq!(booked.depth(&chain(&[1, 2, 3, 4, 5])), 4);
        assert_eq!(booked.depth(&chain(&[1, 2, 9, 4])), 2);
        assert_eq!(booked.depth(&chain(&[2, 2])), 0);
        assert_eq!(booked.depth(&[]), 0);
        booked.remove(&prompt);
        assert_eq!((booked.depth(&prompt), booked.blocks(), booked.edges.len()), (0, 0, 0));
    }

    proptest! {
        #[test]
        fn it_agrees_with_counting_every_block(
            steps in prop::collection::vec((any::<bool>(), prop::collection::vec(0u8..3, 0..12)), 1..60)
        ) {
            let mut booked = BookedPrefixes::default();
            let mut model: Model<SequenceHash, u32> = Model::new();
            let mut live: Vec<Vec<SequenceHash>> = Vec::new();
            for (add, symbols) in steps {
                if add || live.is_empty() {
                    let prompt = chain(&symbols);
                    for hash in &prompt {
                        *model.entry(*hash).or_default() += 1;
                    }
                    booked.add(&prompt);
                    live.push(prompt);
                } else {
                    let prompt = live.swap_remove(symbols.len() % live.len());
                    for hash in &prompt {
                        let count = model.get_mut(hash).expect("counted");
                        *count -= 1;
                        if *count == 0 {
                            model.remove(hash);
                        }
                    }
                    booked.remove(&prompt);
                }
                prop_assert_eq!(booked.blocks(), model.len());
                let probe = chain(&symbols);
                let expected = probe.iter().take_while(|hash| model.contains_key(*hash)).count();
                prop_assert_eq!(booked.depth(&probe), expected);
            }
            for prompt in live {
                booked.remove(&prompt);
            }
            prop_assert!(booked.edges.is_empty());
            prop_assert_eq!(booked.blocks(), 0);
        }
    }
}
