//! Whether a pool's requests go where kvspoa says: all of them, some, or none.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// Ten-thousandths: a share has four digits, and one of them all is a whole number.
const PARTS: u16 = 10_000;

/// What kvspoa does about the requests of a pool.
///
/// By default [`Mode::ON`]. Written `on`, `shadow`, `off`, or `share=0.25`: `shadow` is a share of 0, `on` of 1.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mode(u16);

/// What kvspoa does about one request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Handling {
    /// HAProxy is told the server.
    On,
    /// It is decided and recorded, and HAProxy balances.
    Shadow,
    /// Nothing is done, and HAProxy balances.
    Off,
}

impl Handling {
    /// All of them, in the order of their discriminants.
    pub const ALL: [Self; 3] = [Self::On, Self::Shadow, Self::Off];

    /// The name in metrics and answers.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::On => "on",
            Self::Shadow => "shadow",
            Self::Off => "off",
        }
    }

    /// The place in a table by handling.
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }
}

impl Mode {
    /// Every request goes where kvspoa says.
    pub const ON: Self = Self(PARTS);
    /// Every request is decided and recorded, and goes where HAProxy's `balance` says.
    pub const SHADOW: Self = Self(0);
    /// No request is looked at.
    pub const OFF: Self = Self(u16::MAX);

    /// The modes' names in the gauge, in the order of [`Self::place`].
    pub const NAMES: [&'static str; 4] = ["on", "shadow", "share", "off"];

    /// So large a share of the sessions goes where kvspoa says; the others are in its shadow. `None` unless 0 to 1.
    #[must_use]
    pub fn share(share: f64) -> Option<Self> {
        (0.0..=1.0).contains(&share).then(|| Self((share * f64::from(PARTS)).round() as u16))
    }

    /// Whether no request is looked at.
    #[must_use]
    pub fn is_off(self) -> bool {
        self == Self::OFF
    }

    /// The share of sessions that go where kvspoa says, 0 to 1.
    #[must_use]
    pub fn routed_share(self) -> f64 {
        if self.is_off() { 0.0 } else { f64::from(self.0) / f64::from(PARTS) }
    }

    /// The mode's place in [`Self::NAMES`].
    #[must_use]
    pub fn place(self) -> usize {
        match self {
            Self::ON => 0,
            Self::SHADOW => 1,
            Self::OFF => 3,
            _ => 2,
        }
    }

    /// What is done about a request of which the session, or what stands for it, has this evenly spread hash. A session
    /// that a share holds, a larger share holds too.
    #[must_use]
    pub fn handling(self, session: u64) -> Handling {
        let part = (u128::from(session) * u128::from(PARTS)) >> 64;
        match self {
            Self::OFF => Handling::Off,
            Self(routed) if part < routed.into() => Handling::On,
            Self(_) => Handling::Shadow,
        }
    }

    /// The mode as a number, for an atomic.
    #[must_use]
    pub const fn to_bits(self) -> u16 {
        self.0
    }

    /// The mode of such a number.
    #[must_use]
    pub const fn from_bits(bits: u16) -> Self {
        if bits > PARTS { Self::OFF } else { Self(bits) }
    }
}

impl Default for Mode {
    fn default() -> Self {
        Self::ON
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::ON => f.write_str("on"),
            Self::SHADOW => f.write_str("shadow"),
            Self::OFF => f.write_str("off"),
            share => write!(f, "share={}", share.routed_share()),
        }
    }
}

impl fmt::Debug for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mode({self})")
    }
}

/// A text is none of the modes.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("`{0}` is no mode: on, shadow, off, or share=0.0 to share=1.0")]
pub struct NoMode(String);

impl FromStr for Mode {
    type Err = NoMode;

    fn from_str(text: &str) -> Result<Self, NoMode> {
        let mode = match text {
            "on" => Some(Self::ON),
            "shadow" => Some(Self::SHADOW),
            "off" => Some(Self::OFF),
            _ => text.strip_prefix("share=").and_then(|share| Self::share(share.trim().parse().ok()?)),
        };
        mode.ok_or_else(|| NoMode(text.to_owned()))
    }
}

impl Serialize for Mode {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Mode {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mode_is_written_as_it_is_read() {
        for text in ["on", "shadow", "off", "share=0.25", "share=0.0001"] {
            let mode: Mode = text.parse().expect(text);
            assert_eq!(mode.to_string(), text);
            assert_eq!(Mode::from_bits(mode.to_bits()), mode);
            assert!(text.starts_with(Mode::NAMES[mode.place()]));
        }
        assert_eq!("share=1".parse(), Ok(Mode::ON));
        assert_eq!("share=0.0".parse(), Ok(Mode::SHADOW));
        for text in ["", "On", "share", "share=", "share=1.1", "share=-0.1", "share=NaN", "0.5"] {
            assert_eq!(text.parse::<Mode>(), Err(NoMode(text.to_owned())));
        }
    }

    #[test]
    fn a_share_holds_as_many_sessions_and_a_larger_one_the_same_and_more() {
        let [quarter, half] = [0.25, 0.5].map(|share| Mode::share(share).expect("a share"));
        let mut counts = [0, 0];
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..20_000 {
            let session = rng.u64(..);
            let [in_quarter, in_half] = [quarter, half].map(|mode| mode.handling(session) == Handling::On);
            assert!(!in_quarter || in_half);
            counts[0] += u32::from(in_quarter);
            counts[1] += u32::from(in_half);
            assert_eq!(Mode::ON.handling(session), Handling::On);
            assert_eq!(Mode::SHADOW.handling(session), Handling::Shadow);
            assert_eq!(Mode::OFF.handling(session), Handling::Off);
        }
        assert!(counts[0].abs_diff(5_000) < 300 && counts[1].abs_diff(10_000) < 300, "{counts:?}");
        assert_eq!(Mode::ON.handling(u64::MAX), Handling::On);
    }
}
