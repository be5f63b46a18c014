//! Where the parts of a JSON text begin and end, found without making values of them.
//!
//! Only as much is checked as that takes: whoever reads a part finds out whether it is JSON.

use super::body::BodyError;

/// Goes over the fields of an object in their order; `field` is given each one's name as it is written, and takes its value
/// from the scan.
///
/// # Errors
/// The text is no object, or not JSON, and those of `field`.
pub(super) fn fields<'j>(
    json: &'j [u8],
    mut field: impl FnMut(&'j [u8], &mut Scan<'j>) -> Result<(), BodyError>,
) -> Result<(), BodyError> {
    Scan::of_whole(json, |scan| {
        scan.list(b'{', b'}', |scan| {
            let name = scan.value()?;
            scan.expect(b':')?;
            field(name, scan)
        })
    })
}

/// As deep as `serde_json` goes.
const MOST_LEVELS: usize = 127;

/// A JSON text, and how far it was read.
#[derive(Debug)]
pub(super) struct Scan<'j> {
    json: &'j [u8],
    at: usize,
    /// The objects and arrays that are open here.
    levels: usize,
}

impl<'j> Scan<'j> {
    /// Has `json` read as one value.
    ///
    /// # Errors
    /// Something follows the value, and those of `read`.
    pub(super) fn of_whole<T>(
        json: &'j [u8],
        read: impl FnOnce(&mut Self) -> Result<T, BodyError>,
    ) -> Result<T, BodyError> {
        let mut scan = Self { json, at: 0, levels: 0 };
        let value = read(&mut scan)?;
        if scan.next().is_none() { Ok(value) } else { Err(BodyError::Malformed) }
    }

    /// Takes an array; `item` takes each of its items.
    pub(super) fn items(
        &mut self,
        item: impl FnMut(&mut Self) -> Result<(), BodyError>,
    ) -> Result<(), BodyError> {
        self.list(b'[', b']', item)
    }

    /// Takes parts between brackets.
    fn list(
        &mut self,
        open: u8,
        close: u8,
        mut part: impl FnMut(&mut Self) -> Result<(), BodyError>,
    ) -> Result<(), BodyError> {
        self.expect(open)?;
        if self.next() == Some(close) {
            self.at += 1;
            return Ok(());
        }
        self.levels += 1;
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
        self.levels -= 1;
        Ok(())
    }

    /// The next byte that is not blank; it is not taken.
    pub(super) fn next(&mut self) -> Option<u8> {
        loop {
            match self.json.get(self.at)? {
                b' ' | b'\n' | b'\r' | b'\t' => self.at += 1,
                byte => return Some(*byte),
            }
        }
    }

    /// All that was not taken yet.
    pub(super) fn rest(&self) -> &'j [u8] {
        self.json.get(self.at..).unwrap_or_default()
    }

    fn expect(&mut self, byte: u8) -> Result<(), BodyError> {
        let found = self.next() == Some(byte);
        self.at += 1;
        if found { Ok(()) } else { Err(BodyError::Malformed) }
    }

    /// Takes the next value.
    pub(super) fn value(&mut self) -> Result<&'j [u8], BodyError> {
        self.next();
        let length = self.length_of_value().ok_or(BodyError::Malformed)?;
        let value = self.rest().get(..length).ok_or(BodyError::Malformed)?;
        self.skip(length);
        Ok(value)
    }

    /// Takes what is known to be a value of so many bytes.
    pub(super) const fn skip(&mut self, length: usize) {
        self.at += length;
    }

    fn length_of_value(&self) -> Option<usize> {
        let json = self.rest();
        match json.first()? {
            b'"' => return end_of_string(json, 1),
            b'{' | b'[' => {}
            b',' | b':' | b'}' | b']' => return None,
            _ => {
                let ends = |byte: &u8| matches!(byte, b',' | b'}' | b']' | b' ' | b'\n' | b'\r' | b'\t');
                return Some(json.iter().position(ends).unwrap_or(json.len()));
            }
        }
        let (mut at, mut depth) = (0, 0);
        loop {
            match json.get(at)? {
                b'"' => {
                    at = end_of_string(json, at + 1)?;
                    continue;
                }
                b'{' | b'[' if self.levels + depth == MOST_LEVELS => return None,
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
    use crate::request::text::text;
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

    fn fields(json: &[u8]) -> Result<Vec<(String, &[u8])>, BodyError> {
        let mut fields = Vec::new();
        super::fields(json, |name, scan| {
            fields.push((text(name)?.into_owned(), scan.value()?));
            Ok(())
        })?;
        Ok(fields)
    }

    fn items(json: &[u8]) -> Result<Vec<&[u8]>, BodyError> {
        let mut items = Vec::new();
        Scan::of_whole(json, |scan| {
            scan.items(|scan| {
                items.push(scan.value()?);
                Ok(())
            })
        })?;
        Ok(items)
    }

    proptest! {
        #[test]
        fn the_parts_are_those_that_a_parser_finds(text in json()) {
            match read(text.as_bytes()) {
                Value::Object(whole) => {
                    let fields = fields(text.as_bytes()).expect("an object");
                    let parts: Map<String, Value> =
                        fields.into_iter().map(|(name, value)| (name, read(value))).collect();
                    prop_assert_eq!(parts, whole);
                    prop_assert!(items(text.as_bytes()).is_err());
                }
                Value::Array(whole) => {
                    let items = items(text.as_bytes()).expect("an array");
                    let items: Vec<_> = items.into_iter().map(read).collect();
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
