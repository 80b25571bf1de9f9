//! The command `shine`: parses, runs one command, and turns what comes of it into text or JSON and an exit code.

#![forbid(unsafe_code)]

mod build;
mod ca;
mod collection;
mod connect;
mod data;
mod exit;
mod files;
mod health;
mod input;
mod load;
mod local;
mod out;
mod records;
mod search;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use connect::Connection;
use exit::Exit;
use out::Out;

/// Vector search over one HNSW graph in disaggregated memory
#[derive(Debug, Parser)]
#[command(name = "shine", version, after_help = format!("{EXAMPLES}\n\n{}", exit::HELP))]
struct Cli {
    /// Print one JSON document to stdout; errors go to stderr as {"error":{"code","message"}}
    #[arg(long, global = true)]
    json: bool,
    #[command(flatten)]
    connection: Connection,
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "Examples:
  shine up --memory-nodes 3 --compute-nodes 2
  shine build base.i8bin --metric l2 --out words.graph
  shine load --graph words.graph --collection words
  shine search --collection words --id 7 --k 5
  shine down";

#[derive(Debug, Subcommand)]
enum Command {
    /// Look at, convert and make data sets
    #[command(after_help = "Examples:
  shine data info base.i8bin
  shine data truth --base base.i8bin --queries query.i8bin --metric l2 --out truth.ibin
  shine data synth spacev 100000 --out spacev-100k")]
    Data(data::DataArgs),
    /// Make a certificate authority, and certificates
    Ca(ca::CaArgs),
    /// Start a cluster on this machine that stays
    Up(local::UpArgs),
    /// Stop the cluster that `shine up` started
    Down(local::DownArgs),
    /// Make, list, look at and drop collections
    Collection(collection::CollectionArgs),
    /// Build a graph file from vectors
    Build(build::BuildArgs),
    /// Load a graph file into a collection
    Load(load::LoadArgs),
    /// Insert vectors
    Insert(records::InsertArgs),
    /// Print the record of an id
    Get(records::GetArgs),
    /// Find nearest neighbours
    Search(search::SearchArgs),
    /// Measure recall and speed against exact neighbours
    Recall(search::RecallArgs),
    /// Ask every process of the cluster how it is
    Status(health::StatusArgs),
    /// Check a collection's links and ids
    Check(health::CheckArgs),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let out = Out { json: cli.json };
    let at = &cli.connection;
    let outcome = match cli.command {
        Command::Data(args) => data::run(args, out),
        Command::Ca(args) => ca::run(args, out),
        Command::Up(args) => local::up(&args, at, out),
        Command::Down(local::DownArgs {}) => local::down(at, out),
        Command::Collection(args) => collection::run(args, at, out),
        Command::Build(args) => build::run(&args, out),
        Command::Load(args) => load::run(args, at, out),
        Command::Insert(args) => records::insert(args, at, out),
        Command::Get(args) => records::get(args, at, out),
        Command::Search(args) => search::search(&args, at, out),
        Command::Recall(args) => search::recall(&args, at, out),
        Command::Status(args) => health::status(&args, at, out),
        Command::Check(args) => health::check(args, at, out),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let (exit, code) = exit::classify(&error);
            exit::report(cli.json, &code, &format!("{error:#}"));
            ExitCode::from(exit as u8)
        }
    }
}

/// Help and version go to stdout and are no failure; a wrong command line is one, in the form that was asked for.
fn usage(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        // A reader that has gone away is no failure either.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    if std::env::args_os().any(|arg| arg == "--json") {
        let text = error.render().to_string();
        exit::report(true, "usage", text.trim_end().trim_start_matches("error: "));
    } else {
        let _ = error.print();
    }
    ExitCode::from(Exit::Input as u8)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    /// Examples in the help of `command` and of all below it.
    fn examples(command: &clap::Command) -> Vec<String> {
        let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        let own = help.lines().filter_map(|line| line.strip_prefix("  shine ")).map(str::to_owned);
        own.chain(command.get_subcommands().flat_map(examples)).collect()
    }

    /// Words of a command line; single quotes keep blanks together.
    fn words(line: &str) -> Vec<String> {
        let parts = line.split('\'').enumerate();
        let words = parts.flat_map(|(at, part)| match at % 2 {
            0 => part.split_whitespace().map(str::to_owned).collect(),
            _ => vec![part.to_owned()],
        });
        words.collect()
    }

    #[test]
    fn every_example_is_a_command_line_that_is_taken() {
        let examples = examples(&Cli::command());
        assert!(examples.len() > 40, "only {} examples were found", examples.len());
        for example in examples {
            assert!(
                "  shine ".len() + example.len() <= 100,
                "help cuts lines of more than 100 columns: {example}"
            );
            let parsed = Cli::try_parse_from(["shine".to_owned()].into_iter().chain(words(&example)));
            parsed.unwrap_or_else(|error| panic!("shine {example}\n{error}"));
        }
    }
}
