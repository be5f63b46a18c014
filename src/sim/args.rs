//! The simulated replica's options.

use super::events::HashFormat;
use super::offload::OffloadConfig;
use super::timing::Timing;
use super::token_store::TokenLimits;
use clap::Parser;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// How a simulated replica is set up. The defaults make one on loopback, of a 14B model on one large GPU.
#[derive(Clone, Debug, clap::Args)]
pub struct ReplicaArgs {
    /// Address and port of the HTTP interface; port 0 is the system's choice
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8000")]
    pub listen: SocketAddr,
    /// ZeroMQ endpoint on which KV events are published; the rank is added to its port, a port of * is the system's choice
    #[arg(long, value_name = "ENDPOINT", default_value = "tcp://127.0.0.1:5557")]
    pub events: String,
    /// Connect to the endpoint of --events, where a subscriber listens, instead of binding it
    #[arg(long)]
    pub events_connect: bool,
    /// ZeroMQ endpoint that answers requests to replay KV events; its port as with --events
    #[arg(long, value_name = "ENDPOINT", default_value = "tcp://127.0.0.1:6557")]
    pub replay: String,
    /// ZeroMQ endpoint that takes prompts' tokens ahead of their requests, as replicas of Ray Serve do; its port as with --events [default: none]
    #[arg(long, value_name = "ENDPOINT")]
    pub tokens: Option<String>,
    /// How long such tokens are kept, in seconds
    #[arg(long, value_name = "SECONDS", env = "RAY_SERVE_LLM_KV_TOKEN_STAGING_TTL_S", default_value = "60", value_parser = crate::haproxy_config::seconds)]
    pub token_ttl: Duration,
    /// For how many prompts, the oldest go first
    #[arg(long, value_name = "COUNT", env = "RAY_SERVE_LLM_KV_TOKEN_STAGING_MAX_ENTRIES", default_value_t = 8192, value_parser = clap::value_parser!(u32).range(1..))]
    pub token_entries: u32,
    /// Their bytes together, likewise
    #[arg(long, value_name = "BYTES", env = "RAY_SERVE_LLM_KV_TOKEN_STAGING_MAX_BYTES", default_value_t = 1 << 30, value_parser = clap::value_parser!(u64).range(1..))]
    pub token_bytes: u64,
    /// Topic under which KV events are published
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub topic: String,
    /// Publish no KV events, as an engine that was not told to
    #[arg(long)]
    pub no_events: bool,
    /// How block hashes are written in KV events
    #[arg(long, value_enum, default_value_t = HashFormat::Int)]
    pub hash_format: HashFormat,
    /// Number of the first data-parallel rank
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    pub rank: u16,
    /// Data-parallel ranks, each with its own cache and its own KV events
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub ranks: u16,
    /// Directory with the model's tokenizer and chat template [default: a tiny model that is compiled in]
    #[arg(long, value_name = "DIRECTORY")]
    pub model_dir: Option<PathBuf>,
    /// Name of the model [default: the last part of --model-dir, or "tiny"]
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,
    /// Name of a LoRA adapter that can be asked for as a model; may be given several times
    #[arg(long = "lora", value_name = "NAME")]
    pub adapters: Vec<String>,
    /// Key that requests under /v1 must bring, as in `Authorization: Bearer KEY`
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<String>,
    /// Tell the tokens of a request under its path followed by /render, as vLLM does with this option
    #[arg(long)]
    pub enable_scale_out: bool,
    /// Longest prompt and answer together, in tokens [default: what the cache holds, at most 131072]
    #[arg(long, value_name = "TOKENS")]
    pub max_model_len: Option<usize>,
    /// Length of an answer that the request does not limit further, in tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    pub answer_tokens: u32,
    /// Size of a KV cache block, in tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub block_size: u32,
    /// Size of a block that /metrics tells of, in tokens [default: the real one]
    #[arg(long, value_name = "TOKENS")]
    pub told_block_size: Option<u32>,
    /// KV cache blocks in device memory, of which one is set aside
    #[arg(long, value_name = "COUNT", default_value_t = 32_768, value_parser = clap::value_parser!(u32).range(2..=16_777_216))]
    pub blocks: u32,
    /// KV cache blocks in the CPU tier; 0 is no such tier
    #[arg(long, value_name = "COUNT", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=67_108_864))]
    pub cpu_blocks: u32,
    /// Blocks that the CPU tier stores and loads together
    #[arg(long, value_name = "BLOCKS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub offload_chunk: u32,
    /// What KV events tell of the blocks in the CPU tier
    #[arg(long, value_enum, default_value_t = CpuEvents::SelfDescribing)]
    pub cpu_events: CpuEvents,
    /// Requests that run at once at most
    #[arg(long, value_name = "COUNT", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_sequences: u32,
    /// Tokens that one step of the engine computes at most
    #[arg(long, value_name = "TOKENS", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..))]
    pub step_tokens: u32,
    /// Prompt tokens that are computed a second; long contexts are slower
    #[arg(long, value_name = "TOKENS", default_value_t = 16_000.0, value_parser = positive)]
    pub prefill_tokens_per_second: f64,
    /// Duration of a step that computes next to nothing: the time between two tokens of an answer, in milliseconds
    #[arg(long, value_name = "MILLISECONDS", default_value = "10", value_parser = milliseconds)]
    pub decode_step: Duration,
    /// Tokens a second that the CPU tier loads
    #[arg(long, value_name = "TOKENS", default_value_t = 100_000.0, value_parser = positive)]
    pub cpu_tokens_per_second: f64,
}

/// What KV events tell of the CPU tier (vLLM's `self_describing_kv_events`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum CpuEvents {
    /// Tokens and parent of each block.
    SelfDescribing,
    /// The block's hash alone, vLLM's default.
    Placeholder,
}

impl Default for ReplicaArgs {
    fn default() -> Self {
        #[derive(Parser)]
        struct Alone {
            #[command(flatten)]
            args: ReplicaArgs,
        }
        Alone::parse_from(["replica"]).args
    }
}

impl ReplicaArgs {
    pub(super) fn offload(&self) -> Option<OffloadConfig> {
        (self.cpu_blocks > 0).then_some(OffloadConfig {
            blocks: self.cpu_blocks,
            chunk_blocks: self.offload_chunk,
            describes: self.cpu_events == CpuEvents::SelfDescribing,
        })
    }

    pub(super) fn token_limits(&self) -> TokenLimits {
        TokenLimits {
            time_to_live: self.token_ttl,
            max_entries: self.token_entries as usize,
            max_bytes: usize::try_from(self.token_bytes).unwrap_or(usize::MAX),
        }
    }

    pub(super) fn timing(&self) -> Timing {
        Timing {
            step: self.decode_step,
            prefill_tokens_per_second: self.prefill_tokens_per_second,
            load_tokens_per_second: self.cpu_tokens_per_second,
            ..Timing::default()
        }
    }
}

/// The endpoint of a rank: as in vLLM its number is added to the port, except where the system chooses.
pub(super) fn endpoint_of_rank(endpoint: &str, rank: u16) -> String {
    match endpoint.rsplit_once(':').and_then(|(base, port)| Some((base, port.parse::<u16>().ok()?))) {
        Some((base, port)) if port > 0 => format!("{base}:{}", port.saturating_add(rank)),
        _ => endpoint.to_owned(),
    }
}

fn positive(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if value > 0.0 { Ok(value) } else { Err("must be greater than 0".to_owned()) }
}

fn milliseconds(text: &str) -> Result<Duration, String> {
    let value: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    Duration::try_from_secs_f64(value / 1e3).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_added_to_the_port_unless_the_system_chooses_it() {
        assert_eq!(endpoint_of_rank("tcp://*:5557", 0), "tcp://*:5557");
        assert_eq!(endpoint_of_rank("tcp://*:5710", 3), "tcp://*:5713");
        assert_eq!(endpoint_of_rank("tcp://127.0.0.1:*", 3), "tcp://127.0.0.1:*");
        assert_eq!(endpoint_of_rank("tcp://*:0", 3), "tcp://*:0");
        assert_eq!(endpoint_of_rank("ipc:///tmp/events", 3), "ipc:///tmp/events");
    }

    #[test]
    fn the_defaults_are_those_of_the_timing_model() {
        assert_eq!(ReplicaArgs::default().timing(), Timing::default());
    }
}
