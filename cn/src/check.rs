//! Looks at every record, list and id of a collection and says what does not fit together.
//!
//! Inserts may go on meanwhile. What looks wrong is looked at again before it is counted, so that a change under way is
//! not taken for damage. Memory is bounded: nine bytes per slot and one batch of records.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rand::RngExt as _;
use shine_common::ids::{NodeId, RegionId, RemotePtr, SessionId};
use shine_common::layout::{
    HEADER_BYTES, ListError, ListView, NodeMeta, NodeState, header, id_from_words, predecessor_from_word,
};
use shine_common::verbs::Verbs;
use shine_common::wire::{CheckReport, Fault, FaultCode};

use crate::alloc::Rooms;
use crate::collection::{Collection, Table, word};
use crate::fabric::{Gather, os_rng};
use crate::hnsw::search::ListRef;
use crate::id_table;
use crate::reader::{Reader, parse_list};

/// Lists or ids that are read at a time.
const BATCH: usize = 1024;
/// Time for each batch.
const BATCH_TIME: Duration = Duration::from_secs(10);
/// Lines in a report.
const FINDINGS_MAX: usize = 20;
/// Checks that are kept, running or with an outcome that nobody asked for yet.
const JOBS_MAX: usize = 16;

/// How far a check is.
#[derive(Debug, Default)]
pub struct Progress {
    done: AtomicU64,
    total: AtomicU64,
}

impl Progress {
    /// Records looked at, and to look at.
    pub fn get(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed))
    }
}

/// Checks a collection.
///
/// # Errors
/// If remote memory does not answer. What is wrong with its content is in the report.
pub async fn run<V: Verbs>(
    collection: &Arc<Collection<V>>,
    progress: &Progress,
) -> Result<CheckReport, Fault> {
    collection.admit_ready()?;
    let mut check = Check {
        reader: Reader::new(collection, Instant::now() + BATCH_TIME),
        collection: Arc::clone(collection),
        progress,
        metas: Vec::new(),
        is_reached: Vec::new(),
        report: CheckReport::default(),
        sessions: HashMap::new(),
    };
    check.headers_and_ids().await?;
    check.reachable().await?;
    check.unreachable().await?;
    check.upper_lists().await?;
    Ok(check.report)
}

struct Check<'a, V> {
    reader: Reader<V>,
    collection: Arc<Collection<V>>,
    progress: &'a Progress,
    /// Meta words by node, as of the first pass; 0 (state empty) where there is no chunk.
    metas: Vec<u64>,
    is_reached: Vec<bool>,
    report: CheckReport,
    /// Whether sessions are alive, by a region of their memory node.
    sessions: HashMap<(RegionId, SessionId), bool>,
}

impl<V: Verbs> Check<'_, V> {
    fn find(&mut self, what: impl FnOnce() -> String) {
        if self.report.findings.len() < FINDINGS_MAX {
            self.report.findings.push(what());
        }
    }

    fn new_batch(&mut self) {
        self.reader.deadline = Instant::now() + BATCH_TIME;
    }

    fn meta(&self, node: NodeId) -> Option<NodeMeta> {
        let word = *self.metas.get(node.0 as usize)?;
        NodeMeta::from_word(word).filter(|meta| meta.state != NodeState::Empty)
    }

    /// First pass: every header, the state counts, and whether live ids are found.
    async fn headers_and_ids(&mut self) -> Result<(), Fault> {
        let collection = Arc::clone(&self.collection);
        let slots = collection.params().slots;
        let rooms = Rooms::read(&collection, self.reader.deadline, &mut self.reader.cost).await?;
        let count = rooms.count(Table::Nodes).min(collection.params().max_chunks.into()) as u32;
        collection.read_table(Table::Nodes, count, self.reader.deadline, &mut self.reader.cost).await?;
        let total = u64::from(count) * u64::from(slots);
        self.metas = vec![0; total as usize];
        self.is_reached = vec![false; total as usize];
        self.progress.total.store(2 * total, Ordering::Relaxed);
        let mut gather = Gather::new();
        for chunk in 0..count {
            self.new_batch();
            if let Some(at) = collection.known_chunk(Table::Nodes, chunk) {
                gather.clear();
                gather.push(at, u64::from(slots) * HEADER_BYTES);
                self.reader.gather(&mut gather).await?;
                self.chunk_headers(chunk * slots, at.region(), gather.get(0)).await?;
            }
            self.progress.done.fetch_add(slots.into(), Ordering::Relaxed);
        }
        Ok(())
    }

    async fn chunk_headers(&mut self, first: u32, region: RegionId, bytes: &[u8]) -> Result<(), Fault> {
        let mut live = Vec::new();
        let mut heirs = Vec::new();
        for (i, bytes) in bytes.chunks_exact(HEADER_BYTES as usize).enumerate() {
            let node = NodeId(first + i as u32);
            let meta_word = word(bytes, header::META);
            let Some(meta) = NodeMeta::from_word(meta_word) else {
                // Counted where its list would be looked at.
                self.report.bad_lists += 1;
                self.find(|| format!("header of {node} says {meta_word:#x}"));
                continue;
            };
            self.metas[node.0 as usize] = meta_word;
            match meta.state {
                NodeState::Empty => {}
                NodeState::Dead => self.report.dead += 1,
                NodeState::Live => {
                    self.report.live += 1;
                    let words = [word(bytes, header::ID_LOW), word(bytes, header::ID_HIGH)];
                    live.push((node, id_from_words(meta.is_uuid, words)));
                }
                // Whether it is live, its predecessor says; a record that has one is finished by the next claim of its id.
                NodeState::Heir => heirs.push(node),
                NodeState::Linking if predecessor_from_word(word(bytes, header::INSERTER)).is_some() => {
                    self.report.linking += 1;
                }
                NodeState::Linking => {
                    let session = SessionId((word(bytes, header::INSERTER) >> 32) as u32);
                    let is_alive = match self.sessions.get(&(region, session)) {
                        Some(is_alive) => *is_alive,
                        None => {
                            let at = RemotePtr::new(region, 0);
                            let is_alive =
                                self.collection.is_session_alive(at, session, self.reader.deadline).await?;
                            self.sessions.insert((region, session), is_alive);
                            is_alive
                        }
                    };
                    *if is_alive { &mut self.report.linking } else { &mut self.report.abandoned } += 1;
                }
            }
        }
        let heads: Vec<_> = heirs.iter().copied().zip(self.reader.headers(&heirs).await?).collect();
        for ((node, head), is_live) in heads.iter().zip(self.reader.are_live(&heads).await?) {
            if is_live {
                self.report.live += 1;
                live.push((*node, head.id));
            } else {
                self.report.linking += 1;
            }
        }
        for batch in live.chunks(BATCH) {
            self.new_batch();
            let ids: Vec<_> = batch.iter().map(|(_, id)| *id).collect();
            let named = id_table::bulk_lookup(&mut self.reader, &ids).await?;
            for ((node, id), named) in batch.iter().zip(named) {
                let others: Vec<_> = named.iter().copied().filter(|other| other != node).collect();
                let mut twin = None;
                let mut is_named = named.contains(node);
                for (other, header) in others.iter().zip(self.reader.headers(&others).await?) {
                    // Named instead of it by a replacement that has not come to its end.
                    is_named |= header.id == *id && header.predecessor() == Some(*node);
                    if header.id == *id && header.meta.state == NodeState::Live {
                        twin = Some(*other);
                    }
                }
                if twin.is_none() && is_named {
                    continue;
                }
                // It may have been replaced since the first look.
                let head = (*node, self.reader.headers(&[*node]).await?[0]);
                if !self.reader.are_live(&[head]).await?[0] {
                    continue;
                }
                if let Some(other) = twin {
                    self.report.ids_duplicate += 1;
                    self.find(|| format!("id {id} is that of {node} and of {other}, both live"));
                }
                if !is_named {
                    self.report.ids_missing += 1;
                    self.find(|| format!("id {id} of live {node} is not in the id table"));
                }
            }
        }
        Ok(())
    }

    /// Second pass: everything that can be reached on level 0 from the entry point.
    async fn reachable(&mut self) -> Result<(), Fault> {
        self.new_batch();
        let collection = Arc::clone(&self.collection);
        let entry = collection.refresh_entry(self.reader.deadline, &mut self.reader.cost).await?;
        let Some(entry) = entry else { return Ok(()) };
        let mut frontier = Vec::new();
        match self.is_reached.get_mut(entry.point.node.0 as usize) {
            Some(is_reached) => {
                *is_reached = true;
                frontier.push(entry.point.node);
            }
            // It was inserted after the first pass; the old entry point is among its neighbours.
            None => {
                let list = ListRef { node: entry.point.node, level: 0, upper: 0 };
                if let Some(entries) = self.lists(&[list]).await?.pop().flatten() {
                    self.reach(entries.iter().map(|(node, _)| *node), &mut frontier);
                }
            }
        }
        while !frontier.is_empty() {
            let batch = frontier.split_off(frontier.len().saturating_sub(BATCH));
            for entries in self.base_lists(&batch).await?.into_iter().flatten() {
                self.reach(entries.into_iter(), &mut frontier);
            }
        }
        Ok(())
    }

    fn reach(&mut self, nodes: impl Iterator<Item = NodeId>, frontier: &mut Vec<NodeId>) {
        for node in nodes {
            if let Some(is_reached) = self.is_reached.get_mut(node.0 as usize)
                && !*is_reached
                && NodeMeta::from_word(self.metas[node.0 as usize])
                    .is_some_and(|m| m.state != NodeState::Empty)
            {
                *is_reached = true;
                frontier.push(node);
            }
        }
    }

    /// Third pass: the lists of everything else.
    async fn unreachable(&mut self) -> Result<(), Fault> {
        let mut batch = Vec::new();
        for at in 0..self.metas.len() {
            let node = NodeId(at as u32);
            if !self.is_reached[at]
                && let Some(meta) = self.meta(node)
            {
                if meta.state == NodeState::Live {
                    self.report.orphans += 1;
                    self.find(|| format!("live {node} cannot be reached on level 0"));
                }
                batch.push(node);
            } else if !self.is_reached[at] {
                self.progress.done.fetch_add(1, Ordering::Relaxed);
            }
            if batch.len() == BATCH {
                self.base_lists(&batch).await?;
                batch.clear();
            }
        }
        self.base_lists(&batch).await?;
        Ok(())
    }

    /// Reads and checks level-0 lists; where one is bad, `None`.
    async fn base_lists(&mut self, nodes: &[NodeId]) -> Result<Vec<Option<Vec<NodeId>>>, Fault> {
        let refs: Vec<_> = nodes.iter().map(|node| ListRef { node: *node, level: 0, upper: 0 }).collect();
        let lists = self.lists(&refs).await?;
        let mut checked = Vec::with_capacity(lists.len());
        for (list, entries) in refs.iter().zip(lists) {
            if let Some(entries) = &entries {
                for (other, _) in entries {
                    self.report.links += 1;
                    if self.meta(*other).is_none() && self.look_again(*other).await?.is_none() {
                        self.report.links_out_of_range += 1;
                        self.find(|| format!("{} links to {other}, which is not there", list.node));
                    }
                }
            }
            checked.push(entries.map(|entries| entries.into_iter().map(|(node, _)| node).collect()));
        }
        self.progress.done.fetch_add(nodes.len() as u64, Ordering::Relaxed);
        Ok(checked)
    }

    /// Fourth pass: lists above level 0.
    async fn upper_lists(&mut self) -> Result<(), Fault> {
        let mut refs = Vec::new();
        for at in 0..self.metas.len() {
            let node = NodeId(at as u32);
            if let Some(meta) = self.meta(node) {
                refs.extend((1..=meta.level).map(|level| ListRef { node, level, upper: meta.upper }));
            }
            if refs.len() >= BATCH || at + 1 == self.metas.len() {
                let lists = self.lists(&refs).await?;
                for (list, entries) in refs.iter().zip(lists) {
                    for (other, upper) in entries.into_iter().flatten() {
                        self.report.links += 1;
                        let is_there = |meta: Option<NodeMeta>| {
                            meta.is_some_and(|meta| meta.level >= list.level && meta.upper == upper)
                        };
                        if !is_there(self.meta(other)) && !is_there(self.look_again(other).await?) {
                            self.report.links_out_of_range += 1;
                            self.find(|| {
                                format!(
                                    "{} links on level {} to {other}, which is not there",
                                    list.node, list.level
                                )
                            });
                        }
                    }
                }
                refs.clear();
            }
        }
        Ok(())
    }

    /// What a node's header says now, if there is a record.
    async fn look_again(&mut self, node: NodeId) -> Result<Option<NodeMeta>, Fault> {
        self.new_batch();
        match self.reader.headers(&[node]).await {
            Ok(headers) => Ok(Some(headers[0].meta).filter(|meta| meta.state != NodeState::Empty)),
            Err(fault) if fault.code == FaultCode::Corrupt => Ok(None),
            Err(fault) => Err(fault),
        }
    }

    /// Reads lists; one that stays torn or was never written is counted and `None`.
    async fn lists(&mut self, refs: &[ListRef]) -> Result<Vec<Option<Vec<(NodeId, u32)>>>, Fault> {
        if refs.is_empty() {
            return Ok(Vec::new());
        }
        self.new_batch();
        let mut gather = Gather::new();
        let mut wanted = Vec::with_capacity(refs.len());
        for list in refs {
            match self.reader.want_lists(std::slice::from_ref(list), &mut gather).await {
                Ok(()) => wanted.push(true),
                Err(fault) if fault.code == FaultCode::Corrupt => {
                    wanted.push(false);
                    self.report.bad_lists += 1;
                    self.find(|| fault.message);
                }
                Err(fault) => return Err(fault),
            }
        }
        self.reader.gather(&mut gather).await?;
        let mut lists = Vec::with_capacity(refs.len());
        let mut next = 0;
        for (list, is_wanted) in refs.iter().zip(wanted) {
            if !is_wanted {
                lists.push(None);
                continue;
            }
            let first = parse_list(list.level, gather.get(next)).map(|view| entries(list.level, view));
            next += 1;
            lists.push(match first {
                Ok(entries) => Some(entries),
                Err(_) => self.one_list(list).await?,
            });
        }
        Ok(lists)
    }

    /// A list that did not parse at first, read until it does or counts as broken.
    async fn one_list(&mut self, list: &ListRef) -> Result<Option<Vec<(NodeId, u32)>>, Fault> {
        self.new_batch();
        let mut gather = Gather::new();
        match self.reader.lists(std::slice::from_ref(list), &mut gather).await {
            Ok(()) => {
                let view = parse_list(list.level, gather.get(0)).expect("checked by `lists`");
                Ok(Some(entries(list.level, view)))
            }
            Err(fault) if fault.code == FaultCode::Corrupt => {
                // The parts of a record's first write land in any order: its list may come after its header, and an
                // insert that was cut off then has none. Nothing leads to it.
                let is_written = !matches!(parse_list(list.level, gather.get(0)), Err(ListError::Unwritten));
                let state = self.look_again(list.node).await?.map(|meta| meta.state);
                if is_written || state != Some(NodeState::Linking) || self.is_reached(list.node) {
                    self.report.bad_lists += 1;
                    self.find(|| fault.message);
                }
                Ok(None)
            }
            Err(fault) => Err(fault),
        }
    }

    fn is_reached(&self, node: NodeId) -> bool {
        self.is_reached.get(node.0 as usize).copied().unwrap_or(false)
    }
}

fn entries(level: u8, view: ListView<'_>) -> Vec<(NodeId, u32)> {
    if level == 0 { view.nodes().map(|node| (node, 0)).collect() } else { view.upper_nodes().collect() }
}

// ---------------------------------------------------------------------------------------------------- jobs

/// A check that runs, or has run.
#[derive(Debug)]
struct Job {
    collection: String,
    progress: Arc<Progress>,
    outcome: Option<Result<CheckReport, Fault>>,
}

/// State of a job.
#[derive(Clone, Debug)]
pub struct JobState {
    /// Names the job.
    pub job: u64,
    /// Records looked at.
    pub done: u64,
    /// Records to look at.
    pub total: u64,
    /// The outcome, once it is there.
    pub report: Option<CheckReport>,
}

/// The checks of one compute node.
#[derive(Debug, Default)]
pub struct Jobs {
    jobs: Mutex<HashMap<u64, Job>>,
}

impl Jobs {
    /// Starts a check of `collection` in a task of its own.
    ///
    /// # Errors
    /// [`FaultCode::Overloaded`] if too many run.
    pub fn start<V: Verbs>(self: &Arc<Self>, collection: Arc<Collection<V>>) -> Result<JobState, Fault> {
        let mut jobs = self.jobs.lock();
        if jobs.len() >= JOBS_MAX {
            // Outcomes that nobody fetched make room.
            jobs.retain(|_, job| job.outcome.is_none());
        }
        if jobs.len() >= JOBS_MAX {
            return Err(Fault::new(
                FaultCode::Overloaded,
                format!("{JOBS_MAX} checks are running, which is the most"),
            ));
        }
        let number = os_rng().random_range(1..u64::MAX);
        let progress = Arc::new(Progress::default());
        jobs.insert(
            number,
            Job { collection: collection.name().to_owned(), progress: Arc::clone(&progress), outcome: None },
        );
        let this = Arc::clone(self);
        tokio::spawn(async move {
            let outcome = run(&collection, &progress).await;
            if let Some(job) = this.jobs.lock().get_mut(&number) {
                job.outcome = Some(outcome);
            }
        });
        Ok(JobState { job: number, done: 0, total: 0, report: None })
    }

    /// How far a check of `collection` is; its outcome is handed out once.
    ///
    /// # Errors
    /// [`FaultCode::NotFound`], or why the check could not go on.
    pub fn state(&self, collection: &str, number: u64) -> Result<JobState, Fault> {
        let mut jobs = self.jobs.lock();
        let job = jobs.get_mut(&number).filter(|job| job.collection == collection).ok_or_else(|| {
            Fault::new(FaultCode::NotFound, format!("no check {number} of collection '{collection}'"))
        })?;
        let (done, total) = job.progress.get();
        let outcome = job.outcome.take();
        if outcome.is_some() {
            jobs.remove(&number);
        }
        Ok(JobState { job: number, done, total, report: outcome.transpose()? })
    }
}
