//! The KV events of the replicas: wire formats, sequence numbers, sockets.

mod batch;
mod event;
mod groups;
mod msgpack;
mod wire;

pub use batch::{Batch, SkipReason};
pub use event::{KvEvent, Stored};
pub use groups::Groups;
pub use wire::BatchError;
