//! Typed data (SPOE.txt §3.1): the values of arguments, variables and HELLO items.

use super::error::DecodeError;
use super::varint::{put_varint, varint};
use bytes::BufMut;
use nom::{
    IResult, Parser,
    bytes::complete::take,
    number::complete::{be_u32, be_u128, u8 as byte},
};
use std::net::{Ipv4Addr, Ipv6Addr};

/// The type is in the low half of the first byte, the flags are in the high one: the other way round than the picture
/// in SPOE.txt suggests (`SPOP_DATA_T_MASK` in HAProxy's `spoe-t.h`).
const TYPE_MASK: u8 = 0x0F;
/// The flag of a boolean that is true.
const TRUE: u8 = 0x10;

/// One value, borrowed from the bytes it came in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Value<'a> {
    /// No value: HAProxy had none for the argument.
    #[default]
    Null,
    /// True or false.
    Bool(bool),
    /// 32 bits, signed.
    Int32(i32),
    /// 32 bits, unsigned.
    UInt32(u32),
    /// 64 bits, signed: what HAProxy sends for its integers.
    Int64(i64),
    /// 64 bits, unsigned.
    UInt64(u64),
    /// An IPv4 address.
    Ipv4(Ipv4Addr),
    /// An IPv6 address.
    Ipv6(Ipv6Addr),
    /// Text. HAProxy does not promise UTF-8: a path or a header is what the client sent.
    String(&'a [u8]),
    /// Bytes: what HAProxy sends for `req.body`.
    Binary(&'a [u8]),
}

impl<'a> Value<'a> {
    /// The text, if it is text or bytes in UTF-8.
    #[must_use]
    pub fn as_str(&self) -> Option<&'a str> {
        std::str::from_utf8(self.as_bytes()?).ok()
    }

    /// The bytes of text or of bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> Option<&'a [u8]> {
        match self {
            Self::String(bytes) | Self::Binary(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// The truth value.
    #[must_use]
    pub const fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// The number, of any integer type, unless it is negative.
    #[must_use]
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::Int32(value) => u64::try_from(value).ok(),
            Self::UInt32(value) => Some(value.into()),
            Self::Int64(value) => u64::try_from(value).ok(),
            Self::UInt64(value) => Some(value),
            _ => None,
        }
    }

    /// Whether there is no value.
    #[must_use]
    pub const fn is_null(&self) -> bool {
        matches!(self, Self::Null)
    }
}

impl From<bool> for Value<'_> {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl From<u32> for Value<'_> {
    fn from(value: u32) -> Self {
        Self::UInt32(value)
    }
}

impl From<u64> for Value<'_> {
    fn from(value: u64) -> Self {
        Self::UInt64(value)
    }
}

impl From<i64> for Value<'_> {
    fn from(value: i64) -> Self {
        Self::Int64(value)
    }
}

impl<'a> From<&'a str> for Value<'a> {
    fn from(value: &'a str) -> Self {
        Self::String(value.as_bytes())
    }
}

/// Reads a length and as many bytes.
///
/// # Errors
///
/// [`DecodeError::Truncated`] where the length is more than what is there.
pub fn string(input: &[u8]) -> IResult<&[u8], &[u8], DecodeError> {
    let (rest, length) = varint(input)?;
    take(usize::try_from(length).unwrap_or(usize::MAX)).parse(rest)
}

/// Reads one value. Flags other than a boolean's are ignored, as HAProxy does.
///
/// # Errors
///
/// [`DecodeError::UnknownType`] for the reserved types, and those of [`string`] and [`varint`].
pub fn value(input: &[u8]) -> IResult<&[u8], Value<'_>, DecodeError> {
    let (rest, tag) = byte.parse(input)?;
    match tag & TYPE_MASK {
        0 => Ok((rest, Value::Null)),
        1 => Ok((rest, Value::Bool(tag & TRUE != 0))),
        // A negative number travels as its 64-bit two's complement, whatever its type says.
        2 => varint.map(|value| Value::Int32(value as i32)).parse(rest),
        3 => varint.map(|value| Value::UInt32(value as u32)).parse(rest),
        4 => varint.map(|value| Value::Int64(value as i64)).parse(rest),
        5 => varint.map(Value::UInt64).parse(rest),
        6 => be_u32.map(|address| Value::Ipv4(Ipv4Addr::from_bits(address))).parse(rest),
        7 => be_u128.map(|address| Value::Ipv6(Ipv6Addr::from_bits(address))).parse(rest),
        8 => string.map(Value::String).parse(rest),
        9 => string.map(Value::Binary).parse(rest),
        reserved => Err(nom::Err::Failure(DecodeError::UnknownType(reserved))),
    }
}

/// Writes a length and the bytes.
pub fn put_string(out: &mut impl BufMut, bytes: &[u8]) {
    put_varint(out, bytes.len() as u64);
    out.put_slice(bytes);
}

/// Writes one value.
pub fn put_value(out: &mut impl BufMut, value: &Value<'_>) {
    match *value {
        Value::Null => out.put_u8(0),
        Value::Bool(value) => out.put_u8(if value { 1 | TRUE } else { 1 }),
        Value::Int32(value) => {
            out.put_u8(2);
            put_varint(out, i64::from(value) as u64);
        }
        Value::UInt32(value) => {
            out.put_u8(3);
            put_varint(out, value.into());
        }
        Value::Int64(value) => {
            out.put_u8(4);
            put_varint(out, value as u64);
        }
        Value::UInt64(value) => {
            out.put_u8(5);
            put_varint(out, value);
        }
        Value::Ipv4(address) => {
            out.put_u8(6);
            out.put_slice(&address.octets());
        }
        Value::Ipv6(address) => {
            out.put_u8(7);
            out.put_slice(&address.octets());
        }
        Value::String(bytes) => {
            out.put_u8(8);
            put_string(out, bytes);
        }
        Value::Binary(bytes) => {
            out.put_u8(9);
            put_string(out, bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encoded(value: &Value<'_>) -> Vec<u8> {
        let mut out = Vec::new();
        put_value(&mut out, value);
        out
    }

    #[test]
    fn each_type_has_the_bytes_of_the_specification() {
        let cases: [(Value<'_>, &[u8]); 11] = [
            (Value::Null, &[0x00]),
            (Value::Bool(false), &[0x01]),
            (Value::Bool(true), &[0x11]),
            (Value::Int32(-1), &[0x02, 0xFF, 0xF0, 0xFE, 0xFE, 0xFE, 0xFE, 0xFE, 0xFE, 0xFE, 0x0E]),
            (Value::UInt32(7), &[0x03, 0x07]),
            (Value::Int64(240), &[0x04, 0xF0, 0x00]),
            (Value::UInt64(2_288), &[0x05, 0xF0, 0x80, 0x00]),
            (Value::Ipv4(Ipv4Addr::new(192, 0, 2, 1)), &[0x06, 192, 0, 2, 1]),
            (Value::Ipv6(Ipv6Addr::LOCALHOST), &[0x07, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]),
            (Value::String(b"kv"), &[0x08, 0x02, b'k', b'v']),
            (Value::Binary(&[0, 255]), &[0x09, 0x02, 0, 255]),
        ];
        for (typed, bytes) in cases {
            assert_eq!(encoded(&typed), bytes, "{typed:?}");
            assert_eq!(value(bytes), Ok((&[][..], typed)));
        }
    }

    #[test]
    fn reserved_types_are_refused_and_stray_flags_ignored() {
        for reserved in 10..=15 {
            assert_eq!(value(&[reserved]), Err(nom::Err::Failure(DecodeError::UnknownType(reserved))));
        }
        assert_eq!(value(&[0xF0]), Ok((&[][..], Value::Null)));
        assert_eq!(value(&[0xE1]), Ok((&[][..], Value::Bool(false))));
    }

    #[test]
    fn a_forged_length_is_truncation() {
        let mut bytes = vec![0x09];
        put_varint(&mut bytes, u64::MAX);
        assert_eq!(value(&bytes), Err(nom::Err::Error(DecodeError::Truncated)));
        assert_eq!(value(&[0x08, 3, b'a', b'b']), Err(nom::Err::Error(DecodeError::Truncated)));
    }

    #[test]
    fn accessors_take_what_fits_and_nothing_else() {
        assert_eq!(Value::Int64(-1).as_u64(), None);
        assert_eq!(Value::Int32(5).as_u64(), Some(5));
        assert_eq!(Value::UInt64(u64::MAX).as_u64(), Some(u64::MAX));
        assert_eq!(Value::String(b"5").as_u64(), None);
        assert_eq!(Value::Binary(b"body").as_str(), Some("body"));
        assert_eq!(Value::String(&[0xFF]).as_str(), None);
        assert_eq!(Value::String(&[0xFF]).as_bytes(), Some(&[0xFF][..]));
        assert_eq!(Value::Null.as_bytes(), None);
        assert_eq!(Value::Bool(true).as_bool(), Some(true));
        assert!(Value::Null.is_null());
    }

    proptest! {
        #[test]
        fn any_bytes_do_no_harm(bytes: Vec<u8>) {
            let _ = value(&bytes);
        }

        #[test]
        fn integers_survive(a: i32, b: u32, c: i64, d: u64) {
            for typed in [Value::Int32(a), Value::UInt32(b), Value::Int64(c), Value::UInt64(d)] {
                let bytes = encoded(&typed);
                prop_assert_eq!(value(&bytes), Ok((&[][..], typed)));
            }
        }
    }
}
