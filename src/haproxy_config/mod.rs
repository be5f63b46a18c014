//! The configuration that HAProxy needs, for the user's own names and addresses, and what a site has already.
//!
//! [`HaproxyCfg`] reads a site's files, [`findings()`] says what of them does not go with our lines, [`BackendLines`] where
//! those are in place.

mod cfg;
mod checks;
mod command;
mod files;
mod findings;
mod fit;
mod forms;
mod ours;
mod spoe;
mod values;
mod version;
mod words;

pub use cfg::{CfgError, HaproxyCfg, Line, Place, Section, SectionKind};
pub use checks::BUFFERS_PER_CLIENT;
pub use command::{HaproxyConfigArgs, HaproxyConfigError, Part, run};
pub use files::files;
pub use findings::{Finding, FindingKind, Severity, Site, findings};
pub use fit::{Edit, Fit, fit};
pub use forms::{AGENT, DECISION_SECONDS, Form, LOG_TO, Names, SESSION_HEADER, render};
pub use ours::{BackendLines, frontend_line, has_agent};
pub use spoe::SpoeAgent;
pub use values::{header_name, seconds};
pub use version::HaproxyVersion;
pub use words::WordError;
