//! Verbs over lanes: a session carried by a few ordered byte streams, whatever they run on. [`super::quic`] uses it;
//! the gather bench puts the same code on TCP.
//!
//! ```text
//!   callers ─► window ─► lane: out buffer ─► writer task ═══════► lane task ─► host
//!              (bytes)         calls table ◄─ reader task ◄═══════ (one writer of its stream)
//! ```
//!
//! A call is encoded straight into its lane's out buffer; the lane's writer sends everything that has gathered there
//! in one write. Answers come in any order over lanes, in order within one. Small calls go by the first lane, large
//! ones by the last, so that a bulk transfer does not stand before a hop.
//!
//! Invariant: a call holds its room in the window until its answer has come and was taken, also if nobody waits for
//! it any more; so what is buffered on either side is bounded by [`WINDOW_BYTES`] per session.

mod client;
mod server;

use std::future::Future;

use bytes::Bytes;

pub use client::{FramedVerbs, GreetError, greet};
pub use server::{HelloError, LaneError, serve_lane, take_hello};

/// Room for calls under way, in bytes of their larger direction.
pub const WINDOW_BYTES: usize = 16 << 20;
/// Granule of the window: the least that a call takes. Bounds the number of calls.
const WINDOW_UNIT: usize = 4096;
/// Calls larger than this, in either direction, go by the last lane.
const LARGE_CALL_BYTES: usize = 64 << 10;
/// Bytes of messages that may be on their way to a session that has not taken them.
const MESSAGE_WINDOW: usize = 2 * super::MESSAGE_BYTES_MAX;
/// Cost of a message beside its bytes in that window.
const MESSAGE_OVERHEAD: usize = 64;

/// Window units of a call.
fn cost(bytes: usize) -> u32 {
    bytes.div_ceil(WINDOW_UNIT).max(1) as u32
}

/// How many calls of `bytes` each may be under way at a time.
pub fn window_calls(bytes: usize) -> usize {
    WINDOW_BYTES / WINDOW_UNIT / cost(bytes) as usize
}

/// The receiving half of a lane.
pub trait Source: Send + 'static {
    /// The next bytes, in order; `None` at the end. Cancel-safe.
    fn next(&mut self) -> impl Future<Output = Result<Option<Bytes>, String>> + Send;
}

/// The sending half of a lane.
pub trait Sink: Send + 'static {
    /// Sends bytes; completes when the transport has taken them, which it does only as fast as the peer reads.
    fn send(&mut self, bytes: Bytes) -> impl Future<Output = Result<(), String>> + Send;
}
