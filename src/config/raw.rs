//! The configuration file as written. Every default stands here, with its reason; each key has a row in `knobs`.
//!
//! What is written here is read back (`Serialize`) to show what holds, and what the defaults are.

use super::{
    DynamoWeights, Mode, PolicyName,
    rendering::Rendering,
    replicas::NodeRank,
    values::{
        ByteSize, Count, Endpoints, HostPort, HttpAddr, ListenEndpoint, SocketAddr, Time, Weight, text,
    },
};
use crate::{haproxy_config, lifecycle::LogListen, spop::ListenAddr};
use serde::{Deserialize, Serialize};
use std::{path::PathBuf, str::FromStr, time::Duration};
use toml::Spanned;

const MIB: usize = 1 << 20;
const SECOND: u64 = 1_000;
const HOUR: u64 = 3600 * SECOND;

/// Where the admin port is unless told otherwise: on loopback, as `/explain` takes prompts.
pub const DEFAULT_ADMIN: &str = "127.0.0.1:9102";

#[derive(Deserialize, Serialize, Debug, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawConfig {
    pub(super) spop: RawSpop,
    pub(super) admin: RawAdmin,
    pub(super) log: RawLog,
    pub(super) haproxy: RawHaproxy,
    pub(super) engine: RawEngine,
    pub(super) prompt: RawPrompt,
    pub(super) index: RawIndex,
    pub(super) select: RawSelect,
    pub(super) peers: RawPeers,
    pub(super) record: RawRecord,
    pub(super) pool: Vec<RawPool>,
}

#[derive(Deserialize, Serialize, Debug)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawSpop {
    #[serde(with = "text")]
    pub(super) listen: ListenAddr,
    /// The protocol's minimum is 256.
    pub(super) max_frame_bytes: ByteSize<256, { 256 * MIB }>,
    pub(super) max_connections: Count<1, 1_000_000>,
    pub(super) max_in_flight: Count<1, 1_000_000>,
    pub(super) max_bytes_in_flight: ByteSize<MIB, { usize::MAX }>,
    /// No client waits a minute for a choice of servers.
    pub(super) deadline: Time<1, { 60 * SECOND }>,
}

impl Default for RawSpop {
    fn default() -> Self {
        Self {
            // Loopback: the protocol has no authentication.
            listen: constant(haproxy_config::AGENT),
            // Above any sensible tune.bufsize; libraries that stop at 64 KiB break large bodies.
            max_frame_bytes: ByteSize(16 * MIB),
            // HAProxy opens about one connection per request in flight.
            max_connections: Count(16_384),
            max_in_flight: Count(4096),
            max_bytes_in_flight: ByteSize(256 * MIB),
            // Below the snippet's `timeout processing 500ms`, so that HAProxy sees an answer and not a time-out.
            deadline: Time(Duration::from_millis(400)),
        }
    }
}

#[derive(Deserialize, Serialize, Debug)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawAdmin {
    pub(super) listen: HostPort,
}

impl Default for RawAdmin {
    fn default() -> Self {
        Self { listen: constant(DEFAULT_ADMIN) }
    }
}

#[derive(Deserialize, Serialize, Debug)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawLog {
    #[serde(with = "text")]
    pub(super) listen: LogListen,
}

impl Default for RawLog {
    fn default() -> Self {
        // UDP and not a unix socket: a chrooted HAProxy does not see the socket's path.
        Self { listen: constant(haproxy_config::LOG_TO) }
    }
}

#[derive(Deserialize, Serialize, Debug)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawHaproxy {
    pub(super) socket: Option<SocketAddr>,
    pub(super) poll: Time<100, { 60 * SECOND }>,
    #[serde(deserialize_with = "header")]
    pub(super) session_header: String,
}

fn header<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let text = String::deserialize(deserializer)?;
    if text.is_empty() {
        // As Ray has it: no header.
        return Ok(text);
    }
    haproxy_config::header_name(&text).map_err(serde::de::Error::custom)
}

impl Default for RawHaproxy {
    fn default() -> Self {
        Self {
            socket: None,
            // A poll costs HAProxy 0.2 ms, and a server that changes its state causes one at once.
            poll: Time(Duration::from_secs(1)),
            session_header: haproxy_config::SESSION_HEADER.to_owned(),
        }
    }
}

#[derive(Deserialize, Serialize, Debug)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawEngine {
    pub(super) poll: Time<100, { 60 * SECOND }>,
    /// 0 is never.
    pub(super) parity_probe: Time<0, { 24 * HOUR }>,
}

impl Default for RawEngine {
    fn default() -> Self {
        Self {
            // Our own bookings tell of the time in between.
            poll: Time(Duration::from_secs(1)),
            // Eleven short questions, which change their answer with a restart, and that is asked for at once.
            parity_probe: Time(Duration::from_secs(600)),
        }
    }
}

#[derive(Deserialize, Serialize, Debug)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawPrompt {
    pub(super) threads: Option<Count<1, 1024>>,
    pub(super) queue: Count<0, 1_000_000>,
    pub(super) inline_bytes: ByteSize<0, MIB>,
    pub(super) cache_bytes: ByteSize<0, { usize::MAX }>,
}

impl Default for RawPrompt {
    fn default() -> Self {
        Self {
            threads: None,
            // More would not be reached before the deadline.
            queue: Count(256),
            // Below this a hand-over to another thread costs as much as the work.
            inline_bytes: ByteSize(2 << 10),
            // The ids of the last half minute of a thousand requests a second with 1,000 new tokens each.
            cache_bytes: ByteSize(256 * MIB),
        }
    }
}

#[derive(Deserialize, Serialize, Debug)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawIndex {
    pub(super) max_bytes: ByteSize<MIB, { usize::MAX }>,
}

impl Default for RawIndex {
    fn default() -> Self {
        // About 30 million blocks: 64 replicas of 8 million tokens each.
        Self { max_bytes: ByteSize(1024 * MIB) }
    }
}

/// None by default: one agent is the usual case.
#[derive(Deserialize, Serialize, Debug, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawPeers {
    pub(super) listen: Option<Spanned<HostPort>>,
    pub(super) connect: Vec<Spanned<HostPort>>,
    pub(super) secret_file: Option<PathBuf>,
}

#[derive(Deserialize, Serialize, Debug)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawRecord {
    pub(super) max_bytes: ByteSize<0, { usize::MAX }>,
    pub(super) file: Option<PathBuf>,
    pub(super) file_max_bytes: ByteSize<MIB, { usize::MAX }>,
}

impl Default for RawRecord {
    fn default() -> Self {
        Self {
            // A hundred thousand decisions, and the numbers of a million blocks.
            max_bytes: ByteSize(64 * MIB),
            file: None,
            file_max_bytes: ByteSize(64 * MIB),
        }
    }
}

#[derive(Deserialize, Serialize, Debug)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawSelect {
    pub(super) policy: PolicyName,
    /// Up to thirty days.
    pub(super) lease: Time<SECOND, { 720 * HOUR }>,
    pub(super) seed: Option<u64>,
    pub(super) decode_progress: bool,
    pub(super) dynamo: RawDynamo,
}

/// The weights of Dynamo's formula. Each has Dynamo's own name.
#[derive(Deserialize, Serialize, Debug)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawDynamo {
    pub(super) overlap_score_credit: Weight<1_000>,
    pub(super) overlap_score_credit_decay: Weight<1_000>,
    pub(super) prefill_load_scale: Weight<1_000>,
    pub(super) host_cache_hit_weight: Weight<1>,
    pub(super) disk_cache_hit_weight: Weight<1>,
    pub(super) decode_active_request_weight: Weight<1_000_000>,
    pub(super) router_temperature: Weight<1_000>,
}

impl From<RawDynamo> for DynamoWeights {
    fn from(raw: RawDynamo) -> Self {
        Self {
            overlap_score_credit: raw.overlap_score_credit.0,
            overlap_score_credit_decay: raw.overlap_score_credit_decay.0,
            prefill_load_scale: raw.prefill_load_scale.0,
            host_cache_hit_weight: raw.host_cache_hit_weight.0,
            disk_cache_hit_weight: raw.disk_cache_hit_weight.0,
            decode_active_request_weight: raw.decode_active_request_weight.0,
            router_temperature: raw.router_temperature.0,
        }
    }
}

impl Default for RawDynamo {
    fn default() -> Self {
        // Dynamo's (1.6.1).
        Self {
            overlap_score_credit: Weight(1.0),
            overlap_score_credit_decay: Weight(0.0),
            prefill_load_scale: Weight(1.0),
            host_cache_hit_weight: Weight(0.75),
            disk_cache_hit_weight: Weight(0.25),
            decode_active_request_weight: Weight(0.0),
            router_temperature: Weight(0.0),
        }
    }
}

impl Default for RawSelect {
    fn default() -> Self {
        Self {
            policy: PolicyName::Cost,
            // Far above any real request: a booking ends by its log line; this only bounds what lost lines leave.
            lease: Time(Duration::from_millis(6 * HOUR)),
            seed: None,
            // As Ray's. What it adds to the load is small against the prompts, in simulation.
            decode_progress: false,
            dynamo: RawDynamo::default(),
        }
    }
}

#[derive(Deserialize, Serialize, Debug)]
#[serde(deny_unknown_fields)]
pub(super) struct RawPool {
    pub(super) backend: Spanned<String>,
    #[serde(default)]
    pub(super) mode: Mode,
    pub(super) model_dir: Option<Spanned<PathBuf>>,
    pub(super) model: Option<String>,
    #[serde(default)]
    pub(super) prompt: Rendering,
    #[serde(default)]
    pub(super) revision: Vec<RawRevision>,
    #[serde(default)]
    pub(super) adapters: Vec<String>,
    pub(super) max_model_len: Option<Count<1, 1_000_000_000>>,
    pub(super) replicas_file: Option<PathBuf>,
    #[serde(default)]
    pub(super) events: RawEvents,
    #[serde(default)]
    pub(super) http: RawHttp,
    #[serde(default)]
    pub(super) replica: Vec<RawReplica>,
    #[serde(default, rename = "override")]
    pub(super) overrides: Vec<RawReplica>,
}

#[derive(Deserialize, Serialize, Debug)]
#[serde(deny_unknown_fields)]
pub(super) struct RawRevision {
    pub(super) name: Spanned<String>,
    pub(super) model_dir: Option<PathBuf>,
    pub(super) prompt: Option<Rendering>,
}

#[derive(Deserialize, Serialize, Debug, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawHttp {
    pub(super) tls: Option<bool>,
    pub(super) ca_file: Option<PathBuf>,
    pub(super) cert_file: Option<Spanned<PathBuf>>,
    pub(super) key_file: Option<Spanned<PathBuf>>,
    pub(super) server_name: Option<String>,
    pub(super) api_key_file: Option<PathBuf>,
}

#[derive(Deserialize, Serialize, Debug)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawEvents {
    pub(super) port_base: Count<1, 65_535>,
    pub(super) replay_offset: Count<1, 65_535>,
    pub(super) token_port_base: Option<Count<1, 65_535>>,
    pub(super) node_rank: NodeRank,
    pub(super) listen: Option<ListenEndpoint>,
}

impl Default for RawEvents {
    fn default() -> Self {
        Self {
            // vLLM's default endpoint, and Ray's KV_EVENTS_PORT_BASE.
            port_base: Count(5557),
            // Ray's; vLLM's examples have 5558, which is the second rank's.
            replay_offset: Count(1000),
            // Ray's is 7557, but only its own replicas take tokens.
            token_port_base: None,
            node_rank: NodeRank::default(),
            listen: None,
        }
    }
}

#[derive(Deserialize, Serialize, Debug)]
#[serde(deny_unknown_fields)]
pub(super) struct RawReplica {
    pub(super) server: Spanned<String>,
    pub(super) id: Option<String>,
    pub(super) http: Option<HttpAddr>,
    pub(super) topic: Option<String>,
    pub(super) events: Option<Spanned<Endpoints>>,
    pub(super) replay: Option<Spanned<Endpoints>>,
    pub(super) tokens: Option<Spanned<Endpoints>>,
    pub(super) cache_blocks: Option<Count<1, 1_000_000_000>>,
    pub(super) ranks: Option<Count<1, 1024>>,
    pub(super) revision: Option<Spanned<String>>,
}

fn constant<T: FromStr>(text: &str) -> T {
    text.parse().unwrap_or_else(|_| unreachable!("a constant of ours"))
}
