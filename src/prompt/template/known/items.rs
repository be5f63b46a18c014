//! What a loop goes over. A conversation's own list of messages is not made values of.

use super::seen::Seen;
use crate::prompt::messages::{Item, List, Prepared};
use minijinja::Error;
use minijinja::value::Value;
use std::sync::Arc;

/// The items of a loop.
#[derive(Debug)]
pub(super) enum Items {
    /// The messages of the conversation.
    List(Arc<List>),
    /// Any others: a part of them, or in another order.
    Values {
        items: Vec<Value>,
        /// Whether the loop knows how many they are: not those of a generator.
        are_counted: bool,
    },
}

impl Items {
    pub(super) fn of(value: &Value) -> Result<Self, Error> {
        if let Some(list) = value.downcast_object::<List>() {
            return Ok(Self::List(list));
        }
        let items = value.try_iter()?;
        let are_counted = matches!(items.size_hint(), (least, Some(most)) if least == most);
        Ok(Self::Values { items: items.collect(), are_counted })
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::List(list) => list.len(),
            Self::Values { items, .. } => items.len(),
        }
    }

    pub(super) const fn are_counted(&self) -> bool {
        matches!(self, Self::List(_) | Self::Values { are_counted: true, .. })
    }

    pub(super) fn get(&self, at: usize) -> Option<Seen<'_>> {
        match self {
            Self::List(list) => list.get(at).map(|_| Seen::Message(list, at)),
            Self::Values { items, .. } => items.get(at).map(Seen::Value),
        }
    }

    /// The message that an item is, if it is one.
    pub(super) fn message(&self, at: usize) -> Option<&Prepared> {
        match self {
            Self::List(list) => list.get(at),
            Self::Values { items, .. } => items.get(at)?.downcast_object_ref::<Item>()?.message(),
        }
    }
}
