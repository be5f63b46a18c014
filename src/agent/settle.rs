//! Log lines settle bookings: for good, and with the server that was really used.

use crate::{
    lifecycle::{
        LogLine, RequestEnd, Skip,
        log_line::{ServerChange, ServerNotice},
    },
    metrics::SettleMetrics,
    pool::Pools,
    record::{Over, Recorder},
};
use parking_lot::Mutex;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::Notify;

/// Ends bookings by what HAProxy logs.
#[derive(Debug)]
pub(super) struct Settle {
    pools: Arc<Pools>,
    metrics: SettleMetrics,
    complained: Mutex<Option<Instant>>,
    /// Wakes who asks HAProxy for the states of its servers.
    changed: Arc<Notify>,
    recorder: Option<Recorder>,
}

/// One line of log in this time is enough to say that HAProxy is not set up well.
const COMPLAINT_PERIOD: Duration = Duration::from_secs(600);

impl Settle {
    pub(super) fn new(pools: Arc<Pools>, changed: Arc<Notify>, recorder: Option<Recorder>) -> Self {
        let skips: Vec<_> = Skip::ALL.iter().map(|skip| skip.as_str()).collect();
        Self {
            pools,
            metrics: SettleMetrics::register(&skips),
            complained: Mutex::default(),
            changed,
            recorder,
        }
    }

    pub(super) fn line(&self, line: LogLine) {
        match line {
            LogLine::End(end) => self.end(&end),
            LogLine::WithoutFields => self.complain(),
            LogLine::Server(notice) => self.server(&notice),
            LogLine::Other => {}
        }
    }

    fn server(&self, notice: &ServerNotice) {
        let Some(pool) = self.pools.of_backend(&notice.pool) else { return };
        match notice.change {
            ServerChange::Up => pool.take_notice(&notice.server, true, Instant::now()),
            ServerChange::Down => pool.take_notice(&notice.server, false, Instant::now()),
            ServerChange::Other => {}
        }
        self.changed.notify_one();
    }

    /// Bookings would never end: the one fault of a set-up that must not stay silent.
    fn complain(&self) {
        let mut last = self.complained.lock();
        if last.is_none_or(|at| at.elapsed() > COMPLAINT_PERIOD) {
            *last = Some(Instant::now());
            tracing::warn!(
                "HAProxy sends log lines without kvspoa's fields, so bookings do not end: the frontend needs the \
                 `log-format-sd` line and a log format of its own, such as `option httplog`"
            );
        }
    }

    fn end(&self, end: &RequestEnd) {
        let Some(pool) = self.pools.of_backend(&end.pool) else {
            self.metrics.unknown_pool.increment(1);
            return;
        };
        if let Some(skip) = end.skip {
            self.metrics.skipped[skip.index()].increment(1);
        }
        if end.spoe_error.is_some() {
            self.metrics.spoe_errors.increment(1);
        }
        let elsewhere = elsewhere(end);
        if end.wanted.is_some() && elsewhere.is_some() {
            self.metrics.elsewhere.increment(1);
        }
        let served = elsewhere.and_then(|server| pool.rank_of_server(server));
        if end.skip.is_some() {
            return;
        }
        if let Some(recorder) = &self.recorder {
            recorder.over(Over {
                request: end.request,
                served: end.served.clone(),
                response: end.response,
                total: end.total,
                is_normal: end.termination.is_normal(),
            });
        }
        let counter = match pool.end(end.request, served, Instant::now()) {
            true => &self.metrics.settled,
            false => &self.metrics.without_booking,
        };
        counter.increment(1);
    }
}

/// The server that served the request, where it is not the one that was named: there, the rank that was booked is the
/// right one, of which the log tells nothing.
fn elsewhere(end: &RequestEnd) -> Option<&str> {
    end.served.as_deref().filter(|served| Some(*served) != end.wanted.as_deref())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lifecycle::log_line;

    #[test]
    fn only_another_server_than_the_one_named_moves_a_session() {
        for (fields, other) in [
            ("want=\"s1\" srv=\"s1\"", None),
            ("want=\"s1\" srv=\"s2\"", Some("s2")),
            ("want=\"\" srv=\"s2\"", Some("s2")),
            ("want=\"s1\" srv=\"<NOSRV>\"", None),
        ] {
            let rid = "6f1c1b5c-0f0a-4c6e-9a53-2f0d0e0a0b0c";
            let line = format!("<1>1 t h a p m [kv@1 rid=\"{rid}\" pool=\"p\" {fields} ts=\"--\"] m");
            let Ok(LogLine::End(end)) = log_line::parse(line.as_bytes()) else { panic!("{line}") };
            assert_eq!(elsewhere(&end), other, "{fields}");
        }
    }
}
