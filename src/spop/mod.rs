//! The agent's side of the protocol between HAProxy and its agents: SPOP 2.0 (HAProxy `doc/SPOE.txt` §3).
//!
//! From the bottom up:
//!
//! | module | what it is |
//! |---|---|
//! | [`status`], [`error`] | disconnect status codes; which breach of the protocol means which code |
//! | [`varint`], [`value`], [`frame`] | integers, typed data, frame headers |
//! | [`decode`], [`hello`] | bytes → messages and key-value lists, borrowed; the handshake's terms |
//! | [`actions`], [`encode`] | what an answer says; frames → bytes |
//! | [`admission`] | how many requests and body bytes may be in flight |
//! | [`client`] | HAProxy's side of a health check |
//! | [`session`] | one connection without its socket: bytes and time in, events and bytes out |
//! | [`listen`], `slots`, [`server`] | sockets, places for connections, one task each, deadlines, shutdown |
//!
//! Left out: `async` (answers over another connection than the NOTIFY's), which HAProxy offers up to 3.0 and an agent
//! need not take; and fragmented answers, which HAProxy cannot read.

pub mod actions;
pub mod admission;
pub mod client;
mod connection;
pub mod decode;
pub mod encode;
pub mod error;
pub mod frame;
mod handler;
pub mod hello;
mod in_flight;
pub mod listen;
mod log_limit;
pub mod server;
pub mod session;
mod slots;
pub mod status;
pub mod value;
pub mod varint;

pub use actions::{Actions, Scope};
pub use decode::{Message, messages};
pub use error::DecodeError;
pub use handler::{Handler, Unanswered};
pub use listen::ListenAddr;
pub use server::{BindError, Server, ServerConfig, ServerLimits};
pub use value::Value;
