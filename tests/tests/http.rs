//! Clients that are not ours against the HTTP API of real compute nodes: the official Python client of Qdrant, and curl.

#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use shine_common::dataset::exact_neighbours;
use shine_common::metric::Metric;
use shine_sim::cluster::{Cluster, ClusterSpec};
use shine_tests::{Folder, base, queries, shipped};

/// Points that each client stores.
const ROWS: usize = 10_000;
/// Points of one request.
const BATCH: usize = 1_000;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the tests are one folder below the root")
        .to_owned()
}

fn cluster() -> Result<Cluster> {
    Ok(Cluster::start(&ClusterSpec { memory_nodes: 2, compute_nodes: 2, ..ClusterSpec::default() })?)
}

/// Runs a program; its standard output.
fn run(program: &str, args: &[&str], folder: &Path) -> Result<String> {
    let output = Command::new(program).args(args).current_dir(folder).output();
    let output = output.with_context(|| format!("running {program}"))?;
    ensure!(
        output.status.success(),
        "{program} {}: {}\n{}\n{}",
        args.join(" "),
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8(output.stdout)?)
}

#[test]
fn qdrants_python_client_works() -> Result<()> {
    let cluster = cluster()?;
    let data = shipped("base.i8bin");
    let data = data.parent().expect("a file lies in a folder").to_str().context("a path is UTF-8")?;
    let args = ["qdrant-client", "numpy", "--", "tests/http/client.py", cluster.http("cn-0"), data];
    let found = run("scripts/python.sh", &args, &root())?;
    let found: HashMap<String, f64> = serde_json::from_str(found.trim())?;
    println!("{found:?}");
    ensure!(found["recall"] >= 0.95, "{found:?}");
    Ok(())
}

/// The commands of docs/quick-start.md, with the answers that it shows.
#[test]
fn the_quick_start_is_as_printed() -> Result<()> {
    let page = std::fs::read_to_string(root().join("docs/quick-start.md"))?;
    let folder = Folder::new();
    let sim = std::env::current_exe()?;
    let sim = sim.parent().and_then(Path::parent).context("tests lie in deps")?.join("shine-sim");
    let sim = sim.to_str().context("a path is UTF-8")?;
    let home = folder.path("home");
    let home = home.to_str().context("a path is UTF-8")?;
    let file = folder.path("cluster.json");
    let file = file.to_str().context("a path is UTF-8")?;
    let up = ["cluster", "up", "--memory-nodes", "2", "--compute-nodes", "1", "--dir", home, "--json", file];
    let printed = run(sim, &up, folder.root())?;
    let result = (|| {
        let written: Value = serde_json::from_str(&std::fs::read_to_string(file)?)?;
        ensure!(serde_json::from_str::<Value>(&printed)? == written);
        let count = |role: &str| written[role].as_array().map(Vec::len);
        ensure!((count("http"), count("cn"), count("mn")) == (Some(1), Some(1), Some(2)), "{written}");
        let script = ["qdrant-client", "--", "docs/quick_start.py", file];
        let answer = run("scripts/python.sh", &script, &root())?;
        ensure!(page.contains(&answer), "docs/quick-start.md does not show:\n{answer}");
        let url = written["http"][0].as_str().context("a URL")?;
        let body = r#"{"query": [0, 0, 100], "limit": 1}"#;
        let near = format!("{url}/collections/colours/points/query");
        let answer =
            run("curl", &["-sS", &near, "-H", "content-type: application/json", "-d", body], folder.root())?;
        let (points, _) = answer.split_once(",\"time\"").context("an answer says how long it took")?;
        ensure!(page.contains(points), "docs/quick-start.md does not show:\n{points}");
        Ok(())
    })();
    let down = run(sim, &["cluster", "down", "--dir", home], folder.root());
    result?;
    ensure!(page.contains(down?.trim()), "docs/quick-start.md does not show what `down` prints");
    Ok(())
}

/// curl, with bodies from files as for people who have large ones.
struct Curl<'a> {
    folder: &'a Folder,
}

impl Curl<'_> {
    fn call(&self, method: &str, url: &str, body: &Value) -> Result<(u16, Value)> {
        let path = self.folder.path("body.json");
        std::fs::write(&path, body.to_string())?;
        let data = format!("@{}", path.display());
        let json = "content-type: application/json";
        let args = ["-sS", "-X", method, url, "-H", json, "--data-binary", &data, "-w", "\n%{http_code}"];
        let answer = run("curl", &args, self.folder.root())?;
        let (text, status) = answer.rsplit_once('\n').context("curl prints the status last")?;
        Ok((status.parse()?, serde_json::from_str(text).with_context(|| text.to_owned())?))
    }

    fn ok(&self, method: &str, url: &str, body: &Value) -> Result<Value> {
        let (status, answer) = self.call(method, url, body)?;
        ensure!(status == 200 && answer["status"] == "ok", "{method} {url}: {status} {answer}");
        Ok(answer["result"].clone())
    }
}

#[test]
fn curl_stores_on_one_compute_node_and_asks_another() -> Result<()> {
    let cluster = cluster()?;
    let folder = Folder::new();
    let curl = Curl { folder: &folder };
    let (rows, queries) = (base(ROWS), queries(100));
    let truth = exact_neighbours(&rows, &queries, Metric::L2, 10, 2, &|_, _| ())?;
    let [writer, reader] = ["cn-0", "cn-1"].map(|cn| format!("{}/collections/words", cluster.http(cn)));
    let numbers = |row: &[u8]| json!(row.iter().map(|byte| *byte as i8).collect::<Vec<_>>());

    // The type of the data itself, which is ours: a quarter of the bytes.
    let vectors = json!({ "size": rows.dim(), "distance": "Euclid", "datatype": "int8" });
    let config = json!({ "vectors": vectors, "hnsw_config": { "m": 16, "ef_construct": 100 } });
    ensure!(curl.ok("PUT", &writer, &config)? == true);
    for first in (0..ROWS).step_by(BATCH) {
        let ids: Vec<_> = (first..first + BATCH).collect();
        let vectors: Vec<_> = ids.iter().map(|row| numbers(rows.row(*row))).collect();
        let batch = json!({ "batch": { "ids": ids, "vectors": vectors } });
        curl.ok("PUT", &format!("{writer}/points?wait=true"), &batch)?;
    }
    ensure!(curl.ok("POST", &format!("{reader}/points/count"), &json!({}))? == json!({ "count": ROWS }));

    let mut found = 0;
    for (i, query) in queries.iter().enumerate() {
        let ask = json!({ "query": numbers(query), "limit": 10, "params": { "hnsw_ef": 128 } });
        let answer = curl.ok("POST", &format!("{reader}/points/query"), &ask)?;
        let points = answer["points"].as_array().context("points")?;
        ensure!(points.len() == 10, "{answer}");
        // By distance: ties are as good.
        let worst = f64::from(truth.distances(i).context("truth has distances")?[9]).sqrt();
        found +=
            points.iter().filter(|point| point["score"].as_f64().is_some_and(|s| s <= worst + 1e-3)).count();
    }
    let recall = found as f64 / (10 * queries.rows()) as f64;
    println!("recall {recall}");
    ensure!(recall >= 0.95, "recall {recall}");

    let records = json!({ "ids": [17, ROWS], "with_vector": true });
    let records = curl.ok("POST", &format!("{reader}/points"), &records)?;
    let floats: Vec<_> = rows.row(17).iter().map(|byte| f32::from(*byte as i8)).collect();
    ensure!(records == json!([{ "id": 17, "payload": null, "vector": floats }]), "{records}");
    let (mut seen, mut offset) = (Vec::new(), Value::Null);
    loop {
        let page = json!({ "limit": 3_000, "offset": offset });
        let page = curl.ok("POST", &format!("{reader}/points/scroll"), &page)?;
        seen.extend(
            page["points"].as_array().context("points")?.iter().filter_map(|point| point["id"].as_u64()),
        );
        offset = page["next_page_offset"].clone();
        if offset.is_null() {
            break;
        }
    }
    seen.sort_unstable();
    ensure!(seen == (0..ROWS as u64).collect::<Vec<_>>());

    // What is wrong is told as JSON, by whichever node.
    let ask = json!({ "query": [1, 2, 3] });
    let (status, answer) = curl.call("POST", &format!("{reader}/points/query"), &ask)?;
    let said = answer["status"]["error"].as_str().context("an error")?;
    ensure!(
        status == 400 && said.contains("query: has 3 elements; collection 'words' holds vectors of 100"),
        "{said}"
    );
    ensure!(curl.ok("DELETE", &reader, &json!(null))? == true);
    let (status, _) = curl.call("POST", &format!("{writer}/points/query"), &json!({ "query": 1 }))?;
    ensure!(status == 404);
    Ok(())
}

/// An address that others can reach takes a certificate and a key, and says so.
#[test]
fn an_open_address_without_certificate_and_key_is_refused() {
    let spec = ClusterSpec { memory_nodes: 1, compute_nodes: 1, ..ClusterSpec::default() };
    let error = Cluster::start(&spec.with_args("cn-0", &["--http", "0.0.0.0:0"])).unwrap_err().to_string();
    for part in ["outside of loopback", "--http-cert FILE", "--http-key FILE", "--http-api-key-file FILE"] {
        assert!(error.contains(part), "{error}");
    }
}
