//! The files of a model directory, in the layouts that Hugging Face repositories have had.

use super::error::ModelError;
use super::template::Sources;
use serde_json::{Map, Value};
use std::io::ErrorKind;
use std::path::Path;

/// The names under which templates find special tokens.
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Reads a file that must be there.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, ModelError> {
    std::fs::read(path).map_err(|source| ModelError::Read { path: path.to_owned(), source })
}

/// Reads what a template needs: itself and the special tokens. Later sources win:
/// `chat_template.json`, `tokenizer_config.json`, `chat_template.jinja`.
pub(super) fn template_sources(dir: &Path) -> Result<Sources, ModelError> {
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
    Ok(sources)
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

fn special_tokens(config: &Map<String, Value>, map: &Map<String, Value>) -> Vec<(String, String)> {
    let mut tokens = Vec::new();
    for name in SPECIAL_TOKENS {
        let token = config.get(name).and_then(content).or_else(|| map.get(name).and_then(content));
        tokens.extend(token.map(|token| (name.to_owned(), token)));
    }
    for group in ["extra_special_tokens", "model_specific_special_tokens"] {
        if let Some(Value::Object(extra)) = config.get(group) {
            tokens.extend(extra.iter().filter_map(|(name, token)| Some((name.clone(), content(token)?))));
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
