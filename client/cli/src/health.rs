//! `shine status` and `shine check`: whether the cluster, and what it stores, is as it should be.

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use shine_client::NodeReport;
use shine_common::wire::{CheckReport, MemberState, NodeStatus, Role};

use crate::connect::{Connection, with_client};
use crate::exit::{Silent, Unsound};
use crate::out::{Out, Progress, Unit, facts, table};

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  shine status
  shine status --counters
  shine status --json --oracles 10.0.0.5:7000 --cert-dir certs/alice

Asks every process. The exit code is 4 if one does not answer.")]
pub(crate) struct StatusArgs {
    /// Also print the counters of every process
    #[arg(long)]
    counters: bool,
}

#[derive(Debug, Serialize)]
struct StatusOut {
    epoch: u64,
    collections: usize,
    nodes: Vec<NodeOut>,
}

#[derive(Debug, Serialize)]
struct NodeOut {
    name: String,
    role: Role,
    addr: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    member: Option<MemberState>,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<NodeStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl From<NodeReport> for NodeOut {
    fn from(report: NodeReport) -> Self {
        let NodeReport { name, role, addr, member, status } = report;
        let (status, error) = match status {
            Ok(status) => (Some(status), None),
            Err(error) => (None, Some(error)),
        };
        Self { name, role, addr, member, status, error }
    }
}

/// Prints the state of every process.
pub(crate) fn status(args: &StatusArgs, connection: &Connection, out: Out) -> Result<()> {
    with_client(connection, async |client| {
        let status = client.status().await?;
        let status = StatusOut {
            epoch: status.map.epoch.0,
            collections: status.map.collections.len(),
            nodes: status.nodes.into_iter().map(NodeOut::from).collect(),
        };
        out.print(&status, |status| human(status, args.counters))?;
        let is_silent = |node: &NodeOut| node.error.is_some();
        let silent: Vec<_> = status.nodes.into_iter().filter(is_silent).map(|node| node.name).collect();
        if silent.is_empty() { Ok(()) } else { Err(Silent(silent).into()) }
    })
}

fn human(status: &StatusOut, counters: bool) -> String {
    let row = |node: &NodeOut| {
        let state = match (&node.error, node.member) {
            (Some(_), Some(MemberState::Up)) => "no answer",
            (Some(_), _) => "down",
            (None, Some(MemberState::Down)) => "answers, lease ran out",
            (None, _) => "up",
        };
        let said = |text: fn(&NodeStatus) -> String| node.status.as_ref().map(text).unwrap_or_default();
        vec![
            node.name.clone(),
            node.role.to_string(),
            node.addr.clone(),
            state.to_owned(),
            said(|s| s.version.clone()),
            said(|s| s.simd.clone()),
            said(|s| s.epoch.to_string()),
            said(|s| uptime(s.uptime_s)),
        ]
    };
    let header = ["name", "role", "address", "state", "version", "simd", "epoch", "uptime"];
    let mut text = table(&header, 6, status.nodes.iter().map(row));
    text += &format!("\nmap epoch {}, {} collections\n", status.epoch, status.collections);
    for node in &status.nodes {
        if let Some(error) = &node.error {
            text += &format!("{}: {error}\n", node.name);
        }
        if let (true, Some(status)) = (counters, &node.status) {
            text += &format!("\n{}\n", node.name);
            let pairs: Vec<_> =
                status.counters.iter().map(|(name, count)| (name.as_str(), count.to_string())).collect();
            text += &facts(&pairs);
        }
    }
    text
}

fn uptime(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  shine check -c words
  shine check -c words --json

Looks at every record and link: links in range, lists whole, every id found and unique. The exit code is 1 if one of
these is not so. Orphans (live records that no path on level 0 reaches) and left-overs of interrupted inserts are
counted; they are legal.")]
pub(crate) struct CheckArgs {
    /// Name of the collection
    #[arg(long, short, value_name = "NAME", env = "SHINE_COLLECTION")]
    collection: String,
}

#[derive(Debug, Serialize)]
struct CheckOut {
    collection: String,
    is_sound: bool,
    #[serde(flatten)]
    report: CheckReport,
}

/// Checks a collection.
pub(crate) fn check(args: CheckArgs, connection: &Connection, out: Out) -> Result<()> {
    with_client(connection, async |client| {
        let bar = Progress::new("checking", 0, Unit::Items("records"));
        let report = client.check(&args.collection, |at| bar.set(at.done, at.total)).await?;
        drop(bar);
        let check = CheckOut { collection: args.collection, is_sound: report.is_sound(), report };
        out.print(&check, check_text)?;
        if check.is_sound { Ok(()) } else { Err(Unsound(check.collection).into()) }
    })
}

fn check_text(check: &CheckOut) -> String {
    let report = &check.report;
    let count = |count: u64| count.to_string();
    let mut text = facts(&[
        ("live", count(report.live)),
        ("linking", count(report.linking)),
        ("abandoned", count(report.abandoned)),
        ("dead", count(report.dead)),
        ("links", count(report.links)),
        ("links out of range", count(report.links_out_of_range)),
        ("bad lists", count(report.bad_lists)),
        ("ids missing", count(report.ids_missing)),
        ("ids duplicate", count(report.ids_duplicate)),
        ("orphans", count(report.orphans)),
    ]);
    for finding in &report.findings {
        text += &format!("- {finding}\n");
    }
    text + &format!("'{}' is {}\n", check.collection, if check.is_sound { "sound" } else { "NOT sound" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_node_and_its_reason_are_shown() {
        let node = |name: &str, member, error: Option<&str>| NodeOut {
            name: name.into(),
            role: Role::Cn,
            addr: "127.0.0.1:1".into(),
            member,
            status: None,
            error: error.map(Into::into),
        };
        let status = StatusOut {
            epoch: 7,
            collections: 1,
            nodes: vec![
                node("cn-0", Some(MemberState::Up), Some("no answer by the deadline")),
                node("cn-1", Some(MemberState::Down), Some("gone")),
            ],
        };
        let text = human(&status, true);
        for expected in ["no answer", "down", "cn-0: no answer by the deadline", "map epoch 7, 1 collections"]
        {
            assert!(text.contains(expected), "{expected} in {text}");
        }
    }

    #[test]
    fn uptimes_are_short() {
        for (seconds, text) in [(5, "5 s"), (125, "2 min"), (7_300, "2 h"), (200_000, "2 d")] {
            assert_eq!(uptime(seconds), text);
        }
    }
}
