//! Streams that fall idle, or that others have reason to doubt.

use super::*;

impl Driven {
    fn doubt(&mut self, doubt: Doubt) -> Actions {
        self.act(|stream, _, actions| stream.on_doubt(doubt, actions))
    }
}

const HEALTH_LOST: Action<Payload> = Action::State(FeedState::Suspended(SuspendReason::HealthLost));

#[test]
fn an_idle_stream_is_asked_once_for_its_last_batches() {
    let mut driven = Driven::following(true, 5);
    let idle = StreamLimits::default().idle;
    assert_eq!(driven.wait(idle / 2), []);
    assert_eq!(driven.wait(idle * 2), [request(5)]);
    assert_eq!(driven.answer(1, [5, 6]), [apply(1, [6]), vec![request(6)]].concat());
    assert_eq!(driven.answer(1, [6]), []);
    assert_eq!(driven.wait(idle * 10), []);
    driven.live(1, 7);
    assert_eq!(driven.wait(idle * 2), [request(7)]);
    assert_eq!(driven.end()[1], Action::Reset(ResetReason::HistoryGone));
}

#[test]
fn a_process_that_says_nothing_at_all_is_suspended_until_it_speaks_again() {
    let limits = StreamLimits::default();
    let mut driven = Driven::new(true);
    driven.connect();
    driven.answer(1, [0, 1]);
    driven.answer(1, [1]);
    assert_eq!(driven.wait(2 * limits.idle), [request(1)]);
    let mut heard = Vec::new();
    for _ in 0..2 * limits.barren_requests {
        heard.extend(driven.wait(limits.replay_silence));
    }
    assert_eq!(driven.stream.state(), FeedState::Suspended(SuspendReason::Silent));
    assert!(heard.contains(&SILENT) && !heard.iter().any(|action| matches!(action, Action::Reset(_))));
    // The connection was never lost: the next batch proves the process.
    driven.live(1, 2);
    assert_eq!(driven.stream.state(), FeedState::Exact);
    assert_eq!(driven.stream.applied_seq(), Some(2));
}

#[test]
fn blocks_filled_in_silence_are_asked_for_and_until_the_answer_nothing_counts() {
    let mut driven = Driven::following(true, 5);
    assert_eq!(driven.doubt(Doubt::Silent), [request(5), SILENT]);
    assert_eq!(driven.doubt(Doubt::Silent), [], "asked once");
    assert_eq!(driven.answer(1, [5, 6, 7]), [apply(1, [6, 7]), vec![request(7)]].concat());
    assert_eq!(driven.answer(1, [7]), [EXACT]);
}

#[test]
fn a_replay_without_news_clears_a_silent_stream_and_so_does_its_next_batch() {
    let mut driven = Driven::following(true, 5);
    driven.doubt(Doubt::Silent);
    assert_eq!(driven.answer(1, [5]), [EXACT]);
    driven.doubt(Doubt::Silent);
    assert_eq!(driven.live(1, 6), [EXACT], "it waits for the answer");
    assert_eq!(driven.answer(1, [5, 6]), [apply(1, [6])].concat());
    let mut mute = Driven::following(false, 5);
    assert_eq!(mute.doubt(Doubt::Silent), [SILENT]);
    assert_eq!(mute.wait(Duration::from_secs(3600)), []);
    assert_eq!(mute.live(1, 6), [apply(1, [6]), vec![EXACT]].concat());
}

#[test]
fn after_lost_health_nothing_counts_until_the_process_is_proven_to_be_the_same() {
    let cancel = || Action::CancelReplay;
    // By its replay.
    let mut driven = Driven::following(true, 5);
    assert_eq!(driven.doubt(Doubt::HealthLost), [request(5), HEALTH_LOST]);
    assert_eq!(driven.replay(1, 5), [CONNECTING]);
    assert_eq!(driven.end(), [EXACT]);
    // By the next number on a connection that was never lost.
    driven.doubt(Doubt::HealthLost);
    assert_eq!(driven.live(1, 6), [vec![cancel()], apply(1, [6]), vec![EXACT]].concat());
    let mut mute = Driven::following(false, 5);
    assert_eq!(mute.doubt(Doubt::HealthLost), [HEALTH_LOST]);
    assert_eq!(mute.live(1, 6), [apply(1, [6]), vec![EXACT]].concat());
    // Another process answers.
    driven.doubt(Doubt::HealthLost);
    let heard = driven.replay(2, 6);
    assert!(heard.contains(&Action::Reset(ResetReason::HistoryDiffers)), "{heard:?}");
    // An answer to an older request proves nothing.
    let mut driven = Driven::following(true, 5);
    driven.wait(2 * StreamLimits::default().idle);
    driven.replay(1, 5);
    assert_eq!(driven.doubt(Doubt::HealthLost), [cancel(), request(5), HEALTH_LOST]);
}

#[test]
fn a_stream_that_does_not_count_anyway_is_not_doubted() {
    for doubt in [Doubt::Silent, Doubt::HealthLost] {
        let mut driven = Driven::new(true);
        assert_eq!(driven.doubt(doubt), []);
        driven.connect();
        assert_eq!(driven.doubt(doubt), []);
        let mut driven = Driven::following(true, 5);
        driven.disconnect();
        assert_eq!(driven.doubt(doubt), []);
        driven.connect();
        assert_eq!(driven.doubt(doubt), []);
    }
    // A batch that waits for a gap to be filled has been heard.
    let mut driven = Driven::following(true, 5);
    driven.live(1, 8);
    assert_eq!(driven.doubt(Doubt::Silent), []);
}

#[test]
fn on_request_all_is_forgotten_and_told_again() {
    let mut driven = Driven::following(true, 5);
    let forgotten = Action::Reset(ResetReason::Resync);
    assert_eq!(driven.doubt(Doubt::Resync), [forgotten.clone(), request(0), CONNECTING]);
    assert_eq!(driven.doubt(Doubt::Resync), [Action::CancelReplay, request(0)], "nothing is known by now");
    assert_eq!(driven.answer(1, 0..=5).last(), Some(&request(5)));
    assert_eq!(driven.answer(1, [5]), [EXACT]);
    driven.disconnect();
    assert_eq!(driven.doubt(Doubt::Resync), [forgotten, CONNECTING]);
    assert_eq!(driven.connect(), [request(0)]);

    let mut mute = Driven::new(false);
    mute.connect();
    mute.live(1, 0);
    assert_eq!(mute.doubt(Doubt::Resync), [], "nobody would tell it again");
    assert_eq!(mute.live(1, 1), apply(1, [1]));
}
