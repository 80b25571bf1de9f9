//! Options of `shine-mn`: flags over a file, and their checked form.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use serde::{Deserialize, Serialize};
use shine_common::config::{ByteSize, ConfigError, LISTEN_DEFAULT, Problems, merge, parse_addresses};
use shine_common::ids::RemotePtr;
use shine_common::verbs::memory::HugePages;

/// Size of a region unless told otherwise.
const REGION_BYTES_DEFAULT: u64 = 64 << 20;
/// Regions offered unless told otherwise.
const REGIONS_DEFAULT: u16 = 16;
/// Smallest region that an oracle takes.
const REGION_BYTES_MIN: u64 = 1 << 20;
/// Bounds of the access lease: below, a busy moment ends sessions; above, locks of a dead node stay too long.
const LEASE_MS: std::ops::RangeInclusive<u64> = 100..=600_000;
/// Most threads.
const THREADS_MAX: usize = 256;

/// A memory node: serves regions of its memory to the compute nodes of a shine cluster.
///
/// Content lives in memory only: it is gone when the process ends. Prints one JSON line on stdout when it is ready,
/// logs on stderr, and leaves cleanly on SIGTERM or SIGINT.
#[derive(Clone, Debug, Default, PartialEq, Parser, Serialize, Deserialize)]
#[command(name = "shine-mn", version)]
#[command(
    after_help = "Example:\n  shine-mn --name mn-0 --listen 127.0.0.1:7100 --oracles 127.0.0.1:7000 --cert-dir certs/mn-0 \
                        --regions 32 --region-bytes 64MiB"
)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Options {
    /// Name of this process; must be the certificate's [default: the certificate's]
    #[arg(long)]
    pub name: Option<String>,
    /// Address to be called at, ip:port [default: 127.0.0.1:0, any port of loopback]
    #[arg(long, value_name = "IP:PORT")]
    pub listen: Option<SocketAddr>,
    /// Address that others shall use, where it is not the one listened on
    #[arg(long, value_name = "IP:PORT")]
    pub advertise: Option<SocketAddr>,
    /// Addresses of the oracles, separated by commas
    #[arg(long, value_name = "HOST:PORT,...")]
    pub oracles: Option<String>,
    /// Directory with ca.pem, node.pem and node.key, made by `shine ca issue`
    #[arg(long, value_name = "DIR")]
    pub cert_dir: Option<PathBuf>,
    /// Number of regions to offer [default: 16]
    #[arg(long, value_name = "N")]
    pub regions: Option<u16>,
    /// Size of each region, such as 64MiB; memory is taken when it is first written [default: 64MiB]
    #[arg(long, value_name = "BYTES")]
    pub region_bytes: Option<ByteSize>,
    /// Pages of regions: off, transparent, or reserved (vm.nr_hugepages) [default: transparent]
    #[arg(long, value_name = "WHICH", value_parser = parse_huge_pages)]
    pub huge_pages: Option<HugePages>,
    /// Threads that serve [default: 1]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Access lease of a compute node in milliseconds [default: 3000]
    #[arg(long, value_name = "MS")]
    pub access_lease_ms: Option<u64>,
    /// Bound on what the process sends and receives, in Mbit/s, for experiments; 0 is none [default: 0]
    #[arg(long, value_name = "N")]
    pub link_mbit: Option<u64>,
    /// Log level or filter, such as info or info,quinn=warn [default: info]
    #[arg(long)]
    pub log: Option<String>,
    /// TOML file with any of these options; flags win
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,
}

fn parse_huge_pages(text: &str) -> Result<HugePages, String> {
    match text {
        "off" => Ok(HugePages::Off),
        "transparent" => Ok(HugePages::Transparent),
        "reserved" => Ok(HugePages::Reserved),
        other => Err(format!("'{other}': expected off, transparent or reserved")),
    }
}

/// Options that were checked.
#[derive(Clone, PartialEq, Debug)]
pub struct Config {
    /// Name that the certificate must have, if one was given.
    pub name: Option<String>,
    /// Address to listen on.
    pub listen: SocketAddr,
    /// Address that others shall use, if not that one.
    pub advertise: Option<SocketAddr>,
    /// Oracles.
    pub oracles: Vec<SocketAddr>,
    /// Directory of the certificate.
    pub cert_dir: PathBuf,
    /// Number of regions.
    pub regions: u16,
    /// Bytes of each.
    pub region_bytes: u64,
    /// Their pages.
    pub huge_pages: HugePages,
    /// Threads that serve.
    pub threads: usize,
    /// Lease of access sessions.
    pub access_lease: Duration,
    /// Bound of the link, 0 for none.
    pub link_mbit: u64,
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
        let oracles = problems.need("oracles", self.oracles);
        let oracles = oracles.and_then(|list| problems.take("oracles", parse_addresses(&list)));
        let listen = self.listen.unwrap_or_else(|| LISTEN_DEFAULT.parse().expect("a socket address"));
        problems.check(self.advertise.is_some() || !listen.ip().is_unspecified(), || {
            format!(
                "--listen {listen}: others cannot call that; say --advertise IP:PORT with the address to use"
            )
        });
        let callable = |addr: SocketAddr| addr.port() != 0 && !addr.ip().is_unspecified();
        problems.check(self.advertise.is_none_or(callable), || {
            "--advertise: expected an address and port that others can call".into()
        });
        let regions = self.regions.unwrap_or(REGIONS_DEFAULT);
        problems.check(regions > 0, || "--regions 0: expected 1 to 65535".into());
        let region_bytes = self.region_bytes.unwrap_or(ByteSize(REGION_BYTES_DEFAULT));
        let sizes = REGION_BYTES_MIN..=RemotePtr::OFFSET_MAX;
        problems.check(sizes.contains(&region_bytes.0) && region_bytes.0.is_multiple_of(4096), || {
            format!("--region-bytes {region_bytes}: expected a multiple of 4KiB, from 1MiB on")
        });
        let threads = self.threads.unwrap_or(1);
        problems.check((1..=THREADS_MAX).contains(&threads), || {
            format!("--threads {threads}: expected 1 to {THREADS_MAX}")
        });
        let lease_ms = self.access_lease_ms.unwrap_or(3_000);
        problems.check(LEASE_MS.contains(&lease_ms), || {
            format!(
                "--access-lease-ms {lease_ms}: expected {} to {} milliseconds",
                LEASE_MS.start(),
                LEASE_MS.end()
            )
        });
        problems.into_result()?;
        Ok(Config {
            name: self.name,
            listen,
            advertise: self.advertise,
            oracles: oracles.expect("checked above"),
            cert_dir: cert_dir.expect("checked above"),
            regions,
            region_bytes: region_bytes.0,
            huge_pages: self.huge_pages.unwrap_or_default(),
            threads,
            access_lease: Duration::from_millis(lease_ms),
            link_mbit: self.link_mbit.unwrap_or(0),
            log: self.log.unwrap_or_else(|| "info".into()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Options {
        Options::try_parse_from(["shine-mn"].iter().chain(args)).unwrap()
    }

    #[test]
    fn defaults_are_those_of_the_help() {
        let config = parse(&["--cert-dir", "c", "--oracles", "127.0.0.1:7000"]).load().unwrap();
        assert_eq!((config.regions, config.region_bytes, config.threads), (16, 64 << 20, 1));
        assert_eq!(config.access_lease, Duration::from_secs(3));
        assert_eq!(config.huge_pages, HugePages::Transparent);
        assert_eq!(config.listen.to_string(), "127.0.0.1:0");
    }

    #[test]
    fn all_problems_are_told_at_once() {
        let options = parse(&[
            "--regions=0",
            "--region-bytes=1000",
            "--threads=0",
            "--access-lease-ms=5",
            "--listen=0.0.0.0:0",
            "--oracles=nowhere",
        ]);
        let text = options.load().unwrap_err().to_string();
        for part in [
            "--cert-dir is needed",
            "--oracles",
            "--regions 0",
            "--region-bytes 1000",
            "--threads 0",
            "--access-lease-ms 5",
            "--advertise",
        ] {
            assert!(text.contains(part), "{text}: expected {part}");
        }
        assert!(Options::try_parse_from(["shine-mn", "--huge-pages", "some"]).is_err());
    }
}
