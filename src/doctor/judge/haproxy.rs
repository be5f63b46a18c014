//! HAProxy: its runtime socket, its version, its buffer.

use crate::doctor::{
    facts::{AgentFacts, Facts, Info},
    known::{self, Version},
    report::Judge,
};

/// What a buffer holds beside a frame, in bytes (`spoe_check_max_frame_size` in HAProxy).
const BUFFER_OVER_FRAME: u64 = 4;

/// A smaller buffer cuts ordinary conversations: some ten thousand tokens.
const LEAST_BUFFER_BYTES: u64 = 64 << 10;

/// What we recommend for a site that serves other things too.
const GOOD_BUFFER_BYTES: u64 = 1 << 20;

pub(super) fn judge(facts: &Facts, judge: &mut Judge<'_>) {
    match &facts.haproxy {
        None => judge.warn(
            "haproxy_socket",
            "haproxy.socket is not set: states, weights and limits of the servers are not known",
            "in HAProxy's global section: stats socket /run/haproxy/admin.sock mode 666 level user\n\
             in kvspoa.toml: haproxy.socket = \"/run/haproxy/admin.sock\"",
        ),
        Some(haproxy) => match &haproxy.info {
            Ok(info) => version(info, &haproxy.socket, judge),
            Err(why) => judge.fail(
                "haproxy_socket",
                format!("HAProxy's runtime socket does not answer: {why}"),
                "is HAProxy running, does its global section have this `stats socket` (mode 666, level user), and may \
                 this user open it?",
            ),
        },
    }
    buffer(&facts.agent, judge);
}

fn version(info: &Info, socket: &str, judge: &mut Judge<'_>) {
    let level = info.level.as_deref().map_or_else(String::new, |level| format!(", level {level}"));
    judge.ok("haproxy_socket", format!("HAProxy {} answers at {socket}{level}", info.version));
    let Some(version) = Version::parse(&info.version) else { return };
    if version < known::OLDEST {
        judge.fail(
            "haproxy_version",
            format!("HAProxy {version} is too old"),
            format!("the forms need {} or newer", known::OLDEST),
        );
        return;
    }
    let mut bugs = known::bugs(version).peekable();
    if bugs.peek().is_none() {
        judge.ok("haproxy_version", format!("no bug is known of HAProxy {version} that concerns this"));
    }
    for bug in bugs {
        judge.warn("haproxy_version", format!("HAProxy {version}: {}", bug.what), bug.advice);
    }
}

/// By the frame that HAProxy offered the agent: what its running process has, whatever the file says.
fn buffer(agent: &AgentFacts, judge: &mut Judge<'_>) {
    let Ok(samples) = &agent.samples else { return };
    let frame = samples.sum("kvspoa_spop_haproxy_frame_bytes", &[]) as u64;
    if frame == 0 {
        judge.warn(
            "haproxy_hello",
            "HAProxy has not connected to the agent since it started",
            "it does with the first request. If there were some: is the `kvspoa: backend` snippet in the backend, and the \
             agent's server UP in `show stat`?",
        );
        return;
    }
    let bytes = frame + BUFFER_OVER_FRAME;
    let advice = format!(
        "in HAProxy's global section: tune.bufsize {GOOD_BUFFER_BYTES}\n\
         (its price in memory: haproxy/README.md, \"Buffer\")"
    );
    if bytes > u64::from(agent.max_frame_bytes) {
        judge.fail(
            "haproxy_bufsize",
            format!("tune.bufsize is {bytes} bytes, spop.max_frame_bytes only {}", agent.max_frame_bytes),
            format!("in kvspoa.toml: spop.max_frame_bytes = {bytes}"),
        );
    } else if bytes < LEAST_BUFFER_BYTES {
        judge.fail(
            "haproxy_bufsize",
            format!("tune.bufsize is {bytes} bytes: of a longer body only the beginning is seen"),
            advice,
        );
    } else if bytes < GOOD_BUFFER_BYTES {
        judge.warn(
            "haproxy_bufsize",
            format!("tune.bufsize is {bytes} bytes: of long conversations only the beginning is seen"),
            advice,
        );
    } else {
        judge.ok("haproxy_bufsize", format!("HAProxy sends frames of {frame} bytes (tune.bufsize {bytes})"));
    }
}
