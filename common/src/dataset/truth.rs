//! Ground truth: for each query the row numbers of its exact neighbours, nearest first.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use super::DataError;
use super::format::{Bad, Content, Format, parse_truth, u32_at};
use super::vectors::map_file;
use super::writer::AtomicFile;

/// Exact neighbours of `queries` queries, `k` each; distances where the file has them.
#[derive(Debug, Clone, PartialEq)]
pub struct Truth {
    path: PathBuf,
    k: usize,
    ids: Vec<u32>,
    distances: Option<Vec<f32>>,
}

impl Truth {
    /// Reads the truth of `path` (.ibin or .ivecs) about a base of `base_rows` rows.
    ///
    /// # Errors
    /// If the file contradicts its header, or a query's neighbours name a row that the base does not have, name a row
    /// twice, or lie at a distance that is not a number.
    pub fn open(path: impl AsRef<Path>, base_rows: usize) -> Result<Self, DataError> {
        let path = path.as_ref();
        let format = Format::of(path)?;
        if format.content() != Content::Truth {
            return Err(DataError::malformed(
                path,
                "a ground-truth file, .ibin or .ivecs",
                format!("a .{format} file"),
            ));
        }
        let bytes = map_file(path)?;
        let shape = parse_truth(&bytes, format)
            .map_err(|Bad { expected, found }| DataError::malformed(path, expected, found))?;
        let (queries, k) = (shape.queries, shape.k);
        let mut ids = Vec::with_capacity(queries * k);
        let mut seen = HashSet::with_capacity(k);
        for query in 0..queries {
            let start = shape.offset + query * shape.stride;
            seen.clear();
            for rank in 0..k {
                let id = u32_at(&bytes, start + rank * 4).expect("the size was checked");
                if id as usize >= base_rows {
                    return Err(DataError::malformed(
                        path,
                        format!("row numbers below {base_rows}, the rows of the base"),
                        format!("{id} for query {query}, rank {rank}"),
                    ));
                }
                if !seen.insert(id) {
                    return Err(DataError::malformed(
                        path,
                        "every row at most once per query",
                        format!("row {id} twice for query {query}"),
                    ));
                }
                ids.push(id);
            }
        }
        let distances = match shape.distances {
            None => None,
            Some(start) => {
                let mut distances = Vec::with_capacity(queries * k);
                for cell in 0..queries * k {
                    let distance =
                        f32::from_bits(u32_at(&bytes, start + cell * 4).expect("the size was checked"));
                    if distance.is_nan() {
                        let found = format!("NaN for query {}, rank {}", cell / k, cell % k);
                        return Err(DataError::malformed(path, "distances that are numbers", found));
                    }
                    distances.push(distance);
                }
                Some(distances)
            }
        };
        Ok(Self { path: path.to_owned(), k, ids, distances })
    }

    /// A truth made in memory: `ids` and `distances` are `queries × k`, row-major.
    ///
    /// # Panics
    /// If the lengths do not agree, or there is nothing.
    pub fn from_parts(k: usize, ids: Vec<u32>, distances: Option<Vec<f32>>) -> Self {
        assert!(k > 0 && !ids.is_empty() && ids.len().is_multiple_of(k), "whole rows of {k} ids");
        assert!(distances.as_ref().is_none_or(|distances| distances.len() == ids.len()), "a distance per id");
        Self { path: "(memory)".into(), k, ids, distances }
    }

    /// The file, or `(memory)`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of queries; query `i` is row `i` of the query file, which may have more.
    pub fn queries(&self) -> usize {
        self.ids.len() / self.k
    }

    /// Neighbours per query.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Neighbours of `query`, nearest first.
    ///
    /// # Panics
    /// If `query` is out of range.
    pub fn ids(&self, query: usize) -> &[u32] {
        &self.ids[query * self.k..][..self.k]
    }

    /// Distances of `query` in the order of [`Self::ids`], as the file gives them: squared L2, −ip or 1−cos in our own
    /// files; files of others may use other signs.
    ///
    /// # Panics
    /// If `query` is out of range.
    pub fn distances(&self, query: usize) -> Option<&[f32]> {
        self.distances.as_ref().map(|distances| &distances[query * self.k..][..self.k])
    }

    /// Whether distances are there.
    pub fn has_distances(&self) -> bool {
        self.distances.is_some()
    }

    /// The truth of the first `queries` queries, with the nearest `k` of each.
    ///
    /// # Errors
    /// If it has fewer of either, or one of them is zero.
    pub fn first(&self, queries: usize, k: usize) -> Result<Self, DataError> {
        if queries == 0 || k == 0 || queries > self.queries() || k > self.k {
            return Err(DataError::malformed(
                &self.path,
                format!("truth for {queries} queries with {k} neighbours each (at least one)"),
                format!("{} queries with {}", self.queries(), self.k),
            ));
        }
        let ids = (0..queries).flat_map(|query| self.ids(query)[..k].to_vec()).collect();
        let distances = self.has_distances().then(|| {
            (0..queries).flat_map(|query| self.distances(query).expect("checked")[..k].to_vec()).collect()
        });
        Ok(Self { path: self.path.clone(), k, ids, distances })
    }
}

/// Writes `truth` as .ibin (distances too, where it has them) or .ivecs (ids only).
///
/// # Errors
/// If the extension names another format, or the disk refuses.
pub fn write_truth(path: impl AsRef<Path>, truth: &Truth) -> Result<(), DataError> {
    let path = path.as_ref();
    let format = Format::of(path)?;
    if format.content() != Content::Truth {
        return Err(DataError::malformed(
            path,
            "an extension for ground truth, .ibin or .ivecs",
            format!(".{format}"),
        ));
    }
    let mut file = AtomicFile::create(path)?;
    let k = truth.k as u32;
    if format == Format::Ivecs {
        for query in 0..truth.queries() {
            file.write(&k.to_le_bytes())?;
            file.write(bytemuck::cast_slice(truth.ids(query)))?;
        }
    } else {
        let Ok(queries) = u32::try_from(truth.queries()) else {
            return Err(DataError::malformed(
                path,
                "at most 4294967295 queries",
                truth.queries().to_string(),
            ));
        };
        file.write(&queries.to_le_bytes())?;
        file.write(&k.to_le_bytes())?;
        file.write(bytemuck::cast_slice(&truth.ids))?;
        if let Some(distances) = &truth.distances {
            file.write(bytemuck::cast_slice(distances))?;
        }
    }
    file.finish()
}

const _: () = assert!(cfg!(target_endian = "little"), "files and memory share one byte order");

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn check_error(name: &str, bytes: &[u8], expected: &str) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let text = Truth::open(&path, 10).expect_err(name).to_string();
        assert!(text.contains(expected) && text.contains(name), "'{text}' should contain '{expected}'");
    }

    #[test]
    fn ids_with_and_without_distances_are_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let both = Truth::from_parts(2, vec![1, 2, 3, 9], Some(vec![0.5, 1.5, 0.0, 2.0]));
        let path = dir.path().join("t.ibin");
        write_truth(&path, &both).unwrap();
        let read = Truth::open(&path, 10).unwrap();
        assert_eq!((read.queries(), read.k()), (2, 2));
        assert_eq!((read.ids(1), read.distances(0)), (&[3, 9][..], Some(&[0.5, 1.5][..])));

        let ids = Truth::from_parts(2, vec![1, 2, 3, 9], None);
        for name in ["i.ibin", "i.ivecs"] {
            let path = dir.path().join(name);
            write_truth(&path, &ids).unwrap();
            let read = Truth::open(&path, 10).unwrap();
            assert_eq!((read.ids(0), read.ids(1), read.has_distances()), (&[1, 2][..], &[3, 9][..], false));
        }
        assert!(write_truth(dir.path().join("t.fbin"), &ids).is_err());

        let first = both.first(1, 1).unwrap();
        assert_eq!((first.queries(), first.ids(0), first.distances(0)), (1, &[1][..], Some(&[0.5][..])));
        assert!(both.first(3, 1).is_err() && both.first(1, 3).is_err() && both.first(0, 1).is_err());
    }

    #[test]
    fn truth_that_does_not_belong_to_the_base_is_refused() {
        check_error(
            "t.ibin",
            &words(&[1, 2, 3, 10]),
            "below 10, the rows of the base, found 10 for query 0, rank 1",
        );
        check_error("t.ivecs", &words(&[2, 3, u32::MAX]), "found 4294967295 for query 0, rank 1");
        check_error("t.ibin", &words(&[1, 2, 3, 3]), "row 3 twice for query 0");
        check_error("t.ibin", &words(&[1, 1, 3, f32::NAN.to_bits()]), "NaN for query 0, rank 0");
    }

    #[test]
    fn a_size_that_contradicts_the_header_is_refused() {
        check_error("t.ibin", &words(&[1, 2, 3]), "16 bytes (1 x 2 ids) or 24 (ids and distances), found 12");
        check_error("t.ibin", &words(&[1, 2, 3, 4, 5]), "found 20 bytes (trailing bytes)");
        check_error("t.ibin", &words(&[0, 2]), "at least one row");
        check_error("t.ibin", &words(&[1, 0]), "a number of neighbours");
        check_error("t.ibin", &words(&[u32::MAX, 1 << 20]), "bytes");
        check_error("t.ibin", &[1, 0, 0], "header of 8 bytes");
        check_error("t.ivecs", &words(&[2, 1, 2, 3, 1, 2]), "found 3 in row 1");
        check_error("t.fbin", &words(&[1, 1, 0]), "a ground-truth file");
    }
}
