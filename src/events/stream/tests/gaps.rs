//! Batches that are missing, and what heals a stream that has missed some.

use super::*;

#[test]
fn a_gap_asks_for_a_replay_from_the_last_batch_applied_which_fills_it() {
    let mut driven = Driven::following(true, 1);
    assert_eq!(driven.live(1, 5), [request(1)]);
    assert_eq!(driven.live(1, 6), []);
    assert_eq!(driven.stream.state(), FeedState::Exact);
    assert_eq!(driven.answer(1, 1..7), apply(1, 2..7));
    assert_eq!(driven.live(1, 7), apply(1, [7]));
}

#[test]
fn a_hole_within_an_answer_ends_it_and_is_asked_for_again() {
    let cancelled = |seqs| [apply(1, seqs), vec![Action::CancelReplay]].concat();
    let mut driven = Driven::new(true);
    driven.connect();
    driven.live(1, 9);
    assert_eq!(driven.answer(1, [0, 1, 2, 6, 7, 8]), cancelled(0..3));
    assert_eq!(driven.wait(Duration::from_secs(1)), [request(2)]);
    assert_eq!(driven.answer(1, [2, 3, 4, 8]), cancelled(3..5));
    assert_eq!(driven.wait(Duration::from_secs(1)), [request(4)]);
    assert_eq!(driven.answer(1, 4..9), [apply(1, 5..10), vec![EXACT]].concat());
}

#[test]
fn a_lost_end_of_an_answer_is_noticed_by_the_batches_that_wait() {
    let mut driven = Driven::following(true, 0);
    driven.live(1, 5);
    assert_eq!(driven.answer(1, 0..3), [apply(1, 1..3), vec![request(2)]].concat());
    assert_eq!(driven.answer(1, 2..6), apply(1, 3..6));
}

#[test]
fn a_gap_without_a_replay_endpoint_degrades() {
    let mut driven = Driven::following(false, 1);
    assert_eq!(driven.live(1, 5), [apply(1, [5]), vec![degraded(DegradedReason::NoReplay)]].concat());
    let mut driven = Driven::new(false);
    driven.connect();
    assert_eq!(driven.live(1, 5), [apply(1, [5]), vec![degraded(DegradedReason::NoReplay)]].concat());
}

#[test]
fn more_waiting_batches_than_the_limits_are_dropped_and_asked_for() {
    for limits in [
        StreamLimits { held_batches: 3, ..StreamLimits::default() },
        StreamLimits { held_bytes: 30, ..StreamLimits::default() },
    ] {
        let mut driven = Driven::following(true, 1);
        driven.stream.limits = limits;
        (5..10).for_each(|seq| {
            assert_eq!(driven.live(1, seq), if seq == 5 { vec![request(1)] } else { vec![] })
        });
        assert_eq!(driven.stream.held_batches(), 1);
        assert_eq!(driven.answer(1, 1..7), [apply(1, 2..7), vec![request(6)]].concat());
        assert_eq!(driven.answer(1, 6..9), apply(1, 7..10));
        assert_eq!(driven.stream.state(), FeedState::Exact);
    }
}

#[test]
fn a_reset_cache_heals_what_was_missed_before_it_and_not_after() {
    let mut driven = Driven::following(false, 1);
    driven.live(1, 5);
    let clear = |driven: &mut Driven, seq| driven.act(|stream, _, actions| stream.on_cleared(seq, actions));
    assert_eq!(clear(&mut driven, 4), []);
    assert_eq!(clear(&mut driven, 5), [EXACT]);
}

#[test]
fn a_cache_that_turned_over_heals_what_was_missed_before_and_not_after() {
    let mut driven = Driven::following(false, 1);
    driven.live(1, 5);
    driven.live(1, 9);
    assert_eq!(driven.stream.gaps(), 2);
    assert_eq!(driven.act(|stream, _, actions| stream.on_turned_over(7, actions)), [], "of the first gap");
    assert_eq!(driven.act(|stream, _, actions| stream.on_turned_over(9, actions)), [EXACT]);
}

#[test]
fn a_batch_that_cannot_be_decoded_degrades_until_a_later_reset() {
    let mut driven = Driven::following(true, 5);
    let undecodable = degraded(DegradedReason::Undecodable);
    assert_eq!(driven.act(|stream, _, actions| stream.on_undecodable(5, actions)), [undecodable]);
    assert_eq!(driven.act(|stream, _, actions| stream.on_cleared(5, actions)), []);
    assert_eq!(driven.live(1, 6), apply(1, [6]));
    assert_eq!(driven.act(|stream, _, actions| stream.on_cleared(6, actions)), [EXACT]);
}
