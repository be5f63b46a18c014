//! The backend of the inference engines, and what leads to it.

use crate::haproxy_config::{
    cfg::{HaproxyCfg, Line, Section},
    findings::{Finding, FindingKind as Kind, Severity, Site},
    ours::{BackendLines, use_server},
    version::HaproxyVersion,
};

pub(in super::super) fn missing(cfg: &HaproxyCfg, pool: &str) -> Finding {
    let names: Vec<&str> = cfg.sections(Section::is_backend).map(|section| section.name.as_str()).collect();
    let what = format!("there is no backend `{pool}`");
    let remedy = format!("Name one that there is: {}", names.join(", "));
    Finding::new(Severity::Refusal, Kind::NoBackend, None, what, remedy)
}

pub(in super::super) fn check(cfg: &HaproxyCfg, site: &Site, backend: &Section, found: &mut Vec<Finding>) {
    let ways = cfg.ways_to(backend);
    if ways.is_empty() {
        let what = format!("no frontend leads to `{}`", backend.name);
        let remedy = "Name every file that HAProxy loads, in its order";
        found.push(Finding::new(Severity::Warning, Kind::NoFrontend, Some(&backend.place), what, remedy));
    }
    for section in ways.iter().map(|(frontend, _)| *frontend).chain([backend]) {
        mode(cfg, section, found);
    }
    servers(backend, found);
    rules(backend, found);
    filters(cfg, backend, found);
    options(cfg, site, backend, found);
}

fn mode(cfg: &HaproxyCfg, section: &Section, found: &mut Vec<Finding>) {
    let lines = cfg.deciding(section, |line| line.word(0) == "mode");
    let kind = format!("{:?}", section.kind).to_lowercase();
    let remedy = "Put `mode http` into it";
    for line in lines.iter().filter(|line| line.word(1) != "http") {
        let what = format!("{kind} `{}` has `mode {}`: kvspoa reads HTTP", section.name, line.word(1));
        found.push(Finding::at(line, Severity::Refusal, Kind::Mode, what, remedy));
    }
    if lines.iter().all(|line| line.conditional) {
        let what = format!(
            "{kind} `{}` has no `mode http` that holds in any case, and HAProxy's default is tcp",
            section.name
        );
        let severity = if lines.is_empty() { Severity::Refusal } else { Severity::Warning };
        found.push(Finding::new(severity, Kind::Mode, Some(&section.place), what, remedy));
    }
}

fn servers(backend: &Section, found: &mut Vec<Finding>) {
    let is_server = |line: &&Line| matches!(line.word(0), "server" | "server-template");
    if !backend.lines.iter().any(|line| is_server(&line)) {
        let what = format!("`{}` has no `server`, so there is nothing to choose from", backend.name);
        let remedy = "Give every replica a `server` line of its own, or a slot of `server-template`";
        found.push(Finding::new(Severity::Refusal, Kind::Servers, Some(&backend.place), what, remedy));
    }
    for line in &backend.lines {
        let any = ["0.0.0.0:0", "0.0.0.0", "*:0", "*", ":::0", "[::]:0"].contains(&line.word(2));
        if line.word(0) == "server" && any && !line.words.iter().any(|word| word == "disabled") {
            let what = format!(
                "server `{}` goes wherever `set-dst` says: its name does not name a replica",
                line.word(1)
            );
            let remedy = "Give every replica a `server` line of its own";
            found.push(Finding::at(line, Severity::Refusal, Kind::Servers, what, remedy));
        }
        if line.word(0) == "dispatch" || line.begins(&["option", "transparent"]) {
            let what = format!("`{}` sends requests past the servers", line.words.join(" "));
            let remedy = "Give every replica a `server` line, and take this one out";
            found.push(Finding::at(line, Severity::Refusal, Kind::Servers, what, remedy));
        }
    }
}

/// Rules that choose a server, beside ours.
fn rules(backend: &Section, found: &mut Vec<Finding>) {
    let before_ours = backend.lines.iter().take_while(|line| use_server(line).is_none());
    for line in before_ours.filter(|line| line.word(0) == "use-server") {
        let what = "this `use-server` stands before ours and wins: such requests go where it says";
        let remedy = "Keep it if that is wanted; else take it out";
        found.push(Finding::at(line, Severity::Warning, Kind::UseServer, what, remedy));
    }
    let sticks = |line: &Line| line.word(0) == "stick" && matches!(line.word(1), "on" | "match");
    for line in backend.lines.iter().filter(|line| line.word(0) == "cookie" || sticks(line)) {
        let what = format!("`{} {}` yields where the agent names a server", line.word(0), line.word(1));
        let remedy =
            "Nothing, if sessions are there for the cache; kvspoa keeps conversations together by itself";
        found.push(Finding::at(line, Severity::Warning, Kind::Affinity, what, remedy));
    }
}

/// HAProxy adds these filters by itself only where a proxy has no other.
fn filters(cfg: &HaproxyCfg, backend: &Section, found: &mut Vec<Finding>) {
    let undeclared = |filter: &str, wanted: &dyn Fn(&Line) -> bool| {
        let declared = backend.lines.iter().any(|line| line.begins(&["filter", filter]));
        cfg.deciding(backend, wanted).into_iter().next().filter(|_| !declared)
    };
    if let Some(line) = undeclared("compression", &|line| line.word(0) == "compression") {
        let what = "HAProxy refuses `compression` beside another filter that is not declared";
        let remedy = format!("Put `filter compression` into `{}`, before our lines", backend.name);
        found.push(Finding::at(line, Severity::Refusal, Kind::Filter, what, remedy));
    }
    if let Some(line) = undeclared("cache", &|line| matches!(line.word(1), "cache-use" | "cache-store")) {
        let what = "HAProxy refuses a cache beside another filter that is not declared";
        let remedy = format!("Put `filter cache {}` into `{}`, before our lines", line.word(2), backend.name);
        found.push(Finding::at(line, Severity::Refusal, Kind::Filter, what, remedy));
    }
}

fn options(cfg: &HaproxyCfg, site: &Site, backend: &Section, found: &mut Vec<Finding>) {
    for (option, does) in [
        ("abortonclose", "requests of clients that have left are ended"),
        ("redispatch", "a server that is dead is replaced at the first retry"),
        ("http-no-delay", "streams are not held back"),
    ] {
        for line in backend.lines.iter().filter(|line| line.begins(&["no", "option", option])) {
            let what = format!("our lines switch on what this one switches off: {does}");
            let remedy = format!("If that must not be, take `option {option}` out of them");
            found.push(Finding::at(line, Severity::Warning, Kind::OptionOff, what, remedy));
        }
    }
    let in_frontends =
        || cfg.ways_to(backend).iter().all(|(way, _)| cfg.option(way, "abortonclose").is_some());
    if site.version == HaproxyVersion::OLDEST && !in_frontends() {
        let what = "HAProxy 2.6 notices some clients that leave late if `option abortonclose` is in the backend alone";
        let remedy = "Put it into the `defaults` of the frontend, if it may hold for all of its backends";
        found.push(Finding::new(Severity::Note, Kind::ClientsThatLeave, Some(&backend.place), what, remedy));
    }
    if let Some(line) = cfg.deciding(backend, |line| line.word(0) == "retries").first()
        && line.word(1) == "0"
    {
        let what = "`retries 0`: a server that has just died costs the request that was sent there";
        found.push(Finding::at(line, Severity::Warning, Kind::Retries, what, "Allow at least one"));
    }
    let balance = cfg.deciding(backend, |line| line.word(0) == "balance");
    if balance.first().is_none_or(|line| line.word(1) != "leastconn") {
        let what = format!(
            "`{}` does not use `balance leastconn`, which stands in best when kvspoa has no opinion",
            backend.name
        );
        let place = balance.first().map_or(&backend.place, |line| &line.place);
        found.push(Finding::new(Severity::Note, Kind::Balance, Some(place), what, "Consider it"));
    }
    let named_as_ours = |line: &&Line| line.begins(&["filter", "spoe", "engine", "kvspoa"]);
    if let Some(line) = backend.lines.iter().find(named_as_ours)
        && BackendLines::of(backend).is_none()
    {
        let what = "an SPOE engine of our name is here, but not all of our lines";
        let remedy = "Rename it, or replace what is there by `haproxy-config backend`";
        found.push(Finding::at(line, Severity::Refusal, Kind::NameTaken, what, remedy));
    }
}
