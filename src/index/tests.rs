//! The index's behaviour, one rule of the engine a test (reference: vLLM's KV events).

mod bounds;
mod clears;
mod orphans;
mod prefixes;
mod slices;
mod tiers;

use super::*;
use crate::events::Stored;
use crate::units::{BlockHash, EngineHash, SequenceHash, Tier, TokenId};

const R0: RankId = RankId(0);
const R1: RankId = RankId(1);

/// An index and the chains that the tests store: block `n` of chain `c` has tokens of its own.
struct Scene {
    index: Index,
    key: HashKey,
}

impl Scene {
    fn new() -> Self {
        Self::with(IndexConfig::default())
    }

    fn with(config: IndexConfig) -> Self {
        let key = HashKey::from_seed(1);
        let mut index = Index::new(key.clone(), config);
        assert!(index.add_rank(R0) && index.add_rank(R1));
        Self { index, key }
    }

    fn block(&self, chain: u32, at: u32) -> BlockHash {
        self.key.block(&[TokenId(chain), TokenId(at)])
    }

    /// The sequence hashes of blocks `0..len` of a chain.
    fn prompt(&self, chain: u32, len: u32) -> Vec<SequenceHash> {
        let mut at = self.key.plain_root();
        (0..len)
            .map(|n| {
                at = self.key.chain(at, self.block(chain, n));
                at
            })
            .collect()
    }

    fn store(&mut self, rank: RankId, tier: Tier, chain: u32, from: u32, to: u32) -> Applied {
        let parent = (from > 0).then(|| name(chain, from - 1));
        let names: Vec<_> = (from..to).map(|n| name(chain, n)).collect();
        let blocks: Vec<_> = (from..to).map(|n| self.block(chain, n)).collect();
        let root = self.key.plain_root();
        self.apply(
            rank,
            KvEvent::Stored(Stored { tier, parent, root, engine_hashes: &names, block_hashes: &blocks }),
        )
    }

    fn store_names(&mut self, rank: RankId, tier: Tier, names: &[EngineHash]) -> Applied {
        self.apply(rank, by_name(tier, names))
    }

    fn remove(&mut self, rank: RankId, tier: Tier, chain: u32, at: u32) -> Applied {
        self.apply(rank, KvEvent::Removed { tier, engine_hashes: &[name(chain, at)] })
    }

    fn apply(&mut self, rank: RankId, event: KvEvent<'_>) -> Applied {
        let applied = self.index.apply(rank, &event);
        self.index.check_invariants();
        applied
    }

    fn overlap(&self, rank: RankId, chain: u32, len: u32) -> (u32, u32, u32) {
        let mut overlaps = Overlaps::default();
        let prompt = self.prompt(chain, len);
        self.index.find(&prompt, &mut overlaps);
        let overlap = overlaps.get(rank);
        assert_eq!(self.index.depth(rank, &prompt), overlap.gpu_blocks);
        (overlap.gpu_blocks, overlap.cpu_blocks, overlap.disk_blocks)
    }

    fn gpu(&self, rank: RankId, chain: u32, len: u32) -> u32 {
        self.overlap(rank, chain, len).0
    }
}

/// A store without tokens.
fn by_name(tier: Tier, names: &[EngineHash]) -> KvEvent<'_> {
    let root = SequenceHash(0);
    KvEvent::Stored(Stored { tier, parent: None, root, engine_hashes: names, block_hashes: &[] })
}

fn name(chain: u32, at: u32) -> EngineHash {
    EngineHash(u64::from(chain) << 32 | u64::from(at) | 1 << 63)
}
