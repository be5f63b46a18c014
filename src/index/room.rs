//! Making room: the limit of the index's memory.

use super::Index;
use super::lanes::LaneId;
use super::map::{Entry, SHARDS};
use super::runs::{BlockRef, Runs};
use super::slot::Slot;
use crate::units::{EngineHash, Tier};

/// Share of the largest rank's blocks that one pass drops: small, so that little more than needed is lost.
const PASS_SHARE: usize = 8;

/// Entries that one event may have looked at for the sake of the limit: some hundred microseconds.
const ENTRIES_PER_EVENT: usize = 16_384;

/// Blocks by which a pass sets its mark.
const SAMPLE: usize = 4096;

/// One pass over one rank: everything at least as cold as `mark` is dropped.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pass {
    slot: u16,
    mark: u64,
    next_shard: usize,
}

impl Pass {
    pub(super) fn is_of(&self, slot: u16) -> bool {
        self.slot == slot
    }
}

impl Index {
    /// Drops the least recently used blocks of the largest rank, deepest first, while the index is above its limit.
    pub(super) fn make_room(&mut self) {
        let mut looked_at = 0;
        while self.bytes() > self.config.max_bytes && looked_at < ENTRIES_PER_EVENT {
            if !self.dead.is_empty() {
                looked_at += 1 + self.sweep_slice();
                continue;
            }
            let Some(mut pass) = self.pass.take().or_else(|| self.begin_pass()) else { return };
            looked_at += 1 + self.evict_shard(&pass);
            pass.next_shard += 1;
            if pass.next_shard < SHARDS {
                self.pass = Some(pass);
            }
        }
    }

    fn begin_pass(&self) -> Option<Pass> {
        let live = self.ranks.iter().flatten().copied();
        let sized = live.filter_map(|id| Some((self.slots[usize::from(id)].as_ref()?.engine.len(), id)));
        let (entries, id) = sized.max()?;
        let slot = self.slots[usize::from(id)].as_ref().filter(|_| entries > 0)?;
        // The shards are random shares of all blocks, so any of them are a fair sample.
        let sample = slot.engine.iter().take(SAMPLE);
        let mut colds: Vec<u64> = sample.map(|entry| self.coldness(BlockRef(entry.value))).collect();
        let at = colds.len() - 1 - colds.len() / PASS_SHARE;
        let (_, mark, _) = colds.select_nth_unstable(at);
        Some(Pass { slot: id, mark: *mark, next_shard: 0 })
    }

    /// Grows with the time since the last use, and among equals with the depth: what is dropped is a tail.
    fn coldness(&self, block: BlockRef) -> u64 {
        coldness(&self.runs, block, self.clock.now())
    }

    fn evict_shard(&mut self, pass: &Pass) -> usize {
        let now = self.clock.now();
        let Some(slot) = &mut self.slots[usize::from(pass.slot)] else { return 0 };
        let runs = &mut self.runs;
        let before = slot.bytes();
        let shard = slot.engine.take(pass.next_shard);
        let count = shard.len();
        let mut kept: Vec<Entry> = shard.iter().collect();
        kept.retain(|entry| {
            let block = BlockRef(entry.value);
            let keep = coldness(runs, block, now) < pass.mark;
            if !keep {
                evict(runs, slot, pass.slot, EngineHash(entry.key), block);
            }
            keep
        });
        let evicted = (count - kept.len()) as u64;
        slot.engine.put_back(pass.next_shard, &kept);
        slot.evicted += evicted;
        slot.truncated |= evicted > 0;
        self.evicted += evicted;
        self.slot_bytes = self.slot_bytes + slot.bytes() - before;
        count
    }
}

fn coldness(runs: &Runs, block: BlockRef, now: u32) -> u64 {
    let age = now.wrapping_sub(runs.head(block.run()).used());
    u64::from(age) << 32 | u64::from(runs.position(block))
}

fn evict(runs: &mut Runs, slot: &mut Slot, id: u16, hash: EngineHash, block: BlockRef) {
    for tier in Tier::ALL {
        slot.copies.remove(&(hash, tier));
        if runs.release(block, LaneId::new(tier, id)) {
            slot.blocks[tier.index()] -= 1;
        }
    }
    runs.forget(block.run(), 1);
}
