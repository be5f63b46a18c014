//! An SPOP server of ours that does as it is told, and HAProxy's side of a connection, byte by byte.
#![allow(dead_code, reason = "every test binary uses a part of it")]

use bytes::Bytes;
use kvspoa::metrics::SpopMetrics;
use kvspoa::spop::{
    Actions, Handler, ListenAddr, Scope, Server, ServerConfig, ServerLimits, Unanswered, messages,
};
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
pub(crate) const HELLO_2_6: &[u8] = b"\x00\x00\x00\x81\x01\x00\x00\x00\x01\x00\x00\
    \x12supported-versions\x08\x032.0\
    \x0emax-frame-size\x03\xfc\xf0\x06\
    \x0ccapabilities\x08\x10pipelining,async\
    \x09engine-id\x08\x24ffaddec6-64f7-43e7-a51e-e6e149ff75da";
/// That of 3.5-dev5, as captured: no `async`.
pub(crate) const HELLO_3_5: &[u8] = b"\x00\x00\x00\x7b\x01\x00\x00\x00\x01\x00\x00\
    \x12supported-versions\x08\x032.0\
    \x0emax-frame-size\x03\xfc\xf0\x06\
    \x0ccapabilities\x08\x0apipelining\
    \x09engine-id\x08\x24b587b989-4e3f-48e6-94f0-c05db57a53a1";
/// The check of `option spop-check` of 2.6.12 and 2.8.25, as captured: nothing offered.
pub(crate) const HELLO_CHECK: &[u8] = b"\x00\x00\x00\x4e\x01\x00\x00\x00\x01\x00\x00\
    \x12supported-versions\x08\x032.0\
    \x0emax-frame-size\x03\xfc\xf0\x06\
    \x0ccapabilities\x08\x00\
    \x0bhealthcheck\x11";
pub(crate) const AGENT_HELLO: &[u8] = b"\x00\x00\x00\x4e\x65\x00\x00\x00\x01\x00\x00\
    \x07version\x08\x032.0\
    \x0emax-frame-size\x03\xfc\xf0\x06\
    \x0ccapabilities\x08\x18pipelining,fragmentation";
pub(crate) const AGENT_HELLO_CHECK: &[u8] = b"\x00\x00\x00\x43\x65\x00\x00\x00\x01\x00\x00\
    \x07version\x08\x032.0\
    \x0emax-frame-size\x03\xfc\xf0\x06\
    \x0ccapabilities\x08\x0dfragmentation";
/// NOTIFY, FIN, stream 5, frame 1: message `echo` with argument `say` = "hi".
pub(crate) const NOTIFY_ECHO: &[u8] = b"\x00\x00\x00\x15\x03\x00\x00\x00\x01\x05\x01\
    \x04echo\x01\x03say\x08\x02hi";
/// ACK, FIN, stream 5, frame 1: set-var `txn.said` = "hi".
pub(crate) const ACK_ECHO: &[u8] = b"\x00\x00\x00\x13\x67\x00\x00\x00\x01\x05\x01\
    \x01\x03\x02\x04said\x08\x02hi";
pub(crate) const HAPROXY_DISCONNECT: &[u8] = b"\x00\x00\x00\x25\x02\x00\x00\x00\x01\x00\x00\
    \x0bstatus-code\x03\x00\x07message\x08\x06normal";
pub(crate) const AGENT_DISCONNECT_NORMAL: &[u8] = b"\x00\x00\x00\x25\x66\x00\x00\x00\x01\x00\x00\
    \x0bstatus-code\x03\x00\x07message\x08\x06normal";

#[derive(Clone, Copy, Debug)]
pub(crate) enum Transport {
    Tcp,
    Unix,
}

pub(crate) const BOTH: [Transport; 2] = [Transport::Tcp, Transport::Unix];

/// Does what the first message's name says.
struct Script {
    /// Lets one `hold` go on for each permit.
    gate: Arc<Semaphore>,
    /// Lets one `block`, which holds its thread, go on for each message.
    unblock: Mutex<std::sync::mpsc::Receiver<()>>,
    /// Hears of each `hold` that ends, by an answer or not.
    ended: mpsc::UnboundedSender<()>,
    unanswered: Arc<Mutex<Vec<Unanswered>>>,
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

    fn unanswered(&self, why: Unanswered) {
        self.unanswered.lock().expect("a lock").push(why);
    }
}

pub(crate) struct Agent {
    /// What the handler was told of answers that did not come.
    pub(crate) unanswered: Arc<Mutex<Vec<Unanswered>>>,
    addr: ListenAddr,
    /// Lets one `hold` go on for each permit.
    pub(crate) gate: Arc<Semaphore>,
    /// Lets one `block` go on for each message.
    pub(crate) unblock: std::sync::mpsc::Sender<()>,
    ended: mpsc::UnboundedReceiver<()>,
    pub(crate) shutdown: CancellationToken,
    pub(crate) limits: ServerLimits,
    pub(crate) server: JoinHandle<io::Result<()>>,
    metrics: PrometheusHandle,
    _dir: TempDir,
}

impl Agent {
    pub(crate) fn start(transport: Transport) -> Self {
        Self::start_with(
            transport,
            ServerConfig { deadline: Duration::from_secs(60), ..ServerConfig::default() },
        )
    }

    pub(crate) fn start_with(transport: Transport, config: ServerConfig) -> Self {
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
        let limits = server.limits();
        let gate = Arc::new(Semaphore::new(0));
        let (sender, ended) = mpsc::unbounded_channel();
        let shutdown = CancellationToken::new();
        let (unblock, blocked) = std::sync::mpsc::channel();
        let unanswered = Arc::default();
        let script = Script {
            gate: Arc::clone(&gate),
            unblock: Mutex::new(blocked),
            ended: sender,
            unanswered: Arc::clone(&unanswered),
        };
        let server = tokio::spawn(server.serve(script, shutdown.clone()));
        Self { unanswered, addr, gate, unblock, ended, shutdown, limits, server, metrics, _dir: dir }
    }

    pub(crate) async fn connect(&self) -> Peer {
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
    pub(crate) async fn running(&self) -> Peer {
        let mut peer = self.connect().await;
        peer.send(HELLO_2_6).await;
        peer.expect(AGENT_HELLO).await;
        peer
    }

    pub(crate) async fn hold_ended(&mut self) {
        within(self.ended.recv()).await.expect("the handler lives");
    }

    /// The value of a metric, by its name and labels.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let text = self.metrics.render();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no metric {name} in {text}")).parse().expect("a number")
    }

    pub(crate) async fn metric_becomes(&self, name: &str, value: f64) {
        within(async {
            while self.metric(name) != value {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }
}

pub(crate) trait Socket: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Socket for T {}

pub(crate) struct Peer {
    pub(crate) stream: Box<dyn Socket>,
}

impl Peer {
    pub(crate) async fn send(&mut self, bytes: &[u8]) {
        within(self.stream.write_all(bytes)).await.expect("the agent reads");
    }

    pub(crate) async fn expect(&mut self, bytes: &[u8]) {
        let mut read = vec![0; bytes.len()];
        within(self.stream.read_exact(&mut read)).await.expect("the agent answers");
        assert_eq!(read, bytes, "{}", read.escape_ascii());
    }

    /// Expects that nothing more comes.
    pub(crate) async fn expect_end(&mut self) {
        let mut rest = Vec::new();
        within(self.stream.read_to_end(&mut rest)).await.expect("an end in good order");
        assert_eq!(rest, b"", "{}", rest.escape_ascii());
    }
}

/// So that a failure is not a test that hangs.
pub(crate) async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(20), future).await.expect("in time")
}

/// A frame for small ids.
pub(crate) fn frame(code: u8, flags: u8, stream_id: u8, frame_id: u8, payload: &[u8]) -> Vec<u8> {
    let mut out = u32::try_from(7 + payload.len()).expect("a short frame").to_be_bytes().to_vec();
    out.extend([code, 0, 0, 0, flags, stream_id, frame_id]);
    out.extend_from_slice(payload);
    out
}

pub(crate) fn notify(stream_id: u8, name: &str) -> Vec<u8> {
    let length = u8::try_from(name.len()).expect("a short name");
    frame(3, 1, stream_id, 1, &[&[length], name.as_bytes(), &[0]].concat())
}

pub(crate) fn empty_ack(stream_id: u8) -> Vec<u8> {
    frame(103, 1, stream_id, 1, b"")
}

pub(crate) fn ack_true(stream_id: u8, name: &str) -> Vec<u8> {
    let length = u8::try_from(name.len()).expect("a short name");
    frame(103, 1, stream_id, 1, &[&[1, 3, 2, length], name.as_bytes(), &[0x11]].concat())
}

pub(crate) fn disconnect(status: u8, message: &str) -> Vec<u8> {
    let length = u8::try_from(message.len()).expect("a short message");
    let payload = [b"\x0bstatus-code\x03", &[status][..], b"\x07message\x08", &[length], message.as_bytes()];
    frame(102, 1, 0, 0, &payload.concat())
}
