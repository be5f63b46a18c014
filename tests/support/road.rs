//! The whole road: simulated replicas, the agent as its own process, HAProxy with the lines of `haproxy/`.

use std::fmt::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use kvspoa::haproxy_config::Form;
use kvspoa::sim::{Replica, ReplicaArgs};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use super::haproxy::{Binary, HaproxyProcess, RUNTIME_SOCKET};
use super::http::{self, Connection, Message};
use super::site::{Forms, write};
use super::{eventually, free_port, nobody};

/// The backend, by which the agent knows its pool.
pub(crate) const POOL: &str = "be_llm";

/// Another backend, where requests with the header `x-pool: other` go.
pub(crate) const OTHER_POOL: &str = "be_other";

/// `tune.bufsize` unless a test wants another.
const BUFSIZE: usize = 1 << 20;

/// Everything between a client and the replicas, running.
pub(crate) struct Road {
    /// Where clients connect.
    pub(crate) http: SocketAddr,
    pub(crate) agent: AgentProcess,
    pub(crate) replicas: Vec<Replica>,
    pub(crate) haproxy: HaproxyProcess,
    pub(crate) runtime: Runtime,
    _directory: TempDir,
}

/// What may differ from one road to another.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup<'a> {
    /// Replicas, named `s1`, `s2` and so on.
    pub(crate) replicas: usize,
    /// Flags of each.
    pub(crate) flags: &'a [&'a str],
    /// HAProxy's `tune.bufsize`, in bytes.
    pub(crate) bufsize: usize,
    /// Whether HAProxy's log lines reach the agent.
    pub(crate) log: bool,
    /// Lines of the agent's pool.
    pub(crate) pool: &'a str,
    /// Lines of HAProxy's backend in place of the replicas' servers, of which the agent is told nothing then.
    pub(crate) servers: Option<&'a str>,
    /// HAProxy's own `balance`, and lines that go with it.
    pub(crate) balance: &'a str,
    /// Whether HAProxy asks the agent.
    pub(crate) asks: bool,
    /// Whether the agent is told where it can hear and ask the replicas, or their names alone.
    pub(crate) told: bool,
    /// Options of the forms (`kvspoa haproxy-config`).
    pub(crate) forms: &'a [&'a str],
    /// Further lines of the agent's configuration, before its pools.
    pub(crate) agent: &'a str,
    /// What follows `server NAME` in HAProxy, from the number of the replica and its address.
    pub(crate) server: fn(usize, SocketAddr) -> String,
    /// Whether to wait until the agent has heard all replicas.
    pub(crate) ready: bool,
    /// Whether the last replica is the server `m1` of a backend of its own, [`OTHER_POOL`], of which the agent is not told.
    pub(crate) other_pool: bool,
    /// Whether HAProxy runs as master and worker.
    pub(crate) master_worker: bool,
}

/// Where the agent hears a replica.
#[derive(Clone, Debug)]
pub(crate) struct Feed {
    pub(crate) events: String,
    pub(crate) replay: Option<String>,
    /// Whether it asks the replica for its load too.
    pub(crate) polled: bool,
}

impl Feed {
    /// The replica's own.
    pub(crate) fn of(replica: &Replica) -> Self {
        let rank = &replica.ranks()[0];
        Self { events: rank.events.clone(), replay: Some(rank.replay.clone()), polled: true }
    }
}

impl Default for Setup<'_> {
    fn default() -> Self {
        Self {
            replicas: 2,
            flags: &[],
            bufsize: BUFSIZE,
            log: true,
            pool: "",
            servers: None,
            balance: "leastconn",
            asks: true,
            told: true,
            forms: &[],
            agent: "",
            server: |_, address| address.to_string(),
            ready: true,
            other_pool: false,
            master_worker: false,
        }
    }
}

impl Road {
    /// Starts `count` replicas, the agent and HAProxy; returns when the agent is ready and HAProxy has seen it.
    pub(crate) fn start(binary: &Binary, count: usize, replica: &[&str]) -> Self {
        Self::set_up(binary, &Setup { replicas: count, flags: replica, ..Setup::default() })
    }

    /// The same, set up in a special way.
    pub(crate) fn set_up(binary: &Binary, setup: &Setup) -> Self {
        let runtime = Runtime::new().expect("a runtime");
        let args = replica_args(setup.flags);
        let replicas: Vec<Replica> = (0..setup.replicas)
            .map(|_| runtime.block_on(Replica::start(&args)).expect("a replica"))
            .collect();
        let feeds: Vec<Feed> = replicas.iter().map(Feed::of).collect();
        Self::assemble(binary, runtime, replicas, &feeds, setup)
    }

    /// The same with replicas that run already, and where the agent hears each of them.
    pub(crate) fn assemble(
        binary: &Binary,
        runtime: Runtime,
        replicas: Vec<Replica>,
        feeds: &[Feed],
        setup: &Setup,
    ) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let listed = if setup.servers.is_some() { &[][..] } else { of_pool(&replicas, setup) };
        let pool = if setup.told { pool(setup.pool, listed, feeds) } else { untold_pool(listed) };
        let agent = AgentProcess::start(directory.path(), &format!("{}{pool}", setup.agent));
        if setup.ready && setup.servers.is_none() {
            agent.wait_until_ready();
        }
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let files = haproxy_files(directory.path(), address, &agent, &replicas, setup);
        let files: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
        let haproxy = HaproxyProcess::start_as(binary, directory.path(), &files, setup.master_worker);
        if setup.asks {
            haproxy.wait_for_server("kvspoa_agent", "agent", "UP");
        }
        if setup.ready {
            agent.wait_until_ready();
        }
        Self { http: address, agent, replicas, haproxy, runtime, _directory: directory }
    }

    /// Waits until the agent has heard of every server and engine.
    pub(crate) fn wait_for_polls(&self) {
        eventually("HAProxy's socket answers", || {
            (self.agent.metric("kvspoa_haproxy_socket_up") == 1.0).then_some(())
        });
        eventually("the engines answer", || {
            let asked =
                |replica| self.agent.metric_with("kvspoa_engine_reports_total", &format!("\"s{replica}\""));
            (1..=self.replicas.len()).all(|replica| asked(replica) > 0.0).then_some(())
        });
    }

    /// Every gauge of load comes to 0.
    #[track_caller]
    pub(crate) fn assert_no_load(&self) {
        for gauge in ["kvspoa_requests", "kvspoa_prefill_tokens", "kvspoa_booked_blocks"] {
            eventually(&format!("{gauge} is 0"), || (self.agent.metric(gauge) == 0.0).then_some(()));
        }
    }

    /// A streamed completion that lasts until its connection is dropped, or some minutes; returns at its first piece.
    pub(crate) fn long_request(&self, body: &Value) -> Connection {
        let mut connection = Connection::open(self.http);
        connection.send(&http::request("POST", "/v1/completions", &[], body.to_string().as_bytes()));
        assert_eq!(connection.read_head().expect("headers").status(), 200);
        connection.read_chunk().expect("a first piece");
        connection
    }

    /// Sends a JSON body of a session and reads the whole answer.
    pub(crate) fn post_of(&self, session: &str, path: &str, body: &Value) -> Message {
        let headers = [("x-session-id", session)];
        http::send(self.http, &http::request("POST", path, &headers, body.to_string().as_bytes()))
    }

    /// Sends a JSON body and reads the whole answer.
    pub(crate) fn post(&self, path: &str, body: &Value) -> Message {
        http::send(self.http, &http::request("POST", path, &[], body.to_string().as_bytes()))
    }
}

/// A completion whose prompt has nothing in common with those of other numbers.
pub(crate) fn unrelated(number: usize) -> Value {
    json!({ "prompt": format!("{number} is the number of this story ").repeat(20), "max_tokens": 2 })
}

/// The same, streamed, with an answer of many tokens.
pub(crate) fn long_body(number: usize) -> Value {
    json!({ "prompt": format!("{number} long ").repeat(100), "max_tokens": 2000, "stream": true, "ignore_eos": true })
}

/// The replica's flags on top of ports that the system picks.
pub(crate) fn replica_args(flags: &[&str]) -> ReplicaArgs {
    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        replica: ReplicaArgs,
    }
    let fixed = [
        "replica",
        "--listen",
        "127.0.0.1:0",
        "--events",
        "tcp://127.0.0.1:*",
        "--replay",
        "tcp://127.0.0.1:*",
    ];
    <Cli as clap::Parser>::parse_from(fixed.iter().chain(flags)).replica
}

const OTHER_POOL_RULE: &str = "    use_backend be_other if { req.hdr(x-pool) other }\n";

/// The replicas of [`POOL`].
fn of_pool<'a>(replicas: &'a [Replica], setup: &Setup) -> &'a [Replica] {
    let others = usize::from(setup.other_pool);
    &replicas[..replicas.len() - others]
}

fn haproxy_files(
    dir: &Path,
    http: SocketAddr,
    agent: &AgentProcess,
    replicas: &[Replica],
    setup: &Setup,
) -> Vec<PathBuf> {
    let log = if setup.log { agent.log } else { nobody() };
    let options: Vec<String> = setup.forms.iter().copied().map(str::to_owned).collect();
    let forms = Forms::new(dir, agent.spop, log, &options);
    let form = |form| if setup.asks { forms.text(form) } else { String::new() };
    let mut config = format!(
        "global\n    maxconn 2000\n    tune.bufsize {}\ndefaults\n    mode http\n    timeout client 120s\n    \
         timeout server 120s\n    timeout connect 2s\n    timeout http-request 60s\n    retries 3\n\
         frontend fe\n    bind {http}\n    option httplog\n{}{}    default_backend {POOL}\n\
         backend {POOL}\n    balance {}\n    http-response set-header x-served-by %s\n    \
         http-response set-header x-kv-reason %[var(txn.kv.reason)]\n    \
         http-response set-header x-kv-state %[var(txn.kv.state)]\n{}",
        setup.bufsize,
        form(Form::Frontend),
        if setup.other_pool { OTHER_POOL_RULE } else { "" },
        setup.balance,
        form(Form::Backend),
    );
    config.push_str(setup.servers.unwrap_or_default());
    let listed = if setup.servers.is_some() { &[] } else { of_pool(replicas, setup) };
    for (number, replica) in listed.iter().enumerate() {
        let number = number + 1;
        let server = (setup.server)(number, replica.http_addr());
        writeln!(config, "    server s{number} {server}").expect("a string");
    }
    if let Some(other) = replicas.last().filter(|_| setup.other_pool) {
        let (lines, at) = (form(Form::Backend), other.http_addr());
        let reason = "http-response set-header x-kv-reason %[var(txn.kv.reason)]";
        writeln!(config, "backend {OTHER_POOL}\n    {reason}\n{lines}    server m1 {at}").expect("a string");
    }
    vec![write(dir, "haproxy.cfg", &config), write(dir, "kvspoa-agent.cfg", &forms.text(Form::Agent))]
}

/// The pool of these replicas, by where the agent hears each of them; without any, HAProxy's servers.
fn pool(lines: &str, replicas: &[Replica], feeds: &[Feed]) -> String {
    let mut text = format!("[[pool]]\nbackend = \"{POOL}\"\n{lines}");
    for (number, (replica, Feed { events, replay, polled })) in (1..).zip(replicas.iter().zip(feeds)) {
        writeln!(text, "[[pool.replica]]\nserver = \"s{number}\"").expect("a string");
        if *polled {
            writeln!(text, "http = \"{}\"", replica.http_addr()).expect("a string");
        }
        writeln!(text, "events = \"{events}\"").expect("a string");
        if let Some(replay) = replay {
            writeln!(text, "replay = \"{replay}\"").expect("a string");
        }
        if let Some(tokens) = &replica.ranks()[0].tokens {
            writeln!(text, "id = \"SERVE_REPLICA::app#{number}\"\ntokens = \"{tokens}\"").expect("a string");
        }
        writeln!(text, "ranks = {}", replica.ranks().len()).expect("a string");
    }
    text
}

/// The same, of which nothing but their names is told.
fn untold_pool(replicas: &[Replica]) -> String {
    let mut text = format!("[[pool]]\nbackend = \"{POOL}\"\n");
    for number in 1..=replicas.len() {
        writeln!(text, "[[pool.replica]]\nserver = \"s{number}\"").expect("a string");
    }
    text
}

/// `kvspoa run` as a process of its own.
pub(crate) struct AgentProcess {
    pub(crate) spop: SocketAddr,
    pub(crate) admin: SocketAddr,
    pub(crate) log: SocketAddr,
    pub(crate) config: PathBuf,
    /// The lines about its own addresses.
    addresses: String,
    child: Child,
}

impl AgentProcess {
    /// With these lines after those about its own addresses. HAProxy's runtime socket is the one of a test in `dir`.
    pub(crate) fn start(dir: &Path, config: &str) -> Self {
        Self::start_with(dir, config, &[])
    }

    /// The same with these variables in its environment.
    pub(crate) fn start_with(dir: &Path, config: &str, environment: &[(&str, &str)]) -> Self {
        let [spop, admin, log] = [(); 3].map(|()| SocketAddr::from(([127, 0, 0, 1], free_port())));
        let addresses = format!(
            "spop.listen = \"{spop}\"\nadmin.listen = \"{admin}\"\nlog.listen = \"{log}\"\nhaproxy.socket = \"{}\"\n",
            dir.join(RUNTIME_SOCKET).display()
        );
        let config = write(dir, "kvspoa.toml", &format!("{addresses}{config}"));
        let child = spawn(&config, environment);
        let agent = Self { spop, admin, log, config, addresses, child };
        eventually("the agent answers", || std::net::TcpStream::connect(agent.admin).ok());
        agent
    }

    /// A command of `kvspoa` against it, which must succeed; returns what it printed.
    pub(crate) fn operate(&self, args: &[&str]) -> String {
        let admin = self.admin.to_string();
        let output = Command::new(env!("CARGO_BIN_EXE_kvspoa"))
            .args(args)
            .args(["--admin", &admin])
            .output()
            .expect("the binary runs");
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    /// What it has logged.
    pub(crate) fn said(&self) -> String {
        std::fs::read_to_string(log_file(&self.config)).expect("a log")
    }

    /// As `kill -9` does.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("a process of ours");
        self.child.wait().expect("it ends");
    }

    /// Starts it again with the same configuration.
    pub(crate) fn restart(&mut self) {
        self.child = spawn(&self.config, &[]);
        self.wait_until_ready();
    }

    /// Ends it with SIGTERM and waits.
    pub(crate) fn terminate(&mut self) -> std::process::ExitStatus {
        self.signal("TERM");
        self.wait()
    }

    /// Waits until it has ended.
    pub(crate) fn wait(&mut self) -> std::process::ExitStatus {
        self.child.wait().expect("it ends")
    }

    /// Sends it a signal.
    pub(crate) fn signal(&self, name: &str) {
        signal(self.child.id(), name);
    }

    /// Puts another configuration in the place of its file, in one step: these lines after those about its addresses.
    /// Returns the file.
    pub(crate) fn rewrite(&self, lines: &str) -> &Path {
        let new = self.config.with_extension("new");
        std::fs::write(&new, format!("{}{lines}", self.addresses)).expect("written");
        std::fs::rename(&new, &self.config).expect("in place");
        &self.config
    }

    /// What `/readyz` says, whatever its status.
    pub(crate) fn readiness(&self) -> Value {
        serde_json::from_slice(&http::get(self.admin, "/readyz").body).expect("JSON")
    }

    /// The process's number.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn wait_until_ready(&self) {
        eventually("the agent is ready", || {
            std::net::TcpStream::connect(self.admin).ok()?;
            (http::get(self.admin, "/readyz").status() == 200).then_some(())
        });
    }

    /// `/explain` of a request body.
    pub(crate) fn explain(&self, path: &str, body: &Value) -> Value {
        let target = format!("/explain?pool={POOL}&path={path}&tokens=1");
        let answer =
            http::send(self.admin, &http::request("POST", &target, &[], body.to_string().as_bytes()));
        assert_eq!(answer.status(), 200, "{}", answer.text());
        serde_json::from_slice(&answer.body).expect("JSON")
    }

    /// `/readyz`, whatever its status.
    pub(crate) fn ranks(&self) -> Vec<Value> {
        self.readiness()["ranks"].as_array().expect("a list").clone()
    }

    /// The sum over all labels of a metric.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        self.metric_with(name, "")
    }

    /// The sum over all labels of which the text has `part`.
    pub(crate) fn metric_with(&self, name: &str, part: &str) -> f64 {
        let text = http::get(self.admin, "/metrics").text();
        let values: Vec<f64> = text
            .lines()
            .filter(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{'])))
            .filter(|line| line.contains(part))
            .filter_map(|line| line.rsplit(' ').next()?.parse().ok())
            .collect();
        assert!(!values.is_empty(), "no metric {name} in:\n{text}");
        values.iter().sum()
    }
}

impl Drop for AgentProcess {
    fn drop(&mut self) {
        if std::thread::panicking() && std::net::TcpStream::connect(self.admin).is_ok() {
            let metrics = http::get(self.admin, "/metrics").text();
            let told = metrics.lines().filter(|line| !line.starts_with('#') && !line.ends_with(" 0"));
            eprintln!(
                "the agent's metrics:\n{}\nIts log:\n{}",
                told.collect::<Vec<_>>().join("\n"),
                self.said()
            );
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn log_file(config: &Path) -> PathBuf {
    config.with_extension("log")
}

/// Sends a process a signal.
pub(crate) fn signal(pid: u32, name: &str) {
    let sent = Command::new("kill").args([format!("-{name}"), pid.to_string()]).status();
    assert!(sent.expect("kill runs").success(), "{name} to {pid}");
}

fn spawn(config: &Path, environment: &[(&str, &str)]) -> Child {
    let log = std::fs::OpenOptions::new().append(true).create(true).open(log_file(config)).expect("a log");
    Command::new(env!("CARGO_BIN_EXE_kvspoa"))
        .arg("run")
        .arg("--config")
        .arg(config)
        .env("KVSPOA_LOG", "warn")
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .stderr(log)
        .spawn()
        .expect("the agent starts")
}
