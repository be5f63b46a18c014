//! One rank's own tables.

use super::doubt::Doubt;
use super::map::RefMap;
use super::names::NameMap;
use super::stats::{Applied, RankStats};
use super::vouched::Vouched;
use super::waiting::Waiting;
use crate::units::EngineHash;
use std::collections::VecDeque;

/// One rank in one incarnation. A rank that starts anew gets a new slot; the old one is cleaned up in the background.
#[derive(Debug)]
pub(super) struct Slot {
    /// The engine's names of all blocks whose place is known: held ones and ghosts.
    pub(super) engine: RefMap,
    /// Physical copies of a block beyond the first, by tier. Most blocks have none.
    pub(super) copies: NameMap<[u32; 3]>,
    pub(super) waiting: Waiting,
    /// Blocks in the GPU tier that have no name.
    pub(super) vouched: Vouched,
    /// Blocks that left their last tier, oldest first; some may be held again since.
    pub(super) ghosts: VecDeque<EngineHash>,
    /// Blocks held, by tier.
    pub(super) blocks: [u64; 3],
    /// Greatest common divisor of the sizes of the CPU stores; 0 before the first.
    pub(super) cpu_chunk: u32,
    /// Blocks of lower tiers that the last clear may have taken.
    pub(super) doubt: Doubt,
    pub(super) evicted: u64,
    pub(super) truncated: bool,
    pub(super) totals: Applied,
}

impl Slot {
    pub(super) fn new(secret: u64) -> Self {
        Self {
            engine: RefMap::new(secret),
            copies: NameMap::default(),
            waiting: Waiting::default(),
            vouched: Vouched::default(),
            ghosts: VecDeque::new(),
            blocks: [0; 3],
            cpu_chunk: 0,
            doubt: Doubt::default(),
            evicted: 0,
            truncated: false,
            totals: Applied::default(),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.engine.len() * RefMap::ENTRY_BYTES
            + self.copies.bytes()
            + self.waiting.bytes()
            + self.vouched.bytes()
            + self.ghosts.len() * size_of::<EngineHash>()
            + self.doubt.bytes()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.engine.len() == 0 && self.waiting.is_empty()
    }

    /// Whether a lower tier holds anything, placed or waiting.
    pub(super) fn has_lower_blocks(&self) -> bool {
        let [_, cpu, disk] = self.blocks;
        cpu + disk > 0 || !self.waiting.is_empty()
    }

    /// Frees one part of all that is by name, of [`PARTS`](super::names::PARTS). The slot must be out of use.
    pub(super) fn drop_part(&mut self, at: usize) {
        self.copies.take_part(at);
        self.waiting.drop_part(at);
        self.doubt.drop_part(at);
    }

    pub(super) fn stats(&self) -> RankStats {
        RankStats {
            blocks: self.blocks,
            waiting: self.waiting.len() as u64,
            vouched: self.vouched.len() as u64,
            ghosts: self.ghosts.len() as u64,
            duplicated: self.copies.len() as u64,
            cpu_chunk_blocks: self.cpu_chunk,
            unconfirmed: self.doubt.blocks(),
            evicted: self.evicted,
            truncated: self.truncated,
            bytes: self.bytes() as u64,
            totals: self.totals,
        }
    }
}
