//! Every port under attack while queries go on.

#![forbid(unsafe_code)]

use anyhow::{Result, ensure};
use shine_common::metric::Metric;
use shine_sim::prove::hostile::{Size, besiege};
use shine_tests::{Folder, base, queries, rows};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_under_attack_answers_and_does_not_grow() -> Result<()> {
    let folder = Folder::new();
    let graph = folder.graph(&base(4_000), Metric::L2).await?;
    let size = Size { connections: 432, attackers: 8, askers: 1, seed: 7 };
    let siege = besiege(&graph, rows(&queries(40)), size).await?;
    println!("{}\n{}", siege.table(), siege.facts().join("\n"));
    let complaints = siege.complaints();
    ensure!(complaints.is_empty(), "{}", complaints.join("\n"));
    ensure!(siege.tallies.iter().map(|tally| tally.attempts).sum::<u64>() == size.connections as u64);
    Ok(())
}
