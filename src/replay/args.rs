//! The flags of `kvspoa replay`.

use super::{
    arrivals::{Half, Spacing},
    play::Fleet,
    policy::PolicyName,
};
use crate::sim::{EngineConfig, OffloadConfig, Timing};
use clap::Args;
use std::{path::PathBuf, time::Duration};

/// The longest delay that can be asked for: an hour.
const LONGEST_MS: u64 = 3_600_000;

/// Blocks as large as the pieces of the public traces.
const BLOCK_TOKENS: u32 = 512;

/// What the caches of a 14B model hold on one large GPU, and four times that beside it.
const GPU_BLOCKS: u32 = 1_000;
const CPU_BLOCKS: u32 = 4_000;

/// Play a workload through modelled replicas, and compare what policies make of it.
#[derive(Args, Debug)]
pub struct ReplayArgs {
    /// A trace in Mooncake's format (JSON lines: timestamp, input_length, output_length, hash_ids), a record of
    /// kvspoa's own decisions (`record.file`), or a generated workload: fanout, hot, groups, head
    #[arg(value_name = "TRACE")]
    pub(super) workload: String,
    /// Policies to compare
    #[arg(
        long,
        value_delimiter = ',',
        value_enum,
        default_value = "cost,dynamo,exact_tuned,approx_tuned,least_loaded,round_robin"
    )]
    pub(super) policies: Vec<PolicyName>,
    /// Take the arrival times from an Azure trace (CSV, first column TIMESTAMP)
    #[arg(long, value_name = "CSV")]
    pub(super) arrivals: Option<PathBuf>,
    /// Which part of the trace is played
    #[arg(long, value_enum, default_value = "whole")]
    pub(super) half: Half,
    /// How time stamps are read
    #[arg(long, value_enum, default_value = "spread")]
    pub(super) spacing: Spacing,
    /// So many times the trace's pace
    #[arg(long, default_value_t = 1.0, value_parser = positive)]
    pub(super) speed: f64,
    /// Requests at the start that do not count
    #[arg(long, default_value_t = 500, value_name = "REQUESTS")]
    pub(super) warm_up: usize,
    /// Requests of a generated workload
    #[arg(long, default_value_t = 5000)]
    pub(super) requests: usize,
    /// Runs of each policy, with seeds from --seed on; the figures are their means
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub(super) seeds: u64,
    /// The first seed
    #[arg(long, default_value_t = 1)]
    pub(super) seed: u64,
    /// Modelled replicas
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(super) replicas: u16,
    /// Tokens in a KV block [default: 512; of a record, its own]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(super) block_tokens: Option<u32>,
    /// Blocks in each replica's GPU memory [default: 1000; of a record, as many as hold 512,000 tokens]
    #[arg(long, value_parser = clap::value_parser!(u32).range(2..))]
    pub(super) gpu_blocks: Option<u32>,
    /// Blocks in each replica's CPU tier; 0: none [default: 4000; of a record, as many as hold 2,048,000 tokens]
    #[arg(long)]
    pub(super) cpu_blocks: Option<u32>,
    /// The first replica computes at so many times the others' speed
    #[arg(long, default_value_t = 1.0, value_name = "FACTOR", value_parser = positive)]
    pub(super) first_replica_speed: f64,
    /// From the end of a step until its KV events are seen, in milliseconds
    #[arg(long, default_value_t = 5, value_name = "MS", value_parser = clap::value_parser!(u64).range(..=LONGEST_MS))]
    pub(super) event_lag_ms: u64,
    /// Share of the batches of KV events that are lost for good
    #[arg(long, default_value_t = 0.0, value_parser = share)]
    pub(super) event_loss: f64,
    /// Replicas started anew while the trace is played, each by chance
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=10_000))]
    pub(super) restarts: u32,
    /// Times that a replica loses its caches while the trace is played, and those that run there start again; each by
    /// chance
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=10_000))]
    pub(super) resets: u32,
    /// Agents that are asked in turn
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(super) agents: u16,
    /// The agents know each other's bookings after so many milliseconds; never, unless given
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(..=LONGEST_MS))]
    pub(super) share_ms: Option<u64>,
    /// Share of what agents tell each other that is lost
    #[arg(long, default_value_t = 0.0, value_parser = share)]
    pub(super) share_loss: f64,
    /// Ask the engines for their load so often, in milliseconds; never, unless given
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=LONGEST_MS))]
    pub(super) poll_ms: Option<u64>,
    /// Time to first token that was promised, in milliseconds
    #[arg(long, default_value_t = 2000, value_name = "MS")]
    pub(super) slo_ttft: u64,
    /// Time per output token that was promised, in milliseconds
    #[arg(long, default_value_t = 50, value_name = "MS")]
    pub(super) slo_tpot: u64,
    /// Another value for a weight of kvspoa's policies, NAME=VALUE
    #[arg(long = "set", value_name = "NAME=VALUE", value_parser = setting)]
    pub(super) set: Vec<(String, Vec<f64>)>,
    /// Play the policy `cost` with each of these values of a weight, NAME=A,B,C; given twice, with each pair
    #[arg(long, value_name = "NAME=A,B,C", value_parser = setting)]
    pub(super) sweep: Vec<(String, Vec<f64>)>,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
    /// Write a chart too
    #[arg(long, value_name = "FILE")]
    pub(super) svg: Option<PathBuf>,
    /// Threads to compute on [default: as many as the machine has]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    pub(super) threads: Option<u16>,
}

impl ReplayArgs {
    /// The fleet that the flags describe, for a workload that was recorded before blocks of this size, if it was.
    pub(super) fn fleet(&self, recorded_block_tokens: Option<u32>) -> Fleet {
        let block_tokens = self.block_tokens.or(recorded_block_tokens).unwrap_or(BLOCK_TOKENS);
        // A record has blocks as small as engines have them.
        let usual = |blocks: u32| match recorded_block_tokens {
            Some(_) => (blocks * BLOCK_TOKENS / block_tokens).max(2),
            None => blocks,
        };
        let gpu_blocks = self.gpu_blocks.unwrap_or_else(|| usual(GPU_BLOCKS));
        let cpu_blocks = self.cpu_blocks.unwrap_or_else(|| usual(CPU_BLOCKS));
        let engine = |at: u16| EngineConfig {
            block_tokens,
            // The engine sets one aside.
            blocks: gpu_blocks.saturating_add(1),
            offload: (cpu_blocks > 0).then_some(OffloadConfig {
                blocks: cpu_blocks,
                chunk_blocks: 1,
                describes: false,
            }),
            step_tokens: 2048,
            sequences: 256,
            timing: if at == 0 { slowed(self.first_replica_speed) } else { Timing::default() },
        };
        let millis = Duration::from_millis;
        Fleet {
            engines: (0..self.replicas).map(engine).collect(),
            event_lag: millis(self.event_lag_ms),
            event_loss: self.event_loss,
            agents: self.agents,
            sharing: self.share_ms.map(millis),
            poll: self.poll_ms.map(millis),
            sharing_loss: self.share_loss,
            restarts: self.restarts,
            resets: self.resets,
        }
    }
}

/// The default engine at another speed.
fn slowed(speed: f64) -> Timing {
    let usual = Timing::default();
    Timing {
        step: usual.step.div_f64(speed),
        prefill_tokens_per_second: usual.prefill_tokens_per_second * speed,
        prefill_context_seconds: usual.prefill_context_seconds / speed,
        decode_seconds: usual.decode_seconds / speed,
        decode_context_seconds: usual.decode_context_seconds / speed,
        ..usual
    }
}

fn positive(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if (1e-3..=1e3).contains(&value) { Ok(value) } else { Err("0.001 to 1000 are possible".to_owned()) }
}

fn share(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if (0.0..=1.0).contains(&value) { Ok(value) } else { Err("a share is 0 to 1".to_owned()) }
}

/// `name=a,b,c`.
fn setting(text: &str) -> Result<(String, Vec<f64>), String> {
    let (name, values) = text.split_once('=').ok_or("NAME=VALUE is expected")?;
    let values: Result<Vec<f64>, _> = values.split(',').map(|value| value.trim().parse::<f64>()).collect();
    let values = values.map_err(|_| format!("{text:?}: not a number"))?;
    if values.iter().any(|value| !value.is_finite() || *value < 0.0) {
        return Err("a weight is a number from 0 on".to_owned());
    }
    Ok((name.trim().to_owned(), values))
}
