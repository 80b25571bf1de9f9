//! The repository's files, and just enough of a Rust lexer to tell code from comments and literals.

use std::fs;
use std::path::{Path, PathBuf};

/// A text file of the repository.
#[derive(Debug)]
pub(crate) struct Source {
    /// Path from the repository's root, with `/`.
    pub(crate) path: String,
    /// As on disk.
    pub(crate) text: String,
}

/// The repository's root.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the tests are one folder below the root")
        .to_owned()
}

/// All files that end in one of `endings`, sorted by path. Build outputs and data are left out.
pub(crate) fn files(endings: &[&str]) -> Vec<Source> {
    const LEFT_OUT: [&str; 5] = [".git", ".shine", "data", "out", "target"];
    let (root, mut found) = (root(), Vec::new());
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("folders of the repository can be listed") {
            let path = entry.expect("an entry of a listed folder").path();
            let name = path.file_name().and_then(|name| name.to_str()).expect("names are UTF-8").to_owned();
            if path.is_dir() {
                // A folder that says so holds caches, whatever its name (`cargo` marks its own).
                if !LEFT_OUT.contains(&name.as_str()) && !path.join("CACHEDIR.TAG").exists() {
                    folders.push(path);
                }
            } else if endings.iter().any(|ending| name.ends_with(ending)) {
                let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
                let path =
                    path.strip_prefix(&root).expect("below the root").to_str().expect("UTF-8").to_owned();
                found.push(Source { path, text });
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

/// All Rust files.
pub(crate) fn rust_files() -> Vec<Source> {
    files(&[".rs"])
}

impl Source {
    /// The text with comments and the insides of literals as blanks; lines stay lines.
    pub(crate) fn code(&self) -> String {
        blank(&self.text)
    }

    /// Code split in what is always compiled and what is for tests only (from `#[cfg(test)] mod … {` on; our test
    /// modules come last). Files in a folder `tests` or `benches` and files `tests.rs` are all test.
    pub(crate) fn split(&self) -> (String, String) {
        let code = self.code();
        let is_test = |part: &str| matches!(part, "tests" | "benches" | "tests.rs");
        if self.path.split('/').any(is_test) {
            return (String::new(), code);
        }
        let is_module = |at: &usize| {
            let rest = code[*at..].trim_start_matches("#[cfg(test)]").trim_start();
            rest.starts_with("mod ")
                && rest.find('{').is_some_and(|open| open < rest.find(';').unwrap_or(open + 1))
        };
        match code.match_indices("#[cfg(test)]").map(|(at, _)| at).find(is_module) {
            Some(at) => (code[..at].to_owned(), code[at..].to_owned()),
            None => (code, String::new()),
        }
    }

    /// `path:line` of a byte offset.
    pub(crate) fn place(&self, offset: usize) -> String {
        format!("{}:{}", self.path, self.text[..offset].matches('\n').count() + 1)
    }
}

/// Offsets at which `word` stands by itself: not inside a longer name. A word may be a path (`std::fs`).
pub(crate) fn words(code: &str, word: &str) -> Vec<usize> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices(word)
        .filter(|(at, _)| {
            !code[..*at].chars().next_back().is_some_and(is_name)
                && !code[at + word.len()..].chars().next().is_some_and(is_name)
        })
        .map(|(at, _)| at)
        .collect()
}

fn blank(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let rest = &bytes[at..];
        let after_name = at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_');
        let (skip, keep) = if rest.starts_with(b"//") {
            (rest.iter().position(|b| *b == b'\n').unwrap_or(rest.len()), 0)
        } else if rest.starts_with(b"/*") {
            (block_comment(rest), 0)
        } else if let Some(hashes) = raw_string(rest).filter(|_| !after_name) {
            let close: Vec<u8> = [&b"\""[..], &vec![b'#'; hashes]].concat();
            let open = rest.iter().position(|b| *b == b'"').expect("a raw string has a quote") + 1;
            let end = rest[open..].windows(close.len()).position(|window| window == close);
            (end.map_or(rest.len(), |end| open + end + close.len()), open)
        } else if rest[0] == b'"' {
            (quoted(rest, b'"'), 1)
        } else if rest[0] == b'\'' && is_char(rest) {
            (quoted(rest, b'\''), 1)
        } else {
            at += 1;
            continue;
        };
        for byte in &mut out[at + keep..at + skip] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        at += skip;
    }
    String::from_utf8(out).expect("whole characters were blanked")
}

fn block_comment(text: &[u8]) -> usize {
    let (mut depth, mut at) = (0usize, 0);
    while at < text.len() {
        if text[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if text[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                break;
            }
        } else {
            at += 1;
        }
    }
    at
}

/// Number of `#` if a raw string starts here.
fn raw_string(text: &[u8]) -> Option<usize> {
    let text = text.strip_prefix(b"b").unwrap_or(text).strip_prefix(b"r")?;
    let hashes = text.iter().take_while(|b| **b == b'#').count();
    (text.get(hashes) == Some(&b'"')).then_some(hashes)
}

/// Length of a literal with escapes.
fn quoted(text: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < text.len() && text[at] != quote {
        at += if text[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(text.len())
}

/// A quote starts a character, not a lifetime, if an escape or a closing quote follows.
fn is_char(text: &[u8]) -> bool {
    let text = std::str::from_utf8(&text[..text.len().min(8)])
        .unwrap_or_else(|e| std::str::from_utf8(&text[..e.valid_up_to()]).expect("valid up to there"));
    let mut chars = text.chars().skip(1);
    matches!((chars.next(), chars.next()), (Some('\\'), _) | (Some(_), Some('\'')))
}

#[test]
fn comments_and_literals_are_blanked() {
    let check = |text: &str, expected: &str| assert_eq!(blank(text), expected);
    check("a // b\nc", "a     \nc");
    check("a /* b /* c */ d */ e", "a                   e");
    check(r#"f("x\"y", 'z', '\'')"#, r#"f("     , '  , '   )"#);
    check("r#\"a\"b\"# c", "r#\"      c");
    check("fn f<'a>(x: &'a str)", "fn f<'a>(x: &'a str)");
    check("for r in x {}", "for r in x {}");
    assert_eq!(words("a unsafe_code unsafe {", "unsafe"), [14]);
}
