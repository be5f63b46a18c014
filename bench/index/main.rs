//! `cargo bench --bench index`: the index under the workload conv2k8k.
//!
//! The sums of all overlaps are checked: they are the same for every exact index. CPU times are of the one thread
//! that works; wall times of single calls are disturbed by whatever else the machine does.

mod measure;
mod workload;

use hashbrown::HashMap;
use kvspoa::events::KvEvent;
use kvspoa::hash::HashKey;
use kvspoa::index::{Index, IndexConfig, Overlaps};
use kvspoa::units::{RankId, SequenceHash, TokenId};
use measure::{Quantiles, cpu_time, mean_cpu, resident_bytes};
use std::hint::black_box;
use std::process::Command;
use workload::{BLOCK_TOKENS, Workload, long_prompts, short_prompts};

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    // `cargo test --all-targets` runs this too: unoptimised figures would mean nothing.
    if !arguments.iter().any(|argument| argument == "--bench") {
        return;
    }
    if let Some(ranks) = arguments.iter().find_map(|argument| argument.parse().ok()) {
        bench(ranks);
        return;
    }
    // A process each, so that memory freed before does not hide what is allocated.
    for ranks in ["8", "64"] {
        let child = Command::new(&arguments[0]).args(["--bench", ranks]).status();
        assert!(child.is_ok_and(|status| status.success()));
    }
}

fn bench(ranks: u16) {
    // What every exact index finds, summed over as many rounds as the reference figures.
    let (short_sum, long_sum) =
        if ranks == 64 { (641_234_752, 120_201_216) } else { (109_517_888, 120_201_216) };
    let key = HashKey::from_seed(1);
    println!("{ranks} ranks");
    let workload = Workload::new(&key, ranks, false);
    let before = resident_bytes();
    let mut index = apply("interleaved", &key, &workload);
    let entries = workload.entries() as f64;
    println!(
        "  memory: {:.1} bytes an entry resident, {:.1} counted, {} runs",
        (resident_bytes() - before) as f64 / entries,
        index.stats().bytes as f64 / entries,
        index.stats().runs
    );
    for (prompts, rounds, sum) in [(short_prompts(), 41, short_sum), (long_prompts(), 201, long_sum)] {
        hashing(&key, &prompts);
        finds(&key, &index, &prompts, rounds, sum);
    }
    remove_rank(&mut index);
    drop(index);
    yardstick(&workload);
    drop(apply("bulk", &key, &Workload::new(&key, ranks, true)));
}

/// Tokens → sequence hashes.
fn hashing(key: &HashKey, prompts: &[Vec<TokenId>]) {
    let blocks = prompts[0].len() / BLOCK_TOKENS as usize;
    let mut hashes = Vec::new();
    let taken = mean_cpu(|| {
        for prompt in prompts {
            hashes.clear();
            key.sequence_into(key.plain_root(), black_box(prompt), BLOCK_TOKENS as u32, &mut hashes);
            black_box(&hashes);
        }
        prompts.len()
    });
    let each = taken.as_nanos() as f64 / blocks as f64;
    println!("  hash {blocks} blocks: {taken:?} CPU, {each:.2} ns a block");
}

/// What the machine does at this moment: the least that any index by engine names must do, one look-up a parent and
/// one insert a block.
fn yardstick(workload: &Workload) {
    let mut maps = vec![HashMap::<u64, u32>::new(); usize::from(workload.ranks)];
    let start = cpu_time();
    for (rank, event) in workload.events() {
        let KvEvent::Stored(stored) = event else { continue };
        let map = &mut maps[rank.index()];
        black_box(stored.parent.map(|parent| map.get(&parent.0)));
        map.extend(stored.engine_hashes.iter().map(|name| (name.0, 0)));
    }
    let taken = cpu_time() - start;
    let rate = workload.entries() as f64 / taken.as_secs_f64() / 1e6;
    println!("  yardstick, a hash map a rank: {rate:.1} M blocks a CPU second");
}

fn apply(kind: &str, key: &HashKey, workload: &Workload) -> Index {
    let mut index = Index::new(key.clone(), IndexConfig::default());
    for rank in 0..workload.ranks {
        assert!(index.add_rank(RankId(rank)));
    }
    let start = cpu_time();
    let mut stored = 0;
    for (rank, event) in workload.events() {
        stored += index.apply(rank, &event).stored;
    }
    let taken = cpu_time() - start;
    assert_eq!(stored as usize, workload.entries());
    let rate = stored as f64 / taken.as_secs_f64() / 1e6;
    println!("  apply {kind}: {stored} entries, {rate:.1} M blocks a CPU second");
    index
}

fn finds(key: &HashKey, index: &Index, prompts: &[Vec<TokenId>], rounds: u64, sum: u64) {
    let hash = |prompt: &Vec<TokenId>| key.sequence(key.plain_root(), prompt, BLOCK_TOKENS as u32);
    let queries: Vec<Vec<SequenceHash>> = prompts.iter().map(hash).collect();
    let blocks = queries[0].len();
    let mut overlaps = Overlaps::default();

    let mut found = 0;
    for query in &queries {
        index.find(query, &mut overlaps);
        found += overlaps.iter().map(|(_, overlap)| u64::from(overlap.gpu_blocks)).sum::<u64>();
    }
    assert_eq!(found * rounds, sum, "the overlaps are wrong");

    let warm = mean_cpu(|| {
        for query in &queries {
            index.find(black_box(query), &mut overlaps);
            black_box(&overlaps);
        }
        queries.len()
    });
    let mut singly = Quantiles::new();
    for query in queries.iter().cycle().take(20_000) {
        singly.time(|| index.find(black_box(query), &mut overlaps));
    }
    // A router is cold: between two requests it tokenizes and applies events.
    let mut cold = Quantiles::new();
    let mut elsewhere = vec![1u64; 6 << 20];
    for query in queries.iter().cycle().take(300) {
        elsewhere.iter_mut().for_each(|word| *word = word.wrapping_add(1));
        black_box(&elsewhere);
        cold.time(|| index.find(black_box(query), &mut overlaps));
    }
    println!(
        "  find {blocks} blocks: {warm:?} CPU, p50 {:?} p99 {:?}; cold caches p50 {:?}",
        singly.at(0.5),
        singly.at(0.99),
        cold.at(0.5)
    );
}

/// Takes the first rank out, in slices.
fn remove_rank(index: &mut Index) {
    let held = index.rank_stats(RankId(0)).map_or(0, |stats| stats.blocks[0]);
    let mut slices = Quantiles::new();
    slices.time(|| index.remove_rank(RankId(0)));
    let mut more = true;
    while more {
        more = slices.time(|| index.sweep(1));
    }
    println!(
        "  remove a rank of {held} blocks: {:?} wall; one hold p50 {:?} max {:?}",
        slices.sum(),
        slices.at(0.5),
        slices.at(1.0)
    );
}
