//! Graphs made by the crate hnsw_rs: the yardstick for our own builder, and `--builder hnsw_rs`.
//!
//! It sees vectors as bytes and compares them through our kernels, whatever their type. What the export has to mind:
//!
//! - its asserts want distances of 0 or more, which inner products are not: see `Kernel`;
//! - the entry point is private: it is one of the points of the highest layer, so the one among them that leads to most
//!   of the others is taken;
//! - lists above a point's own level are leftovers of the build, and some lists name points that are not on their layer
//!   (the entry point of a search stays in its results): both are left out;
//! - not every point is reached from the entry point: orphans are linked, as in our own builder.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use hnsw_rs::hnsw::Hnsw;
use shine_common::dataset::{Progress, Vectors};
use shine_common::graph_file::BuildInfo;
use shine_common::ids::NodeId;
use shine_common::layout::{CollectionParams, EntryPoint};
use shine_common::metric::{Distance, Metric};

use super::build::BuildOptions;
use super::graph::{BuildError, Graph, View, check_inputs};
use super::repair;

/// Layers that hnsw_rs has.
const LAYERS: usize = 16;
/// Rows between two reports of progress by a thread.
const PROGRESS_ROWS: u64 = 256;

/// Our kernels as hnsw_rs wants them. Where distances can be negative, their order is mapped onto the floats from 0 up
/// (hnsw_rs only ever compares distances): one bit of them gets lost, and nothing can overflow.
struct Kernel {
    distance: Distance,
    negative: bool,
}

impl Kernel {
    fn new(distance: Distance) -> Self {
        Self { negative: distance.metric() == Metric::Ip, distance }
    }
}

impl hnsw_rs::prelude::Distance<u8> for Kernel {
    fn eval(&self, a: &[u8], b: &[u8]) -> f32 {
        let distance = self.distance.eval(a, b);
        if self.negative { from_zero_up(distance) } else { distance }
    }
}

/// A float of 0 or more, ordered among its like as `distance`, a finite number, is among all floats.
fn from_zero_up(distance: f32) -> f32 {
    let bits = distance.to_bits();
    let order = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
    // The smallest finite number has order 0x0080_0000, and the largest ends up as itself.
    f32::from_bits((order - 0x0080_0000) >> 1)
}

/// An index of hnsw_rs.
pub struct HnswRs<'a> {
    index: Hnsw<'static, u8, Kernel>,
    vectors: &'a Vectors,
    params: CollectionParams,
    info: BuildInfo,
}

impl std::fmt::Debug for HnswRs<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HnswRs({} rows)", self.index.get_nb_point())
    }
}

impl<'a> HnswRs<'a> {
    /// Inserts all rows, in row order over all threads. hnsw_rs draws levels from a seed of its own; `options.seed` does
    /// nothing. It keeps a copy of every vector.
    ///
    /// # Errors
    /// If a parameter is out of range, or a vector has no distance under `metric`; both before any work.
    pub fn build(
        vectors: &'a Vectors,
        metric: Metric,
        options: &BuildOptions,
        progress: Progress<'_>,
    ) -> Result<Self, BuildError> {
        let params = check_inputs(vectors, metric, options.m, options.ef_construction)?;
        let started = Instant::now();
        let rows = vectors.rows() as u64;
        let threads = options.threads().min(vectors.rows());
        let kernel = Kernel::new(Distance::new(metric, vectors.dtype(), vectors.dim()));
        let (m, ef) = (options.m as usize, options.ef_construction as usize);
        let index = Hnsw::new(m, vectors.rows(), LAYERS, ef, kernel);
        // The first alone, so that there is an entry point for all others.
        index.insert_slice((vectors.row(0), 0));
        let next = AtomicU64::new(1);
        thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    loop {
                        let row = next.fetch_add(1, Ordering::Relaxed);
                        if row >= rows {
                            return;
                        }
                        index.insert_slice((vectors.row(row as usize), row as usize));
                        if row.is_multiple_of(PROGRESS_ROWS) {
                            progress(row, rows);
                        }
                    }
                });
            }
        });
        progress(rows, rows);
        let info = BuildInfo {
            builder: "hnsw_rs".into(),
            seconds: started.elapsed().as_secs_f64(),
            threads: threads as u32,
            ..BuildInfo::default()
        };
        Ok(Self { index, vectors, params, info })
    }

    /// Its own search: rows, nearest first.
    pub fn search(&self, query: &[u8], k: usize, ef: usize) -> Vec<u32> {
        self.index.search(query, k, ef).into_iter().map(|found| found.d_id as u32).collect()
    }

    /// The graph, repaired where it is not one piece.
    ///
    /// # Errors
    /// If its upper lists are more than can be numbered.
    pub fn export(&self) -> Result<Graph, BuildError> {
        let points = self.index.get_point_indexation();
        let layers = 0..=usize::from(points.get_max_level_observed());
        let mut levels = vec![0; self.vectors.rows()];
        for layer in layers.clone() {
            for point in points.get_layer_iterator(layer) {
                levels[point.get_origin_id()] = layer as u8;
            }
        }
        let mut graph = Graph::new(self.params.clone(), levels, self.info.clone())?;
        let dropped = AtomicU32::new(0);
        for point in layers.flat_map(|layer| points.get_layer_iterator(layer)) {
            let row = point.get_origin_id() as u32;
            let level = graph.levels[row as usize];
            for (on, entries) in (0..=level).zip(point.get_neighborhood_id()) {
                let list = graph.list(row, on);
                for entry in entries {
                    let node = entry.d_id as u32;
                    if graph.levels[node as usize] >= on
                        && node != row
                        && list.len() < list.capacity()
                        && !list.iter().any(|earlier| earlier == node)
                    {
                        list.push(node);
                    } else {
                        dropped.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
        }
        graph.entry = entry_point(&graph);
        let distance = Distance::new(self.params.metric, self.params.dtype, self.params.dim as usize);
        let view = View { graph: &graph, vectors: self.vectors, distance: &distance };
        let repaired = repair::repair(&view, self.params.ef_construction as usize);
        tracing::debug!(?repaired, dropped = dropped.into_inner(), "exported a graph of hnsw_rs");
        repaired.record(&mut graph);
        Ok(graph)
    }
}

/// The node of the highest level that leads to most of the others there.
fn entry_point(graph: &Graph) -> EntryPoint {
    let level = graph.entry.level;
    let tops: Vec<_> = (0..graph.rows() as u32).filter(|row| graph.levels[*row as usize] == level).collect();
    let reaches = |from: u32| {
        let mut reached = vec![from];
        let mut at = 0;
        while at < reached.len() {
            for node in graph.list(reached[at], level).iter() {
                if !reached.contains(&node) {
                    reached.push(node);
                }
            }
            at += 1;
        }
        reached.len()
    };
    // The first of equals: `max_by_key` takes the last.
    let node = tops.iter().rev().copied().max_by_key(|row| reaches(*row)).expect("some node is highest");
    EntryPoint { node: NodeId(node), level }
}

/// [`HnswRs::build`] and [`HnswRs::export`] in one.
///
/// # Errors
/// As theirs.
pub fn build(
    vectors: &Vectors,
    metric: Metric,
    options: &BuildOptions,
    progress: Progress<'_>,
) -> Result<Graph, BuildError> {
    HnswRs::build(vectors, metric, options, progress)?.export()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_map_from_zero_up_keeps_order(a in any::<f32>(), b in any::<f32>()) {
            prop_assume!(a.is_finite() && b.is_finite());
            let (x, y) = (from_zero_up(a), from_zero_up(b));
            prop_assert!(x >= 0.0 && x.is_finite());
            if a < b {
                prop_assert!(x <= y);
            }
        }
    }

    #[test]
    fn the_map_from_zero_up_tells_whole_numbers_apart() {
        // Inner products of bytes; the widest that are exact in f32 share bits with their neighbours.
        let mut before = -1.0;
        for dot in -4_000_000..4_000_000 {
            let mapped = from_zero_up(dot as f32);
            assert!(mapped > before, "{dot}");
            before = mapped;
        }
        assert_eq!(from_zero_up(f32::MIN), 0.0);
        assert_eq!(from_zero_up(f32::MAX), f32::MAX);
    }
}
