//! The configuration file as it is read again.

use metrics::{Counter, Gauge, counter, gauge};
use std::time::{SystemTime, UNIX_EPOCH};

/// Reloads of the configuration.
#[derive(Clone, Debug)]
pub struct ReloadMetrics {
    /// Those that changed something.
    pub applied: Counter,
    /// Those that found what was in force already.
    pub unchanged: Counter,
    /// Those whose file was wrong, or named what can't be used: everything stayed as it was.
    pub refused: Counter,
    /// 1 while what was read last is in force.
    pub last_successful: Gauge,
    /// When that was read, in seconds since 1970.
    last_success_seconds: Gauge,
}

impl ReloadMetrics {
    /// Registers the metrics with the process's recorder.
    #[must_use]
    pub fn register() -> Self {
        let reloads = |result: &'static str| counter!("kvspoa_config_reload_total", "result" => result);
        Self {
            applied: reloads("applied"),
            unchanged: reloads("unchanged"),
            refused: reloads("refused"),
            last_successful: gauge!("kvspoa_config_last_reload_successful"),
            last_success_seconds: gauge!("kvspoa_config_last_reload_success_timestamp_seconds"),
        }
    }

    /// What was just read is in force.
    pub fn in_force(&self, now: SystemTime) {
        self.last_successful.set(1.0);
        // A clock before the epoch is no clock.
        self.last_success_seconds.set(now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64());
    }
}
