//! The simulated replica through its sockets: HTTP as a client speaks it, KV events as a subscriber reads them.

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::server;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use kvspoa::agent::parity::{self, Verdict};
use kvspoa::client::{self, Access};
use kvspoa::config::{HttpAccess, HttpAddr, Rendering};
use kvspoa::prompt::{Model, ModelOptions};
use kvspoa::sim::{Replica, ReplicaArgs};
use serde_json::{Value, json};
use std::time::Duration;

/// Longer than anything here takes; only a failing test waits for it.
const PATIENCE: Duration = Duration::from_secs(20);

/// A fast replica on ports of the system's choice.
fn args() -> ReplicaArgs {
    ReplicaArgs {
        listen: ([127, 0, 0, 1], 0).into(),
        events: "tcp://127.0.0.1:*".to_owned(),
        replay: "tcp://127.0.0.1:*".to_owned(),
        topic: "kv@test@tiny".to_owned(),
        adapters: vec!["adapter".to_owned()],
        blocks: 1000,
        decode_step: Duration::from_micros(200),
        prefill_tokens_per_second: 1e6,
        ..ReplicaArgs::default()
    }
}

async fn start(args: ReplicaArgs) -> Replica {
    Replica::start(&args).await.expect("a replica")
}

async fn send(
    replica: &Replica,
    method: Method,
    path: &str,
    body: Value,
    rank: Option<u16>,
) -> Response<Incoming> {
    let stream = tokio::net::TcpStream::connect(replica.http_addr()).await.expect("a connection");
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.expect("a handshake");
    tokio::spawn(connection);
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let mut request = Request::builder().method(method).uri(path).header("host", "replica");
    if let Some(rank) = rank {
        request = request.header("x-data-parallel-rank", rank);
    }
    sender
        .send_request(request.body(Full::new(Bytes::from(body))).expect("a request"))
        .await
        .expect("an answer")
}

async fn text(response: Response<Incoming>) -> String {
    let body = response.into_body().collect().await.expect("a body");
    String::from_utf8(body.to_bytes().to_vec()).expect("text")
}

async fn get(replica: &Replica, path: &str) -> String {
    let response = send(replica, Method::GET, path, Value::Null, None).await;
    assert_eq!(response.status(), StatusCode::OK, "{path}");
    text(response).await
}

async fn post(replica: &Replica, path: &str, body: Value) -> Value {
    let response = send(replica, Method::POST, path, body, None).await;
    assert_eq!(response.status(), StatusCode::OK, "{path}");
    serde_json::from_str(&text(response).await).expect("JSON")
}

/// The chunks of a streamed answer, without the last, `[DONE]`.
fn chunks(stream: &str) -> Vec<Value> {
    let mut events: Vec<&str> = stream.split_terminator("\n\n").collect();
    assert_eq!(events.pop(), Some("data: [DONE]"));
    let json = |event: &str| serde_json::from_str(event.strip_prefix("data: ").expect("data")).expect("JSON");
    events.into_iter().map(json).collect()
}

fn chat(content: &str, more: Value) -> Value {
    let mut body = json!({ "model": "tiny", "messages": [{ "role": "user", "content": content }] });
    for (name, value) in more.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

fn long_text() -> String {
    "The quick brown fox jumps over the lazy dog. ".repeat(20)
}

fn cached_tokens(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count")
}

/// Whole blocks of the default 16 tokens, of which the last token is never a part.
const fn whole_blocks(tokens: u64) -> u64 {
    (tokens - 1) / 16 * 16
}

async fn wait_for_metric(replica: &Replica, line: &str) {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !get(replica, "/metrics").await.lines().any(|found| found.starts_with(line)) {
        assert!(tokio::time::Instant::now() < deadline, "{line} never came");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn subscribe(replica: &Replica, rank: usize) -> zmq::Socket {
    let socket = zmq::Context::new().socket(zmq::SUB).expect("a socket");
    socket.set_rcvtimeo(i32::try_from(PATIENCE.as_millis()).expect("it fits")).expect("an option");
    socket.set_subscribe(b"kv@").expect("an option");
    socket.connect(&replica.ranks()[rank].events).expect("a connection");
    socket
}

/// All that the replica has published, by replay: each batch's frames.
fn replay(replica: &Replica, first: u64) -> Vec<Vec<Vec<u8>>> {
    let socket = zmq::Context::new().socket(zmq::DEALER).expect("a socket");
    socket.set_rcvtimeo(i32::try_from(PATIENCE.as_millis()).expect("it fits")).expect("an option");
    socket.connect(&replica.ranks()[0].replay).expect("a connection");
    socket.send_multipart([&b""[..], &first.to_be_bytes()], 0).expect("a request");
    let mut batches = Vec::new();
    loop {
        let frames = socket.recv_multipart(0).expect("an answer");
        if frames.last().is_some_and(Vec::is_empty) {
            assert_eq!(frames, [vec![], vec![], vec![0xff; 8], vec![]], "the end marker");
            return batches;
        }
        batches.push(frames);
    }
}

fn events(payload: &[u8]) -> Vec<Value> {
    let batch: Value = rmp_serde::from_slice(payload).expect("msgpack");
    batch[1].as_array().expect("events").clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_streamed_chat_has_role_tokens_usage_and_an_end() {
    let replica = start(args()).await;
    let more = json!({ "stream": true, "stream_options": { "include_usage": true }, "max_tokens": 5, "return_token_ids": true });
    let response = send(&replica, Method::POST, "/v1/chat/completions", chat("Hello", more), None).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
    let chunks = chunks(&text(response).await);
    assert_eq!(chunks.len(), 1 + 5 + 1);
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({ "role": "assistant", "content": "" }));
    assert!(chunks[0]["prompt_token_ids"].as_array().is_some_and(|ids| ids.len() > 3));
    let finish: Vec<&Value> =
        chunks[1..6].iter().map(|chunk| &chunk["choices"][0]["finish_reason"]).collect();
    assert_eq!(finish, [&Value::Null, &Value::Null, &Value::Null, &Value::Null, &json!("length")]);
    assert!(
        chunks[1..6]
            .iter()
            .all(|chunk| chunk["choices"][0]["token_ids"].as_array().is_some_and(|ids| ids.len() == 1))
    );
    assert_eq!(chunks[6]["choices"], json!([]));
    assert_eq!(chunks[6]["usage"]["completion_tokens"], 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_prompt_again_is_cached_up_to_its_last_token() {
    let replica = start(args()).await;
    let ask = json!({ "model": "tiny", "prompt": long_text(), "max_tokens": 1 });
    assert_eq!(cached_tokens(&post(&replica, "/v1/completions", ask.clone()).await), 0);
    let again = post(&replica, "/v1/completions", ask).await;
    let prompt_tokens = again["usage"]["prompt_tokens"].as_u64().expect("a count");
    assert!(prompt_tokens > 100);
    assert_eq!(cached_tokens(&again), whole_blocks(prompt_tokens));
    let exact: Vec<u64> = (0..64).collect();
    let ask = json!({ "prompt": exact, "max_tokens": 1 });
    post(&replica, "/v1/completions", ask.clone()).await;
    assert_eq!(
        cached_tokens(&post(&replica, "/v1/completions", ask).await),
        48,
        "the last block is computed again"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_sent_back_as_the_next_turn_is_cached() {
    let replica = start(args()).await;
    let mut messages = vec![json!({ "role": "user", "content": long_text() })];
    let ask = |messages: &[Value]| json!({ "messages": messages, "max_tokens": 64, "ignore_eos": true });
    let first = post(&replica, "/v1/chat/completions", ask(&messages)).await;
    let before = first["usage"]["prompt_tokens"].as_u64().expect("a count");
    messages.push(first["choices"][0]["message"].clone());
    messages.push(json!({ "role": "user", "content": "And then?" }));
    let second = post(&replica, "/v1/chat/completions", ask(&messages)).await;
    // The last token of the answer was never computed.
    assert_eq!(cached_tokens(&second), (before + 63) / 16 * 16);
}

#[tokio::test(flavor = "multi_thread")]
async fn events_come_live_under_the_topic_and_again_by_replay() {
    let replica = start(args()).await;
    let socket = subscribe(&replica, 0);
    // A subscription takes a moment to reach the publisher: the first batches may be missed, but not for ever.
    let mut prompt = 0u64;
    let live = loop {
        post(&replica, "/v1/completions", json!({ "prompt": vec![prompt; 40], "max_tokens": 1 })).await;
        prompt += 1;
        if socket.poll(zmq::POLLIN, 50).expect("a poll") > 0 {
            break socket.recv_multipart(0).expect("a batch");
        }
        assert!(prompt < 400, "no batch ever came");
    };
    assert_eq!(live[0], b"kv@test@tiny");
    let number = u64::from_be_bytes(live[1].as_slice().try_into().expect("eight bytes"));
    let stored = &events(&live[2])[0];
    assert_eq!(stored["type"], "BlockStored");
    assert_eq!(stored["token_ids"], json!(vec![number; 32]));

    let all = replay(&replica, 0);
    assert_eq!(all.len() as u64, prompt);
    assert_eq!(all[number as usize], [vec![], live[0].clone(), live[1].clone(), live[2].clone()]);
    assert_eq!(replay(&replica, prompt - 1).len(), 1);
    assert_eq!(replay(&replica, prompt).len(), 0, "nothing in the future");
    assert_eq!(replay(&replica, u64::MAX).len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_is_told_with_the_next_step_and_not_before() {
    let replica = start(args()).await;
    let ask = |id: u64| json!({ "prompt": vec![id; 40], "max_tokens": 1 });
    post(&replica, "/v1/completions", ask(1)).await;
    assert_eq!(post(&replica, "/reset_prefix_cache", Value::Null).await, json!({ "success": true }));
    assert_eq!(replay(&replica, 0).len(), 1);
    assert_eq!(cached_tokens(&post(&replica, "/v1/completions", ask(1)).await), 0);
    let batches = replay(&replica, 1);
    assert_eq!(batches.len(), 1);
    let kinds: Vec<Value> = events(&batches[0][3]).iter().map(|event| event["type"].clone()).collect();
    assert_eq!(kinds, ["AllBlocksCleared", "BlockStored"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_of_a_stream_come_before_its_turn_and_a_client_that_goes_frees_the_engine() {
    let replica = start(ReplicaArgs { max_sequences: 1, ..args() }).await;
    let endless =
        json!({ "prompt": "Never ends.", "max_tokens": 10_000, "ignore_eos": true, "stream": true });
    let mut first = send(&replica, Method::POST, "/v1/completions", endless.clone(), None).await;
    assert!(first.frame().await.expect("a frame").expect("data").is_data());
    // The headers of this one are here, though the engine is taken.
    let second = send(&replica, Method::POST, "/v1/completions", endless, None).await;
    assert_eq!(second.status(), StatusCode::OK);
    wait_for_metric(&replica, "vllm:num_requests_waiting{engine=\"0\",model_name=\"tiny\"} 1.0").await;
    assert_eq!(post(&replica, "/reset_prefix_cache", Value::Null).await, json!({ "success": false }));
    drop(second);
    wait_for_metric(&replica, "vllm:num_requests_waiting{engine=\"0\",model_name=\"tiny\"} 0.0").await;
    wait_for_metric(&replica, "vllm:num_requests_running{engine=\"0\",model_name=\"tiny\"} 1.0").await;
    drop(first);
    wait_for_metric(&replica, "vllm:num_requests_running{engine=\"0\",model_name=\"tiny\"} 0.0").await;
    wait_for_metric(&replica, "vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"tiny\"} 0.0").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_rank_has_its_own_cache_events_and_source() {
    let replica = start(ReplicaArgs { ranks: 2, ..args() }).await;
    let sources: Value = serde_json::from_str(&get(&replica, "/kv_event_sources").await).expect("JSON");
    for rank in replica.ranks() {
        let source = &sources[rank.rank.to_string()];
        let (_, port) = rank.events.rsplit_once(':').expect("a port");
        assert_eq!(source["endpoint"], format!("tcp://*:{port}"));
        assert_eq!(source["replay_endpoint"], rank.replay.as_str());
        assert_eq!(source["topic"], "kv@test@tiny");
    }
    let ask = json!({ "prompt": vec![9; 100], "max_tokens": 1 });
    let mut cached = Vec::new();
    for rank in [1, 0, 1] {
        let response = send(&replica, Method::POST, "/v1/completions", ask.clone(), Some(rank)).await;
        cached.push(cached_tokens(&serde_json::from_str(&text(response).await).expect("JSON")));
    }
    assert_eq!(cached, [0, 0, 96]);
    let response = send(&replica, Method::POST, "/v1/completions", ask, Some(2)).await;
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
}

#[tokio::test(flavor = "multi_thread")]
async fn several_prompts_and_choices_are_requests_of_their_own() {
    let replica = start(args()).await;
    let ask =
        json!({ "prompt": [vec![5; 20], vec![6; 20]], "n": 2, "max_tokens": 3, "return_token_ids": true });
    let answer = post(&replica, "/v1/completions", ask).await;
    let choices = answer["choices"].as_array().expect("choices");
    assert_eq!(
        choices.iter().map(|choice| choice["index"].as_u64()).collect::<Vec<_>>(),
        [0, 1, 2, 3].map(Some)
    );
    assert_eq!(choices[1]["prompt_token_ids"][0], 5);
    assert_eq!(choices[2]["prompt_token_ids"][0], 6);
    assert_ne!(choices[0]["text"], choices[1]["text"]);
    assert_eq!(answer["usage"]["prompt_tokens"], 40);
    assert_eq!(answer["usage"]["completion_tokens"], 12);
}

#[tokio::test(flavor = "multi_thread")]
async fn adapters_are_models_with_blocks_of_their_own() {
    let replica = start(args()).await;
    let models: Value = serde_json::from_str(&get(&replica, "/v1/models").await).expect("JSON");
    assert_eq!(models["data"][0]["id"], "tiny");
    assert_eq!(models["data"][0]["max_model_len"], 999 * 16);
    assert_eq!(models["data"][1]["id"], "adapter");
    assert_eq!(models["data"][1]["parent"], "tiny");
    let ask = |model: &str| json!({ "model": model, "prompt": vec![8; 40], "max_tokens": 1 });
    post(&replica, "/v1/completions", ask("tiny")).await;
    assert_eq!(cached_tokens(&post(&replica, "/v1/completions", ask("adapter")).await), 0);
    let batches = replay(&replica, 1);
    assert_eq!(events(&batches[0][3])[0]["lora_name"], "adapter");
    let unknown = send(&replica, Method::POST, "/v1/completions", ask("other"), None).await;
    assert_eq!(unknown.status(), StatusCode::NOT_FOUND);
}

#[tokio::test(flavor = "multi_thread")]
async fn tokenize_gives_the_ids_that_the_prompt_has() {
    let replica = start(args()).await;
    let ask = chat("How many tokens?", json!({ "max_tokens": 1, "return_token_ids": true }));
    let tokenized = post(&replica, "/tokenize", ask.clone()).await;
    let answer = post(&replica, "/v1/chat/completions", ask).await;
    assert_eq!(tokenized["tokens"], answer["prompt_token_ids"]);
    assert_eq!(tokenized["count"], answer["usage"]["prompt_tokens"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_answered_is_refused_with_vllms_error_object() {
    let replica = start(args()).await;
    for body in [
        json!({ "prompt": vec![1; 20_000], "max_tokens": 1 }),
        json!({ "prompt": "Hello", "max_tokens": 20_000 }),
        json!({ "prompt": "Hello", "n": 0 }),
        json!({ "prompt": "" }),
        json!(["not an object"]),
    ] {
        let response = send(&replica, Method::POST, "/v1/completions", body, None).await;
        assert_eq!(response.status(), StatusCode::BAD_REQUEST);
        let answer: Value = serde_json::from_str(&text(response).await).expect("JSON");
        assert_eq!(answer["error"]["type"], "BadRequestError");
        assert_eq!(answer["error"]["code"], 400);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_starts_again_has_the_same_ports_the_same_hashes_and_new_numbers() {
    let ask = json!({ "prompt": vec![3; 40], "max_tokens": 1 });
    let first = start(args()).await;
    post(&first, "/v1/completions", json!({ "prompt": vec![2; 40], "max_tokens": 1 })).await;
    post(&first, "/v1/completions", ask.clone()).await;
    let before = replay(&first, 1);
    let rank = first.ranks()[0].clone();
    let again = ReplicaArgs { listen: first.http_addr(), events: rank.events, replay: rank.replay, ..args() };
    first.stop().await;
    let second = start(again).await;
    assert!(replay(&second, 0).is_empty(), "nothing says that it is another process");
    assert_eq!(cached_tokens(&post(&second, "/v1/completions", ask).await), 0);
    let after = replay(&second, 0);
    assert_eq!(after[0][2], 0u64.to_be_bytes());
    assert_eq!(events(&after[0][3]), events(&before[0][3]));
}

async fn verdicts(replica: &HttpAddr, model: &Model) -> Vec<(&'static str, Verdict)> {
    let access = Access::load(&HttpAccess::default()).expect("no files are named");
    let mut verdicts = Vec::new();
    for probe in parity::probes() {
        verdicts.push((probe.name, parity::ask(&access, replica, model, &probe).await));
    }
    verdicts
}

#[tokio::test]
async fn a_replica_is_asked_whether_it_makes_our_tokens() {
    let replica = start(args()).await;
    let addr: HttpAddr = replica.http_addr().to_string().parse().expect("an address");
    let same = Model::embedded().expect("the embedded model");
    for (name, verdict) in verdicts(&addr, &same).await {
        assert!(matches!(verdict, Verdict::Equal { tokens: 4.. }), "{name}: {verdict:?}");
    }

    // Another template: it is told where it differs, and that texts without one do not.
    let dir = tempfile::tempdir().expect("a directory");
    let template = dir.path().join("other.jinja");
    let source = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}{% endfor %}";
    std::fs::write(&template, source).expect("a file");
    let rendering = Rendering { chat_template: Some(template), ..Rendering::default() };
    let other = Model::embedded_with(ModelOptions::from(&rendering)).expect("a model");
    for (name, verdict) in verdicts(&addr, &other).await {
        assert_eq!(verdict.is_fault(), name != "text", "{name}: {verdict:?}");
        if let (Verdict::Different(parity), "plain") = (verdict, name) {
            assert_eq!((parity.differ_at, parity.theirs > 4), (Some(2), true), "behind the role");
        }
    }

    replica.stop().await;
    let (_, verdict) = verdicts(&addr, &same).await.remove(0);
    assert!(matches!(verdict, Verdict::NoAnswer(_)), "{verdict:?}");
}

/// The replica behind something that hides its `/tokenize`.
async fn without_tokenize(replica: &Replica) -> HttpAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let (addr, behind) = (listener.local_addr().expect("an address"), replica.http_addr().to_string());
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let behind = behind.clone();
            let answer = service_fn(move |request: Request<Incoming>| {
                let behind = behind.clone();
                async move {
                    let path = request.uri().path().to_owned();
                    let body = request.into_body().collect().await.expect("a body").to_bytes();
                    let mut response = Response::new(Full::new(Bytes::new()));
                    if path == "/tokenize" {
                        *response.status_mut() = StatusCode::NOT_FOUND;
                    } else {
                        let answer = client::post(&behind, &path, body).await.expect("an answer");
                        *response.status_mut() = StatusCode::from_u16(answer.status).expect("a status");
                        *response.body_mut() = Full::new(answer.body);
                    }
                    Ok::<_, std::convert::Infallible>(response)
                }
            });
            tokio::spawn(server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), answer));
        }
    });
    addr.to_string().parse().expect("an address")
}

#[tokio::test]
async fn where_tokenize_is_hidden_the_render_endpoints_tell() {
    let model = Model::embedded().expect("the embedded model");
    let told = start(ReplicaArgs { enable_scale_out: true, ..args() }).await;
    let behind = without_tokenize(&told).await;
    for (name, verdict) in verdicts(&behind, &model).await {
        assert!(matches!(verdict, Verdict::Equal { tokens: 4.. }), "{name}: {verdict:?}");
    }
    // vLLM without --enable-scale-out.
    let untold = start(args()).await;
    let behind = without_tokenize(&untold).await;
    for (name, verdict) in verdicts(&behind, &model).await {
        assert_eq!(verdict, Verdict::NotTold { status: 403 }, "{name}");
    }
}
