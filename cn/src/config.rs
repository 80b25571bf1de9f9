//! Options of `shine-cn`: flags over a file, and their checked form.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use serde::{Deserialize, Serialize};
use shine_common::config::{ConfigError, LISTEN_DEFAULT, Problems, merge, parse_addresses};
use shine_common::metric::SimdLevel;

use crate::http::{CONNECTIONS_MAX, HttpConfig, Patience};
use crate::node::Limits;

/// Most threads.
const THREADS_MAX: usize = 256;
/// Most searches or inserts at once.
const IN_FLIGHT_MAX: usize = 65_536;
/// Bounds of the time that a request has.
const DEADLINE_MS: std::ops::RangeInclusive<u64> = 10..=600_000;
/// Bounds of the time for which another node's change may go unseen.
const STALENESS_MS: std::ops::RangeInclusive<u64> = 10..=600_000;

/// A compute node: searches and extends the graphs in the memory of a shine cluster's memory nodes.
///
/// It holds no data of its own. Prints one JSON line on stdout when it is ready, logs on stderr, and leaves cleanly on
/// SIGTERM or SIGINT.
#[derive(Clone, Debug, Default, PartialEq, Parser, Serialize, Deserialize)]
#[command(name = "shine-cn", version)]
#[command(
    after_help = "Example:\n  shine-cn --name cn-0 --listen 127.0.0.1:7200 --oracles 127.0.0.1:7000 --cert-dir certs/cn-0"
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
    /// Threads that search; one serves many queries at once [default: 1]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Instruction set of the distance kernels: scalar, avx2 or avx512 [default: the best that the CPU has]
    #[arg(long, value_name = "LEVEL")]
    pub simd: Option<String>,
    /// Searches that may run at once; one more is refused [default: 1024]
    #[arg(long, value_name = "N")]
    pub searches_max: Option<usize>,
    /// Inserts that may run at once; one more is refused [default: 128]
    #[arg(long, value_name = "N")]
    pub inserts_max: Option<usize>,
    /// Time in milliseconds for a request that names none [default: 2000]
    #[arg(long, value_name = "MS")]
    pub deadline_ms: Option<u64>,
    /// Longest time in milliseconds for which another node's change may go unseen [default: 1000]
    #[arg(long, value_name = "MS")]
    pub staleness_ms: Option<u64>,
    /// Address of the HTTP API, or off; outside of loopback it takes the three options that follow [default: 127.0.0.1:0]
    #[arg(long, value_name = "IP:PORT")]
    pub http: Option<String>,
    /// Certificate chain of the HTTP API, PEM
    #[arg(long, value_name = "FILE")]
    pub http_cert: Option<PathBuf>,
    /// Private key of that certificate, PEM
    #[arg(long, value_name = "FILE")]
    pub http_key: Option<PathBuf>,
    /// File with the key that HTTP requests must carry in the header api-key
    #[arg(long, value_name = "FILE")]
    pub http_api_key_file: Option<PathBuf>,
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

#[derive(Debug, thiserror::Error)]
#[error("'{0}' is not an address: expected ip:port, or off")]
struct HttpAddress(String);

/// Options that were checked.
#[derive(Clone, Debug)]
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
    /// Threads that search.
    pub threads: usize,
    /// Instruction set of the distance kernels.
    pub simd: SimdLevel,
    /// Bounds of the node.
    pub limits: Limits,
    /// Longest time for which another node's change may go unseen.
    pub staleness_bound: Duration,
    /// The HTTP API, unless it is off.
    pub http: Option<HttpConfig>,
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
        let threads = self.threads.unwrap_or(1);
        problems.check((1..=THREADS_MAX).contains(&threads), || {
            format!("--threads {threads}: expected 1 to {THREADS_MAX}")
        });
        let best = SimdLevel::detect();
        let simd = match self.simd {
            None => best,
            Some(text) => {
                let level = problems.take("simd", text.parse::<SimdLevel>()).unwrap_or(best);
                problems.check(level.is_available(), || {
                    format!("--simd {level}: this CPU has no more than {best}")
                });
                level
            }
        };
        let defaults = Limits::default();
        let mut in_flight = |option: &str, given: Option<usize>, default: usize| {
            let n = given.unwrap_or(default);
            problems.check((1..=IN_FLIGHT_MAX).contains(&n), || {
                format!("--{option} {n}: expected 1 to {IN_FLIGHT_MAX}")
            });
            n
        };
        let searches_max = in_flight("searches-max", self.searches_max, defaults.searches_max);
        let inserts_max = in_flight("inserts-max", self.inserts_max, defaults.inserts_max);
        let mut time =
            |option: &str, given: Option<u64>, default: u64, range: std::ops::RangeInclusive<u64>| {
                let ms = given.unwrap_or(default);
                problems.check(range.contains(&ms), || {
                    format!("--{option} {ms}: expected {} to {} milliseconds", range.start(), range.end())
                });
                Duration::from_millis(ms)
            };
        let deadline =
            time("deadline-ms", self.deadline_ms, defaults.deadline.as_millis() as u64, DEADLINE_MS);
        let staleness_bound = time("staleness-ms", self.staleness_ms, 1_000, STALENESS_MS);
        let http = match self.http.as_deref().unwrap_or(LISTEN_DEFAULT) {
            "off" => None,
            text => problems.take("http", text.parse::<SocketAddr>().map_err(|_| HttpAddress(text.into()))),
        };
        let http = http.map(|listen| {
            let tls = match (self.http_cert, self.http_key) {
                (Some(cert), Some(key)) => Some((cert, key)),
                (None, None) => None,
                _ => {
                    problems.check(false, || "--http-cert and --http-key: expected both or none".into());
                    None
                }
            };
            let api_key_file = self.http_api_key_file;
            problems.check(listen.ip().is_loopback() || tls.is_some() && api_key_file.is_some(), || {
                format!(
                    "--http {listen}: outside of loopback the HTTP API takes a certificate and a key: say --http-cert \
                     FILE, --http-key FILE and --http-api-key-file FILE, or listen on 127.0.0.1"
                )
            });
            HttpConfig { listen, tls, api_key_file, patience: Patience::default(), connections_max: CONNECTIONS_MAX }
        });
        problems.into_result()?;
        Ok(Config {
            name: self.name,
            listen,
            advertise: self.advertise,
            oracles: oracles.expect("checked above"),
            cert_dir: cert_dir.expect("checked above"),
            threads,
            simd,
            limits: Limits { searches_max, inserts_max, deadline, ..defaults },
            staleness_bound,
            http,
            link_mbit: self.link_mbit.unwrap_or(0),
            log: self.log.unwrap_or_else(|| "info".into()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Options {
        Options::try_parse_from(["shine-cn"].iter().chain(args)).unwrap()
    }

    #[test]
    fn defaults_are_those_of_the_help() {
        let config = parse(&["--cert-dir", "c", "--oracles", "127.0.0.1:7000"]).load().unwrap();
        assert_eq!((config.threads, config.simd), (1, SimdLevel::detect()));
        assert_eq!((config.limits.searches_max, config.limits.inserts_max), (1024, 128));
        assert_eq!((config.limits.deadline.as_millis(), config.staleness_bound.as_millis()), (2_000, 1_000));
        assert_eq!(config.listen.to_string(), "127.0.0.1:0");
        let scalar =
            parse(&["--cert-dir", "c", "--oracles", "127.0.0.1:7000", "--simd", "scalar"]).load().unwrap();
        assert_eq!(scalar.simd, SimdLevel::Scalar);
    }

    #[test]
    fn http_is_plain_on_loopback_only() {
        let load = |args: &[&str]| {
            let needed = ["--cert-dir", "c", "--oracles", "127.0.0.1:7000"];
            parse(&[&needed, args].concat()).load()
        };
        let http = load(&[]).unwrap().http.unwrap();
        assert_eq!(
            (http.listen.to_string(), http.tls, http.api_key_file),
            ("127.0.0.1:0".into(), None, None)
        );
        assert_eq!(load(&["--http=off"]).unwrap().http, None);
        let all = ["--http=0.0.0.0:6333", "--http-cert=c", "--http-key=k", "--http-api-key-file=a"];
        assert!(load(&all).unwrap().http.unwrap().tls.is_some());
        for (args, part) in [
            (&all[..1], "takes a certificate and a key: say --http-cert"),
            (&all[..3], "takes a certificate and a key"),
            (&["--http=[::]:1", "--http-api-key-file=a"], "takes a certificate and a key"),
            (&["--http-cert=c"], "expected both or none"),
            (&["--http=6333"], "expected ip:port, or off"),
        ] {
            let text = load(args).unwrap_err().to_string();
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn all_problems_are_told_at_once() {
        let options = parse(&[
            "--threads=0",
            "--simd=mmx",
            "--searches-max=0",
            "--inserts-max=100000",
            "--deadline-ms=1",
            "--staleness-ms=0",
            "--listen=0.0.0.0:0",
            "--oracles=nowhere",
        ]);
        let text = options.load().unwrap_err().to_string();
        for part in [
            "--cert-dir is needed",
            "--oracles",
            "--threads 0",
            "--simd: unknown simd level 'mmx'",
            "--searches-max 0",
            "--inserts-max 100000",
            "--deadline-ms 1",
            "--staleness-ms 0",
            "--advertise",
        ] {
            assert!(text.contains(part), "{text}: expected {part}");
        }
    }
}
