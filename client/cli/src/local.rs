//! `shine up` and `shine down`: a cluster of real processes on this machine that stays until it is stopped.

use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;
use shine_common::config::ByteSize;
use shine_sim::cluster::{Cluster, ClusterFile, ClusterSpec, NodeFile, stop_detached};
use tokio::signal::unix::{SignalKind, signal};

use crate::connect::Connection;
use crate::exit::bad_input;
use crate::out::{Out, table};

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  shine up
  shine up --memory-nodes 3 --compute-nodes 2
  shine up --regions 32 --region-bytes 256MiB --dir /tmp/big

The cluster listens on loopback only, under a throw-away certificate authority in --dir. Other commands find it there.
It lives in memory alone: keep your graph files.")]
pub(crate) struct UpArgs {
    /// Number of memory nodes
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=64))]
    memory_nodes: u16,
    /// Number of compute nodes
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    compute_nodes: u16,
    /// Regions of each memory node: a region belongs to one collection
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=4096))]
    regions: u16,
    /// Size of each region
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    region_bytes: ByteSize,
    /// Shape every node's link to so many million bits per second
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    link_mbit: Option<u32>,
    /// Log level of all processes: error, warn, info, debug or trace
    #[arg(long, default_value = "info")]
    log: String,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  shine down
  shine down --dir /tmp/big")]
pub(crate) struct DownArgs {}

#[derive(Debug, Serialize)]
struct Up<'a> {
    dir: String,
    #[serde(flatten)]
    file: &'a ClusterFile,
}

/// Starts a cluster and leaves it running.
pub(crate) fn up(args: &UpArgs, connection: &Connection, out: Out) -> Result<()> {
    if args.region_bytes.0 == 0 || !args.region_bytes.0.is_multiple_of(4096) {
        return Err(bad_input(format!(
            "--region-bytes is {}: expected a multiple of 4KiB",
            args.region_bytes
        )));
    }
    let spec = ClusterSpec {
        memory_nodes: args.memory_nodes,
        compute_nodes: args.compute_nodes,
        regions: args.regions,
        region_bytes: args.region_bytes.0,
        link_mbit: args.link_mbit,
        log: args.log.clone(),
        home: Some(connection.dir.clone()),
        ..ClusterSpec::default()
    };
    let cluster = start_unless_interrupted(&spec)?;
    let file = cluster.detach()?;
    let up = Up { dir: connection.dir.display().to_string(), file: &file };
    out.print(&up, |up| {
        let at = if up.dir == ".shine" { String::new() } else { format!(" --dir {}", up.dir) };
        format!(
            "{}\nup in {}, in memory only. Next:\n  shine build BASE --metric l2 --out words.graph\n  \
             shine load --graph words.graph --collection words{at}\n  \
             shine search --collection words --id 0 --k 5{at}\n  shine down{at}\n",
            processes(&file.nodes),
            up.dir
        )
    })
}

/// The processes are of a session of their own, so Ctrl-C reaches only us: it is kept until the start has ended, and
/// the cluster is stopped then.
fn start_unless_interrupted(spec: &ClusterSpec) -> Result<Cluster> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting the runtime")?;
    runtime.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt()).context("watching for Ctrl-C")?;
        let mut terminate = signal(SignalKind::terminate()).context("watching for SIGTERM")?;
        let spec = spec.clone();
        let mut starting = tokio::task::spawn_blocking(move || Cluster::start(&spec));
        let mut is_interrupted = false;
        loop {
            tokio::select! {
                started = &mut starting => {
                    let cluster = started.context("starting the cluster")??;
                    if is_interrupted {
                        drop(cluster);
                        anyhow::bail!("interrupted: the cluster was stopped again");
                    }
                    return Ok(cluster);
                }
                _ = interrupt.recv() => is_interrupted = true,
                _ = terminate.recv() => is_interrupted = true,
            }
        }
    })
}

/// Stops the cluster.
pub(crate) fn down(connection: &Connection, out: Out) -> Result<()> {
    #[derive(Serialize)]
    struct Down {
        dir: String,
        stopped: Vec<String>,
    }
    let file = stop_detached(&connection.dir)?;
    let down = Down {
        dir: connection.dir.display().to_string(),
        stopped: file.nodes.into_iter().map(|node| node.name).collect(),
    };
    out.print(&down, |down| format!("stopped {}", down.stopped.join(", ")))
}

fn processes(nodes: &[NodeFile]) -> String {
    table(
        &["name", "role", "address", "pid"],
        3,
        nodes.iter().map(|node| {
            vec![node.name.clone(), node.role.to_string(), node.addr.to_string(), node.pid.to_string()]
        }),
    )
}
