//! A publisher of KV events between a replica and the agent, which loses or hides what it is told to.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;

use super::PATIENCE;
use zmq::SocketEvent;

/// What happens to the batches, and what has happened.
#[derive(Debug, Default)]
pub(crate) struct Control {
    stop: AtomicBool,
    /// Batches lost, in percent.
    pub(crate) loss_percent: AtomicU8,
    /// Whether stores of the CPU tier are renamed to a medium that nobody knows.
    pub(crate) hide_cpu: AtomicBool,
    pub(crate) lost: AtomicU64,
    /// Batches with stores that were renamed.
    pub(crate) hidden: AtomicU64,
    /// One more than the last sequence number that the replica published.
    pub(crate) next_seq: AtomicU64,
}

/// A running proxy. Dropped, its port is closed as if the replica had died.
#[derive(Debug)]
pub(crate) struct FeedProxy {
    pub(crate) endpoint: String,
    pub(crate) control: Arc<Control>,
    thread: Option<JoinHandle<()>>,
}

impl FeedProxy {
    /// Publishes at `listen` what is published at `upstream`; returns when it hears the publisher there.
    pub(crate) fn start(upstream: &str, listen: &str) -> Self {
        let context = zmq::Context::new();
        let from = context.socket(zmq::SUB).expect("a socket");
        from.set_subscribe(b"").expect("set");
        from.set_reconnect_ivl(10).expect("set");
        from.monitor("inproc://link", SocketEvent::HANDSHAKE_SUCCEEDED.to_raw().into()).expect("monitored");
        let link = context.socket(zmq::PAIR).expect("a socket");
        link.connect("inproc://link").expect("connected");
        from.connect(upstream).expect("connected");
        let heard = link.poll(zmq::POLLIN, PATIENCE.as_millis() as i64).expect("polled");
        assert_eq!(heard, 1, "nobody publishes at {upstream}");
        let to = context.socket(zmq::PUB).expect("a socket");
        to.set_linger(0).expect("set");
        to.bind(listen).expect("bound");
        let endpoint = to.get_last_endpoint().expect("an endpoint").expect("text");
        let control = Arc::new(Control::default());
        let thread = std::thread::spawn({
            let control = Arc::clone(&control);
            move || forward(&control, &from, &to)
        });
        Self { endpoint, control, thread: Some(thread) }
    }
}

impl Drop for FeedProxy {
    fn drop(&mut self) {
        self.control.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn forward(control: &Control, from: &zmq::Socket, to: &zmq::Socket) {
    let mut rng = fastrand::Rng::with_seed(7);
    while !control.stop.load(Relaxed) {
        if from.poll(zmq::POLLIN, 10).unwrap_or(0) == 0 {
            continue;
        }
        let Ok(mut frames) = from.recv_multipart(zmq::DONTWAIT) else { continue };
        if let [_, seq, payload] = &mut frames[..] {
            let seq = u64::from_be_bytes(seq[..].try_into().expect("8 bytes"));
            if control.hide_cpu.load(Relaxed) && rename_cpu(payload) {
                control.hidden.fetch_add(1, Relaxed);
            }
            if rng.u8(..100) < control.loss_percent.load(Relaxed) {
                control.lost.fetch_add(1, Relaxed);
            } else {
                to.send_multipart(frames, 0).expect("sent");
            }
            control.next_seq.store(seq + 1, Relaxed);
        }
    }
}

/// "CPU" as a msgpack string becomes one of the same length.
fn rename_cpu(payload: &mut [u8]) -> bool {
    let mut found = false;
    for at in 0..payload.len().saturating_sub(3) {
        if payload[at..at + 4] == *b"\xa3CPU" {
            payload[at + 1] = b'X';
            found = true;
        }
    }
    found
}
