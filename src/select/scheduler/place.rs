//! Requests that HAProxy places by itself: nothing is booked until it is known where.

use super::Scheduler;
use crate::select::{
    ask::{Ask, PromptBlocks},
    candidate::Candidate,
    choose::Choice,
    unplaced::Waiting,
};
use crate::units::RequestId;
use std::{sync::Arc, time::Instant};

/// A request that is looked for: its id, its prompt, and how many leading tokens of it were held somewhere before.
pub type Sought = (RequestId, Arc<PromptBlocks>, u32);

impl Scheduler {
    /// What [`Self::book`] would choose, for a request that HAProxy places by itself. Nothing is booked: where the
    /// request is shows by the blocks that it brings there ([`Self::sought`]), or when it ends ([`Self::place`]). Until
    /// then the engine's own count has it, like the requests of others.
    pub fn expect(&mut self, ask: &Ask, candidates: &[Candidate], now: Instant) -> Choice {
        let choice = self.choose(ask, candidates, now);
        if self.early_ends.get(&ask.id).is_none() {
            let held_tokens =
                candidates.iter().map(|candidate| candidate.gpu_blocks * candidate.block_tokens);
            let held_tokens = held_tokens.max().unwrap_or_default();
            self.unplaced.add(Waiting { ask: ask.clone(), asked_at: now, held_tokens });
        }
        choice
    }

    /// The requests of which it is not known where they are.
    pub fn sought(&self) -> impl Iterator<Item = Sought> {
        self.unplaced
            .iter()
            .map(|waiting| (waiting.ask.id, Arc::clone(&waiting.ask.prompt), waiting.held_tokens))
    }

    /// Whether it is not known where this request is.
    #[must_use]
    pub fn is_sought(&self, id: RequestId) -> bool {
        self.unplaced.get(id).is_some()
    }

    /// Whether another booking brings the whole prompt of a request to the target, so that its blocks there are no sign.
    #[must_use]
    pub fn explains(&self, id: RequestId, target: &Candidate) -> bool {
        let (Some(waiting), Some(state)) = (self.unplaced.get(id), self.ranks.get(&target.rank)) else {
            return false;
        };
        let blocks = waiting.ask.prompt.sequence(target.key()).len();
        state.book.shared(&waiting.ask.prompt, target.key()).0 as usize >= blocks
    }

    /// It is known where a request is: it is booked there from now on, as its session is. `target` is that rank as it
    /// stands now. Returns whether it was sought.
    pub fn place(&mut self, id: RequestId, target: &Candidate, now: Instant) -> bool {
        let Some(waiting) = self.unplaced.take(id) else { return false };
        let terms = self.weigh(&waiting.ask, std::slice::from_ref(target), now);
        if let Some(terms) = terms.first() {
            self.enter(&waiting.ask, target, terms, waiting.asked_at, now);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        select::{Load, Policy, SchedulerConfig},
        units::{RankId, SequenceHash},
    };

    fn ask(id: u128) -> Ask {
        let sequence = (0..4).map(SequenceHash).collect();
        Ask { id: RequestId(id), prompt: Arc::new(PromptBlocks::new(70, [(16, sequence)])), session: Some(9) }
    }

    fn scheduler(now: Instant) -> (Scheduler, [Candidate; 2]) {
        let mut scheduler = Scheduler::new(Policy::default(), SchedulerConfig::default(), 1);
        scheduler.set_ranks(&[RankId(0), RankId(1)], now);
        (scheduler, [0, 1].map(|rank| Candidate::idle(RankId(rank), 16)))
    }

    fn loads(scheduler: &Scheduler) -> Vec<u32> {
        scheduler.loads().map(|(_, load)| load.requests).collect()
    }

    #[test]
    fn nothing_is_booked_until_it_is_known_where_and_then_the_session_is_there_too() {
        let now = Instant::now();
        let (mut scheduler, candidates) = scheduler(now);
        let choice = scheduler.expect(&ask(1), &candidates, now);
        assert!(choice.rank.is_some() && !choice.booked);
        assert_eq!((loads(&scheduler), scheduler.is_sought(RequestId(1))), (vec![0, 0], true));
        assert!(scheduler.place(RequestId(1), &candidates[1], now));
        assert_eq!((loads(&scheduler), scheduler.is_sought(RequestId(1))), (vec![0, 1], false));
        assert!(!scheduler.place(RequestId(1), &candidates[0], now), "it is known where it is");
        assert!(scheduler.end(RequestId(1), None, now).is_some());
        assert!(scheduler.loads().all(|(_, load)| load == Load::default()));
        let next = scheduler.choose(&Ask { session: Some(9), ..ask(2) }, &candidates, now);
        assert_eq!(next.rank, Some(RankId(1)), "the session's last rank");
    }

    #[test]
    fn a_request_that_ends_unseen_leaves_nothing_behind_and_one_that_has_ended_is_not_sought() {
        let now = Instant::now();
        let (mut scheduler, candidates) = scheduler(now);
        scheduler.expect(&ask(1), &candidates, now);
        assert_eq!(scheduler.end(RequestId(1), None, now), None);
        assert!(!scheduler.is_sought(RequestId(1)));
        scheduler.end(RequestId(2), None, now);
        scheduler.expect(&ask(2), &candidates, now);
        assert!(!scheduler.is_sought(RequestId(2)));
        scheduler.expect(&ask(1), &candidates, now);
        assert!(scheduler.is_sought(RequestId(1)), "it was sought when it ended");
    }

    #[test]
    fn of_equal_prompts_each_needs_a_place_of_its_own() {
        let now = Instant::now();
        let (mut scheduler, candidates) = scheduler(now);
        scheduler.expect(&ask(1), &candidates, now);
        scheduler.expect(&ask(2), &candidates, now);
        assert!(!scheduler.explains(RequestId(1), &candidates[0]));
        scheduler.place(RequestId(1), &candidates[0], now);
        assert!(scheduler.explains(RequestId(2), &candidates[0]));
        assert!(!scheduler.explains(RequestId(2), &candidates[1]));
    }
}
