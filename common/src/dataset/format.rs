//! File formats: names, headers, and the arithmetic that holds a header against the size of its file.

use std::fmt;
use std::path::Path;

use crate::metric::{DIMENSION_MAX, DType};

/// Longest npy header that is read; numpy itself writes 128 bytes for these arrays.
const NPY_HEADER_MAX: usize = 4096;
/// Most neighbours per query in a truth file.
pub(super) const TRUTH_K_MAX: usize = 1 << 20;
/// Bytes before the data in an npy file that we write: room for any row count.
pub(super) const NPY_PREAMBLE: usize = 128;

/// A file format, named by the file's extension.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Format {
    /// texmex, f32.
    Fvecs,
    /// texmex, u8.
    Bvecs,
    /// texmex, ids.
    Ivecs,
    /// big-ann, f32.
    Fbin,
    /// big-ann, f16.
    F16bin,
    /// big-ann, u8.
    U8bin,
    /// big-ann, i8.
    I8bin,
    /// big-ann, ids or ids and distances.
    Ibin,
    /// numpy, any element type, two dimensions.
    Npy,
}

/// What a format holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// Vectors of one type.
    Vectors(DType),
    /// Vectors of a type that stands in the header.
    AnyVectors,
    /// Row numbers of neighbours.
    Truth,
}

impl Format {
    /// Every format.
    pub const ALL: [Self; 9] = [
        Self::Fvecs,
        Self::Bvecs,
        Self::Ivecs,
        Self::Fbin,
        Self::F16bin,
        Self::U8bin,
        Self::I8bin,
        Self::Ibin,
        Self::Npy,
    ];

    /// The file extension, without the dot.
    pub const fn extension(self) -> &'static str {
        match self {
            Self::Fvecs => "fvecs",
            Self::Bvecs => "bvecs",
            Self::Ivecs => "ivecs",
            Self::Fbin => "fbin",
            Self::F16bin => "f16bin",
            Self::U8bin => "u8bin",
            Self::I8bin => "i8bin",
            Self::Ibin => "ibin",
            Self::Npy => "npy",
        }
    }

    /// What files of the format hold.
    pub const fn content(self) -> Content {
        match self {
            Self::Fvecs | Self::Fbin => Content::Vectors(DType::F32),
            Self::F16bin => Content::Vectors(DType::F16),
            Self::Bvecs | Self::U8bin => Content::Vectors(DType::U8),
            Self::I8bin => Content::Vectors(DType::I8),
            Self::Ivecs | Self::Ibin => Content::Truth,
            Self::Npy => Content::AnyVectors,
        }
    }

    /// The big-ann format for vectors of `dtype`.
    pub const fn big_ann(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Self::Fbin,
            DType::F16 => Self::F16bin,
            DType::U8 => Self::U8bin,
            DType::I8 => Self::I8bin,
        }
    }

    /// The format that the extension of `path` names.
    pub fn of(path: &Path) -> Result<Self, super::DataError> {
        let extension = path.extension().and_then(|text| text.to_str()).unwrap_or("");
        Self::ALL.into_iter().find(|format| format.extension() == extension).ok_or_else(|| {
            let known: Vec<_> = Self::ALL.iter().map(|format| format.extension()).collect();
            let found = if extension.is_empty() { "none".into() } else { format!("'.{extension}'") };
            super::DataError::malformed(path, format!("a file extension out of {}", known.join(", ")), found)
        })
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.extension())
    }
}

/// Where the rows of a vector file lie. Row `i` is `row_bytes` at `offset + i * stride`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Shape {
    pub(super) dtype: DType,
    pub(super) rows: usize,
    pub(super) dim: usize,
    pub(super) offset: usize,
    pub(super) stride: usize,
}

/// Where the ids and distances of a truth file lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TruthShape {
    pub(super) queries: usize,
    pub(super) k: usize,
    pub(super) offset: usize,
    pub(super) stride: usize,
    /// Where the distances begin, if the file has them.
    pub(super) distances: Option<usize>,
}

/// What a parser expected and what it found; the caller adds the file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Bad {
    pub(super) expected: String,
    pub(super) found: String,
}

fn bad<T>(expected: impl Into<String>, found: impl Into<String>) -> Result<T, Bad> {
    Err(Bad { expected: expected.into(), found: found.into() })
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(word.try_into().ok()?))
}

/// Finds the rows of a vector file. `rows_checked` bounds how many row prefixes of an xvecs file are looked at.
pub(super) fn parse_vectors(bytes: &[u8], format: Format, rows_checked: usize) -> Result<Shape, Bad> {
    match (format, format.content()) {
        (Format::Fvecs | Format::Bvecs, Content::Vectors(dtype)) => {
            let (rows, dim, stride) = parse_xvecs(bytes, dtype.size(), DIMENSION_MAX, rows_checked)?;
            Ok(Shape { dtype, rows, dim, offset: 4, stride })
        }
        (_, Content::Vectors(dtype)) => parse_bin(bytes, dtype),
        (_, Content::AnyVectors) => parse_npy(bytes),
        (_, Content::Truth) => bad("a file of vectors", format!("a ground-truth format, .{format}")),
    }
}

fn parse_bin(bytes: &[u8], dtype: DType) -> Result<Shape, Bad> {
    let (Some(rows), Some(dim)) = (u32_at(bytes, 0), u32_at(bytes, 4)) else {
        return bad("a header of 8 bytes (rows, dimension)", format!("{} bytes", bytes.len()));
    };
    let (rows, dim) = (rows as usize, dim as usize);
    check_counts(rows, dim, DIMENSION_MAX, "dimension")?;
    // 2^32 rows of 2^15 elements of 4 bytes: 49 bits.
    let expected = 8 + rows as u64 * dim as u64 * dtype.size() as u64;
    if expected != bytes.len() as u64 {
        let fits = [DType::F32, DType::F16, DType::U8, DType::I8]
            .into_iter()
            .find(|other| 8 + rows as u64 * dim as u64 * other.size() as u64 == bytes.len() as u64);
        let hint = match fits {
            Some(other) => {
                format!(" (which would fit {rows} rows of {dim} x {other}: is the extension right?)")
            }
            None => size_hint(expected, bytes.len() as u64).into(),
        };
        return bad(
            format!("{expected} bytes for {rows} rows of {dim} x {dtype}"),
            format!("{} bytes{hint}", bytes.len()),
        );
    }
    Ok(Shape { dtype, rows, dim, offset: 8, stride: dim * dtype.size() })
}

fn size_hint(expected: u64, found: u64) -> &'static str {
    if found < expected { " (cut short)" } else { " (trailing bytes)" }
}

fn check_counts(rows: usize, width: usize, width_max: usize, word: &str) -> Result<(), Bad> {
    if !(1..=width_max).contains(&width) {
        return bad(format!("a {word} of 1 to {width_max}"), format!("{width}"));
    }
    if rows == 0 {
        return bad("at least one row", "none");
    }
    Ok(())
}

/// Rows, width and stride of an xvecs file; every checked row must have the width of the first.
fn parse_xvecs(
    bytes: &[u8],
    element: usize,
    width_max: usize,
    rows_checked: usize,
) -> Result<(usize, usize, usize), Bad> {
    let Some(width) = u32_at(bytes, 0) else {
        return bad(
            "at least one row, which begins with its dimension in 4 bytes",
            format!("{} bytes", bytes.len()),
        );
    };
    let width = width as usize;
    check_counts(1, width, width_max, "dimension")?;
    let stride = 4 + width * element;
    let rows = bytes.len() / stride;
    for row in 0..rows.min(rows_checked) {
        let at = row * stride;
        let found = u32_at(bytes, at).unwrap_or_default();
        if found as usize != width {
            return bad(
                format!("dimension {width} in every row, as in row 0"),
                format!("{found} in row {row}, at byte {at}"),
            );
        }
    }
    if !bytes.len().is_multiple_of(stride) {
        return bad(
            format!("a multiple of {stride} bytes for rows of dimension {width}"),
            format!("{} bytes, {rows} whole rows and {} bytes", bytes.len(), bytes.len() % stride),
        );
    }
    Ok((rows, width, stride))
}

/// Finds the ids and distances of a truth file.
pub(super) fn parse_truth(bytes: &[u8], format: Format) -> Result<TruthShape, Bad> {
    match format {
        Format::Ivecs => {
            let (queries, k, stride) = parse_xvecs(bytes, 4, TRUTH_K_MAX, usize::MAX)?;
            Ok(TruthShape { queries, k, offset: 4, stride, distances: None })
        }
        Format::Ibin => {
            let (Some(queries), Some(k)) = (u32_at(bytes, 0), u32_at(bytes, 4)) else {
                return bad("a header of 8 bytes (queries, neighbours)", format!("{} bytes", bytes.len()));
            };
            let (queries, k) = (queries as usize, k as usize);
            check_counts(queries, k, TRUTH_K_MAX, "number of neighbours")?;
            let cells = queries as u64 * k as u64; // at most 52 bits
            let (ids_only, both) = (8 + cells * 4, 8 + cells * 8);
            let distances = match bytes.len() as u64 {
                found if found == ids_only => None,
                found if found == both => Some(ids_only as usize),
                found => {
                    return bad(
                        format!("{ids_only} bytes ({queries} x {k} ids) or {both} (ids and distances)"),
                        format!("{found} bytes{}", size_hint(ids_only, found)),
                    );
                }
            };
            Ok(TruthShape { queries, k, offset: 8, stride: k * 4, distances })
        }
        _ => bad("a ground-truth file, .ibin or .ivecs", format!("a .{format} file")),
    }
}

/// Reads the header that numpy's format 1.0 and 2.0 define.
fn parse_npy(bytes: &[u8]) -> Result<Shape, Bad> {
    if bytes.get(..6) != Some(b"\x93NUMPY") {
        return bad("an npy file, beginning \\x93NUMPY", format!("{:02x?}", &bytes[..bytes.len().min(6)]));
    }
    let (length, start) = match (bytes.get(6), bytes.get(7)) {
        (Some(1), Some(0)) => (bytes.get(8..10).map(|b| u16::from_le_bytes([b[0], b[1]]) as usize), 10),
        (Some(2), Some(0)) => (u32_at(bytes, 8).map(|length| length as usize), 12),
        (major, minor) => {
            return bad(
                "npy version 1.0 or 2.0",
                format!("{major:?}.{minor:?}").replace("Some(", "").replace(')', ""),
            );
        }
    };
    let Some(length) = length else { return bad("a header length", "the end of the file") };
    if length > NPY_HEADER_MAX {
        return bad(format!("an npy header of at most {NPY_HEADER_MAX} bytes"), format!("{length}"));
    }
    let Some(text) = bytes.get(start..start + length) else {
        return bad(
            format!("an npy header of {length} bytes"),
            format!("{} bytes in all (cut short)", bytes.len()),
        );
    };
    let Ok(text) = std::str::from_utf8(text) else {
        return bad("an npy header of ASCII text", "other bytes");
    };
    let header = NpyHeader::parse(text)?;
    let dtype = match header.descr.as_str() {
        "<f4" => DType::F32,
        "<f2" => DType::F16,
        "|u1" | "<u1" | "u1" => DType::U8,
        "|i1" | "<i1" | "i1" => DType::I8,
        other => return bad("npy elements of type <f4, <f2, |u1 or |i1", format!("'{other}'")),
    };
    if header.fortran_order {
        return bad("rows in C order", "fortran_order: True (save with numpy.ascontiguousarray)");
    }
    let [rows, dim] = header.shape[..] else {
        return bad("an array of two dimensions", format!("shape {:?}", header.shape));
    };
    let width = usize::try_from(dim).unwrap_or(usize::MAX);
    check_counts(usize::try_from(rows).unwrap_or(usize::MAX), width, DIMENSION_MAX, "dimension")?;
    let offset = start + length;
    let expected = (rows as u128) * (dim as u128) * dtype.size() as u128 + offset as u128;
    if expected != bytes.len() as u128 {
        let hint = if (bytes.len() as u128) < expected { " (cut short)" } else { " (trailing bytes)" };
        return bad(
            format!("{expected} bytes for {rows} rows of {dim} x {dtype}"),
            format!("{} bytes{hint}", bytes.len()),
        );
    }
    Ok(Shape { dtype, rows: rows as usize, dim: width, offset, stride: width * dtype.size() })
}

#[derive(Default)]
struct NpyHeader {
    descr: String,
    fortran_order: bool,
    shape: Vec<u64>,
}

impl NpyHeader {
    /// Parses `{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }`: these three keys, once each, any order.
    fn parse(text: &str) -> Result<Self, Bad> {
        let form = || "an npy header {'descr': .., 'fortran_order': .., 'shape': (rows, dim)}".to_owned();
        let Some(mut rest) = text.trim().strip_prefix('{').and_then(|text| text.strip_suffix('}')) else {
            return bad(form(), format!("{text:?}"));
        };
        let mut header = Self::default();
        let mut seen = [false; 3];
        while !rest.trim_matches([' ', ',']).is_empty() {
            let entry = rest.trim_start_matches([' ', ',']);
            let parsed = quoted(entry).and_then(|(key, after)| {
                let value = after.trim_start().strip_prefix(':')?.trim_start();
                let (slot, after) = match key {
                    "descr" => {
                        let (descr, after) = quoted(value)?;
                        header.descr = descr.to_owned();
                        (0, after)
                    }
                    "fortran_order" => {
                        let after = match value.strip_prefix("True") {
                            Some(after) => {
                                header.fortran_order = true;
                                after
                            }
                            None => value.strip_prefix("False")?,
                        };
                        (1, after)
                    }
                    "shape" => {
                        let (inner, after) = value.strip_prefix('(')?.split_once(')')?;
                        header.shape = inner
                            .split(',')
                            .map(str::trim)
                            .filter(|part| !part.is_empty())
                            .map(|part| part.parse::<u64>().ok())
                            .collect::<Option<_>>()?;
                        (2, after)
                    }
                    _ => return None,
                };
                if std::mem::replace(&mut seen[slot], true) { None } else { Some(after) }
            });
            match parsed {
                Some(after) => rest = after,
                None => return bad(form(), format!("{text:?}")),
            }
        }
        if seen == [true; 3] { Ok(header) } else { bad(form(), format!("{text:?}")) }
    }
}

/// Splits a quoted word off the front.
fn quoted(text: &str) -> Option<(&str, &str)> {
    let quote = text.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
    text[1..].split_once(quote)
}

/// The first [`NPY_PREAMBLE`] bytes of an npy file, as numpy writes them but for wider padding.
pub(super) fn npy_preamble(dtype: DType, rows: u64, dim: usize) -> [u8; NPY_PREAMBLE] {
    let descr = match dtype {
        DType::F32 => "<f4",
        DType::F16 => "<f2",
        DType::U8 => "|u1",
        DType::I8 => "|i1",
    };
    let text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({rows}, {dim}), }}");
    let mut out = [b' '; NPY_PREAMBLE];
    out[..8].copy_from_slice(b"\x93NUMPY\x01\x00");
    out[8..10].copy_from_slice(&((NPY_PREAMBLE - 10) as u16).to_le_bytes());
    out[10..10 + text.len()].copy_from_slice(text.as_bytes());
    out[NPY_PREAMBLE - 1] = b'\n';
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Whatever was accepted must lie inside the bytes, and fill them.
    fn check_accepted(bytes: &[u8], format: Format) -> Result<(), TestCaseError> {
        if let Ok(shape) = parse_vectors(bytes, format, usize::MAX) {
            prop_assert!(shape.rows > 0 && (1..=DIMENSION_MAX).contains(&shape.dim));
            let row_bytes = shape.dim * shape.dtype.size();
            prop_assert!(shape.stride >= row_bytes);
            prop_assert_eq!(shape.offset + (shape.rows - 1) * shape.stride + row_bytes, bytes.len());
        }
        if let Ok(shape) = parse_truth(bytes, format) {
            let ids_end = shape.offset + (shape.queries - 1) * shape.stride + shape.k * 4;
            match shape.distances {
                None => prop_assert_eq!(ids_end, bytes.len()),
                Some(start) => {
                    prop_assert_eq!(ids_end, start);
                    prop_assert_eq!(start + shape.queries * shape.k * 4, bytes.len());
                }
            }
        }
        Ok(())
    }

    fn any_format() -> impl Strategy<Value = Format> {
        (0..Format::ALL.len()).prop_map(|at| Format::ALL[at])
    }

    /// Small numbers, so that headers come out right now and then; and numbers at the edges.
    fn any_word() -> impl Strategy<Value = u32> {
        prop_oneof![8 => 0u32..5, 1 => Just(u32::MAX), 1 => Just(32_768u32), 1 => Just(1u32 << 31), 1 => any::<u32>()]
    }

    proptest! {
        #[test]
        fn hostile_bytes_never_panic(format in any_format(), bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            check_accepted(&bytes, format)?;
        }

        #[test]
        fn hostile_words_never_panic(format in any_format(), words in prop::collection::vec(any_word(), 0..20), tail in 0usize..4) {
            let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            bytes.truncate(bytes.len().saturating_sub(tail));
            check_accepted(&bytes, format)?;
        }

        #[test]
        fn hostile_npy_headers_never_panic(
            descr in "(<f4|<f2|[|]u1|[|]i1|>f4|.{0,4})",
            order in "(True|False|.{0,3})",
            shape in "([(]?[0-9]{0,21},? ?[0-9]{0,3},?[)]?|.{0,8})",
            version in 0u8..4,
            length in prop_oneof![3 => Just(None), 1 => any::<u16>().prop_map(Some)],
            data in 0usize..40,
        ) {
            let text = format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}");
            let mut bytes = b"\x93NUMPY".to_vec();
            bytes.extend([version, 0]);
            let length = length.unwrap_or(text.len() as u16);
            if version == 1 { bytes.extend(length.to_le_bytes()) } else { bytes.extend(u32::from(length).to_le_bytes()) }
            bytes.extend(text.as_bytes());
            bytes.extend(vec![0; data]);
            check_accepted(&bytes, Format::Npy)?;
        }

        #[test]
        fn our_npy_header_is_read_back(rows in 1u64..1 << 40, dim in 1usize..=DIMENSION_MAX) {
            let bytes = npy_preamble(DType::F16, rows, dim);
            let error = parse_npy(&bytes).unwrap_err();
            prop_assert_eq!(error.expected, format!("{} bytes for {rows} rows of {dim} x f16", 128 + rows * dim as u64 * 2));
        }
    }
}
