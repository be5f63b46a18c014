//! What HAProxy and the engines last said of the pool's ranks. Written by polls, read by look-ups without a lock.

use super::{Pool, Rank, Ranks};
use crate::{
    replica::{EngineReport, Server, ServerState},
    select::{Candidate, EngineLoad, Excluded, Load, Slots},
    units::{RankId, Revision},
};
use arc_swap::ArcSwap;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// Polls that may fail before what was said is taken as out of date.
const POLLS_TO_MISS: u32 = 3;

/// HAProxy's word holds at least so long: through a reload, and where only its log tells of a server.
const MIN_SERVERS_FRESH: Duration = Duration::from_secs(10);

/// The same for an engine's word: shorter, for its load changes by the second.
const MIN_ENGINES_FRESH: Duration = Duration::from_secs(3);

/// Blocks of a cache of which nothing is known: 128 Ki tokens in vLLM's usual blocks, the cache of a small GPU. More
/// would count as present what a small one has long evicted.
const USUAL_CACHE_BLOCKS: u32 = 8192;

/// The last word of HAProxy, and how long words count.
#[derive(Debug)]
pub(super) struct Live {
    servers: ArcSwap<Servers>,
    /// What stands in for a word that is out of date.
    nothing: Arc<Servers>,
    /// How long words count, in milliseconds.
    servers_fresh_ms: AtomicU64,
    engines_fresh_ms: AtomicU64,
}

/// The servers of a pool at one moment, by rank.
#[derive(Clone, Debug, Default)]
pub struct Servers {
    at: Option<Instant>,
    by_rank: Vec<Option<ServerView>>,
}

/// The server of one rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ServerView {
    /// Its state; `None`: HAProxy has no server of that name.
    pub state: Option<ServerState>,
    /// Its weight, 0 to 256.
    pub weight: u32,
    /// Why HAProxy would send no request there.
    pub excluded: Option<Excluded>,
    /// Its concurrency.
    pub slots: Slots,
    /// Connections in use.
    pub connections: u32,
}

/// One rank's engine.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct EngineView {
    /// What it reported.
    pub report: EngineReport,
    /// When.
    at: Instant,
    /// Our bookings there at that time.
    booked: u32,
}

/// The shape of one rank's cache as its engine last told: it holds while the engine is not heard. 0 is not known.
#[derive(Debug, Default)]
pub(super) struct Layout {
    block_tokens: AtomicU32,
    blocks: AtomicU32,
}

impl Layout {
    /// Tokens in a block.
    pub(super) fn block_tokens(&self) -> Option<u32> {
        told(&self.block_tokens)
    }

    fn take(&self, report: &EngineReport) {
        self.block_tokens.store(report.block_tokens.unwrap_or_default(), Ordering::Relaxed);
        self.blocks.store(report.capacity_blocks.unwrap_or_default(), Ordering::Relaxed);
    }
}

fn is_fresh(at: Instant, now: Instant, fresh_ms: &AtomicU64) -> bool {
    now.saturating_duration_since(at) < Duration::from_millis(fresh_ms.load(Ordering::Relaxed))
}

fn told(number: &AtomicU32) -> Option<u32> {
    Some(number.load(Ordering::Relaxed)).filter(|number| *number > 0)
}

impl ServerView {
    /// Before HAProxy has said anything.
    const UNTOLD: Self = Self {
        state: None,
        weight: 100,
        excluded: None,
        slots: Slots { in_flight: 0, limit: None, queued: 0, booked: 0 },
        connections: 0,
    };
}

impl Servers {
    /// The server of a rank; `None` where HAProxy has said nothing of late.
    #[must_use]
    pub fn get(&self, rank: RankId) -> Option<&ServerView> {
        self.by_rank.get(rank.index())?.as_ref()
    }
}

impl EngineView {
    const fn load(&self) -> EngineLoad {
        EngineLoad { running: self.report.running, waiting: self.report.waiting, booked: self.booked }
    }
}

impl Live {
    pub(super) fn new(haproxy_poll: Duration, engine_poll: Duration) -> Self {
        let live = Self {
            servers: ArcSwap::default(),
            nothing: Arc::default(),
            servers_fresh_ms: AtomicU64::default(),
            engines_fresh_ms: AtomicU64::default(),
        };
        live.set_polls(haproxy_poll, engine_poll);
        live
    }

    /// They are asked so often from now on.
    pub(super) fn set_polls(&self, haproxy_poll: Duration, engine_poll: Duration) {
        let set = |fresh_ms: &AtomicU64, poll: Duration, least: Duration| {
            let fresh = (poll * POLLS_TO_MISS).max(least).as_millis();
            fresh_ms.store(u64::try_from(fresh).unwrap_or(u64::MAX), Ordering::Relaxed);
        };
        set(&self.servers_fresh_ms, haproxy_poll, MIN_SERVERS_FRESH);
        set(&self.engines_fresh_ms, engine_poll, MIN_ENGINES_FRESH);
    }

    fn servers(&self, now: Instant) -> Arc<Servers> {
        let servers = self.servers.load();
        let is_fresh = servers.at.is_some_and(|at| is_fresh(at, now, &self.servers_fresh_ms));
        if is_fresh { Arc::clone(&servers) } else { Arc::clone(&self.nothing) }
    }

    fn engine(&self, rank: &Rank, now: Instant) -> Option<EngineView> {
        let view = rank.engine.load();
        let view = **view.as_ref()?;
        is_fresh(view.at, now, &self.engines_fresh_ms).then_some(view)
    }

    /// What was said of these ranks was said of others, who had their ids before.
    pub(super) fn forget(&self, ranks: &[RankId]) {
        let mut servers = Servers::clone(&self.servers.load());
        for rank in ranks {
            if let Some(view) = servers.by_rank.get_mut(rank.index()) {
                *view = None;
            }
        }
        self.servers.store(Arc::new(servers));
    }
}

impl Pool {
    /// The servers as HAProxy last told of them; empty once that is out of date.
    #[must_use]
    pub fn servers(&self, now: Instant) -> Arc<Servers> {
        self.live.servers(now)
    }

    /// What a rank's engine last reported, unless that is out of date.
    #[must_use]
    pub fn engine(&self, rank: &Rank, now: Instant) -> Option<EngineView> {
        self.live.engine(rank, now)
    }

    /// Blocks of a rank's cache over all tiers: as configured, else as its engine last told of its GPU tier.
    pub(super) fn cache_blocks(ranks: &Ranks, rank: RankId) -> u32 {
        let known =
            ranks.get(rank).and_then(|rank| rank.feed.cache_blocks.or_else(|| told(&rank.layout.blocks)));
        known.unwrap_or(USUAL_CACHE_BLOCKS)
    }

    /// Bookings by rank, those of other agents included: for the `booked` of [`Self::take_engines`].
    #[must_use]
    pub fn booked(&self) -> Vec<u32> {
        self.count_booked(|load| load.requests)
    }

    /// Bookings by rank that were made here: for the `booked` of [`Self::take_servers`].
    #[must_use]
    pub fn booked_here(&self) -> Vec<u32> {
        self.count_booked(|load| load.own_requests())
    }

    fn count_booked(&self, count: impl Fn(&Load) -> u32) -> Vec<u32> {
        let scheduler = self.scheduler.lock();
        let mut booked = vec![0; self.ranks.load().table_len()];
        for (rank, load) in scheduler.loads() {
            if let Some(booked) = booked.get_mut(rank.index()) {
                *booked = count(&load);
            }
        }
        booked
    }

    /// Takes in what HAProxy told of all servers of the backend. `booked` are our bookings when it was asked.
    pub fn take_servers(&self, servers: &[Server], booked: &[u32], now: Instant) {
        let excluded = exclusions(servers);
        // A request that came or went meanwhile must not look like another client's.
        let booked_now = self.booked_here();
        let booked = |id: RankId| {
            let counts = [booked, &booked_now].into_iter().filter_map(|booked| booked.get(id.index()));
            counts.max().copied().unwrap_or_default()
        };
        let ranks = self.ranks.load();
        let mut by_rank = vec![None; ranks.table_len()];
        for (id, rank) in ranks.iter() {
            let view = match servers.iter().position(|server| *server.name == *rank.server) {
                None => ServerView { excluded: Some(Excluded::Unknown), ..ServerView::UNTOLD },
                Some(at) => {
                    let server = &servers[at];
                    ServerView {
                        state: Some(server.state),
                        weight: server.weight,
                        excluded: excluded[at],
                        slots: Slots {
                            in_flight: server.in_flight,
                            limit: server.limit,
                            queued: server.queued,
                            booked: booked(id),
                        },
                        connections: server.connections,
                    }
                }
            };
            by_rank[id.index()] = Some(view);
        }
        self.live.servers.store(Arc::new(Servers { at: Some(now), by_rank }));
        self.sync_open(now);
    }

    /// Takes in that HAProxy's log tells of a server going down or up. It holds until the next poll, or where there is
    /// none, for some seconds: a line may be lost, and a server must not stay excluded for want of it.
    pub fn take_notice(&self, server: &str, up: bool, now: Instant) {
        let mut servers = Servers::clone(&self.servers(now));
        servers.at = servers.at.or(Some(now));
        let ranks = self.ranks.load();
        servers.by_rank.resize(ranks.table_len(), None);
        let (state, excluded) =
            if up { (ServerState::Up, None) } else { (ServerState::Down, Some(Excluded::Down)) };
        for rank in ranks.of_server(server) {
            if let Some(view) = servers.by_rank.get_mut(rank.index()) {
                let before = view.unwrap_or(ServerView::UNTOLD);
                *view = Some(ServerView { state: Some(state), excluded, ..before });
            }
        }
        self.live.servers.store(Arc::new(servers));
        self.sync_open(now);
        self.doubt_server(server, !up);
    }

    /// Takes in what the engines of one replica reported. `booked` are our bookings when they were asked.
    pub fn take_engines(&self, server: &str, reports: &[EngineReport], booked: &[u32], now: Instant) {
        let booked_now = self.booked();
        let ranks = self.ranks.load();
        for (rank, report) in engine_ranks(&ranks, server, reports) {
            let booked = [booked, &booked_now].iter().filter_map(|booked| booked.get(rank.index())).max();
            let view = EngineView { report, at: now, booked: booked.copied().unwrap_or_default() };
            if let Some(rank) = ranks.get(rank) {
                rank.engine.store(Some(Arc::new(view)));
                rank.layout.take(&report);
            }
        }
    }

    /// Tells the scheduler which ranks can be chosen now.
    pub fn sync_open(&self, now: Instant) {
        let servers = self.servers(now);
        let mut scheduler = self.scheduler.lock();
        let ranks = self.ranks.load();
        for rank in ranks.ids() {
            let excluded = servers.get(rank).and_then(|server| server.excluded);
            let is_open = excluded.or(Self::told_not_to(&ranks, rank)).is_none();
            scheduler.set_open(rank, is_open, now);
            if excluded == Some(Excluded::Down) {
                // Most likely it has to start anew.
                scheduler.forget_history(rank);
            }
        }
    }

    /// A candidate with all that is known of its server and engine.
    pub(super) fn candidate(
        &self,
        ranks: &Ranks,
        rank: RankId,
        block_tokens: u32,
        servers: &Servers,
        now: Instant,
    ) -> Candidate {
        let server = servers.get(rank).unwrap_or(&ServerView::UNTOLD);
        Candidate {
            excluded: server.excluded.or(Self::told_not_to(ranks, rank)),
            weight: server.weight,
            slots: server.slots,
            revision: ranks.get(rank).map_or(Revision(0), |rank| rank.revision),
            reported: ranks.get(rank).and_then(|rank| self.engine(rank, now)).map(|engine| engine.load()),
            ..Candidate::idle(rank, block_tokens)
        }
    }
}

/// Which report is which rank's: in their order, where there are as many; otherwise by number.
pub(super) fn engine_ranks(
    ranks: &Ranks,
    server: &str,
    reports: &[EngineReport],
) -> Vec<(RankId, EngineReport)> {
    let ranks = ranks.of_server(server);
    if ranks.len() == reports.len() {
        return ranks.iter().copied().zip(reports.iter().copied()).collect();
    }
    let numbered =
        reports.iter().filter_map(|report| Some((*ranks.get(usize::from(report.engine))?, *report)));
    numbered.collect()
}

/// Why HAProxy would send no request to each of a backend's servers. Backups serve only while no primary does, and then
/// only the first of them (`option allbackups` is not to be seen from outside).
fn exclusions(servers: &[Server]) -> Vec<Option<Excluded>> {
    let usable = |server: &&Server| server.state == ServerState::Up && server.weight > 0;
    let primary = servers.iter().filter(usable).any(|server| !server.backup);
    let backup = servers.iter().filter(usable).find(|server| server.backup).map(|server| &server.name);
    let exclusion = |server: &Server| match server.state {
        ServerState::Down => Some(Excluded::Down),
        ServerState::Maint => Some(Excluded::Maintenance),
        ServerState::Drain => Some(Excluded::Drained),
        ServerState::Up if server.weight == 0 => Some(Excluded::Drained),
        ServerState::Up if server.backup && (primary || Some(&server.name) != backup) => {
            Some(Excluded::Backup)
        }
        ServerState::Up => None,
    };
    servers.iter().map(exclusion).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;
    use crate::pool::testing::{pool, server};

    fn told(servers: &[Server]) -> Vec<Option<Excluded>> {
        let pool = pool(1, 2);
        let now = Instant::now();
        pool.take_servers(servers, &[0; 2], now);
        let servers = pool.servers(now);
        let ranks = pool.ranks();
        ranks.ids().map(|rank| pool.candidate(&ranks, rank, 16, &servers, now).excluded).collect()
    }

    #[test]
    fn only_servers_that_haproxy_would_choose_can_be_named() {
        for (state, expected) in [
            (ServerState::Up, None),
            (ServerState::Down, Some(Excluded::Down)),
            (ServerState::Maint, Some(Excluded::Maintenance)),
            (ServerState::Drain, Some(Excluded::Drained)),
        ] {
            assert_eq!(told(&[Server { state, ..server("s1") }, server("s2")]), [expected, None]);
        }
        let drained = Server { weight: 0, ..server("s1") };
        assert_eq!(told(&[drained, server("s2")]), [Some(Excluded::Drained), None]);
        assert_eq!(told(&[server("s2")]), [Some(Excluded::Unknown), None]);
    }

    #[test]
    fn a_backup_waits_for_the_last_primary_and_the_second_for_the_first() {
        let backup = |name| Server { backup: true, ..server(name) };
        let down = Server { state: ServerState::Down, ..server("s0") };
        assert_eq!(told(&[server("s1"), backup("s2")]), [None, Some(Excluded::Backup)]);
        assert_eq!(told(&[down.clone(), backup("s1"), backup("s2")]), [None, Some(Excluded::Backup)]);
        let drained = Server { weight: 0, ..server("s1") };
        assert_eq!(told(&[drained, backup("s2")]), [Some(Excluded::Drained), None]);
        // A primary of which nothing is configured here is one all the same.
        assert_eq!(told(&[server("s0"), backup("s1"), backup("s2")]), [Some(Excluded::Backup); 2]);
    }

    #[test]
    fn weight_and_slots_are_the_candidates() {
        let pool = pool(2, 1);
        let now = Instant::now();
        let full = Server { weight: 7, in_flight: 4, queued: 3, limit: Some(4), ..server("s1") };
        pool.take_servers(&[full], &[2, 0], now);
        let servers = pool.servers(now);
        let candidate = pool.candidate(&pool.ranks(), RankId(0), 16, &servers, now);
        assert_eq!(candidate.weight, 7);
        assert_eq!(candidate.slots, Slots { in_flight: 4, limit: Some(4), queued: 3, booked: 2 });
    }

    #[test]
    fn what_was_said_goes_out_of_date() {
        let pool = pool(1, 1);
        let engine = |pool: &Pool, now| pool.engine(pool.ranks().get(RankId(0))?, now);
        let now = Instant::now();
        pool.take_servers(&[Server { state: ServerState::Down, ..server("s1") }], &[0], now);
        let report = EngineReport { running: 3, ..EngineReport::default() };
        pool.take_engines("s1", &[report], &[2], now);
        assert_eq!(engine(&pool, now).map(|engine| engine.load().booked), Some(2));
        let later = now + MIN_SERVERS_FRESH;
        let candidate = pool.candidate(&pool.ranks(), RankId(0), 16, &pool.servers(later), later);
        assert_eq!((candidate.excluded, candidate.reported), (None, None));
    }

    #[test]
    fn the_shape_of_a_cache_is_the_configured_one_or_what_the_engine_told_also_while_it_is_silent() {
        let pool = pool(1, 1);
        let now = Instant::now();
        let shape = |server: &str| {
            let ranks = pool.ranks();
            let rank = ranks.of_server(server)[0];
            (ranks.get(rank).expect("a rank").layout.block_tokens(), Pool::cache_blocks(&ranks, rank))
        };
        assert_eq!(shape("s1"), (None, USUAL_CACHE_BLOCKS));
        let report =
            EngineReport { block_tokens: Some(32), capacity_blocks: Some(500), ..EngineReport::default() };
        pool.take_engines("s1", &[report], &[0], now);
        pool.take_engines("s1", &[], &[0], now);
        assert_eq!(shape("s1"), (Some(32), 500));
        let rank = config::Rank { cache_blocks: Some(4_000), ..config::Rank::default() };
        let configured =
            config::Replica { server: "s9".to_owned(), ranks: vec![rank], ..config::Replica::default() };
        pool.join(&configured, now).expect("room");
        pool.take_engines("s9", &[report], &[0], now);
        assert_eq!(shape("s9"), (Some(32), 4_000));
    }

    #[test]
    fn a_notice_counts_until_the_next_poll_and_alone_for_some_seconds() {
        let pool = pool(1, 2);
        let now = Instant::now();
        let excluded = |at| {
            let servers = pool.servers(at);
            let ranks = pool.ranks();
            let excluded = |rank| pool.candidate(&ranks, rank, 16, &servers, at).excluded;
            ranks.ids().map(excluded).collect::<Vec<_>>()
        };
        pool.take_notice("s2", false, now);
        assert_eq!(excluded(now), [None, Some(Excluded::Down)]);
        assert_eq!(excluded(now + MIN_SERVERS_FRESH), [None, None]);
        pool.take_notice("s2", true, now);
        assert_eq!(excluded(now), [None, None]);
        pool.take_notice("s2", false, now);
        pool.take_servers(&[server("s1"), server("s2")], &[0; 2], now);
        assert_eq!(excluded(now), [None, None]);
    }

    #[test]
    fn engines_are_matched_by_order_or_else_by_number() {
        let pool = pool(2, 1);
        let report = |engine| EngineReport { engine, ..EngineReport::default() };
        let ranks = |engines: &[u16]| {
            let reports: Vec<_> = engines.iter().map(|engine| report(*engine)).collect();
            let ranks = engine_ranks(&pool.ranks(), "s1", &reports).into_iter();
            ranks.map(|(rank, report)| (rank.0, report.engine)).collect::<Vec<_>>()
        };
        assert_eq!(ranks(&[6, 7]), [(0, 6), (1, 7)]);
        assert_eq!(ranks(&[1]), [(1, 1)]);
        assert_eq!(ranks(&[0, 1, 2]), [(0, 0), (1, 1)]);
        assert_eq!(engine_ranks(&pool.ranks(), "other", &[report(0)]).len(), 0);
    }
}
