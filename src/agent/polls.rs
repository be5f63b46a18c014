//! Asks HAProxy for its servers, again and again, away from any request.

use super::members::Members;
use crate::{
    metrics::SocketMetrics,
    replica::{
        AnswerError, Process, RuntimeSocket, Server, SocketError, commands, parse_process, parse_servers,
    },
};
use arc_swap::ArcSwap;
use std::{
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    sync::Notify,
    time::{MissedTickBehavior, interval, sleep},
};

/// Between two polls even if servers change all the time.
const MIN_PAUSE: Duration = Duration::from_millis(20);

/// One warning of lost log lines in this time is enough; a counter has them all.
const WARNING_PERIOD: Duration = Duration::from_secs(600);

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
    pub(super) pools: Arc<ArcSwap<Vec<Arc<Members>>>>,
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
        let mut complained: HashSet<String> = HashSet::new();
        let mut warned: Option<Instant> = None;
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = self.changed.notified() => {}
            }
            let mut all_well = true;
            let pools = self.pools.load_full();
            complained.retain(|backend| pools.iter().any(|members| members.pool().backend == *backend));
            for members in &*pools {
                let asked = self.poll(members, &mut process).await;
                let pool = members.pool();
                all_well &= asked.is_ok();
                match asked {
                    Ok(()) => {
                        if complained.remove(&pool.backend) {
                            tracing::info!(pool = pool.backend, "HAProxy's runtime socket answers");
                        }
                    }
                    Err(error) => {
                        self.metrics.failures.increment(1);
                        pool.miss_servers();
                        if complained.insert(pool.backend.clone()) {
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

    async fn poll(&self, members: &Arc<Members>, process: &mut Option<Process>) -> Result<(), PollError> {
        let pool = members.pool();
        let booked = pool.booked_here();
        let answer = self.socket.ask(&commands(&pool.backend)).await?;
        let now = Instant::now();
        let current = parse_process(&answer)?;
        if process.replace(current).is_some_and(|before| before.was_replaced_by(current)) {
            self.metrics.reloads.increment(1);
            for members in &**self.pools.load() {
                members.pool().haproxy_replaced(now);
            }
        }
        let servers: Vec<Server> = parse_servers(&answer, &pool.backend)?;
        // First, so that servers which are new have their state at once.
        members.take_servers(&servers);
        pool.take_servers(&servers, &booked, now);
        pool.see_servers(&servers, now);
        pool.doubt_servers(&servers);
        Ok(())
    }
}
