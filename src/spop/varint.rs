//! Variable-length integers, in the encoding of HAProxy's peers protocol (SPOE.txt §3.1).

use super::error::DecodeError;
use bytes::BufMut;
use nom::{IResult, Parser, number::complete::u8 as byte};

/// The longest encoding of a 64-bit integer: four bits in the first byte, then seven in each.
pub const MAX_BYTES: usize = 10;

/// Reads an integer. A longer encoding than needed is taken, as HAProxy does; one that does not fit into 64 bits is not.
///
/// # Errors
///
/// [`DecodeError::Truncated`], [`DecodeError::IntegerTooLong`].
pub fn varint(input: &[u8]) -> IResult<&[u8], u64, DecodeError> {
    let (mut rest, first) = byte.parse(input)?;
    let mut value = u64::from(first);
    if first < 0xF0 {
        return Ok((rest, value));
    }
    for shift in (4..).step_by(7).take(MAX_BYTES - 1) {
        let (after, next) = byte.parse(rest)?;
        rest = after;
        let part = u64::from(next);
        value = part
            .checked_mul(1 << shift)
            .and_then(|part| value.checked_add(part))
            .ok_or(nom::Err::Failure(DecodeError::IntegerTooLong))?;
        if next < 0x80 {
            return Ok((rest, value));
        }
    }
    Err(nom::Err::Failure(DecodeError::IntegerTooLong))
}

/// Writes an integer in its shortest form.
pub fn put_varint(out: &mut impl BufMut, value: u64) {
    if value < 0xF0 {
        out.put_u8(value as u8);
        return;
    }
    out.put_u8(value as u8 | 0xF0);
    let mut rest = (value - 0xF0) >> 4;
    while rest >= 0x80 {
        out.put_u8(rest as u8 | 0x80);
        rest = (rest - 0x80) >> 7;
    }
    out.put_u8(rest as u8);
}

/// The number of bytes that [`put_varint`] writes.
#[must_use]
pub const fn varint_len(value: u64) -> usize {
    if value < 0xF0 {
        return 1;
    }
    let mut length = 2;
    let mut rest = (value - 0xF0) >> 4;
    while rest >= 0x80 {
        length += 1;
        rest = (rest - 0x80) >> 7;
    }
    length
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encoded(value: u64) -> Vec<u8> {
        let mut out = Vec::new();
        put_varint(&mut out, value);
        out
    }

    #[test]
    fn lengths_change_where_the_specification_says() {
        for (value, length) in [
            (0, 1),
            (239, 1),
            (240, 2),
            (2_287, 2),
            (2_288, 3),
            (264_431, 3),
            (264_432, 4),
            (33_818_863, 4),
            (33_818_864, 5),
            (4_328_786_159, 5),
            (4_328_786_160, 6),
            (u64::MAX, 10),
        ] {
            assert_eq!(encoded(value).len(), length, "{value}");
            assert_eq!(varint_len(value), length, "{value}");
        }
    }

    #[test]
    fn known_encodings() {
        assert_eq!(encoded(239), [0xEF]);
        assert_eq!(encoded(240), [0xF0, 0x00]);
        assert_eq!(encoded(2_287), [0xFF, 0x7F]);
        assert_eq!(encoded(2_288), [0xF0, 0x80, 0x00]);
        assert_eq!(encoded(16_380), [0xFC, 0xF0, 0x06]);
    }

    #[test]
    fn an_integer_above_64_bits_is_refused() {
        let too_long = [0xFF; 11];
        assert_eq!(varint(&too_long), Err(nom::Err::Failure(DecodeError::IntegerTooLong)));
        // Ten bytes whose last one carries more than the four bits that are left.
        let mut overflow = encoded(u64::MAX);
        overflow[9] += 1;
        assert_eq!(varint(&overflow), Err(nom::Err::Failure(DecodeError::IntegerTooLong)));
    }

    #[test]
    fn a_cut_integer_is_truncated() {
        let whole = encoded(u64::MAX);
        for cut in 0..whole.len() {
            assert_eq!(varint(&whole[..cut]), Err(nom::Err::Error(DecodeError::Truncated)));
        }
    }

    proptest! {
        #[test]
        fn any_integer_survives(value: u64, tail: Vec<u8>) {
            let mut bytes = encoded(value);
            prop_assert_eq!(bytes.len(), varint_len(value));
            bytes.extend(&tail);
            prop_assert_eq!(varint(&bytes), Ok((tail.as_slice(), value)));
        }

        #[test]
        fn any_bytes_do_no_harm(bytes: Vec<u8>) {
            let _ = varint(&bytes);
        }
    }
}
