//! Which cluster a command is about: the flags, the environment, or the one that `shine up` left here.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use shine_client::{Client, ClientOptions};
use shine_common::config::parse_addresses;
use shine_common::net::tls::Identity;
use shine_sim::cluster::{ClusterError, ClusterFile};

use crate::exit::bad_input;

/// How to reach the cluster.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Cluster")]
pub(crate) struct Connection {
    /// Addresses of the oracles [default: those of the cluster in --dir]
    #[arg(long, global = true, env = "SHINE_ORACLES", value_name = "IP:PORT,..")]
    oracles: Option<String>,
    /// Folder with ca.pem, node.pem and node.key of a client or admin [default: that of the cluster in --dir]
    #[arg(long, global = true, env = "SHINE_CERT_DIR", value_name = "DIR")]
    cert_dir: Option<PathBuf>,
    /// Folder of a local cluster, as made by `shine up`
    #[arg(long, global = true, env = "SHINE_DIR", value_name = "DIR", default_value = ".shine")]
    pub(crate) dir: PathBuf,
    /// Time for a search, insert or look-up, in milliseconds [default: 2000; for an insert, and where many searches
    /// are made (--file, recall), 10000]
    #[arg(
        long,
        global = true,
        env = "SHINE_DEADLINE_MS",
        value_name = "MS",
        value_parser = clap::value_parser!(u32).range(1..=60_000)
    )]
    deadline_ms: Option<u32>,
    /// Time to reach an oracle, in milliseconds
    #[arg(
        long,
        global = true,
        env = "SHINE_CONNECT_MS",
        value_name = "MS",
        default_value_t = 5_000,
        value_parser = clap::value_parser!(u32).range(1..=60_000)
    )]
    connect_ms: u32,
}

/// Where a cluster is, and as whom to enter it.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    oracles: Vec<SocketAddr>,
    cert_dir: PathBuf,
}

impl Connection {
    fn place(&self) -> Result<Place> {
        // The file is only needed for what the flags do not say.
        let file = || {
            ClusterFile::read(&self.dir).map_err(|error| match error {
                ClusterError::NotUp(_) => anyhow::Error::new(error).context(
                    "no cluster is named: start one with `shine up`, or give --oracles and --cert-dir \
                     (or SHINE_ORACLES and SHINE_CERT_DIR)",
                ),
                other => other.into(),
            })
        };
        let oracles = match &self.oracles {
            Some(list) => parse_addresses(list).map_err(|why| bad_input(format!("--oracles: {why}")))?,
            None => file()?.oracles,
        };
        let cert_dir = match &self.cert_dir {
            Some(dir) => dir.clone(),
            None => file()?.admin_cert_dir,
        };
        Ok(Place { oracles, cert_dir })
    }

    /// Connects. Searches and look-ups have `deadline`, unless the flag says otherwise.
    async fn client(&self, deadline: Duration) -> Result<Client> {
        let place = self.place()?;
        let identity = Identity::load(&place.cert_dir)
            .with_context(|| format!("certificate in {}", place.cert_dir.display()))?;
        let mut options = ClientOptions {
            deadline,
            connect_deadline: Duration::from_millis(self.connect_ms.into()),
            ..ClientOptions::default()
        };
        if let Some(ms) = self.deadline_ms {
            options.deadline = Duration::from_millis(ms.into());
            options.insert_deadline = options.deadline;
        }
        Ok(Client::connect(&place.oracles, identity, options).await?)
    }
}

/// Time for each of many searches, of which none may fail: somebody waits for all of them.
const BATCH_DEADLINE: Duration = Duration::from_secs(10);

/// Runs `work` with a client, and says good-bye whatever comes of it.
pub(crate) fn with_client<T>(
    connection: &Connection,
    work: impl AsyncFnOnce(&Client) -> Result<T>,
) -> Result<T> {
    run(connection, ClientOptions::default().deadline, work)
}

/// As [`with_client`], for work that makes many searches.
pub(crate) fn with_batch_client<T>(
    connection: &Connection,
    work: impl AsyncFnOnce(&Client) -> Result<T>,
) -> Result<T> {
    run(connection, BATCH_DEADLINE, work)
}

fn run<T>(
    connection: &Connection,
    deadline: Duration,
    work: impl AsyncFnOnce(&Client) -> Result<T>,
) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("starting the runtime")?;
    runtime.block_on(async {
        let client = connection.client(deadline).await?;
        let outcome = work(&client).await;
        client.close().await;
        outcome
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::{Exit, classify};

    fn connection(dir: &std::path::Path, oracles: Option<&str>, cert_dir: Option<&str>) -> Connection {
        Connection {
            oracles: oracles.map(Into::into),
            cert_dir: cert_dir.map(Into::into),
            dir: dir.into(),
            deadline_ms: None,
            connect_ms: 5_000,
        }
    }

    #[test]
    fn flags_win_over_the_local_cluster_one_by_one() {
        let dir = tempfile::tempdir().unwrap();
        let file = r#"{"oracles": ["127.0.0.1:7001"], "admin_cert_dir": "/a", "client_cert_dir": "/c", "nodes": []}"#;
        std::fs::write(dir.path().join(shine_sim::cluster::CLUSTER_FILE), file).unwrap();
        let place = |oracles, cert_dir| connection(dir.path(), oracles, cert_dir).place().unwrap();
        let expected = |port: u16, cert_dir: &str| Place {
            oracles: vec![format!("127.0.0.1:{port}").parse().unwrap()],
            cert_dir: cert_dir.into(),
        };
        assert_eq!(place(None, None), expected(7001, "/a"));
        assert_eq!(place(Some("127.0.0.1:9"), None), expected(9, "/a"));
        assert_eq!(place(None, Some("/x")), expected(7001, "/x"));
        assert_eq!(place(Some("127.0.0.1:9"), Some("/x")), expected(9, "/x"));
    }

    #[test]
    fn no_cluster_is_not_found_and_a_bad_address_is_input() {
        let dir = tempfile::tempdir().unwrap();
        let error = connection(dir.path(), None, None).place().unwrap_err();
        assert_eq!(classify(&error), (Exit::NotFound, "not_up".into()), "{error:#}");
        assert!(format!("{error:#}").contains("shine up"), "{error:#}");
        let error = connection(dir.path(), Some("nonsense"), Some("/x")).place().unwrap_err();
        assert_eq!(classify(&error).0, Exit::Input, "{error:#}");
        assert!(format!("{error:#}").contains("--oracles"), "{error:#}");
    }
}
