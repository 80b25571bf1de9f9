//! Queries for a base: rows held out of it, or made with a skew over its regions.
//!
//! The skewed workload: the base is cut into k-means cells; cells are ranked at random; a query draws a cell by a
//! Zipf law over the ranks, then two rows a, b of the cell, and is 0.8·a + 0.2·b, rounded to the native type. So hot
//! *regions* repeat, while no query vector ever does, and no cache of results can help.
//!
//! Invariant: the outcome depends on (base, parameters, seed) alone, not on CPU or threads: distances have the same
//! bits everywhere, sums run in row order, and every random choice comes from a stream of the seed.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use half::f16;
use rand::Rng;
use xxhash_rust::xxh3::xxh3_128;

use super::arith::{Weighted, below, pow, stream};
use super::{DataError, Progress, VectorWriter, Vectors};
use crate::metric::{DType, Distance, Metric};

/// Cells of the skewed workload.
pub const REGION_CELLS: usize = 256;
/// Rows that the cells are learnt from.
const SAMPLE_ROWS: usize = 32_768;
/// Rounds of learning; cells of a workload need not be perfect.
const LLOYD_ROUNDS: usize = 12;
/// Rows assigned to cells between two looks at the counter.
const ASSIGN_ROWS: usize = 4096;
/// Repeats in a row after which a cell counts as used up.
const REPEATS_MAX: usize = 64;

// Domains of random streams.
const HOLD_OUT: u64 = 16;
const CELL_SAMPLE: u64 = 17;
const CELL_RANKS: u64 = 18;
const REGION_DRAWS: u64 = 19;

/// Splits `base` into `count` queries, drawn without replacement and in random order, and the other rows in theirs.
///
/// # Errors
/// If no row would be left on either side, a value is NaN or infinite, or a file cannot be written.
pub fn hold_out(
    base: &Vectors,
    count: usize,
    seed: u64,
    base_out: impl AsRef<Path>,
    queries_out: impl AsRef<Path>,
    progress: Progress<'_>,
) -> Result<(), DataError> {
    if count == 0 || count >= base.rows() {
        let expected = format!("more than {count} rows, and at least one row to hold out");
        return Err(DataError::malformed(base.path(), expected, format!("{} rows", base.rows())));
    }
    base.check_finite()?;
    let mut rng = stream(seed, HOLD_OUT, 0);
    let chosen = sample(base.rows(), count, &mut rng);
    let mut queries = VectorWriter::create(queries_out, base.dtype(), base.dim())?;
    chosen.iter().try_for_each(|row| queries.push(base.row(*row)))?;
    let chosen: HashSet<_> = chosen.into_iter().collect();
    let mut rest = VectorWriter::create(base_out, base.dtype(), base.dim())?;
    for (row, bytes) in base.iter().enumerate() {
        if !chosen.contains(&row) {
            rest.push(bytes)?;
        }
        if row % ASSIGN_ROWS == 0 {
            progress(row as u64, base.rows() as u64);
        }
    }
    rest.finish()?;
    queries.finish()?;
    Ok(())
}

/// `count` distinct numbers below `bound` in random order (Floyd's sampling, then a shuffle).
fn sample(bound: usize, count: usize, rng: &mut impl Rng) -> Vec<usize> {
    let mut seen = HashSet::with_capacity(count);
    let mut chosen = Vec::with_capacity(count);
    for last in bound - count..bound {
        let number = below(rng, last as u64 + 1) as usize;
        let number = if seen.insert(number) { number } else { last };
        seen.insert(number);
        chosen.push(number);
    }
    shuffle(&mut chosen, rng);
    chosen
}

fn shuffle<T>(items: &mut [T], rng: &mut impl Rng) {
    for at in (1..items.len()).rev() {
        items.swap(at, below(rng, at as u64 + 1) as usize);
    }
}

/// Queries with a skew over regions, and how they came about.
#[derive(Debug, Clone)]
pub struct RegionQueries {
    /// The queries; no two are equal.
    pub queries: Vectors,
    /// For each query the rank of its cell, 0 being the hottest.
    pub ranks: Vec<u32>,
    /// Cells with at least two rows, over which the law runs.
    pub cells: usize,
    /// Rows of the smallest such cell.
    pub cell_rows_min: usize,
    /// Rows of the largest cell.
    pub cell_rows_max: usize,
    /// Cells that ran out of new queries; what they would have got went to others, so the skew is weaker than asked.
    pub cells_used_up: usize,
}

/// Makes `count` queries over [`REGION_CELLS`] cells of `base` (fewer for a tiny base), whose ranks follow a Zipf law with
/// `exponent` (0 = uniform over cells).
///
/// # Errors
/// If a value is not finite, `exponent` is not a number from 0 to 10, `count` is zero, or the base has not enough
/// distinct pairs of rows.
pub fn region_queries(
    base: &Vectors,
    exponent: f64,
    count: usize,
    seed: u64,
    threads: usize,
    progress: Progress<'_>,
) -> Result<RegionQueries, DataError> {
    let refuse = |expected: String, found: String| Err(DataError::malformed(base.path(), expected, found));
    if !(0.0..=10.0).contains(&exponent) {
        return refuse("a Zipf exponent of 0 to 10".into(), exponent.to_string());
    }
    if count == 0 {
        return refuse("at least one query to make".into(), "none".into());
    }
    if base.rows() > u32::MAX as usize {
        return refuse("at most 4294967295 rows".into(), base.rows().to_string());
    }
    base.check_for(Metric::L2)?;

    let centroids = learn_cells(base, REGION_CELLS.min(base.rows()), seed, threads);
    let mut members = vec![Vec::new(); centroids.len()];
    let all = Rows { vectors: base, rows: None };
    for (row, cell) in all.assign(&centroids, threads, progress).into_iter().enumerate() {
        members[cell as usize].push(row as u32);
    }
    members.retain(|rows| rows.len() >= 2);
    let (Some(min), Some(max)) = (members.iter().map(Vec::len).min(), members.iter().map(Vec::len).max())
    else {
        return refuse("a cell with at least two rows".into(), format!("{} rows", base.rows()));
    };
    shuffle(&mut members, &mut stream(seed, CELL_RANKS, 0));

    // A cell that has no new queries left drops out of the law.
    let law_without = |used_up: &[bool]| {
        let weight =
            |(rank, used_up): (usize, &bool)| if *used_up { 0.0 } else { pow(rank as f64 + 1.0, -exponent) };
        Weighted::new(used_up.iter().enumerate().map(weight))
    };
    let mut used_up = vec![false; members.len()];
    let mut law = law_without(&used_up);
    let mut rng = stream(seed, REGION_DRAWS, 0);
    let mut seen = HashSet::with_capacity(count);
    let mut bytes = Vec::with_capacity(count * base.row_bytes());
    let mut ranks = Vec::with_capacity(count);
    while ranks.len() < count {
        let rank = law.draw(&mut rng);
        let rows = &members[rank];
        let fresh = (0..REPEATS_MAX).find_map(|_| {
            let a = below(&mut rng, rows.len() as u64) as usize;
            let b = below(&mut rng, rows.len() as u64 - 1) as usize;
            let b = if b < a { b } else { b + 1 };
            let query = blend(base.dtype(), base.row(rows[a] as usize), base.row(rows[b] as usize));
            seen.insert(xxh3_128(&query)).then_some(query)
        });
        match fresh {
            Some(query) => {
                bytes.extend(query);
                ranks.push(rank as u32);
            }
            None => {
                used_up[rank] = true;
                if used_up.iter().all(|used_up| *used_up) {
                    let found = format!("no more than {} in {} rows", ranks.len(), base.rows());
                    return refuse(format!("{count} distinct queries"), found);
                }
                law = law_without(&used_up);
            }
        }
    }
    Ok(RegionQueries {
        queries: Vectors::from_bytes(base.dtype(), base.dim(), bytes)?,
        ranks,
        cells: members.len(),
        cell_rows_min: min,
        cell_rows_max: max,
        cells_used_up: used_up.into_iter().filter(|used_up| *used_up).count(),
    })
}

/// 0.8·a + 0.2·b, rounded to the type; between a and b, so always in range.
fn blend(dtype: DType, a: &[u8], b: &[u8]) -> Vec<u8> {
    let mix = |a: f64, b: f64| 0.8 * a + 0.2 * b;
    let pairs = a.chunks_exact(dtype.size()).zip(b.chunks_exact(dtype.size()));
    let mut out = Vec::with_capacity(a.len());
    for (a, b) in pairs {
        match (dtype, a, b) {
            (DType::F32, &[a0, a1, a2, a3], &[b0, b1, b2, b3]) => {
                let (a, b) = (f32::from_le_bytes([a0, a1, a2, a3]), f32::from_le_bytes([b0, b1, b2, b3]));
                out.extend((mix(a.into(), b.into()) as f32).to_le_bytes());
            }
            (DType::F16, &[a0, a1], &[b0, b1]) => {
                let (a, b) = (f16::from_le_bytes([a0, a1]), f16::from_le_bytes([b0, b1]));
                out.extend(f16::from_f64(mix(a.into(), b.into())).to_le_bytes());
            }
            (DType::U8, &[a], &[b]) => out.push(mix(a.into(), b.into()).round_ties_even() as u8),
            (DType::I8, &[a], &[b]) => {
                let mixed = mix(a.cast_signed().into(), b.cast_signed().into()).round_ties_even();
                out.push((mixed as i8).cast_unsigned());
            }
            _ => unreachable!("chunks have the size of an element"),
        }
    }
    out
}

/// All rows of a set, or some of them.
struct Rows<'a> {
    vectors: &'a Vectors,
    rows: Option<&'a [usize]>,
}

impl Rows<'_> {
    fn len(&self) -> usize {
        self.rows.map_or(self.vectors.rows(), <[_]>::len)
    }

    fn read(&self, at: usize, out: &mut [f32]) {
        self.vectors.row_f32(self.rows.map_or(at, |rows| rows[at]), out);
    }

    /// Nearest centroid of every row; ties go to the smaller cell.
    fn assign(&self, centroids: &[Vec<f32>], threads: usize, progress: Progress<'_>) -> Vec<u32> {
        let dim = self.vectors.dim();
        let distance = Distance::new(Metric::L2, DType::F32, dim);
        let parts = self.len().div_ceil(ASSIGN_ROWS);
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let out: Vec<_> = (0..parts).map(|_| Mutex::new(Vec::new())).collect();
        std::thread::scope(|scope| {
            for _ in 0..threads.clamp(1, parts) {
                scope.spawn(|| {
                    let mut row = vec![0f32; dim];
                    loop {
                        let part = next.fetch_add(1, Ordering::Relaxed);
                        let Some(slot) = out.get(part) else { break };
                        let range = part * ASSIGN_ROWS..((part + 1) * ASSIGN_ROWS).min(self.len());
                        let assigned = range.clone().map(|at| {
                            self.read(at, &mut row);
                            nearest(&row, centroids, &distance)
                        });
                        *slot.lock().expect("one thread fills a slot") = assigned.collect::<Vec<_>>();
                        let count = done.fetch_add(range.len(), Ordering::Relaxed) + range.len();
                        progress(count as u64, self.len() as u64);
                    }
                });
            }
        });
        out.into_iter().flat_map(|slot| slot.into_inner().expect("every thread has ended well")).collect()
    }
}

fn nearest(row: &[f32], centroids: &[Vec<f32>], distance: &Distance) -> u32 {
    let (mut best, mut best_distance) = (0, f32::INFINITY);
    for (cell, centroid) in (0..).zip(centroids) {
        let distance = distance.eval(bytemuck::cast_slice(row), bytemuck::cast_slice(centroid));
        if distance < best_distance {
            (best, best_distance) = (cell, distance);
        }
    }
    best
}

/// Lloyd's k-means from random rows on a sample. A cell that loses all rows takes one out of the fullest cell (not the
/// worst-placed row of all, which would make a cell of a single outlier).
fn learn_cells(base: &Vectors, cells: usize, seed: u64, threads: usize) -> Vec<Vec<f32>> {
    let dim = base.dim();
    let chosen = sample(base.rows(), base.rows().min(SAMPLE_ROWS), &mut stream(seed, CELL_SAMPLE, 0));
    let sample = Rows { vectors: base, rows: Some(&chosen) };
    let read = |at: usize| {
        let mut row = vec![0f32; dim];
        sample.read(at, &mut row);
        row
    };
    let mut centroids: Vec<_> = (0..cells).map(read).collect(); // the sample is in random order
    for _ in 0..LLOYD_ROUNDS {
        let assigned = sample.assign(&centroids, threads, &|_, _| ());
        let mut members = vec![Vec::new(); cells];
        assigned.iter().enumerate().for_each(|(at, cell)| members[*cell as usize].push(at));
        for cell in 0..cells {
            if members[cell].is_empty() {
                let fullest = (0..cells).max_by_key(|other| (members[*other].len(), cells - other));
                let moved = fullest.and_then(|fullest| members[fullest].pop()).expect("some cell has a row");
                members[cell].push(moved);
            }
        }
        let mut row = vec![0f32; dim];
        for (centroid, members) in centroids.iter_mut().zip(&members) {
            let mut sums = vec![0f64; dim];
            for at in members {
                sample.read(*at, &mut row);
                sums.iter_mut().zip(&row).for_each(|(sum, x)| *sum += f64::from(*x));
            }
            centroid.iter_mut().zip(sums).for_each(|(x, sum)| *x = (sum / members.len() as f64) as f32);
        }
    }
    centroids
}

#[cfg(test)]
mod tests {
    use super::super::{Synth, SynthShape};
    use super::*;

    fn i8s(dim: usize, values: &[i8]) -> Vectors {
        Vectors::from_bytes(DType::I8, dim, values.iter().map(|x| x.cast_unsigned()).collect()).unwrap()
    }

    #[test]
    fn held_out_rows_and_the_rest_are_the_base() {
        let dir = tempfile::tempdir().unwrap();
        let base = Vectors::from_bytes(DType::U8, 2, (0..=255).flat_map(|x| [x, x ^ 7]).collect()).unwrap();
        let split = |seed: u64| {
            let (rest, queries) = (dir.path().join("base.u8bin"), dir.path().join("query.u8bin"));
            hold_out(&base, 56, seed, &rest, &queries, &|_, _| ()).unwrap();
            (Vectors::open(rest).unwrap(), Vectors::open(queries).unwrap())
        };
        let (rest, queries) = split(1);
        assert_eq!((rest.rows(), queries.rows()), (200, 56));
        assert!(rest.iter().is_sorted(), "the rest keeps its order");
        assert!(!queries.iter().is_sorted(), "queries come in random order");
        let mut all: Vec<_> = rest.iter().chain(queries.iter()).collect();
        all.sort();
        assert!(all.into_iter().eq(base.iter()), "every row once, on one side");
        let ((_, again), (_, other)) = (split(1), split(2));
        assert!(again.iter().eq(queries.iter()) && !other.iter().eq(queries.iter()));
        for count in [0, 256, 257] {
            let out = dir.path().join("x.u8bin");
            assert!(hold_out(&base, count, 1, &out, &out, &|_, _| ()).is_err() && !out.exists(), "{count}");
        }
    }

    #[test]
    fn samples_are_distinct_and_fair() {
        let mut hits = [0; 10];
        let mut firsts = [0; 10];
        for round in 0..5_000 {
            let chosen = sample(10, 4, &mut stream(round, 0, 0));
            assert_eq!(chosen.iter().collect::<HashSet<_>>().len(), 4);
            chosen.iter().for_each(|number| hits[*number] += 1);
            firsts[chosen[0]] += 1;
        }
        // Four standard errors of 2,000 and of 500.
        assert!(hits.iter().all(|hits: &i32| (hits - 2_000).abs() < 140), "{hits:?}");
        assert!(firsts.iter().all(|hits: &i32| (hits - 500).abs() < 85), "{firsts:?}");
        assert_eq!(sample(3, 3, &mut stream(1, 0, 0)).into_iter().collect::<HashSet<_>>().len(), 3);
    }

    #[test]
    fn region_queries_follow_the_law_and_never_repeat() {
        // Evenly spread, so that no cell has so few rows that the law would ask it for more pairs than it has.
        let mut random = stream(11, 0, 0);
        let base = (0..4 * 10_000).flat_map(|_| (random.next_u32() as f32 / 2f32.powi(32)).to_le_bytes());
        let base = Vectors::from_bytes(DType::F32, 4, base.collect()).unwrap();
        let count = 1_000;
        let made = region_queries(&base, 1.0, count, 7, 2, &|_, _| ()).unwrap();
        assert_eq!((made.queries.rows(), made.ranks.len()), (count, count));
        assert!(
            made.cells > 200 && made.cells_used_up == 0,
            "{} cells, {} used up",
            made.cells,
            made.cells_used_up
        );
        let distinct: HashSet<_> = made.queries.iter().collect();
        assert_eq!(distinct.len(), count);

        let harmonic: f64 = (1..=made.cells).map(|rank| 1.0 / rank as f64).sum();
        for rank in [0, 1, 5, 20] {
            let expected = count as f64 / (rank as f64 + 1.0) / harmonic;
            let found = made.ranks.iter().filter(|found| **found == rank).count() as f64;
            assert!(
                (found - expected).abs() < 4.0 * expected.sqrt(),
                "rank {rank}: {found}, expected {expected}"
            );
        }
        // Queries of one cell lie together: nearer to each other than to those of other cells.
        let distance = Distance::new(Metric::L2, base.dtype(), base.dim());
        let of = |rank| {
            made.queries.iter().zip(&made.ranks).filter(move |(_, found)| **found == rank).map(|(q, _)| q)
        };
        let mean = |a: u32, b: u32| {
            let (mut sum, mut count) = (0f64, 0);
            for a in of(a).take(40) {
                for b in of(b).skip(40).take(40) {
                    sum += f64::from(distance.eval(a, b));
                    count += 1;
                }
            }
            sum / f64::from(count)
        };
        assert!(mean(0, 0) < mean(0, 1) && mean(1, 1) < mean(0, 1));
    }

    #[test]
    fn region_queries_depend_on_the_seed_alone() {
        let base = Synth::new(SynthShape::Deep, 3_000, 3).unwrap().base(2);
        let make = |seed, threads| region_queries(&base, 0.8, 300, seed, threads, &|_, _| ()).unwrap();
        let one = make(1, 1);
        assert!(one.queries.iter().eq(make(1, 3).queries.iter()));
        assert!(!one.queries.iter().eq(make(2, 1).queries.iter()));
    }

    #[test]
    fn a_cell_that_runs_dry_is_reported_and_an_empty_well_is_an_error() {
        // Two far groups of three rows: six ordered pairs each, all different.
        let base = i8s(2, &[0, 0, 10, 0, 0, 10, 100, 100, 110, 100, 100, 110]);
        let cells_of = |base: &Vectors, count| region_queries(base, 3.0, count, 1, 1, &|_, _| ());
        // Six rows give six cells of one row each.
        let text = cells_of(&base, 1).unwrap_err().to_string();
        assert!(text.contains("a cell with at least two rows"), "{text}");
        // 256 cells, each of two equal rows: every cell has one query.
        let pairs: Vec<i8> =
            (0..256).flat_map(|x| [(x % 16) * 8 - 64, (x / 16) * 8 - 64]).map(|x| x as i8).collect();
        let base = i8s(2, &[pairs.clone(), pairs].concat());
        let made = cells_of(&base, 40).unwrap();
        assert!(made.cells_used_up > 0);
        let text = cells_of(&base, 2_000).unwrap_err().to_string();
        assert!(text.contains("expected 2000 distinct queries, found no more than"), "{text}");
    }

    #[test]
    fn blends_are_rounded_to_the_type() {
        let i8 = |x: i8| [x.cast_unsigned()];
        assert_eq!(blend(DType::I8, &i8(-100), &i8(50)), i8(-70));
        assert_eq!(blend(DType::I8, &i8(127), &i8(127)), i8(127));
        assert_eq!(blend(DType::U8, &[255], &[250]), [254]);
        assert_eq!(blend(DType::F32, &1f32.to_le_bytes(), &2f32.to_le_bytes()), 1.2f32.to_le_bytes());
        let half = |x: f32| f16::from_f32(x).to_le_bytes();
        assert_eq!(blend(DType::F16, &half(1.0), &half(2.0)), half(1.2));
    }

    #[test]
    fn parameters_out_of_range_are_refused() {
        let base = Synth::new(SynthShape::Deep, 300, 3).unwrap().base(2);
        for (exponent, count) in [(f64::NAN, 1), (-0.1, 1), (11.0, 1), (1.0, 0)] {
            assert!(region_queries(&base, exponent, count, 1, 1, &|_, _| ()).is_err());
        }
    }
}
