//! The `kvspoa` command as a person or a script meets it.

use serde_json::{Value, json};
use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

fn kvspoa(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvspoa")).args(args).output().expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn check(config: &str) -> Output {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kvspoa.toml");
    std::fs::write(&path, config).expect("written");
    kvspoa(&["check", "--config", path.to_str().expect("UTF-8")])
}

#[test]
fn check_accepts_a_good_file_and_says_what_it_read() {
    let output =
        check("[[pool]]\nbackend = \"be\"\n[[pool.replica]]\nserver = \"s1\"\nevents = \"tcp://h:1\"\n");
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(
        text(&output.stdout).ends_with("kvspoa.toml: ok, 1 pool(s), 1 replica(s)\n"),
        "{}",
        text(&output.stdout)
    );
}

/// `kvspoa check` of a small file, with an environment of its own.
fn check_with(args: &[&str], variables: &[(&str, &str)]) -> Output {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kvspoa.toml");
    std::fs::write(&path, "haproxy.socket = \"/h\"\n[[pool]]\nbackend = \"be\"\n").expect("written");
    Command::new(env!("CARGO_BIN_EXE_kvspoa"))
        .args(["check", "--config", path.to_str().expect("UTF-8")])
        .args(args)
        .envs(variables.iter().copied())
        .output()
        .expect("the binary runs")
}

#[test]
fn check_tells_each_value_and_where_it_came_from() {
    let variables = [("KVSPOA_POLICY", "dynamo"), ("DYN_ROUTER_PREFILL_LOAD_SCALE", "2")];
    let args = ["--json", "--deadline", "300ms"];
    let output = check_with(&args, &variables);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let told: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let settings = told["settings"].as_array().expect("an array");
    let of = |key: &str| {
        let setting = settings.iter().find(|setting| setting["key"] == key);
        let setting = setting.unwrap_or_else(|| panic!("no {key} in {told}"));
        let place = setting["where"].as_str().expect("a place").to_owned();
        (setting["value"].clone(), setting["from"].clone(), place)
    };
    let place = |value: Value, from: &str, place: &str| (value, json!(from), place.to_owned());
    assert_eq!(of("spop.deadline"), place(json!("300ms"), "flag", "--deadline"));
    assert_eq!(of("select.policy"), place(json!("dynamo"), "environment", "KVSPOA_POLICY"));
    assert_eq!(
        of("select.dynamo.prefill_load_scale"),
        place(json!(2.0), "environment", "DYN_ROUTER_PREFILL_LOAD_SCALE")
    );
    assert_eq!(of("engine.poll"), place(json!("1s"), "default", "default"));
    assert!(of("pool[be].backend").2.ends_with("kvspoa.toml:3"));

    let output = check_with(&args[1..], &variables);
    let said = text(&output.stdout);
    let line =
        |key: &str| said.lines().find(|line| line.starts_with(key)).unwrap_or_else(|| panic!("{said}"));
    assert_eq!(
        line("spop.deadline").split_whitespace().collect::<Vec<_>>(),
        ["spop.deadline", "300ms", "--deadline"]
    );
}

#[test]
fn check_weighs_the_buffer_of_rays_variable_where_no_haproxy_answers() {
    let bufsize = ("RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE", "8454144");
    let output = check_with(&["--json", "--maxconn", "1000000000"], &[bufsize]);
    let told: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(told["memory"]["haproxy"]["bufsize"], 8_454_144);
    let warnings = told["warnings"].to_string();
    assert!(output.status.success() && warnings.contains("HAProxy's buffers may come to"), "{warnings}");
    assert!(told["memory"]["kvspoa"]["at_most_bytes"].as_u64() > Some(1 << 30), "{told}");
}

#[test]
fn check_refuses_a_wrong_variable_and_warns_of_a_doubtful_one() {
    for (name, value) in [("KVSPOA_SPOP_DEADLIN", "1s"), ("DYN_ROUTER_TEMPERATURE", "warm")] {
        let output = check_with(&[], &[(name, value)]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(64), "{said}");
        assert!(said.contains(name) && said.lines().count() == 1, "{said}");
    }
    let output = check_with(&[], &[("RAY_SERVE_SESSION_ID_HEADER", "x")]);
    assert!(output.status.success());
    assert!(
        text(&output.stderr).starts_with("warning: RAY_SERVE_SESSION_ID_HEADER "),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn check_refuses_a_bad_file_with_64_and_one_line_that_names_file_line_and_key() {
    for (config, place) in [
        ("[[pool]]\nbackend = \"be\"\nmodell = \"m\"\n", "kvspoa.toml:3: modell: unknown field"),
        ("[spop]\ndeadline = 400\n", "kvspoa.toml:2: deadline: "),
        (
            "[[pool]]\nbackend = \"be\"\n[[pool.replica]]\nserver = \"s\"\nevents = \"h:1\"\n",
            "kvspoa.toml:5: events: ",
        ),
    ] {
        let output = check(config);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(64), "{said}");
        assert!(said.contains(place), "{said:?} does not name {place:?}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[test]
fn a_model_directory_that_cannot_be_used_is_a_mistake_of_the_configuration() {
    let output = check("haproxy.socket = \"/h\"\n[[pool]]\nbackend = \"be\"\nmodel_dir = \"nowhere\"\n");
    assert_eq!(output.status.code(), Some(64));
    let said = text(&output.stderr);
    assert!(said.contains("kvspoa.toml:4: model_dir: cannot read") && said.contains("nowhere"), "{said}");
    assert_eq!(said.matches("No such file").count(), 1, "{said}");
}

#[test]
fn wrong_usage_ends_with_64_and_help_with_0() {
    assert_eq!(kvspoa(&["rune"]).status.code(), Some(64));
    assert_eq!(kvspoa(&["run", "--config", "/nonexistent/kvspoa.toml"]).status.code(), Some(64));
    for command in [
        "run",
        "check",
        "explain",
        "haproxy-config",
        "pool",
        "replica",
        "shadow-report",
        "simulate",
        "demo",
        "replay",
    ] {
        let output = kvspoa(&[command, "--help"]);
        assert!(output.status.success());
        assert!(text(&output.stdout).contains("Usage: kvspoa"), "{}", text(&output.stdout));
    }
}

#[test]
fn a_port_that_is_taken_is_named_and_ends_with_70() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = taken.local_addr().expect("an address").to_string();
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kvspoa.toml");
    std::fs::write(&path, "haproxy.socket = \"/h\"\n[[pool]]\nbackend = \"be\"\n").expect("written");
    let args = ["run", "--config", path.to_str().expect("UTF-8"), "--spop-listen", &addr];
    let output = kvspoa(&args);
    assert_eq!(output.status.code(), Some(70), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains(&addr), "{}", text(&output.stderr));
}

#[test]
fn the_packaged_configuration_is_accepted() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/deb/kvspoa.toml");
    let output = kvspoa(&["check", "--config", path]);
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn haproxy_config_prints_the_lines_for_the_users_own_names() {
    let output = kvspoa(&["haproxy-config", "agent", "--agent", "10.0.0.9:9999"]);
    assert!(output.status.success());
    assert!(text(&output.stdout).contains("server agent 10.0.0.9:9999 "));
}

/// A running `kvspoa run` of one pool, logging all it can.
struct Agent {
    child: Child,
    admin: String,
    _dir: tempfile::TempDir,
}

impl Agent {
    fn start() -> Self {
        let free =
            || TcpListener::bind("127.0.0.1:0").and_then(|s| s.local_addr()).expect("a port").to_string();
        let (spop, admin, log) = (free(), free(), free());
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("kvspoa.toml");
        let pool = "[[pool]]\nbackend = \"be\"\n[[pool.replica]]\nserver = \"s1\"\n";
        std::fs::write(&path, pool).expect("written");
        let child = Command::new(env!("CARGO_BIN_EXE_kvspoa"))
            .args(["run", "--log", "trace", "--spop-listen", &spop, "--admin-listen", &admin])
            .args(["--log-listen", &log, "--config"])
            .arg(&path)
            .stderr(Stdio::piped())
            .spawn()
            .expect("the agent starts");
        Self { child, admin, _dir: dir }
    }

    /// Sends a POST as soon as the admin port is open, and reads to the end of the connection.
    fn post(&self, target: &str, body: &str) -> String {
        let deadline = Instant::now() + Duration::from_secs(30);
        let mut client = loop {
            match TcpStream::connect(&self.admin) {
                Ok(client) => break client,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let length = body.len();
        write!(client, "POST {target} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n{body}")
            .expect("sent");
        let mut answer = String::new();
        client.read_to_string(&mut answer).expect("an answer");
        answer
    }

    /// The same with a GET.
    fn get(&self, target: &str) -> String {
        let mut client = TcpStream::connect(&self.admin).expect("it is open");
        write!(client, "GET {target} HTTP/1.1\r\nHost: a\r\n\r\n").expect("sent");
        let mut answer = String::new();
        client.read_to_string(&mut answer).expect("an answer");
        answer
    }

    /// Ends it; what it logged.
    fn end(mut self) -> String {
        self.child.kill().expect("a process of ours");
        let mut log = String::new();
        self.child.stderr.take().expect("piped").read_to_string(&mut log).expect("text");
        log
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn no_prompt_is_logged_at_any_level() {
    let agent = Agent::start();
    let answer = agent.post("/explain", r#"{"messages":[{"role":"user","content":"Xylophone"}]}"#);
    assert!(answer.contains("\"prompt_tokens\":"), "{answer}");
    let log = agent.end();
    assert!(log.contains("kvspoa is ready"), "{log}");
    for line in log.lines() {
        // A line of another crate could hold a single character of the prompt.
        assert!(line.contains("kvspoa::") && !line.contains("Xylophone"), "{line}");
    }
}

#[test]
fn an_explanation_has_the_fields_that_others_rely_on() {
    let agent = Agent::start();
    let target = "/explain?pool=be&path=/v1/completions&tokens=1";
    let answer = agent.post(target, r#"{"prompt":[1,2,3]}"#);
    let (_, body) = answer.split_once("\r\n\r\n").expect("a body");
    let explained: Value = serde_json::from_str(body).expect("JSON");
    for field in ["prompt_tokens", "block_size", "state", "reason", "chosen", "replicas", "token_ids"] {
        assert!(explained.get(field).is_some(), "no {field} in {explained}");
    }
    assert_eq!((&explained["state"], &explained["chosen"]), (&json!("load_only"), &json!("s1")));
    assert_eq!(explained["token_ids"], json!([1, 2, 3]));
    let replica = &explained["replicas"][0];
    for field in [
        "server",
        "rank",
        "state",
        "gpu_tokens",
        "cpu_tokens",
        "applied_seq",
        "prefill_tokens",
        "decode_blocks",
        "cost",
    ] {
        assert!(replica.get(field).is_some(), "no {field} in {replica}");
    }
    assert!(agent.post("/explain?pool=other", "{}").starts_with("HTTP/1.1 404 "));
    let explain = |body: &str| -> Value {
        let answer = agent.post("/explain", body);
        serde_json::from_str(answer.split_once("\r\n\r\n").expect("a body").1).expect("JSON")
    };
    // What the prompt took, and what of it was known.
    let turns = ["One", "Two", "Three"].map(|said| format!(r#"{{"role":"user","content":"{said}"}}"#));
    let of = |count: usize| explain(&format!(r#"{{"messages":[{}]}}"#, turns[..count].join(",")));
    let (first, second, again) = (of(2), of(3), of(3));
    let number = |explained: &Value, name: &str| explained[name].as_u64().expect("a number");
    for name in ["text_bytes", "prompt_tokens", "pieces", "reused_pieces"] {
        assert!(number(&second, name) > number(&first, name), "{name}: {second} after {first}");
    }
    for stage in ["prompt", "parse", "render", "tokenize", "lookup", "choice"] {
        assert!(second["micros"][stage].is_u64(), "{stage}: {second}");
    }
    assert_eq!([&first, &second, &again].map(|one| one["repeat"] == true), [false, false, true]);
    // Whoever asks why there are no tokens is told of the place, and not of the text.
    for (body, reason, why) in [
        (r#"{"messages":"Xylophone"}"#, "body_malformed", "the field messages has an unexpected type"),
        (
            r#"{"messages":[{"role":"user","content":"a"}],"tools":[]}"#,
            "refused",
            "the engine will refuse the request: an empty list of tools",
        ),
    ] {
        let explained = explain(body);
        assert_eq!((&explained["reason"], &explained["why"]), (&json!(reason), &json!(why)));
    }
    agent.end();
}

/// A command of `kvspoa` against the agent: its status, and what it said.
fn operate(agent: &Agent, args: &[&str]) -> (Option<i32>, String) {
    let output = kvspoa(&[args, &["--admin", &agent.admin]].concat());
    (output.status.code(), text(&output.stdout) + &text(&output.stderr))
}

#[test]
fn a_reader_that_leaves_is_no_failure_and_a_full_disk_is_one() {
    let agent = Agent::start();
    assert!(agent.post("/explain", "{}").starts_with("HTTP/1.1 200 "));
    let printing: [&[&str]; 5] = [
        &["pool", "--admin", &agent.admin],
        &["replica", "--json", "--admin", &agent.admin],
        &["haproxy-config", "all"],
        &["doctor", "--config", "/nowhere"],
        &["bundle", "--config", "/nowhere", "--out", "-"],
    ];
    for args in printing {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let full = std::fs::File::create("/dev/full").expect("a full disk");
        for (out, expected) in [(Stdio::from(writer), None), (Stdio::from(full), Some(70))] {
            let output = Command::new(env!("CARGO_BIN_EXE_kvspoa")).args(args).stdout(out).output();
            let output = output.expect("the binary runs");
            let (status, said) = (output.status.code(), text(&output.stderr));
            let wanted = expected.unwrap_or(if args[0] == "doctor" { 64 } else { 0 });
            assert_eq!((status, said.contains("panicked")), (Some(wanted), false), "{args:?}: {said}");
        }
    }
    agent.end();
}

#[test]
fn a_bundle_is_for_nobody_else() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().expect("a directory");
    let [new, old] = ["new.json", "old.json"].map(|name| dir.path().join(name));
    std::fs::write(&old, "of before").expect("written");
    std::fs::set_permissions(&old, PermissionsExt::from_mode(0o644)).expect("for all to read");
    for path in [new, old] {
        let output = kvspoa(&["bundle", "--config", "/nowhere", "--out", path.to_str().expect("UTF-8")]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let mode = std::fs::metadata(&path).expect("written").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{}", path.display());
    }
}

#[test]
fn an_operator_is_told_what_was_done_and_what_was_not() {
    let agent = Agent::start();
    assert!(agent.post("/explain", "{}").starts_with("HTTP/1.1 200 "));
    assert_eq!(
        operate(&agent, &["pool", "be", "share=0.25"]),
        (Some(0), "be: share=0.25, was on\n".to_owned())
    );
    let (status, list) = operate(&agent, &["pool"]);
    assert!(status == Some(0) && list.contains("share=0.25"), "{list}");
    let (status, list) = operate(&agent, &["replica", "--json"]);
    let list: Value = serde_json::from_str(&list).expect("JSON");
    assert_eq!((status, &list[0]["server"], &list[0]["pool"]), (Some(0), &json!("s1"), &json!("be")));
    for (args, status, said) in [
        (&["pool", "other", "on"][..], 64, "no pool named `other` is configured; there are: be"),
        (&["pool", "be", "half"], 64, "`half` is no mode: on, shadow, off, or share=0.0 to share=1.0"),
        (&["pool", "other"], 64, "no pool named `other`"),
        (&["replica", "be/s9", "ignore"], 64, "be/s9: the pool has no such replica"),
        (&["replica", "s1", "resync"], 64, "no rank of the replica has a replay endpoint"),
        (&["replica", "s9"], 64, "no replica named `s9`"),
    ] {
        let (ended, told) = operate(&agent, args);
        assert!(ended == Some(status) && told.contains(said), "{args:?}: {ended:?} {told}");
    }
    let form = agent.post("/pool", "mode=off");
    assert!(form.starts_with("HTTP/1.1 415 "), "a page in a browser could send that: {form}");
    assert!(operate(&agent, &["pool"]).1.contains("share=0.25"));
    agent.end();
}

#[test]
fn the_status_page_needs_nothing_from_elsewhere_and_reads_what_status_has() {
    let agent = Agent::start();
    assert!(agent.post("/explain", "{}").starts_with("HTTP/1.1 200 "));
    let page = agent.get("/");
    let (head, html) = page.split_once("\r\n\r\n").expect("a body");
    assert!(
        head.starts_with("HTTP/1.1 200 ") && head.contains("content-security-policy: default-src 'none'"),
        "{head}"
    );
    assert!(
        !html.contains("http://") && !html.contains("https://") && !html.contains("src="),
        "all is in the page"
    );
    let status = agent.get("/status");
    let (_, body) = status.split_once("\r\n\r\n").expect("a body");
    let status: Value = serde_json::from_str(body).expect("JSON");
    let (pool, replica) = (&status["pools"][0], &status["pools"][0]["replicas"][0]);
    let rank = &replica["ranks"][0];
    for (from, name) in
        [("pool.", pool), ("replica.", replica), ("rank.", rank)].into_iter().flat_map(|(from, json)| {
            let fields = html
                .split(from)
                .skip(1)
                .map(|rest| rest.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next());
            fields.flatten().map(|name| (json, name.to_owned())).collect::<Vec<_>>()
        })
    {
        assert!(from.get(&name).is_some(), "the page reads `{name}`, which is not in {from}");
    }
    agent.end();
}

/// Plays a small workload and returns the policies' outcomes, in order.
fn replay(args: &str) -> Vec<Value> {
    let mut args: Vec<&str> = args.split(' ').collect();
    if !args.contains(&"--warm-up") {
        args.extend(["--warm-up", "20"]);
    }
    let output = kvspoa(&[&["replay", "--json"], &args[..]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let Value::Array(rows) = serde_json::from_slice(&output.stdout).expect("JSON") else {
        panic!("an array")
    };
    rows
}

fn figure(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_else(|| panic!("no {name} in {row}"))
}

#[test]
fn a_replay_gives_every_figure_of_every_policy_and_the_same_for_a_seed() {
    let args = "groups --requests 120 --replicas 4 --policies cost,round_robin";
    let rows = replay(args);
    assert_eq!(rows, replay(args));
    assert_ne!(rows, replay(&format!("{args} --seed 2")));
    let names: Vec<_> = rows.iter().map(|row| &row["policy"]).collect();
    assert_eq!(names, ["cost", "round_robin"]);
    for row in &rows {
        assert_eq!(figure(row, "requests"), 100.0);
        assert!((0.0..1.0).contains(&(figure(row, "gpu_hit") + figure(row, "cpu_hit"))), "{row}");
        let [p50, p90, p99] = ["50", "90", "99"].map(|p| figure(row, &format!("ttft_p{p}_seconds")));
        assert!(0.0 < p50 && p50 <= p90 && p90 <= p99, "{row}");
        assert!(figure(row, "ttft_mean_seconds") < figure(row, "e2e_mean_seconds"), "{row}");
        assert!(figure(row, "tpot_mean_seconds") > 0.01, "a step takes 10 ms: {row}");
        assert!(figure(row, "busy_balance") >= 1.0 && figure(row, "slo_share") <= 1.0, "{row}");
    }
}

#[test]
fn a_replay_sweeps_weights_draws_a_chart_and_names_what_is_wrong() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_owned();
    let (trace, chart) = (path("trace.jsonl"), path("chart.svg"));
    let line = |ids: &str| {
        format!("{{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 2, \"hash_ids\": {ids}}}\n")
    };
    std::fs::write(&trace, line("[1, 2]") + &line("[1, 3]")).expect("written");
    let args = ["--policies", "cost", "--sweep", "own_weight=1,2", "--set", "band_blocks=0", "--svg", &chart];
    let output = kvspoa(&[&["replay", &trace, "--warm-up", "0"], &args[..]].concat());
    let said = text(&output.stdout);
    assert!(output.status.success() && said.starts_with("| policy"), "{said}{}", text(&output.stderr));
    assert!(said.contains("cost own_weight=1 ") && said.contains("cost own_weight=2 "), "{said}");
    assert!(std::fs::read_to_string(chart).expect("a chart").starts_with("<svg "));

    std::fs::write(&trace, line("[1, 2]") + &line("[1]")).expect("written");
    for (args, what) in [
        (vec![trace.as_str()], "trace.jsonl:2: 1 hash_ids"),
        (vec!["/nonexistent.jsonl"], "/nonexistent.jsonl: No such file"),
        (vec!["hot", "--set", "own_wait=1"], "no weight \"own_wait\""),
        (vec!["hot", "--gpu-blocks", "8"], "too small"),
        (vec!["hot", "--requests", "200"], "--warm-up of 500"),
    ] {
        let output = kvspoa(&[&["replay"], &args[..]].concat());
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(64), "{said}");
        assert!(said.contains(what) && said.lines().count() == 1, "{said:?} does not say {what:?}");
    }
}

#[test]
fn a_record_is_played_by_its_own_blocks_and_reported_of() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("decisions.jsonl");
    let line = |at: u64| {
        json!({
            "kvspoa": 1, "at_ms": at * 100, "pool": "be", "mode": "shadow", "session": at % 3, "prompt_tokens": 170,
            "block_tokens": 16, "blocks": [[1 + 10 * (at % 3), 10]], "chosen": "s1", "chosen_cached": 160, "served": "s2",
            "served_cached": 0, "response_ms": 20, "total_ms": 90, "normal": true,
        })
    };
    let lines: String = (0..60).map(|at| line(at).to_string() + "\n").collect();
    std::fs::write(&path, lines).expect("written");
    let path = path.to_str().expect("UTF-8");
    let rows = replay(&format!("{path} --policies cost --replicas 2"));
    assert!(figure(&rows[0], "gpu_hit") > 0.8, "blocks of 16 tokens: {rows:?}");
    let output = kvspoa(&["shadow-report", "--file", path, "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((&report["requests"], &report["model"]["block_tokens"]), (&json!(60), &json!(16)));
    assert!(report["index_chosen_share"].as_f64() > Some(0.9), "{report:#}");
    assert_eq!(kvspoa(&["shadow-report", "--file", "/nonexistent"]).status.code(), Some(70));
}

/// Times are virtual and seeds fixed, so the figures are the same on every machine.
#[test]
fn the_default_policy_stays_ahead_of_its_baselines() {
    for (workload, bounds) in [
        // Who sees caches only, and not what is booked, computes the common beginning of a fan-out again and again.
        (
            "fanout --requests 1000 --warm-up 200 --replicas 4 --speed 0.5",
            &[("exact", 0.85), ("exact_tuned", 0.95)][..],
        ),
        // From the start, where each replica fills its empty cache with what is hot, and later.
        ("hot --requests 240 --replicas 4 --speed 0.5", &[("dynamo", 0.95), ("exact_tuned", 1.0)]),
        (
            "hot --requests 1200 --warm-up 200 --replicas 4 --speed 0.5",
            &[("dynamo", 1.0), ("exact_tuned", 1.0)],
        ),
        ("groups --requests 300 --replicas 4 --speed 0.5", &[("dynamo", 0.85), ("round_robin", 0.35)]),
        // Who follows the common head fills one small cache beside empty ones.
        ("head --requests 400 --replicas 4 --gpu-blocks 160 --cpu-blocks 0", &[("exact_tuned", 0.5)]),
    ] {
        let names: Vec<&str> = bounds.iter().map(|(name, _)| *name).collect();
        let rows = replay(&format!("{workload} --policies cost,{}", names.join(",")));
        let ours = figure(&rows[0], "ttft_mean_seconds");
        for (row, (name, ratio)) in rows[1..].iter().zip(bounds) {
            let theirs = figure(row, "ttft_mean_seconds");
            assert!(ours <= ratio * theirs, "{workload}: {ours:.3} s, {name} {theirs:.3} s");
        }
    }
}
