//! Where the parts of a JSON text begin and end, found without making values of them.
//!
//! Only as much is checked as that takes: whoever reads a part finds out whether it is JSON.

use super::body::BodyError;
use std::{borrow::Cow, ops::Range};

/// A field: its name, and its value as it is written.
pub(super) type Field<'j> = (Cow<'j, str>, &'j [u8]);

/// The fields of an object in their order.
///
/// # Errors
/// The text is no object, or not JSON.
pub(super) fn fields(json: &[u8]) -> Result<Vec<Field<'_>>, BodyError> {
    let mut fields = Vec::new();
    let mut scan = Scan { json, at: 0 };
    scan.list(b'{', b'}', |scan| {
        let name = text(scan.value()?)?;
        scan.expect(b':')?;
        fields.push((name, scan.value()?));
        Ok(())
    })?;
    Ok(fields)
}

/// Where the items of an array stand in it.
///
/// # Errors
/// The text is no array, or not JSON.
pub(super) fn items(json: &[u8]) -> Result<Vec<Range<usize>>, BodyError> {
    let mut items = Vec::new();
    let mut scan = Scan { json, at: 0 };
    scan.list(b'[', b']', |scan| {
        let length = scan.value()?.len();
        items.push(scan.at - length..scan.at);
        Ok(())
    })?;
    Ok(items)
}

/// A value that is a text.
///
/// # Errors
/// It is none, or not JSON.
pub(super) fn text(json: &[u8]) -> Result<Cow<'_, str>, BodyError> {
    match json {
        [b'"', plain @ .., b'"'] if !plain.contains(&b'\\') => {
            std::str::from_utf8(plain).map(Cow::Borrowed).map_err(|_| BodyError::Malformed)
        }
        json => serde_json::from_slice(json).map(Cow::Owned).map_err(|_| BodyError::Malformed),
    }
}

/// As deep as `serde_json` goes, less the object or array whose part a value is.
const MOST_LEVELS: usize = 126;

struct Scan<'j> {
    json: &'j [u8],
    at: usize,
}

impl<'j> Scan<'j> {
    /// A whole text that is one list of parts between brackets.
    fn list(
        &mut self,
        open: u8,
        close: u8,
        mut part: impl FnMut(&mut Self) -> Result<(), BodyError>,
    ) -> Result<(), BodyError> {
        self.expect(open)?;
        if self.next() == Some(close) {
            self.at += 1;
        } else {
            loop {
                part(self)?;
                let next = self.next();
                self.at += 1;
                match next {
                    Some(b',') => {}
                    Some(byte) if byte == close => break,
                    _ => return Err(BodyError::Malformed),
                }
            }
        }
        if self.next().is_none() { Ok(()) } else { Err(BodyError::Malformed) }
    }

    /// The next byte that is not blank; it is not taken.
    fn next(&mut self) -> Option<u8> {
        loop {
            match self.json.get(self.at)? {
                b' ' | b'\n' | b'\r' | b'\t' => self.at += 1,
                byte => return Some(*byte),
            }
        }
    }

    fn expect(&mut self, byte: u8) -> Result<(), BodyError> {
        let found = self.next() == Some(byte);
        self.at += 1;
        if found { Ok(()) } else { Err(BodyError::Malformed) }
    }

    /// Takes the next value.
    fn value(&mut self) -> Result<&'j [u8], BodyError> {
        self.next();
        let start = self.at;
        self.at = self.end_of_value().ok_or(BodyError::Malformed)?;
        self.json.get(start..self.at).ok_or(BodyError::Malformed)
    }

    fn end_of_value(&self) -> Option<usize> {
        let mut at = self.at;
        match self.json.get(at)? {
            b'"' => return end_of_string(self.json, at + 1),
            b'{' | b'[' => {}
            b',' | b':' | b'}' | b']' => return None,
            _ => {
                let ends = |byte: &u8| matches!(byte, b',' | b'}' | b']' | b' ' | b'\n' | b'\r' | b'\t');
                let length = self.json.get(at..)?.iter().position(ends);
                return Some(length.map_or(self.json.len(), |length| at + length));
            }
        }
        let mut depth = 0_usize;
        loop {
            match self.json.get(at)? {
                b'"' => {
                    at = end_of_string(self.json, at + 1)?;
                    continue;
                }
                b'{' | b'[' if depth == MOST_LEVELS => return None,
                b'{' | b'[' => depth += 1,
                b'}' | b']' => {
                    depth -= 1;
                    if depth == 0 {
                        return Some(at + 1);
                    }
                }
                _ => {}
            }
            at += 1;
        }
    }
}

/// The place behind the closing quote of a string whose first byte is at `from`.
pub(super) fn end_of_string(json: &[u8], from: usize) -> Option<usize> {
    let mut at = from;
    loop {
        let quote = at + memchr::memchr(b'"', json.get(at..)?)?;
        let escapes = json.get(from..quote)?.iter().rev().take_while(|byte| **byte == b'\\').count();
        if escapes % 2 == 0 {
            return Some(quote + 1);
        }
        at = quote + 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Map, Value};

    /// JSON of every form, with strings that hold what could be taken for structure.
    fn json() -> impl Strategy<Value = String> {
        let texts = prop::collection::vec(
            prop::sample::select(vec!["a", "é", r"\\", r#"\""#, "{", "]", ",", ":", r"\u0022", r"\n", " "]),
            0..6,
        );
        let text = texts.prop_map(|parts| format!("\"{}\"", parts.concat()));
        let words = prop::sample::select(vec!["1", "-0.5e3", "true", "null", " [] ", "{ }", "\n7\t"]);
        let leaf = prop_oneof![text.clone(), words.prop_map(str::to_owned)];
        leaf.prop_recursive(4, 24, 4, move |inner| {
            let field = (text.clone(), inner.clone()).prop_map(|(name, value)| format!("{name} : {value}"));
            prop_oneof![
                prop::collection::vec(inner, 0..4).prop_map(|items| format!("[{}]", items.join(" , "))),
                prop::collection::vec(field, 0..4).prop_map(|fields| format!("{{{}}}", fields.join(",\r\n"))),
            ]
        })
    }

    fn read(json: &[u8]) -> Value {
        serde_json::from_slice(json).expect("JSON")
    }

    proptest! {
        #[test]
        fn the_parts_are_those_that_a_parser_finds(text in json()) {
            match read(text.as_bytes()) {
                Value::Object(whole) => {
                    let fields = fields(text.as_bytes()).expect("an object");
                    let parts: Map<String, Value> =
                        fields.into_iter().map(|(name, value)| (name.into_owned(), read(value))).collect();
                    prop_assert_eq!(parts, whole);
                    prop_assert!(items(text.as_bytes()).is_err());
                }
                Value::Array(whole) => {
                    let items = items(text.as_bytes()).expect("an array");
                    let items: Vec<_> = items.into_iter().map(|at| read(&text.as_bytes()[at])).collect();
                    prop_assert_eq!(items, whole);
                    prop_assert!(fields(text.as_bytes()).is_err());
                }
                _ => {
                    prop_assert!(fields(text.as_bytes()).is_err() && items(text.as_bytes()).is_err());
                }
            }
        }

        #[test]
        fn no_text_is_too_broken(text in json(), cut in any::<prop::sample::Index>(), other in any::<u8>()) {
            let mut bytes = text.into_bytes();
            let at = cut.index(bytes.len());
            let _ = fields(&bytes[..at]);
            bytes[at] = other;
            let _ = (fields(&bytes), items(&bytes));
        }
    }

    #[test]
    fn what_is_no_list_of_parts_is_malformed() {
        for text in [
            "",
            "{",
            "{}x",
            r#"{"a" 1}"#,
            r#"{"a": 1,}"#,
            r#"{"a": }"#,
            r#"{"a": 1 "b": 2}"#,
            r#"{a: 1}"#,
            r#"{"a": "b}"#,
        ] {
            assert!(fields(text.as_bytes()).is_err(), "{text}");
        }
        for text in ["[1,]", "[,1]", "[1 2]", "[1]]", r#"["\"]"#] {
            assert!(items(text.as_bytes()).is_err(), "{text}");
        }
    }
}
