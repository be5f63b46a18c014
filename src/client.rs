//! A small HTTP/1.1 client for our own commands and for what engines tell: one request a connection.

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Method, Request, Response, body::Incoming, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

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
    /// The request could not be sent or the answer not be read.
    #[error("HTTP: {0}")]
    Http(#[from] hyper::Error),
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

/// Sends a POST with a JSON body and reads the answer to its end.
///
/// # Errors
/// [`ClientError`]; an answer of any status is none.
pub async fn post(addr: &str, target: &str, body: Bytes) -> Result<Answer, ClientError> {
    read(send(addr, Method::POST, target, &[], body).await?).await
}

/// Sends a GET and reads the answer to its end.
///
/// # Errors
/// As [`post`].
pub async fn get(addr: &str, target: &str) -> Result<Answer, ClientError> {
    read(send(addr, Method::GET, target, &[], Bytes::new()).await?).await
}

/// Sends a GET and reads no more than `max_bytes` of answer.
///
/// # Errors
/// As [`post`], and [`ClientError::Body`].
pub async fn get_within(addr: &str, target: &str, max_bytes: usize) -> Result<Answer, ClientError> {
    let response = send(addr, Method::GET, target, &[], Bytes::new()).await?;
    let status = response.status().as_u16();
    let body = Limited::new(response.into_body(), max_bytes).collect().await.map_err(ClientError::Body)?;
    Ok(Answer { status, body: body.to_bytes() })
}

/// Sends a request and returns the answer as soon as its headers are there; the body streams.
///
/// # Errors
/// As [`post`].
pub async fn send(
    addr: &str,
    method: Method,
    target: &str,
    headers: &[(&str, &str)],
    body: Bytes,
) -> Result<Response<Incoming>, ClientError> {
    let stream = TcpStream::connect(addr)
        .await
        .map_err(|source| ClientError::Connect { addr: addr.to_owned(), source })?;
    // Small requests must not wait for an ACK.
    let _ = stream.set_nodelay(true);
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // It ends with the answer's body, or when the caller drops it.
    tokio::spawn(connection);
    let mut request = Request::builder().method(method).uri(target).header(header::HOST, addr);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    if !body.is_empty() {
        request = request.header(header::CONTENT_TYPE, "application/json");
    }
    Ok(sender.send_request(request.body(Full::new(body))?).await?)
}

async fn read(response: Response<Incoming>) -> Result<Answer, ClientError> {
    let status = response.status().as_u16();
    let body = response.into_body().collect().await?.to_bytes();
    Ok(Answer { status, body })
}
