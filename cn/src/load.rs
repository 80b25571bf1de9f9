//! Loading a graph file: pieces of it come in any order and go to remote memory as they are, after every number in them
//! was checked.
//!
//! ```text
//! begin: create (loading), allocate all chunks ─▶ nodes … ─▶ upper lists … ─▶ end: entry point, ready
//!                                                 └─ anything wrong, aborted or idle too long ─▶ dropped
//! ```
//!
//! Invariant: node numbers are rows of the file, so one file gives the same numbers everywhere; a collection becomes
//! searchable only when all of the file is there.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rand::RngExt as _;
use shine_common::ids::{ExternalId, NodeId, RemotePtr};
use shine_common::layout::{
    CollectionParams, EntryPoint, HEADER_BYTES, ListView, NodeMeta, NodeState, UPPER_SLOTS,
    collection as at_home, header, id_words,
};
use shine_common::verbs::{BATCH_BYTES_MAX, Verbs};
use shine_common::wire::{CollectionSpec, CollectionState, Fault, FaultCode, OracleRequest};
use tracing::{info, warn};

use crate::alloc::Rooms;
use crate::catalogue::Catalogue;
use crate::collection::{Collection, Entry, Options, Table, first_not_finite};
use crate::fabric::{Cost, Fabric, WriteSet, os_rng};
use crate::id_table::{self, DuplicateId};
use crate::reader::Reader;

/// Most loads at a time on one compute node.
pub const LOADS_MAX: usize = 4;
/// A load that nothing came for in this time is given up.
pub const IDLE_MAX: Duration = Duration::from_secs(60);
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
    fn new(total: u32) -> Self {
        Self { total, stretches: BTreeMap::new() }
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

#[derive(Debug)]
struct Progress {
    nodes: Coverage,
    upper: Coverage,
    /// By upper index: one entry per node above level 0, a sixteenth of all at m = 16.
    tall: BTreeMap<u32, Tall>,
    last_piece: Instant,
    /// Pieces that are being written.
    at_work: u32,
    /// Nodes whose piece is written: upper lists are checked against what these have said.
    nodes_written: u32,
    is_over: bool,
}

/// A load under way.
#[derive(Debug)]
pub struct Load<V> {
    collection: Arc<Collection<V>>,
    nodes: u32,
    upper_slots: u32,
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

impl<V: Verbs> Load<V> {
    /// Creates the collection and takes memory for all of the file.
    ///
    /// # Errors
    /// [`FaultCode::RegionFull`] if the file does not fit, before anything is sent; and what the oracle says.
    pub async fn begin(
        fabric: Arc<Fabric<V>>,
        catalogue: Arc<dyn Catalogue>,
        mut spec: CollectionSpec,
        nodes: u32,
        upper_slots: u32,
        options: Options,
        deadline: Instant,
    ) -> Result<Self, Fault> {
        if nodes == 0 {
            return Err(bad("a graph file has at least one node"));
        }
        spec.loading = true;
        spec.capacity = spec.capacity.max(nodes.into());
        let collection = Collection::create(fabric, catalogue, spec, options, deadline).await?;
        let progress = Progress {
            nodes: Coverage::new(nodes),
            upper: Coverage::new(upper_slots),
            tall: BTreeMap::new(),
            last_piece: Instant::now(),
            at_work: 0,
            nodes_written: 0,
            is_over: false,
        };
        match allocate(&collection, nodes, upper_slots, deadline).await {
            Ok(rooms) => Ok(Self {
                collection,
                nodes,
                upper_slots,
                progress: Mutex::new(progress),
                ids: tokio::sync::Mutex::new(rooms),
            }),
            Err(fault) => {
                drop_collection(&collection, deadline).await;
                Err(fault)
            }
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
            if progress.nodes.add(range.clone()) {
                Ok(())
            } else {
                Err(bad(format!("nodes {} to {} came twice", range.start, range.end - 1)))
            }
        })?;
        let written = self.write_nodes(&piece, deadline).await;
        let mut progress = self.progress.lock();
        match written {
            Ok(()) => {
                for (upper, node) in tall {
                    if let Some(other) = progress.tall.insert(upper, node) {
                        return Err(bad(format!(
                            "nodes {} and {} share upper index {upper}",
                            other.node, node.node
                        )));
                    }
                }
                progress.nodes_written += piece.metas.len() as u32;
                self.collection.fabric().counters.loaded_nodes.add(piece.metas.len() as u64);
                Ok(())
            }
            Err(fault) => {
                progress.nodes.remove(range);
                Err(fault)
            }
        }
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
            if progress.nodes_written < self.nodes {
                let written = progress.nodes_written;
                return Err(bad(format!(
                    "upper lists come after all nodes; {written} of {} are there",
                    self.nodes
                )));
            }
            self.check_upper(first, lists, &progress.tall)?;
            if progress.upper.add(range.clone()) {
                Ok(())
            } else {
                Err(bad(format!("upper lists {} to {} came twice", range.start, range.end - 1)))
            }
        })?;
        let written = self.write_upper(first, lists, deadline).await;
        if written.is_err() {
            self.progress.lock().upper.remove(range);
        }
        written
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
            let parts = [("node", &progress.nodes), ("upper list", &progress.upper)];
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

    /// Gives up what nothing came for.
    pub async fn reap(&self, now: Instant, deadline: Instant) {
        let idle: Vec<_> = {
            let mut running = self.running.lock();
            let idle: Vec<_> =
                running.iter().filter(|(_, load)| load.is_idle(now)).map(|(number, _)| *number).collect();
            idle.iter().filter_map(|number| running.remove(number)).collect()
        };
        for load in idle {
            warn!(
                collection = load.collection.name(),
                "load given up: nothing came for {} s",
                IDLE_MAX.as_secs()
            );
            load.abort(deadline).await;
        }
    }

    /// Gives up all.
    pub async fn abort_all(&self, deadline: Instant) {
        let all: Vec<_> = self.running.lock().drain().map(|(_, load)| load).collect();
        for load in all {
            load.abort(deadline).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coverage_joins_stretches_and_refuses_what_came_before() {
        let mut seen = Coverage::new(10);
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
        assert!(Coverage::new(0).is_complete());
    }
}
