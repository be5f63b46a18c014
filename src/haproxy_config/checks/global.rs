//! The process: version, buffers and their memory, runtime socket, chroot, environment.

use crate::haproxy_config::{
    cfg::{HaproxyCfg, Line},
    findings::{Finding, FindingKind as Kind, Severity, Site},
    version::HaproxyVersion,
};

/// HAProxy's own `tune.bufsize`.
const DEFAULT_BUFSIZE: u64 = 16_384;
/// Some 50,000 tokens of JSON: below it, ordinary conversations are cut.
const SMALL_BUFSIZE: u64 = 256 * 1024;
/// What a shared site is advised to take.
const ADVISED_BUFSIZE: u64 = 1_048_576;
/// Bytes for each byte of `tune.bufsize` that a client who reads slowly may cost: 2.3 to 3 were measured
/// (haproxy/README.md, "Memory").
pub const BUFFERS_PER_CLIENT: u64 = 3;

pub(in super::super) fn check(cfg: &HaproxyCfg, site: &Site, found: &mut Vec<Finding>) {
    if site.version < HaproxyVersion::OLDEST {
        let what = format!("HAProxy {} is too old", site.version);
        found.push(Finding::new(Severity::Refusal, Kind::OldVersion, None, what, "Use 2.6 or newer"));
    }
    buffers(cfg, site, found);
    socket(cfg, found);
    chroot(cfg, site, found);
    for (place, name) in &cfg.unset {
        let what = format!("the environment variable {name} is not set here");
        let remedy = "If HAProxy's own environment has it, set it for this command too";
        found.push(Finding::new(Severity::Note, Kind::Environment, Some(place), what, remedy));
    }
}

/// `tune.bufsize` in bytes, and the line that sets it. `None`: what it says is no size.
pub(super) fn bufsize(cfg: &HaproxyCfg) -> (Option<u64>, Option<&Line>) {
    match cfg.global().rev().find(|line| line.word(0) == "tune.bufsize") {
        Some(line) => (size(line.word(1)), Some(line)),
        None => (Some(DEFAULT_BUFSIZE), None),
    }
}

/// A number with or without one of the units of the manual's §2.6.
fn size(text: &str) -> Option<u64> {
    let (digits, shift) = match text.as_bytes().last()? {
        b'k' | b'K' => (text.get(..text.len() - 1)?, 10),
        b'm' | b'M' => (text.get(..text.len() - 1)?, 20),
        b'g' | b'G' => (text.get(..text.len() - 1)?, 30),
        _ => (text, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

fn buffers(cfg: &HaproxyCfg, site: &Site, found: &mut Vec<Finding>) {
    let (bytes, line) = bufsize(cfg);
    let place = line.map(|line| &line.place);
    let Some(bytes) = bytes else {
        let what = "`tune.bufsize` is not a number";
        found.push(Finding::new(Severity::Warning, Kind::BufsizeSmall, place, what, "Write it in bytes"));
        return;
    };
    let maxconn = cfg.global().rev().find(|line| line.word(0) == "maxconn");
    let maxconn: Option<u64> = maxconn.and_then(|line| line.word(1).parse().ok());
    let price = |bytes: u64| {
        let client = bytes.saturating_mul(BUFFERS_PER_CLIENT);
        let all = maxconn.map(|clients| (clients, client.saturating_mul(clients)));
        let of_all = all.map(|(clients, all)| format!(", {} for the {clients} of `maxconn`", mib(all)));
        format!("up to {} for each client that reads slowly{}", mib(client), of_all.unwrap_or_default())
    };
    if bytes < SMALL_BUFSIZE {
        let what = format!("`tune.bufsize` is {bytes}: of a longer request kvspoa sees the beginning only");
        let remedy =
            format!("Set `tune.bufsize {ADVISED_BUFSIZE}` in `global`. It costs {}", price(ADVISED_BUFSIZE));
        found.push(Finding::new(Severity::Warning, Kind::BufsizeSmall, place, what, remedy));
        return;
    }
    let all = maxconn.map(|clients| clients.saturating_mul(bytes).saturating_mul(BUFFERS_PER_CLIENT));
    let too_much = all.zip(site.memory_bytes).is_some_and(|(all, memory)| all > memory);
    let severity = if too_much { Severity::Warning } else { Severity::Note };
    let remedy = match (too_much, maxconn) {
        (true, _) => "That is more than this machine has: lower `maxconn` or `tune.bufsize`",
        (false, None) => "Set `maxconn`, so that it has a bound",
        (false, Some(_)) => "Keep it in view when you raise either",
    };
    let what = format!("`tune.bufsize {bytes}` costs {}", price(bytes));
    found.push(Finding::new(severity, Kind::Memory, place, what, remedy));
}

fn mib(bytes: u64) -> String {
    match bytes >> 20 {
        0 => format!("{} KiB", bytes >> 10),
        mib if mib < 10_240 => format!("{mib} MiB"),
        mib => format!("{} GiB", mib >> 10),
    }
}

fn socket(cfg: &HaproxyCfg, found: &mut Vec<Finding>) {
    let sockets: Vec<&Line> = cfg.global().filter(|line| line.begins(&["stats", "socket"])).collect();
    let can_switch = |line: &&Line| line.after("level") == Some("admin");
    if sockets.is_empty() {
        found.push(Finding::new(
            Severity::Warning,
            Kind::RuntimeSocket,
            None,
            "`global` has no `stats socket`: kvspoa would not learn of servers, states and weights",
            "Add `stats socket /run/haproxy/kvspoa.sock mode 660 group kvspoa level user`",
        ));
    } else if !sockets.iter().any(can_switch) {
        found.push(Finding::new(
            Severity::Note,
            Kind::RuntimeSocket,
            sockets.first().map(|line| &line.place),
            "no `stats socket` has `level admin`: it is enough for kvspoa, but cannot switch it off",
            "Add one, or stop kvspoa to switch it off",
        ));
    }
}

fn chroot(cfg: &HaproxyCfg, site: &Site, found: &mut Vec<Finding>) {
    let Some(chroot) = cfg.global().rev().find(|line| line.word(0) == "chroot") else { return };
    for (path, what) in [(&site.agent, "the agent's socket"), (&site.log_to, "the socket of log lines")] {
        if path.starts_with('/') {
            let what = format!("HAProxy is chrooted, and looks for {what} at {}{path}", chroot.word(1));
            let remedy = "Make it available there, or use ADDRESS:PORT";
            found.push(Finding::at(chroot, Severity::Warning, Kind::Chroot, what, remedy));
        }
    }
}
