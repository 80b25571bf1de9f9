//! Vectors from outside: what may enter, and conversion from and to numbers as people write them.

use half::f16;

use super::{DType, Metric};

/// Largest squared norm of a vector. For two such vectors (‖a‖ + ‖b‖)² is finite, so no distance, and no sum on the way
/// to one, overflows.
pub const NORM_SQUARED_MAX: f64 = f32::MAX as f64 / 4.0;
/// Smallest squared norm of a vector under [`Metric::Cosine`]. Below, squares of elements leave the normal range of
/// `f32` and the angle would be noise.
pub const COSINE_NORM_SQUARED_MIN: f64 = 1.0 / (1u128 << 100) as f64;

/// Why bytes are not a vector that may be stored or searched for.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BadVector {
    /// The bytes end inside an element, or there are none.
    #[error("{bytes} bytes are not a whole number of {dtype} elements, at least one")]
    Length {
        /// Bytes given.
        bytes: usize,
        /// Type expected.
        dtype: DType,
    },
    /// An element is NaN or infinite.
    #[error("element {index} is {value}: a vector holds finite numbers only")]
    NotFinite {
        /// Which element, from 0.
        index: usize,
        /// What it is.
        value: f32,
    },
    /// Distances to the vector would overflow.
    #[error(
        "the squared norm is {norm_squared:e}: at most {NORM_SQUARED_MAX:e}, so that no distance overflows"
    )]
    TooLarge {
        /// The squared norm.
        norm_squared: f64,
    },
    /// The vector has no direction, which the cosine needs.
    #[error("the squared norm is {norm_squared:e}: the cosine needs at least {COSINE_NORM_SQUARED_MIN:e}")]
    ZeroNorm {
        /// The squared norm.
        norm_squared: f64,
    },
}

/// Checks a vector in native form from a client, a file or a peer. Between two vectors that pass, every distance of
/// `metric` is a finite number. The caller checks the dimension.
///
/// # Errors
/// [`BadVector`], naming the first bad element.
pub fn validate(metric: Metric, dtype: DType, vector: &[u8]) -> Result<(), BadVector> {
    if vector.is_empty() || !vector.len().is_multiple_of(dtype.size()) {
        return Err(BadVector::Length { bytes: vector.len(), dtype });
    }
    // Bytes are always finite, and their norms below 2^31: only the cosine can object.
    if matches!(dtype, DType::U8 | DType::I8) {
        return match metric {
            Metric::Cosine if vector.iter().all(|byte| *byte == 0) => {
                Err(BadVector::ZeroNorm { norm_squared: 0.0 })
            }
            _ => Ok(()),
        };
    }
    let mut norm_squared = 0.0;
    for (index, value) in elements(dtype, vector).enumerate() {
        if !value.is_finite() {
            return Err(BadVector::NotFinite { index, value });
        }
        norm_squared += f64::from(value) * f64::from(value);
    }
    if norm_squared > NORM_SQUARED_MAX {
        return Err(BadVector::TooLarge { norm_squared });
    }
    if metric == Metric::Cosine && norm_squared < COSINE_NORM_SQUARED_MIN {
        return Err(BadVector::ZeroNorm { norm_squared });
    }
    Ok(())
}

/// A number that has no place in the element type.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("element {index} is {value}: {dtype} holds {}", accepted(*dtype))]
pub struct BadElement {
    /// Which element, from 0.
    pub index: usize,
    /// The number given.
    pub value: f64,
    /// The type that was to hold it.
    pub dtype: DType,
}

fn accepted(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "finite numbers up to 3.4e38",
        DType::F16 => "finite numbers up to 65504",
        DType::U8 => "whole numbers from 0 to 255",
        DType::I8 => "whole numbers from -128 to 127",
    }
}

/// A vector in native form from numbers. Floats are rounded to the nearest; for the byte types only whole numbers in
/// range will do.
///
/// ```
/// use shine_common::metric::{DType, from_f64, to_f32};
/// assert_eq!(from_f64(DType::I8, &[-1.0, 7.0]).unwrap(), [255, 7]);
/// assert_eq!(from_f64(DType::U8, &[3.0, 256.0]).unwrap_err().index, 1);
/// assert_eq!(to_f32(DType::I8, &[255, 7]), [-1.0, 7.0]);
/// ```
///
/// # Errors
/// [`BadElement`] for the first number that the type cannot hold.
pub fn from_f64(dtype: DType, values: &[f64]) -> Result<Vec<u8>, BadElement> {
    let mut out = Vec::with_capacity(values.len() * dtype.size());
    for (index, &value) in values.iter().enumerate() {
        let whole = |range: std::ops::RangeInclusive<f64>| value.fract() == 0.0 && range.contains(&value);
        let fits = match dtype {
            DType::F32 => {
                out.extend((value as f32).to_le_bytes());
                (value as f32).is_finite()
            }
            DType::F16 => {
                let half = f16::from_f64(value);
                out.extend(half.to_le_bytes());
                half.is_finite()
            }
            DType::U8 => {
                out.push(value as u8);
                whole(0.0..=255.0)
            }
            DType::I8 => {
                out.push((value as i8).cast_unsigned());
                whole(-128.0..=127.0)
            }
        };
        if !fits {
            return Err(BadElement { index, value, dtype });
        }
    }
    Ok(out)
}

/// The elements of a vector in native form, each exactly. Bytes behind the last whole element are left out.
pub fn to_f32(dtype: DType, vector: &[u8]) -> Vec<f32> {
    elements(dtype, vector).collect()
}

fn elements(dtype: DType, vector: &[u8]) -> impl Iterator<Item = f32> + '_ {
    vector.chunks_exact(dtype.size()).map(move |element| match (dtype, element) {
        (DType::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (DType::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
        (DType::U8, &[a]) => f32::from(a),
        (DType::I8, &[a]) => f32::from(a.cast_signed()),
        _ => unreachable!("chunks have the size of an element"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f32s(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    #[test]
    fn bad_vectors_are_named() {
        let check = |metric, values: &[f32]| validate(metric, DType::F32, &f32s(values));
        assert_eq!(check(Metric::L2, &[0.0, -0.0]), Ok(()));
        assert_eq!(
            check(Metric::L2, &[1.0, f32::INFINITY]),
            Err(BadVector::NotFinite { index: 1, value: f32::INFINITY })
        );
        assert!(matches!(
            check(Metric::Ip, &[1.0, 2.0, f32::NAN]),
            Err(BadVector::NotFinite { index: 2, .. })
        ));
        assert!(matches!(check(Metric::L2, &[1e19, 1.0]), Err(BadVector::TooLarge { .. })));
        assert!(matches!(check(Metric::Cosine, &[0.0, 0.0]), Err(BadVector::ZeroNorm { .. })));
        assert!(matches!(check(Metric::Cosine, &[1e-30, 0.0]), Err(BadVector::ZeroNorm { .. })));
        assert_eq!(check(Metric::Cosine, &[1e-12, 0.0]), Ok(()));
        assert!(matches!(validate(Metric::L2, DType::F32, &[0; 6]), Err(BadVector::Length { bytes: 6, .. })));
        assert!(matches!(validate(Metric::L2, DType::U8, &[]), Err(BadVector::Length { bytes: 0, .. })));
        assert!(matches!(validate(Metric::Cosine, DType::I8, &[0; 4]), Err(BadVector::ZeroNorm { .. })));
        assert_eq!(validate(Metric::Cosine, DType::I8, &[0, 128]), Ok(()));
        let half = [f16::ONE.to_le_bytes(), f16::NEG_INFINITY.to_le_bytes()].concat();
        assert!(matches!(
            validate(Metric::L2, DType::F16, &half),
            Err(BadVector::NotFinite { index: 1, .. })
        ));
    }

    #[test]
    fn numbers_enter_only_where_they_fit() {
        let check = |dtype, value: f64| from_f64(dtype, &[0.0, value]).map(|bytes| to_f32(dtype, &bytes)[1]);
        let bad = |dtype, value: f64| {
            let error = from_f64(dtype, &[0.0, value]).unwrap_err();
            assert_eq!((error.index, error.dtype), (1, dtype));
            error.to_string()
        };
        assert_eq!(check(DType::U8, 255.0), Ok(255.0));
        assert_eq!(check(DType::I8, -128.0), Ok(-128.0));
        assert_eq!(check(DType::F16, 65504.0), Ok(65504.0));
        assert_eq!(check(DType::F32, 0.1), Ok(0.1));
        assert_eq!(bad(DType::U8, 256.0), "element 1 is 256: u8 holds whole numbers from 0 to 255");
        for (dtype, value) in [
            (DType::U8, -1.0),
            (DType::U8, 0.5),
            (DType::I8, 128.0),
            (DType::I8, f64::NAN),
            (DType::F16, 65520.0),
            (DType::F16, f64::INFINITY),
            (DType::F32, 3.5e38),
            (DType::F32, f64::NAN),
        ] {
            bad(dtype, value);
        }
    }
}
