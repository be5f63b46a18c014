//! Whether our tokens of a body are those of a replica: the comparison with its `/tokenize`.
//!
//! One token of difference hides every block behind it, and nothing fails. `/tokenize` takes the bodies of chat
//! completions and completions, and knows neither documents nor truncation (vLLM 0.32).

use super::Model;
use crate::{
    request::{Endpoint, body::BodyError},
    units::TokenId,
};
use serde::Deserialize;

/// Where a replica answers with its tokens.
pub const PATH: &str = "/tokenize";

/// Why there is no comparison.
#[derive(Debug, thiserror::Error)]
pub enum ParityError {
    /// The body of the probe has no tokens here.
    #[error("the body is not understood: {0}")]
    Body(#[from] BodyError),
    /// The model makes no tokens of it.
    #[error("the prompt has no certain tokens: {0}")]
    Prompt(#[from] super::PromptError),
    /// The replica's answer has no list of tokens.
    #[error("the answer of {PATH} has no tokens")]
    Answer,
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

#[derive(Deserialize)]
struct Answer {
    tokens: Vec<u32>,
}

/// Compares the model's tokens of `body` with a replica's answer to it.
///
/// # Errors
/// [`ParityError`] where one of the lists is missing.
pub fn compare(model: &Model, endpoint: Endpoint, body: &[u8], answer: &[u8]) -> Result<Parity, ParityError> {
    let ours = model.tokenize(&model.read(endpoint, body)?.prompt)?;
    let Answer { tokens: theirs } = serde_json::from_slice(answer).map_err(|_| ParityError::Answer)?;
    let common = ours.iter().zip(&theirs).take_while(|(ours, theirs)| **ours == TokenId(**theirs)).count();
    let is_equal = common == ours.len() && common == theirs.len();
    Ok(Parity { ours: ours.len(), theirs: theirs.len(), differ_at: (!is_equal).then_some(common) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::body;

    const BODY: &[u8] = br#"{"messages": [{"role": "user", "content": "Hi"}]}"#;

    fn parity(answer: &str) -> Result<Parity, ParityError> {
        let model = Model::embedded().expect("the embedded model");
        compare(&model, Endpoint::ChatCompletions, BODY, answer.as_bytes())
    }

    #[test]
    fn the_first_difference_is_told() {
        let model = Model::embedded().expect("the embedded model");
        let ask = body::parse(Endpoint::ChatCompletions, BODY).expect("a body");
        let ids: Vec<u32> = model.tokenize(&ask.prompt).expect("tokens").iter().map(|id| id.0).collect();
        let answer = |ids: &[u32]| serde_json::json!({ "count": ids.len(), "tokens": ids }).to_string();
        assert_eq!(parity(&answer(&ids)).expect("a comparison").differ_at, None);
        let mut other = ids.clone();
        other[2] += 1;
        assert_eq!(parity(&answer(&other)).expect("a comparison").differ_at, Some(2));
        assert_eq!(parity(&answer(&ids[..3])).expect("a comparison").differ_at, Some(3));
        assert!(matches!(parity(r#"{"error": {}}"#), Err(ParityError::Answer)));
    }
}
