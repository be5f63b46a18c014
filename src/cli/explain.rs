//! `kvspoa explain`: asks the admin port of a running agent.

use super::{operate::AskError, out::print_line};
use crate::{
    client,
    config::{DEFAULT_ADMIN, HostPort},
};
use anyhow::Context;
use clap::Args;
use std::{io::Read, path::PathBuf};

/// Where would this request go, and why?
#[derive(Args, Debug)]
pub(super) struct ExplainArgs {
    /// The agent's admin address
    #[arg(long, env = "KVSPOA_ADMIN_LISTEN", default_value = DEFAULT_ADMIN, value_name = "ADDR")]
    admin: HostPort,
    /// The pool (HAProxy backend); may be left out where the agent has only one
    #[arg(long)]
    pool: Option<String>,
    /// The request's path
    #[arg(long, default_value = "/v1/chat/completions")]
    path: String,
    /// The session id that the client would send
    #[arg(long)]
    session: Option<String>,
    /// Print the prompt's token ids too
    #[arg(long)]
    tokens: bool,
    /// A file with the request's body; - or nothing: standard input
    #[arg(default_value = "-")]
    body: PathBuf,
}

pub(super) async fn run(args: ExplainArgs) -> anyhow::Result<()> {
    let mut body = Vec::new();
    if args.body.as_os_str() == "-" {
        std::io::stdin().read_to_end(&mut body).context("standard input")?;
    } else {
        body = std::fs::read(&args.body).with_context(|| args.body.display().to_string())?;
    }
    let mut target = format!("/explain?path={}", escape(&args.path));
    for (name, value) in [("pool", &args.pool), ("session", &args.session)] {
        if let Some(value) = value {
            target.push_str(&format!("&{name}={}", escape(value)));
        }
    }
    if args.tokens {
        target.push_str("&tokens=1");
    }
    let answer = client::post(args.admin.as_str(), &target, body.into())
        .await
        .with_context(|| format!("the agent's admin port {} does not answer", args.admin))?;
    let json: serde_json::Value =
        serde_json::from_slice(&answer.body).context("the agent's answer is not JSON")?;
    if answer.status != 200 {
        return Err(AskError::of(answer.status, json["error"].as_str()).into());
    }
    print_line(format_args!("{json:#}"))
}

/// Percent-encodes all that is not plain in a query.
fn escape(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                char::from(byte).to_string()
            }
            _ => format!("%{byte:02X}"),
        })
        .collect()
}
