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
use super::names::{NameMap, PARTS};
use super::vouched::end_vouching;
use crate::events::Stored;
use crate::units::{EngineHash, RankId, Tier};
use std::mem;

/// Tiers that a GPU reset may leave in place.
const LOWER_TIERS: [Tier; 2] = [Tier::Cpu, Tier::Disk];

/// How many batches after a prompt went over unconfirmed blocks the engine may still store them anew. It does so one
/// batch later, or some more when the copies are slow.
const COPY_BATCHES: u32 = 32;

/// Blocks of one slice: some ten microseconds, for each is a look into large tables.
const SLICE: usize = 64;

/// The unconfirmed blocks of one rank.
#[derive(Debug, Default)]
pub(super) struct Doubt {
    /// By lower tier.
    blocks: [NameMap<()>; LOWER_TIERS.len()],
    /// Batches since a prompt went over unconfirmed blocks of the CPU tier.
    tested: Option<u32>,
    /// Whether a block that the CPU tier surely holds came to the GPU: loads may have been of such blocks.
    reloaded_known: bool,
    unfinished: Option<Unfinished>,
}

/// What is left to do for one rank: for these names first, then for those of all parts from one on.
#[derive(Debug)]
struct Unfinished {
    work: Work,
    names: Vec<EngineHash>,
    part: usize,
}

#[derive(Debug)]
enum Work {
    /// Of a clear: to take every block out of the GPU tier.
    Clear,
    /// Of the proof that a lower tier was emptied: to take these blocks out of it.
    Drop(NameMap<()>, Tier),
}

/// Of the blocks of a store, seen in slices: how they stand to the unconfirmed ones.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Doubted {
    /// How many are unconfirmed in the lower tier that the store is of, or else the CPU tier.
    blocks: usize,
    /// Whether the CPU tier surely holds one of the others.
    known: bool,
}

impl Doubt {
    pub(super) fn blocks(&self) -> u64 {
        self.blocks.iter().map(|names| names.len() as u64).sum()
    }

    pub(super) fn bytes(&self) -> usize {
        let dropped = self.unfinished.as_ref().map_or(0, |unfinished| match &unfinished.work {
            Work::Clear => 0,
            Work::Drop(names, _) => names.bytes(),
        });
        self.blocks.iter().map(NameMap::bytes).sum::<usize>() + dropped
    }

    /// Whether a store to the tier says something of unconfirmed blocks.
    pub(super) fn is_about(&self, stored: Tier) -> bool {
        self.judged_by(stored).is_some_and(|names| !names.is_empty())
    }

    /// The blocks that a store to the tier is a judgement on: its own tier's, or the CPU tier's where it may have been
    /// loaded from there.
    fn judged_by(&self, stored: Tier) -> Option<&NameMap<()>> {
        self.of(if stored == Tier::Gpu { Tier::Cpu } else { stored })
    }

    pub(super) fn drop_part(&mut self, at: usize) {
        self.blocks.iter_mut().for_each(|names| _ = names.take_part(at));
    }

    pub(super) fn see_removal(&mut self, hash: EngineHash, tier: Tier) {
        if self.of(tier).is_some_and(|blocks| blocks.contains(hash)) {
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
            blocks.remove(hash);
        }
    }

    /// The blocks of a tier are no longer in doubt; returns which they were.
    fn settle(&mut self, tier: Tier) -> NameMap<()> {
        (self.tested, self.reloaded_known) = (None, false);
        self.of_mut(tier).map(mem::take).unwrap_or_default()
    }

    pub(super) fn is_unfinished(&self) -> bool {
        self.unfinished.is_some()
    }

    fn of(&self, tier: Tier) -> Option<&NameMap<()>> {
        self.blocks.get(tier.index().checked_sub(1)?)
    }

    fn of_mut(&mut self, tier: Tier) -> Option<&mut NameMap<()>> {
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
    /// A slice of a store's blocks, before it is applied.
    pub(super) fn look_at_doubts(&self, tier: Tier, names: &[EngineHash], seen: &mut Doubted) {
        let Some(blocks) = self.slot.doubt.judged_by(tier) else { return };
        for name in names {
            if blocks.contains(*name) {
                seen.blocks += 1;
            } else if tier == Tier::Gpu {
                seen.known |= self.is_held(*name, Tier::Cpu);
            }
        }
    }

    /// What a store says of unconfirmed blocks, all of its own seen.
    pub(super) fn judge_doubts(&mut self, stored: &Stored<'_>, seen: Doubted) {
        if seen.blocks == 0 && !seen.known {
            return;
        }
        if stored.tier != Tier::Gpu {
            // An engine does not store what it holds: the tier was emptied. All of the store's blocks must be in doubt, as
            // chunks of two prompts may share their first blocks.
            if seen.blocks == stored.engine_hashes.len() {
                let gone = self.slot.doubt.settle(stored.tier);
                let work = Work::Drop(gone, stored.tier);
                self.slot.doubt.unfinished = Some(Unfinished { work, names: Vec::new(), part: 0 });
            }
            return;
        }
        if stored.block_hashes.is_empty() {
            return;
        }
        self.slot.doubt.reloaded_known |= seen.known;
        // Only whole chunks are stored, so only over a whole chunk does it say something that none is.
        if seen.blocks >= (2 * self.slot.cpu_chunk.max(1) - 1) as usize {
            self.slot.doubt.tested.get_or_insert(0);
        }
    }

    /// The store at hand showed that its tier was emptied, and names a block that was thought to be there: it is no second
    /// copy.
    pub(super) fn drop_refuted(&mut self, hash: EngineHash, tier: Tier) {
        if let Some(Unfinished { work: Work::Drop(names, of), .. }) = &mut self.slot.doubt.unfinished
            && *of == tier
            && names.remove(hash).is_some()
        {
            self.drop_from(hash, tier);
        }
    }

    /// Begins to empty the GPU tier and to put the lower ones in doubt.
    pub(super) fn clear_gpu(&mut self) {
        self.applied.cleared += 1;
        self.slot.ghosts.clear();
        let unfinished = Some(Unfinished { work: Work::Clear, names: Vec::new(), part: 0 });
        self.slot.doubt = Doubt { unfinished, ..Doubt::default() };
    }

    /// Does a slice of what an event left to do beside its own blocks.
    pub(super) fn resolve_doubt(&mut self) {
        let Some(mut left) = self.slot.doubt.unfinished.take() else { return };
        for name in left.names.drain(left.names.len().saturating_sub(SLICE)..) {
            match &left.work {
                Work::Clear => self.clear_block(name),
                Work::Drop(_, tier) => self.drop_from(name, *tier),
            }
        }
        if left.names.is_empty() {
            if left.part == PARTS {
                return;
            }
            match &mut left.work {
                Work::Clear => {
                    let placed = self.slot.engine.shard(left.part).iter().map(|entry| EngineHash(entry.key));
                    left.names.extend(self.slot.waiting.names_of_part(left.part).chain(placed));
                }
                Work::Drop(names, _) => left.names.extend(names.take_part(left.part).into_keys()),
            }
            left.part += 1;
        }
        self.slot.doubt.unfinished = Some(left);
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
                blocks.or_insert(hash, ());
            }
        }
        self.drop_from(hash, Tier::Gpu);
    }

    /// Takes all copies of a block out of a tier.
    fn drop_from(&mut self, hash: EngineHash, tier: Tier) {
        if tier == Tier::Gpu {
            end_vouching(self.runs, self.slot, self.id, hash);
        }
        let Some(block) = self.block(hash) else {
            return self.slot.waiting.remove_all(hash, tier);
        };
        if let Some(counts) = self.slot.copies.get_mut(hash) {
            counts[tier.index()] = 0;
            if *counts == [0; 3] {
                self.slot.copies.remove(hash);
            }
        }
        if self.runs.release(block, LaneId::new(tier, self.id)) {
            self.slot.blocks[tier.index()] -= 1;
        }
        if !self.runs.holds_any(block, self.id) {
            self.forget(hash, block);
        }
    }
}
