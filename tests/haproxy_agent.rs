//! HAProxy with the forms of `haproxy/` and an agent that answers, is wrong, hangs or dies.

mod support;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use kvspoa::lifecycle::log_line::{RequestEnd, Skip};
use spop::TypedData;
use support::agent::StubAgent;
use support::haproxy::for_each_binary;
use support::http::{self, Connection};
use support::origin::{Origin, response};
use support::site::{Site, World};
use support::{eventually, free_port};

/// A request under a path of its own: the answer's body, and how HAProxy says it ended.
fn ask(world: &World, site: &Site, path: &str) -> (String, RequestEnd) {
    let answer = http::post(site.http, path, &[]);
    assert_eq!(answer.status(), 200, "{path}: {answer:?}");
    (answer.text(), world.agent_log.end(&format!(" {path} ")))
}

fn agent_is(site: &Site, status: &str) {
    site.haproxy.wait_for_server("kvspoa_agent", "agent", status);
}

fn nobody() -> SocketAddr {
    ([127, 0, 0, 1], free_port()).into()
}

#[test]
fn the_named_server_gets_the_request_and_the_agent_what_it_needs() {
    for_each_binary(|binary| {
        let world = World::new();
        let agent =
            StubAgent::answering(&[("server", "r2"), ("reason", "a \"good\" one]"), ("match", "128")]);
        let site = world.start(binary, agent.address);
        agent_is(&site, "UP");
        for n in 0..4 {
            let (body, end) = ask(&world, &site, &format!("/v1/completions/{n}"));
            assert_eq!(body, "r2");
            assert_eq!((end.wanted.as_deref(), end.served.as_deref()), (Some("r2"), Some("r2")));
            assert_eq!(end.reason.as_deref(), Some("a \"good\" one]"));
            assert_eq!(
                (end.pool.as_str(), end.skip, end.spoe_error, end.status),
                ("llm", None, None, Some(200))
            );
            assert!(
                end.termination.is_normal() && end.agent_wait.is_some() && end.total.is_some(),
                "{end:?}"
            );
        }
        http::send(
            site.http,
            &http::request(
                "POST",
                "/v1/chat/completions?x=1",
                &[("x-session-id", "s1"), ("content-type", "application/json"), ("content-encoding", "br")],
                b"{\"n\":1}",
            ),
        );
        let messages = agent.messages();
        let message = messages.last().expect("a message");
        let id = world.agent_log.end(" /v1/chat/completions").request;
        let names: Vec<&str> = message.args.iter().map(|(name, _)| name.as_str()).collect();
        let expected =
            ["v", "rid", "pool", "method", "path", "session", "len", "eom", "ctype", "cenc", "body"];
        assert_eq!(names, expected);
        let text = |name: &str| match message.get(name) {
            Some(TypedData::String(text)) => text.clone(),
            Some(TypedData::Binary(bytes)) => String::from_utf8_lossy(bytes).into_owned(),
            other => format!("{other:?}"),
        };
        assert_eq!(kvspoa::units::RequestId::parse(text("rid").as_bytes()), Some(id));
        assert_eq!(text("pool"), "llm");
        assert_eq!(text("method"), "POST");
        assert_eq!(text("path"), "/v1/chat/completions");
        assert_eq!(text("session"), "s1");
        assert_eq!(text("len"), "7");
        assert_eq!(text("ctype"), "application/json");
        assert_eq!(text("cenc"), "br");
        assert_eq!(text("body"), "{\"n\":1}");
        assert_eq!(message.get("eom"), Some(&TypedData::Bool(true)));
        assert!(
            matches!(message.get("v"), Some(TypedData::Int32(1) | TypedData::Int64(1))),
            "{:?}",
            message.get("v")
        );
    });
}

#[test]
fn without_an_agent_requests_are_balanced_and_wait_for_nothing() {
    for_each_binary(|binary| {
        let world = World::new();
        let site = world.start(binary, nobody());
        agent_is(&site, "DOWN");
        let bodies: Vec<String> = (0..4)
            .map(|n| {
                let (body, end) = ask(&world, &site, &format!("/v1/completions/{n}"));
                assert_eq!((end.skip, end.wanted, end.agent_wait), (Some(Skip::AgentDown), None, None));
                body
            })
            .collect();
        assert_eq!(bodies, ["r1", "r2", "r1", "r2"]);
        assert_eq!(http::get(site.http, "/v1/models/1").status(), 200);
        assert_eq!(world.agent_log.end(" /v1/models/1 ").skip, Some(Skip::Method));
    });
}

#[test]
fn an_unknown_server_is_balanced() {
    for_each_binary(|binary| {
        let world = World::new();
        let agent = StubAgent::answering(&[("server", "r9")]);
        let site = world.start(binary, agent.address);
        agent_is(&site, "UP");
        let bodies = [0, 1].map(|n| ask(&world, &site, &format!("/v1/completions/{n}")).0);
        assert_eq!(bodies, ["r1", "r2"]);
        let end = world.agent_log.end(" /v1/completions/1 ");
        assert_eq!((end.wanted.as_deref(), end.served.as_deref()), (Some("r9"), Some("r2")));
    });
}

#[test]
fn headers_of_ours_come_from_the_agent_alone() {
    let spoofed = [
        ("x-kv-server", "evil"),
        ("X-KV-Anything", "evil"),
        ("X-Data-Parallel-Rank", "7"),
        ("x-serve-router-kv-token-key", "evil"),
        ("x-serve-router-other", "evil"),
        ("x-kvx", "the client's own"),
    ];
    for_each_binary(|binary| {
        let world = World::new();
        let agent = StubAgent::start(Arc::new(|message| {
            let bare = message.get("path") == Some(&TypedData::String("/v1/bare".to_owned()));
            let all =
                vec![("dp_rank", TypedData::UInt32(3)), ("token_key", TypedData::String("k1".to_owned()))];
            Some(if bare { Vec::new() } else { all })
        }));
        let site = world.start(binary, agent.address);
        agent_is(&site, "UP");
        let arrived = |path: &str| {
            http::send(site.http, &http::request("POST", path, &spoofed, b"{}"));
            let request = [&world.r1, &world.r2].into_iter().find_map(|origin| origin.request(path));
            let ours = |name: &str| {
                name.starts_with("x-kv") || name.starts_with("x-serve-") || name.contains("rank")
            };
            let mut headers = request.expect("it arrived").headers;
            headers.retain(|(name, _)| ours(name));
            headers.sort();
            headers.into_iter().map(|(name, value)| format!("{name}: {value}")).collect::<Vec<_>>()
        };
        assert_eq!(
            arrived("/v1/full"),
            ["x-data-parallel-rank: 3", "x-kvx: the client's own", "x-serve-router-kv-token-key: k1"]
        );
        assert_eq!(arrived("/v1/bare"), ["x-kvx: the client's own"]);
    });
}

#[test]
fn a_hanging_agent_opens_the_breaker_which_lets_one_request_through_at_a_time_and_closes_on_an_answer() {
    for_each_binary(|binary| {
        let answers = Arc::new(AtomicBool::new(false));
        let agent = StubAgent::start({
            let answers = Arc::clone(&answers);
            Arc::new(move |_| answers.load(Ordering::SeqCst).then(Vec::new))
        });
        let world = World::new();
        let site = world.start(binary, agent.address);
        agent_is(&site, "UP");
        let mut count = 0;
        let mut next = || {
            count += 1;
            ask(&world, &site, &format!("/v1/completions/{count}")).1
        };
        for _ in 0..5 {
            let end = next();
            assert_eq!((end.skip, end.spoe_error), (None, Some(1)), "{end:?}");
        }
        assert_eq!(next().skip, Some(Skip::Breaker));
        // The probe fails: the next request is kept back again.
        let probe = eventually("a probe", || Some(next()).filter(|end| end.skip.is_none()));
        assert_eq!(probe.spoe_error, Some(1));
        assert_eq!(next().skip, Some(Skip::Breaker));
        // The probe is answered: every request is let through.
        answers.store(true, Ordering::SeqCst);
        let probe = eventually("a probe", || Some(next()).filter(|end| end.skip.is_none()));
        assert_eq!(probe.spoe_error, None);
        for _ in 0..3 {
            let end = next();
            assert_eq!((end.skip, end.spoe_error), (None, None));
        }
    });
}

#[test]
fn an_answer_between_two_time_outs_starts_the_count_again() {
    for_each_binary(|binary| {
        let agent = StubAgent::start(Arc::new(|message| {
            let answered = message.get("path") == Some(&TypedData::String("/v1/completions/3".to_owned()));
            answered.then(Vec::new)
        }));
        let mut world = World::new();
        world.options = ["--agent-timeout", "100ms"].map(str::to_owned).to_vec();
        let site = world.start(binary, agent.address);
        agent_is(&site, "UP");
        for n in 0..8 {
            let (_, end) = ask(&world, &site, &format!("/v1/completions/{n}"));
            assert_eq!(end.skip, None, "request {n}");
            assert_eq!(end.spoe_error.is_none(), n == 3, "request {n}: {end:?}");
        }
    });
}

#[test]
fn an_agent_that_is_killed_costs_no_request() {
    for_each_binary(|binary| {
        let agent = StubAgent::answering(&[("server", "r2")]);
        let world = World::new();
        let site = world.start(binary, agent.address);
        agent_is(&site, "UP");
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let clients: Vec<_> = (0..4)
                .map(|client| {
                    let (site, stop) = (&site, &stop);
                    scope.spawn(move || {
                        let mut count = 0;
                        while !stop.load(Ordering::SeqCst) {
                            let answer = http::post(site.http, &format!("/v1/{client}/{count}"), &[]);
                            assert_eq!(answer.status(), 200, "{answer:?}");
                            count += 1;
                        }
                        count
                    })
                })
                .collect();
            eventually("some requests", || (agent.messages().len() > 20).then_some(()));
            agent.kill();
            agent_is(&site, "DOWN");
            let served = || site.haproxy.stat("llm", "BACKEND", "stot").parse::<u64>().expect("a number");
            let before = served();
            eventually("some more requests", || (served() > before + 20).then_some(()));
            stop.store(true, Ordering::SeqCst);
            for client in clients {
                assert!(client.join().expect("no failure") > 0);
            }
        });
        let (_, end) = ask(&world, &site, "/v1/completions/last");
        assert_eq!(end.skip, Some(Skip::AgentDown));
    });
}

#[test]
fn a_body_larger_than_the_buffer_reaches_the_server_whole_and_the_agent_cut_and_marked() {
    for_each_binary(|binary| {
        let agent = StubAgent::answering(&[("server", "r1")]);
        let mut world = World::new();
        world.global = "tune.bufsize 65536";
        let site = world.start(binary, agent.address);
        agent_is(&site, "UP");
        let long_path = format!("/v1/{}", "p".repeat(8000));
        for (bytes, complete) in [(1000, true), (50_000, true), (60_000, false), (1_000_000, false)] {
            let body = vec![b'x'; bytes];
            let path = format!("{long_path}/{bytes}");
            let answer = http::send(site.http, &http::request("POST", &path, &[], &body));
            assert_eq!((answer.status(), answer.text().as_str()), (200, "r1"));
            assert_eq!(world.r1.request(&path).expect("it arrived").body.len(), bytes);
            let messages = agent.messages();
            let message = messages.last().expect("a message");
            assert_eq!(message.get("eom"), Some(&TypedData::Bool(complete)), "{bytes}");
            let Some(TypedData::Binary(seen)) = message.get("body") else { panic!("no body") };
            assert_eq!(seen.len() == bytes, complete, "{bytes}: {} seen", seen.len());
        }
    });
}

#[test]
fn a_slow_upload_gets_its_answer_with_the_agent_up_and_down() {
    /// 2 MiB at 1 Mbit/s.
    const BODY_BYTES: usize = 2 * 1024 * 1024;
    const PIECE_BYTES: usize = 12_500;
    const PIECE_EVERY: Duration = Duration::from_millis(100);
    for_each_binary(|binary| {
        let agent = StubAgent::answering(&[("server", "r2")]);
        std::thread::scope(|scope| {
            for (address, status) in [(agent.address, "UP"), (nobody(), "DOWN")] {
                scope.spawn(move || {
                    let mut world = World::new();
                    world.global = "tune.bufsize 4194304";
                    let site = world.start(binary, address);
                    agent_is(&site, status);
                    let request = http::request("POST", "/v1/slow", &[], &vec![b'x'; BODY_BYTES]);
                    let mut client = Connection::open(site.http);
                    let mut due = Instant::now();
                    for piece in request.chunks(PIECE_BYTES) {
                        client.send(piece);
                        due += PIECE_EVERY;
                        std::thread::sleep(due.saturating_duration_since(Instant::now()));
                    }
                    let answer = client.read().expect("an answer");
                    assert_eq!(answer.status(), 200, "agent {status}: {answer:?}");
                    let end = world.agent_log.end(" /v1/slow ");
                    assert_eq!(end.wanted.is_some(), status == "UP", "{end:?}");
                });
            }
        });
        let messages = agent.messages();
        let Some(TypedData::Binary(body)) = messages.last().and_then(|message| message.get("body")) else {
            panic!("no body");
        };
        assert_eq!(body.len(), BODY_BYTES);
    });
}

/// An origin that streams events, each when the test says so.
struct Streamer {
    origin: Origin,
    next: mpsc::Sender<()>,
    sent: Arc<Mutex<Vec<Instant>>>,
}

impl Streamer {
    fn start() -> Self {
        let (next, wait) = mpsc::channel();
        let wait = Mutex::new(wait);
        let sent = Arc::new(Mutex::new(Vec::new()));
        let times = Arc::clone(&sent);
        let origin = Origin::start(Arc::new(move |connection, _| {
            let head =
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
            let event = b"9\r\ndata: x\n\n\r\n";
            times.lock().expect("no panic").push(Instant::now());
            connection.send(&[head.as_slice(), event].concat());
            while wait.lock().expect("no panic").recv().is_ok() {
                if connection.try_send(event).is_err() {
                    return;
                }
            }
            let _ = connection.try_send(b"0\r\n\r\n");
        }));
        Self { origin, next, sent }
    }
}

#[test]
fn the_first_event_of_a_stream_is_not_held_back() {
    /// The kernel holds back what HAProxy marks as incomplete for 200 ms.
    const HELD_BACK: Duration = Duration::from_millis(200);
    for_each_binary(|binary| {
        let streamer = Streamer::start();
        let world = World::with_replicas(Origin::named("r1"), streamer.origin.clone());
        let agent = StubAgent::answering(&[("server", "r2")]);
        let site = world.start(binary, agent.address);
        agent_is(&site, "UP");
        // The machine may be slow five times, but not every time by as much as that.
        let delays: Vec<Duration> = (0..5)
            .map(|n| {
                let mut client = Connection::open(site.http);
                client.send(&http::request("POST", &format!("/v1/stream/{n}"), &[], b"{}"));
                let head = client.read_head().expect("a head");
                assert_eq!((head.status(), head.header("x-served-by")), (200, Some("r2")));
                assert_eq!(client.read_chunk().as_deref(), Some(b"data: x\n\n".as_slice()));
                let received = Instant::now();
                received - *streamer.sent.lock().expect("no panic").last().expect("sent")
            })
            .collect();
        assert!(delays.iter().any(|delay| *delay < HELD_BACK / 2), "{delays:?}");
    });
}

#[test]
fn the_log_tells_of_a_client_that_leaves_a_stream() {
    for_each_binary(|binary| {
        let streamer = Streamer::start();
        let world = World::with_replicas(Origin::named("r1"), streamer.origin.clone());
        let agent = StubAgent::answering(&[("server", "r2")]);
        let site = world.start(binary, agent.address);
        agent_is(&site, "UP");
        let mut client = Connection::open(site.http);
        client.send(&http::request("POST", "/v1/stream", &[], b"{}"));
        client.read_head().expect("a head");
        client.read_chunk().expect("an event");
        drop(client);
        // HAProxy may notice only when it passes on what comes next.
        eventually("the log line", || {
            streamer.next.send(()).expect("the origin waits");
            world.agent_log.lines().iter().any(|line| line.contains(" /v1/stream ")).then_some(())
        });
        let end = world.agent_log.end(" /v1/stream ");
        assert!(end.termination.is_by_client(), "{end:?}");
        assert_eq!((end.served.as_deref(), end.status), (Some("r2"), Some(200)));
    });
}

#[test]
fn the_log_tells_of_a_client_that_leaves_before_the_answer_and_the_server_is_told_too() {
    for_each_binary(|binary| {
        // Never answers; the connection's end shows that HAProxy has hung up.
        let (hung_up, wait) = mpsc::channel();
        let hung_up = Mutex::new(hung_up);
        let thinker = Origin::start(Arc::new(move |connection, _| {
            assert!(connection.read_head().is_none(), "no second request");
            let _ = hung_up.lock().expect("no panic").send(());
        }));
        let world = World::with_replicas(Origin::named("r1"), thinker);
        let agent = StubAgent::answering(&[("server", "r2")]);
        let site = world.start(binary, agent.address);
        agent_is(&site, "UP");
        // HAProxy 2.6 watches a client only if its body came after the backend was chosen (README, "Clients that leave").
        let mut client = Connection::open(site.http);
        let request = http::request("POST", "/v1/think", &[("expect", "100-continue")], b"{}");
        let (head, body) = request.split_at(request.len() - 2);
        client.send(head);
        assert_eq!(client.read_head().expect("a head").status(), 100);
        client.send(body);
        eventually("the request is at the server", || world.r2.request("/v1/think"));
        drop(client);
        let end = world.agent_log.end(" /v1/think ");
        assert!(end.termination.is_by_client(), "{end:?}");
        assert_eq!((end.served.as_deref(), end.response), (Some("r2"), None));
        wait.recv_timeout(support::PATIENCE).expect("the server's connection is closed");
    });
}

#[test]
fn a_dead_server_is_replaced_and_the_log_names_the_one_really_used() {
    for_each_binary(|binary| {
        let mut world = World::new();
        world.r2.address = nobody();
        let agent = StubAgent::answering(&[("server", "r2")]);
        let site = world.start(binary, agent.address);
        agent_is(&site, "UP");
        let (body, end) = ask(&world, &site, "/v1/completions/1");
        assert_eq!(body, "r1");
        assert_eq!((end.wanted.as_deref(), end.served.as_deref()), (Some("r2"), Some("r1")));
        assert!(end.redispatched && end.retries > 0, "{end:?}");
    });
}

#[test]
fn the_log_tells_of_a_request_that_no_server_took() {
    for_each_binary(|binary| {
        let mut world = World::new();
        world.r1.address = nobody();
        world.r2.address = nobody();
        let agent = StubAgent::answering(&[("server", "r2")]);
        let site = world.start(binary, agent.address);
        agent_is(&site, "UP");
        assert_eq!(http::post(site.http, "/v1/completions/1", &[]).status(), 503);
        let end = world.agent_log.end(" /v1/completions/1 ");
        assert!(end.termination.is_by_server(), "{end:?}");
        assert_eq!((end.wanted.as_deref(), end.status), (Some("r2"), Some(503)));
        // With every server in maintenance there is none to name.
        for server in ["llm/r1", "llm/r2"] {
            site.haproxy.command(&format!("set server {server} state maint"));
        }
        assert_eq!(http::post(site.http, "/v1/completions/2", &[]).status(), 503);
        let end = world.agent_log.end(" /v1/completions/2 ");
        assert_eq!((end.served, end.status), (None, Some(503)));
    });
}

#[test]
fn servers_going_down_and_up_are_told() {
    use kvspoa::lifecycle::log_line::{LogLine, ServerChange, parse};
    for_each_binary(|binary| {
        let world = World::new();
        let site = world.start(binary, nobody());
        let change = |command: &str, text: &str| {
            site.haproxy.command(command);
            match parse(world.agent_log.line(text).as_bytes()) {
                Ok(LogLine::Server(notice)) => notice,
                other => panic!("{other:?}"),
            }
        };
        // What a check would do, without its time.
        site.haproxy.command("set server llm/r1 state drain");
        let up = change("set server llm/r1 state ready", "Server llm/r1 is UP");
        assert_eq!((up.pool.as_str(), up.server.as_str(), up.change), ("llm", "r1", ServerChange::Up));
        let maintenance = change("set server llm/r2 state maint", "Server llm/r2 is going DOWN");
        assert_eq!(maintenance.change, ServerChange::Other);
    });
}

#[test]
fn a_client_that_expects_a_100_gets_one() {
    for_each_binary(|binary| {
        let world = World::with_replicas(
            Origin::start(Arc::new(|connection, request| connection.send(&response(&request.text())))),
            Origin::named("r2"),
        );
        let agent = StubAgent::answering(&[("server", "r1")]);
        let site = world.start(binary, agent.address);
        agent_is(&site, "UP");
        let request = http::request("POST", "/v1/expect", &[("expect", "100-continue")], b"{\"n\":1}");
        let (head, body) = request.split_at(request.len() - 7);
        let mut client = Connection::open(site.http);
        client.send(head);
        assert_eq!(client.read_head().expect("a head").status(), 100);
        client.send(body);
        let answer = client.read().expect("an answer");
        assert_eq!((answer.status(), answer.text().as_str()), (200, "{\"n\":1}"));
    });
}
