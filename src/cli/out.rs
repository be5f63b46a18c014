//! Standard output.

use anyhow::Context;
use std::{
    fmt::Display,
    io::{ErrorKind, Write},
};

/// Prints a text as it is. A reader that has closed its pipe, as `head` does, has all that it wanted; any other failure,
/// such as a full disk, is one.
pub(super) fn print(text: impl Display) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match write!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error).context("standard output"),
        _ => Ok(()),
    }
}

/// Prints a line, likewise.
pub(super) fn print_line(text: impl Display) -> anyhow::Result<()> {
    print(format_args!("{text}\n"))
}
