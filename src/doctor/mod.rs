//! `kvspoa doctor`: proves the chain on the live system, from the configuration to the end of a request.
//!
//! `gather` asks everybody and judges nothing; `judge` is pure, and makes one line of each finding with what to do. The
//! agent need not run: what only it can tell is left out then, and the first line says so.

mod bundle;
mod facts;
mod gather;
mod judge;
mod known;
mod look;
mod report;
mod samples;

pub use bundle::bundle;
pub use report::{Check, Class, Report, Status};

use crate::config::{Config, ConfigError, HttpAddr};
use clap::Args;
use report::Judge;
use std::path::PathBuf;

/// What the doctor looks at.
#[derive(Args, Clone, Debug, Default)]
pub struct DoctorArgs {
    /// HAProxy's configuration, as its `-f` names it: looks whether our lines are in place, and what does not go with
    /// them; may be given several times
    #[arg(long, value_name = "FILE")]
    pub haproxy_cfg: Vec<PathBuf>,
    /// HAProxy's frontend, as in http://127.0.0.1:80: sends one short streamed request through it, and watches whether the
    /// agent is asked and the log line arrives
    #[arg(long, value_name = "URL")]
    pub through: Option<HttpAddr>,
    /// Send no request to the replicas. Otherwise each rank computes one prompt of three blocks and four tokens of answer,
    /// which is the only proof that its events carry our tokens
    #[arg(long)]
    pub passive: bool,
}

/// Looks at everything that a configuration names, or at why it cannot be used.
pub async fn examine(config: Result<Config, ConfigError>, args: &DoctorArgs) -> Report {
    let mut checks = Vec::new();
    let mut of_config = Judge { class: Class::Config, subject: String::new(), checks: &mut checks };
    let advice = "`kvspoa check` says the same until it is mended";
    let config = match config {
        Ok(config) => config,
        Err(error) => {
            of_config.fail("config", error.to_string(), advice);
            return Report::new(checks);
        }
    };
    match gather::all(&config, args).await {
        Err(unusable) => of_config.fail("config", unusable.to_string(), advice),
        Ok(facts) => {
            of_config.ok("config", format!("valid, {} pool(s)", config.pools.len()));
            checks.extend(judge::all(&facts));
        }
    }
    Report::new(checks)
}
