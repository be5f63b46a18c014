//! The parts of HAProxy's configuration that kvspoa needs.
//!
//! The files of `haproxy/` are the source: they work as they stand, and what may differ from site to site is replaced.

use clap::{Args, ValueEnum};

use super::values::{address, header_name, proxy_name, seconds, time, word};

/// Where the agent listens for HAProxy unless told otherwise: on loopback, as the protocol has no authentication.
pub const AGENT: &str = "127.0.0.1:9101";
/// Where the agent listens for HAProxy's log lines unless told otherwise: by UDP, as a chrooted HAProxy does not see the
/// path of a unix socket.
pub const LOG_TO: &str = "127.0.0.1:9103";
/// The request header that names a session unless told otherwise: Ray Serve's default.
pub const SESSION_HEADER: &str = "x-session-id";
pub(super) const AGENT_BACKEND: &str = "kvspoa_agent";
pub(super) const AGENT_DEFAULTS: &str = "kvspoa";
pub(super) const PREFIX: &str = "kv";
const SPOE_FILE: &str = "/etc/haproxy/kvspoa.spoe.conf";
const UPLOAD_TIMEOUT: &str = "3600s";
const AGENT_TIMEOUT: &str = "500ms";
/// Ray's time for a decision, in seconds. Its default, 5, is not ours: each request may have to wait as long for an agent
/// that hangs.
pub const DECISION_SECONDS: &str = "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_TIMEOUT_S";

/// A part of HAProxy's configuration.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Form {
    /// Whole sections for the end of the last file, or for a further one: the backend of the agent.
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
#[derive(Clone, PartialEq, Eq, Debug, Args)]
pub struct Names {
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
    /// The request header that names a session; empty for none.
    #[arg(long, value_name = "HEADER", env = "RAY_SERVE_SESSION_ID_HEADER_KEY", default_value = SESSION_HEADER, value_parser = session_header)]
    pub session_header: String,
    /// The longest that the upload of a request may take. When it has passed, the client gets a 408.
    #[arg(long, value_name = "TIME", default_value = UPLOAD_TIMEOUT, value_parser = time)]
    pub upload_timeout: String,
    /// The longest that a request waits for the agent. Must be above the agent's own deadline. By default what
    /// RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_TIMEOUT_S says, in seconds, if it is set.
    #[arg(long, value_name = "TIME", default_value_t = agent_timeout(std::env::var(DECISION_SECONDS).ok()), value_parser = time)]
    pub agent_timeout: String,
    /// The name of the agent's `defaults` section.
    #[arg(skip = AGENT_DEFAULTS)]
    pub agent_defaults: String,
    /// What the names of our variables and conditions begin with.
    #[arg(skip = PREFIX)]
    pub prefix: String,
}

impl Default for Names {
    fn default() -> Self {
        Self {
            agent: AGENT.to_owned(),
            log_to: LOG_TO.to_owned(),
            agent_backend: AGENT_BACKEND.to_owned(),
            spoe_file: SPOE_FILE.to_owned(),
            session_header: SESSION_HEADER.to_owned(),
            upload_timeout: UPLOAD_TIMEOUT.to_owned(),
            agent_timeout: AGENT_TIMEOUT.to_owned(),
            agent_defaults: AGENT_DEFAULTS.to_owned(),
            prefix: PREFIX.to_owned(),
        }
    }
}

/// As Ray's variable has it. What can't be read is left for the argument's own parser to refuse, with the variable's name.
fn agent_timeout(by_ray: Option<String>) -> String {
    by_ray.map_or_else(
        || AGENT_TIMEOUT.to_owned(),
        |text| match seconds(&text) {
            Ok(time) => format!("{}ms", time.as_millis()),
            Err(_) => format!("{DECISION_SECONDS}={text}"),
        },
    )
}

fn session_header(text: &str) -> Result<String, String> {
    if text.is_empty() { Ok(String::new()) } else { header_name(text) }
}

/// The form for these names.
#[must_use]
pub fn render(form: Form, names: &Names) -> String {
    // Words that are part of others are replaced with what stands before them.
    let in_context = [
        ("timeout processing ", AGENT_TIMEOUT, "", &names.agent_timeout),
        ("timeout hello ", AGENT_TIMEOUT, "", &names.agent_timeout),
        ("defaults ", AGENT_DEFAULTS, "\n", &names.agent_defaults),
        ("from ", AGENT_DEFAULTS, "\n", &names.agent_defaults),
        ("", PREFIX, "_", &names.prefix),
        ("txn.", PREFIX, ".", &names.prefix),
        ("var-prefix ", PREFIX, "\n", &names.prefix),
    ]
    .map(|(before, from, after, to)| (format!("{before}{from}{after}"), format!("{before}{to}{after}")));
    let argument = |header: &str| match header {
        "" => String::new(),
        header => format!(" session=req.hdr({header})"),
    };
    let (session_from, session) = (argument(SESSION_HEADER), argument(&names.session_header));
    let mut replacements: Vec<(&str, &str)> = vec![
        (&session_from, &session),
        (AGENT, &names.agent),
        (LOG_TO, &names.log_to),
        (AGENT_BACKEND, &names.agent_backend),
        (SPOE_FILE, &names.spoe_file),
        (UPLOAD_TIMEOUT, &names.upload_timeout),
    ];
    replacements.extend(in_context.iter().map(|(from, to)| (from.as_str(), to.as_str())));
    replace_all(form.source(), &replacements)
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

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        names: Names,
    }

    fn names(options: &[&str]) -> Result<Names, clap::Error> {
        let line = ["haproxy-config"].into_iter().chain(options.iter().copied());
        Command::try_parse_from(line).map(|command| command.names)
    }

    fn rendered(form: Form, options: &[&str]) -> String {
        render(form, &names(options).expect("valid"))
    }

    #[test]
    fn the_defaults_are_the_files_of_the_repository() {
        assert_eq!(names(&[]).expect("valid"), Names::default());
        for form in Form::ALL {
            assert_eq!(rendered(form, &[]), form.source());
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
    fn without_a_session_header_the_agent_is_told_none() {
        let text = rendered(Form::Spoe, &["--session-header", ""]);
        assert!(
            !text.contains("session") && text.contains(" path=path len=req.hdr(content-length) "),
            "{text}"
        );
    }

    #[test]
    fn rays_time_for_a_decision_is_in_seconds() {
        let by_ray = |text: &str| agent_timeout(Some(text.to_owned()));
        assert_eq!(
            (agent_timeout(None), by_ray("5"), by_ray("0.25")),
            ("500ms".into(), "5000ms".into(), "250ms".into())
        );
        for wrong in ["", "0", "-1", "5s", "inf"] {
            let refused = names(&["--agent-timeout", &by_ray(wrong)]).expect_err(wrong).to_string();
            assert!(refused.contains(&format!("{DECISION_SECONDS}={wrong}")), "{refused}");
        }
    }

    #[test]
    fn a_prefix_is_that_of_every_variable_and_condition_and_of_nothing_else() {
        let other = Names { prefix: "zz".to_owned(), ..Names::default() };
        for form in Form::ALL {
            let text = render(form, &other);
            let ours = |text: &str, prefix: &str| {
                [format!("{prefix}_"), format!("txn.{prefix}."), format!("var-prefix {prefix}\n")]
                    .map(|name| text.matches(&name).count())
            };
            assert_eq!(ours(&text, "zz"), ours(form.source(), "kv"), "{form:?}");
            assert_eq!(text.replace("zz", "kv"), form.source(), "{form:?}");
            assert!(!text.contains(".kv") && !text.contains("kv_"), "{form:?}");
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
            assert!(names(&[option, value]).is_err(), "{option} {value:?}");
        }
    }
}
