//! `shine data truth`, `synth` and `queries`: what is computed, and written into new files.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};
use serde::Serialize;
use shine_common::dataset::{
    Content, Format, Synth, VectorWriter, Vectors, exact_neighbours, hold_out, region_queries, write_truth,
};
use shine_common::metric::{DType, Metric};

use super::{QueriesArgs, SynthArgs, TruthArgs};
use crate::exit::bad_input;
use crate::input;
use crate::out::{Out, Progress, Unit, percent};

/// Name of the truth in a folder that a command makes.
const TRUTH: &str = "truth.ibin";

#[derive(Debug, Serialize)]
struct TruthOut {
    file: PathBuf,
    queries: usize,
    k: u32,
    /// Rows of the base.
    rows: usize,
    metric: Metric,
    seconds: f64,
}

impl TruthOut {
    fn text(&self) -> String {
        let Self { file, queries, k, rows, metric, seconds } = self;
        format!(
            "{}: {queries} queries x {k} neighbours of {rows} rows, {metric}, in {seconds:.1} s\n",
            file.display()
        )
    }
}

/// How a truth is computed.
#[derive(Debug, Clone, Copy)]
struct Exact {
    metric: Metric,
    k: u32,
    threads: usize,
}

impl Exact {
    fn write(self, base: &Vectors, queries: &Vectors, file: &Path) -> Result<TruthOut> {
        let begun = Instant::now();
        let bar = Progress::new("comparing", 0, Unit::Items("distances"));
        let progress = |done, total| bar.set(done, total);
        let truth = exact_neighbours(base, queries, self.metric, self.k as usize, self.threads, &progress)?;
        drop(bar);
        write_truth(file, &truth)?;
        Ok(TruthOut {
            file: file.to_owned(),
            queries: queries.rows(),
            k: self.k,
            rows: base.rows(),
            metric: self.metric,
            seconds: begun.elapsed().as_secs_f64(),
        })
    }

    /// Holds a wish for the truth of the first `count` queries against what there will be, before that is made.
    fn check(self, count: u64, queries: u64, rows: u64) -> Result<()> {
        if count > queries {
            return Err(bad_input(format!(
                "--truth {count}: expected at most {queries}, the number of queries"
            )));
        }
        if u64::from(self.k) > rows {
            return Err(bad_input(format!("--k {}: expected at most {rows}, the rows of the base", self.k)));
        }
        Ok(())
    }
}

/// Computes exact neighbours.
pub(super) fn truth(args: &TruthArgs, out: Out) -> Result<()> {
    args.force.check(&[&args.out], &[&args.base, &args.queries])?;
    // Hours may go by before it is written.
    if Format::of(&args.out)?.content() != Content::Truth {
        return Err(bad_input(format!(
            "--out {}: expected an extension for ground truth, .ibin or .ivecs",
            args.out.display()
        )));
    }
    let base = input::open(&args.base, args.rows)?;
    let queries = input::open(&args.queries, args.limit_queries)?;
    let exact = Exact { metric: args.metric, k: args.k, threads: args.threads.count() };
    let made = exact.write(&base, &queries, &args.out)?;
    out.print(&made, TruthOut::text)
}

#[derive(Debug, Serialize)]
struct SynthOut {
    shape: String,
    seed: u64,
    base: PathBuf,
    queries: PathBuf,
    rows: u64,
    query_count: u64,
    dim: usize,
    dtype: DType,
    metric: Metric,
    seconds: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    truth: Option<TruthOut>,
}

/// Makes a set in the shape of a published one.
pub(super) fn synth(args: &SynthArgs, out: Out) -> Result<()> {
    let begun = Instant::now();
    let shape = args.shape;
    let synth = Synth::new(shape, args.rows, args.seed)?;
    let threads = args.threads.count();
    let exact = Exact { metric: shape.metric(), k: args.k, threads };
    let [base, queries] = ["base", "query"].map(|name| args.out.join(name).with_extension(synth.extension()));
    let truth = args.out.join(TRUTH);
    match args.truth {
        Some(count) => {
            exact.check(count, args.queries, args.rows)?;
            args.force.check(&[&base, &queries, &truth], &[])?;
        }
        None => args.force.check(&[&base, &queries], &[])?,
    }
    let bar = Progress::new("making", args.rows, Unit::Items("rows"));
    synth.write_base(&base, threads, &|done, total| bar.set(done, total))?;
    drop(bar);
    let bar = Progress::new("making", args.queries, Unit::Items("queries"));
    synth.write_queries(&queries, args.queries, threads, &|done, total| bar.set(done, total))?;
    drop(bar);
    let seconds = begun.elapsed().as_secs_f64();
    let truth = truth_of(exact, args.truth, &base, &queries, &truth)?;
    let made = SynthOut {
        shape: shape.to_string(),
        seed: args.seed,
        base,
        queries,
        rows: args.rows,
        query_count: args.queries,
        dim: shape.dim(),
        dtype: shape.dtype(),
        metric: shape.metric(),
        seconds,
        truth,
    };
    out.print(&made, |made| {
        let SynthOut { rows, dim, dtype, query_count, metric, seconds, .. } = made;
        let folder = args.out.display();
        let mut text =
            format!("{folder}: {rows} x {dim} {dtype}, {query_count} queries, {metric}, in {seconds:.1} s\n");
        text.extend(made.truth.as_ref().map(TruthOut::text));
        text
    })
}

#[derive(Debug, Serialize)]
struct QueriesOut {
    queries: PathBuf,
    query_count: usize,
    seed: u64,
    #[serde(flatten)]
    kind: Kind,
    #[serde(skip_serializing_if = "Option::is_none")]
    truth: Option<TruthOut>,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Kind {
    HeldOut {
        base: PathBuf,
        rows: usize,
    },
    Regions {
        exponent: f64,
        cells: usize,
        cell_rows_min: usize,
        cell_rows_max: usize,
        cells_used_up: usize,
        hottest_share: f64,
    },
}

/// Makes queries for a base.
pub(super) fn queries(args: &QueriesArgs, out: Out) -> Result<()> {
    let base = Vectors::open(&args.base)?;
    let threads = args.threads.count();
    let extension = base.format().context("a file has a format")?.extension();
    let [base_out, queries] = ["base", "query"].map(|name| args.out.join(name).with_extension(extension));
    let truth = args.out.join(TRUTH);
    let exact = args.metric.map(|metric| Exact { metric, k: args.k, threads });

    let mut outputs = vec![queries.as_path()];
    outputs.extend(args.hold_out.map(|_| base_out.as_path()));
    outputs.extend(args.truth.map(|_| truth.as_path()));
    args.force.check(&outputs, &[&args.base])?;
    if let (Some(exact), Some(count)) = (exact, args.truth) {
        let held = args.hold_out.unwrap_or(0);
        exact.check(count, args.hold_out.unwrap_or(args.count), (base.rows() as u64).saturating_sub(held))?;
        // Found by the truth itself, this would leave the files that are written before it.
        base.check_for(exact.metric)?;
    }

    let (kind, query_count, searched) = if let Some(count) = args.hold_out {
        let count = usize::try_from(count)?;
        let bar = Progress::new("splitting", base.rows() as u64, Unit::Items("rows"));
        hold_out(&base, count, args.seed, &base_out, &queries, &|done, total| bar.set(done, total))?;
        let kind = Kind::HeldOut { base: base_out.clone(), rows: base.rows() - count };
        (kind, count, &base_out)
    } else {
        let exponent = args.regions.context("the parser wants --hold-out or --regions")?;
        let count = usize::try_from(args.count)?;
        (regions(args, &base, exponent, count, &queries)?, count, &args.base)
    };
    let truth = match exact {
        Some(exact) => truth_of(exact, args.truth, searched, &queries, &truth)?,
        None => None,
    };
    let made = QueriesOut { queries, query_count, seed: args.seed, kind, truth };
    out.print(&made, queries_text)
}

fn regions(args: &QueriesArgs, base: &Vectors, exponent: f64, count: usize, file: &Path) -> Result<Kind> {
    let bar = Progress::new("putting into cells", base.rows() as u64, Unit::Items("rows"));
    let progress = |done, total| bar.set(done, total);
    let made = region_queries(base, exponent, count, args.seed, args.threads.count(), &progress)?;
    drop(bar);
    let mut writer = VectorWriter::create(file, base.dtype(), base.dim())?;
    made.queries.iter().try_for_each(|query| writer.push(query))?;
    writer.finish()?;
    Ok(Kind::Regions {
        exponent,
        cells: made.cells,
        cell_rows_min: made.cell_rows_min,
        cell_rows_max: made.cell_rows_max,
        cells_used_up: made.cells_used_up,
        hottest_share: made.ranks.iter().filter(|rank| **rank == 0).count() as f64 / count as f64,
    })
}

fn queries_text(made: &QueriesOut) -> String {
    let (file, count) = (made.queries.display(), made.query_count);
    let mut text = match &made.kind {
        Kind::HeldOut { base, rows } => {
            format!("{file}: {count} queries held out\n{}: the other {rows} rows\n", base.display())
        }
        Kind::Regions { cells, cell_rows_min, cell_rows_max, cells_used_up, hottest_share, .. } => {
            let mut text = format!(
                "{file}: {count} queries over {cells} cells of {cell_rows_min} to {cell_rows_max} rows, \
                 the hottest has {}\n",
                percent(*hottest_share)
            );
            if *cells_used_up > 0 {
                text += &format!(
                    "  note: {cells_used_up} cells ran out of new queries; the skew is weaker than asked\n"
                );
            }
            text
        }
    };
    text.extend(made.truth.as_ref().map(TruthOut::text));
    text
}

/// Writes the truth of the first `count` queries, where that is wanted.
fn truth_of(
    exact: Exact,
    count: Option<u64>,
    base: &Path,
    queries: &Path,
    file: &Path,
) -> Result<Option<TruthOut>> {
    let Some(count) = count else { return Ok(None) };
    let (base, queries) = (Vectors::open(base)?, input::open(queries, Some(count))?);
    exact.write(&base, &queries, file).map(Some)
}
