//! `kvspoa replay`: a workload played through modelled replicas in virtual time, by several policies.
//!
//! The index, the load and the choice are those of the agent (`index`, `select`); the engines are those of the
//! simulated replica (`sim::Engine`), which publishes what vLLM publishes. What is modelled here is only the time
//! between them, the workload and the rivals.
//!
//! | file | what |
//! |---|---|
//! | `workload`, `trace`, `recorded`, `generate`, `arrivals` | what is played, and when |
//! | `agent` | who is asked, and what it sees |
//! | `policy`, `rival`, `history` | what is compared |
//! | `play` | one run |
//! | `runs` | all of them, on all cores |
//! | `outcome`, `table`, `chart` | figures, and how they are shown |
//! | `report` | what HAProxy did, beside what others would have done |
//! | `args` | the flags |

mod agent;
mod args;
mod arrivals;
mod chart;
mod error;
mod generate;
mod history;
mod outcome;
mod play;
mod policy;
mod recorded;
mod report;
mod rival;
mod runs;
mod table;
mod trace;
mod workload;

pub use args::ReplayArgs;
pub use error::ReplayError;
pub use report::{Report, ReportFleet, Verdict, report};
pub use trace::TraceError;

use clap::ValueEnum;
use generate::{Shape, generate};
use policy::{PolicyName, Weights};
use runs::Variant;
use std::{fs, path::Path};
use workload::Workload;

/// Tokens that one hash id of a Mooncake trace stands for.
const TRACE_PIECE_TOKENS: u32 = 512;

/// Plays what the flags say; the outcome, to be printed.
///
/// # Errors
/// A file cannot be read or written, a trace has a bad line, a weight does not exist, or a prompt is larger than the
/// replicas.
pub fn run(args: &ReplayArgs) -> Result<String, ReplayError> {
    let variants = variants(args)?;
    let workload = workload(args)?;
    let rows = runs::run_all(args, &workload, &variants)?;
    if let Some(path) = &args.svg {
        let chart = chart::render(&title(args, &workload), &rows);
        fs::write(path, chart).map_err(|source| ReplayError::Chart { path: path.clone(), source })?;
    }
    Ok(if args.json { table::json(&rows) } else { table::markdown(&rows) })
}

fn title(args: &ReplayArgs, workload: &Workload) -> String {
    let name = Path::new(&args.workload).file_name().unwrap_or_default().to_string_lossy();
    let (requests, speed, replicas) = (workload.requests.len(), args.speed, args.replicas);
    format!("{name}: {requests} requests at speed {speed}, {replicas} replicas, {} seed(s)", args.seeds)
}

fn workload(args: &ReplayArgs) -> Result<Workload, ReplayError> {
    let generated = Shape::from_str(&args.workload, false);
    let workload = match generated {
        Ok(shape) => generate(shape, args.requests.max(1), args.seed),
        Err(_) if recorded::is_record(Path::new(&args.workload)) => {
            recorded::read(Path::new(&args.workload))?.workload
        }
        Err(_) => trace::read_mooncake(Path::new(&args.workload), TRACE_PIECE_TOKENS)?,
    };
    let workload = match &args.arrivals {
        Some(path) => workload.with_arrivals(&trace::read_arrivals(path)?),
        None => workload,
    };
    let (workload, warm_up) = (workload.part(args.half), args.warm_up);
    match workload.requests.len() {
        requests if requests <= warm_up => Err(ReplayError::AllWarmUp { requests, warm_up }),
        _ => Ok(workload),
    }
}

/// Every policy once, the default one with every combination of the swept weights.
fn variants(args: &ReplayArgs) -> Result<Vec<Variant>, ReplayError> {
    let mut weights = Weights::default();
    for (name, values) in &args.set {
        let [value] = values[..] else { return Err(ReplayError::NotOneValue(name.clone())) };
        set(&mut weights, name, value)?;
    }
    let mut swept = vec![(String::new(), weights)];
    for (name, values) in &args.sweep {
        let mut next = Vec::new();
        for (label, weights) in &swept {
            for value in values {
                let mut weights = *weights;
                set(&mut weights, name, *value)?;
                next.push((format!("{label} {name}={value}"), weights));
            }
        }
        swept = next;
    }
    let mut variants = Vec::new();
    for policy in &args.policies {
        let name = policy.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
        let swept = if *policy == PolicyName::Cost { &swept[..] } else { &[(String::new(), weights)] };
        variants.extend(swept.iter().map(|(label, weights)| Variant {
            name: format!("{name}{label}"),
            policy: *policy,
            weights: *weights,
        }));
    }
    Ok(variants)
}

fn set(weights: &mut Weights, name: &str, value: f64) -> Result<(), ReplayError> {
    weights.set(name, value).then_some(()).ok_or_else(|| ReplayError::NoWeight(name.to_owned()))
}
