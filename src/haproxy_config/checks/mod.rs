//! The rules behind `findings`, by what they look at.

pub(super) mod global;
pub(super) mod log;
pub(super) mod pool;
pub(super) mod spoe;

pub use global::BUFFERS_PER_CLIENT;

#[cfg(test)]
mod tests;
