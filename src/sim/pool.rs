//! The blocks of device memory: which are free, in what order they are reused, and which prefix each one holds.
//!
//! Semantics of vLLM's `BlockPool`: a freed block keeps its contents until it is reused; blocks that hold no named
//! prefix are reused first, the others least recently freed first; one hash may name several blocks.

use super::events::{Event, Medium};
use crate::units::EngineHash;
use hashbrown::HashMap;
use smallvec::SmallVec;

/// A block's place in the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BlockId(u32);

/// The end of the free list, at both ends. Block 0 is never free (vLLM's null block), so its number is at hand.
const NONE: u32 = 0;

#[derive(Clone, Copy, Default)]
struct Block {
    users: u32,
    hash: Option<EngineHash>,
    previous: u32,
    next: u32,
}

pub(super) struct BlockPool {
    /// `blocks[0]` is both the null block and the ring's head: its `next` is reused first, its `previous` last.
    blocks: Vec<Block>,
    free: usize,
    /// The blocks that hold each named prefix, longest held first.
    holders: HashMap<EngineHash, SmallVec<[u32; 1]>>,
    events: Vec<Event>,
}

impl BlockPool {
    /// A pool of `blocks` blocks, of which one is set aside.
    pub(super) fn new(blocks: u32) -> Self {
        let blocks = blocks.max(2);
        let ring = (0..blocks)
            .map(|at| Block {
                previous: if at == 0 { blocks - 1 } else { at - 1 },
                next: (at + 1) % blocks,
                ..Block::default()
            })
            .collect();
        Self { blocks: ring, free: blocks as usize - 1, holders: HashMap::new(), events: Vec::new() }
    }

    /// Blocks that a request can ever have.
    pub(super) fn usable(&self) -> usize {
        self.blocks.len() - 1
    }

    pub(super) const fn free(&self) -> usize {
        self.free
    }

    /// The block that has held this prefix longest.
    pub(super) fn holder(&self, hash: EngineHash) -> Option<BlockId> {
        self.holders.get(&hash).and_then(|blocks| blocks.first()).map(|block| BlockId(*block))
    }

    pub(super) fn is_free(&self, block: BlockId) -> bool {
        self.blocks[block.0 as usize].users == 0
    }

    /// One more request uses a held block.
    pub(super) fn share(&mut self, block: BlockId) {
        if self.is_free(block) {
            self.unlink(block.0);
        }
        self.blocks[block.0 as usize].users += 1;
    }

    /// Takes the block that is due for reuse and forgets what it held; `None` when all are in use.
    pub(super) fn take(&mut self) -> Option<BlockId> {
        let block = self.blocks[NONE as usize].next;
        if block == NONE {
            return None;
        }
        self.unlink(block);
        self.forget(block);
        self.blocks[block as usize].users = 1;
        Some(BlockId(block))
    }

    /// A request gives its blocks back; the first of them that holds a prefix will be the first to be reused.
    pub(super) fn release(&mut self, blocks: impl Iterator<Item = BlockId>) {
        let mut front = NONE;
        for BlockId(block) in blocks {
            let state = &mut self.blocks[block as usize];
            state.users -= 1;
            if state.users > 0 {
                continue;
            }
            if state.hash.is_some() {
                self.link_after(self.blocks[NONE as usize].previous, block);
            } else {
                self.link_after(front, block);
                front = block;
            }
        }
    }

    /// From now on the block holds the prefix that `hash` names.
    pub(super) fn name(&mut self, block: BlockId, hash: EngineHash) {
        self.blocks[block.0 as usize].hash = Some(hash);
        self.holders.entry(hash).or_default().push(block.0);
    }

    /// Forgets all prefixes, which needs all blocks free.
    pub(super) fn reset(&mut self) -> bool {
        if self.free != self.usable() {
            return false;
        }
        self.holders.clear();
        for block in &mut self.blocks {
            block.hash = None;
        }
        self.events.push(Event::Cleared);
        true
    }

    pub(super) fn announce(&mut self, event: Event) {
        self.events.push(event);
    }

    pub(super) fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    fn forget(&mut self, block: u32) {
        let Some(hash) = self.blocks[block as usize].hash.take() else { return };
        if let Some(blocks) = self.holders.get_mut(&hash) {
            blocks.retain(|held| *held != block);
            if blocks.is_empty() {
                self.holders.remove(&hash);
            }
        }
        self.events.push(Event::Removed { block_hashes: vec![hash], medium: Medium::Gpu });
    }

    fn unlink(&mut self, block: u32) {
        let Block { previous, next, .. } = self.blocks[block as usize];
        self.blocks[previous as usize].next = next;
        self.blocks[next as usize].previous = previous;
        self.free -= 1;
    }

    fn link_after(&mut self, previous: u32, block: u32) {
        let next = self.blocks[previous as usize].next;
        self.blocks[block as usize].previous = previous;
        self.blocks[block as usize].next = next;
        self.blocks[previous as usize].next = block;
        self.blocks[next as usize].previous = block;
        self.free += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take_all(pool: &mut BlockPool) -> Vec<u32> {
        std::iter::from_fn(|| pool.take()).map(|block| block.0).collect()
    }

    #[test]
    fn block_zero_is_never_handed_out() {
        let mut pool = BlockPool::new(4);
        assert_eq!(pool.usable(), 3);
        assert_eq!(take_all(&mut pool), [1, 2, 3]);
        assert_eq!(pool.take(), None);
    }

    #[test]
    fn blocks_without_a_prefix_are_reused_before_the_others() {
        let mut pool = BlockPool::new(5);
        take_all(&mut pool);
        pool.name(BlockId(1), EngineHash(10));
        pool.name(BlockId(2), EngineHash(20));
        pool.release([4, 3, 2, 1].map(BlockId).into_iter());
        assert_eq!(take_all(&mut pool), [4, 3, 2, 1]);
        let removed = |hash| Event::Removed { block_hashes: vec![EngineHash(hash)], medium: Medium::Gpu };
        assert_eq!(pool.take_events(), [removed(20), removed(10)]);
    }

    #[test]
    fn a_shared_block_is_not_reused() {
        let mut pool = BlockPool::new(3);
        let block = pool.take().expect("a free block");
        pool.name(block, EngineHash(1));
        pool.release([block].into_iter());
        pool.share(block);
        assert_eq!(take_all(&mut pool), [2]);
        pool.release([block].into_iter());
        assert_eq!(take_all(&mut pool), [1]);
    }

    #[test]
    fn each_copy_of_a_prefix_is_removed_on_its_own() {
        let mut pool = BlockPool::new(3);
        let (first, second) = (pool.take().expect("free"), pool.take().expect("free"));
        pool.name(first, EngineHash(7));
        pool.name(second, EngineHash(7));
        pool.release([first].into_iter());
        assert_eq!(pool.holder(EngineHash(7)), Some(first));
        assert_eq!(pool.take(), Some(first));
        assert_eq!(pool.holder(EngineHash(7)), Some(second));
    }

    #[test]
    fn a_reset_is_refused_while_a_block_is_in_use() {
        let mut pool = BlockPool::new(3);
        let block = pool.take().expect("a free block");
        assert!(!pool.reset());
        pool.release([block].into_iter());
        assert!(pool.reset());
        assert_eq!(pool.take_events(), [Event::Cleared]);
    }
}
