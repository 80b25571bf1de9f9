//! The edge of a compute node: its place in the cluster, its connections, and the sessions that it opens.
//!
//! ```text
//!  oracle ──► membership ──► fabric (the map)
//!  clients ──► calls, http ──► node ──► fabric ──► verbs over QUIC ──► memory nodes
//! ```

use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use shine_common::ids::Epoch;
use shine_common::net::endpoint::{Alpn, Endpoint, close};
use shine_common::net::membership::{
    Membership, Offer, OracleClient, OracleError, Standing, new_incarnation,
};
use shine_common::net::rpc::{self, Handler};
use shine_common::net::tls::PeerIdentity;
use shine_common::verbs::quic::QuicVerbs;
use shine_common::verbs::{VerbError, Verbs};
use shine_common::wire::{CnRequest, CnResponse, Fault, Member, OracleRequest, OracleResponse};
use tokio::task::JoinSet;

use crate::catalogue::Catalogue;
use crate::collection::Options;
use crate::counters::Counters;
use crate::fabric::{Connect, Fabric};
use crate::http::Http;
use crate::node::{Limits, Node, Parts};

/// Most connections at once.
pub const CONNECTIONS_MAX: usize = 4_096;
/// Time that running requests have when the node leaves.
const DRAIN_TIME: Duration = Duration::from_secs(5);
/// Time that HTTP answers have after that.
const HTTP_CLOSE_TIME: Duration = Duration::from_secs(3);
/// Between two looks for loads that nothing comes for.
const REAP_INTERVAL: Duration = Duration::from_secs(5);

/// Sessions over QUIC from one endpoint.
#[derive(Clone, Debug)]
pub struct QuicConnect(pub Endpoint);

impl Connect<QuicVerbs> for QuicConnect {
    fn connect(&self, mn: &Member, deadline: Instant) -> BoxFuture<'static, Result<QuicVerbs, VerbError>> {
        let (endpoint, mn) = (self.0.clone(), mn.clone());
        Box::pin(async move {
            let lost = |why: String| VerbError::ConnectionLost { peer: mn.name.as_str().into(), why };
            let addr: SocketAddr =
                mn.addr.parse().map_err(|_| lost(format!("'{}' is no address", mn.addr)))?;
            let verbs = QuicVerbs::connect(&endpoint, addr, &mn.name, mn.incarnation, deadline).await;
            verbs.map_err(|error| lost(error.to_string()))
        })
    }
}

impl Catalogue for OracleClient {
    fn call(
        &self,
        request: OracleRequest,
        deadline: Instant,
    ) -> BoxFuture<'_, Result<OracleResponse, Fault>> {
        Box::pin(async move { Ok(Self::call(self, &request, deadline).await?) })
    }
}

/// What a compute node is made of.
#[derive(Debug)]
pub struct Setup {
    /// Where it is called, with its identity.
    pub endpoint: Endpoint,
    /// Address that others shall use.
    pub addr: SocketAddr,
    /// Oracles.
    pub oracles: Vec<SocketAddr>,
    /// How collections are worked with.
    pub options: Options,
    /// Bounds.
    pub limits: Limits,
}

/// Why a compute node did not start, or stopped by itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// No place in the cluster.
    #[error("joining the cluster: {0}")]
    Join(#[from] OracleError),
    /// Another process has the name.
    #[error("another process has joined as compute node '{0}': this one is out of the cluster")]
    Superseded(Arc<str>),
    /// The endpoint was closed under it.
    #[error("the endpoint is closed")]
    Closed,
}

/// A compute node that has joined.
#[derive(Debug)]
pub struct ComputeNode {
    endpoint: Endpoint,
    addr: SocketAddr,
    membership: Arc<Membership>,
    fabric: Arc<Fabric<QuicVerbs>>,
    node: Arc<Node<QuicVerbs>>,
}

impl ComputeNode {
    /// Joins the cluster, which is tried until `deadline`.
    ///
    /// # Errors
    /// If there is no place in the cluster.
    pub async fn start(setup: Setup, deadline: Instant) -> Result<Self, NodeError> {
        let Setup { endpoint, addr, oracles, options, limits } = setup;
        let name = endpoint.identity().name().to_string();
        let oracles = OracleClient::new(endpoint.clone(), oracles);
        let offer = Offer { addr, incarnation: new_incarnation(), regions: 0, region_bytes: 0 };
        let membership = Arc::new(Membership::join(oracles.clone(), offer, deadline).await?);
        let fabric = Fabric::new(Arc::new(QuicConnect(endpoint.clone())), Arc::new(Counters::default()));
        fabric.publish(membership.map());
        let reachable = Arc::clone(&membership);
        let node = Node::new(Parts {
            name,
            fabric: Arc::clone(&fabric),
            catalogue: Arc::new(oracles),
            oracle_reachable: Box::new(move || reachable.oracle_reachable()),
            options,
            limits,
        });
        Ok(Self { endpoint, addr, membership, fabric, node })
    }

    /// Address that others use.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The node itself.
    pub fn node(&self) -> &Arc<Node<QuicVerbs>> {
        &self.node
    }

    /// Serves, by HTTP too if it is given, until `stop` is ready; then lets running requests end, leaves the cluster and closes the endpoint.
    ///
    /// # Errors
    /// If it cannot go on. It has left, as far as it could, in any case.
    pub async fn run(self, http: Option<Http>, stop: impl Future<Output = ()>) -> Result<(), NodeError> {
        let Self { endpoint, membership, fabric, node, .. } = self;
        let name = Arc::clone(endpoint.identity().name());
        let mut standing = membership.standing();
        let superseded = async move {
            if standing.wait_for(|now| *now == Standing::Superseded).await.is_err() {
                // The membership is gone, and with it whoever could say so.
                std::future::pending::<()>().await;
            }
        };
        let mut background = JoinSet::new();
        background.spawn(follow(Arc::clone(&membership), fabric));
        background.spawn(reap(Arc::clone(&node)));
        let (close_http, http_closes) = tokio::sync::oneshot::channel::<()>();
        let mut api = JoinSet::new();
        if let Some(http) = http {
            let closes = async { drop(http_closes.await) };
            api.spawn(http.serve(Arc::clone(&node), closes));
        }
        let calls = Arc::new(Calls(Arc::clone(&node)));
        let mut connections = JoinSet::new();
        let (mut stop, mut superseded) = (pin!(stop), pin!(superseded));
        let mut draining = None;
        let outcome = loop {
            let accepted = tokio::select! {
                () = &mut stop, if draining.is_none() => {
                    // New requests are refused from here on; connections stay, so that answers still go out.
                    let node = Arc::clone(&node);
                    draining = Some(tokio::spawn(async move { node.drain(Instant::now() + DRAIN_TIME).await }));
                    continue;
                }
                () = &mut superseded => break Err(NodeError::Superseded(name)),
                () = ended(&mut draining) => break Ok(()),
                accepted = endpoint.accept() => accepted,
                Some(_) = connections.join_next() => continue,
            };
            let Some((connection, peer, alpn)) = accepted else { break Err(NodeError::Closed) };
            if connections.len() >= CONNECTIONS_MAX {
                tracing::warn!(%peer, "too many connections, closed one");
                connection.close(close::BUSY, b"the compute node has too many connections");
                continue;
            }
            match alpn {
                Alpn::Rpc => drop(connections.spawn(rpc::serve(connection, peer, Arc::clone(&calls)))),
                Alpn::Verbs => connection.close(close::PROTOCOL, b"a compute node serves no verbs"),
            }
        };
        drop(close_http);
        let closed = async { while api.join_next().await.is_some() {} };
        if tokio::time::timeout(HTTP_CLOSE_TIME, closed).await.is_err() {
            api.shutdown().await;
        }
        background.shutdown().await;
        membership.leave().await;
        endpoint.close().await;
        connections.shutdown().await;
        outcome
    }
}

/// Completes when what is draining has; never if nothing is.
async fn ended(draining: &mut Option<tokio::task::JoinHandle<()>>) {
    match draining {
        Some(task) => {
            if let Err(failure) = task.await {
                tracing::error!(%failure, "draining broke off");
            }
        }
        None => std::future::pending().await,
    }
}

/// Hands every new map on to the data plane.
async fn follow<V: Verbs>(membership: Arc<Membership>, fabric: Arc<Fabric<V>>) {
    let mut seen = Epoch::default();
    loop {
        let map = membership.changed(seen).await;
        seen = map.epoch;
        fabric.publish(map);
    }
}

async fn reap<V: Verbs>(node: Arc<Node<V>>) {
    let mut ticks = tokio::time::interval(REAP_INTERVAL);
    loop {
        ticks.tick().await;
        node.reap_loads(Instant::now());
    }
}

/// Requests of clients, from the wire.
#[derive(Debug)]
struct Calls<V>(Arc<Node<V>>);

impl<V: Verbs> Handler for Calls<V> {
    type Request = CnRequest;
    type Response = CnResponse;

    fn handle(
        &self,
        peer: &PeerIdentity,
        request: CnRequest,
    ) -> impl Future<Output = Result<CnResponse, Fault>> + Send {
        let (node, role) = (Arc::clone(&self.0), peer.role);
        async move { node.handle(role, request).await }
    }
}
