//! Where a long text without added tokens can be cut too: between some of its lines.
//!
//! The patterns by which the tokenizers below split a text have this in common: no match goes over a place between a line
//! feed and an ASCII letter, and what they look ahead for at the end of a match is never decided there. A line feed stands
//! in a match only as blank before something that is no letter, or in a run of blanks and ends of lines, which
//! `\s*[\r\n]+` ends behind its last line feed before `\s+(?!\S)` is tried. NFC joins nothing to what stands before a
//! letter. So both sides have the ids that they have in the whole text.

use serde_json::Value;

/// The splits of Qwen 2 and 3, Llama 3, gpt-oss, Mistral's Tekken and DeepSeek V3.
const PATTERNS: [&str; 7] = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"\p{N}{1,3}",
    "[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
];

/// A text that is longer is cut. Its parts are about half as long: some hundred microseconds of work, after which the
/// time can be looked at.
const LONG_BYTES: usize = 64 << 10;

/// Tells that a tokenizer's texts can be cut between lines.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lines(());

impl Lines {
    /// `None` if it is not certain for the tokenizer described by `json`.
    pub(super) fn new(json: &Value) -> Option<Self> {
        let steps = json["pre_tokenizer"]["pretokenizers"].as_array()?;
        let (last, splits) = steps.split_last()?;
        let bytes =
            last["type"] == "ByteLevel" && last["add_prefix_space"] == false && last["use_regex"] == false;
        let is_known = |split: &Value| {
            let pattern = split["pattern"]["Regex"].as_str();
            split["type"] == "Split"
                && split["behavior"] == "Isolated"
                && split["invert"] != true
                && pattern.is_some_and(|pattern| PATTERNS.contains(&pattern))
        };
        // A token that takes blanks may take the line feed, one with a line feed in it may stand at the place.
        let in_the_way = |token: &Value| {
            let takes = |field: &str| token[field] == true;
            let content = token["content"].as_str();
            takes("lstrip") || takes("rstrip") || content.is_none_or(|content| content.contains('\n'))
        };
        let tokens = json["added_tokens"].as_array().map(Vec::as_slice).unwrap_or_default();
        let certain = json["pre_tokenizer"]["type"] == "Sequence"
            && bytes
            && !splits.is_empty()
            && splits.iter().all(is_known)
            && normalizer_is_local(&json["normalizer"])
            && !tokens.iter().any(in_the_way);
        certain.then_some(Self(()))
    }

    /// How much of a long text comes first; `None` if the text is to stay whole. What comes first does not depend on how
    /// the text ends, so that a text that grows begins with the same parts.
    pub(super) fn first(self, text: &str) -> Option<usize> {
        let from = LONG_BYTES / 2;
        (text.len() > LONG_BYTES).then(|| self.place(text, from)).flatten()
    }

    /// The first place to cut behind the first `from` bytes.
    pub(super) fn place(self, text: &str, from: usize) -> Option<usize> {
        let pairs = text.as_bytes().get(from.saturating_sub(1)..)?.windows(2);
        let is_place = |pair: &[u8]| matches!(pair, [b'\n', letter] if letter.is_ascii_alphabetic());
        pairs.enumerate().find(|(_, pair)| is_place(pair)).map(|(at, _)| from.saturating_sub(1) + at + 1)
    }
}

fn normalizer_is_local(normalizer: &Value) -> bool {
    let is_empty = normalizer["normalizers"].as_array().is_some_and(Vec::is_empty);
    normalizer.is_null() || normalizer["type"] == "NFC" || (normalizer["type"] == "Sequence" && is_empty)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::tokenizer::{Tokenize, fast::Fast};
    use std::path::PathBuf;

    const LINES: Lines = Lines(());

    #[test]
    fn a_long_text_is_cut_before_a_line_that_begins_with_a_letter() {
        assert_eq!(LINES.place("ab\n\n1\n é\nx\ny", 0), Some(10));
        assert_eq!(LINES.place("a\nb\nc", 3), Some(4));
        assert_eq!(LINES.place("a\nb\nc", 2), Some(2));
        assert_eq!(LINES.place("ab", 9), None);
        let long = format!("{}\nb{}", "a".repeat(LONG_BYTES), "c".repeat(LONG_BYTES));
        assert_eq!(LINES.first(&long), Some(LONG_BYTES + 1));
        assert_eq!(LINES.first(&long[..LONG_BYTES]), None);
    }

    /// Texts in which everything stands beside everything, cut wherever it is allowed.
    #[test]
    fn the_parts_have_the_ids_of_the_whole_text_in_real_vocabularies() {
        const TEXTS: [&str; 22] = [
            "\n", "\n\n", "\r\n", "\n \n", " \n", "\t", " ", "  ", "a", "Bcd", "é", "e\u{301}", "don't",
            "'S", "12", "/", "//", "...", "{\n", "你好", "\u{2028}", "\u{a0}",
        ];
        let mut tried = 0;
        for name in ["qwen3", "llama3_1", "gptoss", "mistral_nemo", "deepseek_v3"] {
            let Some(json) = vocabulary(name) else {
                println!("skipped: run scripts/fetch-tokenizers for the vocabulary of {name}");
                continue;
            };
            let lines = Lines::new(&json).expect("a known tokenizer");
            let tokenizer = Fast::from_json(json).expect("a tokenizer");
            let ids = |text: &str| {
                let mut ids = Vec::new();
                tokenizer.encode(text, &mut ids).expect("ids");
                ids
            };
            let mut random = fastrand::Rng::with_seed(3);
            for _ in 0..3000 {
                let text: String = (0..random.usize(2..24)).filter_map(|_| random.choice(TEXTS)).collect();
                let (mut parts, mut start) = (Vec::new(), 0);
                while let Some(at) = lines.place(&text, start + 1) {
                    parts.append(&mut ids(&text[start..at]));
                    start = at;
                    tried += 1;
                }
                parts.append(&mut ids(&text[start..]));
                assert_eq!(parts, ids(&text), "{name}: {text:?}");
            }
        }
        println!("{tried} cuts");
    }

    fn vocabulary(name: &str) -> Option<Value> {
        let cache = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/kvspoa/tokenizers"));
        let dir = std::env::var_os("KVSPOA_TOKENIZERS").map(PathBuf::from).or_else(cache)?;
        let json = std::fs::read(dir.join(name).join("tokenizer.json")).ok()?;
        Some(serde_json::from_slice(&json).expect("JSON"))
    }

    #[test]
    fn another_tokenizer_is_left_alone() {
        let known = serde_json::json!({"added_tokens": [{"content": "<a>"}], "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": PATTERNS[0]}, "behavior": "Isolated", "invert": false},
                {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]}});
        assert!(Lines::new(&known).is_some());
        for (pointer, value) in [
            ("/normalizer/type", "Lowercase".into()),
            ("/pre_tokenizer/pretokenizers/0/pattern/Regex", r"\s+".into()),
            ("/pre_tokenizer/pretokenizers/0/behavior", "MergedWithNext".into()),
            ("/pre_tokenizer/pretokenizers/1/use_regex", true.into()),
            ("/pre_tokenizer/pretokenizers/1/add_prefix_space", true.into()),
            ("/added_tokens/0/content", "\nx".into()),
        ] {
            let mut other = known.clone();
            *other.pointer_mut(pointer).expect("a place") = value;
            assert!(Lines::new(&other).is_none(), "{pointer}");
        }
    }
}
