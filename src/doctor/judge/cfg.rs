//! HAProxy's configuration files: whether our lines are in place, and what does not go with them.

use crate::{
    doctor::{
        facts::{AgentFacts, Facts},
        report::Judge,
    },
    haproxy_config::{
        BackendLines, HaproxyCfg, HaproxyVersion, Section, Severity, Site, findings, frontend_line, has_agent,
    },
};

pub(super) fn judge(facts: &Facts, judge: &mut Judge<'_>) {
    let Some(of_files) = &facts.cfg else { return };
    let cfg = match &of_files.read {
        Ok(cfg) => cfg,
        Err(why) => {
            judge.fail(
                "cfg",
                format!("HAProxy's configuration: {why}"),
                "name its files as HAProxy's own -f does",
            );
            return;
        }
    };
    let running = facts.haproxy.as_ref().and_then(|haproxy| haproxy.info.as_ref().ok());
    let running = running.and_then(|info| info.version.parse::<HaproxyVersion>().ok());
    let site = Site {
        version: running.or(of_files.installed).unwrap_or(HaproxyVersion::OLDEST),
        pools: facts.pools.iter().map(|pool| pool.backend.clone()).collect(),
        agent: facts.agent.spop.trim_start_matches("unix:").to_owned(),
        log_to: facts.agent.log.trim_start_matches("unix:").to_owned(),
        memory_bytes: of_files.memory_bytes,
    };
    for pool in &facts.pools {
        // Where there is no such backend, a finding says so.
        if let Some(backend) = cfg.backend(&pool.backend) {
            lines(cfg, backend, &site, &facts.agent, judge);
        }
    }
    for finding in findings(cfg, &site) {
        let found = match &finding.place {
            Some(place) => format!("{place}: {}", finding.what),
            None => finding.what,
        };
        match finding.severity {
            Severity::Refusal => judge.fail("cfg_finding", found, finding.remedy),
            Severity::Warning => judge.warn("cfg_finding", found, finding.remedy),
            Severity::Note => judge.ok("cfg_finding", found),
        }
    }
}

/// Whether a pool's backend, the frontends before it and the agent's backend have our lines.
fn lines(cfg: &HaproxyCfg, backend: &Section, site: &Site, agent: &AgentFacts, judge: &mut Judge<'_>) {
    let name = &backend.name;
    let Some(ours) = BackendLines::of(backend) else {
        judge.fail(
            "cfg_backend",
            format!("backend {name} has not our lines, or not all of them"),
            "put in what `kvspoa haproxy-config backend` prints, before its servers",
        );
        return;
    };
    judge.ok("cfg_backend", format!("backend {name} has our lines"));
    agent_server(cfg, ours.agent_backend, site, judge);
    for (frontend, _) in cfg.ways_to(backend) {
        let Section { name, .. } = frontend;
        let log =
            |line: &crate::haproxy_config::Line| line.word(0) == "log" && reaches(line.word(1), &site.log_to);
        if frontend_line(frontend).is_none() {
            judge.fail(
                "cfg_frontend",
                format!("frontend {name} has not our log line: bookings do not end"),
                "put in what `kvspoa haproxy-config frontend` prints",
            );
        } else if !frontend.lines.iter().any(log) {
            judge.fail(
                "cfg_frontend",
                format!("frontend {name} does not log to {}, where the agent listens", agent.log),
                "the `log … format rfc5424` line must have the address of `log.listen`",
            );
        } else {
            judge.ok("cfg_frontend", format!("frontend {name} has our log line"));
        }
    }
}

fn agent_server(cfg: &HaproxyCfg, backend: &str, site: &Site, judge: &mut Judge<'_>) {
    if !has_agent(cfg, backend) {
        judge.fail(
            "cfg_agent",
            format!("backend {backend} is missing, or has no server: the agent is never asked"),
            "load what `kvspoa haproxy-config agent` prints as a further file, the last one",
        );
        return;
    }
    let section = cfg.backend(backend);
    let addresses: Vec<&str> = section
        .into_iter()
        .flat_map(|section| &section.lines)
        .filter(|line| line.word(0) == "server")
        .map(|line| line.word(2).trim_start_matches("unix@"))
        .collect();
    if addresses.iter().any(|address| reaches(address, &site.agent)) {
        judge.ok("cfg_agent", format!("backend {backend} leads to the agent at {}", site.agent));
    } else {
        judge.fail(
            "cfg_agent",
            format!(
                "backend {backend} leads to {}, the agent listens at {}",
                addresses.join(", "),
                site.agent
            ),
            "`server agent …` and spop.listen must be the same",
        );
    }
}

/// Whether who connects to `address` reaches who listens at `listen`: at the same one, or at every one of the same port.
fn reaches(address: &str, listen: &str) -> bool {
    let same_port = || Some(address.rsplit_once(':')?.1 == listen.rsplit_once(':')?.1);
    let is_everywhere = listen.starts_with("0.0.0.0:") || listen.starts_with("[::]:");
    address == listen || is_everywhere && same_port() == Some(true)
}

#[cfg(test)]
mod tests {
    use super::reaches;

    #[test]
    fn who_listens_everywhere_is_reached_by_any_address() {
        assert!(reaches("127.0.0.1:9101", "127.0.0.1:9101"));
        assert!(reaches("10.0.0.1:9101", "0.0.0.0:9101"));
        assert!(reaches("/run/kvspoa/spop.sock", "/run/kvspoa/spop.sock"));
        assert!(!reaches("10.0.0.1:9101", "127.0.0.1:9101"));
        assert!(!reaches("10.0.0.1:9102", "[::]:9101"));
    }
}
