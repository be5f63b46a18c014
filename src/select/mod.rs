//! Loads, bookings, the cost of a candidate and the choice.
//!
//! Pure: time comes in as `Instant`, chance from a seed. One [`Scheduler`] serves one pool, behind one lock, so that a
//! choice and its booking are one step and two requests at once see each other.
//!
//! | module | what it is |
//! |---|---|
//! | `ask`, `candidate` | what is asked, and who may serve it |
//! | `overlap`, `booked`, `history` | prefixes that a cache is confirmed to hold, that are on their way there, and that were sent there |
//! | `booking`, `load` | the reservations of one rank, and the load they add up to |
//! | `unplaced` | requests of which it is not known yet where they are |
//! | `rate`, `reckon` | how fast ranks prefill, and how far they are where their events come late |
//! | `recent`, `generations` | small bounded memories that settle ties |
//! | `evictions` | how long a cache keeps its blocks |
//! | `cost`, `dynamo`, `simple` | what a candidate costs, by policy |
//! | `choose` | the tie rule |
//! | `weigh`, `scheduler` | the terms of every candidate, and the whole |

mod ask;
mod booked;
mod booking;
mod candidate;
mod choose;
mod config;
mod cost;
mod dynamo;
mod evictions;
mod generations;
mod history;
mod load;
mod overlap;
mod rate;
mod recent;
mod reckon;
mod scheduler;
mod simple;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod testing;
mod unplaced;
mod weigh;

pub use ask::{Ask, PromptBlocks, Sequence, SequenceKey};
pub use candidate::{Candidate, EngineLoad, Slots};
pub use choose::{Choice, Excluded, Reason, Terms};
pub use config::{Policy, SchedulerConfig};
pub use cost::CostConfig;
pub use load::Load;
pub use overlap::Overlap;
pub use scheduler::{Booked, Counts, Ended, Scheduler, Sought};
