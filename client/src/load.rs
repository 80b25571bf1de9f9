//! Loading a graph file: the pieces of the file go to one compute node, a few at a time. When that node is lost, another
//! goes on where it stopped.
//!
//! Invariant: at most [`IN_FLIGHT`] pieces of at most [`PIECE_BYTES_MAX`] bytes are in memory, whatever the size of
//! the file; and a collection that is not whole cannot be searched.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream;
use shine_common::graph_file::GraphFile;
use shine_common::ids::NodeId;
use shine_common::layout::CollectionParams;
use shine_common::wire::{CnRequest, CnResponse, CollectionInfo, CollectionSpec, FaultCode};
use tokio::time::{Instant, sleep_until};

use crate::ClientError;
use crate::client::{Client, unexpected};
use crate::courier::CallError;
use crate::peers::Peer;

/// Pieces under way at once.
const IN_FLIGHT: usize = 4;
/// Size that pieces are made near to.
const PIECE_BYTES: u64 = 2 << 20;
/// Largest piece; well below the largest message.
const PIECE_BYTES_MAX: u64 = 12 << 20;
/// Pause before a piece that the node had no room for is sent again.
const PAUSE: Duration = Duration::from_millis(20);
/// Times that a load is resumed without a piece having been stored in between.
const STALLS_MAX: u32 = 3;
/// Time for giving up a load.
const ABORT_WITHIN: Duration = Duration::from_secs(5);

/// How a graph file is loaded.
#[derive(Debug, Clone, Default)]
pub struct LoadOptions {
    /// Name of the collection to make.
    pub collection: String,
    /// Drop a collection of that name first.
    pub replace: bool,
    /// Memory nodes to use, by name; empty means all that are up.
    pub memory_nodes: Vec<String>,
    /// Rows to plan for; at least those of the file.
    pub capacity: u64,
    /// Go on with a load of this file that was broken off. There being none, or no collection, it begins; all being
    /// there, nothing is done.
    pub resume: bool,
}

/// Progress of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadProgress {
    /// Bytes that are stored.
    pub done: u64,
    /// Bytes to store.
    pub total: u64,
}

/// A stretch of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Piece {
    Nodes(Range<u32>),
    Upper(Range<u32>),
}

impl Client {
    /// Loads a graph file into a new collection and makes it searchable. `progress` hears of every piece, and breaks
    /// the load off by returning [`ControlFlow::Break`].
    ///
    /// A load that is broken off, here or by a fault that lasts, leaves what is stored in a collection that cannot be
    /// searched yet: [`LoadOptions::resume`] goes on with it, [`Client::drop_collection`] frees it.
    ///
    /// The file is taken as it is: open it with [`shine_common::graph_file::Check::Checksums`] and call
    /// [`GraphFile::verify`] unless its maker is trusted.
    ///
    /// # Errors
    /// `CollectionExists` unless [`LoadOptions::replace`], and with [`LoadOptions::resume`] if it is not a load of this
    /// file; `RegionFull` if the graph does not fit. After that, and if the file is wrong, no collection is left.
    pub async fn load(
        &self,
        graph: &GraphFile,
        options: &LoadOptions,
        mut progress: impl FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<CollectionInfo, ClientError> {
        let (mut begin, mut is_resumed, mut stalls, mut most) = (begin(graph, options), options.resume, 0, 0);
        let what = || format!("the creation of collection '{}'", options.collection);
        loop {
            let (peer, answer) = match self.courier().tell(&begin, self.admin_deadline(), what).await {
                Ok(answered) => answered,
                // To resume twice is as good as once.
                Err(ClientError::OutcomeUnknown { .. }) if is_resumed && stalls + 1 < STALLS_MAX => {
                    stalls += 1;
                    continue;
                }
                Err(error) => return Err(error),
            };
            let (load, params, stored) = match answer {
                CnResponse::Loading { load, params, nodes_done, upper_done } => {
                    (load, params, (nodes_done, upper_done))
                }
                CnResponse::Done => return self.stats(&options.collection).await,
                _ => return Err(unexpected(&peer, "the number of a load")),
            };
            if let Err(error) = check_shape(graph, &params) {
                let abort = CnRequest::LoadAbort { load };
                let deadline = Instant::now() + ABORT_WITHIN;
                if let Err(fault) = self.courier().call(&peer, &abort, deadline).await {
                    tracing::debug!(%peer, ?fault, "could not give up a load");
                }
                return Err(error);
            }
            let mut reached = 0;
            let mut tell = |at: LoadProgress| {
                reached = at.done;
                progress(at)
            };
            match self.send_all(graph, &params, &peer, load, stored, &mut tell).await {
                Ok(()) => return self.stats(&options.collection).await,
                Err(error) if is_passing(&error) => {
                    stalls = if reached > most { 0 } else { stalls + 1 };
                    most = most.max(reached);
                    if stalls == STALLS_MAX {
                        return Err(error);
                    }
                    tracing::warn!(%peer, %error, "a load broke off: resuming it");
                    is_resumed = true;
                    if let CnRequest::LoadBegin { resume, replace, .. } = &mut begin {
                        (*resume, *replace) = (true, false);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    async fn send_all(
        &self,
        graph: &GraphFile,
        params: &CollectionParams,
        peer: &Arc<Peer>,
        load: u64,
        stored: (u32, u32),
        progress: &mut impl FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<(), ClientError> {
        let (rows, slots) = (graph.rows(), graph.info().upper_slots);
        let bytes = |nodes, upper| {
            piece_bytes(&Piece::Nodes(0..nodes), params) + piece_bytes(&Piece::Upper(0..upper), params)
        };
        let (mut done, total) = (bytes(stored.0, stored.1), bytes(rows, slots));
        // The node holds upper lists against the nodes that they name, so all nodes go first.
        for pieces in pieces(stored.0..rows, stored.1..slots, params) {
            let mut sent = stream::iter(pieces)
                .map(|piece| async move {
                    let bytes = piece_bytes(&piece, params);
                    self.send_piece(peer, &request(graph, load, &piece)?).await.map(|()| bytes)
                })
                .buffer_unordered(IN_FLIGHT);
            while let Some(bytes) = sent.next().await {
                done += bytes?;
                if progress(LoadProgress { done, total }).is_break() {
                    return Err(ClientError::Cancelled);
                }
            }
        }
        let end = CnRequest::LoadEnd { load, entry_point: graph.info().entry.to_word() };
        self.send_piece(peer, &end).await
    }

    async fn send_piece(&self, peer: &Arc<Peer>, request: &CnRequest) -> Result<(), ClientError> {
        let deadline = self.admin_deadline();
        loop {
            match self.courier().call(peer, request, deadline).await {
                Ok(CnResponse::Done) => return Ok(()),
                Ok(_) => return Err(unexpected(peer, "done")),
                Err(CallError::Fault(fault))
                    if fault.code == FaultCode::Overloaded && Instant::now() + PAUSE < deadline =>
                {
                    sleep_until(Instant::now() + PAUSE).await;
                }
                Err(error) => return Err(error.at(peer)),
            }
        }
    }
}

fn begin(graph: &GraphFile, options: &LoadOptions) -> CnRequest {
    let info = graph.info();
    CnRequest::LoadBegin {
        spec: CollectionSpec {
            name: options.collection.clone(),
            dtype: info.dtype,
            metric: info.metric,
            dim: info.dim,
            m: info.m,
            ef_construction: info.ef_construction,
            capacity: options.capacity.max(info.rows.into()),
            memory_nodes: options.memory_nodes.clone(),
            loading: true,
        },
        nodes: info.rows,
        upper_slots: info.upper_slots,
        replace: options.replace,
        file: graph.fingerprint(),
        resume: options.resume,
    }
}

/// Whether another node, or the same one later, may go on with a load that broke off so.
fn is_passing(error: &ClientError) -> bool {
    match error {
        ClientError::Unreachable { .. } => true,
        // Not found: the load, at a node that was restarted.
        ClientError::Fault { fault, .. } => {
            matches!(fault.code, FaultCode::Unavailable | FaultCode::StaleEpoch | FaultCode::NotFound)
        }
        _ => false,
    }
}

/// Whether the file's strides are those of the collection.
fn check_shape(graph: &GraphFile, params: &CollectionParams) -> Result<(), ClientError> {
    let ours = graph.params();
    let same = (ours.dtype, ours.metric, ours.dim, ours.m, ours.m0)
        == (params.dtype, params.metric, params.dim, params.m, params.m0);
    if same {
        Ok(())
    } else {
        Err(ClientError::GraphFile(format!(
            "{}: the collection was made with another type, metric, dimension or m than the file's",
            graph.path().display()
        )))
    }
}

/// Cuts the file: whole chunks of nodes where they are small enough, then upper lists.
fn pieces(nodes: Range<u32>, upper_slots: Range<u32>, params: &CollectionParams) -> [Vec<Piece>; 2] {
    let per_piece = |item_bytes: u64, unit: u32| {
        let target = PIECE_BYTES / item_bytes / u64::from(unit) * u64::from(unit);
        let most = (PIECE_BYTES_MAX / item_bytes).max(1);
        u32::try_from(target.max(u64::from(unit)).min(most)).expect("a piece has few items")
    };
    let node_step = per_piece(node_bytes(params), params.slots);
    let upper_step = per_piece(params.upper_stride(), shine_common::layout::UPPER_SLOTS);
    let cut = |items: Range<u32>, step: u32| {
        let end = items.end;
        items.step_by(step as usize).map(move |first| first..end.min(first.saturating_add(step)))
    };
    [
        cut(nodes, node_step).map(Piece::Nodes).collect(),
        cut(upper_slots, upper_step).map(Piece::Upper).collect(),
    ]
}

/// Bytes of a node in a piece, its id included.
fn node_bytes(params: &CollectionParams) -> u64 {
    8 + 24 + params.vector_stride() + params.list_stride()
}

fn piece_bytes(piece: &Piece, params: &CollectionParams) -> u64 {
    match piece {
        Piece::Nodes(range) => range.len() as u64 * node_bytes(params),
        Piece::Upper(range) => range.len() as u64 * params.upper_stride(),
    }
}

fn request(graph: &GraphFile, load: u64, piece: &Piece) -> Result<CnRequest, ClientError> {
    Ok(match piece {
        Piece::Nodes(range) => {
            let ids = if graph.info().has_ids {
                let ids: Result<Vec<_>, _> = range.clone().map(|node| graph.id(NodeId(node))).collect();
                ids.map_err(|error| ClientError::GraphFile(error.to_string()))?
            } else {
                Vec::new()
            };
            CnRequest::LoadNodes {
                load,
                first: range.start,
                metas: graph.metas(range.clone()).collect(),
                ids,
                vectors: graph.vectors(range.clone()).to_vec(),
                lists: graph.lists(range.clone()).to_vec(),
            }
        }
        Piece::Upper(range) => {
            CnRequest::LoadUpper { load, first: range.start, lists: graph.upper(range.clone()).to_vec() }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use shine_common::metric::{DType, Metric};
    use shine_common::wire::MESSAGE_MAX;

    #[test]
    fn pieces_cover_every_item_once_and_fit_a_message() {
        for (dtype, dim, m, nodes, upper) in [
            (DType::I8, 100, 16, 100_000, 7_000),
            (DType::I8, 1, 2, 1, 0),
            (DType::F32, 32_768, 256, 300, 40),
            (DType::F16, 333, 32, 1_025, 257),
        ] {
            let params = CollectionParams::new(dtype, Metric::L2, dim, m, 200, 1_000, 3).unwrap();
            let (mut next_node, mut next_upper) = (0, 0);
            for piece in pieces(0..nodes, 0..upper, &params).into_iter().flatten() {
                let bytes = piece_bytes(&piece, &params);
                assert!(bytes <= PIECE_BYTES_MAX.max(node_bytes(&params)) && bytes < MESSAGE_MAX as u64);
                match piece {
                    Piece::Nodes(range) => {
                        assert_eq!(range.start, next_node);
                        assert!(!range.is_empty());
                        next_node = range.end;
                    }
                    Piece::Upper(range) => {
                        assert_eq!(range.start, next_upper);
                        assert!(!range.is_empty());
                        next_upper = range.end;
                    }
                }
            }
            assert_eq!((next_node, next_upper), (nodes, upper));
        }
    }
}
