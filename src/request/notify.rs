//! The arguments of the snippet's SPOE message → the request to be routed.

use crate::{
    spop::{DecodeError, Value, messages},
    units::RequestId,
};
use bytes::Bytes;
use std::str;

/// The SPOE message that the snippets send.
pub const MESSAGE: &str = "route";

/// One request as HAProxy describes it. `body` shares the frame's memory.
#[derive(Clone, Debug, Default)]
pub struct RoutingRequest {
    /// The private id under which the log line will report the end; absent: nothing can be booked.
    pub id: Option<RequestId>,
    /// The backend that serves the request.
    pub pool: String,
    /// The HTTP method.
    pub method: String,
    /// The path, without the query.
    pub path: String,
    /// A hash of the session header, where the client sent one.
    pub session: Option<u64>,
    /// `Content-Length` as the client sent it.
    pub content_length: Option<u64>,
    /// Whether `body` is the whole body (`internal.htx.has_eom`).
    pub complete: bool,
    /// `Content-Encoding`: a compressed body can't be read.
    pub content_encoding: Option<String>,
    /// The body, or its beginning where the buffer is too small.
    pub body: Bytes,
    /// The version of the pasted snippet.
    pub snippet_version: u64,
}

/// Why a NOTIFY is no request.
#[derive(Debug, thiserror::Error)]
pub enum NotifyError {
    /// The list of messages is not as SPOP says.
    #[error("malformed message list: {0}")]
    Malformed(#[from] DecodeError),
    /// No message of the name [`MESSAGE`] is among them.
    #[error("no message named \"{MESSAGE}\"")]
    NoRouteMessage,
}

impl RoutingRequest {
    /// Reads the arguments out of the payload of a NOTIFY frame. Unknown arguments are ignored, so that a newer
    /// snippet works with an older agent; NULL counts as absent.
    ///
    /// # Errors
    /// [`NotifyError`] where the payload is malformed or holds no such message.
    pub fn from_payload(payload: &Bytes) -> Result<Self, NotifyError> {
        for message in messages(payload) {
            let message = message?;
            if message.name != MESSAGE {
                continue;
            }
            let mut request = Self::default();
            for (name, value) in message.args {
                request.set(name, &value, payload);
            }
            return Ok(request);
        }
        Err(NotifyError::NoRouteMessage)
    }

    /// The session as the choice knows it: a hash, so that the client's own text is kept nowhere.
    #[must_use]
    pub fn session_of(header: &[u8]) -> u64 {
        xxhash_rust::xxh3::xxh3_64(header)
    }

    fn set(&mut self, name: &str, value: &Value<'_>, payload: &Bytes) {
        let bytes = value.as_bytes().unwrap_or_default();
        let text = || String::from_utf8_lossy(bytes).into_owned();
        match name {
            "v" => self.snippet_version = value.as_u64().unwrap_or_default(),
            "rid" => self.id = RequestId::parse(bytes),
            "pool" => self.pool = text(),
            "method" => self.method = text(),
            "path" => self.path = text(),
            "session" if !bytes.is_empty() => self.session = Some(Self::session_of(bytes)),
            "len" => self.content_length = str::from_utf8(bytes).ok().and_then(|t| t.trim().parse().ok()),
            "eom" => self.complete = value.as_bool().unwrap_or_default(),
            "cenc" if !bytes.is_empty() => self.content_encoding = Some(text()),
            "body" => self.body = payload.slice_ref(bytes),
            _ => {}
        }
    }
}
