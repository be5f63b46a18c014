//! A page of metrics in Prometheus' text format, as far as sums over labels are wanted.

/// The samples of one page.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Samples(Vec<(String, f64)>);

impl Samples {
    /// Lines that are no samples are left out.
    pub(super) fn parse(page: &str) -> Self {
        let sample = |line: &str| {
            let (series, value) = line.trim_end().rsplit_once(' ')?;
            Some((series.to_owned(), value.parse().ok()?))
        };
        Self(page.lines().filter(|line| !line.starts_with('#')).filter_map(sample).collect())
    }

    /// The values of a metric's series whose labels have all of these.
    pub(super) fn values<'a>(
        &'a self,
        name: &'a str,
        labels: &'a [(&'a str, &'a str)],
    ) -> impl Iterator<Item = f64> + 'a {
        let has_all = move |text: &str| {
            labels.iter().all(|(label, value)| text.contains(&format!("{label}=\"{value}\"")))
        };
        let matching = move |(series, value): &(String, f64)| {
            let labels = series.strip_prefix(name)?;
            ((labels.is_empty() || labels.starts_with('{')) && has_all(labels)).then_some(*value)
        };
        self.0.iter().filter_map(matching)
    }

    /// Their sum; 0 where there are none.
    pub(super) fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.values(name, labels).sum()
    }

    /// The value of a label of a metric's first series.
    pub(super) fn label<'a>(&'a self, name: &str, label: &str) -> Option<&'a str> {
        let (series, _) = self
            .0
            .iter()
            .find(|(series, _)| series.strip_prefix(name).is_some_and(|labels| labels.starts_with('{')))?;
        let (_, value) = series.split_once(&format!("{label}=\""))?;
        value.split_once('"').map(|(value, _)| value)
    }

    /// Whether there is any series whose name begins so.
    pub(super) fn has_prefix(&self, prefix: &str) -> bool {
        self.0.iter().any(|(series, _)| series.starts_with(prefix))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_are_found_by_their_whole_name_and_their_labels() {
        let page =
            "# HELP a x\na{p=\"1\",q=\"x\"} 2\na{p=\"2\",q=\"x\"} 3.5\na_total 7\nb{v=\"0.1.0\"} 1\nodd\n";
        let samples = Samples::parse(page);
        assert_eq!(samples.sum("a", &[]), 5.5);
        assert_eq!(samples.sum("a", &[("p", "2"), ("q", "x")]), 3.5);
        assert_eq!((samples.sum("a_total", &[]), samples.sum("c", &[])), (7.0, 0.0));
        assert_eq!(samples.label("b", "v"), Some("0.1.0"));
        assert_eq!((samples.has_prefix("a_"), samples.has_prefix("vllm")), (true, false));
    }
}
