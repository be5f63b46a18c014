//! The tables in answers of HAProxy's runtime socket, read by the names in their header: columns come and go between
//! versions.

/// One table: a header line that starts with `# `, and rows up to an empty line.
#[derive(Debug)]
pub(super) struct Table<'a> {
    columns: Vec<&'a str>,
    rows: Vec<Vec<&'a str>>,
}

/// How a line falls into cells.
pub(super) type Split = fn(&str) -> Vec<&str>;

impl<'a> Table<'a> {
    /// The table whose first column has this name, among whatever else the answer holds.
    pub(super) fn find(answer: &'a str, first_column: &str, split: Split) -> Option<Self> {
        let mut lines = answer.lines();
        let columns = lines.find_map(|line| {
            let columns = split(line.strip_prefix("# ")?);
            (columns.first() == Some(&first_column)).then_some(columns)
        })?;
        let rows = lines.take_while(|line| !line.trim().is_empty()).map(split).collect();
        Some(Self { columns, rows })
    }

    /// The place of a column.
    pub(super) fn column(&self, name: &str) -> Option<usize> {
        self.columns.iter().position(|column| *column == name)
    }

    pub(super) fn rows(&self) -> impl Iterator<Item = &[&'a str]> {
        self.rows.iter().map(Vec::as_slice)
    }
}

/// Cells with spaces between them.
pub(super) fn by_spaces(line: &str) -> Vec<&str> {
    line.split_ascii_whitespace().collect()
}

/// Cells with commas between them; those that hold commas stand in quotes, which are left out. (Quotes within are
/// doubled; no cell that is read here has any.)
pub(super) fn by_commas(line: &str) -> Vec<&str> {
    let mut quoted = false;
    let cells = line.split(|c| {
        quoted ^= c == '"';
        c == ',' && !quoted
    });
    cells.map(|cell| cell.trim_matches('"')).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_found_among_others_and_ends_at_an_empty_line() {
        let answer = "Pid: 7\n\n1\n# a b\n1 2\n3 4\n\n# c,d\n5,6\n\n";
        let table = Table::find(answer, "a", by_spaces).expect("a table");
        assert_eq!(table.column("b"), Some(1));
        assert_eq!(table.column("d"), None);
        assert_eq!(table.rows().collect::<Vec<_>>(), [["1", "2"], ["3", "4"]]);
        let other = Table::find(answer, "c", by_commas).expect("a table");
        assert_eq!(other.rows().count(), 1);
        assert!(Table::find(answer, "e", by_commas).is_none());
    }

    #[test]
    fn a_quoted_cell_may_hold_commas() {
        assert_eq!(by_commas(r#"a,"b, c",,d"#), ["a", "b, c", "", "d"]);
    }
}
