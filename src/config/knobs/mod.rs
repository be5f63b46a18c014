//! Every knob in one table: what it is called, what it does, and what breaks when it is set wrongly.
//!
//! A key of the file is a field in `raw` (with its default and range) and a row here; a test holds the two together and
//! writes `docs/configuration.md` from them. The row also makes the key's flag and variable work.

mod agent;
mod foreign;
mod haproxy;
#[cfg(test)]
mod page;
mod pool;
#[cfg(test)]
mod tests;

pub use foreign::{Effect, FOREIGN, Foreign, Owner, Read};

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One knob.
#[derive(Clone, Copy, Debug)]
pub struct Knob {
    /// Its name: the key in the agent's file, or the option of HAProxy. Below `[[pool]]` the path begins with `pool`;
    /// the keys of `[[pool.replica]]` are those of `[[pool.override]]` and of `replicas_file` too.
    pub key: &'static str,
    /// How its value is written.
    pub form: Form,
    /// Its flag.
    pub flag: Option<&'static str>,
    /// Its environment variable, if it is not the one that follows from the key ([`Knob::variable`]).
    pub variable: Option<&'static str>,
    /// What holds where nothing sets it and there is no default value in the code.
    pub unset: &'static str,
    /// What it is.
    pub what: &'static str,
    /// What breaks.
    pub breaks: Breaks,
    /// Whether another value takes a restart; any other is taken over while the agent runs.
    pub takes_restart: bool,
}

/// What a wrong value does.
#[derive(Clone, Copy, Debug)]
pub enum Breaks {
    /// A quantity: when it is too low, and when it is too high.
    Sides(&'static str, &'static str),
    /// Anything else: when it is not what it should be.
    Wrong(&'static str),
}

/// How a value is written, and in what unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// A text, by the name of what it stands for.
    Text(&'static str),
    /// A whole number of these.
    Count(&'static str),
    /// A size: `"16MiB"`.
    Bytes,
    /// A length of time: `"400ms"`.
    Time,
    /// A number that weighs these.
    Weight(&'static str),
    /// `true` or `false`; outside of the file `1` or `0`.
    Switch,
    /// A list, in the file only.
    List,
    /// A table, in the file only.
    Table,
}

/// What rows have in common that say nothing else.
const PLAIN: Knob = Knob {
    key: "",
    form: Form::Text("TEXT"),
    flag: None,
    variable: None,
    unset: "none",
    what: "",
    breaks: Breaks::Wrong(""),
    takes_restart: false,
};

/// The keys of the agent's file, in its order.
pub fn keys() -> impl Iterator<Item = &'static Knob> {
    agent::KEYS.iter().chain(pool::KEYS)
}

/// What the process itself is told by flags and variables alone.
#[must_use]
pub const fn process() -> &'static [Knob] {
    agent::PROCESS
}

/// The knobs of HAProxy that the agent's work depends on.
#[must_use]
pub const fn of_haproxy() -> &'static [Knob] {
    haproxy::KNOBS
}

/// The row of a key of the file; the key of an override is that of a replica.
#[must_use]
pub fn find(key: &str) -> Option<&'static Knob> {
    let of_replica = key.strip_prefix("pool.override.").map(|rest| format!("pool.replica.{rest}"));
    let key = of_replica.as_deref().unwrap_or(key);
    keys().find(|knob| knob.key == key)
}

/// Variables that begin as ours do, and are for this project's own scripts and tests.
const OF_SCRIPTS: &[&str] = &[
    "KVSPOA_CACHE",
    "KVSPOA_HAPROXY",
    "KVSPOA_MODEL_SEEDS",
    "KVSPOA_MUTATE",
    "KVSPOA_REQUESTS",
    "KVSPOA_REQUESTS_SHOW",
    "KVSPOA_RAY_PYTHON",
    "KVSPOA_TEMPLATES",
    "KVSPOA_TEST_ALONE",
    "KVSPOA_TOKENIZERS",
    "KVSPOA_VLLM",
    "KVSPOA_VLLM_VENV",
];

/// Whether a variable has our prefix and is none: most likely misspelt.
pub(super) fn is_unknown_of_ours(name: &str) -> bool {
    let Some(rest) = name.strip_prefix("KVSPOA_") else { return false };
    let known = keys().chain(process()).any(|knob| knob.variable().as_deref() == Some(name));
    !known && !OF_SCRIPTS.contains(&name) && !is_of_kubernetes(rest)
}

/// Kubernetes tells every container of a Service `kvspoa` (or `kvspoa-…`) by variables: `…_SERVICE_HOST`, `…_SERVICE_PORT`,
/// `…_PORT` and `…_PORT_9101_TCP…`.
fn is_of_kubernetes(rest: &str) -> bool {
    let has = |part: &str| rest == part || rest.ends_with(&format!("_{part}"));
    let of_port = |rest: &str| rest.starts_with(|c: char| c.is_ascii_digit());
    has("SERVICE_HOST")
        || has("PORT")
        || format!("_{rest}").contains("_SERVICE_PORT_")
        || format!("_{rest}").split("_PORT_").skip(1).any(of_port)
}

/// What is to be said of a variable that looks like one of Ray's or Dynamo's, but is none that is known here. Not an
/// error: the environment may be that of Ray, which has many more.
pub(super) fn suspicion(name: &str) -> Option<String> {
    const FAMILIES: [&str; 5] = ["RAY_SERVE_", "DYN_ROUTER_", "KV_EVENTS_", "KV_TOKEN_", "KV_INDEXER_"];
    let known = foreign::OF_RAY_ALONE.contains(&name) || foreign::OF_DYNAMO_ALONE.contains(&name);
    let suspect = !known && FAMILIES.iter().any(|family| name.starts_with(family));
    suspect.then(|| format!("{name} is not known here and has no effect: is it spelt right?"))
}

impl Form {
    /// What stands for a value in a command line.
    #[must_use]
    pub const fn value_name(self) -> &'static str {
        match self {
            Self::Text(name) => name,
            Self::Count(_) | Self::Weight(_) => "NUMBER",
            Self::Bytes => "SIZE",
            Self::Time => "TIME",
            Self::Switch => "0|1",
            Self::List | Self::Table => "",
        }
    }
}

impl Knob {
    /// What `--help` says of it.
    #[must_use]
    pub fn help(&self) -> String {
        let ours = self.variable().into_iter();
        let variables: Vec<String> =
            ours.chain(self.foreign().map(|foreign| foreign.name.to_owned())).collect();
        let mut help = self.what.replace('`', "");
        if let Some(first) = help.get_mut(..1) {
            first.make_ascii_uppercase();
        }
        if !variables.is_empty() {
            help.push_str(&format!(" [env: {}]", variables.join(", ")));
        }
        help
    }

    /// The environment variable that sets it: `KVSPOA_` and the key in capitals with `_` for each dot. What is a pool's has
    /// none, since there are several.
    #[must_use]
    pub fn variable(&self) -> Option<String> {
        let in_file_only = matches!(self.form, Form::List | Form::Table);
        match self.variable {
            Some(name) => Some(name.to_owned()),
            None if in_file_only || self.key.starts_with("pool.") => None,
            None => Some(format!("KVSPOA_{}", self.key.replace('.', "_").to_ascii_uppercase())),
        }
    }

    /// The names of other products that set it.
    pub fn foreign(&self) -> impl Iterator<Item = &'static Foreign> {
        let key = self.key;
        FOREIGN.iter().filter(move |foreign| foreign.effect.key() == Some(key))
    }
}

/// A value within bounds, as `raw` shows it to whoever describes the configuration.
#[derive(Serialize, Deserialize, Debug)]
pub(super) struct Bounded {
    #[serde(rename = "$value")]
    value: Value,
    #[serde(rename = "$low")]
    low: Value,
    #[serde(rename = "$high")]
    high: Value,
}

impl Bounded {
    pub(super) fn new(value: impl Into<Value>, low: impl Into<Value>, high: impl Into<Value>) -> Self {
        Self { value: value.into(), low: low.into(), high: high.into() }
    }

    /// The bounds that a serialized value came with, if it did.
    #[cfg(test)]
    fn of(value: &Value) -> Option<Self> {
        value.get("$value").and_then(|_| Self::deserialize(value).ok())
    }

    /// A serialized value without its bounds.
    pub(super) fn plain(value: &Value) -> &Value {
        value.get("$value").unwrap_or(value)
    }
}
