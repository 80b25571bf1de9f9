//! What whole-cluster tests share: small pieces of the shipped data, graphs of them, and a desk to run commands at. The
//! tests start the programs beside them (`cargo build --workspace` first, as `scripts/test.sh` does).

#![forbid(unsafe_code)]

pub mod desk;
pub mod page;

use std::path::{Path, PathBuf};

use anyhow::Result;
use shine_common::dataset::{Truth, VectorWriter, Vectors, exact_neighbours, write_truth};
use shine_common::graph_file::GraphFile;
use shine_common::metric::{DType, Metric};
use shine_sim::graph_cache::{self, GraphSpec};

/// Threads of what a test computes by itself.
const THREADS: usize = 2;

/// A file of the shipped data set.
pub fn shipped(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/glove100-50k").join(name)
}

/// The first rows of the shipped base.
pub fn base(rows: usize) -> Vectors {
    Vectors::open_first(shipped("base.i8bin"), rows).expect("the shipped data has these rows")
}

/// The first shipped queries.
pub fn queries(rows: usize) -> Vectors {
    Vectors::open_first(shipped("query.i8bin"), rows).expect("the shipped data has these queries")
}

/// Rows one by one.
pub fn rows(vectors: &Vectors) -> Vec<Vec<u8>> {
    vectors.iter().map(<[u8]>::to_vec).collect()
}

/// The same numbers as f32.
pub fn as_f32(vectors: &Vectors) -> Vectors {
    let mut numbers = vec![0.0; vectors.dim()];
    let mut bytes = Vec::with_capacity(vectors.rows() * vectors.dim() * 4);
    for row in 0..vectors.rows() {
        vectors.row_f32(row, &mut numbers);
        bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    }
    Vectors::from_bytes(DType::F32, vectors.dim(), bytes).expect("whole rows")
}

/// A folder with a graph and whatever else a test writes; gone at its end.
#[derive(Debug)]
pub struct Folder(tempfile::TempDir);

impl Folder {
    /// An empty folder.
    pub fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary folder can be made"))
    }

    /// A file in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        self.0.path()
    }

    /// Builds a graph of `base`; as small as a graph can be that still finds its way.
    pub async fn graph(&self, base: &Vectors, metric: Metric) -> Result<GraphFile> {
        let spec = GraphSpec { m: 12, ef_construction: 80, ..GraphSpec::native(metric) };
        graph_cache::build(base, &spec, &self.path("graph")).await
    }

    /// Writes vectors in a big-ann format.
    pub fn write(&self, name: &str, vectors: &Vectors) -> Result<PathBuf> {
        let path = self.path(name);
        let mut writer = VectorWriter::create(&path, vectors.dtype(), vectors.dim())?;
        for row in vectors.iter() {
            writer.push(row)?;
        }
        writer.finish()?;
        Ok(path)
    }

    /// Computes and writes the truth of `queries` about `base`.
    pub fn write_truth(
        &self,
        base: &Vectors,
        queries: &Vectors,
        metric: Metric,
        k: usize,
    ) -> Result<(PathBuf, Truth)> {
        let truth = exact_neighbours(base, queries, metric, k, THREADS, &|_, _| ())?;
        let path = self.path("truth.ibin");
        write_truth(&path, &truth)?;
        Ok((path, truth))
    }
}

impl Default for Folder {
    fn default() -> Self {
        Self::new()
    }
}
