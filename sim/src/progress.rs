//! Progress bars of long work, on a terminal only.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar over `length` things.
pub fn count(what: &str, length: usize) -> ProgressBar {
    bar(what, length as u64, "{msg:>12} {wide_bar} {human_pos}/{human_len} {per_sec}")
}

/// A bar over bytes; its length is set when it is known.
pub fn bytes(what: &str) -> ProgressBar {
    bar(what, 0, "{msg:>12} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}")
}

fn bar(what: &str, length: u64, template: &str) -> ProgressBar {
    let target = if std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let style = ProgressStyle::with_template(template).expect("a template as the library documents them");
    ProgressBar::with_draw_target(Some(length), target).with_style(style).with_message(what.to_owned())
}
