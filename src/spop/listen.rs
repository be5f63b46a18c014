//! Addresses and sockets: TCP and unix, alike.

use bytes::BufMut;
use socket2::{Domain, SockAddr, Socket, TcpKeepalive, Type};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

/// Connections that the kernel accepts ahead of us. A reloaded HAProxy opens all of its connections at once, and opens
/// nearly one per concurrent request; the kernel lowers this to `net.core.somaxconn`, 4096 by default.
const BACKLOG: i32 = 4096;
/// Finds peers that vanished without a word: after this long in silence the kernel asks.
const KEEPALIVE: Duration = Duration::from_secs(60);
/// Owner and group may connect: HAProxy is to be in the group.
const SOCKET_MODE: u32 = 0o660;

/// Where to listen.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ListenAddr {
    /// A TCP address and port; port 0 takes a free one.
    Tcp(SocketAddr),
    /// The path of a unix socket.
    Unix(PathBuf),
}

/// Not an address to listen on.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0:?} is neither ADDRESS:PORT, as in 127.0.0.1:9101, nor unix:PATH, nor an absolute path")]
pub struct ParseListenAddrError(String);

impl FromStr for ListenAddr {
    type Err = ParseListenAddrError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.strip_prefix("unix:") {
            Some("") => Err(ParseListenAddrError(text.to_owned())),
            Some(path) => Ok(Self::Unix(path.into())),
            None if text.starts_with('/') => Ok(Self::Unix(text.into())),
            None => text.parse().map(Self::Tcp).map_err(|_| ParseListenAddrError(text.to_owned())),
        }
    }
}

impl fmt::Display for ListenAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(addr) => addr.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Binds and listens. Returns the address with its real port.
pub(super) fn bind(addr: &ListenAddr) -> io::Result<(Socket, ListenAddr)> {
    match addr {
        ListenAddr::Tcp(tcp) => {
            let socket = Socket::new(Domain::for_address(*tcp), Type::STREAM, None)?;
            socket.set_reuse_address(true)?;
            socket.bind(&(*tcp).into())?;
            listen(&socket)?;
            let bound = socket.local_addr()?.as_socket().unwrap_or(*tcp);
            Ok((socket, ListenAddr::Tcp(bound)))
        }
        ListenAddr::Unix(path) => {
            remove_stale(path)?;
            let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
            socket.bind(&SockAddr::unix(path)?)?;
            // Before anyone can connect.
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(SOCKET_MODE))?;
            listen(&socket)?;
            Ok((socket, addr.clone()))
        }
    }
}

fn listen(socket: &Socket) -> io::Result<()> {
    socket.set_nonblocking(true)?;
    socket.listen(BACKLOG)
}

/// Removes the file of a socket on which nobody answers. Anything else in its place is an error.
fn remove_stale(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
        Ok(file) if !file.file_type().is_socket() => {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the path exists and is not a socket"));
        }
        Ok(_) => {}
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => Err(io::Error::new(io::ErrorKind::AddrInUse, "another process listens on the socket")),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path),
        Err(error) => Err(error),
    }
}

/// A listening socket, registered with the runtime.
#[derive(Debug)]
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    pub(super) fn new(socket: Socket, addr: &ListenAddr) -> io::Result<Self> {
        match addr {
            ListenAddr::Tcp(_) => TcpListener::from_std(socket.into()).map(Self::Tcp),
            ListenAddr::Unix(_) => UnixListener::from_std(OwnedFd::from(socket).into()).map(Self::Unix),
        }
    }

    pub(super) async fn accept(&self) -> io::Result<Stream> {
        match self {
            Self::Tcp(listener) => {
                let (stream, peer) = listener.accept().await?;
                // Each answer goes out at once. A peer that is gone already shows when it is read from.
                let _ = stream.set_nodelay(true);
                let keepalive = TcpKeepalive::new().with_time(KEEPALIVE);
                let _ = socket2::SockRef::from(&stream).set_tcp_keepalive(&keepalive);
                Ok(Stream::Tcp(stream, peer))
            }
            Self::Unix(listener) => Ok(Stream::Unix(listener.accept().await?.0)),
        }
    }
}

/// A connection. Waits for readiness first, so that an idle one needs no buffer.
#[derive(Debug)]
pub(super) enum Stream {
    Tcp(TcpStream, SocketAddr),
    Unix(UnixStream),
}

impl Stream {
    pub(super) async fn readable(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream, _) => stream.readable().await,
            Self::Unix(stream) => stream.readable().await,
        }
    }

    pub(super) async fn writable(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream, _) => stream.writable().await,
            Self::Unix(stream) => stream.writable().await,
        }
    }

    pub(super) fn try_read_buf(&self, buf: &mut impl BufMut) -> io::Result<usize> {
        match self {
            Self::Tcp(stream, _) => stream.try_read_buf(buf),
            Self::Unix(stream) => stream.try_read_buf(buf),
        }
    }

    pub(super) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream, _) => stream.try_write(bytes),
            Self::Unix(stream) => stream.try_write(bytes),
        }
    }

    /// Says that we will not write any more.
    pub(super) async fn shutdown(&mut self) -> io::Result<()> {
        match self {
            Self::Tcp(stream, _) => stream.shutdown().await,
            Self::Unix(stream) => stream.shutdown().await,
        }
    }
}

/// Who it is, for the log.
impl fmt::Display for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(_, peer) => peer.fmt(f),
            Self::Unix(_) => f.write_str("unix"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_shown_alike() {
        for text in ["127.0.0.1:9101", "[::1]:9101", "unix:/run/x.sock", "unix:relative.sock"] {
            let addr: ListenAddr = text.parse().expect(text);
            assert_eq!(addr.to_string(), text);
        }
        assert_eq!("/run/x.sock".parse(), Ok(ListenAddr::Unix("/run/x.sock".into())));
        for text in ["", "9101", "localhost:9101", "127.0.0.1", "unix:", "x.sock"] {
            assert!(text.parse::<ListenAddr>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_stale_socket_is_replaced_and_only_its_group_may_connect() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("spop.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).expect("a first socket"));
        let addr = ListenAddr::Unix(path.clone());
        let (socket, _) = bind(&addr).expect("the stale file is replaced");
        let mode = std::fs::metadata(&path).expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, SOCKET_MODE);
        let error = bind(&addr).expect_err("somebody answers");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        drop(socket);
        assert!(bind(&addr).is_ok());
    }

    #[test]
    fn a_file_in_the_way_is_left_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("precious");
        std::fs::write(&path, "data").expect("a file");
        let error = bind(&ListenAddr::Unix(path.clone())).expect_err("not a socket");
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read_to_string(&path).expect("still there"), "data");
    }

    #[test]
    fn port_zero_takes_a_free_port() {
        let (_socket, addr) = bind(&"127.0.0.1:0".parse().expect("an address")).expect("a port");
        assert!(matches!(addr, ListenAddr::Tcp(addr) if addr.port() != 0));
    }
}
