//! Processes that are killed, paused and started again during a stream of queries.
//!
//! What must hold: no wrong and no partial answer, no query that hangs, every failure by its name, and nothing else
//! harmed than what the dead process served.

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use shine_client::Client;
use shine_common::graph_file::GraphFile;
use shine_common::wire::{FaultCode, Role};

use crate::cluster::ClusterSpec;
use crate::loopback::Plan;
use crate::stage::{Outcome, Questions, Stage, Stream, wait_for};

/// How much of it.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    /// Queries that must end as expected in each phase.
    pub queries: usize,
    /// Askers.
    pub askers: usize,
}

/// What was held.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Held {
    /// What happened, and what held all the same.
    pub facts: Vec<String>,
}

const WHOLE: &str = "whole";
const PART: &str = "part";

async fn stage(graph: &GraphFile, memory_nodes: u16, compute_nodes: u16) -> anyhow::Result<Stage> {
    let plan = Plan::new(graph, 1)?;
    let (regions, region_bytes) = (plan.regions, plan.region_bytes);
    Stage::start(ClusterSpec { memory_nodes, compute_nodes, regions, region_bytes, ..ClusterSpec::default() })
        .await
}

async fn clients(stage: &Stage, count: usize) -> anyhow::Result<Vec<Client>> {
    let mut clients = Vec::new();
    for _ in 0..count {
        clients.push(stage.client().await?);
    }
    Ok(clients)
}

/// A compute node is killed: clients move on, and no query is lost. It comes back and serves.
///
/// # Errors
/// Tells what did not hold.
pub async fn compute_node_killed(
    graph: &GraphFile,
    vectors: Vec<Vec<u8>>,
    size: Size,
) -> anyhow::Result<Held> {
    let mut stage = stage(graph, 2, 3).await?;
    stage.load(graph, WHOLE, &[]).await?;
    let questions = Questions::learn(&stage.admin, WHOLE, vectors, 10, 64).await?;
    let mut stream = Stream::start(&questions, clients(&stage, size.askers).await?);
    // One that is in use.
    let mut victim = String::new();
    for _ in 0..size.queries {
        victim = stream.next().await?.result.map_err(|(_, said)| anyhow::Error::msg(said))?;
    }
    stage.cluster.kill(&victim);
    let phase = stream.next_phase();
    let elsewhere = |outcome: &Outcome| outcome.result.as_ref().is_ok_and(|cn| *cn != victim);
    stream.take(size.queries, phase, elsewhere, Outcome::is_right).await?;
    drop(stream);
    stage.cluster.restart(&victim)?;
    let back = stage.client_of(&victim).await?;
    wait_for("the restarted compute node to answer", || async {
        questions.ask(&back, 0).await.map_err(|error| error.to_string())
    })
    .await?;
    questions.check_all(&back).await?;
    stage.stop().await?;
    let facts = vec![format!(
        "{victim} killed: {} queries before and {} after it answered right by {} clients, none failed; it came back",
        size.queries, size.queries, size.askers
    )];
    Ok(Held { facts })
}

/// The oracle is killed: searches go on, beyond the end of every lease. It comes back with its state, and the cluster
/// can be changed again.
///
/// # Errors
/// Tells what did not hold.
pub async fn oracle_killed(graph: &GraphFile, vectors: Vec<Vec<u8>>, size: Size) -> anyhow::Result<Held> {
    let mut stage = stage(graph, 2, 2).await?;
    stage.load(graph, WHOLE, &[]).await?;
    let questions = Questions::learn(&stage.admin, WHOLE, vectors, 10, 64).await?;
    let mut stream = Stream::start(&questions, clients(&stage, size.askers).await?);
    stream.take(size.queries, 0, Outcome::is_right, Outcome::is_right).await?;
    stage.cluster.kill("oracle-0");
    // All compute nodes have noticed, so every membership lease has ended or will not be renewed.
    let nodes = stage.client_of_each().await?;
    for (name, client) in &nodes {
        reaches_oracle(name, client, false).await?;
    }
    let phase = stream.next_phase();
    stream.take(size.queries, phase, Outcome::is_right, Outcome::is_right).await?;
    for (_, client) in &nodes {
        questions.check_all(client).await?;
    }
    stage.cluster.restart("oracle-0")?;
    for (name, client) in &nodes {
        reaches_oracle(name, client, true).await?;
    }
    let phase = stream.next_phase();
    stream.take(size.queries, phase, Outcome::is_right, Outcome::is_right).await?;
    drop(stream);
    wait_for("the cluster to be changed again", || async {
        stage.load(graph, PART, &[]).await.map_err(|error| format!("{error:#}"))
    })
    .await?;
    stage.stop().await?;
    let facts = vec![format!(
        "oracle killed: {} queries right before, after every node had missed it, and after it was back; then a \
         collection was loaded",
        size.queries
    )];
    Ok(Held { facts })
}

async fn reaches_oracle(name: &str, client: &Client, wanted: bool) -> anyhow::Result<()> {
    let what = format!("{name} to {} the oracle", if wanted { "reach" } else { "miss" });
    wait_for(&what, || async {
        match client.node_status().await {
            Ok(status) if status.oracle_reachable == wanted => Ok(()),
            Ok(_) => Err("not yet".into()),
            Err(error) => Err(error.to_string()),
        }
    })
    .await
}

/// A memory node is paused, woken, killed and started again, with one collection on all memory nodes and another one
/// that does not use it.
///
/// # Errors
/// Tells what did not hold.
pub async fn memory_node_killed(
    graph: &GraphFile,
    vectors: Vec<Vec<u8>>,
    size: Size,
) -> anyhow::Result<Held> {
    let mut stage = stage(graph, 3, 2).await?;
    stage.load(graph, WHOLE, &[]).await?;
    stage.load(graph, PART, &["mn-1", "mn-2"]).await?;
    let nodes = stage.client_of_each().await?;
    let whole = Questions::learn(&stage.admin, WHOLE, vectors.clone(), 10, 64).await?;
    let part = Questions::learn(&stage.admin, PART, vectors, 10, 64).await?;
    let mut on_whole = Stream::start(&whole, clients(&stage, size.askers).await?);
    let mut on_part = Stream::start(&part, clients(&stage, size.askers).await?);
    on_whole.take(size.queries, 0, Outcome::is_right, Outcome::is_right).await?;
    on_part.take(size.queries, 0, Outcome::is_right, Outcome::is_right).await?;

    let lost = |outcome: &Outcome| outcome.is(FaultCode::MemoryNodeLost);
    let right_or_lost = |outcome: &Outcome| outcome.is_right() || lost(outcome);
    let mut facts = Vec::new();
    let after = |what: &str| format!("{what}: {} queries each", size.queries);

    stage.cluster.pause("mn-0");
    let (phase, other_phase) = (on_whole.next_phase(), on_part.next_phase());
    on_whole.take(size.queries, phase, lost, right_or_lost).await?;
    on_part.take(size.queries, other_phase, Outcome::is_right, Outcome::is_right).await?;
    facts.push(after("mn-0 paused, MemoryNodeLost by the deadline on its collection, the other one right"));
    stage.cluster.resume("mn-0");
    for (name, client) in &nodes {
        answers_again(name, client, &whole, FaultCode::MemoryNodeLost).await?;
    }
    let phase = on_whole.next_phase();
    on_whole.take(size.queries, phase, Outcome::is_right, right_or_lost).await?;
    facts.push(after("mn-0 woken, its collection right again"));

    stage.cluster.kill("mn-0");
    let (phase, other_phase) = (on_whole.next_phase(), on_part.next_phase());
    on_whole.take(size.queries, phase, lost, right_or_lost).await?;
    on_part.take(size.queries, other_phase, Outcome::is_right, Outcome::is_right).await?;
    facts.push(after("mn-0 killed, MemoryNodeLost by the deadline on its collection, the other one right"));
    drop(on_whole);

    stage.cluster.restart("mn-0")?;
    for (name, client) in &nodes {
        wait_for(&format!("RegionLost from {name}"), || async {
            match whole.ask(client, 0).await {
                Err(error) if error.code() == FaultCode::RegionLost => Ok(()),
                Err(error) => Err(error.to_string()),
                Ok(_) => Err("answers from memory that is gone".into()),
            }
        })
        .await?;
        for at in 0..whole.vectors.len() {
            let answer = whole.ask(client, at).await;
            let code = answer.as_ref().err().map(shine_client::ClientError::code);
            ensure!(
                code == Some(FaultCode::RegionLost),
                "query {at} on {name} after the restart: {answer:?}"
            );
        }
    }
    facts.push("mn-0 restarted: RegionLost from every compute node until reloaded".into());
    stage.load(graph, WHOLE, &[]).await.context("loading what was lost again")?;
    for (name, client) in &nodes {
        answers_again(name, client, &whole, FaultCode::RegionLost).await?;
        whole.check_all(client).await?;
    }
    let phase = on_part.next_phase();
    on_part.take(size.queries, phase, Outcome::is_right, Outcome::is_right).await?;
    drop(on_part);
    facts.push(
        "reloaded from the graph file: the same answers as before; the other collection never failed".into(),
    );
    ensure!(
        stage.cluster.names(Role::Cn).iter().all(|name| stage.cluster.is_running(name)),
        "a compute node died"
    );
    stage.stop().await?;
    Ok(Held { facts })
}

/// Waits until `name` answers the first question again; before, it may only fail with `code`, or not know the
/// collection's new life yet.
async fn answers_again(
    name: &str,
    client: &Client,
    questions: &Questions,
    code: FaultCode,
) -> anyhow::Result<()> {
    let mut unexpected = None;
    wait_for(&format!("{name} to answer again"), || async {
        match questions.ask(client, 0).await {
            Ok((answer, _)) if answer == questions.expected[0] => Ok(Ok(())),
            Ok(_) => Ok(Err("other answers than before".to_owned())),
            Err(error) if [code, FaultCode::Unavailable, FaultCode::NotFound].contains(&error.code()) => {
                Err(error.to_string())
            }
            Err(error) => Ok(Err(error.to_string())),
        }
    })
    .await?
    .unwrap_or_else(|said| unexpected = Some(said));
    match unexpected {
        None => Ok(()),
        Some(said) => anyhow::bail!("{name}: {said}"),
    }
}
