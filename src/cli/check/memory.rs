//! Weighs what kvspoa and HAProxy may come to hold against the memory that there is.

use crate::{
    agent,
    config::{Config, SocketAddr},
    haproxy_config::BUFFERS_PER_CLIENT,
    machine::{self, Process},
    replica::{BUFFER_COMMANDS, Buffers, RuntimeSocket},
};
use serde_json::{Value, json};

/// Ray's name for `tune.bufsize`, which HAProxy reads in `haproxy/example.cfg`.
const BUFSIZE: &str = "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE";

/// What a site that serves others too is advised to take (haproxy/README.md, "Memory").
const ADVISED_BUFSIZE: u64 = 1 << 20;

/// What is known.
#[derive(Debug)]
pub(super) struct Memory {
    /// kvspoa's bounds, and the memory for it.
    own: Vec<(&'static str, u64)>,
    own_limit: Option<u64>,
    max_frame_bytes: u64,
    haproxy: Haproxy,
}

/// Of HAProxy; `None` is not known.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Haproxy {
    bufsize: Option<u64>,
    maxconn: Option<u64>,
    limit: Option<u64>,
    /// Why its socket did not tell.
    silence: Option<String>,
}

/// What was found.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Verdict {
    pub(super) lines: Vec<String>,
    pub(super) warnings: Vec<String>,
}

impl Memory {
    /// `bufsize` and `maxconn` are what the command line says, which counts before what HAProxy says.
    pub(super) async fn gather(config: &Config, bufsize: Option<u64>, maxconn: Option<u64>) -> Self {
        let mut haproxy = match &config.haproxy.socket {
            Some(socket) => of_socket(socket).await,
            None => Haproxy { limit: machine::memory_bytes(Process::Unknown), ..Haproxy::default() },
        };
        let by_ray = || std::env::var(BUFSIZE).ok()?.parse().ok();
        haproxy.bufsize = bufsize.or(haproxy.bufsize).or_else(by_ray);
        haproxy.maxconn = maxconn.or(haproxy.maxconn);
        Self {
            own: agent::memory_bounds(config),
            own_limit: machine::memory_bytes(Process::Own),
            max_frame_bytes: config.spop.max_frame_bytes.into(),
            haproxy,
        }
    }

    fn own_bytes(&self) -> u64 {
        self.own.iter().fold(0, |all, (_, bytes)| all.saturating_add(*bytes))
    }

    pub(super) fn judge(&self) -> Verdict {
        let mut verdict = Verdict::default();
        self.judge_own(&mut verdict);
        self.haproxy.judge(self.max_frame_bytes, &mut verdict);
        verdict
    }

    fn judge_own(&self, verdict: &mut Verdict) {
        let all = self.own_bytes();
        let parts: Vec<String> =
            self.own.iter().map(|(what, bytes)| format!("{what} {}", size(*bytes))).collect();
        let limit = self.own_limit.map_or_else(String::new, |limit| format!(", of {}", size(limit)));
        let parts = parts.join(", ");
        verdict.lines.push(format!("memory: kvspoa holds {} at most ({parts}){limit}", size(all)));
        if let Some(limit) = self.own_limit.filter(|limit| all > *limit) {
            verdict.warnings.push(format!(
                "kvspoa's bounds come to {}, and there are {}: lower index.max_bytes, prompt.cache_bytes or spop.max_bytes_in_flight",
                size(all),
                size(limit)
            ));
        }
    }

    pub(super) fn json(&self) -> Value {
        let parts: serde_json::Map<String, Value> =
            self.own.iter().map(|(what, bytes)| ((*what).to_owned(), json!(bytes))).collect();
        let Haproxy { bufsize, maxconn, limit, silence } = &self.haproxy;
        json!({
            "kvspoa": {"at_most_bytes": self.own_bytes(), "parts": parts, "limit_bytes": self.own_limit},
            "haproxy": {
                "bufsize": bufsize,
                "maxconn": maxconn,
                "at_most_bytes": self.haproxy.at_most(),
                "limit_bytes": limit,
                "socket_error": silence,
            },
        })
    }
}

impl Haproxy {
    fn per_client(&self) -> Option<u64> {
        self.bufsize.map(|bufsize| bufsize.saturating_mul(BUFFERS_PER_CLIENT))
    }

    fn at_most(&self) -> Option<u64> {
        self.per_client().zip(self.maxconn).map(|(bytes, clients)| bytes.saturating_mul(clients))
    }

    fn judge(&self, max_frame_bytes: u64, verdict: &mut Verdict) {
        let (Some(bufsize), Some(client)) = (self.bufsize, self.per_client()) else {
            if let Some(silence) = &self.silence {
                let line = format!(
                    "memory: HAProxy's buffers are not known ({silence}): try --bufsize and --maxconn"
                );
                verdict.lines.push(line);
            }
            return;
        };
        let all = self.at_most().zip(self.maxconn);
        let of_all = all.map(|(all, clients)| format!(", {} for the {clients} of `maxconn`", size(all)));
        let limit = self.limit.map_or_else(String::new, |limit| format!(", of {}", size(limit)));
        verdict.lines.push(format!(
            "memory: HAProxy's buffers (tune.bufsize {bufsize}) cost up to {} for each client that reads slowly{}{limit}",
            size(client),
            of_all.unwrap_or_default()
        ));
        if let Some(((all, clients), limit)) = all.zip(self.limit).filter(|((all, _), limit)| all > limit) {
            let fitting = limit / client.max(1);
            let advised = ADVISED_BUFSIZE.saturating_mul(BUFFERS_PER_CLIENT).saturating_mul(clients);
            let or_smaller = match bufsize > ADVISED_BUFSIZE && advised <= limit {
                true => format!(", or tune.bufsize to {ADVISED_BUFSIZE}"),
                false => String::new(),
            };
            verdict.warnings.push(format!(
                "HAProxy's buffers may come to {}, and there are {}: lower `maxconn` to {fitting}{or_smaller}",
                size(all),
                size(limit)
            ));
        }
        if bufsize > max_frame_bytes {
            verdict.warnings.push(format!(
                "spop.max_frame_bytes is {max_frame_bytes}, HAProxy's tune.bufsize {bufsize}: bodies between the two do not \
                 fit a frame and are left to HAProxy"
            ));
        }
    }
}

async fn of_socket(socket: &SocketAddr) -> Haproxy {
    let answer = RuntimeSocket::new(socket.clone()).ask(BUFFER_COMMANDS).await;
    let told = answer.map_err(|error| error.to_string()).and_then(|answer| {
        Buffers::parse(&answer).ok_or_else(|| "`show pools` is answered with something else".to_owned())
    });
    let limit = is_here(socket).then(|| machine::memory_bytes(Process::Unknown)).flatten();
    let Buffers { bufsize, maxconn, memory, pid } = match told {
        Ok(buffers) => buffers,
        Err(silence) => return Haproxy { limit, silence: Some(silence), ..Haproxy::default() },
    };
    // Its id means something here only if no namespace is in between.
    let pid = pid.filter(|pid| limit.is_some() && machine::is_program(*pid, "haproxy"));
    let limit = pid.and_then(|pid| machine::memory_bytes(Process::Other(pid))).or(limit);
    let limit = [limit, memory].into_iter().flatten().min();
    Haproxy { bufsize: Some(bufsize), maxconn: Some(maxconn), limit, silence: None }
}

/// Whether the HAProxy behind the socket is on this machine.
fn is_here(socket: &SocketAddr) -> bool {
    match socket {
        SocketAddr::Unix(_) => true,
        SocketAddr::Tcp(addr) => addr.is_loopback(),
    }
}

/// To two digits at least.
fn size(bytes: u64) -> String {
    let units = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    let unit = units.into_iter().find(|(unit, _)| bytes >= *unit);
    let Some((unit, name)) = unit else { return format!("{bytes} B") };
    let tenths = u128::from(bytes) * 10 / unit as u128;
    match tenths {
        0..100 if !tenths.is_multiple_of(10) => format!("{}.{} {name}", tenths / 10, tenths % 10),
        _ => format!("{} {name}", tenths / 10),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn memory(haproxy: Haproxy) -> Memory {
        let own = vec![("index.max_bytes of each pool", GIB), ("spop.max_bytes_in_flight", 256 * MIB)];
        Memory { own, own_limit: Some(4 * GIB), max_frame_bytes: 16 * MIB, haproxy }
    }

    fn haproxy(bufsize: u64, maxconn: u64, limit: u64) -> Haproxy {
        Haproxy { bufsize: Some(bufsize), maxconn: Some(maxconn), limit: Some(limit), silence: None }
    }

    #[test]
    fn bounds_within_the_memory_are_told_without_a_warning() {
        let verdict = memory(haproxy(MIB, 1000, 8 * GIB)).judge();
        assert_eq!(
            verdict.lines,
            [
                "memory: kvspoa holds 1.2 GiB at most (index.max_bytes of each pool 1 GiB, spop.max_bytes_in_flight 256 MiB), \
                 of 4 GiB",
                "memory: HAProxy's buffers (tune.bufsize 1048576) cost up to 3 MiB for each client that reads slowly, 2.9 GiB \
                 for the 1000 of `maxconn`, of 8 GiB",
            ]
        );
        assert_eq!(verdict.warnings, Vec::<String>::new());
    }

    #[test]
    fn bounds_above_the_memory_are_warned_of_with_what_would_fit() {
        let mut memory = memory(haproxy(8_454_144, 4096, 24 * GIB));
        memory.own_limit = Some(GIB);
        let warnings = memory.judge().warnings;
        assert_eq!(
            warnings,
            [
                "kvspoa's bounds come to 1.2 GiB, and there are 1 GiB: lower index.max_bytes, prompt.cache_bytes or spop.max_bytes_in_flight",
                "HAProxy's buffers may come to 96 GiB, and there are 24 GiB: lower `maxconn` to 1016, or tune.bufsize to \
                 1048576",
            ]
        );
    }

    #[test]
    fn a_smaller_buffer_is_advised_only_where_it_is_enough() {
        let warnings = memory(haproxy(8_454_144, 4096, 8 * GIB)).judge().warnings;
        assert!(warnings.concat().ends_with("lower `maxconn` to 338"), "{warnings:?}");
    }

    #[test]
    fn what_is_not_known_is_not_judged() {
        let unknown = Haproxy { silence: Some("/h: refused".to_owned()), ..Haproxy::default() };
        let verdict = memory(unknown).judge();
        assert!(verdict.lines[1].contains("not known (/h: refused)"), "{verdict:?}");
        let verdict = memory(Haproxy::default()).judge();
        assert_eq!((verdict.lines.len(), verdict.warnings.len()), (1, 0));
        let elsewhere = Haproxy { limit: None, ..haproxy(8 * MIB, 1 << 40, 0) };
        assert_eq!(memory(elsewhere).judge().warnings, Vec::<String>::new());
        let one_client = Haproxy { maxconn: None, ..haproxy(8 * MIB, 0, MIB) };
        let verdict = memory(one_client).judge();
        assert!(verdict.lines[1].ends_with("cost up to 24 MiB for each client that reads slowly, of 1 MiB"));
    }

    #[test]
    fn a_buffer_above_the_largest_frame_is_warned_of() {
        let warnings = memory(haproxy(17 * MIB, 10, 8 * GIB)).judge().warnings;
        assert!(warnings.concat().contains("spop.max_frame_bytes is 16777216"), "{warnings:?}");
    }

    #[test]
    fn a_size_is_short() {
        let sizes = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1536, "1.5 KiB"),
            (24 * MIB, "24 MiB"),
            (u64::MAX, "17179869183 GiB"),
        ];
        for (bytes, text) in sizes {
            assert_eq!(size(bytes), text);
        }
    }
}
