//! Loading a graph file: pieces of it come in any order and go to remote memory as they are, after every number in them
//! was checked.
//!
//! ```text
//! begin: create (loading), allocate all chunks ─▶ nodes … ─▶ upper lists … ─▶ end: entry point, ready
//!                                                 ├─ a wrong piece, or aborted ─▶ dropped
//!                                                 └─ idle too long, or its node is gone ─▶ left, until somebody resumes
//! ```
//!
//! How far it is stands in remote memory: the file's fingerprint, and how many nodes and upper lists are there, counted
//! from the first without a gap. Whoever resumes has the rest sent again: a piece may be written any number of times.
//!
//! Invariant: node numbers are rows of the file, so one file gives the same numbers everywhere; a collection becomes
//! searchable only when all of the file is there; and one node at a time loads it, since pieces enter ids without locks.
//! Regions name the loader's sessions, and only once these are dead another node resumes.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rand::RngExt as _;
use shine_common::ids::{CollectionId, ExternalId, NodeId, RegionId, RemotePtr, SessionId};
use shine_common::layout::{
    CollectionParams, EntryPoint, HEADER_BYTES, ListView, NodeMeta, NodeState, UPPER_SLOTS,
    collection as at_home, header, id_words, region as in_region,
};
use shine_common::verbs::{BATCH_BYTES_MAX, Verbs};
use shine_common::wire::{
    Collection as MapEntry, CollectionSpec, CollectionState, Fault, FaultCode, OracleRequest,
};
use tracing::{debug, info, warn};

use crate::alloc::Rooms;
use crate::catalogue::Catalogue;
use crate::collection::{Collection, Entry, Options, Table, corrupt, first_not_finite, word};
use crate::fabric::{Cost, Fabric, Gather, WriteSet, os_rng};
use crate::id_table::{self, DuplicateId};
use crate::reader::Reader;

/// Most loads at a time on one compute node.
pub const LOADS_MAX: usize = 4;
/// A load that nothing came for in this time is let go; it can be resumed.
pub const IDLE_MAX: Duration = Duration::from_secs(60);
/// Records that are asked for at once when a load is resumed.
const HEADERS_BATCH: u32 = 16_384;
/// Most bytes that one round of writes carries.
const ROUND_BYTES: usize = 4 * BATCH_BYTES_MAX;

fn bad(message: impl Into<String>) -> Fault {
    Fault::new(FaultCode::BadRequest, message)
}

/// Which numbers of `0..total` have come.
#[derive(Debug)]
struct Coverage {
    total: u32,
    /// Start → end of stretches that do not touch.
    stretches: BTreeMap<u32, u32>,
}

impl Coverage {
    /// The first `done` have come.
    fn new(total: u32, done: u32) -> Self {
        let stretches = if done > 0 { BTreeMap::from([(0, done)]) } else { BTreeMap::new() };
        Self { total, stretches }
    }

    /// Adds a stretch; `false` if part of it was there already or is out of range.
    fn add(&mut self, range: Range<u32>) -> bool {
        if range.is_empty() || range.end > self.total {
            return false;
        }
        let before = self.stretches.range(..range.end).next_back().map(|(start, end)| (*start, *end));
        if before.is_some_and(|(_, end)| end > range.start) {
            return false;
        }
        let start = match before {
            Some((start, end)) if end == range.start => start,
            _ => range.start,
        };
        let end = self.stretches.remove(&range.end).unwrap_or(range.end);
        self.stretches.insert(start, end);
        true
    }

    /// Takes a stretch out that was added.
    fn remove(&mut self, range: Range<u32>) {
        let (start, end) = self
            .stretches
            .range(..=range.start)
            .next_back()
            .map(|(start, end)| (*start, *end))
            .filter(|(_, end)| *end >= range.end)
            .expect("what is taken out was added");
        self.stretches.remove(&start);
        if start < range.start {
            self.stretches.insert(start, range.start);
        }
        if range.end < end {
            self.stretches.insert(range.end, end);
        }
    }

    fn is_complete(&self) -> bool {
        self.total == 0 || self.stretches.get(&0) == Some(&self.total)
    }

    fn first_missing(&self) -> u32 {
        self.stretches.get(&0).copied().unwrap_or(0)
    }
}

/// A node that is above level 0.
#[derive(Clone, Copy, Debug)]
struct Tall {
    node: u32,
    level: u8,
}

/// Of one kind of items: which have come, and which are written.
#[derive(Debug)]
struct Part {
    came: Coverage,
    written: Coverage,
}

impl Part {
    fn new(total: u32, done: u32) -> Self {
        Self { came: Coverage::new(total, done), written: Coverage::new(total, done) }
    }
}

#[derive(Debug)]
struct Progress {
    nodes: Part,
    upper: Part,
    /// By upper index: one entry per node above level 0, a sixteenth of all at m = 16.
    tall: BTreeMap<u32, Tall>,
    last_piece: Instant,
    /// Pieces that are being written.
    at_work: u32,
    is_over: bool,
}

/// A load under way.
#[derive(Debug)]
pub struct Load<V> {
    collection: Arc<Collection<V>>,
    nodes: u32,
    upper_slots: u32,
    /// This node's sessions, as the regions name them.
    sessions: Vec<(RegionId, SessionId)>,
    progress: Mutex<Progress>,
    /// The id table, which pieces fill one after another, with the room that its overflow is taken from.
    ids: tokio::sync::Mutex<Rooms>,
}

/// A piece of a graph file: nodes `first ..`.
#[derive(Debug)]
pub struct NodesPiece {
    /// Number of the first node.
    pub first: u32,
    /// Header meta words.
    pub metas: Vec<u64>,
    /// External ids; empty means the node numbers.
    pub ids: Vec<ExternalId>,
    /// Vectors at the layout's stride.
    pub vectors: Vec<u8>,
    /// Encoded level-0 lists.
    pub lists: Vec<u8>,
}

/// The file that is loaded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Source {
    /// Its fingerprint ([`shine_common::graph_file::GraphFile::fingerprint`]).
    pub file: u64,
    /// Nodes.
    pub nodes: u32,
    /// Upper slots.
    pub upper_slots: u32,
}

/// What there is to resume.
#[derive(Debug)]
pub enum Resumed<V> {
    /// The rest of the file.
    Rest(Arc<Load<V>>),
    /// Nothing: all of it is loaded.
    Whole,
    /// Everything: memory for it was not taken. The collection is to be made anew.
    Nothing,
}

impl<V: Verbs> Load<V> {
    /// Creates the collection and takes memory for all of the file.
    ///
    /// # Errors
    /// [`FaultCode::RegionFull`] if the file does not fit, before anything is sent; and what the oracle says.
    pub async fn begin(
        fabric: Arc<Fabric<V>>,
        catalogue: Arc<dyn Catalogue>,
        mut spec: CollectionSpec,
        source: Source,
        options: Options,
        deadline: Instant,
    ) -> Result<Self, Fault> {
        let Source { nodes, upper_slots, file } = source;
        if nodes == 0 || file == 0 {
            return Err(bad("a graph file has at least one node, and a fingerprint"));
        }
        spec.loading = true;
        spec.capacity = spec.capacity.max(nodes.into());
        let collection = Collection::create(fabric, catalogue, spec, options, deadline).await?;
        let begun = async {
            let rooms = allocate(&collection, nodes, upper_slots, deadline).await?;
            let load =
                Self::new(&collection, source, rooms, (0, 0), BTreeMap::new(), NO_SESSION, deadline).await?;
            let mut set = WriteSet::new();
            set.push_word(collection.home_at(at_home::LOAD_FILE), file);
            collection.write(&set, deadline, &mut Cost::default()).await?;
            info!(collection = collection.name(), nodes, "load begun");
            Ok(load)
        };
        match begun.await {
            Ok(load) => Ok(load),
            Err(fault) => {
                drop_collection(&collection, deadline).await;
                Err(fault)
            }
        }
    }

    /// Goes on with a load of `source` into the collection that `entry` of the map describes.
    ///
    /// # Errors
    /// [`FaultCode::Unavailable`] while another compute node that is alive loads it, [`FaultCode::CollectionExists`] if
    /// it is not a load of that file, and what memory nodes say.
    pub async fn resume(
        fabric: Arc<Fabric<V>>,
        catalogue: Arc<dyn Catalogue>,
        entry: &MapEntry,
        source: Source,
        options: Options,
        deadline: Instant,
    ) -> Result<Resumed<V>, Fault> {
        let not_ours = || {
            let message = format!(
                "collection '{}' exists already, and not by a load of this file: there is nothing to resume",
                entry.name
            );
            Fault::new(FaultCode::CollectionExists, message)
        };
        if entry.state == CollectionState::Creating {
            return Err(not_ours());
        }
        let collection = Collection::open(fabric, catalogue, entry, options, deadline).await?;
        let mut cost = Cost::default();
        let mut gather = Gather::new();
        for at in [at_home::LOAD_FILE, at_home::LOAD_NODES, at_home::LOAD_UPPER] {
            gather.push(collection.home_at(at), 8);
        }
        collection.gather(&mut gather, deadline, &mut cost).await?;
        let [file, nodes_done, upper_done] = [0, 1, 2].map(|i| word(gather.get(i), 0));
        if entry.state == CollectionState::Loading && file == 0 {
            return Ok(Resumed::Nothing);
        }
        if file != source.file {
            return Err(not_ours());
        }
        if entry.state == CollectionState::Ready {
            return Ok(Resumed::Whole);
        }
        let within = |done: u64, all: u32| u32::try_from(done).ok().filter(|done| *done <= all);
        let done = within(nodes_done, source.nodes).zip(within(upper_done, source.upper_slots));
        let done = done.ok_or_else(|| {
            corrupt(format!(
                "collection '{}' says that {nodes_done} nodes and {upper_done} upper lists of a file with {} and {} \
                 are loaded",
                collection.name(),
                source.nodes,
                source.upper_slots
            ))
        })?;
        let loader = expect_no_other_loader(&collection, deadline, &mut cost).await?;
        let rooms = Rooms::read(&collection, deadline, &mut cost).await?;
        collection.read_tables(&rooms, deadline, &mut cost).await?;
        let tall = read_tall(&collection, done.0, deadline).await?;
        let load = Self::new(&collection, source, rooms, done, tall, loader, deadline).await?;
        info!(collection = collection.name(), nodes = done.0, upper_lists = done.1, "load resumed");
        Ok(Resumed::Rest(Arc::new(load)))
    }

    /// A load of which the first nodes and upper lists are `done`. Its regions then name this node's sessions; of several
    /// nodes that take it over from `loader` one succeeds.
    async fn new(
        collection: &Arc<Collection<V>>,
        source: Source,
        rooms: Rooms,
        done: (u32, u32),
        tall: BTreeMap<u32, Tall>,
        loader: SessionId,
        deadline: Instant,
    ) -> Result<Self, Fault> {
        let mut cost = Cost::default();
        let mut sessions = Vec::new();
        let mut set = WriteSet::new();
        for region in collection.regions() {
            let at = RemotePtr::new(region, in_region::LOADER);
            let session = collection.session_number(at, deadline).await?;
            sessions.push((region, session));
            set.push_word(at, session.0.into());
        }
        // The home region's decides.
        let at = collection.home_at(in_region::LOADER);
        let (old, own) = (u64::from(loader.0), u64::from(sessions[0].1.0));
        if collection.compare_swap(at, old, own, deadline, &mut cost).await? != old {
            return Err(loaded_elsewhere(collection));
        }
        collection.write(&set, deadline, &mut cost).await?;
        Ok(Self {
            collection: Arc::clone(collection),
            nodes: source.nodes,
            upper_slots: source.upper_slots,
            sessions,
            progress: Mutex::new(Progress {
                nodes: Part::new(source.nodes, done.0),
                upper: Part::new(source.upper_slots, done.1),
                tall,
                last_piece: Instant::now(),
                at_work: 0,
                is_over: false,
            }),
            ids: tokio::sync::Mutex::new(rooms),
        })
    }

    /// Nodes and upper lists that are stored, from the first on.
    pub fn done(&self) -> (u32, u32) {
        let progress = self.progress.lock();
        (progress.nodes.written.first_missing(), progress.upper.written.first_missing())
    }

    /// Whether this node still has the sessions that the regions name. Otherwise another node may have resumed.
    async fn confirm_sessions(&self, deadline: Instant) -> Result<(), Fault> {
        for (region, session) in &self.sessions {
            let at = RemotePtr::new(*region, in_region::LOADER);
            if self.collection.session_number(at, deadline).await? != *session {
                return Err(Fault::new(
                    FaultCode::Unavailable,
                    format!(
                        "the load of '{}' lost its session on the memory node of {region}: resume it",
                        self.collection.name()
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Writes down how far the load is. Should that fail, or an older count land later, whoever resumes sends more again
    /// than is needed.
    async fn note(&self, deadline: Instant) {
        let (nodes, upper) = self.done();
        let mut set = WriteSet::new();
        set.push_word(self.collection.home_at(at_home::LOAD_NODES), nodes.into());
        set.push_word(self.collection.home_at(at_home::LOAD_UPPER), upper.into());
        if let Err(fault) = self.collection.write(&set, deadline, &mut Cost::default()).await {
            debug!(collection = self.collection.name(), %fault, "how far a load is was not written down");
        }
    }

    /// Layout that pieces must have.
    pub fn params(&self) -> &CollectionParams {
        self.collection.params()
    }

    /// The collection being loaded.
    pub fn collection(&self) -> &Arc<Collection<V>> {
        &self.collection
    }

    /// Checks and writes nodes. A piece that failed for a reason of the network may be sent again.
    ///
    /// # Errors
    /// [`FaultCode::BadRequest`] names what is wrong with the piece and where.
    pub async fn nodes(&self, piece: NodesPiece, deadline: Instant) -> Result<(), Fault> {
        let tall = self.check_nodes(&piece)?;
        let range = piece.first..piece.first + piece.metas.len() as u32;
        let _at_work = self.enter(|progress| {
            if progress.nodes.came.add(range.clone()) {
                Ok(())
            } else {
                Err(bad(format!("nodes {} to {} came twice", range.start, range.end - 1)))
            }
        })?;
        let written = self.write_nodes(&piece, deadline).await;
        {
            let mut progress = self.progress.lock();
            if let Err(fault) = written {
                progress.nodes.came.remove(range);
                return Err(fault);
            }
            for (upper, node) in tall {
                if let Some(other) = progress.tall.insert(upper, node) {
                    return Err(bad(format!(
                        "nodes {} and {} share upper index {upper}",
                        other.node, node.node
                    )));
                }
            }
            progress.nodes.written.add(range);
        }
        self.collection.fabric().counters.loaded_nodes.add(piece.metas.len() as u64);
        self.note(deadline).await;
        Ok(())
    }

    /// Everything about a piece that can be said without memory. Its nodes above level 0, by upper index.
    fn check_nodes(&self, piece: &NodesPiece) -> Result<Vec<(u32, Tall)>, Fault> {
        let params = self.params();
        let count = piece.metas.len();
        let lens = [
            ("ids", piece.ids.len(), if piece.ids.is_empty() { 0 } else { count }),
            ("vector bytes", piece.vectors.len(), count * params.vector_stride() as usize),
            ("list bytes", piece.lists.len(), count * params.list_stride() as usize),
        ];
        for (what, given, expected) in lens {
            if given != expected {
                return Err(bad(format!(
                    "{count} nodes from {} with {given} {what}: expected {expected}",
                    piece.first
                )));
            }
        }
        let end = u64::from(piece.first) + count as u64;
        if count == 0 || end > self.nodes.into() {
            return Err(bad(format!("nodes {} to {end} of a file with {}", piece.first, self.nodes)));
        }
        let mut tall = Vec::new();
        for (i, word) in piece.metas.iter().enumerate() {
            let node = piece.first + i as u32;
            let meta = NodeMeta::from_word(*word).filter(|meta| meta.state == NodeState::Live);
            let meta = meta
                .ok_or_else(|| bad(format!("node {node}: meta word {word:#x} is not one of a live node")))?;
            let is_uuid = matches!(piece.ids.get(i), Some(ExternalId::Uuid(_)));
            if meta.is_uuid != is_uuid {
                return Err(bad(format!(
                    "node {node}: its meta word and its id differ on whether the id is a UUID"
                )));
            }
            if meta.level > 0 {
                let last = u64::from(meta.upper) + u64::from(meta.level) - 1;
                if last >= self.upper_slots.into()
                    || last / u64::from(UPPER_SLOTS) != u64::from(meta.upper / UPPER_SLOTS)
                {
                    return Err(bad(format!(
                        "node {node}: upper lists {} to {last} do not lie in one chunk",
                        meta.upper
                    )));
                }
                tall.push((meta.upper, Tall { node, level: meta.level }));
            } else if meta.upper != 0 {
                return Err(bad(format!("node {node}: on level 0 with upper index {}", meta.upper)));
            }
        }
        let stride = params.vector_stride() as usize;
        for (i, vector) in piece.vectors.chunks_exact(stride).enumerate() {
            let vector = &vector[..params.vector_bytes() as usize];
            if let Some(at) = first_not_finite(params.dtype, vector) {
                return Err(bad(format!(
                    "node {}: element {at} is not a finite number",
                    piece.first + i as u32
                )));
            }
        }
        for (i, list) in piece.lists.chunks_exact(params.list_stride() as usize).enumerate() {
            let node = piece.first + i as u32;
            let view = ListView::parse_base(list)
                .map_err(|error| bad(format!("node {node}: its level-0 {error}")))?;
            if let Some(out) = view.nodes().find(|other| other.0 >= self.nodes) {
                return Err(bad(format!("node {node}: links to {out} in a file of {} nodes", self.nodes)));
            }
        }
        Ok(tall)
    }

    async fn write_nodes(&self, piece: &NodesPiece, deadline: Instant) -> Result<(), Fault> {
        let params = self.params();
        let mut cost = Cost::default();
        let mut set = WriteSet::new();
        let count = piece.metas.len();
        let mut done = 0;
        while done < count {
            // What lies in one chunk: three stretches of memory.
            let (base, slot) =
                self.collection.place(NodeId(piece.first + done as u32)).expect("allocated at the start");
            let stride = (HEADER_BYTES + params.vector_stride() + params.list_stride()) as usize;
            let run = (count - done).min((params.slots - slot) as usize).min((ROUND_BYTES / stride).max(1));
            set.push_with(params.header_at(base, slot), run * HEADER_BYTES as usize, |out| {
                for (i, out) in out.chunks_exact_mut(HEADER_BYTES as usize).enumerate() {
                    let [low, high] = id_words(id_of(piece, done + i));
                    let words = [
                        (header::META, piece.metas[done + i]),
                        (header::ID_LOW, low),
                        (header::ID_HIGH, high),
                    ];
                    for (offset, word) in words {
                        out[offset as usize..][..8].copy_from_slice(&word.to_le_bytes());
                    }
                }
            });
            let rows = |bytes: u64| done * bytes as usize..(done + run) * bytes as usize;
            set.push(params.vector_at(base, slot), &piece.vectors[rows(params.vector_stride())]);
            set.push(params.list_at(base, slot), &piece.lists[rows(params.list_stride())]);
            done += run;
            if done == count || set.bytes() >= ROUND_BYTES {
                self.collection.write(&set, deadline, &mut cost).await?;
                set.clear();
            }
        }
        let ids: Vec<_> = (0..count).map(|i| (id_of(piece, i), NodeId(piece.first + i as u32))).collect();
        let mut rooms = self.ids.lock().await;
        self.confirm_sessions(deadline).await?;
        let mut reader = Reader::new(&self.collection, deadline);
        let claimed = id_table::bulk_claim(&mut reader, &ids, &mut rooms).await?;
        claimed.map_err(|DuplicateId { id, first, second }| {
            bad(format!("id {id} is in the file twice: rows {} and {}", first.0, second.0))
        })
    }

    /// Checks and writes upper lists; all nodes must have come before.
    ///
    /// # Errors
    /// As [`Self::nodes`].
    pub async fn upper(&self, first: u32, lists: &[u8], deadline: Instant) -> Result<(), Fault> {
        let stride = self.params().upper_stride() as usize;
        let count = lists.len() / stride;
        let end = u64::from(first) + count as u64;
        if lists.is_empty() || !lists.len().is_multiple_of(stride) || end > self.upper_slots.into() {
            return Err(bad(format!(
                "{} bytes of upper lists from {first}: expected a multiple of {stride}, and {} lists in all",
                lists.len(),
                self.upper_slots
            )));
        }
        let range = first..end as u32;
        let _at_work = self.enter(|progress| {
            if !progress.nodes.written.is_complete() {
                let missing = progress.nodes.written.first_missing();
                return Err(bad(format!("upper lists come after all nodes; node {missing} is not there")));
            }
            self.check_upper(first, lists, &progress.tall)?;
            if progress.upper.came.add(range.clone()) {
                Ok(())
            } else {
                Err(bad(format!("upper lists {} to {} came twice", range.start, range.end - 1)))
            }
        })?;
        let written = self.write_upper(first, lists, deadline).await;
        {
            let mut progress = self.progress.lock();
            if let Err(fault) = written {
                progress.upper.came.remove(range);
                return Err(fault);
            }
            progress.upper.written.add(range);
        }
        self.note(deadline).await;
        Ok(())
    }

    fn check_upper(&self, first: u32, lists: &[u8], tall: &BTreeMap<u32, Tall>) -> Result<(), Fault> {
        for (i, list) in lists.chunks_exact(self.params().upper_stride() as usize).enumerate() {
            let slot = first + i as u32;
            let owner = tall.range(..=slot).next_back();
            let owner = owner.filter(|(upper, owner)| slot - **upper < owner.level.into());
            let Some((upper, owner)) = owner else {
                if list.iter().any(|byte| *byte != 0) {
                    return Err(bad(format!("upper list {slot} belongs to no node")));
                }
                continue;
            };
            let level = slot - upper + 1;
            let view = ListView::parse_upper(list)
                .map_err(|error| bad(format!("node {}: its level-{level} {error}", owner.node)))?;
            for (node, index) in view.upper_nodes() {
                let is_there =
                    tall.get(&index).is_some_and(|t| t.node == node.0 && u32::from(t.level) >= level);
                if !is_there {
                    return Err(bad(format!(
                        "node {}: links on level {level} to {node} with upper index {index}, which is not there",
                        owner.node
                    )));
                }
            }
        }
        Ok(())
    }

    async fn write_upper(&self, first: u32, lists: &[u8], deadline: Instant) -> Result<(), Fault> {
        let params = self.params();
        let stride = params.upper_stride() as usize;
        let mut cost = Cost::default();
        let mut set = WriteSet::new();
        let mut done = 0;
        let count = lists.len() / stride;
        while done < count {
            let (chunk, slot) = params.upper_place(first + done as u32);
            let base = self.collection.known_chunk(Table::Upper, chunk).expect("allocated at the start");
            let run = (count - done).min((UPPER_SLOTS - slot) as usize);
            set.push(params.upper_at(base, slot), &lists[done * stride..(done + run) * stride]);
            done += run;
            if done == count || set.bytes() >= ROUND_BYTES {
                self.collection.write(&set, deadline, &mut cost).await?;
                set.clear();
            }
        }
        Ok(())
    }

    /// Ends the load: all must have come.
    ///
    /// # Errors
    /// If something is missing, or the entry point is not the highest node.
    pub async fn end(&self, entry_point: u64, deadline: Instant) -> Result<(), Fault> {
        let entry = {
            let mut progress = self.progress.lock();
            if progress.is_over {
                return Err(bad("the load has ended"));
            }
            let parts = [("node", &progress.nodes.came), ("upper list", &progress.upper.came)];
            if let Some((what, part)) = parts.into_iter().find(|(_, part)| !part.is_complete()) {
                return Err(bad(format!("{what} {} has not come", part.first_missing())));
            }
            if progress.at_work > 0 {
                return Err(bad("pieces are still being written"));
            }
            let entry = self.check_entry(entry_point, &progress.tall)?;
            progress.is_over = true;
            entry
        };
        let ended = self.publish(entry, deadline).await;
        if ended.is_err() {
            self.progress.lock().is_over = false;
        }
        ended
    }

    fn check_entry(&self, word: u64, tall: &BTreeMap<u32, Tall>) -> Result<Entry, Fault> {
        let point = EntryPoint::from_word(word).filter(|point| point.node.0 < self.nodes);
        let point = point.ok_or_else(|| bad(format!("entry point word {word:#x}")))?;
        let highest = tall.values().map(|node| node.level).max().unwrap_or(0);
        let own = tall.iter().find(|(_, node)| node.node == point.node.0);
        let (upper, level) = own.map_or((0, 0), |(upper, node)| (*upper, node.level));
        if point.level != highest || level != highest {
            return Err(bad(format!(
                "entry point {} on level {}: its node is on level {level}, the graph has {highest}",
                point.node, point.level
            )));
        }
        Ok(Entry { point, upper })
    }

    async fn publish(&self, entry: Entry, deadline: Instant) -> Result<(), Fault> {
        let collection = &self.collection;
        let as_of = Instant::now();
        let mut set = WriteSet::new();
        set.push_word(collection.home_at(at_home::ENTRY_POINT), entry.point.to_word());
        set.push_word(collection.home_at(at_home::LIVE_COUNT), self.nodes.into());
        collection.write(&set, deadline, &mut Cost::default()).await?;
        collection.set_entry(entry, as_of);
        collection.set_state(CollectionState::Ready, deadline).await?;
        info!(collection = collection.name(), nodes = self.nodes, "graph loaded");
        Ok(())
    }

    /// Lets the load go, for somebody to resume: no more pieces are taken. `false` while one is being written.
    pub fn retire(&self) -> bool {
        let mut progress = self.progress.lock();
        if progress.at_work == 0 {
            progress.is_over = true;
        }
        progress.is_over
    }

    /// Gives the load up: the collection is dropped.
    pub async fn abort(&self, deadline: Instant) {
        let was_over = std::mem::replace(&mut self.progress.lock().is_over, true);
        if !was_over {
            drop_collection(&self.collection, deadline).await;
        }
    }

    /// Counts a piece in, if `check` lets it.
    fn enter(&self, check: impl FnOnce(&mut Progress) -> Result<(), Fault>) -> Result<AtWork<'_, V>, Fault> {
        let mut progress = self.progress.lock();
        if progress.is_over {
            return Err(bad("the load has ended"));
        }
        check(&mut progress)?;
        progress.at_work += 1;
        progress.last_piece = Instant::now();
        Ok(AtWork(self))
    }

    fn is_idle(&self, now: Instant) -> bool {
        let progress = self.progress.lock();
        !progress.is_over
            && progress.at_work == 0
            && now.saturating_duration_since(progress.last_piece) > IDLE_MAX
    }
}

/// A piece being written; counted out when dropped.
struct AtWork<'a, V>(&'a Load<V>);

impl<V> Drop for AtWork<'_, V> {
    fn drop(&mut self) {
        let mut progress = self.0.progress.lock();
        progress.at_work -= 1;
        progress.last_piece = Instant::now();
    }
}

fn id_of(piece: &NodesPiece, i: usize) -> ExternalId {
    piece.ids.get(i).copied().unwrap_or(ExternalId::Num(u64::from(piece.first) + i as u64))
}

/// No memory node gives this number to a session.
const NO_SESSION: SessionId = SessionId(0);

fn loaded_elsewhere<V: Verbs>(collection: &Collection<V>) -> Fault {
    let message = format!("collection '{}' is being loaded through another compute node", collection.name());
    Fault::new(FaultCode::Unavailable, message)
}

/// The session that the home region names as its loader's.
///
/// # Errors
/// [`FaultCode::Unavailable`] if one that any region names lives on, and is not this node's own.
async fn expect_no_other_loader<V: Verbs>(
    collection: &Collection<V>,
    deadline: Instant,
    cost: &mut Cost,
) -> Result<SessionId, Fault> {
    let regions = collection.regions();
    let mut gather = Gather::new();
    for region in &regions {
        gather.push(RemotePtr::new(*region, in_region::LOADER), 8);
    }
    collection.gather(&mut gather, deadline, cost).await?;
    for (i, region) in regions.iter().enumerate() {
        let at = RemotePtr::new(*region, in_region::LOADER);
        let loader = SessionId(word(gather.get(i), 0) as u32);
        let is_other = loader != NO_SESSION && collection.session_number(at, deadline).await? != loader;
        if is_other && collection.is_session_alive(at, loader, deadline).await? {
            return Err(loaded_elsewhere(collection));
        }
    }
    Ok(SessionId(word(gather.get(0), 0) as u32))
}

/// The nodes above level 0 among the first `nodes`.
async fn read_tall<V: Verbs>(
    collection: &Arc<Collection<V>>,
    nodes: u32,
    deadline: Instant,
) -> Result<BTreeMap<u32, Tall>, Fault> {
    let mut reader = Reader::new(collection, deadline);
    let mut tall = BTreeMap::new();
    for first in (0..nodes).step_by(HEADERS_BATCH as usize) {
        let batch: Vec<_> = (first..nodes.min(first.saturating_add(HEADERS_BATCH))).map(NodeId).collect();
        for (node, head) in batch.iter().zip(reader.headers(&batch).await?) {
            if head.meta.state != NodeState::Live {
                return Err(corrupt(format!(
                    "collection '{}': {node} was loaded, and its record says {:?}",
                    collection.name(),
                    head.meta.state
                )));
            }
            if head.meta.level > 0 {
                tall.insert(head.meta.upper, Tall { node: node.0, level: head.meta.level });
            }
        }
    }
    Ok(tall)
}

/// Takes chunks for all nodes and upper lists, in order, and enters them into the tables.
async fn allocate<V: Verbs>(
    collection: &Collection<V>,
    nodes: u32,
    upper_slots: u32,
    deadline: Instant,
) -> Result<Rooms, Fault> {
    let mut cost = Cost::default();
    let mut rooms = Rooms::read(collection, deadline, &mut cost).await?;
    let wanted = [
        (Table::Nodes, nodes.div_ceil(collection.params().slots)),
        (Table::Upper, upper_slots.div_ceil(UPPER_SLOTS)),
    ];
    for (table, count) in wanted {
        if count == 0 {
            continue;
        }
        let mut places = Vec::with_capacity(count as usize);
        for chunk in 0..count {
            places.push(rooms.allocate_chunk(collection, table, chunk.into(), deadline, &mut cost).await?);
        }
        let first = rooms.number_chunks(collection, table, count, deadline, &mut cost).await?;
        if first != 0 {
            return Err(Fault::new(
                FaultCode::Internal,
                format!("{table} {first} is the first of a new collection"),
            ));
        }
        let mut set = WriteSet::new();
        set.push_with(collection.table_at(table, 0), 8 * count as usize, |out| {
            for (out, at) in out.chunks_exact_mut(8).zip(&places) {
                out.copy_from_slice(&RemotePtr::to_word(*at).to_le_bytes());
            }
        });
        collection.write(&set, deadline, &mut cost).await?;
        collection.remember_chunks(table, 0, &places);
    }
    Ok(rooms)
}

/// Drops a collection, but never another that has got its name meanwhile.
async fn drop_collection<V: Verbs>(collection: &Collection<V>, deadline: Instant) {
    let routes = collection.fabric().routes();
    if routes.map().collection(collection.name()).is_none_or(|now| now.id != collection.id()) {
        return;
    }
    let request = OracleRequest::DropCollection { name: collection.name().to_owned() };
    if let Err(fault) = collection.catalogue().call(request, deadline).await {
        warn!(collection = collection.name(), %fault, "a load that was given up was not dropped");
    }
}

/// The loads of one compute node.
#[derive(Debug)]
pub struct Loads<V> {
    running: Mutex<HashMap<u64, Arc<Load<V>>>>,
}

impl<V> Default for Loads<V> {
    fn default() -> Self {
        Self { running: Mutex::default() }
    }
}

impl<V: Verbs> Loads<V> {
    /// Enters a load; its number.
    ///
    /// # Errors
    /// [`FaultCode::Overloaded`] if too many are running; the caller gives it up.
    pub fn add(&self, load: Arc<Load<V>>) -> Result<u64, Fault> {
        let mut running = self.running.lock();
        if running.len() >= LOADS_MAX {
            return Err(Fault::new(
                FaultCode::Overloaded,
                format!("{LOADS_MAX} loads are running, which is the most"),
            ));
        }
        if running.values().any(|other| other.collection.id() == load.collection.id()) {
            let message = format!("the load into '{}' was resumed by another call", load.collection.name());
            return Err(Fault::new(FaultCode::Overloaded, message));
        }
        let number = loop {
            let number = os_rng().random_range(1..u64::MAX);
            if !running.contains_key(&number) {
                break number;
            }
        };
        running.insert(number, load);
        Ok(number)
    }

    /// The load of that number.
    ///
    /// # Errors
    /// [`FaultCode::NotFound`].
    pub fn get(&self, number: u64) -> Result<Arc<Load<V>>, Fault> {
        let running = self.running.lock();
        running.get(&number).cloned().ok_or_else(|| {
            Fault::new(
                FaultCode::NotFound,
                format!("no load {number}: it has ended, failed, or was idle for too long"),
            )
        })
    }

    /// Forgets a load.
    pub fn remove(&self, number: u64) -> Option<Arc<Load<V>>> {
        self.running.lock().remove(&number)
    }

    /// Lets go of the load into that collection, for it to be resumed.
    ///
    /// # Errors
    /// [`FaultCode::Overloaded`] while a piece is being written.
    pub fn retire(&self, collection: CollectionId) -> Result<(), Fault> {
        let mut running = self.running.lock();
        let of_it = running.iter().find(|(_, load)| load.collection.id() == collection);
        if let Some((number, load)) = of_it.map(|(number, load)| (*number, Arc::clone(load))) {
            if !load.retire() {
                let message =
                    format!("a piece of the load into '{}' is being written", load.collection.name());
                return Err(Fault::new(FaultCode::Overloaded, message));
            }
            running.remove(&number);
        }
        Ok(())
    }

    /// Lets go of what nothing came for.
    pub fn reap(&self, now: Instant) {
        let idle: Vec<_> = {
            let mut running = self.running.lock();
            let idle: Vec<_> =
                running.iter().filter(|(_, load)| load.is_idle(now)).map(|(number, _)| *number).collect();
            idle.iter().filter_map(|number| running.remove(number)).collect()
        };
        for load in idle {
            load.retire();
            warn!(
                collection = load.collection.name(),
                "nothing came of a load for {} s: it can be resumed, or the collection dropped",
                IDLE_MAX.as_secs()
            );
        }
    }

    /// Lets go of all.
    pub fn retire_all(&self) {
        for (_, load) in self.running.lock().drain() {
            load.retire();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coverage_joins_stretches_and_refuses_what_came_before() {
        let mut seen = Coverage::new(10, 0);
        assert!(seen.add(4..6) && seen.add(0..2) && seen.add(8..10));
        assert!(!seen.is_complete());
        for twice in [0..1, 1..3, 3..5, 5..7, 4..6, 0..10, 9..11, 3..3] {
            assert!(!seen.add(twice.clone()), "{twice:?}");
        }
        assert_eq!(seen.first_missing(), 2);
        assert!(seen.add(6..8) && seen.add(2..4));
        assert!(seen.is_complete());
        seen.remove(3..7);
        assert_eq!(seen.first_missing(), 3);
        assert!(seen.add(3..7) && seen.is_complete());
        assert!(Coverage::new(0, 0).is_complete());
        let mut seen = Coverage::new(10, 4);
        assert!(!seen.add(3..5) && seen.first_missing() == 4 && seen.add(4..10) && seen.is_complete());
    }
}
