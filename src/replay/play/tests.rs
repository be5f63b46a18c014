use super::super::{
    generate::{Shape, generate},
    policy::{PolicyName, Weights},
    workload::Request,
};
use super::*;
use crate::sim::{OffloadConfig, Timing};
use clap::ValueEnum;

fn fleet(replicas: usize) -> Fleet {
    let engine = EngineConfig {
        block_tokens: 64,
        blocks: 1001,
        offload: Some(OffloadConfig { blocks: 2000, chunk_blocks: 1, describes: false }),
        step_tokens: 2048,
        sequences: 256,
        timing: Timing::default(),
    };
    Fleet {
        engines: vec![engine; replicas],
        event_lag: Duration::from_millis(5),
        event_loss: 0.0,
        agents: 1,
        sharing: None,
        poll: None,
        sharing_loss: 0.0,
        restarts: 0,
        resets: 0,
    }
}

fn play_by(policy: PolicyName, fleet: &Fleet, workload: &Workload, seed: u64) -> Vec<Record> {
    let fleet = Fleet { poll: policy.poll().or(fleet.poll), ..fleet.clone() };
    let arrivals: Vec<Duration> = workload.requests.iter().map(|request| request.at).collect();
    let router = |seed| policy.router(&Weights::default(), fleet.engines.len() as u16, 3000, seed);
    let done = AtomicU64::new(0);
    let played = play(&fleet, workload, &arrivals, router, seed, &done).expect("it fits");
    assert_eq!(done.into_inner(), workload.requests.len() as u64);
    played.records
}

fn hits(records: &[Record]) -> usize {
    records.iter().map(|record| record.cached.tokens()).sum()
}

#[test]
fn a_request_alone_takes_what_the_model_says() {
    let request =
        Request { at: Duration::from_secs(1), prompt_tokens: 1000, answer_tokens: 3, pieces: vec![1; 16] };
    let workload = Workload { piece_tokens: 64, recorded_block_tokens: None, requests: vec![request] };
    let records = play_by(PolicyName::Cost, &fleet(2), &workload, 1);
    // A step of 10 ms, 1,000 tokens at 16,000 a second, and 1.6 ns for each of the half million pairs of tokens.
    assert!((records[0].ttft_seconds() - (0.010 + 0.0625 + 0.0008)).abs() < 1e-6, "{records:?}");
    let decode = 2.0 * (0.010 + 50e-6 + 27e-9 * 1001.5);
    assert!((records[0].seconds() - records[0].ttft_seconds() - decode).abs() < 1e-6, "{records:?}");
}

#[test]
fn every_policy_serves_every_request_and_a_seed_decides_all() {
    let workload = generate(Shape::Groups, 40, 1);
    for policy in PolicyName::value_variants() {
        let sharing = Some(Duration::from_millis(2));
        let told = Fleet { agents: 2, sharing, sharing_loss: 0.1, ..fleet(3) };
        let fleet = Fleet { event_loss: 0.05, restarts: 2, resets: 2, ..told };
        let [one, again] = [1, 1].map(|seed| format!("{:?}", play_by(*policy, &fleet, &workload, seed)));
        assert_eq!(one, again, "{policy:?}");
    }
}

#[test]
fn caches_count_only_as_far_as_events_tell_of_them() {
    let workload = generate(Shape::Groups, 250, 1);
    let seen = hits(&play_by(PolicyName::Exact, &fleet(4), &workload, 1));
    let unseen = hits(&play_by(PolicyName::Exact, &Fleet { event_loss: 1.0, ..fleet(4) }, &workload, 1));
    assert!(seen as f64 > 1.5 * unseen as f64, "{seen} {unseen}");
    let late = Fleet { event_lag: Duration::from_secs(3600), ..fleet(4) };
    assert_eq!(hits(&play_by(PolicyName::Exact, &late, &workload, 1)), unseen);
}

#[test]
fn lost_events_cost_little() {
    let workload = generate(Shape::Groups, 400, 1);
    let mean = |event_loss: f64| -> f64 {
        let fleet = Fleet { event_loss, ..fleet(11) };
        let played = (1..=3).flat_map(|seed| play_by(PolicyName::Cost, &fleet, &workload, seed));
        let seconds: Vec<f64> = played.map(|record| record.ttft_seconds()).collect();
        seconds.iter().sum::<f64>() / seconds.len() as f64
    };
    // 1.6 times without what stores tell of those that were lost before them.
    let (whole, lost) = (mean(0.0), mean(0.4));
    assert!(lost < 1.4 * whole, "{lost} {whole}");
}

#[test]
fn agents_that_share_their_bookings_keep_siblings_together() {
    let workload = generate(Shape::Fanout, 150, 1);
    let hits =
        |sharing| hits(&play_by(PolicyName::Cost, &Fleet { agents: 4, sharing, ..fleet(4) }, &workload, 1));
    let (alone, shared) = (hits(None), hits(Some(Duration::ZERO)));
    assert!(shared as f64 > 1.08 * alone as f64, "{shared} {alone}");
}

#[test]
fn a_restart_empties_a_cache() {
    let workload = generate(Shape::Groups, 250, 1);
    let whole = hits(&play_by(PolicyName::Cost, &fleet(8), &workload, 1));
    let restarted = hits(&play_by(PolicyName::Cost, &Fleet { restarts: 20, ..fleet(8) }, &workload, 1));
    assert!(restarted < whole, "{restarted} {whole}");
}

#[test]
fn a_reset_empties_both_tiers_and_every_request_is_served_all_the_same() {
    let workload = generate(Shape::Groups, 250, 1);
    let whole = hits(&play_by(PolicyName::Cost, &fleet(8), &workload, 1));
    let reset = hits(&play_by(PolicyName::Cost, &Fleet { resets: 40, ..fleet(8) }, &workload, 1));
    assert!(reset < whole, "{reset} {whole}");
}

#[test]
fn a_prompt_larger_than_a_replica_is_an_error() {
    let request =
        Request { at: Duration::ZERO, prompt_tokens: 70_000, answer_tokens: 1, pieces: vec![1; 1094] };
    let workload = Workload { piece_tokens: 64, recorded_block_tokens: None, requests: vec![request] };
    let router = |seed| PolicyName::Cost.router(&Weights::default(), 1, 3000, seed);
    let error =
        play(&fleet(1), &workload, &[Duration::ZERO], router, 1, &AtomicU64::new(0)).expect_err("too long");
    assert!(error.to_string().contains("70001"), "{error}");
}
