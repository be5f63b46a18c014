use super::*;
use crate::request::conversation::Part;

fn chat(body: &str) -> Result<Conversation, BodyError> {
    match parse(Endpoint::ChatCompletions, body.as_bytes())?.prompt {
        PromptInput::Chat(conversation) => Ok(conversation),
        other => panic!("{other:?} is no conversation"),
    }
}

fn completion(body: &str) -> Result<PromptInput, BodyError> {
    parse(Endpoint::Completions, body.as_bytes()).map(|ask| ask.prompt)
}

/// A chat body with one user message and `fields`.
fn with(fields: &str) -> Result<Conversation, BodyError> {
    chat(&format!(r#"{{"messages": [{{"role": "user", "content": "x"}}], {fields}}}"#))
}

#[test]
fn the_endpoint_is_the_end_of_the_path() {
    assert_eq!(Endpoint::from_path("/v1/chat/completions"), Some(Endpoint::ChatCompletions));
    assert_eq!(
        Endpoint::from_path("/llama/v1/completions?x=/v1/chat/completions"),
        Some(Endpoint::Completions)
    );
    assert_eq!(Endpoint::from_path("/v1/chat/completions/render"), None);
    assert_eq!(Endpoint::from_path("/v1/messages"), Some(Endpoint::Messages));
    assert_eq!(Endpoint::from_path("/v1/messages/count_tokens"), None);
    assert_eq!(Endpoint::from_path("/v1/embeddings"), None);
    assert!(Endpoint::is_without_cache("/v1/embeddings?x=1"));
    assert!(Endpoint::is_without_cache("/v1/messages/count_tokens"));
    assert!(!Endpoint::is_without_cache("/v1/messages"));
}

#[test]
fn what_is_no_json_object_is_told_apart() {
    assert_eq!(completion(r#"{"prompt": "cut of"#), Err(BodyError::Cut));
    assert_eq!(completion("[1]"), Err(BodyError::NotAnObject));
    let deep = format!(r#"{{"prompt": "x", "deep": {}1{}}}"#, "[".repeat(200), "]".repeat(200));
    assert_eq!(completion(&deep), Err(BodyError::Malformed));
}

#[test]
fn of_a_repeated_field_the_last_value_counts() {
    let prompt = completion(r#"{"prompt": "first", "prompt": "last"}"#);
    assert_eq!(prompt, Ok(PromptInput::Text { text: "last".into(), add_special_tokens: true }));
}

#[test]
fn a_completion_prompt_has_four_shapes() {
    let text = |text: &str| Ok(PromptInput::Text { text: text.into(), add_special_tokens: true });
    let ids = Ok(PromptInput::Tokens(vec![TokenId(1), TokenId(2)]));
    assert_eq!(completion(r#"{"prompt": "a"}"#), text("a"));
    assert_eq!(completion(r#"{"prompt": ["a"]}"#), text("a"));
    assert_eq!(completion(r#"{"prompt": [1, 2]}"#), ids);
    assert_eq!(completion(r#"{"prompt": [[1, 2]]}"#), ids);
    let one = PromptInput::Tokens(vec![TokenId(1)]);
    let several = Ok(PromptInput::Several(vec![one, text("b").expect("a prompt")]));
    assert_eq!(completion(r#"{"prompt": [[1], "b"]}"#), several);
}

#[test]
fn a_batch_is_several_conversations_without_tools() {
    let batch = |body: &str| parse(Endpoint::ChatBatch, body.as_bytes()).map(|ask| ask.prompt);
    let turn = r#"[{"role": "user", "content": "x"}]"#;
    let two = batch(&format!(r#"{{"messages": [{turn}, {turn}]}}"#)).expect("a body");
    assert!(matches!(&two, PromptInput::Several(prompts) if prompts.len() == 2), "{two:?}");
    assert!(matches!(batch(&format!(r#"{{"messages": [{turn}]}}"#)), Ok(PromptInput::Chat(_))));
    assert!(batch(&format!(r#"{{"messages": [{turn}], "tools": [{{}}]}}"#)).is_err());
}

/// What vLLM answered to each.
#[test]
fn parts_that_the_api_does_not_know_get_lost_in_a_batch() {
    let batch = |content: &str, fields: &str| {
        let message = format!(r#"{{"role": "assistant", "content": [{content}]{fields}}}"#);
        parse(Endpoint::ChatBatch, format!(r#"{{"messages": [[{message}]]}}"#).as_bytes()).is_ok()
    };
    let [known, other] = [r#"{"type": "text", "text": "x"}"#, r#"{"type": "output_text", "text": "x"}"#];
    assert!(batch(known, "") && batch(known, r#", "refusal": "x""#) && batch("", ""));
    assert!(!batch(other, ""));
    assert!(batch(&format!("{known}, {other}"), ""), "with one that it knows it takes both");
    assert!(!batch(&format!("{known}, {other}"), r#", "refusal": "x", "function_call": null"#));
}

#[test]
fn of_a_system_message_the_billing_line_of_its_texts_is_removed_and_of_no_other_parts() {
    let texts = |content: &str| {
        let body = format!(r#"{{"messages": [{{"role": "system", "content": {content}}}]}}"#);
        let parts = chat(&body).expect("a body").messages[0].content.clone();
        parts
            .iter()
            .map(|part| match part {
                Part::Text { text, .. } => text.to_string(),
                other => panic!("{other:?}"),
            })
            .collect::<Vec<_>>()
    };
    let line = "x-anthropic-billing-header: cch=1;";
    let part = |kind: &str, text: &str| format!(r#"[{{"type": "{kind}", "text": "{text}"}}]"#);
    assert_eq!(texts(&format!(r#""{line}\nBe brief.""#)), ["Be brief."]);
    assert!(texts(&part("text", line)).is_empty());
    assert_eq!(texts(&part("input_text", line)), [line]);
}

#[test]
fn prompts_that_cannot_be_routed_by_have_a_reason() {
    for (body, reason) in [
        (r#"{"prompt": ["a", ""]}"#, "empty_prompt"),
        (r#"{"prompt": ""}"#, "empty_prompt"),
        (r#"{"prompt": []}"#, "empty_prompt"),
        (r#"{"prompt": [[]]}"#, "empty_prompt"),
        (r#"{"prompt": null}"#, "empty_prompt"),
        ("{}", "empty_prompt"),
        (r#"{"prompt": [1, -2]}"#, "unexpected_type"),
        (r#"{"prompt": [4294967296]}"#, "unexpected_type"),
        (r#"{"prompt": "a", "prompt_embeds": "AAAA"}"#, "unsupported"),
        (r#"{"prompt": "a", "cache_salt": ""}"#, "refused"),
    ] {
        assert_eq!(completion(body).expect_err(body).reason(), reason, "{body}");
    }
}

#[test]
fn what_routing_needs_beside_the_prompt_is_read() {
    let body = r#"{"messages": [{"role": "user", "content": "x"}], "model": "m", "stream": true, "session_id": "s",
        "cache_salt": "c", "max_tokens": 5, "max_completion_tokens": 7}"#;
    let ask = parse(Endpoint::ChatCompletions, body.as_bytes()).expect("a body");
    assert_eq!(ask.model.as_deref(), Some("m"));
    assert_eq!(ask.session_id.as_deref(), Some("s"));
    assert_eq!(ask.cache_salt.as_deref(), Some("c"));
    assert_eq!((ask.limits.max_tokens, ask.stream), (Some(7), true));
}

#[test]
fn tools_are_written_out_in_vllms_order_and_fields() {
    let tools = r#""tools": [{"x": 1, "function": {"strict": true, "parameters": {"b": 1, "a": 2}, "name": "f"}, "type": "function"},
        {"function": {"name": "g", "description": "G"}, "defer_loading": false}]"#;
    let written: Vec<String> =
        with(tools).expect("a body").tools.expect("tools").list().iter().map(ToString::to_string).collect();
    assert_eq!(
        written,
        [
            r#"{"type":"function","function":{"name":"f","description":null,"parameters":{"b":1,"a":2},"strict":true}}"#,
            r#"{"type":"function","function":{"name":"g","description":"G","parameters":null,"defer_loading":false},"defer_loading":false}"#,
        ]
    );
}

#[test]
fn the_arguments_of_a_tool_call_become_an_object() {
    let arguments = |text: &str| {
        let call = serde_json::json!({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}]}]});
        chat(&call.to_string()).map(|chat| {
            let calls = chat.messages[0].tool_calls.as_ref().expect("calls");
            calls[0]["function"]["arguments"].to_string()
        })
    };
    assert_eq!(arguments(r#"{"b": 1, "a": 2.50}"#), Ok(r#"{"b":1,"a":2.5}"#.into()));
    assert_eq!(arguments(r#"{"a": 1, "b": 2, "a": 3}"#), Ok(r#"{"a":3,"b":2}"#.into()));
    for not_an_object in ["", "{broken", "[1]", "7"] {
        assert_eq!(arguments(not_an_object), Ok("{}".into()), "{not_an_object}");
    }
    for python_reads_it in [r#"{"a": NaN}"#, r#"{"a": "\ud800"}"#, r#"{"a": 1e999}"#] {
        assert!(arguments(python_reads_it).is_err(), "{python_reads_it}");
    }
    assert_eq!(arguments(r#"{"a": 100000000000000000000}"#), Err(BodyError::Number));
    assert_eq!(arguments(r#"{"a": -0}"#), Err(BodyError::Number));
}

#[test]
fn a_tool_call_is_written_in_vllms_order_of_fields() {
    let body = r#"{"messages": [{"role": "assistant", "tool_calls": [
        {"index": 0, "type": "function", "id": "1", "function": {"name": "f", "x": 1, "arguments": "{}"}}]}]}"#;
    let calls = chat(body).expect("a body").messages.remove(0).tool_calls.clone().expect("calls");
    let written = r#"{"id":"1","function":{"arguments":{},"name":"f","x":1},"type":"function","index":0}"#;
    assert_eq!(calls[0].to_string(), written);
}

#[test]
fn content_parts_that_are_text_stay_and_media_is_refused() {
    let parts = |parts: &str| chat(&format!(r#"{{"messages": [{{"role": "user", "content": [{parts}]}}]}}"#));
    let kept = parts(r#"{"type": "text", "text": "a", "cache_control": {"t": 1}}, {"type": "text", "text": null}, {"type": "thinking", "thinking": "b"}"#)
        .expect("a body");
    let texts: Vec<_> = kept.messages[0]
        .content
        .iter()
        .map(|part| match part {
            Part::Text { text, extra } => (&**text, extra.len()),
            Part::ToolReference(name) => (name.as_str(), 0),
        })
        .collect();
    assert_eq!(texts, [("a", 1), ("b", 0)]);
    assert_eq!(parts(r#"{"type": "image_url", "image_url": {"url": "u"}}"#), Err(BodyError::Media));
    assert_eq!(parts(r#"{"type": "text", "text": "a", "uuid": "u"}"#), Err(BodyError::Media));
    assert!(parts(r#""bare""#).is_err());
}

#[test]
fn the_clients_billing_line_is_removed_from_system_messages() {
    let body = r#"{"messages": [{"role": "system", "content": [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1"},
        {"type": "text", "text": "x-anthropic-billing-header: cch=1\nYou are X."}]},
        {"role": "user", "content": "x-anthropic-billing-header: stays"}]}"#;
    let chat = chat(body).expect("a body");
    let text = |text: &str| vec![Part::Text { text: text.into(), extra: Object::new() }];
    assert_eq!(chat.messages[0].content, text("You are X."));
    assert_eq!(chat.messages[1].content, text("x-anthropic-billing-header: stays"));
}

#[test]
fn reasoning_has_two_names_and_belongs_to_assistants() {
    let body = r#"{"messages": [{"role": "assistant", "content": "a", "reasoning_content": "old"},
        {"role": "assistant", "content": "a", "reasoning_content": "old", "reasoning": "new"},
        {"role": "user", "content": "a", "reasoning": "none"}]}"#;
    let chat = chat(body).expect("a body");
    let reasoning: Vec<_> = chat.messages.iter().map(|message| message.reasoning.as_ref()).collect();
    assert_eq!(reasoning, [Some(&Value::from("old")), Some(&Value::from("new")), None]);
}

#[test]
fn template_arguments_that_the_engine_refuses_or_ignores_do_not_pass() {
    let arguments =
        with(r#""chat_template_kwargs": {"padding": true, "enable_thinking": false}"#).expect("a body");
    assert_eq!(arguments.template_arguments.keys().collect::<Vec<_>>(), ["enable_thinking"]);
    assert_eq!(with(r#""chat_template_kwargs": {"chat_template": "x"}"#), Err(BodyError::RequestTemplate));
    let template = with(r#""chat_template": "x""#).expect("a body").template;
    assert_eq!(template.as_deref(), Some("x"), "whether it counts is the model's affair");
    assert_eq!(with(r#""chat_template": """#).expect("a body").template, None);
    assert_eq!(with(r#""chat_template": 1"#), Err(BodyError::Field("chat_template")));
    assert!(with(r#""chat_template_kwargs": {"tokenize": true}"#).is_err());
}

#[test]
fn tokens_handed_over_by_the_prefill_stage_replace_the_messages() {
    let body = |echo: &str| {
        let body = format!(
            r#"{{"messages": [{{"role": "user", "content": "x"}}], "kv_transfer_params": {{"prompt_token_ids": [1, 2]}}{echo}}}"#
        );
        parse(Endpoint::ChatCompletions, body.as_bytes()).expect("a body").prompt
    };
    assert_eq!(body(""), PromptInput::Tokens(vec![TokenId(1), TokenId(2)]));
    assert!(matches!(body(r#", "echo": true"#), PromptInput::Chat(_)));
}

#[test]
fn no_error_repeats_the_clients_text() {
    for body in [
        r#"{"messages": [{"role": "user", "content": 7, "secret": "SECRET"}]}"#,
        r#"{"messages": [{"role": "user", "content": [{"type": "SECRET"}]}]}"#,
        r#"{"messages": "SECRET"}"#,
        r#"{"SECRET"#,
        r#"{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "SECRET"}]}"#,
    ] {
        let error = chat(body).expect_err(body);
        assert!(!format!("{error} {error:?} {}", error.reason()).contains("SECRET"), "{error:?}");
    }
}
