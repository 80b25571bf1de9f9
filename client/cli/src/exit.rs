//! What scripts see of a failure: an exit code, and with `--json` one JSON document on stderr.

use std::fmt;
use std::path::PathBuf;

use serde_json::json;
use shine_client::ClientError;
use shine_cn::hnsw::graph::BuildError;
use shine_common::dataset::DataError;
use shine_common::graph_file::GraphFileError;
use shine_common::net::tls::TlsError;
use shine_common::wire::FaultCode;
use shine_sim::cluster::ClusterError;

/// The codes, as `shine --help` lists them.
pub(crate) const HELP: &str = "Exit codes:
  0  done
  1  failed; `shine check`: the collection is not sound
  2  usage or input: a flag, a value or a file is not as expected; the cluster was not asked
  3  not found: no such collection, id, node, or no cluster here
  4  unavailable: nobody answers in time, all are overloaded, or a memory node or its content is lost
  5  exists: the collection or id is taken, a cluster is up here already, or a file would be overwritten
  6  refused: the cluster does not take a value, the role may not do this, or the certificate is another cluster's
     or the program of another version
  7  full: no memory is left
  8  unknown: the change may or may not have taken effect";

/// Kind of a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Exit {
    Failed = 1,
    Input = 2,
    NotFound = 3,
    Unavailable = 4,
    Exists = 5,
    Refused = 6,
    Full = 7,
    Unknown = 8,
}

/// Input that is not as expected; the text names the flag or file, and what was expected.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct BadInput(pub(crate) String);

/// A collection that `shine check` found broken. Its report is on stdout already.
#[derive(Debug, thiserror::Error)]
#[error("collection '{0}' is not sound")]
pub(crate) struct Unsound(pub(crate) String);

/// A file that is there already and would be overwritten.
#[derive(Debug, thiserror::Error)]
#[error("{} exists already: choose another name, or give --force to replace it", .0.display())]
pub(crate) struct FileExists(pub(crate) PathBuf);

/// Processes that `shine status` got no answer from. Its report is on stdout already.
#[derive(Debug, thiserror::Error)]
#[error("no answer from {}", .0.join(", "))]
pub(crate) struct Silent(pub(crate) Vec<String>);

/// Makes a [`BadInput`].
pub(crate) fn bad_input(text: impl fmt::Display) -> anyhow::Error {
    BadInput(text.to_string()).into()
}

/// Exit code and short name of a failure.
pub(crate) fn classify(error: &anyhow::Error) -> (Exit, String) {
    for cause in error.chain() {
        if let Some(error) = cause.downcast_ref::<ClientError>() {
            return of_client(error);
        }
        if let Some(error) = cause.downcast_ref::<ClusterError>() {
            return of_cluster(error);
        }
        if cause.is::<Unsound>() {
            return (Exit::Failed, "unsound".into());
        }
        if cause.is::<Silent>() {
            return (Exit::Unavailable, "unavailable".into());
        }
        if cause.is::<FileExists>() || matches!(cause.downcast_ref(), Some(TlsError::Exists { .. })) {
            return (Exit::Exists, "file_exists".into());
        }
        let is_input = cause.is::<BadInput>()
            || cause.is::<DataError>()
            || cause.is::<BuildError>()
            || cause.is::<GraphFileError>()
            || cause.is::<TlsError>();
        if is_input {
            return (Exit::Input, "bad_input".into());
        }
    }
    (Exit::Failed, "failed".into())
}

fn of_client(error: &ClientError) -> (Exit, String) {
    if error.outcome_is_unknown() {
        return (Exit::Unknown, "outcome_unknown".into());
    }
    let code = error.code();
    let exit = match code {
        FaultCode::BadRequest if !matches!(error, ClientError::Fault { .. }) => {
            return (Exit::Input, "bad_input".into());
        }
        FaultCode::BadRequest => Exit::Refused,
        FaultCode::NotFound => Exit::NotFound,
        FaultCode::CollectionExists | FaultCode::IdExists => Exit::Exists,
        FaultCode::Forbidden => Exit::Refused,
        FaultCode::Overloaded
        | FaultCode::DeadlineExceeded
        | FaultCode::MemoryNodeLost
        | FaultCode::RegionLost
        | FaultCode::StaleEpoch
        | FaultCode::NoOracle
        | FaultCode::Unavailable => Exit::Unavailable,
        FaultCode::RegionFull => Exit::Full,
        FaultCode::Corrupt | FaultCode::Internal => Exit::Failed,
    };
    (exit, name_of(code))
}

/// The code's name, as on the wire's JSON form.
fn name_of(code: FaultCode) -> String {
    match serde_json::to_value(code) {
        Ok(serde_json::Value::String(name)) => name,
        other => unreachable!("a fault code is a plain name, not {other:?}"),
    }
}

fn of_cluster(error: &ClusterError) -> (Exit, String) {
    match error {
        ClusterError::AlreadyUp(_) => (Exit::Exists, "already_up".into()),
        ClusterError::NotUp(_) => (Exit::NotFound, "not_up".into()),
        ClusterError::BadFile { .. } => (Exit::Input, "bad_input".into()),
        _ => (Exit::Failed, "failed".into()),
    }
}

/// Prints a failure to stderr.
pub(crate) fn report(json: bool, code: &str, message: &str) {
    if json {
        eprintln!("{}", json!({ "error": { "code": code, "message": message } }));
    } else {
        eprintln!("error: {message}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;
    use shine_common::ids::ExternalId;
    use shine_common::wire::Fault;

    #[track_caller]
    fn check(error: impl Into<anyhow::Error>, exit: Exit, name: &str) {
        let error = error.into().context("doing something");
        assert_eq!(classify(&error), (exit, name.into()), "{error:#}");
    }

    fn fault(code: FaultCode) -> ClientError {
        ClientError::Fault { node: "cn-0".into(), fault: Fault::new(code, "why") }
    }

    #[test]
    fn every_kind_of_failure_has_its_code() {
        check(fault(FaultCode::NotFound), Exit::NotFound, "not_found");
        check(fault(FaultCode::IdExists), Exit::Exists, "id_exists");
        check(fault(FaultCode::MemoryNodeLost), Exit::Unavailable, "memory_node_lost");
        check(fault(FaultCode::RegionLost), Exit::Unavailable, "region_lost");
        check(fault(FaultCode::RegionFull), Exit::Full, "region_full");
        check(fault(FaultCode::Forbidden), Exit::Refused, "forbidden");
        check(fault(FaultCode::BadRequest), Exit::Refused, "bad_request");
        check(ClientError::BadRequest("the list is empty".into()), Exit::Input, "bad_input");
        check(ClientError::GraphFile("a.graph: odd".into()), Exit::Input, "bad_input");
        check(fault(FaultCode::Corrupt), Exit::Failed, "corrupt");
        check(ClientError::NoComputeNode, Exit::Unavailable, "unavailable");
        let lost = Box::new(fault(FaultCode::MemoryNodeLost));
        let unknown =
            ClientError::InsertUnknown { collection: "c".into(), id: ExternalId::Num(1), cause: lost };
        check(unknown, Exit::Unknown, "outcome_unknown");
        check(ClusterError::NotUp(".shine".into()), Exit::NotFound, "not_up");
        check(ClusterError::AlreadyUp(".shine".into()), Exit::Exists, "already_up");
        check(BadInput("--k is 0".into()), Exit::Input, "bad_input");
        check(Unsound("c".into()), Exit::Failed, "unsound");
        check(Silent(vec!["cn-0".into()]), Exit::Unavailable, "unavailable");
        check(FileExists("a.graph".into()), Exit::Exists, "file_exists");
        check(TlsError::Exists { path: "ca.pem".into() }, Exit::Exists, "file_exists");
        check(anyhow::anyhow!("odd"), Exit::Failed, "failed");
        let io = std::fs::read("/nonexistent").context("reading").unwrap_err();
        check(io, Exit::Failed, "failed");
    }

    #[test]
    fn the_help_lists_every_code() {
        for exit in [
            Exit::Failed,
            Exit::Input,
            Exit::NotFound,
            Exit::Unavailable,
            Exit::Exists,
            Exit::Refused,
            Exit::Full,
            Exit::Unknown,
        ] {
            assert!(HELP.contains(&format!("\n  {}  ", exit as u8)), "{exit:?}");
        }
    }
}
