//! `shine search` and `shine recall`.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::{ArgGroup, Args};
use futures_util::{StreamExt, TryStreamExt, stream};
use serde::Serialize;
use shine_client::{Answer, Client, SearchOptions, value};
use shine_common::dataset::Truth;
use shine_common::ids::ExternalId;
use shine_common::layout::EF_MAX;
use shine_common::metric::{DType, Distance};
use shine_common::wire::{CollectionInfo, FaultCode, Receipt, Target};
use shine_sim::recall::{hits_by_distance, hits_by_id};
use shine_sim::workload::closed_loop;

use crate::connect::{Connection, with_batch_client, with_client};
use crate::exit::bad_input;
use crate::input::{self, Shape};
use crate::out::{Out, Progress, Unit, bytes, table};
use crate::records::{Id, vector_text};

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true).args(["vector", "id", "file"]), after_help = "Examples:
  shine search -c words --id 7 --k 5
  shine search -c points --vector 3,-12,0,44 --k 10 --ef 200
  shine search -c words --file query.i8bin --rows 100 --json

A larger --ef finds more of the true neighbours and takes longer. A stored id is its own first answer.")]
pub(crate) struct SearchArgs {
    /// Name of the collection
    #[arg(long, short, value_name = "NAME", env = "SHINE_COLLECTION")]
    collection: String,
    /// Search near to this vector
    #[arg(long, value_name = "X,Y,..", allow_hyphen_values = true)]
    vector: Option<String>,
    /// Search near to the vector stored under this id
    #[arg(long)]
    id: Option<ExternalId>,
    /// Search near to every row of a file, in any format
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Answers wanted
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=i64::from(EF_MAX)))]
    k: u32,
    /// Beam; raised to k where smaller
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=i64::from(EF_MAX)))]
    ef: u32,
    /// Also print the vectors of the answers
    #[arg(long)]
    with_vectors: bool,
    /// Only the first N rows of the file
    #[arg(long, value_name = "N", conflicts_with_all = ["vector", "id"], value_parser = clap::value_parser!(u64).range(1..))]
    rows: Option<u64>,
    /// Searches under way at once
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1024))]
    in_flight: u16,
}

#[derive(Debug, Serialize)]
struct HitOut {
    id: Id,
    distance: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    vector: Option<Vec<f64>>,
}

#[derive(Debug, Serialize)]
struct AnswerOut {
    #[serde(skip_serializing_if = "Option::is_none")]
    row: Option<usize>,
    hits: Vec<HitOut>,
    ef: u32,
    receipt: Receipt,
}

#[derive(Debug, Serialize)]
struct AnswersOut {
    collection: String,
    k: u32,
    results: Vec<AnswerOut>,
}

impl AnswerOut {
    fn of(answer: Answer, row: Option<usize>, with_vectors: bool, dtype: DType) -> Result<Self> {
        let hits = answer.hits.into_iter().map(|hit| {
            let vector = if with_vectors { Some(value::decode(&hit.vector, dtype)?) } else { None };
            Ok(HitOut { id: Id(hit.id), distance: hit.distance, vector })
        });
        Ok(Self { row, hits: hits.collect::<Result<_>>()?, ef: answer.ef, receipt: answer.receipt })
    }
}

/// Searches.
pub(crate) fn search(args: &SearchArgs, connection: &Connection, out: Out) -> Result<()> {
    let options = SearchOptions { k: args.k, ef: args.ef, with_vectors: args.with_vectors, deadline: None };
    if let Some(path) = &args.file {
        return with_batch_client(connection, async |client| {
            let info = client.stats(&args.collection).await?;
            search_file(client, args, path, &info, &options, out).await
        });
    }
    with_client(connection, async |client| {
        let info = client.stats(&args.collection).await?;
        let shape = Shape::of(&info);
        let target = match (&args.vector, args.id) {
            (Some(text), _) => Target::Vector(shape.parse("--vector", text)?),
            (None, Some(id)) => Target::Id(id),
            (None, None) => unreachable!("the parser wants --vector, --id or --file"),
        };
        let answer = client.search(&args.collection, target, &options).await?;
        let answer = AnswerOut::of(answer, None, args.with_vectors, info.dtype)?;
        out.print(&answer, |answer| {
            let header: &[&str] =
                if args.with_vectors { &["id", "distance", "vector"] } else { &["id", "distance"] };
            table(header, 0, answer.hits.iter().map(cells)) + &beam(args, answer.ef) + &cost(&answer.receipt)
        })
    })
}

async fn search_file(
    client: &Client,
    args: &SearchArgs,
    path: &std::path::Path,
    info: &CollectionInfo,
    options: &SearchOptions,
    out: Out,
) -> Result<()> {
    let file = input::open(path, args.rows)?;
    let shape = Shape::of(info);
    shape.check_rows(&file)?;
    let bar = Progress::new("searching", file.rows() as u64, Unit::Items("queries"));
    let results: Vec<AnswerOut> = stream::iter(0..file.rows())
        .map(|row| {
            let (shape, file, bar) = (&shape, &file, &bar);
            async move {
                let target = Target::Vector(shape.row(file, row)?);
                let answer = client
                    .search(&args.collection, target, options)
                    .await
                    .with_context(|| format!("{}: row {row}", file.path().display()))?;
                bar.inc(1);
                AnswerOut::of(answer, Some(row), args.with_vectors, info.dtype)
            }
        })
        .buffered(args.in_flight.into())
        .try_collect()
        .await?;
    drop(bar);
    let answers = AnswersOut { collection: info.name.clone(), k: args.k, results };
    out.print(&answers, |answers| {
        let header: &[&str] =
            if args.with_vectors { &["row", "id", "distance", "vector"] } else { &["row", "id", "distance"] };
        let rows = answers.results.iter().flat_map(|answer| {
            let row = answer.row.unwrap_or_default().to_string();
            answer.hits.iter().map(move |hit| [vec![row.clone()], cells(hit)].concat())
        });
        let ef = answers.results.iter().map(|answer| answer.ef).max().unwrap_or(args.ef);
        table(header, 0, rows) + &beam(args, ef)
    })
}

fn cells(hit: &HitOut) -> Vec<String> {
    let mut cells = vec![hit.id.0.to_string(), hit.distance.to_string()];
    cells.extend(hit.vector.as_deref().map(vector_text));
    cells
}

/// Says so where another beam was used than was asked for.
fn beam(args: &SearchArgs, used: u32) -> String {
    if used == args.ef {
        return String::new();
    }
    format!("\nef {used} was used instead of {}: it is at least k\n", args.ef)
}

fn cost(receipt: &Receipt) -> String {
    format!(
        "\n{}: {} hops, {} rounds, {} remote reads, {}, {:.1} ms\n",
        receipt.cn,
        receipt.hops,
        receipt.rounds,
        receipt.remote_reads,
        bytes(receipt.bytes),
        receipt.elapsed_us as f64 / 1e3
    )
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  shine recall -c words --queries query.i8bin --truth truth.ibin
  shine recall -c words --queries query.i8bin --truth truth.ibin --k 10 --ef 40,80,120,160 --json

Recall by id is the share of the true k nearest that are found. Recall by distance counts every answer that is no
farther than the true k-th neighbour (times 1.001): ties cost nothing. The truth names rows of the base, which must be
the ids of the collection, as `shine build` gives them.")]
pub(crate) struct RecallArgs {
    /// Name of the collection
    #[arg(long, short, value_name = "NAME", env = "SHINE_COLLECTION")]
    collection: String,
    /// The queries; query i of the truth is row i
    #[arg(long, value_name = "FILE")]
    queries: PathBuf,
    /// Their exact neighbours, .ibin or .ivecs
    #[arg(long, value_name = "FILE")]
    truth: PathBuf,
    /// Neighbours that count
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=i64::from(EF_MAX)))]
    k: u32,
    /// Beams to measure at; raised to k where smaller
    #[arg(
        long,
        value_name = "EF,..",
        value_delimiter = ',',
        default_values_t = [40, 80, 120, 160],
        value_parser = clap::value_parser!(u32).range(1..=i64::from(EF_MAX))
    )]
    ef: Vec<u32>,
    /// Only the first N queries
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    limit_queries: Option<u64>,
    /// Searches under way at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
    in_flight: u16,
}

#[derive(Debug, Serialize)]
struct RecallOut {
    collection: String,
    vectors: u64,
    queries: usize,
    k: u32,
    in_flight: u16,
    points: Vec<Point>,
}

#[derive(Debug, Serialize)]
struct Point {
    /// Beam that was used.
    ef: u32,
    recall_at_k: f64,
    recall_by_distance: f64,
    qps: f64,
    p50_us: u64,
    p99_us: u64,
    hops_per_query: f64,
    round_trips_per_query: f64,
    remote_reads_per_query: f64,
    bytes_per_query: f64,
}

/// What recall is measured against.
struct Exam {
    queries: Vec<Vec<u8>>,
    truth: Truth,
    /// Distance from each query to its true k-th neighbour, by our own kernels: a truth file may have none, or give
    /// them with another sign.
    kth: Vec<f32>,
    k: u32,
}

/// Measures recall.
pub(crate) fn recall(args: &RecallArgs, connection: &Connection, out: Out) -> Result<()> {
    with_batch_client(connection, async |client| {
        let info = client.stats(&args.collection).await?;
        let exam = Arc::new(exam(client, args, &info).await?);
        let count = exam.queries.len();
        let bar =
            Arc::new(Progress::new("searching", (count * args.ef.len()) as u64, Unit::Items("queries")));
        let mut points = Vec::new();
        for &ef in &args.ef {
            points.push(measure(client, &info.name, ef, args.in_flight, &exam, &bar).await?);
        }
        drop(bar);
        let recall = RecallOut {
            collection: info.name.clone(),
            vectors: info.vectors,
            queries: count,
            k: args.k,
            in_flight: args.in_flight,
            points,
        };
        out.print(&recall, recall_table)
    })
}

async fn exam(client: &Client, args: &RecallArgs, info: &CollectionInfo) -> Result<Exam> {
    let shape = Shape::of(info);
    let file = input::open(&args.queries, None)?;
    shape.check(&file)?;
    let truth = Truth::open(&args.truth, usize::try_from(info.vectors)?).with_context(|| {
        format!("the truth must be about the {} vectors of '{}'", info.vectors, info.name)
    })?;
    let k = args.k as usize;
    if truth.k() < k {
        return Err(bad_input(format!(
            "{}: {} neighbours per query: --k {k} needs as many",
            args.truth.display(),
            truth.k()
        )));
    }
    let limit = args.limit_queries.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
    let count = truth.queries().min(file.rows()).min(limit);
    let truth = truth.first(count, k)?;
    let queries = (0..count).map(|row| shape.row(&file, row)).collect::<Result<Vec<_>>>()?;
    let distance = Distance::new(info.metric, info.dtype, shape.dimension);
    let kth = stream::iter(0..count)
        .map(|query| {
            let (truth, queries) = (&truth, &queries);
            async move {
                let row = *truth.ids(query).last().expect("k is at least 1");
                let id = ExternalId::Num(row.into());
                let record = client.get(&info.name, id).await.map_err(|error| {
                    if error.code() == FaultCode::NotFound {
                        return bad_input(format!(
                            "{}: query {query} names row {row}, which is no id of '{}'",
                            args.truth.display(),
                            info.name
                        ));
                    }
                    error.into()
                })?;
                anyhow::Ok(distance.eval(&queries[query], &record.vector))
            }
        })
        .buffered(args.in_flight.into())
        .try_collect()
        .await?;
    Ok(Exam { queries, truth, kth, k: args.k })
}

async fn measure(
    client: &Client,
    collection: &str,
    ef: u32,
    in_flight: u16,
    exam: &Arc<Exam>,
    bar: &Arc<Progress>,
) -> Result<Point> {
    let options = Arc::new(SearchOptions { k: exam.k, ef, ..SearchOptions::default() });
    let ask = {
        let (client, collection, exam) = (client.clone(), Arc::<str>::from(collection), Arc::clone(exam));
        move |_, query: usize| {
            let (client, collection, exam) = (client.clone(), Arc::clone(&collection), Arc::clone(&exam));
            let options = Arc::clone(&options);
            async move {
                let target = Target::Vector(exam.queries[query].clone());
                client
                    .search(&collection, target, &options)
                    .await
                    .with_context(|| format!("query {query} at ef {ef}"))
            }
        }
    };
    let done = {
        let bar = Arc::clone(bar);
        move || bar.inc(1)
    };
    let pass = closed_loop(1, in_flight.into(), 0..exam.queries.len(), ask, done).await?;

    let k = exam.k as usize;
    let count = pass.answers.len() as f64;
    let (mut by_id, mut by_distance) = (0, 0);
    let mut sum = Receipt::default();
    for (query, answer) in pass.answers.iter().enumerate() {
        let ids: Vec<u64> = answer
            .hits
            .iter()
            .map(|hit| match hit.id {
                ExternalId::Num(number) => number,
                // No row has it.
                ExternalId::Uuid(_) => u64::MAX,
            })
            .collect();
        let distances: Vec<f32> = answer.hits.iter().map(|hit| hit.distance).collect();
        by_id += hits_by_id(&ids, exam.truth.ids(query), k);
        by_distance += hits_by_distance(&distances, exam.kth[query], k);
        sum.hops += answer.receipt.hops;
        sum.rounds += answer.receipt.rounds;
        sum.remote_reads += answer.receipt.remote_reads;
        sum.bytes += answer.receipt.bytes;
    }
    let wanted = count * k as f64;
    Ok(Point {
        ef: pass.answers.iter().map(|answer| answer.ef).max().unwrap_or(ef),
        recall_at_k: by_id as f64 / wanted,
        recall_by_distance: by_distance as f64 / wanted,
        qps: count / pass.wall.as_secs_f64(),
        p50_us: pass.latencies.value_at_quantile(0.5),
        p99_us: pass.latencies.value_at_quantile(0.99),
        hops_per_query: f64::from(sum.hops) / count,
        round_trips_per_query: f64::from(sum.rounds) / count,
        remote_reads_per_query: f64::from(sum.remote_reads) / count,
        bytes_per_query: sum.bytes as f64 / count,
    })
}

fn recall_table(recall: &RecallOut) -> String {
    let by_id = format!("recall@{}", recall.k);
    let header =
        ["ef", &by_id, "by distance", "queries/s", "p50 ms", "p99 ms", "hops", "rounds", "reads", "bytes"];
    let ms = |us: u64| format!("{:.2}", us as f64 / 1e3);
    let rows = recall.points.iter().map(|point| {
        vec![
            point.ef.to_string(),
            format!("{:.4}", point.recall_at_k),
            format!("{:.4}", point.recall_by_distance),
            format!("{:.0}", point.qps),
            ms(point.p50_us),
            ms(point.p99_us),
            format!("{:.1}", point.hops_per_query),
            format!("{:.1}", point.round_trips_per_query),
            format!("{:.0}", point.remote_reads_per_query),
            format!("{:.0}", point.bytes_per_query),
        ]
    });
    table(&header, 0, rows)
        + &format!(
            "\n{} queries on {} vectors of '{}', {} in flight\n",
            recall.queries, recall.vectors, recall.collection, recall.in_flight
        )
}
