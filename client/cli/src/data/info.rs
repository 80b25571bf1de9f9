//! `shine data info`: what is in a file.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;
use shine_common::dataset::{Content, DataError, FileHash, Format, Truth, Vectors, sha256_file};
use shine_common::metric::DType;

use super::InfoArgs;
use crate::out::{Out, facts};

/// Rows whose norms are looked at.
const NORM_SAMPLE: usize = 10_000;

#[derive(Debug, Serialize)]
struct FileInfo {
    file: PathBuf,
    format: &'static str,
    #[serde(flatten)]
    content: ContentInfo,
    bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    sha256: Option<FileHash>,
}

#[derive(Debug, Serialize)]
#[serde(tag = "content", rename_all = "lowercase")]
enum ContentInfo {
    Vectors { dtype: DType, rows: usize, dim: usize, norms: Norms },
    Truth { queries: usize, k: usize, has_distances: bool, row_max: u32 },
}

#[derive(Debug, Serialize)]
struct Norms {
    min: f64,
    max: f64,
    mean: f64,
    /// Rows looked at.
    rows: usize,
}

/// Says what files hold.
pub(super) fn run(args: &InfoArgs, out: Out) -> Result<()> {
    let files = args.files.iter().map(|path| info(path, args.hash)).collect::<Result<Vec<_>>>()?;
    out.print(&files, |files| files.iter().map(text).collect())
}

fn info(path: &Path, hash: bool) -> Result<FileInfo> {
    let format = Format::of(path)?;
    let content = match format.content() {
        Content::Truth => {
            let truth = Truth::open(path, usize::MAX)?;
            let row_max = (0..truth.queries()).flat_map(|query| truth.ids(query)).max().copied().unwrap_or(0);
            ContentInfo::Truth {
                queries: truth.queries(),
                k: truth.k(),
                has_distances: truth.has_distances(),
                row_max,
            }
        }
        Content::Vectors(_) | Content::AnyVectors => {
            let vectors = Vectors::open(path)?;
            let norms = norms(&vectors)?;
            ContentInfo::Vectors { dtype: vectors.dtype(), rows: vectors.rows(), dim: vectors.dim(), norms }
        }
    };
    let bytes = path.metadata().with_context(|| format!("reading the size of {}", path.display()))?.len();
    let sha256 = if hash { Some(sha256_file(path)?) } else { None };
    Ok(FileInfo { file: path.to_owned(), format: format.extension(), content, bytes, sha256 })
}

/// Norms of at most [`NORM_SAMPLE`] rows at even distances, the first and the last among them.
///
/// # Errors
/// If one of them holds NaN or an infinity.
fn norms(vectors: &Vectors) -> Result<Norms, DataError> {
    let rows = vectors.rows().min(NORM_SAMPLE);
    let (mut min, mut max, mut sum) = (f64::INFINITY, 0f64, 0f64);
    let mut values = vec![0f32; vectors.dim()];
    for at in 0..rows {
        let row = if rows == 1 { 0 } else { at as u64 * (vectors.rows() as u64 - 1) / (rows as u64 - 1) };
        let row = row as usize;
        vectors.row_f32(row, &mut values);
        if let Some(column) = values.iter().position(|value| !value.is_finite()) {
            let (path, value) = (vectors.path().to_owned(), values[column]);
            return Err(DataError::NotFinite { path, row, column, value });
        }
        let norm = values.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt();
        (min, max, sum) = (min.min(norm), max.max(norm), sum + norm);
    }
    Ok(Norms { min, max, mean: sum / rows as f64, rows })
}

fn text(info: &FileInfo) -> String {
    let mut pairs = vec![("format", info.format.to_owned())];
    match &info.content {
        ContentInfo::Vectors { dtype, rows, dim, norms } => {
            let Norms { min, max, mean, rows: seen } = norms;
            pairs.push(("vectors", format!("{rows} x {dim} {dtype}")));
            pairs.push(("norms", format!("{min:.4} to {max:.4}, mean {mean:.4} ({seen} rows looked at)")));
        }
        ContentInfo::Truth { queries, k, has_distances, row_max } => {
            let distances = if *has_distances { "with distances" } else { "without distances" };
            pairs.push(("truth", format!("{queries} queries x {k} neighbours, {distances}")));
            pairs.push(("rows", format!("up to {row_max}")));
        }
    }
    pairs.push(("bytes", info.bytes.to_string()));
    if let Some(sum) = &info.sha256 {
        pairs.push(("sha256", sum.clone()));
    }
    let facts: String = facts(&pairs).lines().map(|line| format!("  {line}\n")).collect();
    format!("{}\n{facts}", info.file.display())
}
