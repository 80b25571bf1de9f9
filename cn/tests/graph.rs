//! One graph in the memory of three memory nodes, through in-process verbs.

mod support;

use std::collections::HashSet;
use std::sync::Arc;

use shine_cn::collection::Collection;
use shine_cn::hnsw::insert::{self, Levels};
use shine_cn::query::{self, Query};
use shine_common::ids::ExternalId;
use shine_common::metric::{DType, Metric};
use shine_common::wire::{FaultCode, Target};
use support::{Shape, TestCluster, TestVerbs, exact, rows, soon, spec};

fn near(vector: &[u8], k: u32, ef: u32) -> Query {
    Query { target: Target::Vector(vector.to_vec()), k, ef, with_vectors: false }
}

async fn insert_all(collection: &Arc<Collection<TestVerbs>>, levels: &Levels, rows: &[Vec<u8>], first: u64) {
    for (i, row) in rows.iter().enumerate() {
        let id = ExternalId::Num(first + i as u64);
        insert::insert(collection, levels, id, row.clone(), soon()).await.unwrap();
    }
}

async fn recall_at_10(
    collection: &Arc<Collection<TestVerbs>>,
    rows: &[Vec<u8>],
    queries: &[Vec<u8>],
    ef: u32,
) -> f64 {
    let mut found = 0;
    for query in queries {
        let answer = query::search(collection, &near(query, 10, ef), soon()).await.unwrap();
        let truth: HashSet<_> =
            exact(collection, rows, query, 10).into_iter().map(|i| ExternalId::Num(i as u64)).collect();
        found += answer.hits.iter().filter(|hit| truth.contains(&hit.id)).count();
        let receipt = answer.receipt;
        // Lists and vectors of a hop are two rounds; the entry's vector and the last headers one each.
        assert!(f64::from(receipt.rounds) <= 2.1 * f64::from(receipt.hops + 3), "{receipt:?}");
    }
    found as f64 / (10 * queries.len()) as f64
}

#[tokio::test]
async fn what_was_inserted_is_found_from_every_compute_node() {
    let cluster = TestCluster::new(&Shape::default());
    let first = cluster.create(spec("c", DType::I8, Metric::L2, 32)).await.unwrap();
    let data = rows(1, 2_000, 32);
    insert_all(&first, &Levels::seeded(1), &data, 0).await;
    let second = cluster.open("cn-1", "c").await.unwrap();
    for collection in [&first, &second] {
        let recall = recall_at_10(collection, &data, &rows(2, 100, 32), 64).await;
        assert!(recall > 0.95, "{recall}");
        for i in [0usize, 7, 1_999] {
            let record = query::get(collection, ExternalId::Num(i as u64), soon()).await.unwrap();
            assert_eq!(record.vector, data[i]);
        }
        let missing = query::get(collection, ExternalId::Num(2_000), soon()).await.unwrap_err();
        assert_eq!(missing.code, FaultCode::NotFound);
    }
}
