//! A memory node at work: memory, membership, connections.
//!
//! ```text
//!  oracle ──► membership ──► follower task: grants and maps ──► steps ──► host
//!  compute nodes ──► connections ──┬─ verbs ──► host
//!  anybody ────────────────────────┴─ calls ──► status
//! ```
//!
//! Invariant: the incarnation is drawn anew in each process, and content begins with it: what a restarted memory node
//! holds is never taken for what the one before it held.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shine_common::ids::{Epoch, Incarnation, RegionId};
use shine_common::net::endpoint::{Alpn, Endpoint, close};
use shine_common::net::membership::{
    Membership, Offer, OracleClient, OracleError, Standing, new_incarnation,
};
use shine_common::net::rpc::{self, Handler};
use shine_common::net::tls::PeerIdentity;
use shine_common::verbs::host::{Host, HostOptions};
use shine_common::verbs::memory::{HugePages, Pages, RegionMemory};
use shine_common::verbs::quic;
use shine_common::wire::{
    Fault, FaultCode, MnRequest, MnResponse, NodeStatus, OracleRequest, RegionGrant, Role,
};
use tokio::task::JoinSet;

use crate::region::{Step, after_join, after_map};

/// Most connections at once.
pub const CONNECTIONS_MAX: usize = 4_096;
/// Time that an oracle has to take a report.
const REPORT_TIME: Duration = Duration::from_secs(5);
/// Pause before a report that failed is made again.
const REPORT_PAUSE: Duration = Duration::from_millis(200);

/// What a memory node is made of.
#[derive(Debug)]
pub struct Setup {
    /// Where it is called, with its identity.
    pub endpoint: Endpoint,
    /// Address that others shall use.
    pub addr: SocketAddr,
    /// Oracles.
    pub oracles: Vec<SocketAddr>,
    /// Number of regions.
    pub regions: u16,
    /// Bytes of each.
    pub region_bytes: u64,
    /// Their pages.
    pub huge_pages: HugePages,
    /// Lease of access sessions.
    pub access_lease: Duration,
}

/// Why a memory node did not start, or stopped by itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// No memory.
    #[error("{regions} regions of {region_bytes} bytes: {why}")]
    Memory {
        /// Regions wanted.
        regions: u16,
        /// Bytes of each.
        region_bytes: u64,
        /// What the system said.
        why: std::io::Error,
    },
    /// No place in the cluster.
    #[error("joining the cluster: {0}")]
    Join(#[from] OracleError),
    /// Another process has the name.
    #[error("another process has joined as memory node '{0}': this one is out of the cluster")]
    Superseded(Arc<str>),
    /// The endpoint was closed under it.
    #[error("the endpoint is closed")]
    Closed,
}

/// A memory node that has joined.
#[derive(Debug)]
pub struct MemoryNode {
    endpoint: Endpoint,
    addr: SocketAddr,
    host: Arc<Host>,
    membership: Arc<Membership>,
    follower: Follower,
    started: Instant,
}

impl MemoryNode {
    /// Takes the memory and joins the cluster, which is tried until `deadline`.
    ///
    /// # Errors
    /// If there is no such memory, or no place in the cluster.
    pub async fn start(setup: Setup, deadline: Instant) -> Result<Self, NodeError> {
        let Setup { endpoint, addr, oracles, regions, region_bytes, huge_pages, access_lease } = setup;
        let no_memory = |why| NodeError::Memory { regions, region_bytes, why };
        // All of it before joining: what was offered is there.
        let spare: VecDeque<_> = (0..regions)
            .map(|_| RegionMemory::new(region_bytes, huge_pages))
            .collect::<Result<_, _>>()
            .map_err(no_memory)?;
        let pages = spare.iter().map(RegionMemory::pages).min_by_key(|pages| match pages {
            Pages::Small => 0,
            Pages::Transparent => 1,
            Pages::Reserved => 2,
        });
        if let Some(pages) = pages {
            tracing::info!(regions, region_bytes, %pages, "memory is reserved");
        }
        let incarnation = new_incarnation();
        let name = Arc::clone(endpoint.identity().name());
        let host_options = HostOptions { lease: access_lease, ..HostOptions::default() };
        let host = Host::new(Arc::clone(&name), incarnation, host_options);
        let oracles = OracleClient::new(endpoint.clone(), oracles);
        let offer = Offer { addr, incarnation, regions, region_bytes };
        let membership = Arc::new(Membership::join(oracles, offer, deadline).await?);
        let mut follower = Follower {
            host: Arc::clone(&host),
            membership: Arc::clone(&membership),
            name,
            incarnation,
            spare,
            region_bytes,
            huge_pages,
            reports: Vec::new(),
        };
        // Served as granted before anybody is told that this node is ready.
        let grants = membership.grants().borrow().clone();
        follower.take_grants(&grants).map_err(no_memory)?;
        Ok(Self { endpoint, addr, host, membership, follower, started: Instant::now() })
    }

    /// Address that others use.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The regions and sessions.
    pub fn host(&self) -> &Arc<Host> {
        &self.host
    }

    /// Serves until `stop` is ready; then leaves the cluster and closes the endpoint.
    ///
    /// # Errors
    /// If it cannot go on. It has left, as far as it could, in any case.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Result<(), NodeError> {
        let Self { endpoint, host, membership, follower, started, .. } = self;
        let calls = Arc::new(Calls { host: Arc::clone(&host), membership: Arc::clone(&membership), started });
        let mut standing = membership.standing();
        let superseded = async move {
            if standing.wait_for(|now| *now == Standing::Superseded).await.is_err() {
                // The membership is gone, and with it whoever could say so.
                std::future::pending::<()>().await;
            }
        };
        let mut follower = tokio::spawn(follower.run());
        let mut connections = JoinSet::new();
        let (mut stop, mut superseded) = (pin!(stop), pin!(superseded));
        let outcome = loop {
            let (connection, peer, alpn) = tokio::select! {
                () = &mut stop => break Ok(()),
                () = &mut superseded => break Err(NodeError::Superseded(Arc::clone(host.name()))),
                failed = &mut follower => break match failed {
                    Ok(error) => Err(error),
                    Err(panicked) => std::panic::resume_unwind(panicked.into_panic()),
                },
                accepted = endpoint.accept() => match accepted {
                    Some(accepted) => accepted,
                    None => break Err(NodeError::Closed),
                },
                Some(_) = connections.join_next() => continue,
            };
            if connections.len() >= CONNECTIONS_MAX {
                tracing::warn!(%peer, "too many connections, closed one");
                connection.close(close::BUSY, b"the memory node has too many connections");
                continue;
            }
            match alpn {
                Alpn::Verbs => {
                    let host = Arc::clone(&host);
                    connections.spawn(async move {
                        tracing::info!(%peer, "verbs begin");
                        match quic::serve(host, connection, peer.clone()).await {
                            Ok(()) => tracing::info!(%peer, "verbs end"),
                            Err(error @ quic::ServeError::Lost { .. }) => tracing::info!(%error, "verbs end"),
                            Err(error) => tracing::warn!(%error, "verbs end"),
                        }
                    });
                }
                Alpn::Rpc => {
                    connections.spawn(rpc::serve(connection, peer, Arc::clone(&calls)));
                }
            }
        };
        follower.abort();
        connections.shutdown().await;
        membership.leave().await;
        endpoint.close().await;
        outcome
    }
}

// --------------------------------------------------------------------------------------------------- follower

/// Keeps the host in step with the oracle.
#[derive(Debug)]
struct Follower {
    host: Arc<Host>,
    membership: Arc<Membership>,
    name: Arc<str>,
    incarnation: Incarnation,
    /// Memory that no region has been given yet.
    spare: VecDeque<RegionMemory>,
    region_bytes: u64,
    huge_pages: HugePages,
    /// Regions that are zeroed, and of which the oracle has not heard.
    reports: Vec<(RegionId, Epoch)>,
}

impl Follower {
    /// Follows for good; returns why it cannot.
    async fn run(mut self) -> NodeError {
        let (mut grants, mut changes) = (self.membership.grants(), self.membership.changes());
        loop {
            let granted = grants.borrow_and_update().clone();
            changes.borrow_and_update();
            if let Err(why) = self.take_grants(&granted) {
                let regions = u16::try_from(granted.len()).unwrap_or(u16::MAX);
                return NodeError::Memory { regions, region_bytes: self.region_bytes, why };
            }
            self.take_map().await;
            let all_heard = self.report().await;
            tokio::select! {
                changed = grants.changed() => if changed.is_err() { std::future::pending::<()>().await },
                changed = changes.changed() => if changed.is_err() { std::future::pending::<()>().await },
                () = tokio::time::sleep(REPORT_PAUSE), if !all_heard => {}
            }
        }
    }

    fn take_grants(&mut self, grants: &[RegionGrant]) -> std::io::Result<()> {
        for step in after_join(&self.host.regions(), grants) {
            match step {
                Step::Host(grant) => {
                    let memory = match self.spare.pop_front() {
                        Some(memory) => memory,
                        // Of a region that was given up before; its memory is back with the system.
                        None => RegionMemory::new(self.region_bytes, self.huge_pages)?,
                    };
                    let RegionGrant { id, epoch, born } = grant;
                    self.host.add_region(id, epoch, born, memory).expect("only the follower adds regions");
                    tracing::debug!(region = %id, %epoch, %born, "region is served");
                }
                Step::GiveUp(id) => {
                    self.host.remove_region(id).expect("only the follower removes regions");
                    tracing::warn!(region = %id, "region is no longer granted, its content is dropped");
                }
                other => Self::advance(&self.host, other),
            }
        }
        Ok(())
    }

    async fn take_map(&mut self) {
        let map = self.membership.map();
        let steps = after_map(&self.host.regions(), &map, &self.name, self.incarnation);
        self.reports.clear();
        for step in steps {
            if let Step::Report(region, epoch) = step {
                self.reports.push((region, epoch));
                continue;
            }
            // Zeroing takes its time, which is not the time of those who serve verbs.
            let host = Arc::clone(&self.host);
            let done = tokio::task::spawn_blocking(move || Self::advance(&host, step)).await;
            if let Err(panicked) = done
                && panicked.is_panic()
            {
                std::panic::resume_unwind(panicked.into_panic());
            }
        }
    }

    fn advance(host: &Host, step: Step) {
        match step {
            Step::Zero(RegionGrant { id, epoch, born }) => {
                host.reset_region(id, epoch, born).expect("a step is about a region that is served");
                tracing::info!(region = %id, %epoch, "region is zeroed");
            }
            Step::Move(RegionGrant { id, epoch, born }) => {
                host.set_epoch(id, epoch, born).expect("a step is about a region that is served");
                tracing::info!(region = %id, %epoch, "region has moved on");
            }
            Step::Host(_) | Step::GiveUp(_) | Step::Report(..) => {
                unreachable!("these are steps of their own")
            }
        }
    }

    /// Tells the oracle which regions are zeroed. Returns whether it has heard of all.
    async fn report(&mut self) -> bool {
        let mut unheard = Vec::new();
        for (region, epoch) in std::mem::take(&mut self.reports) {
            let request = OracleRequest::RegionZeroed {
                mn: self.name.to_string(),
                incarnation: self.incarnation,
                region,
                epoch,
            };
            match self.membership.oracles().call(&request, Instant::now() + REPORT_TIME).await {
                Ok(_) => tracing::debug!(%region, %epoch, "the oracle knows that the region is zeroed"),
                // The map has moved on meanwhile: the next one says what to do.
                Err(OracleError::Fault(fault)) if fault.code == FaultCode::StaleEpoch => {
                    tracing::debug!(%region, %fault, "a report came late");
                }
                Err(error) => {
                    tracing::warn!(%region, %error, "the oracle has not heard that a region is zeroed, trying again");
                    unheard.push((region, epoch));
                }
            }
        }
        self.reports = unheard;
        self.reports.is_empty()
    }
}

// ------------------------------------------------------------------------------------------------------ calls

/// Answers calls to the node's processor.
struct Calls {
    host: Arc<Host>,
    membership: Arc<Membership>,
    started: Instant,
}

impl Handler for Calls {
    type Request = MnRequest;
    type Response = MnResponse;

    async fn handle(&self, _peer: &PeerIdentity, request: MnRequest) -> Result<MnResponse, Fault> {
        match request {
            MnRequest::Status => Ok(MnResponse::Status(self.status())),
        }
    }
}

impl Calls {
    fn status(&self) -> NodeStatus {
        let regions = self.host.regions();
        let mut counters = self.host.counters().snapshot();
        let bytes: u64 = regions.iter().map(|region| region.bytes).sum();
        counters.extend([
            ("regions".to_owned(), regions.len() as u64),
            ("region_bytes".to_owned(), bytes),
            ("sessions".to_owned(), self.host.session_count() as u64),
        ]);
        NodeStatus {
            name: self.host.name().to_string(),
            role: Role::Mn,
            version: env!("CARGO_PKG_VERSION").into(),
            uptime_s: self.started.elapsed().as_secs(),
            epoch: self.membership.map().epoch.0,
            oracle_reachable: self.membership.oracle_reachable(),
            // A memory node computes no distances.
            simd: "none".into(),
            counters,
        }
    }
}
