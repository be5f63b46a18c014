//! The scheduler against simulated prefix caches: how much they serve, and how evenly the work falls.
//!
//! Two ranks of 160 blocks of 32 tokens, and chats that together need more than either holds.

use super::overlap::usable_tokens;
use super::*;
use crate::hash::HashKey;
use crate::units::{RankId, RequestId, SequenceHash, TokenId};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

const BLOCK_TOKENS: u32 = 32;
const CACHE_BLOCKS: usize = 160;
const PREFILL_TOKENS_PER_SECOND: f64 = 3_000.0;
const DECODE_SECONDS: f64 = 0.3;

/// A prefix cache that evicts the longest unused block, of one request the last block first.
#[derive(Default)]
struct Cache {
    used_at: HashMap<SequenceHash, u64>,
    by_use: BTreeMap<u64, SequenceHash>,
    uses: u64,
}

impl Cache {
    fn depth(&self, sequence: &[SequenceHash]) -> u32 {
        sequence.iter().take_while(|hash| self.used_at.contains_key(hash)).count() as u32
    }

    fn hit_tokens(&self, turn: &Turn) -> u32 {
        usable_tokens(self.depth(&turn.prompt), BLOCK_TOKENS, turn.prompt_tokens)
    }

    fn use_blocks(&mut self, sequence: &[SequenceHash], capacity: usize) {
        for hash in sequence.iter().rev() {
            self.uses += 1;
            if let Some(before) = self.used_at.insert(*hash, self.uses) {
                self.by_use.remove(&before);
            }
            self.by_use.insert(self.uses, *hash);
        }
        while self.used_at.len() > capacity {
            let (_, longest_unused) = self.by_use.pop_first().expect("one for each block");
            self.used_at.remove(&longest_unused);
        }
    }
}

/// Users who each hold a conversation of some turns, over a few system prompts; twelve at a time, in random order.
#[derive(Clone, Copy)]
struct Chats {
    users: usize,
    turns: usize,
    heads: usize,
}

struct Turn {
    user: usize,
    prompt: Vec<SequenceHash>,
    prompt_tokens: u32,
}

impl Chats {
    fn generate(self, seed: u64) -> Vec<Turn> {
        let key = HashKey::from_seed(seed);
        let mut rng = fastrand::Rng::with_seed(seed);
        let text = |rng: &mut fastrand::Rng, words: u32| -> Vec<TokenId> {
            (0..words * 6 / 5 + 5).map(|_| TokenId(rng.u32(..100_000))).collect()
        };
        let heads: Vec<_> = (0..self.heads).map(|at| text(&mut rng, [150, 250, 350][at % 3])).collect();
        let mut said: Vec<_> = (0..self.users).map(|user| heads[user % self.heads].clone()).collect();
        let mut waiting: Vec<usize> = (0..self.users).rev().collect();
        let mut open: Vec<(usize, usize)> = Vec::new();
        let mut turns = Vec::new();
        loop {
            while let Some(user) = waiting.pop_if(|_| open.len() < 12) {
                open.push((user, self.turns));
            }
            if open.is_empty() {
                return turns;
            }
            let at = rng.usize(..open.len());
            let user = open[at].0;
            open[at].1 -= 1;
            if open[at].1 == 0 {
                open.swap_remove(at);
            }
            let words = rng.u32(30..=80);
            said[user].extend(text(&mut rng, words));
            let prompt = key.sequence(key.plain_root(), &said[user], BLOCK_TOKENS);
            turns.push(Turn { user, prompt, prompt_tokens: said[user].len() as u32 });
            said[user].extend(text(&mut rng, 16));
        }
    }
}

#[derive(Clone, Copy, Default)]
struct Outcome {
    /// Prompt tokens served from cache, of all.
    cached_share: f64,
    /// The busier rank's share of the tokens that were computed.
    greatest_share: f64,
}

/// Serves the turns in order, with so many in flight, never two of one user.
fn serve(turns: &[Turn], in_flight: usize, policy: Policy, sessions: bool, seed: u64) -> Outcome {
    let start = Instant::now();
    let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
    let ranks = [RankId(0), RankId(1)];
    let mut scheduler = Scheduler::new(policy, SchedulerConfig::default(), seed);
    scheduler.set_ranks(&ranks, start);
    let mut caches = [Cache::default(), Cache::default()];
    let mut prefilling_until = [0.0f64; 2];
    let mut computed = [0u64; 2];
    // What is running, by the microsecond of its next event: the turn, its rank, whether its prefill is done.
    let mut running: BTreeMap<(u64, usize), (usize, bool)> = BTreeMap::new();
    let (mut next, mut now) = (0, 0.0f64);
    loop {
        while let Some(turn) = turns.get(next).filter(|turn| {
            let busy = running.keys().any(|(_, other)| turns[*other].user == turn.user);
            running.len() < in_flight && !busy
        }) {
            let candidates = ranks.map(|rank| Candidate {
                gpu_blocks: caches[rank.index()].depth(&turn.prompt),
                ..Candidate::idle(rank, BLOCK_TOKENS)
            });
            let ask = Ask {
                id: RequestId(next as u128),
                prompt: Arc::new(PromptBlocks::new(
                    turn.prompt_tokens,
                    [(BLOCK_TOKENS, turn.prompt.clone())],
                )),
                session: sessions.then_some(turn.user as u64),
            };
            let chosen = scheduler.book(&ask, &candidates, at(now)).rank.expect("two candidates").index();
            let own_tokens = turn.prompt_tokens - caches[chosen].hit_tokens(turn);
            prefilling_until[chosen] =
                prefilling_until[chosen].max(now) + f64::from(own_tokens) / PREFILL_TOKENS_PER_SECOND;
            running.insert(((prefilling_until[chosen] * 1e6) as u64, next), (chosen, false));
            next += 1;
            now += 0.005;
        }
        let Some(((micros, which), (rank, prefilled))) = running.pop_first() else { break };
        now = now.max(micros as f64 / 1e6);
        if prefilled {
            scheduler.end(RequestId(which as u128), None, at(now));
            now += if in_flight == 1 { 0.15 } else { 0.02 };
            continue;
        }
        let turn = &turns[which];
        computed[rank] += u64::from(turn.prompt_tokens - caches[rank].hit_tokens(turn));
        caches[rank].use_blocks(&turn.prompt, CACHE_BLOCKS);
        scheduler.progress(ranks[rank], |sequence| caches[rank].depth(sequence), at(now));
        running.insert((((now + DECODE_SECONDS) * 1e6) as u64, which), (rank, true));
    }
    let all: u64 = turns.iter().map(|turn| u64::from(turn.prompt_tokens)).sum();
    let sum = computed[0] + computed[1];
    Outcome {
        cached_share: 1.0 - sum as f64 / all as f64,
        greatest_share: computed[0].max(computed[1]) as f64 / sum as f64,
    }
}

/// What a cache that never evicts would serve.
fn bound(turns: &[Turn]) -> f64 {
    let mut cache = Cache::default();
    let (mut hits, mut all) = (0, 0);
    for turn in turns {
        hits += u64::from(cache.hit_tokens(turn));
        all += u64::from(turn.prompt_tokens);
        cache.use_blocks(&turn.prompt, usize::MAX);
    }
    hits as f64 / all as f64
}

const A: Chats = Chats { users: 12, turns: 6, heads: 3 };
const B: Chats = Chats { users: 24, turns: 5, heads: 4 };
const C: Chats = Chats { users: 48, turns: 3, heads: 6 };
const SEEDS: u64 = 12;

/// The mean over the seeds, and the mean of the bound.
fn mean(chats: Chats, in_flight: usize, policy: Policy, sessions: bool) -> (Outcome, f64) {
    let (mut mean, mut mean_bound) = (Outcome::default(), 0.0);
    for seed in 0..SEEDS {
        let turns = chats.generate(seed);
        let outcome = serve(&turns, in_flight, policy, sessions, seed);
        mean.cached_share += outcome.cached_share / SEEDS as f64;
        mean.greatest_share += outcome.greatest_share / SEEDS as f64;
        mean_bound += bound(&turns) / SEEDS as f64;
    }
    (mean, mean_bound)
}

#[test]
fn chats_are_served_from_cache_and_evenly_whether_one_by_one_or_four_at_once() {
    for (name, chats) in [("A", A), ("B", B), ("C", C)] {
        for in_flight in [1, 4] {
            for sessions in [false, true] {
                let (outcome, bound) = mean(chats, in_flight, Policy::default(), sessions);
                let case = format!("{name}, {in_flight} in flight, sessions {sessions}");
                let Outcome { cached_share, greatest_share } = outcome;
                println!("{case}: {cached_share:.3} of {bound:.3}, greatest share {greatest_share:.2}");
                assert!(cached_share >= 0.98 * bound, "{case}: {cached_share:.3} of {bound:.3}");
                assert!(greatest_share <= 0.60, "{case}: {greatest_share:.3}");
            }
        }
    }
}

#[test]
fn the_default_serves_more_from_cache_than_the_other_policies() {
    let (ours, _) = mean(A, 4, Policy::default(), false);
    for other in
        [Policy::RoundRobin, Policy::LeastLoaded, Policy::Dynamo(crate::config::DynamoWeights::default())]
    {
        let (theirs, _) = mean(A, 4, other, false);
        assert!(ours.cached_share > theirs.cached_share + 0.03, "{other:?}: {:.3}", theirs.cached_share);
    }
}
