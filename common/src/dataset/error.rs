//! What can be wrong with a data file.

use std::io;
use std::path::{Path, PathBuf};

/// A data file that cannot be used. The text names the file, what was expected and what was found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The operating system refused.
    #[error("{}: cannot {action}: {cause}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was being done.
        action: &'static str,
        /// The cause.
        cause: io::Error,
    },
    /// The content contradicts the format, the size, or the use that was asked for.
    #[error("{}: expected {expected}, found {found}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What should be there.
        expected: String,
        /// What is there.
        found: String,
    },
    /// A value that no distance can be taken of.
    #[error("{}: expected finite numbers, found {value} in row {row}, column {column}", path.display())]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// Row, from 0.
        row: usize,
        /// Column, from 0.
        column: usize,
        /// NaN or an infinity.
        value: f32,
    },
    /// A value that the wanted type cannot hold.
    #[error("{}: expected values that fit {wanted}, found {value} in row {row}, column {column}", path.display())]
    DoesNotFit {
        /// The file.
        path: PathBuf,
        /// Row, from 0.
        row: usize,
        /// Column, from 0.
        column: usize,
        /// The value.
        value: f64,
        /// The element type that was asked for.
        wanted: crate::metric::DType,
    },
    /// No file of that name and content.
    #[error("no file '{name}' with sha256 {sha256} under {}: {found}", root.display())]
    NotFound {
        /// The wanted name.
        name: String,
        /// The wanted sum.
        sha256: String,
        /// Where it was looked for.
        root: PathBuf,
        /// What was there instead.
        found: String,
    },
}

impl DataError {
    pub(super) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |cause| Self::Io { path, action, cause }
    }

    pub(super) fn malformed(path: &Path, expected: impl Into<String>, found: impl Into<String>) -> Self {
        Self::Malformed { path: path.to_owned(), expected: expected.into(), found: found.into() }
    }
}
