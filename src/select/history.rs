//! What we sent to one rank of late: a guess at its cache where its KV events do not tell.

use crate::units::SequenceHash;
use hashbrown::HashMap;

/// No place.
const NONE: u32 = u32::MAX;

/// The blocks of the prompts sent to one rank, as many as its cache holds; the longest unused go first, and of one
/// prompt the last ones, as in the engine.
#[derive(Debug)]
pub(super) struct History {
    places: HashMap<SequenceHash, u32>,
    /// A list by use, whose links are places.
    entries: Vec<Entry>,
    newest: u32,
    oldest: u32,
    capacity: usize,
}

#[derive(Debug)]
struct Entry {
    hash: SequenceHash,
    older: u32,
    newer: u32,
}

impl Default for History {
    fn default() -> Self {
        Self { places: HashMap::new(), entries: Vec::new(), newest: NONE, oldest: NONE, capacity: 0 }
    }
}

impl History {
    /// How many leading blocks of the prompt were sent there and are not yet forgotten. A block never outlives those
    /// before it, so this is found by halving.
    pub(super) fn depth(&self, sequence: &[SequenceHash]) -> usize {
        sequence.partition_point(|hash| self.places.contains_key(hash))
    }

    /// Blocks remembered.
    pub(super) fn blocks(&self) -> usize {
        self.places.len()
    }

    /// A prompt is sent there; the cache holds `capacity` blocks. Another capacity than before starts anew.
    pub(super) fn add(&mut self, sequence: &[SequenceHash], capacity: usize) {
        let capacity = capacity.min(NONE as usize - 1);
        if capacity != self.capacity {
            *self = Self { capacity, ..Self::default() };
        }
        // The first block is used last, so that it is forgotten last.
        for hash in sequence.iter().take(capacity).rev() {
            self.touch(*hash);
        }
    }

    fn touch(&mut self, hash: SequenceHash) {
        let place = if let Some(place) = self.places.get(&hash) {
            let place = *place;
            self.unlink(place);
            place
        } else if self.entries.len() < self.capacity {
            self.entries.push(Entry { hash, older: NONE, newer: NONE });
            (self.entries.len() - 1) as u32
        } else {
            let place = self.oldest;
            self.unlink(place);
            self.places.remove(&self.entries[place as usize].hash);
            place
        };
        self.places.insert(hash, place);
        self.entries[place as usize] = Entry { hash, older: self.newest, newer: NONE };
        match self.entries.get_mut(self.newest as usize) {
            Some(newest) => newest.newer = place,
            None => self.oldest = place,
        }
        self.newest = place;
    }

    fn unlink(&mut self, place: u32) {
        let Entry { older, newer, .. } = self.entries[place as usize];
        match self.entries.get_mut(older as usize) {
            Some(entry) => entry.newer = newer,
            None => self.oldest = newer,
        }
        match self.entries.get_mut(newer as usize) {
            Some(entry) => entry.older = older,
            None => self.newest = older,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn chain(hashes: std::ops::Range<u64>) -> Vec<SequenceHash> {
        hashes.map(SequenceHash).collect()
    }

    #[test]
    fn it_forgets_the_longest_unused_and_of_one_prompt_its_end() {
        let mut history = History::default();
        assert_eq!(history.depth(&chain(0..4)), 0);
        history.add(&chain(0..4), 6);
        history.add(&chain(10..12), 6);
        history.add(&chain(20..22), 6);
        assert_eq!(history.depth(&chain(0..4)), 2, "its last two went");
        history.add(&chain(0..2), 6);
        history.add(&chain(30..32), 6);
        assert_eq!([0..4, 10..12, 20..22, 30..32].map(|hashes| history.depth(&chain(hashes))), [2, 0, 2, 2]);
        assert_eq!(history.blocks(), 6);
    }

    #[test]
    fn a_prompt_longer_than_the_cache_is_remembered_by_its_beginning() {
        let mut history = History::default();
        history.add(&chain(0..9), 4);
        assert_eq!((history.depth(&chain(0..9)), history.blocks()), (4, 4));
        history.add(&chain(0..9), 8);
        assert_eq!(history.depth(&chain(0..9)), 8, "the cache is larger than was thought");
        history.add(&chain(0..9), 0);
        assert_eq!((history.depth(&chain(0..9)), history.blocks()), (0, 0));
    }

    proptest! {
        #[test]
        fn it_is_a_list_by_last_use(
            capacity in 1..12usize,
            prompts in prop::collection::vec((0..3u64, 0..8usize), 1..60),
        ) {
            // Three chains with a common first block.
            let prompt = |chain: u64, length: usize| -> Vec<SequenceHash> {
                (0..length as u64).map(|at| SequenceHash(if at == 0 { 0 } else { chain * 100 + at })).collect()
            };
            let (mut history, mut model) = (History::default(), Vec::<SequenceHash>::new());
            for (chain, length) in prompts {
                history.add(&prompt(chain, length), capacity);
                for hash in prompt(chain, length.min(capacity)).into_iter().rev() {
                    model.retain(|known| *known != hash);
                    model.push(hash);
                }
                model.drain(..model.len().saturating_sub(capacity));
                prop_assert_eq!(history.blocks(), model.len());
                for chain in 0..3 {
                    let held = prompt(chain, 8).iter().take_while(|hash| model.contains(hash)).count();
                    prop_assert_eq!(history.depth(&prompt(chain, 8)), held);
                }
            }
        }
    }
}
