//! Leased locks on words of remote memory.
//!
//! ```text
//! free ─ COMPARE_SWAP(0 → session << 32 | nonce) ─▶ held ─ COMPARE_SWAP(own word → 0) ─▶ free
//!   held by a session that the same memory node calls dead ─ COMPARE_SWAP(its word → own word) ─▶ taken over
//! ```
//!
//! Invariant: what a lock protects lies on the lock's own memory node, and its holder writes it over the session named
//! in the lock word alone. That memory node refuses every verb of a session that it has called dead, so a holder who
//! was paused cannot overwrite its successor.
//!
//! A holder that cannot tell whether its last write was applied does not release: the write may still be on its way. It
//! gives the session up instead, and the lock is free for taking over when the lease ends.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shine_common::ids::{ExternalId, RemotePtr, SessionId};
use shine_common::verbs::Verbs;
use shine_common::wire::{Fault, FaultCode};
use tracing::{error, info};

use crate::collection::Collection;
use crate::fabric::{Cost, Gather, Remedy, Retry, Session, Trouble, WriteSet, deadline_exceeded, jittered};
use crate::hnsw::search::ListRef;

/// Time that a holder has for each step, whatever deadline its caller has: a step that is begun is ended.
pub const HOLD_MAX: Duration = Duration::from_secs(5);
/// First and longest pause of a waiter.
const PAUSE: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(4));

/// What a lock protects, for messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protected {
    /// The chain of buckets that an id hashes to.
    Id(ExternalId),
    /// The entry point.
    EntryPoint,
    /// A list.
    List(ListRef),
}

impl fmt::Display for Protected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Id(id) => write!(f, "id {id}"),
            Self::EntryPoint => f.write_str("the entry point"),
            Self::List(list) => write!(f, "the level-{} list of {}", list.level, list.node),
        }
    }
}

/// A lock that is held. Dropped without [`Self::release`], it is released in the background.
pub struct Guard<V: Verbs> {
    collection: Arc<Collection<V>>,
    session: Session<V>,
    at: RemotePtr,
    holder: u64,
    is_held: bool,
    /// A write, or the taking itself, is out or its outcome is unknown.
    is_in_doubt: bool,
}

impl<V: Verbs> fmt::Debug for Guard<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Guard({} by {:#x})", self.at, self.holder)
    }
}

/// Takes the lock word at `at`; `what` names it for messages.
///
/// # Errors
/// If a living session holds it until the deadline, or the memory node fails.
pub async fn acquire<V: Verbs>(
    collection: &Arc<Collection<V>>,
    at: RemotePtr,
    what: Protected,
    deadline: Instant,
    cost: &mut Cost,
) -> Result<Guard<V>, Fault> {
    let fabric = collection.fabric();
    let mut retry = Retry::new(deadline);
    let mut pause = PAUSE.0;
    loop {
        let routes = collection.admit()?;
        let session = match fabric.session(&routes, at, deadline).await {
            Ok(session) => session,
            Err(trouble) => {
                retry.after(fabric, routes.epoch(), trouble, true).await?;
                continue;
            }
        };
        let holder = u64::from(session.id().0) << 32 | u64::from(fabric.nonce());
        let mut guard = Guard {
            collection: Arc::clone(collection),
            session,
            at,
            holder,
            is_held: false,
            is_in_doubt: false,
        };
        match guard.take(deadline, cost).await {
            Ok(None) => return Ok(guard),
            Ok(Some(Taken::Alive)) => {}
            // Nothing to wait for: the next round takes what has just become free.
            Ok(Some(Taken::Changed)) => continue,
            Err(trouble) => {
                retry.after(fabric, routes.epoch(), trouble, false).await?;
                continue;
            }
        }
        fabric.counters.lock_waits.add(1);
        let wait = jittered(pause);
        if Instant::now() + wait >= deadline {
            return Err(deadline_exceeded(format_args!("waiting for the lock of {what}, which others hold")));
        }
        tokio::time::sleep(wait).await;
        pause = (pause * 2).min(PAUSE.1);
    }
}

/// Why a lock was not to be had.
enum Taken {
    /// Its holder lives.
    Alive,
    /// It changed hands meanwhile.
    Changed,
}

impl<V: Verbs> Guard<V> {
    /// One try. `None` if the lock is now held.
    async fn take(&mut self, deadline: Instant, cost: &mut Cost) -> Result<Option<Taken>, Trouble> {
        let was = self.swap_lock(0, self.holder, cost).await?;
        if was == 0 {
            self.is_held = true;
            return Ok(None);
        }
        cost.rounds += 1;
        let other = SessionId((was >> 32) as u32);
        if self.session.is_alive(other, deadline).await? {
            return Ok(Some(Taken::Alive));
        }
        if self.swap_lock(was, self.holder, cost).await? != was {
            return Ok(Some(Taken::Changed));
        }
        self.is_held = true;
        self.collection.fabric().counters.lock_takeovers.add(1);
        info!(at = %self.at, from = format_args!("{was:#x}"), "lock of a dead session taken over");
        Ok(None)
    }

    /// COMPARE_SWAP of the lock word. Should its outcome stay unknown, the drop of the guard gives the session up.
    async fn swap_lock(&mut self, old: u64, new: u64, cost: &mut Cost) -> Result<u64, Trouble> {
        let routes = self.collection.admit()?;
        cost.rounds += 1;
        self.is_in_doubt = true;
        let fabric = Arc::clone(self.collection.fabric());
        let result = fabric
            .compare_swap_on(&self.session, &routes, self.at, old, new, Instant::now() + HOLD_MAX)
            .await;
        self.is_in_doubt = matches!(&result, Err(trouble) if trouble.remedy == Remedy::InDoubt);
        result
    }

    /// Reads records of the lock's memory node.
    pub(crate) async fn gather(&mut self, gather: &mut Gather, cost: &mut Cost) -> Result<(), Fault> {
        let deadline = Instant::now() + HOLD_MAX;
        let mut retry = Retry::new(deadline);
        loop {
            let routes = self.collection.admit()?;
            let fabric = self.collection.fabric();
            match fabric.gather_on(&self.session, &routes, gather, deadline, cost).await {
                Ok(()) => return Ok(()),
                Err(trouble) => self.repeat(&mut retry, routes.epoch(), trouble).await?,
            }
        }
    }

    /// Writes what the lock protects.
    pub(crate) async fn write(&mut self, set: &WriteSet, cost: &mut Cost) -> Result<(), Fault> {
        let deadline = Instant::now() + HOLD_MAX;
        let mut retry = Retry::new(deadline);
        loop {
            let routes = self.collection.admit()?;
            self.is_in_doubt = true;
            let fabric = Arc::clone(self.collection.fabric());
            let result = fabric.write_on(&self.session, &routes, set, deadline, cost).await;
            match result {
                Ok(()) => {
                    self.is_in_doubt = false;
                    return Ok(());
                }
                Err(trouble) => {
                    self.is_in_doubt = trouble.remedy == Remedy::InDoubt;
                    self.repeat(&mut retry, routes.epoch(), trouble).await?;
                }
            }
        }
    }

    /// COMPARE_SWAP of a word that the lock protects; returns the word as it was.
    pub(crate) async fn compare_swap(
        &mut self,
        at: RemotePtr,
        old: u64,
        new: u64,
        cost: &mut Cost,
    ) -> Result<u64, Fault> {
        let deadline = Instant::now() + HOLD_MAX;
        let mut retry = Retry::new(deadline);
        loop {
            let routes = self.collection.admit()?;
            cost.rounds += 1;
            self.is_in_doubt = true;
            let fabric = Arc::clone(self.collection.fabric());
            match fabric.compare_swap_on(&self.session, &routes, at, old, new, deadline).await {
                Ok(was) => {
                    self.is_in_doubt = false;
                    return Ok(was);
                }
                Err(trouble) => {
                    self.is_in_doubt = trouble.remedy == Remedy::InDoubt;
                    self.repeat(&mut retry, routes.epoch(), trouble).await?;
                }
            }
        }
    }

    /// Whether `at` lies on the lock's own memory node, so that the lock's fence reaches it.
    pub(crate) fn covers(&self, at: RemotePtr) -> bool {
        self.collection.admit().is_ok_and(|routes| routes.covers(&self.session, at))
    }

    /// Whether this guard still holds the lock, as the memory node says now.
    pub(crate) async fn is_held(&mut self, cost: &mut Cost) -> Result<bool, Fault> {
        Ok(self.compare_swap(self.at, self.holder, self.holder, cost).await? == self.holder)
    }

    /// Repeats what was refused under an old map; a refused lease is the end of this guard.
    async fn repeat(
        &self,
        retry: &mut Retry,
        used: shine_common::ids::Epoch,
        trouble: Trouble,
    ) -> Result<(), Fault> {
        if trouble.remedy == Remedy::NewSession {
            return Err(Fault::new(
                FaultCode::Unavailable,
                format!("{} while its lock was held: try again", trouble.fault.message),
            ));
        }
        retry.after(self.collection.fabric(), used, trouble, false).await
    }

    /// Gives the lock back.
    ///
    /// # Errors
    /// If it may have been taken over before: what it protects elsewhere than on its own memory node is then in doubt.
    pub async fn release(mut self, cost: &mut Cost) -> Result<(), Fault> {
        self.is_held = false;
        let was = self.compare_swap(self.at, self.holder, 0, cost).await?;
        if was != self.holder {
            error!(at = %self.at, holder = self.holder, was, "a lock was taken from a living session");
            return Err(Fault::new(
                FaultCode::Internal,
                format!("lock at {} was taken from a living session", self.at),
            ));
        }
        Ok(())
    }
}

impl<V: Verbs> Drop for Guard<V> {
    fn drop(&mut self) {
        if self.is_in_doubt {
            self.session.discard("a write under a lock is in doubt");
        } else if self.is_held {
            self.is_held = false;
            let guard = Self {
                collection: Arc::clone(&self.collection),
                session: self.session.clone(),
                at: self.at,
                holder: self.holder,
                is_held: false,
                is_in_doubt: false,
            };
            match tokio::runtime::Handle::try_current() {
                Ok(runtime) => drop(runtime.spawn(async move {
                    // On failure the lease ends what is left.
                    if let Err(fault) = guard.release(&mut Cost::default()).await {
                        info!(%fault, "lock was not released");
                    }
                })),
                Err(_) => self.session.discard("a lock was held at the end"),
            }
        }
    }
}
