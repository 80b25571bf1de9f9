//! The client itself: the calls of users, on top of [`crate::courier`] (who is asked) and [`crate::link`] (how).

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use shine_common::ids::{ExternalId, Incarnation, NodeId};
use shine_common::net::tls::Identity;
use shine_common::wire::{
    CheckReport, ClusterMap, CnRequest, CnResponse, CollectionInfo, CollectionSpec, Hit, MemberState,
    NodeStatus, Receipt, Role, Target,
};
use tokio::time::{Instant, sleep_until};

use crate::ClientError;
use crate::courier::{Courier, Transport};
use crate::link::{Links, Oracles};
use crate::peers::{Peer, Peers};

/// How a client behaves.
#[derive(Debug, Clone)]
pub struct ClientOptions {
    /// Time for a search, get, stats or list; 2 s by default.
    pub deadline: Duration,
    /// Time for an insert; 10 s by default. It writes many lists under locks, and one that is cut off leaves its caller
    /// with [`ClientError::InsertUnknown`].
    pub insert_deadline: Duration,
    /// Time for a change of the cluster: create, drop, and each step of a load or check; 60 s by default. A load or
    /// check takes as long as it takes.
    pub admin_deadline: Duration,
    /// Time to learn the cluster map when connecting; 5 s by default.
    pub connect_deadline: Duration,
    /// How long a node may be silent before the same call also goes to another one; 400 ms by default. A node that
    /// answers other calls meanwhile is not silent.
    pub patience: Duration,
    /// Local address; by default one that reaches the first oracle or node, on any port.
    pub listen: Option<SocketAddr>,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(2),
            insert_deadline: Duration::from_secs(10),
            admin_deadline: Duration::from_secs(60),
            connect_deadline: Duration::from_secs(5),
            patience: Duration::from_millis(400),
            listen: None,
        }
    }
}

/// How a search goes.
#[derive(Debug, Clone)]
pub struct SearchOptions {
    /// Answers wanted; 10 by default.
    pub k: u32,
    /// Beam: larger finds more and costs more; 100 by default, raised to `k` where smaller.
    pub ef: u32,
    /// Whether answers carry their vectors.
    pub with_vectors: bool,
    /// Time for this search; the client's by default.
    pub deadline: Option<Duration>,
}

impl Default for SearchOptions {
    fn default() -> Self {
        Self { k: 10, ef: 100, with_vectors: false, deadline: None }
    }
}

/// What a search found.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// Nearest first; fewer than k if the collection is smaller.
    pub hits: Vec<Hit>,
    /// Beam that was used.
    pub ef: u32,
    /// Where it ran and what it cost.
    pub receipt: Receipt,
}

/// A successful insert.
#[derive(Debug, Clone, PartialEq)]
pub struct Inserted {
    /// The new node.
    pub node: NodeId,
    /// Where it ran and what it cost. `None` if the answer was lost and the record was found by its id afterwards,
    /// with this very vector: then another client may have inserted the same pair at the same time.
    pub receipt: Option<Receipt>,
}

/// What is stored under an id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The node.
    pub node: NodeId,
    /// Its level.
    pub level: u8,
    /// Vector in the collection's native type ([`crate::value::decode`] gives its numbers).
    pub vector: Vec<u8>,
}

/// Progress of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckProgress {
    /// Records looked at.
    pub done: u64,
    /// Records to look at.
    pub total: u64,
}

/// The cluster as seen by asking every process.
#[derive(Debug, Clone)]
pub struct ClusterStatus {
    /// The newest map.
    pub map: Arc<ClusterMap>,
    /// Every process: oracles, then members of the map.
    pub nodes: Vec<NodeReport>,
}

/// One process in a [`ClusterStatus`].
#[derive(Debug, Clone)]
pub struct NodeReport {
    /// Name; of an oracle that does not answer, its address.
    pub name: String,
    /// Role.
    pub role: Role,
    /// Address.
    pub addr: String,
    /// Lease state by the map; `None` for oracles.
    pub member: Option<MemberState>,
    /// What the process says of itself, or why it says nothing.
    pub status: Result<NodeStatus, String>,
}

/// A connection to a cluster. Cheap to clone; clones share connections. All calls take `&self`, and any number may be
/// in flight at once.
#[derive(Debug, Clone)]
pub struct Client {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    courier: Arc<Courier<Links>>,
    oracles: Option<Oracles>,
    options: ClientOptions,
}

impl Client {
    /// Connects to the cluster of `oracles`: learns its compute nodes from the first oracle that answers, and goes on
    /// learning in the background. When no oracle answers later, the last map stays.
    ///
    /// # Errors
    /// [`ClientError::NoOracle`] if no oracle gives a map within [`ClientOptions::connect_deadline`];
    /// [`ClientError::Refused`] if certificates do not fit.
    pub async fn connect(
        oracles: &[SocketAddr],
        identity: Identity,
        options: ClientOptions,
    ) -> Result<Self, ClientError> {
        let Some(first) = oracles.first() else {
            return Err(ClientError::BadRequest(
                "the list of oracles is empty: expected IP:PORT[,IP:PORT..]".into(),
            ));
        };
        let links = Links::open(identity, local_for(*first, &options))?;
        let courier = Arc::new(Courier::new(links, Peers::default(), options.patience));
        let oracles = Oracles::connect(Arc::clone(&courier), oracles, options.connect_deadline).await?;
        Ok(Self { inner: Arc::new(Inner { courier, oracles: Some(oracles), options }) })
    }

    /// Connects to one compute node and never asks another: for tests, and for looking at one node.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`] or [`ClientError::Refused`] if it does not answer.
    pub async fn connect_to(
        node: SocketAddr,
        identity: Identity,
        options: ClientOptions,
    ) -> Result<Self, ClientError> {
        let links = Links::open(identity, local_for(node, &options))?;
        let peers = Peers::of(vec![Peer::new(String::new(), node, Incarnation(0), true)]);
        let courier = Arc::new(Courier::new(links, peers, options.patience));
        let client = Self { inner: Arc::new(Inner { courier, oracles: None, options }) };
        client.node_status().await?;
        Ok(client)
    }

    /// The newest cluster map; `None` for a client of one node.
    pub fn map(&self) -> Option<Arc<ClusterMap>> {
        self.inner.oracles.as_ref().map(Oracles::map)
    }

    /// The client's options.
    pub fn options(&self) -> &ClientOptions {
        &self.inner.options
    }

    /// Nearest neighbours of a vector (in the collection's native type, see [`crate::value::encode`]) or of a stored
    /// id (which is an answer itself).
    ///
    /// # Errors
    /// `NotFound`, `MemoryNodeLost`, `RegionLost`, `Overloaded`, `DeadlineExceeded` .. as [`ClientError::code`].
    pub async fn search(
        &self,
        collection: &str,
        target: Target,
        options: &SearchOptions,
    ) -> Result<Answer, ClientError> {
        let allowed = options.deadline.unwrap_or(self.inner.options.deadline);
        let request = |left: Duration| CnRequest::Search {
            collection: collection.to_owned(),
            target: target.clone(),
            k: options.k,
            ef: options.ef,
            deadline_ms: deadline_ms(left),
            with_vectors: options.with_vectors,
        };
        match self.inner.courier.ask(request, Instant::now() + allowed).await? {
            (_, CnResponse::Hits { hits, ef, receipt }) => Ok(Answer { hits, ef, receipt }),
            (peer, _) => Err(unexpected(&peer, "hits")),
        }
    }

    /// What is stored under an id.
    ///
    /// # Errors
    /// `NotFound` if there is no such collection or no live record of that id.
    pub async fn get(&self, collection: &str, id: ExternalId) -> Result<Record, ClientError> {
        get(&self.inner.courier, collection, id, self.deadline()).await
    }

    /// Adds a vector (in the collection's native type) under a new id.
    ///
    /// Never stores it twice. When the node that was asked is lost or falls silent, the id is looked up through
    /// another one, and inserted there if it is not found; the cluster lets one of the two attempts win.
    ///
    /// # Errors
    /// `IdExists` if the id is taken; [`ClientError::InsertUnknown`] if an attempt may have taken effect and nobody
    /// could say so in time.
    pub async fn insert(
        &self,
        collection: &str,
        id: ExternalId,
        vector: Vec<u8>,
    ) -> Result<Inserted, ClientError> {
        let deadline = Instant::now() + self.inner.options.insert_deadline;
        crate::insert::insert(&self.inner.courier, collection, id, vector, deadline).await
    }

    /// Makes an empty, searchable collection.
    ///
    /// # Errors
    /// `CollectionExists`, `BadRequest` (naming the parameter), `RegionFull` if no region is free, `Forbidden`.
    pub async fn create(&self, spec: CollectionSpec) -> Result<CollectionInfo, ClientError> {
        let what = || format!("the creation of collection '{}'", spec.name);
        let request = CnRequest::Create(spec.clone());
        match self.inner.courier.tell(&request, self.admin_deadline(), what).await? {
            (_, CnResponse::Info(info)) => Ok(info),
            (peer, _) => Err(unexpected(&peer, "a collection")),
        }
    }

    /// Forgets a collection and gives its memory back.
    ///
    /// # Errors
    /// `NotFound`, `Forbidden`.
    pub async fn drop_collection(&self, collection: &str) -> Result<(), ClientError> {
        let what = || format!("the drop of collection '{collection}'");
        let request = CnRequest::Drop { collection: collection.to_owned() };
        match self.inner.courier.tell(&request, self.admin_deadline(), what).await? {
            (_, CnResponse::Done) => Ok(()),
            (peer, _) => Err(unexpected(&peer, "done")),
        }
    }

    /// All collections, by name.
    ///
    /// # Errors
    /// If no compute node answers.
    pub async fn list(&self) -> Result<Vec<CollectionInfo>, ClientError> {
        match self.inner.courier.ask(|_| CnRequest::List, self.deadline()).await? {
            (_, CnResponse::Collections(mut all)) => {
                all.sort_by(|a, b| a.name.cmp(&b.name));
                Ok(all)
            }
            (peer, _) => Err(unexpected(&peer, "collections")),
        }
    }

    /// One collection in detail.
    ///
    /// # Errors
    /// `NotFound`.
    pub async fn stats(&self, collection: &str) -> Result<CollectionInfo, ClientError> {
        let request = |_| CnRequest::Stats { collection: collection.to_owned() };
        match self.inner.courier.ask(request, self.deadline()).await? {
            (_, CnResponse::Info(info)) => Ok(info),
            (peer, _) => Err(unexpected(&peer, "a collection")),
        }
    }

    /// Checks a collection: links in range, ids unique, orphans counted. Runs as a job of one compute node, for as long
    /// as it takes; `progress` hears of every step.
    ///
    /// # Errors
    /// Also if that node is lost: a job does not move. A node that cannot be reached for a moment is asked again.
    pub async fn check(
        &self,
        collection: &str,
        mut progress: impl FnMut(CheckProgress),
    ) -> Result<CheckReport, ClientError> {
        /// Between two questions about the job.
        const POLL: Duration = Duration::from_millis(100);
        /// Longest time without any answer about the job.
        const LOST_AFTER: Duration = Duration::from_secs(10);
        let ask = |job| CnRequest::Check { collection: collection.to_owned(), job };
        let courier = &self.inner.courier;
        let (peer, mut answer) = courier.ask_in_turn(&ask(0), self.admin_deadline()).await?;
        loop {
            let CnResponse::Check { job, done, total, report } = answer else {
                return Err(unexpected(&peer, "the progress of a check"));
            };
            progress(CheckProgress { done, total });
            if let Some(report) = report {
                return Ok(report);
            }
            let lost_at = Instant::now() + LOST_AFTER;
            answer = loop {
                sleep_until(Instant::now() + POLL).await;
                match courier.call(&peer, &ask(job), self.admin_deadline()).await {
                    Ok(answer) => break answer,
                    Err(error) if error.moves_on() && Instant::now() < lost_at => {}
                    Err(error) => return Err(error.at(&peer)),
                }
            };
        }
    }

    /// The state of the compute node whose turn it is.
    ///
    /// # Errors
    /// If no compute node answers.
    pub async fn node_status(&self) -> Result<NodeStatus, ClientError> {
        match self.inner.courier.ask(|_| CnRequest::Status, self.deadline()).await? {
            (_, CnResponse::Status(status)) => Ok(status),
            (peer, _) => Err(unexpected(&peer, "a status")),
        }
    }

    /// Asks every process of the cluster for its state. A process that does not answer is reported as such.
    ///
    /// # Errors
    /// `BadRequest` for a client of one node, which knows no others.
    pub async fn status(&self) -> Result<ClusterStatus, ClientError> {
        let Some(oracles) = &self.inner.oracles else {
            return Err(ClientError::BadRequest(
                "a client of one node does not know the cluster: connect by its oracles".into(),
            ));
        };
        let deadline = self.deadline();
        let mut nodes = oracles.status(deadline).await;
        let map = oracles.map();
        let links = &self.inner.courier.transport;
        let mut members: FuturesUnordered<_> = map
            .members
            .iter()
            .enumerate()
            .map(|(at, member)| async move { (at, links.status(member, deadline).await) })
            .collect();
        let mut reports: Vec<Option<Result<NodeStatus, String>>> = vec![None; map.members.len()];
        while let Some((at, status)) = members.next().await {
            reports[at] = Some(status);
        }
        drop(members);
        nodes.extend(map.members.iter().zip(reports).map(|(member, status)| NodeReport {
            name: member.name.clone(),
            role: member.role,
            addr: member.addr.clone(),
            member: Some(member.state),
            status: status.expect("every member was asked"),
        }));
        Ok(ClusterStatus { map, nodes })
    }

    /// A client of the same cluster that asks one compute node only, over connections of its own.
    ///
    /// # Errors
    /// `NotFound` if no compute node has that name.
    pub fn only(&self, node: &str) -> Result<Self, ClientError> {
        let peer = self.inner.courier.peers.all().iter().find(|peer| peer.name == node).cloned();
        let Some(peer) = peer else {
            return Err(ClientError::NoSuchNode(node.to_owned()));
        };
        let peers = Peers::of(vec![Peer::new(peer.name.clone(), peer.addr, Incarnation(0), true)]);
        let links = self.inner.courier.transport.clone();
        let courier = Arc::new(Courier::new(links, peers, self.inner.options.patience));
        Ok(Self { inner: Arc::new(Inner { courier, oracles: None, options: self.inner.options.clone() }) })
    }

    /// Names of the compute nodes of the present map.
    pub fn compute_nodes(&self) -> Vec<String> {
        self.inner.courier.peers.all().iter().map(|peer| peer.name.clone()).collect()
    }

    /// Says good-bye to all nodes. Dropping the last clone does too, but does not wait until the nodes know.
    pub async fn close(&self) {
        self.inner.courier.transport.close().await;
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.inner.options.deadline
    }

    pub(crate) fn admin_deadline(&self) -> Instant {
        Instant::now() + self.inner.options.admin_deadline
    }

    pub(crate) fn courier(&self) -> &Courier<Links> {
        &self.inner.courier
    }
}

/// [`Client::get`], until `deadline`.
pub(crate) async fn get<T: Transport>(
    courier: &Courier<T>,
    collection: &str,
    id: ExternalId,
    deadline: Instant,
) -> Result<Record, ClientError> {
    let request = |left: Duration| CnRequest::Get {
        collection: collection.to_owned(),
        id,
        deadline_ms: deadline_ms(left),
    };
    match courier.ask(request, deadline).await? {
        (_, CnResponse::Record { node, level, vector }) => Ok(Record { node, level, vector }),
        (peer, _) => Err(unexpected(&peer, "a record")),
    }
}

pub(crate) fn unexpected(peer: &Peer, expected: &'static str) -> ClientError {
    ClientError::Protocol { node: peer.to_string(), expected }
}

/// The time that is left, as a request names it. The node keeps some of it for its answer's way back.
pub(crate) fn deadline_ms(left: Duration) -> u32 {
    u32::try_from(left.as_millis()).unwrap_or(u32::MAX).max(1)
}

fn local_for(peer: SocketAddr, options: &ClientOptions) -> SocketAddr {
    options.listen.unwrap_or_else(|| {
        let any = match (peer.is_ipv4(), peer.ip().is_loopback()) {
            (true, true) => "127.0.0.1:0",
            (true, false) => "0.0.0.0:0",
            (false, true) => "[::1]:0",
            (false, false) => "[::]:0",
        };
        any.parse().expect("a socket address")
    })
}
