//! What the ranks' caches hold, and how far that can be trusted.

use super::turnover::Turnover;
use crate::{
    events::{Batch, FeedState, KvEvent, SuspendReason},
    index::{Applied, Index, LOOK_AHEAD_EVENTS, RankStats},
    units::{EngineHash, RankId, Tier},
};
use parking_lot::{RwLock, RwLockWriteGuard};
use std::time::{Duration, Instant};

/// A publisher that was not heard for so long is out of reach: a wrong or dead port, most likely. Engines take minutes
/// to start, so it may still come.
pub(super) const UNREACHABLE_AFTER: Duration = Duration::from_secs(30);

/// Stores without tokens, and none with them, after which the engine is taken to publish no token ids.
const STORES_WITHOUT_TOKENS: u32 = 16;

/// Batches in a row with blocks of another size after which the rank's blocks are of that size. One alone may be about
/// a block that is filled in part.
const BATCHES_OF_ANOTHER_SIZE: u32 = 8;

/// Events of one block that are applied while readers wait: some ten microseconds.
const WORK_PER_SLICE: usize = 64;

/// Blocks of a longer event that take as long as one event.
const BLOCKS_PER_EVENT: usize = 8;

/// Slices of cleaning up at a time: some milliseconds, in which a hundred thousand blocks go.
const SWEEP_SLICES: usize = 64;

/// The index of a pool together with the state of each rank's stream: read under one lock, so that an overlap and the
/// sequence number at which it was true belong together.
#[derive(Debug)]
pub struct CacheView {
    /// Which rank holds which block.
    pub index: Index,
    /// The streams, by rank; where there is none, of a stream that is not configured.
    pub feeds: Vec<Feed>,
}

/// How far one rank's cache is known.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RankState {
    /// What the index says is what the engine holds.
    Exact,
    /// Followed, but not known to be right; why.
    Degraded(&'static str),
    /// The rank publishes no events: a candidate with an empty cache.
    NoEvents,
    /// It should publish events, but nothing known of its cache counts; why.
    LoadOnly(&'static str),
}

impl RankState {
    /// The engine's own tokens are not known: what matches ours is the least that it holds.
    pub(super) const RENDERER_DIFFERS: Self = Self::Degraded(FeedFault::RendererDiffers.as_str());

    /// All names, in the order of their gauges.
    pub const NAMES: [&'static str; 4] = ["exact", "degraded", "no_events", "load_only"];

    /// The state's name in metrics and answers.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Degraded(_) => "degraded",
            Self::NoEvents => "no_events",
            Self::LoadOnly(_) => "load_only",
        }
    }

    /// Why it is not exact.
    #[must_use]
    pub const fn reason(self) -> Option<&'static str> {
        match self {
            Self::Degraded(reason) | Self::LoadOnly(reason) => Some(reason),
            Self::Exact | Self::NoEvents => None,
        }
    }

    /// Whether the rank may hold much that its events did not tell of: those that were missed, or all, or those whose
    /// tokens are other ones than ours.
    #[must_use]
    pub fn misses_events(self, stream: FeedState) -> bool {
        !self.is_trusted() || matches!(stream, FeedState::Degraded(_)) || self == Self::RENDERER_DIFFERS
    }

    /// Whether the rank's known blocks may be counted on.
    #[must_use]
    pub const fn is_trusted(self) -> bool {
        matches!(self, Self::Exact | Self::Degraded(_))
    }
}

/// A fault of a rank's stream that somebody has to mend. Nothing else would show it: the rank only never matches.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FeedFault {
    /// Nothing was ever heard from the endpoint.
    Unreachable,
    /// The engine's events name blocks without their tokens.
    NoTokenIds,
    /// The size of its blocks changed under way.
    BlockSizeChanged,
    /// The engine computes blocks, and its events say nothing of them.
    Silent,
    /// The engine makes other tokens of some conversations than we do.
    RendererDiffers,
}

impl FeedFault {
    /// All faults, in the order of their gauges.
    pub const ALL: [Self; 5] =
        [Self::Unreachable, Self::NoTokenIds, Self::BlockSizeChanged, Self::Silent, Self::RendererDiffers];

    /// The fault's name in metrics and answers.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::NoTokenIds => "no_token_ids",
            Self::BlockSizeChanged => "block_size_changed",
            Self::Silent => "silent",
            Self::RendererDiffers => "renderer_differs",
        }
    }

    /// What to look at.
    #[must_use]
    pub const fn advice(self) -> &'static str {
        match self {
            Self::Unreachable => "no KV events were ever heard: is the port right, and are events on?",
            Self::NoTokenIds => "KV events carry no token ids: no prompt can match this replica",
            Self::BlockSizeChanged => "KV events changed their block size: the replica's index starts anew",
            Self::Silent => {
                "the engine computes blocks but its KV events say nothing: is the stream cut, is prefix caching on?"
            }
            Self::RendererDiffers => {
                "the engine makes other tokens of some conversations than its pool does: `kvspoa doctor` tells of which"
            }
        }
    }
}

/// What is known of one rank's stream of KV events.
#[derive(Debug)]
pub struct Feed {
    /// Whether the rank has a stream at all.
    pub configured: bool,
    /// How far the stream can be trusted.
    pub state: FeedState,
    /// The sequence number of the last batch applied.
    pub applied_seq: Option<u64>,
    /// Tokens per block, as the events say; unknown before the first stored block.
    pub block_tokens: Option<u32>,
    /// How far behind the engine's clock the last live batch was applied, in seconds; the clocks' difference is in it.
    pub lag_seconds: f64,
    /// Times that the block size changed under way.
    pub size_changes: u64,
    /// Batches applied, ever: tells whether the stream has spoken.
    pub heard: u64,
    /// The value of [`Self::heard`] at the last reset of the cache that a batch told of.
    pub cleared_at: u64,
    other_size: Option<(u32, u32)>,
    size_changed: bool,
    window_groups: bool,
    stores_without_tokens: u32,
    heard_tokens: bool,
    /// Whether the engine makes other tokens of some conversations than we do.
    pub(super) renderer_differs: bool,
    unreachable: bool,
    /// Whether the engine computed blocks of which nothing was heard.
    silent: bool,
    connecting_since: Instant,
    /// While the stream is degraded.
    turnover: Option<Turnover>,
}

impl Feed {
    pub(super) fn new(configured: bool, now: Instant) -> Self {
        Self {
            configured,
            state: FeedState::Connecting,
            applied_seq: None,
            block_tokens: None,
            lag_seconds: 0.0,
            size_changes: 0,
            heard: 0,
            cleared_at: 0,
            other_size: None,
            size_changed: false,
            window_groups: false,
            stores_without_tokens: 0,
            heard_tokens: false,
            renderer_differs: false,
            unreachable: false,
            silent: false,
            connecting_since: now,
            turnover: None,
        }
    }

    /// How far the rank's cache is known. `stats` are its figures in the index.
    #[must_use]
    pub fn rank_state(&self, stats: &RankStats) -> RankState {
        if !self.configured {
            return RankState::NoEvents;
        }
        match self.state {
            FeedState::Connecting => {
                RankState::LoadOnly(self.fault().map_or(self.state.as_str(), FeedFault::as_str))
            }
            FeedState::Suspended(reason) => RankState::LoadOnly(reason.as_str()),
            _ if self.fault() == Some(FeedFault::NoTokenIds) => {
                RankState::LoadOnly(FeedFault::NoTokenIds.as_str())
            }
            FeedState::Degraded(reason) => RankState::Degraded(reason.as_str()),
            FeedState::Exact if self.renderer_differs => RankState::RENDERER_DIFFERS,
            FeedState::Exact if self.size_changed => {
                RankState::Degraded(FeedFault::BlockSizeChanged.as_str())
            }
            // A hit needs the window's or the recurrent group's blocks too, which the index does not follow.
            FeedState::Exact if self.window_groups => RankState::Degraded("window_groups"),
            FeedState::Exact if stats.truncated => RankState::Degraded("index_full"),
            FeedState::Exact if stats.unconfirmed > 0 => RankState::Degraded("lower_tiers_unconfirmed"),
            FeedState::Exact => RankState::Exact,
        }
    }

    /// Whether the publisher has not been heard, but may be soon.
    pub(super) fn is_starting(&self) -> bool {
        self.configured && self.state == FeedState::Connecting && !self.unreachable
    }

    /// What is wrong with the stream, if it has to be mended elsewhere.
    #[must_use]
    pub const fn fault(&self) -> Option<FeedFault> {
        if self.unreachable {
            Some(FeedFault::Unreachable)
        } else if !self.heard_tokens && self.stores_without_tokens >= STORES_WITHOUT_TOKENS {
            Some(FeedFault::NoTokenIds)
        } else if self.renderer_differs {
            Some(FeedFault::RendererDiffers)
        } else if self.size_changed {
            Some(FeedFault::BlockSizeChanged)
        } else if self.silent || matches!(self.state, FeedState::Suspended(SuspendReason::Silent)) {
            Some(FeedFault::Silent)
        } else {
            None
        }
    }

    /// A batch is about to be applied. Returns whether the rank's blocks must be forgotten first, because its blocks
    /// are of another size now. `now_seconds` is the wall clock's, since the epoch.
    fn see(&mut self, batch: &Batch, now_seconds: f64) -> bool {
        (self.unreachable, self.silent) = (false, false);
        self.heard += 1;
        self.window_groups = batch.has_window_groups();
        if matches!(self.state, FeedState::Exact | FeedState::Degraded(_)) {
            self.lag_seconds = (now_seconds - batch.timestamp_seconds()).max(0.0);
        }
        if batch.has_cleared() {
            self.cleared_at = self.heard;
            self.size_changed = false;
        }
        for event in batch.events() {
            if let KvEvent::Stored(stored) = event
                && stored.tier == Tier::Gpu
            {
                self.heard_tokens |= !stored.block_hashes.is_empty();
                self.stores_without_tokens = self.stores_without_tokens.saturating_add(1);
            }
        }
        batch.block_tokens().is_some_and(|size| self.see_size(size))
    }

    fn see_size(&mut self, size: u32) -> bool {
        if self.block_tokens.is_none_or(|known| known == size) {
            self.block_tokens = Some(size);
            self.other_size = None;
            return false;
        }
        let batches = match self.other_size {
            Some((other, batches)) if other == size => batches + 1,
            _ => 1,
        };
        self.other_size = Some((size, batches));
        if batches < BATCHES_OF_ANOTHER_SIZE {
            return false;
        }
        self.block_tokens = Some(size);
        self.other_size = None;
        self.size_changed = true;
        self.size_changes += 1;
        true
    }

    /// Another process publishes.
    pub(super) fn reset(&mut self) {
        let Self { configured, state, size_changes, heard, renderer_differs, connecting_since, .. } = *self;
        // A new process is news too.
        let new = Self::new(configured, connecting_since);
        *self = Self { state, size_changes, heard: heard + 1, renderer_differs, ..new };
    }

    /// The engine computed blocks of which nothing was heard.
    pub(super) fn see_silence(&mut self) {
        self.silent = true;
    }

    fn set_state(&mut self, state: FeedState, applied_seq: Option<u64>, now: Instant) {
        self.state = state;
        self.applied_seq = applied_seq;
        self.unreachable = false;
        self.connecting_since = now;
    }

    /// Time has passed.
    pub(super) fn tick(&mut self, now: Instant) {
        self.unreachable = self.configured
            && self.state == FeedState::Connecting
            && self.applied_seq.is_none()
            && now.saturating_duration_since(self.connecting_since) >= UNREACHABLE_AFTER;
    }
}

impl CacheView {
    /// Applies a batch of a rank, in slices: between two of them, readers have their turn. Returns the batch since which
    /// all that is known of the rank was told, if the stream is degraded and that is so now. `now_seconds` is the wall
    /// clock's, since the epoch.
    pub(super) fn apply(
        caches: &RwLock<Self>,
        rank: RankId,
        seq: u64,
        batch: &Batch,
        now_seconds: f64,
    ) -> Option<u64> {
        let mut slices = Slices { caches: caches.write(), rank, work: 0 };
        if slices.feed()?.see(batch, now_seconds) {
            slices.caches.index.clear_rank(rank);
        }
        let mut ahead = batch.events();
        for (at, event) in batch.events().enumerate() {
            if at % LOOK_AHEAD_EVENTS == 0 {
                let next = ahead.by_ref().take(LOOK_AHEAD_EVENTS);
                next.for_each(|event| slices.caches.index.look_ahead(rank, &event));
            }
            slices.apply(&event);
            if let Some(turnover) = &mut slices.feed()?.turnover {
                turnover.see(&event);
            }
        }
        slices.caches.index.end_batch(rank);
        slices.feed()?.applied_seq = Some(seq);
        let (since, gone) = slices.feed()?.turnover.take_if(|turnover| turnover.is_over())?.end();
        for hash in &gone {
            // Of several copies none is left.
            while slices.apply(&removed(hash)).removed > 0 {}
        }
        drop(slices);
        // For what is missed from here on.
        let turnover = Turnover::new(seq, caches.read().index.held(rank, Tier::Gpu));
        caches.write().feeds.get_mut(rank.index())?.turnover = Some(turnover);
        Some(since)
    }

    /// A rank's stream is in another state.
    pub(super) fn set_state(
        caches: &RwLock<Self>,
        rank: RankId,
        state: FeedState,
        applied_seq: Option<u64>,
        now: Instant,
    ) {
        let is_degraded = matches!(state, FeedState::Degraded(_));
        let mut begun = None;
        if is_degraded && let Some(since) = applied_seq {
            let caches = caches.read();
            if caches.feeds.get(rank.index()).is_some_and(|feed| feed.turnover.is_none()) {
                begun = Some(Turnover::new(since, caches.index.held(rank, Tier::Gpu)));
            }
        }
        let mut caches = caches.write();
        let Some(feed) = caches.feeds.get_mut(rank.index()) else { return };
        feed.set_state(state, applied_seq, now);
        feed.turnover = feed.turnover.take().or(begun).filter(|_| is_degraded);
    }

    /// Cleans up behind ranks that were cleared or have left, readers having their turn after each slice. Called every
    /// 100 ms or so.
    pub(super) fn sweep(caches: &RwLock<Self>) {
        if caches.read().index.is_swept() {
            return;
        }
        let mut caches = caches.write();
        for _ in 0..SWEEP_SLICES {
            if !caches.index.sweep(1) {
                return;
            }
            RwLockWriteGuard::bump(&mut caches);
        }
    }

    pub(super) const fn new(index: Index) -> Self {
        Self { index, feeds: Vec::new() }
    }

    /// A rank joins, with or without a stream.
    pub(super) fn add(&mut self, rank: RankId, configured: bool, now: Instant) {
        self.index.add_rank(rank);
        if self.feeds.len() <= rank.index() {
            self.feeds.resize_with(rank.index() + 1, || Feed::new(false, now));
        }
        self.feeds[rank.index()] = Feed::new(configured, now);
    }

    /// A rank has left.
    pub(super) fn remove(&mut self, rank: RankId) {
        self.index.remove_rank(rank);
        if let Some(feed) = self.feeds.get_mut(rank.index()) {
            *feed = Feed::new(false, feed.connecting_since);
        }
    }
}

fn removed(hash: &EngineHash) -> KvEvent<'_> {
    KvEvent::Removed { tier: Tier::Gpu, engine_hashes: std::slice::from_ref(hash) }
}

/// The lock of the caches, held for some events of one rank at a time.
struct Slices<'a> {
    caches: RwLockWriteGuard<'a, CacheView>,
    rank: RankId,
    /// What was done since readers had their turn.
    work: usize,
}

impl Slices<'_> {
    fn feed(&mut self) -> Option<&mut Feed> {
        self.caches.feeds.get_mut(self.rank.index())
    }

    fn apply(&mut self, event: &KvEvent<'_>) -> Applied {
        let work = work(event);
        if self.work + work > WORK_PER_SLICE {
            self.yield_to_readers();
        }
        self.work += work;
        let mut applied = self.caches.index.begin(self.rank, event);
        while self.caches.index.is_unfinished() {
            self.yield_to_readers();
            applied += self.caches.index.go_on(self.rank, event);
        }
        applied
    }

    fn yield_to_readers(&mut self) {
        RwLockWriteGuard::bump(&mut self.caches);
        self.work = 0;
    }
}

/// How long applying an event takes, in events of one block. Long stores take less time a block than short ones.
fn work(event: &KvEvent<'_>) -> usize {
    let blocks = match event {
        KvEvent::Stored(stored) => stored.engine_hashes.len(),
        KvEvent::Removed { engine_hashes, .. } => engine_hashes.len(),
        KvEvent::Cleared => 0,
    };
    1 + blocks / BLOCKS_PER_EVENT
}
