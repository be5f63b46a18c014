//! A body of Anthropic's `/v1/messages` → the conversation that vLLM makes of it (`AnthropicServingMessages`).
//!
//! vLLM writes the request as one of chat completions and goes on with that; so does this.

use super::body::{Apart, BodyError};
use super::conversation::{self, BILLING_HEADER, Conversation};
use super::json::{self, Object};
use super::list::List;
use super::tools::Tools;
use serde_json::{Value, json};

pub(super) fn parse(body: &mut Object, apart: Apart<'_>) -> Result<Conversation, BodyError> {
    let mut messages = Vec::new();
    let bare_billing_line = system(body, &mut messages)?;
    let mut messages = conversation::messages(messages)?;
    let list = List::take(body, "messages", apart.list)?.ok_or(BodyError::Field("messages"))?;
    let (mut turns, cut) = list.messages(|message, turns| {
        let mut own = Vec::new();
        let converted = convert(message, &mut own);
        turns.append(&mut conversation::messages(own)?);
        converted
    })?;
    let has_inline_system = turns.iter().any(|message| message.role == "system");
    if bare_billing_line && has_inline_system {
        // Merged before the line is removed, it would take a part of the next message with it.
        return Err(BodyError::Unsupported("a billing line without an end"));
    }
    messages.append(&mut turns);
    let choice_is_none = body.get("tool_choice").is_some_and(|choice| choice["type"] == "none");
    let mut chat = Object::new();
    chat.insert("tool_choice".to_owned(), if choice_is_none { "none".into() } else { Value::Null });
    if let Some(arguments) = json::take(body, "chat_template_kwargs") {
        chat.insert("chat_template_kwargs".to_owned(), arguments);
    }
    if let Some(Value::Object(mut output)) = json::take(body, "output_config") {
        chat.insert("reasoning_effort".to_owned(), json::take(&mut output, "effort").into());
    }
    let tools = Tools::take(body, apart.tools, tools)?;
    let mut conversation = conversation::assemble(&mut chat, (messages, cut), tools)?;
    conversation.calls_are_to_be_found = conversation.tools.is_some() && !choice_is_none;
    conversation.system_may_be_first = true;
    conversation.thinking_disabled =
        body.get("thinking").is_some_and(|thinking| thinking["type"] == "disabled");
    Ok(conversation)
}

/// The system prompt: its blocks without anything between them. Says whether it is nothing but the start of a billing
/// line.
fn system(body: &mut Object, messages: &mut Vec<Value>) -> Result<bool, BodyError> {
    let text = match json::take(body, "system") {
        None => return Ok(false),
        Some(Value::String(text)) => text,
        Some(Value::Array(blocks)) => system_text(blocks)?,
        Some(_) => return Err(BodyError::Field("system")),
    };
    let bare = text.starts_with(BILLING_HEADER) && !text.contains('\n');
    if !text.is_empty() {
        messages.push(json!({ "role": "system", "content": text }));
    }
    Ok(bare)
}

/// The text of system blocks. A block that starts with Claude Code's billing line, which changes with every request,
/// is left out as a whole.
fn system_text(blocks: Vec<Value>) -> Result<String, BodyError> {
    let mut text = String::new();
    for block in blocks {
        let Value::Object(mut block) = block else { return Err(BodyError::Field("system")) };
        match block.get("type").and_then(Value::as_str) {
            Some("text") => {
                let part = json::take_text(&mut block, "text")?.unwrap_or_default();
                if !part.starts_with(BILLING_HEADER) {
                    text.push_str(&part);
                }
            }
            Some("tool_addition" | "tool_removal") => {
                return Err(BodyError::Unsupported("tools that change in the conversation"));
            }
            Some(_) => {}
            None => return Err(BodyError::Refused("a content block has no type")),
        }
    }
    Ok(text)
}

fn convert(message: Value, messages: &mut Vec<Value>) -> Result<(), BodyError> {
    let Value::Object(mut message) = message else { return Err(BodyError::Field("messages")) };
    let role = json::take_text(&mut message, "role")?.ok_or(BodyError::Field("role"))?;
    let content = json::take(&mut message, "content").ok_or(BodyError::Field("content"))?;
    match (role.as_str(), content) {
        ("system", Value::String(text)) if text.starts_with(BILLING_HEADER) || text.is_empty() => Ok(()),
        ("system", Value::Array(blocks)) => {
            let text = system_text(blocks)?;
            if !text.is_empty() {
                messages.push(json!({ "role": "system", "content": text }));
            }
            Ok(())
        }
        ("system" | "user" | "assistant", content @ Value::String(_)) => {
            messages.push(json!({ "role": role, "content": content }));
            Ok(())
        }
        ("user" | "assistant", Value::Array(blocks)) => turn(&role, blocks, messages),
        ("user" | "assistant" | "system", _) => Err(BodyError::Field("content")),
        _ => Err(BodyError::Refused("a role that the Messages API does not know")),
    }
}

/// A message in blocks. Results of tools become messages of their own before it.
fn turn(role: &str, blocks: Vec<Value>, messages: &mut Vec<Value>) -> Result<(), BodyError> {
    let (mut parts, mut calls, mut reasoning) = (Vec::new(), Vec::new(), None::<String>);
    for block in blocks {
        let Value::Object(mut block) = block else { return Err(BodyError::Field("content")) };
        let kind =
            json::take_text(&mut block, "type")?.ok_or(BodyError::Refused("a content block has no type"))?;
        match kind.as_str() {
            "text" => {
                let text = json::take_text(&mut block, "text")?.unwrap_or_default();
                if !text.is_empty() {
                    parts.push(json!({ "type": "text", "text": text }));
                }
            }
            "thinking" => {
                if let Some(text) = json::take_text(&mut block, "thinking")? {
                    reasoning.get_or_insert_default().push_str(&text);
                }
            }
            "tool_use" => calls.push(tool_call(&mut block)?),
            "tool_result" if role == "user" => tool_result(&mut block, messages)?,
            "tool_result" => match json::take(&mut block, "content") {
                None => parts.push(json!({ "type": "text", "text": "Tool result: " })),
                Some(Value::String(text)) => {
                    parts.push(json!({ "type": "text", "text": format!("Tool result: {text}") }));
                }
                Some(_) => return Err(BodyError::Unsupported("an assistant's result of a tool")),
            },
            "image" if json::take(&mut block, "source").is_some() => return Err(BodyError::Media),
            "image" | "redacted_thinking" | "tool_reference" => {}
            _ => return Err(BodyError::Refused("a content block of an unknown type")),
        }
    }
    if role == "user" && parts.is_empty() {
        return Ok(());
    }
    let mut message = Object::new();
    message.insert("role".to_owned(), role.into());
    message.insert("content".to_owned(), parts.into());
    if let Some(reasoning) = reasoning {
        message.insert("reasoning".to_owned(), reasoning.into());
    }
    if !calls.is_empty() {
        message.insert("tool_calls".to_owned(), calls.into());
    }
    messages.push(message.into());
    Ok(())
}

fn tool_call(block: &mut Object) -> Result<Value, BodyError> {
    // vLLM makes one up from the time.
    let id = json::take_text(block, "id")?.filter(|id| !id.is_empty());
    let id = id.ok_or(BodyError::Unsupported("a tool call without id"))?;
    let name = json::take_text(block, "name")?.unwrap_or_default();
    let input = match json::take(block, "input") {
        None => json!({}),
        Some(input @ Value::Object(_)) => input,
        Some(_) => return Err(BodyError::Field("input")),
    };
    json::check_exact(&input)?;
    let function = json!({ "name": name, "arguments": input.to_string() });
    Ok(json!({ "id": id, "type": "function", "function": function }))
}

fn tool_result(block: &mut Object, messages: &mut Vec<Value>) -> Result<(), BodyError> {
    let id = json::take_text(block, "tool_use_id")?.unwrap_or_default();
    let (mut texts, mut references) = (Vec::new(), Vec::new());
    match json::take(block, "content") {
        None => {}
        Some(Value::String(text)) => texts.push(text),
        Some(Value::Array(items)) => {
            for item in items {
                let Value::Object(mut item) = item else { return Err(BodyError::Field("content")) };
                match item.get("type").and_then(Value::as_str) {
                    Some("text") => texts.push(json::take_text(&mut item, "text")?.unwrap_or_default()),
                    Some("image") => return Err(BodyError::Media),
                    Some("tool_reference") => {
                        let own = json::take_text(&mut item, "tool_name")?.filter(|name| !name.is_empty());
                        let name = own.map_or_else(|| json::take_text(&mut item, "name"), |n| Ok(Some(n)))?;
                        let name = name.filter(|name| !name.is_empty());
                        references.extend(name.map(|name| json!({ "type": "tool_reference", "name": name })));
                    }
                    _ => {}
                }
            }
        }
        Some(_) => return Err(BodyError::Field("content")),
    }
    messages.push(json!({ "role": "tool", "tool_call_id": id, "content": texts.join("\n") }));
    if !references.is_empty() {
        messages.push(json!({ "role": "tool", "tool_call_id": id, "content": references }));
    }
    Ok(())
}

pub(super) fn tools(tools: Vec<Value>) -> Result<Option<Vec<Value>>, BodyError> {
    const FIELD: BodyError = BodyError::Field("tools");
    let tools = tools.into_iter().map(|tool| {
        let Value::Object(mut tool) = tool else { return Err(FIELD) };
        let Some(Value::Object(mut schema)) = json::take(&mut tool, "input_schema") else {
            return Err(FIELD);
        };
        schema.entry("type").or_insert_with(|| "object".into());
        tool.insert("parameters".to_owned(), schema.into());
        conversation::tool(json!({ "type": "function", "function": tool }))
    });
    tools.collect::<Result<_, _>>().map(Some)
}

#[cfg(test)]
mod tests {
    use crate::request::body::{BodyError, Endpoint, PromptInput, parse};

    fn texts(body: &str) -> Result<Vec<String>, BodyError> {
        match parse(Endpoint::Messages, body.as_bytes())?.prompt {
            PromptInput::Chat(chat) => Ok(chat
                .messages
                .iter()
                .map(|message| format!("{}: {:?}", message.role, message.content.len()))
                .collect()),
            other => panic!("{other:?} is no conversation"),
        }
    }

    #[test]
    fn results_of_tools_stand_before_the_text_of_the_same_turn() {
        let body = r#"{"system": "s", "messages": [{"role": "user", "content": [
            {"type": "text", "text": "and now?"},
            {"type": "tool_result", "tool_use_id": "1", "content": "sunny"}]}]}"#;
        assert_eq!(texts(body).expect("a body"), ["system: 1", "tool: 1", "user: 1"]);
    }

    #[test]
    fn what_cannot_be_converted_for_certain_is_an_error() {
        for (content, reason) in [
            (r#"[{"type": "image", "source": {"type": "url", "url": "u"}}]"#, "media"),
            (r#"[{"type": "tool_use", "name": "f", "input": {}}]"#, "unsupported"),
            (r#"[{"type": "document"}]"#, "refused"),
            (r#"[{"text": "untyped"}]"#, "refused"),
            ("7", "unexpected_type"),
        ] {
            let body = format!(r#"{{"messages": [{{"role": "user", "content": {content}}}]}}"#);
            assert_eq!(texts(&body).expect_err(content).reason(), reason, "{content}");
        }
    }

    #[test]
    fn a_billing_line_that_would_swallow_the_next_system_message_is_no_guess() {
        let body = |system: &str| {
            format!(
                r#"{{"system": "{system}", "messages": [{{"role": "user", "content": "x"}}, {{"role": "system", "content": "y"}}]}}"#
            )
        };
        assert!(texts(&body("x-anthropic-billing-header: 1")).is_err());
        assert!(texts(&body("x-anthropic-billing-header: 1\\nrest")).is_ok());
    }
}
