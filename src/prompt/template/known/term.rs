//! Expressions that are worked out here, without minijinja's machine, and with the very operations that it would use.

use crate::prompt::template::values::Fields;
use minijinja::machinery::ast::{BinOpKind, CompareOpKind};
use minijinja::value::{Value, ValueKind};
use smallvec::SmallVec;
use std::borrow::Cow;

/// An expression over what surrounds one turn of a loop.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Term {
    Const(Value),
    /// A variable from outside of the loop, by its place among [`super::Site::names`].
    Outer(usize),
    /// The message that the loop is at.
    Message,
    Loop(LoopField),
    Attr(Box<Self>, String),
    Item(Box<Self>, Box<Self>),
    Length(Box<Self>),
    Is(Box<Self>, Kind),
    Not(Box<Self>),
    And(Box<Self>, Box<Self>),
    Or(Box<Self>, Box<Self>),
    Compare(Box<Self>, Comparison, Box<Self>),
    Add(Box<Self>, Box<Self>),
    Subtract(Box<Self>, Box<Self>),
}

/// A test without arguments.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Defined,
    Undefined,
    None,
    Text,
}

impl Kind {
    pub(super) fn of_test(name: &str) -> Option<Self> {
        Some(match name {
            "defined" => Self::Defined,
            "undefined" => Self::Undefined,
            "none" => Self::None,
            "string" => Self::Text,
            _ => return None,
        })
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Comparison {
    Equal,
    Unequal,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

impl Comparison {
    pub(super) fn of(op: CompareOpKind) -> Option<Self> {
        Some(match op {
            CompareOpKind::Eq => Self::Equal,
            CompareOpKind::Ne => Self::Unequal,
            CompareOpKind::Lt => Self::Less,
            CompareOpKind::Lte => Self::LessOrEqual,
            CompareOpKind::Gt => Self::Greater,
            CompareOpKind::Gte => Self::GreaterOrEqual,
            CompareOpKind::In | CompareOpKind::NotIn => return None,
        })
    }

    pub(super) fn of_operator(op: BinOpKind) -> Option<Self> {
        Some(match op {
            BinOpKind::Eq => Self::Equal,
            BinOpKind::Ne => Self::Unequal,
            BinOpKind::Lt => Self::Less,
            BinOpKind::Lte => Self::LessOrEqual,
            BinOpKind::Gt => Self::Greater,
            BinOpKind::Gte => Self::GreaterOrEqual,
            _ => return None,
        })
    }
}

/// An attribute of the variable `loop`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LoopField {
    Index,
    Index0,
    Length,
    Revindex,
    Revindex0,
    First,
    Last,
    /// The messages beside it.
    Previtem,
    Nextitem,
}

impl LoopField {
    pub(super) fn of_name(name: &str) -> Option<Self> {
        Some(match name {
            "index" => Self::Index,
            "index0" => Self::Index0,
            "length" => Self::Length,
            "revindex" => Self::Revindex,
            "revindex0" => Self::Revindex0,
            "first" => Self::First,
            "last" => Self::Last,
            "previtem" => Self::Previtem,
            "nextitem" => Self::Nextitem,
            _ => return None,
        })
    }
}

/// What surrounds one turn of a loop.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<'p> {
    pub(super) outer: &'p [Value],
    pub(super) items: &'p [Value],
    pub(super) index: usize,
    /// Whether the loop knows how many items it has: not those of a generator.
    pub(super) is_sized: bool,
}

impl Place<'_> {
    fn is_last(&self) -> bool {
        self.is_sized && self.index + 1 == self.items.len()
    }

    /// As minijinja's own `loop` has it.
    pub(super) fn field(&self, field: LoopField) -> Value {
        let length = self.is_sized.then_some(self.items.len());
        let rest = length.map(|length| length.saturating_sub(self.index));
        let sized = |number: Option<usize>| number.map_or(Value::UNDEFINED, Value::from);
        let item = |at: Option<usize>| at.and_then(|at| self.items.get(at)).cloned().unwrap_or_default();
        match field {
            LoopField::Index => Value::from(self.index + 1),
            LoopField::Index0 => Value::from(self.index),
            LoopField::Length => sized(length),
            LoopField::Revindex => sized(rest),
            LoopField::Revindex0 => sized(rest.map(|rest| rest.saturating_sub(1))),
            LoopField::First => Value::from(self.index == 0),
            LoopField::Last => Value::from(self.is_last()),
            LoopField::Previtem => item(self.index.checked_sub(1)),
            LoopField::Nextitem => item(self.index.checked_add(1)),
        }
    }
}

impl Term {
    /// Whether the value depends on nothing but the message.
    pub(super) fn is_of_the_message(&self) -> bool {
        match self {
            Self::Const(_) | Self::Message => true,
            Self::Outer(_) | Self::Loop(_) => false,
            Self::Attr(of, _) | Self::Length(of) | Self::Is(of, _) | Self::Not(of) => of.is_of_the_message(),
            Self::Item(a, b)
            | Self::And(a, b)
            | Self::Or(a, b)
            | Self::Compare(a, _, b)
            | Self::Add(a, b)
            | Self::Subtract(a, b) => a.is_of_the_message() && b.is_of_the_message(),
        }
    }

    /// Whether the value is certainly a whole number.
    pub(super) fn is_number(&self) -> bool {
        match self {
            Self::Const(value) => value.is_integer(),
            Self::Loop(field) => matches!(field, LoopField::Index | LoopField::Index0),
            Self::Length(_) => true,
            Self::Add(a, b) | Self::Subtract(a, b) => a.is_number() && b.is_number(),
            _ => false,
        }
    }

    /// The value; `None` where the template would fail, or what it would make of it is not certain.
    pub(super) fn value<'p>(&'p self, place: &Place<'p>) -> Option<Cow<'p, Value>> {
        let owned = |value: Value| Some(Cow::Owned(value));
        match self {
            Self::Const(value) => Some(Cow::Borrowed(value)),
            Self::Outer(at) => place.outer.get(*at).map(Cow::Borrowed),
            Self::Message => place.items.get(place.index).map(Cow::Borrowed),
            Self::Loop(field) => owned(place.field(*field)),
            Self::Attr(of, name) => {
                let of = of.value(place)?;
                // Most are of messages.
                if let Cow::Borrowed(of) = of
                    && let Some(value) =
                        of.downcast_object_ref::<Fields>().and_then(|fields| fields.field(name))
                {
                    return Some(Cow::Borrowed(value));
                }
                owned(of.get_attr(name).ok()?)
            }
            Self::Item(of, key) => owned(of.value(place)?.get_item(&*key.value(place)?).ok()?),
            Self::Length(of) => owned(Value::from(of.value(place)?.len()?)),
            Self::Is(..) | Self::Not(_) | Self::Compare(..) => owned(Value::from(self.truth(place)?)),
            Self::And(a, b) => match a.value(place)? {
                a if a.is_true() => b.value(place),
                a => Some(a),
            },
            Self::Or(a, b) => match a.value(place)? {
                a if a.is_true() => Some(a),
                _ => b.value(place),
            },
            Self::Add(a, b) => {
                let (a, b) = (integer(&*a.value(place)?)?, integer(&*b.value(place)?)?);
                owned(Value::from(a.checked_add(b)?))
            }
            Self::Subtract(a, b) => {
                let (a, b) = (integer(&*a.value(place)?)?, integer(&*b.value(place)?)?);
                owned(Value::from(a.checked_sub(b)?))
            }
        }
    }

    /// Whether the value is true.
    pub(super) fn truth(&self, place: &Place<'_>) -> Option<bool> {
        Some(match self {
            Self::Not(of) => !of.truth(place)?,
            Self::And(a, b) => a.truth(place)? && b.truth(place)?,
            Self::Or(a, b) => a.truth(place)? || b.truth(place)?,
            Self::Is(of, kind) => {
                let found = of.value(place)?.kind();
                match kind {
                    Kind::Defined => found != ValueKind::Undefined,
                    Kind::Undefined => found == ValueKind::Undefined,
                    Kind::None => found == ValueKind::None,
                    Kind::Text => found == ValueKind::String,
                }
            }
            Self::Compare(a, comparison, b) => {
                let (a, b) = (a.value(place)?, b.value(place)?);
                let (a, b) = (&*a, &*b);
                match comparison {
                    Comparison::Equal => a == b,
                    Comparison::Unequal => a != b,
                    Comparison::Less => a < b,
                    Comparison::LessOrEqual => a <= b,
                    Comparison::Greater => a > b,
                    Comparison::GreaterOrEqual => a >= b,
                }
            }
            Self::Loop(LoopField::First) => place.index == 0,
            Self::Loop(LoopField::Last) => place.is_last(),
            of => of.value(place)?.is_true(),
        })
    }
}

/// A whole number, of which sums are the same in every language.
fn integer(value: &Value) -> Option<i64> {
    value.as_i64().filter(|_| value.is_integer())
}

/// Some values, one after the other, so that other values have other bytes.
pub(super) type Bytes = SmallVec<[u8; 96]>;

/// A longer text is no word that a template decides by.
const LONGEST_WORD: usize = 256;

/// Appends a value; `None` for one that is not known by a few bytes.
pub(super) fn append(bytes: &mut Bytes, value: &Value) -> Option<()> {
    match value.kind() {
        ValueKind::Undefined => bytes.push(0),
        ValueKind::None => bytes.push(1),
        ValueKind::Bool => bytes.push(2 + u8::from(value.is_true())),
        ValueKind::Number if value.is_integer() => {
            bytes.push(4);
            bytes.extend_from_slice(&value.as_i64()?.to_le_bytes());
        }
        ValueKind::Number => {
            bytes.push(5);
            bytes.extend_from_slice(&f64::try_from(value.clone()).ok()?.to_bits().to_le_bytes());
        }
        ValueKind::String => {
            let word = value.as_str().filter(|word| word.len() <= LONGEST_WORD)?;
            bytes.push(6 + u8::from(value.is_safe()));
            bytes.extend_from_slice(&(word.len() as u16).to_le_bytes());
            bytes.extend_from_slice(word.as_bytes());
        }
        _ => return None,
    }
    Some(())
}
