//! What `transformers` 4 makes of a tokenizer's files otherwise than 5 does.

use super::files;
use serde_json::{Map, Value, json};

/// The classes of tokenizers that put tokens around a text as their configuration says, whatever `tokenizer.json` has, and
/// whether they begin texts by default (`update_post_processor`, 4.57).
const CLASSES: [(&str, bool); 5] =
    [("Llama", true), ("CodeLlama", true), ("Gemma", true), ("Cohere", true), ("GPTNeoX", false)];

/// The tokenizer with the tokens around a text that its configuration demands; `None` if it is of a class to which that
/// says nothing, or names tokens that are not there: then it is as in 5.
pub(super) fn with_configured_tokens(json: &[u8], config: &Map<String, Value>) -> Option<Vec<u8>> {
    let class = config.get("tokenizer_class")?.as_str()?;
    let class = class.strip_suffix("Fast").unwrap_or(class).strip_suffix("Tokenizer")?;
    let (_, begins) = CLASSES.iter().find(|(known, _)| *known == class)?;
    let mut tokenizer: Value = serde_json::from_slice(json).ok()?;
    let asked = |flag: &str, default| config.get(flag).and_then(Value::as_bool).unwrap_or(default);
    let token = |name: &str| {
        let content = files::content(config.get(name)?)?;
        let id = id_of(&tokenizer, &content)?;
        Some((content, id))
    };
    let before = if asked("add_bos_token", *begins) { vec![token("bos_token")?] } else { Vec::new() };
    let after = if asked("add_eos_token", false) { vec![token("eos_token")?] } else { Vec::new() };

    let item = |(content, _): &(String, u64)| json!({ "SpecialToken": { "id": content, "type_id": 0 } });
    let text = |id: &str| json!({ "Sequence": { "id": id, "type_id": 0 } });
    let around = |texts: Vec<Value>| -> Vec<Value> {
        before.iter().map(item).chain(texts).chain(after.iter().map(item)).collect()
    };
    let tokens: Map<String, Value> = before
        .iter()
        .chain(&after)
        .map(|(content, id)| (content.clone(), json!({ "id": content, "ids": [id], "tokens": [content] })))
        .collect();
    tokenizer["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": around(vec![text("A")]),
        "pair": around(vec![text("A"), text("B")]),
        "special_tokens": tokens,
    });
    serde_json::to_vec(&tokenizer).ok()
}

fn id_of(tokenizer: &Value, content: &str) -> Option<u64> {
    let added = tokenizer.get("added_tokens")?.as_array()?;
    let of_added =
        added.iter().find(|token| token["content"] == content).and_then(|token| token["id"].as_u64());
    of_added.or_else(|| tokenizer.pointer("/model/vocab")?.get(content)?.as_u64())
}

#[cfg(test)]
mod tests {
    use crate::config::Compat;
    use crate::prompt::{Model, ModelOptions};
    use crate::request::body::PromptInput;

    /// The ids that stand before and behind a text of `/v1/completions`.
    fn around(config: &str, compat: &str) -> (Vec<u32>, Vec<u32>) {
        let dir = tempfile::tempdir().expect("a directory");
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).expect("a file");
        write("tokenizer.json", include_str!("tiny/tokenizer.json"));
        write("tokenizer_config.json", config);
        let compat = Compat::try_from(compat.to_owned()).expect("a release");
        let model = Model::load_with(dir.path(), ModelOptions { compat, ..ModelOptions::default() });
        let model = model.expect("a model");
        let ids = |add_special_tokens| {
            let prompt = PromptInput::Text { text: "Hello".to_owned(), add_special_tokens };
            model.tokenize(&prompt).expect("ids").iter().map(|id| id.0).collect::<Vec<_>>()
        };
        let (plain, full) = (ids(false), ids(true));
        let at = full.windows(plain.len()).position(|window| window == plain).expect("the text");
        (full[..at].to_vec(), full[at + plain.len()..].to_vec())
    }

    #[test]
    fn tokens_around_a_text_are_those_of_the_configuration_up_to_4() {
        let tokens = r#""bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}"#;
        let config =
            |class: &str, flags: &str| format!(r#"{{"tokenizer_class": "{class}", {tokens}{flags}}}"#);
        let none = (Vec::new(), Vec::new());
        let (begin, both) = {
            let (start, end) =
                around(&config("LlamaTokenizer", r#", "add_eos_token": true"#), "transformers-4.57");
            assert_eq!((start.len(), end.len()), (1, 1));
            ((start.clone(), Vec::new()), (start, end))
        };
        for (class, flags, expected) in [
            ("LlamaTokenizerFast", "", &begin),
            ("GemmaTokenizer", r#", "add_bos_token": true"#, &begin),
            ("LlamaTokenizerFast", r#", "add_bos_token": false"#, &none),
            ("GPTNeoXTokenizerFast", "", &none),
            ("GPTNeoXTokenizerFast", r#", "add_bos_token": true, "add_eos_token": true"#, &both),
            ("Qwen2Tokenizer", r#", "add_bos_token": true"#, &none),
            ("PreTrainedTokenizerFast", r#", "add_bos_token": true"#, &none),
        ] {
            assert_eq!(&around(&config(class, flags), "transformers-4.57"), expected, "{class}{flags}");
            assert_eq!(around(&config(class, flags), "transformers-5.19"), none, "{class}{flags}");
        }
    }

    #[test]
    fn a_token_that_is_not_there_changes_nothing() {
        let config = r#"{"tokenizer_class": "LlamaTokenizer", "bos_token": "<no such>"}"#;
        assert_eq!(around(config, "transformers-4.57"), (Vec::new(), Vec::new()));
    }
}
