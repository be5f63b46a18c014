//! `scripts/bench tokenize`: the way of a body to its block hashes, stage by stage, beside the library that vLLM uses.
//!
//! Cold: no message was seen before. Warm: all but the last two were, as in the next turn of a conversation. Repeat: the
//! whole body was. The texts are the repository's own, so they are code. One thread; of each round the median and, for
//! machines that do something else as well, the least. Each has its rounds by itself, one request after the other: first
//! kvspoa, then the libraries.

mod counting;
mod talk;

use counting::Counting;
use kvspoa::hash::HashKey;
use kvspoa::prompt::{Model, ModelOptions};
use kvspoa::request::body::PromptInput;
use serde_json::json;
use std::fs;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use talk::{BLOCK_TOKENS, DEADLINE, ENDPOINT, conversation, path};

const ROUNDS: usize = 25;

/// A conversation: the bytes of its texts, those of one turn, and what its way is to take.
#[derive(Clone, Copy)]
struct Shape {
    bytes: usize,
    turn_bytes: usize,
    cold_us: u64,
    warm_us: u64,
}

/// Of about 2,000, 8,000, 32,000 and 128,000 tokens.
const SHAPES: [Shape; 4] = [
    Shape { bytes: 6_900, turn_bytes: 1_200, cold_us: 200, warm_us: 35 },
    Shape { bytes: 29_000, turn_bytes: 3_600, cold_us: 700, warm_us: 90 },
    Shape { bytes: 116_000, turn_bytes: 5_700, cold_us: 2_600, warm_us: 280 },
    Shape { bytes: 462_000, turn_bytes: 5_700, cold_us: 10_000, warm_us: 900 },
];

/// A few tools, those of an agent, and those of one with many servers of tools.
const TOOLS: [usize; 3] = [5, 20, 60];

/// What tokenizing alone is to reach, in millions of tokens a second.
const TOKENIZE_AIM: f64 = 200.0;

#[global_allocator]
static ALLOCATED: Counting = Counting::new();

fn main() {
    let Some(dir) = tokenizer_dir() else {
        println!("run scripts/fetch-tokenizers first");
        return;
    };
    let model = Model::load(&dir).expect("the model");
    let reference = tokenizers::Tokenizer::from_file(dir.join("tokenizer.json")).expect("a tokenizer");
    let canonical = fs::read_to_string(dir.join("tokenizer.json")).expect("a file");
    let canonical = tokenizers_rc::canonicalize_str(&canonical).expect("a tokenizer");
    let candidate = tokenizers_rc::from_json(&canonical).expect("a tokenizer");
    let libraries = Libraries { reference, candidate };
    let text = corpus(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."));
    let key = HashKey::from_seed(1);
    println!("body to block hashes, and the same text by the libraries; µs: median (least)\n");
    println!(
        "{:>7} {:>8} {:>6}  {:>17} {:>17} {:>14}  {:>21} {:>17}  {:>12}",
        "tokens",
        "body",
        "new",
        "cold",
        "warm",
        "repeat",
        "tokenizers 0.23",
        "tokenizers 1.0rc3",
        "ratios, warm"
    );
    let measured = SHAPES.map(|shape| measure(&model, &libraries, &key, &text, shape));
    println!("\nstages of the warm path; µs: median (least)\n");
    println!(
        "{:>7}  {:>17} {:>17} {:>17} {:>15}",
        "tokens", "read the body", "render", "tokenize", "hash blocks"
    );
    for Measured { tokens, stages: [read, render, tokenize, hash], .. } in &measured {
        let [read, render, tokenize, hash] = [read, render, tokenize, hash].map(Times::to_string);
        println!("{tokens:>7}  {read:>17} {render:>17} {tokenize:>17} {hash:>15}");
    }
    println!("\nmemory allocated, in % of the body\n");
    println!("{:>7}  {:>10} {:>10} {:>20}", "tokens", "read new", "read known", "render and tokenize");
    for Measured { tokens, allocated: [new, known, rest], .. } in &measured {
        println!("{tokens:>7}  {new:>10} {known:>10} {rest:>20}");
    }
    println!("\nthe next turn of some 2,000 tokens, with the tools of an agent; µs: median (least)\n");
    println!("{:>7} {:>7} {:>8}  {:>17} {:>17}", "tools", "tokens", "body", "new tools", "warm");
    for tools in TOOLS {
        with_tools(&model, &key, &text, tools);
    }
    let rate = trace(&dir, &text);
    println!("\naims; µs: median\n");
    println!("{:>7}  {:>10} {:>8} {:>7}  {:>10} {:>8} {:>7}", "tokens", "cold", "aim", "", "warm", "aim", "");
    for (Measured { tokens, cold, warm, .. }, shape) in measured.iter().zip(SHAPES) {
        print!("{tokens:>7} ");
        for (taken, aim) in [(cold, shape.cold_us), (warm, shape.warm_us)] {
            let is_met = *taken <= Duration::from_micros(aim);
            print!(" {:>10.1} {:>8} {:>7} ", micros(*taken), format!("<= {aim}"), said(is_met));
        }
        println!();
    }
    println!(
        "tokenizing alone, M tokens/s: {rate:.0}, aim >= {TOKENIZE_AIM}: {}",
        said(rate >= TOKENIZE_AIM)
    );
}

fn said(is_met: bool) -> &'static str {
    if is_met { "met" } else { "missed" }
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// What engines tokenize with: the library of today and the next one.
struct Libraries {
    reference: tokenizers::Tokenizer,
    candidate: tokenizers_rc::pipeline::PipelineTokenizer,
}

struct Measured {
    tokens: usize,
    /// The medians.
    cold: Duration,
    warm: Duration,
    stages: [Times; 4],
    /// Of reading new messages, of reading known ones, of rendering and tokenizing those.
    allocated: [usize; 3],
}

fn measure(model: &Model, libraries: &Libraries, key: &HashKey, text: &str, shape: Shape) -> Measured {
    let [mut cold, mut warm, mut repeat, mut old, mut next] = [const { Times::new() }; 5];
    let mut stages = [const { Times::new() }; 4];
    let mut allocated = [0; 3];
    let mut texts = Vec::new();
    let (mut tokens, mut body_bytes, mut known_bytes) = (0, 0, 0);
    let turn = |round: usize, session: &str, back: usize| {
        let session = format!("{session} {round} of {}", shape.bytes);
        let turns = conversation(text, &session, shape.bytes, shape.turn_bytes, round * 7919);
        json!({ "model": "m", "messages": turns[..turns.len() - 2 * back], "stream": true })
            .to_string()
            .into_bytes()
    };
    // An agent does nothing else between two requests: the bodies are made before.
    let rounds: Vec<_> = (0..ROUNDS)
        .map(|round| {
            [("a", 1), ("a", 0), ("b", 0), ("c", 1), ("c", 0)].map(|(name, back)| turn(round, name, back))
        })
        .collect();
    for (round, [before, body, new, before_stages, body_stages]) in rounds.iter().enumerate() {
        (body_bytes, known_bytes) = (body.len(), before.len());
        path(model, key, before);
        tokens = warm.of(|| path(model, key, body));
        repeat.of(|| path(model, key, body));
        cold.of(|| path(model, key, new));

        let body = body_stages;
        path(model, key, before_stages);
        let [read, render, tokenize, hash] = &mut stages;
        let ask = read.of(|| model.read(ENDPOINT, body).expect("a body"));
        let started = Instant::now();
        let ids = model.tokens(&ask, &|| Instant::now() >= started + DEADLINE).expect("ids");
        render.0.push(ids.work.rendering);
        tokenize.0.push(started.elapsed() - ids.work.rendering);
        hash.of(|| black_box(ids.ids.sequence(key, key.plain_root(), &ask.media, BLOCK_TOKENS)));

        if round + 1 == ROUNDS {
            let new = turn(round, "d", 0);
            let read_new = ALLOCATED.by(|| model.read(ENDPOINT, &new).expect("a body"));
            let read_known = ALLOCATED.by(|| model.read(ENDPOINT, body).expect("a body"));
            let ask = model.read(ENDPOINT, body).expect("a body");
            // The text's memory is used again from the second time on.
            model.tokens(&ask, &|| false).expect("ids");
            let tokens = ALLOCATED.by(|| model.tokens(&ask, &|| false).expect("ids"));
            allocated = [read_new, read_known, tokens].map(|bytes| 100 * bytes / body.len());
        }
        let PromptInput::Chat(chat) = &ask.prompt else { unreachable!("the endpoint's shape") };
        texts.push((model.render(chat).expect("a text"), ids.ids));
    }
    for (round, (rendered, ids)) in texts.into_iter().enumerate() {
        let ids: Vec<u32> = ids.iter().map(|id| id.0).collect();
        let theirs = next.of(|| {
            let options = tokenizers_rc::pipeline::EncodeOptions {
                add_special_tokens: false,
                ..tokenizers_rc::pipeline::EncodeOptions::default()
            };
            let mut ids = Vec::with_capacity(rendered.len() / 3);
            libraries.candidate.encode_into(&rendered, &options, &mut ids).expect("ids");
            ids
        });
        assert_eq!(theirs, ids, "other ids");
        if round < 3 {
            let theirs = old.of(|| libraries.reference.encode_fast(rendered.as_str(), false).expect("ids"));
            assert_eq!(theirs.get_ids(), ids, "other ids");
        }
    }
    let ratio = |times: &Times| times.least().as_secs_f64() / warm.least().as_secs_f64();
    println!(
        "{tokens:>7} {:>5} kB {:>4} %  {:>17} {:>17} {:>14}  {:>21} {:>17}  {:>6.0}, {:.1}",
        body_bytes / 1000,
        100 * (body_bytes - known_bytes) / body_bytes,
        cold.to_string(),
        warm.to_string(),
        repeat.to_string(),
        old.to_string(),
        next.to_string(),
        ratio(&old),
        ratio(&next),
    );
    Measured { tokens, cold: cold.median(), warm: warm.median(), stages, allocated }
}

/// A turn of a conversation whose messages are known but for the last two, and its tools or not.
fn with_tools(model: &Model, key: &HashKey, text: &str, count: usize) {
    let [mut new, mut warm] = [const { Times::new() }; 2];
    let [Shape { bytes, turn_bytes, .. }, ..] = SHAPES;
    let body = |round: usize, kind: &str, back: usize| {
        let (session, kind) =
            (format!("{kind} {round} with {count} tools"), if back > 0 { "" } else { kind });
        let turns = conversation(text, &session, bytes, turn_bytes, round * 7919);
        let tools: Vec<_> = (0..count).map(|number| tool(text, kind, round, number)).collect();
        json!({ "model": "m", "messages": turns[..turns.len() - back], "tools": tools, "stream": true })
            .to_string()
            .into_bytes()
    };
    let rounds: Vec<_> =
        (0..ROUNDS).map(|round| ["", "new"].map(|kind| [2, 0].map(|back| body(round, kind, back)))).collect();
    let (mut tokens, mut body_bytes) = (0, 0);
    for [[before, body], [before_new, with_new]] in &rounds {
        body_bytes = body.len();
        path(model, key, before);
        tokens = warm.of(|| path(model, key, body));
        path(model, key, before_new);
        new.of(|| path(model, key, with_new));
    }
    println!(
        "{count:>7} {tokens:>7} {:>5} kB  {:>17} {:>17}",
        body_bytes / 1000,
        new.to_string(),
        warm.to_string()
    );
}

/// A tool of about 1.5 kB, as programs that write code have them; those of another `kind` and `round` are others.
fn tool(text: &str, kind: &str, round: usize, number: usize) -> serde_json::Value {
    let round = if kind.is_empty() { 0 } else { round };
    let said = |place: usize, length: usize| -> String {
        text.chars().skip((number * 7 + place) * 131 % 40_000).take(length).collect()
    };
    let field = |place| json!({ "type": "string", "description": said(place, 160), "minLength": 1 });
    json!({ "type": "function", "function": {
        "name": format!("tool_{number}"),
        "description": format!("{kind} {round}: {}", said(0, 600)),
        "parameters": {
            "type": "object",
            "properties": {
                "path": field(1),
                "limit": { "type": "integer", "minimum": 1, "default": 2000 },
                "mode": { "type": "string", "enum": ["read", "write", "append"] },
                "items": { "type": "array", "items": { "type": "object", "properties": { "content": field(2) } } },
            },
            "required": ["path"],
            "additionalProperties": false,
        },
    } })
}

/// Many conversations, a turn of each in turns: how fast text becomes ids, in millions of them a second, all misses
/// counted.
fn trace(dir: &Path, text: &str) -> f64 {
    const SESSIONS: usize = 200;
    const TURNS: usize = 10;
    const TURN_BYTES: usize = 5_700;
    let options = ModelOptions { cache_bytes: 256 << 20, ..ModelOptions::default() };
    let bound = options.cache_bytes;
    let model = Model::load_with(dir, options).expect("the model");
    let mut prompts = Vec::new();
    for turn in 1..=TURNS {
        for session in 0..SESSIONS {
            let name = format!("trace {session}");
            let mut turns = conversation(text, &name, TURNS * TURN_BYTES, TURN_BYTES, session * 4099);
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
        "\ntokenizing alone, {SESSIONS} conversations of {TURNS} turns, from empty: {} pieces, {:.0} % known; \
         kept {} of {} MB: {}",
        stats.hits + stats.misses,
        100.0 * stats.hits as f64 / (stats.hits + stats.misses) as f64,
        model.cache_bytes() >> 20,
        bound >> 20,
        said(model.cache_bytes() <= bound),
    );
    tokens as f64 / total.as_secs_f64() / 1e6
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
