//! The knobs of HAProxy on which the agent's work depends. HAProxy reads them from its own files, which
//! `kvspoa haproxy-config` prints.

use super::{
    Breaks::{Sides, Wrong},
    Form, Knob, PLAIN,
};

pub(super) const KNOBS: &[Knob] = &[
    Knob {
        key: "tune.bufsize",
        form: Form::Count("bytes"),
        unset: "HAProxy's 16384; in haproxy/example.cfg 8454144; 1048576 is right for an HAProxy that serves other sites too",
        what: "`global`: how much of a request the agent sees, less headers and `tune.maxrewrite`",
        breaks: Sides(
            "of a longer prompt only the beginning counts (`body_cut`)",
            "memory: each client that reads slowly, on every frontend, holds up to three (`kvspoa check` weighs it)",
        ),
        ..PLAIN
    },
    Knob {
        key: "maxconn",
        form: Form::Count("connections"),
        unset: "by the limit of open files; in haproxy/example.cfg 4096",
        what: "`global`: the clients that may hold such buffers",
        breaks: Sides("clients wait in the kernel", "memory, times `tune.bufsize`"),
        ..PLAIN
    },
    Knob {
        key: "timeout processing",
        form: Form::Time,
        flag: Some("agent-timeout"),
        variable: Some("RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_TIMEOUT_S"),
        unset: "500ms",
        what: "SPOE file: the most that a request waits for the agent. Above `spop.deadline`",
        breaks: Sides(
            "answers come too late, and the breaker opens",
            "a hanging agent costs each request that much, until the breaker opens",
        ),
        ..PLAIN
    },
    Knob {
        key: "wait-for-body time",
        form: Form::Time,
        flag: Some("upload-timeout"),
        unset: "3600s",
        what: "LLM backend: the longest upload that is waited for",
        breaks: Sides(
            "slow uploads get a 408",
            "a client can hold a buffer that long; `timeout client` ends one that stands still",
        ),
        ..PLAIN
    },
    Knob {
        key: "session header",
        form: Form::Text("HEADER"),
        flag: Some("session-header"),
        variable: Some("RAY_SERVE_SESSION_ID_HEADER_KEY"),
        unset: "x-session-id",
        what: "SPOE file: the request header that names a session",
        breaks: Wrong("conversations do not stay together where caches are equal"),
        ..PLAIN
    },
    Knob {
        key: "breaker",
        form: Form::Count("failures in a row"),
        unset: "5, then 5 s of pause",
        what: "LLM backend: time-outs or lost connections after which the agent is not asked",
        breaks: Sides("a hiccup stops routing for the pause", "more requests wait for a hanging agent"),
        ..PLAIN
    },
    Knob {
        key: "check inter",
        form: Form::Time,
        unset: "500ms, `fastinter` 100ms, `downinter` 200ms",
        what: "agent's backend: how soon a stopped and a started agent are noticed",
        breaks: Sides("more connections to the agent", "more requests wait for a dead agent"),
        ..PLAIN
    },
];
