//! `kvspoa shadow-report`: reads the record of a running agent, or a file of it, and says what it is worth.

use super::operate::{AskError, Asking, list};
use crate::replay::{ReportFleet, report};
use anyhow::{Context, bail};
use clap::Args;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Compares what HAProxy did with what kvspoa and plain hashing would have done, and says whether it is worth switching on.
///
/// The recorded requests are played through modelled replicas, by the index, load and choice that the agent has. What is
/// not known of the replicas can be told.
#[derive(Args, Debug)]
pub(super) struct ReportArgs {
    /// The pool (HAProxy backend); may be left out where there is only one
    pool: Option<String>,
    /// Look at so many seconds up to now [default: all that is recorded]
    #[arg(long, value_name = "SECONDS", conflicts_with = "file")]
    seconds: Option<u64>,
    /// Read a file that an agent has written (`record.file`), and ask no agent
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Blocks of each replica's GPU cache [default: as the engines told; of a file, as many as hold 131,072 tokens]
    #[arg(long, value_name = "BLOCKS")]
    gpu_blocks: Option<u32>,
    /// Blocks of each replica's CPU tier [default: as many as were seen in use; of a file, none]
    #[arg(long, value_name = "BLOCKS")]
    cpu_blocks: Option<u32>,
    /// Prompt tokens that a busy replica computes a second [default: as the agent learned]
    #[arg(long, value_name = "TOKENS")]
    prefill_rate: Option<f64>,
    #[command(flatten)]
    asking: Asking,
}

pub(super) async fn run(args: ReportArgs) -> anyhow::Result<()> {
    let ReportArgs { pool, seconds, file, gpu_blocks, cpu_blocks, prefill_rate, asking } = args;
    let (text, path, known) = match &file {
        Some(file) => {
            let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
            (of_pool(&text, pool.as_deref())?, file.clone(), ReportFleet::default())
        }
        None => {
            let status = asking.status().await?;
            let pool = named(&status, pool.as_deref())?;
            let name = pool["pool"].as_str().unwrap_or_default();
            let mut target = format!("/record?pool={name}");
            if let Some(seconds) = seconds {
                target.push_str(&format!("&seconds={seconds}"));
            }
            let text = asking.text(&target).await?;
            if text.is_empty() {
                bail!(
                    "nothing is recorded of {name} yet: its mode is {}",
                    pool["mode"].as_str().unwrap_or("?")
                );
            }
            (text, Path::new("/record").to_owned(), fleet(pool))
        }
    };
    let known = ReportFleet {
        gpu_blocks: gpu_blocks.or(known.gpu_blocks),
        cpu_blocks: cpu_blocks.or(known.cpu_blocks),
        prefill_tokens_per_second: prefill_rate.or(known.prefill_tokens_per_second),
        ..known
    };
    let report = report(&text, &path, &known)?;
    asking.show(&serde_json::to_value(&report)?, || report.text())
}

/// The pool of a name, or the only one.
fn named<'s>(status: &'s Value, name: Option<&str>) -> anyhow::Result<&'s Value> {
    let pools: Vec<&Value> = list(&status["pools"]).collect();
    match (name, &pools[..]) {
        (Some(name), pools) => match pools.iter().find(|pool| pool["pool"] == name) {
            Some(pool) => Ok(pool),
            None => Err(AskError::Unknown("pool", name.to_owned()).into()),
        },
        (None, [pool]) => Ok(pool),
        (None, _) => Err(AskError::Several.into()),
    }
}

/// What the agent knows of a pool's replicas.
fn fleet(pool: &Value) -> ReportFleet {
    let replicas = || list(&pool["replicas"]);
    let ranks = || replicas().flat_map(|replica| list(&replica["ranks"]));
    let blocks = |value: &Value| value.as_u64().and_then(|blocks| u32::try_from(blocks).ok());
    ReportFleet {
        servers: replicas().filter_map(|replica| replica["server"].as_str()).map(str::to_owned).collect(),
        gpu_blocks: ranks().filter_map(|rank| blocks(&rank["capacity_blocks"])).max(),
        cpu_blocks: ranks().filter_map(|rank| blocks(&rank["blocks"][1])).max(),
        prefill_tokens_per_second: pool["prefill_tokens_per_second"].as_f64(),
    }
}

/// The lines of one pool of a file.
fn of_pool(text: &str, name: Option<&str>) -> anyhow::Result<String> {
    let pool = |line: &str| {
        serde_json::from_str::<Value>(line).ok().and_then(|line| line["pool"].as_str().map(str::to_owned))
    };
    let mut kept = String::new();
    let mut only = name.map(str::to_owned);
    for line in text.lines() {
        // What is no line of a record is left to the one who reads it, and says so with its number.
        let of = pool(line);
        match (&only, &of) {
            (Some(only), Some(of)) if only != of && name.is_none() => {
                return Err(AskError::Several.into());
            }
            (Some(only), Some(of)) if only != of => continue,
            (None, Some(of)) => only = Some(of.clone()),
            _ => {}
        }
        kept.push_str(line);
        kept.push('\n');
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_several_pools_is_read_by_pool() {
        let text = "{\"pool\":\"a\",\"n\":1}\n{\"pool\":\"b\",\"n\":2}\n{\"pool\":\"a\",\"n\":3}\n";
        assert!(of_pool(text, None).is_err());
        assert_eq!(of_pool(text, Some("a")).expect("lines").matches("\"a\"").count(), 2);
        assert!(!of_pool(text, Some("a")).expect("lines").contains("\"b\""));
        assert_eq!(of_pool("{\"pool\":\"a\"}\n", None).expect("lines"), "{\"pool\":\"a\"}\n");
    }
}
