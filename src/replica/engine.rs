//! What an engine says of itself on its `/metrics` page (vLLM's names, Prometheus' text format).

/// One engine process of a replica, that is, one data-parallel rank.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct EngineReport {
    /// Its number, vLLM's label `engine`.
    pub engine: u16,
    /// `vllm:num_requests_running`.
    pub running: u32,
    /// `vllm:num_requests_waiting`.
    pub waiting: u32,
    /// `vllm:kv_cache_usage_perc`: the share of blocks in use by requests, 0 to 1.
    pub kv_usage: f64,
    /// Tokens per block (`vllm:cache_config_info`).
    pub block_tokens: Option<u32>,
    /// Blocks of its GPU cache (`vllm:cache_config_info`).
    pub capacity_blocks: Option<u32>,
    /// Requests that have had their first token, ever (`vllm:time_to_first_token_seconds_count`).
    pub first_tokens: Option<u64>,
    /// Tokens generated, ever (`vllm:generation_tokens_total`).
    pub generated_tokens: Option<u64>,
    /// Prompt tokens computed, ever, counted with the first token (`vllm:prompt_tokens_by_source_total`); 0 where older
    /// versions do not tell.
    pub computed_tokens: u64,
    /// Prompt tokens loaded from the CPU tier, ever (`vllm:prompt_tokens_cached_by_source_total`).
    pub host_hit_tokens: Option<u64>,
    /// The same from whatever is no GPU cache, ever (`vllm:external_prefix_cache_hits_total`).
    pub external_hit_tokens: Option<u64>,
}

impl EngineReport {
    /// Requests in the engine.
    #[must_use]
    pub const fn requests(&self) -> u32 {
        self.running.saturating_add(self.waiting)
    }

    /// Prompt tokens loaded from lower tiers, ever; of the CPU tier alone where the engine tells them apart.
    #[must_use]
    pub fn loaded_tokens(&self) -> Option<u64> {
        self.host_hit_tokens.or(self.external_hit_tokens)
    }
}

/// More engines behind one page than there can be; what follows is left out.
const MAX_ENGINES: usize = 1024;

/// The engines on the page, by number. Those that do not tell how many requests they run are left out; lines that are
/// not understood are passed over.
#[must_use]
pub fn parse_engine_page(page: &str) -> Vec<EngineReport> {
    let mut reports: Vec<(EngineReport, bool)> = Vec::new();
    for line in page.lines() {
        let Some((name, labels, value)) = sample(line) else { continue };
        let engine = label(labels, "engine").and_then(|engine| engine.parse().ok()).unwrap_or_default();
        let at = match reports.iter().position(|(report, _)| report.engine == engine) {
            Some(at) => at,
            None if reports.len() < MAX_ENGINES => {
                reports.push((EngineReport { engine, ..EngineReport::default() }, false));
                reports.len() - 1
            }
            None => continue,
        };
        let Some((report, told)) = reports.get_mut(at) else { continue };
        match name {
            "num_requests_running" => {
                report.running = count(value);
                *told = true;
            }
            "num_requests_waiting" => report.waiting = count(value),
            // The second is its name up to vLLM 0.9.
            "kv_cache_usage_perc" | "gpu_cache_usage_perc" => report.kv_usage = value.clamp(0.0, 1.0),
            "cache_config_info" => {
                let number = |key| label(labels, key)?.parse().ok().filter(|number| *number > 0);
                report.block_tokens = number("block_size");
                report.capacity_blocks = number("num_gpu_blocks");
            }
            "time_to_first_token_seconds_count" => report.first_tokens = Some(value as u64),
            "generation_tokens_total" => report.generated_tokens = Some(value as u64),
            "external_prefix_cache_hits_total" => report.external_hit_tokens = Some(value as u64),
            // A source that has served nothing yet has no series.
            "prompt_tokens_cached_by_source_total" if label(labels, "source") == Some("host") => {
                report.host_hit_tokens = Some(value as u64);
            }
            "prompt_tokens_cached_by_source_total" => {
                report.host_hit_tokens.get_or_insert(0);
            }
            "prompt_tokens_by_source_total" if label(labels, "source") == Some("local_compute") => {
                report.computed_tokens = value as u64;
            }
            _ => {}
        }
    }
    let mut told: Vec<_> = reports.into_iter().filter(|(_, told)| *told).map(|(report, _)| report).collect();
    told.sort_unstable_by_key(|report| report.engine);
    told
}

/// Name without `vllm:`, labels without braces, value.
fn sample(line: &str) -> Option<(&str, &str, f64)> {
    let rest = line.strip_prefix("vllm:")?;
    let end = rest.find(['{', ' '])?;
    let (name, rest) = rest.split_at(end);
    if !matches!(
        name,
        "num_requests_running"
            | "num_requests_waiting"
            | "kv_cache_usage_perc"
            | "gpu_cache_usage_perc"
            | "cache_config_info"
            | "time_to_first_token_seconds_count"
            | "generation_tokens_total"
            | "prompt_tokens_by_source_total"
            | "prompt_tokens_cached_by_source_total"
            | "external_prefix_cache_hits_total"
    ) {
        return None;
    }
    // A label's text may hold braces, but no value does.
    let (labels, value) = match rest.strip_prefix('{') {
        Some(rest) => rest.rsplit_once('}')?,
        None => ("", rest),
    };
    let value = value.split_ascii_whitespace().next()?.parse().ok()?;
    Some((name, labels, value))
}

/// The text of a label. Escapes are kept: no label that is read here has any.
fn label<'a>(labels: &'a str, name: &str) -> Option<&'a str> {
    let mut rest = labels;
    loop {
        let (key, after) = rest.split_once("=\"")?;
        let mut escaped = false;
        let end = after.find(|c| {
            let ends = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        })?;
        if key.trim_start_matches([',', ' ']) == name {
            return after.get(..end);
        }
        rest = after.get(end + 1..)?;
    }
}

/// NaN and negative values are none, and the largest count is the largest that fits. The same holds for `as u64`.
fn count(value: f64) -> u32 {
    value as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = r#"# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="1",model_name="a\"},engine=\"9\",b"} 3.0
vllm:num_requests_running{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="1",model_name="m",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="7",model_name="m"} 0.5
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="1",num_cpu_blocks="None",num_gpu_blocks="120"} 1.0
vllm:cache_config_info{block_size="None",engine="0",num_gpu_blocks="0"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="1",le="0.001"} 7.0
vllm:time_to_first_token_seconds_count{engine="1",model_name="m"} 8.0
vllm:generation_tokens_total{engine="1",model_name="m"} 1.5e+03
vllm:prompt_tokens_by_source_total{engine="1",model_name="m",source="local_compute"} 400.0
vllm:prompt_tokens_by_source_total{engine="1",model_name="m",source="local_cache_hit"} 9000.0
vllm:external_prefix_cache_hits_total{engine="1",model_name="m"} 96.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 32.0
vllm:prompt_tokens_cached_by_source_total{engine="1",model_name="m",source="host"} 64.0
vllm:prompt_tokens_cached_by_source_total{engine="1",model_name="m",source="device"} 9000.0
process_open_fds 12
"#;

    #[test]
    fn each_engine_is_read_by_its_label() {
        let reports = parse_engine_page(PAGE);
        let second = EngineReport {
            engine: 1,
            running: 3,
            waiting: 2,
            kv_usage: 0.25,
            block_tokens: Some(32),
            capacity_blocks: Some(120),
            first_tokens: Some(8),
            generated_tokens: Some(1500),
            computed_tokens: 400,
            host_hit_tokens: Some(64),
            external_hit_tokens: Some(96),
        };
        let first = EngineReport { running: 1, external_hit_tokens: Some(32), ..EngineReport::default() };
        assert_eq!(reports, [first, second]);
        assert_eq!([first, second].map(|report| report.loaded_tokens()), [Some(32), Some(64)]);
        assert_eq!(second.requests(), 5);
    }

    #[test]
    fn a_page_of_something_else_says_nothing() {
        for page in [
            "",
            "<html>\n",
            "vllm:",
            "vllm:num_requests_running{",
            "vllm:num_requests_running{engine=\"0\"} x",
        ] {
            assert_eq!(parse_engine_page(page), [], "{page}");
        }
        let odd = parse_engine_page("vllm:num_requests_running -3\nvllm:num_requests_waiting NaN");
        assert_eq!(odd, [EngineReport::default()]);
    }
}
