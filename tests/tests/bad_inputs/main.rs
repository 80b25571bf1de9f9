//! What is given wrongly: each case with what the user gives, how it is told, and what is there afterwards. The tables of
//! `docs/bad-inputs.md` are what these tests saw; SHINE_BLESS=1 writes them anew.

#![forbid(unsafe_code)]

mod cluster;
mod files;
mod right;
mod values;

use std::collections::BTreeMap;
use std::fs;

use shine_tests::desk::{Desk, Refusal};
use shine_tests::page::{self, Table};
use xxhash_rust::xxh3::xxh3_64;

pub(crate) const PAGE: &str = "docs/bad-inputs.md";

pub(crate) const FILES: &str = "Files";
pub(crate) const VALUES: &str = "Values";
pub(crate) const COLLECTIONS: &str = "Collections and memory";
pub(crate) const PEERS: &str = "Certificates, ports and peers";
pub(crate) const REQUESTS: &str = "Requests";
const ELSEWHERE: &str = "Not reachable from a command line";
pub(crate) const RIGHT: &str = "Valid and right";

/// Exit code and short name of the kinds of refusal.
pub(crate) type Kind = (i32, &'static str);
pub(crate) const USAGE: Kind = (2, "usage");
pub(crate) const BAD_INPUT: Kind = (2, "bad_input");
pub(crate) const NOT_FOUND: Kind = (3, "not_found");
pub(crate) const REFUSED: Kind = (6, "bad_request");
pub(crate) const FORBIDDEN: Kind = (6, "forbidden");
pub(crate) const FULL: Kind = (7, "region_full");
/// Of programs other than `shine`: the message is all.
pub(crate) const FAILED: Kind = (1, "");

pub(crate) const AS_BEFORE: &str = "as before";

/// The text of an exit.
pub(crate) fn exit_text((exit, code): (i32, &str)) -> String {
    if code.is_empty() { exit.to_string() } else { format!("{exit} `{code}`") }
}

/// Words of a command line; `''` is an empty one.
pub(crate) fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().map(|word| if word == "''" { "" } else { word }).collect()
}

/// Puts `word` in the place of what stands between `before` and the next `after`, wherever that is.
pub(crate) fn replace_between(text: &str, before: &str, after: &str, word: &str) -> String {
    let mut parts = text.split(before);
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let rest = part.find(after).map_or("", |at| &part[at..]);
        out += before;
        out += word;
        out += rest;
    }
    out
}

/// Puts `PORT` in the place of ports that the system chose, which are large.
pub(crate) fn without_ports(text: &str) -> String {
    const HOST: &str = "127.0.0.1:";
    let mut parts = text.split(HOST);
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let digits = part.len() - part.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        out += HOST;
        out += if digits > 3 { "PORT" } else { &part[..digits] };
        out += &part[digits..];
    }
    out
}

/// A message on one line, without what differs from run to run.
pub(crate) fn normalized(message: &str) -> String {
    // The usage text behind it says nothing of the input.
    let first = message.split("\n\n").next().unwrap_or_default();
    let line = first.split_whitespace().collect::<Vec<_>>().join(" ");
    let line = ["cn-0", "cn-1"].iter().fold(line, |line, node| line.replace(node, "cn-N"));
    without_ports(&line)
}

/// A desk and what is to stay as it is: its files, and the collections of its cluster if it has one.
pub(crate) struct Guard<'a> {
    desk: &'a Desk,
    files: BTreeMap<String, Vec<u8>>,
    collections: Option<Vec<(String, String, u64)>>,
}

impl<'a> Guard<'a> {
    pub(crate) fn new(desk: &'a Desk) -> Self {
        let has_cluster = desk.folder().path(".shine/cluster.json").exists();
        let collections = has_cluster.then(|| desk.collections());
        Self { desk, files: desk.files(), collections }
    }

    /// Runs a command line that is refused, and looks whether anything has changed.
    #[track_caller]
    pub(crate) fn refuse(&self, line: &str) -> Refusal {
        let refusal = self.only_refuse(line);
        self.check_files(line);
        self.check_collections(line);
        refusal
    }

    #[track_caller]
    pub(crate) fn only_refuse(&self, line: &str) -> Refusal {
        let words = words(line);
        let (program, args) = words.split_first().expect("a line names a program");
        let mut refusal = if *program == "shine" {
            self.desk.refusal(args)
        } else {
            let ran = self.desk.program(program, args);
            assert_eq!(ran.stdout, "", "{line}: {ran:?}");
            let text = ran.stderr.trim_start_matches("error: ");
            let message = text.strip_prefix(&format!("{program}: ")).unwrap_or(text);
            Refusal { exit: ran.code, code: String::new(), message: message.to_owned() }
        };
        refusal.message = normalized(&refusal.message);
        assert_ne!(refusal.exit, 0, "{line}: {refusal:?}");
        refusal
    }

    #[track_caller]
    pub(crate) fn check_files(&self, line: &str) {
        let (now, before) = (self.desk.files(), &self.files);
        let names = |files: &BTreeMap<String, Vec<u8>>| files.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&now), names(before), "{line}: files came or went");
        assert!(now == *before, "{line}: a file was changed");
    }

    #[track_caller]
    pub(crate) fn check_collections(&self, line: &str) {
        if let Some(collections) = &self.collections {
            assert_eq!(self.desk.collections(), *collections, "{line}");
        }
    }
}

/// A table of single cases.
pub(crate) struct Cases<'a> {
    pub(crate) guard: Guard<'a>,
    pub(crate) table: Table,
}

impl<'a> Cases<'a> {
    pub(crate) fn new(desk: &'a Desk) -> Self {
        let table = Table::new(&["input", "command", "exit", "message", "afterwards"]);
        Self { guard: Guard::new(desk), table }
    }

    /// `line` is refused as `kind` with a message that names `name`, and nothing has changed.
    #[track_caller]
    pub(crate) fn refused(&mut self, input: &str, kind: Kind, line: &str, name: &str) {
        let refusal = self.guard.refuse(line);
        self.push(input, kind, line, name, &refusal, AS_BEFORE);
    }

    #[track_caller]
    pub(crate) fn push(
        &mut self,
        input: &str,
        kind: Kind,
        line: &str,
        name: &str,
        refusal: &Refusal,
        afterwards: &str,
    ) {
        let Refusal { exit, code, message } = refusal;
        assert_eq!((*exit, code.as_str()), kind, "{line}: {message}");
        assert!(message.contains(name), "{line}: '{message}' does not name {name}");
        let line = format!("`{}`", without_ports(line));
        self.table.push(&[input, &line, &exit_text(kind), message, afterwards]);
    }
}

pub(crate) fn bin(rows: u32, dim: u32, data: &[u8]) -> Vec<u8> {
    [&rows.to_le_bytes()[..], &dim.to_le_bytes(), data].concat()
}

pub(crate) fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

pub(crate) fn u32s(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

pub(crate) fn npy(header: &str, data: &[u8]) -> Vec<u8> {
    [b"\x93NUMPY\x01\x00", &(header.len() as u16).to_le_bytes()[..], header.as_bytes(), data].concat()
}

/// Numbers from -1 to 1 that are always the same.
pub(crate) fn noise(count: usize) -> Vec<f32> {
    let number = |at: usize| (xxh3_64(&at.to_le_bytes()) >> 40) as f32 / (1 << 23) as f32 - 1.0;
    (0..count).map(number).collect()
}

/// `rows` rows of `dim` small numbers.
pub(crate) fn rows(rows: u32, dim: u32) -> Vec<u8> {
    bin(rows, dim, &f32s(&noise((rows * dim) as usize)))
}

pub(crate) fn put(desk: &Desk, name: &str, bytes: &[u8]) {
    fs::write(desk.folder().path(name), bytes).expect("written");
}

/// The page has the sections that these tests write, and names tests that exist.
#[test]
fn the_page_is_whole() {
    let text = page::read(PAGE);
    let sections = [FILES, VALUES, COLLECTIONS, PEERS, REQUESTS, ELSEWHERE, RIGHT];
    assert_eq!(page::titles(&text), sections);
    let section = text.split(&format!("## {ELSEWHERE}")).nth(1).expect("it is there");
    let section = section.split("\n## ").next().expect("a section");
    let mut seen = 0;
    for row in section.lines().filter(|line| line.starts_with('|')).skip(2) {
        let cell = row.split('|').nth(3).expect("a third cell").trim().trim_matches('`');
        let (file, test) = cell.split_once(" ").expect("a file and a test");
        let source = page::read(file);
        assert!(source.contains(&format!("fn {test}(")), "{file} has no test {test}");
        seen += 1;
    }
    assert!(seen >= 5, "{seen} rows");
}
