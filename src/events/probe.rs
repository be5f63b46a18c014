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

/// What of a replay is kept, in bytes: the last batches of a busy engine are a thousandth of it.
const MAX_REPLAY_BYTES: usize = 64 << 20;

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
                Some(_) if Instant::now() < until => {}
                None if wait(&self.live.events, until) => {}
                Some(_) => return None,
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
/// end marker, which costs the engine next to nothing. What comes after `patience`, or beyond 64 MiB, is not waited for.
///
/// # Errors
/// The socket could not be made.
pub fn replay(endpoint: &Endpoint, from: u64, patience: Duration) -> Result<Replay, SocketError> {
    let replayer = Replayer::new(&zmq::Context::new(), &LIMITS);
    let asked = replayer.request_replay(endpoint, from).map_err(SocketError)?;
    let until = Instant::now() + patience;
    let mut replay = Replay::default();
    let mut bytes = 0;
    while !replay.is_ended && bytes < MAX_REPLAY_BYTES && Instant::now() < until {
        match asked.receive() {
            Some(Received::Batch { seq, payload }) => {
                bytes += payload.len();
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn a_replay_without_an_end_is_given_up() {
        let context = zmq::Context::new();
        let engine = context.socket(zmq::ROUTER).expect("a socket");
        engine.set_linger(0).expect("set");
        engine.set_sndtimeo(10).expect("set");
        engine.bind("tcp://127.0.0.1:*").expect("bound");
        let address = engine.get_last_endpoint().expect("bound").expect("UTF-8");
        let is_over = &AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let asked = engine.recv_multipart(0).expect("a request");
                let payload = vec![1; 1 << 20];
                let batch = [&asked[0][..], b"", &7_u64.to_be_bytes(), &payload];
                while !is_over.load(Ordering::Relaxed) {
                    // The queue may be full, or the other end gone.
                    let _ = engine.send_multipart(batch, 0);
                }
            });
            let endpoint = Endpoint::parse(&address).expect("an endpoint");
            let replay = replay(&endpoint, 7, Duration::from_secs(60));
            is_over.store(true, Ordering::Relaxed);
            let replay = replay.expect("a socket");
            let bytes: usize = replay.batches.iter().map(|batch| batch.payload.len()).sum();
            assert_eq!((replay.is_ended, bytes), (false, MAX_REPLAY_BYTES));
        });
    }
}
