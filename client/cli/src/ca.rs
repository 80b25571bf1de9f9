//! `shine ca`: the cluster's certificate authority.

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Subcommand};
use serde::Serialize;
use shine_common::net::tls::ClusterCa;
use shine_common::wire::Role;

use crate::files::Force;
use crate::out::Out;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  shine ca init --out ca
  shine ca issue --ca ca --role oracle --name oracle-0 --out certs/oracle-0
  shine ca issue --ca ca --role client --name alice --out certs/alice
  shine status --oracles 10.0.0.5:7000 --cert-dir certs/alice")]
pub(crate) struct CaArgs {
    #[command(subcommand)]
    command: CaCommand,
}

#[derive(Debug, Subcommand)]
enum CaCommand {
    /// Make a certificate authority: ca.pem for everybody, ca.key for you alone
    Init(InitArgs),
    /// Issue a certificate to a process or a user
    Issue(IssueArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  shine ca init --out ca

Whoever has ca.key can make members of the cluster: keep it away from the nodes.")]
struct InitArgs {
    /// Folder to write ca.pem and ca.key to
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  shine ca issue --ca ca --role mn --name mn-0 --host 10.0.0.7 --out certs/mn-0
  shine ca issue --ca ca --role client --name alice --days 30 --out certs/alice
  shine ca issue --ca ca --role client --name alice --out certs/alice --force

The last one renews a certificate. Roles: oracle, mn and cn are processes; a client may search and insert, an admin may also create, load and drop.")]
struct IssueArgs {
    /// Folder of the authority, as made by `shine ca init`
    #[arg(long, value_name = "DIR")]
    ca: PathBuf,
    /// oracle, mn, cn, client or admin
    #[arg(long)]
    role: Role,
    /// Name of the process or user, unique per role
    #[arg(long)]
    name: String,
    /// Host name or address to write into the certificate, for the operator's eye; repeatable
    #[arg(long = "host", value_name = "HOST")]
    hosts: Vec<String>,
    /// Days that the certificate is valid
    #[arg(long, default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=36_500))]
    days: u32,
    /// Folder to write ca.pem, node.pem and node.key to
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    #[command(flatten)]
    force: Force,
}

#[derive(Debug, Serialize)]
struct Made {
    dir: PathBuf,
    files: &'static [&'static str],
}

/// Runs the command.
pub(crate) fn run(args: CaArgs, out: Out) -> Result<()> {
    match args.command {
        CaCommand::Init(args) => {
            ClusterCa::init(&args.out)?;
            let made = Made { dir: args.out, files: &["ca.pem", "ca.key"] };
            out.print(&made, |made| {
                format!("certificate authority in {0}: keep {0}/ca.key to yourself", made.dir.display())
            })
        }
        CaCommand::Issue(args) => {
            let ca = ClusterCa::load(&args.ca)?;
            args.force.check(&[&args.out.join("node.pem"), &args.out.join("node.key")], &[])?;
            ca.issue(args.role, &args.name, &args.hosts, args.days, &args.out)?;
            let made = Made { dir: args.out, files: &["ca.pem", "node.pem", "node.key"] };
            out.print(&made, |made| {
                format!("certificate of {} {} in {}", args.role, args.name, made.dir.display())
            })
        }
    }
}
