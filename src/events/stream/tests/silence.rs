//! Replay endpoints that are silent, slow or of no use.

use super::*;

#[test]
fn an_answer_that_stalls_is_asked_for_again_from_where_it_was() {
    let mut driven = Driven::new(true);
    driven.connect();
    driven.replay(1, 0);
    driven.replay(1, 1);
    assert_eq!(driven.wait(StreamLimits::default().replay_stall), [Action::CancelReplay]);
    assert_eq!(driven.wait(Duration::from_secs(1)), [request(1)]);
}

#[test]
fn a_silent_replay_endpoint_is_asked_again_and_given_up_when_batches_wait() {
    let mut driven = Driven::following(true, 1);
    driven.live(1, 5);
    let silence = StreamLimits::default().replay_silence;
    for _ in 0..2 {
        assert_eq!(driven.wait(silence), [Action::CancelReplay]);
        assert_eq!(driven.wait(Duration::from_secs(1)), [request(1)]);
    }
    assert_eq!(
        driven.wait(silence),
        [vec![Action::CancelReplay], apply(1, [5]), vec![degraded(DegradedReason::ReplayTimeout)]].concat()
    );
    assert_eq!(driven.live(1, 6), apply(1, [6]));
}

#[test]
fn a_silent_replay_endpoint_is_asked_for_ever_while_nothing_waits() {
    let mut driven = Driven::new(true);
    driven.connect();
    for _ in 0..20 {
        assert_eq!(driven.wait(Duration::from_secs(5)), [Action::CancelReplay]);
        assert_eq!(driven.wait(Duration::from_secs(15)), [request(0)]);
    }
    let no_answer = degraded(DegradedReason::ReplayTimeout);
    assert_eq!(driven.live(1, 3), [vec![Action::CancelReplay], apply(1, [3]), vec![no_answer]].concat());
}

#[test]
fn a_silent_replay_endpoint_after_a_reconnect_proves_nothing() {
    let mut driven = Driven::following(true, 5);
    driven.disconnect();
    driven.connect();
    driven.live(1, 6);
    driven.wait(Duration::from_secs(5));
    driven.wait(Duration::from_secs(1));
    driven.wait(Duration::from_secs(5));
    driven.wait(Duration::from_secs(1));
    let unproven = vec![Action::CancelReplay, Action::Reset(ResetReason::Unproven)];
    let timeout = degraded(DegradedReason::ReplayTimeout);
    assert_eq!(driven.wait(Duration::from_secs(5)), [unproven, apply(1, [6]), vec![timeout]].concat());
}

#[test]
fn a_replay_that_says_there_is_nothing_while_batches_wait_is_given_up() {
    let mut driven = Driven::following(true, 1);
    driven.live(1, 5);
    for _ in 0..2 {
        assert_eq!(driven.answer(1, [1]), []);
        assert_eq!(driven.wait(Duration::from_secs(1)), [request(1)]);
    }
    let incomplete = degraded(DegradedReason::ReplayIncomplete);
    assert_eq!(driven.answer(1, [1]), [apply(1, [5]), vec![incomplete]].concat());
}

#[test]
fn a_replay_that_drips_is_given_up_when_its_time_is_over() {
    let mut driven = Driven::following(true, 1);
    driven.live(1, 1000);
    let mut actions = Vec::new();
    for seq in 1..80 {
        driven.replay(1, seq);
        actions = driven.wait(Duration::from_millis(900));
        if !actions.is_empty() {
            break;
        }
    }
    let timeout = degraded(DegradedReason::ReplayTimeout);
    assert_eq!(actions, [vec![Action::CancelReplay], apply(1, [1000]), vec![timeout]].concat());
}
