//! HAProxy's side of the handshake, as its health check does it: for those who ask whether an agent answers.

use super::decode::{disconnect, items};
use super::error::DecodeError;
use super::frame::{FrameId, FrameType, Header, LENGTH_BYTES, header, put_header};
use super::hello::VERSION;
use super::status::Status;
use super::value::{Value, put_string, put_value};
use bytes::BufMut;

/// No answer to a HELLO is longer than this, in bytes.
pub const MAX_ANSWER_BYTES: usize = 16 * 1024;

/// What an agent answered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Answer {
    /// AGENT-HELLO.
    Hello {
        /// The version of the protocol that it chose.
        version: String,
        /// The largest frame that it takes, in bytes.
        max_frame_size: u64,
    },
    /// AGENT-DISCONNECT.
    Refused(Status),
}

/// What is no answer to a HELLO.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AnswerError {
    /// The bytes are no frame.
    #[error("not a frame of SPOP: {0}")]
    Decode(#[from] DecodeError),
    /// A frame, but another one.
    #[error("an unexpected frame")]
    Unexpected,
}

/// The whole frame of a HAPROXY-HELLO that is a health check: the agent answers it and closes.
#[must_use]
pub fn health_check(max_frame_size: u32) -> Vec<u8> {
    let header = Header::whole(FrameType::HaproxyHello, FrameId::NONE);
    let mut frame = vec![0; LENGTH_BYTES];
    put_header(&mut frame, &header);
    for (name, value) in [
        ("supported-versions", Value::from(VERSION)),
        ("max-frame-size", max_frame_size.into()),
        ("capabilities", "".into()),
        ("healthcheck", true.into()),
    ] {
        put_string(&mut frame, name.as_bytes());
        put_value(&mut frame, &value);
    }
    // Below 200 bytes.
    let length = (frame.len() - LENGTH_BYTES) as u32;
    (&mut frame[..LENGTH_BYTES]).put_u32(length);
    frame
}

/// Reads an answer, without its length in front.
///
/// # Errors
/// [`AnswerError`].
pub fn answer(frame: &[u8]) -> Result<Answer, AnswerError> {
    let (payload, header) = header(frame).map_err(DecodeError::from)?;
    match header.frame_type {
        FrameType::AgentHello => {
            let (mut version, mut max_frame_size) = (None, None);
            for item in items(payload) {
                match item? {
                    ("version", value) => version = value.as_str().map(str::to_owned),
                    ("max-frame-size", value) => max_frame_size = value.as_u64(),
                    _ => {}
                }
            }
            let both = version.zip(max_frame_size).ok_or(AnswerError::Unexpected)?;
            Ok(Answer::Hello { version: both.0, max_frame_size: both.1 })
        }
        FrameType::AgentDisconnect => Ok(Answer::Refused(disconnect(payload)?.status)),
        _ => Err(AnswerError::Unexpected),
    }
}

#[cfg(test)]
mod tests {
    use super::super::encode;
    use super::super::hello::{HaproxyHello, Terms};
    use super::*;
    use bytes::BytesMut;

    #[test]
    fn our_own_side_reads_the_question() {
        let frame = health_check(16_380);
        let (payload, header) = header(&frame[LENGTH_BYTES..]).expect("a frame");
        assert_eq!(header.frame_type, FrameType::HaproxyHello);
        let hello = HaproxyHello::parse(payload).expect("a HELLO");
        assert_eq!(hello, HaproxyHello { max_frame_size: 16_380, pipelining: false, healthcheck: true });
        let length = u32::from_be_bytes(*frame.first_chunk().expect("a length"));
        assert_eq!(length as usize, frame.len() - LENGTH_BYTES);
    }

    #[test]
    fn an_agents_answers_are_told_apart() {
        let mut out = BytesMut::new();
        encode::agent_hello(&mut out, &Terms { max_frame_size: 1_048_572, capabilities: "" });
        let hello = Answer::Hello { version: "2.0".to_owned(), max_frame_size: 1_048_572 };
        assert_eq!(answer(&out[LENGTH_BYTES..]), Ok(hello));
        out.clear();
        encode::agent_disconnect(&mut out, Status::TooBig);
        assert_eq!(answer(&out[LENGTH_BYTES..]), Ok(Answer::Refused(Status::TooBig)));
        out.clear();
        encode::ack(&mut out, FrameId::NONE, &super::super::Actions::none(), 256);
        assert_eq!(answer(&out[LENGTH_BYTES..]), Err(AnswerError::Unexpected));
        assert!(answer(b"HTTP/1.1 400 Bad Request\r\n").is_err());
    }
}
