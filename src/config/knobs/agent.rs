//! The agent's own knobs, in the file's order.

use super::{
    Breaks::{Sides, Wrong},
    Form, Knob, PLAIN,
};

pub(super) const KEYS: &[Knob] = &[
    Knob {
        key: "spop.listen",
        form: Form::Text("ADDR"),
        flag: Some("spop-listen"),
        what: "where HAProxy's SPOE filter connects: `ADDRESS:PORT` or a unix socket's path (mode 0660)",
        breaks: Wrong(
            "HAProxy finds no agent and balances by itself (`not_asked_total{reason=\"agent_down\"}`)",
        ),
        takes_restart: true,
        ..PLAIN
    },
    Knob {
        key: "spop.max_frame_bytes",
        form: Form::Bytes,
        what: "the largest SPOP frame",
        breaks: Sides(
            "below HAProxy's `tune.bufsize`, bodies that the buffer holds do not fit a frame and are left to HAProxy",
            "a broken peer may make the agent hold as much for each connection",
        ),
        ..PLAIN
    },
    Knob {
        key: "spop.max_connections",
        form: Form::Count("connections"),
        what: "SPOP connections at once; HAProxy opens about one for each request in flight. The limit of open files \
               (`ulimit -n`, `LimitNOFILE=`) lowers it",
        breaks: Sides(
            "connections wait in the kernel, and requests for `timeout processing`",
            "file descriptors and memory",
        ),
        ..PLAIN
    },
    Knob {
        key: "spop.max_in_flight",
        form: Form::Count("requests"),
        what: "requests being decided at once; more are left to HAProxy (`spop_shed_total`)",
        breaks: Sides("bursts are balanced without a look at caches", "bursts wait, up to `spop.deadline`"),
        ..PLAIN
    },
    Knob {
        key: "spop.max_bytes_in_flight",
        form: Form::Bytes,
        what: "bodies being decided at once, together; more are left to HAProxy (`spop_shed_total`)",
        breaks: Sides("bursts of long prompts are balanced without a look at caches", "memory"),
        ..PLAIN
    },
    Knob {
        key: "spop.deadline",
        form: Form::Time,
        flag: Some("deadline"),
        what: "a request that is not decided by then is left to HAProxy. Keep it below `timeout processing` of the SPOE file",
        breaks: Sides(
            "long prompts are not tokenized in time and go by their beginning, or by load",
            "above `timeout processing` HAProxy has gone on alone before the answer comes, and its breaker may open",
        ),
        ..PLAIN
    },
    Knob {
        key: "admin.listen",
        form: Form::Text("ADDR"),
        flag: Some("admin-listen"),
        what: "where metrics, health and `/explain` are served: `HOST:PORT`, without authentication",
        breaks: Wrong("on other than loopback, whoever reaches it can ask what is cached"),
        takes_restart: true,
        ..PLAIN
    },
    Knob {
        key: "log.listen",
        form: Form::Text("ADDR"),
        flag: Some("log-listen"),
        what: "where HAProxy's log lines arrive: `ADDRESS:PORT` (UDP) or a unix datagram socket's path",
        breaks: Wrong(
            "ends of requests are learned late, from HAProxy's and the engines' counts (`bookings_lost_total`)",
        ),
        takes_restart: true,
        ..PLAIN
    },
    Knob {
        key: "haproxy.socket",
        form: Form::Text("ADDR"),
        flag: Some("haproxy-socket"),
        what: "HAProxy's runtime socket (`stats socket … level user`): a path or `HOST:PORT`. It tells the replicas, their \
               states, weights and limits",
        breaks: Wrong(
            "without it replicas must be listed, a server that is down may be named, and lost log lines leave load behind",
        ),
        ..PLAIN
    },
    Knob {
        key: "haproxy.poll",
        form: Form::Time,
        what: "how often it is asked; notices in HAProxy's log cause a poll at once",
        breaks: Sides("0.2 ms of HAProxy's time for each", "states and counts of servers are as old as that"),
        ..PLAIN
    },
    Knob {
        key: "haproxy.session_header",
        form: Form::Text("HEADER"),
        flag: Some("session-header"),
        what: "the request header that names a session, where Ray's HAProxy asks (`/internal/route`); empty: none. With our \
               lines in HAProxy it is the SPOE file's: `kvspoa haproxy-config spoe --session-header`",
        breaks: Wrong("conversations do not stay together where caches are equal"),
        takes_restart: true,
        ..PLAIN
    },
    Knob {
        key: "engine.poll",
        form: Form::Time,
        what: "how often each engine's `/metrics` is read",
        breaks: Sides("work for the engines' front ends", "requests that kvspoa did not place are seen late"),
        ..PLAIN
    },
    Knob {
        key: "engine.parity_probe",
        form: Form::Time,
        what: "how often each engine is asked for its tokens of eleven short conversations (`/tokenize` or `/render`), also when \
               it joins or comes back; where they are not ours, the replica is `degraded` (`renderer_differs`). `0s`: never",
        breaks: Sides(
            "work for the engines' front ends",
            "an engine that was updated in place, or a tokenizer or template that is another, is found late: only its matches tell",
        ),
        ..PLAIN
    },
    Knob {
        key: "prompt.threads",
        form: Form::Count("threads"),
        unset: "cores less one",
        what: "threads for bodies longer than `prompt.inline_bytes`",
        breaks: Sides(
            "long prompts wait for a thread (`deadline` in `decisions_total`)",
            "they take HAProxy's cores",
        ),
        takes_restart: true,
        ..PLAIN
    },
    Knob {
        key: "prompt.queue",
        form: Form::Count("prompts"),
        what: "long prompts that may wait for a thread; more are routed by load alone",
        breaks: Sides("bursts are routed by load", "they wait in vain, until the deadline"),
        ..PLAIN
    },
    Knob {
        key: "prompt.inline_bytes",
        form: Form::Bytes,
        what: "bodies up to this are tokenized where they arrive",
        breaks: Sides(
            "a hand-over to another thread costs more than the work",
            "other connections of that thread wait",
        ),
        ..PLAIN
    },
    Knob {
        key: "prompt.cache_bytes",
        form: Form::Bytes,
        what: "the bound of what each pool keeps of earlier prompts (`token_cache_bytes`), for each of its revisions; `0` keeps \
               nothing",
        breaks: Sides("the turns of a conversation are tokenized again", "memory for what nobody asks again"),
        ..PLAIN
    },
    Knob {
        key: "index.max_bytes",
        form: Form::Bytes,
        what: "the bound of each pool's index; beyond it the blocks not looked up for longest go. About 40 bytes a block",
        breaks: Sides(
            "cached prefixes are not found (`index_full`)",
            "memory, if the replicas hold that many blocks",
        ),
        ..PLAIN
    },
    Knob {
        key: "peers.listen",
        form: Form::Text("ADDR"),
        what: "where other agents of the same replicas connect: `HOST:PORT`. What comes is sealed by the secret",
        breaks: Wrong(
            "their bookings are not heard: each agent weighs its own load, and what the engines report each second",
        ),
        takes_restart: true,
        ..PLAIN
    },
    Knob {
        key: "peers.connect",
        form: Form::List,
        what: "where each of the other agents listens: `[\"HOST:PORT\", …]`, at most 64",
        breaks: Wrong("the agent that is missing does not hear of this one's bookings (`peer_up`)"),
        takes_restart: true,
        ..PLAIN
    },
    Knob {
        key: "peers.secret_file",
        form: Form::Text("FILE"),
        what: "a file with the secret of all these agents, at least 32 bytes: `openssl rand -hex 32`. The key of the block hashes \
               comes from it too",
        breaks: Wrong("another one than the others': they refuse the connection (`peer_refused_total`)"),
        takes_restart: true,
        ..PLAIN
    },
    Knob {
        key: "record.max_bytes",
        form: Form::Bytes,
        what: "memory for what was decided of late, and what HAProxy did: `kvspoa shadow-report` reads it. No text, no tokens, no \
               hashes. 0 keeps nothing",
        breaks: Sides("the report looks at few requests, and forgets what prompts have in common", "memory"),
        takes_restart: true,
        ..PLAIN
    },
    Knob {
        key: "record.file",
        form: Form::Text("FILE"),
        what: "a file that the same is written to, a line of JSON a request: `kvspoa replay FILE` plays it, `shadow-report --file` \
               reads it. Relative to the configuration",
        breaks: Wrong("it cannot be written: the agent does not start"),
        takes_restart: true,
        ..PLAIN
    },
    Knob {
        key: "record.file_max_bytes",
        form: Form::Bytes,
        what: "the size at which the file becomes `FILE.1`, in place of the one before",
        breaks: Sides("the file reaches back a short time", "disk: twice as much at most"),
        takes_restart: true,
        ..PLAIN
    },
    Knob {
        key: "select.policy",
        form: Form::Text("POLICY"),
        flag: Some("policy"),
        variable: Some("KVSPOA_POLICY"),
        what: "how a replica is chosen: `cost`, `dynamo`, `least_loaded`, `round_robin`",
        breaks: Wrong("`least_loaded` and `round_robin` do not look at caches"),
        ..PLAIN
    },
    Knob {
        key: "select.lease",
        form: Form::Time,
        what: "how long a booking may live whose end was not told, where neither HAProxy's socket nor the engine's `/metrics` \
               counts requests",
        breaks: Sides(
            "long requests lose their load while they run",
            "lost log lines leave load behind for as long",
        ),
        ..PLAIN
    },
    Knob {
        key: "select.seed",
        form: Form::Count("any"),
        what: "fixes the random choice among equals, for tests",
        breaks: Wrong("agents with the same seed choose alike"),
        takes_restart: true,
        ..PLAIN
    },
    Knob {
        key: "select.decode_progress",
        form: Form::Switch,
        flag: Some("decode-progress"),
        what: "whether answers in the making count as load, by the blocks that the engine stores for them; prompts alone \
               count otherwise",
        breaks: Wrong(
            "off: long answers weigh nothing until the engine reports them. On: work for each block stored",
        ),
        ..PLAIN
    },
    Knob {
        key: "select.dynamo.overlap_score_credit",
        form: Form::Weight("blocks for a cached GPU block"),
        what: "policy `dynamo`: what a GPU block saves; above 1 amplifies",
        breaks: Sides("caches are not followed", "one replica gets all that share a prefix"),
        ..PLAIN
    },
    Knob {
        key: "select.dynamo.overlap_score_credit_decay",
        form: Form::Weight("per prompt's length of excess prefill"),
        what: "policy `dynamo`: how fast that credit fades where more prefill is queued than elsewhere; 0: not at all",
        breaks: Sides("a busy replica keeps its followers", "caches are not followed under load"),
        ..PLAIN
    },
    Knob {
        key: "select.dynamo.prefill_load_scale",
        form: Form::Weight("cost for a block to prefill"),
        what: "policy `dynamo`: the weight of prefill against decode",
        breaks: Sides("queued prompts and caches do not matter", "running answers do not matter"),
        ..PLAIN
    },
    Knob {
        key: "select.dynamo.host_cache_hit_weight",
        form: Form::Weight("blocks for a block in host memory"),
        what: "policy `dynamo`: what a block in host memory saves",
        breaks: Sides("offloaded prefixes are not followed", "loading them is taken for free"),
        ..PLAIN
    },
    Knob {
        key: "select.dynamo.disk_cache_hit_weight",
        form: Form::Weight("blocks for a block on disk"),
        what: "policy `dynamo`: what a block on disk, or in a store of others, saves",
        breaks: Sides("stored prefixes are not followed", "loading them is taken for free"),
        ..PLAIN
    },
    Knob {
        key: "select.dynamo.decode_active_request_weight",
        form: Form::Weight("blocks for an active request"),
        what: "policy `dynamo`: what each active request counts besides its blocks",
        breaks: Sides("many short requests weigh little", "caches are not followed"),
        ..PLAIN
    },
    Knob {
        key: "select.dynamo.router_temperature",
        form: Form::Weight("of the costs' spread"),
        what: "policy `dynamo`: 0 takes the lowest cost; higher draws more evenly",
        breaks: Sides("equal agents choose alike", "the choice is random"),
        ..PLAIN
    },
];

pub(super) const PROCESS: &[Knob] = &[
    Knob {
        key: "config",
        form: Form::Text("FILE"),
        flag: Some("config"),
        unset: "/etc/kvspoa/kvspoa.toml",
        what: "the configuration file",
        breaks: Wrong("`run` and `check` end with status 64"),
        ..PLAIN
    },
    Knob {
        key: "log",
        form: Form::Text("FILTER"),
        flag: Some("log"),
        unset: "info; of `demo`: warn",
        what: "what is logged to standard error: `error`, `warn`, `info`, `debug`, or by module as in \
               `kvspoa::events=debug`. Prompts are never logged, at any level",
        breaks: Wrong("status 64"),
        ..PLAIN
    },
    Knob {
        key: "log_json",
        form: Form::Switch,
        flag: Some("log-json"),
        unset: "off",
        what: "log as JSON, a line an event",
        breaks: Wrong("what collects the log cannot read it"),
        ..PLAIN
    },
    Knob {
        key: "models",
        form: Form::Text("DIR"),
        flag: Some("cache"),
        unset: "/var/lib/kvspoa/models",
        what: "of `model fetch`: the folder in which models are kept",
        breaks: Wrong("models are fetched again"),
        ..PLAIN
    },
];
