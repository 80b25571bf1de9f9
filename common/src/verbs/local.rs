//! Verbs in the same process: the [`Host`] is called directly. Same contract, same refusals, same deadlines as over
//! a network; frames cost nothing.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use tokio::sync::{Mutex, Notify, Semaphore, SemaphorePermit};

use super::host::{Host, OpenError, Session, check_message_size, check_read_size, check_write_size};
use super::{FrameBytes, ReadBatch, ReadReply, VerbError, Verbs, WordAt, WriteBatch};
use crate::ids::SessionId;

/// Calls of one session that are under way at a time; further ones wait.
pub const WINDOW_CALLS: usize = 64;

/// An access session on a [`Host`] in the same process.
#[derive(Debug)]
pub struct LocalVerbs {
    host: Arc<Host>,
    session: Arc<Session>,
    window: Semaphore,
    /// Keeps the order of SENDs; waiters are served first come, first served.
    sends: Mutex<()>,
    started: Instant,
    /// When a verb was last answered, in nanoseconds after `started`.
    heard_ns: AtomicU64,
    is_cut: AtomicBool,
    cut: Notify,
}

impl LocalVerbs {
    /// Opens a session on `host` for `client`. Its lease runs until it is dropped or disconnected: whatever pauses
    /// this process pauses the judge of the lease with it.
    ///
    /// # Errors
    /// If the host opens no more sessions.
    pub fn connect(host: &Arc<Host>, client: &str) -> Result<Self, OpenError> {
        let verbs = Self::connect_leased(host, client)?;
        verbs.session.hold();
        Ok(verbs)
    }

    /// As [`Self::connect`], with a lease that ends by the host's clock unless a verb renews it.
    ///
    /// # Errors
    /// If the host opens no more sessions.
    pub fn connect_leased(host: &Arc<Host>, client: &str) -> Result<Self, OpenError> {
        Ok(Self {
            session: host.open_session(client)?,
            host: Arc::clone(host),
            window: Semaphore::new(WINDOW_CALLS),
            sends: Mutex::new(()),
            started: Instant::now(),
            heard_ns: AtomicU64::new(0),
            is_cut: AtomicBool::new(false),
            cut: Notify::new(),
        })
    }

    /// Calls under way.
    pub fn in_flight(&self) -> usize {
        WINDOW_CALLS - self.window.available_permits()
    }

    /// Loses the connection, as far as there is one: every call under way and to come ends with
    /// [`VerbError::ConnectionLost`].
    pub fn disconnect(&self) {
        self.is_cut.store(true, Ordering::SeqCst);
        self.cut.notify_waiters();
        self.host.end_session(&self.session);
    }

    async fn call<T>(
        &self,
        deadline: Instant,
        execute: impl FnOnce(&Host, &Arc<Session>) -> Result<T, VerbError>,
    ) -> Result<T, VerbError> {
        let _permit = self.enter(deadline).await?;
        let outcome = execute(&self.host, &self.session);
        self.heard_ns.store(self.started.elapsed().as_nanos() as u64, Ordering::Relaxed);
        outcome
    }

    /// Waits for room in the window, and for the host to take verbs.
    async fn enter(&self, deadline: Instant) -> Result<SemaphorePermit<'_>, VerbError> {
        if self.is_cut.load(Ordering::SeqCst) {
            return Err(self.lost());
        }
        if Instant::now() >= deadline {
            return Err(self.late());
        }
        match self.window.try_acquire() {
            Ok(permit) if !self.host.is_paused() => Ok(permit),
            Ok(permit) => {
                self.wait(deadline, self.host.running()).await?;
                Ok(permit)
            }
            Err(_) => {
                let admitted = async {
                    let permit = self.window.acquire().await.expect("the window is never closed");
                    self.host.running().await;
                    permit
                };
                self.wait(deadline, admitted).await
            }
        }
    }

    async fn wait<T>(&self, deadline: Instant, what: impl Future<Output = T>) -> Result<T, VerbError> {
        let cut = async {
            loop {
                let cut = self.cut.notified();
                if self.is_cut.load(Ordering::SeqCst) {
                    return;
                }
                cut.await;
            }
        };
        tokio::select! {
            biased;
            () = cut => Err(self.lost()),
            done = tokio::time::timeout_at(deadline.into(), what) => done.map_err(|_| self.late()),
        }
    }

    fn late(&self) -> VerbError {
        let now_ns = self.started.elapsed().as_nanos() as u64;
        let silent_ns = now_ns.saturating_sub(self.heard_ns.load(Ordering::Relaxed));
        VerbError::DeadlineExceeded { peer: Arc::clone(self.host.name()), silent_ms: silent_ns / 1_000_000 }
    }

    fn lost(&self) -> VerbError {
        VerbError::ConnectionLost { peer: Arc::clone(self.host.name()), why: "disconnected".into() }
    }
}

impl Drop for LocalVerbs {
    fn drop(&mut self) {
        self.host.end_session(&self.session);
    }
}

impl Verbs for LocalVerbs {
    fn peer(&self) -> &Arc<str> {
        self.host.name()
    }

    fn session(&self) -> SessionId {
        self.session.id()
    }

    fn is_lost(&self) -> bool {
        self.is_cut.load(Ordering::SeqCst) || self.host.is_over(&self.session)
    }

    async fn read(&self, batch: ReadBatch, deadline: Instant) -> Result<ReadReply, VerbError> {
        check_read_size(batch.groups(), batch.len())?;
        self.call(deadline, |host, session| {
            let mut data = BytesMut::with_capacity(batch.reply_bytes());
            host.read(session, batch.groups(), batch.offsets(), &mut data)?;
            Ok(ReadReply { data: data.freeze(), frames: FrameBytes::default() })
        })
        .await
    }

    async fn write(&self, batch: WriteBatch, deadline: Instant) -> Result<FrameBytes, VerbError> {
        check_write_size(batch.parts(), batch.data().len())?;
        self.call(deadline, |host, session| host.write(session, batch.parts(), batch.data())).await?;
        Ok(FrameBytes::default())
    }

    async fn compare_swap(
        &self,
        word: WordAt,
        expected: u64,
        new: u64,
        deadline: Instant,
    ) -> Result<u64, VerbError> {
        self.call(deadline, |host, session| host.compare_swap(session, word, expected, new)).await
    }

    async fn fetch_add(&self, word: WordAt, add: u64, deadline: Instant) -> Result<u64, VerbError> {
        self.call(deadline, |host, session| host.fetch_add(session, word, add)).await
    }

    async fn session_alive(&self, session: SessionId, deadline: Instant) -> Result<bool, VerbError> {
        self.call(deadline, |host, asker| host.session_alive(asker, session)).await
    }

    async fn send(&self, message: Bytes, deadline: Instant) -> Result<(), VerbError> {
        check_message_size(message.len())?;
        let _in_order = match self.sends.try_lock() {
            Ok(turn) => turn,
            Err(_) => self.wait(deadline, self.sends.lock()).await?,
        };
        self.call(deadline, |host, session| host.message(session, message)).await
    }

    async fn recv(&self, deadline: Instant) -> Result<Bytes, VerbError> {
        loop {
            // Waiting for a message is no verb and takes no room in the window; taking one is, and renews the lease.
            self.call(deadline, |host, session| host.renew(session)).await?;
            if let Some(message) = self.session.take_message() {
                return Ok(message);
            }
            self.wait(deadline, self.session.message_ready()).await?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::conformance::Backend;
    use super::*;

    struct Local;

    impl Backend for Local {
        type Session = LocalVerbs;

        async fn connect(&self, host: &Arc<Host>, client: &str) -> LocalVerbs {
            LocalVerbs::connect_leased(host, client).expect("room for a session")
        }

        async fn cut(&self, session: &LocalVerbs) {
            session.disconnect();
        }

        fn in_flight(&self, session: &LocalVerbs) -> usize {
            session.in_flight()
        }

        fn window(&self, _bytes: usize) -> usize {
            WINDOW_CALLS
        }
    }

    verbs_conformance_tests!(Local);
}
