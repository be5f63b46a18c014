//! KV events → changes of the index.
//!
//! Only GPU events tell who a block is: they carry its tokens, and the salt, adapter and media that make it differ
//! from another block of the same tokens. Events of lower tiers do not (vLLM gives them no `extra_keys`), so a block
//! in a lower tier takes its identity from the GPU event of the same engine hash, and waits unscored until there was
//! one.

use super::doubt::Doubted;
use super::lanes::LaneId;
use super::runs::{BlockRef, Runs, Span};
use super::slot::Slot;
use super::stats::Applied;
use super::vouched::end_vouching;
use super::waiting::{Link, WaitingBlock};
use crate::events::{KvEvent, Stored};
use crate::hash::HashKey;
use crate::units::{BlockHash, EngineHash, SequenceHash, Tier};
use std::{iter, mem, ops::Range};

/// Limits of one rank's tables.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Limits {
    pub(super) waiting: usize,
    pub(super) ghosts: usize,
}

/// One event being applied to one slot.
#[derive(Debug)]
pub(super) struct Change<'a> {
    pub(super) runs: &'a mut Runs,
    pub(super) slot: &'a mut Slot,
    /// The slot's place.
    pub(super) id: u16,
    pub(super) key: &'a HashKey,
    pub(super) now: u32,
    pub(super) limits: Limits,
    pub(super) applied: Applied,
    pub(super) scratch: &'a mut Scratch,
}

/// Memory for the store at hand, kept to be used again.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// Its blocks' sequence hashes.
    hashes: Vec<SequenceHash>,
    /// Where its blocks are.
    pub(super) placed: Vec<Span>,
    /// Blocks behind which some may still wait, each standing behind the one before.
    open: Vec<EngineHash>,
}

impl Scratch {
    /// Another event begins.
    pub(super) fn clear(&mut self) {
        self.open.clear();
    }
}

/// Blocks of one slice of an event: together some ten microseconds.
const SLICE: usize = 256;

/// How far the event at hand is applied.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Progress {
    phase: Phase,
    /// Blocks that are done in this phase.
    blocks: usize,
    is_done: bool,
    seen: Seen,
    copies: Copies,
}

/// What is done for all blocks of a store before the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Phase {
    /// It is seen what they are to the rank before the store.
    #[default]
    Look,
    /// They get their places.
    Place,
    /// What waited of themselves is held there.
    Hold,
    /// What waited behind them gets its place.
    Release,
}

impl Progress {
    /// Of what is no event.
    pub(super) fn done() -> Self {
        Self { is_done: true, ..Self::default() }
    }

    pub(super) fn is_done(&self) -> bool {
        self.is_done
    }

    /// The next slice of an event of so many blocks.
    fn next(&mut self, count: usize) -> Range<usize> {
        let start = self.blocks.min(count);
        self.blocks = count.min(start + SLICE);
        self.is_done = self.blocks == count;
        start..self.blocks
    }

    /// Goes on with the first block.
    fn begin(&mut self, phase: Phase) {
        *self = Self { phase, seen: self.seen, copies: self.copies, ..Self::default() };
    }
}

/// What the blocks of a store are to the rank before it.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// Whether one is not held in the GPU tier.
    news: bool,
    /// Of those that are held in doubt.
    doubted: Doubted,
}

/// Copies that a store adds to a block that is held already.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Copies {
    /// One more physical copy.
    #[default]
    Count,
    /// None: the store only announces what is there.
    Announce,
}

impl<'a> Change<'a> {
    pub(super) fn new(
        runs: &'a mut Runs,
        slot: &'a mut Slot,
        id: u16,
        key: &'a HashKey,
        scratch: &'a mut Scratch,
    ) -> Self {
        Self { runs, slot, id, key, scratch, now: 0, limits: Limits::default(), applied: Applied::default() }
    }
}

impl Change<'_> {
    /// Applies the next slice of an event.
    pub(super) fn apply(&mut self, event: &KvEvent<'_>, progress: &mut Progress) {
        match event {
            KvEvent::Stored(stored) => self.store(stored, progress),
            KvEvent::Removed { tier, engine_hashes } => {
                let slice = &engine_hashes[progress.next(engine_hashes.len())];
                self.slot.engine.touch(slice);
                for hash in slice {
                    self.remove(*hash, *tier);
                }
            }
            KvEvent::Cleared => {
                self.clear_gpu();
                progress.is_done = true;
            }
        }
    }

    fn store(&mut self, stored: &Stored<'_>, progress: &mut Progress) {
        let (names, blocks) = (stored.engine_hashes, stored.block_hashes);
        let by_name = stored.tier != Tier::Gpu || blocks.is_empty();
        if !by_name && names.len() != blocks.len() {
            self.applied.malformed += 1;
            progress.is_done = true;
            return;
        }
        if progress.phase == Phase::Look && !self.look(stored, by_name, progress) {
            return;
        }
        if progress.phase == Phase::Release {
            return self.release_behind(names, progress);
        }
        let slice = progress.next(names.len());
        let next = match progress.phase {
            _ if by_name => {
                names[slice].iter().for_each(|hash| self.store_by_name(*hash, stored.tier));
                return;
            }
            Phase::Hold => {
                // A store from the start repeats what orphans told already; behind a parent it is a copy of its own.
                let copies = if stored.parent.is_none() { Copies::Announce } else { Copies::Count };
                self.hold_waiting(&names[slice], copies);
                Phase::Release
            }
            _ => {
                let parent = if slice.start == 0 { stored.parent } else { Some(names[slice.start - 1]) };
                let engine_hashes = &names[slice.clone()];
                let part = Stored { parent, engine_hashes, block_hashes: &blocks[slice], ..*stored };
                self.store_chain(&part, progress.copies);
                Phase::Hold
            }
        };
        if progress.is_done && !self.slot.waiting.is_empty() {
            progress.begin(next);
            if names.len() <= SLICE {
                self.store(stored, progress);
            }
        }
    }

    /// Looks at the next slice of a store's blocks for what the store means as a whole; returns whether that is known now.
    ///
    /// vLLM's `kv_cache_report_mode: full` names a cached prefix again, from the start. Nothing is stored by that and
    /// nothing will be removed for it: counted as copies, the blocks would stay for ever. A real second copy of a whole
    /// prompt looks the same; it is lost with the first removal. Where blocks were dropped for want of room, the two
    /// cannot be told apart at all.
    fn look(&mut self, stored: &Stored<'_>, by_name: bool, progress: &mut Progress) -> bool {
        let may_announce = !by_name && stored.parent.is_none() && !self.slot.truncated;
        let has_doubts = self.slot.doubt.is_about(stored.tier);
        if (may_announce && !progress.seen.news) || has_doubts {
            let names = &stored.engine_hashes[progress.next(stored.engine_hashes.len())];
            let is_news = |hash: &EngineHash| !self.is_held(*hash, Tier::Gpu);
            progress.seen.news |= may_announce && names.iter().any(is_news);
            if has_doubts {
                self.look_at_doubts(stored.tier, names, &mut progress.seen.doubted);
            }
            let is_open = has_doubts || !progress.seen.news;
            if is_open && !mem::take(&mut progress.is_done) {
                return false;
            }
        }
        let is_announced = !by_name && stored.parent.is_none() && !progress.seen.news;
        progress.copies = if is_announced { Copies::Announce } else { Copies::Count };
        if stored.tier == Tier::Cpu {
            // One event names one offload chunk; where engines merge or split them, 1 is the safe answer.
            let size = u32::try_from(stored.engine_hashes.len()).unwrap_or(u32::MAX);
            self.slot.cpu_chunk = greatest_common_divisor(self.slot.cpu_chunk, size);
        }
        self.judge_doubts(stored, progress.seen.doubted);
        let is_short = progress.blocks <= SLICE;
        progress.begin(Phase::Place);
        is_short
    }

    /// A store that names a block without telling what it is.
    fn store_by_name(&mut self, hash: EngineHash, tier: Tier) {
        self.drop_refuted(hash, tier);
        if let Some(block) = self.block(hash) {
            self.hold(hash, block, tier, 1, Copies::Count);
        } else if self.slot.waiting.add(hash, None, tier, self.limits.waiting) {
            self.applied.unscored += 1;
        } else {
            self.drop_blocks(1);
        }
    }

    /// A GPU store with tokens.
    fn store_chain(&mut self, stored: &Stored<'_>, copies: Copies) {
        self.slot.engine.touch(stored.engine_hashes);
        if let Some(names) = self.place(stored) {
            self.locate(names, copies);
        }
    }

    /// Finds the blocks of a store; those that have a place are in `placed` then, and their names are returned.
    fn place<'s>(&mut self, stored: &Stored<'s>) -> Option<&'s [EngineHash]> {
        let (mut names, mut blocks) = (stored.engine_hashes, stored.block_hashes);
        let (mut at, mut before) = (None, stored.root);
        self.scratch.placed.clear();
        if let Some(parent) = stored.parent {
            at = self.block(parent);
            if at.is_none() {
                // Blocks wait, up to one that is known from before its parent was forgotten.
                let known = names.iter().position(|name| self.block(*name).is_some()).unwrap_or(names.len());
                let parents = iter::once(&parent).chain(names);
                for ((name, block), parent) in names.iter().zip(blocks).zip(parents).take(known) {
                    self.wait(*name, Link { parent: *parent, block: *block });
                }
                (names, blocks) = (&names[known..], &blocks[known..]);
                at = self.block(*names.first()?);
                self.scratch.placed.extend(at.map(Span::of));
                blocks = &blocks[1..];
            }
            before = self.runs.hash(at?);
        }
        let Scratch { hashes, placed, .. } = &mut *self.scratch;
        self.key.chain_all(before, blocks, hashes);
        let refused = self.runs.place_all(at, hashes, placed);
        if refused > 0 {
            self.drop_blocks(refused as u64);
        }
        Some(names)
    }

    /// Names the `placed` blocks and holds them in the GPU tier. A loop of its own, with little in it: each block
    /// costs a look into a large table, and the processor waits for several at a time where they stand close together.
    fn locate(&mut self, names: &[EngineHash], copies: Copies) {
        let placed = mem::take(&mut self.scratch.placed);
        let lane = LaneId::new(Tier::Gpu, self.id);
        let mut names = names.iter();
        let mut reused = Vec::new();
        for span in &placed {
            // Entries of the engine map that did not refer to the run before.
            let mut entries = 0;
            for (block, name) in span.blocks().zip(&mut names) {
                match self.slot.engine.insert(name.0, block.0) {
                    None => entries += u32::from(!self.take_vouched(block)),
                    Some(old) if old == block.0 => {
                        if self.runs.holds(block, lane) {
                            self.add_copies(*name, Tier::Gpu, 1, copies);
                        }
                    }
                    Some(old) => {
                        entries += 1;
                        reused.push((*name, BlockRef(old)));
                    }
                }
            }
            self.runs.refer(span.run(), entries);
            let added = self.runs.hold(*span, lane, self.now) as u64;
            self.applied.stored += added;
            self.slot.blocks[Tier::Gpu.index()] += added;
        }
        // Not before all blocks are referred to: what only the old block kept may be what the new ones stand on.
        for (name, old) in reused {
            self.forget_reused(name, old);
        }
        self.scratch.placed = placed;
    }

    /// Holds copies of one known block in a tier.
    fn hold(&mut self, hash: EngineHash, block: BlockRef, tier: Tier, count: u32, copies: Copies) {
        let added = self.runs.hold(Span::of(block), LaneId::new(tier, self.id), self.now);
        if added == 0 {
            self.add_copies(hash, tier, count, copies);
            return;
        }
        self.applied.stored += 1;
        self.slot.blocks[tier.index()] += 1;
        if count > 1 {
            self.add_copies(hash, tier, count - 1, Copies::Count);
        }
    }

    fn add_copies(&mut self, hash: EngineHash, tier: Tier, count: u32, copies: Copies) {
        match copies {
            Copies::Announce => self.applied.announced += 1,
            Copies::Count => {
                self.slot.copies.or_insert(hash, [0; 3])[tier.index()] += count;
                self.applied.duplicates += u64::from(count);
            }
        }
    }

    fn wait(&mut self, hash: EngineHash, link: Link) {
        if self.slot.waiting.add(hash, Some(link), Tier::Gpu, self.limits.waiting) {
            self.applied.orphaned += 1;
        } else {
            self.drop_blocks(1);
        }
    }

    /// Holds what waited of blocks that have their places now.
    fn hold_waiting(&mut self, located: &[EngineHash], copies: Copies) {
        for hash in located {
            let Some(block) = self.block(*hash) else { continue };
            if let Some(waiting) = self.slot.waiting.take(*hash) {
                self.hold_waited(*hash, block, waiting.copies, copies);
            }
        }
    }

    /// The same of one, which must be in the GPU tier too, and what waits behind it.
    pub(super) fn hold_adopted(&mut self, name: EngineHash, block: BlockRef) {
        self.hold_waiting(&[name], Copies::Count);
        if !self.is_held(name, Tier::Gpu) {
            self.hold(name, block, Tier::Gpu, 1, Copies::Count);
        }
    }

    /// Gives all blocks behind one their places.
    pub(super) fn release_all_behind(&mut self, name: EngineHash) {
        let mut progress = Progress::default();
        while !progress.is_done() {
            self.release_behind(&[name], &mut progress);
        }
    }

    /// Gives a place to blocks that waited for one of `located`, and to what waited for those: a slice.
    fn release_behind(&mut self, located: &[EngineHash], progress: &mut Progress) {
        for _ in 0..SLICE {
            if let Some(parent) = self.scratch.open.last() {
                let at = self.block(*parent);
                match at.and_then(|at| Some((at, self.slot.waiting.take_behind(*parent)?))) {
                    Some((at, (hash, waited))) => self.release(at, hash, waited),
                    None => _ = self.scratch.open.pop(),
                }
            } else if let Some(parent) = located.get(progress.blocks) {
                self.scratch.open.push(*parent);
                progress.blocks += 1;
            } else {
                progress.is_done = true;
                return;
            }
        }
    }

    /// Gives a waiting block its place behind another.
    fn release(&mut self, parent: BlockRef, hash: EngineHash, waited: WaitingBlock) {
        let block = waited.link.map_or(BlockHash::default(), |link| link.block);
        let chained = self.key.chain(self.runs.hash(parent), block);
        let Some(found) = self.runs.place(Some(parent), chained, 0) else { return self.drop_blocks(1) };
        match self.slot.engine.insert(hash.0, found.0) {
            None if self.take_vouched(found) => {}
            None => self.runs.refer(found.run(), 1),
            Some(old) if old == found.0 => {}
            Some(old) => {
                self.runs.refer(found.run(), 1);
                self.forget_reused(hash, BlockRef(old));
            }
        }
        self.hold_waited(hash, found, waited.copies, Copies::Count);
        self.scratch.open.push(hash);
    }

    fn hold_waited(&mut self, hash: EngineHash, block: BlockRef, held: [u32; 3], copies: Copies) {
        for tier in Tier::ALL {
            let count = held[tier.index()];
            if count == 0 {
                continue;
            }
            self.applied.released += 1;
            if copies == Copies::Announce && self.runs.holds(block, LaneId::new(tier, self.id)) {
                // The store that told the place is one of these copies.
                if count > 1 {
                    self.add_copies(hash, tier, count - 1, Copies::Count);
                }
            } else {
                self.hold(hash, block, tier, count, Copies::Count);
            }
        }
    }

    fn remove(&mut self, hash: EngineHash, tier: Tier) {
        if tier != Tier::Gpu {
            self.slot.doubt.see_removal(hash, tier);
        }
        let Some(block) = self.block(hash) else {
            if self.slot.waiting.remove(hash, tier) {
                self.applied.removed += 1;
            } else {
                self.applied.unknown += 1;
            }
            return;
        };
        if !self.slot.copies.is_empty() && self.take_copy(hash, tier) {
            self.applied.removed += 1;
            return;
        }
        if self.runs.release(block, LaneId::new(tier, self.id)) {
            self.applied.removed += 1;
            self.slot.blocks[tier.index()] -= 1;
            if tier == Tier::Gpu {
                end_vouching(self.runs, self.slot, self.id, hash);
            }
        } else {
            self.applied.unknown += 1;
        }
        let lower_tiers = self.has_lower_tiers();
        if (lower_tiers || tier != Tier::Gpu) && self.runs.holds_any(block, self.id) {
            return;
        }
        if lower_tiers && tier == Tier::Gpu {
            self.keep_ghost(hash);
            return;
        }
        self.forget(hash, block);
    }

    /// Takes one of several copies away, if there are several.
    fn take_copy(&mut self, hash: EngineHash, tier: Tier) -> bool {
        let Some(counts) = self.slot.copies.get_mut(hash) else { return false };
        let count = &mut counts[tier.index()];
        let is_there = *count > 0;
        *count -= u32::from(is_there);
        if *counts == [0; 3] {
            self.slot.copies.remove(hash);
        }
        is_there
    }

    /// The engine may tell of a CPU copy one batch after it gave up the GPU one.
    fn keep_ghost(&mut self, hash: EngineHash) {
        self.slot.ghosts.push_back(hash);
        while self.slot.ghosts.len() > self.limits.ghosts {
            let Some(oldest) = self.slot.ghosts.pop_front() else { break };
            if let Some(block) = self.block(oldest)
                && !self.runs.holds_any(block, self.id)
            {
                self.forget(oldest, block);
            }
        }
    }

    pub(super) fn forget(&mut self, hash: EngineHash, block: BlockRef) {
        self.slot.engine.remove(hash.0);
        self.runs.forget(block.run(), 1);
    }

    /// `hash` names another block now: the engine gave the old one up without telling.
    fn forget_reused(&mut self, hash: EngineHash, old: BlockRef) {
        self.applied.reused += 1;
        self.slot.copies.remove(hash);
        end_vouching(self.runs, self.slot, self.id, hash);
        for tier in Tier::ALL {
            self.slot.doubt.forget(hash, tier);
            if self.runs.release(old, LaneId::new(tier, self.id)) {
                self.slot.blocks[tier.index()] -= 1;
            }
        }
        self.runs.forget(old.run(), 1);
    }

    fn drop_blocks(&mut self, count: u64) {
        self.applied.dropped += count;
        self.slot.truncated = true;
    }

    pub(super) fn block(&self, hash: EngineHash) -> Option<BlockRef> {
        self.slot.engine.get(hash.0).map(BlockRef)
    }

    pub(super) fn is_held(&self, hash: EngineHash, tier: Tier) -> bool {
        match self.block(hash) {
            Some(block) => self.runs.holds(block, LaneId::new(tier, self.id)),
            None => self.slot.waiting.holds(hash, tier),
        }
    }

    fn has_lower_tiers(&self) -> bool {
        self.slot.cpu_chunk > 0
            || self.slot.blocks[Tier::Cpu.index()] + self.slot.blocks[Tier::Disk.index()] > 0
    }
}

fn greatest_common_divisor(mut a: u32, mut b: u32) -> u32 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}
