//! Where decoded batches go.

use super::batch::Batch;
use super::stream::{Doubt, FeedState, ResetReason};
use std::fmt::Debug;
use std::hash::Hash;

/// What the subscriber feeds: the owner of the index. All calls come from the subscriber's thread, in the order in
/// which things happened; what takes long here delays every feed.
pub trait Sink: Send + 'static {
    /// Names a feed: a rank of a pool.
    type Key: Copy + Eq + Hash + Send + Debug;

    /// The next batch of a feed. Its decoding memory is used again after the call. Returns a batch since which all that
    /// is known of the rank was told, where that is known while the feed is degraded: what was missed before it no
    /// longer matters.
    fn apply(&mut self, feed: Self::Key, seq: u64, batch: &Batch) -> Option<u64>;

    /// All blocks of the feed's rank must be forgotten.
    fn reset(&mut self, feed: Self::Key, reason: ResetReason);

    /// The feed's state is now another one. `applied_seq` is the batch applied last.
    fn state(&mut self, feed: Self::Key, state: FeedState, applied_seq: Option<u64>);

    /// What others came to doubt since the last call. Called every 100 ms or so.
    fn doubts(&mut self) -> Vec<(Self::Key, Doubt)> {
        Vec::new()
    }

    /// The feed was removed: this is the last call for it, and its key may be used again.
    fn removed(&mut self, feed: Self::Key);
}
