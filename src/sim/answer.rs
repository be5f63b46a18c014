//! The answer to a generation request: one JSON object, or a stream of server-sent events, as vLLM writes them.

use super::driver::Answers;
use super::job::{Cached, Output};
use super::request::{Choice, Generation};
use crate::request::body::Endpoint;
use crate::units::TokenId;
use bytes::Bytes;
use hyper::body::{Body, Frame};
use serde_json::{Value, json};
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

/// What all parts of one answer have in common.
#[derive(Debug)]
pub(super) struct Writing {
    generation: Generation,
    id: String,
    created: u64,
    /// What the caches served of the first prompt (vLLM reports no other).
    cached: Option<Cached>,
}

impl Writing {
    pub(super) fn new(generation: Generation, number: u64, created: u64) -> Self {
        let prefix = if generation.endpoint == Endpoint::ChatCompletions { "chatcmpl" } else { "cmpl" };
        Self { generation, id: format!("{prefix}-{number:016x}"), created, cached: None }
    }

    const fn is_chat(&self) -> bool {
        matches!(self.generation.endpoint, Endpoint::ChatCompletions)
    }

    fn ids(&self, tokens: &[TokenId]) -> Value {
        if self.generation.return_token_ids { ids(tokens) } else { Value::Null }
    }

    fn usage(&self) -> Value {
        let prompt: usize = self.generation.prompts.iter().map(|prompt| prompt.tokens.len()).sum();
        let completion: usize = self.generation.choices.iter().map(|choice| choice.pieces.len()).sum();
        let cached = self.cached.unwrap_or_default();
        let created = self.is_chat().then_some(cached.created_tokens);
        json!({
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {
                "cached_tokens": cached.tokens(),
                "created_cache_tokens": created,
                "multimodal_tokens": null,
            },
        })
    }

    fn see(&mut self, output: &Output) {
        self.cached.get_or_insert(output.cached);
    }

    /// The whole answer at once, when all of it is generated; `None` if the engine stopped before.
    pub(super) async fn collect(mut self, mut answers: Answers) -> Option<Value> {
        let mut generated = 0;
        while let Some((_, output)) = answers.next().await {
            self.see(&output);
            generated += 1;
        }
        let wanted: usize = self.generation.choices.iter().map(|choice| choice.pieces.len()).sum();
        if generated < wanted {
            return None;
        }
        let choices =
            self.generation.choices.iter().enumerate().map(|(at, choice)| self.whole_choice(at, choice));
        let mut answer = json!({
            "id": self.id,
            "object": if self.is_chat() { "chat.completion" } else { "text_completion" },
            "created": self.created,
            "model": self.generation.model,
            "choices": choices.collect::<Value>(),
            "service_tier": null,
            "system_fingerprint": null,
            "usage": self.usage(),
            "kv_transfer_params": null,
        });
        if self.is_chat() {
            answer["prompt_token_ids"] =
                self.generation.prompts.first().map_or(Value::Null, |p| self.ids(&p.tokens));
        }
        Some(answer)
    }

    fn whole_choice(&self, at: usize, choice: &Choice) -> Value {
        let text: String = choice.pieces.iter().map(|(_, text)| text.as_str()).collect();
        let token_ids = self.ids(&choice.tokens());
        if self.is_chat() {
            json!({
                "index": at,
                "message": { "role": "assistant", "content": text, "refusal": null, "tool_calls": [] },
                "logprobs": null,
                "finish_reason": choice.finish_reason,
                "stop_reason": null,
                "token_ids": token_ids,
            })
        } else {
            json!({
                "index": at,
                "text": text,
                "logprobs": null,
                "finish_reason": choice.finish_reason,
                "stop_reason": null,
                "token_ids": token_ids,
                "prompt_token_ids": self.ids(&self.generation.prompts[choice.prompt].tokens),
            })
        }
    }

    fn chunk(&self, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": if self.is_chat() { "chat.completion.chunk" } else { "text_completion" },
            "created": self.created,
            "model": self.generation.model,
            "choices": choices,
        })
    }

    /// The first chunk of a chat: it names the role, and comes no earlier than the first token.
    fn role_chunk(&self) -> Value {
        let role = |index: usize| {
            json!({
                "index": index,
                "delta": { "role": "assistant", "content": "" },
                "logprobs": null,
                "finish_reason": null,
            })
        };
        let mut chunk = self.chunk((0..self.generation.choices.len()).map(role).collect());
        let prompt = self.generation.prompts.first();
        chunk["prompt_token_ids"] = prompt.map_or(Value::Null, |prompt| self.ids(&prompt.tokens));
        chunk
    }

    fn token_chunk(&self, at: usize, place: usize, is_last: bool) -> Option<Value> {
        let choice = self.generation.choices.get(at)?;
        let (token, text) = choice.pieces.get(place)?;
        let finish_reason = is_last.then_some(choice.finish_reason);
        let mut one = if self.is_chat() {
            json!({ "index": at, "delta": { "content": text }, "logprobs": null, "finish_reason": finish_reason })
        } else {
            json!({ "index": at, "text": text, "logprobs": null, "finish_reason": finish_reason, "stop_reason": null })
        };
        one["token_ids"] = self.ids(&[*token]);
        if !self.is_chat() && place == 0 {
            one["prompt_token_ids"] = self.ids(&self.generation.prompts[choice.prompt].tokens);
        }
        Some(self.chunk(json!([one])))
    }

    fn usage_chunk(&self) -> Value {
        let mut chunk = self.chunk(json!([]));
        chunk["usage"] = self.usage();
        chunk
    }
}

pub(super) fn ids(tokens: &[TokenId]) -> Value {
    tokens.iter().map(|token| token.0).collect()
}

/// A streamed answer's body: `data: {…}` for each token, `data: [DONE]` at the end. Dropped by the server when the client
/// goes, which aborts what is still being generated.
#[derive(Debug)]
pub(super) struct AnswerStream {
    writing: Writing,
    answers: Answers,
    /// Tokens written of each choice.
    written: Vec<usize>,
    is_done: bool,
}

impl AnswerStream {
    pub(super) fn new(writing: Writing, answers: Answers) -> Self {
        let written = vec![0; writing.generation.choices.len()];
        Self { writing, answers, written, is_done: false }
    }

    fn write(&mut self, at: usize, output: &Output) -> String {
        let mut text = String::new();
        let is_first = self.writing.cached.is_none();
        self.writing.see(output);
        if is_first && self.writing.is_chat() {
            event(&mut text, &self.writing.role_chunk());
        }
        if let Some(written) = self.written.get_mut(at) {
            if let Some(chunk) = self.writing.token_chunk(at, *written, output.is_last) {
                event(&mut text, &chunk);
            }
            *written += 1;
        }
        text
    }

    fn end(&mut self) -> String {
        self.is_done = true;
        let mut text = String::new();
        if self.writing.generation.include_usage {
            event(&mut text, &self.writing.usage_chunk());
        }
        text.push_str("data: [DONE]\n\n");
        text
    }
}

fn event(text: &mut String, data: &Value) {
    text.push_str("data: ");
    text.push_str(&data.to_string());
    text.push_str("\n\n");
}

impl Body for AnswerStream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.is_done {
            return Poll::Ready(None);
        }
        let text = match ready!(self.answers.poll_next(cx)) {
            Some((at, output)) => self.write(at, &output),
            None => self.end(),
        };
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(text)))))
    }

    fn is_end_stream(&self) -> bool {
        self.is_done
    }
}
