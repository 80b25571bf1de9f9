//! A cluster of the real programs on this host: one oracle, memory nodes and compute nodes on loopback, under a
//! certificate authority of their own.
//!
//! ```text
//! home/  certs/{ca,oracle-0,mn-0,..,cn-0,..,admin,client}   logs/NAME.log   oracle-0/   cluster.json (kept ones)
//! ```
//!
//! Names are `oracle-0`, `mn-N` and `cn-N`. Starting waits for every process's ready line, never for time to pass;
//! a process that ends before is reported with the tail of its log.
//!
//! Invariant: when a [`Cluster`] is dropped, no process that it started is left, and no file of a temporary home;
//! only [`Cluster::detach`] leaves them to [`stop_detached`].

mod process;

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use shine_common::net::tls::ClusterCa;
use shine_common::wire::Role;

use crate::host;
use process::{Process, Readiness, Ready, Tie};

/// Longest time from a start to the ready line.
const READY_WITHIN: Duration = Duration::from_secs(60);
/// Longest time from SIGTERM to the end of a process; then it is killed, and that is an error.
const STOP_WITHIN: Duration = Duration::from_secs(10);
/// Longest time from SIGKILL to the end of a process.
const KILL_WITHIN: Duration = Duration::from_secs(10);
/// Life of the certificates of a loopback cluster.
const CERTIFICATE_DAYS: u32 = 365;
/// Bytes of a log that an error shows.
const LOG_TAIL_BYTES: u64 = 4 << 10;

/// What a cluster shall be.
#[derive(Debug, Clone)]
pub struct ClusterSpec {
    /// Number of memory nodes, at least 1.
    pub memory_nodes: u16,
    /// Number of compute nodes, at least 1.
    pub compute_nodes: u16,
    /// Regions of each memory node.
    pub regions: u16,
    /// Bytes of each region.
    pub region_bytes: u64,
    /// Speed of each memory and compute node's link in Mbit/s, per direction; `None` is unshaped.
    pub link_mbit: Option<u32>,
    /// Log level of all processes.
    pub log: String,
    /// More arguments for single nodes, by name.
    pub extra: Vec<(String, Vec<String>)>,
    /// Where the cluster keeps its files; `None` is a temporary folder.
    pub home: Option<PathBuf>,
}

impl Default for ClusterSpec {
    fn default() -> Self {
        Self {
            memory_nodes: 3,
            compute_nodes: 2,
            regions: 8,
            region_bytes: 64 << 20,
            link_mbit: None,
            log: "info".into(),
            extra: Vec::new(),
            home: None,
        }
    }
}

impl ClusterSpec {
    /// Adds arguments to the command line of the node `name`.
    pub fn with_args(mut self, name: &str, args: &[&str]) -> Self {
        self.extra.push((name.into(), args.iter().map(|arg| (*arg).into()).collect()));
        self
    }
}

/// What went wrong with a cluster on this host.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClusterError {
    /// A program is not there.
    #[error("{} is missing; build it first: cargo build --workspace", path.display())]
    NoBinary {
        /// Where it should be.
        path: PathBuf,
    },
    /// A process did not become ready.
    #[error("{name} {what}\n{log}")]
    NotReady {
        /// The process.
        name: String,
        /// How it ended.
        what: String,
        /// Tail of its log.
        log: String,
    },
    /// A process did not end as it should.
    #[error("{name} {what}\n{log}")]
    BadExit {
        /// The process.
        name: String,
        /// How it ended.
        what: String,
        /// Tail of its log.
        log: String,
    },
    /// The folder holds a cluster that runs.
    #[error("a cluster is up in {}; stop it first: shine down", .0.display())]
    AlreadyUp(PathBuf),
    /// The folder holds no cluster.
    #[error("no cluster in {}: there is no {CLUSTER_FILE}", .0.display())]
    NotUp(PathBuf),
    /// The cluster file is not one.
    #[error("{} is not a cluster file: {why}", path.display())]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// Making certificates failed.
    #[error("making certificates: {0}")]
    Certificates(String),
    /// A file or process operation failed.
    #[error("{what}: {source}")]
    Io {
        /// What was being done.
        what: String,
        /// Why it failed.
        source: std::io::Error,
    },
}

fn io_error(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> ClusterError {
    move |source| ClusterError::Io { what: what.into(), source }
}

/// Name of the file that describes a detached cluster.
pub const CLUSTER_FILE: &str = "cluster.json";

/// What `shine up` leaves for other commands to find the cluster by.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterFile {
    /// Addresses of the oracles.
    pub oracles: Vec<SocketAddr>,
    /// Folder with the identity of an admin.
    pub admin_cert_dir: PathBuf,
    /// Folder with the identity of a plain client.
    pub client_cert_dir: PathBuf,
    /// All processes.
    pub nodes: Vec<NodeFile>,
}

/// A process in a [`ClusterFile`].
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeFile {
    /// Name.
    pub name: String,
    /// Role.
    pub role: Role,
    /// Address.
    pub addr: SocketAddr,
    /// Where its HTTP API is called: compute nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http: Option<String>,
    /// Process id.
    pub pid: i32,
    /// Start of the process in clock ticks since boot: tells it from a later process of the same pid.
    pub started_ticks: u64,
}

impl NodeFile {
    /// Whether the process is still there.
    pub fn is_running(&self) -> bool {
        host::ProcessTimes::read(self.pid).is_ok_and(|times| times.started_ticks == self.started_ticks)
    }
}

impl ClusterFile {
    /// Reads the file of the cluster in `home`.
    ///
    /// # Errors
    /// [`ClusterError::NotUp`] if there is none, [`ClusterError::BadFile`] if it is not one of ours.
    pub fn read(home: &Path) -> Result<Self, ClusterError> {
        let path = home.join(CLUSTER_FILE);
        let text = fs::read_to_string(&path).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => ClusterError::NotUp(home.to_owned()),
            _ => ClusterError::Io { what: format!("reading {}", path.display()), source },
        })?;
        serde_json::from_str(&text).map_err(|error| ClusterError::BadFile { path, why: error.to_string() })
    }
}

/// Running processes and their home. Stops them when dropped.
#[derive(Debug)]
pub struct Cluster {
    nodes: Vec<Node>,
    home: Home,
    bin_dir: PathBuf,
    tie: Tie,
    log: String,
}

#[derive(Debug)]
enum Home {
    Temporary(tempfile::TempDir),
    Kept(PathBuf),
}

impl Home {
    fn path(&self) -> &Path {
        match self {
            Self::Temporary(dir) => dir.path(),
            Self::Kept(path) => path,
        }
    }
}

#[derive(Debug)]
struct Node {
    name: String,
    role: Role,
    args: Vec<String>,
    addr: SocketAddr,
    http: Option<String>,
    process: Process,
}

impl Cluster {
    /// Starts a cluster and waits until all its processes are ready.
    ///
    /// # Errors
    /// If a program is missing, or a process ends or stays silent before it is ready; what was started is stopped.
    pub fn start(spec: &ClusterSpec) -> Result<Self, ClusterError> {
        let bin_dir = bin_dir()?;
        for role in [Role::Oracle, Role::Mn, Role::Cn] {
            binary(&bin_dir, role)?;
        }
        let (home, tie) = match &spec.home {
            None => {
                let dir = tempfile::Builder::new().prefix("shine-cluster-").tempdir();
                (Home::Temporary(dir.map_err(io_error("making a temporary folder"))?), Tie::DiesWithUs)
            }
            Some(path) => {
                claim_home(path)?;
                let path = path.canonicalize().map_err(io_error(format!("opening {}", path.display())))?;
                (Home::Kept(path), Tie::Detached)
            }
        };
        // From here on, whatever goes wrong, its drop cleans up.
        let mut cluster = Self { nodes: Vec::new(), home, bin_dir, tie, log: spec.log.clone() };
        make_home(cluster.home(), spec)?;

        let state_dir = cluster.home().join("oracle-0");
        let mut oracle_args = vec!["--state-dir".to_owned(), state_dir.display().to_string()];
        oracle_args.extend(extra_args(spec, "oracle-0"));
        cluster.launch(vec![("oracle-0".into(), Role::Oracle, oracle_args)])?;

        let oracles = cluster.oracles().iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(",");
        let mut rest = Vec::new();
        for (role, count) in [(Role::Mn, spec.memory_nodes), (Role::Cn, spec.compute_nodes)] {
            for number in 0..count {
                let name = format!("{role}-{number}");
                let mut args = vec!["--oracles".to_owned(), oracles.clone()];
                if role == Role::Mn {
                    args.extend(["--regions".into(), spec.regions.to_string()]);
                    args.extend(["--region-bytes".into(), spec.region_bytes.to_string()]);
                }
                if let Some(mbit) = spec.link_mbit {
                    args.extend(["--link-mbit".into(), mbit.to_string()]);
                }
                args.extend(extra_args(spec, &name));
                rest.push((name, role, args));
            }
        }
        cluster.launch(rest)?;
        Ok(cluster)
    }

    /// The cluster's folder.
    pub fn home(&self) -> &Path {
        self.home.path()
    }

    /// Addresses of the oracles.
    pub fn oracles(&self) -> Vec<SocketAddr> {
        self.nodes.iter().filter(|node| node.role == Role::Oracle).map(|node| node.addr).collect()
    }

    /// Folder with the certificate and key of `name`: a node's, `admin` or `client`.
    pub fn cert_dir(&self, name: &str) -> PathBuf {
        self.home().join("certs").join(name)
    }

    /// Names of the nodes of a role, in order.
    pub fn names(&self, role: Role) -> Vec<&str> {
        self.nodes.iter().filter(|node| node.role == role).map(|node| node.name.as_str()).collect()
    }

    /// Address of a node.
    ///
    /// # Panics
    /// If there is no node of that name, as in all calls that take one.
    pub fn addr(&self, name: &str) -> SocketAddr {
        self.node(name).addr
    }

    /// Where the HTTP API of a compute node is called.
    pub fn http(&self, name: &str) -> &str {
        self.node(name).http.as_deref().unwrap_or_else(|| panic!("{name} has no HTTP API"))
    }

    /// Process id of a node.
    pub fn pid(&self, name: &str) -> i32 {
        self.node(name).process.pid().as_raw()
    }

    /// Whether the node's process runs (or is paused).
    pub fn is_running(&self, name: &str) -> bool {
        self.node(name).process.exit_status().is_none()
    }

    /// The last lines of a node's log.
    pub fn log_tail(&self, name: &str) -> String {
        tail(&log_path(self.home(), name))
    }

    /// Whole log of a node.
    pub fn log(&self, name: &str) -> String {
        fs::read_to_string(log_path(self.home(), name)).unwrap_or_default()
    }

    /// Ends a node at once, as a crash does (SIGKILL), and waits until it is gone.
    pub fn kill(&self, name: &str) {
        let process = &self.node(name).process;
        process.signal(Signal::SIGKILL);
        process.wait_exit(KILL_WITHIN).expect("SIGKILL ends a process");
    }

    /// Stops a node's clock (SIGSTOP): from now on it neither answers nor notices time.
    pub fn pause(&self, name: &str) {
        self.node(name).process.pause();
    }

    /// Lets a paused node go on (SIGCONT).
    pub fn resume(&self, name: &str) {
        self.node(name).process.signal(Signal::SIGCONT);
    }

    /// Asks a node to leave (SIGTERM) and waits until it has.
    ///
    /// # Errors
    /// If it does not end in time (it is killed then) or not with success.
    pub fn stop(&self, name: &str) -> Result<(), ClusterError> {
        let node = self.node(name);
        ask_to_end(node);
        self.await_end(node)
    }

    /// Starts a node that has ended again: same name, arguments and address.
    ///
    /// # Errors
    /// As [`Self::start`].
    ///
    /// # Panics
    /// If it still runs.
    pub fn restart(&mut self, name: &str) -> Result<(), ClusterError> {
        let at = self.nodes.iter().position(|node| node.name == name).expect("a node of that name");
        assert!(!self.is_running(name), "{name} still runs");
        let node = &self.nodes[at];
        let mut args = node.args.clone();
        args.extend(["--listen".into(), node.addr.to_string()]);
        let process = self.spawn(name, node.role, &args)?;
        let ready = self.await_ready(name, node.role, &process, Instant::now() + READY_WITHIN)?;
        let node = &mut self.nodes[at];
        (node.process, node.addr, node.http) = (process, ready.addr, ready.http);
        Ok(())
    }

    /// Stops all: compute nodes, memory nodes, then oracles.
    ///
    /// # Errors
    /// The first process that did not end well; all are gone all the same.
    pub fn stop_all(&mut self) -> Result<(), ClusterError> {
        let mut outcome = Ok(());
        for role in [Role::Cn, Role::Mn, Role::Oracle] {
            let leaving: Vec<_> = self
                .nodes
                .iter()
                .filter(|node| node.role == role && node.process.exit_status().is_none())
                .collect();
            for node in &leaving {
                ask_to_end(node);
            }
            for node in leaving {
                outcome = outcome.and(self.await_end(node));
            }
        }
        self.nodes.clear();
        outcome
    }

    /// What its cluster file says.
    ///
    /// # Errors
    /// If a process has ended.
    pub fn file(&self) -> Result<ClusterFile, ClusterError> {
        let nodes = self.nodes.iter().map(|node| {
            let pid = node.process.pid().as_raw();
            let times =
                host::ProcessTimes::read(pid).map_err(io_error(format!("looking at {}", node.name)))?;
            Ok(NodeFile {
                name: node.name.clone(),
                role: node.role,
                addr: node.addr,
                http: node.http.clone(),
                pid,
                started_ticks: times.started_ticks,
            })
        });
        Ok(ClusterFile {
            oracles: self.oracles(),
            admin_cert_dir: self.cert_dir("admin"),
            client_cert_dir: self.cert_dir("client"),
            nodes: nodes.collect::<Result<_, ClusterError>>()?,
        })
    }

    /// Writes the cluster file and leaves the processes running.
    ///
    /// # Errors
    /// If the file cannot be written; the cluster is stopped then.
    ///
    /// # Panics
    /// If the cluster has no home of its own.
    pub fn detach(mut self) -> Result<ClusterFile, ClusterError> {
        assert!(matches!(self.home, Home::Kept(_)), "only a cluster with a home can be detached");
        let file = self.file()?;
        let path = self.home().join(CLUSTER_FILE);
        let text = serde_json::to_string_pretty(&file).expect("a cluster file is plain data");
        fs::write(&path, text + "\n").map_err(io_error(format!("writing {}", path.display())))?;
        self.nodes.clear();
        Ok(file)
    }

    fn node(&self, name: &str) -> &Node {
        self.nodes.iter().find(|node| node.name == name).unwrap_or_else(|| panic!("no node is called {name}"))
    }

    /// Starts all of `nodes`, then waits for each: they start at the same time.
    fn launch(&mut self, nodes: Vec<(String, Role, Vec<String>)>) -> Result<(), ClusterError> {
        let first = self.nodes.len();
        for (name, role, args) in nodes {
            let process = self.spawn(&name, role, &args)?;
            // The address is known once the process is ready.
            let addr = SocketAddr::from(([127, 0, 0, 1], 0));
            self.nodes.push(Node { name, role, args, addr, http: None, process });
        }
        let until = Instant::now() + READY_WITHIN;
        for at in first..self.nodes.len() {
            let node = &self.nodes[at];
            let ready = self.await_ready(&node.name, node.role, &node.process, until)?;
            let node = &mut self.nodes[at];
            (node.addr, node.http) = (ready.addr, ready.http);
        }
        Ok(())
    }

    fn spawn(&self, name: &str, role: Role, args: &[String]) -> Result<Process, ClusterError> {
        let mut command = Command::new(binary(&self.bin_dir, role)?);
        command
            .args(["--name", name, "--log", &self.log, "--cert-dir"])
            .arg(self.cert_dir(name))
            .args(args)
            .current_dir(self.home());
        Process::spawn(command, &log_path(self.home(), name), self.tie)
            .map_err(io_error(format!("starting {name}")))
    }

    fn await_ready(
        &self,
        name: &str,
        role: Role,
        process: &Process,
        until: Instant,
    ) -> Result<Ready, ClusterError> {
        let what = match process.wait_ready(until) {
            Readiness::Ready(ready) if ready.name == name && ready.role == role.to_string() => {
                return Ok(ready);
            }
            Readiness::Ready(ready) => format!("says that it is {} {}", ready.role, ready.name),
            Readiness::NotReady(line) => format!("printed no ready line but: {}", line.trim_end()),
            Readiness::TimedOut => format!("was not ready within {READY_WITHIN:?}"),
            Readiness::Ended => match process.wait_exit(KILL_WITHIN) {
                Some(status) => format!("ended before it was ready ({status})"),
                None => "closed its output before it was ready".into(),
            },
        };
        Err(ClusterError::NotReady { name: name.into(), what, log: self.log_tail(name) })
    }

    fn await_end(&self, node: &Node) -> Result<(), ClusterError> {
        let what = match node.process.wait_exit(STOP_WITHIN) {
            Some(status) if status.success() => return Ok(()),
            Some(status) => format!("did not leave cleanly ({status})"),
            None => {
                node.process.signal(Signal::SIGKILL);
                node.process.wait_exit(KILL_WITHIN).expect("SIGKILL ends a process");
                format!("did not leave within {STOP_WITHIN:?} and was killed")
            }
        };
        Err(ClusterError::BadExit { name: node.name.clone(), what, log: self.log_tail(&node.name) })
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Err(error) = self.stop_all() {
            tracing::warn!(%error, "cluster did not stop cleanly");
        }
        if let Home::Kept(path) = &self.home
            && !path.join(CLUSTER_FILE).exists()
        {
            // Never detached: what was made is of no use to anybody.
            remove_home(path);
        }
    }
}

/// Stops the detached cluster in `home` and removes its files. Memory nodes keep nothing: collections are gone.
///
/// # Errors
/// If there is none, or a process cannot be ended.
pub fn stop_detached(home: &Path) -> Result<ClusterFile, ClusterError> {
    let file = ClusterFile::read(home)?;
    for role in [Role::Cn, Role::Mn, Role::Oracle] {
        let leaving: Vec<_> =
            file.nodes.iter().filter(|node| node.role == role && node.is_running()).collect();
        for node in &leaving {
            signal_detached(node, Signal::SIGTERM);
        }
        for node in leaving {
            if !host::wait_gone(node.pid, STOP_WITHIN) {
                signal_detached(node, Signal::SIGKILL);
                if !host::wait_gone(node.pid, KILL_WITHIN) {
                    let what = "did not end when killed".into();
                    return Err(ClusterError::BadExit { name: node.name.clone(), what, log: String::new() });
                }
            }
        }
    }
    remove_home(home);
    Ok(file)
}

fn signal_detached(node: &NodeFile, signal: Signal) {
    if node.is_running() {
        // It may end between the look and the signal: then there is nothing to do.
        let _ = nix::sys::signal::kill(Pid::from_raw(node.pid), signal);
        let _ = nix::sys::signal::kill(Pid::from_raw(node.pid), Signal::SIGCONT);
    }
}

fn ask_to_end(node: &Node) {
    // A paused process takes the signal when it is woken.
    if node.process.signal(Signal::SIGTERM) {
        node.process.signal(Signal::SIGCONT);
    }
}

fn extra_args(spec: &ClusterSpec, name: &str) -> Vec<String> {
    spec.extra.iter().filter(|(node, _)| node == name).flat_map(|(_, args)| args.clone()).collect()
}

fn log_path(home: &Path, name: &str) -> PathBuf {
    home.join("logs").join(format!("{name}.log"))
}

/// Entries that a home holds; nothing else in a kept home is ever removed.
const HOME_ENTRIES: [&str; 4] = ["certs", "logs", "oracle-0", CLUSTER_FILE];

/// Makes sure that `home` holds no cluster that runs, and nothing of one that did.
fn claim_home(home: &Path) -> Result<(), ClusterError> {
    match ClusterFile::read(home) {
        Ok(file) if file.nodes.iter().any(NodeFile::is_running) => {
            Err(ClusterError::AlreadyUp(home.to_owned()))
        }
        Ok(_) => {
            remove_home(home);
            Ok(())
        }
        Err(ClusterError::NotUp(_)) => Ok(()),
        Err(error) => Err(error),
    }?;
    fs::create_dir_all(home).map_err(io_error(format!("making {}", home.display())))
}

fn make_home(home: &Path, spec: &ClusterSpec) -> Result<(), ClusterError> {
    for entry in ["certs", "logs"] {
        fs::create_dir_all(home.join(entry))
            .map_err(io_error(format!("making {}", home.join(entry).display())))?;
    }
    let certs = home.join("certs");
    let certificates = |error: &dyn std::fmt::Display| ClusterError::Certificates(error.to_string());
    let ca = ClusterCa::init(certs.join("ca")).map_err(|error| certificates(&error))?;
    let hosts = ["localhost".to_owned(), "127.0.0.1".to_owned()];
    let issue = |role: Role, name: &str| {
        ca.issue(role, name, &hosts, CERTIFICATE_DAYS, certs.join(name)).map_err(|error| certificates(&error))
    };
    issue(Role::Oracle, "oracle-0")?;
    issue(Role::Admin, "admin")?;
    issue(Role::Client, "client")?;
    for (role, count) in [(Role::Mn, spec.memory_nodes), (Role::Cn, spec.compute_nodes)] {
        for number in 0..count {
            issue(role, &format!("{role}-{number}"))?;
        }
    }
    Ok(())
}

fn remove_home(home: &Path) {
    for entry in HOME_ENTRIES {
        let path = home.join(entry);
        let _ = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
    }
    // Only if nothing else is in it.
    let _ = fs::remove_dir(home);
}

/// Folder of the programs: beside this one, or one up for tests, which cargo puts into `deps`.
fn bin_dir() -> Result<PathBuf, ClusterError> {
    let exe = std::env::current_exe().map_err(io_error("finding this program's folder"))?;
    let dir = exe.parent().expect("a program lies in a folder");
    Ok(if dir.ends_with("deps") {
        dir.parent().expect("deps lies in a folder").to_owned()
    } else {
        dir.to_owned()
    })
}

fn binary(bin_dir: &Path, role: Role) -> Result<PathBuf, ClusterError> {
    let path = bin_dir.join(format!("shine-{role}"));
    if path.is_file() { Ok(path) } else { Err(ClusterError::NoBinary { path }) }
}

fn tail(path: &Path) -> String {
    use std::io::{Read, Seek, SeekFrom};
    let read = || -> std::io::Result<String> {
        let mut file = fs::File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(LOG_TAIL_BYTES)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    match read() {
        Ok(text) if text.is_empty() => "(its log is empty)".into(),
        Ok(text) => text,
        Err(error) => format!("(its log cannot be read: {error})"),
    }
}
