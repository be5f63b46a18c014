//! Frame headers (SPOE.txt §3.2): type, flags, stream-id and frame-id.

use super::error::DecodeError;
use super::varint::{self, put_varint, varint, varint_len};
use bytes::BufMut;
use nom::{
    IResult, Parser,
    number::complete::{be_u32, u8 as byte},
};

/// The bytes of the length that stands before each frame and is not part of it.
pub const LENGTH_BYTES: usize = 4;
/// The shortest frame: type, flags, and one byte for each id. A shorter one made HAProxy 2.9 spin.
pub const MIN_FRAME_BYTES: usize = 1 + 4 + 1 + 1;
/// The longest header: both ids of 64 bits.
pub const MAX_HEADER_BYTES: usize = 1 + 4 + 2 * varint::MAX_BYTES;
/// The least `max-frame-size` that a peer may ask for (SPOE.txt §3.2, "IMPORTANT").
pub const MIN_MAX_FRAME_SIZE: u32 = 256;

/// What a frame is (SPOE.txt §3.2.2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FrameType {
    /// Goes on with a fragmented payload.
    Unset,
    /// HAProxy opens the connection.
    HaproxyHello,
    /// HAProxy ends the connection.
    HaproxyDisconnect,
    /// HAProxy asks.
    Notify,
    /// The agent's part of the handshake.
    AgentHello,
    /// The agent ends the connection.
    AgentDisconnect,
    /// The agent answers.
    Ack,
    /// A type that is not specified: to be skipped.
    Unknown(u8),
}

impl FrameType {
    /// The type of a number.
    #[must_use]
    pub const fn from_code(code: u8) -> Self {
        match code {
            0 => Self::Unset,
            1 => Self::HaproxyHello,
            2 => Self::HaproxyDisconnect,
            3 => Self::Notify,
            101 => Self::AgentHello,
            102 => Self::AgentDisconnect,
            103 => Self::Ack,
            other => Self::Unknown(other),
        }
    }

    /// The number that travels.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Unset => 0,
            Self::HaproxyHello => 1,
            Self::HaproxyDisconnect => 2,
            Self::Notify => 3,
            Self::AgentHello => 101,
            Self::AgentDisconnect => 102,
            Self::Ack => 103,
            Self::Unknown(code) => code,
        }
    }
}

/// A frame's flags. Reserved ones are ignored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Flags(u32);

impl Flags {
    /// The last, or only, frame of a payload.
    pub const FIN: Self = Self(1);
    /// The payload is cancelled.
    pub const ABORT: Self = Self(2);
    /// More fragments follow.
    pub const NONE: Self = Self(0);

    /// The flags of a number.
    #[must_use]
    pub const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    /// Whether this is the last frame of its payload.
    #[must_use]
    pub const fn is_fin(self) -> bool {
        self.0 & Self::FIN.0 != 0
    }

    /// Whether the payload is cancelled.
    #[must_use]
    pub const fn is_abort(self) -> bool {
        self.0 & Self::ABORT.0 != 0
    }
}

/// What an ACK must repeat of its NOTIFY.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FrameId {
    /// HAProxy's number of the client's stream; may be 0.
    pub stream_id: u64,
    /// The number of the frame inside the stream.
    pub frame_id: u64,
}

impl FrameId {
    /// The ids of frames that belong to no stream: HELLO and DISCONNECT.
    pub const NONE: Self = Self { stream_id: 0, frame_id: 0 };
}

/// A frame's type and metadata.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// What the frame is.
    pub frame_type: FrameType,
    /// Its flags.
    pub flags: Flags,
    /// What it belongs to.
    pub id: FrameId,
}

impl Header {
    /// The header of a whole frame.
    #[must_use]
    pub const fn whole(frame_type: FrameType, id: FrameId) -> Self {
        Self { frame_type, flags: Flags::FIN, id }
    }

    /// The number of bytes that [`put_header`] writes.
    #[must_use]
    pub const fn encoded_len(&self) -> usize {
        1 + 4 + varint_len(self.id.stream_id) + varint_len(self.id.frame_id)
    }
}

/// Reads a header.
///
/// # Errors
///
/// [`DecodeError::Truncated`], [`DecodeError::IntegerTooLong`].
pub fn header(input: &[u8]) -> IResult<&[u8], Header, DecodeError> {
    (byte, be_u32, varint, varint)
        .map(|(code, bits, stream_id, frame_id)| Header {
            frame_type: FrameType::from_code(code),
            flags: Flags::from_bits(bits),
            id: FrameId { stream_id, frame_id },
        })
        .parse(input)
}

/// Writes a header.
pub fn put_header(out: &mut impl BufMut, header: &Header) {
    out.put_u8(header.frame_type.code());
    out.put_u32(header.flags.0);
    put_varint(out, header.id.stream_id);
    put_varint(out, header.id.frame_id);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_code_keeps_its_number() {
        for code in 0..=u8::MAX {
            assert_eq!(FrameType::from_code(code).code(), code);
        }
        assert_eq!(FrameType::from_code(4), FrameType::Unknown(4));
    }

    #[test]
    fn a_header_has_the_bytes_of_the_specification() {
        let notify = Header {
            frame_type: FrameType::Notify,
            flags: Flags::NONE,
            id: FrameId { stream_id: 240, frame_id: 1 },
        };
        let mut out = Vec::new();
        put_header(&mut out, &notify);
        assert_eq!(out, [3, 0, 0, 0, 0, 0xF0, 0x00, 1]);
        assert_eq!(notify.encoded_len(), out.len());
        assert_eq!(header(&out), Ok((&[][..], notify)));
    }

    #[test]
    fn reserved_flags_are_ignored() {
        let (_, parsed) = header(&[3, 0xFF, 0xFF, 0xFF, 0xFD, 0, 0]).expect("a header");
        assert!(parsed.flags.is_fin());
        assert!(!parsed.flags.is_abort());
    }

    proptest! {
        #[test]
        fn any_header_survives(code: u8, bits: u32, stream_id: u64, frame_id: u64) {
            let before = Header {
                frame_type: FrameType::from_code(code),
                flags: Flags::from_bits(bits),
                id: FrameId { stream_id, frame_id },
            };
            let mut out = Vec::new();
            put_header(&mut out, &before);
            prop_assert!((MIN_FRAME_BYTES..=MAX_HEADER_BYTES).contains(&out.len()));
            prop_assert_eq!(header(&out), Ok((&[][..], before)));
        }
    }
}
