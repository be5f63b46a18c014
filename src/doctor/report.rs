//! What the checks found, and how it is shown.

use serde::Serialize;
use std::fmt;

/// What a check is about: a link of the chain from the configuration to the end of a request.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Our configuration file and what it names.
    Config,
    /// The running agent.
    Agent,
    /// HAProxy, and its configuration.
    Haproxy,
    /// The replicas' HTTP interfaces.
    Replicas,
    /// Their KV events.
    Events,
    /// Whether prompts become the engine's tokens.
    Tokens,
    /// Whether requests come through, and their ends are told.
    Requests,
}

impl Class {
    /// The exit status where this is the first link that is broken. 64 is `sysexits.h` EX_USAGE, as of every command.
    #[must_use]
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::Config => 64,
            Self::Agent => 10,
            Self::Haproxy => 11,
            Self::Replicas => 12,
            Self::Events => 13,
            Self::Tokens => 14,
            Self::Requests => 15,
        }
    }

    const fn title(self) -> &'static str {
        match self {
            Self::Config => "configuration",
            Self::Agent => "agent",
            Self::Haproxy => "HAProxy",
            Self::Replicas => "replicas",
            Self::Events => "KV events",
            Self::Tokens => "tokens",
            Self::Requests => "requests",
        }
    }
}

/// How a check ended.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// As it should be.
    Ok,
    /// It works, but less well than it could, or could not be proved.
    Warn,
    /// Broken.
    Fail,
}

/// One line.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Check {
    /// The link of the chain.
    pub class: Class,
    /// Which check, in snake case: a contract.
    pub name: &'static str,
    /// Of what: a replica as `POOL/SERVER`, or empty.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub subject: String,
    /// How it ended.
    pub status: Status,
    /// What was found.
    pub found: String,
    /// What to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

/// All that was found.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Report {
    /// The checks, in the order of the chain.
    pub checks: Vec<Check>,
}

impl Report {
    /// Sorted by the links of the chain; within one as they were made.
    #[must_use]
    pub fn new(mut checks: Vec<Check>) -> Self {
        checks.sort_by_key(|check| check.class);
        Self { checks }
    }

    /// 0, or that of the first link that is broken.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        let failed = self.checks.iter().filter(|check| check.status == Status::Fail);
        failed.map(|check| check.class).min().map_or(0, Class::exit_code)
    }

    /// The report for programs.
    #[must_use]
    pub fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "version": env!("CARGO_PKG_VERSION"),
            "exit_code": self.exit_code(),
            "checks": self.checks,
        })
    }

    fn count(&self, status: Status) -> usize {
        self.checks.iter().filter(|check| check.status == status).count()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut class = None;
        for check in &self.checks {
            if class.replace(check.class) != Some(check.class) {
                writeln!(f, "{}", check.class.title())?;
            }
            let mark = match check.status {
                Status::Ok => "ok  ",
                Status::Warn => "warn",
                Status::Fail => "FAIL",
            };
            let subject =
                if check.subject.is_empty() { String::new() } else { format!("{}: ", check.subject) };
            writeln!(f, "  {mark}  {subject}{}", check.found)?;
            for line in check.advice.iter().flat_map(|advice| advice.lines()) {
                writeln!(f, "        {line}")?;
            }
        }
        match (self.count(Status::Fail), self.count(Status::Warn)) {
            (0, 0) => writeln!(f, "\nAll {} checks are ok.", self.checks.len()),
            (fails, warnings) => {
                let ok = self.count(Status::Ok);
                writeln!(f, "\n{ok} ok, {warnings} to look at, {fails} broken.")
            }
        }
    }
}

/// Collects the checks of one class and subject.
#[derive(Debug)]
pub(super) struct Judge<'a> {
    pub(super) class: Class,
    pub(super) subject: String,
    pub(super) checks: &'a mut Vec<Check>,
}

impl Judge<'_> {
    pub(super) fn ok(&mut self, name: &'static str, found: impl Into<String>) {
        self.push(name, Status::Ok, found.into(), None);
    }

    pub(super) fn warn(&mut self, name: &'static str, found: impl Into<String>, advice: impl Into<String>) {
        self.push(name, Status::Warn, found.into(), Some(advice.into()));
    }

    pub(super) fn fail(&mut self, name: &'static str, found: impl Into<String>, advice: impl Into<String>) {
        self.push(name, Status::Fail, found.into(), Some(advice.into()));
    }

    fn push(&mut self, name: &'static str, status: Status, found: String, advice: Option<String>) {
        let (class, subject) = (self.class, self.subject.clone());
        // Replicas and HAProxy have a say in it, and it goes to a terminal.
        let found = found.replace(char::is_control, "\u{fffd}");
        self.checks.push(Check { class, name, subject, status, found, advice });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(class: Class, status: Status) -> Check {
        Check {
            class,
            name: "x",
            subject: "p/s1".to_owned(),
            status,
            found: "it is so".to_owned(),
            advice: None,
        }
    }

    #[test]
    fn the_exit_status_is_that_of_the_first_broken_link() {
        use {Class::*, Status::*};
        let code = |checks: &[(Class, Status)]| {
            Report::new(checks.iter().map(|(class, status)| check(*class, *status)).collect()).exit_code()
        };
        assert_eq!(code(&[(Agent, Ok), (Events, Warn)]), 0);
        assert_eq!(code(&[(Tokens, Fail), (Events, Fail), (Agent, Warn)]), 13);
        assert_eq!(code(&[(Requests, Fail), (Config, Fail)]), 64);
        let codes = [Config, Agent, Haproxy, Replicas, Events, Tokens, Requests].map(Class::exit_code);
        assert_eq!(codes, [64, 10, 11, 12, 13, 14, 15], "documented");
    }

    #[test]
    fn what_others_say_cannot_steer_a_terminal() {
        let mut checks = Vec::new();
        let mut judge = Judge { class: Class::Events, subject: String::new(), checks: &mut checks };
        judge.ok("x", "topic \u{1b}[2Jkv\nFAIL");
        assert_eq!(checks[0].found, "topic \u{fffd}[2Jkv\u{fffd}FAIL");
    }

    #[test]
    fn one_line_a_check_below_its_link() {
        let mut failed = check(Class::Events, Status::Fail);
        failed.advice = Some("do this\nand that".to_owned());
        let report = Report::new(vec![failed, check(Class::Agent, Status::Ok)]);
        let text = "agent\n  ok    p/s1: it is so\nKV events\n  FAIL  p/s1: it is so\n        do this\n        and that\n\n\
                    1 ok, 0 to look at, 1 broken.\n";
        assert_eq!(report.to_string(), text);
        assert!(
            Report::new(vec![check(Class::Agent, Status::Ok)])
                .to_string()
                .ends_with("All 1 checks are ok.\n")
        );
    }
}
