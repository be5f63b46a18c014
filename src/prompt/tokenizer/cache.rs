//! The ids of pieces of text that were seen lately.
//!
//! The turns of a conversation repeat all that came before, so most pieces of a prompt have been tokenized moments ago.

use crate::units::TokenId;
use hashbrown::HashMap;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use xxhash_rust::xxh3::xxh3_128_with_seed;

/// Shards are locked apart from each other; a power of two.
const SHARDS: usize = 16;

/// What an entry takes beside its ids: key, pointer, counts, allocation and the table's slack.
const ENTRY_BYTES: usize = 100;

/// A piece with more of a shard's budget than this is not kept: it would push out everything else.
const LARGEST_SHARE: usize = 4;

/// A cache of pieces by their content, bounded in bytes.
///
/// The key is a 128-bit hash under a random seed, so nobody can build texts that collide; the text is not kept. Each
/// shard has two generations: entries that are used move to the young one, and when that is full the old one is dropped.
#[derive(Debug)]
pub(super) struct SegmentCache {
    shards: Vec<Mutex<Shard>>,
    seed: u64,
    generation_bytes: usize,
    hits: AtomicU64,
    misses: AtomicU64,
}

#[derive(Debug, Default)]
struct Shard {
    young: HashMap<u128, Arc<[TokenId]>>,
    old: HashMap<u128, Arc<[TokenId]>>,
    young_bytes: usize,
    old_bytes: usize,
}

/// What the cache holds and how often it helped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CacheStats {
    /// Pieces that were found.
    pub hits: u64,
    /// Pieces that had to be tokenized.
    pub misses: u64,
    /// Memory in use, in bytes.
    pub bytes: usize,
}

impl SegmentCache {
    /// A cache of at most `capacity_bytes`.
    pub(super) fn new(capacity_bytes: usize, seed: u64) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            seed,
            generation_bytes: capacity_bytes / SHARDS / 2,
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
        }
    }

    /// Appends the ids of `piece` to `ids`, from the cache or else by `encode`, which appends them too.
    pub(super) fn encode<E>(
        &self,
        piece: &str,
        ids: &mut Vec<TokenId>,
        encode: impl FnOnce(&mut Vec<TokenId>) -> Result<(), E>,
    ) -> Result<(), E> {
        let key = xxh3_128_with_seed(piece.as_bytes(), self.seed);
        let Some(shard) = self.shards.get(key as usize % SHARDS) else { return encode(ids) };
        let known = shard.lock().get(key, self.generation_bytes);
        if let Some(known) = known {
            self.hits.fetch_add(1, Ordering::Relaxed);
            ids.extend_from_slice(&known);
            return Ok(());
        }
        self.misses.fetch_add(1, Ordering::Relaxed);
        let start = ids.len();
        encode(ids)?;
        let new = ids.get(start..).unwrap_or_default();
        if entry_bytes(new) <= self.generation_bytes / LARGEST_SHARE {
            shard.lock().insert(key, new.into(), self.generation_bytes);
        }
        Ok(())
    }

    pub(super) fn stats(&self) -> CacheStats {
        let bytes = |shard: &Mutex<Shard>| {
            let shard = shard.lock();
            shard.young_bytes + shard.old_bytes
        };
        CacheStats {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            bytes: self.shards.iter().map(bytes).sum(),
        }
    }
}

impl Shard {
    fn get(&mut self, key: u128, generation_bytes: usize) -> Option<Arc<[TokenId]>> {
        if let Some(ids) = self.young.get(&key) {
            return Some(Arc::clone(ids));
        }
        let ids = self.old.remove(&key)?;
        self.old_bytes -= entry_bytes(&ids);
        self.insert(key, Arc::clone(&ids), generation_bytes);
        Some(ids)
    }

    fn insert(&mut self, key: u128, ids: Arc<[TokenId]>, generation_bytes: usize) {
        let bytes = entry_bytes(&ids);
        if self.young_bytes + bytes > generation_bytes {
            self.old = std::mem::take(&mut self.young);
            self.old_bytes = std::mem::take(&mut self.young_bytes);
        }
        if self.young.insert(key, ids).is_none() {
            self.young_bytes += bytes;
        }
    }
}

fn entry_bytes(ids: &[TokenId]) -> usize {
    size_of_val(ids) + ENTRY_BYTES
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
        let cache = SegmentCache::new(1 << 20, 1);
        let first = cached(&cache, "ab");
        assert_eq!(first, (vec![TokenId(9), TokenId(97), TokenId(98)], true));
        assert_eq!(cached(&cache, "ab"), (first.0, false));
        assert!(cached(&cache, "abc").1);
        assert_eq!(cache.stats(), CacheStats { hits: 1, misses: 2, bytes: 2 * ENTRY_BYTES + 5 * 4 });
    }

    #[test]
    fn memory_is_bounded_and_pieces_in_use_stay() {
        let capacity = SHARDS * 10 * 1024;
        let cache = SegmentCache::new(capacity, 1);
        cached(&cache, "in use");
        for number in 0..20_000 {
            cached(&cache, &format!("piece {number}"));
            if number % 50 == 0 {
                assert!(!cached(&cache, "in use").1, "after {number}");
            }
        }
        let bytes = cache.stats().bytes;
        assert!(bytes <= capacity && bytes > capacity / 4, "{bytes}");
        assert!(cached(&cache, "piece 1").1);
    }

    #[test]
    fn a_huge_piece_and_an_error_leave_nothing_behind() {
        let cache = SegmentCache::new(SHARDS * 2 * 4096, 1);
        assert!(cached(&cache, &"x".repeat(2000)).1);
        assert!(cached(&cache, &"x".repeat(2000)).1);
        let failed: Result<(), ()> = cache.encode("y", &mut Vec::new(), |_| Err(()));
        assert_eq!(failed, Err(()));
        assert_eq!(cache.stats().bytes, 0);
    }
}
