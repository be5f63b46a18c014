//! One streamed request through HAProxy, and what the agent counts of it.

use super::{Means, agent, question::Question};
use crate::{
    client::{Access, Request},
    config::{HttpAccess, HttpAddr},
    doctor::{
        facts::{Streamed, ThroughFacts},
        samples::Samples,
    },
};
use http_body_util::BodyExt;
use hyper::{Method, header};
use std::time::{Duration, Instant};
use tokio::time::timeout;

/// A busy engine may have the request wait.
const ANSWER: Duration = Duration::from_secs(60);

/// HAProxy logs as soon as the answer is over, and UDP is quick.
const COUNTED: Duration = Duration::from_secs(3);

pub(super) async fn facts(means: &Means, url: &HttpAddr) -> ThroughFacts {
    let before = samples(means).await;
    let answer =
        timeout(ANSWER, send(means, url)).await.unwrap_or_else(|_| Err("no answer in a minute".to_owned()));
    let counted = match before {
        Some(before) if answer.is_ok() => counted(means, &before).await,
        _ => None,
    };
    ThroughFacts { url: url.to_string(), answer, counted }
}

async fn send(means: &Means, url: &HttpAddr) -> Result<Streamed, String> {
    let question = means.model(None).and_then(|model| Question::new(model, None, None));
    let question = question.ok_or("no prompt of this model can be made here")?;
    // The client's way: with the engines' key, but to another address.
    let access = HttpAccess { tls: None, server_name: None, ..means.pool.http.clone() };
    let access = Access::load(&access).map_err(|error| error.to_string())?;
    let request = Request { method: Method::POST, body: question.streamed(), ..Request::get(question.path) };
    let answering = access.exchange(url, request).await.map_err(|error| error.to_string())?;
    let status = answering.0.status().as_u16();
    let kind = answering.0.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let is_event_stream = kind.is_some_and(|kind| kind.starts_with("text/event-stream"));
    let mut body = answering.0.into_body();
    let (mut pieces, mut first, mut last) = (0, None, Instant::now());
    while let Some(frame) = body.frame().await {
        frame.map_err(|error| error.to_string())?;
        pieces += 1;
        last = Instant::now();
        first.get_or_insert(last);
    }
    let spread = first.map_or(Duration::ZERO, |first| last - first);
    let spread_ms = u64::try_from(spread.as_millis()).unwrap_or(u64::MAX);
    Ok(Streamed { status, is_event_stream, pieces, spread_ms })
}

/// Decisions and lines of ends since; waits until there is one of each.
async fn counted(means: &Means, before: &Samples) -> Option<(f64, f64)> {
    let until = Instant::now() + COUNTED;
    loop {
        let now = samples(means).await?;
        let since = |count: fn(&Samples) -> f64| count(&now) - count(before);
        let counted = (since(decisions), since(ends));
        if counted.0 > 0.0 && counted.1 > 0.0 || Instant::now() > until {
            return Some(counted);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn samples(means: &Means) -> Option<Samples> {
    agent::samples(means.admin.as_ref()?).await.ok()
}

fn decisions(samples: &Samples) -> f64 {
    samples.sum("kvspoa_decisions_total", &[])
}

fn ends(samples: &Samples) -> f64 {
    samples.sum("kvspoa_haproxy_log_lines_total", &[("kind", "end")])
}
