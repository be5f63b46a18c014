//! What a real vLLM 0.32.0 made of request bodies, against ours: the texts of templates, and the token ids of Qwen3.
//!
//! The tokenizer of Qwen3 is not part of the repository: `scripts/fetch-tokenizers` fetches it.

use kvspoa::prompt::Model;
use kvspoa::request::body::{Endpoint, PromptInput, parse};
use serde_json::Value;
use std::path::PathBuf;

/// Refusals that depend on the engine's options or limits, or on the name of the model: nothing in the body tells.
const REFUSED_BY_THE_ENGINE_ALONE: [&str; 4] =
    ["tools-auto-unset", "wrong-model", "ids-out-of-vocabulary", "too-long"];

fn tokenizer_dir(model: &str) -> Option<PathBuf> {
    let cache = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/kvspoa/tokenizers"));
    let dir = std::env::var_os("KVSPOA_TOKENIZERS").map(PathBuf::from).or_else(cache)?.join(model);
    dir.join("tokenizer.json").exists().then_some(dir)
}

fn ours(model: &Model, row: &Value) -> Result<Vec<u32>, &'static str> {
    let body = row["body"].to_string();
    let endpoint = row["path"].as_str().and_then(|path| match path {
        "/tokenize" if row["body"].get("messages").is_some() => Some(Endpoint::ChatCompletions),
        "/tokenize" => Some(Endpoint::Completions),
        path => Endpoint::from_path(path.trim_end_matches("/render").trim_end_matches("/count_tokens")),
    });
    let ask = parse(endpoint.ok_or("no_endpoint")?, body.as_bytes()).map_err(|error| error.reason())?;
    let tokens = model.tokens(&ask, &|| false).map_err(|error| error.reason())?;
    Ok(tokens.ids.into_iter().map(|token| token.0).collect())
}

/// The ids of a row: of the longest prompt, where there are several.
fn expected(row: &Value) -> Option<Vec<u32>> {
    // The answer of a `/render` endpoint, whose list was filed as an error, or of `/v1/responses`.
    let rendered = row["answer"].get("token_ids").or_else(|| row["error"].get(0)?.get("token_ids"));
    let shown = || row["answer"].pointer("/input_messages/0/tokens");
    let ids = row.get("prompt_token_ids").or(rendered).or_else(shown)?.as_array()?;
    let lists = ids.iter().filter_map(Value::as_array);
    let ids = lists.rev().max_by_key(|ids| ids.len()).unwrap_or(ids);
    ids.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect()
}

/// How many tokens the answer of `/v1/messages` counts.
fn expected_count(row: &Value) -> Option<u64> {
    let answer = &row["answer"];
    answer.get("input_tokens").or_else(|| answer.get("usage")?.get("input_tokens"))?.as_u64()
}

#[test]
fn qwen3_prompts_have_the_ids_that_vllm_made() {
    let Some(dir) = tokenizer_dir("qwen3") else {
        println!("skipped: run scripts/fetch-tokenizers for the tokenizer of Qwen3");
        return;
    };
    let model = Model::load(&dir).expect("the model");
    let fixture = include_str!("fixtures/vllm/render-qwen3.json");
    let fixture: Value = serde_json::from_str(fixture).expect("the fixture");
    let mut compared = 0;
    let mut wrong = Vec::new();
    for row in fixture["rows"].as_array().expect("rows") {
        let case = row["case"].as_str().expect("a case");
        let result = ours(&model, row);
        match (expected(row), row["status"].as_u64()) {
            (Some(ids), _) => {
                compared += 1;
                if result.as_ref() != Ok(&ids) {
                    wrong.push(format!("{case}: {result:?} is not {ids:?}"));
                }
            }
            (None, Some(400..)) if REFUSED_BY_THE_ENGINE_ALONE.contains(&case) => {}
            (None, Some(400..)) => {
                if result.is_ok() {
                    wrong.push(format!("{case}: vLLM refused it"));
                }
            }
            (None, _) => {
                let counted = expected_count(row).expect("ids, an error or a count");
                compared += 1;
                assert_eq!(result.map(|ids| ids.len() as u64), Ok(counted), "{case}");
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(compared, 92, "rows with ids or a count");
}

/// The model of a template in `tests/fixtures/templates`, with the embedded tokenizer.
fn model_of(template: &str) -> Model {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let dir = tempfile::tempdir().expect("a directory");
    let copy = |from: &str, to: &str| std::fs::copy(root.join(from), dir.path().join(to)).expect("a copy");
    copy("src/prompt/tiny/tokenizer.json", "tokenizer.json");
    copy(&format!("tests/fixtures/templates/{template}.jinja"), "chat_template.jinja");
    let tokens = r#"{"bos_token": "<s>", "eos_token": "</s>"}"#;
    std::fs::write(dir.path().join("tokenizer_config.json"), tokens).expect("a file");
    Model::load(dir.path()).expect("a model")
}

/// Renders all bodies with all templates; how many texts are equal.
fn compare(endpoint: Endpoint, bodies: &str, texts: &str) -> usize {
    let bodies: Value = serde_json::from_str(bodies).expect("bodies");
    let texts: Value = serde_json::from_str(texts).expect("texts");
    let (mut equal, mut wrong) = (0, Vec::new());
    for (template, cases) in texts.as_object().expect("templates") {
        let model = model_of(template);
        for (case, text) in cases.as_object().expect("cases") {
            // Where vLLM refuses the request there is nothing to route.
            let Some(text) = text.as_str() else { continue };
            let ask = parse(endpoint, bodies[case].to_string().as_bytes());
            let rendered = match ask.map(|ask| ask.prompt) {
                Ok(PromptInput::Chat(conversation)) => model.render(&conversation),
                other => panic!("{template} {case}: {other:?}"),
            };
            match rendered {
                Ok(ours) if ours == text => equal += 1,
                other => wrong.push(format!("{template} {case}: {other:?} is not {text:?}")),
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    equal
}

macro_rules! golden {
    ($endpoint:ident, $suffix:literal) => {
        compare(
            Endpoint::$endpoint,
            include_str!(concat!("fixtures/templates/bodies", $suffix, ".json")),
            include_str!(concat!("fixtures/templates/texts", $suffix, ".json")),
        )
    };
}

#[test]
fn templates_render_to_the_texts_that_vllm_made() {
    assert_eq!(golden!(ChatCompletions, ""), 350);
}

#[test]
fn messages_of_anthropic_render_to_the_texts_that_vllm_made() {
    assert_eq!(golden!(Messages, "-messages"), 3 * 28);
}

#[test]
fn responses_render_to_the_texts_that_vllm_made() {
    assert_eq!(golden!(Responses, "-responses"), 3 * 28);
}
