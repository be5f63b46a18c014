//! How many SPOP connections the process's limit of open files allows.

use crate::config::MAX_RANKS;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Sockets of the agent's own: listeners, the admin port's clients, log, runtime, and some in hand. libzmq ends the
/// process where it finds no file descriptor, so the connections must leave these alone.
const OWN: usize = 160;

/// A rank's ZeroMQ sockets: two with their signals, and the connections below them.
const PER_RANK: usize = 8;

/// What the process may have open at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Budget {
    /// SPOP connections.
    pub(super) connections: usize,
    /// Ranks, over all pools.
    pub(super) ranks: usize,
}

/// The ranks for which there are sockets. How many may change while some are taken.
#[derive(Debug)]
pub(super) struct Room {
    limit: AtomicUsize,
    taken: AtomicUsize,
}

impl Room {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit: limit.into(), taken: AtomicUsize::new(0) }
    }

    /// Ranks beyond a lower limit stay.
    pub(super) fn set_limit(&self, limit: usize) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    /// Takes places for so many ranks; the error is how many are left.
    pub(super) fn take(&self, ranks: usize) -> Result<(), usize> {
        let limit = self.limit.load(Ordering::Relaxed);
        let with = |taken: usize| taken.checked_add(ranks).filter(|taken| *taken <= limit);
        let taken = self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, with);
        taken.map(drop).map_err(|taken| limit.saturating_sub(taken))
    }

    pub(super) fn give_back(&self, ranks: usize) {
        self.taken.fetch_sub(ranks, Ordering::Relaxed);
    }
}

impl Budget {
    /// By the configured number of connections and of ranks, which is `None` where ranks come and go; less where the
    /// limit of open files is lower.
    pub(super) fn new(connections: usize, ranks: Option<usize>) -> Self {
        let limit = std::fs::read_to_string("/proc/self/limits").ok().as_deref().and_then(soft_limit);
        Self::within(limit.unwrap_or(usize::MAX), connections, ranks)
    }

    /// Tells where there are fewer connections than `configured`.
    pub(super) fn tell(&self, configured: usize) {
        if self.connections < configured {
            tracing::info!(
                connections = self.connections,
                configured,
                "the limit of open files (ulimit -n, LimitNOFILE) allows fewer SPOP connections than spop.max_connections"
            );
        }
    }

    fn within(limit: usize, connections: usize, ranks: Option<usize>) -> Self {
        let all = limit.saturating_sub(OWN);
        // Ranks that are not known yet may take half.
        let ranks = ranks.unwrap_or((all / 2 / PER_RANK).min(MAX_RANKS));
        let left = all.saturating_sub(ranks.saturating_mul(PER_RANK));
        Self { connections: connections.min(left).max(1), ranks }
    }
}

/// The soft limit in the kernel's table; `None`: unlimited or not told.
fn soft_limit(table: &str) -> Option<usize> {
    let line = table.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_is_read_from_the_kernels_table() {
        let table = "Limit                     Soft Limit           Hard Limit           Units     \n\
                     Max open files            1024                 1048576              files     \n";
        assert_eq!(soft_limit(table), Some(1024));
        assert_eq!(soft_limit("Max open files  unlimited  unlimited  files\n"), None);
        assert_eq!(soft_limit(""), None);
    }

    #[test]
    fn places_for_ranks_come_back_and_their_number_may_change() {
        let room = Room::new(3);
        assert_eq!((room.take(2), room.take(2)), (Ok(()), Err(1)));
        room.set_limit(1);
        assert_eq!(room.take(1), Err(0), "two are taken still");
        room.give_back(2);
        assert_eq!(room.take(1), Ok(()));
    }

    #[test]
    fn the_ranks_sockets_are_left_out_and_one_connection_is_always_allowed() {
        let connections = |limit, ranks| Budget::within(limit, 16_384, ranks).connections;
        assert_eq!(connections(1024, Some(3)), 1024 - OWN - 24);
        assert_eq!(connections(64, Some(1000)), 1);
        assert_eq!(connections(1 << 20, Some(3)), 16_384);
        assert_eq!(Budget::within(1024, 16_384, None), Budget { connections: 432, ranks: 54 });
        assert_eq!(
            Budget::within(usize::MAX, 16_384, None),
            Budget { connections: 16_384, ranks: MAX_RANKS }
        );
    }
}
