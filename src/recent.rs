//! What was used lately, in bounded memory.
//!
//! Values are found by a 128-bit hash of the bytes that they were made from. The hash has a random key, so nobody can
//! build bytes that meet, and the bytes are not kept.

use hashbrown::HashMap;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use xxhash_rust::xxh3::xxh3_128_with_secret;

/// What an entry takes beside its value: key, pointer, sizes, the allocations' own headers and the table's slack.
const ENTRY_BYTES: usize = 128;

/// A value with more of a generation's budget than this is not kept: it would push out everything else.
const LARGEST_SHARE: usize = 4;

/// The name of some bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Key(u128);

impl Key {
    pub(crate) const fn bytes(self) -> [u8; 16] {
        self.0.to_le_bytes()
    }

    /// As much of it as other hashes are seeded with.
    pub(crate) const fn half(self) -> u64 {
        self.0 as u64
    }
}

/// What the hash is keyed with. A seed would be made one of these for each long text.
type Secret = [u8; 192];

/// A cache of cheaply cloned values, bounded in bytes.
///
/// Each of its shards has two generations: entries that are used move to the young one, and when that is full the old one
/// is dropped.
#[derive(Debug)]
pub(crate) struct Recent<V> {
    shards: Box<[Mutex<Shard<V>>]>,
    secret: Secret,
    generation_bytes: usize,
    hits: AtomicU64,
    misses: AtomicU64,
}

/// Values with the bytes that they take.
type Generation<V> = HashMap<Key, (V, usize)>;

#[derive(Debug)]
struct Shard<V> {
    young: Generation<V>,
    old: Generation<V>,
    young_bytes: usize,
    old_bytes: usize,
}

/// What a cache holds and how often it helped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CacheStats {
    /// How often something was found.
    pub hits: u64,
    /// How often it had to be made.
    pub misses: u64,
    /// Memory in use, in bytes.
    pub bytes: usize,
}

impl std::ops::Add for CacheStats {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            hits: self.hits + other.hits,
            misses: self.misses + other.misses,
            bytes: self.bytes + other.bytes,
        }
    }
}

impl<V: Clone> Recent<V> {
    /// A cache of at most `capacity_bytes` in `shards` that are locked apart from each other. More shards wait less for
    /// each other; fewer hold larger values. With a capacity of 0 nothing is kept.
    pub(crate) fn new(capacity_bytes: usize, shards: usize) -> Self {
        let shards = shards.max(1);
        Self {
            shards: (0..shards).map(|_| Mutex::default()).collect(),
            secret: std::array::from_fn(|_| fastrand::u8(..)),
            generation_bytes: capacity_bytes / shards / 2,
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
        }
    }

    /// The name of `bytes`. Equal bytes of different `kind` have different names.
    pub(crate) fn key(&self, kind: u64, bytes: &[u8]) -> Key {
        Key(xxh3_128_with_secret(bytes, &self.secret) ^ u128::from(kind))
    }

    /// The value of that name, if it is still here.
    pub(crate) fn get(&self, key: Key) -> Option<V> {
        let found = self.get_guessed(key);
        if found.is_none() {
            self.misses.fetch_add(1, Ordering::Relaxed);
        }
        found
    }

    /// The same where a name is tried that may be of nothing: then its absence is not counted.
    pub(crate) fn get_guessed(&self, key: Key) -> Option<V> {
        // What is pushed out is dropped after the lock is free: that takes its time.
        let (found, _dropped) = self.shard(key)?.lock().get(key, self.generation_bytes);
        if found.is_some() {
            self.hits.fetch_add(1, Ordering::Relaxed);
        }
        found
    }

    /// Keeps a value that takes `bytes`, unless that is too much.
    pub(crate) fn insert(&self, key: Key, value: V, bytes: usize) {
        let bytes = bytes.saturating_add(ENTRY_BYTES);
        if bytes > self.generation_bytes / LARGEST_SHARE {
            return;
        }
        let _dropped =
            self.shard(key).map(|shard| shard.lock().insert(key, (value, bytes), self.generation_bytes));
    }

    pub(crate) fn stats(&self) -> CacheStats {
        let bytes = |shard: &Mutex<Shard<V>>| {
            let shard = shard.lock();
            shard.young_bytes + shard.old_bytes
        };
        CacheStats {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            bytes: self.shards.iter().map(bytes).sum(),
        }
    }

    fn shard(&self, key: Key) -> Option<&Mutex<Shard<V>>> {
        self.shards.get(key.0 as usize % self.shards.len())
    }
}

impl<V> Default for Shard<V> {
    fn default() -> Self {
        Self { young: HashMap::new(), old: HashMap::new(), young_bytes: 0, old_bytes: 0 }
    }
}

impl<V: Clone> Shard<V> {
    /// The value, and what had to go for it to stay.
    fn get(&mut self, key: Key, generation_bytes: usize) -> (Option<V>, Option<Generation<V>>) {
        if let Some((value, _)) = self.young.get(&key) {
            return (Some(value.clone()), None);
        }
        let Some(entry) = self.old.remove(&key) else { return (None, None) };
        self.old_bytes -= entry.1;
        let value = entry.0.clone();
        (Some(value), self.insert(key, entry, generation_bytes))
    }

    /// Returns what had to go.
    fn insert(&mut self, key: Key, entry: (V, usize), generation_bytes: usize) -> Option<Generation<V>> {
        let bytes = entry.1;
        let dropped = (self.young_bytes + bytes > generation_bytes).then(|| {
            self.old_bytes = std::mem::take(&mut self.young_bytes);
            std::mem::replace(&mut self.old, std::mem::take(&mut self.young))
        });
        self.young_bytes += bytes;
        if let Some((_, before)) = self.young.insert(key, entry) {
            self.young_bytes -= before;
        }
        if let Some((_, before)) = self.old.remove(&key) {
            self.old_bytes -= before;
        }
        dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    const SHARDS: usize = 4;

    fn use_one(cache: &Recent<Arc<str>>, name: &str) -> bool {
        let key = cache.key(0, name.as_bytes());
        let found = cache.get(key);
        assert!(found.as_deref().is_none_or(|value| value == name));
        if found.is_none() {
            cache.insert(key, name.into(), name.len());
        }
        found.is_some()
    }

    #[test]
    fn what_was_inserted_is_found_by_its_bytes_and_kind() {
        let cache = Recent::new(1 << 20, SHARDS);
        assert!(!use_one(&cache, "a"));
        assert!(use_one(&cache, "a"));
        assert!(!use_one(&cache, "b"));
        assert_ne!(cache.key(0, b"a"), cache.key(1, b"a"));
        assert_ne!(cache.key(0, b"a"), Recent::<()>::new(1, 1).key(0, b"a"));
        assert_eq!(cache.stats(), CacheStats { hits: 1, misses: 2, bytes: 2 * ENTRY_BYTES + 2 });
    }

    #[test]
    fn memory_is_bounded_and_what_is_in_use_stays() {
        let capacity = SHARDS * 32 * 1024;
        let cache = Recent::new(capacity, SHARDS);
        use_one(&cache, "in use");
        for number in 0..20_000 {
            use_one(&cache, &format!("value {number}"));
            assert!(cache.stats().bytes <= capacity);
            if number % 50 == 0 {
                assert!(use_one(&cache, "in use"), "after {number}");
            }
        }
        assert!(cache.stats().bytes > capacity / 4);
        assert!(!use_one(&cache, "value 1"));
    }

    #[test]
    fn a_value_inserted_again_counts_once() {
        let cache = Recent::new(1 << 20, SHARDS);
        let key = cache.key(0, b"a");
        for bytes in [10, 20, 5] {
            cache.insert(key, (), bytes);
            assert_eq!(cache.stats().bytes, ENTRY_BYTES + bytes);
        }
    }

    #[test]
    fn a_huge_value_or_a_cache_without_room_keeps_nothing() {
        let cache = Recent::new(SHARDS * 8192, SHARDS);
        cache.insert(cache.key(0, b"a"), (), 1024);
        let none = Recent::new(0, SHARDS);
        none.insert(none.key(0, b"a"), (), 0);
        assert_eq!((cache.stats().bytes, none.stats().bytes), (0, 0));
    }
}
