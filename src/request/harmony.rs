//! A body for a model of the gpt-oss kind → the messages of their own format, "harmony".
//!
//! vLLM 0.32 runs no chat template for these models, and takes other things from a body than for all others
//! (`OnlineRenderer._make_request_with_harmony` and `_render_responses_with_harmony`). What is not certain to be taken
//! as there is an error.

use super::body::{self, Ask, BodyError, Endpoint, PromptInput};
use super::json::{self, Object};
use serde_json::Value;
use std::collections::HashMap;

/// All that the prompt is made of, beside the date.
#[derive(Clone, PartialEq, Debug)]
pub struct Harmony {
    /// How much the model shall think.
    pub effort: Effort,
    /// The first system or developer message.
    pub instructions: Option<String>,
    /// The tools.
    pub tools: Vec<Tool>,
    /// `tool_choice` is `none`: some engines are told to leave the tools out then.
    pub tools_not_to_be_used: bool,
    /// What follows.
    pub messages: Vec<Message>,
}

/// `reasoning_effort`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Effort {
    /// `low`
    Low,
    /// `medium`
    #[default]
    Medium,
    /// `high`
    High,
}

/// A function that may be called.
#[derive(Clone, PartialEq, Debug)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// What it does; may be empty.
    pub description: String,
    /// A JSON schema.
    pub parameters: Option<Value>,
}

/// One message. Its texts are tokenized apart from each other.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Message {
    /// What the user says.
    User(Vec<String>),
    /// A later system or developer message.
    Developer(String),
    /// What the assistant says.
    Final(Vec<String>),
    /// What it says while it calls tools.
    Preamble(String),
    /// What it thinks.
    Analysis(String),
    /// A call of a tool.
    Call {
        /// The tool's name.
        name: String,
        /// The arguments, as the client wrote them.
        arguments: String,
    },
    /// What a tool answered.
    Result {
        /// The tool's name; empty if the call is not known.
        name: String,
        /// The answer.
        output: String,
    },
}

/// Reads a whole body. The nesting depth is limited to 128.
///
/// # Errors
/// See [`BodyError`]; all of them mean "route by load".
pub fn parse(endpoint: Endpoint, body: &[u8]) -> Result<Ask, BodyError> {
    let read = match endpoint {
        Endpoint::ChatCompletions => chat,
        Endpoint::Responses => responses,
        // Its prompts are no conversations.
        Endpoint::Completions | Endpoint::Generate => return body::parse(endpoint, body),
        Endpoint::ChatBatch | Endpoint::Messages => return Err(BodyError::Unsupported("gpt-oss here")),
    };
    let body = match serde_json::from_slice(body) {
        Ok(Value::Object(body)) => body,
        Ok(_) => return Err(BodyError::NotAnObject),
        Err(error) => return Err(body::unreadable(&error)),
    };
    let mut ask = body::read_prompt(endpoint, body, |body| {
        let forwarded = body::forwarded_tokens(body)?;
        let harmony = read(body)?;
        match forwarded {
            Some(ids) => ids.tokens().map(PromptInput::Tokens),
            None => Ok(PromptInput::Harmony(harmony)),
        }
    })?;
    if endpoint == Endpoint::ChatCompletions {
        ask.limits = ask.limits.not_looked_at();
    }
    Ok(ask)
}

fn chat(body: &mut Object) -> Result<Harmony, BodyError> {
    let values = match json::take(body, "messages") {
        Some(Value::Array(values)) if !values.is_empty() => values,
        Some(Value::Array(_)) | None => return Err(BodyError::EmptyPrompt),
        Some(_) => return Err(BodyError::Field("messages")),
    };
    let mut given = values.into_iter().map(Given::read).collect::<Result<Vec<_>, _>>()?;
    let instructions = match given.first() {
        Some(first) if first.is_developer() => joined(&given.remove(0).content),
        _ => None,
    };
    // A later call of the same id counts for earlier results too.
    let names: HashMap<String, String> = given
        .iter()
        .flat_map(|message| &message.calls)
        .map(|call| (call.id.clone(), call.name.clone()))
        .collect();
    let mut messages = Vec::with_capacity(given.len());
    for message in given {
        message.convert(&names, &mut messages)?;
    }
    let tools = match json::take(body, "tools") {
        None => Vec::new(),
        Some(Value::Array(tools)) if tools.is_empty() => {
            return Err(BodyError::Refused("an empty list of tools"));
        }
        Some(Value::Array(tools)) => {
            let function = |tool| function_of(tool).and_then(tool_of);
            tools.into_iter().map(function).collect::<Result<_, _>>()?
        }
        Some(_) => return Err(BodyError::Field("tools")),
    };
    Ok(Harmony {
        effort: effort(json::take_text(body, "reasoning_effort")?)?,
        instructions,
        tools,
        tools_not_to_be_used: body.get("tool_choice").is_some_and(|choice| choice == "none"),
        messages,
    })
}

fn effort(name: Option<String>) -> Result<Effort, BodyError> {
    match name.as_deref() {
        None | Some("medium") => Ok(Effort::Medium),
        Some("low") => Ok(Effort::Low),
        Some("high") => Ok(Effort::High),
        Some(_) => Err(BodyError::Refused("a reasoning effort that gpt-oss does not know")),
    }
}

/// A message of a chat.
struct Given {
    role: String,
    /// `None` for a part that is no text, which vLLM takes as an empty one.
    content: Vec<Option<String>>,
    reasoning: Option<String>,
    calls: Vec<Call>,
    tool_call_id: Option<String>,
}

struct Call {
    id: String,
    name: String,
    arguments: String,
}

impl Given {
    fn read(value: Value) -> Result<Self, BodyError> {
        let Value::Object(mut fields) = value else { return Err(BodyError::Field("messages")) };
        let role = json::take_text(&mut fields, "role")?.ok_or(BodyError::Field("role"))?;
        let reasoning = json::take_text(&mut fields, "reasoning")?;
        let content = match json::take(&mut fields, "content") {
            None if role == "assistant" => Vec::new(),
            None => return Err(BodyError::Field("content")),
            Some(Value::String(text)) => vec![Some(text)],
            Some(Value::Array(parts)) => parts.into_iter().map(part).collect::<Result<_, _>>()?,
            Some(_) => return Err(BodyError::Field("content")),
        };
        let calls = match json::take(&mut fields, "tool_calls") {
            None => Vec::new(),
            Some(Value::Array(calls)) => calls.into_iter().map(call).collect::<Result<_, _>>()?,
            Some(_) => return Err(BodyError::Field("tool_calls")),
        };
        Ok(Self {
            reasoning: reasoning.or(json::take_text(&mut fields, "reasoning_content")?),
            content,
            calls,
            tool_call_id: json::take_text(&mut fields, "tool_call_id")?,
            role,
        })
    }

    fn is_developer(&self) -> bool {
        matches!(self.role.as_str(), "system" | "developer")
    }

    fn convert(self, names: &HashMap<String, String>, out: &mut Vec<Message>) -> Result<(), BodyError> {
        let analysis = self.reasoning.filter(|text| !text.is_empty()).map(Message::Analysis);
        match self.role.as_str() {
            "assistant" if !self.calls.is_empty() => {
                let preamble = joined(&self.content).filter(|text| !text.is_empty());
                out.extend(preamble.map(Message::Preamble));
                out.extend(analysis);
                let call = |call: Call| Message::Call { name: call.name, arguments: call.arguments };
                out.extend(self.calls.into_iter().map(call));
            }
            "assistant" => {
                out.extend(analysis);
                // An answer whose first text is empty is left out as a whole.
                if self.content.first().is_some_and(|text| text.as_ref().is_some_and(|text| !text.is_empty()))
                {
                    out.push(Message::Final(texts(self.content)));
                }
            }
            "tool" => {
                let id = self.tool_call_id.unwrap_or_default();
                out.push(Message::Result {
                    name: names.get(&id).cloned().unwrap_or_default(),
                    output: joined(&self.content).unwrap_or_default(),
                });
            }
            "system" | "developer" => out.extend(joined(&self.content).map(Message::Developer)),
            "user" => out.push(Message::User(texts(self.content))),
            _ => return Err(BodyError::Refused("a role that gpt-oss does not know")),
        }
        Ok(())
    }
}

/// All texts in one; `None` if there is none.
fn joined(content: &[Option<String>]) -> Option<String> {
    let mut texts = content.iter().flatten().peekable();
    texts.peek().is_some().then(|| texts.map(String::as_str).collect())
}

fn texts(content: Vec<Option<String>>) -> Vec<String> {
    content.into_iter().map(Option::unwrap_or_default).collect()
}

fn part(value: Value) -> Result<Option<String>, BodyError> {
    const FIELD: BodyError = BodyError::Field("content");
    let Value::Object(mut part) = value else { return Err(FIELD) };
    let kind = json::take_text(&mut part, "type")?.ok_or(FIELD)?;
    let text = json::take_text(&mut part, "text")?;
    match (kind.as_str(), text) {
        ("text", Some(text)) => Ok(Some(text)),
        ("refusal" | "thinking" | "image_url" | "input_audio" | "audio_url" | "video_url", None) => Ok(None),
        _ => Err(FIELD),
    }
}

fn call(value: Value) -> Result<Call, BodyError> {
    const FIELD: BodyError = BodyError::Field("tool_calls");
    let mut call = object(value, FIELD)?;
    if call.get("type").is_none_or(|kind| kind != "function") {
        return Err(BodyError::Refused("a tool call is no function call"));
    }
    let id = json::take_text(&mut call, "id")?.ok_or(FIELD)?;
    let mut function = object(json::take(&mut call, "function").unwrap_or_default(), FIELD)?;
    let mut field = |name| json::take_text(&mut function, name)?.ok_or(FIELD);
    Ok(Call { id, name: field("name")?, arguments: field("arguments")? })
}

fn object(value: Value, error: BodyError) -> Result<Object, BodyError> {
    match value {
        Value::Object(object) => Ok(object),
        _ => Err(error),
    }
}

/// The function in a tool of a chat.
fn function_of(tool: Value) -> Result<Object, BodyError> {
    const FIELD: BodyError = BodyError::Field("tools");
    let mut tool = object(tool, FIELD)?;
    if !tool.get("type").is_none_or(|kind| kind == "function") {
        return Err(BodyError::Refused("a tool is no function"));
    }
    object(json::take(&mut tool, "function").unwrap_or_default(), FIELD)
}

fn tool_of(mut function: Object) -> Result<Tool, BodyError> {
    const FIELD: BodyError = BodyError::Field("tools");
    let parameters = json::take(&mut function, "parameters");
    if parameters.as_ref().is_some_and(|parameters| !parameters.is_object()) {
        return Err(FIELD);
    }
    parameters.iter().try_for_each(json::check_exact)?;
    Ok(Tool {
        name: json::take_text(&mut function, "name")?.ok_or(FIELD)?,
        description: json::take_text(&mut function, "description")?.unwrap_or_default(),
        parameters,
    })
}

fn responses(body: &mut Object) -> Result<Harmony, BodyError> {
    for field in ["previous_response_id", "previous_input_messages", "prompt"] {
        // The history is in the memory of the replica that answered before.
        if json::take(body, field).is_some() {
            return Err(BodyError::Unsupported(field));
        }
    }
    let mut instructions = json::take_text(body, "instructions")?;
    let mut messages = Vec::new();
    match json::take(body, "input") {
        Some(Value::String(text)) => messages.push(Message::User(vec![text])),
        Some(Value::Array(items)) => {
            let mut names = HashMap::new();
            for (at, item) in items.into_iter().enumerate() {
                let message = item_of(object(item, BodyError::Field("input"))?, &mut names)?;
                match message {
                    Some(Message::Developer(text)) if at == 0 && instructions.is_none() => {
                        instructions = Some(text);
                    }
                    // Unlike in a chat, empty ones are left out.
                    Some(Message::Developer(text)) if text.is_empty() => {}
                    message => messages.extend(message),
                }
            }
        }
        Some(_) => return Err(BodyError::Field("input")),
        None => return Err(BodyError::EmptyPrompt),
    }
    let mut reasoning = match json::take(body, "reasoning") {
        Some(reasoning) => object(reasoning, BodyError::Field("reasoning"))?,
        None => Object::new(),
    };
    let tools = match json::take(body, "tools") {
        None => Vec::new(),
        Some(Value::Array(tools)) => {
            let tool = |tool| {
                let tool = object(tool, BodyError::Field("tools"))?;
                // Those that the engine itself has are described by its tool server.
                if tool.get("type").is_none_or(|kind| kind != "function") {
                    return Err(BodyError::Unsupported("a tool of the engine"));
                }
                tool_of(tool)
            };
            tools.into_iter().map(tool).collect::<Result<_, _>>()?
        }
        Some(_) => return Err(BodyError::Field("tools")),
    };
    Ok(Harmony {
        effort: effort(json::take_text(&mut reasoning, "effort")?)?,
        instructions,
        tools,
        tools_not_to_be_used: false,
        messages,
    })
}

/// The message of an input item, if it makes one. The names of called tools are kept by the calls' ids.
fn item_of(mut item: Object, names: &mut HashMap<String, String>) -> Result<Option<Message>, BodyError> {
    const FIELD: BodyError = BodyError::Field("input");
    let kind = json::take_text(&mut item, "type")?;
    let mut field = |name| json::take_text(&mut item, name)?.ok_or(FIELD);
    match kind.as_deref() {
        None | Some("message") => {
            let role = field("role")?;
            let content = match json::take(&mut item, "content") {
                Some(Value::String(text)) => vec![Some(text)],
                Some(Value::Array(parts)) => parts.into_iter().map(input_part).collect::<Result<_, _>>()?,
                _ => return Err(FIELD),
            };
            match role.as_str() {
                "system" | "developer" => Ok(Some(Message::Developer(joined(&content).unwrap_or_default()))),
                "user" => Ok(Some(Message::User(texts(content)))),
                "assistant" => Ok(Some(Message::Final(texts(content)))),
                _ => Err(FIELD),
            }
        }
        Some("function_call") => {
            let (id, name, arguments) = (field("call_id")?, field("name")?, field("arguments")?);
            if json::take(&mut item, "namespace").is_some() {
                return Err(BodyError::Unsupported("a call of a tool in a namespace"));
            }
            names.insert(id, name.clone());
            Ok(Some(Message::Call { name, arguments }))
        }
        Some("function_call_output") => {
            let name = names.get(&field("call_id")?).cloned();
            let name = name.ok_or(BodyError::Refused("the answer of a call that is not there"))?;
            Ok(Some(Message::Result { name, output: field("output")? }))
        }
        Some("reasoning") => match json::take(&mut item, "content") {
            None => Ok(None),
            Some(Value::Array(parts)) if parts.is_empty() => Ok(None),
            Some(Value::Array(parts)) => {
                let text = |part| json::take_text(&mut object(part, FIELD)?, "text")?.ok_or(FIELD);
                let texts: Vec<String> = parts.into_iter().map(text).collect::<Result<_, _>>()?;
                Ok(Some(Message::Analysis(texts.join("\n"))))
            }
            Some(_) => Err(FIELD),
        },
        Some(_) => Err(BodyError::Unsupported("an input item of this type")),
    }
}

fn input_part(value: Value) -> Result<Option<String>, BodyError> {
    const FIELD: BodyError = BodyError::Field("input");
    let mut part = object(value, FIELD)?;
    let kind = json::take_text(&mut part, "type")?.ok_or(FIELD)?;
    match (kind.as_str(), json::take_text(&mut part, "text")?) {
        ("input_text" | "output_text", Some(text)) => Ok(Some(text)),
        _ => Err(BodyError::Unsupported("a part of this type")),
    }
}
