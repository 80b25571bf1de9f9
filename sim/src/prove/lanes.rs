//! The lanes: which steps each takes, and what its figures must be.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use shine_cn::hnsw::build::BuildOptions;
use shine_cn::hnsw::hnsw_rs_builder::HnswRs;
use shine_common::dataset::{
    Synth, SynthShape, Truth, VectorWriter, Vectors, default_root, exact_neighbours, write_truth,
};
use shine_common::metric::{DType, Metric};

use super::Claim;
use super::faults::{self, Size};
use super::hostile::{self, Siege};
use super::inserts::{self, CutOff, InsertSpec, Inserts};
use super::ledger::Ledger;
use super::same_ids::{SameIds, same_ids};
use super::sets;
use crate::graph_cache::{self, Builder, GraphSpec};
use crate::host::cores;
use crate::loopback::{self, LoopbackArgs};
use crate::progress;
use crate::recall::hits_by_id;
use crate::report::{Point, Report};

/// Loss of recall against the reference that is allowed.
const RECALL_SLACK: f64 = 0.005;
/// Builds of the reference, which differ.
const REFERENCE_BUILDS: u64 = 3;
/// recall@10 of a native graph at ef 120, at least.
const NATIVE_RECALL: f64 = 0.945;
/// Bytes of frames per query at ef 120, at most.
const FRAME_BYTES_MAX: f64 = 330_000.0;

fn args(base: PathBuf, queries: PathBuf, truth: PathBuf, metric: Metric) -> LoopbackArgs {
    LoopbackArgs {
        base,
        queries,
        truth,
        metric,
        m: None,
        ef_construction: None,
        ef: vec![40, 80, 120, 160],
        k: 10,
        memory_nodes: 3,
        compute_nodes: 5,
        rows: None,
        limit_queries: None,
        builder: Builder::Native,
        graph: None,
        link_mbit: None,
        in_flight: 8,
        json: None,
        svg: None,
        log: "warn".into(),
    }
}

/// recall@10 of the reference at one ef.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Reference {
    ef: u32,
    recall: f64,
}

pub(super) async fn recall(ledger: &mut Ledger) -> anyhow::Result<Vec<Claim>> {
    const ROWS: usize = 100_000;
    let common = LoopbackArgs {
        rows: Some(ROWS),
        ..args(
            sets::GLOVE_BASE.find()?,
            sets::GLOVE_QUERIES.find()?,
            sets::GLOVE_TRUTH_100K.find()?,
            Metric::L2,
        )
    };
    let mut reference: Vec<Vec<Reference>> = Vec::new();
    for build in 1..=REFERENCE_BUILDS {
        let name = format!("hnsw_rs by itself, build {build}");
        let common = common.clone();
        let work = async { tokio::task::spawn_blocking(move || reference_recall(&common)).await? };
        reference.push(ledger.step(&name, work).await?);
    }
    let mut claims = Vec::new();
    for builder in [Builder::Native, Builder::HnswRs] {
        let wanted = LoopbackArgs { builder, ..common.clone() };
        let report: Report =
            ledger.step(&format!("{} over QUIC", builder.name()), loopback::measure(&wanted)).await?;
        for (at, point) in report.points.iter().enumerate() {
            let mean = reference.iter().map(|build| build[at].recall).sum::<f64>() / reference.len() as f64;
            claims.push(Claim::new(
                point.recall_at_k >= mean - RECALL_SLACK,
                format!(
                    "{} graph, ef {}: recall@10 {:.4}; hnsw_rs by itself {mean:.4} (mean of {REFERENCE_BUILDS} builds)",
                    report.builder, point.ef, point.recall_at_k,
                ),
            ));
            claims.push(rounds(&report, point));
            if point.ef == 120 {
                claims.push(bytes(&report, point));
                if builder == Builder::Native {
                    let text = format!(
                        "native graph, ef 120: recall@10 {:.4}, at least {NATIVE_RECALL}",
                        point.recall_at_k
                    );
                    claims.push(Claim::new(point.recall_at_k >= NATIVE_RECALL, text));
                }
            }
        }
    }
    Ok(claims)
}

fn rounds(report: &Report, point: &Point) -> Claim {
    let text = format!(
        "{} graph, ef {}: {:.1} round trips a query, at most 2.1 x ({:.1} hops + {} levels) = {:.1}; the worst query took {:.0} % of its bound",
        report.builder,
        point.ef,
        point.round_trips_per_query,
        point.hops_per_query,
        report.top_level + 1,
        point.round_trips_bound,
        point.round_trips_of_bound_max * 100.0,
    );
    Claim::new(point.round_trips_of_bound_max <= 1.0, text)
}

fn bytes(report: &Report, point: &Point) -> Claim {
    let layout = &report.layout;
    let text = format!(
        "{} graph, ef {}: {:.0} frame bytes a query, at most {FRAME_BYTES_MAX:.0}; records alone {:.0} = {:.1} vectors x {} + {:.1} lists x {} + {} headers x 40; \
         frames add {:.1} bytes to each of {:.1} records read",
        report.builder,
        point.ef,
        point.bytes_per_query,
        point.payload_bytes_per_query,
        point.distances_per_query,
        layout.vector_bytes,
        point.hops_per_query,
        layout.list_bytes,
        report.k,
        (point.bytes_per_query - point.payload_bytes_per_query) / point.remote_reads_per_query,
        point.remote_reads_per_query,
    );
    Claim::new(point.bytes_per_query <= FRAME_BYTES_MAX, text)
}

/// Builds with hnsw_rs and searches with hnsw_rs, on this process's own memory.
fn reference_recall(common: &LoopbackArgs) -> anyhow::Result<Vec<Reference>> {
    let base = match common.rows {
        Some(rows) => Vectors::open_first(&common.base, rows)?,
        None => Vectors::open(&common.base)?,
    };
    let queries = Vectors::open(&common.queries)?;
    let truth = Truth::open(&common.truth, base.rows())?;
    let bar = progress::count("hnsw_rs", base.rows());
    let index =
        HnswRs::build(&base, common.metric, &BuildOptions::default(), &|done, _| bar.set_position(done))?;
    bar.finish_and_clear();
    let k = common.k as usize;
    let recall = |ef: u32| {
        let found = |query: usize| index.search(queries.row(query), k, ef as usize);
        let hits = |query: usize| {
            let ids: Vec<u64> = found(query).into_iter().map(u64::from).collect();
            hits_by_id(&ids, truth.ids(query), k)
        };
        (0..truth.queries()).map(hits).sum::<usize>() as f64 / (truth.queries() * k) as f64
    };
    Ok(common.ef.iter().map(|ef| Reference { ef: *ef, recall: recall(*ef) }).collect())
}

pub(super) async fn ids(ledger: &mut Ledger) -> anyhow::Result<Vec<Claim>> {
    const ROWS: usize = 50_000;
    const QUERIES: usize = 1_000;
    let base = Vectors::open_first(sets::GLOVE_BASE.find()?, ROWS)?;
    let queries = Vectors::open_first(sets::GLOVE_QUERIES.find()?, QUERIES)?;
    let mut claims = Vec::new();
    for (dtype, simd) in [(DType::I8, ["", "", ""]), (DType::F32, ["avx2", "scalar", ""])] {
        let work = async {
            let (base, queries) = match dtype {
                DType::F32 => (as_f32(&base)?, as_f32(&queries)?),
                _ => (base.clone(), queries.clone()),
            };
            let spec = GraphSpec::native(Metric::L2);
            let graph = graph_cache::find_or_build(&graph_cache::default_root(), &base, &spec).await?;
            same_ids(&graph.file, rows(&queries), 10, 120, &simd).await
        };
        let same: SameIds = ledger.step(&format!("{dtype}"), work).await?;
        let nodes: Vec<_> = same.nodes.iter().map(|(name, simd)| format!("{name} ({simd})")).collect();
        claims.push(Claim::new(
            true,
            format!(
                "{dtype}, {} rows: the {} answers to {} queries are the same, in order and in every bit of the distance, \
                 from the local backend and over QUIC from {}",
                same.vectors,
                same.answers,
                same.queries,
                nodes.join(", "),
            ),
        ));
    }
    Ok(claims)
}

pub(super) async fn ip(ledger: &mut Ledger) -> anyhow::Result<Vec<Claim>> {
    const RECALL: f64 = 0.95;
    let native = LoopbackArgs {
        ef: vec![40, 80, 120, 160, 200],
        ..args(
            sets::DEBTEXT_BASE.find()?,
            sets::DEBTEXT_QUERIES.find()?,
            sets::DEBTEXT_TRUTH.find()?,
            Metric::Ip,
        )
    };
    let folder = tempfile::tempdir()?;
    let cosine = as_cosine(&native, folder.path())?;
    let mut claims = Vec::new();
    for (name, wanted) in [("inner product, i8", native), ("cosine, f32", cosine)] {
        let report: Report = ledger.step(name, loopback::measure(&wanted)).await?;
        let first = report.points.iter().find(|point| point.recall_at_k >= RECALL);
        let best = report.points.last().expect("efs were asked for");
        let text = match first {
            Some(point) => format!("debtext, {name}: recall@10 {:.4} at ef {}", point.recall_at_k, point.ef),
            None => format!(
                "debtext, {name}: recall@10 {:.4} at ef {}, below {RECALL}",
                best.recall_at_k, best.ef
            ),
        };
        claims.push(Claim::new(first.is_some(), text));
    }
    Ok(claims)
}

/// The same data as f32 under the cosine, with its own truth, as files in `folder`.
fn as_cosine(native: &LoopbackArgs, folder: &Path) -> anyhow::Result<LoopbackArgs> {
    let write = |from: &Path, name: &str| -> anyhow::Result<(PathBuf, Vectors)> {
        let vectors = as_f32(&Vectors::open(from)?)?;
        let path = folder.join(name);
        let mut writer = VectorWriter::create(&path, vectors.dtype(), vectors.dim())?;
        for row in vectors.iter() {
            writer.push(row)?;
        }
        writer.finish()?;
        Ok((path, vectors))
    };
    let (base_path, base) = write(&native.base, "base.fbin")?;
    let (queries_path, queries) = write(&native.queries, "query.fbin")?;
    let truth_path = folder.join("truth.ibin");
    let truth = exact_neighbours(&base, &queries, Metric::Cosine, 10, cores(), &|_, _| ())?;
    write_truth(&truth_path, &truth)?;
    Ok(LoopbackArgs {
        base: base_path,
        queries: queries_path,
        truth: truth_path,
        metric: Metric::Cosine,
        ..native.clone()
    })
}

pub(super) async fn big(ledger: &mut Ledger) -> anyhow::Result<Vec<Claim>> {
    const ROWS: u64 = 1_000_000;
    const QUERIES: u64 = 1_000;
    const SEED: u64 = 1;
    /// What a memory node takes beside its regions: program, runtime, buffers of connections.
    const BESIDE_BYTES: f64 = 64.0 * 1024.0 * 1024.0;
    let folder = default_root().join(format!("synth/spacev-{ROWS}-{SEED}"));
    let files = ["base.i8bin", "query.i8bin", "truth.ibin"].map(|name| folder.join(name));
    let making = async {
        if files.iter().all(|file| file.is_file()) {
            return Ok(());
        }
        let (folder, files) = (folder.clone(), files.clone());
        tokio::task::spawn_blocking(move || make_spacev(&folder, &files, ROWS, QUERIES, SEED)).await?
    };
    ledger.step("data", making).await?;
    ensure!(files.iter().all(|file| file.is_file()), "{} is gone: run again with --anew", folder.display());
    let [base, queries, truth] = files;
    let wanted = LoopbackArgs { ef: vec![80, 120, 200], ..args(base, queries, truth, Metric::L2) };
    let report: Report = ledger.step("over QUIC", loopback::measure(&wanted)).await?;
    let mut claims = vec![Claim::new(
        report.vectors == ROWS,
        format!(
            "{} vectors of {} {}: built in {:.0} s, loaded in {:.1} s",
            report.vectors,
            report.dimension,
            report.dtype,
            report.build_seconds.unwrap_or_default(),
            report.load_seconds
        ),
    )];
    for point in &report.points {
        let text =
            format!("ef {}: recall@10 {:.4}, {:.0} queries a second", point.ef, point.recall_at_k, point.qps);
        claims.push(Claim::new(point.recall_at_k > 0.8, text));
    }
    let arithmetic = report.layout.collection_bytes_max_per_mn as f64;
    for node in &report.memory {
        let resident = node.memory.resident_bytes as f64;
        let (is_mn, mib) = (node.name.starts_with("mn-"), |bytes: f64| bytes / 1024.0 / 1024.0);
        let expected = if is_mn { arithmetic } else { 0.0 };
        let text = format!(
            "{}: {:.0} MiB resident, {:.0} MiB at most; the layout says {:.0} MiB of records, tables and ids",
            node.name,
            mib(resident),
            mib(node.memory.peak_bytes as f64),
            mib(expected)
        );
        claims.push(Claim::new(!is_mn || resident <= arithmetic * 1.02 + BESIDE_BYTES, text));
    }
    Ok(claims)
}

fn make_spacev(
    folder: &Path,
    files: &[PathBuf; 3],
    rows: u64,
    queries: u64,
    seed: u64,
) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    let synth = Synth::new(SynthShape::Spacev, rows, seed)?;
    let bar = progress::count("making", rows as usize);
    synth.write_base(&files[0], cores(), &|done, _| bar.set_position(done))?;
    synth.write_queries(&files[1], queries, cores(), &|_, _| ())?;
    bar.finish_and_clear();
    let bar = progress::count("truth", queries as usize);
    let (base, queries) = (Vectors::open(&files[0])?, Vectors::open(&files[1])?);
    let truth = exact_neighbours(&base, &queries, Metric::L2, 10, cores(), &|done, total| {
        bar.set_length(total);
        bar.set_position(done);
    })?;
    bar.finish_and_clear();
    Ok(write_truth(&files[2], &truth)?)
}

pub(super) async fn faults(ledger: &mut Ledger) -> anyhow::Result<Vec<Claim>> {
    const ROWS: usize = 50_000;
    const SIZE: Size = Size { queries: 2_000, askers: 8 };
    let base = Vectors::open_first(sets::GLOVE_BASE.find()?, ROWS)?;
    let vectors = rows(&Vectors::open_first(sets::GLOVE_QUERIES.find()?, 200)?);
    let spec = GraphSpec::native(Metric::L2);
    let graph = graph_cache::find_or_build(&graph_cache::default_root(), &base, &spec).await?.file;
    let held = [
        ledger.step("compute node", faults::compute_node_killed(&graph, vectors.clone(), SIZE)).await?,
        ledger.step("oracle", faults::oracle_killed(&graph, vectors.clone(), SIZE)).await?,
        ledger.step("memory node", faults::memory_node_killed(&graph, vectors, SIZE)).await?,
    ];
    Ok(held.into_iter().flat_map(|held| held.facts).map(|fact| Claim::new(true, fact)).collect())
}

pub(super) async fn hostile(ledger: &mut Ledger) -> anyhow::Result<Vec<Claim>> {
    const SIZE: hostile::Size = hostile::Size { connections: 10_000, attackers: 16, askers: 2, seed: 1 };
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/glove100-50k");
    let base = Vectors::open(shipped.join("base.i8bin"))?;
    let vectors = rows(&Vectors::open_first(shipped.join("query.i8bin"), 200)?);
    let spec = GraphSpec::native(Metric::L2);
    let graph = graph_cache::find_or_build(&graph_cache::default_root(), &base, &spec).await?.file;
    let siege: Siege = ledger.step("siege", hostile::besiege(&graph, vectors, SIZE)).await?;
    println!("{}", siege.table());
    let failures = Claim::new(
        siege.failures.is_empty(),
        format!("every query answered, with the ids of before; failures: {:?}", siege.failures),
    );
    let mut claims: Vec<_> = siege.facts().into_iter().map(|fact| Claim::new(true, fact)).collect();
    claims.push(failures);
    claims.extend(siege.complaints().into_iter().map(|complaint| Claim::new(false, complaint)));
    Ok(claims)
}

pub(super) async fn insert(ledger: &mut Ledger) -> anyhow::Result<Vec<Claim>> {
    const LOADED: usize = 50_000;
    const ALL: usize = 70_000;
    const RECALL_LOSS: f64 = 0.01;
    let rows = Vectors::open_first(sets::GLOVE_BASE.find()?, ALL)?;
    let queries = Vectors::open_first(sets::GLOVE_QUERIES.find()?, 2_000)?;
    let spec = GraphSpec::native(Metric::L2);
    let root = graph_cache::default_root();
    let graph = graph_cache::find_or_build(&root, &rows.first(LOADED)?, &spec).await?.file;
    let inserted = InsertSpec { rows, metric: Metric::L2, contended: 1_000, clients: 8, compute_nodes: 3 };
    let work = inserts::insert_concurrently(&graph, &inserted, &queries, 120);
    let all: Inserts = ledger.step("20,000 inserts", work).await?;
    let cut: CutOff =
        ledger.step("compute node killed", inserts::inserting_node_killed(&graph, &inserted)).await?;
    Ok(vec![
        Claim::new(
            true,
            format!(
                "{} rows inserted into {} by 8 clients on 3 compute nodes, {:.0} a second; {} contended ids had one winner \
                 each; {} fetches by id found every acknowledged row from every node; the check is sound ({} orphans)",
                all.inserted,
                all.loaded,
                all.inserts_per_second,
                all.contended,
                all.fetched,
                all.check.orphans
            ),
        ),
        Claim::new(
            all.recall_grown >= all.recall_built - RECALL_LOSS,
            format!(
                "recall@10 at ef 120 over all rows: {:.4} grown, {:.4} built at once",
                all.recall_grown, all.recall_built
            ),
        ),
        Claim::new(
            true,
            format!(
                "an inserting compute node killed: {} acknowledged and found, {} unknown; the check is sound ({} cut off, {} orphans)",
                cut.acknowledged, cut.unknown, cut.check.abandoned, cut.check.orphans
            ),
        ),
    ])
}

fn rows(vectors: &Vectors) -> Vec<Vec<u8>> {
    vectors.iter().map(<[u8]>::to_vec).collect()
}

/// The same numbers as f32.
pub(super) fn as_f32(vectors: &Vectors) -> anyhow::Result<Vectors> {
    let mut numbers = vec![0.0; vectors.dim()];
    let mut bytes = Vec::with_capacity(vectors.rows() * vectors.dim() * 4);
    for row in 0..vectors.rows() {
        vectors.row_f32(row, &mut numbers);
        bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    }
    Ok(Vectors::from_bytes(DType::F32, vectors.dim(), bytes)?)
}
