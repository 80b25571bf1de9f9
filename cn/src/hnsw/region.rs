//! The local reader: searches over a graph in the layout of remote memory, in regions of this process that are written
//! while it reads.
//!
//! Lists are copied word by word and held against their checksum, as over a network. Vectors never change once a list
//! names their node, so they are lent where they lie.
//!
//! ```text
//! NodeId ─ chunk table ─▶ region, offset ─┬─ level-0 list ─ copy, checksum ─▶ machine
//!                                         └─ vector ─ prefetch, lend ──────▶ distance
//! ```
//!
//! Invariant: nothing here writes to a vector or a header after [`RegionIndex::load`].

use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use shine_common::graph_file::{GraphFile, GraphFileError};
use shine_common::ids::{ExternalId, NodeId, RegionId, RemotePtr};
use shine_common::layout::{
    BadParam, CollectionParams, EntryPoint, HEADER_BYTES, ListError, ListView, NodeMeta, NodeState,
    UPPER_SLOTS, encode_base_list, header, id_from_words, id_words,
};
use shine_common::metric::{Distance, SimdLevel};
use shine_common::verbs::memory::{HugePages, RegionMemory};

use super::local::{Source, drive};
use super::search::{Candidate, ListRef, Search, SearchStats};
use super::visited::{DenseVisited, Visited};
use crate::reader::{TORN_RETRY_AT_ONCE, TORN_RETRY_MAX, parse_list};

/// Why a graph did not get into regions.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The file is unfit.
    #[error(transparent)]
    File(#[from] GraphFileError),
    /// Its parameters are.
    #[error(transparent)]
    Param(#[from] BadParam),
    /// The kernel gives no memory.
    #[error("mapping a region of {bytes} bytes: {error}")]
    Memory {
        /// Size asked for.
        bytes: u64,
        /// What the kernel says.
        error: std::io::Error,
    },
}

/// What was read that no search can go on with.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// A list is not one, or stayed torn.
    #[error("level-{level} list of {node}: {error}")]
    List {
        /// Whose list.
        node: NodeId,
        /// On which level.
        level: u8,
        /// What is wrong with it.
        error: ListError,
    },
    /// A list names an upper list that is not there.
    #[error("{node} with upper index {upper} has no list on level {level}")]
    Upper {
        /// The node as named.
        node: NodeId,
        /// The index as named.
        upper: u32,
        /// The level.
        level: u8,
    },
    /// A header holds what this version does not write.
    #[error("header of {node}: meta word {word:#018x}")]
    Meta {
        /// Whose header.
        node: NodeId,
        /// The word.
        word: u64,
    },
}

/// Where the parts of a chunk start.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    region: usize,
    headers: u64,
    vectors: u64,
    lists: u64,
}

/// A graph in regions of this process.
#[derive(Debug)]
pub struct RegionIndex {
    regions: Box<[RegionMemory]>,
    params: CollectionParams,
    vector_stride: u64,
    list_stride: u64,
    list_words: usize,
    upper_words: usize,
    /// Slots of a chunk are 2^this many.
    slot_bits: u32,
    chunks: Box<[Chunk]>,
    upper_chunks: Box<[RemotePtr]>,
    rows: u32,
    upper_slots: u32,
    distance: Distance,
    entry: EntryPoint,
    entry_upper: u32,
    /// Held by who changes a list.
    writing: Mutex<()>,
}

impl RegionIndex {
    /// Puts the graph of a file that [was verified](GraphFile::verify) into `regions` regions, chunks round robin.
    ///
    /// # Errors
    /// If a record of the file is unfit, or there is no memory.
    ///
    /// # Panics
    /// If `regions` is zero, or this CPU lacks `simd`.
    pub fn load(
        file: &GraphFile,
        regions: u16,
        pages: HugePages,
        simd: SimdLevel,
    ) -> Result<Self, LoadError> {
        let info = file.info();
        let params = info.params(regions)?;
        let regions = usize::from(regions);
        let mut free: Vec<_> = (0..regions).map(|index| params.first_free(index)).collect();
        let mut allocate = |chunk: usize, bytes: u64| {
            let at = free[chunk % regions];
            free[chunk % regions] += bytes;
            RemotePtr::new(RegionId((chunk % regions) as u16), at)
        };
        let chunk_count = info.rows.div_ceil(params.slots) as usize;
        let starts: Vec<_> = (0..chunk_count).map(|chunk| allocate(chunk, params.chunk_bytes())).collect();
        let upper_count = info.upper_slots.div_ceil(UPPER_SLOTS) as usize;
        let upper_chunks =
            (0..upper_count).map(|chunk| allocate(chunk, params.upper_chunk_bytes())).collect();
        let memory = |bytes: &u64| {
            RegionMemory::new(*bytes, pages).map_err(|error| LoadError::Memory { bytes: *bytes, error })
        };
        let index = Self {
            regions: free.iter().map(memory).collect::<Result<_, _>>()?,
            vector_stride: params.vector_stride(),
            list_stride: params.list_stride(),
            list_words: params.list_stride() as usize / 8,
            upper_words: params.upper_stride() as usize / 8,
            slot_bits: params.slots.ilog2(),
            chunks: starts
                .iter()
                .map(|start| Chunk {
                    region: start.region().0.into(),
                    headers: start.offset(),
                    vectors: params.vector_at(*start, 0).offset(),
                    lists: params.list_at(*start, 0).offset(),
                })
                .collect(),
            upper_chunks,
            rows: info.rows,
            upper_slots: info.upper_slots,
            distance: Distance::with_simd(info.metric, info.dtype, info.dim as usize, simd),
            entry: info.entry,
            entry_upper: file.meta(info.entry.node)?.upper,
            writing: Mutex::new(()),
            params,
        };
        index.fill(file)?;
        Ok(index)
    }

    fn fill(&self, file: &GraphFile) -> Result<(), GraphFileError> {
        for (number, chunk) in self.chunks.iter().enumerate() {
            let memory = &self.regions[chunk.region];
            let first = number as u32 * self.params.slots;
            let rows = first..self.rows.min(first + self.params.slots);
            for (slot, (row, meta)) in rows.clone().zip(file.metas(rows.clone())).enumerate() {
                let at = chunk.headers + slot as u64 * HEADER_BYTES;
                let [low, high] = id_words(file.id(NodeId(row))?);
                for (field, word) in [(header::META, meta), (header::ID_LOW, low), (header::ID_HIGH, high)] {
                    memory.write(at + field, &word.to_le_bytes());
                }
            }
            memory.write(chunk.vectors, file.vectors(rows.clone()));
            memory.write(chunk.lists, file.lists(rows));
        }
        for (number, chunk) in self.upper_chunks.iter().enumerate() {
            let first = number as u32 * UPPER_SLOTS;
            let lists = file.upper(first..self.upper_slots.min(first + UPPER_SLOTS));
            self.regions[usize::from(chunk.region().0)].write(chunk.offset(), lists);
        }
        Ok(())
    }

    /// Number of nodes.
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Replaces the level-0 list of `node`, beside searches.
    ///
    /// # Errors
    /// If the list that is there is not one.
    ///
    /// # Panics
    /// If `node` or one of `neighbours` is not in the graph, or they are more than a list holds.
    pub fn set_list(&self, node: NodeId, neighbours: &[NodeId]) -> Result<(), ReadError> {
        assert!(neighbours.iter().all(|other| other.0 < self.rows), "neighbours are nodes of the graph");
        let (memory, at) = self.list_place(node);
        let mut words = vec![[0; 8]; self.list_words];
        let _alone = self.writing.lock();
        memory.copy_words(at, &mut words);
        let before = ListView::parse_base(words.as_flattened());
        let version = before.map_err(|error| ReadError::List { node, level: 0, error })?.version();
        encode_base_list(words.as_flattened_mut(), version.wrapping_add(1), neighbours);
        memory.write(at, words.as_flattened());
        Ok(())
    }

    /// Buffers for one thread's searches.
    pub fn searcher(&self) -> RegionSearcher<'_> {
        let words = self.list_words.max(self.upper_words);
        RegionSearcher {
            reading: Reading { index: self, list: vec![[0; 8]; words].into_boxed_slice() },
            search: Search::new(DenseVisited::new(self.rows as usize)),
        }
    }

    #[inline]
    fn place(&self, node: NodeId) -> (&Chunk, u64) {
        let slot = node.0 & ((1 << self.slot_bits) - 1);
        (&self.chunks[(node.0 >> self.slot_bits) as usize], slot.into())
    }

    #[inline]
    fn list_place(&self, node: NodeId) -> (&RegionMemory, u64) {
        let (chunk, slot) = self.place(node);
        (&self.regions[chunk.region], chunk.lists + slot * self.list_stride)
    }

    #[inline]
    fn upper_place(&self, want: ListRef) -> Option<(&RegionMemory, u64)> {
        let list =
            want.upper.checked_add(u32::from(want.level) - 1).filter(|list| *list < self.upper_slots)?;
        let (chunk, slot) = self.params.upper_place(list);
        let at = self.params.upper_at(self.upper_chunks[chunk as usize], slot);
        Some((&self.regions[usize::from(at.region().0)], at.offset()))
    }

    #[inline]
    fn vector(&self, node: NodeId) -> &[u8] {
        let (chunk, slot) = self.place(node);
        let at = chunk.vectors + slot * self.vector_stride;
        // SAFETY: vectors are written by `load` alone, before anybody has the index, and `set_list` writes to lists
        // alone, which lie elsewhere.
        unsafe { self.regions[chunk.region].lend(at, self.distance.vector_bytes()) }
    }

    /// State and external id of `node`.
    fn header(&self, node: NodeId) -> Result<(NodeMeta, ExternalId), ReadError> {
        let (chunk, slot) = self.place(node);
        let mut words = [[0; 8]; (HEADER_BYTES / 8) as usize];
        self.regions[chunk.region].copy_words(chunk.headers + slot * HEADER_BYTES, &mut words);
        let word = |field: u64| u64::from_le_bytes(words[field as usize / 8]);
        let meta = NodeMeta::from_word(word(header::META))
            .ok_or(ReadError::Meta { node, word: word(header::META) })?;
        Ok((meta, id_from_words(meta.is_uuid, [word(header::ID_LOW), word(header::ID_HIGH)])))
    }
}

/// An index, and where a thread copies lists to.
#[derive(Debug)]
struct Reading<'a> {
    index: &'a RegionIndex,
    list: Box<[[u8; 8]]>,
}

impl Source for Reading<'_> {
    type Error = ReadError;

    #[inline]
    fn vector(&self, node: NodeId) -> &[u8] {
        self.index.vector(node)
    }

    #[inline]
    fn feed_list<V: Visited>(
        &mut self,
        search: &mut Search<V>,
        at: usize,
        want: ListRef,
    ) -> Result<(), ReadError> {
        let ListRef { node, level, upper } = want;
        let index = self.index;
        let ((memory, from), words) = if level == 0 {
            (index.list_place(node), index.list_words)
        } else {
            let place = index.upper_place(want).ok_or(ReadError::Upper { node, upper, level })?;
            (place, index.upper_words)
        };
        let list = &mut self.list[..words];
        for attempt in 1.. {
            memory.copy_words(from, list);
            match parse_list(level, list.as_flattened()) {
                Ok(view) if level == 0 => {
                    search.feed_list(at, view.nodes().map(|node| (node, 0)));
                    break;
                }
                Ok(view) => {
                    search.feed_list(at, view.upper_nodes());
                    break;
                }
                Err(ListError::Torn) if attempt < TORN_RETRY_MAX => pause(attempt),
                Err(error) => return Err(ReadError::List { node, level, error }),
            }
        }
        Ok(())
    }

    #[inline]
    fn prefetch_list(&self, want: ListRef) {
        if want.level == 0 {
            let (memory, at) = self.index.list_place(want.node);
            memory.prefetch(at, self.index.list_stride as usize);
        }
    }
}

/// Between two readings of a torn list: a write takes less than a microsecond, unless its thread was stopped.
#[cold]
#[expect(
    clippy::disallowed_methods,
    reason = "a synchronous reader, off the runtime: the writer's thread was stopped and needs the processor"
)]
fn pause(attempt: u32) {
    if attempt > TORN_RETRY_AT_ONCE {
        thread::sleep(Duration::from_micros(50 * u64::from(attempt)));
    }
}

/// An answer of a search.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Found {
    /// External id.
    pub id: ExternalId,
    /// Distance from the query.
    pub distance: f32,
}

/// Searches of one thread over a [`RegionIndex`].
#[derive(Debug)]
pub struct RegionSearcher<'a> {
    reading: Reading<'a>,
    search: Search<DenseVisited>,
}

impl RegionSearcher<'_> {
    /// Everything found with a beam of `ef`, nearest first, live or not: at most `ef`.
    ///
    /// # Errors
    /// If a list that the search needs cannot be read.
    ///
    /// # Panics
    /// If `query` is not one vector of the graph's type, or `ef` is zero.
    pub fn candidates(&mut self, query: &[u8], ef: usize) -> Result<&[Candidate], ReadError> {
        let index = self.reading.index;
        self.search.reset(index.entry, index.entry_upper, ef, 0);
        drive(&mut self.reading, &index.distance, &mut self.search, query, |_, _| {})?;
        Ok(self.search.results())
    }

    /// The `k` nearest live records found with a beam of `ef`, nearest first, into `found`.
    ///
    /// # Errors
    /// Also if a header is not one.
    ///
    /// # Panics
    /// As [`Self::candidates`].
    pub fn search(
        &mut self,
        query: &[u8],
        k: usize,
        ef: usize,
        found: &mut Vec<Found>,
    ) -> Result<(), ReadError> {
        let index = self.reading.index;
        found.clear();
        for candidate in self.candidates(query, ef)? {
            if found.len() == k {
                break;
            }
            let (meta, id) = index.header(candidate.node())?;
            if meta.state == NodeState::Live {
                found.push(Found { id, distance: candidate.distance() });
            }
        }
        Ok(())
    }

    /// Work of the last search.
    pub fn stats(&self) -> SearchStats {
        self.search.stats()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use rand::{RngExt as _, SeedableRng as _, seq::SliceRandom as _};
    use rand_chacha::ChaCha8Rng;
    use shine_common::dataset::Vectors;
    use shine_common::graph_file::Check;
    use shine_common::metric::{DType, Metric, from_f64};

    use super::super::build::{BuildOptions, build};
    use super::super::local::LocalIndex;
    use super::*;

    fn rows(dtype: DType, dim: usize, count: usize, seed: u64) -> Vectors {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let row = |_| {
            let values: Vec<_> = (0..dim).map(|_| f64::from(rng.random_range(1..100u8))).collect();
            from_f64(dtype, &values).unwrap()
        };
        Vectors::from_bytes(dtype, dim, (0..count).flat_map(row).collect()).unwrap()
    }

    fn file(base: &Vectors, metric: Metric) -> GraphFile {
        let options = BuildOptions { m: 4, ef_construction: 30, seed: 7, threads: 1 };
        let graph = build(base, metric, &options, &|_, _| {}).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("graph");
        graph.write(&path, base, [0; 32]).unwrap();
        GraphFile::open(&path, Check::Checksums).unwrap()
    }

    fn load(file: &GraphFile, regions: u16) -> RegionIndex {
        RegionIndex::load(file, regions, HugePages::Off, SimdLevel::detect()).unwrap()
    }

    #[test]
    fn answers_are_those_of_the_graph_file_in_their_order() {
        for (dtype, metric, dim, regions) in [
            (DType::I8, Metric::L2, 5, 1),
            (DType::U8, Metric::Ip, 16, 2),
            (DType::F16, Metric::Cosine, 7, 3),
            (DType::F32, Metric::L2, 9, 5),
        ] {
            let base = rows(dtype, dim, 3000, 1);
            let queries = rows(dtype, dim, 50, 2);
            let regions = load(&file(&base, metric), regions);
            let whole = LocalIndex::new(file(&base, metric), SimdLevel::detect()).unwrap();
            let (mut ours, mut expected) = (regions.searcher(), whole.searcher());
            let mut found = Vec::new();
            for query in queries.iter() {
                let expected = expected.search(query, 40);
                assert_eq!(ours.candidates(query, 40).unwrap(), expected);
                ours.search(query, 10, 40, &mut found).unwrap();
                let first: Vec<_> = expected[..10]
                    .iter()
                    .map(|c| Found { id: ExternalId::Num(c.node().0.into()), distance: c.distance() })
                    .collect();
                assert_eq!(found, first);
            }
        }
    }

    #[test]
    fn lists_that_are_written_meanwhile_are_read_whole() {
        let base = rows(DType::I8, 6, 400, 3);
        let index = load(&file(&base, Metric::L2), 2);
        let queries = rows(DType::I8, 6, 200, 4);
        let mut searcher = index.searcher();
        let expected: Vec<_> = queries.iter().map(|q| searcher.candidates(q, 20).unwrap().to_vec()).collect();
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                // The same neighbours in another order: a search that mixes two readings would miss some.
                let mut rng = ChaCha8Rng::seed_from_u64(5);
                let mut words = vec![[0; 8]; index.list_words];
                while !is_over.load(Ordering::Relaxed) {
                    let node = NodeId(rng.random_range(0..index.rows()));
                    let (memory, at) = index.list_place(node);
                    memory.copy_words(at, &mut words);
                    let view = ListView::parse_base(words.as_flattened()).expect("this is the only writer");
                    let mut nodes: Vec<_> = view.nodes().collect();
                    nodes.shuffle(&mut rng);
                    index.set_list(node, &nodes).unwrap();
                }
            });
            for _ in 0..20 {
                for (query, expected) in queries.iter().zip(&expected) {
                    assert_eq!(searcher.candidates(query, 20).unwrap(), expected);
                }
            }
            is_over.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn a_change_is_seen_by_the_next_search() {
        let base = rows(DType::I8, 6, 300, 6);
        let index = load(&file(&base, Metric::L2), 1);
        let mut searcher = index.searcher();
        let query = base.row(9);
        assert_eq!(searcher.candidates(query, 300).unwrap().len(), 300);
        for node in 0..300 {
            index.set_list(NodeId(node), &[]).unwrap();
        }
        assert!(searcher.candidates(query, 300).unwrap().len() < 300, "level 0 leads nowhere");
    }

    #[test]
    fn only_live_records_are_answers() {
        let base = rows(DType::I8, 6, 300, 7);
        let index = load(&file(&base, Metric::L2), 1);
        let mut searcher = index.searcher();
        let (mut before, mut after) = (Vec::new(), Vec::new());
        searcher.search(base.row(3), 5, 300, &mut before).unwrap();
        let ExternalId::Num(nearest) = before[0].id else { panic!("rows are numbered") };
        let (chunk, slot) = index.place(NodeId(nearest as u32));
        let word = index.regions[chunk.region].word(chunk.headers + slot * HEADER_BYTES + header::META);
        let meta = NodeMeta::from_word(word.load(Ordering::Relaxed)).unwrap();
        word.store(NodeMeta { state: NodeState::Dead, ..meta }.to_word(), Ordering::Relaxed);
        searcher.search(base.row(3), 4, 300, &mut after).unwrap();
        assert_eq!(after, before[1..]);
        word.store(u64::MAX, Ordering::Relaxed);
        let error = searcher.search(base.row(3), 4, 300, &mut after).unwrap_err();
        assert!(matches!(error, ReadError::Meta { .. }), "{error}");
    }

    #[test]
    fn what_is_no_list_is_named() {
        let base = rows(DType::I8, 6, 300, 8);
        let index = load(&file(&base, Metric::L2), 1);
        let (memory, at) = index.list_place(NodeId(42));
        memory.write(at, &vec![0; index.list_stride as usize]);
        let error = index.searcher().candidates(base.row(42), 300).unwrap_err();
        assert_eq!(error, ReadError::List { node: NodeId(42), level: 0, error: ListError::Unwritten });
        assert_eq!(index.set_list(NodeId(42), &[]).unwrap_err(), error);
        // An entry that names an upper list which is not there.
        let index = load(&file(&base, Metric::L2), 1);
        let entry = ListRef { node: index.entry.node, level: index.entry.level, upper: index.entry_upper };
        let (memory, at) = index.upper_place(entry).unwrap();
        let mut words = vec![[0; 8]; index.upper_words];
        shine_common::layout::encode_upper_list(words.as_flattened_mut(), 1, &[(NodeId(1), u32::MAX)]);
        memory.write(at, words.as_flattened());
        let mut upper = index.searcher();
        match upper.candidates(base.row(1), 300) {
            Err(error) => assert!(matches!(error, ReadError::Upper { upper: u32::MAX, .. }), "{error}"),
            Ok(_) => panic!("the node nearest to the query is expanded"),
        }
    }
}
