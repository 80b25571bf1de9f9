//! One record takes the place of another: whoever looks sees the old one or the new one, whatever happens meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use shine_cn::collection::Collection;
use shine_cn::hnsw::insert::{self, Inserted, Levels};
use shine_cn::{query, scan};
use shine_common::ids::ExternalId;
use shine_common::metric::{DType, Metric};
use shine_common::wire::{CollectionSpec, Fault};
use tokio::task::JoinSet;

use crate::support::{Shape, TestCluster, TestVerbs, exact, insert_all, near, rows, soon, sound, spec};

const ROWS: u64 = 12;

fn small(name: &str) -> CollectionSpec {
    CollectionSpec { m: 4, ef_construction: 16, ..spec(name, DType::I8, Metric::L2, 8) }
}

async fn upsert(
    collection: &Arc<Collection<TestVerbs>>,
    seed: u64,
    id: u64,
    vector: &[u8],
) -> Result<Inserted, Fault> {
    let levels = Levels::seeded(seed);
    insert::upsert(collection, &levels, ExternalId::Num(id), vector.to_vec(), soon()).await
}

/// The vector that a look-up gives, after every other way to it was held against it.
async fn one_of(collection: &Arc<Collection<TestVerbs>>, id: u64, expected: &[[u8; 8]]) -> [u8; 8] {
    let record = query::get(collection, ExternalId::Num(id), soon()).await.expect("never none");
    let vector: [u8; 8] = record.vector.try_into().unwrap();
    assert!(expected.contains(&vector), "{vector:?}");
    let answer = query::search(collection, &near(&vector, 64, 64), soon()).await.unwrap();
    let found: Vec<_> = answer.hits.iter().filter(|hit| hit.id == ExternalId::Num(id)).collect();
    assert_eq!(found.len(), 1, "never both, never none: {:?}", answer.hits);
    assert_eq!(found[0].node, record.node);
    assert_eq!(scan::count(collection, soon()).await.unwrap(), ROWS);
    let page = scan::page(collection, None, 100, true, soon()).await.unwrap();
    assert_eq!((page.records.len(), page.next), (ROWS as usize, None));
    let scanned = page.records.iter().find(|record| record.id == ExternalId::Num(id)).unwrap();
    assert_eq!((scanned.node, &scanned.vector[..]), (record.node, &vector[..]));
    let report = sound(collection).await;
    assert_eq!(report.live, ROWS, "{report:?}");
    vector
}

#[tokio::test]
async fn an_upsert_adds_and_replaces() {
    let cluster = TestCluster::new(&Shape::default());
    let collection = cluster.create(small("c")).await.unwrap();
    let other = cluster.open("cn-1", "c").await.unwrap();
    insert_all(&collection, &Levels::seeded(1), &rows(20, ROWS as usize - 1, 8)).await;
    let added = upsert(&collection, 1, ROWS - 1, &[1; 8]).await.unwrap();
    assert_eq!(added.replaced, None);
    let mut last = added.node;
    for round in 2..40u8 {
        let by = if round % 2 == 0 { &other } else { &collection };
        let put = upsert(by, round.into(), ROWS - 1, &[round; 8]).await.unwrap();
        assert_eq!(put.replaced, Some(last));
        last = put.node;
        for reader in [&collection, &other] {
            one_of(reader, ROWS - 1, &[[round; 8]]).await;
        }
    }
    assert_eq!(sound(&collection).await.dead, 38);
    // A plain insert is still refused.
    let refused =
        insert::insert(&collection, &Levels::seeded(1), ExternalId::Num(0), vec![0; 8], soon()).await;
    assert_eq!(refused.unwrap_err().code, shine_common::wire::FaultCode::IdExists);
}

/// A beam full of records that were replaced does not hide the live ones behind them.
#[tokio::test]
async fn replaced_records_do_not_crowd_out_the_live_ones() {
    let cluster = TestCluster::new(&Shape::default());
    let collection = cluster.create(small("c")).await.unwrap();
    insert_all(&collection, &Levels::seeded(1), &rows(21, ROWS as usize, 8)).await;
    for round in 0..100 {
        upsert(&collection, round, 0, &[5; 8]).await.unwrap();
    }
    let answer = query::search(&collection, &near(&[5; 8], 5, 5), soon()).await.unwrap();
    assert_eq!(answer.hits.len(), 5, "{:?}", answer.hits);
    assert_eq!(answer.hits[0].id, ExternalId::Num(0));
}

/// Records that were all replaced many times over are found as well as those of a collection that never saw another.
#[tokio::test]
async fn a_collection_whose_records_were_all_replaced_is_as_good_as_new() {
    const COUNT: usize = 300;
    let cluster = TestCluster::new(&Shape::default());
    let shape =
        |name: &str| CollectionSpec { m: 6, ef_construction: 32, ..spec(name, DType::I8, Metric::L2, 8) };
    let (fresh, worn) =
        (cluster.create(shape("fresh")).await.unwrap(), cluster.create(shape("worn")).await.unwrap());
    for round in 0..10 {
        for (id, row) in rows(40 + round, COUNT, 8).iter().enumerate() {
            upsert(&worn, round, id as u64, row).await.unwrap();
        }
    }
    let last = rows(49, COUNT, 8);
    insert_all(&fresh, &Levels::seeded(9), &last).await;
    assert_eq!(sound(&worn).await.live, COUNT as u64);
    let queries = rows(60, 200, 8);
    let mut found = [0, 0];
    for query in &queries {
        let near_ids = exact(&fresh, &last, query, 10);
        for (collection, found) in [&fresh, &worn].into_iter().zip(&mut found) {
            let hits = query::search(collection, &near(query, 10, 32), soon()).await.unwrap().hits;
            assert_eq!(hits.len(), 10);
            let ids = hits.iter().map(|hit| hit.id);
            *found +=
                ids.filter(|id| near_ids.iter().any(|near| ExternalId::Num(*near as u64) == *id)).count();
        }
    }
    println!("of {} nearest: {found:?} in the fresh and the worn one", 10 * queries.len());
    assert!(found[0] > 1900 && found[1] + 40 > found[0], "{found:?}");
    for (id, row) in last.iter().enumerate() {
        let hits = query::search(&worn, &near(row, 1, 32), soon()).await.unwrap().hits;
        assert_eq!(hits[0].distance, 0.0, "id {id} is not found by its vector");
    }
}

/// A compute node dies after each of the verbs of a replacement in turn. Before its lease ends everybody sees the old
/// record or the new one; after that the id can be replaced again.
#[tokio::test]
async fn a_replacement_killed_anywhere_leaves_one_live_record() {
    let (old, new, newer) = ([1; 8], [2; 8], [3; 8]);
    let (mut seen_old, mut seen_new) = (0, 0);
    for verbs in 0.. {
        let cluster = TestCluster::new(&Shape::default());
        let survivor = cluster.create(small("c")).await.unwrap();
        insert_all(&survivor, &Levels::seeded(1), &rows(22, ROWS as usize - 1, 8)).await;
        upsert(&survivor, 1, ROWS - 1, &old).await.unwrap();
        let (fabric, control) = cluster.fabric("victim", true);
        let victim = cluster.open_on(fabric, "c").await.unwrap();
        control.allow(verbs);
        let outcome = upsert(&victim, 2, ROWS - 1, &new).await;
        let seen = one_of(&survivor, ROWS - 1, &[old, new]).await;
        if seen == old {
            assert!(outcome.is_err(), "acknowledged after {verbs} verbs, and not there");
            seen_old += 1;
        } else {
            seen_new += 1;
        }
        cluster.clock.advance(Duration::from_secs(10));
        assert_eq!(one_of(&survivor, ROWS - 1, &[old, new]).await, seen, "after {verbs} verbs");
        // A plain insert finds the id taken, and finishes what was begun.
        let levels = Levels::seeded(3);
        let taken = insert::insert(&survivor, &levels, ExternalId::Num(ROWS - 1), vec![9; 8], soon()).await;
        assert_eq!(taken.unwrap_err().code, shine_common::wire::FaultCode::IdExists);
        one_of(&survivor, ROWS - 1, &[old, new]).await;
        upsert(&survivor, 4, ROWS - 1, &newer).await.unwrap();
        one_of(&survivor, ROWS - 1, &[newer]).await;
        // It came to its end within the verbs that it was allowed.
        if !control.is_dead() {
            break;
        }
    }
    assert!(seen_old > 15 && seen_new > 1, "old {seen_old} times, new {seen_new} times");
}

/// Writers replace two ids as fast as they can, through two compute nodes; each vector carries a number. A reader sees
/// nothing older than what was acknowledged before it began.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn readers_never_go_back_and_never_find_nothing() {
    const PUTS: u64 = 300;
    let cluster = TestCluster::new(&Shape::default());
    let collection = cluster.create(spec("c", DType::I8, Metric::L2, 8)).await.unwrap();
    let other = cluster.open("cn-1", "c").await.unwrap();
    insert_all(&collection, &Levels::seeded(1), &rows(23, 50, 8)).await;
    let acknowledged: Arc<[AtomicU64; 2]> = Arc::default();
    let is_done = Arc::new(AtomicBool::new(false));
    let mut readers = JoinSet::new();
    for number in 0..4 {
        let from = Arc::clone(if number % 2 == 0 { &collection } else { &other });
        let (acknowledged, is_done) = (Arc::clone(&acknowledged), Arc::clone(&is_done));
        readers.spawn(async move {
            let mut looks = 0u64;
            let mut last = [0u64; 2];
            while !is_done.load(Ordering::SeqCst) {
                let id = looks as usize % 2;
                let floor = acknowledged[id].load(Ordering::SeqCst).max(last[id]);
                let record = query::get(&from, ExternalId::Num(id as u64), soon()).await.expect("never none");
                let seen = u64::from_le_bytes(record.vector.clone().try_into().unwrap());
                // What was there before the first replacement carries no number.
                let seen = if seen < 1 << 20 { seen } else { 0 };
                assert!(seen >= floor, "put {seen} seen after put {floor}");
                last[id] = seen;
                let hits = query::search(&from, &near(&record.vector, 10, 32), soon()).await.unwrap().hits;
                let twice = hits.iter().filter(|hit| hit.id == ExternalId::Num(id as u64)).count();
                assert!(twice <= 1, "{hits:?}");
                looks += 1;
            }
            looks
        });
    }
    let mut writers = JoinSet::new();
    for id in 0..2u64 {
        let by = Arc::clone(if id == 0 { &collection } else { &other });
        let acknowledged = Arc::clone(&acknowledged);
        writers.spawn(async move {
            for put in 1..=PUTS {
                upsert(&by, put, id, &put.to_le_bytes()).await.unwrap();
                acknowledged[id as usize].store(put, Ordering::SeqCst);
            }
        });
    }
    while let Some(done) = writers.join_next().await {
        done.unwrap();
    }
    is_done.store(true, Ordering::SeqCst);
    while let Some(looks) = readers.join_next().await {
        assert!(looks.unwrap() > 0);
    }
    let report = sound(&collection).await;
    assert_eq!((report.live, report.dead, report.linking), (50, 2 * PUTS, 0), "{report:?}");
}

/// Two writers of one id: the last acknowledged one, or one that ran beside it, is what is there in the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn writers_of_one_id_take_turns() {
    let cluster = TestCluster::new(&Shape::default());
    let collection = cluster.create(small("c")).await.unwrap();
    insert_all(&collection, &Levels::seeded(1), &rows(24, ROWS as usize, 8)).await;
    let mut writers = JoinSet::new();
    for number in 0..4u8 {
        let by = cluster.open(&format!("writer-{number}"), "c").await.unwrap();
        writers.spawn(async move {
            for put in 0..25u8 {
                upsert(&by, put.into(), 3, &[number, put, 0, 0, 0, 0, 0, 0]).await.unwrap();
            }
        });
    }
    while let Some(done) = writers.join_next().await {
        done.unwrap();
    }
    let last: Vec<_> = (0..4u8).map(|number| [number, 24, 0, 0, 0, 0, 0, 0]).collect();
    one_of(&collection, 3, &last).await;
    assert_eq!(sound(&collection).await.dead, 100);
}
