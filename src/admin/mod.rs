//! The admin port: `/metrics`, `/healthz`, `/readyz`, `/status`, `/explain`, what operators switch, and what Ray's side
//! asks.

mod answers;
mod meant;
mod operate;
mod ray;

use crate::{config::HostPort, route::Router};
use answers::Answers;
use bytes::Bytes;
use http_body_util::Full;
use hyper::{Request, Response, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use metrics_exporter_prometheus::PrometheusHandle;
use std::{convert::Infallible, io, net::SocketAddr, sync::Arc, time::Duration};
use tokio::{net::TcpListener, sync::Semaphore};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Connections at once: Ray's HAProxy opens one for each request. A flood must not cost the request path.
const MAX_CONNECTIONS: usize = 1024;

/// A client that sends no complete request header in this time is cut off.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection carries one request and lives no longer than this: a client that stalls must not keep its place.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(30);

/// How long to wait after an accept that failed, for want of file descriptors or the like: it passes, a busy loop would
/// not help, and the log must not fill.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// The admin listener, bound but not yet serving.
#[derive(Debug)]
pub struct Admin {
    listener: TcpListener,
}

impl Admin {
    /// Binds the listener.
    ///
    /// # Errors
    /// The address cannot be resolved or bound.
    pub async fn bind(addr: &HostPort) -> io::Result<Self> {
        Ok(Self { listener: TcpListener::bind(addr.as_str()).await? })
    }

    /// The address bound, which tells the port where 0 was asked for.
    ///
    /// # Errors
    /// The operating system's.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until `stop`.
    pub async fn serve(
        self,
        router: Arc<Router>,
        metrics: PrometheusHandle,
        session_header: String,
        stop: CancellationToken,
    ) {
        let limit = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let answers = Arc::new(Answers::new(router, metrics, &session_header));
        let tasks = TaskTracker::new();
        loop {
            let accepted = tokio::select! {
                () = stop.cancelled() => break,
                accepted = self.listener.accept() => accepted,
            };
            let stream = match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "admin: accept failed");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let Ok(permit) = Arc::clone(&limit).try_acquire_owned() else { continue };
            let (answers, stop) = (Arc::clone(&answers), stop.clone());
            tasks.spawn(async move {
                let service = service_fn(|request: Request<Incoming>| {
                    let answers = Arc::clone(&answers);
                    async move { Ok::<Response<Full<Bytes>>, Infallible>(answers.answer(request).await) }
                });
                let connection = http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(HEADER_TIMEOUT)
                    .keep_alive(false)
                    .serve_connection(TokioIo::new(stream), service);
                tokio::select! {
                    // A client's bad HTTP is its own matter.
                    _ = tokio::time::timeout(CONNECTION_TIMEOUT, connection) => {}
                    () = stop.cancelled() => {}
                }
                drop(permit);
            });
        }
        tasks.close();
        tasks.wait().await;
    }
}
