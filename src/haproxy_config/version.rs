//! HAProxy's version.

use std::{fmt, process::Command, str::FromStr};

/// A version of HAProxy, as in `2.8`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct HaproxyVersion {
    /// Before the point.
    pub major: u16,
    /// After it.
    pub minor: u16,
}

impl HaproxyVersion {
    /// The oldest that the forms are for: what holds for it holds for all, where the version is not known.
    pub const OLDEST: Self = Self::new(2, 6);
    /// The first that speaks SPOP by a multiplexer of its own; its checks no longer crash, and a frontend may have several
    /// log formats.
    pub const SPOP_MUX: Self = Self::new(3, 1);

    /// MAJOR.MINOR
    #[must_use]
    pub const fn new(major: u16, minor: u16) -> Self {
        Self { major, minor }
    }

    /// Of the `haproxy` that the PATH finds, or that stands where packages put it.
    #[must_use]
    pub fn installed() -> Option<Self> {
        ["haproxy", "/usr/sbin/haproxy", "/usr/local/sbin/haproxy"].iter().find_map(|binary| {
            let output = Command::new(binary).arg("-v").output().ok()?;
            // `HAProxy version 2.8.25-5cf5d0683 2026/…`
            String::from_utf8_lossy(&output.stdout).split_whitespace().nth(2)?.parse().ok()
        })
    }
}

impl fmt::Display for HaproxyVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl FromStr for HaproxyVersion {
    type Err = &'static str;

    /// `2.8`, and also `2.8.25-1+deb12u4`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut parts = text.split(|c: char| !c.is_ascii_digit()).map(str::parse);
        match (parts.next(), parts.next()) {
            (Some(Ok(major)), Some(Ok(minor))) => Ok(Self { major, minor }),
            _ => Err("must be a version of HAProxy, as in 2.8"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn major_and_minor_count() {
        for (text, expected) in [("2.6", (2, 6)), ("2.8.25-5cf5d0683", (2, 8)), ("3.5-dev5", (3, 5))] {
            assert_eq!(text.parse(), Ok(HaproxyVersion::new(expected.0, expected.1)));
        }
        for text in ["", "2", "two.six", "v2.6"] {
            assert!(text.parse::<HaproxyVersion>().is_err(), "{text}");
        }
        assert!(HaproxyVersion::new(2, 10) > HaproxyVersion::new(2, 9));
    }
}
