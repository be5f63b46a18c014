//! The agent's configuration changes while requests run; what the service manager is told; how the agent ends.

mod support;

use kvspoa::sim::Replica;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::io::Write;
use std::net::TcpStream;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use support::haproxy::{RUNTIME_SOCKET, for_each_binary};
use support::http;
use support::load::{Load, Outcome};
use support::road::{AgentProcess, OTHER_POOL, POOL, Road, Setup, replica_args};
use support::{PATIENCE, eventually, held_by};

const CHAT: &str = "/v1/chat/completions";

/// The lines of one replica.
fn replica(name: &str, replica: &Replica) -> String {
    let rank = &replica.ranks()[0];
    format!(
        "[[pool.replica]]\nserver = \"{name}\"\nhttp = \"{}\"\nevents = \"{}\"\nreplay = \"{}\"\nranks = 1\n",
        replica.http_addr(),
        rank.events,
        rank.replay
    )
}

fn pool(backend: &str, replicas: &[String]) -> String {
    format!("[[pool]]\nbackend = \"{backend}\"\n{}", replicas.concat())
}

fn reloads(agent: &AgentProcess, result: &str) -> f64 {
    agent.metric_with("kvspoa_config_reload_total", &format!("\"{result}\""))
}

fn wait_for_reloads(agent: &AgentProcess, result: &str, count: f64) {
    eventually(&format!("{count} reloads are {result}"), || (reloads(agent, result) == count).then_some(()));
}

/// Why the other pool's replica was chosen, as the agent says; `None`: HAProxy chose.
fn reason_of_other_pool(road: &Road) -> Option<String> {
    let body = json!({ "messages": [{ "role": "user", "content": "Hello, other pool. ".repeat(20) }] });
    let request = http::request("POST", CHAT, &[("x-pool", "other")], body.to_string().as_bytes());
    let answer = http::send(road.http, &request);
    assert_eq!(answer.status(), 200, "{}", answer.text());
    answer.header("x-kv-reason").filter(|reason| !reason.is_empty()).map(str::to_owned)
}

/// What the index knows that a server's replica holds.
fn blocks(road: &Road, server: &str) -> f64 {
    road.agent.metric_with("kvspoa_index_blocks", &format!("server=\"{server}\""))
}

#[test]
fn pools_and_replicas_change_under_load_without_a_failed_request_and_the_others_keep_what_they_have() {
    for_each_binary(|haproxy| {
        let flags = &["--decode-step", "20"];
        let road = Road::set_up(haproxy, &Setup { replicas: 3, flags, other_pool: true, ..Setup::default() });
        let [first, second, other] = &road.replicas[..] else { panic!("three") };
        let (s1, s2, m1) = (replica("s1", first), replica("s2", second), replica("m1", other));
        let load = Load::start(road.http);
        load.wait_for("s1");
        load.wait_for("s2");
        assert_eq!(reason_of_other_pool(&road), None, "the agent has no such pool");
        // Some minutes of answer.
        let long = |number: usize| json!({ "prompt": format!("{number} long ").repeat(100), "max_tokens": 20_000, "stream": true, "ignore_eos": true });
        let long: Vec<_> = (0..4).map(|number| road.long_request(&long(number))).collect();

        // A pool is added, and what holds for all of them changes; the file's change alone tells.
        let policy = "select.policy = \"least_loaded\"\nprompt.queue = 7\nspop.max_in_flight = 1000\n\
                      engine.poll = \"500ms\"\nhaproxy.poll = \"500ms\"\nindex.max_bytes = \"64MiB\"\n";
        let both = [pool(POOL, &[s1.clone(), s2.clone()]), pool(OTHER_POOL, std::slice::from_ref(&m1))];
        road.agent.rewrite(&format!("{policy}{}", both.concat()));
        wait_for_reloads(&road.agent, "applied", 1.0);
        eventually("the agent chooses for the new pool", || reason_of_other_pool(&road));
        load.wait_for_requests(40);

        // One that is wrong changes nothing, and says where.
        let file = road.agent.rewrite(&format!("{policy}oops = 1\n{}", pool(OTHER_POOL, &[])));
        wait_for_reloads(&road.agent, "refused", 1.0);
        let place = format!("{}:11: oops: ", file.display());
        let refused = || road.agent.readiness()["configuration"]["refused"].clone();
        assert!(refused().as_str().is_some_and(|why| why.starts_with(&place)), "{}", refused());
        assert_eq!(road.agent.said().matches(&place).count(), 1, "{}", road.agent.said());
        assert_eq!(road.agent.metric("kvspoa_config_last_reload_successful"), 0.0);
        assert!(reason_of_other_pool(&road).is_some());

        // So does a model that can't be loaded.
        road.agent.rewrite(&format!("{}[[pool]]\nbackend = \"x\"\nmodel_dir = \"nowhere\"\n", both[0]));
        road.agent.signal("HUP");
        wait_for_reloads(&road.agent, "refused", 2.0);
        assert!(
            refused().as_str().is_some_and(|why| why.contains("model_dir: cannot read")),
            "{}",
            refused()
        );
        assert!(reason_of_other_pool(&road).is_some());
        load.wait_for_requests(40);

        // At SIGHUP a pool goes, a replica of the other one changes, and what is bound stays.
        let changed = format!("{s2}cache_blocks = 5000\n");
        let known = blocks(&road, "s1");
        assert!(known > 0.0 && blocks(&road, "s2") > 0.0);
        let resets = road.agent.metric_with("kvspoa_kv_resets_total", "server=\"s1\"");
        let replays = road.agent.metric_with("kvspoa_kv_replays_total", "server=\"s1\"");
        let on = |server: &str| {
            road.agent.metric_with("kvspoa_requests", &format!("pool=\"{POOL}\",server=\"{server}\""))
        };
        let seed = "select.seed = 1\n";
        road.agent.rewrite(&format!("{seed}{policy}{}", pool(POOL, &[s1.clone(), changed])));
        road.agent.signal("HUP");
        wait_for_reloads(&road.agent, "applied", 2.0);
        assert_eq!(road.agent.readiness()["configuration"], json!({ "takes_restart": ["select.seed"] }));
        assert_eq!(road.agent.metric("kvspoa_config_last_reload_successful"), 1.0);
        assert_eq!(reason_of_other_pool(&road), None);
        eventually("the pool is freed", || {
            let gauge = road.agent.metric_with("kvspoa_model_context_tokens", OTHER_POOL);
            (gauge == 0.0).then_some(())
        });
        let others = |rank: &Value| rank["server"] == "m1";
        assert!(!road.agent.ranks().iter().any(others), "{:?}", road.agent.ranks());
        eventually("the changed replica is known again", || (blocks(&road, "s2") > 0.0).then_some(()));
        load.wait_for("s2");

        let outcomes = load.end();
        let failed: Vec<&Outcome> = outcomes.iter().filter(|outcome| outcome.status != 200).collect();
        assert!(failed.is_empty(), "{} of {}: {:?}", failed.len(), outcomes.len(), failed.first());
        // The replica of which the same was said never left: its cache and its bookings are what they were.
        assert!(blocks(&road, "s1") >= known, "{} of {known}", blocks(&road, "s1"));
        assert_eq!(road.agent.metric_with("kvspoa_kv_resets_total", "server=\"s1\""), resets);
        assert_eq!(road.agent.metric_with("kvspoa_kv_replays_total", "server=\"s1\""), replays);
        let stayed: f64 = road.haproxy.stat(POOL, "s1", "scur").parse().expect("a count");
        eventually("the long requests alone are booked", || (on("s1") == stayed).then_some(()));
        assert_eq!(on("s2"), 0.0, "its bookings ended with it");
        drop(long);
        road.assert_no_load();
        assert_eq!(road.agent.metric("kvspoa_bookings_lost_total"), 0.0);
        assert_eq!(road.agent.metric("kvspoa_spop_panics_total"), 0.0);
    });
}

#[test]
fn fifty_reloads_leave_threads_sockets_and_memory_as_they_were() {
    let directory = tempfile::tempdir().expect("a directory");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let start = || runtime.block_on(Replica::start(&replica_args(&[]))).expect("a replica");
    let (stays, comes) = (start(), start());
    let one = pool(POOL, &[replica("s1", &stays)]);
    let two = format!("{one}{}", pool(OTHER_POOL, &[replica("m1", &comes)]));
    let agent = AgentProcess::start(directory.path(), &one);
    agent.wait_until_ready();
    let servers = || {
        let name = |rank: &Value| rank["server"].as_str().expect("a name").to_owned();
        agent.ranks().iter().map(name).collect::<HashSet<_>>()
    };
    let mut applied = 0.0;
    let mut reload = |lines: &str, has: usize| {
        agent.rewrite(lines);
        agent.signal("HUP");
        applied += 1.0;
        wait_for_reloads(&agent, "applied", applied);
        assert_eq!(servers().len(), has);
    };
    let mut come_and_go = |times: usize| {
        for _ in 0..times {
            reload(&two, 2);
            agent.wait_until_ready();
            reload(&one, 1);
        }
    };
    come_and_go(5);
    let (threads, files, memory) = held_by(agent.pid());
    come_and_go(25);
    eventually("what is closed is gone", || {
        // The runtime keeps some idle threads. One of anything for each reload would be 25.
        let now = held_by(agent.pid());
        (now.0 <= threads + 10 && now.1 <= files + 10).then_some(())
    });
    let now = held_by(agent.pid()).2;
    // What the allocator keeps of a freed model comes and goes by 20 MiB. What a pool leaves would be there 25 times.
    assert!(now < memory + 40 * 1024, "{memory} KiB grew to {now} KiB");
}

#[test]
fn a_port_that_engines_connect_to_goes_with_its_pool_and_may_be_taken_over_by_another() {
    let directory = tempfile::tempdir().expect("a directory");
    let port = support::free_port();
    let listening = |backend: &str| {
        let replica = format!("server = \"s1\"\nevents = \"@tcp://127.0.0.1:{port}\"\ntopic = \"kv@1\"\n");
        pool(backend, &[format!("[[pool.replica]]\n{replica}")])
    };
    let plain = pool("be", &["[[pool.replica]]\nserver = \"s1\"\n".to_owned()]);
    let agent = AgentProcess::start(directory.path(), &plain);
    let is_open = || TcpStream::connect(("127.0.0.1", port)).is_ok();
    let states = [
        (format!("{plain}{}", listening("be2")), true),
        (format!("{plain}{}", listening("be3")), true),
        (plain.clone(), false),
        (listening("be"), true),
    ];
    for (reload, (lines, opens)) in states.iter().enumerate() {
        agent.rewrite(lines);
        agent.signal("HUP");
        wait_for_reloads(&agent, "applied", reload as f64 + 1.0);
        let wanted = format!("after reload {reload}, open: {opens}");
        eventually(&wanted, || (is_open() == *opens).then_some(()));
    }
    assert!(!agent.said().contains("cannot join"), "{}", agent.said());
}

#[test]
fn a_template_is_read_again_at_sighup_and_the_one_before_stays_where_it_is_wrong() {
    let directory = tempfile::tempdir().expect("a directory");
    let template = |text: &str| std::fs::write(directory.path().join("chat.jinja"), text).expect("written");
    template("{{ messages[0].content }}");
    let replica = "[pool.prompt]\nchat_template = \"chat.jinja\"\n[[pool.replica]]\nserver = \"s1\"\n";
    let agent = AgentProcess::start(directory.path(), &pool(POOL, &[replica.to_owned()]));
    let body = json!({ "messages": [{ "role": "user", "content": "Hello" }] });
    let tokens = || agent.explain(CHAT, &body)["prompt_tokens"].as_u64().expect("a number");
    let short = tokens();
    agent.signal("HUP");
    wait_for_reloads(&agent, "unchanged", 1.0);
    template("And once more: {{ messages[0].content }}");
    agent.signal("HUP");
    wait_for_reloads(&agent, "applied", 1.0);
    let long = tokens();
    assert!(long > short, "{long} tokens after {short}");
    template("{% if %}");
    agent.signal("HUP");
    wait_for_reloads(&agent, "refused", 1.0);
    assert_eq!(tokens(), long);
    template("{{ messages[0].content }}");
    agent.signal("HUP");
    wait_for_reloads(&agent, "applied", 2.0);
    assert_eq!(tokens(), short);
}

#[test]
fn haproxys_runtime_socket_may_be_another_one() {
    let directory = tempfile::tempdir().expect("a directory");
    let pool = pool("be", &["[[pool.replica]]\nserver = \"s1\"\n".to_owned()]);
    let agent = AgentProcess::start(directory.path(), &pool);
    let text = std::fs::read_to_string(&agent.config).expect("written");
    let socket = directory.path().join("other.sock");
    let listener = UnixListener::bind(&socket).expect("a socket");
    let other = text.replace(RUNTIME_SOCKET, "other.sock");
    assert_ne!(other, text);
    std::fs::write(&agent.config, other).expect("written");
    agent.signal("HUP");
    listener.accept().expect("it is asked");
    // Without one, nobody is asked.
    let without: String =
        text.lines().filter(|line| !line.contains(RUNTIME_SOCKET)).flat_map(|line| [line, "\n"]).collect();
    std::fs::write(&agent.config, without).expect("written");
    agent.signal("HUP");
    wait_for_reloads(&agent, "applied", 2.0);
    assert_eq!(agent.metric("kvspoa_haproxy_socket_up"), 0.0);
    listener.set_nonblocking(true).expect("set");
    while listener.accept().is_ok() {}
    let ticks = || agent.metric("kvspoa_config_reload_total");
    agent.rewrite(&pool);
    agent.signal("HUP");
    eventually("the first socket is asked again", || (ticks() == 3.0).then_some(()));
    assert!(listener.accept().is_err(), "asked although it is no longer named");
}

/// The service manager's socket, as systemd has it.
struct Manager {
    socket: UnixDatagram,
    path: String,
}

impl Manager {
    fn start(directory: &Path) -> Self {
        let path = directory.join("notify.sock");
        let socket = UnixDatagram::bind(&path).expect("a socket");
        socket.set_read_timeout(Some(PATIENCE)).expect("set");
        Self { socket, path: path.to_str().expect("UTF-8").to_owned() }
    }

    /// The next message in which a line begins so, as its lines.
    fn told(&self, wanted: &str) -> Vec<String> {
        loop {
            let mut buffer = [0; 4096];
            let length = self.socket.recv(&mut buffer).unwrap_or_else(|error| panic!("{wanted}: {error}"));
            let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
            let lines: Vec<String> = text.lines().map(str::to_owned).collect();
            if lines.iter().any(|line| line.starts_with(wanted)) {
                return lines;
            }
        }
    }
}

#[test]
fn the_service_manager_is_told_of_readiness_reloads_life_and_the_end() {
    let directory = tempfile::tempdir().expect("a directory");
    let manager = Manager::start(directory.path());
    let one = "[[pool]]\nbackend = \"be\"\n[[pool.replica]]\nserver = \"s1\"\n";
    let environment = [("NOTIFY_SOCKET", manager.path.as_str()), ("WATCHDOG_USEC", "600000")];
    let mut agent = AgentProcess::start_with(directory.path(), one, &environment);
    assert_eq!(manager.told("READY=1"), ["READY=1", "STATUS=serving 1 pool(s)"]);
    for _ in 0..3 {
        manager.told("WATCHDOG=1");
    }
    let two = format!("{one}[[pool]]\nbackend = \"be2\"\n[[pool.replica]]\nserver = \"s1\"\n");
    for (lines, status) in
        [(two.as_str(), "STATUS=serving 2 pool(s)"), ("oops", "STATUS=serving by the configuration before: ")]
    {
        agent.rewrite(lines);
        agent.signal("HUP");
        let reloading = manager.told("RELOADING=1");
        let time = reloading.iter().find_map(|line| line.strip_prefix("MONOTONIC_USEC="));
        assert!(time.is_some_and(|time| time.parse::<u64>().is_ok()), "{reloading:?}");
        let ready = manager.told("READY=1");
        assert!(ready.iter().any(|line| line.starts_with(status)), "{ready:?}");
    }
    agent.signal("TERM");
    manager.told("STOPPING=1");
    assert!(agent.wait().success());
}

#[test]
fn the_agent_ends_under_load_without_a_failed_request() {
    for_each_binary(|haproxy| {
        let mut road = Road::start(haproxy, 2, &[]);
        let load = Load::start(road.http);
        load.wait_for_requests(20);
        assert!(road.agent.terminate().success());
        load.wait_for_requests(20);
        let failed = load.end().into_iter().filter(|outcome| outcome.status != 200).count();
        assert_eq!(failed, 0);
    });
}

#[test]
fn a_second_signal_ends_the_agent_at_once() {
    let directory = tempfile::tempdir().expect("a directory");
    let pool = "[[pool]]\nbackend = \"be\"\n[[pool.replica]]\nserver = \"s1\"\n";
    let mut agent = AgentProcess::start(directory.path(), pool);
    // A connection that owes the rest of a frame is waited for.
    let mut connection = TcpStream::connect(agent.spop).expect("connected");
    connection.write_all(&[0, 0, 1, 0, 1]).expect("sent");
    // Both wait for the process when it goes on.
    for signal in ["STOP", "TERM", "INT", "CONT"] {
        agent.signal(signal);
    }
    let status = agent.wait();
    assert!(matches!(status.code(), Some(130 | 143)), "{status:?}, {:?}", status.signal());
}
