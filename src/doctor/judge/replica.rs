//! The replicas of a pool, as they answer by HTTP.

use crate::{
    doctor::{
        facts::{PoolFacts, Readiness, ReplicaFacts, Silence},
        report::Judge,
    },
    replica::ServerState,
};

pub(super) fn judge_pool(pool: &PoolFacts, haproxy_answers: bool, judge: &mut Judge<'_>) {
    let backend = &pool.backend;
    if let Some(Err(why)) = pool.servers.as_ref().filter(|_| haproxy_answers) {
        judge.fail(
            "servers",
            format!("HAProxy does not tell of this backend: {why}"),
            "pool.backend must be the name of the HAProxy backend that serves the model",
        );
    }
    if let Some(why) = &pool.file {
        judge.fail(
            "servers",
            format!("replicas_file cannot be used: {why}"),
            "the agent keeps the last good list",
        );
    }
    if pool.replicas.is_empty() {
        judge.fail(
            "replicas_found",
            "no replica is known",
            format!(
                "are there servers with addresses in HAProxy's backend {backend} (`show servers state {backend}`), or \
                 [[pool.replica]] in kvspoa.toml?"
            ),
        );
    } else {
        let names: Vec<&str> = pool.replicas.iter().map(|replica| replica.server.as_str()).collect();
        judge.ok("replicas_found", format!("{} found: {}", names.len(), names.join(", ")));
    }
}

/// Returns whether it makes sense to look further.
pub(super) fn judge(
    replica: &ReplicaFacts,
    pool: &PoolFacts,
    readiness: Option<&Readiness>,
    judge: &mut Judge<'_>,
) -> bool {
    let Some(pages) = &replica.pages else {
        judge.warn(
            "replica_http",
            "its HTTP address is not known, so that it cannot be asked",
            "in its [[pool.replica]]: http = \"HOST:PORT\", or set haproxy.socket",
        );
        return true;
    };
    let http = replica.http.as_deref().unwrap_or_default();
    let server = pool.servers.as_ref().and_then(|servers| {
        let servers = servers.as_ref().ok()?;
        servers.iter().find(|server| server.name == replica.server)
    });
    let state = server.map(|server| server.state).filter(|state| *state != ServerState::Up);
    let in_haproxy =
        state.map_or_else(String::new, |state| format!(" (HAProxy has it as {})", state.as_str()));
    match &pages.models {
        Err(Silence::Refused(status)) => {
            judge.fail(
                "replica_http",
                format!("{http} asks for an API key (status {status})"),
                "in the [[pool]] of kvspoa.toml: http.api_key_file = \"/etc/kvspoa/api_key\", a file with the engines' key",
            );
            return true;
        }
        Err(Silence::NoAnswer(why)) => {
            judge.fail(
                "replica_http",
                format!("{http} does not answer: {why}{in_haproxy}"),
                "is the engine up, and can this machine reach it? With TLS: http.tls, http.ca_file",
            );
            return false;
        }
        Err(Silence::Status(status)) => judge.warn(
            "replica_http",
            format!("{http} answers /v1/models with status {status}{in_haproxy}"),
            "is this an engine's own address, or a proxy before it?",
        ),
        Ok(models) => {
            let names: Vec<&str> = models.iter().map(|model| model.id.as_str()).collect();
            judge.ok("replica_http", format!("{http} serves {}{in_haproxy}", names.join(", ")));
        }
    }
    let name = format!("{}/{}", pool.backend, replica.server);
    if readiness.is_some_and(|readiness| readiness.other_model.contains(&name)) {
        judge.fail(
            "replica_model",
            "it serves another model than the pool's: no prompt will match it",
            "pool.model names what replicas must serve; or take the server out of this backend",
        );
    }
    if pages.metrics.is_err() {
        judge.warn(
            "replica_metrics",
            "its /metrics cannot be read: load and block size are not known before its events tell",
            "does a proxy before the engine hide it?",
        );
    }
    true
}
