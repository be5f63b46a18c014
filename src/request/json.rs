//! Small helpers to take typed fields out of a JSON object, as the API's own validation would.

use super::body::BodyError;
use serde_json::{Map, Value};

/// A JSON object in the order in which the client wrote it; of a repeated key the last value counts, as in Python.
pub(super) type Object = Map<String, Value>;

/// An object that is expected to have few fields.
pub(super) fn object() -> Object {
    Object::with_capacity(FEW)
}

/// So many names are read faster than one is hashed; and most fields that there may be are not there.
const FEW: usize = 12;

/// A field.
pub(super) fn get<'o>(object: &'o Object, name: &str) -> Option<&'o Value> {
    if object.len() > FEW {
        object.get(name)
    } else {
        object.iter().find(|(key, _)| *key == name).map(|(_, value)| value)
    }
}

/// Takes a field away; `null` is the same as an absent field.
pub(super) fn take(object: &mut Object, name: &str) -> Option<Value> {
    let field = if object.len() > FEW {
        object.get_mut(name)
    } else {
        object.iter_mut().find(|(key, _)| *key == name).map(|(_, value)| value)
    };
    field.map(Value::take).filter(|value| !value.is_null())
}

/// An optional string.
pub(super) fn take_text(object: &mut Object, name: &'static str) -> Result<Option<String>, BodyError> {
    match take(object, name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(BodyError::Field(name)),
    }
}

/// A boolean; unlike an absent one, `null` is not allowed.
pub(super) fn take_flag(object: &mut Object, name: &'static str, default: bool) -> Result<bool, BodyError> {
    match get(object, name) {
        None => Ok(default),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(_) => Err(BodyError::Field(name)),
    }
}

/// Checks that every number in `value` is known exactly, so that it can be printed as Python would print it.
///
/// The parser turns integers beyond 64 bits, and `-0`, into floats; those no longer tell what the client wrote.
pub(super) fn check_exact(value: &Value) -> Result<(), BodyError> {
    const BEYOND_U64: f64 = 18_446_744_073_709_551_616.0;
    match value {
        Value::Number(number) if number.is_f64() => match number.as_f64() {
            Some(float) if float == 0.0 && float.is_sign_negative() => Err(BodyError::Number),
            // The integer below the least one is the same float as that one.
            Some(float) if float >= BEYOND_U64 || float <= i64::MIN as f64 => Err(BodyError::Number),
            Some(_) => Ok(()),
            None => Err(BodyError::Number),
        },
        Value::Array(items) => items.iter().try_for_each(check_exact),
        Value::Object(fields) => fields.values().try_for_each(check_exact),
        _ => Ok(()),
    }
}

/// Moves the named fields to the front, in the order given.
pub(super) fn put_first(object: &mut Object, names: &[&str]) {
    let mut rest = std::mem::take(object);
    for name in names {
        if let Some((name, value)) = rest.shift_remove_entry(*name) {
            object.insert(name, value);
        }
    }
    object.append(&mut rest);
}

/// What an allocation takes beside what is asked for, in bytes.
pub(super) const ALLOCATION_BYTES: usize = 16;

/// The memory that a value takes, in bytes.
pub(super) fn memory_bytes(value: &Value) -> usize {
    size_of::<Value>() + allocated_bytes(value)
}

/// What is allocated for a value, in bytes.
fn allocated_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => ALLOCATION_BYTES + text.capacity(),
        Value::Array(items) => {
            let inside: usize = items.iter().map(allocated_bytes).sum();
            ALLOCATION_BYTES + items.capacity() * size_of::<Value>() + inside
        }
        Value::Object(fields) => object_bytes(fields),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    }
}

/// What is allocated for an object, in bytes. It has room for more fields than there are, which it does not tell: as much as
/// its table, which has a power of two of places and leaves an eighth of them free.
pub(super) fn object_bytes(fields: &Object) -> usize {
    let places = match fields.len() {
        0 => return 0,
        1..=3 => 4,
        4..=7 => 8,
        many => (many * 8 / 7).next_power_of_two(),
    };
    let room = if places == 4 { 3 } else { places / 8 * 7 };
    // Beside each field is its hash, and in the table its place and a byte.
    let slots = room * (size_of::<(String, Value)>() + 8) + places * 9;
    let inside = fields.iter().map(|(name, value)| ALLOCATION_BYTES + name.len() + allocated_bytes(value));
    2 * ALLOCATION_BYTES + slots + inside.sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_of_few_fields_has_room_for_more() {
        let bytes = |json: &str| memory_bytes(&serde_json::from_str(json).expect("JSON"));
        assert_eq!(bytes("7"), size_of::<Value>());
        assert_eq!(bytes("{}"), size_of::<Value>());
        let field = size_of::<String>() + size_of::<Value>();
        assert!(bytes(r#"{"a": 1}"#) > 3 * field);
        let eight: String = (0..8).map(|at| format!(r#""{at}": 1,"#)).collect();
        let eight = format!("{{{}}}", eight.trim_end_matches(','));
        assert!((14 * field..20 * field).contains(&bytes(&eight)));
    }
}
