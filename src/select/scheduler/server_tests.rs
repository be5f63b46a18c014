//! Servers that go and come, and the bookings on them.

use super::tests::policies;
use crate::select::testing::{BLOCK_TOKENS, Pool, prompt, shares};
use crate::select::*;
use crate::units::{RankId, RequestId, SequenceHash};
use std::sync::Arc;

#[test]
fn a_rank_that_haproxy_would_not_choose_is_never_named() {
    for policy in policies() {
        for excluded in [Excluded::Down, Excluded::Maintenance, Excluded::Drained, Excluded::Backup] {
            let mut pool = Pool::new(2, policy);
            pool.store(RankId(0), &prompt(&[(1, 500)]));
            pool.candidates[0].excluded = Some(excluded);
            let ask = pool.ask(&prompt(&[(1, 500)]), Some(3));
            let choice = pool.book(&ask);
            assert_eq!(choice.rank, Some(RankId(1)), "{policy:?}");
            assert_eq!(choice.terms[0].excluded, Some(excluded));
            assert_eq!(choice.terms[0].confirmed.gpu_tokens, 496, "what it holds is still told");
        }
    }
}

#[test]
fn a_rank_that_comes_back_gets_its_share_and_no_stampede() {
    for policy in [Policy::default(), Policy::LeastLoaded, Policy::RoundRobin] {
        for in_flight in [false, true] {
            let mut pool = Pool::new(3, policy);
            let mut text = 0;
            let mut next = |pool: &mut Pool, hold: bool| {
                text += 1;
                let unrelated = prompt(&[(text, 400)]);
                if hold {
                    let ask = pool.ask(&unrelated, None);
                    return pool.book(&ask).rank.expect("a candidate");
                }
                pool.serve(&unrelated, None)
            };
            pool.candidates[2].excluded = Some(Excluded::Down);
            pool.scheduler.set_open(RankId(2), false, pool.now);
            for _ in 0..60 {
                assert_ne!(next(&mut pool, false), RankId(2));
            }
            pool.candidates[2].excluded = None;
            pool.scheduler.set_open(RankId(2), true, pool.now);
            let chosen: Vec<_> = (0..30).map(|_| next(&mut pool, in_flight)).collect();
            let share = shares(&chosen, 3)[2];
            assert!((8..=13).contains(&share), "{policy:?}, in flight {in_flight}: {share} of 30");
        }
    }
}

#[test]
fn a_booking_strays_when_its_whole_prompt_appears_elsewhere() {
    let blocks = |pool: &Pool, rank: RankId, sequence: &[SequenceHash]| {
        let stored = PromptBlocks::new(u32::MAX, [(BLOCK_TOKENS, sequence.to_vec())]);
        pool.seen(&stored)[rank.index()].gpu_blocks
    };
    let strays = |pool: &Pool, from: RankId| {
        let found = pool.scheduler.strays(from, |rank, sequence| blocks(pool, rank, sequence));
        found.into_iter().map(|(id, to)| (id, to.rank)).collect::<Vec<_>>()
    };
    let mut pool = Pool::new(2, Policy::default());
    pool.store(RankId(0), &prompt(&[(1, 320)]));
    let text = prompt(&[(1, 320), (2, 320)]);
    let ask = pool.ask(&text, None);
    assert_eq!(pool.book(&ask).rank, Some(RankId(0)));
    assert_eq!(strays(&pool, RankId(0)), []);
    pool.store(RankId(1), &prompt(&[(1, 320)]));
    assert_eq!(strays(&pool, RankId(0)), [], "half of it may be anybody's");
    pool.store(RankId(1), &text);
    assert_eq!(strays(&pool, RankId(0)), [(ask.id, RankId(1))]);
    let (_, target) = pool.scheduler.strays(RankId(0), |rank, s| blocks(&pool, rank, s)).remove(0);
    assert!(pool.scheduler.move_to(ask.id, &target, pool.now));
    assert_eq!(pool.scheduler.booking(ask.id).map(|(rank, _)| rank), Some(RankId(1)));
    assert_eq!(strays(&pool, RankId(1)), [], "what has moved stays until its line comes");

    // The prompt was everywhere before: nothing can be told of its next request.
    let again = pool.ask(&text, None);
    pool.store(RankId(0), &text);
    let from = pool.book(&again).rank.expect("a candidate");
    assert_eq!(strays(&pool, from).iter().find(|(id, _)| *id == again.id), None);
}

#[test]
fn a_prompt_that_another_booking_brings_is_no_sign_of_a_stray() {
    let mut pool = Pool::new(2, Policy::default());
    let text = prompt(&[(2, 320)]);
    let all = pool.candidates.clone();
    for (id, rank) in [(1, 0), (2, 1)] {
        let ask = Ask { id: RequestId(id), prompt: Arc::clone(&text), session: None };
        pool.scheduler.book(&ask, &all[rank..=rank], pool.now);
    }
    assert!(pool.scheduler.strays(RankId(0), |_, sequence| sequence.len() as u32).is_empty());
    pool.scheduler.end(RequestId(2), None, pool.now);
    assert_eq!(pool.scheduler.strays(RankId(0), |_, sequence| sequence.len() as u32).len(), 1);
}

#[test]
fn where_requests_are_counted_no_booking_ends_by_age() {
    let mut pool = Pool::new(1, Policy::default());
    let ask = pool.ask(&prompt(&[(1, 100)]), None);
    pool.book(&ask);
    pool.scheduler.set_counted(RankId(0), true);
    let lease = SchedulerConfig::default().lease;
    assert_eq!(pool.scheduler.tick(pool.now + 2 * lease), 0);
    assert!(pool.scheduler.lose(ask.id));
    assert!(!pool.scheduler.lose(ask.id));
    assert_eq!((pool.scheduler.counts().lost, pool.scheduler.counts().expired), (1, 0));
}

#[test]
fn another_policy_keeps_the_bookings_and_another_bound_is_for_those_that_come() {
    let mut pool = Pool::new(2, Policy::RoundRobin);
    let ask = pool.ask(&prompt(&[(1, 160)]), None);
    let candidates = pool.seen(&ask.prompt);
    let home = pool.scheduler.book(&ask, &candidates, pool.now).rank.expect("a rank");
    let bound = SchedulerConfig { max_bookings: 1, ..SchedulerConfig::default() };
    pool.scheduler.configure(Policy::LeastLoaded, bound);
    let next = pool.ask(&prompt(&[(2, 160)]), None);
    let choice = pool.scheduler.book(&next, &candidates, pool.now);
    assert_eq!(choice.rank, Some(RankId(1 - home.0)), "the one with less in flight");
    assert!(!choice.booked, "more than one may not be");
    assert_eq!(pool.scheduler.booking(ask.id).map(|(rank, _)| rank), Some(home));
    assert!(pool.scheduler.end(ask.id, None, pool.now).is_some());
}
