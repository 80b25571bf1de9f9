//! Calls over QUIC: one connection per node, made when it is first needed and shared by all calls; and the oracles'
//! side, which keeps the cluster map.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::Mutex;
use shine_common::net::endpoint::{Endpoint, EndpointOptions};
use shine_common::net::membership::{Membership, OracleClient, OracleError};
use shine_common::net::rpc::{RpcClient, RpcError};
use shine_common::net::tls::Identity;
use shine_common::wire::{
    ClusterMap, CnRequest, CnResponse, Fault, FaultCode, Member, MnRequest, MnResponse, NodeStatus,
    OracleRequest, OracleResponse, Role,
};
use tokio::sync::OnceCell;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use crate::ClientError;
use crate::client::NodeReport;
use crate::courier::{CallError, Courier, Transport};
use crate::peers::Peer;

type CnClient = RpcClient<CnRequest, CnResponse>;
/// A connection, or the place where one will be.
type Slot = Arc<OnceCell<CnClient>>;

/// Connections to compute nodes.
#[derive(Debug, Clone)]
pub(crate) struct Links {
    endpoint: Endpoint,
    slots: Arc<Mutex<HashMap<SocketAddr, Slot>>>,
}

impl Links {
    pub(crate) fn open(identity: Identity, local: SocketAddr) -> Result<Self, ClientError> {
        let options = EndpointOptions { serves: false, ..EndpointOptions::default() };
        let endpoint = Endpoint::bind(local, identity, options)
            .map_err(|error| ClientError::BadRequest(error.to_string()))?;
        Ok(Self { endpoint, slots: Arc::default() })
    }

    /// The connection to `peer`, shared with all other callers.
    async fn client(&self, peer: &Peer, deadline: Instant) -> Result<CnClient, CallError> {
        let slot = {
            let mut slots = self.slots.lock();
            let slot = slots.entry(peer.addr).or_default();
            if slot.get().is_some_and(CnClient::is_lost) {
                *slot = Slot::default();
            }
            Arc::clone(slot)
        };
        let connect = || CnClient::connect(&self.endpoint, peer.addr, Role::Cn, deadline.into_std());
        let client = match timeout_at(deadline, slot.get_or_try_init(connect)).await {
            Ok(Ok(client)) => client.clone(),
            Ok(Err(error)) => return Err(call_error(error)),
            Err(_) => return Err(CallError::NotSent("no connection in time".into())),
        };
        if !peer.name.is_empty() && *peer.name != *client.peer().name {
            return Err(CallError::NotSent(format!("{} is there now", client.peer())));
        }
        Ok(client)
    }

    /// What a member says of itself.
    pub(crate) async fn status(&self, member: &Member, deadline: Instant) -> Result<NodeStatus, String> {
        let addr: SocketAddr =
            member.addr.parse().map_err(|_| format!("'{}' is not an address", member.addr))?;
        let until = deadline.into_std();
        let other = || format!("{} answered with something else than its status", member.name);
        match member.role {
            Role::Cn => {
                let client = CnClient::connect(&self.endpoint, addr, Role::Cn, until).await;
                match client.map_err(text)?.call(&CnRequest::Status, until).await.map_err(text)? {
                    CnResponse::Status(status) => Ok(status),
                    _ => Err(other()),
                }
            }
            Role::Mn => {
                let client = RpcClient::connect(&self.endpoint, addr, Role::Mn, until).await;
                match client.map_err(text)?.call(&MnRequest::Status, until).await.map_err(text)? {
                    MnResponse::Status(status) => Ok(status),
                }
            }
            role => Err(format!("a {role} has no status")),
        }
    }

    pub(crate) async fn close(&self) {
        self.endpoint.close().await;
    }
}

impl Transport for Links {
    async fn call(
        &self,
        peer: &Arc<Peer>,
        request: &CnRequest,
        deadline: Instant,
    ) -> Result<CnResponse, CallError> {
        let client = self.client(peer, deadline).await?;
        client.call(request, deadline.into_std()).await.map_err(call_error)
    }
}

fn call_error(error: RpcError) -> CallError {
    match error {
        RpcError::Fault(fault) => CallError::Fault(fault),
        RpcError::DeadlineExceeded { .. } => CallError::Late,
        RpcError::OtherVersion { .. } | RpcError::Refused { .. } => CallError::Refused(error.to_string()),
        RpcError::TooLarge { .. } => CallError::Fault(Fault::new(FaultCode::BadRequest, error.to_string())),
        RpcError::Connect { why } => CallError::NotSent(why),
        other => CallError::Lost(other.to_string()),
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// The oracles' side: keeps the newest map, and the courier's peers in step with it.
#[derive(Debug)]
pub(crate) struct Oracles {
    membership: Arc<Membership>,
    follower: JoinHandle<()>,
}

impl Oracles {
    /// Learns the first map.
    pub(crate) async fn connect(
        courier: Arc<Courier<Links>>,
        oracles: &[SocketAddr],
        within: Duration,
    ) -> Result<Self, ClientError> {
        let client = OracleClient::new(courier.transport.endpoint.clone(), oracles.to_vec());
        let deadline = Instant::now() + within;
        let membership = match Membership::watch(client, deadline.into_std()).await {
            Ok(membership) => Arc::new(membership),
            Err(error) => return Err(oracle_error(error, oracles)),
        };
        let map = membership.map();
        courier.peers.update(&map);
        let follower = tokio::spawn({
            let membership = Arc::clone(&membership);
            async move {
                let mut epoch = map.epoch;
                loop {
                    let map = membership.changed(epoch).await;
                    if map.epoch == epoch {
                        // Nobody publishes maps any more.
                        return;
                    }
                    epoch = map.epoch;
                    courier.peers.update(&map);
                }
            }
        });
        Ok(Self { membership, follower })
    }

    pub(crate) fn map(&self) -> Arc<ClusterMap> {
        self.membership.map()
    }

    /// Asks every oracle for its state, and for the newest map.
    pub(crate) async fn status(&self, deadline: Instant) -> Vec<NodeReport> {
        // Where no oracle answers, the last map stays, and the reports say why.
        let _ = self.membership.refresh(deadline.into_std()).await;
        let client = self.membership.oracles();
        join_all(client.oracles().iter().map(|addr| oracle_status(client.endpoint(), *addr, deadline))).await
    }
}

impl Drop for Oracles {
    fn drop(&mut self) {
        self.follower.abort();
    }
}

async fn oracle_status(endpoint: &Endpoint, addr: SocketAddr, deadline: Instant) -> NodeReport {
    let until = deadline.into_std();
    let ask = async {
        let client = RpcClient::connect(endpoint, addr, Role::Oracle, until).await.map_err(text)?;
        match client.call(&OracleRequest::Status, until).await.map_err(text)? {
            OracleResponse::Status(status) => Ok(status),
            _ => Err("answered with something else than its status".to_owned()),
        }
    };
    let status: Result<NodeStatus, String> = ask.await;
    let name = status.as_ref().map_or_else(|_| addr.to_string(), |status| status.name.clone());
    NodeReport { name, role: Role::Oracle, addr: addr.to_string(), member: None, status }
}

fn oracle_error(error: OracleError, oracles: &[SocketAddr]) -> ClientError {
    let list = oracles.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(", ");
    match error {
        OracleError::Fault(fault) => ClientError::Fault { node: format!("oracle of {list}"), fault },
        OracleError::Refused { tried } => {
            ClientError::Refused { node: format!("oracle of {list}"), cause: tried }
        }
        OracleError::NoOracle { tried } => ClientError::NoOracle { oracles: list, cause: tried },
        other => ClientError::NoOracle { oracles: list, cause: other.to_string() },
    }
}
