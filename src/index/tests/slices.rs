//! No step takes long: how much is done before readers have their turn.

use super::*;

/// Applies an event step by step; returns what each has done.
fn steps(t: &mut Scene, event: &KvEvent<'_>) -> Vec<Applied> {
    let mut steps = vec![t.index.begin(R0, event)];
    while t.index.is_unfinished() {
        t.index.check_invariants();
        steps.push(t.index.go_on(R0, event));
    }
    t.index.check_invariants();
    steps
}

#[test]
fn a_long_event_is_applied_in_slices() {
    const BLOCKS: u32 = 2000;
    let mut t = Scene::new();
    let names: Vec<_> = (0..BLOCKS).map(|n| name(1, n)).collect();
    let blocks: Vec<_> = (0..BLOCKS).map(|n| t.block(1, n)).collect();
    let root = t.key.plain_root();
    let stored = Stored { tier: Tier::Gpu, parent: None, root, engine_hashes: &names, block_hashes: &blocks };
    let from_the_end: Vec<_> = names.iter().rev().copied().collect();
    let removed = KvEvent::Removed { tier: Tier::Gpu, engine_hashes: &from_the_end };
    for event in [KvEvent::Stored(stored), removed] {
        t.index.begin(R0, &event);
        let mut slices = 1;
        while t.index.is_unfinished() {
            t.index.check_invariants();
            let held = t.gpu(R0, 1, BLOCKS);
            let step = t.index.go_on(R0, &event);
            slices += 1;
            assert_eq!(u64::from(held.abs_diff(t.gpu(R0, 1, BLOCKS))), step.stored + step.removed);
            assert!(step.stored + step.removed <= 256);
        }
        assert_eq!(slices, BLOCKS.div_ceil(256));
    }
    assert_eq!(t.gpu(R0, 1, BLOCKS), 0);
}

#[test]
fn what_a_long_store_means_is_decided_for_all_of_it() {
    let mut t = Scene::new();
    let store = |t: &mut Scene| t.store(R0, Tier::Gpu, 1, 0, 600);
    store(&mut t);
    let again = store(&mut t);
    assert_eq!((again.announced, again.duplicates), (600, 0), "a cached prefix is named again");
    t.remove(R0, Tier::Gpu, 1, 599);
    let copies = store(&mut t);
    assert_eq!((copies.announced, copies.duplicates, copies.stored), (0, 599, 1));
}

#[test]
fn a_full_index_makes_room_in_slices() {
    let max_bytes = 8 << 20;
    let mut t = Scene::with(IndexConfig { max_bytes, ..IndexConfig::default() });
    let (root, mut evicted) = (t.key.plain_root(), 0);
    for chain in 0..3000 {
        let names: Vec<_> = (0..128).map(|n| name(chain, n)).collect();
        let blocks: Vec<_> = (0..128).map(|n| t.block(chain, n)).collect();
        let stored =
            Stored { tier: Tier::Gpu, parent: None, root, engine_hashes: &names, block_hashes: &blocks };
        t.index.apply(R0, &KvEvent::Stored(stored));
        let stats = t.index.stats();
        // About an eighth of the entries that are looked at after a store of 128 blocks.
        assert!(stats.evicted - evicted < 500, "{} at once", stats.evicted - evicted);
        assert!(stats.bytes <= max_bytes as u64);
        evicted = stats.evicted;
    }
    assert!(evicted > 100_000, "{evicted}");
    t.index.check_invariants();
}

#[test]
fn a_clear_of_a_rank_with_lower_tiers_is_done_in_slices() {
    let mut t = Scene::new();
    t.store(R0, Tier::Gpu, 1, 0, 20_000);
    for at in 0..5000 {
        t.index.apply(R0, &by_name(Tier::Cpu, &[name(1, at)]));
    }
    t.store_names(R0, Tier::Cpu, &[name(2, 0)]);
    t.index.begin(R0, &KvEvent::Cleared);
    let mut slices = 0;
    while t.index.is_unfinished() {
        t.index.go_on(R0, &KvEvent::Cleared);
        slices += 1;
        if slices % 10 == 0 {
            t.index.check_invariants();
        }
    }
    assert!(slices > 64, "{slices}");
    t.index.check_invariants();
    assert_eq!(t.overlap(R0, 1, 20_000), (0, 5000, 0));
    assert_eq!(t.index.rank_stats(R0).unwrap().unconfirmed, 5001, "one waits for its place");
    // What shows that the tier was emptied drops its blocks in slices too.
    let names = [name(1, 7)];
    t.index.begin(R0, &by_name(Tier::Cpu, &names));
    let mut slices = 0;
    while t.index.is_unfinished() {
        t.index.go_on(R0, &by_name(Tier::Cpu, &names));
        slices += 1;
    }
    assert!(slices > 10, "{slices}");
    let stats = t.index.rank_stats(R0).unwrap();
    assert_eq!((stats.blocks, stats.waiting, stats.unconfirmed), ([0, 0, 0], 1, 0));
}

#[test]
fn a_long_prefix_that_is_announced_again_is_looked_at_in_slices() {
    const BLOCKS: u32 = 2000;
    let mut t = Scene::new();
    t.store(R0, Tier::Gpu, 1, 0, BLOCKS);
    let names: Vec<_> = (0..BLOCKS).map(|n| name(1, n)).collect();
    let blocks: Vec<_> = (0..BLOCKS).map(|n| t.block(1, n)).collect();
    let root = t.key.plain_root();
    let report = Stored { tier: Tier::Gpu, parent: None, root, engine_hashes: &names, block_hashes: &blocks };
    let steps = steps(&mut t, &KvEvent::Stored(report));
    let looking = steps.iter().take_while(|step| step.announced == 0).count();
    assert_eq!(looking, names.len().div_ceil(256), "as many steps to see what it means as to apply it");
    assert!(steps.iter().all(|step| step.announced <= 256));
    assert_eq!(steps.iter().map(|step| step.announced).sum::<u64>(), u64::from(BLOCKS));
}

#[test]
fn what_waited_behind_a_store_gets_its_place_in_slices() {
    const SIBLINGS: u32 = 1500;
    let mut t = Scene::new();
    // A long chain, and many that branch off where it starts, all behind one unknown block.
    t.store(R0, Tier::Gpu, 1, 1, 2000);
    let root = t.key.plain_root();
    for chain in 2..2 + SIBLINGS {
        let (names, blocks) = ([name(chain, 0), name(chain, 1)], [t.block(chain, 0), t.block(chain, 1)]);
        let parent = Some(name(1, 0));
        let orphans = Stored { tier: Tier::Gpu, parent, root, engine_hashes: &names, block_hashes: &blocks };
        t.index.apply(R0, &KvEvent::Stored(orphans));
    }
    let (names, blocks) = ([name(1, 0)], [t.block(1, 0)]);
    let first = Stored { tier: Tier::Gpu, parent: None, root, engine_hashes: &names, block_hashes: &blocks };
    let steps = steps(&mut t, &KvEvent::Stored(first));
    let released: Vec<u64> = steps.iter().map(|step| step.released).collect();
    assert!(released.iter().all(|count| *count <= 256), "{released:?}");
    assert_eq!(released.iter().sum::<u64>(), 1999 + 2 * u64::from(SIBLINGS));
    assert_eq!((t.gpu(R0, 1, 2000), t.index.rank_stats(R0).unwrap().waiting), (2000, 0));
}

#[test]
fn a_full_index_looks_at_some_hundred_blocks_at_a_time() {
    let max_bytes = 4 << 20;
    let mut t = Scene::with(IndexConfig { max_bytes, ..IndexConfig::default() });
    let (root, mut most_steps) = (t.key.plain_root(), 0);
    for chain in 0..1200 {
        let names: Vec<_> = (0..128).map(|n| name(chain, n)).collect();
        let blocks: Vec<_> = (0..128).map(|n| t.block(chain, n)).collect();
        let stored =
            Stored { tier: Tier::Gpu, parent: None, root, engine_hashes: &names, block_hashes: &blocks };
        let event = KvEvent::Stored(stored);
        let (mut steps, mut evicted) = (1, t.index.stats().evicted);
        t.index.begin(R0, &event);
        while t.index.is_unfinished() {
            let now = t.index.stats().evicted;
            assert!(now - evicted <= 320, "{} at once", now - evicted);
            evicted = now;
            t.index.go_on(R0, &event);
            steps += 1;
        }
        most_steps = most_steps.max(steps);
        assert!(t.index.stats().bytes <= max_bytes as u64);
    }
    assert!(most_steps > 3, "{most_steps}");
    assert!(t.index.stats().evicted > 20_000);
}

#[test]
fn a_long_store_that_refutes_what_was_in_doubt_is_applied_in_slices() {
    const BLOCKS: u32 = 1000;
    let mut t = Scene::new();
    t.store(R0, Tier::Gpu, 1, 0, 2 * BLOCKS);
    let names: Vec<_> = (0..2 * BLOCKS).map(|n| name(1, n)).collect();
    t.store_names(R0, Tier::Disk, &names);
    t.apply(R0, KvEvent::Cleared);
    assert_eq!(t.index.rank_stats(R0).unwrap().unconfirmed, 2 * u64::from(BLOCKS));
    t.store(R0, Tier::Gpu, 1, 0, BLOCKS);
    let steps = steps(&mut t, &by_name(Tier::Disk, &names[..BLOCKS as usize]));
    assert!(steps.iter().all(|step| step.stored <= 256));
    let stored: Vec<u64> = steps.iter().map(|step| step.stored).filter(|count| *count > 0).collect();
    assert_eq!(stored.iter().sum::<u64>(), u64::from(BLOCKS), "none of them is a second copy");
    assert!(steps.len() > 2 * stored.len(), "it was looked at before, and the others were dropped after");
    let stats = t.index.rank_stats(R0).unwrap();
    assert_eq!((stats.blocks_in(Tier::Disk), stats.unconfirmed), (u64::from(BLOCKS), 0));
}
