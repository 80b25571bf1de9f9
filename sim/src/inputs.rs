//! A user's own files, opened and held against each other before anything is started.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use shine_common::dataset::{Truth, Vectors};
use shine_common::metric::{DType, Distance, Metric};

/// Where the data of a run lies, and how much of it to use.
#[derive(Debug, Clone)]
pub struct InputSpec {
    /// Base vectors.
    pub base: PathBuf,
    /// Query vectors; query `i` of the truth is row `i`.
    pub queries: PathBuf,
    /// Exact neighbours of the first queries.
    pub truth: PathBuf,
    /// Metric.
    pub metric: Metric,
    /// Use the first so many rows of the base only.
    pub rows: Option<usize>,
    /// Use the first so many queries only.
    pub limit_queries: Option<usize>,
    /// Answers per query.
    pub k: usize,
}

/// Base, queries and truth that fit each other.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// Base vectors, cropped to the wanted rows.
    pub base: Vectors,
    /// All query vectors; the measured ones come first.
    pub queries: Vectors,
    /// Truth of the measured queries, `k` wide.
    pub truth: Truth,
    /// Distance from each measured query to its k-th neighbour, by our own kernels: files may leave distances out,
    /// or give them with another sign.
    pub kth_distances: Vec<f32>,
    /// Metric.
    pub metric: Metric,
}

impl Inputs {
    /// Opens and checks the files.
    ///
    /// # Errors
    /// Names the file and what is wrong with it: not readable, of another type or dimension than the base, too few
    /// neighbours, neighbours that are no rows of the base.
    pub fn open(spec: &InputSpec) -> anyhow::Result<Self> {
        let base = match spec.rows {
            Some(rows) => Vectors::open_first(&spec.base, rows)?,
            None => Vectors::open(&spec.base)?,
        };
        base.check_for(spec.metric)?;
        let queries = Vectors::open(&spec.queries)?;
        check_alike(&base, &queries, &spec.queries)?;
        queries.check_for(spec.metric)?;
        let truth = Truth::open(&spec.truth, base.rows()).with_context(|| {
            format!("the truth must be about the {} rows used of {}", base.rows(), spec.base.display())
        })?;
        let (k, shown) = (spec.k, spec.truth.display());
        ensure!(truth.k() >= k, "{shown} names {} neighbours per query: --k {k} needs as many", truth.k());
        ensure!(k <= base.rows(), "--k is {k}, and the base has {} rows", base.rows());
        let with_truth = truth.queries().min(queries.rows());
        let measured = match spec.limit_queries {
            Some(0) => bail!("--limit-queries must be at least 1"),
            Some(limit) => limit.min(with_truth),
            None => with_truth,
        };
        let truth = truth.first(measured, k)?;
        let kth_distances = kth_distances(&base, &queries, &truth, spec.metric);
        Ok(Self { base, queries, truth, kth_distances, metric: spec.metric })
    }

    /// Number of measured queries: rows `0..` of the query file.
    pub fn measured(&self) -> usize {
        self.truth.queries()
    }

    /// Rows of the query file to warm up on: at most as many as are measured, others than the measured ones where
    /// the file has more.
    pub fn warmup(&self) -> std::ops::Range<usize> {
        let (measured, all) = (self.measured(), self.queries.rows());
        if all > measured { measured..all.min(2 * measured) } else { 0..measured }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.base.dtype()
    }
}

fn check_alike(base: &Vectors, queries: &Vectors, path: &Path) -> anyhow::Result<()> {
    ensure!(
        queries.dtype() == base.dtype() && queries.dim() == base.dim(),
        "{} holds {} vectors of {} elements, the base {} {} of {}: convert one (shine data convert)",
        path.display(),
        queries.dtype(),
        queries.dim(),
        base.path().display(),
        base.dtype(),
        base.dim(),
    );
    Ok(())
}

fn kth_distances(base: &Vectors, queries: &Vectors, truth: &Truth, metric: Metric) -> Vec<f32> {
    let distance = Distance::new(metric, base.dtype(), base.dim());
    let kth = |query: usize| *truth.ids(query).last().expect("k is at least 1") as usize;
    (0..truth.queries()).map(|query| distance.eval(queries.row(query), base.row(kth(query)))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use shine_common::dataset::{VectorWriter, write_truth};

    struct Folder(tempfile::TempDir);

    impl Folder {
        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn vectors(&self, name: &str, rows: std::ops::Range<i8>) {
            let mut writer = VectorWriter::create(self.path(name), DType::I8, 2).unwrap();
            rows.for_each(|row| writer.push(&[row as u8, 1]).unwrap());
            writer.finish().unwrap();
        }

        fn spec(&self) -> InputSpec {
            InputSpec {
                base: self.path("base.i8bin"),
                queries: self.path("query.i8bin"),
                truth: self.path("truth.ibin"),
                metric: Metric::L2,
                rows: None,
                limit_queries: None,
                k: 2,
            }
        }
    }

    /// Ten base rows (row, 1), six queries, truth of the first four, three wide.
    fn folder() -> Folder {
        let folder = Folder(tempfile::tempdir().unwrap());
        folder.vectors("base.i8bin", 0..10);
        folder.vectors("query.i8bin", 0..6);
        let ids = vec![0, 1, 2, 1, 0, 2, 2, 1, 3, 3, 2, 9];
        write_truth(folder.path("truth.ibin"), &Truth::from_parts(3, ids, None)).unwrap();
        folder
    }

    #[test]
    fn what_fits_is_opened_and_cropped() {
        let folder = folder();
        let inputs = Inputs::open(&folder.spec()).unwrap();
        assert_eq!((inputs.measured(), inputs.warmup()), (4, 4..6));
        assert_eq!(inputs.kth_distances, [1.0, 1.0, 1.0, 1.0]);
        let inputs = Inputs::open(&InputSpec { limit_queries: Some(2), k: 3, ..folder.spec() }).unwrap();
        assert_eq!((inputs.measured(), inputs.warmup()), (2, 2..4));
        assert_eq!(inputs.kth_distances, [4.0, 1.0]);
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let folder = folder();
        folder.vectors("short.i8bin", 0..3);
        let mut writer = VectorWriter::create(folder.path("other.fbin"), DType::F32, 2).unwrap();
        writer.push(&[0; 8]).unwrap();
        writer.finish().unwrap();
        let spec = || folder.spec();
        let check = |spec: InputSpec, expected: &str| {
            let error = format!("{:#}", Inputs::open(&spec).unwrap_err());
            assert!(error.contains(expected), "{error}");
        };
        check(InputSpec { rows: Some(5), ..spec() }, "9 for query 3");
        check(InputSpec { base: folder.path("short.i8bin"), ..spec() }, "3 rows used");
        check(InputSpec { queries: folder.path("other.fbin"), ..spec() }, "convert");
        check(InputSpec { k: 4, ..spec() }, "--k 4");
        check(InputSpec { limit_queries: Some(0), ..spec() }, "--limit-queries");
        check(InputSpec { rows: Some(11), ..spec() }, "11");
    }
}
