//! Values written as Python writes them: `str`, `repr` and `json.dumps`.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind, State};
use std::fmt::Write as _;

/// Containers deeper than this are not written. Request bodies are limited to 128 levels.
const MAX_DEPTH: usize = 256;

/// No text that a template builds is longer: a rendered one has a quarter of it at the most. A list may hold one long text many
/// times, and is paid for only when it is written.
const MOST_BYTES: usize = 64 << 20;

/// Fails where `out` is so long that nothing may be added.
pub(super) fn check_length(out: &str) -> Result<(), Error> {
    if out.len() > MOST_BYTES { Err(ErrorKind::OutOfFuel.into()) } else { Ok(()) }
}

/// Charges what it takes to write a value as so long a text: many times as much as to copy one.
pub(super) fn charge_written(state: &State<'_, '_>, text: &str) -> Result<(), Error> {
    const BYTES_PER_FUEL: usize = 4;
    state.consume_fuel((text.len() / BYTES_PER_FUEL) as u64)
}

/// `str(value)`, appended to `out`.
pub(super) fn write_str(out: &mut String, value: &Value) -> Result<(), Error> {
    match (value.as_str(), value.is_undefined()) {
        (Some(text), _) => out.push_str(text),
        (None, true) => {}
        (None, false) => write_repr(out, value, MAX_DEPTH)?,
    }
    Ok(())
}

/// `str(value)`.
pub(super) fn str(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    write_str(&mut out, value)?;
    Ok(out)
}

fn write_repr(out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    let deeper = depth.checked_sub(1).ok_or_else(too_deep)?;
    check_length(out)?;
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => write_number(out, value, "inf", "nan")?,
        ValueKind::String => write_repr_of_text(out, value.as_str().unwrap_or_default()),
        ValueKind::Map => {
            out.push('{');
            for (at, key) in value.try_iter()?.enumerate() {
                separate(out, at, ", ");
                write_repr(out, &key, deeper)?;
                out.push_str(": ");
                write_repr(out, &value.get_item(&key)?, deeper)?;
            }
            out.push('}');
        }
        ValueKind::Seq => {
            let tuple = value.is_tuple();
            out.push(if tuple { '(' } else { '[' });
            for (at, item) in value.try_iter()?.enumerate() {
                separate(out, at, ", ");
                write_repr(out, &item, deeper)?;
            }
            if tuple && value.len() == Some(1) {
                out.push(',');
            }
            out.push(if tuple { ')' } else { ']' });
        }
        // Python prints the address of such an object (a generator, a macro): no two prompts would be equal.
        _ => return Err(Error::new(ErrorKind::BadSerialization, "a value without a stable text")),
    }
    Ok(())
}

/// `repr(text)`.
pub(super) fn repr_of_text(text: &str) -> String {
    let mut out = String::new();
    write_repr_of_text(&mut out, text);
    out
}

fn write_repr_of_text(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if is_printable(c) => out.push(c),
            c => {
                let code = u32::from(c);
                let written = match code {
                    0..=0xff => write!(out, "\\x{code:02x}"),
                    0x100..=0xffff => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                };
                debug_assert!(written.is_ok(), "writing to a String cannot fail");
            }
        }
    }
    out.push(quote);
}

/// Python's `str.isprintable`. The standard library escapes the same categories of characters in its debug output,
/// and behind another character it leaves combining ones alone.
fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return !c.is_ascii_control();
    }
    let pair = String::from_iter(['a', c]);
    pair.escape_debug().eq(pair.chars())
}

fn write_number(out: &mut String, value: &Value, infinity: &str, nan: &str) -> Result<(), Error> {
    if let Some(integer) = value.as_i64().filter(|_| value.is_integer()) {
        write!(out, "{integer}").map_err(|_| too_deep())
    } else if value.is_integer() {
        let integer = i128::try_from(value.clone())?;
        write!(out, "{integer}").map_err(|_| too_deep())
    } else {
        write_float(out, f64::try_from(value.clone())?, infinity, nan);
        Ok(())
    }
}

/// Python's `repr(float)`: the shortest digits that round-trip, with an exponent below 1e-4 and from 1e16.
fn write_float(out: &mut String, float: f64, infinity: &str, nan: &str) {
    if float.is_nan() {
        return out.push_str(nan);
    }
    if float.is_sign_negative() {
        out.push('-');
    }
    if float.is_infinite() {
        return out.push_str(infinity);
    }
    let scientific = format!("{:e}", float.abs());
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or_default();
    if float != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        out.push_str(mantissa);
        out.push('e');
        out.push(sign);
        if exponent.abs() < 10 {
            out.push('0');
        }
        out.push_str(&exponent.abs().to_string());
    } else {
        let plain = float.abs().to_string();
        out.push_str(&plain);
        if !plain.contains('.') {
            out.push_str(".0");
        }
    }
}

/// The arguments of Python's `json.dumps` that templates use.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Json {
    /// What one level of nesting is indented by; `None` puts all on one line.
    pub(super) indent: Option<String>,
    /// Between items and between key and value; `None` for Python's defaults.
    pub(super) separators: Option<(String, String)>,
    /// Whether characters beyond ASCII are escaped. The templates' `tojson` does not, unlike Python's own default.
    pub(super) ensure_ascii: bool,
    /// Whether keys are sorted.
    pub(super) sort_keys: bool,
}

impl Json {
    /// `json.dumps(value, …)`.
    pub(super) fn dumps(&self, value: &Value) -> Result<String, Error> {
        let mut out = String::new();
        self.write(&mut out, value, 0)?;
        Ok(out)
    }

    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(too_deep());
        }
        check_length(out)?;
        let (item_separator, key_separator) = match (&self.separators, &self.indent) {
            (Some((item, key)), _) => (item.as_str(), key.as_str()),
            (None, None) => (", ", ": "),
            (None, Some(_)) => (",", ": "),
        };
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => write_number(out, value, "Infinity", "NaN")?,
            ValueKind::String => self.write_text(out, value.as_str().unwrap_or_default()),
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                out.push('{');
                for (at, key) in keys.iter().enumerate() {
                    separate(out, at, item_separator);
                    self.break_line(out, depth + 1);
                    self.write_key(out, key)?;
                    out.push_str(key_separator);
                    self.write(out, &value.get_item(key)?, depth + 1)?;
                }
                if !keys.is_empty() {
                    self.break_line(out, depth);
                }
                out.push('}');
            }
            ValueKind::Seq => {
                out.push('[');
                let mut empty = true;
                for (at, item) in value.try_iter()?.enumerate() {
                    empty = false;
                    separate(out, at, item_separator);
                    self.break_line(out, depth + 1);
                    self.write(out, &item, depth + 1)?;
                }
                if !empty {
                    self.break_line(out, depth);
                }
                out.push(']');
            }
            _ => return Err(Error::new(ErrorKind::BadSerialization, "a value that is not JSON")),
        }
        Ok(())
    }

    fn write_key(&self, out: &mut String, key: &Value) -> Result<(), Error> {
        let mut text = String::new();
        match key.kind() {
            ValueKind::String => text.push_str(key.as_str().unwrap_or_default()),
            ValueKind::None => text.push_str("null"),
            ValueKind::Bool => text.push_str(if key.is_true() { "true" } else { "false" }),
            ValueKind::Number => write_number(&mut text, key, "Infinity", "NaN")?,
            _ => return Err(Error::new(ErrorKind::NonKey, "a key that is not JSON")),
        }
        self.write_text(out, &text);
        Ok(())
    }

    fn write_text(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if u32::from(c) < 0x20 || (self.ensure_ascii && u32::from(c) > 0x7e) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }

    fn break_line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    }
}

fn separate(out: &mut String, at: usize, separator: &str) {
    if at > 0 {
        out.push_str(separator);
    }
}

fn too_deep() -> Error {
    Error::new(ErrorKind::BadSerialization, "a value that is nested too deep")
}

/// The characters that Python's `str.strip` takes as blank: Unicode's, and four separators of ASCII.
pub(super) fn is_blank(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::value::Serde;

    fn value(json: &str) -> Value {
        Value::from(Serde(serde_json::from_str::<serde_json::Value>(json).expect("JSON")))
    }

    #[test]
    fn containers_are_written_as_python_writes_them() {
        let text =
            str(&value(r#"{"b": [1, 2.0, null, true], "a": "it's", "c": "\"x\" it's\n\u200b\u0301é"}"#));
        assert_eq!(
            text.expect("written"),
            "{'b': [1, 2.0, None, True], 'a': \"it's\", 'c': '\"x\" it\\'s\\n\\u200b\u{301}é'}"
        );
    }

    #[test]
    fn floats_are_written_as_python_writes_them() {
        let cases = [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e-5, "1e-05"),
            (0.0001, "0.0001"),
            (1.5e16, "1.5e+16"),
            (1e15, "1000000000000000.0"),
            (123456789.125, "123456789.125"),
            (-0.0, "-0.0"),
            (5e-324, "5e-324"),
            (1.7976931348623157e308, "1.7976931348623157e+308"),
            (f64::INFINITY, "inf"),
            (f64::NEG_INFINITY, "-inf"),
        ];
        for (float, expected) in cases {
            let mut out = String::new();
            write_float(&mut out, float, "inf", "nan");
            assert_eq!(out, expected);
        }
    }

    #[test]
    fn json_keeps_order_and_characters() {
        let given = value(r#"{"b": "<é>\u0007", "a": [1e3, {}], "n": []}"#);
        let plain = Json::default().dumps(&given).expect("JSON");
        assert_eq!(plain, r#"{"b": "<é>\u0007", "a": [1000.0, {}], "n": []}"#);
        let indented =
            Json { indent: Some("  ".into()), sort_keys: true, ensure_ascii: true, ..Json::default() };
        assert_eq!(
            indented.dumps(&given).expect("JSON"),
            "{\n  \"a\": [\n    1000.0,\n    {}\n  ],\n  \"b\": \"<\\u00e9>\\u0007\",\n  \"n\": []\n}"
        );
    }

    #[test]
    fn an_undefined_value_is_no_json() {
        assert!(Json::default().dumps(&Value::UNDEFINED).is_err());
    }
}
