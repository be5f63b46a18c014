//! Streams in a world of random faults: lost live batches, answers with holes or without an end, lost connections,
//! restarts, a history too short. Whatever happens, a stream that calls itself exact must be so.

use super::*;
use proptest::prelude::*;
use std::time::Duration;

type Payload = Vec<u8>;

/// What happens next.
#[derive(Clone, Debug)]
enum Happening {
    /// The process publishes; of each ten batches some are lost on the live connection.
    Publish {
        batches: u64,
        lost_of_ten: u64,
    },
    /// Some of the live batches in transit arrive.
    LiveArrives(usize),
    /// The request is sent, if it was not, and the publisher answers it; what is at or behind `hole` (but for the head of the answer) is lost up to
    /// `whole_again`, and the end with it if that is beyond the answer.
    Answer {
        hole: usize,
        whole_again: usize,
    },
    /// Some of the answer in transit arrives.
    AnswerArrives(usize),
    Disconnect,
    Connect,
    /// The process ends and another takes its place.
    Restart,
    /// Time passes.
    Wait(u64),
    /// Others doubt the stream, with reason or without.
    Doubt(Doubt),
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        6 => (1u64..8, 0u64..5).prop_map(|(batches, lost_of_ten)| Happening::Publish { batches, lost_of_ten }),
        6 => (1usize..20).prop_map(Happening::LiveArrives),
        6 => (2usize..20, 2usize..30).prop_map(|(hole, whole_again)| Happening::Answer { hole, whole_again }),
        6 => (1usize..20).prop_map(Happening::AnswerArrives),
        1 => Just(Happening::Disconnect),
        3 => Just(Happening::Connect),
        1 => Just(Happening::Restart),
        3 => (1u64..400).prop_map(Happening::Wait),
        1 => (20_000u64..90_000).prop_map(Happening::Wait),
        1 => prop_oneof![Just(Doubt::Silent), Just(Doubt::HealthLost), Just(Doubt::Resync)].prop_map(Happening::Doubt),
    ]
}

enum Message {
    Batch(u64),
    End,
}

struct World {
    process: u64,
    published: u64,
    /// Batches that the replay still has.
    buffer: u64,
    connected: bool,
    live: VecDeque<(u64, Payload)>,
    request: Option<u64>,
    answer: VecDeque<Message>,
    random: fastrand::Rng,
    now: Instant,
    stream: Stream<Payload>,
    /// What the index would hold.
    applied: Vec<(u64, Payload)>,
}

fn payload(process: u64, seq: u64) -> Payload {
    [process.to_be_bytes(), seq.to_be_bytes()].concat()
}

impl World {
    fn new(buffer: u64, seed: u64) -> Self {
        Self {
            process: 1,
            published: 0,
            buffer,
            connected: false,
            live: VecDeque::new(),
            request: None,
            answer: VecDeque::new(),
            random: fastrand::Rng::with_seed(seed),
            now: Instant::now(),
            stream: Stream::new(true, StreamLimits { held_batches: 20, ..StreamLimits::default() }, seed),
            applied: Vec::new(),
        }
    }

    fn tell(&mut self, tell: impl FnOnce(&mut Stream<Payload>, Instant, &mut Vec<Action<Payload>>)) {
        let mut actions = Vec::new();
        tell(&mut self.stream, self.now, &mut actions);
        for action in actions {
            match action {
                Action::Apply { seq, payload } => self.applied.push((seq, payload)),
                Action::RequestReplay { from } => {
                    self.answer.clear();
                    self.request = Some(from);
                }
                Action::CancelReplay => {
                    self.request = None;
                    self.answer.clear();
                }
                Action::Reset(_) => self.applied.clear(),
                Action::State(_) => {}
            }
        }
    }

    fn happen(&mut self, happening: &Happening) {
        match *happening {
            Happening::Publish { batches, lost_of_ten } => {
                for _ in 0..batches {
                    if self.connected && self.random.u64(0..10) >= lost_of_ten {
                        self.live.push_back((self.published, payload(self.process, self.published)));
                    }
                    self.published += 1;
                }
            }
            Happening::LiveArrives(batches) => {
                for _ in 0..batches.min(self.live.len()) {
                    let (seq, payload) = self.live.pop_front().expect("counted");
                    self.tell(|stream, now, actions| stream.on_live(seq, payload, now, actions));
                }
            }
            Happening::Answer { hole, whole_again } => {
                let Some(from) = self.request.take() else { return };
                self.stream.on_replay_sent(self.now);
                let oldest = self.published.saturating_sub(self.buffer).max(from);
                let batches = (oldest..self.published.max(oldest)).map(Message::Batch).chain([Message::End]);
                let kept = batches.enumerate().filter(|(at, _)| *at < hole || *at >= whole_again);
                self.answer = kept.map(|(_, message)| message).collect();
            }
            Happening::AnswerArrives(messages) => {
                for _ in 0..messages {
                    // A message may cancel the rest.
                    match self.answer.pop_front() {
                        None => {}
                        Some(Message::Batch(seq)) => {
                            let payload = payload(self.process, seq);
                            self.tell(|stream, now, actions| stream.on_replay(seq, payload, now, actions));
                        }
                        Some(Message::End) => {
                            self.tell(|stream, now, actions| stream.on_replay_end(now, actions));
                        }
                    }
                }
            }
            Happening::Disconnect if self.connected => {
                self.connected = false;
                self.tell(|stream, _, actions| stream.on_disconnect(actions));
            }
            Happening::Connect if !self.connected => {
                // What is left of the old connection has been read by now, as the subscriber does.
                self.happen(&Happening::LiveArrives(usize::MAX));
                self.connected = true;
                self.tell(|stream, now, actions| stream.on_connect(now, actions));
            }
            Happening::Restart => {
                self.happen(&Happening::Disconnect);
                self.process += 1;
                self.published = 0;
            }
            Happening::Wait(ms) => {
                self.now += Duration::from_millis(ms);
                self.tell(|stream, now, actions| stream.on_tick(now, actions));
            }
            Happening::Doubt(doubt) => self.tell(|stream, _, actions| stream.on_doubt(doubt, actions)),
            Happening::Disconnect | Happening::Connect => {}
        }
    }

    /// What an exact stream has applied: one process's batches from 0 on, each once, in order; and while it is
    /// connected, the present process's.
    fn check(&self) {
        if self.stream.state() != FeedState::Exact {
            return;
        }
        let process = self
            .applied
            .first()
            .map_or(self.process, |(_, bytes)| u64::from_be_bytes(bytes[..8].try_into().expect("a number")));
        for (at, (seq, bytes)) in self.applied.iter().enumerate() {
            assert_eq!((*seq, bytes), (at as u64, &payload(process, at as u64)));
        }
        assert_eq!(process, self.process, "exact about a process that is gone");
    }

    /// The faults end, one more batch comes, all is delivered.
    fn settle(&mut self) {
        self.happen(&Happening::Connect);
        self.happen(&Happening::Publish { batches: 1, lost_of_ten: 0 });
        for _ in 0..60 {
            self.happen(&Happening::LiveArrives(usize::MAX));
            self.happen(&Happening::Answer { hole: usize::MAX, whole_again: 0 });
            self.happen(&Happening::AnswerArrives(self.answer.len()));
            self.happen(&Happening::Wait(500));
            self.check();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_stream_that_calls_itself_exact_is_exact(
        happenings in proptest::collection::vec(happening(), 1..120),
        buffer in prop_oneof![3 => Just(u64::MAX), 1 => 5u64..40],
        seed in any::<u64>()
    ) {
        let mut world = World::new(buffer, seed);
        for happening in &happenings {
            world.happen(happening);
            world.check();
        }
        world.settle();
        let last = world.published - 1;
        prop_assert_eq!(world.stream.applied_seq(), Some(last), "the stream follows");
        match world.stream.state() {
            FeedState::Exact => prop_assert_eq!(world.applied.len() as u64, world.published),
            FeedState::Degraded(_) => {}
            other => prop_assert!(false, "{:?}", other),
        }
    }
}
