//! A log target.

use std::net::{SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex};
use std::thread;

use kvspoa::lifecycle::log_line::{self, LogLine, RequestEnd};

use super::eventually;

/// Collects the datagrams sent to it.
#[derive(Clone, Debug)]
pub(crate) struct LogSink {
    pub(crate) address: SocketAddr,
    lines: Arc<Mutex<Vec<String>>>,
}

impl LogSink {
    pub(crate) fn start() -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a port");
        let address = socket.local_addr().expect("an address");
        let lines = Arc::new(Mutex::new(Vec::new()));
        let collected = Arc::clone(&lines);
        thread::spawn(move || {
            let mut buffer = vec![0; 65536];
            while let Ok(length) = socket.recv(&mut buffer) {
                let line = String::from_utf8_lossy(buffer.get(..length).unwrap_or_default()).into_owned();
                collected.lock().expect("no panic").push(line);
            }
        });
        Self { address, lines }
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        self.lines.lock().expect("no panic").clone()
    }

    /// Waits for a line that contains this.
    pub(crate) fn line(&self, text: &str) -> String {
        eventually(&format!("a log line with {text}"), || {
            self.lines().into_iter().find(|line| line.contains(text))
        })
    }

    /// Waits for the end of the request whose line contains this.
    pub(crate) fn end(&self, text: &str) -> RequestEnd {
        let line = self.line(text);
        match log_line::parse(line.as_bytes()) {
            Ok(LogLine::End(end)) => *end,
            other => panic!("{other:?} from {line}"),
        }
    }
}
