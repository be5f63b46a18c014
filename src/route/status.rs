//! `/status`: the pools and their replicas as they are now, for the status page and the commands. The names are a
//! contract; more may be added.

use super::Router;
use crate::{
    config::Handling,
    pool::{Decisions, FeedFault, Pool, Rank, Ranks, ServerRanks, Stream},
    replica::ServerState,
    select::{Excluded, Load},
    units::{RankId, Tier},
};
use serde::Serialize;
use std::{
    collections::BTreeMap,
    sync::atomic::Ordering,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

/// The whole agent.
#[derive(Debug, Serialize)]
pub struct Status {
    /// kvspoa's version.
    pub version: &'static str,
    /// When this was, in milliseconds since 1970.
    pub now_ms: u64,
    /// The pools, in the order of the configuration.
    pub pools: Vec<PoolStatus>,
}

/// One pool.
#[derive(Debug, Serialize)]
pub struct PoolStatus {
    /// The HAProxy backend.
    pub pool: String,
    /// The mode that holds: `on`, `shadow`, `off` or `share=…`.
    pub mode: String,
    /// The file's mode.
    pub configured_mode: String,
    /// Whether the replicas are known.
    pub settled: bool,
    /// What was decided since the start, by what was done about it: `on`, `shadow`, `off`.
    pub decisions: BTreeMap<&'static str, Decisions>,
    /// How fast a busy rank prefills, tokens a second.
    pub prefill_tokens_per_second: f64,
    /// What somebody has to mend.
    pub faults: Vec<Fault>,
    /// The replicas, in the order in which they joined.
    pub replicas: Vec<ReplicaStatus>,
}

/// What somebody has to mend, and how.
#[derive(Debug, Serialize)]
pub struct Fault {
    /// The replica, if it is of one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
    /// Its name.
    pub fault: &'static str,
    /// What to look at.
    pub advice: &'static str,
}

/// One replica.
#[derive(Debug, Serialize)]
pub struct ReplicaStatus {
    /// The HAProxy server.
    pub server: String,
    /// Where the engine answers.
    pub http: Option<String>,
    /// HAProxy's state of the server; null where it has not told.
    pub server_state: Option<&'static str>,
    /// Why it is not named, if so.
    pub excluded: Option<&'static str>,
    /// HAProxy's requests in flight.
    pub in_flight: Option<u32>,
    /// Its data-parallel ranks.
    pub ranks: Vec<RankStatus>,
}

/// One rank.
#[derive(Debug, Serialize)]
pub struct RankStatus {
    /// Its number in the replica.
    pub rank: u16,
    /// How far its cache is known.
    pub state: &'static str,
    /// Why it is not exact.
    pub state_reason: Option<&'static str>,
    /// The last batch of events applied.
    pub applied_seq: Option<u64>,
    /// How late that was, seconds, by both clocks.
    pub lag_seconds: f64,
    /// Tokens per block.
    pub block_tokens: Option<u32>,
    /// Blocks known in its GPU, CPU and disk tiers.
    pub blocks: [u64; 3],
    /// Blocks of its GPU cache, where the engine tells.
    pub capacity_blocks: Option<u32>,
    /// Booked requests.
    pub requests: u32,
    /// Booked prompt tokens whose prefill is not done.
    pub prefill_tokens: u64,
    /// What the engine reports: requests running and waiting.
    pub engine_running: Option<u32>,
    /// See above.
    pub engine_waiting: Option<u32>,
}

impl Router {
    /// The pools and their replicas as they are now.
    #[must_use]
    pub fn status(&self) -> Status {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Status {
            version: env!("CARGO_PKG_VERSION"),
            now_ms: u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX),
            pools: self.pools().iter().map(|pool| PoolStatus::of(pool, Instant::now())).collect(),
        }
    }
}

impl PoolStatus {
    fn of(pool: &Pool, now: Instant) -> Self {
        let (loads, rate): (BTreeMap<RankId, Load>, f64) = {
            let scheduler = pool.scheduler.lock();
            (scheduler.loads().collect(), scheduler.prefill_rate())
        };
        let ranks = pool.ranks();
        let streams = pool.streams(&ranks);
        let replica = |server: &ServerRanks| ReplicaStatus::of(pool, &ranks, server, &streams, &loads, now);
        let names = Handling::ALL.map(Handling::as_str);
        Self {
            pool: pool.backend.clone(),
            mode: pool.mode.get().to_string(),
            configured_mode: pool.mode.configured().to_string(),
            settled: pool.is_settled.load(Ordering::Relaxed),
            decisions: names.into_iter().zip(pool.tally.get()).collect(),
            prefill_tokens_per_second: rate,
            faults: faults(pool, &ranks),
            replicas: ranks.servers().map(replica).collect(),
        }
    }
}

impl ReplicaStatus {
    fn of(
        pool: &Pool,
        ranks: &Ranks,
        server: &ServerRanks,
        streams: &[Stream],
        loads: &BTreeMap<RankId, Load>,
        now: Instant,
    ) -> Self {
        let servers = pool.servers(now);
        let view = server.ids.first().and_then(|first| servers.get(*first));
        let told = view.and_then(|view| view.excluded);
        let excluded = told.or_else(|| pool.is_ignored(&server.name).then_some(Excluded::Ignored));
        let of_rank = |id: &RankId| {
            let rank = ranks.get(*id)?;
            let stream = streams.iter().find(|stream| stream.rank == *id)?;
            Some(RankStatus::of(pool, rank, stream, loads.get(id).copied().unwrap_or_default(), now))
        };
        let first = server.ids.first().and_then(|first| ranks.get(*first));
        Self {
            server: server.name.to_string(),
            http: first.and_then(|rank| rank.replica.http.as_ref()).map(ToString::to_string),
            server_state: view.and_then(|view| view.state).map(ServerState::as_str),
            excluded: excluded.map(Excluded::as_str),
            in_flight: view.filter(|view| view.state.is_some()).map(|view| view.slots.in_flight),
            ranks: server.ids.iter().filter_map(of_rank).collect(),
        }
    }
}

impl RankStatus {
    fn of(pool: &Pool, rank: &Rank, stream: &Stream, load: Load, now: Instant) -> Self {
        let caches = pool.caches.read();
        let stats = caches.index.rank_stats(stream.rank).unwrap_or_default();
        let lag_seconds = caches.feeds.get(stream.rank.index()).map_or(0.0, |feed| feed.lag_seconds);
        let report = pool.engine(rank, now).map(|engine| engine.report);
        Self {
            rank: rank.rank,
            state: stream.state.as_str(),
            state_reason: stream.state.reason(),
            applied_seq: stream.applied_seq,
            lag_seconds,
            block_tokens: stream.block_tokens,
            blocks: [Tier::Gpu, Tier::Cpu, Tier::Disk].map(|tier| stats.blocks_in(tier)),
            capacity_blocks: report.and_then(|report| report.capacity_blocks),
            requests: load.requests,
            prefill_tokens: load.prefill_tokens,
            engine_running: report.map(|report| report.running),
            engine_waiting: report.map(|report| report.waiting),
        }
    }
}

/// What somebody has to mend in a pool now.
fn faults(pool: &Pool, ranks: &Ranks) -> Vec<Fault> {
    let mut faults = Vec::new();
    let mut add = |server: Option<&str>, fault, advice| {
        faults.push(Fault { server: server.map(str::to_owned), fault, advice });
    };
    if pool.nothing_matches() {
        let advice =
            "no prompt ever matched a block that the replicas publish: are model_dir and adapters theirs?";
        add(None, "nothing_matches", advice);
    }
    if ranks.servers().next().is_none() {
        add(
            None,
            "no_replicas",
            "no replica has joined: does haproxy.socket answer, or are replicas listed?",
        );
    }
    for server in ranks.servers().filter(|server| server.serves_other_model()) {
        add(
            Some(&server.name),
            "other_model",
            "it serves another model than the pool's: no prompt will match",
        );
    }
    let caches = pool.caches.read();
    for (id, rank) in ranks.iter() {
        let fault: Option<FeedFault> = caches.feeds.get(id.index()).and_then(|feed| feed.fault());
        if let Some(fault) = fault {
            add(Some(&rank.server), fault.as_str(), fault.advice());
        }
    }
    faults
}
