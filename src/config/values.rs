//! The value types of the configuration file: sizes, times, addresses. Each reads itself from text and says what is
//! wrong with it.

use crate::events::Endpoint;
use serde::{Deserialize, Deserializer, de};
use std::{fmt, ops::Range, str::FromStr, time::Duration};

/// A place in the file's text, in bytes.
pub type Span = Range<usize>;

/// A size in bytes: `1048576`, `"512KiB"`, `"16MiB"`, `"2GiB"`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ByteSize(pub usize);

impl ByteSize {
    /// The size, no less than `low` and no more than `high`.
    #[must_use]
    pub fn within(self, low: usize, high: usize) -> usize {
        self.0.clamp(low, high)
    }
}

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let factor = match unit.trim() {
            "" | "B" => 1,
            "KiB" | "k" | "K" => 1 << 10,
            "MiB" | "m" | "M" => 1 << 20,
            "GiB" | "g" | "G" => 1 << 30,
            _ => return Err(format!("`{text}` is not a size: use bytes, KiB, MiB or GiB, as in \"16MiB\"")),
        };
        number
            .parse::<usize>()
            .ok()
            .and_then(|n| n.checked_mul(factor))
            .map(Self)
            .ok_or_else(|| format!("`{text}` is not a size: use a number and a unit, as in \"16MiB\""))
    }
}

/// A length of time: `"400ms"`, `"30s"`, `"5m"`, `"6h"`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Time(pub(super) Duration);

impl FromStr for Time {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not a time: use a number and ms, s, m or h, as in \"400ms\"");
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let number: u64 = number.parse().map_err(|_| wrong())?;
        let millis = match unit.trim() {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            _ => return Err(wrong()),
        };
        let millis = number.checked_mul(millis).ok_or_else(wrong)?;
        if millis == 0 {
            return Err(format!("`{text}`: a time must be above zero"));
        }
        Ok(Self(Duration::from_millis(millis)))
    }
}

/// A host (name or address) and a port.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct HostPort(String);

impl HostPort {
    /// As `host:port`.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for HostPort {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bare = text.strip_prefix("http://").unwrap_or(text);
        let bare = bare.strip_suffix('/').unwrap_or(bare);
        match bare.rsplit_once(':') {
            Some((host, port)) if !host.is_empty() && !host.contains('/') && port.parse::<u16>().is_ok() => {
                Ok(Self(bare.to_owned()))
            }
            _ => Err(format!("`{text}` is not an address: use host:port, as in \"127.0.0.1:8101\"")),
        }
    }
}

/// An endpoint as the file has it: that of the replica's first data-parallel rank.
#[derive(Clone, Debug)]
pub(super) struct FirstEndpoint(Endpoint);

impl FromStr for FirstEndpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Endpoint::parse(text).map(Self).map_err(|error| error.to_string())
    }
}

impl FirstEndpoint {
    /// The endpoint of a rank: the port plus the rank (vLLM `ZmqEventPublisher.offset_endpoint_port`).
    pub(super) fn of_rank(&self, rank: u16) -> Result<Endpoint, String> {
        if rank == 0 {
            return Ok(self.0.clone());
        }
        let text = self.0.to_string();
        text.rsplit_once(':')
            .and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?.checked_add(rank)?)))
            .and_then(|(host, port)| Endpoint::parse(&format!("{host}:{port}")).ok())
            .ok_or_else(|| {
                format!("`{text}` has no port to count the ranks from: `ranks` above 1 need tcp://")
            })
    }
}

/// Reads a value from a TOML string by its `FromStr`.
macro_rules! from_text {
    ($($type:ty),*) => {$(
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
            }
        }
    )*};
}

from_text!(Time, HostPort, FirstEndpoint);

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = ByteSize;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size, as in \"16MiB\"")
            }

            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<ByteSize, E> {
                usize::try_from(bytes).map(ByteSize).map_err(|_| E::custom("a size cannot be negative"))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<ByteSize, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}
