//! What is asked: a prompt by its length and its sequence hashes.

use crate::units::{RequestId, SequenceHash};
use smallvec::SmallVec;
use std::sync::Arc;

/// A prompt as the scheduler sees it. Made once a request and shared by its booking.
#[derive(Clone, Debug, Default)]
pub struct PromptBlocks {
    tokens: u32,
    sequences: SmallVec<[(u32, Box<[SequenceHash]>); 1]>,
}

impl PromptBlocks {
    /// A prompt of `tokens` tokens (an estimate where they are not known), with the sequence hashes of its full blocks
    /// for each block size in use in the pool. No sequence means that the prompt can match no cache.
    #[must_use]
    pub fn new(tokens: u32, sequences: impl IntoIterator<Item = (u32, Vec<SequenceHash>)>) -> Self {
        let sequences =
            sequences.into_iter().map(|(size, hashes)| (size, hashes.into_boxed_slice())).collect();
        Self { tokens, sequences }
    }

    /// The prompt's length.
    #[must_use]
    pub const fn tokens(&self) -> u32 {
        self.tokens
    }

    /// The sequence hashes at one block size; empty where that size was not hashed.
    #[must_use]
    pub fn sequence(&self, block_tokens: u32) -> &[SequenceHash] {
        self.sequences.iter().find(|(size, _)| *size == block_tokens).map_or(&[], |(_, hashes)| hashes)
    }

    /// How many hashes the prompt holds over all block sizes: its weight in memory.
    #[must_use]
    pub fn hashes(&self) -> usize {
        self.sequences.iter().map(|(_, hashes)| hashes.len()).sum()
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
