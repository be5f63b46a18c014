//! The machine alone, on a clock of its own.

mod doubts;
mod gaps;
mod history;
mod processes;
mod silence;

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
