//! Built graphs, kept by a hash of data and parameters: builds are slow, and parallel builds differ.
//!
//! Invariant: a file in the cache was written whole under the name of exactly its data and parameters; a damaged one
//! is built again, never used.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{Context, bail, ensure};
use clap::ValueEnum;
use sha2::{Digest, Sha256};
use shine_cn::hnsw::build::{self, BuildOptions};
use shine_common::dataset::Vectors;
use shine_common::graph_file::{Check, GraphFile};
use shine_common::ids::NodeId;
use shine_common::metric::Metric;

use crate::progress;

/// Part of every key: changes when a builder makes other graphs for the same input.
const CACHE_VERSION: u32 = 2;

/// Who builds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Builder {
    /// Our own.
    Native,
    /// The crate hnsw_rs.
    #[value(name = "hnsw_rs")]
    HnswRs,
}

impl Builder {
    /// Its name, as in a graph file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::HnswRs => "hnsw_rs",
        }
    }
}

/// What a graph is built from, but for the data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GraphSpec {
    /// Metric.
    pub metric: Metric,
    /// Links per node and upper level.
    pub m: u32,
    /// Beam of the build.
    pub ef_construction: u32,
    /// Builder.
    pub builder: Builder,
    /// Seed of the levels.
    pub seed: u64,
}

impl GraphSpec {
    /// A native graph with the defaults of everything else.
    pub fn native(metric: Metric) -> Self {
        let BuildOptions { m, ef_construction, seed, .. } = BuildOptions::default();
        Self { metric, m, ef_construction, builder: Builder::Native, seed }
    }
}

/// A graph to load.
#[derive(Debug)]
pub struct Graph {
    /// The open file.
    pub file: GraphFile,
    /// Where it lies.
    pub path: PathBuf,
    /// Its name in the cache.
    pub key: Option<String>,
    /// Whether it was there already.
    pub was_cached: bool,
}

/// The folder of built graphs: `$SHINE_CACHE`, else `$XDG_CACHE_HOME/shine/graphs`, else `~/.cache/shine/graphs`.
pub fn default_root() -> PathBuf {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = || set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
    set("SHINE_CACHE").unwrap_or_else(|| cache().unwrap_or_default().join("shine/graphs"))
}

/// Name of a graph of the rows with that hash.
fn key(rows_hash: &[u8; 32], base: &Vectors, spec: &GraphSpec) -> String {
    let mut hash = Sha256::new();
    hash.update(format!(
        "shine graph {CACHE_VERSION}; {} rows of {} {}; {} m {} ef_construction {} {} seed {}; ",
        base.rows(),
        base.dim(),
        base.dtype(),
        spec.metric,
        spec.m,
        spec.ef_construction,
        spec.builder.name(),
        spec.seed,
    ));
    hash.update(rows_hash);
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The graph of `base` under `spec`, from the folder `root` or built into it. Of several processes that want the same
/// graph one builds it and the others wait.
///
/// # Errors
/// If it cannot be built or written.
pub async fn find_or_build(root: &Path, base: &Vectors, spec: &GraphSpec) -> anyhow::Result<Graph> {
    let rows_hash = base.rows_hash();
    let key = key(&rows_hash, base, spec);
    let path = root.join(format!("{key}.graph"));
    std::fs::create_dir_all(root).with_context(|| format!("making {}", root.display()))?;
    let _lock = lock(root.join(format!("{key}.lock"))).await?;
    if path.exists() {
        match open(&path) {
            Ok(file) => return Ok(Graph { file, path, key: Some(key), was_cached: true }),
            Err(error) => tracing::warn!(%error, "a cached graph is damaged and is built again"),
        }
    }
    let file = build_hashed(base, spec, &path, rows_hash).await?;
    Ok(Graph { file, path, key: Some(key), was_cached: false })
}

/// Builds the graph of `base` under `spec` into the file `path`.
///
/// # Errors
/// If it cannot be built or written.
pub async fn build(base: &Vectors, spec: &GraphSpec, path: &Path) -> anyhow::Result<GraphFile> {
    build_hashed(base, spec, path, base.rows_hash()).await
}

async fn build_hashed(
    base: &Vectors,
    spec: &GraphSpec,
    path: &Path,
    rows_hash: [u8; 32],
) -> anyhow::Result<GraphFile> {
    let (base, spec, target) = (base.clone(), spec.clone(), path.to_owned());
    apart("build", move || {
        let bar = progress::count("building", base.rows());
        let options =
            BuildOptions { m: spec.m, ef_construction: spec.ef_construction, seed: spec.seed, threads: 0 };
        let told = |done: u64, _: u64| bar.set_position(done);
        let graph = match spec.builder {
            Builder::Native => build::build(&base, spec.metric, &options, &told)?,
            Builder::HnswRs => shine_cn::hnsw::hnsw_rs_builder::build(&base, spec.metric, &options, &told)?,
        };
        bar.finish_and_clear();
        graph.write(&target, &base, rows_hash)?;
        open(&target)
    })
    .await
}

/// Runs `work` on a thread that nobody waits for when the program is interrupted: a runtime waits for its own.
async fn apart<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let run = move || {
        // The receiver is gone when the program is being interrupted.
        let _ = sender.send(work());
    };
    thread::Builder::new().name(name.into()).spawn(run).context("starting a thread")?;
    receiver.await.with_context(|| format!("the {name} thread panicked"))?
}

/// Holds the lock file `path` until it is dropped.
async fn lock(path: PathBuf) -> anyhow::Result<File> {
    apart("lock", move || {
        let file = File::options().create(true).append(true).open(&path);
        let file = file.with_context(|| format!("opening {}", path.display()))?;
        file.lock().with_context(|| format!("locking {}", path.display()))?;
        Ok(file)
    })
    .await
}

/// A graph file as given, held against the base that it must be of.
///
/// # Errors
/// If it is damaged or of other data.
pub fn open_given(path: &Path, base: &Vectors, metric: Metric) -> anyhow::Result<Graph> {
    let file = open(path)?;
    let (info, shown) = (file.info(), path.display());
    ensure!(
        info.dtype == base.dtype() && info.dim as usize == base.dim() && info.metric == metric,
        "{shown} is a graph of {} {} under {}, the base has {} {} and the metric asked for is {metric}",
        info.dim,
        info.dtype,
        info.metric,
        base.dim(),
        base.dtype(),
    );
    ensure!(
        info.rows as usize == base.rows(),
        "{shown} is a graph of {} rows, the base has {}: give --rows {}",
        info.rows,
        base.rows(),
        info.rows,
    );
    ensure!(!info.has_ids, "{shown} has external ids of its own: here ids are row numbers");
    let other = (0..info.rows).find(|row| file.vector(NodeId(*row)) != base.row(*row as usize));
    if let Some(row) = other {
        bail!("{shown} is a graph of other data: row {row} differs from {}", base.path().display());
    }
    Ok(Graph { file, path: path.to_owned(), key: None, was_cached: true })
}

fn open(path: &Path) -> anyhow::Result<GraphFile> {
    let file = GraphFile::open(path, Check::Checksums)?;
    file.verify()?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use shine_common::metric::DType;

    fn base() -> Vectors {
        Vectors::from_bytes(DType::I8, 4, (0..400u32).map(|i| (i * i % 251) as u8).collect()).unwrap()
    }

    #[tokio::test]
    async fn a_graph_is_built_once_and_found_again() {
        let root = tempfile::tempdir().unwrap();
        let spec = GraphSpec::native(Metric::L2);
        let first = find_or_build(root.path(), &base(), &spec).await.unwrap();
        assert!(!first.was_cached);
        let again = find_or_build(root.path(), &base(), &spec).await.unwrap();
        assert!(again.was_cached);
        assert_eq!(first.file.info(), again.file.info());
        for other in [
            GraphSpec { m: 8, ..spec.clone() },
            GraphSpec { ef_construction: 100, ..spec.clone() },
            GraphSpec { metric: Metric::Ip, ..spec.clone() },
            GraphSpec { seed: 2, ..spec.clone() },
        ] {
            assert!(!find_or_build(root.path(), &base(), &other).await.unwrap().was_cached, "{other:?}");
        }
        assert!(!find_or_build(root.path(), &base().first(99).unwrap(), &spec).await.unwrap().was_cached);
    }

    #[tokio::test]
    async fn a_damaged_graph_is_built_again() {
        let root = tempfile::tempdir().unwrap();
        let spec = GraphSpec::native(Metric::L2);
        let path = find_or_build(root.path(), &base(), &spec).await.unwrap().path;
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, bytes).unwrap();
        assert!(!find_or_build(root.path(), &base(), &spec).await.unwrap().was_cached);
        assert!(find_or_build(root.path(), &base(), &spec).await.unwrap().was_cached);
    }

    #[tokio::test]
    async fn a_given_graph_must_be_of_the_base() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.graph");
        build(&base(), &GraphSpec::native(Metric::L2), &path).await.unwrap();
        assert!(open_given(&path, &base(), Metric::L2).is_ok());
        let check = |base: &Vectors, metric, expected: &str| {
            let error = format!("{:#}", open_given(&path, base, metric).unwrap_err());
            assert!(error.contains(expected), "{error}");
        };
        check(&base(), Metric::Ip, "metric asked for is ip");
        check(&base().first(50).unwrap(), Metric::L2, "--rows 100");
        let mut bytes: Vec<u8> = base().iter().flatten().copied().collect();
        bytes[42] ^= 1;
        check(&Vectors::from_bytes(DType::I8, 4, bytes).unwrap(), Metric::L2, "row 10 differs");
    }
}
