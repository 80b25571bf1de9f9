//! A cluster inside this process: the real compute node and the real memory of memory nodes on the `local` backend, with
//! the oracle's rules between them. No socket, and answers that every other backend has to give too.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::Context;
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, ready};
use parking_lot::Mutex;
use shine_cn::catalogue::Catalogue;
use shine_cn::collection::Options;
use shine_cn::counters::Counters;
use shine_cn::fabric::{Connect, Fabric};
use shine_cn::node::{Limits, Node, Parts};
use shine_common::graph_file::GraphFile;
use shine_common::ids::{Epoch, ExternalId, Incarnation, NodeId};
use shine_common::layout::UPPER_SLOTS;
use shine_common::verbs::VerbError;
use shine_common::verbs::host::{Host, HostOptions};
use shine_common::verbs::local::LocalVerbs;
use shine_common::verbs::memory::{HugePages, RegionMemory};
use shine_common::wire::{
    ClusterMap, CnRequest, CnResponse, CollectionSpec, Fault, Hit, Member, OracleRequest, OracleResponse,
    Receipt, RegionUse, Role, Target,
};
use shine_oracle::state::{Core, State};

/// Time for any one call: nothing here waits for a network.
const DEADLINE: Duration = Duration::from_secs(60);
/// Nodes of a piece of a load.
const PIECE_NODES: u32 = 4096;

/// One compute node over memory nodes in this process.
#[derive(Debug)]
pub struct LocalCluster {
    node: Arc<Node<LocalVerbs>>,
}

impl LocalCluster {
    /// A cluster with `memory_nodes` memory nodes of `regions` regions of `region_bytes`.
    ///
    /// # Errors
    /// If there is no memory for them.
    pub fn new(memory_nodes: u16, regions: u16, region_bytes: u64, options: Options) -> anyhow::Result<Self> {
        let hosts = (0..memory_nodes).map(|number| {
            let incarnation = Incarnation(u64::from(number) + 1);
            Host::new(format!("mn-{number}"), incarnation, HostOptions::default())
        });
        let oracle = Arc::new(LocalOracle {
            core: Mutex::new(Core::new(State::empty(Epoch(0)), u32::MAX, 0)),
            hosts: hosts.collect(),
            fabric: OnceLock::new(),
        });
        for host in &oracle.hosts {
            let join = OracleRequest::Join {
                name: host.name().to_string(),
                role: Role::Mn,
                addr: "127.0.0.1:1".into(),
                incarnation: host.incarnation(),
                regions,
                region_bytes,
            };
            let OracleResponse::Joined { regions, .. } = oracle.core.lock().apply(&join, 0)? else {
                unreachable!("a join is answered with grants");
            };
            for grant in regions {
                let memory = RegionMemory::new(region_bytes, HugePages::Off).context("mapping a region")?;
                host.add_region(grant.id, grant.epoch, grant.born, memory)?;
            }
        }
        let fabric =
            Fabric::new(Arc::clone(&oracle) as Arc<dyn Connect<LocalVerbs>>, Arc::new(Counters::default()));
        fabric.publish(oracle.map());
        assert!(oracle.fabric.set(Arc::downgrade(&fabric)).is_ok(), "set once");
        let node = Node::new(Parts {
            name: "local".into(),
            fabric,
            catalogue: oracle,
            oracle_reachable: Box::new(|| true),
            options,
            limits: Limits::default(),
        });
        Ok(Self { node })
    }

    /// One request, as an admin.
    ///
    /// # Errors
    /// What the compute node answers.
    pub async fn call(&self, request: CnRequest) -> Result<CnResponse, Fault> {
        self.node.handle(Role::Admin, request).await
    }

    /// Loads `graph` as collection `name` on all memory nodes.
    ///
    /// # Errors
    /// What the compute node answers.
    pub async fn load(&self, graph: &GraphFile, name: &str) -> anyhow::Result<()> {
        let info = graph.info();
        let begin = CnRequest::LoadBegin {
            spec: CollectionSpec {
                name: name.into(),
                dtype: info.dtype,
                metric: info.metric,
                dim: info.dim,
                m: info.m,
                ef_construction: info.ef_construction,
                capacity: info.rows.into(),
                memory_nodes: Vec::new(),
                loading: true,
            },
            nodes: info.rows,
            upper_slots: info.upper_slots,
            replace: false,
            file: graph.fingerprint(),
            resume: false,
        };
        let CnResponse::Loading { load, .. } = self.call(begin).await? else {
            unreachable!("a load that begins is answered with its number");
        };
        for first in (0..info.rows).step_by(PIECE_NODES as usize) {
            let nodes = first..info.rows.min(first + PIECE_NODES);
            let ids: Result<Vec<ExternalId>, _> =
                nodes.clone().filter(|_| info.has_ids).map(|node| graph.id(NodeId(node))).collect();
            self.call(CnRequest::LoadNodes {
                load,
                first,
                metas: graph.metas(nodes.clone()).collect(),
                ids: ids?,
                vectors: graph.vectors(nodes.clone()).to_vec(),
                lists: graph.lists(nodes).to_vec(),
            })
            .await?;
        }
        for first in (0..info.upper_slots).step_by(UPPER_SLOTS as usize) {
            let slots = first..info.upper_slots.min(first + UPPER_SLOTS);
            self.call(CnRequest::LoadUpper { load, first, lists: graph.upper(slots).to_vec() }).await?;
        }
        self.call(CnRequest::LoadEnd { load, entry_point: info.entry.to_word() }).await?;
        Ok(())
    }

    /// Nearest neighbours of `vector`, and what they cost.
    ///
    /// # Errors
    /// What the compute node answers.
    pub async fn search(
        &self,
        name: &str,
        vector: &[u8],
        k: u32,
        ef: u32,
    ) -> Result<(Vec<Hit>, Receipt), Fault> {
        let request = CnRequest::Search {
            collection: name.into(),
            target: Target::Vector(vector.to_vec()),
            k,
            ef,
            deadline_ms: DEADLINE.as_millis() as u32,
            with_vectors: false,
        };
        match self.call(request).await? {
            CnResponse::Hits { hits, receipt, .. } => Ok((hits, receipt)),
            other => unreachable!("a search is answered with hits, not {other:?}"),
        }
    }
}

/// The oracle's rules without an oracle's process: every change reaches hosts and fabric before it is answered.
#[derive(Debug)]
struct LocalOracle {
    core: Mutex<Core>,
    hosts: Vec<Arc<Host>>,
    fabric: OnceLock<std::sync::Weak<Fabric<LocalVerbs>>>,
}

impl LocalOracle {
    fn map(&self) -> Arc<ClusterMap> {
        Arc::new(self.core.lock().state().map())
    }

    fn host(&self, name: &str) -> &Arc<Host> {
        self.hosts.iter().find(|host| **host.name() == *name).expect("regions lie on our hosts")
    }

    fn answer(&self, request: &OracleRequest) -> Result<OracleResponse, Fault> {
        if matches!(request, OracleRequest::WatchMap { .. }) {
            return Ok(OracleResponse::Map(ClusterMap::clone(&self.map())));
        }
        let answer = self.core.lock().apply(request, 0)?;
        self.follow();
        Ok(answer)
    }

    /// Brings hosts and fabric to the present map, as memory nodes do when they hear of it.
    fn follow(&self) {
        for region in &self.map().regions {
            let host = self.host(&region.mn);
            let moved = match region.usage {
                RegionUse::Resetting => host.reset_region(region.id, region.epoch, region.born),
                RegionUse::Free | RegionUse::Used(_) => host.set_epoch(region.id, region.epoch, region.born),
            };
            moved.expect("regions of the map are on their hosts");
            if region.usage == RegionUse::Resetting {
                let zeroed = OracleRequest::RegionZeroed {
                    mn: region.mn.clone(),
                    incarnation: host.incarnation(),
                    region: region.id,
                    epoch: region.epoch,
                };
                self.core.lock().apply(&zeroed, 0).expect("a region that was reset may be reported");
            }
        }
        if let Some(fabric) = self.fabric.get().and_then(std::sync::Weak::upgrade) {
            fabric.publish(self.map());
        }
    }
}

impl Catalogue for LocalOracle {
    fn call(&self, request: OracleRequest, _: Instant) -> BoxFuture<'static, Result<OracleResponse, Fault>> {
        ready(self.answer(&request)).boxed()
    }
}

impl Connect<LocalVerbs> for LocalOracle {
    fn connect(&self, mn: &Member, _: Instant) -> BoxFuture<'static, Result<LocalVerbs, VerbError>> {
        let session = LocalVerbs::connect(self.host(&mn.name), "local");
        let peer = Arc::clone(self.host(&mn.name).name());
        ready(session.map_err(|error| VerbError::ConnectionLost { peer, why: error.to_string() })).boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph_cache::{self, GraphSpec};
    use crate::loopback::Plan;
    use shine_cn::hnsw::local::LocalIndex;
    use shine_common::dataset::{Synth, SynthShape};
    use shine_common::metric::{Metric, SimdLevel};

    #[tokio::test]
    async fn remote_memory_gives_the_answers_of_the_graph_file() {
        let synth = Synth::new(SynthShape::Spacev, 3_000, 7).unwrap();
        let (base, queries) = (synth.base(2), synth.queries(50, 2));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.graph");
        let spec = GraphSpec { m: 8, ef_construction: 60, ..GraphSpec::native(Metric::L2) };
        let file = graph_cache::build(&base, &spec, &path).await.unwrap();
        let plan = Plan::new(&file, 3).unwrap();
        let cluster = LocalCluster::new(3, plan.regions, plan.region_bytes, Options::default()).unwrap();
        cluster.load(&file, "local").await.unwrap();
        let index = LocalIndex::new(file, SimdLevel::detect()).unwrap();
        let mut searcher = index.searcher();
        for query in queries.iter() {
            let (hits, receipt) = cluster.search("local", query, 10, 50).await.unwrap();
            let found: Vec<_> = hits.iter().map(|hit| (hit.node, hit.distance)).collect();
            let expected = searcher.search(query, 50).iter().take(10);
            assert_eq!(found, expected.map(|c| (c.node(), c.distance())).collect::<Vec<_>>());
            // Nothing is framed on this backend.
            assert!(receipt.rounds > 0 && receipt.remote_reads > 0 && receipt.bytes == 0);
        }
    }
}
