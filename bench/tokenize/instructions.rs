//! What `scripts/instructions` counts of prompts: each function of `counted` runs under callgrind, which counts the
//! instructions within it. Prints over how many units of work each count is to be spread.
//!
//! A body of some 2,000 tokens of which all messages but the last two were seen before, as in the next turn of a
//! conversation: its whole way to its block hashes, and stage by stage. With the name of a model's directory as argument,
//! by its tokenizer and template.

#[path = "talk.rs"]
mod talk;

use kvspoa::hash::HashKey;
use kvspoa::prompt::{Model, ModelOptions, TokenIds};
use kvspoa::request::body::Ask;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::Instant;
use talk::{BLOCK_TOKENS, DEADLINE, ENDPOINT, conversation, path};

const BODIES: usize = 20;

mod counted {
    use super::*;
    use std::hint::black_box;

    #[inline(never)]
    pub(super) fn warm_2k(model: &Model, key: &HashKey, body: &[u8]) {
        black_box(path(model, key, body));
    }

    #[inline(never)]
    pub(super) fn read(model: &Model, body: &[u8]) -> Ask {
        model.read(ENDPOINT, black_box(body)).expect("a body")
    }

    #[inline(never)]
    pub(super) fn tokens(model: &Model, ask: &Ask) -> TokenIds {
        let started = Instant::now();
        model.tokens(black_box(ask), &|| Instant::now() >= started + DEADLINE).expect("tokens").ids
    }

    #[inline(never)]
    pub(super) fn sequence(key: &HashKey, ids: &TokenIds) {
        black_box(black_box(ids).sequence(key, key.plain_root(), &[], BLOCK_TOKENS));
    }
}

fn main() {
    let model = match std::env::args_os().nth(1) {
        Some(dir) => Model::load(Path::new(&dir)).expect("the model"),
        None => {
            let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/templates");
            let template = Some(root.join("known/thinking.jinja"));
            Model::embedded_with(ModelOptions { template, ..ModelOptions::default() }).expect("the model")
        }
    };
    let key = HashKey::from_seed(1);
    let text = text();
    let bodies = |session: &str| {
        let turns = conversation(&text, session, 6_900, 1_200, session.len() * 7919);
        [2, 0].map(|less| {
            json!({ "model": "m", "messages": turns[..turns.len() - less], "stream": true })
                .to_string()
                .into_bytes()
        })
    };
    for number in 0..BODIES {
        let [before, body] = bodies(&format!("whole {number}"));
        path(&model, &key, &before);
        counted::warm_2k(&model, &key, &body);

        let [before, body] = bodies(&format!("stages {number}"));
        path(&model, &key, &before);
        let ask = counted::read(&model, &body);
        let ids = counted::tokens(&model, &ask);
        counted::sequence(&key, &ids);
    }
    for name in ["warm_2k", "read", "tokens", "sequence"] {
        println!("{name} {BODIES} body");
    }
}

/// Some text with the marks and line ends of a program.
fn text() -> String {
    const WORDS: [&str; 24] = [
        "let",
        "value",
        "=",
        "self",
        ".",
        "items",
        "(",
        ")",
        ";\n    ",
        "for each of",
        "them",
        "{",
        "}\n",
        "\"text\"",
        ",",
        "return",
        "Some",
        "// what",
        "if",
        "it is",
        "0",
        "1024",
        "match",
        "=>",
    ];
    let mut random = fastrand::Rng::with_seed(5);
    let mut text = String::new();
    while text.len() < 200_000 {
        text.push_str(random.choice(WORDS).unwrap_or_default());
        text.push(' ');
    }
    text
}
