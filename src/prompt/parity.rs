//! Whether our tokens of a body are those of a replica: the comparison with what it answers to the same body.
//!
//! One token of difference hides every block behind it, and nothing fails. `/tokenize` takes the bodies of chat
//! completions and completions, and knows neither documents nor truncation; of gpt-oss it answers what its chat template
//! makes, which is not what is computed. The `/render` endpoints tell exactly, where the engine has them enabled (vLLM
//! 0.32).

use super::Model;
use crate::{
    request::{Endpoint, body::BodyError},
    units::TokenId,
};
use serde::Deserialize;

/// Why we have no tokens to compare with.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ParityError {
    /// The body of the probe has no tokens here.
    #[error("the body is not understood: {0}")]
    Body(#[from] BodyError),
    /// The model makes no tokens of it.
    #[error("the prompt has no certain tokens: {0}")]
    Prompt(#[from] super::PromptError),
}

/// Two token lists compared. It holds no token, so that no prompt can leak.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Parity {
    /// How many tokens we make.
    pub ours: usize,
    /// How many the replica makes.
    pub theirs: usize,
    /// The first place where they differ; `None`: they are equal.
    pub differ_at: Option<usize>,
}

/// What `/tokenize` or a `/render` endpoint answers.
#[derive(Deserialize)]
#[serde(untagged)]
enum Answer {
    Tokens { tokens: Vec<u32> },
    Rendered { token_ids: Vec<u32> },
    Several(Vec<Self>),
}

impl Answer {
    fn tokens(self) -> Option<Vec<u32>> {
        match self {
            Self::Tokens { tokens: ids } | Self::Rendered { token_ids: ids } => Some(ids),
            Self::Several(mut all) if all.len() == 1 => all.pop()?.tokens(),
            Self::Several(_) => None,
        }
    }
}

/// The model's own tokens of `body`.
///
/// # Errors
/// [`ParityError`] where there are none that are certain.
pub fn ours(model: &Model, endpoint: Endpoint, body: &[u8]) -> Result<Vec<TokenId>, ParityError> {
    Ok(model.tokenize(&model.read(endpoint, body)?.prompt)?)
}

/// Compares our tokens with a replica's answer; `None` if there are none in it.
#[must_use]
pub fn compare(ours: &[TokenId], answer: &[u8]) -> Option<Parity> {
    let theirs = serde_json::from_slice::<Answer>(answer).ok()?.tokens()?;
    let common = ours.iter().zip(&theirs).take_while(|(ours, theirs)| **ours == TokenId(**theirs)).count();
    let is_equal = common == ours.len() && common == theirs.len();
    Some(Parity { ours: ours.len(), theirs: theirs.len(), differ_at: (!is_equal).then_some(common) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_first_difference_is_told() {
        let ids = [7, 8, 9].map(TokenId);
        let at = |answer: serde_json::Value| {
            compare(&ids, answer.to_string().as_bytes()).map(|parity| parity.differ_at)
        };
        assert_eq!(at(json!({ "count": 3, "tokens": [7, 8, 9] })), Some(None));
        assert_eq!(at(json!({ "token_ids": [7, 8, 9], "cache_salt": null })), Some(None));
        assert_eq!(at(json!([{ "token_ids": [7, 8, 9] }])), Some(None));
        assert_eq!(at(json!({ "tokens": [7, 9, 9] })), Some(Some(1)));
        assert_eq!(at(json!({ "tokens": [7, 8] })), Some(Some(2)));
        assert_eq!(at(json!({ "tokens": [7, 8, 9, 10] })), Some(Some(3)));
        assert_eq!(at(json!({ "error": {} })), None);
        assert_eq!(at(json!([{ "token_ids": [7] }, { "token_ids": [8] }])), None);
    }

    #[test]
    fn our_tokens_are_those_of_the_model() {
        let model = Model::embedded().expect("the embedded model");
        let of = |body: &str| ours(&model, Endpoint::ChatCompletions, body.as_bytes());
        assert!(of(r#"{"messages": [{"role": "user", "content": "Hi"}]}"#).expect("tokens").len() > 3);
        assert_eq!(of("{}"), Err(ParityError::Body(BodyError::EmptyPrompt)));
    }
}
