//! The overlap of a prompt with every rank's cache.

use super::Index;
use super::lanes::LaneId;
use super::runs::{Head, Runs};
use crate::units::{RankId, SequenceHash, Tier};

/// How much of a prompt one rank holds, in blocks from the prompt's start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Overlap {
    /// Contiguous blocks in the GPU tier, from the first block on.
    pub gpu_blocks: u32,
    /// Contiguous blocks in the CPU tier, from where the GPU blocks end. Whole offload chunks only.
    pub cpu_blocks: u32,
    /// Contiguous blocks on disk, from where the CPU blocks end.
    pub disk_blocks: u32,
}

impl Overlap {
    /// Blocks in all tiers together.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.gpu_blocks + self.cpu_blocks + self.disk_blocks
    }
}

/// The overlaps of all ranks; made once and filled by each [`Index::find`].
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Overlaps {
    by_rank: Vec<Overlap>,
}

impl Overlaps {
    /// One rank's overlap; nothing for a rank that the index does not know.
    #[must_use]
    pub fn get(&self, rank: RankId) -> Overlap {
        self.by_rank.get(rank.index()).copied().unwrap_or_default()
    }

    /// The ranks that hold anything of the prompt.
    pub fn iter(&self) -> impl Iterator<Item = (RankId, Overlap)> {
        let known = self.by_rank.iter().zip(0u16..);
        known.filter(|(overlap, _)| overlap.blocks() > 0).map(|(overlap, rank)| (RankId(rank), *overlap))
    }
}

/// The runs along a prompt, one after the other.
struct Walk<'a> {
    runs: &'a Runs,
    hashes: &'a [SequenceHash],
    at: usize,
    last: Option<&'a Head>,
}

impl<'a> Walk<'a> {
    fn new(runs: &'a Runs, hashes: &'a [SequenceHash]) -> Self {
        Self { runs, hashes, at: 0, last: None }
    }

    /// The next run, and how many of its blocks the prompt matches.
    fn next(&mut self) -> Option<(&'a Head, usize)> {
        let first = self.hashes.get(self.at)?;
        let (head, matched) = match self.last.and_then(|last| self.runs.behind(last, self.hashes, self.at)) {
            Some(head) => (head, head.len()),
            None => {
                let (run, head) = self.runs.starting_with(*first, self.at)?;
                (head, self.runs.matched(run, head, &self.hashes[self.at..]))
            }
        };
        self.at += matched;
        self.last = Some(head);
        Some((head, matched))
    }
}

impl Index {
    /// For every rank: how much of the prompt with these sequence hashes it holds.
    ///
    /// A rank counts in a run only if it held all of the chain before it (its overlap so far ends where the run
    /// starts), so a gap ends its overlap for good. The walk ends where no rank is left.
    pub fn find(&self, hashes: &[SequenceHash], out: &mut Overlaps) {
        out.by_rank.clear();
        out.by_rank.resize(self.ranks.len(), Overlap::default());
        let now = self.clock.now();
        let mut lower_tiers = false;
        let mut walk = Walk::new(&self.runs, hashes);
        while let Some((head, matched)) = walk.next() {
            head.touch(now);
            let end = walk.at as u32;
            let start = end - matched as u32;
            let mut goes_on = false;
            for lane in head.lanes() {
                let rank = usize::from(self.owners[lane.id.slot()]);
                let Some(overlap) = out.by_rank.get_mut(rank) else { continue };
                // Lanes come tier by tier: when a lower tier's turn comes, the tiers above have been here.
                let (reached, blocks) = match lane.id.tier() {
                    Tier::Gpu => {
                        if overlap.gpu_blocks == start {
                            overlap.gpu_blocks += lane.depth().min(matched) as u32;
                            goes_on |= overlap.gpu_blocks == end;
                        }
                        continue;
                    }
                    Tier::Cpu => (overlap.gpu_blocks + overlap.cpu_blocks, &mut overlap.cpu_blocks),
                    Tier::Disk => (overlap.blocks(), &mut overlap.disk_blocks),
                };
                if (start..end).contains(&reached) {
                    let from = (reached - start) as usize;
                    let held = lane.held_from(self.runs.bitmaps(), from).min(matched - from) as u32;
                    *blocks += held;
                    goes_on |= reached + held == end;
                    lower_tiers = true;
                }
            }
            if !goes_on {
                break;
            }
        }
        if lower_tiers {
            self.round_to_chunks(out);
        }
    }

    /// How many blocks from the start of these the rank holds in its GPU tier: how far a prefill has come.
    #[must_use]
    pub fn depth(&self, rank: RankId, hashes: &[SequenceHash]) -> u32 {
        let Some(slot) = self.slot_of(rank) else { return 0 };
        let lane = LaneId::new(Tier::Gpu, slot);
        let mut depth = 0;
        let mut walk = Walk::new(&self.runs, hashes);
        while let Some((head, matched)) = walk.next() {
            let held = head.lane(lane).map_or(0, |lane| lane.depth().min(matched));
            depth += held as u32;
            if held < matched {
                break;
            }
        }
        depth
    }

    /// An engine loads whole offload chunks: what ends inside of one counts only up to that chunk's start.
    fn round_to_chunks(&self, out: &mut Overlaps) {
        for (overlap, slot) in out.by_rank.iter_mut().zip(&self.ranks) {
            if overlap.cpu_blocks + overlap.disk_blocks == 0 {
                continue;
            }
            let chunk =
                slot.and_then(|slot| self.slots[usize::from(slot)].as_ref()).map_or(1, |s| s.cpu_chunk);
            let cpu_end = overlap.gpu_blocks + overlap.cpu_blocks;
            let end = cpu_end + overlap.disk_blocks;
            let end = (end - end % chunk.max(1)).max(overlap.gpu_blocks);
            overlap.cpu_blocks = cpu_end.min(end) - overlap.gpu_blocks;
            overlap.disk_blocks = end - cpu_end.min(end);
        }
    }
}
