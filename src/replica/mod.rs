//! What HAProxy and the engines say of themselves when asked: the state of every server, and how busy each engine is.
//!
//! | module | what it is |
//! |---|---|
//! | `socket` | the client of HAProxy's runtime socket: the only I/O here |
//! | `table`, `servers` | its answers by column name, and the servers of one backend made of them |
//! | `engine` | the engine's `/metrics` page |
//! | `sightings` | what the last polls prove about requests whose end nobody told |

mod engine;
mod servers;
mod sightings;
mod socket;
mod table;

pub use engine::{EngineReport, parse_engine_page};
pub use servers::{AnswerError, Process, Server, ServerState, commands, parse_process, parse_servers};
pub use sightings::{Sightings, Verdict};
pub use socket::{RuntimeSocket, SocketError};
