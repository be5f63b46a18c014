//! Memory: its limit, and ranks that come and go.

use super::*;

#[test]
fn the_limit_holds_against_prompts_of_one_block_that_nobody_shares() {
    let max_bytes = 1 << 20;
    let mut t = Scene::with(IndexConfig { max_bytes, ..IndexConfig::default() });
    let root = t.key.plain_root();
    let (mut most, mut places) = (0, 0);
    for prompt in 0..30_000u32 {
        let (names, blocks) = ([name(prompt, 0)], [t.block(prompt, 0)]);
        let stored =
            Stored { tier: Tier::Gpu, parent: None, root, engine_hashes: &names, block_hashes: &blocks };
        let rank = if prompt % 3 == 0 { R1 } else { R0 };
        t.index.apply(rank, &KvEvent::Stored(stored));
        let stats = t.index.stats();
        most = most.max(stats.bytes);
        places = places.max(stats.runs);
    }
    assert!(most <= max_bytes as u64 + 1024, "{most} bytes");
    // The memory of the runs that went is used again.
    assert!(t.index.runs.places() <= places + 1, "{} places for {places} runs", t.index.runs.places());
    for rank in [R0, R1] {
        let stats = t.index.rank_stats(rank).unwrap();
        assert!(stats.truncated && stats.blocks[0] > 500, "{stats:?}");
    }
    t.index.check_invariants();
}

#[test]
fn a_full_index_drops_cold_tails_of_the_largest_rank_and_says_so() {
    let max_bytes = 1 << 20;
    let mut t = Scene::with(IndexConfig { max_bytes, ..IndexConfig::default() });
    t.store(R1, Tier::Gpu, 1, 0, 64);
    let mut overlaps = Overlaps::default();
    for chain in 0..400u32 {
        // Chain 0 stays in use.
        t.index.find(&t.prompt(0, 128), &mut overlaps);
        let names: Vec<_> = (0..128).map(|n| name(chain, n)).collect();
        let blocks: Vec<_> = (0..128).map(|n| t.block(chain, n)).collect();
        let root = t.key.plain_root();
        let event =
            Stored { tier: Tier::Gpu, parent: None, root, engine_hashes: &names, block_hashes: &blocks };
        t.index.apply(R0, &KvEvent::Stored(event));
        assert!(t.index.stats().bytes <= max_bytes as u64);
    }
    t.index.check_invariants();
    let stats = t.index.rank_stats(R0).unwrap();
    assert!(stats.truncated && stats.evicted > 20_000, "{stats:?}");
    assert!(!t.index.rank_stats(R1).unwrap().truncated);
    assert_eq!((t.gpu(R0, 0, 128), t.gpu(R0, 399, 128), t.gpu(R1, 1, 64)), (128, 128, 64));
    t.index.clear_rank(R0);
    assert!(!t.index.rank_stats(R0).unwrap().truncated);
}

#[test]
fn a_lower_limit_is_reached_with_the_events_that_come() {
    let mut t = Scene::new();
    for chain in 0..200 {
        t.store(R0, Tier::Gpu, chain, 0, 100);
    }
    let limit = t.index.stats().bytes / 2;
    t.index.set_max_bytes(usize::try_from(limit).expect("small"));
    let mut newest = 200;
    while t.index.stats().bytes > limit {
        newest += 1;
        t.store(R0, Tier::Gpu, newest, 0, 1);
        assert!(newest < 2_000, "{} of {limit} bytes", t.index.stats().bytes);
    }
    assert_eq!(t.gpu(R0, newest, 1), 1);
    t.index.check_invariants();
}

#[test]
fn a_removed_rank_is_gone_at_once_and_its_memory_after_the_sweep() {
    let mut t = Scene::new();
    t.store(R0, Tier::Gpu, 1, 0, 1000);
    t.store(R1, Tier::Gpu, 1, 0, 10);
    t.index.remove_rank(R0);
    assert_eq!((t.gpu(R0, 1, 1000), t.gpu(R1, 1, 1000)), (0, 10));
    assert_eq!(t.index.rank_stats(R0), None);
    t.index.check_invariants();
    assert!(t.index.add_rank(R0));
    t.store(R0, Tier::Gpu, 1, 0, 5);
    assert_eq!(t.gpu(R0, 1, 1000), 5);
    t.index.remove_rank(R1);
    t.index.remove_rank(R0);
    while t.index.sweep(100) {
        t.index.check_invariants();
    }
    let stats = t.index.stats();
    assert_eq!((stats.runs, stats.bytes, stats.ranks, stats.unswept), (0, 0, 0, 0));
}

#[test]
fn a_rank_that_comes_and_goes_a_thousand_times_leaves_nothing() {
    let mut t = Scene::new();
    t.index.remove_rank(R0);
    t.store(R1, Tier::Gpu, 1, 0, 300);
    let before = t.index.stats();
    for round in 0..1000 {
        assert!(t.index.add_rank(R0));
        t.store(R0, Tier::Gpu, 1, 0, 300);
        t.store(R0, Tier::Gpu, 2, 0, 1 + round % 7);
        t.store(R0, Tier::Cpu, 1, 0, 10);
        t.index.remove_rank(R0);
        // The next one may be here before all is cleaned up.
        if round % 3 == 0 {
            while t.index.sweep(100) {}
        }
    }
    while t.index.sweep(100) {}
    assert_eq!(t.gpu(R1, 1, 300), 300);
    let after = t.index.stats();
    assert_eq!(
        (after.runs, after.bytes, after.ranks, after.unswept),
        (before.runs, before.bytes, before.ranks, 0)
    );
    assert!(t.index.slots.len() < 10, "{} slots", t.index.slots.len());
    t.index.check_invariants();
}
