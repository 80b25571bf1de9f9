//! What whole-cluster checks play on: a cluster with clients, queries whose right answers are known, and a stream of
//! them that goes on while things break.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use shine_client::{Client, ClientError, ClientOptions, LoadOptions, SearchOptions};
use shine_common::graph_file::GraphFile;
use shine_common::ids::ExternalId;
use shine_common::net::tls::Identity;
use shine_common::wire::{FaultCode, Hit, Receipt, Role, Target};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::cluster::{Cluster, ClusterSpec};

/// Longest wait for anything that a check waits for: a host may be slow, but what takes this long never comes.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A cluster, and clients of it.
#[derive(Debug)]
pub struct Stage {
    /// A client with all rights that may use every compute node.
    pub admin: Client,
    /// The processes.
    pub cluster: Cluster,
    options: ClientOptions,
}

impl Stage {
    /// Starts a cluster, with clients of default options.
    ///
    /// # Errors
    /// As [`Cluster::start`].
    pub async fn start(spec: ClusterSpec) -> anyhow::Result<Self> {
        Self::start_with(spec, ClientOptions::default()).await
    }

    /// Starts a cluster.
    ///
    /// # Errors
    /// As [`Cluster::start`].
    pub async fn start_with(spec: ClusterSpec, options: ClientOptions) -> anyhow::Result<Self> {
        // Away from the runtime's threads: starting waits for processes.
        let started = tokio::task::spawn_blocking(move || Cluster::start(&spec)).await;
        let cluster = started.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))?;
        let identity = Identity::load(cluster.cert_dir("admin"))?;
        let admin = Client::connect(&cluster.oracles(), identity, options.clone()).await?;
        Ok(Self { admin, cluster, options })
    }

    /// A client without rights to change the cluster, with connections of its own.
    ///
    /// # Errors
    /// If no oracle answers.
    pub async fn client(&self) -> anyhow::Result<Client> {
        let identity = Identity::load(self.cluster.cert_dir("client"))?;
        Ok(Client::connect(&self.cluster.oracles(), identity, self.options.clone()).await?)
    }

    /// As [`Self::client`], of one compute node alone.
    ///
    /// # Errors
    /// If it does not answer.
    pub async fn client_of(&self, name: &str) -> anyhow::Result<Client> {
        let identity = Identity::load(self.cluster.cert_dir("client"))?;
        let client = Client::connect_to(self.cluster.addr(name), identity, self.options.clone()).await;
        client.with_context(|| format!("connecting to {name}"))
    }

    /// [`Self::client_of`] for every compute node, with its name.
    ///
    /// # Errors
    /// If one does not answer.
    pub async fn client_of_each(&self) -> anyhow::Result<Vec<(String, Client)>> {
        let mut clients = Vec::new();
        for name in self.cluster.names(Role::Cn) {
            clients.push((name.to_owned(), self.client_of(name).await?));
        }
        Ok(clients)
    }

    /// Loads `graph` as `collection`, on the memory nodes named (all if none is).
    ///
    /// # Errors
    /// As [`Client::load`].
    pub async fn load(
        &self,
        graph: &GraphFile,
        collection: &str,
        memory_nodes: &[&str],
    ) -> anyhow::Result<()> {
        let options = LoadOptions {
            collection: collection.into(),
            replace: true,
            memory_nodes: memory_nodes.iter().map(|name| (*name).to_owned()).collect(),
            ..LoadOptions::default()
        };
        let go_on = |_| std::ops::ControlFlow::Continue(());
        self.admin.load(graph, &options, go_on).await.with_context(|| format!("loading '{collection}'"))?;
        Ok(())
    }

    /// Stops all processes and reports those that did not leave cleanly.
    ///
    /// # Errors
    /// As [`Cluster::stop_all`].
    pub async fn stop(mut self) -> anyhow::Result<()> {
        self.admin.close().await;
        Ok(tokio::task::spawn_blocking(move || self.cluster.stop_all()).await??)
    }
}

/// Tries `attempt` until it gives something, at most [`PATIENCE`] long.
///
/// # Errors
/// When time is up: `what` was waited for, and what the last attempt said.
pub async fn wait_for<T, F>(what: &str, mut attempt: impl FnMut() -> F) -> anyhow::Result<T>
where
    F: Future<Output = Result<T, String>>,
{
    let mut last = String::new();
    let trying = async {
        loop {
            match attempt().await {
                Ok(value) => return value,
                Err(said) => last = said,
            }
            // Attempts end only when a node answers; in between others may run.
            tokio::task::yield_now().await;
        }
    };
    match tokio::time::timeout(PATIENCE, trying).await {
        Ok(value) => Ok(value),
        Err(_) => bail!("waited {PATIENCE:?} for {what}; the last attempt: {last}"),
    }
}

/// An answer as far as it must be the same everywhere: ids and distances, in order.
pub type Ranked = Vec<(ExternalId, u32)>;

/// Ids and bits of the distances of `hits`.
pub fn ranked(hits: &[Hit]) -> Ranked {
    hits.iter().map(|hit| (hit.id, hit.distance.to_bits())).collect()
}

/// Queries of one collection with the answers that they must get.
#[derive(Debug)]
pub struct Questions {
    /// The collection.
    pub collection: String,
    /// Query vectors.
    pub vectors: Vec<Vec<u8>>,
    /// What each must be answered.
    pub expected: Vec<Ranked>,
    /// Answers per query.
    pub k: u32,
    /// Beam.
    pub ef: u32,
}

impl Questions {
    /// Asks every vector once through `client` and takes the answers for right.
    ///
    /// # Errors
    /// If one is not answered in full.
    pub async fn learn(
        client: &Client,
        collection: &str,
        vectors: Vec<Vec<u8>>,
        k: u32,
        ef: u32,
    ) -> anyhow::Result<Arc<Self>> {
        let mut questions = Self { collection: collection.into(), vectors, expected: Vec::new(), k, ef };
        for at in 0..questions.vectors.len() {
            let (answer, _) = questions.ask(client, at).await?;
            ensure!(answer.len() == k as usize, "query {at} got {} answers of {k}", answer.len());
            questions.expected.push(answer);
        }
        Ok(Arc::new(questions))
    }

    /// Asks one question.
    ///
    /// # Errors
    /// As [`Client::search`].
    pub async fn ask(&self, client: &Client, at: usize) -> Result<(Ranked, Receipt), ClientError> {
        let options = SearchOptions { k: self.k, ef: self.ef, ..SearchOptions::default() };
        let target = Target::Vector(self.vectors[at].clone());
        let answer = client.search(&self.collection, target, &options).await?;
        Ok((ranked(&answer.hits), answer.receipt))
    }

    /// Asks all questions through `client`; all must be answered right.
    ///
    /// # Errors
    /// Names the first that was not.
    pub async fn check_all(&self, client: &Client) -> anyhow::Result<()> {
        for at in 0..self.vectors.len() {
            let (answer, receipt) =
                self.ask(client, at).await.with_context(|| format!("query {at} of '{}'", self.collection))?;
            ensure!(
                answer == self.expected[at],
                "query {at} of '{}' got other answers from {}",
                self.collection,
                receipt.cn
            );
        }
        Ok(())
    }
}

/// How one query of a stream ended.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Phase that the stream was in when it was sent.
    pub phase: u32,
    /// The compute node that answered in full and right, or the failure.
    pub result: Result<String, (FaultCode, String)>,
}

/// Askers that go on until the stream is dropped. Each answer is held against the right one where it arrives, and a
/// wrong or partial one is an [`FaultCode::Internal`].
#[derive(Debug)]
pub struct Stream {
    outcomes: mpsc::Receiver<Outcome>,
    phase: Arc<AtomicU32>,
    _askers: JoinSet<()>,
}

/// Outcomes that wait to be looked at; askers wait when there are more.
const OUTCOMES_MAX: usize = 64;

impl Stream {
    /// Starts one asker per client.
    pub fn start(questions: &Arc<Questions>, clients: Vec<Client>) -> Self {
        let (sender, outcomes) = mpsc::channel(OUTCOMES_MAX);
        let phase = Arc::new(AtomicU32::new(0));
        let mut askers = JoinSet::new();
        for (offset, client) in clients.into_iter().enumerate() {
            let (questions, sender, phase) = (Arc::clone(questions), sender.clone(), Arc::clone(&phase));
            askers.spawn(async move {
                for turn in offset.. {
                    let at = turn % questions.vectors.len();
                    // Pairs with the Release in `next_phase`: a query counted to a phase was sent after it began.
                    let phase = phase.load(Ordering::Acquire);
                    let result = match questions.ask(&client, at).await {
                        Ok((answer, receipt)) if answer == questions.expected[at] => Ok(receipt.cn),
                        Ok((answer, receipt)) => {
                            let wrong = format!(
                                "query {at}: {} answers from {}, not the right ones",
                                answer.len(),
                                receipt.cn
                            );
                            Err((FaultCode::Internal, wrong))
                        }
                        Err(error) => Err((error.code(), error.to_string())),
                    };
                    if sender.send(Outcome { phase, result }).await.is_err() {
                        return;
                    }
                }
            });
        }
        Self { outcomes, phase, _askers: askers }
    }

    /// Begins a phase: queries sent from now on belong to it. To be called when what sets it apart is done.
    pub fn next_phase(&self) -> u32 {
        self.phase.fetch_add(1, Ordering::Release) + 1
    }

    /// The next outcome.
    ///
    /// # Errors
    /// If none comes: a query hangs.
    pub async fn next(&mut self) -> anyhow::Result<Outcome> {
        match tokio::time::timeout(PATIENCE, self.outcomes.recv()).await {
            Ok(Some(outcome)) => Ok(outcome),
            Ok(None) => bail!("the askers are gone"),
            Err(_) => bail!("no query has ended for {PATIENCE:?}"),
        }
    }

    /// Takes outcomes until `count` of them belong to `phase` or later and `is_as_expected`; every other outcome of
    /// these phases is an error, and earlier ones are held against `is_allowed_before`.
    ///
    /// # Errors
    /// Tells the first outcome that is neither.
    pub async fn take(
        &mut self,
        count: usize,
        phase: u32,
        is_as_expected: impl Fn(&Outcome) -> bool,
        is_allowed_before: impl Fn(&Outcome) -> bool,
    ) -> anyhow::Result<()> {
        let mut taken = 0;
        while taken < count {
            let outcome = self.next().await?;
            if outcome.phase >= phase {
                ensure!(is_as_expected(&outcome), "not as expected: {outcome:?}");
                taken += 1;
            } else {
                ensure!(is_allowed_before(&outcome), "not allowed while it happened: {outcome:?}");
            }
        }
        Ok(())
    }
}

impl Outcome {
    /// Whether it was answered in full and right.
    pub fn is_right(&self) -> bool {
        self.result.is_ok()
    }

    /// Whether it failed with `code`.
    pub fn is(&self, code: FaultCode) -> bool {
        matches!(&self.result, Err((given, _)) if *given == code)
    }
}
