//! One decoded batch, in memory that is used again for the next one.

use super::event::{KvEvent, Stored};
use crate::units::{BlockHash, EngineHash, SequenceHash, Tier, TokenId};
use std::ops::Range;

/// Why an event of a batch was left out. The rest of the batch is not affected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SkipReason {
    /// A field has the wrong type, or a required one is missing.
    Malformed,
    /// The numbers of hashes, tokens and extra keys do not fit together.
    LengthMismatch,
    /// A store names a block as its own parent.
    OwnParent,
    /// Of a KV cache group that does not hold whole prefixes (see [`super::Groups`]).
    WindowGroup,
    /// It names no block.
    Empty,
    /// A medium that we know no tier for.
    UnknownMedium,
    /// A type of event that we do not know.
    UnknownEvent,
}

impl SkipReason {
    /// All reasons, in the order of their counters.
    pub const ALL: [Self; 7] = [
        Self::Malformed,
        Self::LengthMismatch,
        Self::OwnParent,
        Self::WindowGroup,
        Self::Empty,
        Self::UnknownMedium,
        Self::UnknownEvent,
    ];

    /// The reason's name in metrics and logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::LengthMismatch => "length_mismatch",
            Self::OwnParent => "own_parent",
            Self::WindowGroup => "window_group",
            Self::Empty => "empty",
            Self::UnknownMedium => "unknown_medium",
            Self::UnknownEvent => "unknown_event",
        }
    }

    /// Whether a change of a cache that we do follow may have been missed.
    #[must_use]
    pub const fn loses_blocks(self) -> bool {
        matches!(self, Self::Malformed | Self::LengthMismatch | Self::OwnParent)
    }

    /// The reason's place in a table of counters.
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// A decoded batch: what one step of the engine changed. Made once, filled by [`Batch::decode`] again and again.
#[derive(Debug, Default)]
pub struct Batch {
    pub(super) timestamp_seconds: f64,
    pub(super) rank: Option<u32>,
    pub(super) window_groups: bool,
    pub(super) block_tokens: Option<u32>,
    pub(super) cpu_chunk_blocks: Option<u32>,
    pub(super) entries: Vec<Entry>,
    pub(super) engine_hashes: Vec<EngineHash>,
    pub(super) block_hashes: Vec<BlockHash>,
    /// The adapters named, one after the other, and where each ends.
    pub(super) adapter_names: String,
    pub(super) adapter_ends: Vec<usize>,
    pub(super) skipped: [u32; SkipReason::ALL.len()],
    /// The tokens of the event at hand: they go no further than this.
    pub(super) tokens: Vec<TokenId>,
    /// The extra keys of the block at hand.
    pub(super) extra: Vec<u8>,
}

/// An event whose lists lie in the batch's arenas.
#[derive(Clone, Debug)]
pub(super) enum Entry {
    Stored {
        tier: Tier,
        parent: Option<EngineHash>,
        root: SequenceHash,
        engine_hashes: Range<usize>,
        block_hashes: Range<usize>,
    },
    Removed {
        tier: Tier,
        engine_hashes: Range<usize>,
    },
    Cleared,
}

/// What an arena may keep between batches: more than a step of a large engine, little enough for a fleet.
const RETAINED_ELEMENTS: usize = 1 << 18;

impl Batch {
    /// An empty batch.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The events that count, in the engine's order.
    pub fn events(&self) -> impl ExactSizeIterator<Item = KvEvent<'_>> {
        self.entries.iter().map(|entry| match entry {
            Entry::Stored { tier, parent, root, engine_hashes, block_hashes } => KvEvent::Stored(Stored {
                tier: *tier,
                parent: *parent,
                root: *root,
                engine_hashes: slice(&self.engine_hashes, engine_hashes),
                block_hashes: slice(&self.block_hashes, block_hashes),
            }),
            Entry::Removed { tier, engine_hashes } => {
                KvEvent::Removed { tier: *tier, engine_hashes: slice(&self.engine_hashes, engine_hashes) }
            }
            Entry::Cleared => KvEvent::Cleared,
        })
    }

    /// When the engine made the batch, in seconds since the epoch by the engine's clock.
    #[must_use]
    pub fn timestamp_seconds(&self) -> f64 {
        self.timestamp_seconds
    }

    /// The data-parallel rank that the batch names, if it names one.
    #[must_use]
    pub fn rank(&self) -> Option<u32> {
        self.rank
    }

    /// Tokens of a block, from the batch's last store that carries tokens.
    #[must_use]
    pub fn block_tokens(&self) -> Option<u32> {
        self.block_tokens
    }

    /// The LoRA adapters that the batch's stores name; one after the other in its order, rarely one twice.
    pub fn adapters(&self) -> impl Iterator<Item = &str> {
        let mut start = 0;
        self.adapter_ends.iter().filter_map(move |end| {
            let name = self.adapter_names.get(start..*end);
            start = *end;
            name
        })
    }

    pub(super) fn see_adapter(&mut self, name: &str) {
        if self.adapters().last() != Some(name) {
            self.adapter_names.push_str(name);
            self.adapter_ends.push(self.adapter_names.len());
        }
    }

    /// The greatest number of blocks that divides every CPU store of the batch. vLLM offloads whole chunks, one event
    /// each, and can load back only whole ones: over several batches this converges to the chunk.
    #[must_use]
    pub fn cpu_chunk_blocks(&self) -> Option<u32> {
        self.cpu_chunk_blocks
    }

    /// Whether the stream has KV cache groups that do not count (see [`super::Groups::has_window_groups`]).
    #[must_use]
    pub fn has_window_groups(&self) -> bool {
        self.window_groups
    }

    /// How many events were left out for `reason`.
    #[must_use]
    pub fn skipped(&self, reason: SkipReason) -> u32 {
        self.skipped.get(reason.index()).copied().unwrap_or(0)
    }

    /// Whether an event was left out that may have changed a cache that we follow.
    #[must_use]
    pub fn lost_blocks(&self) -> bool {
        SkipReason::ALL.into_iter().any(|reason| reason.loses_blocks() && self.skipped(reason) > 0)
    }

    /// Whether the engine reset its cache in this batch.
    #[must_use]
    pub fn has_cleared(&self) -> bool {
        self.entries.iter().any(|entry| matches!(entry, Entry::Cleared))
    }

    pub(super) fn clear(&mut self) {
        self.timestamp_seconds = 0.0;
        self.rank = None;
        self.window_groups = false;
        self.block_tokens = None;
        self.cpu_chunk_blocks = None;
        self.skipped = Default::default();
        self.adapter_names.clear();
        empty(&mut self.adapter_ends);
        empty(&mut self.entries);
        empty(&mut self.engine_hashes);
        empty(&mut self.block_hashes);
        empty(&mut self.tokens);
        empty(&mut self.extra);
    }

    pub(super) fn skip(&mut self, reason: SkipReason) {
        if let Some(count) = self.skipped.get_mut(reason.index()) {
            *count = count.saturating_add(1);
        }
    }
}

fn empty<T>(arena: &mut Vec<T>) {
    arena.clear();
    arena.shrink_to(RETAINED_ELEMENTS);
}

fn slice<'a, T>(arena: &'a [T], range: &Range<usize>) -> &'a [T] {
    arena.get(range.clone()).unwrap_or_default()
}
