//! From any format and element type to any other, with every value checked.

use std::path::Path;

use half::f16;

use super::vectors::decode_f32;
use super::{Content, DataError, Format, Progress, VectorWriter, Vectors};
use crate::metric::DType;

/// Rows converted between two calls of the progress function.
const ROWS_PER_STEP: usize = 4096;

/// How values are fitted to the new type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Conversion {
    /// Element type of the new file; none means what its format says, and for npy the type of the source.
    pub dtype: Option<DType>,
    /// Every value is multiplied by this first (1 = left alone).
    pub scale: f64,
    /// Values outside the range of the new type become the nearest that it holds, instead of an error.
    pub clip: bool,
}

impl Default for Conversion {
    fn default() -> Self {
        Self { dtype: None, scale: 1.0, clip: false }
    }
}

/// What a conversion did.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Converted {
    /// Rows written.
    pub rows: u64,
    /// Elements of one row.
    pub dim: usize,
    /// Element type written.
    pub dtype: DType,
    /// Values that the new type holds only approximately.
    pub rounded: u64,
    /// Values that were moved into the range of the new type.
    pub clipped: u64,
    /// Length of all differences against length of all (scaled) values: 0 is lossless.
    pub relative_error: f64,
}

/// Writes `source` as `target`, whose extension names the format. Rounding is to the nearest, ties to even.
///
/// # Errors
/// If a value is NaN or infinite, or does not fit the new type (unless `conversion.clip`): named by row and column.
/// Nothing is left then.
pub fn convert(
    source: &Vectors,
    target: impl AsRef<Path>,
    conversion: Conversion,
    progress: Progress<'_>,
) -> Result<Converted, DataError> {
    let target = target.as_ref();
    let dtype = conversion.dtype.unwrap_or(match Format::of(target)?.content() {
        Content::Vectors(dtype) => dtype,
        Content::AnyVectors | Content::Truth => source.dtype(),
    });
    let mut writer = VectorWriter::create(target, dtype, source.dim())?;
    let mut tally = Tally::default();
    let mut values = vec![0f32; source.dim()];
    let mut out = Vec::with_capacity(source.dim() * dtype.size());
    for (row, bytes) in source.iter().enumerate() {
        decode_f32(source.dtype(), bytes, &mut values);
        if let Some(column) = values.iter().position(|value| !value.is_finite()) {
            let value = values[column];
            return Err(DataError::NotFinite { path: source.path().to_owned(), row, column, value });
        }
        out.clear();
        for (column, value) in values.iter().enumerate() {
            let scaled = f64::from(*value) * conversion.scale;
            if !encode(scaled, dtype, conversion.clip, &mut out, &mut tally) {
                return Err(DataError::DoesNotFit {
                    path: source.path().to_owned(),
                    row,
                    column,
                    value: scaled,
                    wanted: dtype,
                });
            }
        }
        writer.push(&out)?;
        if (row + 1) % ROWS_PER_STEP == 0 || row + 1 == source.rows() {
            progress(row as u64 + 1, source.rows() as u64);
        }
    }
    let rows = writer.finish()?;
    let relative_error = if tally.lost == 0.0 { 0.0 } else { (tally.lost / tally.whole).sqrt() };
    let Tally { rounded, clipped, .. } = tally;
    Ok(Converted { rows, dim: source.dim(), dtype, rounded, clipped, relative_error })
}

#[derive(Default)]
struct Tally {
    rounded: u64,
    clipped: u64,
    lost: f64,
    whole: f64,
}

/// Appends `value` as `dtype`; false if it does not fit.
fn encode(value: f64, dtype: DType, clip: bool, out: &mut Vec<u8>, tally: &mut Tally) -> bool {
    let (low, high) = match dtype {
        DType::F32 => (f64::from(f32::MIN), f64::from(f32::MAX)),
        DType::F16 => (f16::MIN.to_f64(), f16::MAX.to_f64()),
        DType::U8 => (0.0, 255.0),
        DType::I8 => (-128.0, 127.0),
    };
    let nearest = |value: f64| match dtype {
        DType::F32 => f64::from(value as f32),
        DType::F16 => f16::from_f64(value).to_f64(),
        DType::U8 | DType::I8 => value.round_ties_even(),
    };
    let mut stored = nearest(value);
    if !(low..=high).contains(&stored) {
        if !clip || value.is_nan() {
            return false;
        }
        stored = stored.clamp(low, high);
        tally.clipped += 1;
    } else if stored != value {
        tally.rounded += 1;
    }
    tally.lost += (stored - value) * (stored - value);
    tally.whole += value * value;
    // Exact: `stored` is a value of the type.
    match dtype {
        DType::F32 => out.extend((stored as f32).to_le_bytes()),
        DType::F16 => out.extend(f16::from_f64(stored).to_le_bytes()),
        DType::U8 => out.push(stored as u8),
        DType::I8 => out.push((stored as i8).cast_unsigned()),
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vectors(values: &[f32]) -> Vectors {
        Vectors::from_bytes(DType::F32, values.len(), values.iter().flat_map(|x| x.to_le_bytes()).collect())
            .unwrap()
    }

    fn run(source: &Vectors, name: &str, conversion: Conversion) -> Result<(Converted, Vec<f32>), String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        let converted = convert(source, &path, conversion, &|_, _| ()).map_err(|error| {
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left after an error");
            error.to_string()
        })?;
        let read = Vectors::open(&path).unwrap();
        let mut values = vec![0.0; read.dim()];
        read.row_f32(0, &mut values);
        Ok((converted, values))
    }

    #[test]
    fn values_arrive_rounded_to_the_nearest() {
        let source = vectors(&[0.0, 1.0, -2.5, 3.5, 100.4]);
        let (converted, values) = run(&source, "a.i8bin", Conversion::default()).unwrap();
        assert_eq!(values, [0.0, 1.0, -2.0, 4.0, 100.0]);
        assert_eq!((converted.rows, converted.rounded, converted.clipped), (1, 3, 0));
        assert!((converted.relative_error - 0.0081).abs() < 1e-4, "{}", converted.relative_error);
        let (converted, values) = run(&source, "a.fvecs", Conversion::default()).unwrap();
        assert_eq!(values, [0.0, 1.0, -2.5, 3.5, 100.4]);
        assert_eq!((converted.rounded, converted.relative_error), (0, 0.0));
        let (_, values) = run(&source, "a.npy", Conversion { scale: 2.0, ..Conversion::default() }).unwrap();
        assert_eq!(values, [0.0, 2.0, -5.0, 7.0, 200.8]);
        let (converted, values) =
            run(&source, "a.npy", Conversion { dtype: Some(DType::F16), ..Conversion::default() }).unwrap();
        assert_eq!((converted.dtype, values[4]), (DType::F16, 100.375));
    }

    #[test]
    fn every_byte_value_survives_the_way_through_every_wider_type() {
        for dtype in [DType::U8, DType::I8] {
            let bytes: Vec<u8> = (0..=255).collect();
            let source = Vectors::from_bytes(dtype, 256, bytes.clone()).unwrap();
            for wide in ["a.fbin", "a.f16bin", "a.npy"] {
                let dir = tempfile::tempdir().unwrap();
                let (there, back) =
                    (dir.path().join(wide), dir.path().join(format!("b.{}", Format::big_ann(dtype))));
                convert(&source, &there, Conversion::default(), &|_, _| ()).unwrap();
                let converted =
                    convert(&Vectors::open(&there).unwrap(), &back, Conversion::default(), &|_, _| ())
                        .unwrap();
                assert_eq!((Vectors::open(&back).unwrap().row(0), converted.rounded), (&bytes[..], 0));
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_named_or_clipped() {
        let check = |name: &str, values: &[f32], text: &str, clipped: Option<&[f32]>| {
            let source = vectors(values);
            let error = run(&source, name, Conversion::default()).unwrap_err();
            assert!(error.contains(text), "{error}");
            match (run(&source, name, Conversion { clip: true, ..Conversion::default() }), clipped) {
                (Ok((converted, found)), Some(clipped)) => {
                    assert_eq!((&found[..], converted.clipped), (clipped, 1));
                }
                (Err(_), None) => {}
                (other, _) => panic!("{other:?}"),
            }
        };
        check(
            "a.i8bin",
            &[1.0, 127.5],
            "expected values that fit i8, found 127.5 in row 0, column 1",
            Some(&[1.0, 127.0]),
        );
        check("a.i8bin", &[-129.0], "column 0", Some(&[-128.0]));
        check("a.u8bin", &[3.0, -1.0], "found -1 in row 0, column 1", Some(&[3.0, 0.0]));
        check("a.f16bin", &[65_520.0], "fit f16", Some(&[65_504.0]));
        check("a.u8bin", &[3.0, f32::NAN], "expected finite numbers, found NaN in row 0, column 1", None);
        check("a.fbin", &[f32::INFINITY], "found inf", None);
        assert_eq!(run(&vectors(&[-0.4, 127.49]), "a.i8bin", Conversion::default()).unwrap().1, [0.0, 127.0]);
    }

    #[test]
    fn the_new_format_must_hold_the_type() {
        let f16 = Conversion { dtype: Some(DType::F16), ..Conversion::default() };
        assert!(run(&vectors(&[1.0]), "a.fbin", f16).unwrap_err().contains("an extension for f16"));
        assert!(run(&vectors(&[1.0]), "a.ibin", Conversion::default()).unwrap_err().contains("holds ids"));
    }
}
