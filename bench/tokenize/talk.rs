//! What is measured: the turns of a conversation, and a body's way to its block hashes.

use kvspoa::hash::HashKey;
use kvspoa::prompt::{Model, Prompt};
use kvspoa::request::Endpoint;
use serde_json::{Value, json};
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const BLOCK_TOKENS: u32 = 16;
pub const ENDPOINT: Endpoint = Endpoint::ChatCompletions;

/// Never reached, but looked at as in the agent.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// A body's way to its block hashes, as [`kvspoa::route`] goes it.
pub fn path(model: &Model, key: &HashKey, body: &[u8]) -> usize {
    let until = Instant::now() + DEADLINE;
    let name = model.repeats().key(ENDPOINT, body);
    let known = name.and_then(|name| model.repeats().get(name));
    let prompt = known.unwrap_or_else(|| {
        let ask = model.read(ENDPOINT, body).expect("a body");
        let tokens = model.tokens(&ask, &|| Instant::now() >= until).expect("tokens");
        let prompt = Prompt {
            tokens,
            head: ask.prompt.head(),
            media: ask.media,
            limits: ask.limits,
            identity_is_known: true,
            takes_tokens: false,
            model: ask.model,
            cache_salt: ask.cache_salt,
        };
        let prompt = Arc::new(prompt);
        if let Some(name) = name {
            model.repeats().keep(name, &prompt);
        }
        prompt
    });
    black_box(prompt.tokens.ids.sequence(key, key.plain_root(), &prompt.media, BLOCK_TOKENS));
    prompt.tokens.ids.len()
}

/// Messages that no other session has.
pub fn conversation(text: &str, session: &str, bytes: usize, turn_bytes: usize, mut at: usize) -> Vec<Value> {
    let mut messages = vec![json!({ "role": "system", "content": format!("This is session {session}.") })];
    let mut written = 0;
    while written < bytes {
        for (role, length) in [("user", turn_bytes / 3), ("assistant", turn_bytes * 2 / 3)] {
            let content = slice(text, at % (text.len() - 4000), length);
            messages.push(json!({ "role": role, "content": format!("{session}, {at}: {content}") }));
            at += length;
            written += length;
        }
    }
    messages.push(json!({ "role": "user", "content": format!("{session}: go on, please.") }));
    messages
}

fn slice(text: &str, from: usize, length: usize) -> &str {
    let boundary = |at: usize| (at..at + 4).find(|at| text.is_char_boundary(*at)).expect("a character");
    &text[boundary(from)..boundary(from + length)]
}
