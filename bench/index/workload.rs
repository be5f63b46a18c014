//! The workload "conv2k8k": 2,000 conversations of four turns under ten system prompts, and 20 long documents.
//!
//! Every token is a function of stream and position, so that any index can be given the same workload. A block has
//! 16 tokens. Prefill is stored in one event a turn, decode in events of one block, 16 conversations interleaved.
//!
//! Block hashes are made by whichever index is measured; the engine's names are our sequence hashes for all.

use crate::events::{KvEvent, Stored};
use crate::hash::HashKey;
use crate::units::{BlockHash, EngineHash, RankId, SequenceHash, Tier, TokenId};

/// Tokens of a block.
pub const BLOCK_TOKENS: u64 = 16;
const CONVERSATIONS: u64 = 2000;
const DOCUMENTS: u64 = 20;
const SYSTEM_BLOCKS: u64 = 128;
const CONVERSATION_BLOCKS: u64 = 384;
const DOCUMENT_BLOCKS: u64 = 8192;
const SYSTEM_STREAM: u64 = 1_000_000;
const CONVERSATION_STREAM: u64 = 2_000_000;
const DOCUMENT_STREAM: u64 = 3_000_000;
const PRIVATE_STREAM: u64 = 5_000_000;

fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ x >> 31
}

fn tokens(stream: u64, blocks: u64) -> Vec<TokenId> {
    tokens_from(stream, 0, blocks)
}

fn tokens_from(stream: u64, first_block: u64, blocks: u64) -> Vec<TokenId> {
    let positions = first_block * BLOCK_TOKENS..(first_block + blocks) * BLOCK_TOKENS;
    positions.map(|at| TokenId((mix(stream << 32 ^ at) % 128_000) as u32)).collect()
}

fn system_tokens(prompt: u64) -> Vec<TokenId> {
    tokens(SYSTEM_STREAM + prompt, SYSTEM_BLOCKS)
}

fn conversation_tokens(conversation: u64) -> Vec<TokenId> {
    tokens(CONVERSATION_STREAM + conversation, CONVERSATION_BLOCKS)
}

fn document_tokens(document: u64) -> Vec<TokenId> {
    tokens(DOCUMENT_STREAM + document, DOCUMENT_BLOCKS)
}

/// How large a workload is, and for whom.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Ranks that the blocks are spread over.
    pub ranks: u16,
    /// 2,000 in conv2k8k.
    pub conversations: u64,
    /// 20 in conv2k8k.
    pub documents: u64,
    /// Stores a turn's decoded blocks together with its prefill.
    pub bulk: bool,
}

impl Shape {
    /// The workload conv2k8k, `scale` times.
    #[must_use]
    pub fn conv2k8k(ranks: u16, scale: u64) -> Self {
        Self { ranks, conversations: CONVERSATIONS * scale, documents: DOCUMENTS * scale, bulk: false }
    }

    /// The same blocks in larger events.
    #[must_use]
    pub fn in_bulk(self) -> Self {
        Self { bulk: true, ..self }
    }
}

/// A hashed token stream behind another.
#[derive(Clone)]
struct Chain {
    stream: u64,
    blocks: Vec<BlockHash>,
    sequence: Vec<SequenceHash>,
}

impl Chain {
    fn new(
        key: &HashKey,
        block_hash: &dyn Fn(&[TokenId]) -> BlockHash,
        parent: SequenceHash,
        stream: u64,
        tokens: &[TokenId],
    ) -> Self {
        let blocks = tokens.chunks_exact(BLOCK_TOKENS as usize).map(block_hash).collect();
        Self { stream, blocks, sequence: key.sequence(parent, tokens, BLOCK_TOKENS as u32) }
    }
}

/// One store event; its blocks lie in the workload's lists.
#[derive(Clone, Copy, Debug)]
struct Event {
    rank: u16,
    parent: Option<EngineHash>,
    from: u32,
    to: u32,
    /// Where its tokens come from.
    stream: u32,
    first_block: u32,
}

/// All events, in order.
#[derive(Debug)]
pub struct Workload {
    /// Ranks that the blocks are spread over.
    pub ranks: u16,
    root: SequenceHash,
    events: Vec<Event>,
    names: Vec<EngineHash>,
    blocks: Vec<BlockHash>,
}

impl Workload {
    /// The workload for an index that names blocks by `block_hash`.
    pub fn new(key: &HashKey, block_hash: &dyn Fn(&[TokenId]) -> BlockHash, shape: Shape) -> Self {
        let Shape { ranks, conversations: count, documents, bulk } = shape;
        let root = key.plain_root();
        let chain =
            |parent, stream, tokens: Vec<TokenId>| Chain::new(key, block_hash, parent, stream, &tokens);
        let mut workload = Self { ranks, root, events: Vec::new(), names: Vec::new(), blocks: Vec::new() };
        for document in 0..documents {
            let chain = chain(root, DOCUMENT_STREAM + document, document_tokens(document));
            for rank in workload.placement(1_000_000 + document) {
                for from in (0..DOCUMENT_BLOCKS as usize).step_by(128) {
                    workload.store(rank, None, &chain, from, from + 128);
                }
            }
        }
        let systems: Vec<Chain> = (0..10).map(|p| chain(root, SYSTEM_STREAM + p, system_tokens(p))).collect();
        let conversations: Vec<Chain> = (0..count)
            .map(|c| {
                let system = &systems[c as usize % 10];
                chain(system.sequence[127], CONVERSATION_STREAM + c, conversation_tokens(c))
            })
            .collect();
        let mut has_system = vec![[false; 10]; usize::from(ranks)];
        for turn in 0..4u64 {
            let order: Vec<u64> = (0..count).map(|i| (i * 7919 + turn * 104_729) % count).collect();
            for group in order.chunks(16) {
                let mut open = Vec::new();
                for conversation in group {
                    let holders = workload.placement(*conversation);
                    let holders = if turn < 2 { &holders[..] } else { &holders[..1] };
                    open.extend(holders.iter().map(|rank| (*rank, *conversation as usize)));
                }
                let start = turn as usize * 96;
                for (rank, conversation) in &open {
                    let system = conversation % 10;
                    let known = &mut has_system[usize::from(*rank)][system];
                    if !std::mem::replace(known, true) {
                        workload.store(*rank, None, &systems[system], 0, 128);
                    }
                    let parent = Some(systems[system].sequence[127]);
                    let end = start + if bulk { 96 } else { 64 };
                    workload.store(*rank, parent, &conversations[*conversation], start, end);
                }
                for at in (start + 64..start + 96).filter(|_| !bulk) {
                    for (rank, conversation) in &open {
                        workload.store(*rank, None, &conversations[*conversation], at, at + 1);
                    }
                }
            }
        }
        workload
    }

    /// Prompts that nothing is shared of, each on one rank.
    #[must_use]
    pub fn private(
        key: &HashKey,
        block_hash: &dyn Fn(&[TokenId]) -> BlockHash,
        ranks: u16,
        prompts: u64,
        prompt_blocks: u64,
    ) -> Self {
        let root = key.plain_root();
        let mut workload = Self { ranks, root, events: Vec::new(), names: Vec::new(), blocks: Vec::new() };
        for prompt in 0..prompts {
            let stream = PRIVATE_STREAM + prompt;
            let chain = Chain::new(key, block_hash, root, stream, &tokens(stream, prompt_blocks));
            let rank = (mix(prompt) % u64::from(ranks)) as u16;
            workload.store(rank, None, &chain, 0, prompt_blocks as usize);
        }
        workload
    }

    /// Entries: blocks of all ranks.
    #[must_use]
    pub fn entries(&self) -> usize {
        self.names.len()
    }

    /// All events, in order, with the rank that sends each.
    pub fn events(&self) -> impl Iterator<Item = (RankId, KvEvent<'_>)> {
        self.stores().map(|(rank, stored)| (rank, KvEvent::Stored(stored)))
    }

    /// The same; each is a store.
    pub fn stores(&self) -> impl Iterator<Item = (RankId, Stored<'_>)> {
        self.events.iter().map(|event| {
            let range = event.from as usize..event.to as usize;
            let stored = Stored {
                tier: Tier::Gpu,
                parent: event.parent,
                root: self.root,
                engine_hashes: &self.names[range.clone()],
                block_hashes: &self.blocks[range],
            };
            (RankId(event.rank), stored)
        })
    }

    /// The tokens of each event.
    pub fn event_tokens(&self) -> impl Iterator<Item = Vec<TokenId>> {
        self.events.iter().map(|event| {
            let blocks = u64::from(event.to - event.from);
            tokens_from(event.stream.into(), event.first_block.into(), blocks)
        })
    }

    /// The blocks' names, event by event.
    #[must_use]
    pub fn names(&self) -> &[EngineHash] {
        &self.names
    }

    /// The blocks' hashes, event by event.
    #[must_use]
    pub fn blocks(&self) -> &[BlockHash] {
        &self.blocks
    }

    /// The two ranks that a conversation or document goes to.
    fn placement(&self, of: u64) -> [u16; 2] {
        let ranks = u64::from(self.ranks);
        let first = mix(of ^ 0xA11CE) % ranks;
        let second = (first + 1 + mix(of ^ 0xB0B) % (ranks - 1)) % ranks;
        [first as u16, second as u16]
    }

    /// `parent` is what stands before the chain's first block.
    fn store(&mut self, rank: u16, parent: Option<SequenceHash>, chain: &Chain, from: usize, to: usize) {
        let parent = if from == 0 { parent } else { Some(chain.sequence[from - 1]) };
        let start = self.names.len() as u32;
        // The engine's names are our own sequence hashes: any other unique numbers would do.
        self.names.extend(chain.sequence[from..to].iter().map(|hash| EngineHash(hash.0)));
        self.blocks.extend_from_slice(&chain.blocks[from..to]);
        self.events.push(Event {
            rank,
            parent: parent.map(|hash| EngineHash(hash.0)),
            from: start,
            to: self.names.len() as u32,
            stream: chain.stream as u32,
            first_block: from as u32,
        });
    }
}

/// Prompts of 512 blocks, 2,000 in conv2k8k: 70 % whole conversations, 20 % a system prompt with a new tail, 10 % new.
#[must_use]
pub fn short_prompts(shape: &Shape, count: u64) -> Vec<Vec<TokenId>> {
    let prompt = |i: u64| match mix(i ^ 0x51) % 10 {
        0..=6 => {
            let conversation = mix(i ^ 0x77) % shape.conversations;
            [system_tokens(conversation % 10), conversation_tokens(conversation)].concat()
        }
        7 | 8 => [system_tokens(mix(i ^ 0x99) % 10), tokens(4_000_000 + i, CONVERSATION_BLOCKS)].concat(),
        _ => tokens(4_000_000 + i, SYSTEM_BLOCKS + CONVERSATION_BLOCKS),
    };
    (0..count).map(prompt).collect()
}

/// Prompts of 8,192 blocks, 40 in conv2k8k: 80 % whole documents, 20 % the first half of one.
#[must_use]
pub fn long_prompts(shape: &Shape, count: u64) -> Vec<Vec<TokenId>> {
    let prompt = |i: u64| {
        let mut prompt = document_tokens(mix(i ^ 0x33) % shape.documents);
        if mix(i ^ 0x44) % 10 >= 8 {
            let half = prompt.len() / 2;
            prompt.truncate(half);
            prompt.extend(tokens(4_500_000 + i, DOCUMENT_BLOCKS / 2));
        }
        prompt
    };
    (0..count).map(prompt).collect()
}
