//! What the ranks' caches hold, and how far that can be trusted.

use super::Rank;
use crate::{events::FeedState, index::Index};

/// The index of a pool together with the state of each rank's stream: read under one lock, so that an overlap and the
/// sequence number at which it was true belong together.
#[derive(Debug)]
pub struct CacheView {
    /// Which rank holds which block.
    pub index: Index,
    /// The streams, by rank.
    pub feeds: Vec<Feed>,
}

/// What is known of one rank's stream of KV events.
#[derive(Clone, Copy, Debug)]
pub struct Feed {
    /// Whether the rank has a stream at all.
    pub configured: bool,
    /// How far the stream can be trusted.
    pub state: FeedState,
    /// The sequence number of the last batch applied.
    pub applied_seq: Option<u64>,
    /// Tokens per block, as the events say; unknown before the first stored block.
    pub block_tokens: Option<u32>,
}

impl CacheView {
    pub(super) fn new(index: Index, ranks: &[Rank]) -> Self {
        let feeds = ranks
            .iter()
            .map(|rank| Feed {
                configured: rank.feed.events.is_some(),
                state: FeedState::Connecting,
                applied_seq: None,
                block_tokens: None,
            })
            .collect();
        Self { index, feeds }
    }
}
