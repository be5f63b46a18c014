//! The cost of a candidate, in prompt tokens: the queue before the request, and its own uncached tokens, which also
//! delay all that come after it.

use super::choose::Terms;
use crate::units::RankId;
use std::time::Duration;

/// Weights of the cost. The defaults were found by simulation on public traces, where factors of two hardly matter.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct CostConfig {
    /// Weight of the request's own uncached tokens on an idle pool, against queued tokens. Above 0. 1.5 costs 3 % of mean
    /// TTFT at high load and gains nothing at low load (`kvspoa replay`, first halves of the traces).
    pub own_weight: f64,
    /// How much that weight grows with each second of mean queue over the candidates. An uncached token delays all that
    /// queue behind it, while a queued token is already spent.
    pub queue_gain: f64,
    /// The weight's upper bound. Overload needs 8; higher changes nothing.
    pub own_weight_max: f64,
    /// Added to the weight by each decoding neighbour, which every prefill step slows down. Higher favours time per
    /// output token, 0 favours time to first token alone.
    pub decode_weight: f64,
    /// Own uncached tokens that count so, at most. The longest prompts, which make the 99th percentile of the time to first
    /// token, then wait less for a rank with few decodes: 5 % less at high load (`kvspoa replay`, first halves of the
    /// traces).
    pub decode_tokens_max: f64,
    /// Weight of a token of context held for a booked request: it stands for memory and for decode time.
    pub context_weight: f64,
    /// Added to the weight where blocks are evicted soon; fades with the eviction age. It keeps chats with a common head
    /// from filling one small cache beside empty ones.
    pub eviction_weight: f64,
    /// The eviction age at which that addition has faded to 37 %.
    pub eviction_age: Duration,
    /// Weight of the work of late: see `price`. 0 lets paced traffic pile up on one rank.
    pub spread_weight: f64,
    /// Work of late that says little: much less than this settles ties, but does not outweigh a session.
    pub spread_tokens_least: f64,
    /// The most that it may count, in uncached tokens (0.04 s of prefill): a longer confirmed overlap is never left for
    /// the sake of balance alone.
    pub spread_tokens_max: f64,
    /// So many more requests of the last second with a prefix in common than the rank with the fewest may a rank have; with one
    /// more its cache earns no credit for that prefix. Many equal requests at once go to several ranks so, though each of
    /// these must compute the prompt: they would slow each other down by as much, and more of them are likely to come. What
    /// comes one by one is no crowd: load tells of it. Where no rank is idle, the crowd stays.
    pub crowd_requests: f64,
    /// Costs less than this many blocks apart are ties, 0 to 2.
    pub band_blocks: f64,
}

impl Default for CostConfig {
    fn default() -> Self {
        Self {
            own_weight: 1.0,
            queue_gain: 1.0,
            own_weight_max: 8.0,
            decode_weight: 0.03,
            decode_tokens_max: 30_000.0,
            context_weight: 0.02,
            eviction_weight: 1.0,
            eviction_age: Duration::from_secs(300),
            spread_weight: 3.0,
            spread_tokens_least: 256.0,
            spread_tokens_max: 512.0,
            crowd_requests: 4.0,
            band_blocks: 1.0,
        }
    }
}

impl CostConfig {
    /// Prices the candidates that can be chosen. `session` is the session's last rank.
    ///
    /// What a rank was given of late beyond the idlest one counts by its square over their sum. Where requests fall by
    /// chance that stays about the size of one prompt, so it weighs nothing; where all falls on one rank it grows with
    /// every request. It settles where traffic comes one by one and no load is ever seen.
    pub(super) fn price(&self, terms: &mut [Terms], prefill_tokens_per_second: f64, session: Option<RankId>) {
        let open = || terms.iter().filter(|t| t.excluded.is_none());
        let mean_queue = open().map(|t| t.queue_tokens).sum::<f64>() / open().count().max(1) as f64;
        // What is still queued is priced as queue.
        let queued = |t: &Terms| t.load.prefill_tokens as f64 * t.scarcity;
        let done_of_late = |t: &Terms| (t.recent_tokens - queued(t)).max(0.0);
        let least_done = open().map(done_of_late).fold(f64::INFINITY, f64::min);
        let fewest = open().map(|t| t.sharers).fold(f64::INFINITY, f64::min);
        let uncrowded = self.crowd_requests + fewest;
        // What waits there for the same prefix is the crowd itself.
        let foreign = |t: &Terms| (t.queue_tokens - f64::from(t.booked_tokens) * t.scarcity).max(0.0);
        let idlest = open().map(foreign).fold(f64::INFINITY, f64::min);
        let idleness = (1.0 - idlest / (prefill_tokens_per_second * BUSY_SECONDS)).max(0.0);
        // Where no cache is known to hold any of the prompt, the session is the best sign of one that does.
        let keeps = session.filter(|_| open().all(|t| held_tokens(t) == 0.0));
        let growth = self.queue_gain * mean_queue / prefill_tokens_per_second;
        let base = (self.own_weight + growth).min(self.own_weight_max);
        for candidate in terms.iter_mut() {
            let eviction = candidate.eviction_age.map_or(0.0, |age| {
                let constant = self.eviction_age.as_secs_f64().max(f64::MIN_POSITIVE);
                self.eviction_weight * (-age.as_secs_f64() / constant).exp()
            });
            let done = done_of_late(candidate);
            // The work that brought this prompt's own prefix is no reason to leave the prefix.
            let own = held_tokens(candidate);
            let excess = (done - least_done - own).max(0.0);
            let sum = done + least_done + self.spread_tokens_least;
            let spread = self.spread_weight * excess * excess / sum;
            if Some(candidate.rank) != keeps {
                candidate.spread_tokens = base * spread.min(self.spread_tokens_max);
            }
            candidate.crowd_tokens = base * own * idleness * (candidate.sharers - uncrowded).clamp(0.0, 1.0);
            let slowing = (self.decode_tokens_max / f64::from(candidate.uncached_tokens)).min(1.0);
            candidate.own_weight = base + self.decode_weight * candidate.decoding * slowing + eviction;
            candidate.cost = candidate.queue_tokens
                + candidate.slot_tokens
                + candidate.spread_tokens
                + candidate.crowd_tokens
                + candidate.own_weight * f64::from(candidate.uncached_tokens)
                + self.context_weight * candidate.context_tokens;
        }
    }
}

/// A rank that has so long to prefill for others is not idle: there a crowd's prompt would make them wait.
const BUSY_SECONDS: f64 = 0.5;

/// Leading tokens of the prompt that are there, or will be.
fn held_tokens(terms: &Terms) -> f64 {
    f64::from(terms.confirmed.tokens() + terms.booked_tokens + terms.history_tokens)
}

#[cfg(test)]
mod tests {
    use crate::select::testing::{Pool, prompt};
    use crate::select::{CostConfig, Policy, Terms};
    use crate::units::RankId;
    use std::time::Duration;

    /// The terms of an unrelated prompt of 1,000 tokens, after one of 6,000 was booked on rank 0.
    fn terms(policy: CostConfig, prefilled: bool, evicts: bool) -> Vec<Terms> {
        let mut pool = Pool::new(2, Policy::Cost(policy));
        let first = pool.ask(&prompt(&[(1, 6000)]), None);
        pool.scheduler.book(&first, &pool.candidates[..1], pool.now);
        if prefilled {
            pool.prefill(RankId(0), &first.prompt);
        }
        if evicts {
            pool.now += Duration::from_secs(60);
            pool.scheduler.evicted(RankId(0), 100, 600, pool.now);
        }
        let second = pool.ask(&prompt(&[(2, 1000)]), None);
        pool.book(&second).terms
    }

    fn assert_near(value: f64, expected: f64) {
        assert!((value - expected).abs() < 0.5, "{value} is not {expected}");
    }

    #[test]
    fn queued_tokens_count_once_and_own_tokens_by_a_weight_that_grows_with_the_queues() {
        let terms = terms(CostConfig::default(), false, false);
        // 1 + mean queue of 3,000 tokens at 12,000 a second.
        assert_near(terms[0].own_weight * 1000.0, 1250.0);
        assert_near(terms[0].cost, 6000.0 + 1250.0 + 0.02 * 6000.0);
        assert_near(terms[1].cost, 1250.0);
    }

    #[test]
    fn a_decoding_neighbour_makes_own_tokens_dearer_and_work_of_late_counts_up_to_its_bound() {
        let terms = terms(CostConfig::default(), true, false);
        assert_near(terms[0].spread_tokens, 512.0);
        assert_near(terms[0].cost, 1.03 * 1000.0 + 0.02 * 6000.0 + 512.0);
        assert_near(terms[1].cost, 1000.0);
    }

    #[test]
    fn a_crowd_beside_an_idle_rank_cuts_the_credit_of_its_cache() {
        for (requests, tokens, cut) in
            [(4, 1000, 0.0), (5, 1000, 992.0), (20, 1000, 992.0), (20, 5000, 4992.0)]
        {
            let mut pool = Pool::new(2, Policy::default());
            let shared = prompt(&[(1, tokens)]);
            for _ in 0..requests {
                let ask = pool.ask(&shared, None);
                pool.scheduler.book(&ask, &pool.candidates[..1], pool.now);
            }
            pool.prefill(RankId(0), &shared);
            let next = pool.ask(&shared, None);
            let alone = pool.scheduler.choose(&next, &pool.seen(&shared), pool.now).terms;
            assert_near(alone[0].crowd_tokens, cut);
            assert_eq!(alone[1].crowd_tokens, 0.0);
        }
    }

    #[test]
    fn what_comes_one_by_one_is_no_crowd() {
        for (pause, is_crowd) in [(100, true), (300, false)] {
            let mut pool = Pool::new(2, Policy::default());
            let shared = prompt(&[(1, 1000)]);
            for _ in 0..20 {
                let ask = pool.ask(&shared, None);
                pool.scheduler.book(&ask, &pool.candidates[..1], pool.now);
                pool.now += Duration::from_millis(pause);
            }
            let next = pool.ask(&shared, None);
            let terms = pool.scheduler.choose(&next, &pool.candidates, pool.now).terms;
            assert_eq!(terms[0].crowd_tokens > 0.0, is_crowd, "{pause} ms apart");
        }
    }

    #[test]
    fn requests_that_are_over_are_no_crowd() {
        let mut pool = Pool::new(2, Policy::default());
        let shared = prompt(&[(1, 1000)]);
        for _ in 0..20 {
            let ask = pool.ask(&shared, None);
            pool.scheduler.book(&ask, &pool.candidates[..1], pool.now);
            pool.scheduler.end(ask.id, None, pool.now);
        }
        let next = pool.ask(&shared, None);
        assert_eq!(pool.scheduler.choose(&next, &pool.candidates, pool.now).terms[0].sharers, 0.0);
    }

    #[test]
    fn a_crowd_stays_where_no_rank_is_idle() {
        for (queued, cut) in [(0, 992.0), (3_000, 496.0), (6_000, 0.0)] {
            let mut pool = Pool::new(2, Policy::default());
            let shared = prompt(&[(1, 1000)]);
            for _ in 0..20 {
                let ask = pool.ask(&shared, None);
                pool.scheduler.book(&ask, &pool.candidates[..1], pool.now);
            }
            pool.prefill(RankId(0), &shared);
            for rank in [0, 1] {
                let ask = pool.ask(&prompt(&[(2 + rank, queued)]), None);
                let rank = rank as usize;
                pool.scheduler.book(&ask, &pool.candidates[rank..=rank], pool.now);
            }
            let next = pool.ask(&shared, None);
            let terms = pool.scheduler.choose(&next, &pool.seen(&shared), pool.now).terms;
            let base = terms[0].own_weight - 0.03 * terms[0].decoding;
            let cut_off = terms[0].crowd_tokens / base - cut;
            assert!(cut_off.abs() < 10.0, "{queued}: {cut_off}");
        }
    }

    #[test]
    fn where_another_rank_has_its_part_there_is_no_crowd() {
        let mut pool = Pool::new(2, Policy::default());
        for rank in [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1] {
            let ask = pool.ask(&prompt(&[(1, 1000)]), None);
            pool.scheduler.book(&ask, &pool.candidates[rank..=rank], pool.now);
        }
        let next = pool.ask(&prompt(&[(1, 1000)]), None);
        assert_eq!(
            pool.book(&next).terms[0].crowd_tokens,
            0.0,
            "10 are no more than 4 and the other one's 6"
        );
    }

    #[test]
    fn requests_with_other_prompts_are_no_crowd() {
        let mut pool = Pool::new(2, Policy::default());
        for text in 0..20 {
            let ask = pool.ask(&prompt(&[(1, 320), (100 + text, 640)]), None);
            pool.scheduler.book(&ask, &pool.candidates[..1], pool.now);
        }
        let ask = pool.ask(&prompt(&[(1, 320), (100, 700)]), None);
        let terms = pool.scheduler.choose(&ask, &pool.candidates, pool.now).terms;
        assert_eq!((terms[0].booked_tokens, terms[0].sharers, terms[0].crowd_tokens), (960, 1.0, 0.0));
        let ask = pool.ask(&prompt(&[(1, 320), (200, 640)]), None);
        let terms = pool.scheduler.choose(&ask, &pool.candidates, pool.now).terms;
        assert_eq!(
            (terms[0].booked_tokens, terms[0].sharers),
            (320, 20.0),
            "their common head is shared by all"
        );
    }

    #[test]
    fn of_a_very_long_prompt_a_part_counts_for_the_decoding_neighbours() {
        let mut pool = Pool::new(1, Policy::default());
        let first = pool.ask(&prompt(&[(1, 600)]), None);
        pool.book(&first);
        pool.prefill(RankId(0), &first.prompt);
        for (tokens, counted) in [(30_000, 30_000.0), (100_000, 30_000.0)] {
            let ask = pool.ask(&prompt(&[(2, tokens)]), None);
            let weight = pool.scheduler.choose(&ask, &pool.candidates, pool.now).terms[0].own_weight;
            assert_near((weight - 1.0) * f64::from(tokens), 0.03 * counted);
        }
    }

    #[test]
    fn own_tokens_are_dearer_where_blocks_are_soon_evicted() {
        let without_spread = CostConfig { spread_weight: 0.0, ..CostConfig::default() };
        let terms = terms(without_spread, true, true);
        let age = terms[0].eviction_age.expect("100 blocks have left").as_secs_f64();
        assert!((200.0..400.0).contains(&age), "{age}");
        assert_near(terms[0].cost, (1.03 + (-age / 300.0).exp()) * 1000.0 + 0.02 * 6000.0);
        assert_near(terms[1].cost, 1000.0);
    }

    #[test]
    fn the_own_weight_is_bounded() {
        let steep = CostConfig { queue_gain: 1e9, ..CostConfig::default() };
        assert_near(terms(steep, false, false)[1].cost, 8000.0);
    }
}
