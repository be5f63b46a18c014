//! What can go wrong with a replay.

use super::{policy::Weights, trace::TraceError};
use crate::sim::JobError;
use std::{io, path::PathBuf};

/// A replay that cannot be played.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The trace is not as it should be.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// There is no weight of this name.
    #[error("no weight {0:?}; there are {names}", names = Weights::NAMES)]
    NoWeight(String),
    /// One value was expected.
    #[error("--set {0}: one value is expected; --sweep tries several")]
    NotOneValue(String),
    /// A request that no replica can run.
    #[error("the replicas are too small for the trace: {0}")]
    TooSmall(#[from] JobError),
    /// Nothing would be measured.
    #[error("of {requests} requests none counts behind a --warm-up of {warm_up}: lower it, or play more")]
    AllWarmUp {
        /// The requests that are played.
        requests: usize,
        /// Those at the start that do not count.
        warm_up: usize,
    },
    /// The chart cannot be written.
    #[error("--svg {}: {source}", path.display())]
    Chart {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}
