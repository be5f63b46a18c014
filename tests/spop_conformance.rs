//! The SPOP server over real sockets, byte by byte, against frames written from SPOE.txt and captured from HAProxy.

mod spop_support;

use bytes::Bytes;
use kvspoa::metrics::SpopMetrics;
use kvspoa::spop::{Actions, Handler, ListenAddr, Scope, Server, ServerConfig, Value, messages};
use spop_support::*;
use std::time::{Duration, Instant};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

fn hello(items: &[&[u8]]) -> Vec<u8> {
    frame(1, 1, 0, 0, &items.concat())
}

const VERSIONS: &[u8] = b"\x12supported-versions\x08\x032.0";
const SIZE: &[u8] = b"\x0emax-frame-size\x03\xfc\xf0\x06";
const CAPABILITIES: &[u8] = b"\x0ccapabilities\x08\x0apipelining";

#[tokio::test]
async fn a_session_from_hello_to_disconnect() {
    for transport in BOTH {
        for haproxy_hello in [HELLO_2_6, HELLO_3_5] {
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
    peer.send(HELLO_3_5).await;
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
