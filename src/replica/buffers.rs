//! How large HAProxy's buffers are, and for how many clients, as its runtime socket tells.

/// What is asked of the socket; level `user` may.
pub const BUFFER_COMMANDS: &str = "show info;show pools\n";

/// HAProxy's buffers and what bounds them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Buffers {
    /// `tune.bufsize`, bytes.
    pub bufsize: u64,
    /// Clients at once.
    pub maxconn: u64,
    /// The bound that HAProxy was given for its memory (`-m`), bytes.
    pub memory: Option<u64>,
    /// Its process, as it sees itself.
    pub pid: Option<u32>,
}

impl Buffers {
    /// Reads the answer to [`BUFFER_COMMANDS`]. `None`: it is something else.
    #[must_use]
    pub fn parse(answer: &str) -> Option<Self> {
        let field = |name: &str| answer.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let number = |name: &str| field(name)?.trim().parse::<u64>().ok();
        // `  - Pool buffer (16384 bytes) : 2 allocated …`: there is one pool of buffers, of just that size.
        let pool = answer.lines().find_map(|line| line.trim_start().strip_prefix("- Pool buffer ("))?;
        Some(Self {
            bufsize: pool.split(' ').next()?.parse().ok()?,
            maxconn: number("Maxconn")?,
            memory: number("Memmax_MB").filter(|mib| *mib > 0).map(|mib| mib.saturating_mul(1 << 20)),
            pid: number("Pid").and_then(|pid| pid.try_into().ok()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_of_buffers_is_that_of_their_pool() {
        // As HAProxy 2.6.12 answers.
        let answer = "Name: HAProxy\nVersion: 2.6.12\nPid: 3443\nMemmax_MB: 0\nMaxconn: 4096\nHard_maxconn: 4096\n\n\
                      Dumping pools usage. Use SIGQUIT to flush them.\n\
                      \x20 - Pool buffer (8454144 bytes) : 2 allocated (16908288 bytes), 2 used, 0 failures, 1 users\n\
                      \x20 - Pool connection (448 bytes) : 0 allocated (0 bytes), 0 used, 0 failures, 2 users\n";
        let buffers = Buffers { bufsize: 8_454_144, maxconn: 4096, memory: None, pid: Some(3443) };
        assert_eq!(Buffers::parse(answer), Some(buffers));
        let bounded = answer.replace("Memmax_MB: 0", "Memmax_MB: 512");
        assert_eq!(Buffers::parse(&bounded), Some(Buffers { memory: Some(512 << 20), ..buffers }));
        for wrong in
            ["", "Permission denied\n", &answer.replace("Pool buffer", "Pool buf"), "Maxconn: 4096\n"]
        {
            assert_eq!(Buffers::parse(wrong), None, "{wrong}");
        }
    }
}
