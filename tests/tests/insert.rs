//! Many clients insert through several compute nodes; one of these dies at it.

#![forbid(unsafe_code)]

use anyhow::Result;
use shine_common::metric::Metric;
use shine_sim::prove::inserts::{self, InsertSpec};
use shine_tests::{Folder, base, queries};

const LOADED: usize = 3_000;

fn spec(rows: usize, contended: usize) -> InsertSpec {
    InsertSpec { rows: base(rows), metric: Metric::L2, contended, clients: 8, compute_nodes: 3 }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_id_has_one_winner_and_recall_stays() -> Result<()> {
    let folder = Folder::new();
    let spec = spec(LOADED + 1_500, 150);
    let graph = folder.graph(&spec.rows.first(LOADED)?, spec.metric).await?;
    let inserts = inserts::insert_concurrently(&graph, &spec, &queries(500), 80).await?;
    assert_eq!((inserts.inserted, inserts.fetched), (1_500, 4_500));
    assert!(inserts.recall_grown >= inserts.recall_built - 0.01, "{inserts:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_compute_node_that_dies_inserting_leaves_a_sound_graph() -> Result<()> {
    let folder = Folder::new();
    let spec = spec(LOADED + 800, 0);
    let graph = folder.graph(&spec.rows.first(LOADED)?, spec.metric).await?;
    let cut_off = inserts::inserting_node_killed(&graph, &spec).await?;
    assert_eq!(cut_off.acknowledged + cut_off.unknown, 800);
    Ok(())
}
