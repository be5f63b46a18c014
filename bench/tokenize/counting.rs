//! The system's allocator, with a count of the bytes that were asked for.

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};

pub struct Counting(AtomicUsize);

impl Counting {
    pub const fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    /// The bytes that `call` asks for; nothing else may run.
    pub fn by<T>(&self, call: impl FnOnce() -> T) -> usize {
        let before = self.0.load(Ordering::Relaxed);
        black_box(call());
        self.0.load(Ordering::Relaxed) - before
    }
}

// SAFETY: every call is the system allocator's own.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.0.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        self.0.fetch_add(size.saturating_sub(layout.size()), Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.realloc(memory, layout, size) }
    }
}
