//! Lower tiers: what they add to a prefix, and whose blocks theirs are.

use super::*;

#[test]
fn cpu_blocks_extend_the_gpu_prefix_and_disk_blocks_the_cpu_prefix() {
    let mut t = Scene::new();
    t.store(R0, Tier::Gpu, 1, 0, 300);
    for at in 0..280 {
        t.store_names(R0, Tier::Cpu, &[name(1, at)]);
    }
    for at in 270..300 {
        t.store_names(R0, Tier::Disk, &[name(1, at)]);
    }
    assert_eq!(t.overlap(R0, 1, 300), (300, 0, 0));
    for at in 200..300 {
        t.remove(R0, Tier::Gpu, 1, at);
    }
    assert_eq!(t.overlap(R0, 1, 300), (200, 80, 20));
    assert_eq!(t.overlap(R0, 1, 290), (200, 80, 10));
    t.remove(R0, Tier::Cpu, 1, 250);
    assert_eq!(t.overlap(R0, 1, 300), (200, 50, 0));
}

#[test]
fn gpu_blocks_behind_a_cpu_extension_do_not_count() {
    let mut t = Scene::new();
    t.store(R0, Tier::Gpu, 1, 0, 9);
    t.store_names(R0, Tier::Cpu, &[name(1, 3)]);
    t.remove(R0, Tier::Gpu, 1, 3);
    assert_eq!(t.overlap(R0, 1, 9), (3, 1, 0));
}

#[test]
fn a_cpu_block_takes_its_identity_from_the_gpu_event_whatever_its_own_chain_says() {
    let mut t = Scene::new();
    // The GPU event knew the salt; the CPU event of the same blocks tells tokens and parents but no salt.
    let salted = t.key.root(None, Some("salt"));
    let names = [name(1, 0), name(1, 1)];
    let blocks = [t.block(1, 0), t.block(1, 1)];
    let gpu =
        Stored { tier: Tier::Gpu, parent: None, root: salted, engine_hashes: &names, block_hashes: &blocks };
    t.apply(R0, KvEvent::Stored(gpu));
    t.store(R0, Tier::Cpu, 1, 1, 2);
    t.store(R0, Tier::Cpu, 1, 0, 1);
    t.apply(R0, KvEvent::Removed { tier: Tier::Gpu, engine_hashes: &names });
    assert_eq!(t.overlap(R0, 1, 2), (0, 0, 0));
    let first = t.key.chain(salted, blocks[0]);
    let mut overlaps = Overlaps::default();
    t.index.find(&[first, t.key.chain(first, blocks[1])], &mut overlaps);
    assert_eq!(overlaps.get(R0).cpu_blocks, 2);
}

#[test]
fn a_cpu_block_that_no_gpu_event_named_is_not_scored_until_one_does() {
    let mut t = Scene::new();
    assert_eq!(t.store(R0, Tier::Cpu, 1, 0, 1).unscored, 1);
    assert_eq!(t.overlap(R0, 1, 1), (0, 0, 0));
    assert_eq!(t.index.rank_stats(R0).unwrap().waiting, 1);
    t.store(R0, Tier::Gpu, 1, 0, 1);
    t.remove(R0, Tier::Gpu, 1, 0);
    assert_eq!(t.overlap(R0, 1, 1), (0, 1, 0));
}

#[test]
fn a_cpu_store_that_comes_after_the_gpu_removal_is_still_joined() {
    let mut t = Scene::with(IndexConfig { max_ghost_blocks: 2, ..IndexConfig::default() });
    t.store(R0, Tier::Gpu, 1, 0, 4);
    t.store_names(R0, Tier::Cpu, &[name(1, 0)]);
    for at in [3, 2, 1, 0] {
        t.remove(R0, Tier::Gpu, 1, at);
    }
    assert_eq!(t.index.rank_stats(R0).unwrap().ghosts, 2);
    t.store_names(R0, Tier::Cpu, &[name(1, 1)]);
    t.store_names(R0, Tier::Cpu, &[name(1, 2)]);
    assert_eq!(t.overlap(R0, 1, 4), (0, 3, 0));
    // The oldest ghost is forgotten: its block waits for a GPU event.
    assert_eq!(t.store_names(R0, Tier::Cpu, &[name(1, 3)]).unscored, 1);
}

#[test]
fn cpu_credit_is_rounded_down_to_whole_offload_chunks() {
    let mut t = Scene::new();
    t.store(R0, Tier::Gpu, 1, 0, 7);
    for at in [0, 2, 4] {
        t.store(R0, Tier::Cpu, 1, at, at + 2);
    }
    // Half of another continuation's chunk: not retrievable for this one.
    t.store(R0, Tier::Gpu, 2, 0, 1);
    t.store_names(R0, Tier::Cpu, &[name(1, 6), name(2, 0)]);
    assert_eq!(t.index.rank_stats(R0).unwrap().cpu_chunk_blocks, 2);
    for at in (0..7).rev() {
        t.remove(R0, Tier::Gpu, 1, at);
    }
    assert_eq!(t.overlap(R0, 1, 7), (0, 6, 0));
    t.store(R0, Tier::Gpu, 1, 0, 1);
    assert_eq!(t.overlap(R0, 1, 7), (1, 5, 0));
    assert_eq!(t.overlap(R0, 1, 2), (1, 1, 0));
}

#[test]
fn rounding_never_takes_gpu_blocks() {
    let mut t = Scene::new();
    t.store(R0, Tier::Gpu, 1, 0, 4);
    t.store(R0, Tier::Cpu, 1, 0, 4);
    t.remove(R0, Tier::Gpu, 1, 3);
    t.remove(R0, Tier::Cpu, 1, 0);
    assert_eq!(t.overlap(R0, 1, 4), (3, 1, 0));
    t.remove(R0, Tier::Cpu, 1, 3);
    assert_eq!(t.overlap(R0, 1, 4), (3, 0, 0));
}
