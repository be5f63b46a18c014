//! The choice: the terms of every candidate, and the one tie rule.

use super::load::Load;
use super::overlap::Overlap;
use crate::units::RankId;
use std::time::Duration;

/// Why a candidate could not be chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Excluded {
    /// Its server's check fails.
    Down,
    /// Its server is in maintenance.
    Maintenance,
    /// Its server is drained, or of weight 0.
    Drained,
    /// Its server is a backup that another one comes before.
    Backup,
    /// An operator has told so.
    Ignored,
    /// The rank is not, or no longer, one of the pool's.
    Unknown,
}

impl Excluded {
    /// The reason as `/explain` spells it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Down => "down",
            Self::Maintenance => "maintenance",
            Self::Drained => "drained",
            Self::Backup => "backup",
            Self::Ignored => "ignored",
            Self::Unknown => "unknown",
        }
    }
}

/// What decided between the candidates.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Reason {
    /// No candidate could be chosen.
    NoCandidate,
    /// One candidate was cheaper than all others by more than the band.
    LowestCost,
    /// A tie: the session's last rank.
    Session,
    /// A tie: the least work of late.
    LeastRecent,
    /// A tie: chance.
    Random,
}

impl Reason {
    /// All reasons, for tables of counters.
    pub const ALL: [Self; 5] =
        [Self::NoCandidate, Self::LowestCost, Self::Session, Self::LeastRecent, Self::Random];

    /// The reason as logs and metric labels spell it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NoCandidate => "no_candidate",
            Self::LowestCost => "lowest_cost",
            Self::Session => "session",
            Self::LeastRecent => "least_recent",
            Self::Random => "random",
        }
    }
}

/// Everything that counted for or against one candidate.
#[derive(Clone, Debug)]
pub struct Terms {
    /// The candidate.
    pub rank: RankId,
    /// Why it could not be chosen; it has no price then.
    pub excluded: Option<Excluded>,
    /// Tokens in one of its blocks.
    pub block_tokens: u32,
    /// Prefix overlap that its cache holds.
    pub confirmed: Overlap,
    /// Leading tokens beyond the confirmed GPU overlap that only bookings promise.
    pub booked_tokens: u32,
    /// Leading tokens beyond the confirmed and the booked ones that were sent there of late. Nobody has confirmed them.
    pub history_tokens: u32,
    /// Leading blocks of the prompt that are in bookings there.
    pub shared_blocks: u32,
    /// U: prompt tokens to be computed; tiers count by their credit, at least 1.
    pub uncached_tokens: u32,
    /// The load that is booked.
    pub load: Load,
    /// Q: prompt tokens to be prefilled before this request, other clients' included, by weight.
    pub queue_tokens: f64,
    /// The wait for a slot of a full server, in tokens that could be prefilled meanwhile.
    pub slot_tokens: f64,
    /// Requests of the last second that are booked there and have most of what it holds of the prompt in common with it, by
    /// weight.
    pub sharers: f64,
    /// D: requests that decode, by weight.
    pub decoding: f64,
    /// C: tokens of the contexts of all requests, by weight.
    pub context_tokens: f64,
    /// How long blocks stay in its GPU tier of late; `None` while it has not evicted.
    pub eviction_age: Option<Duration>,
    /// Tokens prefilled or booked of late, fading, by weight.
    pub recent_tokens: f64,
    /// What its excess of recent work is charged with.
    pub spread_tokens: f64,
    /// What its cache's credit is cut by, as it is crowded beside an idle one.
    pub crowd_tokens: f64,
    /// What one uncached token costs.
    pub own_weight: f64,
    /// The cost, in the policy's unit; the lowest wins.
    pub cost: f64,
    /// Whether it was as good as the cheapest.
    pub tied: bool,
    /// How much scarcer its share of the load is than that of the server of the greatest weight, at least 1.
    pub(super) scarcity: f64,
}

/// The outcome for one request.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The rank; `None` where no candidate could be chosen.
    pub rank: Option<RankId>,
    /// What decided.
    pub reason: Reason,
    /// Whether the choice was booked.
    pub booked: bool,
    /// The terms, in the candidates' order.
    pub terms: Vec<Terms>,
}

impl Choice {
    /// The chosen candidate's terms.
    #[must_use]
    pub fn chosen(&self) -> Option<&Terms> {
        self.terms.iter().find(|terms| Some(terms.rank) == self.rank)
    }
}

/// How candidates of about equal cost are told apart.
#[derive(Clone, Copy, Debug)]
pub(super) enum Ties {
    /// Costs less than so many blocks apart are equal; then the session, the least work of late, chance.
    Band {
        /// In blocks of the smaller of two candidates.
        blocks: f64,
    },
    /// Only equal costs are equal; then chance.
    Exact,
}

/// Picks one of the priced candidates by its place, and marks the ties.
pub(super) fn pick(
    terms: &mut [Terms],
    ties: Ties,
    session: Option<RankId>,
    rng: &mut fastrand::Rng,
) -> Option<(usize, Reason)> {
    let open = |terms: &Terms| terms.excluded.is_none();
    let best = terms.iter().filter(|t| open(t)).min_by(|a, b| a.cost.total_cmp(&b.cost))?.clone();
    for candidate in terms.iter_mut().filter(|t| open(t)) {
        candidate.tied = ties.equal(candidate, &best);
    }
    let tied: Vec<usize> = (0..terms.len()).filter(|at| terms[*at].tied).collect();
    if let [only] = tied[..] {
        return Some((only, Reason::LowestCost));
    }
    if let Ties::Band { .. } = ties {
        if let Some(at) = tied.iter().find(|at| Some(terms[**at].rank) == session) {
            return Some((*at, Reason::Session));
        }
        let recent = |at: &usize| terms[*at].recent_tokens;
        let least = tied.iter().map(recent).fold(f64::INFINITY, f64::min);
        let idlest: Vec<usize> = tied.iter().filter(|at| recent(at) <= least).copied().collect();
        if let [only] = idlest[..] {
            return Some((only, Reason::LeastRecent));
        }
        return Some((*idlest.get(rng.usize(..idlest.len().max(1)))?, Reason::Random));
    }
    Some((*tied.get(rng.usize(..tied.len().max(1)))?, Reason::Random))
}

impl Ties {
    fn equal(self, candidate: &Terms, best: &Terms) -> bool {
        match self {
            Self::Exact => candidate.cost <= best.cost,
            Self::Band { blocks } => {
                let block = f64::from(candidate.block_tokens.min(best.block_tokens));
                candidate.cost <= best.cost
                    || candidate.cost < best.cost + blocks * block && !outdone(candidate, best, block)
            }
        }
    }
}

/// Whether the best holds a block or more that the candidate lacks, while the candidate is no less loaded: then
/// nothing speaks for leaving the cache.
fn outdone(candidate: &Terms, best: &Terms, block: f64) -> bool {
    let held = |terms: &Terms| f64::from(terms.confirmed.tokens() + terms.history_tokens);
    let load = |terms: &Terms| terms.queue_tokens + terms.slot_tokens + terms.context_tokens;
    held(best) >= held(candidate) + block
        && load(candidate) >= load(best)
        && candidate.decoding >= best.decoding
}
