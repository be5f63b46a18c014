//! The comparison in words: a table, or JSON.

use super::runs::Row;
use std::fmt::Write;

type Column = (&'static str, fn(&Row) -> String);

const COLUMNS: &[Column] = &[
    ("GPU hit", |row| format!("{:.3}", row.outcome.gpu_hit)),
    ("CPU hit", |row| format!("{:.3}", row.outcome.cpu_hit)),
    ("TTFT mean", |row| seconds(row.outcome.ttft_mean_seconds)),
    ("    p50", |row| seconds(row.outcome.ttft_p50_seconds)),
    ("    p90", |row| seconds(row.outcome.ttft_p90_seconds)),
    ("    p99", |row| seconds(row.outcome.ttft_p99_seconds)),
    ("TPOT ms", |row| format!("{:.1}", row.outcome.tpot_mean_seconds * 1e3)),
    ("    e2e", |row| seconds(row.outcome.e2e_mean_seconds)),
    ("in SLO", |row| format!("{:.3}", row.outcome.slo_share)),
    ("TTFT in SLO", |row| format!("{:.3}", row.outcome.slo_ttft_share)),
    ("busy max/mean", |row| format!("{:.2}", row.outcome.busy_balance)),
    ("requests max/mean", |row| format!("{:.2}", row.outcome.request_balance)),
];

fn seconds(seconds: f64) -> String {
    format!("{seconds:.3}")
}

/// The rows in a Markdown table; times in seconds unless said otherwise.
pub(super) fn markdown(rows: &[Row]) -> String {
    let width = rows.iter().map(|row| row.policy.len()).chain([6]).max().unwrap_or_default();
    let mut text = format!("| {:width$} |", "policy");
    for (name, _) in COLUMNS {
        let _ = write!(text, " {name} |");
    }
    text.push('\n');
    let _ = write!(text, "|{:-<1$}|", "", width + 2);
    for (name, _) in COLUMNS {
        let _ = write!(text, "{:->1$}:|", "", name.len() + 1);
    }
    text.push('\n');
    for row in rows {
        let _ = write!(text, "| {:width$} |", row.policy);
        for (name, figure) in COLUMNS {
            let _ = write!(text, " {:>1$} |", figure(row), name.len());
        }
        text.push('\n');
    }
    text
}

/// The rows as a JSON array, with the names and units of `Outcome`.
pub(super) fn json(rows: &[Row]) -> String {
    // Numbers and names have no way to fail.
    serde_json::to_string_pretty(rows).unwrap_or_default() + "\n"
}

#[cfg(test)]
mod tests {
    use super::super::outcome::Outcome;
    use super::*;

    #[test]
    fn all_lines_of_a_table_are_alike() {
        let row = |policy: &str, ttft_mean_seconds| Row {
            policy: policy.to_owned(),
            outcome: Outcome { ttft_mean_seconds, ..Outcome::default() },
        };
        let text = markdown(&[row("cost", 0.5), row("round_robin", 123.25)]);
        let widths: Vec<usize> = text.lines().map(str::len).collect();
        assert_eq!(widths, [widths[0]; 4], "{text}");
        assert!(text.lines().all(|line| line.matches('|').count() == COLUMNS.len() + 2), "{text}");
        assert!(text.contains("|   123.250 |") && text.contains("|     0.500 |"), "{text}");
    }
}
