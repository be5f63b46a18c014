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

/// Reads what stands beside `tokenizer.json`, as vLLM 0.32 and `transformers` 5 choose among it (`resolve_chat_template`;
/// `scripts/template-choice`).
///
/// The tokenizer's templates are the files that end in `.jinja`, and only where there are none, those in
/// `tokenizer_config.json`. For conversations without tools that of a processor comes first, if the model has one.
pub(super) fn template_sources(dir: &Path) -> Result<Sources, ModelError> {
    let config = tokenizer_config(dir)?;
    let special = object(&dir.join("special_tokens_map.json"))?;
    let mut sources = Sources { special_tokens: special_tokens(&config, &special), ..Sources::default() };
    let additional = Additional::of(dir);
    let jinja = text(&dir.join("chat_template.jinja"))?;
    if additional.any || jinja.is_some() {
        let own = |name| text(&dir.join(ADDITIONAL).join(name));
        sources.default = own("default.jinja")?.or_else(|| jinja.clone());
        sources.tool_use = own("tool_use.jinja")?;
    } else {
        named_templates(&mut sources, config.get("chat_template"), &dir.join("tokenizer_config.json"))?;
    }
    let without_tools = match of_processor(dir, jinja, &additional)? {
        OfProcessor::None => return Ok(sources),
        OfProcessor::One(template) => Some(template),
        OfProcessor::Unusable => None,
    };
    if without_tools != sources.default {
        sources.tool_use = sources.tool_use.or(sources.default);
        sources.default = without_tools;
    }
    Ok(sources)
}

const ADDITIONAL: &str = "additional_chat_templates";

/// The templates in a folder of their own.
#[derive(Default)]
struct Additional {
    any: bool,
    /// Others than the one of the name `default`.
    others: bool,
}

impl Additional {
    fn of(dir: &Path) -> Self {
        let entries = std::fs::read_dir(dir.join(ADDITIONAL)).into_iter().flatten().flatten();
        let paths = entries.map(|entry| entry.path());
        let templates = paths.filter(|path| path.extension().is_some_and(|end| end == "jinja"));
        templates.fold(Self::default(), |found, path| Self {
            any: true,
            others: found.others || path.file_stem().is_some_and(|name| name != "default"),
        })
    }
}

/// The template of a model's processor.
enum OfProcessor {
    /// There is none, or no processor.
    None,
    One(String),
    /// The processor has what is no single template: conversations without tools are refused.
    Unusable,
}

fn of_processor(
    dir: &Path,
    jinja: Option<String>,
    additional: &Additional,
) -> Result<OfProcessor, ModelError> {
    let of = |template: Option<&Value>| match template {
        None | Some(Value::Null) => OfProcessor::None,
        Some(Value::String(source)) => OfProcessor::One(source.clone()),
        Some(_) => OfProcessor::Unusable,
    };
    if !has_processor(dir)? {
        return Ok(OfProcessor::None);
    }
    let legacy = dir.join("chat_template.json");
    // Beside additional templates of this file the processor cannot be loaded.
    if legacy.exists() && additional.any {
        return Ok(OfProcessor::None);
    }
    let configured = of(object(&dir.join("processor_config.json"))?.get("chat_template"));
    if !matches!(configured, OfProcessor::None) {
        return Ok(configured);
    }
    if legacy.exists() {
        return Ok(of(object(&legacy)?.get("chat_template")));
    }
    if additional.others {
        return Ok(OfProcessor::Unusable);
    }
    // Unlike the tokenizer, it prefers this file to the additional one of the name `default`.
    Ok(jinja.map_or(OfProcessor::None, OfProcessor::One))
}

/// Whether the model takes more than text, so that it has a processor. Of a folder without `config.json` nobody knows:
/// then the file that only processors write tells.
fn has_processor(dir: &Path) -> Result<bool, ModelError> {
    let own = ["preprocessor_config.json", "processor_config.json"];
    if own.iter().any(|name| dir.join(name).exists()) {
        return Ok(true);
    }
    let path = dir.join("config.json");
    let config = object(&path)?;
    let has_other_part = ["vision_config", "audio_config"].iter().any(|part| config.contains_key(*part));
    Ok(has_other_part || (!path.exists() && dir.join("chat_template.json").exists()))
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

    /// The templates without and with tools; empty where there is none.
    fn chosen(dir: &Path) -> [String; 2] {
        let Sources { default, tool_use, .. } = template_sources(dir).expect("sources");
        let with_tools = tool_use.or_else(|| default.clone());
        [default, with_tools].map(Option::unwrap_or_default)
    }

    /// What vLLM took of each folder, by `scripts/template-choice`: of text models and of models for pictures.
    #[test]
    fn templates_are_chosen_as_by_vllm() {
        type Case = (Map<String, Value>, Option<String>, Option<String>);
        let cases = include_str!("../../tests/fixtures/templates/choice.json");
        let cases: Vec<Case> = serde_json::from_str(cases).expect("the fixture");
        for (files, without_tools, with_tools) in &cases {
            let dir = tempfile::tempdir().expect("a directory");
            for (name, content) in files {
                let path = dir.path().join(name);
                std::fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
                let text = content.as_str().map_or_else(|| content.to_string(), str::to_owned);
                std::fs::write(path, text).expect("a file");
            }
            let ours = chosen(dir.path());
            let theirs = [without_tools, with_tools].map(|chosen| chosen.clone().unwrap_or_default());
            // Where the processor alone has a template, vLLM refuses tools; there is nothing to route then.
            let refuses_tools = with_tools.is_none() && without_tools.as_ref() == Some(&ours[1]);
            assert_eq!(ours[0], theirs[0], "without tools: {files:?}");
            assert!(ours[1] == theirs[1] || refuses_tools, "{} with tools: {files:?}", ours[1]);
        }
        assert!(cases.len() > 100);
    }

    #[test]
    fn without_a_config_the_file_of_processors_tells_that_there_is_one() {
        let json = ("chat_template.json", r#"{"chat_template": "processor"}"#);
        let own = ("tokenizer_config.json", r#"{"chat_template": "own"}"#);
        let of = |files: &[_]| chosen(directory(files).path());
        assert_eq!(of(&[json, own]), ["processor", "own"]);
        assert_eq!(of(&[json, own, ("config.json", r#"{"vision_config": {}}"#)]), ["processor", "own"]);
        assert_eq!(of(&[json, own, ("config.json", r#"{"hidden_size": 8}"#)]), ["own", "own"]);
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
