//! Text → token ids.

mod cache;
mod cut;
mod huggingface;

pub use cache::CacheStats;

use super::error::PromptError;
use super::files::Around;
use crate::units::TokenId;
use cache::SegmentCache;
use cut::{Cutter, Piece};
use huggingface::HuggingFace;
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
    /// Loads a `tokenizer.json`. `around` names the tokens around a text, if the model's configuration does; the cache
    /// takes at most `cache_bytes`, and there is none if that is 0.
    pub(super) fn load(json: &[u8], around: Option<&Around>, cache_bytes: usize) -> Result<Self, String> {
        let reference = HuggingFace::from_json(json)?;
        let around = match around {
            Some(around) => Some((named(&reference, &around.before)?, named(&reference, &around.after)?)),
            None => found_around(&reference),
        };
        let parsed = serde_json::from_slice(json).map_err(|error| error.to_string())?;
        let cached = Cutter::new(&parsed)
            .filter(|cutter| cache_bytes > 0 && cuts_change_nothing(cutter, &reference, &parsed))
            .map(|cutter| Cached { cutter, segments: SegmentCache::new(cache_bytes, fastrand::u64(..)) });
        Ok(Self { backend: Box::new(reference), around, cached })
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

fn named(reference: &HuggingFace, token: &Option<String>) -> Result<Vec<TokenId>, String> {
    let Some(token) = token else { return Ok(Vec::new()) };
    let id = reference.id(token).ok_or_else(|| format!("the token {token:?} is not in the vocabulary"))?;
    Ok(vec![id])
}

/// Finds out which ids `tokenizer.json` puts around a text, by two texts with and without them.
fn found_around(reference: &HuggingFace) -> Option<(Vec<TokenId>, Vec<TokenId>)> {
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

/// Compares cut and whole texts, made of the tokenizer's own added tokens and of text that is known to be hard.
fn cuts_change_nothing(cutter: &Cutter, reference: &HuggingFace, json: &serde_json::Value) -> bool {
    const TEXTS: [&str; 16] = [
        "user\n",
        "\n",
        "\n\n",
        " ",
        "   a",
        "a ",
        "don't",
        "1234",
        "{\"a\": [1]}",
        "\u{301}e",
        "é",
        "你好",
        "🙂",
        "\t\r\n",
        "\u{a0}",
        "<|",
    ];
    const PROBES: usize = 200;
    let added = json["added_tokens"].as_array().map(Vec::as_slice).unwrap_or_default();
    let added: Vec<&str> = added.iter().filter_map(|token| token["content"].as_str()).collect();
    let mut random = fastrand::Rng::with_seed(1);
    (0..PROBES).all(|_| {
        let text: String = (0..random.usize(1..9))
            .map(|_| match random.choice(&added) {
                Some(token) if random.bool() => token,
                _ => TEXTS[random.usize(..TEXTS.len())],
            })
            .collect();
        let (mut whole, mut cut) = (Vec::new(), Vec::new());
        let cutting = cutter.cut(&text, |piece| match piece {
            Piece::Token(id) => {
                cut.push(id);
                Ok(())
            }
            Piece::Text(text) => reference.encode(text, &mut cut),
        });
        cutting.is_ok() && reference.encode(&text, &mut whole).is_ok() && whole == cut
    })
}

#[cfg(test)]
mod tests;
