//! `shine collection`: make, look at and drop collections.

use anyhow::Result;
use clap::{Args, Subcommand};
use serde::Serialize;
use shine_common::metric::{DType, Metric};
use shine_common::wire::{CollectionInfo, CollectionSpec, CollectionState};

use crate::connect::{Connection, with_client};
use crate::out::{Out, bytes, facts, table};

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  shine collection create words --dim 100 --dtype i8 --metric l2
  shine collection list
  shine collection stats words --json
  shine collection drop words")]
pub(crate) struct CollectionArgs {
    #[command(subcommand)]
    command: CollectionCommand,
}

#[derive(Debug, Subcommand)]
enum CollectionCommand {
    /// Make an empty collection to insert into (`shine load` makes its own)
    Create(CreateArgs),
    /// List all collections
    List(ListArgs),
    /// Forget a collection and give its memory back
    Drop(NameArgs),
    /// Say how large a collection is and where it lies
    Stats(NameArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  shine collection create words --dim 100 --dtype i8 --metric l2
  shine collection create points --dim 4 --metric l2
  shine collection create docs --dim 768 --metric cosine --m 32 --capacity 5000000
  shine collection create local --dim 96 --metric l2 --memory-nodes mn-0,mn-1")]
struct CreateArgs {
    /// Name: 1 to 64 of a-z A-Z 0-9 _ -
    name: String,
    /// Elements per vector
    #[arg(long, value_name = "N")]
    dim: u32,
    /// l2, ip or cosine
    #[arg(long)]
    metric: Metric,
    /// Element type: f32, f16, u8 or i8
    #[arg(long, default_value_t = DType::F32)]
    dtype: DType,
    /// Links per node and level; twice that on level 0
    #[arg(long, default_value_t = 16)]
    m: u32,
    /// Beam of inserts
    #[arg(long, value_name = "N", default_value_t = 200)]
    ef_construction: u32,
    /// Rows to plan for; it may grow beyond
    #[arg(long, value_name = "ROWS", default_value_t = 100_000)]
    capacity: u64,
    /// Memory nodes to use, by name [default: all that are up]
    #[arg(long, value_name = "NAME,..", value_delimiter = ',')]
    memory_nodes: Vec<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  shine collection list
  shine collection list --json")]
struct ListArgs {}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  shine collection stats words
  shine collection drop words")]
struct NameArgs {
    /// Name of the collection
    name: String,
}

/// Runs the command.
pub(crate) fn run(args: CollectionArgs, connection: &Connection, out: Out) -> Result<()> {
    with_client(connection, async |client| match args.command {
        CollectionCommand::Create(args) => {
            let spec = CollectionSpec {
                name: args.name,
                dtype: args.dtype,
                metric: args.metric,
                dim: args.dim,
                m: args.m,
                ef_construction: args.ef_construction,
                capacity: args.capacity,
                memory_nodes: args.memory_nodes,
                loading: false,
            };
            out.print(&client.create(spec).await?, details)
        }
        CollectionCommand::List(ListArgs {}) => out.print(&client.list().await?, |all| list(all)),
        CollectionCommand::Stats(args) => out.print(&client.stats(&args.name).await?, details),
        CollectionCommand::Drop(args) => {
            #[derive(Serialize)]
            struct Dropped {
                dropped: String,
            }
            client.drop_collection(&args.name).await?;
            out.print(&Dropped { dropped: args.name }, |dropped| format!("dropped {}", dropped.dropped))
        }
    })
}

fn state(info: &CollectionInfo) -> String {
    match (info.lost_region, info.state) {
        (Some(region), _) => format!("lost r{region}"),
        (None, CollectionState::Creating) => "creating".into(),
        (None, CollectionState::Loading) => "loading".into(),
        (None, CollectionState::Ready) => "ready".into(),
    }
}

fn list(all: &[CollectionInfo]) -> String {
    if all.is_empty() {
        return "no collections".into();
    }
    let row = |info: &CollectionInfo| {
        vec![
            info.name.clone(),
            state(info),
            info.dtype.to_string(),
            info.metric.to_string(),
            info.dimension.to_string(),
            info.m.to_string(),
            info.vectors.to_string(),
            bytes(info.bytes_used),
            bytes(info.bytes_reserved),
        ]
    };
    table(
        &["name", "state", "dtype", "metric", "dim", "m", "vectors", "used", "reserved"],
        4,
        all.iter().map(row),
    )
}

/// One collection in full.
pub(crate) fn details(info: &CollectionInfo) -> String {
    let mut nodes: Vec<&str> = info.regions.iter().map(|(_, mn)| mn.as_str()).collect();
    nodes.sort_unstable();
    let mut placed: Vec<String> =
        nodes.chunk_by(|a, b| a == b).map(|same| format!("{} x {}", same.len(), same[0])).collect();
    if placed.is_empty() {
        placed.push("none".into());
    }
    facts(&[
        ("name", info.name.clone()),
        ("state", state(info)),
        ("vectors", info.vectors.to_string()),
        ("type", format!("{} x {}, {}", info.dimension, info.dtype, info.metric)),
        (
            "graph",
            format!("m {}, ef_construction {}, {} levels", info.m, info.ef_construction, info.level + 1),
        ),
        ("chunks", format!("{} and {} of upper lists", info.chunks, info.upper_chunks)),
        ("memory", format!("{} used of {}", bytes(info.bytes_used), bytes(info.bytes_reserved))),
        ("regions", placed.join(", ")),
    ])
}
