//! The SPOP server at its limits: deadlines, panics, too much of everything, and its end.

mod spop_support;

use kvspoa::metrics::SpopMetrics;
use kvspoa::spop::server::BindError;
use kvspoa::spop::{Server, ServerConfig, Unanswered};
use spop_support::*;
use std::time::Duration;

#[tokio::test]
async fn a_panic_costs_one_answer() {
    let agent = Agent::start(Transport::Tcp);
    let mut peer = agent.running().await;
    peer.send(&notify(1, "panic")).await;
    peer.expect(&empty_ack(1)).await;
    peer.send(NOTIFY_ECHO).await;
    peer.expect(ACK_ECHO).await;
    assert_eq!(agent.metric("kvspoa_spop_panics_total"), 1.0);
    assert_eq!(*agent.unanswered.lock().expect("a lock"), [Unanswered::Panicked]);
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
    assert_eq!(*agent.unanswered.lock().expect("a lock"), [Unanswered::Late]);
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
async fn limits_change_while_it_serves() {
    let config = ServerConfig { max_connections: 1, ..ServerConfig::default() };
    let agent = Agent::start_with(Transport::Tcp, config);
    let mut first = agent.running().await;
    let mut second = agent.connect().await;
    second.send(HELLO_2_6).await;
    agent.limits.set(ServerConfig { max_connections: 2, max_in_flight: 0, ..config });
    second.expect(AGENT_HELLO).await;
    // Of whatever is left to HAProxy, nothing is in the answer.
    first.send(NOTIFY_ECHO).await;
    first.expect(&empty_ack(5)).await;
    agent.limits.set(ServerConfig { max_connections: 2, ..config });
    first.send(NOTIFY_ECHO).await;
    first.expect(ACK_ECHO).await;
}

#[test]
fn a_server_that_cannot_start_says_why() {
    let bind = |addr: &str, config| {
        let addr = addr.parse().expect("an address");
        Server::bind(&addr, config, SpopMetrics::register()).expect_err("no server")
    };
    let tiny = ServerConfig { max_frame_size: 255, ..ServerConfig::default() };
    assert!(matches!(bind("127.0.0.1:0", tiny), BindError::MaxFrameSize(255)));
    let error = bind("unix:/nonexistent/spop.sock", ServerConfig::default());
    assert_eq!(error.to_string(), "cannot listen on unix:/nonexistent/spop.sock");
}
