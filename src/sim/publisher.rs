//! The publisher of KV events: numbered batches to all subscribers, and the last ones again to those who ask.
//!
//! Semantics of vLLM's `ZmqEventPublisher`, to the frame: a PUB socket sends `topic, number, payload`; a ROUTER socket
//! answers `"", first number` with the buffered batches from there on, each as `"", topic, number, payload`, then
//! `"", "", -1, ""`. One thread does both in turn, so nothing is published while a replay is answered.

use super::events::{Event, HashFormat, encode_batch};
use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Batches kept for replay (vLLM's default `buffer_steps`).
pub(super) const BUFFER_STEPS: usize = 10_000;
/// Messages that may wait for one subscriber before they are dropped (vLLM's default `hwm`).
pub(super) const HIGH_WATER_MARK: i32 = 100_000;
/// Batches that may wait for the thread (vLLM's default `max_queue_size`).
pub(super) const MAX_QUEUE: usize = 100_000;
/// How long a replay request waits at most on an idle publisher, as in vLLM.
const IDLE_POLL: Duration = Duration::from_millis(100);
/// The number of a replay's end marker: -1.
const END: [u8; 8] = [0xff; 8];

/// Where and how to publish.
#[derive(Clone, Debug)]
pub(super) struct PublisherConfig {
    /// The PUB socket's endpoint; a port of `*` is the system's choice.
    pub(super) events: String,
    /// Whether the PUB socket connects to a subscriber that listens, instead of binding.
    pub(super) connects: bool,
    /// The ROUTER socket's endpoint, always bound.
    pub(super) replay: String,
    pub(super) topic: String,
    pub(super) rank: u16,
    pub(super) format: HashFormat,
}

/// A socket that could not be had.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the endpoint {endpoint}")]
pub struct EndpointError {
    /// The endpoint as configured.
    pub endpoint: String,
    /// What ZeroMQ said.
    #[source]
    pub source: zmq::Error,
}

/// A batch and the time at which its step ended.
type Batch = (f64, Vec<Event>);

/// A running publisher. When this is dropped the thread publishes what it has and ends, and its ports are free again.
#[derive(Debug)]
pub(super) struct Publisher {
    /// There until the drop.
    batches: Option<SyncSender<Batch>>,
    thread: Option<JoinHandle<()>>,
    events: String,
    replay: String,
}

impl Publisher {
    /// Opens the sockets and starts the thread.
    pub(super) fn start(config: PublisherConfig) -> Result<Self, EndpointError> {
        let context = zmq::Context::new();
        let at = |endpoint: &str| {
            let endpoint = endpoint.to_owned();
            move |source| EndpointError { endpoint, source }
        };
        let live = open(&context, zmq::PUB, &config.events, config.connects).map_err(at(&config.events))?;
        let replay = open(&context, zmq::ROUTER, &config.replay, false).map_err(at(&config.replay))?;
        let events = bound(&live, &config.events, config.connects);
        let replay_endpoint = bound(&replay, &config.replay, false);
        let (batches, queue) = sync_channel(MAX_QUEUE);
        let mut sockets = Sockets {
            live,
            replay,
            topic: config.topic,
            rank: config.rank,
            format: config.format,
            buffer: VecDeque::new(),
            next: 0,
        };
        let thread = std::thread::Builder::new()
            .name("zmq-publisher".to_owned())
            .spawn(move || sockets.serve(&queue))
            .map_err(|_| at(&config.events)(zmq::Error::EAGAIN))?;
        Ok(Self { batches: Some(batches), thread: Some(thread), events, replay: replay_endpoint })
    }

    /// Hands a batch over; waits while the queue is full, as vLLM's engine does.
    pub(super) async fn publish(&self, events: Vec<Event>) {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let mut batch = (seconds, events);
        let Some(batches) = &self.batches else { return };
        while let Err(TrySendError::Full(back)) = batches.try_send(batch) {
            batch = back;
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    pub(super) fn events_endpoint(&self) -> &str {
        &self.events
    }

    pub(super) fn replay_endpoint(&self) -> &str {
        &self.replay
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.batches = None;
        // It waits for nothing but the batches. If it panicked, there is nothing left to do about it here.
        let _panicked = self.thread.take().map(JoinHandle::join);
    }
}

fn open(
    context: &zmq::Context,
    kind: zmq::SocketType,
    endpoint: &str,
    connects: bool,
) -> zmq::Result<zmq::Socket> {
    let socket = context.socket(kind)?;
    socket.set_linger(0)?;
    if kind == zmq::PUB {
        socket.set_sndhwm(HIGH_WATER_MARK)?;
    }
    if connects {
        socket.connect(endpoint)?
    } else {
        socket.bind(endpoint)?
    }
    Ok(socket)
}

/// The endpoint with the port that the system chose.
fn bound(socket: &zmq::Socket, endpoint: &str, connects: bool) -> String {
    let last = if connects || !endpoint.ends_with(":*") { None } else { socket.get_last_endpoint().ok() };
    last.and_then(Result::ok).unwrap_or_else(|| endpoint.to_owned())
}

struct Sockets {
    live: zmq::Socket,
    replay: zmq::Socket,
    topic: String,
    rank: u16,
    format: HashFormat,
    buffer: VecDeque<(u64, Vec<u8>)>,
    next: u64,
}

impl Sockets {
    /// Publishes until there is nobody left to hand batches over. A failed send is a lost message: the subscriber sees
    /// the gap in the numbers.
    fn serve(&mut self, queue: &Receiver<Batch>) {
        loop {
            if self.replay.poll(zmq::POLLIN, 0).is_ok_and(|ready| ready > 0)
                && let Err(error) = self.answer_replay()
            {
                tracing::warn!(%error, "a replay failed");
            }
            match queue.recv_timeout(IDLE_POLL) {
                Ok(batch) => {
                    if let Err(error) = self.publish(&batch) {
                        tracing::warn!(%error, "a batch of KV events was not published");
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn publish(&mut self, (seconds, events): &Batch) -> zmq::Result<()> {
        let payload = encode_batch(*seconds, events, self.rank, self.format);
        let number = self.next.to_be_bytes();
        let sent = self.live.send_multipart([self.topic.as_bytes(), &number, &payload], 0);
        self.buffer.push_back((self.next, payload));
        if self.buffer.len() > BUFFER_STEPS {
            self.buffer.pop_front();
        }
        self.next += 1;
        sent
    }

    fn answer_replay(&self) -> zmq::Result<()> {
        let request = self.replay.recv_multipart(0)?;
        // vLLM ignores a request of any other shape. It reads a first number of any length; eight bytes are the only sane one.
        let [client, _, first] = request.as_slice() else { return Ok(()) };
        let Ok(first) = <[u8; 8]>::try_from(first.as_slice()).map(u64::from_be_bytes) else { return Ok(()) };
        for (number, payload) in self.buffer.iter().filter(|(number, _)| *number >= first) {
            let number = number.to_be_bytes();
            self.replay
                .send_multipart([client.as_slice(), b"", self.topic.as_bytes(), &number, payload], 0)?;
        }
        self.replay.send_multipart([client.as_slice(), b"", b"", &END, b""], 0)
    }
}
