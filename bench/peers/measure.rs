//! CPU time, wall time and memory of the process.

use rustix::time::{ClockId, clock_gettime};
use std::fs::read_to_string;
use std::time::{Duration, Instant};

/// CPU time of this thread.
pub fn cpu_time() -> Duration {
    read(ClockId::ThreadCPUTime)
}

fn read(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Adds up the CPU time that the whole process takes in some of its parts: indexes may have threads of their own.
#[derive(Debug, Default)]
pub struct Stopwatch {
    total: Duration,
}

impl Stopwatch {
    /// Runs `work` on the watch.
    pub fn time<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let start = read(ClockId::ProcessCPUTime);
        let value = work();
        self.total += read(ClockId::ProcessCPUTime) - start;
        value
    }

    /// All of it, in microseconds.
    pub fn microseconds(&self) -> f64 {
        self.total.as_secs_f64() * 1e6
    }

    /// Millions of `units` a CPU second.
    pub fn millions_a_second(&self, units: usize) -> f64 {
        units as f64 / self.total.as_secs_f64() / 1e6
    }
}

/// Resident memory in bytes.
pub fn resident_bytes() -> usize {
    let text = read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: usize = text.split(' ').nth(1).and_then(|field| field.parse().ok()).expect("Linux");
    pages * 4096
}

/// Mean CPU time of one call in microseconds, over at least 300 ms. `round` returns the number of its calls.
pub fn mean_cpu_us(mut round: impl FnMut() -> usize) -> f64 {
    let start = cpu_time();
    let mut calls = 0;
    loop {
        calls += round();
        let taken = cpu_time() - start;
        if taken > Duration::from_millis(300) {
            return taken.as_secs_f64() * 1e6 / calls as f64;
        }
    }
}

/// Times of single calls.
#[derive(Debug, Default)]
pub struct Quantiles(Vec<Duration>);

impl Quantiles {
    /// Runs `call` and takes its time on the processor: what it works, without what others do meanwhile.
    pub fn time_on_cpu<T>(&mut self, call: impl FnOnce() -> T) -> T {
        let start = cpu_time();
        let value = call();
        self.0.push(cpu_time() - start);
        value
    }

    /// Runs `call` and takes its wall time.
    pub fn time<T>(&mut self, call: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let value = call();
        self.0.push(start.elapsed());
        value
    }

    /// The time that `share` of all calls stayed below, in microseconds.
    pub fn at_us(&mut self, share: f64) -> f64 {
        self.0.sort_unstable();
        self.0[((self.0.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e6
    }
}
