//! One connection of HAProxy's, without its socket: bytes and time in, events and bytes out.
//!
//! The owner reads into [`Session::space`], takes events with [`Session::next_event`] until there are none, gives
//! answers to [`Session::ack`], and writes [`Session::output`]. After [`Event::Closed`] it writes what is left of the
//! output and closes.
//!
//! Memory: a frame is charged to the [`Admission`] for its whole length as soon as its header is there; if that is
//! refused, its payload is dropped as it arrives and answered without an opinion. An idle session holds no buffer.

use super::actions::Actions;
use super::admission::{Admission, Refusal, Ticket};
use super::decode::disconnect;
use super::encode;
use super::error::{DecodeError, ProtocolError};
use super::frame::{self, FrameId, FrameType, Header, LENGTH_BYTES, MAX_HEADER_BYTES, MIN_FRAME_BYTES};
use super::hello::HaproxyHello;
use super::status::Status;
use bytes::buf::Limit;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use std::sync::Arc;
use std::time::Instant;

/// What one read takes at most, except for the rest of a longer frame. Most NOTIFYs fit; a busy connection pins this much.
pub const READ_BYTES: usize = 16 * 1024;
/// The longest HELLO or DISCONNECT. HAProxy's are below 300 bytes; before the HELLO nothing else has been agreed.
pub const MAX_CONTROL_FRAME_BYTES: usize = 16 * 1024;
/// An output buffer that grew beyond this is given back once it is written.
const KEEP_OUTPUT_BYTES: usize = 4 * 1024;

/// What a session reports.
#[derive(Debug)]
pub enum Event {
    /// A request, whole.
    Notify(Notify),
    /// A request was answered without an opinion, for want of room.
    Shed(Refusal),
    /// HAProxy took a request back. It expects no answer, and up to 3.0 may take one for a mistake.
    Aborted(FrameId),
    /// The connection is over. Comes once, and last.
    Closed(Close),
}

/// A request.
#[derive(Debug)]
pub struct Notify {
    /// What its ACK must repeat.
    pub id: FrameId,
    /// The list of messages.
    pub messages: Bytes,
    /// When its first byte came.
    pub received: Instant,
    /// Its place among the requests in flight, to be held as long as `messages`.
    pub ticket: Ticket,
}

/// Why a session ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Close {
    /// A health check was answered.
    HealthCheck,
    /// HAProxy sent DISCONNECT.
    Peer(Status),
    /// HAProxy broke the protocol.
    Error(ProtocolError),
}

/// See the [module](self).
#[derive(Debug)]
pub struct Session {
    admission: Arc<Admission>,
    own_max_frame_size: u32,
    /// HAProxy's, once it has told.
    peer_max_frame_size: Option<u64>,
    state: State,
    input: BytesMut,
    reading: Reading,
    fragments: Option<Fragments>,
    output: BytesMut,
    unfinished_since: Option<Instant>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Before HAPROXY-HELLO.
    Hello,
    /// With the agreed size of frames.
    Running { max_frame_size: u32 },
    /// Nothing is read any more.
    Closed,
}

/// Where in a frame the next byte of input belongs.
#[derive(Debug, Default)]
enum Reading {
    /// At the length and header.
    #[default]
    Header,
    /// In the payload of a frame that is kept.
    Payload { header: Header, payload_bytes: usize, ticket: Option<Ticket> },
    /// In the payload of a frame that is not.
    Skip { left_bytes: usize, then: Then },
}

/// What happens once a skipped frame has passed.
#[derive(Clone, Copy, Debug)]
enum Then {
    /// It never was.
    Nothing,
    /// It is answered without an opinion.
    Shed(FrameId, Refusal),
    /// What it belongs to is cancelled.
    Abort(FrameId),
}

/// A payload of which fragments are still to come. There is one at most: HAProxy sends them without a gap.
#[derive(Debug)]
struct Fragments {
    id: FrameId,
    payload: BytesMut,
    /// Why the payload is not kept, or the room it takes.
    ticket: Result<Ticket, Refusal>,
}

impl Session {
    /// A session whose connection was accepted `now`. `own_max_frame_size` is what we can take, in bytes.
    #[must_use]
    pub fn new(own_max_frame_size: u32, admission: Arc<Admission>, now: Instant) -> Self {
        Self {
            admission,
            own_max_frame_size,
            peer_max_frame_size: None,
            state: State::Hello,
            input: BytesMut::new(),
            reading: Reading::Header,
            fragments: None,
            output: BytesMut::new(),
            unfinished_since: Some(now),
        }
    }

    /// Where the next bytes are to be read into. Never empty. The rest of a frame is asked for alone, so that the
    /// buffer of a long one goes to its handler with nothing behind it.
    pub fn space(&mut self) -> Limit<&mut BytesMut> {
        let wanted = match &self.reading {
            Reading::Payload { payload_bytes, .. } => payload_bytes.saturating_sub(self.input.len()),
            Reading::Header | Reading::Skip { .. } => READ_BYTES,
        };
        self.input.reserve(wanted);
        (&mut self.input).limit(wanted)
    }

    /// The next event of the bytes read so far.
    pub fn next_event(&mut self, now: Instant) -> Option<Event> {
        if self.state == State::Closed {
            self.input = BytesMut::new();
            return None;
        }
        let event = self.step(now).unwrap_or_else(|error| Some(self.fail(error)));
        if self.input.is_empty() {
            self.input = BytesMut::new();
        }
        event
    }

    /// Answers a NOTIFY. Returns whether all actions fitted. After the end it does nothing.
    pub fn ack(&mut self, id: FrameId, actions: &Actions) -> bool {
        match self.state {
            State::Running { max_frame_size } => encode::ack(&mut self.output, id, actions, max_frame_size),
            State::Hello | State::Closed => true,
        }
    }

    /// Ends the session in good order, for a shutdown of ours.
    pub fn disconnect(&mut self) {
        self.close(Status::Normal);
    }

    /// Ends the session because HAProxy did not go on for too long; see [`Session::unfinished_since`].
    pub fn stalled(&mut self) -> Option<Event> {
        (self.state != State::Closed).then(|| self.fail(ProtocolError::Stalled))
    }

    /// Since when HAProxy owes us something: the HELLO, or the rest of a payload.
    #[must_use]
    pub const fn unfinished_since(&self) -> Option<Instant> {
        self.unfinished_since
    }

    /// Bytes to be written.
    #[must_use]
    pub fn output(&self) -> &[u8] {
        &self.output
    }

    /// Forgets bytes of the output that were written.
    pub fn written(&mut self, bytes: usize) {
        self.output.advance(bytes.min(self.output.len()));
        if self.output.is_empty() && self.output.capacity() > KEEP_OUTPUT_BYTES {
            self.output = BytesMut::new();
        }
    }

    /// HAProxy's largest frame (`tune.bufsize` − 4), in bytes; `None` before its HELLO, and of a health check.
    #[must_use]
    pub const fn peer_max_frame_size(&self) -> Option<u64> {
        self.peer_max_frame_size
    }

    /// Whether the session has ended; what is left of the output is still to be written.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.state == State::Closed
    }

    fn step(&mut self, now: Instant) -> Result<Option<Event>, ProtocolError> {
        loop {
            match std::mem::take(&mut self.reading) {
                Reading::Header => {
                    if !self.input.is_empty() {
                        self.unfinished_since.get_or_insert(now);
                    }
                    match self.open_frame()? {
                        Some(reading) => self.reading = reading,
                        None => return Ok(None),
                    }
                }
                Reading::Payload { header, payload_bytes, ticket } => {
                    if self.input.len() < payload_bytes {
                        self.reading = Reading::Payload { header, payload_bytes, ticket };
                        return Ok(None);
                    }
                    let payload = self.input.split_to(payload_bytes);
                    let event = self.frame(&header, payload, ticket, now)?;
                    if event.is_some() {
                        return Ok(event);
                    }
                }
                Reading::Skip { left_bytes, then } => {
                    let skipped = left_bytes.min(self.input.len());
                    self.input.advance(skipped);
                    if skipped < left_bytes {
                        self.reading = Reading::Skip { left_bytes: left_bytes - skipped, then };
                        return Ok(None);
                    }
                    let event = self.skipped(then);
                    if event.is_some() {
                        return Ok(event);
                    }
                }
            }
        }
    }

    /// Reads a frame's length and header, once they are there, and says what is to be done with the payload.
    fn open_frame(&mut self) -> Result<Option<Reading>, ProtocolError> {
        let Some(length) = self.input.first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
        let length_bytes = u32::from_be_bytes(*length) as usize;
        let limit_bytes = match self.state {
            State::Running { max_frame_size } => max_frame_size as usize,
            State::Hello | State::Closed => MAX_CONTROL_FRAME_BYTES,
        };
        if length_bytes > limit_bytes {
            return Err(ProtocolError::TooBig { length_bytes, limit_bytes });
        }
        if length_bytes < MIN_FRAME_BYTES {
            return Err(ProtocolError::TooShort { length_bytes });
        }
        let here = self.input.get(LENGTH_BYTES..).unwrap_or_default();
        let here = here.get(..length_bytes).unwrap_or(here);
        let (header, header_bytes) = match frame::header(here) {
            Ok((rest, header)) => (header, here.len() - rest.len()),
            Err(_) if here.len() < length_bytes.min(MAX_HEADER_BYTES) => return Ok(None),
            Err(error) => return Err(DecodeError::from(error).into()),
        };
        let payload_bytes = length_bytes - header_bytes;
        self.input.advance(LENGTH_BYTES + header_bytes);
        self.admit(header, length_bytes, payload_bytes).map(Some)
    }

    /// Checks a frame by its header, and finds the room for it.
    fn admit(
        &mut self,
        header: Header,
        length_bytes: usize,
        left_bytes: usize,
    ) -> Result<Reading, ProtocolError> {
        let Header { frame_type, flags, id } = header;
        let skip = |then| Ok(Reading::Skip { left_bytes, then });
        let keep = |ticket| Ok(Reading::Payload { header, payload_bytes: left_bytes, ticket });

        if self.state == State::Hello
            && !matches!(frame_type, FrameType::HaproxyHello | FrameType::HaproxyDisconnect)
        {
            return Err(ProtocolError::HelloExpected(frame_type));
        }
        if flags.is_abort() && !flags.is_fin() {
            return Err(ProtocolError::AbortWithoutFin);
        }
        match frame_type {
            FrameType::HaproxyHello | FrameType::HaproxyDisconnect => {
                if !flags.is_fin() {
                    return Err(ProtocolError::Fragmented(frame_type));
                }
                if id != FrameId::NONE {
                    return Err(ProtocolError::UnexpectedIds(frame_type));
                }
                if length_bytes > MAX_CONTROL_FRAME_BYTES {
                    return Err(ProtocolError::TooBig { length_bytes, limit_bytes: MAX_CONTROL_FRAME_BYTES });
                }
                keep(None)
            }
            FrameType::Notify if self.fragments.is_some() => Err(ProtocolError::Interlaced),
            FrameType::Notify if flags.is_abort() => skip(Then::Abort(id)),
            FrameType::Notify => match self.admission.admit(left_bytes) {
                Ok(ticket) => keep(Some(ticket)),
                Err(refusal) if flags.is_fin() => skip(Then::Shed(id, refusal)),
                Err(refusal) => {
                    self.fragments = Some(Fragments { id, payload: BytesMut::new(), ticket: Err(refusal) });
                    skip(Then::Nothing)
                }
            },
            FrameType::Unset => match &mut self.fragments {
                // HAProxy may give up what it never began to send.
                None if flags.is_abort() => skip(Then::Nothing),
                None => Err(ProtocolError::StrayFragment),
                Some(fragments) if fragments.id != id => Err(ProtocolError::Interlaced),
                Some(_) if flags.is_abort() => skip(Then::Abort(id)),
                Some(fragments) => match fragments.grow(left_bytes) {
                    Ok(()) => keep(None),
                    Err(refusal) if flags.is_fin() => skip(Then::Shed(id, refusal)),
                    Err(_) => skip(Then::Nothing),
                },
            },
            FrameType::AgentHello | FrameType::AgentDisconnect | FrameType::Ack => {
                Err(ProtocolError::WrongDirection(frame_type))
            }
            FrameType::Unknown(_) => skip(Then::Nothing),
        }
    }

    /// A frame that was kept has come in whole.
    fn frame(
        &mut self,
        header: &Header,
        payload: BytesMut,
        ticket: Option<Ticket>,
        now: Instant,
    ) -> Result<Option<Event>, ProtocolError> {
        match (header.frame_type, ticket) {
            (FrameType::HaproxyHello, _) => self.hello(&payload),
            (FrameType::HaproxyDisconnect, _) => {
                let status = disconnect(&payload)?.status;
                self.close(Status::Normal);
                Ok(Some(Event::Closed(Close::Peer(status))))
            }
            (FrameType::Notify, Some(ticket)) if !header.flags.is_fin() => {
                self.fragments = Some(Fragments { id: header.id, payload, ticket: Ok(ticket) });
                Ok(None)
            }
            (FrameType::Notify, Some(ticket)) => {
                Ok(Some(self.notify(header.id, payload.freeze(), ticket, now)))
            }
            _ => Ok(self.fragment(header, &payload, now)),
        }
    }

    fn hello(&mut self, payload: &[u8]) -> Result<Option<Event>, ProtocolError> {
        if self.state != State::Hello {
            return Err(ProtocolError::RepeatedHello);
        }
        let hello = HaproxyHello::parse(payload)?;
        let terms = hello.agree(self.own_max_frame_size);
        encode::agent_hello(&mut self.output, &terms);
        self.unfinished_since = None;
        if hello.healthcheck {
            self.state = State::Closed;
            return Ok(Some(Event::Closed(Close::HealthCheck)));
        }
        self.peer_max_frame_size = Some(hello.max_frame_size);
        self.state = State::Running { max_frame_size: terms.max_frame_size };
        Ok(None)
    }

    fn fragment(&mut self, header: &Header, payload: &[u8], now: Instant) -> Option<Event> {
        let fragments = self.fragments.as_mut()?;
        fragments.payload.extend_from_slice(payload);
        if !header.flags.is_fin() {
            return None;
        }
        let Fragments { id, payload, ticket } = self.fragments.take()?;
        Some(self.notify(id, payload.freeze(), ticket.ok()?, now))
    }

    fn notify(&mut self, id: FrameId, messages: Bytes, ticket: Ticket, now: Instant) -> Event {
        let received = self.unfinished_since.take().unwrap_or(now);
        Event::Notify(Notify { id, messages, received, ticket })
    }

    /// A frame that was not kept has passed.
    fn skipped(&mut self, then: Then) -> Option<Event> {
        if matches!(then, Then::Shed(..) | Then::Abort(_)) {
            self.fragments = None;
        }
        if self.fragments.is_none() {
            self.unfinished_since = None;
        }
        match then {
            Then::Nothing => None,
            Then::Abort(id) => Some(Event::Aborted(id)),
            Then::Shed(id, refusal) => {
                self.ack(id, &Actions::none());
                Some(Event::Shed(refusal))
            }
        }
    }

    fn fail(&mut self, error: ProtocolError) -> Event {
        self.close(error.status());
        Event::Closed(Close::Error(error))
    }

    fn close(&mut self, status: Status) {
        if self.state == State::Closed {
            return;
        }
        encode::agent_disconnect(&mut self.output, status);
        self.state = State::Closed;
        self.reading = Reading::Header;
        self.fragments = None;
        self.input = BytesMut::new();
        self.unfinished_since = None;
    }
}

impl Fragments {
    /// Finds room for another fragment. Without it, what came so far is dropped as well.
    fn grow(&mut self, more_bytes: usize) -> Result<(), Refusal> {
        let refusal = match &mut self.ticket {
            Ok(ticket) => match ticket.grow(more_bytes) {
                Ok(()) => return Ok(()),
                Err(refusal) => refusal,
            },
            Err(refusal) => *refusal,
        };
        self.payload = BytesMut::new();
        self.ticket = Err(refusal);
        Err(refusal)
    }
}

#[cfg(test)]
mod tests;
