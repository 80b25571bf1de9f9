//! Question: what does one distance cost when its vectors are in the first-level cache?
//!
//! Estimate at 3 GHz, AVX2, f32 L2: 16 elements wait for one addition (4 cycles, a chain), the tree at the end for
//! five more and some shuffles; so 100 elements take about 7·4 + 30 ≈ 60 cycles ≈ 20 ns, less where the next call
//! overlaps. i8 has no chain of more than one cycle: 4 blocks of 32 at about 5 cycles, then 15 cycles ≈ 12 ns.
//!
//! Time is the thread's own, so that other work on the machine counts as little as can be. One query against 16 vectors, each level that the CPU has: `cargo bench -p shine-common --bench distance`,
//! `-- l2/f32` for a part.

use std::hint::black_box;
use std::time::Duration;

use criterion::measurement::{Measurement, ValueFormatter, WallTime};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use shine_common::metric::{DType, Distance, Metric, SimdLevel, from_f64};

const VECTORS: usize = 16;

/// Time that the calling thread spent on a processor.
struct ThreadTime;

impl ThreadTime {
    fn now() -> Duration {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the call writes one timespec, and `time` is one.
        let code = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
        assert_eq!(code, 0, "Linux has a clock per thread");
        Duration::new(time.tv_sec.cast_unsigned(), u32::try_from(time.tv_nsec).expect("below 10^9"))
    }
}

impl Measurement for ThreadTime {
    type Intermediate = Duration;
    type Value = Duration;

    fn start(&self) -> Duration {
        Self::now()
    }

    fn end(&self, start: Duration) -> Duration {
        Self::now() - start
    }

    fn add(&self, a: &Duration, b: &Duration) -> Duration {
        *a + *b
    }

    fn zero(&self) -> Duration {
        Duration::ZERO
    }

    fn to_f64(&self, value: &Duration) -> f64 {
        value.as_nanos() as f64
    }

    fn formatter(&self) -> &dyn ValueFormatter {
        WallTime.formatter()
    }
}

fn distances(criterion: &mut Criterion<ThreadTime>) {
    for metric in [Metric::L2, Metric::Ip, Metric::Cosine] {
        for dtype in [DType::F32, DType::F16, DType::U8, DType::I8] {
            let mut group = criterion.benchmark_group(format!("{metric}/{dtype}"));
            group.throughput(Throughput::Elements(VECTORS as u64));
            group.warm_up_time(Duration::from_millis(100)).measurement_time(Duration::from_millis(400));
            for simd in [SimdLevel::Scalar, SimdLevel::Avx2, SimdLevel::Avx512] {
                if !simd.is_available() {
                    continue;
                }
                for dim in [96, 100, 128, 200, 256, 768] {
                    let values = |seed: usize| {
                        (0..dim).map(|at| ((at * 37 + seed * 11) % 100) as f64).collect::<Vec<_>>()
                    };
                    let row = |seed| from_f64(dtype, &values(seed)).expect("0 to 99 fits every type");
                    let query = row(VECTORS);
                    let rows: Vec<Vec<u8>> = (0..VECTORS).map(row).collect();
                    let distance = Distance::with_simd(metric, dtype, dim, simd);
                    group.bench_function(BenchmarkId::new(simd.to_string(), dim), |bencher| {
                        bencher.iter(|| {
                            for row in &rows {
                                black_box(distance.eval(black_box(&query), row));
                            }
                        });
                    });
                }
            }
            group.finish();
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().with_measurement(ThreadTime);
    targets = distances
}
criterion_main!(benches);
