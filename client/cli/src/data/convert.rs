//! `shine data convert`: another format or element type.

use std::path::PathBuf;

use anyhow::Result;
use serde::Serialize;
use shine_common::dataset::{Content, Conversion, Converted, Format, Truth, convert, write_truth};

use super::ConvertArgs;
use crate::exit::bad_input;
use crate::input;
use crate::out::{Out, Progress, Unit};

/// Above this relative error the text says how to do better.
const MUCH: f64 = 0.05;

#[derive(Debug, Serialize)]
struct VectorsOut {
    file: PathBuf,
    #[serde(flatten)]
    converted: Converted,
}

#[derive(Debug, Serialize)]
struct TruthOut {
    file: PathBuf,
    queries: usize,
    k: usize,
    has_distances: bool,
}

/// Converts a file of vectors or of ground truth.
pub(super) fn run(args: &ConvertArgs, out: Out) -> Result<()> {
    args.force.check(&[&args.to], &[&args.from])?;
    match Format::of(&args.from)?.content() {
        Content::Truth => truth(args, out),
        Content::Vectors(_) | Content::AnyVectors => vectors(args, out),
    }
}

fn vectors(args: &ConvertArgs, out: Out) -> Result<()> {
    let source = input::open(&args.from, args.rows)?;
    let bar = Progress::new("converting", source.rows() as u64, Unit::Items("rows"));
    let conversion = Conversion { dtype: args.dtype, scale: args.scale.unwrap_or(1.0), clip: args.clip };
    let converted = convert(&source, &args.to, conversion, &|done, total| bar.set(done, total))?;
    drop(bar);
    out.print(&VectorsOut { file: args.to.clone(), converted }, |VectorsOut { file, converted }| {
        let Converted { rows, dim, dtype, rounded, clipped, relative_error } = converted;
        let mut text = format!("{}: {rows} x {dim} {dtype}\n", file.display());
        if rounded + clipped > 0 {
            text += &format!(
                "  {rounded} values rounded, {clipped} clipped; relative error {relative_error:.2e}\n"
            );
        }
        if *relative_error > MUCH {
            text += "  note: that changed the vectors much; --scale fits small values to a byte\n";
        }
        text
    })
}

fn truth(args: &ConvertArgs, out: Out) -> Result<()> {
    if args.dtype.is_some() || args.scale.is_some() || args.clip {
        return Err(bad_input(format!(
            "{} holds row numbers: --dtype, --scale and --clip are for vectors",
            args.from.display()
        )));
    }
    let mut truth = Truth::open(&args.from, usize::MAX)?;
    if let Some(queries) = args.rows {
        truth = truth.first(usize::try_from(queries)?, truth.k())?;
    }
    write_truth(&args.to, &truth)?;
    let has_distances = truth.has_distances() && Format::of(&args.to)? == Format::Ibin;
    let made = TruthOut { file: args.to.clone(), queries: truth.queries(), k: truth.k(), has_distances };
    out.print(&made, |made| {
        let distances = match (made.has_distances, truth.has_distances()) {
            (false, true) => ", without the distances: .ivecs holds none",
            _ => "",
        };
        format!("{}: {} queries x {} neighbours{distances}", made.file.display(), made.queries, made.k)
    })
}
