//! What agents tell each other.

use crate::{
    select::{Ask, SequenceKey},
    units::RequestId,
};
use std::sync::Arc;

/// News of one pool.
#[derive(Clone, Debug)]
pub struct News {
    /// The pool: the name of HAProxy's backend, which is the same for all agents.
    pub pool: Arc<str>,
    /// What has happened.
    pub what: What,
}

/// What has happened.
#[derive(Clone, Debug)]
pub enum What {
    /// A choice was booked.
    Booked(Told),
    /// Its request is over.
    Ended(RequestId),
    /// These have not ended yet.
    Alive(Vec<RequestId>),
}

/// A booking as it is told of.
#[derive(Clone, Debug)]
pub struct Told {
    /// The HAProxy server's name.
    pub server: Arc<str>,
    /// The data-parallel rank within it.
    pub rank: u16,
    /// Which of the prompt's sequences is the rank's. Only the block size is told, for revisions are counted by each agent.
    pub key: SequenceKey,
    /// What was asked.
    pub ask: Ask,
}
