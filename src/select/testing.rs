//! A small pool for tests: ranks with unbounded caches that store a prompt when told to.

use super::{Ask, Candidate, Choice, Policy, PromptBlocks, Scheduler, SchedulerConfig, SequenceKey};
use crate::hash::HashKey;
use crate::units::{RankId, RequestId, SequenceHash, TokenId};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) const BLOCK_TOKENS: u32 = 16;

/// A prompt of segments, each a number that stands for its text and a length in tokens.
pub(super) fn prompt(segments: &[(u32, u32)]) -> Arc<PromptBlocks> {
    let key = HashKey::from_seed(1);
    let tokens: Vec<TokenId> = segments
        .iter()
        .flat_map(|(text, length)| (0..*length).map(move |at| TokenId(text.wrapping_mul(7919) ^ at << 8)))
        .collect();
    let sequence = key.sequence(key.plain_root(), &tokens, BLOCK_TOKENS);
    Arc::new(PromptBlocks::new(tokens.len() as u32, [(BLOCK_TOKENS, sequence)]))
}

pub(super) struct Pool {
    pub(super) scheduler: Scheduler,
    pub(super) now: Instant,
    /// Templates of the candidates; overlaps are filled in from the caches.
    pub(super) candidates: Vec<Candidate>,
    caches: Vec<HashSet<SequenceHash>>,
    next_id: u128,
}

impl Pool {
    pub(super) fn new(ranks: u16, policy: Policy) -> Self {
        Self::with_config(ranks, policy, SchedulerConfig::default())
    }

    pub(super) fn with_config(ranks: u16, policy: Policy, config: SchedulerConfig) -> Self {
        let now = Instant::now();
        let ids: Vec<RankId> = (0..ranks).map(RankId).collect();
        let mut scheduler = Scheduler::new(policy, config, 42);
        scheduler.set_ranks(&ids, now);
        let candidates = ids.iter().map(|rank| Candidate::idle(*rank, BLOCK_TOKENS)).collect();
        Self { scheduler, now, candidates, caches: vec![HashSet::new(); ranks.into()], next_id: 0 }
    }

    pub(super) fn ask(&mut self, prompt: &Arc<PromptBlocks>, session: Option<u64>) -> Ask {
        self.next_id += 1;
        Ask { id: RequestId(self.next_id), prompt: Arc::clone(prompt), session }
    }

    /// The candidates with what their caches hold of a prompt.
    pub(super) fn seen(&self, prompt: &PromptBlocks) -> Vec<Candidate> {
        let depth = |rank: RankId| {
            let held = |hash: &&SequenceHash| self.caches[rank.index()].contains(*hash);
            prompt.sequence(SequenceKey::of_size(BLOCK_TOKENS)).iter().take_while(held).count() as u32
        };
        let seen =
            |candidate: &Candidate| Candidate { gpu_blocks: depth(candidate.rank), ..candidate.clone() };
        self.candidates.iter().map(seen).collect()
    }

    pub(super) fn book(&mut self, ask: &Ask) -> Choice {
        let seen = self.seen(&ask.prompt);
        self.scheduler.book(ask, &seen, self.now)
    }

    /// Puts a prompt into a rank's cache without any request.
    pub(super) fn store(&mut self, rank: RankId, prompt: &PromptBlocks) {
        self.caches[rank.index()].extend(prompt.sequence(SequenceKey::of_size(BLOCK_TOKENS)));
    }

    /// The rank prefills what is booked there of this prompt, and says so.
    pub(super) fn prefill(&mut self, rank: RankId, prompt: &PromptBlocks) {
        self.store(rank, prompt);
        let cache = &self.caches[rank.index()];
        let depth = |sequence: &[SequenceHash]| {
            sequence.iter().take_while(|hash| cache.contains(*hash)).count() as u32
        };
        self.scheduler.progress(rank, depth, self.now);
    }

    /// One request from start to end, with nothing else in flight; returns its rank.
    pub(super) fn serve(&mut self, prompt: &Arc<PromptBlocks>, session: Option<u64>) -> RankId {
        let ask = self.ask(prompt, session);
        let rank = self.book(&ask).rank.expect("a candidate");
        self.now += Duration::from_millis(150);
        self.prefill(rank, prompt);
        self.scheduler.end(ask.id, Some(rank), self.now).expect("booked");
        self.now += Duration::from_millis(150);
        rank
    }
}

/// How many of the ranks are each of `0..ranks`.
pub(super) fn shares(chosen: &[RankId], ranks: u16) -> Vec<usize> {
    (0..ranks).map(|rank| chosen.iter().filter(|chosen| chosen.0 == rank).count()).collect()
}
