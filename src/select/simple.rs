//! Policies that do without the index: they stand beside the others for comparison, and for users who want them.

use super::choose::Terms;
use crate::units::RankId;

/// Each in turn, by weight: `turns` tells how far a rank's turns have come.
pub(super) fn round_robin(terms: &mut [Terms], turns: impl Fn(RankId) -> f64) {
    for terms in terms.iter_mut() {
        terms.cost = turns(terms.rank);
    }
}

/// Rendezvous hashing by weight: a key keeps its rank when other ranks come and go. With a bound, a rank that has more
/// than so many times the mean number of requests is passed over.
pub(super) fn rendezvous(terms: &mut [Terms], key: u64, bound: Option<f64>) {
    let open = || terms.iter().filter(|t| t.excluded.is_none());
    let mean = open().map(|t| f64::from(t.load.requests)).sum::<f64>() / open().count().max(1) as f64;
    for terms in terms.iter_mut() {
        let drawn =
            fastrand::Rng::with_seed(key ^ u64::from(terms.rank.0).wrapping_mul(0x9e37_79b9_7f4a_7c15)).f64();
        // The least of exponential draws of rate w falls to each rank with probability w / sum of w.
        terms.cost = -(1.0 - drawn).ln() * terms.scarcity;
        if bound.is_some_and(|bound| f64::from(terms.load.requests) >= (bound * (mean + 1.0)).ceil()) {
            terms.cost += PASSED_OVER;
        }
    }
}

/// Above any draw: -ln of the least f64 step is 37, and weights differ by 256 at most.
const PASSED_OVER: f64 = 1e6;
