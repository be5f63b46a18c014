//! Configuration: one TOML file, overridden by environment and flags, validated before anything is bound.
//!
//! `raw` is the file as written (serde, unknown keys refused); this module turns it into [`Config`], in which every
//! value is checked, typed and ready to use.

mod effective;
mod error;
pub mod knobs;
mod mode;
mod overrides;
mod raw;
mod rendering;
mod replicas;
mod running;
mod values;

pub use effective::{Origin, Setting};
pub use error::{ConfigError, Place};
pub use mode::{Handling, Mode, NoMode};
pub use overrides::Overrides;
pub use raw::DEFAULT_ADMIN;
pub use rendering::{Compat, ContentFormat, Rendering, Revision, UtcOffset};
pub use replicas::{
    EventPorts, HttpAccess, MAX_RANKS, NodeRank, Rank, Replica, ReplicaSource, parse_replica_file,
};
pub use running::{ConfigFile, read_bounded};
pub use values::{HostPort, HttpAddr, SocketAddr, Span, is_loopback};

use crate::{lifecycle::LogListen, spop::ListenAddr};
use raw::{RawConfig, RawPeers, RawPool, RawReplica, RawRevision};
use serde::{Deserialize, Serialize};
use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    time::Duration,
};
use toml::{Spanned, de::DeTable};
use values::Count;

/// A whole, validated configuration.
#[derive(Clone, PartialEq, Debug)]
pub struct Config {
    /// The SPOP side: where HAProxy asks.
    pub spop: Spop,
    /// Where metrics, health and explanations are served (plain HTTP).
    pub admin_listen: HostPort,
    /// Where HAProxy sends its log lines (UDP or a unix datagram socket).
    pub log_listen: LogListen,
    /// HAProxy's runtime socket.
    pub haproxy: Haproxy,
    /// How the engines are asked.
    pub engine: Engine,
    /// Turning prompts into tokens.
    pub prompt: Prompt,
    /// The bound of each pool's index, bytes.
    pub index_max_bytes: usize,
    /// How a replica is chosen.
    pub select: Select,
    /// Other agents that serve the same replicas.
    pub peers: Peers,
    /// What is kept of decisions.
    pub record: Record,
    /// The pools, in the file's order; at least one.
    pub pools: Vec<Pool>,
}

/// Other agents that serve the same replicas, with which bookings are shared.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Peers {
    /// Where they connect; absent: nobody is heard.
    pub listen: Option<HostPort>,
    /// Where each of them listens.
    pub connect: Vec<HostPort>,
    /// The file of the secret that all of them have; there if any of the others is.
    pub secret_file: Option<PathBuf>,
}

/// What is kept of decisions, for `shadow-report` and `replay`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    /// In memory, bytes; 0: nothing.
    pub max_bytes: usize,
    /// The file that they are written to; absent: none.
    pub file: Option<PathBuf>,
    /// The size at which the file is turned over, bytes.
    pub file_max_bytes: u64,
}

/// The SPOP listener and its limits.
#[derive(Clone, PartialEq, Debug)]
pub struct Spop {
    /// TCP address or unix socket path.
    pub listen: ListenAddr,
    /// The largest frame that is accepted, bytes. HAProxy's own limit (`tune.bufsize` − 4) is announced back to it
    /// where smaller.
    pub max_frame_bytes: u32,
    /// Connections at once; more wait in the kernel's queue.
    pub max_connections: usize,
    /// Requests being decided at once; more are answered without an opinion.
    pub max_in_flight: usize,
    /// Body bytes held at once over all connections; more are answered without an opinion.
    pub max_bytes_in_flight: usize,
    /// The time for one decision, after which HAProxy is answered without an opinion.
    pub deadline: Duration,
}

/// HAProxy's runtime socket, which tells the states of the servers.
#[derive(Clone, PartialEq, Debug)]
pub struct Haproxy {
    /// Where; absent: every server counts as up, by the same weight and without a limit.
    pub socket: Option<SocketAddr>,
    /// How often it is asked.
    pub poll: Duration,
    /// The request header that names a session. HAProxy's SPOE file has its own.
    pub session_header: String,
}

/// How the engines are asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Engine {
    /// How often each one's `/metrics` is read.
    pub poll: Duration,
    /// How often each one is asked whether it makes our tokens of some conversations; `None`: never.
    pub parity_probe: Option<Duration>,
}

/// Turning prompts into tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Prompt {
    /// Threads for prompts longer than `inline_bytes`.
    pub threads: usize,
    /// Prompts that may wait for such a thread; more are scored by load alone.
    pub queue: usize,
    /// Bodies up to this size are tokenized where they arrive.
    pub inline_bytes: usize,
}

/// How a replica is chosen.
#[derive(Clone, PartialEq, Debug)]
pub struct Select {
    /// The policy's name.
    pub policy: PolicyName,
    /// How long a booking may live when the log line of its end never comes.
    pub lease: Duration,
    /// Seed of the random choice among equals; absent: from the operating system.
    pub seed: Option<u64>,
    /// Whether the answers of booked requests count as load, by the blocks that the engines store for them.
    pub decode_progress: bool,
    /// The weights of [`PolicyName::Dynamo`].
    pub dynamo: DynamoWeights,
}

/// The weights of Dynamo's formula, under its names.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct DynamoWeights {
    /// What a GPU block saves, in blocks; above 1 amplifies.
    pub overlap_score_credit: f64,
    /// How fast that fades with a rank's excess of queued prefill; 0 is off.
    pub overlap_score_credit_decay: f64,
    /// The weight of prefill against decode.
    pub prefill_load_scale: f64,
    /// What a block in host memory saves, 0 to 1.
    pub host_cache_hit_weight: f64,
    /// What a block on disk saves, 0 to 1.
    pub disk_cache_hit_weight: f64,
    /// Blocks that each active request counts for besides its own.
    pub decode_active_request_weight: f64,
    /// 0 takes the lowest cost; higher draws more evenly, relative to the spread of costs.
    pub router_temperature: f64,
}

impl Default for DynamoWeights {
    fn default() -> Self {
        raw::RawDynamo::default().into()
    }
}

/// The policies that can be named.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyName {
    /// Queued and uncached tokens, weighted by how busy the pool is.
    #[default]
    Cost,
    /// The formula of Dynamo's KV router, under its own names.
    Dynamo,
    /// Fewest requests in flight.
    LeastLoaded,
    /// One after the other.
    RoundRobin,
}

/// One pool: an HAProxy backend that serves one base model.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Pool {
    /// The HAProxy backend's name.
    pub backend: String,
    /// Whether its requests go where kvspoa says.
    pub mode: Mode,
    /// The model directory; absent: the small model compiled in, for demonstrations.
    pub model_dir: Option<PathBuf>,
    /// How the engines were told to make prompts.
    pub rendering: Rendering,
    /// How some of them do it otherwise.
    pub revisions: Vec<Revision>,
    /// The bound of what is kept of earlier prompts, bytes; for each revision. 0 keeps nothing.
    pub cache_bytes: usize,
    /// Where `model_dir`, or else the pool's name, stands in the file.
    pub place: Place,
    /// What the replicas must serve: the model's name, or what it was loaded from; absent: as `model_dir` was fetched, else
    /// as the first replica tells.
    pub model: Option<String>,
    /// The LoRA adapters that clients may name as a model.
    pub adapters: Vec<String>,
    /// The longest prompt that the engines take, in tokens; absent: as they tell (`/v1/models`).
    pub max_model_len: Option<u32>,
    /// Where the replicas come from.
    pub source: ReplicaSource,
    /// The replicas that are listed, in the file's order; with another source, what it does not know of its own.
    pub replicas: Vec<Replica>,
    /// Where the KV events of engines are that cannot tell.
    pub event_ports: EventPorts,
    /// How the replicas are reached by HTTP.
    pub http: HttpAccess,
}

/// A configuration, and how it came about.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// What holds.
    pub config: Config,
    /// The same key by key, with where each value came from.
    pub settings: Vec<Setting>,
    /// What is no mistake for certain.
    pub warnings: Vec<String>,
}

impl Config {
    /// Reads and validates the file at `path`, then lays `overrides` over it.
    ///
    /// # Errors
    /// Any mistake, as one line that names the file, the line and the key.
    pub fn load(path: &Path, overrides: &Overrides) -> Result<Self, ConfigError> {
        let file = ConfigFile { path: path.to_owned(), overrides: overrides.clone() };
        file.load().map(|loaded| loaded.config)
    }

    /// Validates the text of a file; `path` serves messages and relative paths.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn parse(text: &str, path: &Path, overrides: &Overrides) -> Result<Self, ConfigError> {
        Loaded::parse(text, path, overrides).map(|loaded| loaded.config)
    }
}

impl Loaded {
    /// As [`Config::parse`].
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn parse(text: &str, path: &Path, overrides: &Overrides) -> Result<Self, ConfigError> {
        let wrong = |error: toml::de::Error| {
            let set = error.span().and_then(|span| overrides.origin(&span, text.len()));
            match set {
                Some(set) => {
                    ConfigError::Set { by: set.to_string(), why: error.message().replace('\n', " ") }
                }
                None => ConfigError::from_toml(path, text, &error),
            }
        };
        let mut file = DeTable::parse(text).map_err(wrong)?;
        overrides.lay_over(file.get_mut(), text.len())?;
        let mut raw = RawConfig::deserialize(toml::Deserializer::from(file.clone())).map_err(wrong)?;
        raw.prompt.threads.get_or_insert_with(|| Count(default_threads()));
        let origin = |span: Span| match overrides.origin(&span, text.len()) {
            Some(set) => set.clone(),
            None => Origin::File(Place::of(path, text, span)),
        };
        let settings = effective::settings(&raw, file.get_ref(), &origin);
        let config = build(raw, text, path)?;
        let mut warnings = overrides.warnings().to_vec();
        let is_of_dynamo = |setting: &&Setting| setting.key.starts_with("select.dynamo.");
        if config.select.policy != PolicyName::Dynamo
            && let Some(idle) =
                settings.iter().filter(is_of_dynamo).find(|setting| setting.origin != Origin::Default)
        {
            warnings.push(format!("{}: has no effect unless select.policy is dynamo", idle.origin));
        }
        Ok(Self { config, settings, warnings })
    }
}

fn build(raw: RawConfig, text: &str, path: &Path) -> Result<Config, ConfigError> {
    let fail = |at: Span, key: &str, why: String| ConfigError::at(path, text, at, key, why);
    if raw.pool.is_empty() {
        return Err(ConfigError::Invalid {
            place: Place { path: path.to_owned(), line: text.lines().count().max(1) },
            key: "pool".to_owned(),
            why: "no [[pool]] is configured: name the HAProxy backend and its replicas".to_owned(),
        });
    }
    if let Some(pool) = raw.pool.get(MAX_POOLS) {
        let why = format!("more than {MAX_POOLS} pools");
        return Err(fail(pool.backend.span(), "backend", why));
    }
    let mut backends = HashSet::new();
    for pool in &raw.pool {
        unique(&mut backends, pool.backend.get_ref())
            .map_err(|why| fail(pool.backend.span(), "backend", why))?;
    }
    let place = |at: Span| Place::of(path, text, at);
    let has_socket = raw.haproxy.socket.is_some();
    let cache_bytes = raw.prompt.cache_bytes.0;
    let pools = raw
        .pool
        .into_iter()
        .map(|pool| Ok(Pool { cache_bytes, ..build_pool(pool, has_socket, &place, &fail)? }))
        .collect::<Result<_, _>>()?;
    Ok(Config {
        spop: Spop {
            listen: raw.spop.listen,
            max_frame_bytes: raw.spop.max_frame_bytes.0 as u32,
            max_connections: raw.spop.max_connections.0,
            max_in_flight: raw.spop.max_in_flight.0,
            max_bytes_in_flight: raw.spop.max_bytes_in_flight.0,
            deadline: raw.spop.deadline.0,
        },
        admin_listen: raw.admin.listen,
        log_listen: raw.log.listen,
        haproxy: Haproxy {
            socket: raw.haproxy.socket,
            poll: raw.haproxy.poll.0,
            session_header: raw.haproxy.session_header,
        },
        engine: Engine {
            poll: raw.engine.poll.0,
            parity_probe: Some(raw.engine.parity_probe.0).filter(|period| !period.is_zero()),
        },
        prompt: Prompt {
            threads: raw.prompt.threads.map_or_else(default_threads, |count| count.0),
            queue: raw.prompt.queue.0,
            inline_bytes: raw.prompt.inline_bytes.0,
        },
        index_max_bytes: raw.index.max_bytes.0,
        peers: build_peers(raw.peers, path, &fail)?,
        record: Record {
            max_bytes: raw.record.max_bytes.0,
            file: raw.record.file.map(|file| path.parent().unwrap_or(Path::new(".")).join(file)),
            file_max_bytes: raw.record.file_max_bytes.0 as u64,
        },
        select: Select {
            policy: raw.select.policy,
            lease: raw.select.lease.0,
            seed: raw.select.seed,
            decode_progress: raw.select.decode_progress,
            dynamo: raw.select.dynamo.into(),
        },
        pools,
    })
}

/// Far above any site; what names a pool or a rank in the agent is 16 bits wide.
const MAX_POOLS: usize = 1_000;

/// Each has a model in memory, and a request is rendered once for each that replicas have.
const MAX_REVISIONS: usize = 8;

/// Each is told of every booking of all others: with more, a common queue before the replicas would serve better.
const MAX_PEERS: usize = 64;

fn build_peers(
    raw: RawPeers,
    path: &Path,
    fail: &impl Fn(Span, &str, String) -> ConfigError,
) -> Result<Peers, ConfigError> {
    if let Some(peer) = raw.connect.get(MAX_PEERS) {
        return Err(fail(peer.span(), "peers.connect", format!("more than {MAX_PEERS} peers")));
    }
    let first = raw.listen.iter().chain(&raw.connect).next();
    if let Some(first) = first.filter(|_| raw.secret_file.is_none()) {
        let why = "peers need a secret in common: make one by `openssl rand -hex 32`, and name its file";
        return Err(fail(first.span(), "peers.secret_file", why.to_owned()));
    }
    let base = path.parent().unwrap_or(Path::new("."));
    Ok(Peers {
        listen: raw.listen.map(Spanned::into_inner),
        connect: raw.connect.into_iter().map(Spanned::into_inner).collect(),
        secret_file: raw.secret_file.map(|file| base.join(file)),
    })
}

/// One core is left to the network side.
fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get().saturating_sub(1).max(1))
}

fn build_pool(
    raw: RawPool,
    has_socket: bool,
    place: &impl Fn(Span) -> Place,
    fail: &impl Fn(Span, &str, String) -> ConfigError,
) -> Result<Pool, ConfigError> {
    let at = raw.backend.span();
    let place = place(raw.model_dir.as_ref().map_or(at.clone(), Spanned::span));
    let base = place.path.parent().unwrap_or(Path::new("."));
    let (listed, overrides) = (!raw.replica.is_empty(), !raw.overrides.is_empty());
    let source = match raw.replicas_file {
        Some(_) if listed => {
            return Err(fail(at, "replicas_file", "the pool lists its replicas itself".to_owned()));
        }
        Some(file) => ReplicaSource::File(base.join(file)),
        None if listed => ReplicaSource::Listed,
        None if has_socket => ReplicaSource::Haproxy,
        None => {
            let why = "the pool has no replicas: set haproxy.socket, or list them as [[pool.replica]]";
            return Err(fail(at, "backend", why.to_owned()));
        }
    };
    if listed && overrides {
        return Err(fail(at, "override", "the pool lists its replicas itself: change them there".to_owned()));
    }
    let rendering = raw.prompt.at(base);
    let model_dir = raw.model_dir.map(|dir| base.join(dir.into_inner()));
    let revisions = build_revisions(raw.revision, base, model_dir.as_deref(), &rendering, fail)?;
    Ok(Pool {
        event_ports: EventPorts::from(&raw.events),
        http: HttpAccess::build(raw.http, base).map_err(|(at, (key, why))| fail(at, key, why))?,
        backend: raw.backend.into_inner(),
        mode: raw.mode,
        model_dir,
        rendering,
        place: place.clone(),
        model: raw.model,
        adapters: raw.adapters,
        max_model_len: raw.max_model_len.map(|count| count.0 as u32),
        source,
        replicas: build_replicas(raw.replica.into_iter().chain(raw.overrides), &revisions, fail)?,
        revisions,
        cache_bytes: 0,
    })
}

fn build_revisions(
    raw: Vec<RawRevision>,
    base: &Path,
    model_dir: Option<&Path>,
    rendering: &Rendering,
    fail: &impl Fn(Span, &str, String) -> ConfigError,
) -> Result<Vec<Revision>, ConfigError> {
    if let Some(revision) = raw.get(MAX_REVISIONS) {
        return Err(fail(revision.name.span(), "name", format!("more than {MAX_REVISIONS} revisions")));
    }
    let mut names = HashSet::new();
    let build = |raw: RawRevision| {
        let at = raw.name.span();
        let name = raw.name.into_inner();
        if name.is_empty() || !names.insert(name.clone()) {
            return Err(fail(at, "name", format!("`{name}` is empty, or the name of another revision")));
        }
        Ok(Revision {
            name,
            model_dir: raw.model_dir.map(|dir| base.join(dir)).or_else(|| model_dir.map(Path::to_owned)),
            rendering: raw.prompt.map_or_else(|| rendering.clone(), |prompt| prompt.at(base)),
        })
    };
    raw.into_iter().map(build).collect()
}

fn build_replicas(
    raw: impl Iterator<Item = RawReplica>,
    revisions: &[Revision],
    fail: &impl Fn(Span, &str, String) -> ConfigError,
) -> Result<Vec<Replica>, ConfigError> {
    let mut servers = HashSet::new();
    let mut ranks = 0;
    let build = |raw: RawReplica| {
        let at = raw.server.span();
        unique(&mut servers, raw.server.get_ref()).map_err(|why| fail(at.clone(), "server", why))?;
        if let Some(revision) = raw.revision.as_ref()
            && !revisions.iter().any(|known| known.name == *revision.get_ref())
        {
            let why = format!("no [[pool.revision]] has the name `{}`", revision.get_ref());
            return Err(fail(revision.span(), "revision", why));
        }
        let replica = Replica::build(raw).map_err(|(at, (key, why))| fail(at, key, why))?;
        ranks += replica.ranks.len().max(1);
        if ranks > MAX_RANKS {
            return Err(fail(at, "server", format!("the pool has more than {MAX_RANKS} ranks in all")));
        }
        Ok(replica)
    };
    raw.map(build).collect()
}

/// The rules of HAProxy for the names of proxies and servers. Such a name is safe in a command of the runtime socket.
fn unique(seen: &mut HashSet<String>, name: &str) -> Result<(), String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':');
    if name.is_empty() || !name.chars().all(allowed) {
        return Err(format!("`{name}` is no name in HAProxy: letters, digits, `-`, `_`, `.` and `:`"));
    }
    if !seen.insert(name.to_owned()) {
        return Err(format!("`{name}` is named twice"));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
