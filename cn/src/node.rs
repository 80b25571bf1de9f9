//! The compute node: takes requests, checks who may ask what, bounds how much runs at once, and answers each by its
//! deadline.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::stream::{self, StreamExt as _};
use parking_lot::Mutex;
use shine_common::ids::{CollectionId, ExternalId};
use shine_common::layout::{EntryPoint, collection as at_home};
use shine_common::metric::SimdLevel;
use shine_common::verbs::Verbs;
use shine_common::wire::{
    CnRequest, CnResponse, Collection as MapEntry, CollectionInfo, CollectionSpec, Fault, FaultCode,
    NodeStatus, OracleRequest, OracleResponse, Receipt, Role,
};
use tokio::sync::{Semaphore, SemaphorePermit};
use tracing::{debug, info};

use crate::alloc::Rooms;
use crate::catalogue::Catalogue;
use crate::check::{JobState, Jobs};
use crate::collection::{Collection, Options, Table, unexpected, word};
use crate::counters::Counters;
use crate::fabric::{Cost, Fabric, Gather, deadline_exceeded};
use crate::hnsw::insert::{self, Levels};
use crate::load::{Load, Loads, NodesPiece, Resumed, Source};
use crate::query::{self, Query};
use crate::scan;

/// Bounds of one compute node.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Searches and look-ups that run at once; one more is `Overloaded` at once.
    pub searches_max: usize,
    /// Inserts that run at once.
    pub inserts_max: usize,
    /// Everything else that runs at once.
    pub controls_max: usize,
    /// Time for a search, look-up or insert that names none.
    pub deadline: Duration,
    /// Longest time that one may ask for.
    pub deadline_max: Duration,
    /// Time for everything else.
    pub control_deadline: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            searches_max: 1024,
            inserts_max: 128,
            controls_max: 64,
            deadline: Duration::from_secs(2),
            deadline_max: Duration::from_secs(60),
            control_deadline: Duration::from_secs(30),
        }
    }
}

/// Part of a deadline that is kept back for the answer's way to the client.
const ANSWER_SHARE: u32 = 20;
/// Longest such part.
const ANSWER_TIME_MAX: Duration = Duration::from_millis(50);
/// Collections whose sizes are asked for at once by `List`.
const LIST_PARALLEL: usize = 8;
/// Time for each of them.
const LIST_TIME: Duration = Duration::from_secs(1);

/// What a node is made of.
pub struct Parts<V> {
    /// Name in the cluster.
    pub name: String,
    /// The data plane; its map must be kept up to date.
    pub fabric: Arc<Fabric<V>>,
    /// The oracle.
    pub catalogue: Arc<dyn Catalogue>,
    /// Whether an oracle answered lately.
    pub oracle_reachable: Box<dyn Fn() -> bool + Send + Sync>,
    /// How collections are worked with.
    pub options: Options,
    /// Bounds.
    pub limits: Limits,
}

impl<V> std::fmt::Debug for Parts<V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parts")
            .field("name", &self.name)
            .field("options", &self.options)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

/// A compute node.
pub struct Node<V> {
    name: String,
    fabric: Arc<Fabric<V>>,
    catalogue: Arc<dyn Catalogue>,
    oracle_reachable: Box<dyn Fn() -> bool + Send + Sync>,
    options: Options,
    limits: Limits,
    counters: Arc<Counters>,
    collections: Mutex<HashMap<CollectionId, Arc<Collection<V>>>>,
    levels: Levels,
    loads: Loads<V>,
    checks: Arc<Jobs>,
    searches: Semaphore,
    inserts: Semaphore,
    controls: Semaphore,
    /// One question after newer maps at a time.
    asking: tokio::sync::Mutex<()>,
    started: Instant,
    is_draining: AtomicBool,
}

impl<V> std::fmt::Debug for Node<V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Node({})", self.name)
    }
}

/// Whether `role` may make `request`.
fn may(role: Role, request: &CnRequest) -> bool {
    match request {
        CnRequest::Status => true,
        CnRequest::Search { .. }
        | CnRequest::Insert { .. }
        | CnRequest::Get { .. }
        | CnRequest::List
        | CnRequest::Stats { .. }
        | CnRequest::Check { .. } => matches!(role, Role::Client | Role::Admin),
        CnRequest::Create(_)
        | CnRequest::Drop { .. }
        | CnRequest::LoadBegin { .. }
        | CnRequest::LoadNodes { .. }
        | CnRequest::LoadUpper { .. }
        | CnRequest::LoadEnd { .. }
        | CnRequest::LoadAbort { .. } => role == Role::Admin,
    }
}

impl<V: Verbs> Node<V> {
    /// A node that serves at once.
    pub fn new(parts: Parts<V>) -> Arc<Self> {
        let Parts { name, fabric, catalogue, oracle_reachable, options, limits } = parts;
        Arc::new(Self {
            name,
            counters: Arc::clone(&fabric.counters),
            fabric,
            catalogue,
            oracle_reachable,
            options,
            limits,
            collections: Mutex::default(),
            levels: Levels::from_os(),
            loads: Loads::default(),
            checks: Arc::default(),
            searches: Semaphore::new(limits.searches_max),
            inserts: Semaphore::new(limits.inserts_max),
            controls: Semaphore::new(limits.controls_max),
            asking: tokio::sync::Mutex::new(()),
            started: Instant::now(),
            is_draining: AtomicBool::new(false),
        })
    }

    /// Answers one request of a peer of role `role`, by the request's deadline. Dropping the future is safe: what
    /// changes anything runs in tasks of its own.
    ///
    /// # Errors
    /// One typed fault.
    pub async fn handle(self: &Arc<Self>, role: Role, request: CnRequest) -> Result<CnResponse, Fault> {
        if !may(role, &request) {
            let message =
                format!("role {role} may not do this: it takes role admin, or client for search and insert");
            return Err(Fault::new(FaultCode::Forbidden, message));
        }
        let answer = self.admit(request).await;
        self.tally(answer)
    }

    fn tally<T>(&self, answer: Result<T, Fault>) -> Result<T, Fault> {
        match &answer {
            Ok(_) => {}
            Err(fault) if fault.code == FaultCode::Overloaded => self.counters.overloaded.add(1),
            Err(fault) => {
                self.counters.faults.add(1);
                debug!(code = ?fault.code, %fault, "request failed");
            }
        }
        answer
    }

    fn check_serving(&self) -> Result<(), Fault> {
        if self.is_draining.load(Ordering::Acquire) {
            return Err(Fault::new(FaultCode::Unavailable, format!("{} is leaving the cluster", self.name)));
        }
        Ok(())
    }

    async fn admit(self: &Arc<Self>, request: CnRequest) -> Result<CnResponse, Fault> {
        if !matches!(request, CnRequest::Status) {
            self.check_serving()?;
        }
        match request {
            CnRequest::Search { collection, target, k, ef, deadline_ms, with_vectors } => {
                let _running = self.room(&self.searches, "searches")?;
                let query = Query { target, k, ef, with_vectors };
                self.by(deadline_ms, "searching", |inner| self.search(collection, query, inner)).await
            }
            CnRequest::Get { collection, id, deadline_ms } => {
                let _running = self.room(&self.searches, "searches")?;
                self.by(deadline_ms, "looking an id up", |inner| self.get(collection, id, inner)).await
            }
            CnRequest::Insert { collection, id, vector, deadline_ms } => {
                let _running = self.room(&self.inserts, "inserts")?;
                self.by(deadline_ms, "inserting", |inner| self.insert(collection, id, vector, inner)).await
            }
            CnRequest::Status => Ok(CnResponse::Status(self.status())),
            control => {
                let _running = self.room(&self.controls, "control requests")?;
                let this = Arc::clone(self);
                let deadline = Instant::now() + self.limits.control_deadline;
                // A caller that goes away must not leave half of it undone.
                let task = tokio::spawn(async move {
                    tokio::time::timeout_at(deadline.into(), this.control(control, deadline))
                        .await
                        .unwrap_or_else(|_| Err(deadline_exceeded("carrying a control request out")))
                });
                task.await.unwrap_or_else(|failure| {
                    Err(Fault::new(FaultCode::Internal, format!("a control request broke off: {failure}")))
                })
            }
        }
    }

    fn room<'a>(&self, semaphore: &'a Semaphore, what: &str) -> Result<SemaphorePermit<'a>, Fault> {
        semaphore.try_acquire().map_err(|_| {
            Fault::new(
                FaultCode::Overloaded,
                format!("{} runs as many {what} as it may: try another", self.name),
            )
        })
    }

    /// Runs `work` by a request's deadline. The work is given a little less, so that it can say itself what kept it.
    async fn by<F: Future<Output = Result<CnResponse, Fault>>>(
        &self,
        deadline_ms: u32,
        what: &str,
        work: impl FnOnce(Instant) -> F,
    ) -> Result<CnResponse, Fault> {
        let time = match deadline_ms {
            0 => self.limits.deadline,
            ms => Duration::from_millis(ms.into()).min(self.limits.deadline_max),
        };
        let outer = Instant::now() + time;
        let inner = outer - (time / ANSWER_SHARE).min(ANSWER_TIME_MAX);
        tokio::time::timeout_at(outer.into(), work(inner))
            .await
            .unwrap_or_else(|_| Err(deadline_exceeded(what)))
    }

    async fn search(
        self: &Arc<Self>,
        collection: String,
        query: Query,
        deadline: Instant,
    ) -> Result<CnResponse, Fault> {
        let collection = self.collection(&collection, deadline).await?;
        let mut answer = query::search(&collection, &query, deadline).await?;
        let receipt = &mut answer.receipt;
        receipt.cn.clone_from(&self.name);
        self.counters.searches.add(1);
        self.book(receipt);
        Ok(CnResponse::Hits { hits: answer.hits, ef: answer.ef, receipt: answer.receipt })
    }

    fn book(&self, receipt: &Receipt) {
        self.counters.hops.add(receipt.hops.into());
        self.counters.rounds.add(receipt.rounds.into());
        self.counters.remote_reads.add(receipt.remote_reads.into());
        self.counters.verb_bytes.add(receipt.bytes);
        self.counters.torn_lists.add(receipt.torn_lists.into());
    }

    async fn get(
        self: &Arc<Self>,
        collection: String,
        id: ExternalId,
        deadline: Instant,
    ) -> Result<CnResponse, Fault> {
        let collection = self.collection(&collection, deadline).await?;
        let record = query::get(&collection, id, deadline).await?;
        self.counters.gets.add(1);
        Ok(CnResponse::Record { node: record.node, level: record.level, vector: record.vector })
    }

    async fn insert(
        self: &Arc<Self>,
        collection: String,
        id: ExternalId,
        vector: Vec<u8>,
        deadline: Instant,
    ) -> Result<CnResponse, Fault> {
        let collection = self.collection(&collection, deadline).await?;
        let mut inserted = insert::insert(&collection, &self.levels, id, vector, deadline).await?;
        inserted.receipt.cn.clone_from(&self.name);
        self.counters.inserts.add(1);
        self.book(&inserted.receipt);
        Ok(CnResponse::Inserted { node: inserted.node, receipt: inserted.receipt })
    }

    // ----------------------------------------------------------------------- for the HTTP API, in process

    /// Bounds.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Whether requests would be taken.
    ///
    /// # Errors
    /// Why not.
    pub fn readiness(&self) -> Result<(), Fault> {
        self.check_serving()?;
        if self.fabric.epoch() == shine_common::ids::Epoch::default() {
            return Err(Fault::new(FaultCode::Unavailable, format!("{} has no cluster map yet", self.name)));
        }
        Ok(())
    }

    /// Whether there is a collection of that name.
    ///
    /// # Errors
    /// If that cannot be found out by the deadline.
    pub async fn exists(&self, name: &str, deadline: Instant) -> Result<bool, Fault> {
        match self.entry(name, deadline).await {
            Ok(_) => Ok(true),
            Err(fault) if fault.code == FaultCode::NotFound => Ok(false),
            Err(fault) => Err(fault),
        }
    }

    /// The open collection of that name.
    ///
    /// # Errors
    /// [`FaultCode::NotFound`] if there is none, and whatever remote memory answers.
    pub async fn open(self: &Arc<Self>, name: &str, deadline: Instant) -> Result<Arc<Collection<V>>, Fault> {
        self.check_serving()?;
        let opened = self.collection(name, deadline).await;
        self.tally(opened)
    }

    /// Inserts a vector, or puts it in the place of the live record under `id`. Waits for its turn where as many inserts
    /// run as may.
    ///
    /// # Errors
    /// As [`insert::upsert`].
    pub async fn upsert(
        &self,
        collection: &Arc<Collection<V>>,
        id: ExternalId,
        vector: Vec<u8>,
        deadline: Instant,
    ) -> Result<insert::Inserted, Fault> {
        self.check_serving()?;
        let Ok(Ok(_running)) = tokio::time::timeout_at(deadline.into(), self.inserts.acquire()).await else {
            return self.tally(Err(deadline_exceeded("waiting for the turn of an insert")));
        };
        let inserted = self.tally(insert::upsert(collection, &self.levels, id, vector, deadline).await)?;
        self.counters.inserts.add(1);
        self.counters.replacements.add(inserted.replaced.is_some().into());
        self.book(&inserted.receipt);
        Ok(inserted)
    }

    /// At most `limit` records from that of `offset` on, in the order of their node numbers.
    ///
    /// # Errors
    /// As [`scan::page`].
    pub async fn scroll(
        &self,
        collection: &Arc<Collection<V>>,
        offset: Option<ExternalId>,
        limit: usize,
        with_vectors: bool,
        deadline: Instant,
    ) -> Result<scan::Page, Fault> {
        self.check_serving()?;
        let _running = self.tally(self.room(&self.controls, "control requests"))?;
        self.tally(scan::page(collection, offset, limit, with_vectors, deadline).await)
    }

    /// Number of live records: counted, or as inserts and loads have kept it.
    ///
    /// # Errors
    /// Whatever remote memory answers.
    pub async fn count(
        self: &Arc<Self>,
        collection: &Arc<Collection<V>>,
        is_exact: bool,
        deadline: Instant,
    ) -> Result<u64, Fault> {
        self.check_serving()?;
        let _running = self.tally(self.room(&self.controls, "control requests"))?;
        self.tally(if is_exact {
            scan::count(collection, deadline).await
        } else {
            self.info(collection, deadline).await.map(|info| info.vectors)
        })
    }

    async fn control(self: &Arc<Self>, request: CnRequest, deadline: Instant) -> Result<CnResponse, Fault> {
        match request {
            CnRequest::Create(mut spec) => {
                spec.loading = false;
                let (fabric, catalogue) = (Arc::clone(&self.fabric), Arc::clone(&self.catalogue));
                let collection = Collection::create(fabric, catalogue, spec, self.options, deadline).await?;
                info!(collection = collection.name(), "collection created");
                let collection = self.keep(collection);
                Ok(CnResponse::Info(self.info(&collection, deadline).await?))
            }
            CnRequest::Drop { collection } => {
                self.drop_collection(collection, deadline).await?;
                Ok(CnResponse::Done)
            }
            CnRequest::List => Ok(CnResponse::Collections(self.list(deadline).await)),
            CnRequest::Stats { collection } => {
                let collection = self.collection(&collection, deadline).await?;
                Ok(CnResponse::Info(self.info(&collection, deadline).await?))
            }
            CnRequest::Check { collection, job } => {
                let state = match job {
                    0 => self.checks.start(self.collection(&collection, deadline).await?)?,
                    job => self.checks.state(&collection, job)?,
                };
                let JobState { job, done, total, report } = state;
                Ok(CnResponse::Check { job, done, total, report })
            }
            CnRequest::LoadBegin { spec, nodes, upper_slots, replace, file, resume } => {
                let source = Source { file, nodes, upper_slots };
                if resume {
                    self.load_resume(spec, source, deadline).await
                } else {
                    self.load_begin(spec, source, replace, deadline).await
                }
            }
            CnRequest::LoadNodes { load, first, metas, ids, vectors, lists } => {
                let running = self.loads.get(load)?;
                let piece = NodesPiece { first, metas, ids, vectors, lists };
                self.piece(load, running.nodes(piece, deadline).await, deadline).await
            }
            CnRequest::LoadUpper { load, first, lists } => {
                let running = self.loads.get(load)?;
                self.piece(load, running.upper(first, &lists, deadline).await, deadline).await
            }
            CnRequest::LoadEnd { load, entry_point } => {
                let running = self.loads.get(load)?;
                let ended = running.end(entry_point, deadline).await;
                if ended.is_ok() {
                    self.loads.remove(load);
                    self.keep(Arc::clone(running.collection()));
                }
                self.piece(load, ended, deadline).await
            }
            CnRequest::LoadAbort { load } => {
                self.loads.get(load)?;
                if let Some(load) = self.loads.remove(load) {
                    load.abort(deadline).await;
                }
                Ok(CnResponse::Done)
            }
            CnRequest::Search { .. }
            | CnRequest::Insert { .. }
            | CnRequest::Get { .. }
            | CnRequest::Status => {
                unreachable!("not control requests")
            }
        }
    }

    // --------------------------------------------------------------------------------------- collections

    /// The open collection of that name.
    async fn collection(
        self: &Arc<Self>,
        name: &str,
        deadline: Instant,
    ) -> Result<Arc<Collection<V>>, Fault> {
        let entry = self.entry(name, deadline).await?;
        if let Some(open) = self.collections.lock().get(&entry.id) {
            return Ok(Arc::clone(open));
        }
        let (fabric, catalogue) = (Arc::clone(&self.fabric), Arc::clone(&self.catalogue));
        let opened = Collection::open(fabric, catalogue, &entry, self.options, deadline).await?;
        Ok(self.keep(opened))
    }

    /// The collection's line in the map. A name that the map lacks may be newer than the map: the oracle is asked.
    async fn entry(&self, name: &str, deadline: Instant) -> Result<MapEntry, Fault> {
        let routes = self.fabric.routes();
        if let Some(entry) = routes.map().collection(name) {
            return Ok(entry.clone());
        }
        {
            let asking = tokio::time::timeout_at(deadline.into(), self.asking.lock()).await;
            let _asking = asking.map_err(|_| deadline_exceeded("asking for the newest map"))?;
            if self.fabric.epoch() == routes.epoch()
                && let Err(fault) = self.ask_for_map(deadline).await
            {
                // With no oracle the last map is what there is.
                debug!(%fault, "no newer map");
            }
        }
        self.fabric
            .routes()
            .map()
            .collection(name)
            .cloned()
            .ok_or_else(|| Fault::new(FaultCode::NotFound, format!("no collection '{name}'")))
    }

    async fn ask_for_map(&self, deadline: Instant) -> Result<(), Fault> {
        let request = OracleRequest::WatchMap { after: self.fabric.epoch(), wait_ms: 0 };
        match self.catalogue.call(request, deadline).await? {
            OracleResponse::Map(map) => {
                self.fabric.publish(Arc::new(map));
                Ok(())
            }
            other => Err(unexpected("WatchMap", &other)),
        }
    }

    /// Keeps an open collection; the one that is kept already wins, since it has leases. Forgets those that are gone.
    fn keep(&self, opened: Arc<Collection<V>>) -> Arc<Collection<V>> {
        let routes = self.fabric.routes();
        let mut open = self.collections.lock();
        open.retain(|id, _| routes.map().collections.iter().any(|entry| entry.id == *id));
        Arc::clone(open.entry(opened.id()).or_insert(opened))
    }

    async fn drop_collection(&self, name: String, deadline: Instant) -> Result<(), Fault> {
        match self.catalogue.call(OracleRequest::DropCollection { name: name.clone() }, deadline).await? {
            OracleResponse::Done { epoch } => {
                info!(collection = name, "collection dropped");
                self.fabric.reach(epoch, deadline).await
            }
            other => Err(unexpected("DropCollection", &other)),
        }
    }

    async fn list(self: &Arc<Self>, deadline: Instant) -> Vec<CollectionInfo> {
        let routes = self.fabric.routes();
        let deadline = deadline.min(Instant::now() + LIST_TIME);
        let entries = routes.map().collections.clone();
        let asked: Vec<_> = entries.into_iter().map(|entry| self.info_or_map(entry, deadline)).collect();
        let mut infos: Vec<_> = stream::iter(asked).buffer_unordered(LIST_PARALLEL).collect().await;
        infos.sort_by(|a, b| a.name.cmp(&b.name));
        infos
    }

    /// Of a collection whose memory nodes do not answer, what the map says is told.
    async fn info_or_map(self: &Arc<Self>, entry: MapEntry, deadline: Instant) -> CollectionInfo {
        let info = async {
            let collection = self.collection(&entry.name, deadline).await?;
            self.info(&collection, deadline).await
        };
        info.await.unwrap_or_else(|_| self.info_of_map(&entry))
    }

    fn info_of_map(&self, entry: &MapEntry) -> CollectionInfo {
        let routes = self.fabric.routes();
        let region = |id| routes.map().region(id);
        CollectionInfo {
            name: entry.name.clone(),
            state: entry.state,
            dtype: entry.params.dtype,
            metric: entry.params.metric,
            dimension: entry.params.dim,
            m: entry.params.m,
            ef_construction: entry.params.ef_construction,
            vectors: 0,
            chunks: 0,
            upper_chunks: 0,
            level: 0,
            bytes_used: 0,
            bytes_reserved: entry
                .regions
                .iter()
                .filter_map(|(id, _)| region(*id))
                .map(|line| line.bytes)
                .sum(),
            regions: entry
                .regions
                .iter()
                .map(|(id, _)| (id.0, region(*id).map_or_else(String::new, |line| line.mn.clone())))
                .collect(),
            lost_region: routes.map().lost_region(entry).map(|id| id.0),
        }
    }

    async fn info(
        &self,
        collection: &Arc<Collection<V>>,
        deadline: Instant,
    ) -> Result<CollectionInfo, Fault> {
        let mut cost = Cost::default();
        let rooms = Rooms::read(collection, deadline, &mut cost).await?;
        let mut gather = Gather::new();
        gather.push(collection.home_at(at_home::ENTRY_POINT), 8);
        gather.push(collection.home_at(at_home::LIVE_COUNT), 8);
        collection.gather(&mut gather, deadline, &mut cost).await?;
        let entry = EntryPoint::from_word(word(gather.get(0), 0));
        let routes = self.fabric.routes();
        let line = routes.map().collections.iter().find(|entry| entry.id == collection.id());
        let line = line.ok_or_else(|| {
            Fault::new(FaultCode::NotFound, format!("collection '{}' was dropped", collection.name()))
        })?;
        let (bytes_used, bytes_reserved) = rooms.used_and_reserved();
        Ok(CollectionInfo {
            vectors: word(gather.get(1), 0),
            chunks: rooms.count(Table::Nodes),
            upper_chunks: rooms.count(Table::Upper),
            level: entry.map_or(0, |point| point.level.into()),
            bytes_used,
            bytes_reserved,
            ..self.info_of_map(line)
        })
    }

    // --------------------------------------------------------------------------------------------- loads

    async fn load_begin(
        self: &Arc<Self>,
        spec: CollectionSpec,
        source: Source,
        replace: bool,
        deadline: Instant,
    ) -> Result<CnResponse, Fault> {
        if replace {
            match self.drop_collection(spec.name.clone(), deadline).await {
                Err(fault) if fault.code != FaultCode::NotFound => return Err(fault),
                _ => {}
            }
        }
        let (fabric, catalogue) = (Arc::clone(&self.fabric), Arc::clone(&self.catalogue));
        let load = Arc::new(Load::begin(fabric, catalogue, spec, source, self.options, deadline).await?);
        match self.loading(&load) {
            Ok(answer) => Ok(answer),
            Err(fault) => {
                load.abort(deadline).await;
                Err(fault)
            }
        }
    }

    async fn load_resume(
        self: &Arc<Self>,
        spec: CollectionSpec,
        source: Source,
        deadline: Instant,
    ) -> Result<CnResponse, Fault> {
        // An old map would let a load that has ended go on.
        self.ask_for_map(deadline).await?;
        let entry = match self.entry(&spec.name, deadline).await {
            Ok(entry) => entry,
            Err(fault) if fault.code == FaultCode::NotFound => {
                return self.load_begin(spec, source, false, deadline).await;
            }
            Err(fault) => return Err(fault),
        };
        self.loads.retire(entry.id)?;
        let (fabric, catalogue) = (Arc::clone(&self.fabric), Arc::clone(&self.catalogue));
        match Load::resume(fabric, catalogue, &entry, source, self.options, deadline).await? {
            Resumed::Rest(load) => self.loading(&load),
            Resumed::Whole => Ok(CnResponse::Done),
            Resumed::Nothing => self.load_begin(spec, source, true, deadline).await,
        }
    }

    /// Enters a load; what its client is told.
    fn loading(&self, load: &Arc<Load<V>>) -> Result<CnResponse, Fault> {
        let number = self.loads.add(Arc::clone(load))?;
        let (nodes_done, upper_done) = load.done();
        Ok(CnResponse::Loading { load: number, params: load.params().clone(), nodes_done, upper_done })
    }

    /// What came of a piece. One that is wrong ends the load; after a failure of the network it may be sent again.
    async fn piece(
        &self,
        number: u64,
        outcome: Result<(), Fault>,
        deadline: Instant,
    ) -> Result<CnResponse, Fault> {
        match outcome {
            Ok(()) => Ok(CnResponse::Done),
            Err(fault) => {
                if matches!(fault.code, FaultCode::BadRequest | FaultCode::Corrupt | FaultCode::RegionLost)
                    && let Some(load) = self.loads.remove(number)
                {
                    load.abort(deadline).await;
                }
                Err(fault)
            }
        }
    }

    /// Lets go of loads that nothing came for. Called now and then.
    pub fn reap_loads(&self, now: Instant) {
        self.loads.reap(now);
    }

    // -------------------------------------------------------------------------------------------- itself

    /// The node's own state.
    pub fn status(&self) -> NodeStatus {
        let mut counters = self.counters.snapshot();
        let running = |limit: usize, semaphore: &Semaphore| (limit - semaphore.available_permits()) as u64;
        counters.push(("searches_running".into(), running(self.limits.searches_max, &self.searches)));
        counters.push(("inserts_running".into(), running(self.limits.inserts_max, &self.inserts)));
        NodeStatus {
            name: self.name.clone(),
            role: Role::Cn,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_s: self.started.elapsed().as_secs(),
            epoch: self.fabric.epoch().0,
            oracle_reachable: (self.oracle_reachable)(),
            simd: self.options.simd.to_string(),
            counters,
        }
    }

    /// Instruction set of the distance kernels.
    pub fn simd(&self) -> SimdLevel {
        self.options.simd
    }

    /// Takes no more requests, and waits by `deadline` until those that run have ended. Loads are let go, to be resumed elsewhere.
    pub async fn drain(&self, deadline: Instant) {
        self.is_draining.store(true, Ordering::Release);
        let all = async {
            for (limit, semaphore) in [
                (self.limits.searches_max, &self.searches),
                (self.limits.inserts_max, &self.inserts),
                (self.limits.controls_max, &self.controls),
            ] {
                drop(semaphore.acquire_many(limit as u32).await);
            }
        };
        if tokio::time::timeout_at(deadline.into(), all).await.is_err() {
            info!("left with requests running");
        }
        self.loads.retire_all();
    }
}
