//! The life of bookings as a property: whatever happens, and in whatever order, the loads are those of the bookings.

use super::tests::policies;
use crate::select::testing::{BLOCK_TOKENS, Pool, prompt};
use crate::select::*;
use crate::units::{RankId, RequestId, SequenceHash};
use proptest::prelude::*;
use std::time::Duration;

#[derive(Clone, Debug)]
enum Step {
    Book {
        id: u8,
        head: u8,
        tail: u8,
    },
    End(u8),
    Move(u8, u8),
    Lose(u8),
    Prefill {
        rank: u8,
        head: u8,
        tail: u8,
    },
    /// Blocks of an answer to that prompt are stored.
    Answer {
        rank: u8,
        head: u8,
        tail: u8,
        blocks: u8,
    },
    SetRanks(u8),
    /// HAProxy opens or closes a server.
    Open(u8, bool),
    /// From here on a rank's events tell all, less, or nothing.
    Told(u8, u8),
    /// HAProxy finds nobody at a rank any more: what has appeared elsewhere moves.
    MoveStrays(u8),
    Wait(u16),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..24u8, 0..3u8, 0..4u8).prop_map(|(id, head, tail)| Step::Book { id, head, tail }),
        2 => (0..24u8).prop_map(Step::End),
        1 => (0..24u8, 0..4u8).prop_map(|(id, rank)| Step::Move(id, rank)),
        1 => (0..24u8).prop_map(Step::Lose),
        2 => (0..4u8, 0..3u8, 0..4u8).prop_map(|(rank, head, tail)| Step::Prefill { rank, head, tail }),
        2 => (0..4u8, 0..3u8, 0..4u8, 1..4u8)
            .prop_map(|(rank, head, tail, blocks)| Step::Answer { rank, head, tail, blocks }),
        1 => (1..16u8).prop_map(Step::SetRanks),
        1 => (0..4u8, any::<bool>()).prop_map(|(rank, open)| Step::Open(rank, open)),
        1 => (0..4u8, 0..3u8).prop_map(|(rank, told)| Step::Told(rank, told)),
        1 => (0..4u8).prop_map(Step::MoveStrays),
        1 => (0..20_000u16).prop_map(Step::Wait),
    ]
}

fn step_prompt(head: u8, tail: u8) -> std::sync::Arc<PromptBlocks> {
    prompt(&step_segments(head, tail))
}

fn step_segments(head: u8, tail: u8) -> [(u32, u32); 2] {
    [(u32::from(head), 40), (100 + u32::from(tail), u32::from(tail) * 37)]
}

/// What can happen besides a choice. Events come to bookings that are there, to ended ones, and before there are any.
fn take(pool: &mut Pool, step: &Step) {
    let now = pool.now;
    match *step {
        Step::Book { id, head, tail } => {
            let session = Some(id.into());
            let ask = Ask { id: RequestId(id.into()), prompt: step_prompt(head, tail), session };
            pool.book(&ask);
        }
        Step::End(id) => drop(pool.scheduler.end(RequestId(id.into()), None, now)),
        Step::Move(id, rank) => {
            let target = pool.candidates[usize::from(rank)].clone();
            pool.scheduler.move_to(RequestId(id.into()), &target, now);
        }
        Step::Lose(id) => drop(pool.scheduler.lose(RequestId(id.into()))),
        Step::Prefill { rank, head, tail } => pool.prefill(RankId(rank.into()), &step_prompt(head, tail)),
        Step::Answer { rank, head, tail, blocks } => {
            let asked = step_prompt(head, tail).sequence(SequenceKey::of_size(BLOCK_TOKENS)).len();
            let [first, second] = step_segments(head, tail);
            let answered = prompt(&[first, second, (300, 100)]);
            let answered = answered.sequence(SequenceKey::of_size(BLOCK_TOKENS));
            for at in asked.max(1)..asked.max(1) + usize::from(blocks) {
                pool.scheduler.grow(RankId(rank.into()), answered[at - 1], answered[at]);
            }
        }
        Step::SetRanks(mask) => {
            let ranks: Vec<_> = (0..4).filter(|at| mask >> at & 1 == 1).map(RankId).collect();
            pool.scheduler.set_ranks(&ranks, now);
        }
        Step::Open(rank, open) => {
            pool.candidates[usize::from(rank)].excluded = (!open).then_some(Excluded::Down);
            pool.scheduler.set_open(RankId(rank.into()), open, now);
        }
        Step::Told(rank, told) => {
            let candidate = &mut pool.candidates[usize::from(rank)];
            (candidate.trusted, candidate.history_blocks) =
                [(true, 0), (true, 8), (false, 8)][usize::from(told)];
        }
        Step::MoveStrays(from) => {
            let stored = |rank: RankId, sequence: &[SequenceHash]| {
                let stored = PromptBlocks::new(u32::MAX, [(BLOCK_TOKENS, sequence.to_vec())]);
                pool.seen(&stored)[rank.index()].gpu_blocks
            };
            for (id, target) in pool.scheduler.strays(RankId(from.into()), stored) {
                pool.scheduler.move_to(id, &target, now);
            }
        }
        Step::Wait(ms) => {
            pool.now += Duration::from_millis(ms.into());
            pool.scheduler.tick(pool.now);
        }
    }
}

proptest! {
    #[test]
    fn at_equal_load_no_band_overrides_a_confirmed_block(
        held in prop::collection::vec((0u32..4, 0u32..3), 4),
        band_blocks in 0.0..2.0f64,
    ) {
        let policy = Policy::Cost(CostConfig { band_blocks, ..CostConfig::default() });
        let mut pool = Pool::new(4, policy);
        let ask = pool.ask(&prompt(&[(1, 300)]), None);
        let mut candidates = pool.candidates.clone();
        for (candidate, (gpu_blocks, cpu_blocks)) in candidates.iter_mut().zip(&held) {
            (candidate.gpu_blocks, candidate.cpu_blocks) = (*gpu_blocks, *cpu_blocks);
        }
        let choice = pool.scheduler.book(&ask, &candidates, pool.now);
        let chosen = choice.chosen().expect("chosen");
        let outdone = choice.terms.iter().find(|other| {
            other.confirmed.gpu_tokens >= chosen.confirmed.gpu_tokens + BLOCK_TOKENS
                && other.confirmed.tokens() >= chosen.confirmed.tokens() + BLOCK_TOKENS
        });
        prop_assert!(outdone.is_none(), "{:?}", choice.terms);
    }

    #[test]
    fn loads_are_the_sum_of_the_live_bookings_and_nothing_is_left_at_the_end(
        steps in prop::collection::vec(step(), 0..150),
        policy in 0..6usize,
        follow_answers: bool,
    ) {
        let config = SchedulerConfig {
            max_bookings: 16,
            lease: Duration::from_secs(30),
            follow_answers,
            ..SchedulerConfig::default()
        };
        let mut pool = Pool::with_config(4, policies()[policy], config);
        for step in steps {
            take(&mut pool, &step);
            let live: Vec<_> = (0..24u8)
                .filter_map(|id| pool.scheduler.booking(RequestId(id.into())))
                .map(|(rank, prompt)| (rank, u64::from(prompt.tokens(SequenceKey::of_size(BLOCK_TOKENS)))))
                .collect();
            prop_assert!(live.len() <= 16);
            for (rank, load) in pool.scheduler.loads() {
                let here = || live.iter().filter(|(at, _)| *at == rank);
                let prompts = here().map(|(_, tokens)| tokens).sum::<u64>();
                prop_assert_eq!(load.requests as usize, here().count());
                prop_assert!(load.context_tokens == prompts || follow_answers && load.context_tokens > prompts);
                prop_assert!(load.prefill_tokens <= load.unfinished_tokens);
                prop_assert!(load.unfinished_tokens <= prompts);
                prop_assert!(load.decoding < load.requests || load.prefill_tokens == 0);
            }
            let Counts { booked, ended, removed, lost, expired, replaced, .. } = pool.scheduler.counts();
            prop_assert_eq!(booked, live.len() as u64 + ended + removed + lost + expired + replaced);
            prop_assert!(pool.scheduler.histories().all(|(_, blocks)| blocks <= 8));
        }
        for id in 0..24u8 {
            pool.scheduler.end(RequestId(id.into()), None, pool.now);
        }
        for (rank, load) in pool.scheduler.loads() {
            prop_assert_eq!(load, Load::default(), "{:?}", rank);
        }
        prop_assert!(pool.scheduler.owners.is_empty());
        prop_assert_eq!(pool.scheduler.booked_hashes, 0);
    }
}
