//! Ranks of whose caches KV events tell nothing, or too little.

use crate::select::testing::{Pool, prompt};
use crate::select::*;
use crate::units::RankId;
use std::time::Duration;

/// Ranks whose caches of so many blocks are not told of.
fn untold(ranks: u16, history_blocks: u32) -> Pool {
    let mut pool = Pool::new(ranks, Policy::default());
    for candidate in &mut pool.candidates {
        *candidate = Candidate { trusted: false, history_blocks, ..candidate.clone() };
    }
    pool
}

/// One request from start to end; its rank and what was known of it.
fn serve(pool: &mut Pool, segments: &[(u32, u32)]) -> Terms {
    let ask = pool.ask(&prompt(segments), None);
    let choice = pool.book(&ask);
    let terms = choice.chosen().expect("a candidate").clone();
    pool.now += Duration::from_secs(1);
    pool.scheduler.tick(pool.now);
    pool.scheduler.end(ask.id, None, pool.now);
    terms
}

#[test]
fn without_events_a_conversation_stays_where_it_was_sent_and_nothing_is_called_confirmed() {
    let mut pool = untold(3, 1000);
    let mut said = vec![(1, 400)];
    let home = serve(&mut pool, &said).rank;
    for turn in 2..12 {
        serve(&mut pool, &[(100 + turn, 300)]);
        said.push((turn, 50));
        let terms = serve(&mut pool, &said);
        assert_eq!(terms.rank, home, "turn {turn}");
        let length: u32 = said.iter().map(|(_, tokens)| tokens).sum();
        assert_eq!(terms.history_tokens, (length - 50) / 16 * 16);
        assert_eq!((terms.confirmed, terms.booked_tokens), (Overlap::default(), 0));
        assert_eq!(terms.uncached_tokens, length - terms.history_tokens);
    }
}

#[test]
fn without_events_paced_traffic_spreads_and_the_clock_drains_the_queue() {
    let mut pool = untold(2, 1000);
    let ranks: Vec<_> = (0..40).map(|at| serve(&mut pool, &[(at, 300)]).rank).collect();
    let first = ranks.iter().filter(|rank| **rank == RankId(0)).count();
    assert!((16..=24).contains(&first), "{first} of 40");
    let ask = pool.ask(&prompt(&[(99, 6_000)]), None);
    let rank = pool.book(&ask).rank.expect("a candidate");
    let queue =
        |pool: &Pool| pool.scheduler.loads().find(|(at, _)| *at == rank).expect("a rank").1.prefill_tokens;
    assert_eq!(queue(&pool), 6_000);
    pool.now += Duration::from_millis(600);
    pool.scheduler.tick(pool.now);
    assert_eq!(queue(&pool), 0, "6,000 tokens at 12,000 a second");
}

#[test]
fn a_history_is_no_longer_than_the_cache() {
    let mut pool = untold(1, 20);
    serve(&mut pool, &[(1, 160)]);
    serve(&mut pool, &[(2, 160)]);
    assert_eq!(serve(&mut pool, &[(1, 160), (3, 16)]).history_tokens, 160);
    assert_eq!(serve(&mut pool, &[(2, 160), (3, 16)]).history_tokens, 144, "one block had to go");
    assert_eq!(pool.scheduler.histories().next(), Some((RankId(0), 20)));
    let config = SchedulerConfig { max_history_blocks: 8, ..SchedulerConfig::default() };
    let mut bounded = Pool::with_config(2, Policy::default(), config);
    bounded.candidates.iter_mut().for_each(|candidate| candidate.history_blocks = 1000);
    serve(&mut bounded, &[(1, 400)]);
    assert_eq!(
        bounded.scheduler.histories().map(|(_, blocks)| blocks).sum::<usize>(),
        4,
        "half of all for each"
    );
}

#[test]
fn a_history_is_forgotten_with_the_cache_and_when_events_tell_all_again() {
    let mut pool = untold(1, 100);
    serve(&mut pool, &[(1, 160)]);
    pool.scheduler.forget_history(RankId(0));
    assert_eq!(serve(&mut pool, &[(1, 160)]).history_tokens, 0);
    pool.candidates[0] = Candidate { trusted: true, history_blocks: 0, ..pool.candidates[0].clone() };
    assert_eq!(serve(&mut pool, &[(1, 160)]).history_tokens, 0);
    assert_eq!(pool.scheduler.histories().next(), Some((RankId(0), 0)));
}

#[test]
fn where_events_were_lost_the_history_goes_on_from_what_they_tell() {
    let mut pool = Pool::new(1, Policy::default());
    pool.candidates[0].history_blocks = 100;
    pool.store(RankId(0), &prompt(&[(1, 64)]));
    serve(&mut pool, &[(1, 160)]);
    let terms = serve(&mut pool, &[(1, 160), (2, 40)]);
    assert_eq!((terms.confirmed.gpu_tokens, terms.history_tokens, terms.uncached_tokens), (64, 96, 64));
    // A lower tier is told of: no guess is better.
    pool.candidates[0].cpu_blocks = 4;
    let terms = serve(&mut pool, &[(1, 160), (3, 40)]);
    assert_eq!((terms.confirmed.tokens(), terms.history_tokens), (128, 32));
    assert_eq!(terms.uncached_tokens, 200 - 64 - 48 - 24);
}

#[test]
fn where_events_were_lost_a_prefill_ends_by_those_that_come_or_at_last_by_the_clock() {
    let mut pool = Pool::new(1, Policy::default());
    pool.candidates[0].history_blocks = 100;
    let asks = [prompt(&[(1, 1_200)]), prompt(&[(2, 1_200)])].map(|prompt| pool.ask(&prompt, None));
    asks.iter().for_each(|ask| assert!(pool.book(ask).booked));
    let load = |pool: &Pool| pool.scheduler.loads().next().expect("a rank").1;
    pool.prefill(RankId(0), &asks[0].prompt);
    assert_eq!((load(&pool).decoding, load(&pool).prefill_tokens), (1, 1_200));
    pool.now += Duration::from_millis(500);
    pool.scheduler.tick(pool.now);
    assert_eq!(load(&pool).decoding, 1, "0.2 s of work: its events may still come");
    pool.now += Duration::from_millis(500);
    pool.scheduler.tick(pool.now);
    assert_eq!((load(&pool).decoding, load(&pool).prefill_tokens), (2, 0));
}
