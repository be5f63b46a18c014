//! Other SPOE agents of the same HAProxy: a big buffer is theirs too.

use crate::haproxy_config::{
    cfg::{HaproxyCfg, Line, Section},
    findings::{Finding, FindingKind as Kind, Severity, Site},
    ours::BackendLines,
    spoe::SpoeAgent,
    version::HaproxyVersion,
};

use super::global::bufsize;

/// From here on HAProxy up to 3.0 crashes at `option spop-check`: it builds the check's frame on a stack of 8 MiB.
const CRASHING_BUFSIZE: u64 = 8 << 20;
/// What libraries for agents are known to stop at (coraza-spoa: 65,535).
const USUAL_CAP: u64 = 65_535;

pub(in super::super) fn check(cfg: &HaproxyCfg, site: &Site, found: &mut Vec<Finding>) {
    let (bytes, _) = bufsize(cfg);
    // What is no number is for HAProxy to refuse.
    let bytes = bytes.unwrap_or_default();
    for section in &cfg.sections {
        for line in &section.lines {
            if line.begins(&["option", "spop-check"]) && site.version < HaproxyVersion::SPOP_MUX {
                found.push(spop_check(line, bytes));
            }
            if let Some((engine, file)) = other_filter(section, line) {
                frames(cfg, line, engine, file, bytes, found);
            }
        }
    }
}

fn spop_check(line: &Line, bytes: u64) -> Finding {
    if bytes < CRASHING_BUFSIZE {
        let what = "`option spop-check` crashes HAProxy up to 3.0 once `tune.bufsize` is 8 MiB or more";
        let remedy = "Stay below, or use a plain `check` there";
        return Finding::at(line, Severity::Note, Kind::SpopCheck, what, remedy);
    }
    let what = format!(
        "`option spop-check` crashes HAProxy up to 3.0 at start, as `tune.bufsize` is {bytes} (8 MiB or more)"
    );
    let remedy = "Take the line out (a plain `check` is as good), or lower `tune.bufsize`";
    Finding::at(line, Severity::Refusal, Kind::SpopCheck, what, remedy)
}

/// Engine and file of an SPOE filter that is not ours.
fn other_filter<'a>(section: &Section, line: &'a Line) -> Option<(&'a str, &'a str)> {
    line.begins(&["filter", "spoe"]).then_some(())?;
    let engine = line.after("engine").unwrap_or_default();
    let is_ours = BackendLines::of(section).is_some_and(|ours| ours.engine == engine);
    (!is_ours).then_some((engine, line.after("config")?))
}

fn frames(cfg: &HaproxyCfg, line: &Line, engine: &str, file: &str, bytes: u64, found: &mut Vec<Finding>) {
    let Some(agents) = cfg.spoe_agents(file) else {
        let what = format!("{file} cannot be read, so what it asks of big buffers is not known");
        let remedy = "See that its agent takes frames as large as `tune.bufsize`";
        found.push(Finding::at(line, Severity::Warning, Kind::SpoeFile, what, remedy));
        return;
    };
    let of_engine = |agent: &&SpoeAgent| agent.engine.as_deref().is_none_or(|scope| scope == engine);
    let Some(agent) = agents.iter().find(of_engine) else { return };
    let name = if engine.is_empty() { file } else { engine };
    match (&agent.max_frame_bytes, &agent.body) {
        (Some((cap, place)), Some(body)) if (*cap as u64) < bytes.saturating_sub(4) => {
            let what = format!(
                "messages of `{name}` with a whole body ({body}) do not fit `max-frame-size {cap}` once `tune.bufsize` is \
                 {bytes}: they fail (error 3), and pass unseen by its agent"
            );
            let remedy = format!(
                "Send a part, `req.body,bytes(0,{})`, or raise the cap if its agent takes it",
                cap / 2
            );
            found.push(Finding::new(severity(line), Kind::FrameCap, Some(place), what, remedy));
        }
        (None, body) if bytes > USUAL_CAP => {
            let what = format!(
                "HAProxy offers the agent of `{name}` frames of {} bytes; many agents stop at {USUAL_CAP}",
                bytes - 4
            );
            let remedy = match body {
                Some(body) => format!("See that it takes them, or send it a part of the body ({body})"),
                None => "See that it takes the offer, or give its `spoe-agent` a `max-frame-size`".to_owned(),
            };
            found.push(Finding::at(line, Severity::Warning, Kind::FrameCap, what, remedy));
        }
        _ => {}
    }
}

fn severity(line: &Line) -> Severity {
    if line.conditional { Severity::Warning } else { Severity::Refusal }
}
