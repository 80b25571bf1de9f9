//! Values: on the command line, in rows of files, and in requests of a client that checks nothing.

use std::time::Duration;

use shine_client::{Client, ClientError, ClientOptions, SearchOptions};
use shine_common::ids::ExternalId;
use shine_common::layout::EF_MAX;
use shine_common::net::tls::Identity;
use shine_common::wire::Target;
use shine_tests::desk::Desk;
use shine_tests::page::Table;

use crate::{
    AS_BEFORE, BAD_INPUT, Cases, FAILED, Guard, NOT_FOUND, PAGE, REFUSED, REQUESTS, USAGE, VALUES, bin, f32s,
    normalized, put, rows,
};

#[test]
fn values_are_refused_by_name() {
    let (desk, _) = Desk::with_cluster();
    let write = |name: &str, bytes: &[u8]| put(&desk, name, bytes);
    write("base.fbin", &rows(40, 4));
    write("query.fbin", &rows(5, 4));
    write("zero.fbin", &bin(3, 4, &f32s(&[[1.0; 4], [0.0; 4], [1.0; 4]].concat())));
    write("tiny.fbin", &bin(3, 4, &f32s(&[[1.0; 4], [1e-21; 4], [1.0; 4]].concat())));
    write("large.fbin", &bin(3, 4, &f32s(&[[1.0; 4], [1e38; 4], [1.0; 4]].concat())));
    write("half.fbin", &bin(3, 4, &f32s(&[[1.0; 4], [1.0; 4], [0.5; 4]].concat())));
    let truth =
        ["data", "truth", "--base", "base.fbin", "--queries", "query.fbin", "--metric", "l2", "--k", "3"];
    desk.json(&[&truth[..], &["--out", "truth.ibin"]].concat());
    desk.json(&[
        "build",
        "base.fbin",
        "--metric",
        "l2",
        "--m",
        "4",
        "--threads",
        "1",
        "--out",
        "words.graph",
    ]);
    desk.json(&["load", "--graph", "words.graph", "-c", "words"]);
    desk.json(&["collection", "create", "angles", "--dim", "4", "--metric", "cosine"]);
    desk.json(&["collection", "create", "bytes", "--dim", "4", "--dtype", "i8", "--metric", "l2"]);

    let mut cases = Cases::new(&desk);
    let truth = "shine data truth --base base.fbin --queries query.fbin --metric l2 --out out.ibin";
    let loopback = "shine-sim loopback --base base.fbin --queries query.fbin --truth truth.ibin --metric l2";
    let recall = "shine recall -c words --queries query.fbin --truth truth.ibin";
    for (value, input) in [("0", "k = 0"), ("65537", "k above 65,536")] {
        cases.refused(input, USAGE, &format!("shine search -c words --id 5 --k {value}"), "--k");
        cases.refused(input, USAGE, &format!("shine search -c words --file query.fbin --k {value}"), "--k");
        cases.refused(input, USAGE, &format!("{recall} --k {value}"), "--k");
        cases.refused(input, USAGE, &format!("{truth} --k {value}"), "--k");
        cases.refused(input, (2, ""), &format!("{loopback} --k {value}"), "--k");
    }
    for (value, input) in [("0", "ef = 0"), ("65537", "ef above 65,536")] {
        cases.refused(input, USAGE, &format!("shine search -c words --id 5 --ef {value}"), "--ef");
        cases.refused(input, USAGE, &format!("{recall} --ef 10,{value}"), "--ef");
        cases.refused(input, (2, ""), &format!("{loopback} --ef {value}"), "--ef");
    }
    let build = "shine build base.fbin --metric l2 --out out.graph";
    for value in ["0", "65537"] {
        let input = format!("ef_construction = {value}");
        cases.refused(&input, BAD_INPUT, &format!("{build} --ef-construction {value}"), "ef_construction");
        let create = format!("shine collection create x --dim 4 --metric l2 --ef-construction {value}");
        cases.refused(&input, REFUSED, &create, "ef_construction");
    }
    for value in ["1", "257"] {
        let input = format!("m = {value}");
        cases.refused(&input, BAD_INPUT, &format!("{build} --m {value}"), "m is");
        let create = format!("shine collection create x --dim 4 --metric l2 --m {value}");
        cases.refused(&input, REFUSED, &create, "m is");
    }
    for (value, input) in [("0", "zero dimensions"), ("32769", "too many dimensions")] {
        let create = format!("shine collection create x --dim {value} --metric l2");
        cases.refused(input, REFUSED, &create, "dimension");
    }
    cases.refused("zero rows wanted", USAGE, &format!("{build} --rows 0"), "--rows");
    cases.refused("more rows wanted than there are", BAD_INPUT, &format!("{build} --rows 41"), "base.fbin");
    cases.refused("truth of more neighbours than rows", BAD_INPUT, &format!("{truth} --k 41"), "base.fbin");
    cases.refused(
        "wrong extension of an output",
        BAD_INPUT,
        "shine data convert base.fbin out.xyz",
        "out.xyz",
    );
    cases.refused(
        "wrong extension of a truth",
        BAD_INPUT,
        "shine data truth --base base.fbin --queries query.fbin --metric l2 --k 1 --out out.fbin",
        "out.fbin",
    );
    cases.refused(
        "an output that is there",
        (5, "file_exists"),
        "shine build base.fbin --metric l2 --out words.graph",
        "words.graph",
    );

    // Vectors on the command line: the same checks for both that take them.
    for (input, vector, name) in [
        ("dimension mismatch", "1,2", "--vector"),
        ("no numbers", "''", "--vector"),
        ("not a number", "1,x,3,4", "element 1"),
        ("NaN", "1,nan,3,4", "element 1"),
        ("infinity", "1,2,inf,4", "element 2"),
        ("finite in f64, infinite in f32", "1,2,3,1e39", "element 3"),
        ("infinite in f64", "1,2,3,1e400", "element 3"),
        ("a norm that distances overflow with", "1e38,2,3,4", "--vector"),
    ] {
        cases.refused(input, BAD_INPUT, &format!("shine search -c words --vector {vector}"), name);
        cases.refused(input, BAD_INPUT, &format!("shine insert -c words --id 900 --vector {vector}"), name);
    }
    for (input, vector) in
        [("cosine with norm 0", "0,0,0,0"), ("cosine with a norm below 1e-20", "1e-21,0,0,0")]
    {
        cases.refused(input, BAD_INPUT, &format!("shine search -c angles --vector {vector}"), "--vector");
        cases.refused(
            input,
            BAD_INPUT,
            &format!("shine insert -c angles --id 1 --vector {vector}"),
            "--vector",
        );
    }
    for (input, vector, name) in
        [("beyond the type", "1,2,300,4", "element 2"), ("no whole number", "1,2,0.5,4", "element 2")]
    {
        cases.refused(input, BAD_INPUT, &format!("shine insert -c bytes --id 1 --vector {vector}"), name);
    }

    // Rows of files.
    for (input, file) in
        [("cosine with norm 0", "zero.fbin"), ("cosine with a norm below 1e-20", "tiny.fbin")]
    {
        let name = "row 1";
        for line in [
            format!("shine build {file} --metric cosine --out out.graph"),
            format!(
                "shine data truth --base {file} --queries query.fbin --metric cosine --k 1 --out out.ibin"
            ),
            format!(
                "shine data truth --base base.fbin --queries {file} --metric cosine --k 1 --out out.ibin"
            ),
            format!(
                "shine data queries --base {file} --hold-out 1 --truth 1 --k 1 --metric cosine --out split"
            ),
            format!("shine insert -c angles --file {file}"),
            format!("shine search -c angles --file {file}"),
        ] {
            cases.refused(input, BAD_INPUT, &line, name);
        }
        let line = format!(
            "shine-sim loopback --base {file} --queries query.fbin --truth truth.ibin --metric cosine --k 3"
        );
        cases.refused(input, FAILED, &line, name);
    }
    for line in [
        "shine build large.fbin --metric ip --out out.graph",
        "shine insert -c words --file large.fbin --ids-from 900",
    ] {
        cases.refused("a norm that distances overflow with", BAD_INPUT, line, "row 1");
    }
    cases.refused("no whole number", BAD_INPUT, "shine insert -c bytes --file half.fbin", "row 2");
    cases.refused(
        "infinite in f32 after scaling",
        BAD_INPUT,
        "shine data convert large.fbin out.fbin --scale 10",
        "row 1, column 0",
    );

    // Ids.
    cases.refused("an id of 2^64", USAGE, "shine get -c words 18446744073709551616", "18446744073709551616");
    cases.refused("no id", USAGE, "shine insert -c words --id five --vector 1,2,3,4", "five");
    cases.refused(
        "ids beyond 2^64-1",
        BAD_INPUT,
        "shine insert -c words --file query.fbin --ids-from 18446744073709551612",
        "--ids-from",
    );
    cases.refused("an id that is not there", NOT_FOUND, "shine get -c words 99", "99");
    cases.refused("an id that is not there", NOT_FOUND, "shine search -c words --id 99", "99");
    cases.refused(
        "an id that is taken",
        (5, "id_exists"),
        "shine insert -c words --id 7 --vector 1,2,3,4",
        "id 7",
    );
    cases.table.check(PAGE, VALUES);
}

#[test]
fn a_compute_node_believes_no_client() {
    let (desk, up) = Desk::with_cluster();
    desk.json(&["collection", "create", "words", "--dim", "4", "--metric", "l2"]);
    desk.json(&["collection", "create", "angles", "--dim", "4", "--metric", "cosine"]);
    desk.json(&["insert", "-c", "words", "--id", "1", "--vector", "1,2,3,4"]);
    let guard = Guard::new(&desk);
    let oracle = up["oracles"][0].as_str().expect("an address").parse().expect("an address");
    let identity = Identity::load(desk.folder().path(".shine/certs/client")).expect("a certificate");
    let options = ClientOptions { deadline: Duration::from_secs(60), ..ClientOptions::default() };
    let options =
        ClientOptions { connect_deadline: options.deadline, insert_deadline: options.deadline, ..options };
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let client = runtime.block_on(Client::connect(&[oracle], identity, options)).expect("a cluster");

    let mut table = Table::new(&["input", "request", "code", "message", "afterwards"]);
    let mut refused = |input: &str, request: &str, answer: Result<(), ClientError>, name: &str| {
        let error = answer.expect_err(request);
        let message = normalized(&error.to_string());
        assert!(matches!(error, ClientError::Fault { .. }), "a compute node says so: {message}");
        assert!(message.contains(name), "{input}: {message}");
        let code = serde_json::to_value(error.code()).expect("a name");
        let code = format!("`{}`", code.as_str().expect("a name"));
        guard.check_collections(request);
        table.push(&[input, request, &code, &message, AS_BEFORE]);
    };
    let search = |collection: &str, k: u32, ef: u32, vector: Vec<u8>| {
        let options = SearchOptions { k, ef, ..SearchOptions::default() };
        runtime.block_on(client.search(collection, Target::Vector(vector), &options)).map(drop)
    };
    let insert = |collection: &str, vector: Vec<u8>| {
        runtime.block_on(client.insert(collection, ExternalId::Num(2), vector)).map(drop)
    };
    let vector = |values: [f32; 4]| f32s(&values);
    let one = vector([1.0; 4]);
    refused("k = 0", "search", search("words", 0, 10, one.clone()), "k is 0");
    refused("k above 65,536", "search", search("words", EF_MAX + 1, 10, one.clone()), "k is 65537");
    refused("ef = 0", "search", search("words", 1, 0, one.clone()), "ef is 0");
    refused("ef above 65,536", "search", search("words", 1, EF_MAX + 1, one.clone()), "ef is 65537");
    for (input, collection, bytes, name) in [
        ("dimension mismatch", "words", f32s(&[1.0; 3]), "words"),
        ("half an element", "words", vec![0; 15], "words"),
        ("NaN", "words", vector([1.0, f32::NAN, 0.0, 0.0]), "element 1"),
        ("infinity", "words", vector([1.0, 0.0, f32::INFINITY, 0.0]), "element 2"),
        ("a norm that distances overflow with", "words", vector([1e38; 4]), "norm"),
        ("cosine with norm 0", "angles", vector([0.0; 4]), "norm"),
        ("cosine with a norm below 1e-20", "angles", vector([1e-21, 0.0, 0.0, 0.0]), "norm"),
    ] {
        refused(input, "search", search(collection, 1, 10, bytes.clone()), name);
        refused(input, "insert", insert(collection, bytes), name);
    }
    table.check(PAGE, REQUESTS);
    runtime.block_on(client.close());
}
