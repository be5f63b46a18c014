//! kvspoa: a KV-cache-aware routing agent for HAProxy.
//!
//! The modules from the bottom up; each imports only from those above it in this list (ARCHITECTURE.md, "Layers").
//!
//! | module | what it is |
//! |---|---|
//! | [`units`], [`hash`], [`metrics`] | identifiers, the hash chain, every metric's name |
//! | [`spop`] | the protocol between HAProxy and its agents |
//! | [`request`] | what HAProxy hands over → what must be routed |
//! | [`events`] | the replicas' KV events: wire formats, sequence numbers, sockets |
//! | [`lifecycle`] | HAProxy's log lines → the end of a request |
//! | [`prompt`] | prompt input → text → token ids |
//! | [`index`] | which rank holds which block |
//! | [`select`] | loads, bookings, the cost and the choice |
//! | [`haproxy_config`] | the configuration that HAProxy needs |
//! | [`sim`] | a simulated replica, for the demo, tests and benchmarks |

pub mod events;
pub mod haproxy_config;
pub mod hash;
pub mod index;
pub mod lifecycle;
pub mod metrics;
pub mod prompt;
pub mod request;
pub mod select;
pub mod sim;
pub mod spop;
pub mod units;
