//! What can be wrong with a configuration file.

use super::values::Span;
use std::{
    fmt, io,
    path::{Path, PathBuf},
};

/// A mistake in the configuration, as one line for a person.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A key or a value is wrong.
    #[error("{place}: {key}: {why}")]
    Invalid {
        /// Where.
        place: Place,
        /// The key as it stands in the file.
        key: String,
        /// What is wrong and what would be right.
        why: String,
    },
    /// A flag or an environment variable is wrong.
    #[error("{by}: {why}")]
    Set {
        /// Which one.
        by: String,
        /// What is wrong and what would be right.
        why: String,
    },
}

/// A place in a configuration file; shown as `FILE:LINE`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Place {
    /// The file.
    pub path: PathBuf,
    /// The line, from 1.
    pub line: usize,
}

impl Place {
    pub(super) fn of(path: &Path, text: &str, span: Span) -> Self {
        Self { path: path.to_owned(), line: line_of(text, span.start) }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.path.display(), self.line)
    }
}

impl ConfigError {
    pub(super) fn at(path: &Path, text: &str, span: Span, key: &str, why: String) -> Self {
        Self::Invalid { place: Place::of(path, text, span), key: key.to_owned(), why }
    }

    /// The TOML reader's error; the key is taken from the line that it points at.
    pub(super) fn from_toml(path: &Path, text: &str, error: &toml::de::Error) -> Self {
        let start = error.span().map_or(text.len(), |span| span.start);
        let line = line_of(text, start);
        let source = text.lines().nth(line - 1).unwrap_or_default();
        let key = source.split('=').next().unwrap_or_default().trim();
        let key = if key.is_empty() { "syntax" } else { key };
        let why = error.message().replace('\n', " ");
        Self::Invalid { place: Place { path: path.to_owned(), line }, key: key.to_owned(), why }
    }
}

fn line_of(text: &str, offset: usize) -> usize {
    text.as_bytes()[..offset.min(text.len())].iter().filter(|byte| **byte == b'\n').count() + 1
}
