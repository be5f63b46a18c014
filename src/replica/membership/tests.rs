use super::*;
use crate::replica::parse_sources;
use proptest::prelude::*;
use std::collections::BTreeMap;

fn server(name: &str, addr: &str, state: ServerState) -> Server {
    Server {
        name: name.to_owned(),
        addr: addr.to_owned(),
        port: 8000,
        tls: false,
        state,
        weight: 1,
        backup: false,
        in_flight: 0,
        queued: 0,
        limit: None,
        connections: 0,
    }
}

fn up(name: &str, addr: &str) -> Server {
    server(name, addr, ServerState::Up)
}

fn http(host: &str) -> HttpAddr {
    format!("{host}:8000").parse().expect("an address")
}

fn of_haproxy() -> Membership {
    Membership::new(&config::Pool { source: ReplicaSource::Haproxy, ..config::Pool::default() })
}

/// What a replica says whose events are at these ports.
fn told(ports: &[u16]) -> Sources {
    let entries = ports.iter().enumerate().map(|(rank, port)| {
        format!(r#""{rank}": {{"enable_kv_cache_events": true, "endpoint": "tcp://*:{port}"}}"#)
    });
    let page = format!("{{{}}}", entries.collect::<Vec<_>>().join(","));
    Sources::Told(parse_sources(page.as_bytes()).expect("a page"))
}

/// Names with the event endpoints of their ranks.
fn desired(membership: &Membership) -> Vec<(String, Vec<String>)> {
    let events = |rank: Rank| rank.events.map_or_else(|| "-".to_owned(), |at| at.to_string());
    let replica = |replica: Replica| (replica.server, replica.ranks.into_iter().map(events).collect());
    membership.desired().into_iter().map(replica).collect()
}

fn pair(name: &str, events: &[&str]) -> (String, Vec<String>) {
    (name.to_owned(), events.iter().map(|at| (*at).to_owned()).collect())
}

#[test]
fn a_server_becomes_a_replica_once_it_has_said_where_its_events_are() {
    let mut membership = of_haproxy();
    assert!(!membership.is_settled(), "HAProxy has told nothing yet");
    membership.take_servers(&[up("s1", "10.0.0.1"), up("s2", "10.0.0.2")]);
    assert_eq!(membership.asked().count(), 2);
    assert_eq!((desired(&membership), membership.is_settled()), (vec![], false));
    membership.take_sources("s1", &http("10.0.0.1"), told(&[5557, 5558]));
    membership.take_sources("s2", &http("10.0.0.2"), Sources::Silent);
    let first = pair("s1", &["tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"]);
    assert_eq!(desired(&membership), [first.clone(), pair("s2", &["-"])]);
    assert!(membership.is_settled());
    membership.take_sources("s1", &http("10.0.0.1"), Sources::Silent);
    assert_eq!(desired(&membership)[0], first, "an engine that is silent for once has not changed");
    membership.take_sources("s1", &http("10.0.0.9"), told(&[1]));
    assert_eq!(desired(&membership)[0], first, "an answer from an address before");
}

#[test]
fn another_address_is_another_replica_under_the_same_name() {
    let mut membership = of_haproxy();
    membership.take_servers(&[up("SRV_3", "10.0.0.1")]);
    membership.take_sources("SRV_3", &http("10.0.0.1"), told(&[5557]));
    let before = membership.desired();
    membership.take_servers(&[up("SRV_3", "10.0.0.2")]);
    assert_eq!(changes(&before, &membership.desired()), [Change::Leave("SRV_3".to_owned())]);
    membership.take_sources("SRV_3", &http("10.0.0.2"), told(&[5557]));
    assert_eq!(desired(&membership), [pair("SRV_3", &["tcp://10.0.0.2:5557"])]);
    let moved = membership.desired().remove(0);
    assert_eq!(changes(&before, std::slice::from_ref(&moved)), [Change::Move(moved)]);
}

#[test]
fn a_free_slot_is_no_replica_and_a_used_one_may_rest() {
    let mut membership = of_haproxy();
    let maint = |name, addr| server(name, addr, ServerState::Maint);
    let free = [maint("t1", "127.0.0.1"), up("t2", "0.0.0.0"), up("t3", "::"), up("t4", "-")];
    membership.take_servers(&free);
    membership.take_servers(&[Server { port: 0, ..up("t5", "10.0.0.1") }]);
    assert_eq!(membership.asked().count(), 0);
    assert!(membership.is_settled());
    membership.take_servers(&[up("t1", "10.0.0.1")]);
    membership.take_sources("t1", &http("10.0.0.1"), told(&[5557]));
    membership.take_servers(&[maint("t1", "10.0.0.1")]);
    assert_eq!(desired(&membership).len(), 1, "its cache is still there");
    membership.take_servers(&[maint("t1", "10.0.0.2")]);
    assert_eq!(desired(&membership).len(), 0, "its slot waits for another");
    membership.take_servers(&[]);
    assert_eq!(membership.asked().count(), 0);
}

#[test]
fn an_older_engine_is_found_by_its_ports() {
    let mut membership = of_haproxy();
    let older = |ranks| Sources::NoPage { ranks };
    let servers = [up("a7", "10.0.0.1"), up("b1", "10.0.0.2"), up("c4", "10.0.0.1"), up("d", "::1")];
    membership.take_servers(&servers);
    for (server, sources) in servers.iter().zip([older(2), older(1), older(1), older(1)]) {
        membership.take_sources(&server.name, &server.http().expect("an address"), sources);
    }
    let by_order = [
        pair("a7", &["tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"]),
        pair("b1", &["tcp://10.0.0.2:5557"]),
        pair("c4", &["tcp://10.0.0.1:5559"]),
        pair("d", &["tcp://[::1]:5557"]),
    ];
    assert_eq!(desired(&membership), by_order);
    let replay = membership.desired()[2].ranks[0].replay.as_ref().map(ToString::to_string);
    assert_eq!(replay.as_deref(), Some("tcp://10.0.0.1:6559"));
    membership.ports.node_rank = NodeRank::Name;
    let first: Vec<String> = desired(&membership).into_iter().map(|(_, events)| events[0].clone()).collect();
    let by_name = ["tcp://10.0.0.1:5564", "tcp://10.0.0.2:5558", "tcp://10.0.0.1:5561", "tcp://[::1]:5557"];
    assert_eq!(first, by_name);
    membership.ports.base = u16::MAX;
    assert_eq!(desired(&membership)[0].1, ["-", "-"], "no such port");
}

#[test]
fn rays_replicas_take_tokens_at_the_port_of_their_rank_on_the_machine() {
    let mut membership = of_haproxy();
    membership.take_servers(&[up("s1", "10.0.0.1"), up("s2", "10.0.0.2"), up("s3", "10.0.0.1")]);
    for (server, host) in [("s1", "10.0.0.1"), ("s2", "10.0.0.2"), ("s3", "10.0.0.1")] {
        membership.take_sources(server, &http(host), Sources::NoPage { ranks: 1 });
    }
    let tokens = |membership: &Membership| -> Vec<String> {
        let ranks = membership.desired().into_iter().flat_map(|replica| replica.ranks);
        ranks.map(|rank| rank.tokens.map_or_else(|| "-".to_owned(), |at| at.to_string())).collect()
    };
    assert_eq!(tokens(&membership), ["-", "-", "-"], "stock vLLM takes none");
    membership.ports.tokens = Some(7557);
    let by_order = ["tcp://10.0.0.1:7557", "tcp://10.0.0.2:7557", "tcp://10.0.0.1:7558"];
    assert_eq!(tokens(&membership), by_order);
    // Whoever tells its own event endpoints, or is told of, has a port all the same.
    membership.take_sources("s1", &http("10.0.0.1"), Sources::Told(Vec::new()));
    assert_eq!(tokens(&membership), by_order);
    membership.ports.node_rank = NodeRank::Name;
    let by_name = ["tcp://10.0.0.1:7558", "tcp://10.0.0.2:7559", "tcp://10.0.0.1:7560"];
    assert_eq!(tokens(&membership), by_name);
}

#[test]
fn what_the_configuration_says_of_a_server_counts_before_what_it_says_itself() {
    let rank = Rank { events: Endpoint::parse("tcp://10.9.9.9:1").ok(), ..Rank::default() };
    let known =
        Replica { server: "s1".to_owned(), ranks: vec![rank], cache_blocks: Some(7), ..Replica::default() };
    let moved = Replica { server: "s2".to_owned(), http: Some(http("10.9.9.9")), ..Replica::default() };
    let mut membership = Membership::new(&config::Pool {
        source: ReplicaSource::Haproxy,
        replicas: vec![known, moved],
        ..config::Pool::default()
    });
    membership.take_servers(&[up("s1", "10.0.0.1"), up("s2", "10.0.0.2")]);
    assert_eq!(desired(&membership), [pair("s1", &["tcp://10.9.9.9:1"])]);
    assert_eq!(membership.desired()[0].ranks[0].cache_blocks, Some(7));
    let asked: Vec<_> =
        membership.asked().map(|(name, http, sources)| (name, http.to_string(), sources)).collect();
    assert_eq!(asked, [("s1", "10.0.0.1:8000".to_owned(), false), ("s2", "10.9.9.9:8000".to_owned(), true)]);
}

#[test]
fn a_listed_replica_is_there_from_the_start() {
    let replica = Replica { server: "s1".to_owned(), ..Replica::default() };
    let listed = config::Pool { replicas: vec![replica], ..config::Pool::default() };
    let mut membership = Membership::new(&listed);
    assert_eq!((desired(&membership), membership.is_settled()), (vec![pair("s1", &["-"])], true));
    membership.take_servers(&[up("s2", "10.0.0.2")]);
    assert_eq!(desired(&membership), [pair("s1", &["-"])], "HAProxy's other servers are not the pool's");
}

#[test]
fn what_was_told_stays_when_the_configuration_says_something_else() {
    let mut membership = of_haproxy();
    membership.take_servers(&[up("s1", "10.0.0.1"), up("s2", "10.0.0.2")]);
    membership.take_sources("s1", &http("10.0.0.1"), told(&[5557]));
    membership.take_sources("s2", &http("10.0.0.2"), told(&[5557]));
    let before = membership.desired();
    // One of them is known better now.
    let known = Replica { server: "s2".to_owned(), cache_blocks: Some(7), ..Replica::default() };
    let of_haproxy = config::Pool { source: ReplicaSource::Haproxy, ..config::Pool::default() };
    membership.configure(&config::Pool { replicas: vec![known], ..of_haproxy.clone() });
    assert_eq!(membership.desired()[0], before[0]);
    assert_eq!(membership.desired().len(), 1, "the other one is another, which has not been asked");
    membership.take_sources("s2", &http("10.0.0.2"), told(&[5557]));
    assert_eq!(membership.desired()[1].ranks[0].cache_blocks, Some(7));
    // And no longer.
    membership.configure(&of_haproxy);
    membership.take_sources("s2", &http("10.0.0.2"), told(&[5557]));
    assert_eq!((membership.desired(), membership.is_settled()), (before, true));
}

#[test]
fn replicas_from_elsewhere_take_the_place_of_those_before_when_they_are_known() {
    let listed = |server: &str| {
        let replica = Replica { server: server.to_owned(), ..Replica::default() };
        config::Pool { replicas: vec![replica], ..config::Pool::default() }
    };
    let mut membership = Membership::new(&listed("s1"));
    membership.configure(&config::Pool { source: ReplicaSource::Haproxy, ..config::Pool::default() });
    assert_eq!((desired(&membership), membership.is_settled()), (vec![pair("s1", &["-"])], false));
    membership.take_list(vec![Replica { server: "s3".to_owned(), ..Replica::default() }]);
    assert_eq!(desired(&membership), [pair("s1", &["-"])], "a list that is followed no longer");
    membership.take_servers(&[up("s2", "10.0.0.2")]);
    membership.take_sources("s2", &http("10.0.0.2"), told(&[5557]));
    assert_eq!(desired(&membership), [pair("s2", &["tcp://10.0.0.2:5557"])]);
    membership.configure(&listed("s4"));
    assert_eq!((desired(&membership), membership.is_settled()), (vec![pair("s4", &["-"])], true));
}

/// Replicas as a list can have them: each name once.
fn replicas() -> impl Strategy<Value = Vec<Replica>> {
    let replica = |(name, (host, ports)): (u8, (u8, Vec<u16>))| Replica {
        server: format!("s{name}"),
        http: Some(http(&format!("10.0.0.{host}"))),
        ranks: ports
            .into_iter()
            .map(|port| Rank { events: Endpoint::at("h", port).ok(), ..Rank::default() })
            .collect(),
        ..Replica::default()
    };
    let one = (0u8..3, prop::collection::vec(1u16..3, 1..3));
    prop::collection::btree_map(0u8..8, one, 0..8)
        .prop_map(move |all| all.into_iter().map(replica).collect::<Vec<_>>())
        .prop_shuffle()
}

proptest! {
    #[test]
    fn the_changes_lead_from_what_runs_to_what_should(running in replicas(), desired in replicas()) {
        let mut now: BTreeMap<String, Replica> =
            running.iter().map(|replica| (replica.server.clone(), replica.clone())).collect();
        let mut joined = false;
        for change in changes(&running, &desired) {
            match change {
                Change::Leave(server) => {
                    prop_assert!(!joined, "room is made first");
                    prop_assert!(now.remove(&server).is_some());
                }
                Change::Move(replica) => {
                    prop_assert!(!joined, "room is made first");
                    let before = now.insert(replica.server.clone(), replica.clone());
                    prop_assert!(before.is_some_and(|before| before != replica));
                }
                Change::Join(replica) => {
                    joined = true;
                    prop_assert!(now.insert(replica.server.clone(), replica).is_none());
                }
            }
        }
        let should = desired.iter().map(|replica| (replica.server.clone(), replica.clone())).collect();
        prop_assert_eq!(now, should);
        prop_assert_eq!(changes(&desired, &desired), vec![]);
    }
}
