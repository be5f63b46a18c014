//! One decision as it is written: a line of JSON.

use serde::{Deserialize, Serialize};

/// The version of the lines' form.
pub const FORM: u32 = 1;

/// One decision and what became of its request. Names of blocks and sessions are numbers that mean nothing but "the same
/// again": equal numbers of blocks are equal beginnings of prompts.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Line {
    /// [`FORM`].
    pub kvspoa: u32,
    /// When the request came, in milliseconds since 1970.
    pub at_ms: u64,
    /// The HAProxy backend.
    pub pool: String,
    /// `on`: HAProxy was told; `shadow`: it balanced.
    pub mode: String,
    /// The session, or what stands for it.
    pub session: Option<u64>,
    /// The prompt's length; an estimate where it has no blocks.
    pub prompt_tokens: u32,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// The prompt's full blocks in their order, as runs of consecutive numbers: the first one, and how many.
    pub blocks: Vec<(u64, u32)>,
    /// The server that kvspoa chose.
    pub chosen: Option<String>,
    /// Prompt tokens that it was confirmed to hold.
    pub chosen_cached: u32,
    /// The server that HAProxy used; null where its log line did not come.
    pub served: Option<String>,
    /// Prompt tokens that that one was confirmed to hold when the request came.
    pub served_cached: u32,
    /// From the request's departure to the headers of the answer, milliseconds.
    pub response_ms: Option<u64>,
    /// From the first byte of the request to the last of the answer, milliseconds.
    pub total_ms: Option<u64>,
    /// Whether the request ended well.
    pub normal: bool,
}
