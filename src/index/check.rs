//! What must hold between the parts of an index. Only in debug builds.

use super::lanes::LaneId;
use super::runs::BlockRef;
use super::slot::Slot;
use super::sweep::Sweep;
use super::{Index, NO_RANK};
use crate::units::{EngineHash, Tier};
use std::collections::HashSet;

impl Index {
    /// Panics unless every part of the index agrees with every other. Slow; debug builds only.
    pub fn check_invariants(&self) {
        let entries = self.slots.iter().flatten().flat_map(|slot| slot.engine.iter());
        let swept = self.sweep.iter().flat_map(Sweep::pending);
        let vouched = self.slots.iter().flatten().flat_map(|slot| slot.vouched.blocks());
        self.runs.check(entries.map(|entry| BlockRef(entry.value)).chain(vouched).chain(swept));
        for (id, slot) in self.slots.iter().enumerate() {
            let Some(slot) = slot else {
                assert!(self.free_slots.contains(&(id as u16)));
                assert_eq!(self.owners[id], NO_RANK);
                continue;
            };
            let dead = self.dead.contains(&(id as u16));
            assert_eq!(dead, self.owners[id] == NO_RANK);
            if !dead {
                assert_eq!(self.ranks[usize::from(self.owners[id])], Some(id as u16));
                self.check_slot(id as u16, slot);
            }
        }
        let slot_bytes: usize = self.slots.iter().flatten().map(Slot::bytes).sum();
        assert_eq!(self.slot_bytes, slot_bytes);
    }

    fn check_slot(&self, id: u16, slot: &Slot) {
        slot.waiting.check();
        assert!(slot.waiting.len() <= self.config.max_waiting_blocks);
        assert!(slot.ghosts.len() <= self.config.max_ghost_blocks);
        assert!(slot.copies.iter().all(|(_, counts)| *counts != [0; 3]));
        let ghosts: HashSet<EngineHash> = slot.ghosts.iter().copied().collect();
        let mut named = HashSet::new();
        for entry in slot.engine.iter() {
            let (hash, block) = (EngineHash(entry.key), BlockRef(entry.value));
            assert!(!slot.waiting.is_linked(hash), "a block both waits and has its place");
            assert!(self.runs.holds_any(block, id) || ghosts.contains(&hash), "an entry that names nothing");
            named.insert(block.0);
        }
        assert_eq!(slot.engine.len(), slot.engine.iter().count());
        for block in slot.vouched.blocks() {
            assert!(self.runs.holds(block, LaneId::new(Tier::Gpu, id)), "vouched for, but not held");
            assert!(named.insert(block.0), "a block that has a name needs nobody to vouch for it");
        }
        for tier in Tier::ALL {
            let held = named.iter().filter(|b| self.runs.holds(BlockRef(**b), LaneId::new(tier, id))).count();
            assert_eq!(slot.blocks[tier.index()], held as u64, "{tier:?} blocks are miscounted");
            // Every block of the lanes has a name, or a block that vouches for it.
            assert_eq!(self.runs.lane_blocks(LaneId::new(tier, id)), held);
        }
    }
}
