//! Entries of lists of messages that were read lately.
//!
//! Each turn of a conversation sends all messages again that came before. They are known by their JSON, so that of a
//! long body only what is new has to be read.

use super::body::BodyError;
use super::conversation::Message;
use super::lengths::Lengths;
use super::scan::Scan;
use crate::recent::{CacheStats, Key, Recent};
use std::sync::Arc;

/// Enough that threads rarely wait for each other, and that a message may be long.
const SHARDS: usize = 8;

/// The part of the memory that is for the lengths of entries: of more than there are messages in the rest.
const LENGTHS_SHARE: usize = 32;

/// The messages that were read lately, by their JSON; bounded in bytes.
#[derive(Debug)]
pub struct SeenMessages {
    entries: Recent<Seen>,
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

impl SeenMessages {
    /// At most `capacity_bytes` of messages.
    #[must_use]
    pub fn new(capacity_bytes: usize) -> Self {
        let lengths = Lengths::new(capacity_bytes / LENGTHS_SHARE);
        Self { entries: Recent::new(capacity_bytes - lengths.memory_bytes(), SHARDS), lengths }
    }

    /// What is kept and how often it helped.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        let stats = self.entries.stats();
        CacheStats { bytes: stats.bytes + self.lengths.memory_bytes(), ..stats }
    }

    /// Takes the next entry of a list, which follows `before`. The end of a known one is not looked for: where an object
    /// ends is told by its own bytes.
    pub(super) fn item<'j>(
        &self,
        api: Api,
        before: Option<&Item<'_>>,
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
        let beginning = self.lengths.beginning(before, scan.rest());
        for length in self.lengths.guesses(beginning) {
            let Some(json) = scan.rest().get(..length) else { continue };
            let key = self.entries.key(api as u64, json);
            if let Some(seen) = self.entries.get_guessed(key) {
                scan.skip(length);
                return Ok(item(json, key, Some(seen)));
            }
        }
        let json = scan.value()?;
        self.lengths.keep(beginning, json.len());
        let key = self.entries.key(api as u64, json);
        Ok(item(json, key, self.entries.get(key)))
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
