//! Processes die, pause and come back while queries go on.

#![forbid(unsafe_code)]

use anyhow::Result;
use shine_common::graph_file::GraphFile;
use shine_common::metric::Metric;
use shine_sim::prove::faults::{self, Size};
use shine_tests::{Folder, base, queries, rows};

const ROWS: usize = 4_000;
const SIZE: Size = Size { queries: 200, askers: 4 };

async fn graph(folder: &Folder) -> Result<(GraphFile, Vec<Vec<u8>>)> {
    Ok((folder.graph(&base(ROWS), Metric::L2).await?, rows(&queries(40))))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_move_on_from_a_dead_compute_node() -> Result<()> {
    let folder = Folder::new();
    let (graph, vectors) = graph(&folder).await?;
    faults::compute_node_killed(&graph, vectors, SIZE).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn searches_go_on_without_an_oracle() -> Result<()> {
    let folder = Folder::new();
    let (graph, vectors) = graph(&folder).await?;
    faults::oracle_killed(&graph, vectors, SIZE).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_memory_node_fails_its_collections_by_name_and_no_other() -> Result<()> {
    let folder = Folder::new();
    let (graph, vectors) = graph(&folder).await?;
    faults::memory_node_killed(&graph, vectors, SIZE).await?;
    Ok(())
}
