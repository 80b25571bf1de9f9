//! A cluster in one process: memory nodes without a network, and a catalogue that grants regions as the oracle does.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::{BoxFuture, ready};
use parking_lot::Mutex;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use shine_cn::catalogue::Catalogue;
use shine_cn::check;
use shine_cn::collection::{Collection, Options};
use shine_cn::counters::Counters;
use shine_cn::fabric::{Connect, Fabric};
use shine_cn::hnsw::insert::{self, Levels};
use shine_cn::node::{Limits, Node, Parts};
use shine_cn::query::Query;
use shine_common::ids::{CollectionId, Epoch, ExternalId, Incarnation, NodeId, RegionId, SessionId};
use shine_common::layout::CollectionParams;
use shine_common::metric::{DType, Metric};
use shine_common::verbs::host::{Clock, Host, HostOptions};
use shine_common::verbs::local::LocalVerbs;
use shine_common::verbs::memory::{HugePages, RegionMemory};
use shine_common::verbs::{FrameBytes, ReadBatch, ReadReply, VerbError, Verbs, WordAt, WriteBatch};
use shine_common::wire::{
    CheckReport, ClusterMap, Collection as MapEntry, CollectionSpec, CollectionState, Fault, FaultCode,
    Member, MemberState, OracleRequest, OracleResponse, RegionEntry, RegionUse, Role, Target,
};

pub(crate) const MIB: u64 = 1 << 20;

/// Memory nodes, and the sessions that were opened on them.
pub(crate) struct Hosts {
    hosts: Mutex<HashMap<String, Arc<Host>>>,
    /// Memory nodes that take no connection.
    down: Mutex<Vec<String>>,
}

impl Hosts {
    pub(crate) fn host(&self, name: &str) -> Arc<Host> {
        Arc::clone(&self.hosts.lock()[name])
    }

    pub(crate) fn set_down(&self, name: &str, is_down: bool) {
        let mut down = self.down.lock();
        down.retain(|other| other != name);
        if is_down {
            down.push(name.to_owned());
        }
    }
}

/// What a test does to one compute node.
#[derive(Debug, Default)]
pub(crate) struct Control {
    /// Verbs that still go through, if they are counted; then the process is as good as killed.
    budget: Mutex<Option<u64>>,
    /// Verbs that went through.
    spent: AtomicU64,
    /// Counts connections that were cut.
    cuts: AtomicU64,
    /// Readings of lists of that many bytes that are still to be torn.
    tear: Mutex<(u32, u64)>,
    /// Sessions outlive the connection until their lease ends, as those of a killed process do.
    graveyard: Mutex<Vec<Arc<LocalVerbs>>>,
}

impl Control {
    /// Lets `verbs` more through.
    pub(crate) fn allow(&self, verbs: u64) {
        *self.budget.lock() = Some(verbs);
    }

    pub(crate) fn spent(&self) -> u64 {
        self.spent.load(Ordering::SeqCst)
    }

    /// Cuts every connection that there is now.
    pub(crate) fn cut(&self) {
        self.cuts.fetch_add(1, Ordering::SeqCst);
    }

    /// Tears the next `times` readings that have records of `len` bytes.
    pub(crate) fn tear(&self, len: u64, times: u64) {
        *self.tear.lock() = (len as u32, times);
    }

    /// Whether the last verb that was allowed has gone through.
    pub(crate) fn is_dead(&self) -> bool {
        *self.budget.lock() == Some(0)
    }

    fn spend(&self) -> bool {
        let mut budget = self.budget.lock();
        match &mut *budget {
            Some(0) => false,
            Some(left) => {
                *left -= 1;
                self.spent.fetch_add(1, Ordering::SeqCst);
                true
            }
            None => {
                self.spent.fetch_add(1, Ordering::SeqCst);
                true
            }
        }
    }
}

/// Local verbs that a test can end.
#[derive(Debug)]
pub(crate) struct TestVerbs {
    inner: Arc<LocalVerbs>,
    control: Arc<Control>,
    /// Cuts when it was opened.
    cuts: u64,
}

impl TestVerbs {
    async fn gate(&self) -> Result<(), VerbError> {
        // Tasks take turns, as they do where verbs take time.
        tokio::task::yield_now().await;
        if self.is_cut() || !self.control.spend() {
            return Err(VerbError::ConnectionLost { peer: Arc::clone(self.inner.peer()), why: "cut".into() });
        }
        Ok(())
    }

    fn is_cut(&self) -> bool {
        self.cuts != self.control.cuts.load(Ordering::SeqCst)
    }
}

impl Verbs for TestVerbs {
    fn peer(&self) -> &Arc<str> {
        self.inner.peer()
    }

    fn session(&self) -> SessionId {
        self.inner.session()
    }

    fn is_lost(&self) -> bool {
        self.is_cut() || self.control.is_dead() || self.inner.is_lost()
    }

    async fn read(&self, batch: ReadBatch, deadline: Instant) -> Result<ReadReply, VerbError> {
        self.gate().await?;
        let groups = batch.groups().to_vec();
        let mut reply = self.inner.read(batch, deadline).await?;
        let (len, times) = &mut *self.control.tear.lock();
        if *times > 0 && groups.iter().any(|group| group.len == *len) {
            *times -= 1;
            let mut bytes = reply.data.to_vec();
            let mut at = 0;
            for group in groups {
                for _ in 0..group.count {
                    if group.len == *len {
                        // The version of a list, which its checksum covers.
                        bytes[at + 4] ^= 1;
                    }
                    at += group.len as usize;
                }
            }
            reply.data = bytes.into();
        }
        Ok(reply)
    }

    async fn write(&self, batch: WriteBatch, deadline: Instant) -> Result<FrameBytes, VerbError> {
        self.gate().await?;
        self.inner.write(batch, deadline).await
    }

    async fn compare_swap(
        &self,
        word: WordAt,
        old: u64,
        new: u64,
        deadline: Instant,
    ) -> Result<u64, VerbError> {
        self.gate().await?;
        self.inner.compare_swap(word, old, new, deadline).await
    }

    async fn fetch_add(&self, word: WordAt, add: u64, deadline: Instant) -> Result<u64, VerbError> {
        self.gate().await?;
        self.inner.fetch_add(word, add, deadline).await
    }

    async fn session_alive(&self, session: SessionId, deadline: Instant) -> Result<bool, VerbError> {
        self.gate().await?;
        self.inner.session_alive(session, deadline).await
    }

    async fn send(&self, message: Bytes, deadline: Instant) -> Result<(), VerbError> {
        self.gate().await?;
        self.inner.send(message, deadline).await
    }

    async fn recv(&self, deadline: Instant) -> Result<Bytes, VerbError> {
        self.inner.recv(deadline).await
    }
}

/// Opens local sessions for one compute node. They end with their lease on the hosts' clock if `is_leased`.
struct LocalConnect {
    hosts: Arc<Hosts>,
    client: String,
    is_leased: bool,
    control: Arc<Control>,
}

impl Connect<TestVerbs> for LocalConnect {
    fn connect(&self, mn: &Member, _deadline: Instant) -> BoxFuture<'static, Result<TestVerbs, VerbError>> {
        let lost = |why: String| VerbError::ConnectionLost { peer: mn.name.as_str().into(), why };
        let opened = if self.hosts.down.lock().contains(&mn.name) || self.control.is_dead() {
            Err(lost("refused".into()))
        } else {
            let host = self.hosts.host(&mn.name);
            if host.incarnation() == mn.incarnation {
                let open = if self.is_leased { LocalVerbs::connect_leased } else { LocalVerbs::connect };
                let control = Arc::clone(&self.control);
                let cuts = control.cuts.load(Ordering::SeqCst);
                open(&host, &self.client)
                    .map(|inner| {
                        let inner = Arc::new(inner);
                        control.graveyard.lock().push(Arc::clone(&inner));
                        TestVerbs { inner, control, cuts }
                    })
                    .map_err(|error| lost(error.to_string()))
            } else {
                Err(lost("another incarnation".into()))
            }
        };
        Box::pin(ready(opened))
    }
}

/// Told of every new map.
type Follower = Box<dyn Fn(&Arc<ClusterMap>) + Send>;

struct OracleState {
    map: ClusterMap,
    next_collection: u32,
    /// Whoever follows the map.
    followers: Vec<Follower>,
    is_reachable: bool,
}

/// Grants regions and publishes maps, as the oracle does.
pub(crate) struct TestOracle {
    state: Mutex<OracleState>,
    hosts: Arc<Hosts>,
}

impl TestOracle {
    pub(crate) fn map(&self) -> ClusterMap {
        self.state.lock().map.clone()
    }

    pub(crate) fn set_reachable(&self, is_reachable: bool) {
        self.state.lock().is_reachable = is_reachable;
    }

    /// Changes the map and publishes it.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut ClusterMap) -> T) -> T {
        let mut state = self.state.lock();
        state.map.epoch = state.map.epoch.next();
        let result = change(&mut state.map);
        let map = Arc::new(state.map.clone());
        for follower in &state.followers {
            follower(&map);
        }
        result
    }

    pub(crate) fn subscribe<V: Verbs>(&self, fabric: &Arc<Fabric<V>>) {
        let mut state = self.state.lock();
        let follower = Arc::downgrade(fabric);
        state.followers.push(Box::new(move |map| {
            if let Some(fabric) = follower.upgrade() {
                fabric.publish(Arc::clone(map));
            }
        }));
        fabric.publish(Arc::new(state.map.clone()));
    }

    fn answer(&self, request: OracleRequest) -> Result<OracleResponse, Fault> {
        if !self.state.lock().is_reachable {
            return Err(Fault::new(FaultCode::NoOracle, "no oracle answers"));
        }
        match request {
            OracleRequest::CreateCollection(spec) => self.create(spec),
            OracleRequest::SetCollectionState { id, state } => self.change(|map| {
                let collection = map.collections.iter_mut().find(|c| c.id == id).expect("known collection");
                collection.state = state;
                Ok(OracleResponse::Done { epoch: map.epoch })
            }),
            OracleRequest::GrowCollection { id, have } => self.change(|map| {
                let epoch = map.epoch;
                let at = map.collections.iter().position(|c| c.id == id).expect("known collection");
                let names = map.collections[at].memory_nodes.clone();
                if map.collections[at].regions.len() <= have as usize {
                    let free = map
                        .regions
                        .iter_mut()
                        .find(|region| region.usage == RegionUse::Free && names.contains(&region.mn));
                    let Some(region) = free else {
                        return Err(Fault::new(FaultCode::RegionFull, "no free region"));
                    };
                    region.usage = RegionUse::Used(id);
                    let granted = (region.id, region.born);
                    map.collections[at].regions.push(granted);
                }
                Ok(OracleResponse::Collection { collection: map.collections[at].clone(), epoch })
            }),
            OracleRequest::DropCollection { name } => self.change(|map| {
                let epoch = map.epoch;
                let Some(at) = map.collections.iter().position(|c| c.name == name) else {
                    return Err(Fault::new(FaultCode::NotFound, format!("no collection '{name}'")));
                };
                let dropped = map.collections.remove(at);
                for region in map.regions.iter_mut().filter(|r| r.usage == RegionUse::Used(dropped.id)) {
                    region.usage = RegionUse::Free;
                    (region.epoch, region.born) = (epoch, epoch);
                    self.hosts.host(&region.mn).reset_region(region.id, epoch, epoch).expect("known region");
                }
                Ok(OracleResponse::Done { epoch })
            }),
            OracleRequest::WatchMap { .. } => Ok(OracleResponse::Map(self.map())),
            other => panic!("not asked in these tests: {other:?}"),
        }
    }

    fn create(&self, spec: CollectionSpec) -> Result<OracleResponse, Fault> {
        let id = {
            let mut state = self.state.lock();
            if state.map.collection(&spec.name).is_some() {
                return Err(Fault::new(FaultCode::CollectionExists, format!("'{}' exists", spec.name)));
            }
            state.next_collection += 1;
            CollectionId(state.next_collection)
        };
        self.change(|map| {
            let mut names: Vec<_> = spec.memory_nodes.clone();
            if names.is_empty() {
                names.extend(map.members.iter().filter(|m| m.role == Role::Mn).map(|m| m.name.clone()));
            }
            let mut regions = Vec::new();
            for name in &names {
                let free = map.regions.iter_mut().find(|r| r.usage == RegionUse::Free && r.mn == *name);
                let region = free.ok_or_else(|| Fault::new(FaultCode::RegionFull, "no free region"))?;
                region.usage = RegionUse::Used(id);
                regions.push((region.id, region.born));
            }
            let params = CollectionParams::new(
                spec.dtype,
                spec.metric,
                spec.dim,
                spec.m,
                spec.ef_construction,
                spec.capacity,
                regions.len() as u16,
            )
            .map_err(|bad| Fault::new(FaultCode::BadRequest, bad.to_string()))?;
            let state = if spec.loading { CollectionState::Loading } else { CollectionState::Creating };
            let collection =
                MapEntry { id, name: spec.name.clone(), params, regions, memory_nodes: names, state };
            map.collections.push(collection.clone());
            Ok(OracleResponse::Collection { collection, epoch: map.epoch })
        })
    }
}

impl Catalogue for TestOracle {
    fn call(
        &self,
        request: OracleRequest,
        _deadline: Instant,
    ) -> BoxFuture<'_, Result<OracleResponse, Fault>> {
        Box::pin(ready(self.answer(request)))
    }
}

/// Memory nodes, an oracle, and any number of compute nodes.
pub(crate) struct TestCluster {
    pub(crate) hosts: Arc<Hosts>,
    pub(crate) oracle: Arc<TestOracle>,
    /// Moves the leases of all memory nodes.
    pub(crate) clock: Clock,
}

/// What a cluster is made of.
pub(crate) struct Shape {
    pub(crate) memory_nodes: usize,
    pub(crate) regions: u16,
    pub(crate) region_bytes: u64,
}

impl Default for Shape {
    fn default() -> Self {
        Self { memory_nodes: 3, regions: 2, region_bytes: 8 * MIB }
    }
}

impl TestCluster {
    pub(crate) fn new(shape: &Shape) -> Self {
        let clock = Clock::manual();
        let mut hosts = HashMap::new();
        let mut map = ClusterMap { epoch: Epoch(1), ..ClusterMap::default() };
        for i in 0..shape.memory_nodes {
            let name = format!("mn-{i}");
            let options = HostOptions { clock: clock.clone(), ..HostOptions::default() };
            let host = Host::new(name.as_str(), Incarnation(i as u64 + 1), options);
            for r in 0..shape.regions {
                let id = RegionId(1 + r * shape.memory_nodes as u16 + i as u16);
                let memory = RegionMemory::new(shape.region_bytes, HugePages::Off).expect("memory");
                host.add_region(id, Epoch(1), Epoch(1), memory).expect("a new region");
                map.regions.push(RegionEntry {
                    id,
                    mn: name.clone(),
                    bytes: shape.region_bytes,
                    epoch: Epoch(1),
                    born: Epoch(1),
                    usage: RegionUse::Free,
                });
            }
            map.members.push(Member {
                name: name.clone(),
                role: Role::Mn,
                addr: format!("in-process:{i}"),
                incarnation: host.incarnation(),
                state: MemberState::Up,
            });
            hosts.insert(name, host);
        }
        map.regions.sort_by_key(|region| region.id);
        let hosts = Arc::new(Hosts { hosts: Mutex::new(hosts), down: Mutex::default() });
        let state = OracleState { map, next_collection: 0, followers: Vec::new(), is_reachable: true };
        let oracle = Arc::new(TestOracle { state: Mutex::new(state), hosts: Arc::clone(&hosts) });
        Self { hosts, oracle, clock }
    }

    /// The data plane of one more compute node. With `is_leased`, sessions end with their lease on the cluster's clock.
    pub(crate) fn fabric(&self, name: &str, is_leased: bool) -> (Arc<Fabric<TestVerbs>>, Arc<Control>) {
        let control = Arc::new(Control::default());
        let connect = LocalConnect {
            hosts: Arc::clone(&self.hosts),
            client: name.to_owned(),
            is_leased,
            control: Arc::clone(&control),
        };
        let fabric = Fabric::new(Arc::new(connect), Arc::new(Counters::default()));
        self.oracle.subscribe(&fabric);
        (fabric, control)
    }

    pub(crate) fn catalogue(&self) -> Arc<dyn Catalogue> {
        Arc::clone(&self.oracle) as Arc<dyn Catalogue>
    }

    pub(crate) async fn create(&self, spec: CollectionSpec) -> Result<Arc<Collection<TestVerbs>>, Fault> {
        let (fabric, _) = self.fabric("cn-0", false);
        Collection::create(fabric, self.catalogue(), spec, options(), soon()).await
    }

    /// Opens a collection on a compute node of its own.
    pub(crate) async fn open(&self, cn: &str, collection: &str) -> Result<Arc<Collection<TestVerbs>>, Fault> {
        self.open_on(self.fabric(cn, false).0, collection).await
    }

    pub(crate) async fn open_on(
        &self,
        fabric: Arc<Fabric<TestVerbs>>,
        collection: &str,
    ) -> Result<Arc<Collection<TestVerbs>>, Fault> {
        let map = self.oracle.map();
        let entry = map.collection(collection).expect("known collection");
        Collection::open(fabric, self.catalogue(), entry, options(), soon()).await
    }

    /// Replaces a memory node by a restarted one: same regions, empty.
    pub(crate) fn restart(&self, name: &str) {
        let life = Incarnation(self.hosts.host(name).incarnation().0 + 100);
        let options = HostOptions { clock: self.clock.clone(), ..HostOptions::default() };
        let host = Host::new(name, life, options);
        self.oracle.change(|map| {
            let epoch = map.epoch;
            for region in map.regions.iter_mut().filter(|region| region.mn == name) {
                (region.epoch, region.born) = (epoch, epoch);
                let memory = RegionMemory::new(region.bytes, HugePages::Off).expect("memory");
                host.add_region(region.id, epoch, epoch, memory).expect("a new region");
            }
            let member = map.members.iter_mut().find(|member| member.name == name).expect("known member");
            member.incarnation = life;
            self.hosts.hosts.lock().insert(name.to_owned(), Arc::clone(&host));
        });
    }
}

/// The staleness bound is zero here: every query sees what was done before it.
pub(crate) fn options() -> Options {
    Options { staleness_bound: Duration::ZERO, ..Options::default() }
}

/// A deadline that only a hang reaches.
pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

pub(crate) fn spec(name: &str, dtype: DType, metric: Metric, dim: u32) -> CollectionSpec {
    CollectionSpec {
        name: name.into(),
        dtype,
        metric,
        dim,
        m: 8,
        ef_construction: 64,
        capacity: 10_000,
        memory_nodes: Vec::new(),
        loading: false,
    }
}

/// Rows of i8 in a few dimensions that matter, the rest noise: neither round nor trivial.
pub(crate) fn rows(seed: u64, count: usize, dim: usize) -> Vec<Vec<u8>> {
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..count)
        .map(|_| {
            let latent: [f32; 4] = std::array::from_fn(|_| rng.random_range(-1.0..1.0));
            (0..dim)
                .map(|i| {
                    let signal = latent[i % 4] * (1.0 + (i / 4) as f32 * 0.2) * 40.0;
                    (signal + rng.random_range(-6.0f32..6.0)).clamp(-127.0, 127.0) as i8 as u8
                })
                .collect()
        })
        .collect()
}

/// Indices of the exact nearest rows, nearest first.
pub(crate) fn exact(
    collection: &Collection<TestVerbs>,
    rows: &[Vec<u8>],
    query: &[u8],
    k: usize,
) -> Vec<usize> {
    let mut all: Vec<_> =
        rows.iter().enumerate().map(|(i, row)| (collection.distance().eval(query, row), i)).collect();
    all.sort_by(|a, b| a.partial_cmp(b).expect("no NaN here"));
    all.into_iter().take(k).map(|(_, i)| i).collect()
}

pub(crate) async fn insert(
    collection: &Arc<Collection<TestVerbs>>,
    levels: &Levels,
    id: u64,
    vector: &[u8],
) -> Result<NodeId, Fault> {
    let inserted = insert::insert(collection, levels, ExternalId::Num(id), vector.to_vec(), soon()).await?;
    Ok(inserted.node)
}

pub(crate) async fn insert_all(collection: &Arc<Collection<TestVerbs>>, levels: &Levels, rows: &[Vec<u8>]) {
    for (i, row) in rows.iter().enumerate() {
        insert(collection, levels, i as u64, row).await.expect("an insert that nothing disturbs");
    }
}

/// Inserts from a compute node per memory node, each of which leases chunks of its own, so that records lie everywhere.
pub(crate) async fn insert_spread(cluster: &TestCluster, collection: &str, rows: &[Vec<u8>]) {
    let levels = Levels::seeded(1);
    let mut cns = Vec::new();
    let count = cluster.hosts.hosts.lock().len();
    for i in 0..count {
        cns.push(cluster.open(&format!("writer-{i}"), collection).await.expect("the collection is there"));
    }
    for (i, row) in rows.iter().enumerate() {
        insert(&cns[i % cns.len()], &levels, i as u64, row).await.expect("an insert that nothing disturbs");
    }
}

pub(crate) fn near(vector: &[u8], k: u32, ef: u32) -> Query {
    Query { target: Target::Vector(vector.to_vec()), k, ef, with_vectors: false }
}

/// Checks a collection and expects it to be sound.
pub(crate) async fn sound(collection: &Arc<Collection<TestVerbs>>) -> CheckReport {
    let report = check::run(collection, &check::Progress::default()).await.expect("memory answers");
    assert!(report.is_sound(), "{report:?}");
    report
}

/// A stream whose first level is `level`.
pub(crate) fn levels_from(level: u8, m: u32) -> Levels {
    let seed = (0..).find(|seed| Levels::seeded(*seed).draw(m) == level).expect("some seed");
    Levels::seeded(seed)
}

/// A compute node with its requests.
pub(crate) fn node(cluster: &TestCluster, name: &str) -> Arc<Node<TestVerbs>> {
    node_on(cluster, name, cluster.fabric(name, false).0)
}

pub(crate) fn node_on(
    cluster: &TestCluster,
    name: &str,
    fabric: Arc<Fabric<TestVerbs>>,
) -> Arc<Node<TestVerbs>> {
    Node::new(Parts {
        name: name.into(),
        fabric,
        catalogue: cluster.catalogue(),
        oracle_reachable: Box::new(|| true),
        options: options(),
        limits: Limits::default(),
    })
}
