//! Files that commands write: none is replaced unless it was said to be, and none that is being read.

use std::path::Path;

use anyhow::Result;
use clap::Args;

use crate::exit::{FileExists, bad_input};

/// Flag of every command that writes files.
#[derive(Debug, Args)]
pub(crate) struct Force {
    /// Replace files that exist
    #[arg(long)]
    force: bool,
}

impl Force {
    /// Makes sure that `outputs` may be written; to be called before any work is done. `inputs` are files that the
    /// command reads, which are never replaced.
    ///
    /// # Errors
    /// [`FileExists`] names the first output that is there already.
    pub(crate) fn check(&self, outputs: &[&Path], inputs: &[&Path]) -> Result<()> {
        for output in outputs {
            let Ok(there) = output.canonicalize() else {
                // Nothing there: or nothing that can be looked at, which the writer reports.
                continue;
            };
            if inputs.iter().any(|input| input.canonicalize().is_ok_and(|input| input == there)) {
                return Err(bad_input(format!(
                    "{} would replace the file that is read: choose another name",
                    output.display()
                )));
            }
            // What is no file cannot be replaced: the writer says so.
            if there.is_file() && !self.force {
                return Err(FileExists(output.to_path_buf()).into());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::{Exit, classify};

    #[test]
    fn files_are_replaced_only_where_that_was_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("old"), "").unwrap();
        std::os::unix::fs::symlink(at("old"), at("link")).unwrap();
        let check = |force, output: &str, input: &str| {
            let outcome = Force { force }.check(&[&at("new"), &at(output)], &[&at(input)]);
            outcome.err().map(|error| (classify(&error).0, format!("{error:#}")))
        };
        assert_eq!(check(false, "newer", "old"), None);
        let (exit, text) = check(false, "old", "other").unwrap();
        assert_eq!(exit, Exit::Exists);
        assert!(text.contains("/old exists already") && text.contains("--force"), "{text}");
        assert_eq!(check(true, "old", "other"), None);
        for output in ["old", "link"] {
            let (exit, text) = check(true, output, "old").unwrap();
            assert_eq!(exit, Exit::Input);
            assert!(text.contains("file that is read"), "{text}");
        }
    }
}
