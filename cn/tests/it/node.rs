//! Requests: who may ask what, how much runs at once, and what is said when it cannot be done.

use std::sync::Arc;

use shine_cn::collection::Options;
use shine_cn::node::{Limits, Node, Parts};
use shine_common::ids::ExternalId;
use shine_common::metric::{DType, Metric};
use shine_common::wire::{CnRequest, CnResponse, CollectionState, FaultCode, Role, Target};

use crate::support::{Shape, TestCluster, node, options, soon, spec};

fn search(collection: &str) -> CnRequest {
    CnRequest::Search {
        collection: collection.into(),
        target: Target::Vector(vec![1; 8]),
        k: 3,
        ef: 10,
        deadline_ms: 30_000,
        with_vectors: true,
    }
}

fn insert(collection: &str, id: u64) -> CnRequest {
    CnRequest::Insert {
        collection: collection.into(),
        id: ExternalId::Num(id),
        vector: vec![id as u8; 8],
        deadline_ms: 30_000,
    }
}

#[tokio::test]
async fn roles_decide_who_may_do_what() {
    let cluster = TestCluster::new(&Shape::default());
    let node = node(&cluster, "cn-0");
    let create = CnRequest::Create(spec("c", DType::I8, Metric::L2, 8));
    for role in [Role::Client, Role::Mn, Role::Oracle, Role::Cn] {
        assert_eq!(node.handle(role, create.clone()).await.unwrap_err().code, FaultCode::Forbidden);
        let drop = CnRequest::Drop { collection: "c".into() };
        assert_eq!(node.handle(role, drop).await.unwrap_err().code, FaultCode::Forbidden);
    }
    match node.handle(Role::Admin, create).await.unwrap() {
        CnResponse::Info(info) => assert_eq!((info.state, info.vectors), (CollectionState::Ready, 0)),
        other => panic!("{other:?}"),
    }
    for role in [Role::Client, Role::Admin] {
        node.handle(role, insert("c", role as u64)).await.unwrap();
        node.handle(role, search("c")).await.unwrap();
    }
    assert_eq!(node.handle(Role::Mn, search("c")).await.unwrap_err().code, FaultCode::Forbidden);
    for role in [Role::Mn, Role::Oracle, Role::Client] {
        let CnResponse::Status(status) = node.handle(role, CnRequest::Status).await.unwrap() else {
            panic!()
        };
        assert_eq!(status.name, "cn-0");
    }
}

#[tokio::test]
async fn the_life_of_a_collection_is_seen_by_every_node() {
    let cluster = TestCluster::new(&Shape::default());
    let (a, b) = (node(&cluster, "cn-0"), node(&cluster, "cn-1"));
    a.handle(Role::Admin, CnRequest::Create(spec("c", DType::I8, Metric::L2, 8))).await.unwrap();
    let again =
        a.handle(Role::Admin, CnRequest::Create(spec("c", DType::I8, Metric::L2, 8))).await.unwrap_err();
    assert_eq!(again.code, FaultCode::CollectionExists);
    for id in 0..20 {
        let node = if id % 2 == 0 { &a } else { &b };
        let CnResponse::Inserted { receipt, .. } = node.handle(Role::Client, insert("c", id)).await.unwrap()
        else {
            panic!()
        };
        assert_eq!(receipt.cn, if id % 2 == 0 { "cn-0" } else { "cn-1" });
    }
    for node in [&a, &b] {
        let CnResponse::Collections(list) = node.handle(Role::Client, CnRequest::List).await.unwrap() else {
            panic!()
        };
        assert_eq!((list.len(), list[0].vectors, list[0].regions.len()), (1, 20, 3));
        let get = CnRequest::Get { collection: "c".into(), id: ExternalId::Num(7), deadline_ms: 0 };
        let CnResponse::Record { vector, .. } = node.handle(Role::Client, get).await.unwrap() else {
            panic!()
        };
        assert_eq!(vector, [7; 8]);
        let CnResponse::Hits { hits, ef, receipt } = node.handle(Role::Client, search("c")).await.unwrap()
        else {
            panic!()
        };
        assert_eq!((hits.len(), hits[0].id, ef), (3, ExternalId::Num(1), 10));
        assert_eq!(hits[0].vector, [1; 8]);
        assert!(receipt.rounds > 0 && receipt.remote_reads > 20);
    }
    let mut check = CnRequest::Check { collection: "c".into(), job: 0 };
    let report = loop {
        let CnResponse::Check { job, done, total, report } = b.handle(Role::Client, check).await.unwrap()
        else {
            panic!()
        };
        assert!(done <= total);
        if let Some(report) = report {
            break report;
        }
        check = CnRequest::Check { collection: "c".into(), job };
        tokio::task::yield_now().await;
    };
    assert!(report.is_sound() && report.live == 20, "{report:?}");
    b.handle(Role::Admin, CnRequest::Drop { collection: "c".into() }).await.unwrap();
    for node in [&a, &b] {
        assert_eq!(node.handle(Role::Client, search("c")).await.unwrap_err().code, FaultCode::NotFound);
        let drop = CnRequest::Drop { collection: "c".into() };
        assert_eq!(node.handle(Role::Admin, drop).await.unwrap_err().code, FaultCode::NotFound);
    }
    // The same name again is another collection, on zeroed memory.
    a.handle(Role::Admin, CnRequest::Create(spec("c", DType::I8, Metric::L2, 8))).await.unwrap();
    let CnResponse::Hits { hits, .. } = b.handle(Role::Client, search("c")).await.unwrap() else { panic!() };
    assert!(hits.is_empty());
}

#[tokio::test]
async fn without_an_oracle_searches_go_on_and_creating_says_why_not() {
    let cluster = TestCluster::new(&Shape::default());
    let node = node(&cluster, "cn-0");
    node.handle(Role::Admin, CnRequest::Create(spec("c", DType::I8, Metric::L2, 8))).await.unwrap();
    node.handle(Role::Client, insert("c", 1)).await.unwrap();
    cluster.oracle.set_reachable(false);
    node.handle(Role::Client, search("c")).await.unwrap();
    node.handle(Role::Client, insert("c", 2)).await.unwrap();
    let create = CnRequest::Create(spec("d", DType::I8, Metric::L2, 8));
    assert_eq!(node.handle(Role::Admin, create).await.unwrap_err().code, FaultCode::NoOracle);
    assert_eq!(node.handle(Role::Client, search("d")).await.unwrap_err().code, FaultCode::NotFound);
}

#[tokio::test]
async fn more_than_may_run_is_overloaded_at_once_and_draining_waits_for_what_runs() {
    let cluster = TestCluster::new(&Shape::default());
    let (fabric, _) = cluster.fabric("cn-0", false);
    let node = Node::new(Parts {
        name: "cn-0".into(),
        fabric,
        catalogue: cluster.catalogue(),
        oracle_reachable: Box::new(|| true),
        options: options(),
        limits: Limits { searches_max: 2, ..Limits::default() },
    });
    node.handle(Role::Admin, CnRequest::Create(spec("c", DType::I8, Metric::L2, 8))).await.unwrap();
    node.handle(Role::Client, insert("c", 1)).await.unwrap();
    // Two searches hang on a memory node that holds its answers back.
    let home = cluster.oracle.map().collection("c").unwrap().regions[0].0;
    let host = cluster.hosts.host(&cluster.oracle.map().region(home).unwrap().mn);
    host.pause();
    let running: Vec<_> = (0..2)
        .map(|_| {
            let node = Arc::clone(&node);
            tokio::spawn(async move { node.handle(Role::Client, search("c")).await })
        })
        .collect();
    while !node.status().counters.contains(&("searches_running".to_owned(), 2)) {
        tokio::task::yield_now().await;
    }
    assert_eq!(node.handle(Role::Client, search("c")).await.unwrap_err().code, FaultCode::Overloaded);
    let draining = tokio::spawn({
        let node = Arc::clone(&node);
        async move { node.drain(soon()).await }
    });
    while node.handle(Role::Client, search("c")).await.unwrap_err().code != FaultCode::Unavailable {
        tokio::task::yield_now().await;
    }
    assert!(!draining.is_finished());
    host.resume();
    for search in running {
        search.await.unwrap().unwrap();
    }
    draining.await.unwrap();
}

/// A vector inserted on one node is found on another no later than the staleness bound, and without a round of its own
/// within it.
#[tokio::test]
async fn the_entry_point_is_read_at_most_once_per_bound() {
    let cluster = TestCluster::new(&Shape::default());
    let writer = node(&cluster, "cn-0");
    let (fabric, control) = cluster.fabric("cn-1", false);
    let reader = Node::new(Parts {
        name: "cn-1".into(),
        fabric,
        catalogue: cluster.catalogue(),
        oracle_reachable: Box::new(|| true),
        options: Options { staleness_bound: std::time::Duration::from_secs(3600), ..Options::default() },
        limits: Limits::default(),
    });
    writer.handle(Role::Admin, CnRequest::Create(spec("c", DType::I8, Metric::L2, 8))).await.unwrap();
    writer.handle(Role::Client, insert("c", 1)).await.unwrap();
    reader.handle(Role::Client, search("c")).await.unwrap();
    let before = control.spent();
    let CnResponse::Hits { receipt, .. } = reader.handle(Role::Client, search("c")).await.unwrap() else {
        panic!()
    };
    // The entry's vector, its lists, which are empty, and its header: nothing else.
    let expected = receipt.hops + 2;
    assert_eq!((receipt.rounds, control.spent() - before), (expected, expected.into()));
}
