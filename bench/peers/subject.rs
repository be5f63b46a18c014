//! What is measured of every index.

use crate::measure::{Quantiles, Stopwatch};
use kvspoa::units::{BlockHash, TokenId};
use kvspoa::wire::Payload;
use kvspoa::workload::Workload;

/// One of our prompts in the forms that the indexes take.
#[derive(Debug)]
pub struct Prompt {
    /// For ours.
    pub tokens: Vec<TokenId>,
    /// For the others.
    pub ids: Vec<u32>,
}

/// An index under test.
pub trait Subject: Sized {
    /// What its find takes: all of a prompt's blocks, hashed.
    type Query;

    /// Empty, with ranks `0..ranks`.
    fn new(ranks: u16) -> Self;

    /// Its hash of a block of tokens.
    fn block_hash(tokens: &[TokenId]) -> BlockHash;

    /// What its find takes of a prompt.
    fn query(&self, prompt: &Prompt) -> Self::Query;

    /// Applies all events; the watch runs only while the index works.
    fn apply(&mut self, workload: &Workload, watch: &mut Stopwatch);

    /// The overlaps of all ranks, summed.
    fn find(&mut self, query: &Self::Query) -> u64;

    /// Takes rank 0 out, in as many steps as it has: readers wait for one at most.
    fn remove_first(&mut self, steps: &mut Quantiles);

    /// Decodes batches, with the hashes of their blocks; returns the number of blocks.
    fn decode(_payloads: &[Payload]) -> Option<usize> {
        None
    }

    /// Decodes and applies.
    fn ingest(&mut self, _payloads: &[Payload], _watch: &mut Stopwatch) -> bool {
        false
    }
}
