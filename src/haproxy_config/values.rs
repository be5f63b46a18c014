//! What may stand for a name, an address or a time in HAProxy's configuration.

use std::time::Duration;

/// A word that HAProxy reads as it stands.
pub(super) fn word(text: &str) -> Result<String, String> {
    let special = |c: char| c.is_whitespace() || c.is_control() || matches!(c, '"' | '\'' | '\\' | '#' | '$');
    checked(
        text,
        !text.is_empty() && !text.contains(special),
        "must be one word without quotes, `\\`, `#` and `$`",
    )
}

/// As our own configuration has it; HAProxy wants a path bare.
pub(super) fn address(text: &str) -> Result<String, String> {
    let bare = text.strip_prefix("unix:").unwrap_or(text);
    let port =
        bare.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
    checked(bare, bare.starts_with('/') || port, "must be ADDRESS:PORT or the path of a socket")
        .and_then(|_| word(bare))
}

pub(super) fn proxy_name(text: &str) -> Result<String, String> {
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

pub(super) fn time(text: &str) -> Result<String, String> {
    let digits = text.trim_start_matches(|c: char| c.is_ascii_digit());
    let has_unit = matches!(digits, "us" | "ms" | "s" | "m" | "h" | "d");
    checked(text, has_unit && digits.len() < text.len(), "must be a number and one of us, ms, s, m, h, d")
}

/// A time above 0 as Ray writes it: a number of seconds, without a unit.
///
/// # Errors
/// What is wrong with it.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let time = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    time.filter(|time| time.as_millis() > 0)
        .ok_or_else(|| format!("`{text}` is no number of seconds above 0"))
}

fn checked(text: &str, good: bool, rule: &str) -> Result<String, String> {
    if good { Ok(text.to_owned()) } else { Err(rule.to_owned()) }
}
