//! Python's methods of strings, lists and dictionaries, where minijinja's own differ or are missing.

use super::python;
use minijinja::value::{Tuple, Value, from_args};
use minijinja::{Error, ErrorKind, State};

/// Calls `method` of `value`, which has no such method of its own.
pub(super) fn call_method(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        charge_read(state, text)?;
        args.iter().filter_map(Value::as_str).try_for_each(|arg| charge_read(state, arg))?;
        match text_method(state, text, method, args) {
            Err(error) if error.kind() == ErrorKind::UnknownMethod => {}
            result => return result,
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

/// Charges what it takes to look through a text: minijinja counts what a method makes, and not what it reads.
pub(super) fn charge_read(state: &State, text: &str) -> Result<(), Error> {
    const BYTES_PER_FUEL: usize = 16;
    state.consume_fuel((text.len() / BYTES_PER_FUEL) as u64)
}

/// The digits of the largest number that a format may have.
const MOST_DIGITS: usize = 4;

fn text_method(state: &State, text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    Ok(match method {
        "strip" => Value::from(strip(text, args, true, true)?),
        "lstrip" => Value::from(strip(text, args, true, false)?),
        "rstrip" => Value::from(strip(text, args, false, true)?),
        "split" => paid(state, split(text, args, false)?)?,
        "rsplit" => paid(state, split(text, args, true)?)?,
        "splitlines" => {
            let (keep_ends,): (Option<bool>,) = from_args(args)?;
            paid(state, splitlines(text, keep_ends.unwrap_or(false)).into_iter().map(Value::from).collect())?
        }
        // A number in a format may be a width: so many blanks.
        "format" if text.split(|c: char| !c.is_ascii_digit()).any(|digits| digits.len() > MOST_DIGITS) => {
            return Err(ErrorKind::OutOfFuel.into());
        }
        "join" => {
            let (items,): (&Value,) = from_args(args)?;
            Value::from(join(state, text, items)?)
        }
        "isspace" => Value::from(!text.is_empty() && text.chars().all(python::is_blank)),
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "partition" => {
            let (separator,): (&str,) = from_args(args)?;
            let (head, tail) = text.split_once(separator).unwrap_or((text, ""));
            let found = if head.len() == text.len() { "" } else { separator };
            Value::from(Tuple::from([Value::from(head), Value::from(found), Value::from(tail)]))
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            let (head, found, tail) =
                text.rsplit_once(separator).map_or(("", "", text), |(head, tail)| (head, separator, tail));
            Value::from(Tuple::from([Value::from(head), Value::from(found), Value::from(tail)]))
        }
        _ => return Err(Error::from(ErrorKind::UnknownMethod)),
    })
}

fn strip<'t>(text: &'t str, args: &[Value], start: bool, end: bool) -> Result<&'t str, Error> {
    let (chars,): (Option<&str>,) = from_args(args)?;
    Ok(trim(text, chars, start, end))
}

/// Python's `strip`: cuts the given characters, or blanks, off the ends.
pub(super) fn trim<'t>(text: &'t str, chars: Option<&str>, start: bool, end: bool) -> &'t str {
    let Some(chars) = chars else { return trim_by(text, python::is_blank, start, end) };
    if chars.len() <= FEW_BYTES {
        return trim_by(text, |c| chars.contains(c), start, end);
    }
    let mut sorted: Vec<char> = chars.chars().collect();
    sorted.sort_unstable();
    sorted.dedup();
    trim_by(text, |c| sorted.binary_search(&c).is_ok(), start, end)
}

/// So few characters are looked through as fast as they are sorted.
const FEW_BYTES: usize = 8;

fn trim_by(text: &str, cut: impl Fn(char) -> bool, start: bool, end: bool) -> &str {
    let text = if start { text.trim_start_matches(&cut) } else { text };
    if end { text.trim_end_matches(&cut) } else { text }
}

/// A list of pieces; each is a value, which costs more than the bytes that it has.
fn paid(state: &State, pieces: Value) -> Result<Value, Error> {
    state.consume_fuel(pieces.len().unwrap_or_default() as u64)?;
    Ok(pieces)
}

/// Python's `join`, which takes only texts.
fn join(state: &State, separator: &str, items: &Value) -> Result<String, Error> {
    let mut out = String::new();
    for (at, item) in items.try_iter()?.enumerate() {
        state.consume_fuel(1)?;
        python::check_length(&out)?;
        if at > 0 {
            out.push_str(separator);
        }
        let text = item.as_str().ok_or_else(|| {
            Error::new(ErrorKind::InvalidOperation, "a list that is joined has something else than texts")
        })?;
        out.push_str(text);
    }
    Ok(out)
}

fn split(text: &str, args: &[Value], from_the_end: bool) -> Result<Value, Error> {
    let (separator, count): (Option<&str>, Option<i64>) = from_args(args)?;
    let pieces = match count.map(usize::try_from) {
        Some(Ok(splits)) => splits.saturating_add(1),
        _ => usize::MAX,
    };
    Ok(match (separator, from_the_end) {
        (Some(""), _) => return Err(Error::new(ErrorKind::InvalidOperation, "an empty separator")),
        (Some(separator), false) => text.splitn(pieces, separator).map(Value::from).collect(),
        (Some(separator), true) => {
            let mut found: Vec<Value> = text.rsplitn(pieces, separator).map(Value::from).collect();
            found.reverse();
            Value::from(found)
        }
        (None, false) => {
            let mut found = Vec::new();
            let mut rest = text.trim_start_matches(python::is_blank);
            while !rest.is_empty() {
                if found.len() + 1 == pieces {
                    found.push(Value::from(rest));
                    break;
                }
                let end = rest.find(python::is_blank).unwrap_or(rest.len());
                found.push(Value::from(&rest[..end]));
                rest = rest[end..].trim_start_matches(python::is_blank);
            }
            Value::from(found)
        }
        (None, true) if pieces == usize::MAX => {
            text.split(python::is_blank).filter(|word| !word.is_empty()).map(Value::from).collect()
        }
        (None, true) => return Err(Error::new(ErrorKind::InvalidOperation, "rsplit at blanks with a limit")),
    })
}

/// Python's `splitlines`.
pub(super) fn splitlines(text: &str, keep_ends: bool) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut start = 0;
    let mut chars = text.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        let ends_line = matches!(
            c,
            '\n' | '\r'
                | '\u{b}'
                | '\u{c}'
                | '\u{1c}'
                | '\u{1d}'
                | '\u{1e}'
                | '\u{85}'
                | '\u{2028}'
                | '\u{2029}'
        );
        if !ends_line {
            continue;
        }
        let mut next = at + c.len_utf8();
        if c == '\r' && chars.next_if(|(_, c)| *c == '\n').is_some() {
            next += 1;
        }
        lines.push(&text[start..if keep_ends { next } else { at }]);
        start = next;
    }
    if start < text.len() {
        lines.push(&text[start..]);
    }
    lines
}

/// `markupsafe.escape`.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_end_where_python_ends_them() {
        assert_eq!(splitlines("a\r\nb\rc\u{2028}d\n", false), ["a", "b", "c", "d"]);
        assert_eq!(splitlines("a\r\n\nb", true), ["a\r\n", "\n", "b"]);
        assert!(splitlines("", false).is_empty());
    }

    #[test]
    fn blanks_are_those_of_python() {
        assert_eq!(trim("\u{1c}\u{85}\u{a0} x\u{200b} \t", None, true, true), "x\u{200b}");
        assert_eq!(trim("xxayx", Some("xy"), true, false), "ayx");
    }

    #[test]
    fn splitting_counts_from_either_end() {
        let pieces =
            |args: &[Value], from_the_end| split(" a  b c ", args, from_the_end).expect("pieces").to_string();
        assert_eq!(pieces(&[], false), "['a', 'b', 'c']");
        assert_eq!(pieces(&[Value::from(()), Value::from(1)], false), "['a', 'b c ']");
        assert_eq!(pieces(&[Value::from(" "), Value::from(1)], true), "[' a  b c', '']");
    }
}
