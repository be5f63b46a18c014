//! Clears, and what they leave in doubt.

use super::*;

#[test]
fn a_clear_empties_the_rank_and_no_other() {
    let mut t = Scene::new();
    t.store(R0, Tier::Gpu, 1, 0, 300);
    t.store(R0, Tier::Gpu, 2, 5, 6);
    t.store(R1, Tier::Gpu, 1, 0, 300);
    assert_eq!(t.apply(R0, KvEvent::Cleared).cleared, 1);
    assert_eq!((t.gpu(R0, 1, 300), t.gpu(R1, 1, 300)), (0, 300));
    assert_eq!(t.index.rank_stats(R0).unwrap().waiting, 0);
    t.store(R0, Tier::Gpu, 1, 0, 10);
    assert_eq!(t.gpu(R0, 1, 300), 10);
}

#[test]
fn a_clear_forgets_copies() {
    let mut t = Scene::new();
    t.store(R0, Tier::Gpu, 1, 0, 2);
    t.store(R0, Tier::Gpu, 1, 1, 2);
    t.apply(R0, KvEvent::Cleared);
    t.store(R0, Tier::Gpu, 1, 0, 2);
    t.remove(R0, Tier::Gpu, 1, 1);
    assert_eq!(t.gpu(R0, 1, 2), 1);
}

/// Two blocks on the GPU and the CPU, then a clear.
fn cleared_with_a_cpu_tier() -> Scene {
    let mut t = Scene::new();
    t.store(R0, Tier::Gpu, 1, 0, 3);
    for at in 0..2 {
        t.store(R0, Tier::Cpu, 1, at, at + 1);
    }
    t.apply(R0, KvEvent::Cleared);
    assert_eq!(t.overlap(R0, 1, 3), (0, 2, 0));
    assert_eq!(t.index.rank_stats(R0).unwrap().unconfirmed, 2);
    t
}

#[test]
fn a_clear_leaves_the_lower_tiers_in_doubt_and_an_eviction_confirms_them() {
    let mut t = cleared_with_a_cpu_tier();
    t.remove(R0, Tier::Cpu, 1, 1);
    assert_eq!(t.overlap(R0, 1, 3), (0, 1, 0));
    assert_eq!(t.index.rank_stats(R0).unwrap().unconfirmed, 0);
}

#[test]
fn a_chunk_stored_again_after_a_clear_shows_that_the_lower_tier_was_emptied() {
    let mut t = cleared_with_a_cpu_tier();
    t.store(R0, Tier::Gpu, 2, 0, 1);
    t.store(R0, Tier::Cpu, 2, 0, 1);
    t.store(R0, Tier::Gpu, 1, 0, 1);
    t.store(R0, Tier::Cpu, 1, 0, 1);
    assert_eq!(t.index.rank_stats(R0).unwrap().unconfirmed, 0);
    t.remove(R0, Tier::Gpu, 1, 0);
    assert_eq!(t.overlap(R0, 1, 3), (0, 1, 0));
    assert_eq!(t.overlap(R0, 2, 1), (1, 0, 0));
    t.remove(R0, Tier::Gpu, 2, 0);
    assert_eq!(t.overlap(R0, 2, 1), (0, 1, 0), "stored after the clear");
    t.remove(R0, Tier::Cpu, 1, 0);
    assert_eq!(t.overlap(R0, 1, 3), (0, 0, 0), "no second copy");
}

#[test]
fn a_reload_that_nothing_follows_confirms_the_cpu_tier() {
    let mut t = cleared_with_a_cpu_tier();
    t.store(R0, Tier::Gpu, 1, 0, 2);
    let mut batches = 0;
    while t.index.rank_stats(R0).unwrap().unconfirmed > 0 {
        t.index.end_batch(R0);
        batches += 1;
        assert!(batches < 100);
    }
    assert!(batches > 1, "the copies need time");
    t.index.check_invariants();
}

#[test]
fn loads_that_the_engine_counts_confirm_the_cpu_tier_unless_they_may_be_of_other_blocks() {
    let mut t = cleared_with_a_cpu_tier();
    t.store(R0, Tier::Gpu, 2, 0, 1);
    t.store(R0, Tier::Cpu, 2, 0, 1);
    t.store(R0, Tier::Gpu, 1, 0, 2);
    t.index.see_loads(R0);
    assert_eq!(t.index.rank_stats(R0).unwrap().unconfirmed, 0);
    let mut t = cleared_with_a_cpu_tier();
    t.store(R0, Tier::Gpu, 2, 0, 1);
    t.store(R0, Tier::Cpu, 2, 0, 1);
    t.remove(R0, Tier::Gpu, 2, 0);
    t.store(R0, Tier::Gpu, 2, 0, 1);
    t.index.see_loads(R0);
    assert_eq!(t.index.rank_stats(R0).unwrap().unconfirmed, 2, "stored after the clear, evicted and loaded");
    t.index.check_invariants();
}
