//! What the index counts.

use crate::units::Tier;
use std::ops::AddAssign;

/// What one KV event did, in blocks. Also summed over all events of a rank's incarnation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Applied {
    /// Newly held in a tier.
    pub stored: u64,
    /// Stored again where already held: one more physical copy.
    pub duplicates: u64,
    /// Named again from the chain's start without being stored again (vLLM's `kv_cache_report_mode: full`).
    pub announced: u64,
    /// Copies removed.
    pub removed: u64,
    /// Removals of blocks that were not held.
    pub unknown: u64,
    /// Stored behind an unknown parent: they wait for it.
    pub orphaned: u64,
    /// Waiting blocks that found their place.
    pub released: u64,
    /// Named without a known identity: held, but not scored until a GPU event tells their tokens.
    pub unscored: u64,
    /// Engine hashes that came back with other tokens: the old block was dropped.
    pub reused: u64,
    /// Not taken in because a limit was reached.
    pub dropped: u64,
    /// Events of which nothing could be used: their lists disagree in length, or the rank is not in the index.
    pub malformed: u64,
    /// Events that cleared the rank. They do not tell whether the lower tiers were cleared too, see
    /// [`RankStats::unconfirmed`].
    pub cleared: u64,
}

impl AddAssign for Applied {
    fn add_assign(&mut self, other: Self) {
        self.stored += other.stored;
        self.duplicates += other.duplicates;
        self.announced += other.announced;
        self.removed += other.removed;
        self.unknown += other.unknown;
        self.orphaned += other.orphaned;
        self.released += other.released;
        self.unscored += other.unscored;
        self.reused += other.reused;
        self.dropped += other.dropped;
        self.malformed += other.malformed;
        self.cleared += other.cleared;
    }
}

/// One rank's part of the index.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RankStats {
    /// Blocks held and scored, by tier ([`Tier::index`]). Copies count once.
    pub blocks: [u64; 3],
    /// Blocks held whose place in a chain is unknown: orphans and hash-only blocks of lower tiers.
    pub waiting: u64,
    /// Blocks in the GPU tier whose own store was missed: those that must be there, as blocks behind them are.
    pub vouched: u64,
    /// Blocks that left every tier but are remembered, for CPU stores announced after the GPU removal.
    pub ghosts: u64,
    /// Blocks with more than one physical copy in a tier.
    pub duplicated: u64,
    /// Blocks of one offload chunk; 0 while no CPU store was seen.
    pub cpu_chunk_blocks: u32,
    /// Blocks of lower tiers that the last clear may have taken. They are scored until the engine shows that they
    /// are gone.
    pub unconfirmed: u64,
    /// Blocks dropped because the index reached its limit.
    pub evicted: u64,
    /// Whether blocks were dropped or refused since the rank was last empty: its overlaps may be too small.
    pub truncated: bool,
    /// Memory of the rank's own tables, by what each part costs at its worst.
    pub bytes: u64,
    /// Sums of all events since the rank's incarnation began.
    pub totals: Applied,
}

impl RankStats {
    /// Blocks held and scored in `tier`.
    #[must_use]
    pub fn blocks_in(&self, tier: Tier) -> u64 {
        self.blocks[tier.index()]
    }
}

/// The index as a whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct IndexStats {
    /// Ranks known.
    pub ranks: usize,
    /// Blocks held and scored, over all ranks, by tier.
    pub blocks: [u64; 3],
    /// Runs of blocks.
    pub runs: usize,
    /// Memory, by what each part costs at its worst: the real use is below.
    pub bytes: u64,
    /// The limit of `bytes`.
    pub max_bytes: u64,
    /// Blocks dropped because of the limit, ever.
    pub evicted: u64,
    /// Removed ranks whose blocks are not cleaned up yet (see `sweep`). They are not scored.
    pub unswept: usize,
}
