//! Lanes: which blocks of one run one rank holds in one tier.
//!
//! A lane is the number of leading blocks held and, only while blocks behind a gap are held too, a bitmap of those.

use super::runs::RUN_BLOCKS;
use crate::units::Tier;

const WORDS: usize = RUN_BLOCKS / 64;
const NO_HOLES: u32 = u32::MAX;

/// Most slots an index can have: a lane's owner is two bits of tier and fourteen of slot.
pub(super) const MAX_SLOTS: usize = 1 << 14;

/// The owner of a lane: tier and slot. In this order, so that a run's lanes come tier by tier.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct LaneId(u16);

impl LaneId {
    pub(super) fn new(tier: Tier, slot: u16) -> Self {
        Self((tier.index() as u16) << 14 | slot)
    }

    pub(super) fn tier(self) -> Tier {
        match self.0 >> 14 {
            0 => Tier::Gpu,
            1 => Tier::Cpu,
            _ => Tier::Disk,
        }
    }

    pub(super) fn slot(self) -> usize {
        usize::from(self.0) % MAX_SLOTS
    }
}

/// One lane, eight bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lane {
    pub(super) id: LaneId,
    depth: u16,
    holes: u32,
}

impl Lane {
    pub(super) fn new(id: LaneId) -> Self {
        Self { id, depth: 0, holes: NO_HOLES }
    }

    /// Leading blocks held.
    pub(super) fn depth(&self) -> usize {
        usize::from(self.depth)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.depth == 0 && self.holes == NO_HOLES
    }

    pub(super) fn holds(&self, pool: &Bitmaps, at: usize) -> bool {
        at < self.depth() || pool.get(self.holes).is_some_and(|bits| bits[at / 64] >> (at % 64) & 1 == 1)
    }

    /// Consecutive blocks held from `at` on.
    pub(super) fn held_from(&self, pool: &Bitmaps, at: usize) -> usize {
        if at < self.depth() {
            return self.depth() - at;
        }
        pool.get(self.holes).map_or(0, |bits| ones_from(bits, at))
    }

    /// Adds the blocks `from..to` and returns how many of them were not held before.
    pub(super) fn insert(&mut self, pool: &mut Bitmaps, from: usize, to: usize) -> usize {
        if self.holes == NO_HOLES && from <= self.depth() {
            let added = to.saturating_sub(self.depth());
            self.depth += added as u16;
            return added;
        }
        if self.holes == NO_HOLES {
            self.holes = pool.allocate();
        }
        let bits = pool.get_mut(self.holes);
        let first = from.max(self.depth.into());
        let mut added = 0;
        for at in first..to {
            let bit = 1 << (at % 64);
            added += usize::from(bits[at / 64] & bit == 0);
            bits[at / 64] |= bit;
        }
        if from <= self.depth() {
            // The gap is closed: what stands at the depth now belongs to the leading blocks.
            let grown = ones_from(bits, self.depth.into());
            clear(bits, self.depth.into(), grown);
            self.depth += grown as u16;
            self.release_empty(pool);
        }
        added
    }

    /// Removes a block that is held.
    pub(super) fn remove(&mut self, pool: &mut Bitmaps, at: usize) {
        let depth = self.depth();
        if at >= depth {
            clear(pool.get_mut(self.holes), at, 1);
            self.release_empty(pool);
            return;
        }
        if at + 1 < depth {
            if self.holes == NO_HOLES {
                self.holes = pool.allocate();
            }
            let bits = pool.get_mut(self.holes);
            for behind in at + 1..depth {
                bits[behind / 64] |= 1 << (behind % 64);
            }
        }
        self.depth = at as u16;
    }

    /// Gives the bitmap back; the lane must not be used after.
    pub(super) fn release(&mut self, pool: &mut Bitmaps) {
        if self.holes != NO_HOLES {
            pool.release(self.holes);
            self.holes = NO_HOLES;
        }
    }

    /// Blocks held.
    #[cfg(debug_assertions)]
    pub(super) fn count(&self, pool: &Bitmaps) -> usize {
        self.depth()
            + pool.get(self.holes).map_or(0, |bits| bits.iter().map(|w| w.count_ones() as usize).sum())
    }

    fn release_empty(&mut self, pool: &mut Bitmaps) {
        if pool.get(self.holes).is_some_and(|bits| *bits == [0; WORDS]) {
            self.release(pool);
        }
    }

    /// What must hold for the lane of a run of `len` blocks.
    #[cfg(debug_assertions)]
    pub(super) fn check(&self, pool: &Bitmaps, len: usize) {
        assert!(!self.is_empty(), "an empty lane stays");
        assert!(self.depth() <= len);
        if let Some(bits) = pool.get(self.holes) {
            assert_ne!(*bits, [0; WORDS], "an empty bitmap stays");
            assert!((0..=self.depth()).all(|at| at == RUN_BLOCKS || bits[at / 64] >> (at % 64) & 1 == 0));
            assert!((len..RUN_BLOCKS).all(|at| bits[at / 64] >> (at % 64) & 1 == 0));
        }
    }
}

/// Consecutive set bits from `at` on.
fn ones_from(bits: &[u64; WORDS], at: usize) -> usize {
    let mut end = at;
    while end < RUN_BLOCKS {
        let ones = (bits[end / 64] >> (end % 64)).trailing_ones() as usize;
        end += ones;
        if ones == 0 || !end.is_multiple_of(64) {
            break;
        }
    }
    end - at
}

fn clear(bits: &mut [u64; WORDS], from: usize, count: usize) {
    for at in from..from + count {
        bits[at / 64] &= !(1 << (at % 64));
    }
}

/// The bitmaps of all lanes that have one.
#[derive(Debug, Default)]
pub(super) struct Bitmaps {
    all: Vec<[u64; WORDS]>,
    free: Vec<u32>,
}

impl Bitmaps {
    /// Bitmaps in use.
    pub(super) fn used(&self) -> usize {
        self.all.len() - self.free.len()
    }

    fn get(&self, at: u32) -> Option<&[u64; WORDS]> {
        self.all.get(at as usize)
    }

    fn get_mut(&mut self, at: u32) -> &mut [u64; WORDS] {
        &mut self.all[at as usize]
    }

    fn allocate(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.all.push([0; WORDS]);
            (self.all.len() - 1) as u32
        })
    }

    fn release(&mut self, at: u32) {
        self.all[at as usize] = [0; WORDS];
        self.free.push(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_owner_keeps_tier_and_slot_apart() {
        for tier in Tier::ALL {
            let id = LaneId::new(tier, 16_383);
            assert_eq!((id.tier(), id.slot()), (tier, 16_383));
        }
        assert!(LaneId::new(Tier::Gpu, 9) < LaneId::new(Tier::Cpu, 0));
        assert_eq!(size_of::<Lane>(), 8);
    }

    #[test]
    fn a_lane_is_the_set_of_its_blocks() {
        for seed in 0..20 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut pool = Bitmaps::default();
            let mut lane = Lane::new(LaneId::new(Tier::Gpu, 0));
            let mut model = [false; RUN_BLOCKS];
            for _ in 0..2000 {
                let from = rng.usize(..RUN_BLOCKS);
                if rng.bool() {
                    let to = (from + 1 + rng.usize(..40)).min(RUN_BLOCKS);
                    let new = model[from..to].iter().filter(|held| !**held).count();
                    assert_eq!(lane.insert(&mut pool, from, to), new);
                    model[from..to].fill(true);
                } else {
                    let count = 1 + rng.usize(..40);
                    for (at, held) in model.iter_mut().enumerate().skip(from).take(count) {
                        if std::mem::take(held) {
                            lane.remove(&mut pool, at);
                        }
                    }
                }
                if !lane.is_empty() {
                    lane.check(&pool, RUN_BLOCKS);
                }
                assert_eq!(lane.count(&pool), model.iter().filter(|held| **held).count());
                assert_eq!(lane.holds(&pool, from), model[from]);
                let leading = model[from..].iter().take_while(|held| **held).count();
                assert_eq!(lane.held_from(&pool, from), leading);
            }
            lane.release(&mut pool);
            assert_eq!(pool.used(), 0);
        }
    }
}
