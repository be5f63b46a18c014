//! Frame payloads: messages and key-value lists, borrowed, without an allocation (SPOE.txt §3.2).

use super::error::DecodeError;
use super::status::Status;
use super::value::{Value, string, value};
use bytes::Bytes;
use nom::{IResult, Parser, number::complete::u8 as byte};

/// One message of a NOTIFY: a `spoe-message` section of HAProxy's configuration.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Message<'a> {
    /// The section's name.
    pub name: &'a str,
    /// Its arguments, in the configuration's order.
    pub args: Args<'a>,
}

impl<'a> Message<'a> {
    /// The argument of this name; [`Value::Null`] where there is none, as where HAProxy had no value for it.
    #[must_use]
    pub fn arg(&self, name: &str) -> Value<'a> {
        self.args.into_iter().find(|(of, _)| *of == name).map_or(Value::Null, |(_, value)| value)
    }
}

/// The arguments of a message. An unnamed one has the empty name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Args<'a> {
    rest: &'a [u8],
    left: u8,
}

impl<'a> Iterator for Args<'a> {
    type Item = (&'a str, Value<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        // Cannot fail: the message was read once before its arguments were handed out.
        let (rest, pair) = pair(self.rest).ok()?;
        self.rest = rest;
        Some(pair)
    }
}

/// The messages of a NOTIFY's payload.
///
/// Values are slices of `payload`: [`Bytes::slice_ref`] makes one outlive the borrow without a copy.
#[must_use]
pub fn messages(payload: &Bytes) -> Messages<'_> {
    Messages { rest: payload }
}

/// The iterator of [`messages`]. Ends after the first error.
#[derive(Clone, Debug)]
pub struct Messages<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Messages<'a> {
    type Item = Result<Message<'a>, DecodeError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        match message(self.rest) {
            Ok((rest, message)) => {
                self.rest = rest;
                Some(Ok(message))
            }
            Err(error) => {
                self.rest = &[];
                Some(Err(error.into()))
            }
        }
    }
}

/// A DISCONNECT as HAProxy sends it (SPOE.txt §3.2.8).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Disconnect<'a> {
    /// Why.
    pub status: Status,
    /// The same in words.
    pub message: &'a str,
}

/// Reads the payload of a DISCONNECT. Missing items are an unknown status and no words: the connection ends anyway.
///
/// # Errors
///
/// Any [`DecodeError`].
pub fn disconnect(payload: &[u8]) -> Result<Disconnect<'_>, DecodeError> {
    let mut disconnect = Disconnect { status: Status::Unknown, message: "" };
    for item in items(payload) {
        match item? {
            ("status-code", value) => {
                disconnect.status = value.as_u64().map_or(Status::Unknown, Status::from_code);
            }
            ("message", value) => disconnect.message = value.as_str().unwrap_or_default(),
            _ => {}
        }
    }
    Ok(disconnect)
}

/// The pairs of a key-value list. Ends after the first error.
pub(super) fn items(mut rest: &[u8]) -> impl Iterator<Item = Result<(&str, Value<'_>), DecodeError>> {
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        match pair(rest) {
            Ok((after, pair)) => {
                rest = after;
                Some(Ok(pair))
            }
            Err(error) => {
                rest = &[];
                Some(Err(error.into()))
            }
        }
    })
}

fn message(input: &[u8]) -> IResult<&[u8], Message<'_>, DecodeError> {
    let (args, (name, count)) = (name, byte).parse(input)?;
    let mut rest = args;
    for _ in 0..count {
        (rest, _) = pair(rest)?;
    }
    Ok((rest, Message { name, args: Args { rest: args, left: count } }))
}

fn pair(input: &[u8]) -> IResult<&[u8], (&str, Value<'_>), DecodeError> {
    (name, value).parse(input)
}

fn name(input: &[u8]) -> IResult<&[u8], &str, DecodeError> {
    let (rest, bytes) = string(input)?;
    match std::str::from_utf8(bytes) {
        Ok(name) => Ok((rest, name)),
        Err(_) => Err(nom::Err::Failure(DecodeError::Name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Two messages: `route` with a named and an unnamed argument, `ping` with none.
    const TWO: &[u8] = b"\x05route\x02\x04body\x09\x02{}\x00\x04\x07\x04ping\x00";

    #[test]
    fn messages_and_arguments_come_in_order() {
        let payload = Bytes::from_static(TWO);
        let all: Vec<_> = messages(&payload).collect::<Result<_, _>>().expect("two messages");
        assert_eq!(all.len(), 2);
        assert_eq!(all[0].name, "route");
        let args: Vec<_> = all[0].args.collect();
        assert_eq!(args, [("body", Value::Binary(b"{}")), ("", Value::Int64(7))]);
        assert_eq!(all[1].name, "ping");
        assert_eq!(all[1].args.count(), 0);
    }

    #[test]
    fn a_missing_argument_is_null() {
        let payload = Bytes::from_static(TWO);
        let route = messages(&payload).next().expect("a message").expect("that decodes");
        assert_eq!(route.arg("body").as_str(), Some("{}"));
        assert_eq!(route.arg("path"), Value::Null);
    }

    #[test]
    fn a_value_can_be_kept_without_a_copy() {
        let payload = Bytes::from_static(TWO);
        let route = messages(&payload).next().expect("a message").expect("that decodes");
        let body = payload.slice_ref(route.arg("body").as_bytes().expect("bytes"));
        assert_eq!(body.as_ptr(), TWO[14..].as_ptr());
    }

    #[test]
    fn every_cut_of_a_payload_is_an_error_or_fewer_messages() {
        for cut in 0..TWO.len() {
            let payload = Bytes::from_static(&TWO[..cut]);
            let all: Vec<_> = messages(&payload).collect();
            let whole = matches!(cut, 0 | 19);
            assert_eq!(all.iter().all(Result::is_ok), whole, "cut at {cut}");
        }
    }

    #[test]
    fn more_arguments_announced_than_sent_is_an_error() {
        let payload = Bytes::from_static(b"\x01m\xFF\x01a\x00");
        let all: Vec<_> = messages(&payload).collect();
        assert_eq!(all, [Err(DecodeError::Truncated)]);
    }

    #[test]
    fn a_name_that_is_not_utf_8_is_an_error() {
        let payload = Bytes::from_static(b"\x01\xFF\x00");
        assert_eq!(messages(&payload).collect::<Vec<_>>(), [Err(DecodeError::Name)]);
    }

    #[test]
    fn a_disconnect_says_why() {
        let payload = b"\x0bstatus-code\x03\x09\x07message\x08\x03bad\x05other\x00";
        let expected = Disconnect { status: Status::BadMaxFrameSize, message: "bad" };
        assert_eq!(disconnect(payload), Ok(expected));
        assert_eq!(disconnect(b"").map(|d| d.status), Ok(Status::Unknown));
        assert_eq!(disconnect(b"\x0bstatus").map(|d| d.status), Err(DecodeError::Truncated));
    }

    proptest! {
        #[test]
        fn any_payload_does_no_harm(bytes: Vec<u8>) {
            let payload = Bytes::from(bytes);
            for message in messages(&payload).flatten() {
                for (_, value) in message.args {
                    let _ = (value.as_str(), value.as_u64());
                }
            }
            let _ = disconnect(&payload);
        }
    }
}
