//! Runs every measurement of every index, and prints them side by side with the ratios that are aimed at.

use std::collections::HashMap;
use std::env;
use std::process::{Command, Stdio};

/// The indexes, in the order of the table's columns.
const SUBJECTS: [(&str, &str); 4] =
    [("ours", "kvspoa"), ("chain", "ChainIndex"), ("radix", "RadixTree"), ("compressed", "Dynamo")];

/// What one process measures.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Case {
    what: &'static str,
    ranks: u16,
    /// The workload's size; for private prompts, their blocks.
    scale: u64,
}

const fn case(what: &'static str, ranks: u16, scale: u64) -> Case {
    Case { what, ranks, scale }
}

const EIGHT: Case = case("interleaved", 8, 1);
const MANY: Case = case("interleaved", 64, 1);
const LARGE: Case = case("interleaved", 8, 10);
const BULK: Case = case("bulk", 8, 1);
const WIRE: Case = case("wire", 8, 1);
const PRIVATE: [Case; 3] = [case("private", 8, 1), case("private", 8, 3), case("private", 8, 8)];
const WRITER: Case = case("writer", 8, 4);

/// What a row aims at.
enum Bar {
    /// Ours at most this share of the best peer's.
    OfBest(f64),
    /// Ours at most this share of Dynamo's.
    OfDynamo(f64),
    /// Ours at least this many times the best peer's.
    TimesBest(f64),
    /// Ours at least this many times Dynamo's.
    TimesDynamo(f64),
    /// Ours at most this.
    AtMost(f64),
    /// Nothing: the figure is reported.
    None,
}

struct Row {
    label: &'static str,
    unit: &'static str,
    case: Case,
    figure: &'static str,
    bar: Bar,
}

const fn row(label: &'static str, unit: &'static str, case: Case, figure: &'static str, bar: Bar) -> Row {
    Row { label, unit, case, figure, bar }
}

const ROWS: [Row; 35] = [
    row("tokens to overlaps, 512 blocks", "us", EIGHT, "tokens 512", Bar::OfDynamo(0.45)),
    row("tokens to overlaps, 8192 blocks", "us", EIGHT, "tokens 8192", Bar::OfDynamo(0.45)),
    row("find 512, 8 ranks", "us", EIGHT, "find 512", Bar::OfBest(0.25)),
    row("find 512, 8 ranks, p99", "us", EIGHT, "find 512 p99", Bar::None),
    row("find 8192, 8 ranks", "us", EIGHT, "find 8192", Bar::OfBest(0.25)),
    row("find 8192, 8 ranks, p99", "us", EIGHT, "find 8192 p99", Bar::None),
    row("find 512, 64 ranks", "us", MANY, "find 512", Bar::OfBest(0.25)),
    row("find 8192, 64 ranks", "us", MANY, "find 8192", Bar::OfBest(0.25)),
    row("find 512, 15 M entries", "us", LARGE, "find 512", Bar::OfBest(0.25)),
    row("find 8192, 15 M entries", "us", LARGE, "find 8192", Bar::OfBest(0.25)),
    row("find 512, cold, 8 ranks", "us", EIGHT, "cold 512", Bar::OfBest(1.0)),
    row("find 8192, cold, 8 ranks", "us", EIGHT, "cold 8192", Bar::OfBest(1.0)),
    row("find 512, cold, 64 ranks", "us", MANY, "cold 512", Bar::OfBest(1.0)),
    row("find 8192, cold, 64 ranks", "us", MANY, "cold 8192", Bar::OfBest(1.0)),
    row("find 512, cold, 15 M entries", "us", LARGE, "cold 512", Bar::OfBest(1.0)),
    row("find 8192, cold, 15 M entries", "us", LARGE, "cold 8192", Bar::OfBest(1.0)),
    row("apply, decoded blocks, 8 ranks", "M/s", EIGHT, "apply", Bar::TimesBest(1.2)),
    row("apply, decoded blocks, 64 ranks", "M/s", MANY, "apply", Bar::TimesBest(1.2)),
    row("apply, decoded blocks, 15 M entries", "M/s", LARGE, "apply", Bar::TimesBest(1.2)),
    row("apply, 96 blocks an event", "M/s", BULK, "apply", Bar::TimesBest(0.95)),
    row("decode + hash", "M/s", WIRE, "decode", Bar::TimesDynamo(7.0)),
    row("decode + hash + apply", "M/s", WIRE, "ingest", Bar::TimesDynamo(6.0)),
    row("memory an entry, 8 ranks", "B", EIGHT, "bytes", Bar::AtMost(36.0)),
    row("memory an entry, 64 ranks", "B", MANY, "bytes", Bar::AtMost(36.0)),
    row("memory an entry, 15 M entries", "B", LARGE, "bytes", Bar::AtMost(36.0)),
    row("memory an entry, private prompts of 8", "B", PRIVATE[2], "bytes", Bar::None),
    row("memory an entry, private prompts of 3", "B", PRIVATE[1], "bytes", Bar::None),
    row("memory an entry, private prompts of 1", "B", PRIVATE[0], "bytes", Bar::None),
    row("remove a rank, each 500,000 entries", "ms", EIGHT, "remove", Bar::AtMost(2.0)),
    row("remove a rank, longest hold", "us", EIGHT, "remove hold", Bar::AtMost(100.0)),
    row("remove a rank of 1.9 M, each 500,000", "ms", LARGE, "remove", Bar::AtMost(2.0)),
    row("remove a rank of 1.9 M, longest hold", "us", LARGE, "remove hold", Bar::AtMost(100.0)),
    row("find 512 alone, p99", "us", WRITER, "alone p99", Bar::None),
    row("find 512 while 1 M/s are applied, p99", "us", WRITER, "writer p99", Bar::None),
    row("the same, p99 as a multiple of alone", "x", WRITER, "p99 ratio", Bar::AtMost(3.0)),
];

type Figures = HashMap<(usize, Case, String), Vec<f64>>;

/// Measures everything; each case in `rounds` rounds, the large one once.
pub fn run(rounds: usize) -> bool {
    let mut figures = Figures::new();
    for round in 1..=rounds {
        eprintln!("round {round} of {rounds}");
        for case in [EIGHT, MANY, BULK, WIRE, WRITER] {
            measure(&mut figures, case);
        }
    }
    eprintln!("ten times the size, and private prompts");
    measure(&mut figures, LARGE);
    PRIVATE.iter().for_each(|case| measure(&mut figures, *case));
    if !sums_agree(&figures) {
        return false;
    }
    print_table(&figures);
    true
}

fn measure(figures: &mut Figures, case: Case) {
    for (at, (subject, _)) in SUBJECTS.iter().enumerate() {
        if case == WRITER && at > 0 {
            continue;
        }
        let program = env::current_exe().expect("the program itself");
        let (ranks, scale) = (case.ranks.to_string(), case.scale.to_string());
        let arguments = ["measure", subject, case.what, &ranks, &scale];
        // A peer that panics says so on standard error, which is shown.
        let output = Command::new(program).args(arguments).stderr(Stdio::inherit()).output();
        let Some(output) = output.ok().filter(|output| output.status.success()) else {
            eprintln!("{subject} failed at {} {ranks} {scale}", case.what);
            continue;
        };
        let text = String::from_utf8_lossy(&output.stdout);
        for (name, value) in text.lines().filter_map(|line| line.rsplit_once(' ')) {
            if let Ok(value) = value.parse() {
                figures.entry((at, case, name.to_owned())).or_default().push(value);
            }
        }
    }
    let median = |name: &str| median(figures, 0, case, name);
    if let (Some(alone), Some(writer)) = (median("alone p99"), median("writer p99")) {
        figures.insert((0, case, "p99 ratio".to_owned()), vec![writer / alone]);
    }
}

/// The sums over all queries: the same for all, and those that the reference figures were made with.
fn sums_agree(figures: &Figures) -> bool {
    // One round of the queries; the study walked them 41 and 201 times.
    let known = [
        (EIGHT, "sum 512", 109_517_888.0 / 41.0),
        (EIGHT, "sum 8192", 120_201_216.0 / 201.0),
        (MANY, "sum 512", 641_234_752.0 / 41.0),
        (MANY, "sum 8192", 120_201_216.0 / 201.0),
    ];
    let mut agree = true;
    for case in [EIGHT, MANY, LARGE] {
        for name in ["sum 512", "sum 8192"] {
            let sums: Vec<f64> =
                (0..SUBJECTS.len()).filter_map(|at| median(figures, at, case, name)).collect();
            let expected = known.iter().find(|(other, figure, _)| *other == case && *figure == name);
            let expected = expected.map_or(sums[0], |(_, _, sum)| *sum);
            if sums.len() < SUBJECTS.len() || sums.iter().any(|sum| *sum != expected) {
                eprintln!("{name} of {} ranks: {sums:?}, expected {expected}", case.ranks);
                agree = false;
            }
        }
    }
    agree
}

fn median(figures: &Figures, subject: usize, case: Case, name: &str) -> Option<f64> {
    let mut values = figures.get(&(subject, case, name.to_owned()))?.clone();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

fn print_table(figures: &Figures) {
    print!("| {:<37} | {:<4} |", "", "unit");
    SUBJECTS.iter().for_each(|(_, name)| print!(" {name:>10} |"));
    println!(" {:>6} | {:<16} | {:<6} |", "ratio", "aim", "");
    print!("|{}|{}|", "-".repeat(39), "-".repeat(6));
    SUBJECTS.iter().for_each(|_| print!("{}|", "-".repeat(12)));
    println!("{}|{}|{}|", "-".repeat(8), "-".repeat(18), "-".repeat(8));
    for row in &ROWS {
        let values: Vec<Option<f64>> =
            (0..SUBJECTS.len()).map(|at| median(figures, at, row.case, row.figure)).collect();
        print!("| {:<37} | {:<4} |", row.label, row.unit);
        values.iter().for_each(|value| print!(" {:>10} |", value.map_or("-".to_owned(), show)));
        let (ratio, aim, met) = judge(&row.bar, &values);
        println!(" {:>6} | {:<16} | {:<6} |", ratio.map_or(String::new(), show), aim, met);
    }
}

fn judge(bar: &Bar, values: &[Option<f64>]) -> (Option<f64>, String, &'static str) {
    let said = |met: bool| if met { "met" } else { "missed" };
    let Some(ours) = values[0] else { return (None, String::new(), "no figure") };
    let peers = || values[1..].iter().flatten().copied();
    let least = || peers().fold(f64::INFINITY, f64::min);
    let most = || peers().fold(0.0, f64::max);
    let dynamo = values[3].unwrap_or(f64::NAN);
    match *bar {
        Bar::OfBest(share) => {
            (Some(ours / least()), format!("<= {share} of best"), said(ours / least() <= share))
        }
        Bar::OfDynamo(share) => {
            (Some(ours / dynamo), format!("<= {share} Dynamo"), said(ours / dynamo <= share))
        }
        Bar::TimesBest(times) => {
            (Some(ours / most()), format!(">= {times} best"), said(ours / most() >= times))
        }
        Bar::TimesDynamo(times) => {
            (Some(ours / dynamo), format!(">= {times} Dynamo"), said(ours / dynamo >= times))
        }
        Bar::AtMost(limit) => (None, format!("<= {limit}"), said(ours <= limit)),
        Bar::None => (None, String::new(), ""),
    }
}

fn show(value: f64) -> String {
    match value {
        100.0.. => format!("{value:.0}"),
        10.0..100.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}
