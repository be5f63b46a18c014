//! Agents that tell each other of their bookings.

use metrics::{Counter, Gauge, counter, gauge};

/// Telling one peer.
#[derive(Clone, Debug)]
pub struct PeerMetrics {
    /// 1 while it is connected to.
    pub up: Gauge,
    /// News that were sent to it.
    pub told: Counter,
    /// News that it missed because it took them too slowly.
    pub missed: Counter,
}

impl PeerMetrics {
    /// Registers the metrics with the process's recorder.
    #[must_use]
    pub fn register(peer: &str) -> Self {
        let labels = [("peer", peer.to_owned())];
        Self {
            up: gauge!("kvspoa_peer_up", &labels),
            told: counter!("kvspoa_peer_told_total", &labels),
            missed: counter!("kvspoa_peer_missed_total", &labels),
        }
    }
}

/// Hearing all peers.
#[derive(Clone, Debug)]
pub struct PeersMetrics {
    /// News that came.
    pub heard: Counter,
    /// Connections that were sent away: another secret, another version, too many.
    pub refused: Counter,
    /// Bookings among the news that could not be booked here: a server that is not known, or no room.
    pub not_booked: Counter,
}

impl PeersMetrics {
    /// Registers the metrics with the process's recorder.
    #[must_use]
    pub fn register() -> Self {
        Self {
            heard: counter!("kvspoa_peer_heard_total"),
            refused: counter!("kvspoa_peer_refused_total"),
            not_booked: counter!("kvspoa_peer_not_booked_total"),
        }
    }
}
