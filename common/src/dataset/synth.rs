//! Made sets in the shapes of the published ones, at any size.
//!
//! A row is `centre + z·A + noise`, times a length factor where the shape has hubs:
//!
//! ```text
//! super-cluster (40, power-law sizes)
//!   └ cluster (1.5·√rows, power-law sizes): centre, and a shape A of its own (40–95 directions, decaying lengths)
//!       └ row: z normal with a spread of its own, noise about as wide as the cluster, exp(hub · normal)
//! ```
//!
//! all on a decaying global spectrum. The constants are fitted to real sets of the kind by local intrinsic dimension,
//! hubness and contrast; well-separated or round clusters would be far too easy, one round Gaussian far too hard.
//!
//! Invariant: the bytes depend on (shape, rows, seed) alone, not on CPU or threads: arithmetic comes from
//! [`super::arith`], and each block of [`BLOCK_ROWS`] rows has a random stream of its own.

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::arith::{Weighted, exp, fill_normal, pow, stream, uniform};
use super::{DataError, Format, Progress, VectorWriter, Vectors};
use crate::metric::{DType, Metric, UnknownName};

/// Rows that share a random stream.
const BLOCK_ROWS: usize = 1024;
/// Rows by which the range of integer shapes is set.
const RANGE_ROWS: usize = 16_384;
/// Super-clusters.
const SUPER_CLUSTERS: usize = 40;
/// Most clusters, reached at 7.5 million rows: the clusters' shapes are what memory goes to (up to 311 MB, tti).
const CLUSTERS_MAX: usize = 4096;
/// Most rows of a set, so that every row number fits the ground truth and the big-ann header.
const ROWS_MAX: u64 = u32::MAX as u64;

// Domains of random streams.
const MODEL: u64 = 1;
const CLUSTER: u64 = 2;
const BASE: u64 = 3;
const QUERIES: u64 = 4;

/// A published set whose dimension, type, metric and hardness are followed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum SynthShape {
    /// 100 × i8, L2, with hubs.
    Spacev,
    /// 100 × f32, L2, with hubs.
    Turing,
    /// 96 × f32 of length one, L2.
    Deep,
    /// 128 × u8, L2.
    Bigann,
    /// 200 × f32, inner product, queries from another distribution.
    Tti,
}

impl SynthShape {
    /// Every shape.
    pub const ALL: [Self; 5] = [Self::Spacev, Self::Turing, Self::Deep, Self::Bigann, Self::Tti];

    /// Elements of a vector.
    pub const fn dim(self) -> usize {
        match self {
            Self::Spacev | Self::Turing => 100,
            Self::Deep => 96,
            Self::Bigann => 128,
            Self::Tti => 200,
        }
    }

    /// Element type.
    pub const fn dtype(self) -> DType {
        match self {
            Self::Spacev => DType::I8,
            Self::Bigann => DType::U8,
            Self::Turing | Self::Deep | Self::Tti => DType::F32,
        }
    }

    /// The metric that the set is meant for.
    pub const fn metric(self) -> Metric {
        match self {
            Self::Tti => Metric::Ip,
            _ => Metric::L2,
        }
    }

    const fn constants(self) -> Constants {
        match self {
            Self::Spacev | Self::Turing | Self::Tti => {
                Constants { directions: (60, 95), noise: 1.2, spread: 0.5, hub: Some(0.12) }
            }
            Self::Deep | Self::Bigann => {
                Constants { directions: (40, 80), noise: 0.6, spread: 0.6, hub: None }
            }
        }
    }
}

impl fmt::Display for SynthShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Spacev => "spacev",
            Self::Turing => "turing",
            Self::Deep => "deep",
            Self::Bigann => "bigann",
            Self::Tti => "tti",
        })
    }
}

impl FromStr for SynthShape {
    type Err = UnknownName;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|shape| shape.to_string() == text).ok_or_else(|| UnknownName {
            what: "shape",
            given: text.into(),
            expected: "spacev, turing, deep, bigann, tti",
        })
    }
}

#[derive(Clone, Copy)]
struct Constants {
    /// Directions of a cluster: from, and below.
    directions: (u64, u64),
    noise: f32,
    /// Distance of clusters from the centre of their super-cluster.
    spread: f32,
    /// Spread of the logarithm of the length factor.
    hub: Option<f64>,
}

struct Cluster {
    centre: Vec<f32>,
    /// Row-major, a direction a row.
    directions: Vec<f32>,
}

/// The model of one made set; rows are drawn from it block by block.
pub struct Synth {
    shape: SynthShape,
    rows: u64,
    seed: u64,
    /// Global spectrum.
    scale: Vec<f32>,
    clusters: Vec<Cluster>,
    sizes: Weighted,
    /// What queries are moved by.
    query_shift: Vec<f32>,
    /// Factor to the integer range.
    range: f32,
}

impl fmt::Debug for Synth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Synth({} x {}, seed {})", self.rows, self.shape, self.seed)
    }
}

/// Base or queries.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Base,
    Queries,
}

impl Synth {
    /// The model of a base of `rows` rows (it has more clusters the larger it is).
    ///
    /// # Errors
    /// If `rows` is zero or above 4,294,967,295.
    pub fn new(shape: SynthShape, rows: u64, seed: u64) -> Result<Self, DataError> {
        if !(1..=ROWS_MAX).contains(&rows) {
            let path = Path::new("(synth)");
            return Err(DataError::malformed(path, format!("1 to {ROWS_MAX} rows"), rows.to_string()));
        }
        let dim = shape.dim();
        let constants = shape.constants();
        let count = ((rows as f64).sqrt() * 1.5) as usize;
        let count = count.clamp(64, CLUSTERS_MAX);
        let scale: Vec<f32> = (1..=dim).map(|at| pow(at as f64, -0.35) as f32).collect();

        let rng = &mut stream(seed, MODEL, 0);
        let mut normals = vec![0f32; dim];
        let mut draw = |rng: &mut _| {
            fill_normal(rng, &mut normals);
            normals.iter().zip(&scale).map(|(z, scale)| z * scale).collect::<Vec<f32>>()
        };
        let super_centres: Vec<_> = (0..SUPER_CLUSTERS).map(|_| draw(rng)).collect();
        let owners = Weighted::power_law(SUPER_CLUSTERS, 0.7);
        let centres = (0..count).map(|_| {
            let owner = &super_centres[owners.draw(rng)];
            let offset = draw(rng);
            owner.iter().zip(offset).map(|(owner, offset)| owner * 0.7 + constants.spread * offset).collect()
        });
        let clusters = (0..)
            .zip(centres)
            .map(|(number, centre)| Cluster {
                centre,
                directions: directions(constants, seed, number, &scale),
            })
            .collect();
        let mut query_shift = vec![0f32; dim];
        if shape == SynthShape::Tti {
            fill_normal(&mut stream(seed, MODEL, 1), &mut query_shift);
            query_shift.iter_mut().for_each(|shift| *shift *= 0.35);
        }
        let sizes = Weighted::power_law(count, 0.8);
        let mut synth = Self { shape, rows, seed, scale, clusters, sizes, query_shift, range: 1.0 };
        synth.range = synth.measure_range();
        Ok(synth)
    }

    /// Factor that puts the 0.9999 quantile of all values at 127; 1 for float shapes.
    fn measure_range(&self) -> f32 {
        if self.shape.dtype() == DType::F32 {
            return 1.0;
        }
        let rows = self.rows.min(RANGE_ROWS as u64) as usize;
        let mut values = Vec::with_capacity(rows * self.shape.dim());
        for block in 0..rows.div_ceil(BLOCK_ROWS) {
            let block_rows = BLOCK_ROWS.min(rows - block * BLOCK_ROWS);
            self.draw_block(Part::Base, block as u64, block_rows, |row| {
                values.extend(row.iter().map(|x| x.abs()))
            });
        }
        let at = (values.len() - 1) * 9_999 / 10_000;
        let (_, quantile, _) = values.select_nth_unstable_by(at, f32::total_cmp);
        127.0 / *quantile
    }

    /// Draws `rows` rows of block `block`, before rounding.
    fn draw_block(&self, part: Part, block: u64, rows: usize, mut sink: impl FnMut(&mut [f32])) {
        let constants = self.shape.constants();
        let dim = self.shape.dim();
        let mut rng = stream(self.seed, if part == Part::Base { BASE } else { QUERIES }, block);
        let mut normals = vec![0f32; 2 + constants.directions.1 as usize + dim];
        let mut row = vec![0f32; dim];
        for _ in 0..rows {
            let cluster = &self.clusters[self.sizes.draw(&mut rng)];
            let directions = cluster.directions.len() / dim;
            let normals = &mut normals[..2 + directions + dim];
            fill_normal(&mut rng, normals);
            let [own_spread, length, normals @ ..] = normals else { unreachable!("two more than the rest") };
            let (z, noise) = normals.split_at(directions);
            row.copy_from_slice(&cluster.centre);
            let own_spread = 1.0 + 0.35 * *own_spread;
            for (z, direction) in z.iter().zip(cluster.directions.chunks_exact(dim)) {
                add_scaled(&mut row, z * own_spread, direction);
            }
            for ((x, noise), scale) in row.iter_mut().zip(noise).zip(&self.scale) {
                *x += constants.noise * noise * scale;
            }
            if let Some(hub) = constants.hub {
                let factor = exp(hub * f64::from(*length)) as f32;
                row.iter_mut().for_each(|x| *x *= factor);
            }
            sink(&mut row);
        }
    }

    /// Block `block` in native form.
    fn block(&self, part: Part, block: u64, rows: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(rows * self.shape.dim() * self.shape.dtype().size());
        self.draw_block(part, block, rows, |row| {
            if part == Part::Queries && self.shape == SynthShape::Tti {
                row.iter_mut().zip(&self.query_shift).for_each(|(x, shift)| *x = *x * 0.6 + shift);
            }
            match self.shape {
                SynthShape::Spacev => out.extend(row.iter().map(|x| {
                    let x = (x * self.range).round_ties_even().clamp(-127.0, 127.0);
                    (x as i8).cast_unsigned()
                })),
                // Non-negative with a quarter zeros, as gradient histograms are.
                SynthShape::Bigann => out
                    .extend(row.iter().map(|x| {
                        ((x + 0.25).max(0.0) * 2.0 * self.range).round_ties_even().min(255.0) as u8
                    })),
                SynthShape::Turing | SynthShape::Tti => out.extend(row.iter().flat_map(|x| x.to_le_bytes())),
                SynthShape::Deep => {
                    let mut sum = 0f64;
                    for x in row.iter() {
                        sum += f64::from(*x) * f64::from(*x);
                    }
                    let norm = sum.sqrt();
                    out.extend(row.iter().flat_map(|x| ((f64::from(*x) / norm) as f32).to_le_bytes()));
                }
            }
        });
        out
    }

    /// Writes the base; memory is bounded by the model and a few blocks per thread.
    ///
    /// # Errors
    /// If the extension names a format for another type, or the disk refuses.
    pub fn write_base(
        &self,
        path: impl AsRef<Path>,
        threads: usize,
        progress: Progress<'_>,
    ) -> Result<(), DataError> {
        self.write(Part::Base, self.rows, path.as_ref(), threads, progress)
    }

    /// Writes `count` queries: new draws from the same clusters (for tti, moved and shrunk).
    ///
    /// # Errors
    /// As [`Self::write_base`]; also if `count` is zero.
    pub fn write_queries(
        &self,
        path: impl AsRef<Path>,
        count: u64,
        threads: usize,
        progress: Progress<'_>,
    ) -> Result<(), DataError> {
        self.write(Part::Queries, count, path.as_ref(), threads, progress)
    }

    fn write(
        &self,
        part: Part,
        rows: u64,
        path: &Path,
        threads: usize,
        progress: Progress<'_>,
    ) -> Result<(), DataError> {
        let mut writer = VectorWriter::create(path, self.shape.dtype(), self.shape.dim())?;
        self.stream(part, rows, threads, progress, |bytes| writer.push(bytes))?;
        writer.finish().map(|_| ())
    }

    /// The base in memory.
    ///
    /// # Panics
    /// If it does not fit there.
    pub fn base(&self, threads: usize) -> Vectors {
        self.collect(Part::Base, self.rows, threads)
    }

    /// `count` queries in memory.
    ///
    /// # Panics
    /// If `count` is zero.
    pub fn queries(&self, count: u64, threads: usize) -> Vectors {
        self.collect(Part::Queries, count, threads)
    }

    fn collect(&self, part: Part, rows: u64, threads: usize) -> Vectors {
        let mut all = Vec::new();
        self.stream(part, rows, threads, &|_, _| (), |bytes| {
            all.extend_from_slice(bytes);
            Ok(())
        })
        .expect("memory takes everything");
        Vectors::from_bytes(self.shape.dtype(), self.shape.dim(), all).expect("whole rows were drawn")
    }

    /// Draws all blocks on `threads` threads and hands them to `sink` in order.
    fn stream(
        &self,
        part: Part,
        rows: u64,
        threads: usize,
        progress: Progress<'_>,
        mut sink: impl FnMut(&[u8]) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let blocks = rows.div_ceil(BLOCK_ROWS as u64);
        let block_rows = |block: u64| (rows - block * BLOCK_ROWS as u64).min(BLOCK_ROWS as u64) as usize;
        let threads = threads.max(1);
        let wave = threads * 4;
        let mut first = 0;
        while first < blocks {
            let count = wave.min((blocks - first) as usize);
            let done: Vec<_> = (0..count).map(|_| Mutex::new(Vec::new())).collect();
            let next = AtomicUsize::new(0);
            std::thread::scope(|scope| {
                for _ in 0..threads.min(count) {
                    scope.spawn(|| {
                        loop {
                            let at = next.fetch_add(1, Ordering::Relaxed);
                            let Some(slot) = done.get(at) else { break };
                            let block = first + at as u64;
                            let bytes = self.block(part, block, block_rows(block));
                            *slot.lock().expect("one thread fills a slot") = bytes;
                        }
                    });
                }
            });
            for slot in done {
                sink(&slot.into_inner().expect("every thread has ended well"))?;
            }
            first += count as u64;
            progress((first * BLOCK_ROWS as u64).min(rows), rows);
        }
        Ok(())
    }

    /// The file extension that fits the shape.
    pub fn extension(&self) -> &'static str {
        Format::big_ann(self.shape.dtype()).extension()
    }
}

/// The shape of cluster `number`: directions of normal numbers under the global spectrum, the first ones longest.
fn directions(constants: Constants, seed: u64, number: u64, scale: &[f32]) -> Vec<f32> {
    let mut rng = stream(seed, CLUSTER, number);
    let (from, below) = constants.directions;
    let count = from + super::arith::below(&mut rng, below - from);
    let size = 0.6 + uniform(&mut rng) * 0.7;
    let mut out = vec![0f32; count as usize * scale.len()];
    fill_normal(&mut rng, &mut out);
    for (rank, direction) in (1..).zip(out.chunks_exact_mut(scale.len())) {
        let length = (pow(f64::from(rank), -0.4) * size * 2.2 / (count as f64).sqrt()) as f32;
        direction.iter_mut().zip(scale).for_each(|(x, scale)| *x = *x * scale * length);
    }
    out
}

/// `row += factor · direction`, element by element, so that vector width changes nothing.
#[inline]
fn add_scaled(row: &mut [f32], factor: f32, direction: &[f32]) {
    for (x, direction) in row.iter_mut().zip(direction) {
        *x += factor * direction;
    }
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::super::find::hex;
    use super::*;

    fn sum(vectors: &Vectors) -> String {
        hex(&Sha256::digest(vectors.contiguous().unwrap()))
    }

    #[test]
    fn bytes_are_the_same_on_every_machine() {
        for (shape, base, queries) in PINNED {
            let synth = Synth::new(shape, 3_000, 1234).unwrap();
            assert_eq!(
                (&sum(&synth.base(2))[..16], &sum(&synth.queries(500, 1))[..16]),
                (base, queries),
                "{shape}"
            );
        }
    }

    #[test]
    fn threads_change_nothing_and_seeds_do() {
        let make = |seed, threads| sum(&Synth::new(SynthShape::Spacev, 9_000, seed).unwrap().base(threads));
        let one = make(5, 1);
        assert!(one == make(5, 2) && one == make(5, 5));
        assert_ne!(one, make(6, 2));
    }

    #[test]
    fn files_hold_what_memory_holds() {
        let dir = tempfile::tempdir().unwrap();
        let synth = Synth::new(SynthShape::Deep, 2_500, 1).unwrap();
        let (base, queries) = (dir.path().join("base.fbin"), dir.path().join("query.npy"));
        synth.write_base(&base, 2, &|_, _| ()).unwrap();
        synth.write_queries(&queries, 30, 2, &|_, _| ()).unwrap();
        assert!(Vectors::open(&base).unwrap().iter().eq(synth.base(1).iter()));
        assert!(Vectors::open(&queries).unwrap().iter().eq(synth.queries(30, 1).iter()));
        assert!(synth.write_base(dir.path().join("base.i8bin"), 1, &|_, _| ()).is_err());
        assert!(synth.write_queries(dir.path().join("none.fbin"), 0, 1, &|_, _| ()).is_err());
    }

    #[test]
    fn every_shape_looks_like_its_kind() {
        for shape in SynthShape::ALL {
            let base = Synth::new(shape, 4_000, 9).unwrap().base(2);
            assert_eq!((base.rows(), base.dim(), base.dtype()), (4_000, shape.dim(), shape.dtype()));
            base.check_for(shape.metric()).unwrap();
            let mut row = vec![0f32; base.dim()];
            let (mut zeros, mut edges, mut norm_error) = (0, 0, 0f32);
            for at in 0..base.rows() {
                base.row_f32(at, &mut row);
                zeros += row.iter().filter(|x| **x == 0.0).count();
                edges += row.iter().filter(|x| x.abs() == 127.0 || **x == 255.0).count();
                norm_error = norm_error.max((row.iter().map(|x| x * x).sum::<f32>() - 1.0).abs());
            }
            let share = |count: usize| count as f64 / (base.rows() * base.dim()) as f64;
            match shape {
                SynthShape::Bigann => assert!((0.2..0.5).contains(&share(zeros)), "zeros {}", share(zeros)),
                SynthShape::Spacev => assert!(share(edges) < 0.001, "edges {}", share(edges)),
                SynthShape::Deep => assert!(norm_error < 1e-5, "{norm_error}"),
                SynthShape::Turing | SynthShape::Tti => {}
            }
        }
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        assert!(
            Synth::new(SynthShape::Tti, 0, 1)
                .unwrap_err()
                .to_string()
                .contains("1 to 4294967295 rows, found 0")
        );
        assert!(Synth::new(SynthShape::Tti, 1 << 32, 1).is_err());
        assert_eq!("deep".parse(), Ok(SynthShape::Deep));
        assert!("sift".parse::<SynthShape>().is_err());
    }

    /// First 16 digits of the sha256 of base and queries. They change only with the recipe, which users would notice.
    const PINNED: [(SynthShape, &str, &str); 5] = [
        (SynthShape::Spacev, "e9dfcb82e90e4ec4", "333be03eecc98032"),
        (SynthShape::Turing, "dcb6b539b058728b", "42ffd6e17be2de19"),
        (SynthShape::Deep, "6c3b5540f9d8cd8e", "d03990fef8501d49"),
        (SynthShape::Bigann, "3a55b2b24938cec1", "204aa495fea77865"),
        (SynthShape::Tti, "5b8e7df8b445d1c6", "b5b4280850d96cc9"),
    ];
}
