//! Other routers' policies, as small as they can be and still decide alike. They are here to be compared with, not to be
//! used: what a user may choose is in `select`.
//!
//! All of them see what the product sees of caches; of requests they see the first token too, which the product does
//! without.

use super::history::History;
use crate::{
    config::DynamoWeights,
    select::{Ask, Candidate, PromptBlocks, SequenceKey},
    units::{RankId, RequestId, SequenceHash},
};
use hashbrown::HashMap;
use std::sync::Arc;

/// What a rival decides by.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum RivalPolicy {
    /// Queued tokens, own uncached tokens and contexts, each by a weight.
    Tokens(TokenCost),
    /// Dynamo's formula, and whether booked prompts count as cached (predict-on-route).
    Dynamo(DynamoWeights, bool),
    /// SGLang's router: the longest match of its own history, unless too little matches or the load is uneven.
    Sglang,
    /// llm-d: scores of the queue, of KV usage and of the prefix, weighed 2 : 2 : 3.
    LlmD,
    /// By chance.
    Random,
}

/// Weights of [`RivalPolicy::Tokens`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct TokenCost {
    pub(super) sees: Sees,
    /// Weight of an uncached token of the request itself.
    pub(super) own_weight: f64,
    /// Weight of a token of context.
    pub(super) context_weight: f64,
    /// Whether booked prompts count as cached.
    pub(super) predicts: bool,
}

/// What is known of the caches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sees {
    /// What the events tell.
    Events,
    /// What was sent there before, for ever.
    AllHistory,
    /// What was sent there before, as much as fits.
    BoundedHistory,
}

/// What a token that is loaded from the CPU tier costs of a computed one.
const CPU_TOKEN_COST: f64 = 0.15;

/// SGLang's `cache_threshold`, `balance_abs_threshold` and `balance_rel_threshold`.
const SGLANG: (f64, u32, f64) = (0.3, 64, 1.5);

/// One rival at work.
#[derive(Debug)]
pub(super) struct Rival {
    policy: RivalPolicy,
    ranks: Vec<Rank>,
    bookings: HashMap<RequestId, Booking>,
    /// Where each request goes, by its number, whatever the policy.
    places: Option<Arc<[RankId]>>,
    rng: fastrand::Rng,
}

#[derive(Debug)]
struct Rank {
    history: History,
    /// How many bookings have each block.
    booked: HashMap<SequenceHash, u32>,
    /// Uncached tokens of the bookings that have not answered yet.
    queue_tokens: f64,
    context_tokens: f64,
    requests: u32,
    /// The share of its GPU blocks in use when it was last asked.
    usage: f64,
}

#[derive(Debug)]
struct Booking {
    rank: RankId,
    prompt: Arc<PromptBlocks>,
    key: SequenceKey,
    uncached_tokens: f64,
    answers: bool,
}

impl Rival {
    /// `cache_blocks` is what a replica's tiers hold together.
    pub(super) fn new(policy: RivalPolicy, replicas: u16, cache_blocks: usize, seed: u64) -> Self {
        let bound = match policy {
            RivalPolicy::Tokens(TokenCost { sees: Sees::BoundedHistory, .. }) => Some(cache_blocks),
            _ => None,
        };
        let rank = || Rank {
            history: History::new(bound),
            booked: HashMap::new(),
            queue_tokens: 0.0,
            context_tokens: 0.0,
            requests: 0,
            usage: 0.0,
        };
        Self {
            policy,
            ranks: (0..replicas).map(|_| rank()).collect(),
            bookings: HashMap::new(),
            places: None,
            rng: fastrand::Rng::with_seed(seed),
        }
    }

    /// One that sends each request where it is told, by the request's number.
    pub(super) fn placed(places: Arc<[RankId]>, replicas: u16) -> Self {
        Self { places: Some(places), ..Self::new(RivalPolicy::Random, replicas, 0, 0) }
    }

    /// Chooses and books; the lowest cost wins, ties by chance.
    pub(super) fn choose(&mut self, ask: &Ask, candidates: &[Candidate]) -> Option<RankId> {
        if let Some(places) = &self.places {
            return places.get(usize::try_from(ask.id.0).ok()?).copied();
        }
        let costs = self.costs(ask, candidates);
        let least = costs.iter().copied().fold(f64::INFINITY, f64::min);
        let best: Vec<usize> = (0..costs.len()).filter(|at| costs[*at] <= least).collect();
        let chosen = candidates.get(*best.get(self.rng.usize(..best.len().max(1)))?)?;
        self.book(ask, chosen);
        Some(chosen.rank)
    }

    /// Books a choice.
    pub(super) fn book(&mut self, ask: &Ask, chosen: &Candidate) {
        let Some(rank) = self.ranks.get(chosen.rank.index()) else { return };
        let uncached_tokens = self.uncached_tokens(rank, ask, chosen);
        let keeps_history = self.keeps_history();
        let rank = &mut self.ranks[chosen.rank.index()];
        let sequence = ask.prompt.sequence(chosen.key());
        if keeps_history {
            rank.history.add(sequence);
        }
        for hash in sequence {
            *rank.booked.entry(*hash).or_default() += 1;
        }
        rank.queue_tokens += uncached_tokens;
        rank.context_tokens += f64::from(ask.prompt.tokens(chosen.key()));
        rank.requests += 1;
        let booking = Booking {
            rank: chosen.rank,
            prompt: Arc::clone(&ask.prompt),
            key: chosen.key(),
            uncached_tokens,
            answers: false,
        };
        self.bookings.insert(ask.id, booking);
    }

    /// Its prefill is done.
    pub(super) fn first_token(&mut self, id: RequestId) {
        let Some(booking) = self.bookings.get_mut(&id) else { return };
        if !std::mem::replace(&mut booking.answers, true) {
            self.ranks[booking.rank.index()].queue_tokens -= booking.uncached_tokens;
        }
    }

    /// It is over.
    pub(super) fn end(&mut self, id: RequestId) {
        self.first_token(id);
        let Some(booking) = self.bookings.remove(&id) else { return };
        let rank = &mut self.ranks[booking.rank.index()];
        rank.context_tokens -= f64::from(booking.prompt.tokens(booking.key));
        rank.requests -= 1;
        for hash in booking.prompt.sequence(booking.key) {
            if let Some(count) = rank.booked.get_mut(hash) {
                *count -= 1;
                if *count == 0 {
                    rank.booked.remove(hash);
                }
            }
        }
    }

    /// A replica has lost its requests.
    pub(super) fn restarted(&mut self, rank: RankId) {
        let mut lost: Vec<RequestId> =
            self.bookings.iter().filter(|(_, booking)| booking.rank == rank).map(|(id, _)| *id).collect();
        // In an order that does not change from run to run: sums of fractions depend on it.
        lost.sort_unstable_by_key(|id| id.0);
        lost.into_iter().for_each(|id| self.end(id));
    }

    /// A replica was asked for its KV usage.
    pub(super) fn polled(&mut self, rank: RankId, usage: f64) {
        if let Some(rank) = self.ranks.get_mut(rank.index()) {
            rank.usage = usage;
        }
    }

    const fn keeps_history(&self) -> bool {
        match self.policy {
            RivalPolicy::Tokens(cost) => !matches!(cost.sees, Sees::Events),
            RivalPolicy::Sglang => true,
            _ => false,
        }
    }

    /// Leading blocks on the GPU, and behind them in CPU memory, as this rival believes.
    fn blocks(&self, rank: &Rank, ask: &Ask, candidate: &Candidate) -> (u32, u32) {
        let (predicts, by_history) = match self.policy {
            RivalPolicy::Tokens(cost) => (cost.predicts, self.keeps_history()),
            RivalPolicy::Dynamo(_, predicts) => (predicts, false),
            _ => (false, self.keeps_history()),
        };
        let sequence = ask.prompt.sequence(candidate.key());
        let (mut gpu, mut all) = (candidate.gpu_blocks, candidate.gpu_blocks + candidate.cpu_blocks);
        if by_history {
            gpu = rank.history.depth(sequence);
            all = gpu;
        }
        if predicts {
            gpu = gpu.max(sequence.iter().take_while(|hash| rank.booked.contains_key(*hash)).count() as u32);
        }
        (gpu, all.max(gpu) - gpu)
    }

    fn uncached_tokens(&self, rank: &Rank, ask: &Ask, candidate: &Candidate) -> f64 {
        let (gpu, cpu) = self.blocks(rank, ask, candidate);
        let block = f64::from(candidate.block_tokens);
        let cpu_saves = match self.policy {
            RivalPolicy::Dynamo(dynamo, _) => dynamo.host_cache_hit_weight,
            _ => 1.0 - CPU_TOKEN_COST,
        };
        (f64::from(ask.prompt.tokens(candidate.key()))
            - block * (f64::from(gpu) + cpu_saves * f64::from(cpu)))
        .max(1.0)
    }

    fn costs(&self, ask: &Ask, candidates: &[Candidate]) -> Vec<f64> {
        match self.policy {
            RivalPolicy::Tokens(cost) => self.each(candidates, |rank, candidate| {
                rank.queue_tokens
                    + cost.own_weight * self.uncached_tokens(rank, ask, candidate)
                    + cost.context_weight * rank.context_tokens
            }),
            RivalPolicy::Dynamo(dynamo, _) => self.each(candidates, |rank, candidate| {
                let block = f64::from(candidate.block_tokens);
                let (gpu, cpu) = self.blocks(rank, ask, candidate);
                let sequence = ask.prompt.sequence(candidate.key());
                let new_blocks = sequence.iter().filter(|hash| !rank.booked.contains_key(*hash)).count();
                let credit = dynamo.overlap_score_credit * f64::from(gpu)
                    + dynamo.host_cache_hit_weight * f64::from(cpu);
                let prefill =
                    (rank.queue_tokens + f64::from(ask.prompt.tokens(candidate.key()))) / block - credit;
                dynamo.prefill_load_scale * prefill.max(0.0) + (rank.booked.len() + new_blocks) as f64
            }),
            RivalPolicy::Sglang => self.sglang(ask, candidates),
            RivalPolicy::LlmD => {
                let waiting = |candidate: &Candidate| candidate.reported.map_or(0, |load| load.waiting);
                let most = candidates.iter().map(waiting).max().unwrap_or(0);
                let least = candidates.iter().map(waiting).min().unwrap_or(0);
                self.each(candidates, |rank, candidate| {
                    let free = f64::from(most - waiting(candidate)) / f64::from((most - least).max(1));
                    let queue = if most == least { 1.0 } else { free };
                    let (gpu, cpu) = self.blocks(rank, ask, candidate);
                    let blocks = ask.prompt.sequence(candidate.key()).len().max(1);
                    -(2.0 * queue + 2.0 * (1.0 - rank.usage) + 3.0 * f64::from(gpu + cpu) / blocks as f64)
                })
            }
            RivalPolicy::Random => vec![0.0; candidates.len()],
        }
    }

    fn sglang(&self, ask: &Ask, candidates: &[Candidate]) -> Vec<f64> {
        let (threshold, absolute, relative) = SGLANG;
        let requests =
            |candidate: &Candidate| self.ranks.get(candidate.rank.index()).map_or(0, |r| r.requests);
        let most = candidates.iter().map(requests).max().unwrap_or(0);
        let least = candidates.iter().map(requests).min().unwrap_or(0);
        if most - least > absolute && f64::from(most) > relative * f64::from(least) {
            return self.each(candidates, |rank, _| rank.requests.into());
        }
        let matches = self.each(candidates, |rank, candidate| {
            -f64::from(rank.history.depth(ask.prompt.sequence(candidate.key())))
        });
        let key = candidates.first().map(Candidate::key).unwrap_or_default();
        let longest = -matches.iter().copied().fold(0.0, f64::min) * f64::from(key.block_tokens);
        if longest > threshold * f64::from(ask.prompt.tokens(key)) {
            return matches;
        }
        self.each(candidates, |rank, _| rank.history.blocks() as f64)
    }

    fn each(&self, candidates: &[Candidate], cost: impl Fn(&Rank, &Candidate) -> f64) -> Vec<f64> {
        let rank = |candidate: &Candidate| self.ranks.get(candidate.rank.index());
        candidates.iter().map(|c| rank(c).map_or(f64::INFINITY, |rank| cost(rank, c))).collect()
    }
}

#[cfg(test)]
mod tests;
