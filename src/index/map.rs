//! A map from 64-bit hashes to 32-bit references, in 12 bytes an entry, that never stops for long.

use crate::hash::fold;
use hashbrown::HashTable;
use hashbrown::hash_table::Entry as TableEntry;

/// Independent sub-tables. Growing a table moves all its entries at once: with 64 that is 30,000 entries (a fraction
/// of a millisecond) in a map of two million.
pub(super) const SHARDS: usize = 64;

/// Twelve bytes instead of sixteen: the key in halves, so that the entry needs no 8-byte alignment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    key: [u32; 2],
    value: u32,
}

impl Entry {
    fn new(key: u64, value: u32) -> Self {
        Self { key: [key as u32, (key >> 32) as u32], value }
    }

    pub(super) fn key(&self) -> u64 {
        u64::from(self.key[0]) | u64::from(self.key[1]) << 32
    }

    pub(super) fn value(&self) -> u32 {
        self.value
    }
}

/// One sub-table.
pub(super) type Shard = HashTable<Entry>;

/// See the module.
#[derive(Debug)]
pub(super) struct RefMap {
    shards: Box<[Shard; SHARDS]>,
    len: usize,
    secret: u64,
}

impl RefMap {
    /// An empty map; `secret` keeps engine hashes chosen by others from meeting in one bucket.
    pub(super) fn new(secret: u64) -> Self {
        Self { shards: Box::new(std::array::from_fn(|_| Shard::new())), len: 0, secret }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn get(&self, key: u64) -> Option<u32> {
        let mixed = mix(key, self.secret);
        self.shards[shard_of(mixed)].find(mixed, |entry| entry.key() == key).map(Entry::value)
    }

    /// Brings near what look-ups of these keys will need. Nothing is done with the answers, so none waits for another:
    /// the processor has several under way at a time. Doubles the rate of long stores.
    pub(super) fn touch(&self, keys: impl Iterator<Item = u64>) {
        let seen = keys.fold(0, |seen, key| seen ^ self.get(key).unwrap_or(0));
        std::hint::black_box(seen);
    }

    /// Sets the value and returns the one before.
    pub(super) fn insert(&mut self, key: u64, value: u32) -> Option<u32> {
        let secret = self.secret;
        let mixed = mix(key, secret);
        let shard = &mut self.shards[shard_of(mixed)];
        match shard.entry(mixed, |entry| entry.key() == key, |entry| mix(entry.key(), secret)) {
            TableEntry::Occupied(mut entry) => Some(std::mem::replace(&mut entry.get_mut().value, value)),
            TableEntry::Vacant(place) => {
                place.insert(Entry::new(key, value));
                self.len += 1;
                None
            }
        }
    }

    pub(super) fn remove(&mut self, key: u64) -> Option<u32> {
        let mixed = mix(key, self.secret);
        let at = shard_of(mixed);
        let (entry, _) = self.shards[at].find_entry(mixed, |entry| entry.key() == key).ok()?.remove();
        self.len -= 1;
        if self.shards[at].len() * 8 < self.shards[at].capacity() {
            self.shrink(at);
        }
        Some(entry.value)
    }

    pub(super) fn shard(&self, at: usize) -> &Shard {
        &self.shards[at]
    }

    /// Takes a sub-table out, to be worked on while the rest of the index is borrowed; see [`Self::put_back`].
    pub(super) fn take(&mut self, at: usize) -> Shard {
        let shard = std::mem::take(&mut self.shards[at]);
        self.len -= shard.len();
        shard
    }

    /// Puts a sub-table back that [`Self::take`] took, perhaps with fewer entries.
    pub(super) fn put_back(&mut self, at: usize, shard: Shard) {
        self.len += shard.len();
        self.shards[at] = shard;
        if self.shards[at].len() * 3 < self.shards[at].capacity() {
            self.shrink(at);
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.shards.iter().flat_map(Shard::iter)
    }

    fn shrink(&mut self, at: usize) {
        let secret = self.secret;
        let shard = &mut self.shards[at];
        shard.shrink_to(shard.len() * 3 / 2, |entry| mix(entry.key(), secret));
    }
}

fn mix(key: u64, secret: u64) -> u64 {
    fold(key ^ secret, 0x9E37_79B9_7F4A_7C15)
}

/// Bits that hashbrown uses neither for the bucket (the low ones) nor for its tag (the top seven).
fn shard_of(mixed: u64) -> usize {
    (mixed >> 48) as usize % SHARDS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allocated(map: &RefMap) -> usize {
        map.shards.iter().map(Shard::allocation_size).sum()
    }

    #[test]
    fn it_maps_like_any_map_and_gives_memory_back() {
        assert_eq!(size_of::<Entry>(), 12);
        let mut map = RefMap::new(7);
        for key in 0..100_000u64 {
            assert_eq!(map.insert(key << 7, key as u32), None);
        }
        assert_eq!(map.insert(5 << 7, 9), Some(5));
        assert_eq!(map.len(), 100_000);
        let full = allocated(&map);
        for key in 1..100_000u64 {
            assert!(map.remove(key << 7).is_some());
            assert_eq!(map.remove(key << 7), None);
        }
        assert_eq!((map.len(), map.get(0), map.get(128)), (1, Some(0), None));
        assert!(allocated(&map) < full / 8);
    }

    #[test]
    fn keys_that_count_up_spread_over_all_shards() {
        let mut map = RefMap::new(1);
        for key in 0..64_000u64 {
            map.insert(key, 0);
        }
        let sizes: Vec<_> = (0..SHARDS).map(|at| map.shard(at).len()).collect();
        assert!(sizes.iter().all(|size| (700..1300).contains(size)), "{sizes:?}");
    }

    #[test]
    fn a_shard_can_be_taken_and_put_back() {
        let mut map = RefMap::new(2);
        for key in 0..1000u64 {
            map.insert(key, 1);
        }
        let mut shard = map.take(3);
        let before = shard.len();
        assert_eq!(map.len(), 1000 - before);
        shard.retain(|entry| entry.key() % 2 == 0);
        map.put_back(3, shard);
        assert_eq!(map.len(), map.iter().count());
    }
}
