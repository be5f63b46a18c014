//! The hash chain by which we name prefixes: tokens → block hash → sequence hash.
//!
//! The keys are random per process. Nothing outside of the process ever sees a hash, so nobody can build prompts
//! that collide, and no value need agree with an engine's.

use crate::units::{BlockHash, SequenceHash, TokenId};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The process's secret key for all hashes. Two values from different keys never compare.
#[derive(Clone, Debug)]
pub struct HashKey {
    seed: u64,
    chain: u64,
}

impl HashKey {
    /// A key drawn from the operating system's randomness.
    #[must_use]
    pub fn random() -> Self {
        let mut source = fastrand::Rng::new();
        Self::from_seed(source.u64(..))
    }

    /// A fixed key, for tests, benches and seeded simulation.
    #[must_use]
    pub fn from_seed(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        Self { seed: rng.u64(..), chain: rng.u64(..) | 1 }
    }

    /// Where a chain starts that has neither LoRA adapter nor cache salt.
    #[must_use]
    pub fn plain_root(&self) -> SequenceHash {
        self.root(None, None)
    }

    /// Where a chain starts: caches are apart for each LoRA adapter and each cache salt.
    #[must_use]
    pub fn root(&self, lora_name: Option<&str>, cache_salt: Option<&str>) -> SequenceHash {
        let part = |kind: u64, text: Option<&str>| {
            text.map_or(kind, |t| xxh3_64_with_seed(t.as_bytes(), self.seed.wrapping_add(kind)))
        };
        SequenceHash(fold(part(1, lora_name) ^ self.chain, part(2, cache_salt).rotate_left(17) ^ self.seed))
    }

    /// The hash of one full block. The number of tokens is part of it, so chains of different block sizes never meet.
    #[must_use]
    pub fn block(&self, tokens: &[TokenId]) -> BlockHash {
        let mut hash = self.seed ^ tokens.len() as u64;
        for pair in tokens.chunks(2) {
            let low = u64::from(pair[0].0);
            let high = pair.get(1).map_or(u64::from(u32::MAX) + 1, |t| u64::from(t.0));
            hash = fold(hash ^ low ^ high << 32, self.chain);
        }
        BlockHash(hash)
    }

    /// The same for a block whose identity depends on more than its tokens (multi-modal items and the like).
    #[must_use]
    pub fn block_with_extra(&self, tokens: &[TokenId], extra: &[u8]) -> BlockHash {
        let plain = self.block(tokens);
        BlockHash(fold(plain.0 ^ xxh3_64_with_seed(extra, self.seed), self.chain))
    }

    /// The sequence hash of `block` standing behind `parent`.
    #[must_use]
    pub fn chain(&self, parent: SequenceHash, block: BlockHash) -> SequenceHash {
        SequenceHash(fold(parent.0 ^ block.0, self.chain).rotate_left(23) ^ block.0)
    }

    /// Sequence hashes of all full blocks of a prompt, in order.
    #[must_use]
    pub fn sequence(&self, root: SequenceHash, tokens: &[TokenId], block_tokens: u32) -> Vec<SequenceHash> {
        let mut at = root;
        tokens
            .chunks_exact(block_tokens.max(1) as usize)
            .map(|block| {
                at = self.chain(at, self.block(block));
                at
            })
            .collect()
    }
}

/// 64 × 64 → 128 bit multiplication, both halves folded together.
fn fold(a: u64, b: u64) -> u64 {
    let wide = u128::from(a) * u128::from(b);
    (wide as u64) ^ (wide >> 64) as u64
}
