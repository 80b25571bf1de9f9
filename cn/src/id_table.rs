//! External ids: a hash table in remote memory whose slots name records.
//!
//! ```text
//! id ─ hash ─▶ bucket (lock, 14 slots) ─ next ─▶ overflow bucket ─▶ …      slot = state, fingerprint, NodeId
//! ```
//!
//! A claim is made under the lock of the first bucket and takes effect with one COMPARE_SWAP of one slot; look-ups take
//! no lock. The slot names a record; whether the id is taken is for the record to say: *live*, or *linking* by an insert
//! whose session the record's memory node calls alive.
//!
//! A record is replaced by another one of the same id in steps, each one COMPARE_SWAP that anybody may repeat:
//!
//! ```text
//!            old      slot     new       a look-up finds
//!            live     ─▶ old   linking   old
//!   slot     live     ─▶ new   linking   new, whose predecessor is live: old
//!   heir     live     ─▶ new   heir      new, whose predecessor is live: old
//!   commit   dead     ─▶ new   heir      new, whose predecessor is dead: new
//!   done     dead     ─▶ new   live      new
//! ```
//!
//! So the old record's death is the moment at which the new one takes over, for look-ups and for searches alike. From
//! the first step on a replacement only goes forward: whoever claims the id next finishes it.
//!
//! Invariant: of all records with one id at most one is ever live. Two claims of one id meet in the bucket's lock; a
//! record whose slot was taken over was made *dead* before, by COMPARE_SWAP, so that it can never become live. A record
//! is an heir only after the slot went from its predecessor to it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shine_common::ids::{ExternalId, NodeId, RemotePtr, SessionId};
use shine_common::layout::{
    ID_BUCKET_BYTES, ID_BUCKET_SLOTS, ID_CHAIN_MAX, IdSlot, IdState, NodeMeta, NodeState, header, id_hash,
    predecessor_word,
};
use shine_common::verbs::Verbs;
use shine_common::wire::{Fault, FaultCode};
use tracing::{info, warn};

use crate::alloc::Rooms;
use crate::collection::{Collection, corrupt, word};
use crate::fabric::{Cost, Gather, WriteSet, deadline_exceeded, jittered};
use crate::lock::{self, Guard, Protected};
use crate::reader::{Header, Reader};

/// Offset of the pointer to the next bucket.
const NEXT: u64 = 8;
/// Offset of the first slot.
const SLOTS: u64 = 16;
/// Repetitions of a look-up whose slot was renamed under it.
const LOOKUP_RETRY_MAX: u32 = 16;
/// First and longest pause while an insert of the same id is under way.
const PAUSE: (Duration, Duration) = (Duration::from_micros(200), Duration::from_millis(10));
/// Attempts on a step of a replacement whose outcome is in doubt.
const STEP_MAX: u32 = 4;

/// A slot and where it lies.
#[derive(Clone, Copy, Debug)]
struct Found {
    at: RemotePtr,
    word: u64,
    slot: IdSlot,
}

/// The buckets behind one hash value.
#[derive(Debug)]
struct Chain {
    buckets: Vec<(RemotePtr, [u8; ID_BUCKET_BYTES as usize])>,
}

impl Chain {
    fn slots(&self) -> impl Iterator<Item = Result<Found, Fault>> + '_ {
        self.buckets.iter().flat_map(|(bucket, bytes)| {
            (0..ID_BUCKET_SLOTS as u64).map(|i| {
                let at = bucket.add(SLOTS + 8 * i);
                let word = word(bytes, SLOTS + 8 * i);
                let slot = IdSlot::from_word(word)
                    .ok_or_else(|| corrupt(format!("id slot at {at} says {word:#x}")))?;
                Ok(Found { at, word, slot })
            })
        })
    }

    /// Slots that may name the record of an id.
    fn matches(&self, fingerprint: u32) -> Result<Vec<Found>, Fault> {
        let is_match =
            |found: &Found| found.slot.state == IdState::Claimed && found.slot.fingerprint == fingerprint;
        self.slots().filter(|found| found.as_ref().map_or(true, is_match)).collect()
    }

    fn first_free(&self) -> Option<Found> {
        self.slots().flatten().find(|found| found.slot.state != IdState::Claimed)
    }
}

fn bucket_of<V: Verbs>(collection: &Collection<V>, id: ExternalId) -> (RemotePtr, u32) {
    let (bucket, fingerprint) = id_hash(id, collection.params().id_buckets);
    (bucket_at(collection, bucket), fingerprint)
}

fn bucket_at<V: Verbs>(collection: &Collection<V>, bucket: u64) -> RemotePtr {
    let (index, offset) = collection.params().id_bucket_at(bucket);
    RemotePtr::new(collection.regions()[usize::from(index)], offset)
}

/// Checks a pointer to an overflow bucket.
fn check_next<V: Verbs>(collection: &Collection<V>, at: RemotePtr) -> Result<(), Fault> {
    let routes = collection.admit()?;
    let index = collection.regions().iter().position(|region| *region == at.region());
    let fits = |index: usize| {
        let bytes = routes.region(at.region()).map_or(0, |route| route.entry.bytes);
        at.offset().is_multiple_of(64)
            && at.offset() >= collection.params().first_free(index)
            && at.offset() + ID_BUCKET_BYTES <= bytes
    };
    if index.is_some_and(fits) {
        return Ok(());
    }
    Err(corrupt(format!("collection '{}': an id bucket points to {at}", collection.name())))
}

/// Reads a bucket and all behind it. Each word is whole; together they are as of no one moment.
async fn read_chain<V: Verbs>(
    collection: &Collection<V>,
    first: RemotePtr,
    deadline: Instant,
    cost: &mut Cost,
) -> Result<Chain, Fault> {
    let mut chain = Chain { buckets: Vec::with_capacity(1) };
    let mut at = first;
    let mut gather = Gather::new();
    while !at.is_null() {
        if chain.buckets.len() == ID_CHAIN_MAX {
            return Err(chain_too_long(collection, first));
        }
        gather.clear();
        gather.push(at, ID_BUCKET_BYTES);
        collection.gather(&mut gather, deadline, cost).await?;
        let bytes: [u8; ID_BUCKET_BYTES as usize] = gather.get(0).try_into().expect("a bucket was read");
        let next = RemotePtr::from_word(word(&bytes, NEXT));
        if !next.is_null() {
            check_next(collection, next)?;
        }
        chain.buckets.push((at, bytes));
        at = next;
    }
    Ok(chain)
}

fn chain_too_long<V: Verbs>(collection: &Collection<V>, first: RemotePtr) -> Fault {
    Fault::new(
        FaultCode::RegionFull,
        format!(
            "collection '{}': the chain of id buckets at {first} has {ID_CHAIN_MAX}, which is the most: the collection \
             was made for far fewer rows",
            collection.name()
        ),
    )
}

/// The live record under `id`, and its level.
pub(crate) async fn lookup<V: Verbs>(
    reader: &mut Reader<V>,
    id: ExternalId,
) -> Result<Option<(NodeId, u8)>, Fault> {
    let collection = Arc::clone(&reader.collection);
    let (bucket, fingerprint) = bucket_of(&collection, id);
    // Slots whose records were all found not to be live.
    let mut seen: Option<Vec<u64>> = None;
    for _ in 0..LOOKUP_RETRY_MAX {
        let chain = read_chain(&collection, bucket, reader.deadline, &mut reader.cost).await?;
        let found = chain.matches(fingerprint)?;
        // None of them live: so it is, unless a slot was renamed before its record was looked at. The same slots
        // afterwards mean that none was.
        let words: Vec<_> = found.iter().map(|found| found.word).collect();
        if words.is_empty() || seen.as_ref() == Some(&words) {
            return Ok(None);
        }
        let nodes: Vec<_> = found.iter().map(|found| found.slot.node).collect();
        let mut is_clear = true;
        for (node, header) in nodes.iter().zip(reader.headers(&nodes).await?) {
            if header.id != id {
                continue;
            }
            match holder(reader, *node, header).await? {
                Holder::Is(node, level) => return Ok(Some((node, level))),
                Holder::Nobody => {}
                Holder::Unclear => is_clear = false,
            }
        }
        seen = is_clear.then_some(words);
    }
    Err(Fault::new(FaultCode::Overloaded, format!("id {id} changes hands faster than it can be read")))
}

enum Holder {
    Is(NodeId, u8),
    Nobody,
    /// The record changed while it was being looked at.
    Unclear,
}

/// Which record is live where a slot names `node`: this one, or the one that it is to replace.
async fn holder<V: Verbs>(reader: &mut Reader<V>, node: NodeId, header: Header) -> Result<Holder, Fault> {
    let state = header.meta.state;
    if state == NodeState::Live {
        return Ok(Holder::Is(node, header.meta.level));
    }
    let Some(predecessor) = header.predecessor() else {
        // A header is read in pieces: an heir's older word may still have been there.
        return Ok(if state == NodeState::Heir { Holder::Unclear } else { Holder::Nobody });
    };
    let before = reader.headers(&[predecessor]).await?[0];
    Ok(match (before.meta.state, state) {
        (NodeState::Live, _) => Holder::Is(predecessor, before.meta.level),
        (_, NodeState::Heir) => Holder::Is(node, header.meta.level),
        // It has become an heir meanwhile.
        (_, NodeState::Linking) => Holder::Unclear,
        _ => Holder::Nobody,
    })
}

/// What came of a claim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Claim {
    /// The id now names the record.
    Won,
    /// A live record has it.
    Exists(NodeId),
}

/// Claims `id` for `node`, whose record is written and in state *linking*.
pub(crate) async fn claim<V: Verbs>(
    reader: &mut Reader<V>,
    id: ExternalId,
    node: NodeId,
) -> Result<Claim, Fault> {
    let collection = Arc::clone(&reader.collection);
    let (bucket, fingerprint) = bucket_of(&collection, id);
    let own = IdSlot { state: IdState::Claimed, fingerprint, node }.to_word();
    let mut pause = PAUSE.0;
    loop {
        let deadline = reader.deadline;
        let mut guard =
            lock::acquire(&collection, bucket, Protected::Id(id), deadline, &mut reader.cost).await?;
        let outcome = claim_locked(reader, &mut guard, bucket, id, fingerprint, own).await;
        match outcome {
            Ok(Outcome::Exists(node, _)) => {
                guard.release(&mut reader.cost).await?;
                return Ok(Claim::Exists(node));
            }
            Ok(Outcome::Won) => {
                // A slot on the lock's own memory node was written under its fence; elsewhere the lock must still have
                // been held afterwards, which the release finds out.
                guard.release(&mut reader.cost).await?;
                return Ok(Claim::Won);
            }
            Ok(Outcome::Busy) => guard.release(&mut reader.cost).await?,
            // The guard releases as it is dropped.
            Err(fault) => return Err(fault),
        }
        let wait = jittered(pause);
        if Instant::now() + wait >= deadline {
            return Err(deadline_exceeded(format_args!("another insert of id {id} is under way")));
        }
        tokio::time::sleep(wait).await;
        pause = (pause * 2).min(PAUSE.1);
    }
}

enum Outcome {
    Won,
    /// A live record has it; the slot that names the record.
    Exists(NodeId, Found),
    /// A living insert has it: wait for what becomes of it.
    Busy,
}

async fn claim_locked<V: Verbs>(
    reader: &mut Reader<V>,
    guard: &mut Guard<V>,
    bucket: RemotePtr,
    id: ExternalId,
    fingerprint: u32,
    own: u64,
) -> Result<Outcome, Fault> {
    let collection = Arc::clone(&reader.collection);
    // From here on the deadline is the holder's: a step that is begun is ended.
    let deadline = Instant::now() + lock::HOLD_MAX;
    let chain = read_chain(&collection, bucket, deadline, &mut reader.cost).await?;
    let found = chain.matches(fingerprint)?;
    let nodes: Vec<_> = found.iter().map(|found| found.slot.node).collect();
    let mut reuse = None;
    for (found, header) in found.iter().zip(reader.headers(&nodes).await?) {
        if header.id != id {
            continue;
        }
        match settle(reader, found.slot.node, header, deadline).await? {
            Settled::Live => return Ok(Outcome::Exists(found.slot.node, *found)),
            Settled::Busy => return Ok(Outcome::Busy),
            Settled::Dead => reuse = Some(*found),
        }
    }
    let cost = &mut reader.cost;
    let slot = match reuse.or_else(|| chain.first_free()) {
        Some(slot) => slot,
        None => {
            append_bucket(&collection, guard, &chain, bucket, own, deadline, cost).await?;
            return Ok(Outcome::Won);
        }
    };
    write_slot(&collection, guard, slot.at, slot.word, own, deadline, cost).await?;
    Ok(Outcome::Won)
}

fn lock_lost() -> Fault {
    Fault::new(FaultCode::Unavailable, "the lock of an id bucket was lost: try again")
}

/// Puts `own` into a free slot. Off the lock's memory node its fence does not reach, so the lock is looked at again
/// afterwards; if it is gone, the slot is put back.
async fn write_slot<V: Verbs>(
    collection: &Collection<V>,
    guard: &mut Guard<V>,
    at: RemotePtr,
    old: u64,
    own: u64,
    deadline: Instant,
    cost: &mut Cost,
) -> Result<(), Fault> {
    if guard.covers(at) {
        return if guard.compare_swap(at, old, own, cost).await? == old { Ok(()) } else { Err(lock_lost()) };
    }
    if collection.compare_swap(at, old, own, deadline, cost).await? != old {
        return Err(lock_lost());
    }
    match guard.is_held(cost).await {
        Ok(true) => Ok(()),
        result => {
            let removed = IdSlot { state: IdState::Removed, ..IdSlot::from_word(own).expect("made above") };
            collection.compare_swap(at, own, removed.to_word(), deadline, cost).await?;
            Err(result.err().unwrap_or_else(lock_lost))
        }
    }
}

/// Links a new bucket behind the last, with `own` in its first slot.
async fn append_bucket<V: Verbs>(
    collection: &Collection<V>,
    guard: &mut Guard<V>,
    chain: &Chain,
    bucket: RemotePtr,
    own: u64,
    deadline: Instant,
    cost: &mut Cost,
) -> Result<(), Fault> {
    if chain.buckets.len() == ID_CHAIN_MAX {
        return Err(chain_too_long(collection, bucket));
    }
    // Preferably beside the first bucket, under its lock's fence.
    let turn = collection.regions().iter().position(|region| *region == bucket.region()).unwrap_or(0);
    let mut rooms = Rooms::read(collection, deadline, cost).await?;
    let new = rooms.allocate(collection, ID_BUCKET_BYTES, turn, "id bucket", deadline, cost).await?;
    // Its slots are zeros, as memory is before it was handed out. The claim goes into it once it is in the chain, where
    // `write_slot` knows how to take it back.
    let (last, _) = chain.buckets.last().expect("a chain has its first bucket");
    let next = last.add(NEXT);
    let was = if guard.covers(next) {
        guard.compare_swap(next, 0, new.to_word(), cost).await?
    } else {
        collection.compare_swap(next, 0, new.to_word(), deadline, cost).await?
    };
    if was != 0 {
        return Err(lock_lost());
    }
    write_slot(collection, guard, new.add(SLOTS), 0, own, deadline, cost).await
}

enum Settled {
    Live,
    Dead,
    Busy,
}

/// What is to become of a record that has the wanted id. An insert that can no longer finish is ended here.
async fn settle<V: Verbs>(
    reader: &mut Reader<V>,
    node: NodeId,
    mut header: Header,
    deadline: Instant,
) -> Result<Settled, Fault> {
    let collection = Arc::clone(&reader.collection);
    for _ in 0..4 {
        match (header.meta.state, header.predecessor()) {
            (NodeState::Live, _) => return Ok(Settled::Live),
            (NodeState::Dead | NodeState::Empty, _) => return Ok(Settled::Dead),
            // The slot names it, so it is to replace its predecessor: that is finished, whoever began it.
            (NodeState::Linking | NodeState::Heir, Some(predecessor)) => {
                succeed(reader, node, header.meta, predecessor).await?;
                header = reader.headers(&[node]).await?[0];
                continue;
            }
            (NodeState::Heir, None) => {
                header = reader.headers(&[node]).await?[0];
                continue;
            }
            (NodeState::Linking, None) => {}
        }
        if is_inserter_alive(reader, node, header.inserter, deadline).await? {
            return Ok(Settled::Busy);
        }
        // Its last step may have come just before its session ended: the swap decides.
        let dead = NodeMeta { state: NodeState::Dead, ..header.meta };
        if swap_meta(&collection, node, header.meta, dead, deadline, &mut reader.cost).await? {
            collection.fabric().counters.id_takeovers.add(1);
            info!(%node, id = %header.id, "id of a dead insert taken over");
            return Ok(Settled::Dead);
        }
        header = reader.headers(&[node]).await?[0];
    }
    Err(corrupt(format!("collection '{}': the state of {node} does not settle", collection.name())))
}

// ------------------------------------------------------------------------------------------------- replacing

/// What came of a replacement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Replaced {
    /// The new record is live, or its predecessor is dead, which is the same. The old one:
    Old(NodeId),
    /// No live record had the id: it names the new one now, which its inserter makes live.
    Claimed,
}

/// Puts `node`, which is *linking* with `meta` and linked, in the place of the live record under `id`.
///
/// # Errors
/// What remote memory answers. [`ReplaceError::Open`] says that the replacement may have taken place, or may be finished
/// by the next claim of the id: the new record must then be left as it is.
pub(crate) async fn replace<V: Verbs>(
    reader: &mut Reader<V>,
    id: ExternalId,
    node: NodeId,
    meta: NodeMeta,
) -> Result<Replaced, ReplaceError> {
    let collection = Arc::clone(&reader.collection);
    let (bucket, fingerprint) = bucket_of(&collection, id);
    let own = IdSlot { state: IdState::Claimed, fingerprint, node }.to_word();
    let mut pause = PAUSE.0;
    loop {
        let deadline = reader.deadline;
        let mut guard =
            lock::acquire(&collection, bucket, Protected::Id(id), deadline, &mut reader.cost).await?;
        let found = claim_locked(reader, &mut guard, bucket, id, fingerprint, own).await?;
        let outcome = match found {
            Outcome::Won => Some(Replaced::Claimed),
            Outcome::Exists(old, at) => {
                replace_locked(reader, &mut guard, old, at, node, meta, own).await?;
                Some(Replaced::Old(old))
            }
            Outcome::Busy => None,
        };
        let released = guard.release(&mut reader.cost).await;
        match outcome {
            // A claim counts only under the lock; a replacement rests on the words that it swapped.
            Some(Replaced::Claimed) => return released.map(|()| Replaced::Claimed).map_err(Into::into),
            Some(old) => return Ok(old),
            None => released?,
        }
        let wait = jittered(pause);
        if Instant::now() + wait >= deadline {
            return Err(deadline_exceeded(format_args!("another insert of id {id} is under way")).into());
        }
        tokio::time::sleep(wait).await;
        pause = (pause * 2).min(PAUSE.1);
    }
}

/// Why a replacement did not come to an end.
#[derive(Debug)]
pub(crate) enum ReplaceError {
    /// Nothing was changed but the new record.
    Before(Fault),
    /// The id may name the new record.
    Open(Fault),
}

impl From<Fault> for ReplaceError {
    fn from(fault: Fault) -> Self {
        Self::Before(fault)
    }
}

/// The steps of a replacement of `old`, which is live and named by the slot `at`.
async fn replace_locked<V: Verbs>(
    reader: &mut Reader<V>,
    guard: &mut Guard<V>,
    old: NodeId,
    at: Found,
    node: NodeId,
    meta: NodeMeta,
    own: u64,
) -> Result<(), ReplaceError> {
    let collection = Arc::clone(&reader.collection);
    let deadline = Instant::now() + lock::HOLD_MAX;
    let (chunk, slot) = collection.place(node).expect("the chunk of a leased slot is known");
    let mut set = WriteSet::new();
    set.push_word(collection.params().header_at(chunk, slot).add(header::INSERTER), predecessor_word(old));
    // Nobody looks at the word before the slot names the record.
    collection.write(&set, deadline, &mut reader.cost).await?;
    // The swap itself decides, also should the lock be gone: a slot that still names `old` has not been changed.
    let mut failed = None;
    for _ in 0..STEP_MAX {
        let cost = &mut reader.cost;
        let swapped = if guard.covers(at.at) {
            guard.compare_swap(at.at, at.word, own, cost).await
        } else {
            let deadline = Instant::now() + lock::HOLD_MAX;
            collection.compare_swap(at.at, at.word, own, deadline, cost).await
        };
        match swapped {
            // That it is there already means that an earlier try has done it.
            Ok(was) if was == at.word || was == own => {
                return succeed(reader, node, meta, old).await.map_err(ReplaceError::Open);
            }
            // After a try in doubt it may have been done, and the new record replaced in its turn.
            Ok(_) if failed.is_some() => break,
            Ok(_) => return Err(ReplaceError::Before(lock_lost())),
            Err(fault) => failed = Some(fault),
        }
    }
    Err(ReplaceError::Open(failed.expect("there was a try that failed")))
}

/// The last steps of a replacement: the slot names `node`, which takes over from `old`. Anybody may take them, any number
/// of times.
async fn succeed<V: Verbs>(
    reader: &mut Reader<V>,
    node: NodeId,
    meta: NodeMeta,
    old: NodeId,
) -> Result<(), Fault> {
    let state = |state| NodeMeta { state, ..meta };
    let (linking, heir, live) = (state(NodeState::Linking), state(NodeState::Heir), state(NodeState::Live));
    step(reader, node, linking, heir).await?;
    // Live until now: a record is replaced once it is live, and only the step below ends that.
    let old_meta = reader.headers(&[old]).await?[0].meta;
    if old_meta.state != NodeState::Dead {
        let old_live = NodeMeta { state: NodeState::Live, ..old_meta };
        step(reader, old, old_live, NodeMeta { state: NodeState::Dead, ..old_meta }).await?;
    }
    // Done. What is left saves others from looking at the old record.
    if let Err(fault) = step(reader, node, heir, live).await {
        warn!(%node, %fault, "a record that was replaced stays an heir");
    }
    Ok(())
}

/// COMPARE_SWAP of a meta word from `from` to `to`, or to whatever follows it: that somebody else took the step is as
/// good. States only go forward, so it may be repeated when its outcome is in doubt.
async fn step<V: Verbs>(
    reader: &mut Reader<V>,
    node: NodeId,
    from: NodeMeta,
    to: NodeMeta,
) -> Result<(), Fault> {
    let collection = Arc::clone(&reader.collection);
    let mut failed = None;
    for _ in 0..STEP_MAX {
        let deadline = Instant::now() + lock::HOLD_MAX;
        match swap_meta(&collection, node, from, to, deadline, &mut reader.cost).await {
            Ok(_) => return Ok(()),
            Err(fault) => failed = Some(fault),
        }
    }
    Err(failed.expect("there was a try"))
}

/// Whether the session that inserts `node` may still finish.
pub(crate) async fn is_inserter_alive<V: Verbs>(
    reader: &mut Reader<V>,
    node: NodeId,
    inserter: u64,
    deadline: Instant,
) -> Result<bool, Fault> {
    let collection = &reader.collection;
    let (chunk, slot) = collection.place(node).expect("its header was read");
    let at = collection.params().header_at(chunk, slot);
    reader.cost.rounds += 1;
    collection.is_session_alive(at, SessionId((inserter >> 32) as u32), deadline).await
}

/// COMPARE_SWAP of a node's meta word; whether it was `old`.
pub(crate) async fn swap_meta<V: Verbs>(
    collection: &Collection<V>,
    node: NodeId,
    old: NodeMeta,
    new: NodeMeta,
    deadline: Instant,
    cost: &mut Cost,
) -> Result<bool, Fault> {
    collection.learn(node, deadline, cost).await?;
    let (chunk, slot) = collection.place(node).expect("learnt above");
    let at = collection.params().header_at(chunk, slot).add(header::META);
    Ok(collection.compare_swap(at, old.to_word(), new.to_word(), deadline, cost).await? == old.to_word())
}

// ---------------------------------------------------------------------------------------------------- bulk

/// A row that two rows of one load share an id with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DuplicateId {
    /// The id.
    pub(crate) id: ExternalId,
    /// The row that had it first.
    pub(crate) first: NodeId,
    /// The other.
    pub(crate) second: NodeId,
}

/// Enters the ids of many records at once, into a collection that nobody else writes to: whole buckets are read,
/// filled and written back, without locks. Records must be written before.
pub(crate) async fn bulk_claim<V: Verbs>(
    reader: &mut Reader<V>,
    ids: &[(ExternalId, NodeId)],
    rooms: &mut Rooms,
) -> Result<Result<(), DuplicateId>, Fault> {
    let (collection, deadline) = (&*Arc::clone(&reader.collection), reader.deadline);
    // Chains by first bucket; `wave` are the buckets to read next, with the chain that they belong to.
    let mut chains: Vec<Chain> = Vec::new();
    let mut chain_of: HashMap<RemotePtr, usize> = HashMap::new();
    let mut wave: Vec<(usize, RemotePtr)> = Vec::new();
    for (id, _) in ids {
        let (bucket, _) = bucket_of(collection, *id);
        chain_of.entry(bucket).or_insert_with(|| {
            chains.push(Chain { buckets: Vec::new() });
            wave.push((chains.len() - 1, bucket));
            chains.len() - 1
        });
    }
    let mut gather = Gather::new();
    while !wave.is_empty() {
        gather.clear();
        for (_, bucket) in &wave {
            gather.push(*bucket, ID_BUCKET_BYTES);
        }
        reader.gather(&mut gather).await?;
        let mut behind = Vec::new();
        for (i, (chain, bucket)) in wave.iter().enumerate() {
            let bytes: [u8; ID_BUCKET_BYTES as usize] = gather.get(i).try_into().expect("a bucket was read");
            let next = RemotePtr::from_word(word(&bytes, NEXT));
            let buckets = &mut chains[*chain].buckets;
            buckets.push((*bucket, bytes));
            if !next.is_null() {
                check_next(collection, next)?;
                if buckets.len() == ID_CHAIN_MAX {
                    return Err(chain_too_long(collection, buckets[0].0));
                }
                behind.push((*chain, next));
            }
        }
        wave = behind;
    }
    // Enter them; buckets that changed are written back.
    let mut changed: HashMap<RemotePtr, [u8; ID_BUCKET_BYTES as usize]> = HashMap::new();
    for (id, node) in ids {
        let (bucket, fingerprint) = bucket_of(collection, *id);
        let chain = &mut chains[chain_of[&bucket]];
        let same: Vec<_> = chain.matches(fingerprint)?.iter().map(|found| found.slot.node).collect();
        let mut is_entered = false;
        for (first, header) in same.iter().zip(reader.headers(&same).await?) {
            // A piece that is sent again finds its own claims.
            is_entered |= first == node;
            if header.id == *id && first != node {
                return Ok(Err(DuplicateId { id: *id, first: *first, second: *node }));
            }
        }
        if is_entered {
            continue;
        }
        let own = IdSlot { state: IdState::Claimed, fingerprint, node: *node }.to_word();
        let at = match chain.first_free() {
            Some(free) => free.at,
            None => {
                if chain.buckets.len() == ID_CHAIN_MAX {
                    return Err(chain_too_long(collection, bucket));
                }
                let turn =
                    collection.regions().iter().position(|region| *region == bucket.region()).unwrap_or(0);
                let new = rooms
                    .allocate(collection, ID_BUCKET_BYTES, turn, "id bucket", deadline, &mut reader.cost)
                    .await?;
                let (last, bytes) = chain.buckets.last_mut().expect("a chain has its first bucket");
                bytes[NEXT as usize..][..8].copy_from_slice(&new.to_word().to_le_bytes());
                changed.insert(*last, *bytes);
                chain.buckets.push((new, [0; ID_BUCKET_BYTES as usize]));
                new.add(SLOTS)
            }
        };
        let (bucket, bytes) = chain
            .buckets
            .iter_mut()
            .find(|(bucket, _)| {
                bucket.region() == at.region()
                    && (0..ID_BUCKET_BYTES).contains(&at.offset().wrapping_sub(bucket.offset()))
            })
            .expect("the slot is in the chain");
        bytes[(at.offset() - bucket.offset()) as usize..][..8].copy_from_slice(&own.to_le_bytes());
        changed.insert(*bucket, *bytes);
    }
    let mut set = WriteSet::new();
    for (at, bytes) in &changed {
        set.push(*at, bytes);
    }
    collection.write(&set, deadline, &mut reader.cost).await?;
    Ok(Ok(()))
}

/// For each of `ids`: the nodes that its bucket names it for, whatever their state. For checks.
pub(crate) async fn bulk_lookup<V: Verbs>(
    reader: &mut Reader<V>,
    ids: &[ExternalId],
) -> Result<Vec<Vec<NodeId>>, Fault> {
    let collection = Arc::clone(&reader.collection);
    let mut found = vec![Vec::new(); ids.len()];
    let mut wave: Vec<(usize, RemotePtr)> =
        ids.iter().enumerate().map(|(i, id)| (i, bucket_of(&collection, *id).0)).collect();
    let mut gather = Gather::new();
    for depth in 0.. {
        if wave.is_empty() {
            break;
        }
        if depth == ID_CHAIN_MAX {
            return Err(chain_too_long(&collection, wave[0].1));
        }
        gather.clear();
        for (_, bucket) in &wave {
            gather.push(*bucket, ID_BUCKET_BYTES);
        }
        reader.gather(&mut gather).await?;
        let mut behind = Vec::new();
        for (i, (which, bucket)) in wave.iter().enumerate() {
            let bytes: [u8; ID_BUCKET_BYTES as usize] = gather.get(i).try_into().expect("a bucket was read");
            let next = RemotePtr::from_word(word(&bytes, NEXT));
            let (_, fingerprint) = bucket_of(&collection, ids[*which]);
            let chain = Chain { buckets: vec![(*bucket, bytes)] };
            found[*which].extend(chain.matches(fingerprint)?.iter().map(|found| found.slot.node));
            if !next.is_null() {
                check_next(&collection, next)?;
                behind.push((*which, next));
            }
        }
        wave = behind;
    }
    Ok(found)
}
