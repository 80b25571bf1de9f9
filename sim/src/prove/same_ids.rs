//! One graph file, every backend, every compute node: the same ids in the same order, with the same distances.

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use shine_client::ClientOptions;
use shine_cn::collection::Options;
use shine_common::graph_file::GraphFile;

use crate::cluster::ClusterSpec;
use crate::local::LocalCluster;
use crate::loopback::Plan;
use crate::stage::{PATIENCE, Questions, Stage, ranked};

/// What was compared.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SameIds {
    /// Element type.
    pub dtype: String,
    /// Rows of the graph.
    pub vectors: u32,
    /// Queries.
    pub queries: usize,
    /// Answers that were the same everywhere, all queries together.
    pub answers: usize,
    /// Compute nodes, each with its instruction set.
    pub nodes: Vec<(String, String)>,
}

/// Answers `vectors` on the local backend, then through every compute node of a cluster over QUIC whose nodes run
/// with `simd` (one each; empty for their own choice).
///
/// # Errors
/// Names the first query and node that differ.
pub async fn same_ids(
    graph: &GraphFile,
    vectors: Vec<Vec<u8>>,
    k: u32,
    ef: u32,
    simd: &[&str],
) -> anyhow::Result<SameIds> {
    let plan = Plan::new(graph, 3)?;
    let local = LocalCluster::new(3, plan.regions, plan.region_bytes, Options::default())?;
    local.load(graph, "same").await?;
    let (mut expected, mut hops) = (Vec::new(), Vec::new());
    for vector in &vectors {
        let (hits, receipt) = local.search("same", vector, k, ef).await?;
        expected.push(ranked(&hits));
        hops.push((receipt.hops, receipt.distances));
    }
    drop(local);
    let questions = Questions { collection: "same".into(), vectors, expected, k, ef };

    let mut spec = ClusterSpec {
        compute_nodes: u16::try_from(simd.len()).context("a few compute nodes")?,
        regions: plan.regions,
        region_bytes: plan.region_bytes,
        ..ClusterSpec::default()
    };
    for (number, level) in simd.iter().enumerate().filter(|(_, level)| !level.is_empty()) {
        spec = spec.with_args(&format!("cn-{number}"), &["--simd", level]);
    }
    let stage =
        Stage::start_with(spec, ClientOptions { deadline: PATIENCE, ..ClientOptions::default() }).await?;
    stage.load(graph, "same", &[]).await?;
    let mut nodes = Vec::new();
    for ((name, client), wanted) in stage.client_of_each().await?.into_iter().zip(simd) {
        let running = client.node_status().await?.simd;
        ensure!(wanted.is_empty() || running == *wanted, "{name} runs with {running}, not with {wanted}");
        for (at, expected) in questions.expected.iter().enumerate() {
            let (answer, receipt) = questions.ask(&client, at).await?;
            ensure!(
                answer == *expected,
                "query {at} on {name} ({running}): {answer:?} over QUIC, {expected:?} on the local backend"
            );
            let cost = (receipt.hops, receipt.distances);
            ensure!(
                cost == hops[at],
                "query {at} on {name}: hops and distances {cost:?}, locally {:?}",
                hops[at]
            );
        }
        nodes.push((name, running));
    }
    stage.stop().await?;
    let info = graph.info();
    let answers = questions.expected.iter().map(Vec::len).sum();
    Ok(SameIds {
        dtype: info.dtype.to_string(),
        vectors: info.rows,
        queries: questions.vectors.len(),
        answers,
        nodes,
    })
}
