//! The same graph through in-process verbs and over QUIC, with every part real but the processes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shine_cn::collection::{Collection, Options};
use shine_cn::counters::Counters;
use shine_cn::fabric::Fabric;
use shine_cn::hnsw::insert::{self, Levels};
use shine_cn::query;
use shine_cn::serve::QuicConnect;
use shine_common::ids::ExternalId;
use shine_common::metric::{DType, Metric, SimdLevel};
use shine_common::net::endpoint::{Endpoint, EndpointOptions};
use shine_common::net::tls::ClusterCa;
use shine_common::verbs::quic::{self, QuicVerbs};
use shine_common::wire::{CollectionSpec, FaultCode, Role};
use tokio::task::JoinSet;

use crate::support::{Shape, TestCluster, insert_spread, near, options, rows, soon, sound, spec};

/// The memory nodes of a test cluster, also served over QUIC.
struct Network {
    ca: ClusterCa,
    memory_nodes: Vec<Endpoint>,
    /// Owns what serves; ends with the network.
    serving: JoinSet<()>,
}

fn loopback() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

impl Network {
    fn new(cluster: &TestCluster, count: usize) -> Self {
        let ca = ClusterCa::ephemeral().unwrap();
        let mut serving = JoinSet::new();
        let mut memory_nodes = Vec::new();
        for i in 0..count {
            let name = format!("mn-{i}");
            let identity = ca.identity(Role::Mn, &name).unwrap();
            let endpoint = Endpoint::bind(loopback(), identity, EndpointOptions::default()).unwrap();
            let addr = endpoint.local_addr().to_string();
            cluster.oracle.change(|map| {
                map.members.iter_mut().find(|member| member.name == name).unwrap().addr = addr;
            });
            let (host, accepting) = (cluster.hosts.host(&name), endpoint.clone());
            serving.spawn(async move {
                let mut sessions = JoinSet::new();
                while let Some((connection, peer, _)) = accepting.accept().await {
                    let host = Arc::clone(&host);
                    sessions.spawn(async move { drop(quic::serve(host, connection, peer).await) });
                }
            });
            memory_nodes.push(endpoint);
        }
        Self { ca, memory_nodes, serving }
    }

    fn fabric(&self, cluster: &TestCluster, name: &str) -> Arc<Fabric<QuicVerbs>> {
        let identity = self.ca.identity(Role::Cn, name).unwrap();
        let endpoint = Endpoint::bind(loopback(), identity, EndpointOptions::default()).unwrap();
        let fabric = Fabric::new(Arc::new(QuicConnect(endpoint)), Arc::new(Counters::default()));
        cluster.oracle.subscribe(&fabric);
        fabric
    }

    async fn open(
        &self,
        cluster: &TestCluster,
        cn: &str,
        collection: &str,
        simd: SimdLevel,
    ) -> Arc<Collection<QuicVerbs>> {
        let map = cluster.oracle.map();
        let entry = map.collection(collection).unwrap();
        let options = Options { simd, ..options() };
        Collection::open(self.fabric(cluster, cn), cluster.catalogue(), entry, options, soon()).await.unwrap()
    }

    async fn close(mut self) {
        for endpoint in &self.memory_nodes {
            endpoint.close().await;
        }
        self.serving.shutdown().await;
    }
}

fn floats(rows: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let float = |row: &Vec<u8>| row.iter().flat_map(|v| (f32::from(*v as i8) * 0.37).to_le_bytes()).collect();
    rows.iter().map(float).collect()
}

/// One graph gives the same ids in the same order from every backend, compute node and instruction set.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_do_not_depend_on_the_backend_or_the_cpu() {
    let cluster = TestCluster::new(&Shape::default());
    let network = Network::new(&cluster, 3);
    let ints = rows(31, 900, 24);
    for (name, dtype, metric, data) in
        [("ints", DType::I8, Metric::L2, ints.clone()), ("floats", DType::F32, Metric::Cosine, floats(&ints))]
    {
        let local = cluster.create(spec(name, dtype, metric, 24)).await.unwrap();
        insert_spread(&cluster, name, &data).await;
        let mut levels = vec![SimdLevel::Scalar, SimdLevel::Avx2, SimdLevel::Avx512];
        levels.retain(|level| level.is_available());
        let mut remote = Vec::new();
        for level in levels {
            remote.push(network.open(&cluster, &format!("cn-{level}"), name, level).await);
        }
        let queries = rows(32, 40, 24);
        let queries = if dtype == DType::F32 { floats(&queries) } else { queries };
        // It was open before the others wrote: its first query asks where their chunks are.
        query::search(&local, &near(&queries[0], 10, 50), soon()).await.unwrap();
        for query in &queries {
            let expected = query::search(&local, &near(query, 10, 50), soon()).await.unwrap();
            assert_eq!(expected.hits.len(), 10);
            for collection in &remote {
                let answer = query::search(collection, &near(query, 10, 50), soon()).await.unwrap();
                assert_eq!(answer.hits, expected.hits);
                let (here, there) = (&expected.receipt, &answer.receipt);
                assert_eq!(
                    (here.hops, here.rounds, here.remote_reads),
                    (there.hops, there.rounds, there.remote_reads)
                );
                // Every record's bytes came over the wire, and not much beside them.
                let vectors = u64::from(there.distances) * collection.params().vector_bytes();
                let lists = u64::from(there.hops) * collection.params().list_stride();
                assert!(there.bytes > vectors + lists && there.bytes < 4 * (vectors + lists), "{there:?}");
            }
        }
    }
    network.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inserts_over_quic_beside_each_other_keep_every_promise() {
    const CONTENDED: u64 = 30;
    let cluster = TestCluster::new(&Shape::default());
    let network = Network::new(&cluster, 3);
    let local = cluster.create(spec("c", DType::I8, Metric::L2, 16)).await.unwrap();
    let mut cns = Vec::new();
    for i in 0..3 {
        cns.push(network.open(&cluster, &format!("cn-{i}"), "c", SimdLevel::detect()).await);
    }
    let mut tasks = JoinSet::new();
    for task in 0..8u64 {
        let collection = Arc::clone(&cns[task as usize % 3]);
        let data = rows(200 + task, 60, 16);
        tasks.spawn(async move {
            let levels = Levels::seeded(task);
            let mut won = Vec::new();
            for (i, row) in (0u64..).zip(data) {
                let id = ExternalId::Num(if i % 2 == 0 { 1_000_000 + i / 2 } else { 1_000 * task + i });
                match insert::insert(&collection, &levels, id, row.clone(), soon()).await {
                    Ok(_) => won.push((id, row)),
                    Err(fault) => assert_eq!((fault.code, i % 2), (FaultCode::IdExists, 0), "{fault}"),
                }
            }
            won
        });
    }
    let won: Vec<_> = tasks.join_all().await.into_iter().flatten().collect();
    assert_eq!(won.len() as u64, 8 * 30 + CONTENDED, "one winner per contended id");
    for cn in &cns {
        for (id, row) in &won {
            assert_eq!(&query::get(cn, *id, soon()).await.unwrap().vector, row);
        }
    }
    let report = sound(&local).await;
    assert_eq!((report.live, report.linking, report.abandoned), (won.len() as u64, 0, 0), "{report:?}");
    network.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_memory_node_that_goes_away_is_named_by_the_deadline() {
    let cluster = TestCluster::new(&Shape::default());
    let network = Network::new(&cluster, 3);
    let two = CollectionSpec {
        memory_nodes: vec!["mn-0".into(), "mn-2".into()],
        ..spec("two", DType::I8, Metric::L2, 16)
    };
    cluster.create(spec("all", DType::I8, Metric::L2, 16)).await.unwrap();
    cluster.create(two).await.unwrap();
    for name in ["all", "two"] {
        insert_spread(&cluster, name, &rows(33, 300, 16)).await;
    }
    let fabric = network.fabric(&cluster, "cn-0");
    let mut opened = Vec::new();
    for name in ["all", "two"] {
        let map = cluster.oracle.map();
        let entry = map.collection(name).unwrap();
        let (fabric, catalogue) = (Arc::clone(&fabric), cluster.catalogue());
        opened.push(Collection::open(fabric, catalogue, entry, options(), soon()).await.unwrap());
    }
    let query = near(&[3; 16], 10, 50);
    for collection in &opened {
        assert_eq!(query::search(collection, &query, soon()).await.unwrap().hits.len(), 10);
    }
    network.memory_nodes[1].close().await;
    for _ in 0..3 {
        let deadline = Instant::now() + Duration::from_secs(2);
        let fault = query::search(&opened[0], &query, deadline).await.unwrap_err();
        assert_eq!(fault.code, FaultCode::MemoryNodeLost, "{fault}");
        assert!(fault.message.contains("mn-1"), "{fault}");
        assert_eq!(query::search(&opened[1], &query, soon()).await.unwrap().hits.len(), 10);
    }
    network.close().await;
}
