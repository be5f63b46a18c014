//! How well each rank's cache is known.

use super::{FeedLabels, Total};
use metrics::{Gauge, counter, gauge};

/// One rank.
#[derive(Clone, Debug)]
pub struct HealthMetrics {
    /// 1 for the state that the rank is in, 0 for the others, in the order of the states at registration.
    pub states: Vec<Gauge>,
    /// 1 for a fault that somebody has to mend, in the order of the faults at registration.
    pub faults: Vec<Gauge>,
    /// Blocks whose place in a chain is not known: stored before their parent, or named without tokens.
    pub waiting_blocks: Gauge,
    /// Blocks of lower tiers that the last reset may have taken.
    pub unconfirmed_blocks: Gauge,
    /// Blocks that were stored before their parent.
    pub orphans: Total,
    /// Seconds between the engine's clock at its last live batch and ours when it was applied.
    pub lag_seconds: Gauge,
    /// Tokens per block, as the events say; 0: not known yet.
    pub block_tokens: Gauge,
    /// Times that this changed under way.
    pub block_size_changes: Total,
}

impl HealthMetrics {
    /// Registers one rank's metrics with the process's recorder.
    #[must_use]
    pub fn register(rank: &FeedLabels, states: &[&'static str], faults: &[&'static str]) -> Self {
        let labels =
            [("pool", rank.pool.clone()), ("server", rank.server.clone()), ("rank", rank.rank.to_string())];
        let each = |metric: &'static str, label: &'static str, values: &[&'static str]| {
            let gauge = |value: &&str| {
                let mut labels = labels.to_vec();
                labels.push((label, (*value).to_owned()));
                gauge!(metric, &labels)
            };
            values.iter().map(gauge).collect()
        };
        Self {
            states: each("kvspoa_replica_state", "state", states),
            faults: each("kvspoa_replica_fault", "fault", faults),
            waiting_blocks: gauge!("kvspoa_index_waiting_blocks", &labels),
            unconfirmed_blocks: gauge!("kvspoa_index_unconfirmed_blocks", &labels),
            orphans: Total::new(counter!("kvspoa_index_orphans_total", &labels)),
            lag_seconds: gauge!("kvspoa_kv_event_lag_seconds", &labels),
            block_tokens: gauge!("kvspoa_kv_block_tokens", &labels),
            block_size_changes: Total::new(counter!("kvspoa_kv_block_size_changes_total", &labels)),
        }
    }

    pub(super) fn clear(&self) {
        let Self { states, faults, waiting_blocks, unconfirmed_blocks, lag_seconds, block_tokens, .. } = self;
        let gauges = [waiting_blocks, unconfirmed_blocks, lag_seconds, block_tokens];
        states.iter().chain(faults).chain(gauges).for_each(|gauge| gauge.set(0.0));
    }
}
