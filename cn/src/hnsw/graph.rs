//! A graph in the memory of this process: what the builders make and the graph file is written from.
//!
//! ```text
//! base    rows × ( count │ m0 nodes )           upper   upper slots × ( count │ m nodes )
//! ```
//!
//! Words are atomics, so that searches read lists while builder threads change them. Who changes a list holds its
//! node's lock.
//!
//! Invariant: every entry of a list is a row of the graph whose vector is there, at any moment: a reader that meets a
//! list half rewritten sees a mixture of old and new neighbours, both good.

use std::convert::Infallible;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use shine_common::dataset::{DataError, Vectors};
use shine_common::graph_file::{BuildInfo, GraphFileError, GraphInfo, GraphWriter, place_upper};
use shine_common::ids::NodeId;
use shine_common::layout::{BadParam, CollectionParams, EntryPoint, LEVEL_MAX, NodeMeta, NodeState};
use shine_common::metric::{Distance, Metric};

use super::local::Source;
use super::prefetch::prefetch;
use super::search::{ListRef, Search};
use super::visited::Visited;

/// A base that no graph can be built over.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// A parameter is out of range.
    #[error(transparent)]
    Param(#[from] BadParam),
    /// A vector is unfit.
    #[error(transparent)]
    Data(#[from] DataError),
    /// More upper lists than numbers for them.
    #[error("{rows} rows need more upper lists than can be numbered: use a larger m than {m}")]
    UpperSlots {
        /// Rows of the base.
        rows: usize,
        /// The m asked for.
        m: u32,
    },
}

/// Checks what every builder needs: parameters in range, no more rows than NodeIds, a distance between any two rows.
pub(super) fn check_inputs(
    vectors: &Vectors,
    metric: Metric,
    m: u32,
    ef_construction: u32,
) -> Result<CollectionParams, BuildError> {
    let rows = vectors.rows() as u64;
    if rows >= u64::from(u32::MAX) {
        let expected = format!("below {}", u32::MAX);
        return Err(BadParam { field: "rows", given: rows, expected }.into());
    }
    let params =
        CollectionParams::new(vectors.dtype(), metric, vectors.dim() as u32, m, ef_construction, rows, 1)?;
    vectors.check_for(metric)?;
    Ok(params)
}

/// Many lists of one capacity.
#[derive(Debug)]
pub(super) struct Lists {
    stride: usize,
    words: Box<[AtomicU32]>,
}

impl Lists {
    pub(super) fn new(count: usize, capacity: usize) -> Self {
        let stride = 1 + capacity;
        Self { stride, words: (0..count * stride).map(|_| AtomicU32::new(0)).collect() }
    }

    pub(super) fn count(&self) -> usize {
        self.words.len() / self.stride
    }

    #[cfg(test)]
    pub(super) fn words(&self) -> usize {
        self.words.len()
    }

    #[inline]
    pub(super) fn get(&self, at: usize) -> List<'_> {
        List(&self.words[at * self.stride..][..self.stride])
    }
}

/// One list.
#[derive(Debug, Clone, Copy)]
pub(super) struct List<'a>(&'a [AtomicU32]);

impl<'a> List<'a> {
    pub(super) fn capacity(self) -> usize {
        self.0.len() - 1
    }

    #[inline]
    pub(super) fn len(self) -> usize {
        // Acquire pairs with the Release in `set_len`: entries below a count are written.
        self.0[0].load(Ordering::Acquire) as usize
    }

    #[inline]
    pub(super) fn iter(self) -> impl ExactSizeIterator<Item = u32> + use<'a> {
        self.0[1..][..self.len()].iter().map(|word| word.load(Ordering::Relaxed))
    }

    pub(super) fn prefetch(self) {
        prefetch(self.0);
    }

    /// Entry `at`, also of a list whose count says otherwise.
    #[inline]
    pub(super) fn at(self, at: usize) -> u32 {
        self.0[1 + at].load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn set(self, at: usize, value: u32) {
        self.0[1 + at].store(value, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn set_len(self, len: usize) {
        debug_assert!(len <= self.capacity());
        self.0[0].store(len as u32, Ordering::Release);
    }

    pub(super) fn push(self, node: u32) {
        let len = self.len();
        self.set(len, node);
        self.set_len(len + 1);
    }
}

/// A graph over the rows of a base: NodeId = row.
#[derive(Debug)]
pub struct Graph {
    pub(super) params: CollectionParams,
    pub(super) levels: Vec<u8>,
    /// Index of each row's level-1 list.
    pub(super) uppers: Vec<u32>,
    pub(super) base: Lists,
    pub(super) upper: Lists,
    pub(super) entry: EntryPoint,
    pub(super) build: BuildInfo,
    /// Nodes that the entry point does not lead to, after all repairs.
    pub(super) unreached: u32,
}

impl Graph {
    /// A graph without links. The entry point is the first row of the highest level.
    pub(super) fn new(
        params: CollectionParams,
        levels: Vec<u8>,
        build: BuildInfo,
    ) -> Result<Self, BuildError> {
        assert!(levels.iter().all(|level| *level <= LEVEL_MAX), "levels are drawn up to {LEVEL_MAX}");
        let mut slots = 0;
        let uppers: Option<Vec<_>> = levels.iter().map(|level| place_upper(&mut slots, *level)).collect();
        let uppers = uppers.ok_or(BuildError::UpperSlots { rows: levels.len(), m: params.m })?;
        let level = *levels.iter().max().expect("a base has rows");
        let node = levels.iter().position(|l| *l == level).expect("found above");
        Ok(Self {
            base: Lists::new(levels.len(), params.m0 as usize),
            upper: Lists::new(slots as usize, params.m as usize),
            entry: EntryPoint { node: NodeId(node as u32), level },
            params,
            levels,
            uppers,
            build,
            unreached: 0,
        })
    }

    /// Number of nodes.
    pub fn rows(&self) -> usize {
        self.levels.len()
    }

    /// Where searches start.
    pub fn entry(&self) -> EntryPoint {
        self.entry
    }

    /// How it was made.
    pub fn build_info(&self) -> &BuildInfo {
        &self.build
    }

    /// Nodes that no search finds, because the entry point does not lead to them: none, unless the builder's repairs
    /// were used up. Vectors of very uneven norms under the inner product need most of them: nobody is near to a short
    /// one.
    pub fn unreached(&self) -> u32 {
        self.unreached
    }

    /// Links on level 0, over all nodes.
    pub fn links(&self) -> u64 {
        (0..self.rows()).map(|row| self.base.get(row).len() as u64).sum()
    }

    #[inline]
    pub(super) fn list(&self, node: u32, level: u8) -> List<'_> {
        if level == 0 {
            self.base.get(node as usize)
        } else {
            self.upper.get(self.uppers[node as usize] as usize + usize::from(level) - 1)
        }
    }

    /// Writes the graph with the vectors that it was built over. External ids are row numbers.
    ///
    /// # Errors
    /// If the disk refuses.
    ///
    /// # Panics
    /// If `vectors` are others than those.
    pub fn write(&self, path: &Path, vectors: &Vectors, data_hash: [u8; 32]) -> Result<(), GraphFileError> {
        let params = &self.params;
        assert_eq!(
            (vectors.rows(), vectors.dim(), vectors.dtype()),
            (self.rows(), params.dim as usize, params.dtype),
            "a graph is written with its own vectors"
        );
        let last = self.levels.iter().zip(&self.uppers).map(|(level, upper)| upper + u32::from(*level));
        let info = GraphInfo {
            dtype: params.dtype,
            metric: params.metric,
            dim: params.dim,
            m: params.m,
            ef_construction: params.ef_construction,
            rows: self.rows() as u32,
            has_ids: false,
            upper_slots: last.max().expect("a base has rows"),
            entry: self.entry,
            build: BuildInfo { data_hash, ..self.build.clone() },
        };
        let mut writer = GraphWriter::create(path, info)?;
        for (level, upper) in self.levels.iter().zip(&self.uppers) {
            let meta = NodeMeta { state: NodeState::Live, level: *level, is_uuid: false, upper: *upper };
            writer.push_meta(meta)?;
        }
        for vector in vectors.iter() {
            writer.push_vector(vector)?;
        }
        let mut nodes = Vec::new();
        for row in 0..self.rows() {
            nodes.clear();
            nodes.extend(self.base.get(row).iter().map(NodeId));
            writer.push_list(&nodes)?;
        }
        let mut slot = 0;
        let mut entries = Vec::new();
        for (level, upper) in self.levels.iter().zip(&self.uppers) {
            for at in *upper..*upper + u32::from(*level) {
                while slot < at {
                    writer.push_upper(None)?;
                    slot += 1;
                }
                entries.clear();
                let list = self.upper.get(at as usize);
                entries.extend(list.iter().map(|node| (NodeId(node), self.uppers[node as usize])));
                writer.push_upper(Some(&entries))?;
                slot += 1;
            }
        }
        writer.finish()
    }
}

/// A graph that may still be growing, and its vectors.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) graph: &'a Graph,
    pub(super) vectors: &'a Vectors,
    pub(super) distance: &'a Distance,
}

impl View<'_> {
    #[inline]
    pub(super) fn distance(&self, a: u32, b: u32) -> f32 {
        self.distance.eval(self.vectors.row(a as usize), self.vectors.row(b as usize))
    }
}

impl Source for View<'_> {
    type Error = Infallible;

    #[inline]
    fn vector(&self, node: NodeId) -> &[u8] {
        self.vectors.row(node.0 as usize)
    }

    #[inline]
    fn feed_list<V: Visited>(
        &mut self,
        search: &mut Search<V>,
        at: usize,
        want: ListRef,
    ) -> Result<(), Infallible> {
        let list = self.graph.list(want.node.0, want.level).iter();
        if want.level == 0 {
            search.feed_list(at, list.map(|node| (NodeId(node), 0)));
        } else {
            search.feed_list(at, list.map(|node| (NodeId(node), self.graph.uppers[node as usize])));
        }
        Ok(())
    }

    #[inline]
    fn prefetch_list(&self, want: ListRef) {
        self.graph.list(want.node.0, want.level).prefetch();
    }
}
