use super::super::admission::AdmissionLimits;
use super::super::value::{put_string, put_value};
use super::*;
use crate::metrics::SpopMetrics;
use proptest::prelude::*;
use std::time::Duration;

const FIN: u32 = 1;
const ABORT: u32 = 2;
const NOTIFY: u8 = 3;
const UNSET: u8 = 0;
/// The frame size of a HAProxy with buffers of 16 KiB.
const FRAME_BYTES: u32 = 16_380;

fn frame(code: u8, flags: u32, stream_id: u8, frame_id: u8, payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    out.put_u32(7 + payload.len() as u32);
    out.put_u8(code);
    out.put_u32(flags);
    out.put_slice(&[stream_id, frame_id]);
    out.put_slice(payload);
    out
}

fn hello(size: u32) -> Vec<u8> {
    let mut payload = Vec::new();
    for (name, value) in [
        ("supported-versions", "2.0".into()),
        ("max-frame-size", size.into()),
        ("capabilities", "pipelining".into()),
    ] {
        put_string(&mut payload, name.as_bytes());
        put_value(&mut payload, &value);
    }
    frame(1, FIN, 0, 0, &payload)
}

struct Peer {
    session: Session,
    now: Instant,
}

/// Events that can be compared.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Seen {
    Notify(u64, Bytes),
    Shed(Refusal),
    Aborted(u64),
    Closed(Close),
}

impl Peer {
    fn new(requests: usize, bytes: usize, payload_bytes: usize) -> Self {
        let limits = AdmissionLimits { requests, bytes, payload_bytes };
        let admission = Arc::new(Admission::new(limits, &SpopMetrics::register()));
        let now = Instant::now();
        Self { session: Session::new(16 << 20, admission, now), now }
    }

    /// After the handshake.
    fn running() -> Self {
        Self::running_with(100, 1 << 20, 1 << 20)
    }

    fn running_with(requests: usize, bytes: usize, payload_bytes: usize) -> Self {
        let mut peer = Self::new(requests, bytes, payload_bytes);
        assert_eq!(peer.send(&hello(FRAME_BYTES)), []);
        let answered = peer.session.output().len();
        assert_ne!(answered, 0);
        peer.session.written(answered);
        peer
    }

    /// Gives bytes to the session as a socket would, and returns the events with their tickets given back.
    fn send(&mut self, bytes: &[u8]) -> Vec<Seen> {
        self.deliver(bytes).into_iter().map(seen).collect()
    }

    fn deliver(&mut self, mut bytes: &[u8]) -> Vec<Event> {
        let mut events = Vec::new();
        while !bytes.is_empty() {
            let mut space = self.session.space();
            assert!(space.has_remaining_mut());
            let taken = space.remaining_mut().min(bytes.len());
            space.put_slice(&bytes[..taken]);
            bytes = &bytes[taken..];
            events.extend(std::iter::from_fn(|| self.session.next_event(self.now)));
        }
        events
    }

    fn error(&mut self, bytes: &[u8]) -> ProtocolError {
        match self.send(bytes).as_slice() {
            [Seen::Closed(Close::Error(error))] => {
                assert!(self.session.is_closed());
                *error
            }
            other => panic!("expected an error alone, got {other:?}"),
        }
    }
}

fn seen(event: Event) -> Seen {
    match event {
        Event::Notify(notify) => Seen::Notify(notify.id.stream_id, notify.messages),
        Event::Shed(refusal) => Seen::Shed(refusal),
        Event::Aborted(id) => Seen::Aborted(id.stream_id),
        Event::Closed(close) => Seen::Closed(close),
    }
}

fn notify(stream_id: u64, payload: &[u8]) -> Seen {
    Seen::Notify(stream_id, Bytes::copy_from_slice(payload))
}

const EMPTY_ACK_OF_7: &[u8] = &[0, 0, 0, 7, 103, 0, 0, 0, 1, 7, 1];

#[test]
fn a_whole_notify_is_handed_over() {
    let mut peer = Peer::running();
    assert_eq!(peer.send(&frame(NOTIFY, FIN, 7, 1, b"messages")), [notify(7, b"messages")]);
}

#[test]
fn pipelined_notifies_come_one_by_one() {
    let mut peer = Peer::running();
    let bytes =
        [frame(NOTIFY, FIN, 1, 1, b"a"), frame(NOTIFY, FIN, 2, 1, b""), frame(NOTIFY, FIN, 3, 1, b"c")]
            .concat();
    assert_eq!(peer.send(&bytes), [notify(1, b"a"), notify(2, b""), notify(3, b"c")]);
}

#[test]
fn fragments_are_put_together_in_one_piece() {
    let mut peer = Peer::running();
    assert_eq!(peer.send(&frame(NOTIFY, 0, 7, 1, b"one ")), []);
    assert_eq!(peer.send(&frame(UNSET, 0, 7, 1, b"two ")), []);
    assert_eq!(peer.send(&frame(UNSET, FIN, 7, 1, b"three")), [notify(7, b"one two three")]);
    assert_eq!(peer.send(&frame(NOTIFY, FIN, 8, 1, b"next")), [notify(8, b"next")]);
}

#[test]
fn an_abort_drops_the_fragments_and_is_not_answered() {
    let mut peer = Peer::running();
    peer.send(&frame(NOTIFY, 0, 7, 1, b"one"));
    assert_eq!(peer.send(&frame(UNSET, FIN | ABORT, 7, 1, b"")), [Seen::Aborted(7)]);
    assert_eq!(peer.session.output(), b"");
    assert_eq!(peer.session.unfinished_since(), None);
    assert_eq!(peer.send(&frame(NOTIFY, FIN, 8, 1, b"next")), [notify(8, b"next")]);
    // Nothing is left to be aborted, which is no mistake.
    assert_eq!(peer.send(&frame(UNSET, FIN | ABORT, 7, 1, b"")), []);
}

#[test]
fn a_notify_that_aborts_is_reported_and_not_handed_over() {
    let mut peer = Peer::running();
    assert_eq!(peer.send(&frame(NOTIFY, FIN | ABORT, 7, 1, b"messages")), [Seen::Aborted(7)]);
}

#[test]
fn unknown_frames_are_skipped() {
    let mut peer = Peer::running();
    let bytes = [frame(42, FIN, 0, 0, &[0xFF; 9000]), frame(NOTIFY, FIN, 1, 1, b"a")].concat();
    assert_eq!(peer.send(&bytes), [notify(1, b"a")]);
}

#[test]
fn each_breach_has_its_error() {
    let cases: [(&[&[u8]], ProtocolError); 10] = [
        (&[&frame(UNSET, FIN, 7, 1, b"")], ProtocolError::StrayFragment),
        (&[&frame(NOTIFY, 0, 7, 1, b""), &frame(UNSET, FIN, 8, 1, b"")], ProtocolError::Interlaced),
        (&[&frame(NOTIFY, 0, 7, 1, b""), &frame(UNSET, FIN, 7, 2, b"")], ProtocolError::Interlaced),
        (&[&frame(NOTIFY, 0, 7, 1, b""), &frame(NOTIFY, FIN, 8, 1, b"")], ProtocolError::Interlaced),
        (&[&frame(NOTIFY, ABORT, 7, 1, b"")], ProtocolError::AbortWithoutFin),
        (&[&frame(103, FIN, 7, 1, b"")], ProtocolError::WrongDirection(FrameType::Ack)),
        (&[&frame(2, 0, 0, 0, b"")], ProtocolError::Fragmented(FrameType::HaproxyDisconnect)),
        (&[&frame(2, FIN, 1, 0, b"")], ProtocolError::UnexpectedIds(FrameType::HaproxyDisconnect)),
        (&[&hello(FRAME_BYTES)], ProtocolError::RepeatedHello),
        (&[&[0, 0, 0, 6, 3, 0, 0, 0, 1, 0]], ProtocolError::TooShort { length_bytes: 6 }),
    ];
    for (frames, error) in cases {
        assert_eq!(Peer::running().error(&frames.concat()), error);
    }
}

#[test]
fn other_frames_before_the_hello_are_refused() {
    for (code, frame_type) in [(0, FrameType::Unset), (3, FrameType::Notify), (42, FrameType::Unknown(42))] {
        let error = Peer::new(1, 1, 1).error(&frame(code, FIN, 0, 0, b""));
        assert_eq!(error, ProtocolError::HelloExpected(frame_type));
    }
}

#[test]
fn haproxy_may_leave_before_the_hello() {
    let mut peer = Peer::new(1, 1, 1);
    let payload = b"\x0bstatus-code\x03\x00\x07message\x08\x06normal";
    assert_eq!(peer.send(&frame(2, FIN, 0, 0, payload)), [Seen::Closed(Close::Peer(Status::Normal))]);
    assert_eq!(peer.session.output()[4], 102);
}

#[test]
fn a_length_is_refused_before_anything_is_allocated() {
    let limit_bytes = FRAME_BYTES as usize;
    let mut peer = Peer::running();
    let error = peer.error(&(FRAME_BYTES + 1).to_be_bytes());
    assert_eq!(error, ProtocolError::TooBig { length_bytes: limit_bytes + 1, limit_bytes });
    assert_eq!(peer.session.input.capacity(), 0);
    // A web browser at the wrong port.
    let error = Peer::new(1, 1, 1).error(b"GET / HTTP/1.1\r\n");
    assert!(matches!(error, ProtocolError::TooBig { length_bytes: 0x4745_5420, .. }));
}

#[test]
fn a_frame_may_be_as_long_as_agreed() {
    let mut peer = Peer::running();
    let payload = vec![7; FRAME_BYTES as usize - 7];
    assert_eq!(peer.send(&frame(NOTIFY, FIN, 7, 1, &payload)), [notify(7, &payload)]);
}

#[test]
fn more_requests_than_allowed_are_answered_without_an_opinion() {
    let mut peer = Peer::running_with(1, 1000, 1000);
    let held = peer.deliver(&frame(NOTIFY, FIN, 1, 1, b"a"));
    assert_eq!(peer.send(&frame(NOTIFY, FIN, 7, 1, b"b")), [Seen::Shed(Refusal::Requests)]);
    assert_eq!(peer.session.output(), EMPTY_ACK_OF_7);
    drop(held);
    assert_eq!(peer.send(&frame(NOTIFY, FIN, 2, 1, b"c")), [notify(2, b"c")]);
}

#[test]
fn a_payload_without_room_is_dropped_as_it_arrives() {
    let mut peer = Peer::running_with(10, 1000, 1000);
    let bytes = frame(NOTIFY, FIN, 7, 1, &[0; 1001]);
    let mut events = Vec::new();
    for byte in &bytes {
        events.extend(peer.send(&[*byte]));
        assert!(peer.session.input.len() < MAX_HEADER_BYTES);
    }
    assert_eq!(events, [Seen::Shed(Refusal::Payload)]);
    assert_eq!(peer.session.output(), EMPTY_ACK_OF_7);
}

#[test]
fn fragments_without_room_are_answered_once_at_their_end() {
    let mut peer = Peer::running_with(10, 100, 1000);
    peer.send(&frame(NOTIFY, 0, 7, 1, &[0; 60]));
    peer.send(&frame(UNSET, 0, 7, 1, &[0; 60]));
    assert_eq!(peer.send(&frame(UNSET, 0, 7, 1, &[0; 10])), []);
    assert_eq!(peer.session.output(), b"");
    assert_eq!(peer.send(&frame(UNSET, FIN, 7, 1, &[0; 10])), [Seen::Shed(Refusal::Bytes)]);
    assert_eq!(peer.session.output(), EMPTY_ACK_OF_7);
    // The room of the first fragment came back.
    assert_eq!(peer.send(&frame(NOTIFY, FIN, 8, 1, &[1; 100])), [notify(8, &[1; 100])]);
}

#[test]
fn a_refused_first_fragment_is_followed_to_its_end() {
    let mut peer = Peer::running_with(10, 1000, 50);
    peer.send(&frame(NOTIFY, 0, 7, 1, &[0; 60]));
    assert_eq!(peer.send(&frame(UNSET, FIN, 7, 1, &[0; 10])), [Seen::Shed(Refusal::Payload)]);
}

#[test]
fn an_idle_session_holds_no_buffer_after_a_long_frame() {
    let mut peer = Peer::new(10, 20 << 20, 20 << 20);
    peer.send(&hello(8_454_140));
    let payload = vec![7; 8 << 20];
    let mut events = peer.deliver(&frame(NOTIFY, FIN, 7, 1, &payload));
    assert_eq!(peer.session.input.capacity(), 0);
    let Some(Event::Notify(notify)) = events.pop() else { panic!("a request") };
    assert!(notify.messages.is_unique(), "nothing else holds the payload");
}

#[test]
fn the_clock_of_a_request_starts_at_its_first_byte() {
    let mut peer = Peer::running();
    let started = peer.now;
    let bytes = [frame(NOTIFY, 0, 7, 1, b"one"), frame(UNSET, FIN, 7, 1, b"two")].concat();
    peer.send(&bytes[..1]);
    peer.now += Duration::from_secs(1);
    peer.send(&bytes[1..15]);
    peer.now += Duration::from_secs(1);
    assert_eq!(peer.session.unfinished_since(), Some(started));
    let events = peer.deliver(&bytes[15..]);
    assert!(matches!(&events[..], [Event::Notify(notify)] if notify.received == started));
    assert_eq!(peer.session.unfinished_since(), None);
}

#[test]
fn the_hello_is_owed_from_the_start() {
    let mut peer = Peer::new(1, 1, 1);
    assert_eq!(peer.session.unfinished_since(), Some(peer.now));
    assert!(matches!(peer.session.stalled(), Some(Event::Closed(Close::Error(ProtocolError::Stalled)))));
    assert!(peer.session.stalled().is_none());
}

#[test]
fn nothing_is_heard_after_the_end() {
    let mut peer = Peer::running();
    peer.session.disconnect();
    let said = peer.session.output().to_vec();
    peer.session.disconnect();
    assert_eq!(peer.send(&frame(NOTIFY, FIN, 7, 1, b"late")), []);
    peer.session.ack(FrameId { stream_id: 7, frame_id: 1 }, &Actions::none());
    assert_eq!(peer.session.output(), said);
}

/// A session as HAProxy could lead it: whole and fragmented requests, some taken back, some skipped frames.
fn conversation() -> impl Strategy<Value = (Vec<u8>, Vec<Seen>)> {
    let payload = || prop::collection::vec(any::<u8>(), 0..300);
    let request = prop_oneof![
        payload().prop_map(|one| vec![(NOTIFY, FIN, one)]),
        (payload(), prop::collection::vec(payload(), 0..4), payload()).prop_map(|(first, middle, last)| {
            let middle = middle.into_iter().map(|one| (UNSET, 0, one));
            [(NOTIFY, 0, first)].into_iter().chain(middle).chain([(UNSET, FIN, last)]).collect()
        }),
        payload().prop_map(|first| vec![(NOTIFY, 0, first), (UNSET, FIN | ABORT, Vec::new())]),
        payload().prop_map(|one| vec![(77, FIN, one)]),
    ];
    prop::collection::vec(request, 0..6).prop_map(|requests| {
        let (mut bytes, mut expected) = (hello(FRAME_BYTES), Vec::new());
        for (stream_id, frames) in (0..).zip(requests) {
            let mut whole = Vec::new();
            for (code, flags, payload) in &frames {
                bytes.extend(frame(*code, *flags, stream_id, 1, payload));
                whole.extend_from_slice(payload);
            }
            match frames.last() {
                Some((77, ..)) | None => {}
                Some((_, flags, _)) if flags & ABORT != 0 => expected.push(Seen::Aborted(stream_id.into())),
                Some(_) => expected.push(notify(stream_id.into(), &whole)),
            }
        }
        (bytes, expected)
    })
}

proptest! {
    #[test]
    fn bytes_may_be_split_anywhere((bytes, expected) in conversation(), cuts in prop::collection::vec(1usize..400, 0..40)) {
        let mut peer = Peer::new(100, 1 << 20, 1 << 20);
        let (mut rest, mut events) = (bytes.as_slice(), Vec::new());
        for cut in cuts {
            let (now, later) = rest.split_at(cut.min(rest.len()));
            events.extend(peer.send(now));
            rest = later;
        }
        events.extend(peer.send(rest));
        prop_assert_eq!(events, expected);
        prop_assert_eq!(peer.session.unfinished_since(), None);
    }

    #[test]
    fn any_bytes_do_no_harm(bytes: Vec<u8>, after_hello: bool) {
        let mut peer = if after_hello { Peer::running() } else { Peer::new(2, 500, 500) };
        peer.send(&bytes);
    }

    #[test]
    fn any_frames_do_no_harm(frames in prop::collection::vec(
        (prop_oneof![0u8..4, 101u8..104, any::<u8>()], 0u32..4, 0u8..3, 0u8..3, prop::collection::vec(any::<u8>(), 0..60)),
        0..20,
    )) {
        let mut peer = Peer::running_with(2, 100, 80);
        for (code, flags, stream_id, frame_id, payload) in frames {
            peer.send(&frame(code, flags, stream_id, frame_id, &payload));
        }
        if peer.session.fragments.is_none() {
            prop_assert_eq!(peer.session.admission.admit(80).map(drop), Ok(()), "all room came back");
        }
    }
}
