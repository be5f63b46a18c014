use crate::select::testing::{BLOCK_TOKENS, Pool, prompt, shares};
use crate::select::*;
use crate::units::RankId;
use std::time::Duration;

pub(super) fn policies() -> [Policy; 6] {
    [
        Policy::default(),
        Policy::Dynamo(crate::config::DynamoWeights::default()),
        Policy::LeastLoaded,
        Policy::RoundRobin,
        Policy::SessionHash,
        Policy::PrefixHash { head_tokens: 64 },
    ]
}

#[test]
fn sequential_unrelated_prompts_spread_evenly_with_nothing_in_flight() {
    let mut pool = Pool::new(2, Policy::default());
    let chosen: Vec<_> =
        (0..40).map(|at| pool.serve(&prompt(&[(at + 1, 200 + at * 7 % 90)]), None)).collect();
    assert!(shares(&chosen, 2).iter().all(|share| *share >= 16), "{:?}", shares(&chosen, 2));
}

#[test]
fn a_common_head_does_not_hold_all_sequential_chats_on_one_rank() {
    for head_tokens in [32, 160, 320] {
        let mut pool = Pool::new(2, Policy::default());
        let chosen: Vec<_> =
            (0..40).map(|at| pool.serve(&prompt(&[(9000, head_tokens), (at + 1, 60)]), None)).collect();
        assert!(
            shares(&chosen, 2).iter().all(|share| *share >= 10),
            "{head_tokens}: {:?}",
            shares(&chosen, 2)
        );
    }
}

#[test]
fn a_conversation_never_leaves_its_cache_for_nothing() {
    for session in [None, Some(7)] {
        let mut pool = Pool::new(2, Policy::default());
        let mut said = vec![(1, 600)];
        let home = pool.serve(&prompt(&said), session);
        for turn in 2..30 {
            // Others work on the same rank only, so that the other one is ever more tempting.
            let other = prompt(&[(turn + 1000, 900)]);
            pool.candidates[1 - home.index()].weight = 0;
            assert_eq!(pool.serve(&other, None), home);
            pool.candidates[1 - home.index()].weight = 100;
            said.push((turn, 40));
            assert_eq!(pool.serve(&prompt(&said), session), home, "turn {turn}, session {session:?}");
        }
    }
}

#[test]
fn where_no_cache_is_known_to_hold_a_prompt_the_session_stays() {
    let mut pool = Pool::new(2, Policy::default());
    let home = pool.serve(&prompt(&[(1, 600)]), Some(7));
    for turn in 2..10 {
        // As after the cut of a body whose salt was not seen: nothing of it is ever found.
        assert_eq!(pool.serve(&prompt(&[(100 * turn, 1600)]), Some(7)), home, "turn {turn}");
    }
}

#[test]
fn a_conversation_alone_in_the_pool_stays_in_its_cache_however_short_it_is() {
    let mut pool = Pool::new(3, Policy::default());
    let mut said = vec![(1, 40)];
    let home = pool.serve(&prompt(&said), None);
    for turn in 2..20 {
        said.push((turn, 70));
        assert_eq!(pool.serve(&prompt(&said), None), home, "turn {turn}");
    }
}

#[test]
fn one_huge_prompt_does_not_keep_short_ones_away_for_long() {
    let mut pool = Pool::new(2, Policy::default());
    let huge = pool.serve(&prompt(&[(1, 400_000)]), None);
    pool.now += Duration::from_secs(20 * 60);
    let chosen: Vec<_> = (0..40).map(|at| pool.serve(&prompt(&[(at + 2, 200)]), None)).collect();
    assert!(chosen.iter().filter(|rank| **rank == huge).count() >= 10, "{:?}", shares(&chosen, 2));
}

#[test]
fn a_request_that_ended_before_its_choice_is_not_booked() {
    let mut pool = Pool::new(2, Policy::default());
    let ask = pool.ask(&prompt(&[(1, 100)]), None);
    assert_eq!(pool.scheduler.end(ask.id, None, pool.now), None);
    let choice = pool.book(&ask);
    assert!(choice.rank.is_some() && !choice.booked);
    assert_eq!(pool.scheduler.counts().ended_early, 1);
    assert!(pool.scheduler.loads().all(|(_, load)| load.requests == 0));
}

#[test]
fn one_confirmed_block_decides_at_equal_load() {
    for warm in [0, 1] {
        let mut pool = Pool::new(2, Policy::default());
        pool.store(RankId(warm), &prompt(&[(5, BLOCK_TOKENS)]));
        let ask = pool.ask(&prompt(&[(5, BLOCK_TOKENS), (6, 100)]), None);
        let choice = pool.book(&ask);
        assert_eq!((choice.rank, choice.reason), (Some(RankId(warm)), Reason::LowestCost));
    }
}

#[test]
fn a_wide_band_still_keeps_to_the_cache_at_equal_load() {
    let policy = Policy::Cost(CostConfig { band_blocks: 2.0, ..CostConfig::default() });
    for warm in [0, 1] {
        let mut pool = Pool::new(2, policy);
        pool.store(RankId(warm), &prompt(&[(5, BLOCK_TOKENS)]));
        let ask = pool.ask(&prompt(&[(5, BLOCK_TOKENS), (6, 100)]), None);
        assert_eq!(pool.book(&ask).rank, Some(RankId(warm)));
    }
}

#[test]
fn identical_prompts_at_once_do_not_herd() {
    // Whether all come before any is computed, or each is computed before the next one comes.
    let lengths = [20, 300, 2000, 3000, 10_000, 120_000];
    for (tokens, is_computed) in lengths.iter().flat_map(|tokens| [(*tokens, true), (*tokens, false)]) {
        for count in [32, 64, 256] {
            let mut pool = Pool::new(4, Policy::default());
            let same = prompt(&[(1, tokens)]);
            let chosen: Vec<_> = (0..count)
                .map(|_| {
                    let ask = pool.ask(&same, None);
                    let rank = pool.book(&ask).rank.expect("a candidate");
                    if is_computed {
                        pool.prefill(rank, &same);
                    }
                    rank
                })
                .collect();
            let shares = shares(&chosen, 4);
            assert!(shares.iter().all(|share| share * 8 <= count * 3), "{tokens}, {is_computed}: {shares:?}");
            // Each rank computes the prompt once at most; the others share it.
            let queued: u64 = pool.scheduler.loads().map(|(_, load)| load.prefill_tokens).sum();
            assert!(queued <= 4 * u64::from(tokens) + count as u64 * u64::from(BLOCK_TOKENS), "{queued}");
        }
    }
}

#[test]
fn a_long_prefix_that_is_there_is_kept_to_by_some_and_computed_again_for_a_crowd() {
    let mut pool = Pool::new(4, Policy::default());
    let document = prompt(&[(1, 30_000)]);
    pool.store(RankId(2), &document);
    let mut chosen = Vec::new();
    for question in 0..32 {
        let ask = pool.ask(&prompt(&[(1, 30_000), (100 + question, 40)]), None);
        chosen.push(pool.book(&ask).rank.expect("a candidate"));
    }
    assert!(chosen[..5].iter().all(|rank| *rank == RankId(2)), "{chosen:?}");
    assert!(shares(&chosen, 4).iter().all(|share| *share <= 12), "{:?}", shares(&chosen, 4));
}

#[test]
fn of_equal_prompts_at_once_most_leave_the_one_rank_that_has_them_cached() {
    for tokens in [20, 100, 200, 1_000, 3_000, 10_000, 30_000, 120_000] {
        let mut pool = Pool::new(4, Policy::default());
        let same = prompt(&[(1, tokens)]);
        pool.store(RankId(2), &same);
        let mut chosen = Vec::new();
        for _ in 0..32 {
            let ask = pool.ask(&same, None);
            chosen.push(pool.book(&ask).rank.expect("a candidate"));
        }
        let shares = shares(&chosen, 4);
        assert!(shares.iter().all(|share| *share <= 12), "{tokens}: {shares:?}");
    }
}

#[test]
fn how_late_events_are_is_learned_from_short_prompts_whatever_long_ones_take() {
    let mut pool = Pool::new(1, Policy::default());
    for text in 0..20 {
        for (tokens, seconds) in [(64, 1), (48_000, 9)] {
            let ask = pool.ask(&prompt(&[(10 * text + seconds, tokens)]), None);
            pool.book(&ask);
            pool.now += Duration::from_secs(seconds.into());
            pool.prefill(RankId(0), &ask.prompt);
            pool.scheduler.end(ask.id, None, pool.now);
        }
    }
    let queued = pool.ask(&prompt(&[(7_777, 12_000)]), None);
    pool.book(&queued);
    pool.now += Duration::from_millis(500);
    let next = pool.ask(&prompt(&[(8_888, 100)]), None);
    let terms = pool.scheduler.choose(&next, &pool.candidates, pool.now).terms;
    let left = 12_000.0 - 0.5 * pool.scheduler.prefill_rate();
    assert!((terms[0].queue_tokens - left).abs() < 1.0, "{} {left}", terms[0].queue_tokens);
    pool.scheduler.late(RankId(0), Duration::ZERO);
    let terms = pool.scheduler.choose(&next, &pool.candidates, pool.now).terms;
    assert_eq!(
        terms[0].queue_tokens, 12_000.0,
        "it was the work of others: the events are in time by their stamps"
    );
}

#[test]
fn a_prefix_that_is_asked_for_more_than_one_rank_can_serve_spreads() {
    let mut pool = Pool::new(4, Policy::default());
    pool.store(RankId(0), &prompt(&[(1, 4_000)]));
    let mut chosen = Vec::new();
    for question in 0..240 {
        let ask = pool.ask(&prompt(&[(1, 4_000), (100 + question, 600)]), None);
        let rank = pool.book(&ask).rank.expect("a candidate");
        pool.store(rank, &prompt(&[(1, 4_000)]));
        chosen.push(rank);
    }
    assert!(shares(&chosen, 4).iter().all(|share| *share >= 40), "{:?}", shares(&chosen, 4));
}

#[test]
fn hundreds_of_sequential_requests_spread_whatever_they_have_in_common() {
    for head_tokens in [0, 160, 400] {
        for ranks in [2, 3] {
            let mut pool = Pool::new(ranks, Policy::default());
            let chosen: Vec<_> = (0..448)
                .map(|at| pool.serve(&prompt(&[(9000, head_tokens), (at + 1, 60 + at * 7 % 90)]), None))
                .collect();
            let shares = shares(&chosen, ranks);
            assert!(shares.iter().all(|share| share * 4 >= 448), "{head_tokens}, {ranks}: {shares:?}");
        }
    }
}

#[test]
fn siblings_of_a_fan_out_stay_together() {
    let mut pool = Pool::new(4, Policy::default());
    let chosen: Vec<_> = (0..8)
        .map(|sibling| {
            let ask = pool.ask(&prompt(&[(1, 4000), (100 + sibling, 50)]), None);
            pool.book(&ask).rank.expect("a candidate")
        })
        .collect();
    // A second idle rank may compute what they share once more, as all wait for less then; a third gains nothing.
    let ranks = shares(&chosen, 4).into_iter().filter(|share| *share > 0).count();
    assert!(ranks <= 2, "{:?}", shares(&chosen, 4));
}

#[test]
fn among_ties_the_session_decides_then_the_least_work_of_late_then_chance() {
    let mut pool = Pool::new(3, Policy::default());
    let home = pool.serve(&prompt(&[(1, 8)]), Some(7));
    // Shorter than a block: no cache can help, all three tie.
    let again = pool.ask(&prompt(&[(2, 8)]), Some(7));
    let seen = pool.seen(&again.prompt);
    let choice = pool.scheduler.choose(&again, &seen, pool.now);
    assert_eq!((choice.rank, choice.reason), (Some(home), Reason::Session));
    let stranger = pool.ask(&prompt(&[(3, 8)]), None);
    let choice = pool.scheduler.choose(&stranger, &seen, pool.now);
    assert_ne!(choice.rank, Some(home));
    assert_eq!(choice.reason, Reason::Random, "two have done nothing");
    pool.serve(&prompt(&[(4, 8)]), None);
    let choice = pool.scheduler.choose(&stranger, &seen, pool.now);
    assert_eq!(choice.reason, Reason::LeastRecent, "one has done nothing");
}

#[test]
fn explaining_changes_nothing_and_foretells_the_choice() {
    for policy in policies() {
        let mut pool = Pool::new(4, policy);
        for at in 0..50 {
            let ask = pool.ask(&prompt(&[(at % 5, 100), (at, 100)]), Some(u64::from(at % 7)));
            let seen = pool.seen(&ask.prompt);
            let first = pool.scheduler.choose(&ask, &seen, pool.now);
            let second = pool.scheduler.choose(&ask, &seen, pool.now);
            let booked = pool.book(&ask);
            assert_eq!((first.rank, second.rank), (booked.rank, booked.rank), "{policy:?}");
            assert!(!first.booked && booked.booked);
        }
    }
}

#[test]
fn drained_and_unknown_ranks_are_never_named() {
    for policy in policies() {
        let mut pool = Pool::new(3, policy);
        pool.store(RankId(0), &prompt(&[(1, 500)]));
        pool.candidates[0].weight = 0;
        pool.scheduler.set_ranks(&[RankId(0), RankId(2)], pool.now);
        let ask = pool.ask(&prompt(&[(1, 500)]), Some(3));
        let choice = pool.book(&ask);
        assert_eq!(choice.rank, Some(RankId(2)), "{policy:?}");
        assert_eq!(choice.terms[0].excluded, Some(Excluded::Drained));
        assert_eq!(choice.terms[1].excluded, Some(Excluded::Unknown));
        let nobody = pool.scheduler.book(&ask, &[], pool.now);
        assert_eq!((nobody.rank, nobody.reason, nobody.booked), (None, Reason::NoCandidate, false));
    }
}

#[test]
fn a_server_of_half_the_weight_gets_half_the_share() {
    for policy in [Policy::default(), Policy::LeastLoaded, Policy::RoundRobin] {
        for in_flight in [false, true] {
            let mut pool = Pool::new(2, policy);
            pool.candidates[1].weight = 50;
            let chosen: Vec<_> = (0..90)
                .map(|at| {
                    let unrelated = prompt(&[(at + 1, 400)]);
                    if in_flight {
                        let ask = pool.ask(&unrelated, None);
                        return pool.book(&ask).rank.expect("a candidate");
                    }
                    pool.serve(&unrelated, None)
                })
                .collect();
            let light = shares(&chosen, 2)[1];
            // Least loaded sees nothing in flight, and settles its ties by recent work too.
            assert!((26..=34).contains(&light), "{policy:?}, in flight {in_flight}: {light}");
        }
    }
}

#[test]
fn a_full_server_costs_its_queue_but_is_not_given_up() {
    let mut pool = Pool::new(2, Policy::default());
    let full = |queued| Slots { in_flight: 4, limit: Some(4), queued, booked: 0 };
    pool.store(RankId(0), &prompt(&[(1, 320)]));
    pool.candidates[0].slots = full(0);
    let ask = pool.ask(&prompt(&[(1, 400)]), None);
    assert_eq!(pool.book(&ask).rank, Some(RankId(1)), "a short prefix is not worth the wait");
    pool.candidates[1].slots = full(5);
    let ask = pool.ask(&prompt(&[(1, 400)]), None);
    assert_eq!(pool.book(&ask).rank, Some(RankId(0)), "if all are full, the shorter line wins");
}

#[test]
fn what_the_engine_reports_beyond_our_bookings_counts() {
    let mut pool = Pool::new(2, Policy::default());
    pool.candidates[0].reported = Some(EngineLoad { running: 3, waiting: 9, booked: 0 });
    let ask = pool.ask(&prompt(&[(1, 400)]), None);
    let choice = pool.book(&ask);
    assert_eq!(choice.rank, Some(RankId(1)));
    assert!(choice.terms[0].queue_tokens > 0.0 && choice.terms[0].decoding == 3.0);
    pool.candidates[0].reported = Some(EngineLoad::default());
    pool.candidates[1].reported = Some(EngineLoad { running: 1, waiting: 0, booked: 1 });
    let seen = pool.seen(&ask.prompt);
    let terms = pool.scheduler.choose(&ask, &seen, pool.now).terms;
    assert_eq!(terms[1].decoding, 0.0, "its one request is ours");
}

#[test]
fn a_booked_prefix_is_reported_apart_from_a_confirmed_one() {
    let mut pool = Pool::new(1, Policy::default());
    pool.store(RankId(0), &prompt(&[(1, 32)]));
    let first = pool.ask(&prompt(&[(1, 32), (2, 100)]), None);
    assert_eq!(pool.book(&first).terms[0].uncached_tokens, 100);
    let second = pool.ask(&prompt(&[(1, 32), (2, 132)]), None);
    let terms = pool.book(&second).terms[0].clone();
    assert_eq!((terms.confirmed.gpu_tokens, terms.booked_tokens, terms.uncached_tokens), (32, 96, 36));
    pool.scheduler.end(first.id, None, pool.now);
    pool.scheduler.end(second.id, None, pool.now);
    let seen = pool.seen(&second.prompt);
    assert_eq!(pool.scheduler.choose(&second, &seen, pool.now).terms[0].booked_tokens, 0);
}

#[test]
fn lower_tiers_save_by_their_credit() {
    let mut pool = Pool::new(1, Policy::default());
    pool.candidates[0].cpu_blocks = 4;
    pool.candidates[0].disk_blocks = 4;
    let ask = pool.ask(&prompt(&[(1, 200)]), None);
    let terms = pool.book(&ask).terms[0].clone();
    assert_eq!(terms.uncached_tokens, 200 - 48 - 16);
}

#[test]
fn prefill_ends_with_the_last_full_block_or_by_the_clock_where_no_event_will_come() {
    let mut pool = Pool::new(1, Policy::default());
    let long = pool.ask(&prompt(&[(1, 400)]), None);
    let short = pool.ask(&prompt(&[(2, 10)]), None);
    pool.book(&long);
    pool.book(&short);
    let load = |pool: &Pool| pool.scheduler.loads().next().expect("one rank").1;
    assert_eq!((load(&pool).decoding, load(&pool).prefill_tokens), (0, 410));
    pool.now += Duration::from_millis(1);
    pool.scheduler.tick(pool.now);
    assert_eq!((load(&pool).decoding, load(&pool).prefill_tokens), (1, 400), "10 tokens at 12,000 a second");
    pool.now += Duration::from_secs(3600);
    pool.scheduler.tick(pool.now);
    assert_eq!(load(&pool).decoding, 1, "age alone ends no prefill that events tell of");
    pool.prefill(RankId(0), &prompt(&[(1, 208)]));
    assert_eq!((load(&pool).decoding, load(&pool).prefill_tokens), (1, 192));
    pool.prefill(RankId(0), &long.prompt);
    assert_eq!((load(&pool).decoding, load(&pool).prefill_tokens), (2, 0));
    pool.candidates[0].trusted = false;
    let untrusted = pool.ask(&prompt(&[(3, 1200)]), None);
    pool.book(&untrusted);
    pool.now += Duration::from_millis(100);
    pool.scheduler.tick(pool.now);
    assert_eq!(load(&pool).decoding, 3, "events can't be relied on: 1,200 tokens at 12,000 a second");
}

#[test]
fn the_prefill_rate_is_learned_from_events_and_used_where_there_are_none() {
    let mut pool = Pool::new(2, Policy::default());
    assert_eq!(pool.scheduler.prefill_rate(), 12_000.0);
    let all = pool.candidates.clone();
    for text in 0..400 {
        let ask = pool.ask(&prompt(&[(text, 2_000)]), None);
        pool.scheduler.book(&ask, &all[..1], pool.now);
        pool.now += Duration::from_millis(500);
        pool.prefill(RankId(0), &prompt(&[(text, 1_600)]));
        pool.now += Duration::from_millis(100);
        pool.prefill(RankId(0), &ask.prompt);
        pool.scheduler.end(ask.id, None, pool.now);
        pool.now += Duration::from_secs(3);
    }
    let learned = pool.scheduler.prefill_rate();
    assert!((3_200.0..3_800.0).contains(&learned), "1,600 tokens in half a second: {learned}");
    pool.candidates[1].trusted = false;
    let ask = pool.ask(&prompt(&[(9_999, 3_200)]), None);
    pool.scheduler.book(&ask, &pool.candidates[1..], pool.now);
    let decoding = |pool: &Pool| pool.scheduler.loads().last().expect("two").1.decoding;
    pool.scheduler.tick(pool.now + Duration::from_millis(800));
    assert_eq!(decoding(&pool), 0);
    pool.scheduler.tick(pool.now + Duration::from_millis(1_000));
    assert_eq!(decoding(&pool), 1);
}

#[test]
fn a_redispatched_booking_moves_with_its_load() {
    let mut pool = Pool::new(2, Policy::default());
    let ask = pool.ask(&prompt(&[(1, 400)]), Some(9));
    let first = pool.book(&ask).rank.expect("a candidate");
    let other = RankId(1 - first.0);
    pool.store(other, &prompt(&[(1, 160)]));
    let target = pool.seen(&ask.prompt)[other.index()].clone();
    assert!(pool.scheduler.move_to(ask.id, &target, pool.now));
    assert_eq!(pool.scheduler.booking(ask.id).map(|(rank, _)| rank), Some(other));
    let loads: Vec<_> = pool.scheduler.loads().collect();
    assert_eq!(loads[first.index()].1, Load::default());
    assert_eq!(loads[other.index()].1.prefill_tokens, 240, "what the other rank had to compute");
    let ended = pool.scheduler.end(ask.id, Some(other), pool.now).expect("booked");
    assert_eq!(ended.rank, other);
    assert!(!pool.scheduler.move_to(ask.id, &target, pool.now), "it has ended");
    assert!(pool.scheduler.end(ask.id, None, pool.now).is_none());
}

#[test]
fn the_session_follows_the_rank_that_really_served() {
    let mut pool = Pool::new(2, Policy::default());
    let ask = pool.ask(&prompt(&[(1, 8)]), Some(9));
    let booked = pool.book(&ask).rank.expect("a candidate");
    let other = RankId(1 - booked.0);
    pool.scheduler.end(ask.id, Some(other), pool.now);
    let next = pool.ask(&prompt(&[(2, 8)]), Some(9));
    assert_eq!(pool.book(&next).rank, Some(other));
}

#[test]
fn at_a_bound_requests_are_still_routed_but_not_booked() {
    let few = SchedulerConfig { max_bookings: 2, ..SchedulerConfig::default() };
    let small = SchedulerConfig { max_booked_hashes: 12, ..SchedulerConfig::default() };
    for config in [few, small] {
        let mut pool = Pool::with_config(2, Policy::default(), config);
        let asks: Vec<_> = (1..=4).map(|at| pool.ask(&prompt(&[(at, 96)]), None)).collect();
        let booked: Vec<_> =
            asks.iter().map(|ask| pool.book(ask)).map(|c| (c.rank.is_some(), c.booked)).collect();
        assert_eq!(booked, [(true, true), (true, true), (true, false), (true, false)]);
        assert_eq!((pool.scheduler.counts().booked, pool.scheduler.counts().not_booked), (2, 2));
        pool.scheduler.end(asks[0].id, None, pool.now);
        assert!(pool.book(&asks[3]).booked, "room again");
    }
}

#[test]
fn an_id_that_comes_twice_is_booked_once() {
    let mut pool = Pool::new(2, Policy::default());
    let ask = pool.ask(&prompt(&[(1, 400)]), None);
    pool.book(&ask);
    pool.book(&ask);
    assert_eq!(pool.scheduler.loads().map(|(_, load)| load.requests).sum::<u32>(), 1);
    assert_eq!(pool.scheduler.counts().replaced, 1);
}

#[test]
fn a_booking_whose_end_nobody_tells_ends_with_its_lease() {
    let mut pool = Pool::new(1, Policy::default());
    let lease = SchedulerConfig::default().lease;
    let ask = pool.ask(&prompt(&[(1, 400)]), None);
    pool.book(&ask);
    assert_eq!(pool.scheduler.tick(pool.now + lease - Duration::from_secs(1)), 0);
    assert_eq!(pool.scheduler.tick(pool.now + lease + lease / 32), 1);
    assert_eq!((pool.scheduler.counts().expired, pool.scheduler.bookings(RankId(0)).count()), (1, 0));
}

#[test]
fn a_rank_takes_its_bookings_and_sessions_with_it() {
    let mut pool = Pool::new(2, Policy::default());
    let asks: Vec<_> = (1..=8).map(|at| pool.ask(&prompt(&[(at, 300)]), Some(u64::from(at)))).collect();
    let ranks: Vec<_> = asks.iter().map(|ask| pool.book(ask).rank.expect("a candidate")).collect();
    let gone = shares(&ranks, 2)[1];
    assert!(gone > 0);
    assert_eq!(pool.scheduler.set_ranks(&[RankId(0)], pool.now), gone);
    assert_eq!(pool.scheduler.set_ranks(&[RankId(0), RankId(1)], pool.now), 0);
    let loads: Vec<_> = pool.scheduler.loads().collect();
    assert_eq!(loads[1], (RankId(1), Load::default()));
    for (ask, rank) in asks.iter().zip(ranks) {
        assert_eq!(pool.scheduler.end(ask.id, None, pool.now).is_some(), rank == RankId(0));
    }
    assert_eq!(pool.scheduler.counts().removed as usize, gone);
}

#[test]
fn a_new_rank_takes_its_turn_and_does_not_make_up_for_all_it_missed() {
    let mut pool = Pool::new(2, Policy::RoundRobin);
    pool.scheduler.set_ranks(&[RankId(0)], pool.now);
    (0..30).for_each(|at| {
        pool.serve(&prompt(&[(at, 20)]), None);
    });
    pool.scheduler.set_ranks(&[RankId(0), RankId(1)], pool.now);
    let chosen: Vec<_> = (0..20).map(|at| pool.serve(&prompt(&[(at, 20)]), None)).collect();
    assert_eq!(shares(&chosen, 2), [10, 10]);
}

#[test]
fn hashing_policies_keep_a_key_where_it_is_when_a_rank_goes() {
    for policy in [Policy::SessionHash, Policy::PrefixHash { head_tokens: 64 }] {
        let mut pool = Pool::new(4, policy);
        let key = |at: u32| (prompt(&[(at, 64), (at + 500, 30)]), Some(u64::from(at)));
        let before: Vec<_> = (0..60).map(key).map(|(p, s)| pool.serve(&p, s)).collect();
        assert!(shares(&before, 4).iter().all(|share| *share >= 5), "{:?}", shares(&before, 4));
        pool.scheduler.set_ranks(&[RankId(0), RankId(1), RankId(2)], pool.now);
        let after: Vec<_> = (0..60).map(key).map(|(p, s)| pool.serve(&p, s)).collect();
        let moved = before.iter().zip(&after).filter(|(before, after)| before != after).count();
        assert_eq!(moved, shares(&before, 4)[3], "{policy:?}: only those of the rank that went");
    }
}
