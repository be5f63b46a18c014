//! Chats through a real HAProxy to two simulated replicas whose caches hold about half of them: how much is served from
//! cache, and how evenly the work falls, by kvspoa and by HAProxy's own ways.
//!
//! Each run has replicas, an agent and an HAProxy of its own. Shares are what counts here: time is the simulation's.

#[path = "../tests/support/mod.rs"]
mod support;

use std::time::Duration;

use clap::Parser;
use support::chats::{A, B, C, Chats, Outcome, Pace, play};
use support::haproxy::{Binary, binaries};
use support::road::{Road, Setup};

/// Compares ways of routing the same chats.
#[derive(Parser)]
struct Options {
    /// Seeds, from 1 on; the table shows medians over them
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Workloads
    #[arg(long, value_delimiter = ',', default_value = "A,B,C")]
    workloads: Vec<String>,
    /// Milliseconds between an answer and the next request, with one request in flight
    #[arg(long, default_value_t = 150)]
    pause: u64,
    /// What cargo says to a benchmark
    #[arg(long, hide = true)]
    bench: bool,
}

/// A way of routing.
struct Way {
    name: &'static str,
    balance: &'static str,
    asks: bool,
    sessions: bool,
}

const WAYS: [Way; 4] = [
    Way { name: "kvspoa", balance: "leastconn", asks: true, sessions: true },
    Way { name: "kvspoa, no session ids", balance: "leastconn", asks: true, sessions: false },
    Way { name: "balance leastconn", balance: "leastconn", asks: false, sessions: true },
    Way {
        name: "balance hash (session)",
        balance: "hash req.hdr(x-session-id)\n    hash-type consistent",
        asks: false,
        sessions: true,
    },
];

/// 160 blocks of 32 tokens; one more is set aside.
const REPLICA: &[&str] = &["--blocks", "161", "--block-size", "32"];

fn main() {
    let options = Options::parse();
    let binaries = binaries();
    let haproxy = binaries.first().expect("one at least");
    println!("HAProxy {}, medians over {} seeds (lowest to highest)\n", haproxy.version, options.seeds);
    println!("| workload | routed by | cached share | of computed tokens on one | requests on one |");
    println!("|---|---|---|---|---|");
    for chats in [A, B, C].into_iter().filter(|chats| options.workloads.iter().any(|name| name == chats.name))
    {
        for (form, pace) in [
            ("paced", Pace { in_flight: 1, pause: Duration::from_millis(options.pause) }),
            ("×4", Pace { in_flight: 4, pause: Duration::from_millis(20) }),
        ] {
            for way in &WAYS {
                let outcomes = runs(haproxy, chats, pace, way, options.seeds);
                let requests = |outcome: &Outcome| {
                    let most = outcome.servers.values().map(|(requests, _)| *requests).max();
                    most.unwrap_or_default() as f64 / outcome.requests() as f64
                };
                println!(
                    "| {} {form} | {} | {} | {} | {} |",
                    chats.name,
                    way.name,
                    spread(&outcomes, Outcome::cached_share),
                    spread(&outcomes, Outcome::greatest_share),
                    spread(&outcomes, requests)
                );
                eprintln!(
                    "  mean prompt {} tokens",
                    outcomes.iter().map(|o| o.prompt_tokens / o.requests()).sum::<u64>() / options.seeds
                );
            }
        }
    }
}

fn runs(haproxy: &Binary, chats: Chats, pace: Pace, way: &Way, seeds: u64) -> Vec<Outcome> {
    let Way { balance, asks, sessions, .. } = *way;
    std::thread::scope(|scope| {
        let runs: Vec<_> = (1..=seeds)
            .map(|seed| {
                scope.spawn(move || {
                    let setup = Setup { flags: REPLICA, balance, asks, ..Setup::default() };
                    let road = Road::set_up(haproxy, &setup);
                    play(road.http, chats, pace, seed, sessions)
                })
            })
            .collect();
        runs.into_iter().map(|run| run.join().expect("no panic")).collect()
    })
}

fn spread(outcomes: &[Outcome], of: impl Fn(&Outcome) -> f64) -> String {
    let mut values: Vec<f64> = outcomes.iter().map(of).collect();
    values.sort_unstable_by(f64::total_cmp);
    let (lowest, highest) = (values[0], values[values.len() - 1]);
    format!("{:.3} ({lowest:.3}–{highest:.3})", values[values.len() / 2])
}
