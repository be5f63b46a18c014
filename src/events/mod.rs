//! The KV events of the replicas: wire formats, sequence numbers, sockets.
//!
//! [`Subscriber`] owns the sockets and hands each message to its rank's [`stream::Stream`], which decides in which
//! order batches count; a [`Batch`] decodes them for the [`Sink`].

mod batch;
mod endpoint;
mod event;
mod groups;

mod msgpack;
pub mod probe;
mod sink;
pub mod stream;
mod subscriber;
mod wire;

pub use crate::metrics::FeedLabels;
pub use batch::{Batch, SkipReason};
pub use endpoint::{Endpoint, EndpointError};
pub use event::{KvEvent, Stored};
pub use groups::Groups;
pub use sink::Sink;
pub use stream::{DegradedReason, Doubt, FeedState, ResetReason, SuspendReason};
pub use subscriber::{AddError, Feed, SocketError, Subscriber, SubscriberConfig};
pub use wire::{BatchError, has_named_fields};
