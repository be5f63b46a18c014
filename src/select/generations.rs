//! A bounded map that forgets what was not used for longest.

use hashbrown::HashMap;
use std::hash::Hash;

/// Two generations of entries: when the young one is full it becomes the old one, and the old one is forgotten. An
/// entry lives for at least `capacity / 2` other entries after its last use; no list of uses is kept.
#[derive(Debug)]
pub(super) struct Generations<K, V> {
    young: HashMap<K, V>,
    old: HashMap<K, V>,
    half: usize,
}

impl<K: Hash + Eq, V: Copy> Generations<K, V> {
    /// A map of at most `capacity` entries (at least 2).
    pub(super) fn new(capacity: usize) -> Self {
        Self { young: HashMap::new(), old: HashMap::new(), half: (capacity / 2).max(1) }
    }

    pub(super) fn get(&self, key: &K) -> Option<V> {
        self.young.get(key).or_else(|| self.old.get(key)).copied()
    }

    /// Sets an entry and makes it young.
    pub(super) fn set(&mut self, key: K, value: V) {
        self.old.remove(&key);
        if self.young.len() >= self.half && !self.young.contains_key(&key) {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(key, value);
    }

    pub(super) fn retain(&mut self, keep: impl Fn(&V) -> bool) {
        self.young.retain(|_, value| keep(value));
        self.old.retain(|_, value| keep(value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_bounded_and_forgets_the_longest_unused() {
        let mut map = Generations::new(10);
        for key in 0..1000u32 {
            map.set(key, key);
            map.set(7, 7);
            assert!(map.young.len() + map.old.len() <= 10);
        }
        assert_eq!(map.get(&7), Some(7), "used all the time");
        assert_eq!(map.get(&999), Some(999));
        assert_eq!(map.get(&500), None);
        map.retain(|value| *value != 7);
        assert_eq!(map.get(&7), None);
    }
}
