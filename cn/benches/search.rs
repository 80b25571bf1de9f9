//! Question: what does one local search cost, over the frozen graph file and over writable regions, and where does it go?
//!
//! Estimate for 20,000 made rows of 100 elements at ef 120: 2,000 distances over 130 hops. f32 rows are 8 MB, which stay
//! in the third-level cache: with the next rows on their way, a distance costs 25 ns, of which 18 are the kernel; the
//! visited set and the pool add as much as a third: 65 µs. i8: 10 ns a distance, 40 µs. The regions add a checksum and a
//! copy of 136 bytes a hop, 25 ns: 3 µs.
//!
//! `cargo bench -p shine-cn --bench search`. Speeds against other libraries, on real data: `scripts/bench.sh`.

mod cpu;

use std::time::Duration;

use cpu::ThreadTime;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use shine_cn::hnsw::build::{self, BuildOptions};
use shine_cn::hnsw::local::LocalIndex;
use shine_cn::hnsw::region::RegionIndex;
use shine_common::dataset::{Synth, SynthShape, Vectors};
use shine_common::graph_file::{Check, GraphFile};
use shine_common::metric::{DType, Metric, SimdLevel, to_f32};
use shine_common::verbs::memory::HugePages;

const ROWS: u64 = 20_000;
const QUERIES: u64 = 200;
const K: usize = 10;

fn as_f32(vectors: &Vectors) -> Vectors {
    let values = vectors.iter().flat_map(|row| to_f32(vectors.dtype(), row));
    let bytes = values.flat_map(f32::to_le_bytes).collect();
    Vectors::from_bytes(DType::F32, vectors.dim(), bytes).expect("rows of one length")
}

fn searches(criterion: &mut Criterion<ThreadTime>) {
    let made = Synth::new(SynthShape::Spacev, ROWS, 1).expect("a known shape");
    let (base, queries) = (made.base(2), made.queries(QUERIES, 2));
    for (base, queries) in [(as_f32(&base), as_f32(&queries)), (base, queries)] {
        let graph = build::build(&base, Metric::L2, &BuildOptions::default(), &|_, _| {}).expect("fit data");
        let folder = tempfile::tempdir().expect("room for a file");
        let path = folder.path().join("graph");
        graph.write(&path, &base, [0; 32]).expect("room for a file");
        let file = GraphFile::open(&path, Check::Checksums).expect("just written");
        file.verify().expect("just written");
        let simd = SimdLevel::detect();
        let region = RegionIndex::load(&file, 3, HugePages::default(), simd).expect("room for a graph");
        let file = LocalIndex::new(file, simd).expect("just written");

        let mut group = criterion.benchmark_group(format!("search/{}", base.dtype()));
        group.throughput(Throughput::Elements(1)).sample_size(20);
        group.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
        for ef in [40, 120, 400] {
            let mut next = (0..queries.rows()).cycle().map(|row| queries.row(row));
            let mut searcher = region.searcher();
            let mut found = Vec::new();
            group.bench_function(BenchmarkId::new("region", ef), |bencher| {
                bencher.iter(|| {
                    let query = next.next().expect("a cycle");
                    searcher.search(query, K, ef, &mut found).expect("nobody writes");
                });
            });
            let mut searcher = file.searcher();
            group.bench_function(BenchmarkId::new("file", ef), |bencher| {
                bencher.iter(|| searcher.search(next.next().expect("a cycle"), ef).len());
            });
        }
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().with_measurement(ThreadTime);
    targets = searches
}
criterion_main!(benches);
