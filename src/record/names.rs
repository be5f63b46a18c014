//! Numbers in place of hashes: they tell what is equal, and nothing else.

use hashbrown::HashMap;

/// Memory of one entry, with what a hash table leaves empty.
pub(super) const BYTES_PER_NAME: usize = 32;

/// Numbers by hash, in the order in which the hashes were first seen. Two generations: what was not used for long gets
/// another number when it comes again, as if it were new.
#[derive(Debug)]
pub(super) struct Names {
    young: HashMap<u64, u64>,
    old: HashMap<u64, u64>,
    half: usize,
    next: u64,
}

impl Names {
    /// Of at most so many hashes (at least 2) at a time.
    pub(super) fn new(capacity: usize) -> Self {
        Self { young: HashMap::new(), old: HashMap::new(), half: (capacity / 2).max(1), next: 1 }
    }

    pub(super) fn of(&mut self, hash: u64) -> u64 {
        if let Some(name) = self.young.get(&hash) {
            return *name;
        }
        let name = self.old.remove(&hash).unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        });
        if self.young.len() >= self.half {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(hash, name);
        name
    }

    /// The numbers of many, as runs.
    pub(super) fn runs(&mut self, hashes: impl Iterator<Item = u64>) -> Vec<(u64, u32)> {
        let mut runs: Vec<(u64, u32)> = Vec::new();
        for hash in hashes {
            let name = self.of(hash);
            match runs.last_mut() {
                Some((first, count)) if *first + u64::from(*count) == name => *count += 1,
                _ => runs.push((name, 1)),
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_that_goes_on_is_the_same_run_and_one_more() {
        let mut names = Names::new(100);
        assert_eq!(names.runs([70, 50, 60].into_iter()), [(1, 3)]);
        assert_eq!(names.runs([9, 8].into_iter()), [(4, 2)]);
        assert_eq!(names.runs([70, 50, 60, 11].into_iter()), [(1, 3), (6, 1)]);
        assert_eq!(names.runs([70, 50, 60, 11, 12].into_iter()), [(1, 3), (6, 2)]);
    }

    #[test]
    fn what_was_not_used_for_long_is_new_again() {
        let mut names = Names::new(10);
        let first = names.of(1);
        for hash in 100..104 {
            names.of(hash);
        }
        assert_eq!(names.of(1), first);
        for hash in 1000..1100 {
            names.of(hash);
            assert!(names.young.len() + names.old.len() <= 10);
        }
        assert_ne!(names.of(1), first);
    }
}
