//! What tests with a real HAProxy need: HAProxy itself, clients, origins, an agent and a log target.
#![allow(dead_code, reason = "every test binary uses a part of it")]

pub(crate) mod agent;
pub(crate) mod feed_proxy;
pub(crate) mod haproxy;
pub(crate) mod http;
pub(crate) mod log_sink;
pub(crate) mod origin;
pub(crate) mod road;
pub(crate) mod site;

use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

/// How long a condition may take on a busy machine before the test fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Waits until `probe` gives something.
#[track_caller]
pub(crate) fn eventually<T>(what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = probe() {
            return value;
        }
        assert!(Instant::now() < deadline, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A port of 127.0.0.1 that was free a moment ago.
pub(crate) fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("an address").port()
}

/// An address where nobody listens.
pub(crate) fn nobody() -> SocketAddr {
    ([127, 0, 0, 1], free_port()).into()
}
