//! Files: each is given to every command that takes one of its kind.

use std::fs;
use std::path::Path;

use shine_common::graph_file::{BuildInfo, GraphInfo, GraphWriter};
use shine_common::ids::{ExternalId, NodeId};
use shine_common::layout::{EntryPoint, NodeMeta, NodeState};
use shine_common::metric::{DType, Metric};
use shine_tests::desk::{Desk, Refusal};
use shine_tests::page::Table;
use xxhash_rust::xxh3::xxh3_64;

use crate::{AS_BEFORE, BAD_INPUT, FAILED, FILES, Guard, PAGE, bin, exit_text, f32s, npy, put, rows, u32s};

/// A graph without upper levels: row i links to the next, or to a row that is not there.
struct Lie {
    metric: Metric,
    ids: [u64; 3],
    vectors: [[f32; 4]; 3],
    link: u32,
}

impl Lie {
    const HONEST: Self =
        Self { metric: Metric::Cosine, ids: [1, 2, 3], vectors: [[1.0, 0.0, 0.0, 0.0]; 3], link: 0 };

    /// Writes it with checksums that are right.
    fn write(&self, path: &Path) {
        let info = GraphInfo {
            dtype: DType::F32,
            metric: self.metric,
            dim: 4,
            m: 4,
            ef_construction: 10,
            rows: 3,
            has_ids: true,
            upper_slots: 0,
            entry: EntryPoint { node: NodeId(0), level: 0 },
            build: BuildInfo::default(),
        };
        let written = (|| {
            let mut writer = GraphWriter::create(path, info)?;
            for _ in self.ids {
                let state = NodeState::Live;
                writer.push_meta(NodeMeta { state, level: 0, is_uuid: false, upper: 0 })?;
            }
            self.ids.iter().try_for_each(|id| writer.push_id(ExternalId::Num(*id)))?;
            self.vectors.iter().try_for_each(|vector| writer.push_vector(&f32s(vector)))?;
            for next in [1, 2, self.link] {
                writer.push_list(&[NodeId(next)])?;
            }
            writer.finish()
        })();
        written.expect("a graph file is written");
    }
}

/// Sets bytes of a graph file's header, and makes its checksum right again.
fn reheaded(graph: &[u8], at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut graph = graph.to_vec();
    graph[at..at + bytes.len()].copy_from_slice(bytes);
    graph[16..24].fill(0);
    let sum = xxh3_64(&graph[..4096]);
    graph[16..24].copy_from_slice(&sum.to_le_bytes());
    graph
}

/// Command lines that take a file, by name; the file is put in the place of FILE.
type Entries = &'static [(&'static str, &'static str)];

const TAKE_VECTORS: Entries = &[
    ("data info", "shine data info FILE"),
    ("data convert", "shine data convert FILE out.npy"),
    ("build", "shine build FILE --metric l2 --out out.graph"),
    (
        "data truth --base",
        "shine data truth --base FILE --queries query.fbin --metric l2 --k 1 --out out.ibin",
    ),
    (
        "data truth --queries",
        "shine data truth --base base.fbin --queries FILE --metric l2 --k 1 --out out.ibin",
    ),
    ("data queries", "shine data queries --base FILE --hold-out 1 --out split"),
    ("insert", "shine insert -c words --file FILE --ids-from 1000"),
    ("search", "shine search -c words --file FILE --k 1"),
    ("recall --queries", "shine recall -c words --queries FILE --truth truth.ibin --k 3"),
    (
        "shine-sim loopback --base",
        "shine-sim loopback --base FILE --queries query.fbin --truth truth.ibin --metric l2 --k 3",
    ),
    (
        "shine-sim loopback --queries",
        "shine-sim loopback --base base.fbin --queries FILE --truth truth.ibin --metric l2 --k 3",
    ),
];

/// Those that hold vectors against others.
const COMPARE_VECTORS: &[&str] = &[
    "data truth --base",
    "data truth --queries",
    "insert",
    "search",
    "recall --queries",
    "shine-sim loopback --queries",
];

const TAKE_TRUTH: Entries = &[
    ("data info", "shine data info FILE"),
    ("data convert", "shine data convert FILE out.ivecs"),
    ("recall --truth", "shine recall -c words --queries query.fbin --truth FILE --k 3"),
    (
        "shine-sim loopback --truth",
        "shine-sim loopback --base base.fbin --queries query.fbin --truth FILE --metric l2 --k 3",
    ),
];

const TAKE_GRAPH: Entries = &[
    ("load", "shine load --graph FILE -c other"),
    ("load --replace", "shine load --graph FILE -c words --replace"),
    (
        "shine-sim loopback --graph",
        "shine-sim loopback --base base.fbin --queries query.fbin --truth truth.ibin --metric l2 --k 3 --graph FILE",
    ),
];

/// Gives `file` to all of `entries`; those that say the same share a row.
fn give(
    guard: &Guard<'_>,
    table: &mut Table,
    input: &str,
    file: &str,
    entries: Entries,
    only: &dyn Fn(&str) -> bool,
) {
    let mut told: Vec<(String, Vec<&str>, Vec<String>)> = Vec::new();
    for (entry, line) in entries.iter().filter(|(entry, _)| only(entry)) {
        let line = line.replace("FILE", file);
        let Refusal { exit, code, message } = guard.only_refuse(&line);
        guard.check_files(&line);
        let is_sim = entry.starts_with("shine-sim");
        assert_eq!((exit, code.as_str()), if is_sim { FAILED } else { BAD_INPUT }, "{line}: {message}");
        assert!(message.contains(file), "{line}: '{message}' does not name {file}");
        let exit = exit_text((exit, &code));
        match told.iter_mut().find(|(other, ..)| *other == message) {
            Some((_, entries, exits)) => {
                entries.push(entry);
                if !exits.contains(&exit) {
                    exits.push(exit);
                }
            }
            None => told.push((message, vec![entry], vec![exit])),
        }
    }
    guard.check_collections(file);
    let asked = entries.iter().filter(|(entry, _)| only(entry)).count();
    for (message, entries, exits) in told {
        let given = if entries.len() == asked && asked > 3 { "all".into() } else { entries.join(", ") };
        table.push(&[input, &given, &exits.join(", "), &message, AS_BEFORE]);
    }
}

#[test]
fn files_are_refused_wherever_they_are_given() {
    let (desk, _) = Desk::with_cluster();
    let write = |name: &str, bytes: &[u8]| put(&desk, name, bytes);
    let good = rows(40, 4);
    write("base.fbin", &good);
    write("query.fbin", &rows(5, 4));
    let truth =
        ["data", "truth", "--base", "base.fbin", "--queries", "query.fbin", "--metric", "l2", "--k", "3"];
    desk.json(&[&truth[..], &["--out", "truth.ibin"]].concat());
    desk.json(&[
        "build",
        "base.fbin",
        "--metric",
        "l2",
        "--m",
        "4",
        "--threads",
        "1",
        "--out",
        "words.graph",
    ]);
    desk.json(&["load", "--graph", "words.graph", "-c", "words"]);

    // Vectors.
    let spoiled = |row: usize, value: f32| {
        let mut bytes = good.clone();
        bytes[8 + (row * 4 + 2) * 4..][..4].copy_from_slice(&value.to_le_bytes());
        bytes
    };
    let header = |shape: &str, descr: &str, order: &str| {
        format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}\n")
    };
    let row = |dim: u32, values: usize| [u32s(&[dim]), vec![0; 4 * values]].concat();
    let any = |_: &str| true;
    let vectors: &[(&str, &str, Option<Vec<u8>>)] = &[
        ("no such file", "none.fbin", None),
        ("empty", "empty.fbin", Some(Vec::new())),
        ("cut in the header", "head.fbin", Some(good[..5].to_vec())),
        ("cut in the rows", "cut.fbin", Some(good[..good.len() - 1].to_vec())),
        ("header has n too high", "more.fbin", Some(bin(41, 4, &good[8..]))),
        ("header has n too low", "fewer.fbin", Some(bin(39, 4, &good[8..]))),
        ("header has d too high", "wider.fbin", Some(bin(40, 5, &good[8..]))),
        ("n x d overflows 32 bits", "huge.fbin", Some(bin(u32::MAX, 32_768, &good[8..]))),
        ("d is 2^32-1", "wide.fbin", Some(bin(40, u32::MAX, &good[8..]))),
        ("d is 0", "flat.fbin", Some(bin(40, 0, &[]))),
        ("zero rows", "zero.fbin", Some(bin(0, 4, &[]))),
        ("wrong extension", "rows.xyz", Some(good.clone())),
        ("extension of another type", "bytes.fbin", Some(bin(40, 4, &[1; 160]))),
        ("NaN", "nan.fbin", Some(spoiled(1, f32::NAN))),
        ("infinity", "inf.fbin", Some(spoiled(1, f32::INFINITY))),
        ("cut fvecs", "cut.fvecs", Some(row(4, 3))),
        ("fvecs with rows of two dimensions", "odd.fvecs", Some([row(4, 4), row(3, 4)].concat())),
        (
            "npy cut in the header",
            "head.npy",
            Some(npy(&header("(40, 4)", "<f4", "False"), &[])[..30].to_vec()),
        ),
        ("npy cut in the rows", "cut.npy", Some(npy(&header("(40, 4)", "<f4", "False"), &good[9..]))),
        ("npy of f64", "f64.npy", Some(npy(&header("(20, 4)", "<f8", "False"), &good[8..]))),
        ("npy in columns", "columns.npy", Some(npy(&header("(40, 4)", "<f4", "True"), &good[8..]))),
        ("npy of one dimension", "line.npy", Some(npy(&header("(160,)", "<f4", "False"), &good[8..]))),
        ("npy with zero rows", "zero.npy", Some(npy(&header("(0, 4)", "<f4", "False"), &[]))),
        (
            "npy with n x d beyond 64 bits",
            "huge.npy",
            Some(npy(&header("(18446744073709551615, 4)", "<f4", "False"), &good[8..])),
        ),
    ];
    for (_, name, bytes) in vectors {
        bytes.iter().for_each(|bytes| write(name, bytes));
    }
    write("narrow.fbin", &rows(5, 3));

    // Truth: 5 queries x 3 rows of 40.
    let id_rows: Vec<u32> = (0..15).collect();
    let with = |at: usize, id: u32| {
        let mut ids = id_rows.clone();
        ids[at] = id;
        ids
    };
    let mut distances = vec![1.0f32; 15];
    distances[4] = f32::NAN;
    let truths: &[(&str, &str, Option<Vec<u8>>)] = &[
        ("truth: no such file", "none.ibin", None),
        ("truth: cut", "cut.ibin", Some(bin(5, 3, &u32s(&id_rows[..14])))),
        ("truth: header has n too high", "more.ibin", Some(bin(6, 3, &u32s(&id_rows)))),
        ("truth: zero queries", "zero.ibin", Some(bin(0, 3, &[]))),
        ("truth: k is 0", "flat.ibin", Some(bin(5, 0, &[]))),
        ("truth: k is 2^32-1", "wide.ibin", Some(bin(5, u32::MAX, &u32s(&id_rows)))),
        ("truth: a row twice", "twice.ibin", Some(bin(5, 3, &u32s(&with(1, 0))))),
        ("truth: NaN", "nan.ibin", Some(bin(5, 3, &[u32s(&id_rows), f32s(&distances)].concat()))),
        (
            "truth: ivecs with rows of two widths",
            "odd.ivecs",
            Some([u32s(&[3, 0, 1, 2]), u32s(&[2, 0, 1, 2])].concat()),
        ),
        ("truth: of other rows", "other.ibin", Some(bin(5, 3, &u32s(&with(7, 40))))),
        ("truth: fewer neighbours than k", "few.ibin", Some(bin(5, 2, &u32s(&id_rows[..10])))),
    ];
    for (_, name, bytes) in truths {
        bytes.iter().for_each(|bytes| write(name, bytes));
    }

    // Graphs.
    let graph = fs::read(desk.folder().path("words.graph")).expect("it was built");
    let damaged = |at: usize| {
        let mut graph = graph.clone();
        graph[at] ^= 1;
        graph
    };
    let lie = |name: &str, lie: &Lie| lie.write(&desk.folder().path(name));
    lie("twice.graph", &Lie { ids: [7, 8, 7], ..Lie::HONEST });
    let mut vectors_of = Lie::HONEST.vectors;
    vectors_of[1] = [0.0; 4];
    lie("zero.graph", &Lie { vectors: vectors_of, ..Lie::HONEST });
    vectors_of[1] = [1.0, f32::NAN, 0.0, 0.0];
    lie("nan.graph", &Lie { vectors: vectors_of, ..Lie::HONEST });
    lie("links.graph", &Lie { link: 3, ..Lie::HONEST });
    let graphs: &[(&str, &str, Option<Vec<u8>>)] = &[
        ("graph: no such file", "none.graph", None),
        ("graph: cut in the header", "head.graph", Some(graph[..100].to_vec())),
        ("graph: cut", "cut.graph", Some(graph[..graph.len() - 1].to_vec())),
        ("graph: a file of vectors", "vectors.graph", Some(rows(2_000, 4))),
        ("graph: damaged header", "header.graph", Some(damaged(60))),
        ("graph: damaged", "damaged.graph", Some(damaged(graph.len() - 1))),
        ("graph: of another format version", "format.graph", Some(reheaded(&graph, 8, &u32s(&[2])))),
        ("graph: of another layout version", "layout.graph", Some(reheaded(&graph, 24, &9u64.to_le_bytes()))),
        ("graph: zero rows", "zero-rows.graph", Some(reheaded(&graph, 64, &0u64.to_le_bytes()))),
        ("graph: n too high", "more.graph", Some(reheaded(&graph, 64, &41u64.to_le_bytes()))),
        ("graph: n is 2^64-1", "huge.graph", Some(reheaded(&graph, 64, &u64::MAX.to_le_bytes()))),
        ("graph: d is 2^32-1", "wide.graph", Some(reheaded(&graph, 44, &u32s(&[u32::MAX])))),
    ];
    for (_, name, bytes) in graphs {
        bytes.iter().for_each(|bytes| write(name, bytes));
    }

    let guard = Guard::new(&desk);
    let mut table = Table::new(&["input", "given to", "exit", "message", "afterwards"]);
    for (input, name, _) in vectors {
        give(&guard, &mut table, input, name, TAKE_VECTORS, &any);
    }
    give(&guard, &mut table, "dimension mismatch", "narrow.fbin", TAKE_VECTORS, &|e| {
        COMPARE_VECTORS.contains(&e)
    });
    // Two commands only look at the file itself.
    let holds_it_against = |entry: &str| !["data info", "data convert"].contains(&entry);
    give(&guard, &mut table, "truth in the place of vectors", "truth.ibin", TAKE_VECTORS, &holds_it_against);
    for (input, name, _) in truths {
        // What the rows are of, and how many are wanted, only these know.
        let needs_base = ["other.ibin", "few.ibin"].contains(name);
        give(&guard, &mut table, input, name, TAKE_TRUTH, &|entry| !needs_base || holds_it_against(entry));
    }
    give(&guard, &mut table, "vectors in the place of truth", "base.fbin", TAKE_TRUTH, &holds_it_against);
    for (input, name, _) in graphs {
        give(&guard, &mut table, input, name, TAKE_GRAPH, &any);
    }
    for (input, name) in [
        ("graph: an external id twice", "twice.graph"),
        ("graph: cosine with norm 0", "zero.graph"),
        ("graph: NaN", "nan.graph"),
        ("graph: a link to nowhere", "links.graph"),
    ] {
        give(&guard, &mut table, input, name, TAKE_GRAPH, &any);
    }
    table.check(PAGE, FILES);
}
