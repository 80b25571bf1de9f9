//! `shine insert` and `shine get`: single records.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::{ArgGroup, Args};
use futures_util::{StreamExt, stream};
use serde::Serialize;
use shine_client::{Client, ClientError, value};
use shine_common::ids::ExternalId;
use shine_common::wire::{CollectionInfo, FaultCode, Receipt};

use crate::connect::{Connection, with_client};
use crate::exit::bad_input;
use crate::input::{self, Shape};
use crate::out::{Out, Progress, Unit, facts};

/// An id as scripts like it: a number, or the text of a UUID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(into = "serde_json::Value")]
pub(crate) struct Id(pub(crate) ExternalId);

impl From<Id> for serde_json::Value {
    fn from(id: Id) -> Self {
        match id.0 {
            ExternalId::Num(number) => number.into(),
            uuid @ ExternalId::Uuid(_) => uuid.to_string().into(),
        }
    }
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true).args(["vector", "file"]), after_help = "Examples:
  shine insert -c points --id 7 --vector 3,-12,0,44
  shine insert -c points --id 67e55044-10b1-426f-9247-bb680e5fe0c8 --vector '[0.25, -1.5, 0, 1]'
  shine insert -c words --file new.i8bin --ids-from 50000
  shine insert -c words --file new.i8bin --ids-from 50000 --skip-existing

An id is a number from 0 to 2^64-1 or a UUID. Values are taken into the collection's type, and refused if they do not
fit it. An insert is never made twice: exit code 8 says that its outcome is unknown, and the same command may be given
again.")]
pub(crate) struct InsertArgs {
    /// Name of the collection
    #[arg(long, short, value_name = "NAME", env = "SHINE_COLLECTION")]
    collection: String,
    /// Id of the one vector
    #[arg(long, requires = "vector")]
    id: Option<ExternalId>,
    /// One vector
    #[arg(long, value_name = "X,Y,..", requires = "id", allow_hyphen_values = true)]
    vector: Option<String>,
    /// A file of vectors, in any format
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Id of the first row of the file; the next row gets the next number
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "vector")]
    ids_from: u64,
    /// Only the first N rows of the file
    #[arg(long, value_name = "N", conflicts_with = "vector", value_parser = clap::value_parser!(u64).range(1..))]
    rows: Option<u64>,
    /// Pass over ids that are taken, so that an interrupted run can be given again
    #[arg(long, conflicts_with = "vector")]
    skip_existing: bool,
    /// Inserts under way at once
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=128))]
    in_flight: u16,
}

#[derive(Debug, Serialize)]
struct InsertedOne {
    collection: String,
    id: Id,
    node: u32,
    /// Missing if the answer was lost and the record was found by its id.
    receipt: Option<Receipt>,
}

#[derive(Debug, Serialize)]
struct InsertedMany {
    collection: String,
    inserted: u64,
    existing: u64,
    seconds: f64,
}

/// Inserts a vector or a file of them.
pub(crate) fn insert(args: InsertArgs, connection: &Connection, out: Out) -> Result<()> {
    with_client(connection, async |client| {
        let info = client.stats(&args.collection).await?;
        match (&args.file, args.id, &args.vector) {
            (Some(file), _, _) => insert_file(client, &args, file, &info, out).await,
            (None, Some(id), Some(vector)) => {
                let vector = Shape::of(&info).parse("--vector", vector)?;
                let inserted = client.insert(&args.collection, id, vector).await?;
                let one = InsertedOne {
                    collection: info.name,
                    id: Id(id),
                    node: inserted.node.0,
                    receipt: inserted.receipt,
                };
                out.print(&one, |one| format!("inserted {id} into '{}'", one.collection))
            }
            _ => unreachable!("the parser wants --file, or --id and --vector"),
        }
    })
}

async fn insert_file(
    client: &Client,
    args: &InsertArgs,
    path: &std::path::Path,
    info: &CollectionInfo,
    out: Out,
) -> Result<()> {
    let file = input::open(path, args.rows)?;
    let shape = Shape::of(info);
    // All or nothing, as far as the file goes: a bad row is found before the first insert.
    shape.check_rows(&file)?;
    let rows = file.rows() as u64;
    if args.ids_from.checked_add(rows - 1).is_none() {
        return Err(bad_input(format!(
            "--ids-from {} and {rows} rows: expected ids up to {}",
            args.ids_from,
            u64::MAX
        )));
    }
    let begun = Instant::now();
    let bar = Progress::new("inserting", rows, Unit::Items("vectors"));
    let mut many = InsertedMany { collection: info.name.clone(), inserted: 0, existing: 0, seconds: 0.0 };
    let is_over = std::cell::Cell::new(false);
    // After an error no further insert is begun, and those under way end as they may.
    let mut inserts = stream::iter(0..file.rows())
        .take_while(|_| std::future::ready(!is_over.get()))
        .map(|row| {
            let (shape, file) = (&shape, &file);
            async move {
                let id = ExternalId::Num(args.ids_from + row as u64);
                let vector = shape.row(file, row)?;
                match client.insert(&args.collection, id, vector).await {
                    Ok(_) => Ok(true),
                    Err(error) if args.skip_existing && is_taken(&error) => Ok(false),
                    Err(error) => Err(anyhow::Error::new(error)
                        .context(format!("{}: row {row}, id {id}", file.path().display()))),
                }
            }
        })
        .buffer_unordered(args.in_flight.into());
    let mut outcome = Ok(());
    while let Some(insert) = inserts.next().await {
        match insert {
            Ok(true) => many.inserted += 1,
            Ok(false) => many.existing += 1,
            Err(error) => {
                is_over.set(true);
                outcome = outcome.and(Err(error));
            }
        }
        bar.inc(1);
    }
    drop(inserts);
    drop(bar);
    many.seconds = begun.elapsed().as_secs_f64();
    outcome.with_context(|| format!("stopped after {} of {rows} inserts", many.inserted))?;
    out.print(&many, |many| {
        let existing = match many.existing {
            0 => String::new(),
            n => format!(", {n} were there already"),
        };
        format!(
            "inserted {} vectors into '{}' in {:.1} s{existing}",
            many.inserted, many.collection, many.seconds
        )
    })
}

fn is_taken(error: &ClientError) -> bool {
    error.code() == FaultCode::IdExists && !error.outcome_is_unknown()
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  shine get -c words 7
  shine get -c points 67e55044-10b1-426f-9247-bb680e5fe0c8 --json")]
pub(crate) struct GetArgs {
    /// The id: a number or a UUID
    id: ExternalId,
    /// Name of the collection
    #[arg(long, short, value_name = "NAME", env = "SHINE_COLLECTION")]
    collection: String,
}

#[derive(Debug, Serialize)]
struct Got {
    collection: String,
    id: Id,
    node: u32,
    level: u8,
    vector: Vec<f64>,
}

/// Prints what is stored under an id.
pub(crate) fn get(args: GetArgs, connection: &Connection, out: Out) -> Result<()> {
    with_client(connection, async |client| {
        let info = client.stats(&args.collection).await?;
        let record = client.get(&args.collection, args.id).await?;
        let got = Got {
            collection: info.name,
            id: Id(args.id),
            node: record.node.0,
            level: record.level,
            vector: value::decode(&record.vector, info.dtype).context("the stored vector")?,
        };
        out.print(&got, |got| {
            facts(&[
                ("id", args.id.to_string()),
                ("node", format!("n{}, level {}", got.node, got.level)),
                ("vector", vector_text(&got.vector)),
            ])
        })
    })
}

/// A vector as `--vector` takes it.
pub(crate) fn vector_text(vector: &[f64]) -> String {
    vector.iter().map(|x| x.to_string()).collect::<Vec<_>>().join(",")
}
