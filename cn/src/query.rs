//! One query from its target to its answers.
//!
//! Invariant: an answer's header was read after the search met it and said *live*: what is half inserted or dead may be
//! a way point, never an answer.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use shine_common::ids::{ExternalId, NodeId};
use shine_common::layout::EF_MAX;
use shine_common::verbs::Verbs;
use shine_common::wire::{Fault, FaultCode, Hit, Receipt, Target};

use crate::collection::Collection;
use crate::fabric::Gather;
use crate::hnsw::search::BEAM_GROWTH;
use crate::id_table;
use crate::reader::Reader;

/// What is asked.
#[derive(Clone, Debug)]
pub struct Query {
    /// What to look near to.
    pub target: Target,
    /// Answers wanted.
    pub k: u32,
    /// Beam; raised to `k` where smaller.
    pub ef: u32,
    /// Whether answers carry their vectors.
    pub with_vectors: bool,
}

/// Answers, and what they cost.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Nearest first; fewer than `k` if the collection is smaller.
    pub hits: Vec<Hit>,
    /// Beam that was used.
    pub ef: u32,
    /// Without the fields that only the node knows: its name.
    pub receipt: Receipt,
}

/// A record found by its id.
#[derive(Clone, Debug)]
pub struct Record {
    /// The node.
    pub node: NodeId,
    /// Its level.
    pub level: u8,
    /// Vector in native form.
    pub vector: Vec<u8>,
}

/// Finds the nearest neighbours.
///
/// # Errors
/// [`FaultCode::BadRequest`] on a wrong request, [`FaultCode::NotFound`] for a target id that is not there, and whatever
/// remote memory answers; never some of the answers.
pub async fn search<V: Verbs>(
    collection: &Arc<Collection<V>>,
    query: &Query,
    deadline: Instant,
) -> Result<Answer, Fault> {
    let started = Instant::now();
    for (name, given) in [("k", query.k), ("ef", query.ef)] {
        if !(1..=EF_MAX).contains(&given) {
            return Err(Fault::new(
                FaultCode::BadRequest,
                format!("{name} is {given}: expected 1 to {EF_MAX}"),
            ));
        }
    }
    collection.admit_ready()?;
    let ef = query.ef.max(query.k);
    let mut reader = Reader::new(collection, deadline);
    let stored;
    let vector = match &query.target {
        Target::Vector(vector) => {
            collection.check_vector(vector)?;
            vector
        }
        Target::Id(id) => {
            stored = find(&mut reader, *id).await?.vector;
            &stored
        }
    };
    let mut hits = Vec::new();
    let mut receipt = Receipt::default();
    let (k, mut beam) = (query.k as usize, ef);
    while let Some(entry) = reader.entry().await? {
        let mut scratch = collection.scratch();
        scratch.search.reset(entry.point, entry.upper, beam as usize, 0);
        reader.drive(&mut scratch, vector, None, |_, _| {}).await?;
        let stats = scratch.search.stats();
        receipt.hops += stats.hops;
        receipt.distances += stats.distances;
        let found: Vec<_> = scratch.search.results().iter().map(|c| (c.node(), c.distance())).collect();
        drop(scratch);
        hits = live(&mut reader, &found, k, query.with_vectors).await?;
        // A full beam with too few live ones is crowded by records that were replaced: a wider one sees past them.
        if hits.len() >= k || found.len() < beam as usize || beam == EF_MAX {
            break;
        }
        beam = beam.saturating_mul(BEAM_GROWTH as u32).min(EF_MAX);
    }
    receipt.rounds = reader.cost.rounds;
    receipt.remote_reads = reader.cost.reads;
    receipt.bytes = reader.cost.bytes;
    receipt.torn_lists = reader.cost.torn_lists;
    receipt.epoch = collection.fabric().epoch().0;
    receipt.elapsed_us = started.elapsed().as_micros() as u64;
    Ok(Answer { hits, ef, receipt })
}

/// The first `k` of `found` that are live. Asks for the headers of as many as are wanted, then of twice as many as are
/// still missing, so that a stretch of dead ones costs few rounds.
async fn live<V: Verbs>(
    reader: &mut Reader<V>,
    found: &[(NodeId, f32)],
    k: usize,
    with_vectors: bool,
) -> Result<Vec<Hit>, Fault> {
    let mut hits: Vec<Hit> = Vec::with_capacity(k.min(found.len()));
    let mut ids = HashSet::new();
    let mut gather = Gather::new();
    let mut rest = found;
    let mut batch = k;
    while hits.len() < k && !rest.is_empty() {
        let (now, later) = rest.split_at(batch.min(rest.len()));
        gather.clear();
        let nodes: Vec<_> = now.iter().map(|(node, _)| *node).collect();
        reader.want_headers(&nodes, &mut gather).await?;
        if with_vectors {
            reader.want_vectors(&nodes, &mut gather).await?;
        }
        reader.gather(&mut gather).await?;
        let heads: Vec<_> = nodes
            .iter()
            .enumerate()
            .map(|(i, node)| Ok((*node, reader.header(*node, gather.get(i))?)))
            .collect::<Result<_, Fault>>()?;
        let are_live = reader.are_live(&heads).await?;
        for (i, ((node, distance), (_, header))) in now.iter().zip(&heads).enumerate() {
            // A record and its successor may have been read on either side of the moment of replacement.
            if are_live[i] && hits.len() < k && ids.insert(header.id) {
                let vector = if with_vectors { gather.get(now.len() + i).to_vec() } else { Vec::new() };
                hits.push(Hit { id: header.id, node: *node, distance: *distance, vector });
            }
        }
        rest = later;
        batch = 2 * (k - hits.len());
    }
    Ok(hits)
}

/// The record under `id`.
///
/// # Errors
/// [`FaultCode::NotFound`] if no live record has it.
pub async fn get<V: Verbs>(
    collection: &Arc<Collection<V>>,
    id: ExternalId,
    deadline: Instant,
) -> Result<Record, Fault> {
    collection.admit_ready()?;
    find(&mut Reader::new(collection, deadline), id).await
}

async fn find<V: Verbs>(reader: &mut Reader<V>, id: ExternalId) -> Result<Record, Fault> {
    let Some((node, level)) = id_table::lookup(reader, id).await? else {
        let message = format!("collection '{}' has no id {id}", reader.collection.name());
        return Err(Fault::new(FaultCode::NotFound, message));
    };
    let mut gather = Gather::new();
    reader.want_vectors(&[node], &mut gather).await?;
    reader.gather(&mut gather).await?;
    Ok(Record { node, level, vector: gather.get(0).to_vec() })
}
