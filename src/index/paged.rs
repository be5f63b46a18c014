//! A list that grows without moving what it holds, so that no push takes long.

use std::ops::{Index, IndexMut};

/// Elements of a page: 64 KiB of the largest elements that we keep.
const PAGE: usize = 1024;

/// See the module.
#[derive(Debug)]
pub(super) struct Paged<T> {
    pages: Vec<Vec<T>>,
    len: usize,
}

impl<T> Paged<T> {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn get(&self, at: u32) -> Option<&T> {
        self.pages.get(at as usize / PAGE)?.get(at as usize % PAGE)
    }

    /// Appends, and returns the place.
    pub(super) fn push(&mut self, value: T) -> u32 {
        let at = self.len;
        if at.is_multiple_of(PAGE) {
            self.pages.push(Vec::with_capacity(PAGE));
        }
        self.pages[at / PAGE].push(value);
        self.len += 1;
        at as u32
    }
}

impl<T> Default for Paged<T> {
    fn default() -> Self {
        Self { pages: Vec::new(), len: 0 }
    }
}

impl<T> Index<u32> for Paged<T> {
    type Output = T;

    fn index(&self, at: u32) -> &T {
        &self.pages[at as usize / PAGE][at as usize % PAGE]
    }
}

impl<T> IndexMut<u32> for Paged<T> {
    fn index_mut(&mut self, at: u32) -> &mut T {
        &mut self.pages[at as usize / PAGE][at as usize % PAGE]
    }
}
