//! Reads a collection's records one after another, in the order of their node numbers.
//!
//! Other compute nodes may write meanwhile: a scan sees each record as it is when its chunk is read. A record that is
//! replaced after that is seen again at its new place; one that is there from begin to end, and is not replaced, is
//! seen once.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use shine_common::ids::{ExternalId, NodeId};
use shine_common::layout::HEADER_BYTES;
use shine_common::verbs::Verbs;
use shine_common::wire::{Fault, FaultCode};

use crate::alloc::Rooms;
use crate::collection::{Collection, Table};
use crate::fabric::Gather;
use crate::id_table;
use crate::reader::{HEADER_FROM, Reader};

/// Vectors that are read at a time.
const VECTOR_BATCH: usize = 1024;

/// A live record.
#[derive(Clone, Debug)]
pub struct Scanned {
    /// Its id.
    pub id: ExternalId,
    /// The node.
    pub node: NodeId,
    /// Vector in native form, if it was asked for (else empty).
    pub vector: Vec<u8>,
}

/// Some records in a row.
#[derive(Clone, Debug)]
pub struct Page {
    /// The records, each id once.
    pub records: Vec<Scanned>,
    /// The first one behind them, if there is one.
    pub next: Option<ExternalId>,
}

/// At most `limit` records from that of `offset` on, or from the first.
///
/// # Errors
/// [`FaultCode::BadRequest`] if no live record has `offset`, and whatever remote memory answers.
pub async fn page<V: Verbs>(
    collection: &Arc<Collection<V>>,
    offset: Option<ExternalId>,
    limit: usize,
    with_vectors: bool,
    deadline: Instant,
) -> Result<Page, Fault> {
    collection.admit_ready()?;
    let mut reader = Reader::new(collection, deadline);
    let from = match offset {
        None => NodeId(0),
        Some(id) => match id_table::lookup(&mut reader, id).await? {
            Some((node, _)) => node,
            None => {
                let message =
                    format!("offset: collection '{}' has no id {id}: begin anew", collection.name());
                return Err(Fault::new(FaultCode::BadRequest, message));
            }
        },
    };
    let mut scan = Scan::begin(reader, from).await?;
    let (mut records, mut ids) = (Vec::new(), HashSet::new());
    while records.len() <= limit
        && let Some(found) = scan.next().await?
    {
        // A record and the one that replaces it may have been read on either side of that moment.
        let new = found.into_iter().filter(|(_, id)| ids.insert(*id));
        records.extend(new.map(|(node, id)| Scanned { id, node, vector: Vec::new() }));
    }
    let next = records.get(limit).map(|record| record.id);
    records.truncate(limit);
    if with_vectors {
        let mut gather = Gather::new();
        for batch in records.chunks_mut(VECTOR_BATCH) {
            let nodes: Vec<_> = batch.iter().map(|record| record.node).collect();
            gather.clear();
            scan.reader.want_vectors(&nodes, &mut gather).await?;
            scan.reader.gather(&mut gather).await?;
            for (i, record) in batch.iter_mut().enumerate() {
                record.vector = gather.get(i).to_vec();
            }
        }
    }
    Ok(Page { records, next })
}

/// Number of live records, by their headers.
///
/// # Errors
/// Whatever remote memory answers.
pub async fn count<V: Verbs>(collection: &Arc<Collection<V>>, deadline: Instant) -> Result<u64, Fault> {
    collection.admit_ready()?;
    let mut scan = Scan::begin(Reader::new(collection, deadline), NodeId(0)).await?;
    let mut count = 0;
    while let Some(found) = scan.next().await? {
        count += found.len() as u64;
    }
    Ok(count)
}

struct Scan<V> {
    reader: Reader<V>,
    chunk_count: u32,
    chunk: u32,
    slot: u32,
}

impl<V: Verbs> Scan<V> {
    async fn begin(mut reader: Reader<V>, from: NodeId) -> Result<Self, Fault> {
        let collection = Arc::clone(&reader.collection);
        let rooms = Rooms::read(&collection, reader.deadline, &mut reader.cost).await?;
        let chunk_count = rooms.count(Table::Nodes).min(collection.params().max_chunks.into()) as u32;
        collection.read_table(Table::Nodes, chunk_count, reader.deadline, &mut reader.cost).await?;
        let (chunk, slot) = collection.params().place(from);
        Ok(Self { reader, chunk_count, chunk, slot })
    }

    /// The live records of the next chunk; `None` behind the last one.
    async fn next(&mut self) -> Result<Option<Vec<(NodeId, ExternalId)>>, Fault> {
        let collection = Arc::clone(&self.reader.collection);
        let params = collection.params();
        while self.chunk < self.chunk_count {
            let (chunk, first) = (self.chunk, self.slot);
            (self.chunk, self.slot) = (chunk + 1, 0);
            // A chunk whose allocation has only just begun has nothing live in it.
            let Some(at) = collection.known_chunk(Table::Nodes, chunk) else { continue };
            let mut gather = Gather::new();
            gather.push(params.header_at(at, first), u64::from(params.slots - first) * HEADER_BYTES);
            self.reader.gather(&mut gather).await?;
            let bytes = gather.get(0).chunks_exact(HEADER_BYTES as usize);
            let heads: Vec<_> = (chunk * params.slots + first..)
                .zip(bytes)
                .map(|(node, bytes)| {
                    Ok((NodeId(node), self.reader.header(NodeId(node), &bytes[HEADER_FROM as usize..])?))
                })
                .collect::<Result<_, Fault>>()?;
            let are_live = self.reader.are_live(&heads).await?;
            let live = heads.iter().zip(are_live).filter(|(_, is_live)| *is_live);
            return Ok(Some(live.map(|((node, head), _)| (*node, head.id)).collect()));
        }
        Ok(None)
    }
}
