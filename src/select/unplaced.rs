//! Requests under way of which it is not known where they are: HAProxy has chosen, and says where when they end.

use super::ask::Ask;
use crate::units::RequestId;
use hashbrown::HashMap;
use std::{collections::BTreeMap, time::Instant};

/// More requests than a fleet has under way; what is beyond is forgotten, the oldest first. Their ends may be lost.
const MAX_REQUESTS: usize = 8_192;

/// The same for the hashes of their prompts: 8 MiB.
const MAX_HASHES: usize = 1 << 20;

/// The requests, in the order in which they were asked about.
#[derive(Debug, Default)]
pub(super) struct Unplaced {
    by_turn: BTreeMap<u64, Waiting>,
    turns: HashMap<RequestId, u64>,
    turn: u64,
    hashes: usize,
}

/// One of them.
#[derive(Clone, Debug)]
pub(super) struct Waiting {
    pub(super) ask: Ask,
    pub(super) asked_at: Instant,
    /// The most leading tokens of its prompt that any rank held then: only more than these are a sign.
    pub(super) held_tokens: u32,
}

impl Unplaced {
    pub(super) fn add(&mut self, waiting: Waiting) {
        self.take(waiting.ask.id);
        self.turn += 1;
        self.hashes += waiting.ask.prompt.hashes();
        self.turns.insert(waiting.ask.id, self.turn);
        self.by_turn.insert(self.turn, waiting);
        while (self.by_turn.len() > MAX_REQUESTS || self.hashes > MAX_HASHES)
            && let Some(oldest) = self.by_turn.first_key_value().map(|(_, oldest)| oldest.ask.id)
        {
            self.take(oldest);
        }
    }

    pub(super) fn take(&mut self, id: RequestId) -> Option<Waiting> {
        let waiting = self.by_turn.remove(&self.turns.remove(&id)?)?;
        self.hashes = self.hashes.saturating_sub(waiting.ask.prompt.hashes());
        Some(waiting)
    }

    pub(super) fn get(&self, id: RequestId) -> Option<&Waiting> {
        self.by_turn.get(self.turns.get(&id)?)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Waiting> {
        self.by_turn.values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{select::PromptBlocks, units::SequenceHash};
    use std::sync::Arc;

    fn waiting(id: u128, hashes: usize) -> Waiting {
        let sequence = vec![SequenceHash(id as u64); hashes];
        let ask = Ask {
            id: RequestId(id),
            prompt: Arc::new(PromptBlocks::new(16, [(16, sequence)])),
            session: None,
        };
        Waiting { ask, asked_at: Instant::now(), held_tokens: 0 }
    }

    #[test]
    fn the_oldest_make_room() {
        let mut unplaced = Unplaced::default();
        for id in 0..MAX_REQUESTS as u128 + 10 {
            unplaced.add(waiting(id, 1));
        }
        assert_eq!((unplaced.by_turn.len(), unplaced.turns.len()), (MAX_REQUESTS, MAX_REQUESTS));
        assert!(unplaced.get(RequestId(9)).is_none() && unplaced.get(RequestId(10)).is_some());
        unplaced.add(waiting(1 << 64, MAX_HASHES));
        assert_eq!((unplaced.by_turn.len(), unplaced.hashes), (1, MAX_HASHES));
        unplaced.add(waiting(1 << 64, 3));
        assert_eq!((unplaced.by_turn.len(), unplaced.hashes), (1, 3), "an id waits once");
        assert!(unplaced.take(RequestId(1 << 64)).is_some());
        assert_eq!((unplaced.turns.len(), unplaced.hashes), (0, 0));
    }
}
