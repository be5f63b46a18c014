//! The files of a model directory, in the layouts that Hugging Face repositories have had.

use super::error::ModelError;
use super::template::Sources;
use serde_json::{Map, Value};
use std::io::ErrorKind;
use std::path::Path;

/// Reads a file that must be there.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, ModelError> {
    std::fs::read(path).map_err(|source| ModelError::Read { path: path.to_owned(), source })
}

/// What `tokenizer_config.json` and its neighbours say.
#[derive(Debug)]
pub(super) struct Config {
    pub(super) sources: Sources,
    /// The texts of the tokens that stand around a prompt; `None` leaves that to `tokenizer.json`.
    pub(super) around: Option<Around>,
}

/// Tokens that `transformers` puts around a text if special tokens are to be added.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Around {
    pub(super) before: Option<String>,
    pub(super) after: Option<String>,
}

/// Reads what stands beside `tokenizer.json`. Of the sources of a template, later ones win:
/// `chat_template.json`, `tokenizer_config.json`, `chat_template.jinja`.
pub(super) fn config(dir: &Path) -> Result<Config, ModelError> {
    let config = object(&dir.join("tokenizer_config.json"))?;
    let special = object(&dir.join("special_tokens_map.json"))?;
    let mut sources = Sources { special_tokens: special_tokens(&config, &special), ..Sources::default() };

    let processor = dir.join("chat_template.json");
    named_templates(&mut sources, object(&processor)?.get("chat_template"), &processor)?;
    named_templates(&mut sources, config.get("chat_template"), &dir.join("tokenizer_config.json"))?;
    if let Some(source) = text(&dir.join("chat_template.jinja"))? {
        sources.default = Some(source);
    }
    if let Some(source) = text(&dir.join("additional_chat_templates").join("tool_use.jinja"))? {
        sources.tool_use = Some(source);
    }
    let around = around(&config, &sources.special_tokens);
    Ok(Config { sources, around })
}

/// `add_bos_token` and `add_eos_token`: if only one of them is there, it replaces what `tokenizer.json` says.
fn around(config: &Map<String, Value>, special_tokens: &[(String, String)]) -> Option<Around> {
    let token =
        |name: &str| special_tokens.iter().find(|(known, _)| known == name).map(|(_, token)| token.clone());
    let wanted =
        |flag: &str, name: &str| token(name).filter(|_| config.get(flag) == Some(&Value::Bool(true)));
    let named = ["add_bos_token", "add_eos_token"].iter().any(|flag| config.contains_key(*flag));
    named.then(|| Around {
        before: wanted("add_bos_token", "bos_token"),
        after: wanted("add_eos_token", "eos_token"),
    })
}

/// A `chat_template` is one template or a list of named ones.
fn named_templates(sources: &mut Sources, value: Option<&Value>, path: &Path) -> Result<(), ModelError> {
    let invalid =
        || ModelError::Invalid { path: path.to_owned(), detail: "chat_template has an unknown form".into() };
    match value {
        None | Some(Value::Null) => {}
        Some(Value::String(source)) => sources.default = Some(source.clone()),
        Some(Value::Array(named)) => {
            for entry in named {
                let field = |name: &str| entry.get(name).and_then(Value::as_str).ok_or_else(invalid);
                match field("name")? {
                    "default" => sources.default = Some(field("template")?.to_owned()),
                    "tool_use" => sources.tool_use = Some(field("template")?.to_owned()),
                    _ => {}
                }
            }
        }
        Some(_) => return Err(invalid()),
    }
    Ok(())
}

/// Tokens by the names that end in `_token`, as `transformers` 5 collects them: `special_tokens_map.json` counts, and then
/// wins, only where `tokenizer_config.json` does not describe the added tokens itself.
fn special_tokens(config: &Map<String, Value>, map: &Map<String, Value>) -> Vec<(String, String)> {
    let legacy = map.iter().filter(|_| !config.contains_key("added_tokens_decoder"));
    let groups = ["extra_special_tokens", "model_specific_special_tokens"];
    let grouped = groups.iter().filter_map(|group| config.get(*group)?.as_object()).flatten();
    let mut tokens: Vec<(String, String)> = Vec::new();
    for (name, token) in
        config.iter().chain(legacy).filter(|(name, _)| name.ends_with("_token")).chain(grouped)
    {
        if let Some(token) = content(token) {
            tokens.retain(|(known, _)| known != name);
            tokens.push((name.clone(), token));
        }
    }
    tokens
}

/// A token is written as text or as an object with its `content`.
fn content(token: &Value) -> Option<String> {
    token.as_str().or_else(|| token.get("content")?.as_str()).map(str::to_owned)
}

fn text(path: &Path) -> Result<Option<String>, ModelError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ModelError::Read { path: path.to_owned(), source }),
    }
}

/// The JSON object in a file; an empty one if there is no such file.
fn object(path: &Path) -> Result<Map<String, Value>, ModelError> {
    let Some(text) = text(path)? else { return Ok(Map::new()) };
    serde_json::from_str(&text)
        .map_err(|error| ModelError::Invalid { path: path.to_owned(), detail: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a directory");
        for (name, text) in files {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
            std::fs::write(path, text).expect("a file");
        }
        dir
    }

    fn read_config(files: &[(&str, &str)]) -> Result<Config, ModelError> {
        config(directory(files).path())
    }

    #[test]
    fn the_template_file_wins_over_the_configuration() {
        let json = ("chat_template.json", r#"{"chat_template": "processor"}"#);
        let tokenizer = ("tokenizer_config.json", r#"{"chat_template": "config"}"#);
        let jinja = ("chat_template.jinja", "file");
        let default = |files: &[_]| read_config(files).expect("a configuration").sources.default;
        assert_eq!(default(&[json]).as_deref(), Some("processor"));
        assert_eq!(default(&[json, tokenizer]).as_deref(), Some("config"));
        assert_eq!(default(&[json, tokenizer, jinja]).as_deref(), Some("file"));
        assert_eq!(default(&[]), None);
    }

    #[test]
    fn named_templates_are_found_in_both_places() {
        let list = r#"{"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}, {"name": "rag", "template": "r"}]}"#;
        let sources = read_config(&[("tokenizer_config.json", list)]).expect("a configuration").sources;
        assert_eq!((sources.default.as_deref(), sources.tool_use.as_deref()), (Some("d"), Some("t")));
        let sources = read_config(&[("additional_chat_templates/tool_use.jinja", "t")]).expect("one").sources;
        assert_eq!((sources.default, sources.tool_use.as_deref()), (None, Some("t")));
    }

    #[test]
    fn special_tokens_are_texts_or_objects_and_the_legacy_map_counts_without_added_tokens() {
        let map = ("special_tokens_map.json", r#"{"bos_token": "<map>", "pad_token": {"content": "<pad>"}}"#);
        let tokens = |config: &str| {
            let mut tokens =
                read_config(&[map, ("tokenizer_config.json", config)]).expect("one").sources.special_tokens;
            tokens.sort();
            tokens.into_iter().map(|(name, token)| format!("{name}={token}")).collect::<Vec<_>>()
        };
        assert_eq!(
            tokens(r#"{"bos_token": "<s>", "add_bos_token": true}"#),
            ["bos_token=<map>", "pad_token=<pad>"]
        );
        assert_eq!(
            tokens(
                r#"{"bos_token": {"__type": "AddedToken", "content": "<s>"}, "boi_token": "<i>", "eos_token": null, "added_tokens_decoder": {}, "extra_special_tokens": {"x": "<x>"}}"#
            ),
            ["boi_token=<i>", "bos_token=<s>", "x=<x>"]
        );
    }

    #[test]
    fn the_configuration_may_say_what_stands_around_a_prompt() {
        let around = |config: &str| read_config(&[("tokenizer_config.json", config)]).expect("one").around;
        assert_eq!(around(r#"{"bos_token": "<s>"}"#), None);
        assert_eq!(around(r#"{"bos_token": "<s>", "add_bos_token": false}"#), Some(Around::default()));
        assert_eq!(
            around(r#"{"bos_token": "<s>", "add_bos_token": true, "eos_token": "</s>"}"#),
            Some(Around { before: Some("<s>".into()), after: None })
        );
    }

    #[test]
    fn a_damaged_file_is_named() {
        let error = read_config(&[("tokenizer_config.json", "{")]).expect_err("damaged");
        assert!(error.to_string().contains("tokenizer_config.json"), "{error}");
        let error =
            read_config(&[("tokenizer_config.json", r#"{"chat_template": 7}"#)]).expect_err("damaged");
        assert!(error.to_string().contains("chat_template"), "{error}");
    }
}
