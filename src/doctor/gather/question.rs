//! A conversation that no cache holds, of a given length.

use crate::{
    prompt::{Model, parity},
    request::Endpoint,
    units::TokenId,
};
use bytes::Bytes;
use serde_json::{Value, json};
use uuid::Uuid;

/// Tokens that are generated: so many steps that blocks which are copied to a lower tier after the prompt are told of.
const ANSWER_TOKENS: u32 = 4;

/// The longest prompt that is sent, in tokens: enough for two blocks of the largest size that is known.
const MAX_TOKENS: usize = 4096;

/// A request and the tokens of its prompt.
#[derive(Clone, Debug)]
pub(super) struct Question {
    pub(super) path: &'static str,
    pub(super) body: Bytes,
    pub(super) tokens: Vec<TokenId>,
}

impl Question {
    /// A prompt of three blocks and a little more, less where the engine's context is short; `None` where the model's
    /// prompts cannot be made here.
    pub(super) fn new(model: &Model, block_tokens: Option<u32>, context_tokens: Option<u32>) -> Option<Self> {
        let wanted = block_tokens.unwrap_or(16) as usize * 3 + 1;
        let room = context_tokens.map_or(MAX_TOKENS, |tokens| (tokens as usize).saturating_sub(64) / 2);
        let wanted = wanted.min(room).min(MAX_TOKENS);
        let id = Uuid::new_v4();
        let mut lines = 4;
        loop {
            let text: String = (0..lines).map(|line| format!("{id} is number {line}.\n")).collect();
            let question = Self::chat(model, &text).or_else(|| Self::completion(model, &text))?;
            if question.tokens.len() >= wanted || lines > MAX_TOKENS {
                return Some(question);
            }
            lines *= 2;
        }
    }

    fn chat(model: &Model, text: &str) -> Option<Self> {
        let body = json!({ "messages": [{ "role": "user", "content": text }] });
        Self::of(model, Endpoint::ChatCompletions, "/v1/chat/completions", body)
    }

    fn completion(model: &Model, text: &str) -> Option<Self> {
        Self::of(model, Endpoint::Completions, "/v1/completions", json!({ "prompt": text }))
    }

    fn of(model: &Model, endpoint: Endpoint, path: &'static str, mut body: Value) -> Option<Self> {
        body["max_tokens"] = ANSWER_TOKENS.into();
        body["ignore_eos"] = true.into();
        let body = Bytes::from(body.to_string());
        let tokens = parity::ours(model, endpoint, &body).ok()?;
        Some(Self { path, body, tokens })
    }

    /// The same, answered as a stream.
    pub(super) fn streamed(&self) -> Bytes {
        let Ok(mut body) = serde_json::from_slice::<Value>(&self.body) else { return self.body.clone() };
        body["stream"] = true.into();
        Bytes::from(body.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_fills_three_blocks_and_is_never_the_same_twice() {
        let model = Model::embedded().expect("the embedded model");
        let question = |block| Question::new(&model, Some(block), Some(100_000)).expect("a question");
        for block in [16, 128, 528] {
            assert!(question(block).tokens.len() > 3 * block as usize, "{block}");
        }
        assert_ne!(question(16).tokens, question(16).tokens);
        assert_eq!(question(16).path, "/v1/chat/completions");
        assert!(String::from_utf8_lossy(&question(16).streamed()).contains("\"stream\":true"));
    }
}
