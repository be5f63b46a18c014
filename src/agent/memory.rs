//! The memory that the agent takes at most.

use crate::{
    config::{self, Config},
    select::SchedulerConfig,
};

/// What the large parts of the agent hold at their bounds, in bytes, by the key that sets the bound or by what it is.
#[must_use]
pub fn memory_bounds(config: &Config) -> Vec<(&'static str, u64)> {
    let of_all_pools = |bytes: usize| (bytes as u64).saturating_mul(config.pools.len() as u64);
    let of_prompts = |pool: &config::Pool| pool.cache_bytes.saturating_mul(1 + pool.revisions.len()) as u64;
    vec![
        ("index.max_bytes of each pool", of_all_pools(config.index_max_bytes)),
        ("record.max_bytes", config.record.max_bytes as u64),
        ("spop.max_bytes_in_flight", config.spop.max_bytes_in_flight as u64),
        (
            "prompt.cache_bytes of each model",
            config.pools.iter().map(of_prompts).fold(0, u64::saturating_add),
        ),
        ("bookings and histories", of_all_pools(SchedulerConfig::default().max_bytes())),
    ]
}
