//! Words that take too long to tokenize.
//!
//! A tokenizer splits a text into words, and within one it looks for the pair to merge next again and again: twice the length
//! takes more than twice the time, and a megabyte of one letter a second. Nobody writes such words but to that end.

/// A longer run of letters, of blanks or of other characters is a long word.
const LONG_BYTES: usize = 4 << 10;

/// More bytes of long words are not tokenized: it would take more than a hundred milliseconds.
const MOST_BYTES: usize = 256 << 10;

/// Whether `text` has so many long words that it is not to be tokenized. Words of other scripts than ASCII are not looked at:
/// they have tokens of their own for few letters, and no blanks between words in some.
pub(super) fn take_too_long(text: &str) -> bool {
    if text.len() <= MOST_BYTES {
        return false;
    }
    let runs = text.as_bytes().chunk_by(|a, b| kind(*a).is_some() && kind(*a) == kind(*b));
    let long = runs.map(<[u8]>::len).filter(|length| *length > LONG_BYTES);
    long.sum::<usize>() > MOST_BYTES
}

/// What a byte stands in a word with; `None` if with none.
fn kind(byte: u8) -> Option<u8> {
    match byte {
        b'a'..=b'z' | b'A'..=b'Z' => Some(0),
        b' ' | b'\t' | b'\n' | b'\r' => Some(1),
        b'0'..=b'9' | 0x80.. => None,
        _ => Some(2),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_megabyte_of_one_kind_takes_too_long_and_of_words_does_not() {
        for unit in ["a", "aB", " ", "\n", "- =", "-", "\t\n"] {
            let text = unit.repeat((1 << 20) / unit.len());
            assert_eq!(take_too_long(&text), unit != "- =", "{unit:?}");
            assert!(!take_too_long(&text[..MOST_BYTES]), "{unit:?}");
        }
        for unit in ["the ship ", "1", "é", "你好", "fn f() {}\n", "aGVsbG8gd29ybGQ5"] {
            assert!(!take_too_long(&unit.repeat((1 << 20) / unit.len())), "{unit:?}");
        }
        let long = "a".repeat(5_000);
        let many = |count: usize| vec![long.as_str(); count].join(" and ");
        assert_eq!([many(50), many(60)].map(|text| take_too_long(&text)), [false, true]);
    }
}
