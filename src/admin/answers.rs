//! One answer per admin path.

use super::{meant, operate, ray::Ray};
use crate::{
    request::RoutingRequest,
    route::{ExplainOptions, Router},
};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Method, Request, Response, StatusCode, body::Incoming, header};
use metrics_exporter_prometheus::PrometheusHandle;
use serde_json::json;
use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::sync::Semaphore;

/// The largest body that is taken, bytes; above HAProxy's largest recommended buffer.
const MAX_BODY_BYTES: usize = 16 << 20;

/// Bodies of `/explain` held and decided at once; more wait for their turn.
const MAX_EXPLAINS: usize = 4;

/// What the answers are made from.
pub(super) struct Answers {
    router: Arc<Router>,
    metrics: PrometheusHandle,
    explains: Semaphore,
    ray: Ray,
}

impl Answers {
    pub(super) fn new(router: Arc<Router>, metrics: PrometheusHandle, session_header: &str) -> Self {
        let ray = Ray::new(Arc::clone(&router), session_header);
        Self { router, metrics, explains: Semaphore::new(MAX_EXPLAINS), ray }
    }

    pub(super) async fn answer(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        match (request.method(), request.uri().path()) {
            (&Method::GET | &Method::HEAD, "/metrics") => {
                self.router.refresh_gauges();
                self.metrics.run_upkeep();
                reply(StatusCode::OK, "text/plain; version=0.0.4", self.metrics.render())
            }
            (&Method::GET | &Method::HEAD, "/healthz") => {
                reply(StatusCode::OK, "text/plain", "ok\n".to_owned())
            }
            (&Method::GET | &Method::HEAD, "/readyz") => {
                let readiness = self.router.readiness();
                let status = if readiness.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
                reply_json(status, &readiness)
            }
            (&Method::GET | &Method::HEAD, "/") => page(),
            (&Method::GET | &Method::HEAD, "/status") => reply_json(StatusCode::OK, &self.router.status()),
            (&Method::GET | &Method::HEAD, "/record") => {
                self.record(request.uri().query().unwrap_or_default())
            }
            (&Method::POST, "/explain") => self.explain(request).await,
            (&Method::POST, "/pool" | "/replica" | "/internal/route" | "/lifecycle") => {
                self.change(request).await
            }
            (_, "/" | "/metrics" | "/healthz" | "/readyz" | "/status" | "/record") => {
                error(StatusCode::METHOD_NOT_ALLOWED, "this path is for GET")
            }
            (_, "/internal/route" | "/lifecycle" | "/explain" | "/pool" | "/replica") => {
                error(StatusCode::METHOD_NOT_ALLOWED, "this path is for POST")
            }
            _ => error(
                StatusCode::NOT_FOUND,
                "paths: / (a page), /metrics, /healthz, /readyz, /status, /record?pool=…, POST /explain?pool=…&path=…, POST /pool, POST /replica",
            ),
        }
    }

    /// `GET /record?pool=be_llm[&seconds=3600]`: the decisions of lately, a line of JSON each.
    fn record(&self, query: &str) -> Response<Full<Bytes>> {
        let Some(recorder) = self.router.recorder() else {
            let why = "nothing is recorded: set record.max_bytes to what it may take, such as \"64MiB\"";
            return error(StatusCode::NOT_FOUND, why);
        };
        let Some(pool) = parameter(query, "pool").or_else(|| self.router.only_pool()) else {
            return error(StatusCode::BAD_REQUEST, "say which pool: /record?pool=BACKEND");
        };
        let seconds = parameter(query, "seconds").map(|seconds| seconds.parse::<u64>());
        let since = match seconds.transpose() {
            Ok(seconds) => seconds.map(Duration::from_secs),
            Err(_) => return error(StatusCode::BAD_REQUEST, "seconds: a whole number"),
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let since_ms = since.map_or(0, |since| now.saturating_sub(since).as_millis() as u64);
        reply(StatusCode::OK, "application/x-ndjson", recorder.lines(&pool, since_ms))
    }

    /// What changes something. `POST /pool` and `POST /replica`: see [`operate`]; `POST /internal/route[?pool=be_llm]` with
    /// a request body and `POST /lifecycle`: see [`Ray`].
    async fn change(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let (head, body) = request.into_parts();
        if let Err((status, why)) = meant::is_meant(&head.headers) {
            return error(status, why);
        }
        let body = match read(body).await {
            Ok(body) => body,
            Err(error) => return error,
        };
        match head.uri.path() {
            "/internal/route" => {
                self.ray.route(head.uri.query().unwrap_or_default(), &head.headers, body).await
            }
            "/lifecycle" => self.ray.lifecycle(&body),
            path => operate::operate(&self.router, path, &body),
        }
    }

    /// `POST /explain?pool=be_llm&path=/v1/chat/completions[&session=…][&tokens=1]` with a request body: the decision
    /// that the request would get now, without a booking. It changes nothing, so whoever may look may ask.
    async fn explain(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let query = request.uri().query().unwrap_or_default().to_owned();
        let Some(pool) = parameter(&query, "pool").or_else(|| self.router.only_pool()) else {
            return error(StatusCode::BAD_REQUEST, "say which pool: /explain?pool=BACKEND");
        };
        let path = parameter(&query, "path").unwrap_or_else(|| "/v1/chat/completions".to_owned());
        let options = ExplainOptions { token_ids: parameter(&query, "tokens").is_some_and(|v| v == "1") };
        let session = parameter(&query, "session");
        // Never closed, so there always is a turn in the end.
        let _turn = self.explains.acquire().await;
        let body = match read(request.into_body()).await {
            Ok(body) => body,
            Err(error) => return error,
        };
        let request = RoutingRequest {
            pool,
            path,
            method: "POST".to_owned(),
            session: session.map(|s| RoutingRequest::session_of(s.as_bytes())),
            complete: true,
            body,
            ..RoutingRequest::default()
        };
        match self.router.explain(request, options).await {
            Ok(explanation) => reply_json(StatusCode::OK, &explanation),
            Err(unknown) => error(StatusCode::NOT_FOUND, &unknown.to_string()),
        }
    }
}

/// What the status page may do: ask this port, and nothing else.
const PAGE_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; \
    frame-ancestors 'none'; base-uri 'none'; form-action 'none'";

/// The status page: one file, which asks for `/status` again and again.
fn page() -> Response<Full<Bytes>> {
    let text = include_str!("status.html").to_owned();
    let mut response = reply(StatusCode::OK, "text/html; charset=utf-8", text);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_SECURITY_POLICY, header::HeaderValue::from_static(PAGE_POLICY));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, header::HeaderValue::from_static("nosniff"));
    response
}

/// A whole body, or the answer to one that is too large.
async fn read(body: Incoming) -> Result<Bytes, Response<Full<Bytes>>> {
    let collected = Limited::new(body, MAX_BODY_BYTES).collect().await;
    let why = "the body is larger than 16 MiB or broke off";
    collected.map(http_body_util::Collected::to_bytes).map_err(|_| error(StatusCode::PAYLOAD_TOO_LARGE, why))
}

/// A query parameter, percent-decoded.
pub(super) fn parameter(query: &str, name: &str) -> Option<String> {
    query
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .find(|(key, _)| *key == name)
        .map(|(_, value)| percent_decode(value))
}

fn percent_decode(text: &str) -> String {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        let hex = |at: usize| tail.get(at).and_then(|b| char::from(*b).to_digit(16));
        match (byte, hex(0), hex(1)) {
            (b'%', Some(high), Some(low)) => {
                out.push((high * 16 + low) as u8);
                rest = &tail[2..];
            }
            (b'+', ..) => {
                out.push(b' ');
                rest = tail;
            }
            _ => {
                out.push(byte);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

fn reply(status: StatusCode, content_type: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(content_type));
    response
}

pub(super) fn reply_json(status: StatusCode, body: &impl serde::Serialize) -> Response<Full<Bytes>> {
    match serde_json::to_string(body) {
        Ok(text) => reply(status, "application/json", text + "\n"),
        Err(_) => reply(StatusCode::INTERNAL_SERVER_ERROR, "text/plain", "not representable\n".to_owned()),
    }
}

pub(super) fn error(status: StatusCode, why: &str) -> Response<Full<Bytes>> {
    reply_json(status, &json!({ "error": why }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn query_parameters_are_percent_decoded() {
        let query = "pool=be%5Fllm&path=/v1/chat%2Fcompletions&tokens=1&odd=%zz%4";
        assert_eq!(parameter(query, "pool").as_deref(), Some("be_llm"));
        assert_eq!(parameter(query, "path").as_deref(), Some("/v1/chat/completions"));
        assert_eq!(parameter(query, "odd").as_deref(), Some("%zz%4"));
        assert_eq!(parameter(query, "missing"), None);
    }
}
