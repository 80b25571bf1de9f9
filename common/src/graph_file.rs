//! A built graph in one file, in the encoding of remote memory ([`crate::layout`]), so that loading is copying.
//!
//! ```text
//!       0 ┌──────────────┐ header: magic, version, own checksum, file size, parameters, entry point, how it was
//!         │ header       │ built, and where each section lies with its size and checksum; zeroes to 4096
//!    4096 ├──────────────┤
//!         │ metas        │ rows × u64           node meta word ([`NodeMeta`]), state live
//!         ├──────────────┤
//!         │ ids          │ rows × 16 B          external id, low word first; absent: the id is the row number
//!         ├──────────────┤
//!         │ vectors      │ rows × vector stride native elements, zeroes to a multiple of 8
//!         ├──────────────┤
//!         │ lists        │ rows × list stride   level-0 lists
//!         ├──────────────┤
//!         │ upper lists  │ upper slots × upper stride; slots that no node owns are zeroes
//!         └──────────────┘
//! ```
//!
//! Every section starts at a multiple of 4096; the zeroes before the next one count as its own, so that the section
//! checksums and the header's cover every byte of the file. Numbers are little-endian. NodeId = row. Upper slots are
//! given out in row order; the lists of one node follow each other and never straddle a multiple of [`UPPER_SLOTS`].
//!
//! Invariant: nothing is believed before it is checked. The header is checked against itself and the size of the
//! file before anything else is touched, sections against their checksums when the file is opened (unless asked not
//! to), and what lists and metas *say* by [`GraphFile::verify`]. No bytes, however made, lead to a panic.

use std::collections::HashSet;
use std::fmt;
use std::fs::{self, File};
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::ids::{ExternalId, NodeId};
use crate::layout::{
    CollectionParams, EntryPoint, LAYOUT_VERSION, ListView, NodeMeta, NodeState, UPPER_SLOTS,
    encode_base_list, encode_upper_list, id_from_words, id_words,
};
use crate::metric::{DType, Metric, validate};

/// First bytes of every graph file.
pub const MAGIC: [u8; 8] = *b"SHINEGRF";
/// Version of this format.
pub const VERSION: u32 = 1;
/// Bytes of the header, and what sections are aligned to.
pub const HEADER_BYTES: usize = 4096;
/// Longest builder name, in bytes.
pub const BUILDER_NAME_MAX: usize = 32;

/// A part of the file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Section {
    /// Node meta words.
    Metas,
    /// External ids.
    Ids,
    /// Vectors.
    Vectors,
    /// Level-0 lists.
    Lists,
    /// Upper lists.
    Upper,
}

impl Section {
    const ALL: [Self; 5] = [Self::Metas, Self::Ids, Self::Vectors, Self::Lists, Self::Upper];

    /// Bytes of one item and number of items.
    fn shape(self, info: &GraphInfo, params: &CollectionParams) -> (u64, u64) {
        let rows = u64::from(info.rows);
        match self {
            Self::Metas => (8, rows),
            Self::Ids => (16, if info.has_ids { rows } else { 0 }),
            Self::Vectors => (params.vector_stride(), rows),
            Self::Lists => (params.list_stride(), rows),
            Self::Upper => (params.upper_stride(), info.upper_slots.into()),
        }
    }
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Metas => "metas",
            Self::Ids => "ids",
            Self::Vectors => "vectors",
            Self::Lists => "lists",
            Self::Upper => "upper lists",
        })
    }
}

/// How a graph was made.
#[derive(Clone, PartialEq, Debug, Default, serde::Serialize)]
pub struct BuildInfo {
    /// Name of the builder, at most [`BUILDER_NAME_MAX`] bytes.
    pub builder: String,
    /// Seed of the level draw.
    pub seed: u64,
    /// Wall time of the build in seconds, without reading and writing files.
    pub seconds: f64,
    /// Threads that built.
    pub threads: u32,
    /// Nodes that no path from the entry point reached after the build and that were linked.
    pub orphans_linked: u32,
    /// Hash of the base rows, for caches of built graphs.
    pub data_hash: [u8; 32],
}

/// What a graph file says about its graph.
#[derive(Clone, PartialEq, Debug)]
pub struct GraphInfo {
    /// Element type.
    pub dtype: DType,
    /// Metric that the graph was built for.
    pub metric: Metric,
    /// Elements per vector.
    pub dim: u32,
    /// Links per node and level above 0; twice that on level 0.
    pub m: u32,
    /// Beam of the build.
    pub ef_construction: u32,
    /// Number of nodes, at least 1.
    pub rows: u32,
    /// Whether external ids are stored; else a node's id is its row number.
    pub has_ids: bool,
    /// Number of upper slots, unowned ones included.
    pub upper_slots: u32,
    /// Where searches start.
    pub entry: EntryPoint,
    /// How it was made.
    pub build: BuildInfo,
}

impl GraphInfo {
    /// Parameters of a collection for this graph.
    ///
    /// # Errors
    /// Names the first parameter out of range.
    pub fn params(&self, first_regions: u16) -> Result<CollectionParams, crate::layout::BadParam> {
        CollectionParams::new(
            self.dtype,
            self.metric,
            self.dim,
            self.m,
            self.ef_construction,
            self.rows.into(),
            first_regions,
        )
    }
}

/// Gives out upper slots in row order: `*next` is the first slot not given out yet. Returns the index of the
/// level-1 list of a node of `level`; 0 for level 0, which needs none. `None` when the slots are used up.
pub fn place_upper(next: &mut u32, level: u8) -> Option<u32> {
    let level = u32::from(level);
    if level == 0 {
        return Some(0);
    }
    let mut at = *next;
    if at % UPPER_SLOTS + level > UPPER_SLOTS {
        at = at.checked_next_multiple_of(UPPER_SLOTS)?;
    }
    *next = at.checked_add(level)?;
    Some(at)
}

/// What is wrong with a graph file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Defect {
    /// The system refused.
    #[error("{doing}: {source}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// Why not.
        source: std::io::Error,
    },
    /// Shorter than a header.
    #[error("it has {found} bytes, expected a header of {HEADER_BYTES} bytes at least")]
    NoHeader {
        /// Size of the file.
        found: u64,
    },
    /// Some other file.
    #[error("it does not start with '{}': not a graph file", String::from_utf8_lossy(&MAGIC))]
    NotAGraphFile,
    /// Written by another version of this software.
    #[error("it has {what} {found}, expected {expected}: build it again with this version")]
    Version {
        /// Which of the versions.
        what: &'static str,
        /// In the file.
        found: u64,
        /// Of this software.
        expected: u64,
    },
    /// The header does not match its own checksum.
    #[error("the header is damaged: its checksum does not match")]
    HeaderChecksum,
    /// The header says what cannot be.
    #[error("header field {field} is {found}, expected {expected}")]
    Field {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        found: String,
        /// What would be accepted.
        expected: String,
    },
    /// Truncated, or with something behind its end.
    #[error("it has {found} bytes, expected {expected} by its header")]
    Size {
        /// Size of the file.
        found: u64,
        /// Size that follows from the header.
        expected: u64,
    },
    /// A section does not match its checksum.
    #[error("section {section} is damaged: its checksum does not match")]
    SectionChecksum {
        /// Which one.
        section: Section,
    },
    /// A node says what cannot be.
    #[error("section {section}, node {node}: {problem}")]
    Node {
        /// Where it is written.
        section: Section,
        /// Whose.
        node: NodeId,
        /// What was found and what was expected.
        problem: String,
    },
}

/// A graph file that cannot be used, or written.
#[derive(Debug, thiserror::Error)]
#[error("graph file {}: {defect}", path.display())]
pub struct GraphFileError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub defect: Defect,
}

fn at(path: &Path) -> impl Fn(Defect) -> GraphFileError {
    move |defect| GraphFileError { path: path.to_owned(), defect }
}

fn io(doing: &'static str) -> impl Fn(std::io::Error) -> Defect {
    move |source| Defect::Io { doing, source }
}

/// A section as the header describes it.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy, Default)]
#[repr(C)]
struct RawSection {
    offset: U64,
    bytes: U64,
    /// XXH3 over the section and the zeroes up to the next.
    checksum: U64,
}

/// The header as it lies in the file.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 8],
    version: U32,
    header_bytes: U32,
    /// XXH3 over the 4096 header bytes with this field zero.
    checksum: U64,
    layout_version: U64,
    file_bytes: U64,
    dtype: u8,
    metric: u8,
    has_ids: u8,
    builder_len: u8,
    dim: U32,
    m: U32,
    m0: U32,
    ef_construction: U32,
    threads: U32,
    rows: U64,
    upper_slots: U64,
    /// [`EntryPoint`] word.
    entry: U64,
    seed: U64,
    /// Bits of an f64.
    build_seconds: U64,
    orphans_linked: U64,
    data_hash: [u8; 32],
    builder: [u8; BUILDER_NAME_MAX],
    sections: [RawSection; 5],
    unused: [u8; HEADER_BYTES - 296],
}

const _: () = assert!(size_of::<RawHeader>() == HEADER_BYTES);

const DTYPES: [DType; 4] = [DType::F32, DType::F16, DType::U8, DType::I8];
const METRICS: [Metric; 3] = [Metric::L2, Metric::Ip, Metric::Cosine];

impl RawHeader {
    fn new(info: &GraphInfo, params: &CollectionParams, checksums: [u64; 5]) -> Self {
        let extents = extents(info, params);
        let sections = std::array::from_fn(|i| RawSection {
            offset: extents[i].start.into(),
            bytes: (extents[i].end - extents[i].start).into(),
            checksum: checksums[i].into(),
        });
        let name = info.build.builder.as_bytes();
        let mut builder = [0; BUILDER_NAME_MAX];
        builder[..name.len()].copy_from_slice(name);
        let position = |found: Option<usize>| found.expect("every value is in the table") as u8;
        let mut header = Self {
            magic: MAGIC,
            version: VERSION.into(),
            header_bytes: (HEADER_BYTES as u32).into(),
            checksum: 0.into(),
            layout_version: LAYOUT_VERSION.into(),
            file_bytes: extents[4].end.into(),
            dtype: position(DTYPES.iter().position(|d| *d == info.dtype)),
            metric: position(METRICS.iter().position(|m| *m == info.metric)),
            has_ids: info.has_ids.into(),
            builder_len: name.len() as u8,
            dim: info.dim.into(),
            m: info.m.into(),
            m0: params.m0.into(),
            ef_construction: info.ef_construction.into(),
            threads: info.build.threads.into(),
            rows: u64::from(info.rows).into(),
            upper_slots: u64::from(info.upper_slots).into(),
            entry: info.entry.to_word().into(),
            seed: info.build.seed.into(),
            build_seconds: info.build.seconds.to_bits().into(),
            orphans_linked: u64::from(info.build.orphans_linked).into(),
            data_hash: info.build.data_hash,
            builder,
            sections,
            unused: [0; HEADER_BYTES - 296],
        };
        header.checksum = header.sum().into();
        header
    }

    fn sum(&self) -> u64 {
        xxh3_64(Self { checksum: 0.into(), ..*self }.as_bytes())
    }

    /// Checks everything that a header can be checked for.
    fn parse(&self, file_bytes: u64) -> Result<(GraphInfo, CollectionParams), Defect> {
        if self.magic != MAGIC {
            return Err(Defect::NotAGraphFile);
        }
        for (what, found, expected) in [
            ("format version", self.version.get().into(), VERSION.into()),
            ("layout version", self.layout_version.get(), LAYOUT_VERSION),
        ] {
            if found != expected {
                return Err(Defect::Version { what, found, expected });
            }
        }
        if self.checksum.get() != self.sum() {
            return Err(Defect::HeaderChecksum);
        }
        let field = |ok: bool, field, found: u64, expected: String| {
            if ok { Ok(()) } else { Err(Defect::Field { field, found: found.to_string(), expected }) }
        };
        let below = |field_name, value: u64, low: u64, high: u64| {
            field((low..=high).contains(&value), field_name, value, format!("{low} to {high}"))
        };
        below("header_bytes", self.header_bytes.get().into(), HEADER_BYTES as u64, HEADER_BYTES as u64)?;
        below("dtype", self.dtype.into(), 0, DTYPES.len() as u64 - 1)?;
        below("metric", self.metric.into(), 0, METRICS.len() as u64 - 1)?;
        below("has_ids", self.has_ids.into(), 0, 1)?;
        below("rows", self.rows.get(), 1, u64::from(u32::MAX) - 1)?;
        below("upper_slots", self.upper_slots.get(), 0, u32::MAX.into())?;
        below("orphans_linked", self.orphans_linked.get(), 0, self.rows.get())?;
        below("builder_len", self.builder_len.into(), 0, BUILDER_NAME_MAX as u64)?;
        let builder = std::str::from_utf8(&self.builder[..usize::from(self.builder_len)]).map_err(|_| {
            Defect::Field {
                field: "builder",
                found: format!("{:x?}", self.builder),
                expected: "UTF-8".into(),
            }
        })?;
        let word = self.entry.get();
        let entry = EntryPoint::from_word(word)
            .filter(|entry| entry.to_word() == word && u64::from(entry.node.0) < self.rows.get())
            .ok_or_else(|| Defect::Field {
                field: "entry",
                found: format!("{word:#x}"),
                expected: format!("the word of a node below {}", self.rows),
            })?;
        let seconds = f64::from_bits(self.build_seconds.get());
        field(
            seconds.is_finite() && seconds >= 0.0,
            "build_seconds",
            self.build_seconds.get(),
            "a duration".into(),
        )?;
        let info = GraphInfo {
            dtype: DTYPES[usize::from(self.dtype)],
            metric: METRICS[usize::from(self.metric)],
            dim: self.dim.get(),
            m: self.m.get(),
            ef_construction: self.ef_construction.get(),
            rows: self.rows.get() as u32,
            has_ids: self.has_ids == 1,
            upper_slots: self.upper_slots.get() as u32,
            entry,
            build: BuildInfo {
                builder: builder.to_owned(),
                seed: self.seed.get(),
                seconds,
                threads: self.threads.get(),
                orphans_linked: self.orphans_linked.get() as u32,
                data_hash: self.data_hash,
            },
        };
        let params = checked_params(&info)?;
        let m0 = u64::from(params.m0);
        below("m0", self.m0.get().into(), m0, m0)?;
        let extents = extents(&info, &params);
        for (section, (raw, extent)) in Section::ALL.iter().zip(self.sections.iter().zip(&extents)) {
            if raw.offset.get() != extent.start || raw.bytes.get() != extent.end - extent.start {
                return Err(Defect::Field {
                    field: "sections",
                    found: format!("{section} of {} bytes at {}", raw.bytes, raw.offset),
                    expected: format!("{} bytes at {}", extent.end - extent.start, extent.start),
                });
            }
        }
        let expected = extents[4].end;
        below("file_bytes", self.file_bytes.get(), expected, expected)?;
        if file_bytes != expected {
            return Err(Defect::Size { found: file_bytes, expected });
        }
        Ok((info, params))
    }
}

/// The parameters of a graph, and with them everything in `info` that the writer must check too.
fn checked_params(info: &GraphInfo) -> Result<CollectionParams, Defect> {
    let params = info.params(1).map_err(|bad| Defect::Field {
        field: bad.field,
        found: bad.given.to_string(),
        expected: bad.expected,
    })?;
    let field = |ok: bool, field, found: String, expected: String| {
        if ok { Ok(()) } else { Err(Defect::Field { field, found, expected }) }
    };
    let (name, level) = (&info.build.builder, info.entry.level);
    field(
        name.len() <= BUILDER_NAME_MAX,
        "builder",
        name.clone(),
        format!("{BUILDER_NAME_MAX} bytes at most"),
    )?;
    field(info.rows < u32::MAX, "rows", info.rows.to_string(), format!("below {}", u32::MAX))?;
    field(
        info.entry.node.0 < info.rows,
        "entry",
        info.entry.node.to_string(),
        format!("a node below {}", info.rows),
    )?;
    field(
        level <= crate::layout::LEVEL_MAX && u32::from(level) <= info.upper_slots,
        "entry level",
        level.to_string(),
        format!("at most {} and the number of upper slots, {}", crate::layout::LEVEL_MAX, info.upper_slots),
    )?;
    Ok(params)
}

/// First and one-past-last byte of every section. Cannot overflow: rows and slots are below 2^32, strides below 2^18.
fn extents(info: &GraphInfo, params: &CollectionParams) -> [Range<u64>; 5] {
    let mut next = HEADER_BYTES as u64;
    Section::ALL.map(|section| {
        let (bytes, count) = section.shape(info, params);
        let start = next.next_multiple_of(HEADER_BYTES as u64);
        next = start + bytes * count;
        start..next
    })
}

/// Writes a graph file: a temporary file beside the wanted one, which takes its name only when all of it is on disk.
///
/// Items are pushed section by section in the order of the file, `rows` of each (and `upper_slots` of upper lists).
pub struct GraphWriter {
    path: PathBuf,
    temporary: PathBuf,
    file: BufWriter<File>,
    info: GraphInfo,
    params: CollectionParams,
    extents: [Range<u64>; 5],
    /// Number of sections finished.
    section: usize,
    position: u64,
    hash: Xxh3Default,
    checksums: [u64; 5],
    buffer: Vec<u8>,
}

impl GraphWriter {
    /// Starts a file.
    ///
    /// # Errors
    /// If `info` cannot be written, or the temporary file cannot be made.
    pub fn create(path: &Path, info: GraphInfo) -> Result<Self, GraphFileError> {
        let params = checked_params(&info).map_err(at(path))?;
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.part", std::process::id()));
        let temporary = path.with_file_name(name);
        let file = File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .open(&temporary)
            .map_err(io("creating the temporary file beside it"))
            .map_err(at(path))?;
        let extents = extents(&info, &params);
        let mut writer = Self {
            path: path.to_owned(),
            temporary,
            file: BufWriter::with_capacity(1 << 20, file),
            info,
            params,
            extents,
            section: 0,
            position: 0,
            hash: Xxh3Default::new(),
            checksums: [0; 5],
            buffer: Vec::new(),
        };
        // The header's place; what stands there before `finish` is no header.
        writer.raw(&[0; HEADER_BYTES]).map_err(at(path))?;
        writer.hash = Xxh3Default::new();
        writer.close_full_sections().map_err(at(path))?;
        Ok(writer)
    }

    /// Next node's meta word.
    ///
    /// # Errors
    /// If the disk refuses.
    ///
    /// # Panics
    /// If metas are not what the file needs next, as everywhere here.
    pub fn push_meta(&mut self, meta: NodeMeta) -> Result<(), GraphFileError> {
        self.push(Section::Metas, |out| out.copy_from_slice(&meta.to_word().to_le_bytes()))
    }

    /// Next node's external id; its meta says which kind it is.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn push_id(&mut self, id: ExternalId) -> Result<(), GraphFileError> {
        let [low, high] = id_words(id);
        self.push(Section::Ids, |out| {
            out[..8].copy_from_slice(&low.to_le_bytes());
            out[8..].copy_from_slice(&high.to_le_bytes());
        })
    }

    /// Next node's vector, in its native type.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn push_vector(&mut self, vector: &[u8]) -> Result<(), GraphFileError> {
        assert_eq!(vector.len() as u64, self.params.vector_bytes(), "a vector has its collection's size");
        self.push(Section::Vectors, |out| out[..vector.len()].copy_from_slice(vector))
    }

    /// Next node's level-0 list.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn push_list(&mut self, nodes: &[NodeId]) -> Result<(), GraphFileError> {
        self.push(Section::Lists, |out| encode_base_list(out, 1, nodes))
    }

    /// Next upper list: `None` for a slot that no node owns.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn push_upper(&mut self, nodes: Option<&[(NodeId, u32)]>) -> Result<(), GraphFileError> {
        self.push(Section::Upper, |out| {
            if let Some(nodes) = nodes {
                encode_upper_list(out, 1, nodes);
            }
        })
    }

    /// Writes the header, waits for the disk, and gives the file its name.
    ///
    /// # Errors
    /// If the disk refuses.
    ///
    /// # Panics
    /// If items are missing.
    pub fn finish(mut self) -> Result<(), GraphFileError> {
        assert_eq!(
            self.section,
            Section::ALL.len(),
            "every section of a graph file is written before its header"
        );
        let header = RawHeader::new(&self.info, &self.params, self.checksums);
        let done = (|| {
            self.file.seek(SeekFrom::Start(0)).map_err(io("seeking"))?;
            self.file.write_all(header.as_bytes()).map_err(io("writing"))?;
            self.file.flush().map_err(io("writing"))?;
            self.file.get_ref().sync_all().map_err(io("syncing"))?;
            fs::rename(&self.temporary, &self.path).map_err(io("renaming the temporary file"))?;
            let folder = self.path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
            File::open(folder).and_then(|folder| folder.sync_all()).map_err(io("syncing its folder"))
        })();
        done.map_err(at(&self.path))
    }

    fn push(&mut self, section: Section, write: impl FnOnce(&mut [u8])) -> Result<(), GraphFileError> {
        assert_eq!(Section::ALL.get(self.section), Some(&section), "sections are written in order");
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        buffer.resize(section.shape(&self.info, &self.params).0 as usize, 0);
        write(&mut buffer);
        let done = self.raw(&buffer).and_then(|()| self.close_full_sections());
        self.buffer = buffer;
        done.map_err(at(&self.path))
    }

    fn raw(&mut self, bytes: &[u8]) -> Result<(), Defect> {
        self.hash.update(bytes);
        self.position += bytes.len() as u64;
        self.file.write_all(bytes).map_err(io("writing"))
    }

    /// Pads and seals every section that is complete, empty ones included.
    fn close_full_sections(&mut self) -> Result<(), Defect> {
        while let Some(extent) = self.extents.get(self.section)
            && self.position == extent.end
        {
            if let Some(next) = self.extents.get(self.section + 1) {
                let zeroes = next.start - self.position;
                self.raw(&vec![0; zeroes as usize])?;
            }
            self.checksums[self.section] = self.hash.digest();
            self.hash = Xxh3Default::new();
            self.section += 1;
        }
        Ok(())
    }
}

impl fmt::Debug for GraphWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GraphWriter({}, section {}, byte {})", self.path.display(), self.section, self.position)
    }
}

impl Drop for GraphWriter {
    fn drop(&mut self) {
        // Gone already after `finish`. Nobody can be told of a failure here, and a leftover does no harm.
        let _ = fs::remove_file(&self.temporary);
    }
}

/// Entry of an upper list as it lies in the file.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy, Debug)]
#[repr(C)]
pub struct UpperLink {
    /// The neighbour.
    pub node: U32,
    /// Index of its level-1 list.
    pub upper: U32,
}

/// The entries of an encoded list: as many as it says, as far as it reaches.
#[inline]
fn entries(list: &[u8], entry_bytes: usize) -> &[u8] {
    let count = usize::from(u16::from_le_bytes([list[6], list[7]])).min((list.len() - 8) / entry_bytes);
    &list[8..8 + count * entry_bytes]
}

/// How much of a file is checked when it is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Check {
    /// The header, and the size of the file against it: for a first look.
    Header,
    /// Also every section against its checksum, which reads the whole file.
    Checksums,
}

/// A graph file, mapped into memory.
#[derive(Debug)]
pub struct GraphFile {
    path: PathBuf,
    map: Mmap,
    info: GraphInfo,
    params: CollectionParams,
    extents: [Range<u64>; 5],
    fingerprint: u64,
}

impl GraphFile {
    /// Opens and checks a file.
    ///
    /// # Errors
    /// Says what was expected.
    pub fn open(path: &Path, check: Check) -> Result<Self, GraphFileError> {
        Self::open_inner(path, check).map_err(at(path))
    }

    fn open_inner(path: &Path, check: Check) -> Result<Self, Defect> {
        let mut file = File::open(path).map_err(io("opening it"))?;
        let metadata = file.metadata().map_err(io("asking for its size"))?;
        let found = metadata.len();
        if !metadata.is_file() || found < HEADER_BYTES as u64 {
            return Err(Defect::NoHeader { found });
        }
        let mut bytes = vec![0; HEADER_BYTES];
        file.read_exact(&mut bytes).map_err(io("reading its header"))?;
        let header = RawHeader::read_from_bytes(&bytes).expect("the buffer has the size of a header");
        let (info, params) = header.parse(found)?;
        // SAFETY: the map is read only, and graph files are never changed in place: `GraphWriter` renames a complete
        // file over the old one, whose pages stay. Whoever truncates one by other means stops this process (SIGBUS).
        let map = unsafe { Mmap::map(&file) }.map_err(io("mapping it"))?;
        if (map.len() as u64) < found {
            return Err(Defect::Size { found: map.len() as u64, expected: found });
        }
        let fingerprint = header.checksum.get().max(1);
        let extents = extents(&info, &params);
        let graph = Self { path: path.to_owned(), map, extents, info, params, fingerprint };
        if check == Check::Checksums {
            for (i, section) in Section::ALL.into_iter().enumerate() {
                let end = graph.extents.get(i + 1).map_or(graph.extents[i].end, |next| next.start);
                let bytes = &graph.map[graph.extents[i].start as usize..end as usize];
                if xxh3_64(bytes) != header.sections[i].checksum.get() {
                    return Err(Defect::SectionChecksum { section });
                }
            }
        }
        Ok(graph)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the header says.
    pub fn info(&self) -> &GraphInfo {
        &self.info
    }

    /// Tells files of different content apart; never 0. A hash of all that the header says, and it has the sections'
    /// checksums.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Parameters of a collection of exactly these rows on one region; strides are those of any collection with the
    /// same type, dimension and m.
    pub fn params(&self) -> &CollectionParams {
        &self.params
    }

    /// Number of nodes.
    pub fn rows(&self) -> u32 {
        self.info.rows
    }

    /// Bytes of items `range` of `section`.
    ///
    /// # Panics
    /// If the section has fewer, as all accessors here.
    fn items(&self, section: Section, range: Range<u32>) -> &[u8] {
        let (bytes, count) = section.shape(&self.info, &self.params);
        assert!(
            range.start <= range.end && u64::from(range.end) <= count,
            "items {range:?} of {count} in section {section}"
        );
        let start = self.extents[section as usize].start;
        let place = |item: u32| (start + bytes * u64::from(item)) as usize;
        &self.map[place(range.start)..place(range.end)]
    }

    /// Meta words of nodes `range`, unchecked: what a loader writes after [`Self::verify`].
    pub fn metas(&self, range: Range<u32>) -> impl ExactSizeIterator<Item = u64> {
        self.items(Section::Metas, range)
            .chunks_exact(8)
            .map(|w| u64::from_le_bytes(w.try_into().expect("8 bytes")))
    }

    /// Meta of `node`.
    ///
    /// # Errors
    /// If it is not that of a live node of this graph.
    pub fn meta(&self, node: NodeId) -> Result<NodeMeta, GraphFileError> {
        let word = self.metas(node.0..node.0 + 1).next().expect("one item");
        let meta = NodeMeta::from_word(word).filter(|meta| {
            meta.state == NodeState::Live
                && meta.level <= self.info.entry.level
                && (meta.level == 0
                    || u64::from(meta.upper) + u64::from(meta.level) <= u64::from(self.info.upper_slots)
                        && meta.upper % UPPER_SLOTS + u32::from(meta.level) <= UPPER_SLOTS)
        });
        meta.ok_or_else(|| {
            let expected = format!(
                "{word:#018x}, expected a live node of at most level {} with its upper lists within {} slots",
                self.info.entry.level, self.info.upper_slots
            );
            self.node_error(Section::Metas, node, expected)
        })
    }

    /// External id of `node`.
    ///
    /// # Errors
    /// If its meta is not one.
    pub fn id(&self, node: NodeId) -> Result<ExternalId, GraphFileError> {
        if !self.info.has_ids {
            assert!(node.0 < self.rows(), "node {node} of {}", self.rows());
            return Ok(ExternalId::Num(node.0.into()));
        }
        let words = self.items(Section::Ids, node.0..node.0 + 1);
        let word = |at: usize| u64::from_le_bytes(words[at..at + 8].try_into().expect("8 bytes"));
        Ok(id_from_words(self.meta(node)?.is_uuid, [word(0), word(8)]))
    }

    /// Vectors of nodes `range`, at the vector stride.
    pub fn vectors(&self, range: Range<u32>) -> &[u8] {
        self.items(Section::Vectors, range)
    }

    /// Vector of `node`.
    #[inline]
    pub fn vector(&self, node: NodeId) -> &[u8] {
        &self.vectors(node.0..node.0 + 1)[..self.params.vector_bytes() as usize]
    }

    /// Encoded level-0 lists of nodes `range`, at the list stride.
    pub fn lists(&self, range: Range<u32>) -> &[u8] {
        self.items(Section::Lists, range)
    }

    /// Encoded upper lists in slots `range`, at the upper stride.
    pub fn upper(&self, range: Range<u32>) -> &[u8] {
        self.items(Section::Upper, range)
    }

    /// Level-0 neighbours of `node` as the file has them, without a look at the list's own checksum: for searches
    /// over a file that was checked when it was opened. A node may still be out of range, a count never is.
    #[inline]
    pub fn links(&self, node: NodeId) -> &[U32] {
        <[U32]>::ref_from_bytes(entries(self.lists(node.0..node.0 + 1), 4)).expect("whole entries")
    }

    /// Neighbours in upper slot `slot`, as [`Self::links`].
    #[inline]
    pub fn upper_links(&self, slot: u32) -> &[UpperLink] {
        <[UpperLink]>::ref_from_bytes(entries(self.upper(slot..slot + 1), 8)).expect("whole entries")
    }

    /// Checks all that the file says about one node: its meta, its id's kind, its vector, and the entries of all of its
    /// lists.
    ///
    /// # Errors
    /// Names the section and what was expected.
    pub fn verify_node(&self, node: NodeId) -> Result<NodeMeta, GraphFileError> {
        let meta = self.meta(node)?;
        if meta.is_uuid && !self.info.has_ids {
            return Err(self.node_error(
                Section::Metas,
                node,
                "a UUID, expected a number: the file has no ids".into(),
            ));
        }
        validate(self.info.metric, self.info.dtype, self.vector(node))
            .map_err(|e| self.node_error(Section::Vectors, node, e.to_string()))?;
        let rows = self.rows();
        let list = ListView::parse_base(self.lists(node.0..node.0 + 1))
            .map_err(|e| self.node_error(Section::Lists, node, e.to_string()))?;
        if let Some(bad) = list.nodes().find(|neighbour| neighbour.0 >= rows) {
            let problem = format!("it links to {bad}, expected nodes below {rows}");
            return Err(self.node_error(Section::Lists, node, problem));
        }
        for level in 1..=meta.level {
            let at =
                |problem: String| self.node_error(Section::Upper, node, format!("level {level}: {problem}"));
            let slot = meta.upper + u32::from(level) - 1;
            let list = ListView::parse_upper(self.upper(slot..slot + 1)).map_err(|e| at(e.to_string()))?;
            for (neighbour, upper) in list.upper_nodes() {
                if neighbour.0 >= rows {
                    return Err(at(format!("it links to {neighbour}, expected nodes below {rows}")));
                }
                let theirs = self.meta(neighbour)?;
                if theirs.level < level || theirs.upper != upper {
                    return Err(at(format!(
                        "it links to {neighbour} with upper index {upper}, which has level {} and upper index {}",
                        theirs.level, theirs.upper
                    )));
                }
            }
        }
        Ok(meta)
    }

    /// Checks every node, that the entry point is on its level, that no upper slot has two owners, and that no
    /// external id appears twice.
    ///
    /// # Errors
    /// Names the section, the node and what was expected.
    pub fn verify(&self) -> Result<(), GraphFileError> {
        let entry = self.info.entry;
        let found = self.meta(entry.node)?.level;
        if found != entry.level {
            let problem = format!("level {found}, expected {} of the entry point", entry.level);
            return Err(self.node_error(Section::Metas, entry.node, problem));
        }
        let mut next_upper = 0;
        let mut ids = HashSet::new();
        for node in (0..self.rows()).map(NodeId) {
            let meta = self.verify_node(node)?;
            if meta.level > 0 {
                if meta.upper < next_upper {
                    let problem = format!("upper index {}, expected {next_upper} or more", meta.upper);
                    return Err(self.node_error(Section::Metas, node, problem));
                }
                next_upper = meta.upper + u32::from(meta.level);
            }
            if self.info.has_ids {
                let id = self.id(node)?;
                if !ids.insert(id) {
                    let first = (0..node.0).map(NodeId).find(|other| self.id(*other).is_ok_and(|o| o == id));
                    let first = first.expect("an id that was inserted before is that of an earlier node");
                    let problem = format!("id {id} is that of node {first} already");
                    return Err(self.node_error(Section::Ids, node, problem));
                }
            }
        }
        Ok(())
    }

    fn node_error(&self, section: Section, node: NodeId, problem: String) -> GraphFileError {
        at(&self.path)(Defect::Node { section, node, problem })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use proptest::prelude::*;

    use super::*;

    const ROWS: u32 = 400;

    fn level_of(row: u32) -> u8 {
        match row {
            7 => 3,
            r if r % 5 == 0 => 2,
            r if r % 2 == 0 => 1,
            _ => 0,
        }
    }

    fn id_of(row: u32) -> ExternalId {
        if row % 2 == 0 { ExternalId::Num(u64::MAX - u64::from(row)) } else { ExternalId::Uuid(row.into()) }
    }

    /// A small graph with everything in it: links are a ring on every level.
    fn write(path: &Path, has_ids: bool) -> Result<(), GraphFileError> {
        let mut upper_slots = 0;
        let uppers: Vec<_> =
            (0..ROWS).map(|row| place_upper(&mut upper_slots, level_of(row)).unwrap()).collect();
        let info = GraphInfo {
            dtype: DType::I8,
            metric: Metric::Ip,
            dim: 5,
            m: 3,
            ef_construction: 40,
            rows: ROWS,
            has_ids,
            upper_slots,
            entry: EntryPoint { node: NodeId(7), level: 3 },
            build: BuildInfo {
                builder: "ring".into(),
                seed: 9,
                seconds: 1.5,
                threads: 2,
                orphans_linked: 1,
                data_hash: [5; 32],
            },
        };
        let mut writer = GraphWriter::create(path, info)?;
        for row in 0..ROWS {
            let (level, upper) = (level_of(row), uppers[row as usize]);
            let is_uuid = has_ids && row % 2 == 1;
            writer.push_meta(NodeMeta { state: NodeState::Live, level, is_uuid, upper })?;
        }
        if has_ids {
            for row in 0..ROWS {
                writer.push_id(id_of(row))?;
            }
        }
        for row in 0..ROWS {
            writer.push_vector(&[row as u8; 5])?;
        }
        for row in 0..ROWS {
            writer.push_list(&[NodeId((row + 1) % ROWS)])?;
        }
        let mut slot = 0;
        for row in 0..ROWS {
            for level in 1..=level_of(row) {
                while slot < uppers[row as usize] + u32::from(level) - 1 {
                    writer.push_upper(None)?;
                    slot += 1;
                }
                let next = (1..).map(|i| (row + i) % ROWS).find(|r| level_of(*r) >= level).unwrap();
                writer.push_upper(Some(&[(NodeId(next), uppers[next as usize])]))?;
                slot += 1;
            }
        }
        writer.finish()
    }

    fn written(has_ids: bool) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ring.graph");
        write(&path, has_ids).unwrap();
        (folder, path)
    }

    /// The bytes of such a file, written once: waiting for the disk is slow.
    fn good_bytes() -> Vec<u8> {
        static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
        BYTES
            .get_or_init(|| {
                let (_folder, path) = written(true);
                fs::read(path).unwrap()
            })
            .clone()
    }

    /// Opens `bytes` as a file and uses everything in it.
    fn walk_bytes(bytes: &[u8], check: Check) -> Result<(), GraphFileError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ring.graph");
        fs::write(&path, bytes).unwrap();
        walk(&path, check)
    }

    /// Makes every checksum right again, as someone who means harm would.
    fn reseal(bytes: &mut [u8]) {
        let Ok((header, _)) = RawHeader::read_from_prefix(bytes) else { return };
        let mut header = header;
        let starts: Vec<_> =
            header.sections.iter().map(|s| s.offset.get()).chain([bytes.len() as u64]).collect();
        for (i, section) in header.sections.iter_mut().enumerate() {
            if let Some(content) = bytes.get(starts[i] as usize..starts[i + 1] as usize) {
                section.checksum = xxh3_64(content).into();
            }
        }
        header.checksum = header.sum().into();
        bytes[..HEADER_BYTES].copy_from_slice(header.as_bytes());
    }

    /// Uses everything that a file offers.
    fn walk(path: &Path, check: Check) -> Result<(), GraphFileError> {
        let graph = GraphFile::open(path, check)?;
        assert_eq!(graph.metas(0..graph.rows()).len(), graph.rows() as usize);
        for node in (0..graph.rows()).map(NodeId) {
            assert_eq!(graph.vector(node).len() as u64, graph.params().vector_bytes());
            assert!(graph.links(node).len() <= graph.params().m0 as usize);
            let _ = graph.id(node);
            if let Ok(meta) = graph.meta(node) {
                for level in 1..=meta.level {
                    let links = graph.upper_links(meta.upper + u32::from(level) - 1);
                    assert!(links.len() <= graph.params().m as usize);
                }
            }
        }
        graph.verify()
    }

    #[test]
    fn what_was_written_is_read() {
        for has_ids in [false, true] {
            let (folder, path) = written(has_ids);
            let graph = GraphFile::open(&path, Check::Checksums).unwrap();
            graph.verify().unwrap();
            assert_eq!(graph.info().build.builder, "ring");
            assert_eq!((graph.info().entry, graph.rows()), (EntryPoint { node: NodeId(7), level: 3 }, ROWS));
            assert_eq!(graph.info().build.data_hash, [5; 32]);
            for row in 0..ROWS {
                let meta = graph.meta(NodeId(row)).unwrap();
                assert_eq!(meta.level, level_of(row));
                assert_eq!(graph.vector(NodeId(row)), [row as u8; 5]);
                assert_eq!(graph.links(NodeId(row)), [U32::new((row + 1) % ROWS)]);
                let expected = if has_ids { id_of(row) } else { ExternalId::Num(row.into()) };
                assert_eq!(graph.id(NodeId(row)).unwrap(), expected);
                if meta.level == 3 {
                    assert_eq!(graph.upper_links(meta.upper + 2)[0].node.get(), row, "alone on its level");
                }
            }
            let stride = graph.params().vector_stride() as usize;
            assert_eq!(graph.vectors(10..12)[stride..stride + 5], [11; 5]);
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file stays");
        }
    }

    #[test]
    fn upper_lists_of_a_node_stay_in_one_chunk() {
        let mut next = UPPER_SLOTS - 2;
        assert_eq!(place_upper(&mut next, 0), Some(0));
        assert_eq!(place_upper(&mut next, 2), Some(UPPER_SLOTS - 2));
        next = UPPER_SLOTS - 2;
        assert_eq!((place_upper(&mut next, 3), next), (Some(UPPER_SLOTS), UPPER_SLOTS + 3));
        next = u32::MAX - 2;
        assert_eq!(place_upper(&mut next, 4), None);
        // The ring has such a hole.
        let (_folder, path) = written(false);
        let slots = GraphFile::open(&path, Check::Header).unwrap().info().upper_slots;
        assert_eq!(slots, (0..ROWS).map(|row| u32::from(level_of(row))).sum::<u32>() + 1);
    }

    #[test]
    fn an_unfinished_file_never_takes_the_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("g");
        let (_keep, good) = written(false);
        let info = GraphFile::open(&good, Check::Header).unwrap().info().clone();
        let mut writer = GraphWriter::create(&path, info.clone()).unwrap();
        writer.push_meta(NodeMeta { state: NodeState::Live, level: 0, is_uuid: false, upper: 0 }).unwrap();
        drop(writer);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        for (bad, field) in [
            (GraphInfo { rows: 0, ..info.clone() }, "capacity"),
            (GraphInfo { m: 1, ..info.clone() }, "m"),
            (GraphInfo { entry: EntryPoint { node: NodeId(ROWS), level: 0 }, ..info.clone() }, "entry"),
            (
                GraphInfo {
                    build: BuildInfo { builder: "x".repeat(33), ..info.build.clone() },
                    ..info.clone()
                },
                "builder",
            ),
        ] {
            let error = GraphWriter::create(&path, bad).unwrap_err();
            assert!(matches!(error.defect, Defect::Field { field: f, .. } if f == field), "{error}");
        }
    }

    /// Changes bytes of a good file, reseals it if asked, and holds the error's text against `expected`.
    fn check_bad(change: impl FnOnce(&mut Vec<u8>), sealed: bool, expected: &str) {
        let mut bytes = good_bytes();
        change(&mut bytes);
        if sealed {
            reseal(&mut bytes);
        }
        let text = walk_bytes(&bytes, Check::Checksums).unwrap_err().to_string();
        assert!(text.contains("ring.graph") && text.contains(expected), "'{text}' lacks '{expected}'");
    }

    fn section_at(bytes: &[u8], section: Section) -> usize {
        RawHeader::read_from_prefix(bytes).unwrap().0.sections[section as usize].offset.get() as usize
    }

    #[test]
    fn damage_is_named() {
        check_bad(|b| b.truncate(100), false, "it has 100 bytes, expected a header");
        check_bad(|b| b.truncate(5000), false, "it has 5000 bytes, expected");
        check_bad(|b| b.push(0), false, "bytes, expected");
        check_bad(|b| b[0] = b'X', false, "not a graph file");
        check_bad(|b| b[8] = 2, true, "format version 2, expected 1");
        check_bad(|b| b[24] = 9, true, "layout version 9, expected 1");
        check_bad(|b| b[60] ^= 1, false, "the header is damaged");
        check_bad(|b| b[40] = 4, true, "dtype is 4, expected 0 to 3");
        check_bad(|b| b[44..48].fill(0xff), true, "dimension is 4294967295");
        check_bad(|b| b[64..72].fill(0xff), true, "rows is 18446744073709551615");
        // A header that lies consistently about the number of rows meets the section table, then the size.
        check_bad(|b| b[64..68].copy_from_slice(&500u32.to_le_bytes()), true, "sections is");
        check_bad(
            |b| b[80..88].copy_from_slice(&(1u64 << 63 | 3 << 32 | 400).to_le_bytes()),
            true,
            "entry is",
        );
        for section in Section::ALL {
            check_bad(
                |b| {
                    let at = section_at(b, section);
                    b[at] ^= 1
                },
                false,
                &format!("section {section} is damaged"),
            );
        }
    }

    #[test]
    fn a_well_sealed_lie_is_named() {
        check_bad(
            |b| {
                let at = section_at(b, Section::Metas);
                b[at + 8] = 1
            },
            true,
            "section metas, node n1: ",
        );
        check_bad(
            |b| {
                let at = section_at(b, Section::Metas) + 7 * 8;
                b[at + 1] = 2
            },
            true,
            "level 2, expected 3 of the entry point",
        );
        // Under the cosine, of which row 0, all zeroes, has none.
        check_bad(|b| b[41] = 2, true, "section vectors, node n0: the squared norm is 0e0");
        check_bad(
            |b| {
                let at = section_at(b, Section::Ids);
                b.copy_within(at..at + 16, at + 32)
            },
            true,
            "section ids, node n2: id 18446744073709551615 is that of node n0 already",
        );
        check_bad(
            |b| {
                let at = section_at(b, Section::Lists);
                encode_base_list(&mut b[at..at + 32], 1, &[NodeId(400)])
            },
            true,
            "section lists, node n0: it links to n400, expected nodes below 400",
        );
        check_bad(
            |b| {
                let at = section_at(b, Section::Lists);
                b[at + 8] ^= 1
            },
            true,
            "section lists, node n0: list was read while",
        );
        check_bad(
            |b| {
                let at = section_at(b, Section::Upper);
                encode_upper_list(&mut b[at..at + 32], 1, &[(NodeId(1), 0)])
            },
            true,
            "section upper lists, node n0: level 1: it links to n1 with upper index 0",
        );
        // Node 2's list moved onto node 0's first one, with all who link to it (node 0 alone) in the know.
        check_bad(
            |b| {
                let at = section_at(b, Section::Metas) + 16;
                b[at + 4..at + 8].fill(0);
                let at = section_at(b, Section::Upper);
                encode_upper_list(&mut b[at..at + 32], 1, &[(NodeId(2), 0)]);
            },
            true,
            "section metas, node n2: upper index 0, expected 2 or more",
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn no_changed_byte_goes_unseen(at in any::<prop::sample::Index>(), flip in 1u8..) {
            let mut bytes = good_bytes();
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            prop_assert!(walk_bytes(&bytes, Check::Checksums).is_err(), "byte {at}");
        }

        #[test]
        fn no_truncation_goes_unseen(cut in any::<prop::sample::Index>()) {
            let bytes = good_bytes();
            prop_assert!(walk_bytes(&bytes[..cut.index(bytes.len())], Check::Header).is_err());
        }

        #[test]
        fn hostile_bytes_with_good_checksums_never_panic(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20),
            header_only in any::<bool>(),
        ) {
            let mut bytes = good_bytes();
            // Half of the cases aim at the 300 bytes where the header has its fields.
            let range = if header_only { 300 } else { bytes.len() };
            for (at, value) in changes {
                bytes[at.index(range)] = value;
            }
            let _ = walk_bytes(&bytes, Check::Header);
            reseal(&mut bytes);
            let _ = walk_bytes(&bytes, Check::Checksums);
        }
    }
}
