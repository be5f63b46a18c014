//! Entries of lists of messages that were read lately.
//!
//! Each turn of a conversation sends all messages again that came before. They are known by their JSON, so that of a
//! long body only what is new has to be read.

use super::body::BodyError;
use super::conversation::Message;
use super::lengths::{Lengths, Wrong};
use super::scan::Scan;
use super::tools::Tools;
use crate::recent::{CacheStats, Key, Recent};
use serde_json::Value;
use std::sync::Arc;

/// Enough that threads rarely wait for each other, and that a message may be long.
const SHARDS: usize = 8;

/// One, so that it holds long lists of tools: each request asks it once.
const TOOLS_SHARDS: usize = 1;

/// The part of the memory that is for tools: few clients have many, and all conversations of one have the same.
const TOOLS_SHARE: usize = 4;

/// The part of the memory that is for the lengths of entries: of more than there are messages in the rest.
const LENGTHS_SHARE: usize = 32;

/// The messages and tools that were read lately, by their JSON; bounded in bytes.
#[derive(Debug)]
pub struct SeenMessages {
    entries: Recent<Seen>,
    tools: Recent<Arc<Tools>>,
    lengths: Lengths,
}

/// The API whose JSON it is: the same text may be another message in each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Api {
    Chat,
    Anthropic,
    Responses,
    /// Entries of the last one that belong together, by the names of them.
    ResponsesTurn,
}

/// What is known of an entry.
#[derive(Clone, Debug)]
struct Seen {
    joins: bool,
    /// `None` of one that was seen only together with others.
    own: Option<Own>,
}

/// The messages that an entry became.
#[derive(Clone, Debug)]
enum Own {
    One(Arc<Message>),
    Several(Arc<[Arc<Message>]>),
}

/// An entry as it is written, and what is known of it.
#[derive(Debug)]
pub(super) struct Item<'j> {
    pub(super) json: &'j [u8],
    /// Whether it belongs together with its neighbours that do so too; `None`: that is to be found out.
    pub(super) joins: Option<bool>,
    /// `None` of what is no object.
    key: Option<Key>,
    own: Option<Own>,
}

/// Stands for what is before tools, where nothing is; before messages are hashes.
const BEFORE_TOOLS: u64 = 1;

impl SeenMessages {
    /// At most `capacity_bytes` of messages and tools.
    #[must_use]
    pub fn new(capacity_bytes: usize) -> Self {
        let lengths = Lengths::new(capacity_bytes / LENGTHS_SHARE);
        let tools_bytes = capacity_bytes / TOOLS_SHARE;
        let entries_bytes = capacity_bytes - tools_bytes - lengths.memory_bytes();
        let (entries, tools) = (Recent::new(entries_bytes, SHARDS), Recent::new(tools_bytes, TOOLS_SHARDS));
        Self { entries, tools, lengths }
    }

    /// What is kept and how often it helped.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        let stats = self.entries.stats() + self.tools.stats();
        CacheStats { bytes: stats.bytes + self.lengths.memory_bytes(), ..stats }
    }

    /// Takes the next entry of a list, which follows `before`. The end of a known one is not looked for: where an object or
    /// a list ends is told by its own bytes.
    pub(super) fn item<'j>(
        &self,
        api: Api,
        before: Option<&Item<'_>>,
        wrong: &mut Wrong,
        scan: &mut Scan<'j>,
    ) -> Result<Item<'j>, BodyError> {
        if scan.next() != Some(b'{') {
            return Ok(Item { json: scan.value()?, joins: None, key: None, own: None });
        }
        let item = |json, key, seen: Option<Seen>| {
            let (joins, own) = seen.map_or((None, None), |seen| (Some(seen.joins), seen.own));
            Item { json, joins, key: Some(key), own }
        };
        let before = before.and_then(|item| item.key).map_or(0, Key::half);
        let (json, key, seen) = self.find(&self.entries, api, before, wrong, scan)?;
        Ok(item(json, key, seen))
    }

    /// Takes the next list of tools: those that `read` makes of it, unless it was read lately.
    pub(super) fn tools(
        &self,
        api: Api,
        scan: &mut Scan<'_>,
        read: impl FnOnce(Vec<Value>) -> Result<Option<Vec<Value>>, BodyError>,
    ) -> Result<Option<Arc<Tools>>, BodyError> {
        let (json, key, seen) = self.find(&self.tools, api, BEFORE_TOOLS, &mut Wrong::default(), scan)?;
        if seen.is_some() {
            return Ok(seen);
        }
        let list = serde_json::from_slice(json).map_err(|_| BodyError::Malformed)?;
        let tools = read(list)?.map(|list| Arc::new(Tools::from(list)));
        if let Some(tools) = &tools {
            self.tools.insert(key, Arc::clone(tools), tools.memory_bytes(json.len()));
        }
        Ok(tools)
    }

    /// Takes the next object or list, and finds out whether it is `known`.
    fn find<'j, V: Clone>(
        &self,
        known: &Recent<V>,
        api: Api,
        before: u64,
        wrong: &mut Wrong,
        scan: &mut Scan<'j>,
    ) -> Result<(&'j [u8], Key, Option<V>), BodyError> {
        let beginning = self.lengths.beginning(before, scan.rest());
        for length in self.lengths.guesses(beginning, wrong) {
            let Some(json) = scan.rest().get(..length) else { continue };
            let key = known.key(api as u64, json);
            if let Some(seen) = known.get_guessed(key) {
                scan.skip(length);
                return Ok((json, key, Some(seen)));
            }
            wrong.add(length);
        }
        let json = scan.value()?;
        self.lengths.keep(beginning, json.len());
        let key = known.key(api as u64, json);
        Ok((json, key, known.get(key)))
    }

    /// Adds the messages that these entries are together: those that `read` adds, unless they were read lately.
    pub(super) fn read(
        &self,
        items: &mut [Item<'_>],
        messages: &mut Vec<Arc<Message>>,
        read: impl FnOnce(&[Item<'_>], &mut Vec<Arc<Message>>) -> Result<(), BodyError>,
    ) -> Result<(), BodyError> {
        let (key, known) = match &mut *items {
            [item] => (item.key, item.own.take()),
            items => {
                let names: Option<Vec<_>> = items.iter().map(|item| Some(item.key?.bytes())).collect();
                let key =
                    names.map(|names| self.entries.key(Api::ResponsesTurn as u64, names.as_flattened()));
                (key, key.and_then(|key| self.entries.get(key)?.own))
            }
        };
        match known {
            Some(Own::One(message)) => messages.push(message),
            Some(Own::Several(several)) => messages.extend_from_slice(&several),
            None => {
                let before = messages.len();
                read(items, messages)?;
                self.keep(key, items, messages.get(before..).unwrap_or_default());
            }
        }
        Ok(())
    }

    fn keep(&self, key: Option<Key>, items: &[Item<'_>], messages: &[Arc<Message>]) {
        let own = match messages {
            [message] => Own::One(Arc::clone(message)),
            several => Own::Several(several.into()),
        };
        let bytes = messages.iter().map(|message| message.memory_bytes() + size_of_val(message)).sum();
        let joins = items.iter().all(|item| item.joins == Some(true));
        let Some(key) = key else { return };
        self.entries.insert(key, Seen { joins, own: Some(own) }, bytes);
        if items.len() > 1 {
            for key in items.iter().filter(|item| item.own.is_none()).filter_map(|item| item.key) {
                self.entries.insert(key, Seen { joins, own: None }, 0);
            }
        }
    }
}

#[cfg(test)]
mod tests;
