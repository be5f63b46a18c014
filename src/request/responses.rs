//! A body of `/v1/responses` → the conversation that vLLM makes of it (`construct_input_messages`).
//!
//! Items that follow each other are one message where they belong to one turn of the assistant.

use super::body::{Apart, BodyError};
use super::conversation::{self, Conversation, Message};
use super::json::{self, Object};
use super::list::{Entry, List};
use super::tools::Tools;
use serde_json::{Value, json};
use std::sync::Arc;

const FIELD: BodyError = BodyError::Field("input");

pub(super) fn parse(body: &mut Object, apart: Apart<'_>) -> Result<Conversation, BodyError> {
    for field in ["previous_response_id", "prompt"] {
        // The history is in the memory of the replica that answered before.
        if json::take(body, field).is_some() {
            return Err(BodyError::Unsupported(field));
        }
    }
    let mut messages = Vec::new();
    if let Some(text) = json::take_text(body, "instructions")?.filter(|text| !text.is_empty()) {
        messages.push(json!({ "role": "system", "content": text }));
    }
    let (mut continued, mut cut) = (false, None);
    let messages = if body.get("input").is_some_and(Value::is_string) {
        let text = json::take(body, "input");
        messages.push(json!({ "role": "user", "content": text }));
        conversation::messages(messages)?
    } else {
        let items = List::take(body, "input", apart.list)?.ok_or(BodyError::EmptyPrompt)?;
        continued = items.last().is_some_and(is_unfinished);
        let (mut turns, end) = items.messages_of_groups(is_of_assistant, turn)?;
        cut = end;
        continued &= cut.is_none();
        let mut messages = conversation::messages(messages)?;
        messages.append(&mut turns);
        messages
    };
    let mut chat = Object::new();
    chat.insert("add_generation_prompt".to_owned(), (!continued).into());
    chat.insert("continue_final_message".to_owned(), continued.into());
    // Unlike chat completions, this endpoint leaves it at the tokenizer's default.
    chat.insert("add_special_tokens".to_owned(), true.into());
    if let Some(choice) = json::take(body, "tool_choice") {
        chat.insert("tool_choice".to_owned(), choice);
    }
    if let Some(arguments) = json::take(body, "chat_template_kwargs") {
        chat.insert("chat_template_kwargs".to_owned(), arguments);
    }
    if let Some(Value::Object(mut reasoning)) = json::take(body, "reasoning") {
        chat.insert("reasoning_effort".to_owned(), json::take(&mut reasoning, "effort").into());
    }
    let tools = Tools::take(body, apart.tools, tools)?;
    let conversation = conversation::assemble(&mut chat, (messages, cut), tools)?;
    // Its choice says nothing here of how calls are found.
    Ok(Conversation { calls_are_to_be_found: false, ..conversation })
}

/// Whether an item is of the assistant, whose items are one message where they belong to one turn.
fn is_of_assistant(item: Entry<'_>) -> bool {
    matches!(item.text("type").as_deref(), Some("function_call" | "custom_tool_call" | "reasoning"))
        || item.text("role").is_some_and(|role| role == "assistant")
}

/// The messages of an item, or of all items of the assistant between two others.
fn turn(items: Vec<Value>, messages: &mut Vec<Arc<Message>>) -> Result<(), BodyError> {
    let mut turns = Vec::new();
    for item in items {
        let Value::Object(item) = item else { return Err(FIELD) };
        convert(item, &mut turns)?;
    }
    let mut turns = conversation::messages(turns.into_iter().map(Value::Object).collect())?;
    // Unlike those of chat completions, these calls are not put in order by the API.
    let calls =
        turns.iter_mut().filter_map(Arc::get_mut).flat_map(|turn| turn.tool_calls.iter_mut().flatten());
    for function in calls.filter_map(|call| call.get_mut("function")?.as_object_mut()) {
        json::put_first(function, &["name", "arguments"]);
    }
    messages.append(&mut turns);
    Ok(())
}

fn object(value: Value) -> Object {
    match value {
        Value::Object(object) => object,
        _ => Object::new(),
    }
}

/// Whether the answer goes on with the last item.
fn is_unfinished(item: Entry<'_>) -> bool {
    let (kind, status) = (item.text("type"), item.text("status"));
    (!item.has("type") || matches!(kind.as_deref(), Some("message" | "reasoning")))
        && matches!(status.as_deref(), Some("in_progress" | "incomplete"))
}

fn convert(mut item: Object, messages: &mut Vec<Object>) -> Result<(), BodyError> {
    let kind = json::take_text(&mut item, "type")?;
    match kind.as_deref() {
        Some("function_call") => {
            let name = json::take_text(&mut item, "name")?.ok_or(FIELD)?;
            let name = match json::take_text(&mut item, "namespace")?.filter(|space| !space.is_empty()) {
                Some(namespace) => in_namespace(&namespace, &name),
                None => name,
            };
            let arguments = json::take_text(&mut item, "arguments")?.ok_or(FIELD)?;
            add_call(&mut item, &name, &arguments, messages)
        }
        Some("custom_tool_call") => {
            let name = json::take_text(&mut item, "name")?.ok_or(FIELD)?;
            let text = json::take_text(&mut item, "input")?.ok_or(FIELD)?;
            add_call(&mut item, &name, &json!({ CUSTOM_INPUT: text }).to_string(), messages)
        }
        Some("function_call_output" | "custom_tool_call_output") => {
            let mut message = object(json!({ "role": "tool" }));
            message.insert("content".to_owned(), text_or_parts(json::take(&mut item, "output"))?);
            message.insert("tool_call_id".to_owned(), json::take(&mut item, "call_id").into());
            messages.push(message);
            Ok(())
        }
        Some("reasoning") => {
            if json::take(&mut item, "encrypted_content").is_some() {
                return Err(BodyError::Refused("encrypted reasoning"));
            }
            let first = |item: &mut Object, name| -> Result<Option<String>, BodyError> {
                match json::take(item, name) {
                    Some(Value::Array(parts)) => match parts.into_iter().next() {
                        Some(Value::Object(mut part)) => json::take_text(&mut part, "text"),
                        _ => Ok(None),
                    },
                    Some(_) => Err(FIELD),
                    None => Ok(None),
                }
            };
            let (content, summary) = (first(&mut item, "content")?, first(&mut item, "summary")?);
            add(messages, "reasoning", content.or(summary).unwrap_or_default());
            Ok(())
        }
        None | Some("message") => message(item, kind.is_some(), messages),
        Some(_) => Err(BodyError::Unsupported("an input item of this type")),
    }
}

/// Adds a call to the assistant's turn.
fn add_call(
    item: &mut Object,
    name: &str,
    arguments: &str,
    messages: &mut Vec<Object>,
) -> Result<(), BodyError> {
    let id = json::take_text(item, "call_id")?.ok_or(FIELD)?;
    let function = json!({ "name": name, "arguments": arguments });
    let call = json!({ "id": id, "type": "function", "function": function });
    match assistant(messages) {
        Some(turn) => match turn.entry("tool_calls").or_insert_with(|| json!([])) {
            Value::Array(calls) => calls.push(call),
            _ => return Err(FIELD),
        },
        None => messages.push(object(json!({ "role": "assistant", "tool_calls": [call] }))),
    }
    Ok(())
}

/// The name by which the model is told of a function in a namespace.
fn in_namespace(namespace: &str, name: &str) -> String {
    format!("{namespace}__{name}")
}

/// The only argument of the function as which the model is told of a tool that takes any text.
const CUSTOM_INPUT: &str = "input";

/// That function (`custom_tool_as_function_dict`).
fn custom_function(tool: &mut Object) -> Result<Object, BodyError> {
    if json::take(tool, "format").is_some_and(|format| format["type"] == "grammar") {
        return Err(BodyError::Refused("a tool whose text has a grammar"));
    }
    let parameters = json!({
        "type": "object",
        "properties": {
            CUSTOM_INPUT: { "type": "string", "description": "The freeform text payload for this tool." }
        },
        "required": [CUSTOM_INPUT],
        "additionalProperties": false,
    });
    Ok(object(json!({
        "name": json::take(tool, "name"),
        "description": json::take(tool, "description"),
        "parameters": parameters,
    })))
}

fn message(mut item: Object, typed: bool, messages: &mut Vec<Object>) -> Result<(), BodyError> {
    let role = json::take_text(&mut item, "role")?.ok_or(FIELD)?;
    let content = json::take(&mut item, "content");
    match (role.as_str(), content) {
        ("assistant", Some(Value::String(text))) => add(messages, "content", text),
        // Of an answer that is handed back, vLLM takes the first part alone.
        ("assistant", Some(Value::Array(parts))) if typed => match parts.into_iter().next() {
            Some(Value::Object(mut part)) if part.get("type").is_some_and(|kind| kind == "output_text") => {
                add(messages, "content", json::take_text(&mut part, "text")?.ok_or(FIELD)?);
            }
            _ => return Err(BodyError::Unsupported("an assistant's message of this form")),
        },
        ("user" | "system" | "developer", content) => {
            let mut message = object(json!({ "role": role }));
            message.insert("content".to_owned(), text_or_parts(content)?);
            message.insert("name".to_owned(), json::take(&mut item, "name").into());
            messages.push(message);
        }
        _ => return Err(BodyError::Unsupported("an input message of this form")),
    }
    Ok(())
}

/// Content as chat completions have it. The API knows no other fields of a part than these.
fn text_or_parts(content: Option<Value>) -> Result<Value, BodyError> {
    match content {
        Some(Value::Array(mut parts)) => {
            for part in &mut parts {
                let part = part.as_object_mut().ok_or(FIELD)?;
                match part.get("type").and_then(Value::as_str) {
                    Some("input_text") => part.retain(|name, _| name == "type" || name == "text"),
                    Some("input_image" | "input_file" | "input_audio") => return Err(BodyError::Media),
                    _ => return Err(BodyError::Unsupported("a content part of this type")),
                }
            }
            Ok(parts.into())
        }
        Some(text @ Value::String(_)) => Ok(text),
        _ => Err(FIELD),
    }
}

/// The assistant's message that the next item may belong to.
fn assistant(messages: &mut [Object]) -> Option<&mut Object> {
    messages.last_mut().filter(|message| message.get("role").is_some_and(|role| role == "assistant"))
}

/// Adds what the assistant said or thought to its turn, or begins a new one if the turn has such already.
fn add(messages: &mut Vec<Object>, name: &str, text: String) {
    match assistant(messages) {
        Some(turn) if !turn.contains_key(name) => {
            turn.insert(name.to_owned(), text.into());
        }
        _ => {
            let mut turn = object(json!({ "role": "assistant" }));
            turn.insert(name.to_owned(), text.into());
            messages.push(turn);
        }
    }
}

/// The functions among the tools and in their namespaces, and the tools that take any text, as functions; the model is not told
/// of others (`get_function_tools`).
pub(super) fn tools(tools: Vec<Value>) -> Result<Option<Vec<Value>>, BodyError> {
    const FIELD: BodyError = BodyError::Field("tools");
    if tools.is_empty() {
        return Ok(None);
    }
    let mut functions = Vec::new();
    for tool in tools {
        let Value::Object(mut tool) = tool else { return Err(FIELD) };
        match json::take_text(&mut tool, "type")?.as_deref() {
            Some("function") => functions.push(tool),
            Some("custom") => functions.push(custom_function(&mut tool)?),
            Some("namespace") => functions.append(&mut functions_of_namespace(&mut tool)?),
            Some(_) => {}
            None => return Err(FIELD),
        }
    }
    let tool = |function| conversation::tool(json!({ "type": "function", "function": function }));
    functions.into_iter().map(tool).collect::<Result<_, _>>().map(Some)
}

/// Twice as long as a name may be in OpenAI's own API.
const LONGEST_NAMESPACE_BYTES: usize = 128;

fn functions_of_namespace(namespace: &mut Object) -> Result<Vec<Object>, BodyError> {
    const FIELD: BodyError = BodyError::Field("tools");
    let space = json::take_text(namespace, "name")?.ok_or(FIELD)?;
    // It comes before each of its functions' names.
    if space.len() > LONGEST_NAMESPACE_BYTES {
        return Err(BodyError::Unsupported("a namespace of so long a name"));
    }
    let Some(Value::Array(tools)) = json::take(namespace, "tools") else { return Err(FIELD) };
    let mut functions = Vec::new();
    for tool in tools {
        let Value::Object(mut tool) = tool else { return Err(FIELD) };
        if json::take_text(&mut tool, "type")?.as_deref() == Some("function") {
            let name = json::take_text(&mut tool, "name")?.ok_or(FIELD)?;
            tool.insert("name".to_owned(), in_namespace(&space, &name).into());
            functions.push(tool);
        }
    }
    Ok(functions)
}

#[cfg(test)]
mod tests {
    use crate::request::body::{BodyError, Endpoint, PromptInput, parse};
    use crate::request::conversation::Conversation;

    fn conversation(fields: &str) -> Result<Conversation, BodyError> {
        match parse(Endpoint::Responses, format!("{{{fields}}}").as_bytes())?.prompt {
            PromptInput::Chat(chat) => Ok(chat),
            other => panic!("{other:?} is no conversation"),
        }
    }

    #[test]
    fn items_of_one_turn_are_one_message() {
        let chat = conversation(
            r#""instructions": "s", "input": [{"role": "user", "content": "u"},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "o"}]"#,
        )
        .expect("a body");
        let roles: Vec<_> = chat.messages.iter().map(|message| message.role.as_str()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "tool"]);
        let turn = &chat.messages[2];
        assert!(turn.reasoning.is_some() && turn.tool_calls.is_some() && turn.content.len() == 1, "{turn:?}");
        assert!(chat.add_generation_prompt && chat.add_special_tokens);
    }

    #[test]
    fn tools_that_take_any_text_and_those_in_namespaces_are_functions() {
        let chat = conversation(
            r#""tools": [{"type": "custom", "name": "patch", "description": "d", "format": {"type": "text"}},
            {"type": "namespace", "name": "mail", "description": "d", "tools": [
                {"type": "function", "name": "send", "strict": true}, {"type": "custom", "name": "other"}]},
            {"type": "web_search"}],
            "input": [{"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": "\"é\"\n"},
            {"type": "function_call", "call_id": "2", "name": "send", "namespace": "mail", "arguments": "{}"},
            {"type": "custom_tool_call_output", "call_id": "1", "output": "o"}]"#,
        )
        .expect("a body");
        let tools = serde_json::Value::from(chat.tools.expect("tools").list().to_vec());
        let functions = |at: usize| tools[at]["function"].clone();
        assert_eq!(functions(0)["parameters"]["required"], serde_json::json!(["input"]));
        assert_eq!((&functions(1)["name"], tools.get(2)), (&"mail__send".into(), None));
        let calls = serde_json::Value::from(chat.messages[0].tool_calls.clone().expect("calls"));
        assert_eq!(calls[0]["function"]["arguments"], serde_json::json!({"input": "\"é\"\n"}));
        assert_eq!(calls[1]["function"]["name"], "mail__send");
        assert_eq!((chat.messages.len(), chat.messages[1].role.as_str()), (2, "tool"));
    }

    #[test]
    fn an_unfinished_last_item_is_gone_on_with() {
        let body = r#""input": [{"role": "user", "content": "u"}, {"type": "message", "role": "assistant",
            "status": "incomplete", "content": [{"type": "output_text", "text": "a"}]}]"#;
        let chat = conversation(body).expect("a body");
        assert!(chat.continue_final_message && !chat.add_generation_prompt);
    }

    #[test]
    fn what_is_not_in_the_body_or_not_known_is_an_error() {
        for (fields, reason) in [
            (r#""input": "x", "previous_response_id": "r""#, "unsupported"),
            (r#""input": [{"type": "item_reference", "id": "x"}]"#, "unsupported"),
            (r#""input": [{"role": "user", "content": [{"type": "input_image"}]}]"#, "media"),
            (
                r#""input": "x", "tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]"#,
                "refused",
            ),
            (r#""input": 7"#, "unexpected_type"),
            ("", "empty_prompt"),
        ] {
            assert_eq!(conversation(fields).expect_err(fields).reason(), reason, "{fields}");
        }
    }
}
