//! A request body of the OpenAI API → the prompt that it asks for.
//!
//! What changes the prompt's tokens is taken as vLLM 0.32 takes it (its `ChatCompletionRequest` and
//! `CompletionRequest`); every other field is left alone. A body that the engine would refuse may be accepted here:
//! then there is nothing to route. The opposite, a prompt unlike the engine's, must not happen, so a body that is not
//! understood for certain is an error.

use super::conversation::{self, Conversation};
use super::harmony::Harmony;
use super::json::{self, Object};
use super::limits::Limits;
use super::list::{List, Written};
use super::seen::{Api, SeenMessages};
use super::text::text;
use super::tools::Tools;
use super::{anthropic, generate, responses, scan};
use crate::{hash::MediaItem, units::TokenId};
use serde_json::Value;
use std::sync::Arc;

/// The endpoints whose body holds a prompt that can be routed by.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Endpoint {
    /// `/v1/chat/completions`
    ChatCompletions,
    /// `/v1/chat/completions/batch`
    ChatBatch,
    /// `/v1/completions`
    Completions,
    /// `/v1/responses`
    Responses,
    /// `/v1/messages`
    Messages,
    /// `/inference/v1/generate`, vLLM's own: token ids, and what stands behind those of media.
    Generate,
}

/// Ends of paths under which an engine takes text, but keeps no cache of it that is worth a way to it.
const WITHOUT_CACHE: [&str; 12] = [
    "/embeddings",
    "/embed",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/tokenize",
    "/detokenize",
    "/count_tokens",
    "/render",
    "/transcriptions",
    "/translations",
];

impl Endpoint {
    /// Recognises the endpoint in a request's path, which may have a prefix (`/llama/v1/completions`) and a query.
    #[must_use]
    pub fn from_path(path: &str) -> Option<Self> {
        let path = without_query(path);
        let endpoints = [
            ("/v1/chat/completions", Self::ChatCompletions),
            ("/v1/chat/completions/batch", Self::ChatBatch),
            ("/v1/completions", Self::Completions),
            ("/v1/responses", Self::Responses),
            ("/v1/messages", Self::Messages),
            ("/inference/v1/generate", Self::Generate),
        ];
        endpoints.into_iter().find(|(end, _)| path.ends_with(end)).map(|(_, endpoint)| endpoint)
    }

    /// The field that grows with one conversation, and whose API its entries are of.
    const fn list(self) -> Option<(&'static str, Api)> {
        match self {
            Self::ChatCompletions => Some(("messages", Api::Chat)),
            Self::Messages => Some(("messages", Api::Anthropic)),
            Self::Responses => Some(("input", Api::Responses)),
            Self::ChatBatch | Self::Completions | Self::Generate => None,
        }
    }

    /// Whether the path is known as one without a prompt to route by, such as `/v1/embeddings`.
    #[must_use]
    pub fn is_without_cache(path: &str) -> bool {
        WITHOUT_CACHE.iter().any(|end| without_query(path).ends_with(end))
    }
}

/// How many conversations a batch may have, and how much beside them: 4 MiB of copies at the most.
const MOST_CONVERSATIONS: usize = 256;
const MOST_SHARED_BYTES: usize = 16 << 10;

fn without_query(path: &str) -> &str {
    path.split(['?', '#']).next().unwrap_or_default()
}

/// What one request asks for, as far as routing needs to know.
#[derive(Clone, PartialEq, Debug)]
pub struct Ask {
    /// The model or LoRA adapter; `None` leaves the choice to the engine.
    pub model: Option<String>,
    /// The prompt.
    pub prompt: PromptInput,
    /// The media in a prompt of token ids, in the order of their places.
    pub media: Vec<MediaItem>,
    /// Whether the prompt is all that the engine will see, and not the beginning of it.
    pub is_whole: bool,
    /// Whether nothing that was not seen can change the part of the prompt that was.
    pub identity_is_known: bool,
    /// Whether the prompt's tokens could stand for it: a single prompt of text, all of which goes into one answer. Media,
    /// `echo` and truncation need the prompt itself.
    pub takes_tokens: bool,
    /// How much of the prompt the engine keeps, and how long the answer may be.
    pub limits: Limits,
    /// Keeps the request's cached blocks apart from those of other salts.
    pub cache_salt: Option<String>,
    /// Whether the answer is to be streamed.
    pub stream: bool,
    /// The client's name for the conversation (vLLM's own field).
    pub session_id: Option<String>,
}

impl Ask {
    /// Whether the client brings its own chat template.
    #[must_use]
    pub const fn has_own_template(&self) -> bool {
        matches!(&self.prompt, PromptInput::Chat(conversation) if conversation.template.is_some())
    }
}

/// A prompt in one of the shapes in which clients give it.
#[derive(Clone, PartialEq, Debug)]
pub enum PromptInput {
    /// Messages, to be rendered by the model's chat template.
    Chat(Conversation),
    /// Messages for a model of the gpt-oss kind, in its own format.
    Harmony(Harmony),
    /// Text, to be tokenized as it is.
    Text {
        /// The prompt.
        text: String,
        /// Whether the tokenizer's own tokens (a beginning-of-text) are added. Default true.
        add_special_tokens: bool,
    },
    /// Token ids, taken as they are.
    Tokens(Vec<TokenId>),
    /// Several prompts, at least two: each is a request of its own in the engine.
    Several(Vec<Self>),
}

/// Why a body gives no prompt to route by. No variant holds text of the request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BodyError {
    /// Not JSON, or nested too deep.
    #[error("the body is not JSON")]
    Malformed,
    /// The body ends early, or was cut off before anything of the prompt was certain.
    #[error("the body was cut off too early")]
    Cut,
    /// JSON, but not an object.
    #[error("the body is not a JSON object")]
    NotAnObject,
    /// A field that the prompt depends on has a type that is not understood.
    #[error("the field {0} has an unexpected type")]
    Field(&'static str),
    /// There is no prompt, or an empty one.
    #[error("the prompt is missing or empty")]
    EmptyPrompt,
    /// Images, audio, video or embeddings, whose tokens depend on the engine's own processing.
    #[error("the request has media")]
    Media,
    /// The client brings its own chat template, which only a trusting engine accepts.
    #[error("the request brings its own chat template")]
    RequestTemplate,
    /// An integer too large to be known exactly.
    #[error("the request has a number that cannot be represented exactly")]
    Number,
    /// A feature whose prompt is not built here.
    #[error("the request uses {0}, which is not supported")]
    Unsupported(&'static str),
    /// The engine will refuse the request.
    #[error("the engine will refuse the request: {0}")]
    Refused(&'static str),
}

impl BodyError {
    /// The error's name in metrics.
    #[must_use]
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::Cut => "cut",
            Self::NotAnObject => "not_an_object",
            Self::Field(_) => "unexpected_type",
            Self::EmptyPrompt => "empty_prompt",
            Self::Media => "media",
            Self::RequestTemplate => "request_template",
            Self::Number => "inexact_number",
            Self::Unsupported(_) => "unsupported",
            Self::Refused(_) => "refused",
        }
    }
}

/// Reads a whole body. The nesting depth is limited to 128.
///
/// # Errors
/// See [`BodyError`]; all of them mean "route by load", and [`BodyError::Cut`] that [`super::partial`] may find a beginning.
pub fn parse(endpoint: Endpoint, body: &[u8]) -> Result<Ask, BodyError> {
    match serde_json::from_slice(body) {
        Ok(Value::Object(body)) => read(endpoint, body),
        Ok(_) => Err(BodyError::NotAnObject),
        Err(error) => Err(unreadable(&error)),
    }
}

/// The same; of conversations only those messages are read that were not seen lately.
///
/// # Errors
/// As [`parse`].
pub fn parse_seen(endpoint: Endpoint, body: &[u8], seen: &SeenMessages) -> Result<Ask, BodyError> {
    match endpoint.list().and_then(|(list, api)| apart(body, list, api, seen).ok()) {
        Some((rest, apart)) => read_with(endpoint, rest, apart),
        None => parse(endpoint, body),
    }
}

/// Fields of a conversation that were taken apart from the others.
#[derive(Debug, Default)]
pub(super) struct Apart<'j> {
    /// The list of messages, as it is written.
    pub(super) list: Option<Written<'j>>,
    pub(super) tools: Option<Arc<Tools>>,
}

/// The fields of a body, of which tools and that of the name `list` are taken apart if they are lists.
///
/// # Errors
/// The body is no object, or not JSON, or has one of them twice, or tools that are none.
fn apart<'j>(
    body: &'j [u8],
    list: &str,
    api: Api,
    seen: &'j SeenMessages,
) -> Result<(Object, Apart<'j>), BodyError> {
    let (mut rest, mut apart) = (json::object(), Apart::default());
    scan::fields(body, |name, scan| {
        let name = text(name)?;
        // Of a repeated field the last one counts.
        if name == list && (apart.list.is_some() || json::get(&rest, list).is_some()) {
            return Err(BodyError::Field("messages"));
        }
        if name == "tools" && (apart.tools.is_some() || json::get(&rest, "tools").is_some()) {
            return Err(BodyError::Field("tools"));
        }
        if name == list && scan.next() == Some(b'[') {
            apart.list = Some(Written::read(api, seen, scan)?);
        } else if name == "tools" && scan.next() == Some(b'[') {
            apart.tools = seen.tools(api, scan, |tools| match api {
                Api::Chat => conversation::tools(tools),
                Api::Anthropic => anthropic::tools(tools),
                Api::Responses | Api::ResponsesTurn => responses::tools(tools),
            })?;
        } else {
            let value = serde_json::from_slice(scan.value()?).map_err(|_| BodyError::Malformed)?;
            rest.insert(name.into_owned(), value);
        }
        Ok(())
    })?;
    Ok((rest, apart))
}

/// JSON that ends early may be a body that was cut, though nothing said so.
pub(super) fn unreadable(error: &serde_json::Error) -> BodyError {
    if error.is_eof() { BodyError::Cut } else { BodyError::Malformed }
}

pub(super) fn read(endpoint: Endpoint, body: Object) -> Result<Ask, BodyError> {
    read_with(endpoint, body, Apart::default())
}

/// The same, where some fields may be `apart` from the others.
fn read_with(endpoint: Endpoint, body: Object, apart: Apart<'_>) -> Result<Ask, BodyError> {
    read_prompt(endpoint, body, |body| match endpoint {
        Endpoint::ChatCompletions => chat_prompt(body, |body| conversation::parse(body, apart)),
        Endpoint::ChatBatch => batch_prompt(body),
        Endpoint::Completions => completion_prompt(body),
        Endpoint::Responses => converted_prompt(body, |body| responses::parse(body, apart)),
        Endpoint::Messages => converted_prompt(body, |body| anthropic::parse(body, apart)),
        Endpoint::Generate => generate::tokens(body).map(PromptInput::Tokens),
    })
}

/// What all endpoints have in common, and the prompt as `prompt` reads it.
pub(super) fn read_prompt(
    endpoint: Endpoint,
    mut body: Object,
    prompt: impl FnOnce(&mut Object) -> Result<PromptInput, BodyError>,
) -> Result<Ask, BodyError> {
    let cache_salt = json::take_text(&mut body, "cache_salt")?;
    if cache_salt.as_deref() == Some("") {
        return Err(BodyError::Refused("an empty cache_salt"));
    }
    let echo = json::get(&body, "echo") == Some(&Value::Bool(true));
    let prompt = prompt(&mut body)?;
    let media = if endpoint == Endpoint::Generate { generate::media(&mut body)? } else { Vec::new() };
    let is_whole = !matches!(&prompt, PromptInput::Chat(conversation) if conversation.cut.is_some());
    let mut limits = Limits::take(&mut body, endpoint, echo)?;
    if matches!(prompt, PromptInput::Tokens(_)) && endpoint != Endpoint::Completions {
        limits = limits.of_ids_as_they_are();
    }
    let is_text = matches!(prompt, PromptInput::Chat(_) | PromptInput::Text { .. });
    let is_openai = matches!(endpoint, Endpoint::ChatCompletions | Endpoint::Completions);
    Ok(Ask {
        is_whole,
        identity_is_known: is_whole,
        takes_tokens: is_whole && is_text && is_openai && !echo && limits.truncation.is_none(),
        model: json::take_text(&mut body, "model")?,
        prompt,
        media,
        limits,
        cache_salt,
        stream: json::get(&body, "stream") == Some(&Value::Bool(true)),
        session_id: json::take_text(&mut body, "session_id")?,
    })
}

fn chat_prompt(
    body: &mut Object,
    chat: impl FnOnce(&mut Object) -> Result<Conversation, BodyError>,
) -> Result<PromptInput, BodyError> {
    // Whether the engine takes it is its own affair, and none it is if it is empty.
    let template = json::take_text(body, "chat_template")?.filter(|template| !template.is_empty());
    converted_prompt(body, |body| Ok(Conversation { template: template.map(Into::into), ..chat(body)? }))
}

fn converted_prompt(
    body: &mut Object,
    convert: impl FnOnce(&mut Object) -> Result<Conversation, BodyError>,
) -> Result<PromptInput, BodyError> {
    let forwarded = forwarded_tokens(body)?;
    let conversation = convert(body)?;
    match forwarded {
        // Ids that were forwarded do not count where there are media, which they would leave out.
        Some(ids) if conversation.cut.is_none() => ids.tokens().map(PromptInput::Tokens),
        _ => Ok(PromptInput::Chat(conversation)),
    }
}

/// Conversations that share all other fields; they have no tools.
fn batch_prompt(body: &mut Object) -> Result<PromptInput, BodyError> {
    if json::take(body, "chat_template").is_some() {
        return Err(BodyError::RequestTemplate);
    }
    if json::take(body, "tools").is_some() {
        return Err(BodyError::Refused("tools in a batch"));
    }
    if json::get(body, "kv_transfer_params")
        .is_some_and(|parameters| !parameters["prompt_token_ids"].is_null())
    {
        return Err(BodyError::Refused("one forwarded prompt for a batch"));
    }
    let Some(Value::Array(conversations)) = json::take(body, "messages") else {
        return Err(BodyError::Field("messages"));
    };
    // Each conversation gets its own copy of the other fields.
    let shared_bytes = serde_json::to_vec(body).map_or(usize::MAX, |bytes| bytes.len());
    if conversations.len() > MOST_CONVERSATIONS || shared_bytes > MOST_SHARED_BYTES {
        return Err(BodyError::Unsupported("so large a batch"));
    }
    several(conversations, |messages| {
        let Value::Array(messages) = messages else { return Err(BodyError::Field("messages")) };
        if messages.iter().any(conversation::loses_parts_in_a_batch) {
            return Err(BodyError::Unsupported("parts of such types in a batch"));
        }
        let mut one = body.clone();
        conversation::of_list(&mut one, List::Read(messages), None).map(PromptInput::Chat)
    })
}

/// One prompt as it is, more of them as [`PromptInput::Several`].
fn several<T>(
    items: Vec<T>,
    prompt: impl FnMut(T) -> Result<PromptInput, BodyError>,
) -> Result<PromptInput, BodyError> {
    let mut prompts: Vec<_> = items.into_iter().map(prompt).collect::<Result<_, _>>()?;
    match prompts.pop() {
        None => Err(BodyError::EmptyPrompt),
        Some(only) if prompts.is_empty() => Ok(only),
        Some(last) => {
            prompts.push(last);
            Ok(PromptInput::Several(prompts))
        }
    }
}

/// The tokens that the prefill stage of disaggregated serving hands over; they replace the messages.
pub(super) struct Forwarded(Value);

impl Forwarded {
    pub(super) fn tokens(self) -> Result<Vec<TokenId>, BodyError> {
        let tokens = token_ids(self.0, "kv_transfer_params")?;
        if tokens.is_empty() {
            Err(BodyError::Refused("a forwarded prompt of no tokens"))
        } else {
            Ok(tokens)
        }
    }
}

pub(super) fn forwarded_tokens(body: &mut Object) -> Result<Option<Forwarded>, BodyError> {
    let Some(Value::Object(mut parameters)) = json::take(body, "kv_transfer_params") else { return Ok(None) };
    let Some(ids) = json::take(&mut parameters, "prompt_token_ids") else { return Ok(None) };
    let is_to_be_said_again = json::take_flag(body, "echo", false)?;
    Ok(Some(Forwarded(ids)).filter(|_| !is_to_be_said_again))
}

fn completion_prompt(body: &mut Object) -> Result<PromptInput, BodyError> {
    for field in ["prompt_embeds", "suffix"] {
        if json::take(body, field).is_some() {
            return Err(BodyError::Unsupported(field));
        }
    }
    let add_special_tokens = json::take_flag(body, "add_special_tokens", true)?;
    let one = |prompt| match prompt {
        Value::String(text) if text.is_empty() => Err(BodyError::EmptyPrompt),
        Value::String(text) => Ok(PromptInput::Text { text, add_special_tokens }),
        ids => match token_ids(ids, "prompt")? {
            tokens if tokens.is_empty() => Err(BodyError::EmptyPrompt),
            tokens => Ok(PromptInput::Tokens(tokens)),
        },
    };
    match json::take(body, "prompt").ok_or(BodyError::EmptyPrompt)? {
        Value::Array(items) if !matches!(items.first(), Some(Value::Number(_))) => several(items, one),
        prompt => one(prompt),
    }
}

pub(super) fn token_ids(value: Value, field: &'static str) -> Result<Vec<TokenId>, BodyError> {
    let Value::Array(ids) = value else { return Err(BodyError::Field(field)) };
    let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok()).map(TokenId);
    ids.iter().map(|value| id(value).ok_or(BodyError::Field(field))).collect()
}

#[cfg(test)]
mod tests;
