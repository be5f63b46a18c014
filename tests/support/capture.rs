//! Captures of real vLLM: the requests that were sent, and the frames that came back.

use kvspoa::sim::{Event, Lora, Medium, Prompt, Stored};
use kvspoa::units::{EngineHash, TokenId};
use serde_json::Value;
use std::collections::HashMap;

pub(crate) struct Capture {
    model: String,
    pub(crate) steps: Vec<Step>,
    /// The events of each live message, in order.
    pub(crate) batches: Vec<Vec<Value>>,
    /// The same messages as they came.
    pub(crate) payloads: Vec<Vec<u8>>,
    /// Lines of the engine's `/metrics` after the last step.
    metrics: Vec<String>,
}

pub(crate) struct Step {
    pub(crate) name: String,
    pub(crate) requests: Vec<Request>,
    /// A reset of the prefix cache: whether the CPU tier is meant too.
    pub(crate) reset: Option<bool>,
    /// Live messages up to the end of this step.
    pub(crate) batches_after: usize,
}

pub(crate) struct Request {
    body: Value,
    tokens: Vec<TokenId>,
    pub(crate) answer: Vec<TokenId>,
    pub(crate) cached_tokens: Option<usize>,
    pub(crate) aborted_after: Option<usize>,
}

pub(crate) struct Hash {
    pub(crate) word: u64,
    pub(crate) bytes: Vec<u8>,
}

impl Capture {
    pub(crate) fn load(name: &str) -> Self {
        let stem = format!("{}/tests/fixtures/vllm/{name}", env!("CARGO_MANIFEST_DIR"));
        let description = std::fs::read_to_string(format!("{stem}.json")).expect("the capture's description");
        let told: Value = serde_json::from_str(&description).expect("JSON");
        let payloads = live_payloads(&std::fs::read(format!("{stem}.frames")).expect("the capture's frames"));
        let mut batches: Vec<Vec<Value>> = Vec::new();
        let mut steps = Vec::new();
        for step in told["steps"].as_array().expect("steps") {
            for event in step["events"].as_array().expect("events") {
                let mut event = event.clone();
                let seq =
                    event.as_object_mut().and_then(|event| event.shift_remove("seq")).expect("a number");
                batches.resize_with(seq.as_u64().expect("a number") as usize + 1, Vec::new);
                batches.last_mut().expect("it was just made").push(event);
            }
            steps.push(Step::read(step, batches.len(), &steps));
        }
        assert_eq!(batches.len(), payloads.len());
        let metrics = told["kv_metrics"].as_array().into_iter().flatten().filter_map(text).collect();
        Self {
            model: told["model"].as_str().unwrap_or_default().to_owned(),
            steps,
            batches,
            payloads,
            metrics,
        }
    }

    /// The value of a metric that has no labels but the usual ones.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let line = self.metrics.iter().find(|line| line.split('{').next() == Some(name));
        let value = line.and_then(|line| line.rsplit(' ').next()).expect("a captured metric");
        value.parse().expect("a number")
    }
}

impl Step {
    fn read(step: &Value, batches_after: usize, before: &[Self]) -> Self {
        let path = step["path"].as_str().unwrap_or_default();
        let requests = match (step.get("requests"), step.get("stream")) {
            (Some(concurrent), _) => {
                concurrent.as_array().expect("a list").iter().flat_map(Request::read).collect()
            }
            (None, Some(stream)) if path.ends_with("chat/completions") => {
                vec![Request::streamed(step, stream)]
            }
            (None, Some(_)) => vec![Request::aborted(step, before)],
            (None, None) => Request::read(step),
        };
        let reset = path.starts_with("/reset_prefix_cache").then(|| path.contains("external"));
        // The managers' captures know the reset as a step without a request.
        let is_bare_reset = step["step"] == "reset" && path.is_empty();
        Self {
            name: step["step"].to_string(),
            requests,
            reset: reset.or(is_bare_reset.then_some(false)),
            batches_after,
        }
    }
}

impl Request {
    /// The requests of one HTTP request: each prompt and each wanted answer is its own.
    fn read(step: &Value) -> Vec<Self> {
        let Some(prompts) = step["prompt_token_ids"].as_array() else { return Vec::new() };
        let is_list = prompts.first().is_some_and(Value::is_array);
        let prompts: Vec<Vec<TokenId>> = if is_list {
            prompts.iter().map(tokens).collect()
        } else {
            vec![tokens(&step["prompt_token_ids"])]
        };
        let cached = [&step["usage"]["prompt_tokens_details"]["cached_tokens"], &step["cached_tokens"]];
        // With several prompts the usage is the last one's only.
        let cached_tokens = cached.iter().find_map(|value| value.as_u64()).filter(|_| prompts.len() == 1);
        let decode = step["options"]["decode"].as_u64().unwrap_or(0);
        prompts
            .into_iter()
            .enumerate()
            .map(|(at, prompt)| Self {
                body: if step["body"].is_object() { step["body"].clone() } else { step["options"].clone() },
                tokens: prompt,
                answer: match step["output_token_ids"].get(at) {
                    Some(answer) => tokens(answer),
                    // The managers' driver computes every token that it decodes; the last one of ours is not.
                    None => (0..decode).map(|at| TokenId(1000 + at as u32)).chain([TokenId(0)]).collect(),
                },
                cached_tokens: cached_tokens.map(|count| count as usize),
                aborted_after: None,
            })
            .collect()
    }

    /// Of a stream the capture keeps the prompt's ids, in the first chunk; the answer's are known from the events.
    fn streamed(step: &Value, stream: &Value) -> Self {
        let first: Value = serde_json::from_str(stream[0].as_str().expect("text")).expect("JSON");
        let prompt = tokens(&first["prompt_token_ids"]);
        let event = &step["events"][0];
        let known = tokens(&event["token_ids"]);
        let in_block = prompt.len() % event["block_size"].as_u64().expect("a size") as usize;
        let mut answer = known[in_block..].to_vec();
        answer.resize(24, TokenId(0));
        Self { body: step["body"].clone(), tokens: prompt, answer, cached_tokens: None, aborted_after: None }
    }

    /// Of the aborted request only what was stored is known, and its text: that of the second step, with two words and a
    /// full stop before it.
    fn aborted(step: &Value, before: &[Step]) -> Self {
        let mut prompt = tokens(&step["events"][0]["token_ids"]);
        prompt.resize(before[1].requests[0].tokens.len() + 3, TokenId(7));
        let answer = vec![TokenId(8); 500];
        Self {
            body: step["body"].clone(),
            tokens: prompt,
            answer,
            cached_tokens: None,
            aborted_after: Some(3),
        }
    }

    pub(crate) fn prompt(&self, capture: &Capture) -> Prompt {
        let text = |value: &Value| value.as_str().map(Into::into);
        let asks_full = |value: &Value| value == "full";
        let adapter = self.body["model"].as_str().filter(|model| *model != capture.model).or_else(|| {
            let request = self.body["lora_request"].as_str()?;
            request.contains("my-lora").then_some("my-lora")
        });
        let image = self.body.get("mm_features").map(|_| "image".into());
        Prompt {
            tokens: self.tokens.clone(),
            lora: adapter.map(|name| Lora { id: 1, name: name.into() }),
            cache_salt: text(&self.body["cache_salt"]).or(image),
            session_id: text(&self.body["session_id"]),
            reports_reuse: asks_full(&self.body["vllm_xargs"]["kv_cache_report_mode"])
                || asks_full(&self.body["report_mode"]),
        }
    }
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

fn tokens(list: &Value) -> Vec<TokenId> {
    let list = list.as_array().expect("a list of token ids");
    list.iter().map(|id| TokenId(u32::try_from(id.as_u64().expect("an id")).expect("an id"))).collect()
}

/// The third frame of every record of kind 0 (`*.frames`: kind u8, seconds f64, frames u32, each length u32 and bytes).
fn live_payloads(mut records: &[u8]) -> Vec<Vec<u8>> {
    let mut payloads = Vec::new();
    while !records.is_empty() {
        let kind = take(&mut records, 1)[0];
        take(&mut records, 8);
        let frames = number(&mut records);
        for at in 0..frames {
            let length = number(&mut records);
            let frame = take(&mut records, length);
            if kind == 0 && at == 2 {
                payloads.push(frame.to_vec());
            }
        }
    }
    payloads
}

fn take<'a>(records: &mut &'a [u8], count: usize) -> &'a [u8] {
    let (head, tail) = records.split_at(count);
    *records = tail;
    head
}

fn number(records: &mut &[u8]) -> usize {
    u32::from_le_bytes(take(records, 4).try_into().expect("four bytes")) as usize
}

/// The time stamp of a payload: its first element, a 64-bit float.
pub(crate) fn seconds(payload: &[u8]) -> f64 {
    assert_eq!(payload[..2], [0x93, 0xcb]);
    f64::from_be_bytes(payload[2..10].try_into().expect("eight bytes"))
}

pub(crate) fn replace(bytes: &mut [u8], from: &[u8], to: &[u8]) {
    assert_eq!(from.len(), to.len());
    let places: Vec<usize> =
        (0..=bytes.len() - from.len()).filter(|at| &bytes[*at..*at + from.len()] == from).collect();
    for at in places {
        bytes[at..at + to.len()].copy_from_slice(to);
    }
}

/// All hashes that an event names, the parent too.
pub(crate) fn hashes(event: &Value) -> Vec<Hash> {
    let list = event["block_hashes"].as_array().map(Vec::as_slice).unwrap_or_default();
    list.iter().chain(event.get("parent_block_hash")).filter_map(hash).collect()
}

fn hash(value: &Value) -> Option<Hash> {
    if let Some(word) = value.as_u64() {
        return Some(Hash { word, bytes: Vec::new() });
    }
    let digits = value.as_str()?.strip_prefix("hex:")?;
    let byte = |at| u8::from_str_radix(&digits[at..at + 2], 16).expect("hexadecimal");
    let bytes: Vec<u8> = (0..digits.len()).step_by(2).map(byte).collect();
    Some(Hash { word: u64::from_be_bytes(bytes[bytes.len() - 8..].try_into().expect("eight bytes")), bytes })
}

/// The event with each hash as a number, and as `names` has it if it is there.
pub(crate) fn rename(event: &Value, names: &HashMap<u64, u64>) -> Value {
    let name = |value: &Value| {
        let Some(Hash { word, .. }) = hash(value) else { return value.clone() };
        Value::from(names.get(&word).copied().unwrap_or(word))
    };
    let mut event = event.clone();
    if let Some(parent) = event.get("parent_block_hash").map(name) {
        event["parent_block_hash"] = parent;
    }
    let list = event["block_hashes"].as_array().map(|list| list.iter().map(name).collect::<Vec<_>>());
    if let Some(list) = list {
        event["block_hashes"] = list.into();
    }
    event
}

pub(crate) fn sort_cpu_stores(events: &mut [Value]) {
    let is_cpu_store = |event: &Value| event["type"] == "BlockStored" && event["medium"] == "CPU";
    for run in events.chunk_by_mut(|a, b| is_cpu_store(a) && is_cpu_store(b)) {
        run.sort_by_key(|event| event["block_hashes"][0].as_u64());
    }
}

/// An engine's event as the captures tell it.
pub(crate) fn tell(event: &Event) -> Value {
    let words = |hashes: &[EngineHash]| hashes.iter().map(|hash| hash.0).collect::<Vec<_>>();
    match event {
        Event::Cleared => serde_json::json!({"type": "AllBlocksCleared"}),
        Event::Removed { block_hashes, medium } => serde_json::json!({
            "type": "BlockRemoved", "block_hashes": words(block_hashes), "medium": name(*medium), "group_idx": 0,
        }),
        Event::Stored(stored) => {
            let mut told = serde_json::json!({
                "type": "BlockStored",
                "block_hashes": words(&stored.block_hashes),
                "parent_block_hash": stored.parent.map(|hash| hash.0),
                "token_ids": stored.tokens.iter().map(|token| token.0).collect::<Vec<_>>(),
                "block_size": stored.block_tokens,
                "lora_id": stored.lora.as_ref().map(|lora| lora.id),
                "medium": name(stored.medium),
                "lora_name": stored.lora.as_ref().map(|lora| lora.name.to_string()),
            });
            if let Some(keys) = &stored.extra_keys {
                let keys = keys.iter().map(|keys| match keys.as_slice() {
                    [] => Value::Null,
                    keys => keys.iter().map(|key| Value::from(&**key)).collect(),
                });
                told["extra_keys"] = keys.collect();
            }
            told["group_idx"] = 0.into();
            if stored.block_tokens > 0 {
                told["kv_cache_spec_kind"] = "full_attention".into();
            }
            if let Some(session) = &stored.session_id {
                told["session_id"] = Value::from(&**session);
            }
            told
        }
    }
}

/// The other way round.
pub(crate) fn event(told: &Value) -> Event {
    let words = |list: &Value| -> Vec<EngineHash> {
        list.as_array().expect("hashes").iter().filter_map(hash).map(|hash| EngineHash(hash.word)).collect()
    };
    let medium = if told["medium"] == "CPU" { Medium::Cpu } else { Medium::Gpu };
    match told["type"].as_str() {
        Some("AllBlocksCleared") => Event::Cleared,
        Some("BlockRemoved") => Event::Removed { block_hashes: words(&told["block_hashes"]), medium },
        _ => Event::Stored(Stored {
            block_hashes: words(&told["block_hashes"]),
            parent: hash(&told["parent_block_hash"]).map(|hash| EngineHash(hash.word)),
            tokens: tokens(&told["token_ids"]),
            block_tokens: u32::try_from(told["block_size"].as_u64().expect("a size")).expect("a size"),
            lora: told["lora_name"].as_str().map(|name| Lora { id: 1, name: name.into() }),
            medium,
            extra_keys: told["extra_keys"].as_array().map(|list| {
                let keys = |keys: &Value| keys.as_array().map(Vec::as_slice).unwrap_or_default().to_vec();
                let text = |key: Value| key.as_str().expect("a key").into();
                list.iter().map(|block| keys(block).into_iter().map(text).collect()).collect()
            }),
            session_id: told["session_id"].as_str().map(Into::into),
        }),
    }
}

const fn name(medium: Medium) -> &'static str {
    match medium {
        Medium::Gpu => "GPU",
        Medium::Cpu => "CPU",
    }
}
