//! How many SPOP connections the process's limit of open files allows.

/// Sockets of the agent's own: listeners, the admin port's clients, log, runtime, and some in hand. libzmq ends the
/// process where it finds no file descriptor, so the connections must leave these alone.
const OWN: usize = 160;

/// A rank's ZeroMQ sockets: two with their signals, and the connections below them.
const PER_RANK: usize = 8;

/// The most SPOP connections: what is configured, less where the limit of open files is lower.
pub(super) fn max_connections(configured: usize, ranks: usize) -> usize {
    let limit = std::fs::read_to_string("/proc/self/limits").ok().as_deref().and_then(soft_limit);
    let allowed = limit.map_or(configured, |limit| allowed(limit, ranks));
    if allowed >= configured {
        return configured;
    }
    tracing::info!(
        connections = allowed,
        configured,
        "the limit of open files (ulimit -n, LimitNOFILE) allows fewer SPOP connections than spop.max_connections"
    );
    allowed
}

fn allowed(limit: usize, ranks: usize) -> usize {
    limit.saturating_sub(OWN).saturating_sub(ranks.saturating_mul(PER_RANK)).max(1)
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
    fn the_ranks_sockets_are_left_out_and_one_connection_is_always_allowed() {
        assert_eq!(allowed(1024, 3), 1024 - OWN - 24);
        assert_eq!(allowed(64, 1000), 1);
    }
}
