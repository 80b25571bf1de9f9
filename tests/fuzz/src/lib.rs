//! Every decoder of bytes from outside, as a function of arbitrary bytes. What must hold for each: it ends, in a value
//! or in an error that says something; it does not panic; and a value that it accepts is one that its encoder writes
//! again, or that can be walked from end to end.
//!
//! libFuzzer drives these functions (`scripts/prove.sh fuzz`, targets in `targets/`); the tests here run them over
//! their seeds and some mutations, so that each change of a decoder meets them.

#![forbid(unsafe_code)]

use std::fmt::Display;
use std::io::Write as _;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use shine_common::dataset::{Content, Format, Truth, Vectors};
use shine_common::graph_file::{BuildInfo, Check, GraphFile, GraphInfo, GraphWriter};
use shine_common::ids::{Epoch, ExternalId, Incarnation, NodeId, RegionId, RemotePtr, SessionId};
use shine_common::layout::{EntryPoint, ListView, NodeMeta, NodeState, encode_base_list, encode_upper_list};
use shine_common::metric::{DType, Metric};
use shine_common::verbs::frame::{self, Assembler, Frame, Kind, ReadRequest};
use shine_common::verbs::{ReadBatch, WordAt, WriteBatch};
use shine_common::wire::{
    ClusterMap, CnRequest, CnResponse, MnRequest, MnResponse, OracleRequest, OracleResponse, Role, Target,
    decode, encode,
};
use xxhash_rust::xxh3::xxh3_64;

/// An error must say something.
fn refused(error: impl Display) {
    assert!(!error.to_string().is_empty());
}

fn ended<T, E: Display>(result: Result<T, E>) -> Option<T> {
    result.map_err(refused).ok()
}

// -------------------------------------------------------------------------------------------------- frames

/// A stream of verbs frames; the first byte says into which chunks it is cut.
pub fn frames(data: &[u8]) {
    let Some((step, stream)) = data.split_first() else { return };
    let whole = frames_of(stream, stream.len().max(1));
    let cut = frames_of(stream, usize::from(*step).max(1));
    assert_eq!(whole, cut, "frames depend on where the stream was cut");
    let mut request = ReadRequest::default();
    whole.iter().for_each(|frame| frame_body(frame, &mut request));
}

fn frames_of(stream: &[u8], step: usize) -> Vec<Frame> {
    let (mut assembler, mut found) = (Assembler::default(), Vec::new());
    for chunk in stream.chunks(step) {
        assembler.push(Bytes::copy_from_slice(chunk));
        loop {
            match assembler.next_frame() {
                Ok(Some(frame)) => found.push(frame),
                Ok(None) => break,
                Err(error) => {
                    refused(error);
                    return found;
                }
            }
        }
    }
    found
}

fn frame_body(frame: &Frame, request: &mut ReadRequest) {
    let body = &frame.body[..];
    match frame.kind {
        Kind::Hello => drop(ended(frame::decode_hello(body))),
        Kind::Read => {
            if ended(request.decode(body)).is_some() {
                let items: u32 = request.groups.iter().map(|group| group.count).sum();
                assert_eq!(items as usize, request.offsets.len());
                let bytes: u64 =
                    request.groups.iter().map(|group| u64::from(group.len) * u64::from(group.count)).sum();
                assert_eq!(bytes, request.reply_bytes as u64);
            }
        }
        Kind::Write => {
            let mut parts = Vec::new();
            if let Some(data) = ended(frame::decode_write(body, &mut parts)) {
                assert_eq!(parts.iter().map(|part| part.len as usize).sum::<usize>(), data.len());
            }
        }
        Kind::CompareSwap => drop(ended(frame::decode_compare_swap(body))),
        Kind::FetchAdd => drop(ended(frame::decode_fetch_add(body))),
        Kind::Alive => again(ended(frame::decode_alive(body)), frame, |out, session| {
            frame::put_alive(out, frame.id, session);
        }),
        Kind::Credit => drop(ended(frame::decode_credit(body))),
        Kind::Welcome => drop(ended(frame::decode_welcome(body))),
        Kind::Word => {
            again(ended(frame::decode_word(body)), frame, |out, word| frame::put_word(out, frame.id, word));
        }
        Kind::Flag => {
            again(ended(frame::decode_flag(body)), frame, |out, flag| frame::put_flag(out, frame.id, flag));
        }
        Kind::Refused => drop(ended(frame::decode_refused(body, &Arc::from("mn-0")))),
        Kind::Done | Kind::Ping => drop(ended(frame::decode_empty(frame.kind, body))),
        Kind::Data | Kind::Send | Kind::Message => {}
    }
}

/// A fixed-size body that was accepted is written again as it came.
fn again<T>(value: Option<T>, frame: &Frame, put: impl FnOnce(&mut BytesMut, T)) {
    if let Some(value) = value {
        let mut out = BytesMut::new();
        put(&mut out, value);
        assert_eq!(out[frame::HEADER_BYTES..], frame.body[..]);
    }
}

fn frame_seeds() -> Vec<Vec<u8>> {
    let at = |offset| RemotePtr::new(RegionId(3), offset);
    let word = WordAt { at: at(64), epoch: Epoch(7) };
    let (mut read, mut write) = (ReadBatch::new(), WriteBatch::new());
    for offset in [0, 640, 1283, 1 << 40] {
        read.push(at(offset), Epoch(7), 100);
    }
    read.push(RemotePtr::new(RegionId(4), 8), Epoch(9), 8);
    write.push(at(128), Epoch(7), b"a list of neighbours");
    write.push_word(at(8), Epoch(7), 42);
    let puts: [&dyn Fn(&mut BytesMut); 9] = [
        &|out| frame::put_read(out, 1, &read),
        &|out| frame::put_write(out, 2, &write),
        &|out| frame::put_compare_swap(out, 3, word, 1, 2),
        &|out| frame::put_fetch_add(out, 4, word, 5),
        &|out| frame::put_alive(out, 5, SessionId(6)),
        &|out| frame::put_message(out, Kind::Send, 6, b"hello"),
        &|out| frame::put_credit(out, 300),
        &|out| frame::put_word(out, 7, u64::MAX),
        &|out| {
            frame::put_flag(out, 8, true);
            frame::put_empty(out, Kind::Ping, 9);
            frame::put_empty(out, Kind::Done, 9);
        },
    ];
    let hello = frame::Hello {
        version: shine_common::wire::PROTOCOL_VERSION,
        incarnation: Incarnation(5),
        mn: "mn-0".into(),
    };
    let greeting: &dyn Fn(&mut BytesMut) = &|out| {
        frame::put_hello(out, &hello);
        frame::put_welcome(out, SessionId(1), 5000);
    };
    let mut seeds = Vec::new();
    for put in puts.into_iter().chain([greeting]) {
        let mut out = BytesMut::from(&[3u8][..]);
        put(&mut out);
        seeds.push(out.to_vec());
    }
    seeds
}

// ------------------------------------------------------------------------------------------------ messages

/// A control message; the first byte says which type is expected.
pub fn messages(data: &[u8]) {
    let Some((kind, bytes)) = data.split_first() else { return };
    macro_rules! message {
        ($type:ty) => {
            if let Some(message) = ended(decode::<$type>(bytes)) {
                // By text: a float of a message may be no number, which equals nothing.
                let again = decode::<$type>(&encode(&message)).expect("what was encoded is decoded");
                assert_eq!(format!("{message:?}"), format!("{again:?}"));
            }
        };
    }
    match kind % 7 {
        0 => message!(CnRequest),
        1 => message!(CnResponse),
        2 => message!(OracleRequest),
        3 => message!(OracleResponse),
        4 => message!(MnRequest),
        5 => message!(MnResponse),
        _ => message!(ClusterMap),
    }
}

fn message_seeds() -> Vec<Vec<u8>> {
    let search = CnRequest::Search {
        collection: "words".into(),
        target: Target::Vector(vec![7; 16]),
        k: 10,
        ef: 40,
        deadline_ms: 0,
        with_vectors: false,
    };
    let by_id = CnRequest::Get { collection: "words".into(), id: ExternalId::Num(u64::MAX), deadline_ms: 5 };
    let join = OracleRequest::Join {
        name: "mn-0".into(),
        role: Role::Mn,
        addr: "127.0.0.1:4000".into(),
        incarnation: Incarnation(9),
        regions: 4,
        region_bytes: 1 << 20,
    };
    let seed = |kind: u8, bytes: &[u8]| [&[kind], bytes].concat();
    vec![
        seed(0, &encode(&search)),
        seed(0, &encode(&by_id)),
        seed(1, &encode(&CnResponse::Done)),
        seed(2, &encode(&join)),
        seed(4, &encode(&MnRequest::Status)),
        seed(6, &encode(&ClusterMap::default())),
    ]
}

// --------------------------------------------------------------------------------------------------- lists

/// The bytes of a neighbour list as they may lie in remote memory; the first byte's lowest bit says on which level.
pub fn lists(data: &[u8]) {
    let Some((kind, bytes)) = data.split_first() else { return };
    // A stride is that of its collection: a whole number of entries behind 8 bytes.
    let entry = if kind & 1 == 0 { 4 } else { 8 };
    let usable = bytes.len() - (bytes.len() % entry);
    if usable < 8 {
        return;
    }
    let bytes = &bytes[..usable];
    let mut again = vec![0; usable];
    if kind & 1 == 0 {
        let Some(list) = ended(ListView::parse_base(bytes)) else { return };
        let nodes: Vec<NodeId> = list.nodes().collect();
        encode_base_list(&mut again, list.version(), &nodes);
        let end = 8 + entry * nodes.len();
        assert_eq!(again[..end], bytes[..end]);
    } else {
        let Some(list) = ended(ListView::parse_upper(bytes)) else { return };
        let nodes: Vec<(NodeId, u32)> = list.upper_nodes().collect();
        encode_upper_list(&mut again, list.version(), &nodes);
        let end = 8 + entry * nodes.len();
        assert_eq!(again[..end], bytes[..end]);
    }
}

fn list_seeds() -> Vec<Vec<u8>> {
    let mut base = vec![0; 1 + 136];
    encode_base_list(&mut base[1..], 3, &[NodeId(1), NodeId(2), NodeId(u32::MAX)]);
    let mut upper = vec![1; 1 + 136];
    encode_upper_list(&mut upper[1..], 1, &[(NodeId(1), 5), (NodeId(9), 0)]);
    vec![base, upper, vec![0; 137]]
}

// --------------------------------------------------------------------------------------------------- files

/// Runs `read` on a file of these bytes.
fn with_file(bytes: &[u8], extension: &str, read: impl FnOnce(&Path)) {
    let mut file = tempfile::Builder::new()
        .suffix(&format!(".{extension}"))
        .tempfile()
        .expect("the temporary folder can be written");
    file.write_all(bytes).and_then(|()| file.flush()).expect("the temporary folder has room");
    read(file.path());
}

/// A file of vectors; the first byte says in which format.
pub fn vectors(data: &[u8]) {
    let Some((kind, bytes)) = data.split_first() else { return };
    let format = of_content(*kind, |content| content != Content::Truth);
    with_file(bytes, format.extension(), |path| {
        let Some(vectors) = ended(Vectors::open(path)) else { return };
        assert!(vectors.rows() > 0 && vectors.dim() > 0);
        let bytes: usize = vectors.iter().map(<[u8]>::len).sum();
        assert_eq!(bytes, vectors.rows() * vectors.row_bytes());
        let _ = ended(vectors.check_finite());
        for metric in [Metric::L2, Metric::Ip, Metric::Cosine] {
            let _ = ended(vectors.check_for(metric));
        }
        let first = Vectors::open_first(path, 1).expect("the first of rows that are all good");
        assert_eq!(first.row(0), vectors.row(0));
    });
}

/// A file of ground truth; the first byte says in which format, the second how many rows the base has.
pub fn truth(data: &[u8]) {
    let [kind, rows, bytes @ ..] = data else { return };
    let format = of_content(*kind, |content| content == Content::Truth);
    with_file(bytes, format.extension(), |path| {
        let Some(truth) = ended(Truth::open(path, usize::from(*rows))) else { return };
        for query in 0..truth.queries() {
            assert!(truth.ids(query).iter().all(|id| *id < u32::from(*rows)));
        }
    });
}

fn of_content(kind: u8, wanted: impl Fn(Content) -> bool) -> Format {
    let formats: Vec<_> = Format::ALL.into_iter().filter(|format| wanted(format.content())).collect();
    formats[usize::from(kind) % formats.len()]
}

fn vector_seeds() -> Vec<Vec<u8>> {
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let one = 1f32.to_bits();
    let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }";
    let npy = [
        b"\x93NUMPY\x01\x00".as_slice(),
        &(118u16).to_le_bytes(),
        format!("{header:<117}\n").as_bytes(),
        &words(&[one; 6]),
    ]
    .concat();
    // In the order of `Format::ALL` without the formats of truth.
    let bodies = [
        words(&[3, one, one, one, 3, one, 0, one]),
        [&words(&[3])[..], &[1, 2, 3], &words(&[3]), &[4, 5, 6]].concat(),
        words(&[2, 3, one, one, one, one, one, 0]),
        [&words(&[2, 3])[..], &[0, 0x3c].repeat(6)].concat(),
        [&words(&[2, 3])[..], &[1, 2, 3, 4, 5, 6]].concat(),
        [&words(&[2, 3])[..], &[1, 2, 3, 4, 5, 255]].concat(),
        npy,
    ];
    bodies.iter().zip(0u8..).map(|(body, kind)| [&[kind], &body[..]].concat()).collect()
}

fn truth_seeds() -> Vec<Vec<u8>> {
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let one = 1f32.to_bits();
    vec![
        [&[0, 9][..], &words(&[2, 5, 1, 2, 3, 4])].concat(),
        [&[0, 9][..], &words(&[2, 5, 1, 2, 3, 4])].concat(),
        [&[1, 9][..], &words(&[2, 2, 1, 2, 3, 4])].concat(),
        [&[1, 9][..], &words(&[2, 2, 1, 2, 3, 4, one, one, one, one])].concat(),
    ]
}

/// Where the header of a graph file has its own checksum, and the first section's; sections follow every 24 bytes.
const HEADER_SUM: Range<usize> = 16..24;
const SECTIONS_AT: usize = 176;
const GRAPH_HEADER_BYTES: usize = 4096;

/// A graph file: as it is, and with its checksums made right, so that what lies behind them is reached too.
pub fn graph(data: &[u8]) {
    let read = |path: &Path| {
        let Some(graph) = ended(GraphFile::open(path, Check::Checksums)) else { return };
        if ended(graph.verify()).is_none() {
            return;
        }
        for node in (0..graph.rows()).map(NodeId) {
            let meta = graph.meta(node).expect("a node that was checked");
            graph.id(node).expect("an id that was checked");
            assert_eq!(graph.vector(node).len() as u64, graph.params().vector_bytes());
            assert!(graph.links(node).iter().all(|link| link.get() < graph.rows()));
            for level in 0..u32::from(meta.level) {
                graph.upper_links(meta.upper + level);
            }
        }
    };
    with_file(data, "graph", read);
    if let Some(sealed) = sealed(data) {
        with_file(&sealed, "graph", read);
    }
}

/// The file with checksums that match its content; `None` if its own header says that it has none.
fn sealed(data: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = data.to_vec();
    let word = |bytes: &[u8], at: usize| -> Option<usize> {
        usize::try_from(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?)).ok()
    };
    let starts: Vec<usize> =
        (0..5).map(|section| word(&bytes, SECTIONS_AT + 24 * section)).collect::<Option<_>>()?;
    for section in 0..5 {
        let end = starts.get(section + 1).copied().unwrap_or(bytes.len());
        let sum = xxh3_64(bytes.get(starts[section]..end)?);
        bytes[SECTIONS_AT + 24 * section + 16..][..8].copy_from_slice(&sum.to_le_bytes());
    }
    bytes[HEADER_SUM].fill(0);
    let sum = xxh3_64(bytes.get(..GRAPH_HEADER_BYTES)?);
    bytes[HEADER_SUM].copy_from_slice(&sum.to_le_bytes());
    Some(bytes)
}

fn graph_seeds() -> Vec<Vec<u8>> {
    [false, true].map(|has_ids| small_graph(has_ids).expect("a small graph can be written")).to_vec()
}

/// Five nodes of three i8, of which the third is on level 1 as the second is.
fn small_graph(has_ids: bool) -> Result<Vec<u8>, Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("seed.graph");
    let info = GraphInfo {
        dtype: DType::I8,
        metric: Metric::L2,
        dim: 3,
        m: 2,
        ef_construction: 10,
        rows: 5,
        has_ids,
        upper_slots: 2,
        entry: EntryPoint { node: NodeId(1), level: 1 },
        build: BuildInfo { builder: "native".into(), threads: 1, ..BuildInfo::default() },
    };
    let mut writer = GraphWriter::create(&path, info)?;
    for row in 0..5u32 {
        let (level, upper) = match row {
            1 => (1, 0),
            2 => (1, 1),
            _ => (0, 0),
        };
        writer.push_meta(NodeMeta { state: NodeState::Live, level, is_uuid: false, upper })?;
    }
    if has_ids {
        for row in 0..5 {
            writer.push_id(ExternalId::Num(row * 3))?;
        }
    }
    for row in 0..5u8 {
        writer.push_vector(&[row, 0, 255 - row])?;
    }
    for row in 0..5u32 {
        writer.push_list(&[NodeId((row + 1) % 5), NodeId((row + 4) % 5)])?;
    }
    writer.push_upper(Some(&[(NodeId(2), 1)]))?;
    writer.push_upper(Some(&[(NodeId(1), 0)]))?;
    writer.finish()?;
    Ok(std::fs::read(&path)?)
}

// --------------------------------------------------------------------------------------------------- seeds

/// A target: its name, what it runs, and inputs to start from.
#[derive(Debug, Clone)]
pub struct FuzzTarget {
    /// Name, as that of the binary without `fuzz-`.
    pub name: &'static str,
    /// What it runs.
    pub run: fn(&[u8]),
    /// Inputs that are accepted, to start from.
    pub seeds: Vec<Vec<u8>>,
}

/// All targets.
pub fn targets() -> Vec<FuzzTarget> {
    let target = |name, run, seeds| FuzzTarget { name, run, seeds };
    vec![
        target("frames", frames, frame_seeds()),
        target("messages", messages, message_seeds()),
        target("lists", lists, list_seeds()),
        target("vectors", vectors, vector_seeds()),
        target("truth", truth, truth_seeds()),
        target("graph", graph, graph_seeds()),
    ]
}

#[cfg(test)]
mod tests {
    use rand::rngs::SmallRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    /// A seed with some bytes changed, cut out, or doubled.
    fn mutated(seed: &[u8], rng: &mut SmallRng) -> Vec<u8> {
        let mut bytes = seed.to_vec();
        for _ in 0..rng.random_range(1..8) {
            if bytes.is_empty() {
                break;
            }
            let at = rng.random_range(0..bytes.len());
            match rng.random_range(0..6) {
                0 => bytes[at] ^= 1 << rng.random_range(0..8),
                1 => bytes[at] = [0, 1, 127, 128, 255][rng.random_range(0..5)],
                2 => bytes.truncate(at),
                3 => drop(bytes.remove(at)),
                4 => bytes.insert(at, rng.random()),
                _ => {
                    let end = (at + 8).min(bytes.len());
                    bytes[at..end].fill(255);
                }
            }
        }
        bytes
    }

    #[test]
    fn seeds_and_their_mutations_end_in_a_value_or_an_error() {
        for target in targets() {
            let runs = if matches!(target.name, "vectors" | "truth" | "graph") { 300 } else { 5_000 };
            for (number, seed) in target.seeds.iter().enumerate() {
                (target.run)(seed);
                let mut rng = SmallRng::seed_from_u64(number as u64);
                for _ in 0..runs {
                    (target.run)(&mutated(seed, &mut rng));
                }
            }
        }
    }

    #[test]
    fn the_seeds_are_accepted() {
        for seed in frame_seeds() {
            assert!(!frames_of(&seed[1..], 2).is_empty());
        }
        for seed in graph_seeds() {
            with_file(&seed, "graph", |path| {
                GraphFile::open(path, Check::Checksums).unwrap().verify().unwrap();
            });
            assert_eq!(sealed(&seed).unwrap(), seed, "the offsets of checksums are those of the format");
        }
        for seed in vector_seeds() {
            let format = of_content(seed[0], |content| content != Content::Truth);
            with_file(&seed[1..], format.extension(), |path| drop(Vectors::open(path).unwrap()));
        }
        for seed in truth_seeds() {
            let format = of_content(seed[0], |content| content == Content::Truth);
            with_file(&seed[2..], format.extension(), |path| {
                drop(Truth::open(path, seed[1].into()).unwrap())
            });
        }
    }
}
