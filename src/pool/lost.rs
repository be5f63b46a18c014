//! Bookings that HAProxy's log line did not end, or will end late: what the polls prove about them.
//!
//! A lost line: HAProxy and the engine both count fewer requests than are booked, for several polls on end. A request
//! that HAProxy sent elsewhere: its server went down, and its blocks appeared on another rank. Age proves nothing.

use super::{Pool, live::engine_ranks};
use crate::{
    replica::{EngineReport, Server, Sightings, Verdict},
    select::{Booked, Scheduler},
    units::RankId,
};
use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

/// After a reload, the old process of HAProxy still has requests that nobody counts: those that wait in its queues. No
/// queue is longer than this in the example (`timeout queue 60s`).
const AFTER_RELOAD: Duration = Duration::from_secs(120);

/// The runs of polls of every rank's server and engine.
#[derive(Debug, Default)]
pub(super) struct Polls {
    /// By the first rank of each server.
    haproxy: HashMap<RankId, Sightings>,
    engines: HashMap<RankId, Sightings>,
    suspended_until: Option<Instant>,
}

impl Pool {
    /// Takes in the counts of a poll of HAProxy.
    pub fn see_servers(&self, servers: &[Server], now: Instant) {
        let mut polls = self.polls.lock();
        for of_pool in self.ranks.load().servers() {
            let Some(first) = of_pool.ids.first() else { continue };
            let sightings = polls.haproxy.entry(*first).or_default();
            match servers.iter().find(|server| *server.name == *of_pool.name) {
                Some(server) => sightings.see(now, server.in_flight.saturating_add(server.queued)),
                None => sightings.interrupt(),
            }
        }
    }

    /// HAProxy could not be asked.
    pub fn miss_servers(&self) {
        self.polls.lock().haproxy.values_mut().for_each(Sightings::interrupt);
    }

    /// HAProxy is another process from now on.
    pub fn haproxy_replaced(&self, now: Instant) {
        self.miss_servers();
        self.polls.lock().suspended_until = Some(now + AFTER_RELOAD);
    }

    /// Takes in the counts of one replica's engines; no report interrupts them.
    pub fn see_engines(&self, server: &str, reports: &[EngineReport], now: Instant) {
        let ranks = self.ranks.load();
        let told = engine_ranks(&ranks, server, reports);
        let mut polls = self.polls.lock();
        for rank in ranks.of_server(server) {
            let sightings = polls.engines.entry(*rank).or_default();
            match told.iter().find(|(told, _)| told == rank) {
                Some((_, report)) => sightings.see(now, report.requests()),
                None => sightings.interrupt(),
            }
        }
    }

    /// Ends the bookings that neither HAProxy nor the engine has a request for; the oldest go first, for which request
    /// is gone cannot be told. Returns how many.
    pub fn end_lost(&self, now: Instant) -> usize {
        let polls = self.polls.lock();
        let suspended = polls.suspended_until.is_some_and(|until| now < until);
        let mut scheduler = self.scheduler.lock();
        let mut ended = 0;
        for server in self.ranks.load().servers() {
            let first = server.ids.first().and_then(|first| polls.haproxy.get(first));
            let haproxy = first.and_then(|sightings| sightings.verdict(now));
            let of_rank = |rank: RankId| polls.engines.get(&rank)?.verdict(now);
            let ranks: Vec<(RankId, Option<Verdict>)> =
                server.ids.iter().map(|rank| (*rank, of_rank(*rank))).collect();
            for (rank, engine) in &ranks {
                scheduler.set_counted(*rank, haproxy.is_some() && engine.is_some());
            }
            let Some(haproxy) = haproxy.filter(|_| !suspended) else { continue };
            // HAProxy counts what it was told by us, at least; an engine counts all.
            let own = |booking: &Booked| !booking.mirrored;
            let booked = |rank: RankId| before(&scheduler, rank, haproxy.since).filter(own).count();
            let on_server: usize = ranks.iter().map(|(rank, _)| booked(*rank)).sum();
            let mut gone_of_server = on_server.saturating_sub(haproxy.at_most as usize);
            for (rank, engine) in ranks {
                let Some(engine) = engine else { continue };
                let mut old: Vec<Booked> =
                    before(&scheduler, rank, haproxy.since.min(engine.since)).collect();
                let gone = old.len().saturating_sub(engine.at_most as usize).min(gone_of_server);
                old.retain(own);
                old.sort_unstable_by_key(|booking| booking.at);
                let gone = gone.min(old.len());
                for booking in old.into_iter().take(gone) {
                    scheduler.lose(booking.id);
                }
                gone_of_server -= gone;
                ended += gone;
            }
        }
        ended
    }

    /// Moves bookings of servers that take no requests to where their blocks have appeared. Returns how many.
    pub fn move_strays(&self, now: Instant) -> usize {
        let servers = self.servers(now);
        let closed = |rank: &RankId| servers.get(*rank).is_some_and(|server| server.excluded.is_some());
        let mut moved = 0;
        for rank in self.ranks.load().ids().filter(closed) {
            let mut scheduler = self.scheduler.lock();
            let strays = {
                let caches = self.caches.read();
                scheduler.strays(rank, |rank, sequence| caches.index.depth(rank, sequence))
            };
            for (id, target) in strays {
                let has_moved = scheduler.move_to(id, &target, now);
                if has_moved {
                    self.tell_place(&scheduler, id, &target);
                }
                moved += usize::from(has_moved);
            }
        }
        moved
    }

    /// These ranks have left; their ids will be others'.
    pub(super) fn forget_sightings(&self, ranks: &[RankId]) {
        let mut polls = self.polls.lock();
        for rank in ranks {
            polls.haproxy.remove(rank);
            polls.engines.remove(rank);
        }
    }
}

/// The bookings of a rank made before a moment.
fn before(scheduler: &Scheduler, rank: RankId, moment: Instant) -> impl Iterator<Item = Booked> {
    scheduler.bookings(rank).filter(move |booking| booking.at < moment)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        events::{KvEvent, Stored},
        pool::testing::{pool, server},
        replica::ServerState,
        select::{Ask, Candidate, PromptBlocks},
        units::{EngineHash, RequestId, SequenceHash, Tier, TokenId},
    };
    use std::sync::Arc;

    const SECOND: Duration = Duration::from_secs(1);

    fn book(pool: &Pool, id: u128, rank: u16, at: Instant) {
        let prompt = Arc::new(PromptBlocks::new(100, [(16, vec![SequenceHash(id as u64)])]));
        let ask = Ask { id: RequestId(id), prompt, session: None };
        let candidate = Candidate::idle(RankId(rank), 16);
        assert!(pool.scheduler.lock().book(&ask, &[candidate], at).booked);
    }

    fn booked(pool: &Pool) -> Vec<u128> {
        let scheduler = pool.scheduler.lock();
        let mut ids: Vec<u128> = pool
            .ranks()
            .ids()
            .flat_map(|rank| scheduler.bookings(rank))
            .map(|booking| booking.id.0)
            .collect();
        ids.sort_unstable();
        ids
    }

    /// One second later, HAProxy and the engine count so many requests on `s1`.
    fn poll(pool: &Pool, now: &mut Instant, on_haproxy: u32, in_engine: &[u32]) -> usize {
        *now += SECOND;
        pool.see_servers(&[Server { in_flight: on_haproxy, ..server("s1") }], *now);
        let reports: Vec<_> = (0..)
            .zip(in_engine)
            .map(|(engine, running)| EngineReport { engine, running: *running, ..EngineReport::default() })
            .collect();
        pool.see_engines("s1", &reports, *now);
        pool.end_lost(*now)
    }

    #[test]
    fn a_booking_ends_when_both_sides_have_no_request_for_it() {
        let (pool, mut now) = (pool(1, 1), Instant::now());
        book(&pool, 1, 0, now);
        book(&pool, 2, 0, now + SECOND / 2);
        let ended: Vec<usize> = (0..6).map(|_| poll(&pool, &mut now, 1, &[1])).collect();
        assert_eq!(ended, [0, 0, 0, 0, 1, 0]);
        assert_eq!(booked(&pool), [2], "the oldest goes first");
        assert_eq!(pool.scheduler.lock().counts().lost, 1);
    }

    #[test]
    fn one_side_alone_proves_nothing() {
        for (on_haproxy, in_engine) in [(1, 0), (0, 1)] {
            let (pool, mut now) = (pool(1, 1), Instant::now());
            book(&pool, 1, 0, now);
            for _ in 0..20 {
                assert_eq!(poll(&pool, &mut now, on_haproxy, &[in_engine]), 0);
            }
        }
        let (pool, mut now) = (pool(1, 1), Instant::now());
        book(&pool, 1, 0, now);
        for _ in 0..20 {
            assert_eq!(poll(&pool, &mut now, 0, &[]), 0, "the engine is silent");
        }
    }

    #[test]
    fn a_request_of_hours_keeps_its_load_while_it_is_counted() {
        let (pool, mut now) = (pool(1, 1), Instant::now());
        book(&pool, 1, 0, now);
        for _ in 0..3 * 3600 {
            assert_eq!(poll(&pool, &mut now, 1, &[1]), 0);
        }
        now += 10 * 3600 * SECOND;
        assert_eq!(pool.scheduler.lock().tick(now), 0, "no lease where requests are counted");
    }

    #[test]
    fn a_new_booking_is_not_judged_by_polls_before_it() {
        let (pool, mut now) = (pool(1, 1), Instant::now());
        for id in 1..20 {
            assert_eq!(poll(&pool, &mut now, 0, &[0]), 0);
            pool.scheduler.lock().end(RequestId(id - 1), None, now);
            book(&pool, id, 0, now);
        }
    }

    #[test]
    fn nothing_ends_for_a_while_after_haproxy_was_replaced() {
        let (pool, mut now) = (pool(1, 1), Instant::now());
        book(&pool, 1, 0, now);
        poll(&pool, &mut now, 1, &[0]);
        pool.haproxy_replaced(now);
        for _ in 0..AFTER_RELOAD.as_secs() - 1 {
            assert_eq!(poll(&pool, &mut now, 0, &[0]), 0);
        }
        assert_eq!(poll(&pool, &mut now, 0, &[0]), 1);
    }

    #[test]
    fn ranks_of_one_server_are_bounded_by_their_engine_and_all_by_haproxy() {
        let (pool, mut now) = (pool(2, 1), Instant::now());
        for (id, rank) in [(1, 0), (2, 0), (3, 1), (4, 1)] {
            book(&pool, id, rank, now);
        }
        for _ in 0..5 {
            poll(&pool, &mut now, 1, &[0, 2]);
        }
        assert_eq!(booked(&pool), [3, 4]);
        for _ in 0..5 {
            poll(&pool, &mut now, 1, &[0, 0]);
        }
        assert_eq!(booked(&pool).len(), 1, "HAProxy has one more");
    }

    #[test]
    fn a_failed_poll_starts_the_run_again() {
        let (pool, mut now) = (pool(1, 1), Instant::now());
        book(&pool, 1, 0, now);
        for _ in 0..4 {
            poll(&pool, &mut now, 0, &[0]);
        }
        pool.miss_servers();
        assert_eq!((0..4).map(|_| poll(&pool, &mut now, 0, &[0])).sum::<usize>(), 0);
        assert_eq!(poll(&pool, &mut now, 0, &[0]), 1);
    }

    #[test]
    fn a_booking_of_a_server_that_is_out_moves_to_where_its_blocks_appear() {
        let (pool, now) = (pool(1, 2), Instant::now());
        let tokens: Vec<TokenId> = (0..16).map(TokenId).collect();
        let (root, block) = (pool.key.plain_root(), pool.key.block(&tokens));
        let prompt = Arc::new(PromptBlocks::new(20, [(16, vec![pool.key.chain(root, block)])]));
        let ask = Ask { id: RequestId(1), prompt, session: None };
        pool.scheduler.lock().book(&ask, &[Candidate::idle(RankId(0), 16)], now);
        let down = Server { state: ServerState::Down, ..server("s1") };
        pool.take_servers(&[down, server("s2")], &[0; 2], now);
        assert_eq!(pool.move_strays(now), 0, "its blocks are nowhere yet");
        let stored = KvEvent::Stored(Stored {
            tier: Tier::Gpu,
            parent: None,
            root,
            engine_hashes: &[EngineHash(5)],
            block_hashes: &[block],
        });
        pool.caches.write().index.apply(RankId(1), &stored);
        pool.take_servers(&[server("s1"), server("s2")], &[0; 2], now);
        assert_eq!(pool.move_strays(now), 0, "a server that is up has its requests");
        pool.take_notice("s1", false, now);
        assert_eq!(pool.move_strays(now), 1);
        assert_eq!(pool.scheduler.lock().booking(ask.id).map(|(rank, _)| rank), Some(RankId(1)));
    }
}
