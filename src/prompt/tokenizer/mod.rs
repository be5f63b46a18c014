//! Text → token ids.

mod cache;
mod cut;
mod fast;
mod huggingface;
mod probe;

pub use cache::CacheStats;

use super::error::PromptError;
use crate::units::TokenId;
use cache::SegmentCache;
use cut::{Cutter, Piece};
use fast::Fast;
use huggingface::HuggingFace;
use serde_json::Value;
use std::fmt;

/// A way to turn text into ids, one for each library.
pub trait Tokenize: Send + Sync + fmt::Debug {
    /// Appends the ids of `text` to `ids`. Added tokens that stand in the text are recognised, as in vLLM; none are
    /// put around it.
    ///
    /// # Errors
    /// [`PromptError::Tokenizer`] where the tokenizer fails.
    fn encode(&self, text: &str, ids: &mut Vec<TokenId>) -> Result<(), PromptError>;
}

/// A model's tokenizer, with a cache of what it tokenized lately.
#[derive(Debug)]
pub(super) struct Tokenizer {
    backend: Box<dyn Tokenize>,
    /// The ids that stand around a text if special tokens are to be added; `None` if they could not be found out.
    around: Option<(Vec<TokenId>, Vec<TokenId>)>,
    cached: Option<Cached>,
}

#[derive(Debug)]
struct Cached {
    cutter: Cutter,
    segments: SegmentCache,
}

impl Tokenizer {
    /// Loads a `tokenizer.json`. The cache takes at most `cache_bytes`; there is none if that is 0.
    pub(super) fn load(json: &[u8], cache_bytes: usize) -> Result<Self, String> {
        let reference = HuggingFace::from_json(json)?;
        let around = around(&reference);
        let parsed: Value = serde_json::from_slice(json).map_err(|error| error.to_string())?;
        let added_tokens = parsed["added_tokens"].clone();
        let cached = Cutter::new(&parsed)
            .filter(|cutter| cache_bytes > 0 && probe::can_be_cut(&reference, cutter, &added_tokens))
            .map(|cutter| Cached { cutter, segments: SegmentCache::new(cache_bytes, fastrand::u64(..)) });
        // The reference is dropped where the fast one does: each takes hundreds of megabytes.
        let fast = Fast::from_json(parsed).ok().filter(|fast| probe::agrees(&reference, fast, &added_tokens));
        let backend: Box<dyn Tokenize> = match fast {
            Some(fast) => Box::new(fast),
            None => Box::new(reference),
        };
        Ok(Self { backend, around, cached })
    }

    pub(super) fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<TokenId>, PromptError> {
        // Most tokens have three to five bytes.
        let mut ids = Vec::with_capacity(text.len() / 3 + 8);
        if !add_special_tokens {
            self.encode_text(text, &mut ids)?;
            return Ok(ids);
        }
        let (before, after) = self.around.as_ref().ok_or(PromptError::Tokenizer)?;
        ids.extend_from_slice(before);
        self.encode_text(text, &mut ids)?;
        ids.extend_from_slice(after);
        Ok(ids)
    }

    fn encode_text(&self, text: &str, ids: &mut Vec<TokenId>) -> Result<(), PromptError> {
        let Some(cached) = &self.cached else { return self.backend.encode(text, ids) };
        cached.cutter.cut(text, |piece| match piece {
            Piece::Token(id) => {
                ids.push(id);
                Ok(())
            }
            Piece::Text(piece) => cached.segments.encode(piece, ids, |ids| self.backend.encode(piece, ids)),
        })
    }

    /// What the cache holds; `None` if there is none.
    pub(super) fn cache_stats(&self) -> Option<CacheStats> {
        self.cached.as_ref().map(|cached| cached.segments.stats())
    }
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
mod tests;
