//! What is asked: a prompt by its length and its sequence hashes.

use crate::units::{RequestId, Revision, SequenceHash};
use smallvec::SmallVec;
use std::sync::Arc;

/// Which of a prompt's sequences is a rank's: by what renders its prompts, and by its block size.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct SequenceKey {
    /// What makes the rank's prompts.
    pub revision: Revision,
    /// Tokens in one of its blocks.
    pub block_tokens: u32,
}

impl SequenceKey {
    /// Of a rank whose prompts the pool's own renderer makes.
    #[must_use]
    pub const fn of_size(block_tokens: u32) -> Self {
        Self { revision: Revision(0), block_tokens }
    }
}

/// A prompt as some of the ranks have it.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// Which ranks.
    pub key: SequenceKey,
    /// The prompt's length there; an estimate where only its beginning is known.
    pub tokens: u32,
    /// The sequence hashes of its full blocks.
    pub hashes: Box<[SequenceHash]>,
}

/// A prompt as the scheduler sees it. Made once a request and shared by its booking.
#[derive(Clone, Debug, Default)]
pub struct PromptBlocks {
    /// Its length for ranks that none of the sequences is for: an estimate.
    tokens: u32,
    /// Where its chain starts.
    root: Option<SequenceHash>,
    sequences: SmallVec<[Sequence; 1]>,
}

impl PromptBlocks {
    /// A prompt of `tokens` tokens, with the sequence hashes of its full blocks for each block size in use in a pool with
    /// one renderer. No sequence means that the prompt can match no cache; the length is an estimate then.
    #[must_use]
    pub fn new(tokens: u32, sequences: impl IntoIterator<Item = (u32, Vec<SequenceHash>)>) -> Self {
        let of_size = |(size, hashes): (u32, Vec<SequenceHash>)| Sequence {
            key: SequenceKey::of_size(size),
            tokens,
            hashes: hashes.into_boxed_slice(),
        };
        Self::of(tokens, sequences.into_iter().map(of_size))
    }

    /// A prompt by the sequences of the ranks of which it is known; for others it has about `tokens` tokens.
    #[must_use]
    pub fn of(tokens: u32, sequences: impl IntoIterator<Item = Sequence>) -> Self {
        Self { tokens, root: None, sequences: sequences.into_iter().collect() }
    }

    /// The same, with where its chain starts: there the answer of a prompt without a full block is looked for.
    #[must_use]
    pub fn behind(self, root: SequenceHash) -> Self {
        Self { root: Some(root), ..self }
    }

    /// The last full block of the prompt for the ranks of a key; where its chain starts, if it has none.
    pub(super) fn tip(&self, key: SequenceKey) -> Option<SequenceHash> {
        self.sequence(key).last().copied().or(self.root)
    }

    fn find(&self, key: SequenceKey) -> Option<&Sequence> {
        self.sequences.iter().find(|sequence| sequence.key == key)
    }

    /// The prompt's length for the ranks of a key.
    #[must_use]
    pub fn tokens(&self, key: SequenceKey) -> u32 {
        self.find(key).map_or(self.tokens, |sequence| sequence.tokens)
    }

    /// The sequence hashes for the ranks of a key; empty where it is not known for them.
    #[must_use]
    pub fn sequence(&self, key: SequenceKey) -> &[SequenceHash] {
        self.find(key).map_or(&[], |sequence| &sequence.hashes)
    }

    /// How many hashes the prompt holds in all: its weight in memory.
    #[must_use]
    pub fn hashes(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.hashes.len()).sum()
    }
}

/// One request that wants a rank.
#[derive(Clone, Debug)]
pub struct Ask {
    /// HAProxy's private id of the request, which ends the booking.
    pub id: RequestId,
    /// The prompt.
    pub prompt: Arc<PromptBlocks>,
    /// A hash of the session id, where the client sends one.
    pub session: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_has_the_sequence_and_the_length_of_each_rank_that_it_is_known_for() {
        let key = |revision, block_tokens| SequenceKey { revision: Revision(revision), block_tokens };
        let sequence = |key, tokens, hashes: &[u64]| Sequence {
            key,
            tokens,
            hashes: hashes.iter().copied().map(SequenceHash).collect(),
        };
        let prompt = PromptBlocks::of(
            50,
            [
                sequence(key(0, 16), 40, &[1, 2]),
                sequence(key(0, 32), 40, &[3]),
                sequence(key(7, 16), 48, &[4, 5, 6]),
            ],
        );
        assert_eq!(prompt.sequence(key(0, 16)), [1, 2].map(SequenceHash));
        assert_eq!(prompt.sequence(key(7, 16)), [4, 5, 6].map(SequenceHash));
        assert_eq!((prompt.tokens(key(0, 32)), prompt.tokens(key(7, 16))), (40, 48));
        assert_eq!((prompt.sequence(key(7, 32)), prompt.tokens(key(7, 32))), (&[][..], 50));
        assert_eq!(prompt.hashes(), 6);
    }
}
