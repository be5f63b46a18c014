//! The messages, tools and template arguments of a chat request.
//!
//! This is the part of vLLM's preparation that depends on the request alone; what depends on the chat template is done
//! when it is rendered.

use super::body::{Apart, BodyError};
use super::json::{self, Object};
use super::list::{List, Messages};
use super::tools::Tools;
use serde_json::{Value, json};
use std::sync::Arc;

/// Everything that a chat template is given.
#[derive(Clone, PartialEq, Debug)]
pub struct Conversation {
    /// The messages, at least one. Those that were seen before are shared.
    pub messages: Vec<Arc<Message>>,
    /// The tools; `None` where there are none. Those that were seen before are shared.
    pub tools: Option<Arc<Tools>>,
    /// `tool_choice` is `none`: some engines are told to leave the tools out then.
    pub tools_not_to_be_used: bool,
    /// The engine is to find calls of the tools in the answer: it refuses where it was not told how.
    pub calls_are_to_be_found: bool,
    /// The client's own chat template, in place of the model's.
    pub template: Option<Arc<str>>,
    /// The client's arguments for the template, which win over `tools` and `documents`.
    pub template_arguments: Object,
    /// Documents to answer from.
    pub documents: Option<Value>,
    /// How much the model is to think; one of vLLM's words.
    pub reasoning_effort: Option<String>,
    /// Whether the template opens an assistant message at the end. Default true.
    pub add_generation_prompt: bool,
    /// Whether the last message is left open, for the model to continue. Default false.
    pub continue_final_message: bool,
    /// Whether the tokenizer's own tokens are added to what the template wrote. Default false.
    pub add_special_tokens: bool,
    /// Whether system messages are merged into one at the front, without anything between them, where the template
    /// refuses them elsewhere. So it is with Anthropic's Messages.
    pub system_may_be_first: bool,
    /// Where the known part ends; `None`: all of the conversation is known.
    pub cut: Option<Cut>,
    /// Anthropic's `thinking: disabled`, for which the engine finds out the model's word.
    pub thinking_disabled: bool,
}

/// How the known part of a conversation ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cut {
    /// The last text of the last message may go on.
    InText,
    /// More messages may follow.
    AfterMessage,
}

/// One message.
#[derive(Clone, PartialEq, Debug)]
pub struct Message {
    /// `system`, `user`, `assistant`, `tool`, `developer`, or any word that the template knows.
    pub role: String,
    /// What is said, in parts. Empty where the client sent none.
    pub content: Vec<Part>,
    /// The participant's name.
    pub name: Option<String>,
    /// An assistant's tool calls, with the arguments as an object; `None` where there are none.
    pub tool_calls: Option<Vec<Value>>,
    /// The call that a tool's message answers.
    pub tool_call_id: Option<Value>,
    /// What an assistant thought.
    pub reasoning: Option<Value>,
    /// A marker of some models (DeepSeek V4).
    pub task: Option<String>,
    /// The tools of a developer's message, `null` where it has none; `None` for every other role.
    pub tools: Option<Value>,
}

/// A part of a message.
#[derive(Clone, PartialEq, Debug)]
pub enum Part {
    /// Text of any kind.
    Text {
        /// The text.
        text: Arc<str>,
        /// Fields that the API does not know, which templates may see.
        extra: Object,
    },
    /// The name of a tool that is loaded later.
    ToolReference(String),
}

impl Message {
    /// A message of nothing but text.
    #[must_use]
    pub fn of_text(role: &str, text: &str) -> Self {
        Self {
            role: role.to_owned(),
            content: vec![Part::text(text)],
            name: None,
            tool_calls: None,
            tool_call_id: None,
            reasoning: None,
            task: None,
            tools: None,
        }
    }

    /// The memory that the message takes.
    pub(super) fn memory_bytes(&self) -> usize {
        let text = |text: &str| json::ALLOCATION_BYTES + text.len();
        let parts = self.content.iter().map(|part| match part {
            Part::Text { text: said, extra } => text(said) + json::object_bytes(extra),
            Part::ToolReference(name) => text(name),
        });
        let values = [&self.tool_call_id, &self.reasoning, &self.tools].into_iter().flatten();
        let values = values.chain(self.tool_calls.iter().flatten()).map(json::memory_bytes);
        let texts = [&self.name, &self.task].into_iter().flatten().map(|word| text(word));
        size_of::<Self>()
            + text(&self.role)
            + self.content.capacity() * size_of::<Part>()
            + parts.chain(values).chain(texts).sum::<usize>()
    }
}

impl Part {
    /// Text and nothing else.
    #[must_use]
    pub fn text(text: impl Into<Arc<str>>) -> Self {
        Self::Text { text: text.into(), extra: Object::new() }
    }
}

/// Arguments that belong to `apply_chat_template` itself: without effect, as vLLM tokenizes afterwards.
const INERT_ARGUMENTS: [&str; 6] =
    ["padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"];

/// Arguments that make the engine refuse the request.
const REFUSED_ARGUMENTS: [&str; 4] = ["self", "conversation", "messages", "return_assistant_tokens_mask"];

/// Fields of content parts that the API knows; all others are passed on to the template.
const PART_FIELDS: [&str; 22] = [
    "type",
    "text",
    "refusal",
    "thinking",
    "closed",
    "name",
    "uuid",
    "data",
    "file",
    "image_url",
    "image_pil",
    "image_embeds",
    "input_audio",
    "audio_url",
    "audio_embeds",
    "video_url",
    "video_embeds",
    "prompt_embeds",
    "detail",
    "tool_reference",
    "input_image",
    "prompt_cache_breakpoint",
];

pub(super) fn parse(body: &mut Object, apart: Apart<'_>) -> Result<Conversation, BodyError> {
    let list = List::take(body, "messages", apart.list)?.ok_or(BodyError::EmptyPrompt)?;
    let tools = Tools::take(body, apart.tools, tools)?;
    of_list(body, list, tools)
}

/// The conversation of these messages and of what else is in the body.
pub(super) fn of_list(
    body: &mut Object,
    list: List<'_>,
    tools: Option<Arc<Tools>>,
) -> Result<Conversation, BodyError> {
    let messages = list.messages(|value, messages| {
        messages.push(Arc::new(message(value)?));
        Ok(())
    })?;
    assemble(body, messages, tools)
}

/// The conversation of these messages and tools, with the other fields of chat completions in `body`.
pub(super) fn assemble(
    body: &mut Object,
    (messages, cut): Messages,
    tools: Option<Arc<Tools>>,
) -> Result<Conversation, BodyError> {
    if messages.is_empty() {
        return Err(BodyError::EmptyPrompt);
    }
    let add_generation_prompt = json::take_flag(body, "add_generation_prompt", true)?;
    let continue_final_message = json::take_flag(body, "continue_final_message", false)?;
    if continue_final_message && add_generation_prompt {
        return Err(BodyError::Refused("continue_final_message together with add_generation_prompt"));
    }
    let documents = json::take(body, "documents");
    documents.iter().try_for_each(json::check_exact)?;
    let choice = json::get(body, "tool_choice");
    Ok(Conversation {
        messages,
        template: None,
        tools_not_to_be_used: choice.is_some_and(|choice| choice == "none"),
        // An absent choice is `auto`, and `null` is none.
        calls_are_to_be_found: tools.is_some()
            && choice.is_none_or(|choice| !choice.is_null() && choice != "none"),
        tools,
        template_arguments: template_arguments(body)?,
        documents,
        reasoning_effort: json::take_text(body, "reasoning_effort")?,
        add_generation_prompt,
        continue_final_message,
        add_special_tokens: json::take_flag(body, "add_special_tokens", false)?,
        system_may_be_first: false,
        cut,
        thinking_disabled: false,
    })
}

/// Each message as the API has it.
pub(super) fn messages(values: Vec<Value>) -> Result<Vec<Arc<Message>>, BodyError> {
    values.into_iter().map(|value| message(value).map(Arc::new)).collect()
}

fn message(value: Value) -> Result<Message, BodyError> {
    let Value::Object(mut fields) = value else { return Err(BodyError::Field("messages")) };
    let role = json::take_text(&mut fields, "role")?.ok_or(BodyError::Field("role"))?;
    let is_system = role == "system";
    let content = match json::take(&mut fields, "content") {
        None => Vec::new(),
        Some(Value::String(text)) => {
            let text = if is_system { without_billing_line(text) } else { Some(text) };
            text.map(Part::text).into_iter().collect()
        }
        Some(Value::Array(parts)) => {
            let parts: Result<Vec<_>, _> = parts.into_iter().map(|value| part(value, is_system)).collect();
            parts?.into_iter().flatten().collect()
        }
        Some(_) => return Err(BodyError::Field("content")),
    };
    let assistant = role == "assistant";
    let reasoning =
        json::take(&mut fields, "reasoning").or_else(|| json::take(&mut fields, "reasoning_content"));
    Ok(Message {
        content,
        name: text_only(json::take(&mut fields, "name")),
        tool_calls: if assistant { tool_calls(&mut fields)? } else { None },
        tool_call_id: if role == "tool" { fields.get_mut("tool_call_id").map(Value::take) } else { None },
        reasoning: reasoning.filter(|_| assistant),
        task: text_only(json::take(&mut fields, "task")),
        tools: if role == "developer" { Some(developer_tools(&mut fields)?) } else { None },
        role,
    })
}

fn text_only(value: Option<Value>) -> Option<String> {
    match value {
        Some(Value::String(text)) => Some(text),
        _ => None,
    }
}

/// Whether vLLM hands nothing of a message's content on to the template, if the message is one of a batch.
///
/// A batch's conversations are validated twice, by a union of types of which some read parts only when they are asked for
/// them, and once. Such a type, that of the message's role, is chosen unless the type that takes all parts at once knows
/// more of the message's fields and parts. What it does not know then gets lost without a word; beyond a batch it is
/// refused.
pub(super) fn loses_parts_in_a_batch(message: &Value) -> bool {
    let Some(parts) = message.get("content").and_then(Value::as_array) else { return false };
    let has = |part: &Value, kind: &str, text: &str| part["type"] == kind && part[text].is_string();
    let is_text = |part: &Value| has(part, "text", "text");
    let is_known = |part: &Value| {
        is_text(part)
            || has(part, "refusal", "refusal")
            || has(part, "thinking", "thinking")
            || has(part, "tool_reference", "name")
    };
    let of_role_alone = ["refusal", "audio", "function_call"];
    let weighs_against = of_role_alone.iter().any(|name| message.get(*name).is_some());
    !parts.iter().all(is_text) && (weighs_against || !parts.iter().any(is_known))
}

/// One part of a message's content; `None` for one that vLLM skips.
fn part(value: Value, is_system: bool) -> Result<Option<Part>, BodyError> {
    let Value::Object(mut fields) = value else {
        return Err(BodyError::Refused("a content part is no object"));
    };
    if fields.contains_key("uuid") {
        return Err(BodyError::Media);
    }
    let kind =
        json::take_text(&mut fields, "type")?.ok_or(BodyError::Refused("a content part has no type"))?;
    let text = match kind.as_str() {
        "text" if is_system => match json::take_text(&mut fields, "text")?.map(without_billing_line) {
            Some(None) => return Ok(None),
            text => text.flatten(),
        },
        "text" | "input_text" | "output_text" => json::take_text(&mut fields, "text")?,
        "refusal" => json::take_text(&mut fields, "refusal")?,
        "thinking" => json::take_text(&mut fields, "thinking")?,
        "tool_reference" => {
            let name = json::take_text(&mut fields, "name")?.ok_or(BodyError::Field("tool_reference"))?;
            return Ok(Some(Part::ToolReference(name)));
        }
        _ => return Err(BodyError::Media),
    };
    match text {
        Some(text) => {
            // Into another object, as messages are kept, and this one keeps its room for what is taken out.
            let extra = fields.into_iter().filter(|(name, _)| !PART_FIELDS.contains(&name.as_str()));
            let extra: Object = extra.collect();
            extra.values().try_for_each(json::check_exact)?;
            Ok(Some(Part::Text { text: text.into(), extra }))
        }
        None if matches!(kind.as_str(), "text" | "refusal") => Ok(None),
        None => Err(BodyError::Field("text")),
    }
}

/// How Claude Code's first system line starts.
pub(super) const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// Claude Code's first system line changes with every request; vLLM removes it, and the part if nothing else is in it. It
/// looks at parts of type `text` alone, of which those of `/v1/responses` are none.
fn without_billing_line(text: String) -> Option<String> {
    if !text.starts_with(BILLING_HEADER) {
        return Some(text);
    }
    text.split_once('\n').map(|(_, rest)| rest.to_owned()).filter(|rest| !rest.is_empty())
}

fn tool_calls(message: &mut Object) -> Result<Option<Vec<Value>>, BodyError> {
    let Some(calls) = json::take(message, "tool_calls") else { return Ok(None) };
    let Value::Array(mut calls) = calls else { return Err(BodyError::Field("tool_calls")) };
    for call in &mut calls {
        tool_call(call)?;
    }
    Ok(Some(calls).filter(|calls| !calls.is_empty()))
}

/// A call as vLLM hands it to the template: its own order of fields, unknown ones last, and the arguments as an object,
/// which clients send as a JSON text.
fn tool_call(call: &mut Value) -> Result<(), BodyError> {
    const FIELD: BodyError = BodyError::Field("tool_calls");
    let call = call.as_object_mut().ok_or(FIELD)?;
    if call.get("type").is_none_or(|kind| kind != "function") {
        return Err(BodyError::Refused("a tool call is no function call"));
    }
    let function = call.get_mut("function").and_then(Value::as_object_mut).ok_or(FIELD)?;
    let Some(Value::String(arguments)) = function.get("arguments") else { return Err(FIELD) };
    let arguments = call_arguments(arguments)?;
    function.insert("arguments".to_owned(), arguments);
    json::put_first(function, &["arguments", "name"]);
    json::put_first(call, &["id", "function", "type"]);
    call.values().try_for_each(json::check_exact)
}

/// vLLM makes an empty object of everything that Python's `json.loads` does not read as an object. What it would read
/// and `serde_json` does not (`NaN`, lone surrogates, huge exponents, deep nesting) is not guessed at.
fn call_arguments(text: &str) -> Result<Value, BodyError> {
    match serde_json::from_str(text) {
        Ok(arguments @ Value::Object(_)) => Ok(arguments),
        Ok(_) => Ok(json!({})),
        Err(error) => {
            let unlike_python = ["NaN", "Infinity", "\\ud", "\\uD"].iter().any(|sign| text.contains(sign));
            let number_or_depth = {
                let message = error.to_string();
                message.starts_with("number out of range") || message.starts_with("recursion limit")
            };
            if unlike_python || number_or_depth {
                Err(BodyError::Unsupported("tool call arguments"))
            } else {
                Ok(json!({}))
            }
        }
    }
}

pub(super) fn tools(tools: Vec<Value>) -> Result<Option<Vec<Value>>, BodyError> {
    if tools.is_empty() {
        return Err(BodyError::Refused("an empty list of tools"));
    }
    tools.into_iter().map(tool).collect::<Result<_, _>>().map(Some)
}

/// A tool as vLLM writes it out again: its own order of fields, unknown ones dropped, absent ones null.
pub(super) fn tool(value: Value) -> Result<Value, BodyError> {
    const FIELD: BodyError = BodyError::Field("tools");
    let Value::Object(mut tool) = value else { return Err(FIELD) };
    if !tool.get("type").is_none_or(|kind| kind == "function") {
        return Err(BodyError::Refused("a tool is no function"));
    }
    let defer_loading = optional_flag(&mut tool, "defer_loading")?;
    let Some(Value::Object(mut given)) = json::take(&mut tool, "function") else { return Err(FIELD) };
    let mut function = Object::new();
    function.insert("name".to_owned(), json::take_text(&mut given, "name")?.ok_or(FIELD)?.into());
    function.insert("description".to_owned(), json::take_text(&mut given, "description")?.into());
    let parameters = match json::take(&mut given, "parameters") {
        parameters @ (None | Some(Value::Object(_))) => parameters,
        Some(_) => return Err(FIELD),
    };
    parameters.iter().try_for_each(json::check_exact)?;
    function.insert("parameters".to_owned(), parameters.into());
    if let Some(strict) = optional_flag(&mut given, "strict")? {
        function.insert("strict".to_owned(), strict.into());
    }
    if let Some(defer_loading) = optional_flag(&mut given, "defer_loading")?.or(defer_loading) {
        function.insert("defer_loading".to_owned(), defer_loading.into());
    }
    let mut tool = Object::new();
    tool.insert("type".to_owned(), "function".into());
    tool.insert("function".to_owned(), Value::Object(function));
    if let Some(defer_loading) = defer_loading {
        tool.insert("defer_loading".to_owned(), defer_loading.into());
    }
    Ok(Value::Object(tool))
}

/// The tools of a developer's message: as the client wrote them, in vLLM's order of fields.
fn developer_tools(message: &mut Object) -> Result<Value, BodyError> {
    let mut tools = json::take(message, "tools").unwrap_or(Value::Null);
    for tool in tools.as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut) {
        json::put_first(tool, &["function", "type"]);
        if let Some(function) = tool.get_mut("function").and_then(Value::as_object_mut) {
            json::put_first(function, &["name", "description", "parameters", "strict"]);
        }
    }
    json::check_exact(&tools)?;
    Ok(tools)
}

fn optional_flag(object: &mut Object, name: &'static str) -> Result<Option<bool>, BodyError> {
    match json::take(object, name) {
        None => Ok(None),
        Some(Value::Bool(flag)) => Ok(Some(flag)),
        Some(_) => Err(BodyError::Field(name)),
    }
}

fn template_arguments(body: &mut Object) -> Result<Object, BodyError> {
    let mut arguments = match json::take(body, "chat_template_kwargs") {
        None => Object::new(),
        Some(Value::Object(arguments)) => arguments,
        Some(_) => return Err(BodyError::Field("chat_template_kwargs")),
    };
    if json::take(&mut arguments, "chat_template").is_some() {
        return Err(BodyError::RequestTemplate);
    }
    if arguments.contains_key("tokenize") {
        return Err(BodyError::Unsupported("tokenize among the template's arguments"));
    }
    if REFUSED_ARGUMENTS.iter().any(|name| arguments.contains_key(*name)) {
        return Err(BodyError::Refused("a template argument that cannot be given"));
    }
    arguments.retain(|name, _| !INERT_ARGUMENTS.contains(&name.as_str()));
    arguments.values().try_for_each(json::check_exact)?;
    Ok(arguments)
}
