//! What can be wrong with received bytes, and how a connection that sent them ends.

use super::frame::FrameType;
use super::status::Status;
use nom::error::{ErrorKind, ParseError};

/// Bytes that are not what they should be (SPOE.txt §3.1, §3.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DecodeError {
    /// The data ends before the item that was announced.
    #[error("data ends too early")]
    Truncated,
    /// A variable-length integer above 64 bits.
    #[error("integer does not fit into 64 bits")]
    IntegerTooLong,
    /// A data type that the specification reserves (10 to 15).
    #[error("unknown data type {0}")]
    UnknownType(u8),
    /// A name that is not UTF-8. Names come from HAProxy's configuration.
    #[error("name is not UTF-8")]
    Name,
}

impl<'a> ParseError<&'a [u8]> for DecodeError {
    fn from_error_kind(_: &'a [u8], _: ErrorKind) -> Self {
        // The only parsers of nom's own that are used take a number of bytes: they fail for want of them.
        Self::Truncated
    }

    fn append(_: &'a [u8], _: ErrorKind, other: Self) -> Self {
        other
    }
}

impl From<nom::Err<Self>> for DecodeError {
    fn from(error: nom::Err<Self>) -> Self {
        match error {
            nom::Err::Error(error) | nom::Err::Failure(error) => error,
            nom::Err::Incomplete(_) => Self::Truncated,
        }
    }
}

/// A breach of the protocol. It ends the connection with a DISCONNECT of [`ProtocolError::status`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ProtocolError {
    /// A frame above the agreed size, or above what a frame of its type needs.
    #[error("frame of {length_bytes} bytes, at most {limit_bytes} are allowed")]
    TooBig {
        /// Announced by the frame.
        length_bytes: usize,
        /// Allowed at this point.
        limit_bytes: usize,
    },
    /// A frame below the size of a header.
    #[error("frame of {length_bytes} bytes has no room for its header")]
    TooShort {
        /// Announced by the frame.
        length_bytes: usize,
    },
    /// Bytes that do not decode.
    #[error("frame does not decode: {0}")]
    Decode(#[from] DecodeError),
    /// Another frame than HAPROXY-HELLO came first.
    #[error("{0:?} frame before HAPROXY-HELLO")]
    HelloExpected(FrameType),
    /// HAPROXY-HELLO came again.
    #[error("second HAPROXY-HELLO")]
    RepeatedHello,
    /// A frame that only agents send.
    #[error("{0:?} frame, which only an agent sends")]
    WrongDirection(FrameType),
    /// A frame with stream-id or frame-id, whose type allows none.
    #[error("{0:?} frame with a stream-id or frame-id")]
    UnexpectedIds(FrameType),
    /// A fragmented frame whose type must be whole.
    #[error("fragmented {0:?} frame")]
    Fragmented(FrameType),
    /// ABORT without FIN.
    #[error("ABORT flag without FIN")]
    AbortWithoutFin,
    /// A fragment that continues nothing.
    #[error("fragment without a beginning")]
    StrayFragment,
    /// Another payload began, or went on, before the last fragment of this one.
    #[error("frame amid the fragments of another")]
    Interlaced,
    /// HAPROXY-HELLO without `supported-versions`.
    #[error("HAPROXY-HELLO without supported-versions")]
    NoVersion,
    /// HAPROXY-HELLO without `max-frame-size`.
    #[error("HAPROXY-HELLO without max-frame-size")]
    NoMaxFrameSize,
    /// HAPROXY-HELLO without `capabilities`.
    #[error("HAPROXY-HELLO without capabilities")]
    NoCapabilities,
    /// An item of HAPROXY-HELLO has the wrong type.
    #[error("HAPROXY-HELLO with a {0} of the wrong type")]
    WrongItemType(&'static str),
    /// HAProxy does not speak SPOP 2.x.
    #[error("no SPOP version in common")]
    UnsupportedVersion,
    /// HAProxy wants frames of less than 256 bytes.
    #[error("max-frame-size of {0} bytes, at least 256 are needed")]
    BadMaxFrameSize(u64),
    /// The rest of a frame, the HELLO, or the reading of our answers did not come in time.
    #[error("peer stalled")]
    Stalled,
}

impl ProtocolError {
    /// The status code by which the peer is told.
    #[must_use]
    pub const fn status(&self) -> Status {
        match self {
            Self::TooBig { .. } => Status::TooBig,
            Self::TooShort { .. }
            | Self::Decode(_)
            | Self::HelloExpected(_)
            | Self::RepeatedHello
            | Self::WrongDirection(_)
            | Self::UnexpectedIds(_)
            | Self::AbortWithoutFin
            | Self::StrayFragment
            | Self::WrongItemType(_) => Status::Invalid,
            Self::Fragmented(_) => Status::FragmentationNotSupported,
            Self::Interlaced => Status::InterlacedFrames,
            Self::NoVersion => Status::NoVersion,
            Self::NoMaxFrameSize => Status::NoMaxFrameSize,
            Self::NoCapabilities => Status::NoCapabilities,
            Self::UnsupportedVersion => Status::UnsupportedVersion,
            Self::BadMaxFrameSize(_) => Status::BadMaxFrameSize,
            Self::Stalled => Status::Timeout,
        }
    }
}
