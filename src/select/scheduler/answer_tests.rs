//! Answers whose blocks are followed, in every order of events.

use crate::hash::HashKey;
use crate::select::testing::{Pool, prompt};
use crate::select::*;
use crate::units::{RankId, SequenceHash};
use std::sync::Arc;

const R0: RankId = RankId(0);

/// One rank, whose requests' answers are followed.
fn pool() -> Pool {
    let config = SchedulerConfig { follow_answers: true, ..SchedulerConfig::default() };
    Pool::with_config(1, Policy::default(), config)
}

/// A prompt of 70 tokens: 4 full blocks and 6 tokens more.
fn asked() -> Arc<PromptBlocks> {
    prompt(&[(1, 70)])
}

/// The blocks of that prompt, and behind them those of an answer.
fn with_answer(number: u32) -> Vec<SequenceHash> {
    prompt(&[(1, 70), (number, 100)]).sequence(SequenceKey::of_size(16)).to_vec()
}

/// The rank stores these blocks of a sequence.
fn store(pool: &mut Pool, sequence: &[SequenceHash], blocks: std::ops::Range<usize>) {
    for at in blocks {
        pool.scheduler.grow(R0, sequence[at - 1], sequence[at]);
    }
}

fn load(pool: &Pool) -> Load {
    pool.scheduler.loads().next().expect("a rank").1
}

fn book(pool: &mut Pool, prompt: &Arc<PromptBlocks>) -> Ask {
    let ask = pool.ask(prompt, None);
    assert!(pool.book(&ask).booked);
    ask
}

#[test]
fn an_answer_adds_its_blocks_to_the_context_until_the_request_ends() {
    let mut pool = pool();
    let ask = book(&mut pool, &asked());
    pool.prefill(R0, &ask.prompt);
    let sequence = with_answer(9);
    assert_eq!(load(&pool).context_tokens, 70);
    store(&mut pool, &sequence, 4..5);
    assert_eq!((load(&pool).context_tokens, load(&pool).booked_blocks), (80, 5));
    store(&mut pool, &sequence, 5..7);
    assert_eq!((load(&pool).context_tokens, load(&pool).booked_blocks), (112, 7));
    store(&mut pool, &sequence, 5..7);
    assert_eq!(load(&pool).context_tokens, 112, "told again");
    pool.scheduler.end(ask.id, None, pool.now);
    assert_eq!(load(&pool), Load::default());
    store(&mut pool, &sequence, 7..8);
    assert_eq!(load(&pool), Load::default(), "too late");
}

#[test]
fn a_first_block_of_the_answer_is_a_sign_that_the_prefill_is_done() {
    // In one event with the end of the prompt, before the look at what is stored.
    let mut first = pool();
    book(&mut first, &asked());
    store(&mut first, &with_answer(9), 2..5);
    assert_eq!((load(&first).decoding, load(&first).prefill_tokens), (1, 0));
    assert_eq!(load(&first).context_tokens, 80);
    // The prompt was cached: no event would have told.
    let mut second = pool();
    second.store(R0, &asked());
    book(&mut second, &asked());
    assert_eq!(load(&second).decoding, 0);
    store(&mut second, &with_answer(9), 4..5);
    assert_eq!((load(&second).decoding, load(&second).prefill_tokens), (1, 0));
}

#[test]
fn equal_prompts_each_have_their_own_answer() {
    for answers in [[8, 9], [9, 9]] {
        let mut pool = pool();
        let asks = [book(&mut pool, &asked()), book(&mut pool, &asked())];
        pool.prefill(R0, &asked());
        for number in answers {
            store(&mut pool, &with_answer(number), 4..5);
        }
        assert_eq!(load(&pool).context_tokens, 160);
        for number in answers {
            store(&mut pool, &with_answer(number), 5..6);
        }
        assert_eq!(load(&pool).context_tokens, 192);
        for ask in asks {
            pool.scheduler.end(ask.id, None, pool.now);
        }
        assert_eq!(load(&pool), Load::default());
    }
}

#[test]
fn another_booked_prompt_that_goes_on_from_there_is_no_answer() {
    let mut pool = pool();
    book(&mut pool, &asked());
    let longer = prompt(&[(1, 70), (9, 90)]);
    book(&mut pool, &longer);
    store(&mut pool, longer.sequence(SequenceKey::of_size(16)), 4..10);
    pool.prefill(R0, &longer);
    assert_eq!(load(&pool).context_tokens, 70 + 160);
    store(&mut pool, &with_answer(7), 4..5);
    assert_eq!(load(&pool).context_tokens, 80 + 160);
}

#[test]
fn what_has_no_known_beginning_or_was_stored_before_counts_for_nobody() {
    let mut pool = pool();
    let sequence = with_answer(9);
    store(&mut pool, &sequence, 4..6);
    book(&mut pool, &asked());
    store(&mut pool, &sequence, 6..7);
    assert_eq!(load(&pool).context_tokens, 70);
    let short = book(&mut pool, &prompt(&[(2, 10)]));
    store(&mut pool, prompt(&[(2, 10), (9, 90)]).sequence(SequenceKey::of_size(16)), 1..4);
    assert_eq!(load(&pool).context_tokens, 80, "nobody knows where its chain starts");
    pool.scheduler.end(short.id, None, pool.now);
}

#[test]
fn a_prompt_shorter_than_a_block_begins_the_first_block_that_no_booked_prompt_begins_with() {
    let root = HashKey::from_seed(1).plain_root();
    let mut pool = pool();
    let short = PromptBlocks::clone(&prompt(&[(2, 10)])).behind(root);
    let asks = [book(&mut pool, &Arc::new(short)), book(&mut pool, &asked())];
    pool.scheduler.grow(R0, root, asks[1].prompt.sequence(SequenceKey::of_size(16))[0]);
    assert_eq!((load(&pool).context_tokens, load(&pool).decoding), (10 + 70, 0));
    let answer = prompt(&[(2, 10), (9, 90)]).sequence(SequenceKey::of_size(16)).to_vec();
    pool.scheduler.grow(R0, root, answer[0]);
    assert_eq!((load(&pool).context_tokens, load(&pool).decoding), (16 + 70, 1), "its prefill is done too");
    store(&mut pool, &answer, 1..3);
    assert_eq!(load(&pool).context_tokens, 48 + 70);
    for ask in asks {
        pool.scheduler.end(ask.id, None, pool.now);
    }
    assert_eq!(load(&pool), Load::default());
}

#[test]
fn a_moved_booking_starts_anew_where_it_is() {
    let config = SchedulerConfig { follow_answers: true, ..SchedulerConfig::default() };
    let mut pool = Pool::with_config(2, Policy::default(), config);
    let ask = pool.ask(&asked(), None);
    let from = pool.book(&ask).rank.expect("a candidate");
    let to = RankId(1 - from.0);
    let sequence = with_answer(9);
    pool.scheduler.grow(from, sequence[3], sequence[4]);
    pool.scheduler.grow(from, sequence[4], sequence[5]);
    let target = pool.candidates[to.index()].clone();
    assert!(pool.scheduler.move_to(ask.id, &target, pool.now));
    let context = |pool: &Pool, rank: RankId| {
        pool.scheduler.loads().find(|(at, _)| *at == rank).expect("a rank").1.context_tokens
    };
    assert_eq!((context(&pool, from), context(&pool, to)), (0, 70));
    pool.scheduler.grow(from, sequence[5], sequence[6]);
    pool.scheduler.grow(to, sequence[3], sequence[4]);
    assert_eq!((context(&pool, from), context(&pool, to)), (0, 80));
}

#[test]
fn unless_it_is_asked_for_no_answer_is_followed() {
    let mut pool = Pool::new(1, Policy::default());
    book(&mut pool, &asked());
    store(&mut pool, &with_answer(9), 4..6);
    assert_eq!(load(&pool).context_tokens, 70);
}
