//! Streams through HAProxy, and what its log tells the agent about the end of each request.

mod support;

use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use kvspoa::lifecycle::log_line::{LogLine, ServerChange, parse};
use support::agent::StubAgent;
use support::haproxy::for_each_binary;
use support::http::{self, Connection};
use support::origin::Origin;
use support::site::World;
use support::{eventually, nobody};

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
        site.wait_for_agent("UP");
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
        site.wait_for_agent("UP");
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
        site.wait_for_agent("UP");
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
        site.wait_for_agent("UP");
        let (body, end) = site.ask(&world, "/v1/completions/1");
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
        site.wait_for_agent("UP");
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
