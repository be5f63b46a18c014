//! Asks HAProxy and the engines how they are, again and again, away from any request.

use crate::{
    client,
    config::{self, HostPort},
    metrics::{ReportMetrics, SocketMetrics},
    pool::Pool,
    replica::{
        AnswerError, Process, RuntimeSocket, Server, SocketError, commands, parse_engine_page, parse_process,
        parse_servers,
    },
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    sync::Notify,
    time::{MissedTickBehavior, interval, sleep, timeout},
};

/// Between two polls even if servers change all the time.
const MIN_PAUSE: Duration = Duration::from_millis(20);

/// One warning of lost log lines in this time is enough; a counter has them all.
const WARNING_PERIOD: Duration = Duration::from_secs(600);

/// vLLM's page is some ten KiB a model and rank.
const MAX_PAGE_BYTES: usize = 4 << 20;

/// A page is made by the engine's own front end, which may be busy; later it would be out of date.
const PAGE_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a poll of HAProxy brought nothing.
#[derive(Debug, thiserror::Error)]
enum PollError {
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error(transparent)]
    Answer(#[from] AnswerError),
}

/// Follows the servers of all pools by HAProxy's runtime socket.
#[derive(Debug)]
pub(super) struct ServerPolls {
    pub(super) socket: RuntimeSocket,
    pub(super) period: Duration,
    pub(super) pools: Vec<Arc<Pool>>,
    /// HAProxy's log told of a change.
    pub(super) changed: Arc<Notify>,
    pub(super) metrics: SocketMetrics,
}

impl ServerPolls {
    pub(super) async fn run(self) {
        let mut ticks = interval(self.period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut process = None;
        // One warning is enough until it works again.
        let mut complained = vec![false; self.pools.len()];
        let mut warned: Option<Instant> = None;
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = self.changed.notified() => {}
            }
            let mut all_well = true;
            for (pool, complained) in self.pools.iter().zip(&mut complained) {
                let asked = self.poll(pool, &mut process).await;
                all_well &= asked.is_ok();
                match asked {
                    Ok(()) if *complained => {
                        *complained = false;
                        tracing::info!(pool = pool.backend, "HAProxy's runtime socket answers");
                    }
                    Ok(()) => {}
                    Err(error) => {
                        self.metrics.failures.increment(1);
                        pool.miss_servers();
                        if !std::mem::replace(complained, true) {
                            tracing::warn!(
                                pool = pool.backend,
                                %error,
                                "haproxy.socket: the states of the servers are not known; all count as up"
                            );
                        }
                    }
                }
                let now = Instant::now();
                pool.move_strays(now);
                let lost = pool.end_lost(now);
                let quiet = warned.is_some_and(|at| now.saturating_duration_since(at) < WARNING_PERIOD);
                if lost > 0 && !quiet {
                    warned = Some(now);
                    tracing::warn!(
                        pool = pool.backend,
                        lost,
                        "bookings ended because nobody has their requests: do HAProxy's log lines arrive?"
                    );
                }
            }
            self.metrics.up.set(f64::from(u8::from(all_well)));
            sleep(MIN_PAUSE).await;
        }
    }

    async fn poll(&self, pool: &Pool, process: &mut Option<Process>) -> Result<(), PollError> {
        let booked = pool.booked();
        let answer = self.socket.ask(&commands(&pool.backend)).await?;
        let now = Instant::now();
        let current = parse_process(&answer)?;
        if process.replace(current).is_some_and(|before| before.was_replaced_by(current)) {
            self.metrics.reloads.increment(1);
            for pool in &self.pools {
                pool.haproxy_replaced(now);
            }
        }
        let servers: Vec<Server> = parse_servers(&answer, &pool.backend)?;
        pool.take_servers(&servers, &booked, now);
        pool.see_servers(&servers, now);
        pool.doubt_servers(&servers);
        Ok(())
    }
}

/// Follows the engines of one replica by their `/metrics`.
#[derive(Debug)]
pub(super) struct EnginePolls {
    pool: Arc<Pool>,
    server: String,
    http: HostPort,
    period: Duration,
    metrics: ReportMetrics,
}

impl EnginePolls {
    /// One for each replica of the pool whose address is known.
    pub(super) fn of_pool(
        pool: &Arc<Pool>,
        replicas: &[config::Replica],
        period: Duration,
    ) -> impl Iterator<Item = Self> {
        replicas.iter().filter_map(move |replica| {
            Some(Self {
                pool: Arc::clone(pool),
                server: replica.server.clone(),
                http: replica.http.clone()?,
                period,
                metrics: ReportMetrics::register(&pool.backend, &replica.server),
            })
        })
    }

    pub(super) async fn run(self) {
        // Not all replicas at the same moment.
        sleep(self.period.mul_f64(fastrand::f64())).await;
        let mut ticks = interval(self.period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let (booked, heard) = (self.pool.booked(), self.pool.heard());
            let answer =
                timeout(PAGE_TIMEOUT, client::get_within(self.http.as_str(), "/metrics", MAX_PAGE_BYTES));
            let reports = match answer.await {
                Ok(Ok(answer)) if answer.status == 200 => {
                    parse_engine_page(&String::from_utf8_lossy(&answer.body))
                }
                // A replica that is down, or has no such page: a counter says so, a log would be flooded.
                _ => Vec::new(),
            };
            let now = Instant::now();
            let counter = if reports.is_empty() { &self.metrics.failures } else { &self.metrics.reports };
            counter.increment(1);
            self.pool.take_engines(&self.server, &reports, &booked, now);
            self.pool.see_engines(&self.server, &reports, now);
            self.pool.doubt_engines(&self.server, &reports, &heard);
        }
    }
}
