//! Where a pool's replicas come from: the file's list, a list of its own that is watched, or HAProxy.

use super::{
    raw::{RawEvents, RawHttp, RawReplica},
    values::{Count, Endpoints, HttpAddr, Span},
};
use crate::events::Endpoint;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use toml::Spanned;

/// The most ranks of one pool. The index can tell 16,384 apart, restarted ones included.
pub const MAX_RANKS: usize = 4_096;

/// Where the names and addresses of a pool's replicas come from.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum ReplicaSource {
    /// The configuration lists them all.
    #[default]
    Listed,
    /// A JSON file lists them, and is read again when it changes.
    File(PathBuf),
    /// They are the servers of HAProxy's backend, as its runtime socket tells.
    Haproxy,
}

/// One replica: an HAProxy server and its engine.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Replica {
    /// The HAProxy server's name.
    pub server: String,
    /// The replica's own name, where it is another: what Ray Serve's HAProxy knows it by.
    pub id: Option<String>,
    /// The engine's HTTP address.
    pub http: Option<HttpAddr>,
    /// Where the KV events of each data-parallel rank are published and replayed. Without any, the engine is asked.
    pub ranks: Vec<Rank>,
    /// Blocks of each rank's cache over all tiers; absent: as the engine's `/metrics` tells of its GPU tier.
    pub cache_blocks: Option<u32>,
    /// The topic of its events, by which it is told from others that connect to the same endpoint; absent: as it says.
    pub topic: Option<String>,
    /// The [`super::Revision`] by which it makes prompts; absent: as the pool.
    pub revision: Option<String>,
}

/// The event endpoints of one data-parallel rank.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Rank {
    /// The PUB endpoint; absent: a replica without events, always scored as an empty cache.
    pub events: Option<Endpoint>,
    /// The replay (ROUTER) endpoint.
    pub replay: Option<Endpoint>,
    /// Where a replica of Ray Serve takes prompts' tokens (PULL).
    pub tokens: Option<Endpoint>,
    /// Blocks of its cache, as of the [`Replica`].
    pub cache_blocks: Option<u32>,
    /// The topic of its events, where `events` is an endpoint to which several replicas connect.
    pub topic: Option<String>,
}

/// Where events are beyond what engines tell themselves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EventPorts {
    /// Where the agent listens for engines whose publishers connect: for each one's first rank; the others' ports follow.
    pub listen: Option<Endpoint>,
    /// The PUB port of a machine's first rank, where engines cannot tell (vLLM without `/kv_event_sources`).
    pub base: u16,
    /// From a PUB port to its replay port.
    pub replay_offset: u16,
    /// Where a machine's first rank takes prompts' tokens, if replicas do that: those of Ray Serve.
    pub tokens: Option<u16>,
    /// Which rank of its machine a replica begins with.
    pub node_rank: NodeRank,
}

/// How a pool's replicas are reached by HTTP.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HttpAccess {
    /// Whether they speak TLS; absent: as HAProxy speaks to them, or as their addresses are written.
    pub tls: Option<bool>,
    /// The certificates of authorities that are trusted; absent: the system's.
    pub ca_file: Option<PathBuf>,
    /// Our certificate, where replicas ask for one, and its key.
    pub cert_file: Option<PathBuf>,
    /// The key of `cert_file`.
    pub key_file: Option<PathBuf>,
    /// The name for which the replicas' certificates are; absent: the host that is connected to.
    pub server_name: Option<String>,
    /// A file with the engines' API key.
    pub api_key_file: Option<PathBuf>,
}

impl HttpAccess {
    pub(super) fn build(raw: RawHttp, base: &Path) -> Result<Self, (Span, Wrong)> {
        let RawHttp { tls, ca_file, cert_file, key_file, server_name, api_key_file } = raw;
        let alone = |file: &Spanned<PathBuf>, other: &str| {
            (file.span(), ("http", format!("a certificate and its key go together: `{other}` is missing")))
        };
        match (&cert_file, &key_file) {
            (Some(cert), None) => return Err(alone(cert, "key_file")),
            (None, Some(key)) => return Err(alone(key, "cert_file")),
            _ => {}
        }
        let at = |path: PathBuf| base.join(path);
        let at_place = |path: Spanned<PathBuf>| base.join(path.into_inner());
        Ok(Self {
            tls,
            ca_file: ca_file.map(at),
            cert_file: cert_file.map(at_place),
            key_file: key_file.map(at_place),
            server_name,
            api_key_file: api_key_file.map(at),
        })
    }
}

/// How the ranks of a machine are counted over several replicas.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeRank {
    /// In the order of the servers of the same host.
    #[default]
    Order,
    /// By the number at the end of the server's name.
    Name,
}

impl From<&RawEvents> for EventPorts {
    fn from(raw: &RawEvents) -> Self {
        Self {
            listen: raw.listen.as_ref().map(|listen| listen.0.clone()),
            base: raw.port_base.0 as u16,
            replay_offset: raw.replay_offset.0 as u16,
            tokens: raw.token_port_base.map(|port| port.0 as u16),
            node_rank: raw.node_rank,
        }
    }
}

impl Default for EventPorts {
    fn default() -> Self {
        Self::from(&RawEvents::default())
    }
}

/// What is wrong with a replica: the key, and why.
pub(super) type Wrong = (&'static str, String);

/// The endpoints of `count` ranks; `None` where neither a number nor endpoints are given, so that the engine is asked.
pub(super) fn ranks(
    events: Option<&Endpoints>,
    replay: Option<&Endpoints>,
    tokens: Option<&Endpoints>,
    count: Option<usize>,
) -> Result<Vec<Rank>, Wrong> {
    for (endpoints, key) in [(replay, "replay"), (tokens, "tokens")] {
        if endpoints.is_some() && events.is_none() {
            return Err((key, format!("`{key}` needs `events` beside it")));
        }
    }
    let listed = [events, replay, tokens].into_iter().flatten().filter_map(Endpoints::listed).max();
    let Some(count) = count.or(listed).or_else(|| events.map(|_| 1)) else { return Ok(Vec::new()) };
    let of_rank = |endpoints: Option<&Endpoints>, key, rank| {
        let endpoint = endpoints.map(|endpoints| endpoints.of_rank(rank));
        endpoint.transpose().map_err(|why| (key, why))
    };
    (0..count as u16)
        .map(|rank| {
            Ok(Rank {
                events: of_rank(events, "events", rank)?,
                replay: of_rank(replay, "replay", rank)?,
                tokens: of_rank(tokens, "tokens", rank)?,
                ..Rank::default()
            })
        })
        .collect()
}

impl Replica {
    /// Of the file's text; an error comes with its place.
    pub(super) fn build(raw: RawReplica) -> Result<Self, (Span, Wrong)> {
        let RawReplica {
            server,
            id,
            http,
            topic,
            events,
            replay,
            tokens,
            cache_blocks,
            ranks: count,
            revision,
        } = raw;
        let [of_events, of_replay, of_tokens] =
            [&events, &replay, &tokens].map(|raw| raw.as_ref().map(Spanned::get_ref));
        let ranks = ranks(of_events, of_replay, of_tokens, count.map(|count| count.0)).map_err(|wrong| {
            let key = match wrong.0 {
                "replay" => &replay,
                "tokens" => &tokens,
                _ => &events,
            };
            (key.as_ref().map_or_else(|| server.span(), Spanned::span), wrong)
        })?;
        let cache_blocks = cache_blocks.map(|count| count.0 as u32);
        let revision = revision.map(Spanned::into_inner);
        Ok(Self { server: server.into_inner(), id, http, ranks, cache_blocks, topic, revision })
    }
}

/// The JSON file of [`ReplicaSource::File`]: `{"replicas": [{"server": …, "http": …, …}]}` with the keys of
/// `[[pool.replica]]`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReplicaFile {
    replicas: Vec<FileReplica>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileReplica {
    server: String,
    id: Option<String>,
    http: Option<HttpAddr>,
    topic: Option<String>,
    events: Option<Endpoints>,
    replay: Option<Endpoints>,
    tokens: Option<Endpoints>,
    cache_blocks: Option<Count<1, 1_000_000_000>>,
    ranks: Option<Count<1, 1024>>,
    revision: Option<String>,
}

/// Reads the text of a JSON file of replicas.
///
/// # Errors
/// What is wrong with it, in one line.
pub fn parse_replica_file(text: &str) -> Result<Vec<Replica>, String> {
    let file: ReplicaFile = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let mut names = std::collections::HashSet::new();
    let mut total = 0;
    let build = |raw: FileReplica| {
        super::unique(&mut names, &raw.server)?;
        let count = raw.ranks.map(|ranks| ranks.0);
        let ranks = ranks(raw.events.as_ref(), raw.replay.as_ref(), raw.tokens.as_ref(), count)
            .map_err(|(key, why)| format!("server {}: {key}: {why}", raw.server))?;
        total += ranks.len().max(1);
        if total > MAX_RANKS {
            return Err(format!("more than {MAX_RANKS} ranks in all"));
        }
        let cache_blocks = raw.cache_blocks.map(|count| count.0 as u32);
        let FileReplica { server, id, http, topic, revision, .. } = raw;
        Ok(Replica { server, id, http, ranks, cache_blocks, topic, revision })
    };
    file.replicas.into_iter().map(build).collect()
}
