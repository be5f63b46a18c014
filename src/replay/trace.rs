//! Reads public traces: Mooncake's JSON lines, and the arrivals of Azure's CSV.

use super::workload::{Request, Workload};
use serde::Deserialize;
use std::{
    fs::File,
    io::{self, BufRead, BufReader},
    path::{Path, PathBuf},
    time::Duration,
};

/// What is wrong with a trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A line is not what the format says.
    #[error("{}:{line}: {what}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// What is wrong with it.
        what: String,
    },
    /// There is nothing in it.
    #[error("{}: no requests", .0.display())]
    Empty(PathBuf),
}

/// One line of a Mooncake trace (kvcache-ai/Mooncake, FAST25-release/traces).
#[derive(Deserialize)]
struct MooncakeLine {
    /// Milliseconds from the start.
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    /// Names of prefixes that grow by one block each: equal names, equal beginnings.
    hash_ids: Vec<u64>,
}

/// A trace that goes on for longer would take as long to play: its unit is not milliseconds.
const LONGEST: Duration = Duration::from_secs(100 * 86_400);

/// Longer than any prompt that a model takes; what is beyond is a mistake, not a reason to allocate.
pub(super) const MAX_TOKENS: u32 = 16 << 20;

/// Reads a Mooncake trace, whose hash ids stand for `piece_tokens` tokens each (512 in the published ones).
///
/// # Errors
/// The file cannot be read, or a line is not as it should be: the error names it.
pub(super) fn read_mooncake(path: &Path, piece_tokens: u32) -> Result<Workload, TraceError> {
    let mut requests: Vec<Request> = Vec::new();
    for_each_line(path, |line| {
        let parsed: MooncakeLine = serde_json::from_str(line).map_err(|error| error.to_string())?;
        let MooncakeLine { timestamp, input_length, output_length, hash_ids } = parsed;
        if input_length == 0 || input_length > MAX_TOKENS || output_length > MAX_TOKENS {
            return Err(format!(
                "input_length {input_length}, output_length {output_length}: 1 to {MAX_TOKENS} are possible"
            ));
        }
        let needed = input_length.div_ceil(piece_tokens) as usize;
        if hash_ids.len() != needed {
            return Err(format!(
                "{} hash_ids, but an input_length of {input_length} makes {needed} of {piece_tokens} tokens",
                hash_ids.len()
            ));
        }
        if let Some(id) = hash_ids.iter().find(|id| **id >= 1 << 62) {
            return Err(format!("hash id {id} is out of range"));
        }
        let at =
            Duration::try_from_secs_f64(timestamp / 1e3).map_err(|_| format!("timestamp {timestamp}"))?;
        if at > LONGEST {
            return Err(format!("timestamp {timestamp} is more than {} days", LONGEST.as_secs() / 86_400));
        }
        if requests.last().is_some_and(|last| last.at > at) {
            return Err(format!("timestamp {timestamp} is earlier than that of the line before"));
        }
        requests.push(Request {
            at,
            prompt_tokens: input_length,
            answer_tokens: output_length.max(1),
            pieces: hash_ids,
        });
        Ok(())
    })?;
    if requests.is_empty() {
        return Err(TraceError::Empty(path.to_owned()));
    }
    Ok(Workload::with_answers(piece_tokens, requests))
}

/// Reads when the requests of an Azure trace (Azure/AzurePublicDataset, `TIMESTAMP,ContextTokens,GeneratedTokens`)
/// arrive, from the first one on. Other columns are not looked at.
///
/// # Errors
/// As for [`read_mooncake`].
pub(super) fn read_arrivals(path: &Path) -> Result<Vec<Duration>, TraceError> {
    let mut arrivals: Vec<Duration> = Vec::new();
    let mut is_header = true;
    for_each_line(path, |line| {
        let first = line.split(',').next().unwrap_or_default().trim();
        if std::mem::take(&mut is_header) && first.eq_ignore_ascii_case("timestamp") {
            return Ok(());
        }
        let at =
            date_time(first).ok_or_else(|| format!("{first:?} is not a time like 2023-11-16 18:17:03.97"))?;
        if arrivals.last().is_some_and(|last| *last > at) {
            return Err(format!("{first} is earlier than the line before"));
        }
        arrivals.push(at);
        Ok(())
    })?;
    let Some(first) = arrivals.first().copied() else { return Err(TraceError::Empty(path.to_owned())) };
    arrivals.iter_mut().for_each(|at| *at -= first);
    Ok(arrivals)
}

fn for_each_line(path: &Path, mut take: impl FnMut(&str) -> Result<(), String>) -> Result<(), TraceError> {
    let io = |source| TraceError::Io { path: path.to_owned(), source };
    let reader = BufReader::new(File::open(path).map_err(io)?);
    for (at, line) in reader.lines().enumerate() {
        let line = line.map_err(io)?;
        if line.trim().is_empty() {
            continue;
        }
        take(&line).map_err(|what| TraceError::Line { path: path.to_owned(), line: at + 1, what })?;
    }
    Ok(())
}

/// `YYYY-MM-DD HH:MM:SS[.fraction]` as the time since the year 0, by the usual count of days.
fn date_time(text: &str) -> Option<Duration> {
    let (date, time) = text.split_once([' ', 'T'])?;
    let mut date = date.splitn(3, '-').map(str::parse::<u64>);
    let [year, month, day] = [date.next()?.ok()?, date.next()?.ok()?, date.next()?.ok()?];
    let mut time = time.trim_end_matches('Z').splitn(3, ':');
    let (hour, minute): (u64, u64) = (time.next()?.parse().ok()?, time.next()?.parse().ok()?);
    let seconds = Duration::try_from_secs_f64(time.next()?.parse().ok()?).ok()?;
    let valid = (1..=9999).contains(&year) && (1..=12).contains(&month) && (1..=31).contains(&day);
    if !valid || hour > 23 || minute > 59 || seconds.as_secs() > 60 {
        return None;
    }
    // Years counted from March, so that the leap day is the last.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day;
    Some(Duration::from_secs(((days * 24 + hour) * 60 + minute) * 60) + seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), text).expect("written");
        file
    }

    #[test]
    fn a_mooncake_trace_is_its_requests() {
        let file = file(
            "{\"timestamp\": 0, \"input_length\": 513, \"output_length\": 3, \"hash_ids\": [0, 1]}\n\n\
             {\"timestamp\": 1500, \"input_length\": 100, \"output_length\": 0, \"hash_ids\": [7]}\n",
        );
        let workload = read_mooncake(file.path(), 512).expect("a trace");
        let [first, second] = &workload.requests[..] else { panic!("two requests") };
        assert_eq!((first.prompt_tokens, first.answer_tokens, &first.pieces[..]), (513, 3, &[0, 1][..]));
        assert_eq!((second.at, second.answer_tokens), (Duration::from_millis(1500), 1));
    }

    #[test]
    fn a_bad_line_is_named_with_what_is_wrong() {
        let good = "{\"timestamp\": 5, \"input_length\": 100, \"output_length\": 3, \"hash_ids\": [7]}\n";
        for (bad, what) in [
            ("{\"timestamp\": 5}", "missing field `input_length`"),
            ("no JSON", "expected"),
            (
                "{\"timestamp\": 5, \"input_length\": 0, \"output_length\": 3, \"hash_ids\": []}",
                "input_length 0",
            ),
            (
                "{\"timestamp\": 5, \"input_length\": 600, \"output_length\": 3, \"hash_ids\": [1]}",
                "makes 2 of 512",
            ),
            ("{\"timestamp\": 4, \"input_length\": 9, \"output_length\": 3, \"hash_ids\": [1]}", "earlier"),
            (
                "{\"timestamp\": -1, \"input_length\": 9, \"output_length\": 3, \"hash_ids\": [1]}",
                "timestamp -1",
            ),
            (
                "{\"timestamp\": 1e13, \"input_length\": 9, \"output_length\": 3, \"hash_ids\": [1]}",
                "100 days",
            ),
        ] {
            let file = file(&format!("{good}{bad}\n"));
            let error = read_mooncake(file.path(), 512).expect_err(bad).to_string();
            assert!(error.contains(":2: ") && error.contains(what), "{error}");
        }
        let empty = file("\n");
        assert!(matches!(read_mooncake(empty.path(), 512), Err(TraceError::Empty(_))));
        assert!(matches!(read_mooncake(Path::new("/nonexistent"), 512), Err(TraceError::Io { .. })));
    }

    #[test]
    fn azure_arrivals_count_from_the_first() {
        let file = file(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-12-31 23:59:59.5000000,4808,10\n\
             2024-01-01 00:00:01,1,1\n2024-03-01 00:00:01,1,1\n",
        );
        let arrivals = read_arrivals(file.path()).expect("arrivals");
        let days = 31 + 29;
        assert_eq!(
            arrivals,
            [Duration::ZERO, Duration::from_millis(1500), Duration::from_millis(1500 + days * 86_400_000)]
        );
        let bad = self::file("2024-01-01 00:00:01,1,1\n2024-01-01 00:61:00,1,1\n");
        let error = read_arrivals(bad.path()).expect_err("no such minute").to_string();
        assert!(error.contains(":2: "), "{error}");
    }
}
