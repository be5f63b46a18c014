//! What the pool's caches hold of one prompt, and under which circumstances that was read.

use super::{Pool, Rank, RankState, Ranks, Servers};
use crate::{
    hash::MediaItem,
    index::Overlaps,
    prompt::TokenIds,
    select::{Candidate, PromptBlocks, Sequence, SequenceKey},
    units::{RankId, Revision, SequenceHash},
};
use std::{sync::Arc, time::Instant};

/// Blocks of ranks of which none has told: vLLM's default on GPUs. It only rounds.
const USUAL_BLOCK_TOKENS: u32 = 16;

/// A prompt as one of the pool's renderers makes it.
#[derive(Clone, Copy, Debug)]
pub struct Rendered<'p> {
    /// Which of them.
    pub revision: Revision,
    /// Its tokens: all, or the first ones.
    pub tokens: &'p TokenIds,
    /// The media in them.
    pub media: &'p [MediaItem],
    /// Where its chain starts ([`Pool::root`]).
    pub root: SequenceHash,
    /// The length of the whole prompt, as far as it is known.
    pub prompt_tokens: u32,
}

/// One prompt looked up in all caches of a pool.
#[derive(Debug)]
pub struct Lookup {
    /// The prompt by its sequence hashes.
    pub prompt: Arc<PromptBlocks>,
    /// Every rank with what it holds.
    pub candidates: Vec<Candidate>,
    /// Every rank's stream at that moment, in the same order.
    pub streams: Vec<Stream>,
    /// The servers at that moment.
    pub servers: Arc<Servers>,
    /// The ranks at that moment.
    pub ranks: Arc<Ranks>,
}

/// One rank's stream of KV events as a look-up saw it.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    /// Which rank.
    pub rank: RankId,
    /// How far the rank's cache is known.
    pub state: RankState,
    /// Whether it may hold much that its events did not tell of: then what was sent there counts too.
    pub misses_events: bool,
    /// Whether its publisher may still be heard for the first time soon.
    pub is_starting: bool,
    /// The last batch applied.
    pub applied_seq: Option<u64>,
    /// Tokens per block, once a block was stored or the engine asked.
    pub block_tokens: Option<u32>,
}

impl Pool {
    /// Looks up a prompt as the pool's renderers make it. For ranks whose renderer is not among them it has about
    /// `prompt_tokens` tokens, and matches nothing.
    #[must_use]
    pub fn lookup(&self, prompts: &[Rendered<'_>], prompt_tokens: u32, now: Instant) -> Lookup {
        let ranks = self.ranks();
        let streams = self.streams(&ranks);
        let servers = self.servers(now);
        let mut candidates = self.candidates(&ranks, &streams, &servers, now);
        let mut keys: Vec<SequenceKey> = candidates.iter().map(Candidate::key).collect();
        keys.sort_unstable();
        keys.dedup();
        // Hashed before the lock is taken: the longest part of a look-up.
        let sequence = |key: SequenceKey| {
            let prompt = prompts.iter().find(|prompt| prompt.revision == key.revision)?;
            let Rendered { root, tokens, media, prompt_tokens, .. } = *prompt;
            let hashes = tokens.sequence(&self.key, root, media, key.block_tokens);
            Some(Sequence { key, tokens: prompt_tokens, hashes: hashes.into_boxed_slice() })
        };
        let sequences: Vec<Sequence> = keys.into_iter().filter_map(sequence).collect();
        let mut overlaps = Overlaps::default();
        for Sequence { key, hashes, .. } in &sequences {
            self.caches.read().index.find(hashes, &mut overlaps);
            let known = |candidate: &&mut Candidate| candidate.trusted && candidate.key() == *key;
            for candidate in candidates.iter_mut().filter(known) {
                let overlap = overlaps.get(candidate.rank);
                candidate.gpu_blocks = overlap.gpu_blocks;
                candidate.cpu_blocks = overlap.cpu_blocks;
                candidate.disk_blocks = overlap.disk_blocks;
            }
        }
        let prompt = PromptBlocks::of(prompt_tokens, sequences);
        // All renderers make the prompt of one model and salt.
        let prompt = match prompts.first() {
            Some(rendered) => Arc::new(prompt.behind(rendered.root)),
            None => Arc::new(prompt),
        };
        Lookup { prompt, candidates, streams, servers, ranks }
    }

    /// Every rank with all that is known of it, but for what it holds of a prompt.
    pub(super) fn candidates(
        &self,
        ranks: &Ranks,
        streams: &[Stream],
        servers: &Servers,
        now: Instant,
    ) -> Vec<Candidate> {
        // The replicas of one pool are mostly alike.
        let usual = streams.iter().find_map(|stream| stream.block_tokens).unwrap_or(USUAL_BLOCK_TOKENS);
        let candidate = |stream: &Stream| {
            let trusted = stream.state.is_trusted();
            let history_blocks =
                if stream.misses_events { Self::cache_blocks(ranks, stream.rank) } else { 0 };
            let block_tokens = stream.block_tokens.unwrap_or(usual);
            let known = self.candidate(ranks, stream.rank, block_tokens, servers, now);
            Candidate { trusted, history_blocks, ..known }
        };
        streams.iter().map(candidate).collect()
    }

    /// The state of every rank's stream.
    #[must_use]
    pub fn streams(&self, ranks: &Ranks) -> Vec<Stream> {
        let caches = self.caches.read();
        let stream = |(id, rank): (RankId, &Rank)| {
            let feed = caches.feeds.get(id.index())?;
            let state = feed.rank_state(&caches.index.rank_stats(id).unwrap_or_default());
            Some(Stream {
                rank: id,
                state,
                misses_events: state.misses_events(feed.state),
                is_starting: feed.is_starting(),
                applied_seq: feed.applied_seq,
                // Events know best; before the first of them the engine's page does.
                block_tokens: feed.block_tokens.or_else(|| rank.layout.block_tokens()),
            })
        };
        ranks.iter().filter_map(stream).collect()
    }
}
