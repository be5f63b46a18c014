//! Replicas that come, move and go while requests run: with every HAProxy that is there, by its runtime API alone.

mod support;

use kvspoa::sim::Replica;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use support::haproxy::{RUNTIME_SOCKET, for_each_binary};
use support::http::{self, Connection};
use support::load::{Load, Outcome};
use support::publisher::Everywhere;
use support::road::{AgentProcess, POOL, Road, Setup, replica_args};
use support::{eventually, held_by};

const CHAT: &str = "/v1/chat/completions";

fn replica_state(road: &Road, server: &str) -> Option<String> {
    let ranks = road.agent.ranks();
    let rank = ranks.iter().find(|rank| rank["server"] == server)?;
    Some(rank["state"].as_str().expect("a state").to_owned())
}

fn wait_for_replica(road: &Road, server: &str, state: Option<&str>) {
    eventually(&format!("{server} is {state:?}"), || {
        (replica_state(road, server).as_deref() == state).then_some(())
    });
}

fn place(road: &Road, server: &str, replica: &Replica) {
    let port = replica.http_addr().port();
    let said = road.haproxy.command(&format!("set server {POOL}/{server} addr 127.0.0.1 port {port}"));
    assert!(!said.contains("Invalid") && !said.contains("No such"), "{said}");
}

fn set_state(road: &Road, server: &str, state: &str) {
    assert_eq!(road.haproxy.command(&format!("set server {POOL}/{server} state {state}")).trim(), "");
}

/// What a replica holds of a prompt, in tokens, as the agent knows it.
fn held(road: &Road, server: &str, body: &Value) -> Option<u64> {
    let explanation = road.agent.explain(CHAT, body);
    let replicas = explanation["replicas"].as_array().expect("a list");
    replicas.iter().find(|replica| replica["server"] == server)?["gpu_tokens"].as_u64()
}

#[test]
fn replicas_are_added_drained_moved_repointed_and_removed_under_load_without_a_failed_request() {
    for_each_binary(|haproxy| {
        let setup = Setup {
            replicas: 5,
            servers: Some("    server-template t 1-3 0.0.0.0:1 disabled\n"),
            ..Setup::default()
        };
        let road = Road::set_up(haproxy, &setup);
        let [a, b, c, d, e] = &road.replicas[..] else { panic!("five") };
        let process = road.haproxy.command("show info");
        assert!(road.agent.ranks().is_empty(), "free slots are no replicas");

        // A slot gets its first replica.
        place(&road, "t1", a);
        set_state(&road, "t1", "ready");
        wait_for_replica(&road, "t1", Some("exact"));
        let load = Load::start(road.http);
        load.wait_for("t1");

        // Another slot, and a server of its own.
        place(&road, "t2", b);
        set_state(&road, "t2", "ready");
        let address = c.http_addr();
        let said = road.haproxy.command(&format!("add server {POOL}/d1 {address}"));
        assert!(said.contains("New server registered"), "{said}");
        set_state(&road, "d1", "ready");
        for server in ["t2", "d1"] {
            wait_for_replica(&road, server, Some("exact"));
            load.wait_for(server);
        }

        // A drained server gets nothing once the agent has seen it.
        set_state(&road, "d1", "drain");
        eventually("the agent knows of the drain", || {
            let labels = "server=\"d1\",state=\"drain\"";
            (road.agent.metric_with("kvspoa_server_state", labels) == 1.0).then_some(())
        });
        let served = load.wait_for_requests(40);
        assert!(!served.contains_key("d1"), "{served:?}");

        // And may then be removed.
        set_state(&road, "d1", "maint");
        eventually("the server is deleted", || {
            road.haproxy.command(&format!("del server {POOL}/d1")).contains("Server deleted").then_some(())
        });
        wait_for_replica(&road, "d1", None);

        // A slot is pointed to another replica: what the first one held counts no longer.
        let body =
            json!({ "messages": [{ "role": "user", "content": "only here ".repeat(40) }], "max_tokens": 1 });
        assert_eq!(
            http::send(a.http_addr(), &http::request("POST", CHAT, &[], body.to_string().as_bytes()))
                .status(),
            200
        );
        eventually("the first replica holds it", || held(&road, "t1", &body).filter(|tokens| *tokens > 0));
        set_state(&road, "t1", "maint");
        eventually("the slot is idle", || (road.haproxy.stat(POOL, "t1", "scur") == "0").then_some(()));
        place(&road, "t1", d);
        set_state(&road, "t1", "ready");
        eventually("the second replica has joined and holds nothing of it", || {
            (replica_state(&road, "t1")? == "exact" && held(&road, "t1", &body)? == 0).then_some(())
        });
        load.wait_for("t1");

        // A server moves while it serves.
        assert_eq!(
            http::send(b.http_addr(), &http::request("POST", CHAT, &[], body.to_string().as_bytes()))
                .status(),
            200
        );
        eventually("the replica holds it", || held(&road, "t2", &body).filter(|tokens| *tokens > 0));
        place(&road, "t2", e);
        eventually("it is another one", || {
            (replica_state(&road, "t2")? == "exact" && held(&road, "t2", &body)? == 0).then_some(())
        });
        load.wait_for("t2");

        let outcomes = load.end();
        let failed: Vec<&Outcome> = outcomes.iter().filter(|outcome| outcome.status != 200).collect();
        assert!(failed.is_empty(), "{} of {}: {:?}", failed.len(), outcomes.len(), failed.first());
        let pid = |info: &str| info.lines().find_map(|line| line.strip_prefix("Pid: ").map(str::to_owned));
        assert_eq!(pid(&process), pid(&road.haproxy.command("show info")));
        assert_eq!(road.agent.metric("kvspoa_haproxy_reloads_total"), 0.0);
        for gauge in ["kvspoa_requests", "kvspoa_prefill_tokens", "kvspoa_booked_blocks"] {
            eventually(&format!("{gauge} is 0"), || (road.agent.metric(gauge) == 0.0).then_some(()));
        }
    });
}

#[test]
fn a_file_of_replicas_is_followed() {
    let directory = tempfile::tempdir().expect("a directory");
    let list = directory.path().join("replicas.json");
    let names = |agent: &AgentProcess| {
        let ranks = agent.ranks();
        let mut names: Vec<String> =
            ranks.iter().map(|rank| rank["server"].as_str().expect("a name").to_owned()).collect();
        names.sort();
        names
    };
    let write = |text: &str| {
        // As those do who replace a file in one step.
        let new = directory.path().join("new");
        std::fs::write(&new, text).expect("written");
        std::fs::rename(&new, &list).expect("in place");
    };
    let config = format!("[[pool]]\nbackend = \"{POOL}\"\nreplicas_file = \"replicas.json\"\n");
    let agent = AgentProcess::start(directory.path(), &config);
    assert_eq!(http::get(agent.admin, "/readyz").status(), 503, "no replicas are known yet");
    write(r#"{"replicas": [{"server": "s1", "ranks": 1}, {"server": "s2", "ranks": 1}]}"#);
    eventually("both have joined", || (names(&agent) == ["s1", "s2"]).then_some(()));
    agent.wait_until_ready();
    write(r#"{"replicas": [{"server": "s3", "ranks": 1}, {"server": "s2", "ranks": 1}]}"#);
    eventually("one has left and one joined", || {
        let names = names(&agent);
        assert!(names.contains(&"s2".to_owned()), "{names:?}");
        (names == ["s2", "s3"]).then_some(())
    });
}

#[test]
fn engines_whose_publishers_connect_are_told_apart_by_their_topics() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let listen = format!("tcp://127.0.0.1:{}", support::free_port());
    let start = |topic: &str| {
        let mut args = replica_args(&["--events-connect", "--topic", topic]);
        args.events.clone_from(&listen);
        runtime.block_on(Replica::start(&args)).expect("a replica")
    };
    // One topic begins with the other.
    let replicas = ["kv@a", "kv@ab"].map(start);
    let lines: Vec<String> = (1..)
        .zip(&replicas)
        .map(|(n, replica)| format!("    server s{n} {}\n", replica.http_addr()))
        .collect();
    let (servers, pool) = (lines.concat(), format!("events.listen = \"{listen}\"\n"));
    let setup = Setup { replicas: 0, pool: &pool, servers: Some(&servers), ready: false, ..Setup::default() };
    let road = Road::set_up(&support::haproxy::binaries()[0], &setup);
    let body = |number: usize| json!({ "messages": [{ "role": "user", "content": format!("{number} is only here ").repeat(20) }], "max_tokens": 1 });
    for (number, replica) in replicas.iter().enumerate() {
        let request = http::request("POST", CHAT, &[], body(number).to_string().as_bytes());
        assert_eq!(http::send(replica.http_addr(), &request).status(), 200);
    }
    for (number, server) in ["s1", "s2"].into_iter().enumerate() {
        wait_for_replica(&road, server, Some("exact"));
        eventually("it is known to hold its own prompt", || {
            held(&road, server, &body(number)).filter(|held| *held > 0)
        });
        assert_eq!(held(&road, server, &body(1 - number)), Some(0), "{server}");
    }
    assert_eq!(road.agent.metric("kvspoa_kv_messages_of_unknown_topics_total"), 0.0);
}

/// A certificate authority, what it certified for `127.0.0.1`, and for a client; all in a directory.
fn write_certificates(dir: &Path) {
    let openssl = |args: &[&str]| {
        let output = Command::new("openssl").args(args).current_dir(dir).output().expect("openssl runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    let new = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"];
    let ca = ["-x509", "-subj", "/CN=test authority", "-keyout", "ca.key", "-out", "ca.pem"];
    openssl(&[&new[..], &ca].concat());
    for (name, extension) in
        [("server", "subjectAltName=IP:127.0.0.1"), ("client", "extendedKeyUsage=clientAuth")]
    {
        let (key, pem) = (format!("{name}.key"), format!("{name}.pem"));
        let signed =
            ["-x509", "-CA", "ca.pem", "-CAkey", "ca.key", "-subj", "/CN=test", "-addext", extension];
        let not_ca = ["-addext", "basicConstraints=critical,CA:FALSE", "-keyout", &key, "-out", &pem];
        openssl(&[&new[..], &signed, &not_ca].concat());
        let both = [&key, &pem].map(|file| std::fs::read_to_string(dir.join(file)).expect("written"));
        std::fs::write(dir.join(format!("{name}.both")), both.concat()).expect("written");
    }
    std::fs::write(dir.join("api.key"), "sk-test\n").expect("written");
}

#[test]
fn replicas_behind_tls_a_client_certificate_and_an_api_key_are_asked_with_the_pools_own() {
    let certificates = tempfile::tempdir().expect("a directory");
    let dir = certificates.path();
    write_certificates(dir);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let replica = runtime.block_on(Replica::start(&replica_args(&[]))).expect("a replica");
    // HAProxy is the engine's TLS: it wants our certificate, and for all but the requests of clients the key.
    let tls = support::nobody();
    let (cert, engine) = (dir.display(), replica.http_addr());
    let servers = format!(
        "    server s1 {tls} ssl verify required ca-file {cert}/ca.pem crt {cert}/client.both\n\
         frontend engine\n    bind {tls} ssl crt {cert}/server.both ca-file {cert}/ca.pem verify required\n    \
         http-request deny deny_status 401 unless METH_POST or {{ req.hdr(authorization) \"Bearer sk-test\" }}\n    \
         default_backend engine\nbackend engine\n    server e {engine}\n"
    );
    let with = |lines: &str| {
        let pool = format!(
            "[pool.http]\nca_file = \"{cert}/ca.pem\"\ncert_file = \"{cert}/client.pem\"\n\
             key_file = \"{cert}/client.key\"\n{lines}"
        );
        let setup = Setup { replicas: 0, pool: &pool, servers: Some(&servers), ..Setup::default() };
        Road::set_up(&support::haproxy::binaries()[0], &setup)
    };
    let road = with(&format!("api_key_file = \"{cert}/api.key\"\n"));
    wait_for_replica(&road, "s1", Some("exact"));
    eventually("its load is known", || {
        (road.agent.metric("kvspoa_engine_reports_total") > 0.0).then_some(())
    });
    let body = json!({ "messages": [{ "role": "user", "content": "Hello" }], "max_tokens": 1 });
    assert_eq!(road.post(CHAT, &body).status(), 200);
    drop(road);
    let road = with("");
    assert_eq!(replica_state(&road, "s1").as_deref(), Some("no_events"));
    assert!(road.agent.said().contains("refuses our questions"), "{}", road.agent.said());
}

/// HAProxy's runtime socket as a test makes it: so many servers, whose addresses change with every generation.
struct FakeRuntimeSocket {
    generation: Arc<AtomicU32>,
}

const SERVERS: u32 = 20;

/// What each of their engines holds.
const BLOCKS: u32 = 1000;

impl FakeRuntimeSocket {
    /// All servers have the same port.
    fn start(path: &Path, port: u16) -> Self {
        let listener = UnixListener::bind(path).expect("a socket");
        let generation = Arc::new(AtomicU32::new(0));
        let current = Arc::clone(&generation);
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let mut asked = [0; 1024];
                let _ = stream.read(&mut asked);
                let _ = stream.write_all(answer(current.load(Ordering::SeqCst), port).as_bytes());
            }
        });
        Self { generation }
    }

    fn move_all(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
    }
}

fn answer(generation: u32, port: u16) -> String {
    let mut states = String::new();
    let mut statistics = String::new();
    for number in 1..=SERVERS {
        let addr = format!("127.{}.{}.{number}", 1 + generation / 200, generation % 200);
        states.push_str(&format!("3 {POOL} {number} s{number} {addr} 2 0 {port} 0\n"));
        statistics.push_str(&format!("{POOL},s{number},0,0,,1,0\n"));
    }
    format!(
        "Pid: 7\nUptime_sec: 9\n\n1\n# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_port srv_use_ssl\n{states}\n\
         # pxname,svname,qcur,scur,slim,weight,bck\n{statistics}\n"
    )
}

#[test]
fn a_thousand_moves_leave_threads_sockets_and_memory_as_they_were() {
    let directory = tempfile::tempdir().expect("a directory");
    // One engine that answers and publishes at every address of 127.0.0.0/8.
    let listener = TcpListener::bind("0.0.0.0:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let blocks: Vec<u32> = (0..BLOCKS).collect();
    let tokens: Vec<u32> = (0..16 * BLOCKS).collect();
    let publisher =
        Everywhere::start(&json!([{ "type": "BlockStored", "block_hashes": blocks, "token_ids": tokens,
        "parent_block_hash": null, "block_size": 16 }]));
    let (events, replay) = (publisher.events_port, publisher.replay_port);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let mut connection = Connection::over(stream);
                while let Some(request) = connection.read() {
                    let sources = request.start.contains("/kv_event_sources");
                    let page = json!({ "0": { "enable_kv_cache_events": true, "endpoint": format!("tcp://*:{events}"),
                        "replay_endpoint": format!("tcp://*:{replay}") } });
                    let body = if sources { page.to_string() } else { "{}".to_owned() };
                    connection.send(&support::origin::response(&body));
                }
            });
        }
    });
    let haproxy = FakeRuntimeSocket::start(&directory.path().join(RUNTIME_SOCKET), port);
    let agent = AgentProcess::start(
        directory.path(),
        &format!("haproxy.poll = \"100ms\"\n[[pool]]\nbackend = \"{POOL}\"\n"),
    );
    let exact = || agent.ranks().iter().filter(|rank| rank["state"] == "exact").count();
    let move_all = |times: usize| {
        for _ in 0..times {
            let before = publisher.followed.load(Ordering::SeqCst);
            haproxy.move_all();
            eventually("all are followed anew, from the start", || {
                (publisher.followed.load(Ordering::SeqCst) >= before + SERVERS as usize).then_some(())
            });
        }
        eventually("all are there, with what they hold", || {
            let held = agent.metric_with("kvspoa_index_blocks", "tier=\"gpu\"");
            (exact() == SERVERS as usize && held == f64::from(SERVERS * BLOCKS)).then_some(())
        });
    };
    move_all(10);
    let (threads, files, memory) = held_by(agent.pid());
    move_all(50);
    eventually("what is closed is gone", || {
        let now = held_by(agent.pid());
        // One thread looks at the configuration file, from a second after the start on.
        (now.0 <= threads + 1 && now.1 <= files + files / 10).then_some(())
    });
    let now = held_by(agent.pid()).2;
    assert!(now < memory + memory / 4, "{memory} KiB grew to {now} KiB");
}
