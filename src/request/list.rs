//! The list of messages in a body: read already, or still as it was written.
//!
//! Each turn of a conversation sends all messages again that came before, and of the latter kind only those are read that
//! were not seen lately. What becomes of an entry must not depend on others, but for those that it belongs to.

use super::body::BodyError;
use super::conversation::{Cut, Message};
use super::json::{self, Object};
use super::lengths::Wrong;
use super::plain;
use super::scan::{self, Scan};
use super::seen::{Api, Item, SeenMessages};
use super::text::text;
use serde_json::Value;
use std::{borrow::Cow, sync::Arc};

/// Room for as many is made at once.
const USUAL_MESSAGES: usize = 16;

/// A list as it was written, and what was seen of such lately.
#[derive(Debug)]
pub(super) struct Written<'j> {
    seen: &'j SeenMessages,
    items: Vec<Item<'j>>,
}

impl<'j> Written<'j> {
    /// Takes the next list.
    pub(super) fn read(api: Api, seen: &'j SeenMessages, scan: &mut Scan<'j>) -> Result<Self, BodyError> {
        let mut items: Vec<Item<'j>> = Vec::with_capacity(USUAL_MESSAGES);
        let mut wrong = Wrong::default();
        scan.items(|scan| {
            items.push(seen.item(api, items.last(), &mut wrong, scan)?);
            Ok(())
        })?;
        Ok(Self { seen, items })
    }

    /// The messages of all entries that were seen lately, and those that `read` reads of others.
    fn messages(
        mut self,
        joins: impl Fn(Entry<'_>) -> bool,
        read: impl Fn(&[Item<'_>], &mut Vec<Arc<Message>>) -> Result<(), BodyError>,
    ) -> Result<Messages, BodyError> {
        for item in &mut self.items {
            item.joins.get_or_insert_with(|| joins(Entry::Written(item.json)));
        }
        let count = self.items.len();
        let groups = self.items.chunk_by_mut(|a, b| a.joins == Some(true) && b.joins == Some(true));
        until_media(groups, count, |group, messages| self.seen.read(group, messages, &read))
    }
}

/// Entries that become messages.
#[derive(Debug)]
pub(super) enum List<'j> {
    Read(Vec<Value>),
    Written(Written<'j>),
}

/// One of them.
#[derive(Clone, Copy, Debug)]
pub(super) enum Entry<'e> {
    Read(&'e Value),
    Written(&'e [u8]),
}

/// The messages of a body, and where the known ones end.
pub(super) type Messages = (Vec<Arc<Message>>, Option<Cut>);

impl<'j> List<'j> {
    /// The list of this name, which is `written` where it is not in `body`; `None` if it is nowhere.
    pub(super) fn take(
        body: &mut Object,
        name: &'static str,
        written: Option<Written<'j>>,
    ) -> Result<Option<Self>, BodyError> {
        match (written, json::take(body, name)) {
            (Some(written), _) => Ok(Some(Self::Written(written))),
            (None, None) => Ok(None),
            (None, Some(Value::Array(values))) => Ok(Some(Self::Read(values))),
            (None, Some(_)) => Err(BodyError::Field(name)),
        }
    }

    /// The last entry.
    pub(super) fn last(&self) -> Option<Entry<'_>> {
        match self {
            Self::Read(values) => values.last().map(Entry::Read),
            Self::Written(written) => written.items.last().map(|item| Entry::Written(item.json)),
        }
    }

    /// The messages that `convert` makes of each entry, up to the first one with media: its tokens depend on the engine's own
    /// processing, but not those before it.
    pub(super) fn messages(
        self,
        convert: impl Fn(Value, &mut Vec<Arc<Message>>) -> Result<(), BodyError>,
    ) -> Result<Messages, BodyError> {
        match self {
            Self::Read(values) => {
                let count = values.len();
                until_media(values, count, convert)
            }
            Self::Written(written) => written.messages(
                |_| false,
                |items, messages| {
                    for item in items {
                        match plain::message(item.json) {
                            Some(message) => messages.push(Arc::new(message)),
                            None => convert(value(item.json)?, messages)?,
                        }
                    }
                    Ok(())
                },
            ),
        }
    }

    /// The same of entries that may belong together, where they follow each other and `joins` says so of each.
    pub(super) fn messages_of_groups(
        self,
        joins: impl Fn(Entry<'_>) -> bool,
        convert: impl Fn(Vec<Value>, &mut Vec<Arc<Message>>) -> Result<(), BodyError>,
    ) -> Result<Messages, BodyError> {
        match self {
            Self::Read(values) => {
                let belong = |a: &Value, b: &Value| joins(Entry::Read(a)) && joins(Entry::Read(b));
                let count = values.len();
                let lengths: Vec<_> = values.chunk_by(belong).map(<[Value]>::len).collect();
                let mut values = values.into_iter();
                until_media(lengths, count, |length, messages| {
                    convert(values.by_ref().take(length).collect(), messages)
                })
            }
            Self::Written(written) => written.messages(joins, |items, messages| {
                let values: Result<_, _> = items.iter().map(|item| value(item.json)).collect();
                convert(values?, messages)
            }),
        }
    }
}

impl Entry<'_> {
    /// Whether there is such a field.
    pub(super) fn has(&self, name: &str) -> bool {
        match self {
            Self::Read(value) => value.get(name).is_some(),
            Self::Written(json) => last_field(json, name).is_some(),
        }
    }

    /// A field that is a text; of a repeated one the last counts.
    pub(super) fn text(&self, name: &str) -> Option<Cow<'_, str>> {
        match self {
            Self::Read(value) => value.get(name)?.as_str().map(Cow::Borrowed),
            Self::Written(json) => text(last_field(json, name)?).ok(),
        }
    }
}

/// The value of the last field of that name.
fn last_field<'j>(json: &'j [u8], name: &str) -> Option<&'j [u8]> {
    let mut last = None;
    let field = |known: &'j [u8], scan: &mut Scan<'j>| {
        let value = scan.value()?;
        if text(known)? == name {
            last = Some(value);
        }
        Ok(())
    };
    scan::fields(json, field).ok()?;
    last
}

fn value(json: &[u8]) -> Result<Value, BodyError> {
    serde_json::from_slice(json).map_err(|_| BodyError::Malformed)
}

/// Takes entries until the first one with media, and says how the messages end then. They are about `count`.
fn until_media<E>(
    entries: impl IntoIterator<Item = E>,
    count: usize,
    mut take: impl FnMut(E, &mut Vec<Arc<Message>>) -> Result<(), BodyError>,
) -> Result<Messages, BodyError> {
    let mut messages = Vec::with_capacity(count);
    for entry in entries {
        match take(entry, &mut messages) {
            Ok(()) => {}
            Err(BodyError::Media) if !messages.is_empty() => return Ok((messages, Some(Cut::AfterMessage))),
            Err(error) => return Err(error),
        }
    }
    Ok((messages, None))
}
