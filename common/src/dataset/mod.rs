//! Data sets: vectors and ground truth in files, exact neighbours, made sets and made queries.
//!
//! ```text
//! *.fbin *.u8bin *.i8bin *.f16bin   n u32 │ dim u32 │ n × dim elements                        (big-ann)
//! *.ibin                            n u32 │ k u32   │ n × k ids u32 [│ n × k distances f32]    (ground truth)
//! *.fvecs *.bvecs                   n × ( dim i32 │ dim elements )                             (texmex)
//! *.ivecs                           n × ( k i32 │ k ids i32 )                                  (ground truth)
//! *.npy                             "\x93NUMPY" │ version │ header text │ n × dim elements     (numpy 1.0, 2.0)
//! ```
//!
//! Everything is little-endian and row-major. Invariant: a [`Vectors`] or [`Truth`] that was opened has been held
//! against the exact size of its file, so that every later access is in range; no content of a file makes this
//! module panic. Every error names the file, what was expected and what was found.

mod arith;
mod convert;
mod error;
mod find;
mod format;
mod knn;
mod queries;
mod synth;
mod truth;
mod vectors;
mod writer;

pub use convert::{Conversion, Converted, convert};
pub use error::DataError;
pub use find::{FileHash, default_root, find_file, sha256_file};
pub use format::{Content, Format};
pub use knn::{Progress, exact_neighbours};
pub use queries::{REGION_CELLS, RegionQueries, hold_out, region_queries};
pub use synth::{Synth, SynthShape};
pub use truth::{Truth, write_truth};
pub use vectors::Vectors;
pub use writer::{AtomicFile, VectorWriter};
