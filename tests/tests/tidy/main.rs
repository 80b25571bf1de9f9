//! Rules of the repository, as tests: what a reviewer would otherwise have to look for each time.
//!
//! Every rule lists all its findings with file and line. To widen a list (a new pure module, a new place for `unsafe`)
//! change the constant and say why in the same commit.

#![forbid(unsafe_code)]

mod source;

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;

use source::{Source, files, root, rust_files, words};

/// Modules that decide and compute, and do nothing else: files, or folders with all that is in them.
const PURE: &[&str] = &[
    "cn/src/hnsw/search.rs",
    "cn/src/hnsw/select.rs",
    "cn/src/hnsw/visited.rs",
    "cn/src/http/fields.rs",
    "cn/src/http/qdrant.rs",
    "common/src/ids.rs",
    "common/src/layout.rs",
    "common/src/metric",
    "common/src/metric.rs",
    "common/src/verbs/frame.rs",
    "common/src/wire.rs",
    "mn/src/region.rs",
    "oracle/src/state.rs",
];

/// What pure modules must not name: sockets, files, clocks, threads, global randomness.
const IMPURE: &[&str] = &[
    "Instant",
    "RandomState",
    "SystemTime",
    "UdpSocket",
    "TcpListener",
    "TcpStream",
    "libc",
    "memmap2",
    "nix",
    "quinn",
    "rand::random",
    "rand::rng",
    "rand::rngs",
    "socket2",
    "std::env",
    "std::fs",
    "std::io",
    "std::net",
    "std::process",
    "std::thread",
    "std::time",
    "tokio",
];

/// Which packages of ours a package may import. Absent: nothing.
const IMPORTS: &[(&str, &[&str])] = &[
    ("shine-cn", &["shine-common"]),
    ("shine-mn", &["shine-common"]),
    ("shine-oracle", &["shine-common"]),
    ("shine-client", &["shine-common"]),
    ("shine-sim", &["shine-common", "shine-cn", "shine-mn", "shine-oracle", "shine-client"]),
    ("shine-cli", &["shine-common", "shine-cn", "shine-client", "shine-sim"]),
    ("shine-fuzz", &["shine-common"]),
    ("shine-tests", &["shine-common", "shine-cn", "shine-mn", "shine-oracle", "shine-client", "shine-sim"]),
];

/// Where `unsafe` may stand: remote memory, memory maps, prefetch, SIMD, and what a child does before it is a program.
const UNSAFE: &[&str] = &[
    "cn/benches/",
    "cn/src/hnsw/prefetch.rs",
    "cn/src/hnsw/region.rs",
    "common/benches/",
    "common/src/dataset/",
    "common/src/graph_file.rs",
    "common/src/metric.rs",
    "common/src/metric/",
    "common/src/verbs/memory.rs",
    "common/tests/netns.rs",
    "sim/src/cluster/process.rs",
];

/// A file with more lines than this before its tests is to be split by responsibility.
const LINES_MAX: usize = 1000;

fn report(rule: &str, findings: Vec<String>) {
    assert!(findings.is_empty(), "{rule}:\n  {}\n", findings.join("\n  "));
}

fn is_under(path: &str, list: &[&str]) -> bool {
    list.iter().any(|entry| {
        path.strip_prefix(entry)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/') || entry.ends_with('/'))
    })
}

/// Attributes (`#[name …]`, `#![name …]`) with one of the names: offset and text between the brackets.
fn attributes<'a>(code: &'a str, names: &[&str]) -> Vec<(usize, &'a str)> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices('#') {
        let Some(body) = code[at + 1..].strip_prefix('!').unwrap_or(&code[at + 1..]).strip_prefix('[') else {
            continue;
        };
        let mut depth = 1usize;
        let end = body.find(|c| {
            depth = if c == '[' { depth + 1 } else { depth - usize::from(c == ']') };
            depth == 0
        });
        let body = &body[..end.unwrap_or(body.len())];
        let name = body.trim_start().split(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap_or("");
        // `cfg_attr` carries attributes of its own.
        let is_named = names.contains(&name)
            || name == "cfg_attr" && names.iter().any(|name| !words(body, &format!("{name}(")).is_empty());
        if is_named {
            found.push((at, body));
        }
    }
    found
}

#[test]
fn pure_modules_touch_nothing_outside() {
    let mut findings = Vec::new();
    let sources = rust_files();
    for entry in PURE {
        if !root().join(entry).exists() {
            findings.push(format!("{entry} is listed and does not exist"));
        }
    }
    for source in sources.iter().filter(|source| is_under(&source.path, PURE)) {
        let (code, _) = source.split();
        for word in IMPURE {
            findings.extend(
                words(&code, word).into_iter().map(|at| format!("{} names {word}", source.place(at))),
            );
        }
    }
    report("pure modules know no socket, file, clock, thread or global randomness", findings);
}

#[test]
fn imports_go_one_way_and_versions_stand_in_one_place() {
    let mut findings = Vec::new();
    let allowed: BTreeMap<&str, &[&str]> = IMPORTS.iter().copied().collect();
    for source in files(&["Cargo.toml"]) {
        let manifest: toml::Table = source.text.parse().unwrap_or_else(|e| panic!("{}: {e}", source.path));
        let Some(package) = manifest.get("package") else { continue };
        let name = package["name"].as_str().expect("a package has a name");
        if manifest.get("lints").and_then(|lints| lints.get("workspace")).is_none() {
            findings.push(format!("{}: lints are the workspace's (`[lints] workspace = true`)", source.path));
        }
        for section in ["dependencies", "dev-dependencies", "build-dependencies"] {
            let Some(dependencies) = manifest.get(section).and_then(toml::Value::as_table) else { continue };
            for (dependency, value) in dependencies {
                if value.get("workspace").and_then(toml::Value::as_bool) != Some(true) {
                    findings.push(format!(
                        "{}: {dependency}: versions stand in the workspace's manifest",
                        source.path
                    ));
                }
                let is_ours = dependency.starts_with("shine-");
                if is_ours && !allowed.get(name).is_some_and(|list| list.contains(&dependency.as_str())) {
                    findings.push(format!("{}: {name} must not import {dependency}", source.path));
                }
            }
        }
    }
    report("imports: common <- {cn, mn, oracle, client} <- sim <- tests", findings);
}

#[test]
fn unsafe_stands_where_it_may_and_says_why() {
    let mut findings = Vec::new();
    for source in rust_files() {
        let code = source.code();
        let lines: Vec<&str> = source.text.lines().collect();
        for at in words(&code, "unsafe") {
            if !is_under(&source.path, UNSAFE) {
                findings.push(format!("{}: no unsafe here", source.place(at)));
            }
            let rest = code[at + "unsafe".len()..].trim_start();
            // A type of function pointers, and an attribute, need no note.
            if rest.starts_with("fn(") || rest.starts_with('(') {
                continue;
            }
            let line = source.text[..at].matches('\n').count();
            let (note, above) = if rest.starts_with("fn ") { ("# Safety", 20) } else { ("SAFETY:", 5) };
            if !lines[line.saturating_sub(above)..=line].iter().any(|line| line.contains(note)) {
                findings.push(format!("{}: unsafe without a `{note}` note", source.place(at)));
            }
        }
        let is_crate_root = source.path.ends_with("src/lib.rs") || source.path.ends_with("src/main.rs");
        let folder = source.path.rsplit_once('/').map_or("", |(folder, _)| folder);
        let may = UNSAFE.iter().any(|entry| entry.starts_with(folder));
        if is_crate_root && !may && !code.contains("#![forbid(unsafe_code)]") {
            findings.push(format!("{}: a crate without unsafe says `#![forbid(unsafe_code)]`", source.path));
        }
    }
    report("unsafe", findings);
}

#[test]
fn exceptions_carry_a_reason() {
    let mut findings = Vec::new();
    for source in rust_files() {
        let code = source.code();
        for (at, body) in attributes(&code, &["allow", "expect"]) {
            if words(body, "reason").is_empty() {
                findings.push(format!("{}: needs `reason = \"…\"`", source.place(at)));
            }
        }
        for (at, body) in attributes(&code, &["ignore"]) {
            if !body.contains('=') {
                findings.push(format!("{}: needs `ignore = \"…\"`", source.place(at)));
            }
        }
    }
    report("every allow, expect and ignore has a reason", findings);
}

#[test]
fn tests_do_not_sleep() {
    let mut findings = Vec::new();
    for source in rust_files() {
        let (code, test) = source.split();
        for at in ["sleep", "sleep_until", "sleep_ms"].into_iter().flat_map(|word| words(&test, word)) {
            if test[at..].trim_start_matches(char::is_alphabetic).starts_with('(') {
                findings.push(source.place(code.len() + at));
            }
        }
    }
    report("tests wait for what they need, with a deadline; they do not sleep", findings);
}

#[test]
fn files_say_what_they_are_and_stay_readable() {
    let mut findings = Vec::new();
    for source in rust_files() {
        if !source.text.starts_with("//! ") {
            findings.push(format!("{}: opens with `//!` and what it is", source.path));
        }
        let (code, test) = source.split();
        let lines = if code.is_empty() { test } else { code }.lines().count();
        if lines > LINES_MAX {
            findings.push(format!("{}: {lines} lines; split it by responsibility", source.path));
        }
    }
    report("files", findings);
}

/// Targets of Markdown links: offset and text.
fn links(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.match_indices("](").filter_map(|(at, _)| {
        let rest = &text[at + 2..];
        rest.find([')', ' ', '\n']).map(|end| (at, &rest[..end]))
    })
}

#[test]
fn documents_point_at_things_that_exist() {
    let mut findings = Vec::new();
    for source in files(&[".md"]) {
        let folder = root().join(&source.path).parent().expect("a file lies in a folder").to_owned();
        for (at, link) in links(&source.text) {
            let target = link.split('#').next().unwrap_or("");
            if !target.is_empty()
                && !target.contains("://")
                && !target.starts_with("mailto:")
                && !folder.join(target).exists()
            {
                findings.push(format!("{}: no {target}", source.place(at)));
            }
        }
        for (at, _) in source.text.match_indices("scripts/") {
            let end = |c: char| !(c.is_ascii_alphanumeric() || "/_-.".contains(c));
            let name = source.text[at..].split(end).next().unwrap_or("").trim_end_matches('.');
            if !root().join(name).exists() {
                findings.push(format!("{}: no {name}", source.place(at)));
            }
        }
    }
    report("documents", findings);
}

#[test]
fn scripts_stop_at_the_first_error() {
    let mut findings = Vec::new();
    let mut scripts: Vec<Source> = files(&[".sh"]);
    scripts.extend(files(&["run"]).into_iter().filter(|source| source.path.starts_with(".ci/")));
    for source in scripts {
        let is_library = source.path.ends_with("lib.sh");
        if !source.text.starts_with("#!/usr/bin/env bash\n") {
            findings.push(format!("{}: begins with `#!/usr/bin/env bash`", source.path));
        }
        if !is_library && !source.text.contains("set -euo pipefail") {
            findings.push(format!("{}: needs `set -euo pipefail`", source.path));
        }
        let mode = root().join(&source.path).metadata().expect("it was just read").permissions().mode();
        if !is_library && mode & 0o111 == 0 {
            findings.push(format!("{}: is not executable", source.path));
        }
    }
    report("scripts", findings);
}

#[test]
fn no_path_of_one_persons_machine() {
    let mut findings = Vec::new();
    for source in files(&[".rs", ".toml", ".md", ".sh", ".json", ".yml", "run"]) {
        for folder in ["home", "Users", "root"] {
            let needle = format!("/{folder}/");
            for (at, _) in source.text.match_indices(&needle) {
                // Part of a longer relative path, or of an address, is something else.
                if !source.text[..at].ends_with(|c: char| c.is_alphanumeric() || "._-".contains(c)) {
                    findings.push(format!("{}: {needle}", source.place(at)));
                }
            }
        }
    }
    report("paths in the repository work on every machine", findings);
}
