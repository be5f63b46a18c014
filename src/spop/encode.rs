//! The frames that an agent sends. Each is whole and at least a header long; none is above the agreed size.

use super::actions::Actions;
use super::frame::{FrameId, FrameType, Header, LENGTH_BYTES, put_header};
use super::hello::{Terms, VERSION};
use super::status::Status;
use super::value::{Value, put_string, put_value};
use bytes::{BufMut, BytesMut};

/// AGENT-HELLO (SPOE.txt §3.2.5).
pub fn agent_hello(out: &mut BytesMut, terms: &Terms) {
    let items = [
        ("version", Value::from(VERSION)),
        ("max-frame-size", terms.max_frame_size.into()),
        ("capabilities", terms.capabilities.into()),
    ];
    frame(out, &Header::whole(FrameType::AgentHello, FrameId::NONE), &key_values(&items));
}

/// AGENT-DISCONNECT (SPOE.txt §3.2.9).
pub fn agent_disconnect(out: &mut BytesMut, status: Status) {
    let items = [("status-code", Value::from(status.code())), ("message", status.message().into())];
    frame(out, &Header::whole(FrameType::AgentDisconnect, FrameId::NONE), &key_values(&items));
}

/// ACK (SPOE.txt §3.2.7). Returns whether all actions fitted into `max_frame_size`; the last ones are left out if not.
pub fn ack(out: &mut BytesMut, id: FrameId, actions: &Actions, max_frame_size: u32) -> bool {
    let header = Header::whole(FrameType::Ack, id);
    let payload = actions.payload_within((max_frame_size as usize).saturating_sub(header.encoded_len()));
    frame(out, &header, payload);
    payload.len() == actions.payload().len()
}

fn frame(out: &mut BytesMut, header: &Header, payload: &[u8]) {
    let length = header.encoded_len() + payload.len();
    out.reserve(LENGTH_BYTES + length);
    // Fits: control frames are tiny, and an ACK is within a `max_frame_size` of 32 bits.
    out.put_u32(length as u32);
    put_header(out, header);
    out.put_slice(payload);
}

fn key_values(items: &[(&str, Value<'_>)]) -> Vec<u8> {
    let mut out = Vec::with_capacity(128);
    for (name, value) in items {
        put_string(&mut out, name.as_bytes());
        put_value(&mut out, value);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::actions::Scope;
    use super::*;

    #[test]
    fn agent_hello_has_the_bytes_of_the_specification() {
        let mut out = BytesMut::new();
        agent_hello(&mut out, &Terms { max_frame_size: 16_380, capabilities: "pipelining,fragmentation" });
        let expected = b"\x00\x00\x00\x4e\x65\x00\x00\x00\x01\x00\x00\
            \x07version\x08\x032.0\
            \x0emax-frame-size\x03\xfc\xf0\x06\
            \x0ccapabilities\x08\x18pipelining,fragmentation";
        assert_eq!(out, &expected[..]);
    }

    #[test]
    fn agent_disconnect_has_the_bytes_of_the_specification() {
        let mut out = BytesMut::new();
        agent_disconnect(&mut out, Status::TooBig);
        let expected =
            b"\x00\x00\x00\x2f\x66\x00\x00\x00\x01\x00\x00\x0bstatus-code\x03\x03\x07message\x08\x10frame is too big";
        assert_eq!(out, &expected[..]);
    }

    #[test]
    fn an_ack_without_actions_is_a_header() {
        let mut out = BytesMut::new();
        assert!(ack(&mut out, FrameId { stream_id: 7, frame_id: 1 }, &Actions::none(), 256));
        assert_eq!(out, &b"\x00\x00\x00\x07\x67\x00\x00\x00\x01\x07\x01"[..]);
    }

    #[test]
    fn an_ack_never_exceeds_the_agreed_size() {
        let id = FrameId { stream_id: u64::MAX, frame_id: u64::MAX };
        for length in 200..300 {
            let mut actions = Actions::none();
            actions.set_var(Scope::Transaction, "server", "s1");
            actions.set_var(Scope::Transaction, "why", "x".repeat(length).as_str());
            let mut out = BytesMut::new();
            let all = ack(&mut out, id, &actions, 256);
            assert!(out.len() <= LENGTH_BYTES + 256);
            assert_eq!(all, actions.payload().len() + 25 <= 256, "{length}");
            assert!(out.windows(2).any(|two| two == b"s1"), "the first action stays");
        }
    }
}
