//! The ids of texts that stand in many prompts: those that a template wrote for messages.
//!
//! Of such a text the part from its first added token to its last one is cut out of any prompt in the same way, if no
//! added token can reach over these two ends ([`super::cut::Cutter::part`]). Its ids are kept beside the text.

use super::{Encoded, TimeIsUp, Tokenizer, Work};
use crate::prompt::error::PromptError;
use crate::prompt::template::{KnownText, Rendered};
use crate::units::TokenId;
use std::ops::Range;
use std::sync::atomic::Ordering;

/// The ids of a part of a text.
#[derive(Debug)]
pub(in crate::prompt) struct Tokenized {
    part: Range<usize>,
    ids: Box<[TokenId]>,
    pieces: usize,
}

impl Tokenized {
    /// The most memory that the ids of a text of so many bytes may take. Most take as much as the text.
    pub(in crate::prompt) const fn most_bytes(text_bytes: usize) -> usize {
        text_bytes + text_bytes / 2
    }
}

impl Tokenizer {
    /// The ids of what a template wrote, and whether these are all: between two pieces the work ends if `time_is_up`.
    pub(in crate::prompt) fn encode_rendered(
        &self,
        rendered: &Rendered,
        add_special_tokens: bool,
        time_is_up: TimeIsUp<'_>,
    ) -> Result<Encoded, PromptError> {
        self.encode_within(rendered.text_bytes(), add_special_tokens, |ids, work| {
            // What stands between two texts whose ids are known is tokenized as one.
            let mut between = String::new();
            for (new, known) in rendered.parts() {
                if known.is_none() && between.is_empty() {
                    return self.encode_text(new, ids, work, time_is_up);
                }
                between.push_str(new);
                let Some(known) = known else { break };
                let text = known.as_str();
                // Where no part is certain, the whole text stands between.
                let part = self.part_of(known).unwrap_or(text.len()..text.len());
                between.push_str(text.get(..part.start).unwrap_or_default());
                if part.is_empty() {
                    continue;
                }
                if !self.encode_text(&between, ids, work, time_is_up)?
                    || !self.encode_known(known, part.clone(), ids, work, time_is_up)?
                {
                    return Ok(false);
                }
                between.clear();
                between.push_str(text.get(part.end..).unwrap_or_default());
            }
            self.encode_text(&between, ids, work, time_is_up)
        })
    }

    /// The part of a text whose ids are the same wherever it stands.
    fn part_of(&self, known: &KnownText) -> Option<Range<usize>> {
        match known.tokens.get() {
            Some(tokens) => tokens.as_ref().map(|tokens| tokens.part.clone()),
            None => {
                let part = self.cached.as_ref().and_then(|cached| cached.cutter.part(known.as_str()));
                if part.is_none() {
                    // Whoever was faster found the same.
                    let _ = known.tokens.set(None);
                }
                part
            }
        }
    }

    fn encode_known(
        &self,
        known: &KnownText,
        part: Range<usize>,
        ids: &mut Vec<TokenId>,
        work: &mut Work,
        time_is_up: TimeIsUp<'_>,
    ) -> Result<bool, PromptError> {
        if let Some(Some(tokens)) = known.tokens.get() {
            ids.extend_from_slice(&tokens.ids);
            work.pieces += tokens.pieces;
            work.reused_pieces += tokens.pieces;
            if let Some(cached) = &self.cached {
                cached.in_known_texts.fetch_add(tokens.pieces as u64, Ordering::Relaxed);
            }
            return Ok(true);
        }
        let (start, pieces) = (ids.len(), work.pieces);
        let text = known.as_str().get(part.clone()).unwrap_or_default();
        if !self.encode_text(text, ids, work, time_is_up)? {
            return Ok(false);
        }
        let own = ids.get(start..).unwrap_or_default();
        let is_small = size_of_val(own) <= Tokenized::most_bytes(known.len());
        let tokens = is_small.then(|| Tokenized { part, ids: own.into(), pieces: work.pieces - pieces });
        let _ = known.tokens.set(tokens);
        Ok(true)
    }
}
