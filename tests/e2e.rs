//! Real requests through a real HAProxy, end to end: each test runs with every HAProxy that is there.

mod support;

use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use support::haproxy::for_each_binary;
use support::http::{self, Connection};
use support::road::{Road, Setup, long_body, unrelated};
use support::{eventually, nobody};

const CHAT: &str = "/v1/chat/completions";
const BLOCK: u64 = 16;

fn field(value: &Value, pointer: &str) -> u64 {
    value.pointer(pointer).and_then(Value::as_u64).unwrap_or_else(|| panic!("{pointer} in {value}"))
}

fn replica<'a>(explanation: &'a Value, server: &str) -> &'a Value {
    let replicas = explanation["replicas"].as_array().expect("a list");
    replicas.iter().find(|replica| replica["server"] == server).expect("the server")
}

/// A user's message after which the whole prompt is, or is not, a whole number of blocks.
fn message(road: &Road, messages: &[Value], whole_blocks: bool) -> Value {
    let mut text = String::from("Tell me more about the ships in the harbour and the rain");
    for filler in [" x", ",", " 7", "q"].iter().cycle() {
        let message = json!({ "role": "user", "content": text });
        let prompt: Vec<&Value> = messages.iter().chain([&message]).collect();
        let explanation = road.agent.explain(CHAT, &json!({ "messages": prompt }));
        if field(&explanation, "/prompt_tokens").is_multiple_of(BLOCK) == whole_blocks {
            return message;
        }
        text.push_str(filler);
    }
    unreachable!("the filler has no end")
}

#[test]
fn ten_turns_of_a_chat_stay_with_the_replica_that_holds_the_prefix() {
    for_each_binary(|haproxy| {
        let road = Road::start(haproxy, 3, &[]);
        let mut messages =
            vec![json!({ "role": "system", "content": "You answer in short sentences. ".repeat(20) })];
        let mut server = String::new();
        for turn in 1..=10 {
            messages.push(message(&road, &messages, turn % 2 == 0));
            let body = json!({ "messages": messages, "max_tokens": 20 });
            let before = road.agent.explain(CHAT, &body);
            let answer = road.post(CHAT, &body);
            assert_eq!(answer.status(), 200, "{}", answer.text());
            let served = answer.header("x-served-by").expect("set by HAProxy").to_owned();
            let json: Value = serde_json::from_slice(&answer.body).expect("JSON");
            let prompt_tokens = field(&json, "/usage/prompt_tokens");
            let cached = json.pointer("/usage/prompt_tokens_details/cached_tokens").and_then(Value::as_u64);
            assert_eq!(field(&before, "/prompt_tokens"), prompt_tokens, "turn {turn}");
            assert_eq!(before["state"], "exact", "turn {turn}: {before}");
            if turn > 1 {
                assert_eq!(served, server, "turn {turn} left its prefix");
                assert!(cached > Some(0), "turn {turn} has nothing cached");
            }
            let confirmed = field(replica(&before, &served), "/gpu_tokens");
            assert_eq!(Some(confirmed), cached.or(Some(0)), "turn {turn}, {prompt_tokens} tokens");
            server = served;
            let completion_tokens = field(&json, "/usage/completion_tokens");
            messages
                .push(json!({ "role": "assistant", "content": json["choices"][0]["message"]["content"] }));
            // The last token that was generated has not been computed, so it is in no block.
            let stored = (prompt_tokens + completion_tokens - 1) / BLOCK * BLOCK;
            eventually("the replica's events are applied", || {
                let next: Vec<Value> = messages
                    .iter()
                    .cloned()
                    .chain([json!({ "role": "user", "content": "And then? ".repeat(9) })])
                    .collect();
                let explanation = road.agent.explain(CHAT, &json!({ "messages": next }));
                (field(replica(&explanation, &server), "/gpu_tokens") >= stored).then_some(())
            });
        }
    });
}

fn wait_for_state(road: &Road, server: &str, state: &str) {
    eventually(&format!("{server} is {state}"), || {
        let labels = format!("server=\"{server}\",state=\"{state}\"");
        (road.agent.metric_with("kvspoa_server_state", &labels) == 1.0).then_some(())
    });
}

fn stream_body(word: &str) -> Vec<u8> {
    json!({ "messages": [{ "role": "user", "content": word.repeat(400) }], "max_tokens": 400, "stream": true })
        .to_string()
        .into_bytes()
}

#[test]
fn the_load_is_gone_when_the_requests_are_also_after_clients_that_left() {
    for_each_binary(|haproxy| {
        let road = Road::start(haproxy, 2, &["--prefill-tokens-per-second", "2000"]);
        for number in 0..20 {
            // Leaves before the answer. The body comes by itself: HAProxy 2.6 does not notice otherwise.
            let mut early = Connection::open(road.http);
            let body = json!({ "messages": [{ "role": "user", "content": format!("{number} early ").repeat(900) }] });
            let request = http::request("POST", CHAT, &[], body.to_string().as_bytes());
            let (head, rest) = request.split_at(request.len() - body.to_string().len());
            early.send(head);
            let asked = road.agent.metric("kvspoa_spop_notify_total");
            early.send(rest);
            eventually("the agent is asked", || {
                (road.agent.metric("kvspoa_spop_notify_total") > asked).then_some(())
            });
            drop(early);
            // Leaves in the middle of a stream.
            let mut late = Connection::open(road.http);
            late.send(&http::request("POST", CHAT, &[], &stream_body(&format!("{number} late "))));
            let head = late.read_head().expect("headers");
            assert_eq!(head.status(), 200);
            late.read_chunk().expect("a first piece");
        }
        road.assert_no_load();
        let before_the_choice = road.agent.metric("kvspoa_ended_before_choice_total");
        assert_eq!(road.agent.metric("kvspoa_bookings_settled_total") + before_the_choice, 40.0);
        assert_eq!(road.agent.metric("kvspoa_bookings_expired_total"), 0.0);
        assert_eq!(road.agent.metric("kvspoa_bookings_lost_total"), 0.0);
    });
}

#[test]
fn killing_the_agent_under_load_costs_no_request_and_it_knows_the_caches_when_it_is_back() {
    for_each_binary(|haproxy| {
        let mut road = Road::start(haproxy, 3, &[]);
        let (http, stop, sent) = (road.http, AtomicBool::new(false), AtomicUsize::new(0));
        let bad: Vec<u16> = std::thread::scope(|scope| {
            let clients: Vec<_> = (0..8)
                .map(|client| {
                    let (stop, sent) = (&stop, &sent);
                    scope.spawn(move || {
                        let mut bad = Vec::new();
                        while !stop.load(Ordering::Relaxed) {
                            let body =
                                json!({ "prompt": format!("client {client} ").repeat(30), "max_tokens": 2 });
                            let request =
                                http::request("POST", "/v1/completions", &[], body.to_string().as_bytes());
                            let status = http::send(http, &request).status();
                            sent.fetch_add(1, Ordering::Relaxed);
                            if status != 200 {
                                bad.push(status);
                            }
                        }
                        bad
                    })
                })
                .collect();
            let more = |count: usize| {
                let target = sent.load(Ordering::Relaxed) + count;
                eventually("requests go on", || (sent.load(Ordering::Relaxed) >= target).then_some(()));
            };
            more(100);
            road.agent.kill();
            more(100);
            road.agent.restart();
            more(100);
            stop.store(true, Ordering::Relaxed);
            clients.into_iter().flat_map(|client| client.join().expect("no panic")).collect()
        });
        assert!(bad.is_empty(), "{bad:?}");
        road.haproxy.wait_for_server("kvspoa_agent", "agent", "UP");
        let body = json!({ "prompt": "client 3 ".repeat(30), "max_tokens": 2 });
        let explanation = road.agent.explain("/v1/completions", &body);
        assert_eq!(explanation["reason"], "overlap", "{explanation}");
        // The breaker lets a request try the agent every five seconds.
        let asked = road.agent.metric("kvspoa_spop_notify_total");
        eventually("HAProxy asks again", || {
            let chosen = road.agent.explain("/v1/completions", &body)["chosen"].clone();
            let answer = road.post("/v1/completions", &body);
            assert_eq!(answer.status(), 200);
            let was_asked = road.agent.metric("kvspoa_spop_notify_total") > asked;
            was_asked.then(|| assert_eq!(answer.header("x-served-by"), chosen.as_str()))
        });
        road.assert_no_load();
    });
}

#[test]
fn a_slow_upload_is_served_with_the_agent_and_without() {
    for_each_binary(|haproxy| {
        let mut road = Road::start(haproxy, 1, &[]);
        let upload = |http| {
            // 2 MiB at 1 Mbit/s; the prompt itself is short, so that the replica takes it.
            let padding = "p".repeat(2 << 20);
            let body = json!({ "prompt": "short", "max_tokens": 1, "metadata": padding }).to_string();
            let request = http::request("POST", "/v1/completions", &[], body.as_bytes());
            let mut connection = Connection::open(http);
            for piece in request.chunks(12_500) {
                connection.send(piece);
                std::thread::sleep(Duration::from_millis(100));
            }
            connection.read().expect("an answer").status()
        };
        assert_eq!(upload(road.http), 200);
        road.agent.kill();
        road.haproxy.wait_for_server("kvspoa_agent", "agent", "DOWN");
        assert_eq!(upload(road.http), 200);
    });
}

/// Conversations of twice HAProxy's buffer, in turn: each turn goes where its conversation began. Their fields are those of
/// `before`, the messages, and those of `behind`, which are not seen.
fn assert_cut_bodies_keep_their_affinity(before: &Value, behind: &Value, reason: &str, state: &str) {
    for_each_binary(|haproxy| {
        let buffer = 65_536;
        let fast = ["--prefill-tokens-per-second", "10000000", "--step-tokens", "65536"];
        let road =
            Road::set_up(haproxy, &Setup { replicas: 3, flags: &fast, bufsize: buffer, ..Setup::default() });
        let mut conversations: Vec<_> = (0..4)
            .map(|number| {
                let system = format!(
                    "You are number {number}. {}",
                    "the bounded router writes ".repeat(2 * buffer / 26)
                );
                (String::new(), vec![json!({ "role": "system", "content": system })])
            })
            .collect();
        for turn in 0..3 {
            for (server, messages) in &mut conversations {
                messages.push(json!({ "role": "user", "content": format!("Turn {turn}, please.") }));
                let mut body = before.as_object().expect("fields").clone();
                body.insert("messages".to_owned(), json!(messages));
                body.insert("max_tokens".to_owned(), json!(2));
                body.extend(behind.as_object().expect("fields").clone());
                let body = Value::from(body);
                assert!(body.to_string().len() > 2 * buffer);
                let answer = road.post(CHAT, &body);
                assert_eq!(answer.status(), 200, "{}", answer.text());
                let header = |name| answer.header(name).expect("set by HAProxy").to_owned();
                let served = header("x-served-by");
                if turn > 0 {
                    assert_eq!(&served, server, "turn {turn}");
                    assert_eq!([header("x-kv-reason"), header("x-kv-state")], [reason, state], "turn {turn}");
                }
                *server = served;
                let json: Value = serde_json::from_slice(&answer.body).expect("JSON");
                messages.push(
                    json!({ "role": "assistant", "content": json["choices"][0]["message"]["content"] }),
                );
                road.assert_no_load();
            }
        }
    });
}

#[test]
fn cut_bodies_keep_their_affinity_by_the_blocks_of_their_beginning() {
    let all = json!({
        "model": null, "cache_salt": "salt", "tools": null, "tool_choice": null, "chat_template_kwargs": null,
        "reasoning_effort": null, "documents": null, "add_special_tokens": false, "truncate_prompt_tokens": null,
        "kv_transfer_params": null,
    });
    assert_cut_bodies_keep_their_affinity(&all, &json!({}), "beginning_overlap", "exact");
    let behind = json!({ "cache_salt": null });
    assert_cut_bodies_keep_their_affinity(&json!({}), &behind, "beginning_overlap", "degraded");
}

#[test]
fn cut_bodies_keep_their_affinity_when_what_names_their_cache_was_cut_off() {
    let salt = json!({ "cache_salt": "salt" });
    assert_cut_bodies_keep_their_affinity(&json!({}), &salt, "beginning_no_overlap", "degraded");
}

/// JSON that ends early in a body that is whole: a client's mistake, or a cut that nothing told.
#[test]
fn bodies_whose_json_ends_early_keep_their_affinity() {
    for_each_binary(|haproxy| {
        let road = Road::start(haproxy, 3, &[]);
        let mut served = Vec::new();
        for _ in 0..3 {
            for number in 0..4 {
                let text = format!("You are number {number}. {}", "the router writes ".repeat(300));
                let body = json!({ "messages": [{ "role": "system", "content": text }] }).to_string();
                let cut = &body.as_bytes()[..body.len() - 100];
                let mut connection = Connection::open(road.http);
                connection.send(&http::request("POST", CHAT, &[], cut));
                let answer = connection.read().expect("an answer");
                assert_eq!(answer.status(), 400, "the engine's own answer");
                served.push(answer.header("x-served-by").expect("set by HAProxy").to_owned());
                road.assert_no_load();
            }
        }
        assert_eq!(served[..4], served[4..8]);
        assert_eq!(served[..4], served[8..]);
        let reasons = road.agent.metric("kvspoa_decisions_total{reason=\"beginning_no_overlap\"}");
        assert!(reasons >= 12.0, "{reasons}");
        // One of which nothing is of use is malformed, and not for want of a larger buffer.
        let mut connection = Connection::open(road.http);
        connection.send(&http::request("POST", CHAT, &[], b"{"));
        assert_eq!(connection.read().expect("an answer").status(), 400);
        let of_reason = |reason| road.agent.metric(&format!("kvspoa_decisions_total{{reason=\"{reason}\"}}"));
        assert_eq!((of_reason("body_malformed"), of_reason("body_cut")), (1.0, 0.0));
    });
}

#[test]
fn the_agent_stops_on_sigterm_and_nothing_fails() {
    for_each_binary(|haproxy| {
        let mut road = Road::start(haproxy, 1, &[]);
        let body = json!({ "prompt": "before", "max_tokens": 1 });
        assert_eq!(road.post("/v1/completions", &body).status(), 200);
        assert!(road.agent.terminate().success());
        assert_eq!(road.post("/v1/completions", &body).status(), 200);
    });
}

#[test]
fn a_server_that_is_drained_or_in_maintenance_gets_nothing_under_load_and_its_share_afterwards() {
    for_each_binary(|haproxy| {
        let road = Road::start(haproxy, 3, &[]);
        road.wait_for_polls();
        let (http, stop, sent, next) =
            (road.http, AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        let body = unrelated(next.fetch_add(1, Ordering::Relaxed)).to_string();
                        let request = http::request("POST", "/v1/completions", &[], body.as_bytes());
                        assert_eq!(http::send(http, &request).status(), 200);
                        sent.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            let more = |count: usize| {
                let target = sent.load(Ordering::Relaxed) + count;
                eventually("requests go on", || (sent.load(Ordering::Relaxed) >= target).then_some(()));
            };
            let served = || road.haproxy.stat("be_llm", "s2", "stot").parse::<u64>().expect("a count");
            let excluded = || {
                let explanation = road.agent.explain("/v1/completions", &unrelated(0));
                replica(&explanation, "s2").get("excluded").and_then(Value::as_str).map(str::to_owned)
            };
            for (out, back, name, gauge) in [
                ("state drain", "state ready", "drained", "drain"),
                ("state maint", "state ready", "maintenance", "maint"),
                ("weight 0", "weight 100%", "drained", "up"),
            ] {
                more(20);
                road.haproxy.command(&format!("set server be_llm/s2 {out}"));
                eventually("the agent knows", || (excluded().as_deref() == Some(name)).then_some(()));
                wait_for_state(&road, "s2", gauge);
                // Those that were chosen just before.
                more(8);
                let before = served();
                more(60);
                assert_eq!(served(), before, "{out}");
                road.haproxy.command(&format!("set server be_llm/s2 {back}"));
                eventually("the agent knows", || excluded().is_none().then_some(()));
                let before = served();
                more(60);
                let share = served() - before;
                assert!((8..=40).contains(&share), "{share} of 60 after {back}");
            }
            stop.store(true, Ordering::Relaxed);
        });
        road.assert_no_load();
    });
}

#[test]
fn a_backup_is_named_only_when_no_primary_is_up() {
    for_each_binary(|haproxy| {
        let server = |number, address| match number {
            1 => format!("{address} backup"),
            _ => format!("{address}"),
        };
        let road = Road::set_up(haproxy, &Setup { server, ..Setup::default() });
        road.wait_for_polls();
        let excluded = |server| {
            let explanation = road.agent.explain("/v1/completions", &unrelated(0));
            replica(&explanation, server).get("excluded").cloned()
        };
        for number in 0..8 {
            assert_eq!(road.post("/v1/completions", &unrelated(number)).header("x-served-by"), Some("s2"));
        }
        assert_eq!(excluded("s1"), Some(json!("backup")));
        road.haproxy.command("set server be_llm/s2 state maint");
        eventually("the backup's time has come", || excluded("s1").is_none().then_some(()));
        let explanation = road.agent.explain("/v1/completions", &unrelated(1));
        assert_eq!(explanation["chosen"], "s1");
        assert_eq!(replica(&explanation, "s2")["server_state"], "maint");
        assert_eq!(road.post("/v1/completions", &unrelated(1)).header("x-served-by"), Some("s1"));
    });
}

/// Flags of replicas whose answers take long.
const SLOW: &[&str] = &["--decode-step", "200"];

#[test]
fn without_log_lines_bookings_end_by_evidence_and_a_long_request_keeps_its_load() {
    for_each_binary(|haproxy| {
        let road = Road::set_up(haproxy, &Setup { log: false, flags: SLOW, ..Setup::default() });
        road.wait_for_polls();
        let long = road.long_request(&long_body(0));
        let short = 8;
        for number in 1..=short {
            assert_eq!(road.post("/v1/completions", &unrelated(number)).status(), 200);
        }
        assert_eq!(road.agent.metric("kvspoa_requests"), 1.0 + short as f64, "no line has come");
        let lost = || road.agent.metric("kvspoa_bookings_lost_total");
        eventually("the lost ends come to light", || (lost() >= short as f64).then_some(()));
        // As long again: the request that lives is not taken for lost.
        let reports = || road.agent.metric("kvspoa_engine_reports_total");
        let enough = reports() + 14.0;
        eventually("more polls", || (reports() >= enough).then_some(()));
        assert_eq!(road.agent.metric("kvspoa_requests"), 1.0);
        assert_eq!(lost(), short as f64);
        drop(long);
        road.assert_no_load();
    });
}

#[test]
fn a_redispatched_request_moves_to_where_its_blocks_appear() {
    for_each_binary(|haproxy| {
        // HAProxy cannot reach s1, but its check looks elsewhere and finds it well.
        let server = |number, address: std::net::SocketAddr| match number {
            1 => format!("{} check inter 1s rise 1000 port {}", nobody(), address.port()),
            _ => format!("{address}"),
        };
        let road = Road::set_up(haproxy, &Setup { server, flags: SLOW, ..Setup::default() });
        road.wait_for_polls();
        let on = |server| road.agent.metric_with("kvspoa_requests", &format!("\"{server}\""));
        let (mut number, mut stream) = (0, road.long_request(&long_body(0)));
        // If chance has named the other one, it is this one's turn.
        while on("s1") == 0.0 {
            number += 1;
            drop(stream);
            road.assert_no_load();
            stream = road.long_request(&long_body(number));
        }
        assert_eq!((on("s1"), on("s2")), (1.0, 0.0), "nothing has told of the redispatch yet");
        road.haproxy.command("set server be_llm/s1 health down");
        eventually("the booking has moved", || (on("s2") == 1.0).then_some(()));
        assert_eq!(on("s1"), 0.0);
        assert_eq!(road.agent.metric("kvspoa_bookings_moved_total"), 1.0);
        wait_for_state(&road, "s1", "down");
        drop(stream);
        road.assert_no_load();
        assert_eq!(road.agent.metric("kvspoa_served_elsewhere_total"), 1.0);
        assert_eq!(road.agent.metric("kvspoa_bookings_settled_total"), f64::from(number as u32) + 1.0);
    });
}

#[test]
fn a_request_that_no_server_takes_leaves_no_load() {
    for_each_binary(|haproxy| {
        let server = |_, _| nobody().to_string();
        let road = Road::set_up(haproxy, &Setup { server, ..Setup::default() });
        for number in 0..6 {
            assert_eq!(road.post("/v1/completions", &unrelated(number)).status(), 503);
        }
        road.assert_no_load();
        assert_eq!(road.agent.metric("kvspoa_bookings_settled_total"), 6.0);
    });
}
