//! A Jinja environment that behaves as the one of Hugging Face `transformers`.

use super::python::{self, Json};
use super::{date, known, strings, values};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};
use std::time::SystemTime;

/// Work that one rendering may do, counted in minijinja's fuel (about one unit an instruction and one per 64 bytes
/// written, and what [`python`] and [`strings`] add). A conversation of a megabyte in 1,000 messages needs less than a million.
/// All of it takes about as long as the time that there is for a prompt, whatever it is used for.
const FUEL: u64 = 8_000_000;

/// The same for a template that a client brings: a tenth, as it need not be one that anybody would use. It takes some
/// ten milliseconds, and 50 MB of texts.
pub(super) const FUEL_OF_REQUESTED: u64 = 800_000;

/// How deep macros may call each other.
const RECURSION_LIMIT: usize = 200;

/// Marks an error that the template raised itself, by `raise_exception`: the engine refuses the request then.
#[derive(Debug, thiserror::Error)]
#[error("raised by the template")]
pub(super) struct RaisedByTemplate;

const RAISE_EXCEPTION: &str = "raise_exception";
/// The function that tells the time. There is no other one.
pub(super) const STRFTIME_NOW: &str = "strftime_now";

/// A filter that lets only texts pass: what a sum of texts demands of its operands ([`super::sums`]).
pub(super) const TEXT_FILTER: &str = "kvspoa_text";

/// A filter that makes values the texts that Python makes of them: for the operands of `~` ([`super::concat`]).
pub(super) const STR_FILTER: &str = "kvspoa_str";

/// A filter that makes texts what they are in a sum with one that is marked as safe ([`super::sums`]).
pub(super) const ESCAPED_FILTER: &str = "kvspoa_escaped";

/// The environment without what `transformers` adds to Jinja.
pub(super) fn bare_environment() -> Result<Environment<'static>, Error> {
    let mut environment = environment(SystemTime::now, 0)?;
    for name in [RAISE_EXCEPTION, STRFTIME_NOW] {
        environment.remove_global(name);
    }
    Ok(environment)
}

/// The syntax options of `transformers`.
pub(super) fn syntax() -> Result<SyntaxConfig, Error> {
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()
}

/// The environment, with the clock and the time zone that `strftime_now` uses.
pub(super) fn environment(
    clock: fn() -> SystemTime,
    utc_offset_seconds: i32,
) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(syntax()?);
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(RECURSION_LIMIT);
    // An error must never carry a piece of the prompt.
    environment.set_debug(false);
    environment.set_formatter(|out, _, value| {
        match value.as_str() {
            Some(text) => out.write_str(text)?,
            None if known::write(out, value)? => {}
            None => out.write_str(&python::str(value)?)?,
        }
        Ok(())
    });
    environment.set_unknown_method_callback(strings::call_method);
    environment.add_function(RAISE_EXCEPTION, |_message: Value| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, "refused").with_source(RaisedByTemplate))
    });
    environment
        .add_function(STRFTIME_NOW, move |format: &str| date::of_engine(format, clock(), utc_offset_seconds));
    environment.add_filter("safe", safe);
    for name in ["escape", "e", "forceescape"] {
        environment.remove_filter(name);
    }
    environment.add_filter("tojson", tojson);
    environment.add_filter(TEXT_FILTER, |value: Value| match value.as_str() {
        Some(_) => Ok(value),
        None => Err(Error::new(ErrorKind::InvalidOperation, "a text and something else cannot be added")),
    });
    environment.add_filter(STR_FILTER, |state: &State<'_, '_>, value: Value| match value.as_str() {
        // A mark of safety ends here.
        Some(_) if !value.is_safe() => Ok(value),
        _ => written(state, &value).map(Value::from),
    });
    environment.add_filter(ESCAPED_FILTER, |value: Value| match value.as_str() {
        Some(_) if value.is_safe() => Ok(value),
        Some(text) => Ok(Value::from_safe_string(strings::escape(text))),
        None => Err(Error::new(ErrorKind::InvalidOperation, "a text and something else cannot be added")),
    });
    environment.add_filter("string", |state: &State<'_, '_>, value: &Value| written(state, value));
    environment.add_filter("trim", trim);
    environment.add_filter("join", join);
    environment.add_filter("indent", indent);
    environment.add_test("iterable", |value: &Value| {
        value.is_undefined()
            || matches!(
                value.kind(),
                ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable
            )
    });
    environment.add_test("sequence", |value: &Value| {
        value.is_undefined() || matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map)
    });
    Ok(environment)
}

/// `str(value)`, paid for.
fn written(state: &State<'_, '_>, value: &Value) -> Result<String, Error> {
    let text = python::str(value)?;
    python::charge_written(state, &text)?;
    Ok(text)
}

fn trim(state: &State<'_, '_>, value: &Value, chars: Option<&str>) -> Result<String, Error> {
    let text = python::str(value)?;
    strings::charge_read(state, &text)?;
    Ok(strings::trim(&text, chars, true, true).to_owned())
}

/// The name under which a rendering remembers that it has marked a text as safe.
const MARKED_SAFE: &str = "marked_safe";

/// `safe` is without effect as long as nothing is added to the text, which [`super::sums`] does as Python does where it
/// stands in the sum itself, and [`super::limits`] finds elsewhere.
fn safe(state: &mut State<'_, '_>, value: Value) -> Result<Value, Error> {
    state.set_temp(MARKED_SAFE, Value::from(true));
    python::str(&value).map(Value::from_safe_string)
}

/// Whether a finished rendering has marked a text as safe.
pub(super) fn marked_safe(state: &State<'_, '_>) -> bool {
    state.get_temp(MARKED_SAFE).is_some()
}

/// `transformers` replaces Jinja's `tojson`, which escapes HTML, by Python's `json.dumps`.
fn tojson(
    state: &State<'_, '_>,
    value: &Value,
    ensure_ascii: Option<bool>,
    indent: Option<Value>,
    named: Kwargs,
) -> Result<Value, Error> {
    let indent = match named.get::<Option<Value>>("indent")?.or(indent) {
        None => None,
        Some(text) if text.kind() == ValueKind::String => Some(python::str(&text)?),
        Some(number) => Some(" ".repeat(usize::try_from(number).unwrap_or(0).min(64))),
    };
    let separators = match named.get::<Option<Value>>("separators")? {
        None => None,
        Some(pair) => {
            Some((python::str(&pair.get_item_by_index(0)?)?, python::str(&pair.get_item_by_index(1)?)?))
        }
    };
    let json = Json {
        indent,
        separators,
        ensure_ascii: named.get::<Option<bool>>("ensure_ascii")?.or(ensure_ascii).unwrap_or(false),
        sort_keys: named.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    named.assert_all_used()?;
    let text = values::to_json(value, &json)?;
    python::charge_written(state, text.as_str().unwrap_or_default())?;
    Ok(text)
}

fn join(
    state: &State<'_, '_>,
    items: &Value,
    separator: Option<&str>,
    attribute: Option<&str>,
    named: Kwargs,
) -> Result<String, Error> {
    let named_separator = named.get::<Option<String>>("d")?;
    let named_attribute = named.get::<Option<String>>("attribute")?;
    named.assert_all_used()?;
    let separator = named_separator.as_deref().or(separator).unwrap_or_default();
    let attribute = named_attribute.as_deref().or(attribute);
    let mut out = String::new();
    for (at, item) in items.try_iter()?.enumerate() {
        python::check_length(&out)?;
        if at > 0 {
            out.push_str(separator);
        }
        match attribute {
            Some(name) => python::write_str(&mut out, &item.get_attr(name)?)?,
            None => python::write_str(&mut out, &item)?,
        }
        state.consume_fuel(1)?;
    }
    strings::charge_read(state, &out)?;
    Ok(out)
}

/// Jinja's `indent`, which keeps a trailing newline and makes newlines of all ends of lines.
fn indent(
    text: &str,
    width: Option<Value>,
    first: Option<bool>,
    blank: Option<bool>,
    named: Kwargs,
) -> Result<String, Error> {
    let width = named.get::<Option<Value>>("width")?.or(width);
    let first = named.get::<Option<bool>>("first")?.or(first).unwrap_or(false);
    let blank = named.get::<Option<bool>>("blank")?.or(blank).unwrap_or(false);
    named.assert_all_used()?;
    let indentation = match width {
        None => " ".repeat(4),
        Some(text) if text.kind() == ValueKind::String => python::str(&text)?,
        Some(number) => " ".repeat(usize::try_from(number).unwrap_or(0).min(256)),
    };
    let text = format!("{text}\n");
    let mut out = String::with_capacity(text.len());
    for (at, line) in strings::splitlines(&text, false).into_iter().enumerate() {
        python::check_length(&out)?;
        if at > 0 {
            out.push('\n');
        }
        if if at == 0 { first } else { blank || !line.is_empty() } {
            out.push_str(&indentation);
        }
        out.push_str(line);
    }
    Ok(out)
}
