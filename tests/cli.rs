//! The `kvspoa` command as a person or a script meets it.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    process::{Command, Output, Stdio},
};

fn kvspoa(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvspoa")).args(args).output().expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn check(config: &str) -> Output {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kvspoa.toml");
    std::fs::write(&path, config).expect("written");
    kvspoa(&["check", "--config", path.to_str().expect("UTF-8")])
}

#[test]
fn check_accepts_a_good_file_and_says_what_it_read() {
    let output =
        check("[[pool]]\nbackend = \"be\"\n[[pool.replica]]\nserver = \"s1\"\nevents = \"tcp://h:1\"\n");
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(
        text(&output.stdout).ends_with("kvspoa.toml: ok, 1 pool(s), 1 replica(s)\n"),
        "{}",
        text(&output.stdout)
    );
}

#[test]
fn check_refuses_a_bad_file_with_64_and_one_line_that_names_file_line_and_key() {
    for (config, place) in [
        ("[[pool]]\nbackend = \"be\"\nmodel = \"m\"\n", "kvspoa.toml:3: model: unknown field"),
        ("[spop]\ndeadline = 400\n", "kvspoa.toml:2: deadline: "),
        (
            "[[pool]]\nbackend = \"be\"\n[[pool.replica]]\nserver = \"s\"\nevents = \"h:1\"\n",
            "kvspoa.toml:5: events: ",
        ),
    ] {
        let output = check(config);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(64), "{said}");
        assert!(said.contains(place), "{said:?} does not name {place:?}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[test]
fn a_model_directory_that_cannot_be_used_is_a_mistake_of_the_configuration() {
    let output = check("[[pool]]\nbackend = \"be\"\nmodel_dir = \"nowhere\"\n");
    assert_eq!(output.status.code(), Some(64));
    let said = text(&output.stderr);
    assert!(said.contains("kvspoa.toml:3: model_dir: cannot read") && said.contains("nowhere"), "{said}");
    assert_eq!(said.matches("No such file").count(), 1, "{said}");
}

#[test]
fn wrong_usage_ends_with_64_and_help_with_0() {
    assert_eq!(kvspoa(&["rune"]).status.code(), Some(64));
    assert_eq!(kvspoa(&["run", "--config", "/nonexistent/kvspoa.toml"]).status.code(), Some(64));
    for command in ["run", "check", "explain", "haproxy-config", "replica", "demo"] {
        let output = kvspoa(&[command, "--help"]);
        assert!(output.status.success());
        assert!(text(&output.stdout).contains("Usage: kvspoa"), "{}", text(&output.stdout));
    }
}

#[test]
fn a_port_that_is_taken_is_named_and_ends_with_70() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = taken.local_addr().expect("an address").to_string();
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kvspoa.toml");
    std::fs::write(&path, "[[pool]]\nbackend = \"be\"\n").expect("written");
    let args = ["run", "--config", path.to_str().expect("UTF-8"), "--spop-listen", &addr];
    let output = kvspoa(&args);
    assert_eq!(output.status.code(), Some(70), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains(&addr), "{}", text(&output.stderr));
}

#[test]
fn haproxy_config_prints_the_lines_for_the_users_own_names() {
    let output = kvspoa(&["haproxy-config", "agent", "--agent", "10.0.0.9:9999"]);
    assert!(output.status.success());
    assert!(text(&output.stdout).contains("server agent 10.0.0.9:9999 "));
}

#[test]
fn no_prompt_is_logged_at_any_level() {
    let free = || TcpListener::bind("127.0.0.1:0").and_then(|s| s.local_addr()).expect("a port").to_string();
    let (spop, admin, log) = (free(), free(), free());
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kvspoa.toml");
    std::fs::write(&path, "[[pool]]\nbackend = \"be\"\n[[pool.replica]]\nserver = \"s1\"\n")
        .expect("written");
    let mut agent = Command::new(env!("CARGO_BIN_EXE_kvspoa"))
        .args([
            "run",
            "--log",
            "trace",
            "--spop-listen",
            &spop,
            "--admin-listen",
            &admin,
            "--log-listen",
            &log,
        ])
        .arg("--config")
        .arg(&path)
        .stderr(Stdio::piped())
        .spawn()
        .expect("the agent starts");
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
    let mut client = loop {
        match TcpStream::connect(&admin) {
            Ok(client) => break client,
            Err(error) => assert!(std::time::Instant::now() < deadline, "{error}"),
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    };
    let body = r#"{"messages":[{"role":"user","content":"Xylophone"}]}"#;
    write!(client, "POST /explain HTTP/1.1\r\nHost: a\r\nContent-Length: {}\r\n\r\n{body}", body.len())
        .expect("sent");
    let mut answer = String::new();
    client.read_to_string(&mut answer).expect("an answer, and the end of the connection");
    assert!(answer.contains("\"state\":\"load_only\"") && answer.contains("\"prompt_tokens\":"), "{answer}");
    agent.kill().expect("a process of ours");
    let output = agent.wait_with_output().expect("it ends");
    let said = text(&output.stderr);
    assert!(said.contains("kvspoa is ready"), "{said}");
    for line in said.lines() {
        // A line of another crate could hold a single character of the prompt.
        assert!(line.contains("kvspoa::") && !line.contains("Xylophone"), "{line}");
    }
}
