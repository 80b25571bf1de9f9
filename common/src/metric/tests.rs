//! Every level against scalar, bit for bit, and scalar against a reference in `f64`.

use half::f16;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use super::*;

const METRICS: [Metric; 3] = [Metric::L2, Metric::Ip, Metric::Cosine];
const DTYPES: [DType; 4] = [DType::F32, DType::F16, DType::U8, DType::I8];
const LEVELS: [SimdLevel; 3] = [SimdLevel::Scalar, SimdLevel::Avx2, SimdLevel::Avx512];

/// What elements look like: the kernels see bits, so the shapes are those that could tell two orders apart.
#[derive(Clone, Copy, Debug)]
enum Shape {
    /// Near one: where rounding differs between orders.
    Ordinary,
    /// Any finite value: subnormals, signed zeros, and magnitudes that swallow one another.
    AnyFinite,
    /// The ends of the type's range, and zero.
    Extreme,
}

fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// `dim` elements of `dtype`, native form, the same for a seed.
fn vector(dtype: DType, shape: Shape, dim: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut out = Vec::new();
    for _ in 0..dim {
        let bits = splitmix(&mut state);
        let unit = (bits >> 40) as f32 / (1 << 24) as f32 * 4.0 - 2.0;
        let pick = (bits % 5) as usize;
        match (dtype, shape) {
            (DType::U8, Shape::Extreme) => out.push([0, 255, 128, 127, 255][pick]),
            (DType::I8, Shape::Extreme) => out.push([0i8, 127, -128, -1, -128][pick].cast_unsigned()),
            (DType::U8 | DType::I8, _) => out.push(bits as u8),
            (DType::F32, Shape::Ordinary) => out.extend(unit.to_le_bytes()),
            (DType::F32, Shape::AnyFinite) => {
                let value = f32::from_bits((bits >> 16) as u32);
                out.extend(if value.is_finite() { value } else { -0.0 }.to_le_bytes());
            }
            (DType::F32, Shape::Extreme) => {
                let value = [0.0, f32::MAX, -f32::MAX, f32::from_bits(1), -f32::MIN_POSITIVE][pick];
                out.extend(value.to_le_bytes());
            }
            (DType::F16, Shape::Ordinary) => out.extend(f16::from_f32_const(unit).to_le_bytes()),
            (DType::F16, Shape::AnyFinite) => {
                let value = f16::from_bits((bits >> 16) as u16);
                out.extend(if value.is_finite() { value } else { f16::NEG_ZERO }.to_le_bytes());
            }
            (DType::F16, Shape::Extreme) => {
                let value = [f16::ZERO, f16::MAX, f16::MIN, f16::from_bits(1), f16::NEG_ZERO][pick];
                out.extend(value.to_le_bytes());
            }
        }
    }
    out
}

type Term = fn(f64, f64) -> f64;

/// The distance in `f64`, and how far rounding may take a float kernel from it.
fn reference(metric: Metric, dtype: DType, a: &[u8], b: &[u8]) -> (f64, f64) {
    let pairs = || {
        let (a, b) = (to_f32(dtype, a), to_f32(dtype, b));
        a.into_iter().zip(b).map(|(x, y)| (f64::from(x), f64::from(y)))
    };
    let sum = |term: Term| pairs().map(|(x, y)| term(x, y)).sum::<f64>();
    // Each term passes through two or three roundings of its own, then dim/16 + 4 additions (Higham, section 4.2).
    let additions = a.len().div_ceil(16 * dtype.size()) as f64 + 4.0;
    let unit = f64::from(f32::EPSILON) * (additions + 3.0);
    let square: Term = |x, y| (x - y) * (x - y);
    let product: Term = |x, y| x * y;
    let magnitude: Term = |x, y| (x * y).abs();
    let tiny = 1e-40;
    match metric {
        Metric::L2 => (sum(square), unit * sum(square) + tiny),
        Metric::Ip => (-sum(product), unit * sum(magnitude) + tiny),
        Metric::Cosine => {
            let (norm_a, norm_b) = (sum(|x, _| x * x), sum(|_, y| y * y));
            if norm_a == 0.0 || norm_b == 0.0 {
                return (1.0, 0.0);
            }
            let norms = (norm_a * norm_b).sqrt();
            (1.0 - sum(product) / norms, 3.0 * unit * (sum(magnitude) / norms + 1.0))
        }
    }
}

/// Distances at every level that this CPU has, all equal to scalar's, checked and returned once. The vectors are laid
/// at odd addresses, and end where their allocation ends, so that a read too far is a fault for the sanitizers.
fn check_levels(metric: Metric, dtype: DType, a: &[u8], b: &[u8], offset: usize) -> f32 {
    let shift = |bytes: &[u8]| [&vec![0xff; offset][..], bytes].concat().into_boxed_slice();
    let (shifted_a, shifted_b) = (shift(a), shift(b));
    let (a, b) = (&shifted_a[offset..], &shifted_b[offset..]);
    let dim = a.len() / dtype.size();
    let at = |simd| Distance::with_simd(metric, dtype, dim, simd).eval(a, b);
    let scalar = at(SimdLevel::Scalar);
    for simd in LEVELS.into_iter().filter(|simd| simd.is_available()) {
        let ours = at(simd);
        assert_eq!(
            ours.to_bits(),
            scalar.to_bits(),
            "{metric} {dtype} x{dim} at {simd}: {ours:e}, scalar {scalar:e}"
        );
    }
    assert!(!scalar.is_nan(), "{metric} {dtype} x{dim} gave NaN");
    assert_ne!(scalar.to_bits(), (-0.0f32).to_bits(), "{metric} {dtype} x{dim} gave -0");
    scalar
}

fn check(metric: Metric, dtype: DType, shape: Shape, dim: usize, seed: u64) {
    let (a, b) = (vector(dtype, shape, dim, seed), vector(dtype, shape, dim, !seed));
    let distance = check_levels(metric, dtype, &a, &b, (seed % 9) as usize);
    check_levels(metric, dtype, &a, &a, 1);
    if validate(metric, dtype, &a).is_err() || validate(metric, dtype, &b).is_err() {
        return;
    }
    assert!(distance.is_finite(), "{metric} {dtype} x{dim} of valid vectors is {distance}");
    let (exact, bound) = reference(metric, dtype, &a, &b);
    if matches!(dtype, DType::U8 | DType::I8) && metric != Metric::Cosine {
        assert_eq!(distance, exact as f32, "{metric} {dtype} x{dim}: one rounding of the exact sum");
    } else {
        let error = (f64::from(distance) - exact).abs();
        assert!(
            error <= bound,
            "{metric} {dtype} x{dim} {shape:?} seed {seed}: {distance:e} is {error:e} off {exact:e} (bound {bound:e})"
        );
    }
}

fn all() -> impl Iterator<Item = (Metric, DType)> {
    METRICS.into_iter().flat_map(|metric| DTYPES.into_iter().map(move |dtype| (metric, dtype)))
}

#[test]
fn every_dimension_gives_the_same_bits_at_every_level() {
    for simd in LEVELS.into_iter().filter(|simd| !simd.is_available()) {
        eprintln!("skipped: this CPU has no {simd}");
    }
    for (metric, dtype) in all() {
        for dim in (1..=300).chain([383, 512, 768, 1000, 1536, 4095, 4096]) {
            for shape in [Shape::Ordinary, Shape::AnyFinite, Shape::Extreme] {
                check(metric, dtype, shape, dim, dim as u64);
            }
        }
    }
}

#[test]
fn random_vectors_give_the_same_bits_at_every_level() {
    let shapes = prop_oneof![Just(Shape::Ordinary), Just(Shape::AnyFinite), Just(Shape::Extreme)];
    let mut runner =
        TestRunner::new(ProptestConfig { cases: 2_000, failure_persistence: None, ..Default::default() });
    runner
        .run(
            &(0..METRICS.len(), 0..DTYPES.len(), shapes, 1usize..1200, any::<u64>()),
            |(m, d, shape, dim, seed)| {
                check(METRICS[m], DTYPES[d], shape, dim, seed);
                Ok(())
            },
        )
        .unwrap();
}

#[test]
fn the_widest_sums_fit() {
    for metric in METRICS {
        let (zeros, full) = (vec![0u8; DIMENSION_MAX], vec![255u8; DIMENSION_MAX]);
        let (low, high) = (vec![0x80u8; DIMENSION_MAX], vec![0x7fu8; DIMENSION_MAX]);
        for (dtype, a, b) in [
            (DType::U8, &zeros, &full),
            (DType::U8, &full, &full),
            (DType::I8, &low, &high),
            (DType::I8, &low, &low),
        ] {
            let distance = check_levels(metric, dtype, a, b, 3);
            let (exact, _) = reference(metric, dtype, a, b);
            assert_eq!(distance, exact as f32, "{metric} {dtype}");
        }
    }
}

#[test]
fn edges_of_the_metrics() {
    let f32s = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let eval = |metric, a: &[f32], b: &[f32]| check_levels(metric, DType::F32, &f32s(a), &f32s(b), 0);
    // No direction: as if orthogonal.
    assert_eq!(eval(Metric::Cosine, &[0.0, 0.0], &[1.0, 2.0]), 1.0);
    assert_eq!(eval(Metric::Cosine, &[0.0, 0.0], &[0.0, -0.0]), 1.0);
    assert_eq!(eval(Metric::Cosine, &[3.0, 4.0], &[6.0, 8.0]), 0.0);
    assert_eq!(eval(Metric::Cosine, &[3.0, 4.0], &[-3.0, -4.0]), 2.0);
    assert_eq!(eval(Metric::Ip, &[1.0, 0.0], &[0.0, 1.0]).to_bits(), 0);
    assert_eq!(eval(Metric::Ip, &[-0.0], &[1.0]).to_bits(), 0);
    assert_eq!(eval(Metric::L2, &[1.0, 2.0], &[4.0, -2.0]), 25.0);
    // Vectors that `validate` refuses still have a place in any order: the last.
    assert_eq!(eval(Metric::Ip, &[1e30, 1e30], &[1e30, -1e30]), f32::INFINITY);
    assert_eq!(eval(Metric::L2, &[f32::NAN], &[1.0]), f32::INFINITY);
    assert_eq!(eval(Metric::Cosine, &[f32::INFINITY], &[1.0]), f32::INFINITY);
}

#[test]
fn the_float_order_is_the_written_one() {
    // 1e8 swallows 1 in f32. Lane 0 gets elements 0 and 16, so 1e8 − 1e8 + 1 is 1 only if lanes are kept apart.
    let mut a = [0.0f32; 20];
    (a[0], a[16], a[1], a[17]) = (1e8, -1e8, 1.0, 1.0);
    let bytes: Vec<u8> = a.iter().flat_map(|value| value.to_le_bytes()).collect();
    let ones: Vec<u8> = [1.0f32; 20].iter().flat_map(|value| value.to_le_bytes()).collect();
    assert_eq!(check_levels(Metric::Ip, DType::F32, &bytes, &ones, 0), -2.0);
    // In the tree, lane 8 joins lane 0 first, lane 4 after it.
    let mut a = [0.0f32; 16];
    (a[0], a[8], a[4]) = (1e8, -1e8, 1.0);
    let bytes: Vec<u8> = a.iter().flat_map(|value| value.to_le_bytes()).collect();
    assert_eq!(check_levels(Metric::Ip, DType::F32, &bytes, &ones[..64], 0), -1.0);
    let mut a = [0.0f32; 16];
    (a[0], a[4], a[8]) = (1e8, -1e8, 1.0);
    let bytes: Vec<u8> = a.iter().flat_map(|value| value.to_le_bytes()).collect();
    assert_eq!(check_levels(Metric::Ip, DType::F32, &bytes, &ones[..64], 0), 0.0);
}
