//! All runs of a comparison: every variant with every seed, on all cores.

use super::{
    args::ReplayArgs,
    outcome::{Outcome, Slo},
    play::{Fleet, play},
    policy::{PolicyName, Weights},
    workload::Workload,
};
use crate::sim::JobError;
use serde::Serialize;
use std::{
    io::{IsTerminal, Write},
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    thread,
    time::Duration,
};

/// One line of the comparison.
#[derive(Clone, Debug)]
pub(super) struct Variant {
    pub(super) name: String,
    pub(super) policy: PolicyName,
    pub(super) weights: Weights,
}

/// One variant's outcome: the means over the seeds.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    pub(super) policy: String,
    #[serde(flatten)]
    pub(super) outcome: Outcome,
}

/// Plays every variant with every seed.
pub(super) fn run_all(
    args: &ReplayArgs,
    workload: &Workload,
    variants: &[Variant],
) -> Result<Vec<Row>, JobError> {
    let fleet = args.fleet(workload.recorded_block_tokens);
    let seeds = args.seeds as usize;
    let count = variants.len() * seeds;
    let (next, done, stop) = (AtomicUsize::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let work = || {
        let mut outcomes = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            if at >= count {
                return Ok(outcomes);
            }
            let seed = args.seed.wrapping_add((at % seeds) as u64);
            let outcome = one(args, &fleet, workload, &variants[at / seeds], seed, &done);
            if outcome.is_err() {
                // The others need not begin anything more.
                next.store(count, Ordering::Relaxed);
            }
            outcomes.push((at, outcome?));
        }
    };
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let threads = args.threads.map_or(cores, usize::from).min(count.max(1));
    let total = (count * workload.requests.len()) as u64;
    let outcomes: Result<Vec<_>, JobError> = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let bar = std::io::stderr().is_terminal().then(|| scope.spawn(|| show_progress(&done, total, &stop)));
        let results: Vec<_> = workers.into_iter().map(thread::ScopedJoinHandle::join).collect();
        stop.store(true, Ordering::Relaxed);
        if let Some(bar) = bar {
            bar.thread().unpark();
        }
        let results =
            results.into_iter().map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        results.collect()
    });
    let mut outcomes: Vec<(usize, Outcome)> = outcomes?.into_iter().flatten().collect();
    outcomes.sort_unstable_by_key(|(at, _)| *at);
    let outcomes: Vec<Outcome> = outcomes.into_iter().map(|(_, outcome)| outcome).collect();
    let rows = variants.iter().zip(outcomes.chunks(seeds));
    Ok(rows
        .map(|(variant, outcomes)| Row { policy: variant.name.clone(), outcome: Outcome::mean(outcomes) })
        .collect())
}

fn one(
    args: &ReplayArgs,
    fleet: &Fleet,
    workload: &Workload,
    variant: &Variant,
    seed: u64,
    done: &AtomicU64,
) -> Result<Outcome, JobError> {
    let fleet = Fleet { poll: variant.policy.poll().or(fleet.poll), ..fleet.clone() };
    let arrivals = workload.arrivals(args.spacing, args.speed, seed);
    let cache_blocks = fleet.cache_blocks() as usize;
    let router = |seed| variant.policy.router(&variant.weights, args.replicas, cache_blocks, seed);
    let played = play(&fleet, workload, &arrivals, router, seed, done)?;
    let prompt_tokens: Vec<u32> = workload.requests.iter().map(|request| request.prompt_tokens).collect();
    let slo = Slo { ttft: Duration::from_millis(args.slo_ttft), tpot: Duration::from_millis(args.slo_tpot) };
    Ok(Outcome::of(&played.records, &prompt_tokens, &played.busy, args.warm_up, slo))
}

/// A line on the terminal that says how far it is, until `stop`.
fn show_progress(done: &AtomicU64, total: u64, stop: &AtomicBool) {
    const WIDTH: u64 = 40;
    // Not locked for the whole time: who panics wants to say so.
    let mut terminal = std::io::stderr();
    while !stop.load(Ordering::Relaxed) {
        let share = done.load(Ordering::Relaxed).min(total) * WIDTH / total.max(1);
        let bar: String = (0..WIDTH).map(|at| if at < share { '#' } else { '.' }).collect();
        let percent = done.load(Ordering::Relaxed) * 100 / total.max(1);
        // A terminal that is gone is no reason to stop.
        let _ = write!(terminal, "\r[{bar}] {percent:3} %").and_then(|()| terminal.flush());
        thread::park_timeout(Duration::from_millis(200));
    }
    let _ = write!(terminal, "\r{:60}\r", "");
}
