//! `shine-sim loopback`: a cluster of real processes on this host, a graph, queries, figures.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::Args;
use shine_client::{Client, ClientError, ClientOptions, LoadOptions, SearchOptions};
use shine_common::graph_file::GraphFile;
use shine_common::ids::ExternalId;
use shine_common::layout::{CollectionParams, EF_MAX, HEADER_BYTES, UPPER_SLOTS};
use shine_common::metric::Metric;
use shine_common::net::tls::Identity;
use shine_common::wire::{Receipt, Role, Target};

use crate::cluster::{Cluster, ClusterSpec};
use crate::graph_cache::{self, Builder, Graph, GraphSpec};
use crate::host::{self, Host, ProcessMemory, ProcessTimes};
use crate::inputs::{InputSpec, Inputs};
use crate::progress;
use crate::recall::{hits_by_distance, hits_by_id};
use crate::report::{Files, LayoutFigures, NodeMemory, Point, Report};
use crate::workload::{Pass, closed_loop};

/// Name of the collection in a loopback cluster.
pub const COLLECTION: &str = "loopback";
/// Most queries of the warm-up.
const WARMUP_MAX: usize = 1_000;
/// Time that a query may take before the run gives up: a loaded host is slow, not broken.
const QUERY_DEADLINE: Duration = Duration::from_secs(30);
/// Regions are whole huge pages.
const REGION_STEP: u64 = 2 << 20;

/// Options of a loopback run.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:
  shine-sim loopback --base data/glove100-50k/base.i8bin --queries data/glove100-50k/query.i8bin \\
      --truth data/glove100-50k/truth.ibin --metric l2 --json out/demo.json --svg out/demo.svg
  shine-sim loopback --base base.fbin --queries query.fbin --truth truth.ibin --metric cosine --rows 100000 \\
      --m 32 --ef-construction 400 --ef 64,128 --memory-nodes 4 --compute-nodes 2 --link-mbit 1000 --json out.json")]
pub struct LoopbackArgs {
    /// Base vectors (.fbin .f16bin .u8bin .i8bin .fvecs .bvecs .npy); a row's id is its number
    #[arg(long, value_name = "FILE")]
    pub base: PathBuf,
    /// Query vectors, of the base's type and dimension
    #[arg(long, value_name = "FILE")]
    pub queries: PathBuf,
    /// Exact neighbours of the queries (.ibin .ivecs), with or without distances
    #[arg(long, value_name = "FILE")]
    pub truth: PathBuf,
    /// Metric: l2, ip or cosine
    #[arg(long)]
    pub metric: Metric,
    /// Links per node and upper level; level 0 has twice as many [default: 16]
    #[arg(long)]
    pub m: Option<u32>,
    /// Beam of the build [default: 200]
    #[arg(long, value_name = "EF")]
    pub ef_construction: Option<u32>,
    /// Beams of the search to measure; raised to k where smaller
    #[arg(
        long,
        value_name = "EF,..",
        value_delimiter = ',',
        default_values_t = [40, 80, 120, 160],
        value_parser = clap::value_parser!(u32).range(1..=i64::from(EF_MAX))
    )]
    pub ef: Vec<u32>,
    /// Answers per query
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=i64::from(EF_MAX)))]
    pub k: u32,
    /// Memory nodes
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub memory_nodes: u16,
    /// Compute nodes
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub compute_nodes: u16,
    /// Use the first rows of the base only; the truth must be about these
    #[arg(long, value_name = "N")]
    pub rows: Option<usize>,
    /// Use the first queries only
    #[arg(long, value_name = "N")]
    pub limit_queries: Option<usize>,
    /// Builder of the graph: native or hnsw_rs
    #[arg(long, value_enum, default_value_t = Builder::Native)]
    pub builder: Builder,
    /// A built graph of the base; without it, one is built and kept (in $SHINE_CACHE or ~/.cache/shine/graphs)
    #[arg(long, value_name = "FILE", conflicts_with = "builder")]
    pub graph: Option<PathBuf>,
    /// Shape every memory and compute node's link to so many Mbit/s in each direction
    #[arg(long, value_name = "MBIT")]
    pub link_mbit: Option<u32>,
    /// Queries under way at a time on each compute node
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub in_flight: u16,
    /// Write the figures to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Draw recall against queries per second into this file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Log level of the cluster's processes
    #[arg(long, value_name = "LEVEL", default_value = "warn")]
    pub log: String,
}

/// Runs it, prints the table and writes the files.
///
/// # Errors
/// On files that do not fit, processes that do not start, queries that fail. Nothing is left running.
pub async fn run(args: LoopbackArgs) -> anyhow::Result<()> {
    check_writable(args.json.iter().chain(&args.svg))?;
    let report = measure(&args).await?;
    println!("{}\n{}", report.title(), report.table());
    if let Some(path) = &args.json {
        std::fs::write(path, report.to_json()).with_context(|| format!("writing {}", path.display()))?;
        println!("figures: {}", path.display());
    }
    if let Some(path) = &args.svg {
        let picture = report.picture().map_err(anyhow::Error::msg)?;
        std::fs::write(path, picture).with_context(|| format!("writing {}", path.display()))?;
        println!("picture: {}", path.display());
    }
    Ok(())
}

/// A result that cannot be written is better known before the run than after it.
fn check_writable<'a>(paths: impl Iterator<Item = &'a PathBuf>) -> anyhow::Result<()> {
    for path in paths {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        if let Some(folder) = folder {
            ensure!(
                folder.is_dir(),
                "{} cannot be written: there is no folder {}",
                path.display(),
                folder.display()
            );
        }
        ensure!(!path.is_dir(), "{} cannot be written: it is a folder", path.display());
    }
    Ok(())
}

/// Runs it.
///
/// # Errors
/// As [`run`].
pub async fn measure(args: &LoopbackArgs) -> anyhow::Result<Report> {
    ensure!(!args.ef.is_empty(), "--ef needs at least one beam");
    let spec = InputSpec {
        base: args.base.clone(),
        queries: args.queries.clone(),
        truth: args.truth.clone(),
        metric: args.metric,
        rows: args.rows,
        limit_queries: args.limit_queries,
        k: args.k as usize,
    };
    let inputs = Arc::new(Inputs::open(&spec)?);
    let graph = find_graph(args, &inputs).await?;
    let info = graph.file.info().clone();
    let plan = Plan::new(&graph.file, args.memory_nodes)?;

    let cluster_spec = ClusterSpec {
        memory_nodes: args.memory_nodes,
        compute_nodes: args.compute_nodes,
        regions: plan.regions,
        region_bytes: plan.region_bytes,
        link_mbit: args.link_mbit,
        log: args.log.clone(),
        ..ClusterSpec::default()
    };
    let cluster = start(cluster_spec).await?;
    let admin = connect(&cluster).await?;
    let load_seconds = load(&admin, &graph.file, COLLECTION).await?;

    let lanes = lanes(&cluster).await?;
    let generator = Generator { cluster: &cluster, lanes, inputs: Arc::clone(&inputs), k: args.k };
    let warmup = inputs.warmup();
    let warmup = warmup.start..warmup.end.min(warmup.start + WARMUP_MAX);
    generator.pass(args.ef[0], warmup.clone(), args.in_flight.into(), "warming up").await?;
    let mut points = Vec::with_capacity(args.ef.len());
    for &ef in &args.ef {
        points.push(generator.point(ef, args.in_flight.into(), &plan.params, info.entry.level).await?);
    }
    let memory = memory(&cluster);
    // A cluster that does not leave cleanly is a failed run, whatever it measured.
    let mut cluster = cluster;
    cluster.stop_all()?;

    Ok(Report {
        kind: "loopback".into(),
        points,
        build_seconds: Some(info.build.seconds),
        graph_cached: graph.was_cached,
        builder: info.build.builder.clone(),
        load_seconds,
        vectors: info.rows.into(),
        dimension: info.dim,
        dtype: info.dtype,
        metric: info.metric,
        m: info.m,
        ef_construction: info.ef_construction,
        k: args.k,
        queries: inputs.measured(),
        warmup_queries: warmup.len(),
        warmup_disjoint: warmup.start >= inputs.measured(),
        in_flight: args.in_flight.into(),
        memory_nodes: args.memory_nodes,
        compute_nodes: args.compute_nodes,
        link_mbit: args.link_mbit,
        top_level: info.entry.level.into(),
        layout: plan.figures,
        memory,
        files: Files {
            base: args.base.display().to_string(),
            queries: args.queries.display().to_string(),
            truth: args.truth.display().to_string(),
            graph: graph.path.display().to_string(),
            graph_key: graph.key,
        },
        commit: host::commit(),
        host: Host::look(),
        command: std::env::args().collect::<Vec<_>>().join(" "),
    })
}

async fn find_graph(args: &LoopbackArgs, inputs: &Arc<Inputs>) -> anyhow::Result<Graph> {
    if let Some(path) = &args.graph {
        let graph = graph_cache::open_given(path, &inputs.base, args.metric)?;
        let info = graph.file.info();
        for (flag, asked, has) in
            [("--m", args.m, info.m), ("--ef-construction", args.ef_construction, info.ef_construction)]
        {
            let shown = path.display();
            ensure!(
                asked.is_none_or(|asked| asked == has),
                "{flag}: the graph in {shown} was built with {has}"
            );
        }
        return Ok(graph);
    }
    let defaults = GraphSpec::native(args.metric);
    let spec = GraphSpec {
        m: args.m.unwrap_or(defaults.m),
        ef_construction: args.ef_construction.unwrap_or(defaults.ef_construction),
        builder: args.builder,
        ..defaults
    };
    graph_cache::find_or_build(&graph_cache::default_root(), &inputs.base, &spec).await
}

/// Regions that a graph needs, by the arithmetic of the layout.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Parameters that the collection will have.
    pub params: CollectionParams,
    /// Regions of each memory node: the first takes the graph, the others what is inserted later.
    pub regions: u16,
    /// Bytes of each region.
    pub region_bytes: u64,
    /// What it comes to.
    pub figures: LayoutFigures,
}

impl Plan {
    /// Regions for `graph` on `memory_nodes` memory nodes: as small as they can be with a tenth to spare, so that the
    /// records of even a small graph lie on all of them.
    ///
    /// # Errors
    /// If the graph's parameters are out of range.
    pub fn new(graph: &GraphFile, memory_nodes: u16) -> anyhow::Result<Self> {
        let info = graph.info();
        let params = info.params(memory_nodes)?;
        let nodes = u64::from(memory_nodes);
        let chunks = u64::from(info.rows.div_ceil(params.slots));
        let upper_chunks = u64::from(info.upper_slots.div_ceil(UPPER_SLOTS));
        // Superblocks, tables and id segments, then the busiest memory node's share of the chunks.
        let fixed = |index: u16| params.first_free(index.into());
        let share = chunks.div_ceil(nodes) * params.chunk_bytes()
            + upper_chunks.div_ceil(nodes) * params.upper_chunk_bytes();
        let largest = fixed(0) + share;
        let all = (0..memory_nodes).map(fixed).sum::<u64>()
            + chunks * params.chunk_bytes()
            + upper_chunks * params.upper_chunk_bytes();
        // Inserts lease a chunk of each kind per compute node: room for a few.
        let spare = largest / 10 + 4 * (params.chunk_bytes() + params.upper_chunk_bytes());
        let record_bytes = HEADER_BYTES + params.vector_stride() + params.list_stride();
        let figures = LayoutFigures {
            vector_bytes: params.vector_bytes(),
            list_bytes: params.list_stride(),
            record_bytes,
            collection_bytes: all,
            collection_bytes_max_per_mn: largest,
        };
        Ok(Self {
            regions: 3,
            region_bytes: (largest + spare).next_multiple_of(REGION_STEP),
            figures,
            params,
        })
    }
}

/// Starts a cluster away from the runtime's threads: it waits for processes.
///
/// # Errors
/// As [`Cluster::start`].
pub async fn start(spec: ClusterSpec) -> anyhow::Result<Cluster> {
    let started = tokio::task::spawn_blocking(move || Cluster::start(&spec)).await;
    Ok(started.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))?)
}

fn options() -> ClientOptions {
    ClientOptions { deadline: QUERY_DEADLINE, ..ClientOptions::default() }
}

/// A client with all rights that may use every compute node.
///
/// # Errors
/// If no oracle answers.
pub async fn connect(cluster: &Cluster) -> anyhow::Result<Client> {
    let identity = Identity::load(cluster.cert_dir("admin"))?;
    Ok(Client::connect(&cluster.oracles(), identity, options()).await?)
}

/// A client of one compute node alone.
///
/// # Errors
/// If it does not answer.
pub async fn connect_to(cluster: &Cluster, name: &str) -> anyhow::Result<Client> {
    let identity = Identity::load(cluster.cert_dir("client"))?;
    Ok(Client::connect_to(cluster.addr(name), identity, options()).await?)
}

async fn lanes(cluster: &Cluster) -> anyhow::Result<Vec<Client>> {
    let mut lanes = Vec::new();
    for name in cluster.names(Role::Cn) {
        lanes.push(connect_to(cluster, name).await?);
    }
    Ok(lanes)
}

/// Loads `graph` as collection `name` on all memory nodes; the seconds that it took.
///
/// # Errors
/// As [`Client::load`].
pub async fn load(admin: &Client, graph: &GraphFile, name: &str) -> anyhow::Result<f64> {
    let bar = progress::bytes("loading");
    let started = std::time::Instant::now();
    let options = LoadOptions { collection: name.into(), ..LoadOptions::default() };
    let loaded = admin
        .load(graph, &options, |progress| {
            bar.set_length(progress.total);
            bar.set_position(progress.done);
            std::ops::ControlFlow::Continue(())
        })
        .await;
    bar.finish_and_clear();
    loaded.with_context(|| format!("loading {}", graph.path().display()))?;
    Ok(started.elapsed().as_secs_f64())
}

fn memory(cluster: &Cluster) -> Vec<NodeMemory> {
    let nodes = [Role::Oracle, Role::Mn, Role::Cn].into_iter().flat_map(|role| cluster.names(role));
    nodes
        .filter_map(|name| {
            let memory = ProcessMemory::read(cluster.pid(name)).ok()?;
            Some(NodeMemory { name: name.to_owned(), memory })
        })
        .collect()
}

/// What one query brought.
#[derive(Debug)]
struct Asked {
    ids: Vec<u64>,
    distances: Vec<f32>,
    receipt: Receipt,
}

/// Puts load on a cluster from this process.
struct Generator<'a> {
    cluster: &'a Cluster,
    /// One client per compute node.
    lanes: Vec<Client>,
    inputs: Arc<Inputs>,
    k: u32,
}

impl Generator<'_> {
    /// Asks `queries` (rows of the query file) once each.
    async fn pass(
        &self,
        ef: u32,
        queries: std::ops::Range<usize>,
        in_flight: usize,
        what: &str,
    ) -> Result<Pass<Asked>, ClientError> {
        let bar = progress::count(what, queries.len());
        let done = {
            let bar = bar.clone();
            move || bar.inc(1)
        };
        let (lanes, inputs, k) = (self.lanes.clone(), Arc::clone(&self.inputs), self.k);
        let ask = move |lane: usize, query: usize| {
            let client: Client = lanes[lane].clone();
            let target = Target::Vector(inputs.queries.row(query).to_vec());
            async move {
                let options = SearchOptions { k, ef, ..SearchOptions::default() };
                let answer = client.search(COLLECTION, target, &options).await?;
                // Ids are row numbers here; a UUID would be an answer that was never stored.
                let number = |id| if let ExternalId::Num(number) = id { number } else { u64::MAX };
                Ok(Asked {
                    ids: answer.hits.iter().map(|hit| number(hit.id)).collect(),
                    distances: answer.hits.iter().map(|hit| hit.distance).collect(),
                    receipt: answer.receipt,
                })
            }
        };
        let pass = closed_loop(self.lanes.len(), in_flight, queries, ask, done).await;
        bar.finish_and_clear();
        pass
    }

    /// Measures one ef on all queries with truth.
    async fn point(
        &self,
        ef: u32,
        in_flight: usize,
        params: &CollectionParams,
        top_level: u8,
    ) -> anyhow::Result<Point> {
        // What a compute node makes of it, so that the report names the beam that was used.
        let ef = ef.max(self.k);
        let before = [self.cpu(Role::Cn)?, self.cpu(Role::Mn)?];
        let what = format!("ef {ef}");
        let pass = self.pass(ef, 0..self.inputs.measured(), in_flight, &what).await?;
        let cpu = [self.cpu(Role::Cn)? - before[0], self.cpu(Role::Mn)? - before[1]];
        Ok(point(ef, &pass, &self.inputs, params, top_level, cpu))
    }

    /// Processor time of all nodes of a role so far.
    fn cpu(&self, role: Role) -> anyhow::Result<Duration> {
        let mut sum = Duration::ZERO;
        for name in self.cluster.names(role) {
            sum += ProcessTimes::read(self.cluster.pid(name)).with_context(|| format!("{name} is gone"))?.cpu;
        }
        Ok(sum)
    }
}

/// Figures of one pass over all measured queries; `cpu` of compute and memory nodes.
fn point(
    ef: u32,
    pass: &Pass<Asked>,
    inputs: &Inputs,
    params: &CollectionParams,
    top_level: u8,
    cpu: [Duration; 2],
) -> Point {
    let k = inputs.truth.k();
    let queries = pass.answers.len() as f64;
    let levels = f64::from(top_level) + 1.0;
    let mean = |of: &dyn Fn(&Asked) -> f64| pass.answers.iter().map(of).sum::<f64>() / queries;
    let bound = |asked: &Asked| ROUNDS_FACTOR * (f64::from(asked.receipt.hops) + levels);
    let (mut by_id, mut by_distance) = (0, 0);
    for (query, asked) in pass.answers.iter().enumerate() {
        by_id += hits_by_id(&asked.ids, inputs.truth.ids(query), k);
        by_distance += hits_by_distance(&asked.distances, inputs.kth_distances[query], k);
    }
    // Upper lists have the size of level-0 lists.
    let payload = |asked: &Asked| {
        f64::from(asked.receipt.distances) * params.vector_bytes() as f64
            + f64::from(asked.receipt.hops) * params.list_stride() as f64
            + (k as u64 * HEADER_BYTES) as f64
    };
    let us_per_query = |cpu: Duration| cpu.as_secs_f64() * 1e6 / queries;
    Point {
        ef,
        recall_at_k: by_id as f64 / (queries * k as f64),
        recall_by_distance: by_distance as f64 / (queries * k as f64),
        qps: queries / pass.wall.as_secs_f64(),
        p50_us: pass.latencies.value_at_quantile(0.50),
        p95_us: pass.latencies.value_at_quantile(0.95),
        p99_us: pass.latencies.value_at_quantile(0.99),
        hops_per_query: mean(&|asked| asked.receipt.hops.into()),
        round_trips_per_query: mean(&|asked| asked.receipt.rounds.into()),
        round_trips_bound: mean(&bound),
        round_trips_of_bound_max: pass
            .answers
            .iter()
            .map(|asked| f64::from(asked.receipt.rounds) / bound(asked))
            .fold(0.0, f64::max),
        remote_reads_per_query: mean(&|asked| asked.receipt.remote_reads.into()),
        bytes_per_query: mean(&|asked| asked.receipt.bytes as f64),
        payload_bytes_per_query: mean(&payload),
        distances_per_query: mean(&|asked| asked.receipt.distances.into()),
        torn_lists: pass.answers.iter().map(|asked| u64::from(asked.receipt.torn_lists)).sum(),
        cn_cpu_us_per_query: us_per_query(cpu[0]),
        mn_cpu_us_per_query: us_per_query(cpu[1]),
    }
}

/// Round trips that a search may take per expansion and level.
pub const ROUNDS_FACTOR: f64 = 2.1;
