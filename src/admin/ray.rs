//! The interface of Ray Serve's request router, so that Ray's own HAProxy can ask kvspoa in its place.
//!
//! `POST /internal/route` answers as Ray 2.60's `LLMRouter` does, and `POST /lifecycle` takes what its replicas report
//! of their requests.

use super::answers::{parameter, reply_json};
use crate::{
    metrics::RayMetrics,
    replica::TOKEN_KEY_HEADER,
    request::RoutingRequest,
    route::{Decision, Router},
    units::RequestId,
};
use bytes::Bytes;
use http_body_util::Full;
use hyper::{HeaderMap, Response, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

/// The request's id; Ray's HAProxy sets one where the client has none.
const REQUEST_ID: &str = "x-request-id";
/// Present where the body is only the beginning: `HELD/LENGTH` in bytes.
const TRUNCATED: &str = "x-body-truncated";

/// What Ray's side asks and tells.
pub(super) struct Ray {
    router: Arc<Router>,
    /// The header that names the session, in lower case with `-`.
    session_header: String,
    /// Whether any replica reports the ends of its requests. Until then nothing is booked: no booking would end.
    is_told_of_ends: AtomicBool,
    metrics: RayMetrics,
}

/// One report of a replica, as `[NAME, [ARGUMENTS]]`.
#[derive(Deserialize)]
struct Report(String, Vec<Value>);

impl Ray {
    pub(super) fn new(router: Arc<Router>, session_header: &str) -> Self {
        Self {
            router,
            session_header: session_header.to_ascii_lowercase().replace('_', "-"),
            is_told_of_ends: AtomicBool::new(false),
            metrics: RayMetrics::register(),
        }
    }

    /// Chooses a replica for the body of a request, and books it.
    pub(super) async fn route(&self, query: &str, headers: &HeaderMap, body: Bytes) -> Response<Full<Bytes>> {
        let received = Instant::now();
        let Some(pool) = parameter(query, "pool").or_else(|| self.router.only_pool()) else {
            return refuse(StatusCode::BAD_REQUEST, "say which pool: /internal/route?pool=BACKEND");
        };
        let text = |name: &str| headers.get(name).map(hyper::header::HeaderValue::as_bytes);
        let truncated = text(TRUNCATED);
        let id = text(REQUEST_ID).and_then(RequestId::parse);
        let request = RoutingRequest {
            id: id.filter(|_| self.is_told_of_ends.load(Ordering::Relaxed)),
            pool,
            method: "POST".to_owned(),
            path: path_of(&body).to_owned(),
            session: self.session(headers).map(RoutingRequest::session_of),
            content_length: truncated.and_then(whole_length).or(Some(body.len() as u64)),
            complete: truncated.is_none(),
            body,
            ..RoutingRequest::default()
        };
        // Ray's HAProxy has no other way to choose: whatever the pool's mode, it is told.
        let decision = self.router.decide_anyway(request, received).await;
        match answer(&decision) {
            Some(answer) => reply_json(StatusCode::OK, &answer),
            // Ray's HAProxy then answers its client with 503: nothing else is left to name.
            None => refuse(StatusCode::SERVICE_UNAVAILABLE, decision.reason.as_str()),
        }
    }

    /// Takes a list of reports, in their order.
    pub(super) fn lifecycle(&self, body: &[u8]) -> Response<Full<Bytes>> {
        let reports: Vec<Report> = match serde_json::from_slice(body) {
            Ok(reports) => reports,
            Err(_) => {
                let form = "a list of [name, [request id, …]], as Ray's replicas report";
                return refuse(StatusCode::BAD_REQUEST, form);
            }
        };
        let applied = reports.iter().filter(|report| self.apply(report)).count();
        self.metrics.reports.increment(applied as u64);
        self.metrics.reports_ignored.increment((reports.len() - applied) as u64);
        reply_json(StatusCode::OK, &json!({ "applied": applied, "ignored": reports.len() - applied }))
    }

    /// Returns whether the report is of a request that is booked.
    fn apply(&self, Report(name, arguments): &Report) -> bool {
        let id = arguments.first().and_then(Value::as_str).map(str::as_bytes).and_then(RequestId::parse);
        let Some(id) = id else { return false };
        let now = Instant::now();
        let is_end = name == "on_request_completed";
        if is_end {
            self.is_told_of_ends.store(true, Ordering::Relaxed);
        }
        self.router.pools().iter().any(|pool| {
            let mut scheduler = pool.scheduler.lock();
            if scheduler.booking(id).is_none() {
                return false;
            }
            match (name.as_str(), arguments.get(1).and_then(Value::as_u64)) {
                ("on_prefill_complete", _) => scheduler.prefilled(id, now),
                ("on_decode_progress", Some(tokens)) => {
                    scheduler.answered(id, u32::try_from(tokens).unwrap_or(u32::MAX));
                }
                _ if is_end => drop(scheduler.end(id, None, now)),
                _ => return false,
            }
            true
        })
    }

    /// The session, by whichever of the two spellings a proxy has left of the header's name.
    fn session<'h>(&self, headers: &'h HeaderMap) -> Option<&'h [u8]> {
        let named = |name: &str| !name.is_empty() && name.replace('_', "-") == self.session_header;
        let (_, value) = headers.iter().find(|(name, _)| named(name.as_str()))?;
        Some(value.as_bytes()).filter(|value| !value.is_empty())
    }
}

/// Ray's HAProxy does not tell the path.
fn path_of(body: &[u8]) -> &'static str {
    // A truncated body is not JSON. Within a string the quotes of a key would be escaped.
    let has = |key: &[u8]| body.windows(key.len()).any(|window| window == key);
    let is_completion = !has(b"\"messages\"") && has(b"\"prompt\"");
    if is_completion { "/v1/completions" } else { "/v1/chat/completions" }
}

fn whole_length(header: &[u8]) -> Option<u64> {
    std::str::from_utf8(header).ok()?.rsplit_once('/')?.1.trim().parse().ok()
}

/// A flat object: Ray's HAProxy reads it with patterns.
fn answer(decision: &Decision) -> Option<Value> {
    let target = decision.target()?;
    let (host, port) =
        target.replica.http.as_ref().map_or((String::new(), 0), |http| (http.host().to_owned(), http.port()));
    let id = target.replica.id.as_deref().unwrap_or(&target.server);
    let mut answer = json!({ "host": host, "port": port, "replica_id": id });
    if let Some(key) = decision.token_key {
        answer["request_headers"] = json!({ TOKEN_KEY_HEADER: key.to_string() });
    }
    Some(answer)
}

/// An error in FastAPI's form, as Ray's router answers.
fn refuse(status: StatusCode, why: &str) -> Response<Full<Bytes>> {
    reply_json(status, &json!({ "detail": why }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_follows_from_the_body() {
        for (body, path) in [
            (
                r#"{"model": "m", "messages": [{"role": "user", "content": "\"prompt\""}]}"#,
                "/v1/chat/completions",
            ),
            (r#"{"prompt": "the \"messages\"", "max_tokens": 1}"#, "/v1/completions"),
            (r#"{"tools": [{"prompt": 1}], "messages": [{"ro"#, "/v1/chat/completions"),
            ("", "/v1/chat/completions"),
        ] {
            assert_eq!(path_of(body.as_bytes()), path, "{body}");
        }
    }

    #[test]
    fn a_truncated_body_tells_its_whole_length() {
        assert_eq!(whole_length(b"8388000/12000000"), Some(12_000_000));
        assert_eq!(whole_length(b"odd"), None);
    }
}
