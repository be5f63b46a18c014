//! What of a site's HAProxy configuration does not go with our lines, and what to do about it.

use std::fmt;

use super::cfg::{HaproxyCfg, Line, Place};
use super::checks;
use super::version::HaproxyVersion;

/// How bad it is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Severity {
    /// Good to know.
    Note,
    /// It works, but worse than it could, or differently from before.
    Warning,
    /// It would break the site, or kvspoa would not work.
    Refusal,
}

impl Severity {
    /// In one word.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Refusal => "refused",
        }
    }
}

/// What was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FindingKind {
    /// HAProxy is older than 2.6.
    OldVersion,
    /// There is no backend of the pool's name.
    NoBackend,
    /// No frontend leads to the pool.
    NoFrontend,
    /// `mode` is not `http`.
    Mode,
    /// The backend has no servers that can be told apart by their names.
    Servers,
    /// A `use-server` before ours wins.
    UseServer,
    /// Cookies and stick rules yield to ours.
    Affinity,
    /// An option that the site has switched off, and our lines on.
    OptionOff,
    /// `option abortonclose` does not hold in the frontend (2.6).
    ClientsThatLeave,
    /// Nothing is tried again.
    Retries,
    /// Another `balance` than `leastconn` stands in for us.
    Balance,
    /// Compression or a cache needs a `filter` line beside ours.
    Filter,
    /// Another `log-format-sd`.
    LogFormatSd,
    /// No log format, so that ours is ignored.
    NoLogFormat,
    /// `no log` takes our target away.
    NoLog,
    /// Log lines that come too early or not at all.
    LogLines,
    /// A log target of the site that shows our fields.
    LogTarget,
    /// `option spop-check` beside a big buffer.
    SpopCheck,
    /// Another agent's frames are smaller than the buffer.
    FrameCap,
    /// An SPOE file cannot be read.
    SpoeFile,
    /// A name that our lines need is taken.
    NameTaken,
    /// Our lines are there already.
    InPlace,
    /// `tune.bufsize` is too small for prompts.
    BufsizeSmall,
    /// What the buffers may cost.
    Memory,
    /// No runtime socket, or not one that can switch the agent off.
    RuntimeSocket,
    /// A path that HAProxy looks for inside of its `chroot`.
    Chroot,
    /// A variable of HAProxy's environment that is not set here.
    Environment,
}

/// One thing that was found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What was found.
    pub kind: FindingKind,
    /// Where; none where something is missing.
    pub place: Option<Place>,
    /// What is so, and what comes of it.
    pub what: String,
    /// What to do about it.
    pub remedy: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(place) = &self.place {
            write!(f, "{place}: ")?;
        }
        write!(f, "{}: {}. {}.", self.severity.name(), self.what, self.remedy)
    }
}

impl Finding {
    pub(super) fn new(
        severity: Severity,
        kind: FindingKind,
        place: Option<&Place>,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { severity, kind, place: place.cloned(), what: what.into(), remedy: remedy.into() }
    }

    /// About a line. One that may not count cannot be a reason to refuse.
    pub(super) fn at(
        line: &Line,
        severity: Severity,
        kind: FindingKind,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let severity = if line.conditional { severity.min(Severity::Warning) } else { severity };
        Self::new(severity, kind, Some(&line.place), what, remedy)
    }
}

/// What our lines will meet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Site {
    /// HAProxy's version.
    pub version: HaproxyVersion,
    /// The backends of the inference engines.
    pub pools: Vec<String>,
    /// Where HAProxy reaches the agent, `ADDRESS:PORT` or the path of a socket.
    pub agent: String,
    /// Where HAProxy sends its log lines, likewise.
    pub log_to: String,
    /// The machine's memory in bytes, if it is known.
    pub memory_bytes: Option<u64>,
}

/// Everything that was found, the worst first, then in the order of the files.
#[must_use]
pub fn findings(cfg: &HaproxyCfg, site: &Site) -> Vec<Finding> {
    let mut found = Vec::new();
    checks::global::check(cfg, site, &mut found);
    checks::spoe::check(cfg, site, &mut found);
    for pool in &site.pools {
        match cfg.backend(pool) {
            Some(backend) => {
                checks::pool::check(cfg, site, backend, &mut found);
                checks::log::check(cfg, backend, &mut found);
            }
            None => found.push(checks::pool::missing(cfg, pool)),
        }
    }
    // Two pools may find the same in the frontend that they share.
    let mut once: Vec<Finding> = Vec::with_capacity(found.len());
    for finding in found {
        if !once.contains(&finding) {
            once.push(finding);
        }
    }
    once.sort_by(|a, b| b.severity.cmp(&a.severity).then_with(|| a.place.cmp(&b.place)));
    once
}
