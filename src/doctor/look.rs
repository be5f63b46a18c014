//! What the messages of one rank's stream tell, and whether the blocks in them are those of a prompt.

use crate::{
    events::{Batch, Groups, KvEvent, has_named_fields, probe::Message},
    hash::HashKey,
    units::{BlockHash, EngineHash, SequenceHash, Tier, TokenId},
};
use std::collections::{BTreeSet, HashMap, HashSet};

/// Everything seen of one stream so far.
#[derive(Debug)]
pub(super) struct Look {
    key: HashKey,
    batch: Batch,
    groups: Groups,
    /// The blocks stored on the GPU whose whole chain was heard.
    chains: HashMap<EngineHash, SequenceHash>,
    /// The same, to be looked up.
    sequences: HashSet<SequenceHash>,
    /// Those that continue what was stored before, by their own tokens.
    floating: HashSet<BlockHash>,
    pub(super) seen: Seen,
}

/// The part of it that is judged.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Seen {
    pub(super) batches: u64,
    pub(super) undecodable: u64,
    pub(super) topics: BTreeSet<String>,
    /// Whether events are maps (vLLM ≥ 0.24) or arrays.
    pub(super) named_fields: Option<bool>,
    /// Tokens per block, as each store said.
    pub(super) block_tokens: BTreeSet<u32>,
    pub(super) last_seq: Option<u64>,
    /// Whether a number was left out, or came again.
    pub(super) has_gap: bool,
    /// Stores of the GPU tier with tokens, and without.
    pub(super) gpu_stores: [u64; 2],
    /// The same of lower tiers.
    pub(super) lower_stores: [u64; 2],
    pub(super) has_window_groups: bool,
}

/// Which blocks of a prompt were seen stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Matched {
    /// Whole blocks of the prompt.
    pub(super) blocks: usize,
    /// Those that were seen.
    pub(super) seen: usize,
    /// The first that was not seen behind one that was: the tokens differ from there.
    pub(super) differ_at: Option<usize>,
    /// Blocks that were seen and are none of the prompt's: of the answer, of other requests, or of other tokens.
    pub(super) others: usize,
}

impl Look {
    pub(super) fn new(key: &HashKey) -> Self {
        Self {
            key: key.clone(),
            batch: Batch::new(),
            groups: Groups::default(),
            chains: HashMap::new(),
            sequences: HashSet::new(),
            floating: HashSet::new(),
            seen: Seen::default(),
        }
    }

    pub(super) fn see(&mut self, message: &Message) {
        let seen = &mut self.seen;
        seen.batches += 1;
        seen.topics.insert(String::from_utf8_lossy(&message.topic).into_owned());
        seen.has_gap |= seen.last_seq.is_some_and(|last| last.checked_add(1) != Some(message.seq));
        seen.last_seq = Some(message.seq);
        seen.named_fields = has_named_fields(&message.payload).or(seen.named_fields);
        if self.batch.decode(&message.payload, &self.key, &mut self.groups).is_err() {
            seen.undecodable += 1;
        }
        seen.block_tokens.extend(self.batch.block_tokens());
        seen.has_window_groups |= self.batch.has_window_groups();
        for event in self.batch.events() {
            let KvEvent::Stored(stored) = event else { continue };
            let stores = if stored.tier == Tier::Gpu { &mut seen.gpu_stores } else { &mut seen.lower_stores };
            stores[usize::from(stored.block_hashes.is_empty())] += 1;
            if stored.tier != Tier::Gpu {
                continue;
            }
            let parent = match stored.parent {
                None => Some(stored.root),
                Some(parent) => self.chains.get(&parent).copied(),
            };
            let Some(mut parent) = parent else {
                self.floating.extend(stored.block_hashes);
                continue;
            };
            for (engine_hash, block) in stored.engine_hashes.iter().zip(stored.block_hashes) {
                parent = self.key.chain(parent, *block);
                self.chains.insert(*engine_hash, parent);
                self.sequences.insert(parent);
            }
        }
    }

    /// Compares with the tokens of a prompt. Its first blocks may have been cached before, so that nothing tells of them.
    pub(super) fn matched(&self, tokens: &[TokenId]) -> Matched {
        let all = self.sequences.len() + self.floating.len();
        let Some(size) = self.seen.block_tokens.last().filter(|size| **size > 0) else {
            return Matched { others: all, ..Matched::default() };
        };
        let chain = self.key.sequence(self.key.plain_root(), tokens, *size);
        let blocks = tokens.chunks_exact(*size as usize).map(|block| self.key.block(block));
        let is_seen: Vec<bool> = chain
            .iter()
            .zip(blocks)
            .map(|(sequence, block)| self.sequences.contains(sequence) || self.floating.contains(&block))
            .collect();
        let first = is_seen.iter().position(|seen| *seen).unwrap_or(is_seen.len());
        let differ_at = is_seen.iter().skip(first).position(|seen| !seen).map(|at| first + at);
        let seen = is_seen.iter().filter(|seen| **seen).count();
        Matched { blocks: is_seen.len(), seen, differ_at, others: all.saturating_sub(seen) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        sim::{Event, HashFormat, Medium, encode_batch},
        units::EngineHash,
    };

    fn stored(tokens: &[u32], block_tokens: u32, medium: Medium) -> Event {
        continued(None, tokens, block_tokens, medium)
    }

    fn continued(parent: Option<u64>, tokens: &[u32], block_tokens: u32, medium: Medium) -> Event {
        let blocks = if block_tokens == 0 { 1 } else { tokens.len() / block_tokens as usize };
        Event::Stored(crate::sim::Stored {
            block_hashes: (0..blocks as u64).map(EngineHash).collect(),
            parent: parent.map(EngineHash),
            tokens: tokens.iter().copied().map(TokenId).collect(),
            block_tokens,
            lora: None,
            medium,
            extra_keys: None,
            session_id: None,
        })
    }

    fn look(events: &[&[Event]]) -> Look {
        let mut look = Look::new(&HashKey::from_seed(1));
        for (seq, events) in (7..).zip(events) {
            let payload = encode_batch(1.0, events, 0, HashFormat::Int);
            look.see(&Message { topic: b"kv@a".to_vec(), seq, payload });
        }
        look
    }

    fn ids(ids: std::ops::Range<u32>) -> Vec<TokenId> {
        ids.map(TokenId).collect()
    }

    #[test]
    fn the_stream_tells_its_topic_its_form_and_its_block_size() {
        let tokens: Vec<u32> = (0..8).collect();
        let seen = look(&[&[stored(&tokens, 4, Medium::Gpu)], &[stored(&[], 0, Medium::Cpu)]]).seen;
        assert_eq!(seen.topics, BTreeSet::from(["kv@a".to_owned()]));
        assert_eq!((seen.named_fields, seen.last_seq, seen.has_gap), (Some(true), Some(8), false));
        assert_eq!(seen.block_tokens, BTreeSet::from([4]));
        assert_eq!((seen.gpu_stores, seen.lower_stores), ([1, 0], [0, 1]), "a placeholder has no tokens");
        let mut broken = look(&[]);
        broken.see(&Message { topic: Vec::new(), seq: 1, payload: b"odd".to_vec() });
        broken.see(&Message { topic: Vec::new(), seq: 3, payload: b"odd".to_vec() });
        assert_eq!((broken.seen.undecodable, broken.seen.has_gap), (2, true));
    }

    #[test]
    fn a_prompt_is_found_by_the_tokens_of_its_whole_blocks() {
        let tokens: Vec<u32> = (0..12).collect();
        let look = look(&[&[stored(&tokens, 4, Medium::Gpu)]]);
        let all = Matched { blocks: 3, seen: 3, ..Matched::default() };
        assert_eq!(look.matched(&ids(0..14)), all, "the rest is no whole block");
        let differing = [ids(0..4), ids(90..98)].concat();
        assert_eq!(look.matched(&differing), Matched { seen: 1, others: 2, differ_at: Some(1), ..all });
        assert_eq!(look.matched(&ids(50..62)), Matched { seen: 0, others: 3, ..all });
        let shifted = [ids(90..94), ids(4..12)].concat();
        assert_eq!(look.matched(&shifted).seen, 0, "the same blocks behind another are others");
    }

    #[test]
    fn the_first_blocks_may_have_been_cached_before() {
        let tokens: Vec<u32> = (0..8).collect();
        let look = look(&[&[continued(Some(99), &tokens, 4, Medium::Gpu)]]);
        let behind = [ids(90..94), ids(0..8)].concat();
        let found = Matched { blocks: 3, seen: 2, ..Matched::default() };
        assert_eq!(look.matched(&behind), found);
    }
}
