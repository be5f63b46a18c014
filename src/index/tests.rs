//! The index's behaviour, one rule of the engine a test (reference: vLLM's KV events).

use super::*;
use crate::events::Stored;
use crate::units::{BlockHash, EngineHash, SequenceHash, Tier, TokenId};

const R0: RankId = RankId(0);
const R1: RankId = RankId(1);

/// An index and the chains that the tests store: block `n` of chain `c` has tokens of its own.
struct Scene {
    index: Index,
    key: HashKey,
}

impl Scene {
    fn new() -> Self {
        Self::with(IndexConfig::default())
    }

    fn with(config: IndexConfig) -> Self {
        let key = HashKey::from_seed(1);
        let mut index = Index::new(key.clone(), config);
        assert!(index.add_rank(R0) && index.add_rank(R1));
        Self { index, key }
    }

    fn block(&self, chain: u32, at: u32) -> BlockHash {
        self.key.block(&[TokenId(chain), TokenId(at)])
    }

    /// The sequence hashes of blocks `0..len` of a chain.
    fn prompt(&self, chain: u32, len: u32) -> Vec<SequenceHash> {
        let mut at = self.key.plain_root();
        (0..len)
            .map(|n| {
                at = self.key.chain(at, self.block(chain, n));
                at
            })
            .collect()
    }

    fn store(&mut self, rank: RankId, tier: Tier, chain: u32, from: u32, to: u32) -> Applied {
        let parent = (from > 0).then(|| name(chain, from - 1));
        let names: Vec<_> = (from..to).map(|n| name(chain, n)).collect();
        let blocks: Vec<_> = (from..to).map(|n| self.block(chain, n)).collect();
        let root = self.key.plain_root();
        self.apply(
            rank,
            KvEvent::Stored(Stored { tier, parent, root, engine_hashes: &names, block_hashes: &blocks }),
        )
    }

    fn store_names(&mut self, rank: RankId, tier: Tier, names: &[EngineHash]) -> Applied {
        self.apply(rank, by_name(tier, names))
    }

    fn remove(&mut self, rank: RankId, tier: Tier, chain: u32, at: u32) -> Applied {
        self.apply(rank, KvEvent::Removed { tier, engine_hashes: &[name(chain, at)] })
    }

    fn apply(&mut self, rank: RankId, event: KvEvent<'_>) -> Applied {
        let applied = self.index.apply(rank, &event);
        self.index.check_invariants();
        applied
    }

    fn overlap(&self, rank: RankId, chain: u32, len: u32) -> (u32, u32, u32) {
        let mut overlaps = Overlaps::default();
        let prompt = self.prompt(chain, len);
        self.index.find(&prompt, &mut overlaps);
        let overlap = overlaps.get(rank);
        assert_eq!(self.index.depth(rank, &prompt), overlap.gpu_blocks);
        (overlap.gpu_blocks, overlap.cpu_blocks, overlap.disk_blocks)
    }

    fn gpu(&self, rank: RankId, chain: u32, len: u32) -> u32 {
        self.overlap(rank, chain, len).0
    }
}

/// A store without tokens.
fn by_name(tier: Tier, names: &[EngineHash]) -> KvEvent<'_> {
    let root = SequenceHash(0);
    KvEvent::Stored(Stored { tier, parent: None, root, engine_hashes: names, block_hashes: &[] })
}

fn name(chain: u32, at: u32) -> EngineHash {
    EngineHash(u64::from(chain) << 32 | u64::from(at) | 1 << 63)
}

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
