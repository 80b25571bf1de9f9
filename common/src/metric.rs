//! Element types, metrics and distances.
//!
//! A distance is an `f32`, smaller is nearer: squared Euclidean (`L2`), minus the inner product (`Ip`), one minus
//! the cosine (`Cosine`, 0 to 2; 1 if a vector is zero). Vectors stay in their native type in memory and on the wire.
//! What comes from outside passes [`validate`]; then every distance is finite.
//!
//! Invariant: for one pair of vectors every [`SimdLevel`] gives the same bits. Integer sums are exact; float sums
//! run in one fixed 16-lane order without fused multiply-add. No distance is NaN or −0, so `total_cmp`, `<` and an
//! order of bits agree.
//!
//! ```
//! use shine_common::metric::{DType, Distance, Metric, from_f64};
//! let distance = Distance::new(Metric::L2, DType::I8, 3);
//! let (a, b) = (from_f64(DType::I8, &[1.0, 2.0, 3.0])?, from_f64(DType::I8, &[1.0, 0.0, 0.0])?);
//! assert_eq!(distance.eval(&a, &b), 13.0);
//! # Ok::<(), shine_common::metric::BadElement>(())
//! ```

mod kernels;
#[cfg(test)]
mod tests;
mod values;

use std::fmt;
use std::str::FromStr;

use rkyv::{Archive, Deserialize, Serialize};

pub use values::{
    BadElement, BadVector, COSINE_NORM_SQUARED_MIN, NORM_SQUARED_MAX, from_f64, to_f32, validate,
};

/// Largest dimension of a vector: the widest sum (255² per element) then fits 32 bits.
pub const DIMENSION_MAX: usize = 32_768;

/// Element type of a vector, little-endian in memory, on the wire and in files.
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    Debug,
    Archive,
    Serialize,
    Deserialize,
    serde::Serialize,
    serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// 32-bit IEEE float.
    F32,
    /// 16-bit IEEE float.
    F16,
    /// Unsigned byte.
    U8,
    /// Signed byte.
    I8,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
            Self::U8 | Self::I8 => 1,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::U8 => "u8",
            Self::I8 => "i8",
        })
    }
}

/// A name that is not one of the known ones.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} '{given}': expected one of {expected}")]
pub struct UnknownName {
    /// What was being named.
    pub what: &'static str,
    /// The text that was given.
    pub given: String,
    /// The accepted names.
    pub expected: &'static str,
}

impl FromStr for DType {
    type Err = UnknownName;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "f32" => Ok(Self::F32),
            "f16" => Ok(Self::F16),
            "u8" => Ok(Self::U8),
            "i8" => Ok(Self::I8),
            _ => Err(UnknownName { what: "dtype", given: text.into(), expected: "f32, f16, u8, i8" }),
        }
    }
}

/// How two vectors are compared.
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    Debug,
    Archive,
    Serialize,
    Deserialize,
    serde::Serialize,
    serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Metric {
    /// Squared Euclidean distance.
    L2,
    /// Minus the inner product.
    Ip,
    /// One minus the cosine of the angle. Vectors are stored as given; norms are taken inside the kernel.
    Cosine,
}

impl fmt::Display for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::L2 => "l2",
            Self::Ip => "ip",
            Self::Cosine => "cosine",
        })
    }
}

impl FromStr for Metric {
    type Err = UnknownName;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "l2" => Ok(Self::L2),
            "ip" => Ok(Self::Ip),
            "cosine" => Ok(Self::Cosine),
            _ => Err(UnknownName { what: "metric", given: text.into(), expected: "l2, ip, cosine" }),
        }
    }
}

/// Which instruction set the kernels use. All give the same bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum SimdLevel {
    /// Plain Rust.
    Scalar,
    /// AVX2 with F16C.
    Avx2,
    /// AVX-512 F, BW and VL, on a CPU that also has the level below.
    Avx512,
}

impl SimdLevel {
    /// The best level that this CPU has.
    pub fn detect() -> Self {
        kernels::detect()
    }

    /// Whether this CPU can run the level.
    pub fn is_available(self) -> bool {
        self <= Self::detect()
    }
}

impl fmt::Display for SimdLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        })
    }
}

impl FromStr for SimdLevel {
    type Err = UnknownName;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "scalar" => Ok(Self::Scalar),
            "avx2" => Ok(Self::Avx2),
            "avx512" => Ok(Self::Avx512),
            _ => {
                Err(UnknownName { what: "simd level", given: text.into(), expected: "scalar, avx2, avx512" })
            }
        }
    }
}

/// Distance between two stored vectors of one type and dimension, dispatched once at construction.
#[derive(Clone, Copy)]
pub struct Distance {
    metric: Metric,
    dtype: DType,
    bytes: usize,
    simd: SimdLevel,
    kernel: kernels::Kernel,
}

impl fmt::Debug for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Distance({} {} x{} {})",
            self.metric,
            self.dtype,
            self.bytes / self.dtype.size(),
            self.simd
        )
    }
}

impl Distance {
    /// Distance of `metric` over vectors of `dim` elements of `dtype`, at the best level of this CPU.
    ///
    /// # Panics
    /// If `dim` is zero or above [`DIMENSION_MAX`]; every way in checks that first.
    pub fn new(metric: Metric, dtype: DType, dim: usize) -> Self {
        Self::with_simd(metric, dtype, dim, SimdLevel::detect())
    }

    /// As [`Self::new`], at a chosen level.
    ///
    /// # Panics
    /// Also if this CPU lacks the level.
    pub fn with_simd(metric: Metric, dtype: DType, dim: usize, simd: SimdLevel) -> Self {
        assert!((1..=DIMENSION_MAX).contains(&dim), "a dimension is 1 to {DIMENSION_MAX}, got {dim}");
        assert!(simd.is_available(), "this CPU has no {simd}");
        Self { metric, dtype, bytes: dim * dtype.size(), simd, kernel: kernels::select(metric, dtype, simd) }
    }

    /// The metric.
    pub fn metric(&self) -> Metric {
        self.metric
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes of one vector.
    pub fn vector_bytes(&self) -> usize {
        self.bytes
    }

    /// Elements of one vector.
    pub fn dimension(&self) -> usize {
        self.bytes / self.dtype.size()
    }

    /// Distance between two vectors in native form.
    ///
    /// # Panics
    /// If a slice is not exactly one vector.
    #[inline]
    pub fn eval(&self, a: &[u8], b: &[u8]) -> f32 {
        assert!(a.len() == self.bytes && b.len() == self.bytes, "a vector here is {} bytes", self.bytes);
        // SAFETY: `with_simd` made sure that this CPU has the level of the kernel.
        unsafe { (self.kernel)(a, b) }
    }
}
