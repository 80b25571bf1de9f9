//! Distance kernels: one text for all instruction sets.
//!
//! The macros below are the kernels. Each level (`scalar`, `avx2`, `avx512`) brings primitives over 16 float lanes or
//! a block of bytes, and the macros put them together, so that the order of operations cannot differ:
//!
//! ```text
//! element i of a float vector goes to lane i mod 16, in order of i; a vector that ends inside a block is padded
//! with zeros. Then lanes l and l + 8 are added, then l and l + 4, l + 2, l + 1. Multiply, round, add, round.
//! ```
//!
//! Integer sums are exact in 32 bits (see `DIMENSION_MAX`), so there any order will do.
//!
//! Invariant: no kernel returns NaN or −0. A lane starts at +0, and +0 + (−0) = +0, so padding changes no bit.

use super::{DType, Metric, SimdLevel};

/// A kernel over two vectors of equal length in native form.
///
/// # Safety
/// The CPU must have the level that the kernel was selected for.
pub(super) type Kernel = unsafe fn(&[u8], &[u8]) -> f32;

/// The best level of this CPU.
pub(super) fn detect() -> SimdLevel {
    #[cfg(target_arch = "x86_64")]
    {
        let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl");
        match (avx2, avx512) {
            (true, true) => SimdLevel::Avx512,
            (true, false) => SimdLevel::Avx2,
            _ => SimdLevel::Scalar,
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    SimdLevel::Scalar
}

macro_rules! table {
    ($level:ident, $metric:expr, $dtype:expr) => {
        match ($metric, $dtype) {
            (Metric::L2, DType::F32) => $level::l2_f32 as Kernel,
            (Metric::L2, DType::F16) => $level::l2_f16,
            (Metric::L2, DType::U8) => $level::l2_u8,
            (Metric::L2, DType::I8) => $level::l2_i8,
            (Metric::Ip, DType::F32) => $level::ip_f32,
            (Metric::Ip, DType::F16) => $level::ip_f16,
            (Metric::Ip, DType::U8) => $level::ip_u8,
            (Metric::Ip, DType::I8) => $level::ip_i8,
            (Metric::Cosine, DType::F32) => $level::cosine_f32,
            (Metric::Cosine, DType::F16) => $level::cosine_f16,
            (Metric::Cosine, DType::U8) => $level::cosine_u8,
            (Metric::Cosine, DType::I8) => $level::cosine_i8,
        }
    };
}

/// The kernel for a metric and type at a level.
pub(super) fn select(metric: Metric, dtype: DType, simd: SimdLevel) -> Kernel {
    match simd {
        SimdLevel::Scalar => table!(scalar, metric, dtype),
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx2 => table!(avx2, metric, dtype),
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx512 => table!(avx512, metric, dtype),
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("only x86-64 reports these levels"),
    }
}

/// The three kernels of a float type. `$load` takes a block of `$block` bytes (16 elements), `$tail` the whole vector,
/// of which it loads what follows the last whole block, zero-padded.
macro_rules! float_kernels {
    ($(#[$feature:meta])? $l2:ident, $ip:ident, $cosine:ident, $block:literal, $load:ident, $tail:ident) => {
        $(#[$feature])?
        pub(in crate::metric) fn $l2(a: &[u8], b: &[u8]) -> f32 {
            let ((xs, x_tail), (ys, _)) = (a.as_chunks::<$block>(), b.as_chunks::<$block>());
            let mut sum = zero();
            for (x, y) in xs.iter().zip(ys) {
                let difference = sub($load(x), $load(y));
                sum = add(sum, mul(difference, difference));
            }
            if !x_tail.is_empty() {
                let difference = sub($tail(a), $tail(b));
                sum = add(sum, mul(difference, difference));
            }
            super::l2_distance(reduce(sum))
        }

        $(#[$feature])?
        pub(in crate::metric) fn $ip(a: &[u8], b: &[u8]) -> f32 {
            let ((xs, x_tail), (ys, _)) = (a.as_chunks::<$block>(), b.as_chunks::<$block>());
            let mut sum = zero();
            for (x, y) in xs.iter().zip(ys) {
                sum = add(sum, mul($load(x), $load(y)));
            }
            if !x_tail.is_empty() {
                sum = add(sum, mul($tail(a), $tail(b)));
            }
            super::ip_distance(reduce(sum))
        }

        $(#[$feature])?
        pub(in crate::metric) fn $cosine(a: &[u8], b: &[u8]) -> f32 {
            let ((xs, x_tail), (ys, _)) = (a.as_chunks::<$block>(), b.as_chunks::<$block>());
            let (mut dot, mut norm_a, mut norm_b) = (zero(), zero(), zero());
            for (x, y) in xs.iter().zip(ys) {
                let (x, y) = ($load(x), $load(y));
                dot = add(dot, mul(x, y));
                norm_a = add(norm_a, mul(x, x));
                norm_b = add(norm_b, mul(y, y));
            }
            if !x_tail.is_empty() {
                let (x, y) = ($tail(a), $tail(b));
                dot = add(dot, mul(x, y));
                norm_a = add(norm_a, mul(x, x));
                norm_b = add(norm_b, mul(y, y));
            }
            super::cosine_distance(reduce(dot).into(), reduce(norm_a).into(), reduce(norm_b).into())
        }
    };
}

/// The three kernels of a byte type. `$load` takes a block of `$block` bytes, `$tail` the whole vector, of which it
/// loads what follows the last whole block, zero-padded; `$squares` and `$products` give 32-bit sums of squared
/// differences and of products.
macro_rules! byte_kernels {
    ($(#[$feature:meta])? $l2:ident, $ip:ident, $cosine:ident, $block:literal, $squares:ident, $products:ident, $widen:ident) => {
        $(#[$feature])?
        pub(in crate::metric) fn $l2(a: &[u8], b: &[u8]) -> f32 {
            let ((xs, x_tail), (ys, _)) = (a.as_chunks::<$block>(), b.as_chunks::<$block>());
            let mut sum = zero_bytes();
            for (x, y) in xs.iter().zip(ys) {
                sum = add_bytes(sum, $squares(load_bytes(x), load_bytes(y)));
            }
            if !x_tail.is_empty() {
                sum = add_bytes(sum, $squares(tail_bytes(a), tail_bytes(b)));
            }
            reduce_bytes(sum) as f32
        }

        $(#[$feature])?
        pub(in crate::metric) fn $ip(a: &[u8], b: &[u8]) -> f32 {
            let ((xs, x_tail), (ys, _)) = (a.as_chunks::<$block>(), b.as_chunks::<$block>());
            let mut sum = zero_bytes();
            for (x, y) in xs.iter().zip(ys) {
                sum = add_bytes(sum, $products($widen(load_bytes(x)), $widen(load_bytes(y))));
            }
            if !x_tail.is_empty() {
                sum = add_bytes(sum, $products($widen(tail_bytes(a)), $widen(tail_bytes(b))));
            }
            -reduce_bytes(sum) as f32
        }

        $(#[$feature])?
        pub(in crate::metric) fn $cosine(a: &[u8], b: &[u8]) -> f32 {
            let ((xs, x_tail), (ys, _)) = (a.as_chunks::<$block>(), b.as_chunks::<$block>());
            let (mut dot, mut norm_a, mut norm_b) = (zero_bytes(), zero_bytes(), zero_bytes());
            for (x, y) in xs.iter().zip(ys) {
                let (x, y) = ($widen(load_bytes(x)), $widen(load_bytes(y)));
                dot = add_bytes(dot, $products(x, y));
                norm_a = add_bytes(norm_a, $products(x, x));
                norm_b = add_bytes(norm_b, $products(y, y));
            }
            if !x_tail.is_empty() {
                let (x, y) = ($widen(tail_bytes(a)), $widen(tail_bytes(b)));
                dot = add_bytes(dot, $products(x, y));
                norm_a = add_bytes(norm_a, $products(x, x));
                norm_b = add_bytes(norm_b, $products(y, y));
            }
            super::cosine_distance(
                reduce_bytes(dot).into(),
                reduce_bytes(norm_a).into(),
                reduce_bytes(norm_b).into(),
            )
        }
    };
}

mod scalar;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

/// What is not a number is farthest: only vectors that `validate` refuses lead here.
#[inline]
fn l2_distance(sum: f32) -> f32 {
    if sum.is_nan() { f32::INFINITY } else { sum }
}

/// `0 − dot` and not `−dot`: orthogonal vectors are at +0, so that comparing bits and comparing values agree.
#[inline]
fn ip_distance(dot: f32) -> f32 {
    let distance = 0.0 - dot;
    if distance.is_nan() { f32::INFINITY } else { distance }
}

/// One rounding to `f32` at the end: the quotient is taken in `f64`, where no product of two norms overflows.
/// Rounding must not make a distance negative or larger than 2.
#[inline]
fn cosine_distance(dot: f64, norm_a: f64, norm_b: f64) -> f32 {
    if norm_a == 0.0 || norm_b == 0.0 {
        return 1.0;
    }
    let distance = 1.0 - dot / (norm_a * norm_b).sqrt();
    if distance.is_nan() {
        f32::INFINITY
    } else if distance <= 0.0 {
        0.0
    } else {
        distance.min(2.0) as f32
    }
}
