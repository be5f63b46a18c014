//! The variables of a template: few, each looked at once or twice, so they are not worth a table.

use minijinja::value::{Object, ObjectRepr, Value};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::sync::Arc;

/// Variables that are the same in all conversations of a model.
pub(super) type Shared = Arc<[(String, Value)]>;

/// The variables of a template; of equal names the later one counts, and one that is set here before a shared one.
#[derive(Debug)]
pub(super) struct Variables {
    shared: Shared,
    own: SmallVec<[(Cow<'static, str>, Value); 8]>,
}

impl Variables {
    pub(super) fn new(shared: &Shared) -> Self {
        Self { shared: Arc::clone(shared), own: SmallVec::new() }
    }

    pub(super) fn set(&mut self, name: impl Into<Cow<'static, str>>, value: Value) {
        self.own.push((name.into(), value));
    }
}

impl Object for Variables {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Map
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        let own = self.own.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value);
        let shared = || self.shared.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value);
        own.or_else(shared).cloned()
    }
}
