//! The policies that can be compared, by name.

use super::{
    agent::Router,
    rival::{Rival, RivalPolicy, Sees, TokenCost},
};
use crate::config::DynamoWeights;
use crate::select::{CostConfig, Policy, Scheduler, SchedulerConfig};
use std::time::Duration;

/// A policy. The first five are kvspoa's own and run the code that the agent runs; the others are models of other
/// routers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
#[clap(rename_all = "snake_case")]
pub(super) enum PolicyName {
    /// kvspoa's default
    Cost,
    /// Dynamo's formula and defaults
    Dynamo,
    /// Fewest requests in flight
    LeastLoaded,
    /// Each in turn
    RoundRobin,
    /// By the hash of the prompt's head, with bounded loads
    PrefixHash,
    /// KV events and queued tokens, weighed alike
    Exact,
    /// The same, tuned: own uncached tokens by 6, booked prompts count as cached
    ExactTuned,
    /// The router's own history and queued tokens, weighed alike
    Approx,
    /// The same, tuned: own uncached tokens by 6, history as large as the caches
    ApproxTuned,
    /// Dynamo's formula, tuned: credit 8, prefill 100, host 1, predict-on-route
    DynamoTuned,
    /// SGLang's cache-aware policy: 0.3 / 64 / 1.5
    Sglang,
    /// llm-d's scores: queue 2, KV usage 2, prefix 3, polled every 50 ms
    LlmD,
    /// By chance
    Random,
}

/// Weights and constants of the product's policies.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct Weights {
    pub(super) cost: CostConfig,
    pub(super) scheduler: SchedulerConfig,
}

impl Weights {
    /// Sets one by its name; false if there is none of that name.
    pub(super) fn set(&mut self, name: &str, value: f64) -> bool {
        let (cost, scheduler) = (&mut self.cost, &mut self.scheduler);
        let weight = match name {
            "own_weight" => &mut cost.own_weight,
            "queue_gain" => &mut cost.queue_gain,
            "own_weight_max" => &mut cost.own_weight_max,
            "decode_weight" => &mut cost.decode_weight,
            "context_weight" => &mut cost.context_weight,
            "eviction_weight" => &mut cost.eviction_weight,
            "spread_weight" => &mut cost.spread_weight,
            "decode_tokens_max" => &mut cost.decode_tokens_max,
            "crowd_requests" => &mut cost.crowd_requests,
            "spread_tokens_max" => &mut cost.spread_tokens_max,
            "band_blocks" => &mut cost.band_blocks,
            "cpu_credit" => &mut scheduler.cpu_credit,
            "prefill_tokens_per_second" => &mut scheduler.prefill_tokens_per_second,
            _ => return false,
        };
        *weight = value;
        true
    }

    pub(super) const NAMES: &str = "own_weight, queue_gain, own_weight_max, decode_weight, context_weight, \
        eviction_weight, spread_weight, spread_tokens_max, decode_tokens_max, crowd_requests, band_blocks, cpu_credit, prefill_tokens_per_second";
}

impl PolicyName {
    /// A router of this policy for so many replicas, whose tiers hold `cache_blocks` each.
    pub(super) fn router(self, weights: &Weights, replicas: u16, cache_blocks: usize, seed: u64) -> Router {
        let product = |policy| Router::Product(Box::new(Scheduler::new(policy, weights.scheduler, seed)));
        let rival = |policy| Router::Rival(Box::new(Rival::new(policy, replicas, cache_blocks, seed)));
        let plain = TokenCost { sees: Sees::Events, own_weight: 1.0, context_weight: 0.05, predicts: false };
        let tuned = TokenCost { own_weight: 6.0, context_weight: 0.01, ..plain };
        match self {
            Self::Cost => product(Policy::Cost(weights.cost)),
            Self::Dynamo => product(Policy::Dynamo(DynamoWeights::default())),
            Self::LeastLoaded => product(Policy::LeastLoaded),
            Self::RoundRobin => product(Policy::RoundRobin),
            Self::PrefixHash => product(Policy::PrefixHash { head_tokens: 1024 }),
            Self::Exact => rival(RivalPolicy::Tokens(plain)),
            Self::ExactTuned => rival(RivalPolicy::Tokens(TokenCost { predicts: true, ..tuned })),
            Self::Approx => rival(RivalPolicy::Tokens(TokenCost { sees: Sees::AllHistory, ..plain })),
            Self::ApproxTuned => {
                rival(RivalPolicy::Tokens(TokenCost { sees: Sees::BoundedHistory, ..tuned }))
            }
            Self::DynamoTuned => {
                let config = DynamoWeights {
                    overlap_score_credit: 8.0,
                    prefill_load_scale: 100.0,
                    host_cache_hit_weight: 1.0,
                    ..DynamoWeights::default()
                };
                rival(RivalPolicy::Dynamo(config, true))
            }
            Self::Sglang => rival(RivalPolicy::Sglang),
            Self::LlmD => rival(RivalPolicy::LlmD),
            Self::Random => rival(RivalPolicy::Random),
        }
    }

    /// How often this policy asks engines for their load of itself.
    pub(super) const fn poll(self) -> Option<Duration> {
        match self {
            Self::LlmD => Some(Duration::from_millis(50)),
            _ => None,
        }
    }
}
