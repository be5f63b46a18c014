//! What a stream says and what limits it.

use std::time::Duration;

/// How well the rank's cache is known.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FeedState {
    /// The publisher has not been heard yet, or its history is being read.
    Connecting,
    /// All that the publisher ever said is applied.
    Exact,
    /// Some of it is missing for good: what is known may be wrong until the cache is reset.
    Degraded(DegradedReason),
    /// What is known counts no more until the stream proves that it still holds.
    Suspended(SuspendReason),
}

impl FeedState {
    /// The state's name in metrics and logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Connecting => "connecting",
            Self::Exact => "exact",
            Self::Degraded(_) => "degraded",
            Self::Suspended(_) => "suspended",
        }
    }
}

/// Why what is known does not count for now.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum SuspendReason {
    /// The connection was lost: the process may be another one.
    Disconnected,
    /// The replica failed its health checks: the process may be another one.
    HealthLost,
    /// The stream says nothing, though it should: the engine computes blocks, or its replay endpoint answered before.
    Silent,
}

impl SuspendReason {
    /// The reason's name in metrics and answers.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Disconnected => "disconnected",
            Self::HealthLost => "health_lost",
            Self::Silent => "silent",
        }
    }
}

/// What others found that speaks against a stream.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Doubt {
    /// HAProxy has the server as down, or the engine no longer answers over HTTP.
    HealthLost,
    /// The engine's own counters say that it filled blocks, and the stream said nothing of them.
    Silent,
    /// An operator wants all that is known told again.
    Resync,
}

impl Doubt {
    /// All doubts, in the order of their counters.
    pub const ALL: [Self; 3] = [Self::HealthLost, Self::Silent, Self::Resync];

    /// The doubt's name in metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::HealthLost => SuspendReason::HealthLost.as_str(),
            Self::Silent => SuspendReason::Silent.as_str(),
            Self::Resync => ResetReason::Resync.as_str(),
        }
    }
}

/// Why batches are missing for good.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DegradedReason {
    /// Batches were missed and there is no replay endpoint to ask.
    NoReplay,
    /// The publisher no longer has the batches (vLLM `buffer_steps`).
    HistoryLost,
    /// The replay endpoint does not answer.
    ReplayTimeout,
    /// The replay endpoint answers again and again without the batches that it must have.
    ReplayIncomplete,
    /// A batch, or an event that concerns us, could not be decoded.
    Undecodable,
}

impl DegradedReason {
    /// The reason's name in metrics and logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NoReplay => "no_replay",
            Self::HistoryLost => "history_lost",
            Self::ReplayTimeout => "replay_timeout",
            Self::ReplayIncomplete => "replay_incomplete",
            Self::Undecodable => "undecodable",
        }
    }
}

/// Why everything known of a rank must be forgotten.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ResetReason {
    /// A sequence number came that is not above the last one: another process publishes.
    SequenceWentBack,
    /// The publisher has another batch under the number of the last one applied.
    HistoryDiffers,
    /// The publisher has not even the last batch applied: it has published nothing yet.
    HistoryGone,
    /// After a lost connection nothing proved that the process is the same.
    Unproven,
    /// An operator wants all that is known told again.
    Resync,
}

impl ResetReason {
    /// The reason's name in metrics and logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::SequenceWentBack => "sequence_went_back",
            Self::HistoryDiffers => "history_differs",
            Self::HistoryGone => "history_gone",
            Self::Unproven => "unproven",
            Self::Resync => "resync",
        }
    }
}

/// What the owner of the stream must do, in this order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action<P> {
    /// Apply the batch to the index.
    Apply {
        /// Its sequence number.
        seq: u64,
        /// Its bytes.
        payload: P,
    },
    /// Ask the replay endpoint for all batches from this one on, then call `on_replay_sent`.
    RequestReplay {
        /// The first batch wanted.
        from: u64,
    },
    /// Forget the request made last, sent or not; its further answers must not be delivered.
    CancelReplay,
    /// Forget all blocks of the rank, and what is known of its groups.
    Reset(ResetReason),
    /// The state is now another one.
    State(FeedState),
}

/// The limits of one stream.
#[derive(Clone, Copy, Debug)]
pub struct StreamLimits {
    /// Live batches that may wait for a replay. vLLM makes one a step, so the default is about a minute of a busy
    /// engine. What is beyond is dropped and asked for once more.
    pub held_batches: usize,
    /// Their bytes. Default 16 MiB, used by replays that run, not by those that wait their turn.
    pub held_bytes: usize,
    /// How long a replay may say nothing at first. vLLM looks for requests every 100 ms when idle, and between two
    /// batches.
    pub replay_silence: Duration,
    /// How long it may say nothing after that. A router whose queue is full drops the end marker too.
    pub replay_stall: Duration,
    /// How long live batches wait for a catch-up altogether, from its first request on.
    pub catch_up: Duration,
    /// How many requests in a row may bring nothing before waiting live batches are let through.
    pub barren_requests: u32,
    /// The wait before a request is repeated; doubles with each that brought nothing, and varies by half.
    pub backoff: Duration,
    /// The longest such wait.
    pub backoff_max: Duration,
    /// How long a stream may be silent before it is asked for its last batches; varies up to twice that.
    pub idle: Duration,
}

impl Default for StreamLimits {
    fn default() -> Self {
        Self {
            held_batches: 4096,
            held_bytes: 16 << 20,
            replay_silence: Duration::from_secs(5),
            replay_stall: Duration::from_secs(1),
            catch_up: Duration::from_secs(60),
            barren_requests: 3,
            backoff: Duration::from_millis(100),
            backoff_max: Duration::from_secs(10),
            idle: Duration::from_secs(30),
        }
    }
}
