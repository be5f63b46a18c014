//! The socket to which HAProxy sends its log lines.

use std::convert::Infallible;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use socket2::{Domain, SockAddr, Socket, Type};
use thiserror::Error;
use tokio::net::{UdpSocket, UnixDatagram};
use tracing::debug;

use super::log_line::{self, LogLine};
use crate::metrics::LogMetrics;

/// The kernel's queue of lines that we have not read yet. A line takes about 2 KiB of it, so this holds the ends of
/// some 2000 requests; the kernel grants at most `net.core.rmem_max`.
const RECEIVE_BUFFER_BYTES: usize = 4 * 1024 * 1024;

/// More than the `len 2048` of the snippets; what is longer is cut, behind our fields.
const LINE_BYTES: usize = 8 * 1024;

/// HAProxy runs as another user: who may reach the socket is decided by the directory it stands in.
const SOCKET_MODE: u32 = 0o666;

/// Where to listen: `ADDRESS:PORT`, or the path of a Unix socket, absolute or with `unix:` in front.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LogListen {
    /// UDP.
    Udp(SocketAddr),
    /// A datagram socket in the file system. A chrooted HAProxy sees only what lies in its chroot.
    Unix(PathBuf),
}

impl FromStr for LogListen {
    type Err = LogReceiverError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let path = text.strip_prefix("unix:").filter(|path| !path.is_empty());
        if let Some(path) = path.or_else(|| Some(text).filter(|text| text.starts_with('/'))) {
            return Ok(Self::Unix(PathBuf::from(path)));
        }
        text.parse().map(Self::Udp).map_err(|_| LogReceiverError::Address(text.to_owned()))
    }
}

impl fmt::Display for LogListen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Udp(address) => write!(f, "{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Why the receiver could not start.
#[derive(Debug, Error)]
pub enum LogReceiverError {
    /// Neither an address with a port nor a path.
    #[error("`{0}` is neither ADDRESS:PORT, nor unix:PATH, nor an absolute path")]
    Address(String),
    /// The socket could not be made.
    #[error("cannot listen for log lines on {listen}")]
    Bind {
        /// Where.
        listen: LogListen,
        /// What the system said.
        source: io::Error,
    },
}

/// A bound socket. Lines that nobody reads wait in the kernel; when its queue is full, HAProxy drops further ones.
#[derive(Debug)]
pub struct LogReceiver {
    socket: DatagramSocket,
    listen: LogListen,
    receive_buffer_bytes: usize,
    metrics: LogMetrics,
}

#[derive(Debug)]
enum DatagramSocket {
    Udp(UdpSocket),
    Unix(UnixDatagram),
}

impl LogReceiver {
    /// Binds the socket, in the context of a tokio runtime. A socket file that nobody listens on is replaced.
    ///
    /// # Errors
    /// [`LogReceiverError::Bind`] if the address is taken or not ours.
    pub fn bind(listen: &LogListen, metrics: LogMetrics) -> Result<Self, LogReceiverError> {
        Self::try_bind(listen, metrics)
            .map_err(|source| LogReceiverError::Bind { listen: listen.clone(), source })
    }

    fn try_bind(listen: &LogListen, metrics: LogMetrics) -> io::Result<Self> {
        let (domain, address) = match listen {
            LogListen::Udp(address) => (Domain::for_address(*address), SockAddr::from(*address)),
            LogListen::Unix(path) => {
                remove_stale_socket(path)?;
                (Domain::UNIX, SockAddr::unix(path)?)
            }
        };
        let socket = Socket::new(domain, Type::DGRAM, None)?;
        socket.set_nonblocking(true)?;
        // The kernel cuts it down to its own limit without an error.
        socket.set_recv_buffer_size(RECEIVE_BUFFER_BYTES)?;
        let receive_buffer_bytes = socket.recv_buffer_size()?;
        socket.bind(&address)?;
        let (socket, listen) = match listen {
            LogListen::Udp(_) => {
                let socket = UdpSocket::from_std(socket.into())?;
                let listen = LogListen::Udp(socket.local_addr()?);
                (DatagramSocket::Udp(socket), listen)
            }
            LogListen::Unix(path) => {
                std::fs::set_permissions(path, std::fs::Permissions::from_mode(SOCKET_MODE))?;
                (DatagramSocket::Unix(UnixDatagram::from_std(socket.into())?), listen.clone())
            }
        };
        Ok(Self { socket, listen, receive_buffer_bytes, metrics })
    }

    /// Where it listens; the port is the real one if 0 was asked for.
    #[must_use]
    pub fn listen(&self) -> &LogListen {
        &self.listen
    }

    /// The size of the kernel's queue, as the kernel counts it.
    #[must_use]
    pub fn receive_buffer_bytes(&self) -> usize {
        self.receive_buffer_bytes
    }

    /// Hands every end of a request and every notice to `on_line`, for ever. `on_line` must not block: lines that
    /// come meanwhile wait in the kernel.
    ///
    /// # Errors
    /// If the socket itself fails, which no sender can bring about.
    pub async fn run(self, mut on_line: impl FnMut(LogLine)) -> io::Result<Infallible> {
        let mut buffer = vec![0; LINE_BYTES];
        loop {
            let length = match &self.socket {
                DatagramSocket::Udp(socket) => socket.recv(&mut buffer).await?,
                DatagramSocket::Unix(socket) => socket.recv(&mut buffer).await?,
            };
            match log_line::parse(buffer.get(..length).unwrap_or_default()) {
                Ok(line) => {
                    match &line {
                        LogLine::End(_) => self.metrics.ends.increment(1),
                        LogLine::Server(_) => self.metrics.server_notices.increment(1),
                        LogLine::Other => self.metrics.others.increment(1),
                        LogLine::WithoutFields => self.metrics.without_fields.increment(1),
                    }
                    on_line(line);
                }
                Err(error) => {
                    self.metrics.malformed.increment(1);
                    // Never the line: it may hold what a client sent.
                    debug!(%error, bytes = length, "log line not understood");
                }
            }
        }
    }
}

/// Removes a socket file left by a process that is gone; any other file makes the bind fail.
fn remove_stale_socket(path: &Path) -> io::Result<()> {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
    if !is_socket {
        return Ok(());
    }
    let probe = std::os::unix::net::UnixDatagram::unbound()?;
    match probe.connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const LINE: &[u8] = br#"<1>1 t h a p m [kv@1 rid="x" pool="p" ts=--] m"#;

    /// Lines sent by `send` to a receiver on `listen`, until `count` have come.
    fn received(listen: &LogListen, count: usize, send: impl FnOnce(&LogListen)) -> Vec<LogLine> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let (sender, lines) = mpsc::channel();
        runtime.block_on(async {
            let receiver = LogReceiver::bind(listen, LogMetrics::register()).expect("bound");
            assert!(receiver.receive_buffer_bytes() > 64 * 1024);
            send(receiver.listen());
            let (done, finished) = tokio::sync::oneshot::channel();
            let mut done = Some(done);
            let mut left = count;
            let run = receiver.run(|line| {
                sender.send(line).expect("the test listens");
                left -= 1;
                if left == 0 {
                    let _ = done.take().expect("once").send(());
                }
            });
            tokio::select! {
                result = run => panic!("the receiver ended: {result:?}"),
                _ = finished => {}
            }
        });
        drop(sender);
        lines.iter().collect()
    }

    #[test]
    fn what_is_understood_arrives_over_udp() {
        let listen = "127.0.0.1:0".parse().expect("an address");
        let lines = received(&listen, 3, |listen| {
            let LogListen::Udp(address) = listen else { panic!("{listen}") };
            let socket = std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket");
            for line in [b"".as_slice(), b"<1>1 t h a p m - hello", b"garbage", LINE] {
                socket.send_to(line, address).expect("sent");
            }
            socket.send_to(b"<1>1 t h a p m - Server p/s is DOWN, x", address).expect("sent");
        });
        assert!(
            matches!(lines.as_slice(), [LogLine::WithoutFields, LogLine::End(_), LogLine::Server(_)]),
            "{lines:?}"
        );
    }

    #[test]
    fn a_unix_socket_of_a_dead_process_is_replaced_and_a_living_one_is_not() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("log.sock");
        drop(std::os::unix::net::UnixDatagram::bind(&path).expect("bound"));
        let listen = LogListen::Unix(path.clone());
        let lines = received(&listen, 1, |_| {
            let socket = std::os::unix::net::UnixDatagram::unbound().expect("a socket");
            socket.send_to(LINE, &path).expect("sent");
            let second = LogReceiver::bind(&listen, LogMetrics::register());
            assert!(matches!(second, Err(LogReceiverError::Bind { .. })));
        });
        assert_eq!(lines.len(), 1);
    }

    #[test]
    fn a_file_that_is_no_socket_is_left_alone() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let _context = runtime.enter();
        let file = tempfile::NamedTempFile::new().expect("a file");
        let listen = LogListen::Unix(file.path().to_owned());
        assert!(LogReceiver::bind(&listen, LogMetrics::register()).is_err());
        assert!(file.path().exists());
    }

    #[test]
    fn an_address_without_a_port_is_refused_by_name() {
        let error = "localhost".parse::<LogListen>().expect_err("no port");
        assert!(error.to_string().contains("localhost"));
        for text in ["/run/kv.sock", "unix:/run/kv.sock"] {
            let listen: LogListen = text.parse().expect("a path");
            assert_eq!(listen, LogListen::Unix("/run/kv.sock".into()));
            assert_eq!(listen.to_string(), "unix:/run/kv.sock");
        }
        assert!("unix:".parse::<LogListen>().is_err());
    }
}
