//! The files of `haproxy/` and what `kvspoa haproxy-config` makes of them: accepted by every HAProxy of this machine, and
//! without effect on a site that they are pasted into.

mod support;

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Output;

use kvspoa::haproxy_config::{Form, HaproxyCfg, Names};
use support::agent::StubAgent;
use support::haproxy::{Binary, HaproxyProcess, RUNTIME_SOCKET, for_each_binary};
use support::http::{self, Connection, Message};
use support::log_sink::LogSink;
use support::origin::Origin;
use support::site::{Forms, Site, World, assert_clean, write};
use support::{eventually, free_port, nobody};

fn repository(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path))
        .expect("a file of the repository")
}

/// The lines without comments and indentation.
fn directives(text: &str) -> Vec<&str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).collect()
}

#[test]
fn the_example_is_made_of_the_forms() {
    let example = repository("haproxy/example.cfg");
    let example = directives(&example);
    for form in [Form::Agent, Form::Frontend, Form::Backend] {
        let lines = directives(form.source());
        assert!(
            example.windows(lines.len()).any(|window| window == lines),
            "{form:?} differs in the example"
        );
    }
}

#[test]
fn no_form_uses_spop_check() {
    for form in Form::ALL {
        assert!(!directives(form.source()).iter().any(|line| line.contains("spop-check")), "{form:?}");
    }
}

/// The example with the paths and ports of a test.
fn example(
    directory: &Path,
    agent: &StubAgent,
    log: &LogSink,
    replicas: [&Origin; 2],
) -> (PathBuf, SocketAddr) {
    Forms::new(directory, agent.address, log.address, &[]);
    let port = free_port();
    let mut text = repository("haproxy/example.cfg");
    let defaults = Names::default();
    for (from, to) in [
        (defaults.agent.as_str(), agent.address.to_string()),
        (defaults.log_to.as_str(), log.address.to_string()),
        ("/etc/haproxy", directory.display().to_string()),
        ("    chroot /var/lib/haproxy\n    user haproxy\n    group haproxy\n", String::new()),
        (
            "stats socket /run/haproxy/kvspoa.sock",
            format!("stats socket {}", directory.join("kv.sock").display()),
        ),
        ("bind :8000", format!("bind 127.0.0.1:{port}")),
        ("127.0.0.1:8001", replicas[0].address.to_string()),
        ("127.0.0.1:8002", replicas[1].address.to_string()),
    ] {
        assert!(text.contains(from), "the example has `{from}`");
        text = text.replace(from, &to);
    }
    (write(directory, "example.cfg", &text), ([127, 0, 0, 1], port).into())
}

#[test]
fn the_example_starts_and_routes() {
    for_each_binary(|binary| {
        let directory = tempfile::tempdir().expect("a directory");
        let agent = StubAgent::answering(&[("server", "r2")]);
        let log = LogSink::start();
        let [r1, r2] = [Origin::named("r1"), Origin::named("r2")];
        let (file, address) = example(directory.path(), &agent, &log, [&r1, &r2]);
        assert_clean(binary, &[&file]);
        let haproxy = HaproxyProcess::start(binary, directory.path(), &[&file]);
        haproxy.wait_for_server("kvspoa_agent", "agent", "UP");
        for n in 0..3 {
            let answer = http::post(address, &format!("/v1/completions/{n}"), &[]);
            assert_eq!((answer.status(), answer.text().as_str()), (200, "r2"));
            assert_eq!(log.end(&format!("/v1/completions/{n} ")).served.as_deref(), Some("r2"));
        }
    });
}

/// Uses a site in all its ways, one request after the other on one connection, and two over TLS. Tells all that can be
/// seen of it: answers, requests at the servers, log lines, counters, sessions and what the other filter saw.
fn observe(world: &World, site: &Site) -> Vec<String> {
    let mut client = Connection::open(site.http);
    let mut seen = Vec::new();
    let agent = [("user-agent", "tester/1")];
    let requests: Vec<Vec<u8>> = vec![
        http::request("GET", "/static/logo", &agent, b""),
        http::request("POST", "/api/order", &agent, b"{}"),
        http::request("GET", "/api/order", &[("cookie", "SRV=a1")], b""),
        http::request("GET", "/v1/models", &agent, b""),
        http::request("POST", "/v1/completions", &agent, b"{\"prompt\":\"1\"}"),
        http::request("POST", "/v1/completions", &[("x-request-id", "mine")], b"{\"prompt\":\"2\"}"),
        http::request("POST", "/v1/completions", &[("cookie", "LLM=c2; other=1")], b"{\"prompt\":\"3\"}"),
        http::request("PUT", "/v1/files/x", &agent, b""),
        http::request("POST", "/v1/completions", &[("user-agent", "q\"]\\")], &[b'x'; 100_000]),
    ];
    let count = requests.len();
    for (n, request) in requests.iter().enumerate() {
        client.send(request);
        seen.push(format!("answer {}", summary(&client.read().expect("an answer"))));
        eventually("the log line", || (traffic(&world.site_log).len() == n + 1).then_some(()));
    }
    drop(client);
    for n in 0..2 {
        let request = http::request("POST", "/v1/completions", &[("connection", "close")], b"{}");
        let answer = site.send_tls(&request);
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        eventually("the log line", || (traffic(&world.site_log).len() == count + n + 1).then_some(()));
    }
    for origin in [&world.r1, &world.r2, &world.api, &world.static_files] {
        seen.extend(origin.requests().iter().map(|request| format!("request {}", summary(request))));
    }
    seen.extend(traffic(&world.site_log).iter().map(|line| format!("log {}", without_chance(line))));
    seen.push(format!("counters {}", counters(&site.haproxy)));
    seen.extend(world.guard.messages().iter().map(|message| format!("guard {:?}", message.args)));
    for (backend, server) in [("llm", "r1"), ("llm", "r2"), ("api", "api1"), ("static", "static1")] {
        seen.push(format!("sessions {backend}/{server} {}", site.haproxy.stat(backend, server, "stot")));
    }
    seen
}

/// A message with its body's length in place of the body.
fn summary(message: &Message) -> String {
    format!("{} {:?} {} bytes", message.start, message.headers, message.body.len())
}

/// The log lines of requests.
fn traffic(log: &LogSink) -> Vec<String> {
    log.lines()
        .into_iter()
        .filter(|line| line.contains(" www"))
        .filter(|line| line.contains("HTTP/1.1\""))
        .collect()
}

/// The line with client port, process id, dates and milliseconds taken out: every other byte counts.
fn without_chance(line: &str) -> String {
    // RFC 3164 §4.1.2: a date has a width, and one blank more on the first nine days of a month.
    let dated = line.find('>').map_or(0, |end| end + 1) + "Mmm dd hh:mm:ss ".len();
    let words = line.get(dated..).expect("a date").trim_end().split(' ').enumerate();
    let words = words.map(|(place, word)| match place {
        0 => word.split('[').next().unwrap_or_default().to_owned(),
        1 => word.split(':').next().unwrap_or_default().to_owned(),
        2 => "ACCEPTED".to_owned(),
        5 => word.split('/').map(|time| if time == "-1" { "-1/" } else { "ms/" }).collect(),
        _ => word.to_owned(),
    });
    words.collect::<Vec<_>>().join(" ")
}

/// The site's counters, without addresses in memory and times to live.
fn counters(haproxy: &HaproxyProcess) -> String {
    let chance =
        |word: &&str| !word.starts_with("0x") && !word.starts_with("exp=") && !word.starts_with("use=");
    haproxy.command("show table limits").split_whitespace().filter(chance).collect::<Vec<_>>().join(" ")
}

#[track_caller]
fn assert_same(seen: &[String], before: &[String], what: &str) {
    for (seen, before) in seen.iter().zip(before) {
        assert_eq!(seen, before, "{what}");
    }
    assert_eq!(seen.len(), before.len(), "{what}");
}

#[test]
fn a_site_stays_as_it_was_with_the_agent_down_or_without_an_opinion() {
    for_each_binary(|binary| {
        let observed = |agent: Option<SocketAddr>, status: &str| {
            let world = World::new();
            let site = match agent {
                Some(agent) => world.start(binary, agent),
                None => world.start_without_kvspoa(binary),
            };
            site.haproxy.wait_for_server("api", "api1", "UP");
            if agent.is_some() {
                site.wait_for_agent(status);
            }
            observe(&world, &site)
        };
        let before = observed(None, "");
        assert_eq!(before.iter().filter(|line| line.starts_with("log ")).count(), 11);
        assert!(before.iter().any(|line| line.contains("http_req_cnt=11")), "{before:#?}");
        let down = observed(Some(nobody()), "DOWN");
        assert_same(&down, &before, &format!("agent down, HAProxy {}", binary.version));
        let silent = StubAgent::answering(&[]);
        let up = observed(Some(silent.address), "UP");
        assert_same(&up, &before, &format!("no opinion, HAProxy {}", binary.version));
        assert_eq!(silent.messages().len(), 6, "the POSTs of the pool, and no others, were seen");
    });
}

#[test]
fn haproxy_complains_where_the_agent_file_would_change_later_sections() {
    for_each_binary(|binary: &Binary| {
        let directory = tempfile::tempdir().expect("a directory");
        let first = write(
            directory.path(),
            "first.cfg",
            "defaults\n    timeout client 1s\n    timeout server 1s\n    timeout connect 1s\n",
        );
        let agent = write(directory.path(), "agent.cfg", Form::Agent.source());
        let later =
            write(directory.path(), "later.cfg", "frontend f\n    timeout client 1s\n    bind 127.0.0.1:1\n");
        assert_clean(binary, &[&first, &later, &agent]);
        let output = binary.check(&[&first, &agent, &later]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("'kvspoa'") && said.contains("implicitly"), "{said}");
    });
}

#[test]
fn two_pools_share_one_agent_and_one_spoe_file() {
    for_each_binary(|binary| {
        let directory = tempfile::tempdir().expect("a directory");
        let agent = StubAgent::answering(&[("server", "two")]);
        let log = LogSink::start();
        let forms = Forms::new(directory.path(), agent.address, log.address, &[]);
        let [one, two] = [Origin::named("one"), Origin::named("two")];
        let address: SocketAddr = ([127, 0, 0, 1], free_port()).into();
        let pool = |name: &str| {
            let snippet = forms.text(Form::Backend);
            let servers = format!("    server one {}\n    server two {}\n", one.address, two.address);
            format!("backend {name}\n{snippet}{servers}\n")
        };
        let site = format!(
            "defaults\n    mode http\n    option httplog\n    timeout client 9s\n    timeout server 9s\n    timeout connect 9s\n\n\
             frontend www\n    bind {address}\n{}    use_backend llama if {{ path_beg /llama/ }}\n    default_backend qwen\n\n{}{}",
            forms.text(Form::Frontend),
            pool("llama"),
            pool("qwen"),
        );
        let site = write(directory.path(), "haproxy.cfg", &site);
        let agent_file = write(directory.path(), "kvspoa-agent.cfg", &forms.text(Form::Agent));
        assert_clean(binary, &[&site, &agent_file]);
        let haproxy = HaproxyProcess::start(binary, directory.path(), &[&site, &agent_file]);
        haproxy.wait_for_server("kvspoa_agent", "agent", "UP");
        for (path, pool) in [("/llama/v1/completions", "llama"), ("/v1/completions", "qwen")] {
            assert_eq!(http::post(address, path, &[]).text(), "two");
            assert_eq!(log.end(&format!(" {path} ")).pool, pool);
        }
    });
}

#[test]
fn a_site_gets_our_lines_beside_names_of_its_own_that_are_the_same() {
    for_each_binary(|binary| {
        let agent = StubAgent::answering(&[("server", "r2")]);
        let mut world = World::new();
        world.fitted = true;
        world.global = "tune.bufsize 65536\n\ndefaults kvspoa\n    mode http\n    timeout connect 1s\n    timeout server 1s\n\n\
                        backend kvspoa_agent\n    acl kv_skip path_beg /\n    http-request set-var(txn.kv.server) str(r1)";
        let site = world.start(binary, agent.address);
        site.haproxy.wait_for_server("kvspoa_agent2", "agent", "UP");
        for n in 0..3 {
            let (body, end) = site.ask(&world, &format!("/v1/completions/{n}"));
            assert_eq!((body.as_str(), end.served.as_deref()), ("r2", Some("r2")));
            assert_eq!((end.wanted.as_deref(), end.pool.as_str(), end.skip), (Some("r2"), "llm", None));
        }
        assert_eq!(agent.messages().len(), 3);
    });
}

/// `kvspoa haproxy-config all` for one file, with further options; the folder it wrote into is `out` beside it.
fn fit(file: &Path, options: &[&str]) -> Output {
    let directory = file.parent().expect("a directory");
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kvspoa"));
    command
        .args(["haproxy-config", "all", "--backend", "llm", "--haproxy-version", "2.6", "--haproxy-cfg"])
        .arg(file);
    command
        .arg("--out")
        .arg(directory.join("out"))
        .args(["--spoe-file"])
        .arg(directory.join("out/kvspoa.spoe.conf"));
    command.args(options).output().expect("it runs")
}

#[test]
fn what_is_put_in_place_once_is_not_put_in_again() {
    let directory = tempfile::tempdir().expect("a directory");
    let site = write(directory.path(), "haproxy.cfg", SMALL_SITE);
    assert!(fit(&site, &[]).status.success());
    let once = directory.path().join("out/haproxy.cfg");
    let text = std::fs::read_to_string(&once).expect("written");
    for_each_binary(|binary| assert_clean(binary, &[&once]));
    let toml = directory.path().join("out/kvspoa.toml");
    let check = std::process::Command::new(env!("CARGO_BIN_EXE_kvspoa"))
        .args(["check", "--config"])
        .arg(toml)
        .output();
    assert!(check.expect("it runs").status.success(), "the start of kvspoa.toml is one");
    let again = fit(&once, &[]);
    assert!(again.status.success());
    let said = String::from_utf8_lossy(&again.stderr).into_owned();
    assert_eq!(said.matches("has our lines already").count(), 2, "{said}");
    assert_eq!(std::fs::read_to_string(&once).expect("there"), text);
    assert!(!directory.path().join("out/out/haproxy.cfg").exists(), "nothing to change in it");
}

/// A site with one backend, for which no finding is a refusal.
const SMALL_SITE: &str = "global
    stats socket /tmp/kvspoa-test.sock level admin
defaults
    mode http
    option httplog
    timeout client 9s
    timeout server 9s
    timeout connect 9s
cache c
    total-max-size 4
frontend www
    bind 127.0.0.1:1
    default_backend llm
backend llm
    balance leastconn
    server one 127.0.0.1:2
";

#[test]
fn a_copy_is_for_those_who_may_read_the_original_and_nobody_may_change_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let site = write(directory.path(), "haproxy.cfg", SMALL_SITE);
    let set_mode = |path: &Path, mode| {
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).expect("permissions");
    };
    let out = directory.path().join("out");
    let copy = out.join("haproxy.cfg");
    set_mode(&site, 0o440);
    for _ in ["new", "once more"] {
        assert!(fit(&site, &[]).status.success());
        let mode = std::fs::metadata(&copy).expect("written").permissions().mode();
        assert_eq!(mode & 0o777, 0o640, "passwords may be in it");
        set_mode(&copy, 0o644);
    }
    std::fs::remove_file(&copy).expect("removed");
    set_mode(&out, 0o777);
    let output = fit(&site, &[]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(64), "{said}");
    assert!(said.contains("anybody may write there: choose another folder"), "{said}");
    assert!(!copy.exists());
}

#[test]
fn files_in_use_are_not_replaced() {
    let directory = tempfile::tempdir().expect("a directory");
    let site = write(directory.path(), "haproxy.cfg", SMALL_SITE);
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kvspoa"));
    command
        .args(["haproxy-config", "all", "--haproxy-cfg", "haproxy.cfg", "--out", "."])
        .current_dir(directory.path());
    let output = command.output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(64), "{said}");
    assert!(said.contains("choose another folder"), "{said}");
    assert_eq!(std::fs::read_to_string(site).expect("there"), SMALL_SITE);
}

#[test]
fn haproxy_says_the_same_of_what_is_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let cases = [
        ("filter", "    balance", "    compression algo gzip\n    balance", "explicit filter declaration"),
        (
            "default",
            "    option httplog",
            "    option httplog\n    compression algo gzip",
            "explicit filter declaration",
        ),
        ("cache", "    balance", "    http-request cache-use c\n    balance", "explicit filter declaration"),
        ("tcp", "    balance", "    mode tcp\n    balance", "HTTP"),
    ];
    for (name, from, to, complaint) in cases {
        let folder = directory.path().join(name);
        std::fs::create_dir(&folder).expect("made");
        let site = write(&folder, "haproxy.cfg", &SMALL_SITE.replacen(from, to, 1));
        let refused = fit(&site, &[]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(64), "{name}: {said}");
        assert!(
            said.contains(&format!("{}:", site.display())) && said.contains(": refused: "),
            "{name}: {said}"
        );
        assert!(!folder.join("out").exists(), "nothing is written");
        assert!(fit(&site, &["--force"]).status.success());
        for_each_binary(|binary| {
            let output = binary.check(&[&folder.join("out/haproxy.cfg")]);
            let said = [output.stdout, output.stderr].concat();
            let said = String::from_utf8_lossy(&said).into_owned();
            assert!(said.contains(complaint), "{name}, HAProxy {}: {said}", binary.version);
        });
    }
}

#[test]
fn the_checks_of_another_spoe_agent_crash_haproxy_where_that_is_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let with = |name: &str, bufsize: &str| {
        let big = SMALL_SITE.replacen("global\n", &format!("global\n    tune.bufsize {bufsize}\n"), 1);
        let waf = "backend waf\n    mode tcp\n    option spop-check\n    server waf 127.0.0.1:3 check\n";
        write(directory.path(), name, &format!("{big}{waf}"))
    };
    let (small, big) = (with("small.cfg", "4194304"), with("big.cfg", "8454144"));
    assert!(fit(&small, &[]).status.success());
    let refused = fit(&big, &[]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("big.cfg:20: refused: `option spop-check` crashes HAProxy"), "{said}");
    for_each_binary(|binary| {
        assert!(binary.check(&[&small]).status.success(), "HAProxy {}", binary.version);
        assert_eq!(binary.check(&[&big]).status.code(), None, "HAProxy {} ends by a signal", binary.version);
    });
}

#[test]
fn haproxy_splits_lines_into_the_same_words() {
    let lines = [
        r#"a\ b\#c"#,
        r#""a${KV_UNSET}b""#,
        "${KV_SET}",
        r#""${KV_SET}""#,
        r#""${KV_UNSET-dflt x}""#,
        r#""$KV_SET/x""#,
        r#"'a $KV_SET "b" \n'"#,
        r#"a"b c"'d e'f"#,
        "x#comment",
        r#""q\"r\$s\\t\'u""#,
        r"\x41|\q",
        r#""\x41 \q \#""#,
        r#""""#,
    ];
    let env = |name: &str| (name == "KV_SET").then(|| "s v".to_owned());
    let text: String = lines.iter().map(|line| format!("    log-tag {line}\n")).collect();
    let text = format!("global\n{text}");
    let cfg = HaproxyCfg::parse([(Path::new("h"), text.as_str())], &env).expect("well formed");
    let ours: Vec<Vec<String>> = cfg.global().map(|line| line.words[1..].to_vec()).collect();
    let directory = tempfile::tempdir().expect("a directory");
    let notices: String = lines.iter().map(|line| format!(".notice {line}\n")).collect();
    let file = write(directory.path(), "notices.cfg", &notices);
    for_each_binary(|binary| {
        let output = std::process::Command::new(&binary.path)
            .env("KV_SET", "s v")
            .args(["-c", "-f"])
            .arg(&file)
            .output()
            .expect("HAProxy runs");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        for (number, words) in ours.iter().enumerate() {
            let notice = format!("notices.cfg:{}]: '{}'.", number + 1, words.join(" "));
            assert_eq!(words.len(), 1, "{words:?}");
            assert!(said.contains(&notice), "{notice} is not in {said}");
        }
    });
}

#[test]
fn check_learns_from_a_running_haproxy_what_its_buffers_may_cost() {
    for_each_binary(|binary| {
        let directory = tempfile::tempdir().expect("a directory");
        let cfg = write(
            directory.path(),
            "haproxy.cfg",
            &format!(
                "global\n    tune.bufsize 1048576\n    maxconn 1000\ndefaults\n    mode http\n    timeout client 1s\n    \
                 timeout connect 1s\n    timeout server 1s\nfrontend f\n    bind 127.0.0.1:{}\n",
                free_port()
            ),
        );
        let _haproxy = HaproxyProcess::start(binary, directory.path(), &[&cfg]);
        let socket = directory.path().join(RUNTIME_SOCKET);
        let config = format!("haproxy.socket = {socket:?}\n[[pool]]\nbackend = \"be\"\n");
        let config = write(directory.path(), "kvspoa.toml", &config);
        let check = std::process::Command::new(env!("CARGO_BIN_EXE_kvspoa"))
            .args(["check", "--json", "--config"])
            .arg(&config)
            .output()
            .expect("the binary runs");
        let told: serde_json::Value = serde_json::from_slice(&check.stdout).expect("JSON");
        let haproxy = &told["memory"]["haproxy"];
        assert_eq!((&haproxy["bufsize"], &haproxy["maxconn"]), (&1_048_576.into(), &1000.into()), "{told}");
        assert_eq!(haproxy["at_most_bytes"], 3 * 1_048_576 * 1000_u64);
        assert!(haproxy["limit_bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{told}");
    });
}
