//! NVIDIA Dynamo's cost (1.6.1), under its own names, for those who know its knobs. The unit is blocks.

use super::ask::PromptBlocks;
use super::candidate::Candidate;
use super::choose::Terms;
use crate::config::DynamoWeights;

impl DynamoWeights {
    /// Prices the candidates that can be chosen; `terms` and `candidates` are in the same order. Blocks count as the
    /// index has them, the last one included. Bookings count as load only; `uncached_tokens` becomes Dynamo's
    /// `effective_prefill_tokens`, which is what a booking adds.
    pub(super) fn price(&self, terms: &mut [Terms], candidates: &[Candidate], prompt: &PromptBlocks) {
        let open = terms.iter().filter(|t| t.excluded.is_none());
        let least_prefill = open.map(|t| t.load.unfinished_tokens as f64).fold(f64::INFINITY, f64::min);
        for (terms, candidate) in terms.iter_mut().zip(candidates).filter(|(t, _)| t.excluded.is_none()) {
            let prompt_tokens = prompt.tokens(candidate.key());
            let isl = f64::from(prompt_tokens);
            let block = f64::from(candidate.block_tokens.max(1));
            let blocks = |count: u32| if candidate.trusted { f64::from(count) } else { 0.0 };
            // Where events tell too little, what was sent there stands in, as with Dynamo's `use_kv_events=false`.
            let sent = match candidate.history_blocks {
                0 => 0.0,
                _ => f64::from(terms.booked_tokens + terms.history_tokens) / block,
            };
            let device = blocks(candidate.gpu_blocks) + sent;
            let (host, disk) = (blocks(candidate.cpu_blocks), blocks(candidate.disk_blocks));
            let lower = self.host_cache_hit_weight * host + self.disk_cache_hit_weight * disk;
            let prefill = terms.load.unfinished_tokens as f64;

            let excess = (prefill - least_prefill) / block / (isl / block).ceil().max(1.0);
            let decay = 1.0 / (1.0 + self.overlap_score_credit_decay * excess);
            let credit = self.overlap_score_credit * decay * device + lower;
            let prefill_blocks = ((prefill + isl + terms.slot_tokens) / block - credit).max(0.0);

            let request_blocks = f64::from(prompt_tokens / candidate.block_tokens.max(1));
            let shared_blocks = f64::from(terms.shared_blocks);
            let decode_blocks = terms.load.booked_blocks as f64 + (request_blocks - shared_blocks).max(0.0);

            terms.own_weight = self.prefill_load_scale;
            terms.uncached_tokens = (isl - (block * (device + lower)).round()).max(0.0) as u32;
            terms.cost = self.prefill_load_scale * prefill_blocks
                + decode_blocks
                + self.decode_active_request_weight * f64::from(terms.load.requests);
        }
    }

    /// Draws one of the candidates by the softmax of their negated costs, normalised to their spread.
    pub(super) fn draw(&self, terms: &[Terms], rng: &mut fastrand::Rng) -> Option<usize> {
        let open = || terms.iter().enumerate().filter(|(_, t)| t.excluded.is_none());
        let least = open().map(|(_, t)| t.cost).fold(f64::INFINITY, f64::min);
        let spread = open().map(|(_, t)| t.cost - least).fold(0.0, f64::max).max(f64::MIN_POSITIVE);
        let chance = |t: &Terms| (-(t.cost - least) / spread / self.router_temperature).exp();
        let mut left = rng.f64() * open().map(|(_, t)| chance(t)).sum::<f64>();
        let mut last = None;
        for (at, terms) in open() {
            last = Some(at);
            left -= chance(terms);
            if left <= 0.0 {
                break;
            }
        }
        last
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Overrides};
    use crate::select::testing::{Pool, prompt};
    use crate::select::{Choice, Policy};
    use crate::units::RankId;
    use std::path::Path;

    /// A prompt of 160 tokens, 10 blocks, of which rank 0 holds 4 on the GPU, 2 in host memory and 2 on disk, after
    /// another prompt of 320 tokens was booked on it.
    fn choice(config: DynamoWeights) -> Choice {
        let mut pool = Pool::new(2, Policy::Dynamo(config));
        let busy = pool.ask(&prompt(&[(1, 320)]), None);
        pool.scheduler.book(&busy, &pool.candidates[..1], pool.now);
        let asked = prompt(&[(2, 160)]);
        pool.store(RankId(0), &prompt(&[(2, 64)]));
        pool.candidates[0].cpu_blocks = 2;
        pool.candidates[0].disk_blocks = 2;
        let ask = pool.ask(&asked, None);
        pool.book(&ask)
    }

    fn costs(config: DynamoWeights) -> [f64; 2] {
        let terms = choice(config).terms;
        [terms[0].cost, terms[1].cost]
    }

    #[test]
    fn the_cost_is_dynamos() {
        // Rank 0: prefill (320 + 160) / 16 - (4 + 0.75 * 2 + 0.25 * 2), decode 20 active + 10 new. Rank 1: 10 + 10.
        assert_eq!(costs(DynamoWeights::default()), [24.0 + 30.0, 20.0]);
        let scaled = DynamoWeights { prefill_load_scale: 2.0, ..DynamoWeights::default() };
        assert_eq!(costs(scaled), [48.0 + 30.0, 30.0]);
        let counted = DynamoWeights { decode_active_request_weight: 3.0, ..DynamoWeights::default() };
        assert_eq!(costs(counted), [24.0 + 30.0 + 3.0, 20.0]);
    }

    #[test]
    fn the_configured_weights_are_dynamos_unless_told_otherwise() {
        let weights = |more: &str| -> DynamoWeights {
            let text = format!("haproxy.socket = \"/h\"\n{more}\n[[pool]]\nbackend = \"b\"\n");
            let config = Config::parse(&text, Path::new("k.toml"), &Overrides::default()).expect("valid");
            config.select.dynamo
        };
        // Dynamo's own (1.6.1).
        let own = DynamoWeights {
            overlap_score_credit: 1.0,
            overlap_score_credit_decay: 0.0,
            prefill_load_scale: 1.0,
            host_cache_hit_weight: 0.75,
            disk_cache_hit_weight: 0.25,
            decode_active_request_weight: 0.0,
            router_temperature: 0.0,
        };
        assert_eq!(weights(""), own);
        let all = "[select.dynamo]\noverlap_score_credit = 1.5\noverlap_score_credit_decay = 0.25\n\
                   prefill_load_scale = 2\nhost_cache_hit_weight = 0.5\ndisk_cache_hit_weight = 0.125\n\
                   decode_active_request_weight = 3\nrouter_temperature = 0.75";
        let expected = DynamoWeights {
            overlap_score_credit: 1.5,
            overlap_score_credit_decay: 0.25,
            prefill_load_scale: 2.0,
            host_cache_hit_weight: 0.5,
            disk_cache_hit_weight: 0.125,
            decode_active_request_weight: 3.0,
            router_temperature: 0.75,
        };
        assert_eq!(weights(all), expected);
    }

    #[test]
    fn the_credit_amplifies_decays_and_never_makes_prefill_negative() {
        // An excess of 20 blocks over 10 asked for: 1 / (1 + 0.5 * 2) of the GPU credit is left.
        let decayed = DynamoWeights { overlap_score_credit_decay: 0.5, ..DynamoWeights::default() };
        assert_eq!(costs(decayed)[0], 30.0 - (2.0 + 2.0) + 30.0);
        let amplified = DynamoWeights { overlap_score_credit: 100.0, ..DynamoWeights::default() };
        assert_eq!(costs(amplified)[0], 30.0);
    }

    #[test]
    fn a_booking_adds_the_effective_prefill_tokens() {
        // 160 - round(16 * (4 + 0.75 * 2 + 0.25 * 2)).
        assert_eq!(choice(DynamoWeights::default()).terms[0].uncached_tokens, 64);
    }

    #[test]
    fn where_events_tell_nothing_what_was_sent_there_counts_as_cached() {
        let mut pool = Pool::new(2, Policy::Dynamo(DynamoWeights::default()));
        for candidate in &mut pool.candidates {
            (candidate.trusted, candidate.history_blocks) = (false, 1000);
        }
        let first = pool.ask(&prompt(&[(1, 1600)]), None);
        let home = pool.book(&first).rank;
        pool.scheduler.end(first.id, None, pool.now);
        let next = pool.ask(&prompt(&[(1, 1600), (2, 160)]), None);
        let choice = pool.book(&next);
        assert_eq!((choice.rank, choice.chosen().expect("a rank").uncached_tokens), (home, 160));
    }

    #[test]
    fn temperature_draws_by_the_spread_of_the_costs() {
        let config = DynamoWeights { router_temperature: 1.0, ..DynamoWeights::default() };
        let terms = choice(config).terms;
        let mut rng = fastrand::Rng::with_seed(1);
        let dearer = (0..10_000).filter(|_| config.draw(&terms, &mut rng) == Some(0)).count();
        // e^-1 / (1 + e^-1) of 10,000.
        assert!((2550..=2830).contains(&dearer), "{dearer}");
        let cold = DynamoWeights { router_temperature: 0.01, ..config };
        assert!((0..1000).all(|_| cold.draw(&terms, &mut rng) == Some(1)));
    }
}
