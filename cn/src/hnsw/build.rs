//! The bulk builder: all rows of a base into one graph, on all cores.
//!
//! Rows are inserted as in HNSW Alg. 1 by the one search machine and the one selection heuristic, in row order over all
//! threads. Levels are drawn per row from the seed before anything else, so that lists have fixed places and the entry
//! point, the first row of the highest level, never changes. Links follow hnswlib: a new node takes up to `m`, lists on
//! level 0 hold `2·m`, and a list that is full is chosen anew by the heuristic; on level 0 it then keeps more near nodes
//! than hnswlib's ([`select::kept_at_least`]).
//!
//! Memory beside the vectors: per row two words per level-0 link and ten bytes, per upper list two words per link, per
//! thread two bytes per row ([`memory_bytes`]).
//!
//! Choosing a full list anew costs more distances than the search if done plainly. But a list knows its own lengths, and
//! of the entries that an earlier choice let stand beside each other it is known that none crowds the other; so only
//! pairs with a newer entry are compared.
//!
//! Invariant: one lock is held at a time, that of the node whose lists change; readers hold none.

use std::num::NonZero;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use parking_lot::Mutex;
use shine_common::dataset::{Progress, Vectors};
use shine_common::graph_file::BuildInfo;
use shine_common::ids::NodeId;
use shine_common::layout::{CollectionParams, LEVEL_MAX};
use shine_common::metric::{Distance, Metric};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::graph::{BuildError, Graph, List, Lists, View, check_inputs};
use super::local::drive;
use super::prefetch::prefetch;
use super::repair;
use super::search::{Candidate, Search};
use super::select;
use super::visited::DenseVisited;

/// Rows between two reports of progress by a thread.
const PROGRESS_ROWS: u64 = 256;

/// How to build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BuildOptions {
    /// Links per node and level; twice that on level 0.
    pub m: u32,
    /// Beam of the searches.
    pub ef_construction: u32,
    /// Seed of the level draw.
    pub seed: u64,
    /// Threads; all cores if zero. The graph of one thread is always the same; those of more differ.
    pub threads: usize,
}

impl Default for BuildOptions {
    fn default() -> Self {
        Self { m: 16, ef_construction: 200, seed: 1, threads: 0 }
    }
}

impl BuildOptions {
    pub(super) fn threads(&self) -> usize {
        match self.threads {
            0 => thread::available_parallelism().map_or(1, NonZero::get),
            threads => threads,
        }
    }
}

/// The level of `row`: floor(−ln U / ln m), with U in (0, 1] from the seed and the row alone. Compared power by power, so
/// that every machine agrees.
pub fn level_of(seed: u64, row: u64, m: u32) -> u8 {
    let bits = xxh3_64_with_seed(&row.to_le_bytes(), seed);
    let u = ((bits >> 11) + 1) as f64 / (1u64 << 53) as f64;
    let mut bound = 1.0 / f64::from(m);
    let mut level = 0;
    while u <= bound && level < LEVEL_MAX {
        level += 1;
        bound /= f64::from(m);
    }
    level
}

/// Memory that [`build`] takes beside the vectors, in bytes, to about 2 %.
pub fn memory_bytes(rows: u64, options: &BuildOptions) -> u64 {
    let m = u64::from(options.m);
    let per_row = 8 * (1 + 2 * m) + 10;
    let upper_lists = rows / (m - 1) + 1;
    rows * (per_row + 2 * options.threads() as u64) + upper_lists * 8 * (1 + m)
}

/// Builds a graph over all rows of `vectors`.
///
/// # Errors
/// If a parameter is out of range, or a vector has no distance under `metric`; both before any work.
pub fn build(
    vectors: &Vectors,
    metric: Metric,
    options: &BuildOptions,
    progress: Progress<'_>,
) -> Result<Graph, BuildError> {
    let params = check_inputs(vectors, metric, options.m, options.ef_construction)?;
    let started = Instant::now();
    let rows = vectors.rows() as u64;
    let levels: Vec<_> = (0..rows).map(|row| level_of(options.seed, row, options.m)).collect();
    let threads = options.threads().min(vectors.rows());
    let info = BuildInfo {
        builder: "native".into(),
        seed: options.seed,
        threads: threads as u32,
        ..BuildInfo::default()
    };
    let distance = Distance::new(metric, vectors.dtype(), vectors.dim());
    let mut builder = Builder::new(Graph::new(params, levels, info)?, vectors, &distance);
    let next = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut worker = Worker::new(vectors.rows());
                loop {
                    let row = next.fetch_add(1, Ordering::Relaxed);
                    if row >= rows {
                        return;
                    }
                    builder.insert(&mut worker, row as u32);
                    if row % PROGRESS_ROWS == 0 {
                        progress(row, rows);
                    }
                }
            });
        }
    });
    let view = View { graph: &builder.graph, vectors, distance: &distance };
    let repaired = repair::repair(&view, options.ef_construction as usize);
    repaired.record(&mut builder.graph);
    builder.graph.build.seconds = started.elapsed().as_secs_f64();
    progress(rows, rows);
    Ok(builder.graph)
}

/// What one thread needs, used again for every row.
struct Worker {
    search: Search<DenseVisited>,
    /// Results of a level without the node itself.
    found: Vec<Candidate>,
    chosen: Vec<Candidate>,
    /// Candidates of a list that is chosen anew, and what is chosen.
    full: Vec<Candidate>,
    kept: Vec<Candidate>,
}

impl Worker {
    fn new(rows: usize) -> Self {
        Self {
            search: Search::new(DenseVisited::new(rows)),
            found: Vec::new(),
            chosen: Vec::new(),
            full: Vec::new(),
            kept: Vec::new(),
        }
    }
}

struct Builder<'a> {
    graph: Graph,
    vectors: &'a Vectors,
    distance: &'a Distance,
    locks: Box<[Mutex<()>]>,
    /// Beside each list of the graph the length of each link, as bits; the count is that of the entries, the first of the
    /// list, that an earlier choice let stand beside each other.
    base_lengths: Lists,
    upper_lengths: Lists,
}

/// A list and its lengths, under its node's lock.
#[derive(Clone, Copy)]
struct Measured<'a> {
    nodes: List<'a>,
    lengths: List<'a>,
}

impl Measured<'_> {
    fn candidate(self, at: usize, tag: u32) -> Candidate {
        Candidate::new(f32::from_bits(self.lengths.at(at)), NodeId(self.nodes.at(at)), tag)
    }

    fn set(self, at: usize, candidate: &Candidate) {
        self.nodes.set(at, candidate.node().0);
        self.lengths.set(at, candidate.distance().to_bits());
    }
}

/// Tags of candidates: whether an entry stood the test beside all others so tagged.
const NEW: u32 = 0;
const STOOD: u32 = 1;

impl<'a> Builder<'a> {
    fn new(graph: Graph, vectors: &'a Vectors, distance: &'a Distance) -> Self {
        let CollectionParams { m, m0, .. } = graph.params;
        let upper_slots = graph.upper.count();
        Self {
            locks: (0..graph.rows()).map(|_| Mutex::new(())).collect(),
            base_lengths: Lists::new(graph.rows(), m0 as usize),
            upper_lengths: Lists::new(upper_slots, m as usize),
            graph,
            vectors,
            distance,
        }
    }

    fn view(&self) -> View<'_> {
        View { graph: &self.graph, vectors: self.vectors, distance: self.distance }
    }

    fn measured(&self, node: u32, level: u8) -> Measured<'_> {
        if level == 0 {
            let at = node as usize;
            Measured { nodes: self.graph.base.get(at), lengths: self.base_lengths.get(at) }
        } else {
            let at = self.graph.uppers[node as usize] as usize + usize::from(level) - 1;
            Measured { nodes: self.graph.upper.get(at), lengths: self.upper_lengths.get(at) }
        }
    }

    fn insert(&self, worker: &mut Worker, row: u32) {
        let graph = &self.graph;
        let entry = graph.entry;
        if row == entry.node.0 {
            return; // there from the start; others find and link it
        }
        let Worker { search, found, chosen, full, kept } = worker;
        let ef = graph.params.ef_construction as usize;
        search.reset(entry, graph.uppers[entry.node.0 as usize], ef, graph.levels[row as usize]);
        let query = self.vectors.row(row as usize);
        let Ok(()) = drive(&mut self.view(), self.distance, search, query, |level, results| {
            // Another thread may have linked this row on the level above already, and with it led this search here.
            found.clear();
            found.extend(
                results
                    .iter()
                    .filter(|c| c.node().0 != row)
                    .map(|c| Candidate::new(c.distance(), c.node(), NEW)),
            );
            let m = graph.params.m as usize;
            let pair = |a: NodeId, b: NodeId| self.view().distance(a.0, b.0);
            let passed = select::heuristic(found, m, 0, pair, chosen);
            self.link_own(row, level, chosen, passed, full, kept);
            for neighbour in chosen.iter() {
                self.link_back(neighbour, level, row, full, kept);
            }
        });
    }

    /// Writes the list of a new node, beside what other threads may have entered there already.
    fn link_own(
        &self,
        row: u32,
        level: u8,
        chosen: &[Candidate],
        passed: usize,
        full: &mut Vec<Candidate>,
        kept: &mut Vec<Candidate>,
    ) {
        let list = self.measured(row, level);
        let _held = self.locks[row as usize].lock();
        full.clear();
        let tag = |at| if at < passed { STOOD } else { NEW };
        full.extend(chosen.iter().enumerate().map(|(at, c)| Candidate::new(c.distance(), c.node(), tag(at))));
        full.extend(
            (0..list.nodes.len())
                .map(|at| list.candidate(at, NEW))
                .filter(|earlier| chosen.iter().all(|c| c.node() != earlier.node())),
        );
        if full.len() <= list.nodes.capacity() {
            self.store(list, full, passed);
        } else {
            self.choose_anew(list, level, full, kept);
        }
    }

    /// Enters `row` into the list of a neighbour that it chose.
    fn link_back(
        &self,
        neighbour: &Candidate,
        level: u8,
        row: u32,
        full: &mut Vec<Candidate>,
        kept: &mut Vec<Candidate>,
    ) {
        let node = neighbour.node().0;
        let list = self.measured(node, level);
        let _held = self.locks[node as usize].lock();
        if list.nodes.iter().any(|entry| entry == row) {
            return;
        }
        let back = Candidate::new(neighbour.distance(), NodeId(row), NEW);
        let len = list.nodes.len();
        if len < list.nodes.capacity() {
            list.set(len, &back);
            list.nodes.set_len(len + 1);
            return;
        }
        let stood = list.lengths.len();
        full.clear();
        full.extend((0..len).map(|at| list.candidate(at, if at < stood { STOOD } else { NEW })));
        full.push(back);
        self.choose_anew(list, level, full, kept);
    }

    /// Chooses a list among more candidates than it holds.
    fn choose_anew(&self, list: Measured<'_>, level: u8, full: &mut [Candidate], kept: &mut Vec<Candidate>) {
        full.sort_unstable();
        for candidate in full.iter() {
            prefetch(self.vectors.row(candidate.node().0 as usize));
        }
        let crowds = |candidate: &Candidate, taken: &Candidate| {
            (candidate.upper() == NEW || taken.upper() == NEW)
                && self.view().distance(candidate.node().0, taken.node().0) < candidate.distance()
        };
        let capacity = list.nodes.capacity();
        let at_least = select::kept_at_least(level, capacity);
        let passed = select::heuristic_by(full, capacity, at_least, crowds, kept);
        self.store(list, kept, passed);
    }

    fn store(&self, list: Measured<'_>, entries: &[Candidate], stood: usize) {
        for (at, entry) in entries.iter().enumerate() {
            list.set(at, entry);
        }
        list.nodes.set_len(entries.len());
        list.lengths.set_len(stood);
    }
}

#[cfg(test)]
mod tests {
    use rand::{RngExt as _, SeedableRng as _};
    use rand_chacha::ChaCha8Rng;
    use shine_common::dataset::exact_neighbours;
    use shine_common::graph_file::{Check, GraphFile};
    use shine_common::metric::{DType, SimdLevel, from_f64};

    use super::super::local::LocalIndex;
    use super::*;

    const QUIET: Progress<'static> = &|_, _| {};

    /// Rows around a few centres, in few enough steps that some coincide.
    fn bunches(dtype: DType, dim: usize, rows: usize, seed: u64) -> Vectors {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let centres: Vec<Vec<f64>> =
            (0..12).map(|_| (0..dim).map(|_| rng.random_range(20.0..60.0)).collect()).collect();
        let mut bytes = Vec::new();
        for _ in 0..rows {
            let centre = &centres[rng.random_range(0..12)];
            let row: Vec<_> = centre.iter().map(|c| (c + rng.random_range(-15.0..15.0f64)).round()).collect();
            bytes.extend(from_f64(dtype, &row).unwrap());
        }
        Vectors::from_bytes(dtype, dim, bytes).unwrap()
    }

    fn options(m: u32, ef_construction: u32, threads: usize) -> BuildOptions {
        BuildOptions { m, ef_construction, seed: 7, threads }
    }

    fn file_of(graph: &Graph, vectors: &Vectors) -> (tempfile::TempDir, LocalIndex) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("graph");
        graph.write(&path, vectors, [3; 32]).unwrap();
        let file = GraphFile::open(&path, Check::Checksums).unwrap();
        file.verify().unwrap();
        assert_eq!(file.info().build.data_hash, [3; 32]);
        (folder, LocalIndex::new(file, SimdLevel::detect()).unwrap())
    }

    /// Distance-based recall@k against exact neighbours.
    fn recall(index: &LocalIndex, base: &Vectors, queries: &Vectors, k: usize, ef: usize) -> f64 {
        let metric = index.file().info().metric;
        let truth = exact_neighbours(base, queries, metric, k, 2, QUIET).unwrap();
        let mut searcher = index.searcher();
        let mut hits = 0;
        for (i, query) in queries.iter().enumerate() {
            let limit = truth.distances(i).unwrap()[k - 1];
            let found = searcher.search(query, ef);
            hits += found.iter().take(k).filter(|c| c.distance() <= limit).count();
        }
        hits as f64 / (k * queries.rows()) as f64
    }

    /// With a beam as wide as the graph the answer is exact, order included: the graph is one piece.
    fn check_exact(base: &Vectors, metric: Metric, options: &BuildOptions) {
        let graph = build(base, metric, options, QUIET).unwrap();
        let (_folder, index) = file_of(&graph, base);
        let distance = Distance::new(metric, base.dtype(), base.dim());
        let mut searcher = index.searcher();
        for query in base.iter().step_by(1 + base.rows() / 20) {
            let mut expected: Vec<_> = (0..base.rows() as u32)
                .map(|row| Candidate::new(distance.eval(query, base.row(row as usize)), NodeId(row), 0))
                .collect();
            expected.sort_unstable();
            assert_eq!(searcher.search(query, base.rows()), expected);
        }
    }

    #[test]
    fn a_beam_as_wide_as_the_graph_is_exact() {
        for metric in [Metric::L2, Metric::Ip, Metric::Cosine] {
            for dtype in [DType::F32, DType::F16, DType::U8, DType::I8] {
                check_exact(&bunches(dtype, 8, 400, 3), metric, &options(4, 20, 2));
            }
        }
    }

    #[test]
    fn tiny_and_degenerate_bases_are_exact_too() {
        for rows in [1, 2, 3, 20] {
            check_exact(&bunches(DType::I8, 5, rows, 4), Metric::L2, &options(2, 1, 2));
        }
        // All rows equal, and two heaps of copies far apart: more copies than a list or a beam holds.
        let equal = Vectors::from_bytes(DType::I8, 2, [5, 5].repeat(1500)).unwrap();
        check_exact(&equal, Metric::L2, &options(4, 30, 2));
        let heaps: Vec<u8> =
            (0..1500).flat_map(|row| if row % 3 == 0 { [100, 100] } else { [1, 2] }).collect();
        let heaps = Vectors::from_bytes(DType::I8, 2, heaps).unwrap();
        for metric in [Metric::L2, Metric::Ip, Metric::Cosine] {
            check_exact(&heaps, metric, &options(4, 30, 2));
        }
    }

    #[test]
    fn recall_is_that_of_a_good_graph() {
        let base = bunches(DType::I8, 24, 5000, 5);
        let queries = bunches(DType::I8, 24, 5100, 5).slice(5000..5100).unwrap();
        for (threads, metric) in [(1, Metric::L2), (2, Metric::L2), (2, Metric::Cosine)] {
            let graph = build(&base, metric, &options(16, 100, threads), QUIET).unwrap();
            let (_folder, index) = file_of(&graph, &base);
            let found = recall(&index, &base, &queries, 10, 100);
            assert!(found >= 0.97, "{metric} {threads}: {found}");
        }
    }

    #[test]
    fn one_thread_repeats_itself() {
        let base = bunches(DType::F32, 6, 1500, 6);
        let bytes = |seed| {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("graph");
            let mut graph =
                build(&base, Metric::L2, &BuildOptions { seed, ..options(6, 40, 1) }, QUIET).unwrap();
            graph.build.seconds = 0.0;
            graph.write(&path, &base, [0; 32]).unwrap();
            std::fs::read(path).unwrap()
        };
        assert!(bytes(1) == bytes(1), "the same seed gives the same file");
        assert!(bytes(1) != bytes(2), "another seed draws other levels");
    }

    /// What lets `choose_anew` leave out comparisons.
    #[test]
    fn entries_that_stood_do_not_crowd_each_other() {
        let base = bunches(DType::F32, 10, 3000, 8);
        let distance = Distance::new(Metric::L2, DType::F32, 10);
        let params = check_inputs(&base, Metric::L2, 5, 50).unwrap();
        let levels = (0..3000).map(|row| level_of(7, row, 5)).collect();
        let builder =
            Builder::new(Graph::new(params, levels, BuildInfo::default()).unwrap(), &base, &distance);
        let mut worker = Worker::new(3000);
        for row in 0..3000 {
            builder.insert(&mut worker, row);
        }
        let mut stood = 0;
        for row in 0..3000 {
            let list = builder.measured(row, 0);
            for at in 0..list.nodes.len() {
                let node = list.nodes.at(at);
                let own = list.candidate(at, NEW).distance();
                assert_eq!(own, builder.view().distance(row, node), "lengths are distances");
                if at < list.lengths.len() {
                    stood += 1;
                    assert!(
                        (0..at).all(|before| builder.view().distance(node, list.nodes.at(before)) >= own)
                    );
                }
            }
        }
        assert!(stood > 5000, "{stood} entries: the test has something to look at");
    }

    #[test]
    fn levels_follow_the_law_and_the_row() {
        for m in [2, 5, 16] {
            let levels: Vec<_> = (0..100_000).map(|row| level_of(3, row, m)).collect();
            for (level, tolerance) in [(1u8, 0.03f64), (2, 0.1)] {
                let found = levels.iter().filter(|l| **l >= level).count() as f64;
                let expected = 100_000.0 / f64::from(m).powi(level.into());
                assert!(
                    (found / expected - 1.0).abs() < tolerance.max(4.0 / expected.sqrt()),
                    "{m} {level}: {found}"
                );
            }
        }
        assert_eq!(level_of(3, 99, 16), level_of(3, 99, 16));
    }

    #[test]
    fn memory_is_as_stated() {
        let rows = 20_000;
        let levels: Vec<_> = (0..rows).map(|row| level_of(1, row, 16)).collect();
        let base = bunches(DType::I8, 4, rows as usize, 1);
        let params = check_inputs(&base, Metric::L2, 16, 50).unwrap();
        let distance = Distance::new(Metric::L2, DType::I8, 4);
        let builder =
            Builder::new(Graph::new(params, levels, BuildInfo::default()).unwrap(), &base, &distance);
        let lists =
            [&builder.base_lengths, &builder.upper_lengths, &builder.graph.base, &builder.graph.upper];
        let bytes: usize = lists.iter().map(|lists| 4 * lists.words()).sum();
        let beside = rows * (1 + 4 + size_of::<Mutex<()>>() as u64 + 2);
        let stated = memory_bytes(rows, &options(16, 50, 1)) as f64;
        assert!(
            ((bytes as u64 + beside) as f64 / stated - 1.0).abs() < 0.02,
            "{bytes} + {beside}, stated {stated}"
        );
    }

    #[test]
    fn unfit_bases_are_refused_before_any_work() {
        let check = |vectors: Vectors, metric, m, expected: &str| {
            let error = build(&vectors, metric, &options(m, 10, 1), QUIET).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        let f32s = |values: &[f32]| {
            let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            Vectors::from_bytes(DType::F32, 2, bytes).unwrap()
        };
        check(f32s(&[1.0, 2.0]), Metric::L2, 1, "m is 1");
        check(f32s(&[1.0, 2.0, f32::NAN, 0.0]), Metric::L2, 4, "NaN");
        check(f32s(&[1.0, 2.0, 0.0, 0.0]), Metric::Cosine, 4, "row");
    }

    #[test]
    fn progress_reaches_the_end() {
        let last = AtomicU64::new(0);
        build(&bunches(DType::I8, 4, 700, 1), Metric::L2, &options(4, 10, 2), &|done, all| {
            assert!(done <= all && all == 700);
            last.fetch_max(done, Ordering::Relaxed);
        })
        .unwrap();
        assert_eq!(last.into_inner(), 700);
    }
}
