//! Where a text can be cut into pieces that are tokenized apart from each other.
//!
//! A tokenizer first cuts its added tokens (`<|im_start|>` and the like) out of the text; what stands between them is
//! normalized, split and merged piece by piece. So the ids of a piece depend on that piece alone, and can be kept. Where
//! a tokenizer has a feature for which that is not certain, it is not cut at all.

use crate::units::TokenId;
use aho_corasick::{AhoCorasick, MatchKind};
use serde::Deserialize;
use serde_json::Value;
use std::ops::Range;
use std::sync::OnceLock;

/// A part of a text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::prompt) enum Piece<'t> {
    /// An added token.
    Token(TokenId),
    /// Text between added tokens.
    Text(&'t str),
}

/// Cuts texts at a tokenizer's added tokens.
#[derive(Debug)]
pub(super) struct Cutter {
    /// The tokens that are looked for in the text as it is.
    raw: Automaton,
    /// The tokens that are looked for in what is left after normalizing; only if that changes nothing.
    normalized: Option<Automaton>,
    finds_all: bool,
}

/// An entry of `added_tokens` in a `tokenizer.json`.
#[derive(Clone, Deserialize, Debug)]
struct AddedToken {
    id: u32,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: bool,
}

impl AddedToken {
    /// Whether the token takes or needs something of the text beside it.
    fn looks_aside(&self) -> bool {
        self.single_word || self.lstrip || self.rstrip
    }
}

/// Finds a set of tokens, the leftmost one first and of those the longest.
#[derive(Debug)]
struct Automaton {
    search: AhoCorasick,
    /// The id of each pattern; `None` for a token beside which a text must not be cut.
    ids: Vec<Option<TokenId>>,
    patterns: Vec<String>,
    /// Whether a text can be cut at either end of a pattern without looking at what stands there; found out when asked.
    edges: Vec<OnceLock<bool>>,
}

impl Cutter {
    /// A cutter for the tokenizer described by `json`; `None` if its texts cannot be cut for certain.
    pub(super) fn new(json: &Value) -> Option<Self> {
        if !pieces_are_apart(json) {
            return None;
        }
        let mut tokens: Vec<AddedToken> = match json.get("added_tokens") {
            None | Some(Value::Null) => Vec::new(),
            Some(tokens) => Vec::deserialize(tokens).ok()?,
        };
        tokens.retain(|token| !token.content.is_empty());
        let blank_ends = |token: &AddedToken| token.content.trim() != token.content;
        let any = |test: &dyn Fn(&AddedToken) -> bool| tokens.iter().any(test);
        // A single word is found or not by what stands beside it; a stripping token may take another one's blanks.
        if any(&|token| token.single_word) || (any(&AddedToken::looks_aside) && any(&blank_ends)) {
            return None;
        }
        let looks_aside = any(&AddedToken::looks_aside);
        let (normalized, raw): (Vec<_>, Vec<_>) = tokens.into_iter().partition(|token| token.normalized);
        let no_normalizer = has_no_normalizer(json);
        let finds_all = !looks_aside && (no_normalizer || normalized.is_empty());
        let normalized = if no_normalizer { Some(Automaton::new(&normalized)?) } else { None };
        Some(Self { raw: Automaton::new(&raw)?, normalized, finds_all })
    }

    /// Whether no added token stands in the texts between those that are cut out.
    pub(super) const fn finds_all(&self) -> bool {
        self.finds_all
    }

    /// Calls `take` with each piece of `text` in order; stops at the first error.
    pub(super) fn cut<E>(
        &self,
        text: &str,
        mut take: impl FnMut(Piece<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.raw.cut(text, &mut |piece| match (piece, &self.normalized) {
            (Piece::Text(text), Some(normalized)) => normalized.cut(text, &mut take),
            (piece, _) => take(piece),
        })
    }
}

impl Cutter {
    /// The part of a text, from its first added token to its last one, that is cut in the same way whatever stands before
    /// and behind the text; `None` if that is not certain of any part.
    pub(super) fn part(&self, text: &str) -> Option<Range<usize>> {
        let mut found = self.raw.search.find_iter(text);
        let first = found.next()?;
        let last = found.last().unwrap_or(first);
        let is_edge = |found: &aho_corasick::Match| self.raw.is_edge(found.pattern().as_usize());
        (is_edge(&first) && is_edge(&last)).then(|| first.start()..last.end())
    }
}

impl Automaton {
    fn new(tokens: &[AddedToken]) -> Option<Self> {
        let search = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(tokens.iter().map(|token| &token.content))
            .ok()?;
        let ids = tokens.iter().map(|token| (!token.looks_aside()).then_some(TokenId(token.id))).collect();
        let patterns = tokens.iter().map(|token| token.content.clone()).collect();
        Some(Self { search, ids, patterns, edges: tokens.iter().map(|_| OnceLock::new()).collect() })
    }

    /// Whether a pattern is a token, and no pattern reaches over one of its ends: none has it within, and none ends with
    /// what it begins with.
    fn is_edge(&self, at: usize) -> bool {
        let (Some(Some(_)), Some(pattern), Some(known)) =
            (self.ids.get(at), self.patterns.get(at), self.edges.get(at))
        else {
            return false;
        };
        let reaches_over = |other: &String| {
            let is_within = other.len() > pattern.len() && other.contains(pattern.as_str());
            let overlaps = (1..other.len().min(pattern.len())).any(|length| {
                let (end, start) = (other.len() - length, length);
                other.as_bytes().get(end..) == pattern.as_bytes().get(..start)
            });
            is_within || overlaps
        };
        *known.get_or_init(|| !self.patterns.iter().any(reaches_over))
    }

    fn cut<E>(&self, text: &str, take: &mut impl FnMut(Piece<'_>) -> Result<(), E>) -> Result<(), E> {
        let mut start = 0;
        for found in self.search.find_iter(text) {
            let Some(Some(id)) = self.ids.get(found.pattern().as_usize()) else { continue };
            if start < found.start() {
                take(Piece::Text(&text[start..found.start()]))?;
            }
            take(Piece::Token(*id))?;
            start = found.end();
        }
        if start < text.len() { take(Piece::Text(&text[start..])) } else { Ok(()) }
    }
}

/// Whether nothing behind the added tokens looks beyond its piece.
fn pieces_are_apart(json: &Value) -> bool {
    let model = &json["model"];
    let bpe = model["type"].as_str().is_none_or(|kind| kind == "BPE") && model.get("merges").is_some();
    let no_dropout = model["dropout"].as_f64().is_none_or(|dropout| dropout == 0.0);
    bpe && no_dropout && pre_tokenizer_is_local(&json["pre_tokenizer"])
}

/// `Metaspace` treats the beginning of the whole text otherwise if it is told to prepend only there.
fn pre_tokenizer_is_local(pre_tokenizer: &Value) -> bool {
    match pre_tokenizer["type"].as_str() {
        None => pre_tokenizer.is_null(),
        Some("Sequence") => match &pre_tokenizer["pretokenizers"] {
            Value::Array(steps) => steps.iter().all(pre_tokenizer_is_local),
            _ => false,
        },
        Some("Metaspace") => matches!(pre_tokenizer["prepend_scheme"].as_str(), Some("always" | "never")),
        Some(kind) => matches!(
            kind,
            "ByteLevel" | "Split" | "Digits" | "Punctuation" | "Whitespace" | "WhitespaceSplit"
        ),
    }
}

fn has_no_normalizer(json: &Value) -> bool {
    let normalizer = &json["normalizer"];
    let empty_sequence =
        normalizer["type"] == "Sequence" && normalizer["normalizers"].as_array().is_some_and(Vec::is_empty);
    normalizer.is_null() || empty_sequence
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn tokenizer(tokens: &Value) -> Value {
        json!({"added_tokens": tokens, "normalizer": null, "pre_tokenizer": {"type": "ByteLevel"},
            "model": {"type": "BPE", "merges": [], "vocab": {}}})
    }

    fn pieces(json: &Value, text: &str) -> Vec<String> {
        let mut pieces = Vec::new();
        let cutter = Cutter::new(json).expect("a cutter");
        let result: Result<(), ()> = cutter.cut(text, |piece| {
            pieces.push(match piece {
                Piece::Token(id) => format!("#{}", id.0),
                Piece::Text(text) => text.to_owned(),
            });
            Ok(())
        });
        assert_eq!(result, Ok(()));
        pieces
    }

    #[test]
    fn a_text_is_cut_at_added_tokens() {
        let json = tokenizer(&json!([{"id": 7, "content": "<a>"}, {"id": 8, "content": "<b>"}]));
        assert_eq!(pieces(&json, "x<a><b> y <a"), ["x", "#7", "#8", " y <a"]);
        assert_eq!(pieces(&json, "<a>"), ["#7"]);
        assert!(pieces(&json, "").is_empty());
    }

    #[test]
    fn of_nested_tokens_the_leftmost_longest_counts() {
        let json = tokenizer(
            &json!([{"id": 7, "content": "<a>"}, {"id": 8, "content": "<<a>>"}, {"id": 9, "content": "a>>!"}]),
        );
        assert_eq!(pieces(&json, "<<a>>!"), ["#8", "!"]);
        assert_eq!(pieces(&json, "<a>>!"), ["#7", ">!"]);
    }

    #[test]
    fn a_token_that_takes_blanks_hides_others_but_is_no_place_to_cut() {
        let json =
            tokenizer(&json!([{"id": 7, "content": "<a>"}, {"id": 8, "content": "[<a>]", "rstrip": true}]));
        assert_eq!(pieces(&json, "x[<a>] y<a>z"), ["x[<a>] y", "#7", "z"]);
    }

    #[test]
    fn tokens_of_the_second_pass_are_cut_at_only_without_normalizer() {
        let mut json =
            tokenizer(&json!([{"id": 7, "content": "<a>", "normalized": true}, {"id": 8, "content": "a>>"}]));
        assert_eq!(pieces(&json, "x<a>y<a>>"), ["x", "#7", "y<", "#8"]);
        json["normalizer"] = json!({"type": "NFC"});
        assert_eq!(pieces(&json, "x<a>y"), ["x<a>y"]);
    }

    /// Tokens that overlap, hold each other and look aside, in texts where everything stands beside everything.
    #[test]
    fn a_part_of_a_text_is_cut_in_the_same_way_wherever_it_stands() {
        const PARTS: [&str; 9] = ["<a>", "<a>>", "[<b>", "<b>", "]<", "<", ">", "x", "[x]"];
        let mut random = fastrand::Rng::with_seed(7);
        let mut found = 0;
        for round in 0..3000 {
            let mut contents: Vec<_> = PARTS.iter().filter(|_| random.bool()).collect();
            random.shuffle(&mut contents);
            let tokens: Vec<_> = contents
                .iter()
                .enumerate()
                .map(|(id, content)| json!({"id": id, "content": content, "rstrip": id == 0 && round % 3 == 0}))
                .collect();
            let json = tokenizer(&json!(tokens));
            let mut text =
                || -> String { (0..random.usize(0..6)).filter_map(|_| random.choice(PARTS)).collect() };
            let (before, known, after) = (text(), text(), text());
            let cutter = Cutter::new(&json).expect("a cutter");
            let Some(part) = cutter.part(&known) else { continue };
            found += 1;
            let mut apart = pieces(&json, &format!("{before}{}", &known[..part.start]));
            apart.append(&mut pieces(&json, &known[part.clone()]));
            apart.append(&mut pieces(&json, &format!("{}{after}", &known[part.end..])));
            assert_eq!(apart, pieces(&json, &format!("{before}{known}{after}")), "{contents:?}");
        }
        assert!(found > 300, "{found}");
    }

    #[test]
    fn what_is_not_certain_is_not_cut() {
        let single_word = tokenizer(&json!([{"id": 7, "content": "a", "single_word": true}]));
        assert!(Cutter::new(&single_word).is_none());
        let blanks =
            tokenizer(&json!([{"id": 7, "content": "<a>", "lstrip": true}, {"id": 8, "content": "\n\n"}]));
        assert!(Cutter::new(&blanks).is_none());
        for (field, value) in [
            ("pre_tokenizer", json!({"type": "Metaspace", "prepend_scheme": "first"})),
            ("pre_tokenizer", json!({"type": "Sequence", "pretokenizers": [{"type": "Unknown"}]})),
            ("model", json!({"type": "Unigram"})),
            ("model", json!({"type": "BPE", "merges": [], "dropout": 0.1})),
        ] {
            let mut json = tokenizer(&json!([]));
            json[field] = value;
            assert!(Cutter::new(&json).is_none(), "{json}");
        }
    }
}
