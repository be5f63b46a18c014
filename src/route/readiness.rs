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
    /// The configuration that was read last.
    #[serde(skip_serializing_if = "ConfigState::is_in_force")]
    pub configuration: ConfigState,
    /// The ranks.
    pub ranks: Vec<RankReadiness>,
}

/// What of the configuration that was read last is not in force. It is no reason not to be ready.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct ConfigState {
    /// Why it is not used at all; the one before is in force.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// Keys of which the new values take a restart.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub takes_restart: Vec<&'static str>,
}

impl ConfigState {
    fn is_in_force(&self) -> bool {
        *self == Self::default()
    }
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
        let pools = self.pools();
        for pool in pools.iter() {
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
            pools.iter().filter(|pool| pool.nothing_matches()).map(|pool| pool.backend.clone()).collect();
        let configuration = self.config_state();
        Readiness { ready, discovering, nothing_matches, other_model, configuration, ranks }
    }
}
