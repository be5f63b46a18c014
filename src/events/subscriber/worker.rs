//! The loop of the subscriber's thread.

use super::SubscriberConfig;
use super::replays::Replays;
use super::socket::{self, Link, LiveSocket, Received, ReplaySocket, Replayer};
use crate::events::batch::{Batch, SkipReason};
use crate::events::endpoint::Endpoint;
use crate::events::groups::Groups;
use crate::events::sink::Sink;
use crate::events::stream::{Action, Doubt, FeedState, Stream};
use crate::metrics::{EventMetrics, FeedLabels, ListenerMetrics};
use smallvec::SmallVec;
use std::sync::mpsc;
use std::time::{Duration, Instant};
use zmq::{Message, POLLIN, Socket};

/// What other threads ask of this one.
pub(super) enum Command<K> {
    /// Hear publishers that connect to an endpoint; each feed of theirs is added by its topic.
    Listen {
        endpoint: String,
        live: LiveSocket,
    },
    StopListening {
        endpoint: String,
    },
    Add {
        key: K,
        labels: FeedLabels,
        live: Live,
        replay: Option<Endpoint>,
    },
    Remove {
        key: K,
    },
    Stop,
}

/// Messages taken from one socket before the others have their turn.
const MESSAGES_PER_TURN: usize = 256;
/// How often streams are told the time.
const TICK: Duration = Duration::from_millis(100);

const STATES: [&str; 4] = ["connecting", "exact", "degraded", "suspended"];

/// Where a feed's live messages come from.
pub(super) enum Live {
    /// A socket of its own.
    Own(LiveSocket),
    /// One to which several publishers connect. Which of them a connection is nobody tells, so a publisher counts as
    /// connected: its numbers, its health and its replay show that it is another process.
    Shared { endpoint: String, topic: Box<[u8]>, replayer: Replayer },
}

impl Live {
    const fn own(&self) -> Option<&LiveSocket> {
        match self {
            Self::Own(live) => Some(live),
            Self::Shared { .. } => None,
        }
    }

    const fn replayer(&self) -> &Replayer {
        match self {
            Self::Own(live) => live.replayer(),
            Self::Shared { replayer, .. } => replayer,
        }
    }

    fn is_of(&self, at: &str, of: &[u8]) -> bool {
        matches!(self, Self::Shared { endpoint, topic, .. } if **endpoint == *at && **topic == *of)
    }
}

struct Listener {
    endpoint: String,
    live: LiveSocket,
    metrics: ListenerMetrics,
}

struct Slot<K> {
    key: K,
    labels: FeedLabels,
    live: Live,
    replay: Option<Endpoint>,
    stream: Stream<Message>,
    groups: Groups,
    metrics: EventMetrics,
}

pub(super) struct Worker<S: Sink> {
    config: SubscriberConfig,
    sink: S,
    commands: mpsc::Receiver<Command<S::Key>>,
    woken: Socket,
    slots: Vec<Slot<S::Key>>,
    listeners: Vec<Listener>,
    replays: Replays<S::Key, ReplaySocket>,
    batch: Batch,
    actions: Vec<Action<Message>>,
    feeds_ever: u64,
}

impl<S: Sink> Worker<S> {
    pub(super) fn new(
        config: SubscriberConfig,
        sink: S,
        commands: mpsc::Receiver<Command<S::Key>>,
        woken: Socket,
    ) -> Self {
        let replays = Replays::new(config.replays_in_flight);
        Self {
            config,
            sink,
            commands,
            woken,
            slots: Vec::new(),
            listeners: Vec::new(),
            replays,
            batch: Batch::new(),
            actions: Vec::new(),
            feeds_ever: 0,
        }
    }

    pub(super) fn run(mut self) {
        let mut next_tick = Instant::now() + TICK;
        let mut ready = Vec::new();
        loop {
            self.poll(next_tick, &mut ready);
            let (woken, rest) = ready.split_first().map_or((false, &[][..]), |(woken, rest)| (*woken, rest));
            let own: Vec<usize> = self.own_slots().map(|(at, _)| at).collect();
            let (live, rest) = rest.split_at_checked(2 * own.len()).unwrap_or_default();
            let (shared, replays) = rest.split_at_checked(2 * self.listeners.len()).unwrap_or_default();
            let running = self.replays.running.iter().map(|(key, _)| *key);
            let replays: SmallVec<[S::Key; 8]> =
                running.zip(replays).filter_map(|(key, ready)| ready.then_some(key)).collect();
            for (at, ready) in shared.chunks_exact(2).enumerate() {
                if *ready != [false, false] {
                    self.receive_shared(at);
                }
            }
            for (at, ready) in own.into_iter().zip(live.chunks_exact(2)) {
                if ready != [false, false] {
                    self.receive_live(at, ready[0]);
                }
            }
            for key in replays {
                self.receive_replay(key);
            }
            let now = Instant::now();
            if now >= next_tick {
                next_tick = now + TICK;
                self.take_doubts();
                for at in 0..self.slots.len() {
                    self.act(at, |stream, actions| stream.on_tick(now, actions));
                }
            }
            if woken {
                socket::drain(&self.woken);
            }
            if !self.obey() {
                return;
            }
            self.start_replays();
        }
    }

    /// Waits until a socket is readable or the time has come: the wake-up line, then for each feed its events and its
    /// monitor, the same for each listener, then the replays.
    fn poll(&self, until: Instant, ready: &mut Vec<bool>) {
        let sockets = self.slots.len() + self.listeners.len();
        let mut items = Vec::with_capacity(1 + 2 * sockets + self.replays.running.len());
        items.push(self.woken.as_poll_item(POLLIN));
        let listeners = self.listeners.iter().map(|listener| &listener.live);
        for live in self.own_slots().map(|(_, live)| live).chain(listeners) {
            items.push(live.events.as_poll_item(POLLIN));
            items.push(live.monitor.as_poll_item(POLLIN));
        }
        items.extend(self.replays.running.iter().map(|(_, replay)| replay.socket.as_poll_item(POLLIN)));
        // Rounded up, so that the time has come when nothing else has happened.
        let wait = until.saturating_duration_since(Instant::now()).as_millis().min(TICK.as_millis()) + 1;
        if let Err(error) = zmq::poll(&mut items, wait as i64)
            && error != zmq::Error::EINTR
        {
            tracing::error!(%error, "polling the KV event sockets failed");
            std::thread::sleep(TICK);
        }
        ready.clear();
        ready.extend(items.iter().map(zmq::PollItem::is_readable));
    }

    /// The feeds with a socket of their own, by their places.
    fn own_slots(&self) -> impl Iterator<Item = (usize, &LiveSocket)> {
        self.slots.iter().enumerate().filter_map(|(at, slot)| Some((at, slot.live.own()?)))
    }

    /// Does what was asked for. `false` to stop.
    fn obey(&mut self) -> bool {
        loop {
            match self.commands.try_recv() {
                Ok(Command::Add { key, labels, live, replay }) => {
                    self.feeds_ever += 1;
                    let seed = self.config.seed.wrapping_add(self.feeds_ever);
                    let stream = Stream::new(replay.is_some(), self.config.stream, seed);
                    let reasons = SkipReason::ALL.map(SkipReason::as_str);
                    let metrics =
                        EventMetrics::register(&labels, &reasons, &STATES, &Doubt::ALL.map(Doubt::as_str));
                    set_state(&metrics, stream.state());
                    let groups = Groups::default();
                    let is_shared = live.own().is_none();
                    self.slots.push(Slot { key, labels, live, replay, stream, groups, metrics });
                    if is_shared {
                        let at = self.slots.len() - 1;
                        self.act(at, |stream, actions| stream.on_connect(Instant::now(), actions));
                    }
                }
                Ok(Command::Listen { endpoint, live }) => {
                    let metrics = ListenerMetrics::register(&endpoint);
                    self.listeners.push(Listener { endpoint, live, metrics });
                }
                Ok(Command::StopListening { endpoint }) => {
                    self.listeners.retain(|listener| listener.endpoint != endpoint);
                }
                Ok(Command::Remove { key }) => {
                    self.replays.cancel(key);
                    let leaving = self.slots.iter().filter(|slot| slot.key == key);
                    leaving.for_each(|slot| slot.metrics.clear());
                    self.slots.retain(|slot| slot.key != key);
                    self.sink.removed(key);
                }
                Err(mpsc::TryRecvError::Empty) => return true,
                Ok(Command::Stop) | Err(mpsc::TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn take_doubts(&mut self) {
        for (key, doubt) in self.sink.doubts() {
            let Some(at) = self.slots.iter().position(|slot| slot.key == key) else { continue };
            if let Some(slot) = self.slots.get(at) {
                let counters = slot.metrics.doubts.iter().zip(Doubt::ALL);
                counters.filter(|(_, of)| *of == doubt).for_each(|(counter, _)| counter.increment(1));
            }
            self.act(at, |stream, actions| stream.on_doubt(doubt, actions));
        }
    }

    fn receive_live(&mut self, at: usize, events: bool) {
        // News of the connection come first: a batch must not be taken for one of the connection before.
        while let Some(change) = self.slots.get(at).and_then(|slot| slot.live.own()?.link_change()) {
            self.act(at, |stream, actions| match change {
                Link::Up => stream.on_connect(Instant::now(), actions),
                Link::Down => stream.on_disconnect(actions),
            });
            if let Some(slot) = self.slots.get(at)
                && change == Link::Down
            {
                slot.metrics.disconnects.increment(1);
            }
        }
        if !events {
            return;
        }
        let now = Instant::now();
        for _ in 0..MESSAGES_PER_TURN {
            let Some(slot) = self.slots.get(at) else { return };
            match slot.live.own().and_then(LiveSocket::receive) {
                None => return,
                Some(Received::Batch { seq, payload }) => {
                    self.act(at, |stream, actions| stream.on_live(seq, payload, now, actions));
                }
                Some(Received::End | Received::Rejected) => slot.metrics.rejected_messages.increment(1),
            }
        }
    }

    /// Hands the messages of several publishers to their feeds.
    fn receive_shared(&mut self, listener: usize) {
        let now = Instant::now();
        for _ in 0..MESSAGES_PER_TURN {
            let Some(Listener { endpoint, live, metrics }) = self.listeners.get(listener) else { return };
            while live.link_change().is_some() {}
            let Some((topic, received)) = live.receive_any() else { return };
            let of_topic = |slot: &Slot<S::Key>| slot.live.is_of(endpoint, &topic);
            let Some(at) = self.slots.iter().position(of_topic) else {
                metrics.unknown_topic.increment(1);
                continue;
            };
            match received {
                Received::Batch { seq, payload } => {
                    self.act(at, |stream, actions| stream.on_live(seq, payload, now, actions));
                }
                Received::End | Received::Rejected => {
                    if let Some(slot) = self.slots.get(at) {
                        slot.metrics.rejected_messages.increment(1);
                    }
                }
            }
        }
    }

    fn receive_replay(&mut self, key: S::Key) {
        let now = Instant::now();
        let Some(at) = self.slots.iter().position(|slot| slot.key == key) else { return };
        for _ in 0..MESSAGES_PER_TURN {
            // The stream may have cancelled the replay upon the message before.
            let Some((_, replay)) = self.replays.running.iter().find(|(running, _)| *running == key) else {
                return;
            };
            match replay.receive() {
                None => return,
                Some(Received::Batch { seq, payload }) => {
                    self.act(at, |stream, actions| stream.on_replay(seq, payload, now, actions));
                }
                Some(Received::End) => {
                    self.replays.cancel(key);
                    self.act(at, |stream, actions| stream.on_replay_end(now, actions));
                }
                Some(Received::Rejected) => {
                    if let Some(slot) = self.slots.get(at) {
                        slot.metrics.rejected_messages.increment(1);
                    }
                }
            }
        }
    }

    fn start_replays(&mut self) {
        while let Some((key, from)) = self.replays.next() {
            let Some(slot) = self.slots.iter_mut().find(|slot| slot.key == key) else { continue };
            let Some(endpoint) = &slot.replay else { continue };
            match slot.live.replayer().request_replay(endpoint, from) {
                Ok(socket) => self.replays.started(key, socket),
                // The stream takes it for a replay that stays silent, and asks again.
                Err(error) => tracing::warn!(%error, %endpoint, "the replay could not be asked for"),
            }
            slot.metrics.replays.increment(1);
            slot.stream.on_replay_sent(Instant::now());
        }
    }

    /// Tells a stream something and does what it says.
    fn act(&mut self, at: usize, tell: impl FnOnce(&mut Stream<Message>, &mut Vec<Action<Message>>)) {
        let Some(slot) = self.slots.get_mut(at) else { return };
        let mut actions = std::mem::take(&mut self.actions);
        tell(&mut slot.stream, &mut actions);
        let mut further = Vec::new();
        while !actions.is_empty() {
            for action in actions.drain(..) {
                match action {
                    Action::Apply { seq, payload } => {
                        decode(slot, &mut self.batch, &self.config, &payload, seq, &mut further);
                        if let Some(since) = self.sink.apply(slot.key, seq, &self.batch) {
                            slot.stream.on_turned_over(since, &mut further);
                        }
                    }
                    Action::RequestReplay { from } => self.replays.enqueue(slot.key, from),
                    Action::CancelReplay => self.replays.cancel(slot.key),
                    Action::Reset(reason) => {
                        slot.groups = Groups::default();
                        slot.metrics.resets.increment(1);
                        let FeedLabels { pool, server, rank } = &slot.labels;
                        tracing::info!(pool, server, rank, reason = reason.as_str(), "KV cache forgotten");
                        self.sink.reset(slot.key, reason);
                    }
                    Action::State(state) => {
                        set_state(&slot.metrics, state);
                        log_state(&slot.labels, state, slot.stream.applied_seq());
                        self.sink.state(slot.key, state, slot.stream.applied_seq());
                    }
                }
            }
            std::mem::swap(&mut actions, &mut further);
        }
        slot.metrics.gaps.absolute(slot.stream.gaps());
        self.actions = actions;
    }
}

fn decode<K>(
    slot: &mut Slot<K>,
    batch: &mut Batch,
    config: &SubscriberConfig,
    payload: &[u8],
    seq: u64,
    actions: &mut Vec<Action<Message>>,
) {
    let metrics = &slot.metrics;
    let decoded = batch.decode(payload, &config.hash_key, &mut slot.groups);
    if decoded.is_err() {
        metrics.undecodable_batches.increment(1);
    }
    metrics.batches.increment(1);
    metrics.bytes.increment(payload.len() as u64);
    metrics.events.increment(batch.events().len() as u64);
    metrics.applied_seq.set(seq as f64);
    for (counter, reason) in metrics.skipped.iter().zip(SkipReason::ALL) {
        counter.increment(u64::from(batch.skipped(reason)));
    }
    if batch.has_cleared() {
        slot.stream.on_cleared(seq, actions);
    }
    if decoded.is_err() || batch.lost_blocks() {
        slot.stream.on_undecodable(seq, actions);
    }
}

fn set_state(metrics: &EventMetrics, state: FeedState) {
    for (gauge, name) in metrics.states.iter().zip(STATES) {
        gauge.set(if name == state.as_str() { 1.0 } else { 0.0 });
    }
}

fn log_state(labels: &FeedLabels, state: FeedState, applied_seq: Option<u64>) {
    let FeedLabels { pool, server, rank } = labels;
    match state {
        FeedState::Degraded(reason) => {
            tracing::warn!(pool, server, rank, applied_seq, reason = reason.as_str(), "KV events degraded");
        }
        FeedState::Suspended(reason) => {
            tracing::info!(pool, server, rank, applied_seq, reason = reason.as_str(), "KV events suspended");
        }
        _ => tracing::info!(pool, server, rank, applied_seq, state = state.as_str(), "KV events"),
    }
}
