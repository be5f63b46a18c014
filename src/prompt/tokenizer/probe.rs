//! Checks at load time that a faster way makes the same ids as the reference.

use super::PromptError;
use super::Tokenize;
use super::cut::{Cutter, Piece};
use super::lines::Lines;
use crate::units::TokenId;
use serde_json::Value;

/// How many texts are compared: enough to meet every kind of piece beside every other, and done in some ten
/// milliseconds.
const PROBES: usize = 300;

/// Pieces that tokenizers are known to disagree on: contractions, digits, blanks of all kinds, combining marks, code.
const TEXTS: [&str; 24] = [
    "user\n",
    "\n",
    "\n\n",
    " ",
    "   a",
    "a ",
    "don't",
    "I'LL",
    "1234",
    "{\"a\": [1]}",
    "\u{301}e",
    "é",
    "你好",
    "🙂",
    "\t\r\n",
    "\u{a0}",
    "<|",
    "fn main() {\n    x += 1;\n}",
    "ſt",
    "\u{2028}",
    "한국",
    "  \n  ",
    "...!?",
    "/path/to/Über",
];

/// Texts made of the tokenizer's own added tokens and of [`TEXTS`]; the same ones each time.
fn texts(added_tokens: &Value) -> impl Iterator<Item = String> {
    let added = added_tokens.as_array().map(Vec::as_slice).unwrap_or_default();
    let added: Vec<&str> = added.iter().filter_map(|token| token["content"].as_str()).collect();
    let mut random = fastrand::Rng::with_seed(1);
    (0..PROBES).map(move |_| {
        (0..random.usize(1..9))
            .filter_map(|_| {
                let token = random.choice(&added).filter(|_| random.bool()).copied();
                token.or_else(|| random.choice(TEXTS))
            })
            .collect()
    })
}

/// Whether `other` makes the reference's ids.
pub(super) fn agrees(reference: &dyn Tokenize, other: &dyn Tokenize, added_tokens: &Value) -> bool {
    texts(added_tokens).all(|text| same(reference, &text, |ids| other.encode(&text, ids).is_ok()))
}

/// Whether the ids of cut texts, put together, are those of whole ones, if `encode` makes them.
pub(super) fn can_be_cut(
    reference: &dyn Tokenize,
    cutter: &Cutter,
    encode: impl Fn(&str, &mut Vec<TokenId>) -> Result<(), PromptError>,
    added_tokens: &Value,
) -> bool {
    texts(added_tokens).all(|text| {
        same(reference, &text, |ids| {
            let result = cutter.cut(&text, |piece| match piece {
                Piece::Token(id) => {
                    ids.push(id);
                    Ok(())
                }
                Piece::Text(piece) => encode(piece, ids),
            });
            result.is_ok()
        })
    })
}

/// Whether texts can be cut between lines.
pub(super) fn can_be_cut_between(reference: &dyn Tokenize, lines: Lines, added_tokens: &Value) -> bool {
    texts(added_tokens).all(|text| {
        same(reference, &text, |ids| {
            let mut rest = &text[..];
            while let Some((part, behind)) = lines.place(rest, 1).and_then(|at| rest.split_at_checked(at)) {
                if reference.encode(part, ids).is_err() {
                    return false;
                }
                rest = behind;
            }
            reference.encode(rest, ids).is_ok()
        })
    })
}

fn same(reference: &dyn Tokenize, text: &str, encode: impl FnOnce(&mut Vec<TokenId>) -> bool) -> bool {
    let (mut expected, mut ids) = (Vec::new(), Vec::new());
    reference.encode(text, &mut expected).is_ok() && encode(&mut ids) && expected == ids
}
