//! A conversation → the messages as the chat template sees them (vLLM `parse_chat_messages` and what follows it).

use super::template::{ContentFormat, values};
use crate::config::Compat;
use crate::request::conversation::{Message, Part};
use minijinja::value::{Enumerator, Object, ObjectRepr, Value};
use serde_json::Map;
use smallvec::{SmallVec, smallvec};
use std::sync::{Arc, OnceLock};

/// A message's content in the form that the template expects.
#[derive(Clone, Debug)]
pub(super) enum Content {
    /// One string.
    Text(Arc<str>),
    /// A list of parts, each an object.
    Parts(Vec<serde_json::Value>),
}

/// A message ready for the template.
#[derive(Debug)]
pub(super) struct Prepared {
    source: Option<Arc<Message>>,
    /// A role in place of the message's own.
    role: Option<&'static str>,
    content: Content,
    /// Nothing but the message makes this one, and it was seen before.
    is_known: bool,
    compat: Compat,
    fields: OnceLock<Fields>,
}

type Fields = SmallVec<[(&'static str, Value); 4]>;

/// A field of a message.
pub(super) enum Field<'m> {
    /// A text of that form.
    Text(&'m str),
    Value(&'m Value),
    Absent,
}

/// Gives every message the `format` of content. A template that does not know developers gets their messages as
/// system messages, and then all system messages as one at the front. With `system_first` they are so in any case.
pub(super) fn prepare(
    messages: &[Arc<Message>],
    format: ContentFormat,
    knows_developers: bool,
    system_first: bool,
    compat: Compat,
) -> Vec<Prepared> {
    let prepared = |message: &Arc<Message>| Prepared {
        role: None,
        content: content(message, format),
        is_known: is_shared(message),
        source: Some(Arc::clone(message)),
        compat,
        fields: OnceLock::new(),
    };
    let mut prepared: Vec<_> = messages.iter().map(prepared).collect();
    if !knows_developers && prepared.iter().any(|message| message.role() == "developer") {
        for message in prepared.iter_mut().filter(|message| message.role() == "developer") {
            message.role = Some("system");
        }
        merge_system_messages(&mut prepared, "\n\n", compat);
    }
    if system_first && prepared.iter().any(|message| message.role() == "system") {
        merge_system_messages(&mut prepared, "", compat);
        // The engine merges these before it gives them their form.
        if let Some(system) = prepared.first_mut().filter(|_| format == ContentFormat::Parts) {
            system.content_mut().make_parts();
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

fn merge_system_messages(messages: &mut Vec<Prepared>, between: &str, compat: Compat) {
    let mut system =
        messages.iter().enumerate().filter(|(_, message)| message.role() == "system").map(|(at, _)| at);
    if system.next() == Some(0) && system.next().is_none() {
        return;
    }
    let texts: Vec<Arc<str>> = messages
        .extract_if(.., |message| message.role() == "system")
        .map(|message| message.content.into_text())
        .filter(|text| !text.is_empty())
        .collect();
    let merged = Prepared {
        source: None,
        role: Some("system"),
        content: Content::Text(texts.join(between).into()),
        is_known: false,
        compat,
        fields: OnceLock::new(),
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

impl Prepared {
    pub(super) fn role(&self) -> &str {
        match (self.role, &self.source) {
            (Some(role), _) => role,
            (None, source) => source.as_ref().map_or("", |message| &message.role),
        }
    }

    /// The content, to be changed: so the message is no longer as it was seen.
    pub(super) fn content_mut(&mut self) -> &mut Content {
        self.is_known = false;
        &mut self.content
    }

    /// The message, if nothing but it makes this one, and it was seen before; by its address it is known again.
    pub(super) fn identity(&self) -> Option<&Arc<Message>> {
        self.source.as_ref().filter(|_| self.is_known)
    }

    /// The field of that name.
    pub(super) fn field(&self, name: &str) -> Field<'_> {
        match (name, &self.content) {
            ("role", _) => Field::Text(self.role()),
            ("content", Content::Text(text)) => Field::Text(text),
            _ => {
                let found = self.all().iter().find(|(known, _)| *known == name);
                found.map_or(Field::Absent, |(_, value)| Field::Value(value))
            }
        }
    }

    /// The same as a value.
    fn value(&self, name: &str) -> Option<Value> {
        match (self.field(name), &self.content) {
            (Field::Absent, _) => None,
            (Field::Value(value), _) => Some(value.clone()),
            (Field::Text(_), Content::Text(text)) if name == "content" => Some(Value::from(text)),
            (Field::Text(text), _) => Some(Value::from(text)),
        }
    }

    /// All fields, in the order of vLLM.
    fn all(&self) -> &Fields {
        self.fields.get_or_init(|| self.fields())
    }

    fn fields(&self) -> Fields {
        let content = match &self.content {
            Content::Text(text) => Value::from(text),
            Content::Parts(parts) => parts.iter().map(values::from_json).collect(),
        };
        let mut fields = smallvec![("role", Value::from(self.role())), ("content", content)];
        let Some(message) = &self.source else { return fields };
        let is_kept = |value: &&serde_json::Value| !(self.compat.drops_nulls() && value.is_null());
        if let Some(calls) = &message.tool_calls {
            fields.push(("tool_calls", calls.iter().map(values::from_json).collect()));
        }
        if let Some(reasoning) = &message.reasoning {
            let reasoning = values::from_json(reasoning);
            if self.compat.names_thinking() {
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
        // A developer's message that was made a system message loses its tools.
        if let Some(tools) = message.tools.as_ref().filter(|_| self.role.is_none()).filter(is_kept) {
            fields.push(("tools", values::from_json(tools)));
        }
        fields
    }
}

/// A conversation's messages: for the template a list.
#[derive(Debug)]
pub(super) struct List(Vec<Prepared>);

impl List {
    pub(super) const fn new(messages: Vec<Prepared>) -> Self {
        Self(messages)
    }

    pub(super) const fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn get(&self, at: usize) -> Option<&Prepared> {
        self.0.get(at)
    }

    /// The message there as a value.
    pub(super) fn item(self: &Arc<Self>, at: usize) -> Option<Value> {
        self.get(at).map(|_| Value::from_object(Item { list: Arc::clone(self), at }))
    }
}

impl Object for List {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.item(key.as_usize()?)
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.len())
    }
}

/// A message of a list: for the template a dictionary. Most templates look at two or three fields of it.
#[derive(Debug)]
pub(super) struct Item {
    list: Arc<List>,
    at: usize,
}

impl Item {
    pub(super) fn message(&self) -> Option<&Prepared> {
        self.list.get(self.at)
    }
}

impl Object for Item {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Map
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.message()?.value(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.message()?.value(key).or_else(|| values::method(key))
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let fields = self.message().into_iter().flat_map(|message| message.all());
        Enumerator::Values(fields.map(|(name, _)| Value::from(*name)).collect())
    }
}
