//! Log lines settle bookings: for good, and with the server that was really used.

use crate::{
    lifecycle::{LogLine, RequestEnd, Skip},
    metrics::SettleMetrics,
    pool::Pool,
};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

/// Ends bookings by what HAProxy logs.
#[derive(Debug)]
pub(super) struct Settle {
    pools: HashMap<String, Arc<Pool>>,
    metrics: SettleMetrics,
    complained: Mutex<Option<Instant>>,
}

/// One line of log in this time is enough to say that HAProxy is not set up well.
const COMPLAINT_PERIOD: Duration = Duration::from_secs(600);

impl Settle {
    pub(super) fn new(pools: &[Arc<Pool>]) -> Self {
        let skips: Vec<_> = Skip::ALL.iter().map(|skip| skip.as_str()).collect();
        Self {
            pools: pools.iter().map(|pool| (pool.backend.clone(), Arc::clone(pool))).collect(),
            metrics: SettleMetrics::register(&skips),
            complained: Mutex::default(),
        }
    }

    pub(super) fn line(&self, line: LogLine) {
        match line {
            LogLine::End(end) => self.end(&end),
            LogLine::WithoutFields => self.complain(),
            // The states of servers are not followed yet.
            LogLine::Server(_) | LogLine::Other => {}
        }
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
        let Some(pool) = self.pools.get(&end.pool) else {
            self.metrics.unknown_pool.increment(1);
            return;
        };
        if let Some(skip) = end.skip {
            self.metrics.skipped[skip.index()].increment(1);
        }
        if end.spoe_error.is_some() {
            self.metrics.spoe_errors.increment(1);
        }
        let served = end.served.as_deref().and_then(|server| pool.rank_of_server(server));
        if end.wanted.is_some() && end.wanted != end.served {
            self.metrics.elsewhere.increment(1);
        }
        if end.skip.is_some() {
            return;
        }
        let ended = pool.scheduler.lock().end(end.request, served, Instant::now());
        match ended {
            Some(_) => self.metrics.settled.increment(1),
            None => self.metrics.without_booking.increment(1),
        }
    }
}
