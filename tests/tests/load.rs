//! A load that breaks off goes on where it stopped: with another compute node, or at another time.

#![forbid(unsafe_code)]

use std::ops::ControlFlow;
use std::time::Duration;

use anyhow::Result;
use shine_client::{ClientError, LoadOptions, SearchOptions};
use shine_common::graph_file::GraphFile;
use shine_common::ids::ExternalId;
use shine_common::metric::Metric;
use shine_common::wire::{FaultCode, Role, Target};
use shine_sim::cluster::ClusterSpec;
use shine_sim::stage::Stage;
use shine_tests::{Folder, as_f32, base};

/// Several pieces of f32.
const ROWS: usize = 6_000;

async fn stage(folder: &Folder) -> Result<(GraphFile, Stage)> {
    let graph = folder.graph(&as_f32(&base(ROWS)), Metric::L2).await?;
    let spec = ClusterSpec { memory_nodes: 2, compute_nodes: 3, ..ClusterSpec::default() };
    Ok((graph, Stage::start(spec).await?))
}

fn options(resume: bool) -> LoadOptions {
    LoadOptions { collection: "words".into(), resume, ..LoadOptions::default() }
}

/// Every part of the file is there, once.
async fn expect_whole(stage: &Stage, graph: &GraphFile) -> Result<()> {
    let report = stage.admin.check("words", |_| {}).await?;
    assert!(report.is_sound(), "{report:?}");
    assert_eq!((report.live, report.dead, report.linking), (ROWS as u64, 0, 0), "{report:?}");
    for row in (0..ROWS as u32).step_by(501) {
        let record = stage.admin.get("words", ExternalId::Num(row.into())).await?;
        assert_eq!(&record.vector[..], graph.vectors(row..row + 1));
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_compute_node_goes_on_when_the_loading_one_is_killed() -> Result<()> {
    let folder = Folder::new();
    let (graph, stage) = stage(&folder).await?;
    let mut killed = None;
    let info = stage
        .admin
        .load(&graph, &options(false), |at| {
            if killed.is_none() {
                assert!(at.done < at.total, "it is loaded in one piece: there is nothing to kill");
                let begun = |name: &&str| stage.cluster.log(name).contains("load begun");
                let loader = stage.cluster.names(Role::Cn).into_iter().find(begun).expect("one has begun");
                stage.cluster.kill(loader);
                killed = Some(loader.to_owned());
            }
            ControlFlow::Continue(())
        })
        .await?;
    assert_eq!(info.vectors, ROWS as u64);
    let killed = killed.expect("progress was told");
    let names = stage.cluster.names(Role::Cn);
    let resumed: Vec<_> =
        names.iter().filter(|name| stage.cluster.log(name).contains("load resumed")).collect();
    assert!(resumed.len() == 1 && **resumed[0] != *killed, "{resumed:?} went on for {killed}");
    expect_whole(&stage, &graph).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_that_was_broken_off_is_resumed_later() -> Result<()> {
    let folder = Folder::new();
    let (graph, stage) = stage(&folder).await?;
    let stopped = stage.admin.load(&graph, &options(false), |_| ControlFlow::Break(())).await;
    assert!(matches!(stopped, Err(ClientError::Cancelled)), "{stopped:?}");
    // Not to be searched, and not to be loaded over.
    let zeros = Target::Vector(vec![0; 400]);
    let search = SearchOptions { deadline: Some(Duration::from_millis(300)), ..Default::default() };
    let early = stage.admin.search("words", zeros, &search).await.expect_err("it is not whole");
    assert_eq!(early.code(), FaultCode::Unavailable, "{early}");
    let again = stage.admin.load(&graph, &options(false), |_| ControlFlow::Continue(())).await;
    assert_eq!(again.expect_err("the name is taken").code(), FaultCode::CollectionExists);

    let mut first = None;
    let info = stage
        .admin
        .load(&graph, &options(true), |at| {
            first.get_or_insert(at);
            ControlFlow::Continue(())
        })
        .await?;
    assert_eq!(info.vectors, ROWS as u64);
    let first = first.expect("something was left to load");
    let per_row = first.total / ROWS as u64;
    println!("the first piece of the second go ended at row {} of {ROWS}", first.done / per_row);
    expect_whole(&stage, &graph).await?;
    // Once more there is nothing to do, and nothing is sent.
    let idle = |at| panic!("sent again: {at:?}");
    assert_eq!(stage.admin.load(&graph, &options(true), idle).await?.vectors, ROWS as u64);
    Ok(())
}
