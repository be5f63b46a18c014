//! One measurement of one index: prints a name and a figure a line.

use crate::measure::{Quantiles, Stopwatch, mean_cpu_us, resident_bytes};
use crate::ours::{KEY, Ours};
use crate::subject::{Prompt, Subject};
use kvspoa::events::{KvEvent, Stored};
use kvspoa::units::{BlockHash, EngineHash, RankId, Tier, TokenId};
use kvspoa::wire;
use kvspoa::workload::{Shape, Workload, long_prompts, short_prompts};
use std::hint::black_box;

/// Blocks in private prompts.
const PRIVATE_BLOCKS: u64 = 600_000;

pub fn run<S: Subject>(what: &str, ranks: u16, scale: u64) -> bool {
    let shape = Shape::conv2k8k(ranks, scale);
    match what {
        "interleaved" => interleaved::<S>(shape),
        "bulk" => {
            let workload = Workload::new(&KEY, &S::block_hash, shape.in_bulk());
            apply::<S>(&workload);
        }
        "wire" => wire::<S>(shape),
        "private" => private::<S>(ranks, scale),
        _ => return false,
    }
    true
}

pub fn print(name: &str, value: f64) {
    println!("{name} {value}");
}

fn apply<S: Subject>(workload: &Workload) -> S {
    let mut subject = S::new(workload.ranks);
    let mut watch = Stopwatch::default();
    subject.apply(workload, &mut watch);
    print("apply", watch.millions_a_second(workload.entries()));
    subject
}

fn interleaved<S: Subject>(shape: Shape) {
    let workload = Workload::new(&KEY, &S::block_hash, shape);
    let before = resident_bytes();
    let mut subject = apply::<S>(&workload);
    print("bytes", (resident_bytes() - before) as f64 / workload.entries() as f64);
    let of_first = workload.stores().filter(|(rank, _)| *rank == RankId(0));
    let held_by_first: usize = of_first.map(|(_, stored)| stored.engine_hashes.len()).sum();
    drop(workload);
    finds(&mut subject, "512", short_prompts(&shape, 2000));
    finds(&mut subject, "8192", long_prompts(&shape, 40));
    let (mut watch, mut steps) = (Stopwatch::default(), Quantiles::default());
    watch.time(|| subject.remove_first(&mut steps));
    print("remove", watch.microseconds() / 1e3 * 500_000.0 / held_by_first as f64);
    print("remove hold", steps.at_us(1.0));
}

fn finds<S: Subject>(subject: &mut S, name: &str, prompts: Vec<Vec<TokenId>>) {
    let prompt = |tokens: Vec<TokenId>| Prompt { ids: tokens.iter().map(|token| token.0).collect(), tokens };
    let prompts: Vec<Prompt> = prompts.into_iter().map(prompt).collect();
    let queries: Vec<S::Query> = prompts.iter().map(|prompt| subject.query(prompt)).collect();
    print(&format!("sum {name}"), queries.iter().map(|query| subject.find(query)).sum::<u64>() as f64);
    let warm = mean_cpu_us(|| {
        queries.iter().for_each(|query| _ = black_box(subject.find(black_box(query))));
        queries.len()
    });
    print(&format!("find {name}"), warm);
    let mut singly = Quantiles::default();
    for query in queries.iter().cycle().take(20_000) {
        singly.time(|| black_box(subject.find(black_box(query))));
    }
    print(&format!("find {name} p99"), singly.at_us(0.99));
    // A router is cold: between two requests it tokenizes and applies events.
    let mut cold = Quantiles::default();
    let mut elsewhere = vec![1u64; 6 << 20];
    for prompt in prompts.iter().cycle().take(300) {
        elsewhere.iter_mut().for_each(|word| *word = word.wrapping_add(1));
        black_box(&elsewhere);
        // The hashes are fresh, of course: only the index is cold.
        let query = subject.query(prompt);
        cold.time(|| black_box(subject.find(black_box(&query))));
    }
    print(&format!("cold {name}"), cold.at_us(0.5));
    let from_tokens = mean_cpu_us(|| {
        for prompt in &prompts {
            let query = subject.query(black_box(prompt));
            black_box(subject.find(&query));
        }
        prompts.len()
    });
    print(&format!("tokens {name}"), from_tokens);
}

fn wire<S: Subject>(shape: Shape) {
    let workload = Workload::new(&KEY, &|_| BlockHash(0), shape);
    let payloads = wire::payloads(&workload);
    let entries = workload.entries();
    drop(workload);
    let bytes: usize = payloads.iter().map(|payload| payload.bytes.len()).sum();
    print("payload MB", bytes as f64 / 1e6);
    let mut watch = Stopwatch::default();
    let Some(blocks) = watch.time(|| S::decode(&payloads)) else { return };
    assert_eq!(blocks, entries);
    print("decode", watch.millions_a_second(entries));
    let mut watch = Stopwatch::default();
    let mut subject = S::new(shape.ranks);
    if subject.ingest(&payloads, &mut watch) {
        print("ingest", watch.millions_a_second(entries));
    }
}

/// Prompts of `blocks` blocks each that nobody shares.
fn private<S: Subject>(ranks: u16, blocks: u64) {
    let workload = Workload::private(&KEY, &S::block_hash, ranks, PRIVATE_BLOCKS / blocks, blocks);
    let before = resident_bytes();
    let subject = apply::<S>(&workload);
    print("bytes", (resident_bytes() - before) as f64 / workload.entries() as f64);
    drop(subject);
}

/// Ten million stores and as many removals of suffixes on a chain of 1,024 blocks that stays.
pub fn churn() -> bool {
    const LIVE: usize = 1024;
    const BLOCKS: usize = 10_000_000;
    let mut rng = random(1);
    let mut ours = Ours::new(1);
    let root = KEY.plain_root();
    let mut names: Vec<EngineHash> = (0..LIVE as u64).map(EngineHash).collect();
    let blocks: Vec<BlockHash> = (0..LIVE as u64).map(BlockHash).collect();
    let store = |ours: &mut Ours, parent: Option<EngineHash>, names: &[EngineHash], blocks: &[BlockHash]| {
        let stored = Stored { tier: Tier::Gpu, parent, root, engine_hashes: names, block_hashes: blocks };
        ours.index.apply(RankId(0), &KvEvent::Stored(stored));
    };
    store(&mut ours, None, &names, &blocks);
    let mut next = LIVE as u64;
    let (mut done, mut reported) = (0, 0);
    while done < BLOCKS {
        // A turn: the chain's end makes room, or another answer is stored behind any of its blocks.
        let length = 1 + (rng() % 64) as usize;
        let at = (rng() % (LIVE as u64 - 64)) as usize;
        let suffix: Vec<EngineHash> = (0..length as u64).map(|i| EngineHash(next + i)).collect();
        let tokens: Vec<BlockHash> = suffix.iter().map(|name| BlockHash(name.0)).collect();
        next += length as u64;
        store(&mut ours, Some(names[at]), &suffix, &tokens);
        let gone: Vec<EngineHash> = suffix.into_iter().rev().collect();
        ours.index.apply(RankId(0), &KvEvent::Removed { tier: Tier::Gpu, engine_hashes: &gone });
        // The live chain's own tail goes and comes back.
        let kept = LIVE - length;
        let tail: Vec<EngineHash> = names[kept..].iter().rev().copied().collect();
        ours.index.apply(RankId(0), &KvEvent::Removed { tier: Tier::Gpu, engine_hashes: &tail });
        names[kept..].iter_mut().zip(next..).for_each(|(name, fresh)| *name = EngineHash(fresh));
        next += length as u64;
        store(&mut ours, Some(names[kept - 1]), &names[kept..], &blocks[kept..]);
        done += 2 * length;
        if done >= reported {
            let stats = ours.index.stats();
            println!(
                "{:>9} blocks stored and removed: {} held, {} runs, {} bytes counted, {:.1} MB resident",
                done,
                stats.blocks[0],
                stats.runs,
                stats.bytes,
                resident_bytes() as f64 / 1e6
            );
            reported += BLOCKS / 10;
        }
    }
    assert_eq!(ours.index.stats().blocks[0], LIVE as u64);
    true
}

/// xorshift: enough for lengths and places.
fn random(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    }
}
