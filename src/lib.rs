//! kvspoa: a KV-cache-aware routing agent for HAProxy.
//!
//! The modules from the bottom up; each imports only from those above it in this list (ARCHITECTURE.md, "Layers").
//!
//! | module | what it is |
//! |---|---|
//! | [`units`], [`hash`], `recent`, [`pulse`], [`machine`], [`metrics`] | identifiers, the hash chain, bounded caches, signs of life, the machine's memory, every metric's name |
//! | [`spop`] | the protocol between HAProxy and its agents |
//! | [`request`] | what HAProxy hands over → what must be routed |
//! | [`events`] | the replicas' KV events: wire formats, sequence numbers, sockets |
//! | [`lifecycle`] | HAProxy's log lines → the end of a request |
//! | [`prompt`] | prompt input → text → token ids |
//! | [`replica`] | what HAProxy and the engines say of themselves |
//! | [`index`] | which rank holds which block |
//! | [`select`] | loads, bookings, the cost and the choice |
//! | [`haproxy_config`], [`config`] | the configuration that HAProxy needs, and our own |
//! | [`pool`] | one HAProxy backend at work: model, index and scheduler |
//! | [`route`] | the pipeline of one request, and the record of its decision |
//! | [`admin`], [`client`] | the admin port, and a small HTTP client |
//! | [`sim`] | a simulated replica, for the demo, tests and benchmarks |
//! | [`hub`] | fetching models |
//! | [`agent`] | binds everything, runs it, shuts it down |
//! | [`doctor`] | proves the chain on the live system |
//! | [`replay`] | workloads through modelled replicas in virtual time |
//! | [`demo`], [`cli`] | the demonstration and the commands |

pub mod admin;
pub mod agent;
pub mod cli;
pub mod client;
pub mod config;
pub mod demo;
pub mod doctor;
pub mod events;
pub mod haproxy_config;
pub mod hash;
pub mod hub;
pub mod index;
pub mod lifecycle;
pub mod machine;
pub mod metrics;
pub mod peers;
pub mod pool;
pub mod prompt;
pub mod pulse;
mod recent;
pub mod record;
pub mod replay;
pub mod replica;
pub mod request;
pub mod route;
pub mod select;
pub mod sim;
pub mod spop;
pub mod units;
