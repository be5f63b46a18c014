//! A JSON text → what it says.

use super::body::BodyError;
use memchr::memchr;
use std::borrow::Cow;

/// What a value says that is a text. It ends at its first quote without a backslash, as [`super::scan`] takes it.
///
/// # Errors
/// It is none, or not JSON.
pub(super) fn text(json: &[u8]) -> Result<Cow<'_, str>, BodyError> {
    if let [b'"', inside @ .., b'"'] = json
        && let Some(text) = simple(inside)
    {
        return Ok(text);
    }
    serde_json::from_slice(json).map(Cow::Owned).map_err(|_| BodyError::Malformed)
}

/// The same of what stands between the quotes; `None` if that takes a closer look. Of the escapes those of one letter are
/// read: what programs send as UTF-8 has no others but for control characters.
fn simple(inside: &[u8]) -> Option<Cow<'_, str>> {
    // Without an early end the compiler takes many bytes at once.
    let has_control = inside.iter().fold(false, |has, byte| has | (*byte < b' '));
    if has_control {
        return None;
    }
    let Some(mut length) = memchr(b'\\', inside) else {
        return std::str::from_utf8(inside).ok().map(Cow::Borrowed);
    };
    let mut text = Vec::with_capacity(inside.len());
    let mut rest = inside;
    loop {
        let (plain, escape) = rest.split_at_checked(length)?;
        text.extend_from_slice(plain);
        let letter = match escape {
            [] => return String::from_utf8(text).ok().map(Cow::Owned),
            [_, letter, after @ ..] => {
                rest = after;
                *letter
            }
            [_] => return None,
        };
        text.push(match letter {
            b'"' | b'\\' | b'/' => letter,
            b'n' => b'\n',
            b't' => b'\t',
            b'r' => b'\r',
            b'b' => 8,
            b'f' => 12,
            _ => return None,
        });
        length = memchr(b'\\', rest).unwrap_or(rest.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn check(json: &[u8]) -> Result<(), TestCaseError> {
        let expected: Option<String> = serde_json::from_slice(json).ok();
        prop_assert_eq!(text(json).ok().map(Cow::into_owned), expected);
        Ok(())
    }

    proptest! {
        #[test]
        fn a_text_is_what_a_parser_reads(
            parts in prop::collection::vec(
                prop::sample::select(vec![
                    "a", "é", "😀", "/", "\u{7f}", r#"\""#, r"\\", r"\/", r"\b", r"\f", r"\n", r"\r", r"\t",
                    r"\u00e9", r"\ud83d\ude00", r"\ud83d", r"\x", "\n", "\0", "a text without anything in it",
                ]),
                0..12,
            ),
        ) {
            check(format!("\"{}\"", parts.concat()).as_bytes())?;
        }

        #[test]
        fn no_bytes_are_too_broken(inside in prop::collection::vec(any::<u8>(), 0..6)) {
            // A quote or a backslash that ends the text too early or too late is not for this module.
            let inside: Vec<u8> = inside.into_iter().filter(|byte| !b"\"\\".contains(byte)).collect();
            check(&[b"\"", &inside[..], b"\""].concat())?;
        }
    }

    #[test]
    fn what_is_no_text_is_malformed() {
        for json in ["", "\"", "7", "null", "{}", "[\"a\"]", "\"a", "a\"", r#""\""#] {
            assert_eq!(text(json.as_bytes()), Err(BodyError::Malformed), "{json}");
        }
    }
}
