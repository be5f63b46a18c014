//! The hash chain, the wire decoder and the index of kvspoa, from its sources, and what is needed to measure them.
#![forbid(unsafe_code)]
// Of the included sources the benches use a part only.
#![allow(dead_code)]

pub mod events;
#[path = "../../src/hash.rs"]
pub mod hash;
#[path = "../../src/index/mod.rs"]
pub mod index;
#[path = "../../src/units.rs"]
pub mod units;
pub mod wire;
pub mod workload;
