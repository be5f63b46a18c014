//! What holds in the end: each key with its value, and where that came from.

use super::{
    Place, Span,
    knobs::{self, Bounded},
    raw::RawConfig,
};
use serde_json::Value;
use std::fmt;
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

/// A key and its value.
#[derive(Clone, PartialEq, Debug)]
pub struct Setting {
    /// The key. Pools and replicas are told apart by their names: `pool[be_llm].replica[s1].http`.
    pub key: String,
    /// The value; `null` where nothing is set and [`Setting::unset`] holds.
    pub value: Value,
    /// What holds where nothing is set.
    pub unset: &'static str,
    /// Where the value came from.
    pub origin: Origin,
}

/// Where a value came from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Origin {
    /// Nothing sets it.
    Default,
    /// A line of the file.
    File(Place),
    /// An environment variable, by its name.
    Variable(String),
    /// A flag.
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(place) => place.fmt(f),
            Self::Variable(name) | Self::Flag(name) => f.write_str(name),
        }
    }
}

impl Setting {
    /// Whether it is one of the many of a list of replicas.
    #[must_use]
    pub fn is_of_replica(&self) -> bool {
        self.key.contains("].replica[") || self.key.contains("].override[")
    }

    /// The value as a person reads it.
    #[must_use]
    pub fn text(&self) -> String {
        match &self.value {
            Value::Null => self.unset.replace('`', ""),
            Value::String(text) => text.clone(),
            Value::Array(list) if list.is_empty() => "none".to_owned(),
            Value::Object(table) if table.is_empty() => "none".to_owned(),
            value => value.to_string(),
        }
    }
}

/// The settings of a configuration that was read from `file`, with what else set something laid over it.
pub(super) fn settings(
    raw: &RawConfig,
    file: &DeTable<'_>,
    origin: &impl Fn(Span) -> Origin,
) -> Vec<Setting> {
    let mut walk = Walk { origin, settings: Vec::new() };
    // What cannot be written as JSON is not in it.
    if let Ok(Value::Object(sections)) = serde_json::to_value(raw) {
        for (name, section) in sections {
            walk.value(&name, &name, &section, file.get(name.as_str()));
        }
    }
    walk.settings
}

struct Walk<'o, F> {
    origin: &'o F,
    settings: Vec<Setting>,
}

impl<F: Fn(Span) -> Origin> Walk<'_, F> {
    /// `row` is the key in the table of knobs, `key` that of this value, `stands` what stands in the file.
    fn value(&mut self, row: &str, key: &str, value: &Value, stands: Option<&Spanned<DeValue<'_>>>) {
        if let Some(knob) = knobs::find(row) {
            self.settings.push(Setting {
                key: key.to_owned(),
                value: Bounded::plain(value).clone(),
                unset: knob.unset,
                origin: stands.map_or(Origin::Default, |stands| (self.origin)(stands.span())),
            });
            return;
        }
        match (value, stands.map(Spanned::get_ref)) {
            (Value::Object(table), stands) => {
                for (name, value) in table {
                    let stands =
                        stands.and_then(DeValue::as_table).and_then(|table| table.get(name.as_str()));
                    self.value(&format!("{row}.{name}"), &format!("{key}.{name}"), value, stands);
                }
            }
            (Value::Array(list), stands) => {
                for (at, value) in list.iter().enumerate() {
                    let names = ["backend", "server", "name"];
                    let name = names.iter().find_map(|name| value.get(name)).and_then(Value::as_str);
                    let stands = stands.and_then(DeValue::as_array).and_then(|list| list.get(at));
                    self.value(row, &format!("{key}[{}]", name.unwrap_or_default()), value, stands);
                }
            }
            _ => {}
        }
    }
}
