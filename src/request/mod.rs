//! What HAProxy hands over → what must be routed.

pub mod body;
pub mod conversation;
mod json;
pub mod notify;

pub use body::Endpoint;
pub use notify::{NotifyError, RoutingRequest};
