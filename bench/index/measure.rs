//! CPU time, wall time and memory of the process.

use std::fs::read_to_string;
use std::time::{Duration, Instant};

/// CPU time of this thread. Linux; granularity of a scheduler tick, so measure 100 ms or more.
pub(crate) fn cpu_time() -> Duration {
    let text = read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanoseconds = text.split(' ').next().and_then(|field| field.parse().ok());
    Duration::from_nanos(nanoseconds.expect("Linux with CONFIG_SCHED_INFO"))
}

/// Resident memory in bytes.
pub(crate) fn resident_bytes() -> usize {
    let text = read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: usize = text.split(' ').nth(1).and_then(|field| field.parse().ok()).expect("Linux");
    pages * 4096
}

/// Mean CPU time of one call, over at least 300 ms.
pub(crate) fn mean_cpu(mut round: impl FnMut() -> usize) -> Duration {
    let start = cpu_time();
    let mut calls = 0;
    loop {
        for _ in 0..4 {
            calls += round();
        }
        let taken = cpu_time() - start;
        if taken > Duration::from_millis(300) {
            return taken / calls as u32;
        }
    }
}

/// Median and 99th percentile of wall times.
pub(crate) struct Quantiles(Vec<Duration>);

impl Quantiles {
    pub(crate) fn new() -> Self {
        Self(Vec::new())
    }

    pub(crate) fn time<T>(&mut self, call: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let value = call();
        self.0.push(start.elapsed());
        value
    }

    pub(crate) fn sum(&self) -> Duration {
        self.0.iter().sum()
    }

    pub(crate) fn at(&mut self, share: f64) -> Duration {
        self.0.sort_unstable();
        self.0[((self.0.len() - 1) as f64 * share) as usize]
    }
}
