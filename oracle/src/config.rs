//! Options of `shine-oracle`: flags over a file, and their checked form.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use serde::{Deserialize, Serialize};
use shine_common::config::{ConfigError, LISTEN_DEFAULT, Problems, merge};

/// Bounds of the lease: below, a late wake-up marks members down; above, a dead one stays in the map too long.
const LEASE_MS: std::ops::RangeInclusive<u64> = 100..=600_000;

/// Membership, cluster map and catalogue of a shine cluster.
///
/// Prints one JSON line on stdout when it is ready, logs on stderr, and leaves cleanly on SIGTERM or SIGINT.
#[derive(Clone, Debug, Default, PartialEq, Parser, Serialize, Deserialize)]
#[command(name = "shine-oracle", version)]
#[command(
    after_help = "Example:\n  shine-oracle --name oracle-0 --listen 127.0.0.1:7000 --cert-dir certs/oracle-0 \
                        --state-dir /var/lib/shine"
)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Options {
    /// Name of this process; must be the certificate's [default: the certificate's]
    #[arg(long)]
    pub name: Option<String>,
    /// Address to be called at, ip:port [default: 127.0.0.1:0, any port of loopback]
    #[arg(long, value_name = "IP:PORT")]
    pub listen: Option<SocketAddr>,
    /// Directory with ca.pem, node.pem and node.key, made by `shine ca issue`
    #[arg(long, value_name = "DIR")]
    pub cert_dir: Option<PathBuf>,
    /// Directory that keeps the cluster's state; without it the state ends with the process
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Length of membership leases in milliseconds [default: 3000]
    #[arg(long, value_name = "MS")]
    pub lease_ms: Option<u64>,
    /// Log level or filter, such as info or info,quinn=warn [default: info]
    #[arg(long)]
    pub log: Option<String>,
    /// TOML file with any of these options; flags win
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,
}

/// Options that were checked.
#[derive(Clone, PartialEq, Debug)]
pub struct Config {
    /// Name that the certificate must have, if one was given.
    pub name: Option<String>,
    /// Address to listen on.
    pub listen: SocketAddr,
    /// Directory of the certificate.
    pub cert_dir: PathBuf,
    /// Directory of the state.
    pub state_dir: Option<PathBuf>,
    /// Length of leases.
    pub lease: Duration,
    /// Log filter.
    pub log: String,
}

impl Options {
    /// Lays the flags over the file that they name, and checks the result.
    ///
    /// # Errors
    /// What is wrong with the file, or all that is wrong with the values.
    pub fn load(self) -> Result<Config, ConfigError> {
        let merged: Self = merge(self.config.as_deref(), &self)?;
        Ok(merged.validate()?)
    }

    /// The checked form.
    ///
    /// # Errors
    /// All problems at once.
    pub fn validate(self) -> Result<Config, Problems> {
        let mut problems = Problems::new();
        let cert_dir = problems.need("cert-dir", self.cert_dir);
        let lease_ms = self.lease_ms.unwrap_or(3_000);
        problems.check(LEASE_MS.contains(&lease_ms), || {
            format!("--lease-ms {lease_ms}: expected {} to {} milliseconds", LEASE_MS.start(), LEASE_MS.end())
        });
        problems.into_result()?;
        Ok(Config {
            name: self.name,
            listen: self.listen.unwrap_or_else(|| LISTEN_DEFAULT.parse().expect("a socket address")),
            cert_dir: cert_dir.expect("checked above"),
            state_dir: self.state_dir,
            lease: Duration::from_millis(lease_ms),
            log: self.log.unwrap_or_else(|| "info".into()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_parsed_and_checked_together() {
        let parse = |args: &[&str]| Options::try_parse_from(args).unwrap();
        let config = parse(&["shine-oracle", "--cert-dir", "c", "--lease-ms", "500"]).load().unwrap();
        assert_eq!(
            (config.lease, config.listen.to_string()),
            (Duration::from_millis(500), "127.0.0.1:0".into())
        );
        assert_eq!(config.state_dir, None);
        let text = parse(&["shine-oracle", "--lease-ms", "1"]).load().unwrap_err().to_string();
        assert!(text.contains("--cert-dir is needed") && text.contains("--lease-ms 1"), "{text}");
    }
}
