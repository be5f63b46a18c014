//! Decisions, what became of them, and the state of the pools.

use super::{FeedLabels, HealthMetrics, Total};
use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};
use std::time::Duration;

/// Decisions.
#[derive(Clone, Debug)]
pub struct RouteMetrics {
    /// Decisions, by how they ended; in the order of the reasons at registration.
    pub decisions: Vec<Counter>,
    /// Prompt tokens of scored requests.
    pub prompt_tokens: Counter,
    /// Prompt tokens that the chosen replica held.
    pub matched_tokens: Counter,
    /// Prompt tokens beyond those that were sent to the chosen replica before, and that no event has confirmed.
    pub history_tokens: Counter,
    /// Prompts whose tokens were sent ahead to the chosen replica.
    pub tokens_sent: Counter,
    /// Prompts whose tokens it did not take: not connected, or too far behind.
    pub tokens_not_sent: Counter,
    /// Seconds from the frame's arrival to the answer.
    pub seconds: Histogram,
    /// Seconds of these for parsing, rendering and tokenizing, the wait for a thread included.
    pub prompt_seconds: Histogram,
    /// Seconds for hashing and look-up.
    pub lookup_seconds: Histogram,
    /// Seconds for scoring and booking.
    pub choice_seconds: Histogram,
}

/// Upper bounds of the decision histograms, seconds: from a short prompt of a warm cache to HAProxy's time-out.
pub(super) const SECONDS: &[f64] =
    &[0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0];

/// What every histogram of a stage of a decision is named with.
pub(super) const DECISION_SECONDS: &str = "kvspoa_decision_seconds";
pub(super) const STAGE_SECONDS: &str = "kvspoa_decision_stage_seconds";

impl RouteMetrics {
    /// Registers the metrics with the process's recorder.
    #[must_use]
    pub fn register(reasons: &[&'static str]) -> Self {
        let stage = |name: &'static str| histogram!(STAGE_SECONDS, "stage" => name);
        Self {
            decisions: reasons
                .iter()
                .map(|reason| counter!("kvspoa_decisions_total", "reason" => *reason))
                .collect(),
            prompt_tokens: counter!("kvspoa_prompt_tokens_total"),
            matched_tokens: counter!("kvspoa_matched_tokens_total"),
            history_tokens: counter!("kvspoa_history_tokens_total"),
            tokens_sent: counter!("kvspoa_token_pushes_total", "result" => "sent"),
            tokens_not_sent: counter!("kvspoa_token_pushes_total", "result" => "refused"),
            seconds: histogram!(DECISION_SECONDS),
            prompt_seconds: stage("prompt"),
            lookup_seconds: stage("lookup"),
            choice_seconds: stage("choice"),
        }
    }

    /// Records the times of a decision that was made.
    pub fn times(&self, total: Duration, prompt: Duration, lookup: Duration, choice: Duration) {
        self.seconds.record(total);
        self.prompt_seconds.record(prompt);
        self.lookup_seconds.record(lookup);
        self.choice_seconds.record(choice);
    }
}

/// What Ray's replicas report of requests.
#[derive(Clone, Debug)]
pub struct RayMetrics {
    /// Reports of requests that are booked.
    pub reports: Counter,
    /// Reports of others, and those that are not understood.
    pub reports_ignored: Counter,
}

impl RayMetrics {
    /// Registers the metrics with the process's recorder.
    #[must_use]
    pub fn register() -> Self {
        let reports = |result: &'static str| counter!("kvspoa_ray_reports_total", "result" => result);
        Self { reports: reports("applied"), reports_ignored: reports("ignored") }
    }
}

/// What HAProxy's log lines said about our decisions.
#[derive(Clone, Debug)]
pub struct SettleMetrics {
    /// Bookings ended by a line.
    pub settled: Counter,
    /// Ends of requests that were not booked, such as those that HAProxy balanced itself.
    pub without_booking: Counter,
    /// Requests that HAProxy sent elsewhere than we said.
    pub elsewhere: Counter,
    /// Requests whose exchange with us failed, as HAProxy saw it.
    pub spoe_errors: Counter,
    /// Requests about which HAProxy did not ask; in the order of the reasons at registration.
    pub skipped: Vec<Counter>,
    /// Lines of pools that are not configured.
    pub unknown_pool: Counter,
}

impl SettleMetrics {
    /// Registers the metrics with the process's recorder.
    #[must_use]
    pub fn register(skips: &[&'static str]) -> Self {
        Self {
            settled: counter!("kvspoa_bookings_settled_total"),
            without_booking: counter!("kvspoa_ends_without_booking_total"),
            elsewhere: counter!("kvspoa_served_elsewhere_total"),
            spoe_errors: counter!("kvspoa_haproxy_spoe_errors_total"),
            skipped: skips.iter().map(|skip| counter!("kvspoa_not_asked_total", "reason" => *skip)).collect(),
            unknown_pool: counter!("kvspoa_ends_of_unknown_pools_total"),
        }
    }
}

/// The state of one pool, brought up to date when it is read.
#[derive(Clone, Debug)]
pub struct PoolMetrics {
    /// Bytes of the pool's index.
    pub index_bytes: Gauge,
    /// Pieces of prompts that were found in the cache of tokenized text.
    pub token_cache_hits: Total,
    /// Pieces that had to be tokenized.
    pub token_cache_misses: Total,
    /// Bytes of that cache, of the messages that were read lately and of whole prompts.
    pub token_cache_bytes: Gauge,
    /// Prompt tokens that a busy rank computes a second.
    pub prefill_rate: Gauge,
    /// The longest prompt that counts, tokens.
    pub model_context: Gauge,
    /// 1 for the mode that holds; in the order of the modes at registration.
    pub modes: Vec<Gauge>,
    /// The share of sessions that go where kvspoa says, 0 to 1.
    pub share: Gauge,
    /// What was decided, by what was done about it; in the order of the handlings at registration.
    pub decided: Vec<DecidedMetrics>,
    /// 1 while no prompt ever matched although the replicas publish blocks.
    pub nothing_matches: Gauge,
    /// Bookings that outlived their lease.
    pub expired: Total,
    /// Choices that were not booked because too many bookings were there.
    pub not_booked: Total,
    /// Choices that were not booked because the client had left before them.
    pub ended_early: Total,
    /// Bookings ended because neither HAProxy nor the engine had their request any more.
    pub lost: Total,
    /// Bookings moved to the rank that got their request instead.
    pub moved: Total,
}

/// Decisions of one pool about which one thing was done.
#[derive(Clone, Debug)]
pub struct DecidedMetrics {
    /// Decisions.
    pub requests: Total,
    /// Prompt tokens of these, where known.
    pub prompt_tokens: Total,
    /// Those that the replica chosen held.
    pub matched_tokens: Total,
}

/// The state of one rank.
#[derive(Clone, Debug)]
pub struct RankMetrics {
    /// Booked requests.
    pub requests: Gauge,
    /// Booked prompt tokens whose prefill is not done.
    pub prefill_tokens: Gauge,
    /// Distinct blocks of the booked prompts.
    pub booked_blocks: Gauge,
    /// Blocks remembered of what was sent there, where its events do not tell all.
    pub history_blocks: Gauge,
    /// Blocks known to be held, by tier: GPU, CPU, disk.
    pub blocks: [Gauge; 3],
    /// How well its cache is known.
    pub health: HealthMetrics,
    /// Requests in the engine's running batch, as it reports; 0 where it has not of late, as below.
    pub engine_running: Gauge,
    /// Requests that wait in the engine.
    pub engine_waiting: Gauge,
    /// The share of the engine's blocks in use, 0 to 1.
    pub engine_kv_usage: Gauge,
    /// Blocks of the engine's GPU cache.
    pub engine_blocks: Gauge,
}

impl PoolMetrics {
    /// Registers the metrics with the process's recorder.
    #[must_use]
    pub fn register(pool: &str, modes: &[&'static str], handlings: &[&'static str]) -> Self {
        let labels = |mode: &'static str| [("pool", pool.to_owned()), ("mode", mode.to_owned())];
        let decided = |mode: &&'static str| DecidedMetrics {
            requests: Total::new(counter!("kvspoa_pool_decisions_total", &labels(mode))),
            prompt_tokens: Total::new(counter!("kvspoa_pool_prompt_tokens_total", &labels(mode))),
            matched_tokens: Total::new(counter!("kvspoa_pool_matched_tokens_total", &labels(mode))),
        };
        let total = |name: &'static str| Total::new(counter!(name, "pool" => pool.to_owned()));
        Self {
            modes: modes.iter().map(|mode| gauge!("kvspoa_pool_mode", &labels(mode))).collect(),
            share: gauge!("kvspoa_pool_share", "pool" => pool.to_owned()),
            decided: handlings.iter().map(decided).collect(),
            index_bytes: gauge!("kvspoa_index_bytes", "pool" => pool.to_owned()),
            token_cache_hits: total("kvspoa_token_cache_hits_total"),
            token_cache_misses: total("kvspoa_token_cache_misses_total"),
            token_cache_bytes: gauge!("kvspoa_token_cache_bytes", "pool" => pool.to_owned()),
            prefill_rate: gauge!("kvspoa_prefill_tokens_per_second", "pool" => pool.to_owned()),
            model_context: gauge!("kvspoa_model_context_tokens", "pool" => pool.to_owned()),
            nothing_matches: gauge!("kvspoa_nothing_matches", "pool" => pool.to_owned()),
            expired: total("kvspoa_bookings_expired_total"),
            not_booked: total("kvspoa_choices_not_booked_total"),
            ended_early: total("kvspoa_ended_before_choice_total"),
            lost: total("kvspoa_bookings_lost_total"),
            moved: total("kvspoa_bookings_moved_total"),
        }
    }

    /// The pool is gone: nothing is true of it any more.
    pub fn clear(&self) {
        let Self { index_bytes, token_cache_bytes, prefill_rate, model_context, nothing_matches, .. } = self;
        let gauges =
            [index_bytes, token_cache_bytes, prefill_rate, model_context, nothing_matches, &self.share];
        gauges.into_iter().chain(&self.modes).for_each(|gauge| gauge.set(0.0));
    }
}

impl RankMetrics {
    /// Registers one rank's metrics with the process's recorder. `states` and `faults` are their names, in order.
    #[must_use]
    pub fn register(rank: &FeedLabels, states: &[&'static str], faults: &[&'static str]) -> Self {
        let labels =
            [("pool", rank.pool.clone()), ("server", rank.server.clone()), ("rank", rank.rank.to_string())];
        let blocks = |tier: &str| {
            let mut labels = labels.to_vec();
            labels.push(("tier", tier.to_owned()));
            gauge!("kvspoa_index_blocks", &labels)
        };
        Self {
            requests: gauge!("kvspoa_requests", &labels),
            prefill_tokens: gauge!("kvspoa_prefill_tokens", &labels),
            booked_blocks: gauge!("kvspoa_booked_blocks", &labels),
            history_blocks: gauge!("kvspoa_history_blocks", &labels),
            blocks: ["gpu", "cpu", "disk"].map(blocks),
            health: HealthMetrics::register(rank, states, faults),
            engine_running: gauge!("kvspoa_engine_running", &labels),
            engine_waiting: gauge!("kvspoa_engine_waiting", &labels),
            engine_kv_usage: gauge!("kvspoa_engine_kv_usage", &labels),
            engine_blocks: gauge!("kvspoa_engine_blocks", &labels),
        }
    }

    /// The rank is gone: nothing is true of it any more.
    pub fn clear(&self) {
        self.health.clear();
        let gauges = [&self.requests, &self.prefill_tokens, &self.booked_blocks, &self.engine_running];
        let engine = [&self.history_blocks, &self.engine_waiting, &self.engine_kv_usage, &self.engine_blocks];
        gauges.into_iter().chain(engine).chain(&self.blocks).for_each(|gauge| gauge.set(0.0));
    }
}
