//! What polls find that speaks against a rank's KV events, or settles a doubt. The thread of the events fetches what is
//! to be asked of the engines.

use super::{Pool, Rank, live::engine_ranks, loads::Loads, silence::Silence};
use crate::{
    events::{Doubt, FeedState},
    replica::{EngineReport, Server, ServerState},
    units::RankId,
};
use parking_lot::Mutex;
use std::mem;

/// Polls in a row that an engine, which had answered before, must leave without an answer. A single one may fall into a
/// long step.
const POLLS_WITHOUT_ANSWER: u32 = 3;

/// What was found.
#[derive(Debug, Default)]
pub(super) struct Doubts {
    found: Mutex<Vec<(RankId, Doubt)>>,
}

/// What it is found by, of one rank.
#[derive(Debug, Default)]
pub(super) struct Watched {
    silence: Silence,
    loads: Loads,
    /// Polls in a row without an answer; `None` before the first answer, for an address may be wrong from the start.
    unanswered: Option<u32>,
    is_down: bool,
}

impl Doubts {
    fn add(&self, rank: RankId, doubt: Doubt) {
        let mut found = self.found.lock();
        if !found.contains(&(rank, doubt)) {
            found.push((rank, doubt));
        }
    }
}

impl Pool {
    /// What was found since the last call.
    pub(super) fn take_doubts(&self) -> Vec<(RankId, Doubt)> {
        mem::take(&mut self.doubts.found.lock())
    }

    /// Has a rank's stream doubted.
    pub(super) fn add_doubt(&self, rank: RankId, doubt: Doubt) {
        self.doubts.add(rank, doubt);
    }

    /// How far each rank's stream has come, for the `asked` of [`Self::doubt_engines`].
    #[must_use]
    pub fn heard(&self) -> Vec<u64> {
        self.caches.read().feeds.iter().map(|feed| feed.heard).collect()
    }

    /// Compares what the engines of one replica answered, or that they did not, with their streams. `asked` is
    /// [`Self::heard`] of when they were asked.
    pub fn doubt_engines(&self, server: &str, reports: &[EngineReport], asked: &[u64]) {
        let ranks = self.ranks();
        let told = engine_ranks(&ranks, server, reports);
        for id in ranks.of_server(server) {
            let Some(rank) = ranks.get(*id) else { continue };
            let doubt = match told.iter().find(|(told, _)| told == id) {
                Some((_, report)) => self.hear_engine(*id, rank, report, asked),
                None if reports.is_empty() => miss_engine(rank),
                None => None,
            };
            if let Some(doubt) = doubt {
                self.doubts.add(*id, doubt);
            }
        }
    }

    fn hear_engine(&self, id: RankId, rank: &Rank, report: &EngineReport, asked: &[u64]) -> Option<Doubt> {
        rank.watched.lock().unanswered = Some(0);
        let asked = *asked.get(id.index())?;
        let (answered, cleared_at, state, block_tokens) = {
            let caches = self.caches.read();
            let feed = caches.feeds.get(id.index()).filter(|feed| feed.configured)?;
            // Of a hybrid model's sizes, the larger one needs more tokens for a block.
            (feed.heard, feed.cleared_at, feed.state, feed.block_tokens.max(report.block_tokens))
        };
        let mut watched = rank.watched.lock();
        if report.loaded_tokens().is_some_and(|tokens| watched.loads.see(asked, cleared_at, tokens)) {
            self.caches.write().index.see_loads(id);
        }
        if !matches!(state, FeedState::Exact | FeedState::Degraded(_)) {
            watched.silence = Silence::default();
            return None;
        }
        if !watched.silence.see([asked, answered], report, block_tokens?) {
            return None;
        }
        drop(watched);
        self.caches.write().feeds.get_mut(id.index())?.see_silence();
        Some(Doubt::Silent)
    }

    /// Takes in what HAProxy says of all servers' health.
    pub fn doubt_servers(&self, servers: &[Server]) {
        for server in servers {
            self.doubt_server(&server.name, server.state == ServerState::Down);
        }
    }

    /// Takes in what HAProxy says of one server's health: when it goes down, its process may be gone.
    pub fn doubt_server(&self, server: &str, is_down: bool) {
        let ranks = self.ranks();
        for id in ranks.of_server(server) {
            let Some(rank) = ranks.get(*id) else { continue };
            let was_down = mem::replace(&mut rank.watched.lock().is_down, is_down);
            if is_down && !was_down {
                self.doubts.add(*id, Doubt::HealthLost);
            }
        }
    }

    /// These ranks have left; their ids will be others'.
    pub(super) fn forget_doubts(&self, ranks: &[RankId]) {
        self.doubts.found.lock().retain(|(rank, _)| !ranks.contains(rank));
    }
}

fn miss_engine(rank: &Rank) -> Option<Doubt> {
    let mut watched = rank.watched.lock();
    let unanswered = watched.unanswered.as_mut()?;
    *unanswered = unanswered.saturating_add(1);
    (*unanswered == POLLS_WITHOUT_ANSWER).then_some(Doubt::HealthLost)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::testing::{pool, server};

    const DOWN: [(RankId, Doubt); 2] = [(RankId(2), Doubt::HealthLost), (RankId(3), Doubt::HealthLost)];

    #[test]
    fn a_server_that_goes_down_is_doubted_once_with_all_its_ranks() {
        let pool = pool(2, 2);
        let down = Server { state: ServerState::Down, ..server("s2") };
        pool.doubt_servers(&[server("s1"), down.clone()]);
        pool.doubt_server("s2", true);
        assert_eq!(pool.take_doubts(), DOWN);
        pool.doubt_servers(std::slice::from_ref(&down));
        assert_eq!(pool.take_doubts(), []);
        pool.doubt_servers(&[server("s1"), server("s2")]);
        assert_eq!(pool.take_doubts(), [], "what it says then proves it");
        pool.doubt_servers(&[down]);
        assert_eq!(pool.take_doubts(), DOWN);
        // Whoever drains a server does not say that its process ends.
        for state in [ServerState::Maint, ServerState::Drain] {
            pool.doubt_servers(&[Server { state, ..server("s1") }]);
        }
        assert_eq!(pool.take_doubts(), []);
    }

    #[test]
    fn an_engine_that_answered_is_doubted_when_several_polls_in_a_row_fail() {
        let pool = pool(2, 2);
        let report = |engine| EngineReport { engine, ..EngineReport::default() };
        let poll = |reports: &[EngineReport]| {
            pool.doubt_engines("s2", reports, &[0; 4]);
            pool.take_doubts()
        };
        for _ in 0..2 * POLLS_WITHOUT_ANSWER {
            assert_eq!(poll(&[]), [], "it never answered: its address may be wrong");
        }
        for _ in 0..2 {
            assert_eq!(poll(&[report(0), report(1)]), []);
            for _ in 1..POLLS_WITHOUT_ANSWER {
                assert_eq!(poll(&[]), []);
            }
        }
        assert_eq!(poll(&[]), DOWN);
        assert_eq!(poll(&[]), [], "once");
    }
}
