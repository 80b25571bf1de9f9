//! Data files named by name and content, so that a plan or a result means the same bytes on every machine.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::DataError;

/// How deep below the root files are looked for.
const DEPTH_MAX: usize = 6;
/// Most folder entries looked at.
const ENTRIES_MAX: usize = 100_000;

/// A sha256 sum in lower-case hexadecimal.
pub type FileHash = String;

/// sha256 of a file's bytes.
///
/// # Errors
/// If it cannot be read.
pub fn sha256_file(path: impl AsRef<Path>) -> Result<FileHash, DataError> {
    let path = path.as_ref();
    let mut file = File::open(path).map_err(DataError::io(path, "open"))?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer).map_err(DataError::io(path, "read"))? {
            0 => break,
            count => hasher.update(&buffer[..count]),
        }
    }
    Ok(hex(&hasher.finalize()))
}

/// Bytes in lower-case hexadecimal.
pub(super) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The folder that data is kept in: `SHINE_DATA`, else `~/.cache/shine/data`.
pub fn default_root() -> PathBuf {
    if let Some(root) = std::env::var_os("SHINE_DATA").filter(|root| !root.is_empty()) {
        return root.into();
    }
    let cache = std::env::var_os("XDG_CACHE_HOME").filter(|cache| !cache.is_empty()).map(PathBuf::from);
    let home = || std::env::var_os("HOME").map_or_else(|| ".".into(), PathBuf::from);
    cache.unwrap_or_else(|| home().join(".cache")).join("shine/data")
}

/// Finds the file `name` (a relative path, such as `glove100/base.i8bin`) with the given sha256 under `root`: at that very path first,
/// then any file of that last name in a folder below.
///
/// # Errors
/// [`DataError::NotFound`], which says what was there instead.
pub fn find_file(root: &Path, name: &str, sha256: &str) -> Result<PathBuf, DataError> {
    let not_found = |found: String| DataError::NotFound {
        name: name.to_owned(),
        sha256: sha256.to_owned(),
        root: root.to_owned(),
        found,
    };
    if sha256.len() != 64 || !sha256.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(not_found("that is no sha256, which is 64 hexadecimal digits".into()));
    }
    let Some(last) = Path::new(name).file_name() else {
        return Err(not_found("that is no file name".into()));
    };
    let mut candidates = vec![root.join(name)];
    candidates.retain(|path| path.is_file());
    let mut folders = vec![(root.to_owned(), 0)];
    let mut looked_at = 0;
    while let Some((folder, depth)) = folders.pop() {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        paths.sort();
        for path in paths {
            looked_at += 1;
            if path.is_dir() && depth < DEPTH_MAX {
                folders.push((path, depth + 1));
            } else if path.file_name() == Some(last) && !candidates.contains(&path) {
                candidates.push(path);
            }
        }
        if looked_at > ENTRIES_MAX {
            break;
        }
    }
    let mut others = Vec::new();
    for path in candidates {
        let found = sha256_file(&path)?;
        if found.eq_ignore_ascii_case(sha256) {
            return Ok(path);
        }
        others.push(format!("{} has {found}", path.display()));
    }
    Err(not_found(match others.is_empty() {
        true if !root.is_dir() => "that folder does not exist".into(),
        true => "no file has that name".into(),
        false => others.join("; "),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    // sha256 of "abc", FIPS 180-2.
    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn a_file_is_found_by_name_and_content() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, text).unwrap();
            path
        };
        let find = |name: &str, sum: &str| find_file(dir.path(), name, sum);
        assert!(find("s/base.i8bin", ABC).unwrap_err().to_string().contains("no file has that name"));
        let other = at("s/base.i8bin", "abd");
        let text = find("s/base.i8bin", ABC).unwrap_err().to_string();
        assert!(text.contains(&other.display().to_string()) && text.contains("has a52d"), "{text}");
        let moved = at("elsewhere/deep/base.i8bin", "abc");
        assert_eq!(find("s/base.i8bin", ABC).unwrap(), moved);
        let exact = at("s/base.i8bin", "abc");
        assert_eq!(find("s/base.i8bin", &ABC.to_uppercase()).unwrap(), exact);
        assert!(find("s/base.i8bin", "ba78").is_err());
        assert!(find("", ABC).is_err());
        assert!(
            find_file(Path::new("/nonexistent"), "a", ABC)
                .unwrap_err()
                .to_string()
                .contains("does not exist")
        );
    }
}
