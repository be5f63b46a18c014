//! What a rank holds of a prompt in its GPU tier: prefixes, holes, copies, names.

use super::*;

#[test]
fn the_overlap_is_the_stored_prefix_of_each_rank() {
    let mut t = Scene::new();
    assert_eq!(t.store(R0, Tier::Gpu, 1, 0, 700).stored, 700);
    t.store(R1, Tier::Gpu, 1, 0, 300);
    assert_eq!((t.gpu(R0, 1, 800), t.gpu(R1, 1, 800)), (700, 300));
    assert_eq!((t.gpu(R0, 1, 100), t.gpu(R1, 1, 0)), (100, 0));
    assert_eq!(t.gpu(R0, 2, 100), 0);
}

#[test]
fn decode_growth_extends_the_prefix_block_by_block() {
    let mut t = Scene::new();
    t.store(R0, Tier::Gpu, 1, 0, 250);
    for at in 250..270 {
        t.store(R0, Tier::Gpu, 1, at, at + 1);
        assert_eq!(t.gpu(R0, 1, 300), at + 1);
    }
}

#[test]
fn two_continuations_of_one_prefix_do_not_mix() {
    let mut t = Scene::new();
    t.store(R0, Tier::Gpu, 1, 0, 10);
    let names: Vec<_> = (0..5).map(|n| name(9, n)).collect();
    let blocks: Vec<_> = (0..5).map(|n| t.block(9, n)).collect();
    let parent = Some(name(1, 3));
    let root = t.key.plain_root();
    let branch = Stored { tier: Tier::Gpu, parent, root, engine_hashes: &names, block_hashes: &blocks };
    t.apply(R0, KvEvent::Stored(branch));
    let mut prompt = t.prompt(1, 4);
    let mut at = prompt[3];
    for block in blocks {
        at = t.key.chain(at, block);
        prompt.push(at);
    }
    assert_eq!(t.index.depth(R0, &prompt), 9);
    assert_eq!(t.gpu(R0, 1, 20), 10);
}

#[test]
fn a_block_missing_in_the_middle_hides_what_lies_behind_until_it_is_back() {
    let mut t = Scene::new();
    t.store(R0, Tier::Gpu, 1, 0, 300);
    assert_eq!(t.remove(R0, Tier::Gpu, 1, 100).removed, 1);
    assert_eq!(t.gpu(R0, 1, 300), 100);
    t.store(R0, Tier::Gpu, 1, 100, 101);
    assert_eq!(t.gpu(R0, 1, 300), 300);
}

#[test]
fn blocks_of_one_rank_are_no_other_ranks() {
    let mut t = Scene::new();
    t.store(R0, Tier::Gpu, 1, 0, 10);
    t.store(R1, Tier::Gpu, 1, 0, 10);
    t.remove(R0, Tier::Gpu, 1, 0);
    assert_eq!((t.gpu(R0, 1, 10), t.gpu(R1, 1, 10)), (0, 10));
}

#[test]
fn a_second_copy_keeps_the_block_when_the_first_is_removed() {
    let mut t = Scene::new();
    t.store(R0, Tier::Gpu, 1, 0, 4);
    assert_eq!(t.store(R0, Tier::Gpu, 1, 3, 4).duplicates, 1);
    t.remove(R0, Tier::Gpu, 1, 3);
    assert_eq!(t.gpu(R0, 1, 4), 4);
    t.remove(R0, Tier::Gpu, 1, 3);
    assert_eq!(t.gpu(R0, 1, 4), 3);
    assert_eq!(t.remove(R0, Tier::Gpu, 1, 3).unknown, 1);
}

#[test]
fn a_prefix_announced_again_from_the_root_is_no_second_copy() {
    let mut t = Scene::new();
    t.store(R0, Tier::Gpu, 1, 0, 4);
    assert_eq!(t.store(R0, Tier::Gpu, 1, 0, 4).announced, 4);
    assert_eq!(t.store(R0, Tier::Gpu, 1, 0, 2).announced, 2);
    t.remove(R0, Tier::Gpu, 1, 3);
    assert_eq!(t.gpu(R0, 1, 4), 3);
}

#[test]
fn a_new_prompt_stored_from_the_root_over_cached_blocks_is_a_second_copy_of_those() {
    let mut t = Scene::new();
    t.store(R0, Tier::Gpu, 1, 0, 4);
    t.remove(R0, Tier::Gpu, 1, 0);
    // The first block had left, so the engine computed all four again, into new places.
    let applied = t.store(R0, Tier::Gpu, 1, 0, 4);
    assert_eq!((applied.stored, applied.duplicates), (1, 3));
    t.remove(R0, Tier::Gpu, 1, 2);
    assert_eq!(t.gpu(R0, 1, 4), 4);
}

#[test]
fn a_chain_goes_on_behind_a_known_block_even_if_the_named_parent_is_gone() {
    let mut t = Scene::new();
    t.store(R0, Tier::Gpu, 1, 0, 4);
    t.remove(R0, Tier::Gpu, 1, 2);
    // Block 2 is unknown now, block 3 is not.
    assert_eq!(t.store(R0, Tier::Gpu, 1, 3, 6).stored, 2);
    t.store(R0, Tier::Gpu, 1, 2, 3);
    assert_eq!(t.gpu(R0, 1, 6), 6);
}

#[test]
fn a_removal_before_the_store_removes_nothing_later() {
    let mut t = Scene::new();
    assert_eq!(t.remove(R0, Tier::Gpu, 1, 0).unknown, 1);
    t.store(R0, Tier::Gpu, 1, 0, 1);
    assert_eq!(t.gpu(R0, 1, 1), 1);
}

#[test]
fn a_removal_from_a_tier_that_never_held_the_block_takes_nothing_from_the_gpu() {
    let mut t = Scene::new();
    t.store(R0, Tier::Gpu, 1, 0, 3);
    assert_eq!(t.remove(R0, Tier::Cpu, 1, 1).unknown, 1);
    assert_eq!(t.gpu(R0, 1, 3), 3);
}

#[test]
fn an_engine_hash_that_returns_with_other_tokens_names_the_new_block_only() {
    let mut t = Scene::new();
    t.store(R0, Tier::Gpu, 1, 0, 3);
    let root = t.key.plain_root();
    let blocks = [t.block(7, 0)];
    let names = [name(1, 1)];
    let other = Stored { tier: Tier::Gpu, parent: None, root, engine_hashes: &names, block_hashes: &blocks };
    assert_eq!(t.apply(R0, KvEvent::Stored(other)).reused, 1);
    assert_eq!((t.gpu(R0, 1, 3), t.gpu(R0, 7, 1)), (1, 1));
    t.remove(R0, Tier::Gpu, 1, 1);
    assert_eq!(t.gpu(R0, 7, 1), 0);
}

#[test]
fn an_event_that_names_one_hash_twice_does_no_harm() {
    let mut t = Scene::new();
    let root = t.key.plain_root();
    let blocks = [t.block(1, 0), t.block(1, 1), t.block(1, 2)];
    for names in [[1, 2, 1], [1, 1, 1], [5, 5, 6]] {
        let names = names.map(EngineHash);
        let parent = Some(names[0]);
        for parent in [None, parent] {
            let event =
                Stored { tier: Tier::Gpu, parent, root, engine_hashes: &names, block_hashes: &blocks };
            t.apply(R0, KvEvent::Stored(event));
        }
        for hash in names {
            t.apply(R0, KvEvent::Removed { tier: Tier::Gpu, engine_hashes: &[hash] });
        }
    }
}

#[test]
fn an_event_whose_lists_disagree_is_counted_and_left_out() {
    let mut t = Scene::new();
    let root = t.key.plain_root();
    let (names, blocks) = ([name(1, 0), name(1, 1)], [t.block(1, 0)]);
    let event = Stored { tier: Tier::Gpu, parent: None, root, engine_hashes: &names, block_hashes: &blocks };
    assert_eq!(t.apply(R0, KvEvent::Stored(event)).malformed, 1);
    assert_eq!(t.gpu(R0, 1, 1), 0);
}

#[test]
fn an_event_of_a_rank_that_is_not_in_the_index_is_counted_and_left_out() {
    let mut t = Scene::new();
    assert_eq!(t.store(RankId(5), Tier::Gpu, 1, 0, 2).malformed, 1);
    assert_eq!(t.index.stats().blocks, [0; 3]);
}
