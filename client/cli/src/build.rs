//! `shine build`: a graph file from vectors.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use serde::Serialize;
use shine_cn::hnsw::build::{self, BuildOptions};
use shine_cn::hnsw::hnsw_rs_builder;
use shine_common::graph_file::{Check, GraphFile};
use shine_common::metric::{DType, Metric};

use crate::files::Force;
use crate::input;
use crate::out::{Out, Progress, Unit, bytes, facts};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Builder {
    /// Ours
    Native,
    /// The crate hnsw_rs, as a yardstick
    #[value(name = "hnsw_rs")]
    HnswRs,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  shine build base.i8bin --metric l2 --out words.graph
  shine build base.fbin --metric cosine --m 32 --ef-construction 400 --rows 1000000 --out docs.graph
  shine build base.i8bin --metric l2 --builder hnsw_rs --threads 4 --out peer.graph

The external id of a vector is its row number. A build of one thread always gives the same file.")]
pub(crate) struct BuildArgs {
    /// The vectors, in any format (see `shine data info`)
    base: PathBuf,
    /// l2, ip or cosine
    #[arg(long)]
    metric: Metric,
    /// The graph file to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    #[command(flatten)]
    force: Force,
    /// Links per node and level; twice that on level 0
    #[arg(long, default_value_t = 16)]
    m: u32,
    /// Beam of the build: larger takes longer and finds better links
    #[arg(long, value_name = "N", default_value_t = 200)]
    ef_construction: u32,
    /// Who builds
    #[arg(long, value_enum, default_value_t = Builder::Native)]
    builder: Builder,
    /// Threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Only the first N rows
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    rows: Option<u64>,
    /// Seed of the level draw
    #[arg(long, default_value_t = BuildOptions::default().seed)]
    seed: u64,
}

#[derive(Debug, Serialize)]
struct Built {
    graph: PathBuf,
    file_bytes: u64,
    vectors: u32,
    dimension: u32,
    dtype: DType,
    metric: Metric,
    m: u32,
    ef_construction: u32,
    levels: u32,
    /// Nodes that nothing linked to after the build, and that were linked.
    orphans_linked: u32,
    /// Nodes that no search will find.
    unreached: u32,
    builder: String,
    threads: u32,
    build_seconds: f64,
    /// What the build took beside the vectors, by its own builder alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_bytes: Option<u64>,
}

/// Builds a graph file.
pub(crate) fn run(args: &BuildArgs, out: Out) -> Result<()> {
    args.force.check(&[&args.out], &[&args.base])?;
    let base = input::open(&args.base, args.rows)?;
    let options = BuildOptions {
        m: args.m,
        ef_construction: args.ef_construction,
        seed: args.seed,
        threads: args.threads.map_or(0, usize::from),
    };
    let bar = Progress::new("building", base.rows() as u64, Unit::Items("rows"));
    let progress = |done, total| bar.set(done, total);
    let graph = match args.builder {
        Builder::Native => build::build(&base, args.metric, &options, &progress)?,
        Builder::HnswRs => hnsw_rs_builder::build(&base, args.metric, &options, &progress)?,
    };
    drop(bar);
    graph.write(&args.out, &base, base.rows_hash())?;
    let file = GraphFile::open(&args.out, Check::Header)?;
    let info = file.info();
    let built = Built {
        graph: args.out.clone(),
        file_bytes: std::fs::metadata(&args.out)
            .with_context(|| format!("looking at {}", args.out.display()))?
            .len(),
        vectors: info.rows,
        dimension: info.dim,
        dtype: info.dtype,
        metric: info.metric,
        m: info.m,
        ef_construction: info.ef_construction,
        levels: u32::from(info.entry.level) + 1,
        orphans_linked: info.build.orphans_linked,
        unreached: graph.unreached(),
        builder: info.build.builder.clone(),
        threads: info.build.threads,
        build_seconds: info.build.seconds,
        memory_bytes: (args.builder == Builder::Native)
            .then(|| build::memory_bytes(info.rows.into(), &options)),
    };
    out.print(&built, |built| {
        let mut text = facts(&[
            ("graph", format!("{} ({})", built.graph.display(), bytes(built.file_bytes))),
            (
                "vectors",
                format!("{} of {} x {}, {}", built.vectors, built.dimension, built.dtype, built.metric),
            ),
            (
                "links",
                format!("m {}, ef_construction {}, {} levels", built.m, built.ef_construction, built.levels),
            ),
            (
                "built",
                format!("in {:.1} s by {} on {} threads", built.build_seconds, built.builder, built.threads),
            ),
            (
                "memory",
                built.memory_bytes.map_or("not known".into(), |beside| {
                    format!("about {} beside the vectors, which are mapped from the file", bytes(beside))
                }),
            ),
        ]);
        if built.unreached > 0 {
            text += &format!(
                "warning: {} of {} vectors are not reached from the entry point, and no search will find them; a \
                 larger --m or --ef-construction may help\n",
                built.unreached, built.vectors
            );
        }
        text
    })
}
