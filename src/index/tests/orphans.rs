//! Blocks stored before their parents.

use super::*;

#[test]
fn children_stored_before_their_parent_wait_for_it() {
    let mut t = Scene::new();
    assert_eq!(t.store(R0, Tier::Gpu, 1, 6, 9).orphaned, 3);
    assert_eq!(t.store(R0, Tier::Gpu, 1, 3, 6).orphaned, 3);
    assert_eq!(t.gpu(R0, 1, 9), 0);
    assert_eq!(t.index.rank_stats(R0).unwrap().waiting, 6);
    let applied = t.store(R0, Tier::Gpu, 1, 0, 3);
    assert_eq!((applied.released, applied.stored), (6, 9));
    assert_eq!(t.gpu(R0, 1, 9), 9);
    assert_eq!(t.index.rank_stats(R0).unwrap().waiting, 0);
}

#[test]
fn a_removed_orphan_is_a_hole_when_its_parent_comes() {
    let mut t = Scene::new();
    t.store(R0, Tier::Gpu, 1, 1, 4);
    assert_eq!(t.remove(R0, Tier::Gpu, 1, 2).removed, 1);
    t.store(R0, Tier::Gpu, 1, 0, 1);
    assert_eq!(t.gpu(R0, 1, 4), 2);
    t.store(R0, Tier::Gpu, 1, 2, 3);
    assert_eq!(t.gpu(R0, 1, 4), 4);
}

#[test]
fn orphans_announced_from_the_root_are_no_second_copies() {
    let mut t = Scene::new();
    t.store(R0, Tier::Gpu, 1, 2, 4);
    t.store(R0, Tier::Gpu, 1, 0, 4);
    assert_eq!(t.gpu(R0, 1, 4), 4);
    t.remove(R0, Tier::Gpu, 1, 3);
    assert_eq!(t.gpu(R0, 1, 4), 3);
}

#[test]
fn orphans_beyond_the_limit_are_dropped_and_counted() {
    let mut t = Scene::with(IndexConfig { max_waiting_blocks: 3, ..IndexConfig::default() });
    let applied = t.store(R0, Tier::Gpu, 1, 1, 6);
    assert_eq!((applied.orphaned, applied.dropped), (3, 2));
    assert!(t.index.rank_stats(R0).unwrap().truncated);
    t.store(R0, Tier::Gpu, 1, 0, 1);
    assert_eq!(t.gpu(R0, 1, 6), 4);
}
