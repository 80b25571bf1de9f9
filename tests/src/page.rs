//! Tables of a committed page that tests write: what a page shows was seen by a test.

use std::path::{Path, PathBuf};

/// Set to write the pages anew instead of holding them against what was seen.
const BLESS: &str = "SHINE_BLESS";

fn path(page: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(page)
}

/// The text of a page.
pub fn read(page: &str) -> String {
    std::fs::read_to_string(path(page)).unwrap_or_else(|error| panic!("{page}: {error}"))
}

/// Titles of a page's sections.
pub fn titles(text: &str) -> Vec<&str> {
    text.lines().filter_map(|line| line.strip_prefix("## ")).collect()
}

/// A table in Markdown. Cells hold no line breaks.
#[derive(Debug)]
pub struct Table {
    lines: String,
}

impl Table {
    /// An empty table.
    pub fn new(header: &[&str]) -> Self {
        let mut table = Self { lines: String::new() };
        table.push(header);
        table.push(&vec!["---"; header.len()]);
        table
    }

    /// Adds a row.
    pub fn push(&mut self, cells: &[impl AsRef<str>]) {
        for cell in cells {
            self.lines += "| ";
            self.lines += &cell.as_ref().replace('|', "\\|").replace('\n', " ");
            self.lines += " ";
        }
        self.lines += "|\n";
    }

    /// Holds the table against the one in a section of a page, or puts it there.
    ///
    /// # Panics
    /// If they differ, unless the environment says to write the page anew.
    pub fn check(&self, page: &str, title: &str) {
        let text = read(page);
        let heading = format!("\n## {title}\n");
        let start = text.find(&heading).unwrap_or_else(|| panic!("{page} has no section '{title}'"));
        let start = start + heading.len();
        let end = text[start..].find("\n## ").map_or(text.len(), |length| start + length + 1);
        let section = &text[start..end];
        let is_row = |line: &&str| line.starts_with('|');
        let committed: String = section.split_inclusive('\n').filter(is_row).collect();
        if committed == self.lines {
            return;
        }
        if std::env::var_os(BLESS).is_some_and(|value| !value.is_empty()) {
            let prose: String = section.split_inclusive('\n').filter(|line| !is_row(line)).collect();
            let section = format!("\n{}\n\n{}", prose.trim(), self.lines);
            let section = section.replacen("\n\n\n", "\n", 1);
            let rest = if end == text.len() { String::new() } else { format!("\n{}", &text[end..]) };
            std::fs::write(path(page), format!("{}{section}{rest}", &text[..start]))
                .expect("the page is written");
            return;
        }
        let seen: Vec<_> = self.lines.lines().collect();
        let differing = |these: &[&str], those: &str| -> String {
            these
                .iter()
                .filter(|line| !those.lines().any(|other| other == **line))
                .map(|line| format!("{line}\n"))
                .collect()
        };
        panic!(
            "{page}, section '{title}', differs from what was seen; {BLESS}=1 writes it anew.\nseen, not on the page:\n{}\
             on the page, not seen:\n{}",
            differing(&seen, &committed),
            differing(&committed.lines().collect::<Vec<_>>(), &self.lines),
        );
    }
}
