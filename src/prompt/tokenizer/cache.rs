//! The ids of pieces of text that were seen lately.
//!
//! The turns of a conversation repeat all that came before, so most pieces of a prompt have been tokenized moments ago.

use crate::recent::{CacheStats, Recent};
use crate::units::TokenId;
use std::sync::Arc;

/// Enough that threads rarely wait for each other.
const SHARDS: usize = 16;

/// A cache of pieces by their content, bounded in bytes.
#[derive(Debug)]
pub(super) struct SegmentCache(Recent<Arc<[TokenId]>>);

impl SegmentCache {
    /// A cache of at most `capacity_bytes`.
    pub(super) fn new(capacity_bytes: usize) -> Self {
        Self(Recent::new(capacity_bytes, SHARDS))
    }

    /// Appends the ids of `piece` to `ids`, from the cache or else by `encode`, which appends them too.
    pub(super) fn encode<E>(
        &self,
        piece: &str,
        ids: &mut Vec<TokenId>,
        encode: impl FnOnce(&mut Vec<TokenId>) -> Result<(), E>,
    ) -> Result<(), E> {
        let key = self.0.key(0, piece.as_bytes());
        if let Some(known) = self.0.get(key) {
            ids.extend_from_slice(&known);
            return Ok(());
        }
        let start = ids.len();
        encode(ids)?;
        let new = ids.get(start..).unwrap_or_default();
        self.0.insert(key, new.into(), size_of_val(new));
        Ok(())
    }

    pub(super) fn stats(&self) -> CacheStats {
        self.0.stats()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cached(cache: &SegmentCache, piece: &str) -> (Vec<TokenId>, bool) {
        let mut asked = false;
        let mut ids = vec![TokenId(9)];
        let result: Result<(), ()> = cache.encode(piece, &mut ids, |ids| {
            asked = true;
            ids.extend(piece.bytes().map(|byte| TokenId(byte.into())));
            Ok(())
        });
        assert_eq!(result, Ok(()));
        (ids, asked)
    }

    #[test]
    fn a_piece_is_tokenized_once() {
        let cache = SegmentCache::new(1 << 20);
        let first = cached(&cache, "ab");
        assert_eq!(first, (vec![TokenId(9), TokenId(97), TokenId(98)], true));
        assert_eq!(cached(&cache, "ab"), (first.0, false));
        assert!(cached(&cache, "abc").1);
        assert_eq!((cache.stats().hits, cache.stats().misses), (1, 2));
    }

    #[test]
    fn an_error_leaves_nothing_behind() {
        let cache = SegmentCache::new(1 << 20);
        let failed: Result<(), ()> = cache.encode("y", &mut Vec::new(), |_| Err(()));
        assert_eq!(failed, Err(()));
        assert_eq!(cache.stats().bytes, 0);
    }
}
