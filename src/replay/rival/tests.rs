use super::*;
use crate::select::EngineLoad;

const BLOCK: u32 = 16;

/// A request for a prompt of these blocks and no token more.
fn ask(id: u128, blocks: &[u64]) -> Ask {
    let sequence = blocks.iter().copied().map(SequenceHash).collect();
    let prompt = Arc::new(PromptBlocks::new(blocks.len() as u32 * BLOCK, [(BLOCK, sequence)]));
    Ask { id: RequestId(id), prompt, session: None }
}

fn candidates(gpu_blocks: [u32; 2]) -> Vec<Candidate> {
    let candidate = |rank: u16| Candidate {
        gpu_blocks: gpu_blocks[usize::from(rank)],
        ..Candidate::idle(RankId(rank), BLOCK)
    };
    vec![candidate(0), candidate(1)]
}

fn rival(policy: RivalPolicy) -> Rival {
    Rival::new(policy, 2, 1000, 1)
}

fn tokens(sees: Sees, predicts: bool) -> RivalPolicy {
    RivalPolicy::Tokens(TokenCost { sees, own_weight: 2.0, context_weight: 0.5, predicts })
}

#[test]
fn the_token_cost_is_queue_own_tokens_and_contexts() {
    let mut rival = rival(tokens(Sees::Events, false));
    rival.book(&ask(1, &[1, 2, 3, 4]), &candidates([1, 0])[0]);
    // 48 uncached tokens queue, 64 of context; 32 of the own 64 are cached, by the CPU tier at 0.15 each of 16 more.
    let mut here = candidates([2, 0]);
    here[0].cpu_blocks = 1;
    let next = ask(2, &[9, 8, 7, 6]);
    assert_eq!(rival.costs(&next, &here), [48.0 + 2.0 * (16.0 + 2.4) + 32.0, 2.0 * 64.0]);
    rival.first_token(RequestId(1));
    rival.first_token(RequestId(1));
    assert_eq!(rival.costs(&next, &here)[0], 2.0 * 18.4 + 32.0, "its prefill is done");
    rival.end(RequestId(1));
    assert_eq!(rival.costs(&next, &here)[0], 2.0 * 18.4);
    assert!(rival.ranks.iter().all(|rank| rank.booked.is_empty() && rank.requests == 0));
}

#[test]
fn siblings_follow_each_other_only_where_booked_prompts_count_or_history_is_kept() {
    for (policy, together) in [
        (tokens(Sees::Events, false), false),
        (tokens(Sees::Events, true), true),
        (tokens(Sees::AllHistory, false), true),
        (
            RivalPolicy::Dynamo(
                DynamoWeights { overlap_score_credit: 3.0, ..DynamoWeights::default() },
                true,
            ),
            true,
        ),
    ] {
        let mut rival = rival(policy);
        let head: Vec<u64> = (0..40).collect();
        let first = rival.choose(&ask(1, &head), &candidates([0, 0]));
        rival.first_token(RequestId(1));
        let sibling = ask(2, &[&head[..], &[100]].concat());
        assert_eq!(rival.choose(&sibling, &candidates([0, 0])) == first, together, "{policy:?}");
    }
}

#[test]
fn a_history_as_large_as_the_caches_forgets() {
    let mut rival = Rival::new(tokens(Sees::BoundedHistory, false), 1, 4, 1);
    let here = [Candidate::idle(RankId(0), BLOCK)];
    rival.choose(&ask(1, &[1, 2, 3, 4]), &here);
    rival.choose(&ask(2, &[5, 6]), &here);
    assert_eq!(rival.blocks(&rival.ranks[0], &ask(3, &[1, 2, 3, 4]), &here[0]), (2, 0));
}

#[test]
fn dynamos_cost_is_prefill_less_credit_and_active_blocks() {
    let mut rival = rival(RivalPolicy::Dynamo(DynamoWeights::default(), false));
    rival.book(&ask(1, &[1, 2, 3, 4]), &candidates([1, 0])[0]);
    // 48 tokens queue; of 4 blocks 2 are cached here and 1 is active.
    let costs = rival.costs(&ask(2, &[1, 7, 8, 9]), &candidates([2, 0]));
    assert_eq!(costs, [(48.0 + 64.0) / 16.0 - 2.0 + 4.0 + 3.0, 4.0 + 4.0]);
}

#[test]
fn sglang_follows_its_history_unless_little_matches_or_the_load_is_uneven() {
    let mut rival = rival(RivalPolicy::Sglang);
    let here = candidates([0, 0]);
    rival.book(&ask(1, &[1, 2, 3, 4]), &here[0]);
    assert_eq!(rival.choose(&ask(2, &[1, 2, 9, 9]), &here), Some(RankId(0)), "half of it matches");
    assert_eq!(rival.choose(&ask(3, &[1, 7, 7, 7]), &here), Some(RankId(1)), "the smallest history");
    (10..90).for_each(|id| rival.book(&ask(id, &[1, 2, 3, 4]), &here[0]));
    assert_eq!(rival.choose(&ask(4, &[1, 2, 3, 4]), &here), Some(RankId(1)), "80 requests more");
}

#[test]
fn llm_d_adds_its_scores() {
    let rival = rival(RivalPolicy::LlmD);
    let mut here = candidates([4, 0]);
    here[0].reported = Some(EngineLoad { waiting: 3, running: 0, booked: 0 });
    here[1].reported = Some(EngineLoad { waiting: 1, running: 0, booked: 0 });
    assert_eq!(rival.costs(&ask(1, &[1, 2, 3, 4]), &here), [-(2.0 + 3.0), -(2.0 + 2.0)]);
}

#[test]
fn a_restart_frees_what_was_booked_there() {
    let mut rival = rival(tokens(Sees::Events, true));
    rival.book(&ask(1, &[1, 2]), &candidates([0, 0])[0]);
    rival.book(&ask(2, &[1, 2]), &candidates([0, 0])[1]);
    rival.restarted(RankId(0));
    assert_eq!((rival.ranks[0].requests, rival.ranks[1].requests), (0, 1));
    assert_eq!(rival.ranks[0].queue_tokens, 0.0);
}
