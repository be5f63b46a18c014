//! What HAProxy and the engines say of themselves, and how asking them goes.

use metrics::{Counter, Gauge, counter, gauge};

/// HAProxy's runtime socket.
#[derive(Clone, Debug)]
pub struct SocketMetrics {
    /// 1 while it answers.
    pub up: Gauge,
    /// Times that it did not, or not as it should.
    pub failures: Counter,
    /// Times that another process answered than before.
    pub reloads: Counter,
}

impl SocketMetrics {
    /// Registers the metrics with the process's recorder.
    #[must_use]
    pub fn register() -> Self {
        Self {
            up: gauge!("kvspoa_haproxy_socket_up"),
            failures: counter!("kvspoa_haproxy_socket_failures_total"),
            reloads: counter!("kvspoa_haproxy_reloads_total"),
        }
    }
}

/// Asking one replica's engine.
#[derive(Clone, Debug)]
pub struct ReportMetrics {
    /// Reports taken in.
    pub reports: Counter,
    /// Times that there was none.
    pub failures: Counter,
}

impl ReportMetrics {
    /// Registers the metrics with the process's recorder.
    #[must_use]
    pub fn register(pool: &str, server: &str) -> Self {
        let labels = [("pool", pool.to_owned()), ("server", server.to_owned())];
        Self {
            reports: counter!("kvspoa_engine_reports_total", &labels),
            failures: counter!("kvspoa_engine_report_failures_total", &labels),
        }
    }
}

/// Asking one replica for its tokens.
#[derive(Clone, Debug)]
pub struct ParityMetrics {
    /// Rounds in which all that it told were ours.
    pub equal: Counter,
    /// Rounds in which some were not.
    pub different: Counter,
    /// Rounds in which it told none.
    pub untold: Counter,
}

impl ParityMetrics {
    /// Registers the metrics with the process's recorder.
    #[must_use]
    pub fn register(pool: &str, server: &str) -> Self {
        let rounds = |result: &str| {
            let labels = [("pool", pool), ("server", server), ("result", result)];
            let labels = labels.map(|(name, value)| (name, value.to_owned()));
            counter!("kvspoa_parity_probes_total", &labels)
        };
        Self { equal: rounds("equal"), different: rounds("different"), untold: rounds("untold") }
    }
}

/// One server as HAProxy last told of it; all 0 where it has not of late.
#[derive(Clone, Debug)]
pub struct ServerMetrics {
    /// 1 for the state that it is in, 0 for the others, in the order of the states at registration.
    pub states: Vec<Gauge>,
    /// Its weight.
    pub weight: Gauge,
    /// Requests on it.
    pub in_flight: Gauge,
    /// Requests that wait for it.
    pub queued: Gauge,
    /// Its `maxconn`; 0 is none.
    pub limit: Gauge,
    /// Connections in use.
    pub connections: Gauge,
    /// 1 while the replica serves another model than the pool's.
    pub other_model: Gauge,
}

impl ServerMetrics {
    /// Registers the metrics with the process's recorder.
    #[must_use]
    pub fn register(pool: &str, server: &str, states: &[&'static str]) -> Self {
        let labels = [("pool", pool.to_owned()), ("server", server.to_owned())];
        let state = |state: &&'static str| {
            let mut labels = labels.to_vec();
            labels.push(("state", (*state).to_owned()));
            gauge!("kvspoa_server_state", &labels)
        };
        Self {
            states: states.iter().map(state).collect(),
            weight: gauge!("kvspoa_server_weight", &labels),
            in_flight: gauge!("kvspoa_server_in_flight", &labels),
            queued: gauge!("kvspoa_server_queued", &labels),
            limit: gauge!("kvspoa_server_limit", &labels),
            connections: gauge!("kvspoa_server_connections", &labels),
            other_model: gauge!("kvspoa_replica_other_model", &labels),
        }
    }

    /// The server is gone: nothing is true of it any more.
    pub fn clear(&self) {
        let Self { states, weight, in_flight, queued, limit, connections, other_model } = self;
        let gauges = [weight, in_flight, queued, limit, connections, other_model];
        states.iter().chain(gauges).for_each(|gauge| gauge.set(0.0));
    }
}
