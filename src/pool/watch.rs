//! Faults that nothing else would show, told once each.

use super::{FeedFault, Pool};
use crate::units::{RankId, Revision, Tier};
use std::{
    collections::HashSet,
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

/// So many scored prompts without one that matched anything are no accident where replicas publish blocks.
const DECISIONS_WITHOUT_MATCH: u64 = 200;

/// Shorter prompts may have no whole block to match, in tokens.
const LEAST_PROMPT_TOKENS: usize = 64;

/// How often prompts matched.
#[derive(Debug, Default)]
pub struct Matching {
    /// Scored prompts since the last one that matched.
    unmatched: AtomicU64,
    /// Whether any ever matched.
    ever: AtomicU64,
}

impl Matching {
    /// A prompt was scored; the best replica held `matched_tokens` of it.
    pub fn see(&self, prompt_tokens: usize, matched_tokens: u32) {
        if matched_tokens > 0 {
            self.ever.store(1, Ordering::Relaxed);
        } else if prompt_tokens >= LEAST_PROMPT_TOKENS {
            self.unmatched.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn is_suspicious(&self) -> bool {
        self.ever.load(Ordering::Relaxed) == 0
            && self.unmatched.load(Ordering::Relaxed) >= DECISIONS_WITHOUT_MATCH
    }
}

/// What was warned of already.
#[derive(Debug, Default)]
pub struct Watch {
    told: HashSet<(u16, FeedFault)>,
    told_nothing_matches: bool,
    told_revisions: HashSet<Revision>,
}

impl Watch {
    /// Looks at a pool and warns of what was not warned of before. To be called every second or so.
    pub fn look(&mut self, pool: &Pool, now: Instant) {
        let mut found = Vec::new();
        {
            let mut caches = pool.caches.write();
            for (at, feed) in (0..).zip(&mut caches.feeds) {
                feed.tick(now);
                found.extend(feed.fault().map(|fault| (at, fault)));
            }
        }
        let ranks = pool.ranks();
        for (at, fault) in &found {
            let Some(rank) = ranks.get(RankId(*at)) else { continue };
            if self.told.insert((*at, *fault)) {
                tracing::warn!(
                    pool = pool.backend,
                    server = &*rank.server,
                    rank = rank.rank,
                    fault = fault.as_str(),
                    "{}",
                    fault.advice()
                );
            }
        }
        // Mended faults are told again if they come back.
        self.told.retain(|fault| found.contains(fault));
        let nothing_matches = pool.nothing_matches();
        if nothing_matches && !self.told_nothing_matches {
            tracing::warn!(
                pool = pool.backend,
                fault = "nothing_matches",
                "no prompt ever matched a block that the replicas publish: are model_dir and adapters theirs?"
            );
        }
        self.told_nothing_matches = nothing_matches;
        self.look_for_revisions(pool);
    }

    fn look_for_revisions(&mut self, pool: &Pool) {
        let (ranks, renderers) = (pool.ranks(), pool.renderers());
        let is_unknown = |revision: &Revision| renderers.of(*revision).is_none();
        for (_, rank) in ranks.iter().filter(|(_, rank)| is_unknown(&rank.revision)) {
            if self.told_revisions.insert(rank.revision) {
                tracing::warn!(
                    pool = pool.backend,
                    server = &*rank.server,
                    revision = rank.replica.revision,
                    "no [[pool.revision]] has this name: what such replicas hold of a prompt is not known"
                );
            }
        }
        self.told_revisions.retain(is_unknown);
    }
}

impl Pool {
    /// Whether prompts never match although replicas publish blocks: the prompts' tokens are not the engine's, or the
    /// traffic has no common prefixes at all.
    #[must_use]
    pub fn nothing_matches(&self) -> bool {
        self.matching.is_suspicious()
            && self
                .caches
                .read()
                .index
                .stats()
                .blocks
                .get(Tier::Gpu.index())
                .is_some_and(|blocks| *blocks > 0)
    }
}
