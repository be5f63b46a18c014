//! A map from 64-bit hashes to 32-bit references that waits for memory once a look-up and never stops for long.
//!
//! Five entries, twelve bytes each, share a bucket of one cache line. What finds its bucket full stands in one of the
//! next, and the buckets that it passed count it, so that a look-up knows where to end. Every look-up of an index whose
//! tables do not fit into the processor's caches costs as much as the lines that it touches; tables with their tags
//! apart touch two.

use crate::hash::fold;
use crate::units::EngineHash;

/// Independent sub-tables. Growing a table moves all its entries at once: with 64 that is 30,000 entries (a fraction
/// of a millisecond) in a map of two million.
pub(super) const SHARDS: usize = 64;

/// Entries that fit into one cache line.
const SLOTS: usize = 5;

/// One entry.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) key: u64,
    pub(super) value: u32,
}

/// Entries that share a cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Bucket {
    keys: [u64; SLOTS],
    values: [u32; SLOTS],
    /// Five bits of each key's hash: mostly they tell that it is none of these without a look at the keys.
    tags: Tags,
}

/// From the lowest bit on: five tags, 0 where there is no entry; the number of entries; and how many entries found the
/// bucket full and stand behind it. Once at its greatest value, that count stays there.
#[derive(Clone, Copy, Debug)]
struct Tags(u32);

impl Tags {
    const BITS: u32 = 5;
    /// The lowest bit of each tag.
    const ONES: u32 = 0x0010_8421;
    const LEN: u32 = Self::BITS * SLOTS as u32;
    const PASSED: u32 = Self::LEN + 3;
    const MOST_PASSED: u32 = u32::MAX >> Self::PASSED;

    fn len(self) -> usize {
        (self.0 >> Self::LEN & 7) as usize
    }

    fn passed(self) -> u32 {
        self.0 >> Self::PASSED
    }

    fn pass(&mut self) {
        if self.passed() < Self::MOST_PASSED {
            self.0 += 1 << Self::PASSED;
        }
    }

    fn unpass(&mut self) {
        if self.passed() < Self::MOST_PASSED {
            self.0 -= 1 << Self::PASSED;
        }
    }

    fn push(&mut self, tag: u32) {
        self.0 += (1 << Self::LEN) + (tag << (self.len() as u32 * Self::BITS));
    }

    /// The last tag takes the place of the one that goes.
    fn remove(&mut self, slot: usize) {
        let (at, last) = (slot as u32 * Self::BITS, (self.len() as u32 - 1) * Self::BITS);
        let tag = |shift: u32| self.0 >> shift & 0x1f;
        let (gone, moved) = (tag(at), tag(last));
        self.0 = self.0 - (1 << Self::LEN) - (moved << last);
        if at < last {
            self.0 = self.0 - (gone << at) + (moved << at);
        }
    }

    /// The slots that may have this tag, as the highest bit of each: all that have it, rarely one that has not.
    fn matches(self, tag: u32) -> u32 {
        let differences = self.0 ^ (tag * Self::ONES);
        differences.wrapping_sub(Self::ONES) & !differences & (Self::ONES << (Self::BITS - 1))
    }
}

impl Bucket {
    const EMPTY: Self = Self { keys: [0; SLOTS], values: [0; SLOTS], tags: Tags(0) };

    #[inline]
    fn position(&self, key: u64, tag: u32) -> Option<usize> {
        let mut matches = self.tags.matches(tag);
        while matches != 0 {
            let slot = (matches.trailing_zeros() / Tags::BITS) as usize;
            if self.keys[slot] == key && slot < self.len() {
                return Some(slot);
            }
            matches &= matches - 1;
        }
        None
    }

    /// Adds an entry, if there is room.
    #[inline]
    fn push(&mut self, entry: Entry, tag: u32) -> bool {
        let slot = self.tags.len();
        if slot >= SLOTS {
            return false;
        }
        self.keys[slot] = entry.key;
        self.values[slot] = entry.value;
        self.tags.push(tag);
        true
    }

    /// The last entry takes the place of the one that goes.
    fn remove(&mut self, slot: usize) -> u32 {
        let (value, last) = (self.values[slot], self.tags.len() - 1);
        self.keys[slot] = self.keys[last];
        self.values[slot] = self.values[last];
        self.tags.remove(slot);
        value
    }

    fn len(&self) -> usize {
        self.tags.len()
    }

    fn entries(&self) -> impl Iterator<Item = Entry> {
        let pairs = self.keys.iter().zip(&self.values).take(self.len());
        pairs.map(|(key, value)| Entry { key: *key, value: *value })
    }
}

/// What came of setting a value.
enum Set {
    Was(u32),
    IsNew,
    NotHere,
}

/// One sub-table.
#[derive(Debug, Default)]
pub(super) struct Shard {
    buckets: Vec<Bucket>,
    len: usize,
    /// Entries that it may have before it grows.
    limit: usize,
}

impl Shard {
    pub(super) fn iter(&self) -> impl Iterator<Item = Entry> {
        self.buckets.iter().flat_map(Bucket::entries)
    }

    fn with_buckets(buckets: usize) -> Self {
        Self { buckets: vec![Bucket::EMPTY; buckets], len: 0, limit: Self::limit(buckets) }
    }

    /// Entries that so many buckets may hold: at three quarters, one look-up in ten goes beyond its first bucket. Fuller
    /// ones cost more than they save, as each look-up that goes further waits for memory again.
    const fn limit(buckets: usize) -> usize {
        buckets * SLOTS * 3 / 4
    }

    /// Buckets for so many entries and some more.
    const fn buckets_for(entries: usize) -> usize {
        entries.div_ceil(3) + 1
    }

    /// By the upper half of the hash, in its order: a table that grows is read and written from start to end.
    fn home(&self, mixed: u64) -> usize {
        (((mixed >> 32) * self.buckets.len() as u64) >> 32) as usize
    }

    fn next(&self, at: usize) -> usize {
        if at + 1 < self.buckets.len() { at + 1 } else { 0 }
    }

    /// Bucket and slot of a key, from its home on.
    #[inline]
    fn find(&self, mut at: usize, key: u64, tag: u32) -> Option<(usize, usize)> {
        for _ in 0..self.buckets.len() {
            let bucket = &self.buckets[at];
            if let Some(slot) = bucket.position(key, tag) {
                return Some((at, slot));
            }
            if bucket.tags.passed() == 0 {
                break;
            }
            at = self.next(at);
        }
        None
    }

    /// Sets the value of a key in the first bucket where it can stand. Most keys stand there, or nowhere. Else nothing
    /// is done.
    #[inline]
    fn set_at_home(&mut self, home: usize, entry: Entry, tag: u32) -> Set {
        let Some(bucket) = self.buckets.get_mut(home) else { return Set::NotHere };
        if let Some(slot) = bucket.position(entry.key, tag) {
            return Set::Was(std::mem::replace(&mut bucket.values[slot], entry.value));
        }
        if bucket.tags.passed() == 0 && self.len < self.limit && bucket.push(entry, tag) {
            self.len += 1;
            return Set::IsNew;
        }
        Set::NotHere
    }

    /// Sets the value of a key wherever it stands.
    #[cold]
    fn set(&mut self, entry: Entry, mixed: u64, secret: u64) -> Option<u32> {
        let tag = tag_of(mixed);
        if let Some((at, slot)) = self.find(self.home(mixed), entry.key, tag) {
            return Some(std::mem::replace(&mut self.buckets[at].values[slot], entry.value));
        }
        if self.len >= self.limit {
            self.resize((2 * self.buckets.len()).max(1), secret);
        }
        self.add(self.home(mixed), entry, tag);
        None
    }

    /// Adds an entry that is not there, to a table that has room.
    #[inline]
    fn add(&mut self, mut at: usize, entry: Entry, tag: u32) {
        while !self.buckets[at].push(entry, tag) {
            self.buckets[at].tags.pass();
            at = self.next(at);
        }
        self.len += 1;
    }

    fn remove(&mut self, key: u64, mixed: u64) -> Option<u32> {
        let mut at = self.home(mixed);
        let (found, slot) = self.find(at, key, tag_of(mixed))?;
        while at != found {
            self.buckets[at].tags.unpass();
            at = self.next(at);
        }
        self.len -= 1;
        Some(self.buckets[found].remove(slot))
    }

    #[cold]
    fn resize(&mut self, buckets: usize, secret: u64) {
        let old = std::mem::replace(self, Self::with_buckets(buckets));
        for bucket in &old.buckets {
            for entry in bucket.entries() {
                let mixed = mix(entry.key, secret);
                self.add(self.home(mixed), entry, tag_of(mixed));
            }
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct RefMap {
    shards: Box<[Shard; SHARDS]>,
    len: usize,
    secret: u64,
}

impl RefMap {
    /// The share of its limit under which a table shrinks; below the half that it has after it has grown.
    const LEAST_FILL: (usize, usize) = (9, 19);

    /// What an entry costs at a table's lowest fill, in bytes.
    pub(super) const ENTRY_BYTES: usize =
        6 * size_of::<Bucket>() * Self::LEAST_FILL.1 / (Shard::limit(6) * Self::LEAST_FILL.0);

    /// An empty map; `secret` keeps engine hashes chosen by others from meeting in one bucket.
    pub(super) fn new(secret: u64) -> Self {
        Self { shards: Box::new(std::array::from_fn(|_| Shard::default())), len: 0, secret }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn get(&self, key: u64) -> Option<u32> {
        let mixed = mix(key, self.secret);
        let shard = &self.shards[shard_of(mixed)];
        let (at, slot) = shard.find(shard.home(mixed), key, tag_of(mixed))?;
        Some(shard.buckets[at].values[slot])
    }

    /// Brings near what look-ups of these keys will need. Nothing is done with the answers, so none waits for another:
    /// the processor has several under way at a time. Doubles the rate of long stores.
    pub(super) fn touch(&self, keys: &[EngineHash]) {
        let seen = keys.iter().fold(0, |seen, key| {
            let mixed = mix(key.0, self.secret);
            let shard = &self.shards[shard_of(mixed)];
            let tags = |at: usize| shard.buckets.get(at).map_or(Tags(0), |bucket| bucket.tags);
            let home = shard.home(mixed);
            // No branch on what is still on its way: the bucket again, or the next one.
            seen ^ tags(home + tags(home).len() / SLOTS).0
        });
        std::hint::black_box(seen);
    }

    /// Sets the value and returns the one before.
    pub(super) fn insert(&mut self, key: u64, value: u32) -> Option<u32> {
        let (entry, mixed) = (Entry { key, value }, mix(key, self.secret));
        let shard = &mut self.shards[shard_of(mixed)];
        let old = match shard.set_at_home(shard.home(mixed), entry, tag_of(mixed)) {
            Set::Was(old) => return Some(old),
            Set::IsNew => None,
            Set::NotHere => shard.set(entry, mixed, self.secret),
        };
        self.len += usize::from(old.is_none());
        old
    }

    pub(super) fn remove(&mut self, key: u64) -> Option<u32> {
        let mixed = mix(key, self.secret);
        let shard = &mut self.shards[shard_of(mixed)];
        let value = shard.remove(key, mixed)?;
        self.len -= 1;
        let buckets = shard.buckets.len();
        if shard.len * Self::LEAST_FILL.1 < shard.limit * Self::LEAST_FILL.0 && buckets > 1 {
            shard.resize(Shard::buckets_for(shard.len).min(buckets - 1), self.secret);
        }
        Some(value)
    }

    pub(super) fn shard(&self, at: usize) -> &Shard {
        &self.shards[at]
    }

    /// Takes a sub-table apart from its end, so many buckets at most, and visits the values, each with how often it counts:
    /// once, or not at all if it was removed long ago or is 0. No branch decides that, as the processor cannot guess how
    /// many of a bucket's places are in use. From the first time on, only more of it may follow. Returns the number of values
    /// that counted.
    pub(super) fn drain(&mut self, at: usize, buckets: usize, mut visit: impl FnMut(u32, u32)) -> usize {
        let shard = &mut self.shards[at];
        let left = shard.buckets.len().saturating_sub(buckets);
        let mut count = 0;
        for bucket in &shard.buckets[left..] {
            let len = bucket.len();
            count += len;
            bucket.values.iter().enumerate().for_each(|(slot, value)| visit(*value, u32::from(slot < len)));
        }
        shard.buckets.truncate(left);
        shard.len -= count;
        self.len -= count;
        if left == 0 {
            *shard = Shard::default();
        }
        count
    }

    /// Whether [`Self::drain`] has nothing left to visit.
    pub(super) fn is_drained(&self, at: usize) -> bool {
        self.shards[at].buckets.is_empty()
    }

    /// The entries of so many buckets of a sub-table, from one on; `None` behind the last.
    pub(super) fn slice(
        &self,
        at: usize,
        from: usize,
        buckets: usize,
    ) -> Option<impl Iterator<Item = Entry>> {
        let behind = self.shards[at].buckets.get(from..).filter(|behind| !behind.is_empty())?;
        Some(behind[..buckets.min(behind.len())].iter().flat_map(Bucket::entries))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Entry> {
        self.shards.iter().flat_map(Shard::iter)
    }
}

fn mix(key: u64, secret: u64) -> u64 {
    fold(key ^ secret, 0x9E37_79B9_7F4A_7C15)
}

/// By the lowest bits; the bucket goes by the highest.
fn shard_of(mixed: u64) -> usize {
    mixed as usize % SHARDS
}

/// Never 0.
fn tag_of(mixed: u64) -> u32 {
    let tag = (mixed >> 16) as u32 & 0x1f;
    tag + u32::from(tag == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn allocated(map: &RefMap) -> usize {
        map.shards.iter().map(|shard| shard.buckets.capacity() * size_of::<Bucket>()).sum()
    }

    #[test]
    fn it_maps_like_any_map_and_gives_memory_back() {
        assert_eq!(size_of::<Bucket>(), 64);
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
    fn no_entry_costs_more_than_is_counted_at_any_fill() {
        let mut map = RefMap::new(3);
        let check = |map: &RefMap| {
            // Few entries share what every map has.
            let counted = map.len() * RefMap::ENTRY_BYTES + SHARDS * 2 * size_of::<Bucket>();
            assert!(allocated(map) <= counted, "{} bytes for {} entries", allocated(map), map.len());
        };
        for key in 0..50_000u64 {
            map.insert(key, 0);
            check(&map);
        }
        for key in 0..50_000u64 {
            map.remove(key);
            check(&map);
        }
    }

    #[test]
    fn it_agrees_with_a_plain_map_while_it_grows_and_shrinks() {
        for seed in 0..4 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let (mut map, mut model) = (RefMap::new(seed), HashMap::new());
            for step in 0..200_000u32 {
                // Few keys and many removals, so that keys come back and buckets that were full are not.
                let key = rng.u64(..20_000) << 40;
                if rng.u32(..100_000) < step % 100_000 {
                    assert_eq!(map.remove(key), model.remove(&key));
                } else {
                    assert_eq!(map.insert(key, step), model.insert(key, step));
                }
                let other = rng.u64(..20_000) << 40;
                assert_eq!(map.get(other), model.get(&other).copied());
            }
            assert_eq!(map.len(), model.len());
            assert!(map.iter().all(|entry| model.get(&entry.key) == Some(&entry.value)));
            for (key, value) in model.drain() {
                assert_eq!(map.remove(key), Some(value));
            }
            let passed = map.shards.iter().flat_map(|shard| &shard.buckets).map(|bucket| bucket.tags.0);
            assert_eq!(passed.sum::<u32>(), 0, "what is empty has no traces of what was there");
        }
    }

    #[test]
    fn keys_of_one_bucket_are_found_wherever_they_stand() {
        // All with one hash: they fill bucket after bucket, and more pass them than can be counted.
        let mut shard = Shard::with_buckets(40);
        for key in 0..160 {
            shard.add(39, Entry { key, value: key as u32 }, tag_of(u64::MAX));
        }
        for key in (0..160).step_by(3) {
            assert_eq!(shard.remove(key, u64::MAX), Some(key as u32));
        }
        for key in 0..160 {
            assert_eq!(shard.find(39, key, tag_of(u64::MAX)).is_some(), key % 3 != 0, "{key}");
        }
        assert_eq!(shard.find(39, 160, tag_of(u64::MAX)), None);
    }

    #[test]
    fn keys_that_count_up_spread_over_all_shards() {
        let mut map = RefMap::new(1);
        for key in 0..64_000u64 {
            map.insert(key, 0);
        }
        let sizes: Vec<_> = (0..SHARDS).map(|at| map.shard(at).len).collect();
        assert!(sizes.iter().all(|size| (700..1300).contains(size)), "{sizes:?}");
    }

    #[test]
    fn slices_have_every_entry_once() {
        let mut map = RefMap::new(2);
        for key in 0..1000u64 {
            map.insert(key, 1);
        }
        let mut seen = Vec::new();
        for at in 0..SHARDS {
            let mut from = 0;
            while let Some(entries) = map.slice(at, from, 3) {
                seen.extend(entries.map(|entry| entry.key));
                from += 3;
            }
        }
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..1000));
    }
}
