//! The way to remote memory: one live session per memory node, and batches split among them.
//!
//! ```text
//!   collection, locks, loads
//!        │ gather / write / compare_swap / fetch_add by RemotePtr
//!   ┌────▼─────┐  publish(map)     ┌──────────────┐ one attempt at a time, bounded back-off,
//!   │  Fabric  │◀───────────────   │ Link per MN  │ a memory node known dead fails at once
//!   └────┬─────┘  region → Link    └──────┬───────┘
//!        └── one request per memory node ─┴─▶ Verbs
//! ```
//!
//! Invariant: a verb goes out under the epoch of one map ([`Routes`]) from start to end; what the memory node refuses
//! is reported with what to do about it ([`Remedy`]), and repeating is the caller's decision.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use bytes::Bytes;
use futures_util::future::{BoxFuture, join_all, try_join_all};
use parking_lot::Mutex;
use rand::RngExt as _;
use shine_common::ids::{Epoch, RegionId, RemotePtr, SessionId};
use shine_common::verbs::{
    BATCH_BYTES_MAX, BATCH_ITEMS_MAX, ReadBatch, VerbError, Verbs, WordAt, WriteBatch,
};
use shine_common::wire::{ClusterMap, Fault, FaultCode, Member, RegionEntry, Role};
use tokio::sync::watch;
use tracing::{debug, warn};

use crate::counters::Counters;

/// Longest attempt to open a session.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// First and longest pause between attempts on a memory node that does not answer.
const RECONNECT_PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// A memory node that owes an answer and was not heard for so long is taken for dead until a new session opens.
const SILENCE_MAX: Duration = Duration::from_secs(1);
/// Repetitions of one call under newer maps or newer sessions.
const RETRY_MAX: u32 = 64;
/// Repetitions of one call over new sessions.
const SESSION_RETRY_MAX: u32 = 2;

/// Opens sessions: the one place that knows which backend is used.
pub trait Connect<V>: Send + Sync + 'static {
    /// Opens a session on `mn`, which must be the incarnation that the map names.
    fn connect(&self, mn: &Member, deadline: Instant) -> BoxFuture<'static, Result<V, VerbError>>;
}

/// What a call that failed leaves its caller to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Remedy {
    /// Nothing was done: wait for a newer map, repeat.
    NewerMap,
    /// Nothing was done: the memory node has not heard of this map yet; repeat shortly.
    Shortly,
    /// Nothing was done: repeat over a new session, unless the call meant that very session.
    NewSession,
    /// The call may or may not have been applied. Repeat only what only reads.
    InDoubt,
    /// Repeating is of no use.
    None,
}

/// A call that failed.
#[derive(Clone, Debug)]
pub struct Trouble {
    /// What may help.
    pub remedy: Remedy,
    /// What to say if nothing does.
    pub fault: Fault,
}

impl From<Fault> for Trouble {
    fn from(fault: Fault) -> Self {
        Self { remedy: Remedy::None, fault }
    }
}

/// Turns what a verb said into what its caller needs to know. `waited` is how long the call was out.
fn classify(error: VerbError, mn: &str, waited: Duration) -> Trouble {
    let (remedy, code) = match &error {
        VerbError::StaleEpoch { .. } => (Remedy::NewerMap, FaultCode::StaleEpoch),
        VerbError::EpochAhead { .. } => (Remedy::Shortly, FaultCode::StaleEpoch),
        // The map may know where the region went.
        VerbError::NoSuchRegion { .. } => (Remedy::NewerMap, FaultCode::RegionLost),
        VerbError::RegionLost { region } => return region_lost(*region).into(),
        VerbError::LeaseExpired { .. } => (Remedy::NewSession, FaultCode::MemoryNodeLost),
        VerbError::ConnectionLost { .. } => (Remedy::InDoubt, FaultCode::MemoryNodeLost),
        VerbError::DeadlineExceeded { silent_ms, .. } => {
            // Nothing heard during the whole call, or for long: it is the memory node. Otherwise the call came late.
            let silent = Duration::from_millis(*silent_ms);
            let is_lost =
                silent >= SILENCE_MAX || waited >= Duration::from_millis(100) && silent >= waited / 2;
            (Remedy::InDoubt, if is_lost { FaultCode::MemoryNodeLost } else { FaultCode::DeadlineExceeded })
        }
        VerbError::OutOfBounds { .. } | VerbError::Misaligned { .. } => (Remedy::None, FaultCode::Corrupt),
        _ => (Remedy::None, FaultCode::Internal),
    };
    let message = match code {
        FaultCode::MemoryNodeLost => format!("memory node {mn} is lost: {error}"),
        _ => format!("memory node {mn}: {error}"),
    };
    Trouble { remedy, fault: Fault::new(code, message) }
}

/// The fault for content that is gone.
pub fn region_lost(region: RegionId) -> Fault {
    Fault::new(
        FaultCode::RegionLost,
        format!(
            "the content of {region} is gone (its memory node was restarted): reload the collection from its graph file"
        ),
    )
}

/// The fault for a deadline that passed while doing `what`.
pub fn deadline_exceeded(what: impl fmt::Display) -> Fault {
    Fault::new(FaultCode::DeadlineExceeded, format!("the deadline passed while {what}"))
}

/// Bounds the repetitions of one call.
#[derive(Debug)]
pub struct Retry {
    deadline: Instant,
    attempts: u32,
    sessions: u32,
}

impl Retry {
    /// For a call that ends by `deadline`.
    pub fn new(deadline: Instant) -> Self {
        Self { deadline, attempts: 0, sessions: 0 }
    }

    /// Waits until repeating makes sense; `used` is the epoch of the map that the call went out under. `only_reads`
    /// says that the call may be repeated although it may have been applied.
    ///
    /// # Errors
    /// The call's fault, if it must not or need not be repeated.
    pub async fn after<V: Verbs>(
        &mut self,
        fabric: &Fabric<V>,
        used: Epoch,
        trouble: Trouble,
        only_reads: bool,
    ) -> Result<(), Fault> {
        self.attempts += 1;
        if self.attempts > RETRY_MAX {
            return Err(trouble.fault);
        }
        match trouble.remedy {
            Remedy::NewerMap => {
                fabric.counters.stale_epochs.add(1);
                if fabric.newer_than(used, self.deadline).await { Ok(()) } else { Err(trouble.fault) }
            }
            Remedy::Shortly => {
                let pause = jittered(Duration::from_millis(2u64 << self.attempts.min(5)));
                if Instant::now() + pause >= self.deadline {
                    return Err(trouble.fault);
                }
                tokio::time::sleep(pause).await;
                Ok(())
            }
            Remedy::InDoubt if !only_reads => Err(trouble.fault),
            Remedy::NewSession | Remedy::InDoubt => {
                self.sessions += 1;
                if self.sessions > SESSION_RETRY_MAX || Instant::now() >= self.deadline {
                    return Err(trouble.fault);
                }
                Ok(())
            }
            Remedy::None => Err(trouble.fault),
        }
    }
}

/// A generator for what must differ between processes: nonces, numbers of jobs, pauses, levels.
#[expect(clippy::disallowed_methods, reason = "seeded by the operating system on purpose")]
pub(crate) fn os_rng() -> rand::rngs::ThreadRng {
    rand::rng()
}

/// Batches with the memory nodes that they go to.
type Split<V, B> = Vec<(Arc<Link<V>>, B)>;

/// Half to all of `pause`.
pub(crate) fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(os_rng().random_range(0.5..=1.0))
}

// --------------------------------------------------------------------------------------------------- links

struct Failure {
    why: String,
    retry_at: Instant,
    pause: Duration,
}

struct LinkState<V> {
    member: Option<Member>,
    session: Option<Arc<V>>,
    is_connecting: bool,
    failure: Option<Failure>,
}

/// A memory node as this compute node knows it: the session on it, or why there is none.
pub struct Link<V> {
    name: Arc<str>,
    index: u32,
    connect: Arc<dyn Connect<V>>,
    counters: Arc<Counters>,
    state: Mutex<LinkState<V>>,
    /// Grows whenever an attempt has ended.
    attempts: watch::Sender<u64>,
}

impl<V> fmt::Debug for Link<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Link({})", self.name)
    }
}

impl<V: Verbs> Link<V> {
    fn lost(&self, why: impl fmt::Display) -> Trouble {
        let message = format!("memory node {} is lost: {why}", self.name);
        Trouble { remedy: Remedy::None, fault: Fault::new(FaultCode::MemoryNodeLost, message) }
    }

    /// The session on this memory node; opens one if there is none. At once an error while the memory node is known
    /// not to answer: attempts then go on in the background, at bounded pauses.
    async fn session(self: &Arc<Self>, deadline: Instant) -> Result<Session<V>, Trouble> {
        let mut ended = None;
        loop {
            {
                let mut state = self.state.lock();
                if let Some(verbs) = &state.session {
                    if !verbs.is_lost() {
                        return Ok(Session { link: Arc::clone(self), verbs: Arc::clone(verbs) });
                    }
                    state.session = None;
                }
                let Some(member) = state.member.clone() else {
                    return Err(self.lost("it is not in the cluster map"));
                };
                let may_try = state.failure.as_ref().is_none_or(|failure| Instant::now() >= failure.retry_at);
                if may_try && !state.is_connecting {
                    state.is_connecting = true;
                    tokio::spawn(Arc::clone(self).attempt(member));
                }
                if let Some(failure) = &state.failure {
                    return Err(self.lost(&failure.why));
                }
                // Subscribed under the lock, so that the end of this attempt cannot slip by.
                ended.get_or_insert_with(|| self.attempts.subscribe());
            }
            let ended = ended.as_mut().expect("subscribed above");
            if tokio::time::timeout_at(deadline.into(), ended.changed()).await.is_err() {
                return Err(self.lost("no connection by the deadline"));
            }
        }
    }

    async fn attempt(self: Arc<Self>, member: Member) {
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let result = match tokio::time::timeout_at(deadline.into(), self.connect.connect(&member, deadline))
            .await
        {
            Ok(result) => result.map_err(|error| error.to_string()),
            Err(_) => Err(format!("no connection to {} in {} ms", member.addr, CONNECT_TIMEOUT.as_millis())),
        };
        let mut state = self.state.lock();
        state.is_connecting = false;
        match result {
            // The memory node may have been replaced meanwhile.
            Ok(verbs) if state.member.as_ref().is_some_and(|now| same_life(now, &member)) => {
                debug!(mn = %self.name, session = %verbs.session(), "session opened");
                self.counters.connects.add(1);
                state.session = Some(Arc::new(verbs));
                state.failure = None;
            }
            Ok(_) => {}
            Err(why) => {
                self.counters.connect_failures.add(1);
                if state.failure.is_none() {
                    warn!(mn = %self.name, why, "memory node does not answer");
                }
                if state.member.as_ref().is_some_and(|now| same_life(now, &member)) {
                    state.fail(why);
                }
            }
        }
        drop(state);
        self.attempts.send_modify(|count| *count += 1);
    }

    fn update(&self, member: Option<&Member>) {
        let mut state = self.state.lock();
        let is_same = match (&state.member, member) {
            (Some(old), Some(new)) => same_life(old, new),
            (None, None) => true,
            _ => false,
        };
        if !is_same {
            state.session = None;
            state.failure = None;
        }
        state.member = member.cloned();
    }

    /// Stops using `verbs`: no call starts on it any more, and its lease ends once the running ones are over. With
    /// `is_dead`, calls fail at once until a new session opens.
    fn discard(&self, verbs: &Arc<V>, why: &str, is_dead: bool) {
        let mut state = self.state.lock();
        if state.session.as_ref().is_some_and(|current| Arc::ptr_eq(current, verbs)) {
            warn!(mn = %self.name, session = %verbs.session(), why, "session given up");
            self.counters.sessions_discarded.add(1);
            state.session = None;
            if is_dead {
                state.fail(why.to_owned());
            }
        }
    }
}

impl<V> LinkState<V> {
    fn fail(&mut self, why: String) {
        let (first, longest) = RECONNECT_PAUSE;
        let pause = self.failure.as_ref().map_or(first, |failure| (failure.pause * 2).min(longest));
        self.failure = Some(Failure { why, retry_at: Instant::now() + jittered(pause), pause });
    }
}

fn same_life(a: &Member, b: &Member) -> bool {
    a.incarnation == b.incarnation && a.addr == b.addr
}

/// A session on one memory node. Calls on it never move to another session: what must stop when the lease ends, such
/// as writes under a lock, goes through the session that took the lock.
pub struct Session<V> {
    link: Arc<Link<V>>,
    verbs: Arc<V>,
}

impl<V> Clone for Session<V> {
    fn clone(&self) -> Self {
        Self { link: Arc::clone(&self.link), verbs: Arc::clone(&self.verbs) }
    }
}

impl<V> fmt::Debug for Session<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Session({})", self.link.name)
    }
}

impl<V: Verbs> Session<V> {
    /// Its number on the memory node.
    pub fn id(&self) -> SessionId {
        self.verbs.session()
    }

    /// Name of the memory node.
    pub fn memory_node(&self) -> &Arc<str> {
        &self.link.name
    }

    /// Stops using the session, so that its lease ends: for when it may hold what nobody can give back.
    pub fn discard(&self, why: &str) {
        self.link.discard(&self.verbs, why, false);
    }

    fn failed(&self, error: VerbError, started: Instant) -> Trouble {
        match &error {
            VerbError::LeaseExpired { .. } => self.link.discard(&self.verbs, "its lease ran out", false),
            VerbError::DeadlineExceeded { silent_ms, .. }
                if u128::from(*silent_ms) >= SILENCE_MAX.as_millis() =>
            {
                self.link.discard(&self.verbs, &error.to_string(), true);
            }
            _ => {}
        }
        classify(error, &self.link.name, started.elapsed())
    }

    async fn read(&self, batch: ReadBatch, deadline: Instant, cost: &CostCell) -> Result<Bytes, Trouble> {
        let started = Instant::now();
        let count = batch.len();
        let expected = batch.reply_bytes();
        let reply = self.verbs.read(batch, deadline).await.map_err(|error| self.failed(error, started))?;
        assert_eq!(reply.data.len(), expected, "a backend answers a READ with exactly what was asked");
        cost.add(count as u32, reply.frames.total());
        Ok(reply.data)
    }

    async fn write(&self, batch: WriteBatch, deadline: Instant, cost: &CostCell) -> Result<(), Trouble> {
        let started = Instant::now();
        let frames = self.verbs.write(batch, deadline).await.map_err(|error| self.failed(error, started))?;
        cost.add(0, frames.total());
        Ok(())
    }

    async fn compare_swap(
        &self,
        word: WordAt,
        old: u64,
        new: u64,
        deadline: Instant,
    ) -> Result<u64, Trouble> {
        let started = Instant::now();
        self.verbs.compare_swap(word, old, new, deadline).await.map_err(|error| self.failed(error, started))
    }

    /// Whether session `other` of the same memory node may still write; `false` is final.
    pub async fn is_alive(&self, other: SessionId, deadline: Instant) -> Result<bool, Trouble> {
        if other == self.id() {
            return Ok(true);
        }
        let started = Instant::now();
        self.verbs.session_alive(other, deadline).await.map_err(|error| self.failed(error, started))
    }
}

// -------------------------------------------------------------------------------------------------- routes

/// Where a region is, by one map.
#[derive(Debug)]
pub struct Route<V> {
    link: Arc<Link<V>>,
    /// The region's line in the map.
    pub entry: RegionEntry,
}

/// One map, made ready for looking up regions.
#[derive(Debug)]
pub struct Routes<V> {
    map: Arc<ClusterMap>,
    regions: Vec<Option<Route<V>>>,
}

impl<V> Routes<V> {
    /// The map.
    pub fn map(&self) -> &Arc<ClusterMap> {
        &self.map
    }

    /// Its epoch.
    pub fn epoch(&self) -> Epoch {
        self.map.epoch
    }

    /// Where `region` is.
    #[inline]
    pub fn region(&self, region: RegionId) -> Option<&Route<V>> {
        self.regions.get(usize::from(region.0))?.as_ref()
    }

    /// Whether `session` is one on the memory node that hosts `at`.
    pub fn covers(&self, session: &Session<V>, at: RemotePtr) -> bool {
        self.region(at.region()).is_some_and(|route| Arc::ptr_eq(&route.link, &session.link))
    }

    fn route(&self, at: RemotePtr) -> Result<&Route<V>, Trouble> {
        self.region(at.region()).ok_or_else(|| Trouble {
            remedy: Remedy::NewerMap,
            fault: Fault::new(FaultCode::RegionLost, format!("{} is not in the cluster map", at.region())),
        })
    }

    fn word(&self, at: RemotePtr) -> Result<(&Route<V>, WordAt), Trouble> {
        let route = self.route(at)?;
        Ok((route, WordAt { at, epoch: route.entry.epoch }))
    }
}

// --------------------------------------------------------------------------------------------- gathers, writes

/// What remote work has cost so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Dependent round trips: requests to several memory nodes at once are one.
    pub rounds: u32,
    /// Records read.
    pub reads: u32,
    /// Bytes of frames, both directions.
    pub bytes: u64,
    /// Lists read again since they were torn.
    pub torn_lists: u32,
}

impl Cost {
    /// Adds what other work has cost.
    pub fn merge(&mut self, other: Cost) {
        self.rounds += other.rounds;
        self.reads += other.reads;
        self.bytes += other.bytes;
        self.torn_lists += other.torn_lists;
    }
}

/// Collects the cost of requests that run beside each other.
#[derive(Default)]
struct CostCell(Mutex<(u32, u64)>);

impl CostCell {
    fn add(&self, reads: u32, bytes: u64) {
        let mut sum = self.0.lock();
        sum.0 += reads;
        sum.1 += bytes;
    }

    fn book(self, cost: &mut Cost) {
        let (reads, bytes) = self.0.into_inner();
        cost.rounds += 1;
        cost.reads += reads;
        cost.bytes += bytes;
    }
}

/// Records to read in one round. Reused by its owner: [`Self::clear`] keeps the memory.
#[derive(Debug, Default)]
pub struct Gather {
    items: Vec<(RemotePtr, u32)>,
    order: Vec<(u64, u32)>,
    places: Vec<(u32, u32)>,
    replies: Vec<Bytes>,
}

impl Gather {
    /// Nothing to read.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the read of `len` bytes at `at`.
    #[inline]
    pub fn push(&mut self, at: RemotePtr, len: u64) {
        self.items.push((at, u32::try_from(len).expect("records are far below 4 GiB")));
    }

    /// Number of records.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether nothing was asked for.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.items.clear();
        self.replies.clear();
        self.places.clear();
    }

    /// Bytes of the `i`-th record pushed, once the gather was answered.
    ///
    /// # Panics
    /// If it was not.
    #[inline]
    pub fn get(&self, i: usize) -> &[u8] {
        let (reply, offset) = self.places[i];
        &self.replies[reply as usize][offset as usize..][..self.items[i].1 as usize]
    }

    /// Splits the records into one batch per memory node (more above the limits of a batch), equal regions and
    /// lengths side by side.
    fn split<V: Verbs>(&mut self, routes: &Routes<V>) -> Result<Split<V, ReadBatch>, Trouble> {
        self.order.clear();
        self.places.clear();
        self.places.resize(self.items.len(), (0, 0));
        for (i, (at, len)) in self.items.iter().enumerate() {
            let link = routes.route(*at)?.link.index;
            let key = u64::from(link & 0xffff) << 48 | u64::from(at.region().0) << 32 | u64::from(*len);
            self.order.push((key, i as u32));
        }
        // Stable: records of one kind stay in the order in which they were asked for.
        self.order.sort();
        let mut batches: Vec<(Arc<Link<V>>, ReadBatch)> = Vec::new();
        for (_, i) in &self.order {
            let (at, len) = self.items[*i as usize];
            let route = routes.route(at)?;
            let fits = batches.last().is_some_and(|(link, batch)| {
                link.index == route.link.index
                    && batch.len() < BATCH_ITEMS_MAX
                    && batch.reply_bytes() + len as usize <= BATCH_BYTES_MAX
            });
            if !fits {
                batches.push((Arc::clone(&route.link), ReadBatch::new()));
            }
            let number = batches.len() as u32 - 1;
            let (_, batch) = batches.last_mut().expect("one was pushed");
            self.places[*i as usize] = (number, batch.reply_bytes() as u32);
            batch.push(at, route.entry.epoch, len);
        }
        Ok(batches)
    }
}

/// Writes to issue in one round, in no order among each other.
#[derive(Debug, Default)]
pub struct WriteSet {
    parts: Vec<(RemotePtr, usize)>,
    data: Vec<u8>,
}

impl WriteSet {
    /// Nothing to write.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the write of `bytes` (a multiple of 8) to `at`.
    pub fn push(&mut self, at: RemotePtr, bytes: &[u8]) {
        self.push_with(at, bytes.len(), |out| out.copy_from_slice(bytes));
    }

    /// Adds the write of `len` bytes that `fill` puts in place; they start as zeros.
    pub fn push_with(&mut self, at: RemotePtr, len: usize, fill: impl FnOnce(&mut [u8])) {
        let start = self.data.len();
        self.data.resize(start + len, 0);
        fill(&mut self.data[start..]);
        self.parts.push((at, len));
    }

    /// Adds the write of one word.
    pub fn push_word(&mut self, at: RemotePtr, word: u64) {
        self.push(at, &word.to_le_bytes());
    }

    /// Whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Bytes to write.
    pub fn bytes(&self) -> usize {
        self.data.len()
    }

    /// Forgets all, keeps the memory.
    pub fn clear(&mut self) {
        self.parts.clear();
        self.data.clear();
    }

    fn split<V: Verbs>(&self, routes: &Routes<V>) -> Result<Split<V, WriteBatch>, Trouble> {
        let mut batches: Split<V, WriteBatch> = Vec::new();
        let mut start = 0;
        for (at, len) in &self.parts {
            let route = routes.route(*at)?;
            let mut done = 0;
            // A part above the limit of a batch is cut; whole words stay whole.
            while done < *len {
                let last = batches.iter_mut().rev().find(|(link, _)| link.index == route.link.index);
                let room = last.as_ref().map_or(0, |(_, batch)| {
                    if batch.len() < BATCH_ITEMS_MAX { BATCH_BYTES_MAX - batch.data().len() } else { 0 }
                });
                let take = (len - done).min(if room >= 8 { room / 8 * 8 } else { BATCH_BYTES_MAX });
                let at = at.add(done as u64);
                let bytes = &self.data[start + done..start + done + take];
                match last {
                    Some((_, batch)) if room >= 8 => batch.push(at, route.entry.epoch, bytes),
                    _ => {
                        let mut batch = WriteBatch::new();
                        batch.push(at, route.entry.epoch, bytes);
                        batches.push((Arc::clone(&route.link), batch));
                    }
                }
                done += take;
            }
            start += len;
        }
        Ok(batches)
    }
}

/// One outcome for writes to several memory nodes: a write in doubt outweighs what could be repeated.
fn all_written(results: Vec<Result<(), Trouble>>) -> Result<(), Trouble> {
    let weight = |trouble: &Trouble| match trouble.remedy {
        Remedy::InDoubt => 2,
        Remedy::None => 1,
        _ => 0,
    };
    results.into_iter().filter_map(Result::err).max_by_key(weight).map_or(Ok(()), Err)
}

/// All memory nodes of the cluster, as one compute node reaches them.
pub struct Fabric<V> {
    connect: Arc<dyn Connect<V>>,
    routes: ArcSwap<Routes<V>>,
    epoch: watch::Sender<Epoch>,
    links: Mutex<Vec<Arc<Link<V>>>>,
    nonce: AtomicU32,
    /// What this compute node counts.
    pub counters: Arc<Counters>,
}

impl<V> fmt::Debug for Fabric<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fabric({})", *self.epoch.borrow())
    }
}

impl<V: Verbs> Fabric<V> {
    /// Without a map yet: [`Self::publish`] gives it one.
    pub fn new(connect: Arc<dyn Connect<V>>, counters: Arc<Counters>) -> Arc<Self> {
        Arc::new(Self {
            connect,
            routes: ArcSwap::from_pointee(Routes {
                map: Arc::new(ClusterMap::default()),
                regions: Vec::new(),
            }),
            epoch: watch::Sender::new(Epoch::default()),
            links: Mutex::new(Vec::new()),
            nonce: AtomicU32::new(os_rng().random()),
            counters,
        })
    }

    /// Uses `map` from now on; an older one than the present is passed over.
    pub fn publish(&self, map: Arc<ClusterMap>) {
        // Held to the end, so that maps are taken one after another.
        let mut links = self.links.lock();
        if map.epoch <= self.routes.load().epoch() {
            return;
        }
        for link in links.iter() {
            link.update(map.member(Role::Mn, &link.name));
        }
        let mut regions: Vec<Option<Route<V>>> = Vec::new();
        for entry in &map.regions {
            let link = match links.iter().find(|link| *link.name == *entry.mn) {
                Some(link) => Arc::clone(link),
                None => {
                    let link = Arc::new(Link {
                        name: entry.mn.as_str().into(),
                        index: links.len() as u32,
                        connect: Arc::clone(&self.connect),
                        counters: Arc::clone(&self.counters),
                        state: Mutex::new(LinkState {
                            member: map.member(Role::Mn, &entry.mn).cloned(),
                            session: None,
                            is_connecting: false,
                            failure: None,
                        }),
                        attempts: watch::Sender::new(0),
                    });
                    links.push(Arc::clone(&link));
                    link
                }
            };
            let at = usize::from(entry.id.0);
            if regions.len() <= at {
                regions.resize_with(at + 1, || None);
            }
            regions[at] = Some(Route { link, entry: entry.clone() });
        }
        let epoch = map.epoch;
        self.routes.store(Arc::new(Routes { map, regions }));
        self.epoch.send_replace(epoch);
    }

    /// The present map.
    pub fn routes(&self) -> Arc<Routes<V>> {
        self.routes.load_full()
    }

    /// Epoch of the present map.
    pub fn epoch(&self) -> Epoch {
        *self.epoch.borrow()
    }

    /// Waits for a map newer than `epoch`; whether it came by the deadline.
    pub async fn newer_than(&self, epoch: Epoch, deadline: Instant) -> bool {
        let mut seen = self.epoch.subscribe();
        tokio::time::timeout_at(deadline.into(), seen.wait_for(|now| *now > epoch))
            .await
            .is_ok_and(|r| r.is_ok())
    }

    /// Waits for the map of `epoch` or a newer one.
    ///
    /// # Errors
    /// If it does not come by the deadline.
    pub async fn reach(&self, epoch: Epoch, deadline: Instant) -> Result<(), Fault> {
        let mut seen = self.epoch.subscribe();
        match tokio::time::timeout_at(deadline.into(), seen.wait_for(|now| *now >= epoch)).await {
            Ok(Ok(_)) => Ok(()),
            _ => Err(deadline_exceeded(format_args!("waiting for the map of {epoch}"))),
        }
    }

    /// A number for a lock word that this compute node has not used lately.
    pub fn nonce(&self) -> u32 {
        self.nonce.fetch_add(1, Ordering::Relaxed)
    }

    /// The session on the memory node that hosts `at`.
    pub async fn session(
        &self,
        routes: &Routes<V>,
        at: RemotePtr,
        deadline: Instant,
    ) -> Result<Session<V>, Trouble> {
        routes.route(at)?.link.session(deadline).await
    }

    /// Reads all records of `gather` in one round; they are then in [`Gather::get`].
    pub async fn gather(
        &self,
        routes: &Routes<V>,
        gather: &mut Gather,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<(), Trouble> {
        gather.replies.clear();
        let batches = gather.split(routes)?;
        let sum = CostCell::default();
        let one = async |(link, batch): (Arc<Link<V>>, ReadBatch)| {
            link.session(deadline).await?.read(batch, deadline, &sum).await
        };
        let replies = try_join_all(batches.into_iter().map(one)).await;
        sum.book(cost);
        gather.replies = replies?;
        Ok(())
    }

    /// As [`Self::gather`], over one session and for records of its memory node only.
    pub async fn gather_on(
        &self,
        session: &Session<V>,
        routes: &Routes<V>,
        gather: &mut Gather,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<(), Trouble> {
        gather.replies.clear();
        let batches = gather.split(routes)?;
        assert!(
            batches.iter().all(|(link, _)| Arc::ptr_eq(link, &session.link)),
            "a session reads on its own memory node"
        );
        let sum = CostCell::default();
        let replies =
            try_join_all(batches.into_iter().map(|(_, batch)| session.read(batch, deadline, &sum))).await;
        sum.book(cost);
        gather.replies = replies?;
        Ok(())
    }

    /// Writes all of `set` in one round and waits for every memory node, also where one fails: after that nothing is
    /// on its way any more unless the remedy is [`Remedy::InDoubt`]. On an error part of it may be written.
    pub async fn write(
        &self,
        routes: &Routes<V>,
        set: &WriteSet,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<(), Trouble> {
        let batches = set.split(routes)?;
        let sum = CostCell::default();
        let one = async |(link, batch): (Arc<Link<V>>, WriteBatch)| {
            link.session(deadline).await?.write(batch, deadline, &sum).await
        };
        let results = join_all(batches.into_iter().map(one)).await;
        sum.book(cost);
        all_written(results)
    }

    /// As [`Self::write`], over one session and to its memory node only.
    pub async fn write_on(
        &self,
        session: &Session<V>,
        routes: &Routes<V>,
        set: &WriteSet,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<(), Trouble> {
        let batches = set.split(routes)?;
        assert!(
            batches.iter().all(|(link, _)| Arc::ptr_eq(link, &session.link)),
            "a session writes on its own memory node"
        );
        let sum = CostCell::default();
        let results =
            join_all(batches.into_iter().map(|(_, batch)| session.write(batch, deadline, &sum))).await;
        sum.book(cost);
        all_written(results)
    }

    /// COMPARE_SWAP of the word at `at`; returns the word as it was.
    pub async fn compare_swap(
        &self,
        routes: &Routes<V>,
        at: RemotePtr,
        old: u64,
        new: u64,
        deadline: Instant,
    ) -> Result<u64, Trouble> {
        let (route, word) = routes.word(at)?;
        route.link.session(deadline).await?.compare_swap(word, old, new, deadline).await
    }

    /// As [`Self::compare_swap`], over one session.
    pub async fn compare_swap_on(
        &self,
        session: &Session<V>,
        routes: &Routes<V>,
        at: RemotePtr,
        old: u64,
        new: u64,
        deadline: Instant,
    ) -> Result<u64, Trouble> {
        let (route, word) = routes.word(at)?;
        assert!(Arc::ptr_eq(&route.link, &session.link), "a session swaps on its own memory node");
        session.compare_swap(word, old, new, deadline).await
    }

    /// FETCH_ADD on the word at `at`; returns the word as it was.
    pub async fn fetch_add(
        &self,
        routes: &Routes<V>,
        at: RemotePtr,
        add: u64,
        deadline: Instant,
    ) -> Result<u64, Trouble> {
        let (route, word) = routes.word(at)?;
        let session = route.link.session(deadline).await?;
        let started = Instant::now();
        session.verbs.fetch_add(word, add, deadline).await.map_err(|error| session.failed(error, started))
    }
}
