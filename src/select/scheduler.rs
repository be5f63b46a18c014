//! The scheduler of one pool: choices, bookings and their ends.

use super::ask::Ask;
use super::booking::{Booking, Prefill, RankBook};
use super::candidate::Candidate;
use super::choose::{Choice, Reason, Terms, pick};
use super::config::{Policy, SchedulerConfig};
use super::evictions::Evictions;
use super::generations::Generations;
use super::history::History;
use super::load::{Load, SlowMean};
use super::rate::{PrefillRate, Stopwatch};
use super::recent::Fading;
use super::reckon::{Lag, Reckoning};
use super::unplaced::Unplaced;
use crate::units::{RankId, RequestId};
use hashbrown::HashMap;
use std::collections::BTreeMap;
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
    rate: PrefillRate,
    /// How late the news of prefills are.
    pub(super) lag: Lag,
    owners: HashMap<RequestId, RankId>,
    sessions: Generations<u64, RankId>,
    /// Ends without a booking: their choice may still be under way.
    early_ends: Generations<RequestId, ()>,
    /// Requests that HAProxy has placed itself.
    unplaced: Unplaced,
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
    /// Where events tell nothing of its cache, or too little.
    pub(super) history: History,
    /// How soon its cache gives up what it holds.
    pub(super) evictions: Evictions,
    /// Since when its prefills have been without news.
    watch: Stopwatch,
    /// How late its last events were by its own clock, which may be wrong.
    pub(super) told_lag: Duration,
    /// What was booked of late.
    pub(super) reckoning: Reckoning,
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
    /// Choices of other agents that were booked.
    pub mirrored: u64,
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
    /// Bookings of other agents that ended because those were not heard any more.
    pub silent: u64,
}

/// A booking that ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ended {
    /// The rank it was booked on.
    pub rank: RankId,
    /// Whether its prefill was seen done.
    pub prefilled: bool,
    /// Whether another agent had made the choice.
    pub mirrored: bool,
    /// Prompt tokens that the rank had to compute, as known at booking.
    pub uncached_tokens: u32,
    /// How long it was booked.
    pub held: Duration,
}

pub use place::Sought;
/// A booking that lives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Booked {
    /// Its request.
    pub id: RequestId,
    /// When it was made.
    pub at: Instant,
    /// Whether another agent made it.
    pub mirrored: bool,
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
            rate: PrefillRate::new(config.prefill_tokens_per_second),
            lag: Lag::default(),
            owners: HashMap::new(),
            sessions: Generations::new(config.max_sessions),
            early_ends: Generations::new(EARLY_ENDS),
            unplaced: Unplaced::default(),
            booked_hashes: 0,
            rng: fastrand::Rng::with_seed(seed),
            counts: Counts::default(),
            lease_checked: None,
        }
    }

    /// Weighs and counts by these from now on. Bookings, sessions and what was learned stay.
    pub const fn configure(&mut self, policy: Policy, config: SchedulerConfig) {
        self.policy = policy;
        self.config = config;
    }

    /// Sets the pool's ranks. The bookings of a rank that is not among them end; returns how many.
    pub fn set_ranks(&mut self, ranks: &[RankId], now: Instant) -> usize {
        let gone: Vec<RankId> = self.ranks.keys().filter(|rank| !ranks.contains(rank)).copied().collect();
        let ended = gone.iter().map(|rank| self.remove_rank(*rank)).sum();
        ranks.iter().for_each(|rank| self.add_rank(*rank, now));
        ended
    }

    /// Makes a rank known, and open; nothing happens if it is known already.
    pub fn add_rank(&mut self, rank: RankId, now: Instant) {
        if self.ranks.contains_key(&rank) {
            return;
        }
        let state = RankState {
            book: RankBook::default(),
            recent: Fading::empty(now),
            history: History::default(),
            evictions: Evictions::none(now),
            watch: Stopwatch::default(),
            told_lag: Duration::MAX,
            reckoning: Reckoning::default(),
            turns: 0.0,
            open: false,
            counted: false,
        };
        self.ranks.insert(rank, state);
        self.set_open(rank, true, now);
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
    /// a replica has restarted and lost what it was doing; then [`Self::add_rank`] brings it back.
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
            choice.booked = self.enter(ask, candidate, &terms, now, now);
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

    /// How fast a busy rank prefills, in tokens per second: the configured guess until KV events have shown it.
    #[must_use]
    pub fn prefill_rate(&self) -> f64 {
        self.rate.tokens_per_second()
    }

    /// Whether [`Self::grow`] does anything.
    #[must_use]
    pub const fn follows_answers(&self) -> bool {
        self.config.follow_answers
    }

    /// Blocks in the memory of what was sent to each rank.
    pub fn histories(&self) -> impl Iterator<Item = (RankId, usize)> {
        self.ranks.iter().map(|(rank, state)| (*rank, state.history.blocks()))
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
    fn enter(
        &mut self,
        ask: &Ask,
        candidate: &Candidate,
        terms: &Terms,
        asked_at: Instant,
        now: Instant,
    ) -> bool {
        self.take_in(ask, candidate, terms, now);
        self.means.uncached_tokens.update(terms.uncached_tokens.into());
        self.means.context_tokens.update(ask.prompt.tokens(candidate.key()).into());
        if !self.has_room(ask) {
            self.counts.not_booked += 1;
            return false;
        }
        self.insert(ask, candidate, terms, asked_at, now);
        self.counts.booked += 1;
        true
    }

    /// What a choice leaves in the memories, booked or not.
    fn take_in(&mut self, ask: &Ask, candidate: &Candidate, terms: &Terms, now: Instant) {
        if let Some(session) = ask.session {
            self.sessions.set(session, candidate.rank);
        }
        self.remember(ask, candidate);
        if let Some(state) = self.ranks.get_mut(&candidate.rank) {
            state.turns += terms.scarcity;
            state.recent.add(recent_tokens(terms.uncached_tokens), now, self.config.recent_half_life);
        }
    }

    fn has_room(&self, ask: &Ask) -> bool {
        self.owners.len() < self.config.max_bookings
            && self.booked_hashes + ask.prompt.hashes() <= self.config.max_booked_hashes
    }

    fn insert(&mut self, ask: &Ask, candidate: &Candidate, terms: &Terms, booked_at: Instant, now: Instant) {
        let prefill = self.prefill(ask, candidate, terms, now);
        let booking = Booking::new(ask, candidate.key(), terms.uncached_tokens, booked_at, prefill);
        self.add(ask.id, candidate.rank, booking, now);
    }

    fn add(&mut self, id: RequestId, rank: RankId, booking: Booking, now: Instant) {
        let Some(state) = self.ranks.get_mut(&rank) else { return };
        let booking = if self.config.follow_answers { booking.followed() } else { booking };
        self.booked_hashes += booking.prompt.hashes();
        state.reckoning.booked(booking.uncached_tokens, now);
        state.book.add(id, booking, now);
        state.watch.see_queue(state.book.load().prefill_tokens, now);
        self.owners.insert(id, rank);
    }

    /// What will tell of the prefill.
    fn prefill(&self, ask: &Ask, candidate: &Candidate, terms: &Terms, now: Instant) -> Prefill {
        let tokens = |tokens: f64| {
            let seconds = (tokens / self.rate.tokens_per_second()).clamp(0.0, LONGEST_PREFILL_SECONDS);
            Some(now + Duration::from_secs_f64(seconds))
        };
        let in_turn = terms.queue_tokens + f64::from(terms.uncached_tokens);
        // Events tell the end of a prefill by its last full block: not for prompts that have none, nor where it is
        // cached already, nor for ranks whose events do not count. Where some are lost, that one may be among them.
        let full_blocks = ask.prompt.sequence(candidate.key()).len();
        let held_blocks =
            candidate.gpu_blocks.saturating_add(candidate.cpu_blocks).saturating_add(candidate.disk_blocks);
        if !candidate.trusted {
            Prefill { by_events: false, done_at: tokens(in_turn) }
        } else if full_blocks <= held_blocks as usize {
            Prefill { by_events: false, done_at: tokens(ask.prompt.tokens(candidate.key()).into()) }
        } else if candidate.history_blocks > 0 {
            Prefill { by_events: true, done_at: tokens(LOST_EVENT_PATIENCE * in_turn) }
        } else {
            Prefill::BY_EVENTS
        }
    }

    fn take_out(&mut self, id: RequestId) -> Option<(RankId, Booking, bool)> {
        let rank = self.owners.remove(&id)?;
        let state = self.ranks.get_mut(&rank)?;
        let (booking, prefilled) = state.book.remove(id)?;
        state.watch.ease(state.book.load().prefill_tokens);
        self.booked_hashes = self.booked_hashes.saturating_sub(booking.prompt.hashes());
        Some((rank, booking, prefilled))
    }

    /// Keeps what was sent to a rank of whose cache events tell too little.
    fn remember(&mut self, ask: &Ask, candidate: &Candidate) {
        let share = self.config.max_history_blocks / self.ranks.len().max(1);
        let Some(state) = self.ranks.get_mut(&candidate.rank) else { return };
        match candidate.history_blocks as usize {
            0 if state.history.blocks() == 0 => {}
            0 => state.history = History::default(),
            blocks => state.history.add(ask.prompt.sequence(candidate.key()), blocks.min(share)),
        }
    }
}

/// Where events get lost, a prefill is taken as done after so many times the time that it should take.
const LOST_EVENT_PATIENCE: f64 = 4.0;

/// The most that the clock waits for a prefill no event tells of: longer than any real one takes.
const LONGEST_PREFILL_SECONDS: f64 = 3600.0;

#[cfg(test)]
mod answer_tests;
#[cfg(test)]
mod history_tests;
mod life;
#[cfg(test)]
mod life_tests;
mod mirror;
mod place;
#[cfg(test)]
mod server_tests;
#[cfg(test)]
mod tests;
