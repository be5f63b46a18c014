//! Making room: the limit of the index's memory.

use super::Index;
use super::lanes::LaneId;
use super::map::{Entry, SHARDS};
use super::runs::{BlockRef, Runs};
use super::slot::Slot;
use super::vouched::end_vouching;
use crate::units::{EngineHash, Tier};

/// Share of the largest rank's blocks that one pass drops: small, so that little more than needed is lost.
const PASS_SHARE: usize = 8;

/// Entries that are looked at for each block stored: at the share above, three times as many go as come.
const ENTRIES_PER_BLOCK: usize = 3 * PASS_SHARE;

/// Entries that are looked at in any case, so that what went above the limit comes below it again.
pub(super) const ENTRIES_PER_EVENT: usize = 256;

/// Buckets of an engine map that are looked at at a time: some hundred entries.
const SLICE_BUCKETS: usize = 64;

/// Blocks by which a pass sets its mark: few enough to look at in one slice.
const SAMPLE: usize = 1024;

/// One pass over one rank: everything at least as cold as `mark` is dropped.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pass {
    slot: u16,
    mark: u64,
    /// Where it goes on in the engine map. A shard that shrinks moves some entries past it: the next pass meets them.
    shard: usize,
    bucket: usize,
    /// Entries that were looked at since one was dropped.
    barren: usize,
}

impl Pass {
    pub(super) fn is_of(&self, slot: u16) -> bool {
        self.slot == slot
    }
}

impl Index {
    /// Drops some of the least recently used blocks of the largest rank, deepest first, as the index is above its limit: a
    /// slice of what is to be done after so many blocks were `stored`. Returns whether more of it is left.
    pub(super) fn make_room(&mut self, stored: usize) -> bool {
        self.to_look_at += ENTRIES_PER_BLOCK * stored;
        if self.to_look_at == 0 {
            return false;
        }
        let looked_at = if !self.dead.is_empty() {
            self.sweep_slice()
        } else if let Some(pass) = self.pass.take_if(|pass| pass.barren < SAMPLE) {
            self.evict_slice(pass)
        } else {
            self.begin_pass();
            0
        };
        self.to_look_at = self.to_look_at.saturating_sub(1 + looked_at);
        self.bytes() > self.config.max_bytes && self.to_look_at > 0
    }

    /// Sets a mark, and begins a pass with it; one over the same rank that found nothing any more goes on with it.
    fn begin_pass(&mut self) {
        let old = self.pass.take();
        self.pass = self.mark().map(|(slot, mark)| match old {
            Some(old) if old.slot == slot => Pass { mark, barren: 0, ..old },
            _ => Pass { slot, mark, shard: 0, bucket: 0, barren: 0 },
        });
    }

    /// The largest rank, and how cold its coldest blocks are.
    fn mark(&self) -> Option<(u16, u64)> {
        let live = self.ranks.iter().flatten().copied();
        let sized = live.filter_map(|id| Some((self.slots[usize::from(id)].as_ref()?.engine.len(), id)));
        let (_, id) = sized.max()?;
        let slot = self.slots[usize::from(id)].as_ref()?;
        // Some of every shard: what is left in those where the last pass began is older than in those where it ended.
        let sample = (0..SHARDS).flat_map(|at| slot.engine.shard(at).iter().take(SAMPLE / SHARDS));
        let mut colds: Vec<u64> = sample.map(|entry| self.coldness(BlockRef(entry.value))).collect();
        let at = colds.len().checked_sub(1 + colds.len() / PASS_SHARE)?;
        let (_, mark, _) = colds.select_nth_unstable(at);
        Some((id, *mark))
    }

    /// Grows with the time since the last use, and among equals with the depth: what is dropped is a tail.
    fn coldness(&self, block: BlockRef) -> u64 {
        coldness(&self.runs, block, self.clock.now())
    }

    /// Returns the number of entries that were looked at.
    fn evict_slice(&mut self, mut pass: Pass) -> usize {
        let now = self.clock.now();
        let Some(slot) = &mut self.slots[usize::from(pass.slot)] else { return 0 };
        let (runs, mut looked_at) = (&mut self.runs, 0);
        let before = slot.bytes();
        let Some(entries) = slot.engine.slice(pass.shard, pass.bucket, SLICE_BUCKETS) else {
            pass = Pass { shard: pass.shard + 1, bucket: 0, ..pass };
            self.pass = (pass.shard < SHARDS).then_some(pass);
            return 0;
        };
        let entries = entries.inspect(|_| looked_at += 1);
        let cold: Vec<Entry> =
            entries.filter(|entry| coldness(runs, BlockRef(entry.value), now) >= pass.mark).collect();
        for entry in &cold {
            slot.engine.remove(entry.key);
            evict(runs, slot, pass.slot, EngineHash(entry.key), BlockRef(entry.value));
        }
        let evicted = cold.len() as u64;
        slot.evicted += evicted;
        slot.truncated |= evicted > 0;
        self.evicted += evicted;
        self.slot_bytes = self.slot_bytes + slot.bytes() - before;
        let barren = if evicted > 0 { 0 } else { pass.barren + looked_at };
        self.pass = Some(Pass { bucket: pass.bucket + SLICE_BUCKETS, barren, ..pass });
        looked_at
    }
}

fn coldness(runs: &Runs, block: BlockRef, now: u32) -> u64 {
    let age = now.wrapping_sub(runs.head(block.run()).used());
    u64::from(age) << 32 | u64::from(runs.position(block))
}

fn evict(runs: &mut Runs, slot: &mut Slot, id: u16, hash: EngineHash, block: BlockRef) {
    end_vouching(runs, slot, id, hash);
    slot.copies.remove(hash);
    for tier in Tier::ALL {
        if runs.release(block, LaneId::new(tier, id)) {
            slot.blocks[tier.index()] -= 1;
        }
    }
    runs.forget(block.run(), 1);
}
