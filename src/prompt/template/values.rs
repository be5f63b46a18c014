//! JSON → the values that templates work with.

use super::python::Json;
use minijinja::value::{DynObject, Enumerator, Object, ObjectRepr};
use minijinja::{Error, Value};
use std::sync::{Arc, OnceLock};

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

/// The value of a tool. Other conversations have it too, and templates write it as JSON each time: this text is kept, of the
/// tool and of its function.
pub(super) fn of_tool(json: &serde_json::Value) -> Value {
    with_text(
        json,
        |name, value| {
            if name == "function" { with_text(value, |_, v| from_json(v)) } else { from_json(value) }
        },
    )
}

/// The value of an object that keeps its text.
fn with_text(json: &serde_json::Value, field: impl Fn(&str, &serde_json::Value) -> Value) -> Value {
    let Some(fields) = json.as_object() else { return from_json(json) };
    dict_with(fields.iter().map(|(name, value)| (name.as_str(), field(name, value))), Some(OnceLock::new()))
}

/// A dictionary of named values.
pub(in crate::prompt) fn dict<'n>(fields: impl IntoIterator<Item = (&'n str, Value)>) -> Value {
    dict_with(fields, None)
}

fn dict_with<'n>(
    fields: impl IntoIterator<Item = (&'n str, Value)>,
    text: Option<OnceLock<(Json, Arc<str>)>>,
) -> Value {
    let map = Value::from_pairs(fields);
    map.as_object().map(|map| Value::from_object(Dict { map: map.clone(), text })).unwrap_or(map)
}

/// The JSON of a value, written as `json` says, from where it is kept if it is.
pub(super) fn to_json(value: &Value, json: &Json) -> Result<Value, Error> {
    let kept = value.downcast_object_ref::<Dict>().and_then(|dict| dict.text.as_ref());
    if let Some((_, text)) = kept.and_then(OnceLock::get).filter(|(known, _)| known == json) {
        return Ok(Value::from(Arc::clone(text)));
    }
    let text: Arc<str> = json.dumps(value)?.into();
    if let Some(kept) = kept {
        // A template writes all tools alike. Whoever was first is kept.
        let _ = kept.set((json.clone(), Arc::clone(&text)));
    }
    Ok(Value::from(text))
}

/// A dictionary whose methods hide fields of the same name: in Jinja `schema.items` is the method `dict.items`, and only
/// `schema["items"]` is the field.
#[derive(Debug)]
struct Dict {
    map: DynObject,
    /// Its JSON, where that is to be kept, and how it is written.
    text: Option<OnceLock<(Json, Arc<str>)>>,
}

impl Object for Dict {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Map
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.map.get_value(key)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        method(key).or_else(|| self.map.get_value_by_str(key))
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.map.enumerate()
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        self.map.enumerator_len()
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_text_of_a_tool_is_kept_as_the_template_writes_it() {
        let json = json!({ "type": "function", "function": { "name": "f", "parameters": { "b": 1.0, "a": ["é"] } } });
        let (tool, plain) = (of_tool(&json), from_json(&json));
        let formats =
            [Json::default(), Json { indent: Some("  ".to_owned()), ..Json::default() }, Json::default()];
        let text = |value: &Value, format: &Json| to_json(value, format).expect("JSON").to_string();
        let function = |value: &Value| value.get_item(&"function".into()).expect("a field");
        for format in &formats {
            for _ in 0..2 {
                assert_eq!(text(&tool, format), text(&plain, format));
                assert_eq!(text(&function(&tool), format), text(&function(&plain), format));
            }
        }
        let kept = |value: &Value| {
            let dict = value.downcast_object_ref::<Dict>().expect("a dictionary");
            dict.text.as_ref().and_then(OnceLock::get).map(|(format, _)| format.clone())
        };
        assert_eq!((kept(&tool), kept(&function(&tool))), (Some(Json::default()), Some(Json::default())));
        assert_eq!(kept(&plain), None);
        assert_eq!(tool.to_string(), plain.to_string());
    }
}
