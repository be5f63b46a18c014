//! The runs: consecutive blocks of one chain, each block named by its sequence hash.
//!
//! A run never crosses a multiple of [`RUN_BLOCKS`] and is never split: what branches off is a run of its own that
//! starts where it branches. So a reference to a block stays right as long as its run lives, and one compare with
//! the run's last hash proves the whole run.

use super::lanes::{Bitmaps, Lane, LaneId};
use super::map::RefMap;
use super::paged::Paged;
use crate::units::{SequenceHash, Tier};
use smallvec::SmallVec;
use std::sync::atomic::{AtomicU32, Ordering};

/// Most blocks of a run. 256 was the best of 32 to 4096 on conversations and documents: longer runs save little of a
/// find, and cost more where blocks leave in random order.
pub(super) const RUN_BLOCKS: usize = 256;

const OFFSET_BITS: u32 = RUN_BLOCKS.trailing_zeros();

/// Runs that a reference can name; one less, so that no reference is `u32::MAX`.
const MAX_RUNS: usize = (1 << (32 - OFFSET_BITS)) - 1;

/// Chains end here: 4 × 10^9 blocks, more than any prompt.
const MAX_POSITION: u32 = u32::MAX - RUN_BLOCKS as u32;

/// Hashes by which a run's list grows at least, and the part of what it has by which it grows. Doubling would leave half of
/// the memory unused where many chains grow in step.
const GROWTH: usize = 16;
const GROWTH_PART: usize = 4;

/// A run's place in the store.
pub(super) type RunId = u32;

const NO_RUN: RunId = RunId::MAX;

/// A block: its run and its place in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BlockRef(pub(super) u32);

impl BlockRef {
    fn new(run: RunId, offset: usize) -> Self {
        Self(run << OFFSET_BITS | offset as u32)
    }

    #[cfg(debug_assertions)]
    pub(super) fn first_of(run: RunId) -> Self {
        Self::new(run, 0)
    }

    pub(super) fn run(self) -> RunId {
        self.0 >> OFFSET_BITS
    }

    pub(super) fn offset(self) -> usize {
        self.0 as usize % RUN_BLOCKS
    }
}

/// Consecutive blocks of one run; at least one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    first: BlockRef,
    blocks: u32,
}

impl Span {
    pub(super) fn of(block: BlockRef) -> Self {
        Self { first: block, blocks: 1 }
    }

    pub(super) fn run(self) -> RunId {
        self.first.run()
    }

    /// The blocks, in order.
    pub(super) fn blocks(self) -> impl Iterator<Item = BlockRef> {
        (self.first.0..self.first.0 + self.blocks).map(BlockRef)
    }
}

/// What a find reads of a run: one cache line.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Head {
    /// In order of their ids: tier by tier.
    lanes: SmallVec<[Lane; 3]>,
    /// The last block's hash.
    tail: SequenceHash,
    /// The first block's position in its chain.
    start: u32,
    /// Entries of engine maps that refer to blocks of this run.
    entries: u32,
    /// The latest of the runs that go on where this one ended at the end of a stripe, or [`NO_RUN`].
    next: RunId,
    /// When the run was last matched or stored to, on the index's clock.
    used: AtomicU32,
    /// Blocks; 0 for a free place.
    len: u16,
}

/// What only changes need.
#[derive(Debug)]
struct Body {
    hashes: Vec<SequenceHash>,
    parent: Option<BlockRef>,
    /// Runs whose parent is a block of this run.
    children: u32,
}

/// All runs of an index.
#[derive(Debug)]
pub(super) struct Runs {
    heads: Paged<Head>,
    bodies: Paged<Body>,
    free: Vec<RunId>,
    /// The hash of each run's first block → the run: roots, branches and continuations alike.
    table: RefMap,
    bitmaps: Bitmaps,
    /// Capacity of all hash lists.
    hashes: usize,
    lanes: usize,
}

impl Head {
    /// Blocks.
    pub(super) fn len(&self) -> usize {
        self.len.into()
    }

    pub(super) fn lanes(&self) -> &[Lane] {
        &self.lanes
    }

    pub(super) fn used(&self) -> u32 {
        self.used.load(Ordering::Relaxed)
    }

    /// Notes that the run was of use. Writes only where that is news, so that readers share the line.
    pub(super) fn touch(&self, now: u32) {
        if self.used() != now {
            self.used.store(now, Ordering::Relaxed);
        }
    }

    pub(super) fn lane(&self, id: LaneId) -> Option<&Lane> {
        self.position(id).ok().map(|at| &self.lanes[at])
    }

    fn position(&self, id: LaneId) -> Result<usize, usize> {
        // Few lanes are the rule, and scanning them beats a search.
        if self.lanes.len() > 16 {
            return self.lanes.binary_search_by_key(&id, |lane| lane.id);
        }
        let at = self.lanes.iter().position(|lane| lane.id >= id).unwrap_or(self.lanes.len());
        if self.lanes.get(at).is_some_and(|lane| lane.id == id) { Ok(at) } else { Err(at) }
    }
}

impl Runs {
    pub(super) fn new(secret: u64) -> Self {
        Self {
            heads: Paged::default(),
            bodies: Paged::default(),
            free: Vec::new(),
            table: RefMap::new(secret),
            bitmaps: Bitmaps::default(),
            hashes: 0,
            lanes: 0,
        }
    }

    /// Live runs.
    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    /// Places of runs, free ones too: every run's id is below.
    pub(super) fn places(&self) -> usize {
        self.heads.len()
    }

    /// Memory that all runs take, by what each part costs at its worst.
    pub(super) fn bytes(&self) -> usize {
        // A run: head, body, the list's allocation overhead, and an entry of the table.
        const RUN: usize = size_of::<Head>() + size_of::<Body>() + 16 + RefMap::ENTRY_BYTES;
        self.len() * RUN
            + self.hashes * 8
            + self.lanes * size_of::<Lane>()
            + self.bitmaps.used() * RUN_BLOCKS / 8
    }

    pub(super) fn head(&self, run: RunId) -> &Head {
        &self.heads[run]
    }

    pub(super) fn bitmaps(&self) -> &Bitmaps {
        &self.bitmaps
    }

    pub(super) fn hash(&self, block: BlockRef) -> SequenceHash {
        let head = &self.heads[block.run()];
        // Most chains grow at their ends, which need no look into the list.
        let is_last = block.offset() + 1 == head.len();
        if is_last { head.tail } else { self.bodies[block.run()].hashes[block.offset()] }
    }

    pub(super) fn position(&self, block: BlockRef) -> u32 {
        self.heads[block.run()].start + block.offset() as u32
    }

    /// The run whose first block is `hash`, at `position`.
    pub(super) fn starting_with(&self, hash: SequenceHash, position: usize) -> Option<(RunId, &Head)> {
        let run = self.table.get(hash.0)?;
        let head = &self.heads[run];
        (head.start as usize == position).then_some((run, head))
    }

    /// The run that goes on behind `head`, if `query` has all of it at `position`. Its last hash tells, so the run's place
    /// needs no look into the table.
    pub(super) fn behind(&self, head: &Head, query: &[SequenceHash], position: usize) -> Option<&Head> {
        let next = self.heads.get(head.next)?;
        let last = query.get(position + next.len() - 1)?;
        (*last == next.tail && next.start as usize == position).then_some(next)
    }

    /// How many blocks of the run `query` matches, given that it matches the first.
    pub(super) fn matched(&self, run: RunId, head: &Head, query: &[SequenceHash]) -> usize {
        let len = head.len();
        if query.get(len - 1) == Some(&head.tail) {
            return len;
        }
        let hashes = &self.bodies[run].hashes;
        let shared = len.min(query.len());
        if shared < len && hashes[shared - 1] == query[shared - 1] {
            return shared;
        }
        // Equal hashes mean equal prefixes, so strides find the first difference. Unlike in a binary search the next
        // compare does not wait for the last one's memory.
        let mut agreed = 1;
        for stride in [32, 4, 1] {
            while agreed + stride < shared && hashes[agreed + stride - 1] == query[agreed + stride - 1] {
                agreed += stride;
            }
        }
        agreed
    }

    /// Finds or makes the block `hash` behind `parent` (none: at the chain's start), with room for `more` blocks behind
    /// it. `None` if there is no room left, or where two different prefixes have one hash.
    pub(super) fn place(
        &mut self,
        parent: Option<BlockRef>,
        hash: SequenceHash,
        more: usize,
    ) -> Option<BlockRef> {
        let mut position = 0;
        if let Some(parent) = parent {
            let (run, offset) = (parent.run(), parent.offset() + 1);
            let body = &mut self.bodies[run];
            let head = &mut self.heads[run];
            position = head.start + offset as u32;
            if let Some(stored) = body.hashes.get(offset) {
                if *stored == hash {
                    return Some(BlockRef::new(run, offset));
                }
            } else if !(position as usize).is_multiple_of(RUN_BLOCKS)
                && (body.children == 0 || self.table.get(hash.0).is_none())
            {
                if body.hashes.len() == body.hashes.capacity() {
                    self.hashes -= body.hashes.capacity();
                    let room = RUN_BLOCKS - position as usize % RUN_BLOCKS;
                    let growth = GROWTH.max(body.hashes.len() / GROWTH_PART).max(more + 1);
                    body.hashes.reserve_exact(growth.min(room));
                    self.hashes += body.hashes.capacity();
                }
                body.hashes.push(hash);
                head.tail = hash;
                head.len += 1;
                return Some(BlockRef::new(run, offset));
            }
        }
        if let Some(run) = self.table.get(hash.0) {
            return (self.heads[run].start == position).then(|| BlockRef::new(run, 0));
        }
        self.add(parent, position, hash, more)
    }

    /// Finds or makes the blocks `hashes`, one behind the other, behind `parent` (none: from the chain's start), and
    /// adds them to `placed`. Returns for how many there is no room left.
    pub(super) fn place_all(
        &mut self,
        mut parent: Option<BlockRef>,
        hashes: &[SequenceHash],
        placed: &mut Vec<Span>,
    ) -> usize {
        let mut rest = hashes;
        while let Some((hash, more)) = rest.split_first() {
            let Some(first) = self.place(parent, *hash, more.len()) else { break };
            let blocks = 1 + if more.is_empty() { 0 } else { self.go_along(first, more) };
            placed.push(Span { first, blocks: blocks as u32 });
            parent = Some(BlockRef(first.0 + blocks as u32 - 1));
            rest = &rest[blocks..];
        }
        rest.len()
    }

    /// How many of `hashes` stand behind `block` in its run, after those were added that belong to its end.
    fn go_along(&mut self, block: BlockRef, hashes: &[SequenceHash]) -> usize {
        let body = &mut self.bodies[block.run()];
        let known = &body.hashes[block.offset() + 1..];
        let equal = known.iter().zip(hashes).take_while(|(known, hash)| known == hash).count();
        // A run that starts behind this one's end may be what goes on here: left to `place`.
        if equal < known.len() || body.children > 0 {
            return equal;
        }
        let head = &mut self.heads[block.run()];
        let end = head.start as usize % RUN_BLOCKS + body.hashes.len();
        let new = &hashes[equal..];
        let new = &new[..new.len().min(RUN_BLOCKS - end)];
        if let Some(tail) = new.last() {
            self.hashes -= body.hashes.capacity();
            body.hashes.reserve_exact(new.len());
            self.hashes += body.hashes.capacity();
            body.hashes.extend_from_slice(new);
            head.tail = *tail;
            head.len += new.len() as u16;
        }
        equal + new.len()
    }

    /// Adds blocks to a lane; returns how many of them were not held before.
    pub(super) fn hold(&mut self, span: Span, id: LaneId, now: u32) -> usize {
        let from = span.first.offset();
        let head = &mut self.heads[span.run()];
        *head.used.get_mut() = now;
        let at = head.position(id).unwrap_or_else(|at| {
            head.lanes.insert(at, Lane::new(id));
            self.lanes += 1;
            at
        });
        head.lanes[at].insert(&mut self.bitmaps, from, from + span.blocks as usize)
    }

    /// Whether the slot holds the block in any tier.
    pub(super) fn holds_any(&self, block: BlockRef, slot: u16) -> bool {
        Tier::ALL.iter().any(|tier| self.holds(block, LaneId::new(*tier, slot)))
    }

    pub(super) fn holds(&self, block: BlockRef, id: LaneId) -> bool {
        let lane = self.heads[block.run()].lane(id);
        lane.is_some_and(|lane| lane.holds(&self.bitmaps, block.offset()))
    }

    /// Takes a block from a lane; returns whether it was there.
    pub(super) fn release(&mut self, block: BlockRef, id: LaneId) -> bool {
        let head = &mut self.heads[block.run()];
        let Ok(at) = head.position(id) else { return false };
        let lane = &mut head.lanes[at];
        if !lane.holds(&self.bitmaps, block.offset()) {
            return false;
        }
        lane.remove(&mut self.bitmaps, block.offset());
        if lane.is_empty() {
            head.lanes.remove(at);
            self.lanes -= 1;
        }
        true
    }

    /// Brings near what changes of these runs will need, all of it at once (see `RefMap::touch`).
    pub(super) fn touch(&self, runs: impl Iterator<Item = RunId>) {
        let seen = runs.fold(0, |seen, run| seen ^ self.heads[run].entries ^ self.bodies[run].children);
        std::hint::black_box(seen);
    }

    /// Takes all lanes of a slot away.
    pub(super) fn release_slot(&mut self, run: RunId, slot: u16) {
        let head = &mut self.heads[run];
        if !head.lanes.iter().any(|lane| lane.id.slot() == usize::from(slot)) {
            return;
        }
        let before = head.lanes.len();
        head.lanes.retain(|lane| {
            let keep = lane.id.slot() != usize::from(slot);
            if !keep {
                lane.release(&mut self.bitmaps);
            }
            keep
        });
        self.lanes -= before - head.lanes.len();
    }

    /// Notes engine-map entries that refer to the run: they keep it alive.
    pub(super) fn refer(&mut self, run: RunId, entries: u32) {
        self.heads[run].entries += entries;
    }

    /// The end of so many entries; frees the run, and what only it kept alive, where they were the last.
    pub(super) fn forget(&mut self, run: RunId, entries: u32) {
        self.heads[run].entries -= entries;
        let mut at = Some(run);
        while let Some(run) = at.take() {
            let head = &mut self.heads[run];
            let body = &mut self.bodies[run];
            if head.entries > 0 || body.children > 0 {
                break;
            }
            // A lane holds only blocks that some entry of its slot refers to, so none can be left.
            debug_assert!(head.lanes.is_empty());
            if let Some(first) = body.hashes.first() {
                self.table.remove(first.0);
            }
            self.hashes -= body.hashes.capacity();
            body.hashes = Vec::new();
            head.len = 0;
            self.free.push(run);
            if let Some(parent) = body.parent.take() {
                self.bodies[parent.run()].children -= 1;
                let before = &mut self.heads[parent.run()];
                if before.next == run {
                    before.next = NO_RUN;
                }
                at = Some(parent.run());
            }
        }
    }

    fn add(
        &mut self,
        parent: Option<BlockRef>,
        position: u32,
        hash: SequenceHash,
        more: usize,
    ) -> Option<BlockRef> {
        if position >= MAX_POSITION || (self.free.is_empty() && self.heads.len() >= MAX_RUNS) {
            return None;
        }
        let head = Head {
            lanes: SmallVec::new(),
            tail: hash,
            start: position,
            entries: 0,
            next: NO_RUN,
            used: AtomicU32::new(0),
            len: 1,
        };
        let room = RUN_BLOCKS - position as usize % RUN_BLOCKS;
        let mut hashes = Vec::with_capacity((more + 1).min(room));
        hashes.push(hash);
        self.hashes += hashes.capacity();
        let body = Body { hashes, parent, children: 0 };
        let run = if let Some(run) = self.free.pop() {
            self.heads[run] = head;
            self.bodies[run] = body;
            run
        } else {
            self.heads.push(head);
            self.bodies.push(body)
        };
        if let Some(parent) = parent {
            self.bodies[parent.run()].children += 1;
            if (position as usize).is_multiple_of(RUN_BLOCKS) {
                self.heads[parent.run()].next = run;
            }
        }
        self.table.insert(hash.0, run);
        Some(BlockRef::new(run, 0))
    }

    /// Blocks that all lanes of one owner hold.
    #[cfg(debug_assertions)]
    pub(super) fn lane_blocks(&self, id: LaneId) -> usize {
        let live = (0..self.heads.len() as RunId).filter_map(|run| self.heads[run].lane(id));
        live.map(|lane| lane.count(&self.bitmaps)).sum()
    }

    /// Checks all runs against each other; `entries` are all references of all engine maps.
    #[cfg(debug_assertions)]
    pub(super) fn check(&self, entries: impl Iterator<Item = BlockRef>) {
        use std::collections::HashMap;
        let mut referred: HashMap<RunId, u32> = HashMap::new();
        for block in entries {
            *referred.entry(block.run()).or_default() += 1;
            assert!(block.offset() < self.heads[block.run()].len.into(), "an entry dangles");
        }
        let mut children: HashMap<RunId, u32> = HashMap::new();
        let (mut live, mut hashes, mut lanes, mut bitmaps) = (0, 0, 0, 0);
        for run in 0..self.heads.len() as RunId {
            let (head, body) = (&self.heads[run], &self.bodies[run]);
            if head.len == 0 {
                assert!(body.hashes.capacity() == 0 && body.parent.is_none() && head.lanes.is_empty());
                continue;
            }
            if head.next != NO_RUN {
                let parent = self.bodies[head.next].parent.expect("a run that goes on");
                assert_eq!((parent.run(), parent.offset() + 1), (run, head.len.into()));
                assert!((self.position(parent) as usize + 1).is_multiple_of(RUN_BLOCKS));
            }
            live += 1;
            hashes += body.hashes.capacity();
            lanes += head.lanes.len();
            assert_eq!(usize::from(head.len), body.hashes.len());
            assert_eq!(self.table.get(body.hashes[0].0), Some(run), "the table misses a run");
            assert_eq!(body.hashes.last(), Some(&head.tail));
            assert!(
                head.start as usize % RUN_BLOCKS + body.hashes.len() <= RUN_BLOCKS,
                "a run crosses a stripe"
            );
            assert_eq!(head.entries, referred.get(&run).copied().unwrap_or(0), "entries are miscounted");
            assert!(head.lanes.is_sorted_by(|a, b| a.id < b.id));
            for lane in &head.lanes {
                lane.check(&self.bitmaps, body.hashes.len());
                bitmaps += usize::from(lane.count(&self.bitmaps) > lane.depth());
            }
            if let Some(parent) = body.parent {
                *children.entry(parent.run()).or_default() += 1;
                assert_eq!(self.position(parent) + 1, head.start);
            } else {
                assert_eq!(head.start, 0);
            }
        }
        for run in 0..self.heads.len() as RunId {
            assert_eq!(self.bodies[run].children, children.get(&run).copied().unwrap_or(0));
            let kept = self.heads[run].entries + self.bodies[run].children;
            assert_eq!(self.heads[run].len > 0, kept > 0, "a run that nothing needs stays");
        }
        assert_eq!((self.len(), self.hashes, self.lanes), (live, hashes, lanes));
        assert_eq!(self.bitmaps.used(), bitmaps);
        assert_eq!(self.free.len() + live, self.heads.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_one_cache_line() {
        assert_eq!(size_of::<Head>(), 64);
    }
}
