//! What a compute node asks of the oracle, apart from the map.

use std::time::Instant;

use futures_util::future::BoxFuture;
use shine_common::wire::{Fault, OracleRequest, OracleResponse};

/// Calls to whichever oracle answers. Rare, so the futures are boxed.
pub trait Catalogue: Send + Sync + 'static {
    /// One call; [`shine_common::wire::FaultCode::NoOracle`] if none answers by the deadline.
    fn call(&self, request: OracleRequest, deadline: Instant)
    -> BoxFuture<'_, Result<OracleResponse, Fault>>;
}
