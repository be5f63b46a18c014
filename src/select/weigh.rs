//! The terms of every candidate, and their price by the policy.

use super::ask::Ask;
use super::candidate::Candidate;
use super::choose::{Excluded, Terms, Ties};
use super::config::Policy;
use super::load::Load;
use super::overlap::{Overlap, usable_tokens};
use super::scheduler::{RankState, Scheduler};
use super::simple;
use crate::units::RankId;
use std::time::Instant;

impl Scheduler {
    pub(super) fn weigh(&self, ask: &Ask, candidates: &[Candidate], now: Instant) -> Vec<Terms> {
        let open = candidates.iter().filter(|candidate| candidate.excluded.is_none());
        let greatest_weight = open.map(|candidate| candidate.weight).max().unwrap_or(0);
        candidates.iter().map(|candidate| self.weigh_one(ask, candidate, greatest_weight, now)).collect()
    }

    fn weigh_one(&self, ask: &Ask, candidate: &Candidate, greatest_weight: u32, now: Instant) -> Terms {
        let prompt_tokens = ask.prompt.tokens(candidate.key());
        let block_tokens = candidate.block_tokens.max(1);
        let mut terms = Terms {
            rank: candidate.rank,
            excluded: candidate.excluded,
            block_tokens,
            confirmed: Overlap::confirmed(candidate, prompt_tokens),
            booked_tokens: 0,
            history_tokens: 0,
            shared_blocks: 0,
            uncached_tokens: prompt_tokens.max(1),
            load: Load::default(),
            queue_tokens: 0.0,
            slot_tokens: 0.0,
            sharers: 0.0,
            decoding: 0.0,
            context_tokens: 0.0,
            eviction_age: None,
            recent_tokens: 0.0,
            spread_tokens: 0.0,
            crowd_tokens: 0.0,
            own_weight: 0.0,
            cost: f64::INFINITY,
            tied: false,
            scarcity: f64::from(greatest_weight.max(1)) / f64::from(candidate.weight.max(1)),
        };
        let Some(state) = self.ranks.get(&candidate.rank) else {
            return Terms { excluded: Some(Excluded::Unknown), ..terms };
        };
        if candidate.weight == 0 {
            terms.excluded = terms.excluded.or(Some(Excluded::Drained));
        }
        self.add_prefix(&mut terms, state, ask, candidate, now);
        self.add_load(&mut terms, state, candidate, now);
        terms
    }

    /// What the rank holds of the prompt, will hold by its bookings, and must compute.
    fn add_prefix(
        &self,
        terms: &mut Terms,
        state: &RankState,
        ask: &Ask,
        candidate: &Candidate,
        now: Instant,
    ) {
        let Overlap { gpu_tokens, cpu_tokens, .. } = terms.confirmed;
        let key = candidate.key();
        let (shared_blocks, shared_tokens) = state.book.shared(&ask.prompt, key);
        let sent_tokens = match candidate.history_blocks {
            0 => 0,
            _ => {
                let depth = state.history.depth(ask.prompt.sequence(key));
                let blocks = u32::try_from(depth).unwrap_or(u32::MAX);
                usable_tokens(blocks, key.block_tokens, ask.prompt.tokens(key))
            }
        };
        let on_gpu = gpu_tokens.max(shared_tokens);
        let on_cpu = (gpu_tokens + cpu_tokens).saturating_sub(on_gpu);
        let on_disk = terms.confirmed.tokens().saturating_sub(on_gpu + on_cpu);
        // Where the index knows better, it counts.
        let sent_beyond = sent_tokens.saturating_sub(on_gpu + on_cpu + on_disk);
        // Where events tell of most of a cache, what they do not tell of is most likely in a lower tier, or gone.
        let sent_credit = if candidate.trusted { self.config.cpu_credit } else { 1.0 };
        let saved = f64::from(on_gpu)
            + sent_credit * f64::from(sent_beyond)
            + self.config.cpu_credit * f64::from(on_cpu)
            + self.config.disk_credit * f64::from(on_disk);
        // Who has the greater part of what is there of the prompt has the prompt, for all that it matters.
        let held_blocks = (on_gpu + on_cpu + on_disk + sent_beyond) / terms.block_tokens;
        let sharers = state.book.sharers(&ask.prompt, candidate.key(), held_blocks / 2, now);
        terms.sharers = f64::from(sharers) * terms.scarcity;
        terms.shared_blocks = shared_blocks;
        terms.booked_tokens = on_gpu - gpu_tokens;
        terms.history_tokens = sent_beyond;
        terms.uncached_tokens = (f64::from(ask.prompt.tokens(key)) - saved).max(1.0).round() as u32;
    }

    /// What the rank has to do besides. Weights are shares of the load, so the load of a server of half the weight
    /// counts double.
    fn add_load(&self, terms: &mut Terms, state: &RankState, candidate: &Candidate, now: Instant) {
        let load = state.book.load();
        let (others_waiting, others_running) = others(candidate);
        let waiting_tokens = others_waiting * self.means.uncached_tokens.get();
        let others_context = (others_waiting + others_running) * self.means.context_tokens.get();
        let slots = candidate.slots;
        // HAProxy's slots are its own: another one's agent books requests that this one never sees.
        let slot_seconds = f64::from(slots.waiting(load.own_requests())) * self.means.held_seconds.get()
            / f64::from(slots.limit.unwrap_or(1).max(1));
        terms.load = load;
        // Hidden work looks like a lag too, but then the engine's clock says that there is none.
        let lag = self.lag.get().min(state.told_lag);
        let queue = state.reckoning.queue_tokens(load.prefill_tokens, self.prefill_rate(), lag, now);
        terms.queue_tokens = (queue + waiting_tokens) * terms.scarcity;
        terms.decoding = (f64::from(load.decoding) + others_running) * terms.scarcity;
        terms.context_tokens = (load.context_tokens as f64 + others_context) * terms.scarcity;
        terms.slot_tokens = slot_seconds * self.prefill_rate();
        terms.eviction_age = state.evictions.age(now);
        terms.recent_tokens = state.recent.at(now, self.config.recent_half_life) * terms.scarcity;
    }

    /// Prices the terms by the policy; returns how ties are settled.
    pub(super) fn price(
        &self,
        ask: &Ask,
        candidates: &[Candidate],
        terms: &mut [Terms],
        session: Option<RankId>,
    ) -> Ties {
        let speed = self.prefill_rate();
        let none = Ties::Band { blocks: 0.0 };
        let requests = |terms: &Terms, candidate: &Candidate| {
            candidate.slots.occupied(terms.load.own_requests()).max(terms.load.requests)
        };
        let key = match self.policy {
            Policy::SessionHash => ask.session,
            Policy::PrefixHash { head_tokens } => candidates.first().and_then(|first| {
                let sequence = ask.prompt.sequence(first.key());
                let blocks = (head_tokens / first.block_tokens.max(1)).max(1) as usize;
                sequence.get(blocks.min(sequence.len()).checked_sub(1)?).map(|hash| hash.0)
            }),
            _ => None,
        };
        match (self.policy, key) {
            (Policy::Cost(cost), _) => {
                cost.price(terms, speed, session);
                Ties::Band { blocks: cost.band_blocks }
            }
            (Policy::Dynamo(dynamo), _) => {
                dynamo.price(terms, candidates, &ask.prompt);
                Ties::Exact
            }
            (Policy::RoundRobin, _) => {
                simple::round_robin(terms, |rank| self.ranks.get(&rank).map_or(0.0, |state| state.turns));
                none
            }
            (Policy::SessionHash, Some(key)) => {
                simple::rendezvous(terms, key, None);
                Ties::Exact
            }
            (Policy::PrefixHash { .. }, Some(key)) => {
                simple::rendezvous(terms, key, Some(PREFIX_HASH_BOUND));
                Ties::Exact
            }
            (Policy::LeastLoaded | Policy::SessionHash | Policy::PrefixHash { .. }, _) => {
                for (terms, candidate) in terms.iter_mut().zip(candidates) {
                    terms.cost = f64::from(requests(terms, candidate)) * terms.scarcity;
                }
                none
            }
        }
    }
}

/// The usual bound of consistent hashing with bounded loads.
const PREFIX_HASH_BOUND: f64 = 1.25;

/// Requests that the engine reports beyond our bookings of that time, waiting and running: other clients', or another
/// agent's.
fn others(candidate: &Candidate) -> (f64, f64) {
    let Some(reported) = candidate.reported else { return (0.0, 0.0) };
    let others = reported.waiting.saturating_add(reported.running).saturating_sub(reported.booked);
    let waiting = others.min(reported.waiting);
    (waiting.into(), (others - waiting).into())
}
