//! Text → token ids.

use super::error::PromptError;
use crate::units::TokenId;
use std::fmt;

/// A model's tokenizer.
pub trait Tokenize: Send + Sync + fmt::Debug {
    /// The ids of `text`. Special tokens that stand in the text are recognised, as in vLLM; `add_special_tokens` adds
    /// those that the tokenizer itself puts around a text.
    ///
    /// # Errors
    /// [`PromptError::Tokenizer`] where the tokenizer fails.
    fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<TokenId>, PromptError>;
}

/// Hugging Face `tokenizers`, which vLLM uses: the reference for all others.
pub(super) struct HuggingFace(tokenizers::Tokenizer);

impl HuggingFace {
    /// Loads a `tokenizer.json`. Its own truncation and padding do not count, as the engine sets them by request.
    pub(super) fn from_json(json: &[u8]) -> Result<Self, String> {
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(json).map_err(|error| error.to_string())?;
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|error| error.to_string())?;
        Ok(Self(tokenizer))
    }
}

impl Tokenize for HuggingFace {
    fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<TokenId>, PromptError> {
        let encoding = self.0.encode_fast(text, add_special_tokens).map_err(|_| PromptError::Tokenizer)?;
        Ok(encoding.get_ids().iter().copied().map(TokenId).collect())
    }
}

impl fmt::Debug for HuggingFace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HuggingFace").field("vocabulary", &self.0.get_vocab_size(true)).finish()
    }
}
