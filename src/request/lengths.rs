//! How long the entries of lists were, by how they begin.
//!
//! Each turn of a conversation sends the same entries again. How long one is that begins like one before can be guessed,
//! where finding its end means going over all of it. A guess says nothing about the bytes: whoever takes it finds out
//! whether they are those that were that long.

use std::sync::atomic::{AtomicU64, Ordering};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// How much of an entry counts as its beginning: its role, a call's id, or some words. An entry that is shorter is looked
/// up with what follows it, and is found as fast by its end.
const BEGINNING_BYTES: usize = 64;

/// How many lengths are known of one beginning: two conversations that fork there are both guessed.
const GUESSES: usize = 2;

/// Guesses that were wrong cost no more than this, in bytes of one list: it is read in less than a tenth of a millisecond.
/// Entries that begin alike on purpose would have the rest of a body read at each of them.
const MOST_WRONG_BYTES: usize = 1 << 20;

/// The length of all guesses that were wrong in one list, in bytes.
#[derive(Debug, Default)]
pub(super) struct Wrong(usize);

/// Lengths that were seen lately, in fixed memory. What is new there takes the place of what is old.
#[derive(Debug)]
pub(super) struct Lengths {
    /// A length in the lower half of each, in the upper one a part of its beginning's hash. 0 is none.
    buckets: Box<[[AtomicU64; GUESSES]]>,
    seed: u64,
}

/// The hash of a beginning.
#[derive(Clone, Copy, Debug)]
pub(super) struct Beginning(u64);

impl Lengths {
    /// As many as fit into so much memory.
    pub(super) fn new(memory_bytes: usize) -> Self {
        let count = memory_bytes / size_of::<[AtomicU64; GUESSES]>();
        Self { buckets: (0..count).map(|_| Default::default()).collect(), seed: fastrand::u64(..) }
    }

    /// The memory that they take.
    pub(super) fn memory_bytes(&self) -> usize {
        size_of_val(&*self.buckets)
    }

    /// The name of how an entry begins that stands first in `json`, behind one that has the hash `before`.
    pub(super) fn beginning(&self, before: u64, json: &[u8]) -> Beginning {
        let bytes = json.get(..BEGINNING_BYTES).unwrap_or(json);
        Beginning(xxh3_64_with_seed(bytes, self.seed ^ before))
    }

    /// How long entries were that begin so, the last one first; none where too many guesses were `wrong`.
    pub(super) fn guesses(
        &self,
        beginning: Beginning,
        wrong: &Wrong,
    ) -> impl Iterator<Item = usize> + use<'_> {
        let bucket = self.bucket(beginning).filter(|_| wrong.0 < MOST_WRONG_BYTES).into_iter().flatten();
        bucket.filter_map(move |slot| {
            let entry = slot.load(Ordering::Relaxed);
            (entry >> 32 == beginning.tag()).then_some(entry as u32 as usize)
        })
    }

    /// Keeps the length of an entry that begins so.
    pub(super) fn keep(&self, beginning: Beginning, length: usize) {
        let (Some([last, earlier]), Ok(length)) = (self.bucket(beginning), u32::try_from(length)) else {
            return;
        };
        let entry = beginning.tag() << 32 | u64::from(length);
        let before = last.swap(entry, Ordering::Relaxed);
        if before != entry {
            earlier.store(before, Ordering::Relaxed);
        }
    }

    fn bucket(&self, beginning: Beginning) -> Option<&[AtomicU64; GUESSES]> {
        let place = (u128::from(beginning.0) * self.buckets.len() as u128) >> 64;
        self.buckets.get(place as usize)
    }
}

impl Wrong {
    pub(super) const fn add(&mut self, length: usize) {
        self.0 = self.0.saturating_add(length);
    }
}

impl Beginning {
    /// The part of it that does not choose the bucket; never 0.
    const fn tag(self) -> u64 {
        (self.0 & 0xffff_ffff) | 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guesses(lengths: &Lengths, before: u64, json: &str) -> Vec<usize> {
        lengths.guesses(lengths.beginning(before, json.as_bytes()), &Wrong::default()).collect()
    }

    #[test]
    fn the_last_two_lengths_of_a_beginning_are_guessed() {
        let lengths = Lengths::new(1 << 10);
        let json = "x".repeat(BEGINNING_BYTES);
        assert_eq!(guesses(&lengths, 1, &json), [0_usize; 0]);
        for length in [70, 80, 80, 90] {
            lengths.keep(lengths.beginning(1, json.as_bytes()), length);
        }
        assert_eq!(guesses(&lengths, 1, &format!("{json} and more")), [90, 80]);
        assert_eq!(guesses(&lengths, 2, &json), [0_usize; 0], "behind another entry");
        assert_eq!(guesses(&lengths, 1, "x"), [0_usize; 0]);
    }

    #[test]
    fn where_guesses_are_wrong_again_and_again_there_are_no_more() {
        let lengths = Lengths::new(1 << 10);
        let beginning = lengths.beginning(1, b"{");
        lengths.keep(beginning, 1000);
        let (mut wrong, mut bytes) = (Wrong::default(), 0);
        for _ in 0..10_000 {
            for length in lengths.guesses(beginning, &wrong).collect::<Vec<_>>() {
                wrong.add(length);
                bytes += length;
            }
        }
        assert!((1000..2 * MOST_WRONG_BYTES).contains(&bytes), "{bytes}");
    }

    #[test]
    fn memory_is_bounded() {
        for bytes in [0, 15, 16, 1000] {
            let lengths = Lengths::new(bytes);
            assert!(lengths.memory_bytes() <= bytes);
            for before in 0..1000 {
                lengths.keep(lengths.beginning(before, b"{"), 1);
            }
            let known = (0..1000).filter(|before| guesses(&lengths, *before, "{") == [1]).count();
            assert!(known <= bytes / 8, "{known} of {bytes} bytes");
        }
    }
}
