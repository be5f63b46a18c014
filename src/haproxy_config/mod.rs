//! The configuration that HAProxy needs, for the user's own names and addresses, and what a site has already.
//!
//! [`HaproxyCfg`] reads a site's files, [`findings`] says what of them does not go with our lines, [`BackendLines`] where
//! those are in place.
//!
//! The files of `haproxy/` are the source: they work as they stand, and what may differ from site to site is replaced.

mod cfg;
mod checks;
mod files;
mod findings;
mod ours;
mod spoe;
mod version;
mod words;

pub use cfg::{CfgError, HaproxyCfg, Line, Place, Section, SectionKind};
pub use checks::BUFFERS_PER_CLIENT;
pub use files::files;
pub use findings::{Finding, FindingKind, Severity, Site, findings};
pub use ours::{BackendLines, frontend_line, has_agent};
pub use spoe::SpoeAgent;
pub use version::HaproxyVersion;
pub use words::WordError;

use clap::{Args, ValueEnum};

/// Where the agent listens for HAProxy unless told otherwise: on loopback, as the protocol has no authentication.
pub const AGENT: &str = "127.0.0.1:9101";
/// Where the agent listens for HAProxy's log lines unless told otherwise: by UDP, as a chrooted HAProxy does not see the
/// path of a unix socket.
pub const LOG_TO: &str = "127.0.0.1:9103";
const AGENT_BACKEND: &str = "kvspoa_agent";
const SPOE_FILE: &str = "/etc/haproxy/kvspoa.spoe.conf";
/// The request header that names a session unless told otherwise: Ray Serve's default.
pub const SESSION_HEADER: &str = "x-session-id";
const UPLOAD_TIMEOUT: &str = "3600s";
const AGENT_TIMEOUT: &str = "500ms";

/// A part of HAProxy's configuration.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Form {
    /// Whole sections for a second `-f` file: the backend of the agent.
    Agent,
    /// Lines to paste into the backend of the inference engines.
    Backend,
    /// Lines to paste into the frontend before it.
    Frontend,
    /// The SPOE file, which the lines of the backend name.
    Spoe,
}

impl Form {
    /// All forms, in the order in which one puts them in place.
    pub const ALL: [Self; 4] = [Self::Spoe, Self::Agent, Self::Backend, Self::Frontend];

    /// The form as it stands in the repository.
    #[must_use]
    pub const fn source(self) -> &'static str {
        match self {
            Self::Agent => include_str!("../../haproxy/kvspoa-agent.cfg"),
            Self::Backend => include_str!("../../haproxy/snippet-backend.cfg"),
            Self::Frontend => include_str!("../../haproxy/snippet-frontend.cfg"),
            Self::Spoe => include_str!("../../haproxy/kvspoa.spoe.conf"),
        }
    }
}

/// What differs from site to site. A name must be the same in all forms.
#[derive(Clone, Debug, Args)]
pub struct HaproxyConfigArgs {
    /// Which part to print.
    pub form: Form,
    /// Where the agent listens for HAProxy, or the path of its unix socket.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = AGENT, value_parser = address)]
    pub agent: String,
    /// Where the agent listens for HAProxy's log lines, or the path of its unix socket.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = LOG_TO, value_parser = address)]
    pub log_to: String,
    /// The name of the agent's backend in HAProxy.
    #[arg(long, value_name = "NAME", default_value = AGENT_BACKEND, value_parser = proxy_name)]
    pub agent_backend: String,
    /// Where the SPOE file will lie.
    #[arg(long, value_name = "PATH", default_value = SPOE_FILE, value_parser = word)]
    pub spoe_file: String,
    /// The request header that names a session.
    #[arg(long, value_name = "HEADER", env = "RAY_SERVE_SESSION_ID_HEADER_KEY", default_value = SESSION_HEADER, value_parser = header_name)]
    pub session_header: String,
    /// The longest that the upload of a request may take. When it has passed, the client gets a 408.
    #[arg(long, value_name = "TIME", default_value = UPLOAD_TIMEOUT, value_parser = time)]
    pub upload_timeout: String,
    /// The longest that a request waits for the agent. Must be above the agent's own deadline.
    #[arg(long, value_name = "TIME", default_value = AGENT_TIMEOUT, value_parser = time)]
    pub agent_timeout: String,
}

impl HaproxyConfigArgs {
    /// The form with every default.
    #[must_use]
    pub fn new(form: Form) -> Self {
        Self {
            form,
            agent: AGENT.to_owned(),
            log_to: LOG_TO.to_owned(),
            agent_backend: AGENT_BACKEND.to_owned(),
            spoe_file: SPOE_FILE.to_owned(),
            session_header: SESSION_HEADER.to_owned(),
            upload_timeout: UPLOAD_TIMEOUT.to_owned(),
            agent_timeout: AGENT_TIMEOUT.to_owned(),
        }
    }
}

/// The form for these names.
#[must_use]
pub fn render(args: &HaproxyConfigArgs) -> String {
    let timeouts = [("timeout processing ", &args.agent_timeout), ("timeout hello ", &args.agent_timeout)]
        .map(|(keyword, value)| (format!("{keyword}{AGENT_TIMEOUT}"), format!("{keyword}{value}")));
    let mut replacements: Vec<(&str, &str)> = vec![
        (AGENT, &args.agent),
        (LOG_TO, &args.log_to),
        (AGENT_BACKEND, &args.agent_backend),
        (SPOE_FILE, &args.spoe_file),
        (SESSION_HEADER, &args.session_header),
        (UPLOAD_TIMEOUT, &args.upload_timeout),
    ];
    replacements.extend(timeouts.iter().map(|(from, to)| (from.as_str(), to.as_str())));
    replace_all(args.form.source(), &replacements)
}

/// Replaces in one pass, so that no replacement is found in what another one has put in.
fn replace_all(text: &str, replacements: &[(&str, &str)]) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    let next = |rest: &str| {
        replacements.iter().filter_map(|(from, to)| Some((rest.find(from)?, from.len(), *to))).min()
    };
    while let Some((at, length, to)) = next(rest) {
        let (before, from_here) = rest.split_at(at);
        out.push_str(before);
        out.push_str(to);
        rest = from_here.split_at(length).1;
    }
    out.push_str(rest);
    out
}

/// A word that HAProxy reads as it stands.
fn word(text: &str) -> Result<String, String> {
    let special = |c: char| c.is_whitespace() || c.is_control() || matches!(c, '"' | '\'' | '\\' | '#' | '$');
    checked(
        text,
        !text.is_empty() && !text.contains(special),
        "must be one word without quotes, `\\`, `#` and `$`",
    )
}

/// As our own configuration has it; HAProxy wants a path bare.
fn address(text: &str) -> Result<String, String> {
    let bare = text.strip_prefix("unix:").unwrap_or(text);
    let port =
        bare.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
    checked(bare, bare.starts_with('/') || port, "must be ADDRESS:PORT or the path of a socket")
        .and_then(|_| word(bare))
}

fn proxy_name(text: &str) -> Result<String, String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':');
    checked(
        text,
        !text.is_empty() && text.chars().all(allowed),
        "may hold letters, digits, `-`, `_`, `.` and `:`",
    )
}

/// The name of a request header, as it may stand in HAProxy's configuration.
///
/// # Errors
/// What is wrong with it.
pub fn header_name(text: &str) -> Result<String, String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    checked(text, !text.is_empty() && text.chars().all(allowed), "may hold letters, digits, `-` and `_`")
}

fn time(text: &str) -> Result<String, String> {
    let digits = text.trim_start_matches(|c: char| c.is_ascii_digit());
    let has_unit = matches!(digits, "us" | "ms" | "s" | "m" | "h" | "d");
    checked(text, has_unit && digits.len() < text.len(), "must be a number and one of us, ms, s, m, h, d")
}

fn checked(text: &str, good: bool, rule: &str) -> Result<String, String> {
    if good { Ok(text.to_owned()) } else { Err(rule.to_owned()) }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: HaproxyConfigArgs,
    }

    fn rendered(form: Form, options: &[&str]) -> String {
        let name = form.to_possible_value().expect("a name").get_name().to_owned();
        let line = ["haproxy-config", &name].into_iter().chain(options.iter().copied());
        render(&Command::try_parse_from(line).expect("valid").args)
    }

    #[test]
    fn the_defaults_are_the_files_of_the_repository() {
        for form in Form::ALL {
            assert_eq!(rendered(form, &[]), form.source());
            assert_eq!(render(&HaproxyConfigArgs::new(form)), form.source());
        }
    }

    #[test]
    fn every_option_changes_each_form_that_it_belongs_to_and_leaves_no_default_behind() {
        use Form::{Agent, Backend, Frontend, Spoe};
        let cases: [(&str, &str, &str, &[Form]); 7] = [
            ("--agent", AGENT, "10.0.0.9:1234", &[Agent]),
            ("--log-to", LOG_TO, "10.0.0.9:5678", &[Backend, Frontend]),
            ("--agent-backend", AGENT_BACKEND, "router", &[Agent, Backend, Spoe]),
            ("--spoe-file", SPOE_FILE, "/opt/router.conf", &[Backend]),
            ("--session-header", SESSION_HEADER, "x-conversation", &[Spoe]),
            ("--upload-timeout", "time 3600s", "600s", &[Backend]),
            ("--agent-timeout", "processing 500ms", "250ms", &[Spoe]),
        ];
        for (option, default, value, forms) in cases {
            for form in Form::ALL {
                let text = rendered(form, &[option, value]);
                assert_eq!(text.contains(value), forms.contains(&form), "{option} in {form:?}");
                assert!(!text.contains(default), "{option} in {form:?}");
            }
        }
    }

    #[test]
    fn a_value_is_not_replaced_again() {
        let text = rendered(Form::Agent, &["--agent", "127.0.0.1:9103", "--log-to", "10.0.0.1:1"]);
        assert!(text.contains("server agent 127.0.0.1:9103 "));
    }

    #[test]
    fn a_socket_of_the_agent_is_named_by_its_path() {
        let text = rendered(Form::Agent, &["--agent", "unix:/run/kvspoa/spop.sock"]);
        assert!(text.contains("server agent /run/kvspoa/spop.sock check"), "{text}");
    }

    #[test]
    fn a_value_cannot_add_words_or_lines() {
        for (option, value) in [
            ("--agent", "127.0.0.1:1 maxconn 1"),
            ("--agent", "/run/a b"),
            ("--agent", "localhost"),
            ("--spoe-file", "/a\nacl x"),
            ("--spoe-file", ""),
            ("--agent-backend", "a b"),
            ("--session-header", "a),b"),
            ("--upload-timeout", "600"),
            ("--agent-timeout", "ms"),
        ] {
            let line = ["haproxy-config", "agent", option, value];
            assert!(Command::try_parse_from(line).is_err(), "{option} {value:?}");
        }
    }
}
