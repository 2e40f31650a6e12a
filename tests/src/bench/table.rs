//! Tables for people: aligned text, or markdown for the README.

use comfy_table::{CellAlignment, presets};

/// How results are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// Aligned columns.
    #[default]
    Text,
    /// A markdown table.
    Markdown,
}

/// Rows of cells under a header. The first column is aligned left, and those that hold words.
#[derive(Clone, Debug)]
pub struct Table {
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table without rows.
    #[must_use]
    pub fn new(header: &[&str]) -> Self {
        Self { header: header.iter().map(ToString::to_string).collect(), rows: Vec::new() }
    }

    /// Adds a row.
    ///
    /// # Panics
    /// If it has not as many cells as the header.
    pub fn row(&mut self, cells: Vec<String>) {
        assert_eq!(cells.len(), self.header.len(), "{cells:?} under {:?}", self.header);
        self.rows.push(cells);
    }

    /// The table as text, with a line end after each row.
    #[must_use]
    pub fn render(&self, format: Format) -> String {
        let mut table = comfy_table::Table::new();
        table.load_style(match format {
            Format::Text => presets::NOTHING,
            Format::Markdown => presets::ASCII_MARKDOWN,
        });
        table.set_header(&self.header).add_rows(&self.rows);
        for (index, column) in table.column_iter_mut().enumerate() {
            let number = |cell: &String| cell.starts_with(|c: char| c.is_ascii_digit() || "-–".contains(c));
            if self.rows.iter().all(|row| number(&row[index])) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        let lines: Vec<String> = table.lines().map(|line| line.trim_end().to_string()).collect();
        lines.join("\n") + "\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_aligned_right_and_words_left() {
        let mut table = Table::new(&["what", "µs"]);
        table.row(vec!["a".into(), "100.5".into()]);
        table.row(vec!["longer".into(), "–".into()]);
        assert_eq!(table.render(Format::Text), " what       µs\n a       100.5\n longer      –\n");
        assert_eq!(
            table.render(Format::Markdown),
            "| what   |    µs |\n|--------|-------|\n| a      | 100.5 |\n| longer |     – |\n"
        );
    }
}
