//! The workload "conv2k8k": 2,000 conversations of four turns under ten system prompts, and 20 long documents.
//!
//! Every token is a function of stream and position, so that any index can be given the same workload. A block has
//! 16 tokens. Prefill is stored in one event a turn, decode in events of one block, 16 conversations interleaved.

use kvspoa::events::{KvEvent, Stored};
use kvspoa::hash::HashKey;
use kvspoa::units::{BlockHash, EngineHash, RankId, SequenceHash, Tier, TokenId};

pub(crate) const BLOCK_TOKENS: u64 = 16;
const CONVERSATIONS: u64 = 2000;
const DOCUMENTS: u64 = 20;
const SYSTEM_BLOCKS: u64 = 128;
const CONVERSATION_BLOCKS: u64 = 384;
const DOCUMENT_BLOCKS: u64 = 8192;

fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ x >> 31
}

fn tokens(stream: u64, blocks: u64) -> Vec<TokenId> {
    (0..blocks * BLOCK_TOKENS).map(|at| TokenId((mix(stream << 32 ^ at) % 128_000) as u32)).collect()
}

fn system_tokens(prompt: u64) -> Vec<TokenId> {
    tokens(1_000_000 + prompt, SYSTEM_BLOCKS)
}

fn conversation_tokens(conversation: u64) -> Vec<TokenId> {
    tokens(2_000_000 + conversation, CONVERSATION_BLOCKS)
}

fn document_tokens(document: u64) -> Vec<TokenId> {
    tokens(3_000_000 + document, DOCUMENT_BLOCKS)
}

/// A hashed token stream behind another.
#[derive(Clone)]
struct Chain {
    blocks: Vec<BlockHash>,
    sequence: Vec<SequenceHash>,
}

impl Chain {
    fn new(key: &HashKey, parent: SequenceHash, tokens: &[TokenId]) -> Self {
        let blocks = tokens.chunks_exact(BLOCK_TOKENS as usize).map(|block| key.block(block)).collect();
        Self { blocks, sequence: key.sequence(parent, tokens, BLOCK_TOKENS as u32) }
    }
}

/// One store event; its blocks lie in the workload's lists.
#[derive(Clone, Copy)]
struct Event {
    rank: u16,
    parent: Option<EngineHash>,
    from: u32,
    to: u32,
}

/// All events, in order.
pub(crate) struct Workload {
    pub(crate) ranks: u16,
    root: SequenceHash,
    events: Vec<Event>,
    names: Vec<EngineHash>,
    blocks: Vec<BlockHash>,
}

impl Workload {
    /// `bulk` stores a turn's decoded blocks together with its prefill.
    pub(crate) fn new(key: &HashKey, ranks: u16, bulk: bool) -> Self {
        let root = key.plain_root();
        let mut workload = Self { ranks, root, events: Vec::new(), names: Vec::new(), blocks: Vec::new() };
        for document in 0..DOCUMENTS {
            let chain = Chain::new(key, root, &document_tokens(document));
            for rank in workload.placement(1_000_000 + document) {
                for from in (0..DOCUMENT_BLOCKS as usize).step_by(128) {
                    workload.store(rank, None, &chain, from, from + 128);
                }
            }
        }
        let systems: Vec<Chain> = (0..10).map(|p| Chain::new(key, root, &system_tokens(p))).collect();
        let conversations: Vec<Chain> = (0..CONVERSATIONS)
            .map(|c| Chain::new(key, systems[c as usize % 10].sequence[127], &conversation_tokens(c)))
            .collect();
        let mut has_system = vec![[false; 10]; usize::from(ranks)];
        for turn in 0..4u64 {
            let order: Vec<u64> =
                (0..CONVERSATIONS).map(|i| (i * 7919 + turn * 104_729) % CONVERSATIONS).collect();
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

    /// Entries: blocks of all ranks.
    pub(crate) fn entries(&self) -> usize {
        self.names.len()
    }

    pub(crate) fn events(&self) -> impl Iterator<Item = (RankId, KvEvent<'_>)> {
        self.events.iter().map(|event| {
            let range = event.from as usize..event.to as usize;
            let stored = Stored {
                tier: Tier::Gpu,
                parent: event.parent,
                root: self.root,
                engine_hashes: &self.names[range.clone()],
                block_hashes: &self.blocks[range],
            };
            (RankId(event.rank), KvEvent::Stored(stored))
        })
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
        let parent = parent.map(|hash| EngineHash(hash.0));
        self.events.push(Event { rank, parent, from: start, to: self.names.len() as u32 });
    }
}

/// 2,000 prompts of 512 blocks: 70 % whole conversations, 20 % a system prompt with a new tail, 10 % new.
pub(crate) fn short_prompts() -> Vec<Vec<TokenId>> {
    let prompt = |i: u64| match mix(i ^ 0x51) % 10 {
        0..=6 => {
            let conversation = mix(i ^ 0x77) % CONVERSATIONS;
            [system_tokens(conversation % 10), conversation_tokens(conversation)].concat()
        }
        7 | 8 => [system_tokens(mix(i ^ 0x99) % 10), tokens(4_000_000 + i, CONVERSATION_BLOCKS)].concat(),
        _ => tokens(4_000_000 + i, SYSTEM_BLOCKS + CONVERSATION_BLOCKS),
    };
    (0..2000).map(prompt).collect()
}

/// 40 prompts of 8,192 blocks: 80 % whole documents, 20 % the first half of one.
pub(crate) fn long_prompts() -> Vec<Vec<TokenId>> {
    let prompt = |i: u64| {
        let mut prompt = document_tokens(mix(i ^ 0x33) % DOCUMENTS);
        if mix(i ^ 0x44) % 10 >= 8 {
            let half = prompt.len() / 2;
            prompt.truncate(half);
            prompt.extend(tokens(4_500_000 + i, DOCUMENT_BLOCKS / 2));
        }
        prompt
    };
    (0..40).map(prompt).collect()
}
