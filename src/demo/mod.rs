//! `kvspoa demo`: HAProxy, the agent and simulated replicas on one machine, one chat load with and without kvspoa.

mod load;
mod report;
mod site;

use crate::{
    agent::Agent,
    client,
    config::{Config, Overrides},
    sim::{Replica, ReplicaArgs},
};
use anyhow::{Context, bail};
use clap::Args;
use load::Load;
use report::Summary;
use site::{Haproxy, POOL, RUNTIME_SOCKET, Server, Site, free_port};
use std::{
    io::{IsTerminal, Write as _},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};
use tokio_util::sync::CancellationToken;

/// Show what kvspoa does: the same chat load through plain `leastconn` and through kvspoa.
#[derive(Args, Debug)]
pub struct DemoArgs {
    /// The haproxy program [default: /usr/sbin/haproxy, else from the PATH]
    #[arg(long, value_name = "PATH")]
    haproxy: Option<PathBuf>,
    /// Simulated replicas behind each of the two ways
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=32))]
    replicas: u16,
    /// Users who chat
    #[arg(long, default_value_t = 24)]
    users: usize,
    /// Turns of each user's chat
    #[arg(long, default_value_t = 6)]
    turns: usize,
    /// Requests at once
    #[arg(long, default_value_t = 8)]
    concurrency: usize,
    /// Tokens that a replica prefills in a second
    #[arg(long, default_value_t = 12_000.0, value_name = "TOKENS")]
    prefill_rate: f64,
    /// KV cache blocks of each replica, of 16 tokens
    #[arg(long, default_value_t = 1_500, value_name = "BLOCKS")]
    blocks: u32,
    /// Seed of the load
    #[arg(long, default_value_t = 7)]
    seed: u64,
}

/// Runs the demonstration. An error when a request failed or kvspoa's cached share is not the better one.
///
/// # Errors
/// Something could not be started, or the demonstration did not show what it should.
pub async fn run(args: DemoArgs) -> anyhow::Result<()> {
    let dir = Workspace::new()?;
    let stop = CancellationToken::new();
    let plain = replicas("p", &args).await?;
    let routed = replicas("s", &args).await?;
    let config = agent_config(&dir.0)?;
    let agent = Agent::start(&config).await?;
    let admin = agent.admin_addr()?.to_string();
    let site = Site {
        spop: config.spop.listen.to_string(),
        log_to: config.log_listen.to_string(),
        plain: &plain.servers,
        routed: &routed.servers,
    };
    let haproxy = Haproxy::start(&site::binary(args.haproxy.clone()), &dir.0, &site).await?;
    // Its sockets are bound since before HAProxy; now there is a runtime socket to ask.
    let serving = tokio::spawn(agent.serve(stop.clone()));
    until_ready(&admin).await?;
    println!(
        "HAProxy {}, {} simulated replicas each way; {} users × {} turns, {} requests at once\n",
        haproxy.version, args.replicas, args.users, args.turns, args.concurrency
    );
    let load =
        Load { users: args.users, turns: args.turns, concurrency: args.concurrency.max(1), seed: args.seed };
    let before = play("leastconn", &haproxy.plain.to_string(), &load, &plain).await;
    let after = play("kvspoa", &haproxy.routed.to_string(), &load, &routed).await;
    println!("{}", report::compare(&before, &after));
    explain(&admin, &load).await?;
    // HAProxy first, so that it does not see the agent go.
    drop(haproxy);
    stop.cancel();
    serving.await.context("the agent")??;
    verdict(&before, &after)
}

struct Replicas {
    servers: Vec<Server>,
    _running: Vec<Replica>,
}

async fn replicas(prefix: &str, args: &DemoArgs) -> anyhow::Result<Replicas> {
    let mut started = Replicas { servers: Vec::new(), _running: Vec::new() };
    for number in 1..=args.replicas {
        let replica = Replica::start(&ReplicaArgs {
            listen: ([127, 0, 0, 1], 0).into(),
            events: "tcp://127.0.0.1:*".to_owned(),
            replay: "tcp://127.0.0.1:*".to_owned(),
            blocks: args.blocks,
            prefill_tokens_per_second: args.prefill_rate,
            ..ReplicaArgs::default()
        })
        .await
        .context("a simulated replica")?;
        started.servers.push(Server { name: format!("{prefix}{number}"), addr: replica.http_addr() });
        started._running.push(replica);
    }
    Ok(started)
}

/// The replicas are not in it: the agent finds them by HAProxy's runtime socket.
fn agent_config(dir: &Path) -> anyhow::Result<Config> {
    let text = format!(
        "spop.listen = \"{}\"\nadmin.listen = \"{}\"\nlog.listen = \"{}\"\nhaproxy.socket = \"{}\"\n\
         [[pool]]\nbackend = \"{POOL}\"\n",
        free_port()?,
        free_port()?,
        free_port()?,
        dir.join(RUNTIME_SOCKET).display()
    );
    let path = dir.join("kvspoa.toml");
    std::fs::write(&path, text)?;
    Ok(Config::load(&path, &Overrides::default())?)
}

async fn until_ready(admin: &str) -> anyhow::Result<()> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        if client::get(admin, "/readyz").await.is_ok_and(|answer| answer.status == 200) {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("the agent did not become ready");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn play(name: &'static str, addr: &str, load: &Load, replicas: &Replicas) -> Summary {
    let done = Arc::new(AtomicUsize::new(0));
    let all = load.users * load.turns;
    let shown = std::io::stderr().is_terminal();
    let progress = move || {
        let done = done.fetch_add(1, Ordering::Relaxed) + 1;
        if shown {
            eprint!("\r{name}: {done} of {all} requests ");
            if done == all {
                eprintln!();
            }
            let _ = std::io::stderr().flush();
        }
    };
    let outcomes = load::play(addr, load, progress).await;
    let servers: Vec<String> = replicas.servers.iter().map(|server| server.name.clone()).collect();
    Summary::new(name, outcomes, &servers)
}

async fn explain(admin: &str, load: &Load) -> anyhow::Result<()> {
    let target = format!("/explain?pool={POOL}&path=/v1/chat/completions");
    let answer = client::post(admin, &target, load::sample(load)).await?;
    let json: serde_json::Value = serde_json::from_slice(&answer.body)?;
    println!("one request explained (kvspoa explain):");
    let word = |field: &str| json[field].as_str().unwrap_or("?").replace('_', " ");
    println!(
        "  {} prompt tokens, {}: to {}, by {}",
        json["prompt_tokens"],
        word("state"),
        word("chosen"),
        word("decided_by")
    );
    for replica in json["replicas"].as_array().into_iter().flatten() {
        println!(
            "  {:6} holds {:>5} tokens, {:>5} to compute, cost {:>8.0}{}",
            replica["server"].as_str().unwrap_or_default(),
            replica["gpu_tokens"].to_string(),
            replica["uncached_tokens"].to_string(),
            replica["cost"].as_f64().unwrap_or_default(),
            if replica["server"] == json["chosen"] { "  <- chosen" } else { "" }
        );
    }
    println!();
    Ok(())
}

fn verdict(before: &Summary, after: &Summary) -> anyhow::Result<()> {
    let failures: Vec<_> = before.failures().iter().chain(after.failures()).collect();
    if let Some(first) = failures.first() {
        bail!("{} requests failed, the first with: {first}", failures.len());
    }
    if after.cached_share() <= before.cached_share() {
        bail!("kvspoa's cached share is not better than that of leastconn");
    }
    println!(
        "kvspoa served {:.1} % of all prompt tokens from caches, leastconn {:.1} %.",
        after.cached_share() * 100.0,
        before.cached_share() * 100.0
    );
    Ok(())
}

/// A temporary directory, removed when dropped.
struct Workspace(PathBuf);

impl Workspace {
    fn new() -> std::io::Result<Self> {
        let path = std::env::temp_dir().join(format!("kvspoa-demo-{}", std::process::id()));
        std::fs::create_dir_all(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        // What remains in the temporary directory harms nobody.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
