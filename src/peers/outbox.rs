//! What waits to be told to the peers: bounded, and what is oldest goes first.

use super::{
    news::{News, Told, What},
    wire::MAX_IDS,
};
use crate::units::RequestId;
use std::sync::Arc;
use tokio::sync::broadcast::{self, Receiver, Sender};

/// News that may wait for the slowest peer. More than are made while a connection is opened.
const CAPACITY: usize = 1024;

/// Where one pool leaves its news. Never waits; without a peer that listens, nothing is kept.
#[derive(Clone, Debug)]
pub struct Outbox {
    pool: Arc<str>,
    sender: Sender<Arc<News>>,
}

impl Outbox {
    /// An outbox without a peer.
    #[must_use]
    pub fn new() -> Self {
        Self { pool: "".into(), sender: broadcast::channel(CAPACITY).0 }
    }

    /// The same, for the news of one pool.
    #[must_use]
    pub fn of_pool(&self, pool: &str) -> Self {
        Self { pool: pool.into(), sender: self.sender.clone() }
    }

    /// A choice was booked.
    pub fn booked(&self, told: Told) {
        self.put(What::Booked(told));
    }

    /// A request of ours is over.
    pub fn ended(&self, id: RequestId) {
        self.put(What::Ended(id));
    }

    /// These are what we have. Said also of none: it is a sign of life.
    pub fn alive(&self, ids: &[RequestId]) {
        let (first, rest) = ids.split_at(ids.len().min(MAX_IDS));
        self.put(What::Alive(first.to_vec()));
        rest.chunks(MAX_IDS).for_each(|ids| self.put(What::Alive(ids.to_vec())));
    }

    fn put(&self, what: What) {
        // An error means that no peer listens.
        let _ = self.sender.send(Arc::new(News { pool: Arc::clone(&self.pool), what }));
    }

    /// What is told from now on.
    #[must_use]
    pub fn listen(&self) -> Receiver<Arc<News>> {
        self.sender.subscribe()
    }

    /// Whether anybody would be told.
    #[must_use]
    pub fn has_listeners(&self) -> bool {
        self.sender.receiver_count() > 0
    }
}

impl Default for Outbox {
    fn default() -> Self {
        Self::new()
    }
}
