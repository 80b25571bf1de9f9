//! What is at the edge, and right.

use shine_tests::desk::{Desk, ids};
use shine_tests::page::Table;

use crate::{PAGE, RIGHT, bin, f32s, noise, put, rows, words};

/// A table of what is at the edge, and taken.
struct Right<'a> {
    desk: &'a Desk,
    table: Table,
}

impl Right<'_> {
    #[track_caller]
    fn json(&self, line: &str) -> serde_json::Value {
        self.desk.json(&words(line)[1..])
    }

    fn push(&mut self, input: &str, line: &str, answer: &str) {
        self.table.push(&[input, &format!("`{line}`"), answer]);
    }

    /// `line` finds exactly these.
    #[track_caller]
    fn finds(&mut self, input: &str, line: &str, expected: &[u64], answer: &str) {
        assert_eq!(ids(&self.json(line)), expected, "{line}");
        self.push(input, line, answer);
    }
}

#[test]
fn what_is_at_the_edge_is_taken() {
    let desk = Desk::new();
    // Every collection takes a region of each memory node.
    desk.json(&[
        "up",
        "--memory-nodes",
        "2",
        "--compute-nodes",
        "1",
        "--regions",
        "8",
        "--region-bytes",
        "4MiB",
    ]);
    let write = |name: &str, bytes: &[u8]| put(&desk, name, bytes);
    write("base.fbin", &rows(40, 4));
    write("query.fbin", &rows(5, 4));
    write("one.fbin", &rows(1, 4));
    write("equal.fbin", &bin(1_000, 4, &f32s(&[0.5; 4_000])));
    let mut right = Right { desk: &desk, table: Table::new(&["input", "command", "answer"]) };
    for name in ["base", "one", "equal"] {
        let line = format!("shine build {name}.fbin --metric l2 --out {name}.graph");
        let built = right.json(&line);
        assert_eq!(built["unreached"], 0, "{built}");
        right.json(&format!("shine load --graph {name}.graph -c {name}"));
    }

    // k and ef.
    let line = "shine search -c base --id 5 --k 100";
    let answer = right.json(line);
    let mut found = ids(&answer);
    assert_eq!(found[0], 5);
    found.sort_unstable();
    assert_eq!(found, (0..40).collect::<Vec<_>>());
    right.push("k > n", line, "all n, each once, nearest first");
    let line = "shine search -c base --id 5 --k 20 --ef 5";
    let answer = right.json(line);
    assert_eq!((&answer["ef"], ids(&answer).len()), (&20.into(), 20), "{answer}");
    let text = desk.text(&words(line)[1..]);
    assert!(text.contains("ef 20 was used instead of 5: it is at least k"), "{text}");
    right.push("ef < k", line, "k answers; `ef` in JSON is 20, the text says `ef 20 was used instead of 5`");
    let line = "shine search -c base --file query.fbin --k 20 --ef 5";
    let answers = right.json(line);
    assert!(
        answers["results"].as_array().expect("a list").iter().all(|answer| answer["ef"] == 20),
        "{answers}"
    );
    assert!(desk.text(&words(line)[1..]).contains("ef 20 was used instead of 5"));
    right.push("ef < k, of a file", line, "as above");
    right.json("shine data truth --base base.fbin --queries query.fbin --metric l2 --k 20 --out truth.ibin");
    let line = "shine recall -c base --queries query.fbin --truth truth.ibin --k 20 --ef 5,30";
    let measured = right.json(line);
    let efs: Vec<_> = [0, 1].map(|at| measured["points"][at]["ef"].as_u64()).to_vec();
    assert_eq!(efs, [Some(20), Some(30)], "{measured}");
    right.push("ef < k, measured", line, "points at ef 20 and 30: the beams that were used");
    let line = "shine search -c base --id 5 --k 65536 --ef 65536";
    assert_eq!(ids(&right.json(line)).len(), 40);
    right.push("k and ef 65,536", line, "all n");

    // Ids.
    right.json("shine collection create ids --dim 4 --metric l2");
    let largest = u64::MAX;
    for (id, vector) in [(0, "1,2,3,4"), (largest, "-1,-2,-3,-4")] {
        let insert = format!("shine insert -c ids --id {id} --vector {vector}");
        assert_eq!(right.json(&insert)["id"], id);
        assert_eq!(right.json(&format!("shine get -c ids {id}"))["id"], id);
        let input = if id == 0 { "id 0" } else { "id 2^64-1" };
        right.push(input, &insert, "inserted, and got by `shine get`");
    }
    right.finds("id 0", "shine search -c ids --id 0", &[0, largest], "0 first, then 2^64-1");
    right.finds(
        "id 2^64-1",
        &format!("shine search -c ids --id {largest}"),
        &[largest, 0],
        "2^64-1 first, then 0",
    );
    right.json("shine collection create last --dim 4 --metric l2");
    let line = "shine insert -c last --file query.fbin --ids-from 18446744073709551611";
    assert_eq!(right.json(line)["inserted"], 5);
    right.push("a file up to id 2^64-1", line, "all 5 inserted");

    // One row, no row.
    right.finds("one row", "shine search -c one --id 0", &[0], "that row");
    right.finds("one row", "shine search -c one --vector 9,9,9,9 --k 5", &[0], "that row");
    right.json("shine collection create none --dim 4 --metric l2");
    right.finds("no row yet", "shine search -c none --vector 9,9,9,9", &[], "no answers");

    // All rows equal: more copies than a list or a beam holds.
    right.json("shine collection create grown --dim 4 --metric l2");
    assert_eq!(right.json("shine insert -c grown --file equal.fbin")["inserted"], 1_000);
    for (collection, how) in [("equal", "built and loaded"), ("grown", "inserted one by one")] {
        for k in [10, 1_000] {
            let line = format!("shine search -c {collection} --id 7 --k {k}");
            let answer = right.json(&line);
            let mut found = ids(&answer);
            found.sort_unstable();
            found.dedup();
            assert_eq!(found.len(), k, "{line}");
            let hits = answer["hits"].as_array().expect("hits");
            assert!(hits.iter().all(|hit| hit["distance"] == 0.0), "{line}");
            right.push(
                &format!("1,000 equal rows, {how}"),
                &line,
                &format!("{k} answers at distance 0, each once"),
            );
        }
    }
    right.table.check(PAGE, RIGHT);
}

#[test]
fn uneven_norms_under_the_inner_product_keep_their_recall() {
    // Norms over eight powers of ten: nearly everybody's nearest are the few longest.
    let (dim, count) = (8, 2_000);
    let mut values = noise(dim * count);
    let exponents = noise(dim * count + count).split_off(dim * count);
    for (row, exponent) in values.chunks_exact_mut(dim).zip(exponents) {
        row.iter_mut().for_each(|value| *value *= 10f32.powf(4.0 * exponent));
    }
    let (desk, _) = Desk::with_cluster();
    put(&desk, "base.fbin", &bin(count as u32, dim as u32, &f32s(&values)));
    put(&desk, "query.fbin", &rows(100, dim as u32));
    let json = |line: &str| desk.json(&words(line));
    json("data truth --base base.fbin --queries query.fbin --metric ip --k 10 --out truth.ibin");
    let built = json("build base.fbin --metric ip --out uneven.graph");
    assert_eq!(built["unreached"], 0, "{built}");
    json("load --graph uneven.graph -c built");
    json("collection create grown --dim 8 --metric ip");
    json("insert -c grown --file base.fbin");
    for collection in ["built", "grown"] {
        let line = format!("recall -c {collection} --queries query.fbin --truth truth.ibin --k 10 --ef 100");
        let measured = json(&line);
        let recall = measured["points"][0]["recall_by_distance"].as_f64().expect("a number");
        let check = json(&format!("check -c {collection}"));
        assert!(recall > 0.95, "{collection}: {recall}, {check}");
        assert_eq!(check["is_sound"], true, "{check}");
        if collection == "built" {
            assert_eq!(check["orphans"], 0, "{check}");
        } else {
            // Single inserts repair nothing: whom they leave unreached is counted and told.
            let text = desk.text(&["check", "-c", "grown"]);
            let line = text.lines().find(|line| line.starts_with("orphans")).expect("a line");
            assert!(line.ends_with(&check["orphans"].to_string()), "{text}");
        }
    }
}
