//! What only some engines show, by facts made up.

use super::*;
use crate::{
    agent::parity::Verdict,
    config::{self, Overrides},
    doctor::{
        facts::{
            AgentFacts, Asked, CfgFacts, HaproxyFacts, Info, Pages, RankFacts, Readiness, ReplayFacts,
            Silence, Stream, Streamed, ThroughFacts,
        },
        look::{Matched, Seen},
        report::Status,
        samples::Samples,
    },
    haproxy_config::{Form, HaproxyCfg, Names, render},
    prompt::parity::Parity,
    replica::{parse_models, parse_sources},
    spop::client::Answer,
};
use std::collections::BTreeSet;

const SOURCES: &str = r#"{"0": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557",
    "replay_endpoint": "tcp://*:6557", "topic": ""}}"#;

const METRICS: &str = "vllm:cache_config_info{block_size=\"16\",engine=\"0\"} 1.0\n";

const AGENT: &str = "kvspoa_build_info{version=\"VERSION\"} 1\nkvspoa_spop_haproxy_frame_bytes 1048572\n\
                     kvspoa_decisions_total{reason=\"overlap\"} 9\nkvspoa_haproxy_log_lines_total{kind=\"end\"} 9\n\
                     kvspoa_matched_tokens_total 100\n";

fn rank() -> RankFacts {
    let text = "[[pool]]\nbackend = \"be\"\n[[pool.replica]]\nserver = \"s1\"\nevents = \"tcp://h:5557\"\n\
                replay = \"tcp://h:6557\"\n";
    let config = config::Config::parse(text, "k.toml".as_ref(), &Overrides::default()).expect("valid");
    let seen = Seen {
        batches: 3,
        topics: BTreeSet::from([String::new()]),
        named_fields: Some(true),
        block_tokens: BTreeSet::from([16]),
        last_seq: Some(7),
        gpu_stores: [3, 0],
        ..Seen::default()
    };
    RankFacts {
        rank: config.pools[0].replicas[0].ranks[0].clone(),
        told: parse_sources(SOURCES.as_bytes()).and_then(|sources| sources.into_iter().next()),
        stream: Some(Stream::Heard(seen)),
        replay: Some(ReplayFacts::Asked { is_ended: true, has_batch: Some(true) }),
        replayed: None,
        asked: Some(Asked {
            failed: None,
            tokens: 50,
            counted: Some(50),
            matched: Matched { blocks: 3, seen: 3, ..Matched::default() },
            in_agent: Some(48),
        }),
    }
}

/// A site on which all is well, and then is not.
fn facts(change: impl FnOnce(&mut Facts)) -> Facts {
    let known =
        r#"{"ranks": [{"pool": "be", "server": "s1", "rank": 0, "state": "exact", "applied_seq": 7}]}"#;
    let readiness: Readiness = serde_json::from_str(known).expect("as /readyz writes it");
    let agent = AgentFacts {
        admin: "127.0.0.1:9102".to_owned(),
        spop: "127.0.0.1:9101".to_owned(),
        log: "127.0.0.1:9103".to_owned(),
        hello: Ok(Answer::Hello { version: "2.0".to_owned(), max_frame_size: 1_048_572 }),
        samples: Ok(samples("", "")),
        readiness: Some(readiness),
        status: None,
        max_frame_bytes: 16 << 20,
    };
    let replica = ReplicaFacts {
        server: "s1".to_owned(),
        http: Some("h:8000".to_owned()),
        pages: Some(Pages {
            models: Ok(parse_models(br#"{"data": [{"id": "m"}]}"#)),
            sources: Ok(parse_sources(SOURCES.as_bytes())),
            metrics: Ok(Samples::parse(METRICS)),
        }),
        parity: vec![("plain", Verdict::Equal { tokens: 9 }), ("text", Verdict::Equal { tokens: 9 })],
        ranks: vec![rank()],
    };
    let info = Info { version: "2.8.25".to_owned(), level: Some("user".to_owned()) };
    let mut facts = Facts {
        agent,
        haproxy: Some(HaproxyFacts { socket: "/run/admin.sock".to_owned(), info: Ok(info) }),
        cfg: None,
        pools: vec![PoolFacts {
            backend: "be".to_owned(),
            servers: None,
            file: None,
            replicas: vec![replica],
        }],
        through: None,
    };
    change(&mut facts);
    facts
}

/// The agent's metrics, changed.
fn samples(from: &str, to: &str) -> Samples {
    let page = AGENT.replace("VERSION", env!("CARGO_PKG_VERSION"));
    Samples::parse(&if from.is_empty() { page } else { page.replace(from, to) })
}

/// What is not ok.
fn found(change: impl FnOnce(&mut Facts)) -> Vec<(&'static str, Status, String)> {
    let bad = all(&facts(change)).into_iter().filter(|check| check.status != Status::Ok);
    bad.map(|check| (check.name, check.status, check.found)).collect()
}

/// The only thing that is not ok.
#[track_caller]
fn only(name: &str, status: Status, words: &str, change: impl FnOnce(&mut Facts)) {
    let found = found(change);
    let [(of, is, text)] = &found[..] else { panic!("{name}: {found:?}") };
    assert_eq!((*of, *is), (name, status), "{text}");
    assert!(text.contains(words), "{words}: {text}");
}

/// One of the things that are not ok: the parser of HAProxy's files may have found more.
#[track_caller]
fn among(name: &str, status: Status, words: &str, change: impl FnOnce(&mut Facts)) {
    let found = found(change);
    let is_it =
        |(of, is, text): &(&str, Status, String)| *of == name && *is == status && text.contains(words);
    assert!(found.iter().any(is_it), "{name}, {words}: {found:?}");
}

fn replica(facts: &mut Facts) -> &mut ReplicaFacts {
    &mut facts.pools[0].replicas[0]
}

fn asked(facts: &mut Facts) -> &mut Asked {
    replica(facts).ranks[0].asked.as_mut().expect("it was asked")
}

fn seen(facts: &mut Facts) -> &mut Seen {
    match &mut replica(facts).ranks[0].stream {
        Some(Stream::Heard(seen)) => seen,
        _ => panic!("it was heard"),
    }
}

#[test]
fn a_well_site_is_all_ok() {
    assert_eq!(found(|_| {}), []);
}

#[test]
fn an_engine_that_computes_other_tokens_than_it_tells_is_found_by_its_events() {
    only("tokens_stored", Status::Fail, "other tokens from block 1 on", |facts| {
        asked(facts).matched = Matched { blocks: 3, seen: 1, differ_at: Some(1), others: 2 };
    });
    only("tokens_counted", Status::Fail, "counted 51", |facts| asked(facts).counted = Some(51));
    only("agent_index", Status::Fail, "finds 16 of the request's 50", |facts| {
        asked(facts).in_agent = Some(16)
    });
}

#[test]
fn one_different_text_without_a_template_is_another_tokenizer() {
    let different = Verdict::Different(Parity { ours: 9, theirs: 8, differ_at: Some(0) });
    only("tokens_equal", Status::Fail, "another tokenizer", |facts| replica(facts).parity[1].1 = different);
}

#[test]
fn a_stream_that_says_nothing_is_broken_only_where_something_was_computed() {
    only("events_alive", Status::Fail, "no event came", |facts| *seen(facts) = Seen::default());
    only("events_alive", Status::Warn, "while we listened", |facts| {
        *seen(facts) = Seen::default();
        replica(facts).ranks[0].asked = None;
    });
    only("events_sequence", Status::Warn, "left out", |facts| seen(facts).has_gap = true);
    only("events_wire", Status::Fail, "1 of 3 batches", |facts| seen(facts).undecodable = 1);
}

#[test]
fn a_silent_stream_is_judged_by_its_last_batches() {
    let found = found(|facts| {
        let heard = std::mem::take(seen(facts));
        let rank = &mut replica(facts).ranks[0];
        rank.asked = None;
        rank.replayed = Some(Seen { block_tokens: BTreeSet::from([32]), ..heard });
    });
    let names: Vec<_> = found.iter().map(|(name, status, _)| (*name, *status)).collect();
    assert_eq!(names, [("events_alive", Status::Warn), ("block_size", Status::Fail)]);
}

#[test]
fn a_pool_that_is_not_on_is_named() {
    only("pool_mode", Status::Warn, "be is shadow", |facts| {
        let status = r#"{"version": "0", "pools": [{"pool": "be", "mode": "shadow"}, {"pool": "other", "mode": "on"}]}"#;
        facts.agent.status = serde_json::from_str(status).ok();
    });
}

#[test]
fn a_replay_that_lacks_the_last_batch_is_of_another_engine() {
    let replay = |answer| move |facts: &mut Facts| replica(facts).ranks[0].replay = Some(answer);
    let without = ReplayFacts::Asked { is_ended: true, has_batch: Some(false) };
    only("replay", Status::Fail, "another engine's", replay(without));
    let silent = ReplayFacts::Asked { is_ended: false, has_batch: None };
    only("replay", Status::Fail, "does not answer", replay(silent));
}

#[test]
fn a_cache_that_events_do_not_tell_of_is_named() {
    let metrics = |line: &'static str| {
        move |facts: &mut Facts| {
            let page = Samples::parse(&format!("{METRICS}{line}"));
            replica(facts).pages.as_mut().expect("pages").metrics = Ok(page);
        }
    };
    let words = "LMCache";
    only(
        "cpu_tier",
        Status::Warn,
        words,
        metrics("vllm:external_prefix_cache_queries_total{engine=\"0\"} 32.0\n"),
    );
    let words = "of which no event came";
    only(
        "cpu_tier",
        Status::Warn,
        words,
        metrics("vllm:kv_offload_cpu_cache_usage_perc{engine=\"0\"} 0.0\n"),
    );
}

#[test]
fn what_the_agent_counts_tells_of_lost_log_lines_and_of_prompts_that_never_match() {
    let counts = |from: &'static str, to: &'static str| {
        move |facts: &mut Facts| facts.agent.samples = Ok(samples(from, to))
    };
    only("log_line", Status::Warn, "no traffic", counts("{kind=\"end\"} 9", "{kind=\"end\"} 0"));
    only("log_line", Status::Fail, "40 decisions", |facts| {
        let page = "kvspoa_decisions_total{reason=\"overlap\"} 40\nkvspoa_spop_haproxy_frame_bytes 1048572\n";
        facts.agent.samples = Ok(Samples::parse(page));
    });
    only("matching", Status::Fail, "be", |facts| {
        facts.agent.readiness.as_mut().expect("there").nothing_matches = vec!["be".to_owned()];
    });
    only("agent_running", Status::Warn, "version 0.0.1", |facts| {
        facts.agent.samples = Ok(samples(env!("CARGO_PKG_VERSION"), "0.0.1"));
    });
    only("haproxy_bufsize", Status::Fail, "spop.max_frame_bytes only 65536", |facts| {
        facts.agent.max_frame_bytes = 65_536;
    });
}

#[test]
fn a_request_through_haproxy_tells_who_was_not_asked() {
    let through = |decisions, pieces| {
        move |facts: &mut Facts| {
            let answer = Streamed { status: 200, is_event_stream: true, pieces, spread_ms: 30 };
            facts.through = Some(ThroughFacts {
                url: "u".to_owned(),
                answer: Ok(answer),
                counted: Some((decisions, 1.0)),
            });
        }
    };
    assert_eq!(found(through(1.0, 4)), []);
    only("through", Status::Fail, "did not ask the agent", through(0.0, 4));
    only("streaming", Status::Warn, "at once", through(1.0, 1));
}

#[test]
fn a_release_with_a_known_bug_is_named() {
    let version = |version: &'static str| {
        move |facts: &mut Facts| {
            let info = Info { version: version.to_owned(), level: None };
            facts.haproxy.as_mut().expect("there").info = Ok(info);
        }
    };
    only("haproxy_version", Status::Warn, "issue 3290", version("3.2.1"));
    only("haproxy_version", Status::Fail, "too old", version("2.4.30"));
}

#[test]
fn a_replica_that_does_not_answer_is_one_line() {
    only("replica_http", Status::Fail, "refused", |facts| {
        let silence = || Silence::NoAnswer("refused".to_owned());
        replica(facts).pages =
            Some(Pages { models: Err(silence()), sources: Err(silence()), metrics: Err(silence()) });
        replica(facts).ranks[0].stream = Some(Stream::Closed("refused".to_owned()));
    });
}

#[test]
fn a_runtime_socket_that_does_not_answer_is_one_line() {
    let refused = |facts: &mut Facts| facts.pools[0].servers = Some(Err("refused".to_owned()));
    only("haproxy_socket", Status::Fail, "refused", |facts| {
        facts.haproxy.as_mut().expect("there").info = Err("refused".to_owned());
        refused(facts);
    });
    only("servers", Status::Fail, "does not tell of this backend", refused);
}

/// HAProxy's configuration with all our lines, changed.
fn cfg(change: impl Fn(&str) -> String) -> impl FnOnce(&mut Facts) {
    let form = |form| render(form, &Names::default());
    let text = format!(
        "global\n tune.bufsize 1048576\n stats socket /run/admin.sock level admin\ndefaults\n mode http\n\
         frontend fe\n option httplog\n{} default_backend be\nbackend be\n balance leastconn\n{} server s1 10.0.0.1:80\n{}",
        form(Form::Frontend),
        form(Form::Backend),
        form(Form::Agent)
    );
    let text = change(&text);
    move |facts: &mut Facts| {
        let read = HaproxyCfg::parse([(std::path::Path::new("haproxy.cfg"), text.as_str())], &|_| None);
        let read = read.map_err(|error| error.to_string());
        facts.cfg = Some(CfgFacts { read, installed: None, memory_bytes: None });
    }
}

#[test]
fn our_lines_are_missed_where_they_are_not() {
    assert_eq!(found(cfg(str::to_owned)), []);
    let without = |word: &'static str| {
        cfg(move |text| {
            text.lines().filter(|line| !line.contains(word)).map(|line| format!("{line}\n")).collect()
        })
    };
    among("cfg_backend", Status::Fail, "be has not our lines", without("use-server"));
    among("cfg_frontend", Status::Fail, "fe has not our log line", without("log-format-sd"));
    among("cfg_agent", Status::Fail, "kvspoa_agent is missing", without("server agent"));
    among(
        "cfg_agent",
        Status::Fail,
        "10.9.9.9:1",
        cfg(|text| text.replace("agent 127.0.0.1:9101", "agent 10.9.9.9:1")),
    );
    among(
        "cfg_frontend",
        Status::Fail,
        "127.0.0.1:9103",
        cfg(|text| text.replace("log 127.0.0.1:9103 len 2048 format rfc5424 local1 info", "")),
    );
    among("cfg", Status::Fail, "haproxy.cfg", cfg(|text| format!("{text} \"open\n")));
}

#[test]
fn what_does_not_go_with_our_lines_is_named_with_its_place() {
    let crash = |text: &str| {
        let text = text.replace("tune.bufsize 1048576", "tune.bufsize 8454144");
        format!("{text}backend guard\n mode tcp\n option spop-check\n server guard 127.0.0.1:1 check\n")
    };
    only("cfg_finding", Status::Fail, "`option spop-check` crashes HAProxy up to 3.0", cfg(crash));
}
