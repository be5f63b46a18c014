//! What an operator has told while the agent runs: the pool's mode, and replicas that are not to be named.

use super::{Pool, Ranks};
use crate::{
    config::{Handling, Mode},
    events::Doubt,
    select::Excluded,
    units::RankId,
};
use parking_lot::Mutex;
use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicU16, AtomicU64, Ordering},
    },
    time::Instant,
};

/// The mode of a pool: the file's, or the one that an operator has set since. Read without a lock.
#[derive(Debug)]
pub struct LiveMode {
    live: AtomicU16,
    /// The file's.
    configured: Mutex<Mode>,
}

impl LiveMode {
    pub(super) fn new(configured: Mode) -> Self {
        Self { live: AtomicU16::new(configured.to_bits()), configured: Mutex::new(configured) }
    }

    /// The mode that holds.
    #[must_use]
    pub fn get(&self) -> Mode {
        Mode::from_bits(self.live.load(Ordering::Relaxed))
    }

    /// The file's mode.
    #[must_use]
    pub fn configured(&self) -> Mode {
        *self.configured.lock()
    }

    /// An operator sets another mode. It holds until the file says something new, or the agent starts anew.
    pub fn set(&self, mode: Mode) {
        self.live.store(mode.to_bits(), Ordering::Relaxed);
    }

    /// The file was read again. Only a mode that is new there counts: an operator's stays through other changes.
    pub fn configure(&self, mode: Mode) {
        let mut configured = self.configured.lock();
        if std::mem::replace(&mut *configured, mode) != mode {
            self.set(mode);
        }
    }
}

/// What was decided so far, by what was done about it.
#[derive(Debug, Default)]
pub struct Tally([Decided; Handling::ALL.len()]);

#[derive(Debug, Default)]
struct Decided {
    requests: AtomicU64,
    prompt_tokens: AtomicU64,
    matched_tokens: AtomicU64,
}

/// A sum of decisions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize)]
pub struct Decisions {
    /// Requests.
    pub requests: u64,
    /// Tokens of those prompts that were known.
    pub prompt_tokens: u64,
    /// Tokens of these that the rank chosen held. In the shadow nothing was sent there.
    pub matched_tokens: u64,
}

impl Tally {
    /// Adds one decision, with the tokens of its prompt and those of them that the rank chosen held; 0 if not known.
    pub fn add(&self, handling: Handling, prompt_tokens: u64, matched_tokens: u64) {
        let Some(decided) = self.0.get(handling.index()) else { return };
        decided.requests.fetch_add(1, Ordering::Relaxed);
        decided.prompt_tokens.fetch_add(prompt_tokens, Ordering::Relaxed);
        decided.matched_tokens.fetch_add(matched_tokens, Ordering::Relaxed);
    }

    /// The sums, in the order of [`Handling::ALL`].
    #[must_use]
    pub fn get(&self) -> [Decisions; Handling::ALL.len()] {
        self.0.each_ref().map(|decided| Decisions {
            requests: decided.requests.load(Ordering::Relaxed),
            prompt_tokens: decided.prompt_tokens.load(Ordering::Relaxed),
            matched_tokens: decided.matched_tokens.load(Ordering::Relaxed),
        })
    }
}

/// Why an operator's wish was not done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NotDone {
    /// There is no such replica.
    #[error("the pool has no such replica")]
    NoReplica,
    /// Nobody could tell again what is known.
    #[error("no rank of the replica has a replay endpoint: what is known would be lost, not told again")]
    NoReplay,
}

/// The servers that are not to be named, by their names: a replica that moves stays ignored.
pub(super) type Ignored = Mutex<BTreeSet<Arc<str>>>;

impl Pool {
    /// Whether this server is never named, as an operator has told.
    #[must_use]
    pub fn is_ignored(&self, server: &str) -> bool {
        self.ignored.lock().contains(server)
    }

    /// An operator wants a replica never to be named, or to be named again. HAProxy goes on to use it where it
    /// balances.
    ///
    /// # Errors
    /// [`NotDone::NoReplica`]; one that has left can be named again all the same.
    pub fn ignore(&self, server: &str, ignore: bool, now: Instant) -> Result<(), NotDone> {
        {
            let mut ignored = self.ignored.lock();
            let ranks = self.ranks();
            let known = ranks.servers().find(|known| *known.name == *server);
            let changed = match known {
                Some(known) if ignore => ignored.insert(Arc::clone(&known.name)),
                Some(_) => ignored.remove(server),
                None if !ignore && ignored.remove(server) => true,
                None => return Err(NotDone::NoReplica),
            };
            if changed {
                let of_server = |rank: &RankId| ranks.get(*rank);
                for rank in known.iter().flat_map(|known| &known.ids).filter_map(of_server) {
                    rank.ignored.store(ignore, Ordering::Relaxed);
                }
            }
        }
        self.sync_open(now);
        Ok(())
    }

    /// An operator wants all that is known of a replica's cache told again. Its bookings stay.
    ///
    /// # Errors
    /// [`NotDone`].
    pub fn resync(&self, server: &str) -> Result<(), NotDone> {
        let ranks = self.ranks();
        let ids = ranks.of_server(server);
        if ids.is_empty() {
            return Err(NotDone::NoReplica);
        }
        let can_replay = |id: &&RankId| ranks.get(**id).is_some_and(|rank| rank.feed.replay.is_some());
        let asked = ids.iter().filter(can_replay).map(|id| self.add_doubt(*id, Doubt::Resync));
        if asked.count() == 0 { Err(NotDone::NoReplay) } else { Ok(()) }
    }

    /// Why a rank cannot be named by what an operator has told.
    pub(super) fn told_not_to(ranks: &Ranks, rank: RankId) -> Option<Excluded> {
        let is_ignored = ranks.get(rank).is_some_and(|rank| rank.ignored.load(Ordering::Relaxed));
        is_ignored.then_some(Excluded::Ignored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::testing::pool;

    #[test]
    fn an_operators_mode_holds_until_the_file_says_something_new() {
        let share = Mode::share(0.5).expect("a share");
        let mode = LiveMode::new(Mode::SHADOW);
        mode.set(share);
        mode.configure(Mode::SHADOW);
        assert_eq!((mode.get(), mode.configured()), (share, Mode::SHADOW));
        mode.configure(Mode::OFF);
        assert_eq!((mode.get(), mode.configured()), (Mode::OFF, Mode::OFF));
    }

    #[test]
    fn an_ignored_replica_is_no_candidate_until_it_is_used_again_also_when_it_moves() {
        let (pool, now) = (pool(1, 2), Instant::now());
        let excluded = |pool: &Pool| {
            let found = pool.lookup(&[], 10, now);
            let excluded = found.candidates.iter().map(|candidate| candidate.excluded);
            excluded.collect::<Vec<_>>()
        };
        pool.ignore("s2", true, now).expect("it is there");
        assert_eq!(excluded(&pool), [None, Some(Excluded::Ignored)]);
        assert!(pool.is_ignored("s2") && !pool.is_ignored("s1"));
        let replica = pool.ranks().get(RankId(1)).map(|rank| (*rank.replica).clone()).expect("a rank");
        for rank in pool.leave("s2") {
            pool.release(rank);
        }
        pool.join(&replica, now).expect("room");
        assert_eq!(excluded(&pool), [None, Some(Excluded::Ignored)]);
        pool.ignore("s2", false, now).expect("it is there");
        assert_eq!(excluded(&pool), [None, None]);
        assert_eq!(pool.ignore("s3", true, now), Err(NotDone::NoReplica));
        pool.ignore("s2", true, now).expect("it is there");
        pool.leave("s2");
        pool.ignore("s2", false, now).expect("it was ignored");
        assert_eq!(pool.ignore("s2", false, now), Err(NotDone::NoReplica));
    }

    #[test]
    fn only_what_can_be_told_again_is_forgotten() {
        let pool = pool(1, 1);
        assert_eq!(pool.resync("s1"), Err(NotDone::NoReplay));
        assert_eq!(pool.resync("s2"), Err(NotDone::NoReplica));
        let rank = crate::config::Rank {
            replay: Some(crate::events::Endpoint::parse("tcp://127.0.0.1:9").expect("an endpoint")),
            ..crate::config::Rank::default()
        };
        let replica = crate::config::Replica {
            server: "s2".to_owned(),
            ranks: vec![rank],
            ..crate::config::Replica::default()
        };
        let ids = pool.join(&replica, Instant::now()).expect("room");
        pool.resync("s2").expect("a replay endpoint");
        assert_eq!(pool.take_doubts(), [(ids[0], Doubt::Resync)]);
    }
}
