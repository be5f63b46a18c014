//! A request body → what the engine is to compute, and how the answer is to be written.

use super::cache::Prompt;
use super::events::Lora;
use super::writer::{Piece, Writer};
use crate::prompt::{Model, PromptError};
use crate::request::body::{Ask, BodyError, Endpoint, parse};
use crate::units::TokenId;
use hyper::StatusCode;
use serde_json::{Map, Value};
use std::sync::Arc;

/// Completions generate this many tokens where the request says nothing (vLLM, and OpenAI before it).
const COMPLETION_TOKENS: usize = 16;
/// vLLM takes more, but nobody means it.
const MAX_CHOICES: usize = 128;

/// What is served under which names.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) model: Model,
    pub(super) writer: Writer,
    pub(super) name: String,
    /// The adapters, in the order of their numbers.
    pub(super) adapters: Vec<Lora>,
    /// The longest prompt and answer together, in tokens.
    pub(super) max_model_len: usize,
    /// The length of an answer that nothing limits, in tokens.
    pub(super) answer_tokens: usize,
}

/// One HTTP request's work and the form of its answer.
#[derive(Debug)]
pub(super) struct Generation {
    pub(super) endpoint: Endpoint,
    /// The name by which the model was asked for.
    pub(super) model: String,
    pub(super) prompts: Vec<Prompt>,
    /// Of each prompt in turn, its choices.
    pub(super) choices: Vec<Choice>,
    pub(super) is_streamed: bool,
    pub(super) include_usage: bool,
    pub(super) return_token_ids: bool,
}

/// One answer.
#[derive(Debug)]
pub(super) struct Choice {
    /// Its prompt's place.
    pub(super) prompt: usize,
    pub(super) pieces: Vec<Piece>,
    /// `length` where the limit ended it, `stop` where the model did.
    pub(super) finish_reason: &'static str,
}

impl Choice {
    pub(super) fn tokens(&self) -> Vec<TokenId> {
        self.pieces.iter().map(|(token, _)| *token).collect()
    }
}

/// Why a request gets no answer; written as vLLM's error object.
#[derive(Debug, thiserror::Error)]
pub(super) enum RequestError {
    #[error("The model `{0}` does not exist.")]
    UnknownModel(String),
    #[error(transparent)]
    Body(#[from] BodyError),
    #[error(transparent)]
    Prompt(#[from] PromptError),
    #[error("the maximum context length is {limit} tokens, the request needs {needed}")]
    TooLong { needed: usize, limit: usize },
    #[error("{0}")]
    Invalid(&'static str),
}

impl RequestError {
    pub(super) const fn status(&self) -> StatusCode {
        match self {
            Self::UnknownModel(_) => StatusCode::NOT_FOUND,
            _ => StatusCode::BAD_REQUEST,
        }
    }
}

impl Served {
    /// Reads the body of a generation request. `staged` are the prompt's tokens where they were sent ahead; they count
    /// as in Ray 2.60: for one prompt, of text alone.
    pub(super) fn generation(
        &self,
        endpoint: Endpoint,
        body: &[u8],
        mut staged: Option<Vec<TokenId>>,
    ) -> Result<Generation, RequestError> {
        let fields = object(body)?;
        let asks = asks(endpoint, body, &fields)?;
        let first = asks.first().ok_or(BodyError::EmptyPrompt)?;
        let name = first.model.clone().unwrap_or_else(|| self.name.clone());
        let lora = self.adapter(&name)?;
        let is_streamed = first.stream;
        let flag = |name: &str| fields.get(name) == Some(&Value::Bool(true));
        let mode = fields.get("vllm_xargs").and_then(|extra| extra.get("kv_cache_report_mode"));
        let choices_each = match fields.get("n") {
            None | Some(Value::Null) => 1,
            Some(n) => n.as_u64().and_then(|n| usize::try_from(n).ok()).unwrap_or(0),
        };
        if !(1..=MAX_CHOICES).contains(&choices_each) {
            return Err(RequestError::Invalid("n must be between 1 and 128"));
        }
        let is_one = asks.len() == 1;
        let mut prompts = Vec::new();
        let mut choices = Vec::new();
        for (at, mut ask) in asks.into_iter().enumerate() {
            ask.limits = ask.limits.within(Some(self.max_model_len));
            let tokens = match staged.take().filter(|staged| is_one && !staged.is_empty()) {
                Some(staged) => staged,
                None => self.model.tokens(&ask, &|| false)?.ids.into_vec(),
            };
            let (length, finish_reason) =
                self.answer_length(endpoint, &ask, tokens.len(), flag("ignore_eos"))?;
            for choice in 0..choices_each {
                let is_turn = endpoint == Endpoint::ChatCompletions;
                let pieces = self.writer.answer(&tokens, choice, length, is_turn);
                choices.push(Choice { prompt: at, pieces, finish_reason });
            }
            prompts.push(Prompt {
                tokens,
                lora: lora.clone(),
                cache_salt: ask.cache_salt.map(Arc::from),
                session_id: ask.session_id.map(Arc::from),
                reports_reuse: mode.and_then(Value::as_str) == Some("full"),
            });
        }
        let options = fields.get("stream_options");
        Ok(Generation {
            endpoint,
            model: name,
            prompts,
            choices,
            is_streamed,
            include_usage: options.and_then(|options| options.get("include_usage"))
                == Some(&Value::Bool(true)),
            return_token_ids: flag("return_token_ids"),
        })
    }

    /// Reads the body of `/tokenize`: a conversation or a text.
    pub(super) fn tokenize(&self, body: &[u8]) -> Result<Vec<TokenId>, RequestError> {
        let fields = object(body)?;
        let endpoint =
            if fields.contains_key("messages") { Endpoint::ChatCompletions } else { Endpoint::Completions };
        let ask = parse(endpoint, body)?;
        self.adapter(ask.model.as_deref().unwrap_or(&self.name))?;
        Ok(self.model.tokenize(&ask.prompt)?)
    }

    fn adapter(&self, name: &str) -> Result<Option<Lora>, RequestError> {
        if name == self.name {
            return Ok(None);
        }
        let adapter = self.adapters.iter().find(|adapter| &*adapter.name == name);
        adapter.cloned().map(Some).ok_or_else(|| RequestError::UnknownModel(name.to_owned()))
    }

    fn answer_length(
        &self,
        endpoint: Endpoint,
        ask: &Ask,
        prompt_tokens: usize,
        ignore_eos: bool,
    ) -> Result<(usize, &'static str), RequestError> {
        let limit = self.max_model_len;
        let room = limit.saturating_sub(prompt_tokens);
        let default = if endpoint == Endpoint::Completions { COMPLETION_TOKENS.min(room) } else { room };
        let wanted = ask.limits.max_tokens.map_or(default, |tokens| tokens as usize);
        if room == 0 || wanted > room {
            return Err(RequestError::TooLong { needed: prompt_tokens.saturating_add(wanted.max(1)), limit });
        }
        if wanted == 0 {
            return Err(RequestError::Invalid("max_tokens must be at least 1"));
        }
        let stops = !ignore_eos && self.answer_tokens < wanted;
        Ok(if stops { (self.answer_tokens, "stop") } else { (wanted, "length") })
    }
}

fn object(body: &[u8]) -> Result<Map<String, Value>, BodyError> {
    match serde_json::from_slice(body) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(_) => Err(BodyError::NotAnObject),
        Err(_) => Err(BodyError::Malformed),
    }
}

/// A list of prompts is as many requests, which differ in nothing else.
fn asks(endpoint: Endpoint, body: &[u8], fields: &Map<String, Value>) -> Result<Vec<Ask>, BodyError> {
    let several = fields.get("prompt").and_then(Value::as_array).filter(|list| {
        endpoint == Endpoint::Completions && list.len() > 1 && !list.iter().any(Value::is_number)
    });
    let Some(prompts) = several else { return Ok(vec![parse(endpoint, body)?]) };
    let mut one = fields.clone();
    prompts
        .iter()
        .map(|prompt| {
            one.insert("prompt".to_owned(), prompt.clone());
            let body = serde_json::to_vec(&one).map_err(|_| BodyError::Malformed)?;
            parse(endpoint, &body)
        })
        .collect()
}
