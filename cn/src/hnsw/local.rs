//! The synchronous driver of the search machine, and searches straight over a graph file.
//!
//! Invariant: the driver looks ahead, it never reorders: vectors are prefetched inside a batch and the likely next list
//! during it, while distances are fed in list order.

use std::convert::Infallible;

use shine_common::graph_file::{GraphFile, GraphFileError};
use shine_common::ids::NodeId;
use shine_common::metric::{Distance, SimdLevel};

use super::prefetch::{lines, prefetch};
use super::search::{Candidate, ListRef, Search, SearchStats, Step};
use super::visited::{DenseVisited, Visited};

/// Cache lines that are on their way while a vector is compared: about what a core can wait for at a time.
const LINES_AHEAD: usize = 28;

/// Vectors of `bytes` that are on their way while one is compared.
fn look_ahead(bytes: usize) -> usize {
    (LINES_AHEAD / lines(bytes)).clamp(2, 16)
}

/// Where a synchronous driver reads from: a graph and vectors at hand.
pub(super) trait Source {
    /// Why a list cannot be fed.
    type Error;
    /// The vector of a node that the visited set admits.
    fn vector(&self, node: NodeId) -> &[u8];
    /// Feeds the `at`-th wanted list; an empty one for a list that does not exist.
    fn feed_list<V: Visited>(
        &mut self,
        search: &mut Search<V>,
        at: usize,
        want: ListRef,
    ) -> Result<(), Self::Error>;
    /// Says that a list will probably be wanted.
    fn prefetch_list(&self, want: ListRef);
}

/// Runs a search that was [reset](Search::reset) to its end. `level_done` sees the results of each dense level.
#[inline]
pub(super) fn drive<V: Visited, S: Source>(
    source: &mut S,
    distance: &Distance,
    search: &mut Search<V>,
    query: &[u8],
    mut level_done: impl FnMut(u8, &[Candidate]),
) -> Result<(), S::Error> {
    let ahead = look_ahead(query.len());
    loop {
        match search.step() {
            Step::Lists => {
                for at in 0..search.wanted_lists().len() {
                    let want = search.wanted_lists()[at];
                    source.feed_list(search, at, want)?;
                }
            }
            Step::Vectors => {
                for node in search.wanted_vectors().iter().take(ahead) {
                    prefetch(source.vector(*node));
                }
                if let Some(list) = search.likely_next() {
                    source.prefetch_list(list);
                }
                search.feed_distances(|nodes, at| {
                    if let Some(node) = nodes.get(at + ahead) {
                        prefetch(source.vector(*node));
                    }
                    distance.eval(query, source.vector(nodes[at]))
                });
            }
            Step::LevelDone(level) => level_done(level, search.results()),
            Step::Done => return Ok(()),
        }
    }
}

/// A graph file opened for searching.
#[derive(Debug)]
pub struct LocalIndex {
    file: GraphFile,
    distance: Distance,
    entry_upper: u32,
}

impl LocalIndex {
    /// Over a file whose checksums were checked.
    ///
    /// # Errors
    /// If the entry point is none.
    ///
    /// # Panics
    /// If this CPU lacks `simd`.
    pub fn new(file: GraphFile, simd: SimdLevel) -> Result<Self, GraphFileError> {
        let info = file.info();
        let distance = Distance::with_simd(info.metric, info.dtype, info.dim as usize, simd);
        let entry_upper = file.meta(info.entry.node)?.upper;
        Ok(Self { file, distance, entry_upper })
    }

    /// The file.
    pub fn file(&self) -> &GraphFile {
        &self.file
    }

    /// Buffers for one thread's searches.
    pub fn searcher(&self) -> LocalSearcher<'_> {
        LocalSearcher { index: self, search: Search::new(DenseVisited::new(self.file.rows() as usize)) }
    }
}

impl Source for &LocalIndex {
    type Error = Infallible;

    #[inline]
    fn vector(&self, node: NodeId) -> &[u8] {
        self.file.vector(node)
    }

    #[inline]
    fn feed_list<V: Visited>(
        &mut self,
        search: &mut Search<V>,
        at: usize,
        want: ListRef,
    ) -> Result<(), Infallible> {
        if want.level == 0 {
            let links = self.file.links(want.node);
            search.feed_list(at, links.iter().map(|node| (NodeId(node.get()), 0)));
            return Ok(());
        }
        // A file that lies about upper indices (its checksums do not tell) yields a list of other nodes, or none.
        let slot = u64::from(want.upper) + u64::from(want.level) - 1;
        let links =
            if slot < self.file.info().upper_slots.into() { self.file.upper_links(slot as u32) } else { &[] };
        search.feed_list(at, links.iter().map(|link| (NodeId(link.node.get()), link.upper.get())));
        Ok(())
    }

    #[inline]
    fn prefetch_list(&self, want: ListRef) {
        if want.level == 0 {
            prefetch(self.file.lists(want.node.0..want.node.0 + 1));
        }
    }
}

/// Searches of one thread over a [`LocalIndex`].
#[derive(Debug)]
pub struct LocalSearcher<'a> {
    index: &'a LocalIndex,
    search: Search<DenseVisited>,
}

impl LocalSearcher<'_> {
    /// The nearest found of `query` with a beam of `ef`, nearest first: at most `ef`.
    ///
    /// # Panics
    /// If `query` is not one vector of the graph's type, or `ef` is zero.
    pub fn search(&mut self, query: &[u8], ef: usize) -> &[Candidate] {
        let entry = self.index.file.info().entry;
        self.search.reset(entry, self.index.entry_upper, ef, 0);
        let mut index = self.index;
        let Ok(()) = drive(&mut index, &self.index.distance, &mut self.search, query, |_, _| {});
        self.search.results()
    }

    /// Work of the last search.
    pub fn stats(&self) -> SearchStats {
        self.search.stats()
    }
}
