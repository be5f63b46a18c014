//! The scheduler of one pool: choices, bookings and their ends.

use super::ask::{Ask, PromptBlocks};
use super::booking::{Booking, RankBook};
use super::candidate::Candidate;
use super::choose::{Choice, Reason, Terms, pick};
use super::config::{Policy, SchedulerConfig};
use super::generations::Generations;
use super::load::{Load, SlowMean};
use super::recent::Fading;
use crate::units::{RankId, RequestId, SequenceHash};
use hashbrown::HashMap;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Chooses a rank for each request of one pool and keeps account of what it gave to whom.
///
/// [`Self::book`] is choice and booking in one step: hold one lock around it, and what two requests see of each other
/// is always whole.
#[derive(Debug)]
pub struct Scheduler {
    pub(super) policy: Policy,
    pub(super) config: SchedulerConfig,
    pub(super) ranks: BTreeMap<RankId, RankState>,
    pub(super) means: Means,
    owners: HashMap<RequestId, RankId>,
    sessions: Generations<u64, RankId>,
    /// Ends without a booking: their choice may still be under way.
    early_ends: Generations<RequestId, ()>,
    booked_hashes: usize,
    rng: fastrand::Rng,
    counts: Counts,
    lease_checked: Option<Instant>,
}

/// Ends that are remembered for a choice that comes after them: more than end in the time that a decision may take.
const EARLY_ENDS: usize = 8192;

/// What one request adds to the memory of recent work at most, in tokens: a step's worth. Uncapped, one huge prompt would
/// keep a rank unattractive for as long as the memory takes to fade, though it has long been idle again.
const RECENT_TOKENS_MAX: u32 = 2048;

fn recent_tokens(uncached_tokens: u32) -> f64 {
    uncached_tokens.min(RECENT_TOKENS_MAX).into()
}

/// What is kept of one rank.
#[derive(Debug)]
pub(super) struct RankState {
    pub(super) book: RankBook,
    pub(super) recent: Fading,
    /// How far its turns have come, for round robin.
    pub(super) turns: f64,
    /// Whether it can be chosen now.
    open: bool,
    /// Whether lost ends are found by counting, so that no lease is needed.
    counted: bool,
}

/// Means over this pool's requests, for what nobody reports of a single one.
#[derive(Debug)]
pub(super) struct Means {
    pub(super) held_seconds: SlowMean,
    pub(super) uncached_tokens: SlowMean,
    pub(super) context_tokens: SlowMean,
}

/// What happened since the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Choices that were booked.
    pub booked: u64,
    /// Choices that were not, because a bound was reached.
    pub not_booked: u64,
    /// Choices that were not, because the request had ended before them.
    pub ended_early: u64,
    /// Bookings that ended because their id was booked again.
    pub replaced: u64,
    /// Bookings that moved to another rank.
    pub moved: u64,
    /// Bookings that ended by the end of their request.
    pub ended: u64,
    /// Bookings that ended with their rank.
    pub removed: u64,
    /// Bookings that ended because nobody has their request any more: their end was never told.
    pub lost: u64,
    /// Bookings whose lease ran out: nobody could tell whether their request lives.
    pub expired: u64,
}

/// A booking that ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ended {
    /// The rank it was booked on.
    pub rank: RankId,
    /// Whether its prefill was seen done.
    pub prefilled: bool,
    /// Prompt tokens that the rank had to compute, as known at booking.
    pub uncached_tokens: u32,
    /// How long it was booked.
    pub held: Duration,
}

impl Scheduler {
    /// A scheduler without ranks. All its chance comes from `seed`.
    #[must_use]
    pub fn new(policy: Policy, config: SchedulerConfig, seed: u64) -> Self {
        Self {
            policy,
            config,
            ranks: BTreeMap::new(),
            means: Means {
                // First guesses only: an answer of some hundred tokens to a prompt of a thousand.
                held_seconds: SlowMean::new(5.0),
                uncached_tokens: SlowMean::new(500.0),
                context_tokens: SlowMean::new(1_000.0),
            },
            owners: HashMap::new(),
            sessions: Generations::new(config.max_sessions),
            early_ends: Generations::new(EARLY_ENDS),
            booked_hashes: 0,
            rng: fastrand::Rng::with_seed(seed),
            counts: Counts::default(),
            lease_checked: None,
        }
    }

    /// Sets the pool's ranks. The bookings of a rank that is not among them end; returns how many.
    pub fn set_ranks(&mut self, ranks: &[RankId], now: Instant) -> usize {
        let gone: Vec<RankId> = self.ranks.keys().filter(|rank| !ranks.contains(rank)).copied().collect();
        let ended = gone.iter().map(|rank| self.remove_rank(*rank)).sum();
        for rank in ranks {
            if self.ranks.contains_key(rank) {
                continue;
            }
            let state = RankState {
                book: RankBook::default(),
                recent: Fading::empty(now),
                turns: 0.0,
                open: false,
                counted: false,
            };
            self.ranks.insert(*rank, state);
            self.set_open(*rank, true, now);
        }
        ended
    }

    /// Says whether a rank can be chosen from now on. One that comes back, and a new one, starts beside the idlest of
    /// the others instead of making up for all that it missed.
    pub fn set_open(&mut self, rank: RankId, open: bool, now: Instant) {
        let half_life = self.config.recent_half_life;
        let others = || self.ranks.iter().filter(|(other, state)| **other != rank && state.open);
        let turns = others().map(|(_, state)| state.turns).fold(f64::INFINITY, f64::min);
        let recent = others().map(|(_, state)| state.recent.at(now, half_life)).fold(f64::INFINITY, f64::min);
        let Some(state) = self.ranks.get_mut(&rank) else { return };
        if open && !state.open && turns.is_finite() {
            state.turns = state.turns.max(turns);
            let missed = recent - state.recent.at(now, half_life);
            state.recent.add(missed.max(0.0), now, half_life);
        }
        state.open = open;
    }

    /// Says whether somebody counts the requests on a rank, so that lost ends come to light ([`Self::lose`]).
    pub fn set_counted(&mut self, rank: RankId, counted: bool) {
        if let Some(state) = self.ranks.get_mut(&rank) {
            state.counted = counted;
        }
    }

    /// Forgets a rank: its bookings end, its sessions are free. Returns how many bookings ended. To be called also when
    /// a replica has restarted and lost what it was doing; then [`Self::set_ranks`] brings it back.
    pub fn remove_rank(&mut self, rank: RankId) -> usize {
        let Some(state) = self.ranks.remove(&rank) else { return 0 };
        let mut ended = 0;
        for (id, booking, _) in state.book.bookings() {
            self.owners.remove(&id);
            self.booked_hashes = self.booked_hashes.saturating_sub(booking.prompt.hashes());
            ended += 1;
        }
        self.sessions.retain(|last| *last != rank);
        self.counts.removed += ended as u64;
        ended
    }

    /// What [`Self::book`] would choose now. Changes nothing.
    #[must_use]
    pub fn choose(&self, ask: &Ask, candidates: &[Candidate], now: Instant) -> Choice {
        self.decide(ask, candidates, &mut self.rng.clone(), now)
    }

    /// Chooses and books. A request that has already ended (its client left while we were deciding) is not booked: nobody
    /// would end the booking.
    pub fn book(&mut self, ask: &Ask, candidates: &[Candidate], now: Instant) -> Choice {
        if self.take_out(ask.id).is_some() {
            self.counts.replaced += 1;
        }
        let mut rng = self.rng.clone();
        let mut choice = self.decide(ask, candidates, &mut rng, now);
        self.rng = rng;
        if self.early_ends.get(&ask.id).is_some() {
            self.counts.ended_early += 1;
            return choice;
        }
        let chosen = choice.chosen().and_then(|terms| {
            let candidate = candidates.iter().find(|candidate| candidate.rank == terms.rank)?;
            Some((terms.clone(), candidate))
        });
        if let Some((terms, candidate)) = chosen {
            choice.booked = self.enter(ask, candidate, &terms, now);
            let others = candidates.iter().filter(|other| other.rank != terms.rank);
            let elsewhere = others.map(|other| other.gpu_blocks).max().unwrap_or_default();
            if let Some(booking) =
                self.ranks.get_mut(&terms.rank).and_then(|state| state.book.get_mut(ask.id))
            {
                booking.elsewhere_blocks = elsewhere;
            }
        }
        choice
    }

    /// Ends a booking: its request is over. `used` is the rank that really served it, if that is known: the session
    /// will be looked for there.
    pub fn end(&mut self, id: RequestId, used: Option<RankId>, now: Instant) -> Option<Ended> {
        let Some((rank, booking, prefilled)) = self.take_out(id) else {
            self.early_ends.set(id, ());
            return None;
        };
        self.counts.ended += 1;
        if let (Some(session), Some(used)) = (booking.session, used.filter(|used| *used != rank)) {
            self.sessions.set(session, used);
        }
        let held = now.saturating_duration_since(booking.booked_at);
        self.means.held_seconds.update(held.as_secs_f64());
        Some(Ended { rank, prefilled, uncached_tokens: booking.uncached_tokens, held })
    }

    /// Moves a booking to where HAProxy sent the request instead (redispatch). `target` is that rank as it stands now,
    /// with the overlap of the booking's prompt. Returns false, and changes nothing, where the id is not booked or the
    /// rank is unknown.
    pub fn move_to(&mut self, id: RequestId, target: &Candidate, now: Instant) -> bool {
        if !self.ranks.contains_key(&target.rank) {
            return false;
        }
        let Some((from, booking, prefilled)) = self.take_out(id) else { return false };
        if let Some(state) = self.ranks.get_mut(&from).filter(|_| !prefilled) {
            state.recent.add(-recent_tokens(booking.uncached_tokens), now, self.config.recent_half_life);
        }
        let ask = Ask { id, prompt: booking.prompt, session: booking.session };
        let terms = self.weigh(&ask, std::slice::from_ref(target), now);
        if let Some(terms) = terms.first() {
            self.insert(&ask, target, terms, booking.booked_at, now);
        }
        self.counts.moved += 1;
        true
    }

    /// Ends a booking whose request nobody has any more. Returns whether it was booked.
    pub fn lose(&mut self, id: RequestId) -> bool {
        let lost = self.take_out(id).is_some();
        self.counts.lost += u64::from(lost);
        lost
    }

    /// Bookings of a rank whose whole prompt has appeared elsewhere since, and where: HAProxy has sent the request
    /// there. `stored_blocks` tells how many leading blocks of a sequence a rank has in its GPU tier. Prompts that
    /// another booking brings there are no sign, nor are those that were there before.
    pub fn strays(
        &self,
        from: RankId,
        stored_blocks: impl Fn(RankId, &[SequenceHash]) -> u32,
    ) -> Vec<(RequestId, Candidate)> {
        let Some(state) = self.ranks.get(&from) else { return Vec::new() };
        let found = state.book.bookings().filter_map(|(id, booking, _)| {
            let blocks = u32::try_from(booking.sequence().len()).unwrap_or(u32::MAX);
            if blocks <= booking.elsewhere_blocks {
                return None;
            }
            let (rank, _) = self.ranks.iter().find(|(rank, other)| {
                **rank != from
                    && other.open
                    && other.book.shared(&booking.prompt, booking.block_tokens).0 < blocks
                    && stored_blocks(**rank, booking.sequence()) >= blocks
            })?;
            Some((id, Candidate { gpu_blocks: blocks, ..Candidate::idle(*rank, booking.block_tokens) }))
        });
        found.collect()
    }

    /// Where a request is booked, and its prompt: what is needed to look for its blocks elsewhere.
    #[must_use]
    pub fn booking(&self, id: RequestId) -> Option<(RankId, &Arc<PromptBlocks>)> {
        let rank = *self.owners.get(&id)?;
        let (booking, _) = self.ranks.get(&rank)?.book.get(id)?;
        Some((rank, &booking.prompt))
    }

    /// The bookings of one rank, in no order, with when each was made.
    pub fn bookings(&self, rank: RankId) -> impl Iterator<Item = (RequestId, Instant)> {
        let book = self.ranks.get(&rank).map(|state| &state.book);
        book.into_iter().flat_map(RankBook::bookings).map(|(id, booking, _)| (id, booking.booked_at))
    }

    /// Advances the prefills of one rank after news of its cache: `stored_blocks` tells how many leading blocks of a
    /// sequence are in its GPU tier now. The news need not be prompt: a second of delay does no harm.
    pub fn progress(&mut self, rank: RankId, stored_blocks: impl Fn(&[SequenceHash]) -> u32, now: Instant) {
        if let Some(state) = self.ranks.get_mut(&rank) {
            state.book.progress(stored_blocks, now);
        }
    }

    /// To be called about every second: ends prefills that no KV event can tell of and whose time is up, and bookings
    /// whose lease ran out where nobody counts. Returns how many of the latter.
    pub fn tick(&mut self, now: Instant) -> usize {
        for state in self.ranks.values_mut() {
            state.book.tick(now);
        }
        // Looking through all bookings is for once in a while; a lease needs no precision.
        let lease = self.config.lease;
        let due = self.lease_checked.is_none_or(|last| now.saturating_duration_since(last) >= lease / 64);
        if !due {
            return 0;
        }
        self.lease_checked = Some(now);
        let uncounted = self.ranks.values().filter(|state| !state.counted);
        let all = uncounted.flat_map(|state| state.book.bookings());
        let over = all.filter(|(_, booking, _)| now.saturating_duration_since(booking.booked_at) >= lease);
        let over: Vec<RequestId> = over.map(|(id, _, _)| id).collect();
        for id in &over {
            self.take_out(*id);
        }
        self.counts.expired += over.len() as u64;
        over.len()
    }

    /// The booked load of every rank.
    pub fn loads(&self) -> impl Iterator<Item = (RankId, Load)> {
        self.ranks.iter().map(|(rank, state)| (*rank, state.book.load()))
    }

    /// What happened since the start.
    #[must_use]
    pub const fn counts(&self) -> Counts {
        self.counts
    }

    fn decide(&self, ask: &Ask, candidates: &[Candidate], rng: &mut fastrand::Rng, now: Instant) -> Choice {
        let mut terms = self.weigh(ask, candidates, now);
        let session = ask.session.and_then(|session| self.sessions.get(&session));
        let ties = self.price(ask, candidates, &mut terms, session);
        let picked = match self.policy {
            Policy::Dynamo(dynamo) if dynamo.router_temperature > 0.0 => {
                dynamo.draw(&terms, rng).map(|at| (at, Reason::Random))
            }
            _ => pick(&mut terms, ties, session, rng),
        };
        let (rank, reason) = match picked {
            Some((at, reason)) => (terms.get(at).map(|terms| terms.rank), reason),
            None => (None, Reason::NoCandidate),
        };
        Choice { rank, reason, booked: false, terms }
    }

    /// Books if the bounds allow it. The memories take the choice in either way.
    fn enter(&mut self, ask: &Ask, candidate: &Candidate, terms: &Terms, now: Instant) -> bool {
        if let Some(session) = ask.session {
            self.sessions.set(session, candidate.rank);
        }
        self.means.uncached_tokens.update(terms.uncached_tokens.into());
        self.means.context_tokens.update(ask.prompt.tokens().into());
        if let Some(state) = self.ranks.get_mut(&candidate.rank) {
            state.turns += terms.scarcity;
            state.recent.add(recent_tokens(terms.uncached_tokens), now, self.config.recent_half_life);
        }
        if self.owners.len() >= self.config.max_bookings
            || self.booked_hashes + ask.prompt.hashes() > self.config.max_booked_hashes
        {
            self.counts.not_booked += 1;
            return false;
        }
        self.insert(ask, candidate, terms, now, now);
        self.counts.booked += 1;
        true
    }

    fn insert(&mut self, ask: &Ask, candidate: &Candidate, terms: &Terms, booked_at: Instant, now: Instant) {
        let Some(state) = self.ranks.get_mut(&candidate.rank) else { return };
        // Events tell the end of a prefill by its last full block: not for prompts that have none, nor where it is
        // cached already, nor for ranks whose events are not whole.
        let full_blocks = ask.prompt.sequence(candidate.block_tokens).len();
        let held_blocks =
            candidate.gpu_blocks.saturating_add(candidate.cpu_blocks).saturating_add(candidate.disk_blocks);
        let by_clock = if !candidate.trusted {
            Some(terms.queue_tokens + f64::from(terms.uncached_tokens))
        } else if full_blocks <= held_blocks as usize {
            Some(f64::from(ask.prompt.tokens()))
        } else {
            None
        };
        let done_at = by_clock.map(|tokens| {
            let seconds =
                (tokens / self.config.prefill_tokens_per_second.max(1.0)).clamp(0.0, LONGEST_PREFILL_SECONDS);
            now + Duration::from_secs_f64(seconds)
        });
        let booking = Booking::new(ask, candidate.block_tokens, terms.uncached_tokens, booked_at, done_at);
        state.book.add(ask.id, booking);
        self.owners.insert(ask.id, candidate.rank);
        self.booked_hashes += ask.prompt.hashes();
    }

    fn take_out(&mut self, id: RequestId) -> Option<(RankId, Booking, bool)> {
        let rank = self.owners.remove(&id)?;
        let (booking, prefilled) = self.ranks.get_mut(&rank)?.book.remove(id)?;
        self.booked_hashes = self.booked_hashes.saturating_sub(booking.prompt.hashes());
        Some((rank, booking, prefilled))
    }
}

/// The most that the clock waits for a prefill no event tells of: longer than any real one takes.
const LONGEST_PREFILL_SECONDS: f64 = 3600.0;

#[cfg(test)]
mod server_tests;
#[cfg(test)]
mod tests;
