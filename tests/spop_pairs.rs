//! Our SPOP codec against the published `spop` crate: each reads what the other writes, and both write the same.

use bytes::{Bytes, BytesMut};
use kvspoa::metrics::SpopMetrics;
use kvspoa::spop::admission::{Admission, AdmissionLimits};
use kvspoa::spop::decode::disconnect;
use kvspoa::spop::encode;
use kvspoa::spop::error::DecodeError;
use kvspoa::spop::frame::{FrameId, FrameType, Header, put_header};
use kvspoa::spop::hello::{HaproxyHello, Terms};
use kvspoa::spop::session::{Close, Event, Session};
use kvspoa::spop::status::Status;
use kvspoa::spop::value::{put_string, put_value, value};
use kvspoa::spop::{Actions, Scope, Value, messages};
use proptest::prelude::*;
use spop::frame::FramePayload;
use spop::frames::haproxy_disconnect::{HaproxyDisconnect, HaproxyDisconnectFrame};
use spop::frames::haproxy_hello::HaproxyHelloFrame;
use spop::frames::{Ack, AgentDisconnect, FrameCapabilities, HaproxyHello as TheirHello};
use spop::types::typed_data;
use spop::{FrameFlags, Metadata, SpopCodec, SpopFrame, StatusCode, TypedData, VarScope, Version};
use std::sync::Arc;
use std::time::Instant;
use tokio_util::codec::Decoder;

/// A value in their form.
fn theirs() -> impl Strategy<Value = TypedData> {
    prop_oneof![
        Just(TypedData::Null),
        any::<bool>().prop_map(TypedData::Bool),
        any::<i32>().prop_map(TypedData::Int32),
        any::<u32>().prop_map(TypedData::UInt32),
        any::<i64>().prop_map(TypedData::Int64),
        any::<u64>().prop_map(TypedData::UInt64),
        any::<std::net::Ipv4Addr>().prop_map(TypedData::IPv4),
        any::<std::net::Ipv6Addr>().prop_map(TypedData::IPv6),
        ".{0,40}".prop_map(TypedData::String),
        prop::collection::vec(any::<u8>(), 0..3000).prop_map(TypedData::Binary),
    ]
}

/// The same in ours.
fn ours(theirs: &TypedData) -> Value<'_> {
    match theirs {
        TypedData::Null => Value::Null,
        TypedData::Bool(value) => Value::Bool(*value),
        TypedData::Int32(value) => Value::Int32(*value),
        TypedData::UInt32(value) => Value::UInt32(*value),
        TypedData::Int64(value) => Value::Int64(*value),
        TypedData::UInt64(value) => Value::UInt64(*value),
        TypedData::IPv4(address) => Value::Ipv4(*address),
        TypedData::IPv6(address) => Value::Ipv6(*address),
        TypedData::String(text) => Value::String(text.as_bytes()),
        TypedData::Binary(bytes) => Value::Binary(bytes),
    }
}

type TheirMessage = (String, Vec<(String, TypedData)>);

fn their_messages() -> impl Strategy<Value = Vec<TheirMessage>> {
    let args = prop::collection::vec(("[a-z]{0,8}", theirs()), 0..6);
    prop::collection::vec(("[a-z-]{1,12}", args), 0..4)
}

fn payload(messages: &[TheirMessage]) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, args) in messages {
        put_string(&mut out, name.as_bytes());
        out.push(u8::try_from(args.len()).expect("few arguments"));
        for (name, value) in args {
            put_string(&mut out, name.as_bytes());
            put_value(&mut out, &ours(value));
        }
    }
    out
}

fn frame(frame_type: FrameType, id: FrameId, payload: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    put_header(&mut body, &Header::whole(frame_type, id));
    body.extend_from_slice(payload);
    [&u32::try_from(body.len()).expect("a short frame").to_be_bytes()[..], &body].concat()
}

fn id() -> impl Strategy<Value = FrameId> {
    (any::<u64>(), any::<u64>()).prop_map(|(stream_id, frame_id)| FrameId { stream_id, frame_id })
}

fn scope() -> impl Strategy<Value = (Scope, VarScope)> {
    prop_oneof![
        Just((Scope::Process, VarScope::Process)),
        Just((Scope::Session, VarScope::Session)),
        Just((Scope::Transaction, VarScope::Transaction)),
        Just((Scope::Request, VarScope::Request)),
        Just((Scope::Response, VarScope::Response)),
    ]
}

/// What both readers make of a NOTIFY.
fn as_ours(payload: &Bytes) -> Result<Vec<TheirMessage>, DecodeError> {
    let owned = |value: Value<'_>| {
        let mut bytes = Vec::new();
        put_value(&mut bytes, &value);
        TypedData::from_bytes(&bytes).expect("a value that we wrote")
    };
    messages(payload)
        .map(|message| {
            let message = message?;
            let args = message.args.map(|(name, value)| (name.to_owned(), owned(value))).collect();
            Ok((message.name.to_owned(), args))
        })
        .collect()
}

fn as_theirs(frame: &dyn SpopFrame) -> Vec<TheirMessage> {
    let FramePayload::ListOfMessages(messages) = frame.payload() else { panic!("a NOTIFY") };
    messages.iter().map(|message| (message.name.clone(), message.args.clone())).collect()
}

fn their_hello(healthcheck: bool, pipelining: bool, max_frame_size: u32) -> Vec<u8> {
    let hello = HaproxyHelloFrame {
        metadata: Metadata { flags: FrameFlags::new(true, false), stream_id: 0, frame_id: 0 },
        payload: TheirHello {
            supported_versions: vec![Version::new(2, 0, 0), Version::new(1, 5, 0)],
            max_frame_size,
            capabilities: if pipelining { vec![FrameCapabilities::Pipelining] } else { Vec::new() },
            healthcheck: Some(healthcheck),
            engine_id: Some("engine".to_owned()),
        },
    };
    hello.serialize().expect("a frame")
}

fn their_disconnect(status_code: u32) -> Vec<u8> {
    let disconnect = HaproxyDisconnectFrame {
        metadata: Metadata { flags: FrameFlags::new(true, false), stream_id: 0, frame_id: 0 },
        payload: HaproxyDisconnect { status_code, message: "message".to_owned() },
    };
    disconnect.serialize().expect("a frame")
}

/// The items of a key-value frame without ids, read by them.
fn read_items(frame: &[u8]) -> Vec<(String, TypedData)> {
    let (mut rest, mut items) = (&frame[11..], Vec::new());
    while !rest.is_empty() {
        let (after, length) = spop::decode_varint(rest).expect("a length");
        let (name, after) = after.split_at(usize::try_from(length).expect("a short name"));
        let (after, value) = typed_data(after).expect("a value");
        items.push((String::from_utf8(name.to_vec()).expect("UTF-8"), value));
        rest = after;
    }
    items
}

fn session() -> Session {
    let limits = AdmissionLimits { requests: 1000, bytes: 1 << 24, payload_bytes: 1 << 24 };
    Session::new(1 << 24, Arc::new(Admission::new(limits, &SpopMetrics::register())), Instant::now())
}

#[test]
fn status_codes_and_their_words_agree() {
    for status in Status::ALL {
        assert_eq!(StatusCode::from_u32(status.code()).to_u32(), status.code());
        let mut out = BytesMut::new();
        encode::agent_disconnect(&mut out, status);
        let theirs = AgentDisconnect { status_code: status.code(), message: status.message().to_owned() };
        let theirs = theirs.serialize().expect("a frame");
        assert_eq!(out.len(), theirs.len());
        assert_eq!(disconnect(&out[11..]), disconnect(&theirs[11..]));
    }
}

proptest! {
    #[test]
    fn values_have_the_same_bytes(theirs in theirs()) {
        let (mut their_bytes, mut our_bytes) = (Vec::new(), Vec::new());
        theirs.to_bytes(&mut their_bytes);
        put_value(&mut our_bytes, &ours(&theirs));
        prop_assert_eq!(&their_bytes, &our_bytes);
        prop_assert_eq!(value(&their_bytes), Ok((&[][..], ours(&theirs))));
    }

    #[test]
    fn integers_have_the_same_bytes(number: u64) {
        let mut our_bytes = Vec::new();
        kvspoa::spop::varint::put_varint(&mut our_bytes, number);
        let mut their_bytes = Vec::new();
        spop::encode_varint_into(number, &mut their_bytes);
        prop_assert_eq!(our_bytes, their_bytes);
    }

    #[test]
    fn answers_have_the_same_bytes(id in id(), vars in prop::collection::vec((scope(), "[a-z]{1,10}", prop::option::of(theirs())), 0..8)) {
        let mut actions = Actions::none();
        let mut ack = Ack::new(id.stream_id, id.frame_id);
        for ((our_scope, their_scope), name, value) in &vars {
            match value {
                Some(value) => {
                    actions.set_var(*our_scope, name, ours(value));
                    ack = ack.set_var(*their_scope, name, value.clone());
                }
                None => {
                    actions.unset_var(*our_scope, name);
                    ack = ack.unset_var(*their_scope, name);
                }
            }
        }
        let mut out = BytesMut::new();
        prop_assert!(encode::ack(&mut out, id, &actions, u32::MAX));
        prop_assert_eq!(&out[..], &ack.serialize().expect("a frame")[..]);
    }

    #[test]
    fn they_read_our_hello(max_frame_size in 256u32.., fragmentation_only: bool) {
        let capabilities = if fragmentation_only { "fragmentation" } else { "pipelining,fragmentation" };
        let mut out = BytesMut::new();
        encode::agent_hello(&mut out, &Terms { max_frame_size, capabilities });
        let expected = [
            ("version".to_owned(), TypedData::String("2.0".to_owned())),
            ("max-frame-size".to_owned(), TypedData::UInt32(max_frame_size)),
            ("capabilities".to_owned(), TypedData::String(capabilities.to_owned())),
        ];
        prop_assert_eq!(read_items(&out), expected);
    }

    #[test]
    fn we_read_their_hello(healthcheck: bool, pipelining: bool, max_frame_size in 256u32..) {
        let bytes = their_hello(healthcheck, pipelining, max_frame_size);
        let hello = HaproxyHello::parse(&bytes[11..]);
        let expected = HaproxyHello { max_frame_size: max_frame_size.into(), pipelining, healthcheck };
        prop_assert_eq!(hello, Ok(expected));
    }

    #[test]
    fn both_read_the_same_messages(id in id(), sent in their_messages()) {
        let payload = payload(&sent);
        let bytes = frame(FrameType::Notify, id, &payload);
        let (rest, theirs) = spop::parser::parse_frame(&bytes).expect("a frame");
        prop_assert!(rest.is_empty());
        prop_assert_eq!(theirs.metadata().stream_id, id.stream_id);
        prop_assert_eq!(theirs.metadata().frame_id, id.frame_id);
        prop_assert_eq!(as_theirs(&*theirs), sent.clone());
        prop_assert_eq!(as_ours(&payload.into()), Ok(sent));
    }

    /// One byte of a good payload is changed: where both still read it, they read the same.
    #[test]
    fn damage_is_read_alike(sent in their_messages(), at: prop::sample::Index, byte: u8) {
        let mut payload = payload(&sent);
        prop_assume!(!payload.is_empty());
        let at = at.index(payload.len());
        payload[at] = byte;
        let bytes = frame(FrameType::Notify, FrameId { stream_id: 1, frame_id: 1 }, &payload);
        let theirs = spop::parser::parse_frame(&bytes).ok().map(|(_, frame)| as_theirs(&*frame));
        let ours = as_ours(&payload.into());
        match (ours, theirs) {
            (Ok(ours), Some(theirs)) => prop_assert_eq!(ours, theirs),
            // They mend a name that is not UTF-8, and cut an integer above 64 bits.
            (Err(error), Some(_)) => {
                prop_assert!(matches!(error, DecodeError::Name | DecodeError::IntegerTooLong), "only they read it: {error}");
            }
            (Ok(ours), None) => prop_assert!(false, "only we read {ours:?}"),
            (Err(_), None) => {}
        }
    }

    /// A whole session, split anywhere: their decoder and our session see the same.
    #[test]
    fn a_split_stream_is_read_alike(
        notifies in prop::collection::vec((id(), their_messages()), 0..6),
        status in prop::sample::select(&Status::ALL[..]),
        cuts in prop::collection::vec(1usize..3000, 0..60),
    ) {
        let mut bytes = their_hello(false, true, 1 << 20);
        for (id, sent) in &notifies {
            bytes.extend(frame(FrameType::Notify, *id, &payload(sent)));
        }
        bytes.extend(their_disconnect(status.code()));

        let (mut codec, mut buffer, mut session) = (SpopCodec::default(), BytesMut::new(), session());
        let (mut theirs, mut ours, mut closes) = (Vec::new(), Vec::new(), Vec::new());
        let mut rest = bytes.as_slice();
        for cut in cuts.into_iter().chain([usize::MAX]) {
            let (now, later) = rest.split_at(cut.min(rest.len()));
            rest = later;
            buffer.extend_from_slice(now);
            while let Some(frame) = codec.decode(&mut buffer).expect("good frames") {
                if *frame.frame_type() == spop::FrameType::Notify {
                    theirs.push((frame.metadata().stream_id, frame.metadata().frame_id, as_theirs(&*frame)));
                }
            }
            let mut now = now;
            while !now.is_empty() {
                now = feed(&mut session, now);
                while let Some(event) = session.next_event(Instant::now()) {
                    match event {
                        Event::Notify(notify) => {
                            let messages = as_ours(&notify.messages).expect("good messages");
                            ours.push((notify.id.stream_id, notify.id.frame_id, messages));
                        }
                        Event::Closed(close) => closes.push(close),
                        other => prop_assert!(false, "{other:?}"),
                    }
                }
            }
        }
        prop_assert_eq!(ours, theirs);
        prop_assert_eq!(closes, [Close::Peer(status)]);
    }
}

/// Gives a session what it has space for; returns the rest.
fn feed<'a>(session: &mut Session, bytes: &'a [u8]) -> &'a [u8] {
    use bytes::BufMut;
    let mut space = session.space();
    let (now, later) = bytes.split_at(space.remaining_mut().min(bytes.len()));
    space.put_slice(now);
    later
}
