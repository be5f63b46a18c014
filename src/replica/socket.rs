//! The client of HAProxy's runtime socket (management.txt §9.3, `stats socket`). Level `user` is enough.

use crate::config::SocketAddr;
use std::{io, time::Duration};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpStream, UnixStream},
    time::timeout,
};

/// Asks one question a connection, as HAProxy closes after each answer.
#[derive(Clone, Debug)]
pub struct RuntimeSocket {
    addr: SocketAddr,
    timeout: Duration,
    max_bytes: u64,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The socket is absent, refused, or broke off.
    #[error("{addr}: {source}")]
    Io {
        /// Where.
        addr: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// No answer in time.
    #[error("{0}: no answer in time")]
    TimedOut(SocketAddr),
    /// More than is taken.
    #[error("{0}: the answer is too long")]
    TooLong(SocketAddr),
}

impl RuntimeSocket {
    /// An answer takes under a millisecond; a busy HAProxy may be late, but never hangs for long.
    pub const TIMEOUT: Duration = Duration::from_secs(2);

    /// Far above the rows of a thousand servers.
    pub const MAX_BYTES: u64 = 4 << 20;

    /// A client of the socket at `addr`, with the usual limits.
    #[must_use]
    pub const fn new(addr: SocketAddr) -> Self {
        Self { addr, timeout: Self::TIMEOUT, max_bytes: Self::MAX_BYTES }
    }

    /// Sends a line of commands (with `;` between them) and reads the answer to its end.
    ///
    /// # Errors
    /// [`SocketError`].
    pub async fn ask(&self, commands: &str) -> Result<String, SocketError> {
        let answer = async {
            match &self.addr {
                SocketAddr::Unix(path) => self.exchange(UnixStream::connect(path).await?, commands).await,
                SocketAddr::Tcp(addr) => {
                    self.exchange(TcpStream::connect(addr.as_str()).await?, commands).await
                }
            }
        };
        let bytes = timeout(self.timeout, answer)
            .await
            .map_err(|_| SocketError::TimedOut(self.addr.clone()))?
            .map_err(|source| SocketError::Io { addr: self.addr.clone(), source })?;
        if bytes.len() as u64 > self.max_bytes {
            return Err(SocketError::TooLong(self.addr.clone()));
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    async fn exchange(
        &self,
        mut stream: impl AsyncRead + AsyncWrite + Unpin,
        commands: &str,
    ) -> io::Result<Vec<u8>> {
        stream.write_all(commands.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.take(self.max_bytes + 1).read_to_end(&mut answer).await?;
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::UnixListener;

    /// A socket that answers anything with this many bytes, and then closes or waits.
    async fn ask(bytes: usize, close: bool) -> Result<String, SocketError> {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("admin.sock");
        let listener = UnixListener::bind(&path).expect("bound");
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a client");
            let mut asked = [0; 64];
            let _ = stream.read(&mut asked).await;
            let _ = stream.write_all(&vec![b'x'; bytes]).await;
            if !close {
                std::future::pending::<()>().await;
            }
        });
        let addr = SocketAddr::Unix(path);
        RuntimeSocket { addr, timeout: Duration::from_millis(500), max_bytes: 100 }.ask("show info\n").await
    }

    #[tokio::test]
    async fn an_answer_is_read_to_its_end_within_bounds() {
        assert_eq!(ask(100, true).await.expect("an answer").len(), 100);
        assert!(matches!(ask(101, true).await, Err(SocketError::TooLong(_))));
        assert!(matches!(ask(5, false).await, Err(SocketError::TimedOut(_))));
        let absent = RuntimeSocket::new(SocketAddr::Unix("/nowhere/admin.sock".into()));
        assert!(matches!(absent.ask("show info\n").await, Err(SocketError::Io { .. })));
    }
}
