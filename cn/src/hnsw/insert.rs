//! Insertion of one vector (HNSW Alg. 1) through verbs, beside any number of others on any compute node.
//!
//! ```text
//! slot ─ write record (linking) ─ claim id ─ search all levels ─ own lists ─ neighbours' lists ─ entry point ─ live
//! ```
//!
//! An insert that may replace goes on where a live record has the id: it links its own record first, and then puts it in
//! the other's place ([`id_table`]).
//!
//! Invariant: after every step the graph is legal. A record is reachable only once it and its lists are complete; a list
//! changes under its lock, in one write with a checksum; the step to *live* is one COMPARE_SWAP, after which the insert
//! is acknowledged and before which nobody gets it as an answer. An insert that fails half-way leaves a way point that
//! is *dead*, or that the next claim of its id makes so.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use parking_lot::Mutex;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use shine_common::ids::{ExternalId, NodeId, RemotePtr};
use shine_common::layout::{
    EF_MAX, EntryPoint, HEADER_BYTES, LEVEL_MAX, ListView, NodeMeta, NodeState, collection as at_home,
    encode_base_list, encode_upper_list, header, id_words,
};
use shine_common::verbs::Verbs;
use shine_common::wire::{Fault, FaultCode, Receipt};
use tracing::{debug, warn};

use super::search::{BEAM_GROWTH, Candidate, ListRef};
use super::select;
use crate::alloc::Slot;
use crate::collection::{Collection, Entry};
use crate::fabric::{Cost, Gather, WriteSet, deadline_exceeded, os_rng};
use crate::id_table::{self, Claim, ReplaceError, Replaced};
use crate::lock::{self, Guard, HOLD_MAX, Protected};
use crate::reader::{Reader, VectorStore, parse_list};

/// Attempts on a state change whose outcome is in doubt.
const SETTLE_MAX: u32 = 4;

/// How much wider than ef_construction a beam may become to see past copies of one vector.
const COPIES_BEAM: usize = 16;
/// Copies of its own vector that a node's list takes in; more hang behind these.
const COPIES_MAX: usize = 2;
/// Attempts to be entered in lists that change meanwhile.
const SPLICE_MAX: usize = 32;

/// Time after the deadline in which the insert itself may still say what kept it.
const ANSWER_GRACE: Duration = Duration::from_millis(20);

/// Draws levels: floor(−ln U / ln m), from one stream per compute node.
#[derive(Debug)]
pub struct Levels(Mutex<ChaCha8Rng>);

impl Levels {
    /// A stream seeded by the operating system.
    pub fn from_os() -> Self {
        Self::seeded(os_rng().random())
    }

    /// A stream that can be replayed.
    pub fn seeded(seed: u64) -> Self {
        Self(Mutex::new(ChaCha8Rng::seed_from_u64(seed)))
    }

    /// The next level for a graph of `m` links per node.
    pub fn draw(&self, m: u32) -> u8 {
        // In (0, 1]: the logarithm is finite.
        let u = 1.0 - self.0.lock().random::<f64>();
        let level = -u.ln() / f64::from(m).ln();
        (level as u64).min(LEVEL_MAX.into()) as u8
    }
}

/// An acknowledged insert.
#[derive(Clone, Debug)]
pub struct Inserted {
    /// The new node.
    pub node: NodeId,
    /// The record whose place it took.
    pub replaced: Option<NodeId>,
    /// What it cost.
    pub receipt: Receipt,
}

/// What an insert does where a live record has its id.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Existing {
    /// Nothing: the insert is refused.
    Keep,
    /// Takes its place.
    Replace,
}

/// Adds `vector` under the new `id`, on a level drawn from `levels`.
///
/// The work runs in a task of its own: whoever waits for it may stop waiting, and it still comes to an end. After
/// [`FaultCode::DeadlineExceeded`] the id may become visible a little later, or never.
///
/// # Errors
/// [`FaultCode::IdExists`] if a live record has the id, [`FaultCode::BadRequest`] for a vector that does not fit,
/// [`FaultCode::RegionFull`], and whatever remote memory answers.
pub async fn insert<V: Verbs>(
    collection: &Arc<Collection<V>>,
    levels: &Levels,
    id: ExternalId,
    vector: Vec<u8>,
    deadline: Instant,
) -> Result<Inserted, Fault> {
    put(collection, levels, id, vector, Existing::Keep, deadline).await
}

/// As [`insert`], and where a live record has `id`, the new one takes its place: at every moment one of the two is live.
///
/// # Errors
/// As [`insert`], but for [`FaultCode::IdExists`].
pub async fn upsert<V: Verbs>(
    collection: &Arc<Collection<V>>,
    levels: &Levels,
    id: ExternalId,
    vector: Vec<u8>,
    deadline: Instant,
) -> Result<Inserted, Fault> {
    put(collection, levels, id, vector, Existing::Replace, deadline).await
}

async fn put<V: Verbs>(
    collection: &Arc<Collection<V>>,
    levels: &Levels,
    id: ExternalId,
    vector: Vec<u8>,
    existing: Existing,
    deadline: Instant,
) -> Result<Inserted, Fault> {
    collection.admit_ready()?;
    collection.check_vector(&vector)?;
    let level = levels.draw(collection.params().m);
    let task = tokio::spawn(Insert::new(collection, id, vector, level, deadline).run(existing));
    match tokio::time::timeout_at((deadline + ANSWER_GRACE).into(), task).await {
        Ok(Ok(result)) => result,
        Ok(Err(failure)) => {
            Err(Fault::new(FaultCode::Internal, format!("the insert of id {id} broke off: {failure}")))
        }
        Err(_) => Err(deadline_exceeded(format_args!(
            "id {id} was being inserted; whether it will be there is open"
        ))),
    }
}

struct Insert<V: Verbs> {
    collection: Arc<Collection<V>>,
    reader: Reader<V>,
    id: ExternalId,
    vector: Vec<u8>,
    level: u8,
    /// Every vector that the search has met.
    met: VectorStore,
    /// Records among them that are dead, and the one that dies when this one takes its place.
    dead: HashSet<NodeId>,
    receipt: Receipt,
}

/// A link to make: `node` shall name the new node on `level`.
#[derive(Clone, Copy, Debug)]
struct Backlink {
    level: u8,
    node: NodeId,
    upper: u32,
}

impl Backlink {
    fn list(self) -> ListRef {
        ListRef { node: self.node, level: self.level, upper: self.upper }
    }
}

impl<V: Verbs> Insert<V> {
    fn new(
        collection: &Arc<Collection<V>>,
        id: ExternalId,
        vector: Vec<u8>,
        level: u8,
        deadline: Instant,
    ) -> Self {
        Self {
            collection: Arc::clone(collection),
            reader: Reader::new(collection, deadline),
            id,
            vector,
            level,
            met: VectorStore::default(),
            dead: HashSet::new(),
            receipt: Receipt::default(),
        }
    }

    async fn run(mut self, existing: Existing) -> Result<Inserted, Fault> {
        let started = Instant::now();
        let collection = Arc::clone(&self.collection);
        let deadline = self.reader.deadline;
        let slot = collection.alloc.take(&collection, self.level, deadline, &mut self.reader.cost).await?;
        let meta = NodeMeta {
            state: NodeState::Linking,
            level: slot.level,
            is_uuid: matches!(self.id, ExternalId::Uuid(_)),
            upper: slot.upper,
        };
        // A record whose write is in doubt is not used again: its bytes may arrive late.
        self.write_record(slot, meta).await?;
        let mut is_claimed = match id_table::claim(&mut self.reader, self.id, slot.node).await {
            Ok(Claim::Won) => true,
            Ok(Claim::Exists(old)) if existing == Existing::Replace => {
                self.dead.insert(old);
                false
            }
            Ok(Claim::Exists(holder)) => {
                self.give_back(slot, meta).await;
                let message =
                    format!("collection '{}' has id {} already ({holder})", collection.name(), self.id);
                return Err(Fault::new(FaultCode::IdExists, message));
            }
            Err(fault) => return Err(self.abandon(slot, meta, fault).await),
        };
        if let Err(fault) = self.link(slot, meta).await {
            return Err(self.abandon(slot, meta, fault).await);
        }
        let mut replaced = None;
        if !is_claimed {
            match id_table::replace(&mut self.reader, self.id, slot.node, meta).await {
                Ok(Replaced::Old(old)) => replaced = Some(old),
                Ok(Replaced::Claimed) => is_claimed = true,
                Err(ReplaceError::Before(fault)) => return Err(self.abandon(slot, meta, fault).await),
                // The id may name the record already: it is left for the next claim of the id to finish.
                Err(ReplaceError::Open(fault)) => return Err(fault),
            }
        }
        if is_claimed {
            let live = NodeMeta { state: NodeState::Live, ..meta };
            match self.settle(slot.node, meta, live).await {
                Ok(true) => {}
                Ok(false) => {
                    let message = format!(
                        "the insert of id {} was paused for so long that another took the id over: try again",
                        self.id
                    );
                    return Err(Fault::new(FaultCode::Unavailable, message));
                }
                Err(fault) => return Err(self.abandon(slot, meta, fault).await),
            }
            self.tidy(slot.node).await;
        }
        let cost = self.reader.cost;
        self.receipt.rounds = cost.rounds;
        self.receipt.remote_reads = cost.reads;
        self.receipt.bytes = cost.bytes;
        self.receipt.torn_lists = cost.torn_lists;
        self.receipt.epoch = collection.fabric().epoch().0;
        self.receipt.elapsed_us = started.elapsed().as_micros() as u64;
        Ok(Inserted { node: slot.node, replaced, receipt: self.receipt })
    }

    /// Header, vector and empty lists, in one round.
    async fn write_record(&mut self, slot: Slot, meta: NodeMeta) -> Result<(), Fault> {
        let (collection, deadline) = (Arc::clone(&self.collection), self.reader.deadline);
        let params = collection.params();
        let (chunk, at) = collection.place(slot.node).expect("the chunk of a leased slot is known");
        let header_at = params.header_at(chunk, at);
        let session = collection.session_number(header_at, deadline).await?;
        let inserter = u64::from(session.0) << 32 | u64::from(collection.fabric().nonce());
        let mut set = WriteSet::new();
        set.push_with(header_at, HEADER_BYTES as usize, |out| {
            let [low, high] = id_words(self.id);
            let words = [
                (header::META, meta.to_word()),
                (header::INSERTER, inserter),
                (header::ID_LOW, low),
                (header::ID_HIGH, high),
            ];
            for (offset, word) in words {
                out[offset as usize..][..8].copy_from_slice(&word.to_le_bytes());
            }
        });
        set.push_with(params.vector_at(chunk, at), params.vector_stride() as usize, |out| {
            out[..self.vector.len()].copy_from_slice(&self.vector);
        });
        set.push_with(params.list_at(chunk, at), params.list_stride() as usize, |out| {
            encode_base_list(out, 0, &[])
        });
        for level in 1..=slot.level {
            let at = self.upper_list_at(slot, level).await?;
            set.push_with(at, params.upper_stride() as usize, |out| encode_upper_list(out, 0, &[]));
        }
        collection.write(&set, deadline, &mut self.reader.cost).await
    }

    async fn upper_list_at(&mut self, slot: Slot, level: u8) -> Result<RemotePtr, Fault> {
        let (collection, deadline) = (Arc::clone(&self.collection), self.reader.deadline);
        let (chunk, at) =
            collection.upper_place(slot.node, slot.upper, level, deadline, &mut self.reader.cost).await?;
        Ok(collection.params().upper_at(chunk, at))
    }

    /// Searches, links both ways and moves the entry point up if the new node is the highest.
    async fn link(&mut self, slot: Slot, meta: NodeMeta) -> Result<(), Fault> {
        let collection = Arc::clone(&self.collection);
        let deadline = self.reader.deadline;
        let own = Entry { point: EntryPoint { node: slot.node, level: slot.level }, upper: meta.upper };
        let mut entry = self.reader.entry().await?;
        if entry.is_none() {
            entry = collection.refresh_entry(deadline, &mut self.reader.cost).await?;
        }
        let entry = match entry {
            Some(entry) => entry,
            None => {
                let at = collection.home_at(at_home::ENTRY_POINT);
                let as_of = Instant::now();
                let word = own.point.to_word();
                if collection.compare_swap(at, 0, word, deadline, &mut self.reader.cost).await? == 0 {
                    collection.set_entry(own, as_of);
                    return Ok(());
                }
                let entry = collection.refresh_entry(deadline, &mut self.reader.cost).await?;
                entry.expect("an entry point never goes away")
            }
        };
        let (entry, levels, alone) = self.search(slot, entry).await?;
        let backlinks = self.choose(slot, &levels).await?;
        self.link_back(slot, meta.upper, &backlinks).await?;
        if let Some(mut guard) = alone {
            if slot.level > entry.point.level {
                let at = collection.home_at(at_home::ENTRY_POINT);
                let as_of = Instant::now();
                let (old, new) = (entry.point.to_word(), own.point.to_word());
                let was = guard.compare_swap(at, old, new, &mut self.reader.cost).await?;
                if was != old {
                    let message = format!("the entry point changed to {was:#x} under its lock");
                    return Err(Fault::new(FaultCode::Internal, message));
                }
                collection.set_entry(own, as_of);
            }
            guard.release(&mut self.reader.cost).await?;
        }
        Ok(())
    }

    /// Searches all levels of the new node. Two kinds of inserts go one after another, under the entry point's lock
    /// until they are linked: nodes higher than the graph, which would miss each other on the levels between, and those
    /// that find fewer than m others, since a graph that begins with nodes that never saw each other stays badly
    /// connected there.
    async fn search(
        &mut self,
        slot: Slot,
        mut entry: Entry,
    ) -> Result<(Entry, Vec<(u8, Vec<Candidate>)>, Option<Guard<V>>), Fault> {
        let collection = Arc::clone(&self.collection);
        let params = collection.params();
        let (m, mut ef) = (params.m as usize, params.ef_construction as usize);
        let mut alone: Option<Guard<V>> = None;
        let mut few = false;
        loop {
            if alone.is_none() && (few || slot.level > entry.point.level) {
                let at = collection.home_at(at_home::ENTRY_LOCK);
                let what = Protected::EntryPoint;
                let guard =
                    lock::acquire(&collection, at, what, self.reader.deadline, &mut self.reader.cost).await?;
                let fresh = collection.refresh_entry(self.reader.deadline, &mut self.reader.cost).await?;
                entry = fresh.expect("an entry point never goes away");
                if few || slot.level > entry.point.level {
                    alone = Some(guard);
                } else {
                    guard.release(&mut self.reader.cost).await?;
                }
            }
            let mut levels: Vec<(u8, Vec<Candidate>)> = Vec::new();
            let mut scratch = collection.scratch();
            scratch.search.reset(entry.point, entry.upper, ef, slot.level);
            self.reader
                .drive(&mut scratch, &self.vector, Some(&mut self.met), |level, search| {
                    levels.push((level, search.results().to_vec()));
                })
                .await?;
            let stats = scratch.search.stats();
            self.receipt.hops += stats.hops;
            self.receipt.distances += stats.distances;
            drop(scratch);
            self.find_dead(&levels).await?;
            let live = |found: &[Candidate]| found.iter().filter(|c| !self.dead.contains(&c.node())).count();
            // A full beam may be crowded by dead ones, or by copies of one vector, which are all at one distance and lead
            // nowhere else: a wider one sees past them. A copy itself just joins them.
            let is_crowded = |found: &[Candidate]| {
                let distances = || found.chunk_by(|a, b| a.distance() == b.distance()).count();
                let is_crowd = ef < COPIES_BEAM * params.ef_construction as usize
                    && distances() < m
                    && !found.iter().any(|candidate| self.is_copy(candidate.node()));
                found.len() >= ef && (live(found) < m || is_crowd)
            };
            let beam_max = EF_MAX as usize;
            if ef < beam_max && levels.iter().any(|(_, found)| is_crowded(found)) {
                ef = (ef * BEAM_GROWTH).min(beam_max);
                continue;
            }
            few = levels.last().is_none_or(|(_, found)| live(found) < m);
            if alone.is_some() || !few {
                return Ok((entry, levels, alone));
            }
        }
    }

    /// Learns which of the records found are dead. They lead a search on, but a new node that is linked to them alone is
    /// lost with them, and every link to one is missing to a live record.
    async fn find_dead(&mut self, levels: &[(u8, Vec<Candidate>)]) -> Result<(), Fault> {
        let found = levels.iter().flat_map(|(_, found)| found.iter().map(Candidate::node));
        let mut nodes: Vec<_> = found.filter(|node| !self.dead.contains(node)).collect();
        nodes.sort_unstable();
        nodes.dedup();
        let heads = self.reader.headers(&nodes).await?;
        let heads = nodes.into_iter().zip(heads);
        self.dead.extend(heads.filter(|(_, head)| head.meta.state == NodeState::Dead).map(|(node, _)| node));
        Ok(())
    }

    /// The live ones of `found`, nearest first, and of those with the same vector the first. Where they are too few, dead
    /// ones are among them, nearest first, so that the new node is linked at all; too few are all taken, so these do not
    /// crowd out any.
    fn candidates(&self, found: &[Candidate]) -> Vec<Candidate> {
        let (dead, mut candidates): (Vec<_>, Vec<_>) =
            found.iter().copied().partition(|candidate| self.dead.contains(&candidate.node()));
        let mut copies = 0;
        candidates.retain(|candidate| {
            let is_copy = self.is_copy(candidate.node());
            copies += u32::from(is_copy);
            !is_copy || copies == 1
        });
        let missing = (self.collection.params().m as usize - 1).saturating_sub(candidates.len());
        candidates.extend(dead.into_iter().take(missing));
        candidates.sort_unstable();
        candidates
    }

    /// Whether it is known to have the very same vector.
    fn is_copy(&self, node: NodeId) -> bool {
        self.met.get(node).is_some_and(|vector| vector == self.vector)
    }

    /// Chooses the neighbours on every level and writes the new node's own lists. Nobody can reach them yet, so they need
    /// no lock.
    async fn choose(&mut self, slot: Slot, levels: &[(u8, Vec<Candidate>)]) -> Result<Vec<Backlink>, Fault> {
        let collection = Arc::clone(&self.collection);
        let params = collection.params();
        let mut backlinks = Vec::new();
        let mut set = WriteSet::new();
        let mut chosen = Vec::new();
        for (level, found) in levels {
            let level = *level;
            let candidates = self.candidates(found);
            let met = &self.met;
            let pair = |a, b| collection.distance().eval(met.vector(a), met.vector(b));
            select::heuristic(&candidates, params.m as usize, 0, pair, &mut chosen);
            if level == 0 {
                let (chunk, at) = collection.place(slot.node).expect("the chunk of a leased slot is known");
                let nodes: Vec<_> = chosen.iter().map(Candidate::node).collect();
                set.push_with(params.list_at(chunk, at), params.list_stride() as usize, |out| {
                    encode_base_list(out, 1, &nodes);
                });
            } else {
                let at = self.upper_list_at(slot, level).await?;
                let nodes: Vec<_> = chosen.iter().map(|c| (c.node(), c.upper())).collect();
                set.push_with(at, params.upper_stride() as usize, |out| encode_upper_list(out, 1, &nodes));
            }
            backlinks.extend(chosen.iter().map(|c| Backlink { level, node: c.node(), upper: c.upper() }));
        }
        collection.write(&set, self.reader.deadline, &mut self.reader.cost).await?;
        Ok(backlinks)
    }

    /// Enters the new node into its neighbours' lists, all beside each other; each holds one lock at a time.
    async fn link_back(&mut self, slot: Slot, upper: u32, backlinks: &[Backlink]) -> Result<(), Fault> {
        self.prefetch(backlinks).await?;
        let this = &*self;
        let mut updates: FuturesUnordered<_> =
            backlinks.iter().map(|link| this.add_to_list(*link, slot.node, upper)).collect();
        let mut sum = Cost::default();
        let mut rounds = 0;
        let mut failed = None;
        let mut is_reached = false;
        // All are waited for, also where one fails: a lock that is let go in the middle of a write costs the session.
        while let Some(outcome) = updates.next().await {
            match outcome {
                Ok((cost, is_in)) => {
                    is_reached |= is_in;
                    // They run beside each other: the longest counts.
                    rounds = rounds.max(cost.rounds);
                    sum.merge(Cost { rounds: 0, ..cost });
                }
                Err(fault) => failed = failed.or(Some(fault)),
            }
        }
        drop(updates);
        self.reader.cost.merge(Cost { rounds, ..sum });
        if let Some(fault) = failed {
            return Err(fault);
        }
        if is_reached { Ok(()) } else { self.splice(slot.node, backlinks).await }
    }

    /// Puts the new node, which no list on level 0 took in, in the place of another one in a neighbour's list, and that one
    /// behind the new node: so it is reached, and nothing that was reached is lost. Equal vectors come to hang behind the
    /// first of them in this way, like beads, rather than to fill each other's lists until these lead nowhere else.
    async fn splice(&mut self, node: NodeId, backlinks: &[Backlink]) -> Result<(), Fault> {
        let own = Backlink { level: 0, node, upper: 0 };
        // One after another, since those that are equal to it are asked by everybody.
        for neighbour in backlinks.iter().filter(|link| link.level == 0).cycle().take(SPLICE_MAX) {
            let mut reader = Reader::new(&self.collection, self.reader.deadline);
            let spliced = self.splice_into(&mut reader, own, *neighbour).await;
            self.reader.cost.merge(reader.cost);
            if spliced? {
                return Ok(());
            }
        }
        debug!(%node, "its neighbours' lists change faster than they can be entered");
        Ok(())
    }

    /// One try; `false` if the neighbour's list changed meanwhile, or there is no room for what ends it. One lock at a
    /// time is held.
    async fn splice_into(
        &self,
        reader: &mut Reader<V>,
        own: Backlink,
        neighbour: Backlink,
    ) -> Result<bool, Fault> {
        let room = self.room(0);
        let mut gather = Gather::new();
        reader.lists(&[neighbour.list()], &mut gather).await?;
        let view = parse_list(0, gather.get(0)).expect("checked by `lists`");
        let seen = entries(0, view);
        // Preferably a copy; where lists have room, nobody has to give way.
        let of_copy = seen.iter().rfind(|(other, _)| self.is_copy(*other));
        let is_copy = self.is_copy(neighbour.node);
        let gives_way = of_copy.filter(|_| is_copy).or(seen.last().filter(|_| seen.len() >= room)).copied();
        if let Some(last) = gives_way {
            let mut list = self.lock_list(reader, own).await?;
            let is_there = last.0 == own.node || list.entries.contains(&last);
            if is_there || list.entries.len() >= room {
                list.guard.release(&mut reader.cost).await?;
                if !is_there {
                    return Ok(false);
                }
            } else {
                list.entries.push(last);
                list.store(reader).await?;
            }
        }
        let mut list = self.lock_list(reader, neighbour).await?;
        if list.entries.iter().any(|(other, _)| *other == own.node) {
            list.guard.release(&mut reader.cost).await?;
            return Ok(true);
        }
        let place = match gives_way {
            Some(other) => list.entries.iter().position(|entry| *entry == other),
            None => (list.entries.len() < room).then_some(list.entries.len()),
        };
        let Some(place) = place else {
            list.guard.release(&mut reader.cost).await?;
            return Ok(false);
        };
        if place == list.entries.len() {
            list.entries.push((own.node, 0));
        } else {
            list.entries[place] = (own.node, 0);
        }
        list.store(reader).await?;
        Ok(true)
    }

    /// Reads the neighbours' lists, and of the full ones the vectors that the search has not met: what choosing again
    /// needs is then at hand before any lock is taken.
    async fn prefetch(&mut self, backlinks: &[Backlink]) -> Result<(), Fault> {
        let refs: Vec<_> = backlinks.iter().map(|link| link.list()).collect();
        if refs.is_empty() {
            return Ok(());
        }
        let mut gather = Gather::new();
        self.reader.lists(&refs, &mut gather).await?;
        let mut missing = Vec::new();
        for (i, list) in refs.iter().enumerate() {
            let view = parse_list(list.level, gather.get(i)).expect("checked by `lists`");
            let entries = entries(list.level, view);
            if entries.len() >= self.room(list.level) {
                missing
                    .extend(entries.iter().map(|(node, _)| *node).filter(|node| !self.met.contains(*node)));
            }
        }
        missing.sort_unstable();
        missing.dedup();
        fetch_vectors(&mut self.reader, &missing, &mut self.met).await
    }

    fn room(&self, level: u8) -> usize {
        let params = self.collection.params();
        (if level == 0 { params.m0 } else { params.m }) as usize
    }

    /// Takes a list's lock and reads it.
    async fn lock_list(&self, reader: &mut Reader<V>, link: Backlink) -> Result<LockedList<V>, Fault> {
        let collection = &self.collection;
        let params = collection.params();
        let deadline = reader.deadline;
        let (lock_at, at, stride) = if link.level == 0 {
            collection.learn(link.node, deadline, &mut reader.cost).await?;
            let (chunk, at) = collection.place(link.node).expect("learnt above");
            (params.header_at(chunk, at).add(header::LOCK), params.list_at(chunk, at), params.list_stride())
        } else {
            let (chunk, at) =
                collection.upper_place(link.node, link.upper, link.level, deadline, &mut reader.cost).await?;
            (params.upper_lock_at(chunk, at), params.upper_at(chunk, at), params.upper_stride())
        };
        let what = Protected::List(link.list());
        let mut guard = lock::acquire(collection, lock_at, what, deadline, &mut reader.cost).await?;
        let mut gather = Gather::new();
        gather.push(at, stride);
        guard.gather(&mut gather, &mut reader.cost).await?;
        let view =
            parse_list(link.level, gather.get(0)).map_err(|error| reader.bad_list(&link.list(), error))?;
        let (version, entries) = (view.version(), entries(link.level, view));
        Ok(LockedList { guard, level: link.level, at, stride, version, entries })
    }

    /// Adds the new node to one list, under its lock; chooses anew among all if the list is full. Whether it is on level
    /// 0 and names the new node now.
    async fn add_to_list(&self, link: Backlink, node: NodeId, upper: u32) -> Result<(Cost, bool), Fault> {
        let collection = &self.collection;
        let mut reader = Reader::new(collection, self.reader.deadline);
        let mut list = self.lock_list(&mut reader, link).await?;
        let entries = &mut list.entries;
        if entries.iter().any(|(other, _)| *other == node) {
            list.guard.release(&mut reader.cost).await?;
            return Ok((reader.cost, link.level == 0));
        }
        // A full list of copies would let go of one, and of all that hang behind it.
        let beads = entries.iter().filter(|(other, _)| self.is_copy(*other)).count();
        let is_closed = beads >= COPIES_MAX || entries.len() >= self.room(link.level);
        if link.level == 0 && is_closed && self.is_copy(link.node) {
            list.guard.release(&mut reader.cost).await?;
            return Ok((reader.cost, false));
        }
        entries.push((node, upper));
        let room = self.room(link.level);
        if entries.len() > room {
            // Dead ones make room first.
            entries.retain(|(other, _)| !self.dead.contains(other));
        }
        if entries.len() > room {
            // What the list gained since the prefetch.
            let missing: Vec<_> = entries
                .iter()
                .map(|(other, _)| *other)
                .filter(|other| *other != node && !self.met.contains(*other))
                .collect();
            let mut late = VectorStore::default();
            fetch_vectors(&mut reader, &missing, &mut late).await?;
            let vector = |of: NodeId| {
                if of == node {
                    self.vector.as_slice()
                } else {
                    self.met.get(of).unwrap_or_else(|| late.vector(of))
                }
            };
            let distance = collection.distance();
            let base = vector(link.node);
            let mut candidates: Vec<_> = entries
                .iter()
                .map(|(other, upper)| Candidate::new(distance.eval(base, vector(*other)), *other, *upper))
                .collect();
            candidates.sort_unstable();
            candidates.dedup();
            let mut chosen = Vec::with_capacity(room);
            let pair = |a, b| distance.eval(vector(a), vector(b));
            let at_least = select::kept_at_least(link.level, room);
            select::heuristic(&candidates, room, at_least, pair, &mut chosen);
            entries.clear();
            entries.extend(chosen.iter().map(|c| (c.node(), c.upper())));
        }
        let is_in = link.level == 0 && entries.iter().any(|(other, _)| *other == node);
        list.store(&mut reader).await?;
        Ok((reader.cost, is_in))
    }

    /// Changes the state of the new node, also where the first answer is lost; whether it is now `new`.
    async fn settle(&mut self, node: NodeId, old: NodeMeta, new: NodeMeta) -> Result<bool, Fault> {
        let mut failed = None;
        for _ in 0..SETTLE_MAX {
            let deadline = Instant::now() + HOLD_MAX;
            let (chunk, slot) = self.collection.place(node).expect("the chunk of a leased slot is known");
            let at = self.collection.params().header_at(chunk, slot).add(header::META);
            let (old, new) = (old.to_word(), new.to_word());
            match self.collection.compare_swap(at, old, new, deadline, &mut self.reader.cost).await {
                // Nobody else writes `new` there, so that it is there already means that an earlier try has done it.
                Ok(was) => return Ok(was == old || was == new),
                Err(fault) => failed = Some(fault),
            }
        }
        Err(failed.expect("there was a try"))
    }

    /// After the fact: the count of live vectors, and the inserter's word. Neither is waited for longer than the
    /// deadline, and neither decides anything.
    async fn tidy(&mut self, node: NodeId) {
        let collection = &self.collection;
        let deadline = self.reader.deadline;
        let (chunk, slot) = collection.place(node).expect("the chunk of a leased slot is known");
        let mut set = WriteSet::new();
        set.push_word(collection.params().header_at(chunk, slot).add(header::INSERTER), 0);
        let (mut a, mut b) = (Cost::default(), Cost::default());
        let count = collection.fetch_add(collection.home_at(at_home::LIVE_COUNT), 1, deadline, &mut a);
        let clear = collection.write(&set, deadline, &mut b);
        let (count, clear) = futures_util::join!(count, clear);
        for fault in [count.err(), clear.err()].into_iter().flatten() {
            debug!(%node, %fault, "after an insert");
        }
        self.reader.cost.merge(Cost { rounds: a.rounds.max(b.rounds), ..a });
        self.reader.cost.merge(Cost { rounds: 0, ..b });
    }

    /// The loser of a claim was never linked and no id names it: its slot can be filled again.
    async fn give_back(&mut self, slot: Slot, meta: NodeMeta) {
        let empty = NodeMeta { state: NodeState::Empty, ..meta };
        match self.settle(slot.node, meta, empty).await {
            Ok(true) => self.collection.alloc.give_back(slot),
            result => debug!(node = %slot.node, ?result, "the slot of a refused insert is lost"),
        }
    }

    /// Makes a record dead that may be linked or named by its id, so that it is never an answer and its id is free.
    async fn abandon(&mut self, slot: Slot, meta: NodeMeta, fault: Fault) -> Fault {
        let dead = NodeMeta { state: NodeState::Dead, ..meta };
        if let Err(second) = self.settle(slot.node, meta, dead).await {
            warn!(node = %slot.node, %fault, %second, "an insert was left unfinished");
            // The id stays taken while the session lives that the record names.
            let (chunk, at) = self.collection.place(slot.node).expect("the chunk of a leased slot is known");
            let header_at = self.collection.params().header_at(chunk, at);
            self.collection.discard_session(header_at, "an insert was left unfinished").await;
        }
        fault
    }
}

/// A list whose lock is held.
struct LockedList<V: Verbs> {
    guard: Guard<V>,
    level: u8,
    at: RemotePtr,
    stride: u64,
    version: u16,
    entries: Vec<(NodeId, u32)>,
}

impl<V: Verbs> LockedList<V> {
    /// Writes the entries and releases the lock.
    async fn store(mut self, reader: &mut Reader<V>) -> Result<(), Fault> {
        let mut set = WriteSet::new();
        set.push_with(self.at, self.stride as usize, |out| {
            let version = self.version.wrapping_add(1);
            if self.level == 0 {
                let nodes: Vec<_> = self.entries.iter().map(|(node, _)| *node).collect();
                encode_base_list(out, version, &nodes);
            } else {
                encode_upper_list(out, version, &self.entries);
            }
        });
        self.guard.write(&set, &mut reader.cost).await?;
        self.guard.release(&mut reader.cost).await
    }
}

fn entries(level: u8, view: ListView<'_>) -> Vec<(NodeId, u32)> {
    if level == 0 { view.nodes().map(|node| (node, 0)).collect() } else { view.upper_nodes().collect() }
}

async fn fetch_vectors<V: Verbs>(
    reader: &mut Reader<V>,
    nodes: &[NodeId],
    into: &mut VectorStore,
) -> Result<(), Fault> {
    if nodes.is_empty() {
        return Ok(());
    }
    let mut gather = Gather::new();
    reader.want_vectors(nodes, &mut gather).await?;
    reader.gather(&mut gather).await?;
    for (i, node) in nodes.iter().enumerate() {
        into.insert(*node, gather.get(i));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_geometric_and_bounded() {
        let levels = Levels::seeded(1);
        let mut counts = [0u32; LEVEL_MAX as usize + 1];
        for _ in 0..160_000 {
            counts[usize::from(levels.draw(16))] += 1;
        }
        // 1/16 of the nodes are above level 0, 1/256 above level 1: within five standard deviations.
        let above = |level: usize| counts[level + 1..].iter().sum::<u32>() as f64;
        assert!((above(0) - 10_000.0).abs() < 5.0 * 97.0, "{counts:?}");
        assert!((above(1) - 625.0).abs() < 5.0 * 25.0, "{counts:?}");
    }
}
