//! The log lines by which the agent learns of the end of requests.

use crate::haproxy_config::{
    cfg::{HaproxyCfg, Line, Section},
    findings::{Finding, FindingKind as Kind, Severity},
    ours::{frontend_line, is_log_format},
};

pub(in super::super) fn check(cfg: &HaproxyCfg, backend: &Section, found: &mut Vec<Finding>) {
    let ways = cfg.ways_to(backend);
    for (frontend, _) in &ways {
        format(cfg, frontend, found);
        targets(cfg, frontend, found);
        options(cfg, frontend, found);
    }
    let sections = ways.iter().map(|(frontend, _)| *frontend).chain([backend]);
    for line in sections.flat_map(|section| &section.lines) {
        let rule =
            matches!(line.word(0), "http-request" | "http-response" | "http-after-response" | "tcp-request");
        if rule && line.after("set-log-level") == Some("silent") {
            let what = "`set-log-level silent` keeps lines from the agent too: it learns later that these requests ended";
            let remedy = "Do not let it hold for requests of the pool";
            found.push(Finding::at(line, Severity::Warning, Kind::LogLines, what, remedy));
        }
    }
}

fn format(cfg: &HaproxyCfg, frontend: &Section, found: &mut Vec<Finding>) {
    let has_format = |line: &Line| {
        line.word(0) == "log-format"
            || ["httplog", "httpslog", "tcplog"].iter().any(|name| line.begins(&["option", name]))
    };
    let formats = cfg.deciding(frontend, has_format);
    let name = &frontend.name;
    if formats.is_empty() {
        let what = format!(
            "`{name}` has no log format, and then HAProxy ignores ours: no request would be seen to end"
        );
        let remedy = "Give it, or its `defaults`, `option httplog`";
        found.push(Finding::new(Severity::Refusal, Kind::NoLogFormat, Some(&frontend.place), what, remedy));
    } else if formats.iter().all(|line| line.conditional) {
        let what =
            format!("`{name}` has a log format under a condition only; without one, HAProxy ignores ours");
        let remedy = "Put `option httplog` outside of the condition";
        found.push(Finding::new(Severity::Warning, Kind::NoLogFormat, Some(&frontend.place), what, remedy));
    }
    for line in cfg.deciding(frontend, |line| line.word(0) == "log-format-sd") {
        if is_log_format(line) {
            continue;
        }
        let (what, remedy) = match frontend_line(frontend) {
            Some(ours) => (
                format!("this `log-format-sd` replaces ours at {}: a frontend has one", ours.place),
                "Put the element [kv@1 …] behind your own, in the one line",
            ),
            None => (
                format!("`{name}` has a `log-format-sd` already, and a frontend has one"),
                "Put the element [kv@1 …] of `haproxy-config frontend` behind your own, in this line",
            ),
        };
        found.push(Finding::at(line, Severity::Refusal, Kind::LogFormatSd, what, remedy));
    }
}

fn targets(cfg: &HaproxyCfg, frontend: &Section, found: &mut Vec<Finding>) {
    let is_5424 = |line: &&Line| line.word(0) == "log" && line.after("format") == Some("rfc5424");
    let ours = frontend_line(frontend);
    if let Some(ours) = ours {
        let after = |line: &&Line| line.begins(&["no", "log"]) && line.place.line > ours.place.line;
        if let Some(line) = frontend.lines.iter().find(after) {
            let what = "`no log` takes away the targets before it, the agent's among them";
            found.push(Finding::at(line, Severity::Refusal, Kind::NoLog, what, "Put our lines behind it"));
        }
        if !frontend.lines.iter().any(|line| is_5424(&line)) {
            let what = "our log format is here, but no target with `format rfc5424` that would send it";
            let remedy = "Take the `log` line of `haproxy-config frontend` too";
            found.push(Finding::at(ours, Severity::Refusal, Kind::NoLog, what, remedy));
        }
        return;
    }
    let inherits_global =
        cfg.inheritance(frontend).flat_map(|s| &s.lines).any(|line| line.begins(&["log", "global"]));
    let global = cfg.global().filter(|_| inherits_global);
    for line in cfg.inheritance(frontend).flat_map(|section| &section.lines).chain(global).filter(is_5424) {
        let what = "this log target will show our fields in its structured data";
        found.push(Finding::at(
            line,
            Severity::Note,
            Kind::LogTarget,
            what,
            "Nothing, if its reader allows for that",
        ));
    }
}

fn options(cfg: &HaproxyCfg, frontend: &Section, found: &mut Vec<Finding>) {
    for (option, what) in [
        ("logasap", "`option logasap` logs at the headers: load is taken off before the answer is made"),
        (
            "dontlog-normal",
            "`option dontlog-normal` logs failures alone: the agent learns later that requests ended",
        ),
    ] {
        if let Some(line) = cfg.option(frontend, option) {
            let remedy = format!("Put `no option {option}` into `{}`", frontend.name);
            found.push(Finding::at(line, Severity::Warning, Kind::LogLines, what, remedy));
        }
    }
}
