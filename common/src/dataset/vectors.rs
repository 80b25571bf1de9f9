//! Rows of vectors in a memory-mapped file of any format, or in memory.

use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::f16;
use memmap2::Mmap;
use sha2::{Digest, Sha256};

use super::DataError;
use super::format::{Bad, Format, Shape, parse_vectors};
use crate::metric::{BadVector, DIMENSION_MAX, DType, Metric, validate};

/// Vectors of one type and dimension; cheap to clone and to crop, shared between threads.
///
/// The file stays mapped while any clone lives. Replacing it by rename (as every writer here does) is safe; a process
/// that *truncates* a mapped file takes its readers down, as with every mapped file.
#[derive(Clone)]
pub struct Vectors {
    storage: Arc<Storage>,
    shape: Shape,
}

struct Storage {
    path: PathBuf,
    format: Option<Format>,
    bytes: Bytes,
}

enum Bytes {
    Mapped(Mmap),
    Owned(Vec<u8>),
}

impl Storage {
    #[inline]
    fn bytes(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Mapped(map) => map,
            Bytes::Owned(bytes) => bytes,
        }
    }
}

impl fmt::Debug for Vectors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Vectors({} x {} {}, {})", self.rows(), self.dim(), self.dtype(), self.path().display())
    }
}

impl Vectors {
    /// Opens the vectors of `path`; the extension names the format.
    ///
    /// The size is held against the header first. In fvecs and bvecs files the dimension of *every* row is checked,
    /// which touches each page once: for a crop of a very large file use [`Self::open_first`].
    ///
    /// # Errors
    /// If the file cannot be read, has another extension, or contradicts its header.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, DataError> {
        Self::open_checked(path.as_ref(), usize::MAX)
    }

    /// Opens the first `rows` vectors of `path`; rows behind them are not looked at.
    ///
    /// # Errors
    /// As [`Self::open`]; also if the file has fewer rows, or `rows` is zero.
    pub fn open_first(path: impl AsRef<Path>, rows: usize) -> Result<Self, DataError> {
        Self::open_checked(path.as_ref(), rows)?.first(rows)
    }

    fn open_checked(path: &Path, rows_checked: usize) -> Result<Self, DataError> {
        let format = Format::of(path)?;
        let map = map_file(path)?;
        let shape = parse_vectors(&map, format, rows_checked)
            .map_err(|Bad { expected, found }| DataError::malformed(path, expected, found))?;
        let storage = Storage { path: path.to_owned(), format: Some(format), bytes: Bytes::Mapped(map) };
        Ok(Self { storage: Arc::new(storage), shape })
    }

    /// Vectors held in memory: `bytes` is row-major, little-endian, without gaps.
    ///
    /// # Errors
    /// If the dimension is out of range, or `bytes` is not a whole number of rows, at least one.
    pub fn from_bytes(dtype: DType, dim: usize, bytes: Vec<u8>) -> Result<Self, DataError> {
        let path = Path::new("(memory)");
        if !(1..=DIMENSION_MAX).contains(&dim) {
            return Err(DataError::malformed(
                path,
                format!("a dimension of 1 to {DIMENSION_MAX}"),
                dim.to_string(),
            ));
        }
        let stride = dim * dtype.size();
        if bytes.is_empty() || !bytes.len().is_multiple_of(stride) {
            let expected = format!("a whole number of rows of {stride} bytes, at least one");
            return Err(DataError::malformed(path, expected, format!("{} bytes", bytes.len())));
        }
        let shape = Shape { dtype, rows: bytes.len() / stride, dim, offset: 0, stride };
        let storage = Storage { path: path.to_owned(), format: None, bytes: Bytes::Owned(bytes) };
        Ok(Self { storage: Arc::new(storage), shape })
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.shape.dtype
    }

    /// Elements of one vector.
    pub fn dim(&self) -> usize {
        self.shape.dim
    }

    /// Number of vectors, at least one.
    pub fn rows(&self) -> usize {
        self.shape.rows
    }

    /// Bytes of one vector.
    pub fn row_bytes(&self) -> usize {
        self.shape.dim * self.shape.dtype.size()
    }

    /// Bytes of all vectors, without the file's framing.
    pub fn data_bytes(&self) -> u64 {
        self.rows() as u64 * self.row_bytes() as u64
    }

    /// The file that they came from, or `(memory)`.
    pub fn path(&self) -> &Path {
        &self.storage.path
    }

    /// The file's format; none if they are held in memory.
    pub fn format(&self) -> Option<Format> {
        self.storage.format
    }

    /// Vector `row` in native form: little-endian elements, no alignment promised.
    ///
    /// # Panics
    /// If `row` is out of range.
    #[inline]
    pub fn row(&self, row: usize) -> &[u8] {
        assert!(row < self.shape.rows, "row {row} of {}", self.shape.rows);
        let at = self.shape.offset + row * self.shape.stride;
        &self.storage.bytes()[at..at + self.row_bytes()]
    }

    /// All vectors in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        (0..self.rows()).map(|row| self.row(row))
    }

    /// All vectors as one slice, rows back to back; none for formats that put a prefix before each row.
    pub fn contiguous(&self) -> Option<&[u8]> {
        (self.shape.stride == self.row_bytes()).then(|| {
            let at = self.shape.offset;
            &self.storage.bytes()[at..at + self.shape.rows * self.shape.stride]
        })
    }

    /// sha256 of all vectors in order, without headers and prefixes: the same in every format. A graph file says by it
    /// what it was built from.
    pub fn rows_hash(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        self.iter().for_each(|row| hash.update(row));
        hash.finalize().into()
    }

    /// The first `rows` vectors.
    ///
    /// # Errors
    /// If there are fewer, or `rows` is zero.
    pub fn first(&self, rows: usize) -> Result<Self, DataError> {
        self.slice(0..rows)
    }

    /// Vectors `range` as a set of their own; row 0 of it is `range.start` here.
    ///
    /// # Errors
    /// If the range is empty or reaches past the end.
    pub fn slice(&self, range: Range<usize>) -> Result<Self, DataError> {
        if range.start >= range.end || range.end > self.rows() {
            return Err(DataError::malformed(
                self.path(),
                format!("rows {}..{} (at least one)", range.start, range.end),
                format!("{} rows", self.rows()),
            ));
        }
        let mut shape = self.shape;
        shape.offset += range.start * shape.stride;
        shape.rows = range.end - range.start;
        Ok(Self { storage: Arc::clone(&self.storage), shape })
    }

    /// Writes vector `row` into `out` as f32; exact for every type.
    ///
    /// # Panics
    /// If `row` is out of range or `out` is not one vector long.
    pub fn row_f32(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.dim(), "one f32 per element");
        decode_f32(self.dtype(), self.row(row), out);
    }

    /// Looks for the first NaN or infinity; integer types have none.
    ///
    /// # Errors
    /// [`DataError::NotFinite`], naming row and column.
    pub fn check_finite(&self) -> Result<(), DataError> {
        if matches!(self.dtype(), DType::U8 | DType::I8) {
            return Ok(());
        }
        let mut values = vec![0f32; self.dim()];
        for row in 0..self.rows() {
            self.row_f32(row, &mut values);
            if let Some(column) = values.iter().position(|value| !value.is_finite()) {
                let value = values[column];
                return Err(DataError::NotFinite { path: self.path().to_owned(), row, column, value });
            }
        }
        Ok(())
    }

    /// Checks that every vector has a distance to every other under `metric`: finite, not too large, not zero for
    /// the cosine. Reads everything once.
    ///
    /// # Errors
    /// [`DataError::NotFinite`], or which row is wrong and why.
    pub fn check_for(&self, metric: Metric) -> Result<(), DataError> {
        if metric != Metric::Cosine && matches!(self.dtype(), DType::U8 | DType::I8) {
            return Ok(());
        }
        for (row, bytes) in self.iter().enumerate() {
            match validate(metric, self.dtype(), bytes) {
                Ok(()) => {}
                Err(BadVector::NotFinite { index, value }) => {
                    let path = self.path().to_owned();
                    return Err(DataError::NotFinite { path, row, column: index, value });
                }
                Err(bad) => {
                    let expected = format!("vectors that have a distance under {metric}");
                    return Err(DataError::malformed(
                        self.path(),
                        expected,
                        format!("row {row}, of which {bad}"),
                    ));
                }
            }
        }
        Ok(())
    }
}

/// Reads little-endian elements as f32; exact for every type.
pub(super) fn decode_f32(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        DType::F32 => {
            for (value, bytes) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *value = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            }
        }
        DType::F16 => {
            for (value, bytes) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *value = f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
            }
        }
        DType::U8 => {
            for (value, byte) in out.iter_mut().zip(bytes) {
                *value = f32::from(*byte);
            }
        }
        DType::I8 => {
            for (value, byte) in out.iter_mut().zip(bytes) {
                *value = f32::from(*byte as i8);
            }
        }
    }
}

/// Maps a whole file; an empty one is an error, since no format here allows it.
pub(super) fn map_file(path: &Path) -> Result<Mmap, DataError> {
    let file = File::open(path).map_err(DataError::io(path, "open"))?;
    let metadata = file.metadata().map_err(DataError::io(path, "read the size of"))?;
    if !metadata.is_file() {
        return Err(DataError::malformed(path, "a regular file", "a directory or a device"));
    }
    if metadata.len() == 0 {
        return Err(DataError::malformed(path, "a data file", "an empty file"));
    }
    // SAFETY: the map is private to this process, read-only, and only ever read as bytes, of which every value is
    // valid; that nobody truncates the file meanwhile is the stated duty of whoever owns it (see `Vectors`).
    unsafe { Mmap::map(&file) }.map_err(DataError::io(path, "map"))
}

#[cfg(test)]
mod tests {
    use super::super::writer::VectorWriter;
    use super::*;

    /// Writes `bytes` as `name` and opens it; the text is the error's, without the path.
    fn open(name: &str, bytes: &[u8]) -> Result<Vectors, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        Vectors::open(&path).map_err(|error| {
            let text = error.to_string();
            let prefix = format!("{}: ", path.display());
            text.strip_prefix(&prefix)
                .unwrap_or_else(|| panic!("the error names the file: {text}"))
                .to_owned()
        })
    }

    fn check_error(name: &str, bytes: &[u8], expected: &str) {
        match open(name, bytes) {
            Ok(vectors) => panic!("{name} was accepted as {vectors:?}"),
            Err(text) => assert!(text.contains(expected), "{name}: '{text}' should contain '{expected}'"),
        }
    }

    fn bin(rows: u32, dim: u32, data: &[u8]) -> Vec<u8> {
        [&rows.to_le_bytes()[..], &dim.to_le_bytes(), data].concat()
    }

    fn npy(header: &str, data: &[u8]) -> Vec<u8> {
        [b"\x93NUMPY\x01\x00", &(header.len() as u16).to_le_bytes()[..], header.as_bytes(), data].concat()
    }

    #[test]
    fn known_bytes_are_read() {
        let vectors = open("a.i8bin", &bin(2, 3, &[1, 2, 3, 0xff, 5, 6])).unwrap();
        assert_eq!((vectors.dtype(), vectors.rows(), vectors.dim()), (DType::I8, 2, 3));
        assert_eq!(vectors.row(1), [0xff, 5, 6]);
        assert_eq!(vectors.contiguous().unwrap(), [1, 2, 3, 0xff, 5, 6]);
        let mut row = [0.0; 3];
        vectors.row_f32(1, &mut row);
        assert_eq!(row, [-1.0, 5.0, 6.0]);

        let fvecs =
            [1u32.to_le_bytes(), 1.5f32.to_le_bytes(), 1u32.to_le_bytes(), (-2f32).to_le_bytes()].concat();
        let vectors = open("a.fvecs", &fvecs).unwrap();
        assert_eq!((vectors.dtype(), vectors.rows(), vectors.dim()), (DType::F32, 2, 1));
        assert_eq!(vectors.row(1), (-2f32).to_le_bytes());
        assert!(vectors.contiguous().is_none());

        let vectors = open(
            "a.npy",
            &npy("{'descr': '<f2', 'fortran_order': False, 'shape': (1, 2), }\n", &[0, 0x3c, 0, 0xc0]),
        )
        .unwrap();
        let mut row = [0.0; 2];
        vectors.row_f32(0, &mut row);
        assert_eq!((vectors.dtype(), row), (DType::F16, [1.0, -2.0]));

        let version_2 = [
            b"\x93NUMPY\x02\x00".as_slice(),
            &59u32.to_le_bytes(),
            b"{\"shape\":(2,1), 'fortran_order': False, 'descr': '|u1'}   \n",
            &[7, 9],
        ]
        .concat();
        assert_eq!(open("a.npy", &version_2).unwrap().row(1), [9]);
    }

    #[test]
    fn a_size_that_contradicts_the_header_is_an_error() {
        check_error("a.fbin", &[], "an empty file");
        check_error("a.fbin", &[1, 0, 0, 0, 1], "header of 8 bytes (rows, dimension), found 5 bytes");
        check_error("a.fbin", &bin(0, 4, &[]), "at least one row, found none");
        check_error("a.fbin", &bin(1, 0, &[]), "a dimension of 1 to 32768, found 0");
        check_error("a.fbin", &bin(1, 32_769, &[]), "a dimension of 1 to 32768, found 32769");
        check_error(
            "a.fbin",
            &bin(2, 1, &[0; 7]),
            "16 bytes for 2 rows of 1 x f32, found 15 bytes (cut short)",
        );
        check_error("a.fbin", &bin(2, 1, &[0; 9]), "17 bytes (trailing bytes)");
        check_error("a.fbin", &bin(2, 3, &[0; 6]), "would fit 2 rows of 3 x u8");
        check_error("a.fbin", &bin(u32::MAX, 32_768, &[0; 8]), "562949953290248 bytes");
        check_error("a.i8bin", &bin(u32::MAX, u32::MAX, &[0; 8]), "dimension");
    }

    #[test]
    fn xvecs_rows_must_agree() {
        let row = |dim: u32, bytes: usize| [&dim.to_le_bytes()[..], &vec![1; bytes]].concat();
        check_error(
            "a.bvecs",
            &[row(4, 4), row(3, 4)].concat(),
            "4 in every row, as in row 0, found 3 in row 1, at byte 8",
        );
        check_error("a.bvecs", &[row(4, 4), row(4, 3)].concat(), "found 15 bytes, 1 whole rows and 7 bytes");
        check_error("a.bvecs", &row(4, 3), "found 7 bytes, 0 whole rows and 7 bytes");
        check_error("a.fvecs", &row(u32::MAX, 8), "dimension of 1 to 32768");
        check_error("a.fvecs", &[1, 0], "at least one row");
        // A crop looks only at its own rows.
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.bvecs");
        std::fs::write(&path, [row(4, 4), row(4, 4), row(3, 4)].concat()).unwrap();
        assert_eq!(Vectors::open_first(&path, 2).unwrap().rows(), 2);
        assert!(Vectors::open_first(&path, 3).is_err());
    }

    #[test]
    fn npy_that_we_cannot_hold_is_refused() {
        let head = |descr: &str, order: &str, shape: &str| {
            npy(&format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}\n"), &[0; 8])
        };
        assert!(open("a.npy", &head("<f4", "False", "(2, 1)")).is_ok());
        check_error("a.npy", &head("<f4", "True", "(2, 1)"), "C order, found fortran_order: True");
        check_error("a.npy", &head(">f4", "False", "(2, 1)"), "found '>f4'");
        check_error("a.npy", &head("<f8", "False", "(1, 1)"), "found '<f8'");
        check_error("a.npy", &head("<f4", "False", "(2,)"), "two dimensions, found shape [2]");
        check_error("a.npy", &head("<f4", "False", "(1, 2, 1)"), "two dimensions");
        check_error("a.npy", &head("<f4", "False", "(3, 1)"), "(cut short)");
        check_error("a.npy", &head("<f4", "False", "(0, 1)"), "at least one row");
        check_error("a.npy", &head("<f4", "False", "(18446744073709551615, 32768)"), "(cut short)");
        check_error("a.npy", &head("<f4", "False", "(18446744073709551616, 1)"), "an npy header {");
        check_error("a.npy", &head("<f4", "Maybe", "(2, 1)"), "an npy header {");
        check_error("a.npy", b"\x93NUMPY\x03\x00\x00\x00", "version 1.0 or 2.0, found 3.0");
        check_error("a.npy", b"\x93NUMPY\x02\x00\xff\xff\xff\xff", "at most 4096 bytes");
        check_error("a.npy", b"\x93NUMPY\x01\x00\x20\x00{}", "header of 32 bytes");
        check_error("a.npy", b"NUMPY", "beginning");
    }

    #[test]
    fn the_extension_names_the_format() {
        check_error("a.bin", &bin(1, 1, &[0; 4]), "extension out of fvecs, bvecs");
        check_error("a", &bin(1, 1, &[0; 4]), "found none");
        check_error("a.ibin", &bin(1, 1, &[0; 4]), "a file of vectors, found a ground-truth format");
        assert!(
            Vectors::open("/nonexistent/a.fbin")
                .unwrap_err()
                .to_string()
                .contains("/nonexistent/a.fbin: cannot open")
        );
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("a.fbin")).unwrap();
        let text = Vectors::open(dir.path().join("a.fbin")).unwrap_err().to_string();
        assert!(text.contains("a regular file, found a directory"), "{text}");
    }

    #[test]
    fn crops_share_the_file() {
        let vectors = Vectors::from_bytes(DType::U8, 2, vec![1, 2, 3, 4, 5, 6]).unwrap();
        let part = vectors.slice(1..3).unwrap();
        assert_eq!((part.rows(), part.row(0), part.row(1)), (2, &[3, 4][..], &[5, 6][..]));
        assert_eq!(part.first(1).unwrap().contiguous().unwrap(), [3, 4]);
        for range in [0..4, 2..2, 4..5] {
            assert!(vectors.slice(range.clone()).is_err(), "{range:?}");
        }
        assert!(vectors.first(0).is_err());
        assert!(Vectors::from_bytes(DType::F32, 2, vec![0; 7]).is_err());
        assert!(Vectors::from_bytes(DType::F32, 0, vec![0; 8]).is_err());
    }

    #[test]
    fn a_number_that_is_not_finite_is_named() {
        let data: Vec<u8> =
            [0.0, 1.0, f32::INFINITY, f32::NAN].iter().flat_map(|x: &f32| x.to_le_bytes()).collect();
        let vectors = Vectors::from_bytes(DType::F32, 2, data).unwrap();
        assert!(vectors.first(1).unwrap().check_finite().is_ok());
        assert_eq!(
            vectors.check_finite().unwrap_err().to_string(),
            "(memory): expected finite numbers, found inf in row 1, column 0"
        );
        let half = Vectors::from_bytes(DType::F16, 1, vec![0, 0x3c, 0, 0x7e]).unwrap();
        assert!(half.check_finite().unwrap_err().to_string().contains("NaN in row 1, column 0"));
    }

    #[test]
    fn what_is_written_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        for (name, dtype) in [
            ("a.fvecs", DType::F32),
            ("a.bvecs", DType::U8),
            ("a.fbin", DType::F32),
            ("a.f16bin", DType::F16),
            ("a.u8bin", DType::U8),
            ("a.i8bin", DType::I8),
            ("f.npy", DType::F32),
            ("h.npy", DType::F16),
            ("u.npy", DType::U8),
            ("i.npy", DType::I8),
        ] {
            let path = dir.path().join(name);
            let row_bytes = 5 * dtype.size();
            let data: Vec<u8> = (0..3 * row_bytes).map(|i| i as u8).collect();
            let mut writer = VectorWriter::create(&path, dtype, 5).unwrap();
            writer.push(&data[..row_bytes]).unwrap();
            writer.push(&data[row_bytes..]).unwrap();
            assert!(!path.exists(), "nothing under the name before it is whole");
            assert_eq!(writer.finish().unwrap(), 3);
            let vectors = Vectors::open(&path).unwrap();
            assert_eq!((vectors.dtype(), vectors.rows(), vectors.dim()), (dtype, 3, 5), "{name}");
            assert!(vectors.iter().eq(data.chunks(row_bytes)), "{name}");
            assert_eq!(vectors.rows_hash(), <[u8; 32]>::from(Sha256::digest(&data)), "{name}");
        }
    }
}
