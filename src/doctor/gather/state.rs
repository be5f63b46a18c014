//! Pages and answers as they are, for a report of a fault.

use super::agent;
use crate::{config::Config, replica::RuntimeSocket};
use serde_json::{Value, json};

/// What the agent's admin port tells. No page of it has text of prompts.
const PAGES: [&str; 4] = ["/healthz", "/readyz", "/status", "/metrics"];

/// What of the machine may matter.
const FILES: [(&str, &str); 4] = [
    ("kernel", "/proc/version"),
    ("system", "/etc/os-release"),
    ("limits", "/proc/self/limits"),
    ("pressure", "/proc/loadavg"),
];

pub(in crate::doctor) async fn agent_pages(config: &Config) -> Value {
    let admin = config.admin_listen.to_string();
    let mut pages = json!({});
    for target in PAGES {
        pages[target] = match agent::get(&admin, target).await {
            Ok(page) if target == "/metrics" => page.lines().filter(|line| !line.starts_with('#')).collect(),
            Ok(page) => serde_json::from_str(&page).unwrap_or(Value::String(page)),
            Err(why) => json!({ "no_answer": why }),
        };
    }
    pages
}

pub(in crate::doctor) async fn haproxy_answers(config: &Config) -> Value {
    let Some(addr) = &config.haproxy.socket else { return Value::Null };
    let socket = RuntimeSocket::new(addr.clone());
    let per_pool = config.pools.iter().flat_map(|pool| {
        let backend = &pool.backend;
        [
            format!("show servers state {backend}"),
            format!("show servers conn {backend}"),
            format!("show stat {backend} 7 -1"),
        ]
    });
    let mut answers = json!({});
    for command in ["show info".to_owned()].into_iter().chain(per_pool) {
        answers[&command] = match socket.ask(&format!("{command}\n")).await {
            Ok(answer) => answer.lines().filter(|line| !line.is_empty()).collect(),
            Err(error) => json!({ "no_answer": error.to_string() }),
        };
    }
    answers
}

pub(in crate::doctor) fn machine() -> Value {
    let mut machine = json!({ "cores": std::thread::available_parallelism().map_or(0, usize::from) });
    for (name, path) in FILES {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        machine[name] = text.lines().collect();
    }
    machine
}
