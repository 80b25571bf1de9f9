//! An insert that is carried out at most once, whatever becomes of the nodes that are asked.
//!
//! ```text
//!            ┌──────── next node ◄──────── not found, or surely not done ◄───────┐
//!            ▼                                                                   │
//!        insert ── lost, silent, late, "exists" after doubt ──► get by id ───────┤
//!            │                                                     │             │
//!        Inserted                                    same vector: Inserted    another: IdExists
//! ```
//!
//! Inserting again is safe, since the cluster lets one claim of an id win; what is in doubt is only *which* attempt
//! won. A node that fell silent keeps its attempt, and its late answer still counts.
//!
//! Invariant: success is reported only for a record with this id and this vector.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use shine_common::ids::ExternalId;
use shine_common::wire::{CnRequest, CnResponse, Fault, FaultCode};
use tokio::time::{Instant, sleep_until};

use crate::ClientError;
use crate::client::{Inserted, deadline_ms, get, unexpected};
use crate::courier::{CallError, Courier, Transport};
use crate::peers::Peer;

/// Inserts `vector` under `id`. See [`crate::Client::insert`].
pub(crate) async fn insert<T: Transport>(
    courier: &Courier<T>,
    collection: &str,
    id: ExternalId,
    vector: Vec<u8>,
    deadline: Instant,
) -> Result<Inserted, ClientError> {
    let attempt = async |peer: Arc<Peer>| {
        let left: Duration = deadline.saturating_duration_since(Instant::now());
        let request = CnRequest::Insert {
            collection: collection.to_owned(),
            id,
            vector: vector.clone(),
            deadline_ms: deadline_ms(left),
        };
        courier.call(&peer, &request, deadline).await
    };
    let unknown = |cause: ClientError| ClientError::InsertUnknown {
        collection: collection.to_owned(),
        id,
        cause: Box::new(cause),
    };

    let mut round = courier.round(deadline);
    // Attempts of nodes that fell silent.
    let mut pending = FuturesUnordered::new();
    // Why an attempt may have taken effect.
    let mut doubt: Option<ClientError> = None;
    loop {
        let peer = match meanwhile(&mut pending, courier.next_peer(&mut round)).await {
            Either::Won(inserted) => return Ok(inserted),
            Either::Done(Some(peer)) => peer,
            Either::Done(None) => return Err(doubt.map_or_else(|| round.error(), unknown)),
        };
        let mut call = Box::pin(attempt(Arc::clone(&peer)));
        let outcome = match meanwhile(&mut pending, until_silent(courier, &peer, &mut call)).await {
            Either::Won(inserted) => return Ok(inserted),
            Either::Done(outcome) => outcome,
        };
        match outcome {
            None => {
                doubt = Some(CallError::Late.at(&peer));
                pending.push(call);
            }
            Some(Ok(CnResponse::Inserted { node, receipt })) => {
                return Ok(Inserted { node, receipt: Some(receipt) });
            }
            Some(Ok(_)) => return Err(unexpected(&peer, "the outcome of an insert")),
            Some(Err(CallError::Fault(fault))) if fault.code == FaultCode::IdExists => {
                if doubt.is_none() {
                    return Err(CallError::Fault(fault).at(&peer));
                }
            }
            Some(Err(error)) if error.is_ambiguous() => doubt = Some(error.at(&peer)),
            Some(Err(error)) if error.moves_on() => {
                round.failed(peer, error);
                continue;
            }
            Some(Err(error)) => {
                let error = error.at(&peer);
                return Err(if doubt.is_some() { unknown(error) } else { error });
            }
        }

        // In doubt: look whether it is there.
        match meanwhile(&mut pending, get(courier, collection, id, deadline)).await {
            Either::Won(inserted) => return Ok(inserted),
            Either::Done(Ok(record)) if record.vector == vector => {
                return Ok(Inserted { node: record.node, receipt: None });
            }
            Either::Done(Ok(_)) => {
                let fault = Fault::new(
                    FaultCode::IdExists,
                    format!("id {id} is taken in collection '{collection}', by another vector"),
                );
                return Err(CallError::Fault(fault).at(&peer));
            }
            Either::Done(Err(error)) if error.code() == FaultCode::NotFound => round.try_again(),
            Either::Done(Err(error)) => return Err(unknown(doubt.unwrap_or(error))),
        }
    }
}

/// How waiting for something ended.
enum Either<T> {
    /// A pending attempt succeeded first.
    Won(Inserted),
    /// It is there.
    Done(T),
}

/// Waits for `future` while the attempts that are still pending go on.
async fn meanwhile<A, F>(pending: &mut FuturesUnordered<A>, future: F) -> Either<F::Output>
where
    A: Future<Output = Result<CnResponse, CallError>>,
    F: Future,
{
    let mut future = pin!(future);
    loop {
        tokio::select! {
            biased;
            Some(outcome) = pending.next() => {
                // A failure says nothing new: that attempt was in doubt already.
                if let Ok(CnResponse::Inserted { node, receipt }) = outcome {
                    return Either::Won(Inserted { node, receipt: Some(receipt) });
                }
            }
            done = &mut future => return Either::Done(done),
        }
    }
}

/// Waits for `call`; `None` once its node was silent for too long.
async fn until_silent<T: Transport, F: Future + Unpin>(
    courier: &Courier<T>,
    peer: &Peer,
    call: &mut F,
) -> Option<F::Output> {
    let mut since = courier.mark();
    loop {
        tokio::select! {
            biased;
            outcome = &mut *call => return Some(outcome),
            () = sleep_until(Instant::now() + courier.patience) => {
                if courier.is_silent(peer, since) {
                    return None;
                }
                since = courier.mark();
            }
        }
    }
}
