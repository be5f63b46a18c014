//! What a scheduler is told once.

use super::CostConfig;
use crate::config::DynamoWeights;
use std::time::Duration;

/// How candidates are weighed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Policy {
    /// Cached prefix against load, in tokens: the default.
    Cost(CostConfig),
    /// Dynamo's formula.
    Dynamo(DynamoWeights),
    /// Fewest requests in flight.
    LeastLoaded,
    /// Each in turn.
    RoundRobin,
    /// By the session's hash; least loaded where there is none.
    SessionHash,
    /// By the hash of the prompt's head; least loaded where the prompt has no full block.
    PrefixHash {
        /// How long a head is hashed.
        head_tokens: u32,
    },
}

impl Default for Policy {
    fn default() -> Self {
        Self::Cost(CostConfig::default())
    }
}

/// Limits and constants that hold under every policy.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SchedulerConfig {
    /// What a token in the CPU tier saves of a computed one, 0 to 1; also one that was sent there before, where some
    /// events were missed. 0.7 to 0.95 are alike in simulation.
    pub cpu_credit: f64,
    /// The same for the disk tier.
    pub disk_credit: f64,
    /// How fast one rank prefills, tokens per second: a first guess, until KV events have shown it
    /// ([`super::Scheduler::prefill_rate`]). A factor of two does little harm.
    pub prefill_tokens_per_second: f64,
    /// Whether the answers of booked requests are followed: the blocks that the engine stores for them add to the
    /// context that their rank holds. Otherwise the prompt alone counts.
    pub follow_answers: bool,
    /// Most blocks in all ranks' memories of what was sent to them ([`super::Candidate::history_blocks`]), of which each
    /// rank gets an equal part. 4 Mi are 128 MiB at most.
    pub max_history_blocks: usize,
    /// How fast the memory of recent work fades. Minutes: longer than the pauses of a conversation.
    pub recent_half_life: Duration,
    /// Most bookings at once; a choice beyond is not booked.
    pub max_bookings: usize,
    /// Most sequence hashes in all bookings' prompts; a choice beyond is not booked. 4 Mi are 32 MiB, and as much again
    /// for the booked prefixes.
    pub max_booked_hashes: usize,
    /// Most sessions remembered; the longest unused go first.
    pub max_sessions: usize,
    /// A booking whose end nobody told ends after this long, on ranks where nobody counts requests
    /// ([`super::Scheduler::set_open`]). Hours: no real request may lose its load by age.
    pub lease: Duration,
}

impl SchedulerConfig {
    /// The most that bookings and histories take, in bytes.
    #[must_use]
    pub const fn max_bytes(&self) -> usize {
        let history = self.max_history_blocks.saturating_mul(32);
        history.saturating_add(self.max_booked_hashes.saturating_mul(16))
    }
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            cpu_credit: 0.75,
            disk_credit: 0.25,
            prefill_tokens_per_second: 12_000.0,
            follow_answers: false,
            max_history_blocks: 4 << 20,
            recent_half_life: Duration::from_secs(300),
            max_bookings: 65_536,
            max_booked_hashes: 4 << 20,
            max_sessions: 65_536,
            lease: Duration::from_secs(6 * 3600),
        }
    }
}
