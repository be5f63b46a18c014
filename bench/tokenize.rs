//! `scripts/bench tokenize`: the way of a body to its block hashes, beside the library that vLLM uses.
//!
//! Cold: no message was seen before. Warm: all but the last two were, as in the next turn of a conversation. The texts are
//! the repository's own. Wall times of one thread; the medians of some rounds.

use kvspoa::hash::HashKey;
use kvspoa::prompt::Model;
use kvspoa::request::body::{Endpoint, PromptInput, parse};
use serde_json::{Value, json};
use std::fs;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const BLOCK_TOKENS: u32 = 16;
const ROUNDS: usize = 9;
const SIZES: [usize; 4] = [2_000, 8_000, 32_000, 128_000];

fn main() {
    // `cargo test --all-targets` runs this too: unoptimised figures would mean nothing.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let Some(dir) = tokenizer_dir() else {
        println!("run scripts/fetch-tokenizers first");
        return;
    };
    let model = Model::load(&dir).expect("the model");
    let reference = tokenizers::Tokenizer::from_file(dir.join("tokenizer.json")).expect("a tokenizer");
    let text = corpus(Path::new(env!("CARGO_MANIFEST_DIR")));
    println!(
        "{:>8} {:>8} {:>9} {:>9} {:>9} {:>9} {:>12} {:>7}",
        "tokens", "body kB", "parse", "render", "cold", "warm", "tokenizers", "ratio"
    );
    for size in SIZES {
        measure(&model, &reference, &text, size);
    }
}

fn measure(model: &Model, reference: &tokenizers::Tokenizer, text: &str, tokens: usize) {
    let key = HashKey::from_seed(1);
    let path = |body: &[u8]| {
        let ask = parse(Endpoint::ChatCompletions, body).expect("a body");
        let tokens = model.tokens(&ask, &|| false).expect("tokens");
        black_box(key.sequence(key.plain_root(), &tokens.ids, BLOCK_TOKENS));
        tokens.ids.len()
    };
    let [mut parsing, mut rendering, mut cold, mut warm, mut library] = [const { Vec::new() }; 5];
    let (mut count, mut bytes) = (0, 0);
    for round in 0..ROUNDS {
        let messages = conversation(text, tokens, round);
        let body =
            |messages: &[Value]| json!({ "model": "m", "messages": messages }).to_string().into_bytes();
        let whole = body(&messages);
        time(&mut cold, || path(&body(&messages[..messages.len() - 2])));
        // Now only the last two messages are new.
        count = time(&mut warm, || path(&whole));
        bytes = whole.len();
        let ask = time(&mut parsing, || parse(Endpoint::ChatCompletions, &whole).expect("a body"));
        let PromptInput::Chat(chat) = ask.prompt else { unreachable!("the endpoint's shape") };
        let rendered = time(&mut rendering, || model.render(&chat).expect("a text"));
        if round < 3 {
            time(&mut library, || black_box(reference.encode_fast(rendered.as_str(), false).expect("ids")));
        }
    }
    let [parsing, rendering, cold, warm, library] = [parsing, rendering, cold, warm, library].map(median);
    println!(
        "{count:>8} {:>8} {parsing:>9.1?} {rendering:>9.1?} {cold:>9.1?} {warm:>9.1?} {library:>12.1?} {:>6.0}x",
        bytes / 1000,
        library.as_secs_f64() / warm.as_secs_f64(),
    );
}

/// Messages that no other round has, of about so many tokens.
fn conversation(text: &str, tokens: usize, round: usize) -> Vec<Value> {
    let mut messages = vec![json!({ "role": "system", "content": format!("Session {round} of {tokens}.") })];
    let (mut at, mut bytes) = (round * 7919, 0);
    // Code and English have some 3.4 bytes a token.
    while bytes < tokens * 34 / 10 {
        for (role, length) in [("user", 1900), ("assistant", 3800)] {
            let start =
                (0..4).map(|back| at % (text.len() - 4000) + back).find(|at| text.is_char_boundary(*at));
            let start = start.expect("a character has at most four bytes");
            let end = (start + length..start + length + 4).find(|end| text.is_char_boundary(*end));
            let content = &text[start..end.expect("a character")];
            messages.push(json!({ "role": role, "content": format!("{tokens}.{round}.{at} {content}") }));
            at += length;
            bytes += length;
        }
    }
    messages.push(json!({ "role": "user", "content": format!("{round} Go on, please.") }));
    messages
}

fn time<T>(times: &mut Vec<Duration>, call: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let value = call();
    times.push(start.elapsed());
    value
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn tokenizer_dir() -> Option<PathBuf> {
    let cache = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/kvspoa/tokenizers"));
    let dir = std::env::var_os("KVSPOA_TOKENIZERS").map(PathBuf::from).or_else(cache)?.join("qwen3");
    dir.join("tokenizer.json").exists().then_some(dir)
}

/// All sources of the repository, one after the other.
fn corpus(root: &Path) -> String {
    let mut text = String::new();
    let mut folders = vec![root.join("src"), root.join("tests")];
    while let Some(folder) = folders.pop() {
        let mut entries: Vec<_> =
            fs::read_dir(folder).expect("a folder").flatten().map(|e| e.path()).collect();
        entries.sort();
        for path in entries {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                text.push_str(&fs::read_to_string(path).expect("a source"));
            }
        }
    }
    text
}
