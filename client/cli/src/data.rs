//! `shine data`: look at, convert, and make data sets.

mod convert;
mod info;
mod make;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Subcommand};
use shine_common::dataset::SynthShape;
use shine_common::layout::EF_MAX;
use shine_common::metric::{DType, Metric};

use crate::files::Force;
use crate::out::Out;

/// Arguments of `shine data`.
#[derive(Debug, Args)]
pub(crate) struct DataArgs {
    #[command(subcommand)]
    command: DataCommand,
}

#[derive(Debug, Subcommand)]
enum DataCommand {
    /// Say what a file of vectors or of ground truth holds
    Info(InfoArgs),
    /// Write vectors or ground truth in another format or element type
    Convert(ConvertArgs),
    /// Compute exact nearest neighbours
    Truth(TruthArgs),
    /// Make a set in the shape of a published one, at any size
    Synth(SynthArgs),
    /// Make queries for a base: hold out rows, or skew them over its regions
    Queries(QueriesArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  shine data info base.i8bin
  shine data info --hash --json base.fvecs truth.ibin

Formats, by extension: fvecs bvecs fbin f16bin u8bin i8bin npy (vectors), ivecs ibin (ground truth). With --json the
answer is a list with one entry for each file.")]
struct InfoArgs {
    /// The files
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Also the sha256 of each file, by which plans name data
    #[arg(long)]
    hash: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  shine data convert base.fvecs base.fbin
  shine data convert --rows 100000 base.npy crop.fbin
  shine data convert --scale 320 --clip unit.fbin base.i8bin
  shine data convert --dtype f16 base.fbin base.npy
  shine data convert truth.ivecs truth.ibin

A value that the new type cannot hold is an error that names its row, unless --clip. Rounding is to the nearest.")]
struct ConvertArgs {
    /// The file to read
    from: PathBuf,
    /// The file to write; its extension names the format
    to: PathBuf,
    /// Only the first N rows (for ground truth: queries)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    rows: Option<u64>,
    /// Element type: f32, f16, u8 or i8 [default: what the new format holds; for npy, that of the source]
    #[arg(long)]
    dtype: Option<DType>,
    /// Multiply every value first
    #[arg(long, value_name = "X", value_parser = finite)]
    scale: Option<f64>,
    /// Move values outside the range of the new type to its ends
    #[arg(long)]
    clip: bool,
    #[command(flatten)]
    force: Force,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  shine data truth --base base.i8bin --queries query.i8bin --metric l2 --out truth.ibin
  shine data truth --base base.fbin --queries query.fbin --metric ip --k 10 --rows 5000 --out t.ibin

The answer holds row numbers and distances (squared L2, minus the inner product, or one minus the cosine), nearest
first, ties to the smaller row.")]
struct TruthArgs {
    /// The vectors to search in
    #[arg(long, value_name = "FILE")]
    base: PathBuf,
    /// The vectors to search for, of the same type and dimension
    #[arg(long, value_name = "FILE")]
    queries: PathBuf,
    /// l2, ip or cosine
    #[arg(long)]
    metric: Metric,
    /// Neighbours per query
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=i64::from(EF_MAX)))]
    k: u32,
    /// Only the first N rows of the base
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    rows: Option<u64>,
    /// Only the first N queries
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    limit_queries: Option<u64>,
    #[command(flatten)]
    threads: Threads,
    /// The file to write: .ibin, or .ivecs for row numbers alone
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    #[command(flatten)]
    force: Force,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  shine data synth spacev 1000000 --out spacev-1M
  shine data synth deep 100000 --queries 1000 --truth 1000 --k 10 --out deep-100k

Shapes: spacev (100 x i8, L2), turing (100 x f32, L2), deep (96 x f32 of length one, L2), bigann (128 x u8, L2),
tti (200 x f32, inner product, queries from another distribution). The folder gets base.*, query.* and, with --truth,
truth.ibin. The same seed gives the same bytes on every x86-64 machine, for any number of threads.")]
struct SynthArgs {
    /// spacev, turing, deep, bigann or tti
    shape: SynthShape,
    /// Rows of the base
    #[arg(value_parser = clap::value_parser!(u64).range(1..=u64::from(u32::MAX)))]
    rows: u64,
    /// Number of queries
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..))]
    queries: u64,
    /// Exact neighbours for the first N queries
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    truth: Option<u64>,
    /// Neighbours per query in the truth
    #[arg(long, requires = "truth", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=i64::from(EF_MAX)))]
    k: u32,
    /// Another seed gives another set of the same kind
    #[arg(long, default_value_t = 1234)]
    seed: u64,
    #[command(flatten)]
    threads: Threads,
    /// The folder to write
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    #[command(flatten)]
    force: Force,
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("kind").required(true), after_help = "Examples:
  shine data queries --base all.fbin --hold-out 10000 --out split
  shine data queries --base base.i8bin --regions 1.0 --count 100000 --out skewed
  shine data queries --base base.i8bin --regions 1.0 --truth 1000 --metric l2 --out skewed

--hold-out writes base.* (the base without N random rows) and query.* (those rows, in random order).
--regions cuts the base into 256 k-means cells, ranked at random, and writes query.*: a query draws a cell by a Zipf
law with exponent S over the ranks, and is 0.8 a + 0.2 b of two random rows of the cell, rounded to the type. No query
is ever repeated. With --truth the folder also gets truth.ibin.")]
struct QueriesArgs {
    /// The base, in any format
    #[arg(long, value_name = "FILE")]
    base: PathBuf,
    /// Hold out N rows as queries
    #[arg(long, value_name = "N", group = "kind", value_parser = clap::value_parser!(u64).range(1..))]
    hold_out: Option<u64>,
    /// Skewed queries with Zipf exponent S (0 = every cell alike)
    #[arg(long, value_name = "S", group = "kind", value_parser = zipf_exponent)]
    regions: Option<f64>,
    /// Number of skewed queries
    #[arg(long, value_name = "N", default_value_t = 10_000, conflicts_with = "hold_out", value_parser = clap::value_parser!(u64).range(1..))]
    count: u64,
    /// Exact neighbours for the first N queries
    #[arg(long, value_name = "N", requires = "metric", value_parser = clap::value_parser!(u64).range(1..))]
    truth: Option<u64>,
    /// l2, ip or cosine, for the truth
    #[arg(long, requires = "truth")]
    metric: Option<Metric>,
    /// Neighbours per query in the truth
    #[arg(long, requires = "truth", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=i64::from(EF_MAX)))]
    k: u32,
    /// Another seed gives other queries
    #[arg(long, default_value_t = 1234)]
    seed: u64,
    #[command(flatten)]
    threads: Threads,
    /// The folder to write
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    #[command(flatten)]
    force: Force,
}

#[derive(Debug, Args)]
struct Threads {
    /// Threads to use [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
}

impl Threads {
    fn count(&self) -> usize {
        match self.threads {
            Some(threads) => threads.into(),
            None => std::thread::available_parallelism().map_or(1, Into::into),
        }
    }
}

fn finite(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|x: &f64| x.is_finite()).ok_or_else(|| "a finite number is expected".into())
}

fn zipf_exponent(text: &str) -> Result<f64, String> {
    finite(text)
        .ok()
        .filter(|x| (0.0..=10.0).contains(x))
        .ok_or_else(|| "a number from 0 to 10 is expected".into())
}

/// Runs the command.
pub(crate) fn run(args: DataArgs, out: Out) -> Result<()> {
    match args.command {
        DataCommand::Info(args) => info::run(&args, out),
        DataCommand::Convert(args) => convert::run(&args, out),
        DataCommand::Truth(args) => make::truth(&args, out),
        DataCommand::Synth(args) => make::synth(&args, out),
        DataCommand::Queries(args) => make::queries(&args, out),
    }
}
