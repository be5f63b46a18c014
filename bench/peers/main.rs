//! `scripts/bench index`: kvspoa's index and its peers under the workload conv2k8k, in one run.
//!
//! Each measurement is a process of its own, so that memory freed before does not hide what is allocated; the indexes
//! take turns and the median of several rounds counts, so that a busy machine disturbs all alike. The sums of all
//! overlaps are checked: every exact index finds the same.
#![forbid(unsafe_code)]

mod chain;
mod concurrent;
mod dynamo;
mod measure;
mod ours;
mod shapes;
mod subject;
mod table;

use std::env;
use std::process::ExitCode;

#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[cfg(feature = "tikv-jemallocator")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

const USAGE: &str =
    "usage: peers [table [ROUNDS]] | peers large | peers measure SUBJECT WHAT RANKS SCALE | peers churn";

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match arguments[..] {
        [] | ["table"] => table::run(3),
        ["table", rounds] => rounds.parse().is_ok_and(table::run),
        ["measure", subject, what, ranks, scale] => match (ranks.parse(), scale.parse()) {
            (Ok(ranks), Ok(scale)) => measure_one(subject, what, ranks, scale),
            _ => false,
        },
        ["churn"] => shapes::churn(),
        _ => false,
    };
    if done {
        return ExitCode::SUCCESS;
    }
    eprintln!("{USAGE}");
    ExitCode::FAILURE
}

fn measure_one(subject: &str, what: &str, ranks: u16, scale: u64) -> bool {
    if what == "writer" {
        return subject == "ours" && concurrent::run(ranks, scale);
    }
    match subject {
        "ours" => shapes::run::<ours::Ours>(what, ranks, scale),
        "compressed" => shapes::run::<dynamo::Compressed>(what, ranks, scale),
        "radix" => shapes::run::<dynamo::Radix>(what, ranks, scale),
        "chain" => shapes::run::<chain::Chain>(what, ranks, scale),
        _ => false,
    }
}
