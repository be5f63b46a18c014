//! `/readyz`: whether routing by cache works, and where not.

use super::Router;
use serde::Serialize;
use std::sync::atomic::Ordering;

/// The state of every stream, and whether all is as it should be.
#[derive(Debug, Serialize)]
pub struct Readiness {
    /// The replicas are known, and every rank that publishes events has been heard and replayed, or is known to be out of reach.
    pub ready: bool,
    /// Pools whose replicas are not all known yet.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub discovering: Vec<String>,
    /// Pools in which no prompt ever matched although their replicas publish blocks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nothing_matches: Vec<String>,
    /// Replicas that serve another model than their pool's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub other_model: Vec<String>,
    /// The ranks.
    pub ranks: Vec<RankReadiness>,
}

/// One rank's stream.
#[derive(Debug, Serialize)]
pub struct RankReadiness {
    pool: String,
    server: String,
    rank: u16,
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    block_size: Option<u32>,
    applied_seq: Option<u64>,
    gpu_blocks: u64,
}

impl Router {
    /// Whether routing by cache works. Not ready while a stream has not been heard yet: requests are answered even then,
    /// but as if that cache were empty.
    #[must_use]
    pub fn readiness(&self) -> Readiness {
        let mut ranks = Vec::new();
        let (mut discovering, mut other_model) = (Vec::new(), Vec::new());
        let mut ready = true;
        for pool in self.pools() {
            let of_pool = pool.ranks();
            let is_settled = pool.is_settled.load(Ordering::Relaxed);
            ready &= is_settled;
            if !is_settled {
                discovering.push(pool.backend.clone());
            }
            let others = of_pool.servers().filter(|server| server.serves_other_model());
            other_model.extend(others.map(|server| format!("{}/{}", pool.backend, server.name)));
            for stream in pool.streams(&of_pool) {
                let Some(rank) = of_pool.get(stream.rank) else { continue };
                ready &= !stream.is_starting;
                ranks.push(RankReadiness {
                    pool: pool.backend.clone(),
                    server: rank.server.to_string(),
                    rank: rank.rank,
                    state: stream.state.as_str(),
                    reason: stream.state.reason(),
                    block_size: stream.block_tokens,
                    applied_seq: stream.applied_seq,
                    gpu_blocks: pool.gpu_blocks(stream.rank),
                });
            }
        }
        let nothing_matches =
            self.pools().filter(|pool| pool.nothing_matches()).map(|pool| pool.backend.clone()).collect();
        Readiness { ready, discovering, nothing_matches, other_model, ranks }
    }
}
