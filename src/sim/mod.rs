//! A simulated replica: vLLM's interfaces and cache behaviour without a model, for the demo, tests and benchmarks.

mod cache;
mod engine;
mod events;
mod offload;
mod pool;
mod timing;

pub use cache::Prompt;
pub use engine::{Cached, Engine, EngineConfig, EngineStats, Job, JobError, JobId, Output, StepReport};
pub use events::{Event, ExtraKeys, HashFormat, Lora, Medium, Stored, encode_batch};
pub use offload::OffloadConfig;
pub use timing::{StepLoad, Timing};
