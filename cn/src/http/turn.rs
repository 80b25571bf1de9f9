//! Whose turn it is on a connection, so that in a full house those leave who keep the node waiting.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// Since when, in milliseconds of the connection's life, if it is the node's turn.
const OURS: u64 = u64::MAX;

/// Whose turn it is on one connection. Written by its task, read by the one that accepts.
#[derive(Debug)]
pub(super) struct Turn {
    start: Instant,
    /// Only ever compared with others, so no order is asked of it.
    peers_since_ms: AtomicU64,
    leave: Notify,
}

impl Turn {
    /// A connection that has just been accepted: its peer is to speak.
    pub(super) fn new() -> Self {
        Self { start: Instant::now(), peers_since_ms: AtomicU64::new(0), leave: Notify::new() }
    }

    /// The node is at work for the peer.
    pub(super) fn is_ours(&self) {
        self.peers_since_ms.store(OURS, Ordering::Relaxed);
    }

    /// The peer is to send, or to take something, from now on.
    pub(super) fn is_peers(&self) {
        let ms = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(OURS - 1);
        self.peers_since_ms.store(ms, Ordering::Relaxed);
    }

    /// The peer has taken something.
    pub(super) fn goes_on(&self) {
        if self.peers_since_ms.load(Ordering::Relaxed) != OURS {
            self.is_peers();
        }
    }

    /// Since when the peer has been waited for; `None` if it is not.
    pub(super) fn peers_since(&self) -> Option<Instant> {
        match self.peers_since_ms.load(Ordering::Relaxed) {
            OURS => None,
            ms => Some(self.start + Duration::from_millis(ms)),
        }
    }

    /// Asks the connection to make room.
    pub(super) fn end(&self) {
        self.leave.notify_one();
    }

    /// Ready once it has been asked to.
    pub(super) async fn ended(&self) {
        self.leave.notified().await;
    }
}
