//! The asynchronous driver of the search machine: one gather per round.
//!
//! Invariant: nothing that was read steers a search before it was checked: lists by their checksum, node numbers by the
//! tables, states by what this version writes.

use std::collections::{HashMap, hash_map};
use std::sync::Arc;
use std::time::{Duration, Instant};

use shine_common::ids::{ExternalId, NodeId};
use shine_common::layout::{
    HEADER_BYTES, ListError, ListView, NodeMeta, NodeState, header, id_from_words, predecessor_from_word,
};
use shine_common::verbs::Verbs;
use shine_common::wire::Fault;

use crate::collection::{Collection, Entry, corrupt, word};
use crate::fabric::{Cost, Gather, jittered};
use crate::hnsw::search::{ListRef, Search, Step};
use crate::hnsw::visited::SparseVisited;

/// Readings of one list until it counts as broken. A write takes microseconds; a reading between the halves of a
/// hundred writes in a row is a list that nobody finishes.
pub const TORN_RETRY_MAX: u32 = 100;
/// Readings that follow each other without a pause.
pub(crate) const TORN_RETRY_AT_ONCE: u32 = 4;

/// Readings of an heir until it must have named its predecessor.
const HEIR_RETRY_MAX: u32 = 4;

/// Buffers of one query or insert.
#[derive(Debug)]
pub struct Scratch {
    pub(crate) search: Search<SparseVisited>,
    pub(crate) gather: Gather,
}

impl Default for Scratch {
    fn default() -> Self {
        Self { search: Search::new(SparseVisited::new()), gather: Gather::new() }
    }
}

/// Vectors that a search has met, for who wants to compare them with each other.
#[derive(Debug, Default)]
pub(crate) struct VectorStore {
    places: HashMap<NodeId, u32>,
    vector_bytes: usize,
    bytes: Vec<u8>,
}

impl VectorStore {
    /// Keeps a vector; all have one length.
    pub(crate) fn insert(&mut self, node: NodeId, vector: &[u8]) {
        debug_assert!(
            self.bytes.is_empty() || self.vector_bytes == vector.len(),
            "all vectors have one length"
        );
        if let hash_map::Entry::Vacant(free) = self.places.entry(node) {
            self.vector_bytes = vector.len();
            free.insert((self.bytes.len() / vector.len()) as u32);
            self.bytes.extend_from_slice(vector);
        }
    }

    /// Whether the vector of `node` is kept.
    pub(crate) fn contains(&self, node: NodeId) -> bool {
        self.places.contains_key(&node)
    }

    /// The vector of `node`, if it is kept.
    pub(crate) fn get(&self, node: NodeId) -> Option<&[u8]> {
        let place = *self.places.get(&node)? as usize;
        Some(&self.bytes[place * self.vector_bytes..][..self.vector_bytes])
    }

    /// The vector of `node`.
    ///
    /// # Panics
    /// If it is not kept.
    pub(crate) fn vector(&self, node: NodeId) -> &[u8] {
        self.get(node).expect("the search has met it")
    }
}

/// A record's header without its lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// State, level, upper index.
    pub meta: NodeMeta,
    /// Holder word of the unfinished insert, or the predecessor's.
    pub inserter: u64,
    /// External id.
    pub id: ExternalId,
}

impl Header {
    /// The record that this one takes over from, if it does.
    pub(crate) fn predecessor(&self) -> Option<NodeId> {
        predecessor_from_word(self.inserter)
    }
}

/// What was read of a header: from the meta word on.
pub(crate) const HEADER_FROM: u64 = header::META;
const HEADER_READ: u64 = HEADER_BYTES - HEADER_FROM;

/// Reads records of one collection by one deadline, and books what that costs.
#[derive(Debug)]
pub struct Reader<V> {
    pub(crate) collection: Arc<Collection<V>>,
    pub(crate) deadline: Instant,
    pub(crate) cost: Cost,
}

impl<V: Verbs> Reader<V> {
    /// Nothing read yet.
    pub fn new(collection: &Arc<Collection<V>>, deadline: Instant) -> Self {
        Self { collection: Arc::clone(collection), deadline, cost: Cost::default() }
    }

    /// Reads everything in `gather`.
    pub(crate) async fn gather(&mut self, gather: &mut Gather) -> Result<(), Fault> {
        self.collection.gather(gather, self.deadline, &mut self.cost).await
    }

    /// Adds the headers of `nodes` to `gather`.
    pub(crate) async fn want_headers(&mut self, nodes: &[NodeId], gather: &mut Gather) -> Result<(), Fault> {
        for node in nodes {
            self.collection.learn(*node, self.deadline, &mut self.cost).await?;
            let (chunk, slot) = self.collection.place(*node).expect("learnt above");
            gather.push(self.collection.params().header_at(chunk, slot).add(HEADER_FROM), HEADER_READ);
        }
        Ok(())
    }

    /// The header of `node` in the bytes that [`Self::want_headers`] brought.
    pub(crate) fn header(&self, node: NodeId, bytes: &[u8]) -> Result<Header, Fault> {
        let at = |offset: u64| word(bytes, offset - HEADER_FROM);
        let meta = self.collection.decode_meta(node, at(header::META))?;
        Ok(Header {
            meta,
            inserter: at(header::INSERTER),
            id: id_from_words(meta.is_uuid, [at(header::ID_LOW), at(header::ID_HIGH)]),
        })
    }

    /// Headers of a few nodes, in their order.
    pub(crate) async fn headers(&mut self, nodes: &[NodeId]) -> Result<Vec<Header>, Fault> {
        if nodes.is_empty() {
            return Ok(Vec::new());
        }
        let mut gather = Gather::new();
        self.want_headers(nodes, &mut gather).await?;
        self.gather(&mut gather).await?;
        nodes.iter().enumerate().map(|(i, node)| self.header(*node, gather.get(i))).collect()
    }

    /// For each of `heads`, whether it is live. An heir is if its predecessor is dead: these are asked for, which costs a
    /// round while somebody replaces just these records, and none otherwise.
    pub(crate) async fn are_live(&mut self, heads: &[(NodeId, Header)]) -> Result<Vec<bool>, Fault> {
        let mut are_live: Vec<_> = heads.iter().map(|(_, head)| head.meta.state == NodeState::Live).collect();
        let is_heir = |head: &Header| head.meta.state == NodeState::Heir;
        let mut open: Vec<_> =
            (0..heads.len()).filter(|i| is_heir(&heads[*i].1)).map(|i| (i, heads[i].1)).collect();
        for _ in 0..HEIR_RETRY_MAX {
            if open.is_empty() {
                return Ok(are_live);
            }
            // A header is read in pieces: where the state is newer than the word that names the predecessor, once more.
            let wanted: Vec<_> =
                open.iter().map(|(i, head)| head.predecessor().unwrap_or(heads[*i].0)).collect();
            let mut unclear = Vec::new();
            for ((i, old), new) in open.into_iter().zip(self.headers(&wanted).await?) {
                if old.predecessor().is_some() {
                    are_live[i] = new.meta.state == NodeState::Dead;
                } else if is_heir(&new) {
                    unclear.push((i, new));
                } else {
                    are_live[i] = new.meta.state == NodeState::Live;
                }
            }
            open = unclear;
        }
        Err(corrupt(format!("collection '{}': an heir names no predecessor", self.collection.name())))
    }

    /// Adds the vectors of `nodes` to `gather`.
    pub(crate) async fn want_vectors(&mut self, nodes: &[NodeId], gather: &mut Gather) -> Result<(), Fault> {
        for node in nodes {
            self.collection.learn(*node, self.deadline, &mut self.cost).await?;
            let (chunk, slot) = self.collection.place(*node).expect("learnt above");
            let params = self.collection.params();
            gather.push(params.vector_at(chunk, slot), params.vector_bytes());
        }
        Ok(())
    }

    /// Adds lists to `gather`.
    pub(crate) async fn want_lists(&mut self, lists: &[ListRef], gather: &mut Gather) -> Result<(), Fault> {
        for list in lists {
            if list.level == 0 {
                self.collection.learn(list.node, self.deadline, &mut self.cost).await?;
                let (chunk, slot) = self.collection.place(list.node).expect("learnt above");
                let params = self.collection.params();
                gather.push(params.list_at(chunk, slot), params.list_stride());
            } else {
                let (chunk, slot) = self
                    .collection
                    .upper_place(list.node, list.upper, list.level, self.deadline, &mut self.cost)
                    .await?;
                let params = self.collection.params();
                gather.push(params.upper_at(chunk, slot), params.upper_stride());
            }
        }
        Ok(())
    }

    /// Reads `lists` into `gather` until none of them is torn. [`parse_list`] on each then succeeds.
    pub(crate) async fn lists(&mut self, lists: &[ListRef], gather: &mut Gather) -> Result<(), Fault> {
        gather.clear();
        self.want_lists(lists, gather).await?;
        for attempt in 1.. {
            self.gather(gather).await?;
            let mut torn = None;
            for (i, list) in lists.iter().enumerate() {
                match parse_list(list.level, gather.get(i)) {
                    Ok(_) => {}
                    Err(ListError::Torn) => {
                        self.cost.torn_lists += 1;
                        torn = Some(list);
                    }
                    Err(error) => return Err(self.bad_list(list, error)),
                }
            }
            let Some(list) = torn else { break };
            if attempt == TORN_RETRY_MAX {
                return Err(self.bad_list(list, ListError::Torn));
            }
            if attempt > TORN_RETRY_AT_ONCE {
                tokio::time::sleep(jittered(Duration::from_micros(50 * u64::from(attempt)))).await;
            }
        }
        Ok(())
    }

    pub(crate) fn bad_list(&self, list: &ListRef, error: ListError) -> Fault {
        corrupt(format!(
            "collection '{}': level-{} list of {}: {error}",
            self.collection.name(),
            list.level,
            list.node
        ))
    }

    /// Runs the machine, after its reset, to the end for `query`. `on_level` sees it at every finished dense level;
    /// `keep` receives every vector that is met.
    pub(crate) async fn drive(
        &mut self,
        scratch: &mut Scratch,
        query: &[u8],
        mut keep: Option<&mut VectorStore>,
        mut on_level: impl FnMut(u8, &Search<SparseVisited>) + Send,
    ) -> Result<(), Fault> {
        let Scratch { search, gather } = scratch;
        let distance = *self.collection.distance();
        loop {
            match search.step() {
                Step::Lists => {
                    self.lists(search.wanted_lists(), gather).await?;
                    for at in 0..search.wanted_lists().len() {
                        let level = search.wanted_lists()[at].level;
                        let view = parse_list(level, gather.get(at)).expect("checked by `lists`");
                        if level == 0 {
                            search.feed_list(at, view.nodes().map(|node| (node, 0)));
                        } else {
                            search.feed_list(at, view.upper_nodes());
                        }
                    }
                }
                Step::Vectors => {
                    gather.clear();
                    self.want_vectors(search.wanted_vectors(), gather).await?;
                    self.gather(gather).await?;
                    for at in 0..search.wanted_vectors().len() {
                        let vector = gather.get(at);
                        search.feed_distance(at, distance.eval(query, vector));
                        if let Some(store) = keep.as_deref_mut() {
                            store.insert(search.wanted_vectors()[at], vector);
                        }
                    }
                }
                Step::LevelDone(level) => on_level(level, search),
                Step::Done => return Ok(()),
            }
        }
    }

    /// Where searches start.
    pub(crate) async fn entry(&mut self) -> Result<Option<Entry>, Fault> {
        let collection = Arc::clone(&self.collection);
        collection.entry(self.deadline, &mut self.cost).await
    }
}

/// Checks a list of a level.
#[inline]
pub(crate) fn parse_list(level: u8, bytes: &[u8]) -> Result<ListView<'_>, ListError> {
    if level == 0 { ListView::parse_base(bytes) } else { ListView::parse_upper(bytes) }
}
