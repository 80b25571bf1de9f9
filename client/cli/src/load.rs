//! `shine load`: a collection from a graph file.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use shine_client::LoadOptions;
use shine_common::graph_file::{Check, GraphFile};
use shine_common::wire::{CollectionInfo, FaultCode};

use crate::collection::details;
use crate::connect::{Connection, with_client};
use crate::out::{Out, Progress, Unit};

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  shine load --graph words.graph --collection words
  shine load --graph words.graph --collection words --replace
  shine load --graph words.graph --collection words --memory-nodes mn-0,mn-1
  shine load --graph words.graph --collection words --resume

The collection is searchable when the command has ended. If it is interrupted, by Ctrl-C or because the cluster does not
answer, what is stored stays: --resume goes on there, and 'shine collection drop' frees it. Of a wrong file, or one that
does not fit, nothing is left.")]
pub(crate) struct LoadArgs {
    /// The graph file, as made by `shine build`
    #[arg(long, value_name = "FILE")]
    graph: PathBuf,
    /// Name of the collection to make
    #[arg(long, short, value_name = "NAME", env = "SHINE_COLLECTION")]
    collection: String,
    /// Drop a collection of that name first
    #[arg(long)]
    replace: bool,
    /// Go on with a load of this file that was interrupted; begin, if there is none
    #[arg(long, conflicts_with = "replace")]
    resume: bool,
    /// Memory nodes to use, by name [default: all that are up]
    #[arg(long, value_name = "NAME,..", value_delimiter = ',')]
    memory_nodes: Vec<String>,
    /// Rows to plan for, if more will be inserted later [default: those of the file]
    #[arg(long, value_name = "ROWS", default_value_t = 0, hide_default_value = true)]
    capacity: u64,
}

#[derive(Debug, Serialize)]
struct Loaded {
    #[serde(flatten)]
    info: CollectionInfo,
    load_seconds: f64,
}

/// Loads a graph file.
pub(crate) fn run(args: LoadArgs, connection: &Connection, out: Out) -> Result<()> {
    let graph = GraphFile::open(&args.graph, Check::Checksums)?;
    // Checksums only tell that the file is as it was written. What it says is held against itself before anything is
    // sent, and with --replace before anything is dropped.
    graph.verify()?;
    let options = LoadOptions {
        collection: args.collection,
        replace: args.replace,
        memory_nodes: args.memory_nodes,
        capacity: args.capacity,
        resume: args.resume,
    };
    with_client(connection, async |client| {
        static INTERRUPTED: AtomicBool = AtomicBool::new(false);
        // Where there is no handler, Ctrl-C ends us at once, which is no worse.
        let watch = tokio::spawn(async {
            while tokio::signal::ctrl_c().await.is_ok() {
                if INTERRUPTED.swap(true, Ordering::Relaxed) {
                    std::process::exit(130);
                }
                eprintln!("stopping; press Ctrl-C again to leave at once");
            }
        });
        let begun = Instant::now();
        let bar = Progress::new("loading", 0, Unit::Bytes);
        let mut stored = 0;
        let loading = client.load(&graph, &options, |at| {
            stored = at.done;
            bar.set(at.done, at.total);
            if INTERRUPTED.load(Ordering::Relaxed) {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        let outcome = loading.await;
        watch.abort();
        drop(bar);
        let info = match outcome {
            Ok(info) => info,
            Err(error) if error.code() == FaultCode::CollectionExists && !options.resume => {
                let there = client.stats(&options.collection).await.ok();
                return Err(anyhow::Error::new(error).context(what_is_there(&graph, there.as_ref())));
            }
            Err(error) => {
                let is_left = stored > 0 && error.code() != FaultCode::BadRequest;
                let error = anyhow::Error::new(error);
                return Err(if is_left {
                    error.context(format!(
                        "'{0}' is not loaded whole: --resume goes on, 'shine collection drop {0}' frees it",
                        options.collection
                    ))
                } else {
                    error
                });
            }
        };
        let loaded = Loaded { info, load_seconds: begun.elapsed().as_secs_f64() };
        out.print(&loaded, |loaded| {
            details(&loaded.info) + &format!("loaded in {:.1} s\n", loaded.load_seconds)
        })
    })
}

/// Why a load into a name that is taken was refused: what the file holds, and the collection.
fn what_is_there(graph: &GraphFile, there: Option<&CollectionInfo>) -> String {
    let file = graph.info();
    let mut text = format!("{} is not loaded", graph.path().display());
    let kinds = there.map(|there| {
        let kind = |dim, dtype, metric, m| format!("{dim} x {dtype}, {metric}, m {m}");
        (
            kind(file.dim, file.dtype, file.metric, file.m),
            kind(there.dimension, there.dtype, there.metric, there.m),
        )
    });
    match kinds {
        Some((ours, theirs)) if ours != theirs => {
            text += &format!(" (the file is of {ours}, the collection of {theirs}; ");
        }
        _ => text += " (",
    }
    text + "--replace drops the collection first)"
}
