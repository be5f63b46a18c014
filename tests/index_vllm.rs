//! The index against the engine's own word: recordings of vLLM whose answers say how many tokens were cached.

mod events_support;

use events_support::{json, records};
use kvspoa::events::{Batch, Groups};
use kvspoa::hash::HashKey;
use kvspoa::index::{Index, IndexConfig, Overlap, Overlaps};
use kvspoa::units::{RankId, TokenId};
use serde_json::Value;

const RANK: RankId = RankId(0);
const BLOCK_TOKENS: u32 = 32;

/// The prompt of a request that had one prompt and one answer.
fn prompt(step: &Value) -> Option<Vec<TokenId>> {
    let ids = step.get("prompt_token_ids")?.as_array()?;
    let ids = match ids.first()? {
        Value::Array(first) if ids.len() == 1 => first,
        Value::Array(_) => return None,
        _ => ids,
    };
    ids.iter().map(|id| Some(TokenId(u32::try_from(id.as_u64()?).ok()?))).collect()
}

/// Follows a recording, and compares the overlap before each request with what the engine reports after it.
/// Returns how many requests were compared, and how many found blocks in the CPU tier.
fn compare(name: &str) -> (u32, u32) {
    let key = HashKey::from_seed(1);
    let mut index = Index::new(key.clone(), IndexConfig::default());
    assert!(index.add_rank(RANK));
    let (records, json) = (records(name), json(name));
    let (mut batch, mut groups, mut overlaps) = (Batch::new(), Groups::default(), Overlaps::default());
    let (mut compared, mut with_cpu) = (0, 0);
    for step in json["steps"].as_array().expect("steps") {
        let cached_tokens =
            step.pointer("/usage/prompt_tokens_details/cached_tokens").and_then(Value::as_u64);
        if let (Some(cached_tokens), Some(tokens)) = (cached_tokens, prompt(step)) {
            let salt = step.pointer("/body/cache_salt").and_then(Value::as_str);
            index.find(&key.sequence(key.root(None, salt), &tokens, BLOCK_TOKENS), &mut overlaps);
            let overlap: Overlap = overlaps.get(RANK);
            // The engine always computes the last token.
            let most = (tokens.len() as u32 - 1) / BLOCK_TOKENS;
            let expected = u64::from(overlap.blocks().min(most) * BLOCK_TOKENS);
            assert_eq!(expected, cached_tokens, "{name}: {} ({overlap:?})", step["step"]);
            compared += 1;
            with_cpu += u32::from(overlap.cpu_blocks > 0);
        }
        let range = |at| step["records"][at].as_u64().expect("a range") as usize;
        for record in records[range(0)..range(1)].iter().filter(|record| !record.replayed) {
            batch.decode(record.message().1, &key, &mut groups).expect("decodes");
            for event in batch.events() {
                index.apply(RANK, &event);
            }
        }
    }
    (compared, with_cpu)
}

#[test]
fn the_overlap_is_what_vllm_found_with_a_cpu_tier_that_names_blocks_only() {
    let (compared, with_cpu) = compare("qwen3-offload-placeholder");
    assert!(compared >= 23 && with_cpu >= 2, "{compared} {with_cpu}");
}

#[test]
fn the_overlap_is_what_vllm_found_with_a_cpu_tier_that_evicts() {
    let (compared, _) = compare("qwen3-offload-evict");
    assert!(compared >= 23, "{compared}");
}
