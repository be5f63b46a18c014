//! `kvspoa shadow-report`: what HAProxy did, beside what kvspoa and plain hashing would have done, and whether it is worth
//! switching on.
//!
//! What HAProxy did is played again through modelled replicas, and so is what the others would have done: by the index,
//! the load and the choice of the agent. Times are the model's; what the index itself confirmed is shown beside them.

use super::{
    agent::Router,
    error::ReplayError,
    outcome::{Outcome, Record, Slo},
    play::{Fleet, Played, play},
    policy::{PolicyName, Weights},
    recorded::{self, Recorded},
    rival::Rival,
};
use crate::{
    record::Line,
    sim::{EngineConfig, OffloadConfig, Timing},
    units::RankId,
};
use hashbrown::HashSet;
use serde::Serialize;
use std::{fmt::Write, path::Path, sync::Arc, sync::atomic::AtomicU64, time::Duration};

/// The replicas, as far as they are known.
#[derive(Clone, Debug, Default)]
pub struct ReportFleet {
    /// The servers' names; those that served a request are added.
    pub servers: Vec<String>,
    /// Blocks of each one's GPU cache.
    pub gpu_blocks: Option<u32>,
    /// Blocks of each one's CPU tier.
    pub cpu_blocks: Option<u32>,
    /// Prompt tokens that a busy one computes a second.
    pub prefill_tokens_per_second: Option<f64>,
}

/// What came of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The time to first token falls by more than a twentieth, and by more than chance.
    WorthIt,
    /// It does not.
    NotWorthIt,
    /// There is too little to tell.
    Undecided,
}

/// The report.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Requests in the record, and those behind the warm-up, which count.
    pub requests: usize,
    /// See above.
    pub counted: usize,
    /// From the first to the last request, seconds.
    pub seconds: f64,
    /// Requests of which the log line came.
    pub served: usize,
    /// Requests that went where kvspoa said.
    pub routed: usize,
    /// The share of prompt tokens that had come before, anywhere: no way of routing finds more.
    pub repeated_share: f64,
    /// By the agent's index when each request came: the share of prompt tokens that the server which HAProxy used held,
    /// and the one that kvspoa chose, given what HAProxy had done until then.
    pub index_served_share: f64,
    /// See above.
    pub index_chosen_share: f64,
    /// What was assumed of the replicas.
    pub model: Model,
    /// The ways, HAProxy's own first, then kvspoa's.
    pub ways: Vec<Way>,
    /// By how much of itself kvspoa lowers the mean time to first token, and twice the standard error of that.
    pub saving: f64,
    /// See above.
    pub uncertainty: f64,
    /// Whether it is worth switching on.
    pub verdict: Verdict,
    /// Why.
    pub because: Vec<String>,
}

/// What was assumed of the replicas.
#[derive(Debug, Serialize)]
pub struct Model {
    /// Replicas.
    pub replicas: usize,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Blocks of GPU cache of each.
    pub gpu_blocks: u32,
    /// Blocks of CPU tier of each.
    pub cpu_blocks: u32,
    /// Prompt tokens that a busy one computes a second.
    pub prefill_tokens_per_second: f64,
}

/// What one way of choosing servers comes to.
#[derive(Debug, Serialize)]
pub struct Way {
    /// Its name.
    pub way: &'static str,
    /// The share of prompt tokens that caches serve.
    pub cached_share: f64,
    /// Prompt tokens that are computed.
    pub prefilled_tokens: u64,
    /// Times to first token, seconds.
    pub ttft_mean_seconds: f64,
    /// See above.
    pub ttft_p50_seconds: f64,
    /// See above.
    pub ttft_p90_seconds: f64,
    /// The busiest replica's computing time over the mean.
    pub busy_balance: f64,
}

/// Fewer requests tell nothing.
const LEAST_REQUESTS: usize = 50;

/// Less is not worth another part in the road of each request.
const LEAST_SAVING: f64 = 0.05;

/// Parts in time, by which the uncertainty is estimated: requests of one conversation are no independent samples.
const PARTS: usize = 10;

/// The share of requests at the beginning that only fill the modelled caches.
const WARM_UP: f64 = 0.2;

/// Another way is as good within so much of kvspoa's time.
const AS_GOOD: f64 = 1.03;

/// A GPU cache of which nothing is known, tokens: what a small GPU has beside a model.
const USUAL_CACHE_TOKENS: u32 = 131_072;

/// Of one seed, which only settles ties: what chance does is in the uncertainty.
const SEED: u64 = 1;

/// Makes the report of a record; `path` serves messages.
///
/// # Errors
/// A line of the record is not as it should be, or a prompt is larger than the replicas.
pub fn report(text: &str, path: &Path, known: &ReportFleet) -> Result<Report, ReplayError> {
    let recorded = recorded::parse(text, path)?;
    let Recorded { workload, lines } = &recorded;
    let mut servers = known.servers.clone();
    for server in lines.iter().filter_map(|line| line.served.as_ref()) {
        if !servers.contains(server) {
            servers.push(server.clone());
        }
    }
    let replicas = servers.len().clamp(1, 1024);
    let model = model(known, workload.piece_tokens, replicas);
    let fleet = fleet(&model);
    let arrivals: Vec<Duration> = workload.requests.iter().map(|request| request.at).collect();
    let run = |router: &dyn Fn(u64) -> Router| {
        play(&fleet, workload, &arrivals, router, SEED, &AtomicU64::new(0)).map_err(ReplayError::from)
    };
    let placed = |places: Vec<usize>| {
        let places: Arc<[RankId]> = places.into_iter().map(|at| RankId(at as u16)).collect();
        run(&|_| Router::Rival(Box::new(Rival::placed(Arc::clone(&places), replicas as u16))))
    };
    let of_policy = |policy: PolicyName| {
        let cache_blocks = fleet.cache_blocks() as usize;
        run(&|seed| policy.router(&Weights::default(), replicas as u16, cache_blocks, seed))
    };
    // A request whose line was lost counts as one of a round robin.
    let did = |(at, line): (usize, &Line)| {
        let served = |name: &String| servers.iter().position(|server| server == name);
        line.served.as_ref().and_then(served).unwrap_or(at) % replicas
    };
    let by_session = |(at, line): (usize, &Line)| {
        let key = line.session.map_or(at as u64, |session| session ^ 1 << 40);
        (xxhash_rust::xxh3::xxh3_64(&key.to_le_bytes()) % replicas as u64) as usize
    };
    let played = [
        ("HAProxy did", placed(lines.iter().enumerate().map(did).collect())?),
        ("kvspoa", of_policy(PolicyName::Cost)?),
        ("session hash", placed(lines.iter().enumerate().map(by_session).collect())?),
        ("prefix hash", of_policy(PolicyName::PrefixHash)?),
    ];
    let prompts: Vec<u32> = lines.iter().map(|line| line.prompt_tokens).collect();
    let warm_up = (lines.len() as f64 * WARM_UP) as usize;
    let ways: Vec<Way> = played.iter().map(|(way, played)| Way::of(way, played, &prompts, warm_up)).collect();
    let [(_, haproxy), (_, kvspoa), ..] = &played;
    let saved = saved_seconds(&haproxy.records[warm_up..], &kvspoa.records[warm_up..]);
    let base = ways.first().map_or(0.0, |way| way.ttft_mean_seconds).max(f64::MIN_POSITIVE);
    let (saving, uncertainty) = (saved.mean / base, 2.0 * saved.standard_error / base);
    let counted = &lines[warm_up..];
    let of_prompts = |tokens: fn(&Line) -> u32| {
        let all: f64 = counted.iter().map(|line| f64::from(line.prompt_tokens)).sum();
        counted.iter().map(|line| f64::from(tokens(line))).sum::<f64>() / all.max(1.0)
    };
    let mut report = Report {
        requests: lines.len(),
        counted: counted.len(),
        seconds: arrivals.last().map_or(0.0, Duration::as_secs_f64),
        served: lines.iter().filter(|line| line.served.is_some()).count(),
        routed: lines.iter().filter(|line| line.mode == "on").count(),
        repeated_share: repeated_share(lines, warm_up),
        index_served_share: of_prompts(|line| line.served_cached),
        index_chosen_share: of_prompts(|line| line.chosen_cached),
        model,
        ways,
        saving,
        uncertainty,
        verdict: Verdict::Undecided,
        because: Vec::new(),
    };
    report.judge();
    Ok(report)
}

fn model(known: &ReportFleet, block_tokens: u32, replicas: usize) -> Model {
    Model {
        replicas,
        block_tokens,
        gpu_blocks: known.gpu_blocks.unwrap_or((USUAL_CACHE_TOKENS / block_tokens).max(1)).max(1),
        cpu_blocks: known.cpu_blocks.unwrap_or(0),
        prefill_tokens_per_second: known
            .prefill_tokens_per_second
            .filter(|rate| *rate > 1.0)
            .unwrap_or(Timing::default().prefill_tokens_per_second),
    }
}

fn fleet(model: &Model) -> Fleet {
    let engine = EngineConfig {
        block_tokens: model.block_tokens,
        // The engine sets one aside.
        blocks: model.gpu_blocks.saturating_add(1),
        offload: (model.cpu_blocks > 0).then_some(OffloadConfig {
            blocks: model.cpu_blocks,
            chunk_blocks: 1,
            describes: false,
        }),
        step_tokens: 2048,
        sequences: 256,
        timing: Timing { prefill_tokens_per_second: model.prefill_tokens_per_second, ..Timing::default() },
    };
    let event_lag = Duration::from_millis(5);
    Fleet { engines: vec![engine; model.replicas], event_lag, agents: 1, ..Fleet::default() }
}

impl Way {
    fn of(way: &'static str, played: &Played, prompts: &[u32], warm_up: usize) -> Self {
        let slo = Slo { ttft: Duration::ZERO, tpot: Duration::ZERO };
        let outcome = Outcome::of(&played.records, prompts, &played.busy, warm_up, slo);
        let cached_share = outcome.gpu_hit + outcome.cpu_hit;
        let tokens: f64 = prompts[warm_up..].iter().map(|tokens| f64::from(*tokens)).sum();
        Self {
            way,
            cached_share,
            prefilled_tokens: (tokens * (1.0 - cached_share)).round() as u64,
            ttft_mean_seconds: outcome.ttft_mean_seconds,
            ttft_p50_seconds: outcome.ttft_p50_seconds,
            ttft_p90_seconds: outcome.ttft_p90_seconds,
            busy_balance: outcome.busy_balance,
        }
    }
}

/// A mean of time saved a request.
struct Saved {
    mean: f64,
    standard_error: f64,
}

/// By the means of parts in time.
fn saved_seconds(before: &[Record], after: &[Record]) -> Saved {
    let saved: Vec<f64> = before
        .iter()
        .zip(after)
        .map(|(before, after)| before.ttft_seconds() - after.ttft_seconds())
        .collect();
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
    let parts: Vec<f64> = saved.chunks(saved.len().div_ceil(PARTS).max(1)).map(mean).collect();
    let of_parts = mean(&parts);
    let squares: f64 = parts.iter().map(|part| (part - of_parts).powi(2)).sum();
    let variance = squares / parts.len().saturating_sub(1).max(1) as f64;
    Saved { mean: mean(&saved), standard_error: (variance / parts.len().max(1) as f64).sqrt() }
}

/// The share of prompt tokens behind the warm-up whose blocks had come before.
fn repeated_share(lines: &[Line], warm_up: usize) -> f64 {
    let mut seen = HashSet::new();
    let (mut repeated, mut all) = (0.0, 0.0);
    for (at, line) in lines.iter().enumerate() {
        let blocks = line.blocks.iter().flat_map(|(first, count)| *first..first + u64::from(*count));
        let again = blocks.filter(|block| !seen.insert(*block)).count();
        if at >= warm_up {
            repeated += again as f64 * f64::from(line.block_tokens);
            all += f64::from(line.prompt_tokens);
        }
    }
    if all > 0.0 { repeated / all } else { 0.0 }
}

impl Report {
    fn judge(&mut self) {
        let percent = |share: f64| format!("{:.1} %", share * 100.0);
        let [haproxy, kvspoa, others @ ..] = &self.ways[..] else { return };
        let mut because = Vec::new();
        let is_sure = self.saving - self.uncertainty > 0.0;
        let could_be = self.saving + self.uncertainty >= LEAST_SAVING;
        self.verdict = if self.counted < LEAST_REQUESTS {
            because.push(format!("only {} requests count; {LEAST_REQUESTS} is the least", self.counted));
            Verdict::Undecided
        } else if is_sure && self.saving >= LEAST_SAVING {
            because.push(format!(
                "caches would serve {} of the prompt tokens instead of {}",
                percent(kvspoa.cached_share),
                percent(haproxy.cached_share)
            ));
            Verdict::WorthIt
        } else if could_be && self.repeated_share >= LEAST_SAVING {
            because.push(
                "it may be, but chance explains as much: record for longer, or under more load".to_owned(),
            );
            Verdict::Undecided
        } else {
            Verdict::NotWorthIt
        };
        if self.verdict == Verdict::NotWorthIt {
            because.push(if self.repeated_share < LEAST_SAVING {
                format!("only {} of the prompt tokens ever come again: there is nothing to find cached", percent(self.repeated_share))
            } else if self.routed * 2 > self.requests {
                "most requests went where kvspoa said already: what is compared with is no longer HAProxy's own way".to_owned()
            } else if haproxy.cached_share > 0.9 * kvspoa.cached_share {
                "HAProxy's own way finds nearly as much cached".to_owned()
            } else {
                "more would be found cached, but at this load hardly anybody waits less for it".to_owned()
            });
        }
        let as_good = |way: &&Way| way.ttft_mean_seconds <= AS_GOOD * kvspoa.ttft_mean_seconds;
        if self.verdict == Verdict::WorthIt
            && let Some(way) = others.iter().find(as_good)
        {
            because.push(format!("a {} in HAProxy would do about as well here", way.way));
        }
        self.because = because;
    }

    /// The report in words.
    #[must_use]
    pub fn text(&self) -> String {
        let mut out = String::new();
        let model = &self.model;
        let _ = writeln!(
            out,
            "{} requests in {:.0} s ({} behind the warm-up count), {} with their log line, {} of them routed by kvspoa.",
            self.requests, self.seconds, self.counted, self.served, self.routed
        );
        let _ = writeln!(
            out,
            "By the index: the servers that HAProxy used held {:.1} % of the prompt tokens, those that kvspoa chose {:.1} %.\n\
             {:.1} % of them had come before anywhere.\n",
            self.index_served_share * 100.0,
            self.index_chosen_share * 100.0,
            self.repeated_share * 100.0
        );
        let _ = writeln!(
            out,
            "| way          | cached | prefilled tokens | TTFT mean |   p50 |   p90 | busy max/mean |"
        );
        let _ = writeln!(
            out,
            "|--------------|-------:|-----------------:|----------:|------:|------:|--------------:|"
        );
        for way in &self.ways {
            let _ = writeln!(
                out,
                "| {:12} | {:5.1}% | {:16} | {:9.3} | {:5.3} | {:5.3} | {:13.2} |",
                way.way,
                way.cached_share * 100.0,
                way.prefilled_tokens,
                way.ttft_mean_seconds,
                way.ttft_p50_seconds,
                way.ttft_p90_seconds,
                way.busy_balance
            );
        }
        let _ = writeln!(
            out,
            "\nThe table is estimated: the recorded requests through {} modelled replicas of {} GPU and {} CPU blocks of {}\n\
             tokens, which prefill {:.0} tokens/s; answers are as long as they took. Seconds.\n",
            model.replicas,
            model.gpu_blocks,
            model.cpu_blocks,
            model.block_tokens,
            model.prefill_tokens_per_second
        );
        let verdict = match self.verdict {
            Verdict::WorthIt => "Worth it",
            Verdict::NotWorthIt => "Not worth it",
            Verdict::Undecided => "Undecided",
        };
        let _ = writeln!(out, "{verdict}: {}.", self.because.join("; "));
        let _ = writeln!(
            out,
            "The mean time to first token would change by {:+.1} % (± {:.1}, two standard errors). As a rule of thumb, it is worth it\n\
             from -{:.0} % on, and beyond its uncertainty.",
            -self.saving * 100.0,
            self.uncertainty * 100.0,
            LEAST_SAVING * 100.0
        );
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::recorded::tests::{line, text};

    fn made(lines: &[Line], known: &ReportFleet) -> Report {
        report(&text(lines), Path::new("r"), known).expect("a report")
    }

    /// Conversations of several turns over one system prompt, in turn on each of two servers.
    fn chats() -> Vec<Line> {
        let mut lines = Vec::new();
        for turn in 0..8_u32 {
            for user in 0..12_u64 {
                let own = (1_000 * (user + 1), 20 * (turn + 1));
                let at = u64::from(turn) * 2_000 + user * 150;
                let served = if lines.len() % 2 == 0 { "s1" } else { "s2" };
                // Another order in each turn, as of people.
                let served = if turn % 2 == 0 { served } else { ["s2", "s1"][usize::from(served == "s2")] };
                lines.push(line(at, user, &[(1, 4), own], 16 * (4 + own.1) + 5, served));
            }
        }
        lines
    }

    #[test]
    fn conversations_that_are_torn_apart_are_worth_it() {
        let known = ReportFleet { gpu_blocks: Some(2_000), ..ReportFleet::default() };
        let report = made(&chats(), &known);
        assert_eq!(report.verdict, Verdict::WorthIt, "{}", report.text());
        assert!(report.saving > report.uncertainty && report.repeated_share > 0.5, "{}", report.text());
        let [haproxy, kvspoa, session, _] = &report.ways[..] else { panic!("four ways") };
        assert!(kvspoa.cached_share > haproxy.cached_share + 0.1, "{}", report.text());
        assert!(session.cached_share > haproxy.cached_share, "a session stays where it was");
        assert_eq!(report.model.replicas, 2);
        assert!(report.text().contains("Worth it: "));
    }

    #[test]
    fn prompts_that_have_nothing_in_common_are_not() {
        let lines: Vec<Line> = (0..120)
            .map(|at| line(at * 200, at, &[(1 + 100 * at, 30)], 490, ["s1", "s2"][at as usize % 2]))
            .collect();
        let report = made(&lines, &ReportFleet::default());
        assert_eq!(report.verdict, Verdict::NotWorthIt, "{}", report.text());
        assert!(report.because[0].contains("ever come again"), "{:?}", report.because);
    }

    #[test]
    fn few_requests_decide_nothing() {
        let report = made(&chats()[..20], &ReportFleet::default());
        assert_eq!(report.verdict, Verdict::Undecided);
        assert!(report.text().contains("only 16 requests count"), "{}", report.text());
    }
}
