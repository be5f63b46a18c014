//! The part of kvspoa's `request` that has nothing to do with HAProxy.

#[path = "../../src/request/anthropic.rs"]
mod anthropic;
#[path = "../../src/request/body.rs"]
pub mod body;
#[path = "../../src/request/conversation.rs"]
pub mod conversation;
#[path = "../../src/request/generate.rs"]
mod generate;
#[path = "../../src/request/harmony.rs"]
pub mod harmony;
#[path = "../../src/request/head.rs"]
mod head;
#[path = "../../src/request/json.rs"]
mod json;
#[path = "../../src/request/lengths.rs"]
mod lengths;
#[path = "../../src/request/limits.rs"]
pub mod limits;
#[path = "../../src/request/list.rs"]
mod list;
#[path = "../../src/request/partial.rs"]
pub mod partial;
#[path = "../../src/request/plain.rs"]
mod plain;
#[path = "../../src/request/responses.rs"]
mod responses;
#[path = "../../src/request/scan.rs"]
mod scan;
#[path = "../../src/request/seen.rs"]
mod seen;
#[path = "../../src/request/text.rs"]
mod text;
#[path = "../../src/request/tools.rs"]
mod tools;

pub use body::Endpoint;
pub use seen::SeenMessages;
pub use tools::Tools;
