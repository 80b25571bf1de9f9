//! What the oracle knows and how it changes: members with their leases, regions, collections, all under one epoch.
//!
//! Pure: no socket, file or clock. Time is passed in as milliseconds since the oracle started; an operation either
//! answers with a fault and changes nothing, or is applied whole.
//!
//! ```text
//! region     (joins) ──► Free ──create, grow──► Used(c) ──drop──► Resetting ──RegionZeroed──► Free
//!                          ▲                                          │
//!                          └──────── memory node restarts ◄───────────┘
//! ```
//!
//! A memory node that restarts keeps its region ids and brings zeroed memory: every region gets a new `epoch` and
//! `born`, and a collection that knew an older `born` has lost it ([`ClusterMap::lost_region`]). One that is silent
//! is marked down and keeps its regions: maps change, content does not.
//!
//! Invariants ([`State::check`]): every change of the map makes its epoch larger by one; no region is in two
//! collections; a region is `Free` only with zeroed memory; names of collections are unique.

use core::net::SocketAddr;
use std::collections::BTreeMap;

use rkyv::{Archive, Deserialize, Serialize};
use shine_common::ids::{CollectionId, Epoch, Incarnation, RegionId, RemotePtr};
use shine_common::layout::CollectionParams;
use shine_common::net::tls::is_process_name;
use shine_common::wire::{
    ClusterMap, Collection, CollectionSpec, CollectionState, Fault, FaultCode, Member, MemberState,
    OracleRequest, OracleResponse, RegionEntry, RegionGrant, RegionUse, Role,
};

/// Most members, up or down.
pub const MEMBERS_MAX: usize = 4_096;
/// Most collections.
pub const COLLECTIONS_MAX: usize = 4_096;
/// Smallest region: superblock, tables of a small collection and some chunks.
pub const REGION_BYTES_MIN: u64 = 1 << 20;
/// Longest name of a collection.
pub const COLLECTION_NAME_MAX: usize = 64;

/// Everything that survives a restart of the oracle.
#[derive(Clone, PartialEq, Debug, Archive, Serialize, Deserialize)]
pub struct State {
    epoch: Epoch,
    members: BTreeMap<(u8, String), MemberRecord>,
    regions: BTreeMap<u16, RegionEntry>,
    collections: BTreeMap<u32, Collection>,
    /// Numbers of collections are never used twice.
    next_collection: u32,
}

#[derive(Clone, PartialEq, Debug, Archive, Serialize, Deserialize)]
struct MemberRecord {
    member: Member,
    /// Regions that it hosts in its present life, in the order of its offer.
    hosts: Vec<RegionId>,
    region_bytes: u64,
}

fn key(role: Role, name: &str) -> (u8, String) {
    (role as u8, name.to_owned())
}

fn fault(code: FaultCode, message: impl Into<String>) -> Fault {
    Fault::new(code, message)
}

/// Whether `name` can name a collection: 1 to 64 of `a-z A-Z 0-9 _ -`.
pub fn is_collection_name(name: &str) -> bool {
    (1..=COLLECTION_NAME_MAX).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-')
}

impl State {
    /// An empty cluster whose first change gets an epoch above `before`. An oracle that starts from nothing passes
    /// something that no earlier one can have reached (milliseconds since 1970), so that nodes which outlived it
    /// take its maps for newer ones.
    pub fn empty(before: Epoch) -> Self {
        Self {
            epoch: before,
            members: BTreeMap::new(),
            regions: BTreeMap::new(),
            collections: BTreeMap::new(),
            next_collection: 1,
        }
    }

    /// Epoch of the map.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The map as it is published.
    pub fn map(&self) -> ClusterMap {
        // The tables' orders are those that the map promises.
        ClusterMap {
            epoch: self.epoch,
            members: self.members.values().map(|record| record.member.clone()).collect(),
            regions: self.regions.values().cloned().collect(),
            collections: self.collections.values().cloned().collect(),
        }
    }

    /// The first invariant that does not hold, in words. For stored states and for tests.
    ///
    /// # Errors
    /// What is broken.
    pub fn check(&self) -> Result<(), String> {
        let mut owner = BTreeMap::new();
        let mut names = std::collections::BTreeSet::new();
        for (id, collection) in &self.collections {
            if collection.id.0 != *id || *id >= self.next_collection {
                return Err(format!("{} is numbered beyond what was given", collection.id));
            }
            if !names.insert(&collection.name) {
                return Err(format!("two collections are named '{}'", collection.name));
            }
            if collection.regions.is_empty() {
                return Err(format!("collection '{}' has no region", collection.name));
            }
            for (region, born) in &collection.regions {
                if let Some(other) = owner.insert(*region, collection.id) {
                    return Err(format!("{region} is in {other} and in {}", collection.id));
                }
                let Some(entry) = self.regions.get(&region.0) else {
                    return Err(format!("{region} of '{}' is unknown", collection.name));
                };
                if entry.usage != RegionUse::Used(collection.id) || *born > entry.born {
                    return Err(format!("{region} does not know that it belongs to {}", collection.id));
                }
            }
        }
        for (id, entry) in &self.regions {
            if entry.id.0 != *id || entry.born > entry.epoch || entry.epoch > self.epoch {
                return Err(format!("{} has epochs out of order", entry.id));
            }
            if matches!(entry.usage, RegionUse::Used(c) if owner.get(&entry.id) != Some(&c)) {
                return Err(format!("{} is used by no collection", entry.id));
            }
            let hosted = self.host_of(entry).is_some_and(|record| record.hosts.contains(&entry.id));
            if !hosted && !matches!(entry.usage, RegionUse::Used(_)) {
                return Err(format!("{} is hosted by nobody", entry.id));
            }
        }
        for record in self.members.values() {
            if record
                .hosts
                .iter()
                .any(|id| self.regions.get(&id.0).is_none_or(|e| e.mn != record.member.name))
            {
                return Err(format!("mn '{}' hosts a region that is not its own", record.member.name));
            }
        }
        Ok(())
    }

    fn host_of(&self, entry: &RegionEntry) -> Option<&MemberRecord> {
        self.members.get(&key(Role::Mn, &entry.mn))
    }

    fn record(&self, role: Role, name: &str) -> Option<&MemberRecord> {
        self.members.get(&key(role, name))
    }

    fn next_epoch(&mut self) -> Epoch {
        self.epoch = self.epoch.next();
        self.epoch
    }

    // ------------------------------------------------------------------------------------------- members

    fn join(
        &mut self,
        name: &str,
        role: Role,
        addr: &str,
        incarnation: Incarnation,
        regions: u16,
        region_bytes: u64,
    ) -> Result<Vec<RegionGrant>, Fault> {
        let bad = |message: String| Err(fault(FaultCode::BadRequest, message));
        if !is_process_name(name) {
            return bad(format!(
                "name '{name}': expected 1 to 63 of a-z 0-9 -, not starting or ending with -"
            ));
        }
        match addr.parse::<SocketAddr>() {
            Ok(addr) if addr.port() != 0 && !addr.ip().is_unspecified() => {}
            _ => {
                return bad(format!(
                    "address '{addr}' of {role} '{name}': expected ip:port that others can reach"
                ));
            }
        }
        match role {
            Role::Mn if regions == 0 => return bad(format!("mn '{name}' offers no region")),
            Role::Mn
                if !(REGION_BYTES_MIN..=RemotePtr::OFFSET_MAX).contains(&region_bytes)
                    || !region_bytes.is_multiple_of(4096) =>
            {
                return bad(format!(
                    "mn '{name}' offers regions of {region_bytes} bytes: expected a multiple of 4096, at least \
                     {REGION_BYTES_MIN}"
                ));
            }
            Role::Cn if regions != 0 => {
                return bad(format!("cn '{name}' offers regions: only memory nodes do"));
            }
            Role::Mn | Role::Cn => {}
            Role::Oracle | Role::Client | Role::Admin => {
                return Err(fault(
                    FaultCode::Forbidden,
                    format!("{role} '{name}' cannot join: expected role cn or mn"),
                ));
            }
        }
        let known = self.record(role, name).cloned();
        let same_life = known.as_ref().is_some_and(|known| known.member.incarnation == incarnation);
        if let Some(known) = &known
            && same_life
            && role == Role::Mn
            && (known.hosts.len() != usize::from(regions) || known.region_bytes != region_bytes)
        {
            return bad(format!(
                "mn '{name}' comes back with {regions} regions of {region_bytes} bytes, it had {} of {}",
                known.hosts.len(),
                known.region_bytes
            ));
        }
        if known.is_none() && self.members.len() >= MEMBERS_MAX && !self.forget_one_gone() {
            return Err(fault(
                FaultCode::Overloaded,
                format!("the cluster has {MEMBERS_MAX} members already"),
            ));
        }
        let member =
            Member { name: name.into(), role, addr: addr.into(), incarnation, state: MemberState::Up };
        if same_life && known.as_ref().is_some_and(|known| known.member == member) {
            // Said twice: the answer to the first was lost.
            return Ok(self.grants(&known.expect("checked above").hosts));
        }
        let hosts = if role == Role::Mn && !same_life {
            // Moves the epoch itself: its regions carry the new one.
            self.host_anew(name, known.map(|known| known.hosts).unwrap_or_default(), regions, region_bytes)?
        } else {
            self.next_epoch();
            known.map(|known| known.hosts).unwrap_or_default()
        };
        let grants = self.grants(&hosts);
        self.members.insert(key(role, name), MemberRecord { member, hosts, region_bytes });
        Ok(grants)
    }

    /// Regions of a memory node that starts a new life, with zeroed memory: ids of its last life where the size is
    /// the same, new ones for the rest. What it no longer hosts is forgotten, once no collection names it.
    fn host_anew(
        &mut self,
        mn: &str,
        before: Vec<RegionId>,
        regions: u16,
        region_bytes: u64,
    ) -> Result<Vec<RegionId>, Fault> {
        let keeps = |id: &RegionId| self.regions.get(&id.0).is_some_and(|entry| entry.bytes == region_bytes);
        let mut hosts: Vec<RegionId> =
            before.iter().copied().filter(keeps).take(usize::from(regions)).collect();
        let wanted = usize::from(regions) - hosts.len();
        let fresh: Vec<RegionId> =
            (0..=u16::MAX).filter(|id| !self.regions.contains_key(id)).map(RegionId).take(wanted).collect();
        if fresh.len() < wanted {
            return Err(fault(
                FaultCode::RegionFull,
                format!(
                    "mn '{mn}' offers {regions} regions, and the cluster has numbers for {} more: use larger regions",
                    fresh.len()
                ),
            ));
        }
        let epoch = self.next_epoch();
        for id in &before {
            let entry = self.regions.get_mut(&id.0).expect("hosted regions are known");
            match entry.usage {
                // The collection has lost this content, and says so until it is dropped.
                RegionUse::Used(_) => (entry.epoch, entry.born) = (epoch, epoch),
                RegionUse::Free | RegionUse::Resetting if hosts.contains(id) => {
                    (entry.epoch, entry.born, entry.usage) = (epoch, epoch, RegionUse::Free);
                }
                RegionUse::Free | RegionUse::Resetting => {
                    self.regions.remove(&id.0);
                }
            }
        }
        for id in fresh {
            let entry = RegionEntry {
                id,
                mn: mn.into(),
                bytes: region_bytes,
                epoch,
                born: epoch,
                usage: RegionUse::Free,
            };
            self.regions.insert(id.0, entry);
            hosts.push(id);
        }
        Ok(hosts)
    }

    fn grants(&self, hosts: &[RegionId]) -> Vec<RegionGrant> {
        let grant = |id: &RegionId| {
            let entry = &self.regions[&id.0];
            RegionGrant { id: entry.id, epoch: entry.epoch, born: entry.born }
        };
        hosts.iter().map(grant).collect()
    }

    /// Makes room for a member: forgets a compute node that is down.
    fn forget_one_gone(&mut self) -> bool {
        let gone = |record: &MemberRecord| {
            record.member.role != Role::Mn && record.member.state == MemberState::Down
        };
        let Some(key) = self.members.iter().find(|(_, record)| gone(record)).map(|(key, _)| key.clone())
        else {
            return false;
        };
        self.members.remove(&key);
        true
    }

    fn leave(&mut self, name: &str, role: Role, incarnation: Incarnation) {
        let Some(record) = self.members.get_mut(&key(role, name)) else { return };
        if record.member.incarnation != incarnation {
            return;
        }
        if role == Role::Mn {
            // Its memory is gone with it, which its next life will say; until then the regions stay its own.
            if record.member.state == MemberState::Down {
                return;
            }
            record.member.state = MemberState::Down;
        } else {
            self.members.remove(&key(role, name));
        }
        self.next_epoch();
    }

    // --------------------------------------------------------------------------------------- collections

    fn collection_mut(&mut self, id: CollectionId) -> Result<&mut Collection, Fault> {
        self.collections
            .get_mut(&id.0)
            .ok_or_else(|| fault(FaultCode::NotFound, format!("no collection {id}: it was dropped")))
    }

    /// The first region of `mn` that can be given away.
    fn free_region(&self, mn: &str) -> Option<&RegionEntry> {
        let record = self.record(Role::Mn, mn)?;
        let entry = |id: &RegionId| &self.regions[&id.0];
        record
            .hosts
            .iter()
            .map(entry)
            .filter(|entry| entry.usage == RegionUse::Free)
            .min_by_key(|entry| entry.id)
    }

    fn is_up(&self, mn: &str) -> bool {
        self.record(Role::Mn, mn).is_some_and(|record| record.member.state == MemberState::Up)
    }

    fn up_memory_nodes(&self) -> Vec<String> {
        let mns = self.members.values().filter(|record| record.member.role == Role::Mn);
        mns.filter(|r| r.member.state == MemberState::Up).map(|r| r.member.name.clone()).collect()
    }

    fn create(&mut self, spec: &CollectionSpec) -> Result<Collection, Fault> {
        let name = &spec.name;
        if !is_collection_name(name) {
            return Err(fault(
                FaultCode::BadRequest,
                format!("collection name '{name}': expected 1 to {COLLECTION_NAME_MAX} of a-z A-Z 0-9 _ -"),
            ));
        }
        if self.collections.values().any(|c| c.name == *name) {
            return Err(fault(FaultCode::CollectionExists, format!("collection '{name}' exists already")));
        }
        if self.collections.len() >= COLLECTIONS_MAX {
            return Err(fault(
                FaultCode::Overloaded,
                format!("the cluster has {COLLECTIONS_MAX} collections already: drop some"),
            ));
        }
        let mut chosen = self.memory_nodes_for(spec)?;
        // Home regions take turns, and the order is the same whenever it is computed.
        let turn = self.next_collection as usize % chosen.len();
        chosen.rotate_left(turn);
        let count = u16::try_from(chosen.len()).expect("members are fewer than regions");
        let params = CollectionParams::new(
            spec.dtype,
            spec.metric,
            spec.dim,
            spec.m,
            spec.ef_construction,
            spec.capacity,
            count,
        )
        .map_err(|bad| fault(FaultCode::BadRequest, format!("collection '{name}': {bad}")))?;
        let mut regions = Vec::with_capacity(chosen.len());
        for (index, mn) in chosen.iter().enumerate() {
            let entry = self.free_region(mn).expect("chosen for its free region");
            let needed = params.first_free(index) + params.chunk_bytes().max(params.upper_chunk_bytes());
            if needed > entry.bytes {
                return Err(fault(
                    FaultCode::BadRequest,
                    format!(
                        "collection '{name}' of capacity {} needs {needed} bytes in its first region on mn '{mn}', \
                         which has {}: start memory nodes with a larger --region-bytes, use more of them, or plan \
                         for fewer rows",
                        spec.capacity, entry.bytes
                    ),
                ));
            }
            regions.push((entry.id, entry.born));
        }
        let id = CollectionId(self.next_collection);
        self.next_collection += 1;
        for (region, _) in &regions {
            self.regions.get_mut(&region.0).expect("found above").usage = RegionUse::Used(id);
        }
        let mut memory_nodes = chosen;
        memory_nodes.sort();
        let state = if spec.loading { CollectionState::Loading } else { CollectionState::Creating };
        let collection = Collection { id, name: name.clone(), params, regions, memory_nodes, state };
        self.collections.insert(id.0, collection.clone());
        self.next_epoch();
        Ok(collection)
    }

    /// Memory nodes that a new collection starts on, sorted by name: each is up and has a free region.
    fn memory_nodes_for(&self, spec: &CollectionSpec) -> Result<Vec<String>, Fault> {
        if spec.memory_nodes.is_empty() {
            let up = self.up_memory_nodes();
            if up.is_empty() {
                return Err(fault(
                    FaultCode::Unavailable,
                    format!("collection '{}': no memory node is up", spec.name),
                ));
            }
            let (free, full): (Vec<_>, Vec<_>) =
                up.into_iter().partition(|mn| self.free_region(mn).is_some());
            return if free.is_empty() { Err(no_free_region(&spec.name, &full)) } else { Ok(free) };
        }
        let mut chosen = spec.memory_nodes.clone();
        chosen.sort();
        chosen.dedup();
        let is_known = |mn: &str| self.record(Role::Mn, mn).is_some();
        if let Some(unknown) = chosen.iter().find(|mn| !is_known(mn)) {
            let known: Vec<_> = self.members.values().filter(|r| r.member.role == Role::Mn).collect();
            let known: Vec<_> = known.iter().map(|r| r.member.name.as_str()).collect();
            return Err(fault(
                FaultCode::NotFound,
                format!(
                    "collection '{}': no memory node is named '{unknown}'; there are: {}",
                    spec.name,
                    if known.is_empty() { "none".into() } else { known.join(", ") }
                ),
            ));
        }
        if let Some(down) = chosen.iter().find(|mn| !self.is_up(mn)) {
            return Err(fault(
                FaultCode::MemoryNodeLost,
                format!("collection '{}': memory node '{down}' is down", spec.name),
            ));
        }
        let full: Vec<_> = chosen.iter().filter(|mn| self.free_region(mn).is_none()).cloned().collect();
        if full.is_empty() { Ok(chosen) } else { Err(no_free_region(&spec.name, &full)) }
    }

    fn set_collection_state(&mut self, id: CollectionId, state: CollectionState) -> Result<(), Fault> {
        use CollectionState::{Creating, Loading, Ready};
        let collection = self.collection_mut(id)?;
        match (collection.state, state) {
            (from, to) if from == to => return Ok(()),
            (Creating, Loading | Ready) | (Loading, Ready) => collection.state = state,
            (from, to) => {
                return Err(fault(
                    FaultCode::BadRequest,
                    format!("collection '{}' cannot go from {from:?} to {to:?}", collection.name),
                ));
            }
        }
        self.next_epoch();
        Ok(())
    }

    fn grow(&mut self, id: CollectionId, have: u32) -> Result<Collection, Fault> {
        let collection = self.collection_mut(id)?.clone();
        let name = &collection.name;
        let now_has = collection.regions.len();
        if now_has > have as usize {
            // Somebody else was first: the caller's map is old.
            return Ok(collection);
        }
        if now_has < have as usize {
            return Err(fault(
                FaultCode::BadRequest,
                format!("collection '{name}' has {now_has} regions, the caller knows of {have}"),
            ));
        }
        let lost = |(id, born): &&(RegionId, Epoch)| self.regions[&id.0].born != *born;
        if let Some((region, _)) = collection.regions.iter().find(lost) {
            return Err(fault(
                FaultCode::RegionLost,
                format!(
                    "collection '{name}' has lost {region}: drop it, or load it again from its graph file"
                ),
            ));
        }
        let up: Vec<_> = collection.memory_nodes.iter().filter(|mn| self.is_up(mn)).collect();
        let free: Vec<(RegionId, Epoch)> =
            up.iter().filter_map(|mn| self.free_region(mn)).map(|entry| (entry.id, entry.born)).collect();
        if free.is_empty() {
            return Err(no_free_region(name, &collection.memory_nodes));
        }
        for (region, _) in &free {
            self.regions.get_mut(&region.0).expect("found above").usage = RegionUse::Used(id);
        }
        let grown = self.collection_mut(id)?;
        grown.regions.extend(free);
        let grown = grown.clone();
        self.next_epoch();
        Ok(grown)
    }

    fn drop_collection(&mut self, name: &str) -> Result<(), Fault> {
        let Some(id) = self.collections.values().find(|c| c.name == name).map(|c| c.id) else {
            return Err(fault(FaultCode::NotFound, format!("no collection '{name}'")));
        };
        let collection = self.collections.remove(&id.0).expect("found above");
        let epoch = self.next_epoch();
        for (region, _) in &collection.regions {
            let entry = &self.regions[&region.0];
            let is_hosted = self.host_of(entry).is_some_and(|record| record.hosts.contains(region));
            if is_hosted {
                let entry = self.regions.get_mut(&region.0).expect("found above");
                (entry.epoch, entry.born, entry.usage) = (epoch, epoch, RegionUse::Resetting);
            } else {
                // Its memory node came back without it.
                self.regions.remove(&region.0);
            }
        }
        Ok(())
    }

    fn region_zeroed(
        &mut self,
        mn: &str,
        incarnation: Incarnation,
        region: RegionId,
        epoch: Epoch,
    ) -> Result<(), Fault> {
        let record = self.record(Role::Mn, mn);
        if record.is_none_or(|record| record.member.incarnation != incarnation) {
            return Err(fault(
                FaultCode::NotFound,
                format!("mn '{mn}' of that life is not a member: join again"),
            ));
        }
        let hosted = record.is_some_and(|record| record.hosts.contains(&region));
        let entry = match self.regions.get_mut(&region.0) {
            Some(entry) if hosted => entry,
            _ => return Err(fault(FaultCode::BadRequest, format!("{region} is not on mn '{mn}'"))),
        };
        if entry.epoch != epoch {
            return Err(fault(
                FaultCode::StaleEpoch,
                format!("{region} is at {}, mn '{mn}' zeroed it under {epoch}", entry.epoch),
            ));
        }
        match entry.usage {
            RegionUse::Resetting => entry.usage = RegionUse::Free,
            // Said twice: the answer to the first was lost.
            RegionUse::Free => return Ok(()),
            RegionUse::Used(_) => {
                return Err(fault(
                    FaultCode::StaleEpoch,
                    format!("{region} is in use again, it was zeroed before"),
                ));
            }
        }
        self.next_epoch();
        Ok(())
    }
}

fn no_free_region(collection: &str, on: &[String]) -> Fault {
    fault(
        FaultCode::RegionFull,
        format!(
            "collection '{collection}': no free region on memory node {}; start them with more --regions, or drop a \
             collection",
            on.join(", ")
        ),
    )
}

// ----------------------------------------------------------------------------------------------------- core

/// The state with its leases, which do not survive a restart: whoever renews within the first one is still in.
#[derive(Clone, Debug)]
pub struct Core {
    state: State,
    lease_ms: u32,
    /// End of each running lease, in milliseconds since start.
    leases: BTreeMap<(u8, String), u64>,
}

impl Core {
    /// Takes over `state` at `now_ms`.
    ///
    /// # Panics
    /// If an invariant does not hold: a stored state is checked before.
    pub fn new(state: State, lease_ms: u32, now_ms: u64) -> Self {
        if let Err(broken) = state.check() {
            panic!("the state of the oracle is consistent: {broken}");
        }
        let up = state.members.iter().filter(|(_, record)| record.member.state == MemberState::Up);
        let leases = up.map(|(key, _)| (key.clone(), now_ms + u64::from(lease_ms))).collect();
        Self { state, lease_ms, leases }
    }

    /// Length of a lease.
    pub fn lease_ms(&self) -> u32 {
        self.lease_ms
    }

    /// What must be stored.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// When the next lease ends, if one is running.
    pub fn next_expiry_ms(&self) -> Option<u64> {
        self.leases.values().min().copied()
    }

    /// Gives every running lease at least half its length from now: after a time in which the oracle itself was
    /// not running and could hear nobody.
    pub fn forgive(&mut self, now_ms: u64) {
        let at_least = now_ms + u64::from(self.lease_ms / 2).max(1);
        self.leases.values_mut().for_each(|end| *end = (*end).max(at_least));
    }

    /// Marks members down whose leases have ended. Returns who, in words.
    pub fn expire(&mut self, now_ms: u64) -> Vec<String> {
        let ended: Vec<_> =
            self.leases.iter().filter(|(_, end)| **end <= now_ms).map(|(key, _)| key.clone()).collect();
        let mut down = Vec::new();
        for key in ended {
            self.leases.remove(&key);
            let record = self.state.members.get_mut(&key).expect("leases are members'");
            record.member.state = MemberState::Down;
            down.push(format!("{} '{}'", record.member.role, record.member.name));
        }
        if !down.is_empty() {
            self.state.next_epoch();
        }
        down
    }

    /// Applies one request (all but `WatchMap` and `Status`, which read only and are the server's). The map changed
    /// if and only if its epoch did.
    ///
    /// # Errors
    /// Why it was refused; nothing has changed then.
    pub fn apply(&mut self, request: &OracleRequest, now_ms: u64) -> Result<OracleResponse, Fault> {
        let lease_end = now_ms + u64::from(self.lease_ms);
        let state = &mut self.state;
        match request {
            OracleRequest::Join { name, role, addr, incarnation, regions, region_bytes } => {
                let grants = state.join(name, *role, addr, *incarnation, *regions, *region_bytes)?;
                self.leases.insert(key(*role, name), lease_end);
                // A member may have been forgotten to make room.
                self.leases.retain(|key, _| state.members.contains_key(key));
                Ok(OracleResponse::Joined { lease_ms: self.lease_ms, regions: grants, epoch: state.epoch })
            }
            OracleRequest::Renew { name, role, incarnation } => {
                let not_found =
                    |why: &str| Err(fault(FaultCode::NotFound, format!("{role} '{name}' {why}: join again")));
                match state.record(*role, name) {
                    None => not_found("is not a member"),
                    Some(record) if record.member.incarnation != *incarnation => Err(fault(
                        FaultCode::Forbidden,
                        format!(
                            "another process has joined as {role} '{name}' from {}: names must be unique per role",
                            record.member.addr
                        ),
                    )),
                    Some(record) if record.member.state == MemberState::Down => {
                        not_found("let its lease run out")
                    }
                    Some(_) => {
                        self.leases.insert(key(*role, name), lease_end);
                        Ok(OracleResponse::Renewed { epoch: state.epoch })
                    }
                }
            }
            OracleRequest::Leave { name, role, incarnation } => {
                state.leave(name, *role, *incarnation);
                let is_up = |record: &MemberRecord| record.member.state == MemberState::Up;
                self.leases.retain(|key, _| state.members.get(key).is_some_and(is_up));
                Ok(OracleResponse::Done { epoch: state.epoch })
            }
            OracleRequest::CreateCollection(spec) => {
                let collection = state.create(spec)?;
                Ok(OracleResponse::Collection { collection, epoch: state.epoch })
            }
            OracleRequest::SetCollectionState { id, state: to } => {
                state.set_collection_state(*id, *to)?;
                Ok(OracleResponse::Done { epoch: state.epoch })
            }
            OracleRequest::GrowCollection { id, have } => {
                let collection = state.grow(*id, *have)?;
                Ok(OracleResponse::Collection { collection, epoch: state.epoch })
            }
            OracleRequest::DropCollection { name } => {
                state.drop_collection(name)?;
                Ok(OracleResponse::Done { epoch: state.epoch })
            }
            OracleRequest::RegionZeroed { mn, incarnation, region, epoch } => {
                state.region_zeroed(mn, *incarnation, *region, *epoch)?;
                Ok(OracleResponse::Done { epoch: state.epoch })
            }
            OracleRequest::WatchMap { .. } | OracleRequest::Status => {
                Err(fault(FaultCode::Internal, "a request that only reads reached the state"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, HashMap};

    use proptest::prelude::*;
    use shine_common::metric::{DType, Metric};

    use super::*;

    const LEASE_MS: u32 = 1_000;
    const REGION_BYTES: u64 = 64 << 20;

    fn core() -> Core {
        Core::new(State::empty(Epoch(100)), LEASE_MS, 0)
    }

    fn join(name: &str, role: Role, life: u64, regions: u16) -> OracleRequest {
        let (regions, region_bytes) = if role == Role::Mn { (regions, REGION_BYTES) } else { (regions, 0) };
        let (name, addr, incarnation) = (name.into(), "127.0.0.1:7001".into(), Incarnation(life));
        OracleRequest::Join { name, role, addr, incarnation, regions, region_bytes }
    }

    fn spec(name: &str, memory_nodes: &[&str]) -> CollectionSpec {
        CollectionSpec {
            name: name.into(),
            dtype: DType::F32,
            metric: Metric::L2,
            dim: 16,
            m: 8,
            ef_construction: 100,
            capacity: 10_000,
            memory_nodes: memory_nodes.iter().map(|mn| mn.to_string()).collect(),
            loading: false,
        }
    }

    fn create(core: &mut Core, name: &str, memory_nodes: &[&str]) -> Result<Collection, Fault> {
        match core.apply(&OracleRequest::CreateCollection(spec(name, memory_nodes)), 0)? {
            OracleResponse::Collection { collection, .. } => Ok(collection),
            other => panic!("{other:?}"),
        }
    }

    fn grow(core: &mut Core, id: CollectionId, have: u32) -> Result<Collection, Fault> {
        match core.apply(&OracleRequest::GrowCollection { id, have }, 0)? {
            OracleResponse::Collection { collection, .. } => Ok(collection),
            other => panic!("{other:?}"),
        }
    }

    fn drop_named(core: &mut Core, name: &str) -> Result<(), Fault> {
        core.apply(&OracleRequest::DropCollection { name: name.into() }, 0).map(|_| ())
    }

    fn joined(core: &mut Core, name: &str, life: u64, regions: u16) -> Vec<RegionGrant> {
        match core.apply(&join(name, Role::Mn, life, regions), 0) {
            Ok(OracleResponse::Joined { regions, .. }) => regions,
            other => panic!("{other:?}"),
        }
    }

    /// Asserts that the request is refused with this code, in words that hold `parts`, and changes nothing.
    fn refused(core: &mut Core, request: OracleRequest, code: FaultCode, parts: &[&str]) {
        let before = core.state.clone();
        let fault = core.apply(&request, 0).expect_err("it is refused");
        assert_eq!(fault.code, code, "{fault}");
        for part in parts {
            assert!(fault.message.contains(part), "'{fault}' does not say '{part}'");
        }
        assert_eq!(core.state, before, "a refusal changes nothing");
    }

    fn ids(grants: &[RegionGrant]) -> Vec<u16> {
        grants.iter().map(|grant| grant.id.0).collect()
    }

    #[test]
    fn a_restarted_memory_node_keeps_its_regions_and_loses_their_content() {
        let mut core = core();
        let first = joined(&mut core, "mn-0", 1, 3);
        assert_eq!(ids(&first), [0, 1, 2]);
        let collection = create(&mut core, "a", &[]).unwrap();
        assert_eq!(core.state.map().lost_region(&collection), None);
        // The same life comes back: nothing is lost.
        assert_eq!(joined(&mut core, "mn-0", 1, 3), first);
        let second = joined(&mut core, "mn-0", 2, 3);
        assert_eq!(ids(&second), [0, 1, 2]);
        for (old, new) in first.iter().zip(&second) {
            assert!(new.epoch > old.epoch && new.born == new.epoch);
        }
        let map = core.state.map();
        let collection = map.collection("a").unwrap();
        assert_eq!(map.lost_region(collection), Some(collection.regions[0].0));
        let grow = OracleRequest::GrowCollection { id: collection.id, have: 1 };
        refused(&mut core, grow, FaultCode::RegionLost, &["'a'", "load it again"]);
        drop_named(&mut core, "a").unwrap();
        assert_eq!(core.state.map().region(RegionId(0)).unwrap().usage, RegionUse::Resetting);
        // A life that begins while a region is being zeroed begins with it zeroed.
        joined(&mut core, "mn-0", 3, 3);
        assert_eq!(core.state.map().region(RegionId(0)).unwrap().usage, RegionUse::Free);
        assert!(create(&mut core, "a", &[]).is_ok());
    }

    #[test]
    fn a_memory_node_may_come_back_with_other_regions() {
        let mut core = core();
        joined(&mut core, "mn-0", 1, 2);
        let collection = create(&mut core, "a", &[]).unwrap();
        assert_eq!(collection.regions[0].0, RegionId(0));
        // Fewer: the free one is forgotten, the used one stays its own.
        assert_eq!(ids(&joined(&mut core, "mn-0", 2, 1)), [0]);
        assert_eq!(core.state.map().regions.len(), 1);
        // More: new numbers.
        assert_eq!(ids(&joined(&mut core, "mn-0", 3, 4)), [0, 1, 2, 3]);
        // Of another size: all are new, and the collection's region stays known, as lost, until it is dropped.
        let resized = OracleRequest::Join {
            name: "mn-0".into(),
            role: Role::Mn,
            addr: "127.0.0.1:7001".into(),
            incarnation: Incarnation(4),
            regions: 2,
            region_bytes: 2 * REGION_BYTES,
        };
        core.apply(&resized, 0).unwrap();
        let map = core.state.map();
        assert!(map.lost_region(map.collection("a").unwrap()).is_some());
        assert_eq!(map.regions.iter().filter(|r| r.bytes == 2 * REGION_BYTES).count(), 2);
        drop_named(&mut core, "a").unwrap();
        let map = core.state.map();
        assert!(map.regions.iter().all(|r| r.bytes == 2 * REGION_BYTES), "what nobody hosts is forgotten");
        core.state.check().unwrap();
        // A life cannot change its mind.
        let changed = join("mn-0", Role::Mn, 4, 2);
        refused(&mut core, changed, FaultCode::BadRequest, &["mn-0", "it had 2"]);
    }

    #[test]
    fn collections_spread_over_memory_nodes_and_home_regions_take_turns() {
        let mut core = core();
        for mn in ["mn-0", "mn-1", "mn-2"] {
            joined(&mut core, mn, 1, 4);
        }
        let mut homes = BTreeSet::new();
        for name in ["a", "b", "c"] {
            let collection = create(&mut core, name, &[]).unwrap();
            assert_eq!(collection.memory_nodes, ["mn-0", "mn-1", "mn-2"]);
            assert_eq!(collection.params.first_regions, 3);
            let map = core.state.map();
            let on: BTreeSet<_> =
                collection.regions.iter().map(|(r, _)| map.region(*r).unwrap().mn.clone()).collect();
            assert_eq!(on.len(), 3, "one region on each");
            homes.insert(map.region(collection.regions[0].0).unwrap().mn.clone());
        }
        assert_eq!(homes.len(), 3);
        let some = create(&mut core, "d", &["mn-2", "mn-1", "mn-2"]).unwrap();
        assert_eq!((some.memory_nodes.len(), some.regions.len()), (2, 2));
    }

    #[test]
    fn what_cannot_be_created_is_refused_with_what_to_do() {
        let mut core = core();
        let request = |name: &str, mns: &[&str]| OracleRequest::CreateCollection(spec(name, mns));
        refused(&mut core, request("a", &[]), FaultCode::Unavailable, &["no memory node is up"]);
        joined(&mut core, "mn-0", 1, 1);
        joined(&mut core, "mn-1", 1, 2);
        for name in ["", "a b", "ä", "a/b", &"x".repeat(65)] {
            refused(&mut core, request(name, &[]), FaultCode::BadRequest, &["collection name", "1 to 64"]);
        }
        refused(&mut core, request("a", &["mn-7"]), FaultCode::NotFound, &["'mn-7'", "mn-0, mn-1"]);
        let mut odd = spec("a", &[]);
        odd.dim = 0;
        refused(
            &mut core,
            OracleRequest::CreateCollection(odd),
            FaultCode::BadRequest,
            &["'a'", "dimension is 0"],
        );
        let mut large = spec("a", &[]);
        large.capacity = 1_000_000_000;
        refused(
            &mut core,
            OracleRequest::CreateCollection(large),
            FaultCode::BadRequest,
            &["'a'", "--region-bytes"],
        );
        create(&mut core, "a", &[]).unwrap();
        refused(&mut core, request("a", &[]), FaultCode::CollectionExists, &["'a' exists"]);
        // Its one region is used: it cannot be asked for, and is left out where nobody asked for it.
        refused(&mut core, request("b", &["mn-0"]), FaultCode::RegionFull, &["mn-0", "--regions"]);
        assert_eq!(create(&mut core, "b", &[]).unwrap().memory_nodes, ["mn-1"]);
        refused(&mut core, request("c", &[]), FaultCode::RegionFull, &["mn-0, mn-1", "drop a collection"]);
        core.expire(u64::from(LEASE_MS));
        refused(&mut core, request("c", &["mn-1"]), FaultCode::MemoryNodeLost, &["'mn-1' is down"]);
    }

    #[test]
    fn a_collection_grows_where_there_is_room_and_once_per_ask() {
        let mut core = core();
        joined(&mut core, "mn-0", 1, 2);
        joined(&mut core, "mn-1", 1, 3);
        let made = create(&mut core, "a", &[]).unwrap();
        let grown = grow(&mut core, made.id, 2).unwrap();
        assert_eq!(grown.regions.len(), 4);
        assert_eq!(grown.regions[..2], made.regions[..], "regions are only added");
        let epoch = core.state.epoch();
        assert_eq!(grow(&mut core, made.id, 2).unwrap(), grown, "a second asker gets what the first got");
        assert_eq!(core.state.epoch(), epoch);
        assert_eq!(grow(&mut core, made.id, 4).unwrap().regions.len(), 5, "only mn-1 has one left");
        let ask = |have| OracleRequest::GrowCollection { id: made.id, have };
        refused(&mut core, ask(5), FaultCode::RegionFull, &["'a'", "mn-0, mn-1", "--regions"]);
        refused(&mut core, ask(6), FaultCode::BadRequest, &["has 5 regions"]);
        let unknown = OracleRequest::GrowCollection { id: CollectionId(77), have: 0 };
        refused(&mut core, unknown, FaultCode::NotFound, &["c77"]);
    }

    #[test]
    fn a_dropped_collection_gives_its_regions_back_when_they_are_zeroed() {
        let mut core = core();
        joined(&mut core, "mn-0", 1, 1);
        for state in [CollectionState::Creating, CollectionState::Loading, CollectionState::Ready] {
            let made = create(&mut core, "a", &[]).unwrap();
            core.apply(&OracleRequest::SetCollectionState { id: made.id, state }, 0).unwrap();
            drop_named(&mut core, "a").unwrap();
            let entry = core.state.map().region(RegionId(0)).unwrap().clone();
            assert_eq!((entry.usage, entry.epoch), (RegionUse::Resetting, core.state.epoch()));
            let again = OracleRequest::CreateCollection(spec("a", &[]));
            refused(&mut core, again, FaultCode::RegionFull, &["mn-0"]);
            let zeroed = |incarnation, epoch| OracleRequest::RegionZeroed {
                mn: "mn-0".into(),
                incarnation: Incarnation(incarnation),
                region: RegionId(0),
                epoch,
            };
            refused(&mut core, zeroed(1, Epoch(entry.epoch.0 - 1)), FaultCode::StaleEpoch, &["r0"]);
            refused(&mut core, zeroed(9, entry.epoch), FaultCode::NotFound, &["join again"]);
            core.apply(&zeroed(1, entry.epoch), 0).unwrap();
            let epoch = core.state.epoch();
            core.apply(&zeroed(1, entry.epoch), 0).expect("said twice is heard once");
            assert_eq!(core.state.epoch(), epoch);
        }
        assert_eq!(drop_named(&mut core, "a").unwrap_err().code, FaultCode::NotFound);
    }

    #[test]
    fn collection_states_go_forward() {
        let mut core = core();
        joined(&mut core, "mn-0", 1, 1);
        let id = create(&mut core, "a", &[]).unwrap().id;
        let to = |state| OracleRequest::SetCollectionState { id, state };
        core.apply(&to(CollectionState::Loading), 0).unwrap();
        refused(&mut core, to(CollectionState::Creating), FaultCode::BadRequest, &["Loading to Creating"]);
        core.apply(&to(CollectionState::Ready), 0).unwrap();
        let epoch = core.state.epoch();
        core.apply(&to(CollectionState::Ready), 0).unwrap();
        assert_eq!(core.state.epoch(), epoch);
        refused(&mut core, to(CollectionState::Loading), FaultCode::BadRequest, &["'a'"]);
    }

    #[test]
    fn leases_run_out_and_come_back() {
        let mut core = core();
        joined(&mut core, "mn-0", 1, 1);
        core.apply(&join("cn-0", Role::Cn, 1, 0), 500).unwrap();
        let renew = |name: &str, role, life| OracleRequest::Renew {
            name: name.into(),
            role,
            incarnation: Incarnation(life),
        };
        let state_of = |core: &Core, role, name: &str| core.state.map().member(role, name).map(|m| m.state);
        assert_eq!(core.next_expiry_ms(), Some(1_000));
        assert!(core.expire(999).is_empty());
        core.apply(&renew("mn-0", Role::Mn, 1), 999).unwrap();
        assert_eq!(core.next_expiry_ms(), Some(1_500));
        let epoch = core.state.epoch();
        assert_eq!(core.expire(1_500), ["cn 'cn-0'"]);
        assert_eq!(core.state.epoch(), epoch.next());
        assert_eq!(state_of(&core, Role::Cn, "cn-0"), Some(MemberState::Down));
        refused(&mut core, renew("cn-0", Role::Cn, 1), FaultCode::NotFound, &["join again"]);
        refused(&mut core, renew("cn-9", Role::Cn, 1), FaultCode::NotFound, &["not a member"]);
        refused(
            &mut core,
            renew("mn-0", Role::Mn, 2),
            FaultCode::Forbidden,
            &["another process", "mn 'mn-0'"],
        );
        core.apply(&join("cn-0", Role::Cn, 1, 0), 1_600).unwrap();
        assert_eq!(state_of(&core, Role::Cn, "cn-0"), Some(MemberState::Up));
        // The oracle itself was away: nobody is blamed.
        core.forgive(9_000);
        assert!(core.expire(9_000).is_empty());
        assert_eq!(core.expire(9_500).len(), 2);
        assert_eq!(core.next_expiry_ms(), None);
        let map = core.state.map();
        assert_eq!(map.regions.len(), 1, "a memory node that is down keeps its regions");
    }

    #[test]
    fn leaving_frees_the_name_of_a_compute_node_and_keeps_a_memory_nodes_regions() {
        let mut core = core();
        joined(&mut core, "mn-0", 1, 1);
        core.apply(&join("cn-0", Role::Cn, 1, 0), 0).unwrap();
        let leave = |name: &str, role, life| OracleRequest::Leave {
            name: name.into(),
            role,
            incarnation: Incarnation(life),
        };
        let epoch = core.state.epoch();
        core.apply(&leave("mn-0", Role::Mn, 9), 0).expect("the word of an older life changes nothing");
        assert_eq!(core.state.epoch(), epoch);
        core.apply(&leave("mn-0", Role::Mn, 1), 0).unwrap();
        core.apply(&leave("cn-0", Role::Cn, 1), 0).unwrap();
        core.apply(&leave("cn-0", Role::Cn, 1), 0).unwrap();
        let map = core.state.map();
        assert_eq!(map.member(Role::Mn, "mn-0").unwrap().state, MemberState::Down);
        assert!(map.member(Role::Cn, "cn-0").is_none());
        assert_eq!((map.regions.len(), core.next_expiry_ms()), (1, None));
    }

    #[test]
    fn who_cannot_be_a_member_is_refused() {
        let mut core = core();
        for role in [Role::Client, Role::Admin, Role::Oracle] {
            refused(&mut core, join("u", role, 1, 0), FaultCode::Forbidden, &["cannot join"]);
        }
        refused(&mut core, join("Mn", Role::Mn, 1, 1), FaultCode::BadRequest, &["'Mn'"]);
        refused(&mut core, join("mn", Role::Mn, 1, 0), FaultCode::BadRequest, &["no region"]);
        refused(&mut core, join("cn", Role::Cn, 1, 1), FaultCode::BadRequest, &["only memory nodes"]);
        for addr in ["", "127.0.0.1", "127.0.0.1:0", "0.0.0.0:7", "host:7"] {
            let OracleRequest::Join { name, role, incarnation, regions, region_bytes, .. } =
                join("mn", Role::Mn, 1, 1)
            else {
                unreachable!()
            };
            let request =
                OracleRequest::Join { name, role, addr: addr.into(), incarnation, regions, region_bytes };
            refused(&mut core, request, FaultCode::BadRequest, &["ip:port"]);
        }
        for region_bytes in [0, 4096, REGION_BYTES + 8, u64::MAX] {
            let OracleRequest::Join { name, role, addr, incarnation, regions, .. } =
                join("mn", Role::Mn, 1, 1)
            else {
                unreachable!()
            };
            let request = OracleRequest::Join { name, role, addr, incarnation, regions, region_bytes };
            refused(&mut core, request, FaultCode::BadRequest, &["multiple of 4096"]);
        }
        joined(&mut core, "mn-0", 1, u16::MAX);
        refused(&mut core, join("mn-1", Role::Mn, 1, 9), FaultCode::RegionFull, &["numbers for 1 more"]);
    }

    #[test]
    fn members_are_bounded_and_those_gone_make_room() {
        let mut core = core();
        for i in 0..MEMBERS_MAX {
            core.apply(&join(&format!("cn-{i}"), Role::Cn, 1, 0), 0).unwrap();
        }
        refused(&mut core, join("one-more", Role::Cn, 1, 0), FaultCode::Overloaded, &["4096 members"]);
        core.expire(u64::from(LEASE_MS));
        core.apply(&join("one-more", Role::Cn, 1, 0), 2_000).unwrap();
        assert_eq!(core.state.map().members.len(), MEMBERS_MAX);
    }

    // ------------------------------------------------------------------------------ random sequences

    #[derive(Clone, Debug)]
    enum Step {
        Join {
            mn: u8,
            new_life: bool,
            regions: u16,
            large: bool,
        },
        JoinCn {
            cn: u8,
        },
        Renew {
            mn: u8,
        },
        Leave {
            mn: u8,
        },
        Wait {
            ms: u64,
        },
        Create {
            name: u8,
            on: Vec<u8>,
            loading: bool,
        },
        Ready {
            name: u8,
        },
        Grow {
            name: u8,
            stale: bool,
        },
        Drop {
            name: u8,
        },
        /// A compute node writes into every region of a collection that it may still use.
        Write {
            name: u8,
        },
        /// A memory node zeroes one of its regions that the map says is resetting, and reports.
        Zero {
            pick: usize,
            stale: bool,
        },
        Restart,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (0u8..3, any::<bool>(), 1u16..4, prop::bool::weighted(0.1))
                .prop_map(|(mn, new_life, regions, large)| Step::Join { mn, new_life, regions, large }),
            1 => (0u8..2).prop_map(|cn| Step::JoinCn { cn }),
            2 => (0u8..3).prop_map(|mn| Step::Renew { mn }),
            1 => (0u8..3).prop_map(|mn| Step::Leave { mn }),
            1 => (0u64..1_500).prop_map(|ms| Step::Wait { ms }),
            3 => (0u8..3, prop::collection::vec(0u8..3, 0..3), any::<bool>())
                .prop_map(|(name, on, loading)| Step::Create { name, on, loading }),
            1 => (0u8..3).prop_map(|name| Step::Ready { name }),
            2 => (0u8..3, any::<bool>()).prop_map(|(name, stale)| Step::Grow { name, stale }),
            3 => (0u8..3).prop_map(|name| Step::Drop { name }),
            3 => (0u8..3).prop_map(|name| Step::Write { name }),
            3 => (any::<prop::sample::Index>(), prop::bool::weighted(0.2))
                .prop_map(|(pick, stale)| Step::Zero { pick: pick.index(1_000), stale }),
            1 => Just(Step::Restart),
        ]
    }

    /// What the memory nodes really hold: for each region of the present life, whether it was written since it was
    /// zeroed.
    #[derive(Default)]
    struct World {
        lives: HashMap<u8, (u64, u16, u64)>,
        dirty: BTreeSet<RegionId>,
        now_ms: u64,
    }

    fn run(steps: Vec<Step>) -> Result<(), TestCaseError> {
        let mut core = core();
        let mut world = World::default();
        let mut next_life = 1;
        for step in steps {
            let before = core.state.clone();
            let now = world.now_ms;
            let mn_name = |mn: u8| format!("mn-{mn}");
            let outcome: Result<OracleResponse, Fault> = match &step {
                Step::Join { mn, new_life, regions, large } => {
                    let bytes = if *large { 2 * REGION_BYTES } else { REGION_BYTES };
                    let is_new = *new_life || !world.lives.contains_key(mn);
                    if is_new {
                        world.lives.insert(*mn, (next_life, *regions, bytes));
                        next_life += 1;
                        // A new process has new memory.
                        let own =
                            |r: &RegionId| core.state.regions.get(&r.0).is_some_and(|e| e.mn == mn_name(*mn));
                        world.dirty.retain(|r| !own(r));
                    }
                    let (life, regions, region_bytes) = world.lives[mn];
                    let request = OracleRequest::Join {
                        name: mn_name(*mn),
                        role: Role::Mn,
                        addr: "127.0.0.1:7001".into(),
                        incarnation: Incarnation(life),
                        regions,
                        region_bytes,
                    };
                    let outcome = core.apply(&request, now);
                    prop_assert!(outcome.is_ok(), "{:?}", outcome);
                    outcome
                }
                Step::JoinCn { cn } => core.apply(&join(&format!("cn-{cn}"), Role::Cn, 7, 0), now),
                Step::Renew { mn } => {
                    let life = world.lives.get(mn).map_or(0, |l| l.0);
                    let (name, incarnation) = (mn_name(*mn), Incarnation(life));
                    core.apply(&OracleRequest::Renew { name, role: Role::Mn, incarnation }, now)
                }
                Step::Leave { mn } => {
                    let life = world.lives.get(mn).map_or(0, |l| l.0);
                    let (name, incarnation) = (mn_name(*mn), Incarnation(life));
                    core.apply(&OracleRequest::Leave { name, role: Role::Mn, incarnation }, now)
                }
                Step::Wait { ms } => {
                    world.now_ms += ms;
                    core.expire(world.now_ms);
                    Ok(OracleResponse::Done { epoch: core.state.epoch() })
                }
                Step::Create { name, on, loading } => {
                    let mut spec = spec(&format!("c{name}"), &[]);
                    spec.memory_nodes = on.iter().map(|mn| mn_name(*mn)).collect();
                    spec.loading = *loading;
                    core.apply(&OracleRequest::CreateCollection(spec), now)
                }
                Step::Ready { name } => {
                    let map = core.state.map();
                    let id = map.collection(&format!("c{name}")).map_or(CollectionId(999), |c| c.id);
                    core.apply(&OracleRequest::SetCollectionState { id, state: CollectionState::Ready }, now)
                }
                Step::Grow { name, stale } => {
                    let map = core.state.map();
                    let (id, has) = map
                        .collection(&format!("c{name}"))
                        .map_or((CollectionId(999), 1), |c| (c.id, c.regions.len() as u32));
                    core.apply(&OracleRequest::GrowCollection { id, have: has - u32::from(*stale) }, now)
                }
                Step::Drop { name } => {
                    core.apply(&OracleRequest::DropCollection { name: format!("c{name}") }, now)
                }
                Step::Write { name } => {
                    let map = core.state.map();
                    if let Some(collection) = map.collection(&format!("c{name}"))
                        && map.lost_region(collection).is_none()
                    {
                        world.dirty.extend(collection.regions.iter().map(|(region, _)| *region));
                    }
                    continue;
                }
                Step::Zero { pick, stale } => {
                    let map = core.state.map();
                    let resetting: Vec<_> =
                        map.regions.iter().filter(|r| r.usage == RegionUse::Resetting).collect();
                    let Some(entry) = resetting.get(pick % resetting.len().max(1)) else { continue };
                    let mn: u8 = entry.mn[3..].parse().unwrap();
                    let epoch = if *stale { Epoch(entry.epoch.0 - 1) } else { entry.epoch };
                    if !stale {
                        world.dirty.remove(&entry.id);
                    }
                    let request = OracleRequest::RegionZeroed {
                        mn: entry.mn.clone(),
                        incarnation: Incarnation(world.lives[&mn].0),
                        region: entry.id,
                        epoch,
                    };
                    core.apply(&request, now)
                }
                Step::Restart => {
                    // What a store would give back.
                    let bytes = shine_common::wire::encode(&core.state);
                    let state = shine_common::wire::decode::<State>(&bytes).unwrap();
                    prop_assert_eq!(&state, &core.state);
                    core = Core::new(state, LEASE_MS, world.now_ms);
                    continue;
                }
            };
            let state = &core.state;
            prop_assert!(state.check().is_ok(), "after {step:?}: {:?}", state.check());
            prop_assert!(state.epoch >= before.epoch);
            let changed = State { epoch: before.epoch, ..state.clone() } != before;
            prop_assert_eq!(
                changed,
                state.epoch > before.epoch,
                "the epoch tells of every change, after {:?}",
                step
            );
            if state.epoch > before.epoch {
                prop_assert_eq!(state.epoch, before.epoch.next(), "after {:?}", step);
            }
            if outcome.is_err() {
                prop_assert_eq!(state, &before, "a refusal changes nothing");
            }
            for (id, entry) in &state.regions {
                if let Some(old) = before.regions.get(id) {
                    prop_assert!(
                        entry.epoch >= old.epoch && entry.born >= old.born,
                        "{} goes back",
                        entry.id
                    );
                }
                let may_be_dirty = entry.usage != RegionUse::Free;
                prop_assert!(
                    may_be_dirty || !world.dirty.contains(&entry.id),
                    "{} is free and dirty",
                    entry.id
                );
            }
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 400, ..Default::default() })]
        #[test]
        fn invariants_hold_under_any_sequence(steps in prop::collection::vec(step(), 1..80)) {
            run(steps)?;
        }
    }
}
