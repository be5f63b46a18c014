//! The rules behind `findings`, by what they look at.

pub(super) mod global;
pub(super) mod log;
pub(super) mod pool;
pub(super) mod spoe;

#[cfg(test)]
mod tests;
