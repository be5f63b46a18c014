//! What the tests of KV events share: recorded frames, and a slow, obvious decoder to compare with.
#![allow(dead_code, missing_docs, unreachable_pub, reason = "each test binary uses a part")]

use kvspoa::events::{Batch, KvEvent};
use kvspoa::hash::{HashKey, push_media_key, push_other_key};
use kvspoa::units::{BlockHash, EngineHash, SequenceHash, Tier, TokenId};
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;

/// One recorded message. Layout of a `.frames` file: for each message u8 kind, f64 seconds, u32 number of frames,
/// then for each frame u32 length and its bytes; little endian.
#[derive(Clone, Debug)]
pub struct Record {
    pub replayed: bool,
    pub frames: Vec<Vec<u8>>,
}

impl Record {
    /// The sequence number and the payload: the last two frames in every layout.
    pub fn message(&self) -> (u64, &[u8]) {
        match &self.frames[..] {
            [.., seq, payload] => (u64::from_be_bytes(seq[..].try_into().expect("8 bytes")), payload),
            _ => panic!("too few frames"),
        }
    }

    pub fn is_end(&self) -> bool {
        self.replayed && self.message().1.is_empty()
    }
}

fn path(name: &str, extension: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/vllm").join(format!("{name}.{extension}"))
}

pub fn names() -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(path("x", "y").parent().expect("a folder"))
        .expect("fixtures")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|e| e == "frames"))
        .map(|path| path.file_stem().expect("a stem").to_string_lossy().into_owned())
        .collect();
    names.sort();
    assert!(names.len() >= 18, "fixtures are missing: {names:?}");
    names
}

pub fn records(name: &str) -> Vec<Record> {
    let bytes = std::fs::read(path(name, "frames")).expect("frames");
    let mut rest = &bytes[..];
    let mut records = Vec::new();
    let u32_at = |rest: &mut &[u8]| {
        let (head, tail) = rest.split_first_chunk().expect("a length");
        *rest = tail;
        u32::from_le_bytes(*head) as usize
    };
    while let Some((kind, tail)) = rest.split_first() {
        rest = &tail[8..];
        let frames = (0..u32_at(&mut rest))
            .map(|_| {
                let length = u32_at(&mut rest);
                let (frame, tail) = rest.split_at(length);
                rest = tail;
                frame.to_vec()
            })
            .collect();
        records.push(Record { replayed: *kind == 1, frames });
    }
    records
}

pub fn json(name: &str) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(path(name, "json")).expect("json")).expect("valid json")
}

/// The events that the recorder decoded, each with its sequence number.
pub fn json_events(name: &str) -> Vec<serde_json::Value> {
    let json = json(name);
    match json.get("events") {
        Some(events) => events.as_array().expect("a list").clone(),
        None => json["steps"]
            .as_array()
            .expect("steps")
            .iter()
            .flat_map(|step| step["events"].as_array().expect("a list").clone())
            .collect(),
    }
}

/// A msgpack value, as rmp-serde reads it.
#[derive(Clone, PartialEq, Debug)]
pub enum Value {
    Nil,
    Bool(bool),
    Uint(u64),
    Int(i64),
    Float(f64),
    Text(String),
    Bytes(Vec<u8>),
    List(Vec<Self>),
    Map(Vec<(Self, Self)>),
}

impl Value {
    pub fn list(&self) -> Option<&[Self]> {
        if let Self::List(list) = self { Some(list) } else { None }
    }

    fn media_item(&self) -> Option<(&str, i64)> {
        match self.list()? {
            [Self::Text(item), Self::Int(offset)] => Some((item, *offset)),
            [Self::Text(item), Self::Uint(offset)] => Some((item, i64::try_from(*offset).ok()?)),
            _ => None,
        }
    }

    pub fn text(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }

    pub fn uint(&self) -> Option<u64> {
        match self {
            Self::Uint(value) => Some(*value),
            Self::Int(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }

    pub fn hash(&self) -> Option<EngineHash> {
        match self {
            Self::Uint(value) => Some(EngineHash(*value)),
            Self::Int(value) => Some(EngineHash(*value as u64)),
            Self::Bytes(bytes) => {
                let last = bytes.len().checked_sub(8)?;
                Some(EngineHash(u64::from_be_bytes(bytes[last..].try_into().ok()?)))
            }
            _ => None,
        }
    }

    /// Writes the value the way msgspec does: smallest integers, `bin` for bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        fn write<T: serde::Serialize>(value: T, out: &mut Vec<u8>) {
            out.extend(rmp_serde::to_vec(&value).expect("encodes"));
        }
        fn header(out: &mut Vec<u8>, small: u8, long: u8, length: usize) {
            if length < 16 {
                out.push(small | length as u8);
            } else {
                out.push(long);
                out.extend((length as u16).to_be_bytes());
            }
        }
        match self {
            Self::Nil => out.push(0xc0),
            Self::Bool(value) => write(value, out),
            Self::Uint(value) => write(value, out),
            Self::Int(value) => write(value, out),
            Self::Float(value) => write(value, out),
            Self::Text(value) => write(value, out),
            Self::Bytes(value) => write(serde_bytes::Bytes::new(value), out),
            Self::List(list) => {
                header(out, 0x90, 0xdc, list.len());
                list.iter().for_each(|value| value.encode(out));
            }
            Self::Map(map) => {
                header(out, 0x80, 0xde, map.len());
                map.iter().for_each(|(name, value)| {
                    name.encode(out);
                    value.encode(out);
                });
            }
        }
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Value;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any value")
            }
            fn visit_unit<E>(self) -> Result<Value, E> {
                Ok(Value::Nil)
            }
            fn visit_none<E>(self) -> Result<Value, E> {
                Ok(Value::Nil)
            }
            fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
                Ok(Value::Bool(v))
            }
            fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
                Ok(Value::Uint(v))
            }
            fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
                Ok(Value::Int(v))
            }
            fn visit_f64<E>(self, v: f64) -> Result<Value, E> {
                Ok(Value::Float(v))
            }
            fn visit_str<E>(self, v: &str) -> Result<Value, E> {
                Ok(Value::Text(v.to_owned()))
            }
            fn visit_bytes<E>(self, v: &[u8]) -> Result<Value, E> {
                Ok(Value::Bytes(v.to_vec()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
                let mut list = Vec::new();
                while let Some(value) = seq.next_element()? {
                    list.push(value);
                }
                Ok(Value::List(list))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Value::Map(pairs))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

/// [`KvEvent`] with its own lists.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    Stored {
        tier: Tier,
        parent: Option<EngineHash>,
        root: SequenceHash,
        engine_hashes: Vec<EngineHash>,
        block_hashes: Vec<BlockHash>,
    },
    Removed {
        tier: Tier,
        engine_hashes: Vec<EngineHash>,
    },
    Cleared,
}

pub fn owned(batch: &Batch) -> Vec<Event> {
    batch
        .events()
        .map(|event| match event {
            KvEvent::Stored(s) => Event::Stored {
                tier: s.tier,
                parent: s.parent,
                root: s.root,
                engine_hashes: s.engine_hashes.to_vec(),
                block_hashes: s.block_hashes.to_vec(),
            },
            KvEvent::Removed { tier, engine_hashes } => {
                Event::Removed { tier, engine_hashes: engine_hashes.to_vec() }
            }
            KvEvent::Cleared => Event::Cleared,
        })
        .collect()
}

/// The slow decoder: value trees, names looked up by text, nothing shared with the product but the hash functions.
#[derive(Default)]
pub struct Oracle {
    whole_groups: HashMap<u64, bool>,
}

const ARRAY_FIELDS: [&str; 12] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
];

impl Oracle {
    /// The events of a payload that count.
    pub fn events(&mut self, payload: &[u8], key: &HashKey) -> Vec<Event> {
        let batch: Value = rmp_serde::from_slice(payload).expect("msgpack");
        let events = batch.list().and_then(|batch| batch[1].list()).expect("a list of events");
        events.iter().filter_map(|event| self.event(event, key)).collect()
    }

    fn event(&mut self, event: &Value, key: &HashKey) -> Option<Event> {
        let fields = named_fields(event)?;
        let field = |name: &str| fields.get(name).filter(|value| **value != Value::Nil);
        let group = field("group_idx").map(|index| index.uint().expect("an index"));
        let tier = match field("medium").map(|medium| medium.text().expect("a medium")) {
            None | Some("GPU") => Tier::Gpu,
            Some("CPU" | "CPU_TIER1") => Tier::Cpu,
            Some(_) => Tier::Disk,
        };
        let hashes = |name: &str| -> Vec<EngineHash> {
            let list = field(name).and_then(Value::list).unwrap_or_default();
            list.iter().map(|hash| hash.hash().expect("a hash")).collect()
        };
        let engine_hashes = hashes("block_hashes");
        match fields["type"].text()? {
            "AllBlocksCleared" => Some(Event::Cleared),
            "BlockRemoved" => {
                let counts = group.is_none_or(|g| *self.whole_groups.get(&g).unwrap_or(&(g == 0)));
                (counts && !engine_hashes.is_empty()).then_some(Event::Removed { tier, engine_hashes })
            }
            "BlockStored" => {
                if let (Some(kind), Some(group)) = (field("kv_cache_spec_kind"), group) {
                    let whole = matches!(kind.text(), Some("full_attention" | "mla_attention"));
                    self.whole_groups.insert(group, whole);
                }
                let counts = group.is_none_or(|g| *self.whole_groups.get(&g).unwrap_or(&(g == 0)));
                if !counts || engine_hashes.is_empty() {
                    return None;
                }
                let tokens: Vec<TokenId> = field("token_ids")
                    .and_then(Value::list)
                    .unwrap_or_default()
                    .iter()
                    .map(|token| TokenId(token.uint().and_then(|t| u32::try_from(t).ok()).expect("a token")))
                    .collect();
                let block_tokens = field("block_size").and_then(Value::uint).unwrap_or(0) as usize;
                if !tokens.is_empty() && tokens.len() != block_tokens * engine_hashes.len() {
                    return None;
                }
                let parent = field("parent_block_hash").map(|hash| hash.hash().expect("a hash"));
                let lora = field("lora_name").and_then(Value::text);
                let mut salt = field("cache_salt").and_then(Value::text).map(str::to_owned);
                let extra_keys = field("extra_keys").and_then(Value::list).unwrap_or_default();
                let mut block_hashes = Vec::new();
                for (at, block) in tokens.chunks(block_tokens.max(1)).enumerate() {
                    let keys = extra_keys.get(at).and_then(Value::list).unwrap_or_default();
                    let mut keys = keys.to_vec();
                    if let Some(at) = keys.iter().position(|k| lora.is_some() && k.text() == lora) {
                        keys.remove(at);
                    }
                    if at == 0
                        && parent.is_none()
                        && salt.is_none()
                        && let Some(at) = keys.iter().position(|k| k.text().is_some())
                    {
                        salt = keys.remove(at).text().map(str::to_owned);
                    }
                    let mut extra = Vec::new();
                    for other in keys {
                        match other.media_item() {
                            Some((item, offset)) => push_media_key(item, offset, &mut extra),
                            None => {
                                let mut bytes = Vec::new();
                                other.encode(&mut bytes);
                                push_other_key(&bytes, &mut extra);
                            }
                        }
                    }
                    block_hashes.push(if extra.is_empty() {
                        key.block(block)
                    } else {
                        key.block_with_extra(block, &extra)
                    });
                }
                let root = key.root(lora, salt.as_deref());
                Some(Event::Stored { tier, parent, root, engine_hashes, block_hashes })
            }
            other => panic!("unexpected {other}"),
        }
    }
}

fn named_fields(event: &Value) -> Option<HashMap<String, Value>> {
    match event {
        Value::Map(pairs) => Some(
            pairs
                .iter()
                .map(|(name, value)| (name.text().expect("a name").to_owned(), value.clone()))
                .collect(),
        ),
        Value::List(list) => {
            let (tag, rest) = list.split_first()?;
            let names: &[&str] = if tag.text() == Some("BlockRemoved") {
                &["block_hashes", "medium", "group_idx", "locality"]
            } else {
                &ARRAY_FIELDS
            };
            let mut fields: HashMap<String, Value> =
                names.iter().zip(rest).map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
            fields.insert("type".to_owned(), tag.clone());
            Some(fields)
        }
        _ => None,
    }
}
