//! Log lines settle bookings: for good, and with the server that was really used.

use crate::{
    lifecycle::{LogLine, RequestEnd, Skip},
    metrics::SettleMetrics,
    pool::Pool,
};
use std::{collections::HashMap, sync::Arc, time::Instant};

/// Ends bookings by what HAProxy logs.
#[derive(Debug)]
pub(super) struct Settle {
    pools: HashMap<String, Arc<Pool>>,
    metrics: SettleMetrics,
}

impl Settle {
    pub(super) fn new(pools: &[Arc<Pool>]) -> Self {
        let skips: Vec<_> = Skip::ALL.iter().map(|skip| skip.as_str()).collect();
        Self {
            pools: pools.iter().map(|pool| (pool.backend.clone(), Arc::clone(pool))).collect(),
            metrics: SettleMetrics::register(&skips),
        }
    }

    pub(super) fn line(&self, line: LogLine) {
        match line {
            LogLine::End(end) => self.end(&end),
            // The states of servers are not followed yet.
            LogLine::Server(_) | LogLine::Other => {}
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
        let ended = pool.scheduler.lock().end(end.request, served, Instant::now());
        match ended {
            Some(_) => self.metrics.settled.increment(1),
            None => self.metrics.without_booking.increment(1),
        }
    }
}
