//! KV events as the rest of the agent knows them: whatever the engine, its version and its encoding.

use crate::units::{BlockHash, EngineHash, SequenceHash, Tier};

/// One change of one rank's cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvEvent<'a> {
    /// Blocks are now held (vLLM `BlockStored`).
    Stored(Stored<'a>),
    /// One copy of each block is gone from one tier (vLLM `BlockRemoved`).
    Removed {
        /// The tier that lost the blocks.
        tier: Tier,
        /// The blocks, by the engine's names.
        engine_hashes: &'a [EngineHash],
    },
    /// The rank's cache was reset (vLLM `AllBlocksCleared`).
    Cleared,
}

/// A run of consecutive blocks of one chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stored<'a> {
    /// Where the blocks are now held.
    pub tier: Tier,
    /// The block before the first one; `None` where the chain starts at token 0.
    pub parent: Option<EngineHash>,
    /// Where the chain starts: differs by LoRA adapter and cache salt. Counts only where `parent` is `None`.
    pub root: SequenceHash,
    /// The engine's name of each block.
    pub engine_hashes: &'a [EngineHash],
    /// Our hash of each block's tokens, as many as `engine_hashes`; empty where the event names blocks without their
    /// tokens (vLLM's CPU stores without `self_describing_kv_events`).
    pub block_hashes: &'a [BlockHash],
}
