//! Restarts and lost connections: whether it is the same process.

use super::*;

#[test]
fn a_sequence_number_that_goes_back_is_another_process() {
    let mut driven = Driven::following(true, 5);
    let reset = Action::Reset(ResetReason::SequenceWentBack);
    assert_eq!(driven.live(2, 0), [vec![reset.clone()], apply(2, [0])].concat());
    assert_eq!(driven.live(2, 1), apply(2, [1]));
    let mut driven = Driven::following(true, 5);
    assert_eq!(driven.live(2, 3), [reset.clone(), request(0), CONNECTING]);
    assert_eq!(driven.answer(2, 0..4), [apply(2, 0..4), vec![EXACT]].concat());
    let mut driven = Driven::following(false, 5);
    let no_replay = degraded(DegradedReason::NoReplay);
    assert_eq!(driven.live(2, 3), [vec![reset], apply(2, [3]), vec![no_replay]].concat());
}

#[test]
fn a_restart_during_a_replay_drops_what_waits() {
    let mut driven = Driven::following(true, 5);
    driven.live(1, 9);
    driven.live(1, 10);
    assert_eq!(
        driven.live(2, 0),
        [vec![Action::CancelReplay, Action::Reset(ResetReason::SequenceWentBack)], apply(2, [0])].concat()
    );
    assert_eq!(driven.stream.held_batches(), 0);
}

#[test]
fn after_a_reconnect_the_same_last_batch_proves_the_same_process() {
    let mut driven = Driven::following(true, 5);
    assert_eq!(driven.disconnect(), [SUSPENDED]);
    assert_eq!(driven.connect(), [request(5)]);
    assert_eq!(driven.live(1, 7), []);
    assert_eq!(driven.replay(1, 5), [CONNECTING]);
    assert_eq!(driven.answer(1, [6, 7]), [apply(1, [6, 7]), vec![EXACT]].concat());
}

#[test]
fn after_a_reconnect_another_last_batch_is_another_process() {
    let mut driven = Driven::following(true, 5);
    driven.disconnect();
    driven.connect();
    assert_eq!(
        driven.replay(2, 5),
        [Action::CancelReplay, Action::Reset(ResetReason::HistoryDiffers), request(0), CONNECTING]
    );
    assert_eq!(driven.answer(2, 0..8), [apply(2, 0..8), vec![request(7)]].concat());
    assert_eq!(driven.answer(2, [7]), [EXACT]);
}

#[test]
fn after_a_reconnect_an_empty_history_is_another_process() {
    let mut driven = Driven::following(true, 5);
    driven.disconnect();
    driven.connect();
    assert_eq!(
        driven.end(),
        [Action::CancelReplay, Action::Reset(ResetReason::HistoryGone), request(0), CONNECTING]
    );
    assert_eq!(driven.answer(2, []), [EXACT]);
    assert_eq!(driven.stream.applied_seq(), None);
}

#[test]
fn after_a_reconnect_a_history_that_begins_behind_the_last_batch_proves_nothing() {
    for begin in [6, 9] {
        let mut driven = Driven::following(true, 5);
        driven.disconnect();
        driven.connect();
        let unproven = Action::Reset(ResetReason::Unproven);
        assert_eq!(driven.replay(2, begin), [vec![unproven], apply(2, [begin]), vec![CONNECTING]].concat());
        driven.end();
        assert_eq!(driven.answer(2, [begin]), [degraded(DegradedReason::HistoryLost)]);
    }
}

#[test]
fn without_a_replay_endpoint_only_the_very_next_batch_ends_a_suspension() {
    let mut driven = Driven::following(false, 5);
    assert_eq!(driven.disconnect(), [SUSPENDED]);
    assert_eq!(driven.connect(), []);
    assert_eq!(driven.live(1, 6), [apply(1, [6]), vec![EXACT]].concat());
    let mut driven = Driven::following(false, 5);
    driven.disconnect();
    driven.connect();
    let unproven = Action::Reset(ResetReason::Unproven);
    let no_replay = degraded(DegradedReason::NoReplay);
    assert_eq!(driven.live(1, 8), [vec![unproven], apply(1, [8]), vec![no_replay]].concat());
    let mut driven = Driven::following(false, 5);
    driven.disconnect();
    driven.connect();
    let went_back = Action::Reset(ResetReason::SequenceWentBack);
    assert_eq!(driven.live(2, 0), [vec![went_back], apply(2, [0]), vec![EXACT]].concat());
}

#[test]
fn batches_left_over_from_a_lost_connection_do_not_count() {
    let mut driven = Driven::following(true, 5);
    driven.disconnect();
    assert_eq!(driven.live(1, 6), []);
    assert_eq!(driven.connect(), [request(5)]);
    assert!(driven.answer(1, [5, 6]).contains(&apply(1, [6])[0]));
}

#[test]
fn a_disconnect_before_anything_was_heard_suspends_nothing() {
    let mut driven = Driven::new(true);
    driven.connect();
    assert_eq!(driven.disconnect(), [Action::CancelReplay]);
    assert_eq!(driven.stream.state(), FeedState::Connecting);
}
