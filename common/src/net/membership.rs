//! The oracle's client: calls with fail-over among the oracles, and a process's place in the cluster.
//!
//! ```text
//!              OracleClient ── list of addresses, the one that answered last first
//!                    │
//!   Membership ──────┼── renew task: keeps the lease, joins again when the oracle has forgotten us
//!                    └── watch task: long polls for the next map
//!                          │
//!                   map(): the last map that was heard of, also while no oracle answers
//! ```
//!
//! Invariant: the map's epoch only grows, and a process that has once joined keeps a map whatever becomes of the
//! oracles.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::endpoint::Endpoint;
use super::rpc::{RpcClient, RpcError};
use super::tls::PeerIdentity;
use crate::ids::{Epoch, Incarnation};
use crate::wire::{ClusterMap, Fault, FaultCode, OracleRequest, OracleResponse, RegionGrant, Role};

/// Lease that processes without one of their own go by when they say whether an oracle answers.
pub const LEASE_DEFAULT: Duration = Duration::from_secs(3);
/// Longest time for one call to one oracle, beyond what the oracle was asked to wait.
const CALL_TIME_MAX: Duration = Duration::from_secs(2);
/// First and longest pause after a round in which no oracle answered.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_millis(500);
/// Time that leaving may take.
const LEAVE_TIME_MAX: Duration = Duration::from_secs(1);

/// A life of this process, drawn at random.
#[expect(clippy::disallowed_methods, reason = "no two lives may be alike, also not by a seed")]
pub fn new_incarnation() -> Incarnation {
    Incarnation(rand::random())
}

/// Why the oracle did not do what was asked.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OracleError {
    /// The oracle answered, and refused.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// No oracle answered. Nothing was done.
    #[error("no oracle answers: {tried}")]
    NoOracle {
        /// Each that was tried, with why.
        tried: String,
    },
    /// No oracle accepts our certificate or version, or we none of theirs. Nothing was done.
    #[error("refused by every oracle: {tried}")]
    Refused {
        /// Each that was tried, with why.
        tried: String,
    },
    /// The call broke after it was sent, and must not be made twice: look whether it was done.
    #[error("the oracle may or may not have done it: {0}")]
    Unknown(RpcError),
    /// The oracle's answer belongs to another question.
    #[error("the oracle at {addr} answered with {answer} to {question}")]
    Unexpected {
        /// Its address.
        addr: SocketAddr,
        /// What was asked.
        question: &'static str,
        /// What came.
        answer: &'static str,
    },
}

impl From<OracleError> for Fault {
    fn from(error: OracleError) -> Self {
        let code = match &error {
            OracleError::Fault(fault) => return fault.clone(),
            OracleError::NoOracle { .. } | OracleError::Refused { .. } => FaultCode::NoOracle,
            OracleError::Unknown(_) => FaultCode::Unavailable,
            OracleError::Unexpected { .. } => FaultCode::Internal,
        };
        Self::new(code, error.to_string())
    }
}

// --------------------------------------------------------------------------------------------- OracleClient

type Rpc = RpcClient<OracleRequest, OracleResponse>;

/// Calls whichever oracle answers. Clones share connections.
#[derive(Clone)]
pub struct OracleClient {
    inner: Arc<ClientInner>,
}

struct ClientInner {
    endpoint: Endpoint,
    oracles: Vec<SocketAddr>,
    /// The oracle that answered last, and its connection.
    good: Mutex<(usize, Option<Rpc>)>,
    /// When an oracle last answered.
    heard: Mutex<Option<Instant>>,
}

impl fmt::Debug for OracleClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OracleClient").field("oracles", &self.inner.oracles).finish_non_exhaustive()
    }
}

impl OracleClient {
    /// A client of `oracles`, none of which is contacted yet.
    ///
    /// # Panics
    /// If the list is empty: configuration is checked before.
    pub fn new(endpoint: Endpoint, oracles: Vec<SocketAddr>) -> Self {
        assert!(!oracles.is_empty(), "a process is given at least one oracle");
        let good = Mutex::new((0, None));
        Self { inner: Arc::new(ClientInner { endpoint, oracles, good, heard: Mutex::new(None) }) }
    }

    /// The endpoint that it calls from.
    pub fn endpoint(&self) -> &Endpoint {
        &self.inner.endpoint
    }

    /// Addresses of the oracles.
    pub fn oracles(&self) -> &[SocketAddr] {
        &self.inner.oracles
    }

    /// Time since an oracle last answered anything, also with a fault.
    pub fn silent_for(&self) -> Option<Duration> {
        self.inner.heard.lock().map(|heard| heard.elapsed())
    }

    /// Asks the oracles in turn, the one that answered last first, until one answers; one round.
    ///
    /// # Errors
    /// By `deadline`. Requests that must not be done twice are not sent on to another oracle once they may have
    /// reached one.
    pub async fn call(
        &self,
        request: &OracleRequest,
        deadline: Instant,
    ) -> Result<OracleResponse, OracleError> {
        let inner = &*self.inner;
        let first = inner.good.lock().0;
        let mut tried = Vec::new();
        let mut refused_count = 0;
        for step in 0..inner.oracles.len() {
            let at = (first + step) % inner.oracles.len();
            let limit = deadline.min(Instant::now() + CALL_TIME_MAX + waits(request));
            match self.call_one(at, request, limit).await {
                Ok(response) => {
                    self.note_answer(at);
                    return Ok(response);
                }
                Err(RpcError::Fault(fault)) => {
                    self.note_answer(at);
                    // An oracle that is starting or stopping: another may be up.
                    if fault.code != FaultCode::Unavailable || step + 1 == inner.oracles.len() {
                        return Err(fault.into());
                    }
                    tried.push(format!("{}: {fault}", inner.oracles[at]));
                }
                Err(error) if error.is_unsent() || may_be_done_twice(request) => {
                    let is_refusal =
                        matches!(error, RpcError::Refused { .. } | RpcError::OtherVersion { .. });
                    refused_count += usize::from(is_refusal);
                    tried.push(error.to_string());
                }
                Err(error) => return Err(OracleError::Unknown(error)),
            }
            if Instant::now() >= deadline {
                break;
            }
        }
        if tried.is_empty() {
            tried.push("no time was left".into());
        }
        let is_refused = refused_count == inner.oracles.len();
        let tried = tried.join("; ");
        Err(if is_refused { OracleError::Refused { tried } } else { OracleError::NoOracle { tried } })
    }

    async fn call_one(
        &self,
        at: usize,
        request: &OracleRequest,
        limit: Instant,
    ) -> Result<OracleResponse, RpcError> {
        let inner = &*self.inner;
        let known = match &*inner.good.lock() {
            (good, Some(rpc)) if *good == at && !rpc.is_lost() => Some(rpc.clone()),
            _ => None,
        };
        let rpc = match known {
            Some(rpc) => rpc,
            None => {
                let rpc = Rpc::connect(&inner.endpoint, inner.oracles[at], Role::Oracle, limit).await?;
                // Two calls at once may both connect; the later one's connection is kept, the other ends with it.
                *inner.good.lock() = (at, Some(rpc.clone()));
                rpc
            }
        };
        let outcome = rpc.call(request, limit).await;
        if outcome.as_ref().is_err_and(RpcError::is_transport) {
            // Do not wait for a silent oracle again before the others were asked.
            let mut good = inner.good.lock();
            if good.0 == at {
                *good = ((at + 1) % inner.oracles.len(), None);
            }
        }
        outcome
    }

    fn note_answer(&self, at: usize) {
        *self.inner.heard.lock() = Some(Instant::now());
        let mut good = self.inner.good.lock();
        if good.0 != at {
            *good = (at, None);
        }
    }
}

/// How long the oracle may wait before it answers.
fn waits(request: &OracleRequest) -> Duration {
    match request {
        OracleRequest::WatchMap { wait_ms, .. } => Duration::from_millis((*wait_ms).into()),
        _ => Duration::ZERO,
    }
}

fn may_be_done_twice(request: &OracleRequest) -> bool {
    match request {
        OracleRequest::CreateCollection(_) | OracleRequest::DropCollection { .. } => false,
        OracleRequest::Join { .. }
        | OracleRequest::Renew { .. }
        | OracleRequest::Leave { .. }
        | OracleRequest::WatchMap { .. }
        | OracleRequest::SetCollectionState { .. }
        | OracleRequest::GrowCollection { .. }
        | OracleRequest::RegionZeroed { .. }
        | OracleRequest::Status => true,
    }
}

fn unexpected(oracles: &OracleClient, question: &'static str, answer: &OracleResponse) -> OracleError {
    let answer = match answer {
        OracleResponse::Joined { .. } => "Joined",
        OracleResponse::Renewed { .. } => "Renewed",
        OracleResponse::Map(_) => "Map",
        OracleResponse::Collection { .. } => "Collection",
        OracleResponse::Done { .. } => "Done",
        OracleResponse::Status(_) => "Status",
    };
    let addr = oracles.inner.oracles[oracles.inner.good.lock().0];
    OracleError::Unexpected { addr, question, answer }
}

// ----------------------------------------------------------------------------------------------- Membership

/// What a process brings into the cluster.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Offer {
    /// Address that others shall use.
    pub addr: SocketAddr,
    /// This life of the process.
    pub incarnation: Incarnation,
    /// Regions offered (memory nodes only).
    pub regions: u16,
    /// Bytes of each.
    pub region_bytes: u64,
}

/// Whether the process has a running lease, as far as it knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Standing {
    /// Joined, or watching only.
    In,
    /// No oracle has renewed the lease in time; renewing goes on.
    Lapsed,
    /// Another process has taken the name: this one is out for good.
    Superseded,
}

/// A process's place in the cluster: keeps its lease, and follows the map.
///
/// Dropping it stops both at once without a word to the oracle; [`Self::leave`] says goodbye.
pub struct Membership {
    shared: Arc<Shared>,
    tasks: Mutex<JoinSet<()>>,
}

struct Shared {
    oracles: OracleClient,
    who: PeerIdentity,
    offer: Option<Offer>,
    map: ArcSwap<ClusterMap>,
    epoch: watch::Sender<Epoch>,
    grants: watch::Sender<Arc<[RegionGrant]>>,
    standing: watch::Sender<Standing>,
    lease: Mutex<Duration>,
    stop: watch::Sender<bool>,
}

impl fmt::Debug for Membership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Membership")
            .field("who", &self.shared.who)
            .field("epoch", &self.map().epoch)
            .finish_non_exhaustive()
    }
}

impl Membership {
    /// Joins the cluster, gets the map, and stays in. Tries until `deadline`, so that processes may start in any
    /// order.
    ///
    /// # Errors
    /// The oracle's refusal, at once; or by `deadline` why no oracle answered.
    pub async fn join(oracles: OracleClient, offer: Offer, deadline: Instant) -> Result<Self, OracleError> {
        let membership = Self::start(oracles, Some(offer), deadline).await?;
        let shared = membership.shared.clone();
        membership.tasks.lock().spawn(async move { until_stopped(&shared.clone(), renew(shared)).await });
        Ok(membership)
    }

    /// Follows the map without being a member: for clients.
    ///
    /// # Errors
    /// As [`Self::join`].
    pub async fn watch(oracles: OracleClient, deadline: Instant) -> Result<Self, OracleError> {
        Self::start(oracles, None, deadline).await
    }

    async fn start(
        oracles: OracleClient,
        offer: Option<Offer>,
        deadline: Instant,
    ) -> Result<Self, OracleError> {
        let shared = Arc::new(Shared {
            who: oracles.endpoint().identity().peer().clone(),
            oracles,
            offer,
            map: ArcSwap::default(),
            epoch: watch::Sender::new(Epoch::default()),
            grants: watch::Sender::new(Arc::from([])),
            standing: watch::Sender::new(Standing::In),
            lease: Mutex::new(LEASE_DEFAULT),
            stop: watch::Sender::new(false),
        });
        let mut pause = PAUSE_MIN;
        loop {
            let outcome = match shared.join_once(deadline).await {
                Ok(()) => shared.refresh(deadline).await,
                Err(error) => Err(error),
            };
            match outcome {
                Ok(_) => break,
                Err(error) if is_final(&error) || Instant::now() + pause >= deadline => return Err(error),
                Err(error) => tracing::debug!(%error, "no place in the cluster yet"),
            }
            tokio::time::sleep(pause).await;
            pause = (2 * pause).min(PAUSE_MAX);
        }
        let mut tasks = JoinSet::new();
        let watching = shared.clone();
        tasks.spawn(async move { until_stopped(&watching.clone(), follow(watching)).await });
        Ok(Self { shared, tasks: Mutex::new(tasks) })
    }

    /// The last map that was heard of.
    pub fn map(&self) -> Arc<ClusterMap> {
        self.shared.map.load_full()
    }

    /// Tells of new maps: its value is the epoch of [`Self::map`].
    pub fn changes(&self) -> watch::Receiver<Epoch> {
        self.shared.epoch.subscribe()
    }

    /// Waits for a map newer than `epoch`.
    pub async fn changed(&self, epoch: Epoch) -> Arc<ClusterMap> {
        let mut changes = self.changes();
        let _ = changes.wait_for(|now| *now > epoch).await;
        self.map()
    }

    /// Waits for a map of at least `epoch`; `None` if none came by `deadline`.
    pub async fn map_at(&self, epoch: Epoch, deadline: Instant) -> Option<Arc<ClusterMap>> {
        self.map_where(deadline, |map| map.epoch >= epoch).await
    }

    /// Waits for a map that satisfies `wanted`; `None` if none came by `deadline`.
    pub async fn map_where(
        &self,
        deadline: Instant,
        wanted: impl Fn(&ClusterMap) -> bool + Send,
    ) -> Option<Arc<ClusterMap>> {
        let mut changes = self.changes();
        let search = async {
            loop {
                let map = self.map();
                if wanted(&map) {
                    return Some(map);
                }
                changes.changed().await.ok()?;
            }
        };
        tokio::time::timeout_at(deadline.into(), search).await.ok().flatten()
    }

    /// Asks for the map now, and returns the newest that is known.
    ///
    /// # Errors
    /// If no oracle answers by `deadline`; the last map stays.
    pub async fn refresh(&self, deadline: Instant) -> Result<Arc<ClusterMap>, OracleError> {
        self.shared.refresh(deadline).await
    }

    /// Regions as granted at the last join, in the order of the offer. They change when the oracle had forgotten this
    /// process; between joins the map is what counts.
    pub fn grants(&self) -> watch::Receiver<Arc<[RegionGrant]>> {
        self.shared.grants.subscribe()
    }

    /// Whether the lease is running.
    pub fn standing(&self) -> watch::Receiver<Standing> {
        self.shared.standing.subscribe()
    }

    /// Whether an oracle has answered within the last lease.
    pub fn oracle_reachable(&self) -> bool {
        let lease = *self.shared.lease.lock();
        self.shared.oracles.silent_for().is_some_and(|silent| silent < lease)
    }

    /// The oracles' client, for further calls.
    pub fn oracles(&self) -> &OracleClient {
        &self.shared.oracles
    }

    /// Stops following and leaves the cluster. Returns when all tasks have ended; within about a second also if no
    /// oracle answers.
    pub async fn leave(&self) {
        self.shared.stop.send_replace(true);
        let mut tasks = std::mem::take(&mut *self.tasks.lock());
        while tasks.join_next().await.is_some() {}
        let (Some(offer), PeerIdentity { role, name }) = (&self.shared.offer, &self.shared.who) else {
            return;
        };
        let request =
            OracleRequest::Leave { name: (**name).into(), role: *role, incarnation: offer.incarnation };
        if let Err(error) = self.shared.oracles.call(&request, Instant::now() + LEAVE_TIME_MAX).await {
            tracing::info!(%error, "left without a word to the oracle");
        }
    }
}

/// Whether trying again cannot help.
fn is_final(error: &OracleError) -> bool {
    match error {
        OracleError::Fault(fault) => fault.code != FaultCode::Unavailable,
        OracleError::Unexpected { .. } => true,
        // An oracle of this cluster may come to where a stranger is now.
        OracleError::NoOracle { .. } | OracleError::Refused { .. } | OracleError::Unknown(_) => false,
    }
}

async fn until_stopped(shared: &Shared, work: impl Future<Output = ()>) {
    let mut stop = shared.stop.subscribe();
    tokio::select! {
        () = work => {}
        _ = stop.wait_for(|stop| *stop) => {}
    }
}

impl Shared {
    /// Joins, if there is anything to join with.
    async fn join_once(&self, deadline: Instant) -> Result<(), OracleError> {
        let Some(offer) = &self.offer else { return Ok(()) };
        let request = OracleRequest::Join {
            name: (*self.who.name).into(),
            role: self.who.role,
            addr: offer.addr.to_string(),
            incarnation: offer.incarnation,
            regions: offer.regions,
            region_bytes: offer.region_bytes,
        };
        match self.oracles.call(&request, deadline).await? {
            OracleResponse::Joined { lease_ms, regions, epoch } => {
                *self.lease.lock() = Duration::from_millis(lease_ms.max(1).into());
                tracing::info!(who = %self.who, %epoch, regions = regions.len(), lease_ms, "joined the cluster");
                self.grants.send_replace(regions.into());
                self.standing.send_replace(Standing::In);
                Ok(())
            }
            other => Err(unexpected(&self.oracles, "Join", &other)),
        }
    }

    async fn refresh(&self, deadline: Instant) -> Result<Arc<ClusterMap>, OracleError> {
        self.poll_map(0, deadline).await?;
        Ok(self.map.load_full())
    }

    /// One long poll.
    async fn poll_map(&self, wait_ms: u32, deadline: Instant) -> Result<(), OracleError> {
        let request = OracleRequest::WatchMap { after: self.map.load().epoch, wait_ms };
        match self.oracles.call(&request, deadline).await? {
            OracleResponse::Map(map) => {
                self.take_map(map);
                Ok(())
            }
            other => Err(unexpected(&self.oracles, "WatchMap", &other)),
        }
    }

    fn take_map(&self, map: ClusterMap) {
        // The watch's lock orders writers: maps come from the watch task and from `refresh`.
        self.epoch.send_if_modified(|epoch| {
            let newer = map.epoch > *epoch;
            if newer {
                *epoch = map.epoch;
                self.map.store(Arc::new(map));
            }
            newer
        });
    }
}

/// Keeps the lease until this process is superseded.
async fn renew(shared: Arc<Shared>) {
    let offer = shared.offer.expect("only members renew");
    let request = OracleRequest::Renew {
        name: (*shared.who.name).into(),
        role: shared.who.role,
        incarnation: offer.incarnation,
    };
    let mut renewed = Instant::now();
    let mut pause = PAUSE_MIN;
    loop {
        let lease = *shared.lease.lock();
        tokio::time::sleep_until((renewed + lease / 3).into()).await;
        let asked = Instant::now();
        let mut outcome = match shared.oracles.call(&request, asked + lease.max(CALL_TIME_MAX)).await {
            Ok(OracleResponse::Renewed { .. }) => Ok(()),
            Ok(other) => Err(unexpected(&shared.oracles, "Renew", &other)),
            Err(error) => Err(error),
        };
        if let Err(OracleError::Fault(fault)) = &outcome
            && fault.code == FaultCode::NotFound
        {
            tracing::warn!(who = %shared.who, %fault, "the oracle has forgotten this process, joining again");
            outcome = shared.join_once(Instant::now() + lease.max(CALL_TIME_MAX)).await;
        }
        match outcome {
            Ok(()) => {
                // A lease counts from before it was asked for: the oracle's clock started later, if at all.
                renewed = asked;
                pause = PAUSE_MIN;
                shared.standing.send_replace(Standing::In);
                continue;
            }
            Err(OracleError::Fault(fault)) if fault.code == FaultCode::Forbidden => {
                tracing::error!(who = %shared.who, %fault, "out of the cluster");
                shared.standing.send_replace(Standing::Superseded);
                return;
            }
            Err(error) => {
                if renewed.elapsed() >= lease {
                    let news = shared.standing.send_replace(Standing::Lapsed) != Standing::Lapsed;
                    if news {
                        tracing::warn!(who = %shared.who, %error, "the lease has run out, going on with the last map");
                    }
                }
            }
        }
        tokio::time::sleep(pause).await;
        pause = (2 * pause).min(PAUSE_MAX);
        // The next try is due at once: `renewed` stays as it was.
    }
}

/// Follows the map for good.
async fn follow(shared: Arc<Shared>) {
    let mut pause = PAUSE_MIN;
    loop {
        // Often enough that `oracle_reachable` tells the truth also where nothing renews.
        let wait = *shared.lease.lock() / 3;
        let wait_ms = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX).min(30_000);
        match shared.poll_map(wait_ms, Instant::now() + wait + CALL_TIME_MAX).await {
            Ok(()) => pause = PAUSE_MIN,
            Err(error) => {
                tracing::debug!(%error, "no map");
                tokio::time::sleep(pause).await;
                pause = (2 * pause).min(PAUSE_MAX);
            }
        }
    }
}
