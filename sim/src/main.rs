//! The program `shine-sim`.

#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use shine_sim::local_cluster::{self, ClusterArgs};
use shine_sim::loopback::{self, LoopbackArgs};
use shine_sim::prove::{self, ProveArgs};
use tokio::signal::unix::{SignalKind, signal};

/// Longest wait for work on other threads that an interrupt has cut off: a cluster that is just being started.
const UNWIND_WITHIN: Duration = Duration::from_secs(15);

/// Experiments on shine with real processes on this host
#[derive(Debug, Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start or stop a cluster on this machine that stays, and write down how it is called
    Cluster(ClusterArgs),
    /// Measure recall, speed and cost of a loopback cluster on given data
    Loopback(Box<LoopbackArgs>),
    /// Long checks of what the project claims
    Prove(ProveArgs),
}

/// How a run ended, but for success.
enum Outcome {
    Failed(anyhow::Error),
    Interrupted(SignalKind),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("SHINE_LOG").unwrap_or_else(|_| "warn".into()),
        )
        .with_writer(std::io::stderr)
        .init();
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("shine-sim: starting the runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    let outcome = runtime.block_on(until_interrupted(async {
        match cli.command {
            Command::Cluster(args) => local_cluster::run(args).await,
            Command::Loopback(args) => loopback::run(*args).await,
            Command::Prove(args) => prove::run(args).await,
        }
    }));
    runtime.shutdown_timeout(UNWIND_WITHIN);
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(Outcome::Failed(error)) => {
            eprintln!("shine-sim: {error:#}");
            ExitCode::FAILURE
        }
        Err(Outcome::Interrupted(kind)) => {
            eprintln!("shine-sim: interrupted");
            // As shells report a program that a signal ended.
            ExitCode::from(128 + u8::try_from(kind.as_raw_value()).expect("signals are small numbers"))
        }
    }
}

/// Runs `work`; on SIGINT or SIGTERM drops it where it stands, and with it every process that it started.
async fn until_interrupted(work: impl Future<Output = anyhow::Result<()>>) -> Result<(), Outcome> {
    let listen = |kind| signal(kind).map_err(|error| Outcome::Failed(error.into()));
    let mut interrupt = listen(SignalKind::interrupt())?;
    let mut terminate = listen(SignalKind::terminate())?;
    tokio::select! {
        done = work => done.map_err(Outcome::Failed),
        _ = interrupt.recv() => Err(Outcome::Interrupted(SignalKind::interrupt())),
        _ = terminate.recv() => Err(Outcome::Interrupted(SignalKind::terminate())),
    }
}
