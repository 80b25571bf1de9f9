//! `shine data`: look at, convert, and make data sets.

use std::fmt::Write as _;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;
use shine_common::dataset::{
    Content, Conversion, Format, Synth, SynthShape, Truth, VectorWriter, Vectors, convert, exact_neighbours,
    hold_out, region_queries, sha256_file, write_truth,
};
use shine_common::metric::{DType, Metric};

/// Rows whose norms `info` looks at.
const NORM_SAMPLE: usize = 10_000;
/// Work shorter than this shows no bar.
const BAR_AFTER: Duration = Duration::from_millis(500);

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

Formats, by extension: fvecs bvecs fbin f16bin u8bin i8bin npy (vectors), ivecs ibin (ground truth)")]
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
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  shine data truth --base base.i8bin --queries query.i8bin --metric l2 --out truth.ibin
  shine data truth --base base.fbin --queries query.fbin --metric ip --k 100 --rows 100000 --limit-queries 5000 --out truth.ibin

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
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
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
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    k: u32,
    /// Another seed gives another set of the same kind
    #[arg(long, default_value_t = 1234)]
    seed: u64,
    #[command(flatten)]
    threads: Threads,
    /// The folder to write
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
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
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    k: u32,
    /// Another seed gives other queries
    #[arg(long, default_value_t = 1234)]
    seed: u64,
    #[command(flatten)]
    threads: Threads,
    /// The folder to write
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
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

/// Runs the command. With `json`, one JSON value on stdout instead of text.
pub(crate) fn run(args: DataArgs, json: bool) -> Result<()> {
    let answer = match args.command {
        DataCommand::Info(args) => info(&args)?,
        DataCommand::Convert(args) => run_convert(&args)?,
        DataCommand::Truth(args) => truth(&args)?,
        DataCommand::Synth(args) => synth(&args)?,
        DataCommand::Queries(args) => queries(&args)?,
    };
    if json {
        println!("{}", answer.json)
    } else {
        print!("{}", answer.text)
    }
    Ok(())
}

/// The outcome in both forms.
struct Answer {
    json: serde_json::Value,
    text: String,
}

fn info(args: &InfoArgs) -> Result<Answer> {
    let (mut json, mut text) = (Vec::new(), String::new());
    for path in &args.files {
        let mut value = match Format::of(path)?.content() {
            Content::Truth => truth_info(path, &mut text)?,
            _ => vectors_info(path, &mut text)?,
        };
        if args.hash {
            let sum = sha256_file(path)?;
            writeln!(text, "  sha256   {sum}")?;
            value["sha256"] = sum.into();
        }
        json.push(value);
    }
    Ok(Answer { json: json.into(), text })
}

fn vectors_info(path: &Path, text: &mut String) -> Result<serde_json::Value> {
    let vectors = Vectors::open(path)?;
    let bytes = file_bytes(path)?;
    let norms = norms(&vectors);
    let format = vectors.format().map(|format| format.extension());
    writeln!(text, "{}", path.display())?;
    writeln!(text, "  format   {}", format.unwrap_or("none"))?;
    writeln!(text, "  vectors  {} x {} {}", vectors.rows(), vectors.dim(), vectors.dtype())?;
    writeln!(text, "  bytes    {bytes}")?;
    writeln!(
        text,
        "  norms    {:.4} to {:.4}, mean {:.4} ({} rows looked at)",
        norms.min, norms.max, norms.mean, norms.rows
    )?;
    Ok(json!({
        "file": path, "content": "vectors", "format": format, "dtype": vectors.dtype(), "rows": vectors.rows(),
        "dim": vectors.dim(), "bytes": bytes,
        "norms": { "min": norms.min, "max": norms.max, "mean": norms.mean, "rows": norms.rows },
    }))
}

fn truth_info(path: &Path, text: &mut String) -> Result<serde_json::Value> {
    let truth = Truth::open(path, usize::MAX)?;
    let bytes = file_bytes(path)?;
    let format = Format::of(path)?.extension();
    let row_max = (0..truth.queries()).flat_map(|query| truth.ids(query)).max().copied().unwrap_or(0);
    let distances = if truth.has_distances() { "with distances" } else { "without distances" };
    writeln!(text, "{}", path.display())?;
    writeln!(text, "  format   {format}")?;
    writeln!(text, "  truth    {} queries x {} neighbours, {distances}", truth.queries(), truth.k())?;
    writeln!(text, "  rows     up to {row_max}")?;
    writeln!(text, "  bytes    {bytes}")?;
    Ok(json!({
        "file": path, "content": "truth", "format": format, "queries": truth.queries(), "k": truth.k(),
        "has_distances": truth.has_distances(), "row_max": row_max, "bytes": bytes,
    }))
}

fn file_bytes(path: &Path) -> Result<u64> {
    Ok(std::fs::metadata(path).with_context(|| format!("reading the size of {}", path.display()))?.len())
}

struct Norms {
    min: f64,
    max: f64,
    mean: f64,
    rows: usize,
}

/// Norms of at most [`NORM_SAMPLE`] rows at even distances, the first and the last among them.
fn norms(vectors: &Vectors) -> Norms {
    let rows = vectors.rows().min(NORM_SAMPLE);
    let (mut min, mut max, mut sum) = (f64::INFINITY, 0f64, 0f64);
    let mut values = vec![0f32; vectors.dim()];
    for at in 0..rows {
        let row = if rows == 1 { 0 } else { at as u64 * (vectors.rows() as u64 - 1) / (rows as u64 - 1) };
        vectors.row_f32(row as usize, &mut values);
        let norm = values.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt();
        (min, max, sum) = (min.min(norm), max.max(norm), sum + norm);
    }
    Norms { min, max, mean: sum / rows as f64, rows }
}

fn run_convert(args: &ConvertArgs) -> Result<Answer> {
    if Format::of(&args.from)?.content() == Content::Truth {
        return convert_truth(args);
    }
    let source = open_rows(&args.from, args.rows)?;
    let bar = Bar::new("rows");
    let conversion = Conversion { dtype: args.dtype, scale: args.scale.unwrap_or(1.0), clip: args.clip };
    let converted = convert(&source, &args.to, conversion, &|done, total| bar.update(done, total))?;
    drop(bar);
    let mut text =
        format!("{}: {} x {} {}\n", args.to.display(), converted.rows, converted.dim, converted.dtype);
    if converted.rounded + converted.clipped > 0 {
        writeln!(
            text,
            "  {} values rounded, {} clipped; relative error {:.2e}",
            converted.rounded, converted.clipped, converted.relative_error
        )?;
    }
    if converted.relative_error > 0.05 {
        writeln!(text, "  note: that changed the vectors much; --scale fits small values to a byte")?;
    }
    let mut json = serde_json::to_value(converted)?;
    json["file"] = json!(args.to);
    Ok(Answer { json, text })
}

fn convert_truth(args: &ConvertArgs) -> Result<Answer> {
    anyhow::ensure!(
        args.dtype.is_none() && args.scale.is_none() && !args.clip,
        "{} holds row numbers: --dtype, --scale and --clip are for vectors",
        args.from.display()
    );
    let mut truth = Truth::open(&args.from, usize::MAX)?;
    if let Some(queries) = args.rows {
        truth = truth.first(usize::try_from(queries)?, truth.k())?;
    }
    write_truth(&args.to, &truth)?;
    let kept = truth.has_distances() && Format::of(&args.to)? == Format::Ibin;
    let text = format!("{}: {} queries x {} neighbours\n", args.to.display(), truth.queries(), truth.k());
    let json = json!({ "file": args.to, "queries": truth.queries(), "k": truth.k(), "has_distances": kept });
    Ok(Answer { json, text })
}

fn truth(args: &TruthArgs) -> Result<Answer> {
    let base = open_rows(&args.base, args.rows)?;
    let queries = open_rows(&args.queries, args.limit_queries)?;
    write_exact_truth(&base, &queries, args.metric, args.k as usize, args.threads.count(), &args.out)
}

/// Computes and writes the truth; the text says how long it took.
fn write_exact_truth(
    base: &Vectors,
    queries: &Vectors,
    metric: Metric,
    k: usize,
    threads: usize,
    out: &Path,
) -> Result<Answer> {
    let started = Instant::now();
    let bar = Bar::new("distances");
    let truth = exact_neighbours(base, queries, metric, k, threads, &|done, total| bar.update(done, total))?;
    drop(bar);
    write_truth(out, &truth)?;
    let seconds = started.elapsed().as_secs_f64();
    let text = format!(
        "{}: {} queries x {k} neighbours of {} rows, {metric}, in {seconds:.1} s\n",
        out.display(),
        queries.rows(),
        base.rows()
    );
    let json = json!({
        "file": out, "queries": queries.rows(), "k": k, "rows": base.rows(), "metric": metric, "seconds": seconds,
    });
    Ok(Answer { json, text })
}

fn synth(args: &SynthArgs) -> Result<Answer> {
    let started = Instant::now();
    let synth = Synth::new(args.shape, args.rows, args.seed)?;
    let threads = args.threads.count();
    let [base_out, queries_out] =
        ["base", "query"].map(|name| args.out.join(name).with_extension(synth.extension()));
    let bar = Bar::new("rows");
    synth.write_base(&base_out, threads, &|done, total| bar.update(done, total))?;
    drop(bar);
    synth.write_queries(&queries_out, args.queries, threads, &|_, _| ())?;
    let shape = args.shape;
    let mut text = format!(
        "{}: {} x {} {}, {} queries, {}, in {:.1} s\n",
        args.out.display(),
        args.rows,
        shape.dim(),
        shape.dtype(),
        args.queries,
        shape.metric(),
        started.elapsed().as_secs_f64()
    );
    let mut json = json!({
        "shape": shape.to_string(), "seed": args.seed, "base": base_out, "queries": queries_out, "rows": args.rows,
        "query_count": args.queries, "dim": shape.dim(), "dtype": shape.dtype(), "metric": shape.metric(),
        "seconds": started.elapsed().as_secs_f64(),
    });
    if let Some(count) = args.truth {
        let truth = truth_beside(&base_out, &queries_out, count, shape.metric(), args.k, threads, &args.out)?;
        text.push_str(&truth.text);
        json["truth"] = truth.json;
    }
    Ok(Answer { json, text })
}

fn queries(args: &QueriesArgs) -> Result<Answer> {
    let base = Vectors::open(&args.base)?;
    let threads = args.threads.count();
    let extension = base.format().context("a file has a format")?.extension();
    let [base_out, queries_out] = ["base", "query"].map(|name| args.out.join(name).with_extension(extension));
    let searched;
    let (mut text, mut json);
    if let Some(count) = args.hold_out {
        let bar = Bar::new("rows");
        let count = usize::try_from(count)?;
        hold_out(&base, count, args.seed, &base_out, &queries_out, &|done, total| bar.update(done, total))?;
        let left = base.rows() - count;
        text = format!("{}: {left} rows, {count} queries held out\n", args.out.display());
        json = json!({ "base": base_out, "queries": queries_out, "rows": left, "query_count": count, "seed": args.seed });
        searched = base_out;
    } else {
        let exponent = args.regions.context("--hold-out or --regions is given")?;
        let bar = Bar::new("rows put into cells");
        let count = usize::try_from(args.count)?;
        let made = region_queries(&base, exponent, count, args.seed, threads, &|done, total| {
            bar.update(done, total)
        })?;
        drop(bar);
        let mut writer = VectorWriter::create(&queries_out, base.dtype(), base.dim())?;
        made.queries.iter().try_for_each(|query| writer.push(query))?;
        writer.finish()?;
        let hottest = made.ranks.iter().filter(|rank| **rank == 0).count() as f64 / count as f64;
        text = format!(
            "{}: {count} queries over {} cells of {} to {} rows, the hottest has {:.1} %\n",
            queries_out.display(),
            made.cells,
            made.cell_rows_min,
            made.cell_rows_max,
            hottest * 100.0
        );
        if made.cells_used_up > 0 {
            writeln!(
                text,
                "  note: {} cells ran out of new queries; the skew is weaker than asked",
                made.cells_used_up
            )?;
        }
        json = json!({
            "queries": queries_out, "query_count": count, "exponent": exponent, "seed": args.seed, "cells": made.cells,
            "cell_rows_min": made.cell_rows_min, "cell_rows_max": made.cell_rows_max,
            "cells_used_up": made.cells_used_up, "hottest_share": hottest,
        });
        searched = args.base.clone();
    }
    if let (Some(count), Some(metric)) = (args.truth, args.metric) {
        let truth = truth_beside(&searched, &queries_out, count, metric, args.k, threads, &args.out)?;
        text.push_str(&truth.text);
        json["truth"] = truth.json;
    }
    Ok(Answer { json, text })
}

/// Writes `truth.ibin` into `folder` for the first `count` of its queries.
fn truth_beside(
    base: &Path,
    queries: &Path,
    count: u64,
    metric: Metric,
    k: u32,
    threads: usize,
    folder: &Path,
) -> Result<Answer> {
    let queries = open_rows(queries, Some(count))?;
    write_exact_truth(
        &Vectors::open(base)?,
        &queries,
        metric,
        k as usize,
        threads,
        &folder.join("truth.ibin"),
    )
}

fn open_rows(path: &Path, rows: Option<u64>) -> Result<Vectors> {
    Ok(match rows {
        Some(rows) => Vectors::open_first(path, usize::try_from(rows)?)?,
        None => Vectors::open(path)?,
    })
}

/// A progress bar on stderr, only where that is a terminal and only when the work turns out to be long.
struct Bar {
    bar: ProgressBar,
    started: Instant,
    shown: AtomicBool,
}

impl Bar {
    fn new(unit: &str) -> Self {
        let bar = ProgressBar::hidden();
        let template =
            format!("{{bar:40}} {{percent}} %  {{human_pos}} of {{human_len}} {unit}, {{eta}} left");
        if let Ok(style) = ProgressStyle::with_template(&template) {
            bar.set_style(style);
        }
        Self { bar, started: Instant::now(), shown: AtomicBool::new(!std::io::stderr().is_terminal()) }
    }

    fn update(&self, done: u64, total: u64) {
        if self.started.elapsed() > BAR_AFTER && !self.shown.swap(true, Ordering::Relaxed) {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        self.bar.set_length(total);
        self.bar.set_position(done);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
