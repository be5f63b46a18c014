//! The line that HAProxy logs at the end of a request (`haproxy/snippet-frontend.cfg`).
//!
//! A line is RFC 5424; our fields stand in the structured data element `kv@1`, before the site's own message. Only that
//! element is read, by its place in the line: the message behind it holds text of clients, which may look like anything.

use std::fmt;
use std::str;
use std::time::Duration;

use thiserror::Error;

use super::rfc5424::{self, StructuredData};
use crate::units::RequestId;

/// The name of our element; the number is the version of its fields.
const ELEMENT: &[u8] = b"kv@1";

/// What one datagram says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LogLine {
    /// A request of one of our pools has ended.
    End(Box<RequestEnd>),
    /// HAProxy changed its mind about a server.
    Server(ServerNotice),
    /// A line that is none of our business, such as a request that another backend served.
    Other,
    /// A line without our fields, and no notice either: a frontend that has our `log` line but no `log-format-sd`, or no
    /// log format at all, without which HAProxy ignores it.
    WithoutFields,
}

/// A request that has ended, in whatever way.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RequestEnd {
    /// The id under which the request was booked.
    pub request: RequestId,
    /// The HAProxy backend.
    pub pool: String,
    /// The server that the agent named; `None`: it had no opinion or was not asked.
    pub wanted: Option<String>,
    /// The server that HAProxy really used, the last one if there were several; `None`: it never came to that.
    pub served: Option<String>,
    /// How the stream ended.
    pub termination: Termination,
    /// The HTTP status that the client got; `None`: it got none.
    pub status: Option<u16>,
    /// Connections tried again.
    pub retries: u32,
    /// Whether a retry went to another server than the one first chosen.
    pub redispatched: bool,
    /// The reason that the agent gave with its answer.
    pub reason: Option<String>,
    /// Why the agent was not asked; `None`: it was.
    pub skip: Option<Skip>,
    /// The error of the exchange with the agent (SPOE.txt, `option set-on-error`: 1 is a time-out, 256 + n SPOP status n).
    pub spoe_error: Option<u32>,
    /// How long HAProxy waited for the agent.
    pub agent_wait: Option<Duration>,
    /// How long the request waited in HAProxy's queues.
    pub queue_wait: Option<Duration>,
    /// How long the connection to the server took.
    pub connect: Option<Duration>,
    /// From the request's departure to the response's headers; `None`: they never came.
    pub response: Option<Duration>,
    /// From the request's first byte to the last of the response.
    pub total: Option<Duration>,
}

/// Why HAProxy did not ask the agent (`txn.kv_skip` in `haproxy/snippet-backend.cfg`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Skip {
    /// Not a POST.
    Method,
    /// The health check of the agent failed.
    AgentDown,
    /// The agent had failed too often in a row.
    Breaker,
    /// A reason that the site has added.
    Site,
}

impl Skip {
    /// All reasons, in the order of their discriminants.
    pub const ALL: [Self; 4] = [Self::Method, Self::AgentDown, Self::Breaker, Self::Site];

    /// The reason as metric labels spell it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Method => "method",
            Self::AgentDown => "agent_down",
            Self::Breaker => "breaker",
            Self::Site => "site",
        }
    }

    /// The reason's place in [`Self::ALL`].
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// The first two characters of HAProxy's session state at disconnection (configuration.txt §8.5).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Termination(pub [u8; 2]);

impl Termination {
    /// Request and response were complete.
    #[must_use]
    pub fn is_normal(self) -> bool {
        self.0 == *b"--"
    }

    /// The client left or stopped reading.
    #[must_use]
    pub fn is_by_client(self) -> bool {
        matches!(self.0[0], b'C' | b'c')
    }

    /// The server refused, broke off or was too slow.
    #[must_use]
    pub fn is_by_server(self) -> bool {
        matches!(self.0[0], b'S' | b's')
    }
}

impl fmt::Display for Termination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.escape_ascii())
    }
}

impl fmt::Debug for Termination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Termination({self})")
    }
}

/// "Server pool/server is DOWN, reason: …": a hint to look at the runtime socket now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ServerNotice {
    /// The HAProxy backend.
    pub pool: String,
    /// The server.
    pub server: String,
    /// What it became.
    pub change: ServerChange,
}

/// What a server became.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ServerChange {
    /// It gets requests.
    Up,
    /// It gets none, and those on it may be lost.
    Down,
    /// Anything else: maintenance, draining, a check that wavers.
    Other,
}

/// Why a line was not understood.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum LogLineError {
    /// The header is not that of RFC 5424, version 1: the `log` line lacks `format rfc5424`.
    #[error("not an RFC 5424 line")]
    NotRfc5424,
    /// The line ends or breaks inside of the structured data: `len` of the `log` line is too small.
    #[error(transparent)]
    StructuredData(#[from] rfc5424::Malformed),
    /// A field of ours is missing or holds what HAProxy does not write.
    #[error("field `{0}` is missing or malformed")]
    Field(&'static str),
}

/// Reads one datagram.
///
/// # Errors
/// [`LogLineError`] if it is neither a line of ours nor a complete line of somebody else.
pub fn parse(datagram: &[u8]) -> Result<LogLine, LogLineError> {
    let rest = rfc5424::after_header(datagram).ok_or(LogLineError::NotRfc5424)?;
    if let Some(message) = rest.strip_prefix(b"-") {
        return Ok(parse_server_notice(message).map_or(LogLine::WithoutFields, LogLine::Server));
    }
    let mut elements = StructuredData::new(rest)?;
    while elements.enter_element()? {
        if elements.element_name() == ELEMENT {
            return Ok(read_end(&mut elements)?.map_or(LogLine::Other, |end| LogLine::End(Box::new(end))));
        }
        while elements.param()?.is_some() {}
    }
    Ok(LogLine::WithoutFields)
}

/// Reads our element; `None` if the request never came to one of our backends.
fn read_end(elements: &mut StructuredData<'_>) -> Result<Option<RequestEnd>, LogLineError> {
    let mut request = None;
    let mut termination = None;
    let mut end = RequestEnd {
        request: RequestId(0),
        pool: String::new(),
        wanted: None,
        served: None,
        termination: Termination(*b"--"),
        status: None,
        retries: 0,
        redispatched: false,
        reason: None,
        skip: None,
        spoe_error: None,
        agent_wait: None,
        queue_wait: None,
        connect: None,
        response: None,
        total: None,
    };
    while let Some((name, value)) = elements.param()? {
        let value = &*value;
        match name {
            b"rid" => request = present(value).and_then(RequestId::parse),
            b"pool" => end.pool = text(value).unwrap_or_default(),
            b"want" => end.wanted = text(value),
            // `<NOSRV>` and the like: angle brackets cannot be part of a server's name.
            b"srv" => end.served = text(value).filter(|name| !name.starts_with('<')),
            b"ts" => termination = value.try_into().map(Termination).ok(),
            b"st" => end.status = number(value, "st")?,
            // The count, with a `+` before it if another server was chosen.
            b"rc" => {
                end.retries = number(value, "rc")?.unwrap_or(0);
                end.redispatched = value.starts_with(b"+");
            }
            b"reason" => end.reason = text(value),
            b"skip" => end.skip = skip(value),
            b"err" => end.spoe_error = number(value, "err")?,
            b"pt" => end.agent_wait = millis(value, "pt")?,
            b"tw" => end.queue_wait = millis(value, "tw")?,
            b"tc" => end.connect = millis(value, "tc")?,
            b"tr" => end.response = millis(value, "tr")?,
            b"ta" => end.total = millis(value, "ta")?,
            _ => {}
        }
    }
    let Some(request) = request else { return Ok(None) };
    if end.pool.is_empty() {
        return Err(LogLineError::Field("pool"));
    }
    end.request = request;
    end.termination = termination.ok_or(LogLineError::Field("ts"))?;
    Ok(Some(end))
}

/// The value, unless HAProxy had none: it then writes nothing, or `-` where quotes are off.
fn present(value: &[u8]) -> Option<&[u8]> {
    Some(value).filter(|value| !matches!(*value, b"" | b"-"))
}

fn text(value: &[u8]) -> Option<String> {
    present(value).map(|value| String::from_utf8_lossy(value).into_owned())
}

fn skip(value: &[u8]) -> Option<Skip> {
    present(value).map(|reason| match reason {
        b"method" => Skip::Method,
        b"agent_down" => Skip::AgentDown,
        b"breaker" => Skip::Breaker,
        _ => Skip::Site,
    })
}

/// A number; -1 is HAProxy's word for "it never came to that".
fn number<T: TryFrom<i64>>(value: &[u8], name: &'static str) -> Result<Option<T>, LogLineError> {
    let Some(value) = present(value) else { return Ok(None) };
    let number: i64 =
        str::from_utf8(value).ok().and_then(|digits| digits.parse().ok()).ok_or(LogLineError::Field(name))?;
    if number == -1 {
        return Ok(None);
    }
    T::try_from(number).map(Some).map_err(|_| LogLineError::Field(name))
}

/// A time in milliseconds. A leading `+` marks one that was not over yet (`option logasap`).
fn millis(value: &[u8], name: &'static str) -> Result<Option<Duration>, LogLineError> {
    Ok(number::<u64>(value, name)?.map(Duration::from_millis))
}

/// `Server pool/server is DOWN, reason: …`; a backup server's line says `Backup Server`.
fn parse_server_notice(message: &[u8]) -> Option<ServerNotice> {
    let message = std::str::from_utf8(message).ok()?.trim_start();
    let rest = message.strip_prefix("Backup ").unwrap_or(message).strip_prefix("Server ")?;
    let (name, what) = rest.split_once(' ')?;
    let (pool, server) = name.split_once('/')?;
    let change = match what.strip_prefix("is ").and_then(|state| state.split([' ', ',', '/', '.']).next()) {
        Some("UP") => ServerChange::Up,
        Some("DOWN") => ServerChange::Down,
        _ => ServerChange::Other,
    };
    Some(ServerNotice { pool: pool.to_owned(), server: server.to_owned(), change })
}

#[cfg(test)]
mod tests;
