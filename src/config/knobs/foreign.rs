//! The names under which operators know knobs from Ray Serve and from Dynamo, and what becomes of them here.

use crate::haproxy_config::{self, DECISION_SECONDS};
use Effect::{HAProxy, Mapped, Nothing, Sets};
use Owner::{Dynamo, Ray};
use std::time::Duration;

/// A name of another product's knob.
#[derive(Clone, Copy, Debug)]
pub struct Foreign {
    /// The environment variable.
    pub name: &'static str,
    /// Whose it is.
    pub owner: Owner,
    /// Its default there.
    pub default: &'static str,
    /// What its value must look like.
    pub read: Read,
    /// What it does here.
    pub effect: Effect,
    /// Why that.
    pub why: &'static str,
}

/// Whose a name is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Owner {
    /// Ray Serve LLM 2.60.
    Ray,
    /// NVIDIA Dynamo 1.6.
    Dynamo,
}

/// Reads a value: as it is written for our key, or what is wrong with it.
pub type Read = fn(&str) -> Result<String, String>;

/// What a foreign name does here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    /// Honoured: sets this key.
    Sets(&'static str),
    /// Mapped: sets this key, which does not mean quite the same.
    Mapped(&'static str),
    /// Honoured in HAProxy's configuration: this knob.
    HAProxy(&'static str),
    /// Accepted without effect.
    Nothing,
}

impl Effect {
    /// The knob that it sets.
    #[must_use]
    pub const fn key(self) -> Option<&'static str> {
        match self {
            Sets(key) | Mapped(key) | HAProxy(key) => Some(key),
            Nothing => None,
        }
    }
}

impl Foreign {
    /// What is to be said of its being set, if anything.
    pub(in super::super) fn warning(&self, value: &str) -> Option<String> {
        (self.name == FORWARD_BODY && value == "0")
            .then(|| format!("{FORWARD_BODY}=0 has no effect: without the body no prompt could be looked up"))
    }
}

const FORWARD_BODY: &str = "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY";

/// Every name that is known, with a row of its own.
pub const FOREIGN: &[Foreign] = &[
    Foreign {
        name: "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE",
        owner: Ray,
        default: "8388608",
        read: positive,
        effect: HAProxy("tune.bufsize"),
        why: "HAProxy itself reads it in haproxy/example.cfg, where 64 KiB are added for the headers. It is global and \
              costs every slow client: `kvspoa check` weighs it against the memory",
    },
    Foreign {
        name: DECISION_SECONDS,
        owner: Ray,
        default: "5",
        read: decision,
        effect: Mapped("spop.deadline"),
        why: "`timeout processing` of the printed SPOE file becomes this, and the agent's deadline four fifths of it. \
              Unset, half a second holds: a decision takes milliseconds, and what a hanging agent costs each request \
              should be no more. It never limits the upload, as in Ray, where it turns slow uploads into a 408",
    },
    Foreign {
        name: FORWARD_BODY,
        owner: Ray,
        default: "0",
        read: switch,
        effect: Nothing,
        why: "the agent is always sent the body: without it there are no tokens, and Ray's choice is random. \
              0 is warned of; to switch kvspoa off, stop it",
    },
    Foreign {
        name: "RAY_SERVE_SESSION_ID_HEADER_KEY",
        owner: Ray,
        default: "x-session-id",
        read: any,
        effect: Sets("haproxy.session_header"),
        why: "`kvspoa haproxy-config spoe` honours it too; empty: none",
    },
    Foreign {
        name: "RAY_SERVE_LLM_ENABLE_DECODE_BLOCK_PROGRESS",
        owner: Ray,
        default: "0",
        read: switch,
        effect: Sets("select.decode_progress"),
        why: "the same load, read from the engine's own events: no report for each step",
    },
    Foreign {
        name: "KV_EVENTS_PORT_BASE",
        owner: Ray,
        default: "5557",
        read: any,
        effect: Sets("pool.events.port_base"),
        why: "of all pools; in Ray an entry of `experimental_configs`",
    },
    Foreign {
        name: "KV_TOKEN_PORT_BASE",
        owner: Ray,
        default: "7557",
        read: any,
        effect: Sets("pool.events.token_port_base"),
        why: "likewise. Unset, tokens go only where a replica's `tokens` says, since stock vLLM takes none",
    },
    Foreign {
        name: "KV_INDEXER_THREADS",
        owner: Ray,
        default: "4",
        read: positive,
        effect: Nothing,
        why: "one thread decodes and applies the events of all replicas; it keeps up with more than they send \
              (bench/RESULTS.md)",
    },
    Foreign {
        name: "RAY_SERVE_INGRESS_ROUTER_REPLICAS_PER_NODE",
        owner: Ray,
        default: "1",
        read: positive,
        effect: Nothing,
        why: "one process with threads serves a node, with one state: `prompt.threads`",
    },
    Foreign {
        name: "RAY_SERVE_LLM_KV_TOKEN_STAGING_TTL_S",
        owner: Ray,
        default: "60",
        read: positive_number,
        effect: Nothing,
        why: "the replica keeps the tokens, and reads it; so does the simulated one (`kvspoa simulate`)",
    },
    Foreign {
        name: "RAY_SERVE_LLM_KV_TOKEN_STAGING_MAX_ENTRIES",
        owner: Ray,
        default: "8192",
        read: positive,
        effect: Nothing,
        why: LIKEWISE,
    },
    Foreign {
        name: "RAY_SERVE_LLM_KV_TOKEN_STAGING_MAX_BYTES",
        owner: Ray,
        default: "1073741824",
        read: positive,
        effect: Nothing,
        why: LIKEWISE,
    },
    Foreign {
        name: "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
        owner: Dynamo,
        default: "1.0",
        read: number,
        effect: Sets("select.dynamo.overlap_score_credit"),
        why: "with `select.policy = \"dynamo\"`",
    },
    Foreign {
        name: "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",
        owner: Dynamo,
        default: "0.0",
        read: number,
        effect: Sets("select.dynamo.overlap_score_credit_decay"),
        why: LIKEWISE,
    },
    Foreign {
        name: "DYN_ROUTER_PREFILL_LOAD_SCALE",
        owner: Dynamo,
        default: "1.0",
        read: number,
        effect: Sets("select.dynamo.prefill_load_scale"),
        why: LIKEWISE,
    },
    Foreign {
        name: "DYN_ROUTER_HOST_CACHE_HIT_WEIGHT",
        owner: Dynamo,
        default: "0.75",
        read: number,
        effect: Sets("select.dynamo.host_cache_hit_weight"),
        why: LIKEWISE,
    },
    Foreign {
        name: "DYN_ROUTER_DISK_CACHE_HIT_WEIGHT",
        owner: Dynamo,
        default: "0.25",
        read: number,
        effect: Sets("select.dynamo.disk_cache_hit_weight"),
        why: LIKEWISE,
    },
    Foreign {
        name: "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT",
        owner: Dynamo,
        default: "0.0",
        read: number,
        effect: Sets("select.dynamo.decode_active_request_weight"),
        why: LIKEWISE,
    },
    Foreign {
        name: "DYN_ROUTER_TEMPERATURE",
        owner: Dynamo,
        default: "0.0",
        read: number,
        effect: Sets("select.dynamo.router_temperature"),
        why: LIKEWISE,
    },
    Foreign {
        name: "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS",
        owner: Dynamo,
        default: "300",
        read: seconds,
        effect: Mapped("select.lease"),
        why: "there every request loses its load at this age. Here a booking ends with its request, and its age counts \
              only where nobody else does; unset, hours, since a long answer is no lost one",
    },
    Foreign {
        name: "DYN_ROUTER_QUEUE_THRESHOLD",
        owner: Dynamo,
        default: "none",
        read: number,
        effect: Nothing,
        why: "the agent answers at once and holds no queue: HAProxy does (`maxconn` of a server)",
    },
    Foreign {
        name: "DYN_ROUTER_QUEUE_POLICY",
        owner: Dynamo,
        default: "fcfs",
        read: any,
        effect: Nothing,
        why: LIKEWISE,
    },
    Foreign {
        name: "DYN_ROUTER_USE_KV_EVENTS",
        owner: Dynamo,
        default: "true",
        read: any,
        effect: Nothing,
        why: "events are used where a replica has them; where not, what was sent to it stands in",
    },
];

const LIKEWISE: &str = "likewise";

/// Names of Ray Serve that configure its own HAProxy, proxies and controller: accepted without effect.
pub(super) const OF_RAY_ALONE: &[&str] = &[
    "RAY_SERVE_ENABLE_HA_PROXY",
    "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING",
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_METRICS_ENABLED",
    "RAY_SERVE_HAPROXY_METRICS_ENABLED",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH",
    "RAY_SERVE_HAPROXY_METRICS_REPORT_INTERVAL_S",
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_HAPROXY_RETRY_ON",
    "RAY_SERVE_HAPROXY_RETRIES",
    "RAY_SERVE_HAPROXY_INGRESS_RETRY_ON",
    "RAY_SERVE_HAPROXY_INGRESS_RETRIES",
    "RAY_SERVE_HAPROXY_INGRESS_TIMEOUT_SERVER_S",
    "RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S",
    "RAY_SERVE_HAPROXY_TIMEOUT_CONNECT_S",
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S",
    "RAY_SERVE_HAPROXY_MAXCONN",
    "RAY_SERVE_HAPROXY_NBTHREAD",
    "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM",
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_FALL",
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_RISE",
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER",
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_FASTINTER",
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_DOWNINTER",
    "RAY_SERVE_HAPROXY_OBSERVE_MARK_DOWN_ENABLED",
    "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT",
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE",
    "RAY_SERVE_HAPROXY_TCP_NODELAY",
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S",
    "RAY_SERVE_HAPROXY_CLOSE_SPREAD_TIME_S",
    "RAY_SERVE_HAPROXY_BROADCAST_COALESCE_S",
    "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S",
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC",
    "RAY_SERVE_HAPROXY_SOCKET_PATH",
    "RAY_SERVE_HAPROXY_LOG_TARGET",
    "RAY_SERVE_HAPROXY_BINARY_PATH",
    "RAY_SERVE_PORT_QUARANTINE_S",
    "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT",
    "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
];

/// Dynamo's names for what is done otherwise here, or not at all: accepted without effect.
pub(super) const OF_DYNAMO_ALONE: &[&str] = &[
    "DYN_ROUTER_MODE",
    "DYN_ROUTER_MIN_INITIAL_WORKERS",
    "DYN_ROUTER_SESSION_AFFINITY_TTL_SECS",
    "DYN_ROUTER_LOAD_AWARE",
    "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT",
    "DYN_ROUTER_SHARED_CACHE_MULTIPLIER",
    "DYN_ROUTER_SHARED_CACHE_TYPE",
    "DYN_ROUTER_TTL_SECS",
    "DYN_ROUTER_PREDICTED_TTL_SECS",
    "DYN_ROUTER_EVENT_THREADS",
    "DYN_ROUTER_REPLICA_SYNC",
    "DYN_ROUTER_SNAPSHOT_THRESHOLD",
    "DYN_ROUTER_RESET_STATES",
    "DYN_ROUTER_DURABLE_KV_EVENTS",
    "DYN_ROUTER_TRACKING_HASH",
    "DYN_ROUTER_TRACKING_KEY_FILE",
    "DYN_ROUTER_TRACKING_KEY_ID",
    "DYN_ROUTER_TRACK_ACTIVE_BLOCKS",
    "DYN_ROUTER_TRACK_OUTPUT_BLOCKS",
    "DYN_ROUTER_TRACK_PREFILL_TOKENS",
    "DYN_ROUTER_ASSUME_KV_REUSE",
    "DYN_ROUTER_PREFILL_LOAD_MODEL",
    "DYN_ROUTER_POLICY_CONFIG",
];

/// As it stands: the key's own rules are enough.
fn any(text: &str) -> Result<String, String> {
    Ok(text.to_owned())
}

fn positive(text: &str) -> Result<String, String> {
    let number = text.parse::<u64>().ok().filter(|number| *number > 0);
    number.map(|number| number.to_string()).ok_or_else(|| format!("`{text}` is no whole number above 0"))
}

fn number(text: &str) -> Result<String, String> {
    let number = text.parse::<f64>().ok().filter(|number| number.is_finite());
    number.map(|number| number.to_string()).ok_or_else(|| format!("`{text}` is no number"))
}

fn positive_number(text: &str) -> Result<String, String> {
    let good = text.parse::<f64>().is_ok_and(|number| number.is_finite() && number > 0.0);
    if good { Ok(text.to_owned()) } else { Err(format!("`{text}` is no number above 0")) }
}

/// Ray takes all but `1` for 0, so that `true` switches off. That can only be a mistake.
fn switch(text: &str) -> Result<String, String> {
    if matches!(text, "0" | "1") { Ok(text.to_owned()) } else { Err(format!("`{text}` is neither 1 nor 0")) }
}

/// A time in seconds.
fn seconds(text: &str) -> Result<String, String> {
    haproxy_config::seconds(text).map(millis)
}

/// Four fifths of a time in seconds: HAProxy waits for all of it, and should see an answer.
fn decision(text: &str) -> Result<String, String> {
    haproxy_config::seconds(text).map(|time| millis(time * 4 / 5))
}

fn millis(time: Duration) -> String {
    format!("{}ms", time.as_millis())
}
