//! Our lines, where they are in place already.

use super::cfg::{HaproxyCfg, Line, Section};

/// What the lines of a backend name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BackendLines<'a> {
    /// The prefix of their variables, `kv` unless that was taken.
    pub prefix: &'a str,
    /// The SPOE engine.
    pub engine: &'a str,
    /// The SPOE file.
    pub spoe_file: &'a str,
    /// The backend with the agent.
    pub agent_backend: &'a str,
}

impl<'a> BackendLines<'a> {
    /// Those of this backend.
    #[must_use]
    pub fn of(section: &'a Section) -> Option<Self> {
        let lines = &section.lines;
        let prefix = lines.iter().find_map(use_server)?;
        let sends =
            |line: &&Line| line.begins(&["http-request", "send-spoe-group"]) && line.word(3) == "route";
        let engine = lines.iter().find(sends)?.word(2);
        let filter = |line: &&Line| line.begins(&["filter", "spoe", "engine", engine, "config"]);
        let spoe_file = lines.iter().find(filter)?.word(5);
        let up =
            |line: &&Line| line.word(0) == "acl" && line.word(1).strip_prefix(prefix) == Some("_agent_up");
        let nbsrv = lines.iter().find(up)?.word(2);
        let agent_backend = nbsrv.strip_prefix("nbsrv(")?.strip_suffix(')')?;
        Some(Self { prefix, engine, spoe_file, agent_backend })
    }
}

/// The prefix of our variables, if this is our `use-server`.
pub(super) fn use_server(line: &Line) -> Option<&str> {
    (line.word(0) == "use-server").then_some(())?;
    line.word(1).strip_prefix("%[var(txn.")?.strip_suffix(".server)]")
}

/// Whether this is our log format.
#[must_use]
pub(super) fn is_log_format(line: &Line) -> bool {
    line.word(0) == "log-format-sd" && line.mentions("[kv@")
}

/// Our log format in this frontend, wherever it stands in it.
#[must_use]
pub fn frontend_line(section: &Section) -> Option<&Line> {
    section.lines.iter().find(|line| is_log_format(line))
}

/// Whether the agent's backend is there.
#[must_use]
pub fn has_agent(cfg: &HaproxyCfg, agent_backend: &str) -> bool {
    cfg.backend(agent_backend)
        .is_some_and(|section| section.lines.iter().any(|line| line.word(0) == "server"))
}
