//! The command `shine`.

mod data;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Vector search over one HNSW graph in disaggregated memory
#[derive(Debug, Parser)]
#[command(name = "shine", version)]
struct Cli {
    /// Print one JSON value instead of text
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Look at, convert and make data sets
    Data(data::DataArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.command {
        Command::Data(args) => data::run(args, cli.json),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
