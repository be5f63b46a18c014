//! Identifiers and units that every layer shares.

use std::fmt;

/// A token id of the model's vocabulary, as the engine counts them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
#[repr(transparent)]
pub struct TokenId(pub u32);

/// Our keyed hash of the tokens of one full block, independent of what precedes it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
#[repr(transparent)]
pub struct BlockHash(pub u64);

/// Our keyed hash of a chain of blocks up to and including one block: equal hashes mean equal prefixes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
#[repr(transparent)]
pub struct SequenceHash(pub u64);

/// The engine's own name of a block. Opaque: a key for parents and removals, meaningful for one rank and incarnation.
///
/// Integer hashes are taken as they are (a signed one by its bits); byte hashes by their last eight bytes, big
/// endian, which is how vLLM makes its integers of them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
#[repr(transparent)]
pub struct EngineHash(pub u64);

/// One data-parallel rank of one replica: the unit that owns a KV cache and can be chosen. Dense, local to a pool.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
#[repr(transparent)]
pub struct RankId(pub u16);

impl RankId {
    /// The rank's place in a per-pool table.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Which of a pool's renderers makes the prompts of a replica: 0 is the pool's own. Another one is that of a part of the
/// fleet that runs another template already. Local to a pool.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
#[repr(transparent)]
pub struct Revision(pub u32);

/// The private id that HAProxy gives a request (`txn.kv_rid`), by which its end is recognised.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct RequestId(pub u128);

impl RequestId {
    /// Reads the id that HAProxy sent. A UUID is taken as its number; any other text by its 128-bit hash, so that a
    /// site that changes the snippet's `uuid()` still gets its bookings ended. Empty text is no id.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        if text.is_empty() {
            return None;
        }
        Some(Self(parse_uuid(text).unwrap_or_else(|| xxhash_rust::xxh3::xxh3_128(text))))
    }
}

fn parse_uuid(text: &[u8]) -> Option<u128> {
    if text.len() != 36 {
        return None;
    }
    let mut value = 0u128;
    for (at, byte) in text.iter().enumerate() {
        if matches!(at, 8 | 13 | 18 | 23) {
            if *byte != b'-' {
                return None;
            }
            continue;
        }
        let digit = char::from(*byte).to_digit(16)?;
        value = value << 4 | u128::from(digit);
    }
    Some(value)
}

impl fmt::Debug for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RequestId({:032x})", self.0)
    }
}

/// Where a replica keeps a block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Tier {
    /// The engine's own KV cache in device memory.
    Gpu,
    /// Host memory of the replica.
    Cpu,
    /// Disk or a store outside of the replica.
    Disk,
}

impl Tier {
    /// All tiers, nearest first.
    pub const ALL: [Self; 3] = [Self::Gpu, Self::Cpu, Self::Disk];

    /// The tier's place in a per-tier table.
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_its_number_and_other_text_its_hash() {
        let uuid = RequestId::parse(b"00000000-0000-0000-0000-0000000000ff").expect("a uuid");
        assert_eq!(uuid.0, 255);
        let other = RequestId::parse(b"not-a-uuid").expect("any text");
        assert_eq!(other, RequestId::parse(b"not-a-uuid").expect("any text"));
        assert_ne!(other, uuid);
        assert_eq!(RequestId::parse(b""), None);
    }
}
