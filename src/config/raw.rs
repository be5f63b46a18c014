//! The configuration file as written. Every default stands here, with its reason.

use super::{
    PolicyName,
    values::{ByteSize, FirstEndpoint, HostPort, Time},
};
use crate::{
    lifecycle::{DEFAULT_LISTEN, LogListen},
    spop::ListenAddr,
};
use serde::{Deserialize, Deserializer, de};
use std::{
    fmt::Display,
    num::{NonZeroU16, NonZeroUsize},
    path::PathBuf,
    str::FromStr,
    time::Duration,
};
use toml::Spanned;

/// What environment and flags may override; flags win over the environment, both over the file.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Overrides {
    /// Where HAProxy's SPOE filter connects: host:port or a unix socket path
    #[arg(long, env = "KVSPOA_SPOP_LISTEN", value_name = "ADDR")]
    pub spop_listen: Option<ListenAddr>,
    /// Where metrics, health and /explain are served: host:port
    #[arg(long, env = "KVSPOA_ADMIN_LISTEN", value_name = "ADDR")]
    pub admin_listen: Option<HostPort>,
    /// Where HAProxy sends its log lines: host:port (UDP) or a unix datagram socket path
    #[arg(long, env = "KVSPOA_LOG_LISTEN", value_name = "ADDR")]
    pub log_listen: Option<LogListen>,
    /// How a replica is chosen
    #[arg(long, env = "KVSPOA_POLICY", value_name = "POLICY", value_enum)]
    pub policy: Option<PolicyName>,
}

#[derive(Deserialize, Debug, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawConfig {
    pub(super) spop: RawSpop,
    pub(super) admin: RawAdmin,
    pub(super) log: RawLog,
    pub(super) prompt: RawPrompt,
    pub(super) index: RawIndex,
    pub(super) select: RawSelect,
    pub(super) pool: Vec<RawPool>,
}

impl RawConfig {
    pub(super) fn apply(&mut self, overrides: &Overrides) {
        fn replace<T: Clone>(value: &mut T, by: Option<&T>) {
            if let Some(by) = by {
                *value = by.clone();
            }
        }
        replace(&mut self.spop.listen, overrides.spop_listen.as_ref());
        replace(&mut self.admin.listen, overrides.admin_listen.as_ref());
        replace(&mut self.log.listen, overrides.log_listen.as_ref());
        replace(&mut self.select.policy, overrides.policy.as_ref());
    }
}

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawSpop {
    #[serde(deserialize_with = "from_text")]
    pub(super) listen: ListenAddr,
    pub(super) max_frame_bytes: ByteSize,
    pub(super) max_connections: NonZeroUsize,
    pub(super) max_in_flight: NonZeroUsize,
    pub(super) max_bytes_in_flight: ByteSize,
    pub(super) deadline: Time,
}

impl Default for RawSpop {
    fn default() -> Self {
        Self {
            // Loopback: the protocol has no authentication.
            listen: constant("127.0.0.1:9101"),
            // Above any sensible tune.bufsize; libraries that stop at 64 KiB break large bodies.
            max_frame_bytes: ByteSize(16 << 20),
            // HAProxy opens about one connection per request in flight.
            max_connections: at_least_one(16_384),
            max_in_flight: at_least_one(4096),
            max_bytes_in_flight: ByteSize(256 << 20),
            // Below the snippet's `timeout processing 500ms`, so that HAProxy sees an answer and not a time-out.
            deadline: Time(Duration::from_millis(400)),
        }
    }
}

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawAdmin {
    pub(super) listen: HostPort,
}

impl Default for RawAdmin {
    fn default() -> Self {
        // Loopback: /explain takes prompts.
        Self { listen: constant("127.0.0.1:9102") }
    }
}

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawLog {
    #[serde(deserialize_with = "from_text")]
    pub(super) listen: LogListen,
}

impl Default for RawLog {
    fn default() -> Self {
        // UDP and not a unix socket: a chrooted HAProxy does not see the socket's path.
        Self { listen: constant(DEFAULT_LISTEN) }
    }
}

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawPrompt {
    pub(super) threads: Option<NonZeroUsize>,
    pub(super) queue: usize,
    pub(super) inline_bytes: ByteSize,
}

impl Default for RawPrompt {
    fn default() -> Self {
        Self {
            threads: None,
            // More would not be reached before the deadline.
            queue: 256,
            // Below this a hand-over to another thread costs as much as the work.
            inline_bytes: ByteSize(2 << 10),
        }
    }
}

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawIndex {
    pub(super) max_bytes: ByteSize,
}

impl Default for RawIndex {
    fn default() -> Self {
        // About 30 million blocks: 64 replicas of 8 million tokens each.
        Self { max_bytes: ByteSize(1 << 30) }
    }
}

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawSelect {
    pub(super) policy: PolicyName,
    pub(super) lease: Time,
    pub(super) seed: Option<u64>,
}

impl Default for RawSelect {
    fn default() -> Self {
        Self {
            policy: PolicyName::Cost,
            // Far above any real request: a booking ends by its log line; this only bounds what lost lines leave.
            lease: Time(Duration::from_secs(6 * 3600)),
            seed: None,
        }
    }
}

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub(super) struct RawPool {
    pub(super) backend: Spanned<String>,
    pub(super) model_dir: Option<PathBuf>,
    #[serde(default)]
    pub(super) adapters: Vec<String>,
    #[serde(default)]
    pub(super) replica: Vec<RawReplica>,
}

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub(super) struct RawReplica {
    pub(super) server: Spanned<String>,
    pub(super) http: Option<HostPort>,
    pub(super) events: Option<Spanned<FirstEndpoint>>,
    pub(super) replay: Option<Spanned<FirstEndpoint>>,
    #[serde(default = "one_rank")]
    pub(super) ranks: NonZeroU16,
}

const fn one_rank() -> NonZeroU16 {
    NonZeroU16::MIN
}

fn at_least_one(n: usize) -> NonZeroUsize {
    NonZeroUsize::new(n).unwrap_or(NonZeroUsize::MIN)
}

fn constant<T: FromStr>(text: &str) -> T {
    text.parse().unwrap_or_else(|_| unreachable!("a constant of ours"))
}

fn from_text<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(deserializer: D) -> Result<T, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
}
