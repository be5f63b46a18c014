//! The variables of a template: mostly few, each looked at once or twice, so they are not worth a table.

use minijinja::value::{Object, ObjectRepr, Value};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::sync::Arc;

/// Variables that are the same in all conversations of a model.
pub(super) type Shared = Arc<[(String, Value)]>;

/// More variables, which only a client's arguments can be, are looked up by a search: a template asks for some at each message.
const FEW: usize = 24;

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

    /// All of them, as the template sees them.
    pub(super) fn into_value(mut self) -> Value {
        if self.are_many() {
            // Equal names stay in their order.
            self.own.sort_by(|(a, _), (b, _)| a.cmp(b));
        }
        Value::from_object(self)
    }

    fn are_many(&self) -> bool {
        self.own.len() > FEW
    }

    fn own(&self, key: &str) -> Option<&Value> {
        let found = if self.are_many() {
            let behind = self.own.partition_point(|(name, _)| **name <= *key);
            self.own.get(behind.checked_sub(1)?).filter(|(name, _)| name == key)
        } else {
            self.own.iter().rev().find(|(name, _)| name == key)
        };
        found.map(|(_, value)| value)
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
        let shared = || self.shared.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value);
        self.own(key).or_else(shared).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(variables: &Value, name: &str) -> Option<i64> {
        variables.get_attr(name).ok()?.as_i64()
    }

    #[test]
    fn the_last_of_a_name_counts_however_many_there_are() {
        let shared: Shared = [("bos".to_owned(), Value::from(-1)), ("x1".to_owned(), Value::from(-2))].into();
        for count in [0, 2, FEW / 2, FEW / 2 + 1, 1000] {
            let mut variables = Variables::new(&shared);
            for value in 0..2 * count {
                variables.set(format!("x{}", value % count), Value::from(value));
            }
            let variables = variables.into_value();
            assert_eq!(get(&variables, "bos"), Some(-1));
            assert_eq!(get(&variables, "y"), None);
            assert_eq!(get(&variables, "x1"), Some(if count > 1 { count as i64 + 1 } else { -2 }));
            assert!((0..count).all(|at| get(&variables, &format!("x{at}")) == Some((count + at) as i64)));
        }
    }

    #[test]
    fn of_many_one_is_found_by_a_search() {
        let shared: Shared = Arc::new([]);
        let mut variables = Variables::new(&shared);
        for name in 0..1000 {
            variables.set(format!("x{name}"), Value::from(name));
        }
        let variables = variables.into_value();
        let own = &variables.downcast_object_ref::<Variables>().expect("variables").own;
        assert!(own.is_sorted_by(|(a, _), (b, _)| a < b));
    }
}
