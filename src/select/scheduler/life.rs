//! How bookings go on: their prefill, the growth of their answers, moves and ends.

use super::{Booked, Ended, Scheduler, recent_tokens};
use crate::select::ask::{Ask, PromptBlocks, SequenceKey};
use crate::select::booking::{Progress, RankBook};
use crate::select::candidate::Candidate;
use crate::select::history::History;
use crate::units::{RankId, RequestId, SequenceHash};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A rank alone with one prefill may be so many times as fast as ranks are on the whole; what it needed no longer is a lag of its
/// events. Short prompts tell of that best.
const FASTEST: f64 = 2.0;

impl Scheduler {
    /// Ends a booking: its request is over. `used` is the rank that really served it, if that is known: the session
    /// will be looked for there.
    pub fn end(&mut self, id: RequestId, used: Option<RankId>, now: Instant) -> Option<Ended> {
        let Some((rank, booking, prefilled)) = self.take_out(id) else {
            if self.unplaced.take(id).is_none() {
                self.early_ends.set(id, ());
            }
            return None;
        };
        self.counts.ended += 1;
        if let (Some(session), Some(used)) = (booking.session, used.filter(|used| *used != rank)) {
            self.sessions.set(session, used);
        }
        let held = now.saturating_duration_since(booking.booked_at);
        self.means.held_seconds.update(held.as_secs_f64());
        let (mirrored, uncached_tokens) = (booking.told_at.is_some(), booking.uncached_tokens);
        Some(Ended { rank, prefilled, mirrored, uncached_tokens, held })
    }

    /// Takes in that a request's prefill is done, as the replica itself told.
    pub fn prefilled(&mut self, id: RequestId, now: Instant) {
        let Some(state) = self.owners.get(&id).and_then(|rank| self.ranks.get_mut(rank)) else { return };
        state.book.prefilled(id, now);
    }

    /// Takes in that a request's answer has come to `tokens` tokens, as the replica itself told.
    pub fn answered(&mut self, id: RequestId, tokens: u32) {
        let Some(state) = self.owners.get(&id).and_then(|rank| self.ranks.get_mut(rank)) else { return };
        state.book.answered(id, tokens);
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
            self.remember(&ask, target);
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
                    && other.book.shared(&booking.prompt, booking.key).0 < blocks
                    && stored_blocks(**rank, booking.sequence()) >= blocks
            })?;
            // It has stored what the booked rank would have, so its key is the same.
            let SequenceKey { revision, block_tokens } = booking.key;
            Some((id, Candidate { gpu_blocks: blocks, revision, ..Candidate::idle(*rank, block_tokens) }))
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

    /// The bookings of one rank, in no order.
    pub fn bookings(&self, rank: RankId) -> impl Iterator<Item = Booked> {
        let book = self.ranks.get(&rank).map(|state| &state.book);
        book.into_iter().flat_map(RankBook::bookings).map(|(id, booking, _)| Booked {
            id,
            at: booking.booked_at,
            mirrored: booking.told_at.is_some(),
        })
    }

    /// Advances the prefills of one rank after news of its cache: `stored_blocks` tells how many leading blocks of a
    /// sequence are in its GPU tier now. The news need not be prompt: a second of delay does no harm.
    pub fn progress(&mut self, rank: RankId, stored_blocks: impl Fn(&[SequenceHash]) -> u32, now: Instant) {
        if let Some(state) = self.ranks.get_mut(&rank) {
            let Progress { confirmed, first } = state.book.progress(stored_blocks, now);
            state.watch.confirm(confirmed, state.book.load().prefill_tokens, now, &mut self.rate);
            if let Some((tokens, took)) = first {
                let needed = f64::from(tokens) / self.rate.tokens_per_second() / FASTEST;
                self.lag.see_delay(took.saturating_sub(Duration::from_secs_f64(needed)));
            }
        }
    }

    /// The prompts booked on a rank with its keys, those first of which it most likely stores blocks next.
    #[must_use]
    pub fn prompts(&self, rank: RankId) -> Vec<(Arc<PromptBlocks>, SequenceKey)> {
        self.ranks.get(&rank).map(|state| state.book.prompts()).unwrap_or_default()
    }

    /// Takes in how late the last events of a rank were by its own clock: they are no further behind than that. Clocks differ, so
    /// it only bounds what is seen of the lag by ours.
    pub fn late(&mut self, rank: RankId, lag: Duration) {
        if let Some(state) = self.ranks.get_mut(&rank) {
            state.told_lag = lag;
        }
    }

    /// Takes in that so many blocks have left the GPU tier of a rank, and that it holds so many now.
    pub fn evicted(&mut self, rank: RankId, removed_blocks: u32, held_blocks: u64, now: Instant) {
        if let Some(state) = self.ranks.get_mut(&rank).filter(|_| removed_blocks > 0) {
            state.evictions.see(removed_blocks, held_blocks, now);
        }
    }

    /// Takes in that a rank has stored `block` behind the block `before`: what continues a booked prompt is its answer, and
    /// adds to its context ([`crate::select::SchedulerConfig::follow_answers`]). To be called before
    /// [`Self::progress`] with the same news. Blocks that were stored before a booking was made or moved there do not
    /// count.
    pub fn grow(&mut self, rank: RankId, before: SequenceHash, block: SequenceHash) {
        if let Some(state) = self.ranks.get_mut(&rank) {
            state.book.grow(before, block);
        }
    }

    /// A rank's cache may be empty: what was sent there no longer counts as present.
    pub fn forget_history(&mut self, rank: RankId) {
        if let Some(state) = self.ranks.get_mut(&rank) {
            state.history = History::default();
        }
    }

    /// To be called about every second: ends prefills that no KV event can tell of and whose time is up, and bookings
    /// whose lease ran out where nobody counts. Returns how many of the latter.
    pub fn tick(&mut self, now: Instant) -> usize {
        for state in self.ranks.values_mut() {
            state.book.tick(now);
            state.watch.ease(state.book.load().prefill_tokens);
        }
        self.end_silent(now);
        // Looking through all bookings is for once in a while; a lease needs no precision.
        let lease = self.config.lease;
        let due = self.lease_checked.is_none_or(|last| now.saturating_duration_since(last) >= lease / 64);
        if !due {
            return 0;
        }
        self.lease_checked = Some(now);
        let uncounted = self.ranks.values().filter(|state| !state.counted);
        let all = uncounted.flat_map(|state| state.book.bookings());
        let own = all.filter(|(_, booking, _)| booking.told_at.is_none());
        let over = own.filter(|(_, booking, _)| now.saturating_duration_since(booking.booked_at) >= lease);
        let over: Vec<RequestId> = over.map(|(id, _, _)| id).collect();
        for id in &over {
            self.take_out(*id);
        }
        self.counts.expired += over.len() as u64;
        over.len()
    }
}
