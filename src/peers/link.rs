//! The connections between peers: 32 random bytes from either end, a first sealed message from the one that connected, a
//! byte of welcome from the other one; then sealed messages, each with its length in front.

use super::{
    news::{News, What},
    outbox::Outbox,
    secret::{RANDOM_BYTES, Seal, Secret},
    wire::{self, MAX_BYTES},
};
use crate::metrics::{PeerMetrics, PeersMetrics};
use ring::rand::{SecureRandom, SystemRandom};
use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::broadcast::error::RecvError,
    task::JoinSet,
    time::{sleep, timeout},
};

/// To connect, and for each step until the welcome. A peer that takes longer is no use.
const OPENING: Duration = Duration::from_secs(3);

/// For one message to be taken by the kernel: a peer that reads nothing for so long hangs.
const SENDING: Duration = Duration::from_secs(5);

/// What a peer answers when it has understood the first message.
const WELCOME: u8 = 1;

/// Peers tell every ten seconds which bookings they have; who is silent for so long is gone.
const SILENCE: Duration = Duration::from_secs(60);

/// Before a peer is tried again.
const PAUSE: Duration = Duration::from_secs(1);

/// Connections that are heard at once: more than a site has agents.
const MAX_CONNECTIONS: usize = 256;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
enum LinkError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("too slow")]
    Slow(#[from] tokio::time::error::Elapsed),
    #[error("the peer closed the connection: are `peers.secret_file` and the version the same there?")]
    Closed,
    #[error("no random numbers")]
    Random,
    #[error("not sealed by the secret of `peers.secret_file`")]
    Refused,
    #[error(transparent)]
    Malformed(#[from] wire::Malformed),
}

/// Where peers connect.
#[derive(Debug)]
pub struct Listener(TcpListener);

impl Listener {
    /// Binds it. `at` is `HOST:PORT`.
    ///
    /// # Errors
    /// The address is taken, or not ours.
    pub async fn bind(at: &str) -> io::Result<Self> {
        TcpListener::bind(at).await.map(Self)
    }

    /// Where it listens; the port is the real one if 0 was asked for.
    ///
    /// # Errors
    /// The operating system's.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }

    /// Hands the news of all peers to `on_news`, for ever. `on_news` must not block.
    ///
    /// # Errors
    /// The socket itself fails.
    pub async fn run(
        self,
        secret: Secret,
        metrics: PeersMetrics,
        on_news: impl Fn(News) + Send + Sync + 'static,
    ) -> io::Result<Infallible> {
        let on_news = Arc::new(on_news);
        let complained = Arc::new(AtomicBool::new(false));
        let mut connections = JoinSet::new();
        loop {
            let (stream, from) = self.0.accept().await?;
            while connections.try_join_next().is_some() {}
            if connections.len() >= MAX_CONNECTIONS {
                metrics.refused.increment(1);
                continue;
            }
            let (secret, metrics, on_news) = (secret.clone(), metrics.clone(), Arc::clone(&on_news));
            let complained = Arc::clone(&complained);
            connections.spawn(async move {
                match hear(stream, &secret, &metrics, &*on_news).await {
                    Err(error @ (LinkError::Refused | LinkError::Malformed(_))) => {
                        metrics.refused.increment(1);
                        // It comes again each second.
                        if !complained.swap(true, Ordering::Relaxed) {
                            tracing::warn!(%from, %error, "a connection to `peers.listen` was refused");
                        }
                    }
                    Err(error) => tracing::debug!(%from, %error, "a peer left"),
                    Ok(never) => match never {},
                }
            });
        }
    }
}

async fn hear(
    mut stream: TcpStream,
    secret: &Secret,
    metrics: &PeersMetrics,
    on_news: &impl Fn(News),
) -> Result<Infallible, LinkError> {
    let mut dialer = [0; RANDOM_BYTES];
    let listener = random()?;
    timeout(OPENING, stream.read_exact(&mut dialer)).await??;
    timeout(OPENING, stream.write_all(&listener)).await??;
    let mut seal = secret.seal(&dialer, &listener);
    let (mut message, mut is_welcome) = (Vec::new(), false);
    loop {
        let patience = if is_welcome { SILENCE } else { OPENING };
        let length = timeout(patience, stream.read_u32()).await?? as usize;
        if length > MAX_BYTES + Seal::BYTES {
            return Err(LinkError::Refused);
        }
        message.resize(length, 0);
        timeout(SENDING, stream.read_exact(&mut message)).await??;
        let opened = seal.open(&mut message).map_err(|_| LinkError::Refused)?;
        on_news(wire::decode(opened)?);
        if !std::mem::replace(&mut is_welcome, true) {
            timeout(OPENING, stream.write_u8(WELCOME)).await??;
        }
        metrics.heard.increment(1);
    }
}

/// Tells one peer, at `HOST:PORT`, all that is put into the outbox, for ever.
pub async fn tell(peer: String, secret: Secret, outbox: Outbox, metrics: PeerMetrics) {
    let mut complained = false;
    loop {
        let error = match tell_until_it_ends(&peer, &secret, &outbox, &metrics, &mut complained).await {
            Ok(never) => match never {},
            Err(error) => error,
        };
        metrics.up.set(0.0);
        // One warning is enough until it works again.
        if !std::mem::replace(&mut complained, true) {
            tracing::warn!(peer, %error, "a peer cannot be told of bookings: its load and ours are weighed apart");
        }
        sleep(PAUSE).await;
    }
}

async fn tell_until_it_ends(
    peer: &str,
    secret: &Secret,
    outbox: &Outbox,
    metrics: &PeerMetrics,
    complained: &mut bool,
) -> Result<Infallible, LinkError> {
    let mut stream = timeout(OPENING, TcpStream::connect(peer)).await??;
    stream.set_nodelay(true)?;
    let (dialer, mut listener) = (random()?, [0; RANDOM_BYTES]);
    timeout(OPENING, stream.write_all(&dialer)).await??;
    timeout(OPENING, stream.read_exact(&mut listener)).await??;
    let mut seal = secret.seal(&dialer, &listener);
    let mut frame = Vec::new();
    let hello = News { pool: "".into(), what: What::Alive(Vec::new()) };
    write(&mut stream, &hello, &mut seal, &mut frame).await?;
    match timeout(OPENING, stream.read_u8()).await? {
        Ok(WELCOME) => {}
        Ok(_) | Err(_) => return Err(LinkError::Closed),
    }
    let mut waiting = outbox.listen();
    metrics.up.set(1.0);
    if std::mem::take(complained) {
        tracing::info!(peer, "a peer is told of bookings again");
    }
    let (mut reader, mut writer) = stream.split();
    loop {
        let news = tokio::select! {
            news = waiting.recv() => match news {
                Ok(news) => news,
                Err(RecvError::Lagged(missed)) => {
                    metrics.missed.increment(missed);
                    continue;
                }
                Err(RecvError::Closed) => return Err(LinkError::Closed),
            },
            // A peer never speaks on a connection that it did not open.
            _ = reader.read_u8() => return Err(LinkError::Closed),
        };
        write(&mut writer, &news, &mut seal, &mut frame).await?;
        metrics.told.increment(1);
    }
}

/// Sends one message. `frame` is memory that is used again.
async fn write(
    stream: &mut (impl AsyncWriteExt + Unpin),
    news: &News,
    seal: &mut Seal,
    frame: &mut Vec<u8>,
) -> Result<(), LinkError> {
    const LENGTH: usize = size_of::<u32>();
    frame.clear();
    frame.extend_from_slice(&[0; LENGTH]);
    wire::encode(news, frame);
    seal.seal(frame, LENGTH).map_err(|_| LinkError::Refused)?;
    let length = (frame.len() - LENGTH) as u32;
    frame[..LENGTH].copy_from_slice(&length.to_be_bytes());
    Ok(timeout(SENDING, stream.write_all(frame)).await??)
}

fn random() -> Result<[u8; RANDOM_BYTES], LinkError> {
    let mut bytes = [0; RANDOM_BYTES];
    SystemRandom::new().fill(&mut bytes).map_err(|_| LinkError::Random)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::RequestId;
    use tokio::sync::mpsc;

    fn secret(text: &str) -> Secret {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), text.repeat(40)).expect("written");
        Secret::load(file.path()).expect("long enough")
    }

    /// A listener that hands on the ids of ended requests.
    async fn listener(at: &str) -> (SocketAddr, mpsc::UnboundedReceiver<u128>, tokio::task::AbortHandle) {
        let listener = Listener::bind(at).await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (sender, ended) = mpsc::unbounded_channel();
        let running = listener.run(secret("a"), PeersMetrics::register(), move |news| {
            let What::Ended(id) = news.what else { return };
            let _gone = sender.send(id.0);
        });
        (address, ended, tokio::spawn(running).abort_handle())
    }

    /// Tells of the end of `id` until it is heard.
    async fn told(outbox: &Outbox, ended: &mut mpsc::UnboundedReceiver<u128>, id: u128) {
        loop {
            outbox.ended(RequestId(id));
            let heard = timeout(Duration::from_millis(20), ended.recv()).await;
            if heard == Ok(Some(id)) {
                return;
            }
        }
    }

    #[tokio::test]
    async fn news_arrive_in_their_order_and_again_when_the_peer_has_come_back() {
        let (address, mut ended, running) = listener("127.0.0.1:0").await;
        let outbox = Outbox::new().of_pool("p");
        let metrics = PeerMetrics::register(&address.to_string());
        let telling = tokio::spawn(tell(address.to_string(), secret("a"), outbox.clone(), metrics));
        told(&outbox, &mut ended, 1).await;
        (2..200).for_each(|id| outbox.ended(RequestId(id)));
        let mut next = 2;
        while next < 200 {
            match ended.recv().await.expect("heard") {
                1 => {}
                id => {
                    assert_eq!(id, next);
                    next += 1;
                }
            }
        }
        running.abort();
        drop(ended);
        let (_, mut ended, _running) = loop {
            // The old one's port is free when its task is gone.
            if TcpListener::bind(address).await.is_ok() {
                break listener(&address.to_string()).await;
            }
            sleep(Duration::from_millis(5)).await;
        };
        told(&outbox, &mut ended, 1000).await;
        telling.abort();
    }

    #[tokio::test]
    async fn nobody_is_heard_without_the_secret() {
        let (address, mut ended, _running) = listener("127.0.0.1:0").await;
        let outbox = Outbox::new();
        let metrics = PeerMetrics::register(&address.to_string());
        let mut complained = false;
        let refused =
            tell_until_it_ends(&address.to_string(), &secret("b"), &outbox, &metrics, &mut complained).await;
        assert!(matches!(refused, Err(LinkError::Closed)), "{refused:?}");
        assert!(ended.try_recv().is_err() && !outbox.has_listeners());
        let mut raw = TcpStream::connect(address).await.expect("connected");
        raw.write_all(&[0; RANDOM_BYTES]).await.expect("sent");
        raw.read_exact(&mut [0; RANDOM_BYTES]).await.expect("its part");
        raw.write_u32(u32::MAX).await.expect("sent");
        assert_eq!(raw.read(&mut [0; 1]).await.ok().filter(|length| *length > 0), None, "closed");
    }
}
