//! The listener: accepts HAProxy's connections and gives each a task.

use super::admission::{Admission, AdmissionLimits};
use super::connection::Connection;
use super::frame::MIN_MAX_FRAME_SIZE;
use super::handler::Handler;
use super::listen::{self, ListenAddr, Listener};
use super::log_limit::LogLimit;
use super::slots::Slots;
use crate::metrics::SpopMetrics;
use crate::pulse::{self, Pulse};
use arc_swap::ArcSwap;
use metrics::Gauge;
use socket2::Socket;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// How long to wait after an accept that failed. It fails for want of file descriptors, and would fail again at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// What a [`Server`] keeps to. The limits hold for all connections together unless they say otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ServerConfig {
    /// The largest frame that we take, in bytes; at least 256. Default 16 MiB: a HAProxy with 8 MiB buffers sends one of
    /// that size, and hangs up on an agent that announces more than its own limit, so we announce the lower of both.
    pub max_frame_size: u32,
    /// The longest payload of one NOTIFY, fragments put together, in bytes. Default 32 MiB.
    pub max_payload_bytes: usize,
    /// Payload bytes in flight. Beyond it NOTIFYs are answered without an opinion, unread. Default 256 MiB.
    pub max_in_flight_bytes: usize,
    /// NOTIFYs in flight. Beyond it they are answered without an opinion. Default 4096.
    pub max_in_flight: usize,
    /// Connections. Beyond it new ones wait in the kernel's queue: closing them would make HAProxy ≤ 3.0 try again in a
    /// tight loop, while a health check that waits tells it to do without us. Default 16384; HAProxy opens about as many
    /// as it has requests in flight.
    pub max_connections: usize,
    /// When a NOTIFY is answered without an opinion at the latest, counted from its first byte. Default 400 ms; must be
    /// below HAProxy's `timeout processing`.
    pub deadline: Duration,
    /// How long HAProxy may owe us the HELLO or the rest of a frame, or leave our answers unread, until the connection is
    /// closed. Default 10 s.
    pub stall: Duration,
    /// How long a shutdown waits for NOTIFYs in flight. Default 1 s.
    pub drain: Duration,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            max_frame_size: 16 << 20,
            max_payload_bytes: 32 << 20,
            max_in_flight_bytes: 256 << 20,
            max_in_flight: 4096,
            max_connections: 16_384,
            deadline: Duration::from_millis(400),
            stall: Duration::from_secs(10),
            drain: Duration::from_secs(1),
        }
    }
}

/// Why a server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The configured frame size is below the protocol's minimum.
    #[error("max_frame_size is {0} bytes, the protocol asks for at least {MIN_MAX_FRAME_SIZE}")]
    MaxFrameSize(u32),
    /// The address cannot be listened on.
    #[error("cannot listen on {addr}")]
    Listen {
        /// The address.
        addr: ListenAddr,
        /// Why.
        source: io::Error,
    },
}

/// A bound listener that does not accept yet.
#[derive(Debug)]
pub struct Server {
    socket: Socket,
    addr: ListenAddr,
    limits: ServerLimits,
    metrics: SpopMetrics,
    pulse: Arc<Pulse>,
}

/// What a server keeps to, to be changed while it serves.
#[derive(Clone, Debug)]
pub struct ServerLimits {
    config: Arc<ArcSwap<ServerConfig>>,
    admission: Arc<Admission>,
    slots: Arc<Slots>,
}

/// What the connections of one server have in common.
pub(super) struct Shared<H> {
    pub(super) handler: Arc<H>,
    limits: ServerLimits,
    pub(super) admission: Arc<Admission>,
    pub(super) metrics: SpopMetrics,
    pub(super) log_limit: LogLimit,
}

impl<H> Shared<H> {
    /// What holds now.
    pub(super) fn config(&self) -> ServerConfig {
        **self.limits.config.load()
    }
}

impl ServerConfig {
    const fn admission(&self) -> AdmissionLimits {
        AdmissionLimits {
            requests: self.max_in_flight,
            bytes: self.max_in_flight_bytes,
            payload_bytes: self.max_payload_bytes,
        }
    }
}

impl ServerLimits {
    fn new(config: ServerConfig, metrics: &SpopMetrics) -> Self {
        Self {
            admission: Arc::new(Admission::new(config.admission(), metrics)),
            slots: Arc::new(Slots::new(config.max_connections)),
            config: Arc::new(ArcSwap::from_pointee(config)),
        }
    }

    /// From now on the server keeps to these; a frame size below the protocol's minimum is taken as that. Connections
    /// that are open keep the frame size that they agreed on, and stay if they are more than may be; what is in flight
    /// stays likewise.
    pub fn set(&self, config: ServerConfig) {
        let max_frame_size = config.max_frame_size.max(MIN_MAX_FRAME_SIZE);
        self.admission.set_limits(config.admission());
        self.slots.set_limit(config.max_connections);
        self.config.store(Arc::new(ServerConfig { max_frame_size, ..config }));
    }
}

impl Server {
    /// Binds and listens: HAProxy can connect from now on, and waits until [`Server::serve`].
    ///
    /// A unix socket's stale file is replaced; its mode becomes 0660.
    ///
    /// # Errors
    ///
    /// See [`BindError`].
    pub fn bind(addr: &ListenAddr, config: ServerConfig, metrics: SpopMetrics) -> Result<Self, BindError> {
        if config.max_frame_size < MIN_MAX_FRAME_SIZE {
            return Err(BindError::MaxFrameSize(config.max_frame_size));
        }
        let (socket, addr) =
            listen::bind(addr).map_err(|source| BindError::Listen { addr: addr.clone(), source })?;
        let pulse = Arc::new(Pulse::new(Instant::now()));
        Ok(Self { socket, addr, limits: ServerLimits::new(config, &metrics), metrics, pulse })
    }

    /// Where the server listens, with the real port.
    #[must_use]
    pub const fn local_addr(&self) -> &ListenAddr {
        &self.addr
    }

    /// What it keeps to.
    #[must_use]
    pub fn limits(&self) -> ServerLimits {
        self.limits.clone()
    }

    /// The sign that the loop which accepts connections goes round.
    #[must_use]
    pub fn pulse(&self) -> Arc<Pulse> {
        Arc::clone(&self.pulse)
    }

    /// Serves until `shutdown`, then stops accepting, lets NOTIFYs in flight end, takes leave of each connection with
    /// AGENT-DISCONNECT, and returns. If the future is dropped instead, the connections do the same on their own.
    ///
    /// # Errors
    ///
    /// If the socket cannot be registered with the runtime.
    pub async fn serve<H: Handler>(self, handler: H, shutdown: CancellationToken) -> io::Result<()> {
        let Self { socket, addr, limits, metrics, pulse } = self;
        let listener = Listener::new(socket, &addr)?;
        let shared = Arc::new(Shared {
            handler: Arc::new(handler),
            admission: Arc::clone(&limits.admission),
            limits,
            metrics,
            log_limit: LogLimit::default(),
        });
        // Cancelled with `shutdown`, and when this future is dropped.
        let connections_end = shutdown.child_token();
        let _end = connections_end.clone().drop_guard();
        let connections = TaskTracker::new();
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = accept_all(&listener, &shared, &connections, &connections_end) => {}
            () = beat(&pulse) => {}
        }
        drop(listener);
        connections.close();
        connections.wait().await;
        Ok(())
    }
}

/// Accepts for ever.
async fn accept_all<H: Handler>(
    listener: &Listener,
    shared: &Arc<Shared<H>>,
    connections: &TaskTracker,
    shutdown: &CancellationToken,
) {
    loop {
        let slot = shared.limits.slots.take().await;
        match listener.accept().await {
            Ok(stream) => {
                shared.metrics.accepted.increment(1);
                let open = Open::new(&shared.metrics.connections);
                let connection = Connection::new(stream, Arc::clone(shared)).run(shutdown.clone());
                connections.spawn(async move {
                    connection.await;
                    drop((open, slot));
                });
            }
            Err(error) => {
                shared.metrics.accept_errors.increment(1);
                if let Some(suppressed) = shared.log_limit.allow(Instant::now()) {
                    tracing::warn!(%error, suppressed, "cannot accept SPOP connections");
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Beats for ever: as long as the task that accepts is run.
async fn beat(pulse: &Pulse) {
    let mut ticks = tokio::time::interval(pulse::PERIOD);
    loop {
        ticks.tick().await;
        pulse.beat(Instant::now());
    }
}

/// Counts a connection as open until it is dropped.
struct Open(Gauge);

impl Open {
    fn new(gauge: &Gauge) -> Self {
        gauge.increment(1.0);
        Self(gauge.clone())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.decrement(1.0);
    }
}
