//! `docs/configuration.md`, made of the table.

use super::{
    super::raw::RawConfig, Bounded, Breaks, Effect, FOREIGN, Form, Knob, Owner, foreign, keys, of_haproxy,
    process,
};
use serde_json::Value;
use std::{collections::BTreeMap, fmt::Write};

/// A file in which each list has an entry, so that every key is seen, with a value for each of these.
fn one_of_each(threads: &str, pool: &str, replica: &str) -> String {
    format!(
        "{threads}\n[[pool]]\nbackend = \"b\"\n{pool}\n[[pool.revision]]\nname = \"r\"\n[[pool.replica]]\nserver = \"s\"\n{replica}\n\
         [[pool.override]]\nserver = \"s\"\n{replica}\n"
    )
}

/// Every key that the file may have, with its default.
pub(super) fn defaults() -> BTreeMap<String, Value> {
    values(&one_of_each("", "", ""))
}

/// The bounds of every key that has some. Those without a default are given a value to see them.
pub(super) fn bounds() -> BTreeMap<String, Bounded> {
    let text = one_of_each(
        "prompt.threads = 1",
        "max_model_len = 1\nevents.token_port_base = 1",
        "cache_blocks = 1\nranks = 1",
    );
    let bounds = values(&text).into_iter().map(|(key, value)| Some((key, Bounded::of(&value)?)));
    bounds.flatten().collect()
}

fn values(file: &str) -> BTreeMap<String, Value> {
    fn walk(key: &str, value: &Value, all: &mut BTreeMap<String, Value>) {
        match value {
            Value::Object(table) if Bounded::of(value).is_none() && !table.is_empty() => {
                table.iter().for_each(|(name, value)| walk(&format!("{key}.{name}"), value, all));
            }
            Value::Array(list) if list.first().is_some_and(Value::is_object) => {
                list.iter().for_each(|value| walk(key, value, all));
            }
            value => _ = all.insert(key.trim_start_matches('.').to_owned(), value.clone()),
        }
    }
    let raw: RawConfig = toml::from_str(file).expect("valid");
    let mut all = BTreeMap::new();
    walk("", &serde_json::to_value(raw).expect("JSON"), &mut all);
    all
}

pub(super) fn page() -> String {
    let mut page = String::from(INTRODUCTION);
    let (defaults, bounds) = (defaults(), bounds());
    let mut section = "";
    for knob in keys() {
        let name = match knob.key.rsplit_once('.') {
            Some(("select.dynamo", _)) | None => "select",
            Some((section, _)) => section,
        };
        if name != section {
            section = name;
            heading(&mut page, section);
        }
        row(&mut page, knob, defaults.get(knob.key), bounds.get(knob.key));
    }
    page.push_str(PROCESS);
    process().iter().for_each(|knob| row(&mut page, knob, None, None));
    page.push_str(OF_HAPROXY);
    of_haproxy().iter().for_each(|knob| row(&mut page, knob, None, None));
    others(&mut page);
    page
}

fn heading(page: &mut String, section: &str) {
    let title = match section {
        "pool" | "pool.revision" => format!("[[{section}]]"),
        "pool.replica" => "[[pool.replica]] and [[pool.override]]".to_owned(),
        section => format!("[{section}]"),
    };
    let note = match section {
        "pool.replica" => {
            "\nThe keys of a replica in `pool.replicas_file` are the same. `[[pool.override]]` tells of a server of HAProxy, or \
             of the file, what it cannot tell itself.\n"
        }
        "pool.prompt" => "\nWhat `vllm serve` was given that changes its prompts, by vLLM's own names.\n",
        "pool.revision" => {
            "\nHow a part of the replicas makes prompts, while a fleet changes from one chat template to the next.\n"
        }
        "pool.http" => "\nHow the replicas are reached by HTTP.\n",
        _ => "",
    };
    let _ = write!(page, "\n## `{title}`\n{note}\n{COLUMNS}");
}

const COLUMNS: &str = "| key | default | from … to | what it is | too low | too high | also set by |\n|---|---|---|---|---|---|---|\n";

fn row(page: &mut String, knob: &Knob, default: Option<&Value>, bounds: Option<&Bounded>) {
    let key = knob.key.rsplit_once('.').filter(|_| default.is_some()).map_or(knob.key, |(section, key)| {
        if section == "select.dynamo" { knob.key.trim_start_matches("select.") } else { key }
    });
    let default = match default.map(Bounded::plain) {
        _ if knob.unset == "required" => "**required**".to_owned(),
        None | Some(Value::Null) => knob.unset.to_owned(),
        Some(Value::String(text)) => format!("`{text}`"),
        Some(Value::Array(list)) if list.is_empty() => "none".to_owned(),
        Some(Value::Object(table)) if table.is_empty() => "none".to_owned(),
        Some(value) => format!("`{value}`"),
    };
    let range = bounds.map_or_else(String::new, |bounds| {
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let (low, high) = (text(&bounds.low), text(&bounds.high));
        if high.is_empty() { format!("{low} …") } else { format!("{low} … {high}") }
    });
    let range = match (knob.form, range.is_empty()) {
        (Form::Count(unit) | Form::Weight(unit), true) => unit.to_owned(),
        (Form::Count(unit) | Form::Weight(unit), false) => format!("{range} {unit}"),
        _ => range,
    };
    let breaks = match knob.breaks {
        Breaks::Sides(low, high) => format!("{low} | {high}"),
        Breaks::Wrong(why) => format!("wrong: {why} |"),
    };
    let flag = knob.flag.map(|flag| format!("`--{flag}`"));
    // HAProxy has variables of its own only.
    let is_haproxys = of_haproxy().iter().any(|other| other.key == knob.key);
    let variable = if is_haproxys { knob.variable.map(str::to_owned) } else { knob.variable() };
    let names = variable.into_iter().chain(knob.foreign().map(|foreign| foreign.name.to_owned()));
    let by: Vec<String> = flag.into_iter().chain(names.map(|name| format!("`{name}`"))).collect();
    let restart = if knob.takes_restart { ". Takes a restart" } else { "" };
    let (what, by) = (knob.what, by.join(", "));
    let _ = writeln!(page, "| `{key}` | {default} | {range} | {what}{restart} | {breaks} | {by} |");
}

fn others(page: &mut String) {
    page.push_str(OF_OTHERS);
    for foreign in FOREIGN {
        let does = match foreign.effect {
            Effect::Sets(key) => format!("**honoured**: `{key}`"),
            Effect::Mapped(key) => format!("**mapped**: `{key}`"),
            Effect::HAProxy(key) => format!("**honoured** by HAProxy: `{key}`"),
            Effect::Nothing => "accepted without effect".to_owned(),
        };
        let whose = match foreign.owner {
            Owner::Ray => "Ray",
            Owner::Dynamo => "Dynamo",
        };
        let _ = writeln!(
            page,
            "| `{}` | {whose} | {} | {does} | {} |",
            foreign.name, foreign.default, foreign.why
        );
    }
    let list = |names: &[&str]| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let _ = write!(
        page,
        "\nAccepted without effect, since they configure Ray's own HAProxy and controller: {}.\n\n\
         Accepted without effect, since it is done otherwise here, or not at all: {}.\n",
        list(foreign::OF_RAY_ALONE),
        list(foreign::OF_DYNAMO_ALONE),
    );
}

const INTRODUCTION: &str = "\
<!-- Made of the table in src/config/knobs: UPDATE=1 cargo test --lib config::knobs -->
# Configuration

One TOML file, `/etc/kvspoa/kvspoa.toml` or `--config`. Unknown keys and wrong values are refused with one line that names file,
line and key, and exit status 64. `kvspoa check` prints what holds: each key, its value, and where that came from.

The file is followed while the agent runs, and read again at SIGHUP: what it says holds from then on, but for keys that take a
restart, as their rows say. A file that is wrong changes nothing.

What is set more than once: flags win over variables `KVSPOA_…`, these over the names of Ray and Dynamo, all of them over the
file. What a pool's key is told by a flag or a variable holds for all pools. A switch is `true` or `false` in the file, `1` or `0`
elsewhere. Sizes are written `\"16MiB\"`, times `\"400ms\"`. Relative paths begin at the file's folder.

A variable `KVSPOA_…` that does not exist is an error, like an unknown key (those that Kubernetes makes of a Service's name are
left alone). An unknown `RAY_SERVE_…` or `DYN_ROUTER_…` is only warned of: the environment may be Ray's, which has many more. Of a name
that is known, a value that cannot be read is an error, even where it has no effect.
";

const PROCESS: &str = "
## The process

By flags and variables alone. `model fetch` also knows Hugging Face's `HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE`.

| flag | default | | what it is | too low | too high | also set by |
|---|---|---|---|---|---|---|
";

const OF_HAPROXY: &str = "
## HAProxy

Read by HAProxy, from its own files; the flags are those of `kvspoa haproxy-config`. [haproxy/README.md](../haproxy/README.md) tells more.

| what | default | | where it stands, and what it is | too low | too high | also set by |
|---|---|---|---|---|---|---|
";

const OF_OTHERS: &str = "
## Names of Ray Serve and Dynamo

Their defaults hold where they serve; unset, ours holds where theirs would slow the product or switch it off.

| name | of | default there | here | why |
|---|---|---|---|---|
";
