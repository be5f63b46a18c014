//! Every metric that kvspoa exports: its name, its labels and the handle by which it is counted.
//!
//! Handles are made once and kept; nothing on the request path looks a label up.

mod events;
mod health;
mod install;
mod peers;
mod record;
mod reload;
mod replica;
mod route;
mod total;

pub use events::{EventMetrics, FeedLabels, ListenerMetrics};
pub use health::HealthMetrics;
pub use install::{InstallError, install};
pub use peers::{PeerMetrics, PeersMetrics};
pub use record::RecordMetrics;
pub use reload::ReloadMetrics;
pub use replica::{ParityMetrics, ReportMetrics, ServerMetrics, SocketMetrics};
pub use route::{DecidedMetrics, PoolMetrics, RankMetrics, RayMetrics, RouteMetrics, SettleMetrics};
pub use total::Total;

use metrics::{Counter, Gauge, counter, gauge};

/// The SPOP side.
#[derive(Clone, Debug)]
pub struct SpopMetrics {
    /// Connections open now.
    pub connections: Gauge,
    /// Connections accepted since the start.
    pub accepted: Counter,
    /// HAProxy's largest frame as its last HELLO told, in bytes: `tune.bufsize` − 4. 0 before the first.
    pub haproxy_frame_bytes: Gauge,
    /// Connections that could not be accepted, most likely for want of file descriptors.
    pub accept_errors: Counter,
    /// Health checks answered.
    pub health_checks: Counter,
    /// Connections closed by a protocol error, ours or HAProxy's.
    pub protocol_errors: Counter,
    /// NOTIFYs (requests) received and handed on.
    pub notifies: Counter,
    /// NOTIFYs in flight now, from their first byte to the end of their handler.
    pub in_flight: Gauge,
    /// Payload bytes of these.
    pub in_flight_bytes: Gauge,
    /// NOTIFYs answered without an opinion because too many were in flight.
    pub shed_requests: Counter,
    /// The same because too many payload bytes were in flight.
    pub shed_bytes: Counter,
    /// The same because the payload was too long.
    pub shed_payload: Counter,
    /// The same because the agent was shutting down.
    pub shed_draining: Counter,
    /// NOTIFYs whose answer missed the deadline.
    pub late: Counter,
    /// NOTIFYs whose handler panicked.
    pub panics: Counter,
    /// NOTIFYs that HAProxy took back.
    pub aborted: Counter,
    /// ACKs that lost actions because they did not fit into a frame.
    pub cut_acks: Counter,
}

impl SpopMetrics {
    /// Registers the metrics with the process's recorder.
    #[must_use]
    pub fn register() -> Self {
        let shed = |reason: &'static str| counter!("kvspoa_spop_shed_total", "reason" => reason);
        Self {
            connections: gauge!("kvspoa_spop_connections"),
            accepted: counter!("kvspoa_spop_connections_total"),
            haproxy_frame_bytes: gauge!("kvspoa_spop_haproxy_frame_bytes"),
            accept_errors: counter!("kvspoa_spop_accept_errors_total"),
            health_checks: counter!("kvspoa_spop_health_checks_total"),
            protocol_errors: counter!("kvspoa_spop_protocol_errors_total"),
            notifies: counter!("kvspoa_spop_notify_total"),
            in_flight: gauge!("kvspoa_spop_in_flight"),
            in_flight_bytes: gauge!("kvspoa_spop_in_flight_bytes"),
            shed_requests: shed("requests"),
            shed_bytes: shed("bytes"),
            shed_payload: shed("payload"),
            shed_draining: shed("draining"),
            late: counter!("kvspoa_spop_late_total"),
            panics: counter!("kvspoa_spop_panics_total"),
            aborted: counter!("kvspoa_spop_aborted_total"),
            cut_acks: counter!("kvspoa_spop_cut_acks_total"),
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
    /// Lines without our fields: HAProxy is not set up as it should be.
    pub without_fields: Counter,
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
            without_fields: lines("without_fields"),
            malformed: lines("malformed"),
        }
    }
}
