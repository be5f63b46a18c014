//! Blocks that a rank holds but whose place in a chain is not known yet.
//!
//! Two kinds: blocks stored before their parent (an engine may announce children first, or the stream was joined
//! late), which know their tokens; and blocks that a lower tier named by hash alone, before any GPU event did.

use crate::units::{BlockHash, EngineHash, Tier};
use hashbrown::HashMap;
use smallvec::SmallVec;

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
}

/// The waiting blocks of one rank.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    blocks: HashMap<EngineHash, WaitingBlock>,
    /// The linked blocks behind each unknown parent.
    children: HashMap<EngineHash, SmallVec<[EngineHash; 2]>>,
}

impl Waiting {
    /// A block's cost at its worst: both maps at their lowest fill.
    const BLOCK_BYTES: usize = 160;

    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    pub(super) fn bytes(&self) -> usize {
        self.blocks.len() * Self::BLOCK_BYTES
    }

    pub(super) fn holds(&self, hash: EngineHash, tier: Tier) -> bool {
        self.blocks.get(&hash).is_some_and(|block| block.copies[tier.index()] > 0)
    }

    /// Adds a copy of a block. A new link replaces an older one: then the hash names other tokens than before, and
    /// what was held is no longer. Returns false, and adds nothing, if that would make more than `limit` blocks.
    pub(super) fn add(&mut self, hash: EngineHash, link: Option<Link>, tier: Tier, limit: usize) -> bool {
        if self.blocks.len() >= limit && !self.blocks.contains_key(&hash) {
            return false;
        }
        let block = self.blocks.entry(hash).or_default();
        let relinked = link.filter(|_| block.link != link);
        let old = relinked.and_then(|link| block.link.replace(link));
        if old.is_some() {
            block.copies = [0; 3];
        }
        block.copies[tier.index()] += 1;
        if let Some(old) = old {
            self.unlink(old.parent, hash);
        }
        if let Some(link) = relinked {
            self.children.entry(link.parent).or_default().push(hash);
        }
        true
    }

    /// Takes one copy away; returns whether there was one.
    pub(super) fn remove(&mut self, hash: EngineHash, tier: Tier) -> bool {
        let Some(block) = self.blocks.get_mut(&hash) else { return false };
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

    /// The names of all waiting blocks.
    pub(super) fn names(&self) -> impl Iterator<Item = EngineHash> {
        self.blocks.keys().copied()
    }

    /// Takes a block out.
    pub(super) fn take(&mut self, hash: EngineHash) -> Option<WaitingBlock> {
        let block = self.blocks.remove(&hash)?;
        if let Some(link) = block.link {
            self.unlink(link.parent, hash);
        }
        Some(block)
    }

    /// Takes out all blocks that stand behind `parent`.
    pub(super) fn take_behind(&mut self, parent: EngineHash) -> Vec<(EngineHash, WaitingBlock)> {
        let children = self.children.remove(&parent).unwrap_or_default();
        children.into_iter().filter_map(|hash| Some((hash, self.blocks.remove(&hash)?))).collect()
    }

    fn unlink(&mut self, parent: EngineHash, hash: EngineHash) {
        if let Some(children) = self.children.get_mut(&parent) {
            children.retain(|child| *child != hash);
            if children.is_empty() {
                self.children.remove(&parent);
            }
        }
    }

    #[cfg(debug_assertions)]
    pub(super) fn is_linked(&self, hash: EngineHash) -> bool {
        self.blocks.get(&hash).is_some_and(|block| block.link.is_some())
    }

    /// Checks both maps against each other.
    #[cfg(debug_assertions)]
    pub(super) fn check(&self) {
        let mut linked = 0;
        for (parent, children) in &self.children {
            assert!(!children.is_empty());
            for child in children {
                assert_eq!(self.blocks[child].link.map(|link| link.parent), Some(*parent));
                linked += 1;
            }
        }
        assert_eq!(linked, self.blocks.values().filter(|block| block.link.is_some()).count());
        assert!(self.blocks.values().all(|block| block.copies != [0; 3]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let out = waiting.take_behind(EngineHash(1));
        assert_eq!(
            out.iter().map(|(hash, block)| (hash.0, block.copies)).collect::<Vec<_>>(),
            [(2, [1, 1, 0]), (3, [1, 0, 0])]
        );
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
        assert!(waiting.take_behind(EngineHash(1)).is_empty());
    }

    #[test]
    fn other_tokens_under_the_same_hash_replace_the_old_ones() {
        let mut waiting = Waiting::default();
        waiting.add(EngineHash(2), link(1, 20), Tier::Gpu, 9);
        waiting.add(EngineHash(2), link(5, 50), Tier::Gpu, 9);
        waiting.check();
        assert!(waiting.take_behind(EngineHash(1)).is_empty());
        let out = waiting.take_behind(EngineHash(5));
        assert_eq!((out.len(), out[0].1.copies), (1, [1, 0, 0]));
    }

    #[test]
    fn the_limit_refuses_new_blocks_only() {
        let mut waiting = Waiting::default();
        assert!(waiting.add(EngineHash(1), None, Tier::Cpu, 1));
        assert!(!waiting.add(EngineHash(2), None, Tier::Cpu, 1));
        assert!(waiting.add(EngineHash(1), None, Tier::Cpu, 1));
    }
}
