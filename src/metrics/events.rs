//! The metrics of one rank's KV events.

use super::Total;
use metrics::{Counter, Gauge, counter, gauge};

/// Which rank of which replica a metric is about.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FeedLabels {
    /// The pool: an HAProxy backend.
    pub pool: String,
    /// The replica: an HAProxy server.
    pub server: String,
    /// The data-parallel rank, as the engine counts it.
    pub rank: u16,
}

/// The KV events of one rank.
#[derive(Clone, Debug)]
pub struct EventMetrics {
    /// Batches applied, live or replayed.
    pub batches: Counter,
    /// Their bytes.
    pub bytes: Counter,
    /// Events applied.
    pub events: Counter,
    /// Events left out, by reason, in the order of the reasons at registration.
    pub skipped: Vec<Counter>,
    /// Messages of another shape than a batch's: a wrong number of frames, or no sequence number.
    pub rejected_messages: Counter,
    /// Batches that could not be decoded to their end.
    pub undecodable_batches: Counter,
    /// Holes found in the sequence numbers, in the live stream or within a replay.
    pub gaps: Total,
    /// Requests for a replay.
    pub replays: Counter,
    /// Times that all blocks of the rank were forgotten because its process was another one.
    pub resets: Counter,
    /// Times that the connection was lost.
    pub disconnects: Counter,
    /// Times that others had reason to doubt the stream, in the order of the doubts at registration.
    pub doubts: Vec<Counter>,
    /// The sequence number applied last.
    pub applied_seq: Gauge,
    /// 1 for the state that the feed is in, 0 for the others, in the order of the states at registration.
    pub states: Vec<Gauge>,
}

impl EventMetrics {
    /// Registers one rank's metrics with the process's recorder.
    #[must_use]
    pub fn register(
        labels: &FeedLabels,
        skip_reasons: &[&'static str],
        states: &[&'static str],
        doubts: &[&'static str],
    ) -> Self {
        let FeedLabels { pool, server, rank } = labels.clone();
        let labels = [("pool", pool), ("server", server), ("rank", rank.to_string())];
        let with = |name: &'static str, value: &'static str| {
            let mut labels = labels.to_vec();
            labels.push((name, value.to_owned()));
            labels
        };
        Self {
            batches: counter!("kvspoa_kv_batches_total", &labels),
            bytes: counter!("kvspoa_kv_batch_bytes_total", &labels),
            events: counter!("kvspoa_kv_events_total", &labels),
            skipped: skip_reasons
                .iter()
                .map(|reason| counter!("kvspoa_kv_events_skipped_total", &with("reason", reason)))
                .collect(),
            rejected_messages: counter!("kvspoa_kv_messages_rejected_total", &labels),
            undecodable_batches: counter!("kvspoa_kv_batches_undecodable_total", &labels),
            gaps: Total::new(counter!("kvspoa_kv_gaps_total", &labels)),
            replays: counter!("kvspoa_kv_replays_total", &labels),
            resets: counter!("kvspoa_kv_resets_total", &labels),
            disconnects: counter!("kvspoa_kv_disconnects_total", &labels),
            doubts: doubts
                .iter()
                .map(|reason| counter!("kvspoa_kv_doubts_total", &with("reason", reason)))
                .collect(),
            applied_seq: gauge!("kvspoa_kv_applied_seq", &labels),
            states: states
                .iter()
                .map(|state| gauge!("kvspoa_kv_feed_state", &with("state", state)))
                .collect(),
        }
    }

    /// The rank is gone: nothing is true of it any more.
    pub fn clear(&self) {
        self.states.iter().chain([&self.applied_seq]).for_each(|gauge| gauge.set(0.0));
    }
}

/// An endpoint to which several publishers connect.
#[derive(Clone, Debug)]
pub struct ListenerMetrics {
    /// Messages under a topic that is no replica's.
    pub unknown_topic: Counter,
}

impl ListenerMetrics {
    /// Registers the metrics with the process's recorder.
    #[must_use]
    pub fn register(endpoint: &str) -> Self {
        Self {
            unknown_topic: counter!("kvspoa_kv_messages_of_unknown_topics_total", "endpoint" => endpoint.to_owned()),
        }
    }
}
