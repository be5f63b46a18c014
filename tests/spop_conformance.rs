//! The SPOP server over real sockets, byte by byte, against frames written from SPOE.txt and captured from HAProxy.

use bytes::Bytes;
use kvspoa::metrics::SpopMetrics;
use kvspoa::spop::{Actions, Handler, ListenAddr, Scope, Server, ServerConfig, Value, messages};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use std::future::Future;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// HAPROXY-HELLO of HAProxy 2.6.12 and 2.8.25 with buffers of 16 KiB, as captured.
const HELLO_2_6: &[u8] = b"\x00\x00\x00\x81\x01\x00\x00\x00\x01\x00\x00\
    \x12supported-versions\x08\x032.0\
    \x0emax-frame-size\x03\xfc\xf0\x06\
    \x0ccapabilities\x08\x10pipelining,async\
    \x09engine-id\x08\x24ffaddec6-64f7-43e7-a51e-e6e149ff75da";
/// What HAProxy 3.x sends: no `async`.
const HELLO_3_2: &[u8] = b"\x00\x00\x00\x4b\x01\x00\x00\x00\x01\x00\x00\
    \x12supported-versions\x08\x032.0\
    \x0emax-frame-size\x03\xfc\xf0\x06\
    \x0ccapabilities\x08\x0apipelining";
/// The same of their `option spop-check`: nothing offered.
const HELLO_CHECK: &[u8] = b"\x00\x00\x00\x4e\x01\x00\x00\x00\x01\x00\x00\
    \x12supported-versions\x08\x032.0\
    \x0emax-frame-size\x03\xfc\xf0\x06\
    \x0ccapabilities\x08\x00\
    \x0bhealthcheck\x11";
const AGENT_HELLO: &[u8] = b"\x00\x00\x00\x4e\x65\x00\x00\x00\x01\x00\x00\
    \x07version\x08\x032.0\
    \x0emax-frame-size\x03\xfc\xf0\x06\
    \x0ccapabilities\x08\x18pipelining,fragmentation";
const AGENT_HELLO_CHECK: &[u8] = b"\x00\x00\x00\x43\x65\x00\x00\x00\x01\x00\x00\
    \x07version\x08\x032.0\
    \x0emax-frame-size\x03\xfc\xf0\x06\
    \x0ccapabilities\x08\x0dfragmentation";
/// NOTIFY, FIN, stream 5, frame 1: message `echo` with argument `say` = "hi".
const NOTIFY_ECHO: &[u8] = b"\x00\x00\x00\x15\x03\x00\x00\x00\x01\x05\x01\
    \x04echo\x01\x03say\x08\x02hi";
/// ACK, FIN, stream 5, frame 1: set-var `txn.said` = "hi".
const ACK_ECHO: &[u8] = b"\x00\x00\x00\x13\x67\x00\x00\x00\x01\x05\x01\
    \x01\x03\x02\x04said\x08\x02hi";
const HAPROXY_DISCONNECT: &[u8] = b"\x00\x00\x00\x25\x02\x00\x00\x00\x01\x00\x00\
    \x0bstatus-code\x03\x00\x07message\x08\x06normal";
const AGENT_DISCONNECT_NORMAL: &[u8] = b"\x00\x00\x00\x25\x66\x00\x00\x00\x01\x00\x00\
    \x0bstatus-code\x03\x00\x07message\x08\x06normal";

#[derive(Clone, Copy, Debug)]
enum Transport {
    Tcp,
    Unix,
}

const BOTH: [Transport; 2] = [Transport::Tcp, Transport::Unix];

/// Does what the first message's name says.
struct Script {
    /// Lets one `hold` go on for each permit.
    gate: Arc<Semaphore>,
    /// Lets one `block`, which holds its thread, go on for each message.
    unblock: Mutex<std::sync::mpsc::Receiver<()>>,
    /// Hears of each `hold` that ends, by an answer or not.
    ended: mpsc::UnboundedSender<()>,
}

struct OnDrop(mpsc::UnboundedSender<()>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}

impl Handler for Script {
    fn notify(&self, payload: Bytes, _received: Instant) -> impl Future<Output = Actions> + Send {
        let (gate, ended, unblock) = (Arc::clone(&self.gate), OnDrop(self.ended.clone()), &self.unblock);
        async move {
            let mut actions = Actions::none();
            let Some(Ok(message)) = messages(&payload).next() else { return actions };
            match message.name {
                "echo" => actions.set_var(Scope::Transaction, "said", message.arg("say")),
                "length" => {
                    let body = message.arg("body").as_bytes().map_or(0, <[u8]>::len);
                    actions.set_var(Scope::Transaction, "length", body as u64);
                }
                "hold" => {
                    let _ended = ended;
                    gate.acquire().await.expect("an open gate").forget();
                    actions.set_var(Scope::Transaction, "held", true);
                }
                "block" => {
                    unblock.lock().expect("a lock").recv().expect("the test lives");
                    actions.set_var(Scope::Transaction, "late", true);
                }
                "big" => {
                    actions.set_var(Scope::Transaction, "first", true);
                    actions.set_var(Scope::Transaction, "big", "x".repeat(20_000).as_str());
                }
                "panic" => panic!("as asked"),
                _ => {}
            }
            actions
        }
    }
}

struct Agent {
    addr: ListenAddr,
    gate: Arc<Semaphore>,
    unblock: std::sync::mpsc::Sender<()>,
    ended: mpsc::UnboundedReceiver<()>,
    shutdown: CancellationToken,
    server: JoinHandle<io::Result<()>>,
    metrics: PrometheusHandle,
    _dir: TempDir,
}

impl Agent {
    fn start(transport: Transport) -> Self {
        Self::start_with(
            transport,
            ServerConfig { deadline: Duration::from_secs(60), ..ServerConfig::default() },
        )
    }

    fn start_with(transport: Transport, config: ServerConfig) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let addr = match transport {
            Transport::Tcp => "127.0.0.1:0".parse().expect("an address"),
            Transport::Unix => ListenAddr::Unix(dir.path().join("spop.sock")),
        };
        let recorder = PrometheusBuilder::new().build_recorder();
        let metrics = recorder.handle();
        let spop_metrics = metrics::with_local_recorder(&recorder, SpopMetrics::register);
        let server = Server::bind(&addr, config, spop_metrics).expect("a free address");
        let addr = server.local_addr().clone();
        let gate = Arc::new(Semaphore::new(0));
        let (sender, ended) = mpsc::unbounded_channel();
        let shutdown = CancellationToken::new();
        let (unblock, blocked) = std::sync::mpsc::channel();
        let script = Script { gate: Arc::clone(&gate), unblock: Mutex::new(blocked), ended: sender };
        let server = tokio::spawn(server.serve(script, shutdown.clone()));
        Self { addr, gate, unblock, ended, shutdown, server, metrics, _dir: dir }
    }

    async fn connect(&self) -> Peer {
        match &self.addr {
            ListenAddr::Tcp(addr) => {
                let stream = TcpStream::connect(addr).await.expect("a connection");
                stream.set_nodelay(true).expect("a socket");
                Peer { stream: Box::new(stream) }
            }
            ListenAddr::Unix(path) => {
                Peer { stream: Box::new(UnixStream::connect(path).await.expect("a connection")) }
            }
        }
    }

    /// A connection after the handshake.
    async fn running(&self) -> Peer {
        let mut peer = self.connect().await;
        peer.send(HELLO_2_6).await;
        peer.expect(AGENT_HELLO).await;
        peer
    }

    async fn hold_ended(&mut self) {
        within(self.ended.recv()).await.expect("the handler lives");
    }

    /// The value of a metric, by its name and labels.
    fn metric(&self, name: &str) -> f64 {
        let text = self.metrics.render();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no metric {name} in {text}")).parse().expect("a number")
    }

    async fn metric_becomes(&self, name: &str, value: f64) {
        within(async {
            while self.metric(name) != value {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }
}

trait Socket: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Socket for T {}

struct Peer {
    stream: Box<dyn Socket>,
}

impl Peer {
    async fn send(&mut self, bytes: &[u8]) {
        within(self.stream.write_all(bytes)).await.expect("the agent reads");
    }

    async fn expect(&mut self, bytes: &[u8]) {
        let mut read = vec![0; bytes.len()];
        within(self.stream.read_exact(&mut read)).await.expect("the agent answers");
        assert_eq!(read, bytes, "{}", read.escape_ascii());
    }

    /// Expects that nothing more comes.
    async fn expect_end(&mut self) {
        let mut rest = Vec::new();
        within(self.stream.read_to_end(&mut rest)).await.expect("an end in good order");
        assert_eq!(rest, b"", "{}", rest.escape_ascii());
    }
}

/// So that a failure is not a test that hangs.
async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(20), future).await.expect("in time")
}

/// A frame for small ids.
fn frame(code: u8, flags: u8, stream_id: u8, frame_id: u8, payload: &[u8]) -> Vec<u8> {
    let mut out = u32::try_from(7 + payload.len()).expect("a short frame").to_be_bytes().to_vec();
    out.extend([code, 0, 0, 0, flags, stream_id, frame_id]);
    out.extend_from_slice(payload);
    out
}

fn notify(stream_id: u8, name: &str) -> Vec<u8> {
    let length = u8::try_from(name.len()).expect("a short name");
    frame(3, 1, stream_id, 1, &[&[length], name.as_bytes(), &[0]].concat())
}

fn empty_ack(stream_id: u8) -> Vec<u8> {
    frame(103, 1, stream_id, 1, b"")
}

fn ack_true(stream_id: u8, name: &str) -> Vec<u8> {
    let length = u8::try_from(name.len()).expect("a short name");
    frame(103, 1, stream_id, 1, &[&[1, 3, 2, length], name.as_bytes(), &[0x11]].concat())
}

fn disconnect(status: u8, message: &str) -> Vec<u8> {
    let length = u8::try_from(message.len()).expect("a short message");
    let payload = [b"\x0bstatus-code\x03", &[status][..], b"\x07message\x08", &[length], message.as_bytes()];
    frame(102, 1, 0, 0, &payload.concat())
}

fn hello(items: &[&[u8]]) -> Vec<u8> {
    frame(1, 1, 0, 0, &items.concat())
}

const VERSIONS: &[u8] = b"\x12supported-versions\x08\x032.0";
const SIZE: &[u8] = b"\x0emax-frame-size\x03\xfc\xf0\x06";
const CAPABILITIES: &[u8] = b"\x0ccapabilities\x08\x0apipelining";

#[tokio::test]
async fn a_session_from_hello_to_disconnect() {
    for transport in BOTH {
        for haproxy_hello in [HELLO_2_6, HELLO_3_2] {
            let agent = Agent::start(transport);
            let mut peer = agent.connect().await;
            peer.send(haproxy_hello).await;
            peer.expect(AGENT_HELLO).await;
            peer.send(NOTIFY_ECHO).await;
            peer.expect(ACK_ECHO).await;
            peer.send(HAPROXY_DISCONNECT).await;
            peer.expect(AGENT_DISCONNECT_NORMAL).await;
            peer.expect_end().await;
            assert_eq!(agent.metric("kvspoa_spop_notify_total"), 1.0);
            assert_eq!(agent.metric("kvspoa_spop_protocol_errors_total"), 0.0);
            drop(peer);
            agent.metric_becomes("kvspoa_spop_connections", 0.0).await;
        }
    }
}

#[tokio::test]
async fn agent_hello_comes_in_one_piece() {
    let agent = Agent::start(Transport::Tcp);
    let mut peer = agent.connect().await;
    peer.send(HELLO_3_2).await;
    let mut buffer = [0; 1024];
    let read = within(peer.stream.read(&mut buffer)).await.expect("an answer");
    assert_eq!(&buffer[..read], AGENT_HELLO);
}

#[tokio::test]
async fn a_health_check_is_answered_and_closed() {
    for transport in BOTH {
        let agent = Agent::start(transport);
        let mut peer = agent.connect().await;
        peer.send(HELLO_CHECK).await;
        peer.expect(AGENT_HELLO_CHECK).await;
        peer.expect_end().await;
        assert_eq!(agent.metric("kvspoa_spop_health_checks_total"), 1.0);
    }
}

#[tokio::test]
async fn bytes_that_come_one_by_one_are_understood() {
    for transport in BOTH {
        let agent = Agent::start(transport);
        let mut peer = agent.connect().await;
        for byte in [HELLO_2_6, NOTIFY_ECHO, HAPROXY_DISCONNECT].concat() {
            peer.send(&[byte]).await;
            tokio::task::yield_now().await;
        }
        peer.expect(AGENT_HELLO).await;
        // Cancelled by the DISCONNECT or answered before it: both are right.
        let mut rest = Vec::new();
        within(peer.stream.read_to_end(&mut rest)).await.expect("an end in good order");
        let rest = rest.strip_prefix(ACK_ECHO).unwrap_or(&rest);
        assert_eq!(rest, AGENT_DISCONNECT_NORMAL);
    }
}

#[tokio::test]
async fn pipelined_requests_are_answered_as_they_are_done() {
    for transport in BOTH {
        let agent = Agent::start(transport);
        let mut peer = agent.running().await;
        peer.send(&[notify(1, "hold"), notify(2, "hold"), NOTIFY_ECHO.to_vec()].concat()).await;
        peer.expect(ACK_ECHO).await;
        agent.gate.add_permits(1);
        peer.expect(&ack_true(1, "held")).await;
        agent.gate.add_permits(1);
        peer.expect(&ack_true(2, "held")).await;
    }
}

#[tokio::test]
async fn fragments_are_put_together() {
    for transport in BOTH {
        let agent = Agent::start(transport);
        let mut peer = agent.running().await;
        // The body's length is 30,000, as a variable-length integer; it is spread over three frames.
        let payload = [b"\x06length\x01\x04body\x09\xf0\xc4\x0d", &[b'x'; 30_000][..]].concat();
        let (first, rest) = payload.split_at(16_373);
        let (second, third) = rest.split_at(10_000);
        let frames = [frame(3, 0, 9, 1, first), frame(0, 0, 9, 1, second), frame(0, 1, 9, 1, third)];
        peer.send(&frames.concat()).await;
        peer.expect(&frame(103, 1, 9, 1, b"\x01\x03\x02\x06length\x05\xf0\xc4\x0d")).await;
    }
}

#[tokio::test]
async fn an_aborted_request_is_not_answered() {
    for transport in BOTH {
        let agent = Agent::start(transport);
        let mut peer = agent.running().await;
        peer.send(&[frame(3, 0, 9, 1, b"\x04ec"), frame(0, 3, 9, 1, b""), NOTIFY_ECHO.to_vec()].concat())
            .await;
        peer.expect(ACK_ECHO).await;
        assert_eq!(agent.metric("kvspoa_spop_aborted_total"), 1.0);
        peer.send(HAPROXY_DISCONNECT).await;
        peer.expect(AGENT_DISCONNECT_NORMAL).await;
        peer.expect_end().await;
    }
}

#[tokio::test]
async fn unknown_frames_are_skipped() {
    let agent = Agent::start(Transport::Tcp);
    let mut peer = agent.running().await;
    peer.send(&[frame(50, 1, 0, 0, &[0xFF; 5000]), NOTIFY_ECHO.to_vec()].concat()).await;
    peer.expect(ACK_ECHO).await;
}

#[tokio::test]
async fn each_error_is_told_by_its_status() {
    let running = |frames: &[Vec<u8>]| (true, frames.concat());
    let fresh = |bytes: &[u8]| (false, bytes.to_vec());
    let no_two: &[u8] = b"\x12supported-versions\x08\x031.0";
    let tiny: &[u8] = b"\x0emax-frame-size\x03\xef";
    let cases = [
        (running(&[(16_381u32).to_be_bytes().to_vec()]), 3, "frame is too big"),
        (fresh(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"), 3, "frame is too big"),
        (running(&[vec![0, 0, 0, 0]]), 4, "invalid frame received"),
        (running(&[vec![0, 0, 0, 7, 3, 0, 0, 0, 1, 0xFF, 0xFF]]), 4, "invalid frame received"),
        (running(&[frame(101, 1, 0, 0, b"")]), 4, "invalid frame received"),
        (running(&[frame(2, 1, 0, 0, b"\x0bstatus-code\x0f")]), 4, "invalid frame received"),
        (running(&[HELLO_2_6.to_vec()]), 4, "invalid frame received"),
        (running(&[frame(0, 1, 9, 1, b"")]), 4, "invalid frame received"),
        (fresh(NOTIFY_ECHO), 4, "invalid frame received"),
        (fresh(&hello(&[SIZE, CAPABILITIES])), 5, "version value not found"),
        (fresh(&hello(&[VERSIONS, CAPABILITIES])), 6, "max-frame-size value not found"),
        (fresh(&hello(&[VERSIONS, SIZE])), 7, "capabilities value not found"),
        (fresh(&hello(&[no_two, SIZE, CAPABILITIES])), 8, "unsupported version"),
        (fresh(&hello(&[VERSIONS, tiny, CAPABILITIES])), 9, "max-frame-size too big or too small"),
        (fresh(&frame(1, 0, 0, 0, b"")), 10, "payload fragmentation is not supported"),
        (running(&[frame(3, 0, 9, 1, b""), frame(0, 1, 8, 1, b"")]), 11, "invalid interlaced frames"),
    ];
    for transport in BOTH {
        let agent = Agent::start(transport);
        for ((handshake, bytes), status, message) in &cases {
            let mut peer = if *handshake { agent.running().await } else { agent.connect().await };
            peer.send(bytes).await;
            peer.expect(&disconnect(*status, message)).await;
            peer.expect_end().await;
        }
        assert_eq!(agent.metric("kvspoa_spop_protocol_errors_total"), cases.len() as f64);
    }
}

#[tokio::test]
async fn an_error_is_told_even_while_haproxy_is_still_sending() {
    let agent = Agent::start(Transport::Tcp);
    let mut peer = agent.running().await;
    // Unread input must not turn into a reset that overtakes the DISCONNECT.
    peer.send(&[vec![0, 0, 0, 0], vec![0xAA; 200_000]].concat()).await;
    peer.expect(&disconnect(4, "invalid frame received")).await;
    peer.expect_end().await;
}

#[tokio::test]
async fn a_peer_that_stalls_is_told_so() {
    let config = ServerConfig { stall: Duration::from_millis(500), ..ServerConfig::default() };
    let agent = Agent::start_with(Transport::Tcp, config);
    let timeout = disconnect(2, "a timeout occurred");
    let mut silent = agent.connect().await;
    silent.expect(&timeout).await;
    silent.expect_end().await;
    let mut halfway = agent.running().await;
    halfway.send(&NOTIFY_ECHO[..12]).await;
    halfway.expect(&timeout).await;
    halfway.expect_end().await;
}

#[tokio::test]
async fn haproxys_errors_are_counted_and_its_idle_time_outs_are_not() {
    let agent = Agent::start(Transport::Tcp);
    for (status, errors) in [(2, 0.0), (9, 1.0)] {
        let mut peer = agent.running().await;
        let payload = [b"\x0bstatus-code\x03", &[status][..], b"\x07message\x08\x01x"].concat();
        peer.send(&frame(2, 1, 0, 0, &payload)).await;
        peer.expect(AGENT_DISCONNECT_NORMAL).await;
        peer.expect_end().await;
        assert_eq!(agent.metric("kvspoa_spop_protocol_errors_total"), errors);
    }
}

#[tokio::test]
async fn a_panic_costs_one_answer() {
    let agent = Agent::start(Transport::Tcp);
    let mut peer = agent.running().await;
    peer.send(&notify(1, "panic")).await;
    peer.expect(&empty_ack(1)).await;
    peer.send(NOTIFY_ECHO).await;
    peer.expect(ACK_ECHO).await;
    assert_eq!(agent.metric("kvspoa_spop_panics_total"), 1.0);
}

#[tokio::test]
async fn a_late_answer_is_no_opinion() {
    let config = ServerConfig { deadline: Duration::from_millis(30), ..ServerConfig::default() };
    let mut agent = Agent::start_with(Transport::Tcp, config);
    let mut peer = agent.running().await;
    peer.send(&notify(1, "hold")).await;
    peer.expect(&empty_ack(1)).await;
    agent.hold_ended().await;
    // The connection is as good as before.
    peer.send(NOTIFY_ECHO).await;
    peer.expect(ACK_ECHO).await;
    assert_eq!(agent.metric("kvspoa_spop_late_total"), 1.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_blocks_its_thread_is_late_all_the_same() {
    let config = ServerConfig { deadline: Duration::from_millis(20), ..ServerConfig::default() };
    let agent = Agent::start_with(Transport::Unix, config);
    let mut peer = agent.running().await;
    peer.send(&notify(1, "block")).await;
    peer.expect(&empty_ack(1)).await;
    // Its answer comes after all, and is dropped: the next thing heard is the farewell.
    agent.unblock.send(()).expect("the handler waits");
    agent.metric_becomes("kvspoa_spop_in_flight", 0.0).await;
    peer.send(HAPROXY_DISCONNECT).await;
    peer.expect(AGENT_DISCONNECT_NORMAL).await;
    peer.expect_end().await;
}

#[tokio::test]
async fn what_exceeds_a_limit_is_answered_without_an_opinion() {
    let config = ServerConfig { max_in_flight: 1, max_payload_bytes: 100, ..ServerConfig::default() };
    let config = ServerConfig { deadline: Duration::from_secs(60), ..config };
    let agent = Agent::start_with(Transport::Tcp, config);
    let (mut one, mut other) = (agent.running().await, agent.running().await);
    one.send(&notify(1, "hold")).await;
    agent.metric_becomes("kvspoa_spop_in_flight", 1.0).await;
    // The limit holds for all connections together.
    other.send(&notify(2, "echo")).await;
    other.expect(&empty_ack(2)).await;
    assert_eq!(agent.metric("kvspoa_spop_shed_total{reason=\"requests\"}"), 1.0);
    agent.gate.add_permits(1);
    one.expect(&ack_true(1, "held")).await;
    agent.metric_becomes("kvspoa_spop_in_flight", 0.0).await;
    other.send(&frame(3, 1, 3, 1, &[0; 101])).await;
    other.expect(&empty_ack(3)).await;
    assert_eq!(agent.metric("kvspoa_spop_shed_total{reason=\"payload\"}"), 1.0);
    other.send(NOTIFY_ECHO).await;
    other.expect(ACK_ECHO).await;
}

#[tokio::test]
async fn bodies_in_flight_are_limited_over_all_connections() {
    let config = ServerConfig {
        max_in_flight_bytes: 1000,
        deadline: Duration::from_secs(60),
        ..ServerConfig::default()
    };
    let agent = Agent::start_with(Transport::Tcp, config);
    let (mut one, mut other) = (agent.running().await, agent.running().await);
    // Fragments count while they wait for their last one.
    one.send(&frame(3, 0, 1, 1, &[b"\x06length\x01\x04body\x09\xfc\x1d", &[0; 600][..]].concat())).await;
    agent.metric_becomes("kvspoa_spop_in_flight_bytes", 616.0).await;
    other.send(&frame(3, 1, 2, 1, &[0; 386])).await;
    other.expect(&empty_ack(2)).await;
    assert_eq!(agent.metric("kvspoa_spop_shed_total{reason=\"bytes\"}"), 1.0);
    one.send(&frame(0, 1, 1, 1, &[0; 116])).await;
    one.expect(&frame(103, 1, 1, 1, b"\x01\x03\x02\x06length\x05\xfc\x1d")).await;
    agent.metric_becomes("kvspoa_spop_in_flight_bytes", 0.0).await;
}

#[tokio::test]
async fn an_answer_beyond_the_frame_size_loses_its_last_actions() {
    let agent = Agent::start(Transport::Tcp);
    let mut peer = agent.running().await;
    peer.send(&notify(1, "big")).await;
    peer.expect(&ack_true(1, "first")).await;
    assert_eq!(agent.metric("kvspoa_spop_cut_acks_total"), 1.0);
}

#[tokio::test]
async fn handlers_end_when_their_connection_does() {
    for transport in BOTH {
        let mut agent = Agent::start(transport);
        let mut gone = agent.running().await;
        gone.send(&[notify(1, "hold"), notify(2, "hold")].concat()).await;
        agent.metric_becomes("kvspoa_spop_in_flight", 2.0).await;
        drop(gone);
        agent.hold_ended().await;
        agent.hold_ended().await;
        agent.metric_becomes("kvspoa_spop_in_flight", 0.0).await;
        let mut wrong = agent.running().await;
        wrong.send(&notify(1, "hold")).await;
        agent.metric_becomes("kvspoa_spop_in_flight", 1.0).await;
        wrong.send(&frame(103, 1, 0, 0, b"")).await;
        wrong.expect(&disconnect(4, "invalid frame received")).await;
        agent.hold_ended().await;
    }
}

#[tokio::test]
async fn a_shutdown_lets_requests_end_and_takes_leave() {
    for transport in BOTH {
        let agent = Agent::start(transport);
        let mut idle = agent.running().await;
        let mut busy = agent.running().await;
        busy.send(&notify(1, "hold")).await;
        agent.metric_becomes("kvspoa_spop_in_flight", 1.0).await;
        agent.shutdown.cancel();
        idle.expect(AGENT_DISCONNECT_NORMAL).await;
        idle.expect_end().await;
        // A request that comes while others end is answered at once.
        busy.send(&notify(2, "hold")).await;
        busy.expect(&empty_ack(2)).await;
        agent.gate.add_permits(1);
        busy.expect(&ack_true(1, "held")).await;
        busy.expect(AGENT_DISCONNECT_NORMAL).await;
        busy.expect_end().await;
        drop((idle, busy));
        within(agent.server).await.expect("no panic").expect("a good end");
    }
}

#[tokio::test]
async fn a_shutdown_does_not_wait_for_ever() {
    let config = ServerConfig { drain: Duration::from_millis(50), ..ServerConfig::default() };
    let config = ServerConfig { deadline: Duration::from_secs(60), ..config };
    let mut agent = Agent::start_with(Transport::Tcp, config);
    let mut peer = agent.running().await;
    peer.send(&notify(1, "hold")).await;
    agent.metric_becomes("kvspoa_spop_in_flight", 1.0).await;
    agent.shutdown.cancel();
    peer.expect(AGENT_DISCONNECT_NORMAL).await;
    peer.expect_end().await;
    agent.hold_ended().await;
    within(agent.server).await.expect("no panic").expect("a good end");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_of_connections_is_served() {
    for transport in BOTH {
        let agent = Agent::start(transport);
        let mut peers = Vec::new();
        for _ in 0..300 {
            let mut peer = agent.connect().await;
            peer.send(HELLO_2_6).await;
            peer.send(NOTIFY_ECHO).await;
            peers.push(peer);
        }
        for peer in &mut peers {
            peer.expect(AGENT_HELLO).await;
            peer.expect(ACK_ECHO).await;
        }
        assert_eq!(agent.metric("kvspoa_spop_connections"), 300.0);
    }
}

#[tokio::test]
async fn connections_beyond_the_limit_wait_for_a_slot() {
    let config = ServerConfig { max_connections: 1, ..ServerConfig::default() };
    let agent = Agent::start_with(Transport::Tcp, config);
    let first = agent.running().await;
    let mut second = agent.connect().await;
    second.send(HELLO_2_6).await;
    assert_eq!(agent.metric("kvspoa_spop_connections_total"), 1.0);
    drop(first);
    second.expect(AGENT_HELLO).await;
}

#[tokio::test]
async fn a_handler_sees_typed_arguments() {
    struct Check;
    impl Handler for Check {
        async fn notify(&self, payload: Bytes, _: Instant) -> Actions {
            let mut actions = Actions::none();
            for message in messages(&payload) {
                let message = message.expect("a message");
                let args: Vec<_> = message.args.collect();
                let expected = [("eom", Value::Bool(true)), ("cl", Value::Int64(300)), ("none", Value::Null)];
                actions.set_var(Scope::Process, "same", args == expected);
            }
            actions
        }
    }
    let server = Server::bind(
        &"127.0.0.1:0".parse().expect("an address"),
        ServerConfig::default(),
        SpopMetrics::register(),
    )
    .expect("a free port");
    let ListenAddr::Tcp(addr) = *server.local_addr() else { panic!("a TCP address") };
    tokio::spawn(server.serve(Check, CancellationToken::new()));
    let mut peer = Peer { stream: Box::new(TcpStream::connect(addr).await.expect("a connection")) };
    peer.send(HELLO_2_6).await;
    peer.expect(AGENT_HELLO).await;
    peer.send(&frame(3, 1, 0, 1, b"\x01m\x03\x03eom\x11\x02cl\x04\xfc\x03\x04none\x00")).await;
    peer.expect(&frame(103, 1, 0, 1, b"\x01\x03\x00\x04same\x11")).await;
}
