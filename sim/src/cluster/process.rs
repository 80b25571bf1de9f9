//! One child process: started, watched until it says that it is ready, signalled, reaped.
//!
//! A watcher thread owns the child. It reads standard output (the ready line, then nothing of interest) until the
//! process ends, and reaps it under the lock that [`Process::signal`] takes.
//!
//! Invariant: a signal is only sent while the process is not reaped, so that it never reaches a stranger that was
//! given the same pid.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::{Pid, getppid, setsid};
use serde::Deserialize;

/// Longest ready line that is looked at.
const READY_LINE_MAX: u64 = 64 << 10;

/// What a process prints when it serves: one JSON line on standard output.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Ready {
    /// Role, as in its certificate.
    pub(super) role: String,
    /// Name, as in its certificate.
    pub(super) name: String,
    /// Where it listens.
    pub(super) addr: SocketAddr,
    /// Where its HTTP API is called.
    #[serde(default)]
    pub(super) http: Option<String>,
}

/// Whether a child ends with us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tie {
    /// Killed by the kernel when this process ends, however it ends.
    DiesWithUs,
    /// A session of its own, which outlives this process.
    Detached,
}

/// How waiting for the ready line ended.
#[derive(Debug)]
pub(super) enum Readiness {
    /// The process serves.
    Ready(Ready),
    /// It ended, or closed its output, before it was ready.
    Ended,
    /// It printed something else.
    NotReady(String),
    /// Nothing came in time.
    TimedOut,
}

/// A started child.
#[derive(Debug)]
pub(super) struct Process {
    pid: Pid,
    ready: Receiver<String>,
    exit: Arc<Exit>,
}

#[derive(Debug, Default)]
struct Exit {
    status: Mutex<Option<ExitStatus>>,
    changed: Condvar,
}

impl Process {
    /// Starts `command` with its log in `log` (appended).
    pub(super) fn spawn(mut command: Command, log: &Path, tie: Tie) -> io::Result<Self> {
        let log = File::options().create(true).append(true).open(log)?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        let mut child = launch(command, tie)?;
        let pid = Pid::from_raw(i32::try_from(child.id()).expect("a pid is a positive i32"));
        let stdout = child.stdout.take().expect("standard output was piped");
        let (line, ready) = sync_channel(1);
        let exit = Arc::new(Exit::default());
        let watched = Arc::clone(&exit);
        thread::Builder::new()
            .name(format!("watch-{pid}"))
            .spawn(move || watch(child, pid, stdout, &line, &watched))?;
        Ok(Self { pid, ready, exit })
    }

    pub(super) fn pid(&self) -> Pid {
        self.pid
    }

    /// Waits for the ready line. To be called once.
    pub(super) fn wait_ready(&self, until: Instant) -> Readiness {
        match self.ready.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(line) => match serde_json::from_str(&line) {
                Ok(ready) => Readiness::Ready(ready),
                Err(_) => Readiness::NotReady(line),
            },
            Err(RecvTimeoutError::Disconnected) => Readiness::Ended,
            Err(RecvTimeoutError::Timeout) => Readiness::TimedOut,
        }
    }

    /// Sends `signal`; `false` if the process has ended already.
    pub(super) fn signal(&self, signal: Signal) -> bool {
        let status = self.exit.status.lock().expect("no holder panics");
        status.is_none() && nix::sys::signal::kill(self.pid, signal).is_ok()
    }

    /// Stops its clock, and returns when no thread of it runs any more.
    pub(super) fn pause(&self) {
        if self.signal(Signal::SIGSTOP) {
            // Also returns when it ends meanwhile; leaves its end to the watcher.
            let flags = WaitPidFlag::WSTOPPED | WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
            let _ = waitid(Id::Pid(self.pid), flags);
        }
    }

    /// How it ended, if it has.
    pub(super) fn exit_status(&self) -> Option<ExitStatus> {
        *self.exit.status.lock().expect("no holder panics")
    }

    /// Waits until it has ended; `None` if it has not within `patience`.
    pub(super) fn wait_exit(&self, patience: Duration) -> Option<ExitStatus> {
        let status = self.exit.status.lock().expect("no holder panics");
        let (status, _) = self
            .exit
            .changed
            .wait_timeout_while(status, patience, |status| status.is_none())
            .expect("no holder panics");
        *status
    }
}

/// Body of the watcher thread.
fn watch(mut child: Child, pid: Pid, stdout: ChildStdout, ready: &SyncSender<String>, exit: &Exit) {
    let mut stdout = BufReader::new(stdout);
    let mut line = String::new();
    let complete =
        (&mut stdout).take(READY_LINE_MAX).read_line(&mut line).is_ok_and(|_| line.ends_with('\n'));
    if complete {
        // The receiver may be gone: then nobody wants to know.
        let _ = ready.send(line);
    }
    // Ends when the process does, or closes its output; errors mean the same.
    let _ = io::copy(&mut stdout, &mut io::sink());
    // Not reaped yet, so the pid is still its own while signals can be sent.
    let _ = waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT);
    let mut status = exit.status.lock().expect("no holder panics");
    *status = Some(child.wait().expect("a child that was not reaped can be waited for"));
    exit.changed.notify_all();
}

/// A command on its way to the launcher thread, and the way back.
type Launch = (Command, Tie, SyncSender<io::Result<Child>>);

/// Starts a child from a thread that lives as long as this process. The kernel ties a child to the *thread* that
/// started it, and callers' threads (of tests, of a runtime's pool) come and go.
fn launch(command: Command, tie: Tie) -> io::Result<Child> {
    static LAUNCHER: OnceLock<SyncSender<Launch>> = OnceLock::new();
    let launcher = LAUNCHER.get_or_init(|| {
        let (sender, receiver) = sync_channel::<Launch>(16);
        thread::Builder::new()
            .name("launcher".into())
            .spawn(move || {
                for (mut command, tie, answer) in receiver {
                    tie_to_us(&mut command, tie);
                    let _ = answer.send(command.spawn());
                }
            })
            .expect("a thread can be started");
        sender
    });
    let (answer, child) = sync_channel(1);
    launcher.send((command, tie, answer)).expect("the launcher lives as long as the process");
    child.recv().expect("the launcher answers every command")
}

/// Puts the child in a process group of its own (Ctrl-C at our terminal is ours to handle) and ties its life to
/// ours, or gives it a session of its own.
#[expect(unsafe_code, reason = "the two system calls must run in the child, between fork and exec")]
fn tie_to_us(command: &mut Command, tie: Tie) {
    if tie == Tie::DiesWithUs {
        command.process_group(0);
    }
    let parent = nix::unistd::getpid();
    let in_child = move || {
        match tie {
            Tie::DiesWithUs => {
                nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
                if getppid() != parent {
                    return Err(io::Error::other("the launching process is gone"));
                }
            }
            Tie::Detached => {
                setsid()?;
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec only async-signal-safe calls are allowed; prctl, getppid and setsid are, and
    // `io::Error::other` allocates only where the child is about to be abandoned because its parent is gone.
    unsafe { command.pre_exec(in_child) };
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    fn shell(script: &str) -> (Process, tempfile::TempDir) {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        (Process::spawn(command, &dir.path().join("log"), Tie::DiesWithUs).unwrap(), dir)
    }

    const READY: &str = r#"echo '{"ready":true,"role":"cn","name":"cn-0","addr":"127.0.0.1:7"}'"#;

    #[test]
    fn a_process_is_ready_when_it_says_so_and_ends_when_told() {
        let (process, _dir) = shell(&format!("{READY}; exec tail -f /dev/null"));
        let Readiness::Ready(ready) = process.wait_ready(Instant::now() + SOON) else { panic!("not ready") };
        assert_eq!((ready.role.as_str(), ready.name.as_str(), ready.addr.port()), ("cn", "cn-0", 7));
        assert_eq!(process.exit_status(), None);
        // A paused process keeps the signal until it is woken.
        process.pause();
        assert!(process.signal(Signal::SIGTERM) && process.signal(Signal::SIGCONT));
        assert!(!process.wait_exit(SOON).unwrap().success());
        assert!(!process.signal(Signal::SIGTERM), "nobody is there any more");
    }

    #[test]
    fn a_process_that_is_never_ready_is_told_apart() {
        let (process, dir) = shell("echo 'no such region' >&2; exit 3");
        assert!(matches!(process.wait_ready(Instant::now() + SOON), Readiness::Ended));
        assert_eq!(process.wait_exit(SOON).unwrap().code(), Some(3));
        assert_eq!(std::fs::read_to_string(dir.path().join("log")).unwrap(), "no such region\n");

        let (process, _dir) = shell("echo hello; exec tail -f /dev/null");
        assert!(
            matches!(process.wait_ready(Instant::now() + SOON), Readiness::NotReady(line) if line == "hello\n")
        );

        let (process, _dir) = shell("printf '{\"ready\":true'");
        assert!(matches!(process.wait_ready(Instant::now() + SOON), Readiness::Ended));

        let (process, _dir) = shell("exec tail -f /dev/null");
        assert!(matches!(process.wait_ready(Instant::now()), Readiness::TimedOut));
        process.signal(Signal::SIGKILL);
        process.wait_exit(SOON).unwrap();
    }

    #[test]
    fn a_child_started_by_a_thread_that_ended_lives_on() {
        let (process, _dir) =
            thread::spawn(|| shell(&format!("{READY}; exec tail -f /dev/null"))).join().unwrap();
        assert!(matches!(process.wait_ready(Instant::now() + SOON), Readiness::Ready(_)));
        assert!(process.signal(Signal::SIGKILL));
        process.wait_exit(SOON).unwrap();
    }
}
