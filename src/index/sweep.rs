//! Cleaning up behind ranks that were cleared or removed, in slices that take some ten microseconds.
//!
//! The blocks of a rank stand in its engine map in no order, while what is to be done is the same for all of one run. So
//! they are counted by run first, and then each run is dealt with once.

use super::Index;
use super::map::SHARDS;
use super::runs::{BlockRef, RunId, Runs};
use super::slot::Slot;
use smallvec::SmallVec;
use std::mem;

/// Blocks after which a slice of counting ends.
const SLICE_BLOCKS: usize = 4096;

/// Buckets of an engine map that are counted at a time.
const SLICE_BUCKETS: usize = 1024;

/// Runs that one slice deals with.
const SLICE_RUNS: usize = 128;

/// Runs that one slice looks at: most are other ranks' alone.
const SLICE_PLACES: usize = 65_536;

/// Runs for which one slice gets memory: the system gives it page by page, a microsecond or two each.
const SLICE_NEW: usize = 16_384;

/// A dead slot that is being cleaned up.
#[derive(Debug)]
pub(super) struct Sweep {
    slot: u16,
    /// The shard of its engine map that is being counted.
    shard: usize,
    /// Runs that there were when it began: no other one has blocks of the slot.
    places: usize,
    /// Blocks that were taken out of the map and are still to be forgotten, by run.
    counts: Vec<u32>,
    next_run: usize,
}

impl Sweep {
    fn of(slot: u16, runs: &Runs) -> Self {
        let places = runs.places();
        Self { slot, shard: 0, places, counts: Vec::with_capacity(places), next_run: 0 }
    }

    /// Makes ready a slice of the counts: memory costs more to get than to use. Returns whether that was still to do.
    fn prepare(&mut self) -> bool {
        let ready = self.counts.len();
        self.counts.resize(self.places.min(ready + SLICE_NEW), 0);
        ready < self.places
    }

    /// Counts a slice; returns its blocks, 0 after the last.
    fn count(&mut self, slot: &mut Slot) -> usize {
        let (mut blocks, counts) = (slot.vouched.len(), &mut self.counts);
        for block in slot.vouched.blocks() {
            counts[block.run() as usize] += 1;
        }
        slot.vouched.clear();
        while blocks < SLICE_BLOCKS && self.shard < SHARDS {
            let visit = |value, times| counts[BlockRef(value).run() as usize] += times;
            blocks += slot.engine.drain(self.shard, SLICE_BUCKETS, visit);
            if slot.engine.is_drained(self.shard) {
                slot.drop_part(self.shard);
                self.shard += 1;
            }
        }
        blocks
    }

    /// Forgets the blocks of a slice of runs; returns their number, which may be 0 before the end.
    fn forget(&mut self, runs: &mut Runs) -> usize {
        let end = self.counts.len().min(self.next_run + SLICE_PLACES);
        let mut held: SmallVec<[(RunId, u32); SLICE_RUNS]> = SmallVec::new();
        while held.len() < SLICE_RUNS && self.next_run < end {
            let count = mem::take(&mut self.counts[self.next_run]);
            if count > 0 {
                held.push((self.next_run as RunId, count));
            }
            self.next_run += 1;
        }
        runs.touch(held.iter().map(|(run, _)| *run));
        for (run, count) in &held {
            runs.release_slot(*run, self.slot);
            runs.forget(*run, *count);
        }
        held.iter().map(|(_, count)| *count as usize).sum()
    }

    fn is_done(&self) -> bool {
        self.next_run >= self.places
    }

    /// The run of each block that is still to be forgotten.
    #[cfg(debug_assertions)]
    pub(super) fn pending(&self) -> impl Iterator<Item = BlockRef> {
        let runs = self.counts.iter().zip(0..);
        runs.flat_map(|(count, run)| std::iter::repeat_n(BlockRef::first_of(run), *count as usize))
    }
}

impl Index {
    /// Cleans up behind ranks that were cleared or removed, at least `blocks` blocks or all; returns whether more is
    /// left. One block is one slice. What they held does not count any more, but takes memory until then.
    pub fn sweep(&mut self, blocks: usize) -> bool {
        let mut swept = 0;
        while swept < blocks && !self.dead.is_empty() {
            swept += 1 + self.sweep_slice();
        }
        !self.dead.is_empty()
    }

    /// Returns the number of blocks; the first and last slices of a slot may have none.
    pub(super) fn sweep_slice(&mut self) -> usize {
        if self.sweep.is_none() {
            self.sweep = self.dead.last().map(|slot| Sweep::of(*slot, &self.runs));
        }
        let Some(sweep) = &mut self.sweep else { return 0 };
        if sweep.prepare() {
            return 0;
        }
        let id = sweep.slot;
        if let Some(slot) = &mut self.slots[usize::from(id)] {
            let before = slot.bytes();
            let counted = sweep.count(slot);
            self.slot_bytes -= before - slot.bytes();
            if counted > 0 {
                return counted;
            }
        }
        let forgotten = sweep.forget(&mut self.runs);
        if sweep.is_done() {
            self.sweep = None;
            self.slot_bytes -= self.slots[usize::from(id)].take().map_or(0, |slot| slot.bytes());
            self.dead.retain(|dead| *dead != id);
            self.free_slots.push(id);
        }
        forgotten
    }
}
