//! What a clear leaves in lower tiers.
//!
//! `AllBlocksCleared` does not tell whether the GPU tier alone was reset or the lower tiers too (vLLM sends the same
//! for `/reset_prefix_cache` with and without `reset_external=true`), and nothing announces the blocks that stayed.
//! They go on counting, *unconfirmed*, because the plain reset is the usual one, until the engine shows which it was:
//!
//! - It stores a chunk anew that the tier would still hold: the tier was emptied, and all of them are gone.
//! - It evicts one of them: the tier was kept.
//! - It computes or loads a prompt over them and does not store them anew: the tier was kept.
//! - It counts tokens as loaded from the CPU tier, and no other block of that tier came to the GPU: the tier was kept.
//!
//! What a clear or such a proof does to each of a rank's blocks is done in slices, so that no reader waits for the
//! whole of it.

use super::Index;
use super::apply::Change;
use super::lanes::LaneId;
use super::map::SHARDS;
use crate::events::Stored;
use crate::units::{EngineHash, RankId, Tier};
use hashbrown::HashSet;
use std::{iter, mem, vec};

/// Tiers that a GPU reset may leave in place.
const LOWER_TIERS: [Tier; 2] = [Tier::Cpu, Tier::Disk];

/// How many batches after a prompt went over unconfirmed blocks the engine may still store them anew. It does so one
/// batch later, or some more when the copies are slow.
const COPY_BATCHES: u32 = 32;

/// Blocks of one slice: some ten microseconds, for each is a look into large tables.
const SLICE: usize = 64;

/// Parts of a set of names. A part that grows moves all that it has: of a million names, 4,000.
const PARTS: usize = 256;

/// The unconfirmed blocks of one rank.
#[derive(Debug, Default)]
pub(super) struct Doubt {
    /// By lower tier.
    blocks: [Names; LOWER_TIERS.len()],
    /// Batches since a prompt went over unconfirmed blocks of the CPU tier.
    tested: Option<u32>,
    /// Whether a block that the CPU tier surely holds came to the GPU: loads may have been of such blocks.
    reloaded_known: bool,
    unfinished: Option<Unfinished>,
}

/// What is left to do for one rank.
#[derive(Debug)]
enum Unfinished {
    /// Of a clear: the blocks of these names, and of all names from this sub-table on.
    Clear { names: Vec<EngineHash>, shard: usize },
    /// Of the proof that a lower tier was emptied: the blocks to drop from it.
    Drop { names: IntoNames, tier: Tier },
}

/// A set of names that never stops for long.
#[derive(Debug, Default)]
struct Names {
    parts: Vec<HashSet<EngineHash>>,
    len: usize,
}

type IntoNames = iter::Flatten<vec::IntoIter<HashSet<EngineHash>>>;

impl Names {
    fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn contains(&self, hash: &EngineHash) -> bool {
        self.parts.get(part_of(*hash)).is_some_and(|part| part.contains(hash))
    }

    fn insert(&mut self, hash: EngineHash) {
        if self.parts.is_empty() {
            self.parts.resize_with(PARTS, HashSet::new);
        }
        let part = self.parts.get_mut(part_of(hash));
        self.len += usize::from(part.is_some_and(|part| part.insert(hash)));
    }

    fn remove(&mut self, hash: &EngineHash) -> bool {
        let removed = self.parts.get_mut(part_of(*hash)).is_some_and(|part| part.remove(hash));
        self.len -= usize::from(removed);
        removed
    }

    fn into_iter(self) -> IntoNames {
        self.parts.into_iter().flatten()
    }
}

fn part_of(hash: EngineHash) -> usize {
    (hash.0 ^ hash.0 >> 32) as usize % PARTS
}

impl Doubt {
    /// A set's element at the lowest fill.
    const BLOCK_BYTES: usize = 24;

    pub(super) fn blocks(&self) -> u64 {
        self.blocks.iter().map(|names| names.len as u64).sum()
    }

    pub(super) fn bytes(&self) -> usize {
        self.blocks() as usize * Self::BLOCK_BYTES
    }

    /// Whether the store of a lower tier shows that the tier was emptied: an engine does not store what it holds. All
    /// of its blocks must be in doubt: chunks of two prompts may share their first blocks.
    pub(super) fn is_refuted_by(&self, stored: &Stored<'_>) -> bool {
        self.of(stored.tier).is_some_and(|blocks| {
            !blocks.is_empty() && stored.engine_hashes.iter().all(|hash| blocks.contains(hash))
        })
    }

    pub(super) fn see_removal(&mut self, hash: EngineHash, tier: Tier) {
        if self.of(tier).is_some_and(|blocks| blocks.contains(&hash)) {
            self.settle(tier);
        }
    }

    pub(super) fn end_batch(&mut self) {
        let Some(batches) = &mut self.tested else { return };
        *batches += 1;
        if *batches > COPY_BATCHES {
            self.settle(Tier::Cpu);
        }
    }

    /// The name means another block now.
    pub(super) fn forget(&mut self, hash: EngineHash, tier: Tier) {
        if let Some(blocks) = self.of_mut(tier) {
            blocks.remove(&hash);
        }
    }

    /// The blocks of a tier are no longer in doubt; returns which they were.
    fn settle(&mut self, tier: Tier) -> Names {
        (self.tested, self.reloaded_known) = (None, false);
        self.of_mut(tier).map(mem::take).unwrap_or_default()
    }

    pub(super) fn is_unfinished(&self) -> bool {
        self.unfinished.is_some()
    }

    fn of(&self, tier: Tier) -> Option<&Names> {
        self.blocks.get(tier.index().checked_sub(1)?)
    }

    fn of_mut(&mut self, tier: Tier) -> Option<&mut Names> {
        self.blocks.get_mut(tier.index().checked_sub(1)?)
    }
}

impl Index {
    /// The engine has loaded blocks from its CPU tier since the rank's last clear, and told of them.
    pub fn see_loads(&mut self, rank: RankId) {
        let Some(slot) = self.slot_of(rank).and_then(|id| self.slots[usize::from(id)].as_mut()) else {
            return;
        };
        if !slot.doubt.reloaded_known {
            let before = slot.bytes();
            slot.doubt.settle(Tier::Cpu);
            self.slot_bytes = self.slot_bytes + slot.bytes() - before;
        }
    }
}

impl Change<'_> {
    /// A store to the GPU tier: computed, or loaded from a lower one.
    pub(super) fn test_doubt(&mut self, stored: &Stored<'_>) {
        let Some(blocks) = self.slot.doubt.of(Tier::Cpu).filter(|blocks| !blocks.is_empty()) else { return };
        let hashes = || stored.engine_hashes.iter();
        let doubted = hashes().filter(|hash| blocks.contains(hash)).count();
        let known = hashes().any(|hash| !blocks.contains(hash) && self.is_held(*hash, Tier::Cpu));
        self.slot.doubt.reloaded_known |= known;
        // Only whole chunks are stored, so only over a whole chunk does it say something that none is.
        if doubted >= (2 * self.slot.cpu_chunk.max(1) - 1) as usize {
            self.slot.doubt.tested.get_or_insert(0);
        }
    }

    /// Begins to empty the GPU tier and to put the lower ones in doubt.
    pub(super) fn clear_gpu(&mut self) {
        self.applied.cleared += 1;
        self.slot.ghosts.clear();
        self.slot.copies.retain(|(_, tier), _| *tier != Tier::Gpu);
        let names = self.slot.waiting.names().collect();
        self.slot.doubt = Doubt::default();
        self.slot.doubt.unfinished = Some(Unfinished::Clear { names, shard: 0 });
    }

    /// A store shows that its tier was emptied by the last clear: of what was in doubt only the store's blocks are there.
    pub(super) fn refute(&mut self, stored: &Stored<'_>) {
        let mut gone = self.slot.doubt.settle(stored.tier);
        for hash in stored.engine_hashes {
            if gone.remove(hash) {
                self.drop_from(*hash, stored.tier);
            }
        }
        self.slot.doubt.unfinished = Some(Unfinished::Drop { names: gone.into_iter(), tier: stored.tier });
    }

    /// Does a slice of what an event left to do beside its own blocks.
    pub(super) fn resolve_doubt(&mut self) {
        let more = match self.slot.doubt.unfinished.take() {
            None => None,
            Some(Unfinished::Clear { mut names, shard }) => {
                for hash in names.drain(names.len().saturating_sub(SLICE)..) {
                    self.clear_block(hash);
                }
                if !names.is_empty() {
                    Some(Unfinished::Clear { names, shard })
                } else if shard < SHARDS {
                    let entries = self.slot.engine.shard(shard);
                    names.extend(entries.iter().map(|entry| EngineHash(entry.key)));
                    Some(Unfinished::Clear { names, shard: shard + 1 })
                } else {
                    None
                }
            }
            Some(Unfinished::Drop { mut names, tier }) => {
                let mut dropped = 0;
                for hash in names.by_ref().take(SLICE) {
                    self.drop_from(hash, tier);
                    dropped += 1;
                }
                (dropped == SLICE).then_some(Unfinished::Drop { names, tier })
            }
        };
        self.slot.doubt.unfinished = more;
    }

    /// Takes a block out of the GPU tier; where a lower tier holds it, it is in doubt there.
    fn clear_block(&mut self, hash: EngineHash) {
        let block = self.block(hash);
        let held = LOWER_TIERS.map(|tier| match block {
            Some(block) => self.runs.holds(block, LaneId::new(tier, self.id)),
            None => self.slot.waiting.holds(hash, tier),
        });
        for (blocks, held) in self.slot.doubt.blocks.iter_mut().zip(held) {
            if held {
                blocks.insert(hash);
            }
        }
        self.drop_from(hash, Tier::Gpu);
    }

    /// Takes all copies of a block out of a tier.
    fn drop_from(&mut self, hash: EngineHash, tier: Tier) {
        self.slot.copies.remove(&(hash, tier));
        let Some(block) = self.block(hash) else {
            while self.slot.waiting.remove(hash, tier) {}
            return;
        };
        if self.runs.release(block, LaneId::new(tier, self.id)) {
            self.slot.blocks[tier.index()] -= 1;
        }
        if !self.runs.holds_any(block, self.id) {
            self.forget(hash, block);
        }
    }
}
