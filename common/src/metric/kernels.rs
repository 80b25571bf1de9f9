//! Distance kernels and their dispatch.

use super::{DType, Metric, SimdLevel};

pub(super) type Kernel = fn(&[u8], &[u8]) -> f32;

pub(super) fn detect() -> SimdLevel {
    SimdLevel::Scalar
}

pub(super) fn select(metric: Metric, dtype: DType, _simd: SimdLevel) -> Kernel {
    match (metric, dtype) {
        (Metric::L2, DType::I8) => |a, b| {
            a.iter().zip(b).map(|(x, y)| (i32::from(*x as i8) - i32::from(*y as i8)).pow(2)).sum::<i32>() as f32
        },
        _ => |_, _| f32::NAN,
    }
}
