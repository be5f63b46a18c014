//! Recorded streams of vLLM, replayed into the state machine: restarts, gaps, replays.

mod events_support;

use events_support::{Event, Record, names, owned, records};
use kvspoa::events::stream::{Action, Stream, StreamLimits};
use kvspoa::events::{Batch, FeedState, Groups, ResetReason};
use kvspoa::hash::HashKey;
use std::time::Instant;

/// A stream whose actions are carried out: applied batches become events, requests are noted.
struct Follower {
    stream: Stream<Vec<u8>>,
    now: Instant,
    batch: Batch,
    groups: Groups,
    events: Vec<Event>,
    applied: Vec<u64>,
    resets: Vec<ResetReason>,
    request: Option<u64>,
}

impl Follower {
    fn connected(can_replay: bool) -> Self {
        let mut follower = Self {
            stream: Stream::new(can_replay, StreamLimits::default(), 1),
            now: Instant::now(),
            batch: Batch::new(),
            groups: Groups::default(),
            events: Vec::new(),
            applied: Vec::new(),
            resets: Vec::new(),
            request: None,
        };
        follower.tell(|stream, now, actions| stream.on_connect(now, actions));
        follower
    }

    fn tell(&mut self, tell: impl FnOnce(&mut Stream<Vec<u8>>, Instant, &mut Vec<Action<Vec<u8>>>)) {
        let mut actions = Vec::new();
        tell(&mut self.stream, self.now, &mut actions);
        for action in actions {
            match action {
                Action::Apply { seq, payload } => {
                    self.batch.decode(&payload, &HashKey::from_seed(1), &mut self.groups).expect("decodes");
                    self.events.extend(owned(&self.batch));
                    self.applied.push(seq);
                }
                Action::RequestReplay { from } => {
                    self.request = Some(from);
                    self.stream.on_replay_sent(self.now);
                }
                Action::CancelReplay => self.request = None,
                Action::Reset(reason) => {
                    self.resets.push(reason);
                    self.events.clear();
                    self.applied.clear();
                    self.groups = Groups::default();
                }
                Action::State(_) => {}
            }
        }
    }

    fn live(&mut self, record: &Record) {
        let (seq, payload) = record.message();
        self.tell(|stream, now, actions| stream.on_live(seq, payload.to_vec(), now, actions));
    }

    fn reconnect(&mut self) {
        self.tell(|stream, _, actions| stream.on_disconnect(actions));
        self.tell(|stream, now, actions| stream.on_connect(now, actions));
    }

    fn replay(&mut self, record: &Record) {
        let (seq, payload) = record.message();
        if record.is_end() {
            self.tell(|stream, now, actions| stream.on_replay_end(now, actions));
        } else {
            self.tell(|stream, now, actions| stream.on_replay(seq, payload.to_vec(), now, actions));
        }
    }

    /// Answers the request that is open from the recorded replays, as the publisher does.
    fn answer(&mut self, replayed: &[Record]) {
        let from = self.request.take().expect("a request");
        let end = replayed.iter().find(|record| record.is_end()).expect("an end");
        replayed
            .iter()
            .filter(|r| !r.is_end() && r.message().0 >= from)
            .for_each(|record| self.replay(record));
        self.replay(end);
    }

    fn answer_all(&mut self, replayed: &[Record]) {
        while self.request.is_some() {
            self.answer(replayed);
        }
    }
}

/// Live messages and the answer to a replay from 0 of a recording whose history is whole.
fn recorded(name: &str) -> Option<(Vec<Record>, Vec<Record>)> {
    let (replayed, live): (Vec<Record>, Vec<Record>) = records(name).into_iter().partition(|r| r.replayed);
    let end = replayed.iter().position(Record::is_end)?;
    let first_live = live.first()?.message().0;
    (first_live == 0 && end > 0).then(|| (live, replayed[..=end].to_vec()))
}

#[test]
fn recorded_replays_of_every_layout_give_the_history_that_was_seen_live() {
    let mut compared = 0;
    for name in names() {
        let Some((live, replayed)) = recorded(&name) else { continue };
        compared += 1;
        let mut watching = Follower::connected(false);
        // The recordings go on after the replay was taken.
        let last = replayed[replayed.len() - 2].message().0;
        live.iter().filter(|r| r.message().0 <= last).for_each(|record| watching.live(record));
        let mut late = Follower::connected(true);
        late.answer_all(&replayed);
        assert_eq!(late.stream.state(), FeedState::Exact, "{name}");
        assert_eq!(late.applied, (0..=last).collect::<Vec<_>>(), "{name}");
        assert_eq!(late.events, watching.events, "{name}");
    }
    assert!(compared >= 16, "{compared}");
}

#[test]
fn recorded_replays_fill_gaps_of_the_live_stream() {
    for name in names() {
        let Some((live, replayed)) = recorded(&name) else { continue };
        let last = replayed[replayed.len() - 2].message().0;
        if last < 4 {
            continue;
        }
        let mut whole = Follower::connected(false);
        let mut gappy = Follower::connected(true);
        for record in live.iter().filter(|r| r.message().0 <= last) {
            whole.live(record);
            if record.message().0 % 4 < 2 || record.message().0 == last {
                gappy.live(record);
            }
        }
        gappy.answer_all(&replayed);
        assert_eq!(gappy.stream.state(), FeedState::Exact, "{name}");
        assert_eq!(gappy.events, whole.events, "{name}");
        assert_eq!(gappy.resets, [], "{name}");
    }
}

#[test]
fn a_recorded_restart_resets_the_rank() {
    let records = records("qwen3-restart");
    let live: Vec<&Record> = records.iter().filter(|r| !r.replayed).collect();
    let seqs: Vec<u64> = live.iter().map(|r| r.message().0).collect();
    assert_eq!(seqs, [55, 56, 0, 1]);

    // Without a replay endpoint and without a word of the connection, the numbers alone tell.
    let mut follower = Follower::connected(false);
    live.iter().for_each(|record| follower.live(record));
    assert_eq!(follower.resets, [ResetReason::SequenceWentBack]);
    assert_eq!(follower.stream.state(), FeedState::Exact);
    assert_eq!(follower.applied, [0, 1]);

    // With both, the restart is known before the new process publishes.
    let mut follower = Follower::connected(true);
    follower.live(live[0]);
    follower.live(live[1]);
    let buffered: Vec<Record> =
        live[..2].iter().map(|r| Record { replayed: true, frames: r.frames.clone() }).collect();
    let empty: Vec<Record> = records.iter().filter(|r| r.is_end()).take(1).cloned().collect();
    follower.answer(&[buffered, empty.clone()].concat());
    assert_eq!(follower.applied, [55, 56]);
    follower.reconnect();
    assert_eq!(follower.stream.state(), FeedState::Suspended);
    assert_eq!(follower.request, Some(56));
    follower.answer_all(&empty);
    assert_eq!(follower.resets, [ResetReason::HistoryGone]);
    assert_eq!(follower.stream.state(), FeedState::Exact);
    follower.live(live[2]);
    follower.live(live[3]);
    assert_eq!(follower.applied, [0, 1]);

    // The recorded replay of the new process gives the same.
    let mut late = Follower::connected(true);
    let replayed: Vec<Record> = records.iter().filter(|r| r.replayed).skip(1).cloned().collect();
    late.answer_all(&replayed);
    assert_eq!(late.events, follower.events);
}
