//! Prompts of kvspoa, from its sources, to be measured.
#![forbid(unsafe_code)]
// Of the included sources the bench uses a part only.
#![allow(dead_code)]

pub mod config;
#[path = "../../src/hash.rs"]
pub mod hash;
#[path = "../../src/prompt/mod.rs"]
pub mod prompt;
#[path = "../../src/recent.rs"]
mod recent;
pub mod request;
#[path = "../../src/units.rs"]
pub mod units;
