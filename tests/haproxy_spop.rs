//! HAProxy with our own SPOP server and log receiver.

mod support;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Instant;

use bytes::Bytes;
use kvspoa::lifecycle::log_line::{LogLine, RequestEnd};
use kvspoa::lifecycle::log_receiver::{LogListen, LogReceiver};
use kvspoa::metrics::{LogMetrics, SpopMetrics};
use kvspoa::spop::{Actions, Handler, ListenAddr, Scope, Server, ServerConfig, Value, messages};
use kvspoa::units::RequestId;
use support::haproxy::for_each_binary;
use support::http;
use support::site::World;
use support::{eventually, nobody};
use tokio_util::sync::CancellationToken;

/// Names server r2, and remembers the ids and the sizes of the bodies. A request for `/late` is never answered.
#[derive(Clone, Default)]
struct NamesR2 {
    seen: Arc<Mutex<Vec<(RequestId, usize, bool)>>>,
}

impl Handler for NamesR2 {
    async fn notify(&self, payload: Bytes, _received: Instant) -> Actions {
        let mut actions = Actions::none();
        let Some(Ok(message)) = messages(&payload).next() else { return actions };
        if message.arg("path").as_str() == Some("/late") {
            std::future::pending::<()>().await;
        }
        let rid = RequestId::parse(message.arg("rid").as_bytes().unwrap_or_default()).expect("an id");
        let body_bytes = message.arg("body").as_bytes().map_or(0, <[u8]>::len);
        let complete = message.arg("eom") == Value::Bool(true);
        self.seen.lock().expect("no panic").push((rid, body_bytes, complete));
        actions.set_var(Scope::Transaction, "server", "r2");
        actions
    }
}

/// The server in a thread of its own.
struct Agent {
    handler: NamesR2,
    shutdown: CancellationToken,
    thread: std::thread::JoinHandle<()>,
}

impl Agent {
    fn start(address: SocketAddr) -> Self {
        let (handler, shutdown) = (NamesR2::default(), CancellationToken::new());
        let (serving, stop) = (handler.clone(), shutdown.clone());
        let thread = std::thread::spawn(move || {
            runtime().block_on(async {
                let listen = ListenAddr::Tcp(address);
                let server =
                    Server::bind(&listen, ServerConfig::default(), SpopMetrics::register()).expect("bound");
                server.serve(serving, stop).await.expect("served");
            });
        });
        Self { handler, shutdown, thread }
    }

    fn stop(self) {
        self.shutdown.cancel();
        self.thread.join().expect("no panic");
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

#[test]
fn bodies_up_to_eight_mebibytes_arrive_whole_and_larger_ones_cut() {
    const MIB: usize = 1024 * 1024;
    for_each_binary(|binary| {
        let mut world = World::new();
        world.global = "tune.bufsize 8454144";
        let address = nobody();
        let agent = Agent::start(address);
        let site = world.start(binary, address);
        site.wait_for_agent("UP");
        for (bytes, complete) in [(0, true), (1, true), (MIB, true), (8 * MIB, true), (9 * MIB, false)] {
            let path = format!("/v1/{bytes}");
            let answer = http::send(site.http, &http::request("POST", &path, &[], &vec![b'x'; bytes]));
            assert_eq!((answer.status(), answer.text().as_str()), (200, "r2"));
            assert_eq!(world.r2.request(&path).expect("it arrived").body.len(), bytes);
            let seen = *agent.handler.seen.lock().expect("no panic").last().expect("a request");
            assert_eq!((seen.1 == bytes, seen.2), (complete, complete), "{bytes}: {seen:?}");
        }
        agent.stop();
    });
}

#[test]
fn an_agent_that_decides_too_late_has_no_opinion_and_is_no_error() {
    for_each_binary(|binary| {
        let world = World::new();
        let address = nobody();
        let agent = Agent::start(address);
        let site = world.start(binary, address);
        site.wait_for_agent("UP");
        let (_, end) = site.ask(&world, "/late");
        assert_eq!((end.wanted, end.skip, end.spoe_error), (None, None, None));
        agent.stop();
    });
}

#[test]
fn an_agent_that_stops_and_comes_back_under_load_costs_no_request() {
    for_each_binary(|binary| {
        let world = World::new();
        let address = nobody();
        let agent = Agent::start(address);
        let site = world.start(binary, address);
        site.wait_for_agent("UP");
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for client in 0..8 {
                let (site, stop) = (&site, &stop);
                scope.spawn(move || {
                    let mut count = 0;
                    while !stop.load(Ordering::SeqCst) {
                        let answer = http::post(site.http, &format!("/v1/{client}/{count}"), &[]);
                        assert_eq!(answer.status(), 200, "{answer:?}");
                        count += 1;
                    }
                });
            }
            let served = |agent: &Agent| agent.handler.seen.lock().expect("no panic").len();
            eventually("some requests", || (served(&agent) > 50).then_some(()));
            agent.stop();
            site.wait_for_agent("DOWN");
            let agent = Agent::start(address);
            eventually("some requests after the restart", || (served(&agent) > 50).then_some(()));
            stop.store(true, Ordering::SeqCst);
            agent.stop();
        });
    });
}

#[test]
fn the_log_receiver_ends_the_requests_that_the_server_was_asked_about() {
    for_each_binary(|binary| {
        let mut world = World::new();
        let (sender, ends) = mpsc::channel::<RequestEnd>();
        let (address_sender, addresses) = mpsc::channel();
        std::thread::spawn(move || {
            runtime().block_on(async {
                let listen = LogListen::Udp(([127, 0, 0, 1], 0).into());
                let receiver = LogReceiver::bind(&listen, LogMetrics::register()).expect("bound");
                let LogListen::Udp(address) = *receiver.listen() else { panic!("not UDP") };
                address_sender.send(address).expect("the test waits");
                let ended = receiver.run(|line| {
                    if let LogLine::End(end) = line {
                        let _ = sender.send(*end);
                    }
                });
                ended.await.expect("it runs for ever");
            });
        });
        world.agent_log.address = addresses.recv().expect("an address");
        let address = nobody();
        let agent = Agent::start(address);
        let site = world.start(binary, address);
        site.wait_for_agent("UP");
        for n in 0..20 {
            assert_eq!(http::post(site.http, &format!("/v1/{n}"), &[]).text(), "r2");
        }
        let mut ended: Vec<RequestId> = (0..20)
            .map(|_| {
                let end = ends.recv_timeout(support::PATIENCE).expect("an end");
                assert_eq!((end.wanted.as_deref(), end.served.as_deref()), (Some("r2"), Some("r2")));
                end.request
            })
            .collect();
        let mut asked: Vec<RequestId> =
            agent.handler.seen.lock().expect("no panic").iter().map(|(id, _, _)| *id).collect();
        ended.sort_by_key(|id| id.0);
        asked.sort_by_key(|id| id.0);
        assert_eq!(ended, asked);
        agent.stop();
    });
}
