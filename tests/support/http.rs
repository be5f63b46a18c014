//! HTTP/1.1 by hand: what goes over the wire is exactly what a test says, and when.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};

use super::PATIENCE;

/// The head of a request or response, and its body.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Message {
    /// The first line.
    pub(crate) start: String,
    /// Names in lower case, in the order of arrival.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Message {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(header, _)| header == name).map(|(_, value)| value.as_str())
    }

    /// The status of a response.
    pub(crate) fn status(&self) -> u16 {
        self.start.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0)
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// A connection on which one side reads what the other has sent.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: TcpStream,
    reader: BufReader<TcpStream>,
}

impl Connection {
    pub(crate) fn open(address: SocketAddr) -> Self {
        Self::over(TcpStream::connect(address).expect("connected"))
    }

    pub(crate) fn over(stream: TcpStream) -> Self {
        stream.set_nodelay(true).expect("set");
        stream.set_read_timeout(Some(PATIENCE)).expect("set");
        let reader = BufReader::new(stream.try_clone().expect("a handle"));
        Self { stream, reader }
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("sent");
    }

    pub(crate) fn try_send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Reads a head; `None` if the connection was closed before its first byte.
    pub(crate) fn read_head(&mut self) -> Option<Message> {
        let start = self.read_line()?;
        let mut headers = Vec::new();
        while let Some(line) = self.read_line().filter(|line| !line.is_empty()) {
            let (name, value) = line.split_once(':').unwrap_or((&line, ""));
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        Some(Message { start, headers, body: Vec::new() })
    }

    /// Reads a whole message.
    pub(crate) fn read(&mut self) -> Option<Message> {
        let mut message = self.read_head()?;
        self.read_body(&mut message);
        Some(message)
    }

    /// Reads the body that belongs to this head; one cut off is left as it came.
    pub(crate) fn read_body(&mut self, message: &mut Message) {
        let is_response = message.start.starts_with("HTTP/");
        if message.header("transfer-encoding") == Some("chunked") {
            while let Some(chunk) = self.read_chunk() {
                message.body.extend(chunk);
            }
        } else if let Some(length) = message.header("content-length").and_then(|length| length.parse().ok()) {
            let _ = (&mut self.reader).take(length).read_to_end(&mut message.body);
        } else if is_response {
            let _ = self.reader.read_to_end(&mut message.body);
        }
    }

    /// The next chunk of a chunked body; `None` at its end.
    pub(crate) fn read_chunk(&mut self) -> Option<Vec<u8>> {
        let length = usize::from_str_radix(&self.read_line()?, 16).ok()?;
        let mut chunk = vec![0; length];
        self.reader.read_exact(&mut chunk).ok()?;
        self.read_line()?;
        (length > 0).then_some(chunk)
    }

    fn read_line(&mut self) -> Option<String> {
        let mut line = String::new();
        match self.reader.read_line(&mut line) {
            Ok(1..) => Some(line.trim_end().to_owned()),
            _ => None,
        }
    }
}

/// The bytes of a request; `host` and `content-length` are added.
pub(crate) fn request(method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut bytes = format!("{method} {path} HTTP/1.1\r\nhost: test\r\n").into_bytes();
    for (name, value) in headers {
        bytes.extend(format!("{name}: {value}\r\n").bytes());
    }
    if method == "POST" {
        bytes.extend(format!("content-length: {}\r\n", body.len()).bytes());
    }
    bytes.extend(b"\r\n");
    bytes.extend(body);
    bytes
}

/// Sends a request on a connection of its own and reads the response.
pub(crate) fn send(address: SocketAddr, request: &[u8]) -> Message {
    let mut connection = Connection::open(address);
    connection.send(request);
    connection.read().expect("a response")
}

/// A POST of a small JSON body.
pub(crate) fn post(address: SocketAddr, path: &str, headers: &[(&str, &str)]) -> Message {
    send(address, &request("POST", path, headers, br#"{"model":"m","prompt":"hello"}"#))
}

/// A GET.
pub(crate) fn get(address: SocketAddr, path: &str) -> Message {
    send(address, &request("GET", path, &[], b""))
}
