//! Expressions that are worked out here, without minijinja's machine, and with the very operations that it would use.

use super::items::Items;
use super::seen::Seen;
use crate::prompt::messages::Field;
use minijinja::machinery::ast::{BinOpKind, CompareOpKind};
use minijinja::value::{Value, ValueKind};
use std::cmp::Ordering;

/// An expression over what surrounds one turn of a loop.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Term {
    Const(Value),
    /// A variable from outside of the loop, by its place among [`super::Site::names`].
    Outer(usize),
    /// What is the same for all messages of a run, by its place among [`super::Site::constants`].
    Constant(usize),
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
    /// Whether the message's role is that word: what most templates decide by.
    RoleIs {
        word: Box<str>,
        /// The same for an item that is no message.
        written: Box<Self>,
    },
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

    pub(super) fn holds(self, a: &Seen<'_>, b: &Seen<'_>) -> bool {
        match (self, a.as_integer(), b.as_integer()) {
            (Self::Equal, None, _) | (Self::Equal, _, None) => a.equals(b),
            (Self::Unequal, None, _) | (Self::Unequal, _, None) => !a.equals(b),
            (_, Some(a), Some(b)) => self.is_of(a.cmp(&b)),
            _ => self.is_of(a.as_value().cmp(&b.as_value())),
        }
    }

    fn is_of(self, order: Ordering) -> bool {
        match self {
            Self::Equal => order.is_eq(),
            Self::Unequal => order.is_ne(),
            Self::Less => order.is_lt(),
            Self::LessOrEqual => order.is_le(),
            Self::Greater => order.is_gt(),
            Self::GreaterOrEqual => order.is_ge(),
        }
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
    /// `None` for those that have no certain value.
    pub(super) constants: &'p [Option<Value>],
    pub(super) items: &'p Items,
    pub(super) index: usize,
}

impl<'p> Place<'p> {
    fn is_last(&self) -> bool {
        self.items.are_counted() && self.index + 1 == self.items.len()
    }

    /// As minijinja's own `loop` has it.
    pub(super) fn field(&self, field: LoopField) -> Seen<'p> {
        let length = self.items.are_counted().then_some(self.items.len());
        let rest = length.map(|length| length.saturating_sub(self.index));
        let sized = |number: Option<usize>| number.map_or(Seen::Undefined, Seen::count);
        let item = |at: Option<usize>| at.and_then(|at| self.items.get(at)).unwrap_or(Seen::Undefined);
        match field {
            LoopField::Index => Seen::count(self.index + 1),
            LoopField::Index0 => Seen::count(self.index),
            LoopField::Length => sized(length),
            LoopField::Revindex => sized(rest),
            LoopField::Revindex0 => sized(rest.map(|rest| rest.saturating_sub(1))),
            LoopField::First => Seen::Flag(self.index == 0),
            LoopField::Last => Seen::Flag(self.is_last()),
            LoopField::Previtem => item(self.index.checked_sub(1)),
            LoopField::Nextitem => item(self.index.checked_add(1)),
        }
    }
}

/// The boxes of a term's operands, two at the most.
macro_rules! operands {
    ($term:expr) => {
        match $term {
            Self::Const(_) | Self::Outer(_) | Self::Constant(_) | Self::Message | Self::Loop(_) => {
                (None, None)
            }
            Self::Attr(of, _)
            | Self::Length(of)
            | Self::Is(of, _)
            | Self::Not(of)
            | Self::RoleIs { written: of, .. } => (Some(of), None),
            Self::Item(a, b)
            | Self::And(a, b)
            | Self::Or(a, b)
            | Self::Compare(a, _, b)
            | Self::Add(a, b)
            | Self::Subtract(a, b) => (Some(a), Some(b)),
        }
    };
}

impl Term {
    /// A comparison of two values.
    pub(super) fn compare(a: Self, comparison: Comparison, b: Self) -> Self {
        let is_role = a.message_field().is_some_and(|name| name == "role");
        let word = match (&b, comparison) {
            (Self::Const(word), Comparison::Equal | Comparison::Unequal) if is_role => word.as_str(),
            _ => None,
        };
        let Some(word) = word.map(Box::from) else {
            return Self::Compare(Box::new(a), comparison, Box::new(b));
        };
        let written = Self::Compare(Box::new(a), Comparison::Equal, Box::new(b));
        let is_equal = Self::RoleIs { word, written: Box::new(written) };
        if comparison == Comparison::Equal { is_equal } else { Self::Not(Box::new(is_equal)) }
    }

    /// The name of the message's field that the value is.
    fn message_field(&self) -> Option<&str> {
        match self {
            Self::Attr(of, name) if matches!(**of, Self::Message) => Some(name),
            Self::Item(of, name) if matches!(**of, Self::Message) => match &**name {
                Self::Const(name) => name.as_str(),
                _ => None,
            },
            _ => None,
        }
    }

    /// What the value is worked out of.
    fn operands(&self) -> impl Iterator<Item = &Self> {
        let (a, b) = operands!(self);
        a.into_iter().chain(b).map(|operand| &**operand)
    }

    /// The same, to be changed.
    fn operands_mut(&mut self) -> impl Iterator<Item = &mut Self> {
        let (a, b) = operands!(self);
        a.into_iter().chain(b).map(|operand| &mut **operand)
    }

    /// Whether the value depends on nothing but the message.
    pub(super) fn is_of_the_message(&self) -> bool {
        match self {
            Self::Const(_) | Self::Message => true,
            Self::Outer(_) | Self::Constant(_) | Self::Loop(_) => false,
            made => made.operands().all(Self::is_of_the_message),
        }
    }

    /// Puts a [`Term::Constant`] in the place of all that is the same for all messages of a run in which nothing outside
    /// of the loop changes.
    pub(super) fn take_constants(&mut self, constants: &mut Vec<Self>) {
        if !self.is_of_the_run() {
            self.operands_mut().for_each(|operand| operand.take_constants(constants));
        } else if self.operands().next().is_some() {
            let at = constants.iter().position(|known| known == self).unwrap_or(constants.len());
            let taken = std::mem::replace(self, Self::Constant(at));
            if at == constants.len() {
                constants.push(taken);
            }
        }
    }

    fn is_of_the_run(&self) -> bool {
        match self {
            Self::Const(_) | Self::Outer(_) | Self::Constant(_) => true,
            Self::Message | Self::Loop(_) => false,
            made => made.operands().all(Self::is_of_the_run),
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
    pub(super) fn value<'p>(&'p self, place: &Place<'p>) -> Option<Seen<'p>> {
        Some(match self {
            Self::Const(value) => Seen::Value(value),
            Self::Outer(at) => Seen::Value(place.outer.get(*at)?),
            Self::Constant(at) => Seen::Value(place.constants.get(*at)?.as_ref()?),
            Self::Message => place.items.get(place.index)?,
            Self::Loop(field) => place.field(*field),
            Self::Attr(of, name) => of.value(place)?.attr(name)?,
            Self::Item(of, key) => of.value(place)?.item(&key.value(place)?)?,
            Self::Length(of) => of.value(place)?.length()?,
            Self::Is(..) | Self::Not(_) | Self::Compare(..) | Self::RoleIs { .. } => {
                Seen::Flag(self.truth(place)?)
            }
            Self::And(a, b) => match a.value(place)? {
                a if a.is_true() => b.value(place)?,
                a => a,
            },
            Self::Or(a, b) => match a.value(place)? {
                a if a.is_true() => a,
                _ => b.value(place)?,
            },
            Self::Add(a, b) => {
                let (a, b) = (a.value(place)?.as_integer()?, b.value(place)?.as_integer()?);
                Seen::Integer(a.checked_add(b)?)
            }
            Self::Subtract(a, b) => {
                let (a, b) = (a.value(place)?.as_integer()?, b.value(place)?.as_integer()?);
                Seen::Integer(a.checked_sub(b)?)
            }
        })
    }

    /// The value where it is a constant text or one of the message's: these are compared most.
    fn text<'p>(&'p self, place: &Place<'p>) -> Option<&'p str> {
        let name = match self {
            Self::Const(text) => return text.as_str(),
            other => other.message_field()?,
        };
        match place.items.message(place.index)?.field(name) {
            Field::Text(text) => Some(text),
            _ => None,
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
            Self::RoleIs { word, written } => match place.items.message(place.index) {
                Some(message) => message.role() == &**word,
                None => written.truth(place)?,
            },
            Self::Compare(a, comparison, b) => match (comparison, a.text(place), b.text(place)) {
                (Comparison::Equal, Some(a), Some(b)) => a == b,
                (Comparison::Unequal, Some(a), Some(b)) => a != b,
                _ => comparison.holds(&a.value(place)?, &b.value(place)?),
            },
            of => of.value(place)?.is_true(),
        })
    }
}
