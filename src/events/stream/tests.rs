use super::*;
use std::time::Duration;

type Payload = Vec<u8>;
type Actions = Vec<Action<Payload>>;

/// A stream with its clock, driven like the subscriber does, requests sent at once.
struct Driven {
    stream: Stream<Payload>,
    now: Instant,
}

/// The batch `seq` of a process.
fn batch(process: u8, seq: u64) -> Payload {
    let mut bytes = vec![process];
    bytes.extend(seq.to_be_bytes());
    bytes
}

fn apply(process: u8, seqs: impl IntoIterator<Item = u64>) -> Actions {
    seqs.into_iter().map(|seq| Action::Apply { seq, payload: batch(process, seq) }).collect()
}

const EXACT: Action<Payload> = Action::State(FeedState::Exact);
const SUSPENDED: Action<Payload> = Action::State(FeedState::Suspended(SuspendReason::Disconnected));
const SILENT: Action<Payload> = Action::State(FeedState::Suspended(SuspendReason::Silent));
const CONNECTING: Action<Payload> = Action::State(FeedState::Connecting);

fn degraded(reason: DegradedReason) -> Action<Payload> {
    Action::State(FeedState::Degraded(reason))
}

fn request(from: u64) -> Action<Payload> {
    Action::RequestReplay { from }
}

impl Driven {
    fn new(can_replay: bool) -> Self {
        Self { stream: Stream::new(can_replay, StreamLimits::default(), 1), now: Instant::now() }
    }

    fn act(&mut self, act: impl FnOnce(&mut Stream<Payload>, Instant, &mut Actions)) -> Actions {
        let mut actions = Vec::new();
        act(&mut self.stream, self.now, &mut actions);
        if actions.iter().any(|action| matches!(action, Action::RequestReplay { .. })) {
            self.stream.on_replay_sent(self.now);
        }
        actions
    }

    fn connect(&mut self) -> Actions {
        self.act(|stream, now, actions| stream.on_connect(now, actions))
    }

    fn disconnect(&mut self) -> Actions {
        self.act(|stream, _, actions| stream.on_disconnect(actions))
    }

    fn live(&mut self, process: u8, seq: u64) -> Actions {
        self.act(|stream, now, actions| stream.on_live(seq, batch(process, seq), now, actions))
    }

    /// An answer: some batches, then the end.
    fn answer(&mut self, process: u8, seqs: impl IntoIterator<Item = u64>) -> Actions {
        let mut actions: Actions = seqs.into_iter().flat_map(|seq| self.replay(process, seq)).collect();
        actions.extend(self.end());
        actions
    }

    fn replay(&mut self, process: u8, seq: u64) -> Actions {
        self.act(|stream, now, actions| stream.on_replay(seq, batch(process, seq), now, actions))
    }

    fn end(&mut self) -> Actions {
        self.act(|stream, now, actions| stream.on_replay_end(now, actions))
    }

    fn wait(&mut self, time: Duration) -> Actions {
        self.now += time;
        self.act(|stream, now, actions| stream.on_tick(now, actions))
    }

    /// A stream that has followed process 1 up to `seq`.
    fn following(can_replay: bool, seq: u64) -> Self {
        let mut driven = Self::new(can_replay);
        driven.connect();
        for seq in 0..=seq {
            driven.live(1, seq);
        }
        assert_eq!(driven.stream.state(), FeedState::Exact);
        driven
    }
}

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
fn an_answer_that_stalls_is_asked_for_again_from_where_it_was() {
    let mut driven = Driven::new(true);
    driven.connect();
    driven.replay(1, 0);
    driven.replay(1, 1);
    assert_eq!(driven.wait(StreamLimits::default().replay_stall), [Action::CancelReplay]);
    assert_eq!(driven.wait(Duration::from_secs(1)), [request(1)]);
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
fn a_gap_without_a_replay_endpoint_degrades() {
    let mut driven = Driven::following(false, 1);
    assert_eq!(driven.live(1, 5), [apply(1, [5]), vec![degraded(DegradedReason::NoReplay)]].concat());
    let mut driven = Driven::new(false);
    driven.connect();
    assert_eq!(driven.live(1, 5), [apply(1, [5]), vec![degraded(DegradedReason::NoReplay)]].concat());
}

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

impl Driven {
    fn doubt(&mut self, doubt: Doubt) -> Actions {
        self.act(|stream, _, actions| stream.on_doubt(doubt, actions))
    }
}

const HEALTH_LOST: Action<Payload> = Action::State(FeedState::Suspended(SuspendReason::HealthLost));

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
