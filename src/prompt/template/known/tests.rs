use super::*;
use crate::prompt::error::PromptError;
use crate::prompt::options::ModelOptions;
use crate::prompt::template::environment::syntax;
use crate::prompt::template::tests::templates;
use crate::prompt::template::{Rendered, Sources, Templates};
use crate::recent::CacheStats;
use crate::request::SeenMessages;
use crate::request::body::{Endpoint, PromptInput, parse_seen};
use crate::request::conversation::Conversation;
use minijinja::machinery::parse;

/// The source as it is changed, if it is, and how many of its loops leave out what is known.
fn prepared(source: &str) -> (Option<String>, usize) {
    let parsed = parse(source, "test", syntax().expect("syntax")).expect("a template");
    let mut sites = Sites::default();
    let changed = sites.prepare(source, &parsed, true);
    (changed, sites.0.len())
}

fn conversation(body: &str, seen: &SeenMessages) -> Conversation {
    match parse_seen(Endpoint::ChatCompletions, body.as_bytes(), seen).expect("a body").prompt {
        PromptInput::Chat(conversation) => conversation,
        other => panic!("{other:?} is no conversation"),
    }
}

fn body(contents: &[&str], fields: &str) -> String {
    let message = |content: &&str| format!(r#"{{"role": "user", "content": "{content}"}}"#);
    format!(r#"{{"messages": [{}]{fields}}}"#, contents.iter().map(message).collect::<Vec<_>>().join(", "))
}

/// The texts of some bodies, one after the other, and how many texts of messages were known.
fn texts(source: &str, bodies: &[String]) -> (Vec<String>, u64) {
    let (templates, seen) = (templates(source), SeenMessages::new(1 << 20));
    let text = |body: &String| templates.render(&conversation(body, &seen)).expect("a text").into_text();
    (bodies.iter().map(text).collect(), templates.known_stats().hits)
}

#[test]
fn a_loop_goes_over_what_is_not_known_and_its_tags_keep_their_marks() {
    let (changed, sites) = prepared(
        "{%- for m in messages[1:] -%} {{ m.content }}{{ loop.index if x }}{% for c in m.b %}{{ loop.last }}{% endfor %}\n{%+ endfor -%}",
    );
    assert_eq!(
        changed.as_deref(),
        Some(concat!(
            "{%- for m, kvspoa_step0 in kvspoa_steps(0, messages[1:]) %}{% filter kvspoa_keep(kvspoa_step0) -%} ",
            "{{ m.content }}{{ kvspoa_step0.index if x }}{% for c in m.b %}{{ loop.last }}{% endfor %}\n",
            "{%+ endfilter %}{% endfor -%}"
        ))
    );
    assert_eq!(sites, 1);
}

#[test]
fn a_loop_that_does_more_than_to_write_is_left_alone() {
    for source in [
        "{% for m in tools %}{{ m.content }}{% endfor %}",
        "{% for m in messages if m.role %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% else %}none{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}",
        "{% for m in messages %}{{ strftime_now('%Y') }}{% endfor %}",
        "{% for m in messages %}{{ loop.cycle('a', 'b') }}{% endfor %}",
        "{% for m in messages %}{{ loop.changed(m.role) }}{% endfor %}",
        "{% for m in messages %}{{ m.content | safe }}{% endfor %}",
        "{% for m in messages %}{{ messages | tojson }}{% endfor %}",
        "{% for m in messages %}{{ messages[0] }}{% endfor %}",
        "{% for m in messages %}{{ loop.previtem }}{% endfor %}",
        "{% for m in messages %}{% macro f() %}{% endmacro %}{{ f() }}{% endfor %}",
        "{% for m in messages %}{{ f(m) }}{% endfor %}{% macro f(m) %}{{ m }}{% endmacro %}",
        "{% macro f() %}{{ x }}{% endmacro %}{% for x in y %}{% endfor %}{% for m in messages %}{{ f() }}{% endfor %}",
        "{% for m in messages %}{% do m.append(1) %}{{ m }}{% endfor %}",
        "{% for m in messages %}{% set ns = other %}{% set ns.x = 1 %}{{ m }}{% endfor %}",
        "{% for m in messages %}{% set ns.x = 1 %}{{ ns }}{% endfor %}",
        "{% for m in messages %}{% set ns.x = m.role %}{% endfor %}",
        "{% for a in b %}{% for m in messages %}{{ m.content }}{% endfor %}{% endfor %}",
        "{% raw %}{% for m in messages %}{% endfor %}{% endraw %}",
    ] {
        assert_eq!(prepared(source), (None, 0), "{source}");
    }
}

#[test]
fn what_is_the_same_for_all_messages_is_worked_out_once() {
    let constants = |body: &str| {
        let source = format!("{{% for m in messages %}}{{{{ m.content }}}}{body}{{% endfor %}}");
        let parsed = parse(&source, "test", syntax().expect("syntax")).expect("a template");
        let mut sites = Sites::default();
        sites.prepare(&source, &parsed, true).expect("a loop that is changed");
        sites.0.iter().map(|site| site.constants.len()).sum::<usize>()
    };
    assert_eq!(constants("{{ x }}{{ m.role == 'user' }}{{ loop.index0 > 2 }}"), 0);
    assert_eq!(constants("{{ x.a }}{% if x.a > loop.index and messages[0].role == y %}.{% endif %}"), 2);
    assert_eq!(
        constants("{% if x.a > loop.index %}.{% endif %}{% set x.a = 1 %}"),
        0,
        "it is set on the way"
    );
}

#[test]
fn what_has_no_value_matters_only_where_it_is_asked_for() {
    let source =
        "{% for m in messages %}{% if m.role != 'user' and x.y.z %}!{% endif %}{{ m.content }}{% endfor %}";
    let (texts, known) = texts(source, &[body(&["a", "b"], ""), body(&["a", "b", "c"], "")]);
    assert_eq!((texts.join(" ").as_str(), known), ("ab abc", 2));
}

#[test]
fn what_is_known_is_left_out_and_the_last_message_is_written_anew() {
    let source = "{% for m in messages %}[{{ m.content }}]{% endfor %}";
    let bodies = [body(&["a", "b"], ""), body(&["a", "b", "c"], ""), body(&["b", "a", "b", "d"], "")];
    let (texts, known) = texts(source, &bodies);
    assert_eq!(texts, ["[a][b]", "[a][b][c]", "[b][a][b][d]"]);
    assert_eq!(known, 5);
}

#[test]
fn a_text_is_known_by_all_that_it_was_made_from() {
    let source = "{% set ns = namespace(last=messages | length - 2) %}{% for m in messages %}\
        {% if loop.index0 >= ns.last %}<{% endif %}{% if loop.nextitem %}{{ loop.nextitem.content }}{% endif %}\
        {{ m.content }}{{ x }};{% endfor %}";
    let bodies = [
        body(&["a", "b", "c"], ""),
        body(&["a", "b", "c", "d"], ""),
        body(&["a", "b", "c"], r#", "chat_template_kwargs": {"x": 1}"#),
        body(&["a", "b", "c"], r#", "chat_template_kwargs": {"x": 1.0}"#),
        body(&["a", "b", "c"], r#", "chat_template_kwargs": {"x": ["1"]}"#),
        body(&["a", "b", "c"], r#", "chat_template_kwargs": {"x": "1"}"#),
    ];
    let (texts, known) = texts(source, &bodies);
    assert_eq!(
        texts,
        [
            "ba;<cb;<c;",
            "ba;cb;<dc;<d;",
            "ba1;<cb1;<c1;",
            "ba1.0;<cb1.0;<c1.0;",
            "ba['1'];<cb['1'];<c['1'];",
            "ba1;<cb1;<c1;"
        ]
    );
    assert_eq!(known, 1);
}

#[test]
fn a_message_that_changes_a_namespace_is_written_every_time() {
    let source = "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.content == 'add' %}\
        {% set ns.n = ns.n + 1 %}{% endif %}{{ m.content }}{{ ns.n }};{% endfor %}";
    let bodies = [body(&["a", "add", "b", "c"], ""), body(&["a", "add", "b", "add", "b", "c"], "")];
    let (texts, known) = texts(source, &bodies);
    assert_eq!(texts, ["a0;add1;b1;c1;", "a0;add1;b1;add2;b2;c2;"]);
    assert_eq!(known, 2, "the first message and the third");
}

#[test]
fn macros_are_read_with_what_they_read() {
    let source = "{% set mark = '!' if x else '?' %}{% macro f(c) %}{{ c }}{{ mark }}{% endmacro %}\
        {% for m in messages %}{{ f(m.content) }}{% endfor %}";
    let with_x = r#", "chat_template_kwargs": {"x": true}"#;
    let bodies = [body(&["a", "b"], ""), body(&["a", "b"], with_x), body(&["a", "c"], with_x)];
    let (texts, known) = texts(source, &bodies);
    assert_eq!(texts, ["a?b?", "a!b!", "a!c!"]);
    assert_eq!(known, 1);
}

#[test]
fn a_text_that_is_marked_as_safe_is_another_one() {
    let source = "{% set x = '<' | safe if flag else '<' %}\
        {% for m in messages %}{{ 'a' | safe + x }}{{ m.content }};{% endfor %}";
    let with_flag = r#", "chat_template_kwargs": {"flag": true}"#;
    let bodies = [body(&["a", "b"], ""), body(&["a", "b"], with_flag), body(&["a", "c"], with_flag)];
    let (texts, known) = texts(source, &bodies);
    assert_eq!(texts, ["a&lt;a;a&lt;b;", "a<a;a<b;", "a<a;a<c;"]);
    assert_eq!(known, 1);
}

#[test]
fn a_function_that_an_argument_hides_is_called_as_before() {
    let source = "{% for m in messages %}{% for i in range(2) %}{{ m.content }}{% endfor %}{% endfor %}";
    let (templates, seen) = (templates(source), SeenMessages::new(1 << 20));
    let render = |fields: &str| {
        let conversation = conversation(&body(&["a", "b"], fields), &seen);
        templates.render(&conversation).ok().map(Rendered::into_text)
    };
    assert_eq!(render("").as_deref(), Some("aabb"));
    assert_eq!(render(r#", "chat_template_kwargs": {"range": 1}"#), None);
    assert_eq!(render("").as_deref(), Some("aabb"));
}

#[test]
fn a_message_to_be_continued_is_not_known_by_its_text() {
    let source = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let continued = r#", "add_generation_prompt": false, "continue_final_message": true"#;
    let bodies = [body(&["a", "b "], continued), body(&["a", "b ", "c"], ""), body(&["a", "b "], continued)];
    assert_eq!(texts(source, &bodies), (vec!["ab ".into(), "ab c".into(), "ab ".into()], 2));
}

#[test]
fn what_is_known_counts_towards_the_limit() {
    let sources = Sources {
        default: Some("{% for m in messages %}{{ m.content }}{% endfor %}".to_owned()),
        ..Sources::default()
    };
    let options = ModelOptions { max_rendered_bytes: 40, ..ModelOptions::default() };
    let templates = Templates::compile(sources, options, 1 << 20).expect("a template");
    let (ten, seen) = (["0123456789"; 5], SeenMessages::new(1 << 20));
    let render = |count: usize| {
        let conversation = conversation(&body(&ten[..count], ""), &seen);
        templates.render(&conversation).map(|rendered| rendered.text_bytes())
    };
    assert_eq!(render(4), Ok(40));
    assert_eq!(render(5), Err(PromptError::TooLarge));
    assert_eq!((render(4), templates.known_stats().hits > 3), (Ok(40), true));
}

#[test]
fn messages_that_nobody_else_has_are_not_kept() {
    let templates = templates("{% for m in messages %}{{ m.content }}{% endfor %}");
    let one = conversation(&body(&["a", "b"], ""), &SeenMessages::new(0));
    assert_eq!(templates.render(&one).expect("a text").into_text(), "ab");
    assert_eq!(templates.known_stats(), CacheStats::default());
}

#[test]
fn a_search_ends_with_what_it_found() {
    let search = |body: &str| format!("{{% for m in messages[::-1] -%}}{body}{{%- endfor %}}");
    let found = "{% set at = (messages|length - 1) - loop.index0 %}\
        {% if ns.looking and m.role == 'user' %}{% set ns.looking = false %}{% set ns.at = at %}{% endif %}";
    assert_eq!(
        prepared(&search(found)).0,
        Some(search(found).replacen("] -%}", "] %}{% if not ns.looking %}{% break %}{% endif -%}", 1))
    );
    for body in [
        "x{% if ns.looking and m.role == 'user' %}{% set ns.looking = false %}{% endif %}",
        "{% if ns.looking and m.role %}{% set ns.looking = false %}{% else %}{% set ns.n = 1 %}{% endif %}",
        "{% if m.role and ns.looking %}{% set ns.looking = false %}{% endif %}",
        "{% set at = m.place + 1 %}{% if ns.looking %}{% set ns.looking = false %}{% endif %}",
        "{% if ns.a and m.role %}{% set ns.a = false %}{% endif %}{% if ns.b %}{% set ns.c = 1 %}{% endif %}",
        "{% set ns.n = 1 %}{% if ns.looking %}{% set ns.looking = false %}{% endif %}",
        "{% if m.looking %}{% set ns.x = 1 %}{% endif %}",
    ] {
        assert_eq!(prepared(&search(body)), (None, 0), "{body}");
    }
}
