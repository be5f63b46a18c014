//! The demonstration's load: users who chat in turns, each turn carrying the whole conversation so far.

use crate::client::{self, ClientError, Request};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::Method;
use serde_json::{Value, json};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{sync::Semaphore, task::JoinSet};

/// Who chats how much.
#[derive(Clone, Debug)]
pub(super) struct Load {
    pub(super) users: usize,
    pub(super) turns: usize,
    pub(super) concurrency: usize,
    pub(super) seed: u64,
}

/// One request as the client saw it.
#[derive(Clone, Debug)]
pub(super) struct Outcome {
    /// From sending the request to the first piece of the answer.
    pub(super) ttft: Duration,
    pub(super) prompt_tokens: u64,
    pub(super) cached_tokens: u64,
    /// The replica that served it.
    pub(super) replica: String,
}

/// Why a request failed, for the report.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("the answer broke off: {0}")]
    Broken(#[from] hyper::Error),
    #[error("status {0}")]
    Status(u16),
    #[error("the answer has no usage")]
    NoUsage,
}

/// Distinct system prompts: what an organisation's applications have in common.
const SYSTEM_PROMPTS: usize = 4;
const SYSTEM_WORDS: usize = 220;
const MESSAGE_WORDS: std::ops::Range<usize> = 25..70;
/// Tokens that each answer may have.
const ANSWER_TOKENS: u32 = 24;
/// A pause between a user's turns, so that another user's request can come first.
const THINK: std::ops::Range<u64> = 20..120;

/// Plays the load against `addr`. `progress` is called after each request.
pub(super) async fn play(
    addr: &str,
    load: &Load,
    progress: impl Fn() + Clone + Send + 'static,
) -> Vec<Result<Outcome, Failure>> {
    let gate = Arc::new(Semaphore::new(load.concurrency));
    let mut users = JoinSet::new();
    for user in 0..load.users {
        let (addr, load, gate, progress) =
            (addr.to_owned(), load.clone(), Arc::clone(&gate), progress.clone());
        users.spawn(async move { chat(&addr, user, &load, &gate, progress).await });
    }
    let mut outcomes = Vec::new();
    while let Some(done) = users.join_next().await {
        outcomes.extend(done.unwrap_or_default());
    }
    outcomes
}

async fn chat(
    addr: &str,
    user: usize,
    load: &Load,
    gate: &Semaphore,
    progress: impl Fn(),
) -> Vec<Result<Outcome, Failure>> {
    let mut random = fastrand::Rng::with_seed(load.seed ^ (user as u64) << 20);
    let system =
        words(&mut fastrand::Rng::with_seed(load.seed + (user % SYSTEM_PROMPTS) as u64), SYSTEM_WORDS);
    let mut messages = vec![json!({ "role": "system", "content": system })];
    let mut outcomes = Vec::new();
    for _ in 0..load.turns {
        tokio::time::sleep(Duration::from_millis(random.u64(THINK))).await;
        let length = random.usize(MESSAGE_WORDS);
        messages.push(json!({ "role": "user", "content": words(&mut random, length) }));
        let Ok(_turn) = gate.acquire().await else { break };
        let outcome = ask(addr, &messages).await;
        progress();
        match outcome {
            Ok((outcome, answer)) => {
                messages.push(json!({ "role": "assistant", "content": answer }));
                outcomes.push(Ok(outcome));
            }
            Err(failure) => {
                messages.pop();
                outcomes.push(Err(failure));
            }
        }
    }
    outcomes
}

/// One streamed chat completion: what it took, and the text answered.
async fn ask(addr: &str, messages: &[Value]) -> Result<(Outcome, String), Failure> {
    let body = json!({
        "messages": messages,
        "max_tokens": ANSWER_TOKENS,
        "stream": true,
        "stream_options": { "include_usage": true },
    });
    let sent = Instant::now();
    let request = Request {
        method: Method::POST,
        body: Bytes::from(body.to_string()),
        ..Request::get("/v1/chat/completions")
    };
    let response = client::exchange(addr, None, request).await?.0;
    if response.status() != 200 {
        return Err(Failure::Status(response.status().as_u16()));
    }
    let replica =
        response.headers().get("x-served-by").and_then(|value| value.to_str().ok()).unwrap_or("?").to_owned();
    let mut stream = response.into_body();
    let (mut ttft, mut answer, mut usage, mut rest) = (None, String::new(), None, Vec::new());
    while let Some(frame) = stream.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        rest.extend_from_slice(&data);
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = rest.drain(..=end).collect();
            let Some(event) = line.strip_prefix(b"data: ") else { continue };
            ttft.get_or_insert_with(|| sent.elapsed());
            let Ok(event) = serde_json::from_slice::<Value>(event) else { continue };
            if let Some(text) = event.pointer("/choices/0/delta/content").and_then(Value::as_str) {
                answer.push_str(text);
            }
            if event["usage"].is_object() {
                usage = Some(event["usage"].clone());
            }
        }
    }
    let usage = usage.ok_or(Failure::NoUsage)?;
    let count = |pointer: &str| usage.pointer(pointer).and_then(Value::as_u64).unwrap_or_default();
    let outcome = Outcome {
        ttft: ttft.unwrap_or_else(|| sent.elapsed()),
        prompt_tokens: count("/prompt_tokens"),
        cached_tokens: count("/prompt_tokens_details/cached_tokens"),
        replica,
    };
    Ok((outcome, answer))
}

/// A first request of the load's kind, to be explained.
pub(super) fn sample(load: &Load) -> Bytes {
    let system = words(&mut fastrand::Rng::with_seed(load.seed), SYSTEM_WORDS);
    let messages = [
        json!({ "role": "system", "content": system }),
        json!({ "role": "user", "content": "Which of our ships is in the harbour?" }),
    ];
    Bytes::from(json!({ "messages": messages }).to_string())
}

fn words(random: &mut fastrand::Rng, count: usize) -> String {
    const WORDS: &[&str] = &[
        "the", "request", "goes", "to", "a", "server", "that", "holds", "its", "prefix", "and", "every",
        "answer", "comes", "back", "as", "stream", "of", "tokens", "while", "other", "users", "wait", "for",
        "their", "turn", "in", "queue", "with", "long", "prompts", "about", "ships", "harbours", "rain",
        "cargo", "letters", "weather", "numbers", "maps", "engines", "copper", "paper", "winter", "because",
        "nothing", "is", "lost", "when", "we", "share", "memory", "between", "turns", "please", "explain",
        "how", "this", "works", "today",
    ];
    let picked: Vec<&str> = (0..count).map(|_| WORDS[random.usize(..WORDS.len())]).collect();
    picked.join(" ")
}
