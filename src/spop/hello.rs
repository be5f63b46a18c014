//! The handshake's terms (SPOE.txt §3.2.4, §3.2.5).

use super::decode::items;
use super::error::ProtocolError;
use super::frame::MIN_MAX_FRAME_SIZE;
use super::value::Value;

/// The version that we speak. HAProxy dropped 1.0 over a bug in its frame flags and has announced only 2.0 since 1.9.
pub const VERSION: &str = "2.0";

/// What HAProxy offers in HAPROXY-HELLO.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HaproxyHello {
    /// Its largest frame, in bytes. Not below [`MIN_MAX_FRAME_SIZE`].
    pub max_frame_size: u64,
    /// Whether it accepts ACKs apart from, and out of the order of, the NOTIFYs.
    pub pipelining: bool,
    /// Whether this is a health check: answered and closed.
    pub healthcheck: bool,
}

/// What both sides keep to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Terms {
    /// The largest frame either way, in bytes.
    pub max_frame_size: u32,
    /// The capabilities that we announce.
    pub capabilities: &'static str,
}

impl HaproxyHello {
    /// Reads the payload of HAPROXY-HELLO. Unknown items are ignored.
    ///
    /// # Errors
    ///
    /// The [`ProtocolError`] of whatever is missing, of the wrong type or out of bounds.
    pub fn parse(payload: &[u8]) -> Result<Self, ProtocolError> {
        let (mut versions, mut max_frame_size, mut capabilities, mut healthcheck) = (None, None, None, false);
        for item in items(payload) {
            let (name, value) = item?;
            match name {
                "supported-versions" => versions = Some(text("supported-versions", &value)?),
                "max-frame-size" => {
                    let size = value.as_u64().ok_or(ProtocolError::WrongItemType("max-frame-size"))?;
                    max_frame_size = Some(size);
                }
                "capabilities" => capabilities = Some(text("capabilities", &value)?),
                "healthcheck" => healthcheck = value.as_bool().unwrap_or(false),
                _ => {}
            }
        }
        let versions = versions.ok_or(ProtocolError::NoVersion)?;
        if !list(versions).any(speaks_two) {
            return Err(ProtocolError::UnsupportedVersion);
        }
        let max_frame_size = max_frame_size.ok_or(ProtocolError::NoMaxFrameSize)?;
        if max_frame_size < MIN_MAX_FRAME_SIZE.into() {
            return Err(ProtocolError::BadMaxFrameSize(max_frame_size));
        }
        let capabilities = capabilities.ok_or(ProtocolError::NoCapabilities)?;
        Ok(Self {
            max_frame_size,
            pipelining: list(capabilities).any(|one| one == "pipelining"),
            healthcheck,
        })
    }

    /// What we answer, given our own largest frame.
    ///
    /// The size is the lower of both: HAProxy hangs up on a larger one, and up to 3.0 tries again in a tight loop.
    ///
    /// `pipelining` binds both sides, so it is announced where HAProxy offers it (a health check offers nothing).
    /// `fragmentation` binds only who announces it, and HAProxy never does; up to 3.0 it sends what does not fit into
    /// one frame in fragments if we can take them, and else retries in a tight loop; from 3.1 on it ignores the word.
    #[must_use]
    pub fn agree(&self, own_max_frame_size: u32) -> Terms {
        Terms {
            max_frame_size: u32::try_from(self.max_frame_size).unwrap_or(u32::MAX).min(own_max_frame_size),
            capabilities: if self.pipelining { "pipelining,fragmentation" } else { "fragmentation" },
        }
    }
}

fn text<'a>(item: &'static str, value: &Value<'a>) -> Result<&'a str, ProtocolError> {
    match value {
        Value::String(bytes) => std::str::from_utf8(bytes).map_err(|_| ProtocolError::WrongItemType(item)),
        _ => Err(ProtocolError::WrongItemType(item)),
    }
}

/// The parts of a comma-separated list, without the spaces around them.
fn list(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim)
}

/// Whether `Major.Minor` is a 2.x: each announced version includes all earlier minor ones.
fn speaks_two(version: &str) -> bool {
    version.split_once('.').is_some_and(|(major, minor)| major == "2" && minor.parse::<u32>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::super::value::{put_string, put_value};
    use super::*;

    fn payload(items: &[(&str, Value<'_>)]) -> Vec<u8> {
        let mut out = Vec::new();
        for (name, value) in items {
            put_string(&mut out, name.as_bytes());
            put_value(&mut out, value);
        }
        out
    }

    fn parse(versions: &str, size: Value<'_>, capabilities: &str) -> Result<HaproxyHello, ProtocolError> {
        HaproxyHello::parse(&payload(&[
            ("supported-versions", versions.into()),
            ("max-frame-size", size),
            ("capabilities", capabilities.into()),
        ]))
    }

    #[test]
    fn haproxy_2_6_offers_pipelining_and_async() {
        let hello = parse("2.0", Value::UInt32(16_380), "pipelining,async").expect("a hello");
        assert_eq!(hello, HaproxyHello { max_frame_size: 16_380, pipelining: true, healthcheck: false });
    }

    #[test]
    fn a_health_check_offers_nothing() {
        let hello = HaproxyHello::parse(&payload(&[
            ("supported-versions", "2.0".into()),
            ("max-frame-size", 16_380u32.into()),
            ("capabilities", "".into()),
            ("healthcheck", true.into()),
        ]));
        assert_eq!(hello, Ok(HaproxyHello { max_frame_size: 16_380, pipelining: false, healthcheck: true }));
    }

    #[test]
    fn lists_may_have_spaces_and_unknown_words() {
        let hello = parse(" 3.1 , 2.4", Value::Int64(256), " later, pipelining ,x").expect("a hello");
        assert!(hello.pipelining);
        assert_eq!(hello.max_frame_size, 256);
        assert!(!parse("2.0", Value::UInt32(256), "pipelining2").expect("a hello").pipelining);
    }

    #[test]
    fn only_major_version_2_will_do() {
        for versions in ["1.0", "", "2", "3.0", "12.0", "2.", "2.x"] {
            assert_eq!(
                parse(versions, Value::UInt32(16_380), ""),
                Err(ProtocolError::UnsupportedVersion),
                "{versions:?}"
            );
        }
    }

    #[test]
    fn each_mandatory_item_is_missed() {
        let all = [
            ("supported-versions", "2.0".into()),
            ("max-frame-size", 16_380u32.into()),
            ("capabilities", "".into()),
        ];
        let errors = [ProtocolError::NoVersion, ProtocolError::NoMaxFrameSize, ProtocolError::NoCapabilities];
        for (missing, error) in errors.into_iter().enumerate() {
            let mut some = all.to_vec();
            some.remove(missing);
            assert_eq!(HaproxyHello::parse(&payload(&some)), Err(error));
        }
    }

    #[test]
    fn items_of_the_wrong_type_are_refused() {
        assert_eq!(parse("2.0", "16380".into(), ""), Err(ProtocolError::WrongItemType("max-frame-size")));
        assert_eq!(parse("2.0", Value::Int64(-1), ""), Err(ProtocolError::WrongItemType("max-frame-size")));
        let number = payload(&[("capabilities", Value::UInt32(1))]);
        assert_eq!(HaproxyHello::parse(&number), Err(ProtocolError::WrongItemType("capabilities")));
    }

    #[test]
    fn the_agreed_size_is_the_lower_one() {
        let hello = |size| HaproxyHello { max_frame_size: size, pipelining: true, healthcheck: false };
        assert_eq!(hello(16_380).agree(16_777_216).max_frame_size, 16_380);
        assert_eq!(hello(1 << 40).agree(16_777_216).max_frame_size, 16_777_216);
        assert_eq!(parse("2.0", Value::UInt32(255), ""), Err(ProtocolError::BadMaxFrameSize(255)));
    }

    #[test]
    fn fragmentation_is_always_announced_and_pipelining_where_offered() {
        let hello = |pipelining| HaproxyHello { max_frame_size: 256, pipelining, healthcheck: false };
        assert_eq!(hello(true).agree(256).capabilities, "pipelining,fragmentation");
        assert_eq!(hello(false).agree(256).capabilities, "fragmentation");
    }
}
