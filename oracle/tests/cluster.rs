//! The oracle over real sockets: members, watchers, restarts, identities, and the process itself.

#![expect(clippy::disallowed_methods, reason = "certificates are expired by the wall clock")]

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use shine_common::config::ReadyLine;
use shine_common::ids::{CollectionId, Epoch, Incarnation, RegionId};
use shine_common::metric::{DType, Metric};
use shine_common::net::endpoint::{Alpn, Endpoint, EndpointOptions};
use shine_common::net::membership::{
    Membership, Offer, OracleClient, OracleError, Standing, new_incarnation,
};
use shine_common::net::tls::{ClusterCa, Identity};
use shine_common::wire::{
    CollectionSpec, CollectionState, FaultCode, MemberState, OracleRequest, OracleResponse, RegionUse, Role,
};
use shine_oracle::serve::{Loaded, OracleOptions, run};
use shine_oracle::state::State;
use shine_oracle::store::{FileStore, NoStore, StateStore, StoreError};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

const REGION_BYTES: u64 = 64 << 20;

/// A deadline that only a hang reaches.
fn soon() -> Instant {
    Instant::now() + Duration::from_secs(120)
}

fn any_port() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

struct Oracle {
    addr: SocketAddr,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Oracle {
    fn start(ca: &ClusterCa, listen: SocketAddr, store: impl StateStore, lease: Duration) -> Self {
        let identity = ca.identity(Role::Oracle, "oracle-0").unwrap();
        let endpoint = Endpoint::bind(listen, identity, EndpointOptions::default()).unwrap();
        let addr = endpoint.local_addr();
        let loaded = Loaded::from_store(Box::new(store)).unwrap();
        let (stop, stopped) = oneshot::channel();
        let stopped = async move {
            let _ = stopped.await;
        };
        let task = tokio::spawn(run(endpoint, loaded, OracleOptions { lease }, stopped));
        Self { addr, stop, task }
    }

    fn with_long_leases(ca: &ClusterCa) -> Self {
        Self::start(ca, any_port(), NoStore, Duration::from_secs(60))
    }

    async fn stop(self) {
        self.stop.send(()).unwrap();
        self.task.await.unwrap();
    }
}

fn endpoint_of(identity: Identity) -> Endpoint {
    Endpoint::bind(any_port(), identity, EndpointOptions::default()).unwrap()
}

fn client_of(ca: &ClusterCa, role: Role, name: &str, oracles: &[SocketAddr]) -> OracleClient {
    OracleClient::new(endpoint_of(ca.identity(role, name).unwrap()), oracles.to_vec())
}

fn offer(client: &OracleClient, regions: u16) -> Offer {
    Offer {
        addr: client.endpoint().local_addr(),
        incarnation: new_incarnation(),
        regions,
        region_bytes: if regions == 0 { 0 } else { REGION_BYTES },
    }
}

async fn join(ca: &ClusterCa, role: Role, name: &str, oracles: &[SocketAddr]) -> Membership {
    let client = client_of(ca, role, name, oracles);
    let offer = offer(&client, if role == Role::Mn { 2 } else { 0 });
    Membership::join(client, offer, soon()).await.unwrap()
}

fn spec(name: &str) -> CollectionSpec {
    CollectionSpec {
        name: name.into(),
        dtype: DType::F32,
        metric: Metric::L2,
        dim: 16,
        m: 8,
        ef_construction: 100,
        capacity: 10_000,
        memory_nodes: Vec::new(),
        loading: false,
    }
}

async fn create(client: &OracleClient, name: &str) -> Result<(CollectionId, Epoch), OracleError> {
    match client.call(&OracleRequest::CreateCollection(spec(name)), soon()).await? {
        OracleResponse::Collection { collection, epoch } => Ok((collection.id, epoch)),
        other => panic!("{other:?}"),
    }
}

fn code_of(error: &OracleError) -> Option<FaultCode> {
    match error {
        OracleError::Fault(fault) => Some(fault.code),
        _ => None,
    }
}

#[tokio::test]
async fn everyone_sees_one_map() {
    let ca = ClusterCa::ephemeral().unwrap();
    let oracle = Oracle::with_long_leases(&ca);
    let mn = join(&ca, Role::Mn, "mn-0", &[oracle.addr]).await;
    let cn = join(&ca, Role::Cn, "cn-0", &[oracle.addr]).await;
    let user = Membership::watch(client_of(&ca, Role::Client, "u", &[oracle.addr]), soon()).await.unwrap();
    assert_eq!(mn.grants().borrow().iter().map(|g| g.id).collect::<Vec<_>>(), [RegionId(0), RegionId(1)]);

    let (id, epoch) = create(cn.oracles(), "glove").await.unwrap();
    let ready = OracleRequest::SetCollectionState { id, state: CollectionState::Ready };
    let OracleResponse::Done { epoch: ready_at } = cn.oracles().call(&ready, soon()).await.unwrap() else {
        panic!()
    };
    assert!(ready_at > epoch);
    let (at_mn, at_cn, at_user) =
        tokio::join!(mn.map_at(ready_at, soon()), cn.map_at(ready_at, soon()), user.map_at(ready_at, soon()));
    assert_eq!(at_mn, at_cn);
    assert_eq!(at_cn, at_user);
    let map = at_user.unwrap();
    assert_eq!(map.collection("glove").unwrap().state, CollectionState::Ready);
    let names: Vec<_> = map.members.iter().map(|m| (m.role, m.name.as_str(), m.state)).collect();
    assert_eq!(names, [(Role::Cn, "cn-0", MemberState::Up), (Role::Mn, "mn-0", MemberState::Up)]);
    assert!(mn.oracle_reachable() && user.oracle_reachable());

    // The whole way of a region back: dropped, zeroed, free.
    cn.oracles().call(&OracleRequest::DropCollection { name: "glove".into() }, soon()).await.unwrap();
    let resetting = |map: &shine_common::wire::ClusterMap| {
        map.regions.iter().find(|r| r.usage == RegionUse::Resetting).cloned()
    };
    let map = mn.map_where(soon(), |map| resetting(map).is_some()).await.unwrap();
    let region = resetting(&map).unwrap();
    let incarnation = map.member(Role::Mn, "mn-0").unwrap().incarnation;
    let zeroed = OracleRequest::RegionZeroed {
        mn: "mn-0".into(),
        incarnation,
        region: region.id,
        epoch: region.epoch,
    };
    mn.oracles().call(&zeroed, soon()).await.unwrap();
    let free = |map: &shine_common::wire::ClusterMap| map.regions.iter().all(|r| r.usage == RegionUse::Free);
    assert!(user.map_where(soon(), free).await.is_some());

    // One that leaves says so.
    cn.leave().await;
    assert!(user.map_where(soon(), |map| map.member(Role::Cn, "cn-0").is_none()).await.is_some());
    mn.leave().await;
    let down = |map: &shine_common::wire::ClusterMap| {
        map.member(Role::Mn, "mn-0").is_some_and(|m| m.state == MemberState::Down)
    };
    assert!(user.map_where(soon(), down).await.is_some());
    user.leave().await;
    oracle.stop().await;
}

#[tokio::test]
async fn a_silent_member_is_marked_down_and_a_renewing_one_is_not() {
    let ca = ClusterCa::ephemeral().unwrap();
    let oracle = Oracle::start(&ca, any_port(), NoStore, Duration::from_millis(1_000));
    let cn = join(&ca, Role::Cn, "lively", &[oracle.addr]).await;
    // Joins and never renews.
    let mn = join(&ca, Role::Mn, "silent", &[oracle.addr]).await;
    drop(mn);
    let down = |map: &shine_common::wire::ClusterMap| {
        map.member(Role::Mn, "silent").is_some_and(|m| m.state == MemberState::Down)
    };
    let map = cn.map_where(soon(), down).await.unwrap();
    assert_eq!(map.regions.len(), 2, "its regions stay");
    let error = create(cn.oracles(), "a").await.unwrap_err();
    assert_eq!(code_of(&error), Some(FaultCode::Unavailable), "{error}");
    // The next life takes over, regions and all.
    let again = join(&ca, Role::Mn, "silent", &[oracle.addr]).await;
    assert_eq!(again.grants().borrow().iter().map(|g| g.id).collect::<Vec<_>>(), [RegionId(0), RegionId(1)]);
    assert!(create(cn.oracles(), "a").await.is_ok());
    oracle.stop().await;
}

#[tokio::test]
async fn a_restarted_oracle_goes_on_from_its_state() {
    let ca = ClusterCa::ephemeral().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let lease = Duration::from_secs(60);
    let oracle = Oracle::start(&ca, any_port(), FileStore::open(dir.path()).unwrap(), lease);
    let addr = oracle.addr;
    let mn = join(&ca, Role::Mn, "mn-0", &[addr]).await;
    let cn = join(&ca, Role::Cn, "cn-0", &[addr]).await;
    let (_, epoch) = create(cn.oracles(), "kept").await.unwrap();
    let before = cn.map_at(epoch, soon()).await.unwrap();
    oracle.stop().await;
    // Nobody to ask: the last map stays.
    let error = cn.oracles().call(&OracleRequest::Status, Instant::now() + Duration::from_millis(100)).await;
    assert!(matches!(error, Err(OracleError::NoOracle { .. })), "{error:?}");
    assert_eq!(cn.map(), before);

    let oracle = Oracle::start(&ca, addr, FileStore::open(dir.path()).unwrap(), lease);
    // The calls that fail meanwhile are the members' own to repeat; this one is ours.
    let after = loop {
        match cn.refresh(soon()).await {
            Ok(map) => break map,
            Err(OracleError::NoOracle { .. }) => tokio::task::yield_now().await,
            Err(other) => panic!("{other}"),
        }
    };
    assert_eq!(after, before, "the same life of everybody");
    let (_, next) = create(cn.oracles(), "new").await.unwrap();
    assert!(next > epoch, "epochs go on");
    assert!(mn.map_at(next, soon()).await.is_some(), "watchers come back by themselves");
    oracle.stop().await;
}

#[tokio::test]
async fn an_oracle_without_state_is_joined_anew_and_its_map_is_newer() {
    let ca = ClusterCa::ephemeral().unwrap();
    let lease = Duration::from_millis(600);
    let oracle = Oracle::start(&ca, any_port(), NoStore, lease);
    let addr = oracle.addr;
    let mn = join(&ca, Role::Mn, "mn-0", &[addr]).await;
    let cn = join(&ca, Role::Cn, "cn-0", &[addr]).await;
    let (_, epoch) = create(cn.oracles(), "forgotten").await.unwrap();
    assert!(cn.map_at(epoch, soon()).await.is_some());
    let old = mn.grants().borrow().clone();
    oracle.stop().await;
    let oracle = Oracle::start(&ca, addr, NoStore, lease);
    let both_back = |map: &shine_common::wire::ClusterMap| {
        map.epoch > epoch && map.members.len() == 2 && map.members.iter().all(|m| m.state == MemberState::Up)
    };
    let map = cn.map_where(soon(), both_back).await.unwrap();
    assert!(map.collections.is_empty());
    let new = mn.grants().borrow().clone();
    assert!(new.iter().zip(&*old).all(|(new, old)| new.born > old.epoch), "content of before is lost");
    assert_eq!(*mn.standing().borrow(), Standing::In);
    oracle.stop().await;
}

#[tokio::test]
async fn certificates_decide_who_may_do_what() {
    let ca = ClusterCa::ephemeral().unwrap();
    let oracle = Oracle::with_long_leases(&ca);
    let mn = join(&ca, Role::Mn, "mn-0", &[oracle.addr]).await;
    let client = |role, name| client_of(&ca, role, name, &[oracle.addr]);
    let (cn, user, admin) =
        (client(Role::Cn, "cn-0"), client(Role::Client, "u"), client(Role::Admin, "root"));

    // Clients and admins cannot be members.
    for stranger in [&user, &admin] {
        let error = Membership::join(stranger.clone(), offer(stranger, 0), soon()).await.unwrap_err();
        assert_eq!(code_of(&error), Some(FaultCode::Forbidden), "{error}");
    }
    // Nobody speaks for another.
    let as_other = |name: &str, role| OracleRequest::Join {
        name: name.into(),
        role,
        addr: "127.0.0.1:1".into(),
        incarnation: Incarnation(1),
        regions: 0,
        region_bytes: 0,
    };
    let zeroed = OracleRequest::RegionZeroed {
        mn: "mn-0".into(),
        incarnation: Incarnation(1),
        region: RegionId(0),
        epoch: Epoch(1),
    };
    let set = OracleRequest::SetCollectionState { id: CollectionId(1), state: CollectionState::Ready };
    let grow = OracleRequest::GrowCollection { id: CollectionId(1), have: 1 };
    let drop = OracleRequest::DropCollection { name: "a".into() };
    let make = OracleRequest::CreateCollection(spec("a"));
    for (caller, request, who) in [
        (&cn, as_other("cn-1", Role::Cn), "cn 'cn-1'"),
        (&cn, as_other("cn-0", Role::Mn), "mn 'cn-0'"),
        (&user, as_other("u", Role::Cn), "cn 'u'"),
        (&cn, zeroed, "cn 'cn-0'"),
        (&user, make.clone(), "expected role cn or admin"),
        (&user, drop.clone(), "expected role cn or admin"),
        (&user, set.clone(), "expected role cn"),
        (&admin, set, "expected role cn"),
        (&admin, grow, "expected role cn"),
        (mn.oracles(), make.clone(), "expected role cn or admin"),
    ] {
        let error = caller.call(&request, soon()).await.unwrap_err();
        assert_eq!(code_of(&error), Some(FaultCode::Forbidden), "{request:?}: {error}");
        assert!(error.to_string().contains(who), "{error}");
    }
    // What is allowed is allowed; and asking is for everybody.
    admin.call(&make, soon()).await.unwrap();
    admin.call(&drop, soon()).await.unwrap();
    for asker in [&cn, &user, &admin, mn.oracles()] {
        assert!(matches!(asker.call(&OracleRequest::Status, soon()).await, Ok(OracleResponse::Status(_))));
    }
    let wait = OracleRequest::WatchMap { after: Epoch(0), wait_ms: 30_001 };
    assert_eq!(code_of(&user.call(&wait, soon()).await.unwrap_err()), Some(FaultCode::BadRequest));
    // An oracle serves no verbs.
    let verbs = user.endpoint().connect(oracle.addr, Role::Oracle, Alpn::Verbs).await.unwrap();
    assert!(verbs.closed().await.to_string().contains("no verbs"));
    oracle.stop().await;
}

#[tokio::test]
async fn strangers_are_refused_in_words() {
    let (ca, other) = (ClusterCa::ephemeral().unwrap(), ClusterCa::ephemeral().unwrap());
    let oracle = Oracle::with_long_leases(&ca);
    let (now, hour) = (SystemTime::now(), Duration::from_secs(3600));
    let expired = ca.identity_between(Role::Cn, "cn-0", now - 2 * hour, now - hour).unwrap();
    for (identity, said) in [(other.identity(Role::Cn, "cn-0").unwrap(), "another CA"), (expired, "expired")]
    {
        let client = OracleClient::new(endpoint_of(identity), vec![oracle.addr]);
        let offer = offer(&client, 0);
        let soon = Instant::now() + Duration::from_millis(500);
        let error = Membership::join(client, offer, soon).await.unwrap_err();
        assert!(matches!(error, OracleError::Refused { .. }), "{error:?}");
        let error = error.to_string();
        assert!(error.contains(said) && error.contains(&oracle.addr.port().to_string()), "{error}");
    }
    // Nor is another role's process an oracle.
    let cn = endpoint_of(ca.identity(Role::Cn, "cn-7").unwrap());
    let client = client_of(&ca, Role::Client, "u", &[cn.local_addr()]);
    let error = Membership::watch(client, Instant::now() + Duration::from_millis(500)).await.unwrap_err();
    assert!(error.to_string().contains("cn 'cn-7'"), "{error}");
    oracle.stop().await;
}

#[tokio::test]
async fn calls_go_to_whichever_oracle_answers() {
    let ca = ClusterCa::ephemeral().unwrap();
    let oracle = Oracle::with_long_leases(&ca);
    // Bound, and never answered from.
    let silent = std::net::UdpSocket::bind(any_port()).unwrap();
    let hasty = EndpointOptions { handshake_timeout: Duration::from_millis(100), ..Default::default() };
    let identity = ca.identity(Role::Client, "u").unwrap();
    let endpoint = Endpoint::bind(any_port(), identity, hasty).unwrap();
    let client = OracleClient::new(endpoint.clone(), vec![silent.local_addr().unwrap(), oracle.addr]);
    assert_eq!(client.silent_for(), None);
    assert!(client.call(&OracleRequest::Status, soon()).await.is_ok());
    assert!(client.silent_for().is_some());
    let alone = OracleClient::new(endpoint, vec![silent.local_addr().unwrap()]);
    let error = alone.call(&OracleRequest::Status, soon()).await.unwrap_err();
    assert!(error.to_string().contains(&silent.local_addr().unwrap().to_string()), "{error}");
    oracle.stop().await;
}

#[tokio::test]
async fn the_newer_of_two_processes_of_one_name_stays() {
    let ca = ClusterCa::ephemeral().unwrap();
    let oracle = Oracle::start(&ca, any_port(), NoStore, Duration::from_millis(300));
    let older = join(&ca, Role::Cn, "cn-0", &[oracle.addr]).await;
    let newer = join(&ca, Role::Cn, "cn-0", &[oracle.addr]).await;
    older.standing().wait_for(|standing| *standing == Standing::Superseded).await.unwrap();
    assert_eq!(*newer.standing().borrow(), Standing::In);
    // Its goodbye does not take the newer one along.
    older.leave().await;
    let map = newer.refresh(soon()).await.unwrap();
    assert!(map.member(Role::Cn, "cn-0").is_some());
    oracle.stop().await;
}

/// A store whose disk is full while `full` is set.
#[derive(Debug)]
struct Disk {
    full: Arc<AtomicBool>,
}

impl StateStore for Disk {
    fn load(&self) -> Result<Option<State>, StoreError> {
        Ok(None)
    }

    fn save(&self, _state: &State) -> Result<(), StoreError> {
        if !self.full.load(Ordering::SeqCst) {
            return Ok(());
        }
        let why = std::io::Error::new(std::io::ErrorKind::StorageFull, "no space left");
        Err(StoreError::Dir { dir: "/full".into(), why })
    }
}

#[tokio::test]
async fn what_cannot_be_stored_is_refused_and_never_seen() {
    let ca = ClusterCa::ephemeral().unwrap();
    let full = Arc::new(AtomicBool::new(false));
    let oracle = Oracle::start(&ca, any_port(), Disk { full: full.clone() }, Duration::from_secs(60));
    let _mn = join(&ca, Role::Mn, "mn-0", &[oracle.addr]).await;
    let cn = join(&ca, Role::Cn, "cn-0", &[oracle.addr]).await;
    let before = cn.refresh(soon()).await.unwrap();
    full.store(true, Ordering::SeqCst);
    let error = create(cn.oracles(), "a").await.unwrap_err();
    assert_eq!(code_of(&error), Some(FaultCode::Unavailable), "{error}");
    assert!(error.to_string().contains("no space left"), "{error}");
    assert_eq!(cn.refresh(soon()).await.unwrap(), before);
    full.store(false, Ordering::SeqCst);
    let (id, epoch) = create(cn.oracles(), "a").await.unwrap();
    assert_eq!((id, epoch), (CollectionId(1), before.epoch.next()), "nothing of it was kept");
    oracle.stop().await;
}

#[tokio::test]
async fn noise_on_the_port_costs_no_member_its_lease() {
    let ca = ClusterCa::ephemeral().unwrap();
    let oracle = Oracle::start(&ca, any_port(), NoStore, Duration::from_secs(2));
    let cn = join(&ca, Role::Cn, "cn-0", &[oracle.addr]).await;
    let noise = tokio::net::UdpSocket::bind(any_port()).await.unwrap();
    // Bytes of every length and kind, the first byte running through all packet types; a fixed sequence.
    let mut word = 0x9e37_79b9_7f4a_7c15_u64;
    for round in 0..2_000 {
        let len = [1, 21, 40, 1_200, 1_452, 9_000, 60_000][round % 7];
        let bytes: Vec<u8> = (0..len)
            .map(|_| {
                word ^= word << 13;
                word ^= word >> 7;
                word ^= word << 17;
                word as u8
            })
            .collect();
        let _ = noise.send_to(&bytes, oracle.addr).await;
    }
    // Streams of an authenticated peer that break every rule.
    let user = client_of(&ca, Role::Client, "u", &[oracle.addr]);
    let connection = user.endpoint().connect(oracle.addr, Role::Oracle, Alpn::Rpc).await.unwrap();
    for junk in [&b"SHRP"[..], &[0xff; 16], &[0; 4_000], b"SHRP\x01\0\0\0\0\0\0\0\xff\xff\xff\xff"] {
        for _ in 0..50 {
            let (mut send, _recv) = connection.open_bi().await.unwrap();
            let _ = send.write_all(junk).await;
            let _ = send.finish();
        }
    }
    // And some that never end.
    let mut open = Vec::new();
    for _ in 0..100 {
        let (mut send, recv) = connection.open_bi().await.unwrap();
        send.write_all(b"SHRP\x01\0\0\0\0\0\0\0\0\0\x10\0").await.unwrap();
        open.push((send, recv));
    }
    assert!(user.call(&OracleRequest::Status, soon()).await.is_ok());
    let map = cn.refresh(soon()).await.unwrap();
    assert_eq!(map.member(Role::Cn, "cn-0").unwrap().state, MemberState::Up);
    assert_eq!(*cn.standing().borrow(), Standing::In);
    oracle.stop().await;
}

// -------------------------------------------------------------------------------------------------- process

/// Ends with the test, whatever happens.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn shine_oracle(args: &[&str], stderr: Stdio) -> Process {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shine-oracle"));
    Process(command.args(args).stdout(Stdio::piped()).stderr(stderr).spawn().unwrap())
}

/// The most memory that a process has held, as the kernel counts it.
fn most_bytes_held(process: &Process) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.0.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Runs to its end, which must be an error; what it said.
fn refusal(args: &[&str]) -> String {
    let mut process = shine_oracle(args, Stdio::piped());
    let mut said = String::new();
    process.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(!process.0.wait().unwrap().success(), "{said}");
    said
}

#[tokio::test]
async fn the_process_says_that_it_is_ready_and_leaves_on_a_signal() {
    let dir = tempfile::tempdir().unwrap();
    let ca = ClusterCa::init(dir.path().join("ca")).unwrap();
    let (certs, state, wrong) = (dir.path().join("oracle"), dir.path().join("state"), dir.path().join("cn"));
    ca.issue(Role::Oracle, "oracle-0", &[], 1, &certs).unwrap();
    ca.issue(Role::Cn, "cn-0", &[], 1, &wrong).unwrap();
    let args = ["--cert-dir", path(&certs), "--state-dir", path(&state), "--log", "warn"];
    let mut epoch = Epoch(0);
    for signal in [nix::sys::signal::SIGTERM, nix::sys::signal::SIGINT] {
        let mut process = shine_oracle(&args, Stdio::inherit());
        let mut line = String::new();
        BufReader::new(process.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let ready: ReadyLine = serde_json::from_str(&line).unwrap();
        assert_eq!((ready.role, ready.name.as_str(), ready.ready), (Role::Oracle, "oracle-0", true));
        let said = refusal(&args);
        assert!(said.contains("in use by another process"), "{said}");

        let mn = join(&ca, Role::Mn, "mn-0", &[ready.addr]).await;
        assert!(mn.map().epoch > epoch, "epochs go on over lives");
        // QUIC's receive buffer alone would be 134 MB if the socket reported the kernel's segments.
        let bytes = most_bytes_held(&process);
        assert!(bytes < 64 << 20, "{bytes} bytes for an oracle with one member");
        epoch = mn.map().epoch;
        let pid = nix::unistd::Pid::from_raw(process.0.id().try_into().unwrap());
        nix::sys::signal::kill(pid, signal).unwrap();
        let status = tokio::task::spawn_blocking(move || process.0.wait()).await.unwrap().unwrap();
        assert!(status.success(), "{signal}: {status}");
    }
    let said = refusal(&["--cert-dir", path(&wrong)]);
    assert!(said.contains("cn 'cn-0'") && said.contains("expected role oracle"), "{said}");
    let said = refusal(&["--cert-dir", path(&certs), "--name", "other"]);
    assert!(said.contains("'oracle-0'"), "{said}");
    let said = refusal(&["--cert-dir", "/nowhere"]);
    assert!(said.contains("/nowhere/ca.pem") && said.contains("shine ca issue"), "{said}");
    assert!(refusal(&[]).contains("--cert-dir is needed"));
}
