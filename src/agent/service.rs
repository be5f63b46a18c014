//! What the service manager is told (`sd_notify(3)`): nothing where there is none, as it names its socket in
//! `NOTIFY_SOCKET`.

use crate::pulse::{self, Pulse};
use sd_notify::NotifyState;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// The loops of which each must go on for the agent to be well.
#[derive(Clone, Debug)]
pub(super) struct Pulses {
    pub(super) spop: Arc<Pulse>,
    pub(super) events: Arc<Pulse>,
    /// Of the task that takes the locks of every pool each second.
    pub(super) pools: Arc<Pulse>,
}

/// The agent serves.
pub(super) fn ready(status: &str) {
    tell(&[NotifyState::Ready, NotifyState::Status(status)]);
}

/// A reload has begun; [`ready`] ends it.
pub(super) fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => tell(&[NotifyState::Reloading, now]),
        // Without the time systemd would take the reload for failed.
        Err(error) => tracing::debug!(%error, "no monotonic clock"),
    }
}

/// The shutdown has begun.
pub(super) fn stopping() {
    tell(&[NotifyState::Stopping, NotifyState::Status("finishing the requests in flight")]);
}

/// Feeds the watchdog for as long as every loop goes on; returns at once where the service manager has none for us.
pub(super) async fn feed_watchdog(pulses: Pulses) {
    let Some(timeout) = sd_notify::watchdog_enabled().filter(|timeout| !timeout.is_zero()) else { return };
    let mut ticks = tokio::time::interval((timeout / 3).max(Duration::from_millis(1)));
    loop {
        ticks.tick().await;
        match pulses.stuck(Instant::now(), patience(timeout)) {
            None => tell(&[NotifyState::Watchdog]),
            Some(what) => tracing::error!(what, "does not go on: the watchdog is not fed"),
        }
    }
}

/// For how long a loop may be silent: short enough that a watchdog bites within two of its time-outs, and never so short
/// that a loop which goes on could be taken for one that does not.
fn patience(timeout: Duration) -> Duration {
    (timeout / 2).max(3 * pulse::PERIOD)
}

impl Pulses {
    /// The first loop that has not come round for `patience`.
    fn stuck(&self, now: Instant, patience: Duration) -> Option<&'static str> {
        let loops =
            [("SPOP listener", &self.spop), ("KV events", &self.events), ("locks of the pools", &self.pools)];
        loops.into_iter().find(|(_, pulse)| pulse.age(now) > patience).map(|(what, _)| what)
    }
}

fn tell(states: &[NotifyState]) {
    static COMPLAINED: AtomicBool = AtomicBool::new(false);
    if let Err(error) = sd_notify::notify(states)
        && !COMPLAINED.swap(true, Ordering::Relaxed)
    {
        tracing::warn!(%error, "the service manager cannot be told (NOTIFY_SOCKET)");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_loop_that_stands_still_is_found() {
        let (born, second) = (Instant::now(), Duration::from_secs(1));
        let pulse = || Arc::new(Pulse::new(born));
        let pulses = Pulses { spop: pulse(), events: pulse(), pools: pulse() };
        let beat = |beating: &[&Arc<Pulse>], now| beating.iter().for_each(|pulse| pulse.beat(now));
        let now = born + 10 * second;
        let Pulses { spop, events, pools } = &pulses;
        assert_eq!(pulses.stuck(now, 10 * second), None);
        beat(&[events, pools], now);
        assert_eq!(pulses.stuck(now, 5 * second), Some("SPOP listener"));
        beat(&[spop], now);
        assert_eq!(pulses.stuck(now, 5 * second), None);
        let now = now + 10 * second;
        beat(&[spop, pools], now);
        assert_eq!(pulses.stuck(now, 5 * second), Some("KV events"));
        beat(&[events], now + 10 * second);
        beat(&[spop], now + 10 * second);
        assert_eq!(pulses.stuck(now + 10 * second, 5 * second), Some("locks of the pools"));
    }

    #[test]
    fn a_short_watchdog_leaves_the_loops_their_time() {
        assert_eq!(patience(Duration::from_secs(30)), Duration::from_secs(15));
        assert_eq!(patience(Duration::from_secs(2)), Duration::from_secs(3));
    }
}
