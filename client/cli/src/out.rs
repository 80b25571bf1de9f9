//! What goes to stdout and the terminal: one JSON document or a table, and progress bars on long work.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

/// Work shorter than this shows no bar.
const BAR_AFTER: Duration = Duration::from_millis(500);

/// How answers are printed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Out {
    pub(crate) json: bool,
}

impl Out {
    /// Prints `value` as JSON, or what `human` makes of it. A reader that has gone away (`| head`) is no error.
    pub(crate) fn print<T: Serialize>(self, value: &T, human: impl FnOnce(&T) -> String) -> Result<()> {
        let mut text = if self.json {
            serde_json::to_string_pretty(value).context("making JSON")?
        } else {
            human(value)
        };
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        let mut stdout = io::stdout().lock();
        match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            other => other.context("writing to stdout"),
        }
    }
}

/// A table: `left` is the number of columns of text, the others are numbers.
pub(crate) fn table(header: &[&str], left: usize, rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header.iter().copied());
    for row in rows {
        table.add_row(row);
    }
    for (at, column) in table.column_iter_mut().enumerate() {
        if at >= left {
            column.set_cell_alignment(CellAlignment::Right);
        }
        column.set_padding((0, 2));
    }
    table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

/// Lines of `name: value`.
pub(crate) fn facts(pairs: &[(&str, String)]) -> String {
    let width = pairs.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    pairs.iter().map(|(name, value)| format!("{name:<width$}  {value}\n")).collect()
}

/// A share for people.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// Bytes for people.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// What a bar counts.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Unit {
    Bytes,
    Items(&'static str),
}

/// A bar on stderr, where that is a terminal and once the work turns out to be long; cleared when dropped.
pub(crate) struct Progress {
    bar: ProgressBar,
    begun: Instant,
    /// Whether the bar is shown, or never will be.
    is_settled: AtomicBool,
}

impl Progress {
    pub(crate) fn new(what: &'static str, total: u64, unit: Unit) -> Self {
        let bar = ProgressBar::hidden();
        bar.set_length(total);
        let counts = match unit {
            Unit::Bytes => "{bytes} of {total_bytes}, {bytes_per_sec}".to_owned(),
            Unit::Items(name) => format!("{{human_pos}} of {{human_len}} {name}"),
        };
        let template = format!("{{msg}} {{bar:32}} {{percent}} %  {counts}, {{eta}} left");
        bar.set_style(ProgressStyle::with_template(&template).expect("a constant template"));
        bar.set_message(what);
        Self { bar, begun: Instant::now(), is_settled: AtomicBool::new(!io::stderr().is_terminal()) }
    }

    pub(crate) fn set(&self, done: u64, total: u64) {
        self.show_if_long();
        self.bar.set_length(total);
        self.bar.set_position(done);
    }

    pub(crate) fn inc(&self, by: u64) {
        self.show_if_long();
        self.bar.inc(by);
    }

    fn show_if_long(&self) {
        let is_due = !self.is_settled.load(Ordering::Relaxed) && self.begun.elapsed() > BAR_AFTER;
        if is_due && !self.is_settled.swap(true, Ordering::Relaxed) {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
            self.bar.enable_steady_tick(Duration::from_millis(200));
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_align_numbers_right_and_have_no_trailing_blanks() {
        let text =
            table(&["name", "rows"], 1, [vec!["a".into(), "5".into()], vec!["long".into(), "12345".into()]]);
        assert_eq!(text, "name   rows\na         5\nlong  12345\n");
    }

    #[test]
    fn bytes_are_readable() {
        for (count, text) in [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (64 << 20, "64.0 MiB")] {
            assert_eq!(bytes(count), text);
        }
        assert_eq!(facts(&[("a", "1".into()), ("bcd", "2".into())]), "a    1\nbcd  2\n");
    }
}
