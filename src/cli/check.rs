//! `kvspoa check`: says whether a configuration can be used, and what holds with it.

use super::ConfigArgs;
use crate::{
    agent,
    config::{Loaded, Origin, Setting},
};
use clap::Args;
use serde_json::{Value, json};

/// What to check.
#[derive(Args, Debug)]
pub(super) struct CheckArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &CheckArgs) -> anyhow::Result<()> {
    let Loaded { config, settings, warnings } = args.config.file()?.load()?;
    agent::check(&config)?;
    let replicas: usize = config.pools.iter().map(|pool| pool.replicas.len()).sum();
    let file = args.config.config.display();
    if args.json {
        let settings: Vec<Value> = settings.iter().map(as_json).collect();
        let all = json!({
            "file": file.to_string(),
            "pools": config.pools.len(),
            "replicas": replicas,
            "settings": settings,
            "warnings": warnings,
        });
        println!("{all:#}");
        return Ok(());
    }
    // Of a long list of replicas, what is told of each.
    let is_told = |setting: &Setting| setting.origin != Origin::Default || !setting.is_of_replica();
    let settings: Vec<Setting> = settings.into_iter().filter(is_told).collect();
    let width = |column: fn(&Setting) -> String| {
        settings.iter().map(|setting| column(setting).chars().count()).max().unwrap_or_default()
    };
    let (keys, values) = (width(|setting| setting.key.clone()), width(Setting::text).min(MAX_VALUE));
    for setting in &settings {
        println!("{:keys$}  {:values$}  {}", setting.key, setting.text(), setting.origin);
    }
    for warning in warnings {
        eprintln!("warning: {warning}");
    }
    println!("{file}: ok, {} pool(s), {replicas} replica(s)", config.pools.len());
    Ok(())
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
