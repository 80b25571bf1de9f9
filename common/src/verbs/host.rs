//! A memory node without a network: regions under epochs, access sessions under leases, and the verbs executed on
//! them. Every backend ends here.
//!
//! ```text
//!   session ──► lease ──► region: executor lock ──► epoch ──► range ──► words of memory
//! ```
//!
//! Invariants:
//! - A region has one executor of verbs at a time: its lock is held over the checks *and* the access. So a region's
//!   epoch never changes under a verb, and once [`Host::session_alive`] has said `false`, whoever then gets to a
//!   region finds every verb of that session there finished and no other to come.
//! - A verb that is refused has changed nothing, also where it names several regions.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use bytes::{Bytes, BytesMut};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use super::memory::{Pages, RegionMemory};
use super::{BATCH_BYTES_MAX, BATCH_ITEMS_MAX, MESSAGE_BYTES_MAX, ReadGroup, VerbError, WordAt, WritePart};
use crate::ids::{Epoch, Incarnation, RegionId, RemotePtr, SessionId};

/// Records that a gather prefetches ahead of the one it copies.
const PREFETCH_AHEAD: usize = 4;

/// Settings of a [`Host`].
#[derive(Clone, Debug)]
pub struct HostOptions {
    /// Lease of an access session.
    pub lease: Duration,
    /// What leases are judged by.
    pub clock: Clock,
    /// Most sessions with a running lease.
    pub sessions_max: usize,
    /// Most messages that wait for one session's RECV.
    pub inbox_messages_max: usize,
    /// Most bytes of such messages.
    pub inbox_bytes_max: usize,
}

impl Default for HostOptions {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(3),
            clock: Clock::monotonic(),
            sessions_max: 4096,
            inbox_messages_max: 1024,
            inbox_bytes_max: 4 * MESSAGE_BYTES_MAX,
        }
    }
}

/// Time as leases see it.
#[derive(Clone, Debug)]
pub enum Clock {
    /// The machine's monotonic clock, counted from here.
    Monotonic(Instant),
    /// Nanoseconds that a test moves by hand.
    Manual(Arc<AtomicU64>),
}

impl Clock {
    /// The machine's monotonic clock.
    pub fn monotonic() -> Self {
        Self::Monotonic(Instant::now())
    }

    /// A clock that stands still until [`Self::advance`].
    pub fn manual() -> Self {
        Self::Manual(Arc::new(AtomicU64::new(0)))
    }

    /// Moves a manual clock on.
    ///
    /// # Panics
    /// If this is the machine's clock.
    pub fn advance(&self, by: Duration) {
        match self {
            Self::Manual(now) => now.fetch_add(by.as_nanos() as u64, Ordering::SeqCst),
            Self::Monotonic(_) => panic!("the machine's clock moves by itself"),
        };
    }

    #[inline]
    fn now_ns(&self) -> u64 {
        match self {
            Self::Monotonic(start) => start.elapsed().as_nanos() as u64,
            Self::Manual(now) => now.load(Ordering::SeqCst),
        }
    }
}

/// One access session: what a compute node has on a memory node.
#[derive(Debug)]
pub struct Session {
    id: SessionId,
    client: Arc<str>,
    /// End of the lease on the host's clock; 0 once it is over, and then for good.
    expires_ns: AtomicU64,
    inbox: Mutex<Inbox>,
    inbox_filled: Notify,
}

#[derive(Debug, Default)]
struct Inbox {
    messages: VecDeque<Bytes>,
    bytes: usize,
}

impl Session {
    /// Its number.
    pub fn id(&self) -> SessionId {
        self.id
    }

    /// Who opened it.
    pub fn client(&self) -> &Arc<str> {
        &self.client
    }

    /// Takes the oldest message that was pushed to the session, if any.
    pub fn take_message(&self) -> Option<Bytes> {
        let mut inbox = self.inbox.lock();
        let message = inbox.messages.pop_front()?;
        inbox.bytes -= message.len();
        Some(message)
    }

    /// Completes when a message is there to take. Cancel-safe; for one waiter at a time.
    pub async fn message_ready(&self) {
        loop {
            // Registered before the look, so that a push in between wakes it.
            let filled = self.inbox_filled.notified();
            if !self.inbox.lock().messages.is_empty() {
                return;
            }
            filled.await;
        }
    }

    /// Lets the lease run until the session is ended.
    pub(super) fn hold(&self) {
        self.expires_ns.store(u64::MAX, Ordering::Release);
    }

    /// Renews the lease if it is still running.
    #[inline]
    fn renew(&self, now_ns: u64, lease_ns: u64) -> bool {
        let mut expires = self.expires_ns.load(Ordering::Acquire);
        loop {
            if !Self::runs(expires, now_ns) {
                return self.end_expired(expires, now_ns);
            }
            let renewed = expires.max(now_ns + lease_ns);
            match self.expires_ns.compare_exchange_weak(expires, renewed, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => return true,
                Err(changed) => expires = changed,
            }
        }
    }

    /// Whether the lease runs; if it has run out, this makes it final.
    fn is_alive(&self, now_ns: u64) -> bool {
        let expires = self.expires_ns.load(Ordering::Acquire);
        Self::runs(expires, now_ns) || self.end_expired(expires, now_ns)
    }

    fn runs(expires_ns: u64, now_ns: u64) -> bool {
        expires_ns != 0 && now_ns < expires_ns
    }

    /// Puts the end of a lease on record. A renewal that got in first, with an earlier reading of the clock, wins:
    /// then it is alive, and `true`.
    fn end_expired(&self, mut expires: u64, now_ns: u64) -> bool {
        while !Self::runs(expires, now_ns) {
            if expires == 0 {
                return false;
            }
            match self.expires_ns.compare_exchange(expires, 0, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return false,
                Err(changed) => expires = changed,
            }
        }
        true
    }
}

/// A region that a host serves.
struct Region {
    id: RegionId,
    memory: RegionMemory,
    /// The executor lock, around what verbs are checked against.
    epochs: Mutex<Epochs>,
}

#[derive(Clone, Copy, Debug)]
struct Epochs {
    current: Epoch,
    born: Epoch,
    /// The region was given up; who still holds it from before finds this.
    is_removed: bool,
}

/// A region's state, for reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionStatus {
    /// The region.
    pub id: RegionId,
    /// Present epoch.
    pub epoch: Epoch,
    /// Epoch at which its content began.
    pub born: Epoch,
    /// Size.
    pub bytes: u64,
    /// Pages it lies in.
    pub pages: Pages,
}

/// Why a region could not be added or changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegionError {
    /// It is there already.
    #[error("{0} is on this memory node already")]
    Exists(RegionId),
    /// It is not there.
    #[error("{0} is not on this memory node")]
    Missing(RegionId),
}

/// Why no session was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// Too many leases are running.
    #[error("{0} access sessions are open, which is the most")]
    TooMany(usize),
    /// Every session number of this incarnation was used.
    #[error("all session numbers of this incarnation are used up: restart the memory node")]
    NumbersExhausted,
}

/// Why a message was not queued for a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    /// The session has too much waiting: it reads too slowly, or not at all. The message was not queued.
    #[error("inbox of {0} is full")]
    InboxFull(SessionId),
    /// The message is larger than [`MESSAGE_BYTES_MAX`].
    #[error("message of {0} bytes: at most {MESSAGE_BYTES_MAX}")]
    TooLarge(usize),
    /// The session is over.
    #[error("{0} is over")]
    SessionOver(SessionId),
}

/// Takes what sessions SEND to the memory node's processor. Called in the order of a session's SENDs, on the thread
/// that serves it: it must not block.
pub trait MessageHandler: Send + Sync {
    /// Takes a message.
    ///
    /// # Errors
    /// Why it is refused; the sender gets the text.
    fn message(&self, host: &Host, from: &Arc<Session>, message: Bytes) -> Result<(), String>;
}

/// Called in the middle of each READ of two words or more, with the region's executor free.
type MidRead = dyn Fn(&Host) + Send + Sync;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// What a host has done, cumulative.
        #[derive(Debug, Default)]
        pub struct Counters { $($(#[$doc])* pub $name: AtomicU64),* }

        impl Counters {
            /// All counters by name.
            pub fn snapshot(&self) -> Vec<(String, u64)> {
                vec![$((stringify!($name).to_owned(), self.$name.load(Ordering::Relaxed))),*]
            }
        }
    };
}

counters! {
    /// READ batches executed.
    reads,
    /// Items in them.
    read_items,
    /// Bytes in them.
    read_bytes,
    /// WRITE batches executed.
    writes,
    /// Bytes in them.
    write_bytes,
    /// COMPARE_SWAPs executed.
    compare_swaps,
    /// FETCH_ADDs executed.
    fetch_adds,
    /// Messages taken from sessions.
    messages_in,
    /// Messages pushed to sessions.
    messages_out,
    /// Messages not pushed since an inbox was full.
    inbox_overflows,
    /// Verbs refused, for whatever reason.
    refusals,
    /// Sessions opened.
    sessions_opened,
    /// Sessions whose lease ran out or which were ended.
    sessions_over,
}

/// One memory node: regions, sessions, and the executor of their verbs.
pub struct Host {
    name: Arc<str>,
    incarnation: Incarnation,
    options: HostOptions,
    lease_ns: u64,
    /// By id. Replaced as a whole when a region is added.
    regions: ArcSwap<Vec<Arc<Region>>>,
    regions_change: Mutex<()>,
    sessions: Mutex<HashMap<SessionId, Arc<Session>>>,
    session_last: AtomicU32,
    handler: Mutex<Option<Arc<dyn MessageHandler>>>,
    counters: Counters,
    paused: AtomicBool,
    resumed: Notify,
    mid_read: ArcSwap<Option<Box<MidRead>>>,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host")
            .field("name", &self.name)
            .field("incarnation", &self.incarnation)
            .field("regions", &self.regions())
            .finish_non_exhaustive()
    }
}

impl Host {
    /// A memory node with no regions yet.
    pub fn new(name: impl Into<Arc<str>>, incarnation: Incarnation, options: HostOptions) -> Arc<Self> {
        Arc::new(Self {
            name: name.into(),
            incarnation,
            lease_ns: u64::try_from(options.lease.as_nanos())
                .expect("a lease is shorter than 584 years")
                .max(1),
            options,
            regions: ArcSwap::default(),
            regions_change: Mutex::default(),
            sessions: Mutex::default(),
            session_last: AtomicU32::new(0),
            handler: Mutex::default(),
            counters: Counters::default(),
            paused: AtomicBool::new(false),
            resumed: Notify::new(),
            mid_read: ArcSwap::default(),
        })
    }

    /// Name of the memory node.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Its life.
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// Lease of access sessions.
    pub fn lease(&self) -> Duration {
        self.options.lease
    }

    /// What it has done.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    // ------------------------------------------------------------------------------------------------ regions

    /// Serves one more region.
    ///
    /// # Errors
    /// If it is served already.
    pub fn add_region(
        &self,
        id: RegionId,
        epoch: Epoch,
        born: Epoch,
        memory: RegionMemory,
    ) -> Result<(), RegionError> {
        let _one_at_a_time = self.regions_change.lock();
        let mut regions = Vec::clone(&self.regions.load());
        let Err(at) = regions.binary_search_by_key(&id, |r| r.id) else {
            return Err(RegionError::Exists(id));
        };
        let epochs = Mutex::new(Epochs { current: epoch, born, is_removed: false });
        regions.insert(at, Arc::new(Region { id, memory, epochs }));
        self.regions.store(Arc::new(regions));
        Ok(())
    }

    /// Gives a region up, content and all. When this returns, no verb on it is under way or will be executed.
    ///
    /// # Errors
    /// If the region is not here.
    pub fn remove_region(&self, id: RegionId) -> Result<(), RegionError> {
        let _one_at_a_time = self.regions_change.lock();
        let mut regions = Vec::clone(&self.regions.load());
        let Ok(at) = regions.binary_search_by_key(&id, |r| r.id) else {
            return Err(RegionError::Missing(id));
        };
        let region = regions.remove(at);
        self.regions.store(Arc::new(regions));
        region.epochs.lock().is_removed = true;
        Ok(())
    }

    /// Moves a region on to `epoch`; an older one than it has is ignored. When this returns, no verb that named an
    /// older epoch is under way or will be executed.
    ///
    /// # Errors
    /// If the region is not here.
    pub fn set_epoch(&self, id: RegionId, epoch: Epoch, born: Epoch) -> Result<(), RegionError> {
        let region = self.region(id).ok_or(RegionError::Missing(id))?;
        let mut epochs = region.epochs.lock();
        if epoch > epochs.current {
            *epochs = Epochs { current: epoch, born, is_removed: false };
        }
        Ok(())
    }

    /// Empties a region: every word becomes zero, and its content begins at `epoch`. A no-op if the region is past
    /// that epoch, or was emptied under it before.
    ///
    /// # Errors
    /// If the region is not here.
    pub fn reset_region(&self, id: RegionId, epoch: Epoch, born: Epoch) -> Result<(), RegionError> {
        let region = self.region(id).ok_or(RegionError::Missing(id))?;
        let mut epochs = region.epochs.lock();
        if epoch > epochs.current {
            region.memory.zero();
            *epochs = Epochs { current: epoch, born, is_removed: false };
        }
        Ok(())
    }

    /// All regions, by id.
    pub fn regions(&self) -> Vec<RegionStatus> {
        self.regions
            .load()
            .iter()
            .map(|region| {
                let epochs = *region.epochs.lock();
                RegionStatus {
                    id: region.id,
                    epoch: epochs.current,
                    born: epochs.born,
                    bytes: region.memory.bytes(),
                    pages: region.memory.pages(),
                }
            })
            .collect()
    }

    fn region(&self, id: RegionId) -> Option<Arc<Region>> {
        let regions = self.regions.load();
        regions.binary_search_by_key(&id, |r| r.id).ok().map(|at| Arc::clone(&regions[at]))
    }

    // ----------------------------------------------------------------------------------------------- sessions

    /// Opens an access session with a fresh lease.
    ///
    /// # Errors
    /// If too many leases are running, or the session numbers of this incarnation are used up.
    pub fn open_session(&self, client: impl Into<Arc<str>>) -> Result<Arc<Session>, OpenError> {
        let now = self.options.clock.now_ns();
        let mut sessions = self.sessions.lock();
        if sessions.len() >= self.options.sessions_max {
            let before = sessions.len();
            sessions.retain(|_, session| session.is_alive(now));
            self.counters.sessions_over.fetch_add((before - sessions.len()) as u64, Ordering::Relaxed);
            if sessions.len() >= self.options.sessions_max {
                return Err(OpenError::TooMany(self.options.sessions_max));
            }
        }
        let id =
            self.session_last.load(Ordering::Relaxed).checked_add(1).ok_or(OpenError::NumbersExhausted)?;
        self.session_last.store(id, Ordering::Relaxed);
        let session = Arc::new(Session {
            id: SessionId(id),
            client: client.into(),
            expires_ns: AtomicU64::new(now + self.lease_ns),
            inbox: Mutex::default(),
            inbox_filled: Notify::new(),
        });
        sessions.insert(session.id, Arc::clone(&session));
        self.counters.sessions_opened.fetch_add(1, Ordering::Relaxed);
        Ok(session)
    }

    /// Ends a session at once, for good.
    pub fn end_session(&self, session: &Session) {
        session.expires_ns.store(0, Ordering::Release);
        if self.sessions.lock().remove(&session.id).is_some() {
            self.counters.sessions_over.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Number of sessions that have not been found to be over.
    pub fn session_count(&self) -> usize {
        self.sessions.lock().len()
    }

    /// Whether the session can issue no more verbs.
    pub fn is_over(&self, session: &Session) -> bool {
        !session.is_alive(self.options.clock.now_ns())
    }

    /// Renews the session's lease: what every verb does first.
    ///
    /// # Errors
    /// If the lease is over.
    #[inline]
    pub fn renew(&self, session: &Session) -> Result<(), VerbError> {
        if session.renew(self.options.clock.now_ns(), self.lease_ns) {
            return Ok(());
        }
        self.end_session(session);
        Err(VerbError::LeaseExpired { peer: Arc::clone(&self.name) })
    }

    /// Whether the session `of` may still issue verbs. `false` is final. Renews the asker's lease.
    ///
    /// # Errors
    /// If the asker's own lease is over.
    pub fn session_alive(&self, asker: &Session, of: SessionId) -> Result<bool, VerbError> {
        self.counted(self.renew(asker))?;
        let Some(session) = self.sessions.lock().get(&of).cloned() else { return Ok(false) };
        let alive = session.is_alive(self.options.clock.now_ns());
        if !alive {
            self.end_session(&session);
        }
        Ok(alive)
    }

    // ------------------------------------------------------------------------------------------------- verbs

    /// READ: appends the bytes of all items to `out`, in order. `offsets` holds the groups' items, group by group.
    ///
    /// # Errors
    /// A refusal; `out` may then hold a part of the bytes.
    pub fn read(
        &self,
        session: &Session,
        groups: &[ReadGroup],
        offsets: &[u64],
        out: &mut BytesMut,
    ) -> Result<(), VerbError> {
        let bytes_before = out.len();
        self.counted(self.read_groups(session, groups, offsets, out))?;
        self.counters.reads.fetch_add(1, Ordering::Relaxed);
        self.counters.read_items.fetch_add(offsets.len() as u64, Ordering::Relaxed);
        self.counters.read_bytes.fetch_add((out.len() - bytes_before) as u64, Ordering::Relaxed);
        Ok(())
    }

    fn read_groups(
        &self,
        session: &Session,
        groups: &[ReadGroup],
        mut offsets: &[u64],
        out: &mut BytesMut,
    ) -> Result<(), VerbError> {
        if groups.is_empty() {
            return self.renew(session);
        }
        check_read_size(groups, offsets.len())?;
        let regions = self.regions.load();
        for group in groups {
            let (of_group, rest) = offsets.split_at(group.count as usize);
            offsets = rest;
            let (region, mut executor) = self.enter(&regions, session, group.region, group.epoch)?;
            for offset in of_group {
                check_range(region, *offset, u64::from(group.len))?;
            }
            let len = group.len as usize;
            for offset in &of_group[..of_group.len().min(PREFETCH_AHEAD)] {
                region.memory.prefetch(*offset, len);
            }
            for (at, offset) in of_group.iter().enumerate() {
                if let Some(ahead) = of_group.get(at + PREFETCH_AHEAD) {
                    region.memory.prefetch(*ahead, len);
                }
                self.read_item(region, &mut executor, *offset, len, out);
            }
        }
        Ok(())
    }

    #[inline]
    fn read_item(
        &self,
        region: &Region,
        executor: &mut MutexGuard<'_, Epochs>,
        offset: u64,
        len: usize,
        out: &mut BytesMut,
    ) {
        let mid_read = self.mid_read.load();
        match &**mid_read {
            Some(hook) if len > 8 => {
                let half = len / 16 * 8;
                region.memory.append_to(offset, half, out);
                MutexGuard::unlocked(executor, || hook(self));
                region.memory.append_to(offset + half as u64, len - half, out);
            }
            _ => region.memory.append_to(offset, len, out),
        }
    }

    /// WRITE: stores all parts; `data` holds their bytes back to back.
    ///
    /// # Errors
    /// A refusal; nothing was written.
    pub fn write(&self, session: &Session, parts: &[WritePart], data: &[u8]) -> Result<(), VerbError> {
        self.counted(self.write_parts(session, parts, data))?;
        self.counters.writes.fetch_add(1, Ordering::Relaxed);
        self.counters.write_bytes.fetch_add(data.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn write_parts(&self, session: &Session, parts: &[WritePart], data: &[u8]) -> Result<(), VerbError> {
        if parts.is_empty() {
            return self.renew(session);
        }
        check_write_size(parts, data.len())?;
        // All executors are held before anything is written, so that a refusal refuses the whole batch; taken in
        // the order of ids, so that two batches never wait for each other.
        let regions = self.regions.load();
        let mut ids: Vec<_> = parts.iter().map(|part| (part.at.region(), part.epoch)).collect();
        ids.sort_unstable();
        ids.dedup();
        let mut held: Vec<(&Region, MutexGuard<'_, Epochs>)> = Vec::with_capacity(ids.len());
        for (id, epoch) in ids {
            match held.last() {
                // The same region under another epoch: one of the two is refused.
                Some((region, executor)) if region.id == id => check_epoch(id, epoch, **executor)?,
                _ => held.push(self.enter(&regions, session, id, epoch)?),
            }
        }
        // Once more, with every executor in hand: while one was waited for, the lease may have run out.
        self.renew(session)?;
        let region_of =
            |id| held[held.binary_search_by_key(&id, |(r, _)| r.id).expect("all regions are held")].0;
        for part in parts {
            let (offset, len) = (part.at.offset(), u64::from(part.len));
            if !len.is_multiple_of(8) {
                return Err(VerbError::Misaligned { at: part.at, len });
            }
            check_range(region_of(part.at.region()), offset, len)?;
        }
        let mut rest = data;
        for part in parts {
            let (bytes, after) = rest.split_at(part.len as usize);
            rest = after;
            region_of(part.at.region()).memory.write(part.at.offset(), bytes);
        }
        Ok(())
    }

    /// COMPARE_SWAP: if the word is `expected`, makes it `new`. Returns the word as it was.
    ///
    /// # Errors
    /// A refusal; nothing was changed.
    pub fn compare_swap(
        &self,
        session: &Session,
        at: WordAt,
        expected: u64,
        new: u64,
    ) -> Result<u64, VerbError> {
        let before = self.counted(self.on_word(session, at, |word| {
            match word.compare_exchange(expected, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(before) | Err(before) => before,
            }
        }))?;
        self.counters.compare_swaps.fetch_add(1, Ordering::Relaxed);
        Ok(before)
    }

    /// FETCH_ADD: adds `add` to the word, wrapping. Returns the word as it was.
    ///
    /// # Errors
    /// A refusal; nothing was changed.
    pub fn fetch_add(&self, session: &Session, at: WordAt, add: u64) -> Result<u64, VerbError> {
        let before = self.counted(self.on_word(session, at, |word| word.fetch_add(add, Ordering::AcqRel)))?;
        self.counters.fetch_adds.fetch_add(1, Ordering::Relaxed);
        Ok(before)
    }

    fn on_word(
        &self,
        session: &Session,
        at: WordAt,
        change: impl FnOnce(&AtomicU64) -> u64,
    ) -> Result<u64, VerbError> {
        let regions = self.regions.load();
        let (region, executor) = self.enter(&regions, session, at.at.region(), at.epoch)?;
        check_range(region, at.at.offset(), 8)?;
        let before = change(region.memory.word(at.at.offset()));
        drop(executor);
        Ok(before)
    }

    /// Takes a region's executor, then checks lease and epoch under it.
    #[inline]
    fn enter<'a>(
        &self,
        regions: &'a [Arc<Region>],
        session: &Session,
        id: RegionId,
        epoch: Epoch,
    ) -> Result<(&'a Region, MutexGuard<'a, Epochs>), VerbError> {
        let Ok(at) = regions.binary_search_by_key(&id, |r| r.id) else {
            self.renew(session)?;
            return Err(VerbError::NoSuchRegion { region: id });
        };
        let region = &*regions[at];
        let executor = region.epochs.lock();
        self.renew(session)?;
        check_epoch(id, epoch, *executor)?;
        Ok((region, executor))
    }

    fn counted<T>(&self, outcome: Result<T, VerbError>) -> Result<T, VerbError> {
        if outcome.is_err() {
            self.counters.refusals.fetch_add(1, Ordering::Relaxed);
        }
        outcome
    }

    // ---------------------------------------------------------------------------------------------- messages

    /// Sets who takes messages. Without one they are refused.
    pub fn set_handler(&self, handler: Arc<dyn MessageHandler>) {
        *self.handler.lock() = Some(handler);
    }

    /// SEND: gives a message to the handler.
    ///
    /// # Errors
    /// A refusal.
    pub fn message(&self, from: &Arc<Session>, message: Bytes) -> Result<(), VerbError> {
        self.counted(self.give_message(from, message))?;
        self.counters.messages_in.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn give_message(&self, from: &Arc<Session>, message: Bytes) -> Result<(), VerbError> {
        check_message_size(message.len())?;
        self.renew(from)?;
        let handler = self.handler.lock().clone();
        let taken = match handler {
            Some(handler) => handler.message(self, from, message),
            None => Err("it takes no messages".to_owned()),
        };
        taken.map_err(|why| VerbError::MessageRefused { peer: Arc::clone(&self.name), why })
    }

    /// Queues a message for a session's RECV.
    ///
    /// # Errors
    /// If the session is over, or has too much waiting: then the message is not queued, and the caller decides.
    pub fn push(&self, to: SessionId, message: Bytes) -> Result<(), PushError> {
        if message.len() > MESSAGE_BYTES_MAX {
            return Err(PushError::TooLarge(message.len()));
        }
        let Some(session) = self.sessions.lock().get(&to).cloned() else {
            return Err(PushError::SessionOver(to));
        };
        if !session.is_alive(self.options.clock.now_ns()) {
            self.end_session(&session);
            return Err(PushError::SessionOver(to));
        }
        let mut inbox = session.inbox.lock();
        if inbox.messages.len() >= self.options.inbox_messages_max
            || inbox.bytes + message.len() > self.options.inbox_bytes_max
        {
            self.counters.inbox_overflows.fetch_add(1, Ordering::Relaxed);
            return Err(PushError::InboxFull(to));
        }
        inbox.bytes += message.len();
        inbox.messages.push_back(message);
        drop(inbox);
        session.inbox_filled.notify_waiters();
        self.counters.messages_out.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    // ------------------------------------------------------------------------------------------------- faults

    /// Holds back every verb of every backend until [`Self::resume`]: a memory node that is alive but does not
    /// answer, for tests and experiments.
    pub fn pause(&self) {
        self.paused.store(true, Ordering::SeqCst);
    }

    /// Ends [`Self::pause`].
    pub fn resume(&self) {
        self.paused.store(false, Ordering::SeqCst);
        self.resumed.notify_waiters();
    }

    /// Whether verbs are held back.
    #[inline]
    pub fn is_paused(&self) -> bool {
        self.paused.load(Ordering::SeqCst)
    }

    /// Completes when verbs are not held back.
    pub async fn running(&self) {
        loop {
            let resumed = self.resumed.notified();
            if !self.is_paused() {
                return;
            }
            resumed.await;
        }
    }

    /// Calls `hook` in the middle of each READ longer than a word, with the region's executor free: what it writes
    /// tears the read. For tests; `None` ends it.
    pub fn set_mid_read(&self, hook: Option<Box<MidRead>>) {
        self.mid_read.store(Arc::new(hook));
    }
}

// Sizes are checked on both ends: the caller's backend before anything is sent, the host before anything is done.

/// Checks a gather against the limits of one batch.
pub(super) fn check_read_size(groups: &[ReadGroup], items: usize) -> Result<(), VerbError> {
    let counted: u64 = groups.iter().map(|group| u64::from(group.count)).sum();
    assert_eq!(counted, items as u64, "the groups of a batch count its items");
    if items > BATCH_ITEMS_MAX {
        return Err(VerbError::TooLarge { what: "number of items", given: items, max: BATCH_ITEMS_MAX });
    }
    let bytes: u64 = groups.iter().map(|group| u64::from(group.len) * u64::from(group.count)).sum();
    if bytes > BATCH_BYTES_MAX as u64 {
        return Err(VerbError::TooLarge {
            what: "bytes of a read",
            given: bytes as usize,
            max: BATCH_BYTES_MAX,
        });
    }
    Ok(())
}

/// Checks a WRITE batch against the limits of one batch.
pub(super) fn check_write_size(parts: &[WritePart], data_bytes: usize) -> Result<(), VerbError> {
    let counted: u64 = parts.iter().map(|part| u64::from(part.len)).sum();
    assert_eq!(counted, data_bytes as u64, "the parts of a batch cover its data");
    if parts.len() > BATCH_ITEMS_MAX {
        return Err(VerbError::TooLarge {
            what: "number of parts",
            given: parts.len(),
            max: BATCH_ITEMS_MAX,
        });
    }
    if data_bytes > BATCH_BYTES_MAX {
        return Err(VerbError::TooLarge {
            what: "bytes of a write",
            given: data_bytes,
            max: BATCH_BYTES_MAX,
        });
    }
    Ok(())
}

/// Checks a message against the limit.
pub(super) fn check_message_size(bytes: usize) -> Result<(), VerbError> {
    if bytes > MESSAGE_BYTES_MAX {
        return Err(VerbError::TooLarge { what: "bytes of a message", given: bytes, max: MESSAGE_BYTES_MAX });
    }
    Ok(())
}

fn check_epoch(region: RegionId, named: Epoch, epochs: Epochs) -> Result<(), VerbError> {
    if epochs.is_removed {
        return Err(VerbError::NoSuchRegion { region });
    }
    let current = epochs.current;
    match named.cmp(&current) {
        std::cmp::Ordering::Equal => Ok(()),
        std::cmp::Ordering::Greater => Err(VerbError::EpochAhead { region, named, current }),
        std::cmp::Ordering::Less if named < epochs.born => Err(VerbError::RegionLost { region }),
        std::cmp::Ordering::Less => Err(VerbError::StaleEpoch { region, named, current }),
    }
}

#[inline]
fn check_range(region: &Region, offset: u64, len: u64) -> Result<(), VerbError> {
    if offset.is_multiple_of(8) && region.memory.contains(offset, len) {
        return Ok(());
    }
    let at = RemotePtr::new(region.id, offset);
    Err(if offset.is_multiple_of(8) {
        VerbError::OutOfBounds { at, len, region_bytes: region.memory.bytes() }
    } else {
        VerbError::Misaligned { at, len }
    })
}

#[cfg(test)]
mod tests {
    use super::super::memory::HugePages;
    use super::*;

    const R: RegionId = RegionId(3);

    fn host(clock: &Clock) -> Arc<Host> {
        let options = HostOptions {
            lease: Duration::from_secs(3),
            clock: clock.clone(),
            sessions_max: 4,
            inbox_messages_max: 3,
            inbox_bytes_max: 100,
        };
        let host = Host::new("mn-0", Incarnation(7), options);
        for id in [5, 3] {
            let memory = RegionMemory::new(4096, HugePages::Off).unwrap();
            host.add_region(RegionId(id), Epoch(10), Epoch(8), memory).unwrap();
        }
        host
    }

    fn word(region: RegionId, offset: u64, epoch: u64) -> WordAt {
        WordAt { at: RemotePtr::new(region, offset), epoch: Epoch(epoch) }
    }

    #[test]
    fn epochs_are_judged_as_the_map_means_them() {
        let host = host(&Clock::manual());
        let session = host.open_session("cn-0").unwrap();
        let read = |epoch| host.fetch_add(&session, word(R, 8, epoch), 0);
        let (region, current) = (R, Epoch(10));
        assert_eq!(read(10), Ok(0));
        assert_eq!(read(9), Err(VerbError::StaleEpoch { region, named: Epoch(9), current }));
        assert_eq!(read(8), Err(VerbError::StaleEpoch { region, named: Epoch(8), current }));
        assert_eq!(read(7), Err(VerbError::RegionLost { region }));
        assert_eq!(read(11), Err(VerbError::EpochAhead { region, named: Epoch(11), current }));
        let gone = RegionId(4);
        assert_eq!(
            host.fetch_add(&session, word(gone, 8, 10), 0),
            Err(VerbError::NoSuchRegion { region: gone })
        );
        assert_eq!(host.set_epoch(gone, Epoch(11), Epoch(8)), Err(RegionError::Missing(gone)));
        host.set_epoch(R, Epoch(9), Epoch(9)).unwrap();
        assert_eq!(read(10), Ok(0), "an older epoch does not undo a newer one");
    }

    #[test]
    fn reset_zeroes_once_and_loses_what_was_known() {
        let host = host(&Clock::manual());
        let session = host.open_session("cn-0").unwrap();
        host.fetch_add(&session, word(R, 8, 10), 5).unwrap();
        host.reset_region(R, Epoch(12), Epoch(12)).unwrap();
        assert_eq!(host.fetch_add(&session, word(R, 8, 10), 0), Err(VerbError::RegionLost { region: R }));
        assert_eq!(host.fetch_add(&session, word(R, 8, 12), 5), Ok(0));
        host.reset_region(R, Epoch(12), Epoch(12)).unwrap();
        assert_eq!(
            host.fetch_add(&session, word(R, 8, 12), 0),
            Ok(5),
            "a repeated reset of one epoch is one reset"
        );
    }

    #[test]
    fn a_removed_region_is_gone_and_its_id_starts_anew() {
        let host = host(&Clock::manual());
        let session = host.open_session("cn-0").unwrap();
        host.fetch_add(&session, word(R, 8, 10), 5).unwrap();
        host.remove_region(R).unwrap();
        assert_eq!(host.fetch_add(&session, word(R, 8, 10), 1), Err(VerbError::NoSuchRegion { region: R }));
        assert_eq!(host.remove_region(R), Err(RegionError::Missing(R)));
        assert_eq!(host.fetch_add(&session, word(RegionId(5), 8, 10), 1), Ok(0), "others stay");
        let memory = RegionMemory::new(4096, HugePages::Off).unwrap();
        host.add_region(R, Epoch(20), Epoch(20), memory).unwrap();
        assert_eq!(host.fetch_add(&session, word(R, 8, 20), 1), Ok(0));
        assert_eq!(host.regions().len(), 2);
    }

    #[test]
    fn a_refused_write_has_written_nothing_in_any_region() {
        let host = host(&Clock::manual());
        let session = host.open_session("cn-0").unwrap();
        let good = WritePart { at: RemotePtr::new(R, 0), epoch: Epoch(10), len: 8 };
        let other = RegionId(5);
        for bad in [
            WritePart { at: RemotePtr::new(other, 0), epoch: Epoch(9), len: 8 },
            WritePart { at: RemotePtr::new(R, 16), epoch: Epoch(9), len: 8 },
            WritePart { at: RemotePtr::new(other, 4096), epoch: Epoch(10), len: 8 },
            WritePart { at: RemotePtr::new(other, 4), epoch: Epoch(10), len: 8 },
            WritePart { at: RemotePtr::new(other, 8), epoch: Epoch(10), len: 4 },
            WritePart { at: RemotePtr::new(RegionId(9), 8), epoch: Epoch(10), len: 8 },
        ] {
            let data = vec![0xff; 8 + bad.len as usize];
            assert!(host.write(&session, &[good, bad], &data).unwrap_err().is_refusal(), "{bad:?}");
            assert!(host.write(&session, &[bad, good], &data).unwrap_err().is_refusal(), "{bad:?}");
            assert_eq!(host.fetch_add(&session, word(R, 0, 10), 0), Ok(0), "{bad:?}");
        }
    }

    #[test]
    fn a_lease_is_renewed_by_verbs_and_its_end_is_final() {
        let clock = Clock::manual();
        let host = host(&clock);
        let (mine, other) = (host.open_session("cn-0").unwrap(), host.open_session("cn-1").unwrap());
        for _ in 0..4 {
            clock.advance(Duration::from_secs(2));
            host.renew(&mine).unwrap();
            host.fetch_add(&other, word(R, 8, 10), 1).unwrap();
        }
        clock.advance(Duration::from_nanos(2_999_999_999));
        assert_eq!(host.session_alive(&mine, other.id()), Ok(true));
        clock.advance(Duration::from_nanos(1));
        assert_eq!(host.session_alive(&mine, other.id()), Ok(false));
        let expired = VerbError::LeaseExpired { peer: "mn-0".into() };
        assert_eq!(host.fetch_add(&other, word(R, 8, 10), 1), Err(expired.clone()));
        assert_eq!(host.renew(&other), Err(expired.clone()));
        assert_eq!(host.fetch_add(&mine, word(R, 8, 10), 0), Ok(4));
        // A session ended in mid-life is as final.
        host.end_session(&mine);
        assert_eq!(host.compare_swap(&mine, word(R, 8, 10), 4, 9), Err(expired));
        assert_eq!(host.session_count(), 0);
    }

    #[test]
    fn sessions_are_bounded_and_expired_ones_make_room() {
        let clock = Clock::manual();
        let host = host(&clock);
        let ids: Vec<_> = (0..4).map(|_| host.open_session("cn").unwrap().id()).collect();
        assert_eq!(host.open_session("cn").unwrap_err(), OpenError::TooMany(4));
        clock.advance(Duration::from_secs(3));
        let next = host.open_session("cn").unwrap();
        assert!(!ids.contains(&next.id()), "numbers are never used twice");
        assert_eq!(host.session_count(), 1);
    }

    #[test]
    fn an_inbox_is_bounded_by_count_and_by_bytes() {
        let host = host(&Clock::manual());
        let session = host.open_session("cn-0").unwrap();
        let full = Err(PushError::InboxFull(session.id()));
        for i in 0..3u8 {
            host.push(session.id(), Bytes::from(vec![i])).unwrap();
        }
        assert_eq!(host.push(session.id(), Bytes::new()), full);
        assert_eq!(session.take_message().unwrap(), [0][..]);
        assert_eq!(host.push(session.id(), Bytes::from(vec![0; 99])), full);
        host.push(session.id(), Bytes::from(vec![3; 98])).unwrap();
        assert_eq!(host.push(SessionId(99), Bytes::new()), Err(PushError::SessionOver(SessionId(99))));
        let large = Bytes::from(vec![0; MESSAGE_BYTES_MAX + 1]);
        assert_eq!(host.push(session.id(), large), Err(PushError::TooLarge(MESSAGE_BYTES_MAX + 1)));
    }
}
