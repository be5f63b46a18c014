//! What tests with a real HAProxy need: HAProxy itself, clients, origins, an agent and a log target.
#![allow(dead_code, reason = "every test binary uses a part of it")]

pub(crate) mod agent;
pub(crate) mod chats;
pub(crate) mod feed_proxy;
pub(crate) mod haproxy;
pub(crate) mod http;
pub(crate) mod load;
pub(crate) mod log_sink;
pub(crate) mod origin;
pub(crate) mod publisher;
pub(crate) mod road;
pub(crate) mod site;

use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::sync::atomic::{AtomicU32, Ordering};
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

/// A free port of 127.0.0.1, for TCP and UDP, that no other call of this process gets. It lies below the ports that the
/// system gives to outgoing connections (32768 and up on Linux), so nothing takes it until it is used.
pub(crate) fn free_port() -> u16 {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    loop {
        let at = std::process::id().wrapping_mul(97).wrapping_add(CALLS.fetch_add(1, Ordering::Relaxed));
        let port = 10_000 + (at % 20_000) as u16;
        let local = ("127.0.0.1", port);
        if TcpListener::bind(local).is_ok() && UdpSocket::bind(local).is_ok() {
            return port;
        }
    }
}

/// An address where nobody listens.
pub(crate) fn nobody() -> SocketAddr {
    ([127, 0, 0, 1], free_port()).into()
}

/// What a process holds: threads, open files, resident memory in KiB.
pub(crate) fn held_by(pid: u32) -> (usize, usize, usize) {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a field");
        line.trim().split(' ').next().and_then(|number| number.parse().ok()).expect("a number")
    };
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs").count();
    (field("Threads:"), files, field("VmRSS:"))
}
