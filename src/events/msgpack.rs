//! A cursor over msgpack bytes: reads what KV events are made of, borrows instead of copying, and never allocates by
//! what a length claims.

use crate::units::{EngineHash, TokenId};

/// Why a value could not be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fault {
    /// The bytes end within the value.
    Truncated,
    /// The value is of another type, or out of range.
    Type,
}

/// What is left to read. A clone is a bookmark.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cursor<'a> {
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// The bytes between an earlier bookmark of this cursor and here.
    pub(super) fn since(&self, earlier: Self) -> &'a [u8] {
        let read = earlier.rest.len().saturating_sub(self.rest.len());
        earlier.rest.get(..read).unwrap_or_default()
    }

    fn peek(&self) -> Result<u8, Fault> {
        self.rest.first().copied().ok_or(Fault::Truncated)
    }

    fn byte(&mut self) -> Result<u8, Fault> {
        let (first, rest) = self.rest.split_first().ok_or(Fault::Truncated)?;
        self.rest = rest;
        Ok(*first)
    }

    fn take(&mut self, bytes: usize) -> Result<&'a [u8], Fault> {
        let (head, rest) = self.rest.split_at_checked(bytes).ok_or(Fault::Truncated)?;
        self.rest = rest;
        Ok(head)
    }

    fn array_of<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        let (head, rest) = self.rest.split_first_chunk().ok_or(Fault::Truncated)?;
        self.rest = rest;
        Ok(*head)
    }

    fn be_u8(&mut self) -> Result<u64, Fault> {
        self.byte().map(u64::from)
    }

    fn be_u16(&mut self) -> Result<u64, Fault> {
        self.array_of().map(|b| u64::from(u16::from_be_bytes(b)))
    }

    fn be_u32(&mut self) -> Result<u64, Fault> {
        self.array_of().map(|b| u64::from(u32::from_be_bytes(b)))
    }

    fn be_u64(&mut self) -> Result<u64, Fault> {
        self.array_of().map(u64::from_be_bytes)
    }

    /// A length that a header claims: as `usize`, and no more than what is left could hold.
    fn claimed(&self, length: u64, least_bytes_each: usize) -> Result<usize, Fault> {
        let length = usize::try_from(length).map_err(|_| Fault::Truncated)?;
        match length.checked_mul(least_bytes_each) {
            Some(bytes) if bytes <= self.rest.len() => Ok(length),
            _ => Err(Fault::Truncated),
        }
    }

    /// Reads nil, if that is what comes next.
    pub(super) fn nil(&mut self) -> bool {
        let nil = self.peek() == Ok(0xc0);
        if nil {
            self.rest = &self.rest[1..];
        }
        nil
    }

    /// nil as `None`, or a value read by `read`.
    pub(super) fn optional<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T, Fault>,
    ) -> Result<Option<T>, Fault> {
        if self.nil() { Ok(None) } else { read(self).map(Some) }
    }

    pub(super) fn is_map(&self) -> bool {
        matches!(self.peek(), Ok(0x80..=0x8f | 0xde | 0xdf))
    }

    pub(super) fn is_str(&self) -> bool {
        matches!(self.peek(), Ok(0xa0..=0xbf | 0xd9..=0xdb))
    }

    /// The number of elements of an array that follows; at most one for each byte left.
    pub(super) fn array(&mut self) -> Result<usize, Fault> {
        let length = match self.byte()? {
            tag @ 0x90..=0x9f => u64::from(tag & 0x0f),
            0xdc => self.be_u16()?,
            0xdd => self.be_u32()?,
            _ => return Err(Fault::Type),
        };
        self.claimed(length, 1)
    }

    /// The number of pairs of a map that follows; at most one for each two bytes left.
    pub(super) fn map(&mut self) -> Result<usize, Fault> {
        let length = match self.byte()? {
            tag @ 0x80..=0x8f => u64::from(tag & 0x0f),
            0xde => self.be_u16()?,
            0xdf => self.be_u32()?,
            _ => return Err(Fault::Type),
        };
        self.claimed(length, 2)
    }

    /// The bytes of a string, not checked to be UTF-8.
    pub(super) fn str_bytes(&mut self) -> Result<&'a [u8], Fault> {
        let length = match self.byte()? {
            tag @ 0xa0..=0xbf => u64::from(tag & 0x1f),
            0xd9 => self.be_u8()?,
            0xda => self.be_u16()?,
            0xdb => self.be_u32()?,
            _ => return Err(Fault::Type),
        };
        let length = self.claimed(length, 1)?;
        self.take(length)
    }

    pub(super) fn str(&mut self) -> Result<&'a str, Fault> {
        std::str::from_utf8(self.str_bytes()?).map_err(|_| Fault::Type)
    }

    /// An integer that is not negative.
    pub(super) fn uint(&mut self) -> Result<u64, Fault> {
        let bookmark = *self;
        let bits = self.int_bits()?;
        let signed = matches!(bookmark.peek(), Ok(0xd0..=0xd3 | 0xe0..=0xff));
        if signed && bits > i64::MAX as u64 { Err(Fault::Type) } else { Ok(bits) }
    }

    /// An integer of 64 bits with a sign.
    pub(super) fn int(&mut self) -> Result<i64, Fault> {
        let is_large = self.peek()? == 0xcf;
        let number = self.int_bits()? as i64;
        if is_large && number < 0 { Err(Fault::Type) } else { Ok(number) }
    }

    /// Any integer; a negative one by its two's complement.
    fn int_bits(&mut self) -> Result<u64, Fault> {
        Ok(match self.byte()? {
            tag @ 0x00..=0x7f => u64::from(tag),
            tag @ 0xe0..=0xff => i64::from(tag as i8) as u64,
            0xcc => self.be_u8()?,
            0xcd => self.be_u16()?,
            0xce => self.be_u32()?,
            0xcf => self.be_u64()?,
            0xd0 => i64::from(self.be_u8()? as i8) as u64,
            0xd1 => i64::from(self.be_u16()? as i16) as u64,
            0xd2 => i64::from(self.be_u32()? as i32) as u64,
            0xd3 => self.be_u64()?,
            _ => return Err(Fault::Type),
        })
    }

    /// A number as seconds: float or integer.
    pub(super) fn seconds(&mut self) -> Result<f64, Fault> {
        match self.peek()? {
            0xca => {
                self.byte()?;
                self.array_of().map(|b| f64::from(f32::from_be_bytes(b)))
            }
            0xcb => {
                self.byte()?;
                self.array_of().map(f64::from_be_bytes)
            }
            _ => self.uint().map(|seconds| seconds as f64),
        }
    }

    /// An engine's block hash: any integer, or bytes of which the last eight count (see [`EngineHash`]).
    pub(super) fn engine_hash(&mut self) -> Result<EngineHash, Fault> {
        let length = match self.peek()? {
            0xcf => {
                self.byte()?;
                return self.be_u64().map(EngineHash);
            }
            0xc4 => self.byte().and_then(|_| self.be_u8())?,
            0xc5 => self.byte().and_then(|_| self.be_u16())?,
            0xc6 => self.byte().and_then(|_| self.be_u32())?,
            _ => return self.int_bits().map(EngineHash),
        };
        let length = self.claimed(length, 1)?;
        match self.take(length)?.last_chunk() {
            Some(last) => Ok(EngineHash(u64::from_be_bytes(*last))),
            None => Err(Fault::Type),
        }
    }

    /// Reads an array of token ids into `tokens`, whose former content goes. This is where decoding spends its time:
    /// the encodings of real vocabularies are tried first.
    pub(super) fn tokens_into(&mut self, tokens: &mut Vec<TokenId>) -> Result<(), Fault> {
        let count = self.array()?;
        let mut rest = self.rest;
        let mut fault = None;
        let read = |_| {
            if let Some([tag, bytes @ ..]) = rest.first_chunk::<5>() {
                // Two or four bytes, without a branch that depends on which: vocabularies mix both at random.
                let wide = tag.wrapping_sub(0xcd);
                if wide < 2 {
                    rest = &rest[3 + 2 * usize::from(wide)..];
                    return TokenId(u32::from_be_bytes(*bytes) >> (16 * (1 - wide)));
                }
            }
            let mut cursor = Cursor { rest };
            let token = cursor.uint().and_then(|token| u32::try_from(token).map_err(|_| Fault::Type));
            rest = cursor.rest;
            TokenId(token.unwrap_or_else(|reason| {
                fault.get_or_insert(reason);
                0
            }))
        };
        tokens.clear();
        tokens.extend((0..count).map(read));
        self.rest = rest;
        fault.map_or(Ok(()), Err)
    }

    /// Passes over one value of any type and depth, without recursion.
    pub(super) fn skip(&mut self) -> Result<(), Fault> {
        let mut values = 1;
        while values > 0 {
            values -= 1;
            let (bytes, children) = match self.byte()? {
                0x00..=0x7f | 0xc0 | 0xc2 | 0xc3 | 0xe0..=0xff => (0, 0),
                0xc1 => return Err(Fault::Type),
                tag @ 0x80..=0x8f => (0, 2 * u64::from(tag & 0x0f)),
                tag @ 0x90..=0x9f => (0, u64::from(tag & 0x0f)),
                tag @ 0xa0..=0xbf => (u64::from(tag & 0x1f), 0),
                0xc4 | 0xd9 => (self.be_u8()?, 0),
                0xc5 | 0xda => (self.be_u16()?, 0),
                0xc6 | 0xdb => (self.be_u32()?, 0),
                0xc7 => (self.be_u8()? + 1, 0),
                0xc8 => (self.be_u16()? + 1, 0),
                0xc9 => (self.be_u32()? + 1, 0),
                0xcc | 0xd0 => (1, 0),
                0xcd | 0xd1 => (2, 0),
                0xca | 0xce | 0xd2 => (4, 0),
                0xcb | 0xcf | 0xd3 => (8, 0),
                tag @ 0xd4..=0xd8 => (1 + (1 << (tag - 0xd4)), 0),
                0xdc => (0, self.be_u16()?),
                0xdd => (0, self.be_u32()?),
                0xde => (0, 2 * self.be_u16()?),
                0xdf => (0, 2 * self.be_u32()?),
            };
            let bytes = self.claimed(bytes, 1)?;
            self.take(bytes)?;
            values += usize::try_from(children).map_err(|_| Fault::Truncated)?;
            if values > self.rest.len() {
                return Err(Fault::Truncated);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_of_every_width_are_read() {
        for value in [0u64, 127, 128, 255, 256, 65_535, 65_536, u64::from(u32::MAX), 1 << 63, u64::MAX] {
            let bytes = rmp_serde::to_vec(&value).expect("encodes");
            assert_eq!(Cursor::new(&bytes).uint(), Ok(value));
            assert_eq!(Cursor::new(&bytes).engine_hash(), Ok(EngineHash(value)));
        }
        for value in [-1i64, -32, -33, -128, -129, -40_000, i64::MIN] {
            let bytes = rmp_serde::to_vec(&value).expect("encodes");
            assert_eq!(Cursor::new(&bytes).uint(), Err(Fault::Type), "{value}");
            assert_eq!(Cursor::new(&bytes).engine_hash(), Ok(EngineHash(value as u64)));
        }
    }

    #[test]
    fn byte_hashes_count_by_their_last_eight_bytes() {
        let mut hash = [0u8; 32];
        hash[31] = 7;
        hash[24] = 1;
        let bytes = rmp_serde::to_vec(serde_bytes::Bytes::new(&hash)).expect("encodes");
        assert_eq!(Cursor::new(&bytes).engine_hash(), Ok(EngineHash(1 << 56 | 7)));
        let short = rmp_serde::to_vec(serde_bytes::Bytes::new(&[1, 2, 3])).expect("encodes");
        assert_eq!(Cursor::new(&short).engine_hash(), Err(Fault::Type));
    }

    #[test]
    fn a_length_beyond_the_bytes_is_refused_before_anything_is_reserved() {
        let mut tokens = Vec::new();
        assert_eq!(
            Cursor::new(&[0xdd, 0xff, 0xff, 0xff, 0xff, 1]).tokens_into(&mut tokens),
            Err(Fault::Truncated)
        );
        assert_eq!(tokens.capacity(), 0);
        assert_eq!(Cursor::new(&[0xdf, 0xff, 0xff, 0xff, 0xff, 1]).map(), Err(Fault::Truncated));
        assert_eq!(Cursor::new(&[0xdb, 0xff, 0xff, 0xff, 0xff, 1]).str_bytes(), Err(Fault::Truncated));
        assert_eq!(Cursor::new(&[0xc6, 0xff, 0xff, 0xff, 0xff, 1]).skip(), Err(Fault::Truncated));
    }

    #[test]
    fn a_million_nested_arrays_are_skipped_without_recursion() {
        let mut bytes = vec![0x91; 1_000_000];
        bytes.push(0xc0);
        bytes.push(0x2a);
        let mut cursor = Cursor::new(&bytes);
        assert_eq!(cursor.skip(), Ok(()));
        assert_eq!(cursor.uint(), Ok(42));
    }
}
