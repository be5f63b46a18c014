//! What HAProxy hands over → what must be routed.

mod anthropic;
pub mod body;
pub mod conversation;
mod generate;
pub mod harmony;
mod head;
mod json;
mod lengths;
pub mod limits;
mod list;
pub mod notify;
pub mod partial;
mod plain;
mod responses;
mod scan;
mod seen;
mod text;
mod tools;

pub use body::Endpoint;
pub use notify::{NotifyError, RoutingRequest};
pub use seen::SeenMessages;
pub use tools::Tools;
