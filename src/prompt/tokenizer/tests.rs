use super::*;
use crate::prompt::{Endpoint, Model};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::cell::Cell;

/// The embedded tokenizer with other added tokens and, if given, another normalizer.
fn tokenizer_json(added: &[(&str, bool)], normalizer: Option<Value>) -> Vec<u8> {
    let mut json: Value = serde_json::from_slice(include_bytes!("../tiny/tokenizer.json")).expect("JSON");
    let first_id = json["model"]["vocab"].as_object().expect("a vocabulary").len();
    let tokens: Vec<Value> = added
        .iter()
        .zip(first_id..)
        .map(|((content, normalized), id)| {
            json!({"id": id, "content": content, "normalized": normalized, "single_word": false, "lstrip": false,
                "rstrip": false, "special": id % 2 == 0})
        })
        .collect();
    json["added_tokens"].as_array_mut().expect("a list").extend(tokens);
    if let Some(normalizer) = normalizer {
        json["normalizer"] = normalizer;
    }
    json.to_string().into_bytes()
}

const ADDED: [(&str, bool); 6] =
    [("<think>", false), ("<a>", false), ("<<a>>", false), ("a>>b", false), ("<Usr|>", true), ("Usr|", true)];

fn whole(json: &[u8], text: &str) -> Vec<TokenId> {
    let mut ids = Vec::new();
    HuggingFace::from_json(json).expect("a tokenizer").encode(text, &mut ids).expect("ids");
    ids
}

#[test]
fn the_tokens_around_a_text_are_found_in_the_file() {
    let mut json: Value = serde_json::from_slice(include_bytes!("../tiny/tokenizer.json")).expect("JSON");
    json["post_processor"] = json!({"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}});
    let json = json.to_string().into_bytes();
    let tokenizer = Tokenizer::load(&json, 1 << 20).expect("a tokenizer");
    let encode = |add| {
        tokenizer.encode("<|im_end|>", add).expect("ids").into_iter().map(|id| id.0).collect::<Vec<_>>()
    };
    assert_eq!(encode(true), [1, 2]);
    assert_eq!(encode(false), [2]);
}

#[test]
fn padding_and_truncation_of_the_file_do_not_count() {
    let mut json: Value = serde_json::from_slice(include_bytes!("../tiny/tokenizer.json")).expect("JSON");
    json["truncation"] =
        json!({"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"});
    json["padding"] = json!({"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "<|endoftext|>"});
    let tokenizer = Tokenizer::load(json.to_string().as_bytes(), 0).expect("a tokenizer");
    let text = "one two three four";
    let plain = Tokenizer::load(include_bytes!("../tiny/tokenizer.json"), 0).expect("a tokenizer");
    assert_eq!(tokenizer.encode(text, true), plain.encode(text, true));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn cached_pieces_make_the_ids_of_the_whole_text(
        texts in prop::collection::vec(prop::collection::vec(0usize..22, 0..12), 1..12),
        normalized in any::<bool>(),
    ) {
        const TEXTS: [&str; 16] = [
            "user\n", " ", "\n\n", "\u{301}", "e\u{301}", "<", "a>", ">>", "<a", "Us", "r|", "12", "don't ", "你好", "\u{212b}",
            "<|im_start|>",
        ];
        let normalizer = if normalized { json!({"type": "NFC"}) } else { Value::Null };
        let json = tokenizer_json(&ADDED, Some(normalizer));
        let tokenizer = Tokenizer::load(&json, 1 << 16).expect("a tokenizer");
        prop_assert!(tokenizer.cached.is_some());
        let reference = HuggingFace::from_json(&json).expect("a tokenizer");
        for parts in texts {
            let text: String =
                parts.iter().map(|at| TEXTS.get(*at).copied().unwrap_or_else(|| ADDED[at - 16].0)).collect();
            let mut ids = Vec::new();
            reference.encode(&text, &mut ids).expect("ids");
            prop_assert_eq!(tokenizer.encode(&text, false).expect("ids"), ids, "{:?}", text);
        }
    }
}

#[test]
fn a_repeated_text_comes_from_the_cache() {
    let json = tokenizer_json(&ADDED, None);
    let tokenizer = Tokenizer::load(&json, 1 << 20).expect("a tokenizer");
    let text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n";
    assert_eq!(tokenizer.encode(text, false).expect("ids"), whole(&json, text));
    let stats = tokenizer.cache_stats().expect("a cache");
    assert_eq!((stats.hits, stats.misses), (2, 2));
}

#[test]
fn the_fast_library_is_used_where_it_agrees_with_the_reference() {
    let json = tokenizer_json(&ADDED, None);
    let tokenizer = Tokenizer::load(&json, 0).expect("a tokenizer");
    assert!(format!("{tokenizer:?}").contains("Fast"), "{tokenizer:?}");
}

/// Two kinds of files of which the fast library makes other ids than the reference.
#[test]
fn where_the_fast_library_differs_the_reference_is_used() {
    let mut without_words: Value = serde_json::from_slice(&tokenizer_json(&[], None)).expect("JSON");
    without_words["pre_tokenizer"] = Value::Null;
    let nested = tokenizer_json(&[("the", true), ("the ", false)], Some(Value::Null));
    for json in [without_words.to_string().into_bytes(), nested] {
        let text = "<|im_start|>user\nthe ships in the harbour, the snow<|im_end|>\nthe end ";
        let parsed = serde_json::from_slice(&json).expect("JSON");
        let mut fast = Vec::new();
        Fast::from_json(parsed).expect("a tokenizer").encode(text, &mut fast).expect("ids");
        assert_ne!(fast, whole(&json, text), "the test's own premise");
        let tokenizer = Tokenizer::load(&json, 1 << 20).expect("a tokenizer");
        assert!(format!("{tokenizer:?}").contains("HuggingFace"), "{tokenizer:?}");
        for _ in 0..2 {
            assert_eq!(tokenizer.encode(text, false), Ok(whole(&json, text)));
        }
    }
}

#[test]
fn a_text_with_words_that_take_too_long_has_no_ids() {
    let tokenizer = Tokenizer::load(&tokenizer_json(&ADDED, None), 1 << 20).expect("a tokenizer");
    let text = format!("<|im_start|>user\n{}<|im_end|>", "a".repeat(8 << 20));
    assert_eq!(tokenizer.encode(&text, false), Err(PromptError::LongWords));
}

#[test]
fn a_probe_finds_ids_that_differ() {
    let reference = HuggingFace::from_json(&tokenizer_json(&ADDED, None)).expect("a tokenizer");
    let other = HuggingFace::from_json(&tokenizer_json(&ADDED[1..], None)).expect("a tokenizer");
    let added = json!([{"content": "<|im_start|>"}, {"content": "<think>"}]);
    assert!(probe::agrees(&reference, &reference, &added));
    assert!(!probe::agrees(&reference, &other, &added));
}

/// Messages of which each text ends and begins somehow, in every order, by a template that puts them side by side.
#[test]
fn the_ids_of_known_texts_make_those_of_the_whole_text() {
    const PARTS: [&str; 14] = [
        "<a>",
        "<<a>>",
        "a>>b",
        "<Usr|>",
        "Usr|",
        "<think>",
        "<|im_start|>",
        "<|im_end|>",
        "<",
        ">",
        "\n",
        "e",
        "\u{301}",
        "x y",
    ];
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<a>go' if add_generation_prompt }}";
    let mut random = fastrand::Rng::with_seed(5);
    let (mut late, mut known) = (0, 0);
    for normalizer in [Value::Null, json!({"type": "NFC"})] {
        let json = tokenizer_json(&ADDED, Some(normalizer));
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("tokenizer.json"), &json).expect("a file");
        std::fs::write(dir.path().join("chat_template.jinja"), template).expect("a file");
        let model = Model::load(dir.path()).expect("a model");
        let reference = HuggingFace::from_json(&json).expect("a tokenizer");
        let texts: Vec<String> = (0..40)
            .map(|at| {
                let mut text: String = (0..random.usize(1..6)).filter_map(|_| random.choice(PARTS)).collect();
                if at % 4 == 0 {
                    text.insert_str(
                        text.len() - text.chars().last().map_or(0, char::len_utf8),
                        &"so 12 ".repeat(20),
                    );
                }
                text
            })
            .collect();
        for _ in 0..400 {
            let chosen: Vec<&String> =
                (0..random.usize(1..8)).filter_map(|_| random.choice(&texts)).collect();
            let messages: Vec<Value> =
                chosen.iter().map(|text| json!({"role": "user", "content": text})).collect();
            let text: String = chosen.into_iter().map(String::as_str).chain(["<a>go"]).collect();
            let mut whole = Vec::new();
            reference.encode(&text, &mut whole).expect("ids");
            let body = json!({ "messages": messages }).to_string();
            let ask = model.read(Endpoint::ChatCompletions, body.as_bytes()).expect("a body");
            let left = Cell::new(random.usize(..40));
            let time_is_up = || left.replace(left.get().saturating_sub(1)) == 0;
            match model.tokens(&ask, &time_is_up) {
                Ok(tokens) if !tokens.is_whole => {
                    late += 1;
                    assert!(TokenIds::from(whole.clone()).starts_with(&tokens.ids), "{text:?}");
                }
                Ok(tokens) => assert_eq!(tokens.ids.into_vec(), whole, "{text:?}"),
                Err(error) => assert_eq!(error, PromptError::Late),
            }
            let tokens = model.tokens(&ask, &|| false).expect("tokens");
            assert_eq!(tokens.ids.into_vec(), whole, "{text:?}");
        }
        known += model.known_stats().hits;
    }
    assert!(late > 20 && known > 500, "{late}, {known}");
}
