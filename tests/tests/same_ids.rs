//! One graph file gives the same answers on every backend and every compute node, whatever its instruction set.

#![forbid(unsafe_code)]

use anyhow::Result;
use shine_common::metric::{Metric, SimdLevel};
use shine_sim::prove::same_ids::same_ids;
use shine_tests::{Folder, as_f32, base, queries, rows};

const ROWS: usize = 6_000;
const QUERIES: usize = 100;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_rank_the_same_everywhere() -> Result<()> {
    let folder = Folder::new();
    let graph = folder.graph(&base(ROWS), Metric::L2).await?;
    let same = same_ids(&graph, rows(&queries(QUERIES)), 10, 60, &["", "", ""]).await?;
    assert_eq!((same.answers, same.nodes.len()), (10 * QUERIES, 3));
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn floats_rank_the_same_on_every_instruction_set() -> Result<()> {
    let folder = Folder::new();
    let graph = folder.graph(&as_f32(&base(ROWS)), Metric::Cosine).await?;
    let levels = [SimdLevel::Scalar, SimdLevel::Avx2, SimdLevel::Avx512];
    let levels: Vec<String> =
        levels.iter().filter(|level| level.is_available()).map(ToString::to_string).collect();
    let levels: Vec<&str> = levels.iter().map(String::as_str).collect();
    let same = same_ids(&graph, rows(&as_f32(&queries(QUERIES))), 10, 60, &levels).await?;
    assert_eq!(same.answers, 10 * QUERIES);
    assert_eq!(same.nodes.iter().map(|(_, simd)| simd.as_str()).collect::<Vec<_>>(), levels);
    Ok(())
}
