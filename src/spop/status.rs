//! Why a connection ends (SPOE.txt §3.5, "Errors & timeouts").

use std::fmt;

/// The status code of a DISCONNECT frame.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Status {
    /// The connection ends in good order.
    Normal = 0,
    /// An input or output error.
    Io = 1,
    /// Something did not come in time. HAProxy also says this when it closes an idle connection.
    Timeout = 2,
    /// A frame is longer than agreed.
    TooBig = 3,
    /// A frame breaks the rules.
    Invalid = 4,
    /// A HELLO without its version.
    NoVersion = 5,
    /// A HELLO without its max-frame-size.
    NoMaxFrameSize = 6,
    /// A HELLO without its capabilities.
    NoCapabilities = 7,
    /// No version in common.
    UnsupportedVersion = 8,
    /// A max-frame-size out of bounds.
    BadMaxFrameSize = 9,
    /// A fragment where none is allowed.
    FragmentationNotSupported = 10,
    /// Fragments of two payloads mixed.
    InterlacedFrames = 11,
    /// An answer to a frame that was not sent.
    FrameIdNotFound = 12,
    /// No memory, or another resource is used up.
    Resources = 13,
    /// Anything else.
    Unknown = 99,
}

impl Status {
    /// Every status code of the specification, in its order.
    pub const ALL: [Self; 15] = [
        Self::Normal,
        Self::Io,
        Self::Timeout,
        Self::TooBig,
        Self::Invalid,
        Self::NoVersion,
        Self::NoMaxFrameSize,
        Self::NoCapabilities,
        Self::UnsupportedVersion,
        Self::BadMaxFrameSize,
        Self::FragmentationNotSupported,
        Self::InterlacedFrames,
        Self::FrameIdNotFound,
        Self::Resources,
        Self::Unknown,
    ];

    /// The number that travels.
    #[must_use]
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// The status of a number; one that the specification does not list is [`Status::Unknown`].
    #[must_use]
    pub fn from_code(code: u64) -> Self {
        Self::ALL.into_iter().find(|status| u64::from(status.code()) == code).unwrap_or(Self::Unknown)
    }

    /// The text that travels beside the number. Never above 255 bytes: HAProxy takes no more.
    #[must_use]
    pub const fn message(self) -> &'static str {
        match self {
            Self::Normal => "normal",
            Self::Io => "I/O error",
            Self::Timeout => "a timeout occurred",
            Self::TooBig => "frame is too big",
            Self::Invalid => "invalid frame received",
            Self::NoVersion => "version value not found",
            Self::NoMaxFrameSize => "max-frame-size value not found",
            Self::NoCapabilities => "capabilities value not found",
            Self::UnsupportedVersion => "unsupported version",
            Self::BadMaxFrameSize => "max-frame-size too big or too small",
            Self::FragmentationNotSupported => "payload fragmentation is not supported",
            Self::InterlacedFrames => "invalid interlaced frames",
            Self::FrameIdNotFound => "frame-id not found",
            Self::Resources => "resource allocation error",
            Self::Unknown => "an unknown error occurred",
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.message())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_those_of_the_specification() {
        let codes: Vec<u32> = Status::ALL.into_iter().map(Status::code).collect();
        assert_eq!(codes, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 99]);
        for status in Status::ALL {
            assert_eq!(Status::from_code(status.code().into()), status);
        }
    }

    #[test]
    fn a_code_of_an_agent_of_its_own_is_unknown() {
        assert_eq!(Status::from_code(77), Status::Unknown);
        assert_eq!(Status::from_code(u64::MAX), Status::Unknown);
    }

    #[test]
    fn messages_fit_into_what_haproxy_accepts() {
        for status in Status::ALL {
            assert!((1..=255).contains(&status.message().len()), "{status:?}");
        }
    }
}
