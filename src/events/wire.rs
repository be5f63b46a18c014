//! The wire format of KV events: msgpack batches of vLLM and of the engines that copy it.
//!
//! A batch is an array `[timestamp, [event…], data-parallel rank]`; SGLang's older ones end before the rank. An event
//! is a map with its name under `type` (vLLM ≥ 0.24), or an array that starts with the name and leaves out trailing
//! fields (vLLM ≤ 0.23, SGLang). Fields may be absent or nil; those we do not know are passed over. Tokens become
//! block hashes as they are read. Whatever is wrong with one event costs that event alone.

use super::batch::{Batch, Entry, SkipReason};
use super::groups::Groups;
use super::msgpack::{Cursor, Fault};
use crate::hash::{HashKey, push_media_key, push_other_key};
use crate::units::{EngineHash, Tier};

/// Why a payload is no batch, or not a whole one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BatchError {
    /// The bytes end too early.
    #[error("the batch is cut short")]
    Truncated,
    /// Not an array of a timestamp and a list of events.
    #[error("not a batch of KV events")]
    NotABatch,
}

impl From<Fault> for BatchError {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Truncated => Self::Truncated,
            Fault::Type => Self::NotABatch,
        }
    }
}

impl From<Fault> for SkipReason {
    fn from(_: Fault) -> Self {
        Self::Malformed
    }
}

/// A field of an event that we use.
#[derive(Clone, Copy)]
enum Field {
    Hashes,
    Parent,
    Tokens,
    BlockTokens,
    Medium,
    LoraName,
    CacheSalt,
    ExtraKeys,
    Group,
    GroupKind,
    Locality,
    Other,
}

/// `BlockStored` as an array, after its tag: the order of vLLM 0.23, of which older ones are a prefix.
const STORED_FIELDS: [Field; 10] = [
    Field::Hashes,
    Field::Parent,
    Field::Tokens,
    Field::BlockTokens,
    Field::Other, // lora_id
    Field::Medium,
    Field::LoraName,
    Field::ExtraKeys,
    Field::Group,
    Field::GroupKind,
];

/// `BlockRemoved` as an array, after its tag.
const REMOVED_FIELDS: [Field; 3] = [Field::Hashes, Field::Medium, Field::Group];

impl Field {
    fn named(name: &[u8]) -> Self {
        match name {
            b"block_hashes" => Self::Hashes,
            b"parent_block_hash" => Self::Parent,
            b"token_ids" => Self::Tokens,
            b"block_size" => Self::BlockTokens,
            b"medium" => Self::Medium,
            b"lora_name" => Self::LoraName,
            b"cache_salt" => Self::CacheSalt,
            b"extra_keys" => Self::ExtraKeys,
            b"group_idx" => Self::Group,
            b"kv_cache_spec_kind" => Self::GroupKind,
            b"locality" => Self::Locality,
            _ => Self::Other,
        }
    }
}

/// Whether the batch's first event is a map (vLLM ≥ 0.24) rather than an array; `None` where there is none.
#[must_use]
pub fn has_named_fields(payload: &[u8]) -> Option<bool> {
    let mut cursor = Cursor::new(payload);
    cursor.array().ok()?;
    cursor.seconds().ok()?;
    (cursor.array().ok()? > 0).then(|| cursor.is_map())
}

#[derive(Clone, Copy)]
enum Kind {
    Stored,
    Removed,
    Cleared,
}

impl Kind {
    fn named(name: &[u8]) -> Result<Self, SkipReason> {
        match name {
            b"BlockStored" => Ok(Self::Stored),
            b"BlockRemoved" => Ok(Self::Removed),
            b"AllBlocksCleared" => Ok(Self::Cleared),
            _ => Err(SkipReason::UnknownEvent),
        }
    }
}

/// The fields of the event at hand; its hashes and tokens are in the batch already.
#[derive(Default)]
struct Fields<'a> {
    parent: Option<EngineHash>,
    block_tokens: u64,
    medium: &'a [u8],
    lora_name: Option<&'a str>,
    cache_salt: Option<&'a str>,
    extra_keys: Option<Cursor<'a>>,
    group: Option<u64>,
    group_kind: Option<&'a [u8]>,
    remote: bool,
}

impl Batch {
    /// Replaces this batch by the one in `payload`. `groups` is what the stream has told about its KV cache groups so
    /// far, and learns from this batch. Allocates only until the arenas have grown to the engine's batches.
    ///
    /// # Errors
    ///
    /// If `payload` is no batch or ends too early; the events before the fault are there.
    pub fn decode(&mut self, payload: &[u8], key: &HashKey, groups: &mut Groups) -> Result<(), BatchError> {
        self.clear();
        let mut cursor = Cursor::new(payload);
        let fields = cursor.array()?;
        if fields < 2 {
            return Err(BatchError::NotABatch);
        }
        self.timestamp_seconds = cursor.seconds()?;
        let events = cursor.array()?;
        let decoded = (0..events).try_for_each(|_| self.decode_event(&mut cursor, key, groups));
        self.window_groups = groups.has_window_groups();
        decoded?;
        if fields > 2 {
            self.rank = match cursor.uint() {
                Ok(rank) => u32::try_from(rank).ok(),
                Err(Fault::Type) => None,
                Err(Fault::Truncated) => return Err(BatchError::Truncated),
            };
        }
        Ok(())
    }

    fn decode_event(
        &mut self,
        cursor: &mut Cursor<'_>,
        key: &HashKey,
        groups: &mut Groups,
    ) -> Result<(), BatchError> {
        let start = *cursor;
        let (hashes, blocks) = (self.engine_hashes.len(), self.block_hashes.len());
        if let Err(reason) = self.read_event(cursor, key, groups) {
            self.engine_hashes.truncate(hashes);
            self.block_hashes.truncate(blocks);
            *cursor = start;
            cursor.skip()?;
            self.skip(reason);
        }
        Ok(())
    }

    fn read_event(
        &mut self,
        cursor: &mut Cursor<'_>,
        key: &HashKey,
        groups: &mut Groups,
    ) -> Result<(), SkipReason> {
        let first_hash = self.engine_hashes.len();
        self.tokens.clear();
        let mut fields = Fields::default();
        let kind = if cursor.is_map() {
            self.read_map(cursor, &mut fields)?
        } else {
            self.read_array(cursor, &mut fields)?
        };
        let entry = match kind {
            Kind::Cleared => Entry::Cleared,
            Kind::Removed => {
                if !groups.removal_counts(fields.group) {
                    return Err(SkipReason::WindowGroup);
                }
                let engine_hashes = first_hash..self.engine_hashes.len();
                if engine_hashes.is_empty() {
                    return Err(SkipReason::Empty);
                }
                Entry::Removed { tier: fields.tier()?, engine_hashes }
            }
            Kind::Stored => {
                if !groups.store_counts(fields.group_kind, fields.group) {
                    return Err(SkipReason::WindowGroup);
                }
                self.stored(first_hash, &fields, key)?
            }
        };
        self.entries.push(entry);
        Ok(())
    }

    fn read_map<'a>(&mut self, cursor: &mut Cursor<'a>, fields: &mut Fields<'a>) -> Result<Kind, SkipReason> {
        let mut kind = Err(SkipReason::Malformed);
        for _ in 0..cursor.map()? {
            match cursor.str_bytes()? {
                b"type" => kind = Kind::named(cursor.str_bytes()?),
                name => self.read_field(Field::named(name), cursor, fields)?,
            }
        }
        kind
    }

    fn read_array<'a>(
        &mut self,
        cursor: &mut Cursor<'a>,
        fields: &mut Fields<'a>,
    ) -> Result<Kind, SkipReason> {
        let count = cursor.array()?.checked_sub(1).ok_or(SkipReason::Malformed)?;
        let kind = Kind::named(cursor.str_bytes()?)?;
        let order: &[Field] = match kind {
            Kind::Stored => &STORED_FIELDS,
            Kind::Removed => &REMOVED_FIELDS,
            Kind::Cleared => &[],
        };
        for position in 0..count {
            let field = order.get(position).copied().unwrap_or(Field::Other);
            if matches!(field, Field::LoraName) && cursor.is_map() {
                self.read_metadata(cursor, fields)?;
            } else {
                self.read_field(field, cursor, fields)?;
            }
        }
        Ok(kind)
    }

    /// SGLang's arrays carry a map of named fields where vLLM has the LoRA name.
    fn read_metadata<'a>(
        &mut self,
        cursor: &mut Cursor<'a>,
        fields: &mut Fields<'a>,
    ) -> Result<(), SkipReason> {
        for _ in 0..cursor.map()? {
            let field = match Field::named(cursor.str_bytes()?) {
                field @ (Field::LoraName | Field::CacheSalt) => field,
                _ => Field::Other,
            };
            self.read_field(field, cursor, fields)?;
        }
        Ok(())
    }

    fn read_field<'a>(
        &mut self,
        field: Field,
        cursor: &mut Cursor<'a>,
        fields: &mut Fields<'a>,
    ) -> Result<(), Fault> {
        if cursor.nil() {
            return Ok(());
        }
        match field {
            Field::Hashes => {
                for _ in 0..cursor.array()? {
                    self.engine_hashes.push(cursor.engine_hash()?);
                }
            }
            Field::Parent => fields.parent = Some(cursor.engine_hash()?),
            Field::Tokens => cursor.tokens_into(&mut self.tokens)?,
            Field::BlockTokens => fields.block_tokens = cursor.uint()?,
            Field::Medium => fields.medium = cursor.str_bytes()?,
            Field::LoraName => fields.lora_name = Some(cursor.str()?).filter(|name| !name.is_empty()),
            Field::CacheSalt => fields.cache_salt = Some(cursor.str()?).filter(|salt| !salt.is_empty()),
            Field::ExtraKeys => {
                fields.extra_keys = Some(*cursor);
                cursor.skip()?;
            }
            Field::Group => fields.group = Some(cursor.uint()?),
            Field::GroupKind => fields.group_kind = Some(cursor.str_bytes()?),
            Field::Locality => fields.remote = cursor.str_bytes()? == b"REMOTE",
            Field::Other => cursor.skip()?,
        }
        Ok(())
    }

    fn stored(&mut self, first_hash: usize, fields: &Fields<'_>, key: &HashKey) -> Result<Entry, SkipReason> {
        let engine_hashes = first_hash..self.engine_hashes.len();
        let blocks = engine_hashes.len();
        if blocks == 0 {
            return Err(SkipReason::Empty);
        }
        let tier = fields.tier()?;
        let named = self.engine_hashes.get(engine_hashes.clone()).unwrap_or_default();
        if fields.parent.is_some_and(|parent| named.contains(&parent)) {
            return Err(SkipReason::OwnParent);
        }
        let first_block = self.block_hashes.len();
        if let Some(name) = fields.lora_name {
            self.see_adapter(name);
        }
        let mut salt = fields.cache_salt;
        // vLLM's CPU stores name their blocks without tokens, unless told to describe themselves.
        if !self.tokens.is_empty() {
            let block_tokens = usize::try_from(fields.block_tokens).unwrap_or(0);
            if block_tokens == 0 || blocks.checked_mul(block_tokens) != Some(self.tokens.len()) {
                return Err(SkipReason::LengthMismatch);
            }
            self.block_tokens = u32::try_from(block_tokens).ok();
            match fields.extra_keys {
                None => {
                    self.block_hashes.extend(self.tokens.chunks_exact(block_tokens).map(|t| key.block(t)))
                }
                Some(keys) => {
                    self.hash_with_extra_keys(keys, blocks, block_tokens, fields, &mut salt, key)?
                }
            }
        }
        if tier == Tier::Cpu {
            let blocks = u32::try_from(blocks).unwrap_or(1);
            self.cpu_chunk_blocks =
                Some(self.cpu_chunk_blocks.map_or(blocks, |chunk| common_divisor(chunk, blocks)));
        }
        Ok(Entry::Stored {
            tier,
            parent: fields.parent,
            root: key.root(fields.lora_name, salt),
            engine_hashes,
            block_hashes: first_block..self.block_hashes.len(),
        })
    }

    /// Hashes the blocks of an event that has `extra_keys`: nil or a list for each block, what it depends on besides
    /// its tokens. vLLM does not tag the list's elements. The LoRA name stands in every block's list and the cache
    /// salt, a string too, in that of a chain's first block; both belong to the root. What else there is (items
    /// of media with their offsets, digests of embeddings) belongs to the block.
    fn hash_with_extra_keys<'a>(
        &mut self,
        mut keys: Cursor<'a>,
        blocks: usize,
        block_tokens: usize,
        fields: &Fields<'a>,
        salt: &mut Option<&'a str>,
        key: &HashKey,
    ) -> Result<(), SkipReason> {
        if keys.array()? != blocks {
            return Err(SkipReason::LengthMismatch);
        }
        for (at, tokens) in self.tokens.chunks_exact(block_tokens).enumerate() {
            self.extra.clear();
            let mut lora_name = fields.lora_name;
            let mut takes_salt = at == 0 && fields.parent.is_none() && salt.is_none();
            for _ in 0..keys.optional(Cursor::array)?.unwrap_or(0) {
                let start = keys;
                if keys.is_str() {
                    let text = keys.str()?;
                    if lora_name == Some(text) {
                        lora_name = None;
                        continue;
                    }
                    if takes_salt {
                        takes_salt = false;
                        *salt = Some(text);
                        continue;
                    }
                } else if let Ok((item, offset)) = media_key(&mut keys) {
                    push_media_key(item, offset, &mut self.extra);
                    continue;
                } else {
                    keys = start;
                    keys.skip()?;
                }
                push_other_key(keys.since(start), &mut self.extra);
            }
            self.block_hashes.push(if self.extra.is_empty() {
                key.block(tokens)
            } else {
                key.block_with_extra(tokens, &self.extra)
            });
        }
        Ok(())
    }
}

impl Fields<'_> {
    /// Where the event's blocks are: vLLM's `medium` (absent means the GPU) and `locality`, SGLang's tiers.
    fn tier(&self) -> Result<Tier, SkipReason> {
        const MEDIA: [(&[u8], Tier); 15] = [
            (b"GPU", Tier::Gpu),
            (b"DEVICE", Tier::Gpu),
            (b"CPU", Tier::Cpu),
            (b"CPU_PINNED", Tier::Cpu),
            (b"CPU_TIER1", Tier::Cpu),
            (b"HOST", Tier::Cpu),
            (b"CPU_TIER2", Tier::Disk),
            (b"DISK", Tier::Disk),
            (b"NVME", Tier::Disk),
            (b"STORAGE", Tier::Disk),
            (b"FS", Tier::Disk),
            (b"OBJ", Tier::Disk),
            (b"EXTERNAL", Tier::Disk),
            (b"REMOTE", Tier::Disk),
            (b"SHARED", Tier::Disk),
        ];
        let tier = if self.medium.is_empty() {
            Tier::Gpu
        } else {
            let known = MEDIA.iter().find(|(name, _)| self.medium.eq_ignore_ascii_case(name));
            known.map(|(_, tier)| *tier).ok_or(SkipReason::UnknownMedium)?
        };
        Ok(if self.remote { Tier::Disk } else { tier })
    }
}

/// An item of media and where it begins in the block.
fn media_key<'a>(keys: &mut Cursor<'a>) -> Result<(&'a str, i64), Fault> {
    if keys.array()? != 2 {
        return Err(Fault::Type);
    }
    Ok((keys.str()?, keys.int()?))
}

fn common_divisor(mut a: u32, mut b: u32) -> u32 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests;
