//! `shine data` as scripts see it: what is written, what is printed, what is refused.

mod shine;

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use shine::{folder, json, refused, run};

/// A file of the shipped data set.
fn shipped(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/glove100-50k").join(name);
    path.to_str().expect("UTF-8").to_owned()
}

/// Runs with `--json` in `dir` and gives what was printed.
#[track_caller]
fn made(dir: &Path, args: &[&str]) -> Value {
    json(&run(dir, &[args, &["--json"]].concat()))
}

/// Runs without `--json` in `dir` and gives what was printed.
#[track_caller]
fn told(dir: &Path, args: &[&str]) -> String {
    let ran = run(dir, args);
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""), "{ran:?}");
    ran.stdout
}

#[track_caller]
fn bad_input(dir: &Path, args: &[&str], parts: &[&str]) {
    refused(dir, args, 2, "bad_input", parts);
}

fn bytes(dir: &Path, name: &str) -> Vec<u8> {
    std::fs::read(dir.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// All files below `dir`.
fn files(dir: &Path) -> HashSet<PathBuf> {
    let entries = std::fs::read_dir(dir).expect("a folder").map(|entry| entry.expect("an entry").path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { HashSet::from([path]) }).collect()
}

/// A file of `rows` x 2 bytes in big-ann form: rows 0 0, 1 1, 2 4, 3 9 and so on, modulo 256.
fn squares(dir: &Path, name: &str, rows: u32) {
    let head = [rows.to_le_bytes(), 2u32.to_le_bytes()].concat();
    let body = (0..rows).flat_map(|row| [row as u8, (row * row) as u8]);
    std::fs::write(dir.join(name), head.into_iter().chain(body).collect::<Vec<_>>()).expect("written");
}

#[test]
fn info_says_what_files_hold() {
    let dir = folder();
    let (base, truth) = (shipped("base.i8bin"), shipped("truth.ibin"));
    let seen = made(dir.path(), &["data", "info", "--hash", &base, &truth]);
    let [base_info, truth_info] = seen.as_array().expect("a list").as_slice() else {
        panic!("two files: {seen}")
    };
    // As data/README.md gives them.
    let expected = json!({
        "file": base, "content": "vectors", "format": "i8bin", "dtype": "i8", "rows": 50_000, "dim": 100,
        "bytes": 8 + 50_000 * 100, "norms": base_info["norms"],
        "sha256": "d224d316d28519bf1a53be0fd074f4f124f65d790840302bdfed0afe3cb5cf24",
    });
    assert_eq!(*base_info, expected);
    let mean = base_info["norms"]["mean"].as_f64().expect("a number");
    assert!((319.0..321.0).contains(&mean), "unit vectors times 320: {mean}");
    let expected = json!({
        "file": truth, "content": "truth", "format": "ibin", "queries": 2_000, "k": 20, "has_distances": true,
        "row_max": truth_info["row_max"], "bytes": 8 + 2_000 * 20 * 8,
        "sha256": "6b4414f03dbe745540435dd09f90b1d3fc288f942961cb74c838bae0e8924cac",
    });
    assert_eq!(*truth_info, expected);

    let text = told(dir.path(), &["data", "info", &base, &truth]);
    for part in ["50000 x 100 i8", "2000 queries x 20 neighbours, with distances"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(!text.contains("sha256"), "{text}");
}

#[test]
fn info_names_what_is_wrong_with_a_file() {
    let dir = folder();
    let at = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).expect("written");
    at("cut.fbin", &[10, 0, 0, 0, 4, 0, 0, 0, 1]);
    at("what.xyz", b"?");
    at("odd.ibin", &[1, 0, 0, 0, 1, 0, 0, 0, 1]);
    bad_input(dir.path(), &["data", "info", "none.fbin"], &["none.fbin: cannot open"]);
    bad_input(dir.path(), &["data", "info", "cut.fbin"], &["cut.fbin: expected"]);
    bad_input(dir.path(), &["data", "info", "what.xyz"], &["what.xyz", "extension out of fvecs"]);
    bad_input(dir.path(), &["data", "info", "odd.ibin"], &["odd.ibin: expected"]);
    refused(dir.path(), &["data", "info"], 2, "usage", &["<FILES>"]);
}

#[test]
fn vectors_come_back_from_every_format_as_they_were() {
    let dir = folder();
    let convert = |from: &str, to: &str, more: &[&str]| {
        made(dir.path(), &[&["data", "convert", from, to], more].concat())
    };
    let first = convert(&shipped("base.i8bin"), "a.i8bin", &["--rows", "500"]);
    let expected = json!({
        "file": "a.i8bin", "rows": 500, "dim": 100, "dtype": "i8", "rounded": 0, "clipped": 0, "relative_error": 0.0,
    });
    assert_eq!(first, expected);
    let mut from = "a.i8bin";
    // Every one of these holds whole numbers from -128 to 127.
    for to in ["b.fbin", "c.npy", "d.fvecs", "e.f16bin", "f.npy", "g.i8bin"] {
        let converted = convert(from, to, &[]);
        assert_eq!((&converted["rows"], &converted["rounded"]), (&json!(500), &json!(0)), "{to}");
        from = to;
    }
    assert_eq!(bytes(dir.path(), "a.i8bin"), bytes(dir.path(), "g.i8bin"));
    let typed = convert("a.i8bin", "h.npy", &["--dtype", "f16"]);
    assert_eq!(typed["dtype"], "f16");
    let text = told(dir.path(), &["data", "convert", "a.i8bin", "i.fbin"]);
    assert_eq!(text, "i.fbin: 500 x 100 f32\n");
}

#[test]
fn values_that_do_not_fit_are_named_or_clipped() {
    let dir = folder();
    squares(dir.path(), "a.u8bin", 20);
    let to_i8 = ["data", "convert", "a.u8bin", "b.i8bin"];
    // 12² is the first above 127.
    bad_input(dir.path(), &to_i8, &["a.u8bin", "found 144 in row 12, column 1", "i8"]);
    assert!(!dir.path().join("b.i8bin").exists());
    // 12² to 15²; then the squares go on from 0 modulo 256: 16² is 0, 17² is 33, 18² is 68, 19² is 105.
    assert_eq!(made(dir.path(), &[&to_i8[..], &["--clip"]].concat())["clipped"], 4);
    let scaled = made(dir.path(), &["data", "convert", "a.u8bin", "c.i8bin", "--scale", "0.5"]);
    assert_eq!((&scaled["clipped"], &scaled["dtype"]), (&json!(0), &json!("i8")));
    assert!(scaled["rounded"].as_u64() > Some(0), "{scaled}");
    let text = told(dir.path(), &["data", "convert", "a.u8bin", "d.i8bin", "--scale", "0.01"]);
    assert!(text.contains("values rounded") && text.contains("changed the vectors much"), "{text}");
    bad_input(dir.path(), &["data", "convert", "a.u8bin", "e.fbin", "--dtype", "u8"], &["e.fbin", "f32"]);
    bad_input(dir.path(), &["data", "convert", "a.u8bin", "e.fbin", "--rows", "21"], &["a.u8bin", "21"]);
    refused(dir.path(), &["data", "convert", "a.u8bin", "e.fbin", "--scale", "x"], 2, "usage", &["--scale"]);
}

#[test]
fn ground_truth_is_converted_without_what_the_format_lacks() {
    let dir = folder();
    let truth = shipped("truth.ibin");
    let part = made(dir.path(), &["data", "convert", &truth, "a.ibin", "--rows", "30"]);
    assert_eq!(part, json!({ "file": "a.ibin", "queries": 30, "k": 20, "has_distances": true }));
    let bare = made(dir.path(), &["data", "convert", "a.ibin", "b.ivecs"]);
    assert_eq!(bare["has_distances"], false);
    let text = told(dir.path(), &["data", "convert", "a.ibin", "c.ivecs"]);
    assert!(text.contains("without the distances"), "{text}");
    made(dir.path(), &["data", "convert", "b.ivecs", "d.ibin"]);
    let ids = 8 + 30 * 20 * 4;
    assert_eq!(bytes(dir.path(), "d.ibin"), bytes(dir.path(), "a.ibin")[..ids]);
    bad_input(dir.path(), &["data", "convert", "a.ibin", "e.ibin", "--clip"], &["a.ibin holds row numbers"]);
    bad_input(dir.path(), &["data", "convert", "a.ibin", "e.fbin"], &["e.fbin", ".ibin or .ivecs"]);
    squares(dir.path(), "v.u8bin", 3);
    bad_input(dir.path(), &["data", "convert", "v.u8bin", "e.ibin"], &["e.ibin", "vectors"]);
}

#[test]
fn the_shipped_truth_is_what_truth_computes() {
    let dir = folder();
    let (base, queries) = (shipped("base.i8bin"), shipped("query.i8bin"));
    let exact = ["data", "truth", "--base", &base, "--queries", &queries, "--metric", "l2", "--k", "20"];
    let computed = made(dir.path(), &[&exact[..], &["--limit-queries", "20", "--out", "t.ibin"]].concat());
    let expected = json!({
        "file": "t.ibin", "queries": 20, "k": 20, "rows": 50_000, "metric": "l2", "seconds": computed["seconds"],
    });
    assert_eq!(computed, expected);
    made(dir.path(), &["data", "convert", &shipped("truth.ibin"), "part.ibin", "--rows", "20"]);
    assert_eq!(bytes(dir.path(), "t.ibin"), bytes(dir.path(), "part.ibin"));
}

#[test]
fn truth_names_what_is_wrong_before_it_computes() {
    let dir = folder();
    squares(dir.path(), "base.u8bin", 50);
    squares(dir.path(), "query.u8bin", 5);
    let truth = |more: &[&str], parts: &[&str]| {
        let args = ["data", "truth", "--base", "base.u8bin", "--queries", "query.u8bin", "--metric", "l2"];
        bad_input(dir.path(), &[&args[..], more].concat(), parts);
    };
    truth(&["--out", "t.fbin"], &["--out t.fbin", ".ibin or .ivecs"]);
    truth(&["--k", "51", "--out", "t.ibin"], &["base.u8bin", "51", "50 rows"]);
    truth(&["--limit-queries", "6", "--k", "1", "--out", "t.ibin"], &["query.u8bin", "6"]);
    made(dir.path(), &["data", "convert", "query.u8bin", "query.fbin"]);
    let other =
        ["data", "truth", "--base", "base.u8bin", "--queries", "query.fbin", "--metric", "l2", "--k", "1"];
    bad_input(dir.path(), &[&other[..], &["--out", "t.ibin"]].concat(), &["query.fbin", "u8", "f32"]);
    assert!(!dir.path().join("t.ibin").exists());
}

#[test]
fn one_seed_makes_one_set_for_any_number_of_threads() {
    let dir = folder();
    let synth = |shape: &str, seed: &str, threads: &str, out: &str| {
        let args = ["data", "synth", shape, "2500", "--queries", "40", "--truth", "10", "--k", "5"];
        made(dir.path(), &[&args[..], &["--seed", seed, "--threads", threads, "--out", out]].concat())
    };
    for (shape, extension, dtype, dim, metric) in [
        ("spacev", "i8bin", "i8", 100, "l2"),
        ("bigann", "u8bin", "u8", 128, "l2"),
        ("tti", "fbin", "f32", 200, "ip"),
    ] {
        let at = |run: &str| format!("{shape}-{run}");
        let set = synth(shape, "7", "1", &at("a"));
        let expected = json!({
            "shape": shape, "seed": 7, "rows": 2_500, "query_count": 40, "dim": dim, "dtype": dtype, "metric": metric,
            "base": format!("{shape}-a/base.{extension}"), "queries": format!("{shape}-a/query.{extension}"),
            "seconds": set["seconds"], "truth": set["truth"],
        });
        assert_eq!(set, expected);
        let truth = json!({
            "file": format!("{shape}-a/truth.ibin"), "queries": 10, "k": 5, "rows": 2_500, "metric": metric,
            "seconds": set["truth"]["seconds"],
        });
        assert_eq!(set["truth"], truth);
        synth(shape, "7", "3", &at("b"));
        synth(shape, "8", "1", &at("c"));
        for file in [format!("base.{extension}"), format!("query.{extension}"), "truth.ibin".into()] {
            let [a, b, c] = ["a", "b", "c"].map(|run| bytes(dir.path(), &format!("{shape}-{run}/{file}")));
            assert_eq!(a, b, "{shape} {file}");
            assert_ne!(a, c, "{shape} {file}");
        }
    }
    let text = told(dir.path(), &["data", "synth", "deep", "100", "--queries", "10", "--out", "deep"]);
    assert!(text.starts_with("deep: 100 x 96 f32, 10 queries, l2, in "), "{text}");
    assert_eq!(files(&dir.path().join("deep")).len(), 2, "no truth was asked for");
}

#[test]
fn synth_refuses_before_it_writes() {
    let dir = folder();
    let synth = ["data", "synth", "deep", "50", "--queries", "10", "--out", "d"];
    let with = |more: &[&'static str]| [&synth[..], more].concat();
    bad_input(dir.path(), &with(&["--truth", "11", "--k", "5"]), &["--truth 11", "at most 10"]);
    bad_input(dir.path(), &with(&["--truth", "10"]), &["--k 100", "at most 50"]);
    refused(dir.path(), &with(&["--k", "5"]), 2, "usage", &["--truth"]);
    refused(dir.path(), &["data", "synth", "cube", "5", "--out", "d"], 2, "usage", &["'cube'", "spacev"]);
    assert!(!dir.path().join("d").exists());
}

#[test]
fn held_out_queries_and_the_rest_are_the_base() {
    let dir = folder();
    squares(dir.path(), "all.u8bin", 100);
    let hold = |seed: &str, out: &str| {
        let args =
            ["data", "queries", "--base", "all.u8bin", "--hold-out", "30", "--seed", seed, "--out", out];
        made(dir.path(), &[&args[..], &["--truth", "30", "--metric", "l2", "--k", "3"]].concat())
    };
    let split = hold("1", "a");
    let expected = json!({
        "base": "a/base.u8bin", "queries": "a/query.u8bin", "rows": 70, "query_count": 30, "seed": 1,
        "truth": split["truth"],
    });
    assert_eq!(split, expected);
    assert_eq!((&split["truth"]["rows"], &split["truth"]["queries"]), (&json!(70), &json!(30)));
    let rows =
        |name: &str| -> Vec<Vec<u8>> { bytes(dir.path(), name)[8..].chunks(2).map(Into::into).collect() };
    let mut both = [rows("a/base.u8bin"), rows("a/query.u8bin")].concat();
    both.sort();
    let mut all = rows("all.u8bin");
    all.sort();
    assert_eq!(both, all);
    hold("1", "b");
    hold("2", "c");
    assert_eq!(bytes(dir.path(), "a/query.u8bin"), bytes(dir.path(), "b/query.u8bin"));
    assert_ne!(bytes(dir.path(), "a/query.u8bin"), bytes(dir.path(), "c/query.u8bin"));
    let queries = ["data", "queries", "--base", "all.u8bin", "--out", "d"];
    bad_input(dir.path(), &[&queries[..], &["--hold-out", "100"]].concat(), &["all.u8bin", "100 rows"]);
    let truth = ["--hold-out", "30", "--truth", "31", "--metric", "l2"];
    bad_input(dir.path(), &[&queries[..], &truth].concat(), &["--truth 31", "at most 30"]);
    let truth = ["--hold-out", "30", "--truth", "30", "--metric", "l2", "--k", "71"];
    bad_input(dir.path(), &[&queries[..], &truth].concat(), &["--k 71", "at most 70"]);
    assert!(!dir.path().join("d").exists());
}

#[test]
fn skewed_queries_never_repeat() {
    let dir = folder();
    let base = shipped("base.i8bin");
    made(dir.path(), &["data", "convert", &base, "base.i8bin", "--rows", "3000"]);
    let skew = |seed: &str, threads: &str, out: &str| {
        let args = ["data", "queries", "--base", "base.i8bin", "--regions", "1.0", "--count", "500"];
        made(dir.path(), &[&args[..], &["--seed", seed, "--threads", threads, "--out", out]].concat())
    };
    let skewed = skew("1", "1", "a");
    assert_eq!(
        (&skewed["queries"], &skewed["query_count"], &skewed["exponent"], &skewed["seed"]),
        (&json!("a/query.i8bin"), &json!(500), &json!(1.0), &json!(1))
    );
    assert!(skewed.get("base").is_none() && skewed.get("truth").is_none(), "{skewed}");
    assert!(skewed["hottest_share"].as_f64() > Some(1.0 / 256.0), "{skewed}");
    let content = bytes(dir.path(), "a/query.i8bin");
    let rows: HashSet<&[u8]> = content[8..].chunks(100).collect();
    assert_eq!(rows.len(), 500);
    skew("1", "3", "b");
    skew("2", "1", "c");
    assert_eq!(content, bytes(dir.path(), "b/query.i8bin"));
    assert_ne!(content, bytes(dir.path(), "c/query.i8bin"));
    let text = told(
        dir.path(),
        &["data", "queries", "--base", "base.i8bin", "--regions", "0", "--count", "50", "--out", "d"],
    );
    assert!(text.starts_with("d/query.i8bin: 50 queries over "), "{text}");

    let queries = ["data", "queries", "--base", "base.i8bin", "--out", "e"];
    let usage = |more: &[&'static str], parts: &[&str]| {
        refused(dir.path(), &[&queries[..], more].concat(), 2, "usage", parts);
    };
    usage(&[], &["--hold-out", "--regions"]);
    usage(&["--regions", "1", "--hold-out", "5"], &["cannot be used with"]);
    usage(&["--regions", "11"], &["0 to 10"]);
    usage(&["--regions", "1", "--truth", "5"], &["--metric"]);
    usage(&["--regions", "1", "--k", "5"], &["--truth"]);
    assert!(!dir.path().join("e").exists());
}

#[test]
fn no_file_is_replaced_unless_that_was_asked_for() {
    let dir = folder();
    squares(dir.path(), "all.u8bin", 200);
    made(dir.path(), &["data", "convert", &shipped("base.i8bin"), "words.i8bin", "--rows", "1000"]);
    let commands: [(&[&str], &[&str]); 6] = [
        (&["data", "convert", "all.u8bin", "a.fbin"], &["a.fbin"]),
        (
            &[
                "data",
                "truth",
                "--base",
                "all.u8bin",
                "--queries",
                "all.u8bin",
                "--metric",
                "l2",
                "--k",
                "1",
                "--out",
                "t.ibin",
            ],
            &["t.ibin"],
        ),
        (
            &["data", "synth", "deep", "50", "--queries", "5", "--truth", "5", "--k", "1", "--out", "synth"],
            &["synth/base.fbin", "synth/query.fbin", "synth/truth.ibin"],
        ),
        (
            &["data", "queries", "--base", "all.u8bin", "--hold-out", "5", "--out", "held"],
            &["held/base.u8bin", "held/query.u8bin"],
        ),
        (
            &["data", "queries", "--base", "words.i8bin", "--regions", "1", "--count", "20", "--out", "skew"],
            &["skew/query.i8bin"],
        ),
        (&["build", "all.u8bin", "--metric", "l2", "--threads", "1", "--out", "g.graph"], &["g.graph"]),
    ];
    for (args, outputs) in commands {
        made(dir.path(), args);
        let first: Vec<_> = outputs.iter().map(|name| bytes(dir.path(), name)).collect();
        // One that is there is enough.
        for output in outputs {
            let others: Vec<_> = outputs.iter().filter(|other| *other != output).collect();
            others.iter().for_each(|other| std::fs::remove_file(dir.path().join(other)).expect("removed"));
            std::fs::write(dir.path().join(output), "mine").expect("written");
            refused(dir.path(), args, 5, "file_exists", &[&format!("{output} exists already"), "--force"]);
            assert_eq!(bytes(dir.path(), output), b"mine", "{args:?}");
            assert!(others.iter().all(|other| !dir.path().join(other).exists()), "{args:?}");
            made(dir.path(), &[args, &["--force"]].concat());
            for (name, first) in outputs.iter().zip(&first) {
                let again = bytes(dir.path(), name);
                // A graph file tells how long its build took.
                let is_same =
                    if name.ends_with("graph") { again.len() == first.len() } else { again == *first };
                assert!(is_same, "{name} of {args:?}");
            }
        }
    }
    for args in [
        &["data", "convert", "all.u8bin", "./all.u8bin", "--force"][..],
        &["build", "all.u8bin", "--metric", "l2", "--out", "all.u8bin", "--force"],
    ] {
        bad_input(dir.path(), args, &["would replace the file that is read"]);
    }
    std::fs::rename(dir.path().join("all.u8bin"), dir.path().join("base.u8bin")).expect("renamed");
    let onto_itself = ["data", "queries", "--base", "base.u8bin", "--hold-out", "5", "--out", ".", "--force"];
    bad_input(dir.path(), &onto_itself, &["base.u8bin would replace the file that is read"]);
    assert_eq!(bytes(dir.path(), "base.u8bin").len(), 8 + 200 * 2);
    assert!(files(dir.path()).iter().all(|path| path.extension() != Some("part".as_ref())));
}
