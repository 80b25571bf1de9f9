//! The binary `shine` as scripts see it: output, errors and exit codes, as far as no cluster is needed.

mod shine;

use std::net::UdpSocket;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::Value;
use shine::{folder, json, refused, run};

/// Names under "Commands:" of a help text.
fn commands(help: &str) -> Vec<String> {
    help.lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| !line.is_empty())
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next().map(str::to_owned))
        .filter(|name| name != "help")
        .collect()
}

fn check_help(dir: &Path, path: &[String]) -> usize {
    let args: Vec<&str> = path.iter().map(String::as_str).chain(["--help"]).collect();
    let help = run(dir, &args);
    assert_eq!((help.code, help.stderr.as_str()), (0, ""), "{path:?}");
    let example = ["shine".to_owned()].iter().chain(path).cloned().collect::<Vec<_>>().join(" ");
    let examples = help.stdout.split("Examples:").nth(1).unwrap_or_default();
    assert!(examples.contains(&example), "help of '{example}' has an example of it:\n{}", help.stdout);
    let below = commands(&help.stdout);
    1 + below
        .into_iter()
        .map(|name| {
            let mut path = path.to_vec();
            path.push(name);
            check_help(dir, &path)
        })
        .sum::<usize>()
}

#[test]
fn every_command_has_help_with_examples() {
    let dir = folder();
    let seen = check_help(dir.path(), &[]);
    assert!(seen >= 20, "only {seen} commands were found");
}

#[test]
fn the_help_says_what_exit_codes_mean() {
    let dir = folder();
    let help = run(dir.path(), &["--help"]);
    for code in 0..=8 {
        assert!(help.stdout.contains(&format!("\n  {code}  ")), "{code} in {}", help.stdout);
    }
    let version = run(dir.path(), &["--version"]);
    assert_eq!(version.code, 0);
    assert!(version.stdout.starts_with("shine "), "{version:?}");
}

#[test]
fn a_wrong_command_line_is_usage() {
    let dir = folder();
    let refused = |args: &[&str], parts: &[&str]| refused(dir.path(), args, 2, "usage", parts);
    refused(&["no-such-command"], &["no-such-command"]);
    refused(&["search", "-c", "words", "--ids", "5"], &["--ids"]);
    refused(&["search", "-c", "words"], &["--vector", "--id", "--file"]);
    refused(&["search", "-c", "words", "--id", "5", "--vector", "1,2"], &["cannot be used with"]);
    refused(&["search", "-c", "words", "--id", "five"], &["'five' is not an id", "UUID"]);
    refused(&["search", "-c", "words", "--id", "5", "--k", "0"], &["--k", "1..=65536"]);
    refused(&["search", "--id", "5"], &["--collection"]);
    refused(&["insert", "-c", "words", "--id", "5"], &["--vector"]);
    refused(&["insert", "-c", "words", "--vector", "1,2"], &["--id"]);
    refused(
        &["insert", "-c", "words", "--id", "5", "--vector", "1", "--ids-from", "5"],
        &["cannot be used with"],
    );
    refused(&["collection", "create", "words", "--dim", "3"], &["--metric"]);
    refused(
        &["collection", "create", "words", "--dim", "3", "--metric", "l3"],
        &["unknown metric 'l3'", "l2, ip, cosine"],
    );
    refused(&["up", "--memory-nodes", "0"], &["--memory-nodes"]);
    refused(&["up", "--region-bytes", "lots"], &["'lots' is not a size"]);
    refused(
        &["ca", "issue", "--ca", "ca", "--role", "king", "--name", "a", "--out", "x"],
        &["unknown role 'king'"],
    );
    refused(&["recall", "-c", "words", "--queries", "q", "--truth", "t", "--ef", "40,x"], &["--ef"]);
}

#[test]
fn without_a_cluster_commands_say_how_to_get_one() {
    let dir = folder();
    for args in [
        &["status"][..],
        &["collection", "list"],
        &["search", "-c", "words", "--id", "5"],
        &["get", "-c", "words", "5"],
        &["check", "-c", "words"],
    ] {
        refused(dir.path(), args, 3, "not_up", &["shine up", "--oracles", ".shine"]);
    }
    refused(dir.path(), &["down"], 3, "not_up", &["no cluster in .shine"]);
    refused(dir.path(), &["down", "--dir", "elsewhere"], 3, "not_up", &["elsewhere"]);
    std::fs::create_dir(dir.path().join(".shine")).unwrap();
    std::fs::write(dir.path().join(".shine/cluster.json"), "{}").unwrap();
    refused(dir.path(), &["status"], 2, "bad_input", &["cluster.json is not a cluster file"]);
}

#[test]
fn certificates_are_made_and_checked() {
    let dir = folder();
    let at = |path: &str| dir.path().join(path);
    let made = json(&run(dir.path(), &["ca", "init", "--out", "ca", "--json"]));
    assert_eq!(made["files"], serde_json::json!(["ca.pem", "ca.key"]));
    let mode = at("ca/ca.key").metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o077, 0, "the key is for its owner alone");
    refused(dir.path(), &["ca", "init", "--out", "ca"], 5, "file_exists", &["ca.pem exists already"]);

    let issue = ["ca", "issue", "--ca", "ca", "--role", "client", "--name", "alice", "--out", "alice"];
    let issued = run(dir.path(), &issue);
    assert_eq!((issued.code, issued.stderr.as_str()), (0, ""), "{issued:?}");
    assert!(issued.stdout.contains("client alice"), "{issued:?}");
    for file in ["ca.pem", "node.pem", "node.key"] {
        assert!(at("alice").join(file).is_file(), "{file}");
    }
    refused(dir.path(), &issue, 5, "file_exists", &["node.pem exists already", "--force"]);
    let key = std::fs::read(at("alice/node.key")).unwrap();
    assert_eq!(run(dir.path(), &[&issue[..], &["--force"]].concat()).code, 0);
    assert_ne!(std::fs::read(at("alice/node.key")).unwrap(), key, "it was renewed");
    let bad_name = ["ca", "issue", "--ca", "ca", "--role", "cn", "--name", "A b", "--out", "x"];
    refused(dir.path(), &bad_name, 2, "bad_input", &["'A b'"]);
    let no_ca = ["ca", "issue", "--ca", "nowhere", "--role", "cn", "--name", "a", "--out", "x"];
    refused(dir.path(), &no_ca, 2, "bad_input", &["nowhere", "shine ca init"]);
}

#[test]
fn no_oracle_is_unavailable_and_a_bad_certificate_folder_is_input() {
    let dir = folder();
    json(&run(dir.path(), &["ca", "init", "--out", "ca", "--json"]));
    let issue =
        ["ca", "issue", "--ca", "ca", "--role", "client", "--name", "alice", "--out", "alice", "--json"];
    json(&run(dir.path(), &issue));
    // A socket that never answers.
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let oracle = silent.local_addr().unwrap().to_string();
    let connect = ["--oracles", &oracle, "--cert-dir", "alice", "--connect-ms", "200"];
    refused(dir.path(), &[&["status"], &connect[..]].concat(), 4, "no_oracle", &[&oracle]);

    let nowhere = ["status", "--oracles", &oracle, "--cert-dir", "nowhere"];
    refused(dir.path(), &nowhere, 2, "bad_input", &["nowhere"]);
    let nonsense = ["status", "--oracles", "nonsense", "--cert-dir", "alice"];
    refused(dir.path(), &nonsense, 2, "bad_input", &["--oracles", "nonsense"]);
}

/// A file of `rows` × `dim` small f32 values in big-ann form.
fn fbin(path: &Path, rows: u32, dim: u32) {
    let mut bytes = [rows.to_le_bytes(), dim.to_le_bytes()].concat();
    for at in 0..rows * dim {
        let value = f32::from(u8::try_from(at.wrapping_mul(2_654_435_761) >> 24).expect("eight bits"));
        bytes.extend_from_slice(&value.to_le_bytes());
    }
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn build_writes_a_graph_file_and_says_what_is_in_it() {
    let dir = folder();
    fbin(&dir.path().join("base.fbin"), 300, 8);
    let build = ["build", "base.fbin", "--metric", "l2", "--m", "8", "--out", "g.graph", "--threads", "1"];
    let built = json(&run(dir.path(), &[&build[..], &["--json"]].concat()));
    for (field, expected) in [
        ("vectors", 300.into()),
        ("dimension", 8.into()),
        ("dtype", Value::from("f32")),
        ("metric", "l2".into()),
        ("m", 8.into()),
        ("ef_construction", 200.into()),
        ("builder", "native".into()),
        // 300 × (8·17 + 10 + 2) and 43 upper lists of 72 bytes.
        ("memory_bytes", 47_496.into()),
    ] {
        assert_eq!(built[field], expected, "{field} in {built}");
    }
    let first = std::fs::read(dir.path().join("g.graph")).unwrap();
    assert_eq!(built["file_bytes"], first.len());
    refused(dir.path(), &build, 5, "file_exists", &["g.graph exists already", "--force"]);
    assert_eq!(std::fs::read(dir.path().join("g.graph")).unwrap(), first);
    let plain = run(dir.path(), &[&build[..], &["--rows", "100", "--force"]].concat());
    assert_eq!((plain.code, plain.stderr.as_str()), (0, ""), "{plain:?}");
    for part in ["100 of 8 x f32, l2", "15.5 KiB beside the vectors"] {
        assert!(plain.stdout.contains(part), "{part} in {plain:?}");
    }
    let peer = ["build", "base.fbin", "--metric", "ip", "--builder", "hnsw_rs", "--out", "p.graph", "--json"];
    assert_eq!(json(&run(dir.path(), &peer))["builder"], "hnsw_rs");
}

#[test]
fn build_names_what_is_wrong_with_its_input() {
    let dir = folder();
    fbin(&dir.path().join("base.fbin"), 10, 4);
    let build = |base: &str, more: &[&str], parts: &[&str]| {
        let args = [&["build", base, "--metric", "l2", "--out", "g.graph"], more].concat();
        refused(dir.path(), &args, 2, "bad_input", parts);
        assert!(!dir.path().join("g.graph").exists());
    };
    build("none.fbin", &[], &["none.fbin"]);
    build("base.fbin", &["--m", "1"], &["m is 1", "2 to 256"]);
    build("base.fbin", &["--ef-construction", "0"], &["ef_construction is 0"]);
    build("base.fbin", &["--rows", "11"], &["base.fbin", "11"]);
    std::fs::write(dir.path().join("cut.fbin"), [10u8, 0, 0, 0, 4, 0, 0, 0, 1, 2, 3]).unwrap();
    build("cut.fbin", &[], &["cut.fbin", "expected"]);
    let mut bytes = std::fs::read(dir.path().join("base.fbin")).unwrap();
    bytes[8..12].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(dir.path().join("nan.fbin"), bytes).unwrap();
    build("nan.fbin", &[], &["nan.fbin", "row 0, column 0"]);
    refused(dir.path(), &["load", "--graph", "base.fbin", "-c", "words"], 2, "bad_input", &["base.fbin"]);
}
