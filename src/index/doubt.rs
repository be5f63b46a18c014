//! What a clear leaves in lower tiers.
//!
//! `AllBlocksCleared` does not tell whether the GPU tier alone was reset or the lower tiers too (vLLM sends the same
//! for `/reset_prefix_cache` with and without `reset_external=true`), and nothing announces the blocks that stayed.
//! They go on counting, *unconfirmed*, because the plain reset is the usual one, until the engine shows which it was:
//!
//! - It stores a chunk anew that the tier would still hold: the tier was emptied, and all of them are gone.
//! - It evicts one of them: the tier was kept.
//! - It computes or loads a prompt over them and does not store them anew: the tier was kept.

use super::apply::Change;
use super::lanes::LaneId;
use super::runs::BlockRef;
use crate::events::Stored;
use crate::units::{EngineHash, Tier};
use hashbrown::HashSet;

/// Tiers that a GPU reset may leave in place.
const LOWER_TIERS: [Tier; 2] = [Tier::Cpu, Tier::Disk];

/// How many batches after a prompt went over unconfirmed blocks the engine may still store them anew. It does so one
/// batch later, or some more when the copies are slow.
const COPY_BATCHES: u32 = 32;

/// The unconfirmed blocks of one rank.
#[derive(Debug, Default)]
pub(super) struct Doubt {
    blocks: HashSet<(EngineHash, Tier)>,
    /// Batches since a prompt went over unconfirmed blocks of the CPU tier.
    tested: Option<u32>,
}

impl Doubt {
    /// A set's element at the lowest fill.
    const BLOCK_BYTES: usize = 40;

    pub(super) fn blocks(&self) -> u64 {
        self.blocks.len() as u64
    }

    pub(super) fn bytes(&self) -> usize {
        self.blocks.len() * Self::BLOCK_BYTES
    }

    /// Whether the store of a lower tier shows that the tier was emptied: an engine does not store what it holds. All
    /// of its blocks must be in doubt: chunks of two prompts may share their first blocks.
    pub(super) fn is_refuted_by(&self, stored: &Stored<'_>) -> bool {
        !self.blocks.is_empty()
            && stored.engine_hashes.iter().all(|hash| self.blocks.contains(&(*hash, stored.tier)))
    }

    pub(super) fn see_removal(&mut self, hash: EngineHash, tier: Tier) {
        if self.blocks.contains(&(hash, tier)) {
            self.confirm(tier);
        }
    }

    /// Only whole chunks are stored, so only over a whole chunk does it say something that none is.
    pub(super) fn see_gpu_store(&mut self, stored: &Stored<'_>, cpu_chunk: u32) {
        if self.blocks.is_empty() || self.tested.is_some() {
            return;
        }
        let in_doubt = |hash: &&EngineHash| self.blocks.contains(&(**hash, Tier::Cpu));
        let count = stored.engine_hashes.iter().filter(in_doubt).count();
        if count >= (2 * cpu_chunk.max(1) - 1) as usize {
            self.tested = Some(0);
        }
    }

    pub(super) fn end_batch(&mut self) {
        let Some(batches) = &mut self.tested else { return };
        *batches += 1;
        if *batches > COPY_BATCHES {
            self.confirm(Tier::Cpu);
        }
    }

    /// The name means another block now.
    pub(super) fn forget(&mut self, hash: EngineHash, tier: Tier) {
        self.blocks.remove(&(hash, tier));
    }

    fn confirm(&mut self, tier: Tier) {
        self.blocks.retain(|(_, other)| *other != tier);
        self.tested = None;
    }
}

impl Change<'_> {
    /// Empties the GPU tier and puts the lower ones in doubt. Takes time that grows with the rank's blocks.
    pub(super) fn clear_gpu(&mut self) {
        self.applied.cleared += 1;
        self.slot.ghosts.clear();
        self.slot.copies.retain(|(_, tier), _| *tier != Tier::Gpu);
        self.slot.waiting.clear_tier(Tier::Gpu);
        self.slot.doubt = Doubt::default();
        let entries: Vec<(EngineHash, BlockRef)> =
            self.slot.engine.iter().map(|entry| (EngineHash(entry.key()), BlockRef(entry.value()))).collect();
        for (hash, block) in entries {
            self.release(block, Tier::Gpu);
            for tier in LOWER_TIERS {
                if self.runs.holds(block, LaneId::new(tier, self.id)) {
                    self.slot.doubt.blocks.insert((hash, tier));
                }
            }
            if !self.runs.holds_any(block, self.id) {
                self.forget(hash, block);
            }
        }
        for tier in LOWER_TIERS {
            self.slot.doubt.blocks.extend(self.slot.waiting.in_tier(tier).map(|hash| (hash, tier)));
        }
    }

    /// The tier was emptied by the last clear.
    pub(super) fn drop_unconfirmed(&mut self, tier: Tier) {
        let mut doubt = std::mem::take(&mut self.slot.doubt);
        for (hash, _) in doubt.blocks.iter().filter(|(_, other)| *other == tier) {
            self.slot.copies.remove(&(*hash, tier));
            let Some(block) = self.block(*hash) else {
                while self.slot.waiting.remove(*hash, tier) {}
                continue;
            };
            self.release(block, tier);
            if !self.runs.holds_any(block, self.id) {
                self.forget(*hash, block);
            }
        }
        doubt.confirm(tier);
        self.slot.doubt = doubt;
    }

    fn release(&mut self, block: BlockRef, tier: Tier) {
        if self.runs.release(block, LaneId::new(tier, self.id)) {
            self.slot.blocks[tier.index()] -= 1;
        }
    }
}
