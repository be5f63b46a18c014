//! A map from the engine's names of blocks that never stops for long: in parts, of which one at a time grows or goes.

use super::map::SHARDS;
use crate::units::EngineHash;
use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use std::mem;

/// Parts of a map: as many as the engine map has, so that a rank's names are walked through part by part. Growing moves
/// one part's entries: of a million, 16,000.
pub(super) const PARTS: usize = SHARDS;

pub(super) type Part<V> = HashMap<EngineHash, V>;

/// See the module.
#[derive(Debug)]
pub(super) struct NameMap<V> {
    /// None before the first entry: most ranks need none of these maps.
    parts: Vec<Part<V>>,
    len: usize,
}

impl<V> NameMap<V> {
    /// Seven of eight places are used before a table doubles, and each has a byte of its own.
    const ENTRY_BYTES: usize = (size_of::<(EngineHash, V)>() + 1) * 16 / 7;

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Memory, each entry at the lowest fill that a table has after it has grown.
    pub(super) fn bytes(&self) -> usize {
        self.len * Self::ENTRY_BYTES
    }

    pub(super) fn contains(&self, name: EngineHash) -> bool {
        self.get(name).is_some()
    }

    pub(super) fn get(&self, name: EngineHash) -> Option<&V> {
        self.parts.get(part_of(name))?.get(&name)
    }

    pub(super) fn get_mut(&mut self, name: EngineHash) -> Option<&mut V> {
        self.parts.get_mut(part_of(name))?.get_mut(&name)
    }

    /// The value of a name; a new one if it had none.
    pub(super) fn or_insert(&mut self, name: EngineHash, new: V) -> &mut V {
        if self.parts.is_empty() {
            self.parts.resize_with(PARTS, HashMap::new);
        }
        match self.parts[part_of(name)].entry(name) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                self.len += 1;
                entry.insert(new)
            }
        }
    }

    pub(super) fn remove(&mut self, name: EngineHash) -> Option<V> {
        let part = self.parts.get_mut(part_of(name))?;
        let value = part.remove(&name)?;
        if part.is_empty() {
            mem::take(part);
        }
        self.len -= 1;
        Some(value)
    }

    /// The entries of one part.
    pub(super) fn part(&self, at: usize) -> impl Iterator<Item = (EngineHash, &V)> {
        self.parts.get(at).into_iter().flatten().map(|(name, value)| (*name, value))
    }

    /// Takes one part out.
    pub(super) fn take_part(&mut self, at: usize) -> Part<V> {
        let part = self.parts.get_mut(at).map(mem::take).unwrap_or_default();
        self.len -= part.len();
        part
    }

    /// All names: for what tests and debug builds check.
    #[cfg(any(test, debug_assertions))]
    pub(super) fn iter(&self) -> impl Iterator<Item = (EngineHash, &V)> {
        (0..PARTS).flat_map(|at| self.part(at))
    }
}

impl<V> Default for NameMap<V> {
    fn default() -> Self {
        Self { parts: Vec::new(), len: 0 }
    }
}

fn part_of(name: EngineHash) -> usize {
    (name.0 ^ name.0 >> 32) as usize % PARTS
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn it_maps_like_any_map() {
        let mut rng = fastrand::Rng::with_seed(1);
        let (mut map, mut model) = (NameMap::default(), BTreeMap::new());
        for step in 0..20_000 {
            let name = EngineHash(rng.u64(..3_000) << rng.u32(..40));
            if rng.bool() {
                *map.or_insert(name, 0) += step;
                *model.entry(name).or_insert(0) += step;
            } else {
                assert_eq!(map.remove(name), model.remove(&name));
            }
            assert_eq!((map.len(), map.is_empty()), (model.len(), model.is_empty()));
            assert_eq!(map.get(name), model.get(&name));
        }
        let all: BTreeMap<EngineHash, i32> = map.iter().map(|(name, value)| (name, *value)).collect();
        assert_eq!(all, model);
        let taken: BTreeMap<EngineHash, i32> = (0..PARTS).flat_map(|at| map.take_part(at)).collect();
        assert_eq!((taken, map.len()), (model, 0));
    }

    #[test]
    fn one_part_is_a_small_share_of_it() {
        let mut map = NameMap::default();
        (0..64_000).for_each(|name| _ = map.or_insert(EngineHash(name), ()));
        assert!((0..PARTS).all(|at| map.part(at).count() == 1_000));
    }
}
