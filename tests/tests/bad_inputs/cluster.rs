//! What the cluster has or lacks: collections, memory, certificates, ports, and peers of one version.

use std::fs;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::time::{Duration, UNIX_EPOCH};

use shine_common::net::endpoint::{Endpoint, EndpointOptions};
use shine_common::net::tls::ClusterCa;
use shine_common::wire::{PROTOCOL_VERSION, Role};
use shine_tests::desk::Desk;

use crate::{
    AS_BEFORE, BAD_INPUT, COLLECTIONS, Cases, FAILED, FORBIDDEN, FULL, Guard, NOT_FOUND, PAGE, PEERS,
    REFUSED, USAGE, put, replace_between, rows, without_ports, words,
};

#[test]
fn collections_that_exist_or_do_not_and_memory_that_is_full() {
    // One region of 2 MiB: room for one collection, and in it for one chunk of records.
    let desk = Desk::new();
    let up =
        ["up", "--memory-nodes", "1", "--compute-nodes", "1", "--regions", "1", "--region-bytes", "2MiB"];
    desk.json(&up);
    let write = |name: &str, bytes: &[u8]| put(&desk, name, bytes);
    write("few.fbin", &rows(5, 128));
    write("many.fbin", &rows(2_500, 128));
    write("query.fbin", &rows(5, 128));
    let truth =
        ["data", "truth", "--base", "few.fbin", "--queries", "query.fbin", "--metric", "l2", "--k", "3"];
    desk.json(&[&truth[..], &["--out", "truth.ibin"]].concat());
    for (base, graph, ef) in [("few.fbin", "few.graph", "50"), ("many.fbin", "many.graph", "1")] {
        let build = ["build", base, "--metric", "l2", "--m", "8", "--ef-construction", ef, "--out", graph];
        desk.json(&build);
    }

    let mut cases = Cases::new(&desk);
    for line in [
        "shine search -c nowhere --id 5",
        "shine search -c nowhere --file query.fbin",
        "shine get -c nowhere 5",
        "shine insert -c nowhere --id 5 --vector 1,2",
        "shine insert -c nowhere --file few.fbin",
        "shine recall -c nowhere --queries query.fbin --truth truth.ibin --k 3",
        "shine check -c nowhere",
        "shine collection stats nowhere",
        "shine collection drop nowhere",
    ] {
        cases.refused("a collection that is not there", NOT_FOUND, line, "'nowhere'");
    }
    let create =
        "shine collection create words --dim 128 --metric l2 --m 8 --ef-construction 20 --capacity 1000";
    cases.refused("a name that cannot be", REFUSED, &create.replace("words", "a.b"), "'a.b'");
    cases.refused(
        "a memory node that is not there",
        NOT_FOUND,
        &format!("{create} --memory-nodes mn-9"),
        "'mn-9'",
    );
    let load = "shine load --graph few.graph -c words";
    cases.refused(
        "a memory node that is not there",
        NOT_FOUND,
        &format!("{load} --memory-nodes mn-9"),
        "'mn-9'",
    );
    cases.refused(
        "region full: a graph that is too large",
        FULL,
        "shine load --graph many.graph -c words",
        "'words'",
    );

    desk.json(&words(create)[1..]);
    desk.json(&["insert", "-c", "words", "--file", "few.fbin", "--ids-from", "10000"]);
    cases.guard = Guard::new(&desk);
    let exists = (5, "collection_exists");
    cases.refused("a collection that is there", exists, create, "'words'");
    cases.refused("a collection that is there", exists, load, "'words'");
    cases.refused("region full: no region is left", FULL, &create.replace("words", "more"), "'more'");
    cases.refused("region full: no region is left", FULL, "shine load --graph few.graph -c more", "'more'");

    // Inserts stop where the memory ends: what was stored by then is told, counted and sound.
    let line = "shine insert -c words --file many.fbin";
    let mut refusal = cases.guard.only_refuse(line);
    let after = refusal.message.strip_prefix("stopped after ").and_then(|text| text.split_once(' '));
    let stored: u64 = after.expect("it says after how many").0.parse().expect("a number");
    assert_eq!(desk.collections(), [("words".into(), "ready".into(), 5 + stored)]);
    let check = desk.json(&["check", "-c", "words"]);
    assert_eq!((&check["is_sound"], &check["live"]), (&true.into(), &(5 + stored).into()), "{check}");
    assert!(stored > 500, "{stored}: there was room for more");
    // What came when, and how many upper lists and ids were among it, differs from run to run.
    for (before, after, word) in
        [("stopped after ", " of", "N"), ("row ", ",", "R"), ("id ", ":", "R"), ("regions (", " of", "B")]
    {
        refusal.message = replace_between(&refusal.message, before, after, word);
    }
    cases.push(
        "region full: while inserting",
        FULL,
        line,
        "many.fbin",
        &refusal,
        "the N that were told are stored",
    );
    cases.guard = Guard::new(&desk);
    let one = format!("shine insert -c words --id 9 --vector {}", vec!["1"; 128].join(","));
    let mut refusal = cases.guard.refuse(&one);
    refusal.message = replace_between(&refusal.message, "regions (", " of", "B");
    let shown = "shine insert -c words --id 9 --vector 1,1,..";
    cases.push("region full: one insert more", FULL, shown, "'words'", &refusal, AS_BEFORE);
    cases.table.check(PAGE, COLLECTIONS);
}

/// An oracle of the version after ours: it answers every call by naming its version.
fn later_oracle(ca: &ClusterCa) -> (tokio::runtime::Runtime, SocketAddr) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let identity = ca.identity(Role::Oracle, "oracle-0").expect("an identity");
    let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
    let bind = async { Endpoint::bind(any_port, identity, EndpointOptions::default()) };
    let endpoint = runtime.block_on(bind).expect("an endpoint");
    let addr = endpoint.local_addr();
    runtime.spawn(async move {
        while let Some((connection, ..)) = endpoint.accept().await {
            tokio::spawn(async move {
                while let Ok((mut send, _recv)) = connection.accept_bi().await {
                    // A frame of `net::rpc`: magic, version, kind 3 for "another version", no body.
                    let header =
                        [&b"SHRP"[..], &(PROTOCOL_VERSION + 1).to_le_bytes(), &[3, 0, 0, 0], &[0; 4]]
                            .concat();
                    if send.write_all(&header).await.is_ok() && send.finish().is_ok() {
                        let _ = send.stopped().await;
                    }
                }
            });
        }
    });
    (runtime, addr)
}

#[test]
fn certificates_ports_and_peers() {
    let (desk, up) = Desk::with_cluster();
    let at = |name: &str| desk.folder().path(name);
    let oracle = up["oracles"][0].as_str().expect("an address").to_owned();
    desk.json(&["collection", "create", "words", "--dim", "4", "--metric", "l2"]);
    desk.json(&["ca", "init", "--out", "other"]);
    desk.json(&["ca", "issue", "--ca", "other", "--role", "admin", "--name", "mallory", "--out", "mallory"]);
    desk.json(&["ca", "issue", "--ca", "other", "--role", "mn", "--name", "mn-0", "--out", "strange"]);
    let copy = |from: &str, to: &str, files: &[&str]| {
        fs::create_dir_all(at(to)).expect("a folder");
        for file in files {
            fs::copy(at(from).join(file), at(to).join(file)).expect("copied");
        }
    };
    let admin = ".shine/certs/admin";
    copy(admin, "mixed", &["node.pem", "node.key"]);
    copy("mallory", "mixed", &["ca.pem"]);
    copy(admin, "keyless", &["ca.pem", "node.pem"]);
    copy(".shine/certs/client", "keyless", &["node.key"]);
    copy(admin, "garbage", &["ca.pem", "node.key"]);
    copy(admin, "theirs", &["ca.pem"]);
    fs::write(at("garbage/node.pem"), "not a certificate").expect("written");
    let ca = ClusterCa::load(at(".shine/certs/ca")).expect("the cluster's CA");
    let day = |number: u64| UNIX_EPOCH + Duration::from_secs(number * 24 * 3600);
    for (role, dir, from) in
        [(Role::Admin, "expired", 18_262), (Role::Mn, "expired-mn", 18_262), (Role::Admin, "early", 47_482)]
    {
        ca.issue_between(role, "late", &[], day(from), day(from + 31), at(dir)).expect("issued");
    }

    let mut cases = Cases::new(&desk);
    let list = "shine collection list";
    let drop_words = "shine collection drop words";
    // Who.
    cases.refused(
        "wrong role: a client drops",
        FORBIDDEN,
        &format!("{drop_words} --cert-dir .shine/certs/client"),
        "role client",
    );
    let create = "shine collection create x --dim 4 --metric l2";
    cases.refused(
        "wrong role: a client creates",
        FORBIDDEN,
        &format!("{create} --cert-dir .shine/certs/client"),
        "role client",
    );
    cases.refused(
        "wrong role: a memory node's certificate",
        FORBIDDEN,
        &format!("{list} --cert-dir .shine/certs/mn-0"),
        "role mn",
    );
    let node = format!("--oracles {oracle}");
    for (program, dir, role) in
        [("shine-mn", "cn-0", "role mn"), ("shine-cn", "mn-0", "role cn"), ("shine-cn", "admin", "role cn")]
    {
        let line = format!("{program} {node} --cert-dir .shine/certs/{dir}");
        cases.refused("wrong role: a process", FAILED, &line, role);
    }
    cases.refused(
        "wrong role: a process",
        FAILED,
        "shine-oracle --cert-dir .shine/certs/cn-0",
        "role oracle",
    );
    let named = format!("shine-cn {node} --name cn-7 --cert-dir .shine/certs/cn-0");
    cases.refused("a name that is another's", FAILED, &named, "cn-7");
    cases.refused(
        "an unknown role",
        USAGE,
        "shine ca issue --ca other --role king --name a --out out",
        "'king'",
    );
    cases.refused(
        "a name that cannot be",
        BAD_INPUT,
        "shine ca issue --ca other --role cn --name a.b --out out",
        "'a.b'",
    );

    // By which certificate.
    cases.refused(
        "wrong CA",
        FORBIDDEN,
        &format!("{list} --cert-dir mallory --connect-ms 1000"),
        &without_ports(&oracle),
    );
    cases.refused(
        "wrong CA: ca.pem of another",
        BAD_INPUT,
        &format!("{list} --cert-dir mixed"),
        "mixed/node.pem",
    );
    cases.refused(
        "a key of another certificate",
        BAD_INPUT,
        &format!("{list} --cert-dir keyless"),
        "keyless/node.key",
    );
    cases.refused(
        "no certificate in the file",
        BAD_INPUT,
        &format!("{list} --cert-dir garbage"),
        "garbage/node.pem",
    );
    cases.refused("no such folder", BAD_INPUT, &format!("{list} --cert-dir nowhere"), "nowhere");
    cases.refused(
        "expired certificate",
        BAD_INPUT,
        &format!("{list} --cert-dir expired"),
        "expired/node.pem",
    );
    let late = format!("shine-mn {node} --cert-dir expired-mn");
    cases.refused("expired certificate", FAILED, &late, "expired-mn/node.pem");
    cases.refused(
        "not yet valid certificate",
        BAD_INPUT,
        &format!("{list} --cert-dir early"),
        "early/node.pem",
    );
    cases.refused("a second CA", (5, "file_exists"), "shine ca init --out other", "other/");
    cases.refused(
        "a folder of another cluster",
        BAD_INPUT,
        "shine ca issue --ca other --role mn --name m --out theirs",
        "theirs/ca.pem",
    );

    // Where.
    let silent = UdpSocket::bind("127.0.0.1:0").expect("a port");
    let nobody = silent.local_addr().expect("an address");
    let away = format!("--oracles {nobody} --cert-dir {admin}");
    cases.refused(
        "no oracle",
        (4, "no_oracle"),
        &format!("{list} {away} --connect-ms 200"),
        &without_ports(&nobody.to_string()),
    );
    cases.refused("no cluster", (3, "not_up"), &format!("{list} --dir nowhere"), "nowhere");
    cases.refused("no address", BAD_INPUT, &format!("{list} --oracles nonsense"), "--oracles");
    cases.refused("a cluster that is up", (5, "already_up"), "shine up", ".shine");
    let certs = ".shine/certs";
    let taken = |program: &str, role: &str| {
        let oracles = if program == "shine-oracle" { String::new() } else { format!(" {node}") };
        format!("{program}{oracles} --cert-dir {certs}/{role}-0 --listen {nobody}")
    };
    for (program, role) in [("shine-oracle", "oracle"), ("shine-mn", "mn"), ("shine-cn", "cn")] {
        cases.refused("port in use", FAILED, &taken(program, role), &without_ports(&nobody.to_string()));
    }
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let http = listener.local_addr().expect("an address");
    let line = format!("shine-cn {node} --cert-dir {certs}/cn-0 --http {http}");
    cases.refused("port in use: HTTP", FAILED, &line, &without_ports(&http.to_string()));

    // What.
    let (runtime, later) = later_oracle(&ca);
    let line = format!("{list} --oracles {later} --connect-ms 1000");
    cases.refused("an oracle of another version", FORBIDDEN, &line, "version");
    runtime.shutdown_background();
    cases.table.check(PAGE, PEERS);
}
