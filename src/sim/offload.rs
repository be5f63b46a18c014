//! The CPU tier: prompt blocks copied to host memory a step after they were computed, and loaded back from there.
//!
//! Semantics of vLLM's `OffloadingConnector` with its CPU manager: whole chunks of prompt blocks only, kept by least
//! recent use, where a request's use counts when it ends, its tail as the older; a chunk that is still being copied
//! makes a request that wants it wait.

use super::cache::Sequence;
use super::events::{Event, Medium, Stored};
use crate::units::EngineHash;
use hashbrown::{HashMap, HashSet};
use std::collections::BTreeMap;

/// How the tier is laid out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OffloadConfig {
    /// Capacity in blocks of the device's size; a remainder of a chunk is not used.
    pub blocks: u32,
    /// Blocks that are stored, loaded and evicted together.
    pub chunk_blocks: u32,
    /// Whether events describe the blocks (`self_describing_kv_events`) or only name them.
    pub describes: bool,
}

pub(super) struct Offload {
    chunk_blocks: usize,
    block_tokens: usize,
    capacity_chunks: usize,
    describes: bool,
    /// By the name of a chunk's last block.
    chunks: HashMap<EngineHash, Chunk>,
    /// The chunks that nothing reads or writes, least recently used first.
    evictable: BTreeMap<u64, EngineHash>,
    last_rank: u64,
    planned: Vec<Store>,
    copying: Vec<Store>,
    loading: HashSet<EngineHash>,
    events: Vec<Event>,
}

struct Chunk {
    rank: u64,
    state: ChunkState,
    block_hashes: Vec<EngineHash>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ChunkState {
    Storing,
    Held { readers: u32 },
}

struct Store {
    chunk: EngineHash,
    announcement: Stored,
}

/// How far the tier is with one request.
#[derive(Debug, Default)]
pub(super) struct Progress {
    next_chunk: usize,
    /// The chunks that the request used, by their place in it.
    used: BTreeMap<usize, EngineHash>,
    loading: Vec<EngineHash>,
}

impl Offload {
    pub(super) fn new(config: OffloadConfig, block_tokens: usize) -> Self {
        let chunk_blocks = config.chunk_blocks.max(1) as usize;
        Self {
            chunk_blocks,
            block_tokens,
            capacity_chunks: config.blocks as usize / chunk_blocks,
            describes: config.describes,
            chunks: HashMap::new(),
            evictable: BTreeMap::new(),
            last_rank: 0,
            planned: Vec::new(),
            copying: Vec::new(),
            loading: HashSet::new(),
            events: Vec::new(),
        }
    }

    /// Whether a store waits for the next step.
    pub(super) fn has_work(&self) -> bool {
        !self.planned.is_empty()
    }

    /// A step starts: the stores that the last one planned are copied during it.
    pub(super) fn begin_step(&mut self) {
        self.copying = std::mem::take(&mut self.planned);
    }

    /// The tokens that can be loaded behind the first `computed_tokens`; `None` if that is not known before a copy ends.
    pub(super) fn lookup(&self, sequence: &Sequence, computed_tokens: usize) -> Option<usize> {
        let chunk_tokens = self.chunk_tokens();
        let first = computed_tokens / chunk_tokens;
        let mut hits = 0;
        let mut is_known = true;
        for at in first..sequence.len() / chunk_tokens {
            let key = self.key(sequence, at);
            match self.chunks.get(&key).map(|chunk| chunk.state) {
                None => break,
                Some(ChunkState::Storing) => is_known = false,
                Some(ChunkState::Held { .. }) => is_known &= !self.loading.contains(&key),
            }
            hits += 1;
        }
        let tokens = ((first + hits) * chunk_tokens).saturating_sub(computed_tokens);
        if hits == 0 || tokens < chunk_tokens {
            return Some(0);
        }
        is_known.then_some(tokens)
    }

    /// Starts the load of `tokens` tokens behind the first `computed_tokens`.
    pub(super) fn begin_load(
        &mut self,
        sequence: &Sequence,
        progress: &mut Progress,
        computed_tokens: usize,
        tokens: usize,
    ) {
        let end = (computed_tokens + tokens) / self.chunk_tokens();
        for at in computed_tokens / self.chunk_tokens()..end {
            let key = self.key(sequence, at);
            if let Some(chunk) = self.chunks.get_mut(&key)
                && let ChunkState::Held { readers } = &mut chunk.state
            {
                self.evictable.remove(&chunk.rank);
                *readers += 1;
            }
            self.loading.insert(key);
            progress.loading.push(key);
            progress.used.insert(at, key);
        }
        progress.next_chunk = end;
    }

    pub(super) fn end_load(&mut self, progress: &mut Progress) {
        for key in progress.loading.drain(..) {
            self.loading.remove(&key);
            if let Some(chunk) = self.chunks.get_mut(&key)
                && let ChunkState::Held { readers } = &mut chunk.state
            {
                *readers = readers.saturating_sub(1);
                if *readers == 0 {
                    self.evictable.insert(chunk.rank, key);
                }
            }
        }
    }

    /// Plans to store the prompt's chunks of which `computed_tokens` tokens will be computed when the step ends. If there
    /// is no room, the next step tries again.
    pub(super) fn plan(&mut self, sequence: &Sequence, progress: &mut Progress, computed_tokens: usize) {
        let offered_tokens = computed_tokens.min(sequence.prompt_tokens());
        let end = (offered_tokens / self.chunk_tokens()).min(sequence.hashes().len() / self.chunk_blocks);
        let offered: Vec<(usize, EngineHash)> =
            (progress.next_chunk..end).map(|at| (at, self.key(sequence, at))).collect();
        let mut missing = Vec::new();
        for (at, key) in &offered {
            match self.chunks.get(key).map(|chunk| chunk.state) {
                None => missing.push((*at, *key)),
                Some(ChunkState::Storing) => continue,
                Some(ChunkState::Held { .. }) => {}
            }
            progress.used.insert(*at, *key);
        }
        if !missing.is_empty() && !self.make_room(missing.len(), &offered) {
            return;
        }
        for (at, key) in missing {
            let blocks = at * self.chunk_blocks..(at + 1) * self.chunk_blocks;
            let announcement = self.announcement(sequence, blocks, key);
            let rank = self.next_rank();
            let block_hashes = announcement.block_hashes.clone();
            self.chunks.insert(key, Chunk { rank, state: ChunkState::Storing, block_hashes });
            self.planned.push(Store { chunk: key, announcement });
        }
        progress.next_chunk = progress.next_chunk.max(end);
    }

    /// A request ended: what it used was used now.
    pub(super) fn end_request(&mut self, progress: &Progress) {
        for key in progress.used.values().rev() {
            let rank = self.next_rank();
            if let Some(chunk) = self.chunks.get_mut(key) {
                if self.evictable.remove(&chunk.rank).is_some() {
                    self.evictable.insert(rank, *key);
                }
                chunk.rank = rank;
            }
        }
    }

    /// A step ended: what was copied is held. The chunks are announced in no order, as vLLM does.
    pub(super) fn end_step(&mut self) -> Vec<Event> {
        let mut copied = std::mem::take(&mut self.copying);
        copied.sort_unstable_by_key(|store| store.chunk);
        for Store { chunk: key, announcement } in copied {
            let Some(chunk) = self.chunks.get_mut(&key) else { continue };
            chunk.state = ChunkState::Held { readers: 0 };
            self.evictable.insert(chunk.rank, key);
            self.events.push(Event::Stored(announcement));
        }
        std::mem::take(&mut self.events)
    }

    /// Forgets everything and says nothing of it.
    pub(super) fn reset(&mut self) {
        self.chunks.clear();
        self.evictable.clear();
        self.planned.clear();
        self.copying.clear();
        self.loading.clear();
    }

    fn make_room(&mut self, chunks: usize, kept: &[(usize, EngineHash)]) -> bool {
        let free = self.capacity_chunks.saturating_sub(self.chunks.len());
        let excess = chunks.saturating_sub(free);
        let kept: HashSet<EngineHash> = kept.iter().map(|(_, key)| *key).collect();
        let evicted: Vec<(u64, EngineHash)> = self
            .evictable
            .iter()
            .filter(|(_, key)| !kept.contains(*key))
            .take(excess)
            .map(|(rank, key)| (*rank, *key))
            .collect();
        if evicted.len() < excess {
            return false;
        }
        let mut block_hashes = Vec::new();
        for (rank, key) in evicted {
            self.evictable.remove(&rank);
            block_hashes.extend(self.chunks.remove(&key).into_iter().flat_map(|chunk| chunk.block_hashes));
        }
        if !block_hashes.is_empty() {
            self.events.push(Event::Removed { block_hashes, medium: Medium::Cpu });
        }
        true
    }

    fn announcement(&self, sequence: &Sequence, blocks: std::ops::Range<usize>, key: EngineHash) -> Stored {
        if self.describes {
            return sequence.describe(blocks, self.block_tokens);
        }
        Stored {
            block_hashes: vec![key],
            parent: None,
            tokens: Vec::new(),
            block_tokens: 0,
            lora: None,
            medium: Medium::Cpu,
            extra_keys: None,
            session_id: None,
        }
    }

    /// The name of a chunk is that of its last block.
    fn key(&self, sequence: &Sequence, chunk: usize) -> EngineHash {
        sequence.hashes()[(chunk + 1) * self.chunk_blocks - 1]
    }

    const fn chunk_tokens(&self) -> usize {
        self.chunk_blocks * self.block_tokens
    }

    const fn next_rank(&mut self) -> u64 {
        self.last_rank += 1;
        self.last_rank
    }
}

impl Progress {
    /// After a reset of the tier the request's chunks are offered again.
    pub(super) fn restart(&mut self) {
        self.next_chunk = 0;
        self.used.clear();
    }
}
