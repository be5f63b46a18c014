//! The part of kvspoa's `events` that has no sockets.

#[path = "../../src/events/batch.rs"]
mod batch;
#[path = "../../src/events/event.rs"]
mod event;
#[path = "../../src/events/groups.rs"]
mod groups;
#[path = "../../src/events/msgpack.rs"]
mod msgpack;
#[path = "../../src/events/wire.rs"]
mod wire;

pub use batch::{Batch, SkipReason};
pub use event::{KvEvent, Stored};
pub use groups::Groups;
pub use wire::BatchError;
