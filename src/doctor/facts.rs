//! What was gathered, before anybody judges it.

use super::{
    look::{Matched, Seen},
    samples::Samples,
};
use crate::{
    agent::parity::Verdict,
    config,
    haproxy_config::{HaproxyCfg, HaproxyVersion},
    replica::{ServedModel, Server, Source},
    spop::client::Answer,
};
use serde::Deserialize;

/// Everything.
#[derive(Debug)]
pub(super) struct Facts {
    pub(super) agent: AgentFacts,
    /// `None`: `haproxy.socket` is not configured.
    pub(super) haproxy: Option<HaproxyFacts>,
    /// `None`: no file was named.
    pub(super) cfg: Option<CfgFacts>,
    pub(super) pools: Vec<PoolFacts>,
    /// `None`: no address was given.
    pub(super) through: Option<ThroughFacts>,
}

/// The agent, as its ports answer.
#[derive(Debug)]
pub(super) struct AgentFacts {
    pub(super) admin: String,
    pub(super) spop: String,
    /// Where it takes HAProxy's log lines.
    pub(super) log: String,
    pub(super) hello: Result<Answer, String>,
    pub(super) samples: Result<Samples, String>,
    pub(super) readiness: Option<Readiness>,
    pub(super) status: Option<Status>,
    /// The largest frame that it is configured to take, in bytes.
    pub(super) max_frame_bytes: u32,
}

/// `/readyz`.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct Readiness {
    #[serde(default)]
    pub(super) discovering: Vec<String>,
    #[serde(default)]
    pub(super) nothing_matches: Vec<String>,
    #[serde(default)]
    pub(super) other_model: Vec<String>,
    #[serde(default)]
    pub(super) ranks: Vec<RankReadiness>,
}

/// One rank of it.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct RankReadiness {
    pub(super) pool: String,
    pub(super) server: String,
    pub(super) rank: u16,
    pub(super) state: String,
    pub(super) reason: Option<String>,
    pub(super) applied_seq: Option<u64>,
}

/// `/status`, of which the pools' modes.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct Status {
    #[serde(default)]
    pub(super) pools: Vec<PoolStatus>,
}

/// One pool of it.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct PoolStatus {
    pub(super) pool: String,
    /// `on`, `shadow`, `off` or `share=…`.
    pub(super) mode: String,
}

/// HAProxy, as its runtime socket answers.
#[derive(Debug)]
pub(super) struct HaproxyFacts {
    pub(super) socket: String,
    pub(super) info: Result<Info, String>,
}

/// HAProxy's configuration files.
#[derive(Debug)]
pub(super) struct CfgFacts {
    pub(super) read: Result<HaproxyCfg, String>,
    /// Of the `haproxy` of this machine, where the runtime socket does not tell.
    pub(super) installed: Option<HaproxyVersion>,
    pub(super) memory_bytes: Option<u64>,
}

/// `show info` and `show cli level`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Info {
    pub(super) version: String,
    /// `user`, `operator` or `admin`.
    pub(super) level: Option<String>,
}

/// One pool.
#[derive(Debug)]
pub(super) struct PoolFacts {
    pub(super) backend: String,
    /// HAProxy's servers; `None` where there is no socket.
    pub(super) servers: Option<Result<Vec<Server>, String>>,
    /// Why the replicas are not known, where a file should list them.
    pub(super) file: Option<String>,
    pub(super) replicas: Vec<ReplicaFacts>,
}

/// One replica.
#[derive(Debug)]
pub(super) struct ReplicaFacts {
    pub(super) server: String,
    pub(super) http: Option<String>,
    /// `None` where its HTTP address is not known.
    pub(super) pages: Option<Pages>,
    pub(super) parity: Vec<(&'static str, Verdict)>,
    pub(super) ranks: Vec<RankFacts>,
}

/// What a page said, or why it did not.
pub(super) type Page<T> = Result<T, Silence>;

/// Why a page has nothing to tell.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Silence {
    /// 401 or 403.
    Refused(u16),
    /// Another status than 200.
    Status(u16),
    /// No answer; why.
    NoAnswer(String),
}

/// What a replica says of itself.
#[derive(Debug)]
pub(super) struct Pages {
    pub(super) models: Page<Vec<ServedModel>>,
    /// `None`: there is such a page, but it is another.
    pub(super) sources: Page<Option<Vec<Source>>>,
    pub(super) metrics: Page<Samples>,
}

/// One rank.
#[derive(Debug)]
pub(super) struct RankFacts {
    /// Where its events are, as the agent goes by.
    pub(super) rank: config::Rank,
    /// What its engine says of them.
    pub(super) told: Option<Source>,
    /// `None`: there is no endpoint to listen to, or only the agent can.
    pub(super) stream: Option<Stream>,
    /// `None`: no replay endpoint is known, or the engine was not heard.
    pub(super) replay: Option<ReplayFacts>,
    /// What its batches tell, where the stream itself was silent.
    pub(super) replayed: Option<Seen>,
    /// `None`: no request was sent.
    pub(super) asked: Option<Asked>,
}

/// A rank's PUB endpoint as it was found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Stream {
    /// Nothing listens there; why.
    Closed(String),
    /// Something listens, but no ZeroMQ publisher.
    NotZeromq,
    /// What was heard.
    Heard(Seen),
}

/// A replay that was asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum ReplayFacts {
    /// Nothing listens there; why.
    Closed(String),
    /// It was asked from the batch heard last on.
    Asked {
        /// Whether an end marker came.
        is_ended: bool,
        /// Whether the batch that was asked for came; `None` where none was heard.
        has_batch: Option<bool>,
    },
}

/// One real request to one rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Asked {
    /// Why it was not answered.
    pub(super) failed: Option<String>,
    /// Tokens of its prompt, as made here.
    pub(super) tokens: usize,
    /// The same as the engine counted them.
    pub(super) counted: Option<usize>,
    /// Its blocks in the events.
    pub(super) matched: Matched,
    /// Tokens of it that the running agent's index has on that rank; `None` where there was nobody to ask.
    pub(super) in_agent: Option<u64>,
}

/// One request through HAProxy.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct ThroughFacts {
    pub(super) url: String,
    /// Status of the answer.
    pub(super) answer: Result<Streamed, String>,
    /// Decisions, and lines of ends, that the agent has counted since; `None` where there was nobody to ask.
    pub(super) counted: Option<(f64, f64)>,
}

/// A streamed answer.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Streamed {
    pub(super) status: u16,
    pub(super) is_event_stream: bool,
    /// Pieces in which it came.
    pub(super) pieces: usize,
    /// Milliseconds from the first piece to the last.
    pub(super) spread_ms: u64,
}

impl RankFacts {
    /// What its batches tell: those that were heard, else those of the replay.
    pub(super) fn seen(&self) -> Option<&Seen> {
        match &self.stream {
            Some(Stream::Heard(seen)) if seen.batches > 0 => Some(seen),
            _ => self.replayed.as_ref(),
        }
    }
}
