//! Facts about this host and its processes, from `/proc`.

use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// The machine, as it stands next to every figure.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Host {
    /// Model of the processor.
    pub cpu: String,
    /// Cores that this process may use.
    pub cores: usize,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Release of the kernel.
    pub kernel: String,
}

impl Host {
    /// Looks at this machine; what cannot be found is "unknown" or 0.
    pub fn look() -> Self {
        let field = |file: &str, name: &str| {
            let text = fs::read_to_string(file).unwrap_or_default();
            text.lines().find_map(|line| {
                let (key, value) = line.split_once(':')?;
                (key.trim() == name).then(|| value.trim().to_owned())
            })
        };
        let unknown = || "unknown".to_owned();
        Self {
            cpu: field("/proc/cpuinfo", "model name").unwrap_or_else(unknown),
            cores: cores(),
            memory_bytes: field("/proc/meminfo", "MemTotal").as_deref().map_or(0, kib),
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease")
                .map_or_else(|_| unknown(), |release| release.trim().to_owned()),
        }
    }
}

/// Cores that this process may use.
pub fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// `"123 kB"` in bytes.
fn kib(text: &str) -> u64 {
    text.trim_end_matches("kB").trim().parse::<u64>().map_or(0, |kib| kib << 10)
}

/// Commit of the sources that this program was built from, with `-dirty` where they were changed since;
/// "unknown" where they or git are not there.
pub fn commit() -> String {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR"));
    let git = |args: &[&str]| {
        let output = Command::new("git").arg("-C").arg(sources).args(args).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let Some(hash) = git(&["rev-parse", "HEAD"]) else { return "unknown".into() };
    match git(&["status", "--porcelain", "--untracked-files=no"]) {
        Some(changes) if changes.is_empty() => hash,
        _ => hash + "-dirty",
    }
}

/// What a process has used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessTimes {
    /// Processor time in user and kernel mode, all threads.
    pub cpu: Duration,
    /// Start in clock ticks since boot.
    pub started_ticks: u64,
}

impl ProcessTimes {
    /// Reads `/proc/PID/stat`; an error also for a process that has ended and was not reaped.
    ///
    /// # Errors
    /// If there is no such process.
    pub fn read(pid: i32) -> io::Result<Self> {
        let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        Self::parse(&text).ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the process has ended"))
    }

    fn parse(stat: &str) -> Option<Self> {
        // The name, in brackets, may hold anything.
        let (_, after_name) = stat.rsplit_once(')')?;
        let fields: Vec<&str> = after_name.split_whitespace().collect();
        let state = *fields.first()?;
        let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
        let (user, kernel, started_ticks) = (number(11)?, number(12)?, number(19)?);
        // USER_HZ is 100 on every Linux that Rust runs on.
        let cpu = Duration::from_millis((user + kernel) * 10);
        (state != "Z" && state != "X").then_some(Self { cpu, started_ticks })
    }
}

/// Memory of a process in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessMemory {
    /// Resident now.
    pub resident_bytes: u64,
    /// Most that was ever resident.
    pub peak_bytes: u64,
}

impl ProcessMemory {
    /// Reads `/proc/PID/status`.
    ///
    /// # Errors
    /// If there is no such process.
    pub fn read(pid: i32) -> io::Result<Self> {
        let text = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.map_or(0, |value| kib(value.trim()))
        };
        // Pages of a shared mapping made of huge pages count in VmRSS only where they are file or shmem pages.
        Ok(Self { resident_bytes: field("VmRSS") + field("HugetlbPages"), peak_bytes: field("VmHWM") })
    }
}

/// Waits until a process that is not our child has ended; `false` if it has not within `patience`.
pub(crate) fn wait_gone(pid: i32, patience: Duration) -> bool {
    let until = Instant::now() + patience;
    while ProcessTimes::read(pid).is_ok() {
        if Instant::now() >= until {
            return false;
        }
        #[expect(clippy::disallowed_methods, reason = "the kernel tells only a parent; others have to look")]
        thread::sleep(Duration::from_millis(5));
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_can_be_read() {
        let pid = i32::try_from(std::process::id()).unwrap();
        assert!(ProcessTimes::read(pid).unwrap().started_ticks > 0);
        let memory = ProcessMemory::read(pid).unwrap();
        assert!(memory.resident_bytes > 0 && memory.peak_bytes > 0);
        assert!(Host::look().cores > 0 && Host::look().memory_bytes > 0);
    }

    #[test]
    fn a_name_with_brackets_and_a_zombie_are_told() {
        let stat = |state: &str| {
            format!("7 (a) b (c) {state} 1 7 7 0 -1 0 0 0 0 0 150 50 0 0 20 0 4 0 98765 1000 10 0")
        };
        let read = ProcessTimes::parse(&stat("S")).unwrap();
        assert_eq!((read.cpu, read.started_ticks), (Duration::from_secs(2), 98765));
        assert_eq!(ProcessTimes::parse(&stat("Z")), None);
    }
}
