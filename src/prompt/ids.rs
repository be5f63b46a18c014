//! A prompt's token ids, of which long runs belong to other prompts as well.
//!
//! The next turn of a conversation has nearly all of its tokens in common with the one before. To copy them costs more than
//! all that is done with them, as fresh memory does: half a megabyte for 128,000 tokens.

use crate::hash::{HashKey, MediaItem};
use crate::units::{SequenceHash, TokenId};
use std::fmt;
use std::sync::Arc;

/// Shorter runs are copied: a kilobyte is copied faster than it is shared, and read in one piece.
const SHARED_TOKENS: usize = 256;

/// Room for more is given back: prompts are kept for a while.
const SPARE_TOKENS: usize = 1024;

/// Token ids in their order: some of its own, and between them runs that are shared.
#[derive(Clone, Default)]
pub struct TokenIds {
    own: Vec<TokenId>,
    shared: Vec<Shared>,
    shared_tokens: usize,
}

/// The beginning of a run of ids.
#[derive(Clone)]
struct Shared {
    /// How many of the prompt's own ids stand before it.
    behind: usize,
    run: Arc<[TokenId]>,
    tokens: usize,
}

impl Shared {
    fn ids(&self) -> &[TokenId] {
        self.run.get(..self.tokens).unwrap_or_default()
    }
}

impl TokenIds {
    /// How many there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.own.len() + self.shared_tokens
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// They as they lie in memory.
    pub fn runs(&self) -> impl Iterator<Item = &[TokenId]> {
        let mut start = 0;
        self.shared.iter().map(Some).chain([None]).flat_map(move |shared| {
            let end = shared.map_or(self.own.len(), |shared| shared.behind);
            let own = self.own.get(start..end).unwrap_or_default();
            start = end;
            [own, shared.map_or(&[][..], Shared::ids)]
        })
    }

    /// One after the other.
    pub fn iter(&self) -> impl Iterator<Item = TokenId> {
        self.runs().flatten().copied()
    }

    /// Whether these begin with others.
    #[must_use]
    pub fn starts_with(&self, others: &Self) -> bool {
        others.len() <= self.len() && others.iter().eq(self.iter().take(others.len()))
    }

    /// A copy in one piece.
    #[must_use]
    pub fn to_vec(&self) -> Vec<TokenId> {
        let mut all = Vec::with_capacity(self.len());
        self.runs().for_each(|run| all.extend_from_slice(run));
        all
    }

    /// All in one piece; only what is shared has to be copied for it.
    #[must_use]
    pub fn into_vec(self) -> Vec<TokenId> {
        if self.shared.is_empty() { self.own } else { self.to_vec() }
    }

    /// Sequence hashes of all full blocks ([`HashKey::sequence_with_media`]).
    #[must_use]
    pub fn sequence(
        &self,
        key: &HashKey,
        root: SequenceHash,
        media: &[MediaItem],
        block_tokens: u32,
    ) -> Vec<SequenceHash> {
        match (&self.shared[..], media) {
            (_, []) => key.sequence_of_runs(root, self.runs(), self.len(), block_tokens),
            ([], media) => key.sequence_with_media(root, &self.own, media, block_tokens),
            (_, media) => key.sequence_with_media(root, &self.to_vec(), media, block_tokens),
        }
    }

    /// Those of its own, to append others.
    pub(super) const fn own(&mut self) -> &mut Vec<TokenId> {
        &mut self.own
    }

    /// Makes room for so many runs.
    pub(super) fn reserve_runs(&mut self, runs: usize) {
        self.shared.reserve(runs);
    }

    /// Appends the first `tokens` of a run.
    pub(super) fn share(&mut self, run: &Arc<[TokenId]>, tokens: usize) {
        let shared = Shared { behind: self.own.len(), run: Arc::clone(run), tokens };
        let ids = shared.ids();
        if ids.len() < SHARED_TOKENS {
            self.own.extend_from_slice(ids);
        } else {
            self.shared_tokens += ids.len();
            self.shared.push(shared);
        }
    }

    /// Gives back the room for others.
    pub(super) fn shrink(&mut self) {
        if self.own.capacity() - self.own.len() > SPARE_TOKENS {
            self.own.shrink_to_fit();
        }
    }

    /// The memory that they take, in bytes, shared runs and all.
    pub(super) fn memory_bytes(&self) -> usize {
        let runs: usize = self.shared.iter().map(|shared| size_of_val(&*shared.run)).sum();
        runs + self.own.capacity() * size_of::<TokenId>() + self.shared.capacity() * size_of::<Shared>()
    }
}

impl From<Vec<TokenId>> for TokenIds {
    fn from(own: Vec<TokenId>) -> Self {
        Self { own, ..Self::default() }
    }
}

impl PartialEq for TokenIds {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().eq(other.iter())
    }
}

impl Eq for TokenIds {}

impl fmt::Debug for TokenIds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(ids: std::ops::Range<u32>) -> Vec<TokenId> {
        ids.map(TokenId).collect()
    }

    /// Ids of their own and runs of all lengths, in any order, and the same in one piece.
    fn mixed(random: &mut fastrand::Rng) -> (TokenIds, Vec<TokenId>) {
        let (mut ids, mut whole) = (TokenIds::default(), Vec::new());
        for _ in 0..random.usize(..8) {
            let first = random.u32(..1000);
            let new = tokens(first..first + random.u32(..2 * SHARED_TOKENS as u32));
            if random.bool() {
                ids.own().extend_from_slice(&new);
                whole.extend_from_slice(&new);
            } else {
                let some = random.usize(..=new.len());
                whole.extend_from_slice(&new[..some]);
                ids.share(&new.into(), some);
            }
        }
        (ids, whole)
    }

    #[test]
    fn they_are_the_same_in_runs_and_in_one_piece() {
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..500 {
            let (ids, whole) = mixed(&mut random);
            assert_eq!((ids.len(), ids.is_empty()), (whole.len(), whole.is_empty()));
            assert_eq!(ids.to_vec(), whole);
            assert_eq!(ids.iter().collect::<Vec<_>>(), whole);
            assert_eq!(ids, TokenIds::from(whole.clone()));
            let (other, other_whole) = mixed(&mut random);
            let some = random.usize(..=whole.len());
            assert!(ids.starts_with(&whole[..some].to_vec().into()));
            assert_eq!(ids.starts_with(&other), whole.starts_with(&other_whole));
            assert_eq!(ids.into_vec(), whole);
        }
    }

    #[test]
    fn the_hashes_are_those_of_one_piece() {
        let key = HashKey::from_seed(1);
        let media = [MediaItem { identifier: "image".into(), first_token: 20, tokens: 30 }];
        let mut random = fastrand::Rng::with_seed(2);
        for _ in 0..500 {
            let (ids, whole) = mixed(&mut random);
            for block_tokens in [0, 1, 16, 17, 32, 128] {
                for media in [&[][..], &media] {
                    assert_eq!(
                        ids.sequence(&key, key.plain_root(), media, block_tokens),
                        key.sequence_with_media(key.plain_root(), &whole, media, block_tokens),
                        "{block_tokens} a block"
                    );
                }
            }
        }
    }

    #[test]
    fn a_long_run_is_not_copied() {
        let run: Arc<[TokenId]> = tokens(0..1000).into();
        let mut ids = TokenIds::default();
        ids.share(&run, 1000);
        ids.share(&run, 3);
        assert_eq!((Arc::strong_count(&run), ids.len()), (2, 1003));
        assert!(ids.memory_bytes() >= 4000, "it counts all the same");
    }

    #[test]
    fn room_that_is_not_needed_is_given_back() {
        let mut ids = TokenIds::from(tokens(0..10));
        ids.own().reserve(100_000);
        ids.shrink();
        assert!(ids.memory_bytes() < 1000);
        assert_eq!(ids.into_vec(), tokens(0..10));
    }
}
