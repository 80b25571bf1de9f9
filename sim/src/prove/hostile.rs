//! Every port under attack while queries go on: noise, broken handshakes, strangers, and members that break the
//! protocol.
//!
//! ```text
//! askers, closed loop ──► every compute node, QUIC and HTTP: every answer is held against the one before the attack
//! attackers ──► every port x every kind, in turn, a quarter ─ measure ─ a quarter ─ measure ─ the rest ─ measure
//! ```
//!
//! What must hold: every query is answered right, nobody is let in who may not, no process ends, and none grows with
//! the number of attempts, in memory, open files or logs.

mod attacks;
mod http;
mod initial;

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context, ensure};
use comfy_table::{Table, presets};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use shine_client::ClientOptions;
use shine_common::graph_file::GraphFile;
use shine_common::net::tls::ClusterCa;
use shine_common::wire::Role;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use self::attacks::{Arms, Held, KINDS_HTTP, KINDS_QUIC, Kind};
use crate::cluster::ClusterSpec;
use crate::host::ProcessMemory;
use crate::loopback::Plan;
use crate::stage::{PATIENCE, Questions, Stage, Stream, wait_for};

const COLLECTION: &str = "besieged";
/// Searches by HTTP that must end like before.
const HTTP_QUERIES: usize = 16;
/// Failures that are told in full.
const FAILURES_MAX: usize = 8;
/// Most connections that are left open at one place of the attack at a time, QUIC and HTTP (a port of it has two, and
/// 512 connections); older ones are dropped.
const HELD_MAX: [usize; 2] = [64, 300];
/// Open files of this process that are not connections left open.
const FILES_BESIDE: usize = 300;

/// How much of it.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    /// Hostile connections.
    pub connections: usize,
    /// Attackers at work at once.
    pub attackers: usize,
    /// Askers of each compute node over QUIC; one more asks over HTTP.
    pub askers: usize,
    /// Seed of all that is random.
    pub seed: u64,
}

/// What one kind did at one port.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Tally {
    /// Port.
    pub port: String,
    /// Kind of attack.
    pub kind: String,
    /// Connections, or bursts of datagrams.
    pub attempts: u64,
    /// How they ended, as the attacker saw it.
    pub ends: BTreeMap<String, u64>,
}

/// What the attack cost one process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Cost {
    /// The process.
    pub name: String,
    /// Resident bytes before, after a quarter, after half, and after all connections.
    pub resident: [u64; 4],
    /// Most that it may grow after the first quarter.
    pub growth_max: u64,
    /// Open files before, at most while attacked (as far as seen), and after.
    pub files: [usize; 3],
    /// Bytes of logs that the attack made.
    pub log_bytes: u64,
}

impl Cost {
    /// Bytes by which it grew from the first quarter on.
    pub fn growth(&self) -> u64 {
        self.resident[3].saturating_sub(self.resident[1])
    }
}

/// What was seen.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Siege {
    /// Seed.
    pub seed: u64,
    /// Hostile connections.
    pub connections: usize,
    /// Seconds that they took.
    pub seconds: f64,
    /// By port and kind.
    pub tallies: Vec<Tally>,
    /// Queries over QUIC that were answered right meanwhile, by compute node.
    pub queries: BTreeMap<String, u64>,
    /// Queries over HTTP that were answered right meanwhile, by compute node.
    pub http_queries: BTreeMap<String, u64>,
    /// Queries that were not: the first of them, in words.
    pub failures: Vec<String>,
    /// By process.
    pub costs: Vec<Cost>,
    /// Live records by the check after it.
    pub live: u64,
}

impl Siege {
    /// What does not hold of what must; empty if all does.
    pub fn complaints(&self) -> Vec<String> {
        let mut complaints = self.failures.clone();
        for (cn, count) in self.queries.iter().chain(&self.http_queries) {
            if *count == 0 {
                complaints.push(format!("{cn} answered no query meanwhile"));
            }
        }
        for cost in &self.costs {
            let Cost { name, growth_max, files, log_bytes, .. } = cost;
            if cost.growth() > *growth_max {
                complaints.push(format!("{name} grew by {} bytes, at most {growth_max}", cost.growth()));
            }
            if files[2] > files[0] {
                complaints.push(format!("{name} has {} files open, {} before", files[2], files[0]));
            }
            if *log_bytes > self.log_bytes_max() {
                complaints.push(format!(
                    "{name} logged {log_bytes} bytes in {:.1} s, at most {}",
                    self.seconds,
                    self.log_bytes_max()
                ));
            }
        }
        for Tally { port, kind, ends, .. } in &self.tallies {
            if let Some(count) = ends.get(attacks::LET_IN) {
                complaints.push(format!("{port} let {count} in: {kind}"));
            }
        }
        complaints
    }

    /// What was done to each port, and how it ended, as a table.
    pub fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_HORIZONTAL_ONLY);
        table.set_header(["port", "kind", "attempts", "ends"]);
        for Tally { port, kind, attempts, ends } in &self.tallies {
            let ends: Vec<_> = ends.iter().map(|(end, count)| format!("{count} {end}")).collect();
            table.add_row([port.clone(), kind.clone(), attempts.to_string(), ends.join("; ")]);
        }
        table.to_string()
    }

    /// What was measured, in words.
    pub fn facts(&self) -> Vec<String> {
        let sum = |counts: &BTreeMap<String, u64>| counts.values().sum::<u64>();
        let mut facts = vec![format!(
            "{} hostile connections in {:.1} s (seed {}); meanwhile {} queries over QUIC ({}) and {} over HTTP ({}) were answered \
             right; a fresh client was served at once; the check is sound, {} live records",
            self.connections,
            self.seconds,
            self.seed,
            sum(&self.queries),
            each(&self.queries),
            sum(&self.http_queries),
            each(&self.http_queries),
            self.live,
        )];
        for cost in &self.costs {
            let [before, quarter, half, end] = cost.resident.map(|bytes| bytes as f64 / f64::from(1 << 20));
            facts.push(format!(
                "{}: {before:.1} MiB resident before, {quarter:.1} after a quarter, {half:.1} after half, {end:.1} after all: \
                 {:.1} MiB more than after a quarter, at most {} MiB; files {} before, at most {} seen, {} after; {} bytes of logs",
                cost.name,
                cost.growth() as f64 / f64::from(1 << 20),
                cost.growth_max >> 20,
                cost.files[0],
                cost.files[1],
                cost.files[2],
                cost.log_bytes,
            ));
        }
        facts
    }

    /// Bytes of logs that one process may write in the time of the attack: a burst and a rate for each place in the
    /// program that logs, of which strangers reach less than ten, and 300 bytes a line.
    pub fn log_bytes_max(&self) -> u64 {
        use shine_common::log_limit::{BURST, PER_SECOND};
        let lines = f64::from(BURST) + f64::from(PER_SECOND) * self.seconds;
        (10.0 * 300.0 * lines) as u64
    }
}

fn each(counts: &BTreeMap<String, u64>) -> String {
    let each: Vec<_> = counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
    each.join(", ")
}

/// A port of the cluster.
#[derive(Debug, Clone)]
struct Port {
    /// `mn-0 quic`
    name: String,
    role: Role,
    addr: SocketAddr,
    is_http: bool,
}

fn ports(stage: &Stage) -> anyhow::Result<Vec<Port>> {
    let cluster = &stage.cluster;
    let mut ports = Vec::new();
    for role in [Role::Oracle, Role::Mn, Role::Cn] {
        for name in cluster.names(role) {
            ports.push(Port { name: format!("{name} quic"), role, addr: cluster.addr(name), is_http: false });
            if role == Role::Cn {
                let url = cluster.http(name);
                let addr = url.strip_prefix("http://").with_context(|| format!("{url} is not plain"))?;
                ports.push(Port { name: format!("{name} http"), role, addr: addr.parse()?, is_http: true });
            }
        }
    }
    Ok(ports)
}

/// Besieges a cluster that answers queries.
///
/// # Errors
/// If the cluster cannot be started or measured, or a process ends; whatever else must hold is in
/// [`Siege::complaints`].
pub async fn besiege(graph: &GraphFile, vectors: Vec<Vec<u8>>, size: Size) -> anyhow::Result<Siege> {
    println!("seed {}", size.seed);
    let plan = Plan::new(graph, 1)?;
    let spec = ClusterSpec {
        memory_nodes: 2,
        compute_nodes: 2,
        regions: plan.regions,
        region_bytes: plan.region_bytes,
        ..ClusterSpec::default()
    };
    let patient = ClientOptions { deadline: PATIENCE, ..ClientOptions::default() };
    let stage = Stage::start_with(spec, patient).await?;
    stage.load(graph, COLLECTION, &[]).await?;
    let ports = ports(&stage)?;
    let questions = Questions::learn(&stage.admin, COLLECTION, vectors, 10, 64).await?;
    let mut clients = Vec::new();
    for (_, client) in stage.client_of_each().await? {
        questions.check_all(&client).await?;
    }
    for name in stage.cluster.names(Role::Cn) {
        for _ in 0..size.askers {
            clients.push(stage.client_of(name).await?);
        }
    }
    let mut by_http = HttpAskers::learn(&ports, &questions).await?;
    let watched = Watched::look(&stage)?;
    let mut stream = Stream::start(&questions, clients);
    by_http.start();

    let ca = ClusterCa::load(stage.cluster.cert_dir("ca"))?;
    let arms = Arc::new(Arms::new(&ca, size.seed)?);
    let started = Instant::now();
    let mut attack = Attack::new(ports.clone(), Arc::clone(&arms), size)?;
    let mut seen = Seen::default();
    let mut resident = vec![watched.resident()?];
    let mut files_most = watched.files()?;
    for until in [size.connections / 4, size.connections / 2, size.connections] {
        let phase = attack.run_until(until);
        tokio::pin!(phase);
        loop {
            tokio::select! {
                outcome = stream.next() => seen.take(&outcome?.result),
                outcome = by_http.next() => seen.take_http(outcome?),
                done = &mut phase => break done?,
            }
        }
        resident.push(watched.resident()?);
        for (most, now) in files_most.iter_mut().zip(watched.files()?) {
            *most = now.max(*most);
        }
        watched.all_run(&stage)?;
    }
    // However quick the attack was, each compute node has answered since it began.
    let nodes = stage.cluster.names(Role::Cn).len();
    while seen.failures.is_empty() && (seen.queries.len() < nodes || seen.http_queries.len() < nodes) {
        tokio::select! {
            outcome = stream.next() => seen.take(&outcome?.result),
            outcome = by_http.next() => seen.take_http(outcome?),
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    // A newcomer is served at once, while what was left open is still open.
    let newcomer = stage.client().await.context("a fresh client after the attack")?;
    questions.check_all(&newcomer).await.context("a fresh client after the attack")?;
    drop((newcomer, stream));
    drop(by_http);
    let tallies = attack.end();
    for (name, client) in stage.client_of_each().await? {
        questions.check_all(&client).await.with_context(|| format!("{name} after the attack"))?;
    }
    let mut costs = Vec::new();
    for (at, (name, pid)) in watched.processes.iter().enumerate() {
        let before = watched.files_before[at];
        let pid = *pid;
        // Attempts are paced by the cluster's answers.
        let closed = wait_for("connections to be closed", || async {
            let now = open_files(pid).map_err(|error| error.to_string())?;
            stage.admin.status().await.map_err(|error| error.to_string())?;
            if now <= before { Ok(now) } else { Err(format!("{name} has {now} files open, {before} before")) }
        });
        let after = match closed.await {
            Ok(now) => now,
            Err(_) => open_files(pid)?,
        };
        let log_bytes = stage.cluster.log(name).len() as u64 - watched.log_before[at];
        costs.push(Cost {
            name: name.clone(),
            resident: std::array::from_fn(|when| resident[when][at]),
            growth_max: growth_max(name),
            files: [before, files_most[at], after],
            log_bytes,
        });
    }
    let check = stage.admin.check(COLLECTION, |_| ()).await?;
    ensure!(check.is_sound(), "the check found: {:?}", check.findings);
    ensure!(check.live == u64::from(graph.info().rows), "{} live records", check.live);
    watched.all_run(&stage)?;
    stage.stop().await?;
    Ok(Siege {
        seed: size.seed,
        connections: size.connections,
        seconds,
        tallies,
        queries: seen.queries,
        http_queries: seen.http_queries,
        failures: seen.failures,
        costs,
        live: check.live,
    })
}

/// Most that a process may grow once it has seen a quarter of the attack. What it holds for strangers at one time is
/// bounded: 128 handshakes of some 64 KiB, and 8 MiB of what comes before they are taken up; the first quarter has
/// reached most of it. A compute node has 512 HTTP connections of at most 64 KiB read ahead on top.
fn growth_max(name: &str) -> u64 {
    const QUIC: u64 = (128 * (64 << 10)) + (8 << 20);
    const HTTP: u64 = 512 * (64 << 10);
    if name.starts_with("cn-") { QUIC + HTTP } else { QUIC }
}

// -------------------------------------------------------------------------------------------------- processes

/// The processes as they were before.
struct Watched {
    processes: Vec<(String, i32)>,
    files_before: Vec<usize>,
    log_before: Vec<u64>,
}

impl Watched {
    fn look(stage: &Stage) -> anyhow::Result<Self> {
        let names = [Role::Oracle, Role::Mn, Role::Cn].into_iter().flat_map(|role| stage.cluster.names(role));
        let processes: Vec<_> = names.map(|name| (name.to_owned(), stage.cluster.pid(name))).collect();
        let files_before =
            processes.iter().map(|(_, pid)| open_files(*pid)).collect::<anyhow::Result<_>>()?;
        let log_before = processes.iter().map(|(name, _)| stage.cluster.log(name).len() as u64).collect();
        Ok(Self { processes, files_before, log_before })
    }

    fn resident(&self) -> anyhow::Result<Vec<u64>> {
        let read = |pid| Ok(ProcessMemory::read(pid)?.resident_bytes);
        self.processes.iter().map(|(_, pid)| read(*pid)).collect()
    }

    fn files(&self) -> anyhow::Result<Vec<usize>> {
        self.processes.iter().map(|(_, pid)| open_files(*pid)).collect()
    }

    fn all_run(&self, stage: &Stage) -> anyhow::Result<()> {
        for (name, _) in &self.processes {
            ensure!(
                stage.cluster.is_running(name),
                "{name} has ended; its log:\n{}",
                stage.cluster.log_tail(name)
            );
        }
        Ok(())
    }
}

fn open_files(pid: i32) -> anyhow::Result<usize> {
    let folder = format!("/proc/{pid}/fd");
    Ok(fs::read_dir(&folder).with_context(|| format!("reading {folder}"))?.count())
}

/// Files that this process may still open.
fn files_left() -> usize {
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"));
    let soft = line.and_then(|rest| rest.split_whitespace().next()?.parse::<usize>().ok());
    soft.unwrap_or(1024).saturating_sub(FILES_BESIDE)
}

// ---------------------------------------------------------------------------------------------------- queries

#[derive(Default)]
struct Seen {
    queries: BTreeMap<String, u64>,
    http_queries: BTreeMap<String, u64>,
    failures: Vec<String>,
}

impl Seen {
    fn take<E: std::fmt::Debug>(&mut self, result: &Result<String, E>) {
        match result {
            Ok(cn) => *self.queries.entry(cn.clone()).or_default() += 1,
            Err(error) => self.fail(format!("a query failed: {error:?}")),
        }
    }

    fn take_http(&mut self, (cn, result): (String, Result<(), String>)) {
        match result {
            Ok(()) => *self.http_queries.entry(cn).or_default() += 1,
            Err(said) => self.fail(format!("a query by HTTP to {cn} failed: {said}")),
        }
    }

    fn fail(&mut self, said: String) {
        if self.failures.len() < FAILURES_MAX {
            self.failures.push(said);
        }
    }
}

/// One asker by HTTP for each compute node, with a connection for each query.
struct HttpAskers {
    ports: Vec<Port>,
    bodies: Arc<Vec<String>>,
    expected: Arc<Vec<String>>,
    outcomes: Option<mpsc::Receiver<(String, Result<(), String>)>>,
    askers: JoinSet<()>,
}

impl HttpAskers {
    async fn learn(ports: &[Port], questions: &Questions) -> anyhow::Result<Self> {
        let ports: Vec<_> = ports.iter().filter(|port| port.is_http).cloned().collect();
        let body = |vector: &Vec<u8>| {
            let numbers: Vec<_> = vector.iter().map(|byte| *byte as i8).collect();
            serde_json::json!({ "query": numbers, "limit": questions.k, "params": { "hnsw_ef": questions.ef } })
                .to_string()
        };
        let bodies: Vec<_> = questions.vectors.iter().take(HTTP_QUERIES).map(body).collect();
        let mut expected: Vec<String> = Vec::new();
        for port in &ports {
            for (at, body) in bodies.iter().enumerate() {
                let found =
                    http::points_near(port.addr, COLLECTION, body).await.map_err(anyhow::Error::msg)?;
                match expected.get(at) {
                    None => expected.push(found),
                    Some(same) => ensure!(found == *same, "{} answers otherwise than the first", port.name),
                }
            }
        }
        let (bodies, expected) = (Arc::new(bodies), Arc::new(expected));
        Ok(Self { ports, bodies, expected, outcomes: None, askers: JoinSet::new() })
    }

    fn start(&mut self) {
        let (sender, outcomes) = mpsc::channel(self.ports.len());
        for port in &self.ports {
            let (port, sender) = (port.clone(), sender.clone());
            let (bodies, expected) = (Arc::clone(&self.bodies), Arc::clone(&self.expected));
            self.askers.spawn(async move {
                let cn = port.name.trim_end_matches(" http").to_owned();
                for at in (0..bodies.len()).cycle() {
                    let asked = http::points_near(port.addr, COLLECTION, &bodies[at]);
                    let result = match tokio::time::timeout(PATIENCE, asked).await {
                        Ok(Ok(found)) if found == expected[at] => Ok(()),
                        Ok(Ok(found)) => Err(format!("other answers than before: {found}")),
                        Ok(Err(said)) => Err(said),
                        Err(_) => Err(format!("no answer for {PATIENCE:?}")),
                    };
                    if sender.send((cn.clone(), result)).await.is_err() {
                        return;
                    }
                }
            });
        }
        self.outcomes = Some(outcomes);
    }

    async fn next(&mut self) -> anyhow::Result<(String, Result<(), String>)> {
        let outcomes = self.outcomes.as_mut().context("the askers have started")?;
        outcomes.recv().await.context("the askers by HTTP are gone")
    }
}

// ----------------------------------------------------------------------------------------------------- attack

/// Attackers, and what they have left open.
struct Attack {
    ports: Arc<Vec<Port>>,
    arms: Arc<Arms>,
    next: Arc<AtomicUsize>,
    attackers: usize,
    /// What is left open, by port.
    held: Arc<Vec<Mutex<VecDeque<Held>>>>,
    /// Most of it for a port of QUIC, and of HTTP.
    held_max: [usize; 2],
    tallies: BTreeMap<(String, &'static str), Tally>,
}

impl Attack {
    fn new(ports: Vec<Port>, arms: Arc<Arms>, size: Size) -> anyhow::Result<Self> {
        // Twice as often: taking all places of an HTTP port takes many connections.
        let ports: Vec<_> = ports.iter().chain(ports.iter().filter(|port| port.is_http)).cloned().collect();
        let share = files_left() / ports.len();
        ensure!(share > 0, "this process may open too few files");
        let held_max = HELD_MAX.map(|most| most.min(share));
        let held = ports.iter().map(|_| Default::default()).collect();
        Ok(Self {
            ports: Arc::new(ports),
            arms,
            next: Arc::new(AtomicUsize::new(0)),
            attackers: size.attackers,
            held: Arc::new(held),
            held_max,
            tallies: BTreeMap::new(),
        })
    }

    /// Goes on to the connection of number `until`.
    async fn run_until(&mut self, until: usize) -> anyhow::Result<()> {
        let mut attackers = JoinSet::new();
        for _ in 0..self.attackers {
            let (ports, arms, next) =
                (Arc::clone(&self.ports), Arc::clone(&self.arms), Arc::clone(&self.next));
            let (held, held_max) = (Arc::clone(&self.held), self.held_max);
            attackers.spawn(async move {
                let mut done = Vec::new();
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    if at >= until {
                        return done;
                    }
                    let place = at % ports.len();
                    let port = &ports[place];
                    let kinds: &[Kind] = if port.is_http { &KINDS_HTTP } else { &KINDS_QUIC };
                    let kind = kinds[at / ports.len() % kinds.len()];
                    let (end, left_open) = arms.strike(at as u64, port, kind).await;
                    if let Some(left_open) = left_open {
                        let mut held = held[place].lock();
                        held.push_back(left_open);
                        if held.len() > held_max[usize::from(port.is_http)] {
                            held.pop_front();
                        }
                    }
                    done.push((place, kind, end));
                }
            });
        }
        while let Some(done) = attackers.join_next().await {
            for (place, kind, end) in done? {
                let port = &self.ports[place].name;
                let tally = self.tallies.entry((port.clone(), kind.name())).or_default();
                (tally.port, tally.kind) = (port.clone(), kind.name().into());
                tally.attempts += 1;
                *tally.ends.entry(end).or_default() += 1;
            }
        }
        // Each attacker has taken one number too many.
        self.next.store(until, Ordering::Relaxed);
        Ok(())
    }

    /// Drops what was left open.
    fn end(self) -> Vec<Tally> {
        self.tallies.into_values().collect()
    }
}
