//! The knobs of a pool and of its replicas, those of a pool first.

use super::{
    Breaks::{Sides, Wrong},
    Form, Knob, PLAIN,
};

pub(super) const KEYS: &[Knob] = &[
    Knob {
        key: "pool.backend",
        form: Form::Text("NAME"),
        unset: "required",
        what: "the HAProxy backend that serves the pool's model",
        breaks: Wrong("its requests are of an `unknown_pool` and left to HAProxy"),
        ..PLAIN
    },
    Knob {
        key: "pool.mode",
        form: Form::Text("MODE"),
        what: "whether requests go where kvspoa says: `on`; `shadow`: it decides and records, and HAProxy balances; `off`: it looks \
               at nothing; `share=0.25`: `on` for a quarter of the sessions (without a session header, of the conversations), \
               `shadow` for the others. `kvspoa pool` switches it while the agent runs",
        breaks: Wrong("`shadow` and `off`: nothing is gained from the caches"),
        ..PLAIN
    },
    Knob {
        key: "pool.model_dir",
        form: Form::Text("DIR"),
        unset: "a tiny model, for trials",
        what: "the folder of the model's `tokenizer.json`, `tokenizer_config.json` and chat template",
        breaks: Wrong("of another model: no prompt is ever found cached (`nothing_matches`)"),
        ..PLAIN
    },
    Knob {
        key: "pool.model",
        form: Form::Text("NAME"),
        unset: "as fetched, else as the first replica tells",
        what: "what the replicas must serve: the name, or the root, of their `/v1/models`",
        breaks: Wrong("replicas that serve it are reported as others (`replica_other_model`)"),
        ..PLAIN
    },
    Knob {
        key: "pool.adapters",
        form: Form::List,
        what: "LoRA adapters that clients name as their model; those that engines or events name are learned",
        breaks: Wrong("requests for an adapter that nobody named count as for the base model"),
        ..PLAIN
    },
    Knob {
        key: "pool.max_model_len",
        form: Form::Count("tokens"),
        unset: "as the engines tell (`/v1/models`), else 131072",
        what: "the engines' context: longer prompts are refused there, so they are routed by load; a request of which only the \
               length is known counts no further as load",
        breaks: Sides(
            "long requests are routed by load (`refused`)",
            "requests with a false `Content-Length` weigh too much",
        ),
        ..PLAIN
    },
    Knob {
        key: "pool.replicas_file",
        form: Form::Text("FILE"),
        what: "a JSON file of replicas, `{\"replicas\": [{\"server\": \"s1\", \"http\": \"10.0.0.11:8000\"}]}`, read again when it \
               changes; while it is wrong, the replicas stay as they were",
        breaks: Wrong("the pool has no replicas until it can be read"),
        ..PLAIN
    },
    Knob {
        key: "pool.prompt.chat_template",
        form: Form::Text("FILE"),
        unset: "the model's own",
        what: "the engines' `--chat-template`",
        breaks: Wrong("the text is not the engines', so nothing matches beyond the first difference"),
        ..PLAIN
    },
    Knob {
        key: "pool.prompt.chat_template_content_format",
        form: Form::Text("FORMAT"),
        what: "the engines' `--chat-template-content-format`: `auto`, `string` or `openai`",
        breaks: Wrong("as above"),
        ..PLAIN
    },
    Knob {
        key: "pool.prompt.default_chat_template_kwargs",
        form: Form::Table,
        what: "the engines' `--default-chat-template-kwargs`: `{ enable_thinking = false }`",
        breaks: Wrong("as above"),
        ..PLAIN
    },
    Knob {
        key: "pool.prompt.exclude_tools_when_tool_choice_none",
        form: Form::Switch,
        what: "the engines' `--exclude-tools-when-tool-choice-none`",
        breaks: Wrong("as above, for requests with tools"),
        ..PLAIN
    },
    Knob {
        key: "pool.prompt.trust_request_chat_template",
        form: Form::Switch,
        what: "the engines' `--trust-request-chat-template`: a request's own template renders it, within limits of work and \
               length",
        breaks: Wrong("requests with a template are routed by load (`request_template`)"),
        ..PLAIN
    },
    Knob {
        key: "pool.prompt.enable_auto_tool_choice",
        form: Form::Switch,
        what: "the engines' `--enable-auto-tool-choice` with its `--tool-call-parser`; without, they refuse requests with tools to be \
               called",
        breaks: Wrong(
            "false: requests with tools are routed by load (`refused`); true: so are those that are refused by tokens",
        ),
        ..PLAIN
    },
    Knob {
        key: "pool.prompt.skip_model_name_validation",
        form: Form::Switch,
        what: "the engines' `VLLM_SKIP_MODEL_NAME_VALIDATION`: they take requests that name a model which no `/v1/models` has",
        breaks: Wrong("false: such requests are routed by load (`unknown_model`)"),
        ..PLAIN
    },
    Knob {
        key: "pool.prompt.system_start_date",
        form: Form::Text("YYYY-MM-DD"),
        unset: "the day's",
        what: "the engines' `VLLM_SYSTEM_START_DATE`, the date that gpt-oss is told",
        breaks: Wrong("as above, for gpt-oss"),
        ..PLAIN
    },
    Knob {
        key: "pool.prompt.utc_offset",
        form: Form::Text("+HH:MM"),
        what: "the time zone of the engines' clocks, for prompts with the date in them",
        breaks: Wrong("as above, between the two midnights"),
        ..PLAIN
    },
    Knob {
        key: "pool.prompt.compat",
        form: Form::Text("RELEASE"),
        what: "the release of `transformers` that the engines have: `transformers-4.57`, `transformers-5.16` to `-5.24`. From \
               5.21 on templates see `thinking`, from 5.24 on no `null`s; up to 4 `add_bos_token` of some tokenizers counts",
        breaks: Wrong("as above, for templates and tokenizers of these kinds"),
        ..PLAIN
    },
    Knob {
        key: "pool.revision.name",
        form: Form::Text("NAME"),
        unset: "required",
        what: "by which replicas name it (`revision`)",
        breaks: Wrong("the file is refused"),
        ..PLAIN
    },
    Knob {
        key: "pool.revision.model_dir",
        form: Form::Text("DIR"),
        unset: "the pool's",
        what: "the tokenizer and chat template of these replicas",
        breaks: Wrong("what they hold is not found"),
        ..PLAIN
    },
    Knob {
        key: "pool.revision.prompt",
        form: Form::Table,
        unset: "the pool's",
        what: "the keys of `[pool.prompt]` for these replicas, in place of all of the pool's",
        breaks: Wrong("as above"),
        ..PLAIN
    },
    Knob {
        key: "pool.events.port_base",
        form: Form::Count("port"),
        flag: Some("kv-events-port-base"),
        what: "for engines without `/kv_event_sources`: the PUB port of a machine's first rank; the others' follow",
        breaks: Wrong("events are not heard (`unreachable`), or those of another rank"),
        ..PLAIN
    },
    Knob {
        key: "pool.events.replay_offset",
        form: Form::Count("ports"),
        what: "from such a PUB port to its replay port",
        breaks: Wrong("what was cached before kvspoa started is not known (`replay_timeout`)"),
        ..PLAIN
    },
    Knob {
        key: "pool.events.token_port_base",
        form: Form::Count("port"),
        flag: Some("kv-token-port-base"),
        what: "where replicas of Ray Serve take prompts' tokens ahead of their requests (docs/ray.md): the port of a machine's \
               first rank; the others' follow",
        breaks: Wrong(
            "the replicas tokenize again (`token_pushes_total`); stock vLLM takes none in any case",
        ),
        ..PLAIN
    },
    Knob {
        key: "pool.events.node_rank",
        form: Form::Text("RULE"),
        what: "how such ranks are counted where a machine has several replicas: in the `order` of HAProxy's servers, or by \
               the number at the end of the server's `name`",
        breaks: Wrong("the events of one replica are taken for another's"),
        ..PLAIN
    },
    Knob {
        key: "pool.events.listen",
        form: Form::Text("ENDPOINT"),
        what: "`tcp://HOST:PORT` at which engines are heard whose publisher connects (an `endpoint` without `*`), each by its \
               topic; rank *n* at the port + *n*",
        breaks: Wrong("such engines are not heard"),
        ..PLAIN
    },
    Knob {
        key: "pool.http.tls",
        form: Form::Switch,
        unset: "as HAProxy does",
        what: "whether replicas are asked by https",
        breaks: Wrong("they do not answer: no discovery, no load of the engines"),
        ..PLAIN
    },
    Knob {
        key: "pool.http.ca_file",
        form: Form::Text("FILE"),
        unset: "the system's",
        what: "PEM file of the authorities whose certificates replicas may have",
        breaks: Wrong("as above"),
        ..PLAIN
    },
    Knob {
        key: "pool.http.cert_file",
        form: Form::Text("FILE"),
        what: "our certificate (PEM), where replicas ask for one; needs `key_file`",
        breaks: Wrong("as above"),
        ..PLAIN
    },
    Knob {
        key: "pool.http.key_file",
        form: Form::Text("FILE"),
        what: "its private key (PEM)",
        breaks: Wrong("as above"),
        ..PLAIN
    },
    Knob {
        key: "pool.http.server_name",
        form: Form::Text("NAME"),
        unset: "the host",
        what: "the name in the replicas' certificates",
        breaks: Wrong("as above"),
        ..PLAIN
    },
    Knob {
        key: "pool.http.api_key_file",
        form: Form::Text("FILE"),
        what: "a file with the engines' API key",
        breaks: Wrong("as above"),
        ..PLAIN
    },
    Knob {
        key: "pool.replica.server",
        form: Form::Text("NAME"),
        unset: "required",
        what: "the HAProxy server's name",
        breaks: Wrong("the agent names a server that HAProxy does not have, and HAProxy balances by itself"),
        ..PLAIN
    },
    Knob {
        key: "pool.replica.id",
        form: Form::Text("NAME"),
        unset: "the server's name",
        what: "what Ray's HAProxy calls the replica",
        breaks: Wrong("Ray's HAProxy does not find it"),
        ..PLAIN
    },
    Knob {
        key: "pool.replica.http",
        form: Form::Text("ADDR"),
        unset: "none; of an override HAProxy's",
        what: "the engine's own HTTP address, to be asked for event endpoints, models and load; `https://` in front: by TLS",
        breaks: Wrong("events must be configured, and the engine's load is not known"),
        ..PLAIN
    },
    Knob {
        key: "pool.replica.topic",
        form: Form::Text("TEXT"),
        unset: "as the engine says",
        what: "the topic of its events, where several engines connect to one endpoint",
        breaks: Wrong("its events are nobody's (`kv_messages_of_unknown_topics_total`)"),
        ..PLAIN
    },
    Knob {
        key: "pool.replica.events",
        form: Form::Text("ENDPOINT"),
        unset: "as the engine says",
        what: "the PUB endpoint of its KV events, `tcp://HOST:PORT` or `ipc://PATH`, or a list of one for each rank; with `@` \
               in front an address to listen at. Without events, what was sent to the replica stands in for what it holds",
        breaks: Wrong("`unreachable`, or the events of another replica"),
        ..PLAIN
    },
    Knob {
        key: "pool.replica.replay",
        form: Form::Text("ENDPOINT"),
        unset: "as the engine says",
        what: "the endpoint that replays them, or a list",
        breaks: Wrong("`degraded`: what was cached before kvspoa started, or missed, is not known"),
        ..PLAIN
    },
    Knob {
        key: "pool.replica.tokens",
        form: Form::Text("ENDPOINT"),
        what: "where a replica of Ray Serve takes prompts' tokens ahead of their requests, or a list (docs/ray.md)",
        breaks: Wrong("the replica tokenizes again"),
        ..PLAIN
    },
    Knob {
        key: "pool.replica.cache_blocks",
        form: Form::Count("blocks"),
        unset: "as `/metrics` tells of the GPU, else 8192",
        what: "KV cache blocks of each rank, all tiers; bounds what counts as present without events",
        breaks: Sides(
            "what a replica still holds is taken for gone",
            "what it has evicted is taken for present",
        ),
        ..PLAIN
    },
    Knob {
        key: "pool.replica.ranks",
        form: Form::Count("ranks"),
        unset: "1, or as many as are listed",
        what: "data-parallel ranks; rank *n* is at both ports + *n*",
        breaks: Sides("the caches of other ranks are not known", "ranks that nobody hears count as empty"),
        ..PLAIN
    },
    Knob {
        key: "pool.replica.revision",
        form: Form::Text("NAME"),
        unset: "the pool's own",
        what: "the `[[pool.revision]]` by which it makes prompts",
        breaks: Wrong("what it holds is not found"),
        ..PLAIN
    },
];
