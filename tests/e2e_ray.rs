//! What kvspoa does for replicas and HAProxies of Ray Serve, with every HAProxy that is there.

mod support;

use kvspoa::events::Endpoint;
use kvspoa::replica::TokenChannels;
use kvspoa::sim::Replica;
use kvspoa::units::TokenId;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use support::haproxy::for_each_binary;
use support::http::{self, Message};
use support::road::{AgentProcess, Road, replica_args};
use support::{eventually, free_port};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn road(haproxy: &support::haproxy::Binary) -> Road {
    Road::start(haproxy, 2, &["--tokens", "tcp://127.0.0.1:*"])
}

fn chat(word: &str) -> Value {
    json!({ "messages": [{ "role": "user", "content": word.repeat(40) }], "max_tokens": 2 })
}

fn sent(road: &Road) -> f64 {
    road.agent.metric_with("kvspoa_token_pushes_total", "sent")
}

/// Prompts for which the replicas used tokens that were sent ahead.
fn used(road: &Road) -> f64 {
    let of = |address| {
        let page = http::get(address, "/metrics").text();
        let line = page.lines().find(|line| line.starts_with("kvspoa_replica:staged_prompts_total"));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).expect("a counter")
    };
    road.replicas.iter().map(|replica| of(replica.http_addr())).sum()
}

fn prompt_tokens(answer: &Message) -> u64 {
    assert_eq!(answer.status(), 200, "{}", answer.text());
    let answer: Value = serde_json::from_slice(&answer.body).expect("JSON");
    answer["usage"]["prompt_tokens"].as_u64().expect("a number")
}

/// Asks until the tokens go ahead: the lines to the token stores are connected in the background.
fn warm_up(road: &Road) {
    eventually("tokens go ahead", || {
        road.post(CHAT, &chat("warm "));
        (sent(road) > 0.0).then_some(())
    });
}

#[test]
fn a_prompts_tokens_go_ahead_of_its_request() {
    for_each_binary(|haproxy| {
        let road = road(haproxy);
        warm_up(&road);
        for body in [chat("one "), chat("two "), chat("three ")] {
            let expected = road.agent.explain(CHAT, &body)["prompt_tokens"].as_u64().expect("a number");
            assert_eq!(prompt_tokens(&road.post(CHAT, &body)), expected);
        }
        // Nothing waits for the tokens: a request that overtakes them is tokenized again.
        eventually("a replica uses tokens that were sent ahead", || {
            road.post(CHAT, &chat("four "));
            (used(&road) > 0.0).then_some(())
        });
        assert!(used(&road) <= sent(&road));
    });
}

#[test]
fn rays_variable_tells_the_port_at_which_replicas_take_tokens() {
    let port = free_port();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let args = replica_args(&["--tokens", &format!("tcp://127.0.0.1:{port}")]);
    let replica = runtime.block_on(Replica::start(&args)).expect("a replica");
    let pool = format!(
        "[[pool]]\nbackend = \"llm\"\n[[pool.replica]]\nserver = \"s1\"\nhttp = \"{}\"\n",
        replica.http_addr()
    );
    let directory = tempfile::tempdir().expect("a directory");
    let port = port.to_string();
    let agent = AgentProcess::start_with(directory.path(), &pool, &[("KV_TOKEN_PORT_BASE", &port)]);
    agent.wait_until_ready();
    eventually("the answer names tokens that were sent ahead", || {
        let body = chat("ahead ").to_string();
        let json = [("content-type", "application/json")];
        let asked = http::request("POST", "/internal/route", &json, body.as_bytes());
        let answer: Value = serde_json::from_slice(&http::send(agent.admin, &asked).body).expect("JSON");
        answer["request_headers"].get("x-serve-router-kv-token-key").map(|_| ())
    });
}

#[test]
fn tokens_do_not_go_ahead_where_the_engine_needs_the_prompt_itself() {
    for_each_binary(|haproxy| {
        let road = road(haproxy);
        warm_up(&road);
        let image = json!({ "type": "image_url", "image_url": { "url": "http://127.0.0.1/1.png" } });
        let text = json!({ "type": "text", "text": "What is this? ".repeat(40) });
        let before = sent(&road);
        for (path, body) in [
            (COMPLETIONS, json!({ "prompt": "again ".repeat(40), "max_tokens": 2, "echo": true })),
            (COMPLETIONS, json!({ "prompt": ["one ".repeat(40), "two ".repeat(40)], "max_tokens": 2 })),
            (CHAT, json!({ "messages": [{ "role": "user", "content": [text, image] }], "max_tokens": 2 })),
            (
                CHAT,
                json!({ "messages": chat("cut ")["messages"], "max_tokens": 2, "truncate_prompt_tokens": 9 }),
            ),
            ("/v1/messages", json!({ "messages": chat("other ")["messages"], "max_tokens": 2 })),
        ] {
            road.post(path, &body);
        }
        assert_eq!(sent(&road), before);
        assert_eq!(
            prompt_tokens(&road.post(COMPLETIONS, &json!({ "prompt": "last ".repeat(40), "max_tokens": 2 }))),
            road.agent.explain(COMPLETIONS, &json!({ "prompt": "last ".repeat(40) }))["prompt_tokens"]
                .as_u64()
                .expect("a number")
        );
    });
}

#[test]
fn a_client_cannot_name_tokens_of_another() {
    for_each_binary(|haproxy| {
        let road = road(haproxy);
        let key = "0123456789abcdef0123456789abcdef";
        let context = zmq::Context::new();
        let pusher = context.socket(zmq::PUSH).expect("a socket");
        for replica in &road.replicas {
            let store = replica.ranks()[0].tokens.clone().expect("a token store");
            pusher.connect(&store).expect("connected");
            pusher.send_multipart([key.as_bytes(), &[1, 0, 0, 0]], 0).expect("sent");
        }
        let body = chat("mine ");
        let expected = road.agent.explain(CHAT, &body)["prompt_tokens"].as_u64();
        let headers = [("x-serve-router-kv-token-key", key)];
        let answer =
            http::send(road.http, &http::request("POST", CHAT, &headers, body.to_string().as_bytes()));
        assert_eq!(Some(prompt_tokens(&answer)), expected);
    });
}

/// As Ray's HAProxy asks.
fn ask(road: &Road, id: &str, body: &[u8], more: &[(&str, &str)]) -> Message {
    let mut headers = vec![("content-type", "application/json"), ("x-request-id", id)];
    headers.extend(more);
    http::send(road.agent.admin, &http::request("POST", "/internal/route", &headers, body))
}

fn send_report(road: &Road, body: &[u8]) -> Message {
    let json = [("content-type", "application/json")];
    http::send(road.agent.admin, &http::request("POST", "/lifecycle", &json, body))
}

fn report(road: &Road, name: &str, arguments: Value) -> Value {
    let answer = send_report(road, json!([[name, arguments]]).to_string().as_bytes());
    assert_eq!(answer.status(), 200, "{}", answer.text());
    serde_json::from_slice(&answer.body).expect("JSON")
}

#[test]
fn rays_haproxy_is_answered_as_by_rays_router() {
    for_each_binary(|haproxy| {
        let road = road(haproxy);
        let body = chat("ask ").to_string();
        let answer = ask(&road, "a", body.as_bytes(), &[("x-session-id", "s")]);
        assert_eq!(answer.status(), 200, "{}", answer.text());
        let json: Value = serde_json::from_slice(&answer.body).expect("JSON");
        let replica = json["replica_id"].as_str().expect("a name");
        assert!(replica.starts_with("SERVE_REPLICA::app#"), "{json}");
        let ports: Vec<u64> = road.replicas.iter().map(|replica| replica.http_addr().port().into()).collect();
        assert!(ports.contains(&json["port"].as_u64().expect("a port")), "{json}");
        assert_eq!(json["host"], "127.0.0.1");
        // A body that was cut gets an answer like any other, never an error: Ray's HAProxy would pass that on.
        let cut = &body.as_bytes()[..body.len() / 2];
        let length = format!("{}/{}", cut.len(), body.len());
        assert_eq!(ask(&road, "b", cut, &[("x-body-truncated", &length)]).status(), 200);
        assert_eq!(ask(&road, "c", b"no JSON", &[]).status(), 200);
        // A form on a page in a browser is no replica.
        let form = [("content-type", "text/plain")];
        for path in ["/internal/route", "/lifecycle"] {
            let request = http::request("POST", path, &form, br#"[["on_request_completed", ["a"]]]"#);
            assert_eq!(http::send(road.agent.admin, &request).status(), 415, "{path}");
        }
    });
}

#[test]
fn what_rays_replicas_report_ends_the_bookings() {
    for_each_binary(|haproxy| {
        let road = road(haproxy);
        let body = chat("book ").to_string();
        ask(&road, "first", body.as_bytes(), &[]);
        assert_eq!(
            road.agent.metric("kvspoa_requests"),
            0.0,
            "no booking before it is known that it will end"
        );
        report(&road, "on_request_completed", json!(["first"]));
        ask(&road, "second", body.as_bytes(), &[]);
        assert_eq!(road.agent.metric("kvspoa_requests"), 1.0);
        assert!(road.agent.metric("kvspoa_prefill_tokens") > 0.0);
        assert_eq!(report(&road, "on_prefill_complete", json!(["second"]))["applied"], 1);
        assert_eq!(road.agent.metric("kvspoa_prefill_tokens"), 0.0);
        assert_eq!(report(&road, "on_decode_progress", json!(["second", 4000]))["applied"], 1);
        assert_eq!(report(&road, "on_request_completed", json!(["second"]))["applied"], 1);
        assert_eq!(report(&road, "on_request_completed", json!(["second"]))["ignored"], 1);
        assert_eq!(report(&road, "on_something_new", json!(["second"]))["ignored"], 1);
        for gauge in ["kvspoa_requests", "kvspoa_prefill_tokens", "kvspoa_booked_blocks"] {
            assert_eq!(road.agent.metric(gauge), 0.0, "{gauge}");
        }
        assert_eq!(send_report(&road, b"{}").status(), 400);
    });
}

/// Ray's own receiver: it prints its port, and then each message as it keeps it.
const RECEIVER: &str = r#"
import asyncio, json, socket
from ray.llm._internal.serve.routing_policies.kv_aware.token_channel import TokenReceiver, TokenStore, decode_prompt_token_ids

class Store(TokenStore):
    def put(self, key, *, payload):
        super().put(key, payload=payload)
        print(json.dumps([key, decode_prompt_token_ids(self.pop(key).payload)]), flush=True)

async def main():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = "tcp://127.0.0.1:%d" % free.getsockname()[1]
    assert await TokenReceiver(bind_endpoint=endpoint, store=Store()).start()
    print(endpoint, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"#;

#[test]
fn rays_own_receiver_takes_the_tokens() {
    let Some(python) = std::env::var_os("KVSPOA_RAY_PYTHON") else {
        eprintln!("skipped: scripts/test-ray runs it");
        return;
    };
    let receiver = std::process::Command::new(python)
        .args(["-c", RECEIVER])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("Python starts");
    let mut receiver = Killed(receiver);
    let mut lines = BufReader::new(receiver.0.stdout.take().expect("piped")).lines();
    let endpoint = lines.next().expect("an endpoint").expect("text");
    let endpoint = Endpoint::parse(&endpoint).expect("an endpoint");
    let channel = TokenChannels::default().connect(endpoint).expect("a socket");
    let tokens: Vec<TokenId> = [0, 1, 151_643, u32::MAX].map(TokenId).to_vec();
    let key = eventually("Ray's receiver takes tokens", || channel.push(tokens.iter().copied()));
    let kept: Value = serde_json::from_str(&lines.next().expect("a message").expect("text")).expect("JSON");
    assert_eq!(kept, json!([key.to_string(), [0, 1, 151_643, u32::MAX]]));
}

struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
