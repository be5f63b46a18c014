//! A conversation → the messages as the chat template sees them (vLLM `parse_chat_messages` and what follows it).

use super::template::{
    ContentFormat,
    values::{self, Fields},
};
use crate::config::Compat;
use crate::request::conversation::{Message, Part};
use minijinja::value::Value;
use serde_json::Map;
use smallvec::smallvec;
use std::sync::Arc;

/// A message's content in the form that the template expects.
#[derive(Clone, Debug)]
pub(super) enum Content {
    /// One string.
    Text(Arc<str>),
    /// A list of parts, each an object.
    Parts(Vec<serde_json::Value>),
}

/// A message ready for the template.
#[derive(Clone, Debug)]
pub(super) struct Prepared<'c> {
    role: &'c str,
    pub(super) content: Content,
    source: Option<&'c Message>,
    /// The message, if nothing but it makes this one, and it was seen before.
    pub(super) identity: Option<&'c Arc<Message>>,
    /// A developer's message that was made a system message loses its tools.
    converted: bool,
}

/// Gives every message the `format` of content. A template that does not know developers gets their messages as
/// system messages, and then all system messages as one at the front. With `system_first` they are so in any case.
pub(super) fn prepare(
    messages: &[Arc<Message>],
    format: ContentFormat,
    knows_developers: bool,
    system_first: bool,
) -> Vec<Prepared<'_>> {
    let mut prepared: Vec<_> = messages
        .iter()
        .map(|message| Prepared {
            role: &message.role,
            content: content(message, format),
            source: Some(message),
            identity: Some(message).filter(|message| is_shared(message)),
            converted: false,
        })
        .collect();
    if !knows_developers && prepared.iter().any(|message| message.role == "developer") {
        for message in prepared.iter_mut().filter(|message| message.role == "developer") {
            message.role = "system";
            message.converted = true;
        }
        merge_system_messages(&mut prepared, "\n\n");
    }
    if system_first && prepared.iter().any(|message| message.role == "system") {
        merge_system_messages(&mut prepared, "");
        // The engine merges these before it gives them their form.
        if let Some(system) = prepared.first_mut().filter(|_| format == ContentFormat::Parts) {
            system.identity = None;
            system.content.make_parts();
        }
    }
    prepared
}

/// Whether somebody else has the message too: of those that were seen lately the cache has one. Others never come again.
fn is_shared(message: &Arc<Message>) -> bool {
    Arc::strong_count(message) > 1
}

fn content(message: &Message, format: ContentFormat) -> Content {
    let as_parts = format == ContentFormat::Parts;
    if let ([Part::Text { text, .. }], false) = (&message.content[..], as_parts) {
        return Content::Text(Arc::clone(text));
    }
    let only_text = message.content.iter().all(|part| matches!(part, Part::Text { .. }));
    if as_parts && !(message.role == "tool" && only_text) {
        return Content::Parts(message.content.iter().map(part_object).collect());
    }
    let texts = message.content.iter().map(|part| match part {
        Part::Text { text, .. } => &**text,
        Part::ToolReference(name) => name.as_str(),
    });
    // Empty parts are dropped where vLLM joins texts, but not where it joins a tool's list of parts.
    let mut joined = String::new();
    for (at, text) in texts.filter(|text| as_parts || !text.is_empty()).enumerate() {
        if at > 0 {
            joined.push('\n');
        }
        joined.push_str(text);
    }
    Content::Text(joined.into())
}

fn part_object(part: &Part) -> serde_json::Value {
    let mut object = Map::new();
    match part {
        Part::Text { text, extra } => {
            object.insert("type".to_owned(), "text".into());
            object.insert("text".to_owned(), (**text).into());
            object.extend(extra.iter().map(|(name, value)| (name.clone(), value.clone())));
        }
        Part::ToolReference(name) => {
            object.insert("type".to_owned(), "tool_reference".into());
            object.insert("name".to_owned(), name.as_str().into());
        }
    }
    object.into()
}

fn merge_system_messages(messages: &mut Vec<Prepared<'_>>, between: &str) {
    let mut system =
        messages.iter().enumerate().filter(|(_, message)| message.role == "system").map(|(at, _)| at);
    if system.next() == Some(0) && system.next().is_none() {
        return;
    }
    let texts: Vec<Arc<str>> = messages
        .extract_if(.., |message| message.role == "system")
        .map(|message| message.content.into_text())
        .filter(|text| !text.is_empty())
        .collect();
    let merged = Prepared {
        role: "system",
        content: Content::Text(texts.join(between).into()),
        source: None,
        identity: None,
        converted: false,
    };
    messages.insert(0, merged);
}

impl Content {
    /// Wraps a text into the only part of a list.
    fn make_parts(&mut self) {
        if let Self::Text(text) = self {
            *self = Self::Parts(vec![serde_json::json!({ "type": "text", "text": &**text })]);
        }
    }

    /// All texts, joined by newlines.
    fn into_text(self) -> Arc<str> {
        match self {
            Self::Text(text) => text,
            Self::Parts(parts) => {
                let texts: Vec<&str> = parts.iter().filter_map(|part| part.get("text")?.as_str()).collect();
                texts.join("\n").into()
            }
        }
    }
}

impl Prepared<'_> {
    /// The message as a value for the template. The order of the fields is vLLM's.
    pub(super) fn value(&self, compat: Compat) -> Value {
        let content = match &self.content {
            Content::Text(text) => Value::from(text),
            Content::Parts(parts) => parts.iter().map(values::from_json).collect(),
        };
        let mut fields = smallvec![("role", Value::from(self.role)), ("content", content)];
        if let Some(message) = self.source {
            let is_kept = |value: &&serde_json::Value| !(compat.drops_nulls() && value.is_null());
            if let Some(calls) = &message.tool_calls {
                fields.push(("tool_calls", calls.iter().map(values::from_json).collect()));
            }
            if let Some(reasoning) = &message.reasoning {
                let reasoning = values::from_json(reasoning);
                if compat.names_thinking() {
                    fields.insert(0, ("thinking", reasoning.clone()));
                }
                fields.push(("reasoning", reasoning.clone()));
                fields.push(("reasoning_content", reasoning));
            }
            if let Some(id) = message.tool_call_id.as_ref().filter(is_kept) {
                fields.push(("tool_call_id", values::from_json(id)));
            }
            if let Some(name) = &message.name {
                fields.push(("name", Value::from(name.as_str())));
            }
            if let Some(task) = &message.task {
                fields.push(("task", Value::from(task.as_str())));
            }
            if let Some(tools) = message.tools.as_ref().filter(|_| !self.converted).filter(is_kept) {
                fields.push(("tools", values::from_json(tools)));
            }
        }
        Value::from_object(Fields { fields, message: self.identity.cloned() })
    }
}
