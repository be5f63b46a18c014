//! The replica's HTTP interface: the paths of vLLM's server that a router or a client uses.

use super::answer::{AnswerStream, Writing, ids};
use super::driver::EngineHandle;
use super::metrics_page::{self, CacheInfo};
use super::request::{Generation, RequestError, Served};
use super::token_store::TokenStore;
use crate::request::body::{BodyError, Endpoint};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited, combinators::UnsyncBoxBody};
use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use serde_json::{Value, json};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// A longer body is refused; a million tokens of text fit.
const MAX_BODY_BYTES: usize = 64 << 20;
/// The release whose interfaces these are.
const VLLM_VERSION: &str = "0.32.0";
/// The request header that chooses a data-parallel rank.
const RANK_HEADER: &str = "x-data-parallel-rank";
/// The request header that names tokens sent ahead (Ray Serve).
const TOKEN_KEY_HEADER: &str = "x-serve-router-kv-token-key";

type ReplyBody = UnsyncBoxBody<Bytes, Infallible>;

/// What the HTTP interface serves.
#[derive(Debug)]
pub(super) struct Server {
    served: Arc<Served>,
    ranks: Vec<ServedRank>,
    cache: CacheInfo,
    told: Told,
    started: u64,
    next_answer: AtomicU64,
}

/// What it says of itself, and to whom.
#[derive(Debug)]
pub(super) struct Told {
    /// The topic of its KV events.
    pub(super) topic: String,
    /// Whether it publishes any.
    pub(super) publishes: bool,
    /// Whether it tells requests' tokens under `/render`.
    pub(super) renders: bool,
    /// The key that requests under `/v1` must bring.
    pub(super) api_key: Option<String>,
}

/// One data-parallel rank.
#[derive(Debug)]
pub(super) struct ServedRank {
    pub(super) number: u16,
    pub(super) engine: EngineHandle,
    pub(super) events_endpoint: String,
    /// Whether the publisher connects to a subscriber that listens.
    pub(super) events_connect: bool,
    pub(super) replay_endpoint: String,
    /// The prompts' tokens that were sent ahead.
    pub(super) tokens: Option<TokenStore>,
}

impl ServedRank {
    /// The endpoint as vLLM is told it: without a wildcard its publisher would connect.
    fn configured_endpoint(&self) -> String {
        match self.events_endpoint.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':')) {
            Some((_, port)) if !self.events_connect => format!("tcp://*:{port}"),
            _ => self.events_endpoint.clone(),
        }
    }
}

impl Server {
    pub(super) fn new(served: Served, ranks: Vec<ServedRank>, cache: CacheInfo, told: Told) -> Self {
        Self { served: Arc::new(served), ranks, cache, told, started: now(), next_answer: AtomicU64::new(1) }
    }

    /// Answers one request. Errors are answers too.
    pub(super) async fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
    ) -> Result<Response<ReplyBody>, Infallible> {
        let (head, body) = request.into_parts();
        let query = head.uri.query().unwrap_or_default();
        if !self.is_allowed(head.uri.path(), &head.headers) {
            return Ok(json_reply(StatusCode::UNAUTHORIZED, &json!({ "error": "Unauthorized" })));
        }
        let reply = match (&head.method, head.uri.path()) {
            (&Method::GET, "/health" | "/ping") => reply(StatusCode::OK, "text/plain", String::new()),
            (&Method::GET, "/version") => json_reply(StatusCode::OK, &json!({ "version": VLLM_VERSION })),
            (&Method::GET, "/metrics") => {
                reply(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", self.metrics())
            }
            (&Method::GET, "/v1/models") => json_reply(StatusCode::OK, &self.models()),
            (&Method::GET, "/kv_event_sources") => json_reply(StatusCode::OK, &self.event_sources()),
            (&Method::POST, "/reset_prefix_cache") => {
                let success = self.reset(query.split('&').any(|part| part == "reset_external=true")).await;
                json_reply(StatusCode::OK, &json!({ "success": success }))
            }
            (&Method::POST, path) => match read(body).await {
                Err(reply) => reply,
                Ok(body) => match (path, Endpoint::from_path(path)) {
                    ("/tokenize", _) => self.tokenize(body).await,
                    ("/v1/chat/completions/render" | "/v1/completions/render", _) => {
                        self.render(path, body).await
                    }
                    (_, Some(endpoint)) => self.generate(endpoint, &head.headers, body).await,
                    _ => not_found(),
                },
            },
            _ => not_found(),
        };
        Ok(reply)
    }

    async fn generate(&self, endpoint: Endpoint, headers: &HeaderMap, body: Bytes) -> Response<ReplyBody> {
        let served = Arc::clone(&self.served);
        let Some(rank) = self.choose_rank(headers) else {
            return error_reply(&RequestError::Invalid("there is no such data-parallel rank"));
        };
        let key = headers.get(TOKEN_KEY_HEADER).and_then(|key| key.to_str().ok());
        let staged = key.and_then(|key| rank.tokens.as_ref()?.take(key));
        let generation = match off_the_loop(move || served.generation(endpoint, &body, staged)).await {
            Ok(generation) => generation,
            Err(error) => return error_reply(&error),
        };
        let is_streamed = generation.is_streamed;
        let answers = rank.engine.submit(jobs(&generation));
        let writing = Writing::new(generation, self.next_answer.fetch_add(1, Ordering::Relaxed), now());
        if is_streamed {
            return stream_reply(AnswerStream::new(writing, answers));
        }
        match writing.collect(answers).await {
            Some(answer) => json_reply(StatusCode::OK, &answer),
            None => {
                reply(StatusCode::INTERNAL_SERVER_ERROR, "text/plain", "the engine has stopped".to_owned())
            }
        }
    }

    async fn tokenize(&self, body: Bytes) -> Response<ReplyBody> {
        let served = Arc::clone(&self.served);
        match off_the_loop(move || served.tokenize(&body)).await {
            Ok(tokens) => json_reply(
                StatusCode::OK,
                &json!({
                    "count": tokens.len(),
                    "max_model_len": self.served.max_model_len,
                    "tokens": ids(&tokens),
                    "token_strs": null,
                }),
            ),
            Err(error) => error_reply(&error),
        }
    }

    /// vLLM asks for its key under /v1 alone.
    fn is_allowed(&self, path: &str, headers: &HeaderMap) -> bool {
        let Some(key) = self.told.api_key.as_ref().filter(|_| path.starts_with("/v1")) else { return true };
        headers.get(AUTHORIZATION).is_some_and(|value| value.as_bytes() == format!("Bearer {key}").as_bytes())
    }

    /// What a request's prompt would be, without computing it.
    async fn render(&self, path: &str, body: Bytes) -> Response<ReplyBody> {
        let Some(endpoint) = path.strip_suffix("/render").and_then(Endpoint::from_path) else {
            return not_found();
        };
        if !self.told.renders {
            let why = json!({ "error": { "message": "needs --enable-scale-out", "code": 403 } });
            return json_reply(StatusCode::FORBIDDEN, &why);
        }
        let served = Arc::clone(&self.served);
        let generation = match off_the_loop(move || served.generation(endpoint, &body, None)).await {
            Ok(generation) => generation,
            Err(error) => return error_reply(&error),
        };
        let prompt = |prompt: &super::Prompt| json!({ "token_ids": ids(&prompt.tokens) });
        let prompts: Vec<Value> = generation.prompts.iter().map(prompt).collect();
        match (endpoint, prompts.first()) {
            (Endpoint::ChatCompletions, Some(only)) => json_reply(StatusCode::OK, only),
            _ => json_reply(StatusCode::OK, &Value::Array(prompts)),
        }
    }

    /// The rank that the request names; else the one with the least to do, where a waiting request counts as four.
    fn choose_rank(&self, headers: &HeaderMap) -> Option<&ServedRank> {
        if let Some(wanted) = headers.get(RANK_HEADER) {
            let wanted: u16 = wanted.to_str().ok()?.parse().ok()?;
            return self.ranks.iter().find(|rank| rank.number == wanted);
        }
        self.ranks.iter().min_by_key(|rank| {
            let stats = rank.engine.stats();
            stats.running + 4 * stats.waiting
        })
    }

    async fn reset(&self, external: bool) -> bool {
        let mut success = true;
        for rank in &self.ranks {
            success &= rank.engine.reset_prefix_cache(external).await;
        }
        success
    }

    fn metrics(&self) -> String {
        let ranks: Vec<_> = self.ranks.iter().map(|rank| (rank.number, rank.engine.stats())).collect();
        let stores = self.ranks.iter().filter_map(|rank| rank.tokens.as_ref());
        let staged = stores.map(TokenStore::taken).sum();
        metrics_page::render(&self.served.name, &self.cache, &ranks) + &metrics_page::staged_prompts(staged)
    }

    fn models(&self) -> Value {
        let card = |id: &str, parent: Option<&str>| {
            json!({
                "id": id,
                "object": "model",
                "created": self.started,
                "owned_by": "vllm",
                "root": id,
                "parent": parent,
                "max_model_len": if parent.is_none() { Some(self.served.max_model_len) } else { None },
                "permission": [],
            })
        };
        let base = self.served.name.as_str();
        let adapters = self.served.adapters.iter().map(|adapter| card(&adapter.name, Some(base)));
        json!({ "object": "list", "data": std::iter::once(card(base, None)).chain(adapters).collect::<Value>() })
    }

    fn event_sources(&self) -> Value {
        let source = |rank: &ServedRank| {
            let source = json!({
                "enable_kv_cache_events": self.told.publishes,
                "publisher": "zmq",
                "endpoint": rank.configured_endpoint(),
                "replay_endpoint": rank.replay_endpoint,
                "buffer_steps": super::publisher::BUFFER_STEPS,
                "hwm": super::publisher::HIGH_WATER_MARK,
                "max_queue_size": super::publisher::MAX_QUEUE,
                "topic": self.told.topic,
            });
            (rank.number.to_string(), source)
        };
        Value::Object(self.ranks.iter().map(source).collect())
    }
}

fn jobs(generation: &Generation) -> impl Iterator<Item = (super::Prompt, Vec<crate::units::TokenId>)> {
    generation.choices.iter().filter_map(|choice| {
        let prompt = generation.prompts.get(choice.prompt)?;
        Some((prompt.clone(), choice.tokens()))
    })
}

/// Runs what takes milliseconds of computing where it holds up no connection.
async fn off_the_loop<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, RequestError> + Send + 'static,
) -> Result<T, RequestError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or(Err(RequestError::Invalid("the request could not be read")))
}

async fn read(body: Incoming) -> Result<Bytes, Response<ReplyBody>> {
    let collected = Limited::new(body, MAX_BODY_BYTES).collect().await;
    collected.map(http_body_util::Collected::to_bytes).map_err(|_| error_reply(&BodyError::Malformed.into()))
}

fn reply(status: StatusCode, content_type: &'static str, body: String) -> Response<ReplyBody> {
    let mut reply = Response::new(Full::new(Bytes::from(body)).boxed_unsync());
    *reply.status_mut() = status;
    reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    reply
}

fn json_reply(status: StatusCode, body: &Value) -> Response<ReplyBody> {
    reply(status, "application/json", body.to_string())
}

/// The headers go out at once, whenever the first token comes.
fn stream_reply(stream: AnswerStream) -> Response<ReplyBody> {
    let mut reply = Response::new(stream.boxed_unsync());
    reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    reply
}

fn error_reply(error: &RequestError) -> Response<ReplyBody> {
    let status = error.status();
    let kind = if status == StatusCode::NOT_FOUND { "NotFoundError" } else { "BadRequestError" };
    let error = json!({ "message": error.to_string(), "type": kind, "param": null, "code": status.as_u16() });
    json_reply(status, &json!({ "error": error }))
}

fn not_found() -> Response<ReplyBody> {
    json_reply(StatusCode::NOT_FOUND, &json!({ "detail": "Not Found" }))
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
