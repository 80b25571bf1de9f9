//! A collection as a compute node knows it: what is cached of the tables that turn node numbers into addresses, and
//! of the entry point.
//!
//! ```text
//! NodeId ─ chunk × slots + slot ─▶ chunk table (append-only, cached) ─▶ RemotePtr of header, vector, list
//! ```
//!
//! Invariant: an address goes out only after every number it was computed from was checked: chunks lie in a region of
//! this collection, behind what is laid out at its start and before its end; slots lie in their chunk.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use shine_common::ids::{CollectionId, Epoch, NodeId, RegionId, RemotePtr, SessionId};
use shine_common::layout::{
    COLLECTION_MAGIC, CollectionParams, EntryPoint, LAYOUT_VERSION, NodeMeta, NodeState, REGION_MAGIC,
    UPPER_SLOTS, collection as at_home, header, region as in_region,
};
use shine_common::metric::{DType, Distance, SimdLevel, validate};
use shine_common::verbs::Verbs;
use shine_common::wire::{
    Collection as MapEntry, CollectionSpec, CollectionState, Fault, FaultCode, OracleRequest, OracleResponse,
};

use crate::alloc::{Allocator, Rooms};
use crate::catalogue::Catalogue;
use crate::fabric::{Cost, Fabric, Gather, Remedy, Retry, Routes, Trouble, WriteSet, region_lost};
use crate::reader::Scratch;

/// Entries of a chunk table that are read at a time.
const TABLE_WINDOW: u32 = 256;
/// Most idle scratch buffers that are kept.
const SCRATCH_MAX: usize = 256;

/// How a collection is worked with.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Instruction set of the distance kernels.
    pub simd: SimdLevel,
    /// Longest time for which a change of the entry point by another compute node may go unseen.
    pub staleness_bound: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self { simd: SimdLevel::detect(), staleness_bound: Duration::from_secs(1) }
    }
}

/// Corrupt remote memory, in words.
pub(crate) fn corrupt(message: impl Into<String>) -> Fault {
    Fault::new(FaultCode::Corrupt, message)
}

/// An answer of the oracle that does not belong to the call.
pub(crate) fn unexpected(call: &str, answer: &OracleResponse) -> Fault {
    Fault::new(FaultCode::Internal, format!("the oracle answered {call} with {answer:?}"))
}

/// A word out of the bytes of a record.
#[inline]
pub(crate) fn word(bytes: &[u8], at: u64) -> u64 {
    u64::from_le_bytes(bytes[at as usize..at as usize + 8].try_into().expect("8 bytes"))
}

/// Which of the two chunk tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Table {
    /// Chunks of nodes.
    Nodes,
    /// Chunks of upper lists.
    Upper,
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nodes => "chunk",
            Self::Upper => "upper chunk",
        })
    }
}

/// What the newest map says that was held against this collection.
#[derive(Debug)]
struct View {
    epoch: Epoch,
    regions: Vec<(RegionId, Epoch)>,
    state: CollectionState,
}

/// Where searches start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The node and its level.
    pub point: EntryPoint,
    /// Index of its level-1 list; 0 if its level is 0.
    pub upper: u32,
}

#[derive(Debug)]
struct EntryCache {
    entry: Option<Entry>,
    /// The word in remote memory was read no earlier than this; `None` if it never was.
    as_of: Option<Instant>,
    is_refreshing: bool,
}

/// An open collection.
pub struct Collection<V> {
    id: CollectionId,
    name: String,
    params: CollectionParams,
    distance: Distance,
    options: Options,
    home: RegionId,
    fabric: Arc<Fabric<V>>,
    catalogue: Arc<dyn Catalogue>,
    view: ArcSwap<View>,
    chunks: ArcSwap<Vec<RemotePtr>>,
    upper_chunks: ArcSwap<Vec<RemotePtr>>,
    /// Held while a table is replaced by a longer one.
    growing: Mutex<()>,
    entry: Mutex<EntryCache>,
    #[expect(clippy::vec_box, reason = "lent out and given back: the pointer moves, not the buffers")]
    scratch: Mutex<Vec<Box<Scratch>>>,
    /// Slots that this compute node may fill.
    pub(crate) alloc: Allocator,
}

impl<V> fmt::Debug for Collection<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Collection({} '{}')", self.id, self.name)
    }
}

impl<V: Verbs> Collection<V> {
    /// Opens the collection that `entry` of the map describes, after a look at its superblocks.
    ///
    /// # Errors
    /// If a memory node does not answer, content is lost, or what is there was not written by this version.
    pub async fn open(
        fabric: Arc<Fabric<V>>,
        catalogue: Arc<dyn Catalogue>,
        entry: &MapEntry,
        options: Options,
        deadline: Instant,
    ) -> Result<Arc<Self>, Fault> {
        let collection = Self::unchecked(fabric, catalogue, entry, options)?;
        collection.check_superblocks(deadline).await?;
        if entry.state == CollectionState::Ready {
            // What the first queries would otherwise ask for, a round each.
            let mut cost = Cost::default();
            let rooms = Rooms::read(&collection, deadline, &mut cost).await?;
            collection.read_tables(&rooms, deadline, &mut cost).await?;
            collection.refresh_entry(deadline, &mut cost).await?;
        }
        Ok(collection)
    }

    /// Makes a collection: the oracle gives it a number and regions, this node writes its superblocks and, unless a
    /// load follows, declares it ready.
    ///
    /// # Errors
    /// What the oracle or a memory node says; a collection that was begun is then dropped again.
    pub async fn create(
        fabric: Arc<Fabric<V>>,
        catalogue: Arc<dyn Catalogue>,
        spec: CollectionSpec,
        options: Options,
        deadline: Instant,
    ) -> Result<Arc<Self>, Fault> {
        let (name, is_loading) = (spec.name.clone(), spec.loading);
        let (entry, epoch) = match catalogue.call(OracleRequest::CreateCollection(spec), deadline).await? {
            OracleResponse::Collection { collection, epoch } => (collection, epoch),
            other => return Err(unexpected("CreateCollection", &other)),
        };
        let begun = async {
            fabric.reach(epoch, deadline).await?;
            let collection = Self::unchecked(Arc::clone(&fabric), Arc::clone(&catalogue), &entry, options)?;
            collection.write_superblocks(deadline).await?;
            if !is_loading {
                collection.set_state(CollectionState::Ready, deadline).await?;
            }
            Ok(collection)
        };
        match begun.await {
            Ok(collection) => Ok(collection),
            Err(fault) => {
                let undone =
                    catalogue.call(OracleRequest::DropCollection { name: name.clone() }, deadline).await;
                if let Err(second) = undone {
                    tracing::warn!(collection = name, %second, "a collection that was begun was not dropped");
                }
                Err(fault)
            }
        }
    }

    /// Tells the oracle where the collection is in its life, and waits for the map that says so.
    pub(crate) async fn set_state(&self, state: CollectionState, deadline: Instant) -> Result<(), Fault> {
        let request = OracleRequest::SetCollectionState { id: self.id, state };
        match self.catalogue.call(request, deadline).await? {
            OracleResponse::Done { epoch } => self.fabric.reach(epoch, deadline).await,
            other => Err(unexpected("SetCollectionState", &other)),
        }
    }

    /// As [`Self::open`], before its superblocks are written.
    pub(crate) fn unchecked(
        fabric: Arc<Fabric<V>>,
        catalogue: Arc<dyn Catalogue>,
        entry: &MapEntry,
        options: Options,
    ) -> Result<Arc<Self>, Fault> {
        let params = entry.params.clone();
        let Some((home, _)) = entry.regions.first().copied() else {
            return Err(corrupt(format!("collection '{}' has no regions in the cluster map", entry.name)));
        };
        if entry.regions.len() < usize::from(params.first_regions) || params.first_regions == 0 {
            return Err(corrupt(format!("collection '{}' lacks regions in the cluster map", entry.name)));
        }
        let distance = Distance::with_simd(params.metric, params.dtype, params.dim as usize, options.simd);
        Ok(Arc::new(Self {
            id: entry.id,
            name: entry.name.clone(),
            distance,
            options,
            home,
            fabric,
            catalogue,
            view: ArcSwap::from_pointee(View {
                epoch: Epoch::default(),
                regions: entry.regions.clone(),
                state: entry.state,
            }),
            chunks: ArcSwap::default(),
            upper_chunks: ArcSwap::default(),
            growing: Mutex::new(()),
            entry: Mutex::new(EntryCache { entry: None, as_of: None, is_refreshing: false }),
            scratch: Mutex::new(Vec::new()),
            alloc: Allocator::new(&params),
            params,
        }))
    }

    /// Number.
    pub fn id(&self) -> CollectionId {
        self.id
    }

    /// Name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Parameters and sizes.
    pub fn params(&self) -> &CollectionParams {
        &self.params
    }

    /// Distance between two of its vectors.
    pub fn distance(&self) -> &Distance {
        &self.distance
    }

    /// The way to its memory.
    pub fn fabric(&self) -> &Arc<Fabric<V>> {
        &self.fabric
    }

    pub(crate) fn catalogue(&self) -> &Arc<dyn Catalogue> {
        &self.catalogue
    }

    /// Address of a word of the collection superblock or a table.
    pub(crate) fn home_at(&self, offset: u64) -> RemotePtr {
        RemotePtr::new(self.home, offset)
    }

    /// Its regions in the order they were added, by the newest map.
    pub(crate) fn regions(&self) -> Vec<RegionId> {
        self.view.load().regions.iter().map(|(id, _)| *id).collect()
    }

    /// Number of its regions.
    pub(crate) fn region_count(&self) -> usize {
        self.view.load().regions.len()
    }

    /// The present map, once the collection is known to be whole in it.
    ///
    /// # Errors
    /// If it was dropped, or content of it is gone.
    pub fn admit(&self) -> Result<Arc<Routes<V>>, Fault> {
        let routes = self.fabric.routes();
        if self.view.load().epoch == routes.epoch() {
            return Ok(routes);
        }
        let map = routes.map();
        let Some(entry) = map.collections.iter().find(|entry| entry.id == self.id) else {
            return Err(Fault::new(FaultCode::NotFound, format!("collection '{}' was dropped", self.name)));
        };
        if let Some(region) = map.lost_region(entry) {
            return Err(region_lost(region));
        }
        if entry.params != self.params || entry.regions.first().map(|(id, _)| *id) != Some(self.home) {
            return Err(corrupt(format!(
                "the cluster map changed the parameters of collection '{}'",
                self.name
            )));
        }
        self.view.store(Arc::new(View {
            epoch: map.epoch,
            regions: entry.regions.clone(),
            state: entry.state,
        }));
        Ok(routes)
    }

    /// As [`Self::admit`], for what only a finished collection can do.
    pub fn admit_ready(&self) -> Result<(), Fault> {
        self.admit()?;
        match self.view.load().state {
            CollectionState::Ready => Ok(()),
            CollectionState::Loading => {
                let message = format!("collection '{}' is still being loaded", self.name);
                Err(Fault::new(FaultCode::Unavailable, message))
            }
            CollectionState::Creating => {
                let message = format!("collection '{}' is still being created", self.name);
                Err(Fault::new(FaultCode::Unavailable, message))
            }
        }
    }

    // ------------------------------------------------------------------------------------- repeated verbs

    /// Reads all of `gather` in one round, under newer maps and over new sessions where that helps.
    pub(crate) async fn gather(
        &self,
        gather: &mut Gather,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<(), Fault> {
        let mut retry = Retry::new(deadline);
        loop {
            let routes = self.admit()?;
            match self.fabric.gather(&routes, gather, deadline, cost).await {
                Ok(()) => return Ok(()),
                Err(trouble) => retry.after(&self.fabric, routes.epoch(), trouble, true).await?,
            }
        }
    }

    /// Reads one word.
    pub(crate) async fn read_word(
        &self,
        at: RemotePtr,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<u64, Fault> {
        let mut gather = Gather::new();
        gather.push(at, 8);
        self.gather(&mut gather, deadline, cost).await?;
        Ok(word(gather.get(0), 0))
    }

    /// Writes all of `set` in one round. Only for memory that nobody else writes: what was refused is repeated.
    pub(crate) async fn write(
        &self,
        set: &WriteSet,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<(), Fault> {
        let mut retry = Retry::new(deadline);
        loop {
            let routes = self.admit()?;
            match self.fabric.write(&routes, set, deadline, cost).await {
                Ok(()) => return Ok(()),
                Err(trouble) => retry.after(&self.fabric, routes.epoch(), trouble, false).await?,
            }
        }
    }

    /// COMPARE_SWAP; returns the word as it was.
    pub(crate) async fn compare_swap(
        &self,
        at: RemotePtr,
        old: u64,
        new: u64,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<u64, Fault> {
        let mut retry = Retry::new(deadline);
        loop {
            let routes = self.admit()?;
            cost.rounds += 1;
            match self.fabric.compare_swap(&routes, at, old, new, deadline).await {
                Ok(was) => return Ok(was),
                Err(trouble) => retry.after(&self.fabric, routes.epoch(), trouble, false).await?,
            }
        }
    }

    /// FETCH_ADD; returns the word as it was.
    pub(crate) async fn fetch_add(
        &self,
        at: RemotePtr,
        add: u64,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<u64, Fault> {
        let mut retry = Retry::new(deadline);
        loop {
            let routes = self.admit()?;
            cost.rounds += 1;
            match self.fabric.fetch_add(&routes, at, add, deadline).await {
                Ok(was) => return Ok(was),
                Err(trouble) => retry.after(&self.fabric, routes.epoch(), trouble, false).await?,
            }
        }
    }

    /// Whether `session` of the memory node that hosts `at` may still write there; `false` is final.
    pub(crate) async fn is_session_alive(
        &self,
        at: RemotePtr,
        session: SessionId,
        deadline: Instant,
    ) -> Result<bool, Fault> {
        let mut retry = Retry::new(deadline);
        loop {
            let routes = self.admit()?;
            let asked =
                async { self.fabric.session(&routes, at, deadline).await?.is_alive(session, deadline).await };
            match asked.await {
                Ok(is_alive) => return Ok(is_alive),
                Err(trouble) => retry.after(&self.fabric, routes.epoch(), trouble, true).await?,
            }
        }
    }

    /// Number of this compute node's session on the memory node that hosts `at`.
    pub(crate) async fn session_number(&self, at: RemotePtr, deadline: Instant) -> Result<SessionId, Fault> {
        let mut retry = Retry::new(deadline);
        loop {
            let routes = self.admit()?;
            match self.fabric.session(&routes, at, deadline).await {
                Ok(session) => return Ok(session.id()),
                Err(trouble) => retry.after(&self.fabric, routes.epoch(), trouble, true).await?,
            }
        }
    }

    /// Gives up the session on the memory node that hosts `at`, if there is one.
    pub(crate) async fn discard_session(&self, at: RemotePtr, why: &str) {
        if let Ok(routes) = self.admit()
            && let Ok(session) = self.fabric.session(&routes, at, Instant::now()).await
        {
            session.discard(why);
        }
    }

    // --------------------------------------------------------------------------------------- superblocks

    async fn check_superblocks(&self, deadline: Instant) -> Result<(), Fault> {
        let mut gather = Gather::new();
        let first = usize::from(self.params.first_regions);
        let regions = self.regions();
        for region in &regions[..first] {
            gather.push(RemotePtr::new(*region, 0), 32);
        }
        gather.push(self.home_at(at_home::MAGIC), 24);
        self.gather(&mut gather, deadline, &mut Cost::default()).await?;
        let whose = |what: String| corrupt(format!("collection '{}': {what}", self.name));
        for (i, region) in regions[..first].iter().enumerate() {
            let block = gather.get(i);
            if word(block, in_region::MAGIC) != REGION_MAGIC {
                return Err(whose(format!("{region} has no superblock")));
            }
            let owner = word(block, in_region::COLLECTION);
            if owner != u64::from(self.id.0) {
                return Err(whose(format!("{region} says that it belongs to collection {owner}")));
            }
        }
        let block = gather.get(first);
        if word(block, 0) != COLLECTION_MAGIC {
            return Err(whose(format!("no collection superblock in {}", self.home)));
        }
        let version = word(block, at_home::VERSION - at_home::MAGIC);
        if version != LAYOUT_VERSION {
            return Err(whose(format!(
                "its layout has version {version}, this program knows {LAYOUT_VERSION}"
            )));
        }
        if word(block, at_home::PARAMS - at_home::MAGIC) != self.params.checksum() {
            return Err(whose("its superblock was written for other parameters than the map's".into()));
        }
        Ok(())
    }

    /// Writes the superblocks of a collection that was just created. Its regions are zeros until then.
    pub(crate) async fn write_superblocks(&self, deadline: Instant) -> Result<(), Fault> {
        let mut cost = Cost::default();
        for index in 0..self.region_count() {
            self.init_region(index, deadline, &mut cost).await?;
        }
        let mut set = WriteSet::new();
        set.push_word(self.home_at(at_home::VERSION), LAYOUT_VERSION);
        set.push_word(self.home_at(at_home::PARAMS), self.params.checksum());
        self.write(&set, deadline, &mut cost).await?;
        set.clear();
        set.push_word(self.home_at(at_home::MAGIC), COLLECTION_MAGIC);
        self.write(&set, deadline, &mut cost).await
    }

    /// Writes the superblock of the `index`-th region. Several compute nodes may do so at once: the words are the
    /// same, and the bump pointer, which comes last, starts by COMPARE_SWAP from zero.
    pub(crate) async fn init_region(
        &self,
        index: usize,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<(), Fault> {
        let region = self.regions()[index];
        let routes = self.admit()?;
        let bytes = routes.region(region).map_or(0, |route| route.entry.bytes);
        let first_free = self.params.first_free(index);
        if first_free > bytes {
            return Err(Fault::new(
                FaultCode::RegionFull,
                format!(
                    "{region} has {bytes} bytes, the tables of collection '{}' alone need {first_free}",
                    self.name
                ),
            ));
        }
        let mut set = WriteSet::new();
        set.push_word(RemotePtr::new(region, in_region::BYTES), bytes);
        set.push_word(RemotePtr::new(region, in_region::COLLECTION), self.id.0.into());
        set.push_word(RemotePtr::new(region, in_region::MAGIC), REGION_MAGIC);
        self.write(&set, deadline, cost).await?;
        self.compare_swap(RemotePtr::new(region, in_region::NEXT_FREE), 0, first_free, deadline, cost)
            .await?;
        Ok(())
    }

    // -------------------------------------------------------------------------------------- chunk tables

    fn table(&self, table: Table) -> (&ArcSwap<Vec<RemotePtr>>, u32, u64) {
        match table {
            Table::Nodes => (&self.chunks, self.params.max_chunks, self.params.chunk_bytes()),
            Table::Upper => {
                (&self.upper_chunks, self.params.max_upper_chunks, self.params.upper_chunk_bytes())
            }
        }
    }

    /// Address of entry `chunk` of a table.
    pub(crate) fn table_at(&self, table: Table, chunk: u32) -> RemotePtr {
        self.home_at(match table {
            Table::Nodes => self.params.chunk_table_at(chunk),
            Table::Upper => self.params.upper_table_at(chunk),
        })
    }

    /// Where a chunk starts, as far as this compute node has heard.
    #[inline]
    pub(crate) fn known_chunk(&self, table: Table, chunk: u32) -> Option<RemotePtr> {
        let (cached, ..) = self.table(table);
        cached.load().get(chunk as usize).copied().filter(|at| !at.is_null())
    }

    /// Remembers where chunks `first ..` start; nulls are chunks that are not there yet.
    pub(crate) fn remember_chunks(&self, table: Table, first: u32, chunks: &[RemotePtr]) {
        let (cached, ..) = self.table(table);
        let used = chunks.iter().rposition(|at| !at.is_null()).map_or(0, |last| last + 1);
        if used == 0 {
            return;
        }
        let _growing = self.growing.lock();
        let mut longer = Vec::clone(&cached.load());
        let end = first as usize + used;
        longer.resize(longer.len().max(end), RemotePtr::NULL);
        for (slot, at) in longer[first as usize..end].iter_mut().zip(chunks) {
            if !at.is_null() {
                *slot = *at;
            }
        }
        cached.store(Arc::new(longer));
    }

    /// A chunk's place as a table says, checked.
    fn check_chunk(
        &self,
        routes: &Routes<V>,
        table: Table,
        chunk: u32,
        at: RemotePtr,
    ) -> Result<(), Trouble> {
        let (_, _, bytes) = self.table(table);
        let wrong =
            |what: String| corrupt(format!("collection '{}': {table} {chunk} at {at}: {what}", self.name));
        let index = self.view.load().regions.iter().position(|(id, _)| *id == at.region());
        // A region that another compute node has just made the oracle add.
        let Some((index, route)) = index.zip(routes.region(at.region())) else {
            return Err(Trouble {
                remedy: Remedy::NewerMap,
                fault: wrong("not in a region of the collection".into()),
            });
        };
        let end = at.offset().checked_add(bytes);
        if !at.offset().is_multiple_of(64)
            || at.offset() < self.params.first_free(index)
            || end.is_none_or(|end| end > route.entry.bytes)
        {
            return Err(wrong("not where a chunk may lie".into()).into());
        }
        Ok(())
    }

    /// Where a chunk starts; asks the table in remote memory if this compute node has not heard of it.
    pub(crate) async fn chunk(
        &self,
        table: Table,
        chunk: u32,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<RemotePtr, Fault> {
        if let Some(at) = self.known_chunk(table, chunk) {
            return Ok(at);
        }
        let none = || {
            corrupt(format!("collection '{}': a link names {table} {chunk}, which is not there", self.name))
        };
        let (_, max, _) = self.table(table);
        if chunk >= max {
            return Err(none());
        }
        // Its neighbours in the table come with it.
        let first = chunk - chunk % TABLE_WINDOW;
        let window = TABLE_WINDOW.min(max - first);
        let mut gather = Gather::new();
        gather.push(self.table_at(table, first), 8 * u64::from(window));
        self.gather(&mut gather, deadline, cost).await?;
        let mut found: Vec<_> =
            (0..u64::from(window)).map(|i| RemotePtr::from_word(word(gather.get(0), 8 * i))).collect();
        let wanted = found[(chunk - first) as usize];
        if wanted.is_null() {
            return Err(none());
        }
        self.chunk_at(table, chunk, wanted, deadline).await?;
        // Others in regions that the map does not have yet are left for when they are wanted.
        let routes = self.admit()?;
        for (number, at) in (first..).zip(&mut found) {
            if !at.is_null() && self.check_chunk(&routes, table, number, *at).is_err() {
                *at = RemotePtr::NULL;
            }
        }
        self.remember_chunks(table, first, &found);
        Ok(wanted)
    }

    /// Checks the place of a chunk; waits for the map where it lags behind the table.
    async fn chunk_at(
        &self,
        table: Table,
        chunk: u32,
        at: RemotePtr,
        deadline: Instant,
    ) -> Result<(), Fault> {
        let mut retry = Retry::new(deadline);
        loop {
            let routes = self.admit()?;
            match self.check_chunk(&routes, table, chunk, at) {
                Ok(()) => return Ok(()),
                Err(trouble) => retry.after(&self.fabric, routes.epoch(), trouble, true).await?,
            }
        }
    }

    /// Reads both chunk tables whole.
    pub(crate) async fn read_tables(
        &self,
        rooms: &Rooms,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<(), Fault> {
        for table in [Table::Nodes, Table::Upper] {
            let (_, max, _) = self.table(table);
            let count = rooms.count(table).min(max.into()) as u32;
            self.read_table(table, count, deadline, cost).await?;
        }
        Ok(())
    }

    /// Makes all of the first `count` chunks known that are there.
    ///
    /// # Errors
    /// If one lies where none may.
    pub(crate) async fn read_table(
        &self,
        table: Table,
        count: u32,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<(), Fault> {
        let mut gather = Gather::new();
        let mut first = 0;
        while first < count {
            let window = (count - first).min(16 * TABLE_WINDOW);
            gather.clear();
            gather.push(self.table_at(table, first), 8 * u64::from(window));
            self.gather(&mut gather, deadline, cost).await?;
            let words = gather.get(0).chunks_exact(8).map(|bytes| RemotePtr::from_word(word(bytes, 0)));
            let there: Vec<_> = (first..).zip(words).filter(|(_, at)| !at.is_null()).collect();
            for (chunk, at) in there {
                if self.known_chunk(table, chunk).is_none() {
                    self.chunk_at(table, chunk, at, deadline).await?;
                    self.remember_chunks(table, chunk, &[at]);
                }
            }
            first += window;
        }
        Ok(())
    }

    /// Makes the chunk of `node` known, so that [`Self::place`] finds it.
    #[inline]
    pub(crate) async fn learn(&self, node: NodeId, deadline: Instant, cost: &mut Cost) -> Result<(), Fault> {
        if self.place(node).is_none() {
            let (chunk, _) = self.params.place(node);
            self.chunk(Table::Nodes, chunk, deadline, cost).await?;
        }
        Ok(())
    }

    /// Chunk address and slot of a node whose chunk is known.
    #[inline]
    pub(crate) fn place(&self, node: NodeId) -> Option<(RemotePtr, u32)> {
        let (chunk, slot) = self.params.place(node);
        Some((self.known_chunk(Table::Nodes, chunk)?, slot))
    }

    /// Chunk address and slot of the level-`level` list of a node whose level-1 list is `upper`.
    pub(crate) async fn upper_place(
        &self,
        node: NodeId,
        upper: u32,
        level: u8,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<(RemotePtr, u32), Fault> {
        let (chunk, first) = self.params.upper_place(upper);
        let slot = first + u32::from(level) - 1;
        if slot >= UPPER_SLOTS {
            return Err(corrupt(format!(
                "collection '{}': level-{level} list of {node} would be outside its chunk (upper index {upper})",
                self.name
            )));
        }
        Ok((self.chunk(Table::Upper, chunk, deadline, cost).await?, slot))
    }

    // --------------------------------------------------------------------------------------- entry point

    /// Where searches start, as of at most the staleness bound ago; `None` while the collection is empty. Asks remote
    /// memory only if nobody did for that long: within it the word is read in the background.
    pub(crate) async fn entry(
        self: &Arc<Self>,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<Option<Entry>, Fault> {
        {
            let mut cache = self.entry.lock();
            let age = cache.as_of.map_or(Duration::MAX, |as_of| as_of.elapsed());
            if age < self.options.staleness_bound {
                if age >= self.options.staleness_bound / 2 && !cache.is_refreshing {
                    cache.is_refreshing = true;
                    let this = Arc::clone(self);
                    let deadline = Instant::now() + self.options.staleness_bound;
                    tokio::spawn(async move {
                        let mut cost = Cost::default();
                        if let Err(fault) = this.refresh_entry(deadline, &mut cost).await {
                            tracing::debug!(collection = this.name, %fault, "entry point was not refreshed");
                        }
                        this.entry.lock().is_refreshing = false;
                    });
                }
                return Ok(cache.entry);
            }
        }
        self.refresh_entry(deadline, cost).await
    }

    /// What is cached of the entry point, of whatever age.
    pub(crate) fn cached_entry(&self) -> Option<Entry> {
        self.entry.lock().entry
    }

    /// Reads the entry point.
    pub(crate) async fn refresh_entry(
        &self,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<Option<Entry>, Fault> {
        let as_of = Instant::now();
        let word = self.read_word(self.home_at(at_home::ENTRY_POINT), deadline, cost).await?;
        let Some(point) = EntryPoint::from_word(word) else {
            if word != 0 {
                return Err(corrupt(format!("collection '{}': entry point word {word:#x}", self.name)));
            }
            let mut cache = self.entry.lock();
            cache.as_of = cache.as_of.max(Some(as_of));
            return Ok(cache.entry);
        };
        let known = self.cached_entry().filter(|entry| entry.point == point);
        let entry = match known {
            Some(entry) => entry,
            None => {
                let meta = self.read_meta(point.node, deadline, cost).await?;
                if meta.level != point.level || meta.state == NodeState::Empty {
                    return Err(corrupt(format!(
                        "collection '{}': entry point {} on level {}, whose record says {meta:?}",
                        self.name, point.node, point.level
                    )));
                }
                Entry { point, upper: meta.upper }
            }
        };
        self.set_entry(entry, as_of);
        Ok(self.cached_entry())
    }

    /// Takes note of an entry point. It only ever moves up, so an older reading cannot undo a newer one.
    pub(crate) fn set_entry(&self, entry: Entry, as_of: Instant) {
        let mut cache = self.entry.lock();
        if cache.entry.is_none_or(|old| entry.point.level > old.point.level) {
            cache.entry = Some(entry);
        }
        cache.as_of = cache.as_of.max(Some(as_of));
    }

    /// Reads a node's meta word.
    pub(crate) async fn read_meta(
        &self,
        node: NodeId,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<NodeMeta, Fault> {
        self.learn(node, deadline, cost).await?;
        let (chunk, slot) = self.place(node).expect("learnt above");
        let at = self.params.header_at(chunk, slot).add(header::META);
        let word = self.read_word(at, deadline, cost).await?;
        self.decode_meta(node, word)
    }

    pub(crate) fn decode_meta(&self, node: NodeId, word: u64) -> Result<NodeMeta, Fault> {
        NodeMeta::from_word(word)
            .ok_or_else(|| corrupt(format!("collection '{}': header of {node} says {word:#x}", self.name)))
    }

    // -------------------------------------------------------------------------------------------- vectors

    /// Whether `vector` may be stored or searched for.
    ///
    /// # Errors
    /// [`FaultCode::BadRequest`] on a wrong length, and on what [`validate`] refuses.
    pub fn check_vector(&self, vector: &[u8]) -> Result<(), Fault> {
        let bad = |what: String| Err(Fault::new(FaultCode::BadRequest, what));
        let (dtype, dim) = (self.params.dtype, self.params.dim);
        if vector.len() != self.distance.vector_bytes() {
            return bad(format!(
                "the vector has {} bytes; collection '{}' holds {dim} x {dtype} = {} bytes",
                vector.len(),
                self.name,
                self.distance.vector_bytes()
            ));
        }
        validate(self.params.metric, dtype, vector).or_else(|why| bad(format!("vector: {why}")))
    }

    // -------------------------------------------------------------------------------------------- scratch

    /// Buffers for one query or insert; they come back when dropped.
    pub(crate) fn scratch(self: &Arc<Self>) -> Borrowed<V> {
        let scratch = self.scratch.lock().pop().unwrap_or_default();
        Borrowed { scratch: Some(scratch), collection: Arc::clone(self) }
    }
}

/// Index of the first NaN or infinity.
pub(crate) fn first_not_finite(dtype: DType, vector: &[u8]) -> Option<usize> {
    match dtype {
        DType::F32 => {
            vector.as_chunks::<4>().0.iter().position(|element| !f32::from_le_bytes(*element).is_finite())
        }
        DType::F16 => vector
            .as_chunks::<2>()
            .0
            .iter()
            .position(|element| !half::f16::from_le_bytes(*element).is_finite()),
        DType::U8 | DType::I8 => None,
    }
}

/// Scratch buffers on loan.
pub(crate) struct Borrowed<V> {
    scratch: Option<Box<Scratch>>,
    collection: Arc<Collection<V>>,
}

impl<V> std::ops::Deref for Borrowed<V> {
    type Target = Scratch;
    fn deref(&self) -> &Scratch {
        self.scratch.as_ref().expect("present until dropped")
    }
}

impl<V> std::ops::DerefMut for Borrowed<V> {
    fn deref_mut(&mut self) -> &mut Scratch {
        self.scratch.as_mut().expect("present until dropped")
    }
}

impl<V> Drop for Borrowed<V> {
    fn drop(&mut self) {
        let mut pool = self.collection.scratch.lock();
        if pool.len() < SCRATCH_MAX {
            pool.extend(self.scratch.take());
        }
    }
}
