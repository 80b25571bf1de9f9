//! Verbs: the only way to the memory of a memory node.
//!
//! One [`Verbs`] value is one access session on one memory node, what a queue pair is to RDMA. It is made by a
//! backend ([`local`] in the same process, [`quic`] over the network); when it is lost, its owner makes another.
//!
//! # Contract
//! The contract is the weakest backend's; callers may rely on this and on nothing more:
//!
//! - Only aligned 8-byte words are atomic. A longer READ may see some words before and some after a WRITE that
//!   runs beside it: what must not be torn carries a checksum.
//! - The parts of one WRITE batch land in any order. A batch is complete when its future is: after that every
//!   later verb, of any session, sees all of it.
//! - COMPARE_SWAP and FETCH_ADD are atomic among themselves and against READ and WRITE of the same word.
//! - Calls in flight together are not ordered. SENDs of one session arrive in the order in which their futures were
//!   first polled.
//! - Every call has a deadline and ends by it, with an answer or an error. After an error other than the typed
//!   refusals ([`VerbError::is_refusal`]) a WRITE, COMPARE_SWAP or FETCH_ADD may or may not have been applied.
//! - Dropping a future is safe at any time: buffers are owned, the verb may or may not be applied.
//! - Nothing is unbounded: a call that finds the session's window full waits, until its deadline at most.
//! - Every item names the epoch of its region as the caller knows it; the memory node refuses any other.
//! - A session has a lease, renewed by any verb, judged by the memory node's monotonic clock. After it every verb is
//!   refused with [`VerbError::LeaseExpired`], for good: a paused holder of a lock cannot overwrite its successor.

#[macro_use]
pub mod conformance;
pub mod frame;
pub mod framed;
pub mod host;
pub mod local;
pub mod memory;
pub mod quic;

use std::future::Future;
use std::sync::Arc;
use std::time::Instant;

use bytes::{Bytes, BytesMut};

use crate::ids::{Epoch, RegionId, RemotePtr, SessionId};

/// Largest READ reply or WRITE payload of one batch, in bytes. Callers split above it.
pub const BATCH_BYTES_MAX: usize = 4 << 20;
/// Most items in one batch.
pub const BATCH_ITEMS_MAX: usize = 65_536;
/// Largest SEND message in bytes.
pub const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// A run of READs of one length from one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadGroup {
    /// Region of every item.
    pub region: RegionId,
    /// Epoch of the region as the caller knows it.
    pub epoch: Epoch,
    /// Bytes of each item.
    pub len: u32,
    /// Number of items.
    pub count: u32,
}

/// A gather: many READs in one request. Items of equal region and length that are pushed one after another share
/// a group, and a group costs once on the wire.
#[derive(Clone, Debug, Default)]
pub struct ReadBatch {
    groups: Vec<ReadGroup>,
    offsets: Vec<u64>,
    reply_bytes: usize,
}

impl ReadBatch {
    /// An empty batch.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the read of `len` bytes at `at` (8-byte aligned); its bytes follow those of the items before it.
    pub fn push(&mut self, at: RemotePtr, epoch: Epoch, len: u32) {
        self.reply_bytes += len as usize;
        self.offsets.push(at.offset());
        match self.groups.last_mut() {
            Some(last) if last.region == at.region() && last.len == len && last.epoch == epoch => {
                last.count += 1
            }
            _ => self.groups.push(ReadGroup { region: at.region(), epoch, len, count: 1 }),
        }
    }

    /// The groups, in order.
    pub fn groups(&self) -> &[ReadGroup] {
        &self.groups
    }

    /// Offsets of all items, in order.
    pub fn offsets(&self) -> &[u64] {
        &self.offsets
    }

    /// Number of items.
    pub fn len(&self) -> usize {
        self.offsets.len()
    }

    /// Whether nothing was pushed.
    pub fn is_empty(&self) -> bool {
        self.offsets.is_empty()
    }

    /// Bytes of the reply's data.
    pub fn reply_bytes(&self) -> usize {
        self.reply_bytes
    }

    /// Forgets all items, keeps the capacity.
    pub fn clear(&mut self) {
        self.groups.clear();
        self.offsets.clear();
        self.reply_bytes = 0;
    }
}

/// One part of a WRITE batch: `len` bytes of the batch's data, to `at`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WritePart {
    /// Where to (8-byte aligned).
    pub at: RemotePtr,
    /// Epoch of the region as the caller knows it.
    pub epoch: Epoch,
    /// Bytes (a multiple of 8).
    pub len: u32,
}

/// Many WRITEs in one request.
#[derive(Clone, Debug, Default)]
pub struct WriteBatch {
    parts: Vec<WritePart>,
    data: BytesMut,
}

impl WriteBatch {
    /// An empty batch.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the write of `bytes` to `at`; both 8-byte aligned.
    pub fn push(&mut self, at: RemotePtr, epoch: Epoch, bytes: &[u8]) {
        self.push_with(at, epoch, bytes.len(), |out| out.copy_from_slice(bytes));
    }

    /// Adds the write of one word.
    pub fn push_word(&mut self, at: RemotePtr, epoch: Epoch, word: u64) {
        self.push(at, epoch, &word.to_le_bytes());
    }

    /// Adds the write of `len` bytes that `fill` puts in place (they start as zeros).
    pub fn push_with(&mut self, at: RemotePtr, epoch: Epoch, len: usize, fill: impl FnOnce(&mut [u8])) {
        let start = self.data.len();
        self.data.resize(start + len, 0);
        fill(&mut self.data[start..]);
        self.parts.push(WritePart {
            at,
            epoch,
            len: u32::try_from(len).expect("a batch is far below 4 GiB"),
        });
    }

    /// The parts, in order.
    pub fn parts(&self) -> &[WritePart] {
        &self.parts
    }

    /// The bytes of all parts, back to back.
    pub fn data(&self) -> &[u8] {
        &self.data
    }

    /// Number of parts.
    pub fn len(&self) -> usize {
        self.parts.len()
    }

    /// Whether nothing was pushed.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }
}

/// An aligned word of remote memory, with the epoch of its region as the caller knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WordAt {
    /// Address (8-byte aligned).
    pub at: RemotePtr,
    /// Epoch of the region.
    pub epoch: Epoch,
}

/// Bytes that a call put on the wire: whole frames, headers included; UDP and QUIC overhead excluded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrameBytes {
    /// Sent.
    pub request: u32,
    /// Received.
    pub reply: u32,
}

impl FrameBytes {
    /// Both directions.
    pub fn total(self) -> u64 {
        u64::from(self.request) + u64::from(self.reply)
    }
}

/// Answer to a READ batch.
#[derive(Clone, Debug)]
pub struct ReadReply {
    /// The items' bytes, back to back, in the order of the batch.
    pub data: Bytes,
    /// What it cost.
    pub frames: FrameBytes,
}

/// Why a verb was not answered, or was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VerbError {
    /// The region has moved on: fetch the map and try again.
    #[error("{region} is at {current}, the request named {named}")]
    StaleEpoch {
        /// The region.
        region: RegionId,
        /// Epoch in the request.
        named: Epoch,
        /// Epoch at the memory node.
        current: Epoch,
    },
    /// The memory node has not heard of this epoch yet: try again shortly.
    #[error("{region} is still at {current}, the request named {named}")]
    EpochAhead {
        /// The region.
        region: RegionId,
        /// Epoch in the request.
        named: Epoch,
        /// Epoch at the memory node.
        current: Epoch,
    },
    /// The content that the caller knew is gone (the memory node was restarted, or the region was given back).
    #[error("content of {region} is lost")]
    RegionLost {
        /// The region.
        region: RegionId,
    },
    /// The memory node does not host the region.
    #[error("{region} is not on this memory node")]
    NoSuchRegion {
        /// The region.
        region: RegionId,
    },
    /// The range leaves the region.
    #[error("{len} bytes at {at} leave the region ({region_bytes} bytes)")]
    OutOfBounds {
        /// Address.
        at: RemotePtr,
        /// Length.
        len: u64,
        /// Size of the region.
        region_bytes: u64,
    },
    /// The address, or the length of a WRITE, is not a multiple of 8.
    #[error("{len} bytes at {at}: addresses, and lengths of writes, are multiples of 8")]
    Misaligned {
        /// Address.
        at: RemotePtr,
        /// Length.
        len: u64,
    },
    /// The batch or message is larger than one frame may be.
    #[error("{what} of {given}: at most {max}")]
    TooLarge {
        /// What is too large.
        what: &'static str,
        /// Its size.
        given: usize,
        /// The bound.
        max: usize,
    },
    /// The memory node's processor did not take the message.
    #[error("{peer} refused the message: {why}")]
    MessageRefused {
        /// The memory node.
        peer: Arc<str>,
        /// Its reason.
        why: String,
    },
    /// The session's lease ran out; only a new session may go on.
    #[error("access lease on {peer} has expired")]
    LeaseExpired {
        /// The memory node.
        peer: Arc<str>,
    },
    /// The connection is gone.
    #[error("connection to {peer} lost: {why}")]
    ConnectionLost {
        /// The memory node.
        peer: Arc<str>,
        /// What the transport said.
        why: String,
    },
    /// No answer by the deadline.
    #[error("no answer from {peer} by the deadline (nothing heard for {silent_ms} ms)")]
    DeadlineExceeded {
        /// The memory node.
        peer: Arc<str>,
        /// Time since anything was received from it.
        silent_ms: u64,
    },
    /// The peer broke the protocol.
    #[error("{peer} sent {what}")]
    Protocol {
        /// The peer.
        peer: Arc<str>,
        /// What was wrong.
        what: String,
    },
}

impl VerbError {
    /// Whether the memory node refused the call before it did anything.
    pub fn is_refusal(&self) -> bool {
        !matches!(self, Self::ConnectionLost { .. } | Self::DeadlineExceeded { .. } | Self::Protocol { .. })
    }
}

/// One access session on one memory node. See the module's contract.
pub trait Verbs: Send + Sync + 'static {
    /// Name of the memory node, for messages.
    fn peer(&self) -> &Arc<str>;

    /// Number of this session on the memory node.
    fn session(&self) -> SessionId;

    /// Whether the session can no longer be used: make another.
    fn is_lost(&self) -> bool;

    /// Gathers all items of `batch` in one round trip.
    fn read(
        &self,
        batch: ReadBatch,
        deadline: Instant,
    ) -> impl Future<Output = Result<ReadReply, VerbError>> + Send;

    /// Writes all parts of `batch` in one round trip, in any order.
    fn write(
        &self,
        batch: WriteBatch,
        deadline: Instant,
    ) -> impl Future<Output = Result<FrameBytes, VerbError>> + Send;

    /// If the word is `expected`, makes it `new`. Returns the word as it was.
    fn compare_swap(
        &self,
        word: WordAt,
        expected: u64,
        new: u64,
        deadline: Instant,
    ) -> impl Future<Output = Result<u64, VerbError>> + Send;

    /// Adds `add` to the word, wrapping. Returns the word as it was.
    fn fetch_add(
        &self,
        word: WordAt,
        add: u64,
        deadline: Instant,
    ) -> impl Future<Output = Result<u64, VerbError>> + Send;

    /// Whether `session` may still use this memory node. `false` is final: what it had locked may be taken over.
    fn session_alive(
        &self,
        session: SessionId,
        deadline: Instant,
    ) -> impl Future<Output = Result<bool, VerbError>> + Send;

    /// Sends a message to the memory node's processor (two-sided).
    fn send(&self, message: Bytes, deadline: Instant) -> impl Future<Output = Result<(), VerbError>> + Send;

    /// Waits for the next message that the memory node sent to this session.
    fn recv(&self, deadline: Instant) -> impl Future<Output = Result<Bytes, VerbError>> + Send;
}
