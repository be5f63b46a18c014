//! What the simulated engine takes and gives: requests, tokens, events, load.

use super::cache::Prompt;
use super::events::Event;
use crate::units::TokenId;

/// A number that the engine's user gives a request.
pub type JobId = u64;

/// A request: what to compute and what to answer.
#[derive(Clone, Debug)]
pub struct Job {
    /// Distinct among the requests that the engine has.
    pub id: JobId,
    /// The prompt.
    pub prompt: Prompt,
    /// The tokens that the model will generate; at least one.
    pub answer: Vec<TokenId>,
}

/// The engine can never run the request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum JobError {
    /// No prompt, or no answer.
    #[error("a request needs at least one prompt token and one token to generate")]
    Empty,
    /// Longer than the cache.
    #[error("the request needs {needed_tokens} tokens, the KV cache holds {capacity_tokens}")]
    TooLong {
        /// Prompt and answer.
        needed_tokens: usize,
        /// All blocks but the one set aside.
        capacity_tokens: usize,
    },
}

/// One generated token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Output {
    /// The request.
    pub id: JobId,
    /// The token.
    pub token: TokenId,
    /// What the caches served of the prompt.
    pub cached: Cached,
    /// No token follows.
    pub is_last: bool,
}

/// What the caches served of a prompt, in tokens, when the request was first admitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Cached {
    /// From device memory.
    pub device_tokens: usize,
    /// From the CPU tier.
    pub host_tokens: usize,
    /// Tokens of full prompt blocks that were not served and are cached from now on.
    pub created_tokens: usize,
}

impl Cached {
    /// `usage.prompt_tokens_details.cached_tokens`.
    #[must_use]
    pub const fn tokens(self) -> usize {
        self.device_tokens + self.host_tokens
    }
}

/// What a step brought.
#[derive(Debug, Default)]
pub struct StepReport {
    /// One token for each request that computed all it had.
    pub outputs: Vec<Output>,
    /// The batch to publish; nothing is published if it is empty.
    pub events: Vec<Event>,
}

/// The load signals, under the names of vLLM's metrics.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct EngineStats {
    /// `vllm:num_requests_running`.
    pub running: usize,
    /// `vllm:num_requests_waiting`.
    pub waiting: usize,
    /// `vllm:kv_cache_usage_perc`, 0 to 1.
    pub usage: f64,
    /// `vllm:prefix_cache_queries_total`, in tokens.
    pub queried_tokens: u64,
    /// `vllm:prefix_cache_hits_total`, in tokens.
    pub hit_tokens: u64,
    /// `vllm:external_prefix_cache_queries_total`, in tokens.
    pub host_queried_tokens: u64,
    /// `vllm:external_prefix_cache_hits_total`, in tokens.
    pub host_hit_tokens: u64,
    /// `vllm:num_preemptions_total`.
    pub preemptions: u64,
    /// `vllm:prompt_tokens_total`.
    pub prompt_tokens: u64,
    /// `vllm:generation_tokens_total`.
    pub generated_tokens: u64,
    /// `vllm:time_to_first_token_seconds_count`.
    pub first_tokens: u64,
    /// `vllm:prompt_tokens_by_source_total{source="local_compute"}`: with the first token, as vLLM counts.
    pub computed_tokens: u64,
}
