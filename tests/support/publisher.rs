//! A publisher of KV events that says what a test wants.

use serde_json::Value;

use super::PATIENCE;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Batches from 0 on, without a replay.
pub(crate) struct Publisher {
    pub(crate) endpoint: String,
    socket: zmq::Socket,
    next: u64,
}

impl Publisher {
    pub(crate) fn start() -> Self {
        let socket = zmq::Context::new().socket(zmq::XPUB).expect("a socket");
        socket.set_linger(0).expect("set");
        socket.set_rcvtimeo(PATIENCE.as_millis() as i32).expect("set");
        socket.bind("tcp://127.0.0.1:*").expect("bound");
        let endpoint = socket.get_last_endpoint().expect("an endpoint").expect("text");
        Self { endpoint, socket, next: 0 }
    }

    /// Nothing that is published before reaches anybody.
    pub(crate) fn wait_for_subscriber(&self) {
        let message = self.socket.recv_bytes(0).expect("a subscriber");
        assert_eq!(message, [1], "everything is subscribed to");
    }

    /// Publishes one batch.
    pub(crate) fn publish(&mut self, events: &Value) {
        let payload = rmp_serde::to_vec(&(0.0, events, 0)).expect("encodes");
        let frames = [&b""[..], &self.next.to_be_bytes(), &payload];
        self.socket.send_multipart(frames, 0).expect("sent");
        self.next += 1;
    }
}

/// A publisher at every address of 127.0.0.0/8, so that it may stand for any number of engines, and the replay of what it
/// has published. It lives as long as the test process.
pub(crate) struct Everywhere {
    pub(crate) events_port: u16,
    pub(crate) replay_port: u16,
    /// Replays from the start that were asked for: one by each feed that is new.
    pub(crate) followed: Arc<AtomicUsize>,
}

impl Everywhere {
    /// All that was ever published is one batch of these events.
    pub(crate) fn start(events: &Value) -> Self {
        let context = zmq::Context::new();
        let [publisher, router] = [zmq::PUB, zmq::ROUTER].map(|kind| context.socket(kind).expect("a socket"));
        let [events_port, replay_port] = [&publisher, &router].map(|socket| {
            socket.bind("tcp://0.0.0.0:*").expect("bound");
            let endpoint = socket.get_last_endpoint().expect("an endpoint").expect("text");
            endpoint.rsplit(':').next().and_then(|port| port.parse().ok()).expect("a port")
        });
        let followed = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&followed);
        let payload = rmp_serde::to_vec(&(0.0, events, 0)).expect("encodes");
        std::thread::spawn(move || {
            let _publisher = publisher;
            loop {
                let request = router.recv_multipart(0).expect("a request");
                let [peer, _, from] = &request[..] else { panic!("a request has three frames") };
                let from_start = from[..] == 0u64.to_be_bytes();
                // Who has the last batch asks from there, and learns that it has all.
                for (seq, payload) in [(0, &payload[..]), (u64::MAX, b"")] {
                    // A peer that has left in the meantime is none.
                    let _ = router.send_multipart([&peer[..], b"", &seq.to_be_bytes(), payload], 0);
                }
                counted.fetch_add(usize::from(from_start), Ordering::SeqCst);
            }
        });
        Self { events_port, replay_port, followed }
    }
}
