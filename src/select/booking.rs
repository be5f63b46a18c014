//! The bookings of one rank: reservations of load, each in prefill or in decode.

use super::ask::{Ask, PromptBlocks, SequenceKey};
use super::booked::BookedPrefixes;
use super::load::Load;
use super::overlap::usable_tokens;
use crate::units::{RequestId, SequenceHash};
use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One request's reservation on one rank.
#[derive(Clone, Debug)]
pub(super) struct Booking {
    pub(super) prompt: Arc<PromptBlocks>,
    pub(super) session: Option<u64>,
    /// The rank's key at booking.
    pub(super) key: SequenceKey,
    /// Prompt tokens that the rank had to compute, as known at booking.
    pub(super) uncached_tokens: u32,
    pub(super) booked_at: Instant,
    pub(super) prefill: Prefill,
    /// The most leading blocks that any other rank held at booking: more than these elsewhere are news.
    pub(super) elsewhere_blocks: u32,
    /// When the agent that made it was last heard to have it; `None` if it was made here.
    pub(super) told_at: Option<Instant>,
    /// What is left of `uncached_tokens`.
    left_tokens: u32,
    /// Whether nothing stood before its prefill.
    is_first: bool,
    /// Its place among all bookings that the rank ever had.
    turn: u64,
    /// Where the answer has come to, if it is followed: the last stored block of prompt and answer.
    tip: Option<SequenceHash>,
    /// Stored blocks behind the prompt's full ones.
    answer_blocks: u32,
}

/// Requests that come within so long of each other come at once: an engine has hardly begun with the first of them.
const AT_ONCE: Duration = Duration::from_secs(1);

/// The latest bookings that are looked at: far more than make a crowd.
const LATEST: usize = 64;

/// What tells of a prefill.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prefill {
    /// KV events will tell of each block.
    pub(super) by_events: bool,
    /// When it is taken as done by the clock.
    pub(super) done_at: Option<Instant>,
}

impl Prefill {
    pub(super) const BY_EVENTS: Self = Self { by_events: true, done_at: None };
}

impl Booking {
    pub(super) fn new(
        ask: &Ask,
        key: SequenceKey,
        uncached_tokens: u32,
        now: Instant,
        prefill: Prefill,
    ) -> Self {
        Self {
            prompt: Arc::clone(&ask.prompt),
            session: ask.session,
            key,
            uncached_tokens,
            booked_at: now,
            prefill,
            elsewhere_blocks: u32::MAX,
            told_at: None,
            left_tokens: uncached_tokens,
            is_first: false,
            turn: 0,
            tip: None,
            answer_blocks: 0,
        }
    }

    /// The same, made by another agent.
    pub(super) fn told(self, now: Instant) -> Self {
        Self { told_at: Some(now), ..self }
    }

    /// The same, whose answer is to be followed block by block. Of a prompt without a full block, the first block of the
    /// answer is taken to be the first one stored at the start of a chain that no booked prompt begins with.
    pub(super) fn followed(self) -> Self {
        let tip = self.prompt.tip(self.key);
        Self { tip, ..self }
    }

    /// Tokens that the request holds in the engine: its prompt, and what is known of its answer.
    fn context_tokens(&self) -> u64 {
        let full_blocks = self.sequence().len() as u64 + u64::from(self.answer_blocks);
        let stored = if self.answer_blocks > 0 { full_blocks * u64::from(self.key.block_tokens) } else { 0 };
        stored.max(self.prompt.tokens(self.key).into())
    }

    pub(super) fn sequence(&self) -> &[SequenceHash] {
        self.prompt.sequence(self.key)
    }

    /// Takes in how many leading blocks are stored now; true when the last full block is.
    fn advance(&mut self, stored_blocks: u32) -> bool {
        let stored_tokens = stored_blocks.saturating_mul(self.key.block_tokens);
        self.left_tokens = self.left_tokens.min(self.prompt.tokens(self.key).saturating_sub(stored_tokens));
        stored_blocks as usize >= self.sequence().len()
    }
}

/// What news of a rank's cache told of its prefills.
#[derive(Clone, Copy, Debug)]
pub(super) struct Progress {
    /// How many prompt tokens are confirmed as computed: what only the clock says is not among them.
    pub(super) confirmed: u64,
    /// Of a prefill that is done and that nothing stood before: its tokens, and how long ago it was booked.
    pub(super) first: Option<(u32, Duration)>,
}

/// All bookings of one rank. The sums are kept, so that a choice reads them at no cost.
#[derive(Debug, Default)]
pub(super) struct RankBook {
    prefill: HashMap<RequestId, Booking>,
    decode: HashMap<RequestId, Booking>,
    prefixes: BookedPrefixes,
    /// By the last stored block of their prompt and answer, the bookings whose answers are followed; the oldest first.
    tips: HashMap<SequenceHash, SmallVec<[RequestId; 1]>>,
    answer_blocks: usize,
    /// Bookings of other agents.
    mirrored: u32,
    /// The bookings of the last moment that live, the oldest first: when, and of what.
    latest: VecDeque<(Instant, RequestId, Arc<PromptBlocks>)>,
    /// Bookings so far.
    turns: u64,
    left_tokens: u64,
    unfinished_tokens: u64,
    context_tokens: u64,
}

impl RankBook {
    pub(super) fn load(&self) -> Load {
        let count = |bookings: &HashMap<_, _>| u32::try_from(bookings.len()).unwrap_or(u32::MAX);
        Load {
            requests: count(&self.prefill).saturating_add(count(&self.decode)),
            mirrored: self.mirrored,
            decoding: count(&self.decode),
            prefill_tokens: self.left_tokens,
            unfinished_tokens: self.unfinished_tokens,
            context_tokens: self.context_tokens,
            booked_blocks: self.prefixes.blocks() + self.answer_blocks,
        }
    }

    /// Leading blocks of the prompt that booked prompts have too, and how many of their tokens an engine can use.
    pub(super) fn shared(&self, prompt: &PromptBlocks, key: SequenceKey) -> (u32, u32) {
        let depth = self.prefixes.depth(prompt.sequence(key));
        let blocks = u32::try_from(depth).unwrap_or(u32::MAX);
        (blocks, usable_tokens(blocks, key.block_tokens, prompt.tokens(key)))
    }

    /// How many prompts that are booked, and came at once with this one, begin with its first `blocks` blocks, at least one.
    pub(super) fn sharers(&self, prompt: &PromptBlocks, key: SequenceKey, blocks: u32, now: Instant) -> u32 {
        let last = (blocks as usize).max(1) - 1;
        let Some(hash) = prompt.sequence(key).get(last) else { return 0 };
        let latest = self.latest.iter().filter(|(at, ..)| now.saturating_duration_since(*at) <= AT_ONCE);
        let shares = latest.filter(|(.., other)| other.sequence(key).get(last) == Some(hash));
        u32::try_from(shares.count()).unwrap_or(u32::MAX)
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
    pub(super) fn add(&mut self, id: RequestId, booking: Booking, now: Instant) {
        self.forget_latest(now);
        self.latest.push_back((now, id, Arc::clone(&booking.prompt)));
        self.turns += 1;
        let booking = Booking { turn: self.turns, is_first: self.prefill.is_empty(), ..booking };
        self.prefixes.add(booking.sequence());
        self.mirrored += u32::from(booking.told_at.is_some());
        self.left_tokens += u64::from(booking.left_tokens);
        self.unfinished_tokens += u64::from(booking.uncached_tokens);
        self.context_tokens += booking.context_tokens();
        if let Some(tip) = booking.tip {
            self.tips.entry(tip).or_default().push(id);
        }
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
        self.mirrored -= u32::from(booking.told_at.is_some());
        self.latest.retain(|(_, other, _)| *other != id);
        self.context_tokens = self.context_tokens.saturating_sub(booking.context_tokens());
        self.answer_blocks = self.answer_blocks.saturating_sub(booking.answer_blocks as usize);
        if let Some(tip) = booking.tip {
            self.leave_tip(tip, id);
        }
        self.prefixes.remove(booking.sequence());
        Some((booking, prefilled))
    }

    /// Advances every prefill by what is stored now (`stored_blocks` gives the leading blocks of a sequence in the
    /// rank's GPU tier) and by the clock.
    pub(super) fn progress(
        &mut self,
        stored_blocks: impl Fn(&[SequenceHash]) -> u32,
        now: Instant,
    ) -> Progress {
        let (mut left, mut unfinished, mut confirmed) = (self.left_tokens, self.unfinished_tokens, 0);
        let (mut last_told, mut first) = (0, None);
        let done = self.prefill.extract_if(|_, booking| {
            let before = booking.left_tokens;
            let Prefill { by_events, done_at } = booking.prefill;
            let told = by_events && booking.advance(stored_blocks(booking.sequence()));
            if told {
                booking.left_tokens = 0;
                last_told = last_told.max(booking.turn);
                if booking.is_first {
                    first = Some((booking.uncached_tokens, now.saturating_duration_since(booking.booked_at)));
                }
            }
            confirmed += u64::from(before - booking.left_tokens);
            let done = told || done_at.is_some_and(|at| at <= now);
            if done {
                booking.left_tokens = 0;
                unfinished = unfinished.saturating_sub(booking.uncached_tokens.into());
            }
            left = left.saturating_sub((before - booking.left_tokens).into());
            done
        });
        self.decode.extend(done);
        // An engine takes its requests in turn. Where events get lost, a prefill that a later one has overtaken is done,
        // and its last event was among the lost ones.
        let overtaken = self.prefill.extract_if(|_, booking| {
            let Prefill { by_events, done_at } = booking.prefill;
            let done = by_events && done_at.is_some() && booking.turn < last_told;
            if done {
                unfinished = unfinished.saturating_sub(booking.uncached_tokens.into());
                left = left.saturating_sub(std::mem::take(&mut booking.left_tokens).into());
            }
            done
        });
        self.decode.extend(overtaken);
        (self.left_tokens, self.unfinished_tokens) = (left, unfinished);
        Progress { confirmed, first }
    }

    /// Ends one prefill.
    pub(super) fn prefilled(&mut self, id: RequestId, now: Instant) {
        if let Some(booking) = self.prefill.get_mut(&id) {
            booking.prefill.done_at = Some(now);
            self.progress(|_| 0, now);
        }
    }

    /// An answer has come to `tokens` tokens: its context grows. It never shrinks.
    pub(super) fn answered(&mut self, id: RequestId, tokens: u32) {
        let Some(booking) = self.get_mut(id) else { return };
        let before = (booking.context_tokens(), booking.answer_blocks);
        booking.answer_blocks = before.1.max(tokens / booking.key.block_tokens.max(1));
        let after = (booking.context_tokens(), booking.answer_blocks);
        self.context_tokens += after.0 - before.0;
        self.answer_blocks += (after.1 - before.1) as usize;
    }

    fn forget_latest(&mut self, now: Instant) {
        while let Some((at, ..)) = self.latest.front()
            && (self.latest.len() >= LATEST || now.saturating_duration_since(*at) > AT_ONCE)
        {
            self.latest.pop_front();
        }
    }

    /// Ends prefills whose time is up, without any news from the index.
    pub(super) fn tick(&mut self, now: Instant) {
        self.forget_latest(now);
        if self.prefill.values().any(|booking| booking.prefill.done_at.is_some_and(|at| at <= now)) {
            self.progress(|_| 0, now);
        }
    }

    /// Takes in that `block` was stored behind `before`. What continues a booked prompt, and is not another booked prompt
    /// itself, is the answer of the oldest request that has come there: its context grows. An answer is also the first
    /// sign that its prefill is done.
    pub(super) fn grow(&mut self, before: SequenceHash, block: SequenceHash) {
        let Some(id) = self.tips.get(&before).and_then(|ids| ids.first().copied()) else { return };
        if self.prefixes.begins(block) {
            return;
        }
        self.leave_tip(before, id);
        self.tips.entry(block).or_default().push(id);
        if let Some(booking) = self.prefill.remove(&id) {
            self.left_tokens = self.left_tokens.saturating_sub(booking.left_tokens.into());
            self.unfinished_tokens = self.unfinished_tokens.saturating_sub(booking.uncached_tokens.into());
            self.decode.insert(id, Booking { left_tokens: 0, ..booking });
        }
        let Some(booking) = self.decode.get_mut(&id) else { return };
        let before = booking.context_tokens();
        booking.tip = Some(block);
        booking.answer_blocks += 1;
        self.answer_blocks += 1;
        self.context_tokens += booking.context_tokens() - before;
    }

    fn leave_tip(&mut self, tip: SequenceHash, id: RequestId) {
        if let Entry::Occupied(mut ids) = self.tips.entry(tip) {
            ids.get_mut().retain(|other| *other != id);
            if ids.get().is_empty() {
                ids.remove();
            }
        }
    }

    /// The prompts of all bookings with the rank's keys: those in prefill first, in their turn, then the others, the last
    /// one first.
    pub(super) fn prompts(&self) -> Vec<(Arc<PromptBlocks>, SequenceKey)> {
        let mut prefill: Vec<&Booking> = self.prefill.values().collect();
        let mut decode: Vec<&Booking> = self.decode.values().collect();
        prefill.sort_unstable_by_key(|booking| booking.turn);
        decode.sort_unstable_by_key(|booking| Reverse(booking.turn));
        prefill.iter().chain(&decode).map(|booking| (Arc::clone(&booking.prompt), booking.key)).collect()
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
        book.add(
            RequestId(1),
            Booking::new(&ask(1, 70, 0..4), SequenceKey::of_size(16), 54, now, Prefill::BY_EVENTS),
            now,
        );
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
    fn where_events_get_lost_an_overtaken_prefill_is_done() {
        let now = Instant::now();
        let lossy = Prefill { by_events: true, done_at: Some(now + Duration::from_secs(60)) };
        for (prefill, left) in [(lossy, 64), (Prefill::BY_EVENTS, 128)] {
            let mut book = RankBook::default();
            for (id, blocks) in [(1, 0..4), (2, 10..14), (3, 20..24)] {
                book.add(
                    RequestId(id),
                    Booking::new(&ask(id, 64, blocks), SequenceKey::of_size(16), 64, now, prefill),
                    now,
                );
            }
            book.progress(|sequence| if sequence[0].0 == 10 { 4 } else { 0 }, now);
            assert_eq!(
                book.load().prefill_tokens,
                left,
                "of the last one, and of the first where all is told"
            );
            assert_eq!(book.load().unfinished_tokens, left);
        }
    }

    #[test]
    fn a_timed_prefill_heeds_the_clock_and_nothing_else() {
        let now = Instant::now();
        let due = now + Duration::from_secs(1);
        let timed = Prefill { by_events: false, done_at: Some(due) };
        let mut book = RankBook::default();
        book.add(RequestId(1), Booking::new(&ask(1, 5, 0..0), SequenceKey::of_size(16), 5, now, timed), now);
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
        book.add(first.id, Booking::new(&first, SequenceKey::of_size(16), 64, now, Prefill::BY_EVENTS), now);
        assert_eq!(book.shared(&first.prompt, SequenceKey::of_size(16)), (4, 48));
        assert_eq!(book.shared(&ask(2, 100, 0..6).prompt, SequenceKey::of_size(16)), (4, 64));
        assert_eq!(
            book.shared(&first.prompt, SequenceKey::of_size(32)),
            (0, 0),
            "no hashes of that block size"
        );
    }
}
