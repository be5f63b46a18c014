//! A whole simulated replica: one engine, publisher and driver a rank, and an HTTP server in front of them.

use super::args::{ReplicaArgs, endpoint_of_rank};
use super::driver::drive;
use super::engine::{Engine, EngineConfig};
use super::events::Lora;
use super::http::{ServedRank, Server, Told};
use super::metrics_page::CacheInfo;
use super::publisher::{EndpointError, Publisher, PublisherConfig};
use super::request::Served;
use super::token_store::TokenStore;
use super::writer::Writer;
use crate::prompt::{Model, ModelError};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// No context is longer where the cache would allow it, in tokens.
const MAX_MODEL_LEN: usize = 131_072;

/// Why a replica could not start.
#[derive(Debug, thiserror::Error)]
pub enum ReplicaError {
    /// The model's files.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The HTTP address.
    #[error("cannot listen on {address}")]
    Listen {
        /// As configured.
        address: SocketAddr,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// A ZeroMQ endpoint.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    /// `--max-model-len` is more than the cache holds.
    #[error("a context of {max_model_len} tokens does not fit into the KV cache of {capacity_tokens}")]
    Context {
        /// As configured.
        max_model_len: usize,
        /// All blocks but the one set aside.
        capacity_tokens: usize,
    },
    /// The signals that end the process cannot be received.
    #[error("cannot wait for signals")]
    Signal(#[source] std::io::Error),
}

/// Where one rank's KV events are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RankEndpoints {
    /// The data-parallel rank.
    pub rank: u16,
    /// Where its KV events are published.
    pub events: String,
    /// Where they are replayed.
    pub replay: String,
    /// Where prompts' tokens are taken ahead of their requests.
    pub tokens: Option<String>,
}

/// A running replica. Dropped, it stops: connections break off as if the process had been killed.
#[derive(Debug)]
pub struct Replica {
    http_addr: SocketAddr,
    ranks: Vec<RankEndpoints>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Replica {
    /// Starts a replica within the current tokio runtime; it is ready when this returns.
    ///
    /// # Errors
    /// If its model cannot be read or its addresses are taken.
    pub async fn start(args: &ReplicaArgs) -> Result<Self, ReplicaError> {
        let model = args.model_dir.as_deref().map_or_else(Model::embedded, Model::load)?;
        let listener = TcpListener::bind(args.listen).await;
        let listener = listener.map_err(|source| ReplicaError::Listen { address: args.listen, source })?;
        let http_addr =
            listener.local_addr().map_err(|source| ReplicaError::Listen { address: args.listen, source })?;
        let config = EngineConfig {
            block_tokens: args.block_size,
            blocks: args.blocks,
            offload: args.offload(),
            step_tokens: args.step_tokens as usize,
            sequences: args.max_sequences as usize,
            timing: args.timing(),
        };
        let capacity_tokens = Engine::new(config.clone()).capacity_tokens();
        let max_model_len = args.max_model_len.unwrap_or(capacity_tokens.min(MAX_MODEL_LEN));
        if max_model_len > capacity_tokens {
            return Err(ReplicaError::Context { max_model_len, capacity_tokens });
        }
        let mut publishers = Vec::new();
        for rank in (args.rank..).take(args.ranks.into()) {
            let wanted = publisher_config(args, rank);
            let publisher = (!args.no_events).then(|| Publisher::start(wanted.clone())).transpose()?;
            publishers.push((rank, publisher, wanted));
        }
        let mut stores = token_stores(args)?.into_iter();
        let stop = CancellationToken::new();
        let tasks = TaskTracker::new();
        let mut served_ranks = Vec::new();
        for (number, publisher, wanted) in publishers {
            let bound = publisher.as_ref();
            let events_endpoint = bound.map_or(wanted.events, |bound| bound.events_endpoint().to_owned());
            let replay_endpoint = bound.map_or(wanted.replay, |bound| bound.replay_endpoint().to_owned());
            let (engine, running) = drive(Engine::new(config.clone()), publisher, stop.clone());
            tasks.spawn(running);
            let events_connect = args.events_connect;
            served_ranks.push(ServedRank {
                number,
                engine,
                events_endpoint,
                events_connect,
                replay_endpoint,
                tokens: stores.next().flatten(),
            });
        }
        let ranks = served_ranks.iter().map(endpoints).collect();
        let served = served(args, model, max_model_len);
        let cache = CacheInfo {
            block_tokens: args.told_block_size.unwrap_or(args.block_size),
            blocks: args.blocks,
            has_cpu_tier: args.cpu_blocks > 0,
        };
        let told = Told {
            topic: args.topic.clone(),
            publishes: !args.no_events,
            renders: args.enable_scale_out,
            api_key: args.api_key.clone(),
        };
        let server = Arc::new(Server::new(served, served_ranks, cache, told));
        tasks.spawn(serve(listener, server, stop.clone(), tasks.clone()));
        Ok(Self { http_addr, ranks, stop, tasks })
    }

    /// Where HTTP is served.
    #[must_use]
    pub const fn http_addr(&self) -> SocketAddr {
        self.http_addr
    }

    /// Where the KV events of each rank are, in the order of the ranks; at least one.
    #[must_use]
    pub fn ranks(&self) -> &[RankEndpoints] {
        &self.ranks
    }

    /// Stops the replica and waits until its tasks have ended.
    pub async fn stop(self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Runs a replica until `stop`.
///
/// # Errors
/// As [`Replica::start`].
pub async fn run(args: &ReplicaArgs, stop: CancellationToken) -> Result<(), ReplicaError> {
    let replica = Replica::start(args).await?;
    tracing::info!(http = %replica.http_addr(), ranks = ?replica.ranks(), "the simulated replica is ready");
    stop.cancelled().await;
    replica.stop().await;
    Ok(())
}

/// Runs a replica until the process gets SIGINT or SIGTERM.
///
/// # Errors
/// As [`Replica::start`].
pub async fn run_until_signal(args: ReplicaArgs) -> Result<(), ReplicaError> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut interrupt = signal(SignalKind::interrupt()).map_err(ReplicaError::Signal)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(ReplicaError::Signal)?;
    let stop = CancellationToken::new();
    let signalled = async {
        tokio::select! { _ = interrupt.recv() => {} _ = terminate.recv() => {} }
        stop.cancel();
        std::future::pending().await
    };
    tokio::select! { result = run(&args, stop.clone()) => result, () = signalled => Ok(()) }
}

/// The token store of each rank, where they are asked for.
fn token_stores(args: &ReplicaArgs) -> Result<Vec<Option<TokenStore>>, EndpointError> {
    let store = |rank| {
        let endpoint = args.tokens.as_deref().map(|endpoint| endpoint_of_rank(endpoint, rank));
        let started = endpoint.map(|endpoint| {
            TokenStore::start(&endpoint, args.token_limits())
                .map_err(|source| EndpointError { endpoint, source })
        });
        started.transpose()
    };
    (args.rank..).take(args.ranks.into()).map(store).collect()
}

fn publisher_config(args: &ReplicaArgs, rank: u16) -> PublisherConfig {
    PublisherConfig {
        events: endpoint_of_rank(&args.events, rank),
        connects: args.events_connect,
        replay: endpoint_of_rank(&args.replay, rank),
        topic: args.topic.clone(),
        rank,
        format: args.hash_format,
    }
}

fn served(args: &ReplicaArgs, model: Model, max_model_len: usize) -> Served {
    let adapters =
        (1..).zip(&args.adapters).map(|(id, name)| Lora { id, name: name.as_str().into() }).collect();
    Served {
        writer: Writer::new(&model),
        name: args.served_model_name.clone().unwrap_or_else(|| model.name().to_owned()),
        model,
        adapters,
        max_model_len,
        answer_tokens: args.answer_tokens as usize,
    }
}

fn endpoints(rank: &ServedRank) -> RankEndpoints {
    RankEndpoints {
        rank: rank.number,
        events: rank.events_endpoint.clone(),
        replay: rank.replay_endpoint.clone(),
        tokens: rank.tokens.as_ref().map(|store| store.endpoint().to_owned()),
    }
}

async fn serve(listener: TcpListener, server: Arc<Server>, stop: CancellationToken, tasks: TaskTracker) {
    loop {
        let accepted =
            tokio::select! { accepted = listener.accept() => accepted, () = stop.cancelled() => return };
        let Ok((stream, _)) = accepted else {
            // Out of descriptors, most likely: others have to end first.
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            continue;
        };
        let _late = stream.set_nodelay(true);
        let (server, stop) = (Arc::clone(&server), stop.clone());
        tasks.spawn(async move {
            let answer = service_fn(move |request| Arc::clone(&server).answer(request));
            let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), answer);
            tokio::select! {
                ended = connection => if let Err(error) = ended { tracing::debug!(%error, "a connection broke") },
                () = stop.cancelled() => {}
            }
        });
    }
}
