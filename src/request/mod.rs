//! What HAProxy hands over → what must be routed.

pub mod body;
pub mod conversation;
mod json;
