//! The HTTP API over memory nodes in this process: what it answers, what it refuses, and what strangers cannot do.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use shine_cn::http::{CONNECTIONS_MAX, Http, HttpConfig, Patience};
use shine_cn::node::Node;
use shine_common::net::tls::{ClusterCa, crypto_provider};
use shine_common::wire::Role;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::support::{MIB, Shape, TestCluster, TestVerbs, node, rows};

struct Served {
    addr: SocketAddr,
    node: Arc<Node<TestVerbs>>,
    stop: oneshot::Sender<()>,
    serving: JoinHandle<()>,
    _cluster: TestCluster,
}

async fn serve(config: &HttpConfig) -> Served {
    let cluster = TestCluster::new(&Shape { memory_nodes: 2, regions: 4, region_bytes: 16 * MIB });
    let node = node(&cluster, "cn-0");
    let http = Http::bind(config).await.unwrap();
    let addr = http.url().split_once("://").unwrap().1.parse().unwrap();
    let (stop, stopped) = oneshot::channel();
    let served = Arc::clone(&node);
    let serving = tokio::spawn(http.serve(served, async { drop(stopped.await) }));
    Served { addr, node, stop, serving, _cluster: cluster }
}

fn plain() -> HttpConfig {
    HttpConfig {
        listen: "127.0.0.1:0".parse().unwrap(),
        tls: None,
        api_key_file: None,
        patience: Patience::default(),
        connections_max: CONNECTIONS_MAX,
    }
}

/// Sends what is given as it is, and reads the status and whatever comes until the other side closes.
async fn exchange(mut stream: impl AsyncRead + AsyncWrite + Unpin, request: &[u8]) -> (u16, String) {
    let mut answer = Vec::new();
    // A peer that closes while there is more to read for it resets the connection.
    let _ = stream.write_all(request).await;
    let _ = stream.read_to_end(&mut answer).await;
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    (status, body.to_owned())
}

fn request(method: &str, path: &str, headers: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n{headers}\r\n{body}"
    )
    .into_bytes()
}

impl Served {
    async fn raw(&self, bytes: &[u8]) -> (u16, String) {
        exchange(TcpStream::connect(self.addr).await.unwrap(), bytes).await
    }

    async fn call(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        let (status, text) = self.raw(&request(method, path, "", body)).await;
        (status, serde_json::from_str(&text).unwrap_or_else(|_| panic!("{method} {path}: {text}")))
    }

    async fn ok(&self, method: &str, path: &str, body: Value) -> Value {
        let (status, answer) = self.call(method, path, &body.to_string()).await;
        assert_eq!(status, 200, "{method} {path}: {answer}");
        assert_eq!(answer["status"], "ok");
        assert!(answer["time"].is_number());
        answer["result"].clone()
    }

    async fn refused(&self, method: &str, path: &str, body: &str, status: u16, part: &str) {
        let (given, answer) = self.call(method, path, body).await;
        let said = answer["status"]["error"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned();
        assert_eq!(given, status, "{method} {path} {body}: {said}");
        assert!(said.contains(part), "{method} {path} {body}: '{said}' does not say '{part}'");
    }
}

#[tokio::test]
async fn a_collection_lives_from_creation_to_deletion() {
    let served = serve(&plain()).await;
    assert_eq!(served.ok("GET", "/collections", json!(null)).await, json!({ "collections": [] }));
    let create =
        json!({ "vectors": { "size": 8, "distance": "Euclid", "datatype": "int8" }, "capacity": 10_000 });
    assert_eq!(served.ok("PUT", "/collections/c", create.clone()).await, true);
    assert_eq!(served.ok("GET", "/collections/c/exists", json!(null)).await, json!({ "exists": true }));
    assert_eq!(served.ok("GET", "/collections/d/exists", json!(null)).await, json!({ "exists": false }));
    let listed = served.ok("GET", "/collections", json!(null)).await;
    assert_eq!(listed, json!({ "collections": [{ "name": "c" }] }));
    served.refused("PUT", "/collections/c", &create.to_string(), 409, "'c' exists").await;

    let data = rows(30, 300, 8);
    let vector = |row: &[u8]| json!(row.iter().map(|byte| *byte as i8).collect::<Vec<_>>());
    let points: Vec<_> =
        data.iter().enumerate().map(|(id, row)| json!({ "id": id, "vector": vector(row) })).collect();
    let done = served.ok("PUT", "/collections/c/points?wait=true", json!({ "points": points })).await;
    assert_eq!(done, json!({ "operation_id": 0, "status": "completed" }));

    let info = served.ok("GET", "/collections/c", json!(null)).await;
    assert_eq!((&info["status"], &info["points_count"]), (&json!("green"), &json!(300)));
    assert_eq!(info["config"]["params"]["vectors"], json!({ "size": 8, "distance": "Euclid" }));
    assert_eq!(info["shine"]["dtype"], "i8");

    let near =
        json!({ "query": vector(&data[7]), "limit": 3, "with_vector": true, "params": { "hnsw_ef": 64 } });
    let found = served.ok("POST", "/collections/c/points/query", near).await;
    assert_eq!(found["points"].as_array().unwrap().len(), 3);
    let first = &found["points"][0];
    assert_eq!((&first["id"], &first["score"], &first["payload"]), (&json!(7), &json!(0.0), &json!(null)));
    let floats = |row: &[u8]| json!(row.iter().map(|byte| f32::from(*byte as i8)).collect::<Vec<_>>());
    assert_eq!(first["vector"], floats(&data[7]));
    // By id it is not among its own neighbours; the second of the list above is the first here.
    let by_id = served.ok("POST", "/collections/c/points/query", json!({ "query": 7, "limit": 2 })).await;
    assert_eq!(by_id["points"][0]["id"], found["points"][1]["id"]);
    let second = json!({ "query": 7, "limit": 1, "offset": 1 });
    let second = served.ok("POST", "/collections/c/points/query", second).await;
    assert_eq!(second["points"], json!([by_id["points"][1]]));
    let worst = by_id["points"][0]["score"].as_f64().unwrap();
    let within = json!({ "query": 7, "limit": 5, "score_threshold": worst });
    let within = served.ok("POST", "/collections/c/points/query", within).await;
    assert_eq!(within["points"].as_array().unwrap().len(), 1);
    let batch = json!({ "searches": [{ "query": 7, "limit": 2 }, { "query": { "nearest": 8 } }] });
    let batch = served.ok("POST", "/collections/c/points/query/batch", batch).await;
    assert_eq!(batch[0], by_id);
    assert_eq!(batch[1]["points"].as_array().unwrap().len(), 10);

    let some = served.ok("POST", "/collections/c/points", json!({ "ids": [5, 999, 3] })).await;
    assert_eq!(
        some,
        json!([{ "id": 5, "payload": null, "vector": null }, { "id": 3, "payload": null, "vector": null }])
    );
    let one = served.ok("GET", "/collections/c/points/5", json!(null)).await;
    assert_eq!(one, json!({ "id": 5, "payload": null, "vector": floats(&data[5]) }));
    served.refused("GET", "/collections/c/points/999", "", 404, "no point 999").await;

    let (mut seen, mut offset) = (Vec::new(), json!(null));
    loop {
        let page = json!({ "limit": 70, "offset": offset });
        let page = served.ok("POST", "/collections/c/points/scroll", page).await;
        seen.extend(page["points"].as_array().unwrap().iter().map(|point| point["id"].as_u64().unwrap()));
        offset = page["next_page_offset"].clone();
        if offset.is_null() {
            break;
        }
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..300).collect::<Vec<_>>());

    let replaced = json!({ "batch": { "ids": [7, 300], "vectors": [vector(&data[9]), vector(&[0; 8])] } });
    served.ok("PUT", "/collections/c/points", replaced).await;
    for exact in [true, false] {
        let count = served.ok("POST", "/collections/c/points/count", json!({ "exact": exact })).await;
        assert_eq!(count, json!({ "count": 301 }));
    }
    let one = served.ok("GET", "/collections/c/points/7", json!(null)).await;
    assert_eq!(one["vector"], floats(&data[9]));

    assert_eq!(served.ok("DELETE", "/collections/c", json!(null)).await, true);
    assert_eq!(served.ok("DELETE", "/collections/c", json!(null)).await, false);
    served.refused("POST", "/collections/c/points/count", "{}", 404, "no collection 'c'").await;
}

#[tokio::test]
async fn what_is_wrong_is_named_and_nothing_is_half_done() {
    let served = serve(&plain()).await;
    let create = json!({ "vectors": { "size": 2, "distance": "Cosine" }, "capacity": 10_000 });
    served.ok("PUT", "/collections/c", create).await;
    let points = "/collections/c/points";
    for (body, part) in [
        ("", "the body is empty"),
        ("{\"points\": [", "the body is not JSON"),
        ("[1]", "the body: expected an object"),
        (r#"{"points":[{"id":1,"vector":[1,2]},{"id":2,"vector":[1]}]}"#, "points[1].vector: has 1 elements"),
        (r#"{"points":[{"id":1,"vector":[1,2]},{"id":2,"vector":[1,NaN]}]}"#, "\"vector\":[1,N"),
        (
            r#"{"points":[{"id":1,"vector":[1,2]},{"id":2,"vector":[1,1e999]}]}"#,
            "points[1].vector: element 1",
        ),
        (
            r#"{"points":[{"id":1,"vector":[1,2]},{"id":2,"vector":[1,1e39]}]}"#,
            "points[1].vector: element 1 is",
        ),
        (
            r#"{"points":[{"id":1,"vector":[1,2]},{"id":2,"vector":[0,0]}]}"#,
            "points[1].vector: the squared norm",
        ),
        (r#"{"points":[{"id":1,"vector":[1,2]},{"id":"two","vector":[1,2]}]}"#, "points[1].id: expected"),
        (r#"{"points":[{"id":1,"vector":[1,2],"payload":{"a":1}}]}"#, "points[0].payload: payloads are not"),
    ] {
        served.refused("PUT", points, body, 400, part).await;
    }
    let count = served.ok("POST", "/collections/c/points/count", json!({})).await;
    assert_eq!(count, json!({ "count": 0 }), "the first point of a bad request is not stored");

    let query = "/collections/c/points/query";
    for (body, status, part) in [
        (r#"{"query":[1,2],"limit":0}"#, 400, "limit: expected a whole number, 1 to 65536"),
        (r#"{"query":[1,2],"limit":65537}"#, 400, "limit: expected a whole number, 1 to 65536"),
        (r#"{"query":[0,0]}"#, 400, "query: the squared norm"),
        (r#"{"query":[1,2],"filter":{"must":[]}}"#, 400, "filter: filters are not supported"),
        (r#"{"query":9}"#, 404, "no id 9"),
    ] {
        served.refused("POST", query, body, status, part).await;
    }
    served
        .refused("POST", query, &format!("{{\"query\":[1,2{}]}}", " ".repeat(33 << 20)), 413, "too large")
        .await;
    served
        .refused(
            "POST",
            &format!("{points}/scroll"),
            r#"{"offset":9}"#,
            400,
            "offset: collection 'c' has no id 9",
        )
        .await;
    served
        .refused("POST", &format!("{points}/delete"), r#"{"points":[1]}"#, 501, "cannot be deleted yet")
        .await;
    served.refused("POST", "/collections/d/points/query", r#"{"query":9}"#, 404, "no collection 'd'").await;
    served.refused("PUT", "/collections/%ff", r#"{"vectors":{"size":2,"distance":"Dot"}}"#, 400, "").await;
    served.refused("PUT", "/collections/d?timeout=0", "{}", 400, "vectors: missing").await;
    served.refused("PATCH", "/collections/c", "{}", 405, "PATCH is not offered").await;
    served.refused("GET", "/dashboard", "", 404, "no path /dashboard").await;
    assert_eq!(served.ok("GET", "/collections/d/exists", json!(null)).await, json!({ "exists": false }));
}

#[tokio::test]
async fn probes_and_metrics_are_plain_pages() {
    let served = serve(&plain()).await;
    for (path, part) in [
        ("/", "\"title\":\"shine"),
        ("/livez", "alive"),
        ("/healthz", "alive"),
        ("/readyz", "ready"),
        ("/metrics", "# TYPE shine_searches_total counter"),
    ] {
        let (status, text) = served.raw(&request("GET", path, "", "")).await;
        assert!(status == 200 && text.contains(part), "{path}: {status} {text}");
    }
    // A node that leaves is alive, and not ready.
    served.node.drain(std::time::Instant::now()).await;
    assert_eq!(served.raw(&request("GET", "/livez", "", "")).await.0, 200);
    let (status, text) = served.raw(&request("GET", "/readyz", "", "")).await;
    assert!(status == 503 && text.contains("is leaving"), "{status} {text}");
    served.refused("GET", "/collections", "", 503, "is leaving the cluster").await;
    // Then it closes.
    served.stop.send(()).unwrap();
    served.serving.await.unwrap();
    assert!(TcpStream::connect(served.addr).await.is_err());
}

#[tokio::test]
async fn without_a_key_only_this_machine_is_served() {
    let served = serve(&plain()).await;
    let rebound = b"GET /collections HTTP/1.1\r\nhost: example.org\r\nconnection: close\r\n\r\n";
    let (status, text) = served.raw(rebound).await;
    assert!(status == 403 && text.contains("host 'example.org'"), "{status} {text}");
    let page = request("GET", "/collections", "origin: https://example.org\r\n", "");
    let (status, text) = served.raw(&page).await;
    assert!(status == 403 && text.contains("origin 'https://example.org'"), "{status} {text}");
}

#[tokio::test]
async fn with_a_certificate_and_a_key_both_are_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let ca = ClusterCa::init(folder.path().join("ca")).unwrap();
    let certs: PathBuf = folder.path().join("cn-0");
    ca.issue(Role::Cn, "cn-0", &["localhost".into(), "127.0.0.1".into()], 1, &certs).unwrap();
    let key_file = folder.path().join("api-key");
    let mut config = HttpConfig {
        listen: "127.0.0.1:0".parse().unwrap(),
        tls: Some((certs.join("node.pem"), certs.join("node.key"))),
        api_key_file: Some(key_file.clone()),
        patience: Patience::default(),
        connections_max: CONNECTIONS_MAX,
    };
    // What is wrong with a file is said with its name.
    for (content, part) in [(None, "api-key: "), (Some("short"), "expected 16 to 512 visible")] {
        content.map(|content| std::fs::write(&key_file, content)).transpose().unwrap();
        let said = Http::bind(&config).await.unwrap_err().to_string();
        assert!(said.contains(part), "{said}");
    }
    std::fs::write(&key_file, "0123456789abcdef\n").unwrap();
    config.tls = Some((certs.join("node.key"), certs.join("node.key")));
    let said = Http::bind(&config).await.unwrap_err().to_string();
    assert!(said.contains("node.key: no certificate in it"), "{said}");
    config.tls = Some((certs.join("node.pem"), certs.join("node.key")));

    let served = serve(&config).await;
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(certs.join("ca.pem")).unwrap()).unwrap();
    let client = ClientConfig::builder_with_provider(crypto_provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let connector = TlsConnector::from(Arc::new(client));
    let call = async |path: &str, headers: &str| {
        let stream = TcpStream::connect(served.addr).await.unwrap();
        let stream = connector.connect("localhost".try_into().unwrap(), stream).await.unwrap();
        exchange(stream, &request("GET", path, headers, "")).await
    };
    assert_eq!(call("/collections", "api-key: 0123456789abcdef\r\n").await.0, 200);
    assert_eq!(call("/collections", "authorization: Bearer 0123456789abcdef\r\n").await.0, 200);
    let (status, text) = call("/collections", "api-key: 0123456789abcdeg\r\n").await;
    assert!(status == 401 && text.contains("not this node's key"), "{status} {text}");
    assert_eq!(call("/metrics", "").await.0, 401);
    assert_eq!(call("/readyz", "").await.0, 200, "probes have no key");
    // Plain HTTP gets nothing.
    assert_eq!(served.raw(&request("GET", "/readyz", "", "")).await.0, 0);
}

#[tokio::test]
async fn a_head_and_a_body_that_never_come_to_an_end_are_given_up() {
    let brief = Duration::from_millis(50);
    let patience = Patience { head: brief, body: brief, ..Patience::default() };
    let served = serve(&HttpConfig { patience, ..plain() }).await;
    let (status, _) = served.raw(b"GET /collections HTTP/1.1\r\nhost: loc").await;
    assert!(status == 0 || status == 408, "{status}");
    let head = b"PUT /collections/c HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 100\r\n\r\n{";
    let (status, text) = served.raw(head).await;
    assert!(status == 408 && text.contains("did not arrive"), "{status} {text}");
}

#[tokio::test]
async fn requests_at_once_are_bounded() {
    let served = serve(&plain()).await;
    let create = json!({ "vectors": { "size": 2, "distance": "Euclid", "datatype": "int8" } });
    served.ok("PUT", "/collections/c", create).await;
    let point = json!({ "points": [{ "id": 1, "vector": [1, 2] }] });
    served.ok("PUT", "/collections/c/points?wait=true", point).await;
    // Searches hang on memory nodes that hold their answers back.
    let hosts = ["mn-0", "mn-1"].map(|name| served._cluster.hosts.host(name));
    hosts.iter().for_each(|host| host.pause());
    let ask = request("POST", "/collections/c/points/query?timeout=60", "", r#"{"query": [1, 2]}"#);
    let mut waiting = Vec::new();
    for _ in 0..256 {
        let stream = TcpStream::connect(served.addr).await.unwrap();
        let ask = ask.clone();
        waiting.push(tokio::spawn(async move { exchange(stream, &ask).await }));
    }
    while !served.node.status().counters.contains(&("searches_running".to_owned(), 256)) {
        tokio::task::yield_now().await;
    }
    served.refused("GET", "/collections", "", 503, "256 requests run already").await;
    served.refused("POST", "/collections/c/points/count", "{}", 503, "256 requests run already").await;
    assert_eq!(served.raw(&request("GET", "/livez", "", "")).await.0, 200);
    hosts.iter().for_each(|host| host.resume());
    for search in waiting {
        let (status, text) = search.await.unwrap();
        assert_eq!(status, 200, "{text}");
    }
}

#[tokio::test]
async fn bodies_that_do_not_come_keep_nobody_out() {
    let served = serve(&plain()).await;
    let head = b"PUT /collections/c HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n";
    let mut waiting = Vec::new();
    for _ in 0..256 {
        let mut stream = TcpStream::connect(served.addr).await.unwrap();
        stream.write_all(head).await.unwrap();
        // It goes on once the request has been let through and its body is wanted.
        let mut go_on = [0; 12];
        stream.read_exact(&mut go_on).await.unwrap();
        assert_eq!(&go_on, b"HTTP/1.1 100");
        waiting.push(stream);
    }
    assert_eq!(served.ok("GET", "/collections", json!(null)).await, json!({ "collections": [] }));
}

/// Patience is longer than the test: waiting for those who say nothing is no way out.
#[tokio::test]
async fn in_a_full_house_those_leave_who_keep_it_waiting() {
    let long = Duration::from_secs(600);
    let patience = Patience { head: long, body: long, write: long };
    let served = serve(&HttpConfig { patience, connections_max: 3, ..plain() }).await;
    // Silence from the start, half a head, half a body, silence after an answer: one place more than there are.
    let half_body = "PUT /collections/c HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{";
    let said = [
        "",
        "GET /collections HTTP/1.1\r\nhost: loc",
        half_body,
        "GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ];
    let mut waiting = Vec::new();
    for bytes in said.iter().cycle().take(8) {
        let mut stream = TcpStream::connect(served.addr).await.unwrap();
        stream.write_all(bytes.as_bytes()).await.unwrap();
        waiting.push(stream);
    }
    assert_eq!(served.raw(&request("GET", "/livez", "", "")).await.0, 200);
    // The first to come was the first to go.
    let mut rest = Vec::new();
    let _ = waiting.remove(0).read_to_end(&mut rest).await;
    assert!(rest.is_empty());
}

#[tokio::test]
async fn heads_are_bounded() {
    let served = serve(&plain()).await;
    let long = format!("GET /livez HTTP/1.1\r\nhost: localhost\r\nx: {}\r\n\r\n", "x".repeat(1 << 20));
    let (status, _) = served.raw(long.as_bytes()).await;
    assert!(status == 431 || status == 0, "{status}");
}
