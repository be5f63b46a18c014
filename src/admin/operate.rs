//! What operators switch while the agent runs: `POST /pool` and `POST /replica`, with a JSON body.

use super::answers::{error, reply_json};
use crate::{config::Mode, pool::Pool, route::Router};
use bytes::Bytes;
use http_body_util::Full;
use hyper::{Response, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use std::{sync::Arc, time::Instant};

/// `{"pool": "be_llm", "mode": "share=0.25"}`; the pool may be left out where there is only one.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
struct SetMode {
    pool: Option<String>,
    mode: Mode,
}

/// `{"pool": "be_llm", "server": "s1", "action": "ignore"}`.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
struct OfReplica {
    pool: Option<String>,
    server: String,
    action: Action,
}

/// What can be done with a replica.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Action {
    /// What is known of its cache is told again.
    Resync,
    /// It is never named.
    Ignore,
    /// It is named again.
    Use,
}

/// Why a wish is not done.
type Refused = (StatusCode, String);

/// Does what a request to `/pool` or `/replica` wishes.
pub(super) fn operate(router: &Router, path: &str, body: &[u8]) -> Response<Full<Bytes>> {
    let done = match path {
        "/pool" => set_mode(router, body),
        _ => tell(router, body),
    };
    match done {
        Ok(answer) => reply_json(StatusCode::OK, &answer),
        Err((status, why)) => error(status, &why),
    }
}

fn set_mode(router: &Router, body: &[u8]) -> Result<Value, Refused> {
    let SetMode { pool, mode } = read(body)?;
    let pool = named(router, pool.as_deref())?;
    let before = pool.mode.get();
    pool.mode.set(mode);
    tracing::info!(pool = pool.backend, %before, %mode, "an operator has set the mode");
    Ok(json!({ "pool": pool.backend, "mode": mode.to_string(), "before": before.to_string() }))
}

fn tell(router: &Router, body: &[u8]) -> Result<Value, Refused> {
    let OfReplica { pool, server, action } = read(body)?;
    let pool = named(router, pool.as_deref())?;
    let done = match action {
        Action::Resync => pool.resync(&server),
        Action::Ignore => pool.ignore(&server, true, Instant::now()),
        Action::Use => pool.ignore(&server, false, Instant::now()),
    };
    done.map_err(|why| (StatusCode::CONFLICT, format!("{}/{server}: {why}", pool.backend)))?;
    tracing::info!(pool = pool.backend, server, ?action, "an operator has told");
    Ok(json!({ "pool": pool.backend, "server": server, "ignored": pool.is_ignored(&server) }))
}

fn read<'b, T: Deserialize<'b>>(body: &'b [u8]) -> Result<T, Refused> {
    serde_json::from_slice(body).map_err(|why| (StatusCode::BAD_REQUEST, why.to_string()))
}

fn named(router: &Router, name: Option<&str>) -> Result<Arc<Pool>, Refused> {
    let several = || (StatusCode::BAD_REQUEST, "there are several pools: say which".to_owned());
    let pools = router.pools();
    let Some(name) = name else { return pools.only().cloned().ok_or_else(several) };
    let unknown = || {
        let known = pools.iter().map(|pool| pool.backend.as_str()).collect::<Vec<_>>().join(", ");
        (StatusCode::NOT_FOUND, format!("no pool named `{name}` is configured; there are: {known}"))
    };
    pools.of_backend(name).cloned().ok_or_else(unknown)
}
