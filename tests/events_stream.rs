//! Streams followed by the state machine: recorded ones of vLLM, and those of the simulated replica under faults.

mod events_support;

use events_support::{Event, Record, names, owned, records};
use kvspoa::events::stream::{Action, Stream, StreamLimits};
use kvspoa::events::{Batch, Doubt, FeedState, Groups, ResetReason, SuspendReason};
use kvspoa::hash::HashKey;
use kvspoa::index::{Index, IndexConfig, Overlaps};
use kvspoa::sim::{Engine, EngineConfig, HashFormat, Job, OffloadConfig, Prompt, Timing, encode_batch};
use kvspoa::units::{RankId, TokenId};
use std::time::{Duration, Instant};

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
    assert_eq!(follower.stream.state(), FeedState::Suspended(SuspendReason::Disconnected));
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

const RANK: RankId = RankId(0);
const BLOCK: usize = 16;

/// A simulated engine, and an index that follows its batches over a bad connection.
struct World {
    rng: fastrand::Rng,
    key: HashKey,
    engine: Engine,
    has_cpu_tier: bool,
    jobs: u64,
    /// Whether the engine was reset and has not told yet.
    reset_untold: bool,
    /// All that the process has published.
    history: Vec<Vec<u8>>,
    /// A live batch that comes after the next one.
    delayed: Option<u64>,
    faults: bool,
    stream: Stream<Vec<u8>>,
    connected: bool,
    now: Instant,
    request: Option<u64>,
    index: Index,
    batch: Batch,
    groups: Groups,
    compared: u32,
    matched: u32,
}

impl World {
    fn new(seed: u64) -> Self {
        let key = HashKey::from_seed(seed);
        let mut index = Index::new(key.clone(), IndexConfig::default());
        assert!(index.add_rank(RANK));
        let has_cpu_tier = seed.is_multiple_of(2);
        Self {
            rng: fastrand::Rng::with_seed(seed),
            key,
            engine: Self::engine(has_cpu_tier),
            has_cpu_tier,
            jobs: 0,
            reset_untold: false,
            history: Vec::new(),
            delayed: None,
            faults: true,
            stream: Stream::new(true, StreamLimits::default(), seed),
            connected: false,
            now: Instant::now(),
            request: None,
            index,
            batch: Batch::new(),
            groups: Groups::default(),
            compared: 0,
            matched: 0,
        }
    }

    fn engine(has_cpu_tier: bool) -> Engine {
        Engine::new(EngineConfig {
            block_tokens: BLOCK as u32,
            blocks: 120,
            offload: has_cpu_tier.then_some(OffloadConfig { blocks: 160, chunk_blocks: 1, describes: true }),
            step_tokens: 512,
            sequences: 4,
            timing: Timing::INSTANT,
        })
    }

    fn tell(&mut self, tell: impl FnOnce(&mut Stream<Vec<u8>>, Instant, &mut Vec<Action<Vec<u8>>>)) {
        let mut actions = Vec::new();
        tell(&mut self.stream, self.now, &mut actions);
        let mut further = Vec::new();
        for action in actions {
            match action {
                Action::Apply { seq, payload } => {
                    let decoded = self.batch.decode(&payload, &self.key, &mut self.groups);
                    if self.batch.has_cleared() {
                        self.stream.on_cleared(seq, &mut further);
                    }
                    if decoded.is_err() || self.batch.lost_blocks() {
                        self.stream.on_undecodable(seq, &mut further);
                    }
                    for event in self.batch.events() {
                        self.index.apply(RANK, &event);
                    }
                    self.index.end_batch(RANK);
                }
                Action::RequestReplay { from } => self.request = Some(from),
                Action::CancelReplay => self.request = None,
                Action::Reset(_) => {
                    self.index.clear_rank(RANK);
                    self.groups = Groups::default();
                }
                Action::State(_) => {}
            }
        }
        assert!(further.iter().all(|action| matches!(action, Action::State(_))));
    }

    fn percent(&mut self, percent: u8) -> bool {
        self.faults && self.rng.u8(..100) < percent
    }

    fn publish(&mut self, payload: Vec<u8>) {
        let seq = self.history.len() as u64;
        self.history.push(payload);
        if !self.connected || self.percent(10) {
            return;
        }
        if self.delayed.is_none() && self.percent(3) {
            self.delayed = Some(seq);
            return;
        }
        self.deliver(seq);
        if self.percent(3) {
            self.deliver(seq);
        }
        if let Some(late) = self.delayed.take() {
            self.deliver(late);
        }
    }

    fn deliver(&mut self, seq: u64) {
        let mut payload = self.history[seq as usize].clone();
        if self.percent(1) {
            payload.truncate(payload.len() / 2);
        }
        self.tell(|stream, now, actions| stream.on_live(seq, payload, now, actions));
    }

    /// Runs one request, and compares what the engine found with what the index says, if that claims to know.
    fn request(&mut self) {
        // A dozen families of prompts; in each, all begin alike.
        let family = self.rng.u32(..12) * 10_000;
        let length = 1 + self.rng.usize(..40 * BLOCK);
        let own = self.rng.usize(..length);
        let tail = self.rng.u32(5_000..9_000);
        let tokens: Vec<TokenId> = (0..length as u32)
            .map(|at| TokenId(family + at + if at as usize >= own { tail } else { 0 }))
            .collect();
        let last = self.history.len().checked_sub(1).map(|last| last as u64);
        let is_known = self.stream.state() == FeedState::Exact && self.stream.applied_seq() == last;
        let mut overlaps = Overlaps::default();
        let sequence = self.key.sequence(self.key.plain_root(), &tokens, BLOCK as u32);
        self.index.find(&sequence, &mut overlaps);
        let predicted = (overlaps.get(RANK).blocks() as usize).min((length - 1) / BLOCK) * BLOCK;
        self.jobs += 1;
        let prompt = Prompt { tokens, ..Prompt::default() };
        let answer = (0..1 + self.rng.u32(..40)).map(TokenId).collect();
        self.engine.submit(Job { id: self.jobs, prompt, answer }).expect("it fits");
        let mut found = None;
        while self.engine.has_work() {
            self.engine.begin_step();
            let report = self.engine.end_step();
            found = found.or_else(|| report.outputs.first().map(|output| output.cached.tokens()));
            if !report.events.is_empty() {
                self.publish(encode_batch(1.0, &report.events, 0, HashFormat::Int));
            }
        }
        if is_known && !std::mem::take(&mut self.reset_untold) {
            assert_eq!(found, Some(predicted), "of {length} tokens");
            self.compared += 1;
            self.matched += u32::from(predicted > 0);
        }
        self.reset_untold = false;
    }

    fn answer(&mut self) {
        let Some(from) = self.request.take() else { return };
        self.stream.on_replay_sent(self.now);
        let until = self.history.len() as u64;
        for seq in from..until {
            if self.percent(4) {
                continue;
            }
            let payload = self.history[seq as usize].clone();
            self.tell(|stream, now, actions| stream.on_replay(seq, payload, now, actions));
            if self.request.is_some() {
                return;
            }
        }
        self.tell(|stream, now, actions| stream.on_replay_end(now, actions));
    }

    fn connect(&mut self, connected: bool) {
        if self.connected == connected {
            return;
        }
        self.connected = connected;
        self.delayed = None;
        self.tell(
            |stream, now, actions| {
                if connected { stream.on_connect(now, actions) } else { stream.on_disconnect(actions) }
            },
        );
    }

    fn wait(&mut self, time: Duration) {
        self.now += time;
        self.tell(|stream, now, actions| stream.on_tick(now, actions));
    }

    fn happen(&mut self) {
        match self.rng.u8(..100) {
            0..=1 => self.connect(false),
            2 => {
                self.connect(false);
                self.engine = Self::engine(self.has_cpu_tier);
                self.history.clear();
                self.reset_untold = false;
            }
            3..=12 => self.connect(true),
            13..=14 => self.reset_untold |= self.engine.reset_prefix_cache(false),
            15..=44 => self.answer(),
            45..=64 => {
                let ms = self.rng.u64(..3_000);
                self.wait(Duration::from_millis(ms));
            }
            65..=66 => {
                let doubt = if self.rng.bool() { Doubt::Silent } else { Doubt::HealthLost };
                self.tell(|stream, _, actions| stream.on_doubt(doubt, actions));
            }
            _ => self.request(),
        }
    }

    /// The faults end, and the cache is reset, which heals what could not be decoded.
    fn settle(&mut self) {
        self.faults = false;
        self.connect(true);
        self.engine.reset_prefix_cache(false);
        self.reset_untold = true;
        for _ in 0..100 {
            self.request();
            self.answer();
            self.wait(Duration::from_secs(2));
        }
        assert_eq!(self.stream.state(), FeedState::Exact);
        assert_eq!(self.stream.applied_seq(), Some(self.history.len() as u64 - 1));
    }
}

#[test]
fn whatever_happens_to_its_stream_an_exact_index_says_what_the_engine_finds() {
    let (mut compared, mut matched) = (0, 0);
    for seed in 0..24 {
        println!("seed {seed}");
        let mut world = World::new(seed);
        (0..500).for_each(|_| world.happen());
        world.settle();
        assert!(world.compared > 100, "{}", world.compared);
        compared += world.compared;
        matched += world.matched;
    }
    assert!(matched > compared / 4, "{matched} of {compared}");
}
