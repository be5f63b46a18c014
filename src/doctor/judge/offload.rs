//! Caches below the GPU's: whether events tell of them.

use crate::doctor::{
    facts::{RankFacts, ReplicaFacts},
    report::Judge,
};

/// How vLLM's own offloading is made to tell of its blocks.
const FLAGS: &str = "VLLM_USE_SIMPLE_KV_OFFLOAD=0 vllm serve … --kv-offloading-backend native --kv-offloading-size GIB \
                     --kv-transfer-config '{\"kv_connector\": \"OffloadingConnector\", \"kv_role\": \"kv_both\", \
                     \"kv_connector_extra_config\": {\"self_describing_kv_events\": true}}'\n\
                     (in Python: kv_offloading_backend, kv_offloading_size and self_describing_kv_events)";

pub(super) fn judge(replica: &ReplicaFacts, rank: &RankFacts, judge: &mut Judge<'_>) {
    let Some(seen) = rank.seen() else { return };
    let metrics = replica.pages.as_ref().and_then(|pages| pages.metrics.as_ref().ok());
    let has_tier = metrics.is_some_and(|page| page.has_prefix("vllm:kv_offload"));
    let asks_elsewhere =
        metrics.is_some_and(|page| page.sum("vllm:external_prefix_cache_queries_total", &[]) > 0.0);
    match seen.lower_stores {
        [0, 0] if has_tier => judge.warn(
            "cpu_tier",
            "it has a CPU tier, of which no event came for a prompt of three blocks",
            format!("if it never does, its hits are not seen. The flags that make it tell:\n{FLAGS}"),
        ),
        [0, 0] if asks_elsewhere => judge.warn(
            "cpu_tier",
            "it looks blocks up in a cache of another kind (LMCache, a connector of several), of which no event tells",
            format!("what only that cache holds counts as not cached. vLLM's own offloading can tell:\n{FLAGS}"),
        ),
        [0, 0] => judge.ok("cpu_tier", "no CPU tier"),
        [_, 0] => judge.ok("cpu_tier", "the events of its CPU tier describe themselves"),
        [_, placeholders] => judge.fail(
            "cpu_tier",
            format!("the events of its CPU tier are placeholders without tokens ({placeholders} of them)"),
            format!("only blocks seen on the GPU before can be told by them. Start the engine with\n{FLAGS}"),
        ),
    }
}
