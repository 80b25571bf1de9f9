//! Rows inserted one by one, by many clients through several compute nodes, some ids wanted by two at once; and a
//! compute node that is killed while it inserts.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};
use shine_client::{Client, ClientError, ClientOptions, SearchOptions};
use shine_common::dataset::{Truth, Vectors, exact_neighbours};
use shine_common::graph_file::GraphFile;
use shine_common::ids::ExternalId;
use shine_common::metric::Metric;
use shine_common::wire::{CheckReport, FaultCode, Target};
use tokio::task::JoinSet;

use crate::cluster::ClusterSpec;
use crate::graph_cache::{self, GraphSpec};
use crate::host::cores;
use crate::loopback::Plan;
use crate::recall::hits_by_id;
use crate::stage::{PATIENCE, Stage};
use crate::workload::closed_loop;

/// Name of the collection.
const COLLECTION: &str = "grown";
/// Answers per query where recall is measured.
const K: usize = 10;

/// What is inserted into what.
#[derive(Debug, Clone)]
pub struct InsertSpec {
    /// Rows of the loaded graph, then those to insert; a row's id is its number.
    pub rows: Vectors,
    /// Metric.
    pub metric: Metric,
    /// Ids that are inserted twice, at about the same time and with different vectors.
    pub contended: usize,
    /// Clients at work at the same time.
    pub clients: usize,
    /// Compute nodes.
    pub compute_nodes: u16,
}

/// What came of it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Inserts {
    /// Rows before.
    pub loaded: usize,
    /// Rows inserted.
    pub inserted: usize,
    /// Ids that two clients wanted: each had exactly one winner.
    pub contended: usize,
    /// Records fetched by id: every acknowledged one from every compute node.
    pub fetched: usize,
    /// Inserts per second.
    pub inserts_per_second: f64,
    /// The check of the collection afterwards.
    pub check: CheckReport,
    /// recall@10 over all rows, of the grown graph.
    pub recall_grown: f64,
    /// recall@10 over all rows, of a native build of the same rows.
    pub recall_built: f64,
}

/// One insert to do.
#[derive(Debug, Clone, Copy)]
struct Task {
    id: u64,
    /// Row whose vector is inserted.
    row: usize,
}

/// Tasks in the order in which they are taken. A contended id stands twice, one after the other, so that two clients
/// have it in hand together; its second vector is that of some other row.
fn tasks(loaded: usize, rows: usize, contended: usize) -> Vec<Task> {
    let new = rows - loaded;
    let mut tasks = Vec::with_capacity(new + contended);
    for number in 0..new {
        let id = (loaded + number) as u64;
        tasks.push(Task { id, row: loaded + number });
        // Evenly over the run.
        if (number + 1) * contended / new > number * contended / new {
            tasks.push(Task { id, row: loaded + (number + 1) % new });
        }
    }
    tasks
}

/// How an insert of a task ended, where that is no failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Won,
    IdExists,
    Unknown,
}

/// Carries out `tasks` by `clients`, each taking the next when it is done with one; `after` is told how many are done,
/// and which compute node did the last.
async fn insert_all(
    tasks: &Arc<Vec<Task>>,
    rows: &Vectors,
    clients: Vec<Client>,
    after: impl Fn(usize, &str) + Send + Sync + 'static,
) -> anyhow::Result<Vec<(Task, End)>> {
    let (next, done, after) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)), Arc::new(after));
    let mut workers = JoinSet::new();
    for client in clients {
        let (tasks, rows, next, done, after) =
            (Arc::clone(tasks), rows.clone(), Arc::clone(&next), Arc::clone(&done), Arc::clone(&after));
        workers.spawn(async move {
            let mut ends = Vec::new();
            // Only uniqueness matters: results travel with the join.
            while let Some(task) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
                let vector = rows.row(task.row).to_vec();
                let mut by = String::new();
                let end = match client.insert(COLLECTION, ExternalId::Num(task.id), vector).await {
                    Ok(inserted) => {
                        by = inserted.receipt.map_or_else(String::new, |receipt| receipt.cn);
                        End::Won
                    }
                    Err(ClientError::InsertUnknown { .. }) => End::Unknown,
                    Err(error) if error.code() == FaultCode::IdExists => End::IdExists,
                    Err(error) => bail!("inserting id {}: {error}", task.id),
                };
                ends.push((*task, end));
                after(done.fetch_add(1, Ordering::Relaxed) + 1, &by);
            }
            Ok(ends)
        });
    }
    let mut ends = Vec::with_capacity(tasks.len());
    while let Some(worker) = workers.join_next().await {
        ends.extend(worker??);
    }
    Ok(ends)
}

async fn stage(graph: &GraphFile, rows: usize, compute_nodes: u16) -> anyhow::Result<Stage> {
    let plan = Plan::new(graph, 3)?;
    // Room for all rows in the regions that the collection starts with, and as much again to grow into.
    let region_bytes = plan.region_bytes * (rows as u64).div_ceil(graph.rows().into()) * 2;
    let spec = ClusterSpec { compute_nodes, regions: 3, region_bytes, ..ClusterSpec::default() };
    let options = ClientOptions { deadline: PATIENCE, insert_deadline: PATIENCE, ..ClientOptions::default() };
    let stage = Stage::start_with(spec, options).await?;
    stage.load(graph, COLLECTION, &[]).await?;
    Ok(stage)
}

/// Loads `graph` (of the first rows), inserts the others, and holds the result against what must be.
///
/// # Errors
/// Tells what did not hold.
pub async fn insert_concurrently(
    graph: &GraphFile,
    spec: &InsertSpec,
    queries: &Vectors,
    ef: u32,
) -> anyhow::Result<Inserts> {
    let (loaded, rows) = (graph.rows() as usize, spec.rows.rows());
    ensure!(loaded < rows, "the graph holds {loaded} rows of {rows}: nothing is left to insert");
    let stage = stage(graph, rows, spec.compute_nodes).await?;
    let nodes = stage.client_of_each().await?;
    // Clients spread over the compute nodes, so that all of them insert.
    let clients = (0..spec.clients).map(|number| nodes[number % nodes.len()].1.clone()).collect();
    let work = Arc::new(tasks(loaded, rows, spec.contended));
    let started = Instant::now();
    let ends = insert_all(&work, &spec.rows, clients, |_, _| ()).await?;
    let seconds = started.elapsed().as_secs_f64();

    // Exactly one winner per id; the other one was told that the id exists.
    let winners = winners(&ends)?;
    ensure!(
        ends.iter().all(|(_, end)| *end != End::Unknown),
        "an insert had no outcome, and nothing was killed"
    );
    let missing = (loaded as u64..rows as u64).find(|id| !winners.contains_key(id));
    ensure!(missing.is_none(), "id {missing:?} has no winner");
    let fetched = fetch_all(&nodes, &winners, &spec.rows).await?;
    let check = stage.admin.check(COLLECTION, |_| ()).await?;
    ensure!(check.is_sound(), "the check found: {:?}", check.findings);
    ensure!(check.live == rows as u64, "{} live records, expected {rows}", check.live);

    // Contended ids may hold another row's vector than the file's.
    let mut bytes = Vec::with_capacity(rows * spec.rows.row_bytes());
    for id in 0..rows {
        bytes.extend_from_slice(spec.rows.row(*winners.get(&(id as u64)).unwrap_or(&id)));
    }
    let held = Vectors::from_bytes(spec.rows.dtype(), spec.rows.dim(), bytes)?;
    let truth = exact_neighbours(&held, queries, spec.metric, K, cores(), &|_, _| ())?;
    let recall_grown = recall(&stage.admin, COLLECTION, queries, &truth, ef).await?;
    let folder = tempfile::tempdir()?;
    let info = graph.info();
    let parameters =
        GraphSpec { m: info.m, ef_construction: info.ef_construction, ..GraphSpec::native(spec.metric) };
    let built = graph_cache::build(&held, &parameters, &folder.path().join("built.shg")).await?;
    stage.load(&built, "built", &[]).await?;
    let recall_built = recall(&stage.admin, "built", queries, &truth, ef).await?;
    stage.stop().await?;
    Ok(Inserts {
        loaded,
        inserted: winners.len(),
        contended: spec.contended,
        fetched,
        inserts_per_second: work.len() as f64 / seconds,
        check,
        recall_grown,
        recall_built,
    })
}

/// What an interrupted run of inserts left.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CutOff {
    /// Inserts acknowledged, before and after the kill.
    pub acknowledged: usize,
    /// Inserts of which nobody could say whether they took effect.
    pub unknown: usize,
    /// Records fetched by id: every acknowledged one from every compute node.
    pub fetched: usize,
    /// The check of the collection afterwards, the killed node started again.
    pub check: CheckReport,
}

/// Inserts through all compute nodes and kills one of them halfway.
///
/// # Errors
/// Tells what did not hold.
pub async fn inserting_node_killed(graph: &GraphFile, spec: &InsertSpec) -> anyhow::Result<CutOff> {
    let (loaded, rows) = (graph.rows() as usize, spec.rows.rows());
    let mut stage = stage(graph, rows, spec.compute_nodes).await?;
    let mut clients = Vec::new();
    for _ in 0..spec.clients {
        clients.push(stage.client().await?);
    }
    let work = Arc::new(tasks(loaded, rows, 0));
    let half = work.len() / 2;
    let (tell, told) = tokio::sync::oneshot::channel();
    let tell = parking_lot::Mutex::new(Some(tell));
    let at_half = move |done, by: &str| {
        // One that is at work.
        if done >= half
            && !by.is_empty()
            && let Some(tell) = tell.lock().take()
        {
            // Nobody listens if the run has failed.
            let _ = tell.send(by.to_owned());
        }
    };
    let (ends, victim) = tokio::join!(insert_all(&work, &spec.rows, clients, at_half), async {
        let victim = told.await.context("the run ended before half of it was done")?;
        stage.cluster.kill(&victim);
        anyhow::Ok(victim)
    });
    let (ends, victim) = (ends?, victim?);
    stage.cluster.restart(&victim)?;

    // A client whose insert was cut off finds its own record by the id: nobody else wants that id.
    let winners = winners(&ends)?;
    let unknown = ends.iter().filter(|(_, end)| *end == End::Unknown).count();
    let lost = ends.iter().find(|(_, end)| *end == End::IdExists);
    ensure!(lost.is_none(), "nobody else inserts id {:?}", lost.map(|(task, _)| task.id));
    let nodes = stage.client_of_each().await?;
    let fetched = fetch_all(&nodes, &winners, &spec.rows).await?;
    let check = stage.admin.check(COLLECTION, |_| ()).await?;
    ensure!(check.is_sound(), "the check found: {:?}", check.findings);
    let least = (loaded + winners.len()) as u64;
    ensure!(
        (least..=least + unknown as u64).contains(&check.live),
        "{} live records, expected {least} and at most {unknown} more",
        check.live
    );
    stage.stop().await?;
    Ok(CutOff { acknowledged: winners.len(), unknown, fetched, check })
}

/// Row whose vector each acknowledged id holds.
fn winners(ends: &[(Task, End)]) -> anyhow::Result<HashMap<u64, usize>> {
    let mut winners = HashMap::new();
    for (task, _) in ends.iter().filter(|(_, end)| *end == End::Won) {
        let before = winners.insert(task.id, task.row);
        ensure!(before.is_none(), "id {} was acknowledged twice", task.id);
    }
    Ok(winners)
}

/// Fetches every acknowledged id from every compute node; the vector must be the winner's.
async fn fetch_all(
    nodes: &[(String, Client)],
    winners: &HashMap<u64, usize>,
    rows: &Vectors,
) -> anyhow::Result<usize> {
    let mut ids: Vec<_> = winners.iter().map(|(id, row)| (*id, *row)).collect();
    ids.sort_unstable();
    let (ids, rows) = (Arc::new(ids), rows.clone());
    let clients: Arc<Vec<_>> = Arc::new(nodes.to_vec());
    let lanes = nodes.len();
    let wanted = ids.len() * lanes;
    // Query `i` goes to lane `i % lanes`, so each id comes to every lane once.
    let ask = move |lane: usize, query: usize| {
        let (name, client) = clients[lane].clone();
        let (id, row) = ids[query / lanes];
        let expected = rows.row(row).to_vec();
        async move {
            let record = client.get(COLLECTION, ExternalId::Num(id)).await;
            let record = record.with_context(|| format!("getting id {id} from {name}"))?;
            ensure!(record.vector == expected, "id {id} from {name} is not the vector that won");
            Ok(())
        }
    };
    closed_loop(lanes, 8, 0..wanted, ask, || ()).await?;
    Ok(wanted)
}

/// recall@10 of a collection, by id.
async fn recall(
    admin: &Client,
    collection: &str,
    queries: &Vectors,
    truth: &Truth,
    ef: u32,
) -> anyhow::Result<f64> {
    let (client, name, vectors) = (admin.clone(), collection.to_owned(), queries.clone());
    let ask = move |_: usize, query: usize| {
        let (client, name) = (client.clone(), name.clone());
        let target = Target::Vector(vectors.row(query).to_vec());
        async move {
            let options = SearchOptions { k: K as u32, ef, ..SearchOptions::default() };
            let answer = client.search(&name, target, &options).await?;
            let ids = answer.hits.iter().filter_map(|hit| match hit.id {
                ExternalId::Num(number) => Some(number),
                ExternalId::Uuid(_) => None,
            });
            Ok::<Vec<u64>, ClientError>(ids.collect())
        }
    };
    let pass = closed_loop(1, 16, 0..queries.rows(), ask, || ()).await?;
    let hits: usize =
        pass.answers.iter().enumerate().map(|(query, ids)| hits_by_id(ids, truth.ids(query), K)).sum();
    Ok(hits as f64 / (queries.rows() * K) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_new_row_is_a_task_and_contended_ids_stand_twice() {
        for (new, contended) in [(20, 0), (20, 1), (20, 7), (20, 20)] {
            let tasks = tasks(100, 100 + new, contended);
            assert_eq!(tasks.len(), new + contended);
            for id in 100..100 + new as u64 {
                let of_id: Vec<_> = tasks.iter().filter(|task| task.id == id).collect();
                assert!(matches!(of_id.len(), 1 | 2) && of_id[0].row as u64 == id);
                assert!(of_id.len() == 1 || of_id[1].row != of_id[0].row);
            }
        }
    }
}
