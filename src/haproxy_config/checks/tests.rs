//! Each rule, by a site that breaks it.

use std::path::Path;

use crate::haproxy_config::{Finding, Form, HaproxyCfg, HaproxyVersion, Severity, Site, findings, spoe};

/// A site that is found nothing of.
const GOOD: &str = "global
    maxconn 1000
    tune.bufsize 1048576
    stats socket /run/haproxy/admin.sock level admin
defaults
    mode http
    log global
    option httplog
    option abortonclose
frontend www
    default_backend llm
backend llm
    balance leastconn
    server r1 10.0.0.1:8000
";

fn site() -> Site {
    Site {
        version: HaproxyVersion::OLDEST,
        pools: vec!["llm".to_owned()],
        agent: "127.0.0.1:9101".to_owned(),
        log_to: "127.0.0.1:9103".to_owned(),
        memory_bytes: Some(64 << 30),
    }
}

fn found_in(text: &str, site: &Site) -> Vec<Finding> {
    let mut cfg = HaproxyCfg::parse([(Path::new("h"), text)], &|_| None).expect("well formed");
    let waf =
        "[waf]\nspoe-agent a\n use-backend waf\n max-frame-size 16380\nspoe-message m\n args body=req.body\n";
    let open = "spoe-agent a\n use-backend waf\nspoe-message m\n args src\n";
    for (name, text) in [("waf.conf", waf), ("open.conf", open)] {
        cfg.spoe
            .insert(name.to_owned(), spoe::agents(Path::new(name), text, &|_| None).expect("well formed"));
    }
    findings(&cfg, site)
}

/// As in `Refusal Mode h:7`.
fn said(found: &[Finding]) -> Vec<String> {
    let place =
        |finding: &Finding| finding.place.as_ref().map(|place| format!(" {place}")).unwrap_or_default();
    found
        .iter()
        .map(|finding| format!("{:?} {:?}{}", finding.severity, finding.kind, place(finding)))
        .collect()
}

#[track_caller]
fn assert_found(change: (&str, &str), site: &Site, expected: &[&str]) {
    assert!(GOOD.contains(change.0), "{}", change.0);
    let mut found = found_in(&GOOD.replacen(change.0, change.1, 1), site);
    found.retain(|finding| finding.kind != crate::haproxy_config::FindingKind::Memory);
    assert_eq!(said(&found), expected, "{change:?}: {found:#?}");
}

#[test]
fn a_good_site_has_nothing_but_its_price() {
    assert_eq!(said(&found_in(GOOD, &site())), ["Note Memory h:3"]);
}

#[test]
fn what_would_break_the_site_or_us_is_refused_at_its_place() {
    let big = "tune.bufsize 8454144\n    stats";
    for (change, expected) in [
        (("    server r1 10.0.0.1:8000\n", ""), "Refusal Servers h:12"),
        (("10.0.0.1:8000", "0.0.0.0:0"), "Refusal Servers h:14"),
        (("    balance", "    dispatch 10.0.0.1:1\n    balance"), "Refusal Servers h:13"),
        (("    balance", "    mode tcp\n    balance"), "Refusal Mode h:13"),
        (("    default_backend", "    mode tcp\n    default_backend"), "Refusal Mode h:11"),
        (("\nbackend llm\n", "\nbackend other\n    server x 1.2.3.4:5\nbackend none\n"), "Refusal NoBackend"),
        (("    option httplog\n", ""), "Refusal NoLogFormat h:9"),
        (("    default_backend", "    log-format-sd [a@1]\n    default_backend"), "Refusal LogFormatSd h:11"),
        (("    option httplog", "    option httplog\n    log-format-sd [a@1]"), "Refusal LogFormatSd h:9"),
        (("    balance", "    compression algo gzip\n    balance"), "Refusal Filter h:13"),
        (("    option httplog", "    option httplog\n    compression algo gzip"), "Refusal Filter h:9"),
        (("    balance", "    http-response cache-store c\n    balance"), "Refusal Filter h:13"),
        (("    balance", "    filter spoe engine kvspoa config x\n    balance"), "Refusal NameTaken h:13"),
        (
            ("    balance", "    filter spoe engine waf config waf.conf\n    balance"),
            "Refusal FrameCap waf.conf:4",
        ),
    ] {
        let mut found = found_in(&GOOD.replacen(change.0, change.1, 1), &site());
        found.retain(|finding| finding.severity == Severity::Refusal);
        assert_eq!(said(&found), [expected], "{change:?}");
        assert!(!found[0].remedy.is_empty());
    }
    let text =
        GOOD.replacen("tune.bufsize 1048576\n    stats", big, 1) + "backend waf\n    option spop-check\n";
    assert!(said(&found_in(&text, &site())).contains(&"Refusal SpopCheck h:16".to_owned()));
}

#[test]
fn what_only_gets_worse_is_a_warning() {
    let site = site();
    for (change, expected) in [
        (("tune.bufsize 1048576", "tune.bufsize 16384"), "Warning BufsizeSmall h:3"),
        (("tune.bufsize 1048576", "tune.bufsize x"), "Warning BufsizeSmall h:3"),
        (("    stats socket /run/haproxy/admin.sock level admin\n", ""), "Warning RuntimeSocket"),
        (("level admin", "level user"), "Note RuntimeSocket h:4"),
        (("    balance", "    use-server r1 if TRUE\n    balance"), "Warning UseServer h:13"),
        (("    balance", "    cookie S insert\n    balance"), "Warning Affinity h:13"),
        (("    balance", "    stick on src\n    balance"), "Warning Affinity h:13"),
        (("    balance", "    no option abortonclose\n    balance"), "Warning OptionOff h:13"),
        (("    balance", "    retries 0\n    balance"), "Warning Retries h:13"),
        (("balance leastconn", "balance roundrobin"), "Note Balance h:13"),
        (("    option abortonclose\n", ""), "Note ClientsThatLeave h:11"),
        (("    option httplog", "    option httplog\n    option logasap"), "Warning LogLines h:9"),
        (("    option httplog", "    option httplog\n    option dontlog-normal"), "Warning LogLines h:9"),
        (
            ("    default_backend", "    http-request set-log-level silent\n    default_backend"),
            "Warning LogLines h:11",
        ),
        (
            ("    default_backend", "    log x format rfc5424 local0\n    default_backend"),
            "Note LogTarget h:11",
        ),
        (("    default_backend llm", "    default_backend x"), "Warning NoFrontend h:12"),
        (("    balance", "    filter spoe engine o config open.conf\n    balance"), "Warning FrameCap h:13"),
        (("    balance", "    filter spoe engine o config gone.conf\n    balance"), "Warning SpoeFile h:13"),
        (("    maxconn 1000", "    maxconn \"${MANY}\""), "Note Environment h:2"),
    ] {
        assert_found(change, &site, &[expected]);
    }
    let unix = Site { agent: "/run/kvspoa/spop.sock".to_owned(), ..site.clone() };
    assert_found(("    maxconn", "    chroot /var/lib/haproxy\n    maxconn"), &unix, &["Warning Chroot h:2"]);
    let poor = Site { memory_bytes: Some(2 << 30), ..site };
    assert_eq!(said(&found_in(GOOD, &poor)), ["Warning Memory h:3"]);
}

#[test]
fn a_condition_makes_a_refusal_a_warning() {
    for (change, expected) in [
        (("    balance", ".if TRUE\n    mode tcp\n.endif\n    balance"), "Warning Mode h:14"),
        (("    option httplog", ".if TRUE\n    option httplog\n.endif"), "Warning NoLogFormat h:12"),
        (
            ("    default_backend", ".if TRUE\n    log-format-sd [a@1]\n.endif\n    default_backend"),
            "Warning LogFormatSd h:12",
        ),
    ] {
        assert_found(change, &site(), &[expected]);
    }
}

#[test]
fn newer_versions_have_lost_what_older_ones_suffer_from() {
    let text = GOOD.replacen("1048576", "8454144", 1) + "backend waf\n    option spop-check\n";
    let newer = Site { version: HaproxyVersion::new(3, 1), memory_bytes: None, ..site() };
    assert_eq!(said(&found_in(&text, &newer)), ["Note Memory h:3"]);
    let older = Site { version: HaproxyVersion::new(2, 4), ..site() };
    assert_found(("", ""), &older, &["Refusal OldVersion"]);
}

#[test]
fn our_lines_in_place_are_no_finding_unless_something_takes_them_away() {
    let frontend = Form::Frontend.source();
    let with = |before: &str, after: &str| {
        let text =
            GOOD.replacen("    default_backend", &format!("{before}{frontend}{after}    default_backend"), 1);
        let text = text + Form::Backend.source();
        let mut found = found_in(&text, &site());
        found.retain(|finding| finding.kind != crate::haproxy_config::FindingKind::Memory);
        found.iter().map(|finding| format!("{:?} {:?}", finding.severity, finding.kind)).collect::<Vec<_>>()
    };
    assert_eq!(with("", ""), [""; 0]);
    assert_eq!(with("    no log\n", ""), [""; 0]);
    assert_eq!(with("", "    no log\n"), ["Refusal NoLog"]);
    assert_eq!(with("", "    log-format-sd [a@1]\n"), ["Refusal LogFormatSd"]);
    assert_eq!(with("    log-format-sd [a@1]\n", ""), [""; 0], "ours is the last one");
    assert_eq!(with("    use-server r1\n", ""), [""; 0], "not in the backend");
}

#[test]
fn a_finding_is_one_line_that_says_where_what_and_what_to_do() {
    let text = GOOD.replacen("    option httplog\n", "", 1);
    let said = found_in(&text, &site()).first().map(ToString::to_string);
    assert_eq!(
        said.as_deref(),
        Some(
            "h:9: refused: `www` has no log format, and then HAProxy ignores ours: no request would be seen to end. \
             Give it, or its `defaults`, `option httplog`."
        )
    );
}
