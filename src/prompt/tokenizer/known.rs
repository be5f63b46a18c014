//! The ids of texts that stand in many prompts: those that a template wrote for messages.
//!
//! Of such a text the part from its first added token to its last one is cut out of any prompt in the same way, if no
//! added token can reach over these two ends ([`super::cut::Cutter::part`]); and so is the rest behind it, where another
//! such part stands right behind the text. Their ids are kept beside the text, and prompts share them.

use super::{Encoded, TimeIsUp, Tokenizer, Work};
use crate::prompt::error::PromptError;
use crate::prompt::ids::TokenIds;
use crate::prompt::template::{KnownText, Rendered};
use crate::units::TokenId;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Room for as many of a prompt's own ids is made at once; the others of a long one are mostly shared.
const USUAL_TOKENS: usize = 4096;

/// The ids of a text from its first added token on.
#[derive(Debug)]
pub(in crate::prompt) struct Tokenized {
    /// From the first added token to the last one.
    part: Range<usize>,
    /// The ids of the part, then those of the rest.
    ids: Arc<[TokenId]>,
    of_part: Count,
    of_both: Count,
}

#[derive(Clone, Copy, Debug)]
struct Count {
    tokens: usize,
    pieces: usize,
}

impl Tokenized {
    /// The most memory that the ids of a text of so many bytes may take. Most take as much as the text.
    pub(in crate::prompt) const fn most_bytes(text_bytes: usize) -> usize {
        text_bytes + text_bytes / 2
    }
}

/// A known text whose ids are to be taken, once it is seen what stands behind it.
struct Taken<'k> {
    tokens: &'k Tokenized,
    rest: &'k str,
    is_new: bool,
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
            let mut taken: Option<Taken<'_>> = None;
            ids.reserve_runs(rendered.parts().size_hint().0);
            ids.own().reserve((rendered.text_bytes() / 3).min(USUAL_TOKENS));
            for (new, known) in rendered.parts() {
                let part = known.and_then(|known| self.part_of(known));
                if let Some(taken) = taken.take() {
                    let token_is_next = new.is_empty() && part.as_ref().is_some_and(|part| part.start == 0);
                    self.take(&taken, token_is_next, ids, work);
                    between.push_str(if token_is_next { "" } else { taken.rest });
                }
                if known.is_none() && between.is_empty() {
                    return self.encode_text(new, ids.own(), work, time_is_up);
                }
                between.push_str(new);
                let Some(known) = known else { break };
                let text = known.as_str();
                let Some(part) = part else {
                    between.push_str(text);
                    continue;
                };
                between.push_str(text.get(..part.start).unwrap_or_default());
                if !between.is_empty() {
                    if !self.encode_text(&between, ids.own(), work, time_is_up)? {
                        return Ok(false);
                    }
                    between.clear();
                }
                let rest = text.get(part.end..).unwrap_or_default();
                if let Some(Some(tokens)) = known.tokens.get() {
                    taken = Some(Taken { tokens, rest, is_new: false });
                    continue;
                }
                match self.encode_known(known, part, ids.own(), work, time_is_up)? {
                    First::Kept(tokens) => taken = Some(Taken { tokens, rest, is_new: true }),
                    First::Appended => between.push_str(rest),
                    First::Late => return Ok(false),
                }
            }
            self.encode_text(&between, ids.own(), work, time_is_up)
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

    /// Appends the ids of a known text, those of its rest too if an added token stands right behind it.
    fn take(&self, taken: &Taken<'_>, with_rest: bool, ids: &mut TokenIds, work: &mut Work) {
        let Taken { tokens, is_new, .. } = taken;
        let Count { tokens: count, pieces } = if with_rest { tokens.of_both } else { tokens.of_part };
        ids.share(&tokens.ids, count);
        if *is_new {
            return;
        }
        work.pieces += pieces;
        work.reused_pieces += pieces;
        if let Some(cached) = &self.cached {
            cached.in_known_texts.fetch_add(pieces as u64, Ordering::Relaxed);
        }
    }

    /// Finds the ids of a text for the first time.
    fn encode_known<'k>(
        &self,
        known: &'k KnownText,
        part: Range<usize>,
        ids: &mut Vec<TokenId>,
        work: &mut Work,
        time_is_up: TimeIsUp<'_>,
    ) -> Result<First<'k>, PromptError> {
        let (start, pieces) = (ids.len(), work.pieces);
        let count =
            |ids: &[TokenId], work: &Work| Count { tokens: ids.len() - start, pieces: work.pieces - pieces };
        let own = known.as_str().get(part.clone()).unwrap_or_default();
        if !self.encode_text(own, ids, work, time_is_up)? {
            return Ok(First::Late);
        }
        let of_part = count(ids, work);
        let rest = known.as_str().get(part.end..).unwrap_or_default();
        let is_whole = self.encode_text(rest, ids, work, time_is_up)?;
        let of_both = count(ids, work);
        let both = ids.get(start..).unwrap_or_default();
        if is_whole {
            let is_small = size_of_val(both) <= Tokenized::most_bytes(known.len());
            let tokens = || is_small.then(|| Tokenized { part, ids: both.into(), of_part, of_both });
            // Whoever was faster found the same.
            if let Some(tokens) = known.tokens.get_or_init(tokens) {
                ids.truncate(start);
                return Ok(First::Kept(tokens));
            }
        }
        ids.truncate(start + of_part.tokens);
        Ok(if is_whole { First::Appended } else { First::Late })
    }
}

/// What became of the ids of a text that were not known.
enum First<'k> {
    Kept(&'k Tokenized),
    /// They take too much memory to be kept: those of the part were appended.
    Appended,
    /// The time was up: as many as there are were appended.
    Late,
}
