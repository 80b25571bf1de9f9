//! A memory node against an oracle whose answers the test decides, and the process as a user starts it.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use shine_common::config::ReadyLine;
use shine_common::ids::{CollectionId, Epoch, Incarnation, RegionId, RemotePtr};
use shine_common::net::endpoint::{Endpoint, EndpointOptions};
use shine_common::net::rpc::{self, Handler, RpcClient};
use shine_common::net::tls::{ClusterCa, PeerIdentity};
use shine_common::verbs::memory::HugePages;
use shine_common::verbs::quic::{ConnectError, QuicVerbs};
use shine_common::verbs::{VerbError, Verbs, WordAt};
use shine_common::wire::{
    ClusterMap, Fault, FaultCode, Member, MemberState, MnRequest, MnResponse, OracleRequest, OracleResponse,
    RegionEntry, RegionGrant, RegionUse, Role,
};
use shine_mn::node::{MemoryNode, NodeError, Setup};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

const REGION_BYTES: u64 = 1 << 20;

fn any_port() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

/// What the fake oracle has in its head. The test changes it.
#[derive(Clone, Default)]
struct Mind {
    map: ClusterMap,
    /// Number of the first region that a join is granted.
    first_region: u16,
    /// Lives that are out of the cluster.
    superseded: Vec<Incarnation>,
    /// A life that is to join again.
    forgotten: Option<Incarnation>,
    /// Refuse the next reports of zeroed regions.
    deaf: bool,
}

struct FakeOracle {
    mind: watch::Sender<Mind>,
    zeroed: mpsc::UnboundedSender<(RegionId, Epoch)>,
    left: watch::Sender<Vec<Incarnation>>,
}

impl Handler for FakeOracle {
    type Request = OracleRequest;
    type Response = OracleResponse;

    async fn handle(&self, peer: &PeerIdentity, request: OracleRequest) -> Result<OracleResponse, Fault> {
        match request {
            OracleRequest::Join { name, role, addr, incarnation, regions, region_bytes } => {
                assert_eq!((&*peer.name, peer.role), (&*name, role));
                let mut grants = Vec::new();
                let mut epoch = Epoch(0);
                self.mind.send_modify(|mind| {
                    mind.forgotten = None;
                    epoch = mind.map.epoch.next();
                    mind.map.epoch = epoch;
                    mind.map.members.retain(|m| m.name != name);
                    let state = MemberState::Up;
                    mind.map.members.push(Member { name: name.clone(), role, addr, incarnation, state });
                    mind.map.regions.clear();
                    for id in mind.first_region..mind.first_region + regions {
                        let id = RegionId(id);
                        let (mn, bytes, born, usage) = (name.clone(), region_bytes, epoch, RegionUse::Free);
                        mind.map.regions.push(RegionEntry { id, mn, bytes, epoch, born, usage });
                        grants.push(RegionGrant { id, epoch, born });
                    }
                });
                Ok(OracleResponse::Joined { lease_ms: 100, regions: grants, epoch })
            }
            OracleRequest::Renew { incarnation, .. } => {
                let mind = self.mind.borrow().clone();
                if mind.superseded.contains(&incarnation) {
                    return Err(Fault::new(FaultCode::Forbidden, "another has the name"));
                }
                if mind.forgotten == Some(incarnation) {
                    return Err(Fault::new(FaultCode::NotFound, "who is this?"));
                }
                Ok(OracleResponse::Renewed { epoch: mind.map.epoch })
            }
            OracleRequest::WatchMap { after, wait_ms } => {
                let mut mind = self.mind.subscribe();
                let newer = mind.wait_for(|mind| mind.map.epoch > after);
                let wait = Duration::from_millis(wait_ms.into());
                let _ = tokio::time::timeout(wait, newer).await;
                Ok(OracleResponse::Map(self.mind.borrow().map.clone()))
            }
            OracleRequest::RegionZeroed { region, epoch, .. } => {
                if self.mind.borrow().deaf {
                    return Err(Fault::new(FaultCode::Unavailable, "not now"));
                }
                let _ = self.zeroed.send((region, epoch));
                Ok(OracleResponse::Done { epoch })
            }
            OracleRequest::Leave { incarnation, .. } => {
                self.left.send_modify(|left| left.push(incarnation));
                Ok(OracleResponse::Done { epoch: Epoch(0) })
            }
            other => Err(Fault::new(FaultCode::BadRequest, format!("not expected: {other:?}"))),
        }
    }
}

/// A cluster of an oracle that the test thinks for, and endpoints of other roles.
struct Cluster {
    ca: ClusterCa,
    oracle: SocketAddr,
    mind: watch::Sender<Mind>,
    zeroed: mpsc::UnboundedReceiver<(RegionId, Epoch)>,
    left: watch::Receiver<Vec<Incarnation>>,
    _serving: JoinHandle<()>,
}

impl Cluster {
    fn start(ca: ClusterCa) -> Self {
        let identity = ca.identity(Role::Oracle, "oracle-0").unwrap();
        let endpoint = Endpoint::bind(any_port(), identity, EndpointOptions::default()).unwrap();
        #[expect(clippy::disallowed_methods, reason = "a test sends a handful")]
        let (zeroed_tx, zeroed) = mpsc::unbounded_channel();
        let (left_tx, left) = watch::channel(Vec::new());
        let mind = watch::Sender::new(Mind { first_region: 7, ..Mind::default() });
        let oracle = Arc::new(FakeOracle { mind: mind.clone(), zeroed: zeroed_tx, left: left_tx });
        let addr = endpoint.local_addr();
        let serving = tokio::spawn(async move {
            while let Some((connection, peer, _)) = endpoint.accept().await {
                tokio::spawn(rpc::serve(connection, peer, Arc::clone(&oracle)));
            }
        });
        Self { ca, oracle: addr, mind, zeroed, left, _serving: serving }
    }

    fn endpoint(&self, role: Role, name: &str) -> Endpoint {
        Endpoint::bind(any_port(), self.ca.identity(role, name).unwrap(), EndpointOptions::default()).unwrap()
    }

    async fn memory_node(&self, regions: u16) -> MemoryNode {
        let endpoint = self.endpoint(Role::Mn, "mn-0");
        let setup = Setup {
            addr: endpoint.local_addr(),
            endpoint,
            oracles: vec![self.oracle],
            regions,
            region_bytes: REGION_BYTES,
            huge_pages: HugePages::Off,
            access_lease: Duration::from_secs(3),
        };
        MemoryNode::start(setup, soon()).await.unwrap()
    }

    /// Changes a region's line in the map.
    fn change(&self, region: RegionId, change: impl Fn(&mut RegionEntry, Epoch)) -> Epoch {
        let mut epoch = Epoch(0);
        self.mind.send_modify(|mind| {
            epoch = mind.map.epoch.next();
            mind.map.epoch = epoch;
            change(mind.map.regions.iter_mut().find(|entry| entry.id == region).unwrap(), epoch);
        });
        epoch
    }
}

/// A memory node that runs until it is told to stop.
struct Running {
    addr: SocketAddr,
    incarnation: Incarnation,
    host: Arc<shine_common::verbs::host::Host>,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    ended: JoinHandle<Result<(), NodeError>>,
}

impl Running {
    fn new(node: MemoryNode) -> Self {
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        Self {
            addr: node.addr(),
            incarnation: node.host().incarnation(),
            host: Arc::clone(node.host()),
            stop: Some(stop),
            ended: tokio::spawn(node.run(async move {
                let _ = stopped.await;
            })),
        }
    }

    async fn session(&self, cn: &Endpoint) -> QuicVerbs {
        QuicVerbs::connect(cn, self.addr, "mn-0", self.incarnation, soon()).await.unwrap()
    }

    async fn stop(mut self) -> Result<(), NodeError> {
        drop(self.stop.take());
        self.ended.await.unwrap()
    }
}

fn word(region: u16, epoch: Epoch) -> WordAt {
    WordAt { at: RemotePtr::new(RegionId(region), 64), epoch }
}

#[tokio::test]
async fn it_serves_what_it_was_granted_to_compute_nodes_only_and_leaves_cleanly() {
    let mut cluster = Cluster::start(ClusterCa::ephemeral().unwrap());
    let node = Running::new(cluster.memory_node(3).await);
    let ids: Vec<_> = node.host.regions().iter().map(|region| region.id.0).collect();
    assert_eq!(ids, [7, 8, 9]);
    let epoch = cluster.mind.borrow().map.epoch;
    let cn = cluster.endpoint(Role::Cn, "cn-0");
    let verbs = node.session(&cn).await;
    assert_eq!(verbs.fetch_add(word(7, epoch), 5, soon()).await, Ok(0));
    assert_eq!(verbs.fetch_add(word(7, epoch), 0, soon()).await, Ok(5));
    let nowhere = RegionId(10);
    assert_eq!(
        verbs.fetch_add(word(10, epoch), 0, soon()).await,
        Err(VerbError::NoSuchRegion { region: nowhere })
    );
    for role in [Role::Client, Role::Admin] {
        let user = cluster.endpoint(role, "user");
        let refused =
            QuicVerbs::connect(&user, node.addr, "mn-0", node.incarnation, soon()).await.unwrap_err();
        assert!(matches!(refused, ConnectError::Refused { .. }), "{refused:?}");
        assert!(refused.to_string().contains("for compute nodes"), "{refused}");
    }
    // Anybody in the cluster may ask how it is.
    let user = cluster.endpoint(Role::Client, "user");
    let rpc = RpcClient::<MnRequest, MnResponse>::connect(&user, node.addr, Role::Mn, soon()).await.unwrap();
    let MnResponse::Status(status) = rpc.call(&MnRequest::Status, soon()).await.unwrap();
    let counter = |name: &str| status.counters.iter().find(|(n, _)| n == name).map(|(_, value)| *value);
    assert_eq!((status.name.as_str(), status.role), ("mn-0", Role::Mn));
    assert_eq!((counter("regions"), counter("region_bytes")), (Some(3), Some(3 << 20)));
    assert_eq!((counter("fetch_adds"), counter("sessions")), (Some(2), Some(1)));

    let life = node.incarnation;
    let (ended, lost) = tokio::join!(node.stop(), verbs.recv(soon()));
    ended.unwrap();
    assert!(matches!(lost, Err(VerbError::ConnectionLost { .. })), "{lost:?}");
    cluster.left.wait_for(|left| left.contains(&life)).await.unwrap();
}

#[tokio::test]
async fn a_dropped_region_is_zeroed_reported_and_served_anew() {
    let mut cluster = Cluster::start(ClusterCa::ephemeral().unwrap());
    let node = Running::new(cluster.memory_node(2).await);
    let cn = cluster.endpoint(Role::Cn, "cn-0");
    let verbs = node.session(&cn).await;
    let first = cluster.mind.borrow().map.epoch;
    cluster.change(RegionId(7), |entry, _| entry.usage = RegionUse::Used(CollectionId(1)));
    for region in [7, 8] {
        verbs.fetch_add(word(region, first), 5, soon()).await.unwrap();
    }
    // The oracle does not hear of it at first: told again until it does.
    cluster.mind.send_modify(|mind| mind.deaf = true);
    let second = cluster.change(RegionId(7), |entry, epoch| {
        (entry.epoch, entry.born, entry.usage) = (epoch, epoch, RegionUse::Resetting);
    });
    while verbs.fetch_add(word(7, second), 0, soon()).await
        == Err(VerbError::EpochAhead { region: RegionId(7), named: second, current: first })
    {
        tokio::task::yield_now().await;
    }
    assert_eq!(verbs.fetch_add(word(7, second), 0, soon()).await, Ok(0), "zeroed");
    assert_eq!(
        verbs.fetch_add(word(7, first), 0, soon()).await,
        Err(VerbError::RegionLost { region: RegionId(7) })
    );
    assert_eq!(verbs.fetch_add(word(8, first), 0, soon()).await, Ok(5), "another keeps its content");
    cluster.mind.send_modify(|mind| mind.deaf = false);
    assert_eq!(cluster.zeroed.recv().await, Some((RegionId(7), second)));
    // What is written afterwards stays, though maps go on to come.
    verbs.fetch_add(word(7, second), 9, soon()).await.unwrap();
    cluster.change(RegionId(7), |entry, _| entry.usage = RegionUse::Free);
    let moved = cluster.change(RegionId(8), |entry, epoch| entry.epoch = epoch);
    while verbs.fetch_add(word(8, moved), 0, soon()).await.is_err() {
        tokio::task::yield_now().await;
    }
    assert_eq!(
        verbs.fetch_add(word(8, moved), 0, soon()).await,
        Ok(5),
        "a region that moves on keeps its content"
    );
    assert_eq!(verbs.fetch_add(word(7, second), 0, soon()).await, Ok(9));
    node.stop().await.unwrap();
}

#[tokio::test]
async fn an_oracle_that_lost_its_state_deals_anew() {
    let cluster = Cluster::start(ClusterCa::ephemeral().unwrap());
    let node = Running::new(cluster.memory_node(2).await);
    let cn = cluster.endpoint(Role::Cn, "cn-0");
    let verbs = node.session(&cn).await;
    let first = cluster.mind.borrow().map.epoch;
    for region in [7, 8] {
        verbs.fetch_add(word(region, first), 5, soon()).await.unwrap();
    }
    cluster.mind.send_modify(|mind| {
        mind.first_region = 8;
        mind.forgotten = Some(node.incarnation);
    });
    // Joined again: 8 and 9 instead of 7 and 8, all of them empty.
    let second = first.next();
    while verbs.fetch_add(word(9, second), 0, soon()).await.is_err() {
        tokio::task::yield_now().await;
    }
    assert_eq!(verbs.fetch_add(word(8, second), 0, soon()).await, Ok(0));
    assert_eq!(
        verbs.fetch_add(word(7, first), 0, soon()).await,
        Err(VerbError::NoSuchRegion { region: RegionId(7) })
    );
    node.stop().await.unwrap();
}

#[tokio::test]
async fn who_is_superseded_stops_serving() {
    let cluster = Cluster::start(ClusterCa::ephemeral().unwrap());
    let node = Running::new(cluster.memory_node(1).await);
    cluster.mind.send_modify(|mind| mind.superseded.push(node.incarnation));
    let Running { ended, stop: _stop, .. } = node;
    let error = ended.await.unwrap().unwrap_err();
    assert!(matches!(error, NodeError::Superseded(_)), "{error:?}");
    assert!(error.to_string().contains("'mn-0'"), "{error}");
}

#[tokio::test]
async fn a_restarted_node_is_another_and_empty() {
    let cluster = Cluster::start(ClusterCa::ephemeral().unwrap());
    let cn = cluster.endpoint(Role::Cn, "cn-0");
    let before = Running::new(cluster.memory_node(1).await);
    let life = before.incarnation;
    let first = cluster.mind.borrow().map.epoch;
    before.session(&cn).await.fetch_add(word(7, first), 5, soon()).await.unwrap();
    before.stop().await.unwrap();
    let after = Running::new(cluster.memory_node(1).await);
    assert_ne!(after.incarnation, life);
    let refused = QuicVerbs::connect(&cn, after.addr, "mn-0", life, soon()).await.unwrap_err();
    assert!(refused.to_string().contains("restarted"), "{refused}");
    let verbs = after.session(&cn).await;
    let lost = verbs.fetch_add(word(7, first), 0, soon()).await;
    assert_eq!(lost, Err(VerbError::RegionLost { region: RegionId(7) }));
    assert_eq!(verbs.fetch_add(word(7, first.next()), 0, soon()).await, Ok(0));
    after.stop().await.unwrap();
}

// ------------------------------------------------------------------------------------------------- the process

/// A process that does not outlive its test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn spawn(args: &[&str]) -> Process {
    let child = Command::new(env!("CARGO_BIN_EXE_shine-mn"))
        .args(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    Process(child)
}

fn certs(ca: &ClusterCa, dir: &Path) -> String {
    let into = dir.join("mn-0");
    ca.issue(Role::Mn, "mn-0", &[], 1, &into).unwrap();
    into.to_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_process_says_when_it_is_ready_and_leaves_on_sigterm() {
    let dir = tempfile::tempdir().unwrap();
    let ca = ClusterCa::init(dir.path().join("ca")).unwrap();
    let cert_dir = certs(&ca, dir.path());
    let mut cluster = Cluster::start(ca);
    let oracle = cluster.oracle.to_string();
    let args = ["--name", "mn-0", "--oracles", &oracle, "--cert-dir", &cert_dir, "--regions", "2"];
    let mut process = spawn(&[&args[..], &["--region-bytes", "1MiB", "--threads", "2"]].concat());
    let stdout = process.0.stdout.take().unwrap();
    let line = tokio::task::spawn_blocking(move || {
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).unwrap();
        line
    });
    let ready: ReadyLine = serde_json::from_str(&line.await.unwrap()).unwrap();
    assert_eq!((ready.role, ready.name.as_str()), (Role::Mn, "mn-0"));
    let member = cluster.mind.borrow().map.members[0].clone();
    assert_eq!(member.addr, ready.addr.to_string());
    let cn = cluster.endpoint(Role::Cn, "cn-0");
    let verbs = QuicVerbs::connect(&cn, ready.addr, "mn-0", member.incarnation, soon()).await.unwrap();
    let epoch = cluster.mind.borrow().map.epoch;
    assert_eq!(verbs.fetch_add(word(8, epoch), 1, soon()).await, Ok(0));

    // A second process on the same port.
    let addr = ready.addr.to_string();
    let taken = spawn(&[&args[..], &["--listen", &addr]].concat());
    let (status, said) = end_of(taken).await;
    assert!(!status.success());
    assert!(said.contains("in use") && said.contains(&addr), "{said}");

    let pid = process.0.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    let (status, said) = end_of(process).await;
    assert_eq!(status.code(), Some(0), "{said}");
    cluster.left.wait_for(|left| left.contains(&member.incarnation)).await.unwrap();
    let lost = verbs.fetch_add(word(8, epoch), 1, soon()).await;
    assert!(matches!(lost, Err(VerbError::ConnectionLost { .. })), "{lost:?}");
}

async fn end_of(mut process: Process) -> (std::process::ExitStatus, String) {
    tokio::task::spawn_blocking(move || {
        let mut said = String::new();
        process.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        (process.0.wait().unwrap(), said)
    })
    .await
    .unwrap()
}

#[tokio::test]
async fn wrong_starts_are_told_in_words() {
    let dir = tempfile::tempdir().unwrap();
    let ca = ClusterCa::init(dir.path().join("ca")).unwrap();
    let cert_dir = certs(&ca, dir.path());
    let cn_dir = dir.path().join("cn-0");
    ca.issue(Role::Cn, "cn-0", &[], 1, &cn_dir).unwrap();
    let cn_dir = cn_dir.to_str().unwrap();
    let nowhere = ["--oracles", "127.0.0.1:9"];
    let cases: [(&[&str], &str); 5] = [
        (&[], "--cert-dir is needed"),
        (&["--cert-dir", "/nowhere", nowhere[0], nowhere[1]], "/nowhere"),
        (&["--cert-dir", cn_dir, nowhere[0], nowhere[1]], "cn"),
        (&["--cert-dir", &cert_dir, "--name", "mn-9", nowhere[0], nowhere[1]], "is for 'mn-0'"),
        (
            &["--cert-dir", &cert_dir, nowhere[0], nowhere[1], "--region-bytes", "128TiB", "--regions", "9"],
            "regions of",
        ),
    ];
    for (args, expected) in cases {
        let (status, said) = end_of(spawn(args)).await;
        assert_eq!(status.code(), Some(1), "{said}");
        assert!(said.contains(expected) && said.starts_with("shine-mn: "), "{said}: expected {expected}");
    }
}
