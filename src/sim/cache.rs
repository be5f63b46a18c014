//! The prefix cache: prompts in, blocks that already hold a prefix of them, blocks for the rest, and the KV events.
//!
//! Semantics of vLLM's `KVCacheManager` for one full-attention group.

use super::events::{Event, ExtraKeys, Lora, Medium, Stored};
use super::pool::{BlockId, BlockPool};
use crate::hash::HashKey;
use crate::units::{EngineHash, SequenceHash, TokenId};
use std::ops::Range;
use std::sync::Arc;

/// All replicas name equal prefixes equally, before and after a restart, as vLLM's do with one `PYTHONHASHSEED`. Not
/// the agent's key, so its hashes and the replica's are never equal by accident.
const HASH_SEED: u64 = 0x76_4c4c_4d5f_7369;

/// What a request asks the engine to run, apart from its length.
#[derive(Clone, Debug, Default)]
pub struct Prompt {
    /// The prompt's token ids; at least one.
    pub tokens: Vec<TokenId>,
    /// The LoRA adapter asked for, by its name as the model.
    pub lora: Option<Lora>,
    /// `cache_salt` of the request.
    pub cache_salt: Option<Arc<str>>,
    /// `session_id` of the request.
    pub session_id: Option<Arc<str>>,
    /// `vllm_xargs.kv_cache_report_mode` is `full`: reused blocks are announced again.
    pub reports_reuse: bool,
}

/// The tokens of one request and the blocks that hold them.
#[derive(Debug)]
pub(super) struct Sequence {
    prompt: Prompt,
    prompt_tokens: usize,
    root: SequenceHash,
    /// The names of all full blocks of `prompt.tokens`, to which the generated tokens are added.
    hashes: Vec<EngineHash>,
    blocks: Vec<BlockId>,
    /// Blocks of this sequence that are known to the cache.
    named: usize,
}

impl Sequence {
    pub(super) fn len(&self) -> usize {
        self.prompt.tokens.len()
    }

    pub(super) const fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    pub(super) fn hashes(&self) -> &[EngineHash] {
        &self.hashes
    }

    pub(super) fn blocks(&self) -> usize {
        self.blocks.len()
    }

    pub(super) const fn named(&self) -> usize {
        self.named
    }

    /// The announcement of a run of full blocks, as the CPU tier makes it.
    pub(super) fn describe(&self, blocks: Range<usize>, block_tokens: usize) -> Stored {
        let tokens = blocks.start * block_tokens..blocks.end * block_tokens;
        Stored {
            parent: blocks.start.checked_sub(1).map(|at| self.hashes[at]),
            block_hashes: self.hashes[blocks].to_vec(),
            tokens: self.prompt.tokens[tokens].to_vec(),
            block_tokens: u32::try_from(block_tokens).unwrap_or(u32::MAX),
            lora: self.prompt.lora.clone(),
            medium: Medium::Cpu,
            extra_keys: None,
            session_id: None,
        }
    }

    /// The same as the GPU pool makes it.
    fn announce(&self, blocks: Range<usize>, block_tokens: usize) -> Event {
        let extra_keys = blocks.clone().map(|at| self.extra_keys(at)).collect();
        Event::Stored(Stored {
            medium: Medium::Gpu,
            extra_keys: Some(extra_keys),
            session_id: self.prompt.session_id.clone(),
            ..self.describe(blocks, block_tokens)
        })
    }

    fn extra_keys(&self, block: usize) -> ExtraKeys {
        let lora = self.prompt.lora.iter().map(|lora| &lora.name);
        let salt = self.prompt.cache_salt.iter().filter(|_| block == 0);
        lora.chain(salt).cloned().collect()
    }
}

/// What a request wants room for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// Tokens that need a slot after this step.
    pub(super) tokens: usize,
    /// Tokens that must fit before anything is taken; at least `tokens` matter.
    pub(super) must_fit_tokens: usize,
    /// Free blocks to leave for others.
    pub(super) reserved_blocks: usize,
}

impl Room {
    /// Room for the tokens and no condition beyond.
    pub(super) const fn plain(tokens: usize) -> Self {
        Self { tokens, must_fit_tokens: tokens, reserved_blocks: 0 }
    }
}

pub(super) struct KvCache {
    pool: BlockPool,
    block_tokens: usize,
    key: HashKey,
}

impl KvCache {
    pub(super) fn new(block_tokens: u32, blocks: u32) -> Self {
        Self {
            pool: BlockPool::new(blocks),
            block_tokens: block_tokens.max(1) as usize,
            key: HashKey::from_seed(HASH_SEED),
        }
    }

    pub(super) const fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    /// The longest sequence that the cache can ever hold, in tokens.
    pub(super) fn capacity_tokens(&self) -> usize {
        self.pool.usable() * self.block_tokens
    }

    /// The share of blocks in use, 0 to 1.
    pub(super) fn usage(&self) -> f64 {
        1.0 - self.pool.free() as f64 / self.pool.usable() as f64
    }

    pub(super) fn sequence(&self, prompt: Prompt) -> Sequence {
        let root = self.key.root(prompt.lora.as_ref().map(|lora| &*lora.name), prompt.cache_salt.as_deref());
        let mut sequence = Sequence {
            prompt_tokens: prompt.tokens.len(),
            prompt,
            root,
            hashes: Vec::new(),
            blocks: Vec::new(),
            named: 0,
        };
        self.extend_hashes(&mut sequence);
        sequence
    }

    /// Adds a generated token.
    pub(super) fn push(&self, sequence: &mut Sequence, token: TokenId) {
        sequence.prompt.tokens.push(token);
        self.extend_hashes(sequence);
    }

    /// The held blocks of the sequence's prefix. The last token is always computed anew (its logits are needed), so of
    /// a prompt of whole blocks the last one is never a hit.
    pub(super) fn lookup(&mut self, sequence: &Sequence) -> Vec<BlockId> {
        let most = sequence.len().saturating_sub(1) / self.block_tokens;
        let hits: Vec<BlockId> =
            sequence.hashes.iter().take(most).map_while(|hash| self.pool.holder(*hash)).collect();
        if sequence.prompt.reports_reuse && !hits.is_empty() {
            self.pool.announce(sequence.announce(0..hits.len(), self.block_tokens));
        }
        hits
    }

    /// Gives the sequence the blocks that it hit and new ones for the rest, or nothing if they are not to be had.
    pub(super) fn allocate(&mut self, sequence: &mut Sequence, hits: &[BlockId], room: Room) -> bool {
        let held = sequence.blocks.len() + hits.len();
        let idle_hits = hits.iter().filter(|block| self.pool.is_free(**block)).count();
        let wanted = |tokens: usize| tokens.div_ceil(self.block_tokens).saturating_sub(held);
        let fits = wanted(room.must_fit_tokens) + idle_hits <= self.pool.free()
            && wanted(room.tokens) + idle_hits + room.reserved_blocks <= self.pool.free();
        if !fits {
            return false;
        }
        let new_blocks = wanted(room.tokens);
        for block in hits {
            self.pool.share(*block);
        }
        sequence.blocks.extend_from_slice(hits);
        sequence.named += hits.len();
        for _ in 0..new_blocks {
            sequence.blocks.extend(self.pool.take());
        }
        true
    }

    /// Makes the blocks known that are full once `tokens` tokens are computed.
    pub(super) fn name_full_blocks(&mut self, sequence: &mut Sequence, tokens: usize) {
        let full = (tokens.min(sequence.len()) / self.block_tokens).min(sequence.blocks.len());
        let new = sequence.named..full;
        if new.is_empty() {
            return;
        }
        for at in new.clone() {
            self.pool.name(sequence.blocks[at], sequence.hashes[at]);
        }
        sequence.named = full;
        self.pool.announce(sequence.announce(new, self.block_tokens));
    }

    /// Takes all blocks back, the tail of the sequence to be reused first.
    pub(super) fn release(&mut self, sequence: &mut Sequence) {
        self.pool.release(sequence.blocks.drain(..).rev());
        sequence.named = 0;
    }

    /// Forgets all prefixes; false while blocks are in use. The event stays back until the next step takes it.
    pub(super) fn reset(&mut self) -> bool {
        self.pool.reset()
    }

    pub(super) fn take_events(&mut self) -> Vec<Event> {
        self.pool.take_events()
    }

    fn extend_hashes(&self, sequence: &mut Sequence) {
        let known = sequence.hashes.len();
        let mut parent = sequence.hashes.last().map_or(sequence.root, |hash| SequenceHash(hash.0));
        for block in sequence.prompt.tokens[known * self.block_tokens..].chunks_exact(self.block_tokens) {
            parent = self.key.chain(parent, self.key.block(block));
            sequence.hashes.push(EngineHash(parent.0));
        }
    }
}
