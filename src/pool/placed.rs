//! Where the requests are that HAProxy has placed by itself: by the blocks that they bring, and by its log line.

use super::Pool;
use crate::{
    index::Overlaps,
    select::{Candidate, Sought},
    units::{RankId, RequestId},
};
use std::time::Instant;

impl Pool {
    /// A request has ended. `served` is the rank that served it, where that is not the one that was named. Returns
    /// whether anything was known of it.
    pub fn end(&self, id: RequestId, served: Option<RankId>, now: Instant) -> bool {
        let is_sought = self.scheduler.lock().is_sought(id);
        let is_it = |candidate: &Candidate| Some(candidate.rank) == served;
        // What was sent where is to be remembered, also of a request that was never found.
        let target = if is_sought { self.all_candidates(now).into_iter().find(is_it) } else { None };
        let mut scheduler = self.scheduler.lock();
        if let Some(target) = target {
            scheduler.place(id, &target, now);
        }
        let ended = scheduler.end(id, served, now);
        drop(scheduler);
        self.tell_end(id, ended);
        ended.is_some() || is_sought
    }

    /// Books requests of which it was not known where they are on the ranks where their whole prompts have appeared since.
    /// Returns how many.
    pub fn place_found(&self, now: Instant) -> usize {
        let sought: Vec<Sought> = self.scheduler.lock().sought().collect();
        if sought.is_empty() {
            return 0;
        }
        let candidates = self.all_candidates(now);
        let mut placed = 0;
        for (id, prompt, held_tokens) in sought {
            let mut overlaps = (None, Overlaps::default());
            for candidate in candidates.iter().filter(|candidate| candidate.trusted) {
                let sequence = prompt.sequence(candidate.key());
                let blocks = u32::try_from(sequence.len()).unwrap_or(u32::MAX);
                if blocks.saturating_mul(candidate.block_tokens) <= held_tokens {
                    continue;
                }
                if overlaps.0.replace(candidate.key()) != Some(candidate.key()) {
                    self.caches.read().index.find(sequence, &mut overlaps.1);
                }
                let target =
                    Candidate { gpu_blocks: overlaps.1.get(candidate.rank).gpu_blocks, ..candidate.clone() };
                let mut scheduler = self.scheduler.lock();
                if target.gpu_blocks >= blocks && !scheduler.explains(id, &target) {
                    placed += usize::from(scheduler.place(id, &target, now));
                    // Its last full block is there.
                    scheduler.prefilled(id, now);
                    self.tell_place(&scheduler, id, &target);
                    break;
                }
            }
        }
        placed
    }

    fn all_candidates(&self, now: Instant) -> Vec<Candidate> {
        let ranks = self.ranks();
        self.candidates(&ranks, &self.streams(&ranks), &self.servers(now), now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config,
        events::{Endpoint, FeedState, KvEvent, Stored},
        pool::{CacheView, Lookup, Rendered, testing::pool},
        select::{Ask, Load},
        units::{EngineHash, Revision, Tier, TokenId},
    };

    fn look_up(pool: &Pool, now: Instant) -> Lookup {
        let tokens: Vec<TokenId> = (0..35).map(TokenId).collect();
        let rendered = Rendered {
            revision: Revision::default(),
            tokens: &tokens.into(),
            media: &[],
            root: pool.key.plain_root(),
            prompt_tokens: 35,
        };
        pool.lookup(&[rendered], 35, now)
    }

    /// A pool of two more replicas, whose events are heard, and a prompt of two blocks that is booked nowhere.
    fn shadowed(now: Instant) -> (Pool, [RankId; 2], Ask) {
        let pool = pool(1, 1);
        let ranks = [5557, 5558].map(|port| {
            let events = Endpoint::at("127.0.0.1", port).expect("an endpoint");
            let rank = config::Rank { events: Some(events), ..config::Rank::default() };
            let server = format!("s{port}");
            let replica = config::Replica { server, ranks: vec![rank], ..config::Replica::default() };
            let rank = pool.join(&replica, now).expect("room")[0];
            CacheView::set_state(&pool.caches, rank, FeedState::Exact, Some(0), now);
            rank
        });
        let found = look_up(&pool, now);
        let ask = Ask { id: RequestId(1), prompt: found.prompt, session: None };
        pool.scheduler.lock().expect(&ask, &found.candidates, now);
        (pool, ranks, ask)
    }

    fn store(pool: &Pool, rank: RankId, blocks: u32) {
        let tokens: Vec<TokenId> = (0..16 * blocks).map(TokenId).collect();
        let block_hashes: Vec<_> = tokens.chunks(16).map(|block| pool.key.block(block)).collect();
        let engine_hashes: Vec<_> = (0..u64::from(blocks)).map(EngineHash).collect();
        let stored = KvEvent::Stored(Stored {
            tier: Tier::Gpu,
            parent: None,
            root: pool.key.plain_root(),
            engine_hashes: &engine_hashes,
            block_hashes: &block_hashes,
        });
        pool.caches.write().index.apply(rank, &stored);
    }

    fn booked(pool: &Pool) -> Option<RankId> {
        pool.scheduler.lock().booking(RequestId(1)).map(|(rank, _)| rank)
    }

    #[test]
    fn a_request_is_booked_where_its_whole_prompt_appears_and_ends_with_its_line() {
        let now = Instant::now();
        let (pool, [_, second], _) = shadowed(now);
        store(&pool, second, 1);
        assert_eq!((pool.place_found(now), booked(&pool)), (0, None), "the common head of many prompts");
        store(&pool, second, 2);
        assert_eq!((pool.place_found(now), booked(&pool)), (1, Some(second)));
        let load = |pool: &Pool| pool.scheduler.lock().loads().find(|(rank, _)| *rank == second);
        let load = load(&pool).map(|(_, load)| (load.decoding, load.prefill_tokens));
        assert_eq!(load, Some((1, 0)), "its prefill is over");
        assert!(pool.end(RequestId(1), Some(second), now));
        assert!(pool.scheduler.lock().loads().all(|(_, load)| load == Load::default()));
        assert!(!pool.end(RequestId(1), Some(second), now), "nothing is known of it any more");
    }

    #[test]
    fn what_was_held_before_shows_nothing() {
        let now = Instant::now();
        let (pool, [first, _], ask) = shadowed(now);
        pool.scheduler.lock().end(ask.id, None, now);
        store(&pool, first, 2);
        let found = look_up(&pool, now);
        pool.scheduler.lock().expect(&ask, &found.candidates, now);
        assert_eq!((pool.place_found(now), booked(&pool)), (0, None));
        assert!(pool.end(ask.id, Some(first), now), "its line tells");
    }
}
