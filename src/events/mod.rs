//! The KV events of the replicas: wire formats, sequence numbers, sockets.

mod event;

pub use event::{KvEvent, Stored};
