//! The comparison as a chart: three panels of bars, one bar a policy.

use super::runs::Row;
use std::fmt::Write;

const LABEL_WIDTH: f64 = 190.0;
const PANEL_WIDTH: f64 = 220.0;
const GAP: f64 = 30.0;
const TOP: f64 = 40.0;
const ROW_HEIGHT: f64 = 24.0;

/// A part of a bar: what it shows, and its colour.
type Part = (fn(&Row) -> f64, &'static str);

/// Bars are stacked where there are two parts.
const PANELS: &[(&str, &[Part])] = &[
    ("mean TTFT, s", &[(|row| row.outcome.ttft_mean_seconds, "#2f6f9f")]),
    ("mean end to end, s", &[(|row| row.outcome.e2e_mean_seconds, "#7a9e3f")]),
    (
        "prompt tokens cached: GPU, CPU",
        &[(|row| row.outcome.gpu_hit, "#b5522b"), (|row| row.outcome.cpu_hit, "#e0a37e")],
    ),
];

/// The chart as an SVG document.
pub(super) fn render(title: &str, rows: &[Row]) -> String {
    let width = LABEL_WIDTH + PANELS.len() as f64 * (PANEL_WIDTH + GAP);
    let height = TOP + 20.0 + rows.len() as f64 * ROW_HEIGHT + 10.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    text(&mut svg, 8.0, 18.0, "start", title);
    for (at, row) in rows.iter().enumerate() {
        text(&mut svg, LABEL_WIDTH - 8.0, row_top(at) + 15.0, "end", &row.policy);
    }
    for (at, (name, parts)) in PANELS.iter().enumerate() {
        let left = LABEL_WIDTH + at as f64 * (PANEL_WIDTH + GAP);
        text(&mut svg, left, TOP + 10.0, "start", name);
        let value = |row: &Row| parts.iter().map(|(part, _)| part(row)).sum::<f64>();
        let greatest = rows.iter().map(value).fold(f64::MIN_POSITIVE, f64::max);
        // Room for the figure behind the longest bar.
        let scale = (PANEL_WIDTH - 45.0) / greatest;
        for (place, row) in rows.iter().enumerate() {
            let mut x = left;
            for (part, colour) in *parts {
                let length = part(row) * scale;
                let y = row_top(place) + 4.0;
                let _ = writeln!(
                    svg,
                    "<rect x=\"{x:.1}\" y=\"{y}\" width=\"{length:.1}\" height=\"16\" fill=\"{colour}\"/>"
                );
                x += length;
            }
            text(&mut svg, x + 4.0, row_top(place) + 16.0, "start", &format!("{:.3}", value(row)));
        }
    }
    svg.push_str("</svg>\n");
    svg
}

fn row_top(at: usize) -> f64 {
    TOP + 20.0 + at as f64 * ROW_HEIGHT
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, text: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>");
}

#[cfg(test)]
mod tests {
    use super::super::outcome::Outcome;
    use super::*;

    #[test]
    fn every_policy_has_its_bars_and_no_name_breaks_the_document() {
        let row = |policy: &str, ttft_mean_seconds| Row {
            policy: policy.to_owned(),
            outcome: Outcome { ttft_mean_seconds, gpu_hit: 0.25, cpu_hit: 0.5, ..Outcome::default() },
        };
        let svg = render("<trace> & more", &[row("cost", 1.0), row("dynamo", 2.0)]);
        assert_eq!(svg.matches("<rect x=").count(), 2 * 4);
        assert!(
            svg.contains("&lt;trace&gt; &amp; more") && svg.contains(">2.000<") && svg.contains(">0.750<")
        );
        assert!(svg.ends_with("</svg>\n"));
    }
}
