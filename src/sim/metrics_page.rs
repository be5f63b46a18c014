//! The page that vLLM's `/metrics` would be, as far as load and caches go.

use super::job::EngineStats;
use std::fmt::Write;

/// What does not change while the replica runs.
#[derive(Clone, Debug)]
pub(super) struct CacheInfo {
    pub(super) block_tokens: u32,
    pub(super) blocks: u32,
    pub(super) has_cpu_tier: bool,
}

type Value = fn(&EngineStats) -> f64;

/// Name, kind, help, value.
const SERIES: &[(&str, &str, &str, Value)] = &[
    ("vllm:num_requests_running", "gauge", "Requests in the running batch.", |s| s.running as f64),
    ("vllm:num_requests_waiting", "gauge", "Requests that wait for their turn.", |s| s.waiting as f64),
    ("vllm:kv_cache_usage_perc", "gauge", "Share of KV cache blocks in use, 0 to 1.", |s| s.usage),
    ("vllm:prefix_cache_queries_total", "counter", "Tokens looked up in the prefix cache.", |s| {
        s.queried_tokens as f64
    }),
    ("vllm:prefix_cache_hits_total", "counter", "Tokens found in the prefix cache.", |s| s.hit_tokens as f64),
    ("vllm:external_prefix_cache_queries_total", "counter", "Tokens looked up in the CPU tier.", |s| {
        s.host_queried_tokens as f64
    }),
    ("vllm:external_prefix_cache_hits_total", "counter", "Tokens found in the CPU tier.", |s| {
        s.host_hit_tokens as f64
    }),
    ("vllm:num_preemptions_total", "counter", "Requests that lost their blocks to others.", |s| {
        s.preemptions as f64
    }),
    ("vllm:prompt_tokens_total", "counter", "Prompt tokens of all requests.", |s| s.prompt_tokens as f64),
    ("vllm:generation_tokens_total", "counter", "Tokens generated.", |s| s.generated_tokens as f64),
    ("vllm:time_to_first_token_seconds_count", "counter", "Requests that have had their first token.", |s| {
        s.first_tokens as f64
    }),
];

/// What no engine tells: how many prompts came with their tokens sent ahead.
pub(super) fn staged_prompts(count: u64) -> String {
    let name = "kvspoa_replica:staged_prompts_total";
    format!("# HELP {name} Prompts whose tokens were sent ahead.\n# TYPE {name} counter\n{name} {count}\n")
}

/// The page in Prometheus' text format; one series a rank, told apart by the label `engine`.
pub(super) fn render(model: &str, info: &CacheInfo, ranks: &[(u16, EngineStats)]) -> String {
    let model = model.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let mut page = String::new();
    // Writing to a String cannot fail.
    for (name, kind, help, value) in SERIES {
        let _ = writeln!(page, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (rank, stats) in ranks {
            let _ = writeln!(page, "{name}{{engine=\"{rank}\",model_name=\"{model}\"}} {:?}", value(stats));
        }
    }
    let name = "vllm:prompt_tokens_by_source_total";
    let _ = writeln!(page, "# HELP {name} Prompt tokens by where they came from.\n# TYPE {name} counter");
    for (rank, stats) in ranks {
        let computed = stats.computed_tokens as f64;
        let _ = writeln!(
            page,
            "{name}{{engine=\"{rank}\",model_name=\"{model}\",source=\"local_compute\"}} {computed:?}"
        );
    }
    let name = "vllm:cache_config_info";
    let _ = writeln!(page, "# HELP {name} How the KV cache is laid out.\n# TYPE {name} gauge");
    let CacheInfo { block_tokens, blocks, has_cpu_tier } = info;
    for (rank, _) in ranks {
        let _ = writeln!(
            page,
            "{name}{{block_size=\"{block_tokens}\",cache_dtype=\"auto\",enable_prefix_caching=\"True\",engine=\"{rank}\",\
             num_cpu_blocks=\"None\",num_gpu_blocks=\"{blocks}\",prefix_caching_hash_algo=\"sha256\"}} 1.0"
        );
    }
    if *has_cpu_tier {
        // vLLM's is the pinned share, which is 0 on an idle engine; here nothing is ever pinned for long.
        let name = "vllm:kv_offload_cpu_cache_usage_perc";
        let _ = writeln!(page, "# HELP {name} Share of the CPU tier in use, 0 to 1.\n# TYPE {name} gauge");
        for (rank, _) in ranks {
            let _ = writeln!(page, "{name}{{engine=\"{rank}\",model_name=\"{model}\"}} 0.0");
        }
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_has_its_series_under_vllms_names() {
        let stats = |running| EngineStats { running, usage: 0.25, ..EngineStats::default() };
        let info = CacheInfo { block_tokens: 16, blocks: 100, has_cpu_tier: false };
        let page = render("a\"b", &info, &[(0, stats(3)), (1, stats(4))]);
        for line in [
            r#"vllm:num_requests_running{engine="0",model_name="a\"b"} 3.0"#,
            r#"vllm:num_requests_running{engine="1",model_name="a\"b"} 4.0"#,
            r#"vllm:kv_cache_usage_perc{engine="1",model_name="a\"b"} 0.25"#,
        ] {
            assert!(page.lines().any(|found| found == line), "{line}\n{page}");
        }
        assert!(page.contains(r#"num_gpu_blocks="100""#));
    }
}
