//! Exact nearest neighbours by comparing everything with everything, on all cores.
//!
//! ```text
//!            base rows →   tile t of the base fits the second-level cache
//! queries    ┌────┬────┬────┬────┐
//!   ↓        │ job 0   │ job 1   │   a job = a few queries × a long run of base tiles, taken from a counter
//!            ├────┼────┼────┼────┤
//!            │ job 2   │ job 3   │   inside a job each tile is compared with all its queries before the next is read
//!            └────┴────┴────┴────┘
//! ```
//!
//! Invariant: the answer is the k smallest (distance, row) pairs, so it depends on neither the order of work nor the
//! number of threads, and ties go to the smaller row.

use std::collections::BinaryHeap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::{DataError, Truth, Vectors};
use crate::metric::{Distance, Metric};

/// Bytes of base rows that are compared with all queries of a job before the next are read.
const TILE_BYTES: usize = 128 << 10;
/// Queries of one job.
const QUERIES_PER_JOB: usize = 32;

/// Progress of long work: called now and then, from several threads, with what is done and the whole.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// A found row; ordered by distance, then row, so that the largest of a heap is the one to give up.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Found {
    /// Bits of the distance, mapped so that their order is that of the numbers.
    key: u32,
    row: u32,
}

impl Found {
    #[inline]
    fn new(distance: f32, row: u32) -> Self {
        let bits = distance.to_bits();
        Self { key: bits ^ if bits >> 31 == 1 { u32::MAX } else { 1 << 31 }, row }
    }

    fn distance(self) -> f32 {
        f32::from_bits(self.key ^ if self.key >> 31 == 1 { 1 << 31 } else { u32::MAX })
    }
}

/// The k nearest seen so far.
struct Nearest {
    k: usize,
    heap: BinaryHeap<Found>,
}

impl Nearest {
    fn new(k: usize) -> Self {
        Self { k, heap: BinaryHeap::with_capacity(k + 1) }
    }

    #[inline]
    fn offer(&mut self, found: Found) {
        if self.heap.len() < self.k {
            self.heap.push(found);
        } else if let Some(mut worst) = self.heap.peek_mut()
            && found < *worst
        {
            *worst = found;
        }
    }
}

/// The `k` exact neighbours in `base` of every vector of `queries`, nearest first, with distances: squared L2, −ip, or
/// 1−cos. Cost: `queries × base` distances over `threads` threads; memory: the answer.
///
/// # Errors
/// If types or dimensions differ, `k` is zero or more than the base has rows, or a vector has no distance under
/// `metric` (NaN, an infinity, too large, or zero for the cosine).
pub fn exact_neighbours(
    base: &Vectors,
    queries: &Vectors,
    metric: Metric,
    k: usize,
    threads: usize,
    progress: Progress<'_>,
) -> Result<Truth, DataError> {
    if (base.dtype(), base.dim()) != (queries.dtype(), queries.dim()) {
        return Err(DataError::malformed(
            queries.path(),
            format!("queries of {} x {}, as in {}", base.dim(), base.dtype(), base.path().display()),
            format!("{} x {}", queries.dim(), queries.dtype()),
        ));
    }
    if k == 0 || k > base.rows() {
        let expected = format!("at least k = {k} rows, and k at least 1");
        return Err(DataError::malformed(base.path(), expected, format!("{} rows", base.rows())));
    }
    if base.rows() > u32::MAX as usize {
        return Err(DataError::malformed(base.path(), "at most 4294967295 rows", base.rows().to_string()));
    }
    base.check_for(metric)?;
    queries.check_for(metric)?;

    let distance = Distance::new(metric, base.dtype(), base.dim());
    let threads = threads.max(1);
    let tile_rows = (TILE_BYTES / base.row_bytes()).max(1);
    let groups = queries.rows().div_ceil(QUERIES_PER_JOB);
    // Few queries: cut the base too, so that every thread has some jobs.
    let runs = (threads * 4).div_ceil(groups).min(base.rows().div_ceil(tile_rows));
    let run_rows = base.rows().div_ceil(runs).next_multiple_of(tile_rows);
    let (done, total) = (AtomicU64::new(0), base.rows() as u64 * queries.rows() as u64);
    let nearest: Vec<_> = (0..queries.rows()).map(|_| Mutex::new(Nearest::new(k))).collect();

    let job = |number: usize| {
        let (group, run) = (number / runs, number % runs);
        let first_query = group * QUERIES_PER_JOB;
        let group = first_query..(first_query + QUERIES_PER_JOB).min(queries.rows());
        let rows = (run * run_rows).min(base.rows())..((run + 1) * run_rows).min(base.rows());
        let mut local: Vec<_> = group.clone().map(|_| Nearest::new(k)).collect();
        for tile in rows.clone().step_by(tile_rows) {
            let tile_end = (tile + tile_rows).min(rows.end);
            for (query, nearest) in group.clone().zip(&mut local) {
                compare(base, tile..tile_end, queries.row(query), &distance, nearest);
            }
        }
        for (query, local) in group.clone().zip(local) {
            let mut merged = nearest[query].lock().expect("no thread panics with the lock");
            local.heap.into_iter().for_each(|found| merged.offer(found));
        }
        let work = (rows.len() * group.len()) as u64;
        progress(done.fetch_add(work, Ordering::Relaxed) + work, total);
    };
    let (next, jobs) = (AtomicUsize::new(0), groups * runs);
    std::thread::scope(|scope| {
        for _ in 0..threads.min(jobs) {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= jobs {
                        break;
                    }
                    job(number);
                }
            });
        }
    });

    let cells = queries.rows() * k;
    let (mut ids, mut distances) = (Vec::with_capacity(cells), Vec::with_capacity(cells));
    for nearest in nearest {
        for found in nearest.into_inner().expect("every thread has ended well").heap.into_sorted_vec() {
            ids.push(found.row);
            distances.push(found.distance());
        }
    }
    Ok(Truth::from_parts(k, ids, Some(distances)))
}

fn compare(
    base: &Vectors,
    rows: std::ops::Range<usize>,
    query: &[u8],
    distance: &Distance,
    nearest: &mut Nearest,
) {
    for row in rows {
        nearest.offer(Found::new(distance.eval(query, base.row(row)), row as u32));
    }
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::metric::{DType, to_f32};

    fn random(dtype: DType, rows: usize, dim: usize, seed: u64) -> Vectors {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let values = (0..rows * dim).map(|_| rng.random_range(-9..9i8));
        let bytes = match dtype {
            DType::I8 => values.map(i8::cast_unsigned).collect(),
            DType::U8 => values.map(|value| value.unsigned_abs()).collect(),
            DType::F16 => {
                values.flat_map(|value| half::f16::from_f32(f32::from(value) / 4.0).to_le_bytes()).collect()
            }
            DType::F32 => values.flat_map(|value| (f32::from(value) / 4.0).to_le_bytes()).collect(),
        };
        Vectors::from_bytes(dtype, dim, bytes).unwrap()
    }

    /// The definition, word by word, in f64.
    fn naive(base: &Vectors, query: &[u8], metric: Metric) -> Vec<(f64, u32)> {
        let q = to_f32(base.dtype(), query);
        let dot =
            |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
        let mut all: Vec<_> = (0..base.rows())
            .map(|row| {
                let b = to_f32(base.dtype(), base.row(row));
                let distance = match metric {
                    Metric::L2 => dot(&q, &q) + dot(&b, &b) - 2.0 * dot(&q, &b),
                    Metric::Ip => -dot(&q, &b),
                    Metric::Cosine => 1.0 - dot(&q, &b) / (dot(&q, &q) * dot(&b, &b)).sqrt(),
                };
                (distance, row as u32)
            })
            .collect();
        all.sort_by(|a, b| a.partial_cmp(b).unwrap());
        all
    }

    #[test]
    fn neighbours_are_exact_for_every_type_and_metric() {
        for dtype in [DType::F32, DType::F16, DType::U8, DType::I8] {
            // Few distinct values in few dimensions: many ties, at the border of the k too.
            let (base, queries) = (random(dtype, 700, 5, 1), random(dtype, 70, 5, 2));
            for metric in [Metric::L2, Metric::Ip, Metric::Cosine] {
                let truth = exact_neighbours(&base, &queries, metric, 20, 3, &|_, _| ()).unwrap();
                for query in 0..queries.rows() {
                    let expected = naive(&base, queries.row(query), metric);
                    let (ids, distances) = (truth.ids(query), truth.distances(query).unwrap());
                    for (rank, (distance, row)) in expected[..20].iter().enumerate() {
                        assert!(
                            (f64::from(distances[rank]) - distance).abs() < 1e-5,
                            "{dtype} {metric} {query}"
                        );
                        if metric != Metric::Cosine {
                            assert_eq!(ids[rank], *row, "{dtype} {metric} query {query} rank {rank}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn threads_and_tiles_change_nothing() {
        let base = random(DType::F32, 9_000, 40, 3); // eleven tiles
        for queries in [1, 33, 100] {
            let queries = random(DType::F32, queries, 40, 4);
            let truths = [1, 2, 7].map(|threads| {
                exact_neighbours(&base, &queries, Metric::L2, 10, threads, &|_, _| ()).unwrap()
            });
            assert!(truths[0] == truths[1] && truths[0] == truths[2]);
            assert_eq!(truths[0].ids(0)[0], naive(&base, queries.row(0), Metric::L2)[0].1);
        }
    }

    #[test]
    fn progress_ends_at_the_whole() {
        let (base, queries) = (random(DType::I8, 300, 3, 5), random(DType::I8, 40, 3, 6));
        let most = AtomicU64::new(0);
        exact_neighbours(&base, &queries, Metric::L2, 1, 2, &|done, total| {
            assert_eq!(total, 12_000);
            most.fetch_max(done, Ordering::Relaxed);
        })
        .unwrap();
        assert_eq!(most.into_inner(), 12_000);
    }

    #[test]
    fn what_has_no_answer_is_refused() {
        let base = random(DType::I8, 10, 4, 7);
        let check = |base: &Vectors, queries: &Vectors, metric, k, text: &str| {
            let error = exact_neighbours(base, queries, metric, k, 1, &|_, _| ()).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        };
        check(
            &base,
            &random(DType::I8, 1, 5, 8),
            Metric::L2,
            1,
            "expected queries of 4 x i8, as in (memory), found 5 x i8",
        );
        check(&base, &random(DType::U8, 1, 4, 8), Metric::L2, 1, "found 4 x u8");
        check(&base, &base, Metric::L2, 11, "at least k = 11 rows, and k at least 1, found 10 rows");
        check(&base, &base, Metric::L2, 0, "k at least 1");
        let zero = Vectors::from_bytes(DType::I8, 4, vec![0; 8]).unwrap();
        check(&base, &zero, Metric::Cosine, 1, "row 0");
        let nan = Vectors::from_bytes(
            DType::F32,
            1,
            [1.0, f32::NAN].iter().flat_map(|x| x.to_le_bytes()).collect(),
        );
        check(nan.as_ref().unwrap(), nan.as_ref().unwrap(), Metric::L2, 1, "NaN in row 1, column 0");
    }

    #[test]
    fn order_of_keys_is_order_of_distances() {
        let distances =
            [f32::NEG_INFINITY, -2.0, -1.0, -f32::MIN_POSITIVE, 0.0, f32::MIN_POSITIVE, 1.0, f32::INFINITY];
        for pair in distances.windows(2) {
            assert!(Found::new(pair[0], 9) < Found::new(pair[1], 1));
            assert_eq!(Found::new(pair[0], 0).distance(), pair[0]);
        }
        assert!(Found::new(1.0, 1) < Found::new(1.0, 2));
    }
}
