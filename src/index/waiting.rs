//! Blocks that a rank holds but whose place in a chain is not known yet.
//!
//! Two kinds: blocks stored before their parent (an engine may announce children first, or the stream was joined
//! late), which know their tokens; and blocks that a lower tier named by hash alone, before any GPU event did.

use super::names::NameMap;
use crate::units::{BlockHash, EngineHash, Tier};

/// What a block stands behind, and its tokens' hash.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Link {
    pub(super) parent: EngineHash,
    pub(super) block: BlockHash,
}

/// One waiting block.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WaitingBlock {
    pub(super) link: Option<Link>,
    /// Physical copies in each tier.
    pub(super) copies: [u32; 3],
    /// Its neighbours in the ring of all that wait behind one parent: many may, so none is searched for.
    before: EngineHash,
    after: EngineHash,
}

/// The waiting blocks of one rank.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    blocks: NameMap<WaitingBlock>,
    /// The first of the linked blocks behind each unknown parent.
    children: NameMap<EngineHash>,
}

impl Waiting {
    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    pub(super) fn bytes(&self) -> usize {
        self.blocks.bytes() + self.children.bytes()
    }

    /// What a block waits behind; `None` where it does not, or nothing told.
    pub(super) fn link(&self, hash: EngineHash) -> Option<Link> {
        self.blocks.get(hash)?.link
    }

    pub(super) fn holds(&self, hash: EngineHash, tier: Tier) -> bool {
        self.blocks.get(hash).is_some_and(|block| block.copies[tier.index()] > 0)
    }

    /// Adds a copy of a block. A new link replaces an older one: then the hash names other tokens than before, and
    /// what was held is no longer. Returns false, and adds nothing, if that would make more than `limit` blocks.
    pub(super) fn add(&mut self, hash: EngineHash, link: Option<Link>, tier: Tier, limit: usize) -> bool {
        if self.blocks.len() >= limit && !self.blocks.contains(hash) {
            return false;
        }
        let block = self.blocks.or_insert(hash, WaitingBlock::default());
        let old = *block;
        let relinked = link.filter(|_| old.link != link);
        if relinked.is_some() {
            block.link = link;
            if old.link.is_some() {
                block.copies = [0; 3];
            }
        }
        block.copies[tier.index()] += 1;
        if let Some(link) = relinked {
            self.unlink(hash, &old);
            self.enlink(hash, link.parent);
        }
        true
    }

    /// Takes one copy away; returns whether there was one.
    pub(super) fn remove(&mut self, hash: EngineHash, tier: Tier) -> bool {
        let Some(block) = self.blocks.get_mut(hash) else { return false };
        let copies = &mut block.copies[tier.index()];
        if *copies == 0 {
            return false;
        }
        *copies -= 1;
        if block.copies == [0; 3] {
            self.take(hash);
        }
        true
    }

    /// Takes all copies in a tier away.
    pub(super) fn remove_all(&mut self, hash: EngineHash, tier: Tier) {
        if let Some(block) = self.blocks.get_mut(hash) {
            block.copies[tier.index()] = block.copies[tier.index()].min(1);
            self.remove(hash, tier);
        }
    }

    /// The names of one part of all waiting blocks, of [`PARTS`](super::names::PARTS).
    pub(super) fn names_of_part(&self, at: usize) -> impl Iterator<Item = EngineHash> {
        self.blocks.part(at).map(|(name, _)| name)
    }

    /// Frees one part's memory. Only more of it may follow.
    pub(super) fn drop_part(&mut self, at: usize) {
        self.blocks.take_part(at);
        self.children.take_part(at);
    }

    /// Takes a block out.
    pub(super) fn take(&mut self, hash: EngineHash) -> Option<WaitingBlock> {
        let block = self.blocks.remove(hash)?;
        self.unlink(hash, &block);
        Some(block)
    }

    /// Takes out one of the blocks that stand behind `parent`.
    pub(super) fn take_behind(&mut self, parent: EngineHash) -> Option<(EngineHash, WaitingBlock)> {
        let first = *self.children.get(parent)?;
        Some((first, self.take(first)?))
    }

    /// At the end of its parent's ring.
    fn enlink(&mut self, hash: EngineHash, parent: EngineHash) {
        let first = *self.children.or_insert(parent, hash);
        let last = self.blocks.get(first).filter(|_| first != hash).map_or(hash, |first| first.before);
        if let Some(block) = self.blocks.get_mut(hash) {
            (block.before, block.after) = (last, first);
        }
        if let Some(last) = self.blocks.get_mut(last) {
            last.after = hash;
        }
        if let Some(first) = self.blocks.get_mut(first) {
            first.before = hash;
        }
    }

    /// Joins the neighbours of a block as it was.
    fn unlink(&mut self, hash: EngineHash, block: &WaitingBlock) {
        let Some(Link { parent, .. }) = block.link else { return };
        if block.after == hash {
            self.children.remove(parent);
            return;
        }
        if let Some(before) = self.blocks.get_mut(block.before) {
            before.after = block.after;
        }
        if let Some(after) = self.blocks.get_mut(block.after) {
            after.before = block.before;
        }
        if let Some(first) = self.children.get_mut(parent)
            && *first == hash
        {
            *first = block.after;
        }
    }

    #[cfg(debug_assertions)]
    pub(super) fn is_linked(&self, hash: EngineHash) -> bool {
        self.blocks.get(hash).is_some_and(|block| block.link.is_some())
    }

    /// Checks both maps against each other.
    #[cfg(debug_assertions)]
    pub(super) fn check(&self) {
        let block = |name: EngineHash| self.blocks.get(name).expect("a waiting block");
        let mut linked = 0;
        for (parent, first) in self.children.iter() {
            let mut at = *first;
            loop {
                assert_eq!(block(at).link.map(|link| link.parent), Some(parent));
                linked += 1;
                let after = block(at).after;
                assert_eq!(block(after).before, at);
                at = after;
                if at == *first {
                    break;
                }
            }
        }
        assert_eq!(linked, self.blocks.iter().filter(|(_, block)| block.link.is_some()).count());
        assert!(self.blocks.iter().all(|(_, block)| block.copies != [0; 3]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take_all_behind(waiting: &mut Waiting, parent: u64) -> Vec<(u64, [u32; 3])> {
        let mut taken = Vec::new();
        while let Some((hash, block)) = waiting.take_behind(EngineHash(parent)) {
            waiting.check();
            taken.push((hash.0, block.copies));
        }
        taken
    }

    fn link(parent: u64, block: u64) -> Option<Link> {
        Some(Link { parent: EngineHash(parent), block: BlockHash(block) })
    }

    #[test]
    fn blocks_wait_behind_their_parent_and_leave_together() {
        let mut waiting = Waiting::default();
        assert!(waiting.add(EngineHash(2), link(1, 20), Tier::Gpu, 9));
        assert!(waiting.add(EngineHash(2), None, Tier::Cpu, 9));
        assert!(waiting.add(EngineHash(3), link(1, 30), Tier::Gpu, 9));
        waiting.check();
        assert_eq!(take_all_behind(&mut waiting, 1), [(2, [1, 1, 0]), (3, [1, 0, 0])]);
        assert!(waiting.is_empty());
    }

    #[test]
    fn a_waiting_block_leaves_with_its_last_copy() {
        let mut waiting = Waiting::default();
        waiting.add(EngineHash(2), link(1, 20), Tier::Gpu, 9);
        waiting.add(EngineHash(2), link(1, 20), Tier::Gpu, 9);
        assert!(waiting.remove(EngineHash(2), Tier::Gpu));
        assert!(!waiting.remove(EngineHash(2), Tier::Cpu));
        assert!(waiting.holds(EngineHash(2), Tier::Gpu));
        assert!(waiting.remove(EngineHash(2), Tier::Gpu));
        waiting.check();
        assert_eq!(take_all_behind(&mut waiting, 1), []);
    }

    #[test]
    fn other_tokens_under_the_same_hash_replace_the_old_ones() {
        let mut waiting = Waiting::default();
        waiting.add(EngineHash(2), link(1, 20), Tier::Gpu, 9);
        waiting.add(EngineHash(2), link(5, 50), Tier::Gpu, 9);
        waiting.check();
        assert_eq!(take_all_behind(&mut waiting, 1), []);
        assert_eq!(take_all_behind(&mut waiting, 5), [(2, [1, 0, 0])]);
    }

    #[test]
    fn any_of_many_siblings_may_leave_and_the_others_stay_in_order() {
        let mut rng = fastrand::Rng::with_seed(3);
        let mut waiting = Waiting::default();
        let mut left: Vec<u64> = (10..60).collect();
        left.iter().for_each(|hash| _ = waiting.add(EngineHash(*hash), link(1, *hash), Tier::Gpu, 99));
        while left.len() > 20 {
            let gone = left.remove(rng.usize(..left.len()));
            assert!(waiting.take(EngineHash(gone)).is_some());
            waiting.check();
        }
        let taken: Vec<u64> = take_all_behind(&mut waiting, 1).into_iter().map(|(hash, _)| hash).collect();
        assert_eq!(taken, left);
        // A block that claims to stand behind itself.
        waiting.add(EngineHash(7), link(7, 1), Tier::Gpu, 9);
        waiting.check();
        assert_eq!(take_all_behind(&mut waiting, 7), [(7, [1, 0, 0])]);
        assert_eq!(waiting.bytes(), 0);
    }

    #[test]
    fn the_limit_refuses_new_blocks_only() {
        let mut waiting = Waiting::default();
        assert!(waiting.add(EngineHash(1), None, Tier::Cpu, 1));
        assert!(!waiting.add(EngineHash(2), None, Tier::Cpu, 1));
        assert!(waiting.add(EngineHash(1), None, Tier::Cpu, 1));
    }
}
