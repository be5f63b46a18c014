//! Sockets as this module uses them: options, frames, the monitor of a connection.

use crate::events::endpoint::Endpoint;
use smallvec::SmallVec;
use std::sync::atomic::{AtomicU64, Ordering};
use zmq::{Context, DONTWAIT, Message, Result, Socket, SocketEvent};

/// The limits of each socket.
#[derive(Clone, Copy, Debug)]
pub(in crate::events) struct SocketLimits {
    pub(in crate::events) receive_queue: i32,
    pub(in crate::events) message_bytes: i64,
}

/// A constant pace: the publisher is as likely back after an hour as after a second.
const RECONNECT_MS: i32 = 100;
/// A host that does not answer at all must not hold an attempt for the system's two minutes.
const CONNECT_TIMEOUT_MS: i32 = 3_000;
const HANDSHAKE_TIMEOUT_MS: i32 = 5_000;
/// A host that died without closing its connections is noticed after one beat and the time-out.
const HEARTBEAT_MS: i32 = 5_000;
const HEARTBEAT_TIMEOUT_MS: i32 = 15_000;
/// For peers of an old ZMTP that know no heartbeat: noticed after 30 s + 3 × 10 s.
const KEEPALIVE_IDLE_S: i32 = 30;
const KEEPALIVE_INTERVAL_S: i32 = 10;
const KEEPALIVE_PROBES: i32 = 3;

fn prepare(socket: &Socket, endpoint: &Endpoint, limits: &SocketLimits) -> Result<()> {
    socket.set_linger(0)?;
    socket.set_ipv6(endpoint.is_ipv6())?;
    socket.set_rcvhwm(limits.receive_queue)?;
    socket.set_maxmsgsize(limits.message_bytes)?;
    socket.set_reconnect_ivl(RECONNECT_MS)?;
    socket.set_connect_timeout(CONNECT_TIMEOUT_MS)?;
    socket.set_handshake_ivl(HANDSHAKE_TIMEOUT_MS)?;
    socket.set_heartbeat_ivl(HEARTBEAT_MS)?;
    socket.set_heartbeat_timeout(HEARTBEAT_TIMEOUT_MS)?;
    socket.set_tcp_keepalive(1)?;
    socket.set_tcp_keepalive_idle(KEEPALIVE_IDLE_S)?;
    socket.set_tcp_keepalive_intvl(KEEPALIVE_INTERVAL_S)?;
    socket.set_tcp_keepalive_cnt(KEEPALIVE_PROBES)
}

/// Both ends of the line by which other threads wake the subscriber's.
pub(in crate::events) fn wake_pair(context: &Context) -> Result<(Socket, Socket)> {
    let (wake, woken) = (context.socket(zmq::PUSH)?, context.socket(zmq::PULL)?);
    wake.set_linger(0)?;
    woken.bind("inproc://wake")?;
    wake.connect("inproc://wake")?;
    Ok((wake, woken))
}

/// Empties the line.
pub(in crate::events) fn drain(woken: &Socket) {
    while woken.recv_msg(DONTWAIT).is_ok() {}
}

/// A change of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::events) enum Link {
    Up,
    Down,
}

/// The subscription to one publisher, with the news of its connection.
pub(in crate::events) struct LiveSocket {
    pub(in crate::events) events: Socket,
    pub(in crate::events) monitor: Socket,
    replayer: Replayer,
}

/// Makes the sockets of replays.
pub(in crate::events) struct Replayer {
    context: Context,
    limits: SocketLimits,
}

impl LiveSocket {
    pub(in crate::events) fn open(
        context: &Context,
        endpoint: &Endpoint,
        limits: &SocketLimits,
    ) -> Result<Self> {
        static MONITORS: AtomicU64 = AtomicU64::new(0);
        let events = context.socket(zmq::SUB)?;
        prepare(&events, endpoint, limits)?;
        events.set_subscribe(b"")?;
        let name = format!("inproc://monitor-{}", MONITORS.fetch_add(1, Ordering::Relaxed));
        let changes = SocketEvent::HANDSHAKE_SUCCEEDED.to_raw() | SocketEvent::DISCONNECTED.to_raw();
        events.monitor(&name, i32::from(changes))?;
        let monitor = context.socket(zmq::PAIR)?;
        monitor.set_linger(0)?;
        monitor.connect(&name)?;
        if endpoint.listens() {
            events.bind(endpoint.address())?;
        } else {
            events.connect(endpoint.address())?;
        }
        Ok(Self { events, monitor, replayer: Replayer::new(context, limits) })
    }

    /// The next change of the connection, if there is one.
    pub(in crate::events) fn link_change(&self) -> Option<Link> {
        loop {
            // Two frames: u16 event and u32 value in the machine's byte order; the address.
            let event = self.monitor.recv_msg(DONTWAIT).ok()?;
            let mut more = event.get_more();
            while more {
                more = self.monitor.recv_msg(DONTWAIT).is_ok_and(|frame| frame.get_more());
            }
            let Some(event) = event.first_chunk().copied().map(u16::from_ne_bytes) else { continue };
            if event == SocketEvent::HANDSHAKE_SUCCEEDED.to_raw() {
                return Some(Link::Up);
            }
            if event == SocketEvent::DISCONNECTED.to_raw() {
                return Some(Link::Down);
            }
        }
    }

    /// The next live message: topic, sequence number, payload.
    pub(in crate::events) fn receive(&self) -> Option<Received> {
        Some(match &mut receive(&self.events)?[..] {
            [_, seq, payload] => batch(seq, payload),
            _ => Received::Rejected,
        })
    }

    /// The next live message of any publisher, with its topic.
    pub(in crate::events) fn receive_any(&self) -> Option<(Message, Received)> {
        let mut frames = receive(&self.events)?;
        let received = match &mut frames[..] {
            [_, seq, payload] => batch(seq, payload),
            _ => Received::Rejected,
        };
        Some((frames.swap_remove(0), received))
    }

    pub(in crate::events) const fn replayer(&self) -> &Replayer {
        &self.replayer
    }
}

impl Replayer {
    pub(in crate::events) fn new(context: &Context, limits: &SocketLimits) -> Self {
        Self { context: context.clone(), limits: *limits }
    }

    /// Asks a replay endpoint, on a socket of its own, for the batches from `from` on.
    pub(in crate::events) fn request_replay(&self, endpoint: &Endpoint, from: u64) -> Result<ReplaySocket> {
        let socket = self.context.socket(zmq::DEALER)?;
        prepare(&socket, endpoint, &self.limits)?;
        // A reconnected socket would wait for an answer that went to the old connection; a new request does better,
        // and comes when this one has been silent for too long.
        socket.connect(endpoint.address())?;
        socket.send_multipart([Message::new(), Message::from(&from.to_be_bytes()[..])], DONTWAIT)?;
        Ok(ReplaySocket { socket })
    }
}

/// A replay that is under way.
pub(in crate::events) struct ReplaySocket {
    pub(in crate::events) socket: Socket,
}

impl ReplaySocket {
    /// The next message of the answer: an empty frame, the topic (vLLM ≥ 0.26), sequence number, payload.
    pub(in crate::events) fn receive(&self) -> Option<Received> {
        Some(match &mut receive(&self.socket)?[..] {
            [_, seq, payload] | [_, _, seq, payload] => batch(seq, payload),
            _ => Received::Rejected,
        })
    }
}

/// A message, by what it is.
pub(in crate::events) enum Received {
    Batch {
        seq: u64,
        payload: Message,
    },
    /// The end of a replay: number −1 and no payload.
    End,
    Rejected,
}

fn batch(seq: &Message, payload: &mut Message) -> Received {
    match <[u8; 8]>::try_from(&seq[..]).map(u64::from_be_bytes) {
        Ok(u64::MAX) => Received::End,
        Ok(_) if payload.is_empty() => Received::End,
        Ok(seq) => Received::Batch { seq, payload: std::mem::replace(payload, Message::new()) },
        Err(_) => Received::Rejected,
    }
}

/// More frames than any message of ours has: those beyond are dropped, and the message is rejected.
const MAX_FRAMES: usize = 5;

/// All frames of the next message, if there is one.
fn receive(socket: &Socket) -> Option<SmallVec<[Message; MAX_FRAMES]>> {
    let mut frames = SmallVec::new();
    loop {
        let frame = socket.recv_msg(DONTWAIT).ok()?;
        let more = frame.get_more();
        if frames.len() < MAX_FRAMES {
            frames.push(frame);
        }
        if !more {
            return Some(frames);
        }
    }
}
