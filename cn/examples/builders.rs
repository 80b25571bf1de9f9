//! Recall and speed of the builders' graphs beside each other: our own, hnsw_rs's exported to a graph file, and hnsw_rs
//! searching its own index.
//!
//! ```text
//! cargo run --release -p shine-cn --example builders -- BASE QUERIES TRUTH METRIC [ROWS] [BUILDS] [f32]
//! ```
//!
//! Search times are thread CPU time of one thread.

use std::time::Duration;

use anyhow::{Context as _, Result};
use shine_cn::hnsw::build::{BuildOptions, build};
use shine_cn::hnsw::graph::Graph;
use shine_cn::hnsw::hnsw_rs_builder::HnswRs;
use shine_cn::hnsw::local::LocalIndex;
use shine_common::dataset::{Truth, Vectors};
use shine_common::graph_file::{Check, GraphFile};
use shine_common::metric::{DType, Metric, SimdLevel};

const EFS: [usize; 6] = [40, 80, 120, 160, 200, 420];
const K: usize = 10;

fn thread_cpu() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes to the struct it is given and to nothing else.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn as_f32(vectors: &Vectors) -> Result<Vectors> {
    let mut bytes = Vec::new();
    let mut row = vec![0.0; vectors.dim()];
    for at in 0..vectors.rows() {
        vectors.row_f32(at, &mut row);
        bytes.extend(row.iter().flat_map(|v| v.to_le_bytes()));
    }
    Ok(Vectors::from_bytes(DType::F32, vectors.dim(), bytes)?)
}

fn report(
    name: &str,
    queries: &Vectors,
    truth: &Truth,
    mut search: impl FnMut(&[u8], usize) -> (Vec<u32>, u64, u64),
) {
    for ef in EFS {
        let (mut hits, mut hops, mut distances) = (0, 0, 0);
        let mut best = f64::INFINITY;
        for _ in 0..3 {
            (hits, hops, distances) = (0, 0, 0);
            let start = thread_cpu();
            for (i, query) in queries.iter().enumerate() {
                let (found, h, d) = search(query, ef);
                hops += h;
                distances += d;
                hits += found.iter().filter(|row| truth.ids(i)[..K].contains(row)).count();
            }
            best = best.min((thread_cpu() - start).as_secs_f64());
        }
        let n = queries.rows() as f64;
        println!(
            "{name:<18} ef {ef:>3}  recall@10 {:.4}  {:>7.0} q/s  {:>6.1} hops {:>7.1} distances",
            hits as f64 / n / K as f64,
            n / best,
            hops as f64 / n,
            distances as f64 / n,
        );
    }
}

fn report_graph(name: &str, graph: &Graph, base: &Vectors, queries: &Vectors, truth: &Truth) -> Result<()> {
    let path = std::env::temp_dir().join(format!("builders-{}.graph", std::process::id()));
    graph.write(&path, base, [0; 32])?;
    let file = GraphFile::open(&path, Check::Checksums)?;
    file.verify()?;
    let index = LocalIndex::new(file, SimdLevel::detect())?;
    std::fs::remove_file(&path)?;
    let info = graph.build_info();
    println!(
        "{name}: built in {:.1} s with {} threads, {:.2} links per node, {} orphans linked",
        info.seconds,
        info.threads,
        graph.links() as f64 / graph.rows() as f64,
        info.orphans_linked
    );
    let mut searcher = index.searcher();
    report(name, queries, truth, |query, ef| {
        let rows = searcher.search(query, ef).iter().take(K).map(|c| c.node().0).collect();
        let stats = searcher.stats();
        (rows, stats.hops.into(), stats.distances.into())
    });
    Ok(())
}

fn main() -> Result<()> {
    let args: Vec<_> = std::env::args().skip(1).collect();
    let [base, queries, truth, metric, rest @ ..] = args.as_slice() else {
        anyhow::bail!("usage: builders BASE QUERIES TRUTH METRIC [ROWS] [BUILDS] [f32]");
    };
    let number = |at: usize| rest.get(at).map(|text| text.parse::<usize>()).transpose();
    let metric: Metric = metric.parse()?;
    let mut base = Vectors::open(base)?;
    if let Some(rows) = number(0).context("ROWS is a number")? {
        base = base.first(rows)?;
    }
    let builds = number(1).context("BUILDS is a number")?.unwrap_or(1);
    let truth = Truth::open(truth, base.rows())?;
    let mut queries = Vectors::open(queries)?.first(truth.queries())?;
    if rest.get(2).is_some_and(|text| text == "f32") {
        (base, queries) = (as_f32(&base)?, as_f32(&queries)?);
    }
    let options = BuildOptions::default();
    println!("{} x {} {}, {metric}, {options:?}", base.rows(), base.dim(), base.dtype());
    let only = std::env::var("ONLY").unwrap_or_default();
    for _ in 0..builds {
        if only != "hnsw_rs" {
            let graph = build(&base, metric, &options, &|_, _| {})?;
            report_graph("native", &graph, &base, &queries, &truth)?;
        }
        if only != "native" {
            let yardstick = HnswRs::build(&base, metric, &options, &|_, _| {})?;
            report("hnsw_rs itself", &queries, &truth, |query, ef| (yardstick.search(query, K, ef), 0, 0));
            report_graph("hnsw_rs exported", &yardstick.export()?, &base, &queries, &truth)?;
        }
    }
    Ok(())
}
