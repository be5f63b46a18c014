//! A simulated replica: vLLM's interfaces and cache behaviour without a model, for the demo, tests and benchmarks.
//!
//! The engine and its caches are pure ([`Engine`]); for a captured sequence of requests they publish what vLLM 0.32
//! published. [`Replica`] runs them in real time behind HTTP and ZeroMQ.

mod answer;
mod args;
mod cache;
mod driver;
mod engine;
mod events;
mod http;
mod job;
mod metrics_page;
mod offload;
mod pool;
mod publisher;
mod replica;
mod request;
mod timing;
mod token_store;
mod writer;

pub use args::{CpuEvents, ReplicaArgs};
pub use cache::Prompt;
pub use engine::{Engine, EngineConfig};
pub use events::{Event, ExtraKeys, HashFormat, Lora, Medium, Stored, encode_batch};
pub use job::{Cached, EngineStats, Job, JobError, JobId, Output, StepReport};
pub use offload::OffloadConfig;
pub use publisher::EndpointError;
pub use replica::{RankEndpoints, Replica, ReplicaError, run, run_until_signal};
pub use timing::{StepLoad, Timing};
