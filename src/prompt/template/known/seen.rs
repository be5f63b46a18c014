//! Values as terms have them: few need one of minijinja's to be made.

use crate::prompt::messages::{Field, Item, List, Prepared};
use crate::prompt::template::values;
use minijinja::value::{Value, ValueKind};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::sync::Arc;

/// A value; what is done with it has the result that minijinja has.
#[derive(Clone, Debug)]
pub(super) enum Seen<'p> {
    Undefined,
    Flag(bool),
    Integer(i64),
    /// A text that is not marked as safe.
    Text(&'p str),
    Value(&'p Value),
    Made(Value),
    /// One of a conversation's messages.
    Message(&'p Arc<List>, usize),
}

impl<'p> Seen<'p> {
    /// A number of items.
    pub(super) fn count(items: usize) -> Self {
        i64::try_from(items).map_or_else(|_| Self::Made(Value::from(items)), Self::Integer)
    }

    /// As one of minijinja's.
    pub(super) fn as_value(&self) -> Cow<'_, Value> {
        Cow::Owned(match self {
            Self::Undefined => Value::UNDEFINED,
            Self::Flag(flag) => Value::from(*flag),
            Self::Integer(number) => Value::from(*number),
            Self::Text(text) => Value::from(*text),
            Self::Value(value) => return Cow::Borrowed(value),
            Self::Made(value) => return Cow::Borrowed(value),
            Self::Message(list, at) => list.item(*at).unwrap_or_default(),
        })
    }

    pub(super) fn kind(&self) -> ValueKind {
        match self {
            Self::Undefined => ValueKind::Undefined,
            Self::Flag(_) => ValueKind::Bool,
            Self::Integer(_) => ValueKind::Number,
            Self::Text(_) => ValueKind::String,
            Self::Value(value) => value.kind(),
            Self::Made(value) => value.kind(),
            Self::Message(..) => ValueKind::Map,
        }
    }

    pub(super) fn is_true(&self) -> bool {
        match self {
            Self::Undefined => false,
            Self::Flag(flag) => *flag,
            Self::Integer(number) => *number != 0,
            Self::Text(text) => !text.is_empty(),
            Self::Value(value) => value.is_true(),
            Self::Made(value) => value.is_true(),
            Self::Message(..) => true,
        }
    }

    /// A whole number, of which sums are the same in every language.
    pub(super) fn as_integer(&self) -> Option<i64> {
        // minijinja makes an error with a text of what is no number.
        let integer = |value: &Value| if value.is_integer() { value.as_i64() } else { None };
        match self {
            Self::Integer(number) => Some(*number),
            Self::Value(value) => integer(value),
            Self::Made(value) => integer(value),
            _ => None,
        }
    }

    fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            Self::Value(value) => value.as_str(),
            Self::Made(value) => value.as_str(),
            _ => None,
        }
    }

    pub(super) fn equals(&self, other: &Self) -> bool {
        match (self.as_text(), other.as_text()) {
            (Some(one), Some(other)) => one == other,
            _ => self.as_value() == other.as_value(),
        }
    }

    /// An attribute; `None` where the template would fail.
    pub(super) fn attr(self, name: &str) -> Option<Self> {
        match self.message() {
            Some(message) => Some(
                Self::of_field(message.field(name))
                    .unwrap_or_else(|| values::method(name).map_or(Self::Undefined, Self::Made)),
            ),
            None => self.as_value().get_attr(name).ok().map(Self::Made),
        }
    }

    /// An item; `None` where the template would fail.
    pub(super) fn item(self, key: &Self) -> Option<Self> {
        match (self.message(), key.as_text()) {
            (Some(message), Some(name)) => {
                Some(Self::of_field(message.field(name)).unwrap_or(Self::Undefined))
            }
            _ => self.as_value().get_item(&key.as_value()).ok().map(Self::Made),
        }
    }

    fn message(&self) -> Option<&'p Prepared> {
        match self {
            Self::Message(list, at) => list.get(*at),
            Self::Value(value) => value.downcast_object_ref::<Item>()?.message(),
            _ => None,
        }
    }

    fn of_field(field: Field<'p>) -> Option<Self> {
        match field {
            Field::Text(text) => Some(Self::Text(text)),
            Field::Value(value) => Some(Self::Value(value)),
            Field::Absent => None,
        }
    }

    /// The number of items or characters.
    pub(super) fn length(&self) -> Option<Self> {
        self.as_value().len().map(Self::count)
    }
}

/// Some values, one after the other, so that other values have other bytes.
pub(super) type Bytes = SmallVec<[u8; 96]>;

/// A longer text is no word that a template decides by.
const LONGEST_WORD: usize = 256;

/// Appends a value; `None` for one that is not known by a few bytes.
pub(super) fn append(bytes: &mut Bytes, value: &Seen<'_>) -> Option<()> {
    match value.kind() {
        ValueKind::Undefined => bytes.push(0),
        ValueKind::None => bytes.push(1),
        ValueKind::Bool => bytes.push(2 + u8::from(value.is_true())),
        ValueKind::Number => match value.as_integer() {
            Some(number) => {
                bytes.push(4);
                bytes.extend_from_slice(&number.to_le_bytes());
            }
            None if value.as_value().is_integer() => return None,
            None => {
                bytes.push(5);
                let number = f64::try_from(value.as_value().into_owned()).ok()?;
                bytes.extend_from_slice(&number.to_bits().to_le_bytes());
            }
        },
        ValueKind::String => {
            let word = value.as_text().filter(|word| word.len() <= LONGEST_WORD)?;
            let is_safe = !matches!(value, Seen::Text(_)) && value.as_value().is_safe();
            bytes.push(6 + u8::from(is_safe));
            bytes.extend_from_slice(&(word.len() as u16).to_le_bytes());
            bytes.extend_from_slice(word.as_bytes());
        }
        _ => return None,
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::template::known::term::Comparison;

    const WORD: &str = "a";

    /// Values of every form that a term may meet, each with what minijinja has in its place.
    fn pairs(values: &[Value]) -> Vec<(Seen<'_>, Value)> {
        let own = [
            Seen::Undefined,
            Seen::Flag(true),
            Seen::Flag(false),
            Seen::Integer(0),
            Seen::Integer(-7),
            Seen::Integer(1),
            Seen::Text(WORD),
            Seen::Text(""),
        ];
        let own = own.into_iter().map(|seen| (seen.clone(), seen.as_value().into_owned()));
        let borrowed = values.iter().map(|value| (Seen::Value(value), value.clone()));
        let made = values.iter().map(|value| (Seen::Made(value.clone()), value.clone()));
        own.chain(borrowed).chain(made).collect()
    }

    #[test]
    fn every_operation_has_the_result_of_minijinja() {
        use Comparison::{Equal, Greater, GreaterOrEqual, Less, LessOrEqual, Unequal};
        let values = [
            Value::UNDEFINED,
            Value::from(()),
            Value::from(true),
            Value::from(1),
            Value::from(1.0),
            Value::from(0.5),
            Value::from(i128::MAX),
            Value::from(""),
            Value::from("a"),
            Value::from("b"),
            Value::from_safe_string("a".to_owned()),
            Value::from(vec![1, 2]),
            values::dict([("a", Value::from(1))]),
        ];
        let all = pairs(&values);
        for (seen, value) in &all {
            assert_eq!(seen.kind(), value.kind());
            assert_eq!(seen.is_true(), value.is_true());
            assert_eq!(seen.as_integer(), value.as_i64().filter(|_| value.is_integer()));
            assert_eq!(
                seen.length().and_then(|length| length.as_integer()),
                value.len().map(|len| len as i64)
            );
            let attr = seen.clone().attr("a").map(|seen| seen.as_value().into_owned());
            assert_eq!(attr, value.get_attr("a").ok(), "{value:?}");
            for (other, its_value) in &all {
                assert_eq!(seen.equals(other), value == its_value, "{value:?} {its_value:?}");
                for (comparison, holds) in [
                    (Equal, value == its_value),
                    (Unequal, value != its_value),
                    (Less, value < its_value),
                    (LessOrEqual, value <= its_value),
                    (Greater, value > its_value),
                    (GreaterOrEqual, value >= its_value),
                ] {
                    assert_eq!(
                        comparison.holds(seen, other),
                        holds,
                        "{comparison:?} {value:?} {its_value:?}"
                    );
                }
                let item = seen.clone().item(other).map(|seen| seen.as_value().into_owned());
                assert_eq!(item, value.get_item(its_value).ok(), "{value:?} {its_value:?}");
            }
        }
    }

    #[test]
    fn only_equal_values_have_equal_bytes() {
        let values =
            [Value::from(()), Value::from(1.0), Value::from("a"), Value::from_safe_string("a".to_owned())];
        let bytes = |seen: &Seen<'_>| {
            let mut bytes = Bytes::new();
            append(&mut bytes, seen).map(|()| bytes)
        };
        for (seen, value) in pairs(&values) {
            for (other, its_value) in pairs(&values) {
                let is_same = value.kind() == its_value.kind()
                    && value == its_value
                    && value.is_safe() == its_value.is_safe()
                    && value.is_integer() == its_value.is_integer();
                assert_eq!(bytes(&seen) == bytes(&other), is_same, "{value:?} {its_value:?}");
            }
        }
        assert_eq!(bytes(&Seen::Text(&"a".repeat(LONGEST_WORD + 1))), None);
        assert_eq!(bytes(&Seen::Made(Value::from(vec![1]))), None);
    }
}
