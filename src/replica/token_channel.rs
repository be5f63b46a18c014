//! The side channel of Ray Serve LLM: a prompt's tokens, sent ahead of the request, so that the replica does not
//! tokenize it again. The request's header [`HEADER`] carries the key under which the replica finds them.
//!
//! One way, without an acknowledgement: tokens that do not arrive in time cost nothing, as the replica then tokenizes.

use crate::{events::Endpoint, units::TokenId};
use parking_lot::Mutex;
use std::fmt;
use zmq::{Context, DONTWAIT, Message, Socket};

/// The request header that names the tokens (Ray 2.60 `x-serve-router-kv-token-key`).
pub const HEADER: &str = "x-serve-router-kv-token-key";

/// Messages that may wait for the replica to take them (Ray 2.60: 256).
const SEND_QUEUE: i32 = 256;
/// A constant pace, as for the streams of KV events.
const RECONNECT_MS: i32 = 100;
/// A host that does not answer must not hold an attempt for the system's two minutes.
const CONNECT_TIMEOUT_MS: i32 = 3_000;

/// Opens the channels, which share one I/O thread; without any there is none.
#[derive(Clone, Default)]
pub struct TokenChannels {
    context: Context,
}

impl fmt::Debug for TokenChannels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenChannels")
    }
}

/// The line to one rank's token store. Connected when the rank becomes known: the first request finds it ready.
pub struct TokenChannel {
    /// Sends never wait, so the lock is held for one copy of the tokens.
    socket: Mutex<Socket>,
    endpoint: Endpoint,
}

/// Names pushed tokens, once: 128 random bits, as nobody but the request's own header may name them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TokenKey(uuid::Uuid);

impl fmt::Display for TokenKey {
    /// 32 lower-case hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.simple().fmt(f)
    }
}

impl TokenChannels {
    /// Begins to connect, and goes on in the background for as long as it takes.
    ///
    /// # Errors
    /// ZeroMQ has no socket left, or does not take the endpoint.
    pub fn connect(&self, endpoint: Endpoint) -> zmq::Result<TokenChannel> {
        let socket = self.context.socket(zmq::PUSH)?;
        socket.set_linger(0)?;
        socket.set_ipv6(endpoint.is_ipv6())?;
        socket.set_sndhwm(SEND_QUEUE)?;
        // Without a connection a send fails at once, in place of filling a queue for a replica that may never come.
        socket.set_immediate(true)?;
        socket.set_reconnect_ivl(RECONNECT_MS)?;
        socket.set_connect_timeout(CONNECT_TIMEOUT_MS)?;
        socket.connect(endpoint.address())?;
        Ok(TokenChannel { socket: Mutex::new(socket), endpoint })
    }
}

impl TokenChannel {
    /// Sends the tokens of one prompt and returns their key; `None` if the replica does not take them now: it is not
    /// connected, or too far behind.
    #[must_use]
    pub fn push(&self, tokens: impl IntoIterator<Item = TokenId>) -> Option<TokenKey> {
        let key = TokenKey(uuid::Uuid::new_v4());
        let name = Message::from(key.to_string().as_str());
        let ids: Vec<u8> = tokens.into_iter().flat_map(|token| token.0.to_le_bytes()).collect();
        let socket = self.socket.lock();
        // Once the first frame is taken, so is the second: a message is queued as a whole.
        socket.send(name, DONTWAIT | zmq::SNDMORE).ok()?;
        socket.send(Message::from(ids), DONTWAIT).ok()?;
        Some(key)
    }
}

impl fmt::Debug for TokenChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TokenChannel({})", self.endpoint)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    fn receiver(context: &Context) -> (Socket, Endpoint) {
        let socket = context.socket(zmq::PULL).expect("a socket");
        socket.set_rcvtimeo(10_000).expect("a time limit");
        socket.bind("tcp://127.0.0.1:*").expect("a port");
        let address = socket.get_last_endpoint().expect("bound").expect("text");
        (socket, Endpoint::parse(&address).expect("an endpoint"))
    }

    fn push(channel: &TokenChannel, tokens: &[TokenId]) -> TokenKey {
        let started = Instant::now();
        loop {
            if let Some(key) = channel.push(tokens.iter().copied()) {
                return key;
            }
            assert!(started.elapsed() < Duration::from_secs(10), "never connected");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_message_is_the_key_and_the_ids_as_little_endian_words() {
        let context = Context::new();
        let (receiver, endpoint) = receiver(&context);
        let channel = TokenChannels::default().connect(endpoint).expect("a socket");
        let key = push(&channel, &[TokenId(1), TokenId(0x0403_0201), TokenId(u32::MAX)]);
        let frames = receiver.recv_multipart(0).expect("a message");
        let name = key.to_string();
        assert_eq!(name.len(), 32);
        assert!(name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')), "{name}");
        assert_eq!(frames, [name.into_bytes(), vec![1, 0, 0, 0, 1, 2, 3, 4, 255, 255, 255, 255]]);
    }

    #[test]
    fn every_push_has_a_key_of_its_own() {
        let context = Context::new();
        let (_receiver, endpoint) = receiver(&context);
        let channel = TokenChannels::default().connect(endpoint).expect("a socket");
        assert_ne!(push(&channel, &[TokenId(1)]), push(&channel, &[TokenId(1)]));
    }

    #[test]
    fn nothing_is_queued_for_a_replica_that_is_not_there() {
        let context = Context::new();
        let (receiver, endpoint) = receiver(&context);
        drop(receiver);
        let channel = TokenChannels::default().connect(endpoint).expect("a socket");
        assert_eq!(channel.push([TokenId(1)]), None);
    }
}
