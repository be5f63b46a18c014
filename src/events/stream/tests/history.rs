//! What was told before the connection: the catch-up at connect.

use super::*;

#[test]
fn the_history_is_asked_for_at_connect_and_not_at_the_first_live_batch() {
    let mut driven = Driven::new(true);
    assert_eq!(driven.connect(), [request(0)]);
    assert_eq!(driven.answer(1, 0..3), [apply(1, 0..3), vec![request(2)]].concat());
    assert_eq!(driven.answer(1, [2]), [EXACT]);
    assert_eq!(driven.stream.applied_seq(), Some(2));
}

#[test]
fn a_publisher_that_has_said_nothing_is_known_exactly() {
    let mut driven = Driven::new(true);
    driven.connect();
    assert_eq!(driven.answer(1, []), [EXACT]);
    assert_eq!(driven.live(1, 0), apply(1, [0]));
}

#[test]
fn an_end_marker_is_no_proof_until_an_answer_brings_nothing_new() {
    let mut driven = Driven::new(true);
    driven.connect();
    driven.answer(1, 0..3);
    assert_eq!(driven.stream.state(), FeedState::Connecting);
    assert_eq!(driven.answer(1, 2..5), [apply(1, 3..5), vec![request(4)]].concat());
    assert_eq!(driven.answer(1, [4]), [EXACT]);
}

#[test]
fn live_batches_wait_for_the_history_and_follow_it() {
    let mut driven = Driven::new(true);
    driven.connect();
    driven.replay(1, 0);
    assert_eq!(driven.live(1, 3), []);
    driven.replay(1, 1);
    assert_eq!(driven.live(1, 4), []);
    assert_eq!(driven.live(1, 5), []);
    driven.replay(1, 2);
    driven.replay(1, 3);
    assert_eq!(driven.stream.held_batches(), 2, "what the replay has brought waits no more");
    assert_eq!(driven.end(), [apply(1, [4, 5]), vec![EXACT]].concat());
    assert_eq!(driven.stream.held_batches(), 0);
}

#[test]
fn batches_that_a_replay_brought_first_are_not_applied_again() {
    let mut driven = Driven::new(true);
    driven.connect();
    driven.live(1, 1);
    driven.answer(1, 0..4);
    driven.answer(1, [3]);
    assert_eq!(driven.stream.state(), FeedState::Exact);
    assert_eq!(driven.live(1, 2), []);
    assert_eq!(driven.live(1, 3), []);
    assert_eq!(driven.live(1, 4), apply(1, [4]));
}

#[test]
fn a_first_batch_of_number_0_needs_no_replay() {
    let mut driven = Driven::new(true);
    driven.connect();
    assert_eq!(driven.live(1, 0), [vec![Action::CancelReplay], apply(1, [0]), vec![EXACT]].concat());
    let mut driven = Driven::new(false);
    assert_eq!(driven.connect(), []);
    assert_eq!(driven.live(1, 0), [apply(1, [0]), vec![EXACT]].concat());
}

#[test]
fn a_replay_that_starts_later_than_asked_degrades_and_goes_on() {
    let mut driven = Driven::new(true);
    driven.connect();
    assert_eq!(driven.answer(1, 70..73), [apply(1, 70..73), vec![request(72)]].concat());
    assert_eq!(driven.answer(1, [72]), [degraded(DegradedReason::HistoryLost)]);
    assert_eq!(driven.live(1, 73), apply(1, [73]));
}

#[test]
fn batches_that_come_while_a_request_waits_its_turn_are_not_kept() {
    let mut stream = Stream::new(true, StreamLimits::default(), 1);
    let (now, mut actions) = (Instant::now(), Vec::new());
    stream.on_connect(now, &mut actions);
    (7..10).for_each(|seq| stream.on_live(seq, batch(1, seq), now, &mut actions));
    assert_eq!((&actions[..], stream.held_batches()), (&[request(0)][..], 0));
    let mut driven = Driven { stream, now };
    driven.stream.on_replay_sent(now);
    assert_eq!(driven.answer(1, 0..9), [apply(1, 0..9), vec![request(8)]].concat());
    assert_eq!(driven.answer(1, 8..10), [apply(1, [9]), vec![EXACT]].concat());
}

#[test]
fn an_answer_that_ends_before_the_last_live_batch_is_not_whole() {
    let mut stream = Stream::new(true, StreamLimits::default(), 1);
    let (now, mut actions) = (Instant::now(), Vec::new());
    stream.on_connect(now, &mut actions);
    stream.on_live(3, batch(1, 3), now, &mut actions);
    let mut driven = Driven { stream, now };
    driven.stream.on_replay_sent(now);
    driven.answer(1, 0..3);
    assert_eq!(driven.answer(1, [2]), []);
    assert_eq!(driven.stream.state(), FeedState::Connecting);
    assert_eq!(driven.wait(Duration::from_secs(1)), [request(2)]);
}
