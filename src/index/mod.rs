//! Which rank holds which block.
//!
//! One [`Index`] a pool, fed by one writer, read by many behind a lock. Chains of blocks are kept as *runs* of at most
//! 256 blocks under our own sequence hashes; each run has a *lane* for every rank and tier that holds any of it. A
//! rank's own table maps the engine's block names to places in runs: events name blocks so.
//!
//! Exact: blocks missing in the middle, several physical copies, children stored before their parents and blocks in
//! lower tiers all count as they do in the engine. What cannot be known is never credited, but counted.
//!
//! | file | what |
//! |---|---|
//! | `runs`, `lanes` | runs, and who holds what of them |
//! | `map`, `names`, `paged` | containers that never stop for long |
//! | `slot`, `waiting` | one rank's own tables |
//! | `apply` | KV events → changes |
//! | `doubt` | what a clear leaves in lower tiers |
//! | `vouched` | what must be there, though its store was missed |
//! | `find` | prompt → overlaps |
//! | `room` | the limit |
//! | `sweep` | cleaning up behind ranks that left |

mod apply;
#[cfg(debug_assertions)]
mod check;
mod doubt;
mod find;
mod lanes;
mod map;
mod names;
mod paged;
mod room;
mod runs;
mod slot;
mod stats;
mod sweep;
mod vouched;
mod waiting;

#[cfg(test)]
mod tests;

pub use find::{Overlap, Overlaps};
pub use stats::{Applied, IndexStats, RankStats};

use crate::events::KvEvent;
use crate::hash::HashKey;
use crate::units::{EngineHash, RankId, SequenceHash, Tier};
use apply::{Change, Limits, Progress, Scratch};
use lanes::{LaneId, MAX_SLOTS};
use room::{ENTRIES_PER_EVENT, Pass};
use runs::{BlockRef, Runs};
use slot::Slot;
use sweep::Sweep;

/// A lane's owner that is no rank: the slot is dead.
const NO_RANK: u16 = u16::MAX;

/// Events that are worth a look ahead at a time: what they need fits into a processor's nearest cache.
pub const LOOK_AHEAD_EVENTS: usize = 16;

/// Blocks of one event that are looked for ahead. An event of many does that itself.
const LOOK_AHEAD_BLOCKS: usize = 4;

/// Limits of an index.
#[derive(Clone, Copy, Debug)]
pub struct IndexConfig {
    /// Memory that the index may take, in bytes; each part counts with what it costs at its worst, so the real use is
    /// lower. At the limit the least recently used blocks of the largest rank are dropped.
    pub max_bytes: usize,
    /// Blocks of one rank that may wait for their place in a chain. More are dropped.
    pub max_waiting_blocks: usize,
    /// Blocks of one rank that are remembered after they left the GPU, on ranks with lower tiers.
    pub max_ghost_blocks: usize,
}

impl Default for IndexConfig {
    fn default() -> Self {
        Self {
            // About 25 million blocks: a hundred replicas with 4 million tokens each.
            max_bytes: 1 << 30,
            // A rank's whole cache, where the stream was joined late.
            max_waiting_blocks: 65_536,
            // A CPU store comes one batch after the GPU removal: some thousand blocks at most.
            max_ghost_blocks: 8_192,
        }
    }
}

/// Counts batches of events: what is "recent" only orders blocks among each other.
#[derive(Debug, Default)]
struct Clock {
    events: u64,
}

impl Clock {
    /// Coarse, so that finds seldom write.
    const EVENTS_PER_TICK: u64 = 64;

    fn now(&self) -> u32 {
        (self.events / Self::EVENTS_PER_TICK) as u32
    }
}

/// The index of one pool.
#[derive(Debug)]
pub struct Index {
    key: HashKey,
    config: IndexConfig,
    runs: Runs,
    slots: Vec<Option<Slot>>,
    /// Slot → rank.
    owners: Vec<u16>,
    /// Rank → slot.
    ranks: Vec<Option<u16>>,
    /// Slots of ranks that were cleared or removed, to be cleaned up.
    dead: Vec<u16>,
    sweep: Option<Sweep>,
    free_slots: Vec<u16>,
    /// Memory of all slots.
    slot_bytes: usize,
    clock: Clock,
    pass: Option<Pass>,
    /// Entries that may be looked at to make room for the last event.
    to_look_at: usize,
    /// Whether the limit was close after the last event.
    nearly_full: bool,
    evicted: u64,
    /// How far the last event is applied.
    progress: Progress,
    /// Whether it left something to do.
    unfinished: bool,
    scratch: Scratch,
}

impl Index {
    /// An empty index for chains under `key`.
    #[must_use]
    pub fn new(key: HashKey, config: IndexConfig) -> Self {
        let secret = key.secret();
        Self {
            key,
            config,
            runs: Runs::new(secret),
            slots: Vec::new(),
            owners: Vec::new(),
            ranks: Vec::new(),
            dead: Vec::new(),
            sweep: None,
            free_slots: Vec::new(),
            slot_bytes: 0,
            clock: Clock::default(),
            pass: None,
            to_look_at: 0,
            nearly_full: false,
            evicted: 0,
            progress: Progress::default(),
            unfinished: false,
            scratch: Scratch::default(),
        }
    }

    /// Makes a rank known, with an empty cache. Nothing happens if it is known already. Returns false if there is no
    /// place for it (16,384 ranks).
    pub fn add_rank(&mut self, rank: RankId) -> bool {
        if self.slot_of(rank).is_some() {
            return true;
        }
        let Some(slot) = self.allocate_slot(rank) else { return false };
        if self.ranks.len() <= rank.index() {
            self.ranks.resize(rank.index() + 1, None);
        }
        self.ranks[rank.index()] = Some(slot);
        true
    }

    /// Forgets all that a rank holds in every tier: its engine started anew. Takes no time that grows with what it
    /// held; see [`Index::sweep`].
    pub fn clear_rank(&mut self, rank: RankId) {
        let Some(id) = self.slot_of(rank) else { return };
        if self.slots[usize::from(id)].as_ref().is_some_and(Slot::is_empty) {
            self.reset_slot(id, rank);
            return;
        }
        self.remove_rank(rank);
        self.add_rank(rank);
    }

    /// Takes a rank out. Its id may be used again at once.
    pub fn remove_rank(&mut self, rank: RankId) {
        let Some(id) = self.ranks.get_mut(rank.index()).and_then(Option::take) else { return };
        self.owners[usize::from(id)] = NO_RANK;
        self.dead.push(id);
        if self.pass.as_ref().is_some_and(|pass| pass.is_of(id)) {
            self.pass = None;
        }
    }

    /// Applies one KV event of a rank.
    pub fn apply(&mut self, rank: RankId, event: &KvEvent<'_>) -> Applied {
        let mut applied = self.begin(rank, event);
        while self.is_unfinished() {
            applied += self.go_on(rank, event);
        }
        applied
    }

    /// Sets another limit of memory. An index above it shrinks with the events that come.
    pub const fn set_max_bytes(&mut self, max_bytes: usize) {
        self.config.max_bytes = max_bytes;
    }

    /// Applies the first slice of a KV event of a rank: so much that no reader waits for long. While it is
    /// [unfinished](Index::is_unfinished), [`Index::go_on`] must follow before the next event.
    pub fn begin(&mut self, rank: RankId, event: &KvEvent<'_>) -> Applied {
        self.progress = Progress::default();
        self.unfinished = false;
        self.to_look_at = ENTRIES_PER_EVENT;
        self.scratch.clear();
        let Some(id) = self.slot_of(rank) else {
            return Applied { malformed: 1, ..Applied::default() };
        };
        self.clock.events += 1;
        let has_lower_blocks = || self.slots[usize::from(id)].as_ref().is_some_and(Slot::has_lower_blocks);
        if matches!(event, KvEvent::Cleared) && !has_lower_blocks() {
            return self.clear_all(rank);
        }
        self.step(id, |change, progress| change.apply(event, progress))
    }

    /// Brings near what applying a short event of a rank will need. Done for some events before the first of them is
    /// applied, all of them wait for memory once, and not each.
    pub fn look_ahead(&self, rank: RankId, event: &KvEvent<'_>) {
        let names = match event {
            KvEvent::Stored(stored) => stored.engine_hashes,
            KvEvent::Removed { engine_hashes, .. } => engine_hashes,
            KvEvent::Cleared => return,
        };
        if let Some(slot) = self.slot_of(rank).and_then(|id| self.slots[usize::from(id)].as_ref()) {
            slot.engine.touch(&names[..names.len().min(LOOK_AHEAD_BLOCKS)]);
        }
    }

    /// Whether the last event is not yet applied in full.
    #[must_use]
    pub const fn is_unfinished(&self) -> bool {
        self.unfinished
    }

    /// Applies another slice of the last event, which was this rank's.
    pub fn go_on(&mut self, rank: RankId, event: &KvEvent<'_>) -> Applied {
        self.unfinished = false;
        // In between, the rank may have left.
        let Some(id) = self.slot_of(rank) else { return Applied::default() };
        self.step(
            id,
            |change, progress| {
                if progress.is_done() { change.resolve_doubt() } else { change.apply(event, progress) }
            },
        )
    }

    fn step_once(&mut self, id: u16, work: impl FnOnce(&mut Change<'_>)) {
        self.progress = Progress::done();
        self.step(id, |change, _| work(change));
    }

    fn step(&mut self, id: u16, work: impl FnOnce(&mut Change<'_>, &mut Progress)) -> Applied {
        let Some(slot) = &mut self.slots[usize::from(id)] else { return Applied::default() };
        let before = slot.bytes();
        // Near the limit, parents are missing because they were dropped: they will not come.
        let waiting = if self.nearly_full { 0 } else { self.config.max_waiting_blocks };
        let limits = Limits { waiting, ghosts: self.config.max_ghost_blocks };
        let mut change = Change {
            now: self.clock.now(),
            limits,
            ..Change::new(&mut self.runs, slot, id, &self.key, &mut self.scratch)
        };
        work(&mut change, &mut self.progress);
        let applied = change.applied;
        slot.totals += applied;
        self.unfinished = !self.progress.is_done() || slot.doubt.is_unfinished();
        self.slot_bytes = self.slot_bytes + slot.bytes() - before;
        let bytes = self.bytes();
        self.nearly_full = bytes > self.config.max_bytes / 8 * 7;
        if bytes > self.config.max_bytes {
            self.unfinished |= self.make_room(applied.stored as usize);
        }
        applied
    }

    /// Whether ranks left something that [`Index::sweep`] has to clean up.
    #[must_use]
    pub const fn is_swept(&self) -> bool {
        self.dead.is_empty()
    }

    /// The index's own figures.
    #[must_use]
    pub fn stats(&self) -> IndexStats {
        let mut blocks = [0; 3];
        for slot in self.ranks.iter().flatten().filter_map(|id| self.slots[usize::from(*id)].as_ref()) {
            for (sum, held) in blocks.iter_mut().zip(slot.blocks) {
                *sum += held;
            }
        }
        IndexStats {
            ranks: self.ranks.iter().flatten().count(),
            blocks,
            runs: self.runs.len(),
            bytes: self.bytes() as u64,
            max_bytes: self.config.max_bytes as u64,
            evicted: self.evicted,
            unswept: self.dead.len(),
        }
    }

    /// One rank's figures; `None` for a rank that is not known.
    #[must_use]
    pub fn rank_stats(&self, rank: RankId) -> Option<RankStats> {
        let id = self.slot_of(rank)?;
        Some(self.slots[usize::from(id)].as_ref()?.stats())
    }

    /// The blocks that a rank holds in a tier and whose place is known, by the engine's names.
    pub fn held(&self, rank: RankId, tier: Tier) -> impl Iterator<Item = EngineHash> {
        let slot = self.slot_of(rank).and_then(|id| Some((id, self.slots[usize::from(id)].as_ref()?)));
        slot.into_iter().flat_map(move |(id, slot)| {
            let lane = LaneId::new(tier, id);
            let held = slot.engine.iter().filter(move |entry| self.runs.holds(BlockRef(entry.value), lane));
            held.map(|entry| EngineHash(entry.key))
        })
    }

    /// The chain of our own hashes up to a block that the rank holds or held of late; `None` where its place is not
    /// known.
    #[must_use]
    pub fn sequence(&self, rank: RankId, block: EngineHash) -> Option<SequenceHash> {
        let slot = self.slots[usize::from(self.slot_of(rank)?)].as_ref()?;
        Some(self.runs.hash(BlockRef(slot.engine.get(block.0)?)))
    }

    /// Whether blocks of the rank wait for their place in a chain.
    #[must_use]
    pub fn has_waiting(&self, rank: RankId) -> bool {
        let slot = self.slot_of(rank).and_then(|id| self.slots[usize::from(id)].as_ref());
        slot.is_some_and(|slot| !slot.waiting.is_empty())
    }

    /// All events of a batch of the rank were applied.
    pub fn end_batch(&mut self, rank: RankId) {
        if let Some(slot) = self.slot_of(rank).and_then(|id| self.slots[usize::from(id)].as_mut()) {
            let before = slot.bytes();
            slot.doubt.end_batch();
            self.slot_bytes = self.slot_bytes + slot.bytes() - before;
        }
    }

    /// A clear of a rank that has nothing but its GPU tier: a new slot, which takes no time. Its figures go on.
    fn clear_all(&mut self, rank: RankId) -> Applied {
        let old = self.rank_stats(rank).unwrap_or_default();
        let applied = Applied { cleared: 1, ..Applied::default() };
        self.clear_rank(rank);
        let slot = self.slot_of(rank).and_then(|id| self.slots[usize::from(id)].as_mut());
        if let Some(slot) = slot {
            slot.totals = old.totals;
            slot.totals += applied;
            slot.evicted = old.evicted;
            slot.cpu_chunk = old.cpu_chunk_blocks;
        }
        applied
    }

    fn bytes(&self) -> usize {
        self.runs.bytes() + self.slot_bytes
    }

    fn slot_of(&self, rank: RankId) -> Option<u16> {
        self.ranks.get(rank.index()).copied().flatten()
    }

    fn allocate_slot(&mut self, rank: RankId) -> Option<u16> {
        if self.free_slots.is_empty() && self.slots.len() >= MAX_SLOTS {
            self.sweep(usize::MAX);
        }
        let id = match self.free_slots.pop() {
            Some(id) => id,
            None if self.slots.len() < MAX_SLOTS => {
                self.slots.push(None);
                self.owners.push(NO_RANK);
                (self.slots.len() - 1) as u16
            }
            None => return None,
        };
        self.reset_slot(id, rank);
        Some(id)
    }

    fn reset_slot(&mut self, id: u16, rank: RankId) {
        let slot = Slot::new(self.key.secret());
        self.slot_bytes += slot.bytes();
        if let Some(old) = self.slots[usize::from(id)].replace(slot) {
            self.slot_bytes -= old.bytes();
        }
        self.owners[usize::from(id)] = rank.0;
    }
}
