//! A look at a rank's sockets from beside the agent: what comes over them, message by message, and nothing is applied.
//!
//! For the doctor. Every call blocks; a subscription more or less is all that the engine notices.

use super::{
    endpoint::Endpoint,
    subscriber::{Link, LiveSocket, Received, Replayer, SocketError, SocketLimits},
};
use std::time::{Duration, Instant};

/// As the subscriber's own defaults.
const LIMITS: SocketLimits = SocketLimits { receive_queue: 1000, message_bytes: 64 << 20 };

/// A subscription whose publisher may be there or not.
pub struct Probe {
    live: LiveSocket,
    is_connected: bool,
}

/// One batch as it came.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Message {
    /// The topic; of a replay none.
    pub topic: Vec<u8>,
    /// Its sequence number.
    pub seq: u64,
    /// The batch, to be decoded.
    pub payload: Vec<u8>,
}

/// What a replay brought.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Replay {
    /// The batches that came, in their order.
    pub batches: Vec<Message>,
    /// Whether the end marker came, so that the endpoint works.
    pub is_ended: bool,
}

impl Probe {
    /// Connects to a publisher.
    ///
    /// # Errors
    /// The socket could not be made.
    pub fn open(endpoint: &Endpoint) -> Result<Self, SocketError> {
        let live = LiveSocket::open(&zmq::Context::new(), endpoint, &LIMITS).map_err(SocketError)?;
        Ok(Self { live, is_connected: false })
    }

    /// Whether a ZeroMQ publisher has answered; waits for it no longer than this.
    pub fn is_connected(&mut self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        while !self.is_connected && wait(&self.live.monitor, until) {
            self.is_connected = self.live.link_change() == Some(Link::Up);
        }
        self.is_connected
    }

    /// The next message; `None` if none came in time. What is no batch is passed over.
    pub fn next(&mut self, patience: Duration) -> Option<Message> {
        let until = Instant::now() + patience;
        loop {
            match self.live.receive_any() {
                Some((topic, Received::Batch { seq, payload })) => {
                    return Some(Message { topic: topic.to_vec(), seq, payload: payload.to_vec() });
                }
                Some(_) => {}
                None if wait(&self.live.events, until) => {}
                None => return None,
            }
        }
    }
}

impl std::fmt::Debug for Probe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Probe").field("is_connected", &self.is_connected).finish_non_exhaustive()
    }
}

/// Asks a replay endpoint for the batches from `from` on. A number that is not reached yet asks for none, but for the
/// end marker, which costs the engine next to nothing.
///
/// # Errors
/// The socket could not be made.
pub fn replay(endpoint: &Endpoint, from: u64, patience: Duration) -> Result<Replay, SocketError> {
    let replayer = Replayer::new(&zmq::Context::new(), &LIMITS);
    let asked = replayer.request_replay(endpoint, from).map_err(SocketError)?;
    let until = Instant::now() + patience;
    let mut replay = Replay::default();
    while !replay.is_ended {
        match asked.receive() {
            Some(Received::Batch { seq, payload }) => {
                replay.batches.push(Message { topic: Vec::new(), seq, payload: payload.to_vec() });
            }
            Some(Received::End) => replay.is_ended = true,
            Some(Received::Rejected) => {}
            None if wait(&asked.socket, until) => {}
            None => break,
        }
    }
    Ok(replay)
}

/// Whether the socket has something to read before `until`.
fn wait(socket: &zmq::Socket, until: Instant) -> bool {
    let left = until.saturating_duration_since(Instant::now());
    let millis = i64::try_from(left.as_millis()).unwrap_or(i64::MAX);
    socket.poll(zmq::POLLIN, millis).is_ok_and(|ready| ready > 0)
}
