//! The oracle at work: calls over QUIC, one keeper of the state, leases, watchers.
//!
//! ```text
//!  connections ──► role check ──┬─ WatchMap, Status: answered from the published map
//!                               └─ all else ──► queue, bounded ──► keeper task
//!  keeper: apply a batch ──► store it, if the map changed ──► publish ──► answer
//! ```
//!
//! Invariant: nothing is answered or published before it is stored, so that no epoch is ever seen twice with two
//! contents.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use shine_common::ids::Epoch;
use shine_common::net::endpoint::{Alpn, Endpoint, close};
use shine_common::net::rpc::{self, Handler};
use shine_common::net::tls::PeerIdentity;
use shine_common::wire::{ClusterMap, Fault, FaultCode, NodeStatus, OracleRequest, OracleResponse, Role};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::state::{Core, State};
use crate::store::{StateStore, StoreError};

/// Most connections at once.
pub const CONNECTIONS_MAX: usize = 4_096;
/// Most long polls that wait at once.
pub const WATCHERS_MAX: usize = 8_192;
/// Longest wait of a long poll.
pub const WATCH_MS_MAX: u32 = 30_000;
/// Requests that wait for the keeper; more are refused.
const QUEUE_MAX: usize = 1_024;
/// Requests that are stored together.
const BATCH_MAX: usize = 256;
/// Pause after the state could not be stored, before leases are looked at again.
const STORE_PAUSE: Duration = Duration::from_secs(1);

/// What an oracle is told.
#[derive(Clone, Debug)]
pub struct OracleOptions {
    /// Length of membership leases.
    pub lease: Duration,
}

impl Default for OracleOptions {
    fn default() -> Self {
        Self { lease: Duration::from_secs(3) }
    }
}

/// A store with the state to start from.
#[derive(Debug)]
pub struct Loaded {
    store: Box<dyn StateStore>,
    state: State,
}

impl Loaded {
    /// Takes up what `store` holds, or starts an empty cluster.
    ///
    /// # Errors
    /// If the stored state cannot be had.
    pub fn from_store(store: Box<dyn StateStore>) -> Result<Self, StoreError> {
        let state = match store.load()? {
            Some(state) => {
                let map = state.map();
                tracing::info!(epoch = %map.epoch, members = map.members.len(), "took up the stored state");
                state
            }
            None => State::empty(first_epoch()),
        };
        Ok(Self { store, state })
    }
}

/// Runs an oracle on `endpoint` until `stop` is ready; then closes the endpoint.
pub async fn run(endpoint: Endpoint, loaded: Loaded, options: OracleOptions, stop: impl Future<Output = ()>) {
    let Loaded { store, state } = loaded;
    let core = Core::new(state, u32::try_from(options.lease.as_millis()).unwrap_or(u32::MAX), 0);
    let (jobs_tx, jobs) = mpsc::channel(QUEUE_MAX);
    let (map_tx, map) = watch::channel(Arc::new(core.state().map()));
    let start = Instant::now();
    let keeper = Keeper { core, store: Some(store), map: map_tx, start };
    let keeper = tokio::spawn(keeper.run(jobs));
    let oracle = Arc::new(Oracle {
        name: endpoint.identity().name().to_string(),
        jobs: jobs_tx,
        map,
        watchers: Semaphore::new(WATCHERS_MAX),
        start,
    });

    let mut connections = JoinSet::new();
    let mut stop = pin!(stop);
    loop {
        let (connection, peer, alpn) = tokio::select! {
            () = &mut stop => break,
            accepted = endpoint.accept() => match accepted {
                Some(accepted) => accepted,
                None => break,
            },
            Some(_) = connections.join_next() => continue,
        };
        if alpn != Alpn::Rpc {
            connection.close(close::PROTOCOL, b"an oracle has no memory: it serves no verbs");
        } else if connections.len() >= CONNECTIONS_MAX {
            tracing::warn!(%peer, "too many connections, closed one");
            connection.close(close::BUSY, b"the oracle has too many connections");
        } else {
            connections.spawn(rpc::serve(connection, peer, oracle.clone()));
        }
    }
    connections.shutdown().await;
    // With the last sender gone the keeper ends, after what was queued.
    drop(oracle);
    if let Err(error) = keeper.await
        && error.is_panic()
    {
        std::panic::resume_unwind(error.into_panic());
    }
    endpoint.close().await;
}

/// An epoch above any that an earlier oracle without a store can have reached: they count from here one by one, and
/// much slower than a thousand a second.
#[expect(clippy::disallowed_methods, reason = "only the wall clock goes on while no oracle runs")]
fn first_epoch() -> Epoch {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Epoch(u64::try_from(since_1970.as_millis()).unwrap_or(0))
}

// ---------------------------------------------------------------------------------------------------- calls

/// Whether a peer of this identity may ask this.
///
/// # Errors
/// `Forbidden`, with who may.
pub fn authorise(peer: &PeerIdentity, request: &OracleRequest) -> Result<(), Fault> {
    let (what, allowed): (&str, &[Role]) = match request {
        OracleRequest::Join { name, role, .. }
        | OracleRequest::Renew { name, role, .. }
        | OracleRequest::Leave { name, role, .. } => {
            if (peer.role, &*peer.name) != (*role, name.as_str()) {
                return Err(Fault::new(
                    FaultCode::Forbidden,
                    format!("the certificate is for {peer}: it cannot speak for {role} '{name}'"),
                ));
            }
            ("be a member", &[Role::Cn, Role::Mn])
        }
        OracleRequest::RegionZeroed { mn, .. } => {
            if peer.role == Role::Mn && *peer.name != **mn {
                return Err(Fault::new(
                    FaultCode::Forbidden,
                    format!("the certificate is for {peer}: it cannot speak for mn '{mn}'"),
                ));
            }
            ("report regions", &[Role::Mn])
        }
        OracleRequest::SetCollectionState { .. } | OracleRequest::GrowCollection { .. } => {
            ("change collections", &[Role::Cn])
        }
        OracleRequest::CreateCollection(_) | OracleRequest::DropCollection { .. } => {
            ("create and drop collections", &[Role::Cn, Role::Admin])
        }
        OracleRequest::WatchMap { .. } | OracleRequest::Status => return Ok(()),
    };
    if allowed.contains(&peer.role) {
        return Ok(());
    }
    let allowed: Vec<String> = allowed.iter().map(Role::to_string).collect();
    Err(Fault::new(
        FaultCode::Forbidden,
        format!("{peer} may not {what}: expected role {}", allowed.join(" or ")),
    ))
}

struct Job {
    request: OracleRequest,
    reply: oneshot::Sender<Result<OracleResponse, Fault>>,
}

struct Oracle {
    name: String,
    jobs: mpsc::Sender<Job>,
    map: watch::Receiver<Arc<ClusterMap>>,
    watchers: Semaphore,
    start: Instant,
}

impl Handler for Oracle {
    type Request = OracleRequest;
    type Response = OracleResponse;

    async fn handle(&self, peer: &PeerIdentity, request: OracleRequest) -> Result<OracleResponse, Fault> {
        authorise(peer, &request)?;
        match request {
            OracleRequest::WatchMap { after, wait_ms } => self.watch(after, wait_ms).await,
            OracleRequest::Status => Ok(OracleResponse::Status(self.status())),
            request => self.ask_keeper(request).await,
        }
    }
}

impl Oracle {
    async fn watch(&self, after: Epoch, wait_ms: u32) -> Result<OracleResponse, Fault> {
        if wait_ms > WATCH_MS_MAX {
            let message = format!("a wait of {wait_ms} ms: at most {WATCH_MS_MAX}");
            return Err(Fault::new(FaultCode::BadRequest, message));
        }
        let Ok(_place) = self.watchers.try_acquire() else {
            let message = format!("{WATCHERS_MAX} long polls wait already");
            return Err(Fault::new(FaultCode::Overloaded, message));
        };
        let mut map = self.map.clone();
        let wait = Duration::from_millis(wait_ms.into());
        // Whether a newer one came or not, the map as it is now is the answer.
        let _ = tokio::time::timeout(wait, map.wait_for(|map| map.epoch > after)).await;
        let map = map.borrow().clone();
        Ok(OracleResponse::Map((*map).clone()))
    }

    fn status(&self) -> NodeStatus {
        NodeStatus {
            name: self.name.clone(),
            role: Role::Oracle,
            version: env!("CARGO_PKG_VERSION").into(),
            uptime_s: self.start.elapsed().as_secs(),
            epoch: self.map.borrow().epoch.0,
            oracle_reachable: true,
            simd: "none".into(),
            counters: vec![("watchers".into(), (WATCHERS_MAX - self.watchers.available_permits()) as u64)],
        }
    }

    async fn ask_keeper(&self, request: OracleRequest) -> Result<OracleResponse, Fault> {
        let (reply, answer) = oneshot::channel();
        match self.jobs.try_send(Job { request, reply }) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(_)) => {
                return Err(Fault::new(FaultCode::Overloaded, format!("{QUEUE_MAX} requests wait already")));
            }
            Err(mpsc::error::TrySendError::Closed(_)) => return Err(stopping()),
        }
        answer.await.unwrap_or_else(|_| Err(stopping()))
    }
}

fn stopping() -> Fault {
    Fault::new(FaultCode::Unavailable, "the oracle is stopping")
}

// --------------------------------------------------------------------------------------------------- keeper

/// Owns the state. One task, so that operations are applied one after another.
struct Keeper {
    core: Core,
    /// At home but while a write is under way.
    store: Option<Box<dyn StateStore>>,
    map: watch::Sender<Arc<ClusterMap>>,
    start: Instant,
}

impl Keeper {
    async fn run(mut self, mut jobs: mpsc::Receiver<Job>) {
        let mut batch = Vec::with_capacity(BATCH_MAX);
        // Leases are not looked at before this.
        let mut expire_from = self.start;
        loop {
            let expiry = self.core.next_expiry_ms().map(|ms| self.start + Duration::from_millis(ms));
            let expiry = expiry.map(|at| at.max(expire_from));
            batch.clear();
            tokio::select! {
                biased;
                count = jobs.recv_many(&mut batch, BATCH_MAX) => if count == 0 { return },
                () = sleep_until(expiry) => {}
            }
            if let Some(late) = expiry.map(|at| at.elapsed())
                && late > Duration::from_millis(self.core.lease_ms().into()) / 2
            {
                // This process was stopped or starved: renewals may be waiting in its socket.
                tracing::warn!(late_ms = late.as_millis() as u64, "woke late, leases go on a little");
                self.core.forgive(self.now_ms());
            }
            let before = self.core.clone();
            let now_ms = self.now_ms();
            let mut answers = Vec::with_capacity(batch.len());
            for Job { request, reply } in batch.drain(..) {
                let answer = self.core.apply(&request, now_ms);
                log_outcome(&request, &answer);
                answers.push((reply, answer));
            }
            if Instant::now() >= expire_from {
                for who in self.core.expire(now_ms) {
                    tracing::warn!(who, "a lease has run out, marked down");
                }
            }
            if self.core.state().epoch() != before.state().epoch()
                && let Err(error) = self.save().await
            {
                tracing::error!(%error, "the state cannot be stored, refusing changes");
                let refused =
                    Fault::new(FaultCode::Unavailable, format!("the oracle cannot store its state: {error}"));
                self.core = before;
                answers.iter_mut().for_each(|(_, answer)| *answer = Err(refused.clone()));
                expire_from = Instant::now() + STORE_PAUSE;
            }
            self.publish();
            for (reply, answer) in answers {
                // A caller that is gone needs no answer.
                let _ = reply.send(answer);
            }
        }
    }

    /// Stores the state as it is. Writing blocks, so that it has a thread of its own.
    async fn save(&mut self) -> Result<(), StoreError> {
        let store = self.store.take().expect("one write at a time");
        let state = self.core.state().clone();
        let write = tokio::task::spawn_blocking(move || {
            let outcome = store.save(&state);
            (store, outcome)
        });
        let (store, outcome) = write.await.expect("a store returns errors and does not panic");
        self.store = Some(store);
        outcome
    }

    fn publish(&self) {
        let epoch = self.core.state().epoch();
        if self.map.borrow().epoch != epoch {
            self.map.send_replace(Arc::new(self.core.state().map()));
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

fn log_outcome(request: &OracleRequest, answer: &Result<OracleResponse, Fault>) {
    match (request, answer) {
        (OracleRequest::Renew { .. }, Ok(_)) => {}
        (request, Ok(OracleResponse::Collection { collection, epoch })) => {
            tracing::info!(request = kind(request), name = collection.name, id = %collection.id, %epoch, "done");
        }
        (OracleRequest::Join { name, role, addr, .. }, Ok(OracleResponse::Joined { epoch, regions, .. })) => {
            tracing::info!(%role, name, addr, regions = regions.len(), %epoch, "joined");
        }
        (request, Ok(OracleResponse::Done { epoch })) => {
            tracing::info!(request = kind(request), %epoch, "done")
        }
        (request, Ok(_)) => tracing::info!(request = kind(request), "done"),
        (request, Err(fault)) => tracing::info!(request = kind(request), %fault, "refused"),
    }
}

fn kind(request: &OracleRequest) -> &'static str {
    match request {
        OracleRequest::Join { .. } => "Join",
        OracleRequest::Renew { .. } => "Renew",
        OracleRequest::Leave { .. } => "Leave",
        OracleRequest::WatchMap { .. } => "WatchMap",
        OracleRequest::CreateCollection(_) => "CreateCollection",
        OracleRequest::SetCollectionState { .. } => "SetCollectionState",
        OracleRequest::GrowCollection { .. } => "GrowCollection",
        OracleRequest::DropCollection { .. } => "DropCollection",
        OracleRequest::RegionZeroed { .. } => "RegionZeroed",
        OracleRequest::Status => "Status",
    }
}
