//! HAProxy with the forms of `haproxy/` and an agent that answers, is wrong, hangs or dies.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvspoa::lifecycle::log_line::Skip;
use spop::TypedData;
use support::agent::StubAgent;
use support::haproxy::for_each_binary;
use support::http::{self, Connection};
use support::origin::{Origin, response};
use support::site::World;
use support::{eventually, nobody};

/// Clients that ask one request after the other.
const CLIENTS: usize = 4;

#[test]
fn the_named_server_gets_the_request_and_the_agent_what_it_needs() {
    for_each_binary(|binary| {
        let world = World::new();
        let agent =
            StubAgent::answering(&[("server", "r2"), ("reason", "a \"good\" one]"), ("match", "128")]);
        let site = world.start(binary, agent.address);
        site.wait_for_agent("UP");
        for n in 0..4 {
            let (body, end) = site.ask(&world, &format!("/v1/completions/{n}"));
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
        site.wait_for_agent("DOWN");
        let bodies: Vec<String> = (0..4)
            .map(|n| {
                let (body, end) = site.ask(&world, &format!("/v1/completions/{n}"));
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
        site.wait_for_agent("UP");
        let bodies = [0, 1].map(|n| site.ask(&world, &format!("/v1/completions/{n}")).0);
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
        site.wait_for_agent("UP");
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
        site.wait_for_agent("UP");
        let mut count = 0;
        let mut next = || {
            count += 1;
            site.ask(&world, &format!("/v1/completions/{count}")).1
        };
        for _ in 0..5 {
            let end = next();
            assert_eq!((end.skip, end.spoe_error), (None, Some(1)), "{end:?}");
        }
        assert_eq!(next().skip, Some(Skip::Breaker));
        // One request tries the agent; while it waits, and after it has failed, the others are kept back.
        std::thread::scope(|scope| {
            let probe =
                scope.spawn(|| eventually("a probe", || Some(next()).filter(|end| end.skip.is_none())));
            eventually("the agent is asked again", || (agent.messages().len() == 6).then_some(()));
            assert_eq!(site.ask(&world, "/v1/meanwhile").1.skip, Some(Skip::Breaker));
            assert_eq!(probe.join().expect("no panic").spoe_error, Some(1));
        });
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
        site.wait_for_agent("UP");
        for n in 0..8 {
            let (_, end) = site.ask(&world, &format!("/v1/completions/{n}"));
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
        site.wait_for_agent("UP");
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
            site.wait_for_agent("DOWN");
            let served = || site.haproxy.stat("llm", "BACKEND", "stot").parse::<u64>().expect("a number");
            let before = served();
            eventually("some more requests", || (served() > before + 20).then_some(()));
            stop.store(true, Ordering::SeqCst);
            for client in clients {
                assert!(client.join().expect("no failure") > 0);
            }
        });
        let (_, end) = site.ask(&world, "/v1/completions/last");
        assert_eq!(end.skip, Some(Skip::AgentDown));
    });
}

#[test]
fn haproxy_alone_switches_the_agent_off_and_on_under_load() {
    for_each_binary(|binary| {
        let agent = StubAgent::answering(&[("server", "r2")]);
        let mut world = World::new();
        world.balance = "leastconn";
        let site = world.start(binary, agent.address);
        site.wait_for_agent("UP");
        let finished = AtomicUsize::new(0);
        let stop = AtomicBool::new(false);
        let more = |count: usize| {
            let from = finished.load(Ordering::SeqCst);
            eventually("more requests", || (finished.load(Ordering::SeqCst) >= from + count).then_some(()));
        };
        let served =
            |server: &str| site.haproxy.stat("llm", server, "stot").parse::<u64>().expect("a number");
        std::thread::scope(|scope| {
            let clients: Vec<_> = (0..CLIENTS)
                .map(|client| {
                    let (site, stop, finished) = (&site, &stop, &finished);
                    scope.spawn(move || {
                        let mut count = 0;
                        while !stop.load(Ordering::SeqCst) {
                            let answer = http::post(site.http, &format!("/v1/{client}/{count}"), &[]);
                            assert_eq!(answer.status(), 200, "{answer:?}");
                            count += 1;
                            finished.fetch_add(1, Ordering::SeqCst);
                        }
                    })
                })
                .collect();
            more(20);
            assert_eq!(served("r1"), 0, "the agent decides");

            assert_eq!(site.haproxy.command("set server kvspoa_agent/agent state maint").trim(), "");
            // Those that had asked already.
            more(CLIENTS * 2);
            let (asked, before) = (agent.messages().len(), [served("r1"), served("r2")]);
            more(40);
            assert_eq!(agent.messages().len(), asked, "nobody asks");
            let by_balance = [served("r1") - before[0], served("r2") - before[1]];
            assert!(by_balance.iter().all(|count| *count >= 10), "`balance` decides: {by_balance:?}");

            assert_eq!(site.haproxy.command("set server kvspoa_agent/agent state ready").trim(), "");
            eventually("the agent is asked again", || (agent.messages().len() > asked + 20).then_some(()));
            more(CLIENTS * 2);
            let before = served("r1");
            more(20);
            assert_eq!(served("r1"), before, "the agent decides again");
            stop.store(true, Ordering::SeqCst);
            for client in clients {
                client.join().expect("no request failed");
            }
        });
    });
}

#[test]
fn an_agent_that_is_gone_when_an_upload_ends_is_not_waited_for() {
    for_each_binary(|binary| {
        let agent = StubAgent::answering(&[("server", "r2")]);
        let world = World::new();
        let site = world.start(binary, agent.address);
        site.wait_for_agent("UP");
        let request = http::request("POST", "/v1/upload", &[("expect", "100-continue")], b"{\"n\":1}");
        let (begin, end) = request.split_at(request.len() - 3);
        let mut client = Connection::open(site.http);
        client.send(begin);
        assert_eq!(client.read_head().expect("HAProxy waits for the body").status(), 100);
        agent.kill();
        site.wait_for_agent("DOWN");
        client.send(end);
        assert_eq!(client.read().expect("an answer").status(), 200);
        assert_eq!(world.agent_log.end(" /v1/upload ").skip, Some(Skip::AgentDown));
    });
}

#[test]
fn a_body_larger_than_the_buffer_reaches_the_server_whole_and_the_agent_cut_and_marked() {
    for_each_binary(|binary| {
        let agent = StubAgent::answering(&[("server", "r1")]);
        let mut world = World::new();
        world.global = "tune.bufsize 65536";
        let site = world.start(binary, agent.address);
        site.wait_for_agent("UP");
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
                    site.wait_for_agent(status);
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

#[test]
fn a_client_that_expects_a_100_gets_one() {
    for_each_binary(|binary| {
        let world = World::with_replicas(
            Origin::start(Arc::new(|connection, request| connection.send(&response(&request.text())))),
            Origin::named("r2"),
        );
        let agent = StubAgent::answering(&[("server", "r1")]);
        let site = world.start(binary, agent.address);
        site.wait_for_agent("UP");
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
