//! The part of kvspoa's `config` that prompts depend on.

#[path = "../../src/config/rendering.rs"]
mod rendering;

pub use rendering::{Compat, ContentFormat, Rendering};
