//! A small pool for tests.

use super::Pool;
use crate::{
    config::{self, Overrides},
    hash::HashKey,
    replica::{Server, ServerState},
    select::{Policy, Scheduler, SchedulerConfig},
};
use std::{
    fmt::Write,
    path::Path,
    time::{Duration, Instant},
};

/// The default of `prompt.cache_bytes`.
pub(super) const CACHE_BYTES: usize = 256 << 20;

/// Servers `s1`, `s2` and so on of so many ranks each, polled each second.
pub(super) fn pool(ranks: u16, servers: u16) -> Pool {
    let mut text = "[[pool]]\nbackend = \"be\"\n".to_owned();
    for server in 1..=servers {
        write!(text, "[[pool.replica]]\nserver = \"s{server}\"\nranks = {ranks}\n").expect("a string");
    }
    let config = config::Config::parse(&text, Path::new("test.toml"), &Overrides::default()).expect("valid");
    let scheduler = Scheduler::new(Policy::default(), SchedulerConfig::default(), 1);
    let second = Duration::from_secs(1);
    let of_pool = &config.pools[0];
    let pool =
        Pool::new(of_pool, &HashKey::from_seed(1), 1 << 20, scheduler, second, second).expect("a model");
    for replica in &of_pool.replicas {
        pool.join(replica, Instant::now()).expect("room");
    }
    pool
}

/// A server in the best of states.
pub(super) fn server(name: &str) -> Server {
    Server {
        name: name.to_owned(),
        addr: "127.0.0.1".to_owned(),
        port: 8000,
        tls: false,
        state: ServerState::Up,
        weight: 1,
        backup: false,
        in_flight: 0,
        queued: 0,
        limit: None,
        connections: 0,
    }
}
