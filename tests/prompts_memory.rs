//! What is kept of earlier requests takes no more memory than it may, as the system counts it. Alone in its process.
#![cfg(target_os = "linux")]
#![allow(missing_docs, reason = "a test")]

use kvspoa::prompt::{Model, ModelOptions};
use kvspoa::request::{Endpoint, SeenMessages, body};

const CAPACITY_BYTES: usize = 8 << 20;

/// The process's memory, in bytes.
fn resident_bytes() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("the kernel's figures");
    let pages: usize = pages.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("a number");
    pages * 4096
}

/// A message of each kind that takes much more memory than its text: parts with fields that go, objects of one field, calls.
fn messages(number: usize) -> [String; 6] {
    let text = |more: &str| format!(r#"{{"type": "text", "text": "{number}"{more}}}"#);
    let gone: String = ["refusal", "thinking", "name", "data", "file", "detail"]
        .map(|name| format!(r#", "{name}": 0"#))
        .concat();
    let nested = format!("{}{number}{}", r#"{"a":"#.repeat(100), "}".repeat(100));
    let call = r#"{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}"#;
    [
        format!(r#"{{"role": "user", "content": "{number}"}}"#),
        format!(r#"{{"role": "user", "content": [{}]}}"#, vec![text(""); 20].join(", ")),
        format!(r#"{{"role": "user", "content": [{}]}}"#, vec![text(&gone); 20].join(", ")),
        format!(r#"{{"role": "user", "content": [{}]}}"#, vec![text(r#", "more": 1"#); 20].join(", ")),
        format!(r#"{{"role": "tool", "content": "{number}", "tool_call_id": {nested}}}"#),
        format!(
            r#"{{"role": "assistant", "content": "{number}", "tool_calls": [{}]}}"#,
            [call; 10].join(", ")
        ),
    ]
}

/// Does `one` again and again, until what is kept was pushed out often; it says how much that is.
fn fill(name: &str, mut one: impl FnMut(usize) -> usize) {
    let before = resident_bytes();
    let (mut number, mut kept_bytes, mut pushed_out) = (0, 0, 0);
    while pushed_out < 20 {
        let bytes = one(number);
        assert!(bytes <= CAPACITY_BYTES, "{name}: {bytes}");
        pushed_out += usize::from(bytes < kept_bytes);
        (number, kept_bytes) = (number + 1, bytes);
    }
    let taken = resident_bytes().saturating_sub(before);
    println!("{name}: {number} bodies, {} KiB", taken >> 10);
    assert!(taken < 2 * CAPACITY_BYTES, "{name}: {} KiB", taken >> 10);
}

#[test]
fn what_is_kept_takes_the_memory_that_is_counted() {
    let options = ModelOptions { cache_bytes: CAPACITY_BYTES, ..ModelOptions::default() };
    let model = Model::embedded_with(options).expect("the embedded model");
    fill("a model", |number| {
        let talk: Vec<String> = (0..40).map(|at| messages(40 * (number / 4) + at)[0].clone()).collect();
        let long = "so and so ".repeat(number * 7 % 300);
        let body =
            format!(r#"{{"messages": [{}, {{"role": "user", "content": "{long}"}}]}}"#, talk.join(", "));
        let ask = model.read(Endpoint::ChatCompletions, body.as_bytes()).expect("a body");
        model.tokens(&ask, &|| false).expect("tokens");
        model.cache_bytes()
    });
    fill("tools", |number| {
        let tool = |at: usize| {
            let field = r#"{"type": "string", "enum": ["a", "b"]}"#;
            let fields = format!(r#"{{"x": {field}, "y": {field}, "z": {{"items": {field}}}}}"#);
            let parameters = format!(r#"{{"type": "object", "properties": {fields}, "required": ["x"]}}"#);
            let function =
                format!(r#"{{"name": "f{at}", "description": "{number}", "parameters": {parameters}}}"#);
            format!(r#"{{"type": "function", "function": {function}}}"#)
        };
        let tools: Vec<String> = (0..10).map(tool).collect();
        let said = r#"[{"role": "user", "content": "a"}]"#;
        let body = format!(r#"{{"tools": [{}], "messages": {said}}}"#, tools.join(", "));
        let ask = model.read(Endpoint::ChatCompletions, body.as_bytes()).expect("a body");
        model.tokens(&ask, &|| false).expect("tokens");
        model.cache_bytes()
    });
    for kind in 0..messages(0).len() {
        let seen = SeenMessages::new(CAPACITY_BYTES);
        fill(&format!("messages of kind {kind}"), |number| {
            let body = format!(r#"{{"messages": [{}]}}"#, messages(number)[kind]);
            body::parse_seen(Endpoint::ChatCompletions, body.as_bytes(), &seen).expect("a body");
            seen.stats().bytes
        });
    }
}
