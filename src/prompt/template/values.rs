//! JSON → the values that templates work with.

use minijinja::Value;
use minijinja::value::{DynObject, Enumerator, Object, ObjectRepr};
use std::sync::Arc;

/// The value of some JSON. Objects behave like Python's dictionaries.
pub(in crate::prompt) fn from_json(json: &serde_json::Value) -> Value {
    match json {
        serde_json::Value::Null => Value::from(()),
        serde_json::Value::Bool(flag) => Value::from(*flag),
        serde_json::Value::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(integer), _, _) => Value::from(integer),
            (None, Some(integer), _) => Value::from(integer),
            (None, None, float) => Value::from(float.unwrap_or(f64::NAN)),
        },
        serde_json::Value::String(text) => Value::from(text.as_str()),
        serde_json::Value::Array(items) => Value::from(items.iter().map(from_json).collect::<Vec<_>>()),
        serde_json::Value::Object(fields) => {
            dict(fields.iter().map(|(name, value)| (name.as_str(), from_json(value))))
        }
    }
}

/// A dictionary of named values.
pub(in crate::prompt) fn dict<'n>(fields: impl IntoIterator<Item = (&'n str, Value)>) -> Value {
    let map = Value::from_pairs(fields);
    map.as_object().map(|map| Value::from_object(Dict(map.clone()))).unwrap_or(map)
}

/// A dictionary whose methods hide fields of the same name: in Jinja `schema.items` is the method `dict.items`, and only
/// `schema["items"]` is the field.
#[derive(Debug)]
struct Dict(DynObject);

impl Object for Dict {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Map
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get_value(key)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        method(key).or_else(|| self.0.get_value_by_str(key))
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.0.enumerate()
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        self.0.enumerator_len()
    }
}

/// The method of that name that every dictionary has.
pub(in crate::prompt) fn method(key: &str) -> Option<Value> {
    let is_one = matches!(
        key,
        "items"
            | "keys"
            | "values"
            | "get"
            | "pop"
            | "copy"
            | "clear"
            | "update"
            | "setdefault"
            | "popitem"
            | "fromkeys"
    );
    is_one.then(|| Value::from_object(Method))
}

/// A method that is not called: something that is true, has no fields and no stable text.
#[derive(Debug)]
struct Method;

impl Object for Method {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }
}
