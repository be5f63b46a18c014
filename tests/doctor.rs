//! `kvspoa doctor` on a live site: all green where all is well, and the right line for each of twelve broken set-ups.

mod support;

use std::path::Path;
use std::process::{Command, Stdio};

use kvspoa::sim::{Replica, ReplicaArgs};
use serde_json::Value;
use support::haproxy::{binaries, for_each_binary};
use support::road::{Feed, POOL, Road, Setup, replica_args};
use support::{eventually, http, nobody};
use tokio::runtime::Runtime;

/// What `kvspoa doctor --json` said.
struct Diagnosis {
    exit_code: i32,
    report: Value,
}

impl Diagnosis {
    fn of(config: &Path, options: &[&str]) -> Self {
        let output = Command::new(env!("CARGO_BIN_EXE_kvspoa"))
            .args(["doctor", "--json", "--config"])
            .arg(config)
            .args(options)
            .stdin(Stdio::null())
            .output()
            .expect("it runs");
        let text = String::from_utf8_lossy(&output.stdout);
        let report = serde_json::from_str(&text)
            .unwrap_or_else(|_| panic!("{text}\n{}", String::from_utf8_lossy(&output.stderr)));
        Self { exit_code: output.status.code().expect("an exit status"), report }
    }

    fn checks(&self) -> impl Iterator<Item = &Value> {
        self.report["checks"].as_array().expect("a list").iter()
    }

    /// The check of this name about this replica, or about the site.
    #[track_caller]
    fn check(&self, server: &str, name: &str) -> &Value {
        let subject = if server.is_empty() { String::new() } else { format!("{POOL}/{server}") };
        self.checks()
            .find(|check| check["name"] == name && check["subject"].as_str().unwrap_or_default() == subject)
            .unwrap_or_else(|| panic!("no {name} of {server} in {:#}", self.report))
    }

    /// The check has failed, says this, and what to do.
    #[track_caller]
    fn assert_broken(&self, server: &str, name: &str, found: &str, advice: &str) {
        let check = self.check(server, name);
        let text = |field: &str| check[field].as_str().unwrap_or_default().to_owned();
        assert_eq!(text("status"), "fail", "{check:#}");
        assert!(text("found").contains(found), "{found}: {check:#}");
        assert!(text("advice").contains(advice), "{advice}: {check:#}");
    }

    /// Nothing was found about this replica that is not as it should be.
    #[track_caller]
    fn assert_well(&self, server: &str) {
        let subject = format!("{POOL}/{server}");
        let mut of_server = self.checks().filter(|check| check["subject"] == subject.as_str()).peekable();
        assert!(of_server.peek().is_some(), "nothing of {server} in {:#}", self.report);
        of_server.for_each(|check| assert_eq!(check["status"], "ok", "{check:#}"));
    }
}

#[test]
fn all_is_green_on_a_site_where_all_is_well() {
    for_each_binary(|binary| {
        let flags = ["--cpu-blocks", "4096", "--topic", "kv@a"];
        let road = Road::start(binary, 2, &flags);
        let through = road.http.to_string();
        let files = ["haproxy.cfg", "kvspoa-agent.cfg", "harness.cfg"].map(|name| beside(&road, name));
        let mut options = vec!["--through", &through];
        options.extend(files.iter().flat_map(|file| ["--haproxy-cfg", file]));
        let diagnosis = Diagnosis::of(&road.agent.config, &options);
        for check in diagnosis.checks() {
            assert_eq!(check["status"], "ok", "{check:#}");
        }
        assert_eq!(diagnosis.exit_code, 0);
        let found = |name| diagnosis.check("s1", name)["found"].as_str().unwrap_or_default().to_owned();
        assert!(found("events_alive").contains("topic kv@a, events as maps"), "{}", found("events_alive"));
        assert!(found("block_size").starts_with("16 tokens"), "{}", found("block_size"));
        assert!(found("cpu_tier").contains("describe themselves"), "{}", found("cpu_tier"));
        assert!(found("tokens_equal").starts_with("11 conversations of 11"), "{}", found("tokens_equal"));
        for name in ["tokens_stored", "agent_index", "replay", "agent_state"] {
            diagnosis.check("s2", name);
        }
        for name in
            ["agent_running", "agent_hello", "haproxy_socket", "haproxy_bufsize", "log_line", "streaming"]
        {
            diagnosis.check("", name);
        }
    });
}

/// A file in the directory of the road's configurations.
fn beside(road: &Road, name: &str) -> String {
    road.agent.config.with_file_name(name).display().to_string()
}

/// The compiled-in model with another chat template.
fn model_with(dir: &Path, name: &str, template: impl Fn(&str) -> String) -> String {
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/prompt/tiny");
    let model = dir.join(name);
    std::fs::create_dir(&model).expect("a directory");
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(tiny.join(file), model.join(file)).expect("copied");
    }
    let ours = std::fs::read_to_string(tiny.join("chat_template.jinja")).expect("a template");
    std::fs::write(model.join("chat_template.jinja"), template(&ours)).expect("written");
    model.display().to_string()
}

/// One site, in which each replica but the first is set up in another wrong way.
#[test]
fn each_broken_replica_is_found_with_the_right_line() {
    let dir = tempfile::tempdir().expect("a directory");
    let other = model_with(dir.path(), "other", |_| {
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}".to_owned()
    });
    let drifted = model_with(dir.path(), "drifted", |ours| {
        format!("{{% if tools %}}Tools come first now.{{% endif %}}{ours}")
    });
    let [silent, no_replay] = [nobody(), nobody()].map(|nobody| format!("tcp://{nobody}"));
    let connects = format!("tcp://{}", nobody());
    let flags: &[&[&str]] = &[
        &["--cpu-blocks", "4096"],
        &["--model-dir", &other, "--served-model-name", "tiny"],
        &["--model-dir", &drifted, "--served-model-name", "tiny"],
        &["--no-events"],
        &[],
        &["--events-connect"],
        &["--api-key", "secret"],
        &["--cpu-blocks", "4096", "--cpu-events", "placeholder"],
        &[],
        &["--told-block-size", "32"],
    ];
    let runtime = Runtime::new().expect("a runtime");
    let replicas: Vec<Replica> = flags
        .iter()
        .map(|flags| {
            let args = replica_args(flags);
            let events = if args.events_connect { connects.clone() } else { args.events.clone() };
            runtime.block_on(Replica::start(&ReplicaArgs { events, ..args })).expect("a replica")
        })
        .collect();
    let (mut pool, mut servers) = (String::new(), String::new());
    for (number, replica) in (1..).zip(&replicas) {
        let (http, ours) = (replica.http_addr(), &replica.ranks()[0].events);
        servers += &format!("    server s{number} {http}\n");
        pool += &format!("[[pool.replica]]\nserver = \"s{number}\"\nhttp = \"{http}\"\n");
        match number {
            5 => pool += &format!("events = \"{silent}\"\n"),
            9 => pool += &format!("events = \"{ours}\"\nreplay = \"{no_replay}\"\n"),
            _ => {}
        }
    }
    let setup = Setup { servers: Some(&servers), pool: &pool, ready: false, ..Setup::default() };
    let road = Road::assemble(&binaries()[0], runtime, replicas, &[], &setup);
    eventually("the well replica is known", || {
        let ranks = road.agent.ranks();
        ranks.iter().any(|rank| rank["server"] == "s1" && rank["state"] == "exact").then_some(())
    });

    let diagnosis = Diagnosis::of(&road.agent.config, &[]);
    diagnosis.assert_well("s1");
    let template = "kvspoa model fetch";
    diagnosis.assert_broken(
        "s2",
        "tokens_equal",
        "another chat template than the engine's: 10 of 11",
        template,
    );
    diagnosis.assert_broken("s2", "tokens_stored", "none of them with the request's tokens", template);
    diagnosis.assert_broken(
        "s3",
        "tokens_equal",
        "the renderer has drifted: 2 of 11",
        "--chat-template-content-format",
    );
    diagnosis.assert_broken("s4", "events_on", "publishes no KV events", "--kv-events-config");
    diagnosis.assert_broken("s5", "events_endpoint", "nothing listens at", "is the port right");
    diagnosis.assert_broken(
        "s6",
        "events_endpoint",
        &format!("this endpoint connects, it does not listen: {connects}"),
        "pool.events.listen",
    );
    diagnosis.assert_broken("s7", "replica_http", "asks for an API key (status 401)", "http.api_key_file");
    diagnosis.assert_broken(
        "s8",
        "cpu_tier",
        "placeholders without tokens",
        "\"self_describing_kv_events\": true",
    );
    diagnosis.assert_broken("s9", "replay", "nothing listens at", "replay_endpoint");
    diagnosis.assert_broken(
        "s10",
        "block_size",
        "the events say 16 tokens per block, the engine's /metrics 32",
        "",
    );
    assert_eq!(diagnosis.exit_code, 12, "the replicas are the first link that is broken");
}

#[test]
fn a_small_buffer_and_a_lost_log_line_are_found() {
    let setup = Setup { replicas: 1, bufsize: 16_384, log: false, ..Setup::default() };
    let road = Road::set_up(&binaries()[0], &setup);
    let through = road.http.to_string();
    let diagnosis = Diagnosis::of(&road.agent.config, &["--through", &through, "--passive"]);
    diagnosis.assert_broken(
        "",
        "log_line",
        "the request's end was never told",
        "kvspoa haproxy-config frontend",
    );
    diagnosis.assert_broken("", "haproxy_bufsize", "tune.bufsize is 16384 bytes", "tune.bufsize 1048576");
    assert_eq!(diagnosis.exit_code, 11);

    // HAProxy up to 3.0 would not even check this one: it crashes.
    let cfg = std::fs::read_to_string(beside(&road, "haproxy.cfg")).expect("the configuration");
    let crash = cfg.replace("tune.bufsize 16384", "tune.bufsize 8454144")
        + "backend guard_agent\n    mode tcp\n    option spop-check\n    server guard 127.0.0.1:1 check\n";
    let path = beside(&road, "crash.cfg");
    std::fs::write(&path, crash).expect("written");
    let options = ["--passive", "--haproxy-cfg", &path, "--haproxy-cfg", &beside(&road, "kvspoa-agent.cfg")];
    let diagnosis = Diagnosis::of(&road.agent.config, &options);
    let found = "`option spop-check` crashes HAProxy up to 3.0 at start, as `tune.bufsize` is 8454144";
    diagnosis.assert_broken("", "cfg_finding", found, "Take the line out");
}

#[test]
fn what_is_not_there_is_said_first() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = dir.path().join("kvspoa.toml");
    let write = |text: &str| std::fs::write(&config, text).expect("written");
    write("[[pool]]\nbackend = \"be\"\nodd = 1\n");
    let diagnosis = Diagnosis::of(&config, &[]);
    diagnosis.assert_broken("", "config", "odd", "kvspoa check");
    assert_eq!((diagnosis.exit_code, diagnosis.checks().count()), (64, 1));

    let [admin, spop, socket, http] = [(); 4].map(|()| nobody());
    write(&format!(
        "admin.listen = \"{admin}\"\nspop.listen = \"{spop}\"\nhaproxy.socket = \"{socket}\"\n\
         [[pool]]\nbackend = \"be_llm\"\n[[pool.replica]]\nserver = \"s1\"\nhttp = \"{http}\"\n"
    ));
    let diagnosis = Diagnosis::of(&config, &[]);
    diagnosis.assert_broken("", "agent_running", "no agent answers", "kvspoa run");
    diagnosis.assert_broken("", "agent_hello", "nothing answers SPOP", "spop.listen");
    diagnosis.assert_broken("", "haproxy_socket", "does not answer", "stats socket");
    diagnosis.assert_broken("s1", "replica_http", "does not answer", "is the engine up");
    assert_eq!(diagnosis.exit_code, 10);
}

#[test]
fn a_replica_that_renders_otherwise_is_marked_until_it_does_not() {
    let dir = tempfile::tempdir().expect("a directory");
    let other = model_with(dir.path(), "tiny", |ours| format!("{{% if tools %}}Tools.{{% endif %}}{ours}"));
    let runtime = Runtime::new().expect("a runtime");
    let start = |flags: &[&str]| runtime.block_on(Replica::start(&replica_args(flags))).expect("a replica");
    let replicas = vec![start(&[]), start(&["--model-dir", &other])];
    let feeds: Vec<Feed> = replicas.iter().map(Feed::of).collect();
    // Long: what follows must not wait for it.
    let setup = Setup { agent: "engine.parity_probe = \"1h\"\n", ..Setup::default() };
    let mut road = Road::assemble(&binaries()[0], runtime, replicas, &feeds, &setup);
    let state_is = |road: &Road, state: &str, reason: Option<&str>| {
        eventually(&format!("s2 is {state}"), || {
            let ranks = road.agent.ranks();
            let rank = ranks.iter().find(|rank| rank["server"] == "s2")?;
            (rank["state"] == state && rank["reason"].as_str() == reason).then_some(())
        });
    };
    state_is(&road, "degraded", Some("renderer_differs"));
    assert_eq!(road.agent.metric_with("kvspoa_replica_fault", "fault=\"renderer_differs\""), 1.0);
    assert_eq!(road.agent.metric_with("kvspoa_parity_probes_total", "result=\"different\""), 1.0);
    assert_eq!(
        road.agent.ranks().iter().filter(|rank| rank["state"] == "exact").count(),
        1,
        "s1 renders as we do"
    );
    eventually("it is told once", || {
        (road.agent.said().matches("renderer_differs").count() == 1).then_some(())
    });

    // It is started anew, with our template. That is asked for as soon as it answers again.
    let first = road.replicas.remove(1);
    let rank = first.ranks()[0].clone();
    let args = replica_args(&[]);
    let again = ReplicaArgs { listen: first.http_addr(), events: rank.events, replay: rank.replay, ..args };
    road.runtime.block_on(first.stop());
    eventually("it is missed", || {
        (road.agent.metric_with("kvspoa_engine_report_failures_total", "\"s2\"") > 0.0).then_some(())
    });
    road.replicas.push(road.runtime.block_on(Replica::start(&again)).expect("a replica"));
    state_is(&road, "exact", None);
    assert_eq!(road.agent.metric_with("kvspoa_replica_fault", "fault=\"renderer_differs\""), 0.0);
}

#[test]
fn a_bundle_has_the_state_and_neither_prompts_nor_secrets() {
    let dir = tempfile::tempdir().expect("a directory");
    let key = dir.path().join("key");
    std::fs::write(&key, "sk-very-secret").expect("written");
    let pool = format!(
        "http.api_key_file = \"{}\" # the password is hunter2\nprompt.default_chat_template_kwargs = {{ persona = \"Be Zaphod.\" }}\n",
        key.display()
    );
    let setup =
        Setup { replicas: 1, flags: &["--api-key", "sk-very-secret"], pool: &pool, ..Setup::default() };
    let road = Road::set_up(&binaries()[0], &setup);
    let request = http::request(
        "POST",
        "/v1/completions",
        &[("authorization", "Bearer sk-very-secret")],
        br#"{"prompt": "The answer to everything is forty-two. Tell nobody.", "max_tokens": 2}"#,
    );
    assert_eq!(http::send(road.http, &request).status(), 200);
    let out = dir.path().join("bundle.json");
    let output = Command::new(env!("CARGO_BIN_EXE_kvspoa"))
        .args(["bundle", "--passive", "--config"])
        .arg(&road.agent.config)
        .arg("--out")
        .arg(&out)
        .output()
        .expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(&out).expect("a bundle");
    for secret in ["sk-very-secret", "hunter2", "Zaphod", "forty-two", "nobody"] {
        assert!(!text.contains(secret), "{secret} is in {text}");
    }
    let bundle: Value = serde_json::from_str(&text).expect("JSON");
    let has = |list: &Value, part: &str| {
        list.as_array().is_some_and(|list| list.iter().any(|item| item.to_string().contains(part)))
    };
    assert!(has(&bundle["configuration"]["settings"], "(10 characters)"), "{:#}", bundle["configuration"]);
    assert!(has(&bundle["agent"]["/metrics"], "kvspoa_decisions_total"), "{:#}", bundle["agent"]);
    assert_eq!(bundle["agent"]["/readyz"]["ranks"][0]["server"], "s1");
    assert!(has(&bundle["haproxy"]["show info"], "Version: "), "{:#}", bundle["haproxy"]);
    assert!(has(&bundle["haproxy"]["show servers state be_llm"], "s1"), "{:#}", bundle["haproxy"]);
    assert!(has(&bundle["machine"]["limits"], "open files"), "{:#}", bundle["machine"]);
    assert!(has(&bundle["doctor"]["checks"], "agent_running"), "{:#}", bundle["doctor"]);
}
