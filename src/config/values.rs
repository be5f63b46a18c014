//! The value types of the configuration file: sizes, times, addresses. Each reads itself from text and says what is
//! wrong with it.

use super::knobs::Bounded;
use crate::events::Endpoint;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::{fmt, marker::PhantomData, net::IpAddr, ops::Range, path::PathBuf, str::FromStr, time::Duration};

/// A place in the file's text, in bytes.
pub type Span = Range<usize>;

/// A whole number from `LOW` to `HIGH`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Count<const LOW: usize, const HIGH: usize>(pub(super) usize);

/// A size in bytes, from `LOW` to `HIGH`: `1048576`, `"512KiB"`, `"16MiB"`, `"2GiB"`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ByteSize<const LOW: usize, const HIGH: usize>(pub(super) usize);

impl<const LOW: usize, const HIGH: usize> FromStr for ByteSize<LOW, HIGH> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not a size: use bytes, KiB, MiB or GiB, as in \"16MiB\"");
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let factor = match unit.trim() {
            "" | "B" => 1,
            "KiB" | "k" | "K" => 1 << 10,
            "MiB" | "m" | "M" => 1 << 20,
            "GiB" | "g" | "G" => 1 << 30,
            _ => return Err(wrong()),
        };
        let bytes = number.parse::<usize>().ok().and_then(|n| n.checked_mul(factor)).ok_or_else(wrong)?;
        within(bytes, LOW, HIGH).map(Self)
    }
}

/// In the largest unit that leaves a whole number.
impl<const LOW: usize, const HIGH: usize> fmt::Display for ByteSize<LOW, HIGH> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        match units.into_iter().find(|(bytes, _)| self.0 > 0 && self.0.is_multiple_of(*bytes)) {
            Some((bytes, unit)) => write!(f, "{}{unit}", self.0 / bytes),
            None => self.0.fmt(f),
        }
    }
}

/// A length of time, from `LOW` to `HIGH` milliseconds: `"400ms"`, `"30s"`, `"5m"`, `"6h"`. The bounds keep sums of
/// clocks and times from overflowing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Time<const LOW: u64, const HIGH: u64>(pub(super) Duration);

impl<const LOW: u64, const HIGH: u64> FromStr for Time<LOW, HIGH> {
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
        if !(LOW..=HIGH).contains(&millis) {
            let (low, high) = (Duration::from_millis(LOW), Duration::from_millis(HIGH));
            return Err(format!("`{text}` must be from {low:?} to {high:?}"));
        }
        Ok(Self(Duration::from_millis(millis)))
    }
}

/// In the largest unit that leaves a whole number.
impl<const LOW: u64, const HIGH: u64> fmt::Display for Time<LOW, HIGH> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = self.0.as_millis();
        let units = [(3_600_000, "h"), (60_000, "m"), (1_000, "s"), (1, "ms")];
        let (unit, name) =
            units.into_iter().find(|(unit, _)| millis.is_multiple_of(*unit)).unwrap_or((1, "ms"));
        write!(f, "{}{name}", millis / unit)
    }
}

/// A number that weighs something, from 0 to `HIGH`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Weight<const HIGH: u32>(pub(super) f64);

impl<'de, const HIGH: u32> Deserialize<'de> for Weight<HIGH> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let number = f64::deserialize(deserializer)?;
        let high = f64::from(HIGH);
        // Not a number is in no range.
        let good = (0.0..=high).contains(&number);
        good.then_some(Self(number))
            .ok_or_else(|| de::Error::custom(format!("{number} must be from 0 to {high}")))
    }
}

fn within(number: usize, low: usize, high: usize) -> Result<usize, String> {
    match (low..=high).contains(&number) {
        true => Ok(number),
        false if high == usize::MAX => Err(format!("{number} is too small: at least {low}")),
        false => Err(format!("{number} must be from {low} to {high}")),
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

    /// The host, without the brackets of an IPv6 address.
    #[must_use]
    pub fn host(&self) -> &str {
        let host = self.0.rsplit_once(':').map_or("", |(host, _)| host);
        host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
    }

    /// Whether it is on this machine for certain.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        is_loopback(self.host())
    }
}

/// Whether a host, without brackets, is this machine for certain.
#[must_use]
pub fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
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
        if bare.contains('@') {
            // Not said again: addresses are shown, passwords are not.
            return Err("an address has no user and no password: use host:port".to_owned());
        }
        let is_odd = |c: char| c == '/' || c.is_whitespace() || c.is_control();
        match bare.rsplit_once(':') {
            Some((host, port))
                if !host.is_empty() && !host.contains(is_odd) && port.parse::<u16>().is_ok() =>
            {
                Ok(Self(bare.to_owned()))
            }
            _ => Err(format!("`{text}` is not an address: use host:port, as in \"127.0.0.1:8101\"")),
        }
    }
}

/// Where an engine's HTTP interface is: `host:port`, with `http://` or `https://` in front or without.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct HttpAddr {
    /// Whether it speaks TLS.
    pub tls: bool,
    /// Where it is.
    pub at: HostPort,
}

impl HttpAddr {
    /// The host, without the brackets of an IPv6 address.
    #[must_use]
    pub fn host(&self) -> &str {
        self.at.host()
    }

    /// The port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.at.0.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).unwrap_or_default()
    }
}

impl FromStr for HttpAddr {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rest = text.strip_prefix("https://");
        Ok(Self { tls: rest.is_some(), at: rest.unwrap_or(text).parse()? })
    }
}

impl fmt::Display for HttpAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.tls { "https://" } else { "" }, self.at)
    }
}

/// Where HAProxy's runtime socket is: `/run/haproxy/admin.sock`, `unix:PATH` or `host:port`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SocketAddr {
    /// The path of a unix socket.
    Unix(PathBuf),
    /// A TCP address.
    Tcp(HostPort),
}

impl FromStr for SocketAddr {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("unix:").or_else(|| text.starts_with('/').then_some(text)) {
            Some(path) if !path.is_empty() => Ok(Self::Unix(path.into())),
            _ => text.parse().map(Self::Tcp).map_err(|_: String| {
                format!(
                    "`{text}` is not a socket: use a path or host:port, as in \"/run/haproxy/admin.sock\""
                )
            }),
        }
    }
}

impl fmt::Display for SocketAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => path.display().fmt(f),
            Self::Tcp(addr) => addr.fmt(f),
        }
    }
}

/// An endpoint to listen at for publishers that connect.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct ListenEndpoint(pub(super) Endpoint);

impl fmt::Display for ListenEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for ListenEndpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bare = text.strip_prefix('@').unwrap_or(text);
        Endpoint::parse(&format!("@{bare}")).map(Self).map_err(|error| error.to_string())
    }
}

/// The endpoints of a replica's data-parallel ranks as the file has them: that of the first one, or a list of all.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(untagged, expecting = "an endpoint in quotes, or a list of one for each rank")]
pub(super) enum Endpoints {
    First(String),
    Each(Vec<String>),
}

impl Endpoints {
    /// How many there are, where all are listed.
    pub(super) fn listed(&self) -> Option<usize> {
        match self {
            Self::First(_) => None,
            Self::Each(all) => Some(all.len()),
        }
    }

    /// The endpoint of a rank. From the first one on, the port grows with the rank (vLLM
    /// `ZmqEventPublisher.offset_endpoint_port`).
    pub(super) fn of_rank(&self, rank: u16) -> Result<Endpoint, String> {
        let parse = |text: &str| Endpoint::parse(text).map_err(|error| error.to_string());
        match self {
            Self::First(first) => {
                let first = parse(first)?;
                first.plus(rank).ok_or_else(|| {
                    format!("`{first}` has no port to count the ranks from: `ranks` above 1 need tcp://")
                })
            }
            Self::Each(all) => match all.get(usize::from(rank)) {
                Some(text) => parse(text),
                None => Err(format!("rank {rank} has no endpoint in the list")),
            },
        }
    }
}

/// Reads a value from a TOML string by its `FromStr`, which also says what is wrong with a bare number.
pub(super) fn from_text<'de, D: Deserializer<'de>, T: FromStr<Err: fmt::Display>>(
    deserializer: D,
) -> Result<T, D::Error> {
    struct Visitor<T>(PhantomData<T>);
    impl<T: FromStr<Err: fmt::Display>> de::Visitor<'_> for Visitor<T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a value in quotes")
        }

        fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
            self.visit_str(&number.to_string())
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
            text.parse().map_err(E::custom)
        }
    }
    deserializer.deserialize_any(Visitor(PhantomData))
}

impl<'de, const LOW: u64, const HIGH: u64> Deserialize<'de> for Time<LOW, HIGH> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        from_text(deserializer)
    }
}

/// For a field whose type stands in a lower layer: as text, both ways.
pub(super) mod text {
    use serde::Serializer;
    use std::fmt;

    pub(in super::super) use super::from_text as deserialize;

    pub(in super::super) fn serialize<S: Serializer>(
        value: &impl fmt::Display,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }
}

macro_rules! from_text {
    ($($type:ty),*) => {$(
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                from_text(deserializer)
            }
        }

        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }
    )*};
}

from_text!(HostPort, HttpAddr, ListenEndpoint, SocketAddr);

impl<'de, const LOW: usize, const HIGH: usize> Deserialize<'de> for Count<LOW, HIGH> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let number = i64::deserialize(deserializer)?;
        let number = usize::try_from(number).map_err(|_| de::Error::custom("must not be negative"))?;
        within(number, LOW, HIGH).map(Self).map_err(de::Error::custom)
    }
}

impl<'de, const LOW: usize, const HIGH: usize> Deserialize<'de> for ByteSize<LOW, HIGH> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor<const LOW: usize, const HIGH: usize>;
        impl<const LOW: usize, const HIGH: usize> de::Visitor<'_> for Visitor<LOW, HIGH> {
            type Value = ByteSize<LOW, HIGH>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size, as in \"16MiB\"")
            }

            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<Self::Value, E> {
                let bytes = usize::try_from(bytes).map_err(|_| E::custom("a size cannot be negative"))?;
                within(bytes, LOW, HIGH).map(ByteSize).map_err(E::custom)
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

impl<const LOW: usize, const HIGH: usize> Serialize for Count<LOW, HIGH> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Bounded::new(self.0, LOW, HIGH).serialize(serializer)
    }
}

impl<const LOW: usize, const HIGH: usize> Serialize for ByteSize<LOW, HIGH> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let text = |bytes| Self(bytes).to_string();
        let high = if HIGH == usize::MAX { String::new() } else { text(HIGH) };
        Bounded::new(text(self.0), text(LOW), high).serialize(serializer)
    }
}

impl<const LOW: u64, const HIGH: u64> Serialize for Time<LOW, HIGH> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let text = |millis| Self(Duration::from_millis(millis)).to_string();
        Bounded::new(self.to_string(), text(LOW), text(HIGH)).serialize(serializer)
    }
}

impl<const HIGH: u32> Serialize for Weight<HIGH> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Bounded::new(self.0, 0, HIGH).serialize(serializer)
    }
}
