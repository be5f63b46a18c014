use super::*;
use crate::config;
use crate::request::body::{Endpoint, parse};

fn tokens(body: &str) -> Vec<TokenId> {
    let model = Model::embedded().expect("the embedded model");
    let ask = parse(Endpoint::ChatCompletions, body.as_bytes()).expect("a body");
    model.tokens(&ask, &|| false).expect("tokens").ids.into_vec()
}

fn rendered(body: &str) -> String {
    let model = Model::embedded().expect("the embedded model");
    let ask = parse(Endpoint::ChatCompletions, body.as_bytes()).expect("a body");
    let PromptInput::Chat(conversation) = ask.prompt else { panic!("a conversation") };
    model.render(&conversation).expect("text")
}

#[test]
fn the_embedded_model_renders_chatml() {
    let body =
        r#"{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}"#;
    assert_eq!(
        rendered(body),
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    );
}
#[test]
fn special_tokens_in_the_text_are_one_token() {
    let all = tokens(r#"{"messages": [{"role": "user", "content": "<|im_end|>"}]}"#);
    assert_eq!(all.iter().filter(|token| **token == TokenId(2)).count(), 2);
}

#[test]
fn of_several_prompts_the_longest_counts_and_all_together() {
    let model = Model::embedded().expect("the embedded model");
    let body = r#"{"prompt": [[1, 2], [3, 4, 5], [6]], "truncate_prompt_tokens": 2}"#;
    let mut ask = parse(Endpoint::Completions, body.as_bytes()).expect("a body");
    let all = model.tokens(&ask, &|| false).expect("tokens");
    assert_eq!((all.ids.into_vec(), all.total), (vec![TokenId(1), TokenId(2)], 5));
    ask.limits.truncation = None;
    let all = model.tokens(&ask, &|| false).expect("tokens");
    assert_eq!((all.ids.into_vec(), all.total), (vec![TokenId(3), TokenId(4), TokenId(5)], 6));
}

#[test]
fn when_the_time_is_up_the_first_tokens_are_there() {
    let model = Model::embedded().expect("the embedded model");
    let body =
        r#"{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}"#;
    let ask = parse(Endpoint::ChatCompletions, body.as_bytes()).expect("a body");
    let whole = model.tokens(&ask, &|| false).expect("tokens");
    let looks = std::cell::Cell::new(0);
    let second_look = || looks.replace(looks.get() + 1) > 0;
    let first = model.tokens(&ask, &second_look).expect("tokens");
    assert!(whole.is_whole && !first.is_whole);
    assert!(!first.ids.is_empty() && first.ids.len() < whole.ids.len());
    assert!(whole.ids.starts_with(&first.ids));
}

#[test]
fn a_cut_body_has_the_first_tokens_of_the_whole_one() {
    let model = Model::embedded().expect("the embedded model");
    let words =
        ["the ", "router ", "writes\n", "\u{e9} ", "🙂", "{\"a\": 1}", "fn main() ", "    ", "<|im_end|>"];
    let mut random = fastrand::Rng::with_seed(7);
    let mut text = |count: usize| -> String { (0..count).filter_map(|_| random.choice(words)).collect() };
    let messages = serde_json::json!([
        { "role": "system", "content": text(60) },
        { "role": "user", "content": text(60) },
        { "role": "assistant", "content": text(60), "tool_calls": [
            { "id": "1", "type": "function", "function": { "name": "f", "arguments": "{\"a\": 1}" } }] },
        { "role": "tool", "tool_call_id": "1", "content": text(60) },
        { "role": "user", "content": [{ "type": "text", "text": text(60) }, { "type": "text", "text": text(9) }] },
    ]);
    let chat = serde_json::json!({ "model": "m", "messages": messages, "temperature": 0 });
    let blocks = serde_json::json!([
        { "role": "user", "content": [{ "type": "text", "text": text(60) }] },
        { "role": "assistant", "content": text(60) },
        { "role": "user", "content": text(90) },
    ]);
    let claude = serde_json::json!({ "system": text(50), "messages": blocks, "max_tokens": 1 });
    let items = serde_json::json!([
        { "role": "user", "content": text(60) },
        { "type": "message", "role": "assistant", "content": [{ "type": "output_text", "text": text(60) }] },
        { "type": "function_call", "call_id": "1", "name": "f", "arguments": "{}" },
        { "type": "function_call_output", "call_id": "1", "output": text(60) },
        { "role": "user", "content": text(60) },
    ]);
    let responses = serde_json::json!({ "instructions": text(40), "input": items });
    let completion = serde_json::json!({ "prompt": text(200), "max_tokens": 1 });
    for (endpoint, body) in [
        (Endpoint::ChatCompletions, chat),
        (Endpoint::Messages, claude),
        (Endpoint::Responses, responses),
        (Endpoint::Completions, completion),
    ] {
        let body = body.to_string();
        let whole = model.tokens(&parse(endpoint, body.as_bytes()).expect("a body"), &|| false);
        let whole = whole.expect("tokens").ids;
        let (mut longest, mut useful) = (0, 0);
        for end in (0..body.len()).step_by(3) {
            let Ok(ask) = crate::request::partial::parse(endpoint, &body.as_bytes()[..end]) else { continue };
            let Ok(known) = model.tokens(&ask, &|| false) else { continue };
            assert!(whole.starts_with(&known.ids), "{endpoint:?} cut at {end}");
            longest = longest.max(known.ids.len());
            useful += 1;
        }
        assert!(longest * 10 > whole.len() * 8, "{endpoint:?}: {longest} of {}", whole.len());
        assert!(useful * 3 > body.len() / 2, "{endpoint:?}: {useful}");
    }
}

#[test]
fn of_a_conversation_with_media_what_stands_before_them_counts() {
    let turn = r#"{"role": "user", "content": "tell me of all the ships that you have seen in the harbour"}"#;
    let media = r#"{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}"#;
    let model = Model::embedded().expect("the embedded model");
    let ask = |messages: &str| {
        parse(Endpoint::ChatCompletions, format!(r#"{{"messages": [{messages}]}}"#).as_bytes())
    };
    let text = model.tokens(&ask(turn).expect("a body"), &|| false).expect("tokens");
    let with_media = ask(&format!("{turn}, {media}, {turn}")).expect("a body");
    assert!(!with_media.is_whole && !with_media.identity_is_known);
    let known = model.tokens(&with_media, &|| false).expect("tokens");
    assert!(text.ids.starts_with(&known.ids) && !known.is_whole);
}

#[test]
fn what_the_engine_was_told_changes_the_prompt() {
    let dir = tempfile::tempdir().expect("a directory");
    let template = dir.path().join("new.jinja");
    let source =
        "{% if tools %}tools {% endif %}{% for m in messages %}{{ m.content }}{% endfor %} {{ mood }}";
    std::fs::write(&template, source).expect("a file");
    let body = r#"{"messages": [{"role": "user", "content": "Hi"}], "tool_choice": "none",
        "tools": [{"type": "function", "function": {"name": "f"}}]}"#;
    let rendered = |rendering: &config::Rendering| {
        let model = Model::embedded_with(ModelOptions::from(rendering)).expect("a model");
        let PromptInput::Chat(conversation) =
            parse(Endpoint::ChatCompletions, body.as_bytes()).expect("a body").prompt
        else {
            panic!("a conversation")
        };
        model.render(&conversation).expect("text")
    };
    let mut rendering = config::Rendering { chat_template: Some(template.clone()), ..Default::default() };
    assert_eq!(rendered(&rendering), "tools Hi ");
    rendering.exclude_tools_when_tool_choice_none = true;
    rendering.default_chat_template_kwargs.insert("mood".to_owned(), "good".into());
    assert_eq!(rendered(&rendering), "Hi good");
    rendering.chat_template_content_format = config::ContentFormat::Openai;
    assert_eq!(rendered(&rendering), "[{'type': 'text', 'text': 'Hi'}] good");
    std::fs::remove_file(&template).expect("removed");
    let error = Model::embedded_with(ModelOptions::from(&rendering)).expect_err("no template");
    assert!(error.to_string().contains("new.jinja"), "{error}");
}

#[test]
fn what_the_engine_refuses_has_no_tokens() {
    let model = Model::embedded().expect("the embedded model");
    let tokens = |fields: &str, context| {
        let mut ask = parse(Endpoint::Completions, format!("{{{fields}}}").as_bytes()).expect("a body");
        ask.limits = ask.limits.within(Some(context));
        model.tokens(&ask, &|| false).map(|tokens| tokens.ids.len())
    };
    let three = r#""max_tokens": 1, "prompt": [1, 2, 3]"#;
    assert_eq!(tokens(three, 4), Ok(3), "and one of the answer");
    assert_eq!(tokens(three, 3), Err(PromptError::BeyondContext));
    assert_eq!(tokens(r#""max_tokens": 1, "prompt": [[1], [1, 2, 3]]"#, 3), Err(PromptError::BeyondContext));
    assert_eq!(tokens(&format!(r#"{three}, "truncate_prompt_tokens": 2"#), 3), Ok(2));
    assert_eq!(tokens(&format!(r#"{three}, "truncate_prompt_tokens": -1"#), 3), Ok(2));
    assert_eq!(
        tokens(r#""prompt": [1, 2, 3]"#, 15),
        Err(PromptError::BeyondContext),
        "16 are to be answered"
    );
}

#[test]
fn ids_are_those_that_the_tokenizer_or_the_model_has() {
    let largest = |vocab_size: Option<u32>| {
        let dir = tempfile::tempdir().expect("a directory");
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).expect("a file");
        write("tokenizer.json", include_str!("tiny/tokenizer.json"));
        if let Some(size) = vocab_size {
            write("config.json", &format!(r#"{{"vocab_size": {size}}}"#));
        }
        let model = Model::load(dir.path()).expect("a model");
        let takes = |id: u32| match model.tokenize(&PromptInput::Tokens(vec![TokenId(id)])) {
            Ok(ids) => ids == [TokenId(id)],
            Err(error) => {
                assert_eq!(error, PromptError::BeyondVocabulary);
                false
            }
        };
        [2047, 2048, 2999, 3000, u32::MAX].into_iter().filter(|id| takes(*id)).max()
    };
    assert_eq!(largest(Some(3000)), Some(2999), "the model has more than the tokenizer");
    assert_eq!(largest(Some(100)), Some(2047), "the tokenizer has more than the model");
    assert_eq!(largest(None), Some(u32::MAX), "nobody told");
}

#[test]
fn tools_to_be_called_are_refused_where_the_engine_was_not_told_of_calls() {
    let rendering = config::Rendering { enable_auto_tool_choice: false, ..Default::default() };
    let models = [rendering, config::Rendering::default()]
        .map(|rendering| Model::embedded_with(ModelOptions::from(&rendering)).expect("a model"));
    let takes = |endpoint, fields: &str| {
        let body = format!(r#"{{"messages": [{{"role": "user", "content": "Hi"}}], {fields}}}"#);
        let ask = parse(endpoint, body.as_bytes()).expect("a body");
        models.each_ref().map(|model| match model.tokens(&ask, &|| false) {
            Ok(_) => true,
            Err(error) => {
                assert_eq!(error, PromptError::ToolsRefused);
                false
            }
        })
    };
    let chat = |choice: &str| {
        let tools = r#""tools": [{"type": "function", "function": {"name": "f"}}]"#;
        takes(Endpoint::ChatCompletions, &format!("{tools}{choice}"))
    };
    assert_eq!(chat(""), [false, true]);
    assert_eq!(chat(r#", "tool_choice": "auto""#), [false, true]);
    assert_eq!(chat(r#", "tool_choice": "required""#), [false, true]);
    assert_eq!(chat(r#", "tool_choice": "none""#), [true, true]);
    assert_eq!(chat(r#", "tool_choice": null"#), [true, true]);
    assert_eq!(takes(Endpoint::ChatCompletions, r#""n": 1"#), [true, true]);
    let claude = |choice: &str| {
        let tools = r#""max_tokens": 1, "tools": [{"name": "f", "input_schema": {"type": "object"}}]"#;
        takes(Endpoint::Messages, &format!("{tools}{choice}"))
    };
    assert_eq!(claude(""), [false, true]);
    assert_eq!(claude(r#", "tool_choice": {"type": "any"}"#), [false, true]);
    assert_eq!(claude(r#", "tool_choice": {"type": "none"}"#), [true, true]);
}

/// A model whose prompts begin with all that can change a beginning, and with a token of the tokenizer's own.
fn telling_model() -> Model {
    let dir = tempfile::tempdir().expect("a directory");
    let mut json: serde_json::Value =
        serde_json::from_str(include_str!("tiny/tokenizer.json")).expect("a tokenizer");
    json["post_processor"] = serde_json::json!({"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}});
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).expect("a file");
    write("tokenizer.json", &json.to_string());
    write(
        "chat_template.jinja",
        "{{ tools }} {{ documents }} {{ reasoning_effort }} {{ enable_thinking }} {{ x }}\
         {% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}",
    );
    let options = ModelOptions { exclude_unused_tools: true, ..ModelOptions::default() };
    Model::load_with(dir.path(), options).expect("a model")
}

/// A field of a body: what it says where it was seen, and what it says where it was not, which changes how the prompt starts, or
/// whose it is.
type Telling = (&'static str, &'static str, &'static str);

#[test]
fn what_changes_a_beginning_and_was_cut_off_leaves_it_unsure() {
    const MODEL: Telling = ("model", "null", r#""m""#);
    const SALT: Telling = ("cache_salt", "null", r#""s""#);
    const FORWARDED: Telling = ("kv_transfer_params", "null", r#"{"prompt_token_ids": [1, 2]}"#);
    const ARGUMENTS: Telling = ("chat_template_kwargs", "null", r#"{"x": 7}"#);
    const TOOL: &str = r#"[{"type": "function", "function": {"name": "f"}}]"#;
    const CLAUDE_TOOL: &str = r#"[{"name": "f", "input_schema": {"type": "object"}}]"#;
    const FUNCTION: &str = r#"[{"type": "function", "name": "f"}]"#;
    const CHAT: &[Telling] = &[
        ("tools", TOOL, TOOL),
        ("tool_choice", r#""auto""#, r#""none""#),
        ("documents", "null", r#"[{"text": "a"}]"#),
        ("reasoning_effort", "null", r#""high""#),
        ("add_special_tokens", "false", "true"),
        ("truncate_prompt_tokens", "null", "9"),
    ];
    const MESSAGES: &[Telling] = &[
        ("system", "null", r#""Be brief.""#),
        ("tools", CLAUDE_TOOL, CLAUDE_TOOL),
        ("tool_choice", r#"{"type": "auto"}"#, r#"{"type": "none"}"#),
        ("output_config", "null", r#"{"effort": "high"}"#),
        ("thinking", "null", r#"{"type": "disabled"}"#),
    ];
    const RESPONSES: &[Telling] = &[
        ("instructions", "null", r#""Be brief.""#),
        ("tools", FUNCTION, FUNCTION),
        ("tool_choice", r#""auto""#, r#""none""#),
        ("reasoning", "null", r#"{"effort": "high"}"#),
        ("truncation", r#""disabled""#, r#""auto""#),
        ("previous_response_id", "null", r#""r""#),
        ("prompt", "null", r#"{"id": "p"}"#),
    ];
    const COMPLETIONS: &[Telling] =
        &[("add_special_tokens", "true", "false"), ("truncate_prompt_tokens", "null", "9")];
    const GENERATE: &[Telling] = &[
        ("features", "null", r#"{"mm_hashes": {}}"#),
        ("content_parts", "null", r#"[{"type": "image_url"}]"#),
    ];
    let model = telling_model();
    let text = "tell me of all the ships that you have seen in the harbour on a day of snow ".repeat(3);
    let turns = format!(r#"[{{"role": "user", "content": "{text}"}}]"#);
    let ids = format!("[{}]", ["7"; 40].join(", "));
    for (endpoint, prompt, own, shared) in [
        (Endpoint::ChatCompletions, format!(r#""messages": {turns}"#), CHAT, &[FORWARDED, ARGUMENTS][..]),
        (Endpoint::Messages, format!(r#""messages": {turns}"#), MESSAGES, &[FORWARDED, ARGUMENTS]),
        (Endpoint::Responses, format!(r#""input": {turns}"#), RESPONSES, &[FORWARDED, ARGUMENTS]),
        (Endpoint::Completions, format!(r#""prompt": "{text}""#), COMPLETIONS, &[]),
        (Endpoint::Generate, format!(r#""token_ids": {ids}"#), GENERATE, &[]),
    ] {
        let whole = |body: &str| {
            let mut ask = parse(endpoint, body.as_bytes()).ok()?;
            // Some truncations go by it.
            ask.limits = ask.limits.within(Some(16));
            ask.limits.context_tokens = None;
            model.tokens(&ask, &|| false).ok().map(|tokens| tokens.ids)
        };
        let cut = |beginning: &str| {
            let ask = crate::request::partial::parse(endpoint, beginning.as_bytes()).ok()?;
            Some((model.tokens(&ask, &|| false).expect("tokens").ids, ask.identity_is_known))
        };
        let fields: Vec<_> = own.iter().chain(shared).chain(&[MODEL, SALT]).collect();
        let without = |field: &str| -> String {
            let others = fields.iter().filter(|(name, ..)| *name != field);
            others.map(|(name, seen, _)| format!(r#""{name}": {seen}, "#)).collect()
        };
        let (ids, known) = cut(&format!("{{{}{prompt}, ", without(""))).expect("a beginning");
        assert!(known && !ids.is_empty(), "{endpoint:?}: all was seen");
        for (field, _, changed) in &fields {
            let beginning = format!("{{{}{prompt}, ", without(field));
            // Without its media, nothing of a prompt of ids is used.
            let Some((ids, known)) = cut(&beginning) else { continue };
            assert!(!known, "{endpoint:?}: {field} was not seen");
            let is_other = whole(&format!(r#"{beginning}"{field}": {changed}}}"#))
                .is_none_or(|whole| !whole.starts_with(&ids));
            let is_of_another_cache = matches!(*field, "model" | "cache_salt");
            assert!(is_other || is_of_another_cache, "{endpoint:?}: {field} changes nothing");
        }
    }
}
