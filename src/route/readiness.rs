//! `/readyz`: whether routing by cache works, and where not.

use super::Router;
use serde::Serialize;

/// The state of every stream, and whether all is as it should be.
#[derive(Debug, Serialize)]
pub struct Readiness {
    /// Every rank that publishes events has been heard and replayed, or is known to be out of reach.
    pub ready: bool,
    /// Pools in which no prompt ever matched although their replicas publish blocks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nothing_matches: Vec<String>,
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
        let mut ready = true;
        for pool in self.pools() {
            for stream in pool.streams() {
                let Some(rank) = pool.ranks.get(stream.rank.index()) else { continue };
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
        Readiness { ready, nothing_matches, ranks }
    }
}
