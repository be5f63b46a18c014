//! The record of decisions.

use metrics::{Counter, Gauge, counter, gauge};

/// What is kept of decisions for `shadow-report` and `replay`.
#[derive(Clone, Debug)]
pub struct RecordMetrics {
    /// Decisions kept.
    pub kept: Counter,
    /// Decisions, or ends of requests, that came too fast to be kept.
    pub dropped: Counter,
    /// Bytes of the lines in memory.
    pub bytes: Gauge,
}

impl RecordMetrics {
    /// Registers the metrics with the process's recorder.
    #[must_use]
    pub fn register() -> Self {
        let records = |result: &'static str| counter!("kvspoa_records_total", "result" => result);
        Self { kept: records("kept"), dropped: records("dropped"), bytes: gauge!("kvspoa_record_bytes") }
    }
}
