//! What an experiment found: the result file, and the table that a person reads. Pictures ([`crate::svg`]) are drawn
//! from it alone.

use comfy_table::{CellAlignment, Table, presets};
use serde::{Deserialize, Serialize};
use shine_common::metric::{DType, Metric};

use crate::host::{Host, ProcessMemory};
use crate::svg::{Series, recall_over_qps};

/// A loopback run, as in its JSON file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    /// Always "loopback".
    pub kind: String,
    /// One per ef.
    pub points: Vec<Point>,
    /// Seconds that building the graph took, at the time it was built; absent for a graph file that does not say.
    pub build_seconds: Option<f64>,
    /// Whether the graph came from the cache or a file.
    pub graph_cached: bool,
    /// Builder of the graph.
    pub builder: String,
    /// Seconds from the first byte of the graph sent to the collection being ready.
    pub load_seconds: f64,
    /// Rows in the graph.
    pub vectors: u64,
    /// Elements per row.
    pub dimension: u32,
    /// Element type.
    pub dtype: DType,
    /// Metric.
    pub metric: Metric,
    /// Links per node and upper level.
    pub m: u32,
    /// Beam of the build.
    pub ef_construction: u32,
    /// Answers per query.
    pub k: u32,
    /// Queries measured per ef.
    pub queries: usize,
    /// Queries before those of the first ef, not measured.
    pub warmup_queries: usize,
    /// Whether the warm-up asked other queries than the measured ones.
    pub warmup_disjoint: bool,
    /// Queries under way at a time on each compute node; the loop is closed.
    pub in_flight: usize,
    /// Memory nodes.
    pub memory_nodes: u16,
    /// Compute nodes.
    pub compute_nodes: u16,
    /// Speed of each node's link, where it was shaped.
    pub link_mbit: Option<u32>,
    /// Highest level of the graph: the levels of a query are this and one.
    pub top_level: u32,
    /// What a record takes.
    pub layout: LayoutFigures,
    /// Memory of each process after the last query.
    pub memory: Vec<NodeMemory>,
    /// The files it ran on.
    pub files: Files,
    /// Commit of the program.
    pub commit: String,
    /// The machine.
    pub host: Host,
    /// The command line.
    pub command: String,
}

/// Paths of a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Files {
    /// Base vectors.
    pub base: String,
    /// Query vectors.
    pub queries: String,
    /// Exact neighbours.
    pub truth: String,
    /// Graph file used.
    pub graph: String,
    /// sha256 over data and parameters that names the graph in the cache.
    pub graph_key: Option<String>,
}

/// Bytes of things in remote memory.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct LayoutFigures {
    /// A vector as read.
    pub vector_bytes: u64,
    /// A list as read, on any level.
    pub list_bytes: u64,
    /// A node on level 0: header, vector, list, with padding.
    pub record_bytes: u64,
    /// All regions of the collection, as far as handed out; by arithmetic.
    pub collection_bytes: u64,
    /// Of which on the memory node with the most.
    pub collection_bytes_max_per_mn: u64,
}

/// Memory of a node's process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NodeMemory {
    /// The node.
    pub name: String,
    /// Its memory.
    #[serde(flatten)]
    pub memory: ProcessMemory,
}

/// Figures at one ef. Means are over all measured queries.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Point {
    /// Beam.
    pub ef: u32,
    /// Share of the true k nearest among the answers, by id.
    pub recall_at_k: f64,
    /// Share of the answers no farther than the true k-th neighbour (1 + 1e-3).
    pub recall_by_distance: f64,
    /// Queries per second of wall time.
    pub qps: f64,
    /// Median latency at the client.
    pub p50_us: u64,
    /// 95th percentile.
    pub p95_us: u64,
    /// 99th percentile.
    pub p99_us: u64,
    /// Expansions, any level.
    pub hops_per_query: f64,
    /// Dependent round trips.
    pub round_trips_per_query: f64,
    /// The most that the round trips may be: 2.1 × (hops + levels).
    pub round_trips_bound: f64,
    /// Largest share of that bound that a single query took.
    pub round_trips_of_bound_max: f64,
    /// Records read.
    pub remote_reads_per_query: f64,
    /// Bytes of verbs frames, both directions.
    pub bytes_per_query: f64,
    /// Bytes of the records alone, by arithmetic: hops × list + distances × vector + headers of the k best.
    pub payload_bytes_per_query: f64,
    /// Distances computed.
    pub distances_per_query: f64,
    /// Lists read again since they were torn.
    pub torn_lists: u64,
    /// Processor time of all compute nodes.
    pub cn_cpu_us_per_query: f64,
    /// Processor time of all memory nodes.
    pub mn_cpu_us_per_query: f64,
}

impl Report {
    /// The result file.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a report is plain data") + "\n"
    }

    /// One line on what was run.
    pub fn title(&self) -> String {
        let link = self.link_mbit.map_or(String::new(), |mbit| format!(", links of {mbit} Mbit/s"));
        format!(
            "{} vectors of {} {} ({}), m {}, ef_construction {}, {} graph; {} memory nodes, {} compute nodes, {} in flight each{link}",
            self.vectors,
            self.dimension,
            self.dtype,
            self.metric,
            self.m,
            self.ef_construction,
            self.builder,
            self.memory_nodes,
            self.compute_nodes,
            self.in_flight,
        )
    }

    /// The picture: recall against queries per second.
    ///
    /// # Errors
    /// If there is no point.
    pub fn picture(&self) -> Result<String, String> {
        let label = format!("{} graph", self.builder);
        let commit = self.commit.get(..12).unwrap_or(&self.commit);
        let note = format!(
            "{} ({} cores), kernel {}, commit {commit}",
            self.host.cpu, self.host.cores, self.host.kernel
        );
        let series = [Series { label: &label, points: &self.points }];
        recall_over_qps(&self.title(), &note, self.k, &series)
    }

    /// The table for a terminal.
    pub fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_HORIZONTAL_ONLY);
        let recall = format!("recall@{}", self.k);
        table.set_header([
            "ef",
            &recall,
            "by distance",
            "queries/s",
            "p50 ms",
            "p99 ms",
            "hops",
            "round trips",
            "remote reads",
            "kB/query",
            "CN cpu µs",
            "MN cpu µs",
        ]);
        for point in &self.points {
            table.add_row([
                point.ef.to_string(),
                format!("{:.4}", point.recall_at_k),
                format!("{:.4}", point.recall_by_distance),
                format!("{:.0}", point.qps),
                format!("{:.2}", point.p50_us as f64 / 1e3),
                format!("{:.2}", point.p99_us as f64 / 1e3),
                format!("{:.1}", point.hops_per_query),
                format!("{:.1}", point.round_trips_per_query),
                format!("{:.0}", point.remote_reads_per_query),
                format!("{:.1}", point.bytes_per_query / 1e3),
                format!("{:.0}", point.cn_cpu_us_per_query),
                format!("{:.0}", point.mn_cpu_us_per_query),
            ]);
        }
        for column in table.column_iter_mut() {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table.to_string()
    }
}
