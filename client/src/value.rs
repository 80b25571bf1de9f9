//! Numbers as people write them ↔ vectors in a collection's native type.
//!
//! Invariant: what is stored is what was given. A value that the type cannot hold is refused, never clipped; an
//! integer type takes whole numbers only. Floats are rounded to the nearest value of the type.

use half::f16;
use shine_common::metric::DType;

/// A value that does not fit where it shall be stored.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum BadVector {
    /// The number of elements is not the collection's dimension.
    #[error("{given} elements where the collection has {expected}")]
    Dimension {
        /// Elements given.
        given: usize,
        /// Dimension of the collection.
        expected: usize,
    },
    /// An element that the type cannot hold.
    #[error("element {at} is {value}: expected {}", expectation(*.dtype))]
    Element {
        /// Position, from 0.
        at: usize,
        /// What was given.
        value: f64,
        /// Type that shall hold it.
        dtype: DType,
    },
    /// Bytes that are not whole elements.
    #[error("{bytes} bytes are not whole elements of {dtype}")]
    Ragged {
        /// Bytes given.
        bytes: usize,
        /// Type of the elements.
        dtype: DType,
    },
}

fn expectation(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "a finite number that f32 can hold",
        DType::F16 => "a number that f16 can hold (-65504 to 65504)",
        DType::U8 => "a whole number from 0 to 255 (u8)",
        DType::I8 => "a whole number from -128 to 127 (i8)",
    }
}

/// Encodes `values` as one vector of `dimension` elements of `dtype`.
///
/// ```
/// use shine_client::value::encode;
/// use shine_common::metric::DType;
/// assert_eq!(encode(&[1.0, -2.0], DType::I8, 2).unwrap(), [1, 254]);
/// assert!(encode(&[1.5, 0.0], DType::I8, 2).is_err());
/// ```
///
/// # Errors
/// [`BadVector`] names the first element that does not fit.
pub fn encode(values: &[f64], dtype: DType, dimension: usize) -> Result<Vec<u8>, BadVector> {
    if values.len() != dimension {
        return Err(BadVector::Dimension { given: values.len(), expected: dimension });
    }
    let mut out = Vec::with_capacity(dimension * dtype.size());
    for (at, &value) in values.iter().enumerate() {
        let bad = BadVector::Element { at, value, dtype };
        match dtype {
            DType::F32 => {
                let narrow = value as f32;
                if !narrow.is_finite() {
                    return Err(bad);
                }
                out.extend_from_slice(&narrow.to_le_bytes());
            }
            DType::F16 => {
                let narrow = f16::from_f64(value);
                if !narrow.is_finite() {
                    return Err(bad);
                }
                out.extend_from_slice(&narrow.to_le_bytes());
            }
            DType::U8 => {
                if value.fract() != 0.0 || !(0.0..=255.0).contains(&value) {
                    return Err(bad);
                }
                out.push(value as u8);
            }
            DType::I8 => {
                if value.fract() != 0.0 || !(-128.0..=127.0).contains(&value) {
                    return Err(bad);
                }
                out.push((value as i8) as u8);
            }
        }
    }
    Ok(out)
}

/// The elements of a vector in native form.
///
/// # Errors
/// [`BadVector::Ragged`] if `bytes` are not whole elements.
pub fn decode(bytes: &[u8], dtype: DType) -> Result<Vec<f64>, BadVector> {
    if !bytes.len().is_multiple_of(dtype.size()) {
        return Err(BadVector::Ragged { bytes: bytes.len(), dtype });
    }
    Ok(match dtype {
        DType::F32 => {
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("4 bytes")).into()).collect()
        }
        DType::F16 => {
            bytes.chunks_exact(2).map(|b| f16::from_le_bytes(b.try_into().expect("2 bytes")).into()).collect()
        }
        DType::U8 => bytes.iter().map(|&b| b.into()).collect(),
        DType::I8 => bytes.iter().map(|&b| (b as i8).into()).collect(),
    })
}

/// Turns a vector of `from` elements into one of `dimension` elements of `to`; a plain copy where both are the same,
/// except that floats must still be finite.
///
/// # Errors
/// [`BadVector`] names the first element that does not fit.
pub fn convert(bytes: &[u8], from: DType, to: DType, dimension: usize) -> Result<Vec<u8>, BadVector> {
    if from == to && matches!(to, DType::U8 | DType::I8) {
        return if bytes.len() == dimension {
            Ok(bytes.to_vec())
        } else {
            Err(BadVector::Dimension { given: bytes.len(), expected: dimension })
        };
    }
    encode(&decode(bytes, from)?, to, dimension)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [DType; 4] = [DType::F32, DType::F16, DType::U8, DType::I8];

    #[test]
    fn what_fits_comes_back_unchanged() {
        for dtype in ALL {
            let values = [0.0, 1.0, 127.0];
            let bytes = encode(&values, dtype, 3).unwrap();
            assert_eq!(bytes.len(), 3 * dtype.size());
            assert_eq!(decode(&bytes, dtype).unwrap(), values);
            for to in ALL {
                assert_eq!(convert(&bytes, dtype, to, 3).unwrap(), encode(&values, to, 3).unwrap());
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_named() {
        for (value, dtype) in [
            (f64::NAN, DType::F32),
            (f64::INFINITY, DType::F32),
            (1e39, DType::F32),
            (f64::NAN, DType::F16),
            (65520.0, DType::F16),
            (-1.0, DType::U8),
            (256.0, DType::U8),
            (0.5, DType::U8),
            (f64::NAN, DType::U8),
            (128.0, DType::I8),
            (-129.0, DType::I8),
            (-0.25, DType::I8),
            (f64::NEG_INFINITY, DType::I8),
        ] {
            let error = encode(&[0.0, value], dtype, 2).unwrap_err();
            assert!(matches!(error, BadVector::Element { at: 1, .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains("element 1") && text.contains(&dtype.to_string()), "{text}");
        }
        assert_eq!(
            encode(&[1.0], DType::I8, 2).unwrap_err().to_string(),
            "1 elements where the collection has 2"
        );
        assert_eq!(decode(&[0; 6], DType::F32), Err(BadVector::Ragged { bytes: 6, dtype: DType::F32 }));
    }

    #[test]
    fn a_float_copy_still_refuses_what_is_not_finite() {
        let nan = f32::NAN.to_le_bytes();
        assert!(convert(&nan, DType::F32, DType::F32, 1).is_err());
        assert!(convert(&[1, 2, 3], DType::I8, DType::I8, 2).is_err());
    }
}
