use super::*;
use crate::request::body::{Endpoint, PromptInput, parse};

pub(super) fn conversation(body: &str) -> Conversation {
    match parse(Endpoint::ChatCompletions, body.as_bytes()).expect("a body").prompt {
        PromptInput::Chat(conversation) => conversation,
        other => panic!("{other:?} is no conversation"),
    }
}

pub(super) fn templates(source: &str) -> Templates {
    let sources = Sources {
        default: Some(source.to_owned()),
        tool_use: None,
        special_tokens: vec![("bos_token".into(), "<s>".into())],
    };
    Templates::compile(sources, ModelOptions::default(), 1 << 20).expect("a template")
}

fn text(templates: &Templates, body: &str) -> Result<String, PromptError> {
    templates.render(&conversation(body)).map(Rendered::into_text)
}

fn render_body(source: &str, body: &str) -> Result<String, PromptError> {
    text(&templates(source), body)
}

/// Renders `source` for one user message `x` with more fields of the body.
fn render(source: &str, fields: &str) -> Result<String, PromptError> {
    render_body(source, &format!(r#"{{"messages": [{{"role": "user", "content": "x"}}]{fields}}}"#))
}

fn rendered(source: &str) -> String {
    render(source, "").expect("text")
}

const ALL: &str = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}";

#[test]
fn values_print_as_in_python() {
    assert_eq!(
        rendered("{{ [true, none, 1.0, 'a', (1,)] }}{{ nothing }}{{ {'a': 1e-7} | string }}"),
        "[True, None, 1.0, 'a', (1,)]{'a': 1e-07}"
    );
    assert_eq!(rendered("{{ ['a', 1, none] | join('|') }}"), "a|1|None");
}

#[test]
fn blocks_are_trimmed_and_one_final_newline_dropped() {
    assert_eq!(rendered("  {% if true %}\n  a\n  {% endif %}\nb\n"), "  a\nb");
}

#[test]
fn tojson_is_pythons() {
    let source = r#"{{ {"b": "<é'>", "a": [1, 2.50]} | tojson }} {{ [1] | tojson(indent=2) }} {{ {"b": 1, "a": 2} | tojson(sort_keys=true, separators=(",", ":")) }}"#;
    assert_eq!(rendered(source), "{\"b\": \"<é'>\", \"a\": [1, 2.5]} [\n  1\n] {\"a\":2,\"b\":1}");
}

#[test]
fn pythons_syntax_and_methods_work() {
    for (source, text) in [
        ("{{ 'abc'[::-1] }}{{ [1, 2, 3][-1] }}{{ 7 // 2 }}", "cba33"),
        (
            "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "013",
        ),
        (
            "{% set ns = namespace(n=1) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
            "4",
        ),
        ("{{ 'a b'.split(' ')[-1].upper() }}{{ ' x\u{1c}'.strip() }}{{ 'xy'.removeprefix('x') }}", "Bxy"),
        ("{% for k, v in {'items': 1}.items() %}{{ k }}={{ v }}{% endfor %}", "items=1"),
        (
            "{{ 'x' is iterable }}{{ {} is iterable }}{{ none is iterable }}{{ 'x' is sequence }}",
            "TrueTrueFalseTrue",
        ),
        ("{{ 'a\n\nb\n' | indent(2, first=true) }}|", "  a\n\n  b\n|"),
        ("{% generation %}a{% endgeneration %}{%- generation -%} b {%- endgeneration %}", "ab"),
        ("{% macro f(a, b=2) %}{{ a }}{{ b }}{% endmacro %}{{ f(1) }}{{ f(1, b=3) }}", "1213"),
        ("{{ bos_token }}{{ eos_token is defined }}", "<s>False"),
    ] {
        assert_eq!(rendered(source), text, "{source}");
    }
}

#[test]
fn a_method_of_a_dictionary_hides_the_field_of_its_name() {
    let source = "{{ s['items'].type }}|{{ s.items.type is defined }}|{{ s.items is mapping }}|{{ s.get('items').type }}|{{ s }}";
    let fields = r#", "chat_template_kwargs": {"s": {"items": {"type": "x"}}}"#;
    assert_eq!(render(source, fields).as_deref(), Ok("x|False|False|x|{'items': {'type': 'x'}}"));
}

#[test]
fn indent_ends_lines_where_python_does() {
    assert_eq!(
        rendered("{{ 'a\u{85}b' | indent(1) }}|{{ 'a\n\nb' | indent(1, blank=true) }}|"),
        "a\n b|a\n \n b|"
    );
}

#[test]
fn what_is_added_to_a_text_that_is_marked_as_safe_is_escaped() {
    assert_eq!(
        rendered("{% set a = '<&\"\\'>' %}{{ '<' + a + '<' | safe + a + 'x' }}{{ a }}{{ a + a }}"),
        "&lt;&lt;&amp;&#34;&#39;&gt;<&lt;&amp;&#34;&#39;&gt;x<&\"'><&\"'><&\"'>"
    );
    let number = render("{{ 'a' | safe + 1 }}", "");
    assert!(matches!(number, Err(PromptError::TemplateFailed { .. })), "{number:?}");
}

#[test]
fn adding_to_safe_text_elsewhere_is_refused_once_a_text_is_marked() {
    let source = "{% if documents %}{% set a = 'a' | safe %}{{ a + '<' }}{% endif %}";
    assert_eq!(render(source, "").as_deref(), Ok(""));
    assert_eq!(render(source, r#", "documents": [{"text": "t"}]"#), Err(PromptError::UnlikePython));
}

#[test]
fn what_is_concatenated_is_written_as_by_python() {
    let fields = r#", "chat_template_kwargs": {"f": 1e-7, "g": [1e16, "\u200b", null]}"#;
    assert_eq!(
        render("{{ 'x' ~ f ~ g ~ none ~ h }}", fields).as_deref(),
        Ok("x1e-07[1e+16, '\\u200b', None]None")
    );
    assert_eq!(render("{% set a = ('<' | safe) ~ f %}{{ a + '<' }}", fields).as_deref(), Ok("<1e-07<"));
}

#[test]
fn a_float_that_would_print_otherwise_is_refused() {
    let fields = r#", "chat_template_kwargs": {"f": 1e-7, "g": 0.5}"#;
    assert_eq!(render("{{ 'x' ~ 1 * f }}", fields), Err(PromptError::UnlikePython));
    assert_eq!(render("{{ 'x' ~ 1 * g }}{{ f }}", fields).as_deref(), Ok("x0.51e-07"));
}

#[test]
fn tools_and_documents_are_none_when_absent() {
    assert_eq!(
        rendered("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}"),
        "TrueTrueTrue"
    );
}

#[test]
fn a_refusing_template_is_told_apart_from_a_failing_one() {
    assert_eq!(render("{{ raise_exception('x') }}", ""), Err(PromptError::TemplateRefused));
    assert_eq!(
        render("{% macro f() %}{{ raise_exception('x') }}{% endmacro %}{{ f() }}", ""),
        Err(PromptError::TemplateRefused)
    );
    let failed = render("\n{{ 'x' | nonsense }}", "").expect_err("no such filter");
    assert_eq!(failed, PromptError::TemplateFailed { kind: ErrorKind::UnknownFilter, line: 2 });
    assert!(render("{{ nothing.deeper.still }}", "").is_err());
}

#[test]
fn a_template_is_stopped_at_its_limits() {
    let endless = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}";
    assert_eq!(render(endless, ""), Err(PromptError::TooLarge));
    let options = ModelOptions { max_rendered_bytes: 100, ..ModelOptions::default() };
    let sources =
        Sources { default: Some("{% for a in range(99) %}xx{% endfor %}".into()), ..Sources::default() };
    let small = Templates::compile(sources, options, 1 << 20).expect("a template");
    assert_eq!(text(&small, r#"{"messages": [{"role": "user"}]}"#), Err(PromptError::TooLarge));
    let recursive = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}";
    assert!(render(recursive, "").is_err());
}

#[test]
fn a_template_that_writes_is_stopped_when_the_time_is_up() {
    let looks = std::cell::Cell::new(0);
    let late = |source: &str, messages: usize| {
        let turn = r#"{"role": "user", "content": "Hi"}"#;
        let body = format!(r#"{{"messages": [{}]}}"#, vec![turn; messages].join(", "));
        looks.set(0);
        let time_is_up = || looks.replace(looks.get() + 1) > 1;
        templates(source)
            .render_until(&conversation(&body), &time_is_up)
            .map(|rendered| rendered.text_bytes())
    };
    assert_eq!(late(ALL, 1000), Err(PromptError::Late));
    assert_eq!(looks.get(), 3, "and does nothing more");
    assert_eq!(late("{{ messages | tojson }}", 1000), Ok(35_000));
    // Nobody looks at the time for a short conversation.
    assert_eq!((late(ALL, 10), looks.get()), (Ok(100), 0));
}

/// Renders `source` for a message of `bytes` bytes.
fn render_long(source: &str, bytes: usize) -> Result<String, PromptError> {
    render_body(
        source,
        &format!(r#"{{"messages": [{{"role": "user", "content": "{}"}}]}}"#, "y".repeat(bytes)),
    )
}

#[test]
fn what_methods_read_and_what_values_are_written_as_is_paid_for() {
    for expression in [
        "text.strip('xyz')",
        "text.find('x')",
        "text.isspace()",
        "text | trim",
        "[text] | tojson",
        "[text] | string",
    ] {
        let often = |times: usize| {
            format!(
                "{{% set text = messages[0].content %}}{{% for a in range({times}) %}}{{% if {expression} %}}{{% endif %}}{{% endfor %}}"
            )
        };
        assert_eq!(render_long(&often(20), 1 << 20).as_deref(), Ok(""), "{expression}");
        assert_eq!(render_long(&often(200), 1 << 20), Err(PromptError::TooLarge), "{expression}");
    }
}

#[test]
fn no_text_that_a_template_builds_is_longer_than_any_that_it_may_write() {
    for expression in [
        "many | join",
        "''.join(many)",
        "([1] * 99) | join(text)",
        "many | tojson",
        "many | tojson(separators=(text, ':'))",
        "many | string",
        "('a\n' * 99) | indent(text)",
        "'{:>TIMES0000}'.format('x')",
    ] {
        let source = |times: usize| {
            let expression = expression.replace("TIMES0", &times.to_string());
            let many = vec!["text"; times].join(", ");
            format!(
                "{{% set text = messages[0].content %}}{{% set many = [{many}] %}}{{% if {expression} %}}{{% endif %}}"
            )
        };
        assert_eq!(render_long(&source(2), 1 << 10).as_deref(), Ok(""), "{expression}");
        assert_eq!(render_long(&source(99), 1 << 20), Err(PromptError::TooLarge), "{expression}");
    }
}

#[test]
fn strip_takes_any_number_of_characters() {
    let source = "{{ 'zyxay'.strip('xyz0123456789') }}{{ messages[0].content.strip('0' * 1000000 ~ 'y') }}|";
    assert_eq!(render_long(source, 1 << 20).as_deref(), Ok("a|"));
}

#[test]
fn join_is_pythons() {
    assert_eq!(rendered("{{ ', '.join(['a', 'b']) }}{{ ''.join([]) }}"), "a, b");
    assert!(matches!(render("{{ ', '.join([1]) }}", ""), Err(PromptError::TemplateFailed { .. })));
}

#[test]
fn parts_are_joined_for_a_template_that_takes_text() {
    let body = r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": "b"}]}]}"#;
    assert_eq!(render_body(ALL, body).as_deref(), Ok("[user] a\nb\n"));
}

#[test]
fn text_is_wrapped_for_a_template_that_takes_parts() {
    let source =
        "{% for m in messages %}{% for p in m.content %}<{{ p.type }}:{{ p.text }}>{% endfor %}|{% endfor %}";
    let body = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": null}, {"role": "user", "content": [{"type": "input_text", "text": ""}]}]}"#;
    assert_eq!(render_body(source, body).as_deref(), Ok("<text:a>||<text:>|"));
    let tool = r#"{"messages": [{"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}"#;
    assert_eq!(
        render_body("{% for m in messages %}{% for p in m.content %}{{ p }}{% endfor %}{% endfor %}", tool)
            .as_deref(),
        Ok("a\nb")
    );
}

#[test]
fn developers_become_one_system_message_unless_the_template_knows_them() {
    let body = r#"{"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "u"}, {"role": "developer", "content": "D"}]}"#;
    assert_eq!(render_body(ALL, body).as_deref(), Ok("[system] S\n\nD\n[user] u\n"));
    let knows = format!("{ALL}{{# 'developer' #}}");
    assert_eq!(render_body(&knows, body).as_deref(), Ok("[system] S\n[user] u\n[developer] D\n"));
    let two = r#"{"messages": [{"role": "system", "content": "S"}, {"role": "system", "content": "T"}]}"#;
    assert_eq!(render_body(ALL, two).as_deref(), Ok("[system] S\n[system] T\n"));
}

#[test]
fn template_arguments_follow_vllms_precedence() {
    let source = "{{ add_generation_prompt }} {{ enable_thinking }} {{ reasoning_effort }}";
    let arguments = |fields: &str| render(source, fields).expect("text");
    assert_eq!(arguments(r#", "chat_template_kwargs": {"add_generation_prompt": false}"#), "True  ");
    assert_eq!(
        arguments(r#", "add_generation_prompt": false, "chat_template_kwargs": {"enable_thinking": "auto"}"#),
        "False  "
    );
    assert_eq!(arguments(r#", "reasoning_effort": "none""#), "True False none");
    assert_eq!(
        arguments(r#", "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": false}"#),
        "True False low"
    );
}

#[test]
fn the_engines_defaults_yield_to_the_clients_arguments() {
    let defaults = serde_json::json!({"a": 1, "b": 2});
    let options = ModelOptions {
        template_arguments: defaults.as_object().expect("an object").clone(),
        ..ModelOptions::default()
    };
    let sources = Sources { default: Some("{{ a }}{{ b }}".into()), ..Sources::default() };
    let templates = Templates::compile(sources, options, 1 << 20).expect("a template");
    let body = r#"{"messages": [{"role": "user"}], "chat_template_kwargs": {"a": 9, "b": null}}"#;
    assert_eq!(text(&templates, body).as_deref(), Ok("92"));
}

#[test]
fn tools_choose_the_template_that_is_made_for_them() {
    let sources =
        Sources { default: Some("plain".into()), tool_use: Some("tools".into()), ..Sources::default() };
    let templates = Templates::compile(sources, ModelOptions::default(), 1 << 20).expect("templates");
    let body = |tools: &str| format!(r#"{{"messages": [{{"role": "user"}}]{tools}}}"#);
    assert_eq!(text(&templates, &body("")).as_deref(), Ok("plain"));
    let tools = r#", "tools": [{"type": "function", "function": {"name": "f"}}]"#;
    assert_eq!(text(&templates, &body(tools)).as_deref(), Ok("tools"));
}

#[test]
fn the_final_message_is_left_open_to_be_continued() {
    let continued = |source: &str, last: &str| {
        let body = format!(
            r#"{{"messages": [{{"role": "assistant", "content": {last}}}], "add_generation_prompt": false, "continue_final_message": true}}"#
        );
        render_body(source, &body)
    };
    assert_eq!(continued("<{{ messages[0].content }}>", r#""half ""#).as_deref(), Ok("<half "));
    assert_eq!(continued("<{{ messages[0].content | trim }}>", r#""half ""#).as_deref(), Ok("<half"));
    assert_eq!(
        continued("<{{ messages[0].content[:1] }}>", r#""half""#),
        Err(PromptError::NothingToContinue)
    );
    let parts = "{% for m in messages %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}";
    let two = r#"[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]"#;
    assert_eq!(continued(parts, two).as_deref(), Ok("a;b"));
    assert_eq!(continued(parts, "[]"), Err(PromptError::NothingToContinue));
}
