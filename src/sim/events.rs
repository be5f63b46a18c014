//! KV events as vLLM 0.32 writes them: msgpack maps by field name, defaults left out, in an array batch.
//!
//! Source: vLLM `distributed/kv_events.py`, and captures of its frames, which the encoder equals byte for byte.

use crate::units::{EngineHash, TokenId};
use serde::ser::{Serialize, SerializeMap, SerializeSeq, Serializer};
use std::sync::Arc;

/// One change of the simulated cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// `BlockStored`.
    Stored(Stored),
    /// `BlockRemoved`.
    Removed {
        /// The blocks; one each from the GPU pool, several at once from the CPU tier.
        block_hashes: Vec<EngineHash>,
        /// The tier that lost them.
        medium: Medium,
    },
    /// `AllBlocksCleared`.
    Cleared,
}

/// A run of consecutive blocks of one chain.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stored {
    /// The blocks' names.
    pub block_hashes: Vec<EngineHash>,
    /// The block before the first; `None` at token 0, and in placeholders.
    pub parent: Option<EngineHash>,
    /// All tokens of the run; empty in a placeholder, which names a block and says nothing of it.
    pub tokens: Vec<TokenId>,
    /// Tokens a block; 0 in a placeholder.
    pub block_tokens: u32,
    /// The LoRA adapter of the chain.
    pub lora: Option<Lora>,
    /// The tier that now holds the blocks.
    pub medium: Medium,
    /// What else goes into each block's hash: the adapter's name in every block, the cache salt in the first. The GPU
    /// pool names them, the CPU tier does not.
    pub extra_keys: Option<Vec<ExtraKeys>>,
    /// The session that the storing request named.
    pub session_id: Option<Arc<str>>,
}

/// The extra keys of one block; none is written as nil.
pub type ExtraKeys = Vec<Arc<str>>;

/// A LoRA adapter as the engine counts it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lora {
    /// The engine's number of the adapter, from 1.
    pub id: u32,
    /// The name by which requests ask for it.
    pub name: Arc<str>,
}

/// The tier of an event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Medium {
    /// Device memory.
    Gpu,
    /// Host memory.
    Cpu,
}

impl Medium {
    const fn name(self) -> &'static str {
        match self {
            Self::Gpu => "GPU",
            Self::Cpu => "CPU",
        }
    }
}

/// How block hashes are written (vLLM's `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
pub enum HashFormat {
    /// A 64-bit integer, vLLM's default.
    #[default]
    Int,
    /// 32 bytes, of which the last eight are the integer, big endian.
    Bytes,
}

/// Encodes a batch as vLLM publishes it: `[seconds since the epoch, [event…], data-parallel rank]`.
#[must_use]
pub fn encode_batch(seconds: f64, events: &[Event], rank: u16, format: HashFormat) -> Vec<u8> {
    let batch = (seconds, Events { events, format }, rank);
    // Writing these types to memory has no way to fail; an empty payload is what a subscriber drops as malformed.
    rmp_serde::to_vec(&batch).unwrap_or_default()
}

struct Events<'a> {
    events: &'a [Event],
    format: HashFormat,
}

impl Serialize for Events<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(self.events.iter().map(|event| Wire { event, format: self.format }))
    }
}

struct Wire<'a> {
    event: &'a Event,
    format: HashFormat,
}

impl Serialize for Wire<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self.event {
            Event::Stored(stored) => self.stored(stored, to),
            Event::Removed { block_hashes, medium } => {
                let mut map = to.serialize_map(Some(4))?;
                map.serialize_entry("type", "BlockRemoved")?;
                map.serialize_entry("block_hashes", &self.hashes(block_hashes))?;
                map.serialize_entry("medium", medium.name())?;
                map.serialize_entry("group_idx", &0)?;
                map.end()
            }
            Event::Cleared => {
                let mut map = to.serialize_map(Some(1))?;
                map.serialize_entry("type", "AllBlocksCleared")?;
                map.end()
            }
        }
    }
}

impl<'a> Wire<'a> {
    fn stored<S: Serializer>(&self, stored: &Stored, to: S) -> Result<S::Ok, S::Error> {
        let is_placeholder = stored.block_tokens == 0;
        let fields = 9
            + usize::from(stored.extra_keys.is_some())
            + usize::from(!is_placeholder)
            + usize::from(stored.session_id.is_some());
        let mut map = to.serialize_map(Some(fields))?;
        map.serialize_entry("type", "BlockStored")?;
        map.serialize_entry("block_hashes", &self.hashes(&stored.block_hashes))?;
        map.serialize_entry("parent_block_hash", &stored.parent.map(|hash| Hash(hash, self.format)))?;
        map.serialize_entry("token_ids", &Tokens(&stored.tokens))?;
        map.serialize_entry("block_size", &stored.block_tokens)?;
        map.serialize_entry("lora_id", &stored.lora.as_ref().map(|lora| lora.id))?;
        map.serialize_entry("medium", stored.medium.name())?;
        map.serialize_entry("lora_name", &stored.lora.as_ref().map(|lora| &*lora.name))?;
        if let Some(keys) = &stored.extra_keys {
            map.serialize_entry("extra_keys", &Keys(keys))?;
        }
        map.serialize_entry("group_idx", &0)?;
        if !is_placeholder {
            map.serialize_entry("kv_cache_spec_kind", "full_attention")?;
        }
        if let Some(session) = &stored.session_id {
            map.serialize_entry("session_id", &**session)?;
        }
        map.end()
    }

    const fn hashes(&self, hashes: &'a [EngineHash]) -> Hashes<'a> {
        Hashes(hashes, self.format)
    }
}

struct Hashes<'a>(&'a [EngineHash], HashFormat);

impl Serialize for Hashes<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(self.0.iter().map(|hash| Hash(*hash, self.1)))
    }
}

struct Hash(EngineHash, HashFormat);

impl Serialize for Hash {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self.1 {
            HashFormat::Int => to.serialize_u64(self.0.0),
            HashFormat::Bytes => {
                let word = self.0.0.to_be_bytes();
                to.serialize_bytes(&[word; 4].concat())
            }
        }
    }
}

struct Tokens<'a>(&'a [TokenId]);

impl Serialize for Tokens<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(self.0.iter().map(|token| token.0))
    }
}

struct Keys<'a>(&'a [ExtraKeys]);

impl Serialize for Keys<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut list = to.serialize_seq(Some(self.0.len()))?;
        for keys in self.0 {
            let keys: Option<Vec<&str>> = (!keys.is_empty()).then(|| keys.iter().map(|key| &**key).collect());
            list.serialize_element(&keys)?;
        }
        list.end()
    }
}
