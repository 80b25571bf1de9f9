//! Writers that stream into a temporary file beside the target and rename it when it is whole.

use std::fs::{self, File, OpenOptions};
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::DataError;
use super::format::{Content, Format, NPY_PREAMBLE, npy_preamble};
use crate::metric::{DIMENSION_MAX, DType};

/// A file that appears under its name only once it is complete. Dropped before [`Self::finish`], it leaves nothing.
#[derive(Debug)]
pub struct AtomicFile {
    out: Option<BufWriter<File>>,
    temporary: PathBuf,
    target: PathBuf,
}

impl AtomicFile {
    /// Starts the file `target`; its folder is made if it is missing.
    ///
    /// # Errors
    /// If the folder cannot be made or written.
    pub fn create(target: impl AsRef<Path>) -> Result<Self, DataError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let target = target.as_ref();
        let Some(name) = target.file_name().and_then(|name| name.to_str()) else {
            return Err(DataError::malformed(target, "a file name", "none, or one that is not UTF-8"));
        };
        if target.is_dir() {
            return Err(DataError::malformed(target, "a file name", "a directory"));
        }
        let folder = match target.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        fs::create_dir_all(folder).map_err(DataError::io(folder, "make the folder"))?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let temporary = folder.join(format!(".{name}.{}-{number}.part", std::process::id()));
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .open(&temporary)
            .map_err(DataError::io(&temporary, "create"))?;
        Ok(Self { out: Some(BufWriter::with_capacity(1 << 20, file)), temporary, target: target.to_owned() })
    }

    fn out(&mut self) -> &mut BufWriter<File> {
        self.out.as_mut().expect("the file is open until it is finished")
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// If the disk refuses them.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        self.out().write_all(bytes).map_err(DataError::io(&self.target.clone(), "write"))
    }

    /// Replaces bytes at the front, as headers need that are known only at the end.
    ///
    /// # Errors
    /// If the disk refuses them.
    pub fn rewrite_front(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        let target = self.target.clone();
        let out = self.out();
        out.seek(SeekFrom::Start(0))
            .and_then(|_| out.write_all(bytes))
            .and_then(|()| out.seek(SeekFrom::End(0)))
            .map(|_| ())
            .map_err(DataError::io(&target, "write the header of"))
    }

    /// Puts the file on disk and gives it its name, replacing a file that was there.
    ///
    /// # Errors
    /// If the disk refuses; nothing is left then.
    pub fn finish(mut self) -> Result<(), DataError> {
        let out = self.out.take().expect("the file is open until it is finished");
        out.into_inner()
            .map_err(|error| error.into_error())
            .and_then(|file| file.sync_all())
            .and_then(|()| fs::rename(&self.temporary, &self.target))
            .map_err(|cause| {
                let _ = fs::remove_file(&self.temporary);
                DataError::Io { path: self.target.clone(), action: "write", cause }
            })
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if self.out.is_some() {
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// Writes vectors row by row in the format that the file's extension names.
#[derive(Debug)]
pub struct VectorWriter {
    file: AtomicFile,
    format: Format,
    dtype: DType,
    dim: usize,
    rows: u64,
}

impl VectorWriter {
    /// Starts a file of vectors.
    ///
    /// # Errors
    /// If the format cannot hold `dtype`, the dimension is out of range, or the file cannot be made.
    pub fn create(path: impl AsRef<Path>, dtype: DType, dim: usize) -> Result<Self, DataError> {
        let path = path.as_ref();
        let format = Format::of(path)?;
        match format.content() {
            Content::AnyVectors => {}
            Content::Vectors(held) if held == dtype => {}
            Content::Vectors(held) => {
                return Err(DataError::malformed(
                    path,
                    format!("an extension for {dtype}, such as .{}", Format::big_ann(dtype)),
                    format!(".{format}, which holds {held}"),
                ));
            }
            Content::Truth => {
                return Err(DataError::malformed(
                    path,
                    "an extension for vectors",
                    format!(".{format}, which holds ids"),
                ));
            }
        }
        if !(1..=DIMENSION_MAX).contains(&dim) {
            return Err(DataError::malformed(
                path,
                format!("a dimension of 1 to {DIMENSION_MAX}"),
                dim.to_string(),
            ));
        }
        let mut file = AtomicFile::create(path)?;
        match format {
            Format::Fvecs | Format::Bvecs => {}
            Format::Npy => file.write(&[0; NPY_PREAMBLE])?,
            _ => file.write(&[0; 8])?,
        }
        Ok(Self { file, format, dtype, dim, rows: 0 })
    }

    /// Appends one or more rows: `bytes` is row-major, little-endian, without gaps.
    ///
    /// # Errors
    /// If the disk refuses them.
    ///
    /// # Panics
    /// If `bytes` is not a whole number of rows.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        let row_bytes = self.dim * self.dtype.size();
        assert!(
            bytes.len().is_multiple_of(row_bytes),
            "whole rows of {row_bytes} bytes, got {}",
            bytes.len()
        );
        self.rows += (bytes.len() / row_bytes) as u64;
        if !matches!(self.format, Format::Fvecs | Format::Bvecs) {
            return self.file.write(bytes);
        }
        for row in bytes.chunks_exact(row_bytes) {
            self.file.write(&(self.dim as u32).to_le_bytes())?;
            self.file.write(row)?;
        }
        Ok(())
    }

    /// Completes the header and the file; says how many rows it has.
    ///
    /// # Errors
    /// If no row was written, more than the format can count, or the disk refuses; nothing is left then.
    pub fn finish(mut self) -> Result<u64, DataError> {
        let counted = u32::try_from(self.rows);
        if self.rows == 0 {
            return Err(DataError::malformed(&self.file.target, "at least one row to write", "none"));
        }
        match self.format {
            Format::Fvecs | Format::Bvecs => {}
            Format::Npy => self.file.rewrite_front(&npy_preamble(self.dtype, self.rows, self.dim))?,
            _ => {
                let Ok(rows) = counted else {
                    let expected = format!("at most {} rows in a .{} file", u32::MAX, self.format);
                    return Err(DataError::malformed(
                        &self.file.target,
                        expected,
                        format!("{} rows", self.rows),
                    ));
                };
                let header = [rows.to_le_bytes(), (self.dim as u32).to_le_bytes()].concat();
                self.file.rewrite_front(&header)?;
            }
        }
        self.file.finish()?;
        Ok(self.rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unfinished_file_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sub/a.i8bin");
        let mut writer = VectorWriter::create(&path, DType::I8, 2).unwrap();
        writer.push(&[1, 2]).unwrap();
        drop(writer);
        let writer = VectorWriter::create(&path, DType::I8, 2).unwrap();
        assert!(writer.finish().unwrap_err().to_string().contains("at least one row"));
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 0);
    }

    #[test]
    fn a_whole_file_replaces_the_old_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.u8bin");
        for value in [1u8, 2] {
            let mut writer = VectorWriter::create(&path, DType::U8, 1).unwrap();
            writer.push(&[value]).unwrap();
            writer.finish().unwrap();
            assert_eq!(fs::read(&path).unwrap(), [1, 0, 0, 0, 1, 0, 0, 0, value]);
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn the_extension_must_hold_the_type() {
        let dir = tempfile::tempdir().unwrap();
        let check = |name: &str, dtype, text: &str| {
            let error = VectorWriter::create(dir.path().join(name), dtype, 3).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        };
        check("a.fbin", DType::I8, "an extension for i8, such as .i8bin, found .fbin, which holds f32");
        check("a.ibin", DType::F32, "which holds ids");
        check("a.txt", DType::F32, "'.txt'");
        assert!(VectorWriter::create(dir.path().join("a.fbin"), DType::F32, 0).is_err());
    }
}
