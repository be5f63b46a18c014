//! Who may serve a request, as the index, HAProxy and the engine see it at this moment.

use super::ask::SequenceKey;
use super::choose::Excluded;
use crate::units::{RankId, Revision};

/// One rank of the pool.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The rank.
    pub rank: RankId,
    /// Why HAProxy would not send a request there, if so: then it is never named.
    pub excluded: Option<Excluded>,
    /// What makes its prompts.
    pub revision: Revision,
    /// Tokens in one of its blocks, above 0.
    pub block_tokens: u32,
    /// Leading blocks of the prompt in its GPU tier.
    pub gpu_blocks: u32,
    /// Blocks in its CPU tier that continue the GPU ones without a hole.
    pub cpu_blocks: u32,
    /// Blocks on disk that continue the CPU ones without a hole.
    pub disk_blocks: u32,
    /// Whether what its KV events tell counts. Otherwise its blocks earn no credit, and its prefills are taken as done by
    /// the clock.
    pub trusted: bool,
    /// Blocks of its cache over all tiers, where events tell nothing of it or too little: then what was sent there of
    /// late stands in for the rest. 0 where events tell all.
    pub history_blocks: u32,
    /// HAProxy's weight of the server, 0 to 256: its share of the load. A server of weight 0 is never named.
    pub weight: u32,
    /// HAProxy's slots of the server.
    pub slots: Slots,
    /// What the engine last said of itself, where it is polled.
    pub reported: Option<EngineLoad>,
}

impl Candidate {
    /// A server of the usual weight, without limits, reports or cached blocks.
    #[must_use]
    pub const fn idle(rank: RankId, block_tokens: u32) -> Self {
        Self {
            rank,
            excluded: None,
            revision: Revision(0),
            block_tokens,
            gpu_blocks: 0,
            cpu_blocks: 0,
            disk_blocks: 0,
            trusted: true,
            history_blocks: 0,
            weight: 100,
            slots: Slots { in_flight: 0, limit: None, queued: 0, booked: 0 },
            reported: None,
        }
    }

    /// Which of a prompt's sequences is this rank's.
    #[must_use]
    pub const fn key(&self) -> SequenceKey {
        SequenceKey { revision: self.revision, block_tokens: self.block_tokens }
    }
}

/// HAProxy's concurrency of one server (`scur`, `slim`, `qcur` of its statistics).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Slots {
    /// Requests on the server now.
    pub in_flight: u32,
    /// `maxconn` of the server; `None` where there is none.
    pub limit: Option<u32>,
    /// Requests that wait in the server's queue.
    pub queued: u32,
    /// Our bookings on the server when these were counted.
    pub booked: u32,
}

impl Slots {
    /// Requests on the server or before it. HAProxy's figures are a poll old, so only what they have beyond our
    /// bookings of that time is taken from them.
    pub(super) const fn occupied(self, booked_requests: u32) -> u32 {
        booked_requests.saturating_add(self.in_flight.saturating_add(self.queued).saturating_sub(self.booked))
    }

    /// How many requests, the next one included, wait for one to leave.
    pub(super) fn waiting(self, booked_requests: u32) -> u32 {
        let Some(limit) = self.limit.filter(|limit| *limit > 0) else { return 0 };
        let occupied = self.occupied(booked_requests);
        if occupied < limit { 0 } else { (occupied - limit).saturating_add(1) }
    }
}

/// What an engine reports of itself (vLLM `num_requests_running`, `num_requests_waiting`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EngineLoad {
    /// Requests in its running batch.
    pub running: u32,
    /// Requests that wait for admission.
    pub waiting: u32,
    /// Our bookings on the rank when these were counted.
    pub booked: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_with_a_free_slot_makes_nobody_wait() {
        let slots = Slots { in_flight: 3, limit: Some(4), queued: 0, booked: 3 };
        assert_eq!(slots.waiting(3), 0);
        assert_eq!(slots.waiting(4), 1, "our own bookings are fresher than the poll");
        assert_eq!(Slots { booked: 1, ..slots }.waiting(2), 1, "two are of others");
        assert_eq!(
            Slots { in_flight: 4, ..slots }.waiting(0),
            0,
            "what has ended since the poll waits no more"
        );
        assert_eq!(Slots { limit: None, ..slots }.waiting(1000), 0);
        assert_eq!(Slots { limit: Some(0), ..slots }.waiting(1000), 0, "HAProxy's 0 is no limit");
    }

    #[test]
    fn a_full_server_makes_the_next_wait_behind_its_queue() {
        let full = Slots { in_flight: 4, limit: Some(4), queued: 2, booked: 0 };
        assert_eq!(full.waiting(0), 3);
        assert_eq!(Slots { queued: 0, booked: 4, ..full }.waiting(9), 6);
    }
}
