//! A publisher of KV events that says what a test wants.

use serde_json::Value;

use super::PATIENCE;

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
