//! What the load is believed to be, and how requests spread by it, through a real HAProxy: each test runs with every
//! HAProxy that is there.

mod support;

use std::collections::BTreeMap;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use support::chats::{A, C, Outcome, Pace, play};
use support::haproxy::{Binary, binaries, for_each_binary};
use support::http::{self, Connection, Message};
use support::road::{Road, Setup, long_body, unrelated};
use support::{eventually, free_port};

const COMPLETIONS: &str = "/v1/completions";

fn replica<'a>(explanation: &'a Value, server: &str) -> &'a Value {
    let replicas = explanation["replicas"].as_array().expect("a list");
    replicas.iter().find(|replica| replica["server"] == server).expect("the server")
}

/// On a slow machine a choice may come late, and then would be HAProxy's: here all may wait for it.
fn patient() -> Setup<'static> {
    Setup { forms: &["--agent-timeout", "20s"], agent: "spop.deadline = \"15s\"\n", ..Setup::default() }
}

/// Sends the same body so many times at the same moment.
fn at_once(road: &Road, count: usize, body: &Value) -> Vec<Message> {
    let request = http::request("POST", COMPLETIONS, &[], body.to_string().as_bytes());
    let (barrier, http) = (Barrier::new(count), road.http);
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..count)
            .map(|_| {
                scope.spawn(|| {
                    let mut connection = Connection::open(http);
                    barrier.wait();
                    connection.send(&request);
                    connection.read().expect("an answer")
                })
            })
            .collect();
        clients.into_iter().map(|client| client.join().expect("no panic")).collect()
    })
}

#[test]
fn many_identical_prompts_at_once_do_not_herd() {
    for_each_binary(|haproxy| {
        let flags = &["--prefill-tokens-per-second", "4000"];
        let road = Road::set_up(haproxy, &Setup { replicas: 4, flags, ..patient() });
        for (round, count) in [32, 64, 256].into_iter().enumerate() {
            let prompt = format!("Round {round} of the same question for all of us. ").repeat(100);
            let answers = at_once(&road, count, &json!({ "prompt": prompt, "max_tokens": 8 }));
            let mut named: BTreeMap<&str, usize> = BTreeMap::new();
            for answer in &answers {
                assert_eq!(answer.status(), 200, "{}", answer.text());
                let reason = answer.header("x-kv-reason");
                assert!(
                    ["no_overlap", "overlap"].map(Some).contains(&reason),
                    "{reason:?}: HAProxy's choice"
                );
                *named.entry(answer.header("x-served-by").expect("set by HAProxy")).or_default() += 1;
            }
            assert!(named.values().all(|most| most * 8 <= count * 3), "{count} at once: {named:?}");
            road.assert_no_load();
        }
    });
}

#[test]
fn a_full_server_is_left_for_a_free_one_and_of_full_ones_the_shorter_queue_is_taken() {
    for_each_binary(|haproxy| {
        let server = |_, address| format!("{address} maxconn 2");
        let slow = &["--decode-step", "200"];
        let road = Road::set_up(haproxy, &Setup { server, flags: slow, ..patient() });
        road.wait_for_polls();
        let explain = || road.agent.explain(COMPLETIONS, &unrelated(7));
        let chosen = || explain()["chosen"].as_str().expect("a server").to_owned();
        // The prompt is cached where it was served, and there it goes again.
        let home = road.post(COMPLETIONS, &unrelated(7)).header("x-served-by").expect("served").to_owned();
        let other = if home == "s1" { "s2" } else { "s1" };
        eventually("the prompt is known there", || (chosen() == home).then_some(()));
        let fill = |server: &str, first: usize| -> Vec<Connection> {
            let streams = (first..first + 2).map(|number| road.long_request(&long_body(number))).collect();
            assert_eq!(road.haproxy.stat("be_llm", server, "scur"), "2");
            let full = format!("\"{server}\"");
            eventually("the agent knows", || {
                (road.agent.metric_with("kvspoa_server_in_flight", &full) == 2.0).then_some(())
            });
            streams
        };
        road.haproxy.command(&format!("set server be_llm/{other} state maint"));
        eventually("only one server is left", || replica(&explain(), other).get("excluded").map(drop));
        let mut streams = fill(&home, 100);
        road.haproxy.command(&format!("set server be_llm/{other} state ready"));
        eventually("the free server is preferred to the cache", || (chosen() == other).then_some(()));
        streams.extend(fill(other, 102));
        // Whoever comes now waits.
        let queued =
            |server: &str| road.haproxy.stat("be_llm", server, "qcur").parse::<u32>().expect("a count");
        let send = |body: &Value| {
            let mut connection = Connection::open(road.http);
            connection.send(&http::request("POST", COMPLETIONS, &[], body.to_string().as_bytes()));
            connection
        };
        let mut waiting = Vec::new();
        for at in 1..=6 {
            waiting.push(send(&unrelated(at + 1000)));
            eventually("it waits", || (queued("s1") + queued("s2") == at as u32).then_some(()));
        }
        assert_eq!((queued("s1"), queued("s2")), (3, 3), "the queues grow alike");
        drop(streams);
        for mut connection in waiting {
            assert_eq!(connection.read().expect("an answer").status(), 200);
        }
        road.assert_no_load();
    });
}

/// HAProxy is reloaded twice while requests run, some of which outlast the processes that took them.
fn assert_reloads_cost_nothing(master_worker: bool) {
    for_each_binary(|haproxy| {
        let mut road = Road::set_up(haproxy, &Setup { replicas: 3, master_worker, ..patient() });
        road.wait_for_polls();
        let slow = json!({ "prompt": "a long story ".repeat(50), "max_tokens": 20_000, "stream": true, "ignore_eos": true });
        let mut long: Vec<Connection> = (0..3).map(|_| road.long_request(&slow)).collect();
        let (http, stop, sent) = (road.http, AtomicBool::new(false), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for client in 0..4 {
                let (stop, sent) = (&stop, &sent);
                scope.spawn(move || {
                    let mut number = client * 100_000;
                    while !stop.load(Ordering::Relaxed) {
                        number += 1;
                        let body = unrelated(number).to_string();
                        let request = http::request("POST", COMPLETIONS, &[], body.as_bytes());
                        assert_eq!(http::send(http, &request).status(), 200);
                        sent.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            let more = |count: usize| {
                let target = sent.load(Ordering::Relaxed) + count;
                eventually("requests go on", || (sent.load(Ordering::Relaxed) >= target).then_some(()));
            };
            more(50);
            for count in [1.0, 2.0] {
                road.haproxy.reload();
                eventually("the agent has seen it", || {
                    (road.agent.metric("kvspoa_haproxy_reloads_total") == count).then_some(())
                });
                more(50);
                long.push(road.long_request(&slow));
            }
            stop.store(true, Ordering::Relaxed);
        });
        // The new process does not count what the old ones have; that proves nothing against it.
        let polls = || road.agent.metric("kvspoa_engine_reports_total");
        let enough = polls() + 30.0;
        eventually("ten polls of each engine", || (polls() >= enough).then_some(()));
        assert_eq!(road.agent.metric("kvspoa_requests"), 5.0);
        assert_eq!(road.haproxy.old_processes(), 2, "they still have the long ones");
        // The first process ends with its last request, and those of the others stay booked.
        long.drain(..3);
        eventually("the first process ends", || (road.haproxy.old_processes() == 1).then_some(()));
        eventually("its requests have ended", || (road.agent.metric("kvspoa_requests") == 2.0).then_some(()));
        drop(long);
        road.assert_no_load();
        eventually("the old processes end", || (road.haproxy.old_processes() == 0).then_some(()));
        let all = sent.load(Ordering::Relaxed) as f64 + 5.0;
        let lines = || road.agent.metric_with("kvspoa_haproxy_log_lines_total", "kind=\"end\"");
        eventually("each request has its line", || (lines() == all).then_some(()));
        for other in ["kvspoa_bookings_lost_total", "kvspoa_bookings_expired_total"] {
            assert_eq!(road.agent.metric(other), 0.0, "{other}");
        }
        // And the agent is asked by the new process as it was by the old one.
        let asked = road.agent.metric("kvspoa_spop_notify_total");
        assert_eq!(road.post(COMPLETIONS, &unrelated(9)).status(), 200);
        assert_eq!(road.agent.metric("kvspoa_spop_notify_total"), asked + 1.0);
    });
}

#[test]
fn reloads_of_haproxy_under_load_cost_no_request_and_no_booking() {
    assert_reloads_cost_nothing(false);
}

#[test]
fn reloads_by_haproxys_master_under_load_cost_no_request_and_no_booking() {
    assert_reloads_cost_nothing(true);
}

#[test]
fn without_events_a_conversation_stays_where_it_was_sent_and_none_of_it_is_called_confirmed() {
    for_each_binary(|haproxy| {
        let road = Road::set_up(haproxy, &Setup { replicas: 3, told: false, ..Setup::default() });
        let mut text = "The first chapter of a story that goes on and on. ".repeat(20);
        let ask = |text: &str| {
            let body = json!({ "prompt": text, "max_tokens": 2 });
            let explanation = road.agent.explain(COMPLETIONS, &body);
            let answer = road.post(COMPLETIONS, &body);
            assert_eq!(answer.status(), 200, "{}", answer.text());
            // Without events its queue would still be there.
            road.assert_no_load();
            (answer.header("x-served-by").expect("served").to_owned(), explanation)
        };
        let (home, first) = ask(&text);
        assert_eq!((&first["reason"], &first["state"]), (&json!("no_overlap"), &json!("load_only")));
        for turn in 0..8 {
            ask(&format!("Story {turn} of somebody else, who has nothing to do with it. ").repeat(20));
            text.push_str(&format!("And in chapter {turn} it went on like this. "));
            let (served, explanation) = ask(&text);
            assert_eq!(served, home, "turn {turn}");
            assert_eq!(explanation["reason"], "history", "{explanation}");
            assert_eq!(
                (&explanation["state"], &explanation["matched_tokens"]),
                (&json!("degraded"), &json!(0))
            );
            let sent = replica(&explanation, &home)["history_tokens"].as_u64().expect("a number");
            assert!(sent * 3 > explanation["prompt_tokens"].as_u64().expect("a number") * 2, "{explanation}");
        }
        road.assert_no_load();
        assert_eq!(road.agent.metric("kvspoa_matched_tokens_total"), 0.0);
        assert!(road.agent.metric("kvspoa_history_tokens_total") > 0.0);
    });
}

#[test]
fn a_forged_content_length_counts_no_further_than_the_model_reads() {
    for_each_binary(|haproxy| {
        let setup = Setup { bufsize: 65_536, flags: &["--max-model-len", "5000"], ..Setup::default() };
        let road = Road::set_up(haproxy, &setup);
        eventually("the engines have told of their model", || {
            (road.agent.metric("kvspoa_model_context_tokens") == 5000.0).then_some(())
        });
        let start = json!({ "prompt": "a prompt without an end ".repeat(4000) }).to_string();
        let head = "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: 4000000000\r\n\r\n";
        let mut connection = Connection::open(road.http);
        connection.send(head.as_bytes());
        connection.send(&start.as_bytes()[..80_000]);
        let prefill = || road.agent.metric("kvspoa_prefill_tokens");
        eventually("it is booked", || (road.agent.metric("kvspoa_requests") == 1.0).then_some(()));
        // As many as the part that is known has, or the model's context; not the 1,000 million that are claimed.
        assert!(prefill() < 65_536.0 / 2.0, "{} tokens", prefill());
        drop(connection);
        road.assert_no_load();
    });
}

#[test]
fn answers_in_the_making_are_load_where_that_is_asked_for() {
    for_each_binary(|haproxy| {
        let more = "select.decode_progress = true\n";
        let flags = &["--decode-step", "5"];
        let road = Road::set_up(haproxy, &Setup { replicas: 1, flags, agent: more, ..Setup::default() });
        let stream = road.long_request(&long_body(1));
        let blocks = || road.agent.metric("kvspoa_booked_blocks");
        let prompt = eventually("it is booked", || Some(blocks()).filter(|blocks| *blocks > 0.0));
        eventually("its answer grows", || (blocks() >= prompt + 10.0).then_some(()));
        drop(stream);
        road.assert_no_load();
    });
}

/// Replicas of 160 blocks of 32 tokens that take little time.
const SMALL: &[&str] = &["--blocks", "161", "--block-size", "32", "--decode-step", "1"];

/// The chats of workload A, one request at a time, by some seeds: the median cached share, and the greatest share.
fn chats(haproxy: &Binary, balance: &str, asks: bool) -> (f64, f64) {
    let pace = Pace { in_flight: 1, pause: Duration::from_millis(30) };
    let outcomes: Vec<Outcome> = std::thread::scope(|scope| {
        let seeds: Vec<_> = (1..=5)
            .map(|seed| {
                scope.spawn(move || {
                    let road = Road::set_up(haproxy, &Setup { flags: SMALL, balance, asks, ..patient() });
                    play(road.http, A, pace, seed, true)
                })
            })
            .collect();
        seeds.into_iter().map(|seed| seed.join().expect("no panic")).collect()
    });
    let median = |of: fn(&Outcome) -> f64| {
        let mut values: Vec<f64> = outcomes.iter().map(of).collect();
        values.sort_unstable_by(f64::total_cmp);
        values[values.len() / 2]
    };
    (median(Outcome::cached_share), median(Outcome::greatest_share))
}

#[test]
fn chats_are_served_from_cache_and_evenly_as_by_no_balance_of_haproxys_own() {
    let binaries = binaries();
    let haproxy = binaries.first().expect("one at least");
    let (cached, greatest) = chats(haproxy, "leastconn", true);
    let (least, _) = chats(haproxy, "leastconn", false);
    let (hashed, _) = chats(haproxy, "hash req.hdr(x-session-id)\n    hash-type consistent", false);
    assert!(cached >= 0.77 && greatest <= 0.60, "{cached:.3} cached, {greatest:.2} on one");
    assert!(cached > least + 0.05 && cached > hashed, "{cached:.3} against {least:.3} and {hashed:.3}");
}

const CHAT: &str = "/v1/chat/completions";

fn served(answer: &Message) -> &str {
    assert_eq!(answer.status(), 200, "{}", answer.text());
    answer.header("x-served-by").expect("set by HAProxy")
}

/// So many equal requests in turn: by whom each was served, and the agent's reason.
fn in_turn(road: &Road, count: usize, body: &Value) -> Vec<(String, String)> {
    let one = || {
        let answer = road.post(COMPLETIONS, body);
        (served(&answer).to_owned(), answer.header("x-kv-reason").unwrap_or_default().to_owned())
    };
    (0..count).map(|_| one()).collect()
}

/// Until a cache is known to hold the prompt.
fn wait_until_known(road: &Road, body: &Value) {
    eventually("the replica's events are applied", || {
        let explanation = road.agent.explain(COMPLETIONS, body);
        (explanation["matched_tokens"].as_u64() > Some(0)).then_some(())
    });
}

fn decided(road: &Road, mode: &str) -> f64 {
    road.agent.metric_with("kvspoa_pool_decisions_total", &format!("mode=\"{mode}\""))
}

#[test]
fn in_the_shadow_haproxy_balances_as_without_and_a_switch_counts_from_the_next_request_on() {
    for_each_binary(|haproxy| {
        // Prompts of our own making, by which replicas are probed, would count among those that are made.
        let agent = "engine.parity_probe = \"0s\"\n";
        let setup = Setup { pool: "mode = \"shadow\"\n", balance: "roundrobin", agent, ..Setup::default() };
        let road = Road::set_up(haproxy, &setup);
        let body = json!({ "prompt": "What is the same for all. ".repeat(60), "max_tokens": 2 });
        let first = in_turn(&road, 6, &body);
        for (pair, next) in first.iter().zip(&first[1..]) {
            assert_ne!(pair.0, next.0, "round robin: {first:?}");
            assert_eq!(pair.1, "shadow");
        }
        assert_eq!((decided(&road, "shadow"), decided(&road, "on")), (6.0, 0.0));
        road.assert_no_load();
        assert_eq!(road.agent.metric("kvspoa_prompt_tokens_total"), 0.0, "nothing went where kvspoa said");

        assert_eq!(road.agent.operate(&["pool", "be_llm", "on"]), "be_llm: on, was shadow\n");
        // Of another prompt: this one is in both caches by now.
        let other = json!({ "prompt": "What one of them alone will hold. ".repeat(60), "max_tokens": 2 });
        let (holder, reason) = in_turn(&road, 1, &other).remove(0);
        assert_eq!(reason, "no_overlap");
        wait_until_known(&road, &other);
        let on = in_turn(&road, 3, &other);
        assert!(on.iter().all(|(server, reason)| *server == holder && reason == "overlap"), "{on:?}");
        road.assert_no_load();

        road.agent.operate(&["pool", "be_llm", "off"]);
        let times = || road.agent.metric("kvspoa_decision_seconds_count");
        let before = (times(), road.agent.metric("kvspoa_token_cache_misses_total"));
        let other =
            json!({ "prompt": "Something that was never asked before. ".repeat(90), "max_tokens": 2 });
        let off = in_turn(&road, 4, &other);
        assert!(off.iter().all(|(_, reason)| reason.is_empty()), "{off:?}");
        assert_ne!(off[0].0, off[1].0, "round robin");
        assert_eq!(
            (times(), road.agent.metric("kvspoa_token_cache_misses_total")),
            before,
            "no prompt was made"
        );
        assert_eq!(decided(&road, "off"), 4.0);
        let list: Value = serde_json::from_str(&road.agent.operate(&["pool", "--json"])).expect("JSON");
        assert_eq!((&list[0]["mode"], &list[0]["configured_mode"]), (&json!("off"), &json!("shadow")));
        road.assert_no_load();
    });
}

#[test]
fn in_the_shadow_a_request_is_booked_where_its_blocks_appear() {
    for_each_binary(|haproxy| {
        let setup =
            Setup { pool: "mode = \"shadow\"\n", flags: &["--decode-step", "200"], ..Setup::default() };
        let road = Road::set_up(haproxy, &setup);
        let streams = [0, 1].map(|number| road.long_request(&long_body(number)));
        let on = |server: &str| road.agent.metric_with("kvspoa_requests", &format!("\"{server}\""));
        eventually("each is found where HAProxy has sent it", || {
            ((on("s1"), on("s2")) == (1.0, 1.0)).then_some(())
        });
        assert_eq!(road.agent.metric("kvspoa_prefill_tokens"), 0.0);
        drop(streams);
        road.assert_no_load();
        assert_eq!(road.agent.metric("kvspoa_bookings_settled_total"), 2.0);
        assert_eq!(road.agent.metric("kvspoa_ends_without_booking_total"), 0.0);
    });
}

#[test]
fn a_share_of_the_sessions_goes_where_kvspoa_says_and_each_stays_on_its_side() {
    for_each_binary(|haproxy| {
        let setup = Setup { pool: "mode = \"share=0.5\"\n", ..Setup::default() };
        let road = Road::set_up(haproxy, &setup);
        let is_shadowed = |answer: &Message| {
            served(answer);
            answer.header("x-kv-reason") == Some("shadow")
        };
        let by_session = |session: &str, number: usize| {
            is_shadowed(&road.post_of(session, COMPLETIONS, &unrelated(number)))
        };
        let sessions: Vec<String> = (0..16).map(|number| format!("session-{number}")).collect();
        let first: Vec<bool> =
            sessions.iter().zip(0..).map(|(session, at)| by_session(session, at)).collect();
        let again: Vec<bool> =
            sessions.iter().zip(100..).map(|(session, at)| by_session(session, at)).collect();
        assert_eq!(first, again);
        assert!(first.contains(&true) && first.contains(&false), "{first:?}");

        let mut chats: Vec<Vec<Value>> = (0..16)
            .map(|number| {
                let ask = format!("Question {number}");
                vec![
                    json!({ "role": "system", "content": "Be brief." }),
                    json!({ "role": "user", "content": ask }),
                ]
            })
            .collect();
        let mut turn = || -> Vec<bool> {
            let one = |chat: &mut Vec<Value>| {
                let shadowed = is_shadowed(&road.post(CHAT, &json!({ "messages": chat, "max_tokens": 2 })));
                chat.push(json!({ "role": "assistant", "content": "Yes." }));
                chat.push(json!({ "role": "user", "content": "And then?" }));
                shadowed
            };
            chats.iter_mut().map(one).collect()
        };
        let first = turn();
        assert!(first.contains(&true) && first.contains(&false), "{first:?}");
        assert_eq!(turn(), first);
        road.assert_no_load();
    });
}

#[test]
fn a_replica_that_is_ignored_is_not_named_and_one_that_is_resynced_is_known_again() {
    for_each_binary(|haproxy| {
        let road = Road::start(haproxy, 2, &[]);
        let body = json!({ "prompt": "Where it was cached before. ".repeat(60), "max_tokens": 2 });
        let (holder, _) = &in_turn(&road, 1, &body).remove(0);
        wait_until_known(&road, &body);
        assert_eq!(in_turn(&road, 1, &body)[0].0, *holder);
        let excluded = |server: &str| {
            let explanation = road.agent.explain(COMPLETIONS, &body);
            replica(&explanation, server).get("excluded").cloned()
        };
        assert!(road.agent.operate(&["replica", holder, "ignore"]).contains("is not named any more"));
        assert_eq!(excluded(holder), Some(json!("ignored")));
        assert!(in_turn(&road, 3, &body).iter().all(|(server, _)| server != holder));
        road.agent.operate(&["replica", &format!("be_llm/{holder}"), "use"]);
        assert_eq!(excluded(holder), None);

        let label = format!("server=\"{holder}\",");
        let blocks = || road.agent.metric_with("kvspoa_index_blocks", &label);
        let resets = || road.agent.metric_with("kvspoa_kv_resets_total", &label);
        let (known, before) = (blocks(), resets());
        assert!(known > 0.0);
        road.agent.operate(&["replica", holder, "resync"]);
        eventually("it has told all again", || (resets() > before && blocks() == known).then_some(()));
        let listed = road.agent.operate(&["replica"]);
        assert!(listed.contains("be_llm/s1") && listed.contains("be_llm/s2"), "{listed}");
    });
}

#[test]
fn the_report_finds_conversations_worth_it_and_prompts_that_come_once_not() {
    for_each_binary(|haproxy| {
        let setup = Setup { pool: "mode = \"shadow\"\n", balance: "roundrobin", ..Setup::default() };
        let report = |road: &Road, more: &[&str]| -> Value {
            let args = [&["shadow-report", "be_llm", "--json"], more].concat();
            serde_json::from_str(&road.agent.operate(&args)).expect("JSON")
        };
        let recorded = |road: &Road, requests: f64| {
            let kept = || road.agent.metric_with("kvspoa_records_total", "\"kept\"");
            eventually("every request is recorded", || (kept() >= requests).then_some(()));
            assert_eq!(road.agent.metric_with("kvspoa_records_total", "\"dropped\""), 0.0);
        };
        let road = Road::set_up(haproxy, &setup);
        let outcome = play(road.http, C, Pace { in_flight: 4, pause: Duration::ZERO }, 1, true);
        recorded(&road, outcome.requests() as f64);
        // These prompts are short: an engine as fast as the default answers them at once however little it has cached.
        let slow = ["--prefill-rate", "1500"];
        let chats = report(&road, &slow);
        assert_eq!(chats["verdict"], "worth_it", "{chats:#}");
        assert_eq!(
            (chats["requests"].as_u64(), chats["routed"].as_u64()),
            (Some(outcome.requests()), Some(0))
        );
        let served = chats["index_served_share"].as_f64().expect("a share");
        assert!(chats["index_chosen_share"].as_f64() > Some(served), "{chats:#}");
        let said = road.agent.operate(&[&["shadow-report"][..], &slow].concat());
        assert!(said.contains("Worth it: ") && said.contains("| kvspoa "), "{said}");

        let road = Road::set_up(haproxy, &setup);
        for number in 0..80 {
            assert_eq!(road.post(COMPLETIONS, &unrelated(number)).status(), 200);
        }
        recorded(&road, 80.0);
        let once = report(&road, &[]);
        assert_eq!(once["verdict"], "not_worth_it", "{once:#}");
        road.assert_no_load();
    });
}

#[test]
fn agents_that_are_peers_weigh_each_others_load() {
    for_each_binary(|haproxy| {
        let directory = tempfile::tempdir().expect("a directory");
        let secret = directory.path().join("peers.key");
        std::fs::write(&secret, "0123456789abcdef0123456789abcdef\n").expect("written");
        let ports = [(); 2].map(|()| free_port());
        let lines = ports.map(|own| {
            let others: Vec<String> =
                ports.iter().filter(|port| **port != own).map(|port| format!("\"127.0.0.1:{port}\"")).collect();
            format!(
                "spop.deadline = \"15s\"\npeers.listen = \"127.0.0.1:{own}\"\npeers.connect = [{}]\npeers.secret_file = \"{}\"\n",
                others.join(", "),
                secret.display()
            )
        });
        let flags = &["--prefill-tokens-per-second", "2000"];
        let mut first = Road::set_up(haproxy, &Setup { replicas: 4, flags, agent: &lines[0], ..patient() });
        let servers: String = (1..)
            .zip(&first.replicas)
            .map(|(number, replica)| format!("    server s{number} {}\n", replica.http_addr()))
            .collect();
        let beside = Setup { replicas: 0, servers: Some(&servers), agent: &lines[1], ..patient() };
        let second = Road::set_up(haproxy, &beside);
        for road in [&first, &second] {
            eventually("the peer is told", || (road.agent.metric("kvspoa_peer_up") == 1.0).then_some(()));
        }

        // One computes a long prompt, and the other's agent knows where.
        let body = long_body(1);
        let stream = first.long_request(&body);
        eventually("the booking is known to the other agent", || {
            (second.agent.metric("kvspoa_requests") == 1.0).then_some(())
        });
        let known = second.agent.explain(COMPLETIONS, &body);
        for server in ["s1", "s2", "s3", "s4"] {
            let computes = first.agent.metric_with("kvspoa_requests", &format!("\"{server}\""));
            let there = replica(&known, server);
            assert_eq!(there["requests"].as_f64(), Some(computes), "{server}: {known}");
            let present =
                [&there["booked_tokens"], &there["gpu_tokens"]].map(|tokens| tokens.as_u64().unwrap_or(0));
            assert_eq!(present.iter().any(|tokens| *tokens > 0), computes > 0.0, "{server}: {known}");
        }
        drop(stream);
        first.assert_no_load();
        second.assert_no_load();

        // Equal prompts at once, by turns through either.
        let body = json!({ "prompt": "The same question for all of us. ".repeat(200), "max_tokens": 8 });
        let named: Vec<String> = std::thread::scope(|scope| {
            let halves = [&first, &second].map(|road| scope.spawn(|| at_once(road, 16, &body)));
            let answers = halves.into_iter().flat_map(|half| half.join().expect("no panic"));
            answers.map(|answer| answer.header("x-served-by").expect("set by HAProxy").to_owned()).collect()
        });
        for server in ["s1", "s2", "s3", "s4"] {
            let share = named.iter().filter(|name| *name == server).count();
            assert!(share <= 12, "{share} of 32 on {server}");
        }
        first.assert_no_load();
        second.assert_no_load();

        // Nobody waits for a peer that is gone.
        first.agent.kill();
        assert_eq!(second.post(COMPLETIONS, &unrelated(3)).status(), 200);
        eventually("it is missed", || (second.agent.metric("kvspoa_peer_up") == 0.0).then_some(()));
    });
}
