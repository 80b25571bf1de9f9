//! Loading a graph file through requests, whole and broken.

use std::sync::Arc;

use shine_cn::node::Node;
use shine_common::ids::{ExternalId, NodeId};
use shine_common::layout::{
    CollectionParams, EntryPoint, NodeMeta, NodeState, UPPER_SLOTS, encode_base_list, encode_upper_list,
};
use shine_common::metric::{DType, Distance, Metric};
use shine_common::wire::{CnRequest, CnResponse, CollectionState, Fault, FaultCode, Role};

use crate::support::{Shape, TestCluster, TestVerbs, exact, near, node, node_on, rows, soon, sound, spec};

/// Fingerprint of the file that is loaded.
const FILE: u64 = 77;

/// A graph in the layout's own form: exact neighbours, and a ring so that all of it is connected.
#[derive(Clone)]
struct Graph {
    metas: Vec<u64>,
    vectors: Vec<u8>,
    lists: Vec<u8>,
    upper: Vec<u8>,
    upper_slots: u32,
    entry: u64,
}

fn graph(params: &CollectionParams, rows: &[Vec<u8>]) -> Graph {
    let distance = Distance::new(params.metric, params.dtype, params.dim as usize);
    // Every eighth node is on level 1, every sixty-fourth on level 2.
    let level = |i: usize| u8::from(i % 8 == 0) + u8::from(i % 64 == 0);
    let mut upper_of = vec![0u32; rows.len()];
    let mut upper_slots = 0u32;
    for (i, upper) in upper_of.iter_mut().enumerate() {
        let level = u32::from(level(i));
        if level > 0 {
            if upper_slots % UPPER_SLOTS + level > UPPER_SLOTS {
                upper_slots = upper_slots.next_multiple_of(UPPER_SLOTS);
            }
            *upper = upper_slots;
            upper_slots += level;
        }
    }
    let neighbours = |i: usize, on: u8, room: usize| -> Vec<usize> {
        let members: Vec<_> = (0..rows.len()).filter(|j| level(*j) >= on).collect();
        let at = members.binary_search(&i).unwrap();
        let next = members[(at + 1) % members.len()];
        let mut near: Vec<_> =
            members.into_iter().filter(|j| *j != i).map(|j| (distance.eval(&rows[i], &rows[j]), j)).collect();
        near.sort_by(|a, b| a.partial_cmp(b).unwrap());
        let mut chosen: Vec<_> = near.into_iter().map(|(_, j)| j).take(room - 1).collect();
        if next != i && !chosen.contains(&next) {
            chosen.push(next);
        }
        chosen
    };
    let mut graph = Graph {
        metas: Vec::new(),
        vectors: Vec::new(),
        lists: Vec::new(),
        upper: vec![0; upper_slots as usize * params.upper_stride() as usize],
        upper_slots,
        entry: EntryPoint { node: NodeId(0), level: 2 }.to_word(),
    };
    for (i, row) in rows.iter().enumerate() {
        let meta = NodeMeta { state: NodeState::Live, level: level(i), is_uuid: false, upper: upper_of[i] };
        graph.metas.push(meta.to_word());
        graph.vectors.extend_from_slice(row);
        graph.vectors.resize((i + 1) * params.vector_stride() as usize, 0);
        let start = graph.lists.len();
        graph.lists.resize(start + params.list_stride() as usize, 0);
        let list: Vec<_> =
            neighbours(i, 0, params.m0 as usize).into_iter().map(|j| NodeId(j as u32)).collect();
        encode_base_list(&mut graph.lists[start..], 0, &list);
        for on in 1..=level(i) {
            let list: Vec<_> = neighbours(i, on, params.m as usize)
                .into_iter()
                .map(|j| (NodeId(j as u32), upper_of[j]))
                .collect();
            let stride = params.upper_stride() as usize;
            let slot = (upper_of[i] + u32::from(on) - 1) as usize;
            encode_upper_list(&mut graph.upper[slot * stride..][..stride], 0, &list);
        }
    }
    graph
}

async fn begin(
    node: &Arc<Node<TestVerbs>>,
    nodes: u32,
    upper_slots: u32,
    replace: bool,
) -> (u64, CollectionParams) {
    let spec = spec("g", DType::I8, Metric::L2, 20);
    let request = CnRequest::LoadBegin { spec, nodes, upper_slots, replace, file: FILE, resume: false };
    match node.handle(Role::Admin, request).await.unwrap() {
        CnResponse::Loading { load, params, nodes_done: 0, upper_done: 0 } => (load, params),
        other => panic!("{other:?}"),
    }
}

fn params() -> CollectionParams {
    CollectionParams::new(DType::I8, Metric::L2, 20, 8, 64, 10_000, 3).unwrap()
}

fn nodes_piece(load: u64, graph: &Graph, range: std::ops::Range<usize>, ids: Vec<ExternalId>) -> CnRequest {
    let params = params();
    let part = |bytes: &[u8], stride: u64| {
        bytes[range.start * stride as usize..range.end * stride as usize].to_vec()
    };
    CnRequest::LoadNodes {
        load,
        first: range.start as u32,
        metas: graph.metas[range.clone()].to_vec(),
        ids,
        vectors: part(&graph.vectors, params.vector_stride()),
        lists: part(&graph.lists, params.list_stride()),
    }
}

fn upper_piece(load: u64, graph: &Graph, range: std::ops::Range<usize>) -> CnRequest {
    let stride = params().upper_stride() as usize;
    CnRequest::LoadUpper {
        load,
        first: range.start as u32,
        lists: graph.upper[range.start * stride..range.end * stride].to_vec(),
    }
}

#[tokio::test]
async fn a_graph_is_loaded_in_pieces_of_any_order_and_found_from_everywhere() {
    let cluster = TestCluster::new(&Shape::default());
    let (loader, other) = (node(&cluster, "cn-0"), node(&cluster, "cn-1"));
    let data = rows(21, 3_000, 20);
    let graph = graph(&params(), &data);
    let (load, _) = begin(&loader, 3_000, graph.upper_slots, false).await;
    // Not to be searched before it is whole.
    let search = |v: &[u8]| CnRequest::Search {
        collection: "g".into(),
        target: near(v, 10, 50).target,
        k: 10,
        ef: 50,
        deadline_ms: 30_000,
        with_vectors: false,
    };
    let early = other.handle(Role::Client, search(&data[0])).await.unwrap_err();
    assert_eq!(early.code, FaultCode::Unavailable);
    for range in [2_000..3_000, 0..7, 1_024..2_000, 7..1_024] {
        loader.handle(Role::Admin, nodes_piece(load, &graph, range, Vec::new())).await.unwrap();
    }
    let slots = graph.upper_slots as usize;
    for range in [slots / 3..slots, 0..slots / 3] {
        loader.handle(Role::Admin, upper_piece(load, &graph, range)).await.unwrap();
    }
    loader.handle(Role::Admin, CnRequest::LoadEnd { load, entry_point: graph.entry }).await.unwrap();
    let opened = cluster.open("cn-2", "g").await.unwrap();
    let mut found = 0;
    let queries = rows(22, 50, 20);
    for query in &queries {
        let mut answers = Vec::new();
        for cn in [&loader, &other] {
            match cn.handle(Role::Client, search(query)).await.unwrap() {
                CnResponse::Hits { hits, .. } => answers.push(hits),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(answers[0], answers[1]);
        assert!(answers[0].iter().all(|hit| hit.id == ExternalId::Num(hit.node.0.into())));
        let truth = exact(&opened, &data, query, 10);
        found += answers[0].iter().filter(|hit| truth.contains(&(hit.node.0 as usize))).count();
    }
    assert!(found > 450, "{found} of 500");
    let report = sound(&opened).await;
    assert_eq!((report.live, report.orphans), (3_000, 0));
    match other.handle(Role::Client, CnRequest::Stats { collection: "g".into() }).await.unwrap() {
        CnResponse::Info(info) => {
            assert_eq!((info.vectors, info.level, info.chunks), (3_000, 2, 3));
            assert!(info.bytes_used > 3_000 * 100 && info.bytes_used <= info.bytes_reserved);
        }
        other => panic!("{other:?}"),
    }
    // The graph is an ordinary collection: it can be extended, and its ids are taken.
    let insert = |id: u64| CnRequest::Insert {
        collection: "g".into(),
        id: ExternalId::Num(id),
        vector: data[5].clone(),
        deadline_ms: 30_000,
    };
    assert_eq!(other.handle(Role::Client, insert(5)).await.unwrap_err().code, FaultCode::IdExists);
    other.handle(Role::Client, insert(3_000)).await.unwrap();
    assert_eq!(sound(&opened).await.live, 3_001);
}

/// Tries to load a graph that `spoil` made wrong; the fault that ends it. The collection must then be gone.
async fn refused(what: &str, spoil: impl FnOnce(&mut Graph), ids: Vec<ExternalId>) -> Fault {
    let cluster = TestCluster::new(&Shape::default());
    let loader = node(&cluster, "cn-0");
    let mut graph = graph(&params(), &rows(23, 200, 20));
    spoil(&mut graph);
    let (load, _) = begin(&loader, 200, graph.upper_slots, false).await;
    let slots = graph.upper_slots as usize;
    let requests = [
        nodes_piece(load, &graph, 0..200, ids),
        upper_piece(load, &graph, 0..slots),
        CnRequest::LoadEnd { load, entry_point: graph.entry },
    ];
    for request in requests {
        if let Err(fault) = loader.handle(Role::Admin, request).await {
            assert_eq!(fault.code, FaultCode::BadRequest, "{what}: {fault}");
            assert!(cluster.oracle.map().collections.is_empty(), "{what}: the collection stays");
            let gone = loader.handle(Role::Admin, CnRequest::LoadAbort { load }).await.unwrap_err();
            assert_eq!(gone.code, FaultCode::NotFound);
            return fault;
        }
    }
    panic!("{what} was loaded");
}

#[tokio::test]
async fn what_is_wrong_in_a_graph_file_is_named() {
    let p = params();
    let (stride, upper) = (p.list_stride() as usize, p.upper_stride() as usize);
    let check = |fault: Fault, names: &[&str]| {
        for name in names {
            assert!(fault.message.contains(name), "'{name}' in: {fault}");
        }
    };
    check(refused("torn list", |g| g.lists[17 * stride + 9] ^= 1, Vec::new()).await, &["node 17", "level-0"]);
    check(
        refused(
            "far link",
            |g| encode_base_list(&mut g.lists[3 * stride..][..stride], 0, &[NodeId(200)]),
            Vec::new(),
        )
        .await,
        &["node 3", "n200"],
    );
    check(refused("dead node", |g| g.metas[9] += 1, Vec::new()).await, &["node 9", "meta"]);
    check(
        refused("upper index", |g| g.metas[8] |= 0xffff << 32, Vec::new()).await,
        &["node 8", "upper lists"],
    );
    check(refused("level 0 with upper", |g| g.metas[9] |= 1 << 32, Vec::new()).await, &["node 9"]);
    check(refused("torn upper list", |g| g.upper[4 * upper + 8] ^= 1, Vec::new()).await, &["level-"]);
    check(
        refused(
            "link off the level",
            |g| {
                encode_upper_list(&mut g.upper[..upper], 0, &[(NodeId(1), 0)]);
            },
            Vec::new(),
        )
        .await,
        &["node 0", "level 1", "n1"],
    );
    check(
        refused("no upper list", |g| g.upper[..upper].fill(0), Vec::new()).await,
        &["node 0", "never written"],
    );
    check(
        refused("low entry", |g| g.entry = EntryPoint { node: NodeId(8), level: 1 }.to_word(), Vec::new())
            .await,
        &["entry point n8"],
    );
    check(
        refused("wrong entry", |g| g.entry = EntryPoint { node: NodeId(1), level: 2 }.to_word(), Vec::new())
            .await,
        &["entry point n1"],
    );
    let mut ids: Vec<_> = (0..200).map(ExternalId::Num).collect();
    ids[150] = ExternalId::Num(42);
    check(refused("twice an id", |_| {}, ids).await, &["id 42", "rows 42 and 150"]);
    let uuids = (0..200).map(ExternalId::Uuid).collect();
    check(refused("kinds of ids", |_| {}, uuids).await, &["node 0", "UUID"]);
}

#[tokio::test]
async fn pieces_that_do_not_fit_are_refused() {
    let cluster = TestCluster::new(&Shape::default());
    let loader = node(&cluster, "cn-0");
    let graph = graph(&params(), &rows(24, 100, 20));
    let slots = graph.upper_slots as usize;
    let send = |request| loader.handle(Role::Admin, request);
    // Upper lists come after all nodes, pieces once, the end when all is there.
    let (load, _) = begin(&loader, 100, graph.upper_slots, false).await;
    send(nodes_piece(load, &graph, 0..50, Vec::new())).await.unwrap();
    assert_eq!(send(upper_piece(load, &graph, 0..slots)).await.unwrap_err().code, FaultCode::BadRequest);
    let (load, _) = begin(&loader, 100, graph.upper_slots, true).await;
    send(nodes_piece(load, &graph, 0..50, Vec::new())).await.unwrap();
    let twice = send(nodes_piece(load, &graph, 49..60, Vec::new())).await.unwrap_err();
    assert!(twice.message.contains("came twice"), "{twice}");
    let (load, _) = begin(&loader, 100, graph.upper_slots, true).await;
    send(nodes_piece(load, &graph, 0..99, Vec::new())).await.unwrap();
    let early = send(CnRequest::LoadEnd { load, entry_point: graph.entry }).await.unwrap_err();
    assert!(early.message.contains("node 99"), "{early}");
    assert!(cluster.oracle.map().collections.is_empty());
    // Aborted: gone, and its memory with it.
    let (load, _) = begin(&loader, 100, graph.upper_slots, false).await;
    send(CnRequest::LoadAbort { load }).await.unwrap();
    assert!(cluster.oracle.map().collections.is_empty());
    assert_eq!(
        send(nodes_piece(load, &graph, 0..1, Vec::new())).await.unwrap_err().code,
        FaultCode::NotFound
    );
    // A file that does not fit is refused before anything is sent.
    let spec = spec("g", DType::F32, Metric::L2, 2048);
    let (nodes, upper_slots, file) = (100_000, 0, FILE);
    let begin = CnRequest::LoadBegin { spec, nodes, upper_slots, replace: false, file, resume: false };
    let large = send(begin).await.unwrap_err();
    assert_eq!(large.code, FaultCode::RegionFull, "{large}");
    assert!(cluster.oracle.map().collections.is_empty());
}

/// Goes on with the load of the file `file`: the load's number, and how many nodes and upper lists are there.
async fn resume(
    node: &Arc<Node<TestVerbs>>,
    nodes: u32,
    upper_slots: u32,
    file: u64,
) -> Result<(u64, u32, u32), Fault> {
    let spec = spec("g", DType::I8, Metric::L2, 20);
    let request = CnRequest::LoadBegin { spec, nodes, upper_slots, replace: false, file, resume: true };
    match node.handle(Role::Admin, request).await? {
        CnResponse::Loading { load, nodes_done, upper_done, .. } => Ok((load, nodes_done, upper_done)),
        CnResponse::Done => Ok((0, nodes, upper_slots)),
        other => panic!("{other:?}"),
    }
}

/// Sends what is missing and ends the load; then everything is there and found by its id.
async fn complete(cluster: &TestCluster, node: &Arc<Node<TestVerbs>>, graph: &Graph, at: (u64, u32, u32)) {
    let (load, nodes_done, upper_done) = at;
    let (nodes, slots) = (graph.metas.len(), graph.upper_slots as usize);
    let send = |request| node.handle(Role::Admin, request);
    if (nodes_done as usize) < nodes {
        send(nodes_piece(load, graph, nodes_done as usize..nodes, Vec::new())).await.unwrap();
    }
    if (upper_done as usize) < slots {
        send(upper_piece(load, graph, upper_done as usize..slots)).await.unwrap();
    }
    send(CnRequest::LoadEnd { load, entry_point: graph.entry }).await.unwrap();
    let opened = cluster.open("reader", "g").await.unwrap();
    let report = sound(&opened).await;
    assert_eq!((report.live, report.orphans, report.dead), (nodes as u64, 0, 0), "{report:?}");
    for id in (0..nodes as u64).step_by(7) {
        let record = shine_cn::query::get(&opened, ExternalId::Num(id), soon()).await.unwrap();
        assert_eq!(u64::from(record.node.0), id);
    }
}

#[tokio::test]
async fn a_load_goes_on_where_it_stopped() {
    let cluster = TestCluster::new(&Shape::default());
    let loader = node(&cluster, "cn-0");
    let graph = graph(&params(), &rows(26, 500, 20));
    let slots = graph.upper_slots;
    let send = |request| loader.handle(Role::Admin, request);
    // Where there is nothing to go on with, it begins.
    let (first, ..) = resume(&loader, 500, slots, FILE).await.unwrap();
    send(nodes_piece(first, &graph, 0..100, Vec::new())).await.unwrap();
    send(nodes_piece(first, &graph, 150..300, Vec::new())).await.unwrap();
    // What came behind a gap is sent again; the old load takes no more.
    let (second, nodes_done, upper_done) = resume(&loader, 500, slots, FILE).await.unwrap();
    assert_eq!((nodes_done, upper_done), (100, 0));
    let late = send(nodes_piece(first, &graph, 100..150, Vec::new())).await.unwrap_err();
    assert_eq!(late.code, FaultCode::NotFound);
    // Another file's load it is not, and nothing of it is lost for that.
    let other = resume(&loader, 500, slots, FILE + 1).await.unwrap_err();
    assert_eq!(other.code, FaultCode::CollectionExists, "{other}");
    let fault = send(nodes_piece(second, &graph, 100..110, Vec::new())).await.unwrap_err();
    assert_eq!(fault.code, FaultCode::NotFound, "whoever asked last has it");
    let (third, nodes_done, _) = resume(&loader, 500, slots, FILE).await.unwrap();
    assert_eq!(nodes_done, 100);
    send(nodes_piece(third, &graph, 100..500, Vec::new())).await.unwrap();
    send(upper_piece(third, &graph, 0..10)).await.unwrap();
    // Let go when nothing comes for long, and still there.
    loader.reap_loads(std::time::Instant::now() + 2 * shine_cn::load::IDLE_MAX);
    let idle = send(upper_piece(third, &graph, 10..20)).await.unwrap_err();
    assert_eq!(idle.code, FaultCode::NotFound);
    let at = resume(&loader, 500, slots, FILE).await.unwrap();
    assert_eq!((at.1, at.2), (500, 10));
    complete(&cluster, &loader, &graph, at).await;
    // All is there: nothing is left to do, for another node either.
    let other = node(&cluster, "cn-1");
    assert_eq!(resume(&other, 500, slots, FILE).await.unwrap(), (0, 500, slots));
    assert_eq!(resume(&other, 500, slots, FILE + 1).await.unwrap_err().code, FaultCode::CollectionExists);
}

/// A node that dies before it has taken memory leaves a collection that nothing can be sent to: it is made anew.
#[tokio::test]
async fn a_load_that_never_came_to_its_file_begins_anew() {
    let cluster = TestCluster::new(&Shape::default());
    let loader = node(&cluster, "cn-0");
    let graph = graph(&params(), &rows(28, 90, 20));
    let mut begun = spec("g", DType::I8, Metric::L2, 20);
    begun.loading = true;
    let begun = cluster.create(begun).await.unwrap();
    let at = resume(&loader, 90, graph.upper_slots, FILE).await.unwrap();
    assert_eq!((at.1, at.2), (0, 0));
    assert_ne!(cluster.oracle.map().collection("g").unwrap().id, begun.id());
    complete(&cluster, &loader, &graph, at).await;
    // Nor is one taken for a load that was made empty, for inserts.
    let mut other = spec("h", DType::I8, Metric::L2, 20);
    cluster.create(other.clone()).await.unwrap();
    other.loading = true;
    let request = CnRequest::LoadBegin {
        spec: other,
        nodes: 90,
        upper_slots: 0,
        replace: false,
        file: FILE,
        resume: true,
    };
    assert_eq!(loader.handle(Role::Admin, request).await.unwrap_err().code, FaultCode::CollectionExists);
}

/// The loading node dies after each of the verbs of a load in turn: another goes on, once the dead one's leases are over.
#[tokio::test]
async fn a_load_whose_node_was_killed_anywhere_goes_on_through_another() {
    let data = rows(27, 120, 20);
    let graph = graph(&params(), &data);
    let slots = graph.upper_slots;
    let mut resumed_at = std::collections::BTreeSet::new();
    for verbs in 0.. {
        let cluster = TestCluster::new(&Shape::default());
        let survivor = node(&cluster, "cn-0");
        let (fabric, control) = cluster.fabric("victim", true);
        let victim = node_on(&cluster, "victim", fabric);
        control.allow(verbs);
        let spec = spec("g", DType::I8, Metric::L2, 20);
        let (file, resume_it) = (FILE, false);
        let request = CnRequest::LoadBegin {
            spec,
            nodes: 120,
            upper_slots: slots,
            replace: false,
            file,
            resume: resume_it,
        };
        if let Ok(CnResponse::Loading { load, .. }) = victim.handle(Role::Admin, request).await {
            let requests = [
                nodes_piece(load, &graph, 0..40, Vec::new()),
                nodes_piece(load, &graph, 40..120, Vec::new()),
                upper_piece(load, &graph, 0..9),
                upper_piece(load, &graph, 9..slots as usize),
                CnRequest::LoadEnd { load, entry_point: graph.entry },
            ];
            for request in requests {
                if victim.handle(Role::Admin, request).await.is_err() {
                    break;
                }
            }
            // While it may still be alive nobody else takes over what it has begun.
            if cluster.oracle.map().collections.iter().any(|c| c.state == CollectionState::Loading) {
                match resume(&survivor, 120, slots, FILE).await {
                    Err(fault) => assert_eq!(fault.code, FaultCode::Unavailable, "{fault}"),
                    Ok(at) => panic!("taken over from a node that may be alive, after {verbs} verbs: {at:?}"),
                }
            }
        }
        cluster.clock.advance(std::time::Duration::from_secs(60));
        let at = resume(&survivor, 120, slots, FILE).await.unwrap();
        resumed_at.insert((at.1, at.2));
        if at.0 != 0 {
            complete(&cluster, &survivor, &graph, at).await;
        }
        if !control.is_dead() {
            break;
        }
    }
    let expected = [(0, 0), (40, 0), (120, 0), (120, 9), (120, slots)];
    assert_eq!(resumed_at.into_iter().collect::<Vec<_>>(), expected);
}

/// Ids that are no numbers of rows, in far more buckets' worth than the table was made for.
#[tokio::test]
async fn ids_overflow_into_chains() {
    let cluster = TestCluster::new(&Shape::default());
    let mut spec = spec("g", DType::I8, Metric::L2, 20);
    spec.capacity = 1;
    let tiny = cluster.create(spec).await.unwrap();
    assert_eq!(tiny.params().id_buckets, 3);
    let data = rows(25, 300, 20);
    let levels = shine_cn::hnsw::insert::Levels::seeded(1);
    crate::support::insert_all(&tiny, &levels, &data).await;
    for (i, row) in data.iter().enumerate() {
        let record = shine_cn::query::get(&tiny, ExternalId::Num(i as u64), soon()).await.unwrap();
        assert_eq!(&record.vector, row);
        let twice = crate::support::insert(&tiny, &levels, i as u64, row).await.unwrap_err();
        assert_eq!(twice.code, FaultCode::IdExists);
    }
    sound(&tiny).await;
}
