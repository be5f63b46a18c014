//! What a real vLLM 0.32.0 made of request bodies, against ours: the texts of templates, and the token ids of Qwen3.
//!
//! The tokenizer of Qwen3 is not part of the repository: `scripts/fetch-tokenizers` fetches it. Neither are the
//! templates of real models: `scripts/template-matrix` fetches them and renders them in vLLM.

#[path = "support/any_body.rs"]
mod any_body;
#[path = "support/requests.rs"]
mod requests;

use kvspoa::config::{Compat, Config, Overrides};
use kvspoa::hash::HashKey;
use kvspoa::pool::{Pool, Pools};
use kvspoa::prompt::{Model, ModelOptions, PromptError};
use kvspoa::replica::parse_models;
use kvspoa::request::RoutingRequest;
use kvspoa::request::body::{Ask, BodyError, Endpoint, PromptInput, parse};
use kvspoa::route::{Decision, Outcome, RouteLimits, Router, State, Workers};
use kvspoa::select::{Policy, Scheduler, SchedulerConfig};
use kvspoa::units::TokenId;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// The directory that `variable` names, or else the one of this name in the user's cache.
fn fetched(variable: &str, name: &str) -> Option<PathBuf> {
    let cache = || {
        let own = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache"));
        Some(std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(own)?.join("kvspoa").join(name))
    };
    std::env::var_os(variable).map(PathBuf::from).or_else(cache)
}

fn tokenizer_dir(model: &str) -> Option<PathBuf> {
    let dir = fetched("KVSPOA_TOKENIZERS", "tokenizers")?.join(model);
    dir.join("tokenizer.json").exists().then_some(dir)
}

/// An agent's pool of the replica that was asked for the rows of Qwen3, as the agent knows it: by the model's folder, the
/// options that `vllm serve` was given, and what the engine tells of itself.
struct Asked {
    router: Router,
    runtime: tokio::runtime::Runtime,
    _model: tempfile::TempDir,
}

impl Asked {
    fn new(tokenizer: &Path) -> Self {
        let model = tempfile::tempdir().expect("a directory");
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            std::os::unix::fs::symlink(tokenizer.join(file), model.path().join(file)).expect("a link");
        }
        let config =
            r#"{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936}"#;
        std::fs::write(model.path().join("config.json"), config).expect("a file");
        let text = format!(
            "[[pool]]\nbackend = \"be\"\nmodel_dir = {:?}\nprompt.enable_auto_tool_choice = false\n\
             [[pool.replica]]\nserver = \"s1\"\nranks = 1\n",
            model.path()
        );
        let config = Config::parse(&text, Path::new("test.toml"), &Overrides::default()).expect("valid");
        let scheduler = Scheduler::new(Policy::default(), SchedulerConfig::default(), 1);
        let second = Duration::from_secs(1);
        let of_pool = &config.pools[0];
        let pool =
            Pool::new(of_pool, &HashKey::from_seed(1), 1 << 20, scheduler, second, second).expect("a pool");
        pool.join(&of_pool.replicas[0], Instant::now()).expect("room");
        let served = br#"{"object": "list", "data": [
            {"id": "tiny-qwen3", "object": "model", "created": 1764000000, "owned_by": "vllm",
                "root": "/models/tiny-qwen3", "parent": null, "max_model_len": 2048},
            {"id": "my-lora", "object": "model", "created": 1764000000, "owned_by": "vllm",
                "root": "/models/my-lora", "parent": "tiny-qwen3", "max_model_len": null}]}"#;
        pool.take_models("s1", &parse_models(served));
        let limits =
            RouteLimits { workers: Workers::new(1, 1), inline_bytes: usize::MAX, deadline: 600 * second };
        let router = Router::new(Arc::new(Pools::new(vec![Arc::new(pool)])), limits);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        Self { router, runtime, _model: model }
    }

    /// What the agent decides where HAProxy asks with the body of a row; of `/tokenize` and the like, as if it were that of
    /// the endpoint for which they stand.
    fn decide(&self, row: &Value) -> Decision {
        let path = row["path"].as_str().expect("a path");
        let mut body = row["body"].clone();
        let path = match path.trim_end_matches("/render").trim_end_matches("/count_tokens") {
            "/tokenize" if body.get("messages").is_some() => {
                // Nothing is generated, so there are no calls to be found.
                body["tool_choice"] = Value::Null;
                "/v1/chat/completions"
            }
            "/tokenize" => "/v1/completions",
            path => path,
        };
        let request = RoutingRequest {
            pool: "be".to_owned(),
            method: "POST".to_owned(),
            path: path.to_owned(),
            complete: true,
            body: body.to_string().into(),
            ..RoutingRequest::default()
        };
        self.runtime.block_on(self.router.decide(request, Instant::now()))
    }
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
fn qwen3_prompts_have_the_ids_that_vllm_made_and_what_it_refuses_is_routed_by_load() {
    let Some(dir) = tokenizer_dir("qwen3") else {
        println!("skipped: run scripts/fetch-tokenizers for the tokenizer of Qwen3");
        return;
    };
    let asked = Asked::new(&dir);
    let fixture = include_str!("fixtures/vllm/render-qwen3.json");
    let fixture: Value = serde_json::from_str(fixture).expect("the fixture");
    let (mut compared, mut refused, mut wrong) = (0, BTreeMap::new(), Vec::new());
    for row in fixture["rows"].as_array().expect("rows") {
        let case = row["case"].as_str().expect("a case");
        let decision = asked.decide(row);
        let ours = decision.tokens().map(|ids| ids.iter().map(|id| id.0).collect::<Vec<_>>());
        match (expected(row), row["status"].as_u64()) {
            (Some(ids), _) => {
                compared += 1;
                if ours.as_ref() != Some(&ids) {
                    wrong.push(format!("{case}: {ours:?} ({:?}) is not {ids:?}", decision.reason));
                }
            }
            (None, Some(400..)) => {
                let reason = decision.reason.as_str();
                refused.insert(case.to_owned(), reason);
                if decision.reason.outcome() != Outcome::LoadOnly || decision.state != State::LoadOnly {
                    wrong.push(format!("{case}: vLLM refused it, and here it is {reason}"));
                }
            }
            (None, _) => {
                let counted = expected_count(row).expect("ids, an error or a count");
                compared += 1;
                assert_eq!(ours.map(|ids| ids.len() as u64), Some(counted), "{case}");
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(compared, 92, "rows with ids or a count");
    // Those of which the body alone does not tell.
    for (case, reason) in [
        ("tools-auto-unset", "refused"),
        ("ids-out-of-vocabulary", "refused"),
        ("too-long", "refused"),
        ("wrong-model", "unknown_model"),
    ] {
        assert_eq!(refused.get(case), Some(&reason), "{case}");
    }
    assert_eq!(refused.len(), 17, "{refused:#?}");
}

/// The embedded tokenizer, which puts these tokens before and behind a text, and a vocabulary of 3,000 in the model.
fn tiny_model(around: &Value) -> Model {
    let mut tokenizer: Value =
        serde_json::from_str(include_str!("../src/prompt/tiny/tokenizer.json")).expect("a tokenizer");
    let ids: BTreeMap<String, Value> = tokenizer["added_tokens"]
        .as_array()
        .expect("tokens")
        .iter()
        .map(|token| (token["content"].as_str().expect("a token").to_owned(), token["id"].clone()))
        .collect();
    let names = |at: usize| around[at].as_array().into_iter().flatten().filter_map(Value::as_str);
    let special = |name: &str| json!({ "SpecialToken": { "id": name, "type_id": 0 } });
    let text = |id: &str| json!({ "Sequence": { "id": id, "type_id": 0 } });
    let single: Vec<_> = names(0).map(special).chain([text("A")]).chain(names(1).map(special)).collect();
    let tokens: serde_json::Map<_, _> = names(0)
        .chain(names(1))
        .map(|name| (name.to_owned(), json!({ "id": name, "ids": [ids[name]], "tokens": [name] })))
        .collect();
    if !tokens.is_empty() {
        tokenizer["post_processor"] = json!({ "type": "TemplateProcessing", "single": single,
            "pair": [text("A"), text("B")], "special_tokens": tokens });
    }
    let dir = tempfile::tempdir().expect("a directory");
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).expect("a file");
    write("tokenizer.json", &tokenizer.to_string());
    write("config.json", r#"{"vocab_size": 3000}"#);
    write("chat_template.jinja", include_str!("fixtures/templates/chatml.jinja"));
    Model::load(dir.path()).expect("a model")
}

/// Truncation, lengths of answers, and token ids beyond the vocabulary, at every endpoint and at every edge.
#[test]
fn requests_that_touch_the_engines_limits_end_as_in_vllm() {
    let fixture: Value = serde_json::from_str(include_str!("fixtures/requests.json")).expect("the fixture");
    let context = usize::try_from(fixture["context"].as_u64().expect("a context")).expect("a number");
    let mut ends = requests::Ends::default();
    for (name, around) in fixture["around"].as_object().expect("models") {
        let model = tiny_model(around);
        for row in fixture["rows"].as_array().expect("rows") {
            let outcome = row[2].get(name).unwrap_or(&row[2]);
            let path = row[0].as_str().expect("a path");
            ends.add(&model, context, (path, &row[1]), requests::theirs(outcome));
        }
    }
    println!("equal {}, refused {}", ends.equal, ends.refused);
    assert!(ends.wrong.is_empty(), "{}", ends.wrong.join("\n"));
    println!("not known: {:#?}\naccepted: {:#?}", ends.not_known, ends.accepted);
    assert!(ends.not_known.is_empty() && ends.accepted.is_empty());
}

/// The requests of scripts/request-matrix.
#[test]
fn requests_of_real_models_end_as_in_vllm_or_are_routed_by_load() {
    let dir = fetched("KVSPOA_REQUESTS", "requests");
    let mut compared = 0;
    for name in ["qwen3", "qwen2_5", "llama3_1", "llama3_2", "gemma3", "mistral_nemo", "deepseek_v3"] {
        let Some(dir) = dir.as_deref().filter(|dir| dir.join(format!("{name}.json")).exists()) else {
            continue;
        };
        let made = std::fs::read(dir.join(format!("{name}.json"))).expect("a file");
        let made: Value = serde_json::from_slice(&made).expect("requests");
        let context = usize::try_from(made["context"].as_u64().expect("a context")).expect("a number");
        let model = Model::load(&dir.join("models").join(name)).expect("a model");
        let mut ends = requests::Ends::default();
        for row in made["rows"].as_array().expect("rows") {
            let path = row[0].as_str().expect("a path");
            ends.add(&model, context, (path, &row[1]), requests::theirs(&row[2]));
        }
        let not_known: BTreeMap<_, _> =
            ends.not_known.iter().map(|(reason, bodies)| (reason, bodies.len())).collect();
        println!(
            "{name}: equal {}, refused {}, wrong {}, refused there alone {}, not known here {not_known:#?}",
            ends.equal,
            ends.refused,
            ends.wrong.len(),
            ends.accepted.len(),
        );
        if std::env::var_os("KVSPOA_REQUESTS_SHOW").is_some() {
            println!("{:#?}\n{}", ends.not_known, ends.accepted.join("\n"));
        }
        assert!(ends.wrong.is_empty(), "{name}: {}", ends.wrong.join("\n"));
        compared += ends.equal;
    }
    println!(
        "{compared} requests end alike{}",
        if compared == 0 { ": run scripts/request-matrix" } else { "" }
    );
}

/// The clock of scripts/template_matrix.py: 2026-03-05 14:07:09.
fn frozen() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_772_719_629)
}

/// The model of a chat template, with the embedded tokenizer.
fn model_of(template: &str) -> Model {
    model_by(template, "transformers-5.19")
}

/// The same in an engine with this release of `transformers`.
fn model_by(template: &str, release: &str) -> Model {
    let dir = tempfile::tempdir().expect("a directory");
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).expect("a file");
    write("tokenizer.json", include_str!("../src/prompt/tiny/tokenizer.json"));
    write("tokenizer_config.json", r#"{"bos_token": "<s>", "eos_token": "</s>"}"#);
    write("chat_template.jinja", template);
    let compat = Compat::try_from(release.to_owned()).expect("a release");
    let options = ModelOptions { clock: frozen, compat, ..ModelOptions::default() };
    Model::load_with(dir.path(), options).expect("a model")
}

/// The text of a body, or why there is none. It is the same where the messages, and their texts, are known already.
fn render(model: &Model, endpoint: Endpoint, body: &Value) -> Result<String, &'static str> {
    let body = body.to_string();
    let text = text(model, parse(endpoint, body.as_bytes()));
    for _ in 0..2 {
        assert_eq!(self::text(model, model.read(endpoint, body.as_bytes())), text, "{body}");
    }
    text
}

fn text(model: &Model, ask: Result<Ask, BodyError>) -> Result<String, &'static str> {
    match ask.map(|ask| ask.prompt) {
        Ok(PromptInput::Chat(conversation)) => model.render(&conversation).map_err(|error| match error {
            // The text may say which.
            PromptError::TemplateFailed { .. } => "template_failed",
            error => error.reason(),
        }),
        Ok(_) => Err("not a chat"),
        Err(error) => Err(error.reason()),
    }
}

/// Renders all bodies with all templates; how many texts are equal.
fn compare(endpoint: Endpoint, release: &str, bodies: &str, texts: &str) -> usize {
    let bodies: Value = serde_json::from_str(bodies).expect("bodies");
    let texts: Value = serde_json::from_str(texts).expect("texts");
    let (mut equal, mut wrong) = (0, Vec::new());
    for (template, cases) in texts.as_object().expect("templates") {
        let file = format!("tests/fixtures/templates/{template}.jinja");
        let source = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file));
        let model = model_by(&source.expect("a template"), release);
        for (case, text) in cases.as_object().expect("cases") {
            // Where vLLM refuses the request there is nothing to route.
            let Some(text) = text.as_str() else { continue };
            match render(&model, endpoint, &bodies[case]) {
                Ok(ours) if ours == text => equal += 1,
                other => wrong.push(format!("{template} {case}: {other:?} is not {text:?}")),
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    equal
}

/// The bodies of `tests/fixtures/templates`, by the suffix of their file.
const BODIES: [(&str, Endpoint, &str); 3] = [
    ("", Endpoint::ChatCompletions, include_str!("fixtures/templates/bodies.json")),
    ("-messages", Endpoint::Messages, include_str!("fixtures/templates/bodies-messages.json")),
    ("-responses", Endpoint::Responses, include_str!("fixtures/templates/bodies-responses.json")),
];

/// What became of all bodies with one template.
#[derive(Default)]
struct Row {
    /// How many texts of messages were not written again.
    known: u64,
    equal: usize,
    /// We make no text where vLLM does: how many, by reason. These requests are routed by load.
    refused: BTreeMap<&'static str, usize>,
    wrong: Vec<String>,
}

fn row(made: &Value) -> Row {
    let mut row = Row::default();
    let release = made["compat"].as_str().unwrap_or("transformers-5.19");
    let model = model_by(made["template"].as_str().expect("a template"), release);
    for (suffix, endpoint, bodies) in BODIES {
        let bodies: Value = serde_json::from_str(bodies).expect("bodies");
        for (case, text) in made["texts"][suffix].as_object().expect("cases") {
            // Where vLLM refuses the request there is nothing to route.
            let Some(text) = text.as_str() else { continue };
            match render(&model, endpoint, &bodies[case]) {
                Ok(ours) if ours == text => row.equal += 1,
                Ok(_) => row.wrong.push(format!("{case}{suffix}")),
                Err(reason) => *row.refused.entry(reason).or_default() += 1,
            }
        }
    }
    row.known = model.known_stats().hits;
    row
}

/// The deviations of every template stand in `docs/templates.md`.
#[test]
fn templates_of_real_models_render_as_in_vllm_or_are_refused() {
    let dir = fetched("KVSPOA_TEMPLATES", "templates").map(|dir| dir.join("texts"));
    let Some(files) = dir.and_then(|dir| std::fs::read_dir(dir).ok()) else {
        println!("skipped: run scripts/template-matrix for the templates of real models");
        return;
    };
    let mut paths: Vec<_> = files.map(|file| file.expect("a file").path()).collect();
    paths.sort();
    let (mut equal, mut refused, mut wrong) = (0, 0, Vec::new());
    let (mut deviations, mut unknown) = (Vec::new(), Vec::new());
    for path in paths {
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let made: Value = serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("texts");
        let row = row(&made);
        equal += row.equal;
        if row.known == 0 {
            unknown.push(name.clone());
        }
        for (reason, count) in &row.refused {
            refused += count;
            deviations.push(format!("| {name} | {count} | `{reason}` |"));
        }
        wrong.extend(row.wrong.iter().map(|case| format!("{name}: {case}")));
    }
    println!("{}", deviations.join("\n"));
    let share = 100.0 * equal as f64 / (equal + refused + wrong.len()) as f64;
    println!("equal {equal} ({share:.2} %), refused {refused}, wrong {}", wrong.len());
    println!("{} templates write every message again: {}", unknown.len(), unknown.join(", "));
    assert!(wrong.is_empty(), "unlike vLLM:\n{}", wrong.join("\n"));
    assert!(share >= 99.5, "{share:.2} % equal");
    let documented = include_str!("../docs/templates.md");
    let missing: Vec<_> = deviations.iter().filter(|line| !documented.contains(*line)).collect();
    assert!(missing.is_empty(), "not in docs/templates.md: {missing:#?}");
}

/// Templates that treat a message otherwise by what stands around it.
const KNOWN: [(&str, &str); 4] = [
    ("thinking", include_str!("fixtures/templates/known/thinking.jinja")),
    ("states", include_str!("fixtures/templates/known/states.jinja")),
    ("macros", include_str!("fixtures/templates/known/macros.jinja")),
    ("slices", include_str!("fixtures/templates/known/slices.jinja")),
];

/// Whatever was written before, and for whichever conversation: each text is that of a model without memory.
#[test]
fn known_texts_change_no_prompt() {
    let mut templates: Vec<(String, String)> =
        KNOWN.iter().map(|(name, source)| ((*name).to_owned(), (*source).to_owned())).collect();
    let fetched = fetched("KVSPOA_TEMPLATES", "templates").map(|dir| dir.join("texts"));
    for file in fetched.and_then(|dir| std::fs::read_dir(dir).ok()).into_iter().flatten() {
        let path = file.expect("a file").path();
        let made: Value = serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("texts");
        let source = made["template"].as_str().expect("a template").to_owned();
        templates.push((path.file_stem().expect("a name").to_string_lossy().into_owned(), source));
    }
    let bodies: Value = serde_json::from_str(BODIES[0].2).expect("bodies");
    let bodies: Vec<&Value> = bodies.as_object().expect("bodies").values().collect();
    for (name, source) in &templates {
        let (warm, cold) = (model_of(source), model_without_memory(source));
        let mut random = fastrand::Rng::with_seed(11);
        let mut texts = 0;
        for _ in 0..30 {
            let mut talk = Talk::begin(&bodies, &mut random);
            for _ in 0..8 {
                let body = talk.body.to_string();
                let ask = || warm.read(Endpoint::ChatCompletions, body.as_bytes());
                let expected = text(&cold, parse(Endpoint::ChatCompletions, body.as_bytes()));
                assert_eq!(text(&warm, ask()), expected, "{name}: {body}");
                // Twice, as the ids of a text are kept when it is tokenized.
                let ids = |model: &Model| ask().ok().and_then(|ask| model.tokens(&ask, &|| false).ok());
                let expected_ids = ids(&cold).map(|tokens| tokens.ids);
                for _ in 0..2 {
                    assert_eq!(ids(&warm).map(|tokens| tokens.ids), expected_ids, "{name}: {body}");
                }
                texts += usize::from(expected.is_ok());
                talk.go_on(&bodies, &mut random);
            }
        }
        let known = warm.known_stats();
        println!("{name}: {texts} texts, {} of {} messages known", known.hits, known.hits + known.misses);
        assert!(known.hits > 0 || !KNOWN.iter().any(|(own, _)| own == name), "{name}: nothing is known");
    }
}

fn model_without_memory(template: &str) -> Model {
    let dir = tempfile::tempdir().expect("a directory");
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).expect("a file");
    write("tokenizer.json", include_str!("../src/prompt/tiny/tokenizer.json"));
    write("tokenizer_config.json", r#"{"bos_token": "<s>", "eos_token": "</s>"}"#);
    write("chat_template.jinja", template);
    let options = ModelOptions { clock: frozen, cache_bytes: 0, ..ModelOptions::default() };
    Model::load_with(dir.path(), options).expect("a model")
}

/// A conversation that goes on, is taken back, or goes on otherwise.
struct Talk {
    body: Value,
}

impl Talk {
    fn begin(bodies: &[&Value], random: &mut fastrand::Rng) -> Self {
        Self { body: (*random.choice(bodies).expect("a body")).clone() }
    }

    fn go_on(&mut self, bodies: &[&Value], random: &mut fastrand::Rng) {
        let other = *random.choice(bodies).expect("a body");
        let others = other["messages"].as_array().expect("messages");
        let body = self.body.as_object_mut().expect("a body");
        let messages = body["messages"].as_array_mut().expect("messages");
        let at = random.usize(0..messages.len());
        match random.u8(0..8) {
            0 => messages.truncate(at + 1),
            1 => messages.swap(0, at),
            2 => drop(messages.remove(at)),
            3 => messages.push(messages[at].clone()),
            4 => {
                let enable_thinking = random.bool();
                body.insert("chat_template_kwargs".to_owned(), json!({ "enable_thinking": enable_thinking }));
            }
            5 => {
                let fields = ["tools", "add_generation_prompt", "continue_final_message"];
                let field = random.choice(fields).expect("a field");
                match other.get(field) {
                    Some(value) => body.insert(field.to_owned(), value.clone()),
                    None => body.remove(field),
                };
            }
            _ => messages.extend(others.iter().take(random.usize(1..4)).cloned()),
        }
        if self.body["messages"].as_array().is_some_and(Vec::is_empty) {
            self.body = other.clone();
        }
    }
}

/// A model of the gpt-oss kind, with the embedded tokenizer or the real one.
fn harmony_model(tokenizer: &str) -> Model {
    let dir = tempfile::tempdir().expect("a directory");
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).expect("a file");
    write("tokenizer.json", tokenizer);
    write("config.json", r#"{"model_type": "gpt_oss"}"#);
    // What scripts/harmony_goldens.py sets.
    let start_date = Some("2026-03-05".to_owned());
    let model = Model::load_with(dir.path(), ModelOptions { start_date, ..ModelOptions::default() });
    let model = model.expect("a model");
    assert_eq!(model.native_renderer(), None);
    model
}

/// The embedded tokenizer with the special tokens of gpt-oss.
fn tiny_harmony_tokenizer() -> String {
    let json = include_str!("../src/prompt/tiny/tokenizer.json");
    let mut json: Value = serde_json::from_str(json).expect("a tokenizer");
    let free = json["model"]["vocab"].as_object().expect("a vocabulary").len()..;
    for (content, id) in ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>"].iter().zip(free) {
        let token = json!({"id": id, "content": content, "special": true, "normalized": false,
            "lstrip": false, "rstrip": false, "single_word": false});
        json["added_tokens"].as_array_mut().expect("a list").push(token);
    }
    json.to_string()
}

/// FNV-1a, 64 bits, over the ids as little-endian numbers.
fn digest(ids: &[TokenId]) -> String {
    let bytes = ids.iter().flat_map(|id| id.0.to_le_bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}

/// Bodies that we route by load though vLLM takes them: what becomes of them there depends on its configuration, or is
/// left out of the prompt without a word.
const REFUSED_FOR_HARMONY: [&str; 8] = [
    "h-bare-system-part: unexpected_type",
    "hr-builtin: unsupported",
    "hr-builtin-and-own: unsupported",
    "hr-code: unsupported",
    "hr-mcp: unsupported",
    "hr-image: unsupported",
    "hr-previous-input: unsupported",
    "hr-refusal: unsupported",
];

#[test]
fn gpt_oss_is_prompted_as_by_vllm() {
    let texts: Value =
        serde_json::from_str(include_str!("fixtures/templates/texts-harmony.json")).expect("texts");
    let tiny = harmony_model(&tiny_harmony_tokenizer());
    let real = tokenizer_dir("gptoss")
        .map(|dir| harmony_model(&std::fs::read_to_string(dir.join("tokenizer.json")).expect("a tokenizer")));
    if real.is_none() {
        println!("ids are not compared: `scripts/fetch-tokenizers gptoss` fetches the vocabulary");
    }
    let own = [
        ("chat", Endpoint::ChatCompletions, include_str!("fixtures/templates/bodies-harmony.json")),
        ("responses", Endpoint::Responses, include_str!("fixtures/templates/bodies-harmony-responses.json")),
    ];
    let shared = BODIES.into_iter().filter_map(|(suffix, endpoint, bodies)| match suffix {
        "" => Some(("chat", endpoint, bodies)),
        "-responses" => Some(("responses", endpoint, bodies)),
        _ => None,
    });
    let (mut equal, mut refused, mut wrong) = (0, Vec::new(), Vec::new());
    for (kind, endpoint, bodies) in own.into_iter().chain(shared) {
        let bodies: Value = serde_json::from_str(bodies).expect("bodies");
        for (case, body) in bodies.as_object().expect("cases") {
            let made = &texts[kind][case];
            // Where vLLM refuses the request there is nothing to route.
            let Some(text) = made["text"].as_str() else { continue };
            let body = body.to_string();
            match tiny.read(endpoint, body.as_bytes()).map(|ask| ask.prompt) {
                Ok(PromptInput::Harmony(harmony)) => {
                    let ours = tiny.render_harmony(&harmony).expect("a text");
                    // Without the vocabulary it is the text alone that is compared.
                    let ids = real.as_ref().map(|real| real.tokenize(&PromptInput::Harmony(harmony)));
                    let same_ids = ids.is_none_or(|ids| digest(&ids.expect("ids")) == made["ids"]);
                    if ours == text && same_ids {
                        equal += 1;
                    } else {
                        wrong.push(format!("{case}: same ids {same_ids}\n{ours}\nis not\n{text}"));
                    }
                }
                Ok(other) => wrong.push(format!("{case}: {other:?}")),
                Err(error) => refused.push(format!("{case}: {}", error.reason())),
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    println!("equal {equal}, refused {}: {refused:?}", refused.len());
    assert_eq!(refused, REFUSED_FOR_HARMONY, "{equal} are equal");
    let text = r#"{"messages": [{"role": "user", "content": "no <|end|>"}]}"#;
    let ask = tiny.read(Endpoint::ChatCompletions, text.as_bytes()).expect("a body");
    let ids = tiny.tokenize(&ask.prompt);
    assert_eq!(ids, Err(PromptError::UnlikePython), "a text with a special token in it");
}

macro_rules! golden {
    ($endpoint:ident, $suffix:literal) => {
        golden!($endpoint, $suffix, "", "transformers-5.19")
    };
    ($endpoint:ident, $suffix:literal, $of_release:literal, $release:literal) => {
        compare(
            Endpoint::$endpoint,
            $release,
            include_str!(concat!("fixtures/templates/bodies", $suffix, ".json")),
            include_str!(concat!("fixtures/templates/texts", $suffix, $of_release, ".json")),
        )
    };
}

#[test]
fn templates_render_to_the_texts_that_vllm_made() {
    assert_eq!(golden!(ChatCompletions, ""), 475);
}

#[test]
fn messages_of_anthropic_render_to_the_texts_that_vllm_made() {
    assert_eq!(golden!(Messages, "-messages"), 4 * 28);
}

#[test]
fn responses_render_to_the_texts_that_vllm_made() {
    assert_eq!(golden!(Responses, "-responses"), 4 * 28);
}

#[test]
fn messages_have_the_fields_that_a_later_release_of_transformers_gives_them() {
    let release = |suffix: &str| match suffix {
        "" => golden!(ChatCompletions, "", "-transformers-5.24", "transformers-5.24"),
        "-messages" => golden!(Messages, "-messages", "-transformers-5.24", "transformers-5.24"),
        _ => golden!(Responses, "-responses", "-transformers-5.24", "transformers-5.24"),
    };
    assert_eq!(["", "-messages", "-responses"].map(release), [125, 28, 28]);
}

/// `transformers` 4.57.1 of DeepSeek V3's files, which say `add_bos_token`: 5 does not heed that.
#[test]
fn a_text_of_deepseek_begins_as_in_the_engines_transformers() {
    let Some(dir) = tokenizer_dir("deepseek_v3") else {
        println!("skipped: run scripts/fetch-tokenizers for the tokenizer of DeepSeek V3");
        return;
    };
    for (release, expected) in [("transformers-4.57", &[0, 67, 291][..]), ("transformers-5.19", &[67, 291])] {
        let compat = Compat::try_from(release.to_owned()).expect("a release");
        let model =
            Model::load_with(&dir, ModelOptions { compat, ..ModelOptions::default() }).expect("a model");
        let prompt = PromptInput::Text { text: "a b".to_owned(), add_special_tokens: true };
        let ids = model.tokenize(&prompt).expect("ids");
        assert_eq!(ids, expected.iter().copied().map(TokenId).collect::<Vec<_>>(), "{release}");
    }
}

/// Python's `json` (scripts/json_goldens.py): repeated keys, numbers at and beyond the edges, escapes, lone surrogates.
/// What we cannot read as Python does gives no prompt.
#[test]
fn json_is_read_and_written_as_by_python_or_not_at_all() {
    let cases: Vec<(String, Option<String>)> =
        serde_json::from_str(include_str!("fixtures/templates/json.json")).expect("cases");
    let model = model_of("{{ x | tojson }}");
    let (mut equal, mut refused, mut wrong) = (0, Vec::new(), Vec::new());
    for (text, python) in &cases {
        // Within a list, so that null and "auto" are not taken as not given.
        let body = format!(
            r#"{{"messages": [{{"role": "user", "content": "x"}}], "chat_template_kwargs": {{"x": [{text}]}}}}"#
        );
        let ask = model.read(Endpoint::ChatCompletions, body.as_bytes());
        let ours = match ask.map(|ask| ask.prompt) {
            Ok(PromptInput::Chat(conversation)) => model.render(&conversation).ok(),
            _ => None,
        };
        match (ours, python) {
            (Some(ours), Some(python)) if ours == format!("[{python}]") => equal += 1,
            (Some(ours), python) => wrong.push(format!("{text}: {ours} is not {python:?}")),
            (None, Some(_)) => refused.push(text.as_str()),
            (None, None) => {}
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    println!("equal {equal}, refused {}", refused.len());
    assert!(equal >= 150, "{equal}");
    // Integers beyond 64 bits and floats as large, minus zero, what is no number, and half of a surrogate pair.
    let reasons = [
        "18446744073709551616",
        "123456789012345678901234567890",
        "-9223372036854775809",
        "100000000000000000000.0",
        "e30",
        "e400",
        "-0",
        "NaN",
        "Infinity",
        "\\ud83d",
        "\\uD83D",
        "\\ude00",
    ];
    refused.retain(|text| !reasons.iter().any(|reason| text.contains(reason)));
    assert!(refused.is_empty(), "{refused:#?}");
}

/// Bodies of the fixtures with some bytes changed, left out or doubled, and cut anywhere. `KVSPOA_MUTATE=SECONDS` goes on
/// for so long, from another seed each time.
#[test]
fn no_body_breaks_the_reader_and_a_cut_one_has_the_first_tokens_of_the_whole() {
    let model = Model::embedded().expect("the embedded model");
    let harmony = harmony_model(&tiny_harmony_tokenizer());
    let mut bodies = Vec::new();
    for (_, endpoint, fixture) in BODIES {
        let cases: Value = serde_json::from_str(fixture).expect("bodies");
        bodies.extend(cases.as_object().expect("cases").values().map(|body| (endpoint, body.to_string())));
    }
    bodies.push((
        Endpoint::Completions,
        r#"{"prompt": ["one text", "and another"], "max_tokens": 5}"#.to_owned(),
    ));
    bodies.push((
        Endpoint::Generate,
        r#"{"token_ids": [7, 8, 9], "features": {"mm_hashes": {"image": ["a"]},
            "mm_placeholders": {"image": [{"offset": 0, "length": 2}]}}, "sampling_params": {"max_tokens": 5}}"#
            .to_owned(),
    ));
    let long = std::env::var("KVSPOA_MUTATE").ok().and_then(|seconds| seconds.parse().ok());
    let until = long.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let seed = if long.is_some() { fastrand::u64(..) } else { 20_260_305 };
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut with_tokens, mut done) = (0, 0);
    while until.map_or(done < 4_000, |until| Instant::now() < until) {
        done += 1;
        let (endpoint, body) = random.choice(&bodies).expect("bodies");
        let mut bytes = body.clone().into_bytes();
        for _ in 0..random.usize(0..4) {
            let at = random.usize(0..bytes.len());
            let end = (at + random.usize(1..12)).min(bytes.len());
            match random.u8(0..4) {
                0 => bytes[at] = random.u8(..),
                1 => bytes[at] = *random.choice(b"{}[],:\"\\0-eE. tfn").expect("a byte"),
                2 if end - at < bytes.len() => drop(bytes.drain(at..end)),
                _ => bytes.extend_from_within(at..end),
            }
        }
        let any = random.usize(0..any_body::ENDPOINTS.len());
        let endpoint = if random.u8(..) == 0 { any_body::ENDPOINTS[any] } else { *endpoint };
        let model = if random.u8(0..4) == 0 { &harmony } else { &model };
        let cut_at = random.usize(0..=bytes.len());
        with_tokens += usize::from(any_body::check(model, endpoint, &bytes, cut_at));
    }
    println!("{done} bodies, {with_tokens} with tokens");
    assert!(with_tokens * 5 > done, "only {with_tokens} of {done} had tokens");
}

/// One conversation as its body is for each endpoint: tools and their calls, thinking, several parts.
fn one_conversation() -> [(Endpoint, Value); 3] {
    let schema = json!({ "type": "object", "properties": { "town": { "type": "string" } } });
    let function = json!({ "name": "weather", "description": "How it is.", "parameters": schema });
    let parts =
        |kind: &str| json!([{ "type": kind, "text": "Zürich?" }, { "type": kind, "text": "And Köln?" }]);
    let arguments = r#"{"town": "Zürich"}"#;
    let chat = json!({
        "messages": [
            { "role": "system", "content": "Be brief." },
            { "role": "user", "content": parts("text") },
            { "role": "assistant", "reasoning": "Two towns.", "content": "", "tool_calls": [
                { "id": "c1", "type": "function", "function": { "name": "weather", "arguments": arguments } }] },
            { "role": "tool", "tool_call_id": "c1", "content": "sunny" },
        ],
        "tools": [{ "type": "function", "function": function }],
    });
    let messages = json!({
        "model": "m", "max_tokens": 9, "system": [{ "type": "text", "text": "Be brief." }],
        "messages": [
            { "role": "user", "content": parts("text") },
            { "role": "assistant", "content": [
                { "type": "thinking", "thinking": "Two towns.", "signature": "s" },
                { "type": "tool_use", "id": "c1", "name": "weather", "input": { "town": "Zürich" } }] },
            { "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "c1", "content": "sunny" }] },
        ],
        "tools": [{ "name": "weather", "description": "How it is.", "input_schema": schema }],
    });
    let responses = json!({
        "instructions": "Be brief.",
        "input": [
            { "role": "user", "content": parts("input_text") },
            { "type": "reasoning", "id": "r1", "summary": [],
              "content": [{ "type": "reasoning_text", "text": "Two towns." }] },
            { "type": "function_call", "call_id": "c1", "name": "weather", "arguments": arguments },
            { "type": "function_call_output", "call_id": "c1", "output": "sunny" },
        ],
        "tools": [{ "type": "function", "name": "weather", "description": "How it is.", "parameters": schema }],
    });
    [(Endpoint::ChatCompletions, chat), (Endpoint::Messages, messages), (Endpoint::Responses, responses)]
}

/// As in vLLM 0.32, which was asked for the texts of these three.
#[test]
fn one_conversation_has_the_same_tokens_by_every_endpoint() {
    let model = model_of(include_str!("fixtures/templates/chatml.jinja"));
    let tokens = |endpoint, body: &Value| {
        let ask = model.read(endpoint, body.to_string().as_bytes()).expect("a body");
        model.tokens(&ask, &|| false).expect("tokens").ids.into_vec()
    };
    let [(endpoint, chat), others @ ..] = one_conversation();
    let text = render(&model, endpoint, &chat).expect("a text");
    for said in ["<tools>", "Zürich?", "And Köln?", "Two towns.", "\"town\"", "sunny"] {
        assert!(text.contains(said), "{said} is not in {text}");
    }
    let by_chat = tokens(endpoint, &chat);
    for (endpoint, body) in others {
        assert_eq!(tokens(endpoint, &body), by_chat, "{endpoint:?}");
    }
    let completion = json!({ "prompt": text, "add_special_tokens": false });
    assert_eq!(tokens(Endpoint::Completions, &completion), by_chat);
    let ids: Vec<u32> = by_chat.iter().map(|id| id.0).collect();
    assert_eq!(tokens(Endpoint::Completions, &json!({ "prompt": ids })), by_chat);
}
