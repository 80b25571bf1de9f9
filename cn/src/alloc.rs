//! Memory for new records: regions by FETCH_ADD on their bump pointers, chunks leased to one compute node at a time,
//! slots handed out from them locally.
//!
//! ```text
//! slot ◀─ leased chunk ◀─ FETCH_ADD(next_free) on a region with room, FETCH_ADD(chunk_count), WRITE(chunk table)
//!                            └─ none has room: the oracle gives another region, or RegionFull
//! ```
//!
//! Invariant: memory is handed out only where the bump pointer said so before *and* after the FETCH_ADD: a pointer past
//! the end stays there and hands out nothing.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::time::Instant;

use parking_lot::Mutex;
use shine_common::ids::{NodeId, RegionId, RemotePtr};
use shine_common::layout::{CollectionParams, UPPER_SLOTS, collection as at_home, region as in_region};
use shine_common::verbs::Verbs;
use shine_common::wire::{Fault, FaultCode, OracleRequest, OracleResponse};
use tracing::info;

use crate::collection::{Collection, Table, corrupt, unexpected, word};
use crate::fabric::{Cost, Gather, WriteSet, deadline_exceeded};

/// Most regions that one allocation asks the oracle for.
const GROW_MAX: usize = 64;

/// A slot for a new record, with room for its upper lists.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slot {
    /// The node.
    pub node: NodeId,
    /// Its level.
    pub level: u8,
    /// Index of its level-1 list; 0 if its level is 0.
    pub upper: u32,
}

#[derive(Debug, Default)]
struct Slots {
    nodes: Range<u32>,
    upper: Range<u32>,
    free_nodes: Vec<NodeId>,
    /// Runs of upper slots that were given back, by their length.
    free_upper: HashMap<u8, Vec<u32>>,
}

impl Slots {
    fn take_node(&mut self) -> Option<NodeId> {
        self.free_nodes.pop().or_else(|| self.nodes.next().map(NodeId))
    }

    /// `level` upper slots in a row, all in one upper chunk.
    fn take_upper(&mut self, level: u8) -> Option<u32> {
        if level == 0 {
            return Some(0);
        }
        if let Some(upper) = self.free_upper.get_mut(&level).and_then(Vec::pop) {
            return Some(upper);
        }
        if self.upper.len() < usize::from(level) {
            return None;
        }
        let upper = self.upper.start;
        self.upper.start += u32::from(level);
        Some(upper)
    }
}

/// Slots leased to this compute node.
#[derive(Debug)]
pub(crate) struct Allocator {
    slots: Mutex<Slots>,
    /// Held over the round trips of a refill, so that inserts that find the lease used up draw one chunk and not one
    /// each.
    refill: tokio::sync::Mutex<()>,
    slots_per_chunk: u32,
}

impl Allocator {
    pub(crate) fn new(params: &CollectionParams) -> Self {
        Self { slots: Mutex::default(), refill: tokio::sync::Mutex::new(()), slots_per_chunk: params.slots }
    }

    /// A slot for a node of `level`.
    pub(crate) async fn take<V: Verbs>(
        &self,
        collection: &Collection<V>,
        level: u8,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<Slot, Fault> {
        let node = loop {
            if let Some(node) = self.slots.lock().take_node() {
                break node;
            }
            let _refill = self.refill(deadline).await?;
            if self.slots.lock().nodes.is_empty() {
                let chunk = new_chunk(collection, Table::Nodes, deadline, cost).await?;
                let first = chunk * self.slots_per_chunk;
                // Saturating leaves out the very last number, which a range cannot end behind.
                self.slots.lock().nodes = first..first.saturating_add(self.slots_per_chunk);
            }
        };
        let upper = loop {
            if let Some(upper) = self.slots.lock().take_upper(level) {
                break upper;
            }
            let refilled = async {
                let _refill = self.refill(deadline).await?;
                if self.slots.lock().upper.len() < usize::from(level) {
                    let chunk = new_chunk(collection, Table::Upper, deadline, cost).await?;
                    // What is left of the old chunk is too short for this node: a few slots in 256.
                    let first = chunk * UPPER_SLOTS;
                    self.slots.lock().upper = first..first.saturating_add(UPPER_SLOTS);
                }
                Ok(())
            };
            if let Err(fault) = refilled.await {
                self.slots.lock().free_nodes.push(node);
                return Err(fault);
            }
        };
        Ok(Slot { node, level, upper })
    }

    /// Takes back a slot that nothing in remote memory refers to.
    pub(crate) fn give_back(&self, slot: Slot) {
        let mut slots = self.slots.lock();
        slots.free_nodes.push(slot.node);
        if slot.level > 0 {
            slots.free_upper.entry(slot.level).or_default().push(slot.upper);
        }
    }

    async fn refill(&self, deadline: Instant) -> Result<tokio::sync::MutexGuard<'_, ()>, Fault> {
        tokio::time::timeout_at(deadline.into(), self.refill.lock())
            .await
            .map_err(|_| deadline_exceeded("waiting for memory"))
    }
}

/// Allocates a chunk and enters it into its table; its number.
async fn new_chunk<V: Verbs>(
    collection: &Collection<V>,
    table: Table,
    deadline: Instant,
    cost: &mut Cost,
) -> Result<u32, Fault> {
    let mut rooms = Rooms::read(collection, deadline, cost).await?;
    let expected = rooms.count(table);
    let at = rooms.allocate_chunk(collection, table, expected, deadline, cost).await?;
    let chunk = rooms.number_chunks(collection, table, 1, deadline, cost).await?;
    let mut set = WriteSet::new();
    set.push_word(collection.table_at(table, chunk), at.to_word());
    collection.write(&set, deadline, cost).await?;
    collection.remember_chunks(table, chunk, &[at]);
    let counters = &collection.fabric().counters;
    match table {
        Table::Nodes => counters.chunks.add(1),
        Table::Upper => counters.upper_chunks.add(1),
    }
    Ok(chunk)
}

/// What the regions of a collection have left, as this compute node last heard.
#[derive(Debug)]
pub(crate) struct Rooms {
    /// By index of the region in the collection.
    rooms: Vec<Room>,
    chunk_count: u64,
    upper_chunk_count: u64,
}

#[derive(Clone, Copy, Debug)]
struct Room {
    region: RegionId,
    next_free: u64,
    bytes: u64,
}

impl Rooms {
    /// Asks all regions and the counters of chunks: one round.
    pub(crate) async fn read<V: Verbs>(
        collection: &Collection<V>,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<Self, Fault> {
        let routes = collection.admit()?;
        let regions = collection.regions();
        let mut gather = Gather::new();
        for region in &regions {
            gather.push(RemotePtr::new(*region, in_region::NEXT_FREE), 8);
        }
        gather.push(collection.home_at(at_home::CHUNK_COUNT), 8);
        gather.push(collection.home_at(at_home::UPPER_CHUNK_COUNT), 8);
        collection.gather(&mut gather, deadline, cost).await?;
        let room = |(i, region): (usize, &RegionId)| Room {
            region: *region,
            next_free: word(gather.get(i), 0),
            bytes: routes.region(*region).map_or(0, |route| route.entry.bytes),
        };
        Ok(Self {
            rooms: regions.iter().enumerate().map(room).collect(),
            chunk_count: word(gather.get(regions.len()), 0),
            upper_chunk_count: word(gather.get(regions.len() + 1), 0),
        })
    }

    /// Chunks whose allocation has begun.
    pub(crate) fn count(&self, table: Table) -> u64 {
        match table {
            Table::Nodes => self.chunk_count,
            Table::Upper => self.upper_chunk_count,
        }
    }

    /// Bytes handed out, and bytes there are.
    pub(crate) fn used_and_reserved(&self) -> (u64, u64) {
        self.rooms
            .iter()
            .fold((0, 0), |(used, all), room| (used + room.next_free.min(room.bytes), all + room.bytes))
    }

    /// Draws `n` chunk numbers in a row; the first.
    pub(crate) async fn number_chunks<V: Verbs>(
        &mut self,
        collection: &Collection<V>,
        table: Table,
        n: u32,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<u32, Fault> {
        let (count, max, at) = match table {
            Table::Nodes => (&mut self.chunk_count, collection.params().max_chunks, at_home::CHUNK_COUNT),
            Table::Upper => (
                &mut self.upper_chunk_count,
                collection.params().max_upper_chunks,
                at_home::UPPER_CHUNK_COUNT,
            ),
        };
        let full = || {
            let message = format!("collection '{}': its table of {max} {table}s is full", collection.name());
            Err(Fault::new(FaultCode::RegionFull, message))
        };
        if count.saturating_add(n.into()) > max.into() {
            return full();
        }
        *count = collection.fetch_add(collection.home_at(at), n.into(), deadline, cost).await?;
        match u32::try_from(count.saturating_add(n.into())) {
            Ok(end) if end <= max => Ok(end - n),
            _ => full(),
        }
    }

    /// Memory for chunk number `chunk`: in the region whose turn it is, or the next one with room.
    pub(crate) async fn allocate_chunk<V: Verbs>(
        &mut self,
        collection: &Collection<V>,
        table: Table,
        chunk: u64,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<RemotePtr, Fault> {
        let bytes = match table {
            Table::Nodes => collection.params().chunk_bytes(),
            Table::Upper => collection.params().upper_chunk_bytes(),
        };
        let turn = (chunk % self.rooms.len() as u64) as usize;
        self.allocate(collection, bytes, turn, table, deadline, cost).await
    }

    /// `bytes` (a multiple of 64) in the region of index `turn`, or the next one with room, or one that the oracle adds.
    pub(crate) async fn allocate<V: Verbs>(
        &mut self,
        collection: &Collection<V>,
        bytes: u64,
        turn: usize,
        what: impl fmt::Display,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<RemotePtr, Fault> {
        assert!(bytes.is_multiple_of(64), "memory is handed out in multiples of 64 bytes");
        for _ in 0..GROW_MAX {
            for i in 0..self.rooms.len() {
                let index = (turn + i) % self.rooms.len();
                if let Some(at) = self.bump(collection, index, bytes, deadline, cost).await? {
                    return Ok(at);
                }
            }
            self.grow(collection, bytes, &what, deadline, cost).await?;
        }
        Err(self.full(collection, bytes, &what, "after the last region that was added"))
    }

    /// FETCH_ADD on one region's bump pointer, if there is room behind it.
    async fn bump<V: Verbs>(
        &mut self,
        collection: &Collection<V>,
        index: usize,
        bytes: u64,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<Option<RemotePtr>, Fault> {
        let room = &mut self.rooms[index];
        let first_free = collection.params().first_free(index);
        let fits = |next_free: u64, end: u64| next_free.checked_add(bytes).is_some_and(|sum| sum <= end);
        // A region that was added lately starts with zeros.
        if !fits(room.next_free.max(first_free), room.bytes) {
            return Ok(None);
        }
        if room.next_free == 0 {
            collection.init_region(index, deadline, cost).await?;
        }
        let at = RemotePtr::new(room.region, in_region::NEXT_FREE);
        let got = collection.fetch_add(at, bytes, deadline, cost).await?;
        room.next_free = got.saturating_add(bytes);
        if got < first_free || !got.is_multiple_of(64) {
            return Err(corrupt(format!(
                "collection '{}': the bump pointer of {} was {got:#x}",
                collection.name(),
                room.region
            )));
        }
        Ok(fits(got, room.bytes).then(|| RemotePtr::new(room.region, got)))
    }

    /// Makes the oracle add a region.
    async fn grow<V: Verbs>(
        &mut self,
        collection: &Collection<V>,
        bytes: u64,
        what: &impl fmt::Display,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<(), Fault> {
        let have = self.rooms.len();
        let request = OracleRequest::GrowCollection { id: collection.id(), have: have as u32 };
        let (grown, epoch) = match collection.catalogue().call(request, deadline).await {
            Ok(OracleResponse::Collection { collection, epoch }) => (collection, epoch),
            Ok(other) => return Err(unexpected("GrowCollection", &other)),
            Err(fault) => return Err(self.full(collection, bytes, what, &fault.message)),
        };
        if grown.regions.len() <= have {
            return Err(self.full(collection, bytes, what, "the oracle has no free region"));
        }
        let fabric = collection.fabric();
        fabric.reach(epoch, deadline).await?;
        collection.admit()?;
        if collection.region_count() <= have {
            return Err(Fault::new(
                FaultCode::StaleEpoch,
                format!("the map of {} lacks the region just added", fabric.epoch()),
            ));
        }
        info!(collection = collection.name(), regions = collection.region_count(), "collection has grown");
        *self = Self::read(collection, deadline, cost).await?;
        Ok(())
    }

    fn full<V: Verbs>(
        &self,
        collection: &Collection<V>,
        bytes: u64,
        what: &impl fmt::Display,
        why: &str,
    ) -> Fault {
        let (used, reserved) = self.used_and_reserved();
        Fault::new(
            FaultCode::RegionFull,
            format!(
                "collection '{}': no room for {bytes} bytes ({what}) in its {} regions ({used} of {reserved} bytes used): {why}. \
                 What is stored stays searchable",
                collection.name(),
                self.rooms.len(),
            ),
        )
    }
}
