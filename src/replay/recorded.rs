//! Our own record of decisions (`record.file`, `/record`) as a workload.

use super::{
    trace::{MAX_TOKENS, TraceError},
    workload::{Request, Workload},
};
use crate::record::{FORM, Line};
use std::{
    fs::File,
    io::{BufRead, BufReader, Read},
    path::Path,
    time::Duration,
};

/// A record and what can be played of it, in the same order: that of the arrivals.
#[derive(Debug)]
pub(super) struct Recorded {
    pub(super) workload: Workload,
    pub(super) lines: Vec<Line>,
}

/// What a token of an answer takes at a usual batch: HAProxy tells how long an answer took, not how long it is.
const SECONDS_PER_TOKEN: f64 = 0.015;

/// Longer answers than most engines are allowed to give.
const MAX_ANSWER_TOKENS: f64 = 4096.0;

/// An answer of which no end was told.
const USUAL_ANSWER_TOKENS: u32 = 64;

/// The longest line that is looked at: longer than one whose blocks have nothing in common with each other.
const MAX_LINE_BYTES: u64 = 16 << 20;

/// What tells a record from other traces.
#[derive(serde::Deserialize)]
struct Form {
    #[serde(rename = "kvspoa")]
    _form: u32,
}

/// Names of pieces that no record has: of blocks that nothing is known of.
const UNKNOWN: u64 = 1 << 61;

/// Whether the first line of a file is one of a record, of whatever form.
pub(super) fn is_record(path: &Path) -> bool {
    let Ok(file) = File::open(path) else { return false };
    let mut first = String::new();
    let read = BufReader::new(file.take(MAX_LINE_BYTES)).read_line(&mut first);
    read.is_ok() && serde_json::from_str::<Form>(&first).is_ok()
}

/// Reads a record from a file.
///
/// # Errors
/// The file cannot be read, or a line is not as it should be: the error names it.
pub(super) fn read(path: &Path) -> Result<Recorded, TraceError> {
    let text =
        std::fs::read_to_string(path).map_err(|source| TraceError::Io { path: path.to_owned(), source })?;
    parse(&text, path)
}

/// Reads a record; `path` serves messages.
///
/// # Errors
/// As [`read`].
pub(super) fn parse(text: &str, path: &Path) -> Result<Recorded, TraceError> {
    let mut lines: Vec<Line> = Vec::new();
    for (at, text) in text.lines().enumerate().filter(|(_, text)| !text.trim().is_empty()) {
        let fail = |what| TraceError::Line { path: path.to_owned(), line: at + 1, what };
        let line: Line = serde_json::from_str(text).map_err(|error| fail(error.to_string()))?;
        check(&line, lines.first()).map_err(fail)?;
        lines.push(line);
    }
    lines.sort_by_key(|line| line.at_ms);
    let Some(first) = lines.first() else { return Err(TraceError::Empty(path.to_owned())) };
    let (start, piece_tokens) = (first.at_ms, first.block_tokens);
    let requests = (0..).zip(&lines).map(|(number, line)| request(line, start, number)).collect();
    let workload = Workload {
        recorded_block_tokens: Some(piece_tokens),
        ..Workload::with_answers(piece_tokens, requests)
    };
    Ok(Recorded { workload, lines })
}

fn check(line: &Line, first: Option<&Line>) -> Result<(), String> {
    let Line { kvspoa, prompt_tokens, block_tokens, .. } = *line;
    if kvspoa != FORM {
        return Err(format!("form {kvspoa}; this version reads {FORM}"));
    }
    if !(1..=MAX_TOKENS).contains(&prompt_tokens) || !(1..=1 << 16).contains(&block_tokens) {
        return Err(format!("prompt_tokens {prompt_tokens}, block_tokens {block_tokens}: out of range"));
    }
    if let Some(first) = first.filter(|first| first.block_tokens != block_tokens) {
        return Err(format!(
            "blocks of {block_tokens} tokens behind some of {}: play them apart",
            first.block_tokens
        ));
    }
    let blocks = line.blocks.iter().map(|(_, count)| u64::from(*count)).sum::<u64>();
    if blocks > u64::from(prompt_tokens / block_tokens) {
        return Err(format!("{blocks} blocks of {block_tokens} are more than {prompt_tokens} tokens"));
    }
    let is_far = |(first, count): &(u64, u32)| first.saturating_add(u64::from(*count)) >= UNKNOWN;
    if line.blocks.iter().any(is_far) {
        return Err("the number of a block is out of range".to_owned());
    }
    Ok(())
}

fn request(line: &Line, start_ms: u64, number: u64) -> Request {
    let needed = line.prompt_tokens.div_ceil(line.block_tokens) as usize;
    let mut pieces: Vec<u64> =
        line.blocks.iter().flat_map(|(first, count)| *first..first + u64::from(*count)).collect();
    // What no block tells, the last tokens among it, is like nothing else.
    let known = pieces.len() as u64;
    pieces.extend((known..needed as u64).map(|piece| UNKNOWN | number << 24 | piece));
    Request {
        at: Duration::from_millis(line.at_ms.saturating_sub(start_ms)),
        prompt_tokens: line.prompt_tokens,
        answer_tokens: answer_tokens(line),
        pieces,
    }
}

/// By how long it took; no more than an estimate.
fn answer_tokens(line: &Line) -> u32 {
    line.total_ms.map_or(USUAL_ANSWER_TOKENS, |total| {
        (total as f64 / 1e3 / SECONDS_PER_TOKEN).clamp(1.0, MAX_ANSWER_TOKENS) as u32
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A line of a record.
    pub(in crate::replay) fn line(
        at_ms: u64,
        session: u64,
        blocks: &[(u64, u32)],
        tokens: u32,
        served: &str,
    ) -> Line {
        Line {
            kvspoa: FORM,
            at_ms,
            pool: "be".to_owned(),
            mode: "shadow".to_owned(),
            session: Some(session),
            prompt_tokens: tokens,
            block_tokens: 16,
            blocks: blocks.to_vec(),
            chosen: Some("s1".to_owned()),
            chosen_cached: 0,
            served: Some(served.to_owned()),
            served_cached: 0,
            response_ms: Some(10),
            total_ms: Some(30),
            normal: true,
        }
    }

    pub(in crate::replay) fn text(lines: &[Line]) -> String {
        lines.iter().map(|line| serde_json::to_string(line).expect("JSON") + "\n").collect()
    }

    #[test]
    fn a_record_is_played_in_the_order_of_arrivals_with_what_its_prompts_have_in_common() {
        let lines = [
            line(1_500, 1, &[(1, 2), (9, 1)], 50, "s2"),
            line(1_000, 1, &[(1, 2)], 40, "s1"),
            line(1_700, 2, &[(1, 1)], 20, "s1"),
        ];
        let Recorded { workload, lines } = parse(&text(&lines), Path::new("r")).expect("a record");
        assert_eq!(workload.piece_tokens, 16);
        let [first, second, third] = &workload.requests[..] else { panic!("three requests") };
        assert_eq!((first.at, second.at), (Duration::ZERO, Duration::from_millis(500)));
        assert_eq!(lines[1].served.as_deref(), Some("s2"));
        assert_eq!(first.answer_tokens, 2);
        assert_eq!(first.pieces, second.pieces[..3], "the next turn holds the answer");
        assert_eq!((second.pieces[2], second.pieces.len()), (9, 4), "the last tokens have a piece too");
        assert_eq!(third.pieces[0], second.pieces[0]);
        assert_ne!(third.pieces[1], second.pieces[1]);
    }

    #[test]
    fn a_bad_line_is_named_with_what_is_wrong() {
        let good = line(5, 1, &[(1, 2)], 40, "s1");
        for (bad, what) in [
            (Line { kvspoa: 2, ..good.clone() }, "form 2; this version reads 1"),
            (Line { prompt_tokens: 0, ..good.clone() }, "prompt_tokens 0"),
            (
                Line { block_tokens: 32, blocks: Vec::new(), ..good.clone() },
                "blocks of 32 tokens behind some of 16",
            ),
            (Line { blocks: vec![(1, 3)], ..good.clone() }, "3 blocks of 16 are more than 40 tokens"),
            (Line { blocks: vec![(u64::MAX, 1)], ..good.clone() }, "out of range"),
        ] {
            let error = parse(&text(&[good.clone(), bad]), Path::new("r.jsonl")).expect_err(what).to_string();
            assert!(error.starts_with("r.jsonl:2: ") && error.contains(what), "{error}");
        }
        assert!(matches!(parse("\n", Path::new("r")), Err(TraceError::Empty(_))));
    }
}
