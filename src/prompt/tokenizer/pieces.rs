//! Prompts that come in pieces: tokens by their id, and texts that are tokenized apart from each other, in which no added
//! token counts.

use super::cut::Piece;
use super::{Encoded, Halt, TimeIsUp, Tokenizer, Work};
use crate::prompt::error::PromptError;
use crate::units::TokenId;

impl Tokenizer {
    /// The id of an added token; `None` if there is no such token, or texts cannot be cut at it.
    pub(in crate::prompt) fn added_token(&self, content: &str) -> Option<TokenId> {
        let mut id = None;
        let cut = self.cached.as_ref()?.cutter.cut(content, |piece| match piece {
            Piece::Token(token) if id.is_none() => {
                id = Some(token);
                Ok(())
            }
            _ => Err(()),
        });
        id.filter(|_| cut.is_ok())
    }

    /// The ids of pieces, as far as they are done when `time_is_up`.
    ///
    /// # Errors
    /// [`PromptError::UnlikePython`] where a text has an added token in it: only the engine makes plain text of it.
    pub(in crate::prompt) fn encode_pieces<'p>(
        &self,
        pieces: impl Iterator<Item = Piece<'p>>,
        time_is_up: TimeIsUp<'_>,
    ) -> Result<Encoded, PromptError> {
        let (mut ids, mut work) = (Vec::new(), Work::default());
        for piece in pieces {
            let text = match piece {
                Piece::Token(id) => {
                    ids.push(id);
                    continue;
                }
                Piece::Text("") => continue,
                Piece::Text(text) => text,
            };
            work.text_bytes += text.len();
            let cutter = &self.cached.as_ref().ok_or(PromptError::Tokenizer)?.cutter;
            let plain = cutter.cut(text, |piece| match piece {
                Piece::Token(_) => Err(()),
                Piece::Text(_) => Ok(()),
            });
            if plain.is_err() {
                return Err(PromptError::UnlikePython);
            }
            match self.encode_piece(text, &mut ids, &mut work, time_is_up) {
                Ok(()) => {}
                Err(Halt::TimeIsUp) => return Ok(Encoded { ids: ids.into(), is_whole: false, work }),
                Err(Halt::Failed(error)) => return Err(error),
            }
        }
        Ok(Encoded { ids: ids.into(), is_whole: true, work })
    }
}
