//! The command `shine` against a cluster that it starts itself: a user's whole way from `up` to `down`, and what is
//! refused on it, each with its exit code and a message that names what.

#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::net::UdpSocket;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use shine_common::dataset::Vectors;
use shine_sim::host::ProcessTimes;
use shine_tests::desk::{Desk, ids};
use shine_tests::{base, queries, shipped};

/// Rows of the graph that is loaded.
const ROWS: usize = 3_000;

fn path(name: &str) -> String {
    shipped(name).to_str().expect("UTF-8").to_owned()
}

/// A row as `--vector` takes it.
fn typed(vectors: &Vectors, row: usize) -> String {
    let numbers: Vec<_> = vectors.row(row).iter().map(|byte| (*byte as i8).to_string()).collect();
    numbers.join(",")
}

/// A row as `--json` gives it.
fn numbers(vectors: &Vectors, row: usize) -> Value {
    vectors.row(row).iter().map(|byte| f64::from(*byte as i8)).collect()
}

fn pids(up: &Value) -> Vec<i32> {
    let nodes = up["nodes"].as_array().expect("nodes");
    nodes.iter().map(|node| node["pid"].as_i64().expect("a pid") as i32).collect()
}

fn runs(pid: i32) -> bool {
    ProcessTimes::read(pid).is_ok()
}

#[test]
fn a_cluster_stays_until_it_is_taken_down_and_comes_back_when_asked() {
    let (desk, up) = Desk::with_cluster();
    assert_eq!(up["dir"], ".shine");
    let pids_of_first = pids(&up);
    assert_eq!(pids_of_first.len(), 5);
    assert!(pids_of_first.iter().all(|pid| runs(*pid)));
    desk.refused(&["up"], 5, "already_up", &["a cluster is up in .shine", "shine down"]);

    let names = BTreeSet::from(["oracle-0", "mn-0", "mn-1", "cn-0", "cn-1"]);
    let status = desk.json(&["status"]);
    let nodes = status["nodes"].as_array().expect("nodes");
    assert_eq!(nodes.iter().filter_map(|node| node["name"].as_str()).collect::<BTreeSet<_>>(), names);
    for node in nodes {
        let said = &node["status"];
        assert_eq!(said["version"], env!("CARGO_PKG_VERSION"), "{node}");
        assert_eq!((&said["name"], &said["role"]), (&node["name"], &node["role"]), "{node}");
        assert_eq!(said["oracle_reachable"], true, "{node}");
        assert!(said["epoch"].as_u64() > Some(0), "{node}");
        assert!(said["simd"].as_str().is_some_and(|simd| !simd.is_empty()), "{node}");
    }
    assert_eq!(status["collections"], 0);
    let text = desk.text(&["status"]);
    for name in &names {
        let line =
            text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name}: {text}"));
        assert!(line.contains(" up ") && line.contains(env!("CARGO_PKG_VERSION")), "{line}");
    }
    assert!(text.contains("0 collections"), "{text}");
    assert!(desk.text(&["status", "--counters"]).contains("searches_running"));

    // A process that is gone is named, and the others are told of all the same.
    let cn = nodes.iter().position(|node| node["name"] == "cn-1").expect("a compute node");
    let of_cn = up["nodes"].as_array().expect("nodes").iter().find(|node| node["name"] == "cn-1");
    let pid = of_cn.expect("a compute node")["pid"].as_i64().expect("a pid") as i32;
    kill(Pid::from_raw(pid), Signal::SIGKILL).expect("it runs");
    let ran = desk.run(&["status", "--json"]);
    assert_eq!(ran.code, 4, "{ran:?}");
    let error: Value = serde_json::from_str(&ran.stderr).expect("JSON");
    assert_eq!(error, json!({ "error": { "code": "unavailable", "message": "no answer from cn-1" } }));
    let status: Value = serde_json::from_str(&ran.stdout).expect("JSON");
    assert!(status["nodes"][cn]["error"].is_string() && status["nodes"][0]["status"].is_object(), "{status}");
    assert_eq!(desk.json(&["collection", "list"]), json!([]), "the other compute node answers");

    let down = desk.json(&["down"]);
    let stopped: BTreeSet<_> =
        down["stopped"].as_array().expect("names").iter().filter_map(Value::as_str).collect();
    assert_eq!(stopped, names);
    assert!(!pids_of_first.iter().any(|pid| runs(*pid)), "a process is left");
    assert!(!desk.folder().path(".shine").exists(), "files are left");
    for _ in 0..2 {
        desk.refused(&["down"], 3, "not_up", &["no cluster in .shine"]);
        desk.refused(&["status"], 3, "not_up", &["no cluster in .shine", "shine up", "--oracles"]);
    }

    let text =
        desk.text(&["up", "--memory-nodes", "1", "--compute-nodes", "1", "--regions", "1", "--dir", "here"]);
    for part in ["oracle-0", "mn-0", "cn-0", "up in here", "--dir here"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert_eq!(desk.json(&["status", "--dir", "here"])["nodes"].as_array().map(Vec::len), Some(3));
    assert_eq!(desk.text(&["down", "--dir", "here"]), "stopped oracle-0, mn-0, cn-0\n");
    assert!(!desk.folder().path("here").exists());
}

#[test]
fn vectors_go_in_one_by_one_and_are_found() {
    let (desk, _) = Desk::with_cluster();
    let base = base(60);
    let create = ["collection", "create", "few", "--dim", "100", "--dtype", "i8", "--metric", "l2"];
    let created = desk.json(&create);
    for (field, expected) in [
        ("name", json!("few")),
        ("state", json!("ready")),
        ("vectors", json!(0)),
        ("dimension", json!(100)),
        ("dtype", json!("i8")),
        ("metric", json!("l2")),
        ("m", json!(16)),
        ("ef_construction", json!(200)),
    ] {
        assert_eq!(created[field], expected, "{field} in {created}");
    }
    assert_eq!(desk.json(&["search", "-c", "few", "--vector", &typed(&base, 0)])["hits"], json!([]));

    let vector = typed(&base, 7);
    assert_eq!(
        desk.text(&["insert", "-c", "few", "--id", "7", "--vector", &vector]),
        "inserted 7 into 'few'\n"
    );
    let inserted = desk.json(&["insert", "-c", "few", "--id", "8", "--vector", &typed(&base, 8)]);
    assert_eq!((&inserted["id"], &inserted["collection"]), (&json!(8), &json!("few")));
    assert!(inserted["receipt"]["cn"].as_str().is_some_and(|cn| cn.starts_with("cn-")), "{inserted}");
    let uuid = "67e55044-10b1-426f-9247-bb680e5fe0c8";
    desk.json(&["insert", "-c", "few", "--id", uuid, "--vector", &format!("[{}]", typed(&base, 9))]);

    let got = desk.json(&["get", "-c", "few", "7"]);
    assert_eq!((&got["id"], &got["vector"]), (&json!(7), &numbers(&base, 7)));
    let got = desk.json(&["get", "-c", "few", uuid]);
    assert_eq!((&got["id"], &got["vector"]), (&json!(uuid), &numbers(&base, 9)));
    let text = desk.text(&["get", "-c", "few", "7"]);
    assert!(text.contains(&vector), "what is printed can be given again: {text}");

    // Rows 10 to 59 from a file; given again, only what is missing.
    let tail = base.slice(10..60).expect("these rows are there");
    desk.folder().write("tail.i8bin", &tail).expect("written");
    let insert = ["insert", "-c", "few", "--file", "tail.i8bin", "--ids-from", "10"];
    let some = desk.json(&[&insert[..], &["--rows", "20"]].concat());
    assert_eq!((&some["inserted"], &some["existing"]), (&json!(20), &json!(0)));
    desk.refused(&insert, 5, "id_exists", &["tail.i8bin: row ", "already", "'few'"]);
    let all = desk.json(&[&insert[..], &["--skip-existing"]].concat());
    assert_eq!(all["inserted"].as_u64().zip(all["existing"].as_u64()).map(|(new, old)| new + old), Some(50));
    let text = desk.text(&[&insert[..], &["--skip-existing"]].concat());
    assert!(text.starts_with("inserted 0 vectors into 'few'") && text.contains("50 were there"), "{text}");

    for (id, row) in [("7", 7), ("30", 30)] {
        let by_id = desk.json(&["search", "-c", "few", "--id", id, "--k", "3", "--with-vectors"]);
        assert_eq!(ids(&by_id)[0], row as u64, "a stored vector is its own first answer");
        assert_eq!(
            (&by_id["hits"][0]["distance"], &by_id["hits"][0]["vector"]),
            (&json!(0.0), &numbers(&base, row))
        );
        let by_vector =
            desk.json(&["search", "-c", "few", "--vector", &typed(&base, row), "--k", "3", "--with-vectors"]);
        assert_eq!(by_id["hits"], by_vector["hits"]);
    }
    let text = desk.text(&["search", "-c", "few", "--id", "7", "--k", "3"]);
    let first = text.lines().nth(1).expect("a first answer");
    assert_eq!(first.split_whitespace().collect::<Vec<_>>(), ["7", "0"], "{text}");
    assert!(text.contains("remote reads"), "{text}");

    let stats = desk.json(&["collection", "stats", "few"]);
    assert_eq!(stats["vectors"], 53);
    let check = desk.json(&["check", "-c", "few"]);
    assert_eq!(
        (&check["is_sound"], &check["live"], &check["orphans"]),
        (&json!(true), &json!(53), &json!(0))
    );
    assert_eq!(desk.text(&["collection", "drop", "few"]), "dropped few\n");
    assert_eq!(desk.text(&["collection", "list"]), "no collections\n");
    desk.refused(&["get", "-c", "few", "7"], 3, "not_found", &["no collection 'few'"]);
}

#[test]
fn a_graph_is_built_loaded_searched_and_checked() {
    let (desk, _) = Desk::with_cluster();
    desk.graph(ROWS);
    let loaded = desk.json(&["load", "--graph", "words.graph", "-c", "words"]);
    for (field, expected) in [("vectors", json!(ROWS)), ("m", json!(12)), ("state", json!("ready"))] {
        assert_eq!(loaded[field], expected, "{field} in {loaded}");
    }
    let mns: BTreeSet<_> = loaded["regions"]
        .as_array()
        .expect("regions")
        .iter()
        .filter_map(|region| region[1].as_str())
        .collect();
    assert_eq!(mns.len(), 2, "it lies on both memory nodes: {loaded}");

    let list = desk.json(&["collection", "list"]);
    assert_eq!((&list[0]["name"], &list[0]["vectors"]), (&json!("words"), &json!(ROWS)));
    let text = desk.text(&["collection", "list"]);
    let line = text.lines().nth(1).expect("a line");
    assert_eq!(
        line.split_whitespace().take(7).collect::<Vec<_>>(),
        ["words", "ready", "i8", "l2", "100", "12", "3000"]
    );
    let text = desk.text(&["collection", "stats", "words"]);
    for part in ["100 x i8, l2", "m 12, ef_construction 80", "x mn-0", "x mn-1"] {
        assert!(text.contains(part), "{part} in {text}");
    }

    let truth =
        ["data", "truth", "--base", "base.i8bin", "--queries", "query.i8bin", "--metric", "l2", "--k", "10"];
    desk.json(&[&truth[..], &["--out", "truth.ibin"]].concat());
    let recall =
        ["recall", "-c", "words", "--queries", "query.i8bin", "--truth", "truth.ibin", "--ef", "20,100"];
    let measured = desk.json(&recall);
    assert_eq!(
        (&measured["queries"], &measured["vectors"], &measured["k"]),
        (&json!(200), &json!(ROWS), &json!(10))
    );
    let points = measured["points"].as_array().expect("points");
    assert_eq!(points.iter().map(|point| point["ef"].as_u64()).collect::<Vec<_>>(), [Some(20), Some(100)]);
    let recalls: Vec<_> =
        points.iter().map(|point| point["recall_at_k"].as_f64().expect("a number")).collect();
    assert!(recalls[0] < recalls[1] && recalls[1] > 0.95, "{measured}");
    for point in points {
        for figure in ["qps", "p50_us", "hops_per_query", "remote_reads_per_query", "bytes_per_query"] {
            assert!(point[figure].as_f64() > Some(0.0), "{figure} in {point}");
        }
    }
    let text = desk.text(&recall);
    assert!(text.contains("recall@10") && text.contains("200 queries on 3000 vectors of 'words'"), "{text}");

    // One search for each row of a file, in its order: the same answers as one by one.
    let answers = desk.json(&["search", "-c", "words", "--file", "query.i8bin", "--rows", "5", "--k", "3"]);
    let results = answers["results"].as_array().expect("results");
    assert_eq!(results.len(), 5);
    let queries = queries(5);
    for (row, answer) in results.iter().enumerate() {
        assert_eq!(answer["row"], row);
        let one = desk.json(&["search", "-c", "words", "--vector", &typed(&queries, row), "--k", "3"]);
        assert_eq!(one["hits"], answer["hits"]);
    }
    let text = desk.text(&["search", "-c", "words", "--file", "query.i8bin", "--rows", "5", "--k", "3"]);
    assert_eq!(text.lines().count(), 1 + 5 * 3, "{text}");

    desk.json(&["insert", "-c", "words", "--id", "3000", "--vector", &typed(&queries, 0)]);
    assert_eq!(
        ids(&desk.json(&["search", "-c", "words", "--vector", &typed(&queries, 0), "--k", "1"])),
        [3000]
    );
    // A check takes as long as it takes: the deadline is for searches, inserts and look-ups.
    let check = desk.json(&["check", "-c", "words", "--deadline-ms", "1"]);
    assert_eq!((&check["is_sound"], &check["live"]), (&json!(true), &json!(ROWS + 1)));
    for count in ["links_out_of_range", "bad_lists", "ids_missing", "ids_duplicate", "linking", "dead"] {
        assert_eq!(check[count], 0, "{count} in {check}");
    }
    assert!(desk.text(&["check", "-c", "words"]).ends_with("'words' is sound\n"));

    // Again in its place, on one memory node, with what was inserted gone.
    let replaced =
        desk.json(&["load", "--graph", "words.graph", "-c", "words", "--replace", "--memory-nodes", "mn-1"]);
    assert_eq!(replaced["vectors"], ROWS);
    assert!(
        replaced["regions"].as_array().expect("regions").iter().all(|region| region[1] == "mn-1"),
        "{replaced}"
    );
    desk.refused(&["get", "-c", "words", "3000"], 3, "not_found", &["3000", "'words'"]);
    assert_eq!(desk.json(&["collection", "drop", "words"]), json!({ "dropped": "words" }));
    assert_eq!(desk.json(&["collection", "list"]), json!([]));
}

#[test]
fn what_the_cluster_has_or_lacks_is_named() {
    let (desk, _) = Desk::with_cluster();
    desk.graph(400);
    desk.json(&["load", "--graph", "words.graph", "-c", "words"]);
    let vector = typed(&base(1), 0);

    // Not there.
    for args in [
        &["search", "-c", "nowhere", "--id", "5"][..],
        &["search", "-c", "nowhere", "--vector", "1,2"],
        &["get", "-c", "nowhere", "5"],
        &["insert", "-c", "nowhere", "--id", "5", "--vector", "1,2"],
        &["check", "-c", "nowhere"],
        &["recall", "-c", "nowhere", "--queries", "query.i8bin", "--truth", "truth.ibin"],
        &["collection", "stats", "nowhere"],
        &["collection", "drop", "nowhere"],
    ] {
        desk.refused(args, 3, "not_found", &["no collection 'nowhere'"]);
    }
    desk.refused(&["get", "-c", "words", "99999"], 3, "not_found", &["99999", "'words'"]);
    desk.refused(&["search", "-c", "words", "--id", "99999"], 3, "not_found", &["99999", "'words'"]);
    let elsewhere = ["collection", "create", "x", "--dim", "4", "--metric", "l2", "--memory-nodes", "mn-9"];
    desk.refused(&elsewhere, 3, "not_found", &["'mn-9'", "mn-0, mn-1"]);

    // There already.
    let create = ["collection", "create", "words", "--dim", "100", "--dtype", "i8", "--metric", "l2"];
    desk.refused(&create, 5, "collection_exists", &["'words' exists already"]);
    let insert = ["insert", "-c", "words", "--id", "5", "--vector", &vector];
    desk.refused(&insert, 5, "id_exists", &["id 5 already", "'words'"]);
    let load = ["load", "--graph", "words.graph", "-c", "words"];
    desk.refused(
        &load,
        5,
        "collection_exists",
        &["words.graph is not loaded", "'words' exists already", "--replace"],
    );
    // A graph of another kind: what it is, and what the collection is.
    desk.json(&["data", "synth", "deep", "300", "--queries", "1", "--out", "deep"]);
    desk.json(&["build", "deep/base.fbin", "--metric", "ip", "--out", "deep.graph"]);
    let parts =
        ["deep.graph is not loaded", "96 x f32, ip, m 16", "100 x i8, l2, m 12", "'words' exists already"];
    desk.refused(&["load", "--graph", "deep.graph", "-c", "words"], 5, "collection_exists", &parts);
    // None of that changed anything.
    assert_eq!(desk.json(&["collection", "stats", "words"])["vectors"], 400);
    assert_eq!(desk.json(&["check", "-c", "words"])["live"], 400);
}

#[test]
fn what_does_not_fit_is_told_apart_from_what_the_cluster_refuses() {
    let (desk, _) = Desk::with_cluster();
    desk.graph(400);
    desk.json(&["load", "--graph", "words.graph", "-c", "words"]);
    let base = base(1);

    // Seen by the command: nothing is sent.
    let given = |vector: &str, parts: &[&str]| {
        let named: Vec<_> = [parts, &["--vector: ", "'words'"]].concat();
        desk.refused(&["search", "-c", "words", "--vector", vector], 2, "bad_input", &named);
        desk.refused(&["insert", "-c", "words", "--id", "9000", "--vector", vector], 2, "bad_input", &named);
    };
    given("1,2", &["2 elements where the collection has 100"]);
    given(typed(&base, 0).replacen(',', ",300,", 1).rsplit_once(',').expect("many").0, &["element 1 is 300"]);
    given(&format!("0.5{}", ",1".repeat(99)), &["element 0 is 0.5", "whole number"]);
    for vector in ["1,x", "1,,2", "[1,2", ""] {
        desk.refused(&["search", "-c", "words", "--vector", vector], 2, "bad_input", &["--vector: "]);
    }
    desk.json(&["data", "synth", "deep", "300", "--queries", "3", "--out", "deep"]);
    let narrow = ["rows of 96 elements", "100", "'words'"];
    desk.refused(&["search", "-c", "words", "--file", "deep/query.fbin"], 2, "bad_input", &narrow);
    desk.refused(
        &["insert", "-c", "words", "--file", "deep/query.fbin", "--ids-from", "9000"],
        2,
        "bad_input",
        &narrow,
    );
    desk.refused(&["search", "-c", "words", "--file", "none.fbin"], 2, "bad_input", &["none.fbin"]);
    desk.json(&[
        "data",
        "truth",
        "--base",
        &path("base.i8bin"),
        "--queries",
        "query.i8bin",
        "--rows",
        "1000",
        "--k",
        "10",
        "--metric",
        "l2",
        "--out",
        "truth.ibin",
    ]);
    let recall = ["recall", "-c", "words", "--queries", "query.i8bin", "--truth", "truth.ibin"];
    desk.refused(&recall, 2, "bad_input", &["truth.ibin", "the 400 vectors of 'words'"]);
    let mut bytes = std::fs::read(desk.folder().path("words.graph")).expect("a graph file");
    *bytes.last_mut().expect("bytes") ^= 1;
    std::fs::write(desk.folder().path("bad.graph"), bytes).expect("written");
    desk.refused(&["load", "--graph", "bad.graph", "-c", "bad"], 2, "bad_input", &["bad.graph", "checksum"]);
    desk.refused(&["load", "--graph", "none.graph", "-c", "bad"], 2, "bad_input", &["none.graph"]);

    let create = ["collection", "create", "angles", "--dim", "3", "--metric", "cosine"];
    desk.json(&create);
    let zero = ["insert", "-c", "angles", "--id", "1", "--vector", "0,0,0"];
    desk.refused(&zero, 2, "bad_input", &["--vector: ", "squared norm", "cosine", "'angles'"]);

    // Refused by the cluster: another exit code than ours, and than silence.
    let create = |name: &str, dim: &str, parts: &[&str]| {
        desk.refused(
            &["collection", "create", name, "--dim", dim, "--metric", "l2"],
            6,
            "bad_request",
            parts,
        );
    };
    create("x", "0", &["'x'", "dimension is 0"]);
    create("a.b", "4", &["'a.b'", "1 to 64"]);
    let client = ["--cert-dir", ".shine/certs/client"];
    let as_client = |args: &[&str], parts: &[&str]| {
        desk.refused(&[args, &client].concat(), 6, "forbidden", parts);
    };
    as_client(&["collection", "drop", "words"], &["role client", "admin"]);
    as_client(&["load", "--graph", "words.graph", "-c", "again"], &["role client", "admin"]);
    assert_eq!(
        ids(&desk.json(&[&["search", "-c", "words", "--id", "5", "--k", "1"], &client[..]].concat())),
        [5]
    );

    // Full: every collection takes a region on each memory node.
    let refusal = (0..10).find_map(|number| {
        let name = format!("more-{number}");
        let ran = desk.run(&[
            "collection",
            "create",
            &name,
            "--dim",
            "4",
            "--metric",
            "l2",
            "--capacity",
            "10",
            "--json",
        ]);
        (ran.code != 0).then_some(ran)
    });
    let refusal = refusal.expect("eight regions are not enough for ten collections");
    assert_eq!(refusal.code, 7, "{refusal:?}");
    assert!(refusal.stderr.contains("region_full"), "{refusal:?}");
}

#[test]
fn a_cluster_that_does_not_answer_is_told_apart_from_one_that_refuses() {
    let (desk, up) = Desk::with_cluster();
    let oracle = up["oracles"][0].as_str().expect("an address").to_owned();
    // As from another machine: by the oracle's address and a certificate.
    let away = ["--dir", "elsewhere", "--oracles", &oracle, "--cert-dir", ".shine/certs/client"];
    assert_eq!(desk.json(&[&["collection", "list"], &away[..]].concat()), json!([]));
    desk.refused(&["collection", "list", "--dir", "elsewhere"], 3, "not_up", &["elsewhere"]);

    // Another cluster's certificate.
    desk.json(&["ca", "init", "--out", "ca"]);
    desk.json(&["ca", "issue", "--ca", "ca", "--role", "client", "--name", "mallory", "--out", "mallory"]);
    let strange =
        ["collection", "list", "--oracles", &oracle, "--cert-dir", "mallory", "--connect-ms", "1000"];
    desk.refused(&strange, 6, "forbidden", &[&oracle, "another CA"]);

    // A port that nobody answers at.
    let silent = UdpSocket::bind("127.0.0.1:0").expect("a port");
    let nobody = silent.local_addr().expect("an address").to_string();
    let at_nobody = ["collection", "list", "--oracles", &nobody, "--connect-ms", "200"];
    desk.refused(&at_nobody, 4, "no_oracle", &["no oracle answers", &nobody]);

    // All its compute nodes are gone, then everything.
    let pid_of = |name: &str| {
        let node = up["nodes"].as_array().expect("nodes").iter().find(|node| node["name"] == name);
        Pid::from_raw(node.expect("a node")["pid"].as_i64().expect("a pid") as i32)
    };
    for cn in ["cn-0", "cn-1"] {
        kill(pid_of(cn), Signal::SIGKILL).expect("it runs");
    }
    let ran = desk.run(&["collection", "list", "--deadline-ms", "500", "--json"]);
    assert_eq!(ran.code, 4, "{ran:?}");
    assert!(ran.stderr.contains("cn-"), "it names who was asked: {ran:?}");
    kill(pid_of("oracle-0"), Signal::SIGKILL).expect("it runs");
    desk.refused(&["collection", "list", "--connect-ms", "500"], 4, "no_oracle", &[&oracle]);

    // What is left of it is still taken down.
    assert_eq!(desk.json(&["down"])["stopped"].as_array().map(Vec::len), Some(5));
    assert!(!pids(&up).into_iter().any(runs), "a process is left");
}
