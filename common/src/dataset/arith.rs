//! Random numbers and elementary functions with the same bits on every x86-64 CPU.
//!
//! Invariant: only `+ − × ÷ √`, rounding, comparison and moves of bits, each of which IEEE 754 defines to the last
//! bit, in an order fixed by the text. No libm, whose `ln` and `exp` differ between versions; no fused
//! multiply-add, which rustc never introduces by itself; no table that was computed at run time.

#![allow(clippy::excessive_precision, reason = "coefficients stand as published")]

use std::f64::consts::{LN_2, SQRT_2};

use rand::Rng;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// A stream of its own for each (`seed`, `domain`, `index`).
pub(super) fn stream(seed: u64, domain: u64, index: u64) -> ChaCha8Rng {
    let mut key = *b"........ shine  ................";
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[16..24].copy_from_slice(&domain.to_le_bytes());
    key[24..].copy_from_slice(&index.to_le_bytes());
    ChaCha8Rng::from_seed(key)
}

/// Uniform in (0, 1), never either end: 52 bits and a half.
pub(super) fn uniform(rng: &mut impl Rng) -> f64 {
    const STEP: f64 = 1.0 / (1u64 << 52) as f64;
    ((rng.next_u64() >> 12) as f64 + 0.5) * STEP
}

/// Uniform in `0..bound`, without bias.
///
/// # Panics
/// If `bound` is zero.
pub(super) fn below(rng: &mut impl Rng, bound: u64) -> u64 {
    assert!(bound > 0, "a number below zero does not exist");
    // Words above the last whole multiple of `bound` are drawn again; that is at most every second.
    let rest = (u64::MAX % bound + 1) % bound;
    loop {
        let word = rng.next_u64();
        if word <= u64::MAX - rest {
            return word % bound;
        }
    }
}

/// Natural logarithm of a positive normal number.
pub(super) fn ln(x: f64) -> f64 {
    debug_assert!(x >= f64::MIN_POSITIVE && x.is_finite());
    let bits = x.to_bits();
    let mut exponent = ((bits >> 52) as i64 - 1023) as f64;
    let mut m = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    if m > SQRT_2 {
        m *= 0.5;
        exponent += 1.0;
    }
    // ln m = 2 (s + s³/3 + s⁵/5 + …), |s| ≤ 0.172: the term in s²⁵ is below 2⁻⁶⁰.
    let s = (m - 1.0) / (m + 1.0);
    let square = s * s;
    let mut sum = 0.0;
    for odd in [23.0, 21.0, 19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
        sum = sum * square + 1.0 / odd;
    }
    exponent * LN_2 + 2.0 * s * sum
}

/// e to the `x`, for |x| ≤ 700.
pub(super) fn exp(x: f64) -> f64 {
    debug_assert!(x.abs() <= 700.0);
    // ln 2 in two parts; the first has zeros at its end, so that its products here are exact.
    const LN_2_HIGH: f64 = f64::from_bits(0x3fe6_2e42_fee0_0000);
    const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    let halvings = (x / LN_2).round_ties_even();
    let r = (x - halvings * LN_2_HIGH) - halvings * LN_2_LOW;
    // Taylor, |r| ≤ 0.347: the term of degree 14 is below 2⁻⁵⁷.
    let mut sum = 1.0;
    for degree in [13.0, 12.0, 11.0, 10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0] {
        sum = 1.0 + sum * r / degree;
    }
    sum * f64::from_bits(((halvings as i64 + 1023) as u64) << 52)
}

/// `x` to the `power`, for positive `x`.
pub(super) fn pow(x: f64, power: f64) -> f64 {
    exp(power * ln(x))
}

/// Fills `out` with standard normal numbers, one 32-bit draw each.
pub(super) fn fill_normal(rng: &mut impl Rng, out: &mut [f32]) {
    const STEP: f64 = 1.0 / (1u64 << 32) as f64;
    let mut p = [0f64; 64];
    let mut z = [0f64; 64];
    for out in out.chunks_mut(p.len()) {
        for p in &mut p[..out.len()] {
            *p = (f64::from(rng.next_u32()) + 0.5) * STEP;
        }
        // The middle's formula for all (a plain loop, which compiles to vectors), then the tails over it.
        for (z, p) in z.iter_mut().zip(p) {
            *z = quantile_middle(p - 0.5);
        }
        for ((out, z), p) in out.iter_mut().zip(z).zip(p) {
            let q = p - 0.5;
            *out = if q.abs() <= MIDDLE { z } else { quantile_tail(p, q) } as f32;
        }
    }
}

/// Half-width of the middle part of the normal quantile function.
const MIDDLE: f64 = 0.425;

/// `c[0] + c[1] x + …`
#[inline(always)]
fn polynomial<const N: usize>(c: [f64; N], x: f64) -> f64 {
    let mut sum = c[N - 1];
    for at in (0..N - 1).rev() {
        sum = sum * x + c[at];
    }
    sum
}

/// Normal quantile at `0.5 + q`, |q| ≤ [`MIDDLE`]: Wichura, Algorithm AS 241 (PPND16), 1988.
#[inline(always)]
fn quantile_middle(q: f64) -> f64 {
    let r = 0.180625 - q * q;
    q * polynomial(
        [
            3.387_132_872_796_366_608,
            133.141_667_891_784_377_45,
            1_971.590_950_306_551_442_7,
            13_731.693_765_509_461_125,
            45_921.953_931_549_871_457,
            67_265.770_927_008_700_853,
            33_430.575_583_588_128_105,
            2_509.080_928_730_122_672_7,
        ],
        r,
    ) / polynomial(
        [
            1.0,
            42.313_330_701_600_911_252,
            687.187_007_492_057_908_30,
            5_394.196_021_424_751_107_7,
            21_213.794_301_586_595_867,
            39_307.895_800_092_710_610,
            28_729.085_735_721_942_674,
            5_226.495_278_852_854_561_0,
        ],
        r,
    )
}

/// Normal quantile at `p` outside the middle; `q` is `p − 0.5`.
fn quantile_tail(p: f64, q: f64) -> f64 {
    let r = (-ln(if q < 0.0 { p } else { 1.0 - p })).sqrt();
    let z = if r <= 5.0 {
        let r = r - 1.6;
        polynomial(
            [
                1.423_437_110_749_683_577_34,
                4.630_337_846_156_545_295_90,
                5.769_497_221_460_691_405_50,
                3.647_848_324_763_204_605_04,
                1.270_458_252_452_368_382_58,
                0.241_780_725_177_450_611_770,
                0.022_723_844_989_269_184_583_3,
                7.745_450_142_783_414_076_40e-4,
            ],
            r,
        ) / polynomial(
            [
                1.0,
                2.053_191_626_637_758_821_87,
                1.676_384_830_183_803_849_40,
                0.689_767_334_985_100_004_550,
                0.148_103_976_427_480_074_590,
                0.015_198_666_563_616_457_196_6,
                5.475_938_084_995_344_946_00e-4,
                1.050_750_071_644_416_843_24e-9,
            ],
            r,
        )
    } else {
        let r = r - 5.0;
        polynomial(
            [
                6.657_904_643_501_103_777_20,
                5.463_784_911_164_114_369_90,
                1.784_826_539_917_291_335_80,
                0.296_560_571_828_504_891_230,
                0.026_532_189_526_576_123_093_0,
                1.242_660_947_388_078_438_60e-3,
                2.711_555_568_743_487_578_15e-5,
                2.010_334_399_292_288_132_65e-7,
            ],
            r,
        ) / polynomial(
            [
                1.0,
                0.599_832_206_555_887_937_690,
                0.136_929_880_922_735_805_310,
                0.014_875_361_290_850_614_852_5,
                7.868_691_311_456_132_591_00e-4,
                1.846_318_317_510_054_681_80e-5,
                1.421_511_758_316_445_888_70e-7,
                2.044_263_103_389_939_785_64e-15,
            ],
            r,
        )
    };
    if q < 0.0 { -z } else { z }
}

/// A table for drawing numbers with given weights.
pub(super) struct Weighted {
    /// Sum of the weights up to and with each number.
    sums: Vec<f64>,
}

impl Weighted {
    /// Weights of numbers 0, 1, …; none negative, not all zero.
    pub(super) fn new(weights: impl Iterator<Item = f64>) -> Self {
        let mut sum = 0.0;
        let sums: Vec<f64> = weights
            .map(|weight| {
                sum += weight;
                sum
            })
            .collect();
        assert!(sum > 0.0 && sum.is_finite(), "some weight is positive");
        Self { sums }
    }

    /// Weights 1, 2^−power, 3^−power, … for `count` numbers.
    pub(super) fn power_law(count: usize, power: f64) -> Self {
        Self::new((1..=count).map(|rank| pow(rank as f64, -power)))
    }

    /// Draws a number.
    pub(super) fn draw(&self, rng: &mut impl Rng) -> usize {
        let last = self.sums.len() - 1;
        let at = uniform(rng) * self.sums[last];
        self.sums.partition_point(|sum| *sum <= at).min(last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantile(p: f64) -> f64 {
        let q = p - 0.5;
        if q.abs() <= MIDDLE { quantile_middle(q) } else { quantile_tail(p, q) }
    }

    #[test]
    fn functions_agree_with_the_library() {
        let mut rng = stream(1, 0, 0);
        for _ in 0..20_000 {
            let x = (uniform(&mut rng) - 0.5) * 80.0;
            assert!((exp(x) / x.exp() - 1.0).abs() < 1e-14, "exp {x}");
            let y = x.exp();
            assert!((ln(y) - y.ln()).abs() < 1e-14 * (1.0 + x.abs()), "ln {y}");
            assert!((pow(y, 0.3) / y.powf(0.3) - 1.0).abs() < 2e-14, "pow {y}");
        }
        assert_eq!((exp(0.0), ln(1.0), pow(1.0, -0.8)), (1.0, 0.0, 1.0));
    }

    #[test]
    fn the_normal_quantile_is_that_of_the_tables() {
        for (p, z) in [
            (0.5, 0.0),
            (0.8, 0.841_621_233_572_914_2),
            (0.925, 1.439_531_470_938_455_7),
            (0.975, 1.959_963_984_540_054),
            (0.001, -3.090_232_306_167_813_5),
            (1e-10, -6.361_340_902_404_056),
            (1e-20, -9.262_340_089_798_408),
        ] {
            assert!((quantile(p) - z).abs() < 1e-13 * (1.0 + z.abs()), "{p}: {} instead of {z}", quantile(p));
        }
    }

    #[test]
    fn normal_numbers_have_the_moments_of_the_normal() {
        let mut z = vec![0f32; 400_001];
        fill_normal(&mut stream(2, 0, 0), &mut z);
        let moment = |power: i32| z.iter().map(|z| f64::from(*z).powi(power)).sum::<f64>() / z.len() as f64;
        // Four standard errors: 1/√n, √2/√n, √15/√n, √96/√n.
        for (power, expected, spread) in [(1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0f64)] {
            let found = moment(power);
            assert!(
                (found - expected).abs() < 4.0 * (spread / z.len() as f64).sqrt(),
                "moment {power}: {found}"
            );
        }
    }

    #[test]
    fn weighted_draws_follow_the_weights() {
        let weighted = Weighted::new([1.0, 0.0, 3.0].into_iter());
        let mut rng = stream(3, 0, 0);
        let mut counts = [0; 3];
        (0..40_000).for_each(|_| counts[weighted.draw(&mut rng)] += 1);
        assert_eq!(counts[1], 0);
        assert!((counts[0] - 10_000i32).abs() < 350, "{counts:?}"); // four standard errors
        let mut below_3 = [0; 3];
        (0..30_000).for_each(|_| below_3[below(&mut rng, 3) as usize] += 1);
        assert!(below_3.iter().all(|count: &i32| (count - 10_000).abs() < 330), "{below_3:?}");
        assert_eq!(below(&mut rng, 1), 0);
    }

    #[test]
    fn streams_are_their_own() {
        let first = |seed, domain, index| stream(seed, domain, index).next_u64();
        let all = [first(1, 0, 0), first(0, 1, 0), first(0, 0, 1), first(0, 0, 0)];
        assert!((0..4).all(|a| (0..a).all(|b| all[a] != all[b])));
        assert_eq!(first(7, 8, 9), first(7, 8, 9));
    }
}
