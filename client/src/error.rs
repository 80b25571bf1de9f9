//! Why a call failed, in a form that programs can act on.

use std::time::Duration;

use shine_common::ids::ExternalId;
use shine_common::wire::{Fault, FaultCode};

/// A failed call. [`ClientError::code`] says what kind of failure it is; the text says what, where, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// A node answered with a fault.
    #[error("{fault} (answered by {node})")]
    Fault {
        /// Name or address of the node.
        node: String,
        /// Its answer.
        fault: Fault,
    },
    /// None of the oracles gave a cluster map.
    #[error("no oracle answers at {oracles}: {cause}")]
    NoOracle {
        /// Addresses that were asked.
        oracles: String,
        /// What the last one said.
        cause: String,
    },
    /// The cluster map has no compute node.
    #[error("the cluster has no compute node that is up")]
    NoComputeNode,
    /// The cluster map has no compute node of that name.
    #[error("the cluster has no compute node '{0}'")]
    NoSuchNode(String),
    /// No node could be reached.
    #[error("{node} cannot be reached: {cause}")]
    Unreachable {
        /// Name and address of the node asked last.
        node: String,
        /// What went wrong with it.
        cause: String,
    },
    /// A peer's certificate or version, or ours, was not accepted.
    #[error("{node} was refused, or refused us: {cause}")]
    Refused {
        /// Name and address of the peer.
        node: String,
        /// The check that failed.
        cause: String,
    },
    /// No answer came in time.
    #[error("no answer within {} ms (asked {asked})", .deadline.as_millis())]
    DeadlineExceeded {
        /// Time that the call had.
        deadline: Duration,
        /// Nodes that were asked.
        asked: String,
    },
    /// The insert may or may not have taken effect: nobody could be asked in time. Inserting the same id again is
    /// safe: it answers `IdExists` if this one took effect.
    #[error("it is unknown whether id {id} was inserted into '{collection}': {cause}")]
    InsertUnknown {
        /// The collection.
        collection: String,
        /// The id.
        id: ExternalId,
        /// What cut the insert off.
        cause: Box<ClientError>,
    },
    /// A change of the cluster may or may not have taken effect.
    #[error("it is unknown whether {what} took effect: {cause}")]
    OutcomeUnknown {
        /// The change.
        what: String,
        /// What cut it off.
        cause: Box<ClientError>,
    },
    /// The call itself is wrong; nothing was sent.
    #[error("{0}")]
    BadRequest(String),
    /// The caller broke the call off.
    #[error("it was broken off")]
    Cancelled,
    /// A graph file that cannot be loaded.
    #[error("{0}")]
    GraphFile(String),
    /// A peer answered with something else than what was asked.
    #[error("{node} answered with something else than {expected}")]
    Protocol {
        /// The peer.
        node: String,
        /// Answer that was expected.
        expected: &'static str,
    },
}

impl ClientError {
    /// What kind of failure this is.
    pub fn code(&self) -> FaultCode {
        match self {
            Self::Fault { fault, .. } => fault.code,
            Self::NoOracle { .. } => FaultCode::NoOracle,
            Self::NoSuchNode(_) => FaultCode::NotFound,
            Self::NoComputeNode | Self::Unreachable { .. } => FaultCode::Unavailable,
            Self::Refused { .. } => FaultCode::Forbidden,
            Self::DeadlineExceeded { .. } => FaultCode::DeadlineExceeded,
            Self::InsertUnknown { cause, .. } | Self::OutcomeUnknown { cause, .. } => cause.code(),
            Self::BadRequest(_) | Self::GraphFile(_) => FaultCode::BadRequest,
            Self::Cancelled => FaultCode::Unavailable,
            Self::Protocol { .. } => FaultCode::Internal,
        }
    }

    /// Whether the call may have changed the cluster although it failed.
    pub fn outcome_is_unknown(&self) -> bool {
        matches!(self, Self::InsertUnknown { .. } | Self::OutcomeUnknown { .. })
    }
}
