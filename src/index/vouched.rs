//! Blocks whose store was missed, but which must be there: a block was stored behind them.
//!
//! An engine computes a block only where it has all blocks before it, and of one prompt gives up the last ones first. So
//! where a store stands behind a block that nothing told of, and its place in a prompt is known all the same
//! ([`Index::adopt`]), that block is held, and all before it are. Of these no removal will ever tell, as their names are not
//! known: they stand and fall with the blocks that vouch for them.

use super::Index;
use super::apply::Change;
use super::lanes::LaneId;
use super::runs::{BlockRef, Runs, Span};
use super::slot::Slot;
use crate::events::KvEvent;
use crate::units::{EngineHash, RankId, SequenceHash, Tier};
use hashbrown::HashMap;
use smallvec::SmallVec;
use std::mem;

/// Nameless blocks of one rank at most: some lost steps of a large engine. Where there would be more, none are held.
const MAX_BLOCKS: usize = 8_192;

/// Pairs of such a block and one that vouches for it, at most: one block may have many branches behind it.
const MAX_PAIRS: usize = 2 * MAX_BLOCKS;

/// The blocks of one rank that have no name.
#[derive(Debug, Default)]
pub(super) struct Vouched {
    /// A block that has got a name, or another voucher, may still be in a list.
    by_voucher: HashMap<EngineHash, Vec<BlockRef>>,
    /// A block is held as long as one of these is.
    vouchers: HashMap<u32, SmallVec<[EngineHash; 1]>>,
    /// The length of all lists together.
    pairs: usize,
}

impl Vouched {
    /// The cost of a block at its worst: an entry of a map.
    const BLOCK_BYTES: usize = 72;
    /// The same of a block that vouches.
    const VOUCHER_BYTES: usize = 96;
    /// The same of both: a place in the lists of each.
    const PAIR_BYTES: usize = 32;

    pub(super) fn is_empty(&self) -> bool {
        self.by_voucher.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.vouchers.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.vouchers.len() * Self::BLOCK_BYTES
            + self.by_voucher.len() * Self::VOUCHER_BYTES
            + self.pairs * Self::PAIR_BYTES
    }

    pub(super) fn blocks(&self) -> impl Iterator<Item = BlockRef> {
        self.vouchers.keys().map(|block| BlockRef(*block))
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    fn add(&mut self, voucher: EngineHash, blocks: &[BlockRef]) {
        for block in blocks {
            self.vouchers.entry(block.0).or_default().push(voucher);
        }
        self.by_voucher.entry(voucher).or_default().extend_from_slice(blocks);
        self.pairs += blocks.len();
    }

    /// Who vouches for a block; nobody for one that has a name.
    fn vouchers(&self, block: BlockRef) -> &[EngineHash] {
        self.vouchers.get(&block.0).map_or(&[], |vouchers| vouchers.as_slice())
    }

    /// Takes a block out; whether it was one of these.
    fn take(&mut self, block: BlockRef) -> bool {
        self.vouchers.remove(&block.0).is_some()
    }

    /// A block vouches no more. Takes out those for which nobody else does.
    fn take_all(&mut self, voucher: EngineHash) -> Vec<BlockRef> {
        let mut blocks = self.by_voucher.remove(&voucher).unwrap_or_default();
        self.pairs -= blocks.len();
        blocks.retain(|block| {
            let Some(vouchers) = self.vouchers.get_mut(&block.0) else { return false };
            let before = vouchers.len();
            vouchers.retain(|other| *other != voucher);
            // What is not its own any more is not its to end.
            let is_last = vouchers.is_empty() && vouchers.len() < before;
            if is_last {
                self.vouchers.remove(&block.0);
            }
            is_last
        });
        blocks
    }
}

impl Index {
    /// Tells what a block is that a rank holds and that stores stand behind, though its own was missed: the last one of
    /// `chain`, which are the sequence hashes of a prompt from its start. Then all of `chain` is held, and what waits behind
    /// it has its place. Returns whether that was news.
    pub fn adopt(&mut self, rank: RankId, block: EngineHash, chain: &[SequenceHash]) -> bool {
        let Some(id) = self.slot_of(rank) else { return false };
        let mut adopted = false;
        self.step_once(id, |change| adopted = change.adopt(block, chain));
        while self.unfinished {
            self.go_on(rank, &KvEvent::Cleared);
        }
        adopted
    }
}

impl Change<'_> {
    fn adopt(&mut self, mut name: EngineHash, mut chain: &[SequenceHash]) -> bool {
        // Where the block waits itself, the missing one is further up.
        while let Some(link) = self.slot.waiting.link(name) {
            let [before @ .., block] = chain else { return false };
            let Some(parent) = before.last() else { return false };
            if self.key.chain(*parent, link.block) != *block {
                return false;
            }
            (name, chain) = (link.parent, before);
        }
        if self.block(name).is_some() {
            return false;
        }
        let mut placed = mem::take(&mut self.scratch.placed);
        placed.clear();
        let refused = self.runs.place_all(None, chain, &mut placed);
        let last = placed.last().and_then(|span| span.blocks().last());
        if let Some(last) = last {
            self.runs.refer(last.run(), 1);
            if refused > 0 {
                self.runs.forget(last.run(), 1);
            } else {
                self.hold_chain(name, chain, &placed);
            }
        }
        self.scratch.placed = placed;
        refused == 0 && last.is_some()
    }

    /// `name` is the last block of `chain`, which is `placed`, and is referred to already.
    fn hold_chain(&mut self, name: EngineHash, chain: &[SequenceHash], placed: &[Span]) {
        let Some(last) = placed.last().and_then(|span| span.blocks().last()) else { return };
        self.slot.engine.insert(name.0, last.0);
        if self.take_vouched(last) {
            // One reference is enough.
            self.runs.forget(last.run(), 1);
        }
        self.hold_adopted(name, last);
        let lane = LaneId::new(Tier::Gpu, self.id);
        let before = placed.iter().flat_map(|span| span.blocks()).filter(|block| *block != last);
        let (missed, held): (Vec<BlockRef>, Vec<BlockRef>) =
            before.partition(|block| !self.runs.holds(*block, lane));
        // Of two on one way the first named block behind them stays longest. On another way any may.
        let is_before = |voucher: EngineHash| {
            self.block(voucher).is_some_and(|block| {
                chain.get(self.runs.position(block) as usize) == Some(&self.runs.hash(block))
            })
        };
        let needs_one_more = |block: &BlockRef| {
            let vouchers = self.slot.vouched.vouchers(*block);
            !vouchers.is_empty() && !vouchers.iter().any(|voucher| is_before(*voucher))
        };
        let mut nameless: Vec<BlockRef> = held.into_iter().filter(needs_one_more).collect();
        let vouched = &self.slot.vouched;
        if vouched.pairs + nameless.len() + missed.len() > MAX_PAIRS {
            nameless.clear();
        } else if vouched.len() + missed.len() <= MAX_BLOCKS {
            for block in &missed {
                self.runs.refer(block.run(), 1);
                self.runs.hold(Span::of(*block), lane, self.now);
            }
            self.slot.blocks[Tier::Gpu.index()] += missed.len() as u64;
            self.applied.stored += missed.len() as u64;
            nameless.extend(missed);
        }
        if !nameless.is_empty() {
            self.slot.vouched.add(name, &nameless);
        }
        self.release_all_behind(name);
    }

    /// The block has a name from now on, which takes over its reference. Returns whether it had none.
    pub(super) fn take_vouched(&mut self, block: BlockRef) -> bool {
        if self.slot.vouched.is_empty() || !self.slot.vouched.take(block) {
            return false;
        }
        if self.runs.release(block, LaneId::new(Tier::Gpu, self.id)) {
            self.slot.blocks[Tier::Gpu.index()] -= 1;
        }
        true
    }
}

/// The block has left the GPU tier: what it vouched for has too, for all that is known.
pub(super) fn end_vouching(runs: &mut Runs, slot: &mut Slot, id: u16, voucher: EngineHash) {
    if slot.vouched.is_empty() {
        return;
    }
    for block in slot.vouched.take_all(voucher) {
        if runs.release(block, LaneId::new(Tier::Gpu, id)) {
            slot.blocks[Tier::Gpu.index()] -= 1;
        }
        runs.forget(block.run(), 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::Stored;
    use crate::hash::HashKey;
    use crate::index::IndexConfig;
    use crate::units::TokenId;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const RANK: RankId = RankId(3);

    /// An engine whose blocks are named by the texts up to them, its index, and what became of its events.
    struct Scene {
        key: HashKey,
        index: Index,
        /// Blocks by name, with when they were last used.
        cache: BTreeMap<u64, u64>,
        uses: u64,
    }

    impl Scene {
        fn new() -> Self {
            let key = HashKey::from_seed(1);
            let mut index = Index::new(key.clone(), IndexConfig::default());
            index.add_rank(RANK);
            Self { key, index, cache: BTreeMap::new(), uses: 0 }
        }

        fn chain(&self, prompt: &[u8]) -> Vec<SequenceHash> {
            let tokens: Vec<TokenId> = prompt.iter().map(|text| TokenId((*text).into())).collect();
            self.key.sequence(self.key.plain_root(), &tokens, 1)
        }

        fn apply(&mut self, event: &KvEvent<'_>) {
            self.index.apply(RANK, event);
            self.index.check_invariants();
        }

        /// The engine stores a part of a prompt; whether the event arrives is another matter.
        fn store(&mut self, prompt: &[u8], part: std::ops::Range<usize>, arrives: bool) {
            let names: Vec<EngineHash> = part.clone().map(|at| name(&prompt[..=at])).collect();
            self.cache.extend(names.iter().map(|name| (name.0, u64::MAX)));
            if !arrives {
                return;
            }
            let texts = &prompt[part.clone()];
            let blocks: Vec<_> =
                texts.iter().map(|text| self.key.block(&[TokenId((*text).into())])).collect();
            let parent = part.start.checked_sub(1).map(|at| name(&prompt[..=at]));
            let unknown = parent.is_some_and(|parent| self.index.sequence(RANK, parent).is_none());
            let root = self.key.plain_root();
            self.apply(&KvEvent::Stored(Stored {
                tier: Tier::Gpu,
                parent,
                root,
                engine_hashes: &names,
                block_hashes: &blocks,
            }));
            if let Some(parent) = parent.filter(|_| unknown) {
                assert!(self.index.adopt(RANK, parent, &self.chain(&prompt[..part.start])));
                self.index.check_invariants();
            }
        }

        fn remove(&mut self, names: &[EngineHash]) {
            for name in names {
                self.cache.remove(&name.0);
            }
            self.apply(&KvEvent::Removed { tier: Tier::Gpu, engine_hashes: names });
        }

        fn held(&self, prompt: &[u8]) -> usize {
            (0..prompt.len()).take_while(|at| self.cache.contains_key(&name(&prompt[..=*at]).0)).count()
        }

        fn known(&self, prompt: &[u8]) -> usize {
            self.index.depth(RANK, &self.chain(prompt)) as usize
        }
    }

    fn name(prefix: &[u8]) -> EngineHash {
        EngineHash(prefix.iter().fold(1, |name, text| name * 7 + u64::from(*text) + 1))
    }

    const PROMPT: [u8; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

    #[test]
    fn what_stands_before_a_stored_block_is_held_though_its_own_store_was_missed() {
        let mut scene = Scene::new();
        scene.store(&PROMPT, 0..2, true);
        scene.store(&PROMPT, 2..5, false);
        scene.store(&PROMPT, 5..7, true);
        assert_eq!(scene.known(&PROMPT), 7);
        let stats = scene.index.rank_stats(RANK).expect("a rank");
        assert_eq!((stats.blocks[0], stats.waiting, stats.vouched), (7, 0, 2));
        assert_eq!(scene.known(&[1, 2, 3, 9]), 3, "for other prompts as well");
        scene.store(&PROMPT, 7..8, true);
        assert_eq!(scene.known(&PROMPT), 8, "the stream goes on");
    }

    #[test]
    fn it_is_held_no_longer_than_the_block_that_vouches_for_it() {
        let end_by: [fn(&mut Scene); 3] = [
            |scene| scene.remove(&[8, 7, 6, 5].map(|len| name(&PROMPT[..len]))),
            |scene| scene.apply(&KvEvent::Cleared),
            |scene| scene.index.clear_rank(RANK),
        ];
        for end in end_by {
            let mut scene = Scene::new();
            scene.store(&PROMPT, 0..2, true);
            scene.store(&PROMPT, 2..5, false);
            scene.store(&PROMPT, 5..8, true);
            end(&mut scene);
            assert!(scene.known(&PROMPT) <= 2);
            assert_eq!(scene.index.rank_stats(RANK).expect("a rank").vouched, 0);
            while scene.index.sweep(1) {}
            scene.index.check_invariants();
        }
    }

    #[test]
    fn what_is_stored_once_more_has_a_name_and_needs_nobody_to_vouch_for_it() {
        let mut scene = Scene::new();
        scene.store(&PROMPT, 0..4, false);
        scene.store(&PROMPT, 4..8, true);
        scene.store(&PROMPT, 0..2, true);
        assert_eq!(scene.index.rank_stats(RANK).expect("a rank").vouched, 1);
        scene.remove(&[8, 7, 6, 5, 4].map(|len| name(&PROMPT[..len])));
        assert_eq!(scene.known(&PROMPT), 2);
        scene.remove(&[2].map(|len| name(&PROMPT[..len])));
        assert_eq!(scene.known(&PROMPT), 1);
    }

    #[test]
    fn it_is_held_while_one_of_those_behind_it_is() {
        let mut scene = Scene::new();
        let other = [1, 9, 9];
        for prompt in [&PROMPT[..3], &other] {
            scene.store(prompt, 0..2, false);
            scene.store(prompt, 2..3, true);
        }
        let remove = |scene: &mut Scene, prompt: &[u8]| scene.remove(&[3, 2].map(|len| name(&prompt[..len])));
        remove(&mut scene, &other);
        assert_eq!((scene.known(&other), scene.known(&PROMPT)), (1, 3));
        remove(&mut scene, &PROMPT);
        assert_eq!((scene.known(&other), scene.known(&PROMPT)), (0, 0));
        assert_eq!(scene.index.rank_stats(RANK).expect("a rank").vouched, 0);
    }

    #[test]
    fn of_orphans_that_wait_the_whole_line_finds_its_place() {
        let mut scene = Scene::new();
        let blocks = [4, 5, 6, 7, 8].map(|text| scene.key.block(&[TokenId(text)]));
        // Nobody knows yet which prompt this is.
        for at in [4, 6] {
            let (names, root) = ([at, at + 1].map(|at| name(&PROMPT[..=at])), scene.key.plain_root());
            scene.apply(&KvEvent::Stored(Stored {
                tier: Tier::Gpu,
                parent: Some(name(&PROMPT[..at])),
                root,
                engine_hashes: &names,
                block_hashes: &blocks[at - 3..at - 1],
            }));
        }
        assert_eq!(scene.known(&PROMPT), 0);
        assert!(
            !scene.index.adopt(RANK, name(&PROMPT[..6]), &scene.chain(&[1, 2, 3, 4, 5, 9])),
            "other texts"
        );
        assert!(scene.index.adopt(RANK, name(&PROMPT[..6]), &scene.chain(&PROMPT[..6])));
        scene.index.check_invariants();
        assert_eq!(scene.known(&PROMPT), 8);
        assert!(!scene.index.adopt(RANK, name(&PROMPT[..6]), &scene.chain(&PROMPT[..6])), "it is known");
    }

    #[test]
    fn a_hole_beyond_the_bound_is_not_held() {
        let mut scene = Scene::new();
        let chain: Vec<SequenceHash> = (0..=MAX_BLOCKS as u64 + 1).map(SequenceHash).collect();
        assert!(scene.index.adopt(RANK, EngineHash(1), &chain));
        scene.index.check_invariants();
        assert_eq!(scene.index.depth(RANK, &chain), 0);
        assert!(scene.index.adopt(RANK, EngineHash(2), &chain[..chain.len() - 1]));
        assert_eq!(scene.index.depth(RANK, &chain), chain.len() as u32, "but one within it is");
    }

    proptest! {
        /// Prompts one after the other, computed in steps and evicted as an engine does; any stores get lost.
        #[test]
        fn nothing_is_claimed_that_is_not_held_and_all_that_a_store_stands_on_is_known(
            requests in prop::collection::vec((prop::collection::vec(0u8..3, 1..12), any::<u16>()), 1..40)
        ) {
            let mut scene = Scene::new();
            for (prompt, mut arrivals) in requests {
                let mut done = scene.held(&prompt);
                for at in 0..done {
                    scene.cache.insert(name(&prompt[..=at]).0, u64::MAX);
                }
                while done < prompt.len() {
                    let end = prompt.len().min(done + 1 + usize::from(arrivals % 3));
                    let mut idle: Vec<(u64, u64)> = scene.cache.iter().map(|(name, used)| (*used, *name)).collect();
                    idle.retain(|(used, _)| *used != u64::MAX);
                    idle.sort_unstable();
                    let wanted = (scene.cache.len() + end - done).saturating_sub(16);
                    let gone: Vec<_> = idle.iter().take(wanted).map(|(_, name)| EngineHash(*name)).collect();
                    scene.remove(&gone);
                    let arrives = arrivals & 4 > 0;
                    scene.store(&prompt, done..end, arrives);
                    (done, arrivals) = (end, arrivals.rotate_right(3));
                    if arrives {
                        prop_assert_eq!(scene.known(&prompt[..done]), done);
                    }
                    prop_assert!(scene.known(&prompt) <= scene.held(&prompt));
                }
                for len in (1..=prompt.len()).rev() {
                    scene.uses += 1;
                    scene.cache.insert(name(&prompt[..len]).0, scene.uses);
                }
                for other in [[0u8; 6], [1; 6], [2; 6], [0, 1, 0, 1, 0, 1], [2, 1, 0, 2, 1, 0]] {
                    prop_assert!(scene.known(&other) <= scene.held(&other));
                }
            }
        }
    }
}
