//! Killed inserters, torn lists, full regions, lost memory nodes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use shine_cn::hnsw::insert::{self, Levels};
use shine_cn::query;
use shine_common::ids::{ExternalId, RemotePtr};
use shine_common::layout::region as in_region;
use shine_common::metric::{DType, Metric};
use shine_common::verbs::local::LocalVerbs;
use shine_common::verbs::{ReadBatch, Verbs as _};
use shine_common::wire::{CollectionSpec, FaultCode, MemberState};

use crate::support::{
    MIB, Shape, TestCluster, insert, insert_all, insert_spread, levels_from, near, rows, soon, sound, spec,
};

fn small(name: &str) -> CollectionSpec {
    // Base and upper lists have one length: what is torn is a list.
    CollectionSpec { m: 4, ef_construction: 16, ..spec(name, DType::I8, Metric::L2, 8) }
}

/// An insert is cut off after its first verb, its second, and so on until it comes through; each time on a fresh
/// compute node whose sessions then run out. Whatever it left, the graph is sound, and its id can be had.
async fn killed_after_every_verb(level: u8) {
    let cluster = TestCluster::new(&Shape::default());
    let survivor = cluster.create(small("c")).await.unwrap();
    insert_all(&survivor, &Levels::seeded(1), &rows(11, 60, 8)).await;
    let data = rows(12, 2_000, 8);
    let mut acknowledged = Vec::new();
    let mut taken_over = 0;
    for verbs in 0.. {
        let id = 1_000 + verbs;
        let vector = &data[verbs as usize];
        let (fabric, control) = cluster.fabric("victim", true);
        let victim = cluster.open_on(Arc::clone(&fabric), "c").await.unwrap();
        control.allow(verbs);
        let outcome = insert(&victim, &levels_from(level, 4), id, vector).await;
        cluster.clock.advance(Duration::from_secs(10));
        // The same id from another compute node: it is free, or the insert had come through to *live*.
        let again = insert(&survivor, &Levels::seeded(verbs), id, vector).await;
        match (&outcome, &again) {
            (Ok(_), Err(fault)) => assert_eq!(fault.code, FaultCode::IdExists),
            (Ok(_), Ok(_)) => panic!("id {id} was acknowledged twice"),
            // It was live, and only its acknowledgement was lost.
            (Err(_), Err(fault)) => assert_eq!(fault.code, FaultCode::IdExists, "{fault}"),
            (Err(_), Ok(_)) => taken_over += 1,
        }
        acknowledged.push(id);
        let record = query::get(&survivor, ExternalId::Num(id), soon()).await.unwrap();
        assert_eq!(&record.vector, vector);
        if verbs % 8 == 0 || outcome.is_ok() {
            let report = sound(&survivor).await;
            assert_eq!(report.live, 60 + acknowledged.len() as u64, "after {verbs} verbs: {report:?}");
            assert_eq!((report.linking, report.orphans), (0, 0), "after {verbs} verbs: {report:?}");
        }
        if outcome.is_ok() {
            break;
        }
    }
    assert!(taken_over > 10, "an insert has more steps than that");
    for id in acknowledged {
        query::get(&survivor, ExternalId::Num(id), soon()).await.unwrap();
    }
}

#[tokio::test]
async fn an_insert_killed_anywhere_leaves_a_sound_graph() {
    killed_after_every_verb(0).await;
}

#[tokio::test]
async fn a_tall_insert_killed_anywhere_leaves_a_sound_graph() {
    killed_after_every_verb(2).await;
}

/// The node would be the new entry point, so it holds that lock when it dies.
#[tokio::test]
async fn a_new_entry_point_killed_anywhere_leaves_a_sound_graph() {
    killed_after_every_verb(9).await;
}

#[tokio::test]
async fn the_first_insert_killed_anywhere_leaves_a_usable_collection() {
    for verbs in 0.. {
        let cluster = TestCluster::new(&Shape::default());
        let survivor = cluster.create(small("c")).await.unwrap();
        let (fabric, control) = cluster.fabric("victim", true);
        let victim = cluster.open_on(fabric, "c").await.unwrap();
        control.allow(verbs);
        let outcome = insert(&victim, &levels_from(1, 4), 1, &[5; 8]).await;
        cluster.clock.advance(Duration::from_secs(10));
        insert_all(&survivor, &Levels::seeded(2), &rows(13, 1, 8)).await;
        let again = insert(&survivor, &Levels::seeded(3), 1, &[5; 8]).await;
        assert!(again.is_ok() || again.unwrap_err().code == FaultCode::IdExists);
        let answer = query::search(&survivor, &near(&[5; 8], 10, 10), soon()).await.unwrap();
        assert_eq!(answer.hits.len(), 2, "after {verbs} verbs");
        assert_eq!(sound(&survivor).await.live, 2);
        if outcome.is_ok() {
            assert!(verbs > 5);
            break;
        }
    }
}

/// While the inserter's session lives, its id is waited for and not taken.
#[tokio::test]
async fn an_id_under_way_is_waited_for() {
    let cluster = TestCluster::new(&Shape::default());
    let survivor = cluster.create(small("c")).await.unwrap();
    insert_all(&survivor, &Levels::seeded(1), &rows(14, 20, 8)).await;
    // How many verbs a whole insert takes; half of them end between the claim and the last step.
    let (fabric, control) = cluster.fabric("measure", true);
    let measured = cluster.open_on(fabric, "c").await.unwrap();
    let before = control.spent();
    insert(&measured, &levels_from(0, 4), 500, &[9; 8]).await.unwrap();
    let whole = control.spent() - before;
    let (fabric, control) = cluster.fabric("victim", true);
    let victim = cluster.open_on(fabric, "c").await.unwrap();
    control.allow(whole - 4);
    insert(&victim, &levels_from(0, 4), 501, &[9; 8]).await.unwrap_err();
    let brief = Instant::now() + Duration::from_millis(50);
    let waited = insert::insert(&survivor, &Levels::seeded(1), ExternalId::Num(501), vec![9; 8], brief).await;
    assert_eq!(waited.unwrap_err().code, FaultCode::DeadlineExceeded);
    assert_eq!(
        query::get(&survivor, ExternalId::Num(501), soon()).await.unwrap_err().code,
        FaultCode::NotFound
    );
    cluster.clock.advance(Duration::from_secs(10));
    insert(&survivor, &Levels::seeded(1), 501, &[9; 8]).await.unwrap();
    assert_eq!(survivor.fabric().counters.id_takeovers.get(), 1);
    sound(&survivor).await;
}

#[tokio::test]
async fn torn_lists_are_read_again_and_then_reported() {
    let cluster = TestCluster::new(&Shape::default());
    cluster.create(small("c")).await.unwrap();
    insert_spread(&cluster, "c", &rows(15, 100, 8)).await;
    let (fabric, control) = cluster.fabric("cn-1", false);
    let reader = cluster.open_on(fabric, "c").await.unwrap();
    let query = near(&[1; 8], 10, 20);
    let calm = query::search(&reader, &query, soon()).await.unwrap();
    control.tear(reader.params().list_stride(), 7);
    let torn = query::search(&reader, &query, soon()).await.unwrap();
    assert_eq!(torn.hits, calm.hits);
    assert_eq!((calm.receipt.torn_lists, torn.receipt.torn_lists), (0, 7));
    control.tear(reader.params().list_stride(), u64::MAX);
    let broken = query::search(&reader, &query, soon()).await.unwrap_err();
    assert_eq!(broken.code, FaultCode::Corrupt);
    assert!(broken.message.contains(" list of n"), "{broken}");
}

#[tokio::test]
async fn full_regions_are_an_error_and_what_is_stored_stays() {
    // Rows of 8 KiB fill a region after a few hundred.
    let shape = Shape { memory_nodes: 2, regions: 2, region_bytes: 6 * MIB };
    let cluster = TestCluster::new(&shape);
    let wide = CollectionSpec { capacity: 100, ..spec("c", DType::F32, Metric::L2, 2048) };
    let collection = cluster.create(wide).await.unwrap();
    let other = cluster.open("cn-1", "c").await.unwrap();
    let vector =
        |i: u64| (0..2048u64).flat_map(|j| (((i * 31 + j) % 97) as f32).to_le_bytes()).collect::<Vec<u8>>();
    let levels = Levels::seeded(1);
    let mut stored = 0u64;
    let fault = loop {
        match insert(if stored % 2 == 0 { &collection } else { &other }, &levels, stored, &vector(stored))
            .await
        {
            Ok(_) => stored += 1,
            Err(fault) => break fault,
        }
    };
    assert_eq!(fault.code, FaultCode::RegionFull, "{fault}");
    // Both regions of each memory node were used: the collection has grown on its way.
    assert_eq!(cluster.oracle.map().collection("c").unwrap().regions.len(), 4);
    assert!(stored > 400, "{stored}");
    // What was refused has not pushed the bump pointers past the end.
    let map = cluster.oracle.map();
    for region in &map.regions {
        let verbs = LocalVerbs::connect(&cluster.hosts.host(&region.mn), "test").unwrap();
        let mut batch = ReadBatch::new();
        batch.push(RemotePtr::new(region.id, in_region::NEXT_FREE), region.epoch, 8);
        let reply = verbs.read(batch, soon()).await.unwrap();
        let next_free = u64::from_le_bytes(reply.data[..].try_into().unwrap());
        assert!(next_free <= region.bytes, "{}: {next_free}", region.id);
    }
    for id in [0, stored / 2, stored - 1] {
        assert_eq!(query::get(&other, ExternalId::Num(id), soon()).await.unwrap().vector, vector(id));
        let answer = query::search(&collection, &near(&vector(id), 1, 50), soon()).await.unwrap();
        assert_eq!(answer.hits[0].distance, 0.0);
    }
    assert_eq!(sound(&collection).await.live, stored);
}

#[tokio::test]
async fn without_an_oracle_inserts_go_on_until_memory_is_needed() {
    let shape = Shape { memory_nodes: 1, regions: 2, region_bytes: 6 * MIB };
    let cluster = TestCluster::new(&shape);
    let wide = CollectionSpec { capacity: 100, ..spec("c", DType::F32, Metric::L2, 2048) };
    let collection = cluster.create(wide).await.unwrap();
    cluster.oracle.set_reachable(false);
    let levels = Levels::seeded(1);
    let vector =
        |i: u64| (0..2048u64).flat_map(|j| (((i * 31 + j) % 97) as f32).to_le_bytes()).collect::<Vec<u8>>();
    let mut stored = 0;
    let fault = loop {
        match insert(&collection, &levels, stored, &vector(stored)).await {
            Ok(_) => stored += 1,
            Err(fault) => break fault,
        }
    };
    assert!(stored > 100, "{stored}");
    assert_eq!(fault.code, FaultCode::RegionFull);
    assert!(fault.message.contains("no oracle answers"), "{fault}");
    cluster.oracle.set_reachable(true);
    insert(&collection, &levels, stored, &vector(stored)).await.unwrap();
}

#[tokio::test]
async fn a_cut_connection_is_opened_again() {
    let cluster = TestCluster::new(&Shape::default());
    cluster.create(small("c")).await.unwrap();
    insert_spread(&cluster, "c", &rows(16, 50, 8)).await;
    let (fabric, control) = cluster.fabric("cn-1", false);
    let reader = cluster.open_on(fabric, "c").await.unwrap();
    let query = near(&[1; 8], 10, 20);
    let before = query::search(&reader, &query, soon()).await.unwrap();
    for _ in 0..3 {
        control.cut();
        let after = query::search(&reader, &query, soon()).await.unwrap();
        assert_eq!(after.hits, before.hits);
    }
    assert_eq!(reader.fabric().counters.connects.get(), 3 * 4);
}

/// A session whose lease ran out is replaced; the insert that comes next works.
#[tokio::test]
async fn an_expired_session_is_replaced() {
    let cluster = TestCluster::new(&Shape::default());
    let collection = cluster.create(small("c")).await.unwrap();
    let (fabric, _) = cluster.fabric("cn-1", true);
    let paused = cluster.open_on(fabric, "c").await.unwrap();
    insert_all(&paused, &Levels::seeded(1), &rows(17, 20, 8)).await;
    cluster.clock.advance(Duration::from_secs(10));
    insert(&paused, &Levels::seeded(2), 100, &[3; 8]).await.unwrap();
    assert_eq!(sound(&collection).await.live, 21);
}

#[tokio::test]
async fn a_lost_memory_node_is_named_and_others_go_on() {
    let cluster = TestCluster::new(&Shape::default());
    let all = cluster.create(small("all")).await.unwrap();
    let two = CollectionSpec { memory_nodes: vec!["mn-0".into(), "mn-2".into()], ..small("two") };
    let two = cluster.create(two).await.unwrap();
    for collection in [&all, &two] {
        insert_spread(&cluster, collection.name(), &rows(18, 100, 8)).await;
    }
    let (fabric, control) = cluster.fabric("cn-1", false);
    let all = cluster.open_on(Arc::clone(&fabric), "all").await.unwrap();
    let two = cluster.open_on(fabric, "two").await.unwrap();
    let query = near(&[1; 8], 10, 20);
    query::search(&all, &query, soon()).await.unwrap();
    cluster.hosts.set_down("mn-1", true);
    cluster.oracle.change(|map| {
        map.members.iter_mut().find(|member| member.name == "mn-1").unwrap().state = MemberState::Down;
    });
    control.cut();
    for _ in 0..3 {
        let fault = query::search(&all, &query, soon()).await.unwrap_err();
        assert_eq!(fault.code, FaultCode::MemoryNodeLost, "{fault}");
        assert!(fault.message.contains("mn-1"), "{fault}");
        assert_eq!(query::search(&two, &query, soon()).await.unwrap().hits.len(), 10);
    }
    // It comes back empty: that is said, not mistaken for data.
    cluster.hosts.set_down("mn-1", false);
    cluster.restart("mn-1");
    for _ in 0..2 {
        let fault = query::search(&all, &query, soon()).await.unwrap_err();
        assert_eq!(fault.code, FaultCode::RegionLost, "{fault}");
        assert!(fault.message.contains("graph file"), "{fault}");
        let fault = insert(&all, &Levels::seeded(1), 1_000, &[1; 8]).await.unwrap_err();
        assert_eq!(fault.code, FaultCode::RegionLost, "{fault}");
    }
    assert_eq!(query::search(&two, &query, soon()).await.unwrap().hits.len(), 10);
    assert_eq!(cluster.open("cn-2", "all").await.unwrap_err().code, FaultCode::RegionLost);
}

#[tokio::test]
async fn a_silent_memory_node_is_an_error_by_the_deadline() {
    let cluster = TestCluster::new(&Shape::default());
    let collection = cluster.create(small("c")).await.unwrap();
    insert_spread(&cluster, "c", &rows(19, 50, 8)).await;
    cluster.hosts.host("mn-2").pause();
    let deadline = Instant::now() + Duration::from_millis(300);
    let fault = query::search(&collection, &near(&[1; 8], 10, 20), deadline).await.unwrap_err();
    assert_eq!(fault.code, FaultCode::MemoryNodeLost, "{fault}");
    assert!(fault.message.contains("mn-2"), "{fault}");
    cluster.hosts.host("mn-2").resume();
    query::search(&collection, &near(&[1; 8], 10, 20), soon()).await.unwrap();
}

/// A map that the memory nodes have not heard of yet, and one that the compute node has not.
#[tokio::test]
async fn epochs_that_differ_for_a_while_are_waited_out() {
    let cluster = TestCluster::new(&Shape::default());
    let collection = cluster.create(small("c")).await.unwrap();
    insert_spread(&cluster, "c", &rows(20, 50, 8)).await;
    let moved = cluster.oracle.map().collection("c").unwrap().regions[1].0;
    let query = near(&[1; 8], 10, 20);
    let before = query::search(&collection, &query, soon()).await.unwrap();
    // The memory node is first to know.
    let map = cluster.oracle.map();
    let entry = map.region(moved).unwrap();
    let (ahead, born) = (map.epoch.next(), entry.born);
    cluster.hosts.host(&entry.mn).set_epoch(moved, ahead, born).unwrap();
    let searching = tokio::spawn({
        let (collection, query) = (Arc::clone(&collection), query.clone());
        async move { query::search(&collection, &query, soon()).await }
    });
    while collection.fabric().counters.stale_epochs.get() == 0 {
        tokio::task::yield_now().await;
    }
    cluster.oracle.change(|map| {
        map.regions.iter_mut().find(|region| region.id == moved).unwrap().epoch = ahead;
    });
    assert_eq!(searching.await.unwrap().unwrap().hits, before.hits);
    // The compute node is first to know.
    let later = cluster.oracle.change(|map| {
        let epoch = map.epoch;
        map.regions.iter_mut().find(|region| region.id == moved).unwrap().epoch = epoch;
        epoch
    });
    let host = cluster.hosts.host(&cluster.oracle.map().region(moved).unwrap().mn);
    let searching = tokio::spawn({
        let (collection, query) = (Arc::clone(&collection), query.clone());
        async move { query::search(&collection, &query, soon()).await }
    });
    let refusals =
        || host.counters().snapshot().into_iter().find(|(name, _)| name == "refusals").map_or(0, |c| c.1);
    let seen = refusals();
    while refusals() == seen {
        tokio::task::yield_now().await;
    }
    host.set_epoch(moved, later, born).unwrap();
    assert_eq!(searching.await.unwrap().unwrap().hits, before.hits);
}

#[tokio::test]
async fn a_dropped_collection_is_gone_for_all() {
    let cluster = TestCluster::new(&Shape::default());
    let collection = cluster.create(small("c")).await.unwrap();
    insert(&collection, &Levels::seeded(1), 1, &[1; 8]).await.unwrap();
    cluster.oracle.change(|map| map.collections.clear());
    let fault = query::search(&collection, &near(&[1; 8], 1, 1), soon()).await.unwrap_err();
    assert_eq!(fault.code, FaultCode::NotFound);
}
