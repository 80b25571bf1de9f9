//! Where every byte of a collection lies in remote memory. Arithmetic only.
//!
//! A region belongs to at most one collection at a time:
//!
//! ```text
//! region        0 ┌──────────────────────────────┐
//!                 │ region superblock (4 KiB)    │ magic, id, next_free (bump pointer), bytes, collection
//!            4096 ├──────────────────────────────┤
//!   home region   │ collection superblock (4 KiB)│ parameters + checksum, entry point, counters
//!   only          │ chunk table                  │ max_chunks × RemotePtr
//!                 │ upper chunk table            │ max_upper_chunks × RemotePtr
//!                 ├──────────────────────────────┤
//!   first regions │ id segment                   │ every first_regions-th id bucket, 128 B each
//!                 ├──────────────────────────────┤ next_free starts here
//!                 │ chunks, upper chunks,        │ allocated by FETCH_ADD on next_free
//!                 │ overflow id buckets          │
//!                 └──────────────────────────────┘
//!
//! chunk           ┌───────────┬───────────┬───────────┐   structure of arrays, `slots` of each:
//!                 │ headers   │ vectors   │ lists     │   40 B │ dim × size, padded to 8 │ 8 + 4·m0, padded to 8
//!                 └───────────┴───────────┴───────────┘
//!
//! upper chunk     ┌───────────┬───────────┐
//!                 │ lists     │ locks     │   UPPER_SLOTS of each: 8 + 8·m │ 8 B, one holder word per list
//!                 └───────────┴───────────┘
//!
//! header (40 B)   lock u64 │ meta u64 │ inserter u64 │ id low u64 │ id high u64
//!   lock            of the level-0 list: 0, or holder: session u32 << 32 | nonce u32
//!   meta            state u8 │ level u8 │ id kind u8 │ 0 u8 │ upper index u32
//!   inserter        holder word of the unfinished insert, 0 once live; or 0 u32 << 32 | NodeId + 1 of the record that
//!                   this one takes over from, its predecessor
//!
//! list            checksum u32 │ version u16 │ count u16 │ entries, padded to 8
//!   level 0         entry = NodeId u32
//!   upper           entry = NodeId u32, upper index u32 (where that node's own upper lists start)
//!
//! id bucket       lock u64 │ next RemotePtr │ 14 slots: state u2 << 62 | fingerprint u30 << 32 | NodeId u32
//! ```
//!
//! Invariant: every address a verb touches atomically is 8-byte aligned, and a node's lock, header, vector and
//! level-0 list lie in one region, so that one memory node's lease decides about all of them. The same holds for
//! an upper list and its lock.

use rkyv::{Archive, Deserialize, Serialize};
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64_with_seed};

use crate::ids::{ExternalId, NodeId, RegionId, RemotePtr};
use crate::metric::{DIMENSION_MAX, DType, Metric};

/// Bytes of a region superblock and of a collection superblock.
pub const SUPERBLOCK_BYTES: u64 = 4096;
/// First word of a region superblock that belongs to a collection.
pub const REGION_MAGIC: u64 = u64::from_le_bytes(*b"SHINEREG");
/// First word of a collection superblock.
pub const COLLECTION_MAGIC: u64 = u64::from_le_bytes(*b"SHINECOL");
/// Version of everything on this page.
pub const LAYOUT_VERSION: u64 = 1;

/// Offsets inside a region superblock.
pub mod region {
    /// [`super::REGION_MAGIC`].
    pub const MAGIC: u64 = 0;
    /// Bump pointer: first byte that was never handed out. FETCH_ADD allocates.
    pub const NEXT_FREE: u64 = 8;
    /// Size of the region in bytes.
    pub const BYTES: u64 = 16;
    /// Id of the collection that the region belongs to.
    pub const COLLECTION: u64 = 24;
    /// While a graph file is loaded: number of the loader's session on the region's memory node. Whoever goes on with
    /// the load does so once that session is dead.
    pub const LOADER: u64 = 32;
}

/// Offsets of words inside the home region, counted from its start.
pub mod collection {
    use super::SUPERBLOCK_BYTES;
    /// [`super::COLLECTION_MAGIC`].
    pub const MAGIC: u64 = SUPERBLOCK_BYTES;
    /// [`super::LAYOUT_VERSION`].
    pub const VERSION: u64 = SUPERBLOCK_BYTES + 8;
    /// Checksum of the collection's parameters ([`super::CollectionParams::checksum`]).
    pub const PARAMS: u64 = SUPERBLOCK_BYTES + 16;
    /// Entry point: 0 while empty, else `1 << 63 | level << 32 | NodeId`.
    pub const ENTRY_POINT: u64 = SUPERBLOCK_BYTES + 24;
    /// Lock of the entry point, a holder word.
    pub const ENTRY_LOCK: u64 = SUPERBLOCK_BYTES + 32;
    /// Number of chunks whose allocation has begun; FETCH_ADD draws the next.
    pub const CHUNK_COUNT: u64 = SUPERBLOCK_BYTES + 40;
    /// As `CHUNK_COUNT`, for upper chunks.
    pub const UPPER_CHUNK_COUNT: u64 = SUPERBLOCK_BYTES + 48;
    /// Vectors that became live (FETCH_ADD by the inserter after the fact: a statistic, not an invariant).
    pub const LIVE_COUNT: u64 = SUPERBLOCK_BYTES + 56;
    /// Fingerprint of the graph file that is or was loaded ([`crate::graph_file::GraphFile::fingerprint`]); 0 if none,
    /// or while memory for it is still being taken.
    pub const LOAD_FILE: u64 = SUPERBLOCK_BYTES + 64;
    /// Nodes of that file, from the first on, that are stored with their ids.
    pub const LOAD_NODES: u64 = SUPERBLOCK_BYTES + 72;
    /// Upper lists of that file, from the first on, that are stored.
    pub const LOAD_UPPER: u64 = SUPERBLOCK_BYTES + 80;
    /// Start of the chunk table.
    pub const CHUNK_TABLE: u64 = 2 * SUPERBLOCK_BYTES;
}

/// Bytes of a node header.
pub const HEADER_BYTES: u64 = 40;
/// Offsets inside a node header.
pub mod header {
    /// Lock word of the node's level-0 list.
    pub const LOCK: u64 = 0;
    /// State, level, id kind and upper index.
    pub const META: u64 = 8;
    /// Holder word of the insert that is not finished yet, or the predecessor ([`super::predecessor_word`]).
    pub const INSERTER: u64 = 16;
    /// External id, low 64 bits.
    pub const ID_LOW: u64 = 24;
    /// External id, high 64 bits.
    pub const ID_HIGH: u64 = 32;
}

/// Bytes of an id bucket.
pub const ID_BUCKET_BYTES: u64 = 128;
/// Slots of an id bucket.
pub const ID_BUCKET_SLOTS: usize = 14;
/// Longest chain of overflow buckets behind one id bucket.
pub const ID_CHAIN_MAX: usize = 256;
/// Mean fill of the first buckets at the capacity that the collection was made for.
pub const ID_BUCKET_MEAN_FILL: u64 = 7;
/// Highest level of a node. Level 24 at m = 2 already means more nodes than a NodeId can number.
pub const LEVEL_MAX: u8 = 32;
/// Bounds of m: below 2 the level formula has no meaning, above 256 a list outgrows every published setting.
pub const M_RANGE: std::ops::RangeInclusive<u32> = 2..=256;
/// Largest ef and k.
pub const EF_MAX: u32 = 65_536;
/// Upper slots in one upper chunk.
pub const UPPER_SLOTS: u32 = 256;

const fn round_up(value: u64, to: u64) -> u64 {
    value.div_ceil(to) * to
}

/// What a collection was created with, plus the sizes derived from it at that moment. Immutable.
#[derive(Clone, Debug, PartialEq, Eq, Archive, Serialize, Deserialize, serde::Serialize)]
pub struct CollectionParams {
    /// Element type.
    pub dtype: DType,
    /// Metric of the graph.
    pub metric: Metric,
    /// Elements per vector.
    pub dim: u32,
    /// Links per node and level above 0.
    pub m: u32,
    /// Links per node on level 0.
    pub m0: u32,
    /// Beam of inserts.
    pub ef_construction: u32,
    /// Slots per chunk, a power of two.
    pub slots: u32,
    /// First id buckets, over all regions.
    pub id_buckets: u64,
    /// Length of the chunk table.
    pub max_chunks: u32,
    /// Length of the upper chunk table.
    pub max_upper_chunks: u32,
    /// Regions that the collection started with: id segments lie in these, whatever is added later.
    pub first_regions: u16,
}

/// A parameter outside its range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {given}: expected {expected}")]
pub struct BadParam {
    /// Name of the parameter.
    pub field: &'static str,
    /// Value that was given.
    pub given: u64,
    /// What would be accepted.
    pub expected: String,
}

impl CollectionParams {
    /// Parameters of a collection that expects about `capacity` rows (it may grow beyond) and starts with
    /// `first_regions` regions.
    ///
    /// # Errors
    /// Names the first parameter out of range.
    #[allow(clippy::too_many_arguments, reason = "a constructor of a flat record")]
    pub fn new(
        dtype: DType,
        metric: Metric,
        dim: u32,
        m: u32,
        ef_construction: u32,
        capacity: u64,
        first_regions: u16,
    ) -> Result<Self, BadParam> {
        let check = |ok: bool, field, given, expected: String| {
            if ok { Ok(()) } else { Err(BadParam { field, given, expected }) }
        };
        check(
            (1..=DIMENSION_MAX as u32).contains(&dim),
            "dimension",
            dim.into(),
            format!("1 to {DIMENSION_MAX}"),
        )?;
        check(M_RANGE.contains(&m), "m", m.into(), format!("{} to {}", M_RANGE.start(), M_RANGE.end()))?;
        check(
            (1..=EF_MAX).contains(&ef_construction),
            "ef_construction",
            ef_construction.into(),
            format!("1 to {EF_MAX}"),
        )?;
        check(
            (1..=u64::from(u32::MAX)).contains(&capacity),
            "capacity",
            capacity,
            format!("1 to {} rows", u32::MAX),
        )?;
        check(first_regions >= 1, "regions", first_regions.into(), "at least 1".into())?;
        let mut params = Self {
            dtype,
            metric,
            dim,
            m,
            m0: 2 * m,
            ef_construction,
            slots: 1,
            id_buckets: (capacity.div_ceil(ID_BUCKET_MEAN_FILL)).max(u64::from(first_regions)),
            max_chunks: 0,
            max_upper_chunks: 0,
            first_regions,
        };
        // A chunk is the unit that an inserting compute node leases: large enough to be rare, small enough that
        // five of them half empty do not matter.
        let record = HEADER_BYTES + params.vector_stride() + params.list_stride();
        params.slots = ((1 << 20) / record).clamp(64, 1024).next_power_of_two().min(1024) as u32;
        // Room for sixteen times the capacity, at least 16M rows: the tables cost address space, not memory.
        let rows_max = (capacity * 16).clamp(1 << 24, 1 << 32);
        params.max_chunks = rows_max.div_ceil(u64::from(params.slots)) as u32;
        params.max_upper_chunks = (rows_max / u64::from(UPPER_SLOTS)).min(1 << 24) as u32;
        Ok(params)
    }

    /// Bytes of a vector as read: dimension × element size.
    pub fn vector_bytes(&self) -> u64 {
        u64::from(self.dim) * self.dtype.size() as u64
    }

    /// Distance between two vectors of a chunk.
    pub fn vector_stride(&self) -> u64 {
        round_up(self.vector_bytes(), 8)
    }

    /// Bytes of a level-0 list, as read and as stored.
    pub fn list_stride(&self) -> u64 {
        round_up(8 + 4 * u64::from(self.m0), 8)
    }

    /// Bytes of an upper list, as read and as stored.
    pub fn upper_stride(&self) -> u64 {
        8 + 8 * u64::from(self.m)
    }

    /// Bytes of a chunk.
    pub fn chunk_bytes(&self) -> u64 {
        round_up(u64::from(self.slots) * (HEADER_BYTES + self.vector_stride() + self.list_stride()), 64)
    }

    /// Bytes of an upper chunk.
    pub fn upper_chunk_bytes(&self) -> u64 {
        round_up(u64::from(UPPER_SLOTS) * (self.upper_stride() + 8), 64)
    }

    /// Chunk and slot of a node.
    #[inline]
    pub fn place(&self, node: NodeId) -> (u32, u32) {
        (node.0 / self.slots, node.0 % self.slots)
    }

    /// Address of a node's header in the chunk at `chunk`.
    #[inline]
    pub fn header_at(&self, chunk: RemotePtr, slot: u32) -> RemotePtr {
        chunk.add(u64::from(slot) * HEADER_BYTES)
    }

    /// Address of a node's vector in the chunk at `chunk`.
    #[inline]
    pub fn vector_at(&self, chunk: RemotePtr, slot: u32) -> RemotePtr {
        chunk.add(u64::from(self.slots) * HEADER_BYTES + u64::from(slot) * self.vector_stride())
    }

    /// Address of a node's level-0 list in the chunk at `chunk`.
    #[inline]
    pub fn list_at(&self, chunk: RemotePtr, slot: u32) -> RemotePtr {
        chunk.add(
            u64::from(self.slots) * (HEADER_BYTES + self.vector_stride())
                + u64::from(slot) * self.list_stride(),
        )
    }

    /// Upper chunk and slot of an upper index.
    #[inline]
    pub fn upper_place(&self, upper: u32) -> (u32, u32) {
        (upper / UPPER_SLOTS, upper % UPPER_SLOTS)
    }

    /// Address of an upper list in the upper chunk at `chunk`.
    #[inline]
    pub fn upper_at(&self, chunk: RemotePtr, slot: u32) -> RemotePtr {
        chunk.add(u64::from(slot) * self.upper_stride())
    }

    /// Address of the lock word of an upper list in the upper chunk at `chunk`. It lies beside the list and not in
    /// the node's header, which may be on another memory node: a lock protects only what its own memory node fences.
    #[inline]
    pub fn upper_lock_at(&self, chunk: RemotePtr, slot: u32) -> RemotePtr {
        chunk.add(u64::from(UPPER_SLOTS) * self.upper_stride() + u64::from(slot) * 8)
    }

    /// Offset, in the home region, of entry `chunk` of the chunk table.
    pub fn chunk_table_at(&self, chunk: u32) -> u64 {
        collection::CHUNK_TABLE + 8 * u64::from(chunk)
    }

    /// Offset, in the home region, of entry `chunk` of the upper chunk table.
    pub fn upper_table_at(&self, chunk: u32) -> u64 {
        self.chunk_table_at(self.max_chunks) + 8 * u64::from(chunk)
    }

    /// Offset of the id segment in the `index`-th of the collection's first regions (0 is the home region).
    pub fn id_segment_at(&self, index: u16) -> u64 {
        if index == 0 { round_up(self.upper_table_at(self.max_upper_chunks), 128) } else { SUPERBLOCK_BYTES }
    }

    /// Bytes of one id segment.
    pub fn id_segment_bytes(&self) -> u64 {
        self.id_buckets.div_ceil(u64::from(self.first_regions)) * ID_BUCKET_BYTES
    }

    /// Where `next_free` starts in the `index`-th of the collection's regions, in the order they were added.
    pub fn first_free(&self, index: usize) -> u64 {
        if index < usize::from(self.first_regions) {
            round_up(self.id_segment_at(index as u16) + self.id_segment_bytes(), 64)
        } else {
            SUPERBLOCK_BYTES
        }
    }

    /// Which first region holds id bucket `bucket`, and at which offset.
    pub fn id_bucket_at(&self, bucket: u64) -> (u16, u64) {
        let regions = u64::from(self.first_regions);
        let index = (bucket % regions) as u16;
        (index, self.id_segment_at(index) + bucket / regions * ID_BUCKET_BYTES)
    }

    /// Checksum over every field: what a compute node holds against the collection superblock before it trusts
    /// an address.
    pub fn checksum(&self) -> u64 {
        let mut hash = Xxh3Default::new();
        hash.update(&LAYOUT_VERSION.to_le_bytes());
        hash.update(&[self.dtype as u8, self.metric as u8]);
        for word in [
            self.dim,
            self.m,
            self.m0,
            self.ef_construction,
            self.slots,
            self.max_chunks,
            self.max_upper_chunks,
        ] {
            hash.update(&word.to_le_bytes());
        }
        hash.update(&self.id_buckets.to_le_bytes());
        hash.update(&self.first_regions.to_le_bytes());
        hash.digest()
    }
}

/// Life of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum NodeState {
    /// Never written, or given back.
    Empty = 0,
    /// Written; its id is being claimed or its links are being made.
    Linking = 1,
    /// Found by searches.
    Live = 2,
    /// No longer an answer; may still be a way point.
    Dead = 3,
    /// Has taken its predecessor's place in the id table: live from the moment that the predecessor is dead.
    Heir = 4,
}

/// Word [`header::META`] of a node header, decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NodeMeta {
    /// Life of the record.
    pub state: NodeState,
    /// Highest level of the node.
    pub level: u8,
    /// Whether the external id is a UUID.
    pub is_uuid: bool,
    /// Index of the node's level-1 list; the level-l list is at `upper + l − 1`. Zero on level-0 nodes.
    pub upper: u32,
}

impl NodeMeta {
    /// The word in remote memory.
    pub fn to_word(self) -> u64 {
        u64::from(self.state as u8)
            | u64::from(self.level) << 8
            | u64::from(self.is_uuid) << 16
            | u64::from(self.upper) << 32
    }

    /// Decodes a word; `None` if it is not one that we write.
    pub fn from_word(word: u64) -> Option<Self> {
        let state = match word & 0xff {
            0 => NodeState::Empty,
            1 => NodeState::Linking,
            2 => NodeState::Live,
            3 => NodeState::Dead,
            4 => NodeState::Heir,
            _ => return None,
        };
        let level = (word >> 8) as u8;
        let kind = (word >> 16) as u8;
        let unused = (word >> 24) as u8;
        if level > LEVEL_MAX || kind > 1 || unused != 0 {
            return None;
        }
        Some(Self { state, level, is_uuid: kind == 1, upper: (word >> 32) as u32 })
    }
}

/// Word [`header::INSERTER`] of a record that takes over from `predecessor`. Sessions are numbered from 1, so that it is
/// never taken for a holder word; the very last node number is never handed out.
pub fn predecessor_word(predecessor: NodeId) -> u64 {
    u64::from(predecessor.0) + 1
}

/// The predecessor in word [`header::INSERTER`], if it holds one.
pub fn predecessor_from_word(word: u64) -> Option<NodeId> {
    (1..=u64::from(u32::MAX)).contains(&word).then(|| NodeId((word - 1) as u32))
}

/// The two id words of a header, low first.
pub fn id_words(id: ExternalId) -> [u64; 2] {
    match id {
        ExternalId::Num(n) => [n, 0],
        ExternalId::Uuid(u) => [u as u64, (u >> 64) as u64],
    }
}

/// The external id of a header.
pub fn id_from_words(is_uuid: bool, words: [u64; 2]) -> ExternalId {
    if is_uuid {
        ExternalId::Uuid(u128::from(words[0]) | u128::from(words[1]) << 64)
    } else {
        ExternalId::Num(words[0])
    }
}

/// Entry point of a collection: where every search starts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EntryPoint {
    /// The node.
    pub node: NodeId,
    /// Its level, the highest of the graph.
    pub level: u8,
}

impl EntryPoint {
    /// The word in remote memory.
    pub fn to_word(self) -> u64 {
        1 << 63 | u64::from(self.level) << 32 | u64::from(self.node.0)
    }

    /// Decodes a word; `None` for an empty collection.
    pub fn from_word(word: u64) -> Option<Self> {
        (word >> 63 == 1).then_some(Self { node: NodeId(word as u32), level: (word >> 32) as u8 })
    }
}

/// A list that cannot be used as read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ListError {
    /// The checksum does not match: read while someone wrote it. Read it again.
    #[error("list was read while it was written")]
    Torn,
    /// The list was never written.
    #[error("list was never written")]
    Unwritten,
    /// The count is larger than the list.
    #[error("list says {count} entries where {max} fit")]
    Overlong {
        /// Count in the list.
        count: u16,
        /// Entries that fit.
        max: usize,
    },
}

/// Encodes and checks neighbour lists. `WORDS` u32 per entry: 1 on level 0, 2 above.
fn list_checksum(bytes_after_checksum: &[u8]) -> u32 {
    // Never 0, so that a list of zero bytes is told from an empty list.
    (xxh3_64_with_seed(bytes_after_checksum, LAYOUT_VERSION) as u32) | 1
}

fn encode_list(out: &mut [u8], version: u16, count: usize, entries: impl Iterator<Item = u32>) {
    out.fill(0);
    out[4..6].copy_from_slice(&version.to_le_bytes());
    out[6..8].copy_from_slice(&u16::try_from(count).expect("a list holds at most 512 entries").to_le_bytes());
    let mut end = 8;
    for word in entries {
        out[end..end + 4].copy_from_slice(&word.to_le_bytes());
        end += 4;
    }
    let sum = list_checksum(&out[4..end]);
    out[..4].copy_from_slice(&sum.to_le_bytes());
}

/// A checked neighbour list, still in the bytes it was read into.
#[derive(Clone, Copy, Debug)]
pub struct ListView<'a> {
    version: u16,
    words: &'a [u8],
}

impl<'a> ListView<'a> {
    fn parse(bytes: &'a [u8], entry_bytes: usize) -> Result<Self, ListError> {
        let sum = u32::from_le_bytes(bytes[..4].try_into().expect("4 bytes"));
        if sum == 0 {
            // A first write may be under way behind a zero checksum.
            return Err(if bytes.iter().all(|b| *b == 0) { ListError::Unwritten } else { ListError::Torn });
        }
        let count = u16::from_le_bytes([bytes[6], bytes[7]]);
        let max = (bytes.len() - 8) / entry_bytes;
        let end = 8 + usize::from(count) * entry_bytes;
        if usize::from(count) > max {
            return Err(ListError::Overlong { count, max });
        }
        if list_checksum(&bytes[4..end]) != sum {
            return Err(ListError::Torn);
        }
        Ok(Self { version: u16::from_le_bytes([bytes[4], bytes[5]]), words: &bytes[8..end] })
    }

    /// Checks a level-0 list of `bytes.len()` = [`CollectionParams::list_stride`] bytes.
    pub fn parse_base(bytes: &'a [u8]) -> Result<Self, ListError> {
        Self::parse(bytes, 4)
    }

    /// Checks an upper list of [`CollectionParams::upper_stride`] bytes.
    pub fn parse_upper(bytes: &'a [u8]) -> Result<Self, ListError> {
        Self::parse(bytes, 8)
    }

    /// Version of the list: one more with every write, wrapping.
    pub fn version(&self) -> u16 {
        self.version
    }

    /// Entries of a level-0 list.
    pub fn nodes(&self) -> impl ExactSizeIterator<Item = NodeId> + use<'a> {
        self.words.chunks_exact(4).map(|w| NodeId(u32::from_le_bytes(w.try_into().expect("4 bytes"))))
    }

    /// Entries of an upper list: node, and where its own upper lists start.
    pub fn upper_nodes(&self) -> impl ExactSizeIterator<Item = (NodeId, u32)> + use<'a> {
        self.words.chunks_exact(8).map(|w| {
            let (node, upper) = w.split_at(4);
            (
                NodeId(u32::from_le_bytes(node.try_into().expect("4 bytes"))),
                u32::from_le_bytes(upper.try_into().expect("4 bytes")),
            )
        })
    }
}

/// Writes a level-0 list into `out` ([`CollectionParams::list_stride`] bytes).
pub fn encode_base_list(out: &mut [u8], version: u16, nodes: &[NodeId]) {
    encode_list(out, version, nodes.len(), nodes.iter().map(|n| n.0));
}

/// Writes an upper list into `out` ([`CollectionParams::upper_stride`] bytes).
pub fn encode_upper_list(out: &mut [u8], version: u16, nodes: &[(NodeId, u32)]) {
    encode_list(out, version, nodes.len(), nodes.iter().flat_map(|(n, u)| [n.0, *u]));
}

/// State of an id slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum IdState {
    /// Free.
    Empty = 0,
    /// Names a record that is being inserted or is live: the record's own state decides.
    Claimed = 1,
    /// Was used; free for a new claim.
    Removed = 2,
}

/// A slot of an id bucket, decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IdSlot {
    /// State.
    pub state: IdState,
    /// 30 bits of the id's hash.
    pub fingerprint: u32,
    /// The record.
    pub node: NodeId,
}

impl IdSlot {
    /// The word in remote memory.
    pub fn to_word(self) -> u64 {
        (self.state as u64) << 62
            | u64::from(self.fingerprint & ((1 << 30) - 1)) << 32
            | u64::from(self.node.0)
    }

    /// Decodes a word; `None` if it is not one that we write.
    pub fn from_word(word: u64) -> Option<Self> {
        let state = match word >> 62 {
            0 => IdState::Empty,
            1 => IdState::Claimed,
            2 => IdState::Removed,
            _ => return None,
        };
        Some(Self { state, fingerprint: (word >> 32) as u32 & ((1 << 30) - 1), node: NodeId(word as u32) })
    }
}

/// Bucket and fingerprint of an id among `id_buckets` buckets.
pub fn id_hash(id: ExternalId, id_buckets: u64) -> (u64, u32) {
    let [low, high] = id_words(id);
    let mut key = [0u8; 17];
    key[..8].copy_from_slice(&low.to_le_bytes());
    key[8..16].copy_from_slice(&high.to_le_bytes());
    key[16] = u8::from(matches!(id, ExternalId::Uuid(_)));
    let hash = xxh3_64_with_seed(&key, LAYOUT_VERSION);
    let bucket = (u128::from(hash) * u128::from(id_buckets)) >> 64;
    (bucket as u64, hash as u32 & ((1 << 30) - 1))
}

/// Region for chunk number `chunk` when the collection has `regions`: round robin.
pub fn region_of_chunk(chunk: u32, regions: &[RegionId]) -> RegionId {
    regions[chunk as usize % regions.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params() -> CollectionParams {
        CollectionParams::new(DType::I8, Metric::L2, 100, 16, 200, 100_000, 3).unwrap()
    }

    #[test]
    fn parts_of_a_chunk_do_not_overlap_and_are_aligned() {
        for (dtype, dim, m) in
            [(DType::I8, 100, 16), (DType::F32, 1, 2), (DType::F16, 333, 32), (DType::F32, 32_768, 256)]
        {
            let p = CollectionParams::new(dtype, Metric::L2, dim, m, 200, 1000, 3).unwrap();
            let base = RemotePtr::new(RegionId(2), 64);
            let mut spans = Vec::new();
            for slot in 0..p.slots {
                spans.push((p.header_at(base, slot), HEADER_BYTES));
                spans.push((p.vector_at(base, slot), p.vector_bytes()));
                spans.push((p.list_at(base, slot), p.list_stride()));
            }
            spans.sort();
            for pair in spans.windows(2) {
                assert!(pair[0].0.offset() + pair[0].1 <= pair[1].0.offset());
            }
            assert!(spans.iter().all(|(at, _)| at.offset() % 8 == 0));
            let (last, len) = spans.last().unwrap();
            assert!(last.offset() + len <= base.offset() + p.chunk_bytes());
        }
    }

    #[test]
    fn parts_of_an_upper_chunk_do_not_overlap() {
        let p = params();
        let base = RemotePtr::new(RegionId(2), 64);
        let last_list = p.upper_at(base, UPPER_SLOTS - 1).offset() + p.upper_stride();
        assert!(last_list <= p.upper_lock_at(base, 0).offset());
        assert!(p.upper_lock_at(base, UPPER_SLOTS - 1).offset() + 8 <= base.offset() + p.upper_chunk_bytes());
        assert_eq!(p.upper_lock_at(base, 0).offset() % 8, 0);
    }

    #[test]
    fn home_region_parts_follow_each_other() {
        let p = params();
        assert_eq!(p.upper_table_at(0), p.chunk_table_at(p.max_chunks));
        assert!(p.id_segment_at(0) >= p.upper_table_at(p.max_upper_chunks));
        assert!(p.first_free(0) >= p.id_segment_at(0) + p.id_segment_bytes());
        for bucket in [0, 1, p.id_buckets - 1] {
            let (index, at) = p.id_bucket_at(bucket);
            assert!(
                at >= p.id_segment_at(index) && at + ID_BUCKET_BYTES <= p.first_free(index.into()),
                "{bucket}"
            );
        }
    }

    #[test]
    fn any_changed_byte_of_a_list_is_seen() {
        let p = params();
        let mut bytes = vec![0u8; p.list_stride() as usize];
        assert_eq!(ListView::parse_base(&bytes).unwrap_err(), ListError::Unwritten);
        let nodes: Vec<_> = (0..20).map(|i| NodeId(i * 7)).collect();
        encode_base_list(&mut bytes, 9, &nodes);
        let view = ListView::parse_base(&bytes).unwrap();
        assert_eq!((view.version(), view.nodes().collect::<Vec<_>>()), (9, nodes));
        for at in 0..8 + 4 * 20 {
            let mut torn = bytes.clone();
            torn[at] ^= 0x10;
            assert!(ListView::parse_base(&torn).is_err(), "byte {at}");
        }
        encode_base_list(&mut bytes, 10, &[]);
        assert_eq!(ListView::parse_base(&bytes).unwrap().nodes().len(), 0);
        let mut upper = vec![0u8; p.upper_stride() as usize];
        encode_upper_list(&mut upper, 1, &[(NodeId(3), 4), (NodeId(5), 6)]);
        let view = ListView::parse_upper(&upper).unwrap();
        assert_eq!(view.upper_nodes().collect::<Vec<_>>(), [(NodeId(3), 4), (NodeId(5), 6)]);
    }

    #[test]
    fn words_round_trip_and_foreign_words_are_refused() {
        let meta = NodeMeta { state: NodeState::Live, level: 3, is_uuid: true, upper: u32::MAX };
        assert_eq!(NodeMeta::from_word(meta.to_word()), Some(meta));
        for bad in [5, 33 << 8, 2 << 16, 1 << 24] {
            assert_eq!(NodeMeta::from_word(bad), None);
        }
        let entry = EntryPoint { node: NodeId(0), level: 0 };
        assert_eq!(EntryPoint::from_word(entry.to_word()), Some(entry));
        assert_eq!(EntryPoint::from_word(0), None);
        let slot = IdSlot { state: IdState::Claimed, fingerprint: (1 << 30) - 1, node: NodeId(u32::MAX) };
        assert_eq!(IdSlot::from_word(slot.to_word()), Some(slot));
        for id in [ExternalId::Num(u64::MAX), ExternalId::Uuid(u128::MAX - 5)] {
            assert_eq!(id_from_words(matches!(id, ExternalId::Uuid(_)), id_words(id)), id);
        }
        assert_ne!(id_hash(ExternalId::Num(5), 1 << 40), id_hash(ExternalId::Uuid(5), 1 << 40));
    }

    #[test]
    fn a_predecessor_is_never_taken_for_a_holder() {
        for node in [0, 1, u32::MAX - 1] {
            let word = predecessor_word(NodeId(node));
            assert_eq!(predecessor_from_word(word), Some(NodeId(node)));
            assert_eq!(word >> 32, 0, "a holder word names a session there");
        }
        for holder in [0, 1 << 32, 7 << 32 | 5] {
            assert_eq!(predecessor_from_word(holder), None);
        }
    }

    #[test]
    fn parameters_out_of_range_are_named() {
        let field = |dim, m, ef, cap| {
            CollectionParams::new(DType::I8, Metric::L2, dim, m, ef, cap, 1).unwrap_err().field
        };
        assert_eq!(field(0, 16, 200, 1), "dimension");
        assert_eq!(field(4, 1, 200, 1), "m");
        assert_eq!(field(4, 16, 0, 1), "ef_construction");
        assert_eq!(field(4, 16, 200, 0), "capacity");
    }
}
