//! The demonstration's tables and charts, as text.

use super::load::{Failure, Outcome};
use std::{collections::BTreeMap, fmt::Write, time::Duration};

/// What one way of routing did with the load.
#[derive(Debug)]
pub(super) struct Summary {
    name: &'static str,
    requests: usize,
    failures: Vec<String>,
    prompt_tokens: u64,
    cached_tokens: u64,
    /// Milliseconds, sorted.
    ttft: Vec<f64>,
    /// Requests and prefilled tokens per replica.
    replicas: BTreeMap<String, (usize, u64)>,
}

impl Summary {
    pub(super) fn new(
        name: &'static str,
        outcomes: Vec<Result<Outcome, Failure>>,
        servers: &[String],
    ) -> Self {
        let mut summary = Self {
            name,
            requests: outcomes.len(),
            failures: Vec::new(),
            prompt_tokens: 0,
            cached_tokens: 0,
            ttft: Vec::new(),
            replicas: servers.iter().map(|server| (server.clone(), (0, 0))).collect(),
        };
        for outcome in outcomes {
            match outcome {
                Ok(outcome) => summary.add(outcome),
                Err(failure) => summary.failures.push(failure.to_string()),
            }
        }
        summary.ttft.sort_by(f64::total_cmp);
        summary
    }

    fn add(&mut self, outcome: Outcome) {
        self.prompt_tokens += outcome.prompt_tokens;
        self.cached_tokens += outcome.cached_tokens;
        self.ttft.push(millis(outcome.ttft));
        let (requests, prefilled) = self.replicas.entry(outcome.replica).or_default();
        *requests += 1;
        *prefilled += outcome.prompt_tokens.saturating_sub(outcome.cached_tokens);
    }

    /// Share of the prompt tokens that were not computed again, 0 to 1.
    pub(super) fn cached_share(&self) -> f64 {
        self.cached_tokens as f64 / (self.prompt_tokens as f64).max(1.0)
    }

    pub(super) fn failures(&self) -> &[String] {
        &self.failures
    }

    fn mean(&self) -> f64 {
        self.ttft.iter().sum::<f64>() / (self.ttft.len() as f64).max(1.0)
    }

    fn percentile(&self, percent: usize) -> f64 {
        let at = (self.ttft.len() * percent).div_ceil(100).saturating_sub(1);
        self.ttft.get(at).copied().unwrap_or_default()
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The two ways side by side.
pub(super) fn compare(plain: &Summary, ours: &Summary) -> String {
    let mut out = String::new();
    let both = [plain, ours];
    // Writing to a String cannot fail.
    let _ = writeln!(out, "{:24}{:>14}{:>14}", "", plain.name, ours.name);
    let mut row = |label: &str, value: &dyn Fn(&Summary) -> String| {
        let _ = writeln!(out, "{label:24}{:>14}{:>14}", value(plain), value(ours));
    };
    row("requests", &|s| s.requests.to_string());
    row("failed", &|s| s.failures.len().to_string());
    row("prompt tokens", &|s| s.prompt_tokens.to_string());
    row("cached share", &|s| format!("{:.1} %", s.cached_share() * 100.0));
    row("TTFT mean", &|s| format!("{:.0} ms", s.mean()));
    row("TTFT p50", &|s| format!("{:.0} ms", s.percentile(50)));
    row("TTFT p99", &|s| format!("{:.0} ms", s.percentile(99)));
    let most =
        both.iter().flat_map(|s| s.replicas.values()).map(|(_, tokens)| *tokens).max().unwrap_or(1).max(1);
    for summary in both {
        let _ = writeln!(out, "\nprefilled tokens per replica, {}", summary.name);
        for (replica, (requests, tokens)) in &summary.replicas {
            let bar = "#".repeat((tokens * 40).div_ceil(most) as usize);
            let _ = writeln!(out, "  {replica:8} {bar:40} {tokens:>7}  ({requests} requests)");
        }
    }
    let _ = writeln!(out, "\ntime to first token (each # is {} requests)", scale(&both));
    let _ = writeln!(out, "{:>12}  {:30}{}", "", plain.name, ours.name);
    for (label, low, high) in BUCKETS {
        let bars = both.map(|s| {
            let count = s.ttft.iter().filter(|t| (*low..*high).contains(*t)).count();
            "#".repeat(count.div_ceil(scale(&both)))
        });
        let _ = writeln!(out, "{label:>12}  {:30}{}", bars[0], bars[1]);
    }
    out
}

const BUCKETS: &[(&str, f64, f64)] = &[
    ("< 25 ms", 0.0, 25.0),
    ("25-50 ms", 25.0, 50.0),
    ("50-100 ms", 50.0, 100.0),
    ("100-200 ms", 100.0, 200.0),
    ("200-400 ms", 200.0, 400.0),
    ("> 400 ms", 400.0, f64::INFINITY),
];

/// Requests per mark, so that no bar is longer than its column.
fn scale(both: &[&Summary; 2]) -> usize {
    both.iter().map(|s| s.requests).max().unwrap_or(1).div_ceil(28).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(replica: &str, ms: u64, prompt: u64, cached: u64) -> Result<Outcome, Failure> {
        Ok(Outcome {
            ttft: Duration::from_millis(ms),
            prompt_tokens: prompt,
            cached_tokens: cached,
            replica: replica.to_owned(),
        })
    }

    #[test]
    fn a_summary_counts_shares_percentiles_and_failures() {
        let outcomes = vec![outcome("a", 10, 100, 50), outcome("b", 30, 100, 100), Err(Failure::Status(503))];
        let summary = Summary::new("plain", outcomes, &["a".to_owned(), "c".to_owned()]);
        assert!((summary.cached_share() - 0.75).abs() < 1e-9);
        assert!((summary.percentile(50) - 10.0).abs() < 1e-9);
        assert!((summary.percentile(99) - 30.0).abs() < 1e-9);
        assert_eq!(summary.failures(), ["status 503"]);
        assert_eq!(summary.replicas["a"], (1, 50));
        assert_eq!(summary.replicas["c"], (0, 0), "a replica that served nothing is shown");
        let table = compare(&summary, &summary);
        assert!(table.contains("75.0 %"), "{table}");
    }
}
