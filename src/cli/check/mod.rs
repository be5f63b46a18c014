//! `kvspoa check`: says whether a configuration can be used, and what holds with it.

mod memory;

use super::{ConfigArgs, block_on, out::print_line};
use crate::{
    agent,
    config::{Loaded, Origin, Setting},
};
use clap::Args;
use memory::Memory;
use serde_json::{Value, json};

/// What to check.
#[derive(Args, Debug)]
pub(super) struct CheckArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// HAProxy's tune.bufsize, to weigh it against the memory [default: as its runtime socket tells]
    #[arg(long, value_name = "BYTES")]
    bufsize: Option<u64>,
    /// HAProxy's maxconn, likewise
    #[arg(long, value_name = "NUMBER")]
    maxconn: Option<u64>,
}

pub(super) fn run(args: &CheckArgs) -> anyhow::Result<()> {
    let Loaded { config, settings, mut warnings } = args.config.file()?.load()?;
    agent::check(&config)?;
    let memory = block_on(Memory::gather(&config, args.bufsize, args.maxconn))?;
    let verdict = memory.judge();
    warnings.extend(verdict.warnings);
    let replicas: usize = config.pools.iter().map(|pool| pool.replicas.len()).sum();
    let file = args.config.config.display();
    if args.json {
        let settings: Vec<Value> = settings.iter().map(as_json).collect();
        let all = json!({
            "file": file.to_string(),
            "pools": config.pools.len(),
            "replicas": replicas,
            "settings": settings,
            "memory": memory.json(),
            "warnings": warnings,
        });
        return print_line(format_args!("{all:#}"));
    }
    // Of a long list of replicas, what is told of each.
    let is_told = |setting: &Setting| setting.origin != Origin::Default || !setting.is_of_replica();
    let settings: Vec<Setting> = settings.into_iter().filter(is_told).collect();
    let width = |column: fn(&Setting) -> String| {
        settings.iter().map(|setting| column(setting).chars().count()).max().unwrap_or_default()
    };
    let (keys, values) = (width(|setting| setting.key.clone()), width(Setting::text).min(MAX_VALUE));
    for setting in &settings {
        print_line(format_args!("{:keys$}  {:values$}  {}", setting.key, setting.text(), setting.origin))?;
    }
    verdict.lines.iter().try_for_each(print_line)?;
    for warning in warnings {
        eprintln!("warning: {warning}");
    }
    print_line(format_args!("{file}: ok, {} pool(s), {replicas} replica(s)", config.pools.len()))
}

/// A longer value, such as a list of endpoints, may break the column.
const MAX_VALUE: usize = 40;

fn as_json(setting: &Setting) -> Value {
    let from = match &setting.origin {
        Origin::Default => "default",
        Origin::File(_) => "file",
        Origin::Variable(_) => "environment",
        Origin::Flag(_) => "flag",
    };
    json!({"key": setting.key, "value": setting.value, "from": from, "where": setting.origin.to_string()})
}
