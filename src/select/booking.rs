//! The bookings of one rank: reservations of load, each in prefill or in decode.

use super::ask::{Ask, PromptBlocks};
use super::booked::BookedPrefixes;
use super::load::Load;
use super::overlap::usable_tokens;
use crate::units::{RequestId, SequenceHash};
use hashbrown::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// One request's reservation on one rank.
#[derive(Clone, Debug)]
pub(super) struct Booking {
    pub(super) prompt: Arc<PromptBlocks>,
    pub(super) session: Option<u64>,
    /// The rank's block size at booking.
    pub(super) block_tokens: u32,
    /// Prompt tokens that the rank had to compute, as known at booking.
    pub(super) uncached_tokens: u32,
    pub(super) booked_at: Instant,
    /// When the prefill is taken as done by the clock; `None` where KV events will tell.
    pub(super) done_at: Option<Instant>,
    /// The most leading blocks that any other rank held at booking: more than these elsewhere are news.
    pub(super) elsewhere_blocks: u32,
    /// What is left of `uncached_tokens`.
    left_tokens: u32,
}

impl Booking {
    pub(super) fn new(
        ask: &Ask,
        block_tokens: u32,
        uncached_tokens: u32,
        now: Instant,
        done_at: Option<Instant>,
    ) -> Self {
        Self {
            prompt: Arc::clone(&ask.prompt),
            session: ask.session,
            block_tokens,
            uncached_tokens,
            booked_at: now,
            done_at,
            elsewhere_blocks: u32::MAX,
            left_tokens: uncached_tokens,
        }
    }

    pub(super) fn sequence(&self) -> &[SequenceHash] {
        self.prompt.sequence(self.block_tokens)
    }

    /// Takes in how many leading blocks are stored now; true when the last full block is.
    fn advance(&mut self, stored_blocks: u32) -> bool {
        let stored_tokens = stored_blocks.saturating_mul(self.block_tokens);
        self.left_tokens = self.left_tokens.min(self.prompt.tokens().saturating_sub(stored_tokens));
        stored_blocks as usize >= self.sequence().len()
    }
}

/// All bookings of one rank. The sums are kept, so that a choice reads them at no cost.
#[derive(Debug, Default)]
pub(super) struct RankBook {
    prefill: HashMap<RequestId, Booking>,
    decode: HashMap<RequestId, Booking>,
    prefixes: BookedPrefixes,
    left_tokens: u64,
    unfinished_tokens: u64,
    context_tokens: u64,
}

impl RankBook {
    pub(super) fn load(&self) -> Load {
        let count = |bookings: &HashMap<_, _>| u32::try_from(bookings.len()).unwrap_or(u32::MAX);
        Load {
            requests: count(&self.prefill).saturating_add(count(&self.decode)),
            decoding: count(&self.decode),
            prefill_tokens: self.left_tokens,
            unfinished_tokens: self.unfinished_tokens,
            context_tokens: self.context_tokens,
            booked_blocks: self.prefixes.blocks(),
        }
    }

    /// Leading blocks of the prompt that booked prompts have too, and how many of their tokens an engine can use.
    pub(super) fn shared(&self, prompt: &PromptBlocks, block_tokens: u32) -> (u32, u32) {
        let depth = self.prefixes.depth(prompt.sequence(block_tokens));
        let blocks = u32::try_from(depth).unwrap_or(u32::MAX);
        (blocks, usable_tokens(blocks, block_tokens, prompt.tokens()))
    }

    /// A booking, and whether its prefill is done.
    pub(super) fn get(&self, id: RequestId) -> Option<(&Booking, bool)> {
        let decode = self.decode.get(&id).map(|booking| (booking, true));
        decode.or_else(|| Some((self.prefill.get(&id)?, false)))
    }

    pub(super) fn get_mut(&mut self, id: RequestId) -> Option<&mut Booking> {
        self.decode.get_mut(&id).or_else(|| self.prefill.get_mut(&id))
    }

    /// Adds a booking. The id must not be booked.
    pub(super) fn add(&mut self, id: RequestId, booking: Booking) {
        self.prefixes.add(booking.sequence());
        self.left_tokens += u64::from(booking.left_tokens);
        self.unfinished_tokens += u64::from(booking.uncached_tokens);
        self.context_tokens += u64::from(booking.prompt.tokens());
        let before = self.prefill.insert(id, booking);
        debug_assert!(before.is_none(), "an id is booked once");
    }

    /// Takes a booking out; with it, whether its prefill was done.
    pub(super) fn remove(&mut self, id: RequestId) -> Option<(Booking, bool)> {
        let (booking, prefilled) = match self.decode.remove(&id) {
            Some(booking) => (booking, true),
            None => (self.prefill.remove(&id)?, false),
        };
        if !prefilled {
            self.left_tokens = self.left_tokens.saturating_sub(booking.left_tokens.into());
            self.unfinished_tokens = self.unfinished_tokens.saturating_sub(booking.uncached_tokens.into());
        }
        self.context_tokens = self.context_tokens.saturating_sub(booking.prompt.tokens().into());
        self.prefixes.remove(booking.sequence());
        Some((booking, prefilled))
    }

    /// Advances every prefill by what is stored now (`stored_blocks` gives the leading blocks of a sequence in the
    /// rank's GPU tier) and by the clock.
    pub(super) fn progress(&mut self, stored_blocks: impl Fn(&[SequenceHash]) -> u32, now: Instant) {
        let (mut left, mut unfinished) = (self.left_tokens, self.unfinished_tokens);
        let done = self.prefill.extract_if(|_, booking| {
            let before = booking.left_tokens;
            let done = match booking.done_at {
                Some(at) => at <= now,
                None => booking.advance(stored_blocks(booking.sequence())),
            };
            if done {
                booking.left_tokens = 0;
                unfinished = unfinished.saturating_sub(booking.uncached_tokens.into());
            }
            left = left.saturating_sub((before - booking.left_tokens).into());
            done
        });
        self.decode.extend(done);
        (self.left_tokens, self.unfinished_tokens) = (left, unfinished);
    }

    /// Ends prefills whose time is up, without any news from the index.
    pub(super) fn tick(&mut self, now: Instant) {
        if self.prefill.values().any(|booking| booking.done_at.is_some_and(|at| at <= now)) {
            self.progress(|_| 0, now);
        }
    }

    /// All bookings, in no order, with whether their prefill is done.
    pub(super) fn bookings(&self) -> impl Iterator<Item = (RequestId, &Booking, bool)> {
        let prefill = self.prefill.iter().map(|(id, booking)| (*id, booking, false));
        prefill.chain(self.decode.iter().map(|(id, booking)| (*id, booking, true)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn ask(id: u128, tokens: u32, hashes: std::ops::Range<u64>) -> Ask {
        let sequence = hashes.map(SequenceHash).collect();
        Ask {
            id: RequestId(id),
            prompt: Arc::new(PromptBlocks::new(tokens, [(16, sequence)])),
            session: None,
        }
    }

    #[test]
    fn prefill_follows_the_stored_blocks_and_ends_at_the_last_full_one() {
        let now = Instant::now();
        let mut book = RankBook::default();
        book.add(RequestId(1), Booking::new(&ask(1, 70, 0..4), 16, 54, now, None));
        book.progress(|_| 2, now);
        assert_eq!(book.load().prefill_tokens, 38);
        assert_eq!(book.load().unfinished_tokens, 54, "Dynamo's figure does not follow progress");
        book.progress(|_| 1, now);
        assert_eq!(book.load().prefill_tokens, 38, "progress is not taken back by an eviction");
        book.progress(|_| 4, now);
        let load = book.load();
        assert_eq!((load.prefill_tokens, load.unfinished_tokens), (0, 0));
        assert_eq!((load.decoding, load.requests, load.context_tokens, load.booked_blocks), (1, 1, 70, 4));
        assert!(book.remove(RequestId(1)).expect("booked").1);
        assert_eq!(book.load(), Load::default());
    }

    #[test]
    fn a_timed_prefill_heeds_the_clock_and_nothing_else() {
        let now = Instant::now();
        let due = now + Duration::from_secs(1);
        let mut book = RankBook::default();
        book.add(RequestId(1), Booking::new(&ask(1, 5, 0..0), 16, 5, now, Some(due)));
        book.progress(|_| 9, now);
        book.tick(due - Duration::from_millis(1));
        assert_eq!((book.load().decoding, book.load().prefill_tokens), (0, 5));
        book.tick(due);
        assert_eq!((book.load().decoding, book.load().prefill_tokens), (1, 0));
    }

    #[test]
    fn a_booked_prompt_counts_as_present_but_for_its_last_token() {
        let now = Instant::now();
        let mut book = RankBook::default();
        let first = ask(1, 64, 0..4);
        book.add(first.id, Booking::new(&first, 16, 64, now, None));
        assert_eq!(book.shared(&first.prompt, 16), (4, 48));
        assert_eq!(book.shared(&ask(2, 100, 0..6).prompt, 16), (4, 64));
        assert_eq!(book.shared(&first.prompt, 32), (0, 0), "no hashes of that block size");
    }
}
