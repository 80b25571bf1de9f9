//! Our side of `scripts/bench.sh`, which holds our builder and local search against hnswlib, usearch and hnsw_rs: builds
//! and searches on request, one line each on standard input, one line of JSON each on standard output.
//!
//! ```text
//! data BASE ROWS QUERIES COUNT    the first rows of two files of bytes
//! build f32|i8|hnsw_rs SEED       two threads, m 16, ef_construction 200      {"wall": s, "cpu": s, "bytes": n}
//! search INDEX EF [OUT]           all queries, one after another, one thread  {"cpu": s, "hops": n, "distances": n}
//! ```
//!
//! INDEX is `region/f32`, `region/i8` (the local reader: remote memory's layout, writable, lists copied and checksummed,
//! headers of the answers read), `file/f32`, `file/i8` (the frozen graph file), or `hnsw_rs` (its own f32 distances, as its
//! users have it). Answers go to OUT as little-endian u32 rows, K a query. Without input it does nothing.

mod cpu;

use std::collections::HashMap;
use std::io::{BufRead as _, Write as _};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use hnsw_rs::prelude::{DistL2, Hnsw};
use serde_json::json;
use shine_cn::hnsw::build::{self, BuildOptions};
use shine_cn::hnsw::local::LocalIndex;
use shine_cn::hnsw::region::RegionIndex;
use shine_cn::hnsw::search::SearchStats;
use shine_common::dataset::Vectors;
use shine_common::graph_file::{Check, GraphFile};
use shine_common::ids::ExternalId;
use shine_common::metric::{DType, Metric, SimdLevel, to_f32};
use shine_common::verbs::memory::HugePages;

const K: usize = 10;
const M: usize = 16;
const EF_CONSTRUCTION: usize = 200;
const THREADS: usize = 2;
/// Layers that hnsw_rs has.
const LAYERS: usize = 16;

struct Data {
    base: Vectors,
    queries: Vectors,
    base_f32: Vectors,
    queries_f32: Vectors,
}

/// Our graph, in both places.
struct Ours {
    region: RegionIndex,
    file: LocalIndex,
}

#[derive(Default)]
struct Bench {
    data: Option<Data>,
    ours: HashMap<String, Ours>,
    hnsw_rs: Option<Hnsw<'static, f32, DistL2>>,
}

/// A pass over all queries.
#[derive(Default)]
struct Pass {
    cpu: Duration,
    hops: u64,
    distances: u64,
    /// Answers, K a query.
    rows: Vec<u32>,
}

impl Pass {
    /// Searches for a tenth of the queries, to warm up, and then for all.
    fn over<Q>(queries: &[Q], mut search: impl FnMut(&Q, &mut Self)) -> Self {
        let mut pass = Self { rows: Vec::with_capacity(2 * K * queries.len()), ..Self::default() };
        for query in &queries[..queries.len() / 10] {
            search(query, &mut pass);
        }
        pass.rows.clear();
        (pass.hops, pass.distances) = (0, 0);
        let start = cpu::thread_time();
        for query in queries {
            search(query, &mut pass);
        }
        pass.cpu = cpu::thread_time() - start;
        pass
    }

    fn count(&mut self, stats: SearchStats) {
        self.hops += u64::from(stats.hops);
        self.distances += u64::from(stats.distances);
    }
}

fn as_f32(vectors: &Vectors) -> Result<Vectors> {
    let values = vectors.iter().flat_map(|row| to_f32(vectors.dtype(), row));
    let bytes = values.flat_map(f32::to_le_bytes).collect();
    Ok(Vectors::from_bytes(DType::F32, vectors.dim(), bytes)?)
}

fn floats(vectors: &Vectors) -> Vec<Vec<f32>> {
    vectors.iter().map(|row| to_f32(DType::F32, row)).collect()
}

impl Bench {
    fn answer(&mut self, line: &str) -> Result<serde_json::Value> {
        let words: Vec<_> = line.split_whitespace().collect();
        match words.as_slice() {
            ["data", base, rows, queries, count] => {
                let base = Vectors::open_first(base, rows.parse()?)?;
                let queries = Vectors::open_first(queries, count.parse()?)?;
                let (base_f32, queries_f32) = (as_f32(&base)?, as_f32(&queries)?);
                let simd = SimdLevel::detect().to_string();
                let answer = json!({ "dtype": base.dtype().to_string(), "simd": simd });
                self.data = Some(Data { base, queries, base_f32, queries_f32 });
                Ok(answer)
            }
            ["build", what, seed] => {
                let (wall, cpu, bytes) = self.build(what, seed.parse()?)?;
                Ok(json!({ "wall": wall.as_secs_f64(), "cpu": cpu.as_secs_f64(), "bytes": bytes }))
            }
            ["search", index, ef, out @ ..] => {
                let pass = self.search(index, ef.parse()?, out.first().copied())?;
                let cpu = pass.cpu.as_secs_f64();
                Ok(json!({ "cpu": cpu, "hops": pass.hops, "distances": pass.distances }))
            }
            _ => bail!("not a request"),
        }
    }

    /// Wall time, processor time, and bytes of the graph file (0 for hnsw_rs).
    fn build(&mut self, what: &str, seed: u64) -> Result<(Duration, Duration, u64)> {
        let data = self.data.as_ref().context("data come first")?;
        if what == "hnsw_rs" {
            self.hnsw_rs = None;
            let rows = floats(&data.base_f32);
            let (start, cpu) = (Instant::now(), cpu::process_time());
            let index = Hnsw::new(M, rows.len(), LAYERS, EF_CONSTRUCTION, DistL2 {});
            index.insert_slice((&rows[0], 0));
            let next = AtomicUsize::new(1);
            thread::scope(|scope| {
                for _ in 0..THREADS {
                    scope.spawn(|| {
                        loop {
                            let at = next.fetch_add(1, Ordering::Relaxed);
                            let Some(row) = rows.get(at) else { return };
                            index.insert_slice((row, at));
                        }
                    });
                }
            });
            let times = (start.elapsed(), cpu::process_time() - cpu, 0);
            self.hnsw_rs = Some(index);
            return Ok(times);
        }
        let vectors = match what {
            "f32" => &data.base_f32,
            "i8" => &data.base,
            _ => bail!("nothing is called {what}"),
        };
        self.ours.remove(what);
        let options =
            BuildOptions { m: M as u32, ef_construction: EF_CONSTRUCTION as u32, seed, threads: THREADS };
        let (start, cpu) = (Instant::now(), cpu::process_time());
        let graph = build::build(vectors, Metric::L2, &options, &|_, _| {})?;
        let (wall, cpu) = (start.elapsed(), cpu::process_time() - cpu);
        let path = std::env::temp_dir().join(format!("shine-peers-{}-{what}.graph", std::process::id()));
        graph.write(&path, vectors, [0; 32])?;
        let bytes = path.metadata()?.len();
        let file = GraphFile::open(&path, Check::Checksums);
        std::fs::remove_file(&path)?;
        let file = file?;
        file.verify()?;
        let simd = SimdLevel::detect();
        let region = RegionIndex::load(&file, 1, HugePages::default(), simd)?;
        self.ours.insert(what.to_owned(), Ours { region, file: LocalIndex::new(file, simd)? });
        Ok((wall, cpu, bytes))
    }

    fn search(&self, index: &str, ef: usize, out: Option<&str>) -> Result<Pass> {
        let data = self.data.as_ref().context("data come first")?;
        let (place, dtype) = index.split_once('/').unwrap_or((index, "f32"));
        let queries = if dtype == "f32" { &data.queries_f32 } else { &data.queries };
        let pass;
        if place == "hnsw_rs" {
            let index = self.hnsw_rs.as_ref().context("hnsw_rs is not built")?;
            pass = Pass::over(&floats(queries), |query, pass| {
                let found = index.search(query, K, ef);
                pass.rows.extend(found.iter().map(|neighbour| neighbour.d_id as u32));
            });
        } else {
            let ours = self.ours.get(dtype).with_context(|| format!("{dtype} is not built"))?;
            let queries: Vec<_> = queries.iter().collect();
            match place {
                "region" => {
                    let mut searcher = ours.region.searcher();
                    let mut found = Vec::new();
                    pass = Pass::over(&queries, |query, pass| {
                        searcher.search(query, K, ef, &mut found).expect("nobody writes");
                        pass.rows.extend(found.iter().map(|hit| match hit.id {
                            ExternalId::Num(row) => row as u32,
                            ExternalId::Uuid(_) => unreachable!("rows are numbered"),
                        }));
                        pass.count(searcher.stats());
                    });
                }
                "file" => {
                    let mut searcher = ours.file.searcher();
                    pass = Pass::over(&queries, |query, pass| {
                        let found = searcher.search(query, ef);
                        pass.rows.extend(found.iter().take(K).map(|candidate| candidate.node().0));
                        pass.count(searcher.stats());
                    });
                }
                _ => bail!("nothing is called {index}"),
            }
        }
        if let Some(out) = out {
            let bytes: Vec<u8> = pass.rows.iter().flat_map(|row| row.to_le_bytes()).collect();
            std::fs::write(out, bytes).with_context(|| format!("writing {out}"))?;
        }
        Ok(pass)
    }
}

fn main() -> Result<()> {
    let mut bench = Bench::default();
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let answer = bench.answer(&line).with_context(|| format!("request '{line}'"))?;
        writeln!(out, "{answer}")?;
        out.flush()?;
    }
    Ok(())
}
