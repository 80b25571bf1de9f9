//! Messages of the control plane and of clients. Encoded with rkyv and *validated* before use ([`decode`]).
//!
//! Verbs have frames of their own ([`crate::verbs`]); here are the calls that are rare or large.
//!
//! Invariant: a message that passes [`decode`] is well-formed; whether it makes sense is for the receiver to check.

use rkyv::api::high::{HighDeserializer, HighSerializer, HighValidator};
use rkyv::bytecheck::CheckBytes;
use rkyv::rancor;
use rkyv::ser::allocator::ArenaHandle;
use rkyv::util::AlignedVec;
use rkyv::{Archive, Deserialize, Serialize};

use crate::ids::{CollectionId, Epoch, ExternalId, Incarnation, NodeId, RegionId};
use crate::layout::CollectionParams;
use crate::metric::{DType, Metric};

/// Version of this page and of the verbs' frames. Peers of another version are refused at connection.
pub const PROTOCOL_VERSION: u32 = 1;
/// Largest control-plane message in bytes.
pub const MESSAGE_MAX: usize = 16 << 20;

/// Role of a process, as its certificate says.
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    Debug,
    PartialOrd,
    Ord,
    Archive,
    Serialize,
    Deserialize,
    serde::Serialize,
    serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Compute node.
    Cn,
    /// Memory node.
    Mn,
    /// Oracle.
    Oracle,
    /// User that may search and insert.
    Client,
    /// User that may also create, load and drop.
    Admin,
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Cn => "cn",
            Self::Mn => "mn",
            Self::Oracle => "oracle",
            Self::Client => "client",
            Self::Admin => "admin",
        })
    }
}

impl std::str::FromStr for Role {
    type Err = crate::metric::UnknownName;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "cn" => Self::Cn,
            "mn" => Self::Mn,
            "oracle" => Self::Oracle,
            "client" => Self::Client,
            "admin" => Self::Admin,
            _ => {
                return Err(crate::metric::UnknownName {
                    what: "role",
                    given: text.into(),
                    expected: "cn, mn, oracle, client, admin",
                });
            }
        })
    }
}

/// What kind of failure a caller met: decides whether to retry, go elsewhere, or give up.
#[derive(
    Clone, Copy, PartialEq, Eq, Debug, Archive, Serialize, Deserialize, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum FaultCode {
    /// The request itself is wrong.
    BadRequest,
    /// No such collection, id or member.
    NotFound,
    /// A collection of that name exists.
    CollectionExists,
    /// The external id is taken.
    IdExists,
    /// The certificate's role does not allow it.
    Forbidden,
    /// Queues are full: try another node, or later.
    Overloaded,
    /// The deadline passed.
    DeadlineExceeded,
    /// A memory node that the collection needs does not answer.
    MemoryNodeLost,
    /// The content of a region is gone: reload the collection from its graph file.
    RegionLost,
    /// No memory left in the collection's regions.
    RegionFull,
    /// The caller's map is old.
    StaleEpoch,
    /// No oracle answers.
    NoOracle,
    /// The node is starting, stopping, or the collection is still loading.
    Unavailable,
    /// Remote memory holds something that this version did not write.
    Corrupt,
    /// A bug, with what is known of it.
    Internal,
}

/// A failure as it crosses the wire.
#[derive(
    Clone, PartialEq, Eq, Debug, Archive, Serialize, Deserialize, thiserror::Error, serde::Serialize,
)]
#[error("{message}")]
pub struct Fault {
    /// Kind.
    pub code: FaultCode,
    /// What and where, and what to do about it.
    pub message: String,
}

impl Fault {
    /// A failure of kind `code`.
    pub fn new(code: FaultCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

// ---------------------------------------------------------------------------------------------- cluster map

/// Whether a member's lease is running.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Archive, Serialize, Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MemberState {
    /// Lease running.
    Up,
    /// Lease ran out.
    Down,
}

/// A process of the cluster.
#[derive(Clone, PartialEq, Eq, Debug, Archive, Serialize, Deserialize, serde::Serialize)]
pub struct Member {
    /// Name, unique per role in the cluster; a restarted process keeps it.
    pub name: String,
    /// Role.
    pub role: Role,
    /// Socket address that others reach it at, `ip:port`.
    pub addr: String,
    /// Present life.
    #[serde(skip)]
    pub incarnation: Incarnation,
    /// Lease state.
    pub state: MemberState,
}

/// What a region is used for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Archive, Serialize, Deserialize)]
pub enum RegionUse {
    /// Zeroed, may be given to a collection.
    Free,
    /// Holds part of a collection.
    Used(CollectionId),
    /// Given back: its memory node zeroes it and reports.
    Resetting,
}

/// A region's line in the map.
#[derive(Clone, PartialEq, Eq, Debug, Archive, Serialize, Deserialize)]
pub struct RegionEntry {
    /// The region.
    pub id: RegionId,
    /// Name of the memory node that hosts it.
    pub mn: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Present epoch: verbs must name it. Grows when the region moves, is emptied, or its memory node restarts.
    pub epoch: Epoch,
    /// Epoch at which the present content began (zeroed memory). A collection that knew an older one has lost it.
    pub born: Epoch,
    /// Use.
    pub usage: RegionUse,
}

/// Where a collection is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Archive, Serialize, Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CollectionState {
    /// Its superblocks are being written.
    Creating,
    /// A graph file is being loaded; not searchable yet.
    Loading,
    /// Searchable.
    Ready,
}

/// A collection's line in the map.
#[derive(Clone, PartialEq, Eq, Debug, Archive, Serialize, Deserialize)]
pub struct Collection {
    /// Number.
    pub id: CollectionId,
    /// Name, unique: 1 to 64 of `a-z A-Z 0-9 _ -`.
    pub name: String,
    /// Parameters.
    pub params: CollectionParams,
    /// Its regions in the order they were added (the first is the home region), each with the `born` epoch that it
    /// had when it was given.
    pub regions: Vec<(RegionId, Epoch)>,
    /// Names of the memory nodes that it may use.
    pub memory_nodes: Vec<String>,
    /// State.
    pub state: CollectionState,
}

/// Everything that all nodes must agree on, under one epoch. Published by the oracle alone.
#[derive(Clone, PartialEq, Eq, Debug, Default, Archive, Serialize, Deserialize)]
pub struct ClusterMap {
    /// Version.
    pub epoch: Epoch,
    /// Members, by (role, name).
    pub members: Vec<Member>,
    /// Regions, by id.
    pub regions: Vec<RegionEntry>,
    /// Collections, by id.
    pub collections: Vec<Collection>,
}

impl ClusterMap {
    /// The member of that role and name.
    pub fn member(&self, role: Role, name: &str) -> Option<&Member> {
        self.members.iter().find(|m| m.role == role && m.name == name)
    }

    /// The region's entry.
    pub fn region(&self, id: RegionId) -> Option<&RegionEntry> {
        self.regions.binary_search_by_key(&id, |r| r.id).ok().map(|at| &self.regions[at])
    }

    /// The collection of that name.
    pub fn collection(&self, name: &str) -> Option<&Collection> {
        self.collections.iter().find(|c| c.name == name)
    }

    /// The first of the collection's regions whose content is not the one that the collection was given.
    pub fn lost_region(&self, collection: &Collection) -> Option<RegionId> {
        let kept = |id: &RegionId, born: &Epoch| self.region(*id).is_some_and(|entry| entry.born == *born);
        collection.regions.iter().find(|(id, born)| !kept(id, born)).map(|(id, _)| *id)
    }
}

// ------------------------------------------------------------------------------------------------ to oracle

/// What a new collection shall be.
#[derive(Clone, PartialEq, Eq, Debug, Archive, Serialize, Deserialize)]
pub struct CollectionSpec {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Metric.
    pub metric: Metric,
    /// Elements per vector.
    pub dim: u32,
    /// Links per node and upper level.
    pub m: u32,
    /// Beam of inserts.
    pub ef_construction: u32,
    /// Rows to plan for.
    pub capacity: u64,
    /// Memory nodes to use, by name; empty means all that are up.
    pub memory_nodes: Vec<String>,
    /// Whether it starts as `Loading` (for a graph file) or becomes `Ready` when its superblocks are written.
    pub loading: bool,
}

/// A call to the oracle.
#[derive(Clone, PartialEq, Debug, Archive, Serialize, Deserialize)]
pub enum OracleRequest {
    /// A process enters the cluster, or comes back.
    Join {
        /// Name; must equal the certificate's.
        name: String,
        /// Role; must equal the certificate's.
        role: Role,
        /// Address that others shall use.
        addr: String,
        /// Its life.
        incarnation: Incarnation,
        /// Regions offered (memory nodes only).
        regions: u16,
        /// Bytes of each.
        region_bytes: u64,
    },
    /// Renews a lease.
    Renew {
        /// Name.
        name: String,
        /// Role.
        role: Role,
        /// Life.
        incarnation: Incarnation,
    },
    /// Leaves cleanly.
    Leave {
        /// Name.
        name: String,
        /// Role.
        role: Role,
        /// Life.
        incarnation: Incarnation,
    },
    /// Answers with the map as soon as its epoch is above `after`, or after `wait_ms` with the map as it is.
    WatchMap {
        /// Epoch that the caller has.
        after: Epoch,
        /// Longest wait in milliseconds, at most 30,000.
        wait_ms: u32,
    },
    /// Makes a collection (compute nodes and admins).
    CreateCollection(CollectionSpec),
    /// Says that superblocks are written, or that loading has ended (compute nodes).
    SetCollectionState {
        /// The collection.
        id: CollectionId,
        /// Its new state.
        state: CollectionState,
    },
    /// Asks for more regions; a no-op if the collection already has more than `have`.
    GrowCollection {
        /// The collection.
        id: CollectionId,
        /// Regions that the caller knows of.
        have: u32,
    },
    /// Forgets a collection and gives its regions back.
    DropCollection {
        /// Name.
        name: String,
    },
    /// A memory node has zeroed a region that was `Resetting`.
    RegionZeroed {
        /// Name of the memory node.
        mn: String,
        /// Its life.
        incarnation: Incarnation,
        /// The region.
        region: RegionId,
        /// Epoch under which it was zeroed.
        epoch: Epoch,
    },
    /// The oracle's own state.
    Status,
}

/// A region as granted to the memory node that offered it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Archive, Serialize, Deserialize)]
pub struct RegionGrant {
    /// The region.
    pub id: RegionId,
    /// Present epoch.
    pub epoch: Epoch,
    /// Epoch at which its present content began.
    pub born: Epoch,
}

/// Answer of the oracle.
#[derive(Clone, PartialEq, Debug, Archive, Serialize, Deserialize)]
pub enum OracleResponse {
    /// To `Join`.
    Joined {
        /// Lease; renew well before it ends.
        lease_ms: u32,
        /// Regions, in the order of the offer (memory nodes only).
        regions: Vec<RegionGrant>,
        /// Epoch of the map.
        epoch: Epoch,
    },
    /// To `Renew`.
    Renewed {
        /// Epoch of the map.
        epoch: Epoch,
    },
    /// To `WatchMap`.
    Map(ClusterMap),
    /// To `CreateCollection` and `GrowCollection`: the collection as it is now, and the epoch of the map.
    Collection {
        /// The collection.
        collection: Collection,
        /// Epoch of the map that has it.
        epoch: Epoch,
    },
    /// Done; the epoch of the map.
    Done {
        /// Epoch of the map.
        epoch: Epoch,
    },
    /// To `Status`.
    Status(NodeStatus),
}

// ---------------------------------------------------------------------------------------- to compute nodes

/// What to look near to.
#[derive(Clone, PartialEq, Debug, Archive, Serialize, Deserialize)]
pub enum Target {
    /// A vector in the collection's native type: dimension × element bytes, little-endian.
    Vector(Vec<u8>),
    /// The vector stored under an id (which is itself an answer).
    Id(ExternalId),
}

/// A call to a compute node.
#[derive(Clone, PartialEq, Debug, Archive, Serialize, Deserialize)]
pub enum CnRequest {
    /// Nearest neighbours.
    Search {
        /// Collection name.
        collection: String,
        /// What to look near to.
        target: Target,
        /// Answers wanted, 1 to 65,536.
        k: u32,
        /// Beam, 1 to 65,536; raised to k where smaller.
        ef: u32,
        /// Time that the compute node may take, in milliseconds; 0 means its default (2,000).
        deadline_ms: u32,
        /// Whether answers carry their vectors.
        with_vectors: bool,
    },
    /// Adds one vector under a new id.
    Insert {
        /// Collection name.
        collection: String,
        /// Id.
        id: ExternalId,
        /// Vector in native form.
        vector: Vec<u8>,
        /// As in `Search`.
        deadline_ms: u32,
    },
    /// The record under an id.
    Get {
        /// Collection name.
        collection: String,
        /// Id.
        id: ExternalId,
        /// As in `Search`.
        deadline_ms: u32,
    },
    /// Makes an empty, searchable collection.
    Create(CollectionSpec),
    /// Forgets a collection.
    Drop {
        /// Name.
        collection: String,
    },
    /// Collections with their sizes.
    List,
    /// One collection in detail.
    Stats {
        /// Name.
        collection: String,
    },
    /// Begins loading a graph file into a new collection.
    LoadBegin {
        /// The collection; `loading` is taken as true.
        spec: CollectionSpec,
        /// Nodes in the file.
        nodes: u32,
        /// Upper slots in the file.
        upper_slots: u32,
        /// Drop a collection of that name first.
        replace: bool,
        /// The file's fingerprint ([`crate::graph_file::GraphFile::fingerprint`]).
        file: u64,
        /// Go on with a load of that file into that collection, wherever it was begun; there being none, begin one.
        resume: bool,
    },
    /// Nodes `first ..` of the file being loaded, in the file's own form (the layout's).
    LoadNodes {
        /// From `LoadBegin`.
        load: u64,
        /// Number of the first node.
        first: u32,
        /// Header meta words, state `Live`.
        metas: Vec<u64>,
        /// External ids; empty means that they are the node numbers.
        ids: Vec<ExternalId>,
        /// Vectors at the layout's stride.
        vectors: Vec<u8>,
        /// Encoded level-0 lists at the layout's stride.
        lists: Vec<u8>,
    },
    /// Upper lists `first ..` of the file being loaded, encoded.
    LoadUpper {
        /// From `LoadBegin`.
        load: u64,
        /// Number of the first upper slot.
        first: u32,
        /// Encoded upper lists at the layout's stride (all-zero where a slot is unused).
        lists: Vec<u8>,
    },
    /// Ends a load: everything must have come; sets the entry point and makes the collection ready.
    LoadEnd {
        /// From `LoadBegin`.
        load: u64,
        /// Entry point word ([`crate::layout::EntryPoint`]).
        entry_point: u64,
    },
    /// Gives up a load for good: the collection is dropped.
    LoadAbort {
        /// From `LoadBegin`.
        load: u64,
    },
    /// Starts a check of a collection, or asks how far it is.
    Check {
        /// Collection name.
        collection: String,
        /// 0 to start; else the job from the first answer.
        job: u64,
    },
    /// The node's own state.
    Status,
}

/// One answer of a search.
#[derive(Clone, PartialEq, Debug, Archive, Serialize, Deserialize)]
pub struct Hit {
    /// External id.
    pub id: ExternalId,
    /// Node.
    pub node: NodeId,
    /// Distance under the collection's metric.
    pub distance: f32,
    /// Vector in native form, if it was asked for (else empty).
    pub vector: Vec<u8>,
}

/// What a query did.
#[derive(Clone, PartialEq, Debug, Default, Archive, Serialize, Deserialize, serde::Serialize)]
pub struct Receipt {
    /// Compute node that ran it.
    pub cn: String,
    /// Expansions, any level.
    pub hops: u32,
    /// Dependent round trips; parallel gathers to several memory nodes are one.
    pub rounds: u32,
    /// Records read remotely: vectors, lists, headers.
    pub remote_reads: u32,
    /// Bytes of verbs frames, both directions, headers included.
    pub bytes: u64,
    /// Distances computed.
    pub distances: u32,
    /// Lists that were read again since they were torn.
    pub torn_lists: u32,
    /// Epoch of the map under which it ran.
    pub epoch: u64,
    /// Microseconds inside the compute node.
    pub elapsed_us: u64,
}

/// A collection's sizes.
#[derive(Clone, PartialEq, Debug, Archive, Serialize, Deserialize, serde::Serialize)]
pub struct CollectionInfo {
    /// Name.
    pub name: String,
    /// State.
    pub state: CollectionState,
    /// Element type.
    pub dtype: DType,
    /// Metric.
    pub metric: Metric,
    /// Elements per vector.
    pub dimension: u32,
    /// Links per node and upper level.
    pub m: u32,
    /// Beam of inserts.
    pub ef_construction: u32,
    /// Vectors that are live, as counted by inserts and loads.
    pub vectors: u64,
    /// Chunks allocated.
    pub chunks: u64,
    /// Upper chunks allocated.
    pub upper_chunks: u64,
    /// Level of the entry point; 0 also while empty.
    pub level: u32,
    /// Bytes handed out in its regions.
    pub bytes_used: u64,
    /// Bytes of its regions.
    pub bytes_reserved: u64,
    /// Regions with the memory node that hosts each.
    pub regions: Vec<(u16, String)>,
    /// A region whose content is gone, if any.
    pub lost_region: Option<u16>,
}

/// Outcome of a check. All counts are over the whole collection.
#[derive(
    Clone, PartialEq, Debug, Default, Archive, Serialize, Deserialize, serde::Serialize, serde::Deserialize,
)]
pub struct CheckReport {
    /// Records in state live.
    pub live: u64,
    /// Records of unfinished inserts whose inserter may still be at work.
    pub linking: u64,
    /// Records of inserts that were cut off; they are never answers.
    pub abandoned: u64,
    /// Records in state dead.
    pub dead: u64,
    /// Links on all levels.
    pub links: u64,
    /// Links to nodes that do not exist, or are not on that level: must be 0.
    pub links_out_of_range: u64,
    /// Lists that stayed torn or were never written: must be 0.
    pub bad_lists: u64,
    /// Live records whose id the id table does not find, or finds elsewhere: must be 0.
    pub ids_missing: u64,
    /// Ids that name more than one live record: must be 0.
    pub ids_duplicate: u64,
    /// Live records that cannot be reached on level 0 from the entry point.
    pub orphans: u64,
    /// What was wrong first, in words; at most 20 lines.
    pub findings: Vec<String>,
}

impl CheckReport {
    /// Whether nothing that must be 0 is above it.
    pub fn is_sound(&self) -> bool {
        self.links_out_of_range == 0
            && self.bad_lists == 0
            && self.ids_missing == 0
            && self.ids_duplicate == 0
    }
}

/// State of one process.
#[derive(Clone, PartialEq, Debug, Archive, Serialize, Deserialize, serde::Serialize)]
pub struct NodeStatus {
    /// Name.
    pub name: String,
    /// Role.
    pub role: Role,
    /// Version of the program.
    pub version: String,
    /// Seconds since start.
    pub uptime_s: u64,
    /// Epoch of its map.
    pub epoch: u64,
    /// Whether an oracle answered within the last lease.
    pub oracle_reachable: bool,
    /// Instruction set of the distance kernels; `none` of a process that computes no distances.
    pub simd: String,
    /// Counters by name, cumulative.
    pub counters: Vec<(String, u64)>,
}

/// Answer of a compute node.
#[derive(Clone, PartialEq, Debug, Archive, Serialize, Deserialize)]
pub enum CnResponse {
    /// To `Search`.
    Hits {
        /// Answers, nearest first; fewer than k if the collection is smaller.
        hits: Vec<Hit>,
        /// Beam that was used.
        ef: u32,
        /// What it cost.
        receipt: Receipt,
    },
    /// To `Insert`.
    Inserted {
        /// The new node.
        node: NodeId,
        /// What it cost.
        receipt: Receipt,
    },
    /// To `Get`.
    Record {
        /// The node.
        node: NodeId,
        /// Its level.
        level: u8,
        /// Vector in native form.
        vector: Vec<u8>,
    },
    /// To `List`.
    Collections(Vec<CollectionInfo>),
    /// To `Create` and `Stats`.
    Info(CollectionInfo),
    /// To `LoadBegin`; `Done` instead where the whole file is loaded already.
    Loading {
        /// Names the load in what follows.
        load: u64,
        /// Layout that pieces must have.
        params: CollectionParams,
        /// Nodes that are there already, from the first on.
        nodes_done: u32,
        /// Upper lists that are there already, from the first on.
        upper_done: u32,
    },
    /// To `Check`.
    Check {
        /// Names the job in what follows.
        job: u64,
        /// Records looked at.
        done: u64,
        /// Records to look at.
        total: u64,
        /// The outcome, once it is there.
        report: Option<CheckReport>,
    },
    /// To `Status`.
    Status(NodeStatus),
    /// Done.
    Done,
}

/// A call to a memory node's processor: control only, data goes by verbs.
#[derive(Clone, PartialEq, Debug, Archive, Serialize, Deserialize)]
pub enum MnRequest {
    /// The node's own state.
    Status,
}

/// Answer of a memory node.
#[derive(Clone, PartialEq, Debug, Archive, Serialize, Deserialize)]
pub enum MnResponse {
    /// To `Status`.
    Status(NodeStatus),
}

// --------------------------------------------------------------------------------------------------- codec

/// Bytes that are not a message of the expected type.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{bytes} bytes are not a valid {expected}")]
pub struct BadMessage {
    /// Type that was expected.
    pub expected: &'static str,
    /// Length of what came.
    pub bytes: usize,
}

/// Encodes a message.
pub fn encode<T>(message: &T) -> AlignedVec
where
    T: for<'a> Serialize<HighSerializer<AlignedVec, ArenaHandle<'a>, rancor::Error>>,
{
    rkyv::to_bytes::<rancor::Error>(message).expect("serialising into memory cannot fail")
}

/// Checks and decodes a message.
///
/// # Errors
/// [`BadMessage`] if the bytes are not a well-formed `T`.
pub fn decode<T>(bytes: &[u8]) -> Result<T, BadMessage>
where
    T: Archive,
    T::Archived: for<'a> CheckBytes<HighValidator<'a, rancor::Error>>
        + Deserialize<T, HighDeserializer<rancor::Error>>,
{
    let bad = || BadMessage {
        expected: std::any::type_name::<T>().rsplit("::").next().unwrap_or("message"),
        bytes: bytes.len(),
    };
    // Network buffers come at any alignment; rkyv reads in place only at its own.
    let mut aligned = AlignedVec::<16>::with_capacity(bytes.len());
    aligned.extend_from_slice(bytes);
    rkyv::from_bytes::<T, rancor::Error>(&aligned).map_err(|_| bad())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_survives_and_a_cut_one_is_refused() {
        let message = CnRequest::Search {
            collection: "glove".into(),
            target: Target::Vector(vec![1; 100]),
            k: 10,
            ef: 40,
            deadline_ms: 0,
            with_vectors: false,
        };
        let bytes = encode(&message);
        assert_eq!(decode::<CnRequest>(&bytes).unwrap(), message);
        for cut in 0..bytes.len() {
            assert!(decode::<CnRequest>(&bytes[..cut]).is_err() || cut == bytes.len());
        }
    }
}
