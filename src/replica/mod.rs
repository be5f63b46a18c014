//! What HAProxy and the engines say of themselves when asked: the state of every server, and how busy each engine is.
//!
//! | module | what it is |
//! |---|---|
//! | `socket` | the client of HAProxy's runtime socket: the only I/O here |
//! | `table`, `servers` | its answers by column name, and the servers of one backend made of them |
//! | `buffers` | what HAProxy's buffers may cost, by its answers |
//! | `engine`, `models`, `sources` | the engine's `/metrics` page, what it serves, and where its KV events are |
//! | `membership` | which replicas the pool should have |
//! | `token_channel` | the line on which a replica of Ray Serve takes prompts' tokens |
//! | `sightings` | what the last polls prove about requests whose end nobody told |

mod buffers;
mod engine;
mod membership;
mod models;
mod servers;
mod sightings;
mod socket;
mod sources;
mod table;
mod token_channel;

pub use buffers::{BUFFER_COMMANDS, Buffers};
pub use engine::{EngineReport, parse_engine_page};
pub use membership::{Change, Membership, changes};
pub use models::{ServedModel, parse_models};
pub use servers::{AnswerError, Process, Server, ServerState, commands, parse_process, parse_servers};
pub use sightings::{Sightings, Verdict};
pub use socket::{RuntimeSocket, SocketError};
pub use sources::{Source, Sources, parse_sources};
pub use token_channel::{HEADER as TOKEN_KEY_HEADER, TokenChannel, TokenChannels, TokenKey};
