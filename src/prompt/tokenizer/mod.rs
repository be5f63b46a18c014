//! Text → token ids.

mod cache;
mod cut;
mod fast;
mod huggingface;
mod known;
mod lines;
mod pieces;
mod probe;
mod words;

use super::error::PromptError;
use super::ids::TokenIds;
use crate::recent::CacheStats;
use crate::units::TokenId;
use cache::SegmentCache;
use cut::Cutter;
pub(super) use cut::Piece;
use fast::Fast;
use huggingface::HuggingFace;
pub(super) use known::Tokenized;
use lines::Lines;
use serde_json::Value;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A way to turn text into ids, one for each library.
pub trait Tokenize: Send + Sync + fmt::Debug {
    /// Appends the ids of `text` to `ids`. Added tokens that stand in the text are recognised, as in vLLM; none are
    /// put around it.
    ///
    /// # Errors
    /// [`PromptError::Tokenizer`] where the tokenizer fails.
    fn encode(&self, text: &str, ids: &mut Vec<TokenId>) -> Result<(), PromptError>;

    /// The same for a text in which no added token stands.
    ///
    /// # Errors
    /// As [`Tokenize::encode`].
    fn encode_plain(&self, text: &str, ids: &mut Vec<TokenId>) -> Result<(), PromptError> {
        self.encode(text, ids)
    }
}

/// A model's tokenizer, with a cache of what it tokenized lately.
#[derive(Debug)]
pub(super) struct Tokenizer {
    backend: Box<dyn Tokenize>,
    /// The ids that stand around a text if special tokens are to be added; `None` if they could not be found out.
    around: Option<(Vec<TokenId>, Vec<TokenId>)>,
    largest_id: Option<TokenId>,
    cached: Option<Cached>,
}

#[derive(Debug)]
struct Cached {
    cutter: Cutter,
    /// For long pieces.
    lines: Option<Lines>,
    segments: SegmentCache,
    /// Whether no added token stands in what the cutter leaves.
    leaves_plain_text: bool,
    /// How many pieces were not even looked for, as they stood in a text whose ids are known.
    in_known_texts: AtomicU64,
}

impl Tokenizer {
    /// Loads a `tokenizer.json`. The cache takes at most `cache_bytes`; there is none if that is 0.
    pub(super) fn load(json: &[u8], cache_bytes: usize) -> Result<Self, String> {
        let reference = HuggingFace::from_json(json)?;
        let around = around(&reference);
        let largest_id = reference.largest_id();
        let parsed: Value = serde_json::from_slice(json).map_err(|error| error.to_string())?;
        let added_tokens = parsed["added_tokens"].clone();
        let whole = |text: &str, ids: &mut Vec<TokenId>| reference.encode(text, ids);
        let mut cached = Cutter::new(&parsed)
            .filter(|cutter| cache_bytes > 0 && probe::can_be_cut(&reference, cutter, whole, &added_tokens))
            .map(|cutter| Cached {
                lines: Lines::new(&parsed)
                    .filter(|lines| probe::can_be_cut_between(&reference, *lines, &added_tokens)),
                segments: SegmentCache::new(cache_bytes),
                leaves_plain_text: cutter.finds_all(),
                in_known_texts: AtomicU64::new(0),
                cutter,
            });
        // The reference is dropped where the fast one does: each takes hundreds of megabytes.
        let fast = Fast::from_json(parsed).ok().filter(|fast| probe::agrees(&reference, fast, &added_tokens));
        if let (Some(cached), Some(fast)) = (&mut cached, &fast) {
            let plain = |text: &str, ids: &mut Vec<TokenId>| fast.encode_plain(text, ids);
            cached.leaves_plain_text = cached.leaves_plain_text
                && probe::can_be_cut(&reference, &cached.cutter, plain, &added_tokens);
        }
        let backend: Box<dyn Tokenize> = match fast {
            Some(fast) => Box::new(fast),
            None => Box::new(reference),
        };
        Ok(Self { backend, around, largest_id, cached })
    }

    /// The largest id of a token; `None` if there are no tokens.
    pub(super) const fn largest_id(&self) -> Option<TokenId> {
        self.largest_id
    }

    /// How many ids stand before and behind a text if special tokens are added.
    pub(super) fn around(&self) -> (usize, usize) {
        self.around.as_ref().map_or((0, 0), |(before, after)| (before.len(), after.len()))
    }

    /// The ids of a whole text.
    #[cfg(test)]
    fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<TokenId>, PromptError> {
        self.encode_until(text, add_special_tokens, &|| false).map(|encoded| encoded.ids.into_vec())
    }

    /// The ids of a text, and whether these are all: between two pieces the work ends if `time_is_up`.
    pub(super) fn encode_until(
        &self,
        text: &str,
        add_special_tokens: bool,
        time_is_up: TimeIsUp<'_>,
    ) -> Result<Encoded, PromptError> {
        self.encode_within(text.len(), add_special_tokens, |ids, work| {
            self.encode_text(text, ids.own(), work, time_is_up)
        })
    }

    /// Puts the ids around a text that are to stand there; `encode` appends its own, and says whether these are all.
    fn encode_within(
        &self,
        text_bytes: usize,
        add_special_tokens: bool,
        encode: impl FnOnce(&mut TokenIds, &mut Work) -> Result<bool, PromptError>,
    ) -> Result<Encoded, PromptError> {
        let mut ids = TokenIds::default();
        let around = match &self.around {
            _ if !add_special_tokens => None,
            Some(around) => Some(around),
            None => return Err(PromptError::Tokenizer),
        };
        ids.own().extend(around.iter().flat_map(|(before, _)| before));
        let mut work = Work { text_bytes, ..Work::default() };
        let is_whole = encode(&mut ids, &mut work)?;
        ids.own().extend(around.iter().filter(|_| is_whole).flat_map(|(_, after)| after));
        ids.shrink();
        Ok(Encoded { ids, is_whole, work })
    }

    /// The ids of a text that may go on: those that no more of it would change.
    ///
    /// No tokenizer that is known joins the end of a word and the blank behind it, so the text is taken up to such a
    /// place; and of its last tokens some are left out, as one in between may be of a kind that is not known.
    pub(super) fn encode_beginning(
        &self,
        text: &str,
        add_special_tokens: bool,
        time_is_up: TimeIsUp<'_>,
    ) -> Result<Encoded, PromptError> {
        let text = &text[..end_of_last_word(text)];
        let mut encoded = self.encode_until(text, add_special_tokens, time_is_up)?;
        if encoded.is_whole {
            let after =
                self.around.as_ref().filter(|_| add_special_tokens).map_or(0, |(_, after)| after.len());
            let certain = encoded.ids.len().saturating_sub(after + UNCERTAIN_TOKENS);
            let mut ids = encoded.ids.into_vec();
            ids.truncate(certain);
            encoded.ids = ids.into();
        }
        Ok(encoded)
    }

    fn encode_text(
        &self,
        text: &str,
        ids: &mut Vec<TokenId>,
        work: &mut Work,
        time_is_up: TimeIsUp<'_>,
    ) -> Result<bool, PromptError> {
        // Most tokens have three to five bytes.
        ids.reserve(text.len() / 3 + 8);
        let Some(cached) = &self.cached else { return self.encode_new(text, ids).map(|()| true) };
        let result = cached.cutter.cut(text, |piece| match piece {
            Piece::Token(id) => {
                ids.push(id);
                Ok(())
            }
            Piece::Text(piece) => self.encode_piece(piece, ids, work, time_is_up),
        });
        match result {
            Ok(()) => Ok(true),
            Err(Halt::TimeIsUp) => Ok(false),
            Err(Halt::Failed(error)) => Err(error),
        }
    }

    /// The ids of a text without added tokens; a long one in parts.
    fn encode_piece(
        &self,
        mut piece: &str,
        ids: &mut Vec<TokenId>,
        work: &mut Work,
        time_is_up: TimeIsUp<'_>,
    ) -> Result<(), Halt> {
        let lines = self.cached.as_ref().and_then(|cached| cached.lines);
        while let Some((part, rest)) = lines.and_then(|lines| piece.split_at_checked(lines.first(piece)?)) {
            self.encode_part(part, ids, work, time_is_up)?;
            piece = rest;
        }
        self.encode_part(piece, ids, work, time_is_up)
    }

    /// The ids of a text that is tokenized at once, from the cache if it has them.
    fn encode_part(
        &self,
        piece: &str,
        ids: &mut Vec<TokenId>,
        work: &mut Work,
        time_is_up: TimeIsUp<'_>,
    ) -> Result<(), Halt> {
        if time_is_up() {
            return Err(Halt::TimeIsUp);
        }
        work.pieces += 1;
        let mut reused = true;
        let mut encode = |ids: &mut Vec<TokenId>| {
            reused = false;
            self.encode_new(piece, ids)
        };
        match &self.cached {
            Some(cached) => cached.segments.encode(piece, ids, encode),
            None => encode(ids),
        }
        .map_err(Halt::Failed)?;
        work.reused_pieces += usize::from(reused);
        Ok(())
    }

    /// The ids of a text that is not known.
    fn encode_new(&self, text: &str, ids: &mut Vec<TokenId>) -> Result<(), PromptError> {
        if words::take_too_long(text) {
            return Err(PromptError::LongWords);
        }
        match &self.cached {
            Some(Cached { leaves_plain_text: true, .. }) => self.backend.encode_plain(text, ids),
            _ => self.backend.encode(text, ids),
        }
    }

    /// What the cache holds; `None` if there is none.
    pub(super) fn cache_stats(&self) -> Option<CacheStats> {
        self.cached.as_ref().map(|cached| {
            let stats = cached.segments.stats();
            CacheStats { hits: stats.hits + cached.in_known_texts.load(Ordering::Relaxed), ..stats }
        })
    }
}

/// A text in tokens.
#[derive(Debug)]
pub(super) struct Encoded {
    pub(super) ids: TokenIds,
    /// Whether these are all.
    pub(super) is_whole: bool,
    pub(super) work: Work,
}

impl Encoded {
    pub(super) const fn rendered_in(mut self, rendering: Duration) -> Self {
        self.work.rendering = rendering;
        self
    }
}

/// What it took to tokenize a prompt.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Work {
    /// The length of the rendered text.
    pub text_bytes: usize,
    /// The pieces of text between added tokens.
    pub pieces: usize,
    /// How many of them were tokenized before.
    pub reused_pieces: usize,
    /// How long the chat template ran.
    pub rendering: Duration,
}

impl std::ops::Add for Work {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            text_bytes: self.text_bytes + other.text_bytes,
            pieces: self.pieces + other.pieces,
            reused_pieces: self.reused_pieces + other.reused_pieces,
            rendering: self.rendering + other.rendering,
        }
    }
}

/// Tells whether the work must end.
pub type TimeIsUp<'a> = &'a dyn Fn() -> bool;

/// Why a text was not tokenized to its end.
enum Halt {
    TimeIsUp,
    Failed(PromptError),
}

/// How many tokens before the end of a text that may go on are not counted on.
const UNCERTAIN_TOKENS: usize = 8;

/// The last place where a letter stands before a blank and another one behind it; 0 if there is none.
fn end_of_last_word(text: &str) -> usize {
    let is_end =
        |three: &[u8]| matches!(three, [a, b' ', z] if a.is_ascii_alphabetic() && z.is_ascii_alphabetic());
    text.as_bytes().windows(3).rposition(is_end).map_or(0, |at| at + 1)
}

/// Finds out which ids `tokenizer.json` puts around a text, by two texts with and without them. It alone counts:
/// `transformers` 5 ignores `add_bos_token` where there is a `tokenizer.json`.
fn around(reference: &HuggingFace) -> Option<(Vec<TokenId>, Vec<TokenId>)> {
    let encoded = |text: &str| {
        let mut plain = Vec::new();
        reference.encode(text, &mut plain).ok()?;
        Some((plain, reference.encode_around(text).ok()?))
    };
    let (plain, full) = encoded("a")?;
    let at = full.windows(plain.len().max(1)).position(|window| window == plain)?;
    let (before, after) = (full.get(..at)?, full.get(at + plain.len()..)?);
    let (plain, full) = encoded("Any other text, 1 2 3.")?;
    let same = full == [before, plain.as_slice(), after].concat();
    same.then(|| (before.to_vec(), after.to_vec()))
}

#[cfg(test)]
mod golden;
#[cfg(test)]
mod tests;
