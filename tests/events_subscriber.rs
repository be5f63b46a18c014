//! The subscriber on real ZMQ sockets, with an engine that publishes and replays like vLLM and can be made to fail.

mod events_support;

use events_support::Value;
use kvspoa::events::{
    AddError, Batch, DegradedReason, Feed, FeedLabels, FeedState, ResetReason, Sink, Subscriber,
    SubscriberConfig, SuspendReason,
};
use kvspoa::hash::HashKey;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

/// Long beyond what a loaded machine takes: a test that fails waits so long, one that passes does not.
const PATIENCE: Duration = Duration::from_secs(30);

/// What the sink was told.
#[derive(Clone, PartialEq, Debug)]
enum Told {
    Apply { feed: u8, seq: u64, events: usize },
    Reset(u8, ResetReason),
    State(u8, FeedState),
    Removed(u8),
}

struct Recorder(mpsc::Sender<Told>);

impl Sink for Recorder {
    type Key = u8;

    fn apply(&mut self, feed: u8, seq: u64, batch: &Batch) -> Option<u64> {
        self.tell(Told::Apply { feed, seq, events: batch.events().len() });
        None
    }
    fn reset(&mut self, feed: u8, reason: ResetReason) {
        self.tell(Told::Reset(feed, reason));
    }
    fn state(&mut self, feed: u8, state: FeedState, _applied_seq: Option<u64>) {
        self.tell(Told::State(feed, state));
    }
    fn removed(&mut self, feed: u8) {
        self.tell(Told::Removed(feed));
    }
}

impl Recorder {
    fn tell(&self, told: Told) {
        // The test may be over.
        let _ = self.0.send(told);
    }
}

struct Listener {
    subscriber: Subscriber<u8>,
    told: mpsc::Receiver<Told>,
}

impl Listener {
    fn new() -> Self {
        let (sender, told) = mpsc::channel();
        let config = SubscriberConfig::new(HashKey::from_seed(1));
        let subscriber = Subscriber::spawn(config, Recorder(sender)).expect("spawns");
        Self { subscriber, told }
    }

    fn add(&self, key: u8, engine: &Engine, replays: bool) {
        let replay = replays.then(|| engine.replay_address.clone());
        self.subscriber.add(feed(key, &engine.events_address, replay)).expect("added");
    }

    fn next(&self) -> Told {
        self.told.recv_timeout(PATIENCE).expect("the sink is told something")
    }

    /// Waits for the word, passing over others; returns the sequence numbers applied until then.
    fn until(&self, wanted: &Told) -> Vec<u64> {
        let mut applied = Vec::new();
        loop {
            let told = self.next();
            if let Told::Apply { seq, .. } = told {
                applied.push(seq);
            }
            if told == *wanted {
                return applied;
            }
        }
    }
}

fn feed(key: u8, events: &str, replay: Option<String>) -> Feed<u8> {
    let labels = FeedLabels { pool: "pool".to_owned(), server: format!("s{key}"), rank: 0 };
    Feed { key, labels, events: events.to_owned(), replay, topic: None }
}

fn exact(feed: u8) -> Told {
    Told::State(feed, FeedState::Exact)
}

fn applied(feed: u8, seq: u64) -> Told {
    Told::Apply { feed, seq, events: 1 }
}

/// What the replay thread of the engine shares with the test.
#[derive(Default)]
struct History {
    batches: Vec<(u64, Vec<u8>)>,
    /// Batches that the next answer lacks.
    lost_once: HashSet<u64>,
    requests: Vec<u64>,
    silent: bool,
    topic_frame: bool,
}

/// A publisher process: XPUB, so that a test can wait for the subscription, and a ROUTER with the history.
struct Engine {
    context: zmq::Context,
    publisher: zmq::Socket,
    events_address: String,
    replay_address: String,
    history: Arc<Mutex<History>>,
    stop: Arc<AtomicBool>,
    router: Option<JoinHandle<()>>,
    process: u64,
}

/// Binds, waiting for an address that is still being given up.
fn bind(socket: &zmq::Socket, address: &str) -> String {
    let mut result = socket.bind(address);
    for _ in 0..3000 {
        if result != Err(zmq::Error::EADDRINUSE) {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
        result = socket.bind(address);
    }
    result.expect("binds");
    socket.get_last_endpoint().expect("an endpoint").expect("utf-8")
}

impl Engine {
    fn start(process: u64) -> Self {
        Self::start_at(process, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    }

    fn start_at(process: u64, events: &str, replay: &str) -> Self {
        Self::start_with_queue(process, events, replay, 0)
    }

    /// `replay_queue` is the router's high-water mark, beyond which it drops; 0 is none.
    fn start_with_queue(process: u64, events: &str, replay: &str, replay_queue: i32) -> Self {
        let context = zmq::Context::new();
        let publisher = context.socket(zmq::XPUB).expect("a socket");
        publisher.set_linger(0).expect("sets");
        publisher.set_rcvtimeo(PATIENCE.as_millis() as i32).expect("sets");
        let router = context.socket(zmq::ROUTER).expect("a socket");
        router.set_linger(0).expect("sets");
        router.set_sndhwm(replay_queue).expect("sets");
        let events_address = bind(&publisher, events);
        let replay_address = bind(&router, replay);
        let history = Arc::new(Mutex::new(History { topic_frame: true, ..History::default() }));
        let stop = Arc::new(AtomicBool::new(false));
        let router = {
            let (history, stop) = (Arc::clone(&history), Arc::clone(&stop));
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    if router.poll(zmq::POLLIN, 10).expect("polls") > 0 {
                        answer(&router, &mut history.lock().expect("not poisoned"));
                    }
                }
            })
        };
        let router = Some(router);
        Self { context, publisher, events_address, replay_address, history, stop, router, process }
    }

    /// Ends the process and starts another one at the same addresses.
    fn restart(self) -> Self {
        let (events, replay, process) =
            (self.events_address.clone(), self.replay_address.clone(), self.process);
        drop(self);
        Self::start_at(process + 1, &events, &replay)
    }

    fn wait_for_subscriber(&self) {
        assert_eq!(self.publisher.recv_bytes(0).expect("a subscription"), [1]);
    }

    fn history(&self) -> std::sync::MutexGuard<'_, History> {
        self.history.lock().expect("not poisoned")
    }

    /// A batch with one store, different for each process and number.
    fn payload(&self, seq: u64) -> Vec<u8> {
        let text = |text: &str| Value::Text(text.to_owned());
        let hash = Value::Uint(self.process << 32 | seq);
        let event = Value::Map(vec![
            (text("type"), text("BlockStored")),
            (text("block_hashes"), Value::List(vec![hash])),
            (text("token_ids"), Value::List((0..4).map(Value::Uint).collect())),
            (text("block_size"), Value::Uint(4)),
        ]);
        let mut payload = Vec::new();
        Value::List(vec![Value::Float(seq as f64), Value::List(vec![event]), Value::Uint(0)])
            .encode(&mut payload);
        payload
    }

    fn keep(&self, seq: u64) {
        self.history().batches.push((seq, self.payload(seq)));
    }

    fn send(&self, seq: u64) {
        self.send_frames(&[b"topic", &seq.to_be_bytes(), &self.payload(seq)]);
    }

    fn send_frames(&self, frames: &[&[u8]]) {
        self.publisher.send_multipart(frames.iter().copied(), 0).expect("sends");
    }

    fn publish(&self, seqs: std::ops::Range<u64>) {
        for seq in seqs {
            self.keep(seq);
            self.send(seq);
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(router) = self.router.take() {
            router.join().expect("the router ends");
        }
        assert!(self.context.get_io_threads().is_ok());
    }
}

fn answer(router: &zmq::Socket, history: &mut History) {
    let request = router.recv_multipart(0).expect("a request");
    let [id, empty, from] = &request[..] else { panic!("a request has three frames") };
    assert!(empty.is_empty());
    let from = u64::from_be_bytes(from[..].try_into().expect("8 bytes"));
    history.requests.push(from);
    if history.silent {
        return;
    }
    let send = |seq: u64, payload: &[u8]| {
        let topic: &[&[u8]] = if history.topic_frame { &[b"topic"] } else { &[] };
        let seq = seq.to_be_bytes();
        let frames = [&[id, &b""[..]], topic, &[&seq, payload]].concat();
        router.send_multipart(frames, 0).expect("sends");
    };
    for (seq, payload) in history.batches.iter().filter(|(seq, _)| *seq >= from) {
        if !history.lost_once.contains(seq) {
            send(*seq, payload);
        }
    }
    send(u64::MAX, b"");
    history.lost_once.clear();
}

#[test]
fn the_history_is_read_at_connect_and_live_batches_follow() {
    let engine = Engine::start(1);
    (0..50).for_each(|seq| engine.keep(seq));
    let listener = Listener::new();
    listener.add(1, &engine, true);
    assert_eq!(listener.until(&exact(1)), (0..50).collect::<Vec<_>>());
    engine.wait_for_subscriber();
    engine.publish(50..60);
    for seq in 50..60 {
        assert_eq!(listener.next(), applied(1, seq));
    }
}

#[test]
fn replays_without_a_topic_frame_are_read_too() {
    let engine = Engine::start(1);
    engine.history().topic_frame = false;
    (0..5).for_each(|seq| engine.keep(seq));
    let listener = Listener::new();
    listener.add(1, &engine, true);
    assert_eq!(listener.until(&exact(1)), [0, 1, 2, 3, 4]);
}

#[test]
fn a_gap_is_filled_from_the_replay() {
    let engine = Engine::start(1);
    let listener = Listener::new();
    listener.add(1, &engine, true);
    engine.wait_for_subscriber();
    engine.publish(0..3);
    assert_eq!(listener.until(&applied(1, 2)), [0, 1, 2]);
    (3..6).for_each(|seq| engine.keep(seq));
    engine.publish(6..8);
    assert_eq!(listener.until(&applied(1, 7)), [3, 4, 5, 6, 7]);
    assert!(engine.history().requests.contains(&2));
}

#[test]
fn a_replay_with_holes_in_the_middle_is_asked_again_from_the_first_hole() {
    let engine = Engine::start(1);
    (0..2000).for_each(|seq| engine.keep(seq));
    engine.history().lost_once = (1000..1007).chain([1500]).collect();
    let listener = Listener::new();
    listener.add(1, &engine, true);
    assert_eq!(listener.until(&exact(1)), (0..2000).collect::<Vec<_>>());
    assert_eq!(engine.history().requests, [0, 999, 1999]);
}

#[test]
fn a_router_that_drops_what_its_queue_cannot_take_is_read_to_the_end() {
    let engine = Engine::start_with_queue(1, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", 500);
    (0..1500).for_each(|seq| engine.keep(seq));
    let listener = Listener::new();
    listener.add(1, &engine, true);
    assert_eq!(listener.until(&exact(1)), (0..1500).collect::<Vec<_>>());
}

#[test]
fn a_history_that_begins_late_is_degraded_and_goes_on() {
    let engine = Engine::start(1);
    (70..75).for_each(|seq| engine.keep(seq));
    let listener = Listener::new();
    listener.add(1, &engine, true);
    let lost = Told::State(1, FeedState::Degraded(DegradedReason::HistoryLost));
    assert_eq!(listener.until(&lost), [70, 71, 72, 73, 74]);
    engine.wait_for_subscriber();
    engine.publish(75..76);
    assert_eq!(listener.next(), applied(1, 75));
}

#[test]
fn a_restart_of_the_engine_resets_the_rank_before_it_publishes() {
    let engine = Engine::start(1);
    let listener = Listener::new();
    listener.add(1, &engine, true);
    engine.wait_for_subscriber();
    engine.publish(0..5);
    listener.until(&applied(1, 4));
    let engine = engine.restart();
    listener.until(&Told::State(1, FeedState::Suspended(SuspendReason::Disconnected)));
    assert_eq!(listener.until(&Told::Reset(1, ResetReason::HistoryGone)), [0u64; 0]);
    listener.until(&exact(1));
    engine.wait_for_subscriber();
    engine.publish(0..2);
    assert_eq!(listener.until(&applied(1, 1)), [0, 1]);
}

#[test]
fn a_restarted_engine_that_is_further_than_before_is_recognised() {
    let engine = Engine::start(1);
    let listener = Listener::new();
    listener.add(1, &engine, true);
    engine.wait_for_subscriber();
    engine.publish(0..5);
    listener.until(&applied(1, 4));
    let engine = engine.restart();
    (0..9).for_each(|seq| engine.keep(seq));
    // Whether it was asked before or after it had published: it is another process.
    let reason = loop {
        if let Told::Reset(1, reason) = listener.next() {
            break reason;
        }
    };
    assert!(matches!(reason, ResetReason::HistoryDiffers | ResetReason::HistoryGone));
    engine.wait_for_subscriber();
    engine.publish(9..10);
    assert_eq!(listener.until(&applied(1, 9)), (0..10).collect::<Vec<_>>());
}

#[test]
fn numbers_that_go_back_reset_the_rank_without_a_replay_endpoint() {
    let engine = Engine::start(1);
    let listener = Listener::new();
    listener.add(1, &engine, false);
    engine.wait_for_subscriber();
    (0..5).for_each(|seq| engine.send(seq));
    assert_eq!(listener.until(&applied(1, 4)), [0, 1, 2, 3, 4]);
    engine.send(0);
    assert_eq!(listener.until(&Told::Reset(1, ResetReason::SequenceWentBack)), [0u64; 0]);
    assert_eq!(listener.next(), applied(1, 0));
}

#[test]
fn a_connection_lost_and_found_again_keeps_what_is_known() {
    let engine = Engine::start(1);
    let listener = Listener::new();
    listener.add(1, &engine, true);
    engine.wait_for_subscriber();
    engine.publish(0..5);
    listener.until(&applied(1, 4));
    engine.publisher.unbind(&engine.events_address).expect("unbinds");
    // Unbinding keeps the connection of the peer; closing the socket ends it while the replay endpoint lives on.
    let mut engine = engine;
    let publisher = engine.context.socket(zmq::XPUB).expect("a socket");
    publisher.set_linger(0).expect("sets");
    publisher.set_rcvtimeo(PATIENCE.as_millis() as i32).expect("sets");
    drop(std::mem::replace(&mut engine.publisher, publisher));
    listener.until(&Told::State(1, FeedState::Suspended(SuspendReason::Disconnected)));
    engine.keep(5);
    bind(&engine.publisher, &engine.events_address);
    assert_eq!(listener.until(&exact(1)), [5]);
    engine.wait_for_subscriber();
    engine.publish(6..7);
    assert_eq!(listener.next(), applied(1, 6));
}

#[test]
fn a_publisher_that_comes_late_is_found() {
    let probe = Engine::start(1);
    let (events, replay) = (probe.events_address.clone(), probe.replay_address.clone());
    drop(probe);
    let listener = Listener::new();
    listener.subscriber.add(feed(1, &events, Some(replay.clone()))).expect("added");
    let engine = Engine::start_at(1, &events, &replay);
    engine.wait_for_subscriber();
    engine.publish(0..1);
    listener.until(&applied(1, 0));
}

#[test]
fn a_silent_replay_endpoint_does_not_stop_other_feeds() {
    let (silent, other) = (Engine::start(1), Engine::start(1));
    silent.history().silent = true;
    silent.keep(0);
    let listener = Listener::new();
    listener.add(1, &silent, true);
    silent.wait_for_subscriber();
    silent.publish(1..2);
    listener.add(2, &other, true);
    other.wait_for_subscriber();
    other.publish(0..100);
    assert_eq!(listener.until(&applied(2, 99)), (0..100).collect::<Vec<_>>());
}

#[test]
fn messages_of_another_shape_are_passed_over() {
    let engine = Engine::start(1);
    let listener = Listener::new();
    listener.add(1, &engine, false);
    engine.wait_for_subscriber();
    engine.send(0);
    engine.send_frames(&[b"topic"]);
    engine.send_frames(&[b"topic", b"short", b"payload"]);
    engine.send_frames(&[b"", b"", b"", b"", b"", b"", b""]);
    engine.send(1);
    engine.send_frames(&[b"topic", &2u64.to_be_bytes(), b"no msgpack"]);
    engine.send(3);
    assert_eq!(listener.until(&applied(1, 1)), [0, 1]);
    assert_eq!(listener.next(), Told::Apply { feed: 1, seq: 2, events: 0 });
    assert_eq!(listener.next(), Told::State(1, FeedState::Degraded(DegradedReason::Undecodable)));
    assert_eq!(listener.next(), applied(1, 3));
}

#[test]
fn a_removed_feed_says_nothing_more_and_can_be_added_again() {
    let engine = Engine::start(1);
    let listener = Listener::new();
    listener.add(1, &engine, true);
    engine.wait_for_subscriber();
    engine.publish(0..3);
    listener.until(&applied(1, 2));
    let twice = listener.subscriber.add(feed(1, &engine.events_address, None));
    assert!(matches!(twice, Err(AddError::Duplicate)), "{twice:?}");
    listener.subscriber.remove(1);
    listener.until(&Told::Removed(1));
    engine.publish(3..4);
    assert_eq!(engine.publisher.recv_bytes(0).expect("the subscription ends"), [0]);
    listener.add(1, &engine, true);
    assert_eq!(listener.until(&exact(1)), [0, 1, 2, 3]);
}

/// Threads, open files and resident bytes of this process.
fn resources() -> (usize, usize, usize) {
    let count = |path: &str| std::fs::read_dir(path).expect("Linux").count();
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages: usize = statm.split(' ').nth(1).and_then(|field| field.parse().ok()).expect("a number");
    (count("/proc/self/task"), count("/proc/self/fd"), pages * 4096)
}

#[test]
fn a_feed_that_comes_and_goes_a_thousand_times_leaves_threads_sockets_and_memory_as_they_were() {
    // In a process of its own: the other tests have sockets and threads too.
    const ALONE: &str = "KVSPOA_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let name =
            "a_feed_that_comes_and_goes_a_thousand_times_leaves_threads_sockets_and_memory_as_they_were";
        let test = std::env::current_exe().expect("this test");
        let run = std::process::Command::new(test).args(["--exact", name]).env(ALONE, "1").output();
        let output = run.expect("runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    let engine = Engine::start(1);
    let listener = Listener::new();
    let mut before = (0, 0, 0);
    for round in 0..1000 {
        listener.add(1, &engine, true);
        listener.until(&exact(1));
        // The publisher is read to the end of the subscription: else its socket would keep what is over.
        engine.wait_for_subscriber();
        listener.subscriber.remove(1);
        listener.until(&Told::Removed(1));
        assert_eq!(engine.publisher.recv_bytes(0).expect("the subscription ends"), [0]);
        if round == 100 {
            before = resources();
        }
    }
    let after = resources();
    // The last feed's connections may still be closing.
    assert!(after.0 <= before.0 && after.1 <= before.1 + 8, "{before:?} became {after:?}");
    assert!(after.2 < before.2 + (8 << 20), "{before:?} became {after:?}");
}

#[test]
fn an_engine_whose_publisher_connects_finds_a_listening_endpoint() {
    let probe = Engine::start(1);
    let (address, replay) = (probe.events_address.clone(), probe.replay_address.clone());
    drop(probe);
    let listener = Listener::new();
    listener.subscriber.add(feed(1, &format!("@{address}"), Some(replay.clone()))).expect("added");
    let engine = Engine::start_at(1, "tcp://127.0.0.1:*", &replay);
    engine.publisher.connect(&address).expect("connects");
    engine.wait_for_subscriber();
    engine.publish(0..1);
    listener.until(&applied(1, 0));
}

#[test]
fn bad_addresses_are_refused_with_a_reason() {
    let listener = Listener::new();
    let add = |events: &str, replay: Option<&str>| {
        let error = listener.subscriber.add(feed(1, events, replay.map(str::to_owned))).expect_err("refused");
        error.to_string()
    };
    let port = add("tcp://host", None);
    assert_eq!(port, "endpoint \"tcp://host\" must end with a port from 1 to 65535");
    assert!(add("tcp://*:5557", None).contains("put the replica's address"));
    assert!(add("tcp://host:5557", Some("udp://host:1")).contains("tcp:// or ipc://"));
    assert!(add("tcp://host:5557", Some("@tcp://*:1")).contains("cannot be listened at"));
    let taken = Engine::start(1);
    assert!(add(&format!("@{}", taken.events_address), None).contains("in use"));
}
