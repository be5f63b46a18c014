//! A small HTTP/1.1 client for our own commands, for what engines tell and for model hubs: one request a connection.

mod access;
mod tls;

pub use access::{Access, AccessError};
pub use tls::{Tls, TlsError};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{
    Method, Response,
    body::Incoming,
    client::conn::http1,
    header::{self, HeaderName, HeaderValue},
};
use hyper_util::rt::TokioIo;
use std::time::Duration;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::timeout,
};

/// How long [`get`] and [`post`] wait: longer than the admin port keeps a connection, so that it is not given up early.
const PATIENCE: Duration = Duration::from_secs(35);

/// The longest answer that they take, in bytes: a record of decisions may be large.
const MAX_ANSWER_BYTES: usize = 1 << 30;

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No connection.
    #[error("cannot connect to {addr}: {source}")]
    Connect {
        /// Where to.
        addr: String,
        /// Why not.
        source: std::io::Error,
    },
    /// TLS is not set up.
    #[error("TLS: {0}")]
    NoTls(String),
    /// The request could not be sent or the answer not be read.
    #[error("HTTP: {0}")]
    Http(#[from] hyper::Error),
    /// Something listens there, and says nothing.
    #[error("no answer in {0} seconds")]
    Silent(u64),
    /// The answer is longer than is taken, or broke off.
    #[error("the answer cannot be read to its end: {0}")]
    Body(Box<dyn std::error::Error + Send + Sync>),
    /// The target or a header is no valid HTTP.
    #[error("not a valid request: {0}")]
    Invalid(#[from] hyper::http::Error),
}

/// An answer read to its end.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// The whole body.
    pub body: Bytes,
}

/// What is sent.
#[derive(Debug)]
pub struct Request<'a> {
    /// The method.
    pub method: Method,
    /// Path and query.
    pub target: &'a str,
    /// The `Host`, where it is not the address.
    pub host: Option<&'a str>,
    /// Further headers.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// The body; JSON, if there is any.
    pub body: Bytes,
}

impl<'a> Request<'a> {
    /// A GET without further headers.
    #[must_use]
    pub const fn get(target: &'a str) -> Self {
        Self { method: Method::GET, target, host: None, headers: Vec::new(), body: Bytes::new() }
    }
}

/// An answer of which the headers are there; the body streams.
#[derive(Debug)]
pub struct Answering(pub Response<Incoming>);

impl Answering {
    /// Reads it to its end, which must come within `max_bytes`.
    ///
    /// # Errors
    /// [`ClientError::Body`].
    pub async fn read(self, max_bytes: usize) -> Result<Answer, ClientError> {
        let status = self.0.status().as_u16();
        let body = Limited::new(self.0.into_body(), max_bytes).collect().await.map_err(ClientError::Body)?;
        Ok(Answer { status, body: body.to_bytes() })
    }
}

/// Sends a POST with a JSON body and reads the answer to its end, which must come in half a minute.
///
/// # Errors
/// [`ClientError`]; an answer of any status is none.
pub async fn post(addr: &str, target: &str, body: Bytes) -> Result<Answer, ClientError> {
    ask(addr, Request { method: Method::POST, body, ..Request::get(target) }, PATIENCE).await
}

/// Sends a GET and reads the answer to its end, likewise.
///
/// # Errors
/// As [`post`].
pub async fn get(addr: &str, target: &str) -> Result<Answer, ClientError> {
    ask(addr, Request::get(target), PATIENCE).await
}

async fn ask(addr: &str, request: Request<'_>, patience: Duration) -> Result<Answer, ClientError> {
    let answer = async { exchange(addr, None, request).await?.read(MAX_ANSWER_BYTES).await };
    timeout(patience, answer).await.unwrap_or(Err(ClientError::Silent(patience.as_secs())))
}

/// Sends a request to an address, over TLS with a server of this name where given, and returns the answer as soon as its
/// headers are there.
///
/// # Errors
/// As [`post`].
pub async fn exchange(
    addr: &str,
    tls: Option<(&Tls, &str)>,
    request: Request<'_>,
) -> Result<Answering, ClientError> {
    let connect = |source| ClientError::Connect { addr: addr.to_owned(), source };
    let stream = TcpStream::connect(addr).await.map_err(connect)?;
    // Small requests must not wait for an ACK.
    let _ = stream.set_nodelay(true);
    match tls {
        None => send(stream, addr, request).await,
        Some((tls, name)) => send(tls.connect(name, stream).await.map_err(connect)?, addr, request).await,
    }
}

async fn send(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    addr: &str,
    request: Request<'_>,
) -> Result<Answering, ClientError> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // It ends with the answer's body, or when the caller drops it.
    tokio::spawn(connection);
    let Request { method, target, host, headers, body } = request;
    let mut built =
        hyper::Request::builder().method(method).uri(target).header(header::HOST, host.unwrap_or(addr));
    for (name, value) in headers {
        built = built.header(name, value);
    }
    if !body.is_empty() {
        built = built.header(header::CONTENT_TYPE, "application/json");
    }
    Ok(Answering(sender.send_request(built.body(Full::new(body))?).await?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn who_listens_and_says_nothing_is_given_up() {
        let silent = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let addr = silent.local_addr().expect("bound").to_string();
        let answer = ask(&addr, Request::get("/status"), Duration::from_millis(1)).await;
        assert!(matches!(answer, Err(ClientError::Silent(0))), "{answer:?}");
    }
}
