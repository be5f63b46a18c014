//! Whether requests reach the agent, match, and are told to have ended.

use crate::doctor::{
    facts::{Facts, ThroughFacts},
    report::Judge,
    samples::Samples,
};

const LOG: &str = "in the frontend: the two lines of `kvspoa haproxy-config frontend`, behind a log format of its own such as \
                   `option httplog`; the address must be the agent's `log.listen`, and UDP be open between the two";

/// So many decisions without a line of log are no accident.
const DECISIONS_WITHOUT_LINE: f64 = 20.0;

pub(super) fn judge(facts: &Facts, judge: &mut Judge<'_>) {
    if let Some(through) = &facts.through {
        sent(through, judge);
    }
    let Ok(samples) = &facts.agent.samples else { return };
    let counted = facts.through.as_ref().is_some_and(|through| through.counted.is_some());
    log_lines(samples, counted, judge);
    let nothing = facts.agent.readiness.as_ref().map(|readiness| readiness.nothing_matches.as_slice());
    match nothing {
        Some([]) if samples.sum("kvspoa_matched_tokens_total", &[]) > 0.0 => {
            judge.ok("matching", "prompts match what the replicas hold");
        }
        Some([]) | None => {}
        Some(pools) => judge.fail(
            "matching",
            format!("no prompt ever matched, although the replicas publish blocks: {}", pools.join(", ")),
            "the tokens above say whether model_dir is the engine's; else the traffic has nothing in common",
        ),
    }
}

fn sent(through: &ThroughFacts, judge: &mut Judge<'_>) {
    let url = &through.url;
    let answer = match &through.answer {
        Err(why) => {
            judge.fail(
                "through",
                format!("no answer through {url}: {why}"),
                "is this the address of HAProxy's frontend?",
            );
            return;
        }
        Ok(answer) => answer,
    };
    if answer.status != 200 {
        judge.fail(
            "through",
            format!("{url} answers with status {}", answer.status),
            "does the frontend send /v1/chat/completions to the backend, and does the engine take it?",
        );
        return;
    }
    match through.counted {
        Some((decisions, _)) if decisions < 1.0 => {
            judge.fail(
                "through",
                format!("a request through {url} was answered, but HAProxy did not ask the agent"),
                "is the `kvspoa: backend` snippet in the backend that serves it, and the agent's server UP in `show stat`?",
            );
            return;
        }
        Some((_, ends)) if ends < 1.0 => {
            judge.fail("log_line", "the request's end was never told: bookings do not end", LOG);
        }
        Some(_) => judge.ok("log_line", "the request's log line arrived: its booking has ended"),
        None => {}
    }
    if !answer.is_event_stream {
        judge.warn(
            "streaming",
            "a streamed answer came as a whole",
            "does something on the way collect answers?",
        );
    } else if answer.pieces <= 1 {
        judge.warn(
            "streaming",
            "all events of a streamed answer came at once",
            "option http-no-delay in the backend; is there a cache or compression on the way?",
        );
    } else {
        judge.ok(
            "streaming",
            format!("a streamed answer came in {} pieces over {} ms", answer.pieces, answer.spread_ms),
        );
    }
}

fn log_lines(samples: &Samples, is_proved: bool, judge: &mut Judge<'_>) {
    let lines = |kind| samples.sum("kvspoa_haproxy_log_lines_total", &[("kind", kind)]);
    let decisions = samples.sum("kvspoa_decisions_total", &[]);
    if lines("without_fields") + lines("malformed") > 0.0 {
        judge.fail(
            "log_fields",
            format!(
                "HAProxy sent {} log lines without our fields, {} that are not understood",
                lines("without_fields"),
                lines("malformed")
            ),
            LOG,
        );
    }
    if is_proved {
        return;
    }
    let ends = lines("end");
    if ends > 0.0 {
        judge.ok("log_line", format!("{ends} log lines arrived, for {decisions} decisions"));
    } else if decisions >= DECISIONS_WITHOUT_LINE {
        judge.fail(
            "log_line",
            format!("{decisions} decisions, and no log line ever came: bookings do not end"),
            LOG,
        );
    } else {
        judge.warn(
            "log_line",
            "there was no traffic yet that could prove the log line",
            "--through http://HAPROXY:PORT sends one request through HAProxy and watches for it",
        );
    }
}
