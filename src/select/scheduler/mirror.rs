//! Bookings of other agents that serve the same pool. They weigh as our own do; only their ends are told by others.

use super::Scheduler;
use crate::select::ask::Ask;
use crate::select::booking::Booking;
use crate::select::candidate::Candidate;
use crate::units::RequestId;
use std::time::{Duration, Instant};

/// How long another agent's booking lives after that agent was last heard to have it: three times the period in which
/// agents tell of what they have.
const SILENCE: Duration = Duration::from_secs(30);

impl Scheduler {
    /// Books what another agent has chosen. `target` is that rank as it stands here, with what it is known to hold of the
    /// prompt. What is our own, or has ended already, is not booked. Returns false where it cannot be: the rank is not
    /// known, or a bound is reached.
    pub fn mirror(&mut self, ask: &Ask, target: &Candidate, now: Instant) -> bool {
        if self.booked_as_mirror(ask.id) == Some(false) || self.early_ends.get(&ask.id).is_some() {
            return true;
        }
        if !self.ranks.contains_key(&target.rank) {
            return false;
        }
        if self.take_out(ask.id).is_some() {
            self.counts.replaced += 1;
        }
        let terms = self.weigh(ask, std::slice::from_ref(target), now);
        let Some(terms) = terms.first() else { return false };
        self.take_in(ask, target, terms, now);
        if !self.has_room(ask) {
            return false;
        }
        let prefill = self.prefill(ask, target, terms, now);
        let booking = Booking::new(ask, target.key(), terms.uncached_tokens, now, prefill);
        self.add(ask.id, target.rank, booking.told(now), now);
        self.counts.mirrored += 1;
        true
    }

    /// Another agent still has this request.
    pub fn renew(&mut self, id: RequestId, now: Instant) {
        let state = self.owners.get(&id).and_then(|rank| self.ranks.get_mut(rank));
        if let Some(told_at) =
            state.and_then(|state| state.book.get_mut(id)).and_then(|booking| booking.told_at.as_mut())
        {
            *told_at = now;
        }
    }

    /// The bookings that were made here, in no order.
    pub fn own_bookings(&self) -> impl Iterator<Item = RequestId> {
        let all = self.ranks.values().flat_map(|state| state.book.bookings());
        all.filter(|(_, booking, _)| booking.told_at.is_none()).map(|(id, ..)| id)
    }

    /// Ends the bookings of agents that have not been heard for long.
    pub(super) fn end_silent(&mut self, now: Instant) {
        let all = self.ranks.values().filter(|state| state.book.load().mirrored > 0);
        let all = all.flat_map(|state| state.book.bookings());
        let is_silent =
            |told_at: Option<Instant>| told_at.is_some_and(|at| now.saturating_duration_since(at) >= SILENCE);
        let silent: Vec<RequestId> =
            all.filter(|(_, booking, _)| is_silent(booking.told_at)).map(|(id, ..)| id).collect();
        self.counts.silent += silent.len() as u64;
        for id in silent {
            self.take_out(id);
        }
    }

    /// Whether the booking is another agent's; `None` where the id is not booked.
    fn booked_as_mirror(&self, id: RequestId) -> Option<bool> {
        let rank = self.owners.get(&id)?;
        let (booking, _) = self.ranks.get(rank)?.book.get(id)?;
        Some(booking.told_at.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::testing::{Pool, prompt};
    use crate::select::{Load, Policy};
    use crate::units::RankId;

    /// Another agent has chosen rank 0 for a prompt of 6,000 tokens.
    fn mirrored() -> (Pool, Ask) {
        let mut pool = Pool::new(2, Policy::default());
        let ask = pool.ask(&prompt(&[(1, 6000)]), Some(7));
        assert!(pool.scheduler.mirror(&ask, &pool.candidates[0], pool.now));
        (pool, ask)
    }

    fn load(pool: &Pool, rank: u16) -> Load {
        pool.scheduler.loads().find(|(other, _)| *other == RankId(rank)).expect("a rank").1
    }

    #[test]
    fn it_weighs_as_one_of_our_own_until_its_end_is_told() {
        let (mut pool, theirs) = mirrored();
        let mut own = Pool::new(2, Policy::default());
        let ask = own.ask(&theirs.prompt, None);
        own.scheduler.book(&ask, &own.candidates[..1], own.now);
        assert_eq!(load(&pool, 0), Load { mirrored: 1, ..load(&own, 0) });
        let sibling = pool.ask(&prompt(&[(1, 6000), (2, 100)]), None);
        assert_eq!(
            pool.book(&sibling).chosen().expect("a rank").booked_tokens,
            6000,
            "its prompt is there soon"
        );
        pool.prefill(RankId(0), &sibling.prompt);
        assert_eq!(load(&pool, 0).prefill_tokens, 0, "our own events tell of its prefill");
        assert!(pool.scheduler.end(theirs.id, None, pool.now).expect("booked").mirrored);
        assert!(!pool.scheduler.end(sibling.id, None, pool.now).expect("booked").mirrored);
        assert_eq!(load(&pool, 0), Load::default());
    }

    #[test]
    fn its_session_stays_where_the_other_agent_sent_it() {
        let (mut pool, theirs) = mirrored();
        pool.scheduler.end(theirs.id, None, pool.now);
        let next = pool.ask(&prompt(&[(2, 600)]), Some(7));
        assert_eq!(pool.book(&next).rank, Some(RankId(0)));
    }

    #[test]
    fn it_ends_when_its_agent_is_silent_and_lives_as_long_as_that_tells_of_it() {
        let (mut pool, theirs) = mirrored();
        for _ in 0..100 {
            pool.now += SILENCE / 2;
            pool.scheduler.renew(theirs.id, pool.now);
            pool.scheduler.tick(pool.now);
        }
        assert_eq!(load(&pool, 0).requests, 1);
        pool.now += SILENCE;
        pool.scheduler.tick(pool.now);
        assert_eq!((load(&pool, 0), pool.scheduler.counts().silent), (Load::default(), 1));
    }

    #[test]
    fn what_is_told_late_or_twice_changes_nothing() {
        let (mut pool, theirs) = mirrored();
        assert!(
            pool.scheduler.mirror(&theirs, &pool.candidates[1], pool.now),
            "HAProxy has sent it elsewhere"
        );
        assert_eq!((load(&pool, 0).requests, load(&pool, 1).requests), (0, 1));
        let ours = pool.ask(&prompt(&[(3, 100)]), None);
        pool.book(&ours);
        assert!(pool.scheduler.mirror(&ours, &pool.candidates[0], pool.now), "it is ours");
        let ended = pool.ask(&prompt(&[(4, 100)]), None);
        pool.scheduler.end(ended.id, None, pool.now);
        assert!(pool.scheduler.mirror(&ended, &pool.candidates[0], pool.now));
        let elsewhere = Candidate::idle(RankId(9), 16);
        let unknown = pool.ask(&prompt(&[(5, 100)]), None);
        assert!(!pool.scheduler.mirror(&unknown, &elsewhere, pool.now));
        assert_eq!(pool.scheduler.own_bookings().collect::<Vec<_>>(), [ours.id]);
        assert_eq!(pool.scheduler.counts().mirrored, 2);
    }

    #[test]
    fn it_is_none_of_the_requests_of_our_own_haproxy() {
        let (mut pool, _) = mirrored();
        pool.candidates[0].slots.limit = Some(1);
        let ask = pool.ask(&prompt(&[(8, 100)]), None);
        assert_eq!(pool.book(&ask).terms[0].slot_tokens, 0.0, "its slot is another HAProxy's");
    }
}
