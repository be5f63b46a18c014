//! What the agent says of the replicas' caches, against what the replicas find in them: through lost batches,
//! restarts, resets, CPU tiers, adapters and salts.

mod support;

use kvspoa::sim::{Replica, ReplicaArgs};
use serde_json::{Value, json};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use support::feed_proxy::FeedProxy;
use support::haproxy::{Binary, binaries, for_each_binary};
use support::http;
use support::publisher::Publisher;
use support::road::{Feed, POOL, Road, Setup, replica_args};
use support::{PATIENCE, eventually, free_port, nobody};
use tokio::runtime::Runtime;

const COMPLETIONS: &str = "/v1/completions";
const BLOCK: u32 = 16;

/// Replicas whose events come through proxies.
struct Fleet {
    road: Road,
    args: Vec<ReplicaArgs>,
    proxies: Vec<FeedProxy>,
}

/// One request through HAProxy.
#[derive(Debug)]
struct Turn {
    served: String,
    /// What the replica says that it found in its caches, in tokens.
    cached: u64,
    /// What the agent had predicted for that replica: GPU, CPU.
    predicted: [u64; 2],
}

impl Fleet {
    fn start(binary: &Binary, flags: &[&str]) -> Self {
        Self::set_up(binary, flags, &Setup::default())
    }

    fn set_up(binary: &Binary, flags: &[&str], setup: &Setup) -> Self {
        let runtime = Runtime::new().expect("a runtime");
        let args: Vec<ReplicaArgs> = (0..2)
            .map(|_| {
                let mut args = replica_args(flags);
                // Ports that a restart finds again.
                args.listen.set_port(free_port());
                args.events = format!("tcp://127.0.0.1:{}", free_port());
                args.replay = format!("tcp://127.0.0.1:{}", free_port());
                args
            })
            .collect();
        let replicas: Vec<Replica> =
            args.iter().map(|args| runtime.block_on(Replica::start(args)).expect("a replica")).collect();
        let proxies: Vec<FeedProxy> =
            args.iter().map(|args| FeedProxy::start(&args.events, "tcp://127.0.0.1:*")).collect();
        let feeds: Vec<Feed> = replicas
            .iter()
            .zip(&proxies)
            .map(|(replica, proxy)| Feed { events: proxy.endpoint.clone(), ..Feed::of(replica) })
            .collect();
        Self { road: Road::assemble(binary, runtime, replicas, &feeds, setup), args, proxies }
    }

    /// Kills a replica and starts it again at the same addresses.
    fn restart(&mut self, at: usize) {
        let proxy = self.proxies.remove(at);
        let endpoint = proxy.endpoint.clone();
        drop(proxy);
        self.kill(at);
        self.revive(at);
        self.proxies.insert(at, FeedProxy::start(&self.args[at].events, &endpoint));
    }

    fn kill(&mut self, at: usize) {
        let replica = self.road.replicas.remove(at);
        self.road.runtime.block_on(replica.stop());
    }

    fn revive(&mut self, at: usize) {
        let replica = self.road.runtime.block_on(Replica::start(&self.args[at])).expect("a replica");
        self.road.replicas.insert(at, replica);
    }

    /// State and reason of a replica's rank, as `/readyz` tells.
    fn state(&self, at: usize) -> (String, String) {
        let rank = &self.road.agent.ranks()[at];
        let text = |field: &str| rank[field].as_str().unwrap_or_default().to_owned();
        (text("state"), text("reason"))
    }

    /// A request past HAProxy: a step of that replica that stores something. Its batch has passed the proxy afterwards.
    fn step(&self, at: usize, prompt: &[u32]) {
        self.generate(at, prompt, 1);
    }

    /// The same with so many tokens of an answer.
    fn generate(&self, at: usize, prompt: &[u32], tokens: u32) {
        let body = json!({ "prompt": prompt, "max_tokens": tokens }).to_string();
        let request = http::request("POST", COMPLETIONS, &[], body.as_bytes());
        let passed = || self.proxies[at].control.next_seq.load(Relaxed);
        let before = passed();
        assert_eq!(http::send(self.road.replicas[at].http_addr(), &request).status(), 200);
        eventually("the batch has passed", || (passed() > before).then_some(()));
    }

    /// Resets a replica's cache; it tells so with its next step.
    fn reset(&self, at: usize) {
        let request = http::request("POST", "/reset_prefix_cache", &[], b"");
        eventually("no block is in use", || {
            let answer = http::send(self.road.replicas[at].http_addr(), &request);
            (answer.text().contains("true")).then_some(())
        });
    }

    /// Waits until the agent has applied all that the replicas have published and says that it knows them.
    fn settled(&self, states: &[&str]) {
        eventually("the agent has caught up", || {
            let ranks = self.road.agent.ranks();
            let known = ranks.iter().zip(&self.proxies).all(|(rank, proxy)| {
                let next = proxy.control.next_seq.load(Relaxed);
                rank["applied_seq"].as_u64().map_or(0, |seq| seq + 1) == next
                    && states.contains(&rank["state"].as_str().expect("a state"))
            });
            known.then_some(())
        });
    }

    fn ask(&self, prompt: &[u32], more: Value) -> Turn {
        let mut body = json!({ "prompt": prompt, "max_tokens": 1 });
        more.as_object().expect("a map").iter().for_each(|(name, value)| body[name] = value.clone());
        let before = self.road.agent.explain(COMPLETIONS, &body);
        let answer = self.road.post(COMPLETIONS, &body);
        assert_eq!(answer.status(), 200, "{}", answer.text());
        let served = answer.header("x-served-by").expect("set by HAProxy").to_owned();
        let json: Value = serde_json::from_slice(&answer.body).expect("JSON");
        let cached = json.pointer("/usage/prompt_tokens_details/cached_tokens").and_then(Value::as_u64);
        let predicted = held(&before, &served);
        let turn = Turn { served, cached: cached.unwrap_or(0), predicted };
        // What the answer's prompt left in the cache is what the next prediction must know.
        let whole = (prompt.len() as u64 - 1) / u64::from(BLOCK) * u64::from(BLOCK);
        eventually("the prompt's blocks are known", || {
            let now = self.road.agent.explain(COMPLETIONS, &body);
            (held(&now, &turn.served)[0] >= whole).then_some(())
        });
        turn
    }
}

/// Tokens of the prompt on a server's GPU and CPU.
fn held(explanation: &Value, server: &str) -> [u64; 2] {
    let replicas = explanation["replicas"].as_array().expect("a list");
    let replica = replicas.iter().find(|replica| replica["server"] == server).expect("the server");
    ["gpu_tokens", "cpu_tokens"].map(|field| replica[field].as_u64().expect("a number"))
}

/// `len` token ids of a text of its own.
fn text(number: u32, len: u32) -> Vec<u32> {
    let mut rng = fastrand::Rng::with_seed(u64::from(number));
    (0..len).map(|_| rng.u32(3..300)).collect()
}

#[test]
fn after_lost_batches_restarts_and_a_reset_every_prediction_is_what_the_replica_finds() {
    for_each_binary(|haproxy| {
        // A topic of the engine's own makes no difference.
        let mut fleet = Fleet::start(haproxy, &["--topic", "kv@some-model"]);
        let body = |number| json!({ "prompt": text(number, 200), "max_tokens": 3 });
        fleet.proxies.iter().for_each(|proxy| proxy.control.loss_percent.store(30, Relaxed));
        let end = Instant::now() + Duration::from_secs(5);
        let mut sent = 0;
        while Instant::now() < end {
            assert_eq!(fleet.road.post(COMPLETIONS, &body(sent % 40)).status(), 200);
            sent += 1;
        }
        fleet.proxies.iter().for_each(|proxy| proxy.control.loss_percent.store(0, Relaxed));
        let lost: u64 = fleet.proxies.iter().map(|proxy| proxy.control.lost.load(Relaxed)).sum();
        assert!(lost > 0, "of {sent} requests");
        for at in 0..2 {
            fleet.step(at, &text(900, 40));
        }
        fleet.settled(&["exact"]);
        assert!(fleet.road.agent.metric("kvspoa_kv_gaps_total") > 0.0);
        for round in 1..=2 {
            fleet.restart(0);
            eventually("the restart is seen", || {
                (fleet.road.agent.metric("kvspoa_kv_resets_total") >= f64::from(round)).then_some(())
            });
            fleet.settled(&["exact"]);
            (0..3).for_each(|number| fleet.step(0, &text(number, 100)));
        }
        fleet.reset(1);
        (0..2).for_each(|at| fleet.step(at, &text(901, 40)));
        fleet.settled(&["exact"]);

        let mut rng = fastrand::Rng::with_seed(11);
        let mut matched = 0;
        for number in 0..200 {
            let mut prompt = text(rng.u32(..12), 16 * rng.u32(1..14));
            // Every fourth prompt is a whole number of blocks.
            prompt.extend(text(5000 + number, if number % 4 == 0 { 32 } else { rng.u32(1..60) }));
            let turn = fleet.ask(&prompt, json!({}));
            assert_eq!(turn.cached, turn.predicted[0], "request {number}, {} tokens: {turn:?}", prompt.len());
            matched += u32::from(turn.cached > 0);
        }
        assert!(matched > 100, "{matched} of 200 had anything to predict");
    });
}

#[test]
fn a_reset_is_told_with_the_next_step_so_one_decision_is_wrong_and_then_none() {
    for_each_binary(|haproxy| {
        let fleet = Fleet::start(haproxy, &[]);
        let (first, second) = (text(1, 200), text(2, 200));
        let holder = fleet.ask(&first, json!({})).served;
        let at = usize::from(holder == "s2");
        fleet.step(at, &second);
        fleet.settled(&["exact"]);
        fleet.reset(at);
        // Nothing was told: the next request for the prefix goes where it no longer is.
        let wrong = fleet.ask(&first, json!({}));
        assert_eq!((wrong.served, wrong.cached, wrong.predicted[0]), (holder.clone(), 0, 192));
        // Its step told it: the other prefix is known to be gone too.
        eventually("the other prefix is gone", || {
            let explanation = fleet.road.agent.explain(COMPLETIONS, &json!({ "prompt": second }));
            (held(&explanation, &holder) == [0, 0]).then_some(())
        });
        fleet.settled(&["exact"]);
        let right = fleet.ask(&first, json!({}));
        assert_eq!((right.served, right.cached, right.predicted[0]), (holder, 192, 192));
    });
}

#[test]
fn blocks_that_an_engine_fills_while_its_stream_is_mute_are_found_out_by_its_counters() {
    for_each_binary(|haproxy| {
        let fleet = Fleet::start(haproxy, &[]);
        fleet.step(0, &text(1, 200));
        fleet.settled(&["exact"]);
        fleet.proxies[0].control.loss_percent.store(100, Relaxed);
        // Nothing on the live connection tells that batches are missing.
        let mut number = 2;
        eventually("the counters have told", || {
            number += 1;
            fleet.generate(0, &text(number, 200), 100);
            let doubts = fleet.road.agent.metric_with("kvspoa_kv_doubts_total", "reason=\"silent\"");
            (doubts >= 1.0).then_some(())
        });
        let body = json!({ "prompt": text(3, 200) });
        let known = || held(&fleet.road.agent.explain(COMPLETIONS, &body), "s1")[0];
        eventually("the replay has told", || (known() == 192).then_some(()));
        eventually("it is trusted again", || (fleet.state(0).0 == "exact").then_some(()));
    });
}

#[test]
fn a_replica_that_dies_behind_a_live_connection_counts_no_more_until_it_has_proven_what_it_is() {
    for_each_binary(|haproxy| {
        let server = |_, address| format!("{address} check inter 200ms fall 2 rise 1");
        let mut fleet = Fleet::set_up(haproxy, &[], &Setup { server, ..Setup::default() });
        let prompt = text(1, 200);
        (0..2).for_each(|at| fleet.step(at, &prompt));
        fleet.settled(&["exact"]);
        let held_by = |fleet: &Fleet| {
            let explained = fleet.road.agent.explain(COMPLETIONS, &json!({ "prompt": prompt }));
            ["s1", "s2"].map(|server| held(&explained, server)[0])
        };
        assert_eq!(held_by(&fleet), [192, 192]);
        fleet.kill(0);
        let lost = || ("load_only".to_owned(), "health_lost".to_owned());
        eventually("HAProxy or the polls have told", || (fleet.state(0) == lost()).then_some(()));
        assert_eq!(fleet.road.agent.metric("kvspoa_kv_disconnects_total"), 0.0);
        assert_eq!(held_by(&fleet), [0, 192]);
        fleet.revive(0);
        eventually("it has proven that it is another one", || (fleet.state(0).0 == "exact").then_some(()));
        assert_eq!(held_by(&fleet), [0, 192]);
    });
}

#[test]
fn adapters_and_salts_match_their_own_blocks_and_never_the_base_models() {
    for_each_binary(|haproxy| {
        let fleet = Fleet::start(haproxy, &["--lora", "sql"]);
        let prompt = text(1, 200);
        fleet.ask(&prompt, json!({}));
        let held_anywhere = |more: Value| {
            let mut body = json!({ "prompt": prompt });
            more.as_object().expect("a map").iter().for_each(|(name, value)| body[name] = value.clone());
            let explanation = fleet.road.agent.explain(COMPLETIONS, &body);
            ["s1", "s2"].map(|server| held(&explanation, server)[0]).iter().sum::<u64>()
        };
        assert_eq!(held_anywhere(json!({})), 192);
        eventually("the engine has told its adapters", || {
            (held_anywhere(json!({ "model": "sql" })) == 0).then_some(())
        });
        for own in [json!({ "model": "sql" }), json!({ "cache_salt": "a" }), json!({ "cache_salt": "b" })] {
            let first = fleet.ask(&prompt, own.clone());
            assert_eq!((first.cached, first.predicted), (0, [0, 0]), "{own}");
            let second = fleet.ask(&prompt, own.clone());
            assert_eq!(
                (second.cached, second.predicted, &second.served),
                (192, [192, 0], &first.served),
                "{own}"
            );
        }
        assert_eq!(held_anywhere(json!({})), 192);
    });
}

#[test]
fn in_a_mixed_fleet_each_replica_is_known_by_its_own_block_size() {
    for_each_binary(|haproxy| {
        let runtime = Runtime::new().expect("a runtime");
        let replicas: Vec<Replica> = ["16", "64"]
            .map(|size| runtime.block_on(Replica::start(&replica_args(&["--block-size", size]))))
            .into_iter()
            .collect::<Result<_, _>>()
            .expect("replicas");
        let feeds: Vec<Feed> = replicas.iter().map(Feed::of).collect();
        let road = Road::assemble(haproxy, runtime, replicas, &feeds, &Setup::default());
        let body = json!({ "prompt": text(1, 180), "max_tokens": 1 });
        let cached = || -> Vec<u64> {
            let ask = |replica: &Replica| {
                let request = http::request("POST", COMPLETIONS, &[], body.to_string().as_bytes());
                let answer = http::send(replica.http_addr(), &request);
                let json: Value = serde_json::from_slice(&answer.body).expect("JSON");
                json["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0)
            };
            road.replicas.iter().map(ask).collect()
        };
        assert_eq!(cached(), [0, 0]);
        eventually("both are known", || {
            let explained = road.agent.explain(COMPLETIONS, &body);
            (["s1", "s2"].map(|server| held(&explained, server)[0]) == [176, 128]).then_some(())
        });
        assert_eq!(cached(), [176, 128]);
    });
}

#[test]
fn each_data_parallel_rank_has_blocks_of_its_own_and_is_named_to_the_engine() {
    for_each_binary(|haproxy| {
        let runtime = Runtime::new().expect("a runtime");
        let mut args = replica_args(&["--ranks", "2"]);
        // Ports of their own for both ranks: a range that the system gives to nobody.
        let first = 30_000 + (free_port() % 500) * 4;
        args.events = format!("tcp://127.0.0.1:{first}");
        args.replay = format!("tcp://127.0.0.1:{}", first + 2);
        let replica = runtime.block_on(Replica::start(&args)).expect("a replica");
        let feed = Feed::of(&replica);
        let road = Road::assemble(haproxy, runtime, vec![replica], &[feed], &Setup::default());
        let holders = |prompt: &[u32]| -> Vec<u64> {
            let explanation = road.agent.explain(COMPLETIONS, &json!({ "prompt": prompt }));
            let replicas = explanation["replicas"].as_array().expect("a list").iter();
            let holding = replicas.filter(|replica| replica["gpu_tokens"] == 192);
            holding.map(|replica| replica["rank"].as_u64().expect("a rank")).collect()
        };
        let mut used = [0; 2];
        for number in 0..8 {
            let prompt = text(number, 200);
            let body = json!({ "prompt": prompt, "max_tokens": 1 });
            assert_eq!(road.post(COMPLETIONS, &body).status(), 200);
            let holder = eventually("the prompt's blocks are known", || holders(&prompt).first().copied());
            let answer: Value = serde_json::from_slice(&road.post(COMPLETIONS, &body).body).expect("JSON");
            assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 192, "rank {holder}");
            assert_eq!(holders(&prompt), [holder]);
            used[holder as usize] += 1;
        }
        assert!(used.iter().all(|count| *count > 0), "{used:?}");
    });
}

const SESSIONS: u32 = 24;

/// Long sessions, and for each a follow-up after the GPU caches were reset. Returns the share of the follow-ups' tokens
/// that was cached.
fn follow_ups_after_resets(haproxy: &Binary, counted: bool) -> f64 {
    let fleet = Fleet::start(haproxy, &["--blocks", "300", "--cpu-blocks", "4000"]);
    fleet.proxies.iter().for_each(|proxy| proxy.control.hide_cpu.store(!counted, Relaxed));
    let known = ["exact", "degraded"];
    let mut holders = Vec::new();
    for session in 0..SESSIONS {
        holders.push(fleet.ask(&text(session, 640), json!({})).served);
        eventually("the session is in the CPU tier", || {
            let stored = if counted {
                fleet.road.agent.metric_with("kvspoa_index_blocks", "tier=\"cpu\"")
            } else {
                fleet.proxies.iter().map(|proxy| proxy.control.hidden.load(Relaxed) as f64 * 40.0).sum()
            };
            (stored >= f64::from((session + 1) * 40)).then_some(())
        });
    }
    assert!(["s1", "s2"].iter().all(|server| holders.iter().any(|holder| holder == server)), "{holders:?}");
    let (mut cached, mut tokens) = (0, 0);
    let mut order: Vec<u32> = (0..SESSIONS).collect();
    fastrand::Rng::with_seed(3).shuffle(&mut order);
    for session in order {
        for at in 0..2 {
            fleet.reset(at);
            fleet.step(at, &text(7000 + session, 40));
        }
        fleet.settled(&known);
        let mut prompt = text(session, 640);
        prompt.extend(text(8000 + session, 20));
        let turn = fleet.ask(&prompt, json!({}));
        if counted {
            assert_eq!(turn.served, holders[session as usize], "session {session} left its prefix");
            assert_eq!((turn.predicted, turn.cached), ([0, 640], 640), "session {session}");
        }
        cached += turn.cached;
        tokens += prompt.len() as u64;
    }
    cached as f64 / tokens as f64
}

#[test]
fn a_reload_that_the_engine_counts_tells_that_a_reset_left_its_cpu_tier_alone() {
    for_each_binary(|haproxy| {
        let fleet = Fleet::start(haproxy, &["--cpu-blocks", "4000"]);
        let session = text(1, 640);
        fleet.step(0, &session);
        let stored = || fleet.road.agent.metric_with("kvspoa_index_blocks", "tier=\"cpu\"");
        eventually("the session is in the CPU tier", || (stored() >= 40.0).then_some(()));
        fleet.reset(0);
        fleet.step(0, &text(2, 40));
        let in_doubt = ("degraded".to_owned(), "lower_tiers_unconfirmed".to_owned());
        eventually("the reset is known", || (fleet.state(0) == in_doubt).then_some(()));
        let reports = fleet.road.agent.metric_with("kvspoa_engine_reports_total", "server=\"s1\"");
        eventually("the engine was asked since", || {
            let now = fleet.road.agent.metric_with("kvspoa_engine_reports_total", "server=\"s1\"");
            (now >= reports + 2.0).then_some(())
        });
        let batches = || fleet.proxies[0].control.next_seq.load(Relaxed);
        let before = batches();
        fleet.step(0, &[session, text(3, 20)].concat());
        eventually("the reload was seen", || (fleet.state(0).0 == "exact").then_some(()));
        assert!(batches() < before + 10, "its events alone would tell after more");
    });
}

#[test]
fn follow_ups_after_resets_go_where_the_cpu_tier_holds_the_prefix() {
    for_each_binary(|haproxy| {
        let counted = follow_ups_after_resets(haproxy, true);
        let not_counted = follow_ups_after_resets(haproxy, false);
        assert!(counted >= not_counted + 0.2, "{counted} against {not_counted}");
    });
}

/// A store of one block of `size` tokens, as vLLM has it since 0.24.
fn stored(hash: u64, tokens: &[u32], size: u32) -> Value {
    json!({
        "type": "BlockStored", "block_hashes": [hash], "parent_block_hash": null, "token_ids": tokens,
        "block_size": size, "medium": "GPU",
    })
}

/// Replicas that each have a fault of their own, but for the first two, which have none.
struct Faulty {
    road: Road,
    /// Of the third, between replica and agent.
    muted: FeedProxy,
    arrays: Publisher,
    without_tokens: Publisher,
    other_size: Publisher,
}

impl Faulty {
    const SERVERS: [&str; 6] = ["other_topic", "arrays", "mute", "without_tokens", "other_size", "dead_port"];

    fn start(binary: &Binary) -> Self {
        let runtime = Runtime::new().expect("a runtime");
        let args = replica_args(&["--topic", "kv@of-its-own"]);
        let replicas: Vec<Replica> = Self::SERVERS
            .iter()
            .map(|_| runtime.block_on(Replica::start(&args)).expect("a replica"))
            .collect();
        let muted = FeedProxy::start(&replicas[2].ranks()[0].events, "tcp://127.0.0.1:*");
        let [arrays, without_tokens, other_size] = [(); 3].map(|()| Publisher::start());
        let live = |endpoint: &str| Feed { events: endpoint.to_owned(), replay: None, polled: false };
        let feeds = [
            Feed::of(&replicas[0]),
            live(&arrays.endpoint),
            Feed { polled: true, ..live(&muted.endpoint) },
            live(&without_tokens.endpoint),
            live(&other_size.endpoint),
            live(&format!("tcp://{}", nobody())),
        ];
        let setup = Setup { ready: false, ..Setup::default() };
        let road = Road::assemble(binary, runtime, replicas, &feeds, &setup);
        Self { road, muted, arrays, without_tokens, other_size }
    }

    fn publish(&mut self) {
        for publisher in [&self.arrays, &self.without_tokens, &self.other_size] {
            publisher.wait_for_subscriber();
        }
        let prompt = text(1, 16);
        self.arrays.publish(&json!([["BlockStored", [1], null, prompt, 16, null]]));
        for hash in 0..16 {
            self.without_tokens.publish(&json!([stored(hash, &[], 16)]));
        }
        self.other_size.publish(&json!([stored(1, &text(2, 16), 16)]));
        for hash in 0..8 {
            self.other_size.publish(&json!([stored(hash, &text(2, 32), 32)]));
        }
    }

    /// Makes the third replica fill blocks of which nobody hears.
    fn mute(&self) {
        let step = |tokens: u32| {
            let body = json!({ "prompt": text(3, 40), "max_tokens": tokens }).to_string();
            let request = http::request("POST", COMPLETIONS, &[], body.as_bytes());
            assert_eq!(http::send(self.road.replicas[2].http_addr(), &request).status(), 200);
        };
        eventually("the proxy forwards", || {
            step(20);
            (self.state(2).0 == "exact").then_some(())
        });
        self.muted.control.loss_percent.store(100, Relaxed);
        eventually("its counters have told", || {
            step(100);
            (self.state(2).0 == "load_only").then_some(())
        });
    }

    fn state(&self, at: usize) -> (String, String) {
        let rank = &self.road.agent.ranks()[at];
        let text = |field: &str| rank[field].as_str().unwrap_or_default().to_owned();
        (text("state"), text("reason"))
    }

    fn fault(&self, at: usize, fault: &str) -> f64 {
        let labels = format!("server=\"s{}\",rank=\"0\",fault=\"{fault}\"", at + 1);
        self.road.agent.metric_with("kvspoa_replica_fault", &labels)
    }

    /// How often the agent warned of a fault of a server.
    fn warnings(&self, what: &str) -> usize {
        self.road.agent.said().lines().filter(|line| line.contains(" WARN ") && line.contains(what)).count()
    }
}

#[test]
fn whatever_keeps_a_replica_from_matching_is_a_state_with_a_reason_a_gauge_and_one_warning() {
    // Half a minute passes until a port is taken for dead: one HAProxy is enough.
    let mut faulty = Faulty::start(&binaries()[0]);
    let readyz = http::get(faulty.road.agent.admin, "/readyz").status();
    assert_eq!(readyz, 503, "not all were heard yet");
    faulty.publish();
    faulty.mute();

    // Prompts that have nothing in common with anything.
    for number in 0..200 {
        let body = json!({ "prompt": text(10_000 + number, 80), "max_tokens": 1 });
        assert_eq!(faulty.road.post(COMPLETIONS, &body).status(), 200);
    }
    let agent = &faulty.road.agent;
    assert_eq!(agent.metric("kvspoa_nothing_matches"), 1.0);
    let readyz: Value = serde_json::from_slice(&http::get(agent.admin, "/readyz").body).expect("JSON");
    assert_eq!(readyz["nothing_matches"], json!([POOL]));

    let none = String::new;
    let expected = [
        ("exact", none()),
        ("exact", none()),
        ("load_only", "silent".to_owned()),
        ("load_only", "no_token_ids".to_owned()),
        ("degraded", "block_size_changed".to_owned()),
        ("load_only", "unreachable".to_owned()),
    ];
    let deadline = Instant::now() + 2 * PATIENCE;
    for (at, (state, reason)) in expected.iter().enumerate() {
        let expected = (*state, reason.as_str());
        while faulty.state(at) != (expected.0.to_owned(), expected.1.to_owned()) {
            assert!(Instant::now() < deadline, "{}: {:?}", Faulty::SERVERS[at], faulty.state(at));
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    assert_eq!(http::get(agent.admin, "/readyz").status(), 200, "nothing is waited for any more");
    let explanation = agent.explain(COMPLETIONS, &json!({ "prompt": text(1, 40) }));
    for (at, (state, reason)) in expected.iter().enumerate() {
        let replica = &explanation["replicas"][at];
        assert_eq!(
            (&replica["state"], replica["state_reason"].as_str().unwrap_or("")),
            (&json!(state), &**reason)
        );
        for fault in ["silent", "no_token_ids", "block_size_changed", "unreachable"] {
            let is_its = f64::from(u8::from(fault == reason));
            assert_eq!(faulty.fault(at, fault), is_its, "{} {fault}", Faulty::SERVERS[at]);
            let said = faulty.warnings(&format!("server=\"s{}\" rank=0 fault=\"{fault}\"", at + 1));
            assert_eq!(said, usize::from(fault == reason), "{} {fault}", Faulty::SERVERS[at]);
        }
    }
    assert_eq!(faulty.warnings("fault=\"nothing_matches\""), 1);

    // Array events, and a topic of the engine's own, match.
    assert_eq!(held(&explanation, "s2")[0], 16);
    let prompt = text(4, 40);
    let body = json!({ "prompt": prompt, "max_tokens": 1 }).to_string();
    let request = http::request("POST", COMPLETIONS, &[], body.as_bytes());
    assert_eq!(http::send(faulty.road.replicas[0].http_addr(), &request).status(), 200);
    eventually("the step was told", || {
        (held(&agent.explain(COMPLETIONS, &json!({ "prompt": prompt })), "s1")[0] == 32).then_some(())
    });
    assert_eq!(faulty.road.post(COMPLETIONS, &json!({ "prompt": prompt, "max_tokens": 1 })).status(), 200);
    assert_eq!(agent.metric("kvspoa_nothing_matches"), 0.0);

    // The mute one heals when it speaks.
    faulty.muted.control.loss_percent.store(0, Relaxed);
    let body = json!({ "prompt": text(5, 40), "max_tokens": 1 }).to_string();
    let request = http::request("POST", COMPLETIONS, &[], body.as_bytes());
    assert_eq!(http::send(faulty.road.replicas[2].http_addr(), &request).status(), 200);
    eventually("it is heard again", || {
        (faulty.state(2) == ("degraded".to_owned(), "no_replay".to_owned())).then_some(())
    });
    assert_eq!(faulty.fault(2, "silent"), 0.0);
}
