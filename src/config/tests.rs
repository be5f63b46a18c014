use super::*;
use crate::events::Endpoint;

const MINIMAL: &str = r#"
spop.listen = "127.0.0.1:9101"
admin.listen = "127.0.0.1:9102"
log.listen = "127.0.0.1:9103"
[[pool]]
backend = "be_llm"
model_dir = "path/to/model"
[[pool.replica]]
server = "s1"
http = "127.0.0.1:8101"
events = "tcp://127.0.0.1:5557"
replay = "tcp://127.0.0.1:6557"
"#;

fn parse(text: &str) -> Result<Config, String> {
    Config::parse(text, Path::new("/etc/kvspoa/kvspoa.toml"), &Overrides::default())
        .map_err(|e| e.to_string())
}

#[test]
fn the_static_shape_is_read() {
    let config = parse(MINIMAL).expect("valid");
    let pool = &config.pools[0];
    assert_eq!(pool.backend, "be_llm");
    assert_eq!(pool.model_dir.as_deref(), Some(Path::new("/etc/kvspoa/path/to/model")));
    let replica = &pool.replicas[0];
    assert_eq!(replica.server, "s1");
    assert_eq!(replica.ranks.len(), 1);
    assert_eq!(replica.ranks[0].events.as_ref().map(Endpoint::address), Some("tcp://127.0.0.1:5557"));
}

#[test]
fn each_rank_has_its_own_ports() {
    let text = MINIMAL.replace("http =", "ranks = 2\nhttp =");
    let config = parse(&text).expect("valid");
    let ports: Vec<_> = config.pools[0].replicas[0]
        .ranks
        .iter()
        .map(|rank| rank.replay.as_ref().map(Endpoint::address).map(str::to_owned))
        .collect();
    assert_eq!(ports, [Some("tcp://127.0.0.1:6557".to_owned()), Some("tcp://127.0.0.1:6558".to_owned())]);
}

#[test]
fn without_a_list_the_replicas_are_those_of_haproxy() {
    let text = "haproxy.socket = \"/run/h.sock\"\n[[pool]]\nbackend = \"b\"\nmodel_dir = \"m\"\n";
    let pool = parse(text).expect("valid").pools.remove(0);
    assert_eq!((pool.source, pool.replicas.len()), (ReplicaSource::Haproxy, 0));
    let listed = parse(&format!("{text}[[pool.replica]]\nserver = \"s\"\n")).expect("valid").pools.remove(0);
    assert_eq!(listed.source, ReplicaSource::Listed);
    let overridden = parse(&format!("{text}[[pool.override]]\nserver = \"s\"\nranks = 2\n")).expect("valid");
    assert_eq!(
        (&overridden.pools[0].source, overridden.pools[0].replicas[0].ranks.len()),
        (&ReplicaSource::Haproxy, 2)
    );
    let file = parse(&format!("{text}replicas_file = \"r.json\"\n")).expect("valid").pools.remove(0);
    assert_eq!(file.source, ReplicaSource::File("/etc/kvspoa/r.json".into()));
}

#[test]
fn the_ranks_of_several_machines_have_endpoints_of_their_own() {
    let text = MINIMAL
        .replace("\"tcp://127.0.0.1:5557\"", "[\"tcp://a:5557\", \"tcp://b:5557\"]")
        .replace("\"tcp://127.0.0.1:6557\"", "[\"tcp://a:6557\", \"tcp://b:6557\"]");
    let ranks = parse(&text).expect("valid").pools.remove(0).replicas.remove(0).ranks;
    let replays: Vec<_> =
        ranks.iter().filter_map(|rank| rank.replay.as_ref().map(Endpoint::address)).collect();
    assert_eq!(replays, ["tcp://a:6557", "tcp://b:6557"]);
}

#[test]
fn an_endpoint_to_listen_at_may_have_a_wildcard() {
    let listen = |text: &str| {
        let pool =
            format!("haproxy.socket = \"/h\"\n[[pool]]\nbackend = \"b\"\nevents.listen = \"{text}\"\n");
        parse(&pool).map(|config| config.pools[0].event_ports.listen.as_ref().map(ToString::to_string))
    };
    assert_eq!(listen("tcp://*:5557"), Ok(Some("@tcp://*:5557".to_owned())));
    assert_eq!(listen("@tcp://10.0.0.1:5557"), Ok(Some("@tcp://10.0.0.1:5557".to_owned())));
    assert!(listen("5557").expect_err("no endpoint").contains(":4: events.listen: "));
}

#[test]
fn a_file_of_replicas_has_the_keys_of_the_configuration() {
    let replicas = parse_replica_file(
        r#"{"replicas": [{"server": "s1", "http": "https://10.0.0.1:8000"},
            {"server": "s2", "events": "tcp://h:5557", "replay": "tcp://h:6557", "ranks": 2}]}"#,
    )
    .expect("valid");
    assert_eq!((replicas[0].http.as_ref().map(|http| http.tls), replicas[0].ranks.len()), (Some(true), 0));
    assert_eq!(replicas[1].ranks[1].replay.as_ref().map(Endpoint::address), Some("tcp://h:6558"));
    for (text, why) in [
        ("{", "EOF"),
        (r#"{"replicas": [{"server": "s", "http": "nowhere"}]}"#, "host:port"),
        (r#"{"replicas": [{"server": "s", "event": "x"}]}"#, "unknown field"),
        (r#"{"replicas": [{"server": "s"}, {"server": "s"}]}"#, "named twice"),
        (r#"{"replicas": [{"server": "s", "replay": "tcp://h:1"}]}"#, "server s: replay: "),
    ] {
        let error = parse_replica_file(text).expect_err(text);
        assert!(error.contains(why), "{text} gave {error}");
    }
}

#[test]
fn a_mistake_names_file_line_and_key_in_one_line() {
    let cases = [
        ("[[pool]]\nbackend = \"b\"\nmodel-dir = \"m\"\n", ":3: model-dir: ", "unknown field"),
        ("[spop]\ndeadline = \"fast\"\n", ":2: deadline: ", "not a time"),
        ("[spop]\nmax_in_flight = 0\n", ":2: max_in_flight: ", "from 1 to 1000000"),
        ("[spop]\ndeadline = 400\n", ":2: deadline: ", "as in \"400ms\""),
        ("[spop]\ndeadline = \"0ms\"\n", ":2: deadline: ", "from 1ms to 60s"),
        ("[spop]\ndeadline = \"500000000000h\"\n", ":2: deadline: ", "from 1ms to 60s"),
        ("[spop]\ndeadline = \"5124095576030431h\"\n", ":2: deadline: ", "not a time"),
        ("[spop]\nmax_frame_bytes = 100\n", ":2: max_frame_bytes: ", "from 256 to"),
        ("[spop]\nmax_bytes_in_flight = \"0\"\n", ":2: max_bytes_in_flight: ", "at least 1048576"),
        ("[prompt]\nthreads = 9223372036854775807\n", ":2: threads: ", "from 1 to 1024"),
        ("[index]\nmax_bytes = -1\n", ":2: max_bytes: ", "negative"),
        ("[select]\nlease = \"9000h\"\n", ":2: lease: ", "from 1s to"),
        ("[[pool]]\nbackend = \"a b\"\n", ":2: backend: ", "no name in HAProxy"),
        ("[[pool]]\nbackend = \"\"\n", ":2: backend: ", "no name in HAProxy"),
        ("[index]\nmax_bytes = \"1 parsec\"\n", ":2: max_bytes: ", "not a size"),
        ("admin.listen = \"nowhere\"\n", ":1: admin.listen: ", "host:port"),
        ("[select]\npolicy = \"best\"\n", ":2: policy: ", "unknown variant"),
        ("spop.listen = \n", ":1: spop.listen: ", ""),
        ("[[pool]]\nbackend = \"b\"\n[[pool]]\nbackend = \"b\"\n", ":4: backend: ", "named twice"),
        (
            "[[pool]]\nbackend = \"b\"\n[[pool.replica]]\nserver = \"s\"\nevents = \"5557\"\n",
            ":5: events: ",
            "tcp://",
        ),
        (
            "[[pool]]\nbackend = \"b\"\n[[pool.replica]]\nserver = \"s\"\nevents = \"tcp://*:5557\"\n",
            ":5: events: ",
            "wildcard",
        ),
        (
            "[[pool]]\nbackend = \"b\"\n[[pool.replica]]\nserver = \"s\"\nreplay = \"tcp://h:1\"\n",
            ":5: replay: ",
            "needs `events`",
        ),
        ("[haproxy]\nsocket = \"nowhere\"\n", ":2: socket: ", "not a socket"),
        ("[[pool]]\nbackend = \"b\"\n", ":2: backend: ", "no replicas"),
        (
            "[[pool]]\nbackend = \"b\"\n[pool.http]\ncert_file = \"c\"\n[[pool.replica]]\nserver = \"s\"\n",
            ":4: http: ",
            "`key_file` is missing",
        ),
        (
            "[[pool]]\nbackend = \"b\"\nreplicas_file = \"r\"\n[[pool.replica]]\nserver = \"s\"\n",
            ":2: replicas_file: ",
            "lists its replicas itself",
        ),
        (
            "[[pool]]\nbackend = \"b\"\n[[pool.replica]]\nserver = \"s\"\n[[pool.override]]\nserver = \"s\"\n",
            ":2: override: ",
            "lists its replicas itself",
        ),
        (
            "[[pool]]\nbackend = \"b\"\n[[pool.replica]]\nserver = \"s\"\nranks = 3\nevents = [\"tcp://a:1\", \"tcp://b:1\"]\n",
            ":6: events: ",
            "rank 2 has no endpoint",
        ),
        ("[spop]\n", ":1: pool: ", "no [[pool]]"),
    ];
    for (text, place, why) in cases {
        let error = parse(text).expect_err(text);
        assert!(error.starts_with("/etc/kvspoa/kvspoa.toml:"), "{error}");
        assert!(error.contains(place), "{text:?} gave {error}");
        assert!(error.contains(why), "{text:?} gave {error}");
        assert!(!error.contains('\n'), "{error}");
    }
}

#[test]
fn the_ranks_of_a_pool_are_bounded() {
    let replica = |n: usize| format!("[[pool.replica]]\nserver = \"s{n}\"\nranks = 1024\n");
    let text =
        |count: usize| format!("[[pool]]\nbackend = \"b\"\n{}", (0..count).map(replica).collect::<String>());
    assert_eq!(parse(&text(4)).expect("valid").pools[0].replicas.len(), 4);
    let error = parse(&text(5)).expect_err("too many");
    assert!(error.contains(":16: server: ") && error.contains("4096 ranks"), "{error}");
}

#[test]
fn the_agent_answers_before_haproxy_gives_up() {
    let config = parse(MINIMAL).expect("valid");
    assert!(
        config.spop.deadline < std::time::Duration::from_millis(500),
        "snippet: timeout processing 500ms"
    );
    assert!(crate::haproxy_config::Form::Spoe.source().contains("timeout processing 500ms"));
}

#[test]
fn an_address_with_a_password_is_refused_and_not_said_again() {
    for text in ["user:s3cret@h:80", "http://user:s3cret@h:80", "https://user:s3cret@h:80/"] {
        let refused = text.parse::<HttpAddr>().expect_err("refused");
        assert_eq!(refused, "an address has no user and no password: use host:port");
    }
    for text in ["foo bar:1", "h\u{1b}[2J:1", "h/x:1", ":1", "h", "h:65536"] {
        assert!(text.parse::<HostPort>().is_err(), "{text:?}");
    }
}

#[test]
fn the_runtime_socket_is_a_path_or_an_address() {
    assert_eq!(parse(MINIMAL).expect("valid").haproxy.socket, None);
    let read = |text: &str| {
        let config = parse(&format!("haproxy.socket = \"{text}\"\n{MINIMAL}")).expect("valid");
        config.haproxy.socket.map(|socket| socket.to_string())
    };
    assert_eq!(read("/run/h.sock").as_deref(), Some("/run/h.sock"));
    assert_eq!(read("unix:h.sock").as_deref(), Some("h.sock"));
    assert_eq!(read("localhost:9999").as_deref(), Some("localhost:9999"));
}

#[test]
fn the_examples_of_the_readme_are_valid() {
    let readme = include_str!("../../README.md");
    let examples: Vec<&str> =
        readme.split("```toml").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert!(!examples.is_empty());
    for example in examples {
        let socket = if example.contains("haproxy.socket") { "" } else { "haproxy.socket = \"/h\"\n" };
        let pool = if example.contains("[[pool]]") { "" } else { "[[pool]]\nbackend = \"b\"\n" };
        parse(&format!("{socket}{example}\n{pool}")).expect(example);
    }
}

#[test]
fn what_the_engines_were_told_of_prompts_has_vllms_names() {
    let pool = |prompt: &str| {
        let text = MINIMAL.replace("[[pool.replica]]", &format!("{prompt}\n[[pool.replica]]"));
        parse(&text).map(|mut config| config.pools.remove(0).rendering)
    };
    assert_eq!(pool(""), Ok(Rendering::default()));
    let all = pool(
        r#"[pool.prompt]
        chat_template = "new.jinja"
        chat_template_content_format = "openai"
        default_chat_template_kwargs = { enable_thinking = false, n = [1, 2.5] }
        exclude_tools_when_tool_choice_none = true
        enable_auto_tool_choice = false
        skip_model_name_validation = true
        system_start_date = "2026-03-05"
        utc_offset = "+01:00""#,
    )
    .expect("valid");
    assert_eq!(all.chat_template.as_deref(), Some(Path::new("/etc/kvspoa/new.jinja")));
    assert_eq!(all.chat_template_content_format, ContentFormat::Openai);
    let arguments = serde_json::Value::Object(all.default_chat_template_kwargs);
    assert_eq!(arguments.to_string(), r#"{"enable_thinking":false,"n":[1,2.5]}"#);
    assert!(all.exclude_tools_when_tool_choice_none);
    assert!(!all.enable_auto_tool_choice && all.skip_model_name_validation);
    assert_eq!(all.system_start_date.as_deref(), Some("2026-03-05"));
    assert_eq!(all.utc_offset.seconds, 3600);
    let error = pool("[pool.prompt]\nutc_offset = \"CET\"").expect_err("no offset");
    assert!(error.contains("kvspoa.toml:9") && error.contains("+02:00"), "{error}");
    assert!(pool("[pool.prompt]\nchat_templat = \"x\"").expect_err("a slip").contains("chat_templat"));
}

#[test]
fn a_revision_has_what_it_names_and_else_what_the_pool_has() {
    let revisions = r#"
[[pool.revision]]
name = "template"
[pool.revision.prompt]
chat_template = "new.jinja"
[[pool.revision]]
name = "files"
model_dir = "other"
"#;
    let text = MINIMAL.replace(
        "[[pool.replica]]",
        "prompt.utc_offset = \"+01:00\"\n[[pool.replica]]\nrevision = \"files\"",
    );
    let pool = parse(&format!("{text}{revisions}")).expect("valid").pools.remove(0);
    let [template, files] = &pool.revisions[..] else { panic!("two revisions") };
    assert_eq!(
        (&template.model_dir, &template.rendering),
        (
            &pool.model_dir,
            &Rendering { chat_template: Some("/etc/kvspoa/new.jinja".into()), ..Rendering::default() }
        )
    );
    assert_eq!(files.model_dir.as_deref(), Some(Path::new("/etc/kvspoa/other")));
    assert_eq!(files.rendering, pool.rendering);
    assert_eq!(files.rendering.utc_offset.seconds, 3600);
    assert_eq!(pool.replicas[0].revision.as_deref(), Some("files"));
}

#[test]
fn a_revision_that_is_not_there_or_named_twice_is_told_with_its_line() {
    let text = MINIMAL.replace("http =", "revision = \"new\"\nhttp =");
    let error = parse(&text).expect_err("no such revision");
    assert!(
        error.contains("kvspoa.toml:10") && error.contains("revision") && error.contains("new"),
        "{error}"
    );
    let twice = format!("{MINIMAL}[[pool.revision]]\nname = \"a\"\n[[pool.revision]]\nname = \"a\"\n");
    let error = parse(&twice).expect_err("named twice");
    assert!(error.contains("kvspoa.toml:16"), "{error}");
}

#[test]
fn the_bound_of_the_prompt_caches_is_each_pools() {
    assert_eq!(parse(MINIMAL).expect("valid").pools[0].cache_bytes, 256 << 20);
    let text = format!("prompt.cache_bytes = \"1MiB\"\n{MINIMAL}");
    assert_eq!(parse(&text).expect("valid").pools[0].cache_bytes, 1 << 20);
}

#[test]
fn what_a_value_is_shown_as_reads_as_the_same_value() {
    use super::values::{ByteSize, Time};
    for millis in [1, 999, 1000, 1500, 60_000, 61_000, 3_600_000, 5_400_000, 86_400_000] {
        let time: Time<0, { u64::MAX }> = Time(std::time::Duration::from_millis(millis));
        assert_eq!(time.to_string().parse(), Ok(time), "{time}");
    }
    for bytes in [0, 1, 1023, 1024, 1536, 1 << 20, 3 << 20, 1 << 30, (1 << 30) + 1] {
        let size: ByteSize<0, { usize::MAX }> = ByteSize(bytes);
        assert_eq!(size.to_string().parse(), Ok(size), "{size}");
    }
    for offset in ["+02:00", "-09:30", "+00:00"] {
        let parsed = UtcOffset::try_from(offset.to_owned()).expect("a distance");
        assert_eq!(String::from(parsed), offset);
    }
}
