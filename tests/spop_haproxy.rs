//! The SPOP server against real HAProxy processes.

mod support;

use bytes::Bytes;
use kvspoa::metrics::SpopMetrics;
use kvspoa::spop::{Actions, Handler, ListenAddr, Scope, Server, ServerConfig, messages};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use std::path::Path;
use std::time::{Duration, Instant};
use support::haproxy::{Binary, HaproxyProcess, for_each_binary};
use support::{eventually, free_port, http};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

/// Tells the number of messages, the length of all arguments called `body`, and whether the body was whole.
struct Measure;

impl Handler for Measure {
    async fn notify(&self, payload: Bytes, _: Instant) -> Actions {
        let (mut body_bytes, mut whole) = (0, None);
        for message in messages(&payload) {
            let message = message.expect("HAProxy's messages decode");
            whole = message.arg("eom").as_bool();
            body_bytes += message
                .args
                .filter(|(name, _)| *name == "body")
                .map(|(_, value)| value.as_bytes().map_or(0, <[u8]>::len))
                .sum::<usize>();
        }
        // Long enough for others to come meanwhile.
        tokio::time::sleep(Duration::from_millis(5)).await;
        let mut actions = Actions::none();
        actions.set_var(Scope::Transaction, "length", body_bytes as u64);
        actions.set_var(Scope::Transaction, "whole", whole.unwrap_or(false));
        actions
    }
}

/// HAProxy before our agent; each request is answered by HAProxy itself with what the agent said.
struct Site {
    haproxy: HaproxyProcess,
    http: std::net::SocketAddr,
    metrics: PrometheusHandle,
    shutdown: CancellationToken,
    _runtime: tokio::runtime::Runtime,
    _dir: TempDir,
}

struct Setup {
    unix: bool,
    bufsize: u32,
    /// The body that often in one message.
    bodies: usize,
    check: &'static str,
    processing: &'static str,
}

impl Default for Setup {
    fn default() -> Self {
        Self { unix: false, bufsize: 16_384, bodies: 1, check: "option spop-check", processing: "20s" }
    }
}

impl Site {
    fn start(binary: &Binary, setup: &Setup) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let addr = if setup.unix {
            ListenAddr::Unix(dir.path().join("spop.sock"))
        } else {
            "127.0.0.1:0".parse().expect("an address")
        };
        let recorder = PrometheusBuilder::new().build_recorder();
        let metrics = recorder.handle();
        let spop = metrics::with_local_recorder(&recorder, SpopMetrics::register);
        // No request of these tests may be late, however busy the machine.
        let config = ServerConfig { deadline: support::PATIENCE, ..ServerConfig::default() };
        let server = Server::bind(&addr, config, spop).expect("a free address");
        let agent = match server.local_addr() {
            ListenAddr::Tcp(addr) => addr.to_string(),
            ListenAddr::Unix(path) => format!("unix@{}", path.display()),
        };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("a runtime");
        let shutdown = CancellationToken::new();
        runtime.spawn(server.serve(Measure, shutdown.clone()));
        let http = ([127, 0, 0, 1], free_port()).into();
        let haproxy = start_haproxy(binary, dir.path(), setup, &agent, http);
        Self { haproxy, http, metrics, shutdown, _runtime: runtime, _dir: dir }
    }

    /// What came of a request with such a body: length, whole, error.
    fn ask(&self, body_bytes: usize) -> String {
        let answer = http::send(self.http, &http::request("POST", "/", &[], &vec![b'x'; body_bytes]));
        assert_eq!(answer.status(), 200, "{answer:?}");
        answer.text()
    }

    fn metric(&self, name: &str) -> f64 {
        let text = self.metrics.render();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no metric {name} in {text}")).parse().expect("a number")
    }
}

fn start_haproxy(
    binary: &Binary,
    dir: &Path,
    setup: &Setup,
    agent: &str,
    http: std::net::SocketAddr,
) -> HaproxyProcess {
    let Setup { bufsize, bodies, check, processing, .. } = setup;
    let spoe = dir.join("kv.spoe");
    let config = format!(
        "global
    tune.bufsize {bufsize}
defaults
    mode http
    timeout client 30s
    timeout server 30s
    timeout connect 5s
frontend site
    bind {http}
    filter spoe engine kv config {spoe}
    http-request wait-for-body time 30s if METH_POST
    http-request send-spoe-group kv route
    http-request return status 200 content-type text/plain lf-string \"length=%[var(txn.kv.length)] whole=%[var(txn.kv.whole)] err=%[var(txn.kv.err)]\"
backend agents
    mode tcp
    {check}
    timeout server 60s
    server agent {agent} check inter 100ms
",
        spoe = spoe.display()
    );
    let args = " body=req.body".repeat(*bodies);
    let spoe_config = format!(
        "[kv]
spoe-agent kv
    groups route
    option var-prefix kv
    option set-on-error err
    option continue-on-error
    timeout hello 10s
    timeout idle 30s
    timeout processing {processing}
    use-backend agents
spoe-message route
    args eom=internal.htx.has_eom{args}
spoe-group route
    messages route
"
    );
    std::fs::write(&spoe, spoe_config).expect("written");
    let file = support::site::write(dir, "haproxy.cfg", &config);
    let haproxy = HaproxyProcess::start(binary, dir, &[&file]);
    haproxy.wait_for_server("agents", "agent", "UP");
    haproxy
}

#[test]
fn requests_are_answered_over_tcp_and_unix_sockets() {
    for_each_binary(|binary| {
        for unix in [false, true] {
            let site = Site::start(binary, &Setup { unix, ..Setup::default() });
            eventually("a health check", || {
                (site.metric("kvspoa_spop_health_checks_total") > 0.0).then_some(())
            });
            for body_bytes in [0, 1, 239, 240, 2_287, 2_288, 14_000] {
                assert_eq!(
                    site.ask(body_bytes),
                    format!("length={body_bytes} whole=1 err="),
                    "{}",
                    binary.version
                );
            }
            assert_eq!(site.metric("kvspoa_spop_protocol_errors_total"), 0.0);
        }
    });
}

#[test]
fn a_burst_of_requests_is_answered_without_an_error() {
    for_each_binary(|binary| {
        let site = Site::start(binary, &Setup::default());
        std::thread::scope(|scope| {
            for client in 0..64 {
                let site = &site;
                scope.spawn(move || {
                    for round in 0..5 {
                        let body_bytes = 1 + client * 100 + round;
                        assert_eq!(site.ask(body_bytes), format!("length={body_bytes} whole=1 err="));
                    }
                });
            }
        });
        assert_eq!(site.metric("kvspoa_spop_notify_total"), 320.0);
        assert_eq!(site.metric("kvspoa_spop_protocol_errors_total"), 0.0);
        eventually("nothing is in flight", || (site.metric("kvspoa_spop_in_flight") == 0.0).then_some(()));
    });
}

#[test]
fn arguments_beyond_one_frame_come_in_fragments_up_to_3_0() {
    for_each_binary(|binary| {
        let site = Site::start(binary, &Setup { bodies: 3, ..Setup::default() });
        let answer = site.ask(14_000);
        if fragments(binary) {
            assert_eq!(answer, "length=42000 whole=1 err=", "{}", binary.version);
        } else {
            assert_eq!(answer, "length= whole= err=3", "{}", binary.version);
        }
        assert_eq!(site.ask(1_000), "length=3000 whole=1 err=");
        assert_eq!(site.metric("kvspoa_spop_protocol_errors_total"), 0.0);
    });
}

#[test]
fn a_body_of_eight_mebibytes_comes_in_one_piece() {
    for_each_binary(|binary| {
        // The SPOP check of HAProxy up to 3.0 does not survive buffers of this size.
        let site = Site::start(binary, &Setup { bufsize: 8_454_144, check: "", ..Setup::default() });
        assert_eq!(site.ask(8 << 20), format!("length={} whole=1 err=", 8 << 20), "{}", binary.version);
        assert_eq!(site.metric("kvspoa_spop_protocol_errors_total"), 0.0);
        eventually("the body is gone", || (site.metric("kvspoa_spop_in_flight_bytes") == 0.0).then_some(()));
    });
}

#[test]
fn an_agent_that_ends_costs_no_request() {
    for_each_binary(|binary| {
        let site = Site::start(binary, &Setup { processing: "500ms", ..Setup::default() });
        assert_eq!(site.ask(10), "length=10 whole=1 err=");
        let clients = std::thread::scope(|scope| {
            let clients: Vec<_> = (0..8).map(|_| scope.spawn(|| site.ask(10))).collect();
            site.shutdown.cancel();
            clients.into_iter().map(|client| client.join().expect("an answer")).collect::<Vec<_>>()
        });
        for answer in clients {
            // Whole, or without an opinion, or with an error that HAProxy lets pass: never a failure of the request.
            assert!(answer.starts_with("length="), "{answer}");
        }
        site.haproxy.wait_for_server("agents", "agent", "DOWN");
    });
}

/// Whether this HAProxy sends fragments: 3.1 dropped them.
fn fragments(binary: &Binary) -> bool {
    let mut numbers = binary.version.split(['.', '-']).map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) < (3, 1)
}
