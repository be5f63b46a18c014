//! What agents that are peers tell each other of a pool.

use super::Pool;
use crate::{
    index::Overlaps,
    peers::{Told, What},
    select::{Ask, Candidate, Choice, Ended, PromptBlocks, Scheduler, Sequence, SequenceKey},
    units::{RankId, RequestId},
};
use std::{sync::Arc, time::Instant};

impl Pool {
    /// Chooses and books, and tells the peers.
    pub fn book(&self, ask: &Ask, candidates: &[Candidate], now: Instant) -> Choice {
        let choice = self.scheduler.lock().book(ask, candidates, now);
        if let Some(terms) = choice.chosen().filter(|_| choice.booked) {
            let key = candidates.iter().find(|of| of.rank == terms.rank).map(Candidate::key);
            self.tell_booked(ask, terms.rank, key.unwrap_or_default());
        }
        choice
    }

    /// Tells the peers of the end of a booking, if it was made here.
    pub(super) fn tell_end(&self, id: RequestId, ended: Option<Ended>) {
        if ended.is_some_and(|ended| !ended.mirrored) && self.outbox.has_listeners() {
            self.outbox.ended(id);
        }
    }

    /// Tells the peers which bookings are still there.
    pub fn tell_alive(&self) {
        if self.outbox.has_listeners() {
            let ids: Vec<RequestId> = self.scheduler.lock().own_bookings().collect();
            self.outbox.alive(&ids);
        }
    }

    /// Takes in what a peer tells. Returns false for a booking that cannot be booked here.
    pub fn take_news(&self, what: What, now: Instant) -> bool {
        match what {
            What::Booked(told) => self.mirror(&told, now),
            What::Ended(id) => {
                self.scheduler.lock().end(id, None, now);
                true
            }
            What::Alive(ids) => {
                let mut scheduler = self.scheduler.lock();
                ids.into_iter().for_each(|id| scheduler.renew(id, now));
                true
            }
        }
    }

    /// Tells the peers that a request was booked on a rank.
    fn tell_booked(&self, ask: &Ask, rank: RankId, key: SequenceKey) {
        if !self.outbox.has_listeners() {
            return;
        }
        let ranks = self.ranks.load();
        let Some(rank) = ranks.get(rank) else { return };
        let server = Arc::clone(&rank.server);
        self.outbox.booked(Told { server, rank: rank.rank, key, ask: ask.clone() });
    }

    /// Tells the peers that a request has been found on another rank than the one that was chosen.
    pub(super) fn tell_place(&self, scheduler: &Scheduler, id: RequestId, target: &Candidate) {
        if let Some((rank, prompt)) = scheduler.booking(id) {
            let ask = Ask { id, prompt: Arc::clone(prompt), session: None };
            self.tell_booked(&ask, rank, target.key());
        }
    }

    /// Books what a peer has chosen.
    fn mirror(&self, told: &Told, now: Instant) -> bool {
        let ranks = self.ranks();
        let Some(rank) = ranks.of_server(&told.server).get(usize::from(told.rank)).copied() else {
            return false;
        };
        let candidates = self.candidates(&ranks, &self.streams(&ranks), &self.servers(now), now);
        let Some(known) = candidates.into_iter().find(|candidate| candidate.rank == rank) else {
            return false;
        };
        let mut candidate = Candidate { block_tokens: told.key.block_tokens, ..known };
        let key = candidate.key();
        let prompt = if told.key == key {
            Arc::clone(&told.ask.prompt)
        } else {
            let hashes = told.ask.prompt.sequence(told.key).into();
            let tokens = told.ask.prompt.tokens(told.key);
            Arc::new(PromptBlocks::of(tokens, [Sequence { key, tokens, hashes }]))
        };
        if candidate.trusted {
            let mut overlaps = Overlaps::default();
            self.caches.read().index.find(prompt.sequence(key), &mut overlaps);
            let overlap = overlaps.get(rank);
            candidate.gpu_blocks = overlap.gpu_blocks;
            candidate.cpu_blocks = overlap.cpu_blocks;
            candidate.disk_blocks = overlap.disk_blocks;
        }
        let ask = Ask { prompt, ..told.ask.clone() };
        self.scheduler.lock().mirror(&ask, &candidate, now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{pool::testing::pool, units::SequenceHash};

    fn told(server: &str, id: u128) -> What {
        let prompt = Arc::new(PromptBlocks::new(100, [(16, (0..6).map(SequenceHash).collect())]));
        let ask = Ask { id: RequestId(id), prompt, session: None };
        What::Booked(Told { server: server.into(), rank: 1, key: SequenceKey::of_size(16), ask })
    }

    fn requests(pool: &Pool) -> [u32; 2] {
        let booked = [pool.booked(), pool.booked_here()];
        booked.map(|booked| booked.iter().sum())
    }

    #[test]
    fn what_a_peer_tells_is_booked_by_the_names_that_all_have_in_common() {
        let (pool, now) = (pool(2, 2), Instant::now());
        assert!(pool.take_news(told("s2", 1), now));
        let rank = pool.ranks().of_server("s2")[1];
        assert_eq!(pool.booked()[rank.index()], 1);
        assert_eq!(requests(&pool), [1, 0], "it is no request of our HAProxy");
        assert!(!pool.take_news(told("s9", 2), now), "a server of another site");
        assert!(pool.take_news(What::Alive(vec![RequestId(1), RequestId(77)]), now));
        assert!(pool.take_news(What::Ended(RequestId(1)), now));
        assert_eq!(requests(&pool), [0, 0]);
    }

    #[test]
    fn what_is_booked_here_is_told_with_its_end_and_what_peers_told_is_not_told_again() {
        let outbox = crate::peers::Outbox::new().of_pool("be");
        let mut news = outbox.listen();
        let pool = pool(2, 2).telling(outbox);
        let now = Instant::now();
        pool.take_news(told("s1", 1), now);
        pool.take_news(What::Ended(RequestId(1)), now);
        pool.take_news(told("s1", 2), now);
        let prompt = Arc::new(PromptBlocks::new(50, [(16, vec![SequenceHash(4); 3])]));
        let ask = Ask { id: RequestId(3), prompt, session: Some(5) };
        let rank = pool.ranks().of_server("s2")[1];
        assert!(pool.book(&ask, &[Candidate::idle(rank, 16)], now).booked);
        pool.tell_alive();
        pool.end(RequestId(2), None, now);
        pool.end(RequestId(3), None, now);
        let mut next = || news.try_recv().expect("told").what.clone();
        let What::Booked(first) = next() else { panic!("a booking") };
        assert_eq!((&*first.server, first.rank, first.key.block_tokens, first.ask.id.0), ("s2", 1, 16, 3));
        assert!(matches!(next(), What::Alive(ids) if ids == [RequestId(3)]));
        assert!(matches!(next(), What::Ended(RequestId(3))));
        assert!(news.try_recv().is_err());
    }
}
