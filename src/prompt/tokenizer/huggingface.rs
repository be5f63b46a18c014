//! Hugging Face `tokenizers`, which vLLM uses: the reference for all other tokenizers.

use super::Tokenize;
use crate::prompt::error::PromptError;
use crate::units::TokenId;
use std::fmt;

/// A tokenizer of the reference library.
pub(super) struct HuggingFace(tokenizers::Tokenizer);

impl HuggingFace {
    /// Loads a `tokenizer.json`. Its own truncation and padding do not count, as the engine sets them by request.
    pub(super) fn from_json(json: &[u8]) -> Result<Self, String> {
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(json).map_err(|error| error.to_string())?;
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|error| error.to_string())?;
        Ok(Self(tokenizer))
    }

    /// The largest id of all tokens, added ones among them.
    pub(super) fn largest_id(&self) -> Option<TokenId> {
        self.0.get_vocab(true).into_values().max().map(TokenId)
    }

    /// The ids of `text` together with those that `tokenizer.json` puts around it.
    pub(super) fn encode_around(&self, text: &str) -> Result<Vec<TokenId>, PromptError> {
        let encoding = self.0.encode_fast(text, true).map_err(|_| PromptError::Tokenizer)?;
        Ok(encoding.get_ids().iter().copied().map(TokenId).collect())
    }
}

impl Tokenize for HuggingFace {
    fn encode(&self, text: &str, ids: &mut Vec<TokenId>) -> Result<(), PromptError> {
        let encoding = self.0.encode_fast(text, false).map_err(|_| PromptError::Tokenizer)?;
        ids.extend(encoding.get_ids().iter().copied().map(TokenId));
        Ok(())
    }
}

impl fmt::Debug for HuggingFace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HuggingFace").field("vocabulary", &self.0.get_vocab_size(true)).finish()
    }
}
