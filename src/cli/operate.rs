//! `kvspoa pool` and `kvspoa replica`: what an operator looks at and switches in a running agent.

use super::out::{print, print_line};
use crate::{
    client::{self, Answer},
    config::{DEFAULT_ADMIN, HostPort, Mode},
};
use anyhow::Context;
use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use std::fmt::Write;

/// The agent answers, but not to this question.
#[derive(Debug, thiserror::Error)]
pub(super) enum AskError {
    #[error("the agent has no {0} named `{1}`")]
    Unknown(&'static str, String),
    #[error("there are several pools: say which")]
    Several,
    #[error("{0}")]
    Refused(String),
    #[error("the agent answered {0}")]
    Failed(u16),
}

impl AskError {
    /// Whether the question was wrong, and not the agent.
    pub(super) const fn is_usage(&self) -> bool {
        !matches!(self, Self::Failed(_))
    }

    /// Of an answer that is not 200, and the reason in it.
    pub(super) fn of(status: u16, why: Option<&str>) -> Self {
        match why {
            Some(why) if (400..500).contains(&status) => Self::Refused(why.to_owned()),
            _ => Self::Failed(status),
        }
    }
}

/// Where the agent is, and how its answer is shown.
#[derive(Args, Debug)]
pub(super) struct Asking {
    /// The agent's admin address
    #[arg(long, env = "KVSPOA_ADMIN_LISTEN", default_value = DEFAULT_ADMIN, value_name = "ADDR")]
    admin: HostPort,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Lists the pools of a running agent, or sets the mode of one. The mode holds until the agent starts anew, or the file
/// is read again with another one.
#[derive(Args, Debug)]
pub(super) struct PoolArgs {
    /// The pool (HAProxy backend); all, unless given
    name: Option<String>,
    /// on; shadow: decide and record, but let HAProxy balance; off: do nothing; share=0.25: `on` for a quarter of the
    /// sessions, `shadow` for the others
    mode: Option<Mode>,
    #[command(flatten)]
    asking: Asking,
}

/// Lists the replicas of a running agent, or tells it what to do about one.
#[derive(Args, Debug)]
pub(super) struct ReplicaArgs {
    /// The replica (HAProxy server); all, unless given. The pool may be left out where the agent has only one
    #[arg(value_name = "[POOL/]NAME")]
    name: Option<String>,
    /// What to do
    #[arg(value_enum)]
    action: Option<Action>,
    #[command(flatten)]
    asking: Asking,
}

#[derive(Clone, Copy, ValueEnum, Debug)]
enum Action {
    /// Forget what is known of its cache, and have the engine tell it again
    Resync,
    /// Never name it; HAProxy itself may still choose it
    Ignore,
    /// Name it again
    Use,
}

pub(super) async fn pool(args: PoolArgs) -> anyhow::Result<()> {
    let PoolArgs { name, mode, asking } = args;
    let Some(mode) = mode else {
        let status = asking.status().await?;
        let pools: Vec<&Value> = list(&status["pools"])
            .filter(|pool| name.as_deref().is_none_or(|name| pool["pool"] == name))
            .collect();
        match name {
            Some(name) if pools.is_empty() => return Err(AskError::Unknown("pool", name).into()),
            _ => {}
        }
        return asking.show(&json!(pools), || pool_table(&pools));
    };
    let answer = asking.post("/pool", &json!({ "pool": name, "mode": mode.to_string() })).await?;
    asking.show(&answer, || {
        format!("{}: {}, was {}\n", text(&answer["pool"]), text(&answer["mode"]), text(&answer["before"]))
    })
}

pub(super) async fn replica(args: ReplicaArgs) -> anyhow::Result<()> {
    let ReplicaArgs { name, action, asking } = args;
    let (pool, server) = match name.as_deref().map(|name| name.split_once('/').ok_or(name)) {
        None => (None, None),
        Some(Ok((pool, server))) => (Some(pool), Some(server)),
        Some(Err(server)) => (None, Some(server)),
    };
    let (Some(action), Some(server)) = (action, server) else {
        let status = asking.status().await?;
        let rows: Vec<(&Value, &Value)> = list(&status["pools"])
            .filter(|of| pool.is_none_or(|pool| of["pool"] == pool))
            .flat_map(|of| list(&of["replicas"]).map(move |replica| (&of["pool"], replica)))
            .filter(|(_, replica)| server.is_none_or(|server| replica["server"] == server))
            .collect();
        if let (Some(name), true) = (&name, rows.is_empty()) {
            return Err(AskError::Unknown("replica", name.clone()).into());
        }
        let replicas: Vec<Value> = rows
            .iter()
            .map(|(pool, replica)| {
                let mut replica = (*replica).clone();
                replica["pool"] = (*pool).clone();
                replica
            })
            .collect();
        return asking.show(&json!(replicas), || replica_table(&rows));
    };
    let action = match action {
        Action::Resync => "resync",
        Action::Ignore => "ignore",
        Action::Use => "use",
    };
    let answer =
        asking.post("/replica", &json!({ "pool": pool, "server": server, "action": action })).await?;
    let told = match action {
        "resync" => "its cache is told again",
        "ignore" => "is not named any more; HAProxy may still choose it",
        _ => "is named again",
    };
    asking.show(&answer, || format!("{}/{server}: {told}\n", text(&answer["pool"])))
}

impl Asking {
    pub(super) async fn status(&self) -> anyhow::Result<Value> {
        self.read(client::get(self.admin.as_str(), "/status").await)
    }

    async fn post(&self, target: &str, body: &Value) -> anyhow::Result<Value> {
        self.read(client::post(self.admin.as_str(), target, body.to_string().into()).await)
    }

    fn read(&self, answer: Result<Answer, client::ClientError>) -> anyhow::Result<Value> {
        let answer =
            answer.with_context(|| format!("the agent's admin port {} does not answer", self.admin))?;
        let json: Value = serde_json::from_slice(&answer.body).context("the agent's answer is not JSON")?;
        match answer.status {
            200 => Ok(json),
            status => Err(AskError::of(status, json["error"].as_str()).into()),
        }
    }

    /// A text that the agent gives.
    pub(super) async fn text(&self, target: &str) -> anyhow::Result<String> {
        let answer = client::get(self.admin.as_str(), target)
            .await
            .with_context(|| format!("the agent's admin port {} does not answer", self.admin))?;
        match answer.status {
            200 => Ok(String::from_utf8_lossy(&answer.body).into_owned()),
            _ => self.read(Ok(answer)).map(|_| String::new()),
        }
    }

    pub(super) fn show(&self, json: &Value, table: impl FnOnce() -> String) -> anyhow::Result<()> {
        if self.json { print_line(format_args!("{json:#}")) } else { print(table()) }
    }
}

pub(super) fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => "-".to_owned(),
        other => other.to_string(),
    }
}

fn pool_table(pools: &[&Value]) -> String {
    let share = |decided: &Value| {
        let (prompt, matched) = (decided["prompt_tokens"].as_f64(), decided["matched_tokens"].as_f64());
        match (prompt, matched) {
            (Some(prompt), Some(matched)) if prompt > 0.0 => format!("{:.0}%", matched / prompt * 100.0),
            _ => "-".to_owned(),
        }
    };
    let row = |pool: &&Value| {
        let decisions = &pool["decisions"];
        let requests = |mode: &str| text(&decisions[mode]["requests"]);
        vec![
            text(&pool["pool"]),
            text(&pool["mode"]),
            text(&pool["configured_mode"]),
            list(&pool["replicas"]).count().to_string(),
            requests("on"),
            share(&decisions["on"]),
            requests("shadow"),
            share(&decisions["shadow"]),
            requests("off"),
        ]
    };
    let head = ["POOL", "MODE", "FILE'S", "REPLICAS", "ON", "CACHED", "SHADOW", "CACHED", "OFF"];
    table(&head, pools.iter().map(row))
}

fn replica_table(rows: &[(&Value, &Value)]) -> String {
    let rows = rows.iter().flat_map(|(pool, replica)| {
        list(&replica["ranks"]).map(move |rank| {
            let state = match rank["state_reason"].as_str() {
                Some(reason) => format!("{} ({reason})", text(&rank["state"])),
                None => text(&rank["state"]),
            };
            vec![
                format!("{}/{}", text(pool), text(&replica["server"])),
                text(&rank["rank"]),
                text(&replica["server_state"]),
                text(&replica["excluded"]),
                state,
                text(&rank["blocks"][0]),
                text(&rank["requests"]),
                text(&rank["prefill_tokens"]),
            ]
        })
    });
    let head = [
        "REPLICA",
        "RANK",
        "HAPROXY",
        "NOT NAMED",
        "CACHE KNOWN",
        "GPU BLOCKS",
        "REQUESTS",
        "PREFILL TOKENS",
    ];
    table(&head, rows)
}

/// Columns as wide as their widest cell.
fn table(head: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let mut all = vec![head.iter().map(|cell| (*cell).to_owned()).collect::<Vec<_>>()];
    all.extend(rows);
    let widths: Vec<usize> = (0..head.len())
        .map(|at| {
            all.iter().filter_map(|row| row.get(at)).map(|cell| cell.chars().count()).max().unwrap_or(0)
        })
        .collect();
    let mut out = String::new();
    for row in &all {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            let _ = write!(line, "{cell:width$}  ");
        }
        let _ = writeln!(out, "{}", line.trim_end());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_line_up_and_say_a_dash_where_nothing_is_known() {
        let pool = json!({
            "pool": "be_llm", "mode": "share=0.25", "configured_mode": "on", "replicas": [{}, {}],
            "decisions": {
                "on": { "requests": 10, "prompt_tokens": 200, "matched_tokens": 150 },
                "shadow": { "requests": 0, "prompt_tokens": 0, "matched_tokens": 0 },
                "off": { "requests": 0 },
            },
        });
        let shown = pool_table(&[&pool]);
        let cells: Vec<Vec<&str>> = shown.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(cells[1], ["be_llm", "share=0.25", "on", "2", "10", "75%", "0", "-", "0"]);
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines[0].find("MODE"), lines[1].find("share"), "{shown}");

        let replica = json!({
            "server": "s1", "server_state": null, "excluded": "ignored",
            "ranks": [{ "rank": 0, "state": "degraded", "state_reason": "no_replay", "blocks": [7, 0, 0], "requests": 1,
                "prefill_tokens": 0 }],
        });
        let shown = replica_table(&[(&json!("be"), &replica)]);
        assert!(
            shown.lines().nth(1).is_some_and(|line| line.starts_with("be/s1    0     -        ignored")),
            "{shown}"
        );
    }
}
