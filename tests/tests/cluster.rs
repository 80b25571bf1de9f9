//! Starting and stopping a cluster of real processes, and a whole loopback run on a user's own files.

#![forbid(unsafe_code)]

use std::path::Path;
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use shine_common::metric::Metric;
use shine_common::wire::Role;
use shine_sim::cluster::{self, Cluster, ClusterError, ClusterFile, ClusterSpec};
use shine_sim::host::ProcessTimes;
use shine_tests::{Folder, as_f32, base, queries};

fn small() -> ClusterSpec {
    ClusterSpec {
        memory_nodes: 1,
        compute_nodes: 1,
        regions: 1,
        region_bytes: 4 << 20,
        ..ClusterSpec::default()
    }
}

fn pids(cluster: &Cluster) -> Vec<i32> {
    let names = [Role::Oracle, Role::Mn, Role::Cn].into_iter().flat_map(|role| cluster.names(role));
    names.map(|name| cluster.pid(name)).collect()
}

fn none_runs(pids: &[i32]) -> bool {
    pids.iter().all(|pid| ProcessTimes::read(*pid).is_err())
}

#[test]
fn a_cluster_leaves_no_process_and_no_file() -> Result<()> {
    let mut cluster = Cluster::start(&small())?;
    let (pids, home) = (pids(&cluster), cluster.home().to_owned());
    assert_eq!(pids.len(), 3);
    cluster.stop_all()?;
    assert!(none_runs(&pids));
    drop(cluster);
    assert!(!home.exists());

    let cluster = Cluster::start(&small())?;
    let (pids, home) = (self::pids(&cluster), cluster.home().to_owned());
    cluster.pause("mn-0");
    drop(cluster);
    assert!(none_runs(&pids) && !home.exists(), "a drop stops also what is paused");
    Ok(())
}

#[test]
fn a_node_that_does_not_start_is_reported_with_its_log() {
    let spec = small().with_args("mn-0", &["--threads", "banana"]);
    let error = Cluster::start(&spec).unwrap_err();
    let ClusterError::NotReady { name, what, log } = &error else { panic!("{error}") };
    assert_eq!(name, "mn-0");
    assert!(what.contains("ended before it was ready") && log.contains("banana"), "{error}");
}

#[test]
fn nodes_can_be_stopped_and_started_again() -> Result<()> {
    let mut cluster = Cluster::start(&small())?;
    for name in ["cn-0", "mn-0", "oracle-0"] {
        let (addr, pid) = (cluster.addr(name), cluster.pid(name));
        cluster.stop(name)?;
        assert!(!cluster.is_running(name));
        cluster.restart(name)?;
        assert_eq!(cluster.addr(name), addr);
        assert_ne!(cluster.pid(name), pid);
    }
    cluster.stop_all()?;
    Ok(())
}

#[test]
fn a_detached_cluster_stays_until_it_is_stopped() -> Result<()> {
    let folder = Folder::new();
    let home = folder.path("home");
    let spec = ClusterSpec { home: Some(home.clone()), ..small() };
    let file = Cluster::start(&spec)?.detach()?;
    assert!(file.nodes.iter().all(cluster::NodeFile::is_running));
    assert!(matches!(Cluster::start(&spec), Err(ClusterError::AlreadyUp(_))));
    assert_eq!(ClusterFile::read(&home)?.oracles, file.oracles);
    let stopped = cluster::stop_detached(&home)?;
    assert!(!stopped.nodes.iter().any(cluster::NodeFile::is_running));
    assert!(!home.exists());
    assert!(matches!(cluster::stop_detached(&home), Err(ClusterError::NotUp(_))));
    Ok(())
}

/// `shine-sim loopback` on files in `folder`.
fn loopback(
    folder: &Folder,
    base: &Path,
    queries: &Path,
    truth: &Path,
    metric: &str,
    more: &[&str],
) -> Command {
    let test = std::env::current_exe().expect("a test knows itself");
    let programs = test.parent().and_then(Path::parent).expect("tests lie in deps");
    let mut command = Command::new(programs.join("shine-sim"));
    command
        .arg("loopback")
        .arg("--base")
        .arg(base)
        .arg("--queries")
        .arg(queries)
        .arg("--truth")
        .arg(truth)
        .args(["--metric", metric])
        .args(more)
        .env("SHINE_CACHE", folder.path("cache"))
        .env("TMPDIR", folder.path("tmp"));
    std::fs::create_dir_all(folder.path("tmp")).expect("a folder in a new folder");
    command
}

fn told(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_loopback_run_takes_a_users_files_and_says_what_it_found() -> Result<()> {
    let folder = Folder::new();
    let (base, queries) = (base(5_000), queries(300));
    let files = [folder.write("base.i8bin", &base)?, folder.write("query.i8bin", &queries)?];
    let (truth, _) = folder.write_truth(&base, &queries.first(200)?, Metric::L2, 10)?;
    let (json, svg) = (folder.path("out.json"), folder.path("out.svg"));
    let outputs = [json.to_str().context("UTF-8")?, svg.to_str().context("UTF-8")?];
    let more = [
        "--ef",
        "20,80",
        "--memory-nodes",
        "2",
        "--compute-nodes",
        "2",
        "--json",
        outputs[0],
        "--svg",
        outputs[1],
    ];
    let run = || loopback(&folder, &files[0], &files[1], &truth, "l2", &more).output();

    let output = run()?;
    assert!(output.status.success(), "{}", told(&output));
    assert!(String::from_utf8_lossy(&output.stdout).contains("recall@10"));
    let first: Value = serde_json::from_str(&std::fs::read_to_string(&json)?)?;
    assert_eq!(
        (&first["vectors"], &first["dimension"], &first["dtype"], &first["metric"], &first["in_flight"]),
        (&5_000.into(), &100.into(), &"i8".into(), &"l2".into(), &8.into())
    );
    assert_eq!((&first["graph_cached"], &first["queries"]), (&false.into(), &200.into()));
    assert!(first["commit"].is_string() && first["host"]["cores"].as_u64() > Some(0));
    let points = first["points"].as_array().context("points")?;
    assert_eq!(points.iter().map(|point| point["ef"].as_u64()).collect::<Vec<_>>(), [Some(20), Some(80)]);
    for point in points {
        let number = |name: &str| point[name].as_f64().unwrap_or_else(|| panic!("{name} in {point}"));
        assert!(number("recall_by_distance") >= number("recall_at_k"), "{point}");
        for name in ["qps", "p50_us", "p99_us", "hops_per_query", "remote_reads_per_query"] {
            assert!(number(name) > 0.0, "{name} in {point}");
        }
        // Dependent rounds: two an expansion, and a little for the way down and the headers of the answers.
        assert!(number("round_trips_of_bound_max") <= 1.0, "{point}");
        assert!(number("bytes_per_query") > number("payload_bytes_per_query"), "{point}");
        assert!(number("bytes_per_query") <= 330_000.0, "{point}");
        assert_eq!(number("torn_lists"), 0.0);
    }
    assert!(points[1]["recall_at_k"].as_f64() > Some(0.95), "{}", points[1]);
    assert!(std::fs::read_to_string(&svg)?.contains("queries per second"));

    let output = run()?;
    assert!(output.status.success(), "{}", told(&output));
    let again: Value = serde_json::from_str(&std::fs::read_to_string(&json)?)?;
    assert_eq!(again["graph_cached"], true);
    for name in ["build_seconds", "files", "top_level", "layout"] {
        assert_eq!(again[name], first[name], "{name}");
    }
    // The same graph and queries: the same searches.
    for (point, before) in again["points"].as_array().context("points")?.iter().zip(points) {
        for name in ["recall_at_k", "hops_per_query", "remote_reads_per_query", "distances_per_query"] {
            assert_eq!(point[name], before[name], "{name}");
        }
    }
    assert_eq!(std::fs::read_dir(folder.path("tmp"))?.count(), 0, "no temporary file is left");
    Ok(())
}

#[test]
fn a_loopback_run_refuses_files_that_do_not_fit() -> Result<()> {
    let folder = Folder::new();
    let (base, queries) = (base(300), queries(20));
    let base_path = folder.write("base.i8bin", &base)?;
    let queries_path = folder.write("query.i8bin", &queries)?;
    let floats_path = folder.write("query.fbin", &as_f32(&queries))?;
    let (truth, _) = folder.write_truth(&base, &queries, Metric::L2, 10)?;
    let check = |queries: &Path, metric: &str, more: &[&str], expected: &str| -> Result<()> {
        let output = loopback(&folder, &base_path, queries, &truth, metric, more).output()?;
        let told = told(&output);
        assert!(!output.status.success() && told.contains(expected), "{told}");
        Ok(())
    };
    check(&queries_path, "l2", &["--rows", "100"], "row numbers below 100")?;
    check(&floats_path, "l2", &[], "convert")?;
    check(&queries_path, "l2", &["--k", "11"], "--k 11")?;
    check(&queries_path, "hamming", &[], "l2, ip, cosine")?;
    check(&queries_path, "l2", &["--json", "/nowhere/at/all.json"], "/nowhere/at")?;
    check(&folder.path("none.i8bin"), "l2", &[], "none.i8bin")?;
    Ok(())
}

#[test]
fn an_interrupted_loopback_run_leaves_nothing_behind() -> Result<()> {
    let folder = Folder::new();
    let (base, queries) = (base(300), queries(20));
    let files = [folder.write("base.i8bin", &base)?, folder.write("query.i8bin", &queries)?];
    let (truth, _) = folder.write_truth(&base, &queries, Metric::L2, 10)?;
    // A link so slow that the run is still at its queries when it is interrupted.
    let more = ["--memory-nodes", "1", "--compute-nodes", "1", "--link-mbit", "1"];
    let mut command = loopback(&folder, &files[0], &files[1], &truth, "l2", &more);
    let mut run = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let pid = i32::try_from(run.id())?;
    let tmp = folder.path("tmp");
    let home = || {
        let entries = std::fs::read_dir(&tmp).expect("a folder").flatten();
        entries.map(|entry| entry.path()).find(|path| path.is_dir())
    };
    let (home, pids) = loop {
        let pids = children(pid);
        match home() {
            Some(home) if pids.len() >= 3 => break (home, pids),
            _ if run.try_wait()?.is_some() => bail!("it ended: {}", told(&run.wait_with_output()?)),
            _ => std::thread::yield_now(),
        }
    };
    kill(Pid::from_raw(pid), Signal::SIGINT)?;
    let output = run.wait_with_output()?;
    assert_eq!(output.status.code(), Some(130), "{}", told(&output));
    assert!(none_runs(&pids), "processes are left");
    assert!(!home.exists(), "{} is left", home.display());
    Ok(())
}

/// The children of `parent`.
fn children(parent: i32) -> Vec<i32> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{parent}/task")) else { return Vec::new() };
    let of_task =
        |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
    let listed: Vec<String> = tasks.flatten().map(of_task).collect();
    listed.iter().flat_map(|pids| pids.split_whitespace()).filter_map(|pid| pid.parse().ok()).collect()
}
