//! Every metric that kvspoa exports: its name, its labels and the handle by which it is counted.
//!
//! Handles are made once and kept; nothing on the request path looks a label up.

use metrics::{Counter, Gauge, counter, gauge};

/// The SPOP side.
#[derive(Clone, Debug)]
pub struct SpopMetrics {
    /// Connections open now.
    pub connections: Gauge,
    /// Connections accepted since the start.
    pub accepted: Counter,
    /// NOTIFY frames (requests) received.
    pub notifies: Counter,
    /// Connections closed by a protocol error, ours or HAProxy's.
    pub protocol_errors: Counter,
    /// NOTIFYs answered without an opinion because too many were in flight.
    pub shed: Counter,
}

impl SpopMetrics {
    /// Registers the metrics with the process's recorder.
    #[must_use]
    pub fn register() -> Self {
        Self {
            connections: gauge!("kvspoa_spop_connections"),
            accepted: counter!("kvspoa_spop_connections_total"),
            notifies: counter!("kvspoa_spop_notify_total"),
            protocol_errors: counter!("kvspoa_spop_protocol_errors_total"),
            shed: counter!("kvspoa_spop_shed_total"),
        }
    }
}

/// HAProxy's log lines.
#[derive(Clone, Debug)]
pub struct LogMetrics {
    /// Ends of requests.
    pub ends: Counter,
    /// Servers going up or down.
    pub server_notices: Counter,
    /// Lines that do not concern us.
    pub others: Counter,
    /// Lines that were not understood, which is a fault of the configuration or a forgery.
    pub malformed: Counter,
}

impl LogMetrics {
    /// Registers the metrics with the process's recorder.
    #[must_use]
    pub fn register() -> Self {
        let lines = |kind: &'static str| counter!("kvspoa_haproxy_log_lines_total", "kind" => kind);
        Self {
            ends: lines("end"),
            server_notices: lines("server"),
            others: lines("other"),
            malformed: lines("malformed"),
        }
    }
}
