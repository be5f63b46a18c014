//! The agent: its admin port, and its answer to an SPOP handshake.

use crate::{
    client,
    config::Config,
    doctor::{facts::AgentFacts, samples::Samples},
    spop::{
        ListenAddr,
        client::{Answer, MAX_ANSWER_BYTES, answer, health_check},
    },
};
use serde::de::DeserializeOwned;
use std::{io, time::Duration};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpStream, UnixStream},
    time::timeout,
};

/// It answers in milliseconds, on this machine or the next.
const PATIENCE: Duration = Duration::from_secs(3);

/// The frame that is offered, in bytes: what HAProxy offers with the buffer that we recommend.
const FRAME_BYTES: u32 = (1 << 20) - 4;

pub(super) async fn facts(config: &Config) -> AgentFacts {
    let admin = config.admin_listen.to_string();
    let (samples, readiness, status, hello) = tokio::join!(
        samples(&admin),
        page(&admin, "/readyz"),
        page(&admin, "/status"),
        hello(&config.spop.listen)
    );
    AgentFacts {
        hello,
        samples,
        readiness,
        status,
        spop: config.spop.listen.to_string(),
        log: config.log_listen.to_string(),
        max_frame_bytes: config.spop.max_frame_bytes,
        admin,
    }
}

/// Reads again what changes.
pub(super) async fn refresh(facts: &mut AgentFacts) {
    if facts.samples.is_ok() {
        (facts.samples, facts.readiness) = tokio::join!(samples(&facts.admin), page(&facts.admin, "/readyz"));
    }
}

async fn page<T: DeserializeOwned>(admin: &str, target: &str) -> Option<T> {
    serde_json::from_str(&get(admin, target).await.ok()?).ok()
}

/// The agent's metrics.
pub(super) async fn samples(admin: &str) -> Result<Samples, String> {
    get(admin, "/metrics").await.map(|page| Samples::parse(&page))
}

/// One page, whatever its status.
pub(super) async fn get(admin: &str, target: &str) -> Result<String, String> {
    let answer =
        timeout(PATIENCE, client::get(admin, target)).await.map_err(|_| "no answer in time".to_owned())?;
    let answer = answer.map_err(|error| error.to_string())?;
    Ok(String::from_utf8_lossy(&answer.body).into_owned())
}

async fn hello(addr: &ListenAddr) -> Result<Answer, String> {
    let exchange = async {
        match addr {
            ListenAddr::Tcp(addr) => ask(TcpStream::connect(addr).await?).await,
            ListenAddr::Unix(path) => ask(UnixStream::connect(path).await?).await,
        }
    };
    let frame = timeout(PATIENCE, exchange).await.map_err(|_| "no answer in time".to_owned())?;
    answer(&frame.map_err(|error| error.to_string())?).map_err(|error| error.to_string())
}

async fn ask(mut stream: impl AsyncRead + AsyncWrite + Unpin) -> io::Result<Vec<u8>> {
    stream.write_all(&health_check(FRAME_BYTES)).await?;
    let length = stream.read_u32().await? as usize;
    if length > MAX_ANSWER_BYTES {
        return Err(io::Error::other("this is not SPOP"));
    }
    let mut frame = vec![0; length];
    stream.read_exact(&mut frame).await?;
    Ok(frame)
}
