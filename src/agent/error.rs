//! Why the agent did not start.

use crate::{
    client::AccessError,
    config::{ConfigError, HostPort, Place},
    events::AddError,
    lifecycle::LogReceiverError,
    metrics::InstallError,
    peers::SecretError,
    prompt::ModelError,
    spop::BindError,
};
use std::{io, path::PathBuf};

/// Why the agent did not start. Each says which setting it is about.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The configuration file.
    #[error("{0}")]
    Config(#[from] ConfigError),
    /// A model directory can't be used.
    #[error("{place}: model_dir")]
    Model {
        /// Where the configuration names it.
        place: Place,
        /// Why.
        source: ModelError,
    },
    /// The SPOP listener.
    #[error("spop.listen")]
    Spop(#[from] BindError),
    /// The socket for log lines.
    #[error("log.listen")]
    Log(#[from] LogReceiverError),
    /// The admin listener.
    #[error("admin.listen: cannot listen on {addr}")]
    Admin {
        /// The address.
        addr: HostPort,
        /// Why.
        source: io::Error,
    },
    /// The file of decisions.
    #[error("record.file: cannot write {}", path.display())]
    Record {
        /// The file.
        path: std::path::PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The KV events of a rank can't be subscribed to.
    #[error("pool {pool}, server {server}: events")]
    Events {
        /// The pool.
        pool: String,
        /// The server.
        server: String,
        /// Why.
        source: AddError,
    },
    /// A pool's replicas can't be reached as configured.
    #[error("pool {pool}: http")]
    Access {
        /// The pool.
        pool: String,
        /// Why.
        source: AccessError,
    },
    /// There is no place for a replica.
    #[error("pool {pool}, server {server}")]
    Full {
        /// The pool.
        pool: String,
        /// The server.
        server: String,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The secret of the peers.
    #[error("peers.secret_file: {}", path.display())]
    Secret {
        /// The file.
        path: PathBuf,
        /// Why.
        source: SecretError,
    },
    /// The listener for peers.
    #[error("peers.listen")]
    Peers(#[source] io::Error),
    /// The process has a metrics recorder already.
    #[error("metrics")]
    Metrics(#[from] InstallError),
    /// The runtime or the signal handlers.
    #[error("the runtime could not be started")]
    Runtime(#[source] io::Error),
}
