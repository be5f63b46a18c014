//! The index against a model that keeps plain sets: random events, the same answers.
//!
//! `KVSPOA_MODEL_SEEDS` sets the number of seeds (default 1), each of 20,000 steps. `scripts/test` runs 40, optimised and
//! with all debug assertions: `KVSPOA_MODEL_SEEDS=40 cargo test --manifest-path bench/index/Cargo.toml`.

use kvspoa::events::{KvEvent, Stored};
use kvspoa::hash::HashKey;
use kvspoa::index::{Index, IndexConfig, Overlap, Overlaps};
use kvspoa::units::{BlockHash, EngineHash, RankId, SequenceHash, Tier, TokenId};
use std::collections::{BTreeSet, VecDeque};

const RANKS: u16 = 5;
const STEPS: usize = 20_000;
const MAX_NODES: usize = 3_000;
const GHOSTS: usize = 40;

/// A block in the tree of all prompts.
struct Node {
    parent: Option<usize>,
    block: BlockHash,
    sequence: SequenceHash,
}

/// All prompts ever seen.
struct Tree {
    key: HashKey,
    nodes: Vec<Node>,
}

impl Tree {
    fn grow(&mut self, mut parent: Option<usize>, count: usize) {
        for _ in 0..count {
            let block = self.key.block(&[TokenId(self.nodes.len() as u32)]);
            let before = parent.map_or(self.key.plain_root(), |at| self.nodes[at].sequence);
            let sequence = self.key.chain(before, block);
            self.nodes.push(Node { parent, block, sequence });
            parent = Some(self.nodes.len() - 1);
        }
    }

    fn path(&self, node: usize) -> Vec<usize> {
        let mut path: Vec<usize> = std::iter::successors(Some(node), |at| self.nodes[*at].parent).collect();
        path.reverse();
        path
    }
}

/// What one rank holds, by the rules and nothing else.
struct RankModel {
    /// Physical copies in each tier.
    copies: Vec<[u32; 3]>,
    /// Blocks whose chain is known from its start on.
    located: Vec<bool>,
    /// Blocks that told their parent but are not located.
    linked: BTreeSet<usize>,
    ghosts: VecDeque<usize>,
    chunk: u32,
    /// Copies in lower tiers that the last clear may have taken.
    doubt: BTreeSet<(usize, usize)>,
}

impl Default for RankModel {
    fn default() -> Self {
        Self {
            copies: vec![[0; 3]; MAX_NODES],
            located: vec![false; MAX_NODES],
            linked: BTreeSet::new(),
            ghosts: VecDeque::new(),
            chunk: 0,
            doubt: BTreeSet::new(),
        }
    }
}

impl RankModel {
    fn held(&self, node: usize, tier: usize) -> bool {
        self.copies[node][tier] > 0
    }

    fn held_anywhere(&self, node: usize) -> bool {
        self.copies[node] != [0; 3]
    }

    fn has_lower_tiers(&self) -> bool {
        self.chunk > 0 || (0..MAX_NODES).any(|at| self.located[at] && self.copies[at][1..] != [0, 0])
    }

    fn store(&mut self, tree: &Tree, path: &[usize], from: usize) {
        let announced = from == 0 && path.iter().all(|node| self.held(*node, 0));
        let mut known = from == 0 || tree.nodes[path[from]].parent.is_some_and(|parent| self.located[parent]);
        for node in &path[from..] {
            let located = self.located[*node];
            let waiting = !located && self.held(*node, 0);
            known |= located;
            if !(announced && located || waiting && from == 0) {
                self.copies[*node][0] += 1;
            }
            if known {
                self.located[*node] = true;
                self.linked.remove(node);
            } else {
                self.linked.insert(*node);
            }
        }
        loop {
            let ready = self
                .linked
                .iter()
                .find(|at| tree.nodes[**at].parent.is_some_and(|parent| self.located[parent]));
            let Some(ready) = ready.copied() else { break };
            self.linked.remove(&ready);
            self.located[ready] = true;
        }
    }

    fn store_names(&mut self, nodes: &[usize], tier: usize) {
        if tier == 1 {
            self.chunk = (1..=nodes.len() as u32)
                .rev()
                .find(|d| self.chunk.is_multiple_of(*d) && (nodes.len() as u32).is_multiple_of(*d))
                .unwrap_or(1);
        }
        if !self.doubt.is_empty() && nodes.iter().all(|node| self.doubt.contains(&(*node, tier))) {
            self.drop_doubted(tier);
        }
        for node in nodes {
            self.copies[*node][tier] += 1;
        }
    }

    /// The GPU tier is empty; what lower tiers hold is in doubt.
    fn clear(&mut self) {
        self.ghosts.clear();
        self.doubt.clear();
        for node in 0..MAX_NODES {
            self.copies[node][0] = 0;
            for tier in 1..3 {
                if self.held(node, tier) {
                    self.doubt.insert((node, tier));
                }
            }
            if !self.held_anywhere(node) {
                self.located[node] = false;
                self.linked.remove(&node);
            }
        }
    }

    fn drop_doubted(&mut self, tier: usize) {
        let (gone, kept) = std::mem::take(&mut self.doubt).into_iter().partition(|(_, other)| *other == tier);
        self.doubt = kept;
        let gone: BTreeSet<(usize, usize)> = gone;
        for (node, _) in gone {
            self.copies[node][tier] = 0;
            if !self.held_anywhere(node) {
                self.located[node] = false;
                self.linked.remove(&node);
            }
        }
    }

    fn remove(&mut self, node: usize, tier: usize) {
        if self.doubt.contains(&(node, tier)) {
            self.doubt.retain(|(_, other)| *other != tier);
        }
        self.copies[node][tier] = self.copies[node][tier].saturating_sub(1);
        if self.held_anywhere(node) {
            return;
        }
        self.linked.remove(&node);
        if !self.located[node] {
            return;
        }
        if !(self.has_lower_tiers() && tier == 0) {
            self.located[node] = false;
            return;
        }
        self.ghosts.push_back(node);
        if self.ghosts.len() > GHOSTS
            && let Some(oldest) = self.ghosts.pop_front()
            && !self.held_anywhere(oldest)
        {
            self.located[oldest] = false;
        }
    }

    fn overlap(&self, path: &[usize]) -> Overlap {
        let mut ends = [0u32; 3];
        let mut at = 0;
        for (tier, end) in ends.iter_mut().enumerate() {
            while path.get(at).is_some_and(|node| self.held(*node, tier) && self.located[*node]) {
                at += 1;
            }
            *end = at as u32;
        }
        let end = (ends[2] - ends[2] % self.chunk.max(1)).max(ends[0]);
        let cpu_end = ends[1].min(end);
        Overlap { gpu_blocks: ends[0], cpu_blocks: cpu_end - ends[0], disk_blocks: end - cpu_end }
    }
}

/// What the checks saw, so that a test which compares nothing but zeros fails.
#[derive(Default, Debug)]
struct Seen {
    checks: u32,
    overlapping: u32,
    partial: u32,
    lower: u32,
    behind_a_hole: u32,
}

struct World {
    rng: fastrand::Rng,
    tree: Tree,
    index: Index,
    ranks: Vec<RankModel>,
    /// Whether the index may know less than the model.
    bounded: bool,
    overlaps: Overlaps,
    seen: Seen,
}

impl World {
    fn new(seed: u64, config: IndexConfig) -> Self {
        let key = HashKey::from_seed(seed);
        let bounded = config.max_bytes < IndexConfig::default().max_bytes;
        let mut index = Index::new(key.clone(), config);
        for rank in 0..RANKS {
            assert!(index.add_rank(RankId(rank)));
        }
        let mut tree = Tree { key, nodes: Vec::new() };
        tree.grow(None, 250);
        tree.grow(Some(249), 60);
        Self {
            rng: fastrand::Rng::with_seed(seed),
            tree,
            index,
            ranks: (0..RANKS).map(|_| RankModel::default()).collect(),
            bounded,
            overlaps: Overlaps::default(),
            seen: Seen::default(),
        }
    }

    fn name(rank: usize, node: usize) -> EngineHash {
        EngineHash((node as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (rank as u64) << 60)
    }

    fn names(rank: usize, nodes: &[usize]) -> Vec<EngineHash> {
        nodes.iter().map(|node| Self::name(rank, *node)).collect()
    }

    fn apply(&mut self, rank: usize, event: &KvEvent<'_>) {
        self.index.apply(RankId(rank as u16), event);
    }

    /// The path to a node, more often to a late one.
    fn path(&mut self) -> Vec<usize> {
        let node = self.pick();
        self.tree.path(node)
    }

    fn pick(&mut self) -> usize {
        let count = self.tree.nodes.len();
        if self.rng.u8(..4) > 0 {
            count - 1 - self.rng.usize(..count.min(400))
        } else {
            self.rng.usize(..count)
        }
    }

    fn store(&mut self, rank: usize) {
        let mut path = self.path();
        let held = self.ranks[rank].overlap(&path).gpu_blocks as usize;
        let from = match self.rng.u8(..10) {
            0 => 0,
            1..=3 => self.rng.usize(..path.len()),
            _ => held.saturating_sub(self.rng.usize(..2)).min(path.len() - 1),
        };
        let count = if self.rng.bool() { 1 + self.rng.usize(..4) } else { path.len() };
        path.truncate(from + count);
        let names = Self::names(rank, &path[from..]);
        let blocks: Vec<BlockHash> = path[from..].iter().map(|node| self.tree.nodes[*node].block).collect();
        let stored = Stored {
            tier: Tier::Gpu,
            parent: self.tree.nodes[path[from]].parent.map(|parent| Self::name(rank, parent)),
            root: self.tree.key.plain_root(),
            engine_hashes: &names,
            block_hashes: &blocks,
        };
        self.apply(rank, &KvEvent::Stored(stored));
        self.ranks[rank].store(&self.tree, &path, from);
    }

    fn store_names(&mut self, rank: usize) {
        let tier = if self.rng.u8(..4) == 0 { Tier::Disk } else { Tier::Cpu };
        let path = self.path();
        let at = self.rng.usize(..path.len());
        for nodes in path[at..].chunks_exact(1 + rank % 3).take(1 + self.rng.usize(..20)) {
            let names = Self::names(rank, nodes);
            // Whether tokens come along or not makes no difference.
            let blocks: Vec<_> = nodes.iter().map(|node| self.tree.nodes[*node].block).collect();
            let stored = Stored {
                tier,
                parent: None,
                root: self.tree.key.plain_root(),
                engine_hashes: &names,
                block_hashes: if self.rng.bool() { &blocks } else { &[] },
            };
            self.apply(rank, &KvEvent::Stored(stored));
            self.ranks[rank].store_names(nodes, tier.index());
        }
    }

    fn remove(&mut self, rank: usize) {
        let path = self.path();
        let nodes = match self.rng.u8(..3) {
            // A tail, last block first, as an engine does; else one block anywhere.
            0 | 1 => path[self.rng.usize(..path.len())..].iter().rev().copied().collect(),
            _ => vec![path[self.rng.usize(..path.len())]],
        };
        let tier = match self.rng.u8(..16) {
            0 => Tier::Disk,
            1 => Tier::Cpu,
            _ => Tier::Gpu,
        };
        let names = Self::names(rank, &nodes);
        self.apply(rank, &KvEvent::Removed { tier, engine_hashes: &names });
        for node in nodes {
            self.ranks[rank].remove(node, tier.index());
        }
    }

    fn reset(&mut self, rank: usize) {
        let id = RankId(rank as u16);
        match self.rng.u8(..3) {
            0 => {
                self.apply(rank, &KvEvent::Cleared);
                self.ranks[rank].clear();
                return;
            }
            1 => self.index.clear_rank(id),
            _ => {
                self.index.remove_rank(id);
                assert!(self.index.add_rank(id));
            }
        }
        self.ranks[rank] = RankModel::default();
    }

    fn check(&mut self) {
        let mut path = self.path();
        path.truncate(1 + self.rng.usize(..path.len() + 40));
        let mut hashes: Vec<_> = path.iter().map(|node| self.tree.nodes[*node].sequence).collect();
        hashes.extend((0..self.rng.usize(..3)).map(|_| SequenceHash(self.rng.u64(..))));
        self.index.find(&hashes, &mut self.overlaps);
        for (rank, model) in self.ranks.iter().enumerate() {
            let id = RankId(rank as u16);
            let (found, expected) = (self.overlaps.get(id), model.overlap(&path));
            assert_eq!(self.index.depth(id, &hashes), found.gpu_blocks);
            if self.bounded {
                assert!(found.gpu_blocks <= expected.gpu_blocks, "{found:?} of {expected:?}");
                assert!(found.blocks() <= path.len() as u32);
            } else {
                assert_eq!(found, expected, "rank {rank}");
            }
            let end = expected.blocks() as usize;
            self.seen.checks += 1;
            self.seen.overlapping += u32::from(end > 0);
            self.seen.partial += u32::from(end > 0 && end < path.len());
            self.seen.lower += u32::from(end > expected.gpu_blocks as usize);
            self.seen.behind_a_hole += u32::from(path[end..].iter().skip(1).any(|node| model.held(*node, 0)));
        }
    }

    fn step(&mut self) {
        let rank = self.rng.usize(..usize::from(RANKS));
        match self.rng.u16(..1000) {
            0 => self.reset(rank),
            1..=10 => {
                let parent = (self.rng.u8(..20) > 0).then(|| self.pick());
                let count = 1 + self.rng.usize(..80);
                self.tree.grow(parent, count.min(MAX_NODES - self.tree.nodes.len()));
            }
            11..=280 => self.store(rank),
            281..=380 => self.store_names(rank),
            381..=750 => self.remove(rank),
            751..=760 => {
                self.index.sweep(self.rng.usize(..500));
            }
            _ => self.check(),
        }
    }

    /// Takes all ranks out: nothing may be left.
    fn drain(&mut self) {
        for rank in 0..RANKS {
            self.index.remove_rank(RankId(rank));
        }
        while self.index.sweep(1000) {}
        check_invariants(&self.index);
        let stats = self.index.stats();
        assert_eq!((stats.runs, stats.bytes, stats.unswept), (0, 0, 0));
    }
}

fn check_invariants(index: &Index) {
    #[cfg(debug_assertions)]
    index.check_invariants();
    #[cfg(not(debug_assertions))]
    let _ = index;
}

fn seeds() -> u64 {
    std::env::var("KVSPOA_MODEL_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

#[test]
fn the_index_agrees_with_plain_sets() {
    for seed in 0..seeds() {
        let config = IndexConfig { max_ghost_blocks: GHOSTS, ..IndexConfig::default() };
        let mut world = World::new(seed, config);
        for step in 0..STEPS {
            world.step();
            if step % 500 == 0 {
                check_invariants(&world.index);
            }
        }
        let seen = &world.seen;
        let at_least = |count: u32, share: f64| f64::from(count) > f64::from(seen.checks) * share;
        assert!(at_least(seen.overlapping, 0.5) && at_least(seen.partial, 0.2), "{seen:?}");
        assert!(at_least(seen.lower, 0.1) && at_least(seen.behind_a_hole, 0.1), "{seen:?}");
        world.drain();
    }
}

#[test]
fn a_bounded_index_stays_within_its_limit_and_never_claims_more_than_is_there() {
    for seed in 100..100 + seeds() {
        let max_bytes = 150_000;
        let config = IndexConfig { max_bytes, max_waiting_blocks: 300, max_ghost_blocks: GHOSTS };
        let mut world = World::new(seed, config);
        for step in 0..STEPS {
            world.step();
            // One event may bring a whole prompt before room is made.
            assert!(world.index.stats().bytes <= max_bytes as u64 + 100_000);
            if step % 500 == 0 {
                check_invariants(&world.index);
            }
        }
        assert!(world.index.stats().evicted > 1000, "{:?}", world.index.stats());
        assert!(world.seen.overlapping * 5 > world.seen.checks, "{:?}", world.seen);
        world.drain();
    }
}
