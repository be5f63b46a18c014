//! `scripts/bench tokenize`: the way of a body to its block hashes, stage by stage, beside the library that vLLM uses.
//!
//! Cold: no message was seen before. Warm: all but the last two were, as in the next turn of a conversation. Repeat: the
//! whole body was. The texts are the repository's own, so they are code. One thread; of each round the median and, for
//! machines that do something else as well, the least.

use kvspoa::hash::HashKey;
use kvspoa::prompt::{Model, ModelOptions, Prompt};
use kvspoa::request::Endpoint;
use kvspoa::request::body::PromptInput;
use serde_json::{Value, json};
use std::fs;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

const BLOCK_TOKENS: u32 = 16;
const ENDPOINT: Endpoint = Endpoint::ChatCompletions;
const ROUNDS: usize = 15;
/// Tokens of a prompt, and bytes of text that make about so many.
const SIZES: [(usize, usize); 4] = [(2_000, 7_000), (8_000, 30_000), (32_000, 122_000), (128_000, 492_000)];
/// The length of a message.
const USER_BYTES: usize = 1_300;
const ASSISTANT_BYTES: usize = 2_600;

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
    let key = HashKey::from_seed(1);
    println!("whole path, one turn of a conversation; µs: median (least)\n");
    println!(
        "{:>7} {:>8}  {:>16} {:>16} {:>16}  {:>20} {:>6}",
        "tokens", "body", "cold", "warm", "repeat", "tokenizers", "ratio"
    );
    let mut stages = Vec::new();
    for size in SIZES {
        stages.push(measure(&model, &reference, &key, &text, size));
    }
    println!("\nstages of the warm path, µs: median (least)\n");
    println!(
        "{:>7}  {:>16} {:>16} {:>16} {:>16}",
        "tokens", "read the body", "render", "tokenize", "hash blocks"
    );
    for (tokens, stages) in stages {
        let [read, render, tokenize, hash] = stages.map(|times| times.to_string());
        println!("{tokens:>7}  {read:>16} {render:>16} {tokenize:>16} {hash:>16}");
    }
    trace(&dir, &text);
}

/// A body's way to its block hashes, as [`kvspoa::route`] goes it.
fn path(model: &Model, key: &HashKey, body: &[u8]) -> usize {
    let name = model.repeats().key(ENDPOINT, body);
    let known = name.and_then(|name| model.repeats().get(name));
    let prompt = known.unwrap_or_else(|| {
        let ask = model.read(ENDPOINT, body).expect("a body");
        let tokens = model.tokens(&ask, &|| false).expect("tokens");
        let prompt = Prompt {
            tokens,
            media: ask.media,
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
    black_box(key.sequence(key.plain_root(), &prompt.tokens.ids, BLOCK_TOKENS));
    prompt.tokens.ids.len()
}

fn measure(
    model: &Model,
    reference: &tokenizers::Tokenizer,
    key: &HashKey,
    text: &str,
    (size, bytes): (usize, usize),
) -> (usize, [Times; 4]) {
    let [mut cold, mut warm, mut repeat, mut library] = [const { Times::new() }; 4];
    let mut stages = [const { Times::new() }; 4];
    let (mut tokens, mut body_bytes) = (0, 0);
    for round in 0..ROUNDS {
        let turn = |session: &str, rounds: usize| {
            let session = format!("{session} {round} of {size}");
            let turns = conversation(text, &session, bytes, round * 7919);
            json!({ "model": "m", "messages": turns[..turns.len() - 2 * rounds], "stream": true })
                .to_string()
                .into_bytes()
        };
        let (before, body) = (turn("a", 1), turn("a", 0));
        body_bytes = body.len();
        path(model, key, &before);
        tokens = warm.of(|| path(model, key, &body));
        repeat.of(|| path(model, key, &body));
        let body = turn("b", 0);
        cold.of(|| path(model, key, &body));

        let (before, body) = (turn("c", 1), turn("c", 0));
        path(model, key, &before);
        let [read, render, tokenize, hash] = &mut stages;
        let ask = read.of(|| model.read(ENDPOINT, &body).expect("a body"));
        let PromptInput::Chat(chat) = ask.prompt else { unreachable!("the endpoint's shape") };
        let rendered = render.of(|| model.render(&chat).expect("a text"));
        let ids = tokenize.of(|| model.tokenize_text(&rendered).expect("ids"));
        hash.of(|| black_box(key.sequence(key.plain_root(), &ids, BLOCK_TOKENS)));
        if round < 3 {
            let theirs = library.of(|| reference.encode_fast(rendered.as_str(), false).expect("ids"));
            assert!(theirs.get_ids().iter().copied().eq(ids.iter().map(|id| id.0)), "other ids");
        }
    }
    println!(
        "{tokens:>7} {:>5} kB  {:>16} {:>16} {:>16}  {:>20} {:>5.0}x",
        body_bytes / 1000,
        cold.to_string(),
        warm.to_string(),
        repeat.to_string(),
        library.to_string(),
        library.least().as_secs_f64() / warm.least().as_secs_f64(),
    );
    (tokens, stages)
}

/// Many conversations, a turn of each in turns: how fast text becomes ids, all misses counted.
fn trace(dir: &Path, text: &str) {
    const SESSIONS: usize = 200;
    const TURNS: usize = 10;
    let options = ModelOptions { cache_bytes: 256 << 20, ..ModelOptions::default() };
    let model = Model::load_with(dir, options).expect("the model");
    let mut prompts = Vec::new();
    for turn in 1..=TURNS {
        for session in 0..SESSIONS {
            let name = format!("trace {session}");
            let mut turns = conversation(text, &name, TURNS * 5_700, session * 4099);
            turns.truncate(1 + 2 * turn);
            let body = json!({ "messages": turns }).to_string().into_bytes();
            let ask = model.read(ENDPOINT, &body).expect("a body");
            let PromptInput::Chat(chat) = ask.prompt else { unreachable!("the endpoint's shape") };
            prompts.push(model.render(&chat).expect("a text"));
        }
    }
    let start = on_cpu();
    let mut tokens = 0;
    for prompt in &prompts {
        tokens += black_box(model.tokenize_text(prompt).expect("ids")).len();
    }
    let total = on_cpu() - start;
    let stats = model.cache_stats().expect("a cache");
    println!(
        "\ntokenizing alone, {SESSIONS} conversations of {TURNS} turns, from empty: {:.0} M tokens/s; {} pieces, {:.0} % known",
        tokens as f64 / total.as_secs_f64() / 1e6,
        stats.hits + stats.misses,
        100.0 * stats.hits as f64 / (stats.hits + stats.misses) as f64,
    );
}

/// Messages that no other session has.
fn conversation(text: &str, session: &str, bytes: usize, mut at: usize) -> Vec<Value> {
    let mut messages = vec![json!({ "role": "system", "content": format!("This is session {session}.") })];
    let mut written = 0;
    while written < bytes {
        for (role, length) in [("user", USER_BYTES), ("assistant", ASSISTANT_BYTES)] {
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

/// What one thing took, time after time.
struct Times(Vec<Duration>);

impl Times {
    const fn new() -> Self {
        Self(Vec::new())
    }

    fn of<T>(&mut self, call: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let value = call();
        self.0.push(start.elapsed());
        value
    }

    fn median(&self) -> Duration {
        let mut times = self.0.clone();
        times.sort_unstable();
        times[times.len() / 2]
    }

    fn least(&self) -> Duration {
        self.0.iter().copied().min().expect("a measurement")
    }
}

impl std::fmt::Display for Times {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        write!(f, "{:.1} ({:.1})", micros(self.median()), micros(self.least()))
    }
}

/// How long this thread was on a processor; good to some milliseconds.
fn on_cpu() -> Duration {
    let stat = fs::read_to_string("/proc/thread-self/schedstat").expect("Linux");
    Duration::from_nanos(stat.split(' ').next().and_then(|nanos| nanos.parse().ok()).expect("a number"))
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
