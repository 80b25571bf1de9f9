//! `shine-sim cluster up` and `down`: a cluster of real processes on this machine that stays, and a file that says how it
//! is called, for scripts and foreign clients. It is the cluster of `shine up`, in the same folder.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Weak};

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use serde::Serialize;
use shine_common::config::ByteSize;
use shine_common::wire::Role;

use crate::cluster::{Cluster, ClusterFile, ClusterSpec, stop_detached};

/// Options of `cluster`.
#[derive(Debug, Clone, Args)]
pub struct ClusterArgs {
    #[command(subcommand)]
    command: UpOrDown,
}

#[derive(Debug, Clone, Subcommand)]
enum UpOrDown {
    /// Start a cluster on loopback and leave it running, in memory alone
    Up(UpArgs),
    /// Stop it and remove its files: its collections are gone
    Down(DownArgs),
}

#[derive(Debug, Clone, Args)]
struct UpArgs {
    /// Number of memory nodes
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=64))]
    memory_nodes: u16,
    /// Number of compute nodes; each has an HTTP API
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    compute_nodes: u16,
    /// Regions of each memory node: a region belongs to one collection
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=4096))]
    regions: u16,
    /// Size of each region
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    region_bytes: ByteSize,
    /// Folder of the cluster's files
    #[arg(long, value_name = "DIR", default_value = ".shine")]
    dir: PathBuf,
    /// File to write the addresses to, as {"http":[URL,..],"cn":[IP:PORT,..],"mn":[..],"oracle":[..]}
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Debug, Clone, Args)]
struct DownArgs {
    /// Folder of the cluster's files
    #[arg(long, value_name = "DIR", default_value = ".shine")]
    dir: PathBuf,
}

/// How a cluster is called.
#[derive(Debug, Clone, Serialize)]
struct Addresses {
    http: Vec<String>,
    cn: Vec<SocketAddr>,
    mn: Vec<SocketAddr>,
    oracle: Vec<SocketAddr>,
}

impl Addresses {
    fn of(file: &ClusterFile) -> Self {
        let of = |role| file.nodes.iter().filter(|node| node.role == role).map(|node| node.addr).collect();
        Self {
            http: file.nodes.iter().filter_map(|node| node.http.clone()).collect(),
            cn: of(Role::Cn),
            mn: of(Role::Mn),
            oracle: of(Role::Oracle),
        }
    }
}

/// Starts or stops a cluster.
///
/// # Errors
/// If it does not start, or there is none to stop.
pub async fn run(args: ClusterArgs) -> Result<()> {
    // What starts and ends processes waits for them. Whoever is interrupted drops this future, and the thread goes on
    // until the cluster is up: then it stops it again.
    let wanted = Arc::new(());
    let is_wanted = Arc::downgrade(&wanted);
    let done = tokio::task::spawn_blocking(move || match args.command {
        UpOrDown::Up(args) => up(&args, &is_wanted),
        UpOrDown::Down(args) => down(&args),
    });
    let done = done.await.context("a thread broke off")?;
    drop(wanted);
    done
}

fn up(args: &UpArgs, is_wanted: &Weak<()>) -> Result<()> {
    let bytes = args.region_bytes;
    anyhow::ensure!(
        bytes.0 > 0 && bytes.0.is_multiple_of(4096),
        "--region-bytes is {bytes}: expected a multiple of 4KiB"
    );
    let cluster = Cluster::start(&ClusterSpec {
        memory_nodes: args.memory_nodes,
        compute_nodes: args.compute_nodes,
        regions: args.regions,
        region_bytes: bytes.0,
        home: Some(args.dir.clone()),
        ..ClusterSpec::default()
    })?;
    anyhow::ensure!(is_wanted.strong_count() > 0, "interrupted: the cluster was stopped again");
    let addresses = Addresses::of(&cluster.file()?);
    let text = serde_json::to_string(&addresses).expect("addresses are plain data");
    if let Some(path) = &args.json {
        // Before the cluster is left to itself: if this fails it is stopped again.
        std::fs::write(path, format!("{text}\n")).with_context(|| format!("writing {}", path.display()))?;
    }
    cluster.detach()?;
    println!("{text}");
    Ok(())
}

fn down(args: &DownArgs) -> Result<()> {
    let file = stop_detached(&args.dir)?;
    let names: Vec<_> = file.nodes.iter().map(|node| node.name.as_str()).collect();
    println!("stopped {}", names.join(", "));
    Ok(())
}
