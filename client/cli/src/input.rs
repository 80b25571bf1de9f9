//! Vectors as they come in: from the command line, and from files of any element type.

use anyhow::Result;
use shine_client::value;
use shine_common::dataset::Vectors;
use shine_common::metric::{DType, Metric, validate};
use shine_common::wire::CollectionInfo;

use crate::exit::bad_input;

/// The type that vectors must have to enter a collection.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    pub(crate) collection: String,
    pub(crate) dtype: DType,
    pub(crate) metric: Metric,
    pub(crate) dimension: usize,
}

impl Shape {
    pub(crate) fn of(info: &CollectionInfo) -> Self {
        Self {
            collection: info.name.clone(),
            dtype: info.dtype,
            metric: info.metric,
            dimension: info.dimension as usize,
        }
    }

    /// A vector as typed after `flag`: numbers with commas or blanks between them, brackets allowed.
    pub(crate) fn parse(&self, flag: &str, text: &str) -> Result<Vec<u8>> {
        let values = numbers(text).map_err(|why| bad_input(format!("{flag}: {why}")))?;
        let vector = value::encode(&values, self.dtype, self.dimension).map_err(|why| why.to_string());
        vector
            .and_then(|vector| self.validated(vector))
            .map_err(|why| bad_input(format!("{flag}: {why} (collection '{}')", self.collection)))
    }

    /// Checks the dimension of a whole file.
    pub(crate) fn check(&self, file: &Vectors) -> Result<()> {
        if file.dim() == self.dimension {
            return Ok(());
        }
        Err(bad_input(format!(
            "{}: rows of {} elements: expected {}, the dimension of collection '{}'",
            file.path().display(),
            file.dim(),
            self.dimension,
            self.collection
        )))
    }

    /// A row of a file, in the collection's type.
    pub(crate) fn row(&self, file: &Vectors, row: usize) -> Result<Vec<u8>> {
        let vector = value::convert(file.row(row), file.dtype(), self.dtype, self.dimension);
        vector.map_err(|why| why.to_string()).and_then(|vector| self.validated(vector)).map_err(|why| {
            bad_input(format!(
                "{}: row {row}: {why} (collection '{}')",
                file.path().display(),
                self.collection
            ))
        })
    }

    /// Checks all rows of a file, so that a bad one is found before the first is sent.
    pub(crate) fn check_rows(&self, file: &Vectors) -> Result<()> {
        self.check(file)?;
        (0..file.rows()).try_for_each(|row| self.row(file, row).map(drop))
    }

    /// A vector that the collection takes, as its compute nodes will judge it.
    fn validated(&self, vector: Vec<u8>) -> Result<Vec<u8>, String> {
        match validate(self.metric, self.dtype, &vector) {
            Ok(()) => Ok(vector),
            Err(why) => Err(why.to_string()),
        }
    }
}

fn numbers(text: &str) -> Result<Vec<f64>, String> {
    let inner = text.trim();
    let inner = match (inner.strip_prefix('['), inner.ends_with(']')) {
        (Some(rest), true) => &rest[..rest.len() - 1],
        (None, false) => inner,
        _ => return Err("a bracket has no partner: expected numbers with commas between them".into()),
    };
    let inner = inner.trim();
    if inner.is_empty() {
        return Err("it is empty: expected numbers with commas between them, as in 0.5,-1,2".into());
    }
    let parts: Vec<&str> = if inner.contains(',') {
        inner.split(',').map(str::trim).collect()
    } else {
        inner.split_whitespace().collect()
    };
    parts
        .iter()
        .enumerate()
        .map(|(at, part)| part.parse().map_err(|_| format!("element {at} is '{part}': expected a number")))
        .collect()
}

/// Opens a file of vectors, or its first rows.
pub(crate) fn open(path: &std::path::Path, rows: Option<u64>) -> Result<Vectors> {
    Ok(match rows {
        Some(rows) => Vectors::open_first(path, usize::try_from(rows)?)?,
        None => Vectors::open(path)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::{Exit, classify};

    fn shape(dtype: DType) -> Shape {
        Shape { collection: "words".into(), dtype, metric: Metric::L2, dimension: 3 }
    }

    #[test]
    fn vectors_are_read_as_people_write_them() {
        for text in ["1,-2,3", " 1, -2 , 3 ", "[1,-2,3]", "1 -2 3", "[1 -2  3]", "1.0,-2e0,3"] {
            assert_eq!(shape(DType::I8).parse("--vector", text).unwrap(), [1, 254, 3], "{text}");
        }
    }

    #[test]
    fn what_is_wrong_with_a_vector_is_named() {
        for (text, dtype, expected) in [
            ("", DType::F32, "--vector: it is empty"),
            ("[]", DType::F32, "--vector: it is empty"),
            ("[1,2", DType::F32, "--vector: a bracket has no partner"),
            ("1,x,3", DType::F32, "--vector: element 1 is 'x': expected a number"),
            ("1,,3", DType::F32, "--vector: element 1 is '': expected a number"),
            ("1,2", DType::F32, "--vector: 2 elements where the collection has 3 (collection 'words')"),
            (
                "1,2,300",
                DType::I8,
                "--vector: element 2 is 300: expected a whole number from -128 to 127 (i8)",
            ),
            ("0.5,2,3", DType::U8, "--vector: element 0 is 0.5: expected a whole number from 0 to 255 (u8)"),
            ("nan,2,3", DType::F32, "--vector: element 0 is NaN: expected a finite number"),
        ] {
            let error = shape(dtype).parse("--vector", text).unwrap_err();
            assert!(error.to_string().starts_with(expected), "{text}: {error}");
            assert_eq!(classify(&error).0, Exit::Input);
        }
    }

    #[test]
    fn what_has_no_distance_is_named() {
        let cosine = Shape { metric: Metric::Cosine, ..shape(DType::F32) };
        for text in ["0,0,0", "0,1e-21,0"] {
            let error = cosine.parse("--vector", text).unwrap_err().to_string();
            assert!(error.starts_with("--vector: the squared norm is"), "{error}");
            shape(DType::F32).parse("--vector", text).unwrap();
        }
        let error = shape(DType::F32).parse("--vector", "1e38,0,0").unwrap_err().to_string();
        assert!(error.contains("no distance overflows"), "{error}");
        let rows =
            [[1.0f32, 0.0, 0.0], [0.0; 3]].as_flattened().iter().flat_map(|x| x.to_le_bytes()).collect();
        let file = Vectors::from_bytes(DType::F32, 3, rows).unwrap();
        let error = cosine.check_rows(&file).unwrap_err().to_string();
        assert!(error.contains("row 1: the squared norm is 0e0"), "{error}");
        shape(DType::F32).check_rows(&file).unwrap();
    }

    #[test]
    fn rows_of_a_file_are_converted_or_refused_by_row_and_element() {
        let floats: Vec<u8> =
            [1.0f32, 2.0, 3.0, 4.0, 5.5, 6.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        let file = Vectors::from_bytes(DType::F32, 3, floats).unwrap();
        let shape = shape(DType::I8);
        shape.check(&file).unwrap();
        assert_eq!(shape.row(&file, 0).unwrap(), [1, 2, 3]);
        let error = shape.row(&file, 1).unwrap_err().to_string();
        assert!(error.contains("row 1: element 1 is 5.5"), "{error}");
        let narrow = Shape { dimension: 2, ..shape };
        let error = narrow.check(&file).unwrap_err().to_string();
        assert!(error.contains("rows of 3 elements: expected 2"), "{error}");
    }
}
