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

/// Reads a text that must be there.
pub(super) fn read_text(path: &Path) -> Result<String, ModelError> {
    std::fs::read_to_string(path).map_err(|source| ModelError::Read { path: path.to_owned(), source })
}

/// Reads what stands beside `tokenizer.json`, as vLLM 0.32 and `transformers` 5 choose among it (`resolve_chat_template`).
/// The tokenizer's templates are the files that end in `.jinja`, and only where there are none, those in
/// `tokenizer_config.json`. `chat_template.json` is a processor's, which counts for conversations without tools.
pub(super) fn template_sources(dir: &Path) -> Result<Sources, ModelError> {
    let config = tokenizer_config(dir)?;
    let special = object(&dir.join("special_tokens_map.json"))?;
    let mut sources = Sources { special_tokens: special_tokens(&config, &special), ..Sources::default() };

    let additional = dir.join("additional_chat_templates");
    let has_additional = has_templates(&additional);
    let default = text(&additional.join("default.jinja"))?.or(text(&dir.join("chat_template.jinja"))?);
    if has_additional || default.is_some() {
        sources.default = default;
        sources.tool_use = text(&additional.join("tool_use.jinja"))?;
    } else {
        named_templates(&mut sources, config.get("chat_template"), &dir.join("tokenizer_config.json"))?;
    }

    let path = dir.join("chat_template.json");
    let mut processor = Sources::default();
    named_templates(&mut processor, object(&path)?.get("chat_template"), &path)?;
    // Beside additional templates the processor cannot be loaded.
    if processor.default.is_some() && !has_additional && processor.default != sources.default {
        sources.tool_use = sources.tool_use.or(sources.default);
        sources.default = processor.default;
    }
    Ok(sources)
}

fn has_templates(dir: &Path) -> bool {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).any(|path| path.extension().is_some_and(|end| end == "jinja"))
}

/// What `tokenizer_config.json` says; nothing if it is not there.
pub(super) fn tokenizer_config(dir: &Path) -> Result<Map<String, Value>, ModelError> {
    object(&dir.join("tokenizer_config.json"))
}

/// Who makes prompts of a model for which vLLM 0.32 does not run the chat template.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct NativeRenderer {
    pub(super) name: &'static str,
    /// Plain text is tokenized in a way of its own as well.
    pub(super) texts_too: bool,
}

/// The format of gpt-oss.
pub(super) const HARMONY: &str = "harmony";

/// Architectures with a tokenizer mode of their own (`ModelConfig.__post_init__`).
const NATIVE: [(&str, &str); 8] = [
    ("DeepseekV32ForCausalLM", "deepseek_v32"),
    ("DeepseekV4ForCausalLM", "deepseek_v4"),
    ("DeepseekV4ForConditionalGeneration", "deepseek_v4"),
    ("DeepseekV41ForCausalLM", "deepseek_v41"),
    ("KimiK3ForConditionalGeneration", "kimi_k3"),
    ("MoonshotKimiaForCausalLM", "kimi_audio"),
    ("InklingForCausalLM", "inkling"),
    ("InklingForConditionalGeneration", "inkling"),
];

/// Recognises such models by `config.json`, and by the files of Mistral's own tokenizer.
pub(super) fn native_renderer(dir: &Path) -> Result<Option<NativeRenderer>, ModelError> {
    let config = object(&dir.join("config.json"))?;
    if config.get("model_type").is_some_and(|kind| kind == "gpt_oss") {
        return Ok(Some(NativeRenderer { name: HARMONY, texts_too: false }));
    }
    let architectures = config.get("architectures").and_then(Value::as_array).into_iter().flatten();
    let native = architectures
        .filter_map(Value::as_str)
        .find_map(|architecture| NATIVE.iter().find(|(known, _)| *known == architecture));
    if let Some((_, name)) = native {
        return Ok(Some(NativeRenderer { name, texts_too: !name.starts_with("deepseek") }));
    }
    let has_mistral_file = dir.join("tekken.json").exists()
        || std::fs::read_dir(dir)
            .into_iter()
            .flatten()
            .flatten()
            .any(|entry| entry.file_name().to_string_lossy().starts_with("tokenizer.model.v"));
    Ok(has_mistral_file.then_some(NativeRenderer { name: "mistral", texts_too: true }))
}

/// How many tokens the model itself knows, by `config.json` (vLLM `ModelArchConfig.vocab_size`, that of the text model);
/// `None` if it is not there, or leaves the number at its class's default.
pub(super) fn vocabulary_size(dir: &Path) -> Result<Option<u32>, ModelError> {
    let config = object(&dir.join("config.json"))?;
    let text = config.get("text_config").and_then(Value::as_object).unwrap_or(&config);
    Ok(text.get("vocab_size").and_then(|size| size.as_u64()?.try_into().ok()))
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
pub(super) fn content(token: &Value) -> Option<String> {
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

    fn read_sources(files: &[(&str, &str)]) -> Result<Sources, ModelError> {
        template_sources(directory(files).path())
    }

    /// The templates without and with tools. The cases without `chat_template.json` are what `get_chat_template` of
    /// `transformers` 5.19 answered.
    #[test]
    fn files_win_over_the_configuration_and_the_processor_where_there_are_no_tools() {
        let config = ("tokenizer_config.json", r#"{"chat_template": "config"}"#);
        let list = (
            "tokenizer_config.json",
            r#"{"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}, {"name": "rag", "template": "r"}]}"#,
        );
        let jinja = ("chat_template.jinja", "jinja");
        let additional = ("additional_chat_templates/tool_use.jinja", "additional");
        let json = ("chat_template.json", r#"{"chat_template": "processor"}"#);
        let of = |files: &[_]| {
            let Sources { default, tool_use, .. } = read_sources(files).expect("sources");
            let with_tools = tool_use.or_else(|| default.clone());
            [default, with_tools].map(Option::unwrap_or_default)
        };
        assert_eq!(of(&[]), ["", ""]);
        assert_eq!(of(&[config]), ["config", "config"]);
        assert_eq!(of(&[list]), ["d", "t"]);
        assert_eq!(of(&[list, jinja]), ["jinja", "jinja"]);
        assert_eq!(of(&[list, additional]), ["", "additional"]);
        assert_eq!(of(&[config, additional]), ["", "additional"]);
        assert_eq!(of(&[jinja, additional]), ["jinja", "additional"]);
        assert_eq!(of(&[jinja, ("additional_chat_templates/default.jinja", "other")]), ["other", "other"]);
        assert_eq!(of(&[json]), ["processor", "processor"]);
        assert_eq!(of(&[json, config]), ["processor", "config"]);
        assert_eq!(of(&[json, list]), ["processor", "t"]);
        assert_eq!(of(&[json, jinja]), ["processor", "jinja"]);
        assert_eq!(of(&[json, jinja, additional]), ["jinja", "additional"]);
    }

    #[test]
    fn special_tokens_are_texts_or_objects_and_the_legacy_map_counts_without_added_tokens() {
        let map = ("special_tokens_map.json", r#"{"bos_token": "<map>", "pad_token": {"content": "<pad>"}}"#);
        let tokens = |config: &str| {
            let mut tokens =
                read_sources(&[map, ("tokenizer_config.json", config)]).expect("sources").special_tokens;
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
    fn models_that_vllm_renders_without_their_template_are_recognised() {
        let name =
            |files: &[_]| native_renderer(directory(files).path()).expect("files").map(|native| native.name);
        let config = |text| ("config.json", text);
        assert_eq!(name(&[config(r#"{"model_type": "gpt_oss"}"#)]), Some("harmony"));
        assert_eq!(name(&[config(r#"{"architectures": ["DeepseekV32ForCausalLM"]}"#)]), Some("deepseek_v32"));
        assert_eq!(name(&[config(r#"{"architectures": ["Qwen3ForCausalLM"]}"#)]), None);
        assert_eq!(name(&[("tekken.json", "{}")]), Some("mistral"));
        assert_eq!(name(&[("tokenizer.model.v3", "")]), Some("mistral"));
        assert_eq!(name(&[]), None);
    }

    #[test]
    fn the_vocabulary_is_that_of_the_text_model() {
        let size = |config| vocabulary_size(directory(&[("config.json", config)]).path()).expect("a file");
        assert_eq!(size(r#"{"vocab_size": 151936}"#), Some(151_936));
        assert_eq!(size(r#"{"vocab_size": 7, "text_config": {"vocab_size": 262208}}"#), Some(262_208));
        assert_eq!(size(r#"{"vocab_size": 7, "text_config": {"hidden_size": 8}}"#), None);
        assert_eq!(size(r#"{"vocab_size": -1}"#), None);
        assert_eq!(vocabulary_size(directory(&[]).path()).expect("no file"), None);
    }

    #[test]
    fn a_damaged_file_is_named() {
        let error = read_sources(&[("tokenizer_config.json", "{")]).expect_err("damaged");
        assert!(error.to_string().contains("tokenizer_config.json"), "{error}");
        let error =
            read_sources(&[("tokenizer_config.json", r#"{"chat_template": 7}"#)]).expect_err("damaged");
        assert!(error.to_string().contains("chat_template"), "{error}");
    }
}
