//! Words that take too long to tokenize.
//!
//! A tokenizer splits a text into words, and within one it looks for the pair to merge next again and again: twice the length
//! takes more than twice the time, and a megabyte of one letter a second. Nobody writes such words but to that end.

/// A longer run of letters, of blanks or of other characters is a long word. In scripts without blanks between words there are
/// at least marks between sentences.
const LONG_BYTES: usize = 4 << 10;

/// More bytes of long words are not tokenized: it would take more than a hundred milliseconds.
const MOST_BYTES: usize = 256 << 10;

/// Whether `text` has so many long words that it is not to be tokenized.
pub(super) fn take_too_long(text: &str) -> bool {
    if text.len() <= MOST_BYTES {
        return false;
    }
    let mut word = Word { kind: None, bytes: 0 };
    let long_words = text.chars().map(|character| word.add(character)).sum::<usize>();
    long_words + word.if_long() > MOST_BYTES
}

/// As much as was seen of a word.
struct Word {
    kind: Option<Kind>,
    bytes: usize,
}

impl Word {
    /// Goes on with a character; returns the length of the word that ends before it, if that is a long one.
    fn add(&mut self, character: char) -> usize {
        let kind = kind(character);
        if kind.is_some() && kind == self.kind {
            self.bytes += character.len_utf8();
            return 0;
        }
        let before = self.if_long();
        *self = Self { kind, bytes: character.len_utf8() };
        before
    }

    fn if_long(&self) -> usize {
        if self.bytes > LONG_BYTES { self.bytes } else { 0 }
    }
}

/// What makes a word with others of its kind.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Letter,
    Blank,
    Other,
}

/// The kind of a character; `None` of digits, of which tokenizers put few together.
fn kind(character: char) -> Option<Kind> {
    match character {
        'a'..='z' | 'A'..='Z' => Some(Kind::Letter),
        '0'..='9' => None,
        character if character.is_whitespace() => Some(Kind::Blank),
        character if character.is_alphabetic() => Some(Kind::Letter),
        character if character.is_numeric() => None,
        _ => Some(Kind::Other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_megabyte_of_one_kind_takes_too_long_and_of_words_does_not() {
        for unit in ["a", "aB", " ", "\n", "- =", "-", "\t\n", "é", "aй", "你好", "ไทย", "😀", "。"]
        {
            let text = unit.repeat((1 << 20) / unit.len());
            assert_eq!(take_too_long(&text), unit != "- =", "{unit:?}");
            assert!(!take_too_long(&unit.repeat(MOST_BYTES / unit.len())), "{unit:?}");
        }
        for unit in ["the ship ", "1", "١", "你好。", "fn f() {}\n", "aGVsbG8gd29ybGQ5"] {
            assert!(!take_too_long(&unit.repeat((1 << 20) / unit.len())), "{unit:?}");
        }
        let long = "a".repeat(5_000);
        let many = |count: usize| vec![long.as_str(); count].join(" and ");
        assert_eq!([many(50), many(60)].map(|text| take_too_long(&text)), [false, true]);
    }
}
